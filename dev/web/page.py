"""A page of a trained model: one HTML file that draws its pictures in a browser, without a server or a network.

generate.py --export_page writes such a page and reads its weights again. page.html is what every page shows; page.wasm
is the network, which `make` in this folder compiles from page.cc. docs/formats.md says what a page holds.
"""
import base64
import json
import os
import re
import zlib

import unet_io  # first, because it explains a missing package

import numpy as np
import torch

from train_unet import ARCHITECTURE, DIFFUSION, file_order, to_numpy, unet_without_memory
from unet_io import Checkpoint, Config, UserError

FOLDER = os.path.dirname(os.path.abspath(__file__))
MOST_BYTES = 200_000_000  # of weights: as base64 they have a third more, and a text of Chromium's at most 512 MB
EMPTY_MODEL = '<script id="model" type="application/json">{}</script>'
MODEL = re.compile(EMPTY_MODEL.replace("{}", "(.*?)"), re.DOTALL)


def is_int8(shape):
    """Whether a parameter of this shape is stored as int8: convolutions are, with 1x1 ones and attention's."""
    return len(shape) > 2


def to_bf16(values):
    """float32 of any shape -> the bytes of bfloat16, rounded to the nearest."""
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy().astype("<i2").tobytes()


def from_bf16(data, count):
    """The first `count` numbers of bfloat16 as float32."""
    return (np.frombuffer(data, "<u2", count).astype(np.uint32) << 16).view(np.float32)


def pack(values):
    """The bytes of a parameter, float32 of any shape: int8 behind a scale for each output, or bfloat16.

    The scale of an output is its largest weight / 127, in bfloat16.
    """
    if not is_int8(values.shape):
        return to_bf16(values)
    rows = values.reshape(len(values), -1)
    scales = to_bf16(np.abs(rows).max(1) / 127)
    steps = np.maximum(from_bf16(scales, len(rows)), np.finfo(np.float32).tiny)  # where all weights of an output are 0
    return scales + np.rint(rows / steps[:, None]).clip(-127, 127).astype(np.int8).tobytes()


def packed_size(shape):
    """How many bytes `pack` makes of a parameter of this shape."""
    count = int(np.prod(shape))
    return 2 * shape[0] + count if is_int8(shape) else 2 * count


def unpack(data, shape):
    """The float32 values, flat, of what `pack` made of a parameter of this shape."""
    if not is_int8(shape):
        return from_bf16(data, -1)
    whole = np.frombuffer(data, np.int8, offset=2 * shape[0]).reshape(shape[0], -1).astype(np.float32)
    return (from_bf16(data, shape[0])[:, None] * whole).reshape(-1)


def write_page(path, model, sampling, class_names=(), step=0):
    """Write a page that draws with a UNet, whose weights are rounded to int8 and bfloat16. It has its file's name.

    sampling: the settings by name, of sampler, steps, guidance and so on, with which it draws unless its reader says
    otherwise. step: of the training. Raises UserError where the weights are more than MOST_BYTES.
    """
    tensors = to_numpy(file_order(model, [p.detach().float().cpu() for p in model.parameters()]))
    size = sum(packed_size(values.shape) for values in tensors)
    if size > MOST_BYTES:
        raise UserError(f"a page with {size / 1e6:.0f} MB of weights is more than browsers take: {MOST_BYTES / 1e6:.0f} MB are"
                        f" the most")
    weights = b"".join(map(pack, tensors))
    told = (*ARCHITECTURE, *DIFFUSION, "consistency", "consistency_steps", "path_steps")
    settings = {name: getattr(model.config, name) for name in told} | sampling
    with open(os.path.join(FOLDER, "page.wasm"), "rb") as file:
        network = file.read()
    title = os.path.splitext(os.path.basename(path))[0].replace("_", " ")
    held = {"title": title, "step": step, "class_names": list(class_names),
            "config": "".join(f"{name} = {unet_io.setting_text(value)}\n" for name, value in settings.items()),
            "crc32": zlib.crc32(weights), "weights": base64.b64encode(weights).decode(),
            "network": base64.b64encode(network).decode()}
    text = json.dumps(held).replace("<", "\\u003c")  # or a name could end the script
    with open(os.path.join(FOLDER, "page.html"), encoding="utf-8") as file:
        before, _, after = file.read().partition(EMPTY_MODEL)
    with unet_io.replacing(path) as file:
        file.write((before + EMPTY_MODEL.replace("{}", text) + after).encode())


def read_page(path):
    """Checkpoint from a page: its weights as they are drawn with, rounded to int8 and bfloat16. Raises UserError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        found = MODEL.search(file.read())
    try:
        held = json.loads(found[1])
        lines = [line.partition(" = ") for line in held["config"].split("\n") if line]
        data = base64.b64decode(held["weights"], validate=True)
        names, step, checksum = list(map(str, held["class_names"])), int(held["step"]), held["crc32"]
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{path} is no page of generate.py --export_page, or is damaged") from None
    config, run = unet_io.read_settings({name: value for name, _, value in lines}, Config, path)
    section = unet_io.class_section(names)
    unet_io.parse_class_names(section.get("class_names", "").encode("utf-8", "surrogatepass"), path, len(names),
                              config.num_classes if config.class_cond else 0)
    shapes = [tuple(p.shape) for p in unet_without_memory(config, path).parameters()]
    sizes = list(map(packed_size, shapes))
    if len(data) != sum(sizes) or zlib.crc32(data) != checksum:
        raise UserError(f"{path} is damaged: its weights have {len(data)} bytes of {sum(sizes)}, or another checksum")
    if not 0 <= step < 2**31:
        raise UserError(f"{path} is damaged: its step {step} is none")
    ends = np.cumsum(sizes)
    weights = np.concatenate([unpack(data[end - size:end], shape) for end, size, shape in zip(ends, sizes, shapes)])
    return Checkpoint(config, {"weights": weights} | section, step, run=run, tensors=len(shapes))
