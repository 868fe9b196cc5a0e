"""Labels from the image file to the pictures: preparing, training, resuming, drawing by class, refusals."""
import contextlib
import dataclasses
import gzip
import io
import json
import signal
import subprocess
import types
import unicodedata
import zlib

import numpy as np
import pytest

import generate
import prepare_data
import quality
import train_unet
import unet_io
from harness import (
    QUICK, TOY, TRAIN, call, checkpoint_in, perturbed_file, picture, refused, run, same_bits, start_flags, write_toy_images)
from unet_io import Config, UserError

CLASSES = TOY | dict(class_cond=True, num_classes=3, cond_drop_prob=0.3, predict="v")


def write_idx(path, array, packed):
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    with (gzip.open if packed else open)(path, "wb") as file:
        file.write(head + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files(tmp_path, packed):
    """The images of an IDX file lie in the middle of black ones, with the numbers beside them as labels."""
    rng, ending = np.random.default_rng(3), ".gz" * packed
    pixels, labels = rng.integers(0, 256, (20, 12, 10)), np.arange(20) * 7 % 11
    write_idx(tmp_path / f"t-images-idx3-ubyte{ending}", pixels, packed)
    write_idx(tmp_path / f"t-labels-idx1-ubyte{ending}", labels, packed)
    words = ["--data_dir", tmp_path / f"t-images-idx3-ubyte{ending}", "--output_name", tmp_path / "x.bin"]
    assert call(prepare_data, *words, "--labels", "--val_fraction", 0.25) == ""
    found = []
    for name in ("x", "x_val"):
        images = unet_io.read_images(str(tmp_path / f"{name}.bin"))
        assert images.pixels.shape[1:] == (1, 16, 16) and images.class_names == tuple(map(str, range(11)))
        inside = images.pixels[:, 0, 2:14, 3:13]
        assert images.pixels.sum(dtype=int) == inside.sum(dtype=int)
        names = [int(images.class_names[label]) for label in images.labels]
        found += zip((one.tobytes() for one in inside), names)
    assert sorted(found) == sorted((one.astype(np.uint8).tobytes(), int(label))
                                   for one, label in zip(pixels, labels)) and len(images) == 5
    assert call(prepare_data, *words, "--in_channels", 3, "--image_size", 12) == ""
    assert unet_io.read_images(str(tmp_path / "x.bin")).pixels.shape == (20, 3, 12, 12)
    assert "too small" in call(prepare_data, *words, "--image_size", 8)
    write_idx(tmp_path / f"t-images-idx3-ubyte{ending}", pixels // 128, packed)
    assert "from 0 to 1 only, nearly black" in call(prepare_data, *words)
    assert call(prepare_data, *words, "--range", "0,1") == ""
    inside = unet_io.read_images(str(tmp_path / "x.bin")).pixels[:, 0, 2:14, 3:13]
    assert (inside == pixels // 128 * 255).all()


@pytest.mark.parametrize("damage, says", [("short", "damaged"), ("long", "damaged"), ("magic", "no IDX file"),
                                          ("labels", "labels for"), ("no labels", "can't be read"),
                                          ("gzip", "can't be read"), ("huge", "damaged")])
def test_damaged_idx_files(tmp_path, damage, says):
    images, labels = tmp_path / "t-images-idx3-ubyte", tmp_path / "t-labels-idx1-ubyte"
    write_idx(images, np.zeros((4, 8, 8)), False)
    write_idx(labels, np.zeros(3 if damage == "labels" else 4), False)
    data = images.read_bytes()
    if damage == "no labels":
        labels.unlink()
    changed = {"short": data[:-1], "long": data + b"x", "magic": b"\0\0\x09" + data[3:],
               "gzip": gzip.compress(data)[:-6], "huge": data[:4] + b"\x7f\xff\xff\xff" * 3 + data[16:]}
    images.write_bytes(changed.get(damage, data))
    sentence = call(prepare_data, "--data_dir", images, "--labels", "--output_name", tmp_path / "x.bin")
    assert says in sentence and len(sentence.splitlines()) == 1 and not (tmp_path / "x.bin").exists()


@pytest.mark.parametrize("channels, mode", [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_channels_of_pictures(tmp_path, channels, mode):
    """Grey as Pillow makes it; what is transparent is laid on white, or stays so in RGBA."""
    from PIL import Image
    (tmp_path / "in").mkdir()
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[..., 0], pixels[:4, :, 3] = 200, 255  # the upper half red, the lower clear
    Image.fromarray(pixels).save(tmp_path / "in/a.png")
    assert call(prepare_data, "--data_dir", tmp_path / "in", "--image_size", 8, "--in_channels", channels,
                "--output_name", tmp_path / "x.bin") == ""
    made = unet_io.read_images(str(tmp_path / "x.bin")).pixels[0]
    assert made.shape == (channels, 8, 8)
    upper, lower = {1: ([60], [255]), 3: ([200, 0, 0], [255] * 3), 4: ([200, 0, 0, 255], None)}[channels]
    assert np.abs(made[:, 0, 0].astype(int) - upper).max() <= 1
    assert (made[3, 7] == 0).all() if lower is None else (made[:, 7, 7] == lower).all()


def test_number_of_classes(tmp_path, images8):
    """It comes from the images, is stored, and what contradicts it is refused."""
    config = Config(**CLASSES | dict(num_classes=0))
    run(TRAIN, *start_flags(config, images8, tmp_path / "run", 1))
    file = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", 1)))
    assert file.config.num_classes == 3
    model, _ = train_unet.load_model(str(checkpoint_in(tmp_path / "run", 1)))
    assert model.label_emb.weight.shape == (4, 128)
    refused(TRAIN, *start_flags(Config(**CLASSES | dict(num_classes=2)), images8, tmp_path / "few", 1),
            says=["3 classes", "2"])
    bare = tmp_path / "bare.bin"
    unet_io.write_images(str(bare), unet_io.read_images(images8).pixels)
    refused(TRAIN, *start_flags(config, bare, tmp_path / "none", 1), says="--labels")
    refused(TRAIN, *start_flags(Config(**CLASSES), bare, tmp_path / "none", 1), says="0 classes")
    refused(TRAIN, *start_flags(config, tmp_path / "no.bin", tmp_path / "none", 1), says="no.bin")
    run(TRAIN, "--resume", tmp_path / "run", "--steps", 2)
    refused(TRAIN, "--resume", tmp_path / "run", "--steps", 3, "--cond_drop_prob", 0.1, says="cond_drop_prob")
    more = write_toy_images(tmp_path / "more.bin", n=8)
    run(TRAIN, *start_flags(Config(**CLASSES | dict(num_classes=9)), more, tmp_path / "more", 1))


def test_rows_of_classes(tmp_path):
    """A row a class where that comes out even, in both programs; a class alone is drawn by its seed alone."""
    perturbed_file(tmp_path / "w.bin", Config(**CLASSES))
    common = ["--sample_steps", 5, "--guidance_scale", 2]
    run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 6, *common, "--batch_size", 4,
        "--output_name", tmp_path / "a.png")
    assert call(generate, "--model_weights", tmp_path / "w.bin", "--num_samples", 6, *common,
                "--device", "cpu", "--output_name", tmp_path / "b.png") == ""
    ours, theirs = picture(tmp_path / "a.png"), picture(tmp_path / "b.png")
    assert ours.shape == theirs.shape == (3 * 10 + 2, 2 * 10 + 2, 3) and np.abs(ours - theirs).max() <= 2
    drawn = {}
    for number in range(3):
        run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 1, "--seed", 2 * number, *common,
            "--class", number, "--output_name", tmp_path / "c.png")
        drawn[number] = picture(tmp_path / "c.png")[2:-2, 2:-2]
        assert np.abs(drawn[number] - ours[2 + 10 * number:][:8, 2:10]).max() <= 1
    run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 1, *common, "--class", 1,
        "--output_name", tmp_path / "c.png")  # another class, the same seed
    assert np.abs(picture(tmp_path / "c.png")[2:-2, 2:-2] - drawn[0]).max() > 2


def test_guidance_interval(tmp_path):
    """An interval without a timestep is no guidance, and the whole chain is as without an interval."""
    perturbed_file(tmp_path / "w.bin", Config(**CLASSES))
    pictures = {}
    for name, words in {"none": [], "all": ["--guidance_scale", 4],
                        "empty": ["--guidance_scale", 4, "--guidance_interval", "0.9995,1"],
                        "whole": ["--guidance_scale", 4, "--guidance_interval", "0,1"],
                        "part": ["--guidance_scale", 4, "--guidance_interval", "0.2,0.6"]}.items():
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--num_samples", 2, "--sample_steps", 8, *words,
                    "--device", "cpu", "--output_name", tmp_path / f"{name}.png") == ""
        pictures[name] = picture(tmp_path / f"{name}.png")
    assert (pictures["none"] == pictures["empty"]).all() and (pictures["all"] == pictures["whole"]).all()
    assert len({pictures[name].tobytes() for name in ("none", "all", "part")}) == 3


@pytest.mark.parametrize("interval", ["0.5", "0.7,0.2", "0,2", "x,1"])
def test_refused_intervals(interval):
    with pytest.raises(SystemExit, match="2"):
        call(generate, "--model_weights", "w.bin", "--guidance_interval", interval)


def test_hidden_labels():
    """So many are hidden as --cond_drop_prob says, other ones at every step."""
    hidden = [unet_io.dropped(7, np.arange(20000), step, 0.25) for step in (0, 1)]
    assert all(abs(h.mean() - 0.25) < 0.01 for h in hidden) and not same_bits(*hidden)
    assert not unet_io.dropped(7, np.arange(1000), 0, 0.0).any()


def test_guided_one_by_one(tmp_path, images8):
    """A picture takes two images at a time: one by one they are the same. So small parts of a batch are for
    runs without grids."""
    perturbed_file(tmp_path / "w.bin", Config(**CLASSES))
    for batch in (1, 5):
        run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 5, "--sample_steps", 4,
            "--batch_size", batch, "--guidance_scale", 3, "--output_name", tmp_path / f"{batch}.png")
    assert np.abs(picture(tmp_path / "1.png") - picture(tmp_path / "5.png")).max() <= 1
    ones = [*start_flags(Config(**CLASSES), images8, tmp_path / "run", 1), "--guidance_scale", 3,
            "--microbatch", 1]
    refused(TRAIN, *ones, says="use a --batch_size and --microbatch of 2 or more")
    run(TRAIN, *ones, "--num_samples", 0)


@pytest.mark.parametrize("words, says, status", [
    (["--class", "3"], ["--class 3", "2"], 2), (["--class", "x"], "--class x", 2),
    (["--guidance_scale", "-1"], "--guidance_scale", 2)])
def test_refused_classes(tmp_path, words, says, status):
    perturbed_file(tmp_path / "w.bin", Config(**CLASSES))
    refused(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 1, *words, says=says, status=status)


def test_models_without_classes(tmp_path):
    """They take no class and no guidance, in either program; nor does one that never drew without a class."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    perturbed_file(tmp_path / "c.bin", Config(**CLASSES | dict(cond_drop_prob=0.0)))
    guided = ["--guidance_scale", 2]
    for name, words, says in (("w", ["--class", 1], "class_cond"), ("w", guided, "cond_drop_prob"),
                              ("c", guided, "cond_drop_prob")):
        refused(TRAIN, "--model_weights", tmp_path / f"{name}.bin", "--generate", "--num_samples", 1, *words, says=says)
        assert says in call(generate, "--model_weights", tmp_path / f"{name}.bin", "--device", "cpu", *words)


def test_create_model_with_classes():
    """guided-diffusion's call: 1000 classes, model(x, t, y); what is missing or too much is refused."""
    import torch
    model = train_unet.create_model(8, 32, 1, "1,2", norm_groups=8, class_cond=True)
    assert model.label_emb.weight.shape == (1000, 128)
    x, t = torch.zeros(2, 3, 8, 8), torch.tensor([1, 2])
    assert model(x, t, torch.tensor([0, 999])).shape == x.shape
    for wrong in ((x, t), (x, t, torch.tensor([1]))):
        with pytest.raises(ValueError, match="y"):
            model(*wrong)
    with pytest.raises(UserError, match="num_classes"):
        train_unet.UNet(Config(**TOY | dict(class_cond=True)))


# ----------------------------------------------------------------------------------------------------
# classes are names: whatever numbers a file gives them

FRUIT = ("apple", "banana", "cherry")
PROGRAMS = ("train_unet", "train_unet.py")


def write_fruit(path, names, shown=FRUIT, n=12, seed=1):
    """Images of the classes `shown` in turns, whose pixels tell the class, in a file that numbers `names` so."""
    coarse = np.random.default_rng(seed).integers(0, 160, (n, 3, 8, 8))
    classes = [shown[i % len(shown)] for i in range(n)]
    pixels = coarse + np.array([sum(map(ord, name)) % 96 for name in classes])[:, None, None, None]
    numbered(path, pixels.astype(np.uint8), classes, names)
    return str(path)


def numbered(path, pixels, classes, names):
    """An image file as docs/formats.md has it, of these names in this order, be there images of them or not."""
    text = "".join(f"{name}\n" for name in names).encode()
    labels = np.array([names.index(name) for name in classes], "<i4")
    data = pixels.tobytes() + labels.tobytes() + text
    header = np.zeros(256, "<i4")
    header[:9] = [unet_io.IMAGES_MAGIC, *pixels.shape, 1, 1, len(names), len(text)]
    header[9] = np.uint32(zlib.crc32(header.tobytes(), zlib.crc32(data))).view(np.int32)
    path.write_bytes(header.tobytes() + data)


def named_file(path, config, names):
    """Perturbed weights whose classes have these names; () for none. -> the model"""
    model = perturbed_file(path, config)
    checkpoint = unet_io.read_checkpoint(str(path))
    checkpoint.sections |= unet_io.class_section(names)
    unet_io.write_checkpoint(str(path), checkpoint)
    return model


def started(program, *flags, status=0):
    """Run one of PROGRAMS with flags for ./train_unet; train_unet.py here, which is quicker. -> stdout and stderr"""
    if program == "train_unet":
        return run(TRAIN, *flags, status=status)
    flags = list(map(str, flags))
    for name in ("--num_samples", "--sample_steps"):
        if name in flags:
            at = flags.index(name)
            del flags[at:at + 2]
    handled = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        sentence = call(train_unet, *flags, "--sample_every", 0, "--device", "cpu")
    for number, handler in handled.items():
        signal.signal(number, handler)
    assert bool(sentence) == bool(status), sentence
    return types.SimpleNamespace(stdout=out.getvalue(), stderr=f"error: {sentence}\n" if sentence else "")


def turned_away(program, *flags, says):
    """The command ends with one sentence on stderr that holds every string of `says`."""
    result = started(program, *flags, status=1)
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    for text in says:
        assert text in result.stderr, (text, result.stderr)


def notes_in(result):
    return [line for line in result.stdout.splitlines() if line.startswith("note: ")]


def val_loss(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["val_loss"] for line in lines if "val_loss" in line]


@pytest.mark.parametrize("program", PROGRAMS)
def test_validation_by_name(tmp_path, program):
    """A validation file that lacks a class, and numbers the others anew, has the loss of one with the model's numbers.
    """
    config = Config(**CLASSES)
    perturbed_file(tmp_path / "w.bin", config)
    data = write_fruit(tmp_path / "data.bin", FRUIT)
    losses, notes = {}, {}
    for name, names in dict(right=FRUIT, moved=("apple", "cherry"), mirrored=FRUIT[::-1],
                            more=("apple", "cherry", "date")).items():
        held_out = write_fruit(tmp_path / f"{name}.bin", names, ("apple", "cherry"), 8, seed=2)
        result = started(program, *start_flags(config, data, tmp_path / name, 2, model_weights=tmp_path / "w.bin"),
                         "--val_file", held_out)
        losses[name] = val_loss(tmp_path / name)
        notes[name] = [line for line in notes_in(result) if f"{name}.bin" in line]
    assert losses["right"] and losses["moved"] == losses["mirrored"] == losses["more"] == losses["right"]
    assert not notes["right"] and "cherry is number 1 there and 2 in the model" in notes["moved"][0]
    assert "cherry is number 0 there and 2 in the model" in notes["mirrored"][0]
    assert all(len(notes[name]) == 1 for name in ("moved", "mirrored", "more"))
    assert [name for name in notes if "has no images of banana" in "".join(notes[name])] == ["moved", "more"]
    part = write_fruit(tmp_path / "part.bin", FRUIT, ("apple", "cherry"))  # bananas fell into the other part alone
    result = started(program, *start_flags(config, part, tmp_path / "split", 2), "--val_file", data)
    assert len(val_loss(tmp_path / "split")) == 1 and len(notes_in(result)) == 1
    assert "part.bin has no images of banana" in notes_in(result)[0]
    stranger = write_fruit(tmp_path / "stranger.bin", ("apple", "date"), ("apple", "date"))
    turned_away(program, *start_flags(config, data, tmp_path / "no", 2), "--val_file", stranger,
                says=["stranger.bin", "date", "its classes are apple, banana and cherry"])
    bare = tmp_path / "bare.bin"
    unet_io.write_images(str(bare), unet_io.read_images(data).pixels)
    turned_away(program, *start_flags(config, data, tmp_path / "no", 2), "--val_file", bare, says=["bare.bin", "labels"])


@pytest.mark.parametrize("program", PROGRAMS)
def test_resume_by_name(tmp_path, program):
    """Resumed with the same images under other numbers, a run has the same bits; what differs is said, a class that the
    model doesn't know refused."""
    config = Config(**CLASSES)
    data, moved = write_fruit(tmp_path / "data.bin", FRUIT), write_fruit(tmp_path / "moved.bin", FRUIT[::-1])
    for name in ("a", "b", "c"):
        started(program, *start_flags(config, data, tmp_path / name, 2))
    file = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "a", 2)))
    assert file.class_names == FRUIT and file.sections["data_checksum"] == unet_io.read_images(data).checksum
    quick = ["--num_samples", 0, "--out_dir"]
    assert not notes_in(started(program, "--steps", 4, *quick, tmp_path / "a", "--resume"))
    lines = notes_in(started(program, "--steps", 4, *quick, tmp_path / "b", "--data_file", moved, "--resume"))
    assert len(lines) == 2 and "is not the file that the run had images from until step 2" in lines[0]
    assert file.sections["data_checksum"] in lines[0] and "cherry is number 0 there and 2 in the model" in lines[1]
    files = [unet_io.read_checkpoint(str(checkpoint_in(tmp_path / name, 4))) for name in ("a", "b")]
    for section in unet_io.TENSOR_SECTIONS[:2]:
        assert same_bits(files[0].sections[section], files[1].sections[section])
    assert files[1].class_names == FRUIT
    assert files[1].sections["data_checksum"] == unet_io.read_images(moved).checksum
    stranger = write_fruit(tmp_path / "stranger.bin", (*FRUIT, "date"), ("apple", "date"))
    turned_away(program, "--steps", 4, *quick, tmp_path / "c", "--data_file", stranger, "--resume",
                says=["stranger.bin has images of date", "its classes are apple, banana and cherry"])
    fewer = write_fruit(tmp_path / "fewer.bin", FRUIT[:2], FRUIT[:2])
    lines = notes_in(started(program, "--steps", 4, *quick, tmp_path / "c", "--data_file", fewer, "--resume"))
    assert "has no images of cherry" in lines[1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_unnamed_checkpoints(tmp_path, program):
    """A checkpoint from before names were stored: its classes are taken for the file's, which is said; from then on it
    has names. --class_names tells others."""
    config = Config(**CLASSES)
    data = write_fruit(tmp_path / "data.bin", FRUIT)
    for name in ("a", "b", "c"):
        started(program, *start_flags(config, data, tmp_path / name, 2))
        path = str(checkpoint_in(tmp_path / name, 2))
        file = unet_io.read_checkpoint(path)
        del file.sections["class_names"], file.sections["data_checksum"]
        unet_io.write_checkpoint(path, file)
    go_on = ["--steps", 3, "--num_samples", 0, "--resume", "--out_dir"]
    lines = notes_in(started(program, *go_on, tmp_path / "a"))
    assert len(lines) == 1 and "does not name its classes" in lines[0] and "apple, banana and cherry" in lines[0]
    assert unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "a", 3))).class_names == FRUIT
    (tmp_path / "names").write_text("apple\nbanana\ncherry\n")
    moved = write_fruit(tmp_path / "moved.bin", FRUIT[::-1])
    lines = notes_in(started(program, *go_on, tmp_path / "b", "--data_file", moved, "--class_names",
                             tmp_path / "names"))
    assert len(lines) == 1 and "matched by their names" in lines[0]
    first, second = (unet_io.read_checkpoint(str(checkpoint_in(tmp_path / name, 3))) for name in "ab")
    assert same_bits(first.sections["weights"], second.sections["weights"]) and second.class_names == FRUIT
    many = write_fruit(tmp_path / "many.bin", (*FRUIT, "date"))
    turned_away(program, *go_on, tmp_path / "c", "--data_file", many, says=["4", "3", "many.bin"])


# ----------------------------------------------------------------------------------------------------
# fine-tuning

def first_state(program, folder, config, data, weights, *flags):
    """(state dict, Checkpoint, notes) of a run of no steps."""
    words = ["--data_file", data, "--out_dir", folder, "--steps", 0, "--model_weights", weights, "--seed", config.seed,
             "--num_samples", 0, *flags]
    result = started(program, *words)
    model, checkpoint = train_unet.load_model(str(checkpoint_in(folder, 0)))
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, checkpoint, notes_in(result)


def fresh_rows(config):
    """The table of classes of a new run."""
    model = train_unet.init_weights(train_unet.UNet(config), config.seed)
    return model.label_emb.weight.detach().numpy()


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_classes(tmp_path, program):
    """Rows of known names go to their new numbers, others begin anew, the row for no class stays."""
    config = Config(**CLASSES)
    old = {name: p.detach().numpy() for name, p in named_file(tmp_path / "w.bin", config, FRUIT).named_parameters()}
    rows = old.pop("label_emb.weight")

    def tune(name, names, *flags, cond_drop_prob=0.3, num_classes=None, weights="w.bin"):
        data = write_fruit(tmp_path / f"{name}.bin", names, names)
        state, checkpoint, notes = first_state(program, tmp_path / name, config, data, tmp_path / weights, *flags)
        assert checkpoint.class_names == names and checkpoint.config.num_classes == (num_classes or len(names))
        table = state.pop("label_emb.weight")
        assert all(same_bits(state[key], old[key]) for key in old) and state.keys() == old.keys()
        now = Config(**CLASSES | dict(num_classes=num_classes or len(names), cond_drop_prob=cond_drop_prob))
        return table, fresh_rows(now), notes

    table, fresh, notes = tune("other", ("avocado", "banana", "cherry", "date"))
    assert same_bits(table[[1, 2, 4]], rows[[1, 2, 3]]) and np.abs(table - fresh)[[0, 3]].max() < 2e-6
    assert len(notes) == 1 and "banana and cherry are kept, avocado and date are new, apple is dropped" in notes[0]
    table, _, notes = tune("same", FRUIT)
    assert same_bits(table, rows) and not notes
    table, _, notes = tune("turned", FRUIT[::-1])
    assert same_bits(table, rows[[2, 1, 0, 3]]) and "are kept" in notes[0] and len(notes) == 1
    table, fresh, notes = tune("room", ("apple", "date"), "--num_classes", 4, num_classes=4)
    assert same_bits(table[[0, 4]], rows[[0, 3]]) and np.abs(table - fresh)[1:4].max() < 2e-6
    table, _, notes = tune("told", FRUIT, "--cond_drop_prob", 0, cond_drop_prob=0)
    assert same_bits(table, rows[:3]) and "the row for no class is dropped" in notes[0]
    strangers, fresh, notes = tune("strangers", ("x", "y"))
    assert same_bits(strangers[2], rows[3]) and "none is known, x and y are new" in notes[0]

    four = write_fruit(tmp_path / "four.bin", (*FRUIT, "date"))
    turned_away(program, "--data_file", four, "--out_dir", tmp_path / "no", "--steps", 0, "--model_weights",
                tmp_path / "w.bin", "--num_classes", 3, says=["four.bin has 4 classes", "3"])
    named_file(tmp_path / "none.bin", Config(**CLASSES | dict(cond_drop_prob=0.0)), FRUIT)
    _, fresh, notes = tune("hidden", FRUIT, "--cond_drop_prob", 0.3, weights="none.bin")
    assert "the row for no class is new" in notes[0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_of_fewer_words(tmp_path, program):
    """Weights without names, and weights without classes: what is assumed is said, what can't be refused."""
    config = Config(**CLASSES)
    model = perturbed_file(tmp_path / "w.bin", config)
    rows = model.label_emb.weight.detach().numpy()
    two = write_fruit(tmp_path / "two.bin", ("cherry", "date"), ("cherry", "date"))
    state, checkpoint, notes = first_state(program, tmp_path / "a", config, two, tmp_path / "w.bin")
    assert same_bits(state["label_emb.weight"], rows) and checkpoint.class_names == ("cherry", "date")
    assert len(notes) == 1 and "w.bin does not name its classes" in notes[0] and "cherry and date" in notes[0]
    (tmp_path / "names").write_text("apple\nbanana\ncherry\n")
    state, checkpoint, notes = first_state(program, tmp_path / "b", config, two, tmp_path / "w.bin", "--class_names",
                                           tmp_path / "names")
    assert same_bits(state["label_emb.weight"][[0, 2]], rows[[2, 3]]) and len(notes) == 1
    assert "cherry is kept, date is new, apple and banana are dropped" in notes[0]
    start = ["--data_file", two, "--steps", 0, "--model_weights", tmp_path / "w.bin", "--out_dir", tmp_path / "no"]
    turned_away(program, *start, "--num_classes", 2, says=["--num_classes 2 contradicts", "--class_names FILE"])
    turned_away(program, *start, "--class_cond", 0, says=["--class_cond", "contradicts"])

    plain = Config(**TOY | dict(predict="v"))
    old = {name: p.detach().numpy() for name, p in perturbed_file(tmp_path / "plain.bin", plain).named_parameters()}
    state, checkpoint, notes = first_state(program, tmp_path / "c", config, two, tmp_path / "plain.bin",
                                           "--class_cond", 1, "--cond_drop_prob", 0.1)
    table = state.pop("label_emb.weight")
    assert all(same_bits(state[key], old[key]) for key in old) and state.keys() == old.keys()
    assert np.abs(table - fresh_rows(Config(**CLASSES | dict(num_classes=2, cond_drop_prob=0.1)))).max() < 2e-6
    assert len(notes) == 1 and "none is known, cherry and date are new, and the row for no class is new" in notes[0]
    start[5] = tmp_path / "plain.bin"
    turned_away(program, *start, "--num_classes", 2, says=["--num_classes", "contradicts"])


def test_other_classes_once_more(tmp_path):
    """config.txt of a fine-tuning is the same run once more; so is the run, resumed."""
    named_file(tmp_path / "w.bin", Config(**CLASSES), FRUIT)
    data = write_fruit(tmp_path / "data.bin", ("banana", "date", "elder", "fig"), ("banana", "date", "fig"))
    words = ["--data_file", data, "--model_weights", tmp_path / "w.bin", "--num_samples", 0, "--batch_size", 4]
    result = run(TRAIN, *words, "--out_dir", tmp_path / "a", "--steps", 4)
    assert [line for line in notes_in(result) if "data.bin has no images of elder, which the model knows" in line]
    run(TRAIN, "--config", tmp_path / "a/config.txt", "--out_dir", tmp_path / "b")
    run(TRAIN, *words, "--out_dir", tmp_path / "c", "--steps", 2)
    run(TRAIN, "--resume", tmp_path / "c", "--steps", 4)
    files = [unet_io.read_checkpoint(str(checkpoint_in(tmp_path / name, 4))) for name in "abc"]
    assert all(same_bits(files[0].sections["weights"], file.sections["weights"]) for file in files[1:])
    assert all(file.class_names == ("banana", "date", "elder", "fig") for file in files)
    assert files[0].config.num_classes == 4


def test_room_for_classes(tmp_path):
    """More classes than names: pictures are drawn of those with names, and grids while training too."""
    data = write_fruit(tmp_path / "data.bin", FRUIT)
    config = Config(**CLASSES | dict(num_classes=9))
    text = run(TRAIN, *start_flags(config, data, tmp_path / "run", 2), "--num_samples", 6).stdout
    assert "samples_00000002.png (rows: apple, banana, cherry)" in text
    assert unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", 2))).config.num_classes == 9
    draw = [TRAIN, "--out_dir", tmp_path / "run", "--sample_steps", 2, "--output_name", tmp_path / "x.png"]
    assert "(rows: apple, banana, cherry)" in run(*draw, "--generate", "--num_samples", 6).stdout
    refused(*draw, "--generate", "--num_samples", 1, "--class", 5, says=["no class called '5'", "apple, banana and cherry"], status=2)


# ----------------------------------------------------------------------------------------------------
# drawing

def both_draw(folder, weights, count, *flags):
    """(picture of ./train_unet, picture of generate.py, what the first printed); a sentence in place of what is refused.
    """
    words = ["--sample_steps", 3, *flags]
    name = folder / "x.png"
    if name.exists():
        name.unlink()
    command = [TRAIN, "--model_weights", folder / weights, "--generate", "--num_samples", count, "--output_name", name, *words]
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    ours = picture(name) if not result.returncode else result.stderr
    if name.exists():
        name.unlink()
    sentence = call(generate, "--model_weights", folder / weights, "--num_samples", count, "--output_name", name,
                    "--device", "cpu", *words)
    return ours, sentence or picture(name), result.stdout


NAMES = {  # what --class says: the numbers of the classes
    ("circle", "square", "triangle"): {"square": [1], "triangle,circle": [2, 0], "square, circle": [1, 0]},
    ("1", "2", "10", "11", "12"): {"2": [1], "11": [3], "1-2": [0, 1], "10-12,1": [2, 3, 4, 0]},
    ("00", "01", "2", "10"): {"2": [2], "01": [1], "00,10,2": [0, 3, 2], "0-2": [0, 1, 2]},
    ("00", "02", "2", "003"): {"2": [2], "02": [1], "0,2-3": [0, 2, 3]},
    ("cat", "cat, small", "small", "0-1", "x-y"): {
        "cat, small": [1], "cat, small,cat": [1, 0], "0-1": [3], "x-y,0-1": [4, 3], "small,cat": [2, 0]}}


@pytest.mark.parametrize("names", NAMES)
def test_class_by_name(tmp_path, names):
    """--class takes the stored names first; both programs draw what a model without names draws by number."""
    config = Config(**CLASSES | dict(num_classes=len(names)))
    named_file(tmp_path / "named.bin", config, names)
    perturbed_file(tmp_path / "plain.bin", config)
    for text, numbers in NAMES[names].items():
        count = 2 * len(numbers)
        ours, theirs, said = both_draw(tmp_path, "named.bin", count, "--class", text)
        expected, _, _ = both_draw(tmp_path, "plain.bin", count, "--class", ",".join(map(str, numbers)))
        assert (ours == expected).all() and np.abs(ours - theirs).max() <= 2, text
        rows = ", ".join(names[number] for number in numbers)
        assert (f"(rows: {rows})" in said) == (len(numbers) > 1)
    for text in ("nobody", "3-", "7"):
        for answer in both_draw(tmp_path, "named.bin", 1, "--class", text)[:2]:
            assert "--class" in answer and answer.count("\n") <= 1


@pytest.mark.parametrize("text", ["2", "1-2"])
def test_number_of_two_names(tmp_path, text):
    """A number that could be one class or another is none of them, and the names are told."""
    names = ("1", "02", "002", "3")
    named_file(tmp_path / "named.bin", Config(**CLASSES | dict(num_classes=len(names))), names)
    for answer in both_draw(tmp_path, "named.bin", 1, "--class", text)[:2]:
        assert f"--class {text}: 2 could be 02 or 002" in answer
    assert generate.parse_classes("02,3", names, 4) == [1, 3]


@pytest.mark.parametrize("text", ["cat,dog", "cat ,dog", "cat , dog"])
def test_more_classes_than_pictures(tmp_path, text):
    """Both programs refuse to leave a class out, and take blanks around a comma."""
    named_file(tmp_path / "named.bin", Config(**CLASSES), ("cat", "dog", "bird"))
    for answer in both_draw(tmp_path, "named.bin", 1, "--class", text)[:2]:
        says = f"--class {text} names 2 classes, and of 1 picture some would be left out; use --num_samples 2 or more"
        assert answer.strip().removeprefix("error: ") == says
    assert generate.parse_classes(text, ("cat", "dog", "bird"), 3) == [0, 1]


def test_unicode_names():
    """Letters of one or of two characters are the same name."""
    two = unicodedata.normalize("NFD", "café")
    assert two != "café" and generate.parse_classes(two, ("bar", "café"), 2) == [1]
    images = unet_io.Images(np.zeros((2, 3, 8, 8), np.uint8), np.array([0, 1]), (two, "bar"))
    assert "is number 0 there and 1 in the model" in images.match_classes(("bar", "café"))
    assert images.labels.tolist() == [1, 0] and images.class_names == ("bar", "café")


def test_name_of_two_characters(tmp_path):
    """./train_unet compares bytes, and tells whoever types é as two characters, which look like one."""
    named_file(tmp_path / "w.bin", Config(**CLASSES), ("bar", "café", "tea"))
    draw = [TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 1, "--sample_steps", 1,
            "--output_name", tmp_path / "x.png", "--class"]
    run(*draw, "café")
    hint = "an accent was typed as a character of its own: copy the name as the model has it"
    refused(*draw, unicodedata.normalize("NFD", "café"), says=["its classes are bar, café and tea; " + hint], status=2)
    assert hint not in refused(*draw, "cafe", says=["no class called 'cafe'"], status=2)


def test_from_folders_to_pictures(tmp_path):
    """Names of folders are what --class takes, in both programs, without any file of names."""
    from PIL import Image
    for name in ("circle", "square", "triangle"):
        (tmp_path / "in" / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((8, 8, 3), 40 * i + len(name), np.uint8)).save(tmp_path / "in" / name / f"{i}.png")
    assert call(prepare_data, "--data_dir", tmp_path / "in", "--image_size", 8, "--labels", "--output_name",
                tmp_path / "x.bin") == ""
    run(TRAIN, *start_flags(Config(**CLASSES), tmp_path / "x.bin", tmp_path, 2))
    weights = checkpoint_in(tmp_path, 2).name
    ours, theirs, said = both_draw(tmp_path, weights, 8, "--class", "square")
    assert np.abs(ours - theirs).max() <= 2 and "rows" not in said
    assert "(rows: circle, square, triangle)" in both_draw(tmp_path, weights, 6)[2]


# ----------------------------------------------------------------------------------------------------
# other files

def test_names_travel(tmp_path):
    """Exports and imports keep the names; --class_names gives them to a model without any."""
    config = Config(**CLASSES)
    named_file(tmp_path / "w.bin", config, FRUIT)
    perturbed_file(tmp_path / "bare.bin", config)
    (tmp_path / "names").write_text("x\ny\nz\n")
    for name in ("a.pt", "a.safetensors", "a.bin"):
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--export", tmp_path / name) == ""
        assert train_unet.load_model(str(tmp_path / name))[1].class_names == FRUIT
        assert call(generate, "--import", tmp_path / name, "--export", tmp_path / "back.bin") == ""
        assert unet_io.read_checkpoint(str(tmp_path / "back.bin")).class_names == FRUIT
        run(TRAIN, "--model_weights", tmp_path / "back.bin", "--generate", "--num_samples", 1, "--sample_steps", 1, "--class", "banana",
            "--output_name", tmp_path / "x.png")
    assert call(generate, "--import", tmp_path / "bare.bin", "--export", tmp_path / "named.bin", "--class_names",
                tmp_path / "names") == ""
    assert unet_io.read_checkpoint(str(tmp_path / "named.bin")).class_names == ("x", "y", "z")
    assert call(generate, "--import", tmp_path / "bare.bin", "--export", tmp_path / "b.pt") == ""
    assert train_unet.load_model(str(tmp_path / "b.pt"))[1].class_names == ()
    import torch
    held = torch.load(tmp_path / "a.pt", weights_only=True)
    for names, says in ((["x"] * 3, "two classes called x"), (["a", "b", "c", "d"], "4 names of classes for 3"),
                        (["a", 3], "no list of texts"), ("abc", "no list of texts"), (["a\0"], "UTF-8"),
                        (["\ud800"], "UTF-8"), (["a\nb"], "no list of texts")):
        torch.save(held | dict(class_names=names), tmp_path / "bad.pt")
        with pytest.raises(UserError, match=says):
            train_unet.load_model(str(tmp_path / "bad.pt"))


def test_doubled_names(tmp_path):
    """Names that several classes share, as ImageNet's cranes do, draw all of them, and --class refuses those alone."""
    perturbed_file(tmp_path / "w.bin", Config(**CLASSES))
    (tmp_path / "names").write_text("crane\nheron\ncrane\n")
    named = ["--model_weights", tmp_path / "w.bin", "--class_names", tmp_path / "names", "--sample_steps", 1,
             "--output_name", tmp_path / "x.png"]
    assert "(rows: crane, heron, crane)" in run(TRAIN, *named, "--generate", "--num_samples", 3).stdout
    run(TRAIN, *named, "--generate", "--num_samples", 1, "--class", "heron")
    refused(TRAIN, *named, "--generate", "--num_samples", 1, "--class", "heron,crane", says=["several classes are called 'crane'"], status=2)
    assert call(generate, *named, "--num_samples", 1, "--class", "heron") == ""
    assert "several classes are called 'crane'" in call(generate, *named, "--num_samples", 1, "--class", "crane")


@pytest.mark.parametrize("text, says", [(b"crane\nheron\ncrane\n", "names has two classes called crane"),
                                        (b"crane\n\nheron\n", "names has a class without a name"),
                                        (b"crane\ncaf\xe9\nheron\n", "names of classes that are no text in UTF-8")])
def test_names_that_are_not_stored(tmp_path, text, says):
    """Names that no file of weights can hold are refused before anything is written."""
    perturbed_file(tmp_path / "w.bin", Config(**CLASSES))
    (tmp_path / "names").write_bytes(text)
    named = ["--model_weights", tmp_path / "w.bin", "--class_names", tmp_path / "names"]
    for flags in (["--export", tmp_path / "x.pt"], ["--export_page", tmp_path / "x.html"]):
        assert says in call(generate, *named, *flags)
    train = [*named, "--data_file", write_fruit(tmp_path / "data.bin", FRUIT), "--out_dir", tmp_path / "run"]
    assert says in call(train_unet, *train, "--device", "cpu")
    refused(TRAIN, *train, says=says)
    assert not list(tmp_path.glob("x.*"))


def test_bytes_of_names(tmp_path, capsys):
    """A byte order mark is no part of a name, and what is no UTF-8 may be drawn, but not stored."""
    config = Config(**CLASSES | dict(num_classes=2))
    perturbed_file(tmp_path / "w.bin", config)
    named = ["--model_weights", tmp_path / "w.bin", "--class_names", tmp_path / "names"]
    drawn = [*named, "--num_samples", 2, "--sample_steps", 1, "--output_name", tmp_path / "x.png"]
    (tmp_path / "names").write_bytes(b"\xef\xbb\xbfcat\nd\xf6g\n")
    assert call(generate, *drawn) == "" and "(rows: cat, d\\xF6g)" in capsys.readouterr().out
    assert call(generate, *drawn, "--class", "cat") == ""
    assert call(generate, *drawn, "--class", b"d\xf6g".decode("utf-8", "surrogateescape")) == ""
    for flag, name in (("--export", "x.bin"), ("--export_page", "x.html")):
        assert "names of classes that are no text in UTF-8" in call(generate, *named, flag, tmp_path / name)
        assert not (tmp_path / name).exists()


def test_quality_by_name(tmp_path, monkeypatch, capsys):
    """The accuracy of a classifier is told of the model's numbers, whatever the held-out file's are."""
    named_file(tmp_path / "w.bin", Config(**CLASSES), FRUIT)
    perturbed_file(tmp_path / "bare.bin", Config(**CLASSES))
    seen = []
    monkeypatch.setattr(quality, "classification_accuracy",
                        lambda images, labels, tests, of_tests, *_: seen.append([labels, of_tests]) or 0.5)
    monkeypatch.setattr(quality, "feature_network", lambda: (None, "nothing"))

    def judged(names, *flags, shown=FRUIT, weights="w.bin"):
        held_out = write_fruit(tmp_path / "held.bin", names, shown)
        seen.clear()
        capsys.readouterr()
        assert call(generate, "--model_weights", tmp_path / weights, "--num_samples", 6, "--sample_steps", 1, "--device",
                    "cpu", "--output_name", tmp_path / "x.png", "--quality", held_out, *flags) == ""
        return [tensor.tolist() for pair in seen for tensor in pair], capsys.readouterr().out

    right, said = judged(FRUIT)
    assert right[0] == [0, 0, 1, 1, 2, 2] and set(right[1]) <= {0, 1, 2} and "note" not in said
    moved, said = judged(FRUIT[::-1])
    assert moved == right and "cherry is number 0 there and 2 in the model" in said
    none, said = judged((*FRUIT, "date"), shown=("apple", "date"))
    assert not none and "left out" in said and "date, which the model does not know" in said
    _, said = judged(FRUIT, "--class", "apple,banana")
    assert "images of cherry, of which no pictures are drawn" in said
    same, said = judged(FRUIT, weights="bare.bin")
    assert same == right and "does not name its classes" in said


def test_guide_by_name(tmp_path):
    """A guide that numbers its classes otherwise guides as one that doesn't, or is refused."""
    config = Config(**CLASSES | dict(seed=4))
    named_file(tmp_path / "w.bin", Config(**CLASSES), FRUIT)
    named_file(tmp_path / "guide.bin", config, FRUIT)
    perturbed_file(tmp_path / "bare.bin", config)
    turned = unet_io.read_checkpoint(str(tmp_path / "guide.bin"))
    model, _ = train_unet.load_model(str(tmp_path / "guide.bin"))
    model.label_emb.weight.data = model.label_emb.weight.data[[2, 0, 1, 3]]
    turned.sections |= unet_io.class_section(["cherry", "apple", "banana"])
    turned.sections["weights"] = train_unet.to_numpy(train_unet.file_order(model, model.parameters()))
    unet_io.write_checkpoint(str(tmp_path / "turned.bin"), turned)
    named_file(tmp_path / "others.bin", config, ("apple", "banana", "date"))
    drawn = {}
    for name in ("guide", "turned", "others", "bare"):
        sentence = call(generate, "--model_weights", tmp_path / "w.bin", "--num_samples", 3, "--sample_steps", 3,
                        "--guide_weights", tmp_path / f"{name}.bin", "--guidance_scale", 2, "--device", "cpu",
                        "--output_name", tmp_path / "x.png")
        drawn[name] = sentence or picture(tmp_path / "x.png")
    assert (drawn["turned"] == drawn["guide"]).all() and (drawn["bare"] == drawn["guide"]).all()
    assert "does not know the classes cherry" in drawn["others"]


@pytest.mark.parametrize("text, says", [
    ("cat\n", "1 names of classes for 2"), ("cat\ndog", "1 names of classes for 2"), ("cat\ncat\n", "two classes"),
    ("\ncat\n", "without a name"), ("c\0t\ndog\n", "UTF-8"), (b"c\xfft\ndog\n", "UTF-8")])
def test_damaged_names(tmp_path, text, says):
    """In images and in weights, in both programs, one sentence."""
    text = text if isinstance(text, bytes) else text.encode()
    data = np.zeros((4, 3, 8, 8), np.uint8).tobytes() + np.array([0, 1, 0, 1], "<i4").tobytes() + text
    header = np.zeros(256, "<i4")
    header[:9] = [unet_io.IMAGES_MAGIC, 4, 3, 8, 8, 1, 1, 2, len(text)]
    header[9] = np.uint32(zlib.crc32(header.tobytes(), zlib.crc32(data))).view(np.int32)
    (tmp_path / "x.bin").write_bytes(header.tobytes() + data)
    with pytest.raises(UserError, match=says):
        unet_io.read_images(str(tmp_path / "x.bin"))
    config = Config(**CLASSES | dict(num_classes=2))
    refused(TRAIN, *start_flags(config, tmp_path / "x.bin", tmp_path / "run", 1), says=[says, "x.bin"])
    assert not (tmp_path / "run").exists()
    if b"\xff" in text or text == b"cat\n":
        return  # a text section is written as text, and weights may name fewer classes
    perturbed_file(tmp_path / "w.bin", config)
    file = unet_io.read_checkpoint(str(tmp_path / "w.bin"))
    file.sections["class_names"] = text.decode()
    unet_io.write_checkpoint(str(tmp_path / "w.bin"), file)
    says = says if b"dog" not in text or b"\0" in text else "2"
    with pytest.raises(UserError, match=says):
        unet_io.read_checkpoint(str(tmp_path / "w.bin"))
    refused(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 1, says=["w.bin", says])


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_not_learned_of_classes(tmp_path, images8, program):
    """Classes that the images have and the model is not told, and that the model has and no image is of."""
    flags = (*unet_io.flags_of(Config(**TOY)), "--data_file", images8, "--steps", 1, *QUICK)
    without = started(program, *flags, "--out_dir", tmp_path / "without").stdout
    assert f"note: {images8} has images of 3 classes, which are not told apart without --class_cond 1\n" in without
    more = started(program, *flags, "--class_cond", 1, "--num_classes", 5, "--out_dir", tmp_path / "more").stdout
    assert "note: --num_classes 5: only 3 have images, and the others are never learned\n" in more
    right = started(program, *flags, "--class_cond", 1, "--out_dir", tmp_path / "right").stdout
    assert "not told apart" not in right and "never learned" not in right

    perturbed_file(tmp_path / "bare.bin", Config(**TOY))
    place = flags.index("--num_classes")
    preset = (*flags[:place], *flags[place + 2:], "--class_cond", 1, "--preset", "fashion32")
    of_preset = started(program, *preset, "--model_weights", tmp_path / "bare.bin", "--out_dir", tmp_path / "preset").stdout
    assert "note: --num_classes 10: only 3 have images, and the others are never learned\n" in of_preset


@pytest.mark.parametrize("program", PROGRAMS)
def test_validation_on_the_images_themselves(tmp_path, images8, program):
    flags = (*unet_io.flags_of(Config(**TOY)), "--data_file", images8, "--steps", 1, *QUICK, "--out_dir", tmp_path)
    other = write_toy_images(tmp_path / "other.bin", seed=2)
    said = f"note: {images8} holds the images that the run learns from: its loss tells nothing of others\n"
    assert said in started(program, *flags, "--val_file", images8).stdout
    assert said not in started(program, *flags, "--val_file", other, "--out_dir", tmp_path / "other").stdout


def test_new_classes_cannot_be_tuned(tmp_path):
    """A tuning learns from what the model draws, which is nothing of classes that it does not know; those it knows it takes."""
    config = Config(**CLASSES | dict(predict="v"))
    perturbed_file(tmp_path / "bare.bin", dataclasses.replace(config, class_cond=False, num_classes=0, cond_drop_prob=0.0))
    named_file(tmp_path / "known.bin", config, FRUIT)
    data = write_fruit(tmp_path / "fruit.bin", FRUIT, FRUIT)
    tune = ("--data_file", data, "--consistency", 1, "--path_steps", 2, "--steps", 1, "--out_dir", tmp_path / "run", *QUICK)
    start = ("--model_weights", tmp_path / "bare.bin", "--class_cond", 1, *tune)
    said = refused(TRAIN, *start, says=["none is known", "train it for these classes first"])
    assert said == "error: " + call(train_unet, *start[:-len(QUICK)], "--device", "cpu")
    text = run(TRAIN, "--model_weights", tmp_path / "known.bin", *tune, "--guidance_scale", 2).stdout
    assert "note: --guidance_scale 2 guides the grids alone, and not what the network learns from\n" in text


def test_class_without_a_name():
    """It does not answer to 0, which no class is called."""
    with pytest.raises(UserError, match="has no class called '0'"):
        generate.parse_classes("0", ("", "cat"), 2)


def test_images_of_too_many_classes(images8):
    """What is said leads to what helps: labels where there are none, more classes where these are too few."""
    images = unet_io.read_images(images8)
    with pytest.raises(UserError, match="has 3 classes, more than --num_classes 2: use 3$"):
        images.check_labels(Config(**CLASSES | dict(num_classes=2)))
    images.class_names = ()
    with pytest.raises(UserError, match="has no labels, .* prepare_data.py --labels$"):
        images.check_labels(Config(**CLASSES))
