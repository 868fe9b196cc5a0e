"""SiLU in PyTorch: alone, and behind a group norm, where the network has it."""
import torch.nn.functional as F

import blocks
import common

GROUPS = 32
CASES = {"7x5": dict(B=3, C=96, H=7, W=5),
         "64x64": dict(B=32, C=128, H=64, W=64, timed=1)}


def inputs(random, B, C, H, W):
    t = {"x": random(B, C, H, W), "dout": random(B, C, H, W),
         "w": random(C, scale=0.5, mean=1), "bias": random(C, scale=0.5)}
    return t | blocks.moments_of(t)


def forward(t):
    return {"out": F.silu(t["x"])}


def all_outputs(t):
    """SiLU, then group norm with its statistics and SiLU."""
    normed = F.silu(F.group_norm(t["x"].detach(), GROUPS, t["w"], t["bias"]))
    return forward(t) | {"normed": normed} | blocks.statistics(t["x"], GROUPS, t["w"], t["bias"])


def timings(t):
    alone = common.time_pytorch(forward, t, ["x"])
    norm = common.time_pytorch(lambda t: {"out": F.silu(F.group_norm(t["x"], GROUPS, t["w"], t["bias"]))},
                               t, [])
    return {"forward, F.silu in bf16": alone["forward"], "backward, of F.silu in bf16": alone["backward"],
            "norm, F.silu(F.group_norm()) in bf16 with the statistics": norm["forward"]}


if __name__ == "__main__":
    common.main("silu", CASES, inputs, all_outputs, gradients=["x"], timings=timings)
