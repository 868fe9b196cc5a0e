"""A folder or zip of images, a picture, an IDX file or an array -> one .bin of small squares to train on.

    python3 prepare_data.py --data_dir FOLDER_OR_ZIP --output_name FILE.bin --image_size 64
    python3 prepare_data.py --data_dir FOLDER_OR_ZIP --labels --val_fraction 0.1 --output_name FILE.bin
    python3 prepare_data.py --data_dir CLIP_ART --fit trim --distinct 16 --output_name FILE.bin
    python3 prepare_data.py --data_dir train-images-idx3-ubyte.gz --labels --output_name FILE.bin
    python3 prepare_data.py --data_dir latents.npz --labels --data_std 1 --output_name FILE.bin

Pictures. Takes the formats in FORMATS, told by a file's content. Each picture (the first, where a file holds
several) is turned as its EXIF data says, converted to sRGB where it has a colour profile, laid on white where
it is transparent, cropped to its central square (or as --fit says) and resized with antialiasing. Links are
followed; a real folder or file that has several names is taken once, so that no link leads in circles and no
picture lies on both sides of a split. Hidden files and folders are left out. Files that can't be read are
named, counted and skipped, and files whose ending is no picture's are counted. A folder that can't be listed
is refused, because nobody knows what would be missing. --distinct leaves out every picture that looks like one
before it in the order of the paths, whichever side of a split either is on. Images are written as they come,
so that of each only its path, its identity and a label stay in memory, and with --distinct a thumbnail. Grey
pictures of 16 bits have one white for all: 65535, or where none of them comes near it, that of the fewest bits
that hold them all, or --white_level.

Classes. --labels folder, or --labels alone, takes the name of the folder that a picture lies in, --label_level
N that of the N-th folder on the way down from --data_dir: of FOLDER/cat/images/x.png level 1 is cat and level
2 images. --labels prefix takes the file's name before its first underscore. --labels FILE.csv (or .tsv) reads
lines `file,label`, whose first may be a header; FILE.json holds {file: label}, or a list of [file, label] or
of {"file": file, "label": label}, which may itself be called "labels". A file is named by its path below
--data_dir, or by as much of that path's end as tells it apart, with or without its ending. Both files of a
split list the classes of both. Names that are whole numbers are in the order of numbers, others in that of
their letters.

The grey images of an IDX file, as MNIST has them, are not resized but set on black; their labels come from
the file beside it. An array, (N, C, H, W) or (N, H, W, C) of C 1 to 4 and H = W, comes from a .npy file or
from a .npz, where it is called `images` or `arr_0`, or stands alone beside the integers (N,) called `labels`
or `arr_1`. Labels keep their numbers as names. uint8 are pixels. Floats, such as latents that another program
encoded, are stored as float32, as they are or with the standard deviation of --data_std, which should be
about 1 for training. To draw with a model of such data use --threshold none, and generate.py --output_name
FILE.npy; what is drawn there is to be divided by the factor printed here. Where black and white of an array
can't be told, --range LOW,HIGH tells them.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import csv
import dataclasses
import functools
import gzip
import io
import json
import math
import os
import re
import signal
import stat
import sys
import threading
import warnings
import zipfile
import zlib

import unet_io  # first, because it explains a missing package

import numpy as np
from PIL import Image, ImageChops, ImageCms, ImageOps, UnidentifiedImageError
from tqdm import tqdm

from unet_io import UserError, class_order, counted, listed, nfc, printable

# What Pillow may open. It knows more formats, but EPS starts another program, and the others hold no pictures or
# have no decoder. TGA comes last, because its files begin with no mark of their own.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "GIF", "TIFF", "BMP", "DIB", "JPEG2000", "PPM", "ICO", "PSD",
           "DDS", "QOI", "SGI", "PCX", "TGA")
ENDINGS = {ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS}
OPENED = [kind for kind in FORMATS if kind in Image.OPEN]  # some builds of Pillow lack a decoder
MAX_FILE_BYTES = 256 << 20  # a larger file is no picture worth decoding
MAX_IDX_BYTES = 1 << 36     # the most that the header of an IDX file may claim
AHEAD = 64                  # so many pictures at most are decoded before they are written ...
AHEAD_BYTES = 256 << 20     # ... and so many bytes of them
HANDFUL = 5                 # a class should have as many images
LEFT_OUT = {"@eaDir", "#recycle", "$RECYCLE.BIN", "__MACOSX"}  # hidden like what begins with a dot


class Share:
    """At most `total` of something in use at a time; who asks for more than that waits to be alone."""
    def __init__(self, total):
        self.total = total
        self.used = 0
        self.changed = threading.Condition()

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


# What all threads together may hold. A thread that holds PIXELS never waits for FILE_BYTES, so that none waits for ever.
FILE_BYTES = Share(MAX_FILE_BYTES)
PIXELS = Share(64 << 20)  # each takes up to 16 bytes while a picture is decoded, laid on white and resized
# glibc returns blocks of this size to the system as soon as they are freed; smaller ones it keeps, for each thread.
Image.core.set_block_size(64 << 20)


def note(text):
    print(f"note: {printable(text)}", file=sys.stderr)


def is_hidden(part):
    """Whether a part of a path names what no user means: a hidden file, a trash, a folder of thumbnails."""
    return part in LEFT_OUT or part.startswith(".") and part not in (".", "..")


def may_be_image(name):
    """Whether to try a file: its ending is a picture's, or it has none."""
    ending = os.path.splitext(name)[1].lower()
    return not ending or ending in ENDINGS


def as_class(text):
    """The name of a class from any text: one line, without what a terminal would obey, in NFC."""
    return printable(nfc(" ".join(text.split())))


def why_failed(error):
    """What an exception says, or its type where it says nothing."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# ----------------------------------------------------------------------------------------------------
# places

class Source:
    """What Folder and Zip have in common.

    names: the files to try, sorted.
    known: (device, inode) of every file that is read.
    repeated: how often a name led to what was taken already.
    others: {ending: how many files are not tried}, hidden ones aside.
    hidden: {a hidden name: how many files are left out with it}.
    """
    def __init__(self, path):
        self.path = path
        self.names = []
        self.known = set()
        self.repeated = 0
        self.others = collections.Counter()
        self.hidden = collections.Counter()

    def leave_alone(self, name):
        self.others[os.path.splitext(name)[1].lower()] += 1

    def notes(self):
        """What is to be said of the files that are not tried."""
        if self.repeated:
            yield f"{counted(self.repeated, 'name')} {self.REPEATED}"
        if self.hidden:
            kinds = listed(name for name, _ in self.hidden.most_common())
            yield f"{counted(self.hidden.total(), 'file')} left out as hidden: {kinds}"
        if self.others:
            yield self.note_of_others()

    def note_of_others(self):
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.others.most_common(6))
        text = f"{counted(self.others.total(), 'file')} not tried, because no picture ends so: {kinds}"
        if len(self.others) > 6:
            text += " ..."
        if ".heic" in self.others or ".heif" in self.others:
            text += "; Pillow can't read .heic: convert them first, for instance with heif-convert"
        return text


def files_below(entry):
    """How many files there are in what os.scandir found: 1 where it is no folder."""
    if not entry.is_dir(follow_symlinks=False):
        return 1
    return sum(len(files) for _, _, files in os.walk(entry.path))


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
        self.folders = set()  # (device, inode) of every folder that was listed
        self.waiting = collections.deque([only])  # names that are no links
        self.waiting_links = collections.deque()
        while self.waiting or self.waiting_links:
            if self.waiting:
                self.take(self.waiting.popleft(), is_link=False)
            else:
                self.take(self.waiting_links.popleft(), is_link=True)
        self.names.sort()

    def take(self, name, is_link):
        """List the folder, or take in the file, that a name stands for."""
        place = os.path.join(self.path, name)
        try:
            status = os.stat(place)
        except OSError as error:
            if not is_link:
                raise self.unreadable(place, error) from None
            self.names.append(name)
            self.faults[name] = f"a link that leads nowhere ({error.strerror})"
            return
        identity = status.st_dev, status.st_ino
        if stat.S_ISDIR(status.st_mode):
            if identity in self.folders:
                self.repeated += 1
            else:
                self.folders.add(identity)
                self.list_folder(name)
        elif not may_be_image(name):
            self.leave_alone(name)
        elif identity in self.known:
            self.repeated += 1
        else:
            self.names.append(name)
            self.known.add(identity)
            if not stat.S_ISREG(status.st_mode):
                self.faults[name] = "no regular file"

    def list_folder(self, name):
        """Put what lies in a folder among the names that wait to be taken."""
        for entry in self.entries(os.path.join(self.path, name)):
            if is_hidden(entry.name):
                self.hidden[entry.name] += files_below(entry)
                continue
            queue = self.waiting_links if entry.is_symlink() else self.waiting
            queue.append(os.path.join(name, entry.name))

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

        def open_at_once(path, flags):
            """Open without waiting: a pipe may have taken the file's place meanwhile, and would wait for a writer."""
            return os.open(path, flags | os.O_NONBLOCK)

        with open(os.path.join(self.path, name), "rb", opener=open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("no regular file")
            yield file, status.st_size

    def read(self, name):
        """The bytes of any file."""
        with open(os.path.join(self.path, name), "rb") as file:
            return file.read()


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
            takes = ""
            if not path.lower().endswith(".zip"):
                takes = "; --data_dir takes a folder or a zip of images, a picture, an IDX file, a .npy or a .npz"
            raise UserError(f"{path} can't be read as a zip: {str(error) or 'it is damaged'}{takes}") from None
        self.known.add((status.st_dev, status.st_ino))
        self.entries = {}
        for entry in self.archive.infolist():
            name = self.name_of(entry)
            if name.endswith("/"):  # a folder
                continue
            self.repeated += name in self.entries
            self.entries[name] = entry
        for name in sorted(self.entries):
            hidden = next(filter(is_hidden, name.split("/")), None)
            if hidden:
                self.hidden[hidden] += 1
            elif may_be_image(name):
                self.names.append(name)
            else:
                self.leave_alone(name)

    @staticmethod
    def name_of(entry):
        """Its name with / between folders, and in UTF-8 where that was not declared, as macOS writes it."""
        name = entry.filename
        if not entry.flag_bits & 0x800:
            with contextlib.suppress(UnicodeError):
                name = name.encode("cp437").decode()
        from_dos = entry.create_system == 0
        return name.replace("\\", "/") if from_dos else name

    @contextlib.contextmanager
    def open(self, name):
        """(open file, its bytes as the zip claims; no more are read). Raises what zipfile raises."""
        entry = self.entries[name]
        if entry.flag_bits & 1:
            raise ValueError("encrypted")
        with self.archive.open(entry) as file:
            yield file, entry.file_size

    def read(self, name):
        """The bytes of any file. Raises what zipfile raises."""
        if name not in self.entries:
            raise ValueError("there is no such file")
        return self.archive.read(self.entries[name])


def open_source(data_dir):
    """The Source of a folder, a zip or a picture. Raises UserError."""
    if os.path.isdir(data_dir):
        return Folder(data_dir)
    if not os.path.isfile(data_dir):
        what = "is neither a folder nor a file" if os.path.exists(data_dir) else "does not exist"
        raise UserError(f"{data_dir} {what}: --data_dir takes a folder or a zip of images")
    if os.path.splitext(data_dir)[1].lower() in ENDINGS:
        return Folder(os.path.dirname(data_dir) or ".", os.path.basename(data_dir))
    return Zip(data_dir)


# ----------------------------------------------------------------------------------------------------
# classes

FILE_COLUMNS = {"file", "file_name", "filename", "filepath", "file_path", "path", "image", "image_name",
                "image_path", "image_id", "img", "id"}
LABEL_COLUMNS = {"label", "labels", "class", "class_name", "classname", "category", "target"}
# Names of folders: of the two sides of a split, and all that are no class.
TRAINING = {"train", "training"}
HELD_OUT = {"test", "testing", "val", "valid", "validation"}
NO_CLASSES = TRAINING | HELD_OUT | {"images", "image", "imgs", "pictures", "photos"}


def labelled(source, labels, level):
    """({file: name of its class}, sorted, of the files that have one; whether the names may be class numbers).

    labels: folder, prefix or a file of labels. level: which folder's name counts, 0 for the innermost.
    Raises UserError.
    """
    if labels == "folder":
        return folder_classes(source, level), False
    if labels == "prefix":
        found = {name: prefix_class(name) for name in source.names}
        why = "no underscore in their names"
    else:
        found = file_classes(source, labels)
        why = f"no label in {labels}"
    without = [name for name, label in found.items() if not label]
    if len(without) == len(found):
        raise UserError(f"{source.path} has no picture with a class: all have {why}, as {without[0]}")
    if without:
        note(f"{counted(len(without), 'picture')} left out, with {why}: {listed(without)}")
    with_class = {name: label for name, label in found.items() if label}
    return with_class, labels != "prefix"


def folder_classes(source, level):
    """{file: name of the folder that gives its class}"""
    folders = {name: name.split("/")[:-1] for name in source.names}  # around each file, the outermost first
    if level:
        for name, path in folders.items():
            if len(path) < level:
                raise UserError(f"--label_level {level} needs as many folders around each picture, and {name}"
                                f" in {source.path} has {len(path)}")
        return one_class_each({name: path[level - 1] for name, path in folders.items()})

    own = os.path.basename(os.path.abspath(source.path))
    if not os.path.isdir(source.path):
        own = os.path.splitext(own)[0]
    stray = [name for name, path in folders.items() if not path]
    if 0 < len(stray) < len(folders):
        note(f"the class {as_class(own)!r} has {counted(len(stray), 'picture')} from outside the class folders:"
             f" {listed(stray)}")
    found = one_class_each({name: path[-1] if path else own for name, path in folders.items()})
    note_outer_folders(folders.values(), set(found.values()))
    return found


def note_outer_folders(paths, inner):
    """Offer --label_level where the innermost folders look like no classes.

    paths: the folders around each file. inner: the classes by the innermost of them.
    """
    depth = min(map(len, paths)) - 1  # as many levels lie outside of every innermost folder
    offers = []
    for i in range(depth):
        names = {as_class(path[i]) for path in paths}
        if len(names) > 1:
            offers.append(f"--label_level {i + 1} gives {len(names)} ({listed(class_order(names))})")
    if offers and (len(inner) == 1 or {name.lower() for name in inner} <= NO_CLASSES):
        note(f"the innermost folders give {counted(len(inner), 'class')} ({listed(class_order(inner))});"
             f" {', '.join(offers)}")


def one_class_each(folders):
    """{file: class} from {file: name of its folder}. Folders that become one class are noted."""
    classes = {folder: as_class(folder) for folder in sorted(set(folders.values()))}
    nameless = next((folder for folder, name in classes.items() if not name), None)
    if nameless is not None:
        raise UserError(f"the folder {nameless!r} has no name that a class could have: rename it")
    groups = {}
    for folder, name in classes.items():
        groups.setdefault(name, []).append(folder)
    for name, group in groups.items():
        if len(group) > 1:
            note(f"the folders {listed(map(repr, group))} become one class, {name}")
    return {file: classes[folder] for file, folder in folders.items()}


def prefix_class(name):
    """A file's name before its first underscore, as in guided-diffusion; "" where there is none."""
    prefix, underscore, _ = os.path.basename(name).partition("_")
    return as_class(prefix) if underscore else ""


def file_classes(source, path):
    """{file: name of its class, "" without one} as a .csv, .tsv or .json says. Raises UserError."""
    text = read_labels(source, path)
    find = Finder(path, source)
    pairs = json_pairs(path, text) if path.lower().endswith(".json") else table_pairs(path, text, find)
    if not pairs:
        raise UserError(f"{path} holds no labels")
    found = dict.fromkeys(source.names, "")
    missing = []
    for file, label in pairs:
        name = find(file)
        label = as_class(label)
        if name is None:
            missing.append(file)
        elif found[name] not in ("", label):
            raise UserError(f"{path} gives {name} two labels, {found[name]} and {label}: leave one")
        else:
            found[name] = label
    if len(missing) == len(pairs):
        raise UserError(f"{path} names no picture in {source.path}: it begins with {missing[0]}, the pictures"
                        f" with {source.names[0]}")
    if missing:
        note(f"{counted(len(missing), 'file')} of {path} not found in {source.path}: {listed(missing)}")
    return found


def read_labels(source, path):
    """The text of a file of labels: of the one at this path, or else of that within the source. Raises UserError."""
    try:
        if os.path.exists(path):
            with open(path, "rb") as file:
                data = file.read()
        else:
            data = source.read(path)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not in UTF-8: save it so") from None
    except Exception as error:  # zipfile raises nearly anything on damaged files
        raise UserError(f"--labels {path} can't be read, neither from here nor in {source.path}:"
                        f" {why_failed(error)}") from None


class Finder:
    """find(file): which picture a file of labels means by this; None where there is no such.

    Either path may be the end of the other's, and what is named may lack its ending.
    """
    def __init__(self, path, source):
        self.path = path
        self.source = source
        self.whole = {}  # path of a picture, with and without its ending: the pictures that it may mean
        self.ends = {}   # the same for every end of such a path
        for name in source.names:
            for named in (name, os.path.splitext(name)[0]):
                named = nfc(named)
                self.whole.setdefault(named, []).append(name)
                for end in self.ends_of(named):
                    self.ends.setdefault(end, []).append(name)

    @staticmethod
    def ends_of(path):
        """b/c.png and c.png of a/b/c.png."""
        parts = path.split("/")
        return ["/".join(parts[i:]) for i in range(1, len(parts))]

    def __call__(self, file):
        file = os.path.normpath(nfc(file).replace("\\", "/"))
        ways = [self.whole.get(file), self.ends.get(file), *map(self.whole.get, self.ends_of(file))]
        for names in filter(None, ways):
            if len(set(names)) > 1:
                raise UserError(f"{self.path} names {file}, which may be {names[0]} or {names[1]} in"
                                f" {self.source.path}: name its folder and its ending")
            return names[0]
        return None


def table_pairs(path, text, find):
    """[(file, label)] of a .csv or .tsv."""
    first = text.partition("\n")[0]
    delimiter = "\t" if path.lower().endswith(".tsv") else max(",;\t", key=first.count)
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise UserError(f"{path} can't be read as a table: {error}") from None
    rows = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    if not rows:
        return []
    file_column, label_column, has_header = table_columns(path, rows[0], find)
    for row in rows:
        if len(row) != len(rows[0]):
            raise UserError(f"{path} has a line of {counted(len(row), 'column')} where others have {len(rows[0])}:"
                            f" {','.join(row)}")
    return [(row[file_column], row[label_column]) for row in rows[has_header:]]


def table_columns(path, first, find):
    """(column of the files, column of the labels, whether the first row is a header) of a table that begins with it."""
    files = columns_called(FILE_COLUMNS, first)
    labels = columns_called(LABEL_COLUMNS, first)
    if len(files) == len(labels) == 1:
        return files[0], labels[0], True
    if len(first) != 2:
        raise UserError(f"{path} has {counted(len(first), 'column')}, of which a header must call one `file` and one"
                        f" `label`; it begins with {','.join(first)}")
    ending = os.path.splitext(first[0])[1].lower()
    is_header = ending not in ENDINGS and find(first[0]) is None
    if is_header:
        note(f"{path} begins with {','.join(first)}, which is taken for a header")
    return 0, 1, is_header


def columns_called(words, header):
    """The columns over which a table's header has one of these words."""
    return [i for i, cell in enumerate(header) if cell.lower() in words]


class Pairs(list):
    """An object of JSON, with every key that comes twice."""


def json_pairs(path, text):
    """[(file, label)] of a .json."""
    try:
        content = json.loads(text, object_pairs_hook=Pairs)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read as JSON: {error}") from None
    if isinstance(content, Pairs) and [key for key, _ in content].count("labels") == 1:
        inner = dict(content)["labels"]
        content = inner if isinstance(inner, list) else content
    if not isinstance(content, list):
        raise UserError(f"{path} holds neither an object of labels nor a list of [file, label]")
    pairs = []
    for entry in content:
        pair = file_and_label(entry) if isinstance(entry, Pairs) else entry
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or type(pair[1]) not in (str, int):
            shown = json.dumps(dict(entry) if isinstance(entry, Pairs) else entry)[:80]
            raise UserError(f"{path} holds {shown}, which is no file with a label, a text or a whole number")
        pairs.append((pair[0], str(pair[1])))
    return pairs


def file_and_label(entry):
    """[file, label] of an object of JSON that has one of each; otherwise []."""
    files = [value for key, value in entry if key.lower() in FILE_COLUMNS]
    labels = [value for key, value in entry if key.lower() in LABEL_COLUMNS]
    return files + labels if len(files) == len(labels) == 1 else []


def with_gaps(names):
    """Where all classes are numbers, 0 to the largest, so that number n is class n; otherwise the names as they are.

    They also stay as they are where more numbers would have to be added than there are names.
    """
    if not all(re.fullmatch("0|[1-9][0-9]*", name) for name in names):
        return names
    if max(map(len, names)) > 9:  # far more than there can be images
        return names
    end = max(map(int, names)) + 1
    if end > 2 * len(names):
        return names
    return [str(number) for number in range(end)]


def print_classes(names, numbers):
    """A table of the classes: how many images each has, and how many held out. Of more than 40 it shows 25.

    names: every class. numbers: {name: images} of the file and, where images are held out, of their file.
    """
    width = max(min(40, max(map(len, names))), len("name"))

    def print_row(number, name, cells):
        unet_io.say(f"  {number:>5}  {name:{width}}" + "".join(f"  {cell:>8}" for cell in cells))

    print_row("class", "name", ("images", "held out")[:len(numbers)])
    hidden = range(20, len(names) - 5) if len(names) > 40 else range(0)
    for i, name in enumerate(names):
        if i not in hidden:
            shown = name if len(name) <= width else name[:width - 3] + "..."
            print_row(i, shown, [count[name] for count in numbers])
        elif i == hidden[0]:
            unet_io.say(f"    ...  {len(hidden)} more")
    if hidden:
        counts = [numbers[0][name] for name in names]
        unet_io.say(f"{len(names)} classes of {min(counts)} to {max(counts)} images")


def warn_of_classes(names, numbers):
    """Notes of what training with these classes would hardly be meant to be."""
    folded = collections.Counter(name.casefold() for name in names)
    alike = [name for name in names if folded[name.casefold()] > 1]
    if alike:
        note(f"{counted(len(alike), 'class')} that differ by capital letters only: {listed(alike)}")
    if len(names) == 1:
        note(f"all images are of one class, {names[0]}, which tells a model nothing")
    empty = [name for name in names if not numbers[0][name]]
    if empty:
        note(f"{counted(len(empty), 'class')} without an image to train on, to be left out when drawing: {listed(empty)}")
    few = [f"{name} {numbers[0][name]}" for name in names if 0 < numbers[0][name] < HANDFUL]
    if few:
        note(f"{counted(len(few), 'class')} of fewer than {HANDFUL} images to train on: {listed(few)}")


# ----------------------------------------------------------------------------------------------------
# pictures

class Remarks:
    """What a set of pictures showed, a number or a True each. Threads append to these lists.

    unconverted: those whose colour profile is of no use.
    several: files with more than one picture.
    deep: the largest value of each grey picture of 16 bits.
    deep_colours: the largest value, in 8 bits, of each picture of 16 bits a channel.
    """
    def __init__(self):
        self.unconverted = []
        self.several = []
        self.deep = []
        self.deep_colours = []

    def notes(self, white_level):
        """What is to be said of them."""
        if self.several:
            yield f"{counted(len(self.several), 'file')} with several pictures, whose first was taken"
        if self.unconverted:
            yield (f"{counted(len(self.unconverted), 'picture')} with a colour profile that can't be used,"
                   f" whose colours were kept as if in sRGB")
        if white_level and not self.deep:
            yield f"--white_level {white_level} does nothing: no grey picture has 16 bits"
        if self.deep:
            told = "65535, unless --white_level tells another"
            if white_level:
                told = f"{white_level}, as --white_level says"
            yield f"{counted(len(self.deep), 'grey picture')} of 16 bits with values up to {max(self.deep)}: white is {told}"
        if self.deep_colours and max(self.deep_colours) < 64:
            yield (f"{counted(len(self.deep_colours), 'picture')} of 16 bits a channel are nearly black, as if"
                   f" they held fewer bits: save them with 8 bits, since Pillow reads the upper 8 only")


def white_of(most):
    """The white of grey pictures of 16 bits, none of which has a larger value than `most`."""
    for bits in (8, 10, 12, 14):
        if most < 1 << bits:
            return (1 << bits) - 1
    return 65535


@functools.lru_cache
def grey_table(white, inverted):
    """A list of what each value of 16 bits becomes in 8, from black to white. inverted: 0 is white."""
    values = np.arange(65536).clip(0, white)
    if inverted:
        values = white - values
    return (values * 255 / white + 0.5).astype(np.uint8).tolist()


def grey_of_16_bits(image, tags, white_level, remarks):
    """The picture in mode L, or LA where one of its values is transparent. tags: those of a TIFF. Raises ValueError."""
    clear = image.info.get("transparency")
    image = image.convert("I")
    low, high = image.getextrema()
    if low < 0 or high > 65535:
        raise ValueError(f"its pixels go from {low} to {high}; save it with 8 or 16 bits")
    has_12_bits = tags.get(258) == (12,)  # BitsPerSample: here 12 bits are no guess
    if has_12_bits:
        white_level = 4095
    if high > white_level:
        raise ValueError(f"it has a pixel of {high}, above --white_level {white_level}")
    if not has_12_bits:
        remarks.deep.append(high)
    zero_is_white = tags.get(262) == 0  # PhotometricInterpretation
    grey = image.point(grey_table(white_level, zero_is_white), "L")
    grey.info.pop("transparency", None)
    if isinstance(clear, int):
        alpha = image.point([255 * (value != clear) for value in range(65536)], "L")
        grey = Image.merge("LA", (grey, alpha))
    return grey


GREYS = ("1", "L", "LA", "La")


@functools.lru_cache(maxsize=64)
def to_srgb(profile, kind):
    """(ImageCms's transform to sRGB, the mode that it takes) for pixels of the mode RGB, L, CMYK or LAB.

    None where a profile is sRGB itself, to 2 of 255. Raises what ImageCms raises, ValueError.
    """
    if kind == "LAB":
        source = ImageCms.createProfile("LAB")
        mode = "LAB"
    else:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        mode = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}.get(space)
        if mode != kind and (mode, kind) != ("RGB", "L"):  # grey may be shown by the curve of an RGB profile
            raise ValueError(f"a profile of {space} for pixels of {kind}")
    transform = ImageCms.buildTransform(
        source, ImageCms.createProfile("sRGB"), mode, "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC,
        ImageCms.Flags.BLACKPOINTCOMPENSATION)
    if mode in ("RGB", "L") and changes_nothing(transform, mode):
        return None
    return transform, mode


def changes_nothing(transform, mode):
    """Whether a transform of RGB or L keeps colours from all over that space, to 2 of 255."""
    levels = np.arange(0, 256, 15, np.uint8)
    if mode == "RGB":
        colours = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, -1, 3)
    else:
        colours = levels[None]
    probe = Image.fromarray(colours)
    before = np.asarray(probe.convert("RGB"), int)
    after = np.asarray(ImageCms.applyTransform(probe, transform), int)
    return np.abs(after - before).max() <= 2


def profile_kind(mode):
    """The mode for which to_srgb has a transform, of a picture in this mode."""
    if mode in GREYS:
        return "L"
    if mode in ("CMYK", "LAB"):
        return mode
    return "RGB"


def transform_of(image, profile, remarks):
    """What to_srgb says of a picture; None also where its profile is of no use."""
    kind = profile_kind(image.mode)
    if not profile and kind != "LAB":
        return None
    try:
        return to_srgb(profile, kind)
    except Exception:  # ImageCms raises nearly anything on damaged profiles
        remarks.unconverted.append(True)
        return None


def converted(image, transform, mode):
    """The picture in sRGB: RGB, or RGBA from RGBA."""
    alpha = image.getchannel("A") if image.mode == "RGBA" else None
    if mode == "L":
        image = image.getchannel("R")
    elif mode == "RGB":
        image = image.convert("RGB")
    image = ImageCms.applyTransform(image, transform)
    if alpha:
        image.putalpha(alpha)
    return image


def load_image(data, image_size, channels=3, fit="crop", white_level=65535, remarks=None):
    """The bytes of a picture file -> uint8 (channels, image_size, image_size). Raises what Pillow raises.

    channels: 1 grey, 3 RGB, 4 RGBA; only the last keeps what is transparent. fit: crop takes the central
    square, pad adds what lacks to a square, white or transparent, trim first cuts away what pad would add,
    stretch distorts. white_level: of grey pictures of 16 bits. remarks: a Remarks to add to.
    """
    remarks = remarks or Remarks()
    file = Image.open(io.BytesIO(data), formats=OPENED)
    profile = file.info.get("icc_profile")
    tags = getattr(file, "tag_v2", {})
    is_deep = any(";16" in str(tile[3]) for tile in file.tile)

    pixels = file.width * file.height
    if fit != "trim":  # of which only a part may be needed
        file.draft(file.mode, (2 * image_size, 2 * image_size))  # a JPEG is decoded no larger than needed
    if not file.info.get("progressive"):                         # these are held whole even so
        pixels = file.width * file.height
    with PIXELS.take(pixels + image_size**2):
        ImageOps.exif_transpose(file, in_place=True)
        image = in_8_bits(file, tags, is_deep, white_level, remarks)
        to_convert = transform_of(image, profile, remarks)  # once it is resized

        if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
            image = image.convert("RGBA")
            if channels < 4:
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        keeps_mode = to_convert and to_convert[1] in ("CMYK", "LAB")
        if not keeps_mode:
            image = image.convert("RGBA" if channels == 4 else "RGB")

        if fit == "trim":
            image = trimmed(image)
        image = resized(image, image_size, fit)
        if to_convert:
            image = converted(image, *to_convert)
        if channels == 4:
            image = image.convert("RGBA")
        if fit in ("pad", "trim"):
            image = padded(image)
        if channels == 1:
            image = image.convert("L")
    with contextlib.suppress(Exception):  # what follows the first picture may be damaged
        if file.format in ("GIF", "PNG", "WEBP", "AVIF", "TIFF") and file.is_animated:
            remarks.several.append(True)
    return np.asarray(image).reshape(image_size, image_size, channels).transpose(2, 0, 1).copy()


def in_8_bits(image, tags, is_deep, white_level, remarks):
    """The picture with 8 bits a channel. tags: those of a TIFF. is_deep: whether its file has 16. Raises ValueError."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return grey_of_16_bits(image, tags, white_level, remarks)
    if is_deep:  # Pillow has read the upper 8 bits
        bands = image.getextrema()
        if image.mode in ("LA", "RGBA"):
            bands = bands[:-1]
        remarks.deep_colours.append(max(high for _, high in bands))
    return image


def trimmed(image):
    """The picture without the white around what is drawn, in RGBA without what is transparent there.

    Where nothing is drawn, the picture stays as it is.
    """
    drawn = image.getchannel("A") if image.mode == "RGBA" else ImageChops.invert(image.convert("RGB"))
    return image.crop(drawn.getbbox())


def resized(image, size, fit):
    """The picture in size x size pixels, or with `pad` and `trim` as large as fits within these."""
    box = 0, 0, image.width, image.height
    target = size, size
    if fit == "crop":
        side = min(image.size)
        left = (image.width - side) / 2
        top = (image.height - side) / 2
        box = left, top, left + side, top + side
    elif fit in ("pad", "trim"):
        target = tuple(max(1, round(n * size / max(image.size))) for n in image.size)
    return image.resize(target, Image.Resampling.BICUBIC, box=box)


def padded(image):
    """The picture in the middle of a square that is white, or in RGBA transparent."""
    side = max(image.size)
    background = (0, 0, 0, 0) if image.mode == "RGBA" else "white"
    square = Image.new(image.mode, (side, side), background)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


class Distinct:
    """Tells which pictures look like an earlier one.

    Two look alike where no value differs by more than `tolerance` (of 255) after both were averaged to 16x16 pixels.
    number: how many pictures may come; each that is new takes 1.6 kB of memory where it has three channels.
    """
    def __init__(self, tolerance, number, channels):
        self.tolerance = tolerance
        self.count = 0  # of those that are new
        self.small = np.empty((number, channels, 16, 16), np.int16)
        self.quarters = np.empty((number, channels, 2, 2), np.float32)  # averages of `small` over 8x8 pixels

    def is_new(self, pixels):
        """Whether uint8 (channels, size, size) looks like no picture for which this was asked before."""
        planes = [Image.fromarray(plane).resize((16, 16), Image.Resampling.BOX) for plane in pixels]
        small = np.stack([np.asarray(plane, np.int16) for plane in planes])
        quarters = small.reshape(-1, 2, 8, 2, 8).mean((2, 4))

        # The averages of two pictures differ by no more than their pixels, so that the quarters find the few to compare.
        near = np.abs(self.quarters[:self.count] - quarters).max((1, 2, 3)) <= self.tolerance
        differences = np.abs(self.small[:self.count][near] - small).max((1, 2, 3))
        if (differences <= self.tolerance).any():
            return False
        self.small[self.count] = small
        self.quarters[self.count] = quarters
        self.count += 1
        return True


# ----------------------------------------------------------------------------------------------------
# IDX files and arrays

def read_idx(path, dimensions):
    """uint8 array of an IDX file, plain or gzip. Raises UserError.

    The file holds two bytes 0, then one each for the type (8) and the number of dimensions, then the sizes of
    these as big-endian int32, then the values.
    """
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        opens = gzip.open if packed else open
        with opens(path, "rb") as file:
            head = file.read(4 + 4 * dimensions)
            if len(head) < 4 + 4 * dimensions or head[:4] != bytes([0, 0, 8, dimensions]):
                raise UserError(f"{path} is no IDX file of bytes in {counted(dimensions, 'dimension')}")
            shape = np.frombuffer(head[4:], ">i4").tolist()
            count = math.prod(shape) if min(shape) > 0 else 0
            data = file.read(count + 1) if count < MAX_IDX_BYTES else b""
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} can't be read: {why_failed(error)}") from None
    if not count or len(data) != count:
        raise UserError(f"{path} is damaged: its header asks for {count} bytes, and {len(data)} follow")
    return np.frombuffer(data, np.uint8).reshape(shape)


def is_idx(path):
    return os.path.isfile(path) and "idx3-ubyte" in os.path.basename(path)


def is_array(path):
    return os.path.isfile(path) and path.lower().endswith((".npy", ".npz"))


def prepare_idx(path, output_name, image_size=0, labels=False, val_fraction=0.0, channels=1, value_range=None):
    """As prepare, of an IDX file of images (N, H, W); image_size 0: the next multiple of 8.

    value_range: see prepare_array.
    """
    images = read_idx(path, 3)
    n, height, width = images.shape
    longer = max(height, width)
    size = image_size or math.ceil(longer / 8) * 8
    if size < longer:
        raise UserError(f"{path} holds {width}x{height} images, which are not shrunk: --image_size {size} is"
                        f" too small")
    names = idx_labels(path, n) if labels else [None] * n
    top = (size - height) // 2
    left = (size - width) // 2
    black, white = black_and_white(path, images.dtype, int(images.min()), int(images.max()), value_range)

    def on_black(i):
        pixels = np.zeros((channels, size, size), np.uint8)
        pixels[:, top:top + height, left:left + width] = as_bytes(images[i], black, white)
        if channels == 4:
            pixels[3] = 255
        return pixels

    return _write_all(output_name, on_black, names, val_fraction)


def idx_labels(path, n):
    """The labels of an IDX file of n images, from the file beside it: n texts."""
    name = os.path.basename(path).replace("images", "labels").replace("idx3", "idx1")
    beside = os.path.join(os.path.dirname(path), name)
    numbers = read_idx(beside, 1)
    if len(numbers) != n:
        raise UserError(f"{beside} has {len(numbers)} labels for {n} images")
    return [str(number) for number in numbers.tolist()]


def _write_all(output_name, image, names, val_fraction):
    """Write the images image(0), image(1) ..., of classes with these names, which are numbers; returns as prepare does."""
    held_out = _held_out(len(names), val_fraction)
    outputs = _outputs(output_name, held_out)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(unet_io.image_writer(output)) for output in outputs]
        for i, name in enumerate(tqdm(names, "preparing", disable=None)):
            writers[i in held_out].add(image(i), name)
        classes = _finish(writers, are_numbers=True)
    show_classes(*classes)
    return len(names) - len(held_out), len(held_out), 0


def read_array(path, labels):
    """(images (N, C, H, W), labels (N,) or None) of a .npy or .npz file. Raises UserError."""
    try:
        arrays = np.load(path, mmap_mode="r")
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            arrays = {"images": arrays}
        name, label_name = array_names(arrays)
        images = arrays[name]
        numbers = arrays[label_name] if labels else None
    except KeyError as error:
        raise UserError(f"{path} has no array called {error.args[0].split()[0]}") from None
    except Exception as error:  # NumPy raises nearly anything on damaged files
        why = why_failed(error).split("\n")[0]
        if "pickle" in why:
            why = "it holds Python objects, or is no .npy or .npz file"
        raise UserError(f"{path} can't be read as NumPy's arrays: {why}") from None
    shape = images.shape
    channels_first = has_images(shape, channels=1, height=2, width=3)
    channels_last = has_images(shape, channels=3, height=1, width=2)
    if images.dtype.kind not in "fiub" or not (channels_first or channels_last):
        raise UserError(f"{path} holds {images.dtype} of shape {shape}: numbers (N, C, H, W) or (N, H, W, C)"
                        f" are needed, with 1 to 4 channels and H = W")
    if channels_first and channels_last:
        note(f"{path} has the shape {shape}, which is taken for (N, C, H, W)")
    elif channels_last:
        unet_io.say(f"{path} has the shape {shape}, which is (N, H, W, C)")
        images = images.transpose(0, 3, 1, 2)
    n = len(images)
    if labels and (numbers.shape != (n,) or numbers.dtype.kind not in "iu" or numbers.min() < 0):
        raise UserError(f"{path} has labels of {numbers.dtype} and shape {numbers.shape}: {n} integers from"
                        f" 0 on are needed")
    return images, numbers


def array_names(arrays):
    """(name of the images, name of the labels) among those of a .npz, whether or not there are such arrays."""
    label_name = "labels"
    if "arr_0" in arrays and "labels" not in arrays:
        label_name = "arr_1"
    others = [name for name in arrays if name != label_name]
    if len(others) == 1:
        return others[0], label_name
    if "arr_0" in arrays and "images" not in arrays:
        return "arr_0", label_name
    return "images", label_name


def has_images(shape, channels, height, width):
    """Whether an array of this shape may hold images. channels, height, width: which of its dimensions these are."""
    return len(shape) == 4 and min(shape) > 0 and 1 <= shape[channels] <= 4 and shape[height] == shape[width]


def prepare_array(path, output_name, labels=False, val_fraction=0.0, data_std=0.0, value_range=None):
    """As prepare, of NumPy's arrays. data_std: what floats are scaled to; 0: they are not. Prints theirs.

    value_range: (black, white) of the values; "none": floats are to be taken as they are; None: not told, so
    that bytes are 0 to 255, and floats are what they are, unless these look like something else.
    """
    images, numbers = read_array(path, labels)
    names = [str(number) for number in numbers.tolist()] if labels else [None] * len(images)
    is_float = images.dtype.kind == "f"
    if not is_float and data_std:
        raise UserError(f"--data_std is for floats, and {path} holds {images.dtype}")
    low = min(float(image.min()) for image in images)
    high = max(float(image.max()) for image in images)
    black, white = black_and_white(path, images.dtype, low, high, value_range)

    def pixels(i):
        return as_bytes(images[i], black, white)

    def floats(i):
        if (black, white) == (-1, 1):
            return images[i].astype(np.float32)
        return (2 * (images[i].astype(np.float64) - black) / (white - black) - 1).astype(np.float32)

    if not is_float:
        return _write_all(output_name, pixels, names, val_fraction)
    factor = scale_factor(path, floats, len(images), data_std)
    return _write_all(output_name, lambda i: floats(i) * factor, names, val_fraction)


def scale_factor(path, floats, n, data_std):
    """What gives the images floats(0) ... floats(n - 1) the standard deviation data_std; 1 where data_std is 0.

    Prints it and what they have. Raises UserError.
    """
    mean, std = mean_and_std(floats, n)
    if not 0 < std < math.inf:
        raise UserError(f"{path} has the mean {mean:g} and the standard deviation {std:g}: nothing can be"
                        f" learnt from it")
    with np.errstate(over="ignore"):  # of what is refused below
        factor = np.float32(data_std / std if data_std else 1)
    if not 0 < factor < math.inf:
        raise UserError(f"{path} has a standard deviation of {std:g}, which can't be scaled to --data_std {data_std:g}")
    unet_io.say(f"mean {mean:.5g}, standard deviation {std:.5g}; stored times {factor:.8g}")
    if not data_std and not 0.1 <= std <= 3:
        note(f"training expects a standard deviation of 0.5 to 1, and {path} has {std:.3g}: --data_std 1 scales it")
    return factor


def mean_and_std(floats, n):
    """The mean and the standard deviation of the images floats(0) ... floats(n - 1); either may be infinite or NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean = sum(floats(i).astype(np.float64).mean() for i in range(n)) / n
        if not math.isfinite(mean):
            return mean, math.nan
        variance = sum(np.square(floats(i).astype(np.float64) - mean).mean() for i in range(n)) / n
    return mean, math.sqrt(variance)


def black_and_white(path, dtype, low, high, value_range):
    """(black, white) of an array with values from low to high; see prepare_array. Raises UserError.

    Without value_range bytes are 0 to 255 and floats -1 to 1, unless they look like something else.
    """
    found = f"{path} holds {dtype} from {low:g} to {high:g}"
    is_float = dtype.kind == "f"
    likely = likely_range(low, high)
    if isinstance(value_range, tuple):
        black, white = value_range
        slack = 1e-4 * (white - black) if is_float else 0  # for numbers as they are printed
        if not black - slack <= low <= high <= white + slack:
            raise UserError(f"{found}, outside --range {black:g},{white:g}")
        unet_io.say(f"{dtype} from {low:g} to {high:g}, of which {black:g} is black and {white:g} white")
        return value_range
    if value_range == "none" and not is_float:
        raise UserError(f"--range none is for floats, and {found}: name black and white, as in --range {likely}")
    if is_float and value_range is None and low > -0.2 * high:
        raise UserError(f"{found}, and training takes -1 for black and 1 for white: say what they are with"
                        f" --range {likely}, or --range none to take them as they are")
    if dtype == np.uint8 and high <= 1:
        raise UserError(f"{found} only, nearly black as pixels of 0 to 255: say what is white with --range 0,1 or,"
                        f" where they are so dark, --range 0,255")
    if not is_float and dtype != np.uint8:
        raise UserError(f"{found}: say which of them are black and white, as with --range {likely}")
    return (-1, 1) if is_float else (0, 255)


def likely_range(low, high):
    """What to say after --range, for values from low to high."""
    for white in (1, 255, 4095, 65535):
        if low >= 0 and high <= white:
            return f"0,{white}"
    return "LOW,HIGH"


def as_bytes(values, black, white):
    """Integers from black to white as pixels."""
    if (black, white) == (0, 255):
        return values.astype(np.uint8)
    return (255 * (values.astype(np.float64) - black) / (white - black) + 0.5).astype(np.uint8)


# ----------------------------------------------------------------------------------------------------
# writing

def _outputs(output_name, held_out):
    """The files to write: output_name and, where images are held out, NAME_val.bin beside it."""
    if not held_out:
        return [output_name]
    stem, ending = os.path.splitext(output_name)
    return [output_name, f"{stem}_val{ending}"]


def _held_out(n, val_fraction):
    """Which of n images are held out, a set of indices. Raises UserError where a side would be empty."""
    held_out = round(val_fraction * n)
    if val_fraction and not 0 < held_out < n:
        raise UserError(f"--val_fraction {val_fraction} of {counted(n, 'image')} leaves nothing on one side")
    return set(unet_io.permutation(0, 0, n)[:held_out].tolist())


def _finish(writers, are_numbers):
    """End the files of a split, which list the same classes, and return what show_classes shows: (names, numbers).

    Both files are whole before either gets its name: a new one beside an older other would be no split.
    """
    numbers = [collections.Counter(writer.labels) for writer in writers]
    names = class_order({name for number in numbers for name in number if name is not None})
    if are_numbers and names:
        names = with_gaps(names)
    for writer in writers:
        writer.finish(names)
    return names, numbers


def show_classes(names, numbers):
    """Print the classes, where there are any. It comes after the files, so that a closed output costs the table alone."""
    if names:
        print_classes(names, numbers)
        warn_of_classes(names, numbers)


def in_order(pool, function, items, ahead):
    """Yield function(item) of each item, in order; the pool has at most `ahead` of them in hand."""
    waiting = collections.deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class NotWhite(Exception):
    """Raised when the grey pictures of 16 bits turn out to have another white than was taken for theirs."""
    def __init__(self, white_level):
        super().__init__(white_level)
        self.white_level = white_level


def prepare(data_dir, output_name, image_size, labels="", val_fraction=0.0, channels=3, label_level=0,
            fit="crop", white_level=0, distinct=0):
    """Write output_name (and NAME_val.bin); returns (images written, images held out, files skipped).

    data_dir: a folder, a zip or a picture. image_size: height and width in pixels. labels: where the classes
    come from, folder, prefix or a file, see above; "" for none. val_fraction: how much to hold out, from 0 to
    below 1. label_level: see labelled. channels, fit: see load_image. white_level: 0 as the pictures show.
    distinct: the tolerance within which a picture that looks like an earlier one is left out, see Distinct; 0
    keeps all.
    Which images are held out depends only on the sorted list of files, and the same files always give the
    same bytes. The outputs appear once they are whole. Raises UserError.
    """
    if labels is True:
        labels = "folder"
    if channels not in (1, 3, 4):
        raise UserError(f"pictures can't be given {channels} channels: 1, 3 or 4 are possible")
    source = open_source(data_dir)
    if not source.names:
        hidden = f", and {source.hidden.total()} more are hidden" if source.hidden else ""
        raise UserError(f"{data_dir} has no images: of its {counted(source.others.total(), 'file')} none ends"
                        f" in .png, .jpg or the like{hidden}")
    _held_out(len(source.names), val_fraction)  # refused early
    for text in source.notes():
        note(text)
    note_split_folders(source)
    classes = dict.fromkeys(source.names)
    are_numbers = False
    if labels:
        classes, are_numbers = labelled(source, labels, label_level)
    pictures = PictureSet(source=source, data_dir=data_dir, classes=classes, are_numbers=are_numbers,
                          image_size=image_size, channels=channels, fit=fit, distinct=distinct,
                          output_name=output_name, val_fraction=val_fraction)
    try:
        return pictures.write(white_level)
    except NotWhite as found:
        return pictures.write(found.white_level, has_told_faults=True)


def note_split_folders(source):
    """Note where the names of folders say that somebody has split the pictures."""
    folders = {part.lower() for name in source.names for part in name.split("/")[:-1]}
    if folders & TRAINING and folders & HELD_OUT:
        note(f"{source.path} has pictures in {listed(sorted(folders & (TRAINING | HELD_OUT)))}, and all are read: to keep"
             f" them apart, prepare each alone")


@dataclasses.dataclass
class PictureSet:
    """Pictures that become one file, or the two of a split. Fields that prepare has too are as there."""
    data_dir: str
    source: Source
    classes: dict  # {file: name of its class, or None}, in the order in which they are written
    are_numbers: bool  # whether the names of the classes are
    image_size: int
    channels: int
    fit: str
    distinct: int
    output_name: str
    val_fraction: float

    def write(self, white_level, has_told_faults=False):
        """Write the files, and return what prepare returns. Raises NotWhite, UserError.

        white_level: 0 as the pictures show. has_told_faults: the files that can't be read have been named.
        """
        outputs = _outputs(self.output_name, self.val_fraction)
        in_validation = _held_out(len(self.classes), self.val_fraction)
        remarks = Remarks()
        seen = None
        if self.distinct:
            seen = Distinct(self.distinct, len(self.classes), self.channels)
        skipped = 0
        repeated = 0
        counts = [0, 0]  # images written, images held out
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(unet_io.image_writer(output)) for output in outputs]
            pool = concurrent.futures.ThreadPoolExecutor()
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            bar = tqdm(self.load_all(pool, white_level, remarks), "preparing", len(self.classes), disable=None)
            for i, (label, pixels, error) in enumerate(bar):
                if error:
                    skipped += 1
                    if not has_told_faults:
                        tqdm.write(f"skipped {printable(error)}", file=sys.stderr)
                    continue
                if seen and not seen.is_new(pixels):
                    repeated += 1
                    continue
                side = i in in_validation
                writers[side].add(pixels, label)
                counts[side] += 1

            self.refuse_empty(counts, repeated, len(in_validation))
            if remarks.deep and not white_level:
                white = white_of(max(remarks.deep))
                if white < 65535:
                    raise NotWhite(white)
            for text in remarks.notes(white_level):
                note(text)
            if repeated:
                note(f"{counted(repeated, 'picture')} left out, because an earlier one looks like it")
            names, numbers = _finish(writers, self.are_numbers)
        show_classes(names, numbers)
        return counts[0], counts[1], skipped

    def load_all(self, pool, white_level, remarks):
        """Yield (label, pixels, error) of each file, in order: what `load` returns, by the threads of the pool."""
        load = functools.partial(self.load, white_level=white_level or 65535, remarks=remarks)
        ahead = min(AHEAD, 1 + AHEAD_BYTES // (3 * self.image_size**2))
        for label, (pixels, error) in zip(self.classes.values(), in_order(pool, load, self.classes, ahead)):
            yield label, pixels, error

    def load(self, name, white_level, remarks):
        """(what load_image makes of a file, ""), or (None, why it is skipped)"""
        try:
            with self.source.open(name) as (file, size):
                if size > MAX_FILE_BYTES:
                    raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MB")
                with FILE_BYTES.take(size):
                    pixels = load_image(file.read(size), self.image_size, self.channels, fit=self.fit,
                                        white_level=white_level, remarks=remarks)
                    return pixels, ""
        except UnidentifiedImageError:
            return None, f"{name}: not a picture of a known format"
        except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
            return None, f"{name}: {why_failed(error)}"

    def refuse_empty(self, counts, repeated, held_out):
        """Raise UserError where a file would have no images. repeated: how many --distinct left out."""
        files = counts if self.val_fraction else counts[:1]
        if repeated and not all(files):
            raise UserError(f"--distinct {self.distinct} left out {counted(repeated, 'picture')}, and nothing stays on"
                            f" one side of --val_fraction {self.val_fraction}: choose a smaller --distinct")
        if not counts[0]:
            raise UserError(f"of {counted(len(self.classes), 'file')} in {self.data_dir} none could be read as an"
                            f" image")
        if not all(files):
            raise UserError(f"of {counted(held_out, 'file')} held out none could be read as an image")


def holds_images(path):
    return unet_io.what_it_holds(path) == "images"


def prepare_any(data_dir, output_name, image_size=None, channels=None, labels="", val_fraction=0.0, **options):
    """prepare, prepare_idx or prepare_array, as data_dir is. options: those of these functions."""
    for output in _outputs(output_name, val_fraction):
        unet_io.check_replaced(output, "output_name", holds_images, "images")
    if is_array(data_dir):
        counts = prepare_array(data_dir, output_name, labels, val_fraction, **options)
    elif is_idx(data_dir):
        counts = prepare_idx(data_dir, output_name, image_size or 0, labels, val_fraction, channels or 1, **options)
    else:
        counts = prepare(data_dir, output_name, image_size or 64, labels, val_fraction, channels or 3, **options)
    held_out = _outputs(output_name, True)[1]
    if not val_fraction and holds_images(held_out):
        note(f"{held_out} is of an earlier call; its pictures may be in {output_name} now")
    return counts


# ----------------------------------------------------------------------------------------------------
# command line

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


def parse_labels(text):
    """folder, prefix or a file's name; "" for none. For argparse's `type`."""
    if not text:
        return ""
    with contextlib.suppress(argparse.ArgumentTypeError):
        return "folder" if unet_io.parse_bool(text) else ""
    if text not in ("folder", "prefix") and not text.lower().endswith((".csv", ".tsv", ".json")):
        raise argparse.ArgumentTypeError(f"{text!r} is none of folder, prefix, FILE.csv and FILE.json")
    return text


def parse_range(text):
    """'0,255' as two numbers; 'none'. For argparse's `type`."""
    if text == "none":
        return text
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither none nor two numbers, black's and white's, such"
                                         f" as 0,1")
    return low, high


def joined(words):
    """The words of a command line in which a range may begin with a minus."""
    words = list(words)
    while "--range" in words[:-1]:
        at = words.index("--range")
        words[at:at + 2] = [f"--range={words[at + 1]}"]
    return words


def parse_flags():
    parser = unet_io.Parser(earlier={"--channels": "--in_channels"}, description=__doc__)
    add = parser.add_argument
    add("--data_dir", required=True, metavar="PLACE",
        help="a folder, searched to any depth, a zip, a picture, an IDX file of images, .npy or .npz")
    add("--output_name", required=True, metavar="FILE.bin", help="the file to write")
    add("--output_dir", default="", metavar="FOLDER", help="where --output_name lies (default: here)")
    add("--image_size", type=int, metavar="N",
        help="height and width in pixels (default: 64; of an IDX file, the next multiple of 8)")
    add("--fit", choices=("crop", "pad", "trim", "stretch"),
        help="make a picture square by its middle alone, by adding white (with --in_channels 4: what is"
             " transparent), by cutting that away first, or by distorting it (default: crop)")
    add("--distinct", type=int, default=0, metavar="N",
        help="leave out a picture that looks like an earlier one: averaged to 16x16 pixels, no value differs by more"
             " than N of 255 (16 is usual; default: 0, keep all)")
    add("--in_channels", type=int, choices=(1, 3, 4), metavar="N",
        help="1 grey, 3 RGB, 4 RGBA (default: 3, of an IDX file 1)")
    add("--white_level", type=int, default=0, metavar="N",
        help="the value of white in grey pictures of 16 bits, such as 4095 (default: as they show)")
    add("--labels", nargs="?", type=parse_labels, const="folder", default="", metavar="X",
        help="label each image with the name of its folder (folder, or no X), with the beginning of its own"
             " (prefix) or as a file says (FILE.csv, FILE.json); of an IDX file or a .npz with its number")
    add("--label_level", type=int, default=0, metavar="N",
        help="the folder that gives the class: 1 is the one in --data_dir, 2 the next (default: the innermost)")
    add("--val_fraction", type=float, default=0.0, metavar="F",
        help="hold out this part of the images, as FILE_val.bin (default: 0)")
    add("--data_std", type=float, default=0.0, metavar="X",
        help="scale an array of floats to this standard deviation (1 is usual; default: 0, not at all)")
    add("--range", type=parse_range, dest="value_range", metavar="LOW,HIGH",
        help="the values of black and white in an array, such as 0,1; none: take floats as they are")
    return parser.parse_args(joined(sys.argv[1:]))


def check_flags(args):
    """Raise UserError where a flag is out of its range, or does not go with what --data_dir names."""
    array = is_array(args.data_dir)
    picture = not array and not is_idx(args.data_dir)
    if array and (args.image_size is not None or args.in_channels is not None):
        raise UserError(f"{args.data_dir} is an array, which has its own size and channels: leave"
                        f" --image_size and --in_channels out")
    if args.data_std and not 0.01 <= args.data_std <= 100:
        raise UserError(f"--data_std {args.data_std:g} must be from 0.01 to 100, or 0; training expects 0.5 to 1")
    if args.data_std and not array:
        raise UserError(f"--data_std {args.data_std:g} goes with a .npy or .npz only")
    if args.value_range and picture:
        raise UserError("--range goes with an IDX file, a .npy or .npz only; of 16-bit pictures see --white_level")
    for name in ("fit", "white_level", "label_level", "distinct"):
        if getattr(args, name) and not picture:
            raise UserError(f"--{name} is for pictures, and {args.data_dir} holds an array: leave it out")
    if not picture and args.labels not in ("", "folder"):
        raise UserError(f"--labels {args.labels} is for pictures, and {args.data_dir} has its own labels: say"
                        f" --labels alone")
    if args.label_level and (args.label_level < 1 or args.labels != "folder"):
        raise UserError(f"--label_level {args.label_level} must be 1 or more, and goes with --labels folder")
    if args.white_level and not 1 <= args.white_level <= 65535:
        raise UserError(f"--white_level {args.white_level} must be from 1 to 65535")
    if not 0 <= args.distinct <= 254:
        raise UserError(f"--distinct {args.distinct} must be from 0, which keeps all, to 254")
    if args.image_size is not None and not 1 <= args.image_size <= 4096:
        raise UserError(f"--image_size {args.image_size} must be from 1 to 4096, and for training a"
                        f" multiple of 8")
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val_fraction {args.val_fraction} must be from 0 to below 1")
    if args.output_dir and os.path.isabs(args.output_name):
        raise UserError(f"--output_name {args.output_name} says itself which folder it lies in: leave"
                        f" --output_dir {args.output_dir} out")
    if not os.path.basename(args.output_name):
        raise UserError(f"--output_name {args.output_name!r} names no file")


def main():
    args = parse_flags()
    check_flags(args)
    output = os.path.join(args.output_dir, args.output_name)
    if is_array(args.data_dir):
        options = dict(data_std=args.data_std, value_range=args.value_range)
    elif is_idx(args.data_dir):
        options = dict(value_range=args.value_range)
    else:
        options = dict(fit=args.fit or "crop", white_level=args.white_level, label_level=args.label_level,
                       distinct=args.distinct)
    with clean_stop():
        written, held_out, skipped = prepare_any(args.data_dir, output, args.image_size, args.in_channels,
                                                 args.labels, args.val_fraction, **options)
    size = np.fromfile(output, "<i4", 5)[4]  # the header's width
    unet_io.say(f"wrote {output}: {counted(written, 'image')} of {size}x{size},"
                f" {held_out} more held out for validation, {counted(skipped, 'file')} skipped")


warnings.simplefilter("error", Image.DecompressionBombWarning)  # such a file is skipped like any bad one

if __name__ == "__main__":
    unet_io.run_script(main)
