"""Down-sampling by averages of 2 x 2 pixels in PyTorch: F.avg_pool2d(x, 2)."""
import torch.nn.functional as F

import common

CASES = {"6x10": dict(B=3, C=96, H=6, W=10),
         "64x64": dict(B=32, C=64, H=64, W=64, timed=1)}
# (C, H = W) of train_unet's default model; 64 at 64x64 stands above.
CASES |= {f"{C}-{H}x{H}": dict(B=32, C=C, H=H, W=H, model=1) for C, H in [(128, 32), (192, 16)]}


def inputs(random, B, C, H, W):
    return {"x": random(B, C, H, W), "dout": random(B, C, H // 2, W // 2)}


def forward(t):
    return {"out": F.avg_pool2d(t["x"], 2)}


if __name__ == "__main__":
    common.main("downsample", CASES, inputs, forward, gradients=["x"])
