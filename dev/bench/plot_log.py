"""Loss, validation loss, learning rate and gradient norm of a run, or of several, as one PNG.

    python3 dev/bench/plot_log.py out/metrics.jsonl --output_name loss.png
    python3 dev/bench/plot_log.py out/small/metrics.jsonl out/large/metrics.jsonl

Also works while the run is still going. A panel appears where a run has something to show in it.
"""
import json
import math
import os
import pathlib
import re
import sys
from typing import Callable, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import unet_io  # first, because it explains a missing package
from unet_io import UserError, counted, printable

STEPS = range(2**31)  # that ./train_unet can count


def pieces(line):
    """The texts of a log's line that should be JSON objects: one, or several that a full disk glued together."""
    line = re.sub(r"([:,\[] *)-?nan\b", r"\1NaN", line)  # C's printf spells these otherwise than JSON
    line = re.sub(r"([:,\[] *-?)inf\b", r"\1Infinity", line)
    found = [piece.strip("\0 \t\r\n") for piece in re.split(r'(?=\{"step")', line)]
    return [piece for piece in found if piece]


def read_piece(piece):
    """(step, {key: value}) of a JSON object; None of anything else, and of a step that ./train_unet can't count."""
    try:
        values = json.loads(piece)
        step = int(values.pop("step"))
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return None
    return (step, values) if step in STEPS else None


def read_metrics(path):
    """{key: {step: value}} of a metrics.jsonl, steps ascending, for all that is a number or a list of them.

    Where a step occurs twice (the run went back to a checkpoint), the later line counts. A last line that was
    cut off is left out, for the run may be writing it; what else is no JSON object with a step is counted in
    a note on stderr. Raises UserError.
    """
    series = {}
    taken = 0
    damaged = 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                for piece in pieces(line):
                    found = read_piece(piece)
                    if found is None:
                        damaged += line.endswith("\n")
                        continue
                    taken += 1
                    step, values = found
                    for key, value in values.items():
                        if isinstance(value, (int, float, list)):
                            series.setdefault(key, {})[step] = value
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    if not taken:
        raise UserError(f"{path} holds no line with a step; ./train_unet writes metrics.jsonl into its"
                        f" --out_dir")
    if damaged:
        print(f"note: {counted(damaged, 'line')} of {printable(path)} left out: damaged, or without a step",
              file=sys.stderr)
    return {key: dict(sorted(points.items())) for key, points in series.items()}


def number(value):
    """What a plot can show: nan for None, for what no float32 holds, and for other things than numbers."""
    if isinstance(value, (int, float)) and abs(value) < 3.5e38:
        return float(value)
    return math.nan


def draw(axis, points, **style):
    """A line through {step: value}, or nothing of None."""
    if points:
        style = {"marker": "o" if len(points) == 1 else None} | style  # one point makes no line
        axis.plot(list(points), [number(value) for value in points.values()], **style)


def draw_loss(axis, run, name, colour):
    smooth = "smoothed" in run
    draw(axis, run.get("loss"), color=colour, alpha=0.3 if smooth else 1, linewidth=0.8,
         label=None if smooth else f"{name}loss")
    draw(axis, run.get("smoothed"), color=colour, label=f"{name}loss, smoothed")
    draw(axis, run.get("val_loss"), color=colour, linestyle="--", marker=".", label=f"{name}validation")


def draw_quartiles(axis, run, name, colour):
    """The loss of each quarter of the timesteps, the noisiest palest."""
    whole = {step: values for step, values in run["loss_quartiles"].items() if isinstance(values, list) and len(values) == 4}
    for quarter in range(4):
        points = {step: values[quarter] for step, values in whole.items() if values[quarter] is not None}
        draw(axis, points, color=colour, alpha=1 - 0.25 * quarter, linewidth=1,
             label=f"{name}t in quarter {quarter + 1} of 4")


def draw_grad_norm(axis, run, name, colour):
    draw(axis, run["grad_norm"], color=colour, linewidth=1)


def draw_lr(axis, run, name, colour):
    draw(axis, run["lr"], color=colour, linewidth=1)


class Panel(NamedTuple):
    title: str
    key: str  # which a run must have
    draw: Callable  # draw(axis, run, what its labels begin with, colour)
    height: int
    logarithmic: bool = True


PANELS = [Panel("loss", "loss", draw_loss, 3),
          Panel("loss by timestep", "loss_quartiles", draw_quartiles, 2),
          Panel("gradient norm", "grad_norm", draw_grad_norm, 1),
          Panel("learning rate", "lr", draw_lr, 1, logarithmic=False)]


def plot(runs):
    """A matplotlib figure of {name: what read_metrics gave}."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib") from None
    panels = [panel for panel in PANELS if any(panel.key in run for run in runs.values())]
    if not panels:
        raise UserError(f"{next(iter(runs))} has steps, but no loss to plot")

    heights = [panel.height for panel in panels]
    figure, axes = pyplot.subplots(len(panels), sharex=True, squeeze=False, layout="constrained",
                                   figsize=(9, 1 + 1.4 * sum(heights)),
                                   gridspec_kw=dict(height_ratios=heights))
    for panel, axis in zip(panels, axes[:, 0]):
        for n, (name, run) in enumerate(runs.items()):
            if panel.key in run:
                panel.draw(axis, run, f"{name}: " if len(runs) > 1 else "", f"C{n}")
        axis.set_ylabel(panel.title)
        axis.grid(alpha=0.3)
        if panel.logarithmic:
            make_logarithmic(axis)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    axes[-1, 0].set_xlabel("step")
    return figure


def make_logarithmic(axis):
    """A logarithmic scale with a number at 1, 2, 3 and 5 times each power of ten."""
    def between_powers(x, _):
        return f"{x:g}" if f"{x:e}"[0] in "235" else ""

    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(between_powers)


def main():
    parser = unet_io.Parser(description=__doc__)
    parser.add_argument("logs", nargs="+", metavar="metrics.jsonl")
    parser.add_argument("--output_name", default="loss.png", metavar="FILE", help="default: loss.png")
    args = parser.parse_args()
    folders = [os.path.dirname(path) or "." for path in args.logs]
    names = folders if len(set(folders)) == len(folders) else args.logs
    names = [name.replace("$", r"\$") for name in names]  # matplotlib takes a plain one for mathematics
    figure = plot({name: read_metrics(path) for name, path in zip(names, args.logs)})
    try:
        with unet_io.replacing(args.output_name) as file:
            figure.savefig(file, dpi=120, format=os.path.splitext(args.output_name)[1][1:] or "png")
    except ValueError as error:
        raise UserError(f"{args.output_name} can't be written: {error}") from None
    print(f"wrote {args.output_name}: {', '.join(axis.get_ylabel() for axis in figure.axes)}")


if __name__ == "__main__":
    unet_io.run_script(main)
