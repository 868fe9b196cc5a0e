"""Pictures drawn by both programs: the same from the same seed."""
import contextlib
import dataclasses
import functools
import io
import os
import re
import resource
import signal

import numpy as np
import pytest
from PIL import Image

import generate
import train_unet
import unet_io
from harness import (
    ADM, RESUMED, SMALL, TOY, TRAIN, call, checkpoint_in, perturbed_file, picture, refused, run,
    same_bits, start_flags)
from unet_io import Config, UserError

PICTURES = {  # name: (config, flags, largest difference in pixel values of 255)
    "ddim v": (Config(**TOY | dict(image_size=16, predict="v", noise_schedule="cosine")), [], 2),
    "ddim eps": (Config(**TOY | dict(batch_size=8, lr=2e-3)), ["--sample_steps", 20], 2),
    "ddpm v": (Config(**TOY | dict(predict="v", diffusion_steps=100)), ["--sampler", "ddpm"], 2),
    "ddim eta": (Config(**TOY | dict(predict="v")), ["--eta", 0.6, "--threshold", "dynamic"], 2),
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
    "four channels": (Config(**TOY | dict(predict="v", in_channels=4)), ["--threshold", "dynamic"], 2),
    "guided": (Config(**TOY | dict(predict="v", class_cond=True, num_classes=3, cond_drop_prob=0.1)),
               ["--class", "2", "--guidance_scale", 3, "--guidance_interval", "0.1,0.7", "--threshold",
                "dynamic"], 2),
    "heun": (Config(**TOY | dict(predict="v", zero_terminal_snr=True)),
             ["--sampler", "heun", "--threshold", "dynamic"], 2),
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
    run(TRAIN, "--generate", 5, "--model_weights", weights, "--output_name", tmp_path / "a.png",
        "--batch_size", 2, *common)
    assert call(generate, "--num_images", 5, "--model_filename", weights, "--output_name", tmp_path / "b.png",
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
    run(TRAIN, "--generate", 1, "--model_weights", weights, "--output_name", tmp_path / "c.png",
        *flags, "--seed", 42)
    third = ours[2:2 + size, 2 + 2 * (size + 2):][:, :size]
    assert np.abs(picture(tmp_path / "c.png")[2:-2, 2:-2] - third).max() <= 1
    assert np.abs(picture(tmp_path / "single/000042.png") - third).max() <= most
    assert not (third == first).all()


def test_seeds_and_strips(tmp_path):
    """Any seeds in batches of any size: in the grid, as single files, with their strips; in both programs."""
    config = Config(**TOY | dict(predict="v"))
    perturbed_file(tmp_path / "w.bin", config)
    weights, common = tmp_path / "w.bin", ["--seeds", "3,40-42", "--strip", 4, "--sampler", "heun",
                                           "--sample_steps", 6]
    for name, batch in (("a", 3), ("b", 4)):
        text = run(TRAIN, "--model_weights", weights, *common, "--batch_size", batch, "--output_name",
                   tmp_path / f"{name}.png", "--output_dir", tmp_path / f"single_{name}").stdout
        assert "raw weights, step 0), Heun in 6 steps (11 network calls), seeds 3,40-42" in text
    assert call(generate, "--model_filename", weights, *common, "--batch_size", 3, "--device", "cpu",
                "--output_name", tmp_path / "c.png", "--output_dir", tmp_path / "single_c") == ""
    names = [f"{seed:06d}.png" for seed in (3, 40, 41, 42)]
    grids, strips = ([picture(tmp_path / f"{name}{part}.png") for name in "abc"] for part in ("", "_strip"))
    assert grids[0].shape == (22, 22, 3) and strips[0].shape == (4 * 10 + 2, 4 * 10 + 2, 3)
    for other, most in ((1, 1), (2, 2)):
        for ours, theirs in ((grids[0], grids[other]), (strips[0], strips[other])):
            assert np.abs(ours - theirs).max() <= most
    for place, name in enumerate(names):
        single = picture(tmp_path / "single_a" / name)
        x, y = 2 + place % 2 * 10, 2 + place // 2 * 10
        assert (single == grids[0][y:y + 8, x:x + 8]).all()
        row = [strips[0][2 + 10 * place:][:8, 2 + 10 * column:][:, :8] for column in range(4)]
        assert (single == row[-1]).all()
        assert all(np.abs(first - then).max() > 2 for first, then in zip(row, row[1:]))  # it goes on
        assert np.abs(picture(tmp_path / "single_c" / name) - single).max() <= 2
    for folder in "abc":
        assert sorted(os.listdir(tmp_path / f"single_{folder}")) == names
    run(TRAIN, "--model_weights", weights, "--generate", 1, "--seed", 41, *common[4:],
        "--output_name", tmp_path / "d.png")
    alone = picture(tmp_path / "d.png")[2:-2, 2:-2]
    assert np.abs(alone - picture(tmp_path / "single_a/000041.png")).max() <= 1


def test_drawing_while_training(tmp_path, images8):
    """It leaves the training as it is, bit for bit, and --resume goes on drawing in the same way."""
    config = Config(**TOY | dict(predict="v", offset_noise=0.1))
    how = dict(sampler="heun", threshold="dynamic", sample_steps=3, num_samples=2)
    for name, every in (("with", 2), ("without", 0)):
        run(TRAIN, *start_flags(config, images8, tmp_path / name, 4, **how | dict(sample_every=every)))
    drawn, plain = (unet_io.read_checkpoint(str(checkpoint_in(tmp_path / name, 4)))
                    for name in ("with", "without"))
    for section in ("weights", "ema", "adam_m", "adam_v"):
        assert same_bits(drawn.sections[section], plain.sections[section])
    assert drawn.run["sampler"] == 3 and drawn.run["threshold"] == 1 and drawn.run["eta"] == 0
    text = run(TRAIN, "--resume", tmp_path / "with", "--steps", 6).stdout
    assert re.search(r"\bsampler +heun\b", text) and re.search(r"\bthreshold +dynamic\b", text)
    run(TRAIN, "--out_dir", tmp_path / "with", "--seeds", "0-1", "--sampler", "heun", "--sample_steps", 3,
        "--threshold", "dynamic", "--output_name", tmp_path / "a.png")
    again = picture(tmp_path / "a.png") - picture(tmp_path / "with/samples_00000006.png")
    assert np.abs(again).max() <= 1
    run(TRAIN, "--resume", tmp_path / "with", "--steps", 7, "--sampler", "ddim", "--eta", 0.25)
    stored = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "with", 7))).run["eta"]
    assert np.int32(stored).view(np.float32) == 0.25


def test_interpolation(tmp_path):
    """From one seed's picture to another's, past noise that is as long as theirs."""
    config = Config(**TOY | dict(predict="v", zero_terminal_snr=True))
    perturbed_file(tmp_path / "w.bin", config)
    common = ["--seeds", "9,4", "--sampler", "dpmpp", "--batch_size", 2]
    between = [*common, "--interpolate", 5]
    run(TRAIN, "--model_weights", tmp_path / "w.bin", *between, "--output_name", tmp_path / "a.png",
        "--output_dir", tmp_path / "single")
    assert call(generate, "--model_filename", tmp_path / "w.bin", *between, "--device", "cpu",
                "--output_name", tmp_path / "b.png") == ""
    assert picture(tmp_path / "b.png").shape == (12, 52, 3)  # one row
    assert np.abs(picture(tmp_path / "a.png") - picture(tmp_path / "b.png")).max() <= 2
    run(TRAIN, "--model_weights", tmp_path / "w.bin", *common, "--output_name", tmp_path / "c.png",
        "--output_dir", tmp_path / "ends")
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
    (["--seeds", "0-4294967295"], "million", 2), (["--strip", "11", "--sample_steps", "10"], "--strip 11", 1),
    (["--interpolate", "3"], "two seeds", 1), (["--interpolate", "3", "--seeds", "1-3"], "two seeds", 1),
    (["--interpolate", "3", "--seeds", "1,1"], "two seeds", 1),
    (["--interpolate", "3", "--seeds", "1,2", "--eta", "0.5"], "no noise", 1),
    (["--interpolate", "3", "--seeds", "1,2", "--sampler", "ddpm"], "no noise", 1),
    (["--eta", "0.5", "--sampler", "heun"], ["--eta 0.5", "ddim"], 1)])
def test_refused_pictures(tmp_path, words, says, status):
    """Both programs, in one sentence, before they draw."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    says = [says] if isinstance(says, str) else says
    output = ["--output_name", tmp_path / "x.png"]
    there = [word.format(count="generate") for word in words]
    if not {"--seeds", "--interpolate"} & set(words):
        there += ["--generate", 1]
    refused(TRAIN, "--model_weights", tmp_path / "w.bin", *there, *output, status=status,
            says=[text.format(count="generate") for text in says])
    here = [word.format(count="num_images") for word in words]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            errors.write(call(generate, "--model_filename", tmp_path / "w.bin", *here, *output))
        except SystemExit as end:
            assert end.code == 2 == status
    for text in says:
        assert text.format(count="num_images") in errors.getvalue()
    assert len(errors.getvalue().splitlines()) == 1 and not (tmp_path / "x.png").exists()


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
        words = ["--model_filename", tmp_path / "w.bin", "--output_name", tmp_path / name]
        sentence = call(generate, *words)
        assert says in sentence and name in sentence and len(sentence.splitlines()) == 1, sentence
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


def test_pictures_from_averaged_weights(tmp_path, images8):
    """The first EMA is drawn with; --use_ema names another, or 0 the raw weights, in both programs."""
    config = dataclasses.replace(RESUMED, lr=0.01, lr_schedule="constant", ema_rate=(0.99, 0.3))
    result = run(TRAIN, *start_flags(config, images8, tmp_path / "run", 8, val_file=images8, use_ema=2))
    assert len(re.findall(r"^step 8 \| validation loss .* \(EMA 0\.3\)$", result.stdout, re.M)) == 1
    assert re.search(r"^1 picture in .* \(EMA 0\.3\): ", result.stdout, re.M)
    drawn, names = {}, {0: "raw weights", 1: "EMA 0.99", 2: "EMA 0.3"}
    path = checkpoint_in(tmp_path / "run", 8)
    for use_ema in names:
        result = run(TRAIN, "--generate", 1, "--out_dir", tmp_path / "run", "--use_ema", use_ema,
                     "--sample_steps", 5, "--output_name", tmp_path / f"a{use_ema}.png")
        assert f"({names[use_ema]}, step 8)" in result.stdout
        assert call(generate, "--num_images", 1, "--model_filename", path, "--use_ema", use_ema,
                    "--sample_steps", 5, "--output_name", tmp_path / f"b{use_ema}.png",
                    "--device", "cpu") == ""
        ours, theirs = picture(tmp_path / f"a{use_ema}.png"), picture(tmp_path / f"b{use_ema}.png")
        assert np.abs(ours - theirs).max() <= 2
        drawn[use_ema] = ours
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(drawn[a] - drawn[b]).max() > 2
    default = run(TRAIN, "--generate", 1, "--out_dir", tmp_path / "run", "--sample_steps", 5,
                  "--output_name", tmp_path / "default.png")
    assert "(EMA 0.99, step 8)" in default.stdout
    assert (tmp_path / "default.png").read_bytes() == (tmp_path / "a1.png").read_bytes()
    refused(TRAIN, "--generate", 1, "--out_dir", tmp_path / "run", "--use_ema", 3, says=["--use_ema 3", "2"])
    assert "ema_3" in call(generate, "--model_filename", path, "--use_ema", 3, "--device", "cpu")
