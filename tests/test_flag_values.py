"""Values: what can't work is refused, a NaN is never silent, memory that can't be had is asked for first."""
import dataclasses
import functools
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess

import numpy as np
import pytest

import generate
import train_unet
import unet_io
from harness import (
    LONG, QUICK, RESUMED, ROOT, SMALL, TOY, TRAIN, call, checkpoint_in, perturbed_file, picture, refused, run,
    start_flags, variant, write_setting, write_toy_images)
from unet_io import Config, UserError, flags_of

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # but a line's end
OVERFLOWING = ("--lr", 1e3, "--weight_decay", 1e3, "--lr_schedule", "constant", "--warmup_steps", 0)


def toy(data, folder, steps, *more, config=Config(**TOY)):
    return [TRAIN, *start_flags(config, data, folder, steps), *more]


def with_weights(path, change):
    """Change the section `weights` of a weights file."""
    checkpoint = unet_io.read_checkpoint(str(path))
    for name in {"weights", "ema"} & checkpoint.sections.keys():
        checkpoint.sections[name] = change(np.array(checkpoint.sections[name]))
    checkpoint.tensors = checkpoint.tensors or 1
    unet_io.write_checkpoint(path, checkpoint)
    return path


def planted(value):
    def change(weights):
        weights[1000] = value
        return weights
    return change


# ----------------------------------------------------------------------------------------------------
# flags

@pytest.mark.parametrize("words, says", [
    (["--lr", "1e-60"], ["--lr ", "float", "1e-60"]), (["--grad_clip", "1e-39"], ["--grad_clip ", "float", "1e-39"]),
    (["--ema_rate", "0.9,1e-50"], ["1e-50", "float"]), (["--lr", "1e60"], ["between", "1e60"]),
    (["--adam_eps", 0], ["--adam_eps", "1e-20"]), (["--adam_eps", "1e-30"], ["--adam_eps", "1e-20"]),
    (["--num_samples", "-1"], "between 0")])
def test_refused_values(words, says):
    refused(TRAIN, *words, status=2, says=says)


def test_linear_schedule_needs_steps(tmp_path, images8):
    """Betas of 1 or more are refused, not clamped; the least number of steps is named, and works."""
    for words in (["--diffusion_steps", 20],
                  ["--diffusion_steps", 2, "--zero_terminal_snr", "--predict", "v"]):
        refused(TRAIN, *words, "--dry_run", says=["--diffusion_steps", "linear", "21", "cosine"])
    for words in (["--diffusion_steps", 21], ["--diffusion_steps", 2, "--noise_schedule", "cosine"]):
        run(*toy(images8, tmp_path / str(words[1]), 1, *words))


@pytest.mark.parametrize("words", [
    "--adam_eps 1e-20 --beta2 0", "--adam_eps 1e-20 --beta2 0.9999999", "--beta1 0.99999 --beta2 0",
    "--lr 1.2e-38", "--min_snr_gamma 1.2e-38", "--min_snr_gamma 1e6 --predict x0", "--offset_noise 10",
    "--weight_decay 1000", "--diffusion_steps 100000 --max_period 100000000",
    "--grad_clip 1.2e-38 --skip_outliers 1e9",
    "--warmup_steps 1e9 --keep 1e9 --log_every 1e9 --ema_rate 0.9999999"])
def test_extreme_values(tmp_path, images8, words):
    """The smallest and the largest value of a flag train, and leave numbers behind."""
    run(*toy(images8, tmp_path / "run", 3, *words.split()))
    sections = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", 3))).sections
    assert all(np.isfinite(sections[name]).all() for name in ("weights", "ema", "adam_m", "adam_v"))


HEAVY = {"num_channels", "channel_mult", "steps", "num_samples", "batch_size", "sample_steps",
         "num_res_blocks", "depth", "hidden_size", "mlp_ratio"}  # whose largest value takes long: --print_config judges it


def ends_of(program):
    """The smallest and the largest value of every flag that takes a number, as its refusal tells them."""
    ends = {}
    for name in re.findall(r"^  --(\w+)", run(program, "--help", "all").stdout, re.M):
        words = [str(program), f"--{name}", "nan", "--print_config"]
        sentence = subprocess.run(words, capture_output=True, text=True).stderr
        if found := re.search(r" between (\S+) and (\S+), not 'nan'", sentence):
            ends[name] = [number if "-" in number or "." in number else f"{float(number):.0f}" for number in found.groups()]
    return ends


@functools.lru_cache
def ends_in_program():
    return ends_of(TRAIN)


def works_or_is_refused(*words):
    """Status 0, or one sentence and status 1 or 2, whatever is asked for; never a crash. Returns the sentence."""
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=LONG)
    lines = result.stderr.splitlines()
    assert result.returncode in (0, 1, 2), (words, result.returncode, result.stderr)
    assert result.returncode == 0 or len(lines) == 1 and lines[0].startswith("error: "), (words, result.stderr)
    return lines[0] if result.returncode else ""


def test_ends_of_flags(tmp_path, images8):
    """The smallest and the largest value of every flag of ./train_unet train and draw, or are refused in a sentence."""
    ends, outcomes = ends_in_program(), {}
    assert len(ends) >= 43 and ends["eta"] == ["0", "1"] and ends["adam_eps"] == ["1e-20", "1"]
    base = toy(images8, tmp_path / "base", 1)
    run(*base)
    draw = [TRAIN, "--out_dir", tmp_path / "base", "--output_name", tmp_path / "s.png", "--sample_steps", 3]
    for name, (least, most) in ends.items():
        for value in (least, most):
            folder = tmp_path / f"{name}_{value}"
            words = toy(images8, folder, 1, f"--{name}", value)
            outcomes[name, value] = works_or_is_refused(*words, *["--print_config"] * (name in HEAVY))
            shutil.rmtree(folder, ignore_errors=True)
    for name in ("eta", "use_ema", "guidance_scale", "seed"):
        for value in ends[name]:
            outcomes[name, value] = works_or_is_refused(*draw, "--generate", "--num_samples", 2, f"--{name}", value)
    print(*(f"{name} {value}: {sentence or 'works'}" for (name, value), sentence in outcomes.items()), sep="\n")
    for (name, value), sentence in outcomes.items():  # it names the flag, or what stands against it
        assert not sentence or "--" in sentence or ".bin" in sentence, sentence
    for name in ("lr", "eta", "offset_noise", "min_snr_gamma", "skip_outliers", "keep_every"):
        assert not outcomes[name, ends[name][0]], name  # 0 is a value of each


def test_no_pictures_asked_for(tmp_path, images8):
    """A number of pictures that is typed as 0 neither trains nor draws another number."""
    for words, says in ((["--generate", "--num_samples", 0], "--num_samples 0 draws nothing"),
                        (["--generate", 16], "--generate is 0 or 1, not '16'; the number of pictures is --num_samples 16")):
        refused(*toy(images8, tmp_path / "run", 1), *words, status=2, says=says)
    assert not (tmp_path / "run").exists()
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    for ours, says in (["--num_samples"], "--num_samples must be from 1"), (["--seeds", "1,2", "--interpolate"],
                                                                         "--interpolate 0 draws nothing"):
        assert says in call(generate, "--model_weights", tmp_path / "w.bin", *ours, 0)


def test_last_seed(tmp_path):
    """Seeds do not begin anew after the last one."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    draw = [TRAIN, "--model_weights", tmp_path / "w.bin", "--output_name", tmp_path / "s.png", "--sample_steps", 1]
    refused(*draw, "--generate", "--num_samples", 2, "--seed", 2**32 - 1, says=["--seed 4294967295", "2 pictures"])
    assert "seeds 4294967294 to 4294967295" in run(*draw, "--generate", "--num_samples", 2, "--seed", 2**32 - 2).stdout


def test_empty_values(tmp_path, images8):
    """A flag whose value is a shell's empty variable is refused, where without it something else would be meant."""
    for name in ("model_weights", "seeds", "class", "class_names", "output_dir", "preset", "out_dir", "lr", "steps", "sampler"):
        for words in ([f"--{name}", ""], [f"--{name}="]):
            refused(*toy(images8, tmp_path / "run", 1), *words, status=2, says=[f"--{name} needs a value, not ''"])
    for name in ("seeds", "class", "guide_weights", "init_image", "output_dir", "quality", "nearest", "export", "device"):
        with pytest.raises(SystemExit, match="2"):
            call(generate, "--model_weights", "w.bin", f"--{name}", "")
    for name in ("data_dir", "model_weights", "out_dir", "preset", "device"):
        with pytest.raises(SystemExit, match="2"):
            train_unet.parse_flags([f"--{name}", ""])
    # what a checkpoint tells can be taken back
    run(*toy(images8, tmp_path / "run", 1), "--val_file", images8, "--val_every", 1)
    text = run(TRAIN, "--resume", tmp_path / "run", "--steps", 2, "--val_file", "").stdout
    assert "validation loss" not in text
    assert train_unet.parse_flags(["--resume", "", "--val_file", ""])[0] == dict(resume="", val_file="")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Config)
                                   if field.metadata["help"] and field.type in (int, float)])
def test_ends_in_python(field):
    """train_unet.py and ./train_unet take the same smallest and largest values, and refuse what lies beyond."""
    rule = {f.name: f for f in dataclasses.fields(Config)}[field]
    low, high = rule.metadata["low"], rule.metadata["high"]
    ours = ends_in_program()[field]
    assert [float(end) for end in ours] == [low, high]
    for value, beyond in ((low, low - 1), (high, high + 1)):
        with pytest.raises(UserError, match=field):
            train_unet.parse_flags([f"--{field}={beyond}"])
        try:
            train_unet.parse_flags([f"--{field}={value}", "--noise_schedule", "cosine"])
        except UserError as error:  # with the other flags, in a sentence
            assert "\n" not in str(error)


def test_no_grid(tmp_path, images8):
    """--steps 0 draws nothing, --num_samples 0 turns grids off, and no summary names one."""
    for name, steps, words in (("none", 0, []), ("off", 2, ["--num_samples", 0, "--sample_every", 1])):
        out = run(*toy(images8, tmp_path / name, steps, *words)).stdout
        assert "samples:" not in out and "picture in" not in out and not list((tmp_path / name).glob("*.png"))
        assert checkpoint_in(tmp_path / name, steps).exists()
    assert re.search(r"--num_samples .*0: no grids", run(TRAIN, "--help", "all").stdout)


def test_nothing_is_owed_at_step_0(tmp_path, images8):
    """A run of --steps 0 validates as little as it draws; its resume makes up for neither."""
    run(*toy(images8, tmp_path / "run", 0, "--val_file", images8))
    run(TRAIN, "--resume", tmp_path / "run", "--steps", 1)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "val_loss" in line] == [1]


def test_initial_weights_lie_here(tmp_path, images8):
    """An earlier trainer loaded this file unasked; this one says that it does not."""
    perturbed_file(tmp_path / "unet_init.bin", Config(**TOY))
    words = toy(images8, "run", 1)
    assert "note: unet_init.bin" in run(*words, cwd=tmp_path).stdout
    assert "unet_init" not in run(TRAIN, "--resume", "run", "--steps", 2, cwd=tmp_path).stdout
    given = run(*toy(images8, "given", 1), "--model_weights", "unet_init.bin", cwd=tmp_path).stdout
    assert "note: unet_init.bin" not in given


# ----------------------------------------------------------------------------------------------------
# what files hold

@pytest.mark.parametrize("name, value", [
    ("batch_size", 0), ("batch_size", 65537), ("flip", 2), ("ema_rate", 1.5), ("min_snr_gamma", "nan"),
    ("offset_noise", -1.0), ("lr", "nan"), ("beta1", 1.0), ("adam_eps", 0.0), ("steps", -1), ("lr", 1e-40),
    ("predict", "noise"), ("channel_mult", "1,0")])
def test_stored_values(tmp_path, name, value):
    """A value that no flag takes is refused; a default in its place would train something else."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    stored = unet_io.read_checkpoint(str(tmp_path / "w.bin"))
    stored.run["steps"] = 7
    unet_io.write_checkpoint(tmp_path / "w.bin", stored)
    write_setting(tmp_path / "w.bin", name, value)
    refused(TRAIN, "--model_weights", tmp_path / "w.bin", "--dry_run",
            says=["w.bin has a setting that can't be used", f"--{name} "])
    with pytest.raises(unet_io.UserError, match=name):
        unet_io.read_checkpoint(str(tmp_path / "w.bin"))


def test_unknown_setting(tmp_path):
    """What a newer version may have added is refused: left out, it would be another model."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    write_setting(tmp_path / "w.bin", "flip", "0\nwarp = 3")
    refused(TRAIN, "--model_weights", tmp_path / "w.bin", "--dry_run", says=["w.bin has a setting", "--warp"])
    with pytest.raises(unet_io.UserError, match="warp"):
        unet_io.read_checkpoint(str(tmp_path / "w.bin"))


@pytest.mark.parametrize("name, value", [("norm_groups", 5), ("image_size", 9), ("diffusion_steps", 20),
                                         ("num_head_channels", 31)])
def test_stored_configuration(tmp_path, name, value):
    """A configuration that can't work names the file it lies in, not a flag that nobody typed."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    write_setting(tmp_path / "w.bin", name, value)
    message = refused(TRAIN, "--model_weights", tmp_path / "w.bin", "--dry_run", says=f"{name} {value}")
    assert message.startswith(f"error: {tmp_path / 'w.bin'} ")


def test_flags_that_do_not_go_together(tmp_path):
    """The sentence names the flag and its value, wherever it was given."""
    (tmp_path / "my.txt").write_text("# mine\nnorm_groups = 5\n")
    refused(TRAIN, "--config", tmp_path / "my.txt", "--dry_run", says="error: --norm_groups 5")
    refused(TRAIN, "--config", tmp_path / "my.txt", "--norm_groups", 7, "--dry_run",
            says="error: --norm_groups 7")
    refused(TRAIN, "--preset", "tiny", "--num_head_channels", 48, "--dry_run",
            says="error: --num_head_channels 48")


def test_suggestion_overwrites_nothing(tmp_path, images8):
    """The command that mends a data file of another size names a file that is not there."""
    odd = write_toy_images(tmp_path / "my odd.bin", size=12)
    (tmp_path / "my odd_8.bin").write_text("mine too")
    message = refused(*toy(odd, tmp_path / "run", 1), says=["12 x 12", "--image_size 8"])
    suggested = re.search(r"--output_name '?([^' ]+)'? makes what fits$", message)[1]
    assert suggested.endswith(".bin") and not pathlib.Path(suggested).exists()


HOSTILE = "a\x1b]0;gone\x07\x1b[2J\x7f\u009b31m\u00e9"  # a title, a cleared screen, a colour; and a letter


def test_control_bytes(tmp_path, images8):
    """Names can't drive the terminal, wherever they come from: as \\x1B, and letters as they are."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    data = shutil.copy(images8, folder / "i.bin")
    for words, status in ((["--data_file", folder / "none"], 1), (["--lr", HOSTILE], 2),
                          (["--" + HOSTILE], 2), ([HOSTILE], 2), (["--preset", HOSTILE], 2),
                          (["--config", folder / "none"], 1),
                          (["--model_weights", folder / "i.bin"], 1)):
        message = refused(TRAIN, *flags_of(Config(**TOY)), "--out_dir", tmp_path / "x", *words, status=status)
        assert not CONTROL.search(message) and "\\x1B]0;gone\\x07" in message
    assert "\u00e9" in message
    result = run(*toy(data, folder / "run", 2, "--val_file", data))
    damaged = checkpoint_in(folder / "run", 1)
    damaged.write_bytes(b"UNET")
    result.stdout += run(TRAIN, "--resume", folder / "run", "--steps", 3).stdout
    os.truncate(checkpoint_in(folder / "run", 3), 100)
    drawn = run(TRAIN, "--generate", "--num_samples", 1, "--sample_steps", 2, "--out_dir", folder / "run",
                "--output_name", folder / "s.png", "--output_dir", folder / "each")
    assert "note: passed over" in drawn.stderr
    for text in (result.stdout, drawn.stdout, drawn.stderr):
        assert not CONTROL.search(text) and "\\x1B" in text
    # a checkpoint from elsewhere that names such a file
    checkpoint = unet_io.read_checkpoint(str(checkpoint_in(folder / "run", 2)))
    checkpoint.run["data_file"] = HOSTILE
    (tmp_path / "sent").mkdir()
    unet_io.write_checkpoint(checkpoint_in(tmp_path / "sent", 2), checkpoint)
    assert not CONTROL.search(refused(TRAIN, "--resume", tmp_path / "sent", says="\\x1B"))
    checkpoint.run["data_file"] = "end\0of it"
    unet_io.write_checkpoint(tmp_path / "sent.bin", checkpoint)
    refused(TRAIN, "--model_weights", tmp_path / "sent.bin", "--dry_run", says=["sent.bin", "data_file"])
    checkpoint.run["data_file"] = "two\nlines"  # which a line of text can't hold
    unet_io.write_checkpoint(tmp_path / "sent.bin", checkpoint)
    assert "data_file" not in unet_io.read_checkpoint(str(tmp_path / "sent.bin")).run


@pytest.mark.parametrize("words", [["--help"], ["--print_config"], ["--dry_run"], ["--steps", 1],
                                   ["--generate"]])
def test_output_that_can_not_be_written(tmp_path, images8, words):
    """A full disk behind standard output: a sentence and status 1, and what was asked for is done."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    flags = ["--model_weights", tmp_path / "w.bin", "--output_name", tmp_path / "s.png", *QUICK]
    if words[0] != "--generate":
        flags = [*start_flags(Config(**TOY), images8, tmp_path / "run", 1)]
    with open("/dev/full", "w") as full:
        result = subprocess.run([str(word) for word in (TRAIN, *flags, *words)], stdout=full,
                                stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    sentence = r"error: could not write [^\n]*No space left on device\n"
    assert re.fullmatch(sentence, result.stderr), result.stderr
    assert words[0] != "--steps" or checkpoint_in(tmp_path / "run", 1).exists()
    assert words[0] != "--generate" or (tmp_path / "s.png").exists()


# ----------------------------------------------------------------------------------------------------
# NaN

@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers(tmp_path, images8, value):
    """They are refused where they are read, with their file, and no picture is drawn."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    with_weights(tmp_path / "w.bin", planted(value))
    draw = [TRAIN, "--generate", "--num_samples", 2, "--sample_steps", 1, "--output_name", tmp_path / "s.png"]
    refused(*draw, "--model_weights", tmp_path / "w.bin", says=["w.bin holds NaN or infinity", "weights"])
    refused(*toy(images8, tmp_path / "new", 1), "--model_weights", tmp_path / "w.bin", says="w.bin holds NaN")
    run(*toy(images8, tmp_path / "run", 1))
    path = with_weights(checkpoint_in(tmp_path / "run", 1), planted(value))
    before = path.read_bytes()
    refused(TRAIN, "--resume", tmp_path / "run", "--steps", 2, says=[path, "NaN or infinity"])
    refused(*draw, "--out_dir", tmp_path / "run", says=[path, "NaN or infinity"])
    assert path.read_bytes() == before and not list(tmp_path.glob("*.png"))


def test_pictures_that_are_no_numbers(tmp_path, images8):
    """Weights so large that the pictures are NaN: black, with a sentence, and status 1."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    with_weights(tmp_path / "w.bin", lambda weights: weights * np.float32(1e37))
    refused(TRAIN, "--generate", "--num_samples", 2, "--sample_steps", 2, "--model_weights", tmp_path / "w.bin",
            "--output_name", tmp_path / "s.png", says=["2 pictures became NaN", "w.bin"])
    assert picture(tmp_path / "s.png")[2:10, 2:10].max() == 0


def test_training_that_overflows(tmp_path, images8):
    """The validation loss is null in JSON and NaN in the log, a grid has its note, the next step ends it."""
    run_folder = tmp_path / "run"
    words = toy(images8, run_folder, 2, *OVERFLOWING, "--val_file", images8, "--log_every", 1)
    out = run(*words).stdout
    assert "step 2 | validation loss NaN (" in out and re.search(r"note: 1 of them became NaN and black", out)
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()

    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")
    rows = [json.loads(line, parse_constant=no_constant) for line in lines]
    assert [row for row in rows if "val_loss" in row] == [dict(step=2, val_loss=None)]
    message = refused(TRAIN, "--resume", run_folder, "--steps", 9, "--save_every", 1,
                      says=["in step 3", checkpoint_in(run_folder, 2), "delete", "--lr"])
    assert "NaN" in message or "infinite" in message
    # null is no loss of 0: a finite one is the best
    with_weights(checkpoint_in(run_folder, 2), lambda weights: 0 * weights)
    out = run(TRAIN, "--resume", run_folder, "--steps", 3, "--lr", "1e-4", "--weight_decay", 0).stdout
    assert float(re.search(r"best loss (\S+) at step 3 ", out)[1]) > 0


def test_sanitized(tmp_path, images8):
    """Training, resuming and drawing, and a run that ends in NaN, without a finding."""
    program = variant("train_asan")
    environment = dict(os.environ, UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1")
    words = start_flags(RESUMED, images8, tmp_path / "run", 2, val_file=images8, microbatch=2)
    run(program, *words, env=environment)
    run(program, "--resume", tmp_path / "run", "--steps", 3, "--sampler", "heun", env=environment)
    run(program, "--generate", "--num_samples", 3, "--sample_steps", 3, "--out_dir", tmp_path / "run",
        "--threshold", "none", "--output_dir", tmp_path / "each", "--output_name", tmp_path / "s.png",
        env=environment)
    message = refused(program, *start_flags(RESUMED, images8, tmp_path / "nan", 9), *OVERFLOWING,
                      "--val_file", images8, "--val_every", 1, "--sample_every", 1,
                      says=["became", "in step", "--lr"], env=environment)
    assert "NaN" in message or "infinite" in message
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    with_weights(tmp_path / "w.bin", lambda weights: weights * np.float32(1e37))
    for threshold in ("clamp", "none"):
        refused(program, "--generate", "--num_samples", 2, "--sample_steps", 2, "--model_weights", tmp_path / "w.bin",
                "--threshold", threshold, "--output_name", tmp_path / "s.png", says="became NaN",
                env=environment)


# ----------------------------------------------------------------------------------------------------
# memory, and the room in a PNG

def test_too_many_pictures(tmp_path, images8):
    """What a run will need at its first grid, or at its end, is refused before it begins."""
    refused(TRAIN, *flags_of(Config(**TOY | dict(image_size=64))), "--data_file", ROOT / "data/emoji.bin",
            "--out_dir", tmp_path / "run", "--num_samples", 1000000,
            says=["1000000 pictures", "PNG", "--num_samples"])
    perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(image_size=32)))
    draw = [TRAIN, "--model_weights", tmp_path / "w.bin", "--output_name", tmp_path / "s.png", "--generate"]
    refused(*draw, "--num_samples", 1000000, says=["PNG", "--seeds"])
    assert not list(tmp_path.glob("*/")) and not (tmp_path / "s.png").exists()


def limited(kilobytes):
    one_thread = dict(OMP_NUM_THREADS="1")
    return dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1024 * kilobytes,) * 2),
                env=os.environ | one_thread)


def test_little_memory(tmp_path, images8):
    """Whatever memory there is: the run is done, or one sentence says why not."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    draw = [TRAIN, "--generate", "--num_samples", 3000, "--sample_steps", 1, "--model_weights", tmp_path / "w.bin",
            "--output_name", tmp_path / "s.png"]
    least = next(size for size in range(2000, 400000, 1000)
                 if subprocess.run([TRAIN, "--help"], capture_output=True, **limited(size)).returncode == 0)
    ends = {"done": 0, "refused": 0}
    sizes = [*range(least, least + 20000, 1000), *range(least + 20000, least + 440000, 60000)]
    for n, size in enumerate(sizes):
        for words in (draw, toy(images8, tmp_path / str(n), 2)):
            result = subprocess.run([str(word) for word in words], capture_output=True, text=True,
                                    timeout=LONG, **limited(size))
            if result.returncode == 0:
                ends["done"] += 1
            else:
                assert result.returncode == 1, (size, result)
                assert re.fullmatch(r"error: [^\n]*memory[^\n]*\n", result.stderr), (size, result.stderr)
                ends["refused"] += 1
    assert min(ends.values()) > 2, ends


def test_images_larger_than_memory(tmp_path):
    """A file of images that does not fit is refused before it is read into memory."""
    header = np.zeros(256, "<i4")
    header[:5] = [20240620, 2000000, 3, 8, 8]  # floats in a hole: zeros
    with open(tmp_path / "old.bin", "wb") as file:
        file.write(header.tobytes())
        file.truncate(1024 + 2000000 * 3 * 64 * 4)
    refused(*toy(tmp_path / "old.bin", tmp_path / "run", 1), says=["old.bin", "of memory"], **limited(900000))
