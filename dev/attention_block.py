"""The attention block in PyTorch: train_unet.py's AttentionBlock."""
import blocks
import common
from train_unet import AttentionBlock

# Heads of d channels; channels in multiples of 32.
CASES = {"5x5": dict(B=3, C=64, H=5, G=16, d=32),
         "12x12": dict(B=2, C=96, H=12, G=8, d=32),
         "16x16": dict(B=32, C=192, H=16, G=32, d=32, timed=1),
         "8x8": dict(B=32, C=256, H=8, G=32, d=32, timed=1)}


def block_of(t):
    return AttentionBlock(t["C"], t["C"] // t["d"], t["G"])


def inputs(random, B, C, H, G, d):
    t = {"x": random(B, C, H, H, mean=0.3), "dout": random(B, C, H, H)}
    block = block_of(dict(C=C, G=G, d=d))
    return t | blocks.parameters_of(block, random) | blocks.moments_of(t)


def forward(t):
    return {"out": blocks.call(block_of(t), t, t["x"])}


def with_kept(t):
    """forward, and what the program keeps for backward."""
    block = block_of(t)
    x = t["x"].detach()
    normed = blocks.call(block.norm, t, x, prefix="norm.").flatten(2)  # (B, C, T)
    qkv = blocks.call(block.qkv, t, normed, prefix="qkv.")  # (B, 3C, T)
    q, k, v = qkv.unflatten(1, (3, block.heads, t["d"])).transpose(3, 4).unbind(1)  # (B, heads, T, d)
    scores = q @ k.transpose(2, 3) / t["d"]**0.5
    joined = (scores.softmax(3) @ v).transpose(2, 3).flatten(1, 2)  # (B, C, T)

    kept = {"qkv": qkv, "joined": joined, "lse": scores.logsumexp(3).flatten(1)}
    return forward(t) | kept | blocks.statistics(x, t["G"], t["norm.weight"], t["norm.bias"])


def timings(t):
    return blocks.timings(t, forward, GRADIENTS)


GRADIENTS = ["x"] + [f"{name}.{kind}" for name in ("norm", "qkv", "proj_out") for kind in ("weight", "bias")]

if __name__ == "__main__":
    common.main("attention_block", CASES, inputs, with_kept, gradients=GRADIENTS, timings=timings)
