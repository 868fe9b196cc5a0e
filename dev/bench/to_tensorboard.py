"""A run's metrics.jsonl, and the grids of samples beside it, as TensorBoard event files.

    python3 dev/bench/to_tensorboard.py out/mine/metrics.jsonl --output_dir out/mine/tensorboard
    tensorboard --logdir out

Called again, for a run that went on, it replaces what it wrote. Needs PyTorch and the package tensorboard.
"""
import os
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import unet_io  # first, because it explains a missing package

import numpy as np
from PIL import Image

from plot_log import STEPS, number, read_metrics
from unet_io import UserError, printable

SUFFIX = ".metrics"  # ends the names of our event files, so that we can tell them from others


def convert(log, folder):
    """Write scalars, lists as one scalar an element, and samples_STEP.png as images. -> how many of each"""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("event files need PyTorch and tensorboard: pip install torch tensorboard") from None
    metrics = read_metrics(log)
    unet_io.check_folder(folder)
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        if name.endswith(SUFFIX):
            os.remove(os.path.join(folder, name))
    with SummaryWriter(folder, filename_suffix=SUFFIX) as writer:
        scalars = write_scalars(writer, metrics)
        grids = write_grids(writer, os.path.dirname(log) or ".")
    return scalars, grids


def write_scalars(writer, metrics):
    """Write what read_metrics gave, but for what is null. -> how many"""
    written = 0
    for key, points in metrics.items():
        for step, value in points.items():
            scalars = {key: value}
            if isinstance(value, list):
                scalars = {f"{key}/{n}": element for n, element in enumerate(value, 1)}
            for name, element in scalars.items():
                if element is not None:
                    writer.add_scalar(name, number(element), step)
                    written += 1
    return written


def write_grids(writer, folder):
    """Write the grids of samples in a folder; a note on stderr names those that can't be read. -> how many"""
    written = 0
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        match = re.fullmatch(r"samples_(\d+)\.png", name)
        if not match or not os.path.isfile(path) or int(match[1]) not in STEPS:
            continue
        try:
            with Image.open(path, formats=["PNG"]) as image:
                pixels = np.asarray(image.convert("RGB"))  # (H, W, 3)
        except Exception as error:  # Pillow raises nearly anything on damaged files
            print(f"note: {printable(f'{path} left out: {error}')}", file=sys.stderr)
            continue
        writer.add_image("samples", pixels, int(match[1]), dataformats="HWC")
        written += 1
    return written


def main():
    parser = unet_io.Parser(description=__doc__)
    parser.add_argument("log", metavar="metrics.jsonl")
    parser.add_argument("--output_dir", required=True, metavar="FOLDER", help="for the event files")
    args = parser.parse_args()
    scalars, grids = convert(args.log, args.output_dir)
    print(f"wrote {scalars} scalars and {grids} grids of samples; see them with"
          f" tensorboard --logdir {args.output_dir}")


if __name__ == "__main__":
    unet_io.run_script(main)
