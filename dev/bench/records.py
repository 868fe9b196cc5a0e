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

PAGE, README = ROOT / "docs/records.md", ROOT / "README.md"
PROGRAM = os.environ.get("TRAIN_UNET", str(ROOT / "train_unet"))
TUNING = 0.2  # of a model's minutes, which its consistency tuning takes besides


# ----------------------------------------------------------------------------------------------------
# what is compared: data sets and recipes

class DataSet(NamedTuple):
    preset: str   # the network, and what a recipe does not say
    flags: dict   # Config values for every recipe
    sizes: tuple  # how many pictures are compared with as many held-out images; the first is what most figures are of


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to train. flags: Config values over those of the data set's preset. samplers: flags with which is drawn.

    trainer: "train_unet" or "PyTorch". one_run: one run gives the models of all lengths; otherwise the learning rate falls,
    and each length is a run of its own. tuned: in how many steps the model also draws after consistency tuning, which is done
    for each number of steps anew.
    """
    title: str
    trainer: str
    flags: dict
    samplers: tuple
    one_run: bool = True
    tuned: tuple = ()


DATA_SETS = {
    "fashion": DataSet("fashion32", dict(flip=False, cond_drop_prob=0.0), (5000, 2000)),
    "emoji": DataSet("unet64", dict(flip=True), (541,)),
    "clipart": DataSet("unet64", dict(flip=True), (545,)),
}
SMOKE = DataSet("fashion32", dict(
    image_size=8, num_channels=32, channel_mult=(1,), num_res_blocks=1, attention_resolutions=(), norm_groups=8,
    num_head_channels=8, batch_size=4, flip=True, cond_drop_prob=0.0), (8, 4))

PLAIN = dict(timestep_sampling="uniform", optimizer="adamw")  # as others train, and ours with v
KEPT = dict(lr_schedule="constant", ema_rate=0.9999)  # what one run for all lengths needs
DPMPP = ("--sampler dpmpp --sample_steps 10", "--sampler dpmpp --sample_steps 20")
EULER, HEUN = "--sampler ddim --spacing trailing --sample_steps", "--sampler heun --sample_steps"
RECIPES = {
    "real": Recipe("training images, as a yardstick", "", {}, ()),
    # the data set's preset
    "ours": Recipe("`./train_unet`, EDM, Muon", "train_unet", {}, DPMPP, one_run=False, tuned=(1, 2)),
    "ours_adamw": Recipe("`./train_unet`, EDM, AdamW", "train_unet", dict(optimizer="adamw"), DPMPP, one_run=False),
    "ours_v": Recipe("`./train_unet`, v", "train_unet", PLAIN | dict(
        noise_schedule="cosine", predict="v"), ("--sampler ddim --sample_steps 50",), one_run=False),
    # as examples/unconditional_image_generation of diffusers
    "ddpm": Recipe("PyTorch, DDPM as diffusers", "PyTorch", PLAIN | dict(
        noise_schedule="linear", predict="eps", lr=1e-4, lr_schedule="cosine", warmup_steps=500, beta1=0.95, weight_decay=1e-6,
        grad_clip=1.0, ema_rate=0.9999), ("--sampler ddim --sample_steps 50",), one_run=False),
    # as examples/images/cifar10 of torchcfm, whose warm-up is 5,000 steps
    "flow": Recipe("PyTorch, flow matching as torchcfm", "PyTorch", KEPT | PLAIN | dict(
        noise_schedule="flow", predict="flow", lr=2e-4, warmup_steps=500, grad_clip=1.0),
        (f"{EULER} 100", f"{HEUN} 25")),
}
FIGURES = {"Frechet": "Fréchet", "Frechet of 2000": "Fréchet of 2,000", "KID x 1000": "KID x 1000",
           "precision %": "precision %", "recall %": "recall %", "accuracy %": "accuracy %"}


class Options(NamedTuple):
    """What all jobs share. deadline: of time.monotonic()."""
    folder: pathlib.Path  # of images, runs and results
    minutes: tuple        # lengths of training
    deadline: float
    minute: float = 60.0  # seconds that are called a minute
    probe: float = 8.0    # seconds of training before it, which tell how many steps fit a minute
    pictures: int = 5000  # drawn with each model
    data_sets: dict = DATA_SETS

    def images(self, data, held_out=False):
        """The file of a data set's images to train on, or of those that are held out."""
        return str(self.folder / f"data/{data}{'_val' * held_out}.bin")


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
            for path, part in zip(files, ("train", "t10k")):
                prepare_data.prepare_idx(os.path.join(fashion_dir, f"{part}-images-idx3-ubyte.gz"), path, labels=True)
            continue
        if data == "clipart":  # as data/README.md says
            if not os.path.isdir(clipart_dir):
                unet_io.say(f"{clipart_dir} is not there, and clip art is left out: --clipart_dir names it")
                continue
            subprocess.run([sys.executable, ROOT / "prepare_data.py", "--data_dir", clipart_dir, "--labels", "--label_level", "1",
                            "--fit", "trim", "--distinct", "16", "--val_fraction", "0.1", "--output_name", files[0]], check=True)
            continue
        if data == "emoji":
            pixels, labels = unet_io.read_images(str(ROOT / "data/emoji.bin")).pixels, None
        else:
            pixels = np.random.default_rng(0).integers(0, 256, (48, 1, 8, 8), np.uint8)
            labels = np.array([str(i % 10) for i in range(len(pixels))])
        held_out, rest = np.split(unet_io.permutation(0, 0, len(pixels)), [len(pixels) // 3])
        for path, places in zip(files, (rest, held_out)):
            unet_io.write_images(path, pixels[places], None if labels is None else labels[places],
                                 labels if labels is None else unet_io.class_order(labels))


# ----------------------------------------------------------------------------------------------------
# training by ./train_unet; opponents.py has the same in PyTorch

def milliseconds_in(folder, interval):
    """Those of a step in each regular line of metrics.jsonl. The first line after a start is of a single step."""
    with open(folder / "metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    return [line["ms"] for line in lines if line["step"] % interval == 0]


def run_until(deadline, command, log):
    """Whether a command came to its end before the deadline; otherwise it was told to save and stop. Raises UserError."""
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
    """A run of ./train_unet with these flags, a list of words, on a file of images; it goes on from what its folder holds."""
    def __init__(self, flags, images, folder):
        self.flags, self.folder = [*flags, "--data_file", images, "--num_samples", "0", "--keep", "1"], folder

    def step_seconds(self, seconds):
        """The mean time of a step of a run of about so many seconds, which is thrown away. In a tuning steps differ."""
        steps = 20
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                run = copy.copy(self)
                run.folder = pathlib.Path(folder)
                run.train(steps, steps, float("inf"))
                times = milliseconds_in(run.folder, log_interval(steps))
            time_of_step = 1e-3 * statistics.mean(times)
            steps = max(20, int(seconds / time_of_step))
        return time_of_step

    def train(self, steps, every, deadline):
        """Train up to this step, with a checkpoint every so many steps. deadline: of time.monotonic(). Raises Unfinished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        start = ["--resume", str(self.folder)] if list(self.folder.glob("checkpoint_*.bin")) else self.flags
        command = [PROGRAM, *start, "--out_dir", str(self.folder), "--steps", str(steps), "--save_every", str(every),
                   "--keep_every", str(every), "--log_every", str(log_interval(every)), "--sample_every", "0"]
        if not run_until(deadline, command, self.folder / "log.txt"):
            raise Unfinished


# ----------------------------------------------------------------------------------------------------
# judging

class Judge:
    """The figures of pictures beside held-out images, all by quality.py's functions. Raises UserError without its network."""
    def __init__(self, job):
        self.network, missing = quality.feature_network()
        if self.network is None:
            raise UserError(f"records need {missing}")
        self.network.to(DEVICE)
        self.sizes, self.config = job.data_set.sizes, job.config
        held_out, self.labels = self.some(job.options.images(job.data, held_out=True))
        self.training_images = self.some(job.images)
        self.held_out = self.floats(held_out)
        self.held_out_features = self.features(self.held_out)

    def some(self, path):
        """(pixels uint8 (N, C, S, S), labels (N,) or None) of the first N images of a file in a random order."""
        images = unet_io.read_images(path)
        places = unet_io.permutation(0, 0, len(images))[:self.sizes[0]]
        labels = images.labels[places] if self.config.class_cond else None
        return unet_io.to_uint8(images.floats(places, self.config.image_size)), labels

    def features(self, images):
        """In fp32, whatever the trainer before allowed."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        return quality.features(self.network, images, DEVICE)

    @staticmethod
    def floats(pixels):
        return torch.from_numpy(pixels).float() / 127.5 - 1

    def figures(self, pictures, classes):
        """{name: figure} of uint8 (N, C, H, W) and their classes (N,) or None. Of sets that are smaller than N, the mean.

        The pictures of a set are spread over all of them, which stand by class: so each class has an equal part of a set.
        """
        drawn, found = self.floats(pictures), {}
        points = self.features(drawn)
        for size in self.sizes:
            sets = len(points) // size
            places = np.arange(sets * size) * len(points) // (sets * size)
            rows = [quality.feature_figures(points[places[k::sets]], self.held_out_features[:size]) for k in range(sets)]
            for name in rows[0] if size == self.sizes[0] else ["Frechet"]:
                title = name if size == self.sizes[0] else f"{name} of {size}"
                found[title] = float(np.mean([row[name] for row in rows]))
        if classes is not None:
            labels, theirs = (torch.from_numpy(np.asarray(values)).long() for values in (classes, self.labels))
            found["accuracy %"] = 100 * quality.classification_accuracy(drawn, labels, self.held_out, theirs, self.config.seed,
                                                                        DEVICE)
        return found


def draw(weights, sampler, count, path):
    """(pictures uint8 (count, C, H, W), classes (count,) or None) of seeds 0 ... count - 1, by ./train_unet, unguided."""
    launched([PROGRAM, "--generate", "--model_weights", str(weights), "--seeds", f"0-{count - 1}", "--guidance_scale", "1",
              "--batch_size", "128", *sampler.split(), "--output_name", str(path)], "train_unet on ")
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
    words = dict(zip(sampler.split()[::2], sampler.split()[1::2]))
    steps = int(words["--sample_steps"])
    return 2 * steps - 1 if words["--sampler"] == "heun" else steps


# ----------------------------------------------------------------------------------------------------
# a job

def steps_a_minute(path, options, trainer):
    """How many steps of trainer() fit a minute: what the file says, or what is measured now and kept there."""
    if not path.exists():
        steps = int(options.minute / trainer().step_seconds(options.probe))
        with unet_io.replacing(path) as file:
            file.write(str(max(1, steps)).encode())
    return int(path.read_text())


class Job:
    """DATA-RECIPE-SEED, with the results so far in FOLDER/NAME.json and its runs in FOLDER/NAME. Raises UserError."""
    def __init__(self, name, options):
        self.name, self.options, self.folder = name, options, options.folder / name
        try:
            self.data, recipe, seed = name.split("-")
            self.recipe, self.data_set = RECIPES[recipe], options.data_sets[self.data]
            self.config = config_of(self.data_set, self.recipe, int(seed))
        except (KeyError, ValueError):
            raise UserError(f"--job {name} is none of DATA-RECIPE-SEED with DATA {' or '.join(options.data_sets)}, RECIPE"
                            f" {' or '.join(RECIPES)}, and SEED a number") from None
        if not os.path.exists(self.images):
            raise UserError(f"{self.images} is not there yet: call records.py --prepare first")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = options.folder / f"{name}.json"
        device = torch.cuda.get_device_name() if ON_GPU else processor_name()
        self.result = json.loads(self.path.read_text()) if self.path.exists() else dict(
            data=self.data, recipe=recipe, seed=int(seed), device=device, torch=torch.__version__, points=[])

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

    def is_known(self, minutes, sampler):
        return any((point["minutes"], point["sampler"]) == (minutes, sampler) for point in self.result["points"])

    def note(self, minutes, sampler, pictures, classes, **more):
        """Judge pictures and write the result."""
        figures = self.judge.figures(pictures, classes)
        self.result["points"].append(dict(minutes=minutes, sampler=sampler, **more, figures=figures))
        with unet_io.replacing(self.path) as file:
            file.write((json.dumps(self.result, indent=1) + "\n").encode())
        print(f"{self.name}, {minutes:g} minutes, {sampler}: "
              + ", ".join(f"{name} {value:.2f}" for name, value in figures.items()), flush=True)

    def note_model(self, minutes, samplers, weights, **more):
        """Draw and judge what is not known yet of a model. Raises Unfinished."""
        for sampler in samplers:
            if self.is_known(minutes, sampler):
                continue
            if time.monotonic() > self.options.deadline:
                raise Unfinished
            drawn = draw(weights, sampler, self.options.pictures, self.folder / "drawn.npy")
            self.note(minutes, sampler, *drawn, calls=calls_of(sampler), **more)

    def trained(self, folder, trainer, steps, every):
        """(the checkpoint of this step, the seconds of training up to it); trainer() is called where it is not there yet."""
        if not checkpoint_in(folder, steps).exists():
            trainer().train(steps, every, self.options.deadline)
        return checkpoint_in(folder, steps), 1e-3 * steps * statistics.mean(milliseconds_in(folder, log_interval(every)))

    def run(self):
        """Train and judge for each length what is not known yet. Raises Unfinished, or UserError if another process does so."""
        with unet_io.locked(self.folder, f"another process is at --job {self.name} in {self.options.folder}"):
            self.find_points()

    def find_points(self):
        """run, of a job that is locked."""
        if not self.recipe.trainer:
            if not self.is_known(0, ""):
                self.note(0, "", *self.judge.training_images, calls=0, steps=0, seconds=0.0)
            return
        for minutes in sorted(self.options.minutes):
            tuned_minutes = with_tuning(minutes)
            wanted = [(minutes, sampler) for sampler in self.recipe.samplers]
            wanted += [(tuned_minutes, consistency(calls)) for calls in self.recipe.tuned]
            if all(self.is_known(*point) for point in wanted):
                continue
            folder = self.folder / ("run" if self.recipe.one_run else f"run_{minutes}")
            trainer = functools.partial(self.trainer, folder)
            every = steps_a_minute(self.folder / "steps_a_minute", self.options, trainer)
            steps = every * minutes
            weights, seconds = self.trained(folder, trainer, steps, every)
            self.note_model(minutes, self.recipe.samplers, weights, steps=steps, seconds=seconds)

            for calls in self.recipe.tuned:
                if self.is_known(tuned_minutes, consistency(calls)):
                    continue
                folder = self.folder / f"tuned_{minutes}_{calls}"
                trainer = functools.partial(self.tuner, weights, folder, calls)
                every = steps_a_minute(self.folder / f"tuning_{calls}_steps_a_minute", self.options, trainer)
                more = max(1, round(TUNING * minutes * every))
                tuned, more_seconds = self.trained(folder, trainer, more, every)
                self.note_model(tuned_minutes, [consistency(calls)], tuned, steps=steps + more, seconds=seconds + more_seconds)

    def tuner(self, weights, folder, calls):
        """The consistency tuning of weights for so many calls a picture, as docs/guide.md says."""
        flags = ["--preset", "consistency", "--consistency_steps", str(calls), "--model_weights", str(weights)]
        for name in ("seed", "flip"):
            flags += [f"--{name}", unet_io.setting_text(getattr(self.config, name))]
        return Program(flags, self.images, folder)


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
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


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
    points = {}
    for result in results:
        for point in result["points"]:
            points.setdefault((result["recipe"], point["minutes"], point["sampler"]), []).append(point)
    names = [name for name in FIGURES if any(name in point["figures"] for some in points.values() for point in some)]
    heading = ["minutes", "recipe", "steps", "calls a picture", *map(FIGURES.get, names), "seeds"]
    rows = []
    for (recipe, minutes, sampler), some in points.items():
        steps, cells = statistics.mean(point["steps"] for point in some), ["", RECIPES[recipe].title, "", ""]
        if sampler:
            cells = [f"{minutes:g}", title_of(RECIPES[recipe], sampler), f"{steps:,.0f}", str(some[0]["calls"])]
        figures = [spread([point["figures"][name] for point in some if name in point["figures"]]) for name in names]
        rows.append([*cells, *figures, str(len(some))])
    return [heading, *rows]


def summary(rows):
    """The README's table, its heading first: Fréchet distances after equal minutes, here by calls, and in PyTorch at its best."""
    heading, *rows = rows
    place = heading.index(FIGURES["Frechet"])
    distances = {(float(row[0] or 0), row[1], int(row[3] or 0)): float(row[place].split()[0]) for row in rows}
    ours = RECIPES["ours"]
    drawn, best = title_of(ours, ours.samplers[-1]), calls_of(ours.samplers[-1])
    titles = [f"{calls} call{'s' * (calls > 1)}, tuned" for calls in ours.tuned]
    overview = [["minutes", "real images", "PyTorch, its best", f"`./train_unet`, {best} calls", *titles]]
    for (minutes, title, calls), distance in distances.items():
        if (title, calls) != (drawn, best):
            continue
        theirs = [value for (length, title, _), value in distances.items() if length == minutes and title.startswith("PyTorch")]
        tuned = [distances.get((with_tuning(minutes), title_of(ours, consistency(calls)), calls)) for calls in ours.tuned]
        values = [distances.get((0, RECIPES["real"].title, 0)), min(theirs, default=None), distance, *tuned]
        overview.append([f"{minutes:g}", *("" if value is None else f"{value:.2f}" for value in values)])
    return overview


def table(rows):
    """A table in Markdown of its rows, the heading first. Recipes stand at the left, figures at the right."""
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    rules = "|".join("---" if name == "recipe" else "---:" for name in rows[0])
    return "".join([lines[0], f"|{rules}|\n", *lines[1:]])


def render(results, page):
    """{data set: (a line about the measurement, its rows)} of the data sets that have results.

    page: the text that has the tables so far, or "". Their rows of the same GPU and figures stay, where the results have none.
    """
    found = {}
    for data in dict.fromkeys(result["data"] for result in results):
        some = [result for result in results if result["data"] == data]
        device = f"On {some[0]['device']}, "
        trained = [point for result in some for point in result["points"] if point["seconds"]]
        ratios = [point["seconds"] / (60 * point["minutes"]) for point in trained]
        line = f"{device}PyTorch {some[0]['torch']}."
        if ratios:
            line += f" Measured, a minute's steps took from {60 * min(ratios):.1f} to {60 * max(ratios):.1f} s."
        heading, *rows = rows_of(some)
        before = page and text_between(page, f"records:{data}")
        if before.startswith(device) and rows_in(before)[0] == heading:
            known = {key_of(row) for row in rows}
            rows += [row for row in rows_in(before)[1:] if key_of(row) not in known]
        found[data] = line, [heading, *sorted(rows, key=key_of)]
    return found


def smoke(folder):
    """Every recipe in miniature, on images of noise; prints the table."""
    torch.set_num_threads(1)  # several would only wait for each other
    options = Options(folder, (1, 2), float("inf"), minute=0.2, probe=0.5, pictures=8, data_sets={"smoke": SMOKE})
    prepare(options, "", "")
    for recipe in RECIPES:
        Job(f"smoke-{recipe}-0", options).run()
    line, rows = render(read_results(folder), "")["smoke"]
    print(f"{line}\n\n{table(rows)}")


def main():
    parser = unet_io.Parser(description=__doc__)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prepare", action="store_true", help="write the images of all data sets into FOLDER/data")
    what.add_argument("--job", metavar="NAME", help="train and judge DATA-RECIPE-SEED, such as fashion-ours-0; DATA is"
                      f" {' or '.join(DATA_SETS)}, RECIPE {', '.join(RECIPES)}")
    what.add_argument("--write", action="store_true", help="write the results in FOLDER into docs/records.md")
    what.add_argument("--smoke", action="store_true", help="everything in miniature, and print its table")
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
    options = Options(args.folder, tuple(args.minutes), time.monotonic() + args.seconds)
    if args.prepare:
        prepare(options, args.fashion_dir, args.clipart_dir)
    elif args.job:
        if not ON_GPU:
            raise UserError("a job counts minutes of a GPU, and PyTorch finds none here; --smoke runs everywhere")
        Job(args.job, options).run()
    elif args.write:
        results = read_results(args.folder)
        if not results:
            raise UserError(f"{args.folder} holds no results: each --job writes some")
        found = render(results, PAGE.read_text())
        write_between(PAGE, {f"records:{data}": f"{line}\n\n{table(rows)}" for data, (line, rows) in found.items()})
        if "fashion" in found:
            line, rows = found["fashion"]
            write_between(README, {"records:summary": f"{line.partition(', PyTorch')[0]}:\n\n{table(summary(rows))}"})
    else:
        smoke(args.folder / "smoke")


if __name__ == "__main__":
    unet_io.run_script(main)
