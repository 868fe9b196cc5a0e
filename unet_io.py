"""What train_unet.py, prepare_data.py and generate.py share: random numbers, files, diffusion tables (NumPy).

Everything here mirrors train_unet.cu and unet_io.h exactly, so that a PyTorch run can replay a run of the C++ program:

1. errors and messages        explain_import, UserError, printable, say, Parser, import_from_dev, run_script
2. random numbers             Stream, philox4x32, words, normals, timesteps, flips, permutation, init_uniform
3. diffusion                  alphas_bar, noise_levels, variance_range, mean_factors, loss_weights, spaced_timesteps
4. configuration              Config, PRESETS, flags_of, setting_text, learning_rate, ema_decay, History
5. image files                Images, read_images, class_order, image_writer, write_old_images
6. weights and checkpoints    Checkpoint, read_checkpoint, write_checkpoint, check_kept, newest_checkpoint
7. tensor files               read_tensors, write_tensors
8. pictures                   to_uint8, picture_format, grid_columns, rows_text, draw_grid, save_grid, save_arrays
9. pictures in a terminal     show_grid

All files are little-endian, a header of 256 int32 and then data; docs/formats.md describes them byte by byte.
Every reader compares the header with the length of the file before it allocates anything, and raises
UserError, whose text is one sentence for the user, when the file can't be used.
"""
import argparse
import base64
import contextlib
import dataclasses
import difflib
import enum
import errno
import fcntl
import functools
import importlib
import io
import itertools
import math
import numbers
import os
import re
import sys
import typing
import unicodedata
import zlib


def explain_import(kind, error, trace):
    """sys.excepthook of every script that imports this: a sentence in place of the traceback of an import."""
    if issubclass(kind, KeyboardInterrupt):
        return print("\nstopped", file=sys.stderr)
    if not issubclass(kind, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, trace)
    name = error.name or error
    if name == "PIL":
        name = "pillow"
    needs_little = os.path.basename(sys.argv[0]) == "prepare_data.py"  # and no PyTorch
    packages = "numpy pillow tqdm" if needs_little else "-r requirements.txt"
    print(f"error: this needs the package {name}: pip install {packages} (or use .venv/bin/python, which `make python`"
          " makes)", file=sys.stderr)


sys.excepthook = explain_import

import numpy as np
from tqdm import tqdm

HEADER_BYTES = 1024
IMAGES_MAGIC = 20240620
OLD_WEIGHTS_MAGIC = 12345678
WEIGHTS_MAGIC = 0x54454E55  # the bytes "UNET"
DIT_MAGIC = 0x00546944      # the bytes "DiT", of dev/dit/
TENSORS_MAGIC = 0x534E4554  # the bytes "TENS"
FLOAT_MIN = 2.0**-126       # a float32 below it is 0 or has lost digits
MAX_LEVELS = 8              # of channel_mult
MAX_WIDTH = 8192            # channels of a level
MAX_ATTENTION_SIZE = 128    # pixels a side


# ----------------------------------------------------------------------------------------------------
# 1. errors and messages

class UserError(Exception):
    """A mistake that the user can mend. The text is one sentence: what is wrong, where, and what to do."""


def printable(text):
    """Text as a terminal may show it: a control byte is written as \\x1B, so that no file's name can drive the terminal."""
    def shown(c):
        if c.isprintable():
            return c
        is_stray_byte = 0xDC80 <= ord(c) <= 0xDCFF  # see os.fsdecode
        encoded = c.encode("utf-8", "surrogateescape" if is_stray_byte else "surrogatepass")
        return "".join(f"\\x{byte:02X}" for byte in encoded)

    return "".join(map(shown, str(text)))


def say(text):
    """Print a line that may hold names of files; it stands above the progress bar where there is one."""
    tqdm.write(printable(text))


class Once(argparse.Action):
    """The action of a flag that is given once: a second value is refused, which would replace the first in silence."""
    def __call__(self, parser, namespace, value, option_string=None):
        first = getattr(namespace, self.dest, None) or value
        if first != value:
            parser.error(f"{option_string} {first} and {option_string} {value}: only one can be had")
        setattr(namespace, self.dest, value)


ELSEWHERE = {  # programs: flags that people also try in others
    "./train_unet": "config dry_run generate gpus keep keep_every microbatch print_config processes val_every",
    "./train_unet and generate.py": "class eta guidance_scale num_samples sample_steps sampler seeds show spacing use_ema",
    "./train_unet and train_unet.py": "data_file lr optimizer out_dir resume steps",
    "generate.py": "export export_page guidance_interval guide_weights import init_image interpolate jump_length"
                   " jump_n_sample mask nearest quality strength strip",
    "generate.py and train_unet.py": "device",
    "prepare_data.py": "distinct fit labels val_fraction",
    "prepare_data.py and train_unet.py": "data_dir",
    "train_unet.py": "compile init init_model_only operators precision",
}


class Parser(argparse.ArgumentParser):
    """argparse with the manners of ./train_unet: one sentence for a mistake, and the nearest flag's name.

    renamed: {a flag of the trainer whose files we read: what takes its place here}. Such a flag is refused.
    earlier: {a flag's earlier name: its name}. The earlier name is taken, and the program says so.
    may_be_empty: the flags that take '' as a value. If this is given, all others refuse '': a script passes it by mistake,
    from a variable that is not set.
    typed: after parse_args, the flags that were typed, each by its first name.
    """
    def __init__(self, renamed=None, may_be_empty=None, earlier=None, **options):
        self.renamed = renamed or {}
        self.earlier = earlier or {}
        self.may_be_empty = may_be_empty
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_args(self, argv=None):
        if argv is None:
            argv = sys.argv[1:]
        words = [self.current_name(word) for word in argv]
        names = [word.split("=")[0] for word in words]
        flags = [name for action in self._actions for name in action.option_strings]
        for name in names:
            if name in self.renamed:
                self.error(f"unknown flag {name}; here it is {self.renamed[name]} (--help lists all flags)")
            if name.startswith("--") and name not in flags:
                self.refuse_unknown(name, flags)
        self.typed = [action.option_strings[0] for action in self._actions if set(names) & set(action.option_strings)]
        if self.may_be_empty is not None:
            self.refuse_empty(words, set(flags) - set(self.may_be_empty))
        return super().parse_args(words)

    def refuse_unknown(self, name, flags):
        for programs, theirs in ELSEWHERE.items():
            if name[2:] in theirs.split():
                self.error(f"{name} is a flag of {programs} (--help lists those of {self.prog})")
        alike = {flag: difflib.SequenceMatcher(None, name[2:], flag[2:]).ratio() for flag in flags}
        nearest = max(alike, key=alike.get)
        hint = f"; did you mean {nearest}?" if alike[nearest] >= 0.7 else ""
        self.error(f"unknown flag {name}{hint} (--help lists all flags)")

    def current_name(self, word):
        name, equals, value = word.partition("=")
        if name not in self.earlier:
            return word
        print(f"note: {name} is called {self.earlier[name]} now")
        return self.earlier[name] + equals + value

    def refuse_empty(self, words, flags):
        for name, value in zip(words, [*words[1:], None]):
            if "=" in name:
                name, value = name.split("=", 1)
            if name in flags and value == "":
                self.error(f"{name} needs a value, not ''; leave it out for what is usual")

    def _print_message(self, message, file=None):
        (file or sys.stderr).write(message or "")  # argparse's own hides that it can't be written

    def error(self, message):
        self.exit(2, f"error: {printable(message)}\n")


class Output(io.FileIO):
    """Standard output or standard error. An error of writing there names it.

    What is written to a terminal that was closed is lost without an error: the program may be writing there just before
    SIGHUP tells it to save what it has.
    """
    def __init__(self, descriptor, name):
        super().__init__(descriptor, "w", closefd=False)
        self.of_terminal = self.isatty()
        self.title = name

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            if error.errno == errno.EIO and self.of_terminal:
                return len(data)
            error.filename = self.title
            raise


def import_from_dev(name):
    """The module dev/NAME.py; NAME may begin with a folder of dev/."""
    here = os.path.dirname(os.path.abspath(__file__))
    folder, module = os.path.split(os.path.join(here, "dev", name))
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(module)


def take_over_streams():
    """Make standard output and standard error Outputs. A standard stream that was closed at the start is os.devnull."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed at start: no file of ours may take its number
            setattr(sys, name, open(os.devnull, "r+" if name == "stdin" else "w"))
    sys.__stdout__ = sys.stdout  # kept open
    for name, title in (("stdout", "standard output"), ("stderr", "standard error")):
        before = getattr(sys, name)
        output = io.BufferedWriter(Output(before.fileno(), title))
        setattr(sys, name, io.TextIOWrapper(output, before.encoding, "backslashreplace", line_buffering=True))


def run_script(main):
    """Run main(). What the user can mend becomes one line, `error: ...`, on stderr and exit status 1.

    So do memory that doesn't suffice and a standard output that can't be written. Ctrl-C exits with 130.
    """
    take_over_streams()
    try:
        try:
            return main()
        finally:  # --help leaves by SystemExit, and argparse is silent where it can't print
            sys.stdout.flush()
    except UserError as error:
        message = str(error)
    except OSError as error:
        where = "the operating system" if error.filename is None else os.fsdecode(error.filename)
        message = f"{where}: {error.strerror or error}"
    except (MemoryError, RuntimeError) as error:
        message = out_of_memory(error)
        if not message:
            raise
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    print(f"error: {printable(message)}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes standard output once more at its end
    sys.exit(1)


def out_of_memory(error):
    """A sentence where an exception of Python, NumPy or PyTorch says that memory didn't suffice; else ""."""
    text = (str(error) or "memory").splitlines()[0]
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        return (f"this takes more memory than there is ({text}): use a smaller --batch_size, fewer pictures"
                f" or a smaller model")
    return ""


def parse_bool(text):
    """True, False, 1, 0, yes, no (any case) as a bool; for argparse's `type`."""
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


def parse_sizes(text):
    """'0.5,1,2' (or any sequence of numbers) as a tuple, whole ones as ints; '', '0' and 'none' are ()."""
    parts = text
    if isinstance(text, str):
        parts = [] if text in ("", "0", "none") else text.split(",")
    try:
        sizes = tuple(map(float, parts))
    except (TypeError, ValueError, OverflowError):
        sizes = (0,)
    if not all(0 < size < math.inf for size in sizes) or len(sizes) > MAX_LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of at most {MAX_LEVELS} positive numbers"
                                         f" such as 1,2,3,4")
    return tuple(map(whole_as_int, sizes))


def whole_as_int(number):
    """A float that is a whole number as an int, any other as it is."""
    return int(number) if number.is_integer() else number


def is_number(value, kind):
    """Whether it is a number of this kind, int or float; True and False are none."""
    wanted = numbers.Integral if kind is int else numbers.Real
    return isinstance(value, wanted) and not isinstance(value, bool)


class Rates(tuple):
    """Up to four numbers in [0, 1), e.g. the rates of the averaged weights. One may come as a number; 0 alone is none."""
    def __new__(cls, values=()):
        if isinstance(values, (int, float)):
            values = (values,)
        rates = tuple(map(float, values))
        return super().__new__(cls, rates if any(rates) else ())


def parse_rates(text):
    """'0.999,0.9999' as Rates; '0' is none."""
    try:
        rates = Rates(float(part) for part in text.split(","))
    except ValueError:
        rates = (2,)
    if len(rates) > 4 or not all(0 < rate < 1 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of at most 4 numbers between 0 and 1 such"
                                         f" as 0.999,0.9999")
    return rates


def counted(n, noun):
    """'1 picture', '2 pictures', '2 classes'."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{ending}"


def listed(names, most=8):
    """'apple, banana and 3 more': names in a sentence, at most as many as one can take in."""
    names = list(map(str, names))
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def nfc(name):
    """A name in the form in which names are compared: é, which may be one code point of Unicode or two, is one."""
    return unicodedata.normalize("NFC", name)


# ----------------------------------------------------------------------------------------------------
# 2. random numbers
#
# Randomness is a function, not a state: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
# 1, 2, 3", 2011) with key = (seed, stream) and counter = (e / 4, sample, step, 0); number e is lane e % 4.
# Integers equal those of the C++ program to the bit, normals to 2e-6.

class Stream(enum.IntEnum):
    """What a random number is for. The same list stands in train_unet.cu."""
    INIT = 0
    SHUFFLE = 1
    TIMESTEP = 2
    NOISE = 3
    FLIP = 4
    DROPOUT = 5
    SAMPLER = 6
    VAL_TIMESTEP = 7
    VAL_NOISE = 8
    PERTURB = 9
    LABEL = 10
    OFFSET = 11
    PATH = 12
    MATCHING_TIMESTEP = 13
    MATCHING_NOISE = 14
    SECOND_NOISE = 15


LOW32 = np.uint64(0xFFFFFFFF)
SHIFT32 = np.uint64(32)


def philox4x32(counter, key):
    """Ten rounds of Philox4x32. counter: four uint64 arrays holding 32 bits each; key: two ints.

    Returns four uint64 arrays of the broadcast shape, each below 2^32.
    """
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(10):
        p0 = c0 * np.uint64(0xD2511F53)
        p1 = c2 * np.uint64(0xCD9E8D57)
        c0 = (p1 >> SHIFT32) ^ c1 ^ np.uint64(k0)
        c1 = p1 & LOW32
        c2 = (p0 >> SHIFT32) ^ c3 ^ np.uint64(k1)
        c3 = p0 & LOW32
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def words(seed, stream, count, sample=0, step=0):
    """The random words e = 0 ... count-1: uint32 (*shape, count), where `sample` and `step` are broadcast to `shape`."""
    sample, step = np.broadcast_arrays(np.asarray(sample, np.uint64), np.asarray(step, np.uint64))
    block = np.arange((count + 3) // 4, dtype=np.uint64)
    counter = (block, sample[..., None], step[..., None], np.uint64(0))
    lanes = philox4x32(counter, (int(seed), int(stream)))
    out = np.empty((*sample.shape, len(block), 4), np.uint32)
    for lane, value in enumerate(lanes):
        out[..., lane] = value
    return out.reshape(*sample.shape, -1)[..., :count]


def normals(seed, stream, count, sample=0, step=0):
    """Standard normals e = 0 ... count-1 by Box-Muller, computed in float64: float32 (*shape, count)."""
    x = words(seed, stream, count + count % 2, sample, step) >> np.uint32(8)
    u1 = (x[..., 0::2] + 1.0) * 2.0**-24
    u2 = x[..., 1::2] * 2.0**-24
    radius = np.sqrt(-2.0 * np.log(u1))
    angle = 2.0 * np.pi * u2
    out = np.empty(x.shape, np.float32)
    out[..., 0::2] = radius * np.cos(angle)
    out[..., 1::2] = radius * np.sin(angle)
    return out[..., :count]


def timesteps(config, sample, step, stream=Stream.TIMESTEP):
    """A timestep in [0, diffusion_steps) for each sample, drawn by --timestep_sampling: int64 of the shape of `sample`."""
    drawn = words(config.seed, stream, 1, sample, step)[..., 0]
    return np.searchsorted(config.last_words(), drawn).astype(np.int64)


def flips(seed, sample, step):
    """Whether each sample is mirrored left-right at this step: bool of the shape of `sample`."""
    return words(seed, Stream.FLIP, 1, sample, step)[..., 0] >> np.uint32(31) != 0


def uniforms(drawn):
    """Random words as numbers in [0, 1): float32 of the same shape."""
    return (drawn >> np.uint32(8)) * np.float32(2.0**-24)


def dropout_mask(seed, block, shape, sample, step, probability):
    """Which values --dropout keeps in a residual block: bool (len(sample), *shape), with shape (H, W, C).

    block: the index of the block's first parameter.
    """
    drawn = words(seed, Stream.DROPOUT | block << 8, math.prod(shape), sample, step)
    return (uniforms(drawn) >= np.float32(probability)).reshape(-1, *shape)


@functools.lru_cache(maxsize=4)
def permutation(seed, epoch, n):
    """The order of n images in an epoch, a Fisher-Yates shuffle from the last place down: int64 (n,)."""
    places = np.arange(1, n + 1, dtype=np.uint64)
    drawn = words(seed, Stream.SHUFFLE, n, 0, epoch)
    swaps = ((drawn * places) >> SHIFT32).tolist()
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        j = swaps[i]
        order[i], order[j] = order[j], order[i]
    return np.array(order, np.int64)


def dropped(seed, sample, step, probability):
    """Whether each sample's label is hidden at this step: bool of the shape of `sample`."""
    return uniforms(words(seed, Stream.LABEL, 1, sample, step)[..., 0]) < np.float32(probability)


PATHS_KEPT = 20  # of each sample: a step takes one of the newest


def path_numbers(config, step):
    """Which of its paths, numbered from 0, each sample of the batch takes in this step (0-based): int64 (batch_size,)."""
    newest = step // config.path_steps
    kept = min(newest + 1, PATHS_KEPT)
    drawn = words(config.seed, Stream.PATH, 4, np.arange(config.batch_size), step)[:, 3]
    return newest - (drawn.astype(np.int64) * kept >> 32)


def path_beginnings(config):
    """The points of a path, from 0, noise, at which the tuned model's steps begin: int64 (consistency_steps,)."""
    beginnings = [0, config.path_steps - second_start(config.path_steps)]
    return np.array(beginnings[:config.consistency_steps])


def path_points(config, step):
    """Which point of its path each sample of the batch is at, counted from the noise, which is 0: int64 (batch_size,).

    It is a point at which a step of the tuned model begins: the noise or, where there are two steps and just as often, the
    start of the second.
    """
    turn = np.arange(config.batch_size) + step
    return path_beginnings(config)[turn % config.consistency_steps]


def path_starts(config, number, labels):
    """What the samples' paths of this number start from: (seeds, classes), uint32 and int64 (batch_size,).

    The classes are those of random images; without class_cond they are None. labels: those of all images.
    """
    drawn = words(config.seed, Stream.PATH, 3, np.arange(config.batch_size), number)
    seeds = drawn[:, 0]
    if not config.class_cond:
        return seeds, None
    images = drawn[:, 1].astype(np.uint64) * np.uint64(len(labels)) >> SHIFT32
    hidden = uniforms(drawn[:, 2]) < np.float32(config.cond_drop_prob)
    classes = np.where(hidden, config.num_classes, labels[images.astype(np.int64)])
    return seeds, classes.astype(np.int64)


# Learning rates while distributions are matched, as fractions of --lr
STUDENT_RATE = 0.03  # of the model
FAKE_RATE = 0.1


def steps_on_paths(config):
    """How many steps of training come before those that match distributions."""
    fraction = float(np.float32(config.matching_fraction))
    return config.lr_steps - math.floor(fraction * config.lr_steps + 0.5)


def matches_distributions(config, step):
    """Whether this step (0-based) matches distributions."""
    return config.matching_fraction > 0 and step >= steps_on_paths(config)


def matching_timesteps(config, step):
    """The timestep to which each picture that the student draws in this step (0-based) is noised: int64 (batch_size,)."""
    T = config.diffusion_steps
    least = T // 50
    drawn = words(config.seed, Stream.MATCHING_TIMESTEP, 1, np.arange(config.batch_size), step)[:, 0]
    return least + (drawn.astype(np.int64) * (T - 2 * least) >> 32)


def batch_indices(seed, step, batch_size, n):
    """Which of the n images make up the batch of this step (0-based): int64 (batch_size,)."""
    places = range(step * batch_size, (step + 1) * batch_size)
    return np.array([permutation(seed, place // n, n)[place % n] for place in places], np.int64)


def init_uniform(seed, tensor_index, shape, fan_in):
    """Uniform in +-1/sqrt(fan_in), PyTorch's default for convolutions and linear layers: float32 (*shape)."""
    x = words(seed, Stream.INIT, math.prod(shape), tensor_index) >> np.uint32(8)
    unit = x.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)  # exact in float32
    return (unit * np.float32(1.0 / math.sqrt(fan_in))).reshape(shape)


# ----------------------------------------------------------------------------------------------------
# 3. diffusion (T = diffusion_steps; t = 0 ... T-1 indexes the tables and the timestep embedding alike)

LEAST_LINEAR_STEPS = 21  # 0.02 * 1000 / 20, the last beta of 20 steps, is 1: nothing of the image is left


def alphas_bar(diffusion_steps, noise_schedule, zero_terminal_snr=False):
    """The cumulative products of 1 - beta: float64 (T,).

    linear: Ho et al. 2020, "Denoising Diffusion Probabilistic Models", section 4, stretched for T other than
    1000; cosine: Nichol and Dhariwal 2021, "Improved DDPM", equation 17; zero_terminal_snr: rescaled so that
    the last is 0, Lin et al. 2023, "Common Diffusion Noise Schedules and Sample Steps are Flawed". Raises
    UserError where a linear schedule is so short that a beta would not be below 1.
    """
    T = diffusion_steps
    if noise_schedule == "linear":
        if T < LEAST_LINEAR_STEPS:
            raise UserError(f"{T} timesteps are too few for a linear schedule, whose last beta would be"
                            f" {20 / T:.3g}; use {LEAST_LINEAR_STEPS} or more")
        betas = np.linspace(1e-4 * 1000 / T, 0.02 * 1000 / T, T, dtype=np.float64)
    else:
        f = np.cos((np.arange(T + 1) / T + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - f[1:] / f[:-1], 0.999)
    abar = np.cumprod(1 - betas)
    if zero_terminal_snr:  # algorithm 1
        root = np.sqrt(abar)
        first, last = root[0], root[-1]
        abar = ((root - last) * first / (first - last)) ** 2
    return abar


class NoiseLevels(typing.NamedTuple):
    """What the timesteps are noised to, x_t = alpha x0 + sigma eps: float64 (T,) each."""
    alpha: np.ndarray
    sigma: np.ndarray


SIGMA_DATA = 0.5  # the standard deviation of the images, as Karras et al. 2022 assume it


def noise_levels(diffusion_steps, noise_schedule, zero_terminal_snr=False):
    """The NoiseLevels of a chain. Raises UserError where it is too short: see alphas_bar.

    flow: the straight line from image to noise, Liu et al. 2022, "Flow Straight and Fast"; edm: Karras et al. 2022,
    "Elucidating the Design Space of Diffusion-Based Generative Models", sigmas by equation 5, and their c_in, by which
    they scale what the network sees, in both alpha and sigma.
    """
    T = diffusion_steps
    if noise_schedule == "flow":
        s = np.arange(1, T + 1) / T
        return NoiseLevels(1 - s, s)
    if noise_schedule == "edm":
        sigma = np.linspace(0.002 ** (1 / 7), 80 ** (1 / 7), T) ** 7
        c_in = 1 / np.sqrt(sigma**2 + SIGMA_DATA**2)
        return NoiseLevels(c_in, c_in * sigma)
    abar = alphas_bar(T, noise_schedule, zero_terminal_snr)
    return NoiseLevels(np.sqrt(abar), np.sqrt(1 - abar))


def _before(levels):
    """The levels of the timesteps before each; before timestep 0 comes the image."""
    return NoiseLevels(np.append(1.0, levels.alpha[:-1]), np.append(0.0, levels.sigma[:-1]))


def noise_fractions(levels):
    """sigma / (alpha + sigma), the share of the noise in x_t: float64 (T,), rising from 0 to 1."""
    return levels.sigma / (levels.alpha + levels.sigma)


def earlier_timesteps(fractions, t, step, steps):
    """The pairs of consistency tuning (Geng et al. 2024, "Consistency Models Made Easy"), of timesteps t (B,).

    fractions: float32 (T,), the noise_fractions. A run has eight stages of equally many steps. In stage k = 1 ... 8 the
    noise fraction of the earlier timestep is at most 1 - 2^-k of t's: 1/2 of it at first, 255/256 in the end. -1 stands for
    the image itself, which comes before timestep 0.
    Returns (earlier timesteps, gaps), int64 and float32 (B,); a gap is by how much the noise fraction of t is larger.
    """
    stage = min(step * 8 // steps, 7) if steps else 0
    most = fractions[t] * np.float32(1 - 0.5 ** (stage + 1))
    earlier = np.searchsorted(fractions, most, side="right") - 1
    earlier_fractions = np.where(earlier < 0, np.float32(0), fractions[earlier])
    return earlier, fractions[t] - earlier_fractions


def transition_variance(less, more):
    """The variance of the noise that leads from one level to a noisier one: beta where alpha^2 + sigma^2 = 1."""
    return more.sigma**2 - (more.alpha / less.alpha) ** 2 * less.sigma**2


def variance_range(levels):
    """The range of the variance that a step of the chain may add, in logarithms: (least, most - least), float64 (T,) each.

    The least variance is that of the posterior q(x_{t-1} | x_t, x_0), and at t = 0, where that is 0, the one of t = 1. The
    most is beta (Nichol and Dhariwal 2021, equation 15).
    """
    before = _before(levels)
    beta = transition_variance(before, levels)
    posterior = (before.sigma / levels.sigma) ** 2 * beta
    posterior[0] = posterior[1]
    return np.log(posterior), np.log(beta / posterior)


def mean_factors(levels, predict):
    """By how much the mean of a step is off where the prediction is off by 1: float64 (T,).

    The mean of the posterior minus that of the model's step is this times (target - prediction), whatever is predicted.
    """
    before = _before(levels)
    of_x0 = before.alpha * transition_variance(before, levels) / levels.sigma**2  # Ho et al. 2020, equation 7
    return of_x0 * x0_error(levels, predict)


def x0_error(levels, predict):
    """The error in x0 where that of the prediction is 1: of the shape of levels' arrays."""
    alpha, sigma = levels
    if predict == "eps":  # x0 = (x - sigma eps) / alpha
        with np.errstate(divide="ignore"):
            return -sigma / alpha
    if predict == "v":  # x0 = (alpha x - sigma v) / (alpha^2 + sigma^2)
        return -sigma / (alpha**2 + sigma**2)
    if predict == "flow":  # x0 = (x - sigma u) / (alpha + sigma)
        return -sigma / (alpha + sigma)
    if predict == "edm":  # x0 = c_skip y + c_out F, Karras et al. 2022, table 1
        return SIGMA_DATA * sigma / np.sqrt(sigma**2 + (SIGMA_DATA * alpha) ** 2)
    return np.ones_like(alpha)


def loss_weights(levels, predict, min_snr_gamma):
    """The weight of the loss at each timestep: float64 (T,); all are 1 where min_snr_gamma is 0.

    Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy": the squared error in x0 has the weight
    min(SNR, gamma), where SNR = alpha^2 / sigma^2.
    """
    alpha, sigma = levels
    if not min_snr_gamma:
        return np.ones_like(alpha)
    snr = (alpha / sigma) ** 2
    weights_of_x0 = np.minimum(snr, min_snr_gamma)
    if predict == "eps":  # its error is sqrt(SNR) times that in x0; the weight is 1 where SNR is 0
        return np.divide(weights_of_x0, snr, out=np.ones_like(snr), where=snr > 0)
    return weights_of_x0 * x0_error(levels, predict) ** 2


@functools.lru_cache(maxsize=4)
def last_words(diffusion_steps, noise_schedule, zero_terminal_snr, timestep_sampling, timestep_mean, timestep_std):
    """The largest random word that draws each timestep: uint32 (T,), rising.

    uniform: all timesteps are equally likely. lognormal: log(sigma / alpha) is normal (Karras et al. 2022, table 1), which
    for the flow schedule is the logit-normal distribution of Esser et al. 2024, "Scaling Rectified Flow Transformers". A
    timestep stands for the levels that are nearer to it than to its neighbours, by their noise_fractions.
    """
    T = diffusion_steps
    if timestep_sampling == "uniform":
        cumulative = np.arange(1, T + 1) / T
    else:
        fractions = noise_fractions(noise_levels(T, noise_schedule, zero_terminal_snr))
        middle = (fractions[:-1] + fractions[1:]) / 2
        deviations = (np.log(middle / (1 - middle)) - timestep_mean) / timestep_std
        cumulative = np.array([normal_cdf(d) for d in deviations] + [1.0])
    return (np.maximum(np.ceil(2.0**32 * cumulative), 1) - 1).astype(np.uint32)


def normal_cdf(x):
    """The probability that a standard normal is below x."""
    return math.erfc(-x / math.sqrt(2)) / 2


SPACINGS = ("auto", "uniform", "trailing", "karras")  # old headers number these, and THRESHOLDS, in this order
THRESHOLDS = ("clamp", "dynamic", "none")


def noise_ratios(levels):
    """The noise as a multiple of the signal, sigma of Karras et al. 2022; infinite where alpha is 0."""
    with np.errstate(divide="ignore"):
        return levels.sigma / levels.alpha


def check_steps(diffusion_steps, sample_steps):
    """Raise UserError unless a chain of so many timesteps can be drawn in so many steps."""
    if not 1 <= sample_steps <= diffusion_steps:
        raise UserError(f"--sample_steps {sample_steps} must lie between 1 and the {diffusion_steps} steps"
                        f" trained")


def space_timesteps(diffusion_steps, sample_steps):
    """Evenly spaced ascending timesteps, the first and the last of the chain included: int64 (sample_steps,).

    As in guided-diffusion's space_timesteps(T, [N]), positions are summed up in float64 and rounded half to even. A single
    timestep is the last, the noisiest.
    """
    check_steps(diffusion_steps, sample_steps)
    if sample_steps == 1:
        return np.array([diffusion_steps - 1], np.int64)
    stride = (diffusion_steps - 1) / (sample_steps - 1)
    taken = []
    position = 0.0
    for _ in range(sample_steps):
        taken.append(round(position))
        position += stride
    return np.array(taken, np.int64)


def trailing_timesteps(diffusion_steps, sample_steps):
    """Ascending timesteps at equal distances, where the last step, to no noise, is as long as the others: Lin et al. 2023,
    table 2. int64 (sample_steps,)."""
    stride = diffusion_steps / sample_steps
    taken = [round(diffusion_steps - i * stride) - 1 for i in reversed(range(sample_steps))]
    return np.array(taken, np.int64)


def karras_timesteps(levels, sample_steps):
    """Ascending timesteps whose noise ratios are nearly those of Karras et al. 2022, equation 5 with rho = 7: int64
    (sample_steps,).

    The ratios fall from 80, or the largest of the chain if that is less, to that of timestep 0. For each the timestep is
    taken whose ratio has the nearest logarithm among those that are left. The noisiest, which stands last, is always T - 1.
    """
    ratios = noise_ratios(levels)
    logs = np.log(ratios)
    most = float(min(ratios[-1], 80)) ** (1 / 7)
    least = float(ratios[0]) ** (1 / 7)
    t = len(ratios) - 1
    taken = [t]
    for i in range(1, sample_steps):
        wanted = 7 * math.log(most + (least - most) * i / (sample_steps - 1))
        behind = sample_steps - 1 - i  # timesteps that still need a place
        t -= 1
        while t > behind and abs(logs[t - 1] - wanted) <= abs(logs[t] - wanted):
            t -= 1
        taken.append(t)
    return np.array(taken[::-1], np.int64)


def second_start(count):
    """The place, from 1, among `count` evenly spaced timesteps at which the second of two consistency steps starts."""
    return math.ceil(3 * count / 10)


def consistency_timesteps(diffusion_steps, path_steps, sample_steps):
    """The ascending timesteps of a sampler after consistency tuning: int64 (sample_steps,).

    The last is T - 1. Of two steps the second starts three tenths of the way up, at a point of the paths if the model
    learned from paths. Any other number of steps has equal distances.
    """
    if sample_steps != 2:
        return trailing_timesteps(diffusion_steps, sample_steps)
    spaced = path_steps or diffusion_steps
    second = trailing_timesteps(diffusion_steps, spaced)[second_start(spaced) - 1]
    return np.array([second, diffusion_steps - 1])


def spaced_timesteps(spacing, levels, sample_steps):
    """The timesteps that a sampler visits by --spacing, ascending: int64 (sample_steps,). Raises UserError."""
    T = len(levels.alpha)
    check_steps(T, sample_steps)
    if spacing == "karras":
        return karras_timesteps(levels, sample_steps)
    spaced = space_timesteps if spacing == "uniform" else trailing_timesteps
    return spaced(T, sample_steps)


# ----------------------------------------------------------------------------------------------------
# 4. configuration

def _setting(default, help=None, choices=None, low=None, high=None):
    """A Config field: its --help text (None: it is no flag) and what it may be."""
    return dataclasses.field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high))


def _what_it_must_be(field, value):
    """What a field of Settings must be, in words, where the value is something else; "" where the value will do."""
    low, high = field.metadata["low"], field.metadata["high"]
    if field.type is str:
        choices = field.metadata["choices"]
        is_fine = value in choices
        wanted = " or ".join(choices)
    elif field.type is bool:
        is_fine = isinstance(value, (bool, int)) and value in (0, 1)
        wanted = "0 or 1"
    elif field.type is tuple:
        kind = "whole numbers" if type(low) is int else "numbers"
        least = low or 1
        is_fine = isinstance(value, (tuple, list)) and len(value) <= MAX_LEVELS
        is_fine = is_fine and all(is_number(v, type(low)) and least <= v <= high for v in value)
        wanted = f"at most {MAX_LEVELS} {kind} from {least} to {high}"
    elif field.type is Rates:
        is_fine = len(value) <= len(EMA_SECTIONS) and all(low < v <= high for v in value)
        wanted = f"at most {len(EMA_SECTIONS)} numbers between 0 and {high}"
    else:
        is_fine = is_number(value, field.type) and low <= value <= high
        wanted = f"from {low} to {high}"
        if is_fine and 0 < abs(value) < FLOAT_MIN:
            return f"0 or at least {FLOAT_MIN:.2g}, the least float above it"
    return "" if is_fine else wanted


class Settings:
    """What the configurations of all networks share. Each is a dataclass of _settings with a check_network(prefix) and a
    magic, see read_checkpoint."""
    def __post_init__(self):
        self.ema_rate = Rates(self.ema_rate)

    def label_rows(self):
        """Rows of the label embedding: one for each class, and one for no class where labels are dropped."""
        if not self.class_cond:
            return 0
        return self.num_classes + (self.cond_drop_prob > 0)

    def noise_levels(self):
        """The NoiseLevels of its schedule: see noise_levels."""
        return noise_levels(self.diffusion_steps, self.noise_schedule, self.zero_terminal_snr)

    def last_words(self):
        """The largest random word that draws each timestep: see last_words."""
        return last_words(self.diffusion_steps, self.noise_schedule, self.zero_terminal_snr,
                          self.timestep_sampling, self.timestep_mean, self.timestep_std)

    def timestep_unit(self):
        """What the network is told of timestep t is t times this: 1, or what makes the whole chain 1000."""
        return 1000.0 / self.diffusion_steps if self.rescale_timesteps else 1

    def check(self, where=""):
        """Raise UserError for a value that nothing can work with. `where` names the file it came from."""
        prefix = f"{where}: " if where else "--"
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = _what_it_must_be(field, value)
            if wanted:
                raise UserError(f"{prefix}{field.name} is {value!r:.60}, it must be {wanted}")
        self.check_network(prefix)
        self.check_schedule(prefix)
        return self

    def check_schedule(self, prefix):
        """Raise UserError for a noise schedule that the timesteps or the prediction don't suit."""
        if self.noise_schedule == "linear" and self.diffusion_steps < LEAST_LINEAR_STEPS:
            raise UserError(f"{prefix}diffusion_steps {self.diffusion_steps} is too few for a linear schedule;"
                            f" use {LEAST_LINEAR_STEPS} or more, or cosine")
        if self.zero_terminal_snr and self.noise_schedule in ("flow", "edm"):
            raise UserError(f"{prefix}zero_terminal_snr rescales noise_schedule linear and cosine only")
        if (self.zero_terminal_snr or self.noise_schedule == "flow") and self.predict == "eps":
            name = "zero_terminal_snr" if self.zero_terminal_snr else "noise_schedule flow"
            raise UserError(f"{prefix}{name} leaves nothing but noise at the last timestep, where"
                            f" predict eps says nothing of the image; use --predict v or x0")


@dataclasses.dataclass
class Config(Settings):
    """Architecture, diffusion, optimiser: what a .bin tells of its model and its run. A field with a help text is a flag."""
    image_size: int = _setting(64, "height and width of the images, in pixels", low=4, high=1024)
    in_channels: int = _setting(3, "channels of an image: 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA or another code", low=1,
                                high=4)
    num_channels: int = _setting(64, "channel_mult's unit, a multiple of 32", low=32, high=1024)
    num_res_blocks: int = _setting(2, "residual blocks a level", low=1, high=16)
    num_head_channels: int = _setting(32, "channels an attention head", low=1, high=1024)
    norm_groups: int = _setting(32, "groups of every group norm", low=1, high=1024)
    max_period: int = _setting(10000, "longest period of the timestep embedding", low=2, high=10**8)
    num_heads: int = _setting(0, "heads of every attention, 0 for those of num_head_channels", low=0,
                              high=1024)
    num_heads_upsample: int = _setting(0, "the decoder's heads, 0 for num_heads", low=0, high=1024)
    use_scale_shift_norm: bool = _setting(False, "timestep and class scale and shift what is normed")
    dropout: float = _setting(0.0, "part of a block's inner values that are set to 0", low=0, high=0.99)
    rescale_timesteps: bool = _setting(False, "tell the network timesteps as if they were 1000")
    resblock_updown: bool = _setting(False, "levels go down and up within a residual block")
    conv_resample: bool = _setting(False, "levels go down and up by a 3x3 convolution")
    learn_sigma: bool = _setting(False, "predict how much noise --sampler ddpm adds, too")
    use_new_attention_order: bool = _setting(True, "q, k, v lie apart in a .pt; else heads do, as in"
                                                        " most official files")
    class_cond: bool = _setting(False, "tell the network each image's class, by the file's labels")
    num_classes: int = _setting(0, "classes that class_cond knows, 0 for those of the images", low=0,
                                high=10**6)
    cond_drop_prob: float = _setting(0.0, "part of the images whose class is hidden, for guidance",
                                     low=0, high=0.999)
    channel_mult: tuple = _setting((1, 2, 3, 4), "width of each level in units of num_channels",
                                   low=0.125, high=64)  # each is a number of the type of low: see _what_it_must_be
    attention_resolutions: tuple = _setting((16, 8), "image sizes with attention, 0 for none", low=0,
                                            high=1024)
    diffusion_steps: int = _setting(1000, "timesteps T of the diffusion", low=2, high=10**5)
    noise_schedule: str = _setting("linear", "how the noise grows with t", choices=("linear", "cosine", "flow", "edm"))
    predict: str = _setting("eps", "what the network predicts: the noise, v, the image, noise - image, or with EDM's"
                                   " preconditioning", choices=("eps", "v", "x0", "flow", "edm"))
    zero_terminal_snr: bool = _setting(False, "rescale the schedule to end in noise alone; not with eps")
    batch_size: int = _setting(32, "images a step", low=1, high=65536)
    seed: int = _setting(0, "seed of every random number", low=0, high=2**32 - 1)
    flip: bool = _setting(False, "mirror half of the images left-right")
    offset_noise: float = _setting(0.0, "one more normal a channel in the training noise, times this",
                                   low=0, high=10)
    timestep_sampling: str = _setting("uniform", "how timesteps are drawn: uniformly, or so that"
                                                 " log(sigma / alpha) is normal", choices=("uniform", "lognormal"))
    timestep_mean: float = _setting(0.0, "mean of log(sigma / alpha)", low=-20, high=20)
    timestep_std: float = _setting(1.0, "standard deviation of log(sigma / alpha)", low=0.01, high=20)
    consistency: bool = _setting(False, "tune --model_weights to draw in one or two steps; see --preset consistency")
    consistency_steps: int = _setting(2, "with --consistency: the number of steps, 1 or 2, in which the tuned model is to"
                                         " draw best", low=1, high=2)
    path_steps: int = _setting(0, "with --consistency: learn from paths of so many steps that the model itself draws; 0:"
                                  " from pairs of timesteps", low=0, high=1000)
    matching_fraction: float = _setting(0.0, "with --path_steps: in this last part of the steps match the distribution of"
                                             " pictures instead of paths", low=0, high=0.9)
    optimizer: str = _setting("adamw", "muon: Muon for the weights of hidden layers, and AdamW for all others",
                              choices=("adamw", "muon"))
    lr: float = _setting(1e-4, "learning rate", low=0, high=1000)
    lr_schedule: str = _setting("constant", "learning rate after warm-up",
                                choices=("constant", "cosine", "linear"))
    final_lr_fraction: float = _setting(0.0, "part of lr that cosine and linear end at", low=0, high=1)
    warmup_steps: int = _setting(0, "steps over which the learning rate rises", low=0, high=10**9)
    lr_steps: int = _setting(20000, low=0, high=2**31 - 1)
    weight_decay: float = _setting(0.0, "AdamW's weight decay, of matrices and convolutions", low=0,
                                   high=1000)
    beta1: float = _setting(0.9, "AdamW's first moment, and Muon's momentum", low=0, high=0.99999)
    beta2: float = _setting(0.999, "AdamW's second moment", low=0, high=0.9999999)
    adam_eps: float = _setting(1e-8, "AdamW's epsilon", low=1e-20, high=1)
    grad_clip: float = _setting(0.0, "longest gradient, a longer one is scaled to it; 0 for any", low=0,
                                high=10**9)
    skip_outliers: float = _setting(0.0, "standard deviations from which a step is skipped, 0 for none",
                                    low=0, high=10**9)
    ema_rate: Rates = _setting(Rates((0.999,)), "rates of the weights' moving averages, 0 for none",
                               low=0, high=0.9999999)
    min_snr_gamma: float = _setting(0.0, "min-SNR weights of the loss (5 is usual), 0 for none", low=0,
                                    high=10**6)

    magic = WEIGHTS_MAGIC

    def heads(self, channels, decoder):
        """Heads of an attention layer of so many channels. Raises UserError where these can't be dealt out evenly."""
        if not self.num_heads:
            if channels % self.num_head_channels:
                raise UserError(f"num_head_channels {self.num_head_channels} doesn't divide an attention layer of {channels}"
                                " channels")
            return channels // self.num_head_channels
        heads = self.num_heads
        if decoder and self.num_heads_upsample:
            heads = self.num_heads_upsample
        if channels % heads:
            raise UserError(f"num_heads {heads} doesn't divide an attention layer of {channels} channels")
        return heads

    def level_widths(self):
        """Channels of each level, from the first to the last; the product in float32, as in ./train_unet."""
        return [int(np.float32(self.num_channels) * np.float32(mult)) for mult in self.channel_mult]

    def level_sizes(self):
        """Height and width of each level's images, from the first level to the last, in pixels."""
        return [self.image_size >> level for level in range(len(self.channel_mult))]

    def check_network(self, prefix):
        """Raise UserError for an architecture that can't be."""
        if not self.channel_mult:
            raise UserError(f"{prefix}channel_mult is empty, it must name the width of each level, e.g."
                            f" 1,2,3,4")
        levels = len(self.channel_mult)
        if self.image_size % 2 ** (levels - 1):
            raise UserError(f"{prefix}image_size {self.image_size} can't be halved {levels - 1} times for the"
                            f" {levels} levels of channel_mult")
        if self.num_channels % 32:
            raise UserError(f"{prefix}num_channels is {self.num_channels}, it must be a multiple of 32")
        for mult, width in zip(self.channel_mult, self.level_widths()):
            is_whole = np.float32(self.num_channels) * np.float32(mult) == width
            if not is_whole or width % 32 or width > MAX_WIDTH:
                raise UserError(f"{prefix}channel_mult {mult} times num_channels {self.num_channels} is no"
                                f" multiple of 32 up to {MAX_WIDTH}")
        if self.num_heads_upsample and not self.num_heads:
            raise UserError(f"{prefix}num_heads_upsample {self.num_heads_upsample} does nothing without"
                            f" num_heads")
        sizes = self.level_sizes()
        attended = max(size for size in sizes if size == sizes[-1] or size in self.attention_resolutions)
        if attended > MAX_ATTENTION_SIZE:
            raise UserError(f"{prefix}attention_resolutions: attention at {attended}x{attended} does not fit;"
                            f" {MAX_ATTENTION_SIZE}x{MAX_ATTENTION_SIZE} is the largest: use more levels or"
                            f" other sizes (the middle, at the last level, always has attention)")


# What the flags that are no fields of Config may be, here as in ./train_unet where that has them.
RANGES = {"steps": (0, 99999999), "log_every": (1, 10**9), "save_every": (0, 10**9), "keep": (1, 10**9),
          "keep_every": (0, 10**9), "sample_every": (0, 10**9), "val_every": (1, 10**9),
          "batch_size": (1, 65536), "microbatch": (0, 65536), "num_samples": (0, 10**6),
          "interpolate": (0, 10**6), "strip": (0, 1000), "sample_steps": (0, 10**5),
          "use_ema": (0, 4), "eta": (0, 1), "guidance_scale": (0, 1000), "strength": (0, 1), "jump_length": (1, 10**5),
          "jump_n_sample": (1, 1000)}


def check_range(name, value, least=None, flag=None):
    """Raise UserError unless a number is in RANGES[name] and, if that is given, at least `least`.

    flag: what the flag is called, if not as in RANGES.
    """
    low, high = RANGES[name]
    if least is not None:
        low = max(low, least)
    if not low <= value <= high:
        raise UserError(f"--{flag or name} must be from {low} to {high}, not {value}")


ADM = dict(attention_resolutions=(32, 16, 8), class_cond=True, num_classes=1000, learn_sigma=True,
           resblock_updown=True, use_scale_shift_norm=True, ema_rate=0.9999)
RECORDS = dict(noise_schedule="edm", predict="edm", timestep_sampling="lognormal", timestep_mean=-1.2, timestep_std=1.2,
               optimizer="muon", lr_schedule="cosine", warmup_steps=500, grad_clip=1.0)  # the recipe of docs/records.md
PRESETS = {
    "tiny": dict(image_size=32, num_channels=32, channel_mult=(1, 2, 2), num_res_blocks=1,
                 attention_resolutions=(8,), norm_groups=8, predict="flow", noise_schedule="flow",
                 timestep_sampling="lognormal", batch_size=8, optimizer="muon", lr=1e-3, lr_schedule="cosine",
                 warmup_steps=100, ema_rate=0.995, steps=4000, save_every=1000, sample_every=500,
                 data_file="data/faces.bin"),
    "small32": dict(image_size=32, num_channels=64, channel_mult=(1, 2, 2), num_res_blocks=2,
                    attention_resolutions=(16, 8), batch_size=64, lr=3e-4, steps=20000, **RECORDS),
    "fashion32": dict(image_size=32, in_channels=1, num_classes=10, channel_mult=(1, 2, 2), class_cond=True,
                      cond_drop_prob=0.1, batch_size=128, lr=1e-3, **RECORDS),
    "unet64": dict(batch_size=64, lr=3e-4, steps=16000, **RECORDS),
    "large64": dict(image_size=64, num_channels=128, channel_mult=(1, 2, 3, 4), num_res_blocks=3,
                    attention_resolutions=(32, 16, 8), num_head_channels=64, noise_schedule="cosine",
                    batch_size=64, lr=1e-4, warmup_steps=1000, ema_rate=0.9999, steps=200000, save_every=5000,
                    sample_every=5000),
    # guided-diffusion's models of ImageNet, as its README lists them
    "adm64": dict(image_size=64, num_channels=192, num_res_blocks=3, channel_mult=(1, 2, 3, 4),
                  num_head_channels=64, noise_schedule="cosine", dropout=0.1, **ADM),
    "adm128": dict(image_size=128, num_channels=256, num_res_blocks=2, channel_mult=(1, 1, 2, 3, 4),
                   num_heads=4, use_new_attention_order=False, **ADM),
    "adm256": dict(image_size=256, num_channels=256, num_res_blocks=2, channel_mult=(1, 1, 2, 2, 4, 4),
                   num_head_channels=64, use_new_attention_order=False, **ADM),
    "consistency": dict(consistency=True, path_steps=10, matching_fraction=0.2, optimizer="muon", lr=3e-4,
                        lr_schedule="cosine", warmup_steps=100, grad_clip=1.0, batch_size=32, steps=16000),
}


def spread_classes(config, classes, count):
    """(a class for each of `count` pictures, as equally many of each as can be; the groups of grid_columns).

    A group is the pictures of a class; there are 0 where they are not equally many. (None, 0) without class_cond.
    """
    if not config.class_cond:
        return None, 0
    classes = list(classes)
    spread = [classes[i * len(classes) // count] for i in range(count)]
    are_groups = len(classes) > 1 and count % len(classes) == 0
    return spread, len(classes) if are_groups else 0


def flags_of(config):
    """A Config as a command line: a list of words."""
    words = []
    for field in dataclasses.fields(config):
        if field.metadata["help"]:
            words += [f"--{field.name}", setting_text(getattr(config, field.name))]
    return words


def setting_text(value):
    """The text of a setting's value as ./train_unet writes it: 1, 0.0001, 1e-08, 1,2,3, cosine; an empty list is 0."""
    if isinstance(value, tuple):
        return ",".join(map(setting_text, value)) or "0"
    if isinstance(value, (bool, np.bool_)):
        return str(int(value))
    if not isinstance(value, (float, np.floating)):
        return str(value)
    number = np.float32(value)  # NumPy writes as few digits as tell it from all other float32
    if not np.isfinite(number):
        return str(number)
    scientific = np.format_float_scientific(number, trim="-", exp_digits=2)
    is_short = -4 <= int(scientific.split("e")[1]) < 6
    return np.format_float_positional(number, trim="-") if is_short else scientific


def parse_setting(text, kind, choices=None):
    """The value, of the type `kind` of a Config's field, that a text of setting_text stands for. Raises ValueError."""
    if kind is tuple:
        values = [float(part) for part in text.split(",")]
        return () if values == [0] else tuple(map(whole_as_int, values))
    if kind is Rates:
        return Rates(float(part) for part in text.split(","))
    if kind is bool and text not in ("0", "1"):
        raise ValueError(text)
    if choices and text not in choices:
        raise ValueError(text)
    return text == "1" if kind is bool else kind(text)


def learning_rate(config, step):
    """The learning rate of a step (0-based).

    It rises linearly during the warm-up; then it is constant, or falls along half a cosine or a line. While distributions
    are matched it is constant and small.
    """
    if matches_distributions(config, step):
        return STUDENT_RATE * config.lr
    rate = config.lr * min(1.0, (step + 1) / max(config.warmup_steps, 1))
    if config.lr_schedule == "constant" or step < config.warmup_steps:
        return rate
    done = min((step - config.warmup_steps) / max(config.lr_steps - config.warmup_steps, 1), 1.0)
    falling = 1 - done
    if config.lr_schedule == "cosine":
        falling = 0.5 * (1 + math.cos(math.pi * done))
    return rate * (config.final_lr_fraction + (1 - config.final_lr_fraction) * falling)


def ema_decay(rate, update, warmup=True):
    """How much of the average is kept at an update (0-based); with a warm-up, less of it at first."""
    if not warmup:
        return rate
    return min(rate, 1 - (2 + update) ** -0.75)


@dataclasses.dataclass
class History:
    """What --skip_outliers goes by: the losses and gradient norms of the last 128 steps that were not skipped."""
    skipped: int = 0  # steps that updated nothing
    seen: int = 0     # steps that are entered below, step number n in place n % 128
    losses: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(128, "<f4"))
    norms: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(128, "<f4"))

    def accepts(self, loss, norm, deviations):
        """Whether neither the loss nor the norm is an outlier. If so they are entered, if not a skipped step is counted."""
        for value, window in ((loss, self.losses), (norm, self.norms)):
            if deviations > 0 and self.is_outlier(value, window, deviations):
                self.skipped += 1
                return False
        place = self.seen % 128
        self.losses[place] = loss
        self.norms[place] = norm
        self.seen += 1
        return True

    def is_outlier(self, value, window, deviations):
        """Whether a value lies so many standard deviations above the mean of a window; of fewer than 32 values none does."""
        last = window[:min(self.seen, 128)].astype(np.float64)
        return len(last) >= 32 and value - last.mean() > deviations * last.std(ddof=1)

    def pack(self):
        """The bytes of a checkpoint's section `state`."""
        counts = np.array([self.skipped, self.seen], "<i4")
        return b"".join(array.tobytes() for array in (counts, self.losses, self.norms))

    @classmethod
    def unpack(cls, data, step, path):
        """The History of such a section. Raises UserError."""
        if len(data) == 8 + 2 * 4 * 128:
            skipped, seen = np.frombuffer(data[:8], "<i4").tolist()
            losses, norms = np.frombuffer(data[8:], "<f4").reshape(2, 128)
            are_counts = skipped >= 0 and seen >= 0 and skipped + seen <= step
            if are_counts and np.isfinite(losses).all() and np.isfinite(norms).all():
                return cls(skipped, seen, losses.copy(), norms.copy())
        raise UserError(f"{path} is damaged: its section state makes no sense")


# ----------------------------------------------------------------------------------------------------
# files in general

def _map_file(path, magics, refusal):
    """(header int32 (256,), whole file uint8 as a read-only mapping). Raises UserError.

    refusal: what is said of a file whose first number is none of magics.
    """
    try:
        size = os.path.getsize(path)
        if os.path.isdir(path):
            raise UserError(f"{path} is a folder, a file is needed")
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    if int.from_bytes(data[:4].tobytes(), "little") not in magics:
        raise UserError(f"{path} {refusal}")
    if size < HEADER_BYTES:
        raise UserError(f"{path} is only {size} bytes long, shorter than a header of {HEADER_BYTES}")
    return data[:HEADER_BYTES].view("<i4").copy(), data


def _need_size(path, data, expected, what):
    """Raise UserError unless the file is exactly `expected` bytes long."""
    if len(data) != expected:
        state = "cut short" if len(data) < expected else "too long"
        raise UserError(f"{path} is {state}: {what} need {expected} bytes, the file has {len(data)}")


def _check_crc(path, header, data, field):
    """Raise UserError unless header[field] is the CRC-32 of the data and, after them, of the header with 0 in that field."""
    crc = 0
    for start in range(HEADER_BYTES, len(data), 1 << 24):
        crc = zlib.crc32(data[start:start + (1 << 24)], crc)
    blank = header.copy()
    blank[field] = 0
    if zlib.crc32(blank.tobytes(), crc) != int(header[field]) & 0xFFFFFFFF:
        raise UserError(f"{path} is damaged: its checksum doesn't match, so make or copy the file again")


def check_target(path):
    """Raise UserError where no file can be written: its folder is missing or closed, or the path is of something else."""
    folder = os.path.dirname(path) or "."
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "a device or a pipe"
        raise UserError(f"{path} is {kind}, a file is needed")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"{path} can't be written: {folder} is a file, a folder is needed")
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "may not be written into" if os.path.exists(folder) else "does not exist"
        raise UserError(f"{path} can't be written: the folder {folder} {why}")


def check_folder(path):
    """Raise UserError unless path is a folder to write into, or can be made one."""
    place = path  # the innermost folder of it that exists
    while place and not os.path.lexists(place):
        place = os.path.dirname(place)
    place = place or "."
    if not os.path.isdir(place):
        raise UserError(f"{place} is a file, a folder is needed")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{path} can't be written: the folder {place} may not be written into")


@contextlib.contextmanager
def locked(folder, refusal):
    """Hold the lock of a folder. Raises UserError with this refusal where another process holds it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(refusal) from None
        except OSError as error:
            print(f"note: {printable(folder)} can't be locked ({error.strerror}): see that no other run is started",
                  file=sys.stderr)
        yield
    finally:
        os.close(lock)


@functools.lru_cache(maxsize=None)  # once a folder
def _remove_stale_temporaries(folder):
    """Remove the temporary files that killed processes left. The process that still writes one holds a lock on it."""
    names = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for name in names:
        if re.search(r"\.unet-\d+-\d+\.tmp$", name):
            with contextlib.suppress(OSError):
                _remove_unlocked(os.path.join(folder, name))


def _remove_unlocked(path):
    """Remove a file. Raises OSError, and leaves it, where a process holds a lock on it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.remove(path)
    finally:
        os.close(descriptor)


_numbers = itertools.count(1)


def _open_temporary(path):
    """Create a file beside path, under a name that nobody has used, and lock it: (its name, the open file)."""
    while True:
        temporary = f"{path}.unet-{os.getpid()}-{next(_numbers)}.tmp"
        try:
            file = open(temporary, "xb")
        except FileExistsError:
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # another process took it for stale before it was locked


def _flush(file):
    """Bring what was written to an open file onto the disk."""
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _writing(path):
    """An OSError of what is done within becomes a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror or error}") from None


@contextlib.contextmanager
def replacing(path):
    """Open a temporary file beside path; flush and rename it to path at the end, or remove it on an error."""
    path = os.fspath(path)
    check_target(path)
    _remove_stale_temporaries(os.path.dirname(path) or ".")
    temporary = None
    with _writing(path):
        try:
            temporary, file = _open_temporary(path)
            with file:
                yield file
                _flush(file)
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary or "")
            raise


def _write_with_header(file, header, blocks, crc_field):
    """Write the data blocks first and the header with their checksum last, at the start of the file."""
    crc = 0
    file.write(bytes(HEADER_BYTES))
    for block in blocks:
        crc = zlib.crc32(block, crc)
        file.write(block)
    _write_header(file, header, crc, crc_field)


def _write_header(file, header, crc, crc_field):
    """Write the header at the start of the file, with the CRC-32 of data and header in crc_field. crc: that of the data."""
    header[crc_field] = 0
    crc = zlib.crc32(header.tobytes(), crc)
    header[crc_field] = np.uint32(crc).view(np.int32)
    file.seek(0)
    file.write(header.tobytes())


# ----------------------------------------------------------------------------------------------------
# 5. image files: [20240620, N, C, H, W, version, type, classes, bytes of class names, CRC-32, 0 ...]
#    version 0 (old): float32 in [-1, 1]; version 1: uint8 (type 1) or any float32 (type 2), such as latents,
#    then int32 labels and the class names if any

IMAGE_TYPES = {1: np.dtype(np.uint8), 2: np.dtype("<f4")}


@dataclasses.dataclass
class Images:
    """A data set. pixels: (N, C, H, W), uint8 or float32, mapped and read on demand."""
    pixels: np.ndarray
    labels: np.ndarray = None  # int32 (N,) or None
    class_names: tuple = ()    # which they number; some may have no image
    path: str = "images"
    checksum: str = ""         # the file's, 8 hexadecimal digits; old ones have none

    def __len__(self):
        return len(self.pixels)

    def check_size(self, image_size, channels=3):
        """Raise UserError unless floats() can give this size: the file's, or smaller by a whole factor."""
        _, have, height, width = self.pixels.shape
        if have != channels:
            raise UserError(f"{self.path} has images of {have} channels, {channels} wanted")
        if height != width or height % image_size:
            raise UserError(f"{self.path} holds {width}x{height} images, not {image_size}x{image_size}: make"
                            " a file with python3 prepare_data.py --data_dir FOLDER --output_name FILE.bin"
                            f" --image_size {image_size}")

    def match_classes(self, names, trains=True):
        """Number the labels as a model does whose classes have these names. Raises UserError for images of other classes.

        Returns a sentence of what else differs, "" where nothing does. trains: a class without images is a difference, too.
        """
        if self.labels is None:
            raise UserError(f"{self.path} has no labels, and the model knows classes: make it with"
                            f" prepare_data.py --labels")
        counts = np.bincount(self.labels, minlength=len(self.class_names))  # images of each class
        known = {nfc(name): number for number, name in enumerate(names)}
        numbers = np.array([known.get(nfc(name), -1) for name in self.class_names], np.int32)  # in the model
        unknown, moved, there = [], [], set()
        for i, (name, number, count) in enumerate(zip(self.class_names, numbers, counts)):
            if count and number < 0:
                unknown.append(name)
            if count and number != i:
                moved.append(f"{name} is number {i} there and {number} in the model")
            if count or not trains:
                there.add(nfc(name))
        if unknown:
            raise UserError(f"{self.path} has images of {listed(unknown)}, which the model does not know: its"
                            f" classes are {listed(names)}")
        lacking = [name for name in names if nfc(name) not in there]
        self.labels = numbers[self.labels]
        self.class_names = tuple(names)
        differences = []
        if moved:
            differences.append(f"numbers its classes otherwise and is matched by their names: {moved[0]}")
        if lacking:
            differences.append(f"has no images of {listed(lacking)}, which the model knows")
        return f"{self.path} {'; it '.join(differences)}" if differences else ""

    def check_labels(self, config):
        """Raise UserError unless there are the labels that class_cond needs."""
        if not config.class_cond:
            return
        count = len(self.class_names)
        if not count:
            raise UserError(f"{self.path} has no labels, and --class_cond 1 needs them: make it with prepare_data.py"
                            " --labels")
        if count > config.num_classes:
            raise UserError(f"{self.path} has {counted(count, 'class')}, more than --num_classes {config.num_classes}: use"
                            f" {count}")

    def floats(self, indices, image_size=None):
        """Images, bytes scaled to [-1, 1], floats as they are: float32 (len(indices), C, image_size, image_size).

        Images that are larger than that by a whole factor k are box-filtered: the k*k values are summed up row by row in
        float32, and the sum is divided once. image_size: the file's own unless given.
        """
        x = self.pixels[indices].astype(np.float32)
        k = 1
        if image_size:
            k = x.shape[-1] // image_size
        total = x[..., ::k, ::k]
        for place in range(1, k * k):
            total = total + x[..., place // k::k, place % k::k]
        if self.pixels.dtype == np.uint8:
            return total / np.float32(127.5 * k * k) - np.float32(1)
        return total / np.float32(k * k)


def parse_class_names(data, path, least, most):
    """The names of classes in bytes of UTF-8, each ended by a newline: a tuple of least to most names. Raises UserError."""
    count = data.count(b"\n")
    ends_within_name = data and not data.endswith(b"\n")
    if not least <= count <= most or ends_within_name:
        raise UserError(f"{path} is damaged: it has {count} names of classes for {most} classes")
    names = tuple(data.decode("utf-8", "surrogateescape").split("\n")[:-1])
    check_class_names(names, path)
    return names


def check_class_names(names, path):
    """Raise UserError for names that can't be stored: what is no text in UTF-8, an empty one, and two that are the same."""
    def is_text(name):
        return "\0" not in name and name == name.encode("utf-8", "replace").decode()

    if not all(map(is_text, names)):
        raise UserError(f"{path} has names of classes that are no text in UTF-8")
    if "" in names:
        raise UserError(f"{path} has a class without a name")
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise UserError(f"{path} has two classes called {twice}")


def read_class_names(path, classes):
    """The lines of --class_names, a text file with a line for each of so many classes: a tuple. Raises UserError.

    Several classes may have the same name; names that are to be stored must also pass check_class_names.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            names = tuple(line.strip() for line in file)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    if len(names) != classes:
        raise UserError(f"--class_names {path} has {counted(len(names), 'line')} and the model {counted(classes, 'class')}")
    return names


def read_images(path):
    """Images from a .bin, old (float32) or new (checked against its checksum). Raises UserError."""
    header, data = _map_file(path, [IMAGES_MAGIC], f"holds no images (its first number is not {IMAGES_MAGIC}): make such a"
                                                   f" file with prepare_data.py")
    shape, kind, classes, name_bytes = _image_fields(path, header)
    n, channels, height, width = shape
    is_old = header[5] == 0
    dtype = IMAGE_TYPES[kind]
    pixels_end = HEADER_BYTES + math.prod(shape) * dtype.itemsize
    labels_end = pixels_end + (4 * n if classes else 0)
    elements = "bytes" if kind == 1 else "floats"
    _need_size(path, data, labels_end + name_bytes, f"{n} images of {channels}x{height}x{width} {elements}")
    if not is_old:
        _check_crc(path, header, data, 9)
    pixels = data[HEADER_BYTES:pixels_end].view(dtype)
    if kind == 2:
        _check_floats(path, pixels, is_old)
    images = Images(pixels.reshape(shape), path=path)
    if not is_old:
        images.checksum = f"{int(header[9]) & 0xFFFFFFFF:08x}"
    if classes:
        images.labels = np.frombuffer(data[pixels_end:labels_end].tobytes(), "<i4")
        images.class_names = parse_class_names(data[labels_end:].tobytes(), path, classes, classes)
        if images.labels.min() < 0 or images.labels.max() >= classes:
            raise UserError(f"{path} has a label outside 0 ... {classes - 1}")
    return images


def _image_fields(path, header):
    """((N, C, H, W), element type, number of classes, bytes of their names) of an image file's header. Raises UserError."""
    n, channels, height, width, version, kind, classes, name_bytes = (int(v) for v in header[1:9])
    if min(n, channels, height, width) < 1:
        raise UserError(f"{path} claims to hold {n} images of {channels} x {height} x {width}, all must be"
                        f" positive")
    if version not in (0, 1) or version == 1 and kind not in IMAGE_TYPES:
        raise UserError(f"{path} has version {version} and element type {kind}, which this program doesn't"
                        f" know")
    if version == 0:
        kind, classes, name_bytes = 2, 0, 0
    if classes < 0 or name_bytes < 0 or (classes == 0) != (name_bytes == 0):
        raise UserError(f"{path} claims to have {classes} classes with names of {name_bytes} bytes")
    return (n, channels, height, width), kind, classes, name_bytes


def _check_floats(path, pixels, is_old):
    """Raise UserError for float32 pixels that are not finite or, of an old file, outside [-1, 1]."""
    most = 1.001 if is_old else np.finfo("f4").max
    why = ", outside [-1, 1]" if is_old else ""
    for start in range(0, len(pixels), 1 << 22):
        some = pixels[start:start + (1 << 22)]
        bad = some[~(np.abs(some) <= most)]
        if len(bad):
            raise UserError(f"{path} is damaged: it holds a pixel of {bad[0]:g}{why}")


def class_order(names):
    """The names of classes, each once, in the order of their numbers: by value if all are whole numbers, else as text."""
    def value(name):  # int() refuses thousands of digits
        digits = name.lstrip("0")
        return len(digits), digits, name

    are_numbers = all(re.fullmatch("[0-9]+", name) for name in names)
    return sorted(set(names), key=value if are_numbers else None)


class ImageWriter:
    """Takes the images of a new file one by one, and keeps no more than their labels in memory. See image_writer."""
    def __init__(self, file, path):
        self.file = file
        self.path = path
        self.n = 0
        self.like = None  # (dtype, shape) of each image
        self.crc = 0
        self.labels = []
        self.finished = False
        file.write(bytes(HEADER_BYTES))

    def add(self, pixels, label=None):
        """Append one image, (C, H, W), with the name of its class or, for every image, None.

        All are uint8, or all are float32.
        """
        like = pixels.dtype, pixels.shape
        self.like = self.like or like
        assert pixels.dtype in IMAGE_TYPES.values() and like == self.like
        self._write(np.ascontiguousarray(pixels).data)
        self.labels.append(None if label is None else nfc(label))
        self.n += 1

    def _write(self, block):
        self.crc = zlib.crc32(block, self.crc)
        with _writing(self.path):
            self.file.write(block)

    def finish(self, class_names=None):
        """Append labels and class names, write the header, and flush all to the disk. A second call does nothing.

        class_names: every class in its order, also those without an image here; by default those of the images.
        """
        if self.finished:
            return
        if class_names is None:
            class_names = class_order([label for label in self.labels if label is not None])
        assert not any("\n" in name for name in class_names)
        block = "".join(f"{name}\n" for name in class_names).encode("utf-8", "replace")
        if class_names:
            number = {name: i for i, name in enumerate(class_names)}
            self._write(np.array([number[label] for label in self.labels], "<i4").tobytes())
            self._write(block)
        header = np.zeros(256, "<i4")
        dtype, shape = self.like
        kind = 1 if dtype == np.uint8 else 2
        header[:9] = [IMAGES_MAGIC, self.n, *shape, 1, kind, len(class_names), len(block)]
        with _writing(self.path):
            _write_header(self.file, header, self.crc, 9)
            _flush(self.file)
        self.finished = True


@contextlib.contextmanager
def image_writer(path):
    """`with image_writer(path) as writer: writer.add(...)`. The file appears as `path` once it is whole.

    Where several files are to appear together, call finish() of each before the first `with` ends.
    """
    with replacing(path) as file:
        writer = ImageWriter(file, path)
        yield writer
        if not writer.n:
            raise UserError(f"{path} is not written, since there was no image to put into it")
        writer.finish()


def write_images(path, pixels, labels=None, class_names=None):
    """Write a new image file from uint8 or float32 (N, C, H, W) and, if given, N class names.

    class_names: see ImageWriter.finish.
    """
    with image_writer(path) as writer:
        for i, image in enumerate(pixels):
            writer.add(image, labels[i] if labels is not None else None)
        if writer.n:
            writer.finish(class_names)


def write_old_images(path, pixels):
    """Write an old image file from float32 (N, C, H, W) in [-1, 1]; only for tests."""
    header = np.zeros(256, "<i4")
    header[:5] = [IMAGES_MAGIC, *pixels.shape]
    with replacing(path) as file:
        file.write(header.tobytes() + np.asarray(pixels, "<f4").tobytes())


# ----------------------------------------------------------------------------------------------------
# 6. weights and checkpoints: [UNET, version, CRC-32, sections, step, parameters, tensors, ..., the Config,
#    ..., from field 128 on 32 bytes a section: name (24) and length (8)], then the sections

EMA_SECTIONS = ("ema", "ema_2", "ema_3", "ema_4")
# float32, in the order of named_parameters()
TENSOR_SECTIONS = ("weights", *EMA_SECTIONS, "adam_m", "adam_v", "teacher", "fake", "fake_m", "fake_v")
TEXT_SECTIONS = ("class_names", "data_checksum")
WEIGHTS_VERSION = 3
FIELD_CHECKSUM, FIELD_SECTIONS, FIELD_STEP, FIELD_PARAMETERS, FIELD_TENSORS, FIELD_LOSS, FIELD_LR_STEPS = range(2, 9)


@dataclasses.dataclass
class Checkpoint:
    """What a .bin holds. sections: name -> float32 (parameters,), str for TEXT_SECTIONS, History for state."""
    config: Config
    sections: dict
    step: int = 0
    smoothed_loss: float = 0.0
    tensors: int = 0  # number of parameter tensors; 0 when the file doesn't tell
    old: bool = False
    run: dict = dataclasses.field(default_factory=dict)  # those of RUN_SETTINGS that are known: {name: value}
    version: int = WEIGHTS_VERSION  # of the file's format

    @property
    def class_names(self):
        """The names of the model's first classes, by number: a tuple; () where they are not known."""
        return tuple(self.sections.get("class_names", "").split("\n")[:-1])


def class_section(names):
    """{"class_names": text} for a Checkpoint's sections; {} without names."""
    return {"class_names": "".join(f"{name}\n" for name in names)} if names else {}


# The settings of a run that are no fields of Config, and that ./train_unet takes up again on --resume: (type, choices).
RUN_SETTINGS = dict.fromkeys(("steps", "log_every", "save_every", "sample_every", "val_every", "keep", "keep_every",
                              "microbatch", "num_samples", "sample_steps", "use_ema"), (int, None))
RUN_SETTINGS |= dict.fromkeys(("eta", "guidance_scale"), (float, None))
RUN_SETTINGS |= {"sampler": (str, ("ddim", "ddpm", "dpmpp", "heun", "consistency")), "threshold": (str, THRESHOLDS),
                 "spacing": (str, SPACINGS)}
RUN_SETTINGS |= dict.fromkeys(("data_file", "val_file", "model_weights"), (str, None))
RUN_SETTINGS |= {"guidance_interval": (str, None)}  # only of files of version 2


def config_section(config, run):
    """The text of a checkpoint's section `config`, as bytes: a line `name = value` for each setting, sorted by name.

    The name of a file that has a line break in it is left out, since no line can hold it.
    """
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.metadata["help"]}
    settings |= run
    text = ""
    for name, value in sorted(settings.items()):
        line = f"{name} = {setting_text(value)}\n"
        if value != "" and line.count("\n") == 1:
            text += line
    return text.encode("utf-8", "surrogateescape")


def read_settings(settings, kind, path):
    """(a `kind` of Settings, {name: value} of RUN_SETTINGS) from {name: text}. Raises UserError."""
    fields = {field.name: (field.type, field.metadata["choices"]) for field in dataclasses.fields(kind)
              if field.metadata["help"]}
    known = fields | RUN_SETTINGS
    config = kind()
    run = {}
    for name, text in settings.items():
        if name not in known:
            raise UserError(f"{path} has the setting {name:.80}, which this program doesn't know")
        try:
            value = parse_setting(text, *known[name])
        except (ValueError, OverflowError):
            raise UserError(f"{path} is damaged: its {name} is {text[:60]!r}") from None
        if name in RUN_SETTINGS and name in RANGES:
            low, high = RANGES[name]
            if not low <= value <= high:
                raise UserError(f"{path} is damaged: its {name} is out of range")
        if name in fields:
            setattr(config, name, value)
        else:
            run[name] = value
    return config.check(path), run


# Where the header had the settings in versions 1 and 2 of the format; those from 107 on are new in version 2.
OLD_FIELDS = dict(
    image_size=16, in_channels=17, num_channels=18, num_res_blocks=19, num_head_channels=20, norm_groups=21,
    max_period=22, num_classes=23, channel_mult=24, attention_resolutions=32, diffusion_steps=40, noise_schedule=41,
    predict=42, batch_size=48, seed=49, flip=50, lr=51, lr_schedule=52, warmup_steps=53, weight_decay=55, beta1=56,
    beta2=57, adam_eps=58, ema_rate=59, steps=61, log_every=62, save_every=63, keep=64, sample_every=65, val_every=66,
    num_samples=67, sampler=68, sample_steps=69, use_ema=70, min_snr_gamma=71, microbatch=72, grad_clip=78,
    final_lr_fraction=79, skip_outliers=80, zero_terminal_snr=90, offset_noise=91, eta=92, threshold=93, spacing=94,
    keep_every=106, class_cond=107, cond_drop_prob=108, use_scale_shift_norm=109, dropout=110, num_heads=111,
    num_heads_upsample=112, resblock_updown=113, conv_resample=114, learn_sigma=115, rescale_timesteps=116,
    use_new_attention_order=117, guidance_scale=118, depth=119, hidden_size=120, patch_size=121, mlp_ratio=122)
OLD_LOSS, OLD_LR_STEPS, OLD_MORE_RATES = 60, 54, 75  # the last: of ema_rate's second number and those behind it


def _old_settings(header, kind):
    """{name: text} of the settings in a header of version 1 or 2, as far as Settings of this kind have them."""
    known = {field.name: (field.type, field.metadata["choices"]) for field in dataclasses.fields(kind)} | RUN_SETTINGS
    floats = header.view("<f4")
    settings = {}
    for name, index in OLD_FIELDS.items():
        if name not in known or header[1] < 2 and index >= 107:
            continue
        of_type, choices = known[name]
        value = header[index]
        if of_type is float:
            value = floats[index]
        elif of_type is Rates:
            rates = floats[[index, *range(OLD_MORE_RATES, OLD_MORE_RATES + 3)]]
            value = tuple(itertools.takewhile(bool, rates))
        elif of_type is tuple:
            value = _old_list(header[index:index + MAX_LEVELS])
        elif choices:
            value = choices[value] if 0 <= value < len(choices) else f"number {value}"
        elif name == "use_new_attention_order" and value in (0, 1):
            value = 1 - value  # so that the 0 of even older files was the default
        elif name == "seed":
            value = int(value) & 0xFFFFFFFF
        settings[name] = setting_text(value)
    if settings.get("num_heads") == "0":
        settings["num_heads_upsample"] = "0"  # without the former the latter meant nothing
    return settings


def _old_list(fields):
    """The numbers in the fields of a list, which ends at a 0: a tuple. Of a fraction its float's bits were stored."""
    values = []
    for whole, real in zip(fields, fields.view("<f4")):
        if not whole:
            break
        is_fraction = real >= FLOAT_MIN and not float(real).is_integer()
        values.append(real if is_fraction else whole)
    return tuple(values)


def _section(header, i):
    """(name, length in bytes) of section number i in the header of weights; one that is not there has no name."""
    entry = header[128 + 8 * i:136 + 8 * i].tobytes()
    name = entry[:24].rstrip(b"\0").decode("ascii", "replace")
    return name, int.from_bytes(entry[24:], "little")


def _section_places(path, header, parameters):
    """{name: (first byte, end)} of the sections of weights, in their order. Raises UserError."""
    places = {}
    start = HEADER_BYTES
    for i in range(header[FIELD_SECTIONS]):
        name, length = _section(header, i)
        if name in places or not name.isprintable() or not name:
            raise UserError(f"{path} is damaged: section {i} has the name {name!r}")
        if name in TENSOR_SECTIONS and length != 4 * parameters:
            raise UserError(f"{path} is damaged: section {name} has {length} bytes for {parameters}"
                            f" parameters")
        places[name] = (start, start + length)
        start += length
    return places


def _text(block):
    """The text of a section's bytes."""
    return block.tobytes().decode("utf-8", "surrogateescape")


def _check_sections(path, names, version):
    """Raise UserError where weights of this version of the format lack a section."""
    if "weights" not in names or ("adam_m" in names) != ("adam_v" in names):
        raise UserError(f"{path} is damaged: its sections are {', '.join(names)}")
    if version == WEIGHTS_VERSION and "config" not in names:
        raise UserError(f"{path} is damaged: it has no section config")


def read_checkpoint(path, kind=Config):
    """Checkpoint from a .bin with weights, of any version, its checksum checked. Raises UserError.

    kind: the network's class of Settings, whose magic is what its files begin with.
    """
    ours = kind.magic.to_bytes(4, "little").rstrip(bytes(1)).decode()
    magics = [IMAGES_MAGIC, kind.magic]
    if kind is Config:
        magics.append(OLD_WEIGHTS_MAGIC)
    header, data = _map_file(path, magics, f"holds no weights (its first bytes are neither {ours} nor those of an old file)")
    if header[0] == IMAGES_MAGIC:
        raise UserError(f"{path} holds images; weights were expected")
    if header[0] == OLD_WEIGHTS_MAGIC:
        return _read_old_weights(path, header, data)
    version, _, count, step, parameters, tensors = (int(field) for field in header[1:7])
    if not 1 <= version <= WEIGHTS_VERSION:
        raise UserError(f"{path} has version {version}, this program knows versions 1 to {WEIGHTS_VERSION}")
    if not 1 <= count <= 16 or step < 0 or parameters < 1 or tensors < 1:
        raise UserError(f"{path} is damaged: {count} sections, step {step}, {parameters} parameters in"
                        f" {tensors} tensors")
    places = _section_places(path, header, parameters)
    _need_size(path, data, max(end for _, end in places.values()), "its sections")
    _check_sections(path, places.keys(), version)
    _check_crc(path, header, data, FIELD_CHECKSUM)

    content = {name: data[first:end] for name, (first, end) in places.items()}
    sections = {name: np.frombuffer(content[name], "<f4") for name in TENSOR_SECTIONS if name in content}
    if "state" in content:
        sections["state"] = History.unpack(content["state"].tobytes(), step, path)
    sections |= {name: _text(content[name]) for name in TEXT_SECTIONS if name in content}

    floats = header.view("<f4")
    if version < WEIGHTS_VERSION:
        loss = floats[OLD_LOSS]
        lr_steps = header[OLD_LR_STEPS]
        settings = _old_settings(header, kind)
        settings |= {name: _text(block) for name, block in content.items() if name in RUN_SETTINGS}
    else:
        loss = floats[FIELD_LOSS]
        lr_steps = header[FIELD_LR_STEPS]
        lines = _text(content["config"]).split("\n")
        settings = dict(line.split(" = ", 1) for line in lines if " = " in line)
    if not np.isfinite(loss):
        raise UserError(f"{path} is damaged: its loss is no number")
    config, run = read_settings(settings, kind, path)
    config.lr_steps = max(0, int(lr_steps))
    if "class_names" in content:
        most = config.num_classes if config.class_cond else 0
        parse_class_names(content["class_names"].tobytes(), path, 0, most)
    if not re.fullmatch("[0-9a-f]{8}|", sections.get("data_checksum", "")):
        raise UserError(f"{path} is damaged: its section data_checksum is no checksum")
    return Checkpoint(config, sections, step, float(loss), tensors, run=run, version=version)


def _read_old_weights(path, header, data):
    """[12345678, B, C_in, C_model, C_out, H, W, max_period, has_adamw, has_rng, undefined ...], then data."""
    batch, c_in, c_model, c_out, height, width = (int(v) for v in header[1:7])
    max_period, has_adamw, has_rng = (int(v) for v in header[7:10])
    if c_in != c_out or height != width:
        raise UserError(f"{path} is a model from {c_in} to {c_out} channels at {height}x{width}, which can't"
                        f" be used here: both sizes and both channels must be equal")
    if not (has_adamw in (0, 1) and has_rng in (0, 1) and batch >= 0):
        raise UserError(f"{path} is damaged: its fields B, has_adamw and has_rng are {batch}, {has_adamw},"
                        f" {has_rng}")
    config = Config(image_size=height, in_channels=c_in, num_channels=c_model, max_period=max_period,
                    attention_resolutions=(height // 4, height // 8)).check(path)
    skipped = 48 * batch * c_in * height * width if has_rng else 0  # the old program's generator states
    names = ("weights", "adam_m", "adam_v") if has_adamw else ("weights",)
    parameters, rest = divmod(len(data) - HEADER_BYTES - skipped, 4 * len(names))
    if rest or parameters < 1:
        raise UserError(f"{path} is cut short or too long: its {len(data)} bytes fit no number of parameters")
    end = HEADER_BYTES + 4 * parameters * len(names)
    arrays = data[HEADER_BYTES:end].view("<f4").reshape(len(names), -1)
    return Checkpoint(config, dict(zip(names, arrays)), old=True)


def _written_sections(checkpoint, tensors):
    """{name: bytes-like parts} of a Checkpoint's sections, in the order of the file. tensors: {name: arrays}."""
    written = {}
    for name, arrays in tensors.items():
        written[name] = [np.ascontiguousarray(array, "<f4").ravel().view(np.uint8).data for array in arrays]
    sections = checkpoint.sections
    if "state" in sections:
        written["state"] = [sections["state"].pack()]
    written["config"] = [config_section(checkpoint.config, checkpoint.run)]
    for name in TEXT_SECTIONS:
        if name in sections:
            written[name] = [sections[name].encode("utf-8", "surrogateescape")]
    return written


def write_checkpoint(path, checkpoint):
    """Write a new .bin; it replaces `path` only once it is whole.

    A tensor section is a list of the parameters' float32 arrays in PyTorch's order, or one array of all of them; then
    checkpoint.tensors must tell how many they are.
    """
    tensors = {name: checkpoint.sections[name] for name in TENSOR_SECTIONS if name in checkpoint.sections}
    tensors = {name: value if isinstance(value, (list, tuple)) else [value] for name, value in tensors.items()}
    sizes = {name: sum(map(np.size, arrays)) for name, arrays in tensors.items()}
    parameters = sizes["weights"]
    assert set(sizes.values()) == {parameters}

    sections = _written_sections(checkpoint, tensors)
    header = np.zeros(256, "<i4")
    header[:2] = [checkpoint.config.magic, WEIGHTS_VERSION]
    header[FIELD_SECTIONS] = len(sections)
    header[FIELD_STEP] = checkpoint.step
    header[FIELD_PARAMETERS] = parameters
    header[FIELD_TENSORS] = checkpoint.tensors or len(tensors["weights"])
    for i, (name, parts) in enumerate(sections.items()):
        length = sum(map(len, parts))
        entry = name.encode("ascii").ljust(24, b"\0") + length.to_bytes(8, "little")
        header[128 + 8 * i:136 + 8 * i] = np.frombuffer(entry, "<i4")
    blocks = itertools.chain.from_iterable(sections.values())
    header.view("<f4")[FIELD_LOSS] = checkpoint.smoothed_loss
    header[FIELD_LR_STEPS] = checkpoint.config.lr_steps
    with replacing(path) as file:
        _write_with_header(file, header, blocks, FIELD_CHECKSUM)


def write_old_weights(path, config, weights, m=None, v=None, batch=0, has_rng=False):
    """Write an old weights file from flat float32 arrays, with junk in the undefined fields; only for tests."""
    header = np.full(256, -559038737, "<i4")
    header[:10] = [OLD_WEIGHTS_MAGIC, batch, config.in_channels, config.num_channels, config.in_channels,
                   config.image_size, config.image_size, config.max_period, m is not None, has_rng]
    with replacing(path) as file:
        file.write(header.tobytes())
        for array in (weights, m, v):
            if array is not None:
                file.write(np.asarray(array, "<f4").tobytes())
        if has_rng:
            file.write(bytes(48 * batch * config.in_channels * config.image_size**2))


def what_it_holds(path):
    """What a file holds by its header: "images", "weights", "a checkpoint of a run", that is more than weights; else ""."""
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        return ""
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), "<i4")
    if header[0] == IMAGES_MAGIC:
        return "images"
    if header[0] == OLD_WEIGHTS_MAGIC:
        return "a checkpoint of a run" if header[8] else "weights"  # has_adamw
    if header[0] not in (WEIGHTS_MAGIC, DIT_MAGIC):
        return ""
    names = {_section(header, i)[0] for i in range(16)}
    has_more = names & set(TENSOR_SECTIONS) - {"weights"}
    return "a checkpoint of a run" if has_more else "weights"


def check_kept(path, flag, *kinds):
    """Raise UserError where the file that a flag names holds one of these kinds (see what_it_holds), and would be lost."""
    holds = what_it_holds(path)
    if holds in kinds:
        raise UserError(f"{path} holds {holds}; name another file with --{flag}")


def check_replaced(path, flag, is_ours, what):
    """Raise UserError where the file that a flag names holds something that this command did not write.

    is_ours(path): whether the command wrote this file. what: the name of such files. An empty file may be replaced.
    """
    if os.path.isfile(path) and os.path.getsize(path) and not is_ours(path):
        holds = what_it_holds(path) or f"no {what} of an earlier call"
        raise UserError(f"{path} holds {holds}; name another file with --{flag}")


def _weights_in(folder):
    """The paths of the files with weights in a folder, those with the most steps first."""
    steps = {}
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.endswith(".bin"):
            with contextlib.suppress(UserError):
                header, _ = _map_file(path, [WEIGHTS_MAGIC], "holds no weights")
                steps[path] = int(header[FIELD_STEP])
    return sorted(steps, key=steps.get, reverse=True)


def newest_checkpoint(place):
    """(path, Checkpoint) of the file `place`, or of the undamaged checkpoint with the most steps in the folder `place`."""
    for path in _weights_in(place) if os.path.isdir(place) else [place]:
        try:
            checkpoint = read_checkpoint(path)
        except UserError as error:
            if path == place:
                raise
            print(f"skipped: {error}", file=sys.stderr)
            continue
        if checkpoint.old:
            raise UserError(f"{path} is of an earlier trainer and does not tell its step, so that it can't be resumed: start"
                            f" a new run from its weights with --model_weights {path}")
        if "adam_m" in checkpoint.sections:
            return path, checkpoint
    raise UserError(f"{place} holds no checkpoint to resume from (weights alone start a new run:"
                    f" --model_weights FILE)")


# ----------------------------------------------------------------------------------------------------
# 7. tensor files, for tests: [TENS, version, count, 0 ...]; each: name (64 bytes), type, ndim, 4 dims, data

TENSOR_TYPES = (np.dtype("<f4"), np.dtype("<f8"), np.dtype("<i4"))
TENSOR_HEADER = np.dtype([("name", "S64"), ("type", "<i4"), ("ndim", "<i4"), ("dims", "<i8", 4)])


def write_tensors(path, tensors):
    """Write {name: float32, float64 or int32 array of at most 4 dimensions}."""
    header = np.zeros(256, "<i4")
    header[:3] = [TENSORS_MAGIC, 1, len(tensors)]
    with replacing(path) as file:
        file.write(header.tobytes())
        for name, array in tensors.items():
            array = np.asarray(array)
            dims = list(array.shape) + [1] * (4 - array.ndim)
            assert len(name) <= 64, name
            entry = (name.encode(), TENSOR_TYPES.index(array.dtype), array.ndim, dims)
            file.write(np.array(entry, TENSOR_HEADER).tobytes() + array.tobytes())


def read_tensors(path):
    """{name: array} from a tensor file. Raises UserError."""
    refusal = "is no tensor file of version 1"
    header, data = _map_file(path, [TENSORS_MAGIC], refusal)
    if header[1] != 1:
        raise UserError(f"{path} {refusal}")
    tensors = {}
    at = HEADER_BYTES
    for _ in range(int(header[2])):
        if at + TENSOR_HEADER.itemsize > len(data):
            raise UserError(f"{path} is cut short at byte {at}")
        entry = np.frombuffer(data[at:at + TENSOR_HEADER.itemsize].tobytes(), TENSOR_HEADER)[0]
        at += TENSOR_HEADER.itemsize
        kind = int(entry["type"])
        ndim = int(entry["ndim"])
        dims = [int(d) for d in entry["dims"]]
        if not (0 <= kind < 3 and 0 <= ndim <= 4 and min(dims) >= 0):
            raise UserError(f"{path} is damaged at byte {at}")
        size = math.prod(dims) * TENSOR_TYPES[kind].itemsize
        if at + size > len(data):
            raise UserError(f"{path} is cut short at byte {at}")
        values = np.frombuffer(data[at:at + size].tobytes(), TENSOR_TYPES[kind])
        tensors[entry["name"].decode("ascii", "replace")] = values.reshape(dims[:ndim])
        at += size
    return tensors


# ----------------------------------------------------------------------------------------------------
# 8. pictures

def to_uint8(x):
    """Pixels of images in [-1, 1] (clamped, NaN is -1): floor((x + 1) * 127.5 + 0.5) in float32, as uint8."""
    x = np.asarray(x, np.float32)
    x = np.clip(np.where(np.isnan(x), np.float32(-1), x), -1, 1)
    return np.floor((x + np.float32(1)) * np.float32(127.5) + np.float32(0.5)).astype(np.uint8)


def picture_format(path, channels=3):
    """The name of the format that Pillow writes to a file with this ending. Raises UserError where it can't, or not such
    pictures."""
    from PIL import Image
    ending = os.path.splitext(path)[1].lower()
    name = Image.registered_extensions().get(ending)
    mode = ("L", "LA", "RGB", "RGBA")[channels - 1]
    try:
        Image.new(mode, (16, 16)).save(io.BytesIO(), name or "none")
    except (KeyError, OSError, ValueError):  # e.g. formats that are only read, or only in black and white
        endings = ".png, .jpg or another ending that Pillow writes"
        if channels % 2 == 0:
            endings = ".png or another ending that Pillow writes with transparency"
        raise UserError(f"{path} must end in {endings}") from None
    return name


def encode_picture(file, pixels, kind):
    """Write uint8 (C, H, W), grey, grey and alpha, RGB or RGBA, into an open file, in a format of Pillow's."""
    from PIL import Image
    array = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    if array.shape[-1] == 1:
        array = array[..., 0]
    Image.fromarray(array).save(file, kind)


def save_picture(path, pixels):
    """Write a picture as encode_picture takes it, in the format that the name's ending tells; whole or not at all."""
    path = os.fspath(path)
    try:
        with replacing(path) as file:
            encode_picture(file, pixels, picture_format(path, len(pixels)))
    except ValueError as error:
        raise UserError(f"{path} can't be written: {error}") from None


def grid_columns(n, groups, image_size):
    """How many of n pictures stand in a row of their grid, which is about square.

    groups: of how many groups, such as classes, there are equally many pictures, 0 if of none. A group then has a row of its
    own or, where the grid would have more than 4,000 pixels a side, shares one with other groups.
    """
    square = math.ceil(math.sqrt(n))
    if not groups:
        return square
    each = n // groups
    if max(each, groups) * (image_size + 2) <= 4000:
        return each
    return square // each * each or square


def rows_text(names, n, groups, columns):
    """' (rows: cat, dog)': what the rows of a grid show, where classes have rows or share them."""
    if not groups or not names or columns % (n // groups):
        return ""
    together = columns // (n // groups)
    kind = "rows" if together == 1 else f"{together} in a row"
    return f" ({kind}: {', '.join(names)})"


def draw_grid(pixels, columns=None, gap=2):
    """Pictures, uint8 (N, C, H, W), as one, (C, height, width), row by row on white, `gap` pixels around and between.

    columns: pictures in a row; about square unless given.
    """
    n, channels, height, width = pixels.shape
    columns = columns or grid_columns(n, 0, width)
    rows = math.ceil(n / columns)
    grid = np.full((channels, gap + rows * (height + gap), gap + columns * (width + gap)), 255, np.uint8)
    for i in range(n):
        y = gap + i // columns * (height + gap)
        x = gap + i % columns * (width + gap)
        grid[:, y:y + height, x:x + width] = pixels[i]
    return grid


def save_grid(path, pixels, columns=None, gap=2):
    """Write what draw_grid draws."""
    save_picture(path, draw_grid(pixels, columns, gap))


def save_arrays(path, pixels, classes=None):
    """Write the .npz that the evaluators of guided-diffusion and others read.

    It holds pixels, uint8 (N, C, H, W), as arr_0, (N, H, W, C), and classes, if they are given, as arr_1, int64 (N,).
    """
    arrays = [np.ascontiguousarray(np.moveaxis(pixels, 1, -1))]
    if classes is not None:
        arrays.append(np.array(classes, np.int64))
    with replacing(path) as file:
        np.savez(file, *arrays)


# ----------------------------------------------------------------------------------------------------
# 9. pictures in a terminal

def terminal_display():
    """How standard output can show a picture: "kitty", by its graphics protocol; "iterm", as an inline image of
    iTerm2; "half blocks", as coloured text; "" where it can't.

    Only the environment is looked at, since a terminal that is asked may never answer.
    """
    env = {name: os.environ.get(name, "") for name in (
        "TERM", "TERM_PROGRAM", "LC_TERMINAL", "KITTY_WINDOW_ID", "TMUX", "STY", "ZELLIJ", "NO_COLOR",
        "LC_ALL", "LC_CTYPE", "LANG")}
    term = env["TERM"]
    program = env["TERM_PROGRAM"]
    if not sys.stdout.isatty() or term in ("", "dumb"):
        return ""
    # tmux and its like draw the screen themselves, and pass no pictures on
    is_inside = term.startswith(("tmux", "screen")) or env["TMUX"] or env["STY"] or env["ZELLIJ"]
    # a program that kitty starts, such as another terminal, inherits its KITTY_WINDOW_ID
    is_kitty = term == "xterm-kitty" or not program and env["KITTY_WINDOW_ID"]
    is_ghostty = term == "xterm-ghostty" or program == "ghostty"
    is_iterm = program == "iTerm.app" or env["LC_TERMINAL"] == "iTerm2"  # the second also over ssh
    is_like_iterm = program in ("WezTerm", "mintty")
    if not is_inside and (is_kitty or is_ghostty):
        return "kitty"
    if not is_inside and (is_iterm or is_like_iterm):
        return "iterm"
    locale = (env["LC_ALL"] or env["LC_CTYPE"] or env["LANG"]).lower()
    is_utf8 = "utf-8" in locale or "utf8" in locale
    return "half blocks" if is_utf8 and not env["NO_COLOR"] else ""


def kitty_picture(png, cells):
    """The text that shows a PNG, so many cells wide, in chunks of 4,096 characters; q=2 asks the terminal not to answer.
    https://sw.kovidgoyal.net/kitty/graphics-protocol/"""
    encoded = base64.b64encode(png).decode()
    chunk = 4096
    keys = f"a=T,f=100,q=2,c={cells},"  # of the first chunk
    shown = ""
    for at in range(0, len(encoded), chunk):
        has_more = at + chunk < len(encoded)
        shown += f"\x1b_G{keys}m={has_more:d};{encoded[at:at + chunk]}\x1b\\"
        keys = ""
    return shown + "\n"


def iterm_picture(png, cells):
    """The text that shows a PNG, so many cells wide. https://iterm2.com/documentation-images.html"""
    encoded = base64.b64encode(png).decode()
    return f"\x1b]1337;File=inline=1;size={len(png)};width={cells}:{encoded}\a\n"


def half_blocks(picture, columns):
    """A picture, uint8 (C, height, width), as text, scaled down to so many columns.

    Each cell shows two pixels: the upper one by the colour of its sign, the upper half block, the lower one by the colour of
    its background. A pixel is the mean of those of the picture that it covers. What is transparent lies over white.
    """
    channels, height, width = picture.shape
    w = min(width, columns)
    rows = max(1, height * w // width // 2)
    left = np.arange(w + 1) * width // w
    top = np.arange(2 * rows + 1) * height // (2 * rows)

    wide = picture.astype(np.int64)
    alpha = wide[-1] if channels % 2 == 0 else np.int64(255)
    colours = wide[:3] if channels >= 3 else wide[[0, 0, 0]]
    sums = colours * alpha + 255 * (255 - alpha)
    sums = np.add.reduceat(np.add.reduceat(sums, top[:-1], axis=1), left[:-1], axis=2)
    whole = 255 * np.diff(top)[:, None] * np.diff(left)
    means = np.moveaxis((sums + whole // 2) // whole, 0, -1)  # (2 * rows, w, 3)

    def cell(upper, lower):
        return "\x1b[38;2;{};{};{};48;2;{};{};{}m\u2580".format(*upper, *lower)

    text = ""
    for upper_row, lower_row in zip(means[0::2], means[1::2]):
        text += "".join(map(cell, upper_row, lower_row)) + "\x1b[0m\n"
    return text


def show_grid(grid):
    """Show a picture, uint8 (C, height, width), where standard output is a terminal that can; as ./train_unet does."""
    display = terminal_display()
    if not display or max(grid.shape) > 4000:
        return
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except OSError:
        columns = 80
    if display == "half blocks":
        shown = half_blocks(grid, columns)
    else:
        file = io.BytesIO()
        encode_picture(file, grid, "PNG")
        cells = min((grid.shape[2] + 7) // 8, columns)  # a cell is some 8 pixels wide, or 16 on a fine screen
        as_text = kitty_picture if display == "kitty" else iterm_picture
        shown = as_text(file.getvalue(), cells)
    sys.stdout.write(shown)
