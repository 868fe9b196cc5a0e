"""GELU in PyTorch, by its approximation with a hyperbolic tangent: F.gelu(x, approximate="tanh")."""
import torch.nn.functional as F

import common

CASES = {"7x8": dict(B=3, C=96, H=7, W=8),
         "64x64": dict(B=32, C=128, H=64, W=64, timed=1)}


def inputs(random, B, C, H, W):
    return {"x": random(B, C, H, W, scale=2), "dout": random(B, C, H, W)}


def forward(t):
    return {"out": F.gelu(t["x"], approximate="tanh")}


if __name__ == "__main__":
    common.main("gelu", CASES, inputs, forward, gradients=["x"])
