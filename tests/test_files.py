"""Files, there and back: checkpoints, old weights, exports, images, damaged ones."""
import json
import os
import shutil
import zlib

import numpy as np
import pytest
import safetensors.torch
import torch

import generate
import train_unet
import unet_io
from harness import (
    QUICK, RESUMED, SMALL, TEST, TOY, TRAIN, call, checkpoint_in, losses_in, perturbed_file, run,
    same_bits, script, start_flags)
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
    assert first.sections["data_file"] == first.sections["val_file"] == images8
    model, _ = train_unet.load_model(str(path), use_ema=False)
    trainer = train_unet.Trainer(model, unet_io.read_images(images8), first.config)
    trainer.restore(first, str(path))
    texts = {name: first.sections[name] for name in unet_io.TEXT_SECTIONS if name in first.sections}
    unet_io.write_checkpoint(tmp_path / "again.bin", trainer.checkpoint(first.smoothed_loss, **texts))
    second = unet_io.read_checkpoint(str(tmp_path / "again.bin"))
    assert list(second.sections) == list(first.sections) and second.config == first.config
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
    checkpoint_in(tmp_path / "run", 6).unlink()
    script("train_unet.py", "--resume", tmp_path / "run", "--out_dir", tmp_path / "python", "--steps", 6,
           "--log_every", 1, "--device", "cpu", "--sample_every", 0)
    theirs, ours = losses_in(tmp_path / "run"), losses_in(tmp_path / "python")
    assert sorted(ours) == [4, 5, 6]
    for step, loss in ours.items():
        assert abs(loss / theirs[step] - 1) < 1e-5


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
    result = run(TRAIN, "--generate", 1, "--model_weights", tmp_path / "old.bin", status=1)
    assert f"generate.py --model_filename {tmp_path / 'old.bin'} --export NEW.bin" in result.stderr
    assert call(generate, "--model_filename", tmp_path / "old.bin", "--export", tmp_path / "out.bin") == ""
    cpp(TEST, "--same", tmp_path / "out.bin", tmp_path / "new.bin")
    plain = np.fromfile(tmp_path / "old.bin", np.uint8)[:1024 + 4 * len(weights)]
    plain[:1024].view("<i4")[8:10] = 0
    plain.tofile(tmp_path / "plain.bin")
    assert call(generate, "--model_filename", tmp_path / "plain.bin", "--export", tmp_path / "out.bin") == ""
    cpp(TEST, "--same", tmp_path / "out.bin", tmp_path / "new.bin")
    short = plain[:-4]
    short.tofile(tmp_path / "short.bin")
    result = run(TRAIN, "--generate", 1, "--model_weights", tmp_path / "short.bin", status=1)
    assert "short.bin" in result.stderr and result.stderr.count("\n") == 1
    with pytest.raises(UserError):
        train_unet.load_model(str(tmp_path / "short.bin"))

    model = train_unet.UNet(Config(max_period=1000))
    state = {f"_orig_mod.layer{i}": p.detach() for i, p in enumerate(model.parameters())}
    torch.save(state, tmp_path / "old.pt")
    loaded, _ = train_unet.load_model(str(tmp_path / "old.pt"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters()))
    assert loaded.config.max_period == 1000


EXPORTED = Config(**TOY | dict(predict="v", noise_schedule="cosine", lr=3e-4, seed=2**32 - 1, ema_rate=0.99,
                               attention_resolutions=(), flip=True, beta2=0.99, num_channels=64,
                               channel_mult=(0.5, 1)))


@pytest.mark.parametrize("ending", ["bin", "pt", "safetensors"])
def test_export_import(cpp, tmp_path, ending, images8):
    """Checkpoint -> .bin, .pt, .safetensors -> .bin: the same bits and configuration, raw or averaged."""
    dice = np.random.default_rng(0)
    names = {name: p.shape for name, p in train_unet.UNet(EXPORTED).named_parameters()}
    weights, ema = ([dice.standard_normal(shape, np.float32) for shape in names.values()] for _ in range(2))
    sections = {"weights": weights, "ema": ema, "adam_m": weights, "adam_v": weights, "data_file": images8}
    unet_io.write_checkpoint(tmp_path / "run.bin", Checkpoint(EXPORTED, sections, 321))
    source = unet_io.read_checkpoint(str(tmp_path / "run.bin")).config
    for use_ema, expected in ((1, ema), (0, weights)):
        there, back = tmp_path / f"x{use_ema}.{ending}", tmp_path / f"back{use_ema}.bin"
        assert call(generate, "--model_filename", tmp_path / "run.bin", "--export", there,
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
    cpp(TEST, "--same", tmp_path / "back0.bin", tmp_path / "run.bin")
    run(TRAIN, "--model_weights", back, "--data_file", images8, "--steps", 0, "--out_dir", tmp_path / "new",
        *QUICK)
    if ending != "bin":  # without --export the .bin lands beside the file, over nothing that is there
        assert call(generate, "--import", there) == "" and same_bits((tmp_path / "x0.bin").read_bytes(),
                                                                     back.read_bytes())
        assert "x0.bin exists already" in call(generate, "--import", there)


def test_export_refusals(tmp_path):
    """Cut, garbled and foreign files: one sentence each, and nothing written."""
    weights = tmp_path / "w.bin"
    perturbed_file(weights, Config(**TOY))
    for ending in ("pt", "safetensors"):
        assert call(generate, "--model_filename", weights, "--export", tmp_path / f"w.{ending}") == ""
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
        sentence = call(generate, "--model_filename", weights, "--export", tmp_path / name)
        assert name in sentence and len(sentence.splitlines()) == 1


def test_files_for_the_program(cpp, tmp_path, images8):
    """python train_unet.py --init_model_only True: its file starts the program, with the same weights."""
    flags = flags_of(Config(**TOY | dict(seed=6)))
    result = script("train_unet.py", "--init_model_only", "True", *flags, "--device", "cpu", cwd=tmp_path)
    assert "./train_unet --model_weights unet_init.bin" in result.stdout
    run(TRAIN, "--model_weights", tmp_path / "unet_init.bin", "--data_file", images8, "--steps", 0,
        "--out_dir", tmp_path / "run", *QUICK)
    cpp(TEST, "--same", tmp_path / "unet_init.bin", checkpoint_in(tmp_path / "run", 0))
    run(TRAIN, *flags, "--data_file", images8, "--steps", 0, "--out_dir", tmp_path / "own", *QUICK)
    cpp(TEST, "--same", tmp_path / "unet_init.bin", checkpoint_in(tmp_path / "own", 0))


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
    cpp(TEST, "--images", tmp_path / "x.bin", size // factor, tmp_path / "t.bin")


def mutated_files(folder):
    """(a good image file, a good checkpoint) for the Python readers."""
    pixels = np.random.default_rng(1).integers(0, 256, (9, 3, 4, 4), np.uint8)
    unet_io.write_images(folder / "images.bin", pixels, [f"c{i % 3}" for i in range(9)])
    config = Config(**SMALL)
    weights = train_unet.to_numpy(train_unet.UNet(config).parameters())
    sections = {"weights": weights, "state": unet_io.History(), "data_file": "x.bin"}
    unet_io.write_checkpoint(folder / "weights.bin", Checkpoint(config, sections))
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
        for length in [*range(0, 1100, 50), *range(4096, len(good), 65536), len(good) - 1]:
            if length < len(good):
                attempt(good[:length], True)
        print(path.name, outcomes)
        assert outcomes["refused"] > 150 and outcomes["read"] > 20
