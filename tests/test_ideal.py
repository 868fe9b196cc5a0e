"""Samplers with an ideal denoiser: a network that answers with the exact mean of what a noisy picture may come from.

Of 90 small pictures this posterior mean is a sum, and the picture that a noise belongs to is the end of an ordinary
differential equation, which can be solved as exactly as one likes. So a sampler's own error is measured, which a trained
network's hides. Errors are root mean squares, of 255.
"""
import functools
import gzip
import math

import numpy as np
import pytest
import torch

import train_unet
import unet_io
from harness import (
    SMALL, NETWORK, PREDICTIONS, ROOT, SCHEDULES, TRAIN, perturbed_file, picture, run, script, target_of)
from unet_io import Config

SEEDS, STEPS = range(1000), (1, 2, 3, 5, 10, 25, 50)
SECOND_ORDER = ("dpmpp", "heun")
CHAINS = [("linear", False), ("cosine", False), ("linear", True), ("flow", False), ("edm", False)]


@functools.lru_cache
def pictures():
    """90 emoji of 4x4 pixels: float64 (90, 3, 4, 4) in [-1, 1]."""
    data = np.frombuffer(gzip.decompress((ROOT / "data/emoji.bin.gz").read_bytes()), np.uint8)
    pixels = data[unet_io.HEADER_BYTES:][:1620 * 3 * 64 * 64].reshape(1620, 3, 4, 16, 4, 16)[::18]
    return torch.from_numpy(pixels.mean((3, 5)) / 127.5 - 1)


def ideal_x0(x, alpha, sigma):
    """The mean of the pictures, each weighed by how likely x (B, 3, 4, 4) = alpha picture + sigma eps comes of it."""
    p = pictures().flatten(1)
    logits = alpha * x.double().flatten(1) @ p.T - alpha**2 * p.square().sum(1) / 2
    return ((logits / sigma**2).softmax(1) @ p).reshape(x.shape)


class Ideal:
    def __init__(self, schedule="linear", predict="eps", zero=False, path_steps=0):
        self.config = Config(**SMALL | dict(noise_schedule=schedule, predict=predict, zero_terminal_snr=zero,
                                            path_steps=path_steps))
        self.levels = unet_io.noise_levels(1000, schedule, zero)
        self.calls = 0

    def __call__(self, x, t):
        self.calls += 1
        alpha, sigma = (float(level[int(t[0])]) for level in self.levels)
        x0 = ideal_x0(x, alpha, sigma)
        return target_of(self.config.predict, alpha, sigma, x0, (x - alpha * x0) / sigma)


@functools.lru_cache
def noise():
    return train_unet.seed_noise(SEEDS, (3, 4, 4))


def rms(x, y):
    return 127.5 * float((x - y).square().mean().sqrt())


@functools.lru_cache
def exact(schedule):
    """The pictures that the noises of SEEDS belong to: the flow of Karras et al. 2022, equation 1, in y = x / alpha."""
    alpha, sigma = (float(level[-1]) for level in Ideal(schedule, "v").levels)
    first = sigma / alpha if alpha else 1e4
    y = noise().double() * first + (0 if alpha else ideal_x0(noise(), 0, 1))  # without an image the mean of all is nearest

    def slope(y, sigma):
        return (y - ideal_x0(y, 1, sigma)) / sigma

    sigmas = np.geomspace(first, 1e-3, 400)
    for sigma, after in zip(sigmas, sigmas[1:]):
        first = slope(y, sigma)
        second = slope(y + (after - sigma) * first, after)
        y = y + (after - sigma) * (first + second) / 2
    return ideal_x0(y, 1, 1e-3)


@functools.lru_cache
def error(schedule, sampler, steps, spacing="auto"):
    """(rms error of what is drawn, calls of the network)"""
    network = Ideal(schedule, {"flow": "flow", "edm": "edm"}.get(schedule, "eps"))
    drawn = train_unet.sample(network, SEEDS, sampler, steps, spacing=spacing, start=noise())
    return rms(drawn, exact(schedule)), network.calls


@pytest.mark.parametrize("predict", ["eps", "v", "x0"])
@pytest.mark.parametrize("spacing", ["auto", "uniform", "trailing", "karras"])
@pytest.mark.parametrize("sampler", train_unet.SAMPLERS)
def test_one_step(sampler, spacing, predict):
    """From the noisiest timestep a single step makes the mean of all pictures, whatever the sampler."""
    network = Ideal(predict=predict)
    drawn = train_unet.sample(network, SEEDS[:8], sampler, 1, spacing=spacing)
    assert network.calls == 1 and rms(drawn, pictures().mean(0)) < 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_errors(schedule):
    """Each sampler's error by steps and calls; the second-order ones keep what README.md says of them."""
    for sampler in ("ddim", *SECOND_ORDER):
        for spacing in ("uniform", "trailing", "karras"):
            row = [error(schedule, sampler, steps, spacing) for steps in STEPS]
            print(f"{schedule:8}{sampler:6}{spacing:9}", *(f"{e:6.1f} ({calls:2})" for e, calls in row))
    apart = rms(exact(schedule), pictures().mean(0))
    for sampler in SECOND_ORDER:
        for steps in STEPS:
            ours, calls = error(schedule, sampler, steps)
            theirs, _ = error(schedule, "ddim", calls)  # of as many calls
            print(f"{schedule:8}{sampler:6}{calls:3} calls: {ours:.1f}, ddim's {theirs:.1f}")
            assert ours <= 1.05 * theirs + 0.1, (sampler, steps)
        halved, usual = error(schedule, sampler, 25)[0], error(schedule, "ddim", 50)[0]
        assert halved <= 0.8 * usual < 0.2 * apart  # fewer steps for the same error


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_explosion(schedule):
    """No spacing lets the correction of a long step do harm: what is drawn is never further off than the mean is."""
    apart = rms(exact(schedule), pictures().mean(0))
    for sampler in SECOND_ORDER:
        for spacing in ("uniform", "trailing", "karras"):
            for steps in (2, 3, 4, 5, 6, 7, 10, 15):
                ours, theirs = (error(schedule, name, steps, spacing)[0] for name in (sampler, "ddim"))
                assert ours <= 1.05 * theirs, (sampler, spacing, steps)
    assert apart < 60


@pytest.mark.parametrize("spacing", ["uniform", "trailing", "karras"])
@pytest.mark.parametrize("schedule, zero", CHAINS)
def test_ddpm(schedule, zero, spacing):
    """DDPM's pictures are those of the 90, equally many of each, from some ten steps on."""
    p = pictures().flatten(1)
    drawn = train_unet.sample(Ideal(schedule, "v", zero), SEEDS[:300], "ddpm", 25, spacing=spacing).double().flatten(1)
    nearest, which = torch.cdist(drawn, p).min(1)
    print(f"{schedule} {spacing}: rms to the nearest {127.5 * float(nearest.square().mean() / 48) ** 0.5:.2f},"
          f" mean {rms(drawn.mean(0), p.mean(0)):.1f} off, spread {float(drawn.std(0).mean() / p.std(0).mean()):.3f}"
          f" of theirs, {len(which.unique())} of 90 pictures")
    assert 127.5 * float(nearest.square().mean() / 48) ** 0.5 < 2
    assert rms(drawn.mean(0), p.mean(0)) < 7 and abs(drawn.std(0).mean() / p.std(0).mean() - 1) < 0.15
    assert len(which.unique()) > 65


@pytest.mark.parametrize("sampler", train_unet.SAMPLERS)
@pytest.mark.parametrize("spacing", ["uniform", "trailing", "karras"])
def test_no_signal(sampler, spacing):
    """A chain that begins in noise alone: no step is lost to an infinite noise ratio."""
    network = Ideal("linear", "v", zero=True)
    for steps in (1, 2, 5, 25):
        drawn = train_unet.sample(network, SEEDS[:8], sampler, steps, spacing=spacing)
        assert torch.isfinite(drawn).all()


def test_timesteps():
    """Those of each spacing: guided-diffusion's, those of Lin et al., and the noise ratios of Karras et al."""
    for schedule, zero in CHAINS:
        for T in (21, 100, 1000, 4000):
            levels = unet_io.noise_levels(T, schedule, zero)
            for steps in {1, 2, 3, 7, T // 2, T - 1, T}:
                for spacing in ("uniform", "trailing", "karras"):
                    taken = unet_io.spaced_timesteps(spacing, levels, steps)
                    assert len(taken) == steps and taken[0] >= 0 and taken[-1] == T - 1
                    assert (np.diff(taken) > 0).all()
    levels = unet_io.noise_levels(1000, "linear")
    assert unet_io.spaced_timesteps("trailing", levels, 10).tolist() == list(range(99, 1000, 100))
    assert unet_io.spaced_timesteps("trailing", levels, 3).tolist() == [332, 666, 999]
    assert unet_io.spaced_timesteps("uniform", levels, 5).tolist() == [0, 250, 500, 749, 999]
    for path_steps, steps, places in ((10, 1, [10]), (10, 2, [3, 10]), (2, 2, [1, 2]), (3, 2, [1, 3])):
        taken = unet_io.consistency_timesteps(1000, path_steps, steps)
        assert taken.tolist() == [unet_io.trailing_timesteps(1000, path_steps)[place - 1] for place in places]
    assert unet_io.consistency_timesteps(1000, 0, 2).tolist() == [299, 999]
    assert unet_io.consistency_timesteps(1000, 0, 5).tolist() == [199, 399, 599, 799, 999]
    for path_steps, steps, second in ((10, 1, 0), (10, 2, 7), (7, 2, 4), (1, 1, 0), (2, 2, 1)):
        config = Config(consistency=True, path_steps=path_steps, consistency_steps=steps, batch_size=6, predict="v")
        assert unet_io.path_points(config, 3).tolist() == 3 * [second, 0]
        points = unet_io.trailing_timesteps(1000, path_steps)[::-1]
        assert points[second] == unet_io.consistency_timesteps(1000, path_steps, steps)[0]
    karras = unet_io.spaced_timesteps("karras", levels, 18)
    sigmas = (80 ** (1 / 7) + np.arange(17, -1, -1) / 17 * (0.01 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    assert np.abs(np.log(unet_io.noise_ratios(levels)[karras][:-1] / sigmas[:-1])).max() < 0.2
    assert unet_io.noise_ratios(levels)[karras[-1]] > 150


# ----------------------------------------------------------------------------------------------------
# ./train_unet

def test_program(cpp, tmp_path):
    """Its samplers walk the same way with the same ideal denoiser, to float32's rounding."""
    tensors, seeds = {}, [5, 4000000000]
    for schedule, predict, zero in (("linear", "eps", False), ("cosine", "v", False), ("linear", "x0", True),
                                    ("flow", "flow", False), ("edm", "edm", False)):
        chains = [(sampler, spacing, steps, 0) for sampler in train_unet.SAMPLERS for spacing in unet_io.SPACINGS
                  for steps in (1, 2, 3, 5, 25)]
        chains += [("consistency", "auto", steps, 12) for steps in (1, 2)]
        for sampler, spacing, steps, path_steps in chains:
            drawn = train_unet.sample(Ideal(schedule, predict, zero, path_steps), seeds, sampler, steps, spacing=spacing)
            name = f"chain ideal {schedule} {predict} {sampler} {spacing} {steps} {path_steps}"
            args = [PREDICTIONS.index(predict), SCHEDULES.index(schedule), zero, list(train_unet.SAMPLERS).index(sampler), steps,
                    0, 1000, 4, unet_io.SPACINGS.index(spacing), *seeds, path_steps]
            tensors |= {f"{name}/args": np.array(args, np.int64).astype(np.uint32).view(np.int32),
                        f"{name}/values": drawn.numpy().reshape(-1), f"{name}/reals": np.array([0.0]),
                        f"{name}/pictures": pictures().numpy().reshape(-1)}
    unet_io.write_tensors(tmp_path / "ideal.bin", tensors)
    cpp(NETWORK, "--reference", tmp_path / "ideal.bin")


def test_one_step_of_the_programs(tmp_path):
    """With --sample_steps 1 all samplers draw one picture, in both programs: that of the noisiest timestep."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    drawn = set()
    for number, sampler in enumerate(train_unet.SAMPLERS):
        name = tmp_path / f"{sampler}.png"
        common = ["--seed", 3, "--sampler", sampler, "--sample_steps", 1, "--output_name", name]
        run(TRAIN, "--model_weights", tmp_path / "w.bin", "--generate", "--num_samples", 4, *common)
        drawn.add(name.read_bytes())
        if number == 0:
            ours = picture(name).astype(int)
            script("generate.py", "--model_weights", tmp_path / "w.bin", "--num_samples", 4, "--device", "cpu", *common)
            assert np.abs(picture(name).astype(int) - ours).max() <= 2
    assert len(drawn) == 1
    model, _ = train_unet.load_model(str(tmp_path / "w.bin"))
    noise = train_unet.seed_noise([3], (3, 4, 4))
    a = float(unet_io.alphas_bar(1000, "linear")[-1])
    with torch.no_grad():
        x0 = ((noise - math.sqrt(1 - a) * model(noise, torch.tensor([999]))) / math.sqrt(a)).clamp(-1, 1)
    assert np.abs(ours[2:6, 2:6] - unet_io.to_uint8(x0[0].numpy()).transpose(1, 2, 0).astype(int)).max() <= 2


def test_loss_on_paths():
    """The pseudo-Huber loss of Song and Dhariwal 2023 of each element and of its differences from two others; its gradient."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.01, 0.1, 1.0, 10.0], dtype=torch.float64)[:, None, None, None]
    out = (scale * torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)).requires_grad_()
    target = torch.zeros_like(out)
    steps = torch.cat([out.flatten(), (out[..., 1:] - out[..., :-1]).flatten(), (out[..., 1:, :] - out[..., :-1, :]).flatten()])
    found, wanted = train_unet.Diffusion.path_loss(out, target), 0.2 * ((steps**2 + 0.01).sqrt() - 0.1).sum() / out.numel()
    assert torch.allclose(found, wanted, rtol=1e-12, atol=0)
    assert torch.allclose(*(torch.autograd.grad(loss, out)[0] for loss in (found, wanted)), rtol=1e-12, atol=0)
