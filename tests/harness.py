"""What the tests share: the programs under test, how they are run, errors, toy data.

The error of a tensor is the larger of |a - r|_2 / |r|_2 and max|a - r| / max|r| against a reference r in
float64; float32 passes below 1e-5. Comparisons are written so that a NaN fails and one bad element fails.
The programs under test are those in the folder above; the environment variables TRAIN_UNET, TRAIN_UNET_ASAN,
NETWORK, NETWORK_ASAN, NETWORK_AVX2, NETWORK_NEON, READERS, READERS_ASAN, LADDERS and PROFILE name others. TRAIN_UNET is a
build for the CPU; the tests on a GPU take ./train_unet and build/train_unet_fp32, or TRAIN_UNET_BF16 and
TRAIN_UNET_FP32.
"""
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import train_unet
import unet_io
from unet_io import Checkpoint, Config, UserError, flags_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
TRAIN = os.environ.get("TRAIN_UNET", str(ROOT / "train_unet"))
NETWORK = os.environ.get("NETWORK", str(ROOT / "build/network"))
READERS = os.environ.get("READERS", str(ROOT / "build/readers"))
VARIANTS = {"network_asan": os.environ.get("NETWORK_ASAN", str(ROOT / "build/network_asan")),
            "readers_asan": os.environ.get("READERS_ASAN", str(ROOT / "build/readers_asan")),
            "avx2": os.environ.get("NETWORK_AVX2", str(ROOT / "build/network_avx2")),
            "neon": os.environ.get("NETWORK_NEON", str(ROOT / "build/network_neon")),
            "train_asan": os.environ.get("TRAIN_UNET_ASAN", str(ROOT / "build/train_unet_asan")),
            "ladders": os.environ.get("LADDERS", str(ROOT / "build/ladders")),
            "profile": os.environ.get("PROFILE", str(ROOT / "dev/bench/profile"))}

GPU = {"bf16": os.environ.get("TRAIN_UNET_BF16", str(ROOT / "train_unet")),
       "fp32": os.environ.get("TRAIN_UNET_FP32", str(ROOT / "build/train_unet_fp32"))}

SMALL = dict(image_size=4, num_channels=32, channel_mult=(1,), num_res_blocks=1, attention_resolutions=(),
             num_head_channels=8, norm_groups=8, batch_size=2)  # the smallest network that the flags allow
TOY = SMALL | dict(image_size=8, channel_mult=(1, 2), attention_resolutions=(4,), num_head_channels=16)
ADM = TOY | dict(class_cond=True, num_classes=3, learn_sigma=True, resblock_updown=True, dropout=0.1,
                 use_scale_shift_norm=True, num_res_blocks=2)  # what the official models share, shrunk
TRAINING = {
    "eps": Config(image_size=32, num_channels=32, channel_mult=(1, 2, 2), num_res_blocks=1, norm_groups=8,
                  attention_resolutions=(8,), batch_size=4, lr=1e-4, seed=11),
    "v, flip, warm-up, cosine": Config(image_size=16, num_channels=32, channel_mult=(1, 2), num_res_blocks=1,
                                       norm_groups=8, attention_resolutions=(8,), batch_size=5, lr=3e-4,
                                       seed=4000000000, predict="v", noise_schedule="cosine", flip=True,
                                       lr_schedule="cosine", warmup_steps=5, ema_rate=0.7, lr_steps=20,
                                       weight_decay=0.1, beta1=0.85, beta2=0.99, diffusion_steps=500),
    "clipping, linear, averages": Config(image_size=16, num_channels=32, channel_mult=(1, 2), norm_groups=8,
                                         num_res_blocks=1, attention_resolutions=(8,), batch_size=3, lr=3e-4,
                                         seed=3, lr_schedule="linear", warmup_steps=3, lr_steps=20,
                                         final_lr_fraction=0.2, grad_clip=1.0, adam_eps=1e-3,
                                         weight_decay=2.0, ema_rate=(0.5, 0.9, 0.8, 0.7)),
    "x0, zero terminal SNR, offset noise, min-SNR": Config(**TOY | dict(
        image_size=16, predict="x0", seed=6, batch_size=3, zero_terminal_snr=True, offset_noise=0.3,
        min_snr_gamma=5.0)),
    "v, zero terminal SNR": Config(**TOY | dict(image_size=16, predict="v", seed=12, diffusion_steps=50,
                                                noise_schedule="cosine", zero_terminal_snr=True)),
    "eps, min-SNR": Config(**TOY | dict(image_size=16, batch_size=5, lr=1e-3, seed=6, min_snr_gamma=5.0)),
    "v, min-SNR": Config(**TOY | dict(image_size=16, batch_size=5, lr=1e-3, seed=7, predict="v",
                                      noise_schedule="cosine", min_snr_gamma=1.5)),
    "classes, some hidden": Config(**TOY | dict(image_size=16, batch_size=5, lr=1e-3, seed=15,
                                                class_cond=True, num_classes=4, cond_drop_prob=0.4)),
    "grey, classes": Config(**TOY | dict(in_channels=1, class_cond=True, num_classes=3, seed=2,
                                         offset_noise=0.2)),
    "dropout": Config(**TOY | dict(image_size=16, batch_size=3, lr=1e-3, seed=17, dropout=0.3)),
    "all": Config(**TOY | dict(image_size=16, batch_size=3, lr=1e-3, seed=18, dropout=0.1, class_cond=True,
                               num_classes=3, cond_drop_prob=0.2, use_scale_shift_norm=True, num_heads=2,
                               rescale_timesteps=True, diffusion_steps=400, in_channels=1, predict="v")),
    "four channels": Config(**TOY | dict(in_channels=4, predict="x0", seed=16, batch_size=3)),
    "resampling blocks": Config(**TOY | dict(image_size=16, channel_mult=(1, 2, 1), batch_size=3, lr=1e-3,
                                             resblock_updown=True, dropout=0.2, seed=19)),
    "learned resampling": Config(**TOY | dict(image_size=16, channel_mult=(2, 1, 2), batch_size=3, lr=1e-3,
                                              conv_resample=True, weight_decay=0.1, seed=20)),
    "narrow first level": Config(**ADM | dict(num_channels=64, channel_mult=(0.5, 1.5), batch_size=3, lr=1e-3,
                                              seed=29)),
    # short chains, so that there are timesteps 0
    "learned variance, eps": Config(**TOY | dict(batch_size=5, lr=1e-3, learn_sigma=True, seed=21,
                                                 diffusion_steps=21)),
    "learned variance, v, min-SNR": Config(**TOY | dict(batch_size=5, lr=1e-3, learn_sigma=True, predict="v",
                                                        noise_schedule="cosine", diffusion_steps=10, seed=22,
                                                        min_snr_gamma=5.0)),
    "learned variance, x0, zero terminal SNR": Config(**TOY | dict(batch_size=5, learn_sigma=True, lr=1e-3,
                                                                   predict="x0", zero_terminal_snr=True,
                                                                   diffusion_steps=30, seed=23)),
    "legacy order": Config(**TOY | dict(image_size=16, batch_size=3, lr=1e-3, num_heads=4, seed=24,
                                        num_heads_upsample=2, use_new_attention_order=False)),
    "adm64 shrunk": Config(**ADM | dict(image_size=32, channel_mult=(1, 2, 3, 4), num_res_blocks=3, seed=25,
                                        attention_resolutions=(16, 8, 4), noise_schedule="cosine", lr=3e-4)),
    "everything": Config(**ADM | dict(
        image_size=16, channel_mult=(2, 1, 2), num_heads=4, num_heads_upsample=2, batch_size=5, in_channels=4,
        use_new_attention_order=False, conv_resample=True, rescale_timesteps=True, cond_drop_prob=0.3,
        diffusion_steps=50, predict="v", noise_schedule="cosine", zero_terminal_snr=True, offset_noise=0.1,
        min_snr_gamma=3.0, flip=True, lr=1e-3, lr_schedule="cosine", warmup_steps=4, lr_steps=20,
        weight_decay=0.1, grad_clip=1.0, ema_rate=(0.5, 0.9), max_period=1000, seed=26)),
    "flow, lognormal": Config(**TOY | dict(
        image_size=16, batch_size=5, lr=1e-3, seed=27, noise_schedule="flow", predict="flow", class_cond=True,
        num_classes=3, cond_drop_prob=0.2, timestep_sampling="lognormal", timestep_mean=-0.4, timestep_std=1.3,
        learn_sigma=True)),
    "edm": Config(**TOY | dict(
        image_size=16, batch_size=3, lr=1e-3, seed=28, noise_schedule="edm", predict="edm", dropout=0.1,
        timestep_sampling="lognormal", timestep_mean=-1.2, timestep_std=1.2, diffusion_steps=300)),
    # short chains, so that there are pairs with the image itself, and answers that differ by more than rounding
    "consistency, flow": Config(**TOY | dict(
        image_size=16, batch_size=5, lr=1e-3, lr_steps=20, seed=30, noise_schedule="flow", predict="flow", dropout=0.1,
        class_cond=True, num_classes=3, cond_drop_prob=0.2, timestep_sampling="lognormal", consistency=True,
        diffusion_steps=20)),
    "consistency, v, zero terminal SNR": Config(**TOY | dict(
        image_size=16, batch_size=3, lr=1e-3, lr_steps=20, seed=31, noise_schedule="cosine", predict="v",
        zero_terminal_snr=True, offset_noise=0.1, consistency=True, diffusion_steps=10)),
    "consistency, edm": Config(**TOY | dict(
        batch_size=5, lr=1e-3, lr_steps=20, seed=32, noise_schedule="edm", predict="edm", consistency=True,
        timestep_sampling="lognormal", timestep_mean=-0.8, timestep_std=1.6, diffusion_steps=40)),
    "consistency, x0": Config(**TOY | dict(batch_size=3, lr=1e-4, lr_steps=20, seed=33, predict="x0", consistency=True,
                                           noise_schedule="cosine", diffusion_steps=6)),
    "paths, flow": Config(**TOY | dict(
        image_size=16, batch_size=5, lr=1e-3, seed=34, noise_schedule="flow", predict="flow", dropout=0.1, class_cond=True,
        num_classes=3, cond_drop_prob=0.2, consistency=True, path_steps=6, diffusion_steps=100)),
    # images of 64x64, whose errors are added up in several parts
    "paths, edm": Config(**TOY | dict(
        image_size=64, attention_resolutions=(), batch_size=3, lr=3e-4, seed=35, noise_schedule="edm", predict="edm",
        consistency=True, path_steps=4)),
    "matching, flow": Config(**TOY | dict(
        image_size=16, batch_size=5, lr=1e-3, lr_steps=20, seed=36, noise_schedule="flow", predict="flow", dropout=0.1,
        class_cond=True, num_classes=3, cond_drop_prob=0.2, consistency=True, path_steps=6, matching_fraction=0.7,
        weight_decay=0.1, offset_noise=0.1, diffusion_steps=100)),
    "matching, edm": Config(**TOY | dict(batch_size=3, lr=1e-3, lr_steps=20, seed=37, noise_schedule="edm", predict="edm",
                                         consistency=True, consistency_steps=1, path_steps=4, matching_fraction=0.5)),
    "muon": Config(**TOY | dict(batch_size=3, lr=1e-3, lr_steps=20, seed=38, optimizer="muon", weight_decay=0.1, grad_clip=1.0,
                                class_cond=True, num_classes=3, predict="v", use_new_attention_order=False)),
    "muon, matching": Config(**TOY | dict(batch_size=3, lr=1e-3, lr_steps=20, seed=39, noise_schedule="edm", predict="edm",
                                          optimizer="muon", consistency=True, consistency_steps=2, path_steps=4,
                                          matching_fraction=0.5)),
    "no average": Config(**TOY | dict(image_size=64, norm_groups=4, batch_size=2, ema_rate=0.0, seed=5,
                                      num_head_channels=32)),
}
PREDICTIONS = ("eps", "v", "x0", "flow", "edm")       # as the program numbers them
SCHEDULES = ("linear", "cosine", "flow", "edm")


def target_of(predict, alpha, sigma, x0, eps):
    """What a network is to predict of x = alpha x0 + sigma eps, as the papers have it."""
    if predict == "edm":  # Karras et al. 2022, equation 8 and table 1, of y = x0 + ratio eps; with alpha above 0
        data, ratio = 0.5, sigma / alpha
        c_skip, c_out = data**2 / (ratio**2 + data**2), ratio * data / (ratio**2 + data**2) ** 0.5
        return (x0 - c_skip * (x0 + ratio * eps)) / c_out
    return {"eps": eps, "v": alpha * eps - sigma * x0, "x0": x0, "flow": eps - x0}[predict]


RESUMED_FLAGS = TOY | dict(flip=True, lr_schedule="cosine", warmup_steps=3, lr=1e-3, weight_decay=0.01,
                           predict="v", ema_rate=0.9, batch_size=3, zero_terminal_snr=True, offset_noise=0.1,
                           class_cond=True, num_classes=3, cond_drop_prob=0.3, dropout=0.2,
                           use_scale_shift_norm=True, learn_sigma=True, resblock_updown=True, num_heads=2,
                           use_new_attention_order=False)
RESUMED = Config(**RESUMED_FLAGS)
QUICK = ("--num_samples", 1, "--sample_steps", 1)  # the grid at the end of a run costs next to nothing
LONG = 3600  # seconds, which only a program that hangs takes, on the busiest machine


def run(*command, status=0, timeout=LONG, **options):
    """Run a command, which must end with this status; returns the result with its output as text."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout,
                            **options)
    assert result.returncode == status, f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


# No test waits for a time to pass: it reads what a program prints until that has come to where it is to be disturbed. The
# program can't end meanwhile, however late the test comes, if it has more to print than its pipe holds, or than is left
# of the pipe by `fill`.

@contextlib.contextmanager
def started(*command, **options):
    """A process whose output, bytes, is read by the test alone, from pipes of a page. It does not outlive the test."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, pipesize=4096)
    with subprocess.Popen([str(word) for word in command], **pipes | options) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process, pattern):
    """Read lines of a process up to one that matches a regular expression of bytes; returns them."""
    lines = b""
    while not re.search(pattern, line := process.stdout.readline()):
        lines += line
        assert line, f"{process.args} ended with {process.wait()}:\n{lines.decode()}"
    return lines + line


def fill(process):
    """Fill the pipe that a process prints into: it waits at its next line until the test reads."""
    pipe = os.open(f"/proc/{process.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"\n")
    os.close(pipe)


def finish(process):
    """Read what a process prints to its end; returns that and its errors, as text."""
    output, errors = process.communicate(timeout=LONG)
    return output.decode(), (errors or b"").decode()


def wait_until(condition, process):
    """Until condition() holds of a process's doings, which must not end before."""
    while not condition():
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        time.sleep(0.005)


def is_among(number, sets, pid):
    """Whether a signal is in one of a process's sets of signals, as /proc names them."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return any(int(mask, 16) >> (number - 1) & 1 for mask in re.findall(rf"^(?:{sets}):\s*(\w+)", status, re.M))


def is_delivered(process, number):
    """Whether a signal that was sent to a process has reached it."""
    return not is_among(number, "SigPnd|ShdPnd", process.pid)


def is_handled(pid, number):
    """Whether a process has a handler for a signal."""
    return is_among(number, "SigCgt", pid)


def script(name, *flags, **options):
    """Run one of the Python programs."""
    return run(sys.executable, ROOT / name, *flags, **options)


def call(module, *flags):
    """Run the main() of one of the Python programs here; returns the sentence of a refusal or ''."""
    argv = sys.argv
    sys.argv = [module.__name__, *map(str, flags)]
    try:
        module.main()
    except UserError as error:
        return str(error)
    finally:
        sys.argv = argv
    return ""


def variant(name):
    if not os.access(VARIANTS[name], os.X_OK):
        pytest.skip(f"{VARIANTS[name]} is not built")
    return VARIANTS[name]


@functools.lru_cache
def why_not_on_gpu(precision):
    """Why tests of the GPU build can't run here; "" if they can."""
    if not torch.cuda.is_available() and not shutil.which("nvidia-smi"):
        return "no GPU on this machine"
    if not os.access(GPU[precision], os.X_OK):
        return f"{GPU[precision]} is not built"
    result = subprocess.run([GPU[precision], "--dry_run"], capture_output=True, text=True)
    if result.returncode:
        return f"{GPU[precision]} does not start: {result.stderr.strip()}"
    built = result.stdout.splitlines()[0]
    return "" if built.endswith(f": {precision}") else f"{GPU[precision]} is no GPU build in {precision}"


def on_gpu(precision):
    """The program built for this machine's GPU; skips the test where there is none."""
    why = why_not_on_gpu(precision)
    if why:
        pytest.skip(why)
    return GPU[precision]


SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def sanitized(tool, *command, exclude=None, **options):
    """Run a command under a tool of compute-sanitizer, which must find nothing; skips where that is not installed.
    exclude: a part of the names of a library's kernels, which it leaves out, and errors of CUDA that the library
    asks for (the program checks its own calls)."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not program:
        pytest.skip("compute-sanitizer is not installed")
    options_of_tool = ["--kernel-name-exclude", f"kernel_substring={exclude}"] if exclude else []
    options_of_tool += ["--report-api-errors", "no"] if exclude and tool == "memcheck" else []
    command = [program, "--tool", tool, "--error-exitcode", "1", *options_of_tool, *map(str, command)]
    with tempfile.TemporaryFile("w+") as log:  # a pipe would stay open in the program if the tool crashed
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=LONG, **options).returncode
        log.seek(0)
        output = log.read()
    assert status == 0 and re.search(r"SUMMARY: 0 (errors|hazards)", output), f"{tool}: {status}\n{output[-3000:]}"


def error_of(a, r):
    """The error of a tensor, see above: NaN where a or r holds one."""
    a, r = np.asarray(a, np.float64).ravel(), np.asarray(r, np.float64).ravel()
    assert a.shape == r.shape and len(r)
    difference = np.abs(a - r)
    return max(np.linalg.norm(difference) / np.linalg.norm(r), difference.max() / np.abs(r).max())


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def write_toy_images(path, n=11, size=8, seed=1, channels=3):
    """Random smooth pictures of three classes."""
    coarse = np.random.default_rng(seed).integers(0, 256, (n, channels, 4, 4)).astype(np.float32)
    fine = F.interpolate(torch.from_numpy(coarse), size=size, mode="bilinear").numpy()
    names = [("cat", "dog", "fox", "dog")[i % 4] for i in range(n)]
    unet_io.write_images(path, fine.astype(np.uint8), names)
    return str(path)


def checkpoint_in(folder, step):
    return pathlib.Path(folder) / f"checkpoint_{step:08d}.bin"


def state_in(path):
    """What a checkpoint holds of a run, whatever its length: weights, moments, averages, history."""
    checkpoint = unet_io.read_checkpoint(str(path))
    sections = checkpoint.sections
    numbers = {name: sections[name].tobytes() for name in unet_io.TENSOR_SECTIONS if name in sections}
    return checkpoint.step, checkpoint.smoothed_loss, sections["state"].pack(), numbers


def losses_in(folder):
    """Losses by step from metrics.jsonl, whose every line must be valid JSON."""
    lines = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def perturbed_file(path, config):
    """Write fresh weights plus N(0, 0.02^2): as initialised, nearly every gradient is zero. -> the model"""
    model = train_unet.perturb(train_unet.init_weights(train_unet.UNet(config), config.seed), config.seed)
    weights = train_unet.to_numpy(train_unet.file_order(model, model.parameters()))
    unet_io.write_checkpoint(path, Checkpoint(config, {"weights": weights}))
    return model


def write_earlier_version(path, checkpoint, version=2):
    """Write a Checkpoint as versions 1 and 2 of the format had it: the settings in fields of the header.

    tests/test_files.py compares the fields with those of a file that the program wrote at that time.
    """
    header, sections = np.zeros(256, "<i4"), dict(checkpoint.sections)
    floats, settings = header.view("<f4"), vars(checkpoint.config) | checkpoint.run
    for name, index in unet_io.OLD_FIELDS.items():
        value = settings.get(name, 0)
        if index >= 107 and version < 2:
            continue
        if name == "use_new_attention_order":
            value = not value
        if isinstance(value, str):
            choices = unet_io.RUN_SETTINGS.get(name, (str, None))[1] or unet_io.Config.__dataclass_fields__[name].metadata["choices"]
            value = choices.index(value)
        for i, number in enumerate(value if isinstance(value, tuple) else (value,)):
            place = unet_io.OLD_MORE_RATES + i - 1 if i and name == "ema_rate" else index + i
            if isinstance(number, float):
                floats[place] = number
            else:
                header[place] = np.uint32(number).view(np.int32)
    header[:2] = [checkpoint.config.magic, version]
    header[4:7] = [checkpoint.step, sections["weights"].size, checkpoint.tensors]
    floats[unet_io.OLD_LOSS], header[unet_io.OLD_LR_STEPS] = checkpoint.smoothed_loss, checkpoint.config.lr_steps
    files = {name: checkpoint.run[name] for name in ("data_file", "val_file", "model_weights", "guidance_interval")
             if name in checkpoint.run}
    blocks = {name: value.pack() if name == "state" else value.encode() if isinstance(value, str) else value.tobytes()
              for name, value in (sections | files).items()}
    for i, (name, block) in enumerate(blocks.items()):
        entry = name.encode().ljust(24, b"\0") + len(block).to_bytes(8, "little")
        header[128 + 8 * i:136 + 8 * i] = np.frombuffer(entry, "<i4")
        header[3] = i + 1
    data = b"".join(blocks.values())
    header[2] = np.uint32(zlib.crc32(header.tobytes(), zlib.crc32(data))).view(np.int32)
    pathlib.Path(path).write_bytes(header.tobytes() + data)


def write_setting(path, name, value):
    """Write another value into the section config of a weights file, whose length and checksum are right again."""
    data = path.read_bytes()
    header = np.frombuffer(data, "<i4", 256).copy()
    block = data[1024:]
    changed, count = re.subn(rb"\b%s = .*" % name.encode(), f"{name} = {value}".encode(), block)
    assert count == 1
    table = header[128:].tobytes()
    entry = 512 + table.index(b"config\0") + 24
    whole = bytearray(header.tobytes())
    length = int.from_bytes(whole[entry:entry + 8], "little") + len(changed) - len(block)
    whole[entry:entry + 8] = length.to_bytes(8, "little")
    whole[8:12] = bytes(4)
    whole[8:12] = zlib.crc32(whole, zlib.crc32(changed)).to_bytes(4, "little")
    path.write_bytes(bytes(whole) + changed)


def metrics_in(folder):
    """The lines of metrics.jsonl that hold a loss."""
    lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def start_flags(config, data, folder, steps, **more):
    words = [*flags_of(config), "--data_file", data, "--out_dir", folder, "--steps", steps, *QUICK]
    for name, value in more.items():
        words += [f"--{name}", value]
    return words


def first_gradients(program, perturbed_file, config, folder, data):
    """[ours, float64's, PyTorch's by autocast in bf16]: {tensor: gradient of step 0}, q, k and v apart; their losses.

    perturbed_file(path, config) writes the weights and returns PyTorch's model with them.
    """
    config = dataclasses.replace(config, beta1=0.0)  # then AdamW's first moment is the gradient
    start, out = folder / f"start {config.seed}.bin", folder / f"run {config.seed}"
    model = perturbed_file(start, config)
    run(program, *start_flags(config, data, out, 1, model_weights=start))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    flat = unet_io.read_checkpoint(str(checkpoint_in(out, 1)), type(config)).sections["adam_m"]
    assert len(flat) == sum(sizes.values())
    found = [dict(zip(sizes, np.split(flat, np.cumsum(list(sizes.values()))[:-1])))]
    losses, images = [losses_in(out)[1]], unet_io.read_images(str(data))
    batch, device = train_unet.make_batch(images, config, 0), "cuda" if torch.cuda.is_available() else "cpu"
    for precision, dtype in (("fp32", torch.float64), ("bf16", torch.float32)):
        trainer = train_unet.Trainer(model, images, config, device, dtype, precision)
        trainer.optimizer.zero_grad(set_to_none=True)
        loss = trainer.loss(*batch)
        loss.backward()
        losses.append(loss.item())
        found.append({name: p.grad.double().cpu().numpy().ravel() for name, p in trainer.model.named_parameters()})
    for gradients in found:
        for name in [name for name in sizes if ".qkv." in name]:
            gradients |= {f"{name} {part}": values for part, values in zip("qkv", np.split(gradients.pop(name), 3))}
    return found, losses


def check_gpu_gradients(program, precision, perturbed_file, config, folder, data):
    """Every parameter's gradient against float64: in fp32 below 1e-5; in bf16 less than twice as far as PyTorch's
    autocast, as the mean of three batches, for a tensor of a few elements may be right by luck. -> the tensors' names
    """
    errors = {}
    for seed in (3, 4, 5):
        (ours, exact, theirs), _ = first_gradients(program, perturbed_file, dataclasses.replace(config, seed=seed),
                                                   folder, data)
        largest = max(np.abs(values).max() for values in exact.values())
        for of, r in exact.items():
            if of.endswith(".qkv.bias k"):  # zero, by mathematics
                measured = [max(np.abs(a).max() / largest, 5e-7) for a in (ours[of], theirs[of])]
            else:
                measured = [error_of(a, r) for a in (ours[of], theirs[of])]
            errors.setdefault(of, []).append(measured)
    means = {of: np.mean(values, axis=0) for of, values in errors.items()}
    ratios = {of: m[0] / (m[1] if precision == "bf16" else 0.5e-5) for of, m in means.items()}
    for of in sorted(ratios, key=ratios.get)[-5:]:
        print(f"{of}: {means[of][0]:.2g}, PyTorch in bf16 {means[of][1]:.2g}")
    print("the median of all: {:.2g}, PyTorch {:.2g}".format(*np.median(list(means.values()), axis=0)))
    assert all(ratio < 2 for ratio in ratios.values())
    return list(ratios)


def picture(path):
    with Image.open(path) as image:
        assert image.format == "PNG" and image.mode in ("L", "RGB", "RGBA")
        return np.asarray(image).astype(int)


def refused(*command, status=1, says=(), **options):
    """The command must end with one sentence on stderr that holds every string of `says`."""
    result = run(*command, status=status, **options)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert "Traceback" not in result.stderr
    for text in [says] if isinstance(says, str) else says:
        assert str(text) in lines[0], (text, lines[0])
    return lines[0]


def settings(text):
    """The flags of a configuration file: a dict of texts."""
    return dict(re.findall(r"^(\w+) = ?(.*)$", text, re.M))


def effective(*flags):
    """The flags' values as ./train_unet --print_config tells them."""
    return settings(run(TRAIN, *flags, "--print_config").stdout)


def source_of_the_program():
    """The text of train_unet.cu and of the files that it includes."""
    return "".join((ROOT / name).read_text() for name in ("train_unet.cu", "unet_io.h", "unet_cpu.h"))


def stored_flags():
    """The rows of FLAGS in unet_io.h that a checkpoint stores, but names of files: {name: (kind, freedom, most, choices)}.
    """
    rows = re.findall(r'(?:FIELD|OPTIMISER)\((\w+)\), (\w+), \w+, (FREE|FIXED),\s+"[^"]*",\s+"[^"]*"'
                      r'(?:,\s+[-\w.]+, ([-\w.]+))?(?:,\s+"([^"]*)")?\}', source_of_the_program())
    return {name: (kind, freedom, float(most or 1), choices.split("|"))
            for name, kind, freedom, most, choices in rows if kind != "PATH"}


def another(name, value):
    """A value of the flag that is not `value` and that the flag takes."""
    kind, _, most, choices = stored_flags()[name]
    if name in ("channel_mult", "attention_resolutions"):  # lists
        return "2" if value != "2" else "1"
    if kind == "CHOICE":
        return next(choice for choice in choices if choice != value)
    if kind == "BOOL":
        return str(1 - int(value))
    if kind == "FLOAT":
        return "0.25" if value != "0.25" else "0.5"
    return str(int(value) + (1 if int(value) < most else -1))
