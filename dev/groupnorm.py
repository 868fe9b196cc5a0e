"""Group norm and SiLU in PyTorch: F.silu(F.group_norm(x, 32, w, bias)), with the statistics of the groups."""
import torch
import torch.nn.functional as F

import common

GROUPS = 32
TILE = 64  # pixels whose mean and squares a producer would leave behind
CASES = {"6x8": dict(B=3, C=96, H=6, W=8),
         "16x12": dict(B=2, C=192, H=16, W=12),
         "64x64": dict(B=32, C=128, H=64, W=64, timed=1),
         "16x16": dict(B=32, C=192, H=16, W=16, timed=1)}


def inputs(random, B, C, H, W):
    x = random(B, C, H, W, mean=0.3)
    tiles = x.flatten(2).split(TILE, 2)
    return {"x": x, "dout": random(B, C, H, W), "w": random(C, scale=0.5, mean=1), "bias": random(C, scale=0.5),
            "tile_mean": torch.stack([tile.mean(2) for tile in tiles], 2),
            "tile_m2": torch.stack([tile.var(2, correction=0) * tile.shape[2] for tile in tiles], 2)}


def forward(t):
    return {"out": F.silu(F.group_norm(t["x"], GROUPS, t["w"], t["bias"]))}


def with_statistics(t):
    groups = t["x"].detach().unflatten(1, (GROUPS, -1)).flatten(2)
    return forward(t) | {"mean": groups.mean(2), "rstd": (groups.var(2, correction=0) + 1e-5).rsqrt()}


def timings(t):
    needed = {name: t[name] for name in ("x", "dout", "w", "bias")}
    times = common.time_pytorch(forward, needed, ["x", "w", "bias"])
    return {f"{which}, F.group_norm and F.silu, bf16, channels_last": us for which, us in times.items()}


if __name__ == "__main__":
    common.main("groupnorm", CASES, inputs, with_statistics, gradients=["x", "w", "bias"], timings=timings)
