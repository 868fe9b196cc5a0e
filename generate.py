"""Pictures from trained weights: a new or old .bin, or an old model's .pt.

    python generate.py --model_filename out/checkpoint_00020000.bin

writes samples.png. A picture comes from its seed alone, so that batches and --num_images change none of them,
and the same seed and weights give the same picture as `./train_unet --generate`.
"""
import argparse
import dataclasses
import os
import re

import numpy as np
import torch

import unet_io
from train_unet import (ARCHITECTURE, DIFFUSION, SAMPLERS, load_model, pick_device, sample, sampler_steps,
                        seed_noise)
from unet_io import Config, UserError


def nearest(pictures, images, image_size, chunk=1024):
    """Each picture's nearest training image by Euclidean distance.

    pictures: uint8 (N, C, H, W). Returns (indices int64 (N,), root mean square differences float64 (N,) in
    units of pixel values 0 ... 255).
    """
    wanted = pictures.reshape(len(pictures), -1).astype(np.float32)
    best, where = np.full(len(wanted), np.inf), np.zeros(len(wanted), np.int64)
    for start in range(0, len(images), chunk):
        rows = np.arange(start, min(start + chunk, len(images)))
        have = unet_io.to_uint8(images.floats(rows, image_size)).reshape(len(rows), -1).astype(np.float32)
        distances = (wanted**2).sum(1)[:, None] + (have**2).sum(1)[None] - 2 * wanted @ have.T
        closest = distances.argmin(1)
        value = distances[np.arange(len(wanted)), closest]
        better = value < best
        best[better], where[better] = value[better], rows[closest[better]]
    return where, np.sqrt(np.maximum(best, 0) / wanted.shape[1])


def parse_seeds(text):
    """'3,7,10-12' as [3, 7, 10, 11, 12]; for argparse's `type`."""
    seeds = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if not first <= last < 2**32:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers and ranges up to 4294967295,"
                                             f" such as 3,7,10-12")
        if len(seeds) + last - first >= 10**6:
            raise argparse.ArgumentTypeError(f"{text!r} are more than a million seeds")
        seeds += range(first, last + 1)
    return seeds


def slerp(first, last, count):
    """Noise (count, C, H, W) that turns from first to last, (C, H, W), in equal angles (Shoemake 1985)."""
    x, y = first.double(), last.double()
    angle = torch.acos((x * y).sum() / (x.norm() * y.norm()))
    parts = torch.linspace(0, 1, count, dtype=torch.float64)[:, None, None, None]
    return ((torch.sin((1 - parts) * angle) * x + torch.sin(parts * angle) * y) / torch.sin(angle)).float()


def main():
    parser = unet_io.Parser(description=__doc__)
    add = parser.add_argument
    add("--model_filename", required=True, metavar="FILE", help="weights: .bin or .pt")
    add("--num_images", type=int, metavar="N", help="how many pictures (default: 16)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the first picture (default: 0)")
    add("--seeds", type=parse_seeds, metavar="LIST",
        help="the pictures of these seeds, such as 0-63 or 3,7,10-12")
    add("--interpolate", type=int, default=0, metavar="N",
        help="N pictures on the way from the first of two --seeds to the second")
    add("--sampler", choices=list(SAMPLERS), default="ddim", help="default: ddim")
    add("--sample_steps", type=int, metavar="N",
        help="steps (default: ddim 50, ddpm all timesteps, dpmpp and heun 25)")
    add("--eta", type=float, default=0.0, metavar="X",
        help="how much of ddpm's noise ddim adds at every step (default: 0)")
    add("--threshold", choices=["clamp", "dynamic", "none"], default="clamp",
        help="how each step keeps its picture in [-1, 1]; dynamic: scaled by the 99.5th percentile")
    add("--batch_size", type=int, default=16, metavar="N", help="pictures at a time (default: 16)")
    add("--use_ema", type=unet_io.parse_bool, default=True, metavar="X",
        help="the averaged weights where the file has them (default: True)")
    add("--output_name", default="samples.png", metavar="FILE",
        help="all pictures in a grid (default: samples.png)")
    add("--output_dir", metavar="FOLDER", help="also write each picture as a PNG of its own here")
    add("--strip", type=int, default=0, metavar="N",
        help="also write OUTPUT_strip.png: a row a picture, N steps from noise to picture")
    add("--nearest", metavar="FILE.bin",
        help="also write OUTPUT_nearest.png: each picture with the training image nearest to it on its right")
    add("--device", default="", metavar="X", help="cpu, cuda, mps ... (default: the best there is)")
    model_flags = parser.add_argument_group("what old files don't tell (new files know all of it)")
    kinds = {tuple: unet_io.parse_sizes, bool: unet_io.parse_bool}
    for field in dataclasses.fields(Config):
        if field.name in ARCHITECTURE + DIFFUSION and field.metadata["help"]:
            model_flags.add_argument(f"--{field.name}", type=kinds.get(field.type, field.type), default=None,
                                     choices=field.metadata["choices"], help=field.metadata["help"],
                                     metavar=None if field.metadata["choices"] else "X")
    args = parser.parse_args()
    count = args.interpolate or (len(args.seeds) if args.seeds else 16 if args.num_images is None
                                 else args.num_images)
    if args.num_images not in (None, count):
        name = "interpolate" if args.interpolate else "seeds"
        raise UserError(f"--num_images {args.num_images} contradicts --{name}, which asks for {count}"
                        f" pictures")
    if count < 1 or args.batch_size < 1:
        raise UserError("--num_images and --batch_size must be at least 1")
    if not 0 <= args.seed <= 2**32 - count:
        raise UserError(f"--seed {args.seed} must be from 0 to 4294967295, less the number of images")
    if not 0 <= args.eta <= 1 or args.eta > 0 and args.sampler != "ddim":
        raise UserError(f"--eta {args.eta:g} must be from 0 to 1, and goes with --sampler ddim only")
    if args.interpolate:
        if args.interpolate < 2 or len(set(args.seeds or ())) != 2 or len(args.seeds) != 2:
            raise UserError("--interpolate draws two or more pictures between two seeds, such as --seeds 3,9"
                            " --interpolate 8")
        if args.sampler == "ddpm" or args.eta > 0:
            raise UserError("--interpolate needs a sampler that adds no noise: another than ddpm, and no"
                            " --eta")

    device = pick_device(args.device)
    torch.backends.cudnn.allow_tf32 = False
    overrides = {name: value for name, value in vars(args).items()
                 if name in ARCHITECTURE + DIFFUSION and value is not None}
    model, checkpoint = load_model(args.model_filename, args.use_ema, overrides)
    model.to(device).eval()
    config = model.config
    images = unet_io.read_images(args.nearest) if args.nearest else None
    if images:
        images.check_size(config.image_size, config.in_channels)

    steps = sampler_steps(config, args.sampler, args.sample_steps)
    if not 0 <= args.strip <= steps:
        raise UserError(f"--strip {args.strip} must be from 0 to the sampler's {steps} steps")
    shape = (config.in_channels, config.image_size, config.image_size)
    names, noise = args.seeds or range(args.seed, args.seed + count), None
    if args.interpolate:  # the pictures are numbered
        names, noise = range(count), slerp(*seed_noise(args.seeds, shape), count)

    pictures, strips = [], []
    for start in range(0, count, args.batch_size):
        some = slice(start, start + args.batch_size)
        label = f"pictures {start + 1}-{start + len(names[some])} of {count}"
        x = sample(model, names[some], args.sampler, args.sample_steps, device,
                   lambda calls: unet_io.progress(calls, len(calls), label), args.eta, args.threshold,
                   None if noise is None else noise[some], args.strip)
        if args.strip:
            x, strip = x
            strips.append(unet_io.to_uint8(strip.flatten(0, 1).numpy()))
        pictures.append(unet_io.to_uint8(x.numpy()))
    pictures, stem, ending = np.concatenate(pictures), *os.path.splitext(args.output_name)

    unet_io.save_grid(args.output_name, pictures)
    print(f"wrote {args.output_name}")
    if args.strip:
        unet_io.save_grid(f"{stem}_strip{ending}", np.concatenate(strips), args.strip)
        print(f"wrote {stem}_strip{ending}")
    if args.output_dir:
        os.makedirs(args.output_dir, exist_ok=True)
        for n, picture in zip(names, pictures):
            unet_io.save_picture(os.path.join(args.output_dir, f"{n:06d}.png"), picture)
        print(f"wrote {len(pictures)} pictures into {args.output_dir}")
    if images:
        where, distances = nearest(pictures, images, config.image_size)
        pairs = np.stack([pictures, unet_io.to_uint8(images.floats(where, config.image_size))], axis=1)
        columns = 2 * max(1, round(np.sqrt(len(pictures) / 2)))
        unet_io.save_grid(f"{stem}_nearest{ending}", pairs.reshape(-1, *pictures.shape[1:]), columns)
        print(f"wrote {stem}_nearest{ending}: root mean square difference to the nearest training image"
              f" {distances.mean():.1f} of 255 on average, {distances.min():.1f} at least")


if __name__ == "__main__":
    unet_io.run_script(main)
