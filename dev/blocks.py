"""What the ladders of whole blocks share with each other and with that of group norm. Parameters have PyTorch's names."""
import pathlib
import sys

import torch

import common

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # train_unet.py

# The kernel that writes a tensor also leaves the moments of each part of so many pixels, for the norm that reads it.
NORM_TILE = 128


def parameters_of(block, random):
    """Random values for a block's parameters: about 1 for a norm's weight, otherwise as fan-in suggests."""
    norms = [name for name, module in block.named_modules() if isinstance(module, torch.nn.GroupNorm)]
    norm_weights = {f"{name}.weight" for name in norms}
    values = {}
    for name, like in block.named_parameters():
        if like.ndim == 1:
            values[name] = random(*like.shape, scale=0.3, mean=1.0 if name in norm_weights else 0.0)
        else:
            values[name] = random(*like.shape, scale=like[0].numel() ** -0.5)
    return values


def total(part):
    return part.sum(2)


def mean(part):
    return part.mean(2)


def squares(part):
    return part.var(2, correction=0) * part.shape[2]


def of_parts(*pairs):
    """Of each pair (x (B, C, H, W), function) the function of each part of x: (B parts, 2 C), a pair beside the other."""
    columns = []
    for x, function in pairs:
        parts = x.flatten(2).split(NORM_TILE, 2)  # each (B, C, pixels)
        columns.append(torch.stack([function(part) for part in parts], 1))  # (B, parts, C)
    return torch.stack(columns, 3).flatten(0, 1).flatten(1)


def moments_of(t):
    """{"moments of x": (B parts, 2 C)}: mean and sum of squares about it of each channel of each part. So for x2."""
    return {f"moments of {name}": of_parts((t[name], mean), (t[name], squares)) for name in ("x", "x2") if name in t}


def statistics(x, groups, w, bias, number=""):
    """What a norm of x leaves behind, in tensors whose names end with the number.

    mean, rstd   (B, groups), as PyTorch has them
    statistics   (B C, 2), a line for each channel of an image: mean and rstd of its group
    affine       (B C, 2): what x is multiplied with, and what is added then
    half affine  half of that, which a norm with a SiLU leaves
    """
    of_groups = x.detach().unflatten(1, (groups, -1)).flatten(2)
    group_mean = of_groups.mean(2)
    group_rstd = (of_groups.var(2, correction=0) + 1e-5).rsqrt()

    channels = x.shape[1] // groups
    mean = group_mean.repeat_interleave(channels, 1)  # (B, C), as all below
    rstd = group_rstd.repeat_interleave(channels, 1)
    scale = rstd * w.detach()
    shift = bias.detach() - mean * scale
    affine = torch.stack([scale, shift], 2).flatten(0, 1)
    return {f"mean{number}": group_mean,
            f"rstd{number}": group_rstd,
            f"statistics{number}": torch.stack([mean, rstd], 2).flatten(0, 1),
            f"affine{number}": affine,
            f"half affine{number}": affine / 2}


def call(block, t, *arguments, prefix=""):
    """block(*arguments) with its parameters from t, where their names begin with the prefix."""
    parameters = {name: t[prefix + name] for name, _ in block.named_parameters()}
    return torch.func.functional_call(block, parameters, arguments)


def timings(t, forward, gradients):
    """PyTorch's times of a block, whose memory is counted without the tensors that only the program reads."""
    leaves = [name for name in gradients if name in t]
    needed = {name: value for name, value in t.items() if name in [*leaves, "dout"] or not torch.is_tensor(value)}
    times = common.time_pytorch(forward, needed, leaves)
    return {f"{which}, eager, bf16, channels_last": us for which, us in times.items()}
