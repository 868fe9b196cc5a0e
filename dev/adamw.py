"""torch.optim.AdamW, then the running mean of the weights and a copy of them in bfloat16."""
import torch

import common

LR = 1e-3
WEIGHT_DECAY = 0.01
BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8
EMA_WEIGHT = 1e-3
STEP = 10
CASES = {"10008": dict(n=10008),
         "unet64": dict(n=20494211, timed=1)}


def inputs(random, n):
    return {"w": random(n),
            "m": random(n, scale=0.1),
            "v": random(n, scale=0.1).square(),
            "ema": random(n),
            "gradient": random(n, scale=0.1)}


def optimizer_of(t, **how):
    """AdamW with STEP - 1 steps behind it."""
    t["w"].grad = t["gradient"]
    optimizer = torch.optim.AdamW([t["w"]], LR, (BETA1, BETA2), EPS, WEIGHT_DECAY, **how)
    step = torch.tensor(STEP - 1.0, device=t["w"].device if how.get("capturable") else "cpu")
    optimizer.state[t["w"]] = {"step": step, "exp_avg": t["m"], "exp_avg_sq": t["v"]}
    return optimizer


def forward(t):
    t = {name: value.clone() if torch.is_tensor(value) else value for name, value in t.items()}
    optimizer_of(t).step()
    ema = t["ema"] + EMA_WEIGHT * (t["w"] - t["ema"])
    hyper = torch.tensor([LR, WEIGHT_DECAY, BETA1, BETA2, EPS, 1 - BETA1**STEP, 1 - BETA2**STEP, EMA_WEIGHT])
    return {"new w": t["w"], "new m": t["m"], "new v": t["v"], "new ema": ema, "working": t["w"], "hyper": hyper}


def timings(t):
    def make():
        copy = {name: value.float() for name, value in t.items() if torch.is_tensor(value)}
        working = copy["w"].bfloat16()
        optimizer = optimizer_of(copy, fused=True, capturable=True)

        def step():
            optimizer.step()
            copy["ema"].lerp_(copy["w"], EMA_WEIGHT)
            working.copy_(copy["w"])

        return step, common.bytes_of(copy)
    return {"step, fused=True, then lerp_ and copy_": common.microseconds(make)}


if __name__ == "__main__":
    common.main("adamw", CASES, inputs, forward, timings=timings)
