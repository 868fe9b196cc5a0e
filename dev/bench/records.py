"""The best pictures a minute: trains with ./train_unet and with PyTorch for minutes of one GPU, judges what they draw, and
writes the tables of docs/records.md.

    python3 dev/bench/records.py --prepare               the images of all data sets, once, before the jobs
    python3 dev/bench/records.py --job fashion-ours-0    one data set, recipe and seed: writes build/records/fashion-ours-0.json
    python3 dev/bench/records.py --write                 the tables, and the README's, from the results of all jobs
    python3 dev/bench/records.py --smoke                 everything in miniature, also without a GPU

A job that was cut short goes on when it is called again, and --seconds makes it stop by itself. Different jobs may run at the
same time, each on a GPU of its own (CUDA_VISIBLE_DEVICES). Minutes are those of training alone: starting, compiling, saving,
drawing and judging are not counted on either side.
"""
import copy
import dataclasses
import functools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import unet_io  # first, because it explains a missing package

import numpy as np
import torch

import generate
import prepare_data
import quality
from benchmark import ROOT, launched, preset_config, processor_name, text_between, write_between
from opponents import DEVICE, ON_GPU, PyTorch, Unfinished, checkpoint_in, log_interval
from unet_io import UserError

PAGE = ROOT / "docs/records.md"
README = ROOT / "README.md"
PROGRAM = os.environ.get("TRAIN_UNET", str(ROOT / "train_unet"))
TUNING = 0.2  # Consistency tuning takes this fraction of the minutes that the model was trained for.


# ----------------------------------------------------------------------------------------------------
# what is compared: data sets and recipes

class DataSet(NamedTuple):
    preset: str   # gives the network, and every Config value that neither the recipe nor `flags` gives
    flags: dict   # Config values for every recipe
    sizes: tuple  # so many pictures are compared with as many held-out images; all but the first for Frechet's distance


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to train, and how its models draw.

    one_run is for a constant learning rate, where one run passes through the models of all lengths. Where the learning rate
    falls, each length is a run of its own.
    """
    title: str
    trainer: str        # "train_unet" or "PyTorch"; "" trains nothing, and images take the place of pictures
    flags: dict         # Config values over those of the data set's preset
    samplers: tuple     # of each sampler the flags of ./train_unet --generate
    one_run: bool = True
    tuned: tuple = ()   # numbers of steps for which the model is also tuned by consistency, for each anew


DATA_SETS = {
    "fashion": DataSet("fashion32", dict(flip=False, cond_drop_prob=0.0), (5000, 2000)),
    "emoji": DataSet("unet64", dict(flip=True), (541,)),
    "clipart": DataSet("unet64", dict(flip=True), (545,)),
}
SMOKE = DataSet(
    preset="fashion32",
    flags=dict(image_size=8, num_channels=32, channel_mult=(1,), num_res_blocks=1, attention_resolutions=(), norm_groups=8,
               num_head_channels=8, batch_size=4, flip=True, cond_drop_prob=0.0),
    sizes=(8, 4))

PLAIN = dict(timestep_sampling="uniform", optimizer="adamw")  # how other projects train, and ours with v
KEPT = dict(lr_schedule="constant", ema_rate=0.9999)  # what one run for all lengths needs
DDIM = "--sampler ddim --sample_steps 50"
DPMPP = ("--sampler dpmpp --sample_steps 10", "--sampler dpmpp --sample_steps 20")
EULER = "--sampler ddim --spacing trailing --sample_steps"
HEUN = "--sampler heun --sample_steps"
RECIPES = {
    "real": Recipe("training images, as a yardstick", trainer="", flags={}, samplers=()),
    # the data set's preset
    "ours": Recipe(
        "`./train_unet`, EDM, Muon", "train_unet",
        flags={},
        samplers=DPMPP, one_run=False, tuned=(1, 2)),
    "ours_adamw": Recipe(
        "`./train_unet`, EDM, AdamW", "train_unet",
        flags=dict(optimizer="adamw"),
        samplers=DPMPP, one_run=False),
    "ours_v": Recipe(
        "`./train_unet`, v", "train_unet",
        flags=PLAIN | dict(noise_schedule="cosine", predict="v"),
        samplers=(DDIM,), one_run=False),
    # as examples/unconditional_image_generation of diffusers
    "ddpm": Recipe(
        "PyTorch, DDPM as diffusers", "PyTorch",
        flags=PLAIN | dict(noise_schedule="linear", predict="eps", lr=1e-4, lr_schedule="cosine", warmup_steps=500,
                           beta1=0.95, weight_decay=1e-6, grad_clip=1.0, ema_rate=0.9999),
        samplers=(DDIM,), one_run=False),
    # as examples/images/cifar10 of torchcfm, whose warm-up is 5,000 steps
    "flow": Recipe(
        "PyTorch, flow matching as torchcfm", "PyTorch",
        flags=KEPT | PLAIN | dict(noise_schedule="flow", predict="flow", lr=2e-4, warmup_steps=500, grad_clip=1.0),
        samplers=(f"{EULER} 100", f"{HEUN} 25")),
}
# of each figure that quality.py knows, the heading of its column
FIGURES = {"Frechet": "Fréchet", "Frechet of 2000": "Fréchet of 2,000", "KID x 1000": "KID x 1000",
           "precision %": "precision %", "recall %": "recall %", "accuracy %": "accuracy %"}


class Options(NamedTuple):
    """What all jobs share."""
    folder: pathlib.Path  # of images, runs and results
    minutes: tuple        # lengths of training
    deadline: float       # of time.monotonic()
    minute: float = 60.0  # seconds that are called a minute
    probe: float = 8.0    # seconds of trial training, which tell how many steps fit a minute
    pictures: int = 5000  # drawn with each model
    data_sets: dict = DATA_SETS

    def images(self, data, held_out=False):
        """The file of a data set's images to train on, or of those that are held out."""
        suffix = "_val" if held_out else ""
        return str(self.folder / f"data/{data}{suffix}.bin")


def config_of(data_set, recipe, seed):
    """The Config of a run: the data set's preset, then what the data set and the recipe say."""
    config = preset_config(data_set.preset, unet_io.PRESETS[data_set.preset]["batch_size"])
    return dataclasses.replace(config, **recipe.flags | data_set.flags, seed=seed).check()


def prepare(options, fashion_dir, clipart_dir):
    """Write the images of every data set, where they are not there yet. Raises UserError."""
    for data in options.data_sets:
        files = [options.images(data, held_out) for held_out in (False, True)]
        if all(map(os.path.exists, files)):
            continue

        os.makedirs(options.folder / "data", exist_ok=True)
        if data == "fashion":
            prepare_fashion(fashion_dir, files)
        elif data == "clipart":
            prepare_clipart(clipart_dir, files[0])
        elif data == "emoji":
            write_parts(files, unet_io.read_images(str(ROOT / "data/emoji.bin")).pixels)
        else:
            prepare_noise(files)


def prepare_fashion(folder, files):
    """Fashion-MNIST has a training and a test file of its own."""
    for path, part in zip(files, ("train", "t10k")):
        prepare_data.prepare_idx(os.path.join(folder, f"{part}-images-idx3-ubyte.gz"), path, labels=True)


def prepare_clipart(folder, training_file):
    """Clip art as data/README.md says; prepare_data.py writes the held-out file beside that of training."""
    if not os.path.isdir(folder):
        unet_io.say(f"{folder} is not there, and clip art is left out: --clipart_dir names it")
        return
    flags = ["--data_dir", folder, "--labels", "--label_level", "1", "--fit", "trim", "--distinct", "16",
             "--val_fraction", "0.1", "--output_name", training_file]
    subprocess.run([sys.executable, ROOT / "prepare_data.py", *flags], check=True)


def prepare_noise(files):
    """Images of noise in ten classes, for --smoke."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 1, 8, 8), np.uint8)
    write_parts(files, pixels, np.array([str(i % 10) for i in range(len(pixels))]))


def write_parts(files, pixels, labels=None):
    """Write a random third of the images into the second file, where they are held out, and the others into the first."""
    places = unet_io.permutation(0, 0, len(pixels))
    held_out, rest = np.split(places, [len(pixels) // 3])
    class_names = None if labels is None else unet_io.class_order(labels)
    for path, part in zip(files, (rest, held_out)):
        unet_io.write_images(path, pixels[part], None if labels is None else labels[part], class_names)


# ----------------------------------------------------------------------------------------------------
# training by ./train_unet; opponents.py has the same in PyTorch

def milliseconds_in(folder, interval):
    """The time of a step, from each line of metrics.jsonl that ends an interval. The first line is of a single step."""
    with open(folder / "metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    return [line["ms"] for line in lines if line["step"] % interval == 0]


def run_until(deadline, command, log):
    """Run a command until it ends or, at the deadline, tell it to save and stop.

    Returns whether it ended by itself. Raises UserError where it failed; `log` takes what it prints.
    """
    was_told = False
    with open(log, "ab") as output, subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT) as process:
        try:
            process.wait(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
            was_told = True
    if was_told and process.returncode in (0, 130, -signal.SIGINT):
        return False
    if process.returncode:
        said = log.read_text(errors="replace").strip() or "no message"
        raise UserError(f"{command[0]} failed with status {process.returncode}: {said.splitlines()[-1]}")
    return True


class Program:
    """A run of ./train_unet on a file of images; it goes on from what its folder holds. flags: a list of words."""
    def __init__(self, flags, images, folder):
        self.flags = [*flags, "--data_file", images, "--num_samples", "0", "--keep", "1"]
        self.folder = folder

    def step_seconds(self, seconds):
        """The mean time of a step of a run of about so many seconds, which is thrown away."""
        first_guess = self.trial_step_seconds(20)
        return self.trial_step_seconds(max(20, int(seconds / first_guess)))

    def trial_step_seconds(self, steps):
        """The mean time of a step in a whole run of so many, because the steps of a tuning do not all take the same time."""
        with tempfile.TemporaryDirectory() as folder:
            run = copy.copy(self)
            run.folder = pathlib.Path(folder)
            run.train(steps, steps, float("inf"))
            return 1e-3 * statistics.mean(milliseconds_in(run.folder, log_interval(steps)))

    def train(self, steps, every, deadline):
        """Train up to this step, with a checkpoint every so many steps. deadline: of time.monotonic(). Raises Unfinished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        has_begun = any(self.folder.glob("checkpoint_*.bin"))
        flags = ["--resume", str(self.folder)] if has_begun else self.flags
        command = [PROGRAM, *flags, "--out_dir", str(self.folder), "--steps", str(steps), "--save_every", str(every),
                   "--keep_every", str(every), "--log_every", str(log_interval(every)), "--sample_every", "0"]
        if not run_until(deadline, command, self.folder / "log.txt"):
            raise Unfinished


# ----------------------------------------------------------------------------------------------------
# judging

class Judge:
    """Compares pictures with held-out images, by the figures of quality.py. Raises UserError without its network."""
    def __init__(self, job):
        self.network, missing = quality.feature_network()
        if self.network is None:
            raise UserError(f"records need {missing}")
        self.network.to(DEVICE)
        self.sizes = job.data_set.sizes
        self.config = job.config

        self.training_images = self.random_images(job.images)
        held_out, self.labels = self.random_images(job.options.images(job.data, held_out=True))
        self.held_out = self.floats(held_out)
        self.held_out_features = self.features(self.held_out)

    def random_images(self, path):
        """(pixels uint8 (N, C, S, S), labels (N,) or None) of N images of a file, N being the largest size of a set."""
        images = unet_io.read_images(path)
        places = unet_io.permutation(0, 0, len(images))[:self.sizes[0]]
        labels = images.labels[places] if self.config.class_cond else None
        return unet_io.to_uint8(images.floats(places, self.config.image_size)), labels

    def features(self, images):
        """In fp32, whatever the trainer before allowed."""
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        return quality.features(self.network, images, DEVICE)

    @staticmethod
    def floats(pixels):
        return torch.from_numpy(pixels).float() / 127.5 - 1

    def figures(self, pictures, classes):
        """{name: figure} of pictures uint8 (N, C, H, W) and their classes (N,) or None."""
        drawn = self.floats(pictures)
        points = self.features(drawn)
        found = self.mean_figures(points, self.sizes[0])
        for size in self.sizes[1:]:
            found[f"Frechet of {size}"] = self.mean_figures(points, size)["Frechet"]
        if classes is not None:
            found["accuracy %"] = 100 * self.accuracy(drawn, classes)
        return found

    def mean_figures(self, points, size):
        """{name: figure} of sets of `size` pictures each, as the mean of as many sets as there are pictures for.

        points: the features of all pictures, (N, d), class by class. The pictures of a set are spread over all of them, so
        that every class has an equal part of a set.
        """
        sets = len(points) // size
        places = np.arange(sets * size) * len(points) // (sets * size)
        rows = []
        for first in range(sets):
            rows.append(quality.feature_figures(points[places[first::sets]], self.held_out_features[:size]))
        return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}

    def accuracy(self, drawn, classes):
        """Part of the held-out images whose class a classifier finds that was trained on the pictures."""
        classes = torch.from_numpy(np.asarray(classes)).long()
        labels = torch.from_numpy(np.asarray(self.labels)).long()
        return quality.classification_accuracy(drawn, classes, self.held_out, labels, self.config.seed, DEVICE)


def draw(weights, sampler, count, path):
    """(pictures uint8 (count, C, H, W), classes (count,) or None) of seeds 0 ... count - 1, by ./train_unet, unguided."""
    flags = ["--model_weights", str(weights), "--seeds", f"0-{count - 1}", "--guidance_scale", "1", "--batch_size", "128",
             *sampler.split(), "--output_name", str(path)]
    launched([PROGRAM, "--generate", *flags], "train_unet on ")
    config = unet_io.read_checkpoint(str(weights)).config
    classes, _ = unet_io.spread_classes(config, range(config.num_classes), count)
    return unet_io.to_uint8(np.load(path)), classes


def with_tuning(minutes):
    """The minutes that a model and its consistency tuning take together."""
    return round((1 + TUNING) * minutes, 3)


def consistency(calls):
    """The flags that draw a picture in so many calls after consistency tuning."""
    return f"--sampler consistency --sample_steps {calls}"


def calls_of(sampler):
    """How often a sampler calls the network for a picture."""
    words = sampler.split()
    flags = dict(zip(words[::2], words[1::2]))
    steps = int(flags["--sample_steps"])
    if flags["--sampler"] == "heun":
        return 2 * steps - 1
    return steps


# ----------------------------------------------------------------------------------------------------
# a job

def steps_a_minute(path, options, trainer):
    """How many steps of trainer() fit a minute: what the file says, or what is measured now and kept there."""
    if not path.exists():
        steps = int(options.minute / trainer().step_seconds(options.probe))
        with unet_io.replacing(path) as file:
            file.write(str(max(1, steps)).encode())
    return int(path.read_text())


class Model(NamedTuple):
    """A trained model; its steps and seconds include those of its tuning."""
    weights: pathlib.Path  # its checkpoint
    steps: int
    seconds: float


class Job:
    """DATA-RECIPE-SEED, with the results so far in FOLDER/NAME.json and its runs in FOLDER/NAME. Raises UserError."""
    def __init__(self, name, options):
        self.name = name
        self.options = options
        try:
            self.data, recipe, seed = name.split("-")
            self.recipe = RECIPES[recipe]
            self.data_set = options.data_sets[self.data]
            self.config = config_of(self.data_set, self.recipe, int(seed))
        except (KeyError, ValueError):
            raise UserError(f"--job {name} is none of DATA-RECIPE-SEED with DATA {' or '.join(options.data_sets)}, RECIPE"
                            f" {' or '.join(RECIPES)}, and SEED a number") from None
        if not os.path.exists(self.images):
            raise UserError(f"{self.images} is not there yet: call records.py --prepare first")

        self.folder = options.folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = options.folder / f"{name}.json"
        if self.path.exists():
            self.result = json.loads(self.path.read_text())
        else:
            device = torch.cuda.get_device_name() if ON_GPU else processor_name()
            self.result = dict(data=self.data, recipe=recipe, seed=int(seed), device=device, torch=torch.__version__,
                               points=[])

    @property
    def images(self):
        return self.options.images(self.data)

    @functools.cached_property
    def judge(self):
        return Judge(self)

    @functools.lru_cache(maxsize=1)
    def trainer(self, folder):
        if self.recipe.trainer == "PyTorch":
            return PyTorch(self.config, self.images, folder)
        return Program(unet_io.flags_of(self.config), self.images, folder)

    def tuner(self, weights, folder, calls):
        """The consistency tuning of weights for so many calls a picture, as docs/guide.md says."""
        flags = ["--preset", "consistency", "--consistency_steps", str(calls), "--model_weights", str(weights)]
        for name in ("seed", "flip"):
            flags += [f"--{name}", unet_io.setting_text(getattr(self.config, name))]
        return Program(flags, self.images, folder)

    def run(self):
        """Train and judge for each length what is not known yet.

        Raises Unfinished at the deadline, or UserError if another process is at the same job.
        """
        with unet_io.locked(self.folder, f"another process is at --job {self.name} in {self.options.folder}"):
            if not self.recipe.trainer:
                self.note_training_images()
                return
            for minutes in sorted(self.options.minutes):
                if not self.knows_all_of(minutes):
                    self.train_and_judge(minutes)

    def knows_all_of(self, minutes):
        """Whether a model of this length and those that are tuned from it have been judged, with all their samplers."""
        trained = [self.is_known(minutes, sampler) for sampler in self.recipe.samplers]
        tuned = [self.is_known(with_tuning(minutes), consistency(calls)) for calls in self.recipe.tuned]
        return all(trained + tuned)

    def train_and_judge(self, minutes):
        """A model of this length, and those that are tuned from it."""
        folder = self.folder / ("run" if self.recipe.one_run else f"run_{minutes}")
        trainer = functools.partial(self.trainer, folder)
        every = steps_a_minute(self.folder / "steps_a_minute", self.options, trainer)
        model = self.trained(folder, trainer, every * minutes, every)
        self.note_model(minutes, self.recipe.samplers, model)

        for calls in self.recipe.tuned:
            if not self.is_known(with_tuning(minutes), consistency(calls)):
                self.tune_and_judge(minutes, calls, model)

    def tune_and_judge(self, minutes, calls, model):
        """The model of this length, tuned to draw in so many calls."""
        folder = self.folder / f"tuned_{minutes}_{calls}"
        tuner = functools.partial(self.tuner, model.weights, folder, calls)
        every = steps_a_minute(self.folder / f"tuning_{calls}_steps_a_minute", self.options, tuner)
        tuned = self.trained(folder, tuner, max(1, round(TUNING * minutes * every)), every)

        both = Model(tuned.weights, model.steps + tuned.steps, model.seconds + tuned.seconds)
        self.note_model(with_tuning(minutes), [consistency(calls)], both)

    def trained(self, folder, trainer, steps, every):
        """The model of this step, with a checkpoint every so many steps; trainer() is called where it is not there yet."""
        weights = checkpoint_in(folder, steps)
        if not weights.exists():
            trainer().train(steps, every, self.options.deadline)
        step_ms = statistics.mean(milliseconds_in(folder, log_interval(every)))
        return Model(weights, steps, 1e-3 * steps * step_ms)

    def is_known(self, minutes, sampler):
        return any((point["minutes"], point["sampler"]) == (minutes, sampler) for point in self.result["points"])

    def note_training_images(self):
        """Judge training images as if they were pictures."""
        if not self.is_known(0, ""):
            self.note(0, "", *self.judge.training_images, calls=0, steps=0, seconds=0.0)

    def note_model(self, minutes, samplers, model):
        """Draw and judge what is not known yet of a model. Raises Unfinished."""
        for sampler in samplers:
            if self.is_known(minutes, sampler):
                continue
            if time.monotonic() > self.options.deadline:
                raise Unfinished
            pictures, classes = draw(model.weights, sampler, self.options.pictures, self.folder / "drawn.npy")
            self.note(minutes, sampler, pictures, classes, calls=calls_of(sampler), steps=model.steps, seconds=model.seconds)

    def note(self, minutes, sampler, pictures, classes, **more):
        """Judge pictures and write the result."""
        figures = self.judge.figures(pictures, classes)
        self.result["points"].append(dict(minutes=minutes, sampler=sampler, **more, figures=figures))
        with unet_io.replacing(self.path) as file:
            file.write((json.dumps(self.result, indent=1) + "\n").encode())
        print(f"{self.name}, {minutes:g} minutes, {sampler}: "
              + ", ".join(f"{name} {value:.2f}" for name, value in figures.items()), flush=True)


# ----------------------------------------------------------------------------------------------------
# the tables

def read_results(folder):
    """What all jobs in the folder have found: a list of dicts. Raises UserError for a data set on two kinds of GPU."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for data in {result["data"] for result in results}:
        devices = sorted({result["device"] for result in results if result["data"] == data})
        if len(devices) > 1:
            raise UserError(f"{folder} holds results of {' and of '.join(devices)} for {data}, which no table can compare")
    return results


def spread(values):
    """'12.30 ± 0.20': mean and sample standard deviation; of one value that alone; of none nothing."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.2f}"


def key_of(cells):
    """What tells a row of a table from the others, in the order of the table: minutes, recipe with its sampler, calls."""
    minutes, title, _, calls = cells[:4]
    place = [title.startswith(recipe.title) for recipe in RECIPES.values()].index(True)
    return float(minutes or 0), place, int(calls or 0), title


def rows_in(text):
    """[cells] of a table, its heading first; [] of a text without one."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def title_of(recipe, sampler):
    """The name of a recipe and of how its pictures are drawn, as a row has it."""
    return f"{recipe.title}, {sampler.split()[1]}"


def rows_of(results):
    """The table of one data set, its heading first: a row of cells, of all seeds, for each length, recipe and sampler."""
    points = {}  # of all seeds together
    for result in results:
        for point in result["points"]:
            points.setdefault((result["recipe"], point["minutes"], point["sampler"]), []).append(point)
    known = {name for of_seeds in points.values() for point in of_seeds for name in point["figures"]}
    names = [name for name in FIGURES if name in known]

    rows = [["minutes", "recipe", "steps", "calls a picture", *map(FIGURES.get, names), "seeds"]]
    for (recipe, _, _), of_seeds in points.items():
        figures = []
        for name in names:
            figures.append(spread([point["figures"][name] for point in of_seeds if name in point["figures"]]))
        rows.append([*first_cells(RECIPES[recipe], of_seeds), *figures, str(len(of_seeds))])
    return rows


def first_cells(recipe, points):
    """Minutes, recipe, steps and calls, in a row of points that differ by their seed."""
    sampler = points[0]["sampler"]
    if not sampler:
        return ["", recipe.title, "", ""]
    steps = statistics.mean(point["steps"] for point in points)
    return [f"{points[0]['minutes']:g}", title_of(recipe, sampler), f"{steps:,.0f}", str(points[0]["calls"])]


def summary(rows):
    """The README's table from that of Fashion-MNIST, its heading first.

    Fréchet distances after equal minutes: those of real images, of PyTorch's best recipe, and of ./train_unet by calls.
    """
    heading, *rows = rows
    place = heading.index(FIGURES["Frechet"])
    distances = {}  # by minutes, title and calls
    for row in rows:
        distances[float(row[0] or 0), row[1], int(row[3] or 0)] = float(row[place].split()[0])

    ours = RECIPES["ours"]
    title = title_of(ours, ours.samplers[-1])
    calls = calls_of(ours.samplers[-1])
    real = distances.get((0, RECIPES["real"].title, 0))

    tuned_titles = [f"{n} call{'s' if n > 1 else ''}, tuned" for n in ours.tuned]
    overview = [["minutes", "real images", "PyTorch, its best", f"`./train_unet`, {calls} calls", *tuned_titles]]
    for minutes in [key[0] for key in distances if key[1:] == (title, calls)]:
        theirs = [distance for (length, name, _), distance in distances.items()
                  if length == minutes and name.startswith("PyTorch")]
        tuned = [distances.get((with_tuning(minutes), title_of(ours, consistency(n)), n)) for n in ours.tuned]
        values = [real, min(theirs, default=None), distances[minutes, title, calls], *tuned]
        overview.append([f"{minutes:g}", *("" if value is None else f"{value:.2f}" for value in values)])
    return overview


def table(rows):
    """A table in Markdown of its rows, the heading first. Recipes stand at the left, figures at the right."""
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    rules = "|".join("---" if name == "recipe" else "---:" for name in rows[0])
    return "".join([lines[0], f"|{rules}|\n", *lines[1:]])


def measurement_line(results):
    """What the results of a data set were measured on, and how long a minute's steps really took."""
    line = f"On {results[0]['device']}, PyTorch {results[0]['torch']}."
    trained = [point for result in results for point in result["points"] if point["seconds"]]
    if trained:
        seconds = [point["seconds"] / point["minutes"] for point in trained]
        line += f" Measured, a minute's steps took from {min(seconds):.1f} to {max(seconds):.1f} s."
    return line


def render(results, page):
    """{data set: (a line about the measurement, its rows)} of the data sets that have results.

    page: the text that has the tables so far, or "". Its rows of the same GPU and figures stay where the results have none.
    """
    found = {}
    for data in dict.fromkeys(result["data"] for result in results):
        of_data = [result for result in results if result["data"] == data]
        heading, *rows = rows_of(of_data)

        before = page and text_between(page, f"records:{data}")
        if before.startswith(f"On {of_data[0]['device']}, ") and rows_in(before)[0] == heading:
            measured = {key_of(row) for row in rows}
            rows += [row for row in rows_in(before)[1:] if key_of(row) not in measured]
        found[data] = measurement_line(of_data), [heading, *sorted(rows, key=key_of)]
    return found


def write_tables(folder):
    """Write the results of all jobs in the folder into the pages. Raises UserError where there are none."""
    results = read_results(folder)
    if not results:
        raise UserError(f"{folder} holds no results: each --job writes some")
    found = render(results, PAGE.read_text())
    write_between(PAGE, {f"records:{data}": f"{line}\n\n{table(rows)}" for data, (line, rows) in found.items()})
    if "fashion" in found:
        line, rows = found["fashion"]
        device = line.partition(", PyTorch")[0]
        write_between(README, {"records:summary": f"{device}:\n\n{table(summary(rows))}"})


def smoke(folder):
    """Every recipe in miniature, on images of noise; prints the table."""
    torch.set_num_threads(1)  # several would only wait for each other
    options = Options(folder, (1, 2), float("inf"), minute=0.2, probe=0.5, pictures=8, data_sets={"smoke": SMOKE})
    prepare(options, "", "")
    for recipe in RECIPES:
        Job(f"smoke-{recipe}-0", options).run()
    line, rows = render(read_results(folder), "")["smoke"]
    print(f"{line}\n\n{table(rows)}")


def parse_flags():
    parser = unet_io.Parser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prepare", action="store_true", help="write the images of all data sets into FOLDER/data")
    what.add_argument("--job", metavar="NAME", help="train and judge DATA-RECIPE-SEED, such as fashion-ours-0; DATA is"
                      f" {' or '.join(DATA_SETS)}, RECIPE {', '.join(RECIPES)}")
    what.add_argument("--write", action="store_true", help="write the results in FOLDER into docs/records.md")
    what.add_argument("--smoke", action="store_true", help="everything in miniature, and print its table")

    add = parser.add_argument
    add("--folder", type=lambda text: pathlib.Path(text).resolve(), default=ROOT / "build/records",
        help="where images, runs and results lie (default: build/records)")
    add("--minutes", type=generate.parse_numbers, default=[1, 2, 5, 10], metavar="LIST",
        help="lengths of training of --job (default: 1,2,5,10)")
    add("--seconds", type=float, default=float("inf"), metavar="X",
        help="after which --job saves and stops, to go on when it is called again (default: never)")
    add("--fashion_dir", default="/usr/share/datasets/fashion-mnist", metavar="FOLDER",
        help="Fashion-MNIST's four files for --prepare, as Debian's package dataset-fashion-mnist has them")
    add("--clipart_dir", default="/usr/share/openclipart/png", metavar="FOLDER",
        help="clip art for --prepare, as Debian's package openclipart-png has it")

    args = parser.parse_args()
    if min(args.minutes) < 1:
        raise UserError("--minutes must be 1 or more each")
    return args


def main():
    args = parse_flags()
    options = Options(args.folder, tuple(args.minutes), time.monotonic() + args.seconds)
    if args.prepare:
        prepare(options, args.fashion_dir, args.clipart_dir)
    elif args.job:
        if not ON_GPU:
            raise UserError("a job counts minutes of a GPU, and PyTorch finds none here; --smoke runs everywhere")
        Job(args.job, options).run()
    elif args.write:
        write_tables(args.folder)
    else:
        smoke(args.folder / "smoke")


if __name__ == "__main__":
    unet_io.run_script(main)
