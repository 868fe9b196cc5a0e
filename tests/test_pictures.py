"""Pictures drawn by both programs: the same from the same seed."""
import contextlib
import dataclasses
import functools
import io
import math
import os
import pathlib
import re
import resource
import signal
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

import generate
import train_unet
import unet_io
from harness import (
    ADM, RESUMED, ROOT, SMALL, TOY, TRAIN, call, checkpoint_in, perturbed_file, picture, refused, run,
    same_bits, start_flags)
from unet_io import Config, UserError

PICTURES = {  # name: (config, flags, largest difference in pixel values of 255)
    "ddim v": (Config(**TOY | dict(image_size=16, predict="v", noise_schedule="cosine")), [], 2),
    "ddim eps": (Config(**TOY | dict(batch_size=8, lr=2e-3)), ["--sample_steps", 20], 2),
    "ddpm v": (Config(**TOY | dict(predict="v", diffusion_steps=100)), ["--sampler", "ddpm"], 2),
    "ddim eta": (Config(**TOY | dict(predict="v")), ["--eta", 0.6, "--threshold", "none"], 2),
    "dpmpp": (Config(**TOY | dict(predict="v", noise_schedule="cosine")), ["--sampler", "dpmpp"], 2),
    "dpmpp x0": (Config(**TOY | dict(predict="x0", zero_terminal_snr=True)),
                 ["--sampler", "dpmpp", "--threshold", "none", "--sample_steps", 11], 2),
    "classes": (Config(**TOY | dict(predict="v", class_cond=True, num_classes=4)), ["--class", "3"], 2),
    "scale and shift": (Config(**TOY | dict(predict="v", use_scale_shift_norm=True, dropout=0.5, num_heads=4,
                                            rescale_timesteps=True, diffusion_steps=300)), [], 2),
    "learned resampling, legacy order": (
        Config(**TOY | dict(predict="v", conv_resample=True, num_heads=4, num_heads_upsample=2,
                            use_new_attention_order=False)), [], 2),
    "learned variance, ddpm": (Config(**TOY | dict(predict="v", learn_sigma=True, diffusion_steps=100)),
                               ["--sampler", "ddpm"], 2),
    "learned variance, dpmpp": (Config(**TOY | dict(predict="x0", learn_sigma=True)),
                                ["--sampler", "dpmpp"], 2),
    "adm, ddpm in 20 steps, guided": (
        Config(**ADM | dict(predict="v", num_heads=2, use_new_attention_order=False, cond_drop_prob=0.1)),
        ["--sampler", "ddpm", "--sample_steps", 20, "--class", "1", "--guidance_scale", 2], 2),
    "grey": (Config(**TOY | dict(predict="v", in_channels=1)), [], 2),
    "four channels": (Config(**TOY | dict(predict="v", in_channels=4)), [], 2),
    "guided": (Config(**TOY | dict(predict="v", class_cond=True, num_classes=3, cond_drop_prob=0.1)),
               ["--class", "2", "--guidance_scale", 3], 2),
    "heun": (Config(**TOY | dict(predict="v", zero_terminal_snr=True)),
             ["--sampler", "heun"], 2),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(tmp_path, images8, name):
    """./train_unet --generate and generate.py: the same picture from the same seed and weights."""
    config, flags, most = PICTURES[name]
    weights, size = tmp_path / "w.bin", config.image_size
    if config.predict == "eps":  # with weights that predict no noise every pixel would end at black or white
        run(TRAIN, *start_flags(config, images8, tmp_path / "run", 300, sample_every=0))
        weights = checkpoint_in(tmp_path / "run", 300)
    else:
        perturbed_file(weights, config)
    common = ["--seed", 40, *flags]
    run(TRAIN, "--generate", "--num_samples", 5, "--model_weights", weights, "--output_name", tmp_path / "a.png",
        "--batch_size", 2, *common)
    assert call(generate, "--num_samples", 5, "--model_weights", weights, "--output_name", tmp_path / "b.png",
                "--device", "cpu", "--output_dir", tmp_path / "single", *common) == ""
    ours, theirs = picture(tmp_path / "a.png"), picture(tmp_path / "b.png")
    shape = (2 * (size + 2) + 2, 3 * (size + 2) + 2, config.in_channels)
    assert ours.shape == theirs.shape == (shape if config.in_channels > 1 else shape[:2])
    first = ours[2:2 + size, 2:2 + size]
    inside = ((first > 0) & (first < 255)).mean()
    print(f"largest difference {np.abs(ours - theirs).max()}, {inside:.0%} of the values not at an end")
    assert np.abs(ours - theirs).max() <= most and (ours != theirs).mean() < 0.02
    assert inside > 0.15 and first.std() > 5                                # a picture, not a clamped plane
    assert (ours[:2] == 255).all() and (ours[-size:, -size:] == 255).all()  # the gaps, the empty place
    # picture 2 of seed 40 is picture 0 of seed 42, and so is the single file
    run(TRAIN, "--generate", "--num_samples", 1, "--model_weights", weights, "--output_name", tmp_path / "c.png",
        *flags, "--seed", 42)
    third = ours[2:2 + size, 2 + 2 * (size + 2):][:, :size]
    assert np.abs(picture(tmp_path / "c.png")[2:-2, 2:-2] - third).max() <= 1
    assert np.abs(picture(tmp_path / "single/000042.png") - third).max() <= most
    assert not (third == first).all()


def test_seeds_and_strips(tmp_path):
    """Any seeds in batches of any size: in the grid and as single files, in both programs; generate.py's strips."""
    config = Config(**TOY | dict(predict="v"))
    perturbed_file(tmp_path / "w.bin", config)
    weights, common = tmp_path / "w.bin", ["--seeds", "3,40-42", "--sampler", "heun", "--sample_steps", 6]
    for name, batch in (("a", 3), ("b", 4)):
        text = run(TRAIN, "--model_weights", weights, *common, "--batch_size", batch, "--output_name",
                   tmp_path / f"{name}.png", "--output_dir", tmp_path / f"single_{name}").stdout
        assert "raw weights, step 0), Heun in 6 steps (11 network calls), seeds 3,40-42" in text
    assert call(generate, "--model_weights", weights, *common, "--strip", 4, "--batch_size", 3, "--device", "cpu",
                "--output_name", tmp_path / "c.png", "--output_dir", tmp_path / "single_c") == ""
    names = [f"{seed:06d}.png" for seed in (3, 40, 41, 42)]
    grids, strip = [picture(tmp_path / f"{name}.png") for name in "abc"], picture(tmp_path / "c_strip.png")
    assert grids[0].shape == (22, 22, 3) and strip.shape == (4 * 10 + 2, 4 * 10 + 2, 3)
    for other, most in ((1, 1), (2, 2)):
        assert np.abs(grids[0] - grids[other]).max() <= most
    for place, name in enumerate(names):
        single, theirs = (picture(tmp_path / f"single_{which}" / name) for which in "ac")
        x, y = 2 + place % 2 * 10, 2 + place // 2 * 10
        assert (single == grids[0][y:y + 8, x:x + 8]).all()
        row = [strip[2 + 10 * place:][:8, 2 + 10 * column:][:, :8] for column in range(4)]
        assert (theirs == row[-1]).all()
        assert all(np.abs(first - then).max() > 2 for first, then in zip(row, row[1:]))  # it goes on
        assert np.abs(theirs - single).max() <= 2
    for folder in "abc":
        assert sorted(os.listdir(tmp_path / f"single_{folder}")) == names
    run(TRAIN, "--model_weights", weights, "--generate", "--num_samples", 1, "--seed", 41, *common[2:],
        "--output_name", tmp_path / "d.png")
    alone = picture(tmp_path / "d.png")[2:-2, 2:-2]
    assert np.abs(alone - picture(tmp_path / "single_a/000041.png")).max() <= 1


def test_drawing_while_training(tmp_path, images8):
    """It leaves the training as it is, bit for bit, and --resume goes on drawing in the same way."""
    config = Config(**TOY | dict(predict="v", offset_noise=0.1))
    how = dict(sampler="heun", threshold="none", sample_steps=3, num_samples=2)
    for name, every in (("with", 2), ("without", 0)):
        run(TRAIN, *start_flags(config, images8, tmp_path / name, 4, **how | dict(sample_every=every)))
    drawn, plain = (unet_io.read_checkpoint(str(checkpoint_in(tmp_path / name, 4)))
                    for name in ("with", "without"))
    for section in ("weights", "ema", "adam_m", "adam_v"):
        assert same_bits(drawn.sections[section], plain.sections[section])
    assert drawn.run["sampler"] == "heun" and drawn.run["threshold"] == "none" and drawn.run["eta"] == 0
    text = run(TRAIN, "--resume", tmp_path / "with", "--steps", 6).stdout
    assert re.search(r"\bsampler +heun\b", text) and re.search(r"\bthreshold +none\b", text)
    run(TRAIN, "--out_dir", tmp_path / "with", "--seeds", "0-1", "--sampler", "heun", "--sample_steps", 3,
        "--threshold", "none", "--output_name", tmp_path / "a.png")
    again = picture(tmp_path / "a.png") - picture(tmp_path / "with/samples_00000006.png")
    assert np.abs(again).max() <= 1
    run(TRAIN, "--resume", tmp_path / "with", "--steps", 7, "--sampler", "ddim", "--eta", 0.25)
    assert unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "with", 7))).run["eta"] == 0.25


def test_interpolation(tmp_path):
    """From one seed's picture to another's, past noise that is as long as theirs."""
    config = Config(**TOY | dict(predict="v", zero_terminal_snr=True))
    perturbed_file(tmp_path / "w.bin", config)
    common = ["--seeds", "9,4", "--sampler", "dpmpp", "--batch_size", 2]
    between = [*common, "--interpolate", 5]
    draw = functools.partial(call, generate, "--model_weights", tmp_path / "w.bin", "--device", "cpu", "--output_dir")
    assert draw(tmp_path / "single", *between, "--output_name", tmp_path / "a.png") == ""
    assert picture(tmp_path / "a.png").shape == (12, 52, 3)  # one row
    assert draw(tmp_path / "ends", *common, "--output_name", tmp_path / "c.png") == ""
    path = [picture(tmp_path / f"single/{n:06d}.png") for n in range(5)]
    for n, seed in ((0, 9), (4, 4)):
        assert np.abs(path[n] - picture(tmp_path / f"ends/{seed:06d}.png")).max() <= 1
    assert all(np.abs(first - then).max() > 2 for first, then in zip(path, path[1:]))
    noise = generate.slerp(*train_unet.seed_noise([9, 4], (3, 8, 8)), 5).flatten(1)
    lengths = noise.norm(dim=1)
    shorter, longer = sorted((lengths[0], lengths[4]))
    assert 0.99 * shorter < lengths.min() and lengths.max() < 1.01 * longer


@pytest.mark.parametrize("words, says, status", [
    (["--seeds", "5-3"], "5-3", 2), (["--seeds", "1,,2"], "1,,2", 2), (["--seeds", "4294967296"], "up to", 2),
    (["--seeds", "0-3", "--{count}", "9"], ["{count}", "seeds", "4 pictures"], 1),
    (["--seeds", "0-3", "--seed", "9"], ["--seed 9", "--seeds"], 1),
    (["--seeds", "0-4294967295"], "million", 2),
    (["--eta", "0.5", "--sampler", "heun"], ["--eta 0.5", "ddim"], 1)])
def test_refused_pictures(tmp_path, words, says, status):
    """Both programs, in one sentence, before they draw."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    says = [says] if isinstance(says, str) else says
    output = ["--output_name", tmp_path / "x.png"]
    there = [word.format(count="num_samples") for word in words]
    if "--seeds" not in words:
        there += ["--generate", "--num_samples", 1]
    refused(TRAIN, "--model_weights", tmp_path / "w.bin", *there, *output, status=status,
            says=[text.format(count="num_samples") for text in says])
    here = [word.format(count="num_samples") for word in words]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            errors.write(call(generate, "--model_weights", tmp_path / "w.bin", *here, *output))
        except SystemExit as end:
            assert end.code == 2 == status
    for text in says:
        assert text.format(count="num_samples") in errors.getvalue()
    assert len(errors.getvalue().splitlines()) == 1 and not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("words, says", [
    (["--strip", "11", "--sample_steps", "10"], "--strip 11"), (["--interpolate", "3"], "two seeds"),
    (["--interpolate", "3", "--seeds", "1-3"], "two seeds"), (["--interpolate", "3", "--seeds", "1,1"], "two seeds"),
    (["--interpolate", "3", "--seeds", "1,2", "--eta", "0.5"], "no noise"),
    (["--interpolate", "3", "--seeds", "1,2", "--sampler", "ddpm"], "no noise")])
def test_refused_strips(tmp_path, words, says):
    """generate.py refuses what a strip or the way between two seeds can't show, before it draws."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    sentence = call(generate, "--model_weights", tmp_path / "w.bin", *words, "--output_name", tmp_path / "x.png")
    assert says in sentence and len(sentence.splitlines()) == 1 and not (tmp_path / "x.png").exists()


def test_targets(tmp_path, monkeypatch):
    """Where pictures can't be written is said before they are drawn; what is no file stays what it is."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "full.png").symlink_to("/dev/full")
    (tmp_path / "x_strip.png").symlink_to("/dev/full")
    os.mkfifo(tmp_path / "pipe.png")
    monkeypatch.setattr(generate, "sample", None)
    for name, says in (("folder.png", "a folder"), ("full.png", "a device"), ("pipe.png", "a pipe"),
                       ("no/x.png", "does not exist"), ("file/x.png", "is a file, a folder is needed"),
                       ("x", ".png"), ("x.psd", ".png"), ("x.bin", ".png"), ("x.xbm", ".png")):
        words = ["--model_weights", tmp_path / "w.bin", "--output_name", tmp_path / name]
        sentence = call(generate, *words)
        assert says in sentence and name in sentence and len(sentence.splitlines()) == 1, sentence
    perturbed_file(tmp_path / "clear.bin", Config(**TOY | dict(in_channels=4)))  # refused before the work, not after it
    assert call(generate, "--model_weights", tmp_path / "clear.bin", "--output_name", tmp_path / "x.jpg") == (
        f"{tmp_path / 'x.jpg'} must end in .png or another ending that Pillow writes with transparency")
    words[-1] = tmp_path / "x.png"
    assert "x_strip.png is a device" in call(generate, *words, "--strip", 2)
    for place in ("file", "file/deeper"):
        sentence = call(generate, *words, "--output_dir", tmp_path / place)
        assert "file is a file, a folder is needed" in sentence
    for name in ("folder.png", "full.png"):
        for write in (functools.partial(unet_io.save_grid, pixels=np.zeros((1, 3, 8, 8), np.uint8)),
                      functools.partial(unet_io.write_images, pixels=np.zeros((1, 3, 8, 8), np.uint8)),
                      functools.partial(unet_io.write_tensors, tensors={})):
            with pytest.raises(UserError, match="a file is needed"):
                write(tmp_path / name)
    assert (tmp_path / "full.png").is_char_device() and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("ending", ["png", "jpg", "bmp", "webp", "tif"])
def test_picture_on_a_full_disk(tmp_path, ending):
    """The picture before stays whole."""
    target = tmp_path / f"x.{ending}"
    unet_io.save_grid(target, np.zeros((1, 3, 8, 8), np.uint8))
    before = target.read_bytes()
    noise = np.random.default_rng(0).integers(0, 256, (4, 3, 200, 200), np.uint8)
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limit[1]))
    try:
        with pytest.raises(UserError, match=f"x.{ending} can't be written"):
            unet_io.save_grid(target, noise)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert target.read_bytes() == before and os.listdir(tmp_path) == [target.name]
    unet_io.save_grid(target, noise)
    with Image.open(target) as image:
        assert np.asarray(image).shape == (406, 406, 3)


# ----------------------------------------------------------------------------------------------------
# files of pictures

WRITER = r"""
#define main train_unet_main
#include "../train_unet.cu"
#undef main
// lines of "png width height channels FILE.raw FILE.png", or of "columns N groups image_size"
int main() {
    char what[16], from[1024], to[1024];
    int a, b, c;
    while (scanf("%15s %d %d %d", what, &a, &b, &c) == 4) {
        if (!strcmp(what, "columns")) {
            printf("%d\n", grid_columns(a, b, c));
            continue;
        }
        if (scanf("%1023s %1023s", from, to) != 2) return 1;
        Raster picture = {a, b, c, std::vector<uint8_t>((size_t)a * b * c)};
        FILE* file = fopen(from, "rb");
        if (fread(picture.bytes.data(), 1, picture.bytes.size(), file) != picture.bytes.size()) return 1;
        fclose(file);
        write_png(to, picture);
    }
}
"""


@pytest.fixture(scope="session")
def writer(tmp_path_factory):
    """writer(lines): the output's lines of a program that calls write_png and grid_columns of train_unet.cu."""
    folder = tmp_path_factory.mktemp("writer")
    (folder / "writer.cpp").write_text(WRITER.replace("..", str(train_unet.__file__).rsplit("/", 1)[0]))
    run("g++", "-std=c++20", "-O1", "-w", "-fsanitize=undefined", "-fno-sanitize-recover", "-o",
        folder / "writer", folder / "writer.cpp", "-ldl")

    def call_writer(lines):
        return run(folder / "writer", input="\n".join(lines) + "\n").stdout.splitlines()
    return call_writer


def written(writer, folder, arrays):
    """The PNG files of uint8 (height, width, channels) arrays."""
    lines, paths = [], []
    for n, array in enumerate(arrays):
        array.tofile(folder / f"{n}.raw")
        paths.append(folder / f"{n}.png")
        height, width, channels = array.shape
        lines.append(f"png {width} {height} {channels} {folder / f'{n}.raw'} {paths[-1]}")
    writer(lines)
    return paths


def rough(rng, shape):
    """Runs, steps and noise."""
    steps = rng.integers(0, 256, shape) * (rng.random(shape) < rng.choice([0.01, 0.1, 0.5]))
    return (np.cumsum(steps, axis=int(rng.integers(3))) // rng.integers(1, 9) % 256).astype(np.uint8)


def test_png(writer, tmp_path):
    """Pillow and zlib read back each byte: all channels, sizes around those of blocks and runs, and counts that a
    code of 15 bits can't follow."""
    rng = np.random.default_rng(0)
    arrays = [rough(rng, (height, width, channels)) for channels in (1, 2, 3, 4) for width in (1, 2, 3, 8, 33, 259)
              for height in (1, 2, 5, 64)]
    arrays += [rng.integers(0, 256, (height, 1, 1), dtype=np.uint8) for height in (32767, 32768, 40000)]
    arrays += [np.full((height, 1000, 1), value, np.uint8) for height in (65, 66, 131) for value in (0, 255)]
    arrays += [rough(rng, shape) for shape in ((2, 70000, 3), (16400, 5, 3), (70000, 1, 1))]
    for length in range(1, 12):  # runs, of each length up to 2 * 257 as well
        arrays.append(np.repeat(np.arange(200, dtype=np.uint8) * 7, length).reshape(1, -1, 1))
    arrays.append(np.concatenate([np.repeat(np.uint8(9 + n % 3), n) for n in range(1, 530)]).cumsum().astype(np.uint8)
                  .reshape(1, -1, 1))
    counts = [1, 1]
    while sum(counts) < 60000:  # Fibonacci's: the longest codes there are
        counts.append(counts[-1] + counts[-2])
    skewed = np.concatenate([np.full(count, 11 * n % 256, np.uint8) for n, count in enumerate(counts)])
    rng.shuffle(skewed)
    arrays.append(np.cumsum(skewed).astype(np.uint8).reshape(1, -1, 1))
    for array, path in zip(arrays, written(writer, tmp_path, arrays), strict=True):
        with Image.open(path) as image:
            image.verify()  # checksums
        with Image.open(path) as image:
            assert image.mode == ("L", "LA", "RGB", "RGBA")[array.shape[2] - 1]
            assert (np.asarray(image).reshape(array.shape) == array).all()
        contents, chunks, at = path.read_bytes(), [], 8
        while at < len(contents):
            size = int.from_bytes(contents[at:at + 4], "big")
            chunks.append((contents[at + 4:at + 8], contents[at + 8:at + 8 + size]))
            at += 12 + size
        stream = zlib.decompressobj()
        inflated = stream.decompress(b"".join(data for kind, data in chunks if kind == b"IDAT"))
        assert stream.eof and not stream.unused_data and len(inflated) == array.size + array.shape[0]
        blocks = -(-len(inflated) // 65535)
        assert len(contents) <= len(inflated) + 100 + 18 * blocks  # as if it were stored


def test_png_is_small(writer, tmp_path):
    """Grids that models drew become as small as Pillow makes them at its best, within a tenth; noise does not grow."""
    names = {"unet64_samples": 0.46, "fashion32_samples": 0.45, "tiny_samples": 0.24, "dit32_samples": 0.54}
    arrays = []
    for name in names:
        with Image.open(pathlib.Path(train_unet.__file__).parent / f"data/{name}.png") as image:
            arrays.append(np.atleast_3d(np.asarray(image)))
    arrays.append(np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8))
    *paths, noise = written(writer, tmp_path, arrays)
    for path, array, most in zip(paths, arrays, names.values()):
        buffer = io.BytesIO()
        Image.fromarray(array.squeeze()).save(buffer, "png", compress_level=9)
        assert path.stat().st_size < most * array.size and path.stat().st_size < 1.1 * len(buffer.getvalue())
    assert noise.stat().st_size < arrays[-1].size + 300 + 200  # a byte a line, and some for each block


def test_grids_that_fit(writer):
    """Both programs lay out a grid in the same way: a class has a row of its own, or shares it with others, and 4,000 pixels
    a side are not exceeded where they need not be."""
    cases = [(n, 0, size) for n in (1, 2, 16, 17, 1000, 50000) for size in (8, 64)]
    cases += [(each * groups, groups, size) for each in (1, 2, 7, 61, 62, 200, 500) for groups in (1, 2, 10, 60, 61, 1000)
              for size in (8, 32, 64, 256)]
    found = map(int, writer([f"columns {n} {groups} {size}" for n, groups, size in cases]))
    for (n, groups, size), columns in zip(cases, found, strict=True):
        assert columns == unet_io.grid_columns(n, groups, size)
        each = n // (groups or 1)
        if groups and max(each, groups) * (size + 2) <= 4000:
            assert columns == each and n == columns * groups  # a row each
            continue
        square = math.ceil(math.sqrt(n))
        assert columns == square or groups and columns % each == 0 and square - each < columns < square
        room = 4000 // (size + 2)
        if n <= room * room // 4:  # where it is not a close fit
            assert max(columns, -(-n // columns)) <= room


def test_many_pictures_of_classes(tmp_path):
    """Both programs show several classes in a row where one in each would be taller than 4,000 pixels, and say so; many
    pictures of a class simply go on in the next row."""
    for classes, count, says, columns in ((401, 802, "(14 in a row: ", 28), (3, 1203, "", 35)):
        perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(class_cond=True, num_classes=classes, predict="v")))
        names = [f"c{n}" for n in range(classes)]
        (tmp_path / "names").write_text("".join(f"{name}\n" for name in names))
        common = ["--class_names", tmp_path / "names", "--sample_steps", 1, "--batch_size", 300]
        text = run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", count, *common, "--output_name",
                   tmp_path / "a.png").stdout
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert call(generate, "--model_weights", tmp_path / "w.bin", "--num_samples", count, *common,
                        "--output_name", tmp_path / "b.png", "--device", "cpu") == ""
        for said in (text, printed.getvalue()):
            assert f"{says}{', '.join(names)})" in said if says else "c0, c1" not in said
        ours, theirs = picture(tmp_path / "a.png"), picture(tmp_path / "b.png")
        assert ours.shape == theirs.shape == (10 * -(-count // columns) + 2, 10 * columns + 2, 3)
        assert np.abs(ours - theirs).max() <= 2


ARRAYS = {"colours and classes": dict(class_cond=True, num_classes=3), "grey": dict(in_channels=1), "alpha": dict(in_channels=4)}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(tmp_path, name):
    """--output_name X.npy: floats (N, C, H, W), from both programs; X.npz: bytes (N, H, W, C) and the classes of a model that
    knows classes, from generate.py, and by the guide's command from X.npy."""
    config = Config(**TOY | dict(predict="v") | ARRAYS[name])
    perturbed_file(tmp_path / "w.bin", config)
    common = ["--model_weights", tmp_path / "w.bin", "--num_samples", 7, "--seed", 5, "--sample_steps", 4, "--output_name"]
    run(TRAIN, "--generate", *common, tmp_path / "a.npy", "--output_dir", tmp_path / "each")
    for kind in ("npy", "npz"):
        assert call(generate, *common, tmp_path / f"b.{kind}", "--device", "cpu") == ""
    ours, theirs = (np.load(tmp_path / f"{which}.npy", allow_pickle=False) for which in "ab")
    assert ours.dtype == np.float32 and ours.shape == theirs.shape == (7, config.in_channels, 8, 8)
    assert ours.flags.c_contiguous and np.abs(ours - theirs).max() < 0.01 and ours.std() > 0.05
    for seed, pixels in zip(range(5, 12), unet_io.to_uint8(ours), strict=True):
        alone = np.atleast_3d(picture(tmp_path / f"each/{seed:06d}.png"))
        assert (np.moveaxis(alone, -1, 0) == pixels).all()

    command, = re.findall(r'^    (python3 -c ".*X\.npy.*)$', (ROOT / "docs/formats.md").read_text(), re.M)
    run("bash", "-c", command.replace("python3", sys.executable).replace("X.np", f"{tmp_path}/a.np"), cwd=ROOT)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays, np.load(tmp_path / "b.npz") as expected:
        assert arrays["arr_0"].dtype == expected["arr_0"].dtype == np.uint8
        assert (arrays["arr_0"] == np.moveaxis(unet_io.to_uint8(ours), 1, -1)).all()
        assert (expected["arr_0"] == np.moveaxis(unet_io.to_uint8(theirs), 1, -1)).all()
        assert expected.files == ["arr_0", "arr_1"][:1 + config.class_cond]
        if config.class_cond:
            assert expected["arr_1"].dtype == np.int64 and expected["arr_1"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    # a PNG of so many could not be written, and an array can
    text = run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 1000000, "--dry_run", "--output_name",
               tmp_path / "c.npy").stdout
    assert "memory" in text
    refused(TRAIN, *common, tmp_path / "c.npz", "--generate", says=["c.npz", ".png", ".npy", "docs/formats.md"])


def test_drawn_as_in_training(tmp_path, images8, capsys):
    """Both programs draw the run's own grid where they are told nothing; a given flag wins, and a given sampler goes by the
    defaults of steps, spacing and eta."""
    config = Config(**TOY | dict(predict="v", class_cond=True, num_classes=3, cond_drop_prob=0.2, lr=0.01))
    own = dict(guidance_scale=2, sampler="ddim", sample_steps=7, spacing="karras", eta=0.5, threshold="none")
    run(TRAIN, *start_flags(config, images8, tmp_path / "run", 8, **own))
    path, grid = checkpoint_in(tmp_path / "run", 8), tmp_path / "run/samples_00000008.png"

    def drawn(name, *words):
        """The picture that both programs draw, and which flags they say are the run's."""
        text = run(TRAIN, "--generate", "--num_samples", 1, "--out_dir", tmp_path / "run", *words, "--output_name",
                   tmp_path / f"{name}.png").stdout
        capsys.readouterr()
        assert call(generate, "--num_samples", 1, "--model_weights", path, *words, "--device", "cpu", "--output_name",
                    tmp_path / f"{name} torch.png") == ""
        said = [re.findall(r"^drawing as in training:(.*)$", output, re.M) for output in (text, capsys.readouterr().out)]
        assert said[0] == said[1]
        assert np.abs(picture(tmp_path / f"{name}.png") - picture(tmp_path / f"{name} torch.png")).max() <= 2
        return (tmp_path / f"{name}.png").read_bytes(), *said[0]

    def words(flags):
        return [word for name, value in flags.items() for word in (f"--{name}", value)]

    text = "".join(f" --{name} {value}" for name, value in own.items() if name != "sampler")  # ddim is the default
    assert drawn("alone") == (grid.read_bytes(), text)
    assert drawn("all", *words(own | dict(use_ema=1))) == (grid.read_bytes(),)

    weaker = drawn("weaker", "--guidance_scale", 1)
    assert weaker[1] == text.replace(" --guidance_scale 2", "")
    assert weaker[0] == drawn("weaker, all", *words(own | dict(guidance_scale=1)))[0] != grid.read_bytes()

    for sampler in ("heun", "ddim"):
        other = drawn(sampler, "--sampler", sampler)
        assert other[1] == " --guidance_scale 2 --threshold none"
        usual = dict(sampler=sampler, sample_steps={"heun": 25, "ddim": 50}[sampler], spacing="auto", eta=0)
        assert other[0] == drawn(f"{sampler}, all", *words(own | usual))[0] != grid.read_bytes()


def test_threshold_of_a_file(tmp_path):
    """generate.py draws with a file's --threshold dynamic, and ./train_unet, which has none, asks for another."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))  # of --predict eps, which sees pictures far outside [-1, 1]
    checkpoint = unet_io.read_checkpoint(str(tmp_path / "w.bin"))
    checkpoint.run = dict(threshold="dynamic")
    unet_io.write_checkpoint(str(tmp_path / "w.bin"), checkpoint)
    draw = ["--model_weights", tmp_path / "w.bin", "--num_samples", 1, "--sample_steps", 3, "--output_name"]
    for name, words in {"own": [], "dynamic": ["--threshold", "dynamic"], "clamp": ["--threshold", "clamp"]}.items():
        assert call(generate, *draw, tmp_path / f"{name}.png", *words, "--device", "cpu") == ""
    drawn = {path.stem: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert drawn["own"] == drawn["dynamic"] != drawn["clamp"]
    refused(TRAIN, "--generate", *draw, tmp_path / "x.png", says=["w.bin", "--threshold dynamic", "--threshold clamp"])
    run(TRAIN, "--generate", *draw, tmp_path / "x.png", "--threshold", "clamp")
    sentence = call(generate, "--model_weights", tmp_path / "w.bin", "--export_page", tmp_path / "x.html")
    assert "--threshold dynamic" in sentence and not (tmp_path / "x.html").exists()


def test_pictures_from_averaged_weights(tmp_path, images8):
    """--use_ema names an average, or 0 the raw weights, in both programs; without it the run's is drawn with."""
    config = dataclasses.replace(RESUMED, lr=0.01, lr_schedule="constant", ema_rate=(0.99, 0.3))
    result = run(TRAIN, *start_flags(config, images8, tmp_path / "run", 8, val_file=images8, use_ema=2))
    assert len(re.findall(r"^step 8 \| validation loss .* \(EMA 0\.3\)$", result.stdout, re.M)) == 1
    assert re.search(r"^1 picture in .* \(EMA 0\.3\): ", result.stdout, re.M)
    drawn, names = {}, {0: "raw weights", 1: "EMA 0.99", 2: "EMA 0.3"}
    path = checkpoint_in(tmp_path / "run", 8)
    for use_ema in names:
        result = run(TRAIN, "--generate", "--num_samples", 1, "--out_dir", tmp_path / "run", "--use_ema", use_ema,
                     "--sample_steps", 5, "--output_name", tmp_path / f"a{use_ema}.png")
        assert f"({names[use_ema]}, step 8)" in result.stdout
        assert call(generate, "--num_samples", 1, "--model_weights", path, "--use_ema", use_ema,
                    "--sample_steps", 5, "--output_name", tmp_path / f"b{use_ema}.png",
                    "--device", "cpu") == ""
        ours, theirs = picture(tmp_path / f"a{use_ema}.png"), picture(tmp_path / f"b{use_ema}.png")
        assert np.abs(ours - theirs).max() <= 2
        drawn[use_ema] = ours
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(drawn[a] - drawn[b]).max() > 2
    default = run(TRAIN, "--generate", "--num_samples", 1, "--out_dir", tmp_path / "run", "--sample_steps", 5,
                  "--output_name", tmp_path / "default.png")
    assert "(EMA 0.3, step 8)" in default.stdout
    assert (tmp_path / "default.png").read_bytes() == (tmp_path / "a2.png").read_bytes()
    assert call(generate, "--model_weights", path, "--export", tmp_path / "x.bin") == ""  # these weights, alone
    exported = run(TRAIN, "--generate", "--num_samples", 1, "--model_weights", tmp_path / "x.bin", "--sample_steps", 5, "--output_name",
                   tmp_path / "x.png").stdout
    assert "--use_ema" not in exported and (tmp_path / "x.png").read_bytes() == (tmp_path / "a2.png").read_bytes()
    refused(TRAIN, "--generate", "--num_samples", 1, "--out_dir", tmp_path / "run", "--use_ema", 3, says=["--use_ema 3", "2"])
    assert "ema_3" in call(generate, "--model_weights", path, "--use_ema", 3, "--device", "cpu")
