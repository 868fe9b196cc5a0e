"""prepare_data.py: folders and zips of pictures in, one file out."""
import contextlib
import errno
import io
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import warnings
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageDraw

import generate
import prepare_data
import train_unet
import unet_io
from harness import (
    LONG, ROOT, SMALL, TOY, TRAIN, call, losses_in, perturbed_file, refused, run, same_bits, script,
    start_flags)
from unet_io import Config, UserError, flags_of


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


@pytest.mark.parametrize("channels, classes", [(1, 0), (3, 2), (4, 2)])
def test_data_dir_of_training(tmp_path, channels, classes):
    """train_unet.py --data_dir prepares with its own size, channels and labels, of whatever prepare_data.py takes."""
    folder = make_colours(tmp_path / "in", "cats/a.png", "cats/b.png", "dogs/c.png", "dogs/d.png")
    config = Config(**TOY | dict(in_channels=channels, class_cond=bool(classes), num_classes=classes))
    words = [*flags_of(config), "--compile", 0, "--steps", 1, "--device", "cpu", "--sample_every", 0]
    script("train_unet.py", *words, "--data_dir", folder, "--out_dir", tmp_path / "run")
    images = unet_io.read_images(str(tmp_path / "run/data_8.bin"))
    assert images.pixels.shape == (4, channels, 8, 8)
    assert images.class_names == (("cats", "dogs") if classes else ())
    np.savez(tmp_path / "x.npz", images=images.pixels, labels=[1, 0, 1, 1])
    script("train_unet.py", *words, "--data_dir", tmp_path / "x.npz", "--out_dir", tmp_path / "array")
    images = unet_io.read_images(str(tmp_path / "array/data_8.bin"))
    assert images.labels is None if not classes else images.labels.tolist() == [1, 0, 1, 1]
    assert "can't be given 2 channels" in call(train_unet, *flags_of(Config(**TOY | dict(in_channels=2))), "--data_dir",
                                               folder, "--device", "cpu", "--out_dir", tmp_path / "two")


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
    unet_io.write_images(tmp_path / "x.bin", np.zeros((1, 3, 8, 8), np.uint8))
    before = (tmp_path / "x.bin").read_bytes()
    run(*common, "--data_dir", tmp_path / "bad", "--image_size", 300, status=1, preexec_fn=limit)
    assert (tmp_path / "x.bin").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))
    result = run(*common, "--data_dir", tmp_path / "bad", "--image_size", 8)
    assert "1 image of 8x8" in result.stdout and "1 file skipped" in result.stdout


def test_python_refusals(tmp_path, images8, tools):
    """The other two programs: one sentence, no traceback."""
    (tmp_path / "bad.pt").write_text("x" * 100)
    weights = tmp_path / "w.bin"
    perturbed_file(weights, Config(**SMALL))
    python = ["--device", "cpu", "--out_dir", tmp_path / "run"]
    draw = ["--device", "cpu", "--output_name", tmp_path / "x.png", "--model_weights"]
    for module, words, says in (
            (train_unet, [*python, "--data_file", tmp_path / "none.bin"], "none.bin"),
            (train_unet, [*python, "--data_file", images8], "prepare_data.py"),
            (train_unet, [*python[:2], "--resume", tmp_path], "checkpoint"),
            (train_unet, [*python, "--num_channels", 32, "--data_file", images8], "norm_groups"),
            (tools("compare_quality"), [*python, "--skip_outliers", 6], "--skip_outliers"),
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
    refused(sys.executable, ROOT / "generate.py", "--model_weights", tmp_path / "none.bin", says="none.bin")


# ----------------------------------------------------------------------------------------------------
# hostile folders and zips

def make_colours(folder, *names):
    """8x8 pictures, each of its own shade of grey: 10, 20 ..."""
    for n, name in enumerate(names, 1):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * n,) * 3).save(folder / name)
    return folder


def prepared(source, *flags, timeout=LONG, **options):
    """(shades, names of the classes, stdout, stderr) of a call that must end well, without a traceback."""
    target = source.parent / "prepared.bin"
    result = script("prepare_data.py", "--data_dir", source, "--output_name", target, "--image_size", 8,
                    *flags, timeout=timeout, **options)
    assert "Traceback" not in result.stderr
    images = unet_io.read_images(str(target))
    assert not list(source.parent.glob("prepared*tmp*"))
    labels = [images.class_names[n] for n in images.labels] if images.class_names else []
    return [int(image.max()) for image in images.pixels], labels, result.stdout, result.stderr


def test_prepare_links(tmp_path):
    """Links are followed, but nothing is taken twice, and what is no link gives the name."""
    folder = make_colours(tmp_path / "in", "cats/a.png", "dogs/b.png", "dogs/small/c.png")
    make_colours(tmp_path / "elsewhere", "birds/d.png")
    (folder / "all").symlink_to(folder / "cats")         # sorts before what it leads to
    (folder / "again.png").symlink_to(folder / "cats/a.png")
    os.link(folder / "dogs/b.png", folder / "dogs/x.png")
    for name in ("up", "cats/up", "dogs/small/up"):      # 3^40 paths
        (folder / name).symlink_to(folder)
    (folder / "cats/there").symlink_to(folder / "dogs")
    (folder / "far").symlink_to(tmp_path / "elsewhere/birds")
    (folder / "far.png").symlink_to(tmp_path / "elsewhere/birds/d.png")
    (folder / "gone").symlink_to(tmp_path / "unmounted")
    (folder / "itself.png").symlink_to("itself.png")
    shades, labels, out, err = prepared(folder, "--labels")
    assert list(zip(shades, labels)) == [(10, "cats"), (20, "dogs"), (30, "small"), (10, "far")]
    assert "2 files skipped" in out and "skipped gone: a link" in err and "skipped itself.png: a link" in err
    assert "note: 8 names led to" in err


def test_prepare_picture_behind_other_names(tmp_path):
    """A name that isn't tried doesn't use up the file of one that is."""
    folder = make_colours(tmp_path / "in", "a.png")
    (folder / "a.png").rename(folder / "0.blob")
    (folder / "b.png").symlink_to("0.blob")
    os.link(folder / "0.blob", folder / ".hidden.png")
    assert prepared(folder)[0] == [10]


def test_prepare_order_of_the_file_system(tmp_path, monkeypatch):
    """The same files give the same bytes in whatever order the folders list them."""
    folder = make_colours(tmp_path / "in", "a/1.png", "b/2.png", "c.png")
    os.link(folder / "a/1.png", folder / "b/1.png")
    for name in ("y", "x"):
        (folder / name).symlink_to(make_colours(tmp_path / "elsewhere", "3.png"))
    scandir, results = os.scandir, []
    for turn in (1, -1):
        def listed(place, turn=turn):
            with scandir(place) as entries:
                return contextlib.nullcontext(sorted(entries, key=lambda entry: entry.name)[::turn])
        monkeypatch.setattr(os, "scandir", listed)
        assert prepare_data.prepare(str(folder), str(tmp_path / "x.bin"), 8, labels=True) == (4, 0, 0)
        results.append((tmp_path / "x.bin").read_bytes())
    assert results[0] == results[1] and b"a\nb\nin\nx\n" in results[0]


def test_prepare_unreadable_folder(tmp_path, monkeypatch):
    """A folder that can't be listed may hold half the pictures: refused. One file is named and counted."""
    folder = make_colours(tmp_path / "in", "good/a.png", "shut/b.png")
    scandir, target = os.scandir, tmp_path / "x.bin"

    def refuse(place):
        if str(place).rstrip("/").endswith("shut"):
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        sentence = call(prepare_data, "--data_dir", folder, "--output_name", target)
        assert "in/shut can't be read (Permission denied)" in sentence and not target.exists()
    if os.getuid():  # root may read everything
        (folder / "shut").chmod(0)
        assert "in/shut can't be read" in call(prepare_data, "--data_dir", folder, "--output_name", target)
        (folder / "shut").chmod(0o700)
        (folder / "shut/b.png").chmod(0)
        assert "skipped shut/b.png: Permission denied" in prepared(folder)[3]


def test_prepare_pipes_and_devices(tmp_path):
    """Only regular files are opened."""
    folder = make_colours(tmp_path / "in", "a.png")
    os.mkfifo(folder / "pipe.png")
    for name in ("zero", "full", "tty"):
        (folder / f"{name}.png").symlink_to(f"/dev/{name}")
    shades, _, out, err = prepared(folder)
    assert shades == [10] and "4 files skipped" in out
    assert all(f"skipped {name}.png: no regular file" in err for name in ("pipe", "zero", "full", "tty"))
    os.mkfifo(tmp_path / "pipe")
    refused(sys.executable, ROOT / "prepare_data.py", "--data_dir", tmp_path / "pipe", "--output_name",
            tmp_path / "x.bin", says=["pipe is neither", "--data_dir"])


def test_prepare_file_becomes_a_pipe(tmp_path, monkeypatch):
    """A pipe that took a picture's place since the folder was listed is not waited for."""
    folder = make_colours(tmp_path / "in", "a.png", "b.png")
    source = prepare_data.Folder(str(folder))
    (folder / "b.png").unlink()
    os.mkfifo(folder / "b.png")
    with pytest.raises(ValueError, match="no regular file"), source.open("b.png"):
        pass


POSTSCRIPT = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
showpage
%%EOF
"""


def test_prepare_formats(tmp_path):
    """The content tells the format, and none starts another program. Other endings are counted."""
    folder = make_colours(tmp_path / "in", "a.png")
    shutil.copy(folder / "a.png", folder / "really_png.jpg")
    for name in ("ps.png", "no_ending", "ps.eps", "photo.HEIC", "video.heic", "notes.txt"):
        (folder / name).write_bytes(POSTSCRIPT)
    (tmp_path / "bin").mkdir()
    ghostscript = tmp_path / "bin/gs"
    ghostscript.write_text(f"#!/bin/sh\necho started >> {tmp_path}/started\necho 10.0\n")
    ghostscript.chmod(0o755)
    shades, _, out, err = prepared(folder, env=dict(os.environ, PATH=f"{tmp_path}/bin:{os.environ['PATH']}"))
    assert not (tmp_path / "started").exists()
    assert shades == [10, 10] and "2 files skipped" in out
    assert all(f"skipped {name}: not a picture of a known format" in err for name in ("ps.png", "no_ending"))
    assert "note: 4 files not tried" in err and all(kind in err for kind in ("2 .heic", "1 .eps", "1 .txt"))


def test_prepare_keeps_other_files(tmp_path):
    """What prepare_data.py did not make stays: arrays, a file of labels, any other."""
    folder = make_colours(tmp_path / "in", "a.png", "b.png")
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 8, 8), np.uint8))
    (tmp_path / "images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 8]) + bytes(64))
    (tmp_path / "labels.csv").write_text("a.png,cat\nb.png,dog\n")
    (tmp_path / "empty.bin").touch()
    for source, target, *words in (("x.npy", "x.npy", "--range", "0,1"), ("images-idx3-ubyte", "images-idx3-ubyte"),
                                   ("in", "labels.csv", "--labels", tmp_path / "labels.csv"), ("in", "x.npy")):
        before = (tmp_path / target).read_bytes()
        assert call(prepare_data, "--data_dir", tmp_path / source, "--output_name", tmp_path / target, *words) == (
            f"{tmp_path / target} holds no images of an earlier call; name another file with --output_name")
        assert (tmp_path / target).read_bytes() == before
    assert call(prepare_data, "--data_dir", folder, "--output_name", tmp_path / "empty.bin") == ""


def test_prepare_output_is_a_source(tmp_path):
    """Refused before anything is read, by whatever name."""
    folder = make_colours(tmp_path / "in", "a.png", "b_val.png", "c.png")
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.write(folder / "a.png", "a.png")
    os.link(folder / "a.png", tmp_path / "hard.bin")
    (tmp_path / "soft.bin").symlink_to(folder / "a.png")
    (tmp_path / "zip.bin").symlink_to(tmp_path / "in.zip")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for source, target in (("in", "in/a.png"), ("in", "hard.bin"), ("in", "soft.bin"), ("in", "in/b.png"),
                           ("in", "in/../in/a.png"), ("in.zip", "in.zip"), ("in.zip", "zip.bin")):
        refused(sys.executable, ROOT / "prepare_data.py", "--data_dir", tmp_path / source, "--output_name",
                tmp_path / target, "--val_fraction", 0.3 if target == "in/b.png" else 0,
                says=[target.split("/")[-1].split(".")[0], "holds no images of an earlier call; name another file"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / "link.bin").symlink_to(tmp_path / "nowhere.bin")  # neither is followed
    for target in ("in/x.bin", "link.bin"):  # a .bin in the folder is never read as a picture
        for _ in range(2):
            assert call(prepare_data, "--data_dir", folder, "--output_name", tmp_path / target) == ""
        assert len(unet_io.read_images(str(tmp_path / target))) == 3
    assert not (tmp_path / "nowhere.bin").exists()


def test_prepare_two_at_once(tmp_path, monkeypatch):
    """Two programs write one output: it is one of the two, whole."""
    one, two = (make_colours(tmp_path / name, *(f"{i}.png" for i in range(n))) for name, n in
                (("one", 3), ("two", 5)))
    target, load, started = str(tmp_path / "x.bin"), prepare_data.load_image, []

    def load_slowly(data, image_size, channels, **options):
        if not started:
            started.append(True)
            script("prepare_data.py", "--data_dir", two, "--output_name", target, "--image_size", 8)
            assert len(unet_io.read_images(target)) == 5
        return load(data, image_size, channels, **options)
    monkeypatch.setattr(prepare_data, "load_image", load_slowly)
    assert prepare_data.prepare(str(one), target, 8) == (3, 0, 0)
    assert len(unet_io.read_images(target)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two", "x.bin"]


def test_prepare_disk_is_full_at_the_end(tmp_path, monkeypatch):
    """Neither of two outputs is replaced where the other can't be written."""
    source, target = make_colours(tmp_path / "in", *(f"{i}.png" for i in range(8))), tmp_path / "x.bin"
    prepare_data.prepare(str(source), str(target), 8, True, 0.25)
    before = target.read_bytes(), (tmp_path / "x_val.bin").read_bytes()
    fsync = os.fsync

    def full(descriptor):
        if "/x.bin." in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="/x.bin can't be written: No space left"):
        prepare_data.prepare(str(source), str(target), 4, True, 0.25)
    assert (target.read_bytes(), (tmp_path / "x_val.bin").read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "x.bin", "x_val.bin"]


def test_prepare_memory(tmp_path, tools):
    """Huge pictures wait for each other, and one beyond the limit is skipped."""
    folder = make_colours(tmp_path / "in", "a.png")
    Image.new("RGBA", (9000, 9000), (20, 20, 20, 255)).save(folder / "huge0.png", compress_level=1)
    Image.new("L", (9500, 9500)).save(folder / "limit.png", compress_level=1)
    for i in range(1, 3):
        shutil.copy(folder / "huge0.png", folder / f"huge{i}.png")
    target = tmp_path / "x.bin"
    # by a small process, since Linux counts for a child what its parent held before it, here whatever earlier tests did
    result = run(sys.executable, "-c", tools("benchmark").MEASURE_MEMORY, sys.executable, ROOT / "prepare_data.py",
                 "--data_dir", folder, "--output_name", target, "--image_size", 8)
    shades = [int(image.max()) for image in unet_io.read_images(str(target)).pixels]
    assert shades == [10, 20, 20, 20]
    assert "skipped limit.png: Image size (90250000 pixels) exceeds limit" in result.stderr
    kibibytes = int(re.search(r"^(\d+) KiB$", result.stdout, re.M)[1])
    assert 1 << 17 < kibibytes < 2 << 20


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_prepare_stopped(tmp_path, faults, first):
    """Ctrl-C, kill and a closed terminal leave what was there and nothing else, a second signal too."""
    folder = tmp_path / "in"
    folder.mkdir()
    Image.effect_noise((1500, 1500), 50).save(folder / "0.png")
    for i in range(1, 40):
        shutil.copy(folder / "0.png", folder / f"{i}.png")
    unet_io.write_images(tmp_path / "x.bin", np.zeros((1, 3, 8, 8), np.uint8))
    before = (tmp_path / "x.bin").read_bytes()
    process = subprocess.Popen([sys.executable, ROOT / "prepare_data.py", "--data_dir", folder,
                                "--output_name", tmp_path / "x.bin"],
                               stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env=faults(tmp_path / "x.bin.", at=9, kind="stop"))
    os.waitpid(process.pid, os.WUNTRACED)  # until some images are written, or it has ended
    for kind in (first, signal.SIGTERM, signal.SIGCONT):  # so that both arrive at once
        process.send_signal(kind)
    rest = process.communicate(timeout=LONG)[1]
    assert process.returncode == 130 and "stopped" in rest and "Traceback" not in rest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "x.bin"]
    assert (tmp_path / "x.bin").read_bytes() == before


def test_prepare_names(tmp_path):
    """Control bytes and bytes that are no UTF-8 reach no terminal, and such files are read like others."""
    folder = make_colours(tmp_path / "in", "a\x1b[2J/1.png", "b\nc/2.png")
    for n, name in enumerate((b"\xff", b"\xfe"), 3):
        place = os.path.join(os.fsencode(folder), name)
        os.mkdir(place)
        Image.new("RGB", (8, 8), (10 * n,) * 3).save(folder / "x.png")
        os.rename(folder / "x.png", os.path.join(place, b"\xe9.png"))
    (folder / "bad\x1b]0;title\x07\n.png").write_text("x")
    (folder / "other.\x1bs").write_text("x")
    shades, labels, out, err = prepared(folder, "--labels")
    assert sorted(zip(shades, labels)) == [(10, r"a\x1B[2J"), (20, "b c"), (30, r"\xFF"), (40, r"\xFE")]
    assert r"skipped bad\x1B]0;title\x07\x0A.png: not" in err and r"1 .\x1Bs" in err
    assert "\x1b" not in err + out
    strange = os.fsencode(tmp_path) + b"/\x1b\xff"
    result = run(sys.executable, ROOT / "prepare_data.py", "--data_dir", folder, "--output_name",
                 os.fsdecode(strange) + ".bin")
    assert r"wrote" in result.stdout and r"\x1B\xFF.bin: 4 images" in result.stdout
    refused(sys.executable, ROOT / "prepare_data.py", "--data_dir", os.fsdecode(strange), "--output_name",
            tmp_path / "x.bin", says=r"\x1B\xFF does not exist")


def load_saved(tmp_path, name, image, size=8, **options):
    image.save(tmp_path / name, **options)
    return prepare_data.load_image((tmp_path / name).read_bytes(), size).astype(int)


def test_prepare_kinds_of_pictures(tmp_path):
    """Animations, palettes, 16 bits, CMYK, every EXIF orientation: as a viewer shows them."""
    red, blue = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    for ending in ("gif", "png", "webp", "tif"):
        pixels = load_saved(tmp_path, f"frames.{ending}", red, save_all=True, append_images=[blue])
        assert np.abs(pixels - np.array([255, 0, 0])[:, None, None]).max() <= 2, ending
    palette = Image.new("P", (8, 8))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.paste(1, (0, 0, 4, 8))
    for ending in ("gif", "png"):
        pixels = load_saved(tmp_path, f"palette.{ending}", palette, transparency=0)
        assert (pixels[:, :, 0] == [[0] * 8, [0] * 8, [255] * 8]).all() and (pixels[:, :, 7] == 255).all()
    assert np.abs(load_saved(tmp_path, "cmyk.jpg", red.convert("CMYK")) - [[[254]], [[0]], [[0]]]).max() <= 3
    deep = np.zeros((8, 8), np.uint16)
    deep[:, 4:] = 40000
    pixels = load_saved(tmp_path, "deep.png", Image.fromarray(deep))
    assert (pixels[:, :, 0] == 0).all() and (pixels[:, :, 7] == 156).all()
    pixels = load_saved(tmp_path, "clear16.png", Image.fromarray(deep), transparency=40000)
    assert (pixels[:, :, 0] == 0).all() and (pixels[:, :, 7] == 255).all()
    for array, says in ((deep.astype(np.float32) / 40000, "floating-point"),
                        (deep.astype(np.int32) * 2, "80000")):
        with pytest.raises(ValueError, match=says):  # black or white for all that we know
            load_saved(tmp_path, "range.tif", Image.fromarray(array))
    corner = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3
    stored = {1: corner, 2: corner[:, ::-1], 3: corner[::-1, ::-1], 4: corner[::-1], 5: corner.T,
              6: corner.T[::-1], 7: corner.T[::-1, ::-1], 8: corner.T[:, ::-1]}
    for orientation, array in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        for ending in ("png", "tif"):
            pixels = load_saved(tmp_path, f"turned.{ending}", Image.fromarray(array), exif=exif)
            assert (pixels == corner).all(), (orientation, ending)


def test_prepare_in_order():
    """Results come in order, and no more than asked for are in hand."""
    most, done = 0, []

    def work(n):
        nonlocal most
        most = max(most, n - len(done))
        return n * n
    with prepare_data.concurrent.futures.ThreadPoolExecutor(3) as pool:
        for result in prepare_data.in_order(pool, work, range(50), 4):
            done.append(result)
    assert done == [n * n for n in range(50)] and 0 < most < 4


# ----------------------------------------------------------------------------------------------------
# damaged zips

def png(shade):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade,) * 3).save(file, "png")
    return file.getvalue()


def zipped(*members, compression=zipfile.ZIP_DEFLATED):
    """The bytes of a zip of (name, content)."""
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as archive:
        warnings.simplefilter("ignore")  # about names that come twice
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def patched(data, number, local=None, central=None):
    """Change the headers of the zip's member `number`: {offset: bytes} of each."""
    data = bytearray(data)
    for mark, changes in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = [match.start() for match in re.finditer(re.escape(mark), data)][number]
        for offset, value in (changes or {}).items():
            data[at + offset:at + offset + len(value)] = value
    return bytes(data)


def number(value):
    return struct.pack("<I", value)


TWO = zipped(("a.png", png(10)), ("b.png", png(20)))
STORED = zipped(("a.png", png(10)), ("b.png", png(20)), compression=zipfile.ZIP_STORED)
ZIPS = {  # name: (the bytes, shades that are read, what is said)
    "checksum": (patched(TWO, 1, {14: b"none"}, {16: b"none"}), [10], "b.png: Bad CRC-32"),
    "content": (STORED.replace(png(20), png(20)[:-30] + bytes(30)), [10], "b.png: Bad CRC-32"),
    "encrypted": (patched(TWO, 1, {6: b"\1"}, {8: b"\1"}), [10], "b.png: encrypted"),
    "method": (patched(TWO, 1, {8: b"\x63"}, {10: b"\x63"}), [10], "b.png: That compression method"),
    "claims too little": (patched(TWO, 1, {22: number(30)}, {24: number(30)}), [10], "b.png: Bad CRC-32"),
    "claims too much": (patched(TWO, 1, {}, {24: number(2**32 - 2)}), [10], "b.png: larger than 256 MB"),
    "no such place": (patched(TWO, 1, {}, {42: number(2**31)}), [10], "b.png: "),
    "place of another": (patched(TWO, 1, {}, {42: number(0)}), [10], "b.png: "),
    "another name": (patched(TWO, 1, {30: b"c"}), [10], "b.png: File name in directory"),
    "twice": (zipped(("b.png", png(10)), ("a.png", png(20)), ("b.png", png(30))), [20, 30],
              "1 name came again"),
    "names": (zipped(("../../up.png", png(10)), ("/etc/root.png", png(20)), ("x/", b""), ("in.zip", TWO),
                     ("\x1b[2J.png", b"x"), ("__MACOSX/a.png", b"x")), [10, 20], "1 .zip"),
    "bomb": (zipped(("a.png", png(10)), ("b.png", bytes(300 << 20))), [10], "b.png: larger than 256 MB"),
    "half a bomb": (zipped(("a.png", png(10)), ("b.png", bytes(100 << 20))), [10], "b.png: not a picture"),
}


@pytest.mark.parametrize("name", ZIPS)
def test_prepare_damaged_entries(tmp_path, name):
    """An entry that can't be read is named and counted; the others are read."""
    data, expected, says = ZIPS[name]
    (tmp_path / "in.zip").write_bytes(data)
    shades, _, out, err = prepared(tmp_path / "in.zip")
    assert shades == expected and says in err and "\x1b" not in err
    assert f"{err.count('skipped ')} file" in out and {"in.zip", "prepared.bin"} == set(os.listdir(tmp_path))


def test_prepare_damaged_zips(tmp_path):
    """A zip without a readable list of entries is refused in a sentence."""
    end = TWO.rindex(b"PK\x05\x06")
    for n, (data, says) in enumerate((
            (b"", "as a zip"), (TWO[:len(TWO) // 2], "as a zip"), (TWO[:-1], "as a zip"),
            (png(1), "as a zip"),
            (TWO[:end] + TWO[end:].replace(TWO[end + 16:end + 20], number(2**31)), "none could be read"),
            (patched(TWO, 1, {}, {0: b"no"}), "as a zip"), (zipped(), "0 files"),
            (zipped(("a/", "")), "0 files"), (zipped(("a.txt", "x")), "of its 1 file none ends in"))):
        source = tmp_path / f"{n}.zip"
        source.write_bytes(data)
        sentence = call(prepare_data, "--data_dir", source, "--output_name", tmp_path / "x.bin")
        assert f"{n}.zip" in sentence and says in sentence and "\n" not in sentence, (n, sentence)
    assert not (tmp_path / "x.bin").exists()


def test_prepare_other_archives(tmp_path):
    """A file of another kind is refused with the kinds that can be read."""
    for name in ("in.tar.gz", "in.parquet", "in.svg"):
        (tmp_path / name).write_bytes(b"x" * 100)
        assert "--data_dir takes a folder or a zip of images, a picture, an IDX file, a .npy or a .npz" in call(
            prepare_data, "--data_dir", tmp_path / name, "--output_name", tmp_path / "x.bin")


def test_prepare_mutated_zips(tmp_path, capsys):
    """Whatever the bytes: images or a sentence, never another exception."""
    source, target, ends = tmp_path / "in.zip", tmp_path / "x.bin", {True: 0, False: 0}
    zip64 = io.BytesIO()
    with zipfile.ZipFile(zip64, "w") as archive, archive.open("a.png", "w", force_zip64=True) as file:
        file.write(png(10))
    for seed in range(400):
        chance = random.Random(seed)
        data = bytearray(chance.choice([TWO, STORED, zip64.getvalue()]))
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(data))
            data[at] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
        source.write_bytes(data[:chance.randrange(len(data))] if chance.random() < 0.1 else data)
        try:
            written, _, skipped = prepare_data.prepare(str(source), str(target), 8)
        except UserError as error:
            ends[False] += 1
            assert "\n" not in str(error)
        else:
            ends[True] += 1
            assert len(unet_io.read_images(str(target))) == written > 0 and skipped < 2
            target.unlink()
        assert os.listdir(tmp_path) == ["in.zip"]
    assert min(ends.values()) > 50


def test_prepare_output_dir(tmp_path):
    """The flag of an earlier tool: the folder of --output_name."""
    make_colours(tmp_path / "in", "a.png")
    (tmp_path / "out").mkdir()
    common = [sys.executable, ROOT / "prepare_data.py", "--data_dir", "in", "--image_size", 8]
    for output in ("x.bin", tmp_path / "y.bin"):
        run(*common, "--output_name", output, cwd=tmp_path)
    result = run(*common, "--output_dir", "out", "--output_name", "x.bin", cwd=tmp_path)
    assert "wrote out/x.bin" in result.stdout and os.listdir(tmp_path / "out") == ["x.bin"]
    assert {"x.bin", "y.bin"} < set(os.listdir(tmp_path))
    for folder, name, says in (("out", "", "--output_name '' names no file"),
                               ("out", tmp_path / "z.bin", "leave --output_dir out out"),
                               ("no", "z.bin", "folder no does not exist")):
        refused(*common, "--output_dir", folder, "--output_name", name, says=says, cwd=tmp_path)


# ----------------------------------------------------------------------------------------------------
# classes

def class_file(path, **flags):
    """(Images of the file, of the one that is held out or None, stdout, stderr) of prepared pictures."""
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    target = path.parent / "classes.bin"
    result = script("prepare_data.py", "--data_dir", path, "--output_name", target, "--image_size", 8, *words)
    held_out = target.parent / "classes_val.bin"
    return (unet_io.read_images(str(target)), unet_io.read_images(str(held_out)) if held_out.exists() else None,
            result.stdout, result.stderr)


def named(images):
    """[(shade, name of the class)] of a file of pictures of one shade each."""
    return [(int(pixels.max()), images.class_names[label]) for pixels, label in zip(images.pixels, images.labels)]


def test_classes_of_a_split(tmp_path):
    """Both sides list the union, so that a number means one class, also where one side has none of it."""
    names = [f"apple/{i}.png" for i in range(40)] + ["banana/0.png", "banana/1.png"]
    names += [f"cherry/{i}.png" for i in range(40)]
    folder = make_colours(tmp_path / "in", *names[:20])
    for i, name in enumerate(names):
        shade = 3 * i
        (folder / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (shade,) * 3).save(folder / name)
    train, held_out, out, err = class_file(folder, labels="folder", val_fraction=0.2)
    assert train.class_names == held_out.class_names == ("apple", "banana", "cherry")
    assert set(held_out.labels) == {0, 2}, "the split of these files has no banana among those held out"
    assert sorted(named(train) + named(held_out)) == [(3 * i, name.split("/")[0]) for i, name in enumerate(names)]
    table = [line.split() for line in out.splitlines()]
    assert ["class", "name", "images", "held", "out"] in table
    counts = [[int((side.labels == i).sum()) for side in (train, held_out)] for i in range(3)]
    for i, name in enumerate(train.class_names):
        assert [str(i), name, *map(str, counts[i])] in table
    assert "note: 1 class of fewer than 5 images to train on: banana 2" in err
    # a class that falls only into the validation part: the program takes its own split
    folder = make_colours(tmp_path / "two", *(f"apple/{i}.png" for i in range(9)), "fig/0.png")
    for i in range(20):
        split = prepare_data._held_out(10 + i, 0.2)
        if 9 + i in split:
            break
        make_colours(folder, f"apple/{9 + i}.png")
    train, held_out, _, err = class_file(folder, labels="folder", val_fraction=0.2)
    assert train.class_names == held_out.class_names == ("apple", "fig") and set(train.labels) == {0}
    assert set(held_out.labels) == {0, 1}
    assert "note: 1 class without an image to train on, to be left out when drawing: fig" in err
    config = Config(**TOY | dict(class_cond=True))
    run(TRAIN, *start_flags(config, tmp_path / "classes.bin", tmp_path / "run", 1),
        "--val_file", tmp_path / "classes_val.bin")


def test_order_of_classes(tmp_path):
    """Whole numbers sort as numbers, others as text, and what differs only in normalisation is one class."""
    assert unet_io.class_order(["10", "9", "1", "10"]) == ["1", "9", "10"]
    assert unet_io.class_order(["10", "9", "x"]) == ["10", "9", "x"] and unet_io.class_order([]) == []
    folder = make_colours(tmp_path / "in", *(f"{n}/a.png" for n in range(1, 13)))
    images, _, out, _ = class_file(folder, labels="folder")
    assert images.class_names == tuple(map(str, range(1, 13)))
    assert sorted(named(images)) == [(10 * n, str(n)) for n in range(1, 13)]
    composed, split = "caf\u00e9", "cafe\u0301"
    folder = make_colours(tmp_path / "unicode", f"{composed}/a.png", f"{split}/b.png", "x/c.png")
    assert len(os.listdir(folder)) == 3
    images, _, _, _ = class_file(folder, labels="folder")
    assert images.class_names == (composed, "x") and sorted(images.labels) == [0, 0, 1]
    pixels = np.zeros((3, 1, 8, 8), np.uint8)
    unet_io.write_images(tmp_path / "x.bin", pixels, [split, composed, "10"], class_names=["10", "9", composed])
    images = unet_io.read_images(str(tmp_path / "x.bin"))
    assert images.class_names == ("10", "9", composed) and images.labels.tolist() == [2, 2, 0]


def test_table_of_many_classes(tmp_path):
    """It is readable for a thousand, and says how unequal they are."""
    labels = np.arange(1000).repeat(6)
    np.savez(tmp_path / "x.npz", images=np.full((6000, 1, 1, 1), 200, np.uint8), labels=np.append(labels[1:], 999))
    result = script("prepare_data.py", "--data_dir", tmp_path / "x.npz", "--labels", "--output_name",
                    tmp_path / "x.bin")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["0", "0", "5"] in lines and ["999", "999", "7"] in lines and ["...", "975", "more"] in lines
    assert len(lines) < 40 and "1000 classes of 5 to 7 images" in result.stdout


def test_numbers_of_labels(tmp_path):
    """A label that is a number stays that number as long as no more are missing than there are."""
    pixels = np.full((6, 1, 8, 8), 200, np.uint8)
    for labels, names in (([0, 1, 5, 5, 1, 0], "012345"), ([3, 0, 1, 2, 0, 0], "0123"),
                          ([0, 9, 900, 0, 9, 0], ("0", "9", "900"))):
        np.savez(tmp_path / "x.npz", images=pixels, labels=labels)
        assert call(prepare_data, "--data_dir", tmp_path / "x.npz", "--labels", "--output_name",
                    tmp_path / "x.bin") == ""
        images = unet_io.read_images(str(tmp_path / "x.bin"))
        assert images.class_names == tuple(names)
        assert [int(images.class_names[label]) for label in images.labels] == labels
        assert len(names) > 3 or images.labels.tolist() == [0, 1, 2, 0, 1, 0]


def test_label_of_many_digits(tmp_path):
    """A label of more digits than Python makes a number of is a name like another, and sorts by its value."""
    folder = make_colours(tmp_path / "in", "a.png", "b.png", "c.png")
    (tmp_path / "labels.csv").write_text("a.png," + "9" * 5000 + "\nb.png,10\nc.png,9\n")
    images = class_file(folder, labels=tmp_path / "labels.csv")[0]
    assert images.class_names == ("9", "10", "9" * 5000)


def test_hidden_paths(tmp_path):
    """No hidden part of a path below --data_dir is read, in folders and zips, and how many were left out is said."""
    good = ["cats/a.png", "dogs/b.png"]
    hidden = ["cats/.ipynb_checkpoints/a-checkpoint.png", ".Trash-1000/files/c.png", "dogs/@eaDir/a.png/SYNO.png",
              "dogs/._b.png", "__MACOSX/dogs/b.png", ".git/x/y.png", "$RECYCLE.BIN/z.png"]
    folder = make_colours(tmp_path / ".cache/in", *good, *hidden)
    (folder / "cats/.DS_Store").write_bytes(b"x")
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    for source in (folder, tmp_path / "in.zip"):
        images, _, out, err = class_file(source, labels="folder")
        assert sorted(named(images)) == [(10, "cats"), (20, "dogs")] and images.class_names == ("cats", "dogs")
        assert "note: 8 files left out as hidden: " in err and "2 images of 8x8" in out and "skipped" not in err
    link = tmp_path / "links"
    link.mkdir()
    (link / "a.png").symlink_to(folder / ".git/x/y.png")  # the name that the user gave is not hidden
    assert prepared(link)[0] == [80]
    for path in (folder / "dogs/._b.png", folder / ".Trash-1000"):  # what the user names is meant
        assert len(prepared(path)[0]) == 1
    sentence = call(prepare_data, "--data_dir", folder / ".git/..", "--output_name", tmp_path / "x.bin")
    assert sentence == ""
    make_colours(tmp_path / "only", ".a.png")
    sentence = call(prepare_data, "--data_dir", tmp_path / "only", "--output_name", tmp_path / "x.bin")
    assert "has no images" in sentence and "1 more are hidden" in sentence


def test_label_level(tmp_path):
    """Which folder names the class, and a note where the innermost can't be meant."""
    names = [f"train/{name}/images/{i}.png" for name in ("cat", "dog", "fox") for i in range(5)]
    names += [f"val/{name}/images/{i}.png" for name in ("cat", "dog") for i in range(2)]
    folder = make_colours(tmp_path / "in", *names)
    images, _, _, err = class_file(folder, labels="folder")
    assert images.class_names == ("images",)
    assert "note: the innermost folders give 1 class (images); --label_level 1 gives 2 (train and val)," \
        " --label_level 2 gives 3 (cat, dog and fox)" in err
    assert "note: all images are of one class, images" in err
    images, _, _, err = class_file(folder, labels="folder", label_level=2)
    assert images.class_names == ("cat", "dog", "fox") and "innermost" not in err
    assert [name for _, name in named(images)] == [name.split("/")[1] for name in sorted(names)]
    images, _, _, err = class_file(folder / "train", labels="folder")
    assert "--label_level 1 gives 3 (cat, dog and fox)" in err
    assert class_file(folder / "train", labels="folder", label_level=1)[0].class_names == ("cat", "dog", "fox")
    good = make_colours(tmp_path / "good", "a/1.png", "a/b/2.png", "c/d/3.png")
    assert "innermost" not in class_file(good, labels="folder")[3]
    assert class_file(good, labels="folder", label_level=1)[0].class_names == ("a", "c")
    common = ["--data_dir", good, "--output_name", tmp_path / "x.bin"]
    for words, says in ((["--labels", "--label_level", 2], "a/1.png"), (["--label_level", 1], "--labels folder"),
                        (["--labels", "prefix", "--label_level", 1], "--labels folder"),
                        (["--labels", "--label_level", -1], "--label_level -1")):
        assert says in call(prepare_data, *common, *words)
    make_colours(tmp_path / "sides", "cat/train/1.png", "cat/test/2.png", "dog/train/3.png", "dog/test/4.png")
    assert "--label_level 1 gives 2 (cat and dog)" in class_file(tmp_path / "sides", labels="folder")[3]


def test_labels_from_names(tmp_path):
    """guided-diffusion's convention: what stands before the first underscore of a file's name."""
    folder = make_colours(tmp_path / "in", "a/dog_0001.png", "b/cat_1_x.png", "a/cat_2.png", "a/fish.png")
    images, _, out, err = class_file(folder, labels="prefix")
    assert sorted(named(images)) == [(10, "dog"), (20, "cat"), (30, "cat")]
    assert "note: 1 picture left out, with no underscore in their names: a/fish.png" in err
    sentence = call(prepare_data, "--data_dir", make_colours(tmp_path / "none", "a.png"), "--labels", "prefix",
                    "--output_name", tmp_path / "x.bin")
    assert "no underscore" in sentence and "a.png" in sentence


TABLES = {  # name: (its text, [(shade, class)], what is said)
    "plain.csv": ("a/1.png,cat\nb/2.png,dog\nb/3.png,dog\n", [(10, "cat"), (20, "dog"), (30, "dog")], ""),
    "header.csv": ("\ufefffile,label\na/1.png,cat\n2.png,dog\nx/b/3.png,dog", [(10, "cat"), (20, "dog"), (30, "dog")],
                   ""),
    "ids.csv": ("id,breed\n1,cat\n\n2,\"big, grey\"\n3,cat", [(10, "cat"), (20, "big, grey"), (30, "cat")],
                "ids.csv begins with id,breed, which is taken for a header"),
    "wide.csv": ("width;label;file_name\r\n8;cat;1.png\r\n8;cat;2.png\r\n8;dog;3.png\r\n",
                 [(10, "cat"), (20, "cat"), (30, "dog")], ""),
    "tabs.tsv": ("b\\2.png\tdog\n./a/1.png\tcat\n", [(10, "cat"), (20, "dog")],
                 "1 picture left out, with no label in"),
    "more.csv": ("1.png,cat\n2.png,dog\n3.png,dog\n4.png,dog\n1.png,cat\n", [(10, "cat"), (20, "dog"), (30, "dog")],
                 "1 file of"),
    "object.json": ('{"a/1.png": "cat", "b/2.png": "dog"}', [(10, "cat"), (20, "dog")], "1 picture left out"),
    "dataset.json": ('{"labels": [["a/1.png", 3], ["b/2.png", 0], ["b/3.png", 1]]}', [(10, "3"), (20, "0"), (30, "1")],
                     ""),
    "objects.json": ('[{"file": "1.png", "label": 10}, {"label": 9, "file": "2.png"}, {"file": "3", "label": 100}]',
                     [(10, "10"), (20, "9"), (30, "100")], ""),
}


@pytest.mark.parametrize("name", TABLES)
def test_labels_from_a_file(tmp_path, name):
    text, expected, says = TABLES[name]
    folder = make_colours(tmp_path / "in", "a/1.png", "b/2.png", "b/3.png")
    (tmp_path / name).write_bytes(text.encode())
    images, _, _, err = class_file(folder, labels=tmp_path / name)
    assert sorted(named(images)) == expected and says in err
    if name == "dataset.json":  # numbers keep theirs, and the file may lie within the data
        assert images.class_names == ("0", "1", "2", "3") and images.labels.tolist() == [3, 0, 1]
        shutil.move(tmp_path / name, folder / name)
        assert named(class_file(folder, labels=name)[0]) == expected
        with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
            for path in sorted(folder.rglob("*")):
                archive.write(path, path.relative_to(folder))
        assert named(class_file(tmp_path / "in.zip", labels=name)[0]) == expected
    if name == "objects.json":
        assert images.class_names == ("9", "10", "100")


@pytest.mark.parametrize("name, text, says", [
    ("two.csv", "a/1.png,cat\n1.png,dog\n", ["a/1.png two labels, cat and dog"]),
    ("two.json", '{"a/1.png": "cat", "a/1.png": "dog"}', ["a/1.png two labels, cat and dog"]),
    ("either.csv", "x.png,cat\n", ["x.png, which may be a/x.png or b/x.png"]),
    ("stem.csv", "a/2,cat\n", ["a/2, which may be a/2.bmp or a/2.png"]),
    ("none.csv", "y.png,cat\nz.png,cat\n", ["names no picture in", "y.png", "a/1.png"]),
    ("wide.csv", "1.png,cat,8\n", ["3 columns", "1.png,cat,8"]),
    ("ragged.csv", "1.png,cat\n2.png\n", ["a line of 1 column", "2.png"]),
    ("quote.csv", '1.png,"cat\n', ["can't be read as a table"]),
    ("empty.csv", "\n", ["holds no labels"]),
    ("latin.csv", b"1.png,caf\xe9\n", ["not in UTF-8"]),
    ("no_label.json", '[{"file": "1.png", "width": 8}]', ['holds {"file": "1.png", "width": 8}, which is no file']),
    ("null.json", '{"labels": null}', ["null"]),
    ("float.json", '{"1.png": 0.5}', ["0.5"]),
    ("number.json", "3", ["neither an object"]),
    ("cut.json", '{"1.png": ', ["as JSON"]),
    ("deep.json", "[" * 100000, ["as JSON"]),
    ("gone.csv", None, ["gone.csv can't be read"]),
])
def test_refused_labels(tmp_path, name, text, says):
    folder = make_colours(tmp_path / "in", "a/1.png", "a/x.png", "b/x.png", "a/2.png", "a/2.bmp")
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    sentence = call(prepare_data, "--data_dir", folder, "--labels", tmp_path / name, "--output_name",
                    tmp_path / "x.bin")
    assert all(text in sentence for text in [name, *says]) and "\n" not in sentence, sentence
    assert not (tmp_path / "x.bin").exists()


def test_names_in_zips(tmp_path):
    """Folders of a zip that Windows made with \\, and names in UTF-8 that don't say so, as macOS writes them."""
    backslash, mac = zipfile.ZipInfo("cats\\a.png"), zipfile.ZipInfo("dogs/b.png")
    backslash.create_system, mac.create_system = 0, 3
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(backslash, png(10))
        archive.writestr(mac, png(20))
        archive.writestr("x\u00e9/c.png", png(30))
    data = patched(data.getvalue(), 2, {6: bytes(2)}, {8: bytes(2)})  # without the flag of UTF-8
    (tmp_path / "in.zip").write_bytes(data)
    assert b"x\xc3\xa9/c.png" in data and zipfile.ZipFile(tmp_path / "in.zip").namelist()[2] != "x\u00e9/c.png"
    images, _, _, _ = class_file(tmp_path / "in.zip", labels="folder")
    assert sorted(named(images)) == [(10, "cats"), (20, "dogs"), (30, "x\u00e9")]


# ----------------------------------------------------------------------------------------------------
# colours

# CIE xy of red, green, blue; the white is D65 (0.3127, 0.3290).
SRGB = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
DISPLAY_P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
ADOBE_RGB = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))
D65, D50 = np.array([0.3127 / 0.3290, 1, (1 - 0.3127 - 0.3290) / 0.3290]), np.array([0.9642, 1, 0.8249])
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def to_xyz(primaries):
    """The matrix from linear RGB to XYZ, whose white is D65."""
    columns = np.array([[x / y, 1, (1 - x - y) / y] for x, y in primaries]).T
    return columns * np.linalg.solve(columns, D65)


def srgb_curve(x):
    """Light from a value, 0 to 1."""
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055)**2.4)


def srgb_curve_back(x):
    return np.where(x <= 0.0031308, 12.92 * x, 1.055 * np.maximum(x, 0)**(1 / 2.4) - 0.055)


def icc_profile(space, tags, kind=b"mntr"):
    """The bytes of an ICC profile of version 2: {signature: its data}."""
    tags = {b"desc": b"desc" + struct.pack(">III", 0, 5, 0)[:8] + b"test\0" + bytes(79), b"cprt": b"text" + bytes(4) + b"-\0",
            b"wtpt": xyz_tag(D50)} | tags
    table, body, at = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        data += bytes(-len(data) % 4)
        table += name + struct.pack(">II", at + len(body), len(data))
        body += data
    head = struct.pack(">I4sI4s4s4s12s4s", at + len(body), b"    ", 0x02100000, kind, space,
                       b"Lab " if b"A2B0" in tags else b"XYZ ", bytes(12), b"acsp")
    head += bytes(28) + xyz_tag(D50)[8:]
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def xyz_tag(values):
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(float(v) * 65536) for v in values))


def curve_tag(function):
    values = np.round(65535 * function(np.linspace(0, 1, 1024))).astype(">u2")
    return b"curv" + struct.pack(">II", 0, 1024) + values.tobytes()


def rgb_profile(primaries, curve):
    """A display's profile: primaries, adapted to D50 by Bradford's matrix, and one curve."""
    adapt = np.linalg.solve(BRADFORD, np.diag(BRADFORD @ D50 / (BRADFORD @ D65)) @ BRADFORD)
    columns = adapt @ to_xyz(primaries)
    tags = {name: xyz_tag(columns[:, i]) for i, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    return icc_profile(b"RGB ", tags | dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve_tag(curve)))


def cmyk_profile(colours):
    """A printer's, by a table of 2x2x2x2 colours (16, 3) in Lab of 8 bits."""
    ramp = bytes(range(256))
    identity = struct.pack(">9i", *(65536 * np.eye(3, dtype=int)).ravel())
    table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + identity + 4 * ramp + bytes(colours) + 3 * ramp
    return icc_profile(b"CMYK", {b"A2B0": table}, b"prtr")


def seen(colour, primaries, curve_back):
    """The bytes of an sRGB colour in another space."""
    light = np.linalg.solve(to_xyz(primaries), to_xyz(SRGB) @ srgb_curve(np.array(colour) / 255))
    return tuple(np.round(255 * curve_back(light)).astype(int).tolist())


GAMMA = 563 / 256  # Adobe RGB's
P3 = rgb_profile(DISPLAY_P3, srgb_curve)
ADOBE = rgb_profile(ADOBE_RGB, lambda x: x**GAMMA)
GREY = icc_profile(b"GRAY", {b"kTRC": curve_tag(lambda x: x**1.0)})


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "tif", "avif"])
def test_profiles_of_colours(tmp_path, ending):
    """sRGB's colours in a file of another space arrive as they are in sRGB, but for what the file lost."""
    assert seen((255, 0, 0), DISPLAY_P3, srgb_curve_back) == (234, 51, 35)
    options = dict(lossless=True) if ending == "webp" else dict(quality=100) if ending in ("jpg", "avif") else {}
    for profile, primaries, curve, back in (
            (P3, DISPLAY_P3, srgb_curve, srgb_curve_back),
            (ADOBE, ADOBE_RGB, lambda x: x**GAMMA, lambda x: np.maximum(x, 0)**(1 / GAMMA))):
        for colour in ((255, 0, 0), (0, 200, 0), (0, 0, 255), (90, 160, 220), (255, 255, 255), (0, 0, 0)):
            stored = Image.new("RGB", (16, 16), seen(colour, primaries, back))
            pixels = load_saved(tmp_path, f"x.{ending}", stored, icc_profile=profile, **options)
            light = curve(np.array(Image.open(tmp_path / f"x.{ending}").getpixel((8, 8))) / 255)
            light = np.linalg.solve(to_xyz(SRGB), to_xyz(primaries) @ light)
            exact = 255 * srgb_curve_back(light.clip(0, 1)).reshape(3, 1, 1)
            assert np.abs(pixels - exact).max() <= 1.5, (colour, pixels[:, 0, 0], exact.ravel())
            if ending in ("png", "tif", "webp"):
                assert np.abs(pixels - np.reshape(colour, (3, 1, 1))).max() <= 2, (colour, pixels[:, 0, 0])
    assert ending == "avif" or (load_saved(tmp_path, f"x.{ending}", Image.new("RGB", (8, 8), (234, 51, 35)),
                                           **options)[0] >= 232).all()  # without a profile as before


def test_profiles_and_transparency(tmp_path):
    """Palettes, alpha, RGBA and grey outputs; white that is laid below is sRGB's."""
    red = seen((255, 0, 0), DISPLAY_P3, srgb_curve_back)
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, *red])
    clear = Image.new("RGBA", (8, 8), (*red, 255))
    clear.paste((0, 0, 0, 0), (4, 0, 8, 8))
    for name, image, options in (("p", palette, {}), ("a", clear, {}), ("pa", palette, dict(transparency=0))):
        image.save(tmp_path / f"{name}.png", icc_profile=P3, **options)
        data = (tmp_path / f"{name}.png").read_bytes()
        for channels, left, right in ((3, (255, 0, 0), (255, 255, 255)), (1, (76,), (255,)),
                                      (4, (255, 0, 0, 255), (0, 0, 0, 0))):
            pixels = prepare_data.load_image(data, 8, channels).astype(int)
            assert np.abs(pixels[:, 0, 0] - left).max() <= 2
            right = right if name == "a" else left
            assert np.abs(pixels[:, 7, 7] - right).max() <= 2, (name, channels)


def test_profiles_of_grey_and_cmyk(tmp_path):
    """Grey in linear light, of 8 and 16 bits and with alpha; inks; CIELAB."""
    expected = round(255 * float(srgb_curve_back(100 / 255)))
    assert expected == 168
    grey = Image.new("L", (8, 8), 100)
    deep = Image.fromarray(np.full((8, 8), 100 * 257, np.uint16))
    for image in (grey, grey.convert("LA"), deep):
        for channels in (1, 3, 4):
            image.save(tmp_path / "x.png", icc_profile=GREY)
            pixels = prepare_data.load_image((tmp_path / "x.png").read_bytes(), 8, channels).astype(int)
            assert np.abs(pixels[:3] - expected).max() <= 1 and (pixels[3:] == 255).all()
    corners = np.full((2, 2, 2, 2, 3), (0, 128, 128), np.uint8)  # black ...
    corners[0, 0, 0, 0] = 255, 128, 128                          # ... but paper white
    corners[1, 0, 0, 0] = 138, 209, 198                          # and cyan, which this printer prints as red
    inks = cmyk_profile(corners.tobytes())
    cyan = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    for ending in ("jpg", "tif"):
        pixels = load_saved(tmp_path, f"inks.{ending}", cyan, icc_profile=inks)
        assert np.abs(pixels - np.reshape((255, 0, 0), (3, 1, 1))).max() <= 4, pixels[:, 0, 0]
        assert np.abs(load_saved(tmp_path, f"paper.{ending}", Image.new("CMYK", (8, 8)), icc_profile=inks) - 255).max() <= 2
        assert (load_saved(tmp_path, f"plain.{ending}", cyan)[0] <= 2).all()
    lab = Image.merge("LAB", [Image.new("L", (8, 8), value) for value in (138, 209, 198)])
    pixels = load_saved(tmp_path, "lab.tif", lab)
    assert np.abs(pixels - np.reshape((255, 0, 0), (3, 1, 1))).max() <= 5, pixels[:, 0, 0]  # L goes by 0.4 of 100


def test_profiles_that_change_nothing(tmp_path):
    """sRGB's own profiles leave each bit, and those of no use are counted, with the pixels kept."""
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (8, 8, 3), np.uint8)
    image, folder = Image.fromarray(pixels), tmp_path / "in"
    folder.mkdir()
    own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for profile in (own, rgb_profile(SRGB, srgb_curve)):
        assert (load_saved(tmp_path, "x.png", image, icc_profile=profile) == np.moveaxis(pixels, -1, 0)).all()
        grey = image.convert("L")
        assert (load_saved(tmp_path, "x.png", grey, icc_profile=profile) == np.asarray(grey)).all()
    for name, profile in (("junk", b"junk"), ("cut", P3[:300]), ("grey", GREY), ("inks", cmyk_profile(bytes(48)))):
        image.save(folder / f"{name}.png", icc_profile=profile)
    image.save(folder / "none.png")
    result = script("prepare_data.py", "--data_dir", folder, "--output_name", tmp_path / "x.bin", "--image_size", 8)
    assert "note: 4 pictures with a colour profile that can't be used, whose colours were kept" in result.stderr
    assert (unet_io.read_images(str(tmp_path / "x.bin")).pixels == np.moveaxis(pixels, -1, 0)).all()
    hits = prepare_data.to_srgb.cache_info().hits  # a profile is read once, however many pictures have it
    for _ in range(3):
        load_saved(tmp_path, "x.png", image, icc_profile=P3)
    assert prepare_data.to_srgb.cache_info().hits >= hits + 2


# ----------------------------------------------------------------------------------------------------
# 16 bits

def deep_set(folder, values, **options):
    """Grey pictures of 16 bits, each of one value."""
    folder.mkdir()
    for i, value in enumerate(values):
        Image.fromarray(np.full((8, 8), value, np.uint16)).save(folder / f"{i}.png", **options)
    return folder


@pytest.mark.parametrize("values, flags, white", [
    ((0, 2000, 4000), [], 4095), ((0, 500, 1000), [], 1023), ((100, 16000), [], 16383), ((7, 200), [], 255),
    ((2000, 4000, 20000), [], 65535), ((2000, 4000), ["--white_level", 5000], 5000),
    ((2000, 4000), ["--white_level", 65535], 65535)])
def test_white_of_16_bits(tmp_path, values, flags, white):
    """It is one for the set, so that contrast between pictures stays, and it is said."""
    folder = deep_set(tmp_path / "in", values)
    Image.new("L", (8, 8), 33).save(folder / "x.png")
    (folder / "y.png").write_text("no picture")
    shades, _, _, err = prepared(folder, *flags)
    assert shades == [int(value * 255 / white + 0.5) for value in values] + [33]
    assert f"note: {len(values)} grey pictures of 16 bits with values up to {max(values)}: white is {white}" in err
    assert err.count("skipped y.png") == 1


def test_white_level_of_skipped_pictures(tmp_path):
    """A picture that has no 16 bits, and so is skipped, says nothing about the white of the others."""
    folder = deep_set(tmp_path / "in", (2000, 4000))
    Image.fromarray(np.full((8, 8), 70000, np.int32)).save(folder / "large.tif")
    shades, _, _, err = prepared(folder)
    assert shades == [125, 249] and "skipped large.tif: its pixels go from 70000 to 70000" in err
    assert "note: 2 grey pictures of 16 bits with values up to 4000: white is 4095" in err


def test_white_level_of_8_bits(tmp_path):
    """It is said that it does nothing, where nothing has 16 bits."""
    err = prepared(make_colours(tmp_path / "in", "a.png"), "--white_level", 4095)[3]
    assert "note: --white_level 4095 does nothing: no grey picture has 16 bits" in err


def test_white_level_is_too_low(tmp_path):
    folder = deep_set(tmp_path / "in", (2000, 5000))
    shades, _, _, err = prepared(folder, "--white_level", 4095)
    assert shades == [125] and "skipped 1.png: it has a pixel of 5000, above --white_level 4095" in err
    for level in (-1, 65536):
        assert "--white_level" in call(prepare_data, "--data_dir", folder, "--output_name", tmp_path / "x.bin",
                                       "--white_level", level)


def test_tags_of_tiff(tmp_path):
    """12 bits that are declared are no guess, and a 0 that is declared as white is white."""
    assert (load_saved(tmp_path, "x.tif", Image.fromarray(np.full((8, 8), 65535, np.uint16)),
                       tiffinfo={262: 0}) == 0).all()
    assert (load_saved(tmp_path, "x.tif", Image.fromarray(np.zeros((8, 8), np.uint16)),
                       tiffinfo={262: 0}) == 255).all()
    rows = bytes([0xFF, 0xF8, 0x00] * 4) * 8  # 4095, 2048 in 12 bits each
    tags = {256: 8, 257: 8, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 8, 279: len(rows)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = b"II*\0" + struct.pack("<I", 8 + len(rows)) + rows + struct.pack("<H", len(tags)) + entries + bytes(4)
    remarks = prepare_data.Remarks()
    pixels = prepare_data.load_image(data, 8, 1, remarks=remarks)
    assert (pixels[0, :, ::2] == 255).all() and (pixels[0, :, 1::2] == 128).all() and not remarks.deep


def test_dark_colours_of_16_bits(tmp_path):
    """Of these Pillow reads the upper bits alone: said, where little is left."""
    rows = b"".join(b"\0" + struct.pack(">24H", *[3000] * 24) for _ in range(8))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
    shades, _, _, err = prepared(tmp_path / "in")
    assert shades == [11] and "note: 1 picture of 16 bits a channel" in err and "save them with 8 bits" in err


# ----------------------------------------------------------------------------------------------------
# shapes

def test_fit(tmp_path):
    """The middle, all of it with white beside, or all of it distorted."""
    wide = Image.new("RGB", (16, 8), "red")
    wide.paste("blue", (4, 0, 12, 8))
    (tmp_path / "in").mkdir()
    wide.save(tmp_path / "in/a.png")
    colours = {"red": (255, 0, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
    for fit, expected in ((None, ("blue",) * 4), ("crop", ("blue",) * 4), ("stretch", ("blue", "blue", "red", "red")),
                          ("pad", ("white", "blue", "white", "red"))):
        assert call(prepare_data, "--data_dir", tmp_path / "in", "--image_size", 8, "--output_name",
                    tmp_path / "x.bin", *(["--fit", fit] if fit else [])) == ""
        pixels = unet_io.read_images(str(tmp_path / "x.bin")).pixels[0]
        assert [tuple(pixels[:, y, x].tolist()) for y, x in ((0, 3), (4, 4), (7, 0), (4, 0))] == \
            [colours[name] for name in expected], fit
    clear = load_image_of(wide, 8, channels=4, fit="pad")
    assert (clear[:, :2] == 0).all() and (clear[:, 6:] == 0).all() and (clear[3, 2:6] == 255).all()
    tall = load_image_of(wide.transpose(Image.Transpose.ROTATE_90), 8, fit="pad")
    assert (tall[:, :, :2] == 255).all() and (tall[0, 0, 2:6] == 255).all() and (tall[1, :, 2:6] == 0).all()
    assert load_image_of(Image.new("L", (1000, 1)), 8, channels=1, fit="pad").tolist() == \
        [[[255] * 8] * 3 + [[0] * 8] + [[255] * 8] * 4]
    assert same_bits(load_image_of(wide.crop((4, 0, 12, 8)), 8, fit="pad"), load_image_of(wide, 8))


def test_trim(tmp_path):
    """A margin of white, or of what is transparent, is cut away, however the picture is stored."""
    drawn = Image.new("RGB", (4, 2), "red")
    on_white, on_clear = Image.new("RGB", (40, 30), "white"), Image.new("RGBA", (40, 30), (0, 0, 255, 0))
    for page in (on_white, on_clear):
        page.paste(drawn, (30, 5))
    bar = load_image_of(drawn, 8, fit="pad")
    assert (bar[1, 2:6] == 0).all() and (bar[:, :2] == 255).all() and (bar[:, 6:] == 255).all()
    for page in (on_white, on_clear):
        assert same_bits(load_image_of(page, 8, fit="trim"), bar)
    assert same_bits(load_image_of(on_white.convert("L"), 8, channels=1, fit="trim"),
                     load_image_of(drawn.convert("L"), 8, channels=1, fit="pad"))
    assert same_bits(load_image_of(on_clear, 8, channels=4, fit="trim"), load_image_of(drawn, 8, channels=4, fit="pad"))
    on_white.convert("CMYK").save(tmp_path / "x.tif")
    assert same_bits(prepare_data.load_image((tmp_path / "x.tif").read_bytes(), 8, fit="trim"), bar)
    empty = Image.new("RGBA", (40, 30))
    assert (load_image_of(empty, 8, fit="trim") == 255).all() and \
        (load_image_of(empty, 8, channels=4, fit="trim") == 0).all()


def make_icons(folder):
    """Icons as a theme has them: in several sizes, linked, copied, drawn again with small changes, in grey."""
    for name in ("apps/64", "apps/big", "places"):
        (folder / name).mkdir(parents=True)
    disc = Image.new("RGBA", (256, 256))
    ImageDraw.Draw(disc).ellipse((8, 8, 247, 247), "red")
    disc.resize((64, 64), Image.Resampling.BOX).save(folder / "apps/64/disc.png")
    disc.save(folder / "apps/big/disc.png")
    flat = Image.new("RGB", (256, 256), "white")
    flat.paste(disc, mask=disc)
    flat.save(folder / "apps/big/flat.png")  # on white, not on nothing
    shutil.copy(folder / "apps/big/disc.png", folder / "places/copy.png")
    (folder / "places/link.png").symlink_to("../apps/big/disc.png")
    disc.convert("LA").save(folder / "places/grey.png")
    ImageDraw.Draw(disc).rectangle((120, 120, 135, 135), (240, 0, 0))  # a mark that is hardly seen
    disc.save(folder / "apps/big/marked.png")
    ImageDraw.Draw(disc).rectangle((120, 120, 135, 135), "blue")
    disc.save(folder / "places/blue.png")
    return folder


def test_distinct(tmp_path):
    """Of pictures that look alike the first stays, on whichever side of a split; others of the same form stay."""
    folder = make_icons(tmp_path / "in")
    words = "--data_dir", folder, "--image_size", 32, "--fit", "trim", "--labels", "--label_level", 1
    result = script("prepare_data.py", *words, "--distinct", 16, "--output_name", tmp_path / "x.bin")
    images = unet_io.read_images(str(tmp_path / "x.bin"))
    assert [images.class_names[label] for label in images.labels] == ["apps", "places", "places"]
    (red, blue, grey), middle = images.pixels.astype(int), (slice(None), 16, 16)
    assert red[middle].tolist() == [255, 0, 0] and np.ptp(grey[middle]) == 0
    assert blue[2, 16, 16] > 200 and np.abs(red - blue)[:, :8].max() < 16
    assert "note: 4 pictures left out, because an earlier one looks like it" in result.stderr
    assert "3 images of 32x32, 0 more held out for validation, 0 files skipped" in result.stdout

    assert "7 images of 32x32" in script("prepare_data.py", *words, "--output_name", tmp_path / "x.bin").stdout
    shutil.rmtree(folder / "apps/64")
    script("prepare_data.py", *words, "--distinct", 1, "--output_name", tmp_path / "x.bin")
    assert len(unet_io.read_images(str(tmp_path / "x.bin")).pixels) == 4  # the mark is another picture now
    script("prepare_data.py", *words, "--distinct", 1, "--val_fraction", 0.5, "--output_name", tmp_path / "x.bin")
    split = [unet_io.read_images(str(tmp_path / name)).pixels for name in ("x.bin", "x_val.bin")]
    assert len({pixels.tobytes() for side in split for pixels in side}) == sum(map(len, split)) == 4


def test_distinct_compares_every_pair():
    """The shortcut by quarters finds what comparing all values finds, at sizes that 16 does not divide, too."""
    rng = np.random.default_rng(0)
    for size, channels, tolerance in ((16, 3, 20), (24, 1, 9), (8, 4, 30)):
        bases = rng.integers(0, 190, (5, channels, size, size))
        pictures = [(bases[rng.integers(5)] + rng.integers(60) + rng.integers(3, size=bases[0].shape)).astype(np.uint8)
                    for _ in range(60)]
        distinct, kept, answers = prepare_data.Distinct(tolerance, 60, channels), [], []
        for pixels in pictures:
            small = np.stack([np.asarray(Image.fromarray(plane).resize((16, 16), Image.Resampling.BOX), int)
                              for plane in pixels])
            answers.append(all(np.abs(small - other).max() > tolerance for other in kept))
            kept += [small] if answers[-1] else []
            assert distinct.is_new(pixels) == answers[-1]
        assert 5 < sum(answers) < 60


def test_distinct_is_refused(tmp_path):
    folder = make_colours(tmp_path / "in", "a.png", "b.png")
    shutil.copy(folder / "a.png", folder / "b.png")
    words = "--data_dir", folder, "--image_size", 8, "--output_name", tmp_path / "x.bin"
    for value in (-1, 255):
        assert f"--distinct {value} must be from 0" in call(prepare_data, *words, "--distinct", value)
    assert "left out 1 picture, and nothing stays on one side of --val_fraction 0.5" in call(
        prepare_data, *words, "--distinct", 1, "--val_fraction", 0.5)
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 8, 8), np.uint8))
    assert "--distinct is for pictures" in call(prepare_data, "--data_dir", tmp_path / "x.npy", "--distinct", 1,
                                                "--output_name", tmp_path / "x.bin")
    assert not list(tmp_path.glob("x*.bin*"))


def load_image_of(image, size, **options):
    file = io.BytesIO()
    image.save(file, "png")
    return prepare_data.load_image(file.getvalue(), size, **options)


def test_files_of_several_pictures(tmp_path):
    """That only the first is taken is said."""
    red, blue = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    (tmp_path / "in").mkdir()
    for ending in ("gif", "png", "webp", "tif"):
        red.save(tmp_path / f"in/several.{ending}", save_all=True, append_images=[blue])
        red.save(tmp_path / f"in/one.{ending}")
    err = prepared(tmp_path / "in")[3]
    assert "note: 4 files with several pictures, whose first was taken" in err


def test_heic_is_told(tmp_path):
    folder = make_colours(tmp_path / "in", "a.png")
    (folder / "IMG_1.HEIC").write_bytes(b"x")
    assert "1 .heic; Pillow can't read .heic: convert them" in prepared(folder)[3]


def test_kinds_of_transparency(tmp_path):
    """One bit, grey with alpha, and colours that are declared transparent are laid on white."""
    one = Image.new("1", (8, 8))
    one.paste(1, (0, 0, 4, 8))
    grey = Image.new("LA", (8, 8), (90, 255))
    grey.paste((0, 0), (4, 0, 8, 8))
    colour = Image.new("RGB", (8, 8), (9, 90, 200))
    colour.paste((1, 2, 3), (4, 0, 8, 8))
    for image, options, left in ((one, {}, 255), (one, dict(transparency=0), 255), (grey, {}, 90),
                                 (colour, dict(transparency=(1, 2, 3)), 9)):
        pixels = load_saved(tmp_path, "x.png", image, **options)
        right = 255 if options or image is grey else 0
        assert (pixels[0, :, 0] == left).all() and (pixels[0, :, 7] == right).all()


@pytest.mark.parametrize("ending, options", [("webp", dict(lossless=True)), ("avif", dict(quality=100)),
                                             ("jpg", dict(quality=100)), ("JPG", dict(quality=100))])
def test_orientation_in_other_formats(tmp_path, ending, options):
    """EXIF's orientation is followed in every format, whatever the case of its ending."""
    picture = np.zeros((16, 16, 3), np.uint8)
    picture[:8, :8] = 200
    (tmp_path / "in").mkdir()
    for orientation, (row, column) in {1: (0, 0), 3: (1, 1), 6: (0, 1), 8: (1, 0)}.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(picture).save(tmp_path / f"in/x.{ending}", exif=exif, **options)
        assert call(prepare_data, "--data_dir", tmp_path / "in", "--image_size", 2, "--output_name",
                    tmp_path / "x.bin") == ""
        pixels = unet_io.read_images(str(tmp_path / "x.bin")).pixels[0, 0]
        assert pixels[row, column] > 150 and (pixels > 100).sum() == 1, orientation


def test_damage_behind_the_first_picture(tmp_path):
    """An animation that is cut short gives its first picture, as before."""
    red, noise = Image.new("RGB", (64, 64), "red"), Image.effect_noise((64, 64), 90).convert("RGB")
    (tmp_path / "in").mkdir()
    red.save(tmp_path / "in/a.gif", save_all=True, append_images=[noise, red])
    data = (tmp_path / "in/a.gif").read_bytes()
    (tmp_path / "in/a.gif").write_bytes(data[:len(data) // 2])
    shades, _, out, _ = prepared(tmp_path / "in")
    assert shades == [255] and "0 files skipped" in out


def test_notes_of_folders(tmp_path):
    """Both sides of somebody's split at once, and names that differ by capital letters, are said."""
    folder = make_colours(tmp_path / "in", "train/Cat/a.png", "val/cat/b.png")
    err = class_file(folder, labels="folder")[3]
    assert "has pictures in train and val, and all are read" in err
    assert "note: 2 classes that differ by capital letters only: Cat and cat" in err
    assert "and all are read" not in class_file(folder / "train", labels="folder")[3]


def test_stray_pictures(tmp_path):
    """Pictures beside the class folders get the name of the whole for their class, which is said; without folders all do."""
    folder = make_colours(tmp_path / "pics of mine", "cat/a.png", "dog/b.png", "c.png")
    err = class_file(folder, labels="folder")[3]
    assert "note: the class 'pics of mine' has 1 picture from outside the class folders: c.png\n" in err
    (folder / "d.png").write_bytes((folder / "c.png").read_bytes())
    assert "has 2 pictures from outside the class folders: c.png and d.png\n" in class_file(folder, labels="folder")[3]
    for name in ("cat", "dog"):
        shutil.rmtree(folder / name)
    assert "outside" not in class_file(folder, labels="folder")[3]


def test_held_out_images_of_an_earlier_call(tmp_path):
    """They are not removed, and what they may be is said, unless they are written again."""
    folder = make_colours(tmp_path / "in", *(f"{n}.png" for n in range(5)))
    said = f"note: {tmp_path}/classes_val.bin is of an earlier call; its pictures may be in {tmp_path}/classes.bin now\n"
    assert said not in class_file(folder)[3]
    for _ in range(2):
        assert said not in class_file(folder, val_fraction=0.2)[3]
    assert said in class_file(folder)[3] and (tmp_path / "classes_val.bin").exists()


def test_folders_of_one_class(tmp_path):
    """Folders that become one class, as only blanks tell them apart, are said."""
    folder = make_colours(tmp_path / "in", "x/cat/a.png", "x/cat /b.png", "y/cat/c.png", "y/dog/d.png")
    for flags in (dict(labels="folder"), dict(labels="folder", label_level=2)):
        images, _, _, err = class_file(folder, **flags)
        assert images.class_names == ("cat", "dog") and err.count("become one class") == 1
        assert "note: the folders 'cat' and 'cat ' become one class, cat" in err


def test_trim_of_a_large_photo():
    """What is drawn small on a large page is taken from the whole JPEG, not from one that was shrunk before."""
    page = Image.new("RGB", (800, 800), "white")
    ImageDraw.Draw(page).ellipse((380, 390, 419, 410), fill="red", outline="black")
    photo, same = io.BytesIO(), io.BytesIO()
    page.save(photo, "jpeg", quality=100)
    Image.open(photo).save(same, "png")
    found, expected = (prepare_data.load_image(file.getvalue(), 32, fit="trim") for file in (photo, same))
    assert same_bits(found, expected)


def test_closed_output_costs_the_table_only(tmp_path):
    """The file is there before its classes are printed."""
    folder = make_colours(tmp_path / "in", "a/1.png", "b/2.png")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, ROOT / "prepare_data.py", "--data_dir", folder, "--labels", "--image_size", "8"]
    result = subprocess.run([*command, "--output_name", tmp_path / "x.bin"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert result.returncode == 1 and "standard output" in result.stderr
    assert unet_io.read_images(str(tmp_path / "x.bin")).class_names == ("a", "b")


def test_names_of_folders_as_classes(tmp_path):
    """A folder's name is its class with what follows a dot; one of blanks can be none."""
    folder = make_colours(tmp_path / "cats.2024", "1.png", "dogs/2.png")
    assert prepared(folder, "--labels")[1] == ["cats.2024", "dogs"]
    with zipfile.ZipFile(tmp_path / "birds.zip", "w") as archive:
        archive.write(folder / "1.png", "1.png")
    assert prepared(tmp_path / "birds.zip", "--labels")[1] == ["birds"]
    make_colours(folder, " /3.png")
    sentence = call(prepare_data, "--data_dir", folder, "--labels", "--output_name", tmp_path / "x.bin")
    assert sentence == "the folder ' ' has no name that a class could have: rename it"


def test_picture_in_this_folder(tmp_path, monkeypatch):
    """A refusal names the folder of a picture that was named without one."""
    monkeypatch.chdir(make_colours(tmp_path / "in", "b.png"))
    sentence = call(prepare_data, "--data_dir", "b.png", "--labels", "prefix", "--output_name", "x.bin")
    assert sentence.startswith(". has no picture with a class")


def test_transparent_value_of_16_bits(tmp_path):
    """A grey value that is declared transparent is so with four channels, and white with fewer."""
    values = np.full((8, 8), 30000, np.uint16)
    values[:, 4:] = 500
    image = Image.fromarray(values)
    found = {channels: load_saved(tmp_path, "x.png", image, transparency=500) if channels == 3 else
             prepare_data.load_image((tmp_path / "x.png").read_bytes(), 8, channels=channels) for channels in (3, 1, 4)}
    shade = int(30000 * 255 / 65535 + 0.5)
    for channels in (1, 3):
        assert (found[channels][:, :, 0] == shade).all() and (found[channels][:, :, 7] == 255).all()
    assert (found[4][:3, :, 0] == shade).all() and (found[4][3, :, 0] == 255).all() and (found[4][3, :, 7] == 0).all()
