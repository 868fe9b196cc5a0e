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

import numpy as np
import pytest
from PIL import Image

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
    assert not list(tmp_path.glob("*.tmp"))
    result = run(*common, "--data_dir", tmp_path / "bad", "--image_size", 8)
    assert "1 image of 8x8" in result.stdout and "1 file skipped" in result.stdout


def test_python_refusals(tmp_path, images8, tools):
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
    refused(sys.executable, ROOT / "generate.py", "--model_filename", tmp_path / "none.bin", says="none.bin")


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
                says=[target.split("/")[-1].split(".")[0], "one of the files to read"])
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

    def load_slowly(data, image_size, channels):
        if not started:
            started.append(True)
            script("prepare_data.py", "--data_dir", two, "--output_name", target, "--image_size", 8)
            assert len(unet_io.read_images(target)) == 5
        return load(data, image_size, channels)
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


def test_prepare_memory(tmp_path):
    """Huge pictures wait for each other, and one beyond the limit is skipped."""
    folder = make_colours(tmp_path / "in", "a.png")
    Image.new("RGBA", (9000, 9000), (20, 20, 20, 255)).save(folder / "huge0.png", compress_level=1)
    Image.new("L", (9500, 9500)).save(folder / "limit.png", compress_level=1)
    for i in range(1, 3):
        shutil.copy(folder / "huge0.png", folder / f"huge{i}.png")
    target = tmp_path / "x.bin"
    with open(tmp_path / "err", "w") as err:
        process = subprocess.Popen([sys.executable, ROOT / "prepare_data.py", "--data_dir", folder,
                                    "--output_name", target, "--image_size", "8"],
                                   stderr=err, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
    shades = [int(image.max()) for image in unet_io.read_images(str(target)).pixels]
    assert status == 0 and shades == [10, 20, 20, 20]
    assert "skipped limit.png: Image size (90250000 pixels) exceeds limit" in (tmp_path / "err").read_text()
    assert usage.ru_maxrss < 2 << 20  # KiB


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_prepare_stopped(tmp_path, faults, first):
    """Ctrl-C, kill and a closed terminal leave what was there and nothing else, a second signal too."""
    folder = tmp_path / "in"
    folder.mkdir()
    Image.effect_noise((1500, 1500), 50).save(folder / "0.png")
    for i in range(1, 40):
        shutil.copy(folder / "0.png", folder / f"{i}.png")
    (tmp_path / "x.bin").write_text("before")
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
    assert (tmp_path / "x.bin").read_text() == "before"


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
