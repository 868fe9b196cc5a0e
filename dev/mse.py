"""The loss in PyTorch: the squared error, each sample weighted by its timestep, and its gradient; of the sums
of squares, the parts that the program adds up later."""
import torch

import common

CHUNK = 4096
CASES = {"3x3336": dict(B=3, n=3336),
         "2x10008": dict(B=2, n=10008),
         "32x3x64x64": dict(B=32, n=3 * 64 * 64, timed=1),
         "256x3x64x64": dict(B=256, n=3 * 64 * 64, timed=1)}


def inputs(random, B, n):
    return {"x": random(B, n), "target": random(B, n), "t": random.integers(0, 1000, (B,)).double(),
            "chain": random(1000, 8, scale=0.1, mean=1.0)}


def weighted_loss(x, t):
    return (t["chain"][t["t"].long(), 4] * (x - t["target"]).square().mean(1)).mean()


def forward(t):
    x = t["x"].detach().requires_grad_()
    squares = (t["x"] - t["target"]).square()
    parts = [part.sum() for sample in squares for part in sample.split(CHUNK)]
    return {"losses": torch.stack(parts), "dx": torch.autograd.grad(weighted_loss(x, t), x)[0]}


def timings(t):
    def make():
        copy = {name: t[name].float() for name in ("target", "t", "chain")}
        x = t["x"].bfloat16().requires_grad_()

        def step():
            loss = weighted_loss(x.float(), copy)
            return loss, torch.autograd.grad(loss, x)[0]
        return step, common.bytes_of(copy | {"x": x})
    return {"step, the weighted loss and its gradient": common.microseconds(make)}


if __name__ == "__main__":
    common.main("mse", CASES, inputs, forward, timings=timings)
