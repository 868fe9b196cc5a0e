"""A folder or a zip of images -> one .bin of small square pictures for train_unet.

    python prepare_data.py --data_dir FOLDER_OR_ZIP --output_name FILE.bin --image_size 64

Takes whatever Pillow reads. Each picture is turned as its EXIF data says, laid on white where it is
transparent, cropped to its central square and resized with antialiasing. Files that can't be read are named,
counted and skipped. Images are written as they come, so that only a path and a label each stay in memory.
"""
import concurrent.futures
import contextlib
import io
import os
import sys
import warnings
import zipfile

import unet_io  # first, because it explains a missing package

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from unet_io import UserError, counted

MAX_FILE_BYTES = 256 << 20  # a larger file is no picture worth decoding
CHUNK = 64                  # pictures decoded at a time


class Folder:
    """The files below a folder, by their paths relative to it, sorted."""
    def __init__(self, path):
        self.path, self.names = path, []
        for folder, _, files in os.walk(path, followlinks=True):
            self.names += [os.path.relpath(os.path.join(folder, name), path) for name in files]
        self.names.sort()

    def read(self, name):
        path = os.path.join(self.path, name)
        if os.path.getsize(path) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MB")
        with open(path, "rb") as file:
            return file.read()


class Zip:
    """The files in a zip, by their names there, sorted."""
    def __init__(self, path):
        self.path = path
        try:
            self.archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise UserError(f"{path} can't be read as a zip: {error}") from None
        self.names = sorted(entry.filename for entry in self.archive.infolist() if not entry.is_dir())

    def read(self, name):
        with self.archive.open(name) as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MB")
        return data


def may_be_image(name, extensions):
    """Whether to try a file: its ending is one that Pillow knows, or it has none, and it isn't hidden."""
    base, ending = os.path.basename(name), os.path.splitext(name)[1].lower()
    return not base.startswith(".") and "__MACOSX" not in name and (not ending or ending in extensions)


def class_name(source, name):
    """The name of the folder that an image lies in."""
    folder = os.path.basename(os.path.dirname(name)) or os.path.splitext(os.path.basename(
        os.path.abspath(source.path)))[0]
    return " ".join(folder.split())


def load_image(data, image_size):
    """The bytes of a picture file -> uint8 (3, image_size, image_size). Raises what Pillow raises."""
    with Image.open(io.BytesIO(data)) as image:
        image.draft(image.mode, (2 * image_size, 2 * image_size))  # a JPEG is decoded no larger than needed
        image = ImageOps.exif_transpose(image)
        if image.mode == "I" or image.mode.startswith("I;16"):     # 16 bits of grey
            image = Image.fromarray((np.asarray(image).clip(0, 65535) / 257 + 0.5).astype(np.uint8))
        if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        image = image.convert("RGB").resize((image_size, image_size), Image.Resampling.BICUBIC,
                                            box=(left, top, left + side, top + side))
    return np.ascontiguousarray(np.moveaxis(np.asarray(image), -1, 0))


def prepare(data_dir, output_name, image_size, labels=False, val_fraction=0.0):
    """Write output_name (and NAME_val.bin); returns (images written, images held out, files skipped).

    Which images are held out depends only on the sorted list of files. Raises UserError.
    """
    if os.path.isdir(data_dir):
        source = Folder(data_dir)
    elif os.path.isfile(data_dir):
        source = Zip(data_dir)
    else:
        raise UserError(f"{data_dir} does not exist: --data_dir takes a folder or a zip of images")
    extensions = set(Image.registered_extensions())
    names = [name for name in source.names if may_be_image(name, extensions)]
    if not names:
        raise UserError(f"{data_dir} has no images: of its {counted(len(source.names), 'file')} none ends"
                        f" in .png, .jpg or the like")
    held_out = round(val_fraction * len(names))
    if val_fraction and not 0 < held_out < len(names):
        raise UserError(f"--val_fraction {val_fraction} of {counted(len(names), 'image')} leaves nothing on"
                        f" one side")
    in_validation = set(unet_io.permutation(0, 0, len(names))[:held_out].tolist())

    def load(name):
        try:
            return load_image(source.read(name), image_size), None
        except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
            known = not isinstance(error, UnidentifiedImageError)
            return None, f"{name}: {error if known else 'not an image that Pillow can read'}"

    def pictures(pool):
        for start in range(0, len(names), CHUNK):
            yield from pool.map(load, names[start:start + CHUNK])

    skipped, counts = 0, [0, 0]
    line_start = "\n" if sys.stderr.isatty() else ""  # leave the progress bar's line
    stem, ending = os.path.splitext(output_name)
    outputs = [output_name] + ([f"{stem}_val{ending}"] if held_out else [])
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(unet_io.image_writer(output)) for output in outputs]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor())
        for i, (pixels, error) in enumerate(unet_io.progress(pictures(pool), len(names), "preparing")):
            if error:
                skipped += 1
                print(f"{line_start}skipped {error}", file=sys.stderr)
                continue
            side = i in in_validation
            writers[side].add(pixels, class_name(source, names[i]) if labels else None)
            counts[side] += 1
        if not counts[0]:
            raise UserError(f"of {counted(len(names), 'file')} in {data_dir} none could be read as an image")
    return counts[0], counts[1], skipped


def main():
    parser = unet_io.Parser(description=__doc__)
    add = parser.add_argument
    add("--data_dir", required=True, metavar="PLACE", help="a folder, searched to any depth, or a zip")
    add("--output_name", required=True, metavar="FILE.bin", help="the file to write")
    add("--image_size", type=int, default=64, metavar="N", help="height and width in pixels (default: 64)")
    add("--labels", nargs="?", type=unet_io.parse_bool, const=True, default=False, metavar="X",
        help="label each image with the name of the folder it lies in")
    add("--val_fraction", type=float, default=0.0, metavar="F",
        help="hold out this part of the images, as FILE_val.bin (default: 0)")
    args = parser.parse_args()
    if not 1 <= args.image_size <= 4096:
        raise UserError(f"--image_size {args.image_size} must be from 1 to 4096, and for training a"
                        f" multiple of 8")
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val_fraction {args.val_fraction} must be from 0 to below 1")
    written, held_out, skipped = prepare(args.data_dir, args.output_name, args.image_size, args.labels,
                                         args.val_fraction)
    print(f"wrote {args.output_name}: {counted(written, 'image')} of {args.image_size}x{args.image_size},"
          f" {held_out} more held out for validation, {counted(skipped, 'file')} skipped")


warnings.simplefilter("error", Image.DecompressionBombWarning)  # such a file is skipped like any bad one

if __name__ == "__main__":
    unet_io.run_script(main)
