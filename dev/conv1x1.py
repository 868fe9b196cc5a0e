"""The 1x1 convolution in PyTorch. `python conv1x1.py all` adds every shape of the default model."""
import sys

import torch
import torch.nn.functional as F

import common

# W a multiple of 4 and channels of 8, for 16-byte loads.
CASES = {"9x12": dict(B=3, C=24, O=40, H=9, W=12),
         "64x64": dict(B=32, C=192, O=64, H=64, W=64, timed=1)}
# (C, O, H = W) of train_unet's default model: a residual block's skip, attention's projections.
MODEL = [(128, 64, 64), (64, 128, 32), (192, 128, 32), (256, 128, 32), (320, 128, 32),
         (128, 192, 16), (320, 192, 16), (384, 192, 16), (448, 192, 16), (192, 576, 16), (192, 192, 16),
         (192, 256, 8), (448, 256, 8), (512, 256, 8), (256, 768, 8), (256, 256, 8)]
if "all" in sys.argv[1:]:
    CASES |= {f"{C}-{O}-{H}x{H}": dict(B=32, C=C, O=O, H=H, W=H, timed=1) for C, O, H in MODEL}


def inputs(random, B, C, O, H, W):
    return {"x": random(B, C, H, W), "dout": random(B, O, H, W), "w": random(O, C, scale=C ** -0.5),
            "bias": random(O)}


def forward(t):
    return {"out": F.conv2d(t["x"], t["w"][:, :, None, None], t["bias"])}


def timings(t):
    torch.backends.cudnn.benchmark = True  # cuDNN's fastest algorithm, not its first

    def of(function, names, dtype, layout):
        def make():
            copy = {name: t[name].to(dtype) for name in names}
            copy = {name: value.contiguous(memory_format=layout) if value.ndim == 4 else value
                    for name, value in copy.items()}
            copy["w"] = copy["w"][:, :, None, None]
            return lambda: function(copy), common.bytes_of(copy)
        return common.microseconds(make)

    def gradient(*mask):
        return lambda c: torch.ops.aten.convolution_backward(c["dout"], c["x"], c["w"], None, [1, 1], [0, 0],
                                                             [1, 1], False, [0, 0], 1, [*mask, False])

    all_gradients = ("dout", "x", "w")
    passes = {"forward": (lambda c: F.conv2d(c["x"], c["w"], c["bias"]), ("x", "w", "bias")),
              "input gradient": (gradient(True, False), all_gradients),
              "weight gradient": (gradient(False, True), all_gradients)}
    times = {}
    for name, (function, names) in passes.items():
        times[f"{name}, cuDNN, bf16, channels_last"] = of(function, names, torch.bfloat16,
                                                          torch.channels_last)
        times[f"{name}, cuDNN, fp32"] = of(function, names, torch.float32, torch.contiguous_format)
    # PyTorch adds the bias in a kernel of its own; this is cuDNN's alone.
    times["forward, cuDNN, bf16, channels_last, no bias"] = of(
        lambda c: F.conv2d(c["x"], c["w"]), ("x", "w"), torch.bfloat16, torch.channels_last)
    return times


if __name__ == "__main__":
    common.main("conv1x1", CASES, inputs, forward, gradients=["x", "w"], timings=timings)
