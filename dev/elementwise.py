"""Five small passes in PyTorch: SiLU, up-sampling, down-sampling, the timestep embedding and the loss."""
import math

import torch
import torch.nn.functional as F

import blocks
import common

# ----------------------------------------------------------------------------------------------------
# SiLU: alone, and behind a group norm, where the network has it

GROUPS = 32
SILU_CASES = {"7x5": dict(B=3, C=96, H=7, W=5),
              "64x64": dict(B=32, C=128, H=64, W=64, timed=1)}


def silu_inputs(random, B, C, H, W):
    t = {"x": random(B, C, H, W),
         "dout": random(B, C, H, W),
         "w": random(C, scale=0.5, mean=1),
         "bias": random(C, scale=0.5)}
    return t | blocks.moments_of(t)


def silu(t):
    return {"out": F.silu(t["x"])}


def norm_silu(t):
    return {"normed": F.silu(F.group_norm(t["x"].detach(), GROUPS, t["w"], t["bias"]))}


def silu_and_norm_silu(t):
    """SiLU alone; and SiLU behind a group norm, with the statistics of the norm."""
    return silu(t) | norm_silu(t) | blocks.statistics(t["x"], GROUPS, t["w"], t["bias"])


def silu_timings(t):
    alone = common.time_pytorch(silu, t, ["x"])
    norm = common.time_pytorch(norm_silu, t, [])
    return {"forward, F.silu in bf16": alone["forward"],
            "backward, of F.silu in bf16": alone["backward"],
            "norm, F.silu(F.group_norm()) in bf16 with the statistics": norm["forward"]}


# ----------------------------------------------------------------------------------------------------
# up-sampling to the nearest neighbour, down-sampling by averages of 2 x 2 pixels

# Those with model=1 are (C, H = W) of train_unet's default model, whose first stands above them.
UPSAMPLE_CASES = {"3x5": dict(B=3, C=96, H=3, W=5),
                  "32x32": dict(B=32, C=128, H=32, W=32, timed=1)}
UPSAMPLE_CASES |= {f"{C}-{H}x{H}": dict(B=32, C=C, H=H, W=H, model=1) for C, H in [(192, 16), (256, 8)]}
DOWNSAMPLE_CASES = {"6x10": dict(B=3, C=96, H=6, W=10),
                    "64x64": dict(B=32, C=64, H=64, W=64, timed=1)}
DOWNSAMPLE_CASES |= {f"{C}-{H}x{H}": dict(B=32, C=C, H=H, W=H, model=1) for C, H in [(128, 32), (192, 16)]}


def upsample_inputs(random, B, C, H, W):
    return {"x": random(B, C, H, W), "dout": random(B, C, 2 * H, 2 * W)}


def upsample(t):
    return {"out": F.interpolate(t["x"], scale_factor=2, mode="nearest")}


def downsample_inputs(random, B, C, H, W):
    return {"x": random(B, C, H, W), "dout": random(B, C, H // 2, W // 2)}


def downsample(t):
    return {"out": F.avg_pool2d(t["x"], 2)}


# ----------------------------------------------------------------------------------------------------
# the sinusoids of the timestep: cos and sin of t / 10000^(i / half), each sample with its own t

MAX_PERIOD = 10000
# With 32 timesteps and 32 frequencies a wrong broadcast has the right shape, and is found only by its numbers.
TIMESTEP_CASES = {"32x64": dict(B=32, C=64),
                  "3x32": dict(B=3, C=32),
                  "256x64": dict(B=256, C=64, timed=1)}


def timestep_inputs(random, B, C):
    return {"t": random.integers(0, 1000, (B,)).double()}


def frequencies_of(C, device, dtype):
    """(C / 2,)"""
    half = C // 2
    return torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, device=device, dtype=dtype) / half)


def sinusoids(timesteps, frequencies):
    """(B, C)"""
    angles = timesteps[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1)


def timestep(t):
    return {"out": sinusoids(t["t"], frequencies_of(t["C"], t["t"].device, torch.float64))}


def timestep_timings(t):
    def make():
        timesteps = t["t"].float()
        frequencies = frequencies_of(t["C"], "cuda", torch.float32)

        def embed():
            return sinusoids(timesteps, frequencies).bfloat16()

        return embed, 4 * t["B"] + 2 * t["B"] * t["C"]
    return {", in fp32 with the frequencies given, then bf16": common.microseconds(make)}


# ----------------------------------------------------------------------------------------------------
# the loss: the squared error, each sample weighted by its timestep, and its gradient. The program first sums the squares
# of parts of a sample, which are the losses here, and adds these sums up later

PART = 4096
MSE_CASES = {"3x3336": dict(B=3, n=3336),
             "2x10008": dict(B=2, n=10008),
             "32x3x64x64": dict(B=32, n=3 * 64 * 64, timed=1),
             "256x3x64x64": dict(B=256, n=3 * 64 * 64, timed=1)}


def mse_inputs(random, B, n):
    return {"x": random(B, n),
            "target": random(B, n),
            "t": random.integers(0, 1000, (B,)).double(),
            "chain": random(1000, 10, scale=0.1, mean=1.0)}


def weighted_loss(x, t):
    """The mean over samples and values; column 4 of `chain` has the weight of each timestep."""
    return (t["chain"][t["t"].long(), 4] * (x - t["target"]).square().mean(1)).mean()


def mse(t):
    x = t["x"].detach().requires_grad_()
    squares = (t["x"] - t["target"]).square()
    parts = [part.sum() for sample in squares for part in sample.split(PART)]
    return {"losses": torch.stack(parts), "dx": torch.autograd.grad(weighted_loss(x, t), x)[0]}


def mse_timings(t):
    def make():
        copy = {name: t[name].float() for name in ("target", "t", "chain")}
        x = t["x"].bfloat16().requires_grad_()

        def step():
            loss = weighted_loss(x.float(), copy)
            return loss, torch.autograd.grad(loss, x)[0]

        return step, common.bytes_of(copy | {"x": x})
    return {", the weighted loss and its gradient": common.microseconds(make)}


if __name__ == "__main__":
    common.write_ladder("elementwise", [
        common.Layer(SILU_CASES, silu_inputs, silu_and_norm_silu, ["x"], silu_timings, name="silu"),
        common.Layer(UPSAMPLE_CASES, upsample_inputs, upsample, ["x"], name="upsample"),
        common.Layer(DOWNSAMPLE_CASES, downsample_inputs, downsample, ["x"], name="downsample"),
        common.Layer(TIMESTEP_CASES, timestep_inputs, timestep, timings=timestep_timings, name="timestep"),
        common.Layer(MSE_CASES, mse_inputs, mse, timings=mse_timings, name="mse")])
