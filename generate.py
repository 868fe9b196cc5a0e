"""Pictures from trained weights: a new or old .bin, or an old model's .pt.

    python generate.py --model_filename out/checkpoint_00020000.bin

writes samples.png. Picture n comes from seed + n alone, so that batches and --num_images change none of them,
and the same seed and weights give the same picture as `./train_unet --generate`.
"""
import dataclasses
import os

import numpy as np
import torch

import unet_io
from train_unet import ARCHITECTURE, DIFFUSION, load_model, pick_device, sample
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


def main():
    parser = unet_io.Parser(description=__doc__)
    add = parser.add_argument
    add("--model_filename", required=True, metavar="FILE", help="weights: .bin or .pt")
    add("--num_images", type=int, default=16, metavar="N", help="how many pictures (default: 16)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the first picture (default: 0)")
    add("--sampler", choices=["ddim", "ddpm"], default="ddim", help="default: ddim")
    add("--sample_steps", type=int, metavar="N",
        help="calls of the network (default: ddim 50, ddpm all timesteps)")
    add("--batch_size", type=int, default=16, metavar="N", help="pictures at a time (default: 16)")
    add("--use_ema", type=unet_io.parse_bool, default=True, metavar="X",
        help="the averaged weights where the file has them (default: True)")
    add("--output_name", default="samples.png", metavar="FILE",
        help="all pictures in a grid (default: samples.png)")
    add("--output_dir", metavar="FOLDER", help="also write each picture as a PNG of its own here")
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
    if args.num_images < 1 or args.batch_size < 1:
        raise UserError("--num_images and --batch_size must be at least 1")
    if not 0 <= args.seed <= 2**32 - args.num_images:
        raise UserError(f"--seed {args.seed} must be from 0 to 4294967295, less the number of images")

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

    pictures = []
    for start in range(0, args.num_images, args.batch_size):
        seeds = range(args.seed + start, args.seed + min(start + args.batch_size, args.num_images))
        label = f"pictures {start + 1}-{start + len(seeds)} of {args.num_images}"
        x = sample(model, seeds, args.sampler, args.sample_steps, device,
                   progress=lambda calls: unet_io.progress(calls, len(calls), label))
        pictures.append(unet_io.to_uint8(x.numpy()))
    pictures = np.concatenate(pictures)

    unet_io.save_grid(args.output_name, pictures)
    print(f"wrote {args.output_name}")
    if args.output_dir:
        os.makedirs(args.output_dir, exist_ok=True)
        for n, picture in enumerate(pictures, args.seed):
            unet_io.save_picture(os.path.join(args.output_dir, f"{n:06d}.png"), picture)
        print(f"wrote {len(pictures)} pictures into {args.output_dir}")
    if images:
        where, distances = nearest(pictures, images, config.image_size)
        pairs = np.stack([pictures, unet_io.to_uint8(images.floats(where, config.image_size))], axis=1)
        stem, ending = os.path.splitext(args.output_name)
        columns = 2 * max(1, round(np.sqrt(len(pictures) / 2)))
        unet_io.save_grid(f"{stem}_nearest{ending}", pairs.reshape(-1, *pictures.shape[1:]), columns)
        print(f"wrote {stem}_nearest{ending}: root mean square difference to the nearest training image"
              f" {distances.mean():.1f} of 255 on average, {distances.min():.1f} at least")


if __name__ == "__main__":
    unet_io.run_script(main)
