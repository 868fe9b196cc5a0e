"""Resuming, being stopped and being killed: nothing is lost, and the bits are the same."""
import dataclasses
import json
import os
import pathlib
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

import generate
import train_unet
import unet_io
from harness import (
    LONG, QUICK, RESUMED, ROOT, SMALL, TOY, TRAIN, another, call, checkpoint_in, effective, fill, finish, is_delivered,
    losses_in, perturbed_file, read_until, refused, run, same_bits, script, settings, start_flags, started, state_in,
    stored_flags, wait_until)
from unet_io import Config, flags_of


@pytest.mark.parametrize("more", [{}, dict(microbatch=2, min_snr_gamma=5)])
def test_resume(tmp_path, images8, more):
    """10 steps + 10 steps after a restart = 20 steps: the whole checkpoint, bit for bit."""
    flags = dict(save_every=10, sample_every=0, log_every=1) | more
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "whole", 20, **flags))
    (tmp_path / "parts").mkdir()
    shutil.copy(checkpoint_in(tmp_path / "whole", 10), tmp_path / "parts")
    result = run(TRAIN, "--resume", tmp_path / "parts")  # no flag has to be typed again
    assert "resumed at step 10" in result.stdout
    expected, found = (checkpoint_in(tmp_path / name, 20).read_bytes() for name in ("whole", "parts"))
    assert found == expected
    losses = losses_in(tmp_path / "parts")
    assert losses == {step: loss for step, loss in losses_in(tmp_path / "whole").items() if step > 10}


def test_resume_with_everything(tmp_path, images8):
    """With clipping, decay, averages, and skipped steps before and after: the checkpoint, bit for bit."""
    config = dataclasses.replace(RESUMED, lr_schedule="linear", final_lr_fraction=0.1, grad_clip=0.5, lr=1e-4,
                                 weight_decay=1.0, skip_outliers=1.0, ema_rate=(0.9, 0.99, 0.5, 0.8))
    flags = dict(save_every=45, sample_every=0, log_every=1)
    run(TRAIN, *start_flags(config, images8, tmp_path / "whole", 60, **flags))
    (tmp_path / "parts").mkdir()
    shutil.copy(checkpoint_in(tmp_path / "whole", 45), tmp_path / "parts")
    first = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "parts", 45)))
    result = run(TRAIN, "--resume", tmp_path / "parts")
    expected, found = (checkpoint_in(tmp_path / name, 60).read_bytes() for name in ("whole", "parts"))
    assert found == expected and list(first.sections)[:7] == list(unet_io.TENSOR_SECTIONS[:7])
    last = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "parts", 60)))
    assert 0 < first.sections["state"].skipped < last.sections["state"].skipped
    assert f" | {last.sections['state'].skipped} skipped" in result.stdout
    assert last.config == dataclasses.replace(config, lr_steps=60)
    refused(TRAIN, "--resume", tmp_path / "parts", "--ema_rate", "0.9,0.99",
            says=["0.9,0.99 ", "0.9,0.99,0.5,0.8"])

EVERYTHING = """# the tiny preset with everything that can be switched on
preset = tiny
data_file = {data}
val_file = {data}
batch_size = 4
microbatch = 3
flip = 1
predict = v
noise_schedule = cosine
timestep_sampling = uniform
zero_terminal_snr = 1
offset_noise = 0.1
min_snr_gamma = 5
ema_rate = 0.9,0.99,0.999,0.9999
use_ema = 3
lr_schedule = linear
warmup_steps = 5
final_lr_fraction = 0.1
weight_decay = 0.01
grad_clip = 0.5
skip_outliers = 1
steps = 44
log_every = 1
save_every = 6
keep = 1
keep_every = 12
sample_every = 22
val_every = 20
num_samples = 2
sampler = dpmpp
sample_steps = 4
threshold = none
"""


def test_everything_at_once(tmp_path, images32, faults):
    """All of it on `tiny`, from a configuration file; killed in the middle, resumed: the same bits, log and
    pictures as of a run that nobody killed."""
    (tmp_path / "all.txt").write_text(EVERYTHING.format(data=images32))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(TRAIN, "--config", tmp_path / "all.txt", "--out_dir", whole)
    last_save = faults(killed / "checkpoint_00000044", at=1, kind="die")
    run(TRAIN, "--config", tmp_path / "all.txt", "--out_dir", killed, status=-signal.SIGKILL, env=last_save)
    assert checkpoint_in(killed, 36).exists()
    assert not checkpoint_in(killed, 44).exists()
    result = run(TRAIN, "--resume", killed)
    assert {path.name for path in killed.glob("*.bin")} == {path.name for path in whole.glob("*.bin")}
    for path in [*whole.glob("*.bin"), *whole.glob("*.png")]:
        assert (killed / path.name).read_bytes() == path.read_bytes(), path.name
    assert [int(path.stem[-8:]) for path in sorted(whole.glob("*.bin"))] == [12, 24, 36, 44]
    assert losses_in(killed) == losses_in(whole) and len(losses_in(whole)) == 44
    checkpoint = unet_io.read_checkpoint(str(checkpoint_in(killed, 44)))
    assert list(checkpoint.sections)[:7] == list(unet_io.TENSOR_SECTIONS[:7])
    assert checkpoint.sections["state"].skipped > 0 and "EMA 0.999)" in result.stdout


def test_careless(tmp_path, images8):
    """What would do nothing, or harm, is refused; what is left to do is said."""
    start = start_flags(Config(**TOY), images8, tmp_path / "run", 4, save_every=2)
    run(TRAIN, *start)
    weights = checkpoint_in(tmp_path / "run", 4)
    whole = weights.read_bytes()
    draw = ("--model_weights", weights, "--sample_steps", 1)
    refused(TRAIN, *draw, "--generate", "--num_samples", 1, "--output_name", weights, says=[weights.name, ".png"])
    refused(TRAIN, *draw, "--generate", "--num_samples", 0, says="--num_samples 0 draws nothing", status=2)
    refused(TRAIN, "--output_dir", "x", says="--output_dir x", status=2)
    (tmp_path / "folder.png").mkdir()
    for name, says in (("folder.png", "not a regular file"), ("no/x.png", "no/x.png")):
        refused(TRAIN, *draw, "--generate", "--num_samples", 1, "--output_name", tmp_path / name, says=says)
    assert weights.read_bytes() == whole
    (tmp_path / "there.png").write_bytes(b"")
    (tmp_path / "link.png").symlink_to(tmp_path / "there.png")
    run(TRAIN, *draw, "--generate", "--num_samples", 1, "--output_name", tmp_path / "link.png")
    assert (tmp_path / "link.png").is_symlink() and (tmp_path / "there.png").read_bytes()[1:4] == b"PNG"
    refused(TRAIN, "--generate", "--num_samples", 1, "--out_dir", tmp_path / "none", says=["none", "--model_weights"])
    refused(TRAIN, "--resume", weights, says=[f"{weights} is a file", "a run's folder"])
    refused(TRAIN, "--resume", tmp_path / "run", "--out_dir", tmp_path / "other", says=["--out_dir", "other"])
    assert "already at step 4" in run(TRAIN, "--resume", tmp_path / "run", "--steps", 3).stdout
    (tmp_path / "run/samples_00000004.png").unlink()
    grid = re.compile(r"\d+ pictures in .*samples_00000004\.png")  # which is drawn once
    ended = [run(TRAIN, "--resume", tmp_path / "run", "--num_samples", 2, "--sample_steps", 1).stdout for _ in range(2)]
    assert [bool(grid.search(text)) for text in ended] == [True, False]
    cosine = start_flags(Config(**TOY | dict(lr_schedule="cosine")), images8, tmp_path / "cosine", 2)
    run(TRAIN, *cosine)
    assert "learning rate is 0" in run(TRAIN, "--resume", tmp_path / "cosine", "--steps", 3).stdout
    (tmp_path / "notepad.txt").write_bytes(b"\xef\xbb\xbfsteps = 3\r\n")
    assert "\nsteps = 3\n" in run(TRAIN, "--config", tmp_path / "notepad.txt", "--print_config").stdout
    none = start_flags(Config(**TOY), images8, tmp_path / "none", 0)  # for the initial weights
    assert "already at step 0 of --steps 0: nothing is left to train" in run(TRAIN, *none).stdout


def test_attention_of_no_level(tmp_path):
    """A size that the user names and no level has is noted, and trained without; a default's is not."""
    small = ("--preset", "tiny", "--image_size", 16, "--batch_size", 1, "--dry_run")
    (tmp_path / "c.txt").write_text("attention_resolutions = 15,8,2\n")
    (tmp_path / "default.txt").write_text("attention_resolutions = 16,8\n")
    for words, sizes in ((["--attention_resolutions", "4,32"], "32"), (["--attention_resolutions", "8"], ""),
                         (["--config", tmp_path / "c.txt"], "15, 2"), ([], ""), (["--image_size", 24], ""),
                         (["--attention_resolutions", "16,8", "--image_size", 24], "16, 8"),
                         (["--config", tmp_path / "default.txt", "--image_size", 24], "")):
        notes = re.findall("^note: (.*)", run(TRAIN, *small, *words).stdout, re.M)
        levels = "24 to 6" if 24 in words else "16 to 4"
        assert notes == [f"no level has the size {size} of --attention_resolutions; they halve from"
                         f" {levels}" for size in sizes.split(", ") if size]
        if "--config" not in words:
            given, config, _ = train_unet.parse_flags(list(map(str, (*small[:-1], *words))))
            assert train_unet.absent_sizes(config, given) == notes


def test_one_of_each(tmp_path, images8, capsys):
    """One picture, step, image or thread is no plural; what a run's file says of --seed is no mistake."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    (tmp_path / "c.txt").write_text("seed = 0\n")
    unet_io.write_images(str(tmp_path / "one.bin"), unet_io.read_images(images8).pixels[:1])
    draw = ("--seeds", 5, "--sample_steps", 1, "--output_name", tmp_path / "x.png")
    ours = (TRAIN, "--config", tmp_path / "c.txt", "--model_weights", tmp_path / "w.bin", *draw)
    drawn = run(*ours, env=os.environ | dict(OMP_NUM_THREADS="1")).stdout
    for text in ("1 picture with", "1 picture in", "in 1 step,"):
        assert text in drawn
    assert "1 threads" not in drawn
    refused(*ours, "--generate", "--num_samples", 2, says="for 1 picture;")
    theirs = ("--device", "cpu", "--model_weights", tmp_path / "w.bin", *draw)
    assert call(generate, *theirs, "--num_samples", 2).endswith("for 1 picture")
    assert call(generate, *theirs, "--strip", 2).endswith("1 step")
    assert call(generate, *theirs, "--output_dir", tmp_path / "each") == ""
    assert "wrote 1 picture into" in capsys.readouterr().out
    start = start_flags(Config(**TOY), tmp_path / "one.bin", tmp_path / "run", 1)
    assert "\n1 image in " in run(TRAIN, *start).stdout
    assert "\n1 step: " in run(TRAIN, *start, "--dry_run").stdout


def test_one_process_a_run(tmp_path, images8):
    """Two runs in one folder would take each other's checkpoints for theirs."""
    words = start_flags(Config(**TOY), images8, tmp_path / "run", 10**6, save_every=0, log_every=1)
    with started(TRAIN, *words) as process:
        read_until(process, b"^step 1/")
        refused(TRAIN, *words, says=["another process", str(tmp_path / "run")])
        theirs = [*flags_of(Config(**TOY)), "--data_file", images8, "--out_dir", tmp_path / "run", "--device", "cpu"]
        assert f"another process is training in {tmp_path / 'run'}" in call(train_unet, *theirs)


def test_folder_of_a_run_in_pytorch(tmp_path, images8):
    """train_unet.py --resume stays in the run's folder, too."""
    flags = [*flags_of(Config(**SMALL)), "--data_file", images8, "--sample_every", 0, "--device", "cpu"]
    script("train_unet.py", *flags, "--steps", 1, "--out_dir", tmp_path / "run")
    resume = ["--steps", 2, "--sample_every", 0, "--device", "cpu", "--resume"]
    said = script("train_unet.py", *resume, tmp_path / "run", "--out_dir", f"{tmp_path}/run/", cwd=tmp_path).stdout
    assert f"saved {checkpoint_in(tmp_path / 'run', 2)}" in said
    script("train_unet.py", *resume, "checkpoint_00000001.bin", cwd=tmp_path / "run")
    assert sorted(os.listdir(tmp_path)) == ["run"]
    refusal = call(train_unet, *resume, tmp_path / "run", "--out_dir", tmp_path / "other")
    assert f"--out_dir {tmp_path / 'other'} contradicts --resume {tmp_path / 'run'}: a run stays in its folder" in refusal
    assert "already holds a run, at step 2" in call(train_unet, *flags, "--out_dir", tmp_path / "run")
    assert not (tmp_path / "other").exists()


def test_damaged_checkpoints_are_not_kept_for_whole_ones(tmp_path, images8):
    """What --resume passed over is left alone, and does not count as one of --keep."""
    folder = tmp_path / "run"
    run(TRAIN, *start_flags(Config(**TOY), images8, folder, 4, save_every=2))
    for step in (90, 91):
        checkpoint_in(folder, step).write_bytes(checkpoint_in(folder, 4).read_bytes()[:-9])
    run(TRAIN, "--resume", folder, "--steps", 8)
    assert sorted(int(path.stem[-8:]) for path in folder.glob("*.bin")) == [6, 8, 90, 91]


def test_resume_of_an_old_checkpoint(tmp_path, images8):
    """Without a section `state`, as many updates were made as steps."""
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "run", 8, save_every=4, sample_every=0))
    checkpoint = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", 4)))
    del checkpoint.sections["state"]
    (tmp_path / "old").mkdir()
    unet_io.write_checkpoint(checkpoint_in(tmp_path / "old", 4), checkpoint)
    run(TRAIN, "--resume", tmp_path / "old", "--steps", 8, *QUICK)
    found, expected = (unet_io.read_checkpoint(str(checkpoint_in(tmp_path / name, 8)))
                       for name in ("old", "run"))
    for name in ("weights", "ema", "adam_m", "adam_v"):
        assert same_bits(found.sections[name], expected.sections[name]), name
    assert found.sections["state"].seen == 4 and found.sections["state"].skipped == 0


def test_resume_with_more_steps(tmp_path, images8):
    """--steps 10, then --resume --steps 20: as 20 at once, but for the schedule's length in the header."""
    constant = dataclasses.replace(RESUMED, lr_schedule="constant")
    run(TRAIN, *start_flags(constant, images8, tmp_path / "whole", 20, save_every=0))
    run(TRAIN, *start_flags(constant, images8, tmp_path / "parts", 10, save_every=0))
    run(TRAIN, "--resume", "--out_dir", tmp_path / "parts", "--steps", 20)
    expected, found = (checkpoint_in(tmp_path / name, 20).read_bytes() for name in ("whole", "parts"))
    assert found[1024:] == expected[1024:]
    header, other = (np.frombuffer(data[:1024], "<i4") for data in (expected, found))
    assert np.flatnonzero(header != other).tolist() == [2, unet_io.FIELD_LR_STEPS]
    assert found != checkpoint_in(tmp_path / "parts", 10).read_bytes()


def test_resume_takes_a_folder(tmp_path, images8):
    """And a checkpoint's path is answered with its folder's."""
    folder = tmp_path / "a run"
    run(TRAIN, *flags_of(RESUMED), "--data_file", images8, "--steps", 1, *QUICK, "--out_dir", folder)
    newest = checkpoint_in(folder, 1)
    refused(TRAIN, "--resume", newest, says=f"{newest} is a file, and --resume takes a run's folder: --resume '{folder}'")
    refused(TRAIN, "--resume", newest.name, cwd=folder, says="and --resume takes a run's folder: --resume .")
    refused(TRAIN, "--resume", "x" * 300, says="can't list the folder xxx")  # a name that no file can have


def test_fixed_on_resume(tmp_path, images8):
    """Every flag that would make it another run is refused with both values, typed or in a file."""
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "run", 2))
    current, fixed = effective("--resume", tmp_path / "run"), 0
    for name, (_, freedom, *_) in stored_flags().items():
        if freedom == "FIXED":
            fixed += 1
            value, other = current[name], another(name, current[name])
            assert effective("--resume", tmp_path / "run", f"--{name}", value) == current
            refused(TRAIN, "--resume", tmp_path / "run", f"--{name}", other,
                    says=[f"--{name} {other} contradicts", f"made with {value};", "checkpoint_00000002.bin"])
    assert fixed >= 14
    (tmp_path / "c.txt").write_text("log_every 7\nseed 3\n")
    refused(TRAIN, "--resume", tmp_path / "run", "--config", tmp_path / "c.txt",
            says=["--seed 3 (", "c.txt, line 2)", "made with 0"])
    refused(TRAIN, "--resume", tmp_path / "run", "--preset", "large64",
            says=["(--preset large64)", "contradicts", "made with"])
    assert not list((tmp_path / "run").glob("*.tmp")) and len(losses_in(tmp_path / "run")) == 2


def test_free_on_resume(tmp_path, images8):
    """What may change is logged with both values, noted in config.txt, and holds from then on."""
    folder = tmp_path / "run"
    run(TRAIN, *start_flags(RESUMED, images8, folder, 4))
    before = effective("--resume", folder)
    (tmp_path / "c.txt").write_text(f"val_file {images8}\nlog_every 1\nlr 1\n")
    changes = {"steps": "8", "lr": "0.002", "weight_decay": "0.25", "keep": "5", "keep_every": "3",
               "save_every": "2", "warmup_steps": "1", "lr_schedule": "constant", "beta2": "0.99",
               "num_samples": "2", "log_every": "1", "val_file": images8}
    typed = [word for name, value in changes.items() if name not in ("val_file", "log_every")
             for word in (f"--{name}", value)]
    output = run(TRAIN, "--resume", folder, "--config", tmp_path / "c.txt", *typed).stdout
    logged = re.findall(r"^changed on resume: --(\w+) (\S+) \(was (\S*)\)$", output, re.M)
    assert sorted(logged) == sorted((name, value, before[name]) for name, value in changes.items())
    text = (folder / "config.txt").read_text()
    for name, value in changes.items():
        assert settings(text)[name] == value
        assert f"\n# from step 4 on: --{name} {value} (was {before[name]})\n" in text
    again = run(TRAIN, "--resume", folder, "--steps", 9).stdout
    assert re.findall(r"^changed on resume: (.+)$", again, re.M) == ["--steps 9 (was 8)"]
    text = (folder / "config.txt").read_text()
    assert text.count("# from step 4 on: ") == len(changes)
    assert "\n# from step 8 on: --steps 9 (was 8)\n" in text
    assert effective("--resume", folder) == before | changes | {"steps": "9", "out_dir": str(folder)}
    # a preset is for a run's start: a resumed one keeps what it had
    run(TRAIN, *start_flags(Config(**TOY), images8, tmp_path / "plain", 2, lr=0.5))
    assert effective("--resume", tmp_path / "plain")["lr"] == "0.5"


def test_kept_checkpoints(tmp_path, images8):
    """The newest --keep, and every --keep_every-th for ever."""
    def steps():
        return sorted(int(path.stem[-8:]) for path in (tmp_path / "run").glob("checkpoint_*.bin"))

    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "run", 12, save_every=1, keep=2, keep_every=5))
    assert steps() == [5, 10, 11, 12]
    run(TRAIN, "--resume", tmp_path / "run", "--steps", 16)
    assert steps() == [5, 10, 15, 16]
    run(TRAIN, "--resume", tmp_path / "run", "--steps", 18, "--keep_every", 0, "--keep", 1)
    assert steps() == [18]


def test_best_validation_survives(tmp_path, images8):
    """The summary knows the best validation loss of the whole run, resumed or not."""
    def summary(*command):
        line = r"^validation: best loss (\S+) at step (\d+) \(its checkpoint is (there|not kept)\)$"
        loss, step, checkpoint = re.search(line, run(*command).stdout, re.M).groups()
        return float(loss), int(step), checkpoint

    folder = tmp_path / "run"
    flags = dict(val_file=images8, val_every=2, save_every=2, keep=9, lr=0.01)
    first = summary(TRAIN, *start_flags(RESUMED, images8, folder, 8, **flags))
    text = (folder / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    loss, step = min((row["val_loss"], row["step"]) for row in rows if "val_loss" in row)
    assert first == (pytest.approx(loss, abs=6e-6), step, "there")
    text = re.sub(r'(\{"step": 4, "val_loss": )[^,}]+', r"\g<1>0.015625", text)
    text = re.sub(r'(\{"step": 8, "val_loss": )[^,}]+', r"\g<1>0.0001", text)
    (folder / "metrics.jsonl").write_text(text)
    checkpoint_in(folder, 8).unlink()  # so step 8 is done again, and what it said is forgotten
    checkpoint_in(folder, 4).unlink()
    again = summary(TRAIN, "--resume", folder, "--steps", 10)
    assert again == (pytest.approx(0.015625, abs=6e-6), 4, "not kept")


def test_schedule_is_not_bent(tmp_path, images8):
    """A later --steps leaves the learning rates of the schedule as they were."""
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "run", 10, log_every=1))
    run(TRAIN, "--resume", tmp_path / "run", "--steps", 14)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    config = dataclasses.replace(RESUMED, lr_steps=10)
    assert [line["step"] for line in lines] == list(range(1, 15))
    for line in lines:
        assert abs(line["lr"] - unet_io.learning_rate(config, line["step"] - 1)) < 1e-5 * RESUMED.lr
        assert {"step", "loss", "ms", "images_per_s", "lr"} <= line.keys()


def test_killed_twenty_times(tmp_path, images4, faults):
    """kill -9 at random moments, twenty times, resumed each time: the bits of a run that nobody killed."""
    config = Config(**SMALL | dict(lr=1e-3, flip=True))
    flags = dict(save_every=3, sample_every=0, log_every=1)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice, folder, reached, half_written = random.Random(seed), tmp_path / "killed", [0], 0
    for attempt in range(20):  # of a run that would not end for hours
        words = (["--resume", folder] if list(folder.glob("checkpoint_*.bin"))
                 else start_flags(config, images4, folder, 10**6, **flags))
        # every other time at one of the many calls that concern a checkpoint, which kills it in the middle of a save
        at_a_call = faults(f"{folder}/checkpoint_", at=dice.randrange(300, 900), kind="die") if attempt % 2 else None
        with started(TRAIN, *words, env=at_a_call) as process:
            if attempt % 2 == 0:
                read_until(process, rb"^step %d/" % (reached[-1] + dice.randrange(4, 40)))
                time.sleep(dice.uniform(0, 0.01))  # now in one part of a step, now in another
                process.kill()
            output, errors = finish(process)
        assert process.returncode == -signal.SIGKILL, (output, errors)
        assert errors == "" and "passed over" not in output, (output, errors)  # no half-written checkpoint
        half_written += bool(list(folder.glob("*.bin.*.tmp")))
        reached.append(max(int(path.stem[-8:]) for path in folder.glob("checkpoint_*.bin")))
    print(f"killed after steps {reached}, {half_written} times during a save")
    assert len(set(reached)) > 5 and reached == sorted(reached) and half_written > 2
    steps = reached[-1] + 5
    run(TRAIN, "--resume", folder, "--steps", steps)
    run(TRAIN, *start_flags(config, images4, tmp_path / "calm", steps, **flags))
    assert state_in(checkpoint_in(folder, steps)) == state_in(checkpoint_in(tmp_path / "calm", steps))
    assert losses_in(folder) == losses_in(tmp_path / "calm")
    assert not list(folder.glob("*.tmp"))


STEPS = 150  # whose lines are more than a pipe of a page holds, see harness.started


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped(tmp_path, images8, number):
    """Ctrl-C and SIGTERM: the step is finished and saved, exit 0, and the printed command goes on."""
    flags = dict(save_every=0, sample_every=0, log_every=1)
    config = dataclasses.replace(RESUMED, batch_size=2)
    run(TRAIN, *start_flags(config, images8, tmp_path / "calm", STEPS, **flags))
    folder = tmp_path / "stopped"
    with started(TRAIN, *start_flags(config, images8, folder, STEPS, **flags)) as process:
        read_until(process, b"^step 2/")
        fill(process)
        process.send_signal(number)
        wait_until(lambda: is_delivered(process, number), process)
        output, errors = finish(process)
    assert process.returncode == 0 and errors == "", (output, errors)
    steps = [int(path.stem[-8:]) for path in folder.glob("checkpoint_*.bin")]
    assert len(steps) == 1 and 2 <= steps[0] < STEPS
    assert unet_io.read_checkpoint(str(checkpoint_in(folder, steps[0]))).step == steps[0]
    words = re.search(r"^continue: +\./train_unet (.+)$", output, re.M).group(1).split()
    run(TRAIN, *words)
    assert checkpoint_in(folder, STEPS).read_bytes() == checkpoint_in(tmp_path / "calm", STEPS).read_bytes()


def test_reader_gone(tmp_path, images8):
    """./train_unet | head: the run saves and ends when nobody reads on, and goes on to the same bits."""
    flags = dict(save_every=0, sample_every=0, log_every=1)
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "calm", STEPS, **flags))
    folder = tmp_path / "piped"
    with started(TRAIN, *start_flags(RESUMED, images8, folder, STEPS, **flags)) as process:
        read_until(process, b"^step 1/")
        process.stdout.close()
        assert process.wait(LONG) == 0 and process.stderr.read() == b""
    steps = [int(path.stem[-8:]) for path in folder.glob("checkpoint_*.bin")]
    assert len(steps) == 1 and 1 <= steps[0] < STEPS
    run(TRAIN, "--resume", folder)
    assert checkpoint_in(folder, STEPS).read_bytes() == checkpoint_in(tmp_path / "calm", STEPS).read_bytes()


def test_nohup(tmp_path, images8):
    """A run that was told to ignore the hang-up does."""
    ignore = dict(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    flags = start_flags(RESUMED, images8, tmp_path / "run", STEPS, save_every=0, log_every=1)
    with started(TRAIN, *flags, **ignore) as process:
        read_until(process, b"^step 1/")
        process.send_signal(signal.SIGHUP)
        finish(process)
    assert process.returncode == 0 and checkpoint_in(tmp_path / "run", STEPS).exists()


def test_log(tmp_path, images8):
    """In a file: plain lines. At the end: the mean time of all steps but the first, and the files."""
    folder = tmp_path / "run"
    output = run(TRAIN, *start_flags(RESUMED, images8, folder, 6, log_every=1, save_every=0)).stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    mean, rate = map(float, re.search(r"^done at step 6 after 6 steps: ([\d.]+) ms a step without the first,"
                                      r" ([\d.]+) images/s$", output, re.M).groups())
    assert abs(mean - np.mean([line["ms"] for line in lines[1:]])) < 0.07
    assert abs(rate - 3000 / mean) < 0.051 + 3000 / mean * 0.06 / mean  # both are rounded to a decimal
    named = dict(re.findall(r"^(checkpoint|samples|metrics|config): +(.+)$", output, re.M))
    assert len(named) == 4 and all(pathlib.Path(path).parent == folder for path in named.values())
    assert all(pathlib.Path(path).exists() for path in named.values())


def test_log_in_a_terminal(tmp_path, images8):
    """Between two log lines one line is written over and over; it fits 80 columns, and goes at the end."""
    ours, theirs = pty.openpty()
    flags = start_flags(RESUMED, images8, tmp_path / "run", 1000000, log_every=1000000, save_every=0)
    with subprocess.Popen([TRAIN, *map(str, flags)], stdout=theirs) as process:
        os.close(theirs)
        output, stopped = b"", False
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            output += piece
            live = re.findall(rb"\r\x1b\[K(step \d+/\d+ \| loss [\d.]+ \| ETA [^\r\n]*)\r\x1b\[K", output)
            if len(live) >= 2 and not stopped:
                process.send_signal(signal.SIGTERM)
                stopped = True
    os.close(ours)
    assert process.returncode == 0
    assert len(live) >= 2 and all(len(line) < 80 for line in live)
    assert "\r\x1b[K\r\nstopped at step" in output.decode()


def test_damaged_checkpoint_is_passed_over(tmp_path, images8):
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "run", 9, save_every=3, keep=9))
    expected = checkpoint_in(tmp_path / "run", 9).read_bytes()
    damaged = bytearray(expected)
    damaged[len(damaged) // 3] ^= 16
    checkpoint_in(tmp_path / "run", 9).write_bytes(damaged)
    whole = checkpoint_in(tmp_path / "run", 6).read_bytes()
    checkpoint_in(tmp_path / "run", 6).write_bytes(whole[:-1])
    result = run(TRAIN, "--resume", tmp_path / "run")
    assert "checkpoint_00000009.bin" in result.stderr and "checkpoint_00000006.bin" in result.stderr
    assert "resumed at step 3" in result.stdout
    assert checkpoint_in(tmp_path / "run", 9).read_bytes() == expected


def small_disk(kind, folder):
    """(where to put a run that can't grow beyond 4 MB, options for subprocess)."""
    folder.mkdir()
    if kind == "file size limit":
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        return limit
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can't be mounted here")
    return None


@pytest.mark.parametrize("kind", ["file size limit", "small file system"])
def test_full_disk(tmp_path, images4, kind):
    """One sentence, exit status 1, and the checkpoint before is as it was."""
    config, folder = Config(**SMALL), tmp_path / "disk"
    limit = small_disk(kind, folder)
    try:
        run(TRAIN, *start_flags(config, images4, folder / "run", 5, save_every=5, sample_every=0))
        before = checkpoint_in(folder / "run", 5).read_bytes()
        result = run(TRAIN, "--resume", folder / "run", "--steps", 10, status=1, preexec_fn=limit)
        sentence = r"error: .*checkpoint_00000010\.bin.*(too large|No space left).*\n"
        assert re.fullmatch(sentence, result.stderr)
        assert [path.name for path in (folder / "run").glob("checkpoint*")] == ["checkpoint_00000005.bin"]
        assert checkpoint_in(folder / "run", 5).read_bytes() == before
        if kind == "file size limit":  # with room again the run goes on
            run(TRAIN, "--resume", folder / "run", "--steps", 10)
    finally:
        if kind == "small file system":
            subprocess.run(["umount", str(folder)], check=True)


def test_tuning_of_a_checkpoint_without_a_teacher(tmp_path, images8):
    """A resumed run can't begin to tune."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(predict="v")))
    quiet = ("--sample_every", 0, "--device", "cpu")
    assert call(train_unet, "--model_weights", tmp_path / "w.bin", "--data_file", images8, "--steps", 1, "--batch_size", 2,
                "--out_dir", tmp_path / "run", *quiet) == ""
    path = checkpoint_in(tmp_path / "run", 1)
    assert call(train_unet, "--resume", tmp_path / "run", "--steps", 2, "--consistency", 1, "--path_steps", 4, *quiet) == (
        f"--consistency 1 contradicts {path}, which was made with 0; leave the flag out, or start a new run")


def test_what_stays_in_the_twin():
    """train_unet.py keeps the flags of training that unet_io.h marks as fixed."""
    table = (ROOT / "unet_io.h").read_text()
    fixed = re.findall(r"^    \{(?:FIELD|OPTIMISER)\((\w+)\), \w+, TRAINING, FIXED,", table, re.MULTILINE)
    assert len(fixed) > 10 and sorted(fixed) == sorted(train_unet.FIXED_ON_RESUME)


@pytest.mark.parametrize("words", [("--optimizer", "muon"), ("--batch_size", 4), ("--seed", 7), ("--flip", 1), ("--ema_rate", "0.9"),
                                   ("--min_snr_gamma", 5), ("--timestep_sampling", "lognormal")])
def test_the_twin_refuses_another_run(tmp_path, images8, words):
    """What ./train_unet refuses of a run that is resumed, train_unet.py refuses too."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    quiet = ("--sample_every", 0, "--device", "cpu")
    assert call(train_unet, "--model_weights", tmp_path / "w.bin", "--data_file", images8, "--steps", 1, "--batch_size", 2,
                "--out_dir", tmp_path / "run", *quiet) == ""
    path = checkpoint_in(tmp_path / "run", 1)
    says = call(train_unet, "--resume", tmp_path / "run", "--steps", 2, *words, *quiet)
    assert says.startswith(f"{words[0]} {words[1]} contradicts {path}, which was made with ")
    assert says.endswith("; leave the flag out, or start a new run") and not checkpoint_in(tmp_path / "run", 2).exists()


def test_moments_of_an_earlier_trainer(tmp_path):
    """Their step is not told, so that the run can't go on from them."""
    ones = np.ones(9)
    unet_io.write_old_weights(tmp_path / "old.bin", Config(**TOY), ones, ones, ones)
    assert call(train_unet, "--resume", tmp_path / "old.bin", "--steps", 2, "--device", "cpu") == (
        f"{tmp_path}/old.bin is of an earlier trainer and does not tell its step, so that it can't be resumed: start a new run"
        f" from its weights with --model_weights {tmp_path}/old.bin")


def test_smoothed_loss_of_no_step(tmp_path, images8):
    """It begins with the first loss also where the run began with --steps 0."""
    quiet = ("--sample_every", 0, "--device", "cpu")
    assert call(train_unet, *start_flags(Config(**TOY), images8, tmp_path / "run", 0)[:-len(QUICK)], *quiet) == ""
    assert call(train_unet, "--resume", tmp_path / "run", "--steps", 1, "--log_every", 1, *quiet) == ""
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert line["smoothed"] == np.float32(line["loss"])
