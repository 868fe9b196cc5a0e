"""dev/dit/train_dit.cu, the Diffusion Transformer, against dev/dit/train_dit.py: layers, gradients, training, files, pictures."""
import argparse
import dataclasses
import os
import re
import shutil
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

import generate
import train_unet
import unet_io
from harness import (
    GPU, ROOT, SANITIZERS, TRAIN, call, check_gpu_gradients, checkpoint_in, error_of, first_gradients, losses_in, on_gpu,
    picture, refused, run, same_bits, sanitized, script, settings, start_flags, write_toy_images)
from test_command_line import completed
from test_layers import Layers

sys.path.append(str(ROOT / "dev/dit"))
import train_dit
from train_dit import Config, DiT

DIT = os.environ.get("TRAIN_DIT", str(ROOT / "train_dit"))
TOY = dict(image_size=8, patch_size=2, depth=2, hidden_size=32, num_heads=2, batch_size=2)
MODELS = {
    "toy": Config(**TOY),
    "patches of 4, wide MLP": Config(**TOY | dict(image_size=16, patch_size=4, mlp_ratio=5.25, seed=2, batch_size=3)),
    "patches of 3, one head": Config(**TOY | dict(image_size=12, patch_size=3, num_heads=1, hidden_size=40, seed=3)),
    "patches of 1, grey": Config(**TOY | dict(image_size=5, patch_size=1, in_channels=1, seed=4, predict="v")),
    "classes": Config(**TOY | dict(class_cond=True, num_classes=3, cond_drop_prob=0.3, batch_size=5, seed=5)),
    "as the official models": Config(**TOY | dict(in_channels=4, class_cond=True, num_classes=10, cond_drop_prob=0.1,
                                                  learn_sigma=True, batch_size=8, seed=6, diffusion_steps=21)),
    "short chain": Config(**TOY | dict(rescale_timesteps=True, diffusion_steps=250, max_period=1000, seed=7,
                                       noise_schedule="cosine", predict="x0")),
    "S/2, shallow": Config(image_size=16, patch_size=2, depth=2, hidden_size=384, num_heads=6, batch_size=2, seed=8),
}
TRAINING = {
    "eps": Config(**TOY | dict(image_size=32, patch_size=4, hidden_size=64, batch_size=4, seed=11, lr=1e-3)),
    "v, flip, schedule, decay": Config(**TOY | dict(
        image_size=16, seed=4000000000, predict="v", noise_schedule="cosine", flip=True, lr=1e-3, batch_size=5,
        lr_schedule="cosine", warmup_steps=5, lr_steps=20, weight_decay=0.1, ema_rate=(0.7, 0.9), grad_clip=1.0,
        min_snr_gamma=5.0)),
    "everything": Config(**TOY | dict(
        in_channels=4, class_cond=True, num_classes=3, cond_drop_prob=0.3, learn_sigma=True, batch_size=5, seed=6,
        diffusion_steps=21, lr=1e-3, offset_noise=0.1, rescale_timesteps=True, patch_size=4, mlp_ratio=2.5)),
    "muon": Config(**TOY | dict(image_size=16, patch_size=4, hidden_size=64, optimizer="muon", weight_decay=0.1, batch_size=4,
                                seed=12, lr=1e-3, predict="v", class_cond=True, num_classes=16)),
}
RESUMED = Config(**TOY | dict(flip=True, lr_schedule="cosine", warmup_steps=3, lr=1e-3, weight_decay=0.01, predict="v",
                              ema_rate=(0.9, 0.99), batch_size=16, class_cond=True, num_classes=3, cond_drop_prob=0.3,
                              learn_sigma=True, grad_clip=0.5, skip_outliers=1.0, patch_size=4))


@pytest.fixture
def dit_layers():
    path = os.environ.get("DIT_LAYERS", str(ROOT / "build/dit_layers"))
    if not os.access(path, os.X_OK):
        pytest.skip(f"{path} is not built")
    return path


@pytest.fixture(scope="session")
def toy_images(tmp_path_factory):
    """toy_images(config): a file of random pictures of three classes that fits it."""
    folder = tmp_path_factory.mktemp("data")

    def make(config):
        path = folder / f"{config.image_size}_{config.in_channels}.bin"
        if not path.exists():
            write_toy_images(path, n=11, size=config.image_size, channels=config.in_channels)
        return str(path)
    return make


def perturbed_file(path, config):
    """Write fresh weights plus N(0, 0.02^2): as initialised, nearly every gradient is zero. -> the model"""
    model = train_unet.perturb(train_dit.init_weights(DiT(config), config.seed), config.seed)
    train_dit.save_model(path, model, config)
    return model


# ----------------------------------------------------------------------------------------------------
# layers

class RoundedLayers(Layers):
    """Cases for `dit_layers --layers`."""
    def random(self, *shape, **how):
        return super().random(*shape, **how).detach().bfloat16().double().requires_grad_()  # exact in either precision


def add_patches(layers, B, size, patch, C, pitch=8):
    image = layers.random(B, size, size, pitch)
    side, most = size // patch, -(-patch * patch * C // 8) * 8
    x = image[..., :C].unflatten(1, (side, patch)).unflatten(3, (side, patch))  # (B, side, patch, side, patch, C)
    tokens = F.pad(x.transpose(2, 3).flatten(3), (0, most - patch * patch * C))
    again = F.pad(image[..., :C], (0, pitch - C))
    layers.add(f"patches {B}x{size} of {patch}x{C}", [patch, C], dict(image=image), dict(tokens=tokens, again=again))


def add_positions(layers, B, side, D):
    out = train_dit.positions(side, D).double().reshape(1, side, side, D).expand(B, -1, -1, -1)
    layers.add(f"positions {B}x{side}x{D}", [], {}, dict(out=out))


def add_stream(layers, B, side, D, begins=True, ends=True, around=True, scale=1.0, offset=0.0):
    """A place x of the residual stream: a branch begins there with a norm, one ends with a gate, `around` both."""
    def rows(name):
        return inputs[name][:, None, None]
    inputs = dict(x=layers.random(B, side, side, D, scale=scale, offset=offset))
    inputs |= {name: layers.random(B, side, side, D)
               for name in ["dy"] * begins + ["before", "branch"] * ends + ["around"] * around}
    inputs |= {name: layers.random(B, D) for name in ["shift", "scale"] * begins + ["gate"] * ends}
    outputs, dx = {}, inputs["around"].detach() if around else 0
    if begins:
        outputs["out"] = F.layer_norm(inputs["x"], (D,), eps=1e-6) * (1 + rows("scale")) + rows("shift")
        outputs["out"].backward(inputs["dy"])
        dx = dx + inputs["x"].grad
    if ends:
        outputs["ended"] = inputs["before"] + rows("gate") * inputs["branch"]
        outputs["ended"].backward(dx)
        outputs["dbranch"] = inputs["branch"].grad
    outputs |= dict(dx=dx, dmodulations=torch.cat([
        inputs[name].grad if name in inputs else torch.zeros(B, D) for name in ("shift", "scale", "gate")], 1))
    parts = " ".join(name for name, there in (("begins", begins), ("ends", ends), ("around", around)) if there)
    layers.add(f"stream {B}x{side}x{D}, {scale}, {offset}, {parts}", [], inputs, outputs)


def add_gelu(layers, n, scale):
    x, dout = layers.random(1, 1, 1, n, scale=scale), layers.random(1, 1, 1, n)
    out = F.gelu(x, approximate="tanh")
    out.backward(dout)
    layers.add(f"gelu {n} of {scale}", [], dict(x=x, dout=dout), dict(out=out, dx=x.grad))


def add_linear(layers, B, side, K, N):
    x, dout = layers.random(B, side, side, K), layers.random(B, side, side, N)
    w, bias = layers.random(N, K, scale=K**-0.5), layers.random(1, N)
    hidden = layers.random(B, side, side, K)
    out = F.linear(x, w, bias[0])
    out.backward(dout)
    layers.add(f"linear {B}x{side}x{K} to {N}", [],
               dict(x=x, dout=dout, w=w, bias=bias, hidden=hidden),
               dict(out=out, dx=x.grad, dw=w.grad, dbias=bias.grad))


def add_attention(layers, B, side, heads, d, scale=1.0):
    qkv, dout = layers.random(B, side, side, 3 * heads * d, scale=scale), layers.random(B, side, side, heads * d)
    q, k, v = qkv.reshape(B, side * side, 3, heads, d).permute(2, 0, 3, 1, 4)  # (B, heads, T, d) each
    scores = q @ k.transpose(-1, -2) * d**-0.5
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(dout.shape)
    out.backward(dout)
    dq, dk, dv = (part.contiguous() for part in qkv.grad.chunk(3, -1))
    layers.add(f"attention {B}x{side}x{heads} heads of {d}, {scale}", [heads], dict(qkv=qkv, dout=dout),
               dict(out=out, lse=scores.logsumexp(-1), dq=dq, dk=dk, dv=dv))


def test_layers(cpp, tmp_path, dit_layers, attentions=()):
    layers = RoundedLayers(seed=1)
    for case in ((1, 1, 8, 8), (3, 5, 24, 40), (2, 16, 64, 192), (3, 11, 200, 328), (1, 24, 104, 200), (5, 7, 384, 136)):
        add_linear(layers, *case)
    for case in ((2, 8, 2, 3), (1, 12, 3, 1), (3, 4, 1, 4), (2, 16, 8, 8), (1, 64, 64, 5), (2, 6, 2, 6)):
        add_patches(layers, *case)
    for case in ((1, 1, 8), (3, 5, 24), (2, 16, 384), (1, 32, 1152)):
        add_positions(layers, *case)
    for case in ((2, 4, 32), (1, 1, 8), (3, 5, 40), (2, 16, 384), (1, 3, 1152), (3, 11, 768), (1, 6, 2568)):
        add_stream(layers, *case)
    for case in ((2, 4, 32, True, False), (3, 5, 40, True, False, False), (2, 3, 96, True, False, True, 8.0, -3.0),
                 (2, 2, 64, True, False, False, 0.05, 1.0), (3, 11, 384, False, True), (1, 1, 8, False, True)):
        add_stream(layers, *case)
    for case in ((4096, 1.0), (8, 5.0), (4104, 0.01), (1032, 12.0)):
        add_gelu(layers, *case)
    for case in ((3, 16, 2, 64), (3, 16, 2, 72), (2, 16, 3, 8), (1, 16, 1, 40), (1, 16, 1, 80), (2, 8, 2, 72), (1, 32, 1, 64),
                 (3, 5, 1, 24), (1, 16, 2, 64, 3.0), (1, 16, 2, 72, 3.0), *attentions):
        add_attention(layers, *case)
    unet_io.write_tensors(tmp_path / "layers.bin", layers.tensors)
    cpp(dit_layers, "--layers", tmp_path / "layers.bin")


# ----------------------------------------------------------------------------------------------------
# the whole model

@pytest.mark.parametrize("name", MODELS)
def test_gradients(tmp_path, toy_images, name):
    """Loss and every parameter's gradient, q, k and v apart, against PyTorch in float64."""
    config = MODELS[name]
    (ours, exact, _), losses = first_gradients(DIT, perturbed_file, config, tmp_path, toy_images(config))
    assert abs(losses[0] / losses[1] - 1) < 1e-5
    largest, errors = max(np.abs(r).max() for r in exact.values()), {}
    for of, r in exact.items():
        if of.endswith("qkv.bias k"):  # zero by mathematics: softmax doesn't see it
            assert np.abs(ours[of]).max() < 1e-6 * largest, of
            continue
        errors[of] = error_of(ours[of], r)
        assert errors[of] < 1e-5, (of, errors[of])
    print(f"largest error of a gradient: {max(errors.values()):.2g}, {max(errors, key=errors.get)}")


@pytest.mark.parametrize("name", TRAINING)
def test_training(tmp_path, toy_images, name):
    """20 optimiser steps from the same seed: the same losses to 1e-5, the same weights, the same averages."""
    config, steps = TRAINING[name], 20
    data = toy_images(config)
    model = perturbed_file(tmp_path / "start.bin", config)

    def flat_of(tensors):
        return np.concatenate([p.ravel() for p in train_unet.to_numpy(tensors)])

    start = flat_of(model.parameters())
    run(DIT, *start_flags(config, data, tmp_path / "run", steps, log_every=1, model_weights=tmp_path / "start.bin"))
    theirs = np.array([losses_in(tmp_path / "run")[step] for step in range(1, steps + 1)])
    trainer = train_unet.Trainer(model, unet_io.read_images(data), config)
    ours = np.array([trainer.step() for _ in range(steps)])
    worst = np.abs(theirs / ours - 1).max()
    print(f"losses {ours[0]:.4f} ... {ours[-1]:.4f}, largest relative difference {worst:.2g}")
    assert worst < 1e-5 and len(set(ours.round(6))) == steps
    file = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", steps)), Config)
    for section, tensors in ({"weights": trainer.parameters} | dict(zip(unet_io.EMA_SECTIONS, trainer.emas))).items():
        flat = flat_of(tensors)
        away = np.linalg.norm(file.sections[section] - flat) / np.linalg.norm(flat - start)
        print(f"{section}: {away:.2g} of the way apart")
        assert away < 2e-3
    assert file.step == steps and dataclasses.replace(file.config, lr_steps=config.lr_steps) == config


@pytest.mark.parametrize("seed", [0, 2**32 - 2])
def test_initial_weights(tmp_path, toy_images, seed):
    """Both programs draw the same weights, to the bit, with the authors' zeros and bounds."""
    config = Config(**TOY | dict(seed=seed, class_cond=True, num_classes=3, cond_drop_prob=0.1))
    run(DIT, *start_flags(config, toy_images(config), tmp_path / "run", 0))
    model = train_dit.init_weights(DiT(config), seed)
    file = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", 0)), Config)
    flat = np.concatenate([p.ravel() for p in train_unet.to_numpy(model.parameters())])
    assert same_bits(file.sections["weights"], flat) and same_bits(file.sections["ema"], flat)
    assert file.tensors == len(list(model.parameters()))
    for name, p in model.named_parameters():
        if p.ndim == 1 or "adaLN" in name or name.startswith("final_layer"):
            assert not p.any(), name
        elif name.startswith(("t_embedder", "y_embedder")):
            assert abs(p.std() / 0.02 - 1) < 0.1 + 2 / p.numel()**0.5, name
        else:  # as nn.init.xavier_uniform_
            bound = (6 / (p[0].numel() + len(p))) ** 0.5
            assert 0.98 * bound < p.abs().max() <= 1.000001 * bound and abs(p.std() / bound * 3**0.5 - 1) < 0.05, name


SIZES = {"S": 32865056, "B": 130315808, "L": 457840672, "XL": 674834720}  # without the positions


@pytest.mark.parametrize("size", SIZES)
def test_parameters(size):
    """The official models' counts, of 256x256 images as 32x32x4 latents, in both programs."""
    flags = ["--model", f"DiT-{size}/2", "--in_channels", 4, "--class_cond", 1, "--num_classes", 1000,
             "--cond_drop_prob", 0.1, "--learn_sigma", 1]
    printed = settings(run(DIT, *flags, "--print_config").stdout)
    config = Config(**{f.name: f.type(float(printed[f.name])) for f in dataclasses.fields(Config)
                       if f.type in (int, float, bool) and f.name in printed})
    with torch.device("meta"):
        model = DiT(config)
    names = [name for name, _ in model.named_parameters()]
    assert sum(p.numel() for p in model.parameters()) == SIZES[size] and config.image_size == 32
    assert names[:3] == ["x_embedder.proj.weight", "x_embedder.proj.bias", "t_embedder.mlp.0.weight"]
    assert "blocks.11.adaLN_modulation.1.bias" in names and names[-1] == "final_layer.adaLN_modulation.1.bias"
    if size == "S":  # the others' memory is not every machine's
        text = run(DIT, *flags, "--batch_size", 1, "--dry_run").stdout
        assert f"{SIZES[size]} parameters in {len(names)} tensors" in text


# ----------------------------------------------------------------------------------------------------
# runs

def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".png", ".txt")}


def test_resume(tmp_path, toy_images):
    """10 steps + 10 steps after a restart = 20 steps: the whole checkpoint, bit for bit."""
    flags = dict(save_every=10, sample_every=0, log_every=1)
    run(DIT, *start_flags(RESUMED, toy_images(RESUMED), tmp_path / "whole", 20, **flags))
    (tmp_path / "parts").mkdir()
    shutil.copy(checkpoint_in(tmp_path / "whole", 10), tmp_path / "parts")
    assert "resumed at step 10" in run(DIT, "--resume", tmp_path / "parts").stdout
    assert checkpoint_in(tmp_path / "parts", 20).read_bytes() == checkpoint_in(tmp_path / "whole", 20).read_bytes()


@pytest.mark.parametrize("batch, microbatch", [(16, 2), (14, 4)])
def test_ranks(tmp_path, toy_images, batch, microbatch):
    """20 steps on 1 and 2 processes, and one thread: checkpoints, grids, configuration, to the bit."""
    config = dataclasses.replace(RESUMED, batch_size=batch)
    data = toy_images(config)
    flags = start_flags(config, data, "run", 20, microbatch=microbatch, save_every=8, sample_every=10, keep=9,
                        val_file=data, val_every=5, num_samples=7)
    found = []
    for ranks, threads in ((1, "2"), (2, "2"), (1, "1")):
        folder = tmp_path / f"{ranks} {threads}"
        folder.mkdir()
        run(DIT, *flags, "--processes", ranks, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": threads})
        found.append(files_of(folder / "run"))
    assert len(found[0]) == 6 and found[1] == found[0] and found[2] == found[0]


def test_microbatch(tmp_path, toy_images):
    """A batch in parts trains as at once, to rounding."""
    config = dataclasses.replace(RESUMED, skip_outliers=0.0, batch_size=5)
    losses = []
    perturbed_file(tmp_path / "w.bin", config)
    for part in (0, 2):
        run(DIT, *start_flags(config, toy_images(config), tmp_path / str(part), 10, microbatch=part, log_every=1,
                              model_weights=tmp_path / "w.bin"))
        losses.append(np.array(list(losses_in(tmp_path / str(part)).values())))
    assert len(losses[0]) == 10 and np.abs(losses[1] / losses[0] - 1).max() < 1e-5


def test_side_stream(tmp_path, toy_images, dit_layers):
    """With every call of the side stream done as late as it may be, nothing has been overwritten that it reads."""
    flags = start_flags(RESUMED, toy_images(RESUMED), "run", 6, save_every=0)
    for name, program in (("soon", [DIT]), ("late", [dit_layers, "--late"])):
        (tmp_path / name).mkdir()
        run(*program, *flags, cwd=tmp_path / name)
    assert files_of(tmp_path / "late/run") == files_of(tmp_path / "soon/run")


def test_sanitized(tmp_path, toy_images):
    """Steps with everything, and pictures, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    program = os.environ.get("TRAIN_DIT_ASAN", str(ROOT / "build/train_dit_asan"))
    if not os.access(program, os.X_OK):
        pytest.skip(f"{program} is not built")
    for name in ("classes", "patches of 3, one head", "as the official models"):
        folder = tmp_path / name.replace(" ", "_")
        run(program, *start_flags(MODELS[name], toy_images(MODELS[name]), folder, 3))
        run(program, "--out_dir", folder, "--generate", "--num_samples", 3, "--sample_steps", 2, "--output_name", folder / "x.png")


# ----------------------------------------------------------------------------------------------------
# pictures and files

def pictures_of(model, seeds, **options):
    """What the grid of `dit --generate` holds, from PyTorch: uint8 (N, H, W, C)."""
    with torch.no_grad():
        drawn = train_unet.sample(model, seeds, **options)
    return unet_io.to_uint8(drawn.numpy()).transpose(0, 2, 3, 1).astype(int)


PICTURES = [
    (dict(predict="v"), [], {}),
    (dict(predict="v", patch_size=4, in_channels=4, learn_sigma=True, class_cond=True, num_classes=3,
          cond_drop_prob=0.1), ["--sampler", "ddpm", "--sample_steps", 20, "--class", 1, "--guidance_scale", 2],
     dict(sampler="ddpm", sample_steps=20, classes=[1, 1, 1], guidance_scale=2.0)),
    (dict(predict="x0", image_size=6), ["--sampler", "heun", "--sample_steps", 5], dict(sampler="heun", sample_steps=5)),
]


@pytest.mark.parametrize("more, flags, options", PICTURES)
def test_pictures(tmp_path, more, flags, options):
    """./train_dit --generate and PyTorch: the same pictures from the same seeds and weights."""
    config = Config(**TOY | more)
    model, size = perturbed_file(tmp_path / "w.bin", config), config.image_size
    run(DIT, "--model_weights", tmp_path / "w.bin", "--seeds", "40-42", "--batch_size", 2, "--output_dir", tmp_path, *flags,
        "--output_name", tmp_path / "grid.png")
    for seed, theirs in zip((40, 41, 42), pictures_of(model, [40, 41, 42], **options)):
        ours = picture(tmp_path / f"{seed:06d}.png")
        assert ours.shape == theirs.shape == (size, size, config.in_channels)
        print(f"largest difference {np.abs(ours - theirs).max()}")
        assert np.abs(ours - theirs).max() <= 2 and (ours != theirs).mean() < 0.02
        assert ((ours > 0) & (ours < 255)).mean() > 0.15 and ours.std() > 5


@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpmpp"])
def test_bytes_beyond_the_range(tmp_path, sampler):
    """Guided, without a learned sigma, an MLP of an odd multiple of 8: values beyond [-1, 1] become 0 or 255, they don't
    wrap; all others are the same bytes."""
    config = Config(**TOY | dict(predict="x0", mlp_ratio=2.75, class_cond=True, num_classes=5, cond_drop_prob=0.1))
    model = train_unet.perturb(train_dit.init_weights(DiT(config), 3), 3, 0.1).eval()
    train_dit.save_model(tmp_path / "w.bin", model, config)
    run(DIT, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 4, "--class", 3, "--guidance_scale", 4, "--sampler", sampler,
        "--sample_steps", 20, "--threshold", "none", "--output_dir", tmp_path, "--output_name", tmp_path / "grid.png")
    ours = np.stack([picture(tmp_path / f"{seed:06d}.png") for seed in range(4)])
    x = train_unet.sample(model, range(4), sampler, 20, classes=[3] * 4, guidance_scale=4.0, threshold="none").numpy()
    theirs, beyond = unet_io.to_uint8(x).transpose(0, 2, 3, 1).astype(int), np.abs(x).transpose(0, 2, 3, 1) > 1.01
    print(f"{beyond.mean():.1%} of the values lie beyond, up to {np.abs(x).max():.2f}; {(ours != theirs).mean():.2%} differ")
    assert 0.005 < beyond.mean() < 0.9 and np.isin(ours[beyond], (0, 255)).all()
    assert np.abs(ours - theirs).max() <= 1 and (ours != theirs).mean() < 0.01


def test_widths_of_official_weights(tmp_path):
    """An MLP's width is cut from a product of floats: the mlp_ratio of an import gives it back."""
    for width in range(8, 2049, 8):
        inner = np.arange(8, 64 * width, 8)[::max(1, width // 16)]
        for channels in map(int, inner):
            assert int(np.float32(width) * np.float32(train_dit.ratio_of(width, channels))) == channels
    config = Config(**TOY | dict(hidden_size=56, mlp_ratio=train_dit.ratio_of(56, 248), class_cond=True, num_classes=10,
                                 cond_drop_prob=0.1))
    torch.save(DiT(config).state_dict(), tmp_path / "official.pt")
    run(sys.executable, ROOT / "dev/dit/train_dit.py", "--import", tmp_path / "official.pt", "--num_heads", 2, "--output_name",
        tmp_path / "w.bin")
    assert unet_io.read_checkpoint(str(tmp_path / "w.bin"), Config).config.mlp_width() == 248
    run(DIT, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 1, "--sample_steps", 1, "--output_name", tmp_path / "x.png")
    refused(sys.executable, ROOT / "dev/dit/train_dit.py", "--export", tmp_path / "w.bin", "--num_heads", 2, "--output_name",
            tmp_path / "x.pt", says="--num_heads goes with --import")


def test_official_weights(tmp_path):
    """A state dict of the authors' program becomes a .bin that draws the same, and comes back as it was."""
    config = Config(**TOY | dict(image_size=8, in_channels=4, class_cond=True, num_classes=10, cond_drop_prob=0.1,
                                 learn_sigma=True, depth=3))
    model = train_unet.perturb(train_dit.init_weights(DiT(config), 5), 5, 0.05)
    state = model.state_dict()
    assert {"pos_embed", "y_embedder.embedding_table.weight", "blocks.2.attn.qkv.bias", "final_layer.linear.weight",
            "blocks.0.adaLN_modulation.1.weight", "t_embedder.mlp.2.bias", "x_embedder.proj.weight"} < state.keys()
    assert state["pos_embed"].shape == (1, 16, 32) and state["final_layer.linear.weight"].shape == (32, 32)
    torch.save(state, tmp_path / "official.pt")
    tool = [sys.executable, ROOT / "dev/dit/train_dit.py"]
    run(*tool, "--import", tmp_path / "official.pt", "--num_heads", 2, "--output_name", tmp_path / "w.bin")
    file = unet_io.read_checkpoint(str(tmp_path / "w.bin"), Config)
    unset = {name: getattr(Config(), name) for name in ("seed", "batch_size")}
    assert file.config == dataclasses.replace(config, **unset)
    run(DIT, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 2, "--class", "3", "--sampler", "ddpm", "--sample_steps",
        8, "--guidance_scale", 3, "--threshold", "none", "--output_dir", tmp_path, "--output_name", tmp_path / "grid.png")
    theirs = pictures_of(model, [0, 1], sampler="ddpm", sample_steps=8, classes=[3, 3], guidance_scale=3.0,
                         threshold="none")
    for seed in (0, 1):
        assert np.abs(picture(tmp_path / f"{seed:06d}.png") - theirs[seed]).max() <= 2
    # as latents are wanted: floats, of the same pictures
    script("generate.py", "--model_weights", tmp_path / "w.bin", "--num_samples", 2, "--class", "3", "--sampler", "ddpm",
           "--sample_steps", 8, "--guidance_scale", 3, "--threshold", "none", "--output_name", tmp_path / "latents.npy",
           "--device", "cpu")
    latents = np.load(tmp_path / "latents.npy")
    assert latents.shape == (2, 4, 8, 8) and latents.dtype == np.float32 and np.abs(latents).max() > 1.1
    assert np.array_equal(unet_io.to_uint8(latents).transpose(0, 2, 3, 1), theirs)
    for flags, says in ((["--export", tmp_path / "x.pt"], ["w.bin is no UNet", "dev/dit/train_dit.py --export"]),
                        (["--num_channels", 64], ["--num_channels 64", "made with none"]),
                        (["--use_ema", 2], "no section ema_2")):
        refused(sys.executable, ROOT / "generate.py", "--model_weights", tmp_path / "w.bin", *flags, says=says)
    said = run(*tool, "--export", tmp_path / "w.bin", "--output_name", tmp_path / "back.pt").stdout
    assert "a state dict does not tell num_heads 2, diffusion_steps 1000" in said
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert list(back) == list(state) and all(torch.equal(back[name], state[name]) for name in state)
    # nothing else is written over
    (tmp_path / "cat.png").write_bytes(b"a picture")
    torch.save(state, tmp_path / "model.bin")
    before = {name: (tmp_path / name).read_bytes() for name in ("cat.png", "model.bin", "w.bin", "official.pt")}
    for flag, source, target, says in (("--import", "official.pt", "cat.png", "must end in .bin"),
                                       ("--import", "official.pt", "official.pt", "must end in .bin"),
                                       ("--import", "model.bin", "model.bin", "is the file that the weights come from"),
                                       ("--export", "w.bin", "w.bin", "must end in .pt"),
                                       ("--export", "w.bin", "x.safetensors", "must end in .pt")):
        refused(*tool, flag, tmp_path / source, "--output_name", tmp_path / target, says=says)
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    # what is none
    for name, value, says in (("final_layer.linear.bias", None, "state dict of a DiT"),
                              ("blocks.1.mlp.fc2.weight", torch.zeros(3), "blocks.1.mlp.fc2.weight"),
                              ("pos_embed", torch.zeros(1, 16, 32), "pos_embed")):
        wrong = dict(state)
        del wrong[name]
        torch.save(wrong | ({} if value is None else {name: value}), tmp_path / "wrong.pt")
        refused(*tool, "--import", tmp_path / "wrong.pt", "--num_heads", 2, "--output_name", tmp_path / "x.bin", says=says)
    refused(*tool, "--import", tmp_path / "w.bin", "--output_name", tmp_path / "x.bin", says="w.bin")


def official():
    """(a DiT as the authors', its state dict)"""
    config = Config(**TOY | dict(in_channels=4, class_cond=True, num_classes=10, cond_drop_prob=0.1, learn_sigma=True))
    model = train_unet.perturb(train_dit.init_weights(DiT(config), 5), 5, 0.05)
    return model, dict(model.state_dict())


def imported(path, *flags):
    """What dev/dit/train_dit.py makes of a file: (its weights, Checkpoint, what it said)."""
    result = script("dev/dit/train_dit.py", "--import", path, "--num_heads", 2, "--output_name", path.with_suffix(".bin"), *flags)
    file = unet_io.read_checkpoint(str(path.with_suffix(".bin")), Config)
    return file.sections["weights"], file, result.stdout + result.stderr


def test_checkpoints_of_the_authors(tmp_path):
    """model, ema, opt and args of their training script: averages are taken unless told; no code is run."""
    model, state = official()
    raw = np.concatenate([p.ravel() for p in train_unet.to_numpy(model.parameters())])
    mean = {name: value if name == "pos_embed" else value / 2 for name, value in state.items()}
    arguments = argparse.Namespace(model="DiT-XL/2", num_classes=10, image_size=256)
    whole = {"model": {f"module.{name}": value for name, value in state.items()}, "ema": mean, "args": arguments,
             "opt": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-4}]}}
    torch.save(whole, tmp_path / "a.pt")
    for flags, factor, kind in (((), 0.5, "averaged"), (("--use_ema", 0), 1, "raw")):
        weights, file, said = imported(tmp_path / "a.pt", *flags)
        assert same_bits(weights, factor * raw) and f"the {kind} weights" in said
        assert (file.config.num_classes, file.config.cond_drop_prob) == (10, 0.1)
    assert ", averaged" not in said and "predict eps" in said and "holds model and ema" in said
    # rows for the classes alone; flags for what nothing tells
    table = "y_embedder.embedding_table.weight"
    torch.save(dict(whole, ema=mean | {table: mean[table][:-1]}), tmp_path / "b.pt")
    weights, file, said = imported(tmp_path / "b.pt", "--predict", "v", "--diffusion_steps", 500)
    assert (file.config.num_classes, file.config.cond_drop_prob) == (10, 0) and "predict" not in said
    assert (file.config.predict, file.config.diffusion_steps) == ("v", 500)
    # classes are no part of the model at all, in a safetensors file
    bare = {name: value for name, value in state.items() if name != table}
    safetensors.torch.save_file(bare, tmp_path / "c.safetensors")
    assert not imported(tmp_path / "c.safetensors")[1].config.class_cond
    # what would run code, or is none
    torch.save(dict(whole, args=Elsewhere()), tmp_path / "d.pt")
    tool = [sys.executable, ROOT / "dev/dit/train_dit.py", "--output_name", tmp_path / "x.bin"]
    refused(*tool, "--import", tmp_path / "d.pt", says=["d.pt", "test_dit.Elsewhere", "only tensors"])
    torch.save(state, tmp_path / "bare.pt")
    refused(*tool, "--import", tmp_path / "bare.pt", says=["bare.pt", "--num_heads"])
    (tmp_path / "e.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(*tool, "--import", tmp_path / "e.pt", says=["e.pt", "Git LFS"])
    torch.save(state | {"final_layer.linear.bias": torch.full((32,), np.nan)}, tmp_path / "f.pt")
    refused(*tool, "--import", tmp_path / "f.pt", "--num_heads", 2, says=["f.pt", "NaN", "final_layer.linear.bias"])
    refused(sys.executable, ROOT / "generate.py", "--import", tmp_path / "bare.pt", says=["holds a DiT", "dev/dit/train_dit.py --import"])


class Elsewhere:
    """A class that nothing may make."""


@pytest.mark.parametrize("dtype, widened", [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
def test_positions_that_were_rounded(tmp_path, dtype, widened):
    """Positions stored in bf16 or fp16 are the sinusoids to that rounding, and the weights are read exactly; others aren't."""
    _, state = official()
    low = {name: value.to(dtype) for name, value in state.items()}
    low = {name: value.float() for name, value in low.items()} if widened else low
    torch.save(low, tmp_path / "low.pt")
    weights, *_ = imported(tmp_path / "low.pt")
    expected = [value.to(dtype).float().numpy().ravel() for name, value in state.items() if name != "pos_embed"]
    assert same_bits(np.sort(weights), np.sort(np.concatenate(expected)))
    low["pos_embed"] = low["pos_embed"] * 1.01
    torch.save(low, tmp_path / "wrong.pt")
    refused(sys.executable, ROOT / "dev/dit/train_dit.py", "--import", tmp_path / "wrong.pt", "--num_heads", 2, "--output_name",
            tmp_path / "x.bin", says=["wrong.pt", "pos_embed"])


def test_files_of_the_other(tmp_path, toy_images):
    """Each program refuses the other's files, and says whose they are not."""
    config = Config(**TOY)
    train_dit.save_model(tmp_path / "dit.bin", DiT(config), config)
    small = unet_io.Config(image_size=8, num_channels=32, channel_mult=(1, 2), norm_groups=8)
    weights = train_unet.to_numpy(train_unet.UNet(small).parameters())
    unet_io.write_checkpoint(tmp_path / "unet.bin", unet_io.Checkpoint(small, {"weights": weights}))
    for program, file, what in ((TRAIN, "dit.bin", "UNet"), (DIT, "unet.bin", "DiT")):
        for flags in (["--generate"], ["--data_file", toy_images(config), "--out_dir", tmp_path / "run"]):
            refused(program, "--model_weights", tmp_path / file, *flags, says=[file, f"no weights file of a {what}"])
    odd = dataclasses.replace(config)
    odd.patch_size = 5
    train_dit.save_model(tmp_path / "odd.bin", DiT(config), odd)
    refused(DIT, "--generate", "--num_samples", 1, "--model_weights", tmp_path / "odd.bin", says=["odd.bin", "--patch_size 5"])
    with pytest.raises(unet_io.UserError, match="neither UNET"):
        unet_io.read_checkpoint(str(tmp_path / "dit.bin"))
    with pytest.raises(unet_io.UserError, match="neither DiT"):
        train_dit.load_model(str(tmp_path / "unet.bin"))


def test_command_line(tmp_path, toy_images):
    """Help, presets and models, refusals; a run's config.txt makes the same run."""
    text = run(DIT, "--help", "all").stdout
    assert "train_dit: trains a DiT diffusion model" in text and "--patch_size" in text and "train_unet" not in text
    assert not re.search(r"--(channel_mult|num_channels|norm_groups|conv_resample)\b", text)
    listed = dict(re.findall(r"^  --(\w+) .*?(?:\(default ([^)]*)\))?$", text, re.M))
    for field in dataclasses.fields(Config):
        if field.metadata["help"] and field.type in (int, float):
            assert float(listed[field.name]) == field.default, field.name
    models = re.findall(r"^  (DiT-\w+/\d):", text, re.M)
    assert models == [f"DiT-{size}/{patch}" for size in SIZES for patch in (2, 4, 8)]
    assert completed("--model", "", program=DIT) == sorted([*models, "dit32"])
    large = settings(run(DIT, "--model", "DiT-XL/4", "--depth", 3, "--print_config").stdout)
    assert [large[name] for name in ("depth", "hidden_size", "num_heads", "patch_size")] == ["3", "1152", "16", "4"]
    assert settings(run(DIT, "--preset", "dit32", "--print_config").stdout)["data_file"] == "data/faces.bin"
    for flags, says, status in ((["--model", "DiT-M/2"], "did you mean DiT-", 2), (["--num_channels", 64], "num_channels", 2),
                                (["--patch_size", 5], ["--image_size 32", "--patch_size 5"], 1),
                                (["--num_heads", 5], ["--num_heads 5", "384"], 1),
                                (["--hidden_size", 36, "--num_heads", 4], "multiples of 8", 1),
                                (["--image_size", 512], "256 x 256 tokens", 1),
                                (["--hidden_size", 8192, "--num_heads", 64, "--depth", 50], "parameters", 1)):
        refused(DIT, *flags, "--print_config", status=status, says=says)
    config = Config(**TOY)
    flags = start_flags(config, toy_images(config), tmp_path / "a", 3)
    run(DIT, *flags)
    run(DIT, "--config", tmp_path / "a/config.txt", "--out_dir", tmp_path / "b")
    assert checkpoint_in(tmp_path / "b", 3).read_bytes() == checkpoint_in(tmp_path / "a", 3).read_bytes()
    assert "one training step" in run(DIT, *flags, "--dry_run").stdout
    refused(DIT, "--resume", tmp_path / "a", "--depth", 5, says=["--depth 5", "made with 2"])


# ----------------------------------------------------------------------------------------------------
# on a GPU

def built_for_gpu(precision, path):
    on_gpu(precision)  # or skips
    if not os.access(path, os.X_OK):
        pytest.skip(f"{path} is not built")
    return str(path)


def dit_on_gpu(precision):
    return built_for_gpu(precision, ROOT / ("train_dit" if precision == "bf16" else "build/train_dit_fp32"))


@pytest.mark.parametrize("precision", GPU)
def test_gpu_layers(cpp, tmp_path, precision):
    many = ((29, 16, 10, 64), (29, 16, 10, 72))  # heads for more than one round of blocks
    test_layers(cpp, tmp_path, built_for_gpu(precision, ROOT / f"build/dit_layers_cuda_{precision}"), many)


@pytest.mark.parametrize("tool", SANITIZERS)
@pytest.mark.parametrize("precision", GPU)
def test_gpu_sanitized(tmp_path, precision, tool):
    program, layers = built_for_gpu(precision, ROOT / f"build/dit_layers_cuda_{precision}"), RoundedLayers(seed=1)
    for case in ((3, 5, 24, 40), (3, 11, 200, 328), (1, 24, 64, 392)):
        add_linear(layers, *case)
    add_patches(layers, 2, 8, 2, 3)
    add_positions(layers, 3, 5, 24)
    for case in ((3, 11, 40), (1, 6, 2568, True, False), (3, 5, 40, False, True)):
        add_stream(layers, *case)
    add_gelu(layers, 1032, 12.0)
    for d in (64, 72):
        add_attention(layers, 3, 16, 2, d)
    unet_io.write_tensors(tmp_path / "layers.bin", layers.tensors)
    sanitized(tool, program, "--layers", tmp_path / "layers.bin")


LARGER = {
    "S/2": Config(**TOY | dict(image_size=32, hidden_size=384, num_heads=6, batch_size=4, seed=8)),
    "many tokens": Config(**TOY | dict(image_size=32, hidden_size=384, num_heads=6, batch_size=36, seed=9, mlp_ratio=3)),
    "heads of 72": Config(**TOY | dict(image_size=32, hidden_size=1152, num_heads=16, batch_size=2, in_channels=4,
                                       learn_sigma=True, class_cond=True, num_classes=5, cond_drop_prob=0.1)),
}


@pytest.mark.parametrize("precision", GPU)
@pytest.mark.parametrize("name", {**MODELS, **LARGER})
def test_gpu_gradients(tmp_path, toy_images, name, precision):
    config = {**MODELS, **LARGER}[name]
    check_gpu_gradients(dit_on_gpu(precision), precision, perturbed_file, config, tmp_path, toy_images(config))


AGAIN = {"fp32": [*((test_training, name) for name in TRAINING), (test_resume,), (test_microbatch,), (test_initial_weights, 5),
                  *((test_pictures, *case) for case in PICTURES)],
         "bf16": [(test_resume,), (test_initial_weights, 5), (test_files_of_the_other,)]}


@pytest.mark.parametrize("precision, test, arguments", [
    pytest.param(precision, test, arguments, id=f"{precision} {test.__name__[5:]} {number}")
    for precision, tests in AGAIN.items() for number, (test, *arguments) in enumerate(tests)])
def test_gpu(monkeypatch, tmp_path, toy_images, precision, test, arguments):
    """The tests above once more, with the program built for the GPU."""
    monkeypatch.setattr(sys.modules[__name__], "DIT", dit_on_gpu(precision))
    test(tmp_path, *([toy_images] if "toy_images" in test.__code__.co_varnames else []), *arguments)


def test_classes_by_name(tmp_path, toy_images):
    """A DiT's classes have names too: stored, drawn by name in both programs, kept or begun anew in a fine-tuning."""
    config = Config(**TOY | dict(class_cond=True, num_classes=3, cond_drop_prob=0.3))
    data = toy_images(config)
    run(DIT, *start_flags(config, data, tmp_path / "run", 2))
    path = checkpoint_in(tmp_path / "run", 2)
    model, checkpoint = train_dit.load_model(str(path), use_ema=0)
    assert checkpoint.class_names == ("cat", "dog", "fox")
    weights, rows = tmp_path / "run" / path.name, model.y_embedder.embedding_table.weight.detach().numpy()
    draw = ["--sample_steps", 3, "--class", "fox,cat", "--output_name", tmp_path / "x.png"]
    result = run(DIT, "--model_weights", weights, "--generate", "--num_samples", 4, *draw)
    ours = picture(tmp_path / "x.png")
    assert "(rows: fox, cat)" in result.stdout
    assert call(generate, "--model_weights", weights, "--num_samples", 4, "--device", "cpu", *draw) == ""
    assert np.abs(ours - picture(tmp_path / "x.png")).max() <= 2
    images = unet_io.read_images(data)
    names = [{"cat": "ant", "dog": "fox", "fox": "cat"}[images.class_names[label]] for label in images.labels]
    unet_io.write_images(str(tmp_path / "other.bin"), images.pixels, names)  # ant, cat, fox
    result = run(DIT, "--data_file", tmp_path / "other.bin", "--model_weights", weights, "--out_dir", tmp_path / "tuned",
                 "--steps", 0, "--batch_size", 2)
    tuned, checkpoint = train_dit.load_model(str(checkpoint_in(tmp_path / "tuned", 0)), use_ema=0)
    table = tuned.y_embedder.embedding_table.weight.detach().numpy()
    assert checkpoint.class_names == ("ant", "cat", "fox") and same_bits(table[1:], rows[[0, 2, 3]])
    fresh = train_dit.init_weights(DiT(config), 0).y_embedder.embedding_table.weight.detach().numpy()
    assert np.abs(table[0] - fresh[0]).max() < 1e-7
    assert "cat and fox are kept, ant is new, dog is dropped" in result.stdout
    others = [(p, q) for (name, p), q in zip(model.named_parameters(), tuned.parameters()) if "y_embedder" not in name]
    assert all(same_bits(p.detach(), q.detach()) for p, q in others)
