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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import unet_io  # first, because it explains a missing package
from unet_io import UserError, counted, printable

STEPS = range(2**31)  # that ./train_unet can count


def pieces(line):
    """A line of a log as what should be JSON objects: one, or several that a full disk glued together."""
    line = re.sub(r"([:,\[] *)-?nan\b", r"\1NaN", line)  # C's printf and JSON spell these in two ways
    line = re.sub(r"([:,\[] *-?)inf\b", r"\1Infinity", line)
    found = [piece.strip("\0 \t\r\n") for piece in re.split(r'(?=\{"step")', line)]
    return [piece for piece in found if piece]


def read_metrics(path):
    """{key: {step: value}} of a metrics.jsonl, steps ascending, for all that is a number or a list of them.

    Where a step occurs twice (the run went back to a checkpoint), the later line counts. A last line that was
    cut off is left out, for the run may be writing it; what else is no JSON object with a step is counted in
    a note on stderr. Raises UserError.
    """
    series, taken, damaged = {}, 0, 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                for piece in pieces(line):
                    try:
                        values = json.loads(piece)
                        step = int(values.pop("step"))
                        if step not in STEPS:
                            raise ValueError
                    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
                        damaged += line.endswith("\n")
                        continue
                    taken += 1
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
    return float(value) if isinstance(value, (int, float)) and abs(value) < 3.5e38 else math.nan


def draw(axis, points, **style):
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
    for quarter in range(4):
        points = {step: values[quarter] for step, values in run["loss_quartiles"].items()
                  if isinstance(values, list) and len(values) == 4 and values[quarter] is not None}
        draw(axis, points, color=colour, alpha=1 - 0.25 * quarter, linewidth=1,
             label=f"{name}t in quarter {quarter + 1} of 4")


def single(key):
    return lambda axis, run, name, colour: draw(axis, run[key], color=colour, linewidth=1)


PANELS = {  # title: (key that a run must have, how to draw it, height, logarithmic)
    "loss": ("loss", draw_loss, 3, True),
    "loss by timestep": ("loss_quartiles", draw_quartiles, 2, True),
    "gradient norm": ("grad_norm", single("grad_norm"), 1, True),
    "learning rate": ("lr", single("lr"), 1, False),
}


def plot(runs):
    """A matplotlib figure of {name: what read_metrics gave}."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib") from None
    panels = {title: panel for title, panel in PANELS.items()
              if any(panel[0] in run for run in runs.values())}
    if not panels:
        raise UserError(f"{next(iter(runs))} has steps, but no loss to plot")
    heights = [panel[2] for panel in panels.values()]
    figure, axes = pyplot.subplots(len(panels), sharex=True, squeeze=False, layout="constrained",
                                   figsize=(9, 1 + 1.4 * sum(heights)),
                                   gridspec_kw=dict(height_ratios=heights))
    for (title, (key, draw_panel, _, logarithmic)), axis in zip(panels.items(), axes[:, 0]):
        for n, (name, run) in enumerate(runs.items()):
            if key in run:
                draw_panel(axis, run, f"{name}: " if len(runs) > 1 else "", f"C{n}")
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
        if logarithmic:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "235" else "")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    axes[-1, 0].set_xlabel("step")
    return figure


def main():
    parser = unet_io.Parser(description=__doc__)
    parser.add_argument("logs", nargs="+", metavar="metrics.jsonl")
    parser.add_argument("--output_name", default="loss.png", metavar="FILE", help="default: loss.png")
    args = parser.parse_args()
    folders = [os.path.dirname(path) or "." for path in args.logs]
    names = folders if len(set(folders)) == len(folders) else args.logs
    figure = plot({name.replace("$", r"\$"): read_metrics(path) for name, path in zip(names, args.logs)})
    try:
        with unet_io.replacing(args.output_name) as file:
            figure.savefig(file, dpi=120, format=os.path.splitext(args.output_name)[1][1:] or "png")
    except ValueError as error:
        raise UserError(f"{args.output_name} can't be written: {error}") from None
    print(f"wrote {args.output_name}: {', '.join(axis.get_ylabel() for axis in figure.axes)}")


if __name__ == "__main__":
    unet_io.run_script(main)
