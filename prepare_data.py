"""A folder or zip of images, a picture, an IDX file or an array -> one .bin of small squares to train on.

    python prepare_data.py --data_dir FOLDER_OR_ZIP --output_name FILE.bin --image_size 64
    python prepare_data.py --data_dir train-images-idx3-ubyte.gz --labels --output_name FILE.bin
    python prepare_data.py --data_dir latents.npz --labels --data_std 1 --output_name FILE.bin

Takes the formats in FORMATS, told by a file's content. Each picture (the first, where a file holds several)
is turned as its EXIF data says, laid on white where it is transparent, cropped to its central square and
resized with antialiasing. Links are followed; a real folder or file that has several names is taken once, so
that no link leads in circles and no picture lies on both sides of a split. Files that can't be read are
named, counted and skipped, and files whose ending is no picture's are counted. A folder that can't be listed
is refused, because nobody knows what would be missing. Images are written as they come, so that of each only
its path, its identity and a label stay in memory. The grey images of an IDX file, as MNIST has them, are not
resized but set on black; their labels come from the file beside it.

An array, (N, C, H, W) of C 1 to 4 and H = W, comes from a .npy file or from a .npz, where it is called
`images` or stands alone beside the integers (N,) called `labels`. uint8 are pixels. Floats, such as latents
that another program encoded, are stored as float32, as they are or with the standard deviation of --data_std,
which should be about 1 for training. To draw with a model of such data use --threshold none, and
generate.py --output_name FILE.npy; what is drawn there is to be divided by the factor printed here.
"""
import collections
import concurrent.futures
import contextlib
import gzip
import io
import math
import os
import signal
import stat
import sys
import threading
import warnings
import zipfile
import zlib

import unet_io  # first, because it explains a missing package

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from tqdm import tqdm

from unet_io import UserError, counted, printable

# What Pillow may open. It knows more, but EPS starts another program, and others are no pictures or have no
# decoder. TGA comes last, because its files begin with no mark of their own.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "GIF", "TIFF", "BMP", "DIB", "JPEG2000", "PPM", "ICO", "PSD",
           "DDS", "QOI", "SGI", "PCX", "TGA")
ENDINGS = {ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS}
OPENED = [kind for kind in FORMATS if kind in Image.OPEN]  # some builds of Pillow lack a decoder
MAX_FILE_BYTES = 256 << 20  # a larger file is no picture worth decoding
MAX_IDX_BYTES = 1 << 36     # of an IDX file, as its header claims
AHEAD = 64                  # pictures decoded before they are written, at most ...
AHEAD_BYTES = 256 << 20     # ... and bytes of them
GREY16 = (np.arange(65536) / 257 + 0.5).astype(np.uint8).tolist()  # 16 bits of grey -> 8


class Share:
    """At most `total` of something in use at a time; who asks for more than that waits to be alone."""
    def __init__(self, total):
        self.total, self.used, self.changed = total, 0, threading.Condition()

    @contextlib.contextmanager
    def take(self, n):
        """`with share.take(n):` waits until n can be had, and gives them back at the end."""
        with self.changed:
            self.changed.wait_for(lambda: not self.used or self.used + n <= self.total)
            self.used += n
        try:
            yield
        finally:
            with self.changed:
                self.used -= n
                self.changed.notify_all()


# Memory. Who holds pixels never waits for file bytes, so that nobody waits for ever.
FILE_BYTES = Share(MAX_FILE_BYTES)
PIXELS = Share(64 << 20)  # each takes up to 16 bytes while a picture is decoded, laid on white and resized
Image.core.set_block_size(64 << 20)  # so large ones glibc gives back at once, others it keeps a thread


def note(text):
    print(f"note: {printable(text)}", file=sys.stderr)


def is_hidden(name):
    return os.path.basename(name).startswith(".") or "__MACOSX" in name


def may_be_image(name):
    """Whether to try a file: its ending is a picture's, or it has none, and it isn't hidden."""
    ending = os.path.splitext(name)[1].lower()
    return not is_hidden(name) and (not ending or ending in ENDINGS)


class Source:
    """What Folder and Zip have in common.

    names: the files to try, sorted. known: (device, inode) of every file that is read. repeated: how often
    what was taken already was met again. others: {ending: files that are not tried}, hidden ones aside.
    """
    def __init__(self, path):
        self.path, self.names, self.known = path, [], set()
        self.repeated, self.others = 0, collections.Counter()

    def leave_alone(self, name):
        if not is_hidden(name):
            self.others[os.path.splitext(name)[1].lower()] += 1


class Folder(Source):
    """The files below a folder, by their paths relative to it. Raises UserError if a folder can't be listed.

    only: a file in it, which is taken alone.
    Links come after all that is no link, so that real paths win. All is sorted, so that the order in which
    the file system lists a folder changes nothing.
    """
    REPEATED = "led to a folder or file that is taken already, under another name"

    def __init__(self, path, only=""):
        super().__init__(path)
        self.faults = {}  # name: why it is no file to open
        folders, found, links = set(), collections.deque([only]), collections.deque()
        while found or links:
            name, is_link = (found.popleft(), False) if found else (links.popleft(), True)
            place = os.path.join(path, name)
            try:
                status = os.stat(place)
            except OSError as error:
                if not is_link:
                    raise self.unreadable(place, error) from None
                self.names.append(name)
                self.faults[name] = f"a link that leads nowhere ({error.strerror})"
                continue
            identity = status.st_dev, status.st_ino
            if stat.S_ISDIR(status.st_mode) and identity not in folders:
                folders.add(identity)
                for entry in self.entries(place):
                    (links if entry.is_symlink() else found).append(os.path.join(name, entry.name))
            elif stat.S_ISDIR(status.st_mode) or may_be_image(name) and identity in self.known:
                self.repeated += 1
            elif may_be_image(name):
                self.names.append(name)
                self.known.add(identity)
                if not stat.S_ISREG(status.st_mode):
                    self.faults[name] = "no regular file"
            else:
                self.leave_alone(name)
        self.names.sort()

    def entries(self, place):
        """What lies in a folder, sorted."""
        try:
            with os.scandir(place) as listing:
                return sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            raise self.unreadable(place, error) from None

    @staticmethod
    def unreadable(place, error):
        return UserError(f"{place} can't be read ({error.strerror}), so that its pictures would be"
                         f" missing: make it readable, or move it away")

    @contextlib.contextmanager
    def open(self, name):
        """(open file, its bytes) of a regular file. Raises ValueError where it is something else, OSError."""
        if name in self.faults:
            raise ValueError(self.faults[name])
        # Should a pipe have taken the file's place meanwhile, opening it must not wait for a writer.
        with open(os.path.join(self.path, name), "rb",
                  opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("no regular file")
            yield file, status.st_size


class Zip(Source):
    """The files in a zip, by their names there; nothing is ever unpacked to a place of that name."""
    REPEATED = "came again in the zip; the last of a name counts, as when it is unpacked"

    def __init__(self, path):
        super().__init__(path)
        try:
            status = os.stat(path)
            self.archive = zipfile.ZipFile(path)
        except OSError as error:
            raise UserError(f"{path} can't be read: {error.strerror or error}") from None
        except Exception as error:  # zipfile raises nearly anything on damaged files
            raise UserError(f"{path} can't be read as a zip: {error or 'it is damaged'}") from None
        self.known.add((status.st_dev, status.st_ino))
        entries = [entry for entry in self.archive.infolist() if not entry.filename.endswith("/")]
        self.entries = {entry.filename: entry for entry in entries}
        self.repeated = len(entries) - len(self.entries)
        for name in sorted(self.entries):
            if may_be_image(name):
                self.names.append(name)
            else:
                self.leave_alone(name)

    @contextlib.contextmanager
    def open(self, name):
        """(open file, its bytes as the zip claims; no more are read). Raises what zipfile raises."""
        entry = self.entries[name]
        if entry.flag_bits & 1:
            raise ValueError("encrypted")
        with self.archive.open(entry) as file:
            yield file, entry.file_size


def class_name(source, name):
    """The name of the folder that an image lies in: one line of text."""
    folder = os.path.basename(os.path.dirname(name)) or os.path.splitext(os.path.basename(
        os.path.abspath(source.path)))[0]
    return printable(" ".join(folder.split()))


def load_image(data, image_size, channels=3):
    """The bytes of a picture file -> uint8 (channels, image_size, image_size). Raises what Pillow raises.

    channels: 1 grey, 3 RGB, 4 RGBA; only the last keeps what is transparent.
    """
    image = Image.open(io.BytesIO(data), formats=OPENED)
    pixels = image.width * image.height
    image.draft(image.mode, (2 * image_size, 2 * image_size))  # a JPEG is decoded no larger than needed
    if not image.info.get("progressive"):                      # these are held whole even so
        pixels = image.width * image.height
    with PIXELS.take(pixels + image_size**2):
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode == "F":
            raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
        if image.mode == "I" or image.mode.startswith("I;16"):
            image, clear = image.convert("I"), image.info.get("transparency")
            low, high = image.getextrema()
            if low < 0 or high > 65535:
                raise ValueError(f"its pixels go from {low} to {high}; save it with 8 or 16 bits")
            white = {clear: 255} if isinstance(clear, int) else {}
            image = image.point([white.get(i, grey) for i, grey in enumerate(GREY16)], "L")
            image.info.pop("transparency", None)
        if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
            image = image.convert("RGBA")
            if channels < 4:
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        image = image.convert("RGBA" if channels == 4 else "RGB").resize(
            (image_size, image_size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
        image = image.convert("L") if channels == 1 else image
    return np.asarray(image).reshape(image_size, image_size, channels).transpose(2, 0, 1).copy()


def read_idx(path, dimensions):
    """uint8 array of an IDX file, plain or gzip. Raises UserError.

    It holds 0, 0, the type, the number of dimensions, their sizes (big-endian), the values.
    """
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with (gzip.open if packed else open)(path, "rb") as file:
            head = file.read(4 + 4 * dimensions)
            if len(head) < 4 + 4 * dimensions or head[:4] != bytes([0, 0, 8, dimensions]):
                raise UserError(f"{path} is no IDX file of bytes in {counted(dimensions, 'dimension')}")
            shape = np.frombuffer(head[4:], ">i4").tolist()
            count = math.prod(shape) if min(shape) > 0 else 0
            data = file.read(count + 1) if count < MAX_IDX_BYTES else b""
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from None
    if not count or len(data) != count:
        raise UserError(f"{path} is damaged: its header asks for {count} bytes, and {len(data)} follow")
    return np.frombuffer(data, np.uint8).reshape(shape)


def is_idx(path):
    return os.path.isfile(path) and "idx3-ubyte" in os.path.basename(path)


def prepare_idx(path, output_name, image_size=0, labels=False, val_fraction=0.0, channels=1):
    """As prepare, of an IDX file of images (N, H, W); image_size 0: the next multiple of 8."""
    images = read_idx(path, 3)
    n, height, width = images.shape
    size = image_size or -(-max(height, width) // 8) * 8
    if size < max(height, width):
        raise UserError(f"{path} holds {width}x{height} images, which are not shrunk: --image_size {size} is"
                        f" too small")
    names = [None] * n
    if labels:
        beside = os.path.join(os.path.dirname(path), os.path.basename(path).replace(
            "images", "labels").replace("idx3", "idx1"))
        numbers = read_idx(beside, 1)
        if len(numbers) != n:
            raise UserError(f"{beside} has {len(numbers)} labels for {n} images")
        names = _class_numbers(numbers)
    top, left = (size - height) // 2, (size - width) // 2

    def padded(i):
        pixels = np.zeros((channels, size, size), np.uint8)
        pixels[:, top:top + height, left:left + width] = images[i]
        if channels == 4:
            pixels[3] = 255
        return pixels
    return _write_all(output_name, padded, names, val_fraction)


def _class_numbers(numbers):
    """The names of numbered classes, which sort as the numbers do."""
    return [f"{number:0{len(str(numbers.max()))}}" for number in numbers]


def _write_all(output_name, image, names, val_fraction):
    """As prepare, of the images image(0), image(1) ... and as many names of classes."""
    held_out = _held_out(len(names), val_fraction)
    outputs = _outputs(output_name, held_out)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(unet_io.image_writer(output)) for output in outputs]
        for i, name in enumerate(tqdm(names, "preparing", disable=None)):
            writers[i in held_out].add(image(i), name)
        for writer in writers:
            writer.finish()
    return len(names) - len(held_out), len(held_out), 0


def read_array(path, labels):
    """(images (N, C, H, W), labels (N,) or None) of a .npy or .npz file. Raises UserError."""
    try:
        arrays = np.load(path, mmap_mode="r")
        arrays = arrays if isinstance(arrays, np.lib.npyio.NpzFile) else {"images": arrays}
        rest = [name for name in arrays if name != "labels"]
        name = rest[0] if len(rest) == 1 else "images"
        images, numbers = arrays[name], arrays["labels"] if labels else None
    except KeyError as error:
        raise UserError(f"{path} has no array called {error.args[0].split()[0]}") from None
    except Exception as error:  # NumPy raises nearly anything on damaged files
        why = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise UserError(f"{path} can't be read as NumPy's arrays: {why}") from None
    n, channels, height, width = images.shape if images.ndim == 4 else (0, 0, 0, 0)
    if images.dtype.kind != "f" and images.dtype != np.uint8 or not n or not 1 <= channels <= 4 \
            or height != width or not width:
        raise UserError(f"{path} holds {images.dtype} of shape {images.shape}: floats or uint8 (N, C, H, W)"
                        f" are needed, with 1 to 4 channels and H = W")
    if labels and (numbers.shape != (n,) or numbers.dtype.kind not in "iu" or numbers.min() < 0):
        raise UserError(f"{path} has labels of {numbers.dtype} and shape {numbers.shape}: {n} integers from"
                        f" 0 on are needed")
    return images, numbers


def prepare_array(path, output_name, labels=False, val_fraction=0.0, data_std=0.0):
    """As prepare, of NumPy's arrays. data_std: what floats are scaled to; 0: they are not. Prints theirs."""
    images, numbers = read_array(path, labels)
    names = _class_numbers(numbers) if labels else [None] * len(images)
    if images.dtype == np.uint8:
        if data_std:
            raise UserError(f"--data_std is for floats, and {path} holds bytes")
        return _write_all(output_name, lambda i: images[i], names, val_fraction)

    def mean_of(function):
        with np.errstate(over="ignore", invalid="ignore"):  # of what is refused below
            values = (function(image.astype(np.float32).astype(np.float64)).mean() for image in images)
            return sum(values) / len(images)
    mean = mean_of(lambda x: x)
    std = math.sqrt(mean_of(lambda x: np.square(x - mean))) if math.isfinite(mean) else math.nan
    if not 0 < std < math.inf:
        raise UserError(f"{path} has the mean {mean:g} and the standard deviation {std:g}: nothing can be"
                        f" learnt from it")
    factor = np.float32(data_std / std if data_std else 1)
    unet_io.say(f"mean {mean:.5g}, standard deviation {std:.5g}; stored times {factor:.8g}")
    return _write_all(output_name, lambda i: images[i].astype(np.float32) * factor, names, val_fraction)


def _outputs(output_name, held_out):
    """The files to write: output_name and, where images are held out, NAME_val.bin beside it."""
    stem, ending = os.path.splitext(output_name)
    return [output_name] + ([f"{stem}_val{ending}"] if held_out else [])


def _held_out(n, val_fraction):
    """Which of n images are held out, a set of indices. Raises UserError where a side would be empty."""
    held_out = round(val_fraction * n)
    if val_fraction and not 0 < held_out < n:
        raise UserError(f"--val_fraction {val_fraction} of {counted(n, 'image')} leaves nothing on one side")
    return set(unet_io.permutation(0, 0, n)[:held_out].tolist())


def in_order(pool, function, items, ahead):
    """Yield function(item) of each item, in order; the pool has at most `ahead` of them in hand."""
    waiting = collections.deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def prepare(data_dir, output_name, image_size, labels=False, val_fraction=0.0, channels=3):
    """Write output_name (and NAME_val.bin); returns (images written, images held out, files skipped).

    data_dir: a folder, a zip or a picture. image_size: height and width in pixels. labels: store the name of
    each image's folder. val_fraction: how much to hold out, from 0 to below 1. channels: see load_image.
    Which images are held out depends only on the sorted list of files, and the same files always give the
    same bytes. The outputs appear once they are whole. Raises UserError.
    """
    if os.path.isdir(data_dir):
        source = Folder(data_dir)
    elif os.path.isfile(data_dir) and os.path.splitext(data_dir)[1].lower() in ENDINGS:
        source = Folder(*os.path.split(data_dir))
    elif os.path.isfile(data_dir):
        source = Zip(data_dir)
    else:
        what = "is neither a folder nor a file" if os.path.exists(data_dir) else "does not exist"
        raise UserError(f"{data_dir} {what}: --data_dir takes a folder or a zip of images")
    names, others = source.names, sum(source.others.values())
    if not names:
        raise UserError(f"{data_dir} has no images: of its {counted(others, 'file')} none ends in"
                        f" .png, .jpg or the like")
    in_validation = _held_out(len(names), val_fraction)
    held_out = len(in_validation)
    outputs = _outputs(output_name, held_out)
    for output in outputs:
        with contextlib.suppress(OSError):
            status = os.stat(output)
            if (status.st_dev, status.st_ino) in source.known:
                raise UserError(f"{output} is one of the files to read from {data_dir}, so it can't be"
                                f" written: choose another name")
    if source.repeated:
        note(f"{counted(source.repeated, 'name')} {source.REPEATED}")
    if others:
        kinds = ", ".join(f"{n} {kind}" for kind, n in source.others.most_common(6))
        note(f"{counted(others, 'file')} not tried, because no picture ends so: {kinds}"
             + (" ..." if len(source.others) > 6 else ""))

    def load(name):
        try:
            with source.open(name) as (file, size):
                if size > MAX_FILE_BYTES:
                    raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MB")
                with FILE_BYTES.take(size):
                    return load_image(file.read(size), image_size, channels), None
        except UnidentifiedImageError:
            return None, f"{name}: not a picture of a known format"
        except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
            return None, f"{name}: {getattr(error, 'strerror', '') or error or type(error).__name__}"

    skipped, counts = 0, [0, 0]
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(unet_io.image_writer(output)) for output in outputs]
        pool = concurrent.futures.ThreadPoolExecutor()
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        pictures = in_order(pool, load, names, min(AHEAD, 1 + AHEAD_BYTES // (3 * image_size**2)))
        for i, (pixels, error) in enumerate(tqdm(pictures, "preparing", len(names), disable=None)):
            if error:
                skipped += 1
                tqdm.write(f"skipped {printable(error)}", file=sys.stderr)
                continue
            side = i in in_validation
            writers[side].add(pixels, class_name(source, names[i]) if labels else None)
            counts[side] += 1
        if not counts[0]:
            raise UserError(f"of {counted(len(names), 'file')} in {data_dir} none could be read as an"
                            f" image")
        if held_out and not counts[1]:
            raise UserError(f"of {counted(held_out, 'file')} held out none could be read as an image")
        for writer in writers:  # both or neither: one beside an old other would not be a split
            writer.finish()
    return counts[0], counts[1], skipped


@contextlib.contextmanager
def clean_stop():
    """`with clean_stop():` SIGTERM and SIGHUP stop the block as Ctrl-C does; further signals do nothing."""
    stopped = False

    def stop(*_):
        nonlocal stopped
        if not stopped:
            stopped = True
            raise KeyboardInterrupt
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for kind, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(kind, stop)
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


def main():
    parser = unet_io.Parser(description=__doc__)
    add = parser.add_argument
    add("--data_dir", required=True, metavar="PLACE",
        help="a folder, searched to any depth, a zip, a picture, an IDX file of images, .npy or .npz")
    add("--output_name", required=True, metavar="FILE.bin", help="the file to write")
    add("--output_dir", default="", metavar="FOLDER", help="where --output_name lies (default: here)")
    add("--image_size", type=int, metavar="N",
        help="height and width in pixels (default: 64; of an IDX file, the next multiple of 8)")
    add("--channels", type=int, choices=(1, 3, 4), metavar="N",
        help="1 grey, 3 RGB, 4 RGBA (default: 3, of an IDX file 1)")
    add("--labels", nargs="?", type=unet_io.parse_bool, const=True, default=False, metavar="X",
        help="label each image with the name of its folder, of an IDX file or a .npz with its number")
    add("--val_fraction", type=float, default=0.0, metavar="F",
        help="hold out this part of the images, as FILE_val.bin (default: 0)")
    add("--data_std", type=float, default=0.0, metavar="X",
        help="scale an array of floats to this standard deviation (1 is usual; default: 0, not at all)")
    args = parser.parse_args()
    idx = is_idx(args.data_dir)
    array = os.path.isfile(args.data_dir) and args.data_dir.lower().endswith((".npy", ".npz"))
    if array and (args.image_size, args.channels) != (None, None):
        raise UserError(f"{args.data_dir} is an array, which has its own size and channels: leave"
                        f" --image_size and --channels out")
    if not 0 <= args.data_std < math.inf or args.data_std and not array:
        raise UserError(f"--data_std {args.data_std:g} must be 0 or more, and goes with a .npy or .npz only")
    if args.image_size is None:
        args.image_size = 0 if idx else 64
    elif not 1 <= args.image_size <= 4096:
        raise UserError(f"--image_size {args.image_size} must be from 1 to 4096, and for training a"
                        f" multiple of 8")
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val_fraction {args.val_fraction} must be from 0 to below 1")
    if args.output_dir and os.path.isabs(args.output_name):
        raise UserError(f"--output_name {args.output_name} says itself which folder it lies in: leave"
                        f" --output_dir {args.output_dir} out")
    output = os.path.join(args.output_dir, args.output_name)
    if not os.path.basename(output):
        raise UserError(f"--output_name {args.output_name!r} names no file")
    with clean_stop():
        if array:
            done = prepare_array(args.data_dir, output, args.labels, args.val_fraction, args.data_std)
        else:
            done = (prepare_idx if idx else prepare)(args.data_dir, output, args.image_size, args.labels,
                                                     args.val_fraction, args.channels or (1 if idx else 3))
    written, held_out, skipped = done
    size = np.fromfile(output, "<i4", 5)[4]  # the header's width
    unet_io.say(f"wrote {output}: {counted(written, 'image')} of {size}x{size},"
                f" {held_out} more held out for validation, {counted(skipped, 'file')} skipped")


warnings.simplefilter("error", Image.DecompressionBombWarning)  # such a file is skipped like any bad one

if __name__ == "__main__":
    unet_io.run_script(main)
