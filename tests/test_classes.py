"""Labels from the image file to the pictures: preparing, training, resuming, drawing by class, refusals."""
import gzip
import zlib

import numpy as np
import pytest

import generate
import prepare_data
import train_unet
import unet_io
from harness import (
    TOY, TRAIN, call, checkpoint_in, perturbed_file, picture, refused, run, same_bits, start_flags,
    write_toy_images)
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
    assert call(prepare_data, *words, "--channels", 3, "--image_size", 12) == ""
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
    assert call(prepare_data, "--data_dir", tmp_path / "in", "--image_size", 8, "--channels", channels,
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
    run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", 6, *common, "--batch_size", 4,
        "--output_name", tmp_path / "a.png")
    assert call(generate, "--model_filename", tmp_path / "w.bin", "--num_images", 6, *common,
                "--device", "cpu", "--output_name", tmp_path / "b.png") == ""
    ours, theirs = picture(tmp_path / "a.png"), picture(tmp_path / "b.png")
    assert ours.shape == theirs.shape == (3 * 10 + 2, 2 * 10 + 2, 3) and np.abs(ours - theirs).max() <= 2
    drawn = {}
    for number in range(3):
        run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", 1, "--seed", 2 * number, *common,
            "--class", number, "--output_name", tmp_path / "c.png")
        drawn[number] = picture(tmp_path / "c.png")[2:-2, 2:-2]
        assert np.abs(drawn[number] - ours[2 + 10 * number:][:8, 2:10]).max() <= 1
    run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", 1, *common, "--class", 1,
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
        run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", 2, "--sample_steps", 8, *words,
            "--output_name", tmp_path / f"{name}.png")
        pictures[name] = picture(tmp_path / f"{name}.png")
    assert (pictures["none"] == pictures["empty"]).all() and (pictures["all"] == pictures["whole"]).all()
    assert len({pictures[name].tobytes() for name in ("none", "all", "part")}) == 3


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
        run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", 5, "--sample_steps", 4,
            "--batch_size", batch, "--guidance_scale", 3, "--output_name", tmp_path / f"{batch}.png")
    assert np.abs(picture(tmp_path / "1.png") - picture(tmp_path / "5.png")).max() <= 1
    ones = [*start_flags(Config(**CLASSES), images8, tmp_path / "run", 1), "--guidance_scale", 3,
            "--microbatch", 1]
    refused(TRAIN, *ones, says="--microbatch 2")
    run(TRAIN, *ones, "--num_samples", 0)


@pytest.mark.parametrize("words, says, status", [
    (["--class", "3"], ["--class 3", "2"], 2), (["--class", "x"], "--class x", 2),
    (["--guidance_scale", "-1"], "--guidance_scale", 2), (["--guidance_interval", "0.5"], "0.5", 1),
    (["--guidance_interval", "0.7,0.2"], "0.7,0.2", 1), (["--guidance_interval", "0,2"], "0,2", 1)])
def test_refused_classes(tmp_path, words, says, status):
    perturbed_file(tmp_path / "w.bin", Config(**CLASSES))
    refused(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", 1, *words, says=says, status=status)


def test_models_without_classes(tmp_path):
    """They take no class and no guidance, in either program; nor does one that never drew without a class."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    perturbed_file(tmp_path / "c.bin", Config(**CLASSES | dict(cond_drop_prob=0.0)))
    guided = ["--guidance_scale", 2]
    for name, words, says in (("w", ["--class", 1], "class_cond"), ("w", guided, "cond_drop_prob"),
                              ("c", guided, "cond_drop_prob")):
        refused(TRAIN, "--model_weights", tmp_path / f"{name}.bin", "--generate", 1, *words, says=says)
        assert says in call(generate, "--model_filename", tmp_path / f"{name}.bin", "--device", "cpu", *words)


def test_version_1(tmp_path):
    """A file of the version before, whose newer fields mean nothing, is a model without classes."""
    model = perturbed_file(tmp_path / "w.bin", Config(**TOY))
    data = bytearray((tmp_path / "w.bin").read_bytes())
    header = np.frombuffer(data, "<i4", 256).copy()
    header[1], header[107:128], header[2] = 1, 0, 0
    crc = zlib.crc32(header.tobytes(), zlib.crc32(data[1024:]))
    header[2] = np.uint32(crc).view(np.int32)
    (tmp_path / "old.bin").write_bytes(header.tobytes() + data[1024:])
    for name in ("w", "old"):
        run(TRAIN, "--model_weights", tmp_path / f"{name}.bin", "--generate", 1, "--sample_steps", 3,
            "--output_name", tmp_path / f"{name}.png")
    assert (picture(tmp_path / "w.png") == picture(tmp_path / "old.png")).all()
    again, checkpoint = train_unet.load_model(str(tmp_path / "old.bin"))
    assert not again.config.class_cond and checkpoint.run.get("guidance_scale") is None
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(model.parameters(), again.parameters()))


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
