"""The residual block in PyTorch: train_unet.py's ResBlock, given the embedding with its SiLU."""
import torch
from torch import nn

import blocks
import common
from train_unet import ResBlock

# (C + C2) -> O at H x H; C2: channels of the skip that is concatenated to x. Channels in multiples of 32.
CASES = {"5x5": dict(B=3, C=64, C2=0, O=64, H=5, E=64, G=16),
         "7x7": dict(B=2, C=32, C2=64, O=64, H=7, E=40, G=16),  # a group straddles x and x2
         "12x12": dict(B=2, C=32, C2=0, O=64, H=12, E=64, G=8),
         "64-64-64x64": dict(B=32, C=64, C2=0, O=64, H=64, E=256, G=32, timed=1),
         "192-64-64x64": dict(B=32, C=128, C2=64, O=64, H=64, E=256, G=32, timed=1),
         "192-192-16x16": dict(B=32, C=192, C2=0, O=192, H=16, E=256, G=32, timed=1),
         "256-256-8x8": dict(B=32, C=256, C2=0, O=256, H=8, E=256, G=32, timed=1)}


def block_of(t):
    block = ResBlock(t["C"] + t["C2"], t["O"], t["E"], t["G"])
    block.emb_layers[0] = nn.Identity()  # the program applies this SiLU once, for all blocks
    return block


def inputs(random, B, C, C2, O, H, E, G):
    t = {"x": random(B, C, H, H, mean=0.3), "emb": random(B, E), "dout": random(B, O, H, H)}
    if C2:
        t["x2"] = random(B, C2, H, H, scale=0.7)
    block = block_of(dict(C=C, C2=C2, O=O, E=E, G=G))
    return t | blocks.parameters_of(block, random) | blocks.moments_of(t)


def joined(t):
    """x and, where there is one, the skip: (B, C + C2, H, H)."""
    return torch.cat([t["x"], t["x2"]], 1) if t["C2"] else t["x"]


def forward(t):
    return {"out": blocks.call(block_of(t), t, joined(t), t["emb"])}


def with_kept(t):
    """forward, and what the program keeps for backward."""
    block = block_of(t)
    x = joined(t).detach()
    embedding = blocks.call(block.emb_layers, t, t["emb"], prefix="emb_layers.")
    h = blocks.call(block.in_layers, t, x, prefix="in_layers.") + embedding[:, :, None, None]

    norm1 = blocks.statistics(x, t["G"], t["in_layers.0.weight"], t["in_layers.0.bias"], "1")
    norm2 = blocks.statistics(h, t["G"], t["out_layers.0.weight"], t["out_layers.0.bias"], "2")
    return forward(t) | {"h": h} | norm1 | norm2


def timings(t):
    return blocks.timings(t, forward, GRADIENTS)


NAMES = ["in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3", "skip_connection"]
GRADIENTS = ["x", "x2", "emb"] + [f"{name}.{kind}" for name in NAMES for kind in ("weight", "bias")]

if __name__ == "__main__":
    common.main("resblock", CASES, inputs, with_kept, gradients=GRADIENTS, timings=timings)
