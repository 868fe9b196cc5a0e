"""Tests of train_unet against PyTorch and NumPy, of its files, and of the command lines.

    make test                      builds what is tested, sets up Python, runs this
    python test_unet.py            every test; the last line counts them, those that test_unet runs too
    python test_unet.py -k resume  those whose name contains "resume"; all of pytest's flags work

The error of a tensor is the larger of |a - r|_2 / |r|_2 and max|a - r| / max|r| against a reference r in
float64; float32 passes below 1e-5. Comparisons are written so that a NaN fails and one bad element fails.
The programs under test are those in this folder; the environment variables TRAIN_UNET, TEST_UNET,
TEST_UNET_ASAN, TEST_UNET_OWN, TEST_UNET_OPENBLAS and LADDERS name others. TRAIN_UNET is a build for the CPU;
the tests on a GPU take ./train_unet and build/train_unet_fp32, or TRAIN_UNET_BF16 and TRAIN_UNET_FP32.
"""
import collections
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import math
import os
import pathlib
import pty
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import types
import zipfile
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

import generate
import train_unet
import unet_io
from unet_io import Checkpoint, Config, Stream, UserError, flags_of

ROOT = pathlib.Path(__file__).resolve().parent
TRAIN = os.environ.get("TRAIN_UNET", str(ROOT / "train_unet"))
TEST = os.environ.get("TEST_UNET", str(ROOT / "test_unet"))
VARIANTS = {"asan": os.environ.get("TEST_UNET_ASAN", str(ROOT / "build/test_unet_asan")),
            "own": os.environ.get("TEST_UNET_OWN", str(ROOT / "build/test_unet_own")),
            "openblas": os.environ.get("TEST_UNET_OPENBLAS", str(ROOT / "build/test_unet_openblas")),
            "ladders": os.environ.get("LADDERS", str(ROOT / "build/ladders"))}

GPU = {"bf16": os.environ.get("TRAIN_UNET_BF16", str(ROOT / "train_unet")),
       "fp32": os.environ.get("TRAIN_UNET_FP32", str(ROOT / "build/train_unet_fp32"))}

SMALL = dict(image_size=4, num_channels=32, channel_mult=(1,), num_res_blocks=1, attention_resolutions=(),
             num_head_channels=8, norm_groups=8, batch_size=2)  # the smallest network that the flags allow
TOY = SMALL | dict(image_size=8, channel_mult=(1, 2), attention_resolutions=(4,), num_head_channels=16)
QUICK = ("--num_samples", 1, "--sample_steps", 1)  # the grid at the end of a run costs next to nothing


# ----------------------------------------------------------------------------------------------------
# harness

def run(*command, status=0, timeout=300, **options):
    """Run a command, which must end with this status; returns the result with its output as text."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout,
                            **options)
    assert result.returncode == status, f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def script(name, *flags, **options):
    """Run one of the Python programs."""
    return run(sys.executable, ROOT / name, *flags, **options)


@pytest.fixture
def cpp(record_property):
    """cpp(binary, *arguments) runs test_unet; its tests count instead of the function that asked for them."""
    def call(binary, *arguments, timeout=540):
        environment = dict(os.environ, UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1",
                           ASAN_OPTIONS="allocator_may_return_null=1")
        result = subprocess.run([binary, *map(str, arguments)], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=timeout, env=environment)
        print(result.stdout)
        closing = re.search(r"^(\d+) passed, (\d+) failed$", result.stdout, re.M)
        assert closing, f"{binary} {arguments} ended with {result.returncode}:\n{result.stdout[-3000:]}"
        passed, failed = map(int, closing.groups())
        lines = [line for line in result.stdout.splitlines() if line.startswith(("ok ", "FAIL "))]
        assert len(lines) == passed + failed and "runtime error" not in result.stdout, result.stdout
        record_property("passed", passed)
        record_property("failed", failed)
        bad = "\n".join(line for line in lines if line.startswith("FAIL"))
        assert passed + failed > 0 and failed == 0 and result.returncode == 0, bad or result.stdout
    return call


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


def error_of(a, r):
    """The error of a tensor, see above: NaN where a or r holds one."""
    a, r = np.asarray(a, np.float64).ravel(), np.asarray(r, np.float64).ravel()
    assert a.shape == r.shape and len(r)
    difference = np.abs(a - r)
    return max(np.linalg.norm(difference) / np.linalg.norm(r), difference.max() / np.abs(r).max())


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def write_toy_images(path, n=11, size=8, seed=1):
    """Random smooth pictures."""
    coarse = np.random.default_rng(seed).integers(0, 256, (n, 3, 4, 4)).astype(np.float32)
    fine = F.interpolate(torch.from_numpy(coarse), size=size, mode="bilinear").numpy()
    unet_io.write_images(path, fine.astype(np.uint8))
    return str(path)


@pytest.fixture(scope="session")
def images8(tmp_path_factory):
    return write_toy_images(tmp_path_factory.mktemp("data") / "toy8.bin")


@pytest.fixture(scope="session")
def images4(tmp_path_factory):
    return write_toy_images(tmp_path_factory.mktemp("data") / "toy4.bin", size=4)


@pytest.fixture(scope="session")
def images32(tmp_path_factory):
    return write_toy_images(tmp_path_factory.mktemp("data") / "toy32.bin", size=32)


def checkpoint_in(folder, step):
    return pathlib.Path(folder) / f"checkpoint_{step:08d}.bin"


def losses_in(folder):
    """Losses by step from metrics.jsonl, whose every line must be valid JSON."""
    lines = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def perturbed_file(path, config):
    """Write fresh weights plus N(0, 0.02^2): as initialised, nearly every gradient is zero. -> the model"""
    model = train_unet.perturb(train_unet.init_weights(train_unet.UNet(config), config.seed), config.seed)
    weights = train_unet.to_numpy(model.parameters())
    unet_io.write_checkpoint(path, Checkpoint(config, {"weights": weights}))
    return model


# ----------------------------------------------------------------------------------------------------
# the program's own tests

def test_unet_alone(cpp):
    cpp(TEST)


def test_unet_without_tests():
    for name in (["nonsense"], []):
        result = run(TEST, "--only", *name, status=2)
        assert re.fullmatch(r"error: .*no test's name contains.*\n", result.stderr) and not result.stdout


@pytest.mark.parametrize("name", ["own", "openblas"])
def test_unet_other_products(cpp, name):
    """The build with the other matrix product, without the readers, which don't depend on it."""
    cpp(variant(name), "--only", "")


@pytest.mark.parametrize("arguments", [("--only", "plan"), ("--fuzz", 3000, "--seed", 2)])
def test_unet_sanitized(cpp, arguments):
    """Plan and file readers under AddressSanitizer and UndefinedBehaviorSanitizer."""
    cpp(variant("asan"), *arguments)


# ----------------------------------------------------------------------------------------------------
# layers

class Layers:
    """Collects cases for `test_unet --layers`: inputs in float32, PyTorch's answers in float64."""
    def __init__(self, seed):
        self.tensors, self.generator = {}, torch.Generator().manual_seed(seed)

    def random(self, *shape, scale=1.0, offset=0.0):
        """Random values that are exact in float32, as a float64 leaf."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale + offset
        return values.float().double().requires_grad_()

    def add(self, name, args, inputs, outputs):
        """inputs, outputs: name -> tensor or None; args: the integers of the case."""
        assert f"{name}/args" not in self.tensors
        self.tensors[f"{name}/args"] = np.array(args, np.int32)
        for what, tensor in inputs.items():
            if tensor is not None:
                self.tensors[f"{name}/{what}"] = tensor.detach().numpy().astype(np.float32)
        for what, tensor in outputs.items():
            if tensor is not None:
                self.tensors[f"{name}/{what}"] = tensor.detach().numpy()


def nhwc(x):
    return x.permute(0, 2, 3, 1).contiguous()


def channels_last(x):
    """(B, C, T) -> (B, T, C)"""
    return x.transpose(1, 2).contiguous()


def add_embedding(layers, width, max_period, t):
    half = width // 2
    frequencies = max_period ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.tensor(t, dtype=torch.float64).reshape(-1, 1) * frequencies.reshape(1, -1)
    name = f"embedding {len(t)}x{width} period {max_period}"
    layers.add(name, [width, max_period], {}, dict(out=torch.cat([angles.cos(), angles.sin()], 1)))
    layers.tensors[f"{name}/t"] = np.array(t, np.int32)


def add_silu(layers, n, scale):
    x, dout = layers.random(n, scale=scale), layers.random(n)
    out = F.silu(x)
    out.backward(dout)
    layers.add(f"silu {n} scale {scale}", [], dict(x=x, dout=dout), dict(out=out, dx=x.grad))


def add_mse(layers, B, n, T=1000):
    """The weighted loss of B samples of n elements, its gradient, the loss by quartile of the timesteps."""
    x, target = layers.random(B, n), layers.random(B, n)
    weights = torch.rand(T, generator=layers.generator).double()
    t = torch.randint(T, (B,), generator=layers.generator)
    errors = (x - target).square().mean(1)
    loss = (weights[t] * errors).mean()
    loss.backward()
    quartile = t * 4 // T
    layers.add(f"mse {B}x{n} of {T}", [B, n, T], dict(x=x, target=target, weights=weights),
               dict(loss=loss.reshape(1), dx=x.grad, counts=torch.bincount(quartile, minlength=4).double(),
                    quartiles=torch.bincount(quartile, errors.detach(), minlength=4)))
    layers.tensors[f"mse {B}x{n} of {T}/t"] = t.numpy().astype(np.int32)


def add_linear(layers, M, C, C2, O, accumulate=False, residual=False, wants_dx=True):
    x, x2 = layers.random(M, C), layers.random(M, C2) if C2 else None
    w, b, dout = layers.random(O, C + C2, scale=(C + C2)**-0.5), layers.random(O), layers.random(M, O)
    added = layers.random(M, O) if residual else None
    start = {name: layers.random(*shape) for name, shape in
             dict(dx0=(M, C), dx20=(M, C2), dw0=(O, C + C2), db0=(O,)).items() if min(shape) > 0}
    out = F.linear(torch.cat([x, x2], 1) if C2 else x, w, b) + (added if residual else 0)
    out.backward(dout)
    outputs = dict(out=out, dw=w.grad + start["dw0"], db=b.grad + start["db0"])
    if wants_dx:
        outputs["dx"] = x.grad + (start["dx0"] if accumulate else 0)
        outputs["dx2"] = x2.grad + (start["dx20"] if accumulate else 0) if C2 else None
    name = f"linear {M}x{C}{f'+{C2}' if C2 else ''} to {O}{' add' * accumulate}{' residual' * residual}"
    layers.add(name, [M, C, C2, O, accumulate],
               dict(x=x, x2=x2, w=w, b=b, dout=dout, residual=added, **start), outputs)


def add_conv(layers, B, H, W, C, O, emb=False, residual="", wants_dx=True):
    """residual: "", "apart", or "in place" for one that already lies where the result goes."""
    x, w, b = layers.random(B, C, H, W), layers.random(O, C, 3, 3, scale=(9 * C)**-0.5), layers.random(O)
    embedding = layers.random(B, O) if emb else None
    added, dout = layers.random(B, O, H, W) if residual else None, layers.random(B, O, H, W)
    dw0, db0 = layers.random(O, C, 3, 3), layers.random(O)
    out = F.conv2d(x, w, b, padding=1) + (embedding[:, :, None, None] if emb else 0)
    out = out + (added if residual else 0)
    out.backward(dout)
    name = f"conv3x3 {B}x{H}x{W}x{C} to {O}{' emb' * emb}{' residual ' * bool(residual)}{residual}"
    layers.add(name, [B, H, W, C, O, residual == "in place"],
               dict(x=nhwc(x), w=nhwc(w), b=b, emb=embedding, residual=nhwc(added) if residual else None,
                    dout=nhwc(dout), dw0=nhwc(dw0), db0=db0),
               dict(out=nhwc(out), dx=nhwc(x.grad) if wants_dx else None, dw=nhwc(w.grad + dw0),
                    db=b.grad + db0, demb=embedding.grad if emb else None))


def add_norm(layers, B, T, C, C2, G, silu=True, accumulate=False, dresidual=False, offset=0.0):
    x = layers.random(B, C, T, offset=offset)
    x2 = layers.random(B, C2, T, scale=2.0, offset=1.0) if C2 else None
    K = C + C2
    w, b, dout = layers.random(K, offset=1.0, scale=0.3), layers.random(K), layers.random(B, K, T)
    branch = layers.random(B, C, T) if dresidual else None
    dx0, dx20 = layers.random(B, C, T), layers.random(B, C2, T) if C2 else None
    dw0, db0 = layers.random(K), layers.random(K)
    both = torch.cat([x, x2], 1) if C2 else x
    out = F.group_norm(both, G, w, b, eps=1e-5)
    out = F.silu(out) if silu else out
    out.backward(dout)
    grouped = both.detach().reshape(B, G, -1)
    rstd = (grouped.var(2, unbiased=False) + 1e-5).rsqrt()
    dx = x.grad + (branch if dresidual else 0) + (dx0 if accumulate else 0)
    name = (f"groupnorm {B}x{T}x{C}{f'+{C2}' if C2 else ''} in {G}{' silu' * silu}{' add' * accumulate}"
            f"{' branch' * dresidual}{f' mean {offset:g}' if offset else ''}")
    last = channels_last
    layers.add(name, [B, T, C, C2, G, silu, accumulate],
               dict(x=last(x), x2=last(x2) if C2 else None, w=w, b=b, dout=last(dout), dw0=dw0, db0=db0,
                    dresidual=last(branch) if dresidual else None, dx0=last(dx0),
                    dx20=last(dx20) if C2 else None),
               dict(out=last(out), mean=grouped.mean(2), rstd=rstd, dx=last(dx), dw=w.grad + dw0,
                    dx2=last(x2.grad + (dx20 if accumulate else 0)) if C2 else None, db=b.grad + db0))


def add_attention(layers, B, T, C, heads, scale=1.0):
    qkv, dout = layers.random(B, T, 3 * C, scale=scale), layers.random(B, T, C)
    q, k, v = qkv.reshape(B, T, 3, heads, C // heads).permute(2, 0, 3, 1, 4)  # (B, heads, T, d) each
    scores = q @ k.transpose(-1, -2) * (C // heads)**-0.5
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)
    out.backward(dout)
    layers.add(f"attention {B}x{T}x{C} in {heads}", [B, T, C, heads], dict(qkv=qkv, dout=dout),
               dict(out=out, lse=scores.logsumexp(-1), dqkv=qkv.grad))


def add_resample(layers, kind, B, H, W, C, accumulate=False):
    x = layers.random(B, C, H, W)
    out = F.avg_pool2d(x, 2) if kind == "downsample" else F.interpolate(x, scale_factor=2, mode="nearest")
    dout, dx0 = layers.random(*out.shape), layers.random(B, C, H, W)
    out.backward(dout)
    layers.add(f"{kind} {B}x{H}x{W}x{C}{' add' * accumulate}", [B, H, W, C, accumulate],
               dict(x=nhwc(x), dout=nhwc(dout), dx0=nhwc(dx0)),
               dict(out=nhwc(out), dx=nhwc(x.grad + (dx0 if accumulate else 0))))


def layer_cases():
    """Every layer at the model's shapes and at odd ones."""
    layers = Layers(1)
    add_embedding(layers, 64, 10000, [0, 1, 17, 500, 999])
    add_embedding(layers, 64, 10000, [(37 * i + 5) % 1000 for i in range(32)])  # B = half
    add_embedding(layers, 32, 1000, [999])
    add_embedding(layers, 2, 2, [3, 99999])
    for n, scale in ((1, 1), (4097, 3), (1000, 60)):
        add_silu(layers, n, scale)
    for B, n, T in ((1, 1, 1000), (3, 4096, 1000), (2, 4097, 7), (33, 192, 30), (1, 24577, 2)):
        add_mse(layers, B, n, T)
    add_linear(layers, 32, 64, 0, 256, wants_dx=False)
    add_linear(layers, 33, 256, 0, 64, accumulate=True)
    add_linear(layers, 1, 256, 0, 256)
    add_linear(layers, 1024, 192, 0, 576)
    add_linear(layers, 515, 128, 64, 128)
    add_linear(layers, 257, 33, 17, 65, accumulate=True)
    add_linear(layers, 300, 5, 3, 7, residual=True)
    add_linear(layers, 64, 96, 0, 96, residual=True)
    add_linear(layers, 7, 1, 0, 1)
    add_conv(layers, 1, 64, 64, 64, 64, emb=True)
    add_conv(layers, 1, 32, 32, 3, 64, wants_dx=False)
    add_conv(layers, 1, 32, 32, 64, 3)
    add_conv(layers, 2, 16, 16, 192, 128, emb=True)
    add_conv(layers, 1, 8, 8, 512, 256, emb=True)
    add_conv(layers, 2, 8, 8, 64, 96, residual="apart")
    add_conv(layers, 2, 8, 8, 64, 96, residual="in place")
    add_conv(layers, 3, 9, 4, 33, 17, emb=True, residual="apart")
    add_conv(layers, 2, 7, 5, 3, 35, wants_dx=False)
    add_conv(layers, 1, 1, 1, 32, 32, emb=True)
    add_conv(layers, 4, 2, 3, 5, 7, residual="in place")
    add_conv(layers, 2, 1, 13, 2, 1)
    add_norm(layers, 1, 4096, 64, 0, 32)
    add_norm(layers, 2, 256, 128, 64, 32)              # groups of 6 straddle the two inputs at 128
    add_norm(layers, 2, 64, 256, 0, 32, silu=False, dresidual=True)
    add_norm(layers, 2, 256, 192, 128, 32, accumulate=True)
    add_norm(layers, 1, 49, 35, 13, 8, accumulate=True)
    add_norm(layers, 3, 5, 10, 0, 5, dresidual=True)
    add_norm(layers, 2, 17, 32, 0, 1, accumulate=True, dresidual=True)
    add_norm(layers, 1, 100, 1, 3, 2, silu=False)
    add_norm(layers, 2, 130, 200, 56, 1)               # a group longer than a work item
    add_norm(layers, 2, 64, 64, 0, 8, offset=30.0)     # sums of squares would cancel
    add_attention(layers, 2, 64, 256, 8)
    add_attention(layers, 1, 256, 192, 6)
    add_attention(layers, 2, 65, 64, 2, scale=3.0)     # a sharp softmax
    add_attention(layers, 3, 7, 12, 3)
    add_attention(layers, 1, 49, 8, 8)
    add_attention(layers, 1, 100, 96, 1)
    add_attention(layers, 2, 1, 32, 2)
    add_attention(layers, 1, 4225, 4, 1)               # so many pixels that fewer rows fit at a time
    for kind in ("upsample", "downsample"):
        add_resample(layers, kind, 2, 16, 16, 64)
        add_resample(layers, kind, 3, 2, 6, 5, accumulate=True)
        add_resample(layers, kind, 1, 2, 2, 1)
    return layers.tensors


def test_layers(cpp, tmp_path):
    unet_io.write_tensors(tmp_path / "layers.bin", layer_cases())
    cpp(TEST, "--layers", tmp_path / "layers.bin")
    for name in ("own", "openblas"):
        if os.access(VARIANTS[name], os.X_OK):
            cpp(VARIANTS[name], "--layers", tmp_path / "layers.bin")


# ----------------------------------------------------------------------------------------------------
# the model

MODELS = {
    "toy": Config(**TOY),
    "tiny": Config(**{name: value for name, value in unet_io.PRESETS["tiny"].items()
                      if name in {field.name for field in dataclasses.fields(Config)}} | dict(batch_size=2)),
    "32 groups": Config(**TOY | dict(image_size=16, num_channels=64, norm_groups=32, num_res_blocks=2,
                                     attention_resolutions=(16, 8), num_head_channels=32, seed=7)),
    "narrowing": Config(**TOY | dict(channel_mult=(2, 1), attention_resolutions=(), norm_groups=4, seed=8,
                                     batch_size=3, predict="v", noise_schedule="cosine")),
    "three blocks": Config(**TOY | dict(image_size=12, channel_mult=(1, 3), num_res_blocks=3, seed=9,
                                        attention_resolutions=(12, 6), max_period=1000, batch_size=1)),
    "four levels": Config(**TOY | dict(image_size=16, channel_mult=(1, 1, 2, 2), batch_size=3, seed=10,
                                       attention_resolutions=(8, 2))),
}


def check_model(cpp, tmp_path, config):
    train_unet.debug_state(str(tmp_path / "debug"), config)
    cpp(TEST, "--model", tmp_path / "debug_weights.bin", tmp_path / "debug_state.bin")


@pytest.mark.parametrize("name", MODELS)
def test_model(cpp, tmp_path, name):
    """Output, loss and every gradient, q, k and v apart, against PyTorch in float64."""
    check_model(cpp, tmp_path, MODELS[name])


def test_default_model(cpp, tmp_path):
    config = Config(batch_size=1, seed=3)
    check_model(cpp, tmp_path, config)
    # the file of weights that all of this started from: header and names agree between the two programs
    assert sum(p.numel() for p in train_unet.UNet(config).parameters()) == 20494211


def test_timesteps_of_a_batch(cpp, tmp_path):
    """As many images as frequencies, B = half = 32: each sample must still have its own timestep."""
    config = Config(**SMALL | dict(num_channels=64, batch_size=32))
    rows = np.arange(32)
    config.seed = next(seed for seed in range(1000)
                       if len(set(unet_io.timesteps(seed, rows, 0, config.diffusion_steps).tolist())) == 32)
    check_model(cpp, tmp_path, config)


# ----------------------------------------------------------------------------------------------------
# training

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
    "no average": Config(**TOY | dict(image_size=64, norm_groups=4, batch_size=2, ema_rate=0.0, seed=5,
                                      num_head_channels=32)),
}


@pytest.mark.parametrize("name", TRAINING)
def test_training(tmp_path, name):
    """20 AdamW steps from the same seed: the same losses to 1e-5, the same weights, the same average."""
    config, steps = TRAINING[name], 20
    data = str(ROOT / "data/faces.bin")
    model = perturbed_file(tmp_path / "start.bin", config)
    start = np.concatenate([p.ravel() for p in train_unet.to_numpy(model.parameters())])
    run(TRAIN, *flags_of(config), "--model_weights", tmp_path / "start.bin", "--data_file", data,
        "--steps", steps, "--log_every", 1, "--out_dir", tmp_path / "run", *QUICK)
    theirs = np.array([losses_in(tmp_path / "run")[step] for step in range(1, steps + 1)])

    trainer = train_unet.Trainer(model, unet_io.read_images(data), config)
    ours = np.array([trainer.step() for _ in range(steps)])
    worst = np.abs(theirs / ours - 1).max()
    print(f"losses {ours[0]:.4f} ... {ours[-1]:.4f}, largest relative difference {worst:.2g}")
    assert worst < 1e-5
    assert len(set(ours.round(6))) == steps

    # Adam moves an element whose gradient is rounding noise by a full step in a random direction, so the
    # weights are compared by how far they went together, not one by one
    file = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", steps)))
    sections = {"weights": trainer.parameters} | dict(zip(unet_io.EMA_SECTIONS, trainer.emas))
    assert set(file.sections) == {*sections, "adam_m", "adam_v", "state", "data_file", "model_weights"}
    for section, tensors in sections.items():
        flat = np.concatenate([p.ravel() for p in train_unet.to_numpy(tensors)])
        away = np.linalg.norm(file.sections[section] - flat) / np.linalg.norm(flat - start)
        print(f"{section}: {away:.2g} of the way apart")
        assert away < 2e-3
    assert file.step == steps and file.config.seed == config.seed


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


def metrics_in(folder):
    """The lines of metrics.jsonl that hold a loss."""
    lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


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
        memory.append(float(re.search(r"([\d.]+) MB in all", text)[1]))
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
        x0, t, noise = train_unet.make_batch(images, config, step)
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


# ----------------------------------------------------------------------------------------------------
# the twin: random numbers, schedules, samplers, learning rates

def int32(values):
    return np.asarray(values, np.uint64).astype(np.uint32).view(np.int32)


def respaced_sampler(T, schedule, predict, sampler, count):
    """The sampler's numbers from the published formulas, written another way than in the programs.

    Respacing as in guided-diffusion: the betas that are left are derived from the products that are left,
    then Ho et al. 2020, equation 7, or Song et al. 2021, equation 12. float64 (count, 6), last timestep
    first: the timestep; x0 = n1 x + n2 out; x <- n3 x0 + n4 x + n5 noise.
    """
    if schedule == "linear":
        betas = np.minimum(np.linspace(1e-4 * 1000 / T, 0.02 * 1000 / T, T), 0.999)
    else:
        def bar(s):
            return np.cos((s + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.array([min(1 - bar((i + 1) / T) / bar(i / T), 0.999) for i in range(T)])
    products = np.cumprod(1 - betas)
    stride, place, kept = (T - 1) / (count - 1) if count > 1 else 1, 0.0, []
    for _ in range(count):
        kept.append(round(place))
        place += stride
    left, last = [], 1.0
    for t in kept:
        left.append(1 - products[t] / last)
        last = products[t]
    alphas = 1 - np.array(left)
    bar, rows = np.cumprod(alphas), []
    for i in reversed(range(count)):
        before = bar[i - 1] if i else 1.0
        n1, n2 = ((np.sqrt(bar[i]), -np.sqrt(1 - bar[i])) if predict == "v"
                  else (1 / np.sqrt(bar[i]), -np.sqrt(1 / bar[i] - 1)))
        if sampler == "ddpm":
            n3 = left[i] * np.sqrt(before) / (1 - bar[i])
            n4 = (1 - before) * np.sqrt(alphas[i]) / (1 - bar[i])
            n5 = np.sqrt(left[i] * (1 - before) / (1 - bar[i])) if i else 0.0
        else:  # x = sqrt(before) x0 + sqrt(1 - before) eps with eps = (x - sqrt(bar) x0) / sqrt(1 - bar)
            n4, n5 = np.sqrt((1 - before) / (1 - bar[i])), 0.0
            n3 = np.sqrt(before) - n4 * np.sqrt(bar[i])
        rows.append([kept[i], n1, n2, n3, n4, n5])
    return np.array(rows)


class Network:
    """A made-up network, the same in test_unet.cu: it takes x for noise on a picture 1.6 tanh(x + t / 2T)."""
    def __init__(self, config):
        self.config = config
        self.abar = unet_io.alphas_bar(config.diffusion_steps, config.noise_schedule,
                                       config.zero_terminal_snr)

    def __call__(self, x, t):
        a, x = self.abar[int(t[0])], x.double()
        x0 = 1.6 * torch.tanh(x + int(t[0]) / self.config.diffusion_steps / 2)
        eps = (x - np.sqrt(a) * x0) / np.sqrt(1 - a)
        v = np.sqrt(a) * eps - np.sqrt(1 - a) * x0
        return {"eps": eps, "v": v, "x0": x0}[self.config.predict].float()


def chain_cases(add):
    """Whole pictures by every sampler from the made-up network."""
    for sampler, flags, predict, schedule, zero in (
            ("ddim", {}, "eps", "linear", False), ("ddim", dict(eta=0.7), "v", "cosine", False),
            ("ddim", dict(eta=1.0, threshold="dynamic"), "v", "linear", True),
            ("ddpm", {}, "x0", "linear", True), ("ddpm", dict(threshold="none"), "eps", "linear", False),
            ("dpmpp", {}, "v", "cosine", True), ("dpmpp", dict(threshold="dynamic"), "eps", "linear", False),
            ("dpmpp", dict(sample_steps=1), "x0", "cosine", False),
            ("dpmpp", dict(sample_steps=2), "v", "linear", False),
            ("heun", {}, "eps", "linear", False), ("heun", dict(threshold="dynamic"), "x0", "cosine", False),
            ("heun", dict(threshold="none", sample_steps=40), "v", "linear", True)):
        config = Config(**TOY | dict(image_size=9, channel_mult=(1,), diffusion_steps=300, predict=predict,
                                     zero_terminal_snr=zero, noise_schedule=schedule))
        pictures = train_unet.sample(Network(config), [5, 4000000000], sampler, **flags).numpy()
        assert np.isfinite(pictures).all() and pictures.std() > 0.1
        args = [["eps", "v", "x0"].index(predict), schedule == "cosine", zero,
                list(train_unet.SAMPLERS).index(sampler), flags.get("sample_steps", 0),
                ["clamp", "dynamic", "none"].index(flags.get("threshold", "clamp")), 300, 9, 5, 4000000000]
        name = " ".join(["chain", sampler, predict, schedule, *map(str, flags.values()), *["to 0"] * zero])
        add(name, args, pictures.reshape(-1), reals=np.array([flags.get("eta", 0.0)]))


def twin_cases():
    tensors = {}

    def add(name, args, values, **others):
        for what, value in dict(args=np.array(args), values=values, **others).items():
            value = np.asarray(value)
            if value.dtype not in (np.float32, np.float64):
                value = int32(value)
            tensors[f"{name}/{what}"] = value

    for stream in Stream:
        add(f"words {stream.name}", [2**32 - 5, stream, 3, 99], unet_io.words(2**32 - 5, stream, 1001, 3, 99))
    for seed, sample, step in ((0, 0, 0), (1, 31, 19999), (2**32 - 1, 2**31 + 7, 2**32 - 1)):
        add(f"words {seed} {sample} {step}", [seed, Stream.NOISE, sample, step],
            unet_io.words(seed, Stream.NOISE, 400, sample, step))
        add(f"normals {seed} {sample} {step}", [seed, Stream.NOISE, sample, step],
            unet_io.normals(seed, Stream.NOISE, 12289, sample, step))
    for T in (1000, 17, 4000):
        add(f"timesteps of {T}", [5, Stream.TIMESTEP, 7, T], unet_io.timesteps(5, np.arange(100), 7, T))
    for schedule, predict, gamma in (("linear", "eps", 5), ("linear", "v", 5), ("cosine", "x0", 1.5),
                                     ("cosine", "v", 0), ("cosine", "eps", 20)):
        # the published formula, w = min(SNR, gamma) / r with r = 1, SNR, SNR + 1 for x0, eps, v
        abar = unet_io.alphas_bar(200, schedule)
        snr = abar / (1 - abar)
        ratio = {"x0": 1, "eps": snr, "v": snr + 1}[predict]
        weights = np.minimum(snr, gamma) / ratio if gamma else np.ones(200)
        assert np.abs(unet_io.loss_weights(abar, predict, gamma) / weights - 1).max() < 1e-12
        choices = [200, schedule == "cosine", ("eps", "v", "x0").index(predict)]
        add(f"weights {schedule} {predict} {gamma}", choices, weights, reals=np.array([float(gamma)]))
    for epoch, n in ((0, 1), (3, 2), (1, 78), (123456, 1626)):
        add(f"permutation {epoch} of {n}", [2**31 + 1, epoch], unet_io.permutation(2**31 + 1, epoch, n))
    add("batches across epochs", [6, 7],
        np.concatenate([unet_io.batch_indices(6, step, 5, 7) for step in range(6)]))
    for T, schedule in ((1000, "linear"), (1000, "cosine"), (100, "linear"), (20, "linear"), (77, "cosine")):
        for zero in (False, True):
            add(f"abar {schedule} {T} zero {zero}", [T, schedule == "cosine", zero],
                unet_io.alphas_bar(T, schedule, zero))
    for T, schedule, predict, sampler, count in (
            (1000, "linear", "eps", "ddim", 50), (1000, "linear", "eps", "ddpm", 1000),
            (1000, "cosine", "v", "ddim", 50), (1000, "cosine", "v", "ddpm", 250),
            (100, "linear", "v", "ddim", 1), (100, "cosine", "eps", "ddpm", 7),
            (500, "linear", "eps", "ddim", 499)):
        add(f"sampler {schedule} {T} {predict} {sampler} {count}",
            [T, schedule == "cosine", predict == "v", sampler == "ddpm", count],
            respaced_sampler(T, schedule, predict, sampler, count).reshape(-1))
    chain_cases(add)
    at = [0, 1, 2, 4, 5, 6, 9, 10, 50, 98, 99, 100, 101, 5000]
    kinds = ("constant", "cosine", "linear")
    for schedule, warmup, length, last, skipped in (
            ("constant", 0, 100, 0.5, 0), ("constant", 10, 100, 0, 0), ("cosine", 0, 100, 0, 0),
            ("cosine", 10, 100, 0, 0), ("cosine", 100, 100, 0.25, 0), ("cosine", 200, 100, 0.25, 0),
            ("cosine", 10, 100, 0.25, 0), ("linear", 0, 100, 0, 0), ("linear", 10, 100, 0.1, 4),
            ("linear", 100, 100, 0.1, 0), ("linear", 200, 100, 0.1, 0)):
        config = Config(lr=3e-4, lr_schedule=schedule, warmup_steps=warmup, lr_steps=length,
                        final_lr_fraction=last, ema_rate=(0.995, 0.9))
        steps = [s for s in at if s >= skipped]
        values = [[unet_io.learning_rate(config, s), *(1 - unet_io.ema_decay(rate, s - skipped)
                                                       for rate in config.ema_rate)] for s in steps]
        add(f"rate {schedule} warm-up {warmup} of {length} to {last}, {skipped} skipped",
            [kinds.index(schedule), warmup, length, skipped], np.array(values).reshape(-1),
            reals=np.array([3e-4, last, *config.ema_rate]), at=steps)
    return tensors


def test_twin(cpp, tmp_path):
    unet_io.write_tensors(tmp_path / "twin.bin", twin_cases())
    cpp(TEST, "--twin", tmp_path / "twin.bin")


def test_device_twin(images8):
    """The random numbers that PyTorch makes on its device: the integers equal, the batches to 2e-6."""
    for seed, stream, step in ((0, Stream.NOISE, 0), (2**32 - 1, Stream.PERTURB, 9), (7, Stream.FLIP, 2**31)):
        rows = torch.tensor([0, 1, 31, 2**31 + 5])
        words = train_unet.device_words(seed, stream, 400, rows, torch.tensor([step]))
        assert np.array_equal(words.numpy(), unet_io.words(seed, stream, 400, rows.numpy(), step))
    config = Config(**TOY | dict(flip=True, batch_size=5, seed=3, offset_noise=0.2))
    images = unet_io.read_images(images8)
    replayed = train_unet.DeviceReplay(train_unet.UNet(config), images, config, 7, "cpu")
    for step in range(7):
        for ours, theirs in zip(replayed.batch(), train_unet.make_batch(images, config, step)):
            assert ours.dtype == torch.from_numpy(theirs).dtype and ours.shape == theirs.shape
            assert np.abs(ours.numpy() - theirs).max() <= (2e-6 if ours.is_floating_point() else 0)
        replayed.step_index += 1


def test_compare_quality(tmp_path, images8):
    """Both programs from fresh weights, with everything that may vary from step to step."""
    config = dataclasses.replace(RESUMED, ema_rate=0.0)
    result = script("train_unet.py", "--compare_quality", tmp_path / "x/curves.jsonl", *flags_of(config),
                    "--steps", 12, "--data_file", images8, "--device", "cpu")
    assert "within 1%: the losses fall alike" in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "x/curves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(abs(line["train_unet"] / line["pytorch"] - 1) < 1e-5 for line in lines)


def test_schedule_by_known_values():
    """The published schedule's ends, and guided-diffusion's choice of 10 of 1000 timesteps."""
    abar = unet_io.alphas_bar(1000, "linear")
    assert abs(abar[0] - 0.9999) < 1e-12 and abs(abar[-1] - 4.0358e-5) < 1e-8
    # zero terminal SNR, from the paper's algorithm by way of its betas
    alphas = (np.sqrt(abar) - np.sqrt(abar[-1])) / (np.sqrt(abar[0]) - np.sqrt(abar[-1])) * np.sqrt(abar[0])
    alphas = alphas**2
    betas = 1 - np.append(alphas[0], alphas[1:] / alphas[:-1])
    rescaled = unet_io.alphas_bar(1000, "linear", True)
    assert np.abs(np.cumprod(1 - betas) - rescaled).max() < 1e-12
    assert rescaled[-1] == 0 and abs(rescaled[0] - abar[0]) < 1e-15 and (np.diff(rescaled) < 0).all()
    assert unet_io.space_timesteps(1000, 10).tolist() == [0, 111, 222, 333, 444, 555, 666, 777, 888, 999]
    assert unet_io.space_timesteps(1000, 1).tolist() == [0]


@pytest.mark.parametrize("schedule, zero", [("linear", False), ("cosine", False), ("linear", True)])
def test_order_of_samplers(schedule, zero):
    """Of data N(0.3, 0.5^2) the perfect network and the exact picture of a noise are known. Twice the steps:
    half the error of a sampler of first order, a quarter of one of second."""
    class Perfect(Network):
        def __call__(self, x, t):
            a = self.abar[int(t[0])]
            x0 = 0.3 + 0.25 * np.sqrt(a) / (0.25 * a + 1 - a) * (x.double() - 0.3 * np.sqrt(a))
            return np.sqrt(a) * (x - np.sqrt(a) * x0) / np.sqrt(1 - a) - np.sqrt(1 - a) * x0

    config = Config(**TOY | dict(diffusion_steps=4000, predict="v", noise_schedule=schedule,
                                 zero_terminal_snr=zero))
    network, seeds = Perfect(config), [1, 2]
    # the noise of picture y at the first timestep is the same multiple of its standard deviation
    a = network.abar[-1]
    z = train_unet.seed_noise(seeds, (3, 8, 8)).double()
    exact = 0.3 + 0.5 * (z - 0.3 * np.sqrt(a)) / np.sqrt(0.25 * a + 1 - a)
    for sampler, least, most in (("ddim", 1.9, 2.1), ("dpmpp", 3, 6), ("heun", 3.7, 6)):
        drawn = [train_unet.sample(network, seeds, sampler, n, threshold="none") for n in (100, 200)]
        errors = [float((x - exact).abs().max()) for x in drawn]
        print(sampler, errors)
        assert least < errors[0] / errors[1] < most and errors[1] < 0.03


@pytest.mark.parametrize("seed", [0, 2**32 - 2])
def test_initial_weights(tmp_path, images8, seed):
    """Both programs draw the same weights, to the bit; as PyTorch would: bounds, zeros, ones."""
    config = Config(**TOY | dict(seed=seed))
    run(TRAIN, *flags_of(config), "--steps", 0, "--data_file", images8, "--out_dir", tmp_path / "run", *QUICK)
    file = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", 0)))
    model = train_unet.init_weights(train_unet.UNet(config), seed)
    parameters = dict(model.named_parameters())
    flat = np.concatenate([p.ravel() for p in train_unet.to_numpy(parameters.values())])
    assert same_bits(file.sections["weights"], flat) and same_bits(file.sections["ema"], flat)
    assert not file.sections["adam_m"].any() and not file.sections["adam_v"].any()
    assert file.tensors == len(parameters) and file.step == 0
    fresh = dict(train_unet.UNet(config).named_parameters())  # as PyTorch draws them
    for name, parameter in parameters.items():
        values, theirs, n = parameter.detach(), fresh[name].detach(), parameter.numel()
        if theirs.unique().numel() == 1:  # zeros and ones
            assert torch.equal(values, theirs), name
            continue
        bound = model.get_submodule(name.rpartition(".")[0]).weight[0].numel() ** -0.5
        for drawn in (values, theirs):
            assert drawn.abs().max() <= bound * 1.000001, name
            assert abs(drawn.std() / bound * 3**0.5 - 1) < 0.05 + 4 / n**0.5, name
            assert abs(drawn.mean() / bound) < 0.02 + 4 / n**0.5, name


def test_flags_of_both_programs(tmp_path):
    """./train_unet --help and unet_io.Config agree on defaults; train_unet.py's file needs no flags again."""
    text = run(TRAIN, "--help").stdout
    listed = dict(re.findall(r"^  --(\w+) .*?(?:\(default ([^)]*)\))?$", text, re.M))
    for field in dataclasses.fields(Config):
        if not field.metadata["help"]:
            continue
        default = field.default
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        if field.type is bool:
            assert not default and field.name in listed
        elif field.type is float:
            assert float(listed[field.name]) == default, field.name
        else:
            assert listed[field.name] == str(default), field.name
    for config in (TRAINING["clipping, linear, averages"], TRAINING["no average"]):  # and back
        assert train_unet.parse_flags([*flags_of(config), "--steps", "20"])[1] == dataclasses.replace(
            config, lr_steps=20)
    shared = {field.name for field in dataclasses.fields(Config)} | train_unet.RUN_FLAGS.keys()
    standard = effective()
    for preset, values in unet_io.PRESETS.items():
        theirs = effective("--preset", preset)
        assert {name for name in shared & theirs.keys() if theirs[name] != standard[name]} <= values.keys()
        for name, value in values.items():
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            assert theirs[name] == str(shown) or float(theirs[name]) == float(shown), (preset, name)
        for name in ("data_file", "val_file"):
            assert not theirs[name] or (ROOT / f"{theirs[name]}.gz").exists(), (preset, name)
    listed = re.search(r"^Presets\n(.*)", text, re.M | re.S).group(1)
    assert re.findall(r"^  (\w+):", listed, re.M) == list(unet_io.PRESETS)


# ----------------------------------------------------------------------------------------------------
# configuration files

def settings(text):
    """The flags of a configuration file without quotes: a dict of texts."""
    return dict(re.findall(r"^(\w+) = ?(.*)$", text, re.M))


def effective(*flags):
    """The flags' values as ./train_unet --print_config tells them."""
    return settings(run(TRAIN, *flags, "--print_config").stdout)


def stored_flags():
    """The rows of FLAGS in train_unet.cu that a checkpoint stores: {name: (kind, freedom, most, choices)}."""
    text = (ROOT / "train_unet.cu").read_text()
    rows = re.findall(r'\{"(\w+)", FLAG_(\w+), GROUP_\w+, (FREE|FIXED), ([1-9]\d*), AT\(\w+\),\s+"[^"]*",'
                      r'\s+[-\w.]+,\s+([-\w.]+),\s+(0|"[^"]*"),', text)
    return {name: (kind, freedom, float(most), choices.strip('"').split("|"))
            for name, kind, freedom, _, most, choices in rows}


def another(name, value):
    """A value of the flag that is not `value` and that the flag takes."""
    kind, _, most, choices = stored_flags()[name]
    if kind == "CHOICE":
        return next(choice for choice in choices if choice != value)
    if kind == "BOOL":
        return str(1 - int(value))
    if "FLOAT" in kind:
        return "0.25" if value != "0.25" else "0.5"
    if kind == "LIST":
        return "2" if value != "2" else "1"
    return str(int(value) + (1 if int(value) < most else -1))


def test_config_precedence(tmp_path):
    """defaults < preset < file < typed, wherever the preset is named; comments, both ways to write a line."""
    path = tmp_path / "my settings.txt"
    path.write_text("# a comment\n\n  steps 77   # another\nlr = 5e-4\npreset tiny\nout_dir = a b # c\n"
                    "flip=true\n")
    flags = effective("--steps", 99, "--config", path)
    assert (flags["steps"], flags["lr"], flags["batch_size"], flags["num_channels"], flags["flip"]) == (
        "99", "0.0005", "8", "32", "1")
    assert flags["out_dir"] == "a b"
    assert effective("--config", path, "--preset", "small32")["batch_size"] == "64"
    assert effective("--config", path)["steps"] == "77"


@pytest.mark.parametrize("preset", unet_io.PRESETS)
def test_print_config(tmp_path, preset):
    """What --print_config writes is what it reads; grouped as in --help."""
    printed = run(TRAIN, "--preset", preset, "--print_config").stdout
    (tmp_path / "printed.txt").write_text(printed)
    assert run(TRAIN, "--config", tmp_path / "printed.txt", "--print_config").stdout == printed
    assert [line for line in re.findall(r"^# (\w+)$", printed, re.M)] == ["Files", "Model", "Diffusion",
                                                                          "Training", "Sampling"]
    assert stored_flags().keys() <= settings(printed).keys()


@pytest.mark.parametrize("text, status, says", [
    ("lr 1e-4\n\nbatchsize 4\n", 2, [", line 3: ", "'batchsize'", "batch_size?"]),
    ("--lr 1e-4\n", 2, [", line 1: ", "'--lr'", "mean lr?"]), ("lr = fast\n", 2, [", line 1: ", "'fast'"]),
    ("# x\nlr =   # nothing\n", 2, [", line 2: ", "--lr", "''"]),
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
    assert not list((tmp_path / "run").iterdir())
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
    assert texts[0].replace(f'out_dir = "{folder}"', f"out_dir = {other}") == texts[1]
    # the commands that the end prints can be pasted
    words = re.search(r"^pictures: +\./train_unet (.+)$", again.stdout, re.M).group(1)
    subprocess.run(f"{TRAIN} {words} --output_name {tmp_path}/p.png --sample_steps 1", shell=True, check=True,
                   capture_output=True)
    first = run(TRAIN, "--resume", folder).stdout
    words = re.search(r"^continue: +\./train_unet (.+)$", first, re.M).group(1)
    assert words.endswith("--steps 12 --lr_schedule constant")  # the cosine has come to its end
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


# ----------------------------------------------------------------------------------------------------
# resuming, and being killed

def start_flags(config, data, folder, steps, **more):
    words = [*flags_of(config), "--data_file", data, "--out_dir", folder, "--steps", steps, *QUICK]
    for name, value in more.items():
        words += [f"--{name}", value]
    return words


RESUMED_FLAGS = TOY | dict(flip=True, lr_schedule="cosine", warmup_steps=3, lr=1e-3, weight_decay=0.01,
                           predict="v", ema_rate=0.9, batch_size=3, zero_terminal_snr=True, offset_noise=0.1)
RESUMED = Config(**RESUMED_FLAGS)


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
    assert found == expected and list(first.sections)[:7] == list(unet_io.TENSOR_SECTIONS)
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
threshold = dynamic
"""


def test_everything_at_once(tmp_path, images32):
    """All of it on `tiny`, from a configuration file; killed in the middle, resumed: the same bits, log and
    pictures as of a run that nobody killed."""
    (tmp_path / "all.txt").write_text(EVERYTHING.format(data=images32))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(TRAIN, "--config", tmp_path / "all.txt", "--out_dir", whole)
    with subprocess.Popen([TRAIN, "--config", str(tmp_path / "all.txt"), "--out_dir", str(killed)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        give_up = time.time() + 120
        while not list(killed.glob("checkpoint_00000036.bin")) and time.time() < give_up:
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL, process.stdout.read()
    assert not checkpoint_in(killed, 44).exists()
    result = run(TRAIN, "--resume", killed)
    assert {path.name for path in killed.glob("*.bin")} == {path.name for path in whole.glob("*.bin")}
    for path in [*whole.glob("*.bin"), *whole.glob("*.png")]:
        assert (killed / path.name).read_bytes() == path.read_bytes(), path.name
    assert [int(path.stem[-8:]) for path in sorted(whole.glob("*.bin"))] == [12, 24, 36, 44]
    assert losses_in(killed) == losses_in(whole) and len(losses_in(whole)) == 44
    checkpoint = unet_io.read_checkpoint(str(checkpoint_in(killed, 44)))
    assert list(checkpoint.sections)[:7] == list(unet_io.TENSOR_SECTIONS)
    assert checkpoint.sections["state"].skipped > 0 and "EMA 0.999)" in result.stdout


def test_careless(tmp_path, images8):
    """What would do nothing, or harm, is refused; what is left to do is said."""
    start = start_flags(Config(**TOY), images8, tmp_path / "run", 4, save_every=2)
    run(TRAIN, *start)
    weights = checkpoint_in(tmp_path / "run", 4)
    whole = weights.read_bytes()
    draw = ("--model_weights", weights, "--sample_steps", 1)
    refused(TRAIN, *draw, "--generate", 1, "--output_name", weights, says=[weights.name, ".png"])
    refused(TRAIN, *draw, "--generate", 0, says="--generate 0", status=2)
    refused(TRAIN, "--strip", 4, says="--strip 4", status=2)
    (tmp_path / "folder.png").mkdir()
    for name, says in (("folder.png", "not a regular file"), ("no/x.png", "no/x.png")):
        refused(TRAIN, *draw, "--generate", 1, "--output_name", tmp_path / name, says=says)
    refused(TRAIN, *draw[:2], "--generate", 999999, "--strip", 50, says="too many")
    assert weights.read_bytes() == whole
    (tmp_path / "there.png").write_bytes(b"")
    (tmp_path / "link.png").symlink_to(tmp_path / "there.png")
    run(TRAIN, *draw, "--generate", 1, "--output_name", tmp_path / "link.png")
    assert (tmp_path / "link.png").is_symlink() and (tmp_path / "there.png").read_bytes()[1:4] == b"PNG"
    refused(TRAIN, "--generate", 1, "--out_dir", tmp_path / "none", says=["none", "--model_weights"])
    refused(TRAIN, "--resume", weights, says="is a file")
    refused(TRAIN, "--resume", tmp_path / "run", "--out_dir", tmp_path / "other", says=["--out_dir", "other"])
    assert "already at step 4" in run(TRAIN, "--resume", tmp_path / "run", "--steps", 3).stdout
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
        notes = re.findall("^note: .*", run(TRAIN, *small, *words).stdout, re.M)
        levels = "24, 12, 6" if 24 in words else "16, 8, 4"
        assert notes == ([f"note: no level has the size {sizes} of --attention_resolutions;"
                          f" the levels have {levels}"] if sizes else [])


def test_one_of_each(tmp_path, images8, capsys):
    """One picture, step, image or thread is no plural; what a run's file says of --seed is no mistake."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    (tmp_path / "c.txt").write_text("seed = 0\n")
    unet_io.write_images(str(tmp_path / "one.bin"), unet_io.read_images(images8).pixels[:1])
    draw = ("--seeds", 5, "--sample_steps", 1, "--output_name", tmp_path / "x.png")
    ours = (TRAIN, "--config", tmp_path / "c.txt", "--model_weights", tmp_path / "w.bin", *draw)
    drawn = run(*ours, "--strip", 1, env=os.environ | dict(OMP_NUM_THREADS="1")).stdout
    for text in ("1 picture with", "1 picture in", "in 1 step,", "1 step of each"):
        assert text in drawn
    assert "1 threads" not in drawn
    refused(*ours, "--generate", 2, says="for 1 picture;")
    theirs = ("--device", "cpu", "--model_filename", tmp_path / "w.bin", *draw)
    assert call(generate, *theirs, "--num_images", 2).endswith("for 1 picture")
    assert call(generate, *theirs, "--strip", 2).endswith("1 step")
    assert call(generate, *theirs, "--output_dir", tmp_path / "each") == ""
    assert "wrote 1 picture into" in capsys.readouterr().out
    start = start_flags(Config(**TOY), tmp_path / "one.bin", tmp_path / "run", 1)
    assert "\n1 image in " in run(TRAIN, *start).stdout
    assert "\n1 step: " in run(TRAIN, *start, "--dry_run").stdout


def test_one_process_a_run(tmp_path, images8):
    """Two runs in one folder would take each other's checkpoints for theirs."""
    words = start_flags(Config(**TOY), images8, tmp_path / "run", 10**6, save_every=0, log_every=1)
    with subprocess.Popen([TRAIN, *map(str, words)], stdout=subprocess.PIPE, text=True) as process:
        while "step 1/" not in process.stdout.readline():
            assert process.poll() is None
        refused(TRAIN, *words, says=["another process", str(tmp_path / "run")])
        process.kill()
        process.communicate()


def test_damaged_checkpoints_are_not_kept_for_whole_ones(tmp_path, images8):
    """What --resume passed over is left alone, and does not count as one of --keep."""
    folder = tmp_path / "run"
    run(TRAIN, *start_flags(Config(**TOY), images8, folder, 4, save_every=2))
    for step in (90, 91):
        checkpoint_in(folder, step).write_bytes(checkpoint_in(folder, 4).read_bytes()[:-9])
    run(TRAIN, "--resume", folder, "--steps", 8)
    assert sorted(int(path.stem[-8:]) for path in folder.glob("*.bin")) == [6, 8, 90, 91]


def test_resume_of_an_old_checkpoint(tmp_path, images8):
    """Without a section `state`, and with 0 in the fields that came with it: as many updates as steps."""
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "run", 8, save_every=4, sample_every=0))
    checkpoint = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", 4)))
    del checkpoint.sections["state"]
    (tmp_path / "old").mkdir()
    unet_io.write_checkpoint(checkpoint_in(tmp_path / "old", 4), checkpoint)
    header = np.fromfile(checkpoint_in(tmp_path / "old", 4), "<i4", 256)
    assert not header[75:90].any()
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
    assert np.flatnonzero(header != other).tolist() == [2, 54]
    assert found != checkpoint_in(tmp_path / "parts", 10).read_bytes()


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


def test_killed_twenty_times(tmp_path, images4):
    """kill -9 at random moments, twenty times, resumed each time: the bits of a run that nobody killed."""
    config, steps = Config(**SMALL | dict(lr=1e-3, flip=True)), 700
    flags = dict(save_every=3, sample_every=0, log_every=100)
    started = time.time()
    run(TRAIN, *start_flags(config, images4, tmp_path / "calm", steps, **flags))
    lasted = time.time() - started
    seed = random.randrange(10**6)
    print(f"seed {seed}, a run lasts {lasted:.2f} s")
    dice, folder, reached, half_written = random.Random(seed), tmp_path / "killed", [], 0
    for attempt in range(20):
        words = (["--resume", folder] if list(folder.glob("checkpoint_*.bin"))
                 else start_flags(config, images4, folder, steps, **flags))
        command = [TRAIN, *map(str, words)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with subprocess.Popen(command, **pipes) as process:
            left = 1 - reached[-1] / steps if reached else 1
            time.sleep(dice.uniform(0, 0.9 * lasted * left / (21 - attempt)))
            give_up = time.time() + 0.3
            while attempt % 2 and time.time() < give_up and not list(folder.glob("*.bin.tmp")):
                pass  # every other time in the middle of a save
            process.kill()
            output = process.stdout.read()
        assert process.returncode == -signal.SIGKILL, output
        assert "error" not in output and "passed over" not in output, output  # no half-written checkpoint
        half_written += bool(list(folder.glob("*.bin.tmp")))
        reached.append(max((int(path.stem[-8:]) for path in folder.glob("checkpoint_*.bin")), default=0))
    print(f"killed after steps {reached}, {half_written} times during a save")
    assert len(set(reached)) > 5 and reached == sorted(reached) and reached[-1] < steps and half_written > 2
    run(TRAIN, "--resume", folder)
    assert checkpoint_in(folder, steps).read_bytes() == checkpoint_in(tmp_path / "calm", steps).read_bytes()
    assert sorted(losses_in(folder).items())[-1] == sorted(losses_in(tmp_path / "calm").items())[-1]
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped(tmp_path, images8, number):
    """Ctrl-C and SIGTERM: the step is finished and saved, exit 0, and the printed command goes on."""
    flags = dict(save_every=0, sample_every=0, log_every=1)
    config = dataclasses.replace(RESUMED, batch_size=2)
    run(TRAIN, *start_flags(config, images8, tmp_path / "calm", 60, **flags))
    folder = tmp_path / "stopped"
    command = [TRAIN, *map(str, start_flags(config, images8, folder, 60, **flags))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.time() + 60
        while time.time() < deadline and not (folder / "metrics.jsonl").exists():
            time.sleep(0.002)
        while time.time() < deadline and len(losses_in(folder)) < 2:
            time.sleep(0.002)
        process.send_signal(number)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    steps = [int(path.stem[-8:]) for path in folder.glob("checkpoint_*.bin")]
    assert len(steps) == 1 and 2 <= steps[0] < 60
    assert unet_io.read_checkpoint(str(checkpoint_in(folder, steps[0]))).step == steps[0]
    words = re.search(r"^continue: +\./train_unet (.+)$", output, re.M).group(1).split()
    run(TRAIN, *words)
    assert checkpoint_in(folder, 60).read_bytes() == checkpoint_in(tmp_path / "calm", 60).read_bytes()


def test_reader_gone(tmp_path, images8):
    """./train_unet | head: the run saves and ends when nobody reads on, and goes on to the same bits."""
    flags = dict(save_every=0, sample_every=0, log_every=1)
    run(TRAIN, *start_flags(RESUMED, images8, tmp_path / "calm", 100, **flags))
    folder = tmp_path / "piped"
    command = [TRAIN, *map(str, start_flags(RESUMED, images8, folder, 100, **flags))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while "step 1/" not in process.stdout.readline():
            pass
        process.stdout.close()
        assert process.wait(timeout=60) == 0, process.stderr.read()
    steps = [int(path.stem[-8:]) for path in folder.glob("checkpoint_*.bin")]
    assert len(steps) == 1 and 1 <= steps[0] < 100
    run(TRAIN, "--resume", folder)
    assert checkpoint_in(folder, 100).read_bytes() == checkpoint_in(tmp_path / "calm", 100).read_bytes()


def test_nohup(tmp_path, images8):
    """A run that was told to ignore the hang-up does."""
    command = [TRAIN, *map(str, start_flags(RESUMED, images8, tmp_path / "run", 100, save_every=0))]
    ignore = dict(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **ignore) as process:
        while "step 1/" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=60)
    assert process.returncode == 0 and checkpoint_in(tmp_path / "run", 100).exists()


def test_log(tmp_path, images8):
    """In a file: plain lines. At the end: the mean time of all steps but the first, and the files."""
    folder = tmp_path / "run"
    output = run(TRAIN, *start_flags(RESUMED, images8, folder, 6, log_every=1, save_every=0)).stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    mean, rate = map(float, re.search(r"^done at step 6 after 6 steps: ([\d.]+) ms a step without the first,"
                                      r" ([\d.]+) images/s$", output, re.M).groups())
    assert abs(mean - np.mean([line["ms"] for line in lines[1:]])) < 0.07
    assert abs(rate * np.mean([line["ms"] for line in lines[1:]]) / 3000 - 1) < 0.02
    named = dict(re.findall(r"^(checkpoint|samples|metrics|config): +(.+)$", output, re.M))
    assert len(named) == 4 and all(pathlib.Path(path).parent == folder for path in named.values())
    assert all(pathlib.Path(path).exists() for path in named.values())


def test_log_in_a_terminal(tmp_path, images8):
    """Between two log lines one line is written over and over; it fits 80 columns, and goes at the end."""
    ours, theirs = pty.openpty()
    flags = start_flags(RESUMED, images8, tmp_path / "run", 1000000, log_every=1000000, save_every=0)
    with subprocess.Popen([TRAIN, *map(str, flags)], stdout=theirs) as process:
        os.close(theirs)
        output, deadline, stopped = b"", time.time() + 60, False
        while time.time() < deadline:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            output += piece
            if output.count(b"\r\x1b[Kstep ") > 3 and not stopped:
                process.send_signal(signal.SIGTERM)
                stopped = True
    os.close(ours)
    assert process.returncode == 0
    live = re.findall(r"\r\x1b\[K(step \d+/\d+ \| loss [\d.]+ \| ETA [^\r\n]*)\r\x1b\[K", output.decode())
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


# ----------------------------------------------------------------------------------------------------
# files, there and back

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
    cpp(TEST, "--same", tmp_path / "old.bin", tmp_path / "new.bin")
    plain = np.fromfile(tmp_path / "old.bin", np.uint8)[:1024 + 4 * len(weights)]
    plain[:1024].view("<i4")[8:10] = 0
    plain.tofile(tmp_path / "plain.bin")
    cpp(TEST, "--same", tmp_path / "plain.bin", tmp_path / "new.bin")
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
                               attention_resolutions=(), flip=True, beta2=0.99))


@pytest.mark.parametrize("ending", ["bin", "pt", "safetensors"])
def test_export_import(cpp, tmp_path, ending, images8):
    """Checkpoint -> .bin, .pt, .safetensors -> .bin: the same bits and configuration, raw or averaged."""
    if ending == "safetensors":
        pytest.importorskip("safetensors")
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
            import safetensors
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
    safetensors = pytest.importorskip("safetensors.torch")
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
        safetensors.save_file(state, bad.with_suffix(".safetensors"), dict(config=json.dumps(changed)))
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
    safetensors.save_file(state, bad.with_suffix(".safetensors"))
    attempt(bad.with_suffix(".safetensors"), "configuration", "--export")
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


# ----------------------------------------------------------------------------------------------------
# pictures

def picture(path, mode="RGB"):
    with Image.open(path) as image:
        assert image.format == "PNG" and image.mode == mode
        return np.asarray(image).astype(int)


PICTURES = {  # name: (config, flags, largest difference in pixel values of 255)
    "ddim v": (Config(**TOY | dict(image_size=16, predict="v", noise_schedule="cosine")), [], 2),
    "ddim eps": (Config(**TOY | dict(batch_size=8, lr=2e-3)), ["--sample_steps", 20], 2),
    "ddpm v": (Config(**TOY | dict(predict="v", diffusion_steps=100)), ["--sampler", "ddpm"], 2),
    "ddim eta": (Config(**TOY | dict(predict="v")), ["--eta", 0.6, "--threshold", "dynamic"], 2),
    "dpmpp": (Config(**TOY | dict(predict="v", noise_schedule="cosine")), ["--sampler", "dpmpp"], 2),
    "dpmpp x0": (Config(**TOY | dict(predict="x0", zero_terminal_snr=True)),
                 ["--sampler", "dpmpp", "--threshold", "none", "--sample_steps", 11], 2),
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
    assert ours.shape == theirs.shape == (2 * (size + 2) + 2, 3 * (size + 2) + 2, 3)
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


# ----------------------------------------------------------------------------------------------------
# memorisation and quality

def test_nearest(tmp_path, images8):
    """A training image with noise on it is nearest to itself, and the distance is that of the noise."""
    images = unet_io.read_images(images8)
    order = np.random.default_rng(0).permutation(len(images))
    changed = images.pixels[order].astype(int)
    changed[:, 0, 0, 0] += np.where(changed[:, 0, 0, 0] < 128, 24, -24)
    where, distances = generate.nearest(changed.astype(np.uint8), images, 8, chunk=3)
    assert where.tolist() == order.tolist() and np.allclose(distances, 24 / np.sqrt(3 * 8 * 8), rtol=1e-12)
    assert (generate.nearest(images.pixels, images, 8)[1] == 0).all()
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    assert call(generate, "--model_filename", tmp_path / "w.bin", "--num_images", 3, "--sample_steps", 3,
                "--device", "cpu", "--output_name", tmp_path / "x.png", "--nearest", images8) == ""
    drawn, pairs = picture(tmp_path / "x.png"), picture(tmp_path / "x_nearest.png")

    def cell(grid, row, column):
        return grid[2 + 10 * row:, 2 + 10 * column:][:8, :8]
    for n, (y, x) in enumerate([(0, 0), (0, 1), (1, 0)]):
        ours, theirs = cell(pairs, n, 0), cell(pairs, n, 1)
        every = np.moveaxis(images.pixels, 1, -1).astype(int)
        assert (ours == cell(drawn, y, x)).all()
        assert (theirs == every[np.square(every - ours).sum((1, 2, 3)).argmin()]).all()


def test_laplacian_pyramid():
    """Its bands sum up to the image, a smooth image has no detail, and a pixel spreads binomially."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 64, 64)))
    bands = generate.laplacian_pyramid(x)
    assert [band.shape[-1] for band in bands] == [64, 32, 16]
    assert [generate.laplacian_pyramid(torch.zeros(1, 3, size, size))[-1].shape[-1] for size in (8, 24, 36)
            ] == [8, 24, 18]
    row = np.array([1, 4, 6, 4, 1]) / 16
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect")
    low = np.zeros((2, 3, 32, 32))
    for dy in range(5):
        for dx in range(5):
            low += row[dy] * row[dx] * padded[:, :, dy:dy + 64:2, dx:dx + 64:2]
    small = generate.laplacian_pyramid(torch.from_numpy(low))
    assert all(error_of(a, b) < 1e-12 for a, b in zip(small, bands[1:]))
    spread = np.zeros((2, 3, 68, 68))
    spread[:, :, 2:66:2, 2:66:2] = low
    spread = np.pad(spread[:, :, 2:66, 2:66], ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect")
    up = sum(4 * row[dy] * row[dx] * spread[:, :, dy:dy + 64, dx:dx + 64]
             for dy in range(5) for dx in range(5))
    assert error_of(bands[0] + torch.from_numpy(up), x) < 1e-12
    flat = generate.laplacian_pyramid(torch.full((1, 3, 32, 32), 0.7, dtype=torch.float64))
    assert flat[0].abs().max() < 1e-12 and (flat[1] - 0.7).abs().max() < 1e-12


def test_sliced_wasserstein():
    """Closed forms: a set moved by v, mean |v . u| of unit vectors u; Gaussians of two widths on a line."""
    dice = np.random.default_rng(1)
    for d in (1, 3, 147):
        points, v = dice.standard_normal((50, d)), dice.standard_normal(d)
        expected = np.linalg.norm(v) * math.gamma(d / 2) / (math.sqrt(math.pi) * math.gamma((d + 1) / 2))
        found = generate.sliced_wasserstein(points, dice.permutation(points) + v, dice, 2048)
        assert abs(found / expected - 1) < (1e-12 if d == 1 else 0.05)
        assert generate.sliced_wasserstein(points, points[::-1], dice) < 1e-12
    a, b = dice.standard_normal((2, 20000, 1))
    found = generate.sliced_wasserstein(a, 3 * b, dice, 64)  # 2 E|x|
    assert abs(found / (2 * math.sqrt(2 / math.pi)) - 1) < 0.02


def test_patches():
    """Patches come from the image, in every place, normalised by channel over all of them."""
    n, count = 3, 4000
    x = torch.arange(n * 3 * 10 * 10, dtype=torch.float64).reshape(n, 3, 10, 10)
    found = generate.patches(x, np.random.default_rng(0), count).reshape(n * count, 3, 7, 7)
    found = torch.from_numpy(found)
    assert abs(found.mean((0, 2, 3))).max() < 1e-9 and abs(found.var((0, 2, 3)) - 1).max() < 1e-4
    scale = 1 / (found[0, :, 0, 1] - found[0, :, 0, 0])  # neighbours differ by 1
    raw = found * scale[:, None, None]
    corner = raw[:, :, :1, :1]
    assert abs(raw - corner - x[0, 0, :7, :7]).max() < 1e-6
    places = (corner[:, 0, 0, 0] - corner[:, 0].min()).round().long().reshape(n, count)
    expected = {y * 10 + x for y in range(4) for x in range(4)}
    for i, row in enumerate(places.tolist()):
        assert {place - 300 * i for place in row} == expected
    constant = generate.patches(torch.full((2, 3, 8, 8), 0.5), np.random.default_rng(0))
    assert np.isfinite(constant).all() and constant.shape == (2 * 128, 147)


def test_patch_distances():
    """Blind to brightness and contrast, larger for what differs more, the same for the same seed."""
    def smooth(seed, coarse):
        noise = torch.from_numpy(np.random.default_rng(seed).random((16, 3, coarse, coarse), np.float32))
        return F.interpolate(noise, size=32, mode="bilinear")
    a, b, rough = smooth(1, 4), smooth(2, 4), smooth(3, 32)
    alike, brighter, unlike = (generate.patch_distances(a, x, 5) for x in (b, 0.3 * b + 0.4, rough))
    assert list(alike) == list(unlike) == [32, 16]
    print(alike, unlike)
    assert all(abs(brighter[size] / alike[size] - 1) < 1e-3 for size in alike)
    assert unlike[32] > 2 * alike[32] and unlike[16] > alike[16]  # 16 images have little to say of 16x16
    assert generate.patch_distances(a, b, 5) == alike != generate.patch_distances(a, b, 6)


def test_frechet_distance():
    """Closed forms: equal, moved, scaled, commuting and, in two dimensions, any covariances."""
    dice = np.random.default_rng(2)
    for d in (2, 7):
        means = dice.standard_normal((2, d))
        a, b = (factor @ factor.T for factor in dice.standard_normal((2, d, d)))
        moved = np.square(means[0] - means[1]).sum()
        assert abs(generate.frechet_distance(means[0], a, means[0], a)) < 1e-9
        assert np.isclose(generate.frechet_distance(means[0], a, means[1], a), moved)
        assert np.isclose(generate.frechet_distance(means[0], a, means[1], 9 * a), moved + 4 * np.trace(a))
        turn = np.linalg.qr(dice.standard_normal((d, d)))[0]
        x, y = dice.random((2, d))
        expected = moved + np.square(np.sqrt(x) - np.sqrt(y)).sum()
        assert np.isclose(generate.frechet_distance(means[0], turn * x @ turn.T, means[1], turn * y @ turn.T),
                          expected)
        if d == 2:  # the trace of the root of a 2x2 matrix M: sqrt(tr M + 2 sqrt(det M))
            trace = math.sqrt(np.trace(a @ b) + 2 * math.sqrt(np.linalg.det(a @ b)))
            assert np.isclose(generate.frechet_distance(means[0], a, means[1], b),
                              moved + np.trace(a) + np.trace(b) - 2 * trace)
        low = np.outer(means[0], means[0])  # rank 1
        assert np.isclose(generate.frechet_distance(means[0], low, means[0], 4 * low), np.trace(low))


def quality_words(tmp_path, held_out, count=6):
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    return ["--model_filename", tmp_path / "w.bin", "--num_images", count, "--sample_steps", 2,
            "--device", "cpu", "--output_name", tmp_path / "x.png", "--quality", held_out]


def test_quality(tmp_path, images8, capsys, monkeypatch):
    """--quality prints seed, count and the numbers of patch_distances, and that FID is left out."""
    monkeypatch.setitem(sys.modules, "pytorch_fid", None)
    printed = []
    for seed in (4, 3, 3):
        assert call(generate, *quality_words(tmp_path, images8), "--seed", seed) == ""
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1] == printed[2]
    lines = printed[1].splitlines()[1:]
    assert lines[0].startswith(f"quality, seed 3: 5 pictures against 5 images of {images8}; as a yardstick")
    assert lines[1].split()[-2:] == ["8x8", "mean"] and lines[4].startswith("FID is left out: ")
    assert "pip install pytorch-fid" in lines[4] and len(lines) == 5
    order = unet_io.permutation(3, 0, 11)
    real = torch.from_numpy(unet_io.read_images(images8).floats(order[:10]))
    grid = picture(tmp_path / "x.png")
    cells = [grid[2 + 10 * (n // 3):, 2 + 10 * (n % 3):][:8, :8] for n in range(5)]
    drawn = torch.from_numpy(np.moveaxis(np.stack(cells), -1, 1)).float() / 127.5 - 1
    for line, images in ((lines[2], drawn), (lines[3], real[5:])):
        expected = generate.patch_distances(images, real[:5], 3)[8]
        assert all(abs(float(word) - expected) < 0.02 for word in line.split()[-2:])
    words = ["--seeds", "3-8", "--seed", 3]  # which is then --quality's alone
    assert call(generate, *quality_words(tmp_path, images8), *words) == ""
    assert capsys.readouterr().out == printed[1]
    for held_out, count, says in ((images8, 1, "2 pictures"), (tmp_path / "none.bin", 6, "none.bin")):
        assert says in call(generate, *quality_words(tmp_path, held_out, count))


def test_fid(tmp_path, images8, capsys, monkeypatch):
    """With another network in pytorch-fid's place: its features' Frechet distance; never a download."""
    class Network(torch.nn.Module):
        def forward(self, x):
            assert x.min() >= 0 and x.max() <= 1
            return [x.mean((2, 3), keepdim=True)]
    package = types.ModuleType("pytorch_fid.inception")
    package.FID_WEIGHTS_URL, package.InceptionV3 = "https://example.org/weights.pth", Network
    monkeypatch.setitem(sys.modules, "pytorch_fid", types.ModuleType("pytorch_fid"))
    monkeypatch.setitem(sys.modules, "pytorch_fid.inception", package)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert call(generate, *quality_words(tmp_path, images8)) == ""
    last = capsys.readouterr().out.splitlines()[-1]
    weights = tmp_path / "checkpoints/weights.pth"
    assert last == f"FID is left out: save https://example.org/weights.pth as {weights}"
    weights.parent.mkdir()
    weights.write_text("")
    assert call(generate, *quality_words(tmp_path, images8)) == ""
    last = capsys.readouterr().out.splitlines()[-1]
    real = unet_io.read_images(images8).floats(unet_io.permutation(0, 0, 11)[:10])
    features = (real.astype(np.float64) / 2 + 0.5).mean((2, 3))
    expected = generate.frechet_distance(*(moment for half in (features[5:], features[:5])
                                           for moment in (half.mean(0), np.cov(half.T))))
    assert re.fullmatch(rf"FID: \d+\.\d\d for 5 pictures, {expected:.2f} for 5 held-out images", last)


# ----------------------------------------------------------------------------------------------------
# command lines

def refused(*command, status=1, says=(), **options):
    """The command must end with one sentence on stderr that holds every string of `says`."""
    result = run(*command, status=status, **options)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert "Traceback" not in result.stderr
    for text in [says] if isinstance(says, str) else says:
        assert str(text) in lines[0], (text, lines[0])
    return lines[0]


@pytest.mark.parametrize("words, says", [
    (["--batchsize", 4], ["--batchsize;", "--batch_size?"]), (["--lrr", 1], "--lr?"), (["--halp"], "--help?"),
    (["--num-channels", 64], "--num_channels?"), (["data.bin"], "'data.bin'"),
    (["--lr"], "--lr needs a value"),
    (["--lr", "fast"], ["--lr", "'fast'"]), (["--lr=-1"], "--lr"), (["--steps", "1e12"], "--steps"),
    (["--steps", "2.5"], "whole number"), (["--batch_size", 0], "--batch_size"), (["--seed", "-3"], "--seed"),
    (["--predict", "x"], "eps|v"), (["--preset", "huge"], "tiny"),
    (["--channel_mult", "1,x"], "--channel_mult"), (["--offset_noise", "-1"], "--offset_noise"),
    (["--flip=perhaps"], "--flip"), (["--preset", "small23"], ["'small23'", "mean small32?"]),
    (["--out_dir", ""], ["--out_dir", "''"]), (["--data_file="], "--data_file"),
    (["--out_dir", "a\nb"], ["--out_dir", "line break"])])
def test_usage(words, says):
    refused(TRAIN, *words, status=2, says=says)


def test_help():
    text = run(TRAIN, "--help").stdout
    for flag in ("data_file val_file model_weights out_dir resume preset image_size num_channels channel_mult"
                 " num_res_blocks attention_resolutions num_head_channels norm_groups diffusion_steps"
                 " noise_schedule predict batch_size steps lr weight_decay seed log_every save_every"
                 " sample_every generate dry_run config print_config keep keep_every").split():
        assert re.search(rf"^  --{flag}\b", text, re.M), flag
    assert "(default 1e-4)" in text and "(default 1,2,3,4)" in text
    assert run(TRAIN, "-h").stdout == text


def completed(*words, program="./train_unet", cwd=ROOT):
    """What completion.bash offers for the last of these words, sorted."""
    shell = '''source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _train_unet
               [ ${#COMPREPLY[@]} = 0 ] || printf '%s\n' "${COMPREPLY[@]}"'''
    words = run("bash", "-c", shell, ROOT / "completion.bash", program, *words, cwd=cwd).stdout.splitlines()
    return sorted(words)


def test_completion(tmp_path):
    """Flags, choices, presets and file names, all from the program's --help."""
    help = run(TRAIN, "--help").stdout
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
    assert unet_io.loss_weights(abar, "v", 5)[-1] == unet_io.loss_weights(abar, "x0", 5)[-1] == 0
    assert unet_io.loss_weights(abar, "eps", 5)[-1] == 1


def test_dry_run(tmp_path):
    """The plan, the parameters and the memory, without data and without a trace."""
    text = run(TRAIN, "--dry_run", "--out_dir", tmp_path / "run", "--data_file", tmp_path / "none").stdout
    assert "20494211 parameters in 326 tensors" in text and "middle_block.1" in text and "in all" in text
    assert not (tmp_path / "run").exists()
    needed = [float(re.search(r"([\d.]+) GB in all", run(TRAIN, "--dry_run", *flags).stdout)[1])
              for flags in ((), ("--microbatch", 16), ("--batch_size", 64, "--microbatch", 16))]
    assert needed[1] < 0.7 * needed[0] and abs(needed[2] - needed[1]) < 0.01
    text = run(TRAIN, "--preset=tiny", "--dry_run", "1", "--num_channels=64").stdout
    assert re.search(r"num_channels +64 ", text) and re.search(r"image_size +32 ", text)
    refused(TRAIN, "--dry_run", "--num_channels", 48, says="multiple of 32")
    refused(TRAIN, "--dry_run", "--num_channels", 32, says=["norm_groups", "time embedding"])
    refused(TRAIN, "--preset", "tiny", "--image_size", 30, "--dry_run", says="halved")
    refused(TRAIN, "--dry_run", "--zero_terminal_snr", says=["--predict eps", "v or x0"])


def test_time_of_a_dry_run():
    """What a step and all steps will take here; where the memory is too small, the plan and that."""
    for flags, steps in (((), 20000), ((*flags_of(Config(**TOY)), "--steps", 100), 100)):
        text = run(TRAIN, *flags, "--dry_run").stdout
        line = r"^one training step: ([\d.]+) (ms|s), ([\d.]+) images/s \((measured|an estimate from \d+ of)"
        time_of, unit, rate, _ = re.search(line, text, re.M).groups()
        ms = float(time_of) * (1 if unit == "ms" else 1e3)
        batch, all_steps = 32 if steps == 20000 else TOY["batch_size"], float(ms) * steps / 1e3
        assert abs(float(ms) * float(rate) / (1e3 * batch) - 1) < 0.1
        parts = re.findall(r"(\d+)([dhms])", re.search(rf"^{steps} steps: ([\ddhms ]+), ", text, re.M)[1])
        units = dict(d=86400, h=3600, m=60, s=1)
        shown = sum(int(number) * units[unit] for number, unit in parts)
        assert abs(shown - all_steps) < 1.01 * units[parts[-1][1]] + 0.01 * all_steps
    assert "(measured, on random images)" in text
    result = run(TRAIN, "--dry_run", "--batch_size", 65536, status=1)
    assert "middle_block.1" in result.stdout and "GB in all" in result.stdout
    sentence = r"error: this run needs \S+ GB of memory and \S+ GB are free; .*would fit.*\n"
    assert re.fullmatch(sentence, result.stderr)


def profile_tables(text):
    """The tables of ./train_unet --profile: a list of {name: (launches, ms, share)}, each with its sum."""
    tables = []
    for line in text.splitlines():
        row = re.fullmatch(r"(\S.*?) +(\d+) +([\d.]+) +([\d.]+)% +[\d.]+ +[\d.]+ +(?:-|\d+%)", line)
        if line.split()[:2] == ["launches", "ms"]:
            tables.append({})
        elif row:
            tables[-1][row[1]] = int(row[2]), float(row[3]), float(row[4])
    return tables


def test_profile():
    """Both tables add up and agree; the operations of a step are those that PyTorch counts."""
    result = run(TRAIN, "--profile", "--batch_size", 1)
    assert re.match(r"train_unet on .+, batch 1\n", result.stdout) and "no line counts" not in result.stdout
    kinds, blocks = profile_tables(result.stdout)
    assert kinds["sum of the parts"] == blocks["sum of the parts"]
    for table in (kinds, blocks):
        launches, ms, share = table.pop("sum of the parts")
        assert sum(row[0] for row in table.values()) == launches and share == 100
        assert abs(sum(row[1] for row in table.values()) - ms) < 1e-3 * len(table)
        assert abs(sum(row[2] for row in table.values()) - 100) < 0.05 * len(table) + 1e-6
    assert {f"{size} {what}" for size in ("3x3", "1x1") for what in ("forward", "dX", "dW")} < kinds.keys()
    plan = re.findall(r"^\d+ +(\S+) +\w+ +\d+ \d+ ", run(TRAIN, "--dry_run").stdout, re.M)
    assert [name for name in blocks if name != "step"] == plan and len(plan) > 40
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model, t = train_unet.UNet(Config()), torch.zeros(1, dtype=torch.long)
        model(torch.empty(1, 3, 64, 64), t).sum().backward()
    ours = float(re.search(r"^operations: +([\d.]+) GFLOP an image", result.stdout, re.M)[1])
    assert abs(ours / (counter.get_total_flops() / 1e9) - 1) < 3e-4 and 38 < ours < 39


def test_benchmark_tables():
    """The GPU's tables: each kind's newest line, none from another GPU, pairs only; their places."""
    head, rows = "train_unet on X: bf16, batch 32\nfloor", ["kinds", "blocks", "the rest"]
    ours = dict(precision="bf16", batch=32, uuid="new", of="train_unet", step_ms=5.0, call_ms=1.0,
                loop_ms=5.5, memory_mib=512.0, first_s=1.0, gpu="X", profile="\n\n".join([head, *rows]),
                default_ms=5.0, everything_ms=5.1)
    theirs = dict(precision="bf16", batch=32, uuid="new", of="PyTorch", step_ms=15.0, call_ms=4.0,
                  memory_mib=1024.0, first_s=100.0, torch="2.9")
    lines = [ours | dict(step_ms=9.0), ours | dict(batch=64, uuid="old"), theirs | dict(batch=64, uuid="old"),
             theirs, ours, ours | dict(batch=128)]
    texts = train_unet.render_gpu(lines)
    assert "**3.00 times (batch 32) as fast as PyTorch**, on X." in texts["gpu"]
    assert "| 64 |" not in texts["gpu"] and "| 128 |" not in texts["gpu"]
    assert "| **times better** | 32 | **3.00** | | **4.00** | **2.00** | **100** |" in texts["gpu"]
    assert "+2.0% (5.00 to 5.10 ms, bf16, batch 32)." in texts["gpu"]
    assert head in texts["profile"] and "blocks" in texts["profile"] and "the rest" not in texts["profile"]
    assert train_unet.render_gpu(lines[:1]) == {}
    page = pathlib.Path(train_unet.README).read_text()
    for name in ("cpu", *texts):
        assert page.count(f"<!-- bench:{name} -->") == page.count(f"<!-- /bench:{name} -->") == 1


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
    refused(TRAIN, *toy, "--data_file", tmp_path, says="not a regular file")
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
    refused(TRAIN, "--generate", 1, "--out_dir", tmp_path / "nowhere", says=["checkpoint", "nowhere"])
    draw = [TRAIN, "--generate", 1, "--model_weights", tmp_path / "w.bin"]
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
# on a GPU: the tests above once more, with the program that is built for it, and what only it can show

AGAIN = {
    "bf16": [(test_resume, ({},)), (test_resume_with_more_steps, ()), (test_stopped, (signal.SIGINT,)),
             (test_damaged_checkpoint_is_passed_over, ()), (test_checkpoint_round_trip, ()),
             (test_initial_weights, (5,)), (test_run_folders, ()), (test_nan_keeps_the_checkpoint, ()),
             (test_profile, ()), (test_config_reproduces, ()), (test_free_on_resume, ()),
             (test_best_validation_survives, ()), (test_reader_gone, ()),
             (test_time_of_a_dry_run, ()), (test_resume_with_everything, ())],
    "fp32": [*((test_training, (name,)) for name in TRAINING), (test_validation_loss, ()),
             (test_decay_of_matrices_only, ()), (test_clipping, ()), (test_skipped_outliers, ()),
             (test_resume_with_everything, ()), (test_resume, (dict(microbatch=2, min_snr_gamma=5),)),
             (test_resume_in_pytorch, ()), (test_pictures_from_averaged_weights, ()),
             *((test_pictures, (name,)) for name in PICTURES), (test_seeds_and_strips, ()),
             (test_interpolation, ()), (test_drawing_while_training, ())],
}


@pytest.mark.parametrize("precision, again, arguments", [
    pytest.param(precision, again, arguments, id=f"{precision} {again.__name__[5:]} {arguments}")
    for precision, tests in AGAIN.items() for again, arguments in tests])
def test_gpu(monkeypatch, request, precision, again, arguments):
    monkeypatch.setattr(sys.modules[__name__], "TRAIN", on_gpu(precision))
    names = again.__code__.co_varnames[:again.__code__.co_argcount]
    fixtures = [request.getfixturevalue(name) for name in names[:len(names) - len(arguments)]]
    again(*fixtures, *arguments)


def test_gpu_missing():
    """A GPU that can't be seen: one sentence that says how to build for the CPU."""
    hidden = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    refused(on_gpu("bf16"), "--dry_run", says=["finds none", "DEVICE=cpu"], env=hidden)


def test_gpu_refuses_what_it_can_not(tmp_path):
    refused(on_gpu("bf16"), "--num_head_channels", 8, "--dry_run", says="--num_head_channels 8")


def test_gpu_too_little_memory(tmp_path):
    """What is needed, what is free, and a batch size; with that one it runs."""
    flags = ["--data_file", ROOT / "data/emoji.bin", *QUICK]
    message = refused(on_gpu("bf16"), "--batch_size", 60000, *flags, "--out_dir", tmp_path / "no",
                      says=["this run needs", "of memory", "are free"])
    fits = re.search(r"--batch_size (\d+) would fit", message)
    run(on_gpu("bf16"), "--batch_size", fits[1], *flags, "--out_dir", tmp_path / "fits", "--steps", 2)


def test_gpu_same_bits(tmp_path):
    """The default model: two runs, and one that was stopped and resumed, end with the same bits."""
    flags = ["--data_file", ROOT / "data/emoji.bin", "--batch_size", 16, "--sample_every", 0, *QUICK]
    for name in ("first", "second"):
        run(on_gpu("bf16"), *flags, "--steps", 20, "--save_every", 10, "--out_dir", tmp_path / name)
    (tmp_path / "parts").mkdir()
    shutil.copy(checkpoint_in(tmp_path / "second", 10), tmp_path / "parts")
    run(on_gpu("bf16"), "--resume", tmp_path / "parts")
    first, second, parts = (checkpoint_in(tmp_path / name, 20).read_bytes()
                            for name in ("first", "second", "parts"))
    assert first == second and first == parts


@pytest.mark.parametrize("precision", GPU)
def test_gpu_to_cpu_and_back(tmp_path, images8, precision):
    """3 steps on the GPU, 3 on the CPU, 3 on the GPU: the losses of 9 on the GPU."""
    gpu, folder = on_gpu(precision), tmp_path / "parts"
    if "train_unet on the CPU" not in run(TRAIN, "--dry_run").stdout:
        pytest.skip(f"{TRAIN} is no build for the CPU: name one by TRAIN_UNET")
    flags = dict(save_every=3, sample_every=0, log_every=1, keep=9)
    run(gpu, *start_flags(RESUMED, images8, tmp_path / "whole", 9, **flags))
    folder.mkdir()
    shutil.copy(checkpoint_in(tmp_path / "whole", 3), folder)
    run(TRAIN, "--resume", folder, "--steps", 6)
    run(gpu, "--resume", folder, "--steps", 9)
    ours, theirs = losses_in(folder), losses_in(tmp_path / "whole")
    worst = np.max([abs(loss / theirs[step] - 1) for step, loss in ours.items()])
    print(f"largest relative difference {worst:.2g}")
    assert sorted(ours) == [4, 5, 6, 7, 8, 9] and worst < (2e-5 if precision == "fp32" else 0.02)


def test_gpu_training_of_default_model(tmp_path):
    """20 steps in fp32 on the GPU, on the CPU and in PyTorch: the same losses to 1e-5."""
    config, steps, data = Config(batch_size=2, seed=3), 20, ROOT / "data/emoji.bin"
    gpu = on_gpu("fp32")
    model = perturbed_file(tmp_path / "start.bin", config)
    for name, program in (("gpu", gpu), ("cpu", TRAIN)):
        run(program, *flags_of(config), "--model_weights", tmp_path / "start.bin", "--data_file", data,
            "--steps", steps, "--log_every", 1, "--save_every", 0, "--out_dir", tmp_path / name, *QUICK)
    gpu, cpu = ([losses_in(tmp_path / name)[step] for step in range(1, steps + 1)] for name in ("gpu", "cpu"))
    theirs = train_unet.replay(model, unet_io.read_images(str(data)), config, steps)
    pairs = (gpu, theirs), (cpu, theirs), (gpu, cpu)
    worst = [np.abs(np.array(a) / np.array(b) - 1).max() for a, b in pairs]
    print(f"largest relative differences: GPU, CPU from PyTorch, GPU from CPU: {worst}")
    assert all(value < 1e-5 for value in worst)


def first_gradients(program, config, folder, data):
    """(ours, PyTorch's by autocast in bf16, float64's): {tensor: gradient of step 0}, q, k and v apart."""
    path = folder / f"start {config.seed}.bin"
    model = perturbed_file(path, config)
    # with beta1 = 0 AdamW's first moment is the gradient
    out = folder / f"run {config.seed}"
    run(program, *flags_of(dataclasses.replace(config, beta1=0.0)), "--model_weights", path, "--steps", 1,
        "--data_file", data, "--out_dir", out, *QUICK)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = unet_io.read_checkpoint(str(checkpoint_in(out, 1))).sections["adam_m"]
    ends = np.cumsum([shape.numel() for shape in shapes.values()])[:-1]
    found = [dict(zip(shapes, np.split(flat, ends)))]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = train_unet.make_batch(unet_io.read_images(str(data)), config, 0)
    for precision, dtype in (("bf16", torch.float32), ("fp32", torch.float64)):
        trainer = train_unet.Trainer(model, unet_io.read_images(str(data)), config, device, dtype, precision)
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.loss(*batch).backward()
        found.append({name: p.grad.double().cpu().numpy() for name, p in trainer.model.named_parameters()})
    for gradients in found:
        for name in [name for name in shapes if ".qkv." in name]:
            parts = np.split(gradients.pop(name).ravel(), 3)
            gradients |= {f"{name} {part}": values for part, values in zip("qkv", parts)}
    return found


@pytest.mark.parametrize("precision", GPU)
def test_gpu_gradients(tmp_path, precision):
    """Every parameter's gradient against float64: in fp32 below 1e-5; in bf16 less than twice as far as
    PyTorch's autocast, as the mean of three batches, for a tensor of a few elements may be right by luck."""
    errors = {}
    for seed in (3, 4, 5):
        config = Config(batch_size=4, seed=seed, ema_rate=0.0)
        ours, theirs, exact = first_gradients(on_gpu(precision), config, tmp_path, ROOT / "data/emoji.bin")
        largest = max(np.abs(values).max() for values in exact.values())
        assert len(exact) == 326 + 2 * 2 * 11
        for name, r in exact.items():
            if name.endswith(".qkv.bias k"):  # zero, by mathematics
                measured = [max(np.abs(a).max() / largest, 5e-7) for a in (ours[name], theirs[name])]
            else:
                measured = [error_of(a, r) for a in (ours[name], theirs[name])]
            errors.setdefault(name, []).append(measured)
    means = {name: np.mean(values, axis=0) for name, values in errors.items()}
    ratios = {name: m[0] / (m[1] if precision == "bf16" else 0.5e-5) for name, m in means.items()}
    for name in sorted(ratios, key=ratios.get)[-5:]:
        print(f"{name}: {means[name][0]:.2g}, PyTorch in bf16 {means[name][1]:.2g}")
    print(f"the median of all: {np.median([m[0] for m in means.values()]):.2g}, PyTorch"
          f" {np.median([m[1] for m in means.values()]):.2g}")
    assert all(ratio < 2 for ratio in ratios.values())


def test_gpu_pictures_in_bf16(tmp_path):
    """DDIM of trained weights: ours are less than twice as far from PyTorch's in fp32 as autocast's are."""
    data, weights = ROOT / "data/faces.bin", checkpoint_in(tmp_path / "run", 300)
    run(on_gpu("bf16"), "--preset", "tiny", "--data_file", data, "--steps", 300, "--lr_schedule", "constant",
        "--out_dir", tmp_path / "run", *QUICK)
    run(on_gpu("bf16"), "--generate", 8, "--model_weights", weights, "--sample_steps", 20, "--seed", 40,
        "--output_name", tmp_path / "a.png")
    model, _ = train_unet.load_model(str(weights))
    seeds = range(40, 48)
    exact = train_unet.sample(model, seeds, sample_steps=20)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = train_unet.sample(model, seeds, sample_steps=20)
    grids = []
    for name, pictures in (("b", exact), ("c", rounded)):
        unet_io.save_grid(str(tmp_path / f"{name}.png"), unet_io.to_uint8(pictures.numpy()))
        grids.append(picture(tmp_path / f"{name}.png"))
    ours, theirs = (np.abs(grid - grids[0]).mean() for grid in (picture(tmp_path / "a.png"), grids[1]))
    print(f"mean difference of a pixel: {ours:.2f} of 255, PyTorch in bf16 {theirs:.2f}")
    assert grids[0].std() > 20 and ours < 2 * theirs + 0.5


# ----------------------------------------------------------------------------------------------------
# dev/

@pytest.mark.parametrize("stem", sorted(path.stem for path in (ROOT / "dev").glob("*.py")
                                        if path.with_suffix(".cu").exists()))
def test_ladder(stem, cpp, tmp_path, monkeypatch, capsys):
    """Every version of a layer in dev/ against PyTorch; without a GPU, those for the CPU."""
    monkeypatch.setenv("DEV_DATA", str(tmp_path))
    monkeypatch.syspath_prepend(ROOT / "dev")
    monkeypatch.setattr(sys, "argv", [stem])
    runpy.run_path(str(ROOT / f"dev/{stem}.py"), run_name="__main__")
    cpp(variant("ladders"), stem)


def test_ladders_cover_the_model(tmp_path, monkeypatch):
    """Every shape of the default model's plan is a case that dev/ times."""
    plan = run(TRAIN, "--dry_run", "--out_dir", tmp_path).stdout
    stems = ("conv3x3", "conv1x1", "groupnorm", "attention", "upsample", "downsample")
    wanted = {stem: set() for stem in stems}
    row = r"^\d+ +\S+ +(\w+) +(\d+) \d+ (\d+)(?: \+ (\d+))? +\d+ \d+ (\d+)"
    for kind, H, C, C2, O in re.findall(row, plan, re.M):
        H, K, O = int(H), int(C) + int(C2 or 0), int(O)
        if kind in ("conv", "residual", "out"):
            wanted["conv3x3"] |= {(K, O, H)} | ({(O, O, H)} if kind == "residual" else set())
        if kind in ("residual", "attention", "out"):
            wanted["groupnorm"] |= {(K, H)} | ({(O, H)} if kind == "residual" else set())
        if kind == "residual" and K != O:
            wanted["conv1x1"].add((K, O, H))
        if kind == "attention":
            wanted["conv1x1"] |= {(K, 3 * K, H), (K, K, H)}
            wanted["attention"].add((K, H))
        if kind in ("up", "down"):
            wanted[kind + "sample"].add((K, H))
    monkeypatch.syspath_prepend(ROOT / "dev")
    for stem, shapes in wanted.items():
        cases = [case for case in runpy.run_path(str(ROOT / f"dev/{stem}.py"))["CASES"].values()
                 if case["B"] == 32 and {"timed", "model"} & set(case)]
        timed = {(case["heads"] * case["d"], round(case["T"]**0.5)) if stem == "attention" else
                 tuple(case[size] for size in "COH" if size in case) for case in cases}
        assert len(shapes) > 1 and shapes <= timed, (stem, shapes - timed)


def test_ladders_of_make():
    """make takes what has a .cu and a .py for a ladder, and none of the tools."""
    stems = {path.stem for path in (ROOT / "dev").glob("*.py") if path.with_suffix(".cu").exists()}
    for folder in (ROOT, ROOT / "dev"):
        database = run("make", "-pn", "-C", folder, "clean").stdout
        assert set(re.search(r"^LADDERS := (.*)$", database, re.M)[1].split()) == stems


# ----------------------------------------------------------------------------------------------------
# a run's log, in pictures and for TensorBoard

def metrics_file(path, steps=range(10, 60, 10), ending="", **more):
    """A metrics.jsonl as ./train_unet writes it; `more` goes into every line of a loss."""
    lines = []
    for step in steps:
        line = dict(step=step, loss=10 / step, smoothed=20 / step, grad_norm=1.5, lr=1e-4 * step)
        lines.append(line | more)
        lines += [dict(step=step, val_loss=5 / step)] * (step % 20 == 0)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + ending)
    return path


@pytest.fixture
def tools(monkeypatch):
    """Import a tool of dev/ by its name."""
    monkeypatch.syspath_prepend(ROOT / "dev")
    return importlib.import_module


def test_read_metrics(tmp_path, tools):
    """The later line of a step counts; cut lines, other lines and nulls do no harm."""
    read = tools("plot_log").read_metrics
    whole = read(metrics_file(tmp_path / "a.jsonl"))
    assert whole["loss"] == {10: 1, 20: 0.5, 30: 10 / 30, 40: 0.25, 50: 0.2}
    assert whole["val_loss"] == {20: 0.25, 40: 0.125} and "step" not in whole
    cut = ('[1]\n3\n\n{"loss": 1}\n{"step": null}\n{"step": Infinity}\n'
           '{"step": 60, "loss": null, "lr": 1}\n{"step": 70, "lo')
    assert read(metrics_file(tmp_path / "b.jsonl", ending=cut))["loss"] == whole["loss"]
    resumed = '{"step": 55, "loss": 3}\n{"step": 30, "loss": 7}\n{"step": 40, "val_loss": 8}\n'
    again = read(metrics_file(tmp_path / "c.jsonl", ending=resumed))
    assert list(again["loss"].items()) == [(10, 1), (20, 0.5), (30, 7), (40, 0.25), (50, 0.2), (55, 3)]
    assert again["val_loss"] == {20: 0.25, 40: 8}
    for name, content, says in (("none", None, "no such file"), ("empty", "", "holds no line"),
                                ("cut", '{"step": 1', "holds no line")):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=f"(?i){name}.*{says}"):
            read(tmp_path / name)


def test_plot_log(tmp_path, tools):
    pytest.importorskip("matplotlib")
    plot_log = tools("plot_log")
    logs = [metrics_file(tmp_path / "a.jsonl"),
            metrics_file(tmp_path / "b.jsonl", [7], '{"step": 9', loss_quartiles=[4, 3, None, 1])]
    figure = plot_log.plot({path.name: plot_log.read_metrics(path) for path in logs})
    lines = {axis.get_ylabel(): [line.get_xydata().tolist() for line in axis.lines] for axis in figure.axes}
    assert list(lines) == ["loss", "loss by timestep", "gradient norm", "learning rate"]
    steps = [10, 20, 30, 40, 50]
    assert lines["loss"] == [[[step, 10 / step] for step in steps], [[step, 20 / step] for step in steps],
                             [[20, 0.25], [40, 0.125]], [[7, 10 / 7]], [[7, 20 / 7]]]
    assert lines["loss by timestep"] == [[[7, 4]], [[7, 3]], [[7, 1]]]
    assert lines["learning rate"] == [[[step, 1e-4 * step] for step in steps], [[7, 7e-4]]]
    target = tmp_path / "loss.png"
    assert "loss by timestep" in script("dev/plot_log.py", *logs, "--output_name", target).stdout
    assert picture(target, "RGBA").std() > 10
    target = tmp_path / "no/x.png"
    refused(sys.executable, ROOT / "dev/plot_log.py", logs[0], "--output_name", target, says="x.png")
    (tmp_path / "full.png").symlink_to("/dev/full")
    for name, says in (("x.txt", "supported"), ("full.png", "a device"), (".", "a folder")):
        assert says in call(plot_log, logs[0], "--output_name", tmp_path / name)
    assert not list(tmp_path.glob("x*")) and (tmp_path / "full.png").is_char_device()


def test_missing_packages(tmp_path, tools, monkeypatch):
    """Where an optional package is not installed, a sentence says which."""
    log = metrics_file(tmp_path / "metrics.jsonl")
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    for package, module, words in (
            ("matplotlib", tools("plot_log"), [log, "--output_name", tmp_path / "x.png"]),
            ("tensorboard", tools("to_tensorboard"), [log, "--output_dir", tmp_path / "x"]),
            ("safetensors", generate, ["--model_filename", tmp_path / "w.bin", "--export",
                                       tmp_path / "x.safetensors"])):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        sentence = call(module, *words)
        assert "pip install" in sentence and package in sentence and len(sentence.splitlines()) == 1
    assert not list(tmp_path.glob("x*"))


SCRIPTS = {"prepare_data.py": ["numpy", "PIL"], "generate.py": ["numpy", "torch"],
           "train_unet.py": ["numpy", "torch"], "dev/plot_log.py": ["numpy"],
           "dev/to_tensorboard.py": ["numpy", "PIL"]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_missing_requirements(tmp_path, name):
    """A script that can't start for want of a package says so in one sentence."""
    for package in SCRIPTS[name]:
        folder = tmp_path / package
        folder.mkdir()
        (folder / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module', name='{package}')")
        refused(sys.executable, ROOT / name, "--help", env=dict(os.environ, PYTHONPATH=str(folder)),
                says=[f"the package {'pillow' if package == 'PIL' else package}:", "-r requirements.txt"])


def test_plots_of_a_run(tmp_path, images8, tools):
    """What the program itself writes can be plotted and converted."""
    read = tools("plot_log").read_metrics
    run(TRAIN, *start_flags(Config(**TOY), images8, tmp_path / "run", 4, log_every=1, val_file=images8,
                            val_every=2))
    metrics = read(tmp_path / "run/metrics.jsonl")
    assert metrics["loss"] == losses_in(tmp_path / "run") and list(metrics["val_loss"]) == [2, 4]
    assert all(key in metrics for key in ("smoothed", "grad_norm", "lr"))


def test_to_tensorboard(tmp_path, tools):
    """Every number and grid is in the event file, once, also after a second call."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    log = metrics_file(tmp_path / "metrics.jsonl", loss_quartiles=[4, 3, None, 1])
    pixels = np.random.default_rng(0).integers(0, 256, (10, 14, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "samples_00000040.png")
    Image.fromarray(pixels).save(tmp_path / "other.png")
    (tmp_path / "events").mkdir()
    (tmp_path / "events/mine.txt").write_text("kept")
    for _ in range(2):
        assert call(tools("to_tensorboard"), log, "--output_dir", tmp_path / "events") == ""
    assert len(list((tmp_path / "events").iterdir())) == 2
    events = EventAccumulator(str(tmp_path / "events"), size_guidance={"images": 0})
    events.Reload()
    found = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    expected = {key: {step: float(np.float32(value)) for step, value in points.items()}
                for key, points in tools("plot_log").read_metrics(log).items() if key != "loss_quartiles"}
    for n, value in ((1, 4), (2, 3), (4, 1)):
        expected[f"loss_quartiles/{n}"] = {step: value for step in expected["loss"]}
    assert found == expected
    [image] = events.Images("samples")
    assert image.step == 40
    assert same_bits(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), pixels)
    target = tmp_path / "x"
    assert "none.jsonl" in call(tools("to_tensorboard"), tmp_path / "none.jsonl", "--output_dir", target)
    assert not target.exists()


# ----------------------------------------------------------------------------------------------------
# prepare_data.py

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
    assert not (tmp_path / "x.bin.tmp").exists()
    result = run(*common, "--data_dir", tmp_path / "bad", "--image_size", 8)
    assert "1 image of 8x8" in result.stdout and "1 file skipped" in result.stdout


def test_python_refusals(tmp_path, images8):
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
            (train_unet, [*python, "--skip_outliers", 6, "--compare_quality", "x.jsonl"], "--skip_outliers"),
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
# main

def test_summary():
    """The last line of a run of this file counts what passed, failed and was skipped, and says why."""
    words = [sys.executable, ROOT / "test_unet.py", "-k", "schedule_by_known_values or gpu_missing"]
    last = run(*words, env=dict(os.environ, TRAIN_UNET_BF16="/nowhere/train_unet")).stdout.splitlines()[-1]
    why = "no GPU on this machine|/nowhere/train_unet is not built"
    assert re.fullmatch(rf"1 passed, 0 failed, 1 skipped \(({why}): 1\)", last)


class Counter:
    """A pytest plugin that counts tests; a function that ran test_unet counts as the tests run there."""
    def __init__(self):
        self.passed = self.failed = 0
        self.skipped = collections.Counter()  # by reason

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.user_properties:
            counts = {name: sum(value for key, value in report.user_properties if key == name)
                      for name in ("passed", "failed")}
            self.passed += counts["passed"]
            self.failed += max(counts["failed"], int(report.failed))
        elif report.failed:
            self.failed += 1
        elif report.when == "call" and report.passed:
            self.passed += 1
        elif report.skipped:
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def summary(self):
        """N passed, N failed, N skipped (why: N; why: N)."""
        why = "; ".join(f"{reason}: {count}" for reason, count in self.skipped.items())
        return (f"{self.passed} passed, {self.failed} failed, {sum(self.skipped.values())} skipped"
                + f" ({why})" * bool(why))

    def pytest_collectreport(self, report):
        self.failed += report.failed


def main():
    counter = Counter()
    flags = ["-q", "-p", "no:cacheprovider", "--durations=8", "--tb=short", "-rs"]
    status = pytest.main([str(ROOT / "test_unet.py"), *flags, *sys.argv[1:]], plugins=[counter])
    if status != pytest.ExitCode.OK and not counter.failed:
        counter.failed = 1
    print(counter.summary(), flush=True)
    sys.exit(1 if counter.failed else 0)


if __name__ == "__main__":
    main()
