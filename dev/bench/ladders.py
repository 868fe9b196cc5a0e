"""Writes the ladders' tables from what they printed on this machine: `make bench` of dev/ runs them and then this.

A GPU's tables go to its page beside this file, results-H100.md for instance: a section a ladder, with the first of its
tables; the others are folded away. The table of all layers in dev/README.md and the pictures are made from that page,
so without new output of the ladders this makes the H100's again. With the word cpu it writes the table of the ladders on a
CPU, and nothing else: `make bench DEVICE=cpu`.
"""
import dataclasses
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from common import processor_name, results_page, write_between

import unet_io
from unet_io import UserError

HERE = pathlib.Path(__file__).resolve().parent
DEV = HERE.parent
ORDER = ["conv3x3", "conv1x1", "groupnorm", "attention", "linear", "elementwise", "gelu", "adamw", "resblock",
         "attention_block"]
PASSES = ("forward", "input gradient", "weight gradient")  # of a convolution


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

    def has_floor(self):
        """Whether it is of a GPU, for which a ladder knows the least time that the pass can take."""
        return ": floor " in self.heading

    def ours(self):
        return [row for row in self.rows if row["version"] != "PyTorch"]

    def theirs(self):
        return [row for row in self.rows if row["version"] == "PyTorch"]

    def fastest(self):
        """The row of PyTorch's fastest kind."""
        return min(self.theirs(), key=lambda row: float(row["us"]))


def read_tables(text, stem):
    """The tables of a ladder in what it printed, or in a page."""
    tables = []
    for heading, lines in re.findall(rf"^({stem} [^\n]*)\n\n((?:\|[^\n]*\n)+)", text, re.M):
        columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
        tables.append(Table(heading, lines, [dict(zip(columns, row)) for row in rows]))
    return tables


def markdown(columns, rows):
    """A table that is aligned as text too: the first column to the left, the others to the right."""
    table = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*table)]

    lines = []
    for first, *others in table:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    rules = ["-" * (widths[0] + 2)]
    rules += ["-" * (width + 1) + ":" for width in widths[1:]]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:]]) + "\n"


def shape_of(table):
    """The shape of a table's case, as a row names it."""
    s = table.sizes
    if "O" in s and "H" in s:
        return f"{s['C']} to {s['O']}, {s['H']}x{s['H']}"
    if "H" in s and "C" in s:
        return f"{s['C']}, {s['H']}x{s['H']}"
    return table.case


def model_table(tables):
    """The program's version at every shape of a pass, beside the fastest of PyTorch's where that was timed."""
    unit = "TFLOP/s" if "TFLOP/s" in tables[0].rows[0] else "GB/s"
    columns = ["shape", "us", unit, "of the floor"]
    if tables[0].theirs():
        columns += ["PyTorch us", f"PyTorch {unit}", "times faster"]

    rows = []
    for table in sorted(tables, key=lambda table: (-table.sizes.get("H", 0), table.sizes.get("C", 0))):
        ours = table.ours()[-1]
        row = [shape_of(table), ours["us"], ours[unit], ours["of the floor"]]
        if table.theirs():
            theirs = table.fastest()
            row += [theirs["us"], theirs[unit], f"{float(theirs['us']) / float(ours['us']):.2f}"]
        rows.append(row)
    heading = f"{tables[0].stem} {tables[0].which}, the shapes of the default model: {tables[0].ours()[-1]['idea']}"
    return Table(heading, markdown(columns, rows), [])


def tables_of(stem, output):
    """What a ladder printed, as the tables of its section: of each pass all versions at one shape or two, and then the
    program's at every shape of the model."""
    tables = [table for table in read_tables(output, stem) if table.has_floor()]
    if not tables:
        raise UserError(f"{stem} printed no table with a floor: it ran without a GPU")

    ladders = [table for table in tables if len(table.ours()) > 1]
    models = []
    for which in dict.fromkeys(table.which for table in tables):
        of_pass = [table for table in tables if table.which == which]
        timed = [table for table in of_pass if table.theirs()] or of_pass
        if any(table not in ladders for table in timed):
            models.append(model_table(timed))
    return ladders + models


def section(stem, tables):
    """What the page says of a layer: what it is, a table, and the others folded away."""
    title = re.sub(r"\n?// ", " ", (DEV / f"{stem}.cu").read_text().split("\n//\n", 1)[0]).strip()
    title += f" [{stem}.cu](../{stem}.cu) says what the steps change."
    pictures = [f"![{what}]({path.name})\n" for of, what, path, _ in PICTURES if of == stem]
    first, *others = [f"{table.heading}\n\n{table.text}" for table in tables]
    folded = []
    if others:
        folded = ["<details><summary>The other passes and shapes</summary>\n", *others, "</details>\n"]
    return "\n".join([f"### {stem}\n", title + "\n", *pictures, first, *folded])


def overview(page, name):
    """The table of all layers in dev/README.md, made from the sections in the text of a GPU's page of that name."""
    rows = []
    for stem in ORDER:
        first = {}  # table of each pass
        for table in read_tables(page, stem):
            if table.has_floor() and table.theirs():
                first.setdefault(table.which, table)
        for which, table in first.items():
            ours = table.ours()
            rows.append([f"[{stem}](bench/{name}#{stem})", which, shape_of(table), len(ours), ours[0]["us"], ours[-1]["us"],
                         table.fastest()["us"]])
    return markdown(["layer", "pass", "shape", "versions", "first", "last", "PyTorch's"], rows)


def cpu_table(outputs):
    """The versions for a CPU, from what the ladders printed there, {stem: text}: ms of each pass, and how many times
    as fast as version 1 that is. Of PyTorch the fastest kind."""
    devices = {device for output in outputs.values() for device in re.findall(r" on the CPU: (.*)$", output, re.M)}
    if len(devices) != 1:
        raise UserError("what the ladders printed is not of one CPU, so run make bench DEVICE=cpu again")

    passes = [*PASSES, "backward"]
    rows = []
    for stem, output in outputs.items():
        tables = {table.which: table for table in read_tables(output, stem)}
        shown = tables["forward"]
        ideas = {row["version"]: row["idea"] for row in shown.ours()}
        ideas["PyTorch"] = shown.fastest()["idea"]
        for version, idea in ideas.items():
            times = [time_on_a_cpu(tables.get(which), version) for which in passes]
            rows.append([f"[{stem}](../{stem}.cu)", shape_of(shown).removesuffix(" on a CPU"), version, idea, *times])
    return (f"On {processor_name()}, {devices.pop()}; batches of {shown.sizes['B']}:\n\n"
            + markdown(["layer", "shape", "version", "idea", *(f"{which}, ms" for which in passes)], rows))


def time_on_a_cpu(table, version):
    """'2.00 (4.0x)': ms of a version and how many times as fast as version 1 it is; nothing where it has no such pass."""
    if table is None:
        return ""
    us = [float(row["us"]) for row in table.rows if row["version"] == version]
    if not us:
        return ""
    best = min(us)
    first = float(table.rows[0]["us"])
    return f"{best / 1e3:.2f} ({first / best:.1f}x)"


# ----------------------------------------------------------------------------------------------------
# pictures

# colours of bars: earlier versions, the last one, which is the program's, and PyTorch
OURS = "#9ecae1"
OURS_LAST = "#08519c"
THEIRS = "#bdbdbd"


def first_of_each_pass(tables):
    """The first table of each of PASSES; None where one has none."""
    found = {}
    for table in tables:
        found.setdefault(table.which, table)
    if any(which not in found for which in PASSES):
        return None
    return [found[which] for which in PASSES]


def draw_ladder(plt, page):
    """conv3x3: the rate of every version and of cuDNN, and what the floor would be. None where there is no table."""
    tables = first_of_each_pass(table for table in read_tables(page, "conv3x3")
                                if table.has_floor() and len(table.ours()) > 1)
    if tables is None:
        return None
    figure, axes = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    for axis, table in zip(axes, tables):
        draw_versions(axis, table)
    s = tables[0].sizes
    figure.suptitle(f"3x3 convolution, {s['C']} to {s['O']} channels at {s['H']}x{s['W']}, batch {s['B']}"
                    f" ({device_of(page)})")
    return figure


def draw_versions(axis, table):
    """A bar for each version of a pass, version 1 on top, and a line at the floor."""
    last = table.ours()[-1]
    labels = []
    rates = []
    colors = []
    for row in table.rows[::-1]:
        rates.append(float(row["TFLOP/s"]))
        if row["version"] == "PyTorch":
            labels.append(row["idea"])
            colors.append(THEIRS)
        else:
            labels.append(f"{row['version']}  {row['idea']}")
            colors.append(OURS_LAST if row is last else OURS)

    bars = axis.barh(range(len(rates)), rates, color=colors)
    axis.bar_label(bars, [f"{rate:.3g}" for rate in rates], padding=3, fontsize=8, zorder=3,
                   bbox=dict(facecolor="white", edgecolor="none", pad=1))
    axis.set_yticks(range(len(rates)), labels, fontsize=8)
    floor = float(last["TFLOP/s"]) / float(last["of the floor"].rstrip("%")) * 100
    axis.axvline(floor, color="black", linestyle="--", linewidth=1)
    axis.text(floor * 0.9, len(rates) - 0.5, f"floor: {floor:.0f}", ha="right", va="bottom", fontsize=8)
    axis.set(xscale="log", xlim=(1, floor * 1.6), xlabel="TFLOP/s", title=table.which)
    axis.set_ylim(-0.6, len(rates))
    axis.spines[["top", "right"]].set_visible(False)


def draw_rates(plt, page):
    """conv3x3: the rate of the program and of cuDNN at every shape of the default model. None where there is no table."""
    tables = first_of_each_pass(table for table in read_tables(page, "conv3x3")
                                if table.case == "the shapes of the default model")
    if tables is None:
        return None
    figure, axes = plt.subplots(3, 1, figsize=(11, 9), layout="constrained", sharex=True)
    for axis, table in zip(axes, tables):
        places = range(len(table.rows))
        ours = [float(row["TFLOP/s"]) for row in table.rows]
        theirs = [float(row["PyTorch TFLOP/s"]) for row in table.rows]
        axis.bar([x - 0.2 for x in places], ours, 0.4, color=OURS_LAST, label="train_unet.cu")
        axis.bar([x + 0.2 for x in places], theirs, 0.4, color=THEIRS, label="cuDNN, bf16, channels_last")
        axis.set(ylabel="TFLOP/s", title=table.which)
        axis.set_xticks(places, [row["shape"] for row in table.rows], rotation=45, ha="right", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    figure.suptitle(f"3x3 convolutions of the default model, batch 32 ({device_of(page)})")
    return figure


PICTURES = [("conv3x3", "Rates of the versions", HERE / "conv3x3_ladder.png", draw_ladder),
            ("conv3x3", "Rates at the model's shapes", HERE / "conv3x3_rates.png", draw_rates)]


def device_of(page):
    """The name of the GPU that a page's ladders were measured on."""
    return re.search(r"^All times are of one (.*)\.$", page, re.M)[1]


def draw_pictures(page):
    """Draw PICTURES from a GPU's page, where matplotlib and the tables are there."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed, so the pictures stay as they were; python3 -m pip install matplotlib")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    for stem, _, path, draw in PICTURES:
        figure = draw(plt, page)
        if figure is None:
            print(f"{path.name}: the page has no such tables of {stem}")
            continue
        figure.savefig(path, dpi=110)
        plt.close(figure)
        print(path)


def outputs_in(folder):
    """What the ladders printed, {stem: text}, in the order of the page."""
    paths = {stem: DEV.parent / folder / f"{stem}.txt" for stem in ORDER}
    return {stem: path.read_text() for stem, path in paths.items() if path.exists()}


def write_cpu_page():
    table = cpu_table(outputs_in("build/dev_cpu"))
    write_between(results_page("CPU"), {"ladders:cpu": table})
    print(table)


def write_gpu_page(outputs):
    """Write the sections of {stem: what its ladder printed}, and return the page. Raises UserError for several GPUs."""
    found = {stem: re.search(r" on (.*): \w+$", output, re.M) for stem, output in outputs.items()}
    if None in found.values():
        cut = [stem for stem in outputs if not found[stem]]
        raise UserError(f"what these printed names no device, so run make bench again: {', '.join(cut)}")
    devices = sorted({match[1] for match in found.values()})
    if len(devices) != 1:
        raise UserError(f"these times come from several devices: {', '.join(devices)}")

    sections = [section(stem, tables_of(stem, output)) for stem, output in outputs.items()]
    path = results_page(devices[0])
    write_between(path, {"ladders": "\n".join([f"All times are of one {devices[0]}.\n", *sections])})
    print(f"{path}: {', '.join(outputs)}")
    return path


def main():
    if sys.argv[1:] == ["cpu"]:
        write_cpu_page()
        return
    if sys.argv[1:]:
        sys.exit(__doc__)

    outputs = outputs_in("build/dev")
    if outputs:
        path = write_gpu_page(outputs)
    else:
        print("no new output of the ladders in build/dev: their sections stay, table and pictures are made again")
        path = HERE / "results-H100.md"
    page = path.read_text()
    write_between(DEV / "README.md", {"ladders:overview": overview(page, path.name)})
    draw_pictures(page)


if __name__ == "__main__":
    unet_io.run_script(main)
