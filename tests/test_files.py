"""Files, there and back: checkpoints, old weights, exports, images, damaged ones."""
import dataclasses
import functools
import json
import os
import re
import resource
import shutil
import sys
import zlib

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import generate
import prepare_data
import train_unet
import unet_io
from harness import (
    QUICK, RESUMED, ROOT, SMALL, NETWORK, TOY, TRAIN, call, checkpoint_in, losses_in, perturbed_file, refused,
    run, same_bits, script, start_flags, state_in, write_earlier_version)
from unet_io import Checkpoint, Config, UserError, flags_of


def test_checkpoint_round_trip(tmp_path, images8):
    """.bin -> PyTorch -> .bin: the same bits; and PyTorch's checkpoint resumes in the program."""
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "run", 4, save_every=2, val_file=images8, keep=3,
                            keep_every=7))
    path = checkpoint_in(tmp_path / "run", 2)
    first = unet_io.read_checkpoint(str(path))
    unet_io.write_checkpoint(tmp_path / "same.bin", first)
    assert (tmp_path / "same.bin").read_bytes() == path.read_bytes() and first.run["keep_every"] == 7
    for name in ("ema_rate", "predict", "flip", "lr", "batch_size", "lr_schedule", "channel_mult", "seed",
                 "zero_terminal_snr", "offset_noise"):
        assert getattr(first.config, name) == getattr(RESUMED, name), name
    assert first.run["data_file"] == first.run["val_file"] == images8
    model, _ = train_unet.load_model(str(path), use_ema=False)
    trainer = train_unet.Trainer(model, unet_io.read_images(images8), first.config)
    trainer.restore(first, str(path))
    texts = {name: first.sections[name] for name in unet_io.TEXT_SECTIONS if name in first.sections}
    unet_io.write_checkpoint(tmp_path / "again.bin", trainer.checkpoint(first.smoothed_loss, first.run, **texts))
    second = unet_io.read_checkpoint(str(tmp_path / "again.bin"))
    assert list(second.sections) == list(first.sections) and second.config == first.config and second.run == first.run
    for name, values in first.sections.items():
        again = second.sections[name]
        if name == "state":
            assert values.pack() == again.pack() and values.seen == 2
        else:
            assert values == again if isinstance(values, str) else same_bits(values, again), name
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "again.bin", checkpoint_in(tmp_path / "other", 2))
    run(TRAIN, "--resume", tmp_path / "other", "--steps", 4, *QUICK)
    found, expected = (unet_io.read_checkpoint(str(checkpoint_in(tmp_path / name, 4)))
                       for name in ("other", "run"))
    for name in ("weights", "ema", "adam_m", "adam_v"):
        assert same_bits(found.sections[name], expected.sections[name]), name


def test_resume_in_pytorch(tmp_path, images8):
    """train_unet.py goes on from the program's checkpoint with the program's next losses."""
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "run", 6, save_every=3, log_every=1, keep=9))
    (tmp_path / "python").mkdir()
    shutil.copy(checkpoint_in(tmp_path / "run", 3), tmp_path / "python")
    script("train_unet.py", "--resume", tmp_path / "python", "--steps", 6, "--log_every", 1, "--device", "cpu",
           "--sample_every", 0)
    theirs, ours = losses_in(tmp_path / "run"), losses_in(tmp_path / "python")
    assert sorted(ours) == [4, 5, 6]
    for step, loss in ours.items():
        assert abs(loss / theirs[step] - 1) < 1e-5


@pytest.mark.parametrize("matching_fraction, stop, threshold", ((0, 2, "none"), (0.5, 2, "none"), (0.5, 4, "clamp")))
def test_tuning_in_pytorch(tmp_path, images8, matching_fraction, stop, threshold):
    """Both programs tune the averages of a run by the same paths, and PyTorch goes on in the middle of one, or of matching
    distributions."""
    config = dataclasses.replace(RESUMED, learn_sigma=False, ema_rate=0.5)
    run(TRAIN, *start_flags(config, images8, tmp_path / "base", 3))
    base = checkpoint_in(tmp_path / "base", 3)
    tuning = ["--consistency", 1, "--path_steps", 4, "--matching_fraction", matching_fraction, "--lr", 1e-3, "--batch_size", 3,
              "--ema_rate", 0.9, "--data_file", images8, "--model_weights", base, "--steps", 6, "--log_every", 1,
              "--threshold", threshold]
    run(TRAIN, *tuning, "--save_every", 2, "--keep", 9, *QUICK, "--out_dir", tmp_path / "run")
    script("train_unet.py", *tuning, "--device", "cpu", "--sample_every", 0, "--out_dir", tmp_path / "python")
    (tmp_path / "resumed").mkdir()
    shutil.copy(checkpoint_in(tmp_path / "run", stop), tmp_path / "resumed")
    output = script("train_unet.py", "--resume", tmp_path / "resumed", "--steps", 6, "--log_every", 1, "--device", "cpu",
                    "--sample_every", 0).stdout
    assert ("then it matches distributions" in output) == (stop < 6 * (1 - matching_fraction) < 6)

    theirs, averages = losses_in(tmp_path / "run"), unet_io.read_checkpoint(str(base)).sections["ema"]
    for folder, first in (("python", 1), ("resumed", stop + 1)):
        ours = losses_in(tmp_path / folder)
        assert sorted(ours) == list(range(first, 7))
        for step, loss in ours.items():
            if step > 6 * (1 - matching_fraction):  # the square of a difference of two networks, which begin as the same
                assert abs(loss**0.5 - theirs[step]**0.5) < 1e-5
            else:
                assert abs(loss / theirs[step] - 1) < 1e-5
    refused(TRAIN, "--generate", "--out_dir", tmp_path / "run", "--sample_steps", 5,
            says=["--sample_steps 5 is more than --consistency_steps 2, in which the model learns to draw"])
    for folder in ("run", "python", "resumed"):
        sections = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / folder, 6))).sections
        assert same_bits(sections["teacher"], averages) and not same_bits(sections["weights"], averages)


def test_newest_paths(tmp_path, images8):
    """Where each step brings new paths, both programs learn from the newest 20 alone, also where a run goes on after more."""
    config = dataclasses.replace(RESUMED, learn_sigma=False, ema_rate=0.5)
    run(TRAIN, *start_flags(config, images8, tmp_path / "base", 3))
    tuning = ["--consistency", 1, "--consistency_steps", 1, "--path_steps", 1, "--lr", 1e-6, "--batch_size", 3,
              "--data_file", images8, "--model_weights", checkpoint_in(tmp_path / "base", 3), "--steps", 28, "--log_every", 1]
    run(TRAIN, *tuning, "--save_every", 25, "--keep", 9, *QUICK, "--out_dir", tmp_path / "run")
    script("train_unet.py", *tuning, "--device", "cpu", "--sample_every", 0, "--out_dir", tmp_path / "python")
    theirs, ours = losses_in(tmp_path / "run"), losses_in(tmp_path / "python")
    assert sorted(ours) == list(range(1, 29))
    assert all(abs(loss / theirs[step] - 1) < 1e-5 for step, loss in ours.items())

    (tmp_path / "resumed").mkdir()
    shutil.copy(checkpoint_in(tmp_path / "run", 25), tmp_path / "resumed")
    run(TRAIN, "--resume", tmp_path / "resumed", "--steps", 28, *QUICK)
    assert state_in(checkpoint_in(tmp_path / "resumed", 28)) == state_in(checkpoint_in(tmp_path / "run", 28))


def test_old_weights(cpp, tmp_path):
    """The old file with garbage in its undefined fields, moments and generator records; and an old .pt."""
    config = Config(image_size=16, attention_resolutions=(4, 2), max_period=1000, batch_size=2)
    weights = np.random.default_rng(0).standard_normal(20494211, np.float32)
    unet_io.write_old_weights(tmp_path / "old.bin", config, weights, weights, weights, batch=2, has_rng=True)
    header = np.fromfile(tmp_path / "old.bin", "<i4", 256)
    assert header[10:].all()
    assert os.path.getsize(tmp_path / "old.bin") == 1024 + 12 * len(weights) + 48 * 2 * 3 * 256
    read = unet_io.read_checkpoint(str(tmp_path / "old.bin"))
    assert same_bits(read.sections["weights"], weights) and read.config.max_period == 1000
    unet_io.write_checkpoint(tmp_path / "new.bin", Checkpoint(read.config, {"weights": train_unet.to_numpy(
        train_unet.load_model(str(tmp_path / "old.bin"))[0].parameters())}))
    result = run(TRAIN, "--generate", "--num_samples", 1, "--model_weights", tmp_path / "old.bin", status=1)
    assert f"generate.py --import {tmp_path / 'old.bin'} --export NEW.bin" in result.stderr
    assert call(generate, "--import", tmp_path / "old.bin", "--export", tmp_path / "out.bin") == ""
    cpp(NETWORK, "--same", tmp_path / "out.bin", tmp_path / "new.bin")
    plain = np.fromfile(tmp_path / "old.bin", np.uint8)[:1024 + 4 * len(weights)]
    plain[:1024].view("<i4")[8:10] = 0
    plain.tofile(tmp_path / "plain.bin")
    assert call(generate, "--model_weights", tmp_path / "plain.bin", "--export", tmp_path / "out.bin") == ""
    cpp(NETWORK, "--same", tmp_path / "out.bin", tmp_path / "new.bin")
    short = plain[:-4]
    short.tofile(tmp_path / "short.bin")
    result = run(TRAIN, "--generate", "--num_samples", 1, "--model_weights", tmp_path / "short.bin", status=1)
    assert "short.bin" in result.stderr and result.stderr.count("\n") == 1
    with pytest.raises(UserError):
        train_unet.load_model(str(tmp_path / "short.bin"))

    model = train_unet.UNet(Config(max_period=1000))
    state = {f"_orig_mod.layer{i}": p.detach() for i, p in enumerate(model.parameters())}
    torch.save(state, tmp_path / "old.pt")
    loaded, _ = train_unet.load_model(str(tmp_path / "old.pt"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters()))
    assert loaded.config.max_period == 1000


@pytest.mark.parametrize("version", [1, 2])
def test_earlier_versions(tmp_path, images8, version):
    """What the program refuses with a command, the command converts: the same file, and so the same run from there.
    """
    folder, config = tmp_path / "run", RESUMED
    if version == 1:  # which knew no classes
        newer = [name for name, index in unet_io.OLD_FIELDS.items() if index >= 107]
        config = Config(**{name: value for name, value in vars(RESUMED).items() if name not in newer})
    run(TRAIN, *start_flags(config, images8, folder, 8, save_every=4, sample_every=0, skip_outliers=8))
    path, last = checkpoint_in(folder, 4), checkpoint_in(folder, 8)
    expected, expected_last = path.read_bytes(), last.read_bytes()
    last.unlink()
    write_earlier_version(path, unet_io.read_checkpoint(str(path)), version)
    for words in (["--resume", folder], ["--generate", "--num_samples", 1, "--model_weights", path],
                  ["--model_weights", path, "--out_dir", tmp_path / "new"]):
        result = run(TRAIN, *words, status=1)
        program, *words = re.search(r"python3 (.*) makes it today's", result.stderr)[1].split()
        assert program == "generate.py" and result.stderr.count("\n") == 1
    same, _ = train_unet.load_model(str(path))
    assert call(generate, *words) == ""
    assert version == 1 or path.read_bytes() == expected
    run(TRAIN, "--resume", folder, *QUICK)
    assert last.read_bytes() == expected_last
    model, _ = train_unet.load_model(str(path))
    assert all(torch.equal(p, q) for p, q in zip(same.parameters(), model.parameters()))


# The fields from 16 on of a file that the program wrote when the format had version 2, and what its flags were.
FIELDS_OF_VERSION_2 = {
    16: 8, 17: 1, 18: 64, 19: 1, 20: 16, 21: 4, 22: 1000, 23: 3, 24: 1056964608, 25: 1, 26: 1069547520, 32: 4, 33: 2,
    40: 500, 41: 1, 42: 2, 48: 6, 49: -294967295, 50: 1, 51: 966609234, 52: 2, 53: 9, 54: 17, 55: 1056964608,
    56: 1061158912, 57: 1063256064, 58: 897988541, 59: 1056964608, 60: 1048576000, 61: 17, 62: 11, 63: 12, 64: 13, 65: 15,
    66: 16, 67: 18, 68: 1, 69: 19, 70: 3, 71: 1084227584, 72: 3, 75: 1048576000, 76: 1040187392, 77: 1031798784,
    78: 1075838976, 79: 1031798784, 80: 1088421888, 90: 1, 91: 1036831949, 92: 0, 93: 2, 94: 3, 106: 14, 107: 1,
    108: 1048576000, 109: 1, 110: 1040187392, 111: 2, 112: 4, 113: 1, 114: 1, 115: 1, 116: 1, 117: 1, 118: 1069547520}
CONFIG_OF_VERSION_2 = Config(
    image_size=8, in_channels=1, num_channels=64, num_res_blocks=1, num_head_channels=16, norm_groups=4, max_period=1000,
    num_heads=2, num_heads_upsample=4, use_scale_shift_norm=True, dropout=0.125, rescale_timesteps=True,
    resblock_updown=True, conv_resample=True, learn_sigma=True, use_new_attention_order=False, class_cond=True,
    num_classes=3, cond_drop_prob=0.25, channel_mult=(0.5, 1, 1.5), attention_resolutions=(4, 2), diffusion_steps=500,
    noise_schedule="cosine", predict="x0", zero_terminal_snr=True, batch_size=6, seed=4000000001, flip=True,
    offset_noise=0.1, lr=0.0003, lr_schedule="linear", final_lr_fraction=0.0625, warmup_steps=9, lr_steps=17,
    weight_decay=0.5, beta1=0.75, beta2=0.875, adam_eps=1e-06, grad_clip=2.5, skip_outliers=7.0,
    ema_rate=(0.5, 0.25, 0.125, 0.0625), min_snr_gamma=5.0)
RUN_OF_VERSION_2 = dict(
    steps=17, log_every=11, save_every=12, keep=13, sample_every=15, val_every=16, num_samples=18, sampler="ddpm",
    sample_steps=19, use_ema=3, microbatch=3, eta=0.0, threshold="none", spacing="karras", keep_every=14,
    guidance_scale=1.5, data_file="here/mine.bin")


@pytest.mark.parametrize("version", [1, 2])
def test_fields_of_earlier_versions(tmp_path, version):
    """Every field of the header is read as what it was; those of version 2 mean nothing in version 1."""
    weights = np.arange(5, dtype="<f4")
    checkpoint = Checkpoint(CONFIG_OF_VERSION_2, {"weights": weights}, 12, 0.25, 3, run=RUN_OF_VERSION_2)
    write_earlier_version(tmp_path / "w.bin", checkpoint, version)
    header = np.fromfile(tmp_path / "w.bin", "<i4", 128)
    fields = {index: value for index, value in FIELDS_OF_VERSION_2.items() if version == 2 or index < 107}
    assert {index: int(header[index]) for index in fields} == fields
    assert np.flatnonzero(header[7:]).tolist() == [index - 7 for index, value in fields.items() if value]
    read = unet_io.read_checkpoint(str(tmp_path / "w.bin"))
    assert (read.step, read.smoothed_loss, read.tensors, read.version) == (12, 0.25, 3, version)
    newer = {name for name, index in unet_io.OLD_FIELDS.items() if index >= 107}
    for name, value in vars(CONFIG_OF_VERSION_2).items():
        expected = value if version == 2 or name not in newer else getattr(Config(), name)
        assert getattr(read.config, name) == expected, name
    assert read.run == {name: value for name, value in RUN_OF_VERSION_2.items() if version == 2 or name not in newer}


EXPORTED = Config(**TOY | dict(predict="v", noise_schedule="cosine", lr=3e-4, seed=2**32 - 1, ema_rate=0.99,
                               attention_resolutions=(), flip=True, beta2=0.99, num_channels=64,
                               channel_mult=(0.5, 1)))


@pytest.mark.parametrize("ending", ["bin", "pt", "safetensors"])
def test_export_import(cpp, tmp_path, ending, images8):
    """Checkpoint -> .bin, .pt, .safetensors -> .bin: the same bits and configuration, raw or averaged."""
    dice = np.random.default_rng(0)
    names = {name: p.shape for name, p in train_unet.UNet(EXPORTED).named_parameters()}
    weights, ema = ([dice.standard_normal(shape, np.float32) for shape in names.values()] for _ in range(2))
    sections = {"weights": weights, "ema": ema, "adam_m": weights, "adam_v": weights}
    unet_io.write_checkpoint(tmp_path / "run.bin", Checkpoint(EXPORTED, sections, 321, run=dict(data_file=images8)))
    source = unet_io.read_checkpoint(str(tmp_path / "run.bin")).config
    for use_ema, expected in ((1, ema), (0, weights)):
        there, back = tmp_path / f"x{use_ema}.{ending}", tmp_path / f"back{use_ema}.bin"
        assert call(generate, "--model_weights", tmp_path / "run.bin", "--export", there,
                    "--use_ema", use_ema) == ""
        assert call(generate, "--import", there, "--export", back) == ""
        found = unet_io.read_checkpoint(str(back))
        assert list(found.sections) == ["weights"] and found.step == 321 and found.config == source
        assert same_bits(found.sections["weights"], np.concatenate([w.ravel() for w in expected]))
        assert os.path.getsize(there) < 1.3 * sum(w.nbytes for w in weights) + 100000
        if ending == "bin":
            continue
        if ending == "pt":  # readable without this repository
            stored = torch.load(there, weights_only=True)
            state, config = stored["state_dict"], stored["config"]
        else:
            with safetensors.safe_open(there, "np") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}
                config = json.loads(file.metadata()["config"])
        assert set(state) == set(names) and config["seed"] == 2**32 - 1 and config["predict"] == "v"
        assert all(same_bits(state[name], value) for name, value in zip(names, expected))
    cpp(NETWORK, "--same", tmp_path / "back0.bin", tmp_path / "run.bin")
    run(TRAIN, "--model_weights", back, "--data_file", images8, "--steps", 0, "--out_dir", tmp_path / "new",
        *QUICK)
    if ending != "bin":  # without --export the .bin lands beside the file, over nothing that is there
        assert call(generate, "--import", there) == "" and same_bits((tmp_path / "x0.bin").read_bytes(),
                                                                     back.read_bytes())
        assert "x0.bin exists already" in call(generate, "--import", there)


def test_flags_of_pictures(tmp_path):
    """What only pictures depend on is refused where weights are written, if it is typed, be it with its default."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    for source, target, flags, says in (
            ("--model_weights", "x.bin", ["--sampler", "heun", "--eta=0"],
             "--export draws no pictures: leave --sampler and --eta out"),
            ("--import", "x.pt", ["--output_filename", "y.png"], "--import draws no pictures: leave --output_name out"),
            ("--model_weights", "x.bin", ["--threshold", "none"], "leave --threshold out"),
            ("--model_weights", "x/", ["--threshold", "none", "--batch_size", 16], "leave --batch_size out")):
        assert says in call(generate, source, tmp_path / "w.bin", "--export", f"{tmp_path}/{target}", *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["w.bin"]
    assert call(generate, "--model_weights", tmp_path / "w.bin", "--export", f"{tmp_path}/x/", "--threshold", "none") == ""


def test_export_refusals(tmp_path):
    """Cut, garbled and foreign files: one sentence each, and nothing written."""
    weights = tmp_path / "w.bin"
    perturbed_file(weights, Config(**TOY))
    for ending in ("pt", "safetensors"):
        assert call(generate, "--model_weights", weights, "--export", tmp_path / f"w.{ending}") == ""
    bad, target = tmp_path / "bad", tmp_path / "out.bin"

    def attempt(path, *says):
        sentence = call(generate, "--import", path, "--export", target)
        assert len(sentence.splitlines()) == 1 and path.name in sentence, sentence
        assert all(text in sentence for text in says) and not target.exists(), sentence

    for ending in ("pt", "safetensors"):
        whole, path = (tmp_path / f"w.{ending}").read_bytes(), bad.with_suffix(f".{ending}")
        attempt(path, "no such file")
        for content in (b"", b"x" * 100, bytes(5000), whole[:7], whole[:len(whole) // 2], whole[:-1]):
            path.write_bytes(content)
            attempt(path)
    stored = torch.load(tmp_path / "w.pt", weights_only=True)
    state, config = stored["state_dict"], stored["config"]

    def variant_of(says, state=state, **changes):
        changed = config | changes
        torch.save(dict(state_dict=state, config=changed), bad.with_suffix(".pt"))
        safetensors.torch.save_file(state, bad.with_suffix(".safetensors"), dict(config=json.dumps(changed)))
        for ending in (".pt", ".safetensors"):
            attempt(bad.with_suffix(ending), *says)

    variant_of(["num_channels"], num_channels=-32)
    variant_of(["configuration"], num_channels="wide")
    variant_of(["configuration"], channel_mult=3)
    variant_of(["configuration"], num_channels=float("inf"))
    variant_of(["predict"], predict="all")
    variant_of(["lr"], lr=float("nan"))
    variant_of(["warp"], warp=3)
    variant_of(["time_embed.0.weight", "(128, 32)"], num_channels=64)
    variant_of(["out.2.bias", "missing"], state={name: state[name] for name in [*state][:-1]})
    variant_of(["extra", "(3,)"], state=state | {"extra": torch.zeros(3)})
    safetensors.torch.save_file(state, bad.with_suffix(".safetensors"))
    attempt(bad.with_suffix(".safetensors"), "configuration", "--norm_groups")
    for name in ("out.txt", "w.bin"):
        sentence = call(generate, "--model_weights", weights, "--export", tmp_path / name)
        assert name in sentence and len(sentence.splitlines()) == 1


@pytest.mark.parametrize("ending", ["bin", "pt", "safetensors", "earlier.bin", "diffusers"])
def test_preset_beside_a_configuration(tmp_path, ending, monkeypatch):
    """Of a file that tells its model --preset may contradict what it says itself, of which no flag was typed; nothing else."""
    own = TOY | dict(norm_groups=8, predict="eps")
    path = tmp_path / f"w.{ending}"
    perturbed_file(tmp_path / "w.bin", Config(**own))
    if ending == "earlier.bin":
        stored = unet_io.read_checkpoint(str(tmp_path / "w.bin"))
        stored.run |= dict(log_every=1, val_every=1, keep=1)
        write_earlier_version(path, stored)
    elif ending != "bin":
        path = tmp_path / "folder" if ending == "diffusers" else path
        export = f"{path}/" if ending == "diffusers" else path
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--export", export) == ""
    monkeypatch.setitem(unet_io.PRESETS, "small32", dict(channel_mult=(1, 2), num_channels=32, lr=3))
    monkeypatch.setitem(unet_io.PRESETS, "unet64", dict(channel_mult=(1, 2), num_channels=64))
    words = ["--import", path, "--export", tmp_path / "out.bin"]
    sentence = call(generate, *words, "--preset", "unet64")
    assert sentence == f"--num_channels 64 (--preset unet64) contradicts {path}, which was made with 32"
    assert call(generate, *words, "--preset", "unet64", "--image_size", 16).startswith("--image_size 16 contradicts")
    assert not (tmp_path / "out.bin").exists()
    assert call(generate, *words, "--preset", "unet64", "--num_channels", 32) == ""
    assert call(generate, *words, "--preset", "small32", "--image_size", 8) == ""


def test_other_things_than_weights(tmp_path, images8):
    """What is missing, a run's folder and images are told for what they are, by generate.py as by train_unet.py."""
    path = tmp_path / "missing.bin"
    for flags in (["--import", path], ["--import", path, "--export", tmp_path / "x.bin"], ["--model_weights", path]):
        assert call(generate, *flags) == f"{path} can't be read: no such file or directory"
    (tmp_path / "run").mkdir()
    for step in (20, 100):
        (tmp_path / f"run/checkpoint_{step:08d}.bin").touch()
    for folder, newest in ((tmp_path / "run", "checkpoint_00000100.bin"), (images8, "")):
        says = f"{folder} is a folder; name a checkpoint in it, such as {newest}" if newest else \
               f"{folder} holds images; weights were expected"
        for flags in (["--model_weights"], ["--export", tmp_path / "x.bin", "--import"]):
            assert call(generate, *flags, folder) == says
        assert call(train_unet, *flags_of(Config(**TOY)), "--data_file", images8, "--out_dir", tmp_path / "new",
                    "--model_weights", folder) == says
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("network", ["UNet", "DiT"])
def test_outputs_keep_other_files(tmp_path, images8, network):
    """No output takes the place of images, of weights that aren't its own kind, or of a checkpoint; they stay as they were."""
    kind = unet_io.import_from_dev("dit/train_dit").Config if network == "DiT" else Config
    held = dict(weights=["weights"], averages=["weights", "ema"], moments=["weights", "adam_m", "adam_v"])
    for name, sections in held.items():
        checkpoint = Checkpoint(kind(), dict.fromkeys(sections, np.ones(9)), tensors=1)
        unet_io.write_checkpoint(tmp_path / f"{name}.bin", checkpoint)
    shutil.copy(images8, tmp_path / "images.bin")
    for moments in (None, np.ones(9)):
        unet_io.write_old_weights(tmp_path / f"old{moments is not None:d}.bin", Config(**TOY), np.ones(9), moments, moments)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    exports = ["images", "averages", "moments", "old1"]
    for module, words, flag, refused_names in (
            (generate, ["--model_weights", tmp_path / "w.bin"], "--export", exports),
            (generate, ["--import", tmp_path / "w.bin"], "--export", exports),
            (train_unet, ["--init_model_only", 1, *flags_of(Config(**TOY))], "--init_model_filename", exports),
            (prepare_data, ["--data_dir", tmp_path / "a.png"], "--output_name", ["weights", "old0", *exports[1:]])):
        for name in refused_names:
            path = tmp_path / f"{name}.bin"
            holds = name if name in ("images", "weights") else "weights" if name == "old0" else "a checkpoint of a run"
            assert call(module, *words, flag, path) == f"{path} holds {holds}; name another file with {flag}"
    for name, data in before.items():
        assert (tmp_path / name).read_bytes() == data
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--export_page", tmp_path / name)
    (tmp_path / "page.html").write_bytes(before["images.bin"])
    assert "page.html holds images; name" in call(generate, "--model_weights", tmp_path / "w.bin", "--export_page",
                                                  tmp_path / "page.html")
    (tmp_path / "index.html").write_text("<!doctype html>mine")
    assert "index.html holds no page of an earlier call; name" in call(generate, "--model_weights", tmp_path / "w.bin",
                                                                       "--export_page", tmp_path / "index.html")
    assert (tmp_path / "index.html").read_text() == "<!doctype html>mine"
    for _ in range(2):
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--export_page", tmp_path / "again.html") == ""
    (tmp_path / "cat.png").write_bytes(before["images.bin"])
    assert "cat.png must end in .bin" in call(train_unet, "--init_model_only", 1, "--init_model_filename", tmp_path / "cat.png",
                                              *flags_of(Config(**TOY)))
    assert (tmp_path / "cat.png").read_bytes() == before["images.bin"]
    for name in ("weights", "old0"):
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--export", tmp_path / f"{name}.bin") == ""
    for name in ("mine.pt", "mine.safetensors", "mine.bin"):
        (tmp_path / name).write_text("mine")
        export = ("--model_weights", tmp_path / "w.bin", "--export", tmp_path / name)
        assert f"{name} holds no weights of an earlier call; name another" in call(generate, *export)
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
        for _ in range(2):
            assert call(generate, *export) == ""
    for _ in range(2):
        assert call(prepare_data, "--data_dir", tmp_path / "a.png", "--output_name", tmp_path / "images.bin") == ""


@pytest.mark.parametrize("network, name", [("UNet", "x.bin"), ("UNet", "x.pt"), ("UNet", "x.safetensors"), ("DiT", "x.pt")])
def test_no_room_for_an_export(tmp_path, network, name):
    """A sentence says that the disk is full, whatever the format, and what was there stays."""
    if network == "UNet":
        perturbed_file(tmp_path / "w.bin", Config(**TOY))
        words = ["generate.py", "--model_weights", tmp_path / "w.bin", "--export"]
    else:
        config = unet_io.import_from_dev("dit/train_dit").Config(image_size=8, depth=1, hidden_size=32, num_heads=2)
        model = unet_io.import_from_dev("dit/train_dit").DiT(config)
        weights = dict(weights=train_unet.to_numpy(model.parameters()))
        unet_io.write_checkpoint(tmp_path / "w.bin", Checkpoint(config, weights, tensors=len(list(model.parameters()))))
        words = ["dev/dit/train_dit.py", "--export", tmp_path / "w.bin", "--output_name"]
    if network == "UNet":
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--export", tmp_path / name) == ""
    else:
        (tmp_path / name).write_text("before")
    before = (tmp_path / name).read_bytes()
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2000, 2000))
    refused(sys.executable, ROOT / words[0], *words[1:], tmp_path / name, says=f"{name} can't be written: File too large",
            preexec_fn=limit)
    assert (tmp_path / name).read_bytes() == before and not list(tmp_path.glob("*.tmp"))


def test_no_folder_of_diffusers_in_a_run(tmp_path):
    """--export FOLDER/ writes nothing among the checkpoints of a run."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "w.bin", tmp_path / "run/checkpoint_00000060.bin")
    for name in ("run", "run/"):
        sentence = call(generate, "--model_weights", tmp_path / "w.bin", "--export", f"{tmp_path}/{name}")
        assert sentence.endswith("holds the checkpoints of a run; name another folder with --export")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint_00000060.bin"]


def test_folders_that_take_no_run(tmp_path, images8, monkeypatch):
    """train_unet.py refuses them before it trains: a file, a folder below one, and one that may not be written into."""
    (tmp_path / "afile").write_text("x")
    (tmp_path / "closed").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *more: not path.endswith("closed") and access(path, *more))
    monkeypatch.setattr(train_unet, "train_from", None)
    for folder, says in (("afile", "afile is a file, a folder is needed"), ("afile/run", "afile is a file, a folder is needed"),
                         ("closed", "the folder {} may not be written into"), ("closed/run", "the folder {} may not be")):
        sentence = call(train_unet, *flags_of(Config(**TOY)), "--data_file", images8, "--out_dir", tmp_path / folder)
        assert says.format(tmp_path / "closed") in sentence, sentence


def test_files_for_the_program(cpp, tmp_path, images8):
    """python3 train_unet.py --init_model_only True: its file starts the program, with the same weights."""
    flags = flags_of(Config(**TOY | dict(seed=6)))
    result = script("train_unet.py", "--init_model_only", "True", *flags, "--device", "cpu", cwd=tmp_path)
    assert "./train_unet --model_weights unet_init.bin" in result.stdout
    run(TRAIN, "--model_weights", tmp_path / "unet_init.bin", "--data_file", images8, "--steps", 0,
        "--out_dir", tmp_path / "run", *QUICK)
    cpp(NETWORK, "--same", tmp_path / "unet_init.bin", checkpoint_in(tmp_path / "run", 0))
    run(TRAIN, *flags, "--data_file", images8, "--steps", 0, "--out_dir", tmp_path / "own", *QUICK)
    cpp(NETWORK, "--same", tmp_path / "unet_init.bin", checkpoint_in(tmp_path / "own", 0))


@pytest.mark.parametrize("kind, size, factor", [("uint8", 8, 1), ("float32", 8, 1), ("uint8", 64, 2),
                                                ("float32", 16, 2), ("uint8", 24, 3), ("uint8", 32, 8)])
def test_images(cpp, tmp_path, kind, size, factor):
    """Pixels in = pixels out, box-filtered to 1/factor of the size, upright and mirrored, bit for bit."""
    pixels = np.random.default_rng(size).integers(0, 256, (5, 3, size, size), np.uint8)
    values = pixels.astype(np.float32)
    if kind == "uint8":
        labels = [f"class {i % 2}" for i in range(5)] if factor == 1 else None
        unet_io.write_images(tmp_path / "x.bin", pixels, labels)
    else:
        values = values / np.float32(127.5) - np.float32(1)
        unet_io.write_old_images(tmp_path / "x.bin", values)
    images = unet_io.read_images(str(tmp_path / "x.bin"))
    assert same_bits(images.pixels, pixels if kind == "uint8" else values)
    small = np.zeros((5, 3, size // factor, size // factor), np.float32)
    for y in range(factor):  # row by row, in float32
        for x in range(factor):
            small += values[..., y::factor, x::factor]
    small = (small / np.float32(127.5 * factor**2) - np.float32(1) if kind == "uint8"
             else small / np.float32(factor**2))
    assert same_bits(images.floats(range(5), size // factor), small)
    if kind == "uint8" and factor == 1:
        assert same_bits(unet_io.to_uint8(small), pixels) and images.class_names == ("class 0", "class 1")
        assert images.labels.tolist() == [0, 1, 0, 1, 0]
    name = f"images {kind} {size} by {factor}"
    expected = {f"{name}/upright": small, f"{name}/mirrored": small[..., ::-1]}
    unet_io.write_tensors(tmp_path / "t.bin", expected)
    cpp(NETWORK, "--images", tmp_path / "x.bin", size // factor, tmp_path / "t.bin")


def mutated_files(folder):
    """(a good image file, a good checkpoint) for the Python readers."""
    pixels = np.random.default_rng(1).integers(0, 256, (9, 3, 4, 4), np.uint8)
    unet_io.write_images(folder / "images.bin", pixels, [f"c{i % 3}" for i in range(9)])
    config = Config(**SMALL)
    weights = train_unet.to_numpy(train_unet.UNet(config).parameters())
    sections = {"weights": weights, "state": unet_io.History()}
    unet_io.write_checkpoint(folder / "weights.bin", Checkpoint(config, sections, run=dict(data_file="x.bin")))
    return (folder / "images.bin", 9, unet_io.read_images), (folder / "weights.bin", 2, train_unet.load_model)


def test_damaged_files_in_python(tmp_path):
    """The Python readers: header fields corrupted in turn, files cut short: a UserError or an answer."""
    dice = np.random.default_rng(3)
    for path, field, read in mutated_files(tmp_path):
        good = path.read_bytes()
        header, data = np.frombuffer(good[:1024], "<i4"), good[1024:]
        data_crc, target = zlib.crc32(data), tmp_path / "bad.bin"
        outcomes = {"read": 0, "refused": 0}

        def attempt(content, must_fail):
            target.write_bytes(content)
            try:
                read(str(target))
                assert not must_fail
                outcomes["read"] += 1
            except UserError as error:
                assert len(str(error).splitlines()) == 1
                outcomes["refused"] += 1

        for index in [*range(82), *range(128, 152)]:
            for value in (0, -1, 2**31 - 1, int(header[index]) + 1, int(dice.integers(-2**31, 2**31))):
                bad = header.copy()
                bad[index] = np.int64(value).astype(np.int32)
                if value == header[index] + 1 or index == field:
                    attempt(bad.tobytes() + data, bad[index] != header[index])
                if index != field:  # and with a checksum that is right
                    bad[field] = 0
                    bad[field] = np.uint32(zlib.crc32(bad.tobytes(), data_crc)).view(np.int32)
                    attempt(bad.tobytes() + data, False)
        settings = data.find(b"adam_eps = ")  # of a checkpoint the section config
        for place in range(settings, len(data) if settings >= 0 else 0):
            changed = data[:place] + dice.choice([b"0", b"9", b"-", b" ", b"\n", b"x", b"\xFF"]) + data[place + 1:]
            bad = header.copy()
            bad[field] = 0
            bad[field] = np.uint32(zlib.crc32(bad.tobytes(), zlib.crc32(changed))).view(np.int32)
            attempt(bad.tobytes() + changed, False)
        for length in [*range(0, 1100, 50), *range(4096, len(good), 65536), len(good) - 1]:
            if length < len(good):
                attempt(good[:length], True)
        print(path.name, outcomes)
        assert outcomes["refused"] > 150 and outcomes["read"] > 20


def test_short_files_of_another_kind(tmp_path):
    """What a file does not hold is said before its length, which is told of our own files alone."""
    for name, content in (("x.png", b"\x89PNG" + bytes(395)), ("empty.bin", b"")):
        (tmp_path / name).write_bytes(content)
        for read, says in ((unet_io.read_images, "holds no images"), (unet_io.read_checkpoint, "holds no weights"),
                           (unet_io.read_tensors, "is no tensor file")):
            with pytest.raises(UserError, match=f"{name} {says}"):
                read(tmp_path / name)
    (tmp_path / "cut.bin").write_bytes(unet_io.IMAGES_MAGIC.to_bytes(4, "little") + bytes(396))
    with pytest.raises(UserError, match="only 400 bytes long, shorter than a header of 1024"):
        unet_io.read_images(tmp_path / "cut.bin")
