"""Command lines and configuration files: what is refused, and with which sentence."""
import dataclasses
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import generate
import train_unet
import unet_io
from harness import (
    QUICK, RESUMED, ROOT, SMALL, TOY, TRAIN, call, checkpoint_in, effective, losses_in, perturbed_file, refused,
    run, script, settings, start_flags, stored_flags, write_toy_images)
from unet_io import Config, flags_of


# ----------------------------------------------------------------------------------------------------
# command lines


@pytest.mark.parametrize("words, says", [
    (["--batchsize", 4], ["--batchsize;", "--batch_size?"]), (["--lrr", 1], "--lr?"), (["--halp"], "--help?"),
    (["--num-channels", 64], "--num_channels?"), (["data.bin"], "'data.bin'"),
    (["--lr"], "--lr needs a value"), (["--out_dir", "--flip"], "--out_dir needs a value"),
    (["--lr", "fast"], ["--lr", "'fast'"]), (["--lr=-1"], "--lr"), (["--steps", "1e12"], "--steps"),
    (["--steps", "2.5"], "whole number"), (["--batch_size", 0], "--batch_size"), (["--seed", "-3"], "--seed"),
    (["--predict", "x"], "eps|v"), (["--preset", "huge"], "tiny"),
    (["--attention_resolutions", "16,0,8"], "0 stands alone"),
    (["--channel_mult", "1,x"], "--channel_mult"), (["--channel_mult", "0.1"], "between 0.125 and 64"),
    (["--offset_noise", "-1"], "--offset_noise"),
    (["--flip=perhaps"], "--flip"), (["--preset", "small23"], ["'small23'", "mean small32?"]),
    (["--out_dir", ""], ["--out_dir", "''"]), (["--data_file="], "--data_file"),
    (["--out_dir", "a\nb"], ["--out_dir", "line break"]), (["--out_dir", "a "], ["--out_dir", "blank"]),
    (["--data_file", '"a"'], ["--data_file", "quote"])])
def test_usage(words, says):
    refused(TRAIN, *words, status=2, says=says)


@pytest.mark.parametrize("program, word, says", [
    ("train_unet.py", "--batchsize", "unknown flag --batchsize; did you mean --batch_size? (--help lists all flags)"),
    ("train_unet.py", "--num-channels=4", "did you mean --num_channels?"), ("train_unet.py", "--lrr", "did you mean --lr?"),
    ("generate.py", "--halp", "did you mean --help?"), ("train_unet.py", "--foo", "unknown flag --foo (--help lists all flags)"),
    ("train_unet.py", "--dry_run", "--dry_run is a flag of ./train_unet (--help lists those of train_unet.py)"),
    ("generate.py", "--data_dir=x", "--data_dir is a flag of prepare_data.py and train_unet.py")])
def test_unknown_flags_in_python(program, word, says):
    """A flag that is alike is named, and a program that has the flag; nothing where there is neither."""
    refused(sys.executable, ROOT / program, word, status=2, says=says)


def test_flags_elsewhere():
    """The programs that messages name have these flags, and of the four no other has them."""
    helps = {"./train_unet": run(TRAIN, "--help", "all").stdout}
    helps |= {name: script(name, "--help").stdout for name in ("generate.py", "prepare_data.py", "train_unet.py")}
    for programs, flags in unet_io.ELSEWHERE.items():
        for flag in flags.split():
            having = [name for name, text in helps.items() if re.search(rf"^  --{flag}\b", text, re.M)]
            assert having == programs.split(" and "), flag


def test_help():
    text = run(TRAIN, "--help", "all").stdout
    for flag in ("data_file val_file model_weights out_dir resume preset image_size num_channels channel_mult"
                 " num_res_blocks attention_resolutions num_head_channels norm_groups diffusion_steps"
                 " noise_schedule predict batch_size steps lr weight_decay seed log_every save_every"
                 " sample_every generate dry_run config print_config keep keep_every").split():
        assert re.search(rf"^  --{flag}\b", text, re.M), flag
    assert "(default 1e-4)" in text and "(default 1,2,3,4)" in text
    usual = run(TRAIN, "--help").stdout
    assert run(TRAIN, "-h").stdout == usual and "--help all" in usual and len(usual.splitlines()) <= 52
    lines = [line for line in usual.splitlines() if line.startswith("  --")]
    assert len(lines) == 27 and set(lines) < set(text.splitlines())


def completed(*words, program="./train_unet", cwd=ROOT):
    """What completion.bash offers for the last of these words, sorted."""
    shell = '''source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _train_unet
               [ ${#COMPREPLY[@]} = 0 ] || printf '%s\n' "${COMPREPLY[@]}"'''
    words = run("bash", "-c", shell, ROOT / "completion.bash", program, *words, cwd=cwd).stdout.splitlines()
    return sorted(words)


def test_another_processor(tmp_path):
    """A program that meets an instruction which the processor lacks says so; make builds again on another processor."""
    process = subprocess.Popen([TRAIN, "--steps", "1000000", "--out_dir", tmp_path, "--data_file", write_toy_images(
        tmp_path / "x.bin", size=32), "--preset", "tiny"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("train_unet on")
    process.send_signal(signal.SIGILL)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors == "error: this program was built for another processor; run make on this machine\n"
    written = []
    for name in ("some", "another"):
        run("make", "-C", ROOT, tmp_path / "settings", f"BUILD={tmp_path}", f"PROCESSOR={name}")
        written.append((tmp_path / "settings").read_text())
    assert written[0].replace("some", "another") == written[1] != written[0]
    run("make", "-C", ROOT, tmp_path / "settings", f"BUILD={tmp_path}")
    assert re.search(r" \d+ \d+$", (tmp_path / "settings").read_text())  # this one's


def test_completion(tmp_path):
    """Flags, choices, presets and file names, all from the program's --help."""
    help = run(TRAIN, "--help", "all").stdout
    flags = sorted(re.findall(r"^  (--\w+)", help, re.M))
    assert len(flags) > 30
    for words in (["--"], [""], ["--flip", "--"], ["--steps", 4, "--"], ["--preset", "tiny", ""]):
        assert completed(*words, program=TRAIN) == flags, words
    assert completed("--adam_", program=TRAIN) == ["--adam_eps"]
    presets = sorted(unet_io.PRESETS)
    assert completed("--preset", "", program=TRAIN) == completed("--preset", "=", program=TRAIN) == presets
    assert completed("--preset", "=", "ti", program=TRAIN) == ["tiny"]
    assert completed("--preset=ti", program=TRAIN) == ["--preset=tiny"]  # as zsh splits words
    for flag, choices in re.findall(r"^  (--\w+) (\w+(?:\|\w+)+) ", help, re.M):
        assert completed(flag, "", program=TRAIN) == sorted(choices.split("|")), flag
    assert "linear" in completed("--noise_schedule", "l", program=TRAIN)
    for name in ("my data.bin", "my.bin", "other.bin"):
        (tmp_path / name).write_text("")
    (tmp_path / "runs").mkdir()
    for flag in ("--data_file", "--val_file", "--model_weights", "--output_name"):
        assert completed(flag, "m", program=TRAIN, cwd=tmp_path) == ["my data.bin", "my.bin"]
    assert completed("--resume", "r", program=TRAIN, cwd=tmp_path) == ["runs"]
    assert completed("--lr", "", program=TRAIN, cwd=tmp_path) == completed("--lrr", "", program=TRAIN) == []
    assert completed("--", program="./none") == []


def test_zero_terminal_snr_weights():
    """A timestep of noise alone has a finite weight: that of v and of x0 is 0, that of eps 1."""
    abar = np.array([0.9, 0.5, 0.0])
    levels = unet_io.NoiseLevels(np.sqrt(abar), np.sqrt(1 - abar))
    for predict in ("v", "x0", "flow", "edm"):
        assert unet_io.loss_weights(levels, predict, 5)[-1] == 0
    assert unet_io.loss_weights(levels, "eps", 5)[-1] == 1


def test_dry_run(tmp_path):
    """The plan, the parameters and the memory, without data and without a trace."""
    text = run(TRAIN, "--dry_run", "--out_dir", tmp_path / "run", "--data_file", tmp_path / "none").stdout
    assert "20494211 parameters in 326 tensors" in text and "middle_block.1" in text and "in all" in text
    assert not (tmp_path / "run").exists()
    needed = [float(re.search(r"([\d.]+) GB in all", run(TRAIN, "--dry_run", *flags).stdout)[1])
              for flags in ((), ("--microbatch", 16), ("--batch_size", 64, "--microbatch", 16))]
    # four parts instead of two: one more buffer of 20494211 gradients
    assert needed[1] < 0.7 * needed[0] and abs(needed[2] - needed[1] - 4e-9 * 20494211) < 0.011
    text = run(TRAIN, "--preset=tiny", "--dry_run", "1", "--num_channels=64").stdout
    assert re.search(r"num_channels +64 ", text) and re.search(r"image_size +32 ", text)
    refused(TRAIN, "--dry_run", "--num_channels", 48, says="multiple of 32")
    refused(TRAIN, "--dry_run", "--num_channels", 32, says=["norm_groups", "time embedding"])
    refused(TRAIN, "--preset", "tiny", "--image_size", 30, "--dry_run", says="halved")
    refused(TRAIN, "--dry_run", "--num_heads_upsample", 2,
            says="--num_heads_upsample 2 does nothing without --num_heads")
    refused(TRAIN, "--dry_run", "--zero_terminal_snr", says=["--predict eps", "v or x0"])


def test_time_of_a_dry_run():
    """What a step and all steps will take here; where the memory is too small, the plan and that."""
    for flags, steps, batch in (((), 20000, 32), ((*flags_of(Config(**TOY | dict(batch_size=1))), "--steps", 100), 100, 1)):
        text = run(TRAIN, *flags, "--dry_run").stdout
        line = r"^one training step: ([\d.]+) (ms|s), ([\d.]+) images/s \((measured|an estimate from \d+ of)"
        time_of, unit, rate, _ = re.search(line, text, re.M).groups()
        ms = float(time_of) * (1 if unit == "ms" else 1e3)
        rounding = 0.5 if ms >= 100 else 0.005
        least, most = (1e3 * batch / (ms + side * rounding) for side in (1, -1))
        assert least - 0.0501 < float(rate) < most + 0.0501  # it has a decimal, however slow the machine is
        all_steps = ms * steps / 1e3
        parts = re.findall(r"([\d.]+)([dhms])", re.search(rf"^{steps} steps: ([\d.dhms ]+), ", text, re.M)[1])
        units = dict(d=86400, h=3600, m=60, s=1)
        shown = sum(float(number) * units[unit] for number, unit in parts)
        assert abs(shown - all_steps) < 1.01 * units[parts[-1][1]] + 0.01 * all_steps
    assert "(measured, on grey images)" in text  # of a batch of one, whatever it takes
    result = run(TRAIN, "--dry_run", "--batch_size", 65536, status=1)
    assert "middle_block.1" in result.stdout and "GB in all" in result.stdout
    sentence = r"error: this run needs \S+ GB of memory and \S+ GB are free; .*would fit.*\n"
    assert re.fullmatch(sentence, result.stderr)


def test_data_files(tmp_path, images8):
    toy = start_flags(Config(**TOY), images8, tmp_path / "run", 1)  # a flag that comes later wins
    refused(TRAIN, *toy, "--data_file", tmp_path / "none.bin", says=["none.bin", "prepare_data.py"])
    good = pathlib.Path(images8).read_bytes()
    (tmp_path / "cut.bin").write_bytes(good[:-5])
    refused(TRAIN, *toy, "--data_file", tmp_path / "cut.bin", says=["cut.bin", "damaged"])
    (tmp_path / "flipped.bin").write_bytes(good[:2000] + bytes([good[2000] ^ 1]) + good[2001:])
    refused(TRAIN, *toy, "--data_file", tmp_path / "flipped.bin", says=["flipped.bin", "checksum"])
    (tmp_path / "text.bin").write_text("hello\n" * 500)
    refused(TRAIN, *toy, "--data_file", tmp_path / "text.bin", says=["text.bin", "no image file"])
    (tmp_path / "empty.bin").write_bytes(b"")
    refused(TRAIN, *toy, "--data_file", tmp_path / "empty.bin", says="empty.bin")
    refused(TRAIN, *toy, "--data_file", tmp_path, says=["is a folder", f"prepare_data.py --data_dir {tmp_path} "])
    odd = write_toy_images(tmp_path / "odd.bin", size=12)
    refused(TRAIN, *toy, "--data_file", odd, says=["12 x 12", "prepare_data.py", "--image_size 8"])
    small = write_toy_images(tmp_path / "small.bin", size=4)
    refused(TRAIN, *toy, "--data_file", small, says=["4 x 4", "--image_size 8"])
    refused(TRAIN, *toy, "--data_file", images8, "--val_file", small, says=["small.bin", "4 x 4"])
    assert not (tmp_path / "run").exists()
    (tmp_path / "packed.bin.gz").write_bytes(b"")
    refused(TRAIN, *toy, "--data_file", tmp_path / "packed.bin", says="gzip")


def test_weights_files(tmp_path, images8):
    toy = start_flags(Config(**TOY), images8, tmp_path / "run", 1)
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    refused(TRAIN, *toy, "--model_weights", tmp_path / "none.bin", says="none.bin")
    refused(TRAIN, *toy, "--model_weights", images8, says=["images", "--data_file"])
    refused(TRAIN, "--model_weights", tmp_path / "w.bin", "--num_channels", 64, "--data_file", images8,
            "--out_dir", tmp_path / "run", says=["--num_channels 64", "w.bin", "32"])
    good = (tmp_path / "w.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(good[:-1000])
    refused(TRAIN, *toy, "--model_weights", tmp_path / "cut.bin", says=["cut.bin", "damaged"])
    refused(TRAIN, *toy, "--data_file", tmp_path / "w.bin", says="no image file")
    (tmp_path / "w.pt").write_bytes(b"PK" + good)
    refused(TRAIN, *toy, "--model_weights", tmp_path / "w.pt", says=["w.pt", "generate.py --import"])
    refused(TRAIN, "--generate", "--num_samples", 1, "--out_dir", tmp_path / "nowhere", says=["checkpoint", "nowhere"])
    draw = [TRAIN, "--generate", "--num_samples", 1, "--model_weights", tmp_path / "w.bin"]
    refused(*draw, "--sample_steps", 2000, says="2000")
    refused(*draw, "--sample_steps", 1, "--output_name", tmp_path / "no/such/folder.png", says="folder.png")


def test_run_folders(tmp_path, images8):
    folder = tmp_path / "a/b/run"
    toy = start_flags(RESUMED, images8, folder, 2)
    run(TRAIN, *toy)
    assert {path.name for path in folder.iterdir()} == {"checkpoint_00000002.bin", "config.txt",
                                                        "metrics.jsonl", "samples_00000002.png"}
    refused(TRAIN, *toy, says=[folder, "step 2", "--resume", "--out_dir"])
    refused(TRAIN, "--resume", folder, "--num_channels", 64, says=["--num_channels 64", "32"])
    refused(TRAIN, "--resume", folder, "--batch_size", 7, says=["--batch_size 7", "3"])
    refused(TRAIN, "--resume", folder, "--predict", "eps", says=["--predict eps", "v"])
    refused(TRAIN, "--resume", folder, "--seed", 1, says=["--seed 1", "0"])
    refused(TRAIN, "--resume", tmp_path / "nowhere", says=["nowhere", "--resume"])
    (tmp_path / "file").write_text("")
    refused(TRAIN, *toy, "--out_dir", tmp_path / "file/run", says="file")
    moved = run(TRAIN, "--resume", folder, "--lr", "5e-4", "--steps", 3)
    assert "changed on resume: --lr" in moved.stdout
    os.rename(images8, images8 + ".away")
    try:
        refused(TRAIN, "--resume", folder, "--steps", 9, says=[images8])
    finally:
        os.rename(images8 + ".away", images8)


def test_too_little_memory(tmp_path):
    message = refused(TRAIN, "--batch_size", 65536, "--data_file", ROOT / "data/faces.bin",
                      "--out_dir", tmp_path, says="of memory")
    fits = re.search(r"--microbatch (\d+), the same batch in parts, or --batch_size (\d+) would fit", message)
    assert "no batch size would fit" in message or 0 < int(fits[1]) == int(fits[2]) < 65536


def test_nan_keeps_the_checkpoint(tmp_path, images8):
    """Weights that overflow: the step is named, and the checkpoint before it stays as it is."""
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "run", 3))
    path = checkpoint_in(tmp_path / "run", 3)
    checkpoint = unet_io.read_checkpoint(str(path))
    checkpoint.sections["weights"] = checkpoint.sections["weights"] * np.float32(1e30)
    unet_io.write_checkpoint(path, checkpoint)
    before = path.read_bytes()
    message = refused(TRAIN, "--resume", tmp_path / "run", "--steps", 20, "--save_every", 1,
                      says=["in step 4;", "checkpoint_00000003.bin", "--lr"])
    assert "NaN" in message or "infinite" in message
    assert list((tmp_path / "run").glob("checkpoint*")) == [path] and path.read_bytes() == before


def test_diverging_run_says_so(tmp_path, images8):
    message = refused(TRAIN, *start_flags(RESUMED, images8, tmp_path / "run", 200), "--lr", 900,
                      "--warmup_steps", 0, "--lr_schedule", "constant", says="--lr")
    assert "NaN" in message or "infinite" in message


# ----------------------------------------------------------------------------------------------------
# configuration files


def test_config_precedence(tmp_path):
    """defaults < preset < file < typed, wherever the preset is named; comments, both ways to write a line."""
    path = tmp_path / "my settings.txt"
    path.write_text("# a comment\n\n  steps 77  \n  # another\nlr = 5e-4\npreset tiny\nout_dir = a b # c\n"
                    "flip=true\n")
    flags = effective("--steps", 99, "--config", path)
    assert (flags["steps"], flags["lr"], flags["batch_size"], flags["num_channels"], flags["flip"]) == (
        "99", "0.0005", "8", "32", "1")
    assert flags["out_dir"] == "a b # c"
    assert effective("--config", path, "--preset", "small32")["batch_size"] == "64"
    assert effective("--config", path)["steps"] == "77"


def test_config_of_a_run_draws_with_the_run(tmp_path, images8):
    """Not with the weights that it began with, which its file names too."""
    first, second = tmp_path / "first", tmp_path / "second"
    run(TRAIN, *flags_of(Config(**SMALL)), "--data_file", images8, "--steps", 1, "--out_dir", first, *QUICK)
    began = checkpoint_in(first, 1)
    run(TRAIN, "--model_weights", began, "--data_file", images8, "--steps", 2, "--out_dir", second, *QUICK)
    draw = ("--generate", "--config", second / "config.txt", "--num_samples", 1, "--output_dir", tmp_path)
    assert f"1 picture with {checkpoint_in(second, 2)}" in run(TRAIN, *draw).stdout
    assert f"1 picture with {began}" in run(TRAIN, *draw, "--model_weights", began).stdout
    assert f"1 picture with {began}" in run(TRAIN, *draw, "--out_dir", tmp_path / "nothing").stdout


@pytest.mark.parametrize("preset", unet_io.PRESETS)
def test_print_config(tmp_path, preset):
    """What --print_config writes is what it reads; grouped as in --help."""
    start = []
    if preset == "consistency":  # which tunes a model that there is
        perturbed_file(tmp_path / "start.bin", Config(**TOY | dict(predict="v")))
        start = ["--model_weights", tmp_path / "start.bin"]
    printed = run(TRAIN, "--preset", preset, *start, "--print_config").stdout
    (tmp_path / "printed.txt").write_text(printed)
    assert run(TRAIN, "--config", tmp_path / "printed.txt", "--print_config").stdout == printed
    assert [line for line in re.findall(r"^# (\w+)$", printed, re.M)] == ["Files", "Model", "Diffusion",
                                                                          "Training", "Pictures", "Sampling"]
    assert stored_flags().keys() <= settings(printed).keys()


@pytest.mark.parametrize("text, status, says", [
    ("lr 1e-4\n\nbatchsize 4\n", 2, [", line 3: ", "--batchsize;", "--batch_size?"]),
    ("--lr 1e-4\n", 2, [", line 1: ", "----lr;", "mean --lr?"]), ("lr = fast\n", 2, [", line 1: ", "'fast'"]),
    ("# x\nlr =   \n", 2, [", line 2: ", "--lr", "''"]), ("lr = 1 # x\n", 2, [", line 1: ", "'1 # x'"]),
    ("out_dir\n", 2, [", line 1: ", "--out_dir"]),
    ("steps 10 20\n", 2, [", line 1: ", "'10 20'"]), ("preset huge\n", 2, [", line 1: ", "'huge'", "tiny"]),
    ("resume out\n", 2, [", line 1: ", "--resume"]), ("config x\n", 2, [", line 1: ", "--config"]),
    ('out_dir "a b\n', 2, [", line 1: ", "quote"]), ("num_channels 48\n", 1, ["--num_channels", "48"]),
    ("lr 1e-4\0\n", 1, ["no configuration"]), ("= 3\n", 2, [", line 1: "])])
def test_config_refusals(tmp_path, text, status, says):
    (tmp_path / "c.txt").write_text(text)
    line = refused(TRAIN, "--config", tmp_path / "c.txt", "--print_config", status=status, says=says)
    assert ", line" not in line or line.startswith(f"error: {tmp_path}/c.txt, line ")


def test_config_no_file(tmp_path):
    refused(TRAIN, "--config", tmp_path / "none.txt", says=["none.txt", "No such file"])
    refused(TRAIN, "--config", tmp_path, says=[tmp_path, "not a regular file"])
    refused(TRAIN, "--config", "", status=2, says="--config")
    refused(TRAIN, "--config", ROOT / "data/faces.bin.gz", says=["faces.bin.gz", "no configuration"])


def test_config_that_can_not_be_written(tmp_path, images8):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    flags = start_flags(RESUMED, images8, tmp_path / "run", 2)
    refused(TRAIN, *flags, says=["run/config.txt", "too large"], preexec_fn=limit)
    assert not list((tmp_path / "run").iterdir())  # no half of a configuration
    run(TRAIN, *flags)  # and nothing in the way of the next attempt
    refused(TRAIN, *flags, "--out_dir", "/proc/run", says="/proc/run")
    with open("/dev/full", "w") as full:
        result = subprocess.run([TRAIN, "--print_config"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1 and re.fullmatch(r"error: .*No space left.*\n", result.stderr)


def test_config_reproduces(tmp_path, images8):
    """A run's config.txt, alone, makes the run again, bit for bit; names with spaces and quotes survive."""
    data = tmp_path / 'my "data" #1.bin'
    shutil.copy(images8, data)
    folder = tmp_path / "the run # 2"
    config = dataclasses.replace(RESUMED, adam_eps=3e-7, seed=12)
    run(TRAIN, *start_flags(config, data, folder, 6, val_file=data, save_every=3))
    again = run(TRAIN, "--config", folder / "config.txt", "--out_dir", tmp_path / "other")
    other = tmp_path / "other"
    for step in (3, 6):
        assert checkpoint_in(folder, step).read_bytes() == checkpoint_in(other, step).read_bytes()
    assert losses_in(folder) == losses_in(other)
    texts = [(place / "config.txt").read_text() for place in (folder, other)]
    assert texts[0].replace(f"out_dir = {folder}\n", f"out_dir = {other}\n") == texts[1]
    # the commands that the end prints can be pasted
    words = re.search(r"^pictures: +\./train_unet (.+)$", again.stdout, re.M).group(1)
    subprocess.run(f"{TRAIN} {words} --output_name {tmp_path}/p.png --sample_steps 1", shell=True, check=True,
                   capture_output=True)
    first = run(TRAIN, "--resume", folder).stdout
    words = re.search(r"^continue: +\./train_unet (.+)$", first, re.M).group(1)
    assert words.endswith("--steps 12 --lr_schedule constant --lr 0.0001")  # the cosine has come to its end
    subprocess.run(f"{TRAIN} {words}", shell=True, check=True, capture_output=True)
    assert checkpoint_in(folder, 12).exists()


def test_config_of_new_run_from_weights(tmp_path, images8):
    """--model_weights brings its own architecture, which the run's config.txt holds, also after a resume."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    flags = ("--model_weights", tmp_path / "w.bin", "--data_file", images8, "--steps", 2, *QUICK)
    run(TRAIN, *flags, "--out_dir", tmp_path / "run")
    run(TRAIN, "--config", tmp_path / "run/config.txt", "--out_dir", tmp_path / "again")
    assert "channel_mult = 1,2\n" in (tmp_path / "run/config.txt").read_text()
    found, expected = (checkpoint_in(tmp_path / name, 2).read_bytes() for name in ("again", "run"))
    assert found == expected
    run(TRAIN, "--resume", tmp_path / "run", "--steps", 3)
    assert f"model_weights = {tmp_path}/w.bin\n" in (tmp_path / "run/config.txt").read_text()
    refused(TRAIN, "--resume", tmp_path / "run", "--model_weights", "other.bin",
            says=["--model_weights other.bin contradicts", f"made with {tmp_path}/w.bin;"])


@pytest.mark.parametrize("words, expected", [
    ((), ("lognormal", -1.25, 1.5)), (("--timestep_std", 2), ("lognormal", -1.25, 2)),
    (("--timestep_sampling", "uniform"), ("uniform", 0, 1)), (("--timestep_sampling", "lognormal"), ("lognormal", 0, 1)),
    (("--preset", "consistency"), ("lognormal", -1.25, 1.5))])
def test_timesteps_of_new_run_from_weights(tmp_path, images8, words, expected):
    """A run that starts from weights draws timesteps as they were trained, if it is not told otherwise."""
    config = Config(**TOY | dict(noise_schedule="edm", predict="edm", timestep_sampling="lognormal", timestep_mean=-1.25,
                                 timestep_std=1.5))
    perturbed_file(tmp_path / "w.bin", config)
    flags = ("--model_weights", tmp_path / "w.bin", "--data_file", images8, "--steps", 1, "--batch_size", 2, *words)
    run(TRAIN, *flags, *QUICK, "--out_dir", tmp_path / "ours")
    assert call(train_unet, *flags, "--sample_every", 0, "--device", "cpu", "--out_dir", tmp_path / "theirs") == ""
    for name in ("ours", "theirs"):
        found = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / name, 1))).config
        assert (found.timestep_sampling, found.timestep_mean, found.timestep_std) == expected


def test_summary():
    """The last line of a run of this file counts what passed, failed and was skipped, and says why. A test that runs a
    program of tests counts as these, also in another process."""
    words = [sys.executable, ROOT / "tests/run.py", "-k", "schedule_by_known_values or gpu_missing or test_ladder[elementwise]"]
    lines = [run(*words, *side_by_side, env=dict(os.environ, TRAIN_UNET_BF16="/nowhere/train_unet")).stdout.splitlines()[-1]
             for side_by_side in ([], ["-n", "0"])]
    why = "no GPU on this machine|/nowhere/train_unet is not built"
    passed = re.fullmatch(rf"(\d+) passed, 0 failed, 1 skipped \(({why}): 1\)", lines[0])[1]
    assert int(passed) > 2 and lines[1] == lines[0]


def test_earlier_names(tmp_path, images8):
    """How many pictures, and which weights, are called the same in every program; earlier names are taken, and it is said."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    common = ["--model_weights", tmp_path / "w.bin", "--sample_steps", 1, "--output_name"]
    run(TRAIN, "--generate", "--num_samples", 2, *common, tmp_path / "a.npy")
    default = run(TRAIN, "--generate", *common, tmp_path / "c.npy").stdout
    assert "16 pictures with" in default and "note" not in default
    for words, notes in ((["--num_samples", 2, "--model_weights"], []),
                         (["--num_images=2", "--model_filename"], ["--num_images is called --num_samples now",
                                                                   "--model_filename is called --model_weights now"])):
        text = run(sys.executable, ROOT / "generate.py", *words, tmp_path / "w.bin", "--sample_steps", 1, "--output_name",
                   tmp_path / "d.npz").stdout
        assert re.findall("note: (.*)", text) == notes
        with np.load(tmp_path / "d.npz") as arrays:
            assert len(arrays["arr_0"]) == 2
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    text = run(sys.executable, ROOT / "prepare_data.py", "--data_dir", tmp_path / "x.png", "--image_size", 8, "--channels", 1,
               "--output_name", tmp_path / "x.bin").stdout
    assert "note: --channels is called --in_channels now\n" in text
    assert unet_io.read_images(tmp_path / "x.bin").pixels.shape == (1, 1, 8, 8)


IDLE = {  # what is typed: what is said of it
    "--timestep_mean 1": "--timestep_mean does nothing without --timestep_sampling lognormal",
    "--timestep_std 2": "--timestep_std does nothing without --timestep_sampling lognormal",
    "--cond_drop_prob 0.5": "--cond_drop_prob does nothing without --class_cond 1",
    "--num_classes 7": "--num_classes does nothing without --class_cond 1",
    "--final_lr_fraction 0.5": "--final_lr_fraction does nothing with --lr_schedule constant",
    "--consistency_steps 1": "--consistency_steps does nothing without --consistency 1",
    "--warmup_steps 9": "the learning rate does not reach --lr: --warmup_steps 9 are more than --steps 1"}
IDLE_IN_C = {"--output_name x.png": "--output_name does nothing without --generate"}
IDLE_IN_PYTHON = {
    "--attention_resolutions 8,5": "no level has the size 5 of --attention_resolutions; they halve from 8 to 2",
    "--class_names x.txt": "--class_names does nothing without --class_cond 1",
    "--init_model_filename x.bin": "--init_model_filename does nothing without --init_model_only 1",
    "--debug_steps 3": "--debug_steps does nothing without --write_debug_state"}
IDLE_ON_PATHS = {
    "--timestep_sampling lognormal": "--timestep_sampling does nothing with --path_steps",
    "--flip 1": "--flip does nothing with --path_steps",
    "--offset_noise 0.1": "--offset_noise does nothing with --path_steps"}


PROGRAMS = ("train_unet", "train_unet.py")


def notes_of(program, *words):
    quick = QUICK if program == "train_unet" else ("--sample_every", 0, "--device", "cpu")
    command = [TRAIN] if program == "train_unet" else [sys.executable, ROOT / program]
    return re.findall("^note: (.*)", run(*command, *words, *quick).stdout, re.MULTILINE)


@pytest.mark.parametrize("program", PROGRAMS)
def test_schedules_that_end_too_early(tmp_path, images8, program):
    """More steps than a schedule has learn nothing at its end, and both programs say so before they begin."""
    flags = [*flags_of(Config(**TOY | dict(lr_schedule="cosine"))), "--data_file", images8, "--out_dir", tmp_path / "run"]
    assert not [line for line in notes_of(program, *flags, "--steps", 3) if "--lr_schedule" in line]
    notes = notes_of(program, "--resume", tmp_path / "run", "--steps", 6)
    ended = "--lr_schedule cosine has come to its end: the learning rate is 0; go on with --lr_schedule constant --lr 1e-05"
    early = "--lr_schedule cosine comes to its end before --steps 6, and then the learning rate is 0; see --lr_schedule constant" \
            " and a lower --lr"
    assert (ended if program == "train_unet" else early) in notes


def test_flags_of_training_while_drawing(tmp_path):
    """They do nothing, and the program says so; the seed and the batch size mean something there."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    words = ["--generate", "--model_weights", tmp_path / "w.bin", "--num_samples", 1, "--sample_steps", 1, "--seed", 3,
             "--batch_size", 1, "--steps", 50, "--lr", 1, "--output_name", tmp_path / "x.png"]
    notes = re.findall("^note: (.*)", run(TRAIN, *words).stdout, re.MULTILINE)
    assert notes == [f"--{name} does nothing with --generate" for name in ("steps", "lr")]


@pytest.mark.parametrize("module", [generate, train_unet])
@pytest.mark.parametrize("device", ["meta", "privateuseone", "foo"])
def test_devices_that_are_none(tmp_path, images8, module, device):
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    words = ["--model_weights", tmp_path / "w.bin", "--device", device]
    if module == train_unet:
        words += ["--data_file", images8, "--steps", 1, "--out_dir", tmp_path / "run"]
    assert call(module, *words) == f"--device {device} is none of cpu, cuda, mps and xpu"


@pytest.mark.parametrize("program", PROGRAMS)
def test_idle_flags(tmp_path, images8, program):
    """A typed flag that does nothing is named, with what it wants; in a preset or a file it may be one of many."""
    def notes(folder, *words):
        return notes_of(program, "--preset", "tiny", "--image_size", 8, "--timestep_sampling", "uniform", "--lr_schedule",
                        "constant", "--warmup_steps", 0, "--steps", 1, "--data_file", images8, "--out_dir", tmp_path / folder, *words)
    classes = f"{images8} has images of 3 classes, which are not told apart without --class_cond 1"
    assert notes("none") == [classes]
    table = IDLE | (IDLE_IN_C if program == "train_unet" else IDLE_IN_PYTHON)
    assert sorted(notes("all", *" ".join(table).split())) == sorted([*table.values(), classes])
    if program == "train_unet":
        (tmp_path / "c.txt").write_text("\n".join(word[2:] for word in table))
        assert notes("file", "--config", tmp_path / "c.txt") == [classes]


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_paths_learn_from(tmp_path, images8, program):
    """Tuning on paths says that images are not learned from, and what does nothing for that reason."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(predict="v")))
    flags = ("--model_weights", tmp_path / "w.bin", "--data_file", images8, "--consistency", 1, "--path_steps", 2)
    source = f"the network learns from what {tmp_path}/w.bin draws; the images are no examples"
    typed = " ".join(IDLE_ON_PATHS).split()
    assert notes_of(program, *flags, *typed, "--steps", 1, "--out_dir", tmp_path / "paths") == [*IDLE_ON_PATHS.values(), source]
    matching = ("--matching_fraction", 0.5, "--out_dir", tmp_path / "both")
    typed = ("--flip", 1) if program == "train_unet" else ("--flip", 1, "--init", "torch")
    idle = [f"{flag} does nothing with {other}" for flag, other in zip(typed[::2], ("--path_steps", "--model_weights"))]
    assert notes_of(program, *flags, *matching, *typed, "--steps", 2) == [
        *idle, source, "up to step 1 it learns paths; then it matches distributions, and its loss is another"]
    assert notes_of(program, "--resume", tmp_path / "both", "--steps", 3) == [source]
    draw = ("--generate", "--out_dir", tmp_path / "both", "--num_samples", 1)
    refused(TRAIN, *draw, "--consistency_steps", 1, says=["--consistency_steps 1 contradicts", "was made with 2"])
    refused(TRAIN, *draw, "--path_steps", 3, says=["--path_steps 3 contradicts", "was made with 2"])


def test_folder_in_place_of_a_file(tmp_path, images8):
    run(TRAIN, *start_flags(Config(**TOY), images8, tmp_path / "run", 1))
    refused(TRAIN, "--generate", "--model_weights", tmp_path / "run", says=["is a folder", f"--out_dir {tmp_path}/run"])
    text = run(TRAIN, "--resume", tmp_path / "run", "--out_dir", f"{tmp_path}/run/", "--steps", 2, *QUICK).stdout
    assert "resumed at step 1" in text
    for words in (["--resume", tmp_path / "none"], ["--resume"]):
        refused(TRAIN, *words, "--out_dir", tmp_path / "none", says=f"there is no checkpoint in {tmp_path}/none")
    refused(TRAIN, "--generate", "--model_weights", "x" * 300, says="can't open xxx")


def test_untuned_model_and_consistency(tmp_path):
    """The sampler of tuned models draws with any, and says where one was not tuned for it."""
    for tuned in (False, True):
        perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(predict="v", consistency=tuned)))
        said = run(TRAIN, "--generate", "--model_weights", tmp_path / "w.bin", "--num_samples", 1, "--sampler", "consistency",
                   "--output_name", tmp_path / "x.png").stderr
        assert ("w.bin was not tuned for --sampler consistency" in said) == (not tuned)


def test_threads_are_as_many_as_usable_cores(tmp_path):
    """Those that the process may use; OMP_NUM_THREADS tells another number where it is one."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    draw = (TRAIN, "--generate", "--model_weights", tmp_path / "w.bin", "--num_samples", 1, "--sample_steps", 1, "--output_name",
            tmp_path / "x.png")
    core = min(os.sched_getaffinity(0))
    for value, threads in ((None, "1 thread,"), ("abc", "1 thread,"), ("3", "3 threads,")):
        environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
        if value is not None:
            environment["OMP_NUM_THREADS"] = value
        said = run(*draw, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, {core})).stdout
        assert threads in said, (value, said)


def test_two_presets():
    for program in ([TRAIN], [sys.executable, ROOT / "train_unet.py"]):
        refused(*program, "--preset", "tiny", "--preset", "small32", says="--preset tiny and --preset small32: only one can be had",
                status=2)


def test_folder_and_file():
    """train_unet.py does not choose between two names of the images."""
    refused(sys.executable, ROOT / "train_unet.py", "--data_dir", "a", "--data_file", "b.bin",
            says="--data_dir a and --data_file b.bin: only one can be had")


def test_preset_of_another_model(tmp_path, images8, monkeypatch):
    """A preset's model must be that of --model_weights, as a typed flag must; what is typed goes before it."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(predict="v")))
    start = ("--model_weights", tmp_path / "w.bin", "--data_file", images8, "--steps", 1, "--batch_size", 2, "--out_dir")
    refused(TRAIN, *start, tmp_path / "a", "--preset", "adm64", says=f"(--preset adm64) contradicts {tmp_path}/w.bin")
    assert call(train_unet, *start, tmp_path / "a", "--preset", "adm64", "--device", "cpu") == (
        f"--image_size 64 (--preset adm64) contradicts {tmp_path}/w.bin, which was made with 8")
    assert not (tmp_path / "a").exists()
    run(TRAIN, *start, tmp_path / "c", *QUICK)
    refused(TRAIN, "--resume", tmp_path / "c", "--preset", "adm64", says="(--preset adm64) contradicts")
    assert "--image_size 64 (--preset adm64) contradicts" in call(train_unet, "--resume", tmp_path / "c", "--preset", "adm64",
                                                                  "--device", "cpu")
    monkeypatch.setitem(unet_io.PRESETS, "unet64", dict(num_channels=64, class_cond=True, cond_drop_prob=0.1))
    assert "--num_channels 64 (--preset unet64)" in call(train_unet, *start, tmp_path / "b", "--preset", "unet64")
    assert call(train_unet, *start, tmp_path / "b", "--preset", "unet64", "--num_channels", 32, "--sample_every", 0, "--device",
                "cpu") == ""
    config = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "b", 1))).config
    assert (config.class_cond, config.num_classes, config.cond_drop_prob) == (True, 3, 0.1)


def test_tuning_is_refused_before_images_are_prepared(tmp_path):
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    assert call(train_unet, "--model_weights", tmp_path / "w.bin", "--data_dir", tmp_path, "--consistency", 1, "--out_dir",
                tmp_path / "run", "--device", "cpu").endswith("not one of --predict eps")
    assert not (tmp_path / "run").exists()


def test_flags_of_drawing_in_training(capsys):
    """train_unet.py says where they belong."""
    for name in ("--eta", "--spacing"):
        with pytest.raises(SystemExit):
            call(train_unet, name, 1)
        assert f"{name} is a flag of ./train_unet and generate.py" in capsys.readouterr().err
