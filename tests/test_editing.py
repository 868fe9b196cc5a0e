"""Drawing by another model's guidance, from a picture (SDEdit), around one (RePaint), by classes' names."""
import collections
import functools
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import generate
import prepare_data
import train_unet
import unet_io
from harness import (
    ROOT, SMALL, TOY, TRAIN, call, checkpoint_in, error_of, perturbed_file, picture, refused, run, same_bits,
    start_flags, write_earlier_version, write_toy_images)
from train_unet import Edit, sample, visited_levels
from unet_io import Config, Stream

SEEDS, V = [5, 4000000000], Config(**TOY | dict(predict="v", diffusion_steps=300))
CLASSES = TOY | dict(predict="v", class_cond=True, num_classes=3)


class Perfect:
    """The best network for pixels that are N(0.3, 0.5^2) each, but that shift and class move its x0."""
    def __init__(self, config, shift=0.0):
        self.config, self.shift = config, shift
        self.abar = unet_io.alphas_bar(config.diffusion_steps, config.noise_schedule)

    def __call__(self, x, t, y=None):
        a = self.abar[int(t[0])]
        x0 = 0.3 + self.shift + 0.25 * np.sqrt(a) / (0.25 * a + 1 - a) * (x.double() - 0.3 * np.sqrt(a))
        x0 = x0 if y is None else x0 + 0.1 * y[:, None, None, None]
        v = np.sqrt(a) * (x - np.sqrt(a) * x0) / np.sqrt(1 - a) - np.sqrt(1 - a) * x0
        return torch.cat([v, torch.sin(3 * x.double()) + self.shift], 1) if self.config.learn_sigma else v


def image(seed=0, channels=3, size=8):
    return torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, (channels, size, size)).astype("f4"))


def half_mask(size=8):
    return (torch.arange(size) < size // 2).expand(1, size, size)


# ----------------------------------------------------------------------------------------------------
# guidance by another model

def test_guide():
    """weak + w (told - weak); where both are one model nothing changes, and with w = 0 the guide draws."""
    ours, guide = Perfect(V), Perfect(V, -0.2)
    how = dict(sample_steps=9, eta=0.5, threshold="none")
    plain, theirs = sample(ours, SEEDS, **how), sample(guide, SEEDS, **how)
    assert same_bits(sample(ours, SEEDS, **how, guidance_scale=3.0, guide=Perfect(V)), plain)
    assert same_bits(sample(ours, SEEDS, **how, guidance_scale=0.0, guide=guide), theirs)
    told = sample(ours, SEEDS, **how, guidance_scale=2.5, guide=guide)
    assert error_of(told, sample(Perfect(V, 1.5 * 0.2), SEEDS, **how)) < 1e-5
    none = dict(guidance_scale=2.5, guidance_interval=(0.999, 1.0), guide=guide)
    assert same_bits(sample(ours, SEEDS, **how, **none), plain)


def test_guide_and_classes():
    """Both are told the class, where they know classes; what is said of the variance is the model's."""
    config = Config(**CLASSES | dict(learn_sigma=True, diffusion_steps=60))
    plain = Config(**TOY | dict(predict="v", diffusion_steps=60))
    how = dict(sampler="ddpm", classes=[2, 1], threshold="none")
    ours = Perfect(config)
    assert same_bits(sample(ours, SEEDS, **how, guidance_scale=4.0, guide=Perfect(config)),
                     sample(ours, SEEDS, **how))
    for guide, same in ((Perfect(config, 0.3), (-0.3, 0.0)), (Perfect(plain, 0.3), (-0.3, 0.1))):
        class Expected(Perfect):  # 2 told - weak; a guide without classes lets them count twice
            def __call__(self, x, t, y):
                shifted = super().__call__(x, t, (1 + 10 * same[1]) * y)
                return torch.cat([shifted[:, :3], torch.sin(3 * x.double())], 1)
        told = sample(ours, SEEDS, **how, guidance_scale=2.0, guide=guide)
        assert error_of(told, sample(Expected(config, same[0]), SEEDS, **how)) < 1e-5


# ----------------------------------------------------------------------------------------------------
# from a picture

def test_strength():
    """Whatever the strength: the exact flow from the noised picture on, at the sampler's order."""
    config = Config(**TOY | dict(diffusion_steps=4000, predict="v", noise_schedule="cosine"))
    network, x0 = Perfect(config), image()
    z = train_unet.seed_noise(SEEDS, (3, 8, 8)).double()
    for sampler, least, most in (("ddim", 1.9, 2.1), ("dpmpp", 3, 6), ("heun", 3.7, 7)):
        errors = []
        for steps in (100, 200):
            kept = [t for t in unet_io.space_timesteps(4000, steps) if t < 0.6 * 4000]
            a = network.abar[kept[-1]]
            x = np.sqrt(a) * x0 + np.sqrt(1 - a) * z
            exact = 0.3 + 0.5 * (x - 0.3 * np.sqrt(a)) / np.sqrt(0.25 * a + 1 - a)
            drawn = sample(network, SEEDS, sampler, steps, threshold="none", edit=Edit(x0, 0.6),
                           spacing="uniform")
            errors.append(float((drawn - exact).abs().max()))
        print(sampler, errors)
        assert least < errors[0] / errors[1] < most and errors[1] < 0.03


def test_strength_and_start():
    """At 1 the whole chain from the noised picture; near 0 the picture; never without a timestep."""
    network, x0 = Perfect(V), image()
    a, z = network.abar[-1], train_unet.seed_noise(SEEDS, (3, 8, 8))
    start = (np.sqrt(a) * x0 + np.sqrt(1 - a) * z).float()
    for sampler in train_unet.SAMPLERS:
        ours, plain = (sample(network, SEEDS, sampler, 12, **more) for more in (
            dict(edit=Edit(x0, 1.0)), dict(start=start)))
        assert error_of(ours, plain) < 1e-5
        near = sample(network, SEEDS, sampler, 12, edit=Edit(x0, 1e-4), spacing="uniform")
        assert (near - x0).abs().max() < 0.1
        for mask in (None, half_mask()):
            same = sample(network, SEEDS, "ddim" if mask is not None else sampler, 12, edit=Edit(x0, 0.0, mask))
            assert same_bits(same, x0.expand(2, -1, -1, -1))
    for sampler, how in (("heun", dict(sample_steps=12)), ("ddim", dict(sample_steps=1))):
        with pytest.raises(unet_io.UserError, match="--strength 0.05 is less noise.*--sample_steps"):
            sample(network, SEEDS, sampler, edit=Edit(x0, 0.05), **how)
    calls = []  # 0.3 * 1000 and 0.7 * 1000 in fp32 are 300 and 700, which then are left out

    class Listening(Perfect):
        def __call__(self, x, t):
            calls.append(int(t[0]))
            return super().__call__(x, t)
    network = Listening(Config(**TOY | dict(predict="v")))
    for strength, count in ((0.3, 300), (0.7, 700), (0.301, 301), (1e-4, 1)):
        calls.clear()
        sample(network, [1], "ddim", 1000, edit=Edit(x0, strength))
        assert calls == list(range(count))[::-1]


# ----------------------------------------------------------------------------------------------------
# around a picture

@pytest.mark.parametrize("n, length, times", [(50, 10, 10), (50, 7, 3), (10, 10, 5), (11, 10, 2), (1, 1, 9),
                                              (250, 10, 10), (5, 1, 4), (9, 10**5, 7)])
def test_levels(n, length, times):
    """Every step down to the last place to jump from is made `times` times, and no other twice."""
    passed = visited_levels(n, length, times)
    steps = list(zip(passed, passed[1:]))
    assert passed[0] == n - 1 and passed[-1] == -1 and all(abs(i - j) == 1 for i, j in steps)
    down, up = (collections.Counter(i for i, j in steps if (j < i) == way) for way in (True, False))
    jumps = len(range(0, n - length, length))
    assert down == {t: times if 1 <= t <= jumps * length else 1 for t in range(n)}
    assert up == {t: times - 1 for t in range(jumps * length)}
    ups = "".join("u" if j > i else "d" for i, j in steps).replace("d", " ").split()
    assert all(len(run) % length == 0 for run in ups)  # jumps of one place may follow each other at once
    assert visited_levels(n, length, 1) == list(range(n - 1, -2, -1))


@pytest.mark.parametrize("sampler, eta, more", [("ddpm", 0, {}), ("ddim", 0, {}), ("ddim", 0.6, {}),
                                                ("ddpm", 0, dict(strength=0.5)),
                                                ("ddpm", 0, dict(jump_length=3, jump_n_sample=4))])
def test_masks(sampler, eta, more):
    """Algorithm 1 of RePaint, written once more; what is kept ends exactly as it was."""
    network, x0, mask = Perfect(V), image(), half_mask()
    edit = Edit(x0, mask=mask, **dict(jump_length=2, jump_n_sample=3) | more)
    drawn = sample(network, SEEDS, sampler, 10, eta=eta, edit=edit, threshold="none")
    assert same_bits(torch.where(mask, drawn, 0), torch.where(mask, x0, 0).expand(2, -1, -1, -1))
    kept = [t for t in unet_io.space_timesteps(300, 10) if t < edit.strength * 300]
    bar = [*network.abar[kept], 1.0]  # bar[-1] is that of level -1

    def normals(step):
        rows = [unet_io.normals(seed, Stream.SAMPLER, 192, 0, step) for seed in SEEDS]
        return torch.from_numpy(np.stack(rows)).double().reshape(2, 3, 8, 8)

    def with_known(x, u, k):
        known = np.sqrt(bar[u]) * x0 + np.sqrt(1 - bar[u]) * normals(2**31 + k)
        return mask * known + ~mask * x
    passed = visited_levels(len(kept), edit.jump_length, edit.jump_n_sample)
    x, top = normals(0), len(kept) - 1
    if edit.strength < 1:
        x = np.sqrt(bar[top]) * x0 + np.sqrt(1 - bar[top]) * x
    x = with_known(x, top, 0)
    for k, (t, u) in enumerate(zip(passed, passed[1:]), 1):
        if u > t:
            r = bar[u] / bar[t]
            x = np.sqrt(r) * x + np.sqrt(1 - r) * normals(k)
        else:
            part = 1 if sampler == "ddpm" else eta
            v = network(x, torch.full((2,), kept[t]))
            predicted = np.sqrt(bar[t]) * x - np.sqrt(1 - bar[t]) * v
            eps = (x - np.sqrt(bar[t]) * predicted) / np.sqrt(1 - bar[t])
            variance = part**2 * (1 - bar[u]) / (1 - bar[t]) * (1 - bar[t] / bar[u])
            x = np.sqrt(bar[u]) * predicted + np.sqrt(1 - bar[u] - variance) * eps
            x = x + np.sqrt(variance) * normals(k)
        x = with_known(x, u, k)
    assert error_of(drawn, x) < 1e-5


@pytest.mark.parametrize("sampler, eta", [("ddpm", 0.0), ("ddim", 0.0), ("ddim", 0.5)])
def test_masks_of_one_colour(sampler, eta):
    """All white: the picture. All black and no jumps: as without a picture, to the bit."""
    network, x0, how = Perfect(V), image(), dict(sample_steps=8, eta=eta)
    white, black = torch.ones(1, 8, 8, dtype=bool), torch.zeros(1, 8, 8, dtype=bool)
    for jumps in (1, 3):
        drawn = sample(network, SEEDS, sampler, **how, edit=Edit(x0, 1.0, white, 2, jumps))
        assert same_bits(drawn, x0.expand(2, -1, -1, -1))
    plain = sample(network, SEEDS, sampler, **how)
    assert same_bits(sample(network, SEEDS, sampler, **how, edit=Edit(x0, 1.0, black)), plain)
    assert not same_bits(sample(network, SEEDS, sampler, **how, edit=Edit(x0, 1.0, black, 2, 3)), plain)
    assert same_bits(sample(network, SEEDS, sampler, **how, edit=Edit(x0, 0.7, black)),
                     sample(network, SEEDS, sampler, **how, edit=Edit(x0, 0.7)))


# ----------------------------------------------------------------------------------------------------
# generate.py

@pytest.fixture
def draw(tmp_path):
    """draw(name, flags ...) runs generate.py for two pictures of tmp_path/name.bin; the sentence or the grid.
    """
    def run(name, *words, grid="grid.png"):
        sentence = call(generate, "--model_weights", tmp_path / f"{name}.bin", "--num_samples", 2, "--device",
                        "cpu", "--sample_steps", 6, "--output_name", tmp_path / grid, *words)
        return sentence or picture(tmp_path / grid)
    return run


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_files_of_pictures(tmp_path, draw, channels):
    """A picture file and the .bin that prepare_data.py makes of it are the same, as image and as mask."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(predict="v", in_channels=channels)))
    pixels = np.random.default_rng(1).integers(0, 256, (16, 24, channels), np.uint8)
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(tmp_path / "a.png")
    mask = np.zeros((8, 12), np.uint8)  # of the picture's shape, of which the middle is taken
    mask[:, :5], mask[:, 5], mask[:, 6] = 255, 127, 128
    Image.fromarray(mask).save(tmp_path / "m.png")
    for name, count in (("a", channels), ("m", 1)):
        assert call(prepare_data, "--data_dir", tmp_path / f"{name}.png", "--image_size", 8, "--in_channels",
                    count, "--output_name", tmp_path / f"{name}.bin") == ""
    grids = []
    for end in ("png", "bin"):
        words = ["--init_image", tmp_path / f"a.{end}"]
        grids.append([draw("w", *words), draw("w", *words, "--strength", 0.9, "--sampler", "dpmpp"),
                      draw("w", *words, "--mask", tmp_path / f"m.{end}", "--jump_length", 2),
                      draw("w", *words, "--mask", tmp_path / f"m.{end}", "--jump_n_sample", 1)])
    assert all(same_bits(one, other) for one, other in zip(*grids))
    assert len({grid.tobytes() for grid in grids[0]}) == 4
    made = np.moveaxis(unet_io.read_images(str(tmp_path / "a.bin")).pixels[0], 0, -1).squeeze()
    kept = [grids[0][2][2:10, x:x + 8] == made for x in (2, 12)]  # of the two pictures
    for one in kept:
        assert one[:, :3].all() and one[:, 4].all() and not one[:, 3].all() and not one[:, 5:].all()


def test_pictures_of_16_bits(tmp_path, draw, capsys):
    """Their white is that of prepare_data.py, and is said."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 60).save(tmp_path / "a.png")
    assert call(prepare_data, "--data_dir", tmp_path / "a.png", "--image_size", 8, "--output_name", tmp_path / "a.bin") == ""
    capsys.readouterr()
    grids = [draw("w", "--init_image", tmp_path / f"a.{end}", "--strength", 0) for end in ("png", "bin")]
    assert same_bits(*grids) and grids[0][2:10, 2:10].max() == 235
    assert "a.png has 16 bits and values up to 3780: 4095 is taken for white" in capsys.readouterr().out


def test_refused_edits(tmp_path, draw):
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    for name, size, n in (("i", 4, 3), ("big", 6, 3), ("m", 4, 1)):
        unet_io.write_images(str(tmp_path / f"{name}.bin"), np.zeros((1, n, size, size), np.uint8))
    (tmp_path / "text.png").write_text("x")
    image, mask = ["--init_image", tmp_path / "i.bin"], ["--mask", tmp_path / "m.bin"]
    for words, says in ((mask, "--mask does nothing without --init_image"),
                        (["--strength", 0.5], "--strength does nothing without --init_image"),
                        ([*image, "--jump_length", 3], "--jump_length does nothing without --mask"),
                        ([*image, "--jump_n_sample", 3], "--jump_n_sample does nothing without --mask"),
                        ([*image, "--strength", 1.5], "--strength must be from 0 to 1"),
                        ([*image, "--strength", -0.5], "--strength must"),
                        ([*image, "--strength", "nan"], "--strength must"),
                        ([*image, *mask, "--jump_length", 0], "--jump_length must be from 1"),
                        ([*image, *mask, "--jump_n_sample", 0], "--jump_n_sample must be from 1"),
                        ([*image, *mask, "--sample_steps", 2000, "--jump_n_sample", 501], "than a million"),
                        ([*image, *mask, "--sampler", "heun"], "--mask needs --sampler ddim or ddpm"),
                        ([*image, *mask, "--sampler", "dpmpp"], "--mask needs --sampler ddim or ddpm"),
                        ([*image, *mask, "--interpolate", 2, "--seeds", "1,2"], "--interpolate and --mask"),
                        (["--init_image", tmp_path / "none.png"], "none.png can't be read"),
                        (["--init_image", tmp_path / "text.png"], "a picture: it has no known format"),
                        (["--init_image", tmp_path / "none.bin"], "none.bin can't be read"),
                        (["--init_image", tmp_path / "m.bin"], "m.bin has images of 1 channels, 3 wanted"),
                        (["--init_image", tmp_path / "big.bin"], "6x6 images, not 4x4"),
                        ([*image, "--mask", tmp_path / "i.bin"], "i.bin has images of 3 channels, 1 wanted"),
                        ([*image, "--strip", 4], "leave it or --init_image out")):
        sentence = draw("w", *words)
        assert says in sentence and len(sentence.splitlines()) == 1 and not (tmp_path / "grid.png").exists()


def test_pictures_to_draw_from_stay(tmp_path, draw):
    """Nothing is drawn over --init_image or --mask, by whatever name."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    for name in ("a", "x_nearest", "000006"):
        Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(tmp_path / f"{name}.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    unet_io.write_images(tmp_path / "i.bin", np.zeros((1, 3, 8, 8), np.uint8))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for source, output, *words in (("a", "a"), ("link", "a"), ("x_nearest", "x", "--nearest", tmp_path / "i.bin"),
                                   ("000006", "x", "--output_dir", tmp_path, "--seed", 5)):
        for flags in (["--init_image", tmp_path / f"{source}.png"],
                      ["--init_image", tmp_path / "i.bin", "--mask", tmp_path / f"{source}.png"]):
            assert "is a picture to draw from, which would be lost" in draw("w", *flags, *words, grid=f"{output}.png")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_masks_that_say_too_little(tmp_path, draw, capsys):
    """A mask with transparency, or of another shape than the picture, is refused; one that keeps all or nothing is noted."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    rng = np.random.default_rng(1)
    Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(tmp_path / "i.png")
    unet_io.write_images(str(tmp_path / "i.bin"), np.zeros((1, 3, 4, 4), np.uint8))

    def attempt(size, mode="L", colour=255, image="i.png", erased=None, exif=None):
        mask = Image.new(mode, size, colour)
        if erased:
            mask.putpixel((0, 0), erased)
        mask.save(tmp_path / "m.png", **dict(exif=exif) if exif else {})
        found = draw("w", "--init_image", tmp_path / image, "--mask", tmp_path / "m.png", "--jump_n_sample", 1)
        return (found if isinstance(found, str) else ""), capsys.readouterr().out

    for mode, clear in (("RGBA", (255, 255, 255, 0)), ("LA", (0, 254))):
        says = "m.png has transparent pixels, which say nothing: make those white that are to be kept of --init_image, and" \
               " those black that are to be drawn"
        assert attempt((30, 20), mode, (255,) * len(mode), erased=clear)[0].endswith(says)
        assert attempt((30, 20), mode, (255,) * len(mode))[0] == ""
    for size in ((20, 20), (20, 30), (60, 20)):
        assert "{}x{} pixels and --init_image".format(*size) in attempt(size)[0]
        assert attempt(size, image="i.bin")[0] == ""
    turned = Image.Exif()
    turned[274] = 6  # a quarter
    assert attempt((20, 30), exif=turned)[0] == "" and "pixels and" in attempt((30, 20), exif=turned)[0]
    for size in ((30, 20), (15, 10), (61, 40), (300, 199)):
        assert attempt(size)[0] == ""
    assert "note: --mask" in attempt((30, 20))[1] and "all of --init_image is kept" in attempt((30, 20))[1]
    assert "nothing of --init_image is kept" in attempt((30, 20), colour=0)[1]
    half = np.zeros((20, 30), np.uint8)
    half[:10] = 255
    Image.fromarray(half).save(tmp_path / "m.png")
    assert not isinstance(draw("w", "--init_image", tmp_path / "i.png", "--mask", tmp_path / "m.png"), str)
    assert "note" not in capsys.readouterr().out


def test_guide_files(tmp_path, draw):
    """Another file as the guide: its averaged weights, if it has any; one that doesn't fit is refused."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(predict="v")))
    perturbed_file(tmp_path / "classes.bin", Config(**CLASSES))
    perturbed_file(tmp_path / "more.bin", Config(**CLASSES | dict(num_classes=4)))
    perturbed_file(tmp_path / "smaller.bin", Config(**TOY | dict(predict="v", channel_mult=(1, 1), seed=2)))
    other = unet_io.read_checkpoint(str(tmp_path / "smaller.bin"))
    other.sections |= dict(ema=other.sections["weights"], weights=0 * other.sections["weights"])
    unet_io.write_checkpoint(str(tmp_path / "averaged.bin"), other)
    guide = {name: ["--guide_weights", tmp_path / f"{name}.bin"] for name in (
        "w", "smaller", "averaged", "classes", "more")}
    plain, weak = draw("w"), draw("smaller")
    assert same_bits(draw("w", *guide["w"], "--guidance_scale", 3), plain)
    assert same_bits(draw("w", *guide["smaller"], "--guidance_scale", 0), weak)
    both = draw("w", *guide["smaller"], "--guidance_scale", 2)
    assert same_bits(draw("w", *guide["averaged"], "--guidance_scale", 2), both)
    assert not same_bits(both, plain) and not same_bits(both, weak)
    assert same_bits(draw("w", *guide["smaller"], "--guidance_scale", 2, "--guidance_interval", "0.9999,1"),
                     plain)
    known = draw("classes", *guide["smaller"], "--guidance_scale", 2)  # without a row for no class
    assert known.shape == plain.shape and not same_bits(known, draw("classes"))
    two = ["--guidance_scale", 2]
    assert "--guide_weights does nothing without a --guidance_scale" in draw("w", *guide["smaller"])
    assert "--guidance_interval does nothing without a --guidance_scale" in draw("w", "--guidance_interval", "0,1")
    assert "or another one, --guide_weights" in draw("w", *two)
    assert "--num_classes 4, and the model that it is to guide 3" in draw("classes", *guide["more"], *two)
    assert "--num_classes 3, and the model that it is to guide 0" in draw("w", *guide["classes"], *two)
    for name, value in dict(image_size=16, in_channels=1, diffusion_steps=500, noise_schedule="cosine",
                            predict="x0", zero_terminal_snr=True).items():
        perturbed_file(tmp_path / "odd.bin", Config(**TOY | dict(predict="v") | {name: value}))
        assert f"--{name} {value}" in draw("w", "--guide_weights", tmp_path / "odd.bin", *two)


def test_class_names(tmp_path, draw, capsys):
    """Names are another way to say --class; where rows are classes, they are told."""
    perturbed_file(tmp_path / "w.bin", Config(**CLASSES))
    perturbed_file(tmp_path / "plain.bin", Config(**SMALL))
    (tmp_path / "names").write_text("cat\nfox, the red\r\ndøg\n", encoding="utf-8")
    (tmp_path / "few").write_text("cat\n")
    named = ["--class_names", tmp_path / "names"]
    grids = []
    for words in (["--class", "0,2"], [*named, "--class", "cat,døg"], [*named, "--class", "cat, døg"]):
        grids.append(draw("w", *words))
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].endswith("grid.png (rows: cat, døg)" if words[0] == "--class_names" else "grid.png")
    assert same_bits(grids[0], grids[1]) and same_bits(grids[0], grids[2])
    assert same_bits(draw("w", *named, "--class", "fox, the red"), draw("w", "--class", "1"))
    assert "rows" not in capsys.readouterr().out
    for name, words, says in (("w", [*named, "--class", "cow"], "'cow'"), ("w", ["--class", "cat"], "'cat'"),
                              ("w", ["--class", "3"], "--class 3: the model has no class called '3'"),
                              ("w", [*named, "--class", "0"], "no class called '0'"),
                              ("w", ["--class_names", tmp_path / "few"], "few has 1 line and the model 3 classes"),
                              ("w", ["--class_names", tmp_path / "none"], "none can't be read"),
                              ("plain", named, "--class_names needs"), ("plain", ["--class", 0], "--class needs")):
        assert says in draw(name, *words), says


# ----------------------------------------------------------------------------------------------------
# ./train_unet

@functools.lru_cache
def help_of_generate():
    return run(sys.executable, ROOT / "generate.py", "--help").stdout


MOVED = {"init_image": "i.bin", "strength": 0.5, "mask": "m.bin", "jump_length": 3, "jump_n_sample": 3,
         "interpolate": 4, "strip": 2, "guide_weights": "g.bin", "guidance_interval": "0.2,0.8"}


@pytest.mark.parametrize("words, program", [
    (["--nearest"], "generate.py"), (["--export", "x.pt"], "generate.py"), (["--compile=1"], "train_unet.py"),
    (["--data_dir", "pets"], "prepare_data.py")])
def test_flags_of_other_programs(words, program):
    name = words[0].split("=")[0]
    refused(TRAIN, *words, status=2, says=f"{name} is {program}'s: python3 {program} --help tells how it is used")


@pytest.mark.parametrize("name", [*MOVED, "threshold"])
def test_what_the_program_leaves_to_us(tmp_path, name):
    """./train_unet refuses what only generate.py does, and says so; generate.py knows it."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    value = MOVED.get(name, "dynamic")
    (tmp_path / "c.txt").write_text(f"lr = 1\n{name} = {value}\n")
    shown = f"--{name} dynamic" if name == "threshold" else f"--{name}"
    draw = [TRAIN, "--model_weights", tmp_path / "w.bin", "--output_name", tmp_path / "x.png", "--generate", "--num_samples", 1]
    for words in ([f"--{name}", value], ["--config", tmp_path / "c.txt"]):
        sentence = refused(*draw, *words, status=2, says=f"{shown} is generate.py's: python3 generate.py")
        assert ("c.txt, line 2: " in sentence) == (words[0] == "--config" and name != "threshold")
    assert not (tmp_path / "x.png").exists()
    assert f"--{name}" in help_of_generate()


def test_checkpoint_of_an_earlier_run(tmp_path, capsys):
    """It goes on: without the interval that its grids were guided in, which is said, and with another threshold.
    """
    config = Config(**SMALL | dict(class_cond=True, num_classes=3, cond_drop_prob=0.5))
    data = write_toy_images(tmp_path / "d.bin", size=4)
    run(TRAIN, *start_flags(config, data, tmp_path / "run", 2))
    path = checkpoint_in(tmp_path / "run", 2)
    stored = unet_io.read_checkpoint(str(path))
    stored.run |= dict(guidance_interval="0.2,0.8", threshold="dynamic")
    write_earlier_version(path, stored)
    assert call(generate, "--import", path, "--export", path) == ""
    assert "--guidance_interval 0.2,0.8 is left out" in capsys.readouterr().out
    refused(TRAIN, "--resume", tmp_path / "run", "--steps", 3, status=2, says="--threshold dynamic is generate.py's")
    run(TRAIN, "--resume", tmp_path / "run", "--steps", 3, "--threshold", "clamp")
    run(TRAIN, "--generate", "--num_samples", 1, "--sample_steps", 2, "--out_dir", tmp_path / "run", "--output_name",
        tmp_path / "x.png")
    assert "guidance_interval" not in unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", 3))).run


def test_two_channels_take_no_picture_file(tmp_path, draw):
    perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(in_channels=2, predict="v")))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert draw("w", "--init_image", tmp_path / "a.png") == (
        f"{tmp_path}/a.png: a model of 2 channels takes a .bin here, since no picture is read with so many")


def test_seed_twice(tmp_path, draw):
    """Two pictures of one seed would have one file in --output_dir."""
    words = ("--model_weights", tmp_path / "none.bin", "--seeds", "3,5-7,6", "--output_name", tmp_path / "x.png")
    assert call(generate, *words, "--output_dir", tmp_path / "each") == (
        "--seeds names a seed twice, and --output_dir writes each picture as SEED.png: draw them in parts")
    assert not (tmp_path / "each").exists()


def test_more_steps_than_timesteps():
    """The sampler of tuned models refuses them as the others do."""
    model = train_unet.UNet(Config(**TOY | dict(predict="v", noise_schedule="cosine", diffusion_steps=10,
                                             consistency=True)))
    for sampler in ("consistency", "ddim"):
        with pytest.raises(unet_io.UserError, match="--sample_steps 11 must lie between 1 and the 10 steps trained"):
            sample(model, [0], sampler, 11)
