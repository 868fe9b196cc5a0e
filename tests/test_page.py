"""Pages of generate.py --export_page: what they draw in Chromium, beside the program; and what they say when damaged."""
import base64
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

import generate
import unet_io
from browser import CHROMIUM, Browser
from harness import (ROOT, SMALL, TOY, TRAIN, call, checkpoint_in, perturbed_file, picture, refused, run, same_bits,
                     start_flags, wait_until)
from unet_io import Config

SCREENSHOTS = ROOT / "build/screenshots"
FLOW = TOY | dict(noise_schedule="flow", predict="flow")
CLASSES = dict(class_cond=True, num_classes=3, cond_drop_prob=0.1)
PAGES = {  # name: (config, flags of what it draws)
    "consistency": (Config(**FLOW | dict(image_size=16, consistency=True)), []),
    "grey, guided": (Config(**TOY | CLASSES | dict(in_channels=1, predict="v")),
                     ["--guidance_scale", 3, "--sampler", "heun", "--sample_steps", 5]),
    "adm, learned variance": (Config(**TOY | CLASSES | dict(
        predict="v", learn_sigma=True, resblock_updown=True, use_scale_shift_norm=True, num_heads=4,
        use_new_attention_order=False)), ["--sampler", "ddpm", "--sample_steps", 6]),
    "ddim, eta": (Config(**TOY | dict(predict="x0", zero_terminal_snr=True)), ["--eta", 0.6, "--sample_steps", 9]),
    "edm": (Config(**TOY | dict(image_size=16, noise_schedule="edm", predict="edm", conv_resample=True)),
            ["--sampler", "dpmpp", "--spacing", "karras", "--sample_steps", 7, "--threshold", "none"]),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("there is no chromium (Debian: chromium), in which pages are opened")
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def is_drawn(browser):
    """Wait until a page has drawn what its controls say, or has failed; returns whether it has drawn."""
    browser.wait("['done', 'failed'].includes(document.body?.dataset.state)")
    return browser.evaluate("document.body.dataset.state") == "done"


def grid(browser):
    """The pixels of a page's pictures: int (N, H, W, 3)."""
    drawn = browser.evaluate("""[...document.querySelectorAll("#grid canvas")].map(canvas => [canvas.width,
        Array.from(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data)])""")
    pixels = np.array([data for _, data in drawn]).reshape(len(drawn), drawn[0][0], drawn[0][0], 4)
    assert (pixels[..., 3] == 255).all()
    return pixels[..., :3]


def change(browser, **values):
    """Set controls of a page as a hand would, one after the other; it has drawn anew when this returns."""
    for name, value in values.items():
        browser.evaluate(f"""find("{name}").value = {json.dumps(value)};
            find("{name}").dispatchEvent(new Event("input", {{ bubbles: true }}))""")
        assert is_drawn(browser)


def page_of(folder, config, *flags, class_names=()):
    """Write PAGE.html of a network with random weights, and the weights that it draws with as page.bin: the page's path."""
    perturbed_file(folder / "w.bin", config)
    if class_names:
        checkpoint = unet_io.read_checkpoint(folder / "w.bin")
        checkpoint.sections |= unet_io.class_section(class_names)
        unet_io.write_checkpoint(folder / "w.bin", checkpoint)
    assert call(generate, "--model_weights", folder / "w.bin", "--export_page", folder / "page.html", *flags) == ""
    assert call(generate, "--import", folder / "page.html") == ""
    return folder / "page.html"


def drawn_by_the_program(weights, *flags):
    """./train_unet's pictures, int (N, H, W, 3)."""
    name = weights.parent / "drawn.npy"
    run(TRAIN, "--generate", "--model_weights", weights, "--output_name", name, *flags)
    pixels = np.moveaxis(unet_io.to_uint8(np.load(name)), 1, -1).astype(int)
    return np.broadcast_to(pixels, (*pixels.shape[:3], 3))


def difference(a, b):
    """The largest difference of pixel values of 255, of pictures that differ from each other."""
    assert a.shape == b.shape and a[0].std() > 5 and (a[0] != a[-1]).any()
    return np.abs(a - b).max()


def rewritten(page, change):
    """Write a page beside this one whose model has gone through change(held); returns its path."""
    text = page.read_text()
    model = unet_io.import_from_dev("web/page").MODEL.search(text)
    held = json.loads(model[1])
    change(held)
    target = page.with_name("changed.html")
    target.write_text(text[:model.start(1)] + json.dumps(held) + text[model.end(1):])
    return target


@pytest.mark.parametrize("name", PAGES)
def test_pictures(tmp_path, browser, name):
    """A page draws the program's pictures, with the same weights."""
    config, flags = PAGES[name]
    page = page_of(tmp_path, config, *flags)
    browser.open(page)
    assert is_drawn(browser) and browser.complaints() == []
    assert difference(grid(browser), drawn_by_the_program(tmp_path / "page.bin", *flags)) <= 2


def test_rounded_weights(tmp_path, images8):
    """Pictures of a trained network with a page's weights, int8 and bfloat16, differ by 2 of 255 at most, on average."""
    config = Config(**FLOW | dict(batch_size=8, lr=2e-3))
    run(TRAIN, *start_flags(config, images8, tmp_path / "run", 300, sample_every=0))
    weights = checkpoint_in(tmp_path / "run", 300)
    assert call(generate, "--model_weights", weights, "--export_page", tmp_path / "page.html") == ""
    assert call(generate, "--import", tmp_path / "page.html") == ""
    exact = drawn_by_the_program(weights)
    rounded = drawn_by_the_program(tmp_path / "page.bin")
    error = np.abs(exact - rounded).mean()
    print(f"mean difference {error:.2f} of 255, largest {np.abs(exact - rounded).max()}")
    assert 0 < error <= 2


def test_pack():
    """A packed weight is off by half a scale at most, and by what bfloat16 rounds; zeros and large numbers stay."""
    page = unet_io.import_from_dev("web/page")
    rng = np.random.default_rng(0)
    convolution = rng.standard_normal((5, 7, 3, 3)).astype(np.float32) * 10.0 ** rng.integers(-30, 30, (5, 1, 1, 1))
    convolution = convolution.astype(np.float32)
    convolution[2] = 0
    back = page.unpack(page.pack(convolution), convolution.shape).reshape(convolution.shape)
    scales = np.abs(convolution).max((1, 2, 3)) / 127
    assert (np.abs(back - convolution) <= 0.503 * scales[:, None, None, None]).all() and (back[2] == 0).all()
    matrix = rng.standard_normal((5, 7)).astype(np.float32)
    back = page.unpack(page.pack(matrix), matrix.shape).reshape(matrix.shape)
    assert (np.abs(back - matrix) <= 2.0**-8 * np.abs(matrix)).all() and (back != matrix).any()
    for values in (convolution, matrix, matrix[0]):
        assert len(page.pack(values)) == page.packed_size(values.shape)


def test_import(tmp_path):
    """A page tells its network, its names of classes and its step, and packs the weights that it told once more alike."""
    config = Config(**TOY | CLASSES | dict(predict="v", seed=3))
    page = page_of(tmp_path, config, class_names=("cat", "</script><b>", "d\u00f6g"))
    read = unet_io.read_checkpoint(tmp_path / "page.bin")
    assert read.class_names == ("cat", "</script><b>", "d\u00f6g") and read.config.num_classes == 3
    before = unet_io.read_checkpoint(tmp_path / "w.bin")
    assert dataclasses.replace(read.config, seed=3, batch_size=before.config.batch_size) == before.config
    assert call(generate, "--model_weights", tmp_path / "page.bin", "--export_page", tmp_path / "again.html") == ""
    assert call(generate, "--model_weights", tmp_path / "again.html", "--export", tmp_path / "again.bin") == ""
    assert same_bits(unet_io.read_checkpoint(tmp_path / "again.bin").sections["weights"], read.sections["weights"])


def test_controls(tmp_path, browser):
    """Seed, class, steps, sampler, number of pictures, and the way to other pictures, as the program draws them."""
    config = Config(**FLOW | CLASSES | dict(image_size=16))
    page = page_of(tmp_path, config, "--sample_steps", 3, class_names=("cat", "dog", "owl"))
    browser.open(page)
    assert is_drawn(browser)
    options = browser.evaluate("[...find('class').options].map(option => option.text)")
    assert options == ["all", "cat", "dog", "owl"]

    change(browser, seed="40", **{"class": "1"}, sampler="dpmpp", steps="4", guidance="2.5", count="9")
    flags = ["--num_samples", 9, "--seed", 40, "--class", "dog", "--sampler", "dpmpp", "--sample_steps", 4,
             "--guidance_scale", 2.5]
    assert difference(grid(browser), drawn_by_the_program(tmp_path / "page.bin", *flags)) <= 2

    change(browser, other="7", part="0.5", count="1")
    assert call(generate, "--model_weights", tmp_path / "page.bin", "--seeds", "40,7", "--interpolate", 3, "--class", "dog",
                "--sampler", "dpmpp", "--sample_steps", 4, "--guidance_scale", 2.5, "--device", "cpu",
                "--output_name", tmp_path / "way.npz") == ""
    middle = np.load(tmp_path / "way.npz")["arr_0"][1].astype(int)
    assert np.abs(grid(browser)[0] - middle).max() <= 2 and middle.std() > 5
    assert browser.evaluate("find('grid').children[0].title") == "from seed 40 to seed 7, 50%, dog"
    assert browser.complaints() == []


def test_what_it_shows(tmp_path, browser):
    """While it draws a page shows x, or the predicted x0: at first this is the picture that one step draws."""
    browser.open(page_of(tmp_path, Config(**FLOW | dict(image_size=16)), "--sample_steps", 4))
    assert is_drawn(browser)
    browser.evaluate("painted = []; paint = (first, pixels) => painted.push([first, [...pixels]])")

    def painted(**values):
        browser.evaluate("painted.length = 0")
        change(browser, **values)
        return [np.array(pixels) for first, pixels in browser.evaluate("painted") if first == 0]
    x, x0, alone = painted(shows="x"), painted(shows="x0"), painted(steps="1")
    assert len(x) == len(x0) == 4 and len(alone) == 1
    assert (x[-1] == x0[-1]).all() and (x0[0] == alone[0]).all()
    assert (x[0] != x0[0]).mean() > 0.3


def test_keys(tmp_path, browser):
    """Every control is reached with Tab, a slider moves with the arrows, and a picture is chosen with Enter."""
    browser.open(page_of(tmp_path, Config(**FLOW | SMALL), "--sample_steps", 2))
    assert is_drawn(browser)

    def press(key):
        text = dict(text="\r") if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            browser.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text if kind == "keyDown" else {},
                            windowsVirtualKeyCode=dict(Tab=9, Enter=13, ArrowRight=39)[key])
    press("Tab")
    press("Enter")
    assert browser.evaluate("document.activeElement === find('grid').children[0]")
    assert browser.evaluate("find('grid').children[0].getAttribute('aria-pressed')") == "true"
    reached = []
    while "save" not in reached:
        press("Tab")
        reached.append(browser.evaluate("document.activeElement.id"))
        if reached[-1] == "steps":
            press("ArrowRight")
            assert is_drawn(browser) and browser.evaluate("find('steps').value") == "3"
    controls = ["seed", "fresh", "steps", "sampler", "part", "other", "count", "shows", "save"]
    assert [name for name in reached if name] == controls


def test_saved_pictures(tmp_path, browser):
    """A picture and the whole grid as PNGs that tell model, seed and settings."""
    browser.open(page_of(tmp_path, Config(**TOY | CLASSES), "--sample_steps", 2, class_names=("cat", "d\u00f6g", "owl")))
    assert is_drawn(browser)
    (tmp_path / "saved").mkdir()
    browser.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))

    def saved():
        before = set(os.listdir(tmp_path / "saved"))
        browser.evaluate("find('save').click()")

        def whole():
            """The new PNG, once its last chunk is there: a browser may show a download's name before its bytes."""
            new = set(os.listdir(tmp_path / "saved")) - before
            paths = [tmp_path / "saved" / name for name in new if name.endswith(".png")]
            return [path for path in paths if path.read_bytes()[-8:-4] == b"IEND"]
        wait_until(whole, browser.process)
        return whole()[0]

    pixels, path = grid(browser), saved()
    assert picture(path).shape[:2] == (42, 42) and (picture(path)[2:10, 2:10, :3] == pixels[0]).all()
    browser.evaluate("find('grid').children[8].click()")
    path = saved()
    with Image.open(path) as image:
        assert image.text["Seed"] == "seed 8, d\u00f6g" and image.text["Model"].startswith("page, step 0, weights ")
        assert image.text["Settings"] == "--sampler ddim --eta 0 --sample_steps 2 --guidance_scale 1"
        assert (np.asarray(image)[..., :3] == pixels[8]).all()


def change_weights(change):
    """What changes the weights that a page holds, and makes the checksum right again."""
    def work(held):
        weights = bytearray(base64.b64decode(held["weights"]))
        change(weights)
        held["weights"] = base64.b64encode(weights).decode()
        held["crc32"] = zlib.crc32(weights)
    return work


def set_nan(weights):
    weights[2:4] = b"\xc0\x7f"


DAMAGE = {  # name: (what is done to the model, what the page says, what --import says)
    "short": (change_weights(lambda weights: weights.pop()), "its weights are damaged: they have", "is damaged"),
    "other": (lambda held: held.update(crc32=1), "their checksum does not match", "is damaged"),
    "NaN": (change_weights(set_nan), "hold NaN or infinity in time_embed.0.weight", "holds NaN or infinity"),
    "no base64": (lambda held: held.update(weights="!"), "its model can't be read", "or is damaged"),
    "no weights": (lambda held: held.pop("weights"), "its model can't be read", "or is damaged"),
    "unknown setting": (lambda held: held.update(config=held["config"] + "depth_of_field = 3\n"),
                        "there is no flag --depth_of_field", "depth_of_field"),
    "impossible": (lambda held: held.update(config=held["config"] + "norm_groups = 64\n"),
                   "--norm_groups 64 must divide", "64"),
    "network": (lambda held: held.update(network="AAAA"), "its network needs WebAssembly with SIMD", ""),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged(tmp_path, browser, name):
    """A damaged page says in a sentence what is wrong, and throws nothing into the console."""
    change, said, refusal = DAMAGE[name]
    page = rewritten(page_of(tmp_path, Config(**SMALL)), change)
    browser.open(page)
    assert not is_drawn(browser)
    assert said in browser.evaluate("find('message').textContent") and browser.complaints() == []
    controls = "[...find('controls').querySelectorAll('input, select, button')]"
    assert browser.evaluate(f"{controls}.every(control => control.disabled)")
    if refusal:  # generate.py does not look at the network
        assert refusal in call(generate, "--import", page, "--export", tmp_path / "new.bin")


def test_refused(tmp_path):
    """What --export_page refuses, before it writes anything."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    for flags, says in ((["page.htm"], "must end in .html"), (["no/page.html"], "does not exist"),
                        (["page.html", "--export", "x.bin"], "leave --import and --export out"),
                        (["page.html", "--threshold", "dynamic"], "without --threshold dynamic"),
                        (["page.html", "--guide_weights", "w.bin", "--seed", "0", "--class=bag"],
                         "--export_page draws no pictures: leave --seed, --class and --guide_weights out"),
                        (["page.html", "--guidance_scale", "2"], "learnt to draw"),
                        (["page.html", "--sample_steps", "1001"], "between 1 and the 1000 steps")):
        name, *rest = flags
        refused(sys.executable, ROOT / "generate.py", "--model_weights", tmp_path / "w.bin",
                "--export_page", tmp_path / name, *rest, says=says, cwd=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["w.bin"]


def test_steps_of_paths(tmp_path, browser):
    """A tuned model's page begins with the steps that it was told. The consistency sampler has those that it was tuned for."""
    config = Config(**FLOW | dict(consistency=True, path_steps=6))
    page = page_of(tmp_path, config, "--sampler", "ddim", "--sample_steps", 60)
    browser.open(page)
    assert is_drawn(browser) and browser.evaluate("[find('steps').value, find('steps').max]") == ["60", "60"]
    change(browser, sampler="consistency")
    assert browser.evaluate("[find('steps').value, find('steps').max]") == ["2", "2"]
    assert unet_io.read_checkpoint(tmp_path / "page.bin").config.consistency_steps == 2
    assert "7 is more than --consistency_steps 2" in call(
        generate, "--model_weights", tmp_path / "w.bin", "--export_page", tmp_path / "x.html", "--sample_steps", 7)
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("scale", ["0", "1.6", "2.25", "10", "11.05"])
def test_guidance_of_a_page(tmp_path, browser, scale):
    """A page begins with the guidance that it was told, wherever that lies."""
    page = page_of(tmp_path, Config(**SMALL | CLASSES), "--guidance_scale", scale, "--sample_steps", 1)
    browser.open(page)
    assert is_drawn(browser) and browser.evaluate("find('guidance').value") == scale
    assert browser.complaints() == []


SHIPPED = sorted((ROOT / "data").glob("*.html"))


@pytest.mark.parametrize("page", SHIPPED, ids=lambda page: page.stem)
def test_shipped(tmp_path, browser, page):
    """A page in data/ is small and draws what ./train_unet draws with the .bin of its name; screenshots of it."""
    assert page.stat().st_size < 2e6
    browser.open(page)
    assert is_drawn(browser) and browser.complaints() == []
    shutil.copy(page, tmp_path / "page.html")
    assert call(generate, "--import", tmp_path / "page.html") == ""
    run("make", f"data/{page.stem}.bin", cwd=ROOT)
    stored = unet_io.read_checkpoint(page.with_suffix(".bin"))
    assert same_bits(unet_io.read_checkpoint(tmp_path / "page.bin").sections["weights"], stored.sections["weights"])
    sampling = browser.evaluate("[find('sampler').value, find('steps').value, find('guidance').value]")
    flags = [word for name, value in zip(("sampler", "sample_steps", "guidance_scale"), sampling)
             for word in (f"--{name}", value)]
    if not stored.config.class_cond:
        flags = flags[:4]
    shutil.copy(page.with_suffix(".bin"), tmp_path)
    assert difference(grid(browser), drawn_by_the_program(tmp_path / f"{page.stem}.bin", *flags)) <= 2

    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for kind, width, height, scheme in (("light", 1100, 800, "light"), ("dark", 1100, 800, "dark"),
                                        ("phone", 390, 844, "light")):
        browser.screenshot(SCREENSHOTS / f"{page.stem}_{kind}.png", width, height, scheme)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), kind
    light, dark = (picture(SCREENSHOTS / f"{page.stem}_{kind}.png")[-1, 0].mean() for kind in ("light", "dark"))
    assert light > 200 and dark < 60


def test_hash_of_module():
    """dev/web/page.wasm is whole: it has the hash that its Makefile wrote beside it."""
    found = hashlib.sha256((ROOT / "dev/web/page.wasm").read_bytes()).hexdigest()
    assert (ROOT / "dev/web/page.wasm.sha256").read_text() == f"{found}  page.wasm\n"


def test_module(tmp_path):
    """dev/web/page.wasm is what its Makefile makes of the program as it is."""
    if not shutil.which("clang++-19"):
        pytest.skip("there is no clang++-19, which compiles dev/web/page.wasm: see dev/web/Makefile")
    (tmp_path / "dev/web").mkdir(parents=True)
    for name in ("train_unet.cu", "unet_io.h", "unet_cpu.h", "dev/web/page.cc", "dev/web/Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    run("make", "-C", tmp_path / "dev/web")
    same = (tmp_path / "dev/web/page.wasm").read_bytes() == (ROOT / "dev/web/page.wasm").read_bytes()
    assert same, "the program has changed what new pages run: make -C dev/web"
