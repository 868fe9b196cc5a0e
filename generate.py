"""Draws pictures with trained weights (a .bin, a .pt, a .safetensors, a folder of diffusers), and converts one into another.

    python3 generate.py --model_weights out/checkpoint_00020000.bin
    python3 generate.py --model_weights out/checkpoint_00020000.bin --export weights.safetensors
    python3 generate.py --model_weights out/checkpoint_00020000.bin --init_image cat.png --mask known.png
    python3 generate.py --import weights.safetensors
    python3 generate.py --import 64x64_diffusion.pt --preset adm64

The first writes samples.png. A picture comes from its seed alone, so that batches and --num_samples change
none of them, and the same seed and weights give the same picture as `./train_unet --generate`. The third
keeps of cat.png what is white in known.png. The last two write weights.bin and 64x64_diffusion.bin, for
`./train_unet --model_weights`; a state dict does not say which architecture it has, so that --preset must. convert.py has
the other formats.
"""
import argparse
import dataclasses
import math
import os
import re

import unet_io  # first, because it explains a missing package

import numpy as np
import torch
from tqdm import tqdm

import quality
from convert import is_export, save_diffusers, save_weights
from train_unet import (ARCHITECTURE, DIFFUSION, SAMPLERS, Edit, UNet, checkpoints_in, label_table, load_model,
                        pick_device, refuse_contradictions, refuse_preset, sample, sampler_steps, sampler_timesteps,
                        sampling_settings, seed_noise)
from unet_io import THRESHOLDS, Config, UserError, counted

EARLIER_NAMES = {"--num_images": "--num_samples", "--model_filename": "--model_weights"}

# Flags that do nothing where weights are written. A page does nothing with the first ones, and draws with the others.
OF_PICTURES = ("--num_samples", "--seed", "--seeds", "--class", "--guidance_interval", "--guide_weights", "--init_image",
               "--strength", "--mask", "--jump_length", "--jump_n_sample", "--interpolate", "--batch_size", "--output_name",
               "--output_dir", "--show", "--strip", "--nearest", "--quality")
OF_SAMPLING = ("--guidance_scale", "--sampler", "--sample_steps", "--spacing", "--eta", "--threshold")


def parse_interval(text):
    """'0.2,0.8' as two numbers from 0 to 1, the lower first; for argparse's `type`."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = 1, 0
    if not 0 <= low <= high <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers from 0 to 1 such as 0.2,0.8, the lower"
                                         f" first")
    return low, high


def parse_numbers(text):
    """'3,7,10-12' as [3, 7, 10, 11, 12]; for argparse's `type`."""
    numbers = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if not first <= last < 2**32:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers and ranges up to 4294967295,"
                                             f" such as 3,7,10-12")
        if len(numbers) + last - first >= 10**6:
            raise argparse.ArgumentTypeError(f"{text!r} are more than a million numbers")
        numbers += range(first, last + 1)
    return numbers


def shown_names(path, own, num_classes):
    """What the user calls a model's classes: the lines of the file of --class_names, or its own names."""
    return unet_io.read_class_names(path, len(own) or num_classes) if path else own


def parse_classes(text, names, num_classes):
    """The numbers of the classes that --class names: 'cat,dog', or '3,7-9' where there are no names.

    At each place the longest name counts, so that a comma may be part of one. Where names are numbers, 0-4 are the
    classes called 0 to 4, or 00 to 04.
    """
    names = names or list(map(str, range(num_classes)))
    text, known = unet_io.nfc(text), [unet_io.nfc(name) for name in names]
    places = {name: number for number, name in enumerate(known)}
    plain = [name and (name.lstrip("0") or "0") for name in known]
    numbered = {number: place for place, number in enumerate(plain) if plain.count(number) == 1}
    numbered |= {name: place for name, place in places.items() if known.count(name) == 1}
    classes, at = [], 0
    while text and at <= len(text):
        here = [name for name in places if text.startswith(name, at) and text[at + len(name):][:1] in ("", ",")]
        if not here and text[at:at + 1] == " ":
            at += 1
            continue
        part = max(here, key=len, default=text[at:].split(",")[0])
        at += len(part) + 1
        if not here:
            part = part.strip()  # blanks may stand before a comma
        if part in places:
            if known.count(part) > 1:
                raise UserError(f"--class {text}: several classes are called {part!r}; --class_names FILE can tell them apart")
            classes.append(places[part])
            continue
        try:
            called = [str(number) for number in parse_numbers(part)]
        except argparse.ArgumentTypeError:
            called = []
        unknown = next((number for number in called if number not in numbered), None)
        candidates = [name for name, number in zip(names, plain) if number == unknown]
        if len(candidates) > 1:
            raise UserError(f"--class {text}: {unknown} could be {' or '.join(candidates)}")
        if not called or unknown:
            raise UserError(f"--class {text}: the model has no class called {part!r}; its classes are"
                            f" {unet_io.listed(names)}")
        classes += [numbered[name] for name in called]
    return classes


def beginning(path):
    """The first 8 bytes of a file; fewer where there are no more, or where it can't be read."""
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        return b""  # load_model says what is wrong
    with open(path, "rb") as file:
        return file.read(8)


def load_weights(path, use_ema=None, overrides=None, free=()):
    """(model, Checkpoint) of either network: as train_unet.load_model, and of a DiT's .bin as dev/dit/train_dit.py.
    """
    if not beginning(path).startswith(b"DiT\0"):
        return load_model(path, use_ema, overrides, free)
    typed = {name: value for name, value in (overrides or {}).items() if name not in free}
    return unet_io.import_from_dev("dit/train_dit").load_model(path, use_ema, typed)


def check_preset(args, config):
    """Raise UserError where --preset asks for another model than the Config that a file carries; typed flags are not its."""
    typed = {name for name, value in vars(args).items() if value is not None}
    refuse_preset(args.preset, typed, config, args.model_weights)


def has_earlier_format(path):
    """Whether it is a .bin of version 1 or 2 of the format, of either network."""
    begins = beginning(path)
    return begins[:4] in (b"UNET", b"DiT\0") and begins[4:] in (b"\1\0\0\0", b"\2\0\0\0")


def renew(args, target, typed):
    """Write all that the .bin of an earlier format holds that --import names as a .bin of today's. typed: flags of the model."""
    path = args.imported
    is_dit = beginning(path).startswith(b"DiT\0")
    checkpoint = unet_io.read_checkpoint(path, unet_io.import_from_dev("dit/train_dit").Config if is_dit else Config)
    refuse_contradictions(typed, checkpoint.config, path)
    check_preset(args, checkpoint.config)
    interval = checkpoint.run.pop("guidance_interval", "")
    if interval:
        unet_io.say(f"note: --guidance_interval {interval} is left out: it is generate.py's alone")
    unet_io.write_checkpoint(target, checkpoint)
    unet_io.say(f"wrote {target}: all that {path} held, of step {checkpoint.step}")


def load_guide(path, config, names):
    """The model of --guide_weights, which must take the same pictures, noise and classes, or no classes.

    names: of the model's classes, by which those of the guide are matched where it names them.
    """
    guide, checkpoint = load_weights(path)
    theirs = checkpoint.class_names
    by_name = bool(names and theirs and config.class_cond)
    for name in ("image_size", "in_channels", *DIFFUSION, *["num_classes"] * guide.config.class_cond):
        has, wanted = getattr(guide.config, name), getattr(config, name)
        wanted = 0 if name == "num_classes" and not config.class_cond else wanted
        if has != wanted and not (name == "num_classes" and by_name):
            raise UserError(f"--guide_weights {path} has --{name} {has}, and the model that it is to guide"
                            f" {wanted}")
    if not by_name:
        if bool(names) != bool(theirs) and guide.config.class_cond:
            unet_io.say(f"note: only one of the two models names its classes; those of {path} are taken for the same"
                        f" in their order")
        return guide
    places = {unet_io.nfc(name): number for number, name in enumerate(theirs)}
    unknown = [name for name in names if unet_io.nfc(name) not in places]
    if unknown:
        raise UserError(f"--guide_weights {path} does not know the classes {unet_io.listed(unknown)}: its classes are"
                        f" {unet_io.listed(theirs)}")
    table = label_table(guide).weight
    table.data = table.data[[places[unet_io.nfc(name)] for name in names]]
    guide.config.num_classes = len(names)
    return guide


def read_image(path, image_size, channels):
    """A picture as prepare_data.py makes it, or the first one of a .bin: float32 tensor (C, S, S) in [-1, 1].
    """
    if path.endswith(".bin"):
        images = unet_io.read_images(path)
    elif channels not in (1, 3, 4):
        raise UserError(f"{path}: a model of {counted(channels, 'channel')} takes a .bin here, since no picture is read with so"
                        f" many")
    else:
        from prepare_data import Remarks, UnidentifiedImageError, load_image, white_of, why_failed
        try:
            with open(path, "rb") as file:
                data, remarks = file.read(), Remarks()
            picture = load_image(data, image_size, channels, remarks=remarks)
            if remarks.deep:
                white = white_of(remarks.deep[0])
                unet_io.say(f"note: {path} has 16 bits and values up to {remarks.deep[0]}: {white} is taken for white")
                picture = load_image(data, image_size, channels, white_level=white)
            images = unet_io.Images(picture[None], path=path)
        except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
            why = why_failed(error).split("\n")[0]
            why = "it has no known format" if isinstance(error, UnidentifiedImageError) else why
            raise UserError(f"{path} can't be read as a picture: {why}") from None
    images.check_size(image_size, channels)
    return torch.from_numpy(images.floats([0], image_size)[0])


def read_mask(args, config):
    """Of which pixels --mask keeps --init_image: bool tensor (1, S, S). Raises UserError."""
    mask = read_image(args.mask, config.image_size, 1) > 0
    from prepare_data import OPENED, Image, ImageOps
    sizes = []
    for path in (args.init_image, args.mask):
        if path.endswith(".bin"):  # whose images are square: a mask is cropped as the picture was
            continue
        with Image.open(path, formats=OPENED) as image:
            sizes.append(ImageOps.exif_transpose(image).size)
            if path == args.mask and image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < 255:
                raise UserError(f"--mask {path} has transparent pixels, which say nothing: make those white that are to be"
                                f" kept of --init_image, and those black that are to be drawn")
    if len(sizes) == 2:
        ratios = [config.image_size * np.array(size) / min(size) for size in sizes]  # sides in pixels of the model
        if np.abs(ratios[0] - ratios[1]).max() > 1:
            shapes = ["x".join(map(str, size)) for size in sizes]
            raise UserError(f"--mask {args.mask} has {shapes[1]} pixels and --init_image {args.init_image} {shapes[0]}: their"
                            f" sides must have the same ratio, or else what is white would not lie where it was painted")
    if mask.all():
        unet_io.say(f"note: --mask {args.mask} is white everywhere, so that all of --init_image is kept and nothing drawn")
    if not mask.any():
        unet_io.say(f"note: --mask {args.mask} is black everywhere, so that nothing of --init_image is kept")
    return mask


def read_edit(args, config):
    """The Edit of --init_image, --strength, --mask and the jumps; None without one. Raises UserError."""
    for name, needed in (("mask", "init_image"), ("strength", "init_image"), ("jump_length", "mask"),
                         ("jump_n_sample", "mask")):
        if getattr(args, name) is not None and not getattr(args, needed):
            raise UserError(f"--{name} does nothing without --{needed}")
        if name in unet_io.RANGES and getattr(args, name) is not None:
            unet_io.check_range(name, getattr(args, name))
    if not args.init_image:
        return None
    if args.strip:
        raise UserError("--strip shows the way from noise alone: leave it or --init_image out")
    edit = Edit(read_image(args.init_image, config.image_size, config.in_channels))
    edit.strength = args.strength
    if args.strength is None:
        edit.strength = 1.0 if args.mask else 0.5
    if args.mask:
        if args.sampler not in ("ddim", "ddpm"):
            raise UserError(f"--mask needs --sampler ddim or ddpm, not {args.sampler}")
        edit.mask = read_mask(args, config)
        edit.jump_length, edit.jump_n_sample = args.jump_length or 10, args.jump_n_sample or 10
        if args.sample_steps * edit.jump_n_sample > 10**6:
            raise UserError(f"--jump_n_sample {edit.jump_n_sample} times {args.sample_steps} steps are more than a"
                            f" million; use a smaller one")
    return edit


def slerp(first, last, count, some=slice(None)):
    """Noise (count, C, H, W) that turns from first to last, (C, H, W), in equal angles (Shoemake 1985).

    some: which of them to return.
    """
    x, y = first.double(), last.double()
    angle = torch.acos((x * y).sum() / (x.norm() * y.norm()))
    parts = torch.linspace(0, 1, count, dtype=torch.float64)[some, None, None, None]
    return ((torch.sin((1 - parts) * angle) * x + torch.sin(parts * angle) * y) / torch.sin(angle)).float()


def name_of_import(path):
    """The .bin that --import writes: beside the file, or the folder of diffusers, and of its name."""
    if os.path.basename(path).startswith("diffusion_pytorch_model"):  # every model's name there
        path = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        path = os.path.abspath(path)
        return (os.path.dirname(path) if os.path.basename(path) in ("unet", "unet_ema") else path) + ".bin"
    return os.path.splitext(path)[0] + ".bin"


def export_target(args):
    """Where the weights go, "" if nowhere. --import X is --model_weights X --export X with the ending .bin.

    args.renews: whether all of a .bin goes there, of an earlier format, and so may take its place.
    """
    if args.imported:
        args.model_weights = args.imported
        if not os.path.exists(args.imported):
            raise UserError(f"{args.imported} can't be read: no such file or directory")
        if not args.export:
            args.export = name_of_import(args.imported)
            if os.path.exists(args.export):
                raise UserError(f"{args.export} exists already: name another file with --export FILE.bin")
    args.renews = bool(args.imported and args.export.endswith(".bin") and args.use_ema is None
                       and not args.class_names and has_earlier_format(args.imported))
    is_same = args.export and os.path.realpath(args.export) == os.path.realpath(args.model_weights)
    if is_same and not args.renews:
        raise UserError(f"--export {args.export} is the file that the weights come from: name another")
    if not is_same:
        unet_io.check_kept(args.export, "export", "images", "a checkpoint of a run")
        unet_io.check_replaced(args.export, "export", is_export, "weights")
    if names_folder(args.export) and checkpoints_in(args.export):
        raise UserError(f"{args.export} holds the checkpoints of a run; name another folder with --export")
    return args.export


def refuse_unused(args, typed):
    """Raise UserError where a page or weights are written, and flags were typed that do nothing there."""
    written = [flag for flag, value in (("--export_page", args.export_page), ("--import", args.imported),
                                        ("--export", args.export)) if value]
    if not written:
        return
    used = ()
    if args.export_page:
        used = OF_SAMPLING
    elif names_folder(args.export):
        used = ("--threshold",)  # which diffusers are told
    unused = [flag for flag in typed if flag in OF_PICTURES + OF_SAMPLING and flag not in used]
    if unused:
        raise UserError(f"{written[0]} draws no pictures: leave {unet_io.listed(unused)} out")


def names_folder(path):
    """Whether --export means a folder, in the format of diffusers."""
    return path.endswith("/") or os.path.isdir(path)


def is_page(path):
    """Whether a file is a page that --export_page wrote."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return bool(unet_io.import_from_dev("web/page").MODEL.search(file.read()))


def check_page(args):
    """Raise UserError where --export_page can't be done as it is asked for."""
    if not args.export_page:
        return
    if not args.export_page.endswith(".html"):
        raise UserError(f"--export_page {args.export_page}: a page's name must end in .html")
    if args.export or args.imported:
        raise UserError("--export_page writes a page of --model_weights and nothing else: leave --import and --export out")
    if os.path.realpath(args.export_page) == os.path.realpath(args.model_weights):
        raise UserError(f"--export_page {args.export_page} is the file that the weights come from: name another")
    unet_io.check_target(args.export_page)
    unet_io.check_replaced(args.export_page, "export_page", is_page, "page")


def export_page(args, model, class_names, step):
    """Write the page of --export_page, which draws as these flags say."""
    unet_io.check_class_names(class_names, args.class_names)
    if not isinstance(model, UNet):
        raise UserError(f"{args.model_weights} is no UNet, and a page draws with a UNet only")
    if args.threshold == "dynamic":
        raise UserError("a page draws without --threshold dynamic: name another, such as --threshold clamp")
    sampling = {name: getattr(args, name)
                for name in ("sampler", "guidance_scale", "eta", "spacing", "threshold", "sample_steps")}
    sampler_timesteps(model.config, args.sampler, args.sample_steps, args.spacing)  # which refuses what can't be
    page = unet_io.import_from_dev("web/page")
    page.write_page(args.export_page, model, sampling, class_names, step)
    unet_io.say(f"wrote {args.export_page}: {os.path.getsize(args.export_page) / 1e6:.1f} MB, which any browser opens")


def own_files(folder, names):
    """The file of each picture in the folder of --output_dir; names: their seeds, or their numbers."""
    return [os.path.join(folder, f"{n:06d}.png") for n in names]


def check_memory(count, columns, shape, value=1):
    """Raise UserError where this machine can't hold what is drawn: count pictures, and rows of a strip.

    shape: (C, H, W). The pictures are held twice, in the end in the grid. value: bytes of a value of theirs.
    """
    needed = 2 * count * (value + columns) * math.prod(shape)
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if needed > have:
        raise UserError(f"{counted(count, 'picture')} of {shape[1]}x{shape[2]} need {needed / 1e9:.0f} GB of"
                        f" memory and this machine has {have / 1e9:.0f}: draw fewer at a time, with --seeds")


def parse_flags():
    """(the flags' values, those that were typed)"""
    parser = unet_io.Parser(may_be_empty=(), earlier=EARLIER_NAMES, description=__doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model_weights", metavar="FILE",
                        help="weights: .bin, .pt or .safetensors, or a folder of diffusers")
    add("--num_samples", type=int, metavar="N", help="how many pictures (default: 16)")
    add("--seed", type=int, metavar="N", help="seed of the first picture, and of --quality (default: 0)")
    add("--seeds", type=parse_numbers, metavar="LIST",
        help="the pictures of these seeds, such as 0-63 or 3,7,10-12")
    add("--class", dest="classes", default="", metavar="LIST",
        help="pictures of these classes, such as cat,dog, or 0-4,7 where they have no names, equally many of each"
             " (default: of all)")
    add("--class_names", default="", metavar="FILE",
        help="a name a line, of class 0, 1 ...: for a model whose classes have none, or others for --class; --export"
             " keeps them")
    add("--guidance_scale", type=float, metavar="X",
        help="draw what differs so many times as much from pictures without a class (default: the run's, or 1)")
    add("--guidance_interval", type=parse_interval, metavar="LO,HI",
        help="guide in this part of the chain only, from no noise (0) to nothing but noise (1) (default: 0,1)")
    add("--guide_weights", metavar="FILE",
        help="guide away from this model's pictures, an earlier or smaller one's, not from those of no class")
    add("--init_image", metavar="FILE", help="draw from this picture, the first of a .bin, with noise added")
    add("--strength", type=float, metavar="X",
        help="how much noise: 0 changes nothing, 1 is nearly all (default: 0.5, with --mask 1)")
    add("--mask", metavar="FILE", help="keep of --init_image what is white here, with --sampler ddim or ddpm")
    add("--jump_length", type=int, metavar="N",
        help="with --mask, draw so many steps at a time --jump_n_sample times (default: 10)")
    add("--jump_n_sample", type=int, metavar="N",
        help="how often: more makes what is drawn fit better to what is kept (default: 10)")
    add("--interpolate", type=int, metavar="N",
        help="N pictures on the way from the first of two --seeds to the second")
    add("--sampler", choices=list(SAMPLERS),
        help="default: what the run drew its grids with, or ddim. With this flag, those of the next three that are left out"
             " have the defaults of ./train_unet, not the run's")
    add("--sample_steps", type=int, metavar="N",
        help="steps; 0: ddim 50, ddpm all timesteps, dpmpp and heun 25, consistency as tuned (default: the run's, or 0)")
    add("--spacing", choices=unet_io.SPACINGS,
        help="which timesteps; auto: uniform for ddim and ddpm, else trailing; karras: as EDM (default: the run's, or auto)")
    add("--eta", type=float, metavar="X",
        help="how much of ddpm's noise ddim adds at every step (default: the run's, or 0)")
    add("--threshold", choices=THRESHOLDS,
        help="how each step keeps its picture in [-1, 1]; dynamic: scaled by the 99.5th percentile. With --export FOLDER/:"
             " what it tells diffusers (default: the run's, or clamp)")
    add("--batch_size", type=int, default=16, metavar="N", help="pictures at a time (default: 16)")
    add("--use_ema", type=int, choices=range(5), metavar="N",
        help="which of the averaged weights, where the file has any; 0: the raw weights (default: the run's, or 1)")
    add("--output_name", "--output_filename", default="samples.png", metavar="FILE",
        help="all pictures in a grid (default: samples.png); .npz: as an array of bytes, (N, H, W, C), with"
             " their classes, as evaluators read them; .npy: of floats, (N, C, H, W)")
    add("--output_dir", metavar="FOLDER", help="also write each picture as a PNG of its own here")
    add("--show", type=unet_io.parse_bool, default=True, metavar="X",
        help="show the grid in the terminal too (default: 1)")
    add("--strip", type=int, default=0, metavar="N",
        help="also write OUTPUT_strip.png: a row a picture, N steps from noise to picture")
    add("--nearest", metavar="FILE.bin",
        help="also write OUTPUT_nearest.png: each picture with the training image nearest to it on its right")
    add("--quality", metavar="HELD_OUT.bin",
        help="also print how far the pictures are from images that it was not trained on (draw some hundred)")
    add("--device", default="", metavar="X", help="cpu, cuda, mps ... (default: the best there is)")
    add("--export", default="", metavar="FILE",
        help="write the weights alone, and exit: .bin, .pt or .safetensors, by the ending, or FOLDER/ for"
             " diffusers; see --use_ema")
    add("--export_page", default="", metavar="FILE.html",
        help="write a page that draws pictures in any browser, with this --sampler, --sample_steps and --guidance_scale"
             " unless its reader says otherwise, and exit")
    source.add_argument("--import", dest="imported", metavar="FILE",
                        help="short for --model_weights FILE --export STEM.bin, for ./train_unet; of a .bin of an"
                             " earlier format everything is kept, so that a run can be resumed")
    model_flags = parser.add_argument_group("what old files don't tell (new files know all of it)")
    models = [name for name in unet_io.PRESETS if name != "consistency"]  # which is a way to train
    model_flags.add_argument("--preset", action=unet_io.Once, choices=models, help="a known model's")
    kinds = {tuple: unet_io.parse_sizes, bool: unet_io.parse_bool}
    for field in dataclasses.fields(Config):
        if field.name in ARCHITECTURE + DIFFUSION and field.metadata["help"]:
            model_flags.add_argument(f"--{field.name}", type=kinds.get(field.type, field.type), default=None,
                                     choices=field.metadata["choices"], help=field.metadata["help"],
                                     metavar=None if field.metadata["choices"] else "X")
    return parser.parse_args(), parser.typed


def choose_pictures(args):
    """Set args.count, how many pictures are drawn, and args.names, by which their files are called: their seeds, or their
    numbers on the way between two. Raises UserError where the flags contradict each other."""
    args.count = 16 if args.num_samples is None else args.num_samples
    if args.seeds:
        args.count = len(args.seeds)
    if args.interpolate:
        args.count = args.interpolate
    by = "interpolate" if args.interpolate else "seeds"
    if args.num_samples not in (None, args.count):
        raise UserError(f"--num_samples {args.num_samples} contradicts --{by}, which asks for {counted(args.count, 'picture')}")
    if args.seeds and args.seed is not None and not args.quality:
        raise UserError(f"--seed {args.seed} contradicts --seeds, which names every picture; leave one out")
    args.seed = args.seed or 0
    unet_io.check_range("num_samples", args.count, 1, "interpolate" if args.interpolate else "num_samples")
    if args.interpolate == 0:
        raise UserError("--interpolate 0 draws nothing; leave it out, or say how many pictures")
    unet_io.check_range("batch_size", args.batch_size)
    unet_io.check_range("strip", args.strip)
    unet_io.check_range("sample_steps", args.sample_steps or 0)
    if not 0 <= args.seed <= 2**32 - args.count:
        raise UserError(f"--seed {args.seed} leaves no seeds for {counted(args.count, 'picture')}: the last is 4294967295")
    unet_io.check_range("eta", args.eta or 0)
    if args.interpolate:
        if args.interpolate < 2 or len(set(args.seeds or ())) != 2 or len(args.seeds) != 2:
            raise UserError("--interpolate draws two or more pictures between two seeds, such as --seeds 3,9"
                            " --interpolate 8")
        if args.mask:
            raise UserError("--interpolate and --mask, which adds noise, don't go together")
    args.names = range(args.count) if args.interpolate else args.seeds or range(args.seed, args.seed + args.count)


def is_array(path, *endings):
    """Whether --output_name means a file of arrays, by default of either kind, and no picture."""
    return os.path.splitext(path)[1].lower() in (endings or (".npy", ".npz"))


def picture_beside(path, kind):
    """The picture that --strip and --nearest write beside --output_name: of kind "_strip" a.jpg has a_strip.jpg.

    Beside arrays, which are no pictures, it is a PNG.
    """
    stem, ending = os.path.splitext(path)
    return stem + kind + (".png" if is_array(path) else ending)


def check_outputs(args):
    """Raise UserError where what is drawn can't be written, or would replace a picture that it is drawn from."""
    kinds = [kind for kind in ("strip", "nearest") if getattr(args, kind)]
    outputs = [args.output_name, *(picture_beside(args.output_name, f"_{kind}") for kind in kinds)]
    for path in outputs:
        unet_io.check_target(path)
    unet_io.picture_format(picture_beside(args.output_name, ""))
    drawn_from = {os.path.realpath(path) for path in (args.init_image, args.mask) if path}
    if args.output_dir:
        if len(set(args.names)) < args.count:
            raise UserError("--seeds names a seed twice, and --output_dir writes each picture as SEED.png: draw them in parts")
        unet_io.check_folder(args.output_dir)
        outputs += own_files(args.output_dir, args.names) if drawn_from else []
    for path in outputs:
        if os.path.realpath(path) in drawn_from:
            raise UserError(f"{path} is a picture to draw from, which would be lost: name another place for what is drawn")


def export_weights(args, target, model, checkpoint):
    """Write the weights alone, for --export and --import."""
    if not isinstance(model, UNet):
        raise UserError(f"{args.model_weights} is no UNet; python3 dev/dit/train_dit.py --export writes a DiT's weights")
    if args.class_names:
        if not model.config.class_cond:
            raise UserError("--class_names needs a model that was trained with --class_cond 1")
        class_names = shown_names(args.class_names, checkpoint.class_names, model.config.num_classes)
        unet_io.check_class_names(class_names, args.class_names)
        checkpoint.sections |= unet_io.class_section(class_names)
    if names_folder(target):
        checkpoint.run["threshold"] = args.threshold
        save_diffusers(target, model, checkpoint)
    else:
        save_weights(target, model, checkpoint)
    kind = ""
    if "ema" in checkpoint.sections:
        averaged = args.use_ema or checkpoint.sections["weights"] is checkpoint.sections["ema"]  # there are no raw ones
        kind = "averaged " if averaged else "raw "
    unet_io.say(f"wrote {target}: the {kind}weights of step {checkpoint.step}")


def check_sampling(args, config):
    """Raise UserError where the sampler can't draw what is asked for."""
    if args.eta > 0 and args.sampler != "ddim":
        raise UserError(f"--eta {args.eta:g} goes with --sampler ddim only")
    adds_noise = args.sampler == "ddpm" or args.eta > 0 or (args.sampler == "consistency" and args.sample_steps > 1)
    if args.interpolate and adds_noise:
        raise UserError("--interpolate needs a sampler that adds no noise: no ddpm, no --eta, and no more than"
                        " --sample_steps 1 of consistency")


def open_comparisons(args, config):
    """The training images of --nearest and the held-out ones of --quality, each None without its flag. Raises UserError."""
    images = unet_io.read_images(args.nearest) if args.nearest else None
    held_out = unet_io.read_images(args.quality) if args.quality else None
    for file in filter(None, (images, held_out)):
        file.check_size(config.image_size, config.in_channels)
    if held_out:
        quality.quality_count(args.count, held_out, config.image_size)  # refuses before the work, not after it
    return images, held_out


def check_guidance(args, config):
    """Raise UserError where there is nothing to guide with, or nothing to be guided."""
    unet_io.check_range("guidance_scale", args.guidance_scale)
    guided = args.guidance_scale != 1
    if guided and not args.guide_weights and not (config.class_cond and config.cond_drop_prob):
        raise UserError(f"--guidance_scale {args.guidance_scale:g} needs a model that also learnt to draw"
                        f" without a class, by --cond_drop_prob, or another one, --guide_weights")
    for name in ("guide_weights", "guidance_interval"):
        if getattr(args, name) and not guided:
            raise UserError(f"--{name} does nothing without a --guidance_scale; 2 is usual")


def spread_steps(steps, count):
    """The steps whose predicted pictures a strip of `count` shows: evenly spread, from the first to the last; one: the last."""
    if count == 1:
        return [steps - 1]
    return [k * (steps - 1) // (count - 1) for k in range(count)]


def draw(args, model, device, classes, guide, edit):
    """(the pictures (N, C, H, W), as bytes or for a .npy as floats; their strips (N, columns, C, H, W), or None)"""
    shape = (model.config.in_channels, model.config.image_size, model.config.image_size)
    as_floats = is_array(args.output_name, ".npy")
    check_memory(args.count, args.strip, shape, 4 if as_floats else 1)
    ends = seed_noise(args.seeds, shape) if args.interpolate else None
    shown = spread_steps(args.sample_steps, args.strip)
    pictures, strips = [], []
    for start in range(0, args.count, args.batch_size):
        some = slice(start, start + args.batch_size)
        names = args.names[some]
        label = f"pictures {start + 1}-{start + len(names)} of {args.count}"
        strip = []

        def keep_shown(i, begun, x0):
            if i in shown:
                strip.append(x0.cpu())

        x = sample(model, names, sampler=args.sampler, sample_steps=args.sample_steps, spacing=args.spacing,
                   eta=args.eta, threshold=args.threshold, device=device,
                   progress=lambda calls: tqdm(calls, label, disable=None),
                   start=slerp(*ends, args.count, some) if args.interpolate else None,
                   classes=classes and classes[some], guidance_scale=args.guidance_scale,
                   guidance_interval=args.guidance_interval or (0.0, 1.0), guide=guide, edit=edit, watch=keep_shown)
        if args.strip:
            strips.append(unet_io.to_uint8(torch.stack(strip, 1).numpy()))
        if not torch.isfinite(x).all():
            raise UserError(f"the pictures that {args.model_weights} draws are NaN or infinite, so none are"
                            f" written: its training had gone wrong; use an older one")
        pictures.append(x.numpy() if as_floats else unet_io.to_uint8(x.numpy()))
    return np.concatenate(pictures), np.concatenate(strips) if strips else None


def write_grid(args, pictures, classes, names, groups):
    """Write --output_name, as its ending says, and show a picture in the terminal.

    pictures: as draw returns them; names: of the classes that are drawn, in order; groups: see unet_io.grid_columns.
    """
    image_size = pictures.shape[-1]
    columns = unet_io.grid_columns(args.count, groups, image_size)
    if args.interpolate and args.count <= 16:
        columns = args.count
    if is_array(args.output_name, ".npy"):
        with unet_io.replacing(args.output_name) as file:
            np.save(file, pictures)
    elif is_array(args.output_name, ".npz"):
        unet_io.save_arrays(args.output_name, pictures, classes)
    else:
        unet_io.save_grid(args.output_name, pictures, columns)
    rows = "" if is_array(args.output_name) else unet_io.rows_text(names, args.count, groups, columns)
    unet_io.say(f"wrote {args.output_name}{rows}")
    if args.show and not is_array(args.output_name):
        unet_io.show_grid(unet_io.draw_grid(pictures, columns))


def write_strips(path, strips):
    """Write the strips, uint8 (N, columns, C, H, W), below each other; one that is too wide is broken into rows."""
    _, length, *shape = strips.shape
    columns = min(length, 4000 // (shape[-1] + 2))
    missing = -length % columns  # white pictures behind each strip, whose last row they fill
    strips = np.pad(strips, [(0, 0), (0, missing), (0, 0), (0, 0), (0, 0)], constant_values=255)
    unet_io.save_grid(path, strips.reshape(-1, *shape), columns)
    unet_io.say(f"wrote {path}")


def write_nearest(path, pictures, images):
    """Write each picture, uint8 (N, C, H, W), with the training image nearest to it on its right."""
    where, distances = quality.nearest(pictures, images, pictures.shape[-1])
    pairs = np.stack([pictures, unet_io.to_uint8(images.floats(where, pictures.shape[-1]))], axis=1)
    columns = 2 * max(1, round(np.sqrt(len(pictures) / 2)))
    unet_io.save_grid(path, pairs.reshape(-1, *pictures.shape[1:]), columns)
    unet_io.say(f"wrote {path}: root mean square difference to the nearest training image {distances.mean():.1f} of 255 on"
                f" average, {distances.min():.1f} at least")


def write_own_files(folder, names, pictures):
    """Write each picture as a PNG of its own into the folder of --output_dir."""
    os.makedirs(folder, exist_ok=True)
    for path, picture in zip(own_files(folder, names), pictures):
        unet_io.save_picture(path, picture)
    unet_io.say(f"wrote {counted(len(pictures), 'picture')} into {folder}")


def main():
    args, typed_flags = parse_flags()
    refuse_unused(args, typed_flags)
    choose_pictures(args)
    check_page(args)
    target = export_target(args)
    if not target:
        check_outputs(args)
    device = pick_device(args.device)
    torch.backends.cudnn.allow_tf32 = False

    given = {name: value for name, value in vars(args).items() if value is not None}
    preset = vars(Config()) | unet_io.PRESETS[args.preset] if args.preset else {}  # which leaves nothing open
    overrides = {name: value for name, value in (preset | given).items() if name in ARCHITECTURE + DIFFUSION}
    typed = {name: value for name, value in overrides.items() if name in given}
    if args.renews:
        renew(args, target, typed)
        return
    model, checkpoint = load_weights(args.model_weights, args.use_ema, overrides, overrides.keys() - typed.keys())
    config = model.config
    if not checkpoint.old:
        check_preset(args, checkpoint.config)
    sampling, taken = sampling_settings(checkpoint, given)
    vars(args).update(sampling)
    if target:
        export_weights(args, target, model, checkpoint)
        return

    if taken:
        unet_io.say(f"drawing as in training:{taken}")
    model.to(device).eval()
    unet_io.picture_format(picture_beside(args.output_name, ""), config.in_channels)  # with transparency, if the model has it
    args.sample_steps = sampler_steps(config, args.sampler, args.sample_steps)
    check_sampling(args, config)
    images, held_out = open_comparisons(args, config)
    if (args.classes or args.class_names) and not config.class_cond:
        flag = "--class" if args.classes else "--class_names"
        raise UserError(f"{flag} needs a model that was trained with --class_cond 1")
    class_names = shown_names(args.class_names, checkpoint.class_names, config.num_classes)
    own_names = checkpoint.class_names or class_names  # by which files are matched
    asked = parse_classes(args.classes, class_names, config.num_classes)
    check_guidance(args, config)
    guide = load_guide(args.guide_weights, config, own_names).to(device) if args.guide_weights else None
    if args.export_page:
        export_page(args, model, class_names, checkpoint.step)
        return

    edit = read_edit(args, config)
    if len(asked) > args.count:
        raise UserError(f"--class {args.classes} names {len(asked)} classes, and of {counted(args.count, 'picture')} some would"
                        f" be left out; use --num_samples {len(asked)} or more")
    asked = asked or range(len(class_names) or config.num_classes)
    classes, groups = unet_io.spread_classes(config, asked, args.count)
    if not 0 <= args.strip <= args.sample_steps:
        raise UserError(f"--strip {args.strip} must be from 0 to the sampler's {counted(args.sample_steps, 'step')}")
    pictures, strips = draw(args, model, device, classes, guide, edit)

    write_grid(args, pictures, classes, [class_names[n] for n in asked] if class_names else [],
               0 if args.interpolate else groups)
    if is_array(args.output_name, ".npy"):
        pictures = unet_io.to_uint8(pictures)
    if args.strip:
        write_strips(picture_beside(args.output_name, "_strip"), strips)
    if args.output_dir:
        write_own_files(args.output_dir, args.names, pictures)
    if images:
        write_nearest(picture_beside(args.output_name, "_nearest"), pictures, images)
    if held_out:
        quality.print_quality(pictures, held_out, args.seed, device, classes, own_names)


if __name__ == "__main__":
    unet_io.run_script(main)
