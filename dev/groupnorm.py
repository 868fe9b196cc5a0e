"""Group norm and SiLU in PyTorch: F.silu(F.group_norm(x, 32, w, bias)), with the statistics of the groups."""
import torch.nn.functional as F

import blocks
import common

GROUPS = 32
CASES = {"6x8": dict(B=3, C=96, H=6, W=8),
         "16x12": dict(B=2, C=192, H=16, W=12),
         "64x64": dict(B=32, C=128, H=64, W=64, timed=1),
         "16x16": dict(B=32, C=192, H=16, W=16, timed=1),
         "64x64 on a CPU": dict(B=4, C=128, H=64, W=64, cpu=1)}
# (C, H = W) of train_unet's default model; 128 at 64x64 and 192 at 16x16 stand above.
MODEL = [(64, 64), (192, 64), (64, 32), (128, 32), (192, 32), (256, 32), (320, 32), (128, 16), (320, 16), (384, 16),
         (448, 16), (192, 8), (256, 8), (448, 8), (512, 8)]
CASES |= {f"{C}-{H}x{H}": dict(B=32, C=C, H=H, W=H, model=1) for C, H in MODEL}


def inputs(random, B, C, H, W):
    t = {"x": random(B, C, H, W, mean=0.3),
         "dout": random(B, C, H, W),
         "w": random(C, scale=0.5, mean=1),
         "bias": random(C, scale=0.5)}
    normed = F.group_norm(t["x"], GROUPS)  # x^
    y = normed * t["w"][:, None, None] + t["bias"][:, None, None]
    dy = t["dout"] * y.sigmoid() * (1 + y * (1 - y.sigmoid()))

    # The products around the norm leave these behind: the moments of x; the gradient before the SiLU, and its sums.
    sums = blocks.of_parts((dy, blocks.total), (dy * normed, blocks.total))
    return t | blocks.moments_of(t) | {"dy": dy, "sums": sums}


def forward(t):
    return {"out": F.silu(F.group_norm(t["x"], GROUPS, t["w"], t["bias"]))}


def with_statistics(t):
    return forward(t) | blocks.statistics(t["x"], GROUPS, t["w"], t["bias"])


def timings(t):
    needed = {name: t[name] for name in ("x", "dout", "w", "bias")}
    times = common.time_pytorch(forward, needed, ["x", "w", "bias"])
    return {f"{which}, F.group_norm and F.silu, {common.PRECISION}, channels_last": us for which, us in times.items()}


if __name__ == "__main__":
    common.main("groupnorm", CASES, inputs, with_statistics, gradients=["x", "w", "bias"], timings=timings)
