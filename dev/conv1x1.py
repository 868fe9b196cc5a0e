"""The 1x1 convolution in PyTorch."""
import torch.nn.functional as F

import common

# W a multiple of 4 and channels of 8, for 16-byte loads.
CASES = {"9x12": dict(B=3, C=24, O=40, H=9, W=12),
         "64x64": dict(B=32, C=192, O=64, H=64, W=64, timed=1),
         "64x64 on a CPU": dict(B=4, C=192, O=64, H=64, W=64, cpu=1)}
# (C, O, H = W) of train_unet's default model: a residual block's skip, attention's projections; 192 to 64 stands above.
MODEL = [(128, 64, 64), (64, 128, 32), (192, 128, 32), (256, 128, 32), (320, 128, 32),
         (128, 192, 16), (320, 192, 16), (384, 192, 16), (448, 192, 16), (192, 576, 16), (192, 192, 16),
         (192, 256, 8), (448, 256, 8), (512, 256, 8), (256, 768, 8), (256, 256, 8)]
CASES |= {f"{C}-{O}-{H}x{H}": dict(B=32, C=C, O=O, H=H, W=H, model=1) for C, O, H in MODEL}


def inputs(random, B, C, O, H, W):
    return {"x": random(B, C, H, W),
            "dout": random(B, O, H, W),
            "w": random(O, C, scale=C ** -0.5),
            "bias": random(O)}


def forward(t):
    return {"out": F.conv2d(t["x"], t["w"][:, :, None, None], t["bias"])}


def timings(t):
    return common.time_convolution(t, 0)


if __name__ == "__main__":
    common.main("conv1x1", CASES, inputs, forward, gradients=["x", "w"], timings=timings)
