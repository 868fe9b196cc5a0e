"""Up-sampling to the nearest neighbour in PyTorch: F.interpolate(x, scale_factor=2, mode="nearest")."""
import torch.nn.functional as F

import common

CASES = {"3x5": dict(B=3, C=96, H=3, W=5),
         "32x32": dict(B=32, C=128, H=32, W=32, timed=1)}
# (C, H = W) of train_unet's default model; 128 at 32x32 stands above.
CASES |= {f"{C}-{H}x{H}": dict(B=32, C=C, H=H, W=H, model=1) for C, H in [(192, 16), (256, 8)]}


def inputs(random, B, C, H, W):
    return {"x": random(B, C, H, W), "dout": random(B, C, 2 * H, 2 * W)}


def forward(t):
    return {"out": F.interpolate(t["x"], scale_factor=2, mode="nearest")}


if __name__ == "__main__":
    common.main("upsample", CASES, inputs, forward, gradients=["x"])
