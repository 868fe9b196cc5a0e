"""Attention in PyTorch: F.scaled_dot_product_attention on heads of q, k and v, as guided-diffusion lays them out."""
import torch.nn.functional as F

import common

CASES = {"6x8": dict(B=2, heads=2, d=32, T=48),
         "10x13": dict(B=1, heads=3, d=16, T=130),
         "16x16": dict(B=32, heads=6, d=32, T=256, timed=1),
         "8x8": dict(B=32, heads=8, d=32, T=64, timed=1),
         "16x16 on a CPU": dict(B=4, heads=6, d=32, T=256, cpu=1)}


def inputs(random, B, heads, d, T):
    C = heads * d
    # (B, 3C, T) and (B, C, T); in memory the channels are last, as behind a channels_last convolution
    return {"qkv": random(B, T, 3 * C).transpose(1, 2), "dout": random(B, T, C).transpose(1, 2)}


def split(t):
    """q, k, v, each (B, heads, T, d), from qkv (B, 3C, T): all of q, then k, then v, and in each of them head after head."""
    return t["qkv"].unflatten(1, (3, -1, t["d"])).transpose(3, 4).unbind(1)


def forward(t):
    return {"out": F.scaled_dot_product_attention(*split(t)).transpose(2, 3).flatten(1, 2)}


def with_probabilities(t):
    """forward, and what backward needs: the softmax p, and of the scores the log of the sum of exponentials, lse."""
    q, k, _ = (part.detach() for part in split(t))
    scores = q @ k.transpose(2, 3) / q.shape[3]**0.5
    return forward(t) | {"lse": scores.logsumexp(3).flatten(0, 1), "p": scores.softmax(3).flatten(0, 2)}


def timings(t):
    times = common.time_pytorch(forward, t, ["qkv"])
    return {f"{which}, F.scaled_dot_product_attention, {common.PRECISION}": us for which, us in times.items()}


if __name__ == "__main__":
    common.main("attention", CASES, inputs, with_probabilities, gradients=["qkv"], timings=timings)
