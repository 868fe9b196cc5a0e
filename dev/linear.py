"""The linear layers of the time embedding in PyTorch: F.linear(x, w, bias)."""
import torch.nn.functional as F

import common

CASES = {"odd": dict(M=7, C=96, O=160),
         "100": dict(M=100, C=64, O=192),
         "embedding": dict(M=32, C=256, O=256, timed=1),
         "many rows": dict(M=4096, C=256, O=256, timed=1)}


def inputs(random, M, C, O):
    return {"x": random(M, C), "w": random(O, C, scale=C**-0.5), "bias": random(O), "dout": random(M, O)}


def forward(t):
    return {"out": F.linear(t["x"], t["w"], t["bias"])}


def timings(t):
    times = common.time_pytorch(forward, t, ["x", "w", "bias"])
    return {f"{which}, F.linear, bf16": us for which, us in times.items()}


if __name__ == "__main__":
    common.main("linear", CASES, inputs, forward, gradients=["x", "w", "bias"], timings=timings)
