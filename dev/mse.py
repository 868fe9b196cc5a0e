"""The loss in PyTorch: F.mse_loss and its gradient; of the sum, the parts that the program adds up later."""
import torch
import torch.nn.functional as F

import common

CHUNK = 4096
CASES = {"10007": dict(n=10007),
         "32x3x64x64": dict(n=32 * 3 * 64 * 64, timed=1),
         "256x3x64x64": dict(n=256 * 3 * 64 * 64, timed=1)}


def inputs(random, n):
    return {"x": random(n), "target": random(n)}


def forward(t):
    x = t["x"].detach().requires_grad_()
    loss = F.mse_loss(x, t["target"])
    squares = (t["x"] - t["target"]).square()
    return {"losses": torch.stack([part.sum() for part in squares.split(CHUNK)]),
            "dx": torch.autograd.grad(loss, x)[0]}


def timings(t):
    def make():
        copy = {"x": t["x"].bfloat16().requires_grad_(), "target": t["target"].float()}

        def step():
            loss = F.mse_loss(copy["x"].float(), copy["target"])
            return loss, torch.autograd.grad(loss, copy["x"])[0]
        return step, common.bytes_of(copy)
    return {"step, F.mse_loss and its gradient": common.microseconds(make)}


if __name__ == "__main__":
    common.main("mse", CASES, inputs, forward, timings=timings)
