"""The 3x3 convolution in PyTorch."""
import torch.nn.functional as F

import common

# O at most 64 and odd sizes, as far as 16-byte loads allow: W a multiple of 4, channels of 8.
CASES = {"9x12": dict(B=3, C=24, O=40, H=9, W=12),
         "from 3 channels": dict(B=2, C=3, O=40, H=9, W=12),
         "to 3 channels": dict(B=2, C=40, O=3, H=9, W=12),
         "64x64": dict(B=32, C=192, O=64, H=64, W=64, timed=1),
         "64x64 on a CPU": dict(B=4, C=192, O=64, H=64, W=64, cpu=1)}
# (C, O, H = W) of train_unet's default model, an image's three channels padded to eight; 192 to 64 stands above.
MODEL = [(8, 64, 64), (64, 8, 64), (64, 64, 64), (128, 64, 64),
         (64, 128, 32), (128, 128, 32), (192, 128, 32), (256, 128, 32), (320, 128, 32),
         (128, 192, 16), (192, 192, 16), (320, 192, 16), (384, 192, 16), (448, 192, 16),
         (192, 256, 8), (256, 256, 8), (448, 256, 8), (512, 256, 8)]
CASES |= {f"{C}-{O}-{H}x{H}": dict(B=32, C=C, O=O, H=H, W=H, model=1) for C, O, H in MODEL}


def inputs(random, B, C, O, H, W):
    return {"x": random(B, C, H, W),
            "dout": random(B, O, H, W),
            "w": random(O, C, 3, 3, scale=(9 * C) ** -0.5),
            "bias": random(O)}


def forward(t):
    return {"out": F.conv2d(t["x"], t["w"], t["bias"], padding=1)}


def timings(t):
    return common.time_convolution(t, 1, together=True)


if __name__ == "__main__":
    common.main("conv3x3", CASES, inputs, forward, gradients=["x", "w"], timings=timings)
