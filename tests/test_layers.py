"""The program's own tests (network.cu and readers.cu), and its layers and whole model against PyTorch in float64."""
import dataclasses
import pathlib
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_unet
import unet_io
from harness import ADM, NETWORK, READERS, SMALL, TOY, run, variant
from unet_io import Config


# ----------------------------------------------------------------------------------------------------
# the program's own tests

@pytest.mark.parametrize("program", [NETWORK, READERS], ids=["network", "readers"])
def test_program(cpp, program):
    cpp(program)


def test_more_damaged_files(cpp):
    cpp(READERS, "--fuzz", 20000, "--seed", 3)


def test_usage():
    for words in (["--only", "nonsense"], ["--only"], ["--fuzz", 3]):
        assert re.fullmatch(r"error: .*\n", run(NETWORK, *words, status=2).stderr)
    for words in (["--fuzz"], ["--only", "plan"], ["--fuzz", 3, "--seed"]):
        assert "usage" in run(READERS, *words, status=2).stderr


@pytest.mark.parametrize("name, arguments", [("network_asan", ("--only", "plan")), ("readers_asan", ("--fuzz", 3000, "--seed", 2))])
def test_sanitized(cpp, name, arguments):
    """Plan and file readers under AddressSanitizer and UndefinedBehaviorSanitizer."""
    cpp(variant(name), *arguments)


# ----------------------------------------------------------------------------------------------------
# layers

class Layers:
    """Collects cases for `network --layers`: inputs in float32, PyTorch's answers in float64."""
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
             dict(dx0=(M, C), dx20=(M, C2)).items() if min(shape) > 0}
    out = F.linear(torch.cat([x, x2], 1) if C2 else x, w, b) + (added if residual else 0)
    out.backward(dout)
    outputs = dict(out=out, dw=w.grad, db=b.grad)
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
    out = F.conv2d(x, w, b, padding=1) + (embedding[:, :, None, None] if emb else 0)
    out = out + (added if residual else 0)
    out.backward(dout)
    name = f"conv3x3 {B}x{H}x{W}x{C} to {O}{' emb' * emb}{' residual ' * bool(residual)}{residual}"
    layers.add(name, [B, H, W, C, O, residual == "in place"],
               dict(x=nhwc(x), w=nhwc(w), b=b, emb=embedding, residual=nhwc(added) if residual else None,
                    dout=nhwc(dout)),
               dict(out=nhwc(out), dx=nhwc(x.grad) if wants_dx else None, dw=nhwc(w.grad),
                    db=b.grad, demb=embedding.grad if emb else None))


def add_norm(layers, B, T, C, C2, G, silu=True, accumulate=False, dresidual=False, offset=0.0):
    x = layers.random(B, C, T, offset=offset)
    x2 = layers.random(B, C2, T, scale=2.0, offset=1.0) if C2 else None
    K = C + C2
    w, b, dout = layers.random(K, offset=1.0, scale=0.3), layers.random(K), layers.random(B, K, T)
    branch = layers.random(B, C, T) if dresidual else None
    dx0, dx20 = layers.random(B, C, T), layers.random(B, C2, T) if C2 else None
    both = torch.cat([x, x2], 1) if C2 else x
    out = F.group_norm(both, G, w, b, eps=1e-5)
    out = F.silu(out) if silu else out
    out.backward(dout)
    grouped = both.detach().reshape(B, G, -1)
    mean = grouped.mean(2).repeat_interleave(K // G, 1)  # by channel, as the layer leaves them
    rstd = (grouped.var(2, unbiased=False) + 1e-5).rsqrt().repeat_interleave(K // G, 1)
    scale = rstd * w.detach() * (0.5 if silu else 1)
    shift = b.detach() * (0.5 if silu else 1) - mean * scale
    dx = x.grad + (branch if dresidual else 0) + (dx0 if accumulate else 0)
    name = (f"groupnorm {B}x{T}x{C}{f'+{C2}' if C2 else ''} in {G}{' silu' * silu}{' add' * accumulate}"
            f"{' branch' * dresidual}{f' mean {offset:g}' if offset else ''}")
    last = channels_last
    layers.add(name, [B, T, C, C2, G, silu, accumulate],
               dict(x=last(x), x2=last(x2) if C2 else None, w=w, b=b, dout=last(dout),
                    dresidual=last(branch) if dresidual else None, dx0=last(dx0),
                    dx20=last(dx20) if C2 else None),
               dict(out=last(out), mean=mean, rstd=rstd, scale=scale, shift=shift, dx=last(dx),
                    dx2=last(x2.grad + (dx20 if accumulate else 0)) if C2 else None,
                    dw=w.grad, db=b.grad))


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
    for B, n, T in ((1, 8, 1000), (3, 4096, 1000), (2, 4104, 7), (33, 192, 30), (1, 24584, 2)):
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
    add_linear(layers, 10, 16384, 4096, 40)
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
    add_attention(layers, 2, 81, 144, 2)               # heads of 72, as DiT-XL's
    add_attention(layers, 1, 4225, 4, 1)               # so many pixels that fewer rows fit at a time
    for kind in ("upsample", "downsample"):
        add_resample(layers, kind, 2, 16, 16, 64)
        add_resample(layers, kind, 3, 2, 6, 20, accumulate=True)
        add_resample(layers, kind, 1, 2, 2, 4)
    return layers.tensors


def test_layers(cpp, tmp_path):
    unet_io.write_tensors(tmp_path / "layers.bin", layer_cases())
    cpp(NETWORK, "--layers", tmp_path / "layers.bin")


@pytest.mark.parametrize("vectors", ["avx2", "neon"])
def test_layers_of_other_processors(cpp, tmp_path, vectors):
    """The same layers and a model by narrower vectors than this processor's, Arm's in emulation."""
    test = [variant(vectors)]
    if vectors == "avx2" and " avx2 " not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    if vectors == "neon":
        if not shutil.which("qemu-aarch64"):
            pytest.skip("no qemu-aarch64 to run Arm's instructions")
        test = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", *test]
    unet_io.write_tensors(tmp_path / "layers.bin", layer_cases())
    cpp(*test, "--layers", tmp_path / "layers.bin")
    check_model(cpp, tmp_path, MODELS["toy"], test)
    cpp(*test, "--only", "threads")


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
    "classes": Config(**TOY | dict(class_cond=True, num_classes=3, batch_size=4, seed=12,
                                   cond_drop_prob=0.3)),
    "scale and shift": Config(**TOY | dict(use_scale_shift_norm=True, batch_size=3, seed=15)),
    "scale, shift, classes": Config(**TOY | dict(use_scale_shift_norm=True, class_cond=True, num_classes=5,
                                                 channel_mult=(2, 1), num_res_blocks=2, seed=16)),
    "two heads, one in the decoder": Config(**TOY | dict(num_heads=2, num_heads_upsample=1, seed=17,
                                                         rescale_timesteps=True, diffusion_steps=250)),
    "resampling blocks": Config(**TOY | dict(image_size=16, channel_mult=(1, 2, 1), resblock_updown=True,
                                             batch_size=3, seed=18)),
    "resampling blocks, scale and shift": Config(**TOY | dict(
        resblock_updown=True, use_scale_shift_norm=True, channel_mult=(2, 3), num_res_blocks=2, seed=19)),
    "learned resampling": Config(**TOY | dict(image_size=16, channel_mult=(2, 1, 2), conv_resample=True,
                                              batch_size=3, seed=20)),
    "learned resampling at odd sizes": Config(**TOY | dict(image_size=12, channel_mult=(1, 2, 1), seed=21,
                                                           conv_resample=True, attention_resolutions=(6, 3))),
    "learned variance, eps": Config(**TOY | dict(learn_sigma=True, batch_size=8, seed=22,
                                                 diffusion_steps=21)),  # where some timesteps are 0
    "learned variance, v": Config(**TOY | dict(learn_sigma=True, batch_size=8, seed=23, predict="v",
                                               noise_schedule="cosine", diffusion_steps=6, in_channels=1)),
    "learned variance, x0": Config(**TOY | dict(learn_sigma=True, batch_size=5, seed=24, predict="x0",
                                                zero_terminal_snr=True)),
    "legacy order": Config(**TOY | dict(num_heads=4, num_heads_upsample=2, use_new_attention_order=False,
                                        attention_resolutions=(8, 4), seed=25)),
    "adm64 shrunk": Config(**ADM | dict(image_size=16, channel_mult=(1, 2, 3, 4), num_res_blocks=3, seed=26,
                                        attention_resolutions=(8, 4, 2), noise_schedule="cosine")),
    "everything": Config(**ADM | dict(channel_mult=(2, 1, 2), num_heads=4, num_heads_upsample=2, seed=27,
                                      use_new_attention_order=False, conv_resample=True, cond_drop_prob=0.3,
                                      rescale_timesteps=True, diffusion_steps=40, predict="v", in_channels=4,
                                      attention_resolutions=(8, 2), batch_size=6)),
    "narrow first level": Config(**TOY | dict(num_channels=64, channel_mult=(0.5, 1), seed=28)),
    "narrow first level, adm": Config(**ADM | dict(image_size=16, num_channels=64, channel_mult=(0.5, 1.5, 1),
                                                   attention_resolutions=(8, 4), seed=29)),
    "grey": Config(**TOY | dict(in_channels=1, seed=13)),
    "four channels": Config(**TOY | dict(in_channels=4, batch_size=1, seed=14)),
    "four levels": Config(**TOY | dict(image_size=16, channel_mult=(1, 1, 2, 2), batch_size=3, seed=10,
                                       attention_resolutions=(8, 2))),
}


def check_model(cpp, tmp_path, config, test=(NETWORK,)):
    train_unet.debug_state(str(tmp_path / "debug"), config)
    cpp(*test, "--model", tmp_path / "debug_weights.bin", tmp_path / "debug_state.bin")


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
    config.seed = next(seed for seed in range(1000) if len(set(unet_io.timesteps(
        dataclasses.replace(config, seed=seed), rows, 0).tolist())) == 32)
    check_model(cpp, tmp_path, config)
