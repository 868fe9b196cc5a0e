"""What the twins of whole blocks share, and of the norm in them. Parameters have PyTorch's names."""
import pathlib
import sys

import torch

import common

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # train_unet.py

NORM_TILE = 128  # pixels whose moments whatever writes a tensor leaves behind for the norm that reads it


def parameters_of(block, random):
    """Random values for a block's parameters: about 1 for a norm's weight, otherwise as fan-in suggests."""
    def value(name, like):
        if like.ndim == 1:
            return random(*like.shape, scale=0.3, mean=1.0 if norm_weight(name) else 0.0)
        return random(*like.shape, scale=like[0].numel() ** -0.5)

    norms = {name for name, module in block.named_modules() if isinstance(module, torch.nn.GroupNorm)}

    def norm_weight(name):
        return name.rpartition(".")[0] in norms and name.endswith("weight")

    return {name: value(name, like) for name, like in block.named_parameters()}


def total(part):
    return part.sum(2)


def mean(part):
    return part.mean(2)


def squares(part):
    return part.var(2, correction=0) * part.shape[2]


def of_parts(*pairs):
    """(B parts, 2 C): for each image, part of it and channel, first(x of the part) and second(y of the part)."""
    columns = [torch.stack([function(part) for part in x.flatten(2).split(NORM_TILE, 2)], 1) for x, function in pairs]
    return torch.stack(columns, 3).flatten(0, 1).flatten(1)


def moments_of(t):
    """{"moments of x": (B parts, 2 C)}: mean and sum of squares about it of each channel of each part."""
    return {f"moments of {name}": of_parts((t[name], mean), (t[name], squares)) for name in ("x", "x2") if name in t}


def statistics(x, groups, w, bias, number=""):
    """What a norm of x leaves behind: mean, rstd (B, groups); and the program's, a line (B C, 2) a channel of an image:
    statistics, mean and rstd of its group; affine, what x is multiplied with and what is added; and half of that,
    which a norm with a SiLU leaves."""
    of_groups = x.detach().unflatten(1, (groups, -1)).flatten(2)
    of = {"mean": of_groups.mean(2), "rstd": (of_groups.var(2, correction=0) + 1e-5).rsqrt()}
    mean, rstd = (value.repeat_interleave(x.shape[1] // groups, 1) for value in of.values())
    scale = rstd * w.detach()
    of["statistics"] = torch.stack([mean, rstd], 2).flatten(0, 1)
    of["affine"] = torch.stack([scale, bias.detach() - mean * scale], 2).flatten(0, 1)
    of["half affine"] = of["affine"] / 2
    return {name + number: value for name, value in of.items()}


def call(block, t, *arguments, prefix=""):
    parameters = {name: t[prefix + name] for name, _ in block.named_parameters()}
    return torch.func.functional_call(block, parameters, arguments)


def timings(t, forward, gradients):
    """PyTorch's times of what the block reads, without the tensors that only the program keeps."""
    leaves = [name for name in gradients if name in t]
    needed = {name: value for name, value in t.items()
              if name in leaves or name == "dout" or not torch.is_tensor(value)}
    times = common.time_pytorch(forward, needed, leaves)
    return {f"{which}, eager, bf16, channels_last": us for which, us in times.items()}
