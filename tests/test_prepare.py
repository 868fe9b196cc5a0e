"""prepare_data.py: folders and zips of pictures in, one file out."""
import os
import resource
import shutil
import sys
import zipfile

import numpy as np
from PIL import Image

import generate
import train_unet
import unet_io
from harness import (
    ROOT, SMALL, TOY, TRAIN, call, losses_in, perturbed_file, refused, run, same_bits, script,
    start_flags)
from unet_io import Config, flags_of


def make_pictures(folder):
    """A folder tree of odd picture files, good and bad."""
    for name in ("cats", "dogs/small"):
        (folder / name).mkdir(parents=True)
    gradient = np.zeros((30, 40, 3), np.uint8)
    gradient[..., 0], gradient[..., 1] = np.arange(40) * 6, np.arange(30)[:, None] * 8
    Image.fromarray(gradient).save(folder / "cats/plain.png")
    Image.fromarray(gradient).save(folder / "cats/photo.jpg", quality=95)
    Image.fromarray(gradient).convert("P").save(folder / "cats/palette.gif")
    clear = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    clear.paste((0, 0, 255, 255), (0, 0, 10, 20))
    clear.save(folder / "dogs/alpha.png")
    Image.new("L", (9, 13), 100).save(folder / "dogs/grey.png")
    Image.fromarray(np.full((8, 8), 30000, np.uint16)).save(folder / "dogs/deep.png")
    turned = Image.fromarray(gradient)
    exif = turned.getexif()
    exif[0x0112] = 6  # rotated by 90 degrees
    turned.save(folder / "dogs/small/turned.jpg", exif=exif, quality=95)
    whole = (folder / "cats/plain.png").read_bytes()
    (folder / "dogs/cut.png").write_bytes(whole[:len(whole) // 2])
    (folder / "dogs/words.jpg").write_text("this is no picture")
    (folder / "dogs/empty.png").write_bytes(b"")
    (folder / "notes.txt").write_text("not tried at all")
    (folder / ".hidden.png").write_bytes(b"")
    return folder


GOOD = ["cats/palette.gif", "cats/photo.jpg", "cats/plain.png", "dogs/alpha.png", "dogs/deep.png",
        "dogs/grey.png", "dogs/small/turned.jpg"]
BAD = ["dogs/cut.png", "dogs/empty.png", "dogs/words.jpg"]


def test_prepare_folder(tmp_path):
    make_pictures(tmp_path / "in")
    result = script("prepare_data.py", "--data_dir", tmp_path / "in", "--output_name", tmp_path / "x.bin",
                    "--image_size", 8, "--labels")
    skipped = [line for line in result.stderr.splitlines() if line.startswith("skipped")]
    assert len(skipped) == len(BAD) and all(any(name in line for line in skipped) for name in BAD)
    assert "7 images of 8x8" in result.stdout and "3 files skipped" in result.stdout
    images = unet_io.read_images(str(tmp_path / "x.bin"))
    assert images.pixels.shape == (7, 3, 8, 8) and images.pixels.dtype == np.uint8
    assert images.class_names == ("cats", "dogs", "small")
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1, 2]
    by_name = dict(zip(GOOD, images.pixels.astype(int)))
    alpha = by_name["dogs/alpha.png"]  # blue on the left, white where it is clear
    assert (alpha[:, :, 0] == [[0] * 8, [0] * 8, [255] * 8]).all() and (alpha[:, :, -1] == 255).all()
    assert (by_name["dogs/grey.png"] == 100).all()
    assert np.abs(by_name["dogs/deep.png"] - 30000 / 257).max() <= 1  # 16 bits
    plain = by_name["cats/plain.png"]  # the central square, smoothly scaled
    assert (np.diff(plain[0], axis=1) > 0).all() and (np.diff(plain[1], axis=0) > 0).all()
    assert abs(plain[0].mean() - 19.5 * 6) < 3 and abs(plain[1].mean() - 14.5 * 8) < 3
    assert np.abs(by_name["cats/photo.jpg"] - plain).max() < 25
    turned = by_name["dogs/small/turned.jpg"]  # what was below is now on the left
    assert (np.diff(turned[1], axis=1) < 0).all() and (np.diff(turned[0], axis=0) > 0).all()


def test_prepare_zip_and_split(tmp_path):
    """A zip gives the same images as the folder; the split leaves each image on one side, reproducibly."""
    folder = make_pictures(tmp_path / "in")
    for name in BAD:
        (folder / name).unlink()
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    for source, target in (("in", "a"), ("in.zip", "b"), ("in", "c")):
        script("prepare_data.py", "--data_dir", tmp_path / source,
               "--output_name", tmp_path / f"{target}.bin", "--image_size", 8,
               "--val_fraction", "0.3" if target != "c" else "0")
    for suffix in ("", "_val"):
        assert (tmp_path / f"a{suffix}.bin").read_bytes() == (tmp_path / f"b{suffix}.bin").read_bytes()
    train, held_out, everything = (unet_io.read_images(str(tmp_path / name)).pixels
                                   for name in ("a.bin", "a_val.bin", "c.bin"))
    assert len(train) == 5 and len(held_out) == 2
    together = sorted(image.tobytes() for image in [*train, *held_out])
    assert together == sorted(image.tobytes() for image in everything)


def test_prepare_exact_size(tmp_path):
    """Pictures that already have the size come out as they went in, and train."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
    (tmp_path / "in").mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"in/{i}.png")
    script("prepare_data.py", "--data_dir", tmp_path / "in", "--output_name", tmp_path / "x.bin",
           "--image_size", 8)
    images = unet_io.read_images(str(tmp_path / "x.bin"))
    assert same_bits(images.pixels, np.moveaxis(pixels, -1, 1)) and images.labels is None
    run(TRAIN, *start_flags(Config(**TOY), tmp_path / "x.bin", tmp_path / "run", 2))
    result = script("train_unet.py", *flags_of(Config(**TOY)), "--data_dir", tmp_path / "in", "--compile", 0,
                    "--steps", 2, "--log_every", 1, "--out_dir", tmp_path / "python", "--device", "cpu",
                    "--sample_every", 0)
    assert "step      2/2" in result.stdout
    ours, theirs = losses_in(tmp_path / "python"), losses_in(tmp_path / "run")
    assert abs(ours[1] / theirs[1] - 1) < 1e-5


def test_prepare_refusals(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("x")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/a.png").write_text("x")
    (tmp_path / "no.zip").write_text("x")
    common = [sys.executable, ROOT / "prepare_data.py", "--output_name", tmp_path / "x.bin"]
    for source, words, says in (("none", [], "none"), ("empty", [], "empty"), ("text", [], "no images"),
                                ("no.zip", [], "no.zip"), ("bad", ["--image_size", 0], "--image_size"),
                                ("bad", ["--val_fraction", 1], "--val_fraction")):
        refused(*common, "--data_dir", tmp_path / source, *words, says=says)
    result = run(*common, "--data_dir", tmp_path / "bad", status=1)
    assert "skipped a.png" in result.stderr and "error: of 1 file in " in result.stderr
    assert not list(tmp_path.glob("x*"))
    Image.new("RGB", (300, 300), "red").save(tmp_path / "bad/b.png")
    (tmp_path / "full.bin").symlink_to("/dev/full")

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
    for name, says in (("bad", "a folder"), ("full.bin", "a device")):
        refused(*common[:-1], tmp_path / name, "--data_dir", tmp_path / "bad", says=[name, says])
    (tmp_path / "x.bin").write_text("what was there before")
    run(*common, "--data_dir", tmp_path / "bad", "--image_size", 300, status=1, preexec_fn=limit)
    assert (tmp_path / "x.bin").read_text() == "what was there before"
    assert not (tmp_path / "x.bin.tmp").exists()
    result = run(*common, "--data_dir", tmp_path / "bad", "--image_size", 8)
    assert "1 image of 8x8" in result.stdout and "1 file skipped" in result.stdout


def test_python_refusals(tmp_path, images8):
    """The other two programs: one sentence, no traceback."""
    (tmp_path / "bad.pt").write_text("x" * 100)
    weights = tmp_path / "w.bin"
    perturbed_file(weights, Config(**SMALL))
    python = ["--device", "cpu", "--out_dir", tmp_path / "run"]
    draw = ["--device", "cpu", "--output_name", tmp_path / "x.png", "--model_filename"]
    for module, words, says in (
            (train_unet, [*python, "--data_file", tmp_path / "none.bin"], "none.bin"),
            (train_unet, [*python, "--data_file", images8], "prepare_data.py"),
            (train_unet, [*python, "--resume", tmp_path], "checkpoint"),
            (train_unet, [*python, "--num_channels", 32, "--data_file", images8], "norm_groups"),
            (train_unet, [*python, "--skip_outliers", 6, "--compare_quality", "x.jsonl"], "--skip_outliers"),
            (train_unet, [*python, "--image_size", 36, "--data_file", images8], "image_size"),
            (generate, [*draw, tmp_path / "none.bin"], "none.bin"), (generate, [*draw, images8], "toy8.bin"),
            (generate, [*draw, tmp_path / "bad.pt"], "bad.pt"),
            (generate, [*draw, weights, "--num_channels", 64],
             f"--num_channels 64 contradicts {weights}, which was made with 32"),
            (generate, [*draw, weights, "--channel_mult", "1,2"],
             f"--channel_mult 1,2 contradicts {weights}, which was made with 1"),
            (generate, [*draw, weights, "--predict", "x0"], "--predict x0 contradicts"),
            (train_unet, [*python, "--model_weights", weights, "--num_channels", 64],
             f"--num_channels 64 contradicts {weights}, which was made with 32")):
        sentence = call(module, *words)
        assert says in sentence and len(sentence.splitlines()) == 1, (words, sentence)
    (tmp_path / "other").mkdir()
    for step in (9, 20):
        shutil.copy(weights, tmp_path / f"other/checkpoint_{step:08d}.bin")
    sentence = call(train_unet, *python[:2], "--out_dir", tmp_path / "other", "--model_weights", weights)
    assert sentence.startswith(f"{tmp_path / 'other'} already holds a run, at step 20; continue it with")
    assert len(os.listdir(tmp_path / "other")) == 2
    # and on the command line it comes without a traceback
    refused(sys.executable, ROOT / "generate.py", "--model_filename", tmp_path / "none.bin", says="none.bin")
