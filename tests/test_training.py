"""Training steps against PyTorch: losses, decay, clipping, schedules, parts of a batch, validation."""
import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train_unet
import unet_io
from harness import (
    QUICK, RESUMED_FLAGS, ROOT, TOY, TRAIN, TRAINING, call, checkpoint_in, error_of, losses_in, metrics_in, perturbed_file,
    run, same_bits, start_flags, write_toy_images)
from unet_io import Config, flags_of


@pytest.mark.parametrize("name", TRAINING)
def test_training(tmp_path, name):
    """20 optimiser steps from the same seed: the same losses to 1e-5, the same weights, the same average."""
    config, steps = TRAINING[name], 20
    data = str(ROOT / "data/faces.bin")
    if config.class_cond or config.in_channels != 3:
        data = write_toy_images(tmp_path / "toy.bin", size=config.image_size, channels=config.in_channels)
    model = perturbed_file(tmp_path / "start.bin", config)

    def flat_of(tensors):
        ordered = train_unet.file_order(model, [tensor.detach() for tensor in tensors])
        return np.concatenate([p.ravel() for p in train_unet.to_numpy(ordered)])

    start = flat_of(model.parameters())
    run(TRAIN, *flags_of(config), "--model_weights", tmp_path / "start.bin", "--data_file", data,
        "--steps", steps, "--log_every", 1, "--out_dir", tmp_path / "run", *QUICK)
    theirs = np.array([losses_in(tmp_path / "run")[step] for step in range(1, steps + 1)])

    trainer = train_unet.Trainer(model, unet_io.read_images(data), config)
    ours = np.array([trainer.step() for _ in range(steps)])
    matched = np.arange(steps) >= unet_io.steps_on_paths(config)
    worst = np.abs(theirs[~matched] / ours[~matched] - 1).max()
    print(f"losses {ours[0]:.4f} ... {ours[-1]:.4f}, largest relative difference {worst:.2g}")
    assert worst < 1e-5
    assert len({f"{loss:.6g}" for loss in ours}) == steps
    if config.matching_fraction:  # the loss is the square of a difference of two networks, which begin as the same
        apart = np.abs(np.sqrt(theirs) - np.sqrt(ours))[matched]
        print(f"roots of losses to {np.sqrt(ours[-1]):.4f}, {apart.max():.2g} apart")
        assert apart.max() < 1e-5 and np.sqrt(ours[-1]) > 0.01

    # Adam moves an element whose gradient is rounding noise by a full step in a random direction, so the
    # weights are compared by how far they went together, not one by one
    file = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", steps)))
    sections = {"weights": trainer.parameters} | dict(zip(unet_io.EMA_SECTIONS, trainer.emas))
    texts = {"data_checksum"} | ({"class_names"} if config.class_cond else set())
    if config.path_steps:
        assert same_bits(file.sections["teacher"], start)
    others = {"teacher"} if config.path_steps else set()
    if config.matching_fraction:
        sections["fake"] = list(trainer.fake.parameters())
        others |= {"fake_m", "fake_v"}
    assert set(file.sections) == {*sections, "adam_m", "adam_v", "state"} | others | texts
    for section, tensors in sections.items():
        flat = flat_of(tensors)
        away = np.linalg.norm(file.sections[section] - flat) / np.linalg.norm(flat - start)
        print(f"{section}: {away:.2g} of the way apart")
        assert away < 2e-3
    assert file.step == steps and file.config.seed == config.seed


def test_time_of_lessons(tmp_path, images8):
    """The time that is left is told up to where steps begin to take longer, and --dry_run counts both kinds; a run that learns
    paths alone learns them as long as it goes on."""
    config = Config(**TOY | dict(predict="v", ema_rate=0, consistency=True, path_steps=4, matching_fraction=0.25, batch_size=4))
    perturbed_file(tmp_path / "start.bin", config)
    words = [*start_flags(config, images8, tmp_path / "run", 8), "--model_weights", tmp_path / "start.bin", "--log_every", 1]
    ends = re.findall(r"^step (\d+)/8 .* ETA [^|]*?(?: to step (\d+))?$", run(TRAIN, *words).stdout, re.M)
    assert ends == [(str(step), "6" if step <= 6 else "") for step in range(1, 9)]

    text = run(TRAIN, *words, "--steps", 10**7, "--dry_run").stdout
    paths = float(re.search(r"^one training step: ([\d.]+) ms", text, re.M)[1])
    matching = float(re.search(r"^one that matches distributions: ([\d.]+) ms$", text, re.M)[1])
    hours, minutes = map(int, re.search(r"^10000000 steps: (\d+)h (\d+)m,", text, re.M).groups())
    assert abs((hours + minutes / 60) / ((0.75 * paths + 0.25 * matching) * 1e4 / 3600) - 1) < 0.05

    alone = [*words, "--matching_fraction", 0, "--out_dir", tmp_path / "alone"]
    text = run(TRAIN, *alone).stdout + run(TRAIN, "--resume", tmp_path / "alone", "--steps", 12).stdout
    assert len(re.findall(r"^step \d+/(?:8|12) .* ETA [^|]*s$", text, re.M)) == 12
    assert "matches" not in run(TRAIN, *alone, "--dry_run").stdout


def test_paths_have_no_noise_but_their_own(tmp_path, images8):
    """What --eta and --offset_noise add elsewhere: the network learns the same with them."""
    config = Config(**TOY | dict(noise_schedule="flow", predict="flow", consistency=True, path_steps=2, matching_fraction=0.5,
                                 batch_size=4))
    perturbed_file(tmp_path / "start.bin", config)
    sections = []
    for name, more in (("plain", ()), ("more", ("--sampler", "ddim", "--eta", 1, "--offset_noise", 1))):
        run(TRAIN, *start_flags(config, images8, tmp_path / name, 4), "--model_weights", tmp_path / "start.bin", *more)
        sections.append(unet_io.read_checkpoint(str(checkpoint_in(tmp_path / name, 4))).sections)
    for section in ("weights", "fake"):
        assert np.array_equal(*(each[section] for each in sections))


def one_step(folder, model, config, images):
    """The checkpoint of one step from these weights, and the line of metrics.jsonl."""
    run(TRAIN, *start_flags(config, images, folder, 1, model_weights=model))
    return (unet_io.read_checkpoint(str(checkpoint_in(folder, 1))),
            json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]))


def test_decay_of_matrices_only(tmp_path, images8):
    """A step with decay differs by lr * decay * w in matrices and convolutions, and by no bit elsewhere."""
    config = Config(**TOY | dict(lr=1e-3))
    model = perturbed_file(tmp_path / "w.bin", config)
    plain, _ = one_step(tmp_path / "a", tmp_path / "w.bin", config, images8)
    config.weight_decay = 100.0
    decayed, _ = one_step(tmp_path / "b", tmp_path / "w.bin", config, images8)
    at, kinds = 0, {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        a, b = (file.sections["weights"][at:at + parameter.numel()] for file in (decayed, plain))
        at += parameter.numel()
        kinds[parameter.ndim > 1] += 1
        if parameter.ndim > 1:
            assert error_of(b - a, 0.1 * parameter.detach().numpy().ravel()) < 1e-4, name
        else:
            assert same_bits(a, b), name
    assert at == len(decayed.sections["weights"]) and min(kinds.values()) > 10


def test_clipping(tmp_path, images8):
    """A gradient longer than --grad_clip is scaled to it; the logged norm is that before."""
    config = Config(**TOY | dict(lr=1e-3))
    perturbed_file(tmp_path / "w.bin", config)
    moments, norms = {}, {}
    free, line = one_step(tmp_path / "free", tmp_path / "w.bin", config, images8)
    for part in (0.5, 2):
        clipped = dataclasses.replace(config, grad_clip=part * line["grad_norm"])
        file, logged = one_step(tmp_path / f"clip{part}", tmp_path / "w.bin", clipped, images8)
        moments[part], norms[part] = file.sections["adam_m"], logged["grad_norm"]
    assert norms[0.5] == norms[2] == line["grad_norm"] and same_bits(moments[2], free.sections["adam_m"])
    assert error_of(moments[0.5], 0.5 * free.sections["adam_m"]) < 1e-5
    assert abs(np.linalg.norm(free.sections["adam_m"].astype(float)) / 0.1 / line["grad_norm"] - 1) < 1e-5


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_schedules(schedule, warmup):
    """The learning rates are those of torch.optim.lr_scheduler."""
    config = Config(lr=3e-4, lr_schedule=schedule, warmup_steps=warmup, lr_steps=40, final_lr_fraction=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.lr)
    schedulers, span = torch.optim.lr_scheduler, 40 - warmup
    after = {"constant": schedulers.ConstantLR(optimizer, 1.0),
             "cosine": schedulers.CosineAnnealingLR(optimizer, span, eta_min=0.1 * config.lr),
             "linear": schedulers.LinearLR(optimizer, 1.0, 0.1, span)}[schedule]
    if warmup:
        rising = schedulers.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        after = schedulers.SequentialLR(optimizer, [rising, after], [warmup])
    for step in range(41):
        assert abs(unet_io.learning_rate(config, step) / optimizer.param_groups[0]["lr"] - 1) < 1e-9, step
        optimizer.step()
        after.step()
    end = config.lr * (1 if schedule == "constant" else 0.1)
    assert abs(unet_io.learning_rate(config, 1000) / end - 1) < 1e-9


def test_no_outliers_while_distributions_are_matched(tmp_path, images8):
    """The losses of paths say nothing of the steps that match distributions: none of these is skipped, here and in PyTorch."""
    steps = 80
    config = Config(**TOY | dict(predict="v", consistency=True, path_steps=2, matching_fraction=0.5, skip_outliers=0.1,
                                 batch_size=2, lr=1e-5, lr_steps=steps))
    model = perturbed_file(tmp_path / "w.bin", config)
    run(TRAIN, *start_flags(config, images8, tmp_path / "run", steps, log_every=1, sample_every=0,
                            model_weights=tmp_path / "w.bin"))
    ours = [json.loads(line)["skipped"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trainer, theirs = train_unet.Trainer(model, unet_io.read_images(images8), config), []
    for _ in range(steps):
        trainer.step()
        theirs.append(trainer.history.skipped)
    for counts in (ours, theirs):
        assert len(counts) == steps and counts[31] == 0 < counts[39] == counts[-1], counts


SKIPPING = Config(**TOY | dict(lr=1e-5, batch_size=2, seed=7, skip_outliers=1.0, ema_rate=(0.9, 0.99)))


def test_skipped_outliers(tmp_path, images8):
    """The steps whose loss or norm is an outlier are skipped, the same as in PyTorch; the others are done."""
    steps = 48
    model = perturbed_file(tmp_path / "w.bin", SKIPPING)
    run(TRAIN, *start_flags(SKIPPING, images8, tmp_path / "run", steps, log_every=1, save_every=1, keep=99,
                            sample_every=0, model_weights=tmp_path / "w.bin"))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trainer, counts = train_unet.Trainer(model, unet_io.read_images(images8), SKIPPING), []
    for line in lines:
        assert abs(line["loss"] / trainer.step() - 1) < 1e-5
        counts.append(trainer.history.skipped)
    assert [line["skipped"] for line in lines] == counts
    assert counts[31] == 0 and 2 <= counts[-1] <= 12, counts  # none before 32 steps have been seen
    # and by the rule, written another way: windows of the losses and norms that were let through
    accepted = [line for line, before, now in zip(lines, [0, *counts], counts) if now == before]
    for line, before, now in zip(lines, [0, *counts], counts):
        past = [other for other in accepted if other["step"] < line["step"]][-128:]
        scores = [0]
        for key in ("loss", "grad_norm") if len(past) >= 32 else ():
            window = [other[key] for other in past]
            scores.append((line[key] - np.mean(window)) / np.std(window, ddof=1))
        assert (max(scores) > 1) == (now > before), line
    files = {n: unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", n))) for n in range(32, 49)}
    for n in range(33, steps + 1):  # nothing changes in a skipped step, all of it in another
        for name in ("weights", "ema", "ema_2", "adam_m", "adam_v"):
            same = same_bits(files[n].sections[name], files[n - 1].sections[name])
            assert same == (counts[n - 1] > counts[n - 2]), (n, name)
    # the moments' corrections and the averages' warm-up go by updates
    for name, tensors in zip(("weights", "ema", "ema_2"), (trainer.parameters, *trainer.emas)):
        flat = np.concatenate([p.ravel() for p in train_unet.to_numpy(tensors)])
        away = np.linalg.norm(files[steps].sections[name] - flat)
        assert away < 2e-3 * np.linalg.norm(flat - files[32].sections[name]), name


@pytest.mark.parametrize("loss, power, what", [(math.inf, 1, "the loss"), (math.nan, 1, "the loss"), (1.0, 0.5, "a gradient")])
def test_update_that_is_not_finite(images8, capsys, loss, power, what):
    """A step without a finite loss and gradient changes neither weights nor averages, and a checkpoint after it is read."""
    config = Config(**TOY)
    model = train_unet.init_weights(train_unet.UNet(config), config.seed)
    trainer = train_unet.Trainer(model, unet_io.read_images(images8), config)
    trainer.step()
    before = [p.clone() for p in [*trainer.parameters, *trainer.emas[0]]]

    def broken_loss(*batch):
        weights = trainer.parameters[0].sum()
        return loss + (weights - weights.detach()) ** power  # of 0, where the slope of a root is infinite

    trainer.loss = broken_loss
    assert np.array_equal(trainer.step(), loss, equal_nan=True)
    assert f"step 2: {what} is not finite, the update is skipped" in capsys.readouterr().err
    assert all(torch.equal(old, now) for old, now in zip(before, [*trainer.parameters, *trainer.emas[0]]))
    history = unet_io.History.unpack(trainer.history.pack(), trainer.steps_done, "checkpoint.bin")
    assert (history.skipped, history.seen) == (1, 1)


@pytest.mark.parametrize("microbatch", [2, 9])
def test_microbatch(tmp_path, images8, microbatch):
    """A batch of 5 in parts trains as at once and as in PyTorch: losses, norms, quartiles, validation."""
    more = dict(batch_size=5, min_snr_gamma=5.0, lr_steps=12, ema_rate=0.0)
    config, steps = Config(**RESUMED_FLAGS | more), 12
    model, images = perturbed_file(tmp_path / "start.bin", config), unet_io.read_images(images8)
    memory, logs, val_losses = [], [], []
    for parts in (0, microbatch):
        folder = tmp_path / str(parts)
        text = run(TRAIN, *start_flags(config, images8, folder, steps, log_every=1, val_file=images8),
                   "--model_weights", tmp_path / "start.bin", "--microbatch", parts).stdout
        size, unit = re.search(r"([\d.]+) ([kM])B activations", text).groups()
        memory.append(float(size) * dict(k=1e3, M=1e6)[unit])
        logs.append(metrics_in(folder))
        val_losses.append(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"])
    assert memory[1] < memory[0] if microbatch < 5 else memory[1] == memory[0]
    trainer = train_unet.Trainer(model, images, config)
    theirs = [trainer.step() for _ in range(steps)], [trainer.validation_loss(images)]
    for log, val_loss in zip(logs, val_losses):
        ours = [line["loss"] for line in log], [val_loss]
        worst = [np.abs(np.array(a) / b - 1).max() for a, b in zip(ours, theirs)]
        assert all(value < 1e-5 for value in worst), worst
    for whole, parts in zip(*logs):
        assert abs(parts["grad_norm"] / whole["grad_norm"] - 1) < 1e-5
        for a, b in zip(whole["loss_quartiles"], parts["loss_quartiles"]):
            assert a == b is None or abs(b / a - 1) < 1e-5


def test_loss_quartiles(tmp_path, images8):
    """The loss by quartile of the timesteps since the last line: unweighted, null where there were none."""
    config = Config(**TOY | dict(batch_size=2, seed=3, lr=0.0, min_snr_gamma=1.0, diffusion_steps=30))
    model, images = perturbed_file(tmp_path / "start.bin", config), unet_io.read_images(images8)
    run(TRAIN, *flags_of(config), "--model_weights", tmp_path / "start.bin", "--data_file", images8,
        "--steps", 9, "--log_every", 3, "--out_dir", tmp_path / "run", *QUICK)
    errors, quartiles = [], []
    for step in range(9):
        x0, t, noise, _ = train_unet.make_batch(images, config, step)
        x, target = train_unet.Diffusion(config).noised(*map(torch.from_numpy, (x0, t, noise)))
        with torch.no_grad():
            errors.append((model(x, torch.from_numpy(t)) - target).square().mean((1, 2, 3)).double().numpy())
        quartiles.append(4 * t // config.diffusion_steps)
    lines, found = metrics_in(tmp_path / "run"), []
    assert [line["step"] for line in lines] == [1, 3, 6, 9]
    for first, last, line in zip((0, 1, 3, 6), (1, 3, 6, 9), lines):
        error, quartile = np.concatenate(errors[first:last]), np.concatenate(quartiles[first:last])
        for q, value in enumerate(line["loss_quartiles"]):
            assert (value is None) == (not (quartile == q).any())
            if value is not None:
                found.append(abs(value / error[quartile == q].mean() - 1))
    assert np.max(found) < 1e-5 and 8 < len(found) < 16


def test_throughput(tmp_path, images8):
    """The log's TFLOP/s are PyTorch's count of the operations, a step's time apart; its memory the plan's."""
    config = Config(**TOY | dict(image_size=16, batch_size=3))
    data = write_toy_images(tmp_path / "toy16.bin", size=16)
    text = run(TRAIN, *start_flags(config, data, tmp_path / "run", 3, log_every=1, microbatch=2)).stdout
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        x, t = torch.empty(1, 3, 16, 16), torch.zeros(1, dtype=torch.long)
        train_unet.UNet(config)(x, t).sum().backward()
    for line in metrics_in(tmp_path / "run"):
        flops = line["tflops"] * 1e12 * line["ms"] * 1e-3 / config.batch_size
        assert abs(flops / counter.get_total_flops() - 1) < 2e-3 and "mfu" not in line
        assert f"{1000 * line['memory_gb']:.1f} MB in all" in text


def test_validation_loss(tmp_path, images8):
    config = Config(**TOY | dict(ema_rate=0.0, batch_size=3, seed=2, min_snr_gamma=2.0,
                                 offset_noise=0.5))  # which is for training alone
    held_out = write_toy_images(tmp_path / "val.bin", n=7, seed=9)
    model = perturbed_file(tmp_path / "start.bin", config)
    run(TRAIN, *flags_of(config), "--model_weights", tmp_path / "start.bin", "--data_file", images8,
        "--val_file", held_out, "--steps", 3, "--val_every", 3, "--out_dir", tmp_path / "run", *QUICK)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    theirs = [json.loads(line)["val_loss"] for line in lines if "val_loss" in line]
    trainer = train_unet.Trainer(model, unet_io.read_images(images8), config)
    for _ in range(3):
        trainer.step()
    ours = trainer.validation_loss(unet_io.read_images(held_out))
    assert len(theirs) == 1 and abs(theirs[0] / ours - 1) < 1e-5


def test_validation_of_averages(tmp_path, images8):
    """Both programs validate the averaged weights, and train on with the others."""
    config = Config(**TOY | dict(ema_rate=0.5, batch_size=3, lr=1e-2, lr_steps=3))
    held_out = write_toy_images(tmp_path / "val.bin", n=7, seed=9)
    model = perturbed_file(tmp_path / "start.bin", config)
    flags = [*flags_of(config), "--model_weights", tmp_path / "start.bin", "--data_file", images8, "--val_file", held_out,
             "--steps", 3, "--save_every", 1, "--log_every", 1]
    run(TRAIN, *flags, "--val_every", 1, "--out_dir", tmp_path / "ours", *QUICK)
    assert call(train_unet, *flags, "--sample_every", 0, "--device", "cpu", "--out_dir", tmp_path / "theirs") == ""
    found = {}
    for name in ("ours", "theirs"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found[name] = [[row[key] for row in rows if key in row] for key in ("val_loss", "loss")]
    assert [len(values) for values in found["ours"]] == [len(values) for values in found["theirs"]] == [3, 3]
    assert np.allclose(found["ours"], found["theirs"], rtol=1e-4)
    raw = train_unet.Trainer(model, unet_io.read_images(images8), config)
    for _ in range(3):
        raw.step()
    assert abs(raw.validation_loss(unet_io.read_images(held_out)) / found["ours"][0][-1] - 1) > 1e-3
