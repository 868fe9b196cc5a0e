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

    def fastest(self):
        return min(self.theirs(), key=lambda row: float(row["us"]))


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
    """The program's version at every shape of a pass, beside the fastest of PyTorch's where that was timed."""
    unit = "TFLOP/s" if "TFLOP/s" in tables[0].rows[0] else "GB/s"
    columns, rows = ["shape", "us", unit, "of the floor"], []
    if tables[0].theirs():
        columns += ["PyTorch us", f"PyTorch {unit}", "times faster"]
    for table in sorted(tables, key=lambda table: (-table.sizes.get("H", 0), table.sizes.get("C", 0))):
        ours = table.ours()[-1]
        rows.append([shape_of(table), ours["us"], ours[unit], ours["of the floor"]])
        if table.theirs():
            theirs = table.fastest()
            rows[-1] += [theirs["us"], theirs[unit], f"{float(theirs['us']) / float(ours['us']):.2f}"]
    heading = f"{tables[0].stem} {tables[0].which}, the shapes of the default model: {tables[0].ours()[-1]['idea']}"
    return Table(heading, markdown(columns, rows), [])


def tables_of(stem, output):
    """What a ladder printed, as the tables of its section: of each pass all versions at one shape or two, and then the
    program's at every shape of the model."""
    tables = [table for table in read_tables(output, stem) if ": floor " in table.heading]
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
    folded = ["<details><summary>The other passes and shapes</summary>\n", *others, "</details>\n"] if others else []
    return "\n".join([f"### {stem}\n", title + "\n", *pictures, first, *folded])


def overview(page, name):
    """The table of all layers in dev/README.md, made from the sections in the text of a GPU's page of that name."""
    rows = []
    for stem in ORDER:
        seen = set()
        for table in read_tables(page, stem):
            if ": floor " in table.heading and table.theirs() and table.which not in seen:
                seen.add(table.which)
                ours = table.ours()
                rows.append([f"[{stem}](bench/{name}#{stem})", table.which, shape_of(table), len(ours), ours[0]["us"],
                             ours[-1]["us"], table.fastest()["us"]])
    return markdown(["layer", "pass", "shape", "versions", "first", "last", "PyTorch's"], rows)


def cpu_table(outputs):
    """The versions for a CPU, from what the ladders printed there, {stem: text}: ms of each pass, and how many times
    as fast as version 1 that is. Of PyTorch the fastest kind."""
    devices = {device for output in outputs.values() for device in re.findall(r" on the CPU: (.*)$", output, re.M)}
    if len(devices) != 1:
        raise UserError("what the ladders printed is not of one CPU, so run make bench DEVICE=cpu again")
    passes, rows = ["forward", "input gradient", "weight gradient", "backward"], []
    for stem, output in outputs.items():
        tables = {table.which: table for table in read_tables(output, stem)}
        shown = tables["forward"]
        ideas = {row["version"]: row["idea"] for row in shown.ours()} | {"PyTorch": shown.fastest()["idea"]}
        for version, idea in ideas.items():
            rows.append([f"[{stem}](../{stem}.cu)", shape_of(shown).removesuffix(" on a CPU"), version, idea])
            for which in passes:
                us = [(row["version"], float(row["us"])) for row in tables[which].rows] if which in tables else []
                best = min((time for of, time in us if of == version), default=None)
                rows[-1].append(f"{best / 1e3:.2f} ({us[0][1] / best:.1f}x)" if best else "")
    return (f"On {processor_name()}, {devices.pop()}; batches of {shown.sizes['B']}:\n\n"
            + markdown(["layer", "shape", "version", "idea", *(f"{which}, ms" for which in passes)], rows))


# ----------------------------------------------------------------------------------------------------
# pictures

OURS, OURS_LAST, THEIRS = "#9ecae1", "#08519c", "#bdbdbd"


def draw_ladder(plt, page):
    """conv3x3: the rate of every version and of cuDNN, and what the floor would be. None where there is no table."""
    tables = [table for table in read_tables(page, "conv3x3") if ": floor " in table.heading]
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
                    f" ({device_of(page)})")
    return figure


def draw_rates(plt, page):
    """conv3x3: the rate of the program and of cuDNN at every shape of the default model."""
    tables = [table for table in read_tables(page, "conv3x3") if table.case == "the shapes of the default model"]
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
    figure.suptitle(f"3x3 convolutions of the default model, batch 32 ({device_of(page)})")
    return figure


PICTURES = [("conv3x3", "Rates of the versions", HERE / "conv3x3_ladder.png", draw_ladder),
            ("conv3x3", "Rates at the model's shapes", HERE / "conv3x3_rates.png", draw_rates)]


def device_of(page):
    return re.search(r"^All times are of one (.*)\.$", page, re.M)[1]


def draw_pictures(page):
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


def main():
    if sys.argv[1:] == ["cpu"]:
        table = cpu_table(outputs_in("build/dev_cpu"))
        write_between(results_page("CPU"), {"ladders:cpu": table})
        print(table)
        return
    if sys.argv[1:]:
        sys.exit(__doc__)
    outputs = outputs_in("build/dev")
    path = HERE / "results-H100.md"
    if outputs:
        found = {stem: re.search(r" on (.*): \w+$", output, re.M) for stem, output in outputs.items()}
        if None in found.values():
            cut = [stem for stem in outputs if not found[stem]]
            raise UserError(f"what these printed names no device, so run make bench again: {', '.join(cut)}")
        devices = {match[1] for match in found.values()}
        if len(devices) != 1:
            raise UserError(f"these times come from several devices: {', '.join(sorted(devices))}")
        device, = devices
        sections = [section(stem, tables_of(stem, output)) for stem, output in outputs.items()]
        path = results_page(device)
        write_between(path, {"ladders": "\n".join([f"All times are of one {device}.\n", *sections])})
        print(f"{path}: {', '.join(outputs)}")
    else:
        print("no new output of the ladders in build/dev: their sections stay, table and pictures are made again")
    page = path.read_text()
    write_between(DEV / "README.md", {"ladders:overview": overview(page, path.name)})
    draw_pictures(page)


if __name__ == "__main__":
    unet_io.run_script(main)
