"""dev/torch_ops/torch_ops.py: the layers of train_unet.cu as operators of PyTorch, on the CPU and on a GPU where there is one."""
import concurrent.futures
import contextlib
import copy
import os
import re
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_unet
from harness import (
    ADM, QUICK, ROOT, SANITIZERS, TRAINING, error_of, losses_in, run, sanitized, script, start_flags)
from unet_io import Config

# device, type and the error allowed: of bfloat16, some roundings of 2^-9
PLACES = {"cpu": ("cpu", torch.float32, 1e-5), "cuda fp32": ("cuda", torch.float32, 1e-5),
          "cuda bf16": ("cuda", torch.bfloat16, 2e-2)}


@pytest.fixture(scope="module")
def ops():
    """The operators, which the first import builds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "dev/torch_ops")
        import torch_ops
        yield torch_ops


@pytest.fixture(params=PLACES)
def place(request, ops):
    """(device, type, error allowed)"""
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    if request.param != "cpu":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return PLACES[request.param]


@pytest.fixture
def gpu(ops):
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")


# ----------------------------------------------------------------------------------------------------
# cases: an operator and what PyTorch makes of the same inputs

ACTIVATIONS = ("x", "emb", "residual", "scale_shift")  # in the place's type; parameters stay float32


def with_rest(out, emb=None, residual=None):
    out = out if emb is None else out + emb[:, :, None, None]
    return out if residual is None else out + residual


def pytorch_norm(x, weight, bias, scale_shift=None, *, groups, silu=False):
    out = F.group_norm(x, groups, weight, bias, eps=1e-5)
    if scale_shift is not None:
        scale, shift = scale_shift[:, :, None, None].chunk(2, 1)
        out = out * (1 + scale) + shift
    return F.silu(out) if silu else out


def pytorch_attention(x, *, heads):
    B, C, H, W = x.shape
    q, k, v = x.reshape(B, 3, heads, C // 3 // heads, H * W).transpose(-1, -2).unbind(1)
    return F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(B, C // 3, H, W)


# name: (the operator, PyTorch's, as functions of (ops, inputs by name, options); inputs, name -> shape; options)
CONV = (lambda ops, **t: ops.conv3x3(**t),
        lambda x, weight, bias=None, emb=None, residual=None:
        with_rest(F.conv2d(x, weight, bias, padding=1), emb, residual))
CONV1 = (lambda ops, **t: ops.conv1x1(**t),
         lambda x, weight, bias=None, residual=None:
         with_rest(F.conv2d(x, weight.reshape(*weight.shape[:2], 1, 1), bias), None, residual))
LINEAR = (lambda ops, **t: ops.linear(**t), F.linear)
NORM = (lambda ops, **t: ops.group_norm(**t), pytorch_norm)
NORM_SILU = (lambda ops, **t: ops.group_norm_silu(**t), lambda **t: pytorch_norm(**t, silu=True))
NORM_CONV = (lambda ops, **t: ops.norm_conv3x3(**t),
             lambda x, norm_weight, norm_bias, weight, groups, bias=None, emb=None, residual=None, scale_shift=None:
             CONV[1](pytorch_norm(x, norm_weight, norm_bias, scale_shift, groups=groups, silu=True), weight, bias, emb,
                     residual))
ATTENTION = (lambda ops, x, heads: ops.attention(x, heads), pytorch_attention)
UP = (lambda ops, x: ops.upsample(x), lambda x: F.interpolate(x, scale_factor=2, mode="nearest"))
DOWN = (lambda ops, x: ops.downsample(x), lambda x: F.avg_pool2d(x, 2))
GELU = (lambda ops, x: ops.gelu(x), lambda x: F.gelu(x, approximate="tanh"))


def conv(B, C, O, H, W, *more):
    shapes = dict(bias=(O,), emb=(B, O), residual=(B, O, H, W))
    return dict(x=(B, C, H, W), weight=(O, C, 3, 3)) | {name: shapes[name] for name in more}


def conv1(B, C, O, H, W, *more, ones=()):
    shapes = dict(bias=(O,), residual=(B, O, H, W))
    return dict(x=(B, C, H, W), weight=(O, C, *ones)) | {name: shapes[name] for name in more}


def norm(B, C, H, W, *more):
    return dict(x=(B, C, H, W), weight=(C,), bias=(C,)) | {name: (B, 2 * C) for name in more}


def norm_conv(B, C, O, H, W, *more):
    shapes = conv(B, C, O, H, W, *(name for name in more if name != "scale_shift"))
    shapes |= dict(scale_shift=(B, 2 * C)) if "scale_shift" in more else {}
    return shapes | dict(norm_weight=(C,), norm_bias=(C,))


CASES = {
    "conv3x3, all": (CONV, conv(3, 40, 24, 9, 5, "bias", "emb", "residual"), {}),
    "conv3x3, image in": (CONV, conv(2, 3, 32, 16, 16, "bias"), {}),
    "conv3x3, image out": (CONV, conv(2, 32, 3, 16, 16, "bias"), {}),
    "conv3x3, odd channels": (CONV, conv(2, 5, 11, 7, 3, "bias", "emb", "residual"), {}),
    "conv3x3, a pixel": (CONV, conv(1, 1, 1, 1, 1), {}),
    "conv3x3, wide": (CONV, conv(2, 72, 136, 16, 16, "bias", "emb"), {}),
    "conv3x3, many pixels": (CONV, conv(4, 64, 64, 32, 32, "bias", "residual"), {}),
    "conv1x1, all": (CONV1, conv1(3, 40, 24, 9, 5, "bias", "residual"), {}),
    "conv1x1, of Conv2d": (CONV1, conv1(2, 7, 13, 5, 6, "bias", ones=(1, 1)), {}),
    "conv1x1, of Conv1d": (CONV1, conv1(2, 64, 192, 8, 8, "bias", ones=(1,)), {}),
    "linear": (LINEAR, dict(x=(5, 24), weight=(40, 24), bias=(40,)), {}),
    "linear, odd, no bias": (LINEAR, dict(x=(2, 3, 7), weight=(5, 7)), {}),
    "linear, a row": (LINEAR, dict(x=(33,), weight=(9, 33), bias=(9,)), {}),
    "group norm": (NORM, norm(2, 64, 7, 5), dict(groups=8)),
    "group norm, one group": (NORM, norm(3, 32, 3, 3), dict(groups=1)),
    "group norm, modulated": (NORM, norm(3, 96, 9, 4, "scale_shift"), dict(groups=32)),
    "group norm, SiLU": (NORM_SILU, norm(2, 64, 16, 16), dict(groups=32)),
    "group norm, SiLU, modulated": (NORM_SILU, norm(2, 96, 11, 13, "scale_shift"), dict(groups=3)),
    "group norm, SiLU, two pixels": (NORM_SILU, norm(1, 32, 1, 2), dict(groups=16)),
    "norm and conv3x3, all": (NORM_CONV, norm_conv(3, 96, 40, 9, 5, "bias", "emb", "residual", "scale_shift"),
                              dict(groups=32)),
    "norm and conv3x3, image out": (NORM_CONV, norm_conv(2, 32, 3, 8, 8, "bias"), dict(groups=8)),
    "norm and conv3x3, many pixels": (NORM_CONV, norm_conv(4, 64, 128, 32, 32, "bias", "emb"), dict(groups=32)),
    "attention": (ATTENTION, dict(x=(2, 3 * 64, 8, 8)), dict(heads=2)),
    "attention, odd pixels": (ATTENTION, dict(x=(3, 3 * 48, 5, 7)), dict(heads=3)),
    "attention, wide heads": (ATTENTION, dict(x=(1, 3 * 160, 3, 11)), dict(heads=1)),
    "upsample": (UP, dict(x=(2, 16, 5, 3)), {}),
    "upsample, odd channels": (UP, dict(x=(1, 3, 4, 4)), {}),
    "downsample": (DOWN, dict(x=(2, 16, 6, 10)), {}),
    "downsample, odd channels": (DOWN, dict(x=(3, 5, 2, 4)), {}),
    "gelu": (GELU, dict(x=(3, 5, 7)), {}),
    "gelu, images": (GELU, dict(x=(2, 24, 6, 5)), {}),
}
ONLY_CPU = {  # what a GPU refuses, see test_refusals
    "group norm, odd channels": (NORM_SILU, norm(2, 15, 4, 5, "scale_shift"), dict(groups=5)),
    "attention, odd heads": (ATTENTION, dict(x=(2, 3 * 15, 4, 3)), dict(heads=3)),
}


def inputs_of(shapes, device, dtype, seed=0):
    """Normals with the digits of bfloat16; norms' weights lie about 1, products' keep the output near 1."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("weight"):
            value = value / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 1 + 0.3 * value
        made[name] = value.bfloat16().to(device, dtype if name in ACTIVATIONS else torch.float32)
    return made


def leaves(tensors):
    return {name: t.detach().requires_grad_() for name, t in tensors.items()}


def outcome(function, tensors, dout, **options):
    """The output, and the gradient of every tensor, by name."""
    tensors = leaves(tensors)
    out = function(**tensors, **options)
    gradients = torch.autograd.grad(out, list(tensors.values()), dout.to(out))
    return dict(out=out.detach()) | {f"d{name}": g for name, g in zip(tensors, gradients)}


def upstream(shapes_or_out, seed=1):
    shape = tuple(shapes_or_out)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def check(ops, functions, tensors, options, limit, dout=None):
    """The operator's output and gradients against PyTorch's in float64; returns the former."""
    mine, theirs = functions
    wide = {name: t.double().cpu() for name, t in tensors.items()}
    with torch.no_grad():
        shape = theirs(**wide, **options).shape
    dout = upstream(shape) if dout is None else dout
    expected = outcome(theirs, wide, dout.cpu(), **options)
    found = outcome(lambda **t: mine(ops, **t), tensors, dout.to(next(iter(tensors.values())).device), **options)
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert error_of(found[name].cpu().double(), value) < limit, name
    for name, t in tensors.items():
        assert found[f"d{name}"].dtype == t.dtype
    assert found["out"].dtype == tensors["x"].dtype
    return found


@pytest.mark.parametrize("case", CASES)
def test_gradients(case, place, ops):
    """Output and gradients against autograd in float64, channels_last and contiguous: with the same bits."""
    device, dtype, limit = place
    functions, shapes, options = CASES[case]
    tensors = inputs_of(shapes, device, dtype)
    found = check(ops, functions, tensors, options, limit)
    last = {name: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for name, t in tensors.items()}
    again = check(ops, functions, last, options, limit)
    for name, value in found.items():
        assert torch.equal(value, again[name]), name
    if found["out"].ndim == 4 and functions is not GELU:
        assert found["out"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("case", ONLY_CPU)
def test_gradients_on_the_cpu(case, ops):
    functions, shapes, options = ONLY_CPU[case]
    check(ops, functions, inputs_of(shapes, "cpu", torch.float32), options, 1e-5)


STRIDED = ["norm and conv3x3, all", "conv3x3, all", "conv1x1, all", "linear", "group norm, SiLU, modulated", "attention, odd pixels", "upsample",
           "downsample", "gelu, images"]


@pytest.mark.parametrize("case", STRIDED)
def test_strided_inputs(case, place, ops):
    """Slices, transposes and broadcasts give what their copies give."""
    device, dtype, limit = place
    functions, shapes, options = CASES[case]
    tensors = inputs_of(shapes, device, dtype)

    def sliced(t):  # every other of twice as many, from an address that is not aligned
        room = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), torch.nan, dtype=t.dtype, device=device)
        view = room[..., 1::2]
        view.copy_(t)
        return view

    def turned(t):
        order = list(range(t.ndim))[::-1]
        return t.permute(order).contiguous().permute(order)

    def shifted(t):  # without gaps, one number behind an aligned address
        room = torch.zeros(t.numel() + 1, dtype=t.dtype, device=device)
        view = room[1:].as_strided(t.shape, t.stride(), 1)
        view.copy_(t)
        return view

    plain = check(ops, functions, tensors, options, limit)
    for form in (sliced, turned, shifted):
        found = check(ops, functions, {name: form(t) for name, t in tensors.items()}, options, limit)
        for name, value in plain.items():
            assert torch.equal(found[name], value), (form, name)
    ones = torch.ones(()).expand(plain["out"].shape)  # what sum().backward() sends
    check(ops, functions, tensors, options, limit, ones)


@pytest.mark.parametrize("case", STRIDED)
def test_empty_batch(case, place, ops):
    """No images: empty outputs, and gradients of parameters that are zeros."""
    device, dtype, _ = place
    functions, shapes, options = CASES[case]
    empty = {name: (0, *shape[1:]) if name in ACTIVATIONS else shape for name, shape in shapes.items()}
    tensors = inputs_of(empty, device, dtype)
    with torch.no_grad():
        shape = functions[1](**inputs_of(shapes, "cpu", torch.float32), **options).shape
    found = outcome(lambda **t: functions[0](ops, **t), tensors, torch.empty(0, *shape[1:], device=device), **options)
    assert found["out"].shape == (0, *shape[1:])
    for name, t in tensors.items():
        assert found[f"d{name}"].shape == t.shape and found[f"d{name}"].dtype == t.dtype
        assert not found[f"d{name}"].any()


@pytest.mark.parametrize("case", [case for case in CASES if "many" not in case and "wide" not in case])
def test_finite_differences(case, ops):
    """The gradient along a random direction is the difference quotient there: of the operator itself."""
    functions, shapes, options = CASES[case]
    tensors = inputs_of(shapes, "cpu", torch.float32)
    out = functions[0](ops, **tensors, **options)
    dout = upstream(out.shape, 3)
    gradients = outcome(lambda **t: functions[0](ops, **t), tensors, dout, **options)
    for name, t in tensors.items():
        direction = upstream(t.shape, 4)
        h = 0.02 / direction.norm().item()
        ends = [(functions[0](ops, **tensors | {name: t + s * h * direction}, **options).double() * dout).sum()
                for s in (1, -1)]
        expected = (gradients[f"d{name}"].double() * direction).sum()
        scale = gradients[f"d{name}"].double().norm() * direction.norm()
        assert abs((ends[0] - ends[1]) / (2 * h) - expected) < 2e-3 * scale, name


def test_timestep_embedding(place, ops):
    device, dtype, limit = place
    t = torch.tensor([0, 1, 17, 999, 4], device=device)
    for width, period, unit in ((64, 10000, 1), (6, 1000, 2.5)):
        expected = train_unet.timestep_embedding(t.cpu(), width, period, unit)
        for numbers in (t, t.int(), t[None].expand(3, -1).T[:, 1]):
            found = ops.timestep_embedding(numbers, width, period, unit, dtype)
            assert found.dtype == dtype and error_of(found.cpu().double(), expected) < limit
    assert ops.timestep_embedding(t[:0], 8).shape == (0, 8)


# ----------------------------------------------------------------------------------------------------
# what PyTorch asks of operators

def operator_calls(device, dtype):
    """(name, arguments) of every operator, backward ones too."""
    def real(*shape, type=dtype):
        return torch.randn(shape, device=device).to(type).requires_grad_()

    def last(*shape):
        return real(*shape).detach().contiguous(memory_format=torch.channels_last).requires_grad_()

    full = torch.float32
    x, w, w1, bias = last(2, 32, 6, 4), real(64, 32, 3, 3, type=full), real(64, 32), real(64, type=full)
    dout, emb, weight, shift = last(2, 64, 6, 4), real(2, 64), real(32, type=full), real(32, type=full)
    scale_shift, qkv = real(2, 64), last(2, 96, 4, 3)
    yield "conv3x3", (x, w, bias, emb, dout)
    yield "conv3x3", (real(2, 3, 5, 7), real(5, 3, 3, 3), None, None, None)
    yield "conv1x1", (x, w1, bias, dout)
    yield "conv1x1", (real(2, 3, 5, 7), real(5, 3), None, None)
    yield "group_norm", (x, weight, shift, 8, True, scale_shift)
    yield "group_norm", (real(3, 32, 3, 5), weight, shift, 16, False, None)
    yield "norm_conv3x3", (x, weight, shift, 8, scale_shift, w, bias, emb, dout)
    yield "norm_conv3x3", (real(1, 32, 3, 5), weight, shift, 16, None, real(5, 32, 3, 3), None, None, None)
    yield "attention", (qkv, 2)
    yield "resample", (x, True, 1.0)
    yield "resample", (real(1, 3, 4, 2), False, 0.25)
    yield "gelu", (x,)
    yield "gelu", (real(3, 5).t(),)
    yield "timestep_embedding", (torch.tensor([1, 999], device=device), 8, 10000, 1.0, dtype)
    plain = {name: t.detach() for name, t in locals().items() if torch.is_tensor(t)}
    x, w, w1, dout, qkv, scale_shift, weight, shift = (plain[name] for name in (
        "x", "w", "w1", "dout", "qkv", "scale_shift", "weight", "shift"))
    ops = torch.ops.train_unet
    yield "conv3x3_input_gradient", (dout, w)
    yield "conv3x3_weight_gradient", (dout, x, True)
    yield "conv3x3_weight_gradient", (dout, x, False)
    yield "conv1x1_input_gradient", (dout, w1)
    yield "conv1x1_weight_gradient", (dout, x)
    record = ops.group_norm(x, weight, shift, 8, True, scale_shift)[1]
    yield "group_norm_backward", (x, x, weight, shift, record, 8, True, scale_shift)
    record = ops.group_norm(x, weight, shift, 8, False, None)[1]
    yield "group_norm_backward", (x, x, weight, shift, record, 8, False, None)
    record = ops.norm_conv3x3(x, weight, shift, 8, scale_shift, w, None, None, None)[1]
    yield "norm_conv3x3_backward", (dout, x, weight, shift, record, 8, scale_shift, w, True)
    yield "norm_conv3x3_backward", (dout, x, weight, shift, record, 8, None, w, False)
    out, lse = ops.attention(qkv, 2)
    yield "attention_backward", (out, out, lse, qkv, 2)
    yield "gelu_backward", (x, x)
    params = [torch.randn(shape, device=device) for shape in ((5, 3), (7,), (4, 3, 3, 3))]
    gradients, m, v = ([torch.rand_like(p) for p in params] for _ in range(3))
    yield "adamw_", (params, gradients, m, v, torch.zeros((), device=device), 1e-3, 0.9, 0.99, 1e-8, 0.1)


def test_opcheck(place, ops):
    """Schemas, gradients, fake tensors and AOT dispatch of every operator, with fixed and changing sizes."""
    device, dtype, _ = place
    torch.manual_seed(0)
    checked = set()
    for name, arguments in operator_calls(device, dtype):
        tolerance = {} if dtype == torch.float32 else dict(atol=0.5, rtol=0.05)  # of sums; the gradients are tested above
        torch.library.opcheck(getattr(torch.ops.train_unet, name).default, arguments, **tolerance)
        checked.add(name)
    source = (ROOT / "dev/torch_ops/torch_ops.cpp").read_text()
    assert checked == set(re.findall(r'm\.def\(\s*"(\w+)\(', source))


class Block(torch.nn.Module):
    """A model with every operator."""
    def __init__(self, ops, channels=32):
        super().__init__()
        self.ops = ops
        self.conv, self.widen = torch.nn.Conv2d(3, channels, 3), torch.nn.Conv2d(channels, 3 * channels, 1)
        self.norm, self.embed = torch.nn.GroupNorm(8, channels), torch.nn.Linear(16, channels)

    def forward(self, x, t):
        ops = self.ops
        emb = ops.gelu(ops.linear(ops.timestep_embedding(t, 16), self.embed.weight, self.embed.bias))
        h = ops.conv3x3(x, self.conv.weight, self.conv.bias, emb.to(x.dtype))
        h = ops.group_norm_silu(ops.downsample(h), 8, self.norm.weight, self.norm.bias)
        h = h + ops.attention(ops.conv1x1(h, self.widen.weight, self.widen.bias), 2)
        return ops.group_norm(ops.upsample(h), 8, self.norm.weight, self.norm.bias)


def results(model, call, *inputs):
    model.zero_grad()
    out = call(*inputs)
    (out.float() ** 2).mean().backward()
    return [out.detach()] + [p.grad.clone() for p in model.parameters()]


def test_compile(place, ops):
    """torch.compile, whole: the same numbers, at another batch size too."""
    device, dtype, limit = place
    torch.manual_seed(0)
    model = Block(ops).to(device)
    compiled = torch.compile(model, fullgraph=True)
    for B in (2, 3):
        x, t = torch.randn(B, 3, 8, 12, device=device), torch.arange(B, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16 or device == "cpu"):
            eager, found = results(model, model, x, t), results(model, compiled, x, t)
        for a, b in zip(found, eager):
            assert error_of(a.float().cpu(), b.float().cpu()) < limit


def test_autocast(place, ops):
    """Activations in autocast's type, on a CPU float32; the gradients of float32 weights in float32."""
    device, dtype, limit = place
    tensors = leaves(inputs_of(conv(2, 32, 64, 8, 8, "bias", "emb", "residual"), device, torch.float32))
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16 or device == "cpu"):
        out = ops.conv3x3(**tensors)
        assert out.dtype == dtype
        assert ops.gelu(tensors["x"]).dtype == ops.downsample(tensors["x"]).dtype == dtype
        assert ops.attention(torch.randn(1, 96, 2, 2, device=device), 2).dtype == dtype
        normed = ops.group_norm(out, 8, tensors["bias"], tensors["bias"])
        assert normed.dtype == dtype
    out.backward(torch.ones_like(out))
    assert all(t.grad.dtype == torch.float32 for t in tensors.values())
    wide = leaves({name: t.double() for name, t in tensors.items()})
    CONV[1](**wide).backward(torch.ones_like(out).double())
    for name, t in tensors.items():
        assert error_of(t.grad.cpu().double(), wide[name].grad.cpu()) < limit, name


def test_no_second_derivatives(place, ops):
    device, dtype, _ = place
    for case in ("conv3x3, all", "conv1x1, all", "group norm", "norm and conv3x3, all", "attention", "gelu"):
        functions, shapes, options = CASES[case]
        tensors = leaves(inputs_of(shapes, device, dtype))
        out = functions[0](ops, **tensors, **options)
        gradient, = torch.autograd.grad(out.square().sum(), tensors["x"], create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            gradient.sum().backward()


# ----------------------------------------------------------------------------------------------------
# the transforms of torch.func, and forward mode

FORWARD = ["conv3x3, all", "conv3x3, odd channels", "conv1x1, all", "linear", "upsample", "downsample, odd channels",
           "gelu, images"]
NO_FORWARD = {"group norm, modulated": "group_norm", "group norm, SiLU, two pixels": "group_norm",
              "norm and conv3x3, all": "norm_conv3x3", "attention, odd pixels": "attention"}
TRANSFORMED = [*FORWARD, *NO_FORWARD]


def pair_of(case, ops, device, dtype):
    """(ours, PyTorch's, as functions of a dictionary of tensors; our inputs; theirs in float64)"""
    torch.compiler.reset()  # which counts what is compiled
    (mine, theirs), shapes, options = CASES[case]
    tensors = inputs_of(shapes, device, dtype)
    return (lambda t: mine(ops, **t, **options), lambda t: theirs(**t, **options), tensors,
            {name: t.double().cpu() for name, t in tensors.items()})


def tangents_of(tensors, names):
    """Normals for these inputs, zeros for the others."""
    made = inputs_of({name: t.shape for name, t in tensors.items()}, "cpu", torch.float32, seed=7)
    return {name: made[name].to(t) * (name in names) for name, t in tensors.items()}


def dual_tangent(function, tensors, tangents, names):
    """As torch.func.jvp's, by dual tensors; what is not named has no tangent."""
    with torch.autograd.forward_ad.dual_level():
        duals = {name: torch.autograd.forward_ad.make_dual(t, tangents[name]) if name in names else t
                 for name, t in tensors.items()}
        return torch.autograd.forward_ad.unpack_dual(function(duals)).tangent


def same(found, expected, limit):
    """Of tensors, or dictionaries of them."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name], limit) for name in expected)
    return found.shape == expected.shape and error_of(found.detach().cpu().double(), expected.detach()) < limit


@pytest.mark.parametrize("case", FORWARD)
def test_forward_mode(case, place, ops):
    """The tangent of torch.func.jvp, of dual tensors and of a graph: PyTorch's, for each input and for all."""
    device, dtype, limit = place
    ours, theirs, tensors, wide = pair_of(case, ops, device, dtype)
    for names in (*([name] for name in tensors), list(tensors)):
        tangents = tangents_of(tensors, names)
        expected = torch.func.jvp(theirs, (wide,), ({name: t.double().cpu() for name, t in tangents.items()},))[1]
        out, found = torch.func.jvp(ours, (tensors,), (tangents,))
        assert expected.abs().max() > 0 and same(found, expected, limit), names
        assert torch.equal(out, ours(tensors)) and found.dtype == out.dtype
        assert same(dual_tangent(ours, tensors, tangents, names), expected, limit), names
    compiled = torch.compile(lambda t, dt: torch.func.jvp(ours, (t,), (dt,))[1], fullgraph=True, backend="aot_eager")
    assert same(compiled(tensors, tangents), expected, limit)


def squares(function):
    return lambda t: function(t).float().square().sum() if next(iter(t.values())).dtype != torch.float64 \
        else function(t).square().sum()


@pytest.mark.parametrize("case", FORWARD)
def test_forward_over_reverse(case, place, ops):
    """The tangent of a gradient, as in a Hessian times a vector; of gelu, whose gradient is not linear, a refusal."""
    device, dtype, limit = place
    ours, theirs, tensors, wide = pair_of(case, ops, device, dtype)
    tangents = tangents_of(tensors, list(tensors))
    wide_tangents = {name: t.double().cpu() for name, t in tangents.items()}
    if case.startswith("gelu"):
        with pytest.raises(NotImplementedError, match="gelu_backward has no derivative in forward mode"):
            torch.func.jvp(torch.func.grad(squares(ours)), (tensors,), (tangents,))
        return
    expected = torch.func.jvp(torch.func.grad(squares(theirs)), (wide,), (wide_tangents,))[1]
    found = torch.func.jvp(torch.func.grad(squares(ours)), (tensors,), (tangents,))[1]
    assert same(found, expected, limit if dtype == torch.float32 else 4 * limit)  # rounded twice more


@pytest.mark.parametrize("case", NO_FORWARD)
def test_no_forward_mode(case, place, ops):
    """What has no derivative in forward mode says so, whatever input the tangent comes with; never zero."""
    device, dtype, _ = place
    ours, _, tensors, _ = pair_of(case, ops, device, dtype)
    sentence = f"^{NO_FORWARD[case]} has no derivative in forward mode"
    for name in tensors:
        tangents = tangents_of(tensors, [name])
        with pytest.raises(NotImplementedError, match=sentence):
            dual_tangent(ours, tensors, tangents, [name])
        with pytest.raises(NotImplementedError, match=sentence):
            torch.func.jvp(lambda t: ours(tensors | {name: t}), (tensors[name],), (tangents[name],))
    with pytest.raises(NotImplementedError, match=sentence):
        torch.func.jvp(torch.func.grad(squares(ours)), (tensors,), (tangents,))
    with pytest.raises(Exception, match="has no derivative in forward mode"):
        torch.compile(lambda t, dt: torch.func.jvp(ours, (t,), (dt,))[1], backend="aot_eager")(tensors, tangents)
    with torch.autograd.forward_ad.dual_level():  # no tangent comes here, or forward mode is off
        assert torch.equal(ours(tensors), ours(tensors))


@pytest.mark.parametrize("case", TRANSFORMED)
def test_torch_func(case, place, ops):
    """grad and vjp of torch.func, alone and in a graph; second derivatives are refused there too."""
    device, dtype, limit = place
    ours, theirs, tensors, wide = pair_of(case, ops, device, dtype)
    dout = upstream(theirs(wide).shape)
    expected, = torch.func.vjp(theirs, wide)[1](dout.double())
    found, = torch.func.vjp(ours, tensors)[1](dout.to(tensors["x"]))
    assert same(found, expected, limit)
    loss = lambda function, dout: lambda t: (function(t) * dout).sum()  # noqa: E731
    ours, dout = loss(ours, dout.to(tensors["x"])), dout.double()
    assert same(torch.func.grad(ours)(tensors), expected, limit)
    compiled = torch.compile(torch.func.grad(ours), fullgraph=True, backend="aot_eager")
    assert same(compiled(tensors), expected, limit)
    if case in ("upsample", "downsample, odd channels"):
        return
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        torch.func.grad(lambda t: sum(g.square().sum() for g in torch.func.grad(squares(ours))(t).values()))(tensors)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", TRANSFORMED)
def test_gradients_of_each_sample(case, place, ops):
    """vmap over grad, and vmap over a backward pass: PyTorch's numbers."""
    device, dtype, limit = place
    ours, theirs, tensors, wide = pair_of(case, ops, device, dtype)
    if case.startswith(("linear", "gelu")):  # whose batch is any dimension
        ours_of_one, theirs_of_one = ours, theirs
    else:
        one = lambda function: lambda t: function({name: value[None] if name in ACTIVATIONS else value  # noqa: E731
                                                   for name, value in t.items()})
        ours_of_one, theirs_of_one = one(ours), one(theirs)
    dims = ({name: 0 if name in ACTIVATIONS else None for name in tensors},)
    expected = torch.vmap(torch.func.grad(squares(theirs_of_one)), dims)(wide)
    assert same(torch.vmap(torch.func.grad(squares(ours_of_one)), dims)(tensors), expected, 2 * limit)
    out, wide_out = torch.vmap(ours_of_one, dims)(tensors), torch.vmap(theirs_of_one, dims)(wide)
    assert same(out, wide_out, limit)
    douts = upstream((2, *theirs(wide).shape))
    found, expected = leaves(tensors), leaves(wide)
    found, expected = (dict(zip(t, torch.autograd.grad(f(t), list(t.values()), d, is_grads_batched=True))) for f, t, d in (
        (ours, found, douts.to(tensors["x"])), (theirs, expected, douts.double())))
    assert same(found, expected, limit)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_jacobians(ops):
    """jacfwd, jacrev and hessian of a 3x3 convolution and of a layer behind one."""
    ours, theirs, tensors, wide = pair_of("conv3x3, odd channels", ops, "cpu", torch.float32)
    part, wide_part = ({name: value[:1, :, :2, :3] if name in ("x", "residual") else value[:1] if name == "emb" else value
                        for name, value in t.items()} for t in (tensors, wide))

    def of(function, t, name):
        return lambda value: function(t | {name: value})

    for name in ("bias", "emb", "x"):
        for transform in (torch.func.jacfwd, torch.func.jacrev):
            assert same(transform(of(ours, part, name))(part[name]), transform(of(theirs, wide_part, name))(
                wide_part[name]), 1e-5), (name, transform)
        found, expected = (torch.func.hessian(squares(lambda v: of(f, t, name)(v[name])))({name: t[name]})[name][name]
                           for f, t in ((ours, part), (theirs, wide_part)))
        assert same(found, expected, 1e-5), name


class Smooth(torch.nn.Module):
    """A network of what has a derivative in forward mode."""
    def __init__(self, ops=None):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 3, 3, padding=1)
        self.emb, self.mix = torch.nn.Linear(4, 8), torch.nn.Conv2d(8, 8, 1)
        self.ops = ops

    def forward(self, x, t):
        parameters = [p for layer in (self.a, self.mix, self.b, self.emb) for p in (layer.weight, layer.bias)]
        wa, ba, wm, bm, wb, bb, we, be = parameters
        steps = t[:, None] * torch.arange(1, 5, device=t.device, dtype=t.dtype)
        if ops := self.ops:
            h = ops.conv3x3(x, wa, ba, ops.linear(steps, we, be))
            h = ops.upsample(ops.conv1x1(ops.gelu(ops.downsample(h)), wm, bm))
            return ops.conv3x3(h, wb, bb, residual=x)
        h = F.conv2d(x, wa, ba, padding=1) + F.linear(steps, we, be)[:, :, None, None]
        h = F.conv2d(F.gelu(F.avg_pool2d(h, 2), approximate="tanh"), wm, bm)
        return x + F.conv2d(F.interpolate(h, scale_factor=2), wb, bb, padding=1)


def test_mean_flow(ops):
    """A step of mean flow (Geng et al. 2025): the loss, with a jvp in its target, and its gradients are PyTorch's."""
    x, v, t = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8), torch.tensor([0.3, 0.9])
    found = []
    for model in (Smooth(ops), Smooth().double()):
        a, b, s = (value.to(next(model.parameters())) for value in (x, v, t))
        u, dudt = torch.func.jvp(model, (a, s), (b, torch.ones_like(s)))
        loss = (u - (b - s[:, None, None, None] * dudt).detach()).square().mean()
        loss.backward()
        found.append({"loss": loss, "dudt": dudt} | {name: p.grad for name, p in model.named_parameters()})
    assert same(*found, 1e-5)


# ----------------------------------------------------------------------------------------------------
# what is refused

def test_refusals(place, ops):
    """A sentence each, as an exception; the next call works, and gives what it gave."""
    device, dtype, _ = place
    zeros = {shape: torch.zeros(shape, device=device, dtype=dtype) for shape in (
        (8,), (32,), (48,), (2, 8), (2, 64), (8, 8), (2, 8, 4, 4), (2, 32, 4, 4), (2, 48, 4, 4), (2, 8, 3, 4),
        (8, 8, 3, 3), (8, 4, 3, 3))}
    x, w, wide, weight = zeros[2, 8, 4, 4], zeros[8, 8, 3, 3], zeros[2, 32, 4, 4], zeros[32,]
    refused = {
        "x is \\(B, C, H, W\\), not of 2": lambda: ops.conv3x3(zeros[2, 8], w),
        "w has shape \\[8, 4, 3, 3\\], needed is \\[8, 8, 3, 3\\]": lambda: ops.conv3x3(x, zeros[8, 4, 3, 3]),
        "bias has shape": lambda: ops.conv3x3(x, w, zeros[2, 8]),
        "emb has shape": lambda: ops.conv3x3(x, w, emb=zeros[8,]),
        "residual has shape": lambda: ops.conv3x3(x, w, residual=wide),
        "residual is in": lambda: ops.conv3x3(x, w, residual=torch.zeros_like(x, dtype=torch.float64)),
        "w is in": lambda: ops.conv3x3(x, w.double()),
        "conv3x3 computes in": lambda: ops.conv3x3(x.double(), w.double()),
        "gelu computes in": lambda: ops.gelu(x.half()),
        "w has 0 output channels": lambda: ops.conv1x1(x, zeros[8, 8][:0]),
        "images of 8 x 0 x 4": lambda: ops.conv3x3(x[:, :, :0], w),
        "70000 images": lambda: ops.conv3x3(x[:1].expand(70000, -1, -1, -1), w),
        "50000 channels": lambda: ops.upsample(x[:, :1].expand(-1, 50000, -1, -1)),
        "pixels in all are the most": lambda: ops.upsample(x[:1, :, :1, :1].expand(-1, -1, 1 << 16, 1 << 15)),
        "2\\^31 numbers": lambda: ops.gelu(x[:1, :1, :1, :1].expand(1 << 16, 1 << 16, 1, 1)),
        "3 groups do not divide 32": lambda: ops.group_norm(wide, 3, weight, weight),
        "one channel a group": lambda: ops.group_norm(wide, 32, weight, weight),
        "scale_shift has shape": lambda: ops.group_norm(wide, 8, weight, weight, False, zeros[2, 8]),
        "not q, k and v": lambda: ops.attention(x, 2),
        "5 heads do not divide 16": lambda: ops.attention(zeros[2, 48, 4, 4], 5),
        "3 x 4 can't be halved": lambda: ops.downsample(zeros[2, 8, 3, 4]),
        "t is \\(B,\\), of integers": lambda: ops.timestep_embedding(zeros[8,], 8),
        "width is even": lambda: ops.timestep_embedding(torch.arange(3, device=device), 7),
    }
    if device == "cuda":
        refused |= {
            "multiples of 32, not 48": lambda: ops.group_norm(zeros[2, 48, 4, 4], 8, zeros[48,], zeros[48,]),
            "heads of 8 channels": lambda: ops.attention(zeros[2, 48, 4, 4], 2),
            "w is on cpu": lambda: ops.conv3x3(x, w.cpu()),
        }
    tensors = inputs_of(conv(2, 8, 8, 5, 4, "bias", "emb"), device, dtype)
    before = ops.conv3x3(**tensors)
    for sentence, call in refused.items():
        with contextlib.suppress(RuntimeError), torch.no_grad():
            call()
            pytest.fail(f"not refused: {sentence}")
        with pytest.raises(RuntimeError, match=sentence):
            call()
        assert torch.equal(ops.conv3x3(**tensors), before), sentence


def freed(t):
    """A tensor of t's kind whose storage was freed, as FSDP does."""
    t = t.detach().clone()
    t.untyped_storage().resize_(0)
    return t


def test_freed_storage(place, ops):
    """Each tensor of each operator, in turn without memory: a sentence, and no crash; where nothing is needed, nothing."""
    device, dtype, _ = place
    torch.manual_seed(0)
    refused = 0
    for name, arguments in operator_calls(device, dtype):
        op = getattr(torch.ops.train_unet, name)
        for i, value in enumerate(arguments):
            for j in range(len(value)) if isinstance(value, list) else [None]:
                given = list(arguments)
                if j is not None:
                    given[i] = [*value[:j], freed(value[j]), *value[j + 1:]]
                elif torch.is_tensor(value):
                    given[i] = freed(value)
                else:
                    continue
                with pytest.raises(RuntimeError, match=f"^{name}: .* no memory for it: its storage was freed"):
                    op(*given)
                refused += 1
    assert refused > 60
    short = torch.zeros(2, 8, 4, 4, device=device, dtype=dtype)
    short.untyped_storage().resize_(short.untyped_storage().nbytes() - 1)
    with pytest.raises(RuntimeError, match="gelu: the first tensor .* made smaller"):
        ops.gelu(short)
    parameter = torch.nn.Parameter(torch.zeros(8, device=device))
    parameter.grad = torch.ones_like(parameter)
    parameter.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory for it"):
        ops.AdamW([parameter]).step()


def test_other_kinds_of_tensors(ops):
    """Sparse, quantised, complex: refused. Negated views are read as they are, and meta tensors give shapes."""
    x, w = torch.randn(2, 8, 4, 4), torch.randn(8, 8, 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are to be removed from PyTorch
        quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    for bad in (x.to_sparse(), quantised, x.to(torch.complex64), x.to(torch.int32)):
        for call in (lambda: ops.conv3x3(bad, w), lambda: ops.gelu(bad), lambda: ops.upsample(bad),
                     lambda: ops.conv3x3(x, w, residual=bad)):
            with pytest.raises((RuntimeError, NotImplementedError)):
                call()
    negated = torch.view_as_complex(torch.randn(2, 8, 4, 4, 2)).conj().imag  # with the bit that says: take the negative
    assert negated.is_neg() and torch.equal(ops.conv3x3(negated, w), ops.conv3x3(negated.resolve_neg().clone(), w))
    assert ops.conv3x3(x.to("meta"), w.to("meta")).shape == x.shape
    for call in (lambda: ops.conv3x3(x, w.to("meta")), lambda: ops.conv3x3(x.to("meta"), w), lambda: ops.conv3x3(
            x, w, residual=x.to("meta"))):
        with pytest.raises(RuntimeError, match="conv3x3: its tensors are on cpu and meta"):
            call()
    p = torch.zeros(3)
    with pytest.raises(RuntimeError, match="adamw_: its tensors are on cpu and meta"):
        torch.ops.train_unet.adamw_([p], [p.to("meta")], [p], [p], torch.zeros(()), 1e-3, 0.9, 0.99, 1e-8, 0.1)


def test_failures_of_launchers(tmp_path):
    """What the program refuses within a call, or finds wrong there, is thrown, with its sentence, and the call after
    it works."""
    (tmp_path / "failing.cpp").write_text(f'#include "{ROOT}/dev/torch_ops/torch_ops.cu"\n' + r"""
        static std::string thrown(const Place& place, auto launches) {
            try {
                at(place, 1, launches);
            } catch (const std::runtime_error& error) {
                return error.what();
            }
            return "";
        }
        int main() {
            std::vector<std::vector<float>> memory;
            Place place;
            place.allocate = [&](size_t bytes) { return memory.emplace_back(bytes / 4 + 1).data(); };
            Place broke;
            broke.allocate = [](size_t) -> void* { throw std::runtime_error("no memory"); };
            puts(thrown(place, [] { fail("so many %d", 7); }).c_str());
            puts(thrown(place, [] { assert(1 + 1 == 3); }).c_str());
            puts(thrown(broke, [] {}).c_str());
            puts(thrown(place, [] {}).c_str());
            float x[8] = {1}, out[8] = {};
            unet_layers_cpu()->gelu(place, {out, 1, 1, 1, 8}, {x, 1, 1, 1, 8});
            printf("%.4f\n", out[0]);
        }""")
    run("g++", "-std=c++20", "-O0", "-w", "-o", tmp_path / "failing", tmp_path / "failing.cpp", "-ldl")
    lines = run(tmp_path / "failing").stdout.splitlines()
    assert lines[0] == "so many 7" and "1 + 1 == 3 does not hold" in lines[1] and lines[2:] == ["no memory", "", "0.8412"]


def test_threads(ops):
    """Callers on several threads don't disturb each other."""
    jobs = []
    for case in ("conv3x3, many pixels", "attention", "group norm, SiLU", "conv1x1, all"):
        functions, shapes, options = CASES[case]
        tensors = inputs_of(shapes, "cpu", torch.float32)
        dout = upstream(functions[1](**tensors, **options).shape)
        jobs.append(lambda f=functions[0], t=tensors, d=dout, o=options: outcome(lambda **k: f(ops, **k), t, d, **o))
    expected = [job() for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for found, wanted in zip(pool.map(lambda job: job(), jobs), expected):
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# ----------------------------------------------------------------------------------------------------
# AdamW

def adamw_pair(ops, device):
    torch.manual_seed(0)
    shapes = [(4,), (7, 3), (1,), (), (6, 5, 3, 3), (0, 3), (1025,)] + [(i,) for i in range(1, 70)]
    mine = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    mine[4].data = mine[4].data.contiguous(memory_format=torch.channels_last)
    theirs = [p.detach().double().clone().requires_grad_() for p in mine]
    return mine, theirs


def groups_of(params):
    return [dict(params=params[::2], weight_decay=0.1), dict(params=params[1::2], lr=3e-3, weight_decay=0.0)]


FLAGS = dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6)


def train_both(pair, optimizers, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for i, (a, b) in enumerate(zip(*pair)):
            gradient = torch.randn(a.shape, generator=generator).to(a.device)
            given = not (i % 5 == 1 and step % 2)  # some sit out some steps
            a.grad = gradient.contiguous() if given else None
            b.grad = gradient.double() if given else None
        for optimizer in optimizers:
            optimizer.step()


def compare(pair, limit=1e-5):
    for a, b in zip(*pair):
        if a.numel():
            assert error_of(a.detach().cpu().double(), b.detach().cpu()) < limit


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_adamw(device, ops):
    """Against torch.optim.AdamW in float64; a state goes from one to the other and back."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    pair = adamw_pair(ops, device)
    mine, theirs = ops.AdamW(groups_of(pair[0]), **FLAGS), torch.optim.AdamW(groups_of(pair[1]), **FLAGS)
    train_both(pair, (mine, theirs), 7, 1)
    compare(pair)
    mine_again, theirs_again = ops.AdamW(groups_of(pair[0]), **FLAGS), torch.optim.AdamW(groups_of(pair[1]), **FLAGS)
    mine_again.load_state_dict(copy.deepcopy(theirs.state_dict()))
    theirs_again.load_state_dict(copy.deepcopy(mine.state_dict()))
    train_both(pair, (mine_again, theirs_again), 4, 2)
    compare(pair)
    with pytest.raises(ValueError, match="AdamW: lr -1"):
        ops.AdamW(pair[0], lr=-1.0)
    bad = torch.zeros(8, device=device, dtype=torch.float64).requires_grad_()
    bad.grad = torch.ones_like(bad)
    with pytest.raises(RuntimeError, match="float32"):
        ops.AdamW([bad]).step()


def test_adamw_of_other_options(ops):
    """What torch.optim.AdamW can and this can not is refused, wherever it comes from, and nothing is changed."""
    def trained(kind, **options):
        parameters = [torch.ones(3, 2, requires_grad=True), torch.ones(5, requires_grad=True)]
        optimizer = kind(parameters, lr=0.1, **options)
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        return parameters, optimizer

    def refused(state, says):
        parameters, mine = trained(ops.AdamW)
        before = copy.deepcopy(mine.state_dict())
        with pytest.raises(ValueError, match=says):
            mine.load_state_dict(state)
        assert str(mine.state_dict()) == str(before)

    theirs = trained(torch.optim.AdamW)[1].state_dict()
    for name in ("amsgrad", "maximize", "differentiable"):
        value = name != "differentiable"
        state = trained(torch.optim.AdamW, **{name: value})[1].state_dict() if value else copy.deepcopy(theirs)
        state["param_groups"][0][name] = True
        refused(state, f"{name}=True is not implemented")
        with pytest.raises(ValueError, match=f"{name}=True is not implemented"):
            ops.AdamW([dict(params=[torch.ones(2)]), {"params": [torch.ones(3)], name: True}])
        parameters, mine = trained(ops.AdamW)
        with pytest.raises(ValueError, match=f"{name}=True is not implemented"):
            mine.add_param_group({"params": [torch.ones(3)], name: True})
        mine.param_groups[0][name] = True
        kept = [p.detach().clone() for p in parameters]
        with pytest.raises(ValueError, match=f"{name}=True is not implemented"):
            mine.step()
        assert all(torch.equal(p, before) for p, before in zip(parameters, kept))
    for options in (dict(foreach=True), dict(foreach=False), dict(fused=True), dict(capturable=False)):  # ways to the same
        trained(ops.AdamW)[1].load_state_dict(trained(torch.optim.AdamW, **options)[1].state_dict())
    refused(trained(torch.optim.SGD, momentum=0.9)[1].state_dict(), "betas None|another optimiser")
    with pytest.raises(ValueError, match="lr -1"):
        ops.AdamW([dict(params=[torch.ones(2)], lr=-1.0)])

    def changed(change):
        state = copy.deepcopy(theirs)
        change(state["state"][1])
        return state

    refused(changed(lambda s: s.update(max_exp_avg_sq=s["exp_avg_sq"])), "max_exp_avg_sq.*another optimiser")
    refused(changed(lambda s: s.pop("exp_avg")), "state of parameter 1 holds step, exp_avg_sq; needed")
    refused(changed(lambda s: s.update(exp_avg=torch.zeros(4))), r"exp_avg of parameter 1 is .* shape \[4\], .* \[5\]")
    refused(changed(lambda s: s.update(exp_avg=torch.zeros(5, dtype=torch.int32))), "exp_avg of parameter 1 is torch.int32")
    for bad in (torch.zeros(2), float("nan"), -1, 0.5):
        refused(changed(lambda s: s.update(step=bad)), "step of parameter 1")
    no_decay = copy.deepcopy(theirs)
    no_decay["param_groups"][0]["decoupled_weight_decay"] = False
    refused(no_decay, "decoupled_weight_decay=False is not implemented")
    # a step that is a number or has a dimension, moments in another type: the same update
    pair = [trained(ops.AdamW) for _ in range(2)]
    pair[0][1].load_state_dict(changed(lambda s: s.update(step=1)))
    pair[1][1].load_state_dict(changed(lambda s: s.update(step=torch.tensor([1]), exp_avg=s["exp_avg"].double())))
    for parameters, optimizer in pair:
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(pair[0][0], pair[1][0]))


# ----------------------------------------------------------------------------------------------------
# the build

def test_built_for_a_processor(ops, tmp_path, monkeypatch):
    """The folder's name tells the processor's features; what is built is used without a compiler, or the right to write,
    and where neither is there a sentence says what to do."""
    def flags(*words):
        path = tmp_path / "cpuinfo"
        path.write_text("processor : 0\n" + f"flags : {' '.join(words)}\n")
        monkeypatch.setattr("builtins.open", lambda name, *more, **options: real_open(
            path if name == "/proc/cpuinfo" else name, *more, **options))
        name = ops.processor()
        monkeypatch.undo()
        return name

    real_open = open
    assert flags("fpu", "avx2") == flags("avx2", "fpu") != flags("fpu", "avx2", "avx512f")
    if "TORCH_EXTENSIONS_DIR" not in os.environ:  # beside it may lie what was built without the GPU, or for another
        folder = ROOT / f"build/torch_ops/{torch.__version__}-{ops.gpu_architecture() or 'cpu'}-{ops.processor()}"
        assert (folder / "built").read_text() == ops.contents(folder, ops.gpu_architecture())
    # sources that have changed are built again
    before = ops.contents(tmp_path, 0)
    monkeypatch.setattr(ops, "CXX_FLAGS", [*ops.CXX_FLAGS, "-O1"])
    assert ops.contents(tmp_path, 0) != before
    monkeypatch.undo()
    monkeypatch.setattr(ops.cpp_extension, "load", None)  # not called: found
    ops.build()
    monkeypatch.undo()
    # two builders: the second waits for the first and finds its work done
    made = []

    def slow(place, architecture):
        made.append(place)
        barrier.wait()

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ops, "compile_into", slow)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    barrier = threading.Barrier(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        builders = [pool.submit(ops.build) for _ in range(2)]
        barrier.wait()
        for builder in builders:
            builder.result()
    assert len(made) == 1 and made[0].parent == tmp_path / "cache/torch_ops" and (made[0] / "built").exists()
    # an old version's lock, of a process that was killed, keeps nobody waiting
    (made[0] / "torch_ops").mkdir()
    (made[0] / "torch_ops/lock").touch()
    with ops.alone_in(made[0]):
        assert not (made[0] / "torch_ops/lock").exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match="not built yet .* can't be written: Not a directory; set TORCH_EXTENSIONS_DIR"):
        ops.build()


# ----------------------------------------------------------------------------------------------------
# under compute-sanitizer

SMALL = """
import sys; sys.path.insert(0, "dev/torch_ops")
import torch, torch_ops as ops

leaves = []
def tensor(*shape, dtype=None):
    x = torch.randn(*shape, device="cuda").to(dtype or here)
    x = (x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x).requires_grad_()
    leaves.append(x)
    return x

for here in (torch.bfloat16, torch.float32):
    # initcheck does not see what the copy engine writes, which in bf16 it does: there PyTorch fills all memory that it
    # hands out with NaN first, and what is read too early shows.
    torch.use_deterministic_algorithms(here == torch.bfloat16)
    x, odd = tensor(2, 64, 16, 16), tensor(2, 96, 9, 7)
    norm, norm_odd = ([tensor(C, dtype=torch.float32) for _ in range(2)] for C in (64, 96))
    for out in (ops.conv3x3(x, tensor(64, 64, 3, 3), tensor(64), tensor(2, 64), tensor(2, 64, 16, 16)),
                ops.conv3x3(odd, tensor(40, 96, 3, 3), tensor(40)), ops.conv1x1(x, tensor(192, 64, 1, 1), tensor(192)),
                ops.linear(tensor(5, 64), tensor(72, 64), tensor(72)), ops.group_norm_silu(x, 32, *norm),
                ops.group_norm(odd, 32, *norm_odd, scale_shift=tensor(2, 192)),
                ops.norm_conv3x3(x, 32, *norm, tensor(64, 64, 3, 3), tensor(64)), ops.attention(tensor(2, 192, 8, 8), 2),
                ops.upsample(x), ops.downsample(x), ops.gelu(odd)):
        out.backward(torch.randn_like(out))
        torch.cuda.synchronize()
        print(type(out.grad_fn).__name__, flush=True)
        assert out.isfinite().all()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    ops.timestep_embedding(torch.arange(4, device="cuda"), 64, dtype=here)
p = tensor(100, 7, dtype=torch.float32)
p.grad = torch.randn_like(p)
ops.AdamW([p]).step()
torch.cuda.synchronize()
print("all of them")
"""


@pytest.mark.parametrize("tool", SANITIZERS)
def test_sanitized_cuda(tool, gpu):
    """Every operator and its gradient, once, in both types."""
    sanitized(tool, sys.executable, "-c", SMALL, cwd=ROOT, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


# ----------------------------------------------------------------------------------------------------
# the twin

TWINS = ["eps", "all", "four channels", "resampling blocks", "learned resampling", "legacy order", "everything"]


@pytest.mark.parametrize("name", TWINS)
def test_twin(name, place, ops):
    """The whole network with these operators against itself in float64, in three batches. On a GPU at most twice as far as
    PyTorch, in the batches' mean, for a tensor of a few elements may be right by luck."""
    device, dtype, limit = place
    config = TRAINING[name]
    model = train_unet.perturb(train_unet.init_weights(train_unet.UNet(config), config.seed), config.seed).eval()
    theirs = copy.deepcopy(model).to(device)
    twin = train_unet.use_native_operators(copy.deepcopy(model)).to(device)
    model.double()
    size, C = config.image_size, config.in_channels
    found, of_theirs = [], []
    for seed in (1, 2, 3):
        generator = torch.Generator().manual_seed(seed)
        x, t = torch.randn(2, C, size, size, generator=generator), torch.tensor([3, config.diffusion_steps - 1])
        y = [torch.tensor([0, 1])] if config.class_cond else []
        dout = torch.randn(2, C * (1 + config.learn_sigma), size, size, generator=generator)

        def calculated(network, dtype):
            network.zero_grad()
            place = next(network.parameters()).device
            with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
                out = network(x.to(place, torch.promote_types(dtype, torch.float32)), t.to(place), *(a.to(place) for a in y))
            out.backward(dout.to(out))
            return [values.detach().cpu().double() for values in (out, *(p.grad for p in network.parameters()))]

        expected = calculated(model, torch.float64)
        for errors, network in ((found, twin), (of_theirs, theirs)):
            errors.append([error_of(a, r) for a, r in zip(calculated(network, dtype), expected, strict=True)])
    if device == "cuda":
        found, of_theirs = np.mean(found, axis=0), np.mean(of_theirs, axis=0)
        allowed = np.maximum(limit, 2 * of_theirs)
    else:
        found = np.max(found, axis=0)
        allowed = np.full(len(found), limit)
    names = ["out", *dict(model.named_parameters())]
    assert len(names) == len(found)
    assert not {name: (error, most) for name, error, most in zip(names, found, allowed) if not error < most}


def test_twin_compiles(ops):
    """The whole network is one graph."""
    config = TRAINING["everything"]
    model = train_unet.perturb(train_unet.init_weights(train_unet.UNet(config), config.seed), config.seed).eval()
    twin = train_unet.use_native_operators(model)
    x, t, y = torch.randn(2, config.in_channels, 16, 16), torch.tensor([3, 40]), torch.tensor([0, 1])
    eager, found = (results(twin, call, x, t, y) for call in (
        twin, torch.compile(twin, fullgraph=True, backend="aot_eager")))
    for a, b in zip(found, eager):
        assert error_of(a, b) < 1e-5


def test_twin_trains(tmp_path, images8):
    """train_unet.py --operators native: the losses of PyTorch's operators, and it resumes."""
    config = Config(**ADM | dict(batch_size=3, lr=1e-3, seed=5, weight_decay=0.1, resblock_updown=False))
    losses = {}
    for operators in ("torch", "native"):
        words = ["--operators", operators, "--compile", 0, "--device", "cpu", "--log_every", 1, "--sample_every", 0]
        steps = 5 if operators == "torch" else 3
        flags = [*start_flags(config, images8, tmp_path / operators, steps)[:-len(QUICK)], *words]
        script("train_unet.py", *flags)
        losses[operators] = losses_in(tmp_path / operators)
    script("train_unet.py", "--resume", tmp_path / "native", "--out_dir", tmp_path / "native", "--steps", 5, *words)
    losses["native"] = losses_in(tmp_path / "native")
    assert list(losses["native"]) == [1, 2, 3, 4, 5]
    for step, loss in losses["torch"].items():
        assert abs(losses["native"][step] - loss) < 1e-5 * loss


# ----------------------------------------------------------------------------------------------------
# on a GPU

def test_cuda_graph(gpu, ops):
    """A captured training step, replayed, is the step; on new data too."""
    torch.manual_seed(0)
    model = Block(ops).to("cuda")
    twin = Block(ops).to("cuda")
    twin.load_state_dict(model.state_dict())
    xs, t = torch.randn(5, 4, 3, 16, 16, device="cuda"), torch.arange(4, device="cuda")
    x = xs[0].clone()
    start = copy.deepcopy(model.state_dict())

    def step(model, optimizer, x):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x, t).float() - x.mean()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    optimizer, other = ops.AdamW(model.parameters(), lr=1e-2), ops.AdamW(twin.parameters(), lr=1e-2)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        loss = step(model, optimizer, x)
    model.load_state_dict(start)
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    for data in xs:
        x.copy_(data)
        graph.replay()
        assert torch.equal(loss, step(twin, other, data))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))


def test_two_streams(gpu, ops):
    """Calls on two streams, at the same time, give what they give one after the other."""
    torch.manual_seed(0)
    w = torch.randn(128, 128, 3, 3, device="cuda") / 34
    x = [torch.randn(8, 128, 16, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def chain(x):
        for _ in range(20):
            dw = torch.ops.train_unet.conv3x3_weight_gradient(x, x, False)[0]
            x = ops.conv3x3(x, w + 1e-3 * dw / dw.norm())
            x = x / x.std()
        return x

    expected = [chain(a) for a in x]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(3):
        found = []
        torch.cuda.synchronize()
        for stream, a in zip(streams, x):
            with torch.cuda.stream(stream):
                found.append(chain(a))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        assert all(torch.isfinite(a).all() for a in found)


def test_out_of_memory(gpu, ops):
    """A launcher that gets no workspace is an exception, and the next call gives what it gave."""
    tensors = inputs_of(conv(2, 64, 64, 8, 8, "bias"), "cuda", torch.bfloat16)
    before = ops.conv3x3(**tensors)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2e-4)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            ops.conv3x3(**tensors)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(ops.conv3x3(**tensors), before)


# ----------------------------------------------------------------------------------------------------
# the benchmark

def test_benchmark_compares_the_same(ops, tools):
    """dev/torch_ops/bench_ops.py's pairs of functions give the same numbers; its tables hold what was measured."""
    bench = tools("bench_ops")
    for name, shape, ours, theirs, shapes in bench.cases(ops):
        small = {key: (1, value[1], *[min(size, 8) for size in value[2:]]) if key == "x" else value
                 for key, value in shapes.items()}
        tensors = inputs_of(small, "cpu", torch.float32)
        assert error_of(ours(**tensors), theirs(**tensors)) < 1e-5, (name, shape)
    text = bench.render_operators([("gelu", "8x8", "forward", 2.0, 3.0)], "a GPU")
    assert text.splitlines()[-1] == "| `gelu` | 8x8 | forward | 2.0 | 3.0 | 1.50 |"
    line = dict(ms=8.0, memory=1.5, torch="2.11")
    found = {("eager", 32): line, ("eager, these operators", 32): line | dict(ms=4.0)}
    rows = [row.split(" | ")[2:] for row in bench.render_steps(found, "a GPU").splitlines()[-2:]]
    assert rows == [["8.00", "4000", "1.50 GiB", " |"], ["4.00", "8000", "1.50 GiB", "2.00 |"]]
    assert all(way.removesuffix(", these operators") in bench.WAYS for way in bench.WAYS)
