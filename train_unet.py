"""The PyTorch reference of train_unet.cu: the same UNet, the same diffusion, the same run number for number.

    python3 train_unet.py --data_dir FOLDER              train on a folder of images
    python3 train_unet.py --preset tiny                  the small demo model on data/faces.bin
    python3 train_unet.py --init_model_only True         write unet_init.bin for ./train_unet --model_weights
    python3 train_unet.py --write_debug_state PREFIX     reference values for the tests of the C++ program

The architecture is that of Dhariwal and Nichol 2021, "Diffusion Models Beat GANs on Image Synthesis"; flags
and module names are guided-diffusion's. Batches, timesteps, noise, flips and initial weights are functions of
the seed (unet_io.py), so that a run here and a run of ./train_unet with the same flags see the same numbers.

Shapes: B images, C channels, H = W pixels a side, E = 4 * num_channels the width of the timestep embedding.
"""
import argparse
import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import typing

import unet_io  # first, because it explains a missing package

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from unet_io import Checkpoint, Config, Stream, UserError

ARCHITECTURE = ("image_size", "in_channels", "num_channels", "num_res_blocks", "num_head_channels",
                "norm_groups", "max_period", "channel_mult", "attention_resolutions", "class_cond",
                "num_classes", "cond_drop_prob", "num_heads", "num_heads_upsample", "use_scale_shift_norm",
                "dropout", "rescale_timesteps", "resblock_updown", "conv_resample", "learn_sigma",
                "use_new_attention_order")
DIFFUSION = ("diffusion_steps", "noise_schedule", "predict", "zero_terminal_snr")
FIXED_ON_RESUME = ("batch_size", "optimizer", "timestep_sampling", "timestep_mean", "timestep_std", "ema_rate",
                   "consistency", "consistency_steps", "path_steps", "matching_fraction", "min_snr_gamma", "flip",
                   "offset_noise", "seed")
OF_CLASSES = ("class_cond", "num_classes", "cond_drop_prob")  # a run from --model_weights may change these


# ----------------------------------------------------------------------------------------------------
# the model

def timestep_embedding(t, width, max_period, unit=1):
    """Sinusoids of each sample's timestep times unit, cosines first: t (B,) -> (B, width) float64.

    Vaswani et al. 2017, "Attention Is All You Need", section 3.5. In float64, since a rounded frequency times
    t = 999 would already be off by 6e-5; on mps, which has none, in float32.
    """
    wide = torch.float32 if t.device.type == "mps" else torch.float64
    half = width // 2
    frequencies = torch.exp(-math.log(max_period) * torch.arange(half, dtype=wide, device=t.device) / half)
    angles = unit * t.to(wide)[:, None] * frequencies[None, :]  # (B, 1) * (1, half)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def group_norm(channels, groups):
    """Group norm (Wu and He 2018) with eps 1e-5. Raises UserError for fewer than two channels a group."""
    if channels % groups:
        raise UserError(f"norm_groups {groups} doesn't divide a layer of {channels} channels")
    if channels // groups < 2:
        raise UserError(f"norm_groups {groups} leaves one channel a group in a layer of {channels} channels,"
                        f" and such a norm wipes out the timestep: use fewer, e.g. --norm_groups 8")
    return nn.GroupNorm(groups, channels)


def zero(module):
    """Mark a layer whose weight and bias start at zero, so that its residual branch starts as nothing."""
    module.starts_at_zero = True
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


class EmbedSequential(nn.Sequential):
    """Layers in a row; those that want it are given the timestep embedding too."""
    def forward(self, x, emb):
        for layer in self:
            x = layer(x, emb) if isinstance(layer, ResBlock) else layer(x)
        return x


class Dropout(nn.Dropout):
    """nn.Dropout; or, where `replayed` is set, with the mask of ./train_unet in that step of a run."""
    replayed = None  # (seed, index of the block's first tensor, step)

    def forward(self, x):
        if not (self.training and self.replayed and self.p):
            return super().forward(x)
        seed, block, step = self.replayed
        B, C, H, W = x.shape
        mask = unet_io.dropout_mask(seed, block, (H, W, C), np.arange(B), step, self.p)
        mask = torch.from_numpy(mask).permute(0, 3, 1, 2).to(x.device)
        return torch.where(mask, x / (1 - self.p), 0)


class Downsample(nn.Module):
    """Half the height and width: the mean of 2x2 pixels or, if convolves, a 3x3 convolution of stride 2."""
    def __init__(self, channels, convolves):
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1) if convolves else nn.AvgPool2d(2)

    def forward(self, x):
        return self.op(x)


class Upsample(nn.Module):
    """Twice the height and width: every pixel 2x2 times and then, if convolves, a 3x3 convolution."""
    def __init__(self, channels, convolves):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if convolves else nn.Identity()

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class ResBlock(nn.Module):
    """GN, SiLU, conv3x3, + linear(SiLU(emb)), GN, SiLU, dropout, conv3x3, + skip.

    (B, C, H, W) and (B, E) -> (B, O, H, W); the skip is a 1x1 convolution where O differs from C. With
    modulates, the linear layer's two halves scale (by 1 + the first) and shift what the second GN gives.
    A resample, such as Downsample, changes what goes into the first convolution and into the skip.
    """
    def __init__(self, channels, out_channels, emb_width, groups, modulates=False, dropout=0.0,
                 resample=None):
        super().__init__()
        self.modulates = modulates
        self.resample = resample or nn.Identity()
        self.in_layers = nn.Sequential(group_norm(channels, groups), nn.SiLU(),
                                       nn.Conv2d(channels, out_channels, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_width, out_channels * (1 + modulates)))
        self.out_layers = nn.Sequential(group_norm(out_channels, groups), nn.SiLU(), Dropout(dropout),
                                        zero(nn.Conv2d(out_channels, out_channels, 3, padding=1)))
        same = channels == out_channels
        self.skip_connection = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x, emb):
        norm, silu, conv = self.in_layers
        h = conv(self.resample(silu(norm(x))))
        emb = self.emb_layers(emb)[:, :, None, None]
        x = self.resample(x)
        if not self.modulates:
            return self.skip_connection(x) + self.out_layers(h + emb)
        scale, shift = emb.chunk(2, dim=1)
        norm, silu, dropout, conv = self.out_layers
        h = norm(h) * (1 + scale) + shift
        return self.skip_connection(x) + conv(dropout(silu(h)))


class AttentionBlock(nn.Module):
    """Self-attention over the pixels, added to its input: (B, C, H, W) -> the same.

    The 3C channels of qkv are all of q, then k, then v; the heads lie inside each third. In the legacy order
    of guided-diffusion they are all of the first head, then the second ...; q, k, v lie inside each.
    """
    def __init__(self, channels, heads, groups, legacy=False):
        super().__init__()
        self.heads = heads
        self.legacy = legacy
        self.norm = group_norm(channels, groups)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = zero(nn.Conv1d(channels, channels, 1))

    def forward(self, x):
        B, C, H, W = x.shape
        qkv = self.qkv(self.norm(x).reshape(B, C, H * W))
        parts = (self.heads, 3) if self.legacy else (3, self.heads)
        qkv = qkv.reshape(B, *parts, -1, H * W).transpose(-1, -2).contiguous()  # as fused attention wants it
        q, k, v = qkv.unbind(parts.index(3) + 1)
        h = F.scaled_dot_product_attention(q, k, v)  # (B, heads, H*W, d), softmax(q k^T / sqrt(d)) v
        return x + self.proj_out(h.transpose(-1, -2).reshape(B, C, H * W)).reshape(B, C, H, W)


class UNet(nn.Module):
    """model(x, t, y): x (B, in_channels, image_size, image_size), t (B,) -> the prediction, of x's shape.

    y (B,): with class_cond, each image's class; num_classes stands for none, where labels were dropped.
    With learn_sigma as many channels follow, which say where the variance lies between its ends, -1 and 1.
    """
    def __init__(self, config):
        super().__init__()
        self.config = config.check()
        self.emb_width = 4 * config.num_channels
        self.time_embed = nn.Sequential(nn.Linear(config.num_channels, self.emb_width), nn.SiLU(),
                                        nn.Linear(self.emb_width, self.emb_width))
        if config.class_cond:
            if not config.num_classes:
                raise UserError("class_cond needs num_classes, or images with labels")
            self.label_emb = nn.Embedding(config.label_rows(), self.emb_width)

        self.input_blocks, skips = self.new_input_blocks()
        channels = skips[-1]
        self.middle_block = EmbedSequential(self.new_residual(channels, channels), self.new_attention(channels),
                                            self.new_residual(channels, channels))
        self.output_blocks = self.new_output_blocks(channels, skips)
        channels = config.level_widths()[0]
        out_channels = config.in_channels * (1 + config.learn_sigma)
        self.out = nn.Sequential(group_norm(channels, config.norm_groups), nn.SiLU(),
                                 zero(nn.Conv2d(channels, out_channels, 3, padding=1)))

    def new_input_blocks(self):
        """(the blocks from the image down to the last level, the channels that each of them gives)."""
        config = self.config
        widths = config.level_widths()
        channels = widths[0]
        blocks = [EmbedSequential(nn.Conv2d(config.in_channels, channels, 3, padding=1))]
        skips = [channels]
        for level, (width, size) in enumerate(zip(widths, config.level_sizes())):
            for _ in range(config.num_res_blocks):
                blocks.append(EmbedSequential(*self.new_level_layers(channels, width, size)))
                channels = width
                skips.append(channels)
            if level < len(widths) - 1:
                blocks.append(EmbedSequential(self.new_resampling(Downsample, channels)))
                skips.append(channels)
        return nn.ModuleList(blocks), skips

    def new_output_blocks(self, channels, skips):
        """The blocks from the last level up to the image. channels: of what comes in; skips: of the input blocks."""
        config = self.config
        skips = list(skips)
        levels = enumerate(zip(config.level_widths(), config.level_sizes()))
        blocks = []
        for level, (width, size) in reversed(list(levels)):
            for i in range(config.num_res_blocks + 1):
                layers = self.new_level_layers(channels + skips.pop(), width, size, True)
                channels = width
                if level and i == config.num_res_blocks:
                    layers.append(self.new_resampling(Upsample, channels))
                blocks.append(EmbedSequential(*layers))
        return nn.ModuleList(blocks)

    def new_level_layers(self, channels, out_channels, size, decoder=False):
        """The layers of a block of a level whose images are `size` pixels a side: a list."""
        layers = [self.new_residual(channels, out_channels)]
        if size in self.config.attention_resolutions:
            layers.append(self.new_attention(out_channels, decoder))
        return layers

    def new_residual(self, channels, out_channels, resample=None):
        return ResBlock(channels, out_channels, self.emb_width, self.config.norm_groups, self.config.use_scale_shift_norm,
                        self.config.dropout, resample)

    def new_attention(self, channels, decoder=False):
        return AttentionBlock(channels, self.config.heads(channels, decoder), self.config.norm_groups,
                              not self.config.use_new_attention_order)

    def new_resampling(self, kind, channels):
        """kind: Downsample or Upsample. With resblock_updown it is a residual block around one without a convolution."""
        if self.config.resblock_updown:
            return self.new_residual(channels, channels, kind(channels, False))
        return kind(channels, self.config.conv_resample)

    def replay_dropout(self, seed, step):
        """Give dropout the masks that ./train_unet has in this step, until the next call."""
        names = [name for name, _ in self.named_parameters()]
        for name, module in self.named_modules():
            if isinstance(module, Dropout):
                first = names.index(name.removesuffix("out_layers.2") + "in_layers.0.weight")
                module.replayed = (seed, first, step)

    def forward(self, x, t, y=None):
        numbers = {"t": t} if y is None else {"t": t, "y": y}
        for name, value in numbers.items():
            if value.shape != x.shape[:1]:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, one number an image is needed:"
                                 f" ({len(x)},)")
        if (y is None) == self.config.class_cond:
            raise ValueError("y, the classes of the images, goes with class_cond, and only with it")
        emb = timestep_embedding(t, self.config.num_channels, self.config.max_period,
                                 self.config.timestep_unit())
        emb = self.time_embed(emb.to(self.time_embed[0].weight.dtype))
        if y is not None:
            emb = emb + self.label_emb(y)
        skips = []
        for block in self.input_blocks:
            x = block(x, emb)
            skips.append(x)
        x = self.middle_block(x, emb)
        for block in self.output_blocks:
            x = block(torch.cat([x, skips.pop()], dim=1), emb)
        return self.out(x)


# ----------------------------------------------------------------------------------------------------
# the same model by the kernels of train_unet.cu: --operators native

ops = None  # the module dev/torch_ops/torch_ops.py, once use_native_operators has built it


class NativeConv2d(nn.Conv2d):
    """A 3x3 convolution with a stride of 1."""
    def forward(self, x):
        return ops.conv3x3(x, self.weight, self.bias)


class NativeLinear(nn.Linear):
    def forward(self, x):
        return ops.linear(x, self.weight, self.bias)


class NativeDownsample(Downsample):
    def forward(self, x):
        return self.op(x) if isinstance(self.op, nn.Conv2d) else ops.downsample(x)


class NativeUpsample(Upsample):
    def forward(self, x):
        return self.conv(ops.upsample(x))


def native_norm_conv(x, norm, conv, between, emb=None, residual=None, scale_shift=None):
    """conv(between(SiLU(norm(x)))) + emb + residual, by a single operator where `between` does nothing."""
    of_norm = norm.num_groups, norm.weight, norm.bias
    drops_nothing = isinstance(between, Dropout) and not (between.training and between.p)
    if isinstance(between, nn.Identity) or drops_nothing:
        return ops.norm_conv3x3(x, *of_norm, conv.weight, conv.bias, emb, residual, scale_shift)
    h = between(ops.group_norm_silu(x, *of_norm, scale_shift))
    return ops.conv3x3(h, conv.weight, conv.bias, emb, residual)


class NativeResBlock(ResBlock):
    """The convolutions themselves add what a plain block adds after them, the embedding and the skip."""
    def forward(self, x, emb):
        norm1, _, conv1 = self.in_layers
        norm2, _, dropout, conv2 = self.out_layers
        rows = self.emb_layers(emb)
        emb, scale_shift = (None, rows) if self.modulates else (rows, None)
        h = native_norm_conv(x, norm1, conv1, self.resample, emb)
        x = self.resample(x)
        if skip := list(self.skip_connection.parameters()):
            x = ops.conv1x1(x, *skip)
        return native_norm_conv(h, norm2, conv2, dropout, residual=x, scale_shift=scale_shift)


class NativeAttentionBlock(AttentionBlock):
    """The legacy order of channels is undone in the weights of qkv, which are fewer numbers than the channels themselves."""
    def without_legacy_order(self, rows):
        return rows.unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    def forward(self, x):
        weight = self.qkv.weight.flatten(1)
        bias = self.qkv.bias
        if self.legacy:
            weight = self.without_legacy_order(weight)
            bias = self.without_legacy_order(bias)
        h = ops.group_norm(x, self.norm.num_groups, self.norm.weight, self.norm.bias)
        h = ops.attention(ops.conv1x1(h, weight, bias), self.heads)
        return ops.conv1x1(h, self.proj_out.weight, self.proj_out.bias, residual=x)


class NativeOut(nn.Sequential):
    def forward(self, x):
        norm, _, conv = self
        return native_norm_conv(x, norm, conv, nn.Identity())


def use_native_operators(model):
    """The UNet with its layers computed by dev/torch_ops/torch_ops.py; parameters and their names stay. Returns the model.

    The first call builds the operators, which takes one to three minutes.
    """
    global ops
    ops = unet_io.import_from_dev("torch_ops/torch_ops")
    kinds = {Downsample: NativeDownsample, Upsample: NativeUpsample, ResBlock: NativeResBlock,
             AttentionBlock: NativeAttentionBlock, nn.Linear: NativeLinear}
    for module in model.modules():
        kind = type(module)
        if kind is nn.Conv2d and module.kernel_size == (3, 3) and module.stride == (1, 1):
            module.__class__ = NativeConv2d
        elif kind in kinds:
            module.__class__ = kinds[kind]
    model.out.__class__ = NativeOut
    return model.to(memory_format=torch.channels_last)


# What channel_mult="" means in guided-diffusion's create_model, by image_size.
GUIDED_MULTS = {512: (0.5, 1, 1, 2, 2, 4, 4), 256: (1, 1, 2, 2, 4, 4), 128: (1, 1, 2, 3, 4), 64: (1, 2, 3, 4)}
# Flags of guided-diffusion's create_model, UNetModel and create_gaussian_diffusion that can have one value only here.
FIXED_FLAGS = dict(use_fp16=False, use_checkpoint=False, timestep_respacing="", use_kl=False,
                   predict_xstart=False)


def create_model(image_size=64, num_channels=64, num_res_blocks=2, channel_mult="", **flags):
    """UNet by the flags of guided-diffusion's create_model (Dhariwal and Nichol 2021).

    image_size: pixels a side. num_channels: the unit of channel_mult. channel_mult: each level's width in
    units of it, "0.5,1,2" or a tuple; "" stands for guided-diffusion's at this image_size. flags: any other
    field of unet_io.Config, as attention_resolutions="16,8" (pixels a side), num_head_channels=32,
    norm_groups=32; and guided-diffusion's others, with the value that they have here.
    Returns a module called as model(x, t), or with class_cond as model(x, t, y): x (B, 3, image_size,
    image_size) or with other in_channels, t (B,), y (B,) classes -> the prediction, of x's shape; with
    learn_sigma twice the channels. num_classes is 1000, as there. Names, order and shapes of the state dict
    are guided-diffusion's. Weights as PyTorch initialises them, see init_weights.

    What is not given is as in ./train_unet, and then the network is not guided-diffusion's by default: it
    resamples without a convolution (conv_resample False: 20,494,211 parameters where guided-diffusion has
    22,080,323), attends at 16 and 8 pixels with heads of 32 channels, and splits qkv before the heads
    (use_new_attention_order True). rescale_learned_sigmas counts as given: it makes no difference to a chain
    of 1000 steps. Raises UserError for a flag or a value that doesn't exist here.
    """
    if isinstance(channel_mult, str) and channel_mult == "":
        channel_mult = GUIDED_MULTS.get(image_size)
        if channel_mult is None:
            raise UserError(f"create_model: guided-diffusion has no channel_mult for image_size"
                            f" {image_size!r}: name the width of each level, e.g. channel_mult='1,2,2'")
    flags = with_guided_heads(flags)
    flags.pop("rescale_learned_sigmas", None)
    if flags.get("class_cond") and not flags.get("num_classes"):
        flags["num_classes"] = 1000  # guided-diffusion's NUM_CLASSES
    flags["channel_mult"] = channel_mult

    fields = {field.name: field for field in dataclasses.fields(Config)}
    values = dict(image_size=image_size, num_channels=num_channels, num_res_blocks=num_res_blocks)
    for name, value in flags.items():
        if name in FIXED_FLAGS:
            if value != FIXED_FLAGS[name]:
                raise UserError(f"create_model: {name}={value!r} is not supported, only"
                                f" {FIXED_FLAGS[name]!r}")
        elif name not in fields:
            raise UserError(f"create_model: there is no flag {name}")
        elif fields[name].type is tuple:
            values[name] = guided_sizes(name, value)
        else:
            values[name] = value
    config = Config(**values).check()
    # guided-diffusion attends where the image was shrunk image_size // r times, be it r pixels large or not
    config.attention_resolutions = tuple(image_size // (image_size // size) if size <= image_size else size
                                         for size in config.attention_resolutions)
    return UNet(config)


def with_guided_heads(flags):
    """Flags of guided-diffusion, as they are to be here: there num_heads counts only where num_head_channels is -1."""
    usual = -1 if "num_heads" in flags else 32
    if flags.get("num_head_channels", usual) != -1:
        return {name: value for name, value in flags.items() if not name.startswith("num_heads")}
    flags = dict(num_heads=4) | flags | dict(num_head_channels=32)
    flags["num_heads_upsample"] = max(0, flags.get("num_heads_upsample", -1))
    return flags


def guided_sizes(name, value):
    """A list of numbers that create_model is given as a text or a sequence: a tuple. Raises UserError."""
    try:
        return unet_io.parse_sizes(value)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"create_model: {name}: {error}") from None


def file_order(model, tensors, back=False):
    """Tensors, one for each of the model's parameters, with the rows of q, k and v in the order of a .bin: a list.

    A .bin has all of q, then k, then v, whatever order the model's state dict has: see AttentionBlock. back: from the order
    of a .bin to that of the model.
    """
    tensors = list(tensors)
    modules = dict(model.named_modules())
    for i, (name, parameter) in enumerate(model.named_parameters()):
        block = modules[name.partition(".qkv.")[0]] if ".qkv." in name else None
        if block and block.legacy:
            rows = torch.arange(len(parameter)).reshape(block.heads, 3, -1).transpose(0, 1).flatten()
            tensors[i] = tensors[i][rows.argsort() if back else rows]
    return tensors


def init_weights(model, seed):
    """Initialise as PyTorch does by default, but with the numbers of stream INIT, as ./train_unet does."""
    modules = dict(model.named_modules())
    values = []
    for index, (name, parameter) in enumerate(model.named_parameters()):
        owner, _, kind = name.rpartition(".")
        module = modules[owner]
        if isinstance(module, nn.GroupNorm):
            value = np.full(parameter.shape, kind == "weight", np.float32)
        elif getattr(module, "starts_at_zero", False):
            value = np.zeros(parameter.shape, np.float32)
        elif isinstance(module, nn.Embedding):
            value = unet_io.normals(seed, Stream.INIT, parameter.numel(), index).reshape(parameter.shape)
        else:
            value = unet_io.init_uniform(seed, index, tuple(parameter.shape), module.weight[0].numel())
        values.append(torch.from_numpy(value))
    for parameter, value in zip(model.parameters(), file_order(model, values, back=True)):
        parameter.data.copy_(value)
    return model


def perturb(model, seed, scale=0.02):
    """Add scale * N(0, 1) of stream PERTURB to every parameter, since most gradients of a fresh model are 0."""
    noises = []
    for i, p in enumerate(model.parameters()):
        noise = unet_io.normals(seed, Stream.PERTURB, p.numel(), i).reshape(p.shape) * np.float32(scale)
        noises.append(torch.from_numpy(noise))
    for parameter, noise in zip(model.parameters(), file_order(model, noises, back=True)):
        parameter.data += noise.to(parameter)
    return model


def set_tensors(model, tensors, flat, path):
    """Copy one flat float32 array of a .bin into tensors, one for each of the model's parameters and of its shape.

    Raises UserError if the counts differ, or a number is NaN or infinite.
    """
    sizes = [p.numel() for p in model.parameters()]
    have = sum(sizes)
    if have != len(flat):
        raise UserError(f"{path} has {len(flat)} parameters, the model that its header describes has {have}")
    if not np.isfinite(flat).all():
        raise UserError(f"{path} holds NaN or infinity: its training had gone wrong; use an older one")
    parts = torch.from_numpy(flat.astype(np.float32)).split(sizes)
    parts = [part.reshape(p.shape) for part, p in zip(parts, model.parameters())]
    for tensor, part in zip(tensors, file_order(model, parts, back=True)):
        tensor.data.copy_(part)


def refuse_contradictions(flags, config, path, origin="", remedy="", names=ARCHITECTURE + DIFFUSION):
    """Raise UserError where one of the flags, {name: value}, contradicts a file's Config. names: the flags to look at.

    origin: what is said after a flag that was not typed. remedy: what is said at the end.
    """
    for name, value in flags.items():
        have = getattr(config, name, "none")  # a flag of another network
        if name in names and value != have:
            raise UserError(f"--{name} {unet_io.setting_text(value)}{origin} contradicts {path}, which was made with"
                            f" {unet_io.setting_text(have)}{remedy}")


def refuse_preset(preset, typed, config, path):
    """Raise UserError where a preset, a name or None, asks for another model than a file's Config describes.

    typed: the names of flags that the preset does not decide.
    """
    asked = {name: value for name, value in unet_io.PRESETS.get(preset, {}).items() if name not in typed}
    refuse_contradictions(asked, config, path, f" (--preset {preset})")


def chosen_weights(checkpoint, use_ema, path):
    """The Checkpoint's flat array that use_ema names, see load_model. Raises UserError."""
    if use_ema is None:
        use_ema = checkpoint.run.get("use_ema", 1)
    section = unet_io.EMA_SECTIONS[use_ema - 1] if use_ema else "weights"
    if use_ema > 1 and section not in checkpoint.sections:
        raise UserError(f"{path} has no section {section} for --use_ema {use_ema}; choose another, or 0 for the raw weights")
    return checkpoint.sections.get(section, checkpoint.sections["weights"])


def load_model(path, use_ema=None, overrides=None, free=()):
    """(UNet, Checkpoint) from a .bin, old or new, or from whatever convert.read takes: a .pt or .safetensors of ours,
    a bare state dict of guided-diffusion's model, of UNet, or of the trainer before it, a UNet2DModel of diffusers.

    use_ema: which of the averaged weights to take; 1 takes the raw weights from a file that has no averages. 0: the raw
    weights. None: those that the run drew its pictures with.
    overrides: {name: value} of a Config, for what old files and bare state dicts don't tell; what is missing there is as in
    convert. A new file tells everything, and a value that contradicts it is refused, unless its name is in `free`.
    Raises UserError.
    """
    overrides = dict(overrides or {})
    checkpoint = read_any(path, use_ema, overrides, free)
    if not checkpoint.old:
        told = {name: value for name, value in overrides.items() if name not in free}
        refuse_contradictions(told, checkpoint.config, path)
    return model_of(checkpoint, use_ema, path), checkpoint


def model_of(checkpoint, use_ema, path):
    """The UNet of a Checkpoint that was read from path; use_ema: see load_model. Raises UserError."""
    # no memory until the number of parameters is known to be right
    model = unet_without_memory(checkpoint.config, path)
    parameters = list(model.parameters())
    flat = chosen_weights(checkpoint, use_ema, path)
    if checkpoint.tensors not in (0, len(parameters)):
        raise UserError(f"{path} has {checkpoint.tensors} tensors, the model that its header describes has"
                        f" {len(parameters)}")
    if sum(p.numel() for p in parameters) == len(flat):
        model = model.to_empty(device="cpu")
    set_tensors(model, model.parameters(), flat, path)
    return model


def read_any(path, use_ema, overrides, free):
    """The Checkpoint of a file or folder: see load_model. Raises UserError."""
    import convert  # which imports this file
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(f"{path} is no file, a file is needed")
    steps = checkpoints_in(path)
    if steps and not os.path.exists(os.path.join(path, "model_index.json")):  # a pipeline of diffusers
        raise UserError(f"{path} is a folder; name a checkpoint in it, such as checkpoint_{max(steps):08d}.bin")
    if convert.what_it_is(path) != "bin":
        return convert.read(path, overrides, 1 if use_ema is None else use_ema, free)
    checkpoint = unet_io.read_checkpoint(path)
    if checkpoint.old:
        checkpoint.config = with_old_attention(checkpoint.config, overrides).check()
    return checkpoint


def with_old_attention(config, overrides):
    """The Config of an old model with `overrides`; the attention of such models is at the third and fourth level."""
    if "image_size" in overrides:
        size = overrides["image_size"]
        overrides = dict(attention_resolutions=(size // 4, size // 8)) | overrides
    return dataclasses.replace(config, **overrides)


def first_line(error):
    return (str(error) or type(error).__name__).splitlines()[0]


def unet_without_memory(config, path):
    """UNet on the meta device. Raises UserError, which names the file, where its Config can't work."""
    try:
        with torch.device("meta"):
            return UNet(config)
    except UserError as error:
        raise UserError(f"{path} can't be read as a model of its configuration: {error}") from None


# ----------------------------------------------------------------------------------------------------
# diffusion

HUBER = 0.1  # of consistency tuning on paths: see Diffusion.path_loss


def check_consistency(config):
    """Raise UserError for settings of consistency tuning that don't go together."""
    if config.consistency and config.predict == "eps":
        raise UserError("--consistency needs a network that sees an image in noise alone: not one of --predict eps")
    if config.consistency and (config.learn_sigma or config.min_snr_gamma):
        other = "--learn_sigma" if config.learn_sigma else "--min_snr_gamma"
        raise UserError(f"--consistency has a loss of its own, without {other}")
    if config.path_steps and not config.consistency:
        raise UserError(f"--path_steps {config.path_steps} goes with --consistency 1 only")
    if config.path_steps > config.diffusion_steps:
        raise UserError(f"--path_steps {config.path_steps} is more than --diffusion_steps {config.diffusion_steps}")
    if 0 < config.path_steps < config.consistency_steps:
        raise UserError(f"--path_steps {config.path_steps} is less than --consistency_steps {config.consistency_steps}")
    if config.matching_fraction and not config.path_steps:
        raise UserError(f"--matching_fraction {config.matching_fraction:g} needs --path_steps")


class Diffusion:
    """The forward process and the loss's target (Ho et al. 2020, equation 4; v: Salimans and Ho 2022)."""
    def __init__(self, config, device="cpu"):
        check_consistency(config)
        levels = config.noise_levels()
        least, span = unet_io.variance_range(levels)

        def table(values):  # (T,)
            return torch.tensor(values, dtype=torch.float32, device=device)

        self.predict = config.predict
        self.learn_sigma = config.learn_sigma
        self.fractions = unet_io.noise_fractions(levels).astype(np.float32)
        self.alpha = table(levels.alpha)
        self.sigma = table(levels.sigma)
        self.weights = table(unet_io.loss_weights(levels, config.predict, config.min_snr_gamma))
        self.least = table(least)
        self.span = table(span)
        self.factor = table(unet_io.mean_factors(levels, config.predict))
        self.x0_errors = table(unet_io.x0_error(levels, config.predict))

    def noised(self, x0, t, noise):
        """(x_t, target) in float32, both (B, C, H, W), from images in [-1, 1], timesteps (B,) and normals."""
        alpha = self.alpha[t][:, None, None, None]
        sigma = self.sigma[t][:, None, None, None]
        x = alpha * x0 + sigma * noise
        if self.predict == "edm":  # Karras et al. 2022, equation 8: the target of F, where x is alpha times their y + n
            scale = (sigma.double().square() + (unet_io.SIGMA_DATA * alpha.double()).square()).sqrt()
            target = (sigma * x0 / unet_io.SIGMA_DATA - unet_io.SIGMA_DATA * alpha * noise) / scale
            return x, target.float()
        targets = {"eps": noise, "v": alpha * noise - sigma * x0, "x0": x0, "flow": noise - x0}
        return x, targets[self.predict]

    def loss(self, out, target, t, x0):
        """Mean squared error over every element, each sample weighted by its timestep: a scalar tensor.

        out: what the network gives. With learn_sigma, T/1000 times each sample's term of the variational bound is added:
        "L_hybrid" of Nichol and Dhariwal 2021, section 3.1.
        """
        C = target.shape[1]
        prediction = out[:, :C]
        v = out[:, C:]
        losses = (prediction - target).square().mean((1, 2, 3))
        losses = self.weights[t].to(losses.dtype) * losses
        if self.learn_sigma:
            bound = self.bound(target - prediction.detach(), v, t, x0)
            losses = losses + len(self.alpha) / 1000 * bound
        return losses.mean()

    def pair_loss(self, out, target, t, gaps):
        """The loss of consistency tuning by pairs (Geng et al. 2024, "Consistency Models Made Easy"): a scalar tensor.

        Each sample's mean squared error in x0 is divided by its own square root, held constant, so that no sample outweighs
        the others, and by the gap between its two timesteps. target: the prediction that sees the same image as the earlier
        one; gaps: as unet_io.earlier_timesteps has them.
        """
        losses = (out - target).square().mean((1, 2, 3))
        weights = self.x0_errors[t].abs() / (gaps * losses.detach().sqrt().clamp(min=1e-6))
        return (weights * losses).mean()

    @staticmethod
    def path_loss(out, target):
        """The loss of learning from paths: a scalar tensor.

        It is the sum of the losses of all errors, and of the differences of errors between neighbouring pixels, divided by
        the number of errors. Each loss is the pseudo-Huber loss 2c (sqrt(error^2 + c^2) - c) of Song and Dhariwal 2023,
        "Improved Techniques for Training Consistency Models", who apply it to whole images.
        """
        def huber(errors):
            squares = errors.square()
            return (2 * HUBER * squares / ((squares + HUBER**2).sqrt() + HUBER)).sum()

        errors = out - target
        return (huber(errors) + huber(errors.diff(dim=2)) + huber(errors.diff(dim=3))) / errors.numel()

    def bound(self, errors, v, t, x0):
        """Each sample's term of the variational bound, in bits a dimension: (B,).

        errors: target - prediction; v: the variance is exp(least + span * (v + 1) / 2). For t > 0 the term is the
        divergence of p(x_{t-1} | x_t) from the posterior, whose means are factor * errors apart; for t = 0 it is
        minus the logarithm of the probability of x0's byte (Ho et al. 2020, equation 13).
        """
        def of_sample(table):
            return table[t][:, None, None, None].to(v)

        least = of_sample(self.least)
        wider = of_sample(self.span) * (v + 1) / 2  # the logarithm of the variance, less the least
        away = of_sample(self.factor) * errors
        precision = torch.exp(-least - wider)
        divergence = (wider + torch.expm1(-wider) + away.square() * precision) / 2

        def below(x):
            """The part of a Gaussian below x, nearly (Page 1977); accurate where it is next to nothing."""
            return torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))

        black = x0 < -0.999  # the byte 0 stands for all that is darker, too
        white = x0 > 0.999   # and 255 for all that is brighter
        away = torch.where(black, away, torch.where(white, -away, -away.abs()))
        within = below((away + 1 / 255) * precision.sqrt())
        within = within - torch.where(black | white, 0, below((away - 1 / 255) * precision.sqrt()))
        surprise = -torch.log(within.clamp(min=1e-12))
        nats = torch.where((t == 0)[:, None, None, None], surprise, divergence)
        return nats.mean((1, 2, 3)) / math.log(2)


SAMPLERS = {"ddim": 50, "ddpm": None, "dpmpp": 25, "heun": 25, "consistency": None}  # steps unless told; None: all timesteps
SAMPLING = dict(guidance_scale=1.0, sampler="ddim", sample_steps=0, spacing="auto", eta=0.0, threshold="clamp", use_ema=1)
USUAL_SPACING = dict.fromkeys(SAMPLERS, "trailing") | {"ddim": "uniform", "ddpm": "uniform"}


def usual_sampler(config):
    """The sampler of a model that was not told one."""
    return "consistency" if config.consistency else "ddim"


def sampler_steps(config, sampler, sample_steps=None):
    """How many steps the sampler takes: sample_steps, or what is usual where that is None or 0."""
    if sample_steps:
        return sample_steps
    usual = SAMPLERS[sampler] or config.diffusion_steps
    if sampler == "consistency":
        usual = config.consistency_steps
    return min(usual, config.diffusion_steps)


def sampler_timesteps(config, sampler, steps, spacing):
    """The ascending timesteps that a sampler visits in so many steps: int64 (steps,). Raises UserError where it can't."""
    unet_io.check_steps(config.diffusion_steps, steps)
    if sampler == "consistency" and spacing == "auto":
        if config.path_steps and steps > config.consistency_steps:
            raise UserError(f"--sample_steps {steps} is more than --consistency_steps {config.consistency_steps}, in which"
                            " the model learns to draw")
        return unet_io.consistency_timesteps(config.diffusion_steps, config.path_steps, steps)
    if spacing == "auto":
        spacing = USUAL_SPACING[sampler]
    return unet_io.spaced_timesteps(spacing, config.noise_levels(), steps)


def sampling_settings(checkpoint, given):
    """(how pictures of a Checkpoint are drawn, {name: value} of SAMPLING; the flags in it that are the run's, as a text).

    given: {name: value} of what the user says; all else is as the run drew its grids. With a given sampler the run's steps,
    spacing and eta are not taken, since they were for another. The text has what was taken and is not the default.
    """
    run = dict(sampler=usual_sampler(checkpoint.config)) | checkpoint.run
    not_taken = set(given)
    if "sampler" in given:
        not_taken |= {"sample_steps", "spacing", "eta"}
    taken = {name: run[name] for name in SAMPLING if name in run and name not in not_taken}
    text = "".join(f" --{name} {unet_io.setting_text(value)}" for name, value in taken.items() if value != SAMPLING[name])
    told = {name: given[name] for name in SAMPLING if name in given}
    return SAMPLING | taken | told, text


@dataclasses.dataclass
class Edit:
    """A picture from which others are drawn, and what of it is kept.

    image: float32 (C, H, W) in [-1, 1].
    strength: only the timesteps below this fraction of the chain are visited; with 0 there are none, and the image itself
    is drawn. With less than 1, or without a mask, pictures begin as the noised image (SDEdit, Meng et al. 2022).
    mask: bool (1, H, W), the pixels that are kept (RePaint, Lugmayr et al. 2022). jump_length, jump_n_sample: see
    visited_levels.
    """
    image: torch.Tensor
    strength: float = 1.0
    mask: torch.Tensor = None
    jump_length: int = 10
    jump_n_sample: int = 1


def visited_levels(steps, jump_length=10, jump_n_sample=1):
    """The levels of noise that x has, one after the other, in a chain of so many steps; -1 is no noise: a list.

    From every jump_length-th level x goes back up by as many levels, jump_n_sample - 1 times (Lugmayr et al. 2022,
    "RePaint", algorithm 1 with the schedule of its authors' program).
    """
    jumps = {j: jump_n_sample - 1 for j in range(0, steps - jump_length, jump_length)}  # those that are left at each level
    t = steps
    passed = []
    while t >= 1:
        t -= 1
        passed.append(t)
        if jumps.get(t, 0) > 0:
            jumps[t] -= 1
            passed += range(t + 1, t + jump_length + 1)
            t += jump_length
    return [*passed, -1]


def times_below(times, strength, diffusion_steps):
    """The timesteps below the fraction `strength` of the chain. Raises UserError where there are none, unless it is 0."""
    below = times[times < np.float32(strength) * np.float32(diffusion_steps)]
    if strength and not len(below):
        raise UserError(f"--strength {strength:g} is less noise than the least of"
                        f" {unet_io.counted(len(times), 'timestep')} has; use more --sample_steps, or"
                        f" --spacing uniform")
    return below


def limited(x0, threshold):
    """Predicted pictures (B, C, H, W) within [-1, 1]: clamped, or as Imagen does (Saharia et al. 2022)."""
    if threshold == "dynamic":
        s = torch.quantile(x0.abs().flatten(1), 0.995, dim=1, interpolation="higher").clamp(min=1)
        s = s[:, None, None, None]
        return torch.clamp(x0, -s, s) / s
    return x0.clamp(-1, 1) if threshold == "clamp" else x0


KNOWN_NOISE = 1 << 31


def seed_noise(seeds, shape, call=0):
    """Normals float32 (len(seeds), *shape).

    call: 0 for a picture's start; k, from 1, for what its sampler adds in step k; KNOWN_NOISE + k for what is added to the
    pixels that are kept of an Edit's image.
    """
    rows = [unet_io.normals(seed, Stream.SAMPLER, math.prod(shape), 0, call) for seed in seeds]
    return torch.from_numpy(np.stack(rows)).reshape(-1, *shape)


class Level(typing.NamedTuple):
    """A level of noise, x = alpha x0 + sigma eps."""
    alpha: float
    sigma: float
    ratio: float  # sigma / alpha, the sigma of Karras et al. 2022; infinite where alpha is 0
    half_log_snr: float  # -log(ratio), the lambda of Lu et al. 2022


def levels_of(chain, times):
    """The Levels of a chain (a NoiseLevels) that a sampler visits at these timesteps, and after them that of no noise."""
    alpha = np.append(chain.alpha[times], 1.0)
    sigma = np.append(chain.sigma[times], 0.0)
    ratios = unet_io.noise_ratios(unet_io.NoiseLevels(alpha, sigma))
    with np.errstate(divide="ignore"):  # the last ratio is 0
        half_log_snr = -np.log(ratios)
    return [Level(*map(float, level)) for level in zip(alpha, sigma, ratios, half_log_snr)]


def network_output(model, x, t, y, config, guidance_scale, guide):
    """What the network says of x (B, C, H, W) at t (B,) of classes y (B,) or None: float32 (B, C or 2C, H, W).

    With guidance the first C channels are weak + guidance_scale * (told - weak). told: what the model says. weak: what it
    says without a class (Ho and Salimans 2022, equation 6), or what another model, the guide, says (Karras et al. 2024,
    "Guiding a Diffusion Model with a Bad Version of Itself").
    """
    classes = [] if y is None else [y]
    if guidance_scale == 1 or not (guide or classes):
        return model(x, t, *classes).float()
    if guide:
        told = model(x, t, *classes)
        weak = guide(x, t, *(classes if guide.config.class_cond else []))
    else:
        no_class = torch.full_like(y, config.num_classes)
        told, weak = model(torch.cat([x, x]), torch.cat([t, t]), torch.cat([y, no_class])).chunk(2)
    C = config.in_channels
    told = told.float()
    weak = weak[:, :C].float()
    guided = weak + guidance_scale * (told[:, :C] - weak)
    return torch.cat([guided, told[:, C:]], 1)


def predicted_picture(predict, x, out, level):
    """x0 from what the network says of x: see Diffusion.noised for what it was taught to say."""
    a, s = level.alpha, level.sigma
    if predict == "eps":
        return (x - s * out) / a
    if predict == "v":
        return (a * x - s * out) / (a**2 + s**2)
    if predict == "flow":
        return (x - s * out) / (a + s)
    if predict == "edm":
        scale = s**2 + (unet_io.SIGMA_DATA * a) ** 2
        return unet_io.SIGMA_DATA**2 * a / scale * x + unet_io.SIGMA_DATA * s / math.sqrt(scale) * out
    return out


# The samplers, each as its paper has it: a step takes x from the level `now` to the next one, which has less noise.
# x0: the predicted picture; noise(): normals like x, fresh in every step.

def variance_between(now, later):
    """The variance of the noise that x has at `now` beyond that of `later`: beta of Ho et al. 2020, of several timesteps."""
    return now.sigma**2 - (now.alpha / later.alpha * later.sigma) ** 2


def ddpm_step(x, x0, now, later, noise, v=None):
    """Ho et al. 2020, equations 6 and 7. v: what a network with learn_sigma says of the variance."""
    beta = variance_between(now, later)
    of_x0 = later.alpha * beta / now.sigma**2
    of_x = now.alpha / later.alpha * later.sigma**2 / now.sigma**2
    mean = of_x0 * x0 + of_x * x
    if later.sigma == 0:
        return mean
    variance = later.sigma**2 / now.sigma**2 * beta
    if v is not None:  # from there to beta (Nichol and Dhariwal 2021, equation 15)
        variance *= (beta / variance) ** ((v + 1) / 2)
    return mean + variance**0.5 * noise()


def ddim_step(x, x0, now, later, noise, eta):
    """Song et al. 2021, equations 12 and 16; with the flow schedule it is Euler's method."""
    eps = (x - now.alpha * x0) / now.sigma
    fresh = eta * later.sigma / now.sigma * math.sqrt(variance_between(now, later))
    x = later.alpha * x0 + math.sqrt(max(later.sigma**2 - fresh**2, 0)) * eps
    return x + fresh * noise() if fresh > 0 else x


def consistency_step(x0, later, noise):
    """Song et al. 2023, "Consistency Models", algorithm 1."""
    x = later.alpha * x0
    return x + later.sigma * noise() if later.sigma > 0 else x


def dpmpp_step(x, x0, now, later, before=None, x0_before=None):
    """Lu et al. 2022, "DPM-Solver++", algorithm 2; before: the level of the step before, where x0_before was predicted."""
    h = later.half_log_snr - now.half_log_snr
    D = x0
    if before and later.sigma > 0:
        h_before = now.half_log_snr - before.half_log_snr
        if h <= 2 * h_before:  # over a longer step it would overshoot
            r = h_before / h
            D = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * x0_before
    return later.sigma / now.sigma * x - later.alpha * math.expm1(-h) * D


def heun_step(x, x0, now, later, predict):
    """(x, the picture predicted last); Karras et al. 2022, algorithm 1. predict(x): the picture, at the level `later`."""
    if later.ratio < 0.1 * now.ratio:  # Euler's step, for a slope there would be a guess
        eps = (x - now.alpha * x0) / now.sigma
        return later.alpha * x0 + later.sigma * eps, x0
    y = x / now.alpha
    slope = (y - x0) / now.ratio
    y_later = y + (later.ratio - now.ratio) * slope
    x0 = predict(later.alpha * y_later)
    slope_later = (y_later - x0) / later.ratio
    return later.alpha * (y + (later.ratio - now.ratio) * (slope + slope_later) / 2), x0


def back_to_more_noise(x, now, earlier, noise):
    """x as if it had been noised from `now` on, to the level `earlier` (Lugmayr et al. 2022, "RePaint", algorithm 1)."""
    ratio = earlier.alpha / now.alpha
    return ratio * x + math.sqrt(variance_between(earlier, now)) * noise()


@torch.no_grad()
def sample(model, seeds, sampler="ddim", sample_steps=None, device="cpu", *, progress=lambda calls: calls,
           eta=0.0, threshold="clamp", start=None, classes=None, guidance_scale=1.0, guidance_interval=(0.0, 1.0),
           guide=None, edit=None, spacing="auto", watch=lambda i, x, x0: None):
    """Pictures float32 (len(seeds), C, H, W) on the CPU; each depends on its own seed alone.

    model: has .config and is called as model(x, t). start: the noise to start from, if not the seeds'. classes: with
    class_cond, one for each picture. guidance_scale, guide: see network_output; guidance_interval: in which part of the
    chain. edit: an Edit; its mask is for ddim and ddpm. spacing: see unet_io.spaced_timesteps; auto: USUAL_SPACING.
    watch: called after step i, 0-based, with the tensors (len(seeds), C, H, W) that it began with and predicted last.
    Raises UserError where a strength above 0 leaves no timestep.
    """
    config = model.config
    for network in (model, guide):
        if isinstance(network, nn.Module):
            network.eval()
    steps = sampler_steps(config, sampler, sample_steps)
    times = sampler_timesteps(config, sampler, steps, spacing)[::-1]  # the noisiest first
    if edit:
        times = times_below(times, edit.strength, config.diffusion_steps)
        visited = visited_levels(len(times), edit.jump_length, edit.jump_n_sample)
    else:
        visited = visited_levels(len(times))
    places = [len(times) - 1 - level for level in visited]  # x's places in levels, one after the other
    levels = levels_of(config.noise_levels(), times)
    C = config.in_channels
    shape = (C, config.image_size, config.image_size)
    y = torch.as_tensor(classes, device=device) if config.class_cond else None

    def predict(x, i):
        """(the predicted picture, with learn_sigma what the network says of the variance, otherwise None)"""
        low, high = guidance_interval
        is_guided = low <= times[i] / config.diffusion_steps <= high
        scale = guidance_scale if is_guided else 1
        t = torch.full((len(x),), int(times[i]), device=device)
        out, v = network_output(model, x, t, y, config, scale, guide).tensor_split([C], 1)
        x0 = limited(predicted_picture(config.predict, x, out, levels[i]), threshold)
        return x0, v if config.learn_sigma else None

    def noised_image(i, z):
        """The image of edit with normals z at place i."""
        return levels[i].alpha * edit.image.to(device) + levels[i].sigma * z

    def with_known(x, i, k):
        """x, at place i after k steps, with the image where the mask says so"""
        if edit is None or edit.mask is None:
            return x
        known = noised_image(i, seed_noise(seeds, shape, KNOWN_NOISE + k).to(device))
        return torch.where(edit.mask.to(device), known, x)

    x = (seed_noise(seeds, shape) if start is None else start).to(device)
    if edit and (edit.mask is None or edit.strength < 1):
        x = noised_image(0, x)
    before = None  # of dpmpp: the level of the step before, and the picture that was predicted there
    for k, (i, j) in enumerate(progress(list(zip(places, places[1:]))), 1):
        def noise():
            return seed_noise(seeds, shape, k).to(device)

        x = with_known(x, i, k - 1)
        begun = x
        now = levels[i]
        later = levels[j]
        if j < i:
            x = back_to_more_noise(x, now, later, noise)
            continue
        x0, v = predict(x, i)
        if sampler == "ddpm":
            x = ddpm_step(x, x0, now, later, noise, v)
        elif sampler == "ddim":
            x = ddim_step(x, x0, now, later, noise, eta)
        elif sampler == "consistency":
            x = consistency_step(x0, later, noise)
        elif sampler == "dpmpp":
            x = dpmpp_step(x, x0, now, later, *(before or ()))
            before = now, x0
        else:
            x, x0 = heun_step(x, x0, now, later, lambda x: predict(x, j)[0])
        watch(i, begun, x0)
    return with_known(x, len(times), len(places) - 1).cpu()


# ----------------------------------------------------------------------------------------------------
# training

def training_noise(config, stream, rows, step, shape):
    """The normals that a step of training draws from a stream for samples `rows`: float32 (len(rows), *shape)."""
    return unet_io.normals(config.seed, stream, math.prod(shape), rows, step).reshape(len(rows), *shape)


def make_batch(images, config, step):
    """What step (0-based) trains on: (images, t, noise, classes).

    They are float32 (B, C, H, W) in [-1, 1], int64 (B,), float32 (B, C, H, W), and with class_cond int64 (B,), otherwise
    None.
    """
    rows = np.arange(config.batch_size)
    places = unet_io.batch_indices(config.seed, step, config.batch_size, len(images))
    x0 = images.floats(places, config.image_size)
    if config.flip:
        mirrored = unet_io.flips(config.seed, rows, step)
        x0[mirrored] = x0[mirrored][..., ::-1]
    t = unet_io.timesteps(config, rows, step)
    noise = training_noise(config, Stream.NOISE, rows, step, x0[0].shape)
    if not config.path_steps:  # a path begins with a sampler's noise
        noise += np.float32(config.offset_noise) * training_noise(config, Stream.OFFSET, rows, step, (x0.shape[1], 1, 1))
    y = None
    if config.class_cond:
        hidden = unet_io.dropped(config.seed, rows, step, config.cond_drop_prob)
        y = np.where(hidden, config.num_classes, images.labels[places]).astype(np.int64)
    return x0, t, noise, y


def decay_groups(parameters, config):
    """Parameter groups of an optimiser: weight decay is for matrices and convolutions only."""
    parameters = list(parameters)
    decayed = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim < 2]
    return [dict(params=decayed, weight_decay=config.weight_decay), dict(params=others, weight_decay=0.0)]


def orthogonalised(x):
    """A matrix (rows, columns) with its singular values brought near 1, by five steps of Newton and Schulz's iteration.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x


class Muon(torch.optim.AdamW):
    """Muon for the weights of hidden layers, AdamW for all others. A matrix with more rows than columns counts as several.

    The momentum is AdamW's exp_avg. The update is scaled as by Liu et al. 2025, "Muon is Scalable for LLM Training", so that
    AdamW's learning rate and weight decay suit it.
    """
    def __init__(self, groups, rows, table=None, **settings):
        """rows: {parameter: the order in which a .bin has its rows}, see file_order. table: the parameter that has a row for
        each class, if there is one."""
        super().__init__(groups, **settings)
        self.rows = rows
        self.places = {p: order.argsort() for p, order in rows.items()}  # of a parameter's rows in a .bin
        self.table = table

    def is_hidden(self, p):
        return p.ndim > 1 and p is not self.table and p.shape[0] % 16 == 0 and p.shape[1] % 16 == 0

    @torch.no_grad()
    def step(self):
        """Do one step: AdamW for all parameters, and then Muon for the hidden ones, from what they were before."""
        hidden = [(group, p, p.clone()) for group in self.param_groups for p in group["params"] if self.is_hidden(p)]
        super().step()
        for group, p, before in hidden:
            lr = group["lr"]
            columns = p[0].numel()
            momentum = torch.lerp(p.grad, self.state[p]["exp_avg"], group["betas"][0])  # Nesterov's
            pieces = momentum.flatten(1)[self.rows[p]].split(columns)
            update = torch.cat([orthogonalised(piece) for piece in pieces])[self.places[p]].view_as(p)
            p.copy_(before * (1 - lr * group["weight_decay"]) - lr * 0.2 * math.sqrt(columns) * update)


class Paths(typing.NamedTuple):
    """A path, drawn by the teacher from noise to a picture, for each sample of a batch."""
    ends: np.ndarray  # the pictures (batch_size, C, H, W)
    points: dict  # {k: (batch_size, C, H, W)}, those of unet_io.path_beginnings, from 0, the noise
    classes: np.ndarray  # (batch_size,) or None


class Trainer:
    """A model with its optimiser, average and place in the run; step() does one step of training.

    dtype float64 gives a reference run, precision "bf16" PyTorch's autocast on top of float32 weights. operators:
    "torch", or "native" as in use_native_operators. threshold: how what is drawn in a step is limited, see `limited`.
    """
    def __init__(self, model, images, config, device="cpu", dtype=torch.float32, precision="fp32",
                 compile=False, operators="torch", threshold="clamp"):
        self.config = config
        self.images = images
        self.device = device
        self.dtype = dtype
        self.threshold = threshold
        self.steps_done = 0
        images.check_size(config.image_size, config.in_channels)
        images.check_labels(config)
        self.model = model.to(device, dtype)
        if operators == "native":
            use_native_operators(self.model)
        self.forward = torch.compile(self.model) if compile else self.model
        self.autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16")
        self.parameters = list(self.model.parameters())
        self.diffusion = Diffusion(config, device)
        self.emas = [[p.detach().clone() for p in self.parameters] for _ in config.ema_rate]
        self.history = unet_io.History()
        self.adamw = ops.AdamW if operators == "native" else torch.optim.AdamW
        self.optimizer = self.new_optimizer(self.model, lr=config.lr, betas=(config.beta1, config.beta2))
        self.loader = concurrent.futures.ThreadPoolExecutor(1)  # prepares the next batch meanwhile
        self.next_batch = None
        self.teacher = copy.deepcopy(self.model) if config.path_steps else None  # draws the paths
        self.fake = copy.deepcopy(self.model) if config.matching_fraction else None  # learns what the model draws
        if self.fake:
            self.fake_optimizer = self.new_optimizer(
                self.fake, lr=unet_io.FAKE_RATE * config.lr, betas=(0.0, config.beta2))
        self.paths = {}  # {number: what drawn_paths returns}

    def new_optimizer(self, network, **settings):
        """The optimiser of a network's parameters, with these settings of AdamW."""
        groups = decay_groups(network.parameters(), self.config)
        if self.config.optimizer != "muon":
            return self.adamw(groups, eps=self.config.adam_eps, **settings)
        parameters = list(network.parameters())
        rows = dict(zip(parameters, file_order(network, [torch.arange(len(p)) for p in parameters])))
        table = label_table(network).weight if self.config.class_cond else None
        return Muon(groups, rows, table, eps=self.config.adam_eps, **settings)

    def path_batch(self, step):
        """What step (0-based) of a run with path_steps trains on, as make_batch has it.

        The images are the ends of paths, t are the timesteps of the points where the samples are on them, and the noise is
        what leads from an end to the point.
        """
        config = self.config
        numbers = unet_io.path_numbers(config, step)
        at = unet_io.path_points(config, step)
        ends, points, classes = [], [], []
        for b, number in enumerate(numbers):
            paths = self.drawn_paths(number)
            ends.append(paths.ends[b])
            points.append(paths.points[at[b]][b])
            if config.class_cond:
                classes.append(paths.classes[b])
        self.paths = {number: kept for number, kept in self.paths.items() if number > numbers.max() - unet_io.PATHS_KEPT}

        levels = config.noise_levels()
        t = unet_io.spaced_timesteps("trailing", levels, config.path_steps)[::-1][at].astype(np.int64)
        alpha, sigma = (level[t].astype(np.float32)[:, None, None, None] for level in levels)
        ends = np.stack(ends)
        noise = (np.stack(points) - alpha * ends) / sigma
        return ends, t, noise, np.stack(classes) if config.class_cond else None

    def drawn_paths(self, number):
        """The samples' Paths of this number, which the teacher draws when they are first asked for."""
        if number not in self.paths:
            seeds, classes = unet_io.path_starts(self.config, number, self.images.labels)
            points = []
            ends = sample(self.teacher, seeds, "dpmpp", self.config.path_steps, self.device, threshold=self.threshold,
                          classes=classes, watch=lambda i, x, x0: points.append(x))
            kept = {at: points[at].cpu().numpy() for at in unet_io.path_beginnings(self.config)}
            self.paths[number] = Paths(ends.numpy(), kept, classes)
        return self.paths[number]

    def matching_loss(self, noise, y=None):
        """The loss of a step that matches distributions: a scalar tensor (Yin et al. 2024, "One-step Diffusion with
        Distribution Matching Distillation", section 3.2). noise, y: those of a batch, NumPy arrays.

        The model, which is the student, draws pictures, and the fake learns to denoise them, in a step of its own. Teacher
        and fake see the pictures noised. A picture is to change by the difference between what the two see in it, divided by
        its mean distance from what the teacher sees (equation 8).
        """
        noise = torch.from_numpy(noise).to(self.device)
        classes = self.class_inputs(y)
        x0, t, noise, pictures = self.student_draws(noise, classes)

        t_noised = torch.from_numpy(unet_io.matching_timesteps(self.config, self.steps_done)).to(self.device)
        fresh = self.step_noise(Stream.MATCHING_NOISE, pictures)
        fake = self.teach_fake(pictures, t_noised, fresh, classes)
        with torch.no_grad():
            self.teacher.eval()
            answer = self.answer(pictures, t_noised, fresh, classes, self.teacher)
            teacher = limited(self.seen(pictures, t_noised, *answer), self.threshold)
            distance = (pictures - teacher).abs().mean((1, 2, 3), keepdim=True).clamp(min=1e-3)
            change = self.x0_errors(t) * (teacher - fake) / distance
        out, _ = self.answer(x0, t, noise, classes)
        return self.diffusion.loss(out, out.detach() + change, t, x0)

    @torch.no_grad()
    def student_draws(self, noise, classes):
        """(x0, t, noise, pictures): what the model draws from noise, and what its last step begins with, x0 noised to t.

        Of two steps the first makes drafts, which are the second one's x0. A step from noise alone has an x0 of zeros.
        """
        config = self.config
        *second, last = unet_io.consistency_timesteps(config.diffusion_steps, config.path_steps, config.consistency_steps)

        def draw(x0, t, noise):
            return self.seen(x0, t, *self.answer(x0, t, noise, classes)).float()

        self.model.eval()  # which drops nothing
        x0 = torch.zeros_like(noise)
        t = torch.full((len(x0),), int(last), device=self.device)
        pictures = draw(x0, t, noise)
        if second:
            x0 = limited(pictures, self.threshold)
            noise = self.step_noise(Stream.SECOND_NOISE, x0)
            t = torch.full_like(t, second[0])
            pictures = draw(x0, t, noise)
        self.model.train()
        return x0, t, noise, pictures

    def teach_fake(self, pictures, t, noise, classes):
        """One step of training of the fake, on noised pictures; returns what it saw in them: (B, C, H, W)."""
        if self.config.dropout:
            self.fake.replay_dropout(self.config.seed, self.steps_done)
        self.fake.train()
        out, target = self.answer(pictures, t, noise, classes, self.fake)
        self.fake_optimizer.zero_grad(set_to_none=True)
        self.diffusion.loss(out, target, t, pictures).backward()
        self.fake_optimizer.step()
        return limited(self.seen(pictures, t, out.detach(), target), self.threshold)

    def class_inputs(self, y):
        """What the network is given besides images and timesteps: (classes (B,),), a tensor; () where y is None.

        y: a NumPy array or None.
        """
        return () if y is None else (torch.from_numpy(y).to(self.device),)

    def step_noise(self, stream, images):
        """The noise that this step of training draws from a stream for images: (B, C, H, W)."""
        noise = training_noise(self.config, stream, np.arange(len(images)), self.steps_done, images[0].shape)
        return torch.from_numpy(noise).to(self.device)

    def loss(self, x0, t, noise, y=None, weighted=True):
        """The loss of a batch, NumPy arrays as make_batch has them: a scalar tensor.

        Without weighted it is the mean squared error of the prediction, whatever the run learns by.
        """
        if weighted and self.config.consistency and not self.config.path_steps:
            return self.pair_loss(x0, t, noise, y)
        x0, t, noise = (torch.from_numpy(array).to(self.device) for array in (x0, t, noise))
        out, target = self.answer(x0, t, noise, self.class_inputs(y))
        if not weighted:
            return F.mse_loss(out[:, :target.shape[1]], target)
        if self.config.path_steps:
            return self.diffusion.path_loss(out, target)
        return self.diffusion.loss(out, target, t, x0)

    def pair_loss(self, x0, t, noise, y):
        """The loss of consistency tuning by pairs of timesteps, of a batch of NumPy arrays: a scalar tensor."""
        earlier, gaps = unet_io.earlier_timesteps(self.diffusion.fractions, t, self.steps_done, self.config.lr_steps)
        x0, t, noise, earlier, gaps = (torch.from_numpy(array).to(self.device) for array in (x0, t, noise, earlier, gaps))
        classes = self.class_inputs(y)
        out, target = self.answer(x0, t, noise, classes)
        target = target + self.seen_earlier(x0, t, earlier, noise, classes)
        return self.diffusion.pair_loss(out, target, t, gaps)

    def answer(self, x0, t, noise, classes, network=None):
        """(what a network predicts for the noised images, what it should): (B, C or 2C, H, W) and (B, C, H, W).

        network: self.forward, the model, unless given.
        """
        x, target = self.diffusion.noised(x0, t, noise)
        with self.autocast:
            out = (network or self.forward)(x.to(self.dtype), t, *classes)
        return out.to(self.dtype), target.to(self.dtype)

    def x0_errors(self, t):
        """The error in x0 where that of the prediction is 1: (B, 1, 1, 1)."""
        return self.diffusion.x0_errors[t][:, None, None, None].to(self.dtype)

    def seen(self, x0, t, out, target):
        """The images that a network sees in noised x0, of which it predicted out and should have predicted target:
        (B, C, H, W)."""
        return x0 + self.x0_errors(t) * (out - target)

    @torch.no_grad()
    def seen_earlier(self, x0, t, earlier, noise, classes):
        """By how much the predictions at t would have to be off to show what the network sees at the earlier timesteps."""
        out, target = self.answer(x0, earlier.clamp(min=0), noise, classes)
        x0_errors = torch.where(earlier < 0, 0, self.diffusion.x0_errors[earlier]) / self.diffusion.x0_errors[t]
        return x0_errors[:, None, None, None].to(self.dtype) * (out - target)

    def step(self):
        """One step of the optimiser and the update of the averages; returns the loss, a float.

        Both are left out where the loss or the gradient's norm is not finite, or an outlier.
        """
        config = self.config
        step = self.steps_done
        if config.dropout:
            self.model.replay_dropout(config.seed, step)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        matches = unet_io.matches_distributions(config, step)
        if matches:
            _, _, noise, y = self.image_batch(step)
            loss = self.matching_loss(noise, y)
        elif config.path_steps:
            loss = self.loss(*self.path_batch(step))
        else:
            loss = self.loss(*self.image_batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, config.grad_clip or math.inf).item()
        loss = loss.item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = "a gradient" if math.isfinite(loss) else "the loss"
            why = self.too_large() if self.history.skipped == step else ""
            tqdm.write(f"step {step + 1}: {what} is not finite, the update is skipped{why}", file=sys.stderr)
            self.history.skipped += 1
        elif self.history.accepts(loss, norm, 0 if matches else config.skip_outliers):
            self.update(matches)
        self.steps_done += 1
        return loss

    def image_batch(self, step):
        """What make_batch makes for step (0-based); meanwhile that of the next step is begun."""
        batch = self.next_batch.result() if self.next_batch else make_batch(self.images, self.config, step)
        self.next_batch = self.loader.submit(make_batch, self.images, self.config, step + 1)
        return batch

    def update(self, matches):
        """Update the weights by their gradients, and the averages. matches: whether the step matches distributions."""
        config = self.config
        step = self.steps_done
        for group in self.optimizer.param_groups:
            group["lr"] = unet_io.learning_rate(config, step)
            group["betas"] = (0.0 if matches else config.beta1, config.beta2)
        self.optimizer.step()
        for rate, ema in zip(config.ema_rate, self.emas):
            keep = unet_io.ema_decay(rate, step - self.history.skipped, warmup=not config.consistency)
            torch._foreach_lerp_(ema, [p.detach() for p in self.parameters], 1 - keep)

    def too_large(self):
        """What is said where a gradient is not finite before the first update: "" unless images are far outside [-1, 1]."""
        pixels = self.images.pixels
        if pixels.dtype == np.uint8:
            return ""
        most = max(float(np.abs(image).max()) for image in pixels)
        if most <= 1000:
            return ""
        return unet_io.printable(
            f": {self.images.path} holds values up to {most:g}, and training expects -1 to 1, or a standard"
            f" deviation of 1; make it again with --range or --data_std of prepare_data.py")

    @torch.no_grad()
    def validation_loss(self, images):
        """The unweighted loss over a whole file with fixed timesteps and noise."""
        config = self.config
        total = 0.0
        self.model.eval()
        for start in range(0, len(images), config.batch_size):
            rows = np.arange(start, min(start + config.batch_size, len(images)))
            x0 = images.floats(rows, config.image_size)
            t = unet_io.timesteps(config, rows, 0, Stream.VAL_TIMESTEP)
            noise = training_noise(config, Stream.VAL_NOISE, rows, 0, x0[0].shape)
            y = images.labels[rows].astype(np.int64) if config.class_cond else None
            loss = self.loss(x0, t, noise, y, weighted=False).item()
            total += loss * len(rows)
        return total / len(images)

    def checkpoint(self, smoothed_loss=0.0, run=None, **texts):
        """Everything that resuming needs, as a Checkpoint. run: its values of RUN_SETTINGS. texts: its TEXT_SECTIONS.

        Raises UserError where a number is NaN or infinite.
        """
        def moments(optimizer, network, key):
            return [optimizer.state.get(p, {}).get(key, torch.zeros_like(p)) for p in network.parameters()]

        tensors = {"weights": self.parameters}
        tensors.update(zip(unet_io.EMA_SECTIONS, self.emas))
        tensors["adam_m"] = moments(self.optimizer, self.model, "exp_avg")
        tensors["adam_v"] = moments(self.optimizer, self.model, "exp_avg_sq")
        if self.teacher:
            tensors["teacher"] = list(self.teacher.parameters())
        if self.fake:
            tensors["fake"] = list(self.fake.parameters())
            tensors["fake_m"] = moments(self.fake_optimizer, self.fake, "exp_avg")
            tensors["fake_v"] = moments(self.fake_optimizer, self.fake, "exp_avg_sq")
        sections = {name: to_numpy(file_order(self.model, values)) for name, values in tensors.items()}
        for name, arrays in sections.items():
            if not all(np.isfinite(array).all() for array in arrays):
                raise UserError(f"{name} became NaN or infinite by step {self.steps_done}, which is not"
                                f" saved; earlier checkpoints are")
        sections["state"] = self.history
        sections |= {name: text for name, text in texts.items() if text}
        return Checkpoint(self.config, sections, self.steps_done, smoothed_loss, run=run or {})

    def restore(self, checkpoint, path):
        """Continue from a checkpoint: averages, moments and step (the weights came with load_model)."""
        sections = checkpoint.sections
        self.steps_done = checkpoint.step
        needed = ["teacher"] if self.teacher else []
        needed += ["fake", "fake_m", "fake_v"] if self.fake else []
        for name in needed:
            if name not in sections:
                raise UserError(f"{path} has no section {name}: it is no checkpoint of such a run; start from it with"
                                f" --model_weights")
        self.history = sections.get("state", self.history)
        for name, ema in zip(unet_io.EMA_SECTIONS, self.emas):
            if name in sections:
                set_tensors(self.model, ema, sections[name], path)
        if self.teacher:
            set_tensors(self.teacher, list(self.teacher.parameters()), sections["teacher"], path)
        updates = self.steps_done - self.history.skipped
        self.restore_moments(self.optimizer, self.model, updates, sections, "adam", path)
        if self.fake:
            set_tensors(self.fake, list(self.fake.parameters()), sections["fake"], path)
            updates = max(0, self.steps_done - unet_io.steps_on_paths(self.config))
            self.restore_moments(self.fake_optimizer, self.fake, updates, sections, "fake", path)

    def restore_moments(self, optimizer, network, updates, sections, name, path):
        """Give an optimiser of a network's parameters the moments in sections NAME_m and NAME_v, after so many updates."""
        parameters = list(network.parameters())
        for p in parameters:
            optimizer.state[p] = dict(step=torch.tensor(float(updates)), exp_avg=torch.zeros_like(p),
                                      exp_avg_sq=torch.zeros_like(p))
        for section, key in ((f"{name}_m", "exp_avg"), (f"{name}_v", "exp_avg_sq")):
            set_tensors(network, [optimizer.state[p][key] for p in parameters], sections[section], path)
        optimizer.load_state_dict(optimizer.state_dict())  # which puts them on the device and into the type it needs


def to_numpy(tensors):
    """Tensors as a list of float32 NumPy arrays."""
    return [t.detach().float().cpu().numpy() for t in tensors]


def replay(model, images, config, steps, dtype=torch.float32, device="cpu"):
    """Train the model as ./train_unet does; returns the losses of the first `steps` steps: float64 (steps,)."""
    trainer = Trainer(model, images, config, device, dtype)
    return np.array([trainer.step() for _ in range(steps)])


def label_table(model):
    """The nn.Embedding of a model's classes, of a UNet or of a DiT."""
    return model.label_emb if isinstance(model, UNet) else model.y_embedder.embedding_table


def with_rows(model, config, rows):
    """A model of this Config with the weights of another model, which knows other classes.

    rows: for each row of the new label embedding, which row of the other model's it is, or -1 for a fresh one.
    """
    fresh = init_weights(UNet(config), config.seed)
    fresh.load_state_dict({name: value for name, value in model.state_dict().items()
                           if not name.startswith("label_emb.")}, strict=False)
    for row, before in enumerate(rows):
        if before >= 0:
            label_table(fresh).weight.data[row] = label_table(model).weight.data[before]
    return fresh


def kept_rows(config, names, source, before):
    """(the rows that with_rows takes, or None where all rows stay; what is said of them).

    names: those of the images' classes, which the new model is to know. before: those of the classes of source, a Config.
    """
    known = source.num_classes if source.class_cond else 0
    had_none = bool(known and source.cond_drop_prob)  # a row for no class
    has_none = config.cond_drop_prob > 0
    places = {unet_io.nfc(name): number for number, name in enumerate(before)}
    rows = []
    for row in range(config.num_classes):
        if row < len(names) and before:
            rows.append(places.get(unet_io.nfc(names[row]), -1))
        elif len(before) <= row < known:  # a class without a name
            rows.append(row)
        else:
            rows.append(-1)
    kept = [name for name, row in zip(names, rows) if row >= 0]
    fresh = [name for name, row in zip(names, rows) if row < 0]
    if has_none:
        rows.append(known if had_none else -1)
    if rows == list(range(source.label_rows())):
        return None, ""

    now = set(map(unet_io.nfc, names))
    dropped = [name for name in before if unet_io.nfc(name) not in now]
    parts = [] if kept else ["none is known"]
    for group, what in ((kept, "kept"), (fresh, "new"), (dropped, "dropped")):
        if group:
            parts.append(f"{unet_io.listed(group)} {'are' if len(group) > 1 else 'is'} {what}")
    if has_none != had_none:
        parts.append(f"and the row for no class is {'new' if has_none else 'dropped'}")
    return rows, ", ".join(parts)


def names_before(run, source, path, known, data_names):
    """(names of the known classes of the Checkpoint that the run starts from, notes); the names are () where none are told.

    Raises UserError. See plan_classes.
    """
    names = source.class_names if source else ()
    notes = []
    if run.class_names and known and not names:
        names = unet_io.read_class_names(run.class_names, known)
        unet_io.check_class_names(names, run.class_names)
    elif run.class_names:
        notes.append(f"--class_names {run.class_names} is not needed: the classes are called as"
                     f" {path if names else run.data_file} calls them")
    if known and not names:
        notes.append(f"{path} does not name its classes, which are taken for those of {run.data_file} in their order,"
                     f" {unet_io.listed(data_names)}; --class_names FILE tells others")
    return names, notes


def plan_classes(config, run, given, source, path, data_names):
    """(names of the run's classes, the rows that with_rows takes or None, notes); sets config.num_classes.

    All files are matched by these names, which are those of a run that is resumed, and otherwise those of the images.
    source, path: the Checkpoint that the run starts from, or None, and its path. data_names: those of the images' classes.
    """
    known = source.config.num_classes if source and source.config.class_cond else 0
    before, notes = names_before(run, source, path, known, data_names)
    if run.resume is not None:
        return before or data_names, None, notes
    told = unet_io.PRESETS.get(run.preset, {}) | given
    if not config.num_classes or source and "num_classes" not in told:
        are_same = not before or before == data_names
        config.num_classes = known if known and are_same else len(data_names)
    if known and not before and config.num_classes != known:
        raise UserError(f"--num_classes {config.num_classes} contradicts {path}, which was made with {known} classes"
                        f" and does not name them; leave the flag out, or name them with --class_names FILE")
    seen = max(known, len(data_names))
    if config.num_classes > seen:
        notes.append(f"--num_classes {config.num_classes}: only {seen} have images, and the others are never learned")
    if not source:
        return data_names, None, notes
    rows, line = kept_rows(config, data_names, source.config, before)
    if not line:
        return data_names, rows, notes
    line = f"{path} is trained on for the classes of {run.data_file}: {line}"
    if config.path_steps and -1 in rows:
        raise UserError(f"{line}; --consistency learns from what the model draws: train it for these classes first")
    return data_names, rows, [*notes, line]


def image_notes(config, images, validation):
    """Notes on classes of the images that the run does not use, and on a validation file that tells nothing: a list."""
    notes = []
    count = len(images.class_names)
    if not config.class_cond and not config.path_steps and count > 1:
        notes.append(f"{images.path} has images of {count} classes, which are not told apart without --class_cond 1")
    if validation and images.checksum and validation.checksum == images.checksum:
        notes.append(f"{validation.path} holds the images that the run learns from: its loss tells nothing of others")
    return notes


def idle_flags(config, run, given):
    """Notes on typed flags, {name: value}, that do nothing for want of another flag: a list. ./train_unet says the same."""
    is_lognormal = config.timestep_sampling == "lognormal"
    needs = {  # flag: (what it lacks, whether that is there)
        "timestep_mean": ("without --timestep_sampling lognormal", is_lognormal),
        "timestep_std": ("without --timestep_sampling lognormal", is_lognormal),
        "timestep_sampling": ("with --path_steps", not config.path_steps or run.val_file),
        "flip": ("with --path_steps", not config.path_steps),
        "offset_noise": ("with --path_steps", not config.path_steps),
        "cond_drop_prob": ("without --class_cond 1", config.class_cond),
        "num_classes": ("without --class_cond 1", config.class_cond),
        "final_lr_fraction": ("with --lr_schedule constant", config.lr_schedule != "constant"),
        "consistency_steps": ("without --consistency 1", config.consistency),
        "class_names": ("without --class_cond 1", config.class_cond),
        "init_model_filename": ("without --init_model_only 1", run.init_model_only),
        "init": ("with --model_weights", not run.model_weights),
        "debug_steps": ("without --write_debug_state", run.write_debug_state),
    }
    usual = vars(Config()) | RUN_DEFAULTS
    values = vars(config) | vars(run)
    notes = [f"--{name} does nothing {lack}" for name, (lack, is_met) in needs.items()
             if name in given and values[name] != usual[name] and not is_met]
    if given.keys() & {"warmup_steps", "steps"} and config.warmup_steps > run.steps:
        notes.append(f"the learning rate does not reach --lr: --warmup_steps {config.warmup_steps} are more than"
                     f" --steps {run.steps}")
    return notes


def absent_sizes(config, given):
    """A note on each typed size of --attention_resolutions that no level has: a list."""
    if "attention_resolutions" not in given:
        return []
    sizes = config.level_sizes()
    return [f"no level has the size {size} of --attention_resolutions; they halve from {sizes[0]} to {sizes[-1]}"
            for size in config.attention_resolutions if size not in sizes]


def random_images(path, config):
    """Write and read a file of two batches of random images, with classes if the Config has them: Images."""
    shape = (2 * config.batch_size, config.in_channels, config.image_size, config.image_size)
    pixels = unet_io.words(config.seed, Stream.PERTURB, math.prod(shape), 0, 1) >> np.uint32(24)
    labels = None
    if config.class_cond:
        labels = [f"{i % config.num_classes:07d}" for i in range(shape[0])]
    unet_io.write_images(path, pixels.astype(np.uint8).reshape(shape), labels)
    return unet_io.read_images(path)


def debug_state(prefix, config, images=None, steps=0):
    """Write reference values for the tests of the C++ program; the gradients of step 0 in float64.

    PREFIX_weights.bin  the weights: stream INIT, then N(0, 0.02^2) of stream PERTURB added to every parameter
    PREFIX_images.bin   random images, where none are given
    PREFIX_state.bin    a tensor file: x (B, C, H, W) float32, the noised images, and x0, those without
                        noise; t (B,) int32; with class_cond the classes y (B,) int32; target float32;
                        out float64; loss float64, with learn_sigma the bound's term included;
                        grad.NAME float64 for every parameter, its rows as in a .bin; and, with steps > 0,
                        losses (steps,) float64, those of the optimiser in float32
    Returns the tensors as a dict.
    """
    if images is None:
        images = random_images(f"{prefix}_images.bin", config)
    images.check_size(config.image_size, config.in_channels)
    images.check_labels(config)
    model = perturb(init_weights(UNet(config), config.seed), config.seed)
    weights = to_numpy(file_order(model, model.parameters()))
    unet_io.write_checkpoint(f"{prefix}_weights.bin", Checkpoint(config, {"weights": weights}))
    losses = replay(model, images, config, steps) if steps else None

    *arrays, y = make_batch(images, config, 0)
    x0, t, noise = map(torch.from_numpy, arrays)
    classes = () if y is None else (torch.from_numpy(y),)
    diffusion = Diffusion(config)
    x, target = diffusion.noised(x0, t, noise)
    model, _ = load_model(f"{prefix}_weights.bin")
    model.double().eval()
    out = model(x.double(), t, *classes)
    loss = diffusion.loss(out, target.double(), t, x0)
    loss.backward()
    tensors = dict(x=x.numpy(), x0=x0.numpy(), t=t.numpy().astype(np.int32), target=target.numpy(),
                   out=out.detach().numpy(), loss=loss.detach().numpy())
    if y is not None:
        tensors["y"] = y.astype(np.int32)
    gradients = file_order(model, [p.grad for p in model.parameters()])
    tensors |= {f"grad.{name}": grad.numpy() for (name, _), grad in zip(model.named_parameters(), gradients)}
    if steps:
        tensors["losses"] = losses
    unet_io.write_tensors(f"{prefix}_state.bin", tensors)
    return tensors


# ----------------------------------------------------------------------------------------------------
# command line

RUN_FLAGS = {  # name: (default, help)
    "steps": (20000, "total number of optimiser steps, earlier runs included"),
    "data_file": ("data/emoji.bin", "images from prepare_data.py"),
    "data_dir": ("", "images for prepare_data.py, which makes OUT_DIR/data_SIZE.bin of them; replaces --data_file"),
    "val_file": ("", "images for a validation loss at every save"),
    "model_weights": ("", "a .bin, .pt or .safetensors to start from instead of new weights"),
    "class_names": ("", "a text, a line a class: names for weights that don't name their classes"),
    "out_dir": ("out", "folder for checkpoints, metrics.jsonl and samples"),
    "log_every": (50, "steps between two lines of the log"),
    "save_every": (1000, "steps between two checkpoints, 0 for none but the last"),
    "sample_every": (1000, "steps between two grids of 16 pictures, 0 for none"),
    "init_model_only": (False, "write new weights to --init_model_filename and exit"),
    "init_model_filename": ("unet_init.bin", "see --init_model_only"),
    "write_debug_state": ("", "write PREFIX_weights.bin, PREFIX_state.bin for tests and exit"),
    "debug_steps": (0, "with --write_debug_state: also the losses of this many steps"),
}
# Flags of the trainer before this one: other names of flags of ours, and then those that ours only resemble.
ALIASES = {"steps": "iterations", "log_every": "log_interval", "save_every": "save_interval"}
RENAMED = {"--log_dir": "--out_dir, the folder for log, checkpoints and samples",
           "--model_dir": "--out_dir, the folder for log, checkpoints and samples",
           "--resume_checkpoint": "--resume PLACE"}


# The defaults of the flags that parse_flags declares one by one
OTHER_DEFAULTS = dict(resume=None, preset=None, threshold="clamp", init="philox", compile=None, precision="fp32", device="",
                      operators="torch")
RUN_DEFAULTS = {name: default for name, (default, _) in RUN_FLAGS.items()} | OTHER_DEFAULTS


def parse_flags(argv=None):
    """(dict of the flags that the user gave, Config, namespace of the other flags)."""
    parser = unet_io.Parser(RENAMED, ("--val_file", "--resume"), description=__doc__, argument_default=argparse.SUPPRESS)
    kinds = {bool: unet_io.parse_bool, tuple: unet_io.parse_sizes, unet_io.Rates: unet_io.parse_rates}

    def add(name, kind, default, help, choices=None):
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        optional = dict(nargs="?", const=True) if kind is bool else {}  # --flip is --flip True
        names = [f"--{word}" for word in (name, ALIASES.get(name)) if word]
        parser.add_argument(*names, type=kinds.get(kind, kind), choices=choices, **optional,
                            metavar=None if choices else "X", help=f"{help} (default: {shown})")

    for field in dataclasses.fields(Config):
        if field.metadata["help"]:
            add(field.name, field.type, field.default, field.metadata["help"], field.metadata["choices"])
    for name, (default, help) in RUN_FLAGS.items():
        add(name, type(default), default if default != "" else "none", help)
    parser.add_argument("--resume", nargs="?", const="", metavar="PLACE",
                        help="continue from a checkpoint or a folder's newest (default: --out_dir's)")
    parser.add_argument("--preset", action=unet_io.Once, choices=list(unet_io.PRESETS), help="defaults for a known model")
    parser.add_argument("--threshold", choices=["clamp", "none"],
                        help="how the steps of --path_steps, and of grids, keep pictures in [-1, 1] (default: clamp)")
    parser.add_argument("--init", choices=["philox", "torch"],
                        help="who draws new weights: philox as ./train_unet, or torch (default: philox)")
    parser.add_argument("--compile", type=unet_io.parse_bool, metavar="X",
                        help="use torch.compile (default: 1 on a GPU, else 0)")
    parser.add_argument("--operators", choices=["torch", "native"],
                        help="native: the kernels of train_unet.cu, see dev/torch_ops/torch_ops.py (default: torch)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="bf16: autocast (default: fp32)")
    parser.add_argument("--device", help="cpu, cuda, mps ... (default: the best there is)", metavar="X")
    given = vars(parser.parse_args(argv))
    return given, *resolve(given)


def resolve(given):
    """(Config, run namespace) from defaults, then the preset, then the flags that were given."""
    values = RUN_DEFAULTS | unet_io.PRESETS.get(given.get("preset"), {}) | given
    fields = {field.name for field in dataclasses.fields(Config)}
    of_config = {name: value for name, value in values.items() if name in fields}
    of_run = {name: value for name, value in values.items() if name not in fields}
    config = Config(**of_config, lr_steps=values["steps"])
    run = argparse.Namespace(**of_run)
    for name in ("steps", "log_every", "save_every", "sample_every"):
        unet_io.check_range(name, getattr(run, name))
    if run.debug_steps < 0:
        raise UserError(f"--debug_steps must be at least 0, not {run.debug_steps}")
    if "data_dir" in given and "data_file" in given:
        raise UserError(f"--data_dir {run.data_dir} and --data_file {run.data_file}: only one can be had")
    if run.resume:
        stay_in_folder(run, "out_dir" in given)
    return config.check(), run


def stay_in_folder(run, names_folder):
    """Make --out_dir the folder of --resume PLACE, which --out_dir may not contradict."""
    folder = run.resume
    if os.path.isfile(folder):
        folder = os.path.dirname(folder) or "."
    if names_folder and os.path.realpath(run.out_dir) != os.path.realpath(folder):
        raise UserError(f"--out_dir {run.out_dir} contradicts --resume {run.resume}: a run stays in its folder; leave"
                        f" --out_dir out")
    run.out_dir = folder


def pick_device(name=""):
    """The named device, or else a GPU if PyTorch can use one."""
    kinds = ("cpu", "cuda", "mps", "xpu")
    if name and name.split(":")[0] not in kinds:
        raise UserError(f"--device {name} is none of {unet_io.listed(kinds)}")
    device = name or best_device()
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} can't be used: {first_line(error)}") from None
    return device


def best_device():
    mps = getattr(torch.backends, "mps", None)  # which an old PyTorch does not have
    if torch.cuda.is_available():
        return "cuda"
    if mps and mps.is_available():
        return "mps"
    return "cpu"


def adopt(config, given, source, path, names):
    """Take the settings of these names from a file's Config. Raises UserError where a flag contradicts its architecture."""
    given = {name: given[name] for name in names if name in given}
    refuse_contradictions(given, source, path)
    for name in names:
        if name not in given:
            setattr(config, name, getattr(source, name))


def start_model(config, run, given):
    """(model, Checkpoint, path) of --resume or --model_weights; (None, None, "") for new weights.

    Config and run take over what the file tells. Raises UserError for flags that contradict it.
    """
    if run.resume is not None:
        return resumed_model(config, run, given)
    if run.model_weights:
        return tuned_model(config, run, given)
    if config.consistency:
        raise UserError("--consistency tunes a trained model; name its checkpoint with --model_weights")
    return None, None, ""


def resumed_model(config, run, given):
    """What start_model returns, of --resume."""
    path, checkpoint = unet_io.newest_checkpoint(run.resume or run.out_dir)
    adopt(config, given, checkpoint.config, path, [field.name for field in dataclasses.fields(Config)])
    refuse_contradictions(given, checkpoint.config, path, remedy="; leave the flag out, or start a new run",
                          names=FIXED_ON_RESUME)
    refuse_preset(run.preset, given, checkpoint.config, path)
    for name in ("data_file", "val_file", "model_weights", "steps", "log_every", "save_every", "sample_every",
                 "threshold"):
        if name not in given and name in checkpoint.run:
            setattr(run, name, checkpoint.run[name])
    model = model_of(checkpoint, 0, path)
    return model, checkpoint, path


def tuned_model(config, run, given):
    """What start_model returns, of --model_weights."""
    import convert  # which imports this file
    path = run.model_weights
    of_model = ARCHITECTURE + DIFFUSION
    told = unet_io.PRESETS.get(run.preset, {}) | given
    assumed = {}
    if not convert.tells_all(path):
        assumed = {name: value for name, value in told.items() if name in of_model}
    free = OF_CLASSES if told.get("class_cond", True) else ()
    use_ema = int(config.consistency)  # which tunes the model that draws better
    model, checkpoint = load_model(path, use_ema=use_ema, overrides=assumed, free=free)
    if not (checkpoint.config.class_cond or told.get("class_cond")):
        free = ()
    own = {name for name in free if name in told}  # the run may have classes of its own
    adopt(config, given, checkpoint.config, path, [name for name in of_model if name not in own])
    refuse_preset(run.preset, {*given, *free}, checkpoint.config, path)
    if "timestep_sampling" not in told:  # as the model was trained
        adopt(config, told, checkpoint.config, path, ("timestep_sampling", "timestep_mean", "timestep_std"))
    return model, checkpoint, path


def new_model(config, run):
    """A UNet with fresh weights."""
    torch.manual_seed(config.seed)
    model = UNet(config)
    return model if run.init == "torch" else init_weights(model, config.seed)


def checkpoints_in(folder):
    """The steps of the checkpoints in a run's folder: a set."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [re.fullmatch(r"checkpoint_(\d{1,8})\.bin", name) for name in names]
    return {int(match[1]) for match in found if match}


@contextlib.contextmanager
def locked(folder, steps):
    """Make the folder of a run, if there is none, and hold its lock, which ./train_unet holds, too, while it trains there.

    steps: the steps of the checkpoints that are the run's; a new run has none. Raises UserError where there are others,
    or where nothing can be written.
    """
    unet_io.check_folder(folder)
    os.makedirs(folder, exist_ok=True)
    with unet_io.locked(folder, f"another process is training in {folder}; name another folder with --out_dir"):
        there = checkpoints_in(folder)
        if there != steps:
            raise UserError(f"{folder} already holds a run, at step {max(there, default=0)}; continue it with --resume, or"
                            f" name another folder with --out_dir")
        yield


def open_images(config, run):
    """The images to train on; a folder is first made into a file, which later runs can use directly."""
    if run.data_dir:
        from prepare_data import prepare_any
        run.data_file = os.path.join(run.out_dir, f"data_{config.image_size}.bin")
        prepare_any(run.data_dir, run.data_file, config.image_size, config.in_channels,
                    "folder" if config.class_cond else "")
        unet_io.say(f"prepared {run.data_file}; with --data_file {shlex.quote(run.data_file)} later runs"
                    f" start at once")
    elif not os.path.exists(run.data_file):
        raise UserError(f"{run.data_file} does not exist: name images with --data_dir FOLDER or"
                        f" --data_file FILE.bin")
    return unet_io.read_images(run.data_file)


def note_unused_start(run):
    """Say that unet_init.bin, from which the trainer before this one would have started, is not read, if it lies here."""
    if not run.model_weights and run.resume is None and os.path.isfile("unet_init.bin"):
        print("note: unet_init.bin lies here and is not read: the weights come from --seed; to start from it,"
              " --model_weights unet_init.bin")


def to_json(values):
    """A dict of numbers as a line of JSON, which has no NaN or infinity: they become null."""
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


class Metrics:
    """The lines of a run's metrics.jsonl. If a line can't be written, a warning says so once, and the run goes on.

    The lines of steps after steps_done, which are about to be done again, are dropped.
    """
    def __init__(self, path, steps_done):
        self.path = path
        self.failed = False
        if not os.path.isfile(path):
            return
        with open(path, "rb") as file:
            lines = file.read().splitlines(keepends=True)
        steps = [re.match(rb'{"step": (\d+)\b.*\n', line) for line in lines]
        kept = [line for line, step in zip(lines, steps) if step and int(step[1]) <= steps_done]
        if len(kept) < len(lines):
            with unet_io.replacing(path) as file:
                file.write(b"".join(kept))

    def note(self, **values):
        """Append a line. A line that was cut short at the end of the file is ended first."""
        try:
            with open(self.path, "ab+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                if file.read(1) not in (b"", b"\n"):
                    file.write(b"\n")
                file.write(to_json(values).encode())
        except OSError as error:
            if not self.failed:
                print(f"warning: {unet_io.printable(self.path)} can't be written: {error.strerror}; lines are"
                      f" missing there", file=sys.stderr)
            self.failed = True


def train(config, run, given):
    """Train in the run's folder, from what the flags name."""
    run.device = pick_device(run.device)
    steps = checkpoints_in(run.out_dir) if run.resume is not None else set()
    start = start_model(config, run, given)
    check_consistency(config)
    with locked(run.out_dir, steps):
        train_from(*start, config, run, given)


def classes_and_notes(checkpoint, path, config, run, given, images, validation):
    """(names of the run's classes, the rows that with_rows takes or None, notes on the run). Raises UserError.

    Sets config.num_classes, and numbers the labels of both files as the run does. checkpoint, path: see start_model.
    """
    names = ()
    rows = None
    notes = []
    if config.class_cond:
        names, rows, notes = plan_classes(config, run, given, checkpoint, path, images.class_names)
    notes += idle_flags(config, run, given)
    if run.steps > 1 and config.lr and not unet_io.learning_rate(config, run.steps - 1):
        notes.append(f"--lr_schedule {config.lr_schedule} comes to its end before --steps {run.steps}, and then the learning"
                     f" rate is 0; see --lr_schedule constant and a lower --lr")
    before = checkpoint.sections.get("data_checksum", "") if run.resume is not None else ""
    if before and images.checksum and before != images.checksum:
        notes.append(f"{images.path} is not the file that the run had images from until step {checkpoint.step} (its"
                     f" checksum is {images.checksum}, and was {before}); from here on it learns from this one")
    if config.class_cond and len(names) <= config.num_classes:  # or else check_labels says so
        notes += filter(None, [images.match_classes(names)])
        if validation:
            notes += filter(None, [validation.match_classes(names, trains=False)])
    notes += image_notes(config, images, validation)
    return names, rows, notes


def stops_asked():
    """A list, to which each signal that asks the run to stop is added as it comes; the signals are caught from here on."""
    stops = []
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def finish_step(number, _):
        """As in ./train_unet: only a second later another Ctrl-C or SIGTERM ends at once."""
        stops.append(number)
        if number == signal.SIGHUP:  # printing to a terminal that is gone would be an error
            for descriptor in terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        else:
            signal.alarm(1)

    def end_at_once(*_):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGALRM, end_at_once)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks
            signal.signal(number, finish_step)
    return stops


@dataclasses.dataclass
class Progress:
    """A run of a Trainer: what it prints, logs, saves and draws."""
    trainer: Trainer
    run: argparse.Namespace
    images: unet_io.Images
    validation: unet_io.Images  # or None
    class_names: tuple
    start: Checkpoint  # of --resume; without it None
    saved: str = ""  # the path of the newest checkpoint
    smoothed: float = None  # the mean loss; None until one was finite

    def __post_init__(self):
        self.config = self.trainer.config
        if self.start and self.start.step:
            self.smoothed = self.start.smoothed_loss
        self.metrics = Metrics(os.path.join(self.run.out_dir, "metrics.jsonl"), self.trainer.steps_done)
        self.restart_clock()

    def restart_clock(self):
        self.last_time = time.time()
        self.last_step = self.trainer.steps_done

    def take_loss(self, loss):
        if not math.isfinite(loss):
            return
        smoothed = loss if self.smoothed is None else 0.98 * self.smoothed + 0.02 * loss
        self.smoothed = float(np.float32(smoothed))  # as it is saved

    def log(self, loss):
        """Print how the newest steps went, and write it to metrics.jsonl."""
        config = self.config
        step = self.trainer.steps_done
        steps = self.run.steps
        seconds = (time.time() - self.last_time) / (step - self.last_step)
        rate = config.batch_size / seconds
        lr = unet_io.learning_rate(config, step - 1)
        on_paths = unet_io.steps_on_paths(config)
        end = steps
        if config.matching_fraction and step <= on_paths:  # later steps take longer
            end = min(on_paths, steps)
        left = tqdm.format_interval(seconds * (end - step))
        if end < steps:
            left += f" to step {end}"
        smoothed = math.nan if self.smoothed is None else self.smoothed
        unet_io.say(f"step {step:6d}/{steps}  loss {loss:.5f}  smoothed {smoothed:.5f}"
                    f"  {1000 * seconds:.1f} ms  {rate:.1f} images/s  lr {lr:.2e}  left {left}")
        self.metrics.note(step=step, loss=loss, smoothed=smoothed, ms=1000 * seconds, images_per_s=rate, lr=lr,
                          skipped=self.trainer.history.skipped)
        self.restart_clock()

    def save(self):
        """Write a checkpoint, with the settings by which its pictures are drawn and the files that it comes from."""
        run = self.run
        trainer = self.trainer
        path = os.path.join(run.out_dir, f"checkpoint_{trainer.steps_done:08d}.bin")
        settings = {}
        if self.start:
            settings = {name: value for name, value in self.start.run.items() if name in SAMPLING}
        settings |= {name: value for name, value in vars(run).items() if name in unet_io.RUN_SETTINGS}
        files = {"data_file": self.images.path, "val_file": run.val_file, "model_weights": run.model_weights}
        settings |= {name: file and os.path.abspath(file) for name, file in files.items()}
        unet_io.write_checkpoint(path, trainer.checkpoint(self.smoothed or 0.0, settings, data_checksum=self.images.checksum,
                                                          **unet_io.class_section(self.class_names)))
        unet_io.say(f"saved {path}")
        self.saved = path

    def validate(self):
        if not self.validation:
            return
        with averaged_weights(self.trainer):
            loss = self.trainer.validation_loss(self.validation)
        step = self.trainer.steps_done
        unet_io.say(f"step {step:6d}  validation loss {loss:.5f}")
        self.metrics.note(step=step, val_loss=loss)

    def draw(self):
        """Write a grid of 16 pictures; if it can't be written, the run goes on."""
        path = os.path.join(self.run.out_dir, f"samples_{self.trainer.steps_done:08d}.png")
        known = len(self.class_names) or self.config.num_classes
        classes, groups = unet_io.spread_classes(self.config, range(known), 16)
        columns = unet_io.grid_columns(16, groups, self.config.image_size)
        pictures = unet_io.to_uint8(sample_average(self.trainer, range(16), classes).numpy())
        try:
            unet_io.save_grid(path, pictures, columns)
            unet_io.say(f"wrote {path}{unet_io.rows_text(self.class_names, 16, groups, columns)}")
        except UserError as error:
            tqdm.write(f"warning: {unet_io.printable(error)}", file=sys.stderr)


def train_from(model, checkpoint, path, config, run, given):
    """Train, log, save and sample until --steps are done or a signal asks to stop. The first three: of start_model."""
    torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32
    torch.backends.cudnn.benchmark = True
    resumes = run.resume is not None
    note_unused_start(run)
    images = open_images(config, run)
    validation = unet_io.read_images(run.val_file) if run.val_file else None
    if validation:
        validation.check_size(config.image_size, config.in_channels)
    names, rows, notes = classes_and_notes(checkpoint, path, config, run, given, images, validation)
    if model is None:
        model = new_model(config, run)
    elif rows:
        model = with_rows(model, config, rows)
    for line in notes + absent_sizes(config, given):
        unet_io.say(f"note: {line}")
    compile = run.compile
    if compile is None:
        compile = run.device != "cpu"
    trainer = Trainer(model, images, config, run.device, precision=run.precision, compile=compile,
                      operators=run.operators, threshold=run.threshold)
    if resumes:
        trainer.restore(checkpoint, path)
        unet_io.say(f"resumed {path} after step {trainer.steps_done}")
    say_what_is_trained(trainer, run)

    stops = stops_asked()
    progress = Progress(trainer, run, images, validation, names, checkpoint if resumes else None, path if resumes else "")
    if run.steps == 0 and not resumes:
        unet_io.say("--steps 0: nothing is trained, the initial weights are saved")
        progress.save()
    take_steps(progress, stops)
    if stops:
        unet_io.say(f"stopped; to go on: python3 train_unet.py --resume {shlex.quote(progress.saved or run.out_dir)}"
                    f" --steps {run.steps}")
    else:
        unet_io.say(f"done; to see pictures: python3 generate.py --model_weights {shlex.quote(progress.saved)}")


def say_what_is_trained(trainer, run):
    """Say how large the model is, and what it learns from."""
    config = trainer.config
    images = trainer.images
    unet_io.say(f"{sum(p.numel() for p in trainer.parameters):,} parameters on {run.device},"
                f" {unet_io.counted(len(images), 'image')} from {images.path}, batch {config.batch_size},"
                f" seed {config.seed}")
    if config.path_steps:
        unet_io.say(f"note: the network learns from what {run.model_weights} draws; the images are no examples")
    on_paths = unet_io.steps_on_paths(config)
    if config.matching_fraction and trainer.steps_done < on_paths < run.steps:
        unet_io.say(f"note: up to step {on_paths} it learns paths; then it matches distributions, and its loss is another")


def take_steps(progress, stops):
    """Train until --steps are done or `stops`, see stops_asked, has a signal; log, save and draw on the way."""
    trainer = progress.trainer
    run = progress.run
    with tqdm(desc="training", total=run.steps, initial=trainer.steps_done, disable=None) as bar:
        while trainer.steps_done < run.steps and not stops:
            loss = trainer.step()
            progress.take_loss(loss)
            bar.update()
            step = trainer.steps_done
            if step % run.log_every == 0 or step == run.steps or stops:
                progress.log(loss)
            if step == run.steps or stops or (run.save_every and step % run.save_every == 0):
                progress.save()
                progress.validate()
                progress.restart_clock()
            if run.sample_every and step % run.sample_every == 0:
                progress.draw()
                progress.restart_clock()


@contextlib.contextmanager
def averaged_weights(trainer):
    """Meanwhile the model has the first averaged weights, where there are any."""
    kept = [p.detach().clone() for p in trainer.parameters]
    try:
        if trainer.emas:
            torch._foreach_copy_([p.data for p in trainer.parameters], trainer.emas[0])
        yield
    finally:
        torch._foreach_copy_([p.data for p in trainer.parameters], kept)


def sample_average(trainer, seeds, classes=None):
    """Pictures from the averaged weights by the model's usual sampler."""
    with averaged_weights(trainer):
        return sample(trainer.model, seeds, usual_sampler(trainer.config), device=trainer.device,
                      threshold=trainer.threshold, classes=classes)


def write_initial_model(config, run, given):
    """Write the weights that --init_model_only asks for, and say how they are trained."""
    target = run.init_model_filename
    if not target.endswith(".bin"):
        raise UserError(f"--init_model_filename {target} must end in .bin, which is what is written")
    if run.model_weights and os.path.realpath(run.model_weights) == os.path.realpath(target):
        raise UserError(f"--init_model_filename {target} is the file that the weights come from: name another")
    unet_io.check_kept(target, "init_model_filename", "images", "a checkpoint of a run")
    model, source, path = start_model(config, run, given)
    if source and any(getattr(config, name) != getattr(source.config, name) for name in OF_CLASSES):
        raise UserError(f"--init_model_only writes {path} with its own classes, whatever --class_cond, --num_classes"
                        f" and --cond_drop_prob say; leave them out")
    model = new_model(config, run) if model is None else model
    weights = to_numpy(file_order(model, model.parameters()))
    sections = {"weights": weights} | unet_io.class_section(source.class_names if source else ())
    unet_io.write_checkpoint(target, Checkpoint(config, sections))
    preset = f" --preset {run.preset}" if "preset" in given else ""
    unet_io.say(f"wrote {target}: {sum(p.numel() for p in model.parameters()):,} parameters; to train it:")
    unet_io.say(f"./train_unet --model_weights {shlex.quote(target)}{preset}")


def main():
    given, config, run = parse_flags()
    if run.write_debug_state:
        images = unet_io.read_images(run.data_file) if "data_file" in given else None
        debug_state(run.write_debug_state, config, images, run.debug_steps)
    elif run.init_model_only:
        write_initial_model(config, run, given)
    else:
        train(config, run, given)


if __name__ == "__main__":
    unet_io.run_script(main)
