"""Writes README.md from what the ladders printed on this GPU, and its pictures: `make bench` runs them and then this.

Above each table stands the end of the comment that opens X.cu, from "What the steps change" on. The pictures are drawn
from the tables of README.md, so without new output of the ladders this draws them again.
"""
import dataclasses
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ORDER = ["conv3x3", "conv1x1", "groupnorm", "attention", "linear", "upsample", "downsample", "timestep_embedding",
         "silu", "gelu", "mse", "adamw", "resblock", "attention_block"]
INTRODUCTION = """# Ladders

Each layer of the network as a ladder of versions, from the plainest to the one that `train_unet.cu` uses, so that
every step can be read, run and measured by itself:

    make conv3x3 && ./conv3x3        every version: checked against PyTorch, then timed
    ./conv3x3 1                      version 1 alone
    ./conv3x3 all 64x64              every version of one case
    make bench                       all of it on this machine's GPU, into this file

`X.cu` holds the versions of layer X; the comment that opens it lists them. `X.py` is the layer in PyTorch: from a
seed it writes inputs, outputs and gradients, in float64, for `X` to read. The last version of a ladder is the
program's own function, included and not copied; GELU, which the program lacks, ends with its fastest. Without a GPU
the versions for the CPU are checked, and `make test` above does so for all ladders.

**us** is the median time of one launch (or of the launches that one result takes), from replays of a CUDA graph in
which every launch finds its inputs in cold caches. **TFLOP/s** and **GB/s** count the work of the layer, not of the
version: what it moves or computes beyond that shows as a low rate. **of the floor** is the time that this work would
take at the bandwidth of a copy, or at the GPU's peak rate in the program's precision, divided by the time it took.
**error** is the larger of |a - r|₂ / |r|₂ and max|a - r| / max|r|. The row *PyTorch* is what the layer takes there,
timed in the same way.
"""
CLOSING = """## How to add a version

1. In `X.cu`, write the kernel `X_forward_kernel<N>` and below it a function that takes its tensors from the
   `Problem` by name and launches it: `p.in<floatX>("x")`, `p.out<floatX>("out")`, `p.sum<float>("dw")` for what is
   added to, `p.scratch<float>("sums", n)`. `common.h` says what each starts as.
2. Add a line to the ladder's table: number, pass, layout, type, the idea in a few words, the function; and a line to
   the comment that opens the file. If it changes why the fastest is fastest, say so below "What the steps change".
   Two runs must give the same bits; a version that adds with atomics is marked `ATOMICS`.
3. `make X && ./X N`. Layouts and types that the algorithm needs to convert are its own to convert, within its time.

To replace the program's function, a version must

- pass its own checks here, at odd shapes too: fp32 within 1e-5, bf16 within 1e-2 and no worse than the function it
  replaces;
- give the same bits on every run: no atomic additions of floating-point numbers to a result;
- keep to the contracts at the head of `train_unet.cu`: weight gradients accumulate, nothing is allocated, nothing
  waits for the device, every launch is checked;
- pass `make test` on a GPU in both precisions, and `make test ALL_ARCHS=1`;
- make the training step faster at batch sizes 32 and 256 (`make bench` above), not just the layer.

The version that it replaced stays here as a step of the ladder if there is something to learn from it.
"""


def explanation(stem):
    """The last paragraphs of the comment that opens X.cu, as one paragraph of text."""
    lines = []
    for line in (HERE / f"{stem}.cu").read_text().splitlines():
        if not line.startswith("//"):
            break
        lines.append(line[2:].strip())
    found = re.search(r"What the steps change: *(.*)", "\n".join(lines), re.S)
    return found[1][:1].upper() + found[1][1:] if found else ""


@dataclasses.dataclass
class Table:
    """What a ladder printed of one pass and case, or what model_table made of several cases."""
    heading: str  # "conv3x3 forward, 64x64 (B=32 C=192 H=64 O=64 W=64): floor 29.3 us"
    text: str
    rows: list  # {column: cell}

    def __post_init__(self):
        self.stem, what = self.heading.split(" ", 1)
        self.which, self.case = re.match(r"([^,]*), (.*?)(?: \(|:|$)", what).groups()
        self.sizes = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", what)}

    def ours(self):
        return [row for row in self.rows if row["version"] != "PyTorch"]

    def theirs(self):
        return [row for row in self.rows if row["version"] == "PyTorch"]


def read_tables(text, stem):
    tables = []
    for heading, lines in re.findall(rf"^({stem} [^\n]*)\n\n((?:\|[^\n]*\n)+)", text, re.M):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
        tables.append(Table(heading, lines, [dict(zip(cells[0], row)) for row in cells[2:]]))
    return tables


def markdown(columns, rows):
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    lines = ["| " + " | ".join(f"{cell:>{width}}" if i else f"{cell:{width}}"
                               for i, (cell, width) in enumerate(zip(row, widths))) + " |"
             for row in [columns, *rows]]
    rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def shape_of(table):
    s = table.sizes
    if "O" in s and "H" in s:
        return f"{s['C']} to {s['O']}, {s['H']}x{s['H']}"
    return f"{s['C']}, {s['H']}x{s['H']}" if "H" in s and "C" in s else table.case


def model_table(tables):
    """The program's version at every shape of a pass, beside the fastest of PyTorch's."""
    unit = "TFLOP/s" if "TFLOP/s" in tables[0].rows[0] else "GB/s"
    rows = []
    for table in sorted(tables, key=lambda table: (-table.sizes.get("H", 0), table.sizes.get("C", 0))):
        ours, theirs = table.ours()[-1], min(table.theirs(), key=lambda row: float(row["us"]))
        rows.append([shape_of(table), ours["us"], ours[unit], ours["of the floor"], theirs["us"], theirs[unit],
                     f"{float(theirs['us']) / float(ours['us']):.2f}"])
    columns = ["shape", "us", unit, "of the floor", "PyTorch us", f"PyTorch {unit}", "times faster"]
    return (f"{tables[0].stem} {tables[0].which}, the shapes of the default model: {tables[0].ours()[-1]['idea']}\n\n"
            + markdown(columns, rows))


def section(stem, output):
    title = re.sub(r"\n?// ", " ", (HERE / f"{stem}.cu").read_text().split("\n//\n", 1)[0]).strip()
    tables = [table for table in read_tables(output, stem) if ": floor " in table.heading]
    if not tables:
        sys.exit(f"{stem} printed no table with a floor: it ran without a GPU")
    ladders = [table for table in tables if len(table.ours()) > 1 or table.which == "apply"]
    pieces = [f"{table.heading}\n\n{table.text}" for table in ladders]
    for which in dict.fromkeys(table.which for table in tables):
        of_model = [table for table in tables if table.which == which and table.theirs()]
        if any(table not in ladders for table in of_model):
            pieces.append(model_table(of_model))
    pictures = [f"![{what}]({path.name})\n" for of, what, path, _ in PICTURES if of == stem]
    return "\n".join([f"## {stem}\n", title + "\n", explanation(stem) + "\n", *pictures, *pieces])


# ----------------------------------------------------------------------------------------------------
# pictures

OURS, OURS_LAST, THEIRS = "#9ecae1", "#08519c", "#bdbdbd"


def draw_ladder(plt, readme):
    """conv3x3: the rate of every version and of cuDNN, and what the floor would be. None where there is no table."""
    tables = [table for table in read_tables(readme, "conv3x3") if ": floor " in table.heading]
    tables = [next((t for t in tables if t.which == which and len(t.ours()) > 1), None)
              for which in ("forward", "input gradient", "weight gradient")]
    if None in tables:
        return None
    figure, axes = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    for axis, table in zip(axes, tables):
        rows = table.rows[::-1]
        last = table.ours()[-1]
        labels = [row["idea"] if row["version"] == "PyTorch" else f"{row['version']}  {row['idea']}" for row in rows]
        rates = [float(row["TFLOP/s"]) for row in rows]
        colors = [THEIRS if row["version"] == "PyTorch" else OURS_LAST if row is last else OURS for row in rows]
        bars = axis.barh(range(len(rows)), rates, color=colors)
        axis.bar_label(bars, [f"{rate:.3g}" for rate in rates], padding=3, fontsize=8, zorder=3,
                       bbox=dict(facecolor="white", edgecolor="none", pad=1))
        axis.set_yticks(range(len(rows)), labels, fontsize=8)
        floor = float(last["TFLOP/s"]) / float(last["of the floor"].rstrip("%")) * 100
        axis.axvline(floor, color="black", linestyle="--", linewidth=1)
        axis.text(floor * 0.9, len(rows) - 0.5, f"floor: {floor:.0f}", ha="right", va="bottom", fontsize=8)
        axis.set(xscale="log", xlim=(1, floor * 1.6), xlabel="TFLOP/s", title=table.which)
        axis.set_ylim(-0.6, len(rows))
        axis.spines[["top", "right"]].set_visible(False)
    s = tables[0].sizes
    figure.suptitle(f"3x3 convolution, {s['C']} to {s['O']} channels at {s['H']}x{s['W']}, batch {s['B']}"
                    f" ({device_of(readme)})")
    return figure


def draw_rates(plt, readme):
    """conv3x3: the rate of the program and of cuDNN at every shape of the default model."""
    tables = [table for table in read_tables(readme, "conv3x3") if table.case == "the shapes of the default model"]
    tables = [next((t for t in tables if t.which == which), None)
              for which in ("forward", "input gradient", "weight gradient")]
    if None in tables:
        return None
    figure, axes = plt.subplots(3, 1, figsize=(11, 9), layout="constrained", sharex=True)
    for axis, table in zip(axes, tables):
        places = range(len(table.rows))
        axis.bar([x - 0.2 for x in places], [float(row["TFLOP/s"]) for row in table.rows], 0.4, color=OURS_LAST,
                 label="train_unet.cu")
        axis.bar([x + 0.2 for x in places], [float(row["PyTorch TFLOP/s"]) for row in table.rows], 0.4,
                 color=THEIRS, label="cuDNN, bf16, channels_last")
        axis.set(ylabel="TFLOP/s", title=table.which)
        axis.set_xticks(places, [row["shape"] for row in table.rows], rotation=45, ha="right", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    figure.suptitle(f"3x3 convolutions of the default model, batch 32 ({device_of(readme)})")
    return figure


PICTURES = [("conv3x3", "Rates of the versions", HERE / "conv3x3_ladder.png", draw_ladder),
            ("conv3x3", "Rates at the model's shapes", HERE / "conv3x3_rates.png", draw_rates)]


def device_of(readme):
    return re.search(r"^All times are of one (.*)\.$", readme, re.M)[1]


def draw_pictures(readme):
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed, so the pictures stay as they were; python3 -m pip install matplotlib")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    for stem, _, path, draw in PICTURES:
        figure = draw(plt, readme)
        if figure is None:
            print(f"{path.name}: README.md has no such tables of {stem}")
            continue
        figure.savefig(path, dpi=110)
        plt.close(figure)
        print(path)


def main():
    folder, path = HERE.parent / "build/dev", HERE / "README.md"
    stems = [stem for stem in ORDER if (folder / f"{stem}.txt").exists()]
    if stems:
        outputs = {stem: (folder / f"{stem}.txt").read_text() for stem in stems}
        found = {stem: re.search(r" on (.*): \w+$", output, re.M) for stem, output in outputs.items()}
        if None in found.values():
            cut = [stem for stem in stems if not found[stem]]
            sys.exit(f"what these printed names no device, so run make bench again: {', '.join(cut)}")
        devices = {match[1] for match in found.values()}
        if len(devices) != 1:
            sys.exit(f"these times come from several devices: {', '.join(sorted(devices))}")
        measured = f"All times are of one {devices.pop()}.\n"
        sections = [section(stem, outputs[stem]) for stem in stems]
        path.write_text("\n".join([INTRODUCTION, measured, *sections, CLOSING]))
        print(f"{path}: {', '.join(stems)}")
    else:
        print("no new output of the ladders in build/dev: README.md stays, its pictures are drawn again")
    draw_pictures(path.read_text())


if __name__ == "__main__":
    main()
