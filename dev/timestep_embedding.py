"""The sinusoids of the timestep: cos and sin of t / 10000^(i / half), each sample with its own t."""
import math

import torch

import common

MAX_PERIOD = 10000
# 32 timesteps on 32 frequencies: a wrong broadcast has the right shape there and must have the wrong numbers
CASES = {"32x64": dict(B=32, C=64),
         "3x32": dict(B=3, C=32),
         "batch 256": dict(B=256, C=64, timed=1)}


def inputs(random, B, C):
    return {"t": random.integers(0, 1000, (B,)).double()}


def forward(t):
    half = t["C"] // 2
    frequencies = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, device=t["t"].device).double() / half)
    angles = t["t"][:, None] * frequencies
    return {"out": torch.cat([angles.cos(), angles.sin()], 1)}


def timings(t):
    def make():
        copy = t | {"t": t["t"].float()}
        frequencies = torch.exp(-math.log(MAX_PERIOD) * torch.arange(t["C"] // 2, device="cuda") / (t["C"] // 2))

        def embed():
            angles = copy["t"][:, None] * frequencies
            return torch.cat([angles.cos(), angles.sin()], 1).bfloat16()
        return embed, 4 * t["B"] + 2 * t["B"] * t["C"]
    return {"forward, in fp32 with the frequencies given, then bf16": common.microseconds(make)}


if __name__ == "__main__":
    common.main("timestep_embedding", CASES, inputs, forward, timings=timings)
