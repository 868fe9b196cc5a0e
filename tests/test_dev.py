"""The ladders and tools of dev/."""
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode

import generate
import train_unet
from harness import (
    ROOT, SMALL, TOY, TRAIN, call, losses_in, perturbed_file, picture, refused, run, same_bits,
    script, start_flags, variant)
from unet_io import Config, UserError


# ----------------------------------------------------------------------------------------------------
# dev/

LADDERS = sorted({path.stem for path in (ROOT / "dev").glob("*.py") if path.with_suffix(".cu").exists()})


@pytest.mark.parametrize("stem", LADDERS)
def test_ladder(stem, cpp, tmp_path, monkeypatch, capsys):
    """Every version of a layer in dev/ against PyTorch; without a GPU, those for the CPU."""
    monkeypatch.setenv("DEV_DATA", str(tmp_path))
    monkeypatch.syspath_prepend(ROOT / "dev")
    monkeypatch.setattr(sys, "argv", [stem])
    runpy.run_path(str(ROOT / f"dev/{stem}.py"), run_name="__main__")
    cpp(variant("ladders"), stem)


def test_choices_of_a_ladder(tmp_path, monkeypatch):
    """Where there is no such version or case, it says which there are."""
    monkeypatch.setenv("DEV_DATA", str(tmp_path))
    script("dev/gelu.py")
    for words in (["77"], ["all", "9x9"]):
        refused(variant("ladders"), "gelu", *words, status=2,
                says=["no such version or case here", "versions are 0", "cases '"])


def test_ladders_cover_the_model(tmp_path, monkeypatch):
    """Every shape of the default model's plan is a case that dev/ times."""
    plan = run(TRAIN, "--dry_run", "--out_dir", tmp_path).stdout
    stems = ("conv3x3", "conv1x1", "groupnorm", "attention", "upsample", "downsample")
    wanted = {stem: set() for stem in stems}
    row = r"^\d+ +\S+ +(\w+) +(\d+) \d+ (\d+)(?: \+ (\d+))? +\d+ \d+ (\d+)"
    for kind, H, C, C2, O in re.findall(row, plan, re.M):
        H, K, O = int(H), int(C) + int(C2 or 0), int(O)
        if kind in ("conv", "residual", "out"):
            K8, O8 = (-(-channels // 8) * 8 for channels in (K, O))  # as a GPU has them in memory
            wanted["conv3x3"] |= {(K8, O8, H)} | ({(O, O, H)} if kind == "residual" else set())
        if kind in ("residual", "attention", "out"):
            wanted["groupnorm"] |= {(K, H)} | ({(O, H)} if kind == "residual" else set())
        if kind == "residual" and K != O:
            wanted["conv1x1"].add((K, O, H))
        if kind == "attention":
            wanted["conv1x1"] |= {(K, 3 * K, H), (K, K, H)}
            wanted["attention"].add((K, H))
        if kind in ("up", "down"):
            wanted[kind + "sample"].add((K, H))
    monkeypatch.syspath_prepend(ROOT / "dev")
    for stem, shapes in wanted.items():
        file, cases = ("elementwise", f"{stem.upper()}_CASES") if stem.endswith("sample") else (stem, "CASES")
        cases = [case for case in runpy.run_path(str(ROOT / f"dev/{file}.py"))[cases].values()
                 if case["B"] == 32 and {"timed", "model"} & set(case)]
        timed = {(case["heads"] * case["d"], round(case["T"]**0.5)) if stem == "attention" else
                 tuple(case[size] for size in "COH" if size in case) for case in cases}
        assert len(shapes) > 1 and shapes <= timed, (stem, shapes - timed)


def test_ladders_of_make():
    """make takes what has a .cu and a .py for a ladder, and none of the tools."""
    for folder in (ROOT, ROOT / "dev"):
        database = run("make", "-pn", "-C", folder, "clean").stdout
        assert set(re.search(r"^LADDERS := (.*)$", database, re.M)[1].split()) == set(LADDERS)


# ----------------------------------------------------------------------------------------------------
# what is measured, and the pages that it is written into

def profile_tables(text):
    """The tables of dev/bench/profile: a list of {name: (launches, ms, share)}, each with its sum."""
    tables = []
    for line in text.splitlines():
        row = re.fullmatch(r"(\S.*?) +(\d+) +([\d.]+) +([\d.]+)% +[\d.]+ +[\d.]+ +(?:-|\d+%)", line)
        if line.split()[:2] == ["launches", "ms"]:
            tables.append({})
        elif row:
            tables[-1][row[1]] = int(row[2]), float(row[3]), float(row[4])
    return tables


def test_profile(tmp_path):
    """Both tables add up and agree; the operations of a step are those that PyTorch counts. The timeline has
    the same kinds and blocks, and on a stream one after another."""
    result = run(variant("profile"), "--batch_size", 1, "--profile_trace", tmp_path / "step.json")
    assert re.match(r"train_unet on .+, batch 1\n", result.stdout) and "no line counts" not in result.stdout
    kinds, blocks = profile_tables(result.stdout)
    assert kinds["sum of the parts"] == blocks["sum of the parts"]
    for table in (kinds, blocks):
        launches, ms, share = table.pop("sum of the parts")
        assert sum(row[0] for row in table.values()) == launches and share == 100
        assert abs(sum(row[1] for row in table.values()) - ms) < 1e-3 * len(table)
        assert abs(sum(row[2] for row in table.values()) - 100) < 0.05 * len(table) + 1e-6
    assert {f"{size} {what}" for size in ("3x3", "1x1") for what in ("forward", "dX", "dW")} < kinds.keys()
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    streams = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    timed = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in timed} == set(kinds) and {e["cat"] for e in timed} == set(blocks)
    assert streams == {0: "main stream", 1: "side stream"} and len(events) == len(timed) + 2
    for stream in streams:
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in timed if e["tid"] == stream]
        assert all(begin >= end - 0.1 for (_, end), (begin, _) in zip(spans, spans[1:]))  # in their order
    plan = re.findall(r"^\d+ +(\S+) +\w+ +\d+ \d+ ", run(TRAIN, "--dry_run").stdout, re.M)
    assert [name for name in blocks if name != "step"] == plan and len(plan) > 40
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model, t = train_unet.UNet(Config()), torch.zeros(1, dtype=torch.long)
        model(torch.empty(1, 3, 64, 64), t).sum().backward()
    ours = float(re.search(r"^operations: +([\d.]+) GFLOP an image", result.stdout, re.M)[1])
    assert abs(ours / (counter.get_total_flops() / 1e9) - 1) < 3e-4 and 38 < ours < 39


def test_benchmark_tables(tools):
    """The GPU's tables: each kind's newest pair of one GPU, none from a GPU of another name."""
    benchmark = tools("benchmark")
    head, rows = "train_unet on X: bf16, batch 32\nfloor", ["kinds", "blocks", "the rest"]
    ours = dict(preset="unet64", precision="bf16", batch=32, uuid="new", of="the program", program="./train_unet",
                step_ms=5.0, call_ms=1.0, loop_ms=5.5, memory_mib=512.0, first_s=1.0, gpu="X",
                profile="\n\n".join([head, *rows]), default_ms=5.0, everything_ms=5.1)
    theirs = dict(preset="unet64", precision="bf16", batch=32, uuid="new", of="PyTorch", step_ms=15.0, call_ms=4.0,
                  memory_mib=1024.0, first_s=100.0, torch="2.9")
    lines = [ours | dict(batch=64, uuid="Y", gpu="Y"), theirs | dict(batch=64, uuid="Y"),
             ours | dict(batch=256, uuid="old"), theirs | dict(batch=256, uuid="old"), ours | dict(step_ms=9.0),
             theirs, ours, ours | dict(batch=128), theirs | dict(batch=128, uuid="old")]
    texts = benchmark.render_gpu(lines)
    assert "**3.00 times (batch 32), 3.00 times (batch 256) as fast as PyTorch**, on X." in texts["gpu"]
    assert "| 64 |" not in texts["gpu"] and "| 128 |" not in texts["gpu"]
    assert "| **times better** | 32 | **3.00** | | **4.00** | **2.00** | **100** |" in texts["gpu"]
    assert "+2.0% (5.00 to 5.10 ms, bf16, batch 32);" in texts["gpu"]
    assert head in texts["profile"] and "blocks" in texts["profile"] and "the rest" not in texts["profile"]
    assert benchmark.render_gpu(lines[:1]) == {}
    official = benchmark.render_gpu([line | dict(preset="adm64") for line in (ours, theirs)])
    assert list(official) == ["adm64"]
    dit = benchmark.render_gpu([line | dict(preset="DiT-B/2", program="./train_dit") for line in (ours, theirs)])
    assert list(dit) == ["DiT-B/2"] and "| `./train_dit`, bf16 | 32 |" in dit["DiT-B/2"] and head in dit["DiT-B/2"]
    tables = {"gpu": texts["gpu"], "adm64": official["adm64"], "cpu": ""}
    page = "".join(f"<!-- bench:{name} -->\n{text}<!-- /bench:{name} -->\n" for name, text in tables.items())
    assert benchmark.speed_table([page]).splitlines()[2:] == [
        f"| X | {model}, bf16 | {batch} | 5.00 | 15.00 | 3.00 | 0.50 GiB | 1.00 GiB |"
        for model, batch in (("unet64", 32), ("unet64", 256), ("adm64", 32))]


GPU_PAGE, CPU_PAGE = "dev/bench/results-H100.md", "dev/bench/results-CPU.md"


def copied_pages(tools, tmp_path, monkeypatch):
    """{name: text} of the pages that a benchmark writes, in a folder of its own from now on."""
    pages = {name: (ROOT / name).read_text() for name in ("README.md", GPU_PAGE, CPU_PAGE)}
    (tmp_path / "dev/bench").mkdir(parents=True)
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(tools("benchmark"), "ROOT", tmp_path)
    monkeypatch.setattr(tools("common"), "HERE", tmp_path / "dev")
    return pages


def test_benchmark_pages(tools, tmp_path, monkeypatch):
    """The short table is that of the long ones; a CPU's benchmark writes its table and leaves the rest."""
    benchmark, common = tools("benchmark"), tools("common")
    pages = copied_pages(tools, tmp_path, monkeypatch)
    benchmark.write_pages("CPU")
    assert {name: (tmp_path / name).read_text() for name in pages} == pages
    times = {kind: (50.0 + n, 6.0 + n) for n, kind in enumerate(reversed(benchmark.KINDS))}
    monkeypatch.setattr(benchmark, "measure_case", lambda case, threads: times | {"./train_unet": (25.0, 2.0)})
    monkeypatch.setattr(benchmark, "seconds_to_draw", lambda threads: 3.2)
    benchmark.benchmark_cpu("fp32, 2 threads")
    written = {name: (tmp_path / name).read_text() for name in pages}
    for name, marker in (("README.md", "bench:speed"), (CPU_PAGE, "bench:cpu")):
        new, old = common.text_between(written[name], marker), common.text_between(pages[name], marker)
        assert written[name] == pages[name].replace(old, new) and new != old
    for model, batch in (("unet64", 4), ("tiny", 8)):
        row = f"| {model}, fp32 | {batch} | 25.0 | 50.0 | 2.00 | 2.00 GB | 6.00 GB |"
        assert row in written["README.md"]
    for line in ("| unet64 | 16 | 25.0 | 50.0 | 2.00 | torch.compile, channels_last |", "0.200 s a picture.",
                 "| one core is busy with another program | 25.0 | 50.0 | 2.00 | torch.compile, channels_last |"):
        assert line in written[CPU_PAGE]
    assert written[GPU_PAGE] == pages[GPU_PAGE]
    (tmp_path / CPU_PAGE).write_text("no markers")
    with pytest.raises(UserError, match="<!-- bench:cpu -->"):
        benchmark.write_pages("CPU", cpu="")
    assert (tmp_path / CPU_PAGE).read_text() == "no markers"
    page = common.results_page("NVIDIA GeForce RTX 4090")  # a GPU's first
    assert page == tmp_path / "dev/bench/results-RTX4090.md" and "bench:gpu -->\n<!-- /bench:gpu" in page.read_text()
    assert "H100" not in page.read_text() and common.results_page("NVIDIA H100 80GB HBM3") == tmp_path / GPU_PAGE


def test_benchmark_on_a_cpu(tools, monkeypatch):
    """Steps and calls are measured, here of the smallest preset and without compiling; a worker's end is told."""
    benchmark = tools("benchmark")
    measured, built = benchmark.run_measured, {"./train_unet": TRAIN, "dev/bench/profile": variant("profile")}
    monkeypatch.setattr(benchmark, "run_measured",
                        lambda program, *flags, **others: measured(built[program], *flags, **others))
    monkeypatch.setattr(benchmark, "KINDS", benchmark.KINDS[:2])
    monkeypatch.setattr(benchmark, "ROUNDS", 2)
    for what, busy in (("step", "no"), ("call", "one")):
        start = time.monotonic()
        times = benchmark.measure_case(benchmark.Case(what, "tiny", 1, 2, busy), 1)
        assert list(times) == ["./train_unet", *benchmark.KINDS]
        most = 1e3 * (time.monotonic() - start)
        assert all(0 < ms < most and 0.01 < memory < 10 for ms, memory in times.values())
    with pytest.raises(UserError, match="ended before it had measured"):
        benchmark.measure_case(benchmark.Case("step", "no such preset", 1, 2), 1)


def test_benchmark_of_ranks(tools, tmp_path, monkeypatch):
    """The table of several GPUs; what the program logs is read, here with --processes; NCCL without messages compiles."""
    benchmark = tools("benchmark")
    rows = [dict(batch=32, gpus=2, alone=6000.0, ours=11400.0, silent=12000.0,
                 theirs=dict(images_per_s=3800.0, how="CUDA graph", torch="2.9"))]
    last = benchmark.render_ranks(dict(gpu="X", rows=rows)).splitlines()[-1]
    assert last == "| 2 | 32 | 11400 | 95.0% | 3800 | 3.00 | 63 MB | 0.28 of 5.61 ms |"
    launched = benchmark.launched
    as_processes = (lambda command, line, **environment: launched(
        ["--processes" if word == "--gpus" else word for word in command], line))
    monkeypatch.setattr(benchmark, "launched", as_processes)
    monkeypatch.setattr(benchmark, "PROGRAMS", dict(bf16=TRAIN))
    monkeypatch.setattr(benchmark, "RANKS", dict(preset="tiny", seconds=0.005))
    assert all(0 < benchmark.images_per_second(2, ranks, "none") < 1e5 for ranks in (1, 2))
    built = subprocess.run(["cc", "-D_GNU_SOURCE", '-DLIBRARY="none"', "-Wall", "-Werror", "-shared", "-fPIC", "-x", "c", "-",
                            "-o", str(tmp_path / "none.so"), "-ldl"], input=benchmark.NO_MESSAGES, text=True)
    assert built.returncode == 0


DRAWN = dict(gpu="X", torch="2.9", ours={1: 0.5, 2: 0.8, 32: 1.6}, theirs={1: 1.0, 2: 2.0, 32: 4.0}, seconds=0.8,
             seconds_of_one=0.5)


def test_benchmark_of_drawing(tools, tmp_path, monkeypatch, capsys):
    """Calls and drawing are measured, here of a small model on the CPU, and written into their place alone."""
    benchmark, common = tools("benchmark"), tools("common")
    text = benchmark.render_drawing(DRAWN)
    assert "| 2 | 0.800 | 2.000 | 2.50 | 2500 | 1000 |" in text and "| 1 | 0.500 | 1.000 | 2.00 | 2000 |" in text
    assert "takes 0.80 s from its start to the PNG, 80.0 pictures a second; with one\nstep 0.50 s." in text
    assert "Its 100 calls of 32 pictures alone take 0.16 s; PyTorch's take 0.40 s" in text
    launched, tiny = benchmark.launched, ["--preset", "tiny"]
    monkeypatch.setattr(benchmark, "DRAWING", dict(batches=(1, 2), batch=2, pictures=4, steps=3, runs=2))
    monkeypatch.setattr(benchmark, "PROGRAMS", dict(bf16=TRAIN))
    monkeypatch.setattr(benchmark, "PROFILES", dict(bf16=variant("profile")))
    monkeypatch.setattr(benchmark, "launched", lambda command, line: launched([*command, *tiny], line))
    start = time.monotonic()
    calls, device = benchmark.measure_calls()
    most = 1e3 * (time.monotonic() - start)
    assert sorted(calls) == [1, 2] and all(0 < ms < most for ms in calls.values()) and device
    start, drawing = time.monotonic(), benchmark.measure_drawing()
    assert all(0 < seconds < time.monotonic() - start for seconds in drawing)
    # without a GPU: PyTorch's part as it is, but for compiling, recording and the GPU's clock
    small = Config(**SMALL)
    monkeypatch.setattr(benchmark, "preset_config", lambda preset, batch: small)
    monkeypatch.setattr(benchmark, "opponent", lambda config, half: (
        train_unet.UNet(config), torch.channels_last, torch.autocast("cpu", torch.bfloat16)))
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    monkeypatch.setattr(benchmark, "replay_of", lambda call, warmup: call)
    monkeypatch.setattr(benchmark, "milliseconds", lambda call: 10.0 * len(call()))
    benchmark.time_opponent_calls()
    printed = capsys.readouterr().out
    assert json.loads(printed)["calls"] == {"1": 10.0, "2": 10.0}
    # all of it, into pages of its own
    pages = copied_pages(tools, tmp_path, monkeypatch)
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(benchmark, "launched", lambda command, line: (1, printed))
    monkeypatch.setattr(benchmark, "identity", lambda: "this GPU")
    monkeypatch.setattr(benchmark, "measure_calls", lambda: (calls, "NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr(benchmark, "measure_drawing", lambda: (0.8, 0.5))
    benchmark.benchmark_drawing()
    written = {name: (tmp_path / name).read_text() for name in pages}
    marked = common.text_between(written[GPU_PAGE], "bench:drawing")
    assert "4 --sample_steps 3` takes 0.80 s" in marked and "| 2 |" in marked
    empty = "<!-- bench:drawing -->\n"
    old = empty + common.text_between(pages[GPU_PAGE], "bench:drawing")
    assert written == pages | {GPU_PAGE: pages[GPU_PAGE].replace(old, empty + marked)}
    assert json.loads((tmp_path / "results.jsonl").read_text())["preset"] == "drawing"


def test_ladder_pages(tools):
    """A section from a ladder's output: a table of the versions, others folded away, the model's in one."""
    ladders = tools("ladders")
    columns = "| version | layout | type | error | us | GB/s | of the floor | idea |\n|--|--|--|--|--|--|--|--|\n"
    program = "| 2 | NHWC | bf16 | 1e-3 | 2.0 | 50 | 50.0% | the program's |\n"
    output = ""
    for which, case, rows in (
            ("forward", "large (B=32 C=8 H=64 W=64)",
             ["| 1 | NCHW | fp32 | 1e-6 | 8.0 | 12 | 12.5% | plain |\n", program,
              "| PyTorch | | | | 3.0 | 33 | 33.3% | eager |\n", "| PyTorch | | | | 4.0 | 25 | 25.0% | fp32 |\n"]),
            ("forward", "small (B=32 C=16 H=8 W=8)",
             [program, "| PyTorch | | | | 1.0 | 99 | 99.0% | eager |\n"]),
            ("apply", "small (B=32 C=16 H=8 W=8)", [program])):
        output += f"gelu {which}, {case}: floor 1 us\n\n{columns}{''.join(rows)}\n"
    section = ladders.section("gelu", ladders.tables_of("gelu", output))
    before, folded = section.split("<details>")
    assert "| plain |" in before and "the shapes of the default model" not in before
    def cells(line):
        return [cell.strip() for cell in line.strip("|").split("|")]

    rows = [cells(line) for line in folded.splitlines() if "," in line]
    assert ["8, 64x64", "2.0", "50", "50.0%", "3.0", "33", "1.50"] in rows
    assert ["16, 8x8", "2.0", "50", "50.0%", "1.0", "99", "0.50"] in rows
    assert ["16, 8x8", "2.0", "50", "50.0%"] in rows
    overview = ladders.overview(section, "results-X.md").splitlines()
    assert len(overview) == 3
    assert cells(overview[2]) == [
        "[gelu](bench/results-X.md#gelu)", "forward", "8, 64x64", "2", "8.0", "2.0", "3.0"]
    with pytest.raises(UserError, match="without a GPU"):
        ladders.tables_of("gelu", "version 1 ok\n")
    page, worklog = (ROOT / GPU_PAGE).read_text(), (ROOT / "dev/README.md").read_text()
    assert ladders.overview(page, "results-H100.md") == tools("common").text_between(worklog, "ladders:overview")
    assert len(worklog.splitlines()) <= 300
    assert ladders.device_of(page) and page.count("<details>") == page.count("</details>")
    assert [stem for stem in ladders.ORDER if f"\n### {stem}\n" in page] == ladders.ORDER


def test_ladder_page_of_a_cpu(tools):
    """One table of what the ladders printed on a CPU: a line a version, a column a pass, PyTorch's fastest."""
    ladders = tools("ladders")
    columns = "| version | layout | type | error | us | GFLOP/s |  | idea |\n|--|--|--|--|--|--|--|--|\n"
    output = "conv1x1 on the CPU: fp32, 2 threads, vectors of 16\n"
    for which, us in (("forward", (8000, 2000, 4000, 1000)), ("input gradient", (9000, 4500, 6000, 7000))):
        rows = zip(("1", "3", "PyTorch", "PyTorch"), us, ("plain", "the program's", "NCHW", "channels_last"))
        output += (f"ok conv1x1 {which} version 1\n\nconv1x1 {which}, 8x8 on a CPU (B=4 C=16 H=8 O=24 W=8)\n\n{columns}"
                   + "".join(f"| {version} | | | | {time} | 1.0 |  | {idea} |\n" for version, time, idea in rows))
    table = ladders.cpu_table({"conv1x1": output})
    assert "2 threads, vectors of 16; batches of 4:\n" in table
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "conv1x1" in line]
    assert rows == [["[conv1x1](../conv1x1.cu)", "16 to 24, 8x8", *cells, "", ""] for cells in (
        ("1", "plain", "8.00 (1.0x)", "9.00 (1.0x)"), ("3", "the program's", "2.00 (4.0x)", "4.50 (2.0x)"),
        ("PyTorch", "channels_last", "1.00 (8.0x)", "6.00 (1.5x)"))]
    other = output.replace("2 threads", "3 threads")
    for outputs in ({}, {"conv1x1": output, "silu": other}, {"silu": "silu on a GPU"}):
        with pytest.raises(UserError, match="not of one CPU"):
            ladders.cpu_table(outputs)


# ----------------------------------------------------------------------------------------------------
# a run's log, in pictures and for TensorBoard

def metrics_file(path, steps=range(10, 60, 10), ending="", **more):
    """A metrics.jsonl as ./train_unet writes it; `more` goes into every line of a loss."""
    lines = []
    for step in steps:
        line = dict(step=step, loss=10 / step, smoothed=20 / step, grad_norm=1.5, lr=1e-4 * step)
        lines.append(line | more)
        lines += [dict(step=step, val_loss=5 / step)] * (step % 20 == 0)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + ending)
    return path


def test_read_metrics(tmp_path, tools):
    """The later line of a step counts; cut lines, other lines and nulls do no harm."""
    read = tools("plot_log").read_metrics
    whole = read(metrics_file(tmp_path / "a.jsonl"))
    assert whole["loss"] == {10: 1, 20: 0.5, 30: 10 / 30, 40: 0.25, 50: 0.2}
    assert whole["val_loss"] == {20: 0.25, 40: 0.125} and "step" not in whole
    cut = ('[1]\n3\n\n{"loss": 1}\n{"step": null}\n{"step": Infinity}\n'
           '{"step": 60, "loss": null, "lr": 1}\n{"step": 70, "lo')
    assert read(metrics_file(tmp_path / "b.jsonl", ending=cut))["loss"] == whole["loss"]
    resumed = '{"step": 55, "loss": 3}\n{"step": 30, "loss": 7}\n{"step": 40, "val_loss": 8}\n'
    again = read(metrics_file(tmp_path / "c.jsonl", ending=resumed))
    assert list(again["loss"].items()) == [(10, 1), (20, 0.5), (30, 7), (40, 0.25), (50, 0.2), (55, 3)]
    assert again["val_loss"] == {20: 0.25, 40: 8}
    for name, content, says in (("none", None, "no such file"), ("empty", "", "holds no line"),
                                ("cut", '{"step": 1', "holds no line")):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=f"(?i){name}.*{says}"):
            read(tmp_path / name)


DAMAGED = b"""{"step": 10, "loss": 1.0, "smoothed": nan, "grad_norm": -nan, "lr": 0.1}
{"step": 20, "loss": 0.5, "grad_norm": inf, "lr": -inf}
{"step": 30, "lo{"step": 40, "loss": 0.25, "grad_norm": null}
{"step": 50, "loss": 0.2}{"step": 60, "loss": 0.1, "loss_quartiles": [-nan, 1, "x", [2]]}
{"step": 70, "loss": "text", "loss_quartiles": [1]}
{"step": -5, "loss": 1}
{"step": 1e300, "loss": 1}
{"step": 99999999999999999999, "loss": 1}
{"step": 80, "loss": 1%s}
{"step": 90, "loss": -1e308, "lr": 1e308}\0\0\0\0{"step": 100, "loss": 7}\0\0
%s
\xff\xfe
{"step": 110, "lo""" % (b"0" * 400, b"[" * 100000)


def test_damaged_log(tmp_path, tools, capsys):
    """Glued lines, numbers that JSON doesn't know and zeros of a crash cost nothing but what is gone."""
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(DAMAGED)
    metrics = tools("plot_log").read_metrics(log)
    assert metrics["loss"] == {10: 1, 20: 0.5, 40: 0.25, 50: 0.2, 60: 0.1, 80: 10**400, 90: -1e308, 100: 7}
    assert math.isnan(metrics["smoothed"][10]) and math.isnan(metrics["grad_norm"][10])
    assert metrics["grad_norm"][20] == math.inf and metrics["lr"] == {10: 0.1, 20: -math.inf, 90: 1e308}
    assert math.isnan(metrics["loss_quartiles"][60][0]) and metrics["loss_quartiles"][60][1] == 1
    assert capsys.readouterr().err.startswith(f"note: 6 lines of {log} left out")
    number = tools("plot_log").number
    assert number(3) == 3 and all(math.isnan(number(value)) for value in (10**400, -1e300, None, "1", [2]))


def test_plot_of_a_damaged_log(tmp_path, tools):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "a run of $x_{"  # which isn't mathematics
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(DAMAGED)
    whole = metrics_file(tmp_path / "metrics.jsonl")
    assert call(tools("plot_log"), folder / "metrics.jsonl", whole, "--output_name", tmp_path / "x.png") == ""
    assert picture(tmp_path / "x.png").std() > 10


def test_tensorboard_of_a_damaged_run(tmp_path, tools, capsys):
    """A grid that can't be read is named, the others are taken."""
    pytest.importorskip("tensorboard")
    (tmp_path / "metrics.jsonl").write_bytes(DAMAGED)
    Image.new("RGB", (200, 200), "red").save(tmp_path / "samples_00000010.png")
    whole = (tmp_path / "samples_00000010.png").read_bytes()
    (tmp_path / "samples_00000020.png").write_bytes(whole[:len(whole) // 2])
    (tmp_path / "samples_00000030.png").write_text("%!PS-Adobe-3.0 EPSF-3.0")
    (tmp_path / f"samples_{'9' * 30}.png").write_bytes(whole)
    (tmp_path / "samples_00000040.png").mkdir()
    assert call(tools("to_tensorboard"), tmp_path / "metrics.jsonl", "--output_dir", tmp_path / "out") == ""
    out, err = capsys.readouterr()
    assert "and 1 grids" in out and all(f"samples_000000{step}.png left out" in err for step in (20, 30))
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/below"):
        sentence = call(tools("to_tensorboard"), tmp_path / "metrics.jsonl", "--output_dir", tmp_path / place)
        assert "a folder is needed" in sentence


def test_bench_of_cut_output(tmp_path, tools, monkeypatch):
    """A ladder that ended before it named its device costs the page nothing."""
    ladders = tools("ladders")
    (tmp_path / "build/dev").mkdir(parents=True)
    (tmp_path / "build/dev/gelu.txt").write_text("gelu on one GPU: bf16\n")
    (tmp_path / "build/dev/linear.txt").write_text("linear on one G")
    monkeypatch.setattr(ladders, "DEV", tmp_path / "dev")
    monkeypatch.setattr("sys.argv", ["ladders.py"])
    with pytest.raises(UserError, match="names no device.*: linear$"):
        ladders.main()


def test_plot_log(tmp_path, tools):
    plot_log = tools("plot_log")
    logs = [metrics_file(tmp_path / "a.jsonl"),
            metrics_file(tmp_path / "b.jsonl", [7], '{"step": 9', loss_quartiles=[4, 3, None, 1])]
    figure = plot_log.plot({path.name: plot_log.read_metrics(path) for path in logs})
    lines = {axis.get_ylabel(): [line.get_xydata().tolist() for line in axis.lines] for axis in figure.axes}
    assert list(lines) == ["loss", "loss by timestep", "gradient norm", "learning rate"]
    steps = [10, 20, 30, 40, 50]
    assert lines["loss"] == [[[step, 10 / step] for step in steps], [[step, 20 / step] for step in steps],
                             [[20, 0.25], [40, 0.125]], [[7, 10 / 7]], [[7, 20 / 7]]]
    assert lines["loss by timestep"] == [[[7, 4]], [[7, 3]], [[7, 1]]]
    assert lines["learning rate"] == [[[step, 1e-4 * step] for step in steps], [[7, 7e-4]]]
    target = tmp_path / "loss.png"
    assert "loss by timestep" in script("dev/bench/plot_log.py", *logs, "--output_name", target).stdout
    assert picture(target).std() > 10
    target = tmp_path / "no/x.png"
    refused(sys.executable, ROOT / "dev/bench/plot_log.py", logs[0], "--output_name", target, says="x.png")
    (tmp_path / "full.png").symlink_to("/dev/full")
    for name, says in (("x.txt", "supported"), ("full.png", "a device"), (".", "a folder")):
        assert says in call(plot_log, logs[0], "--output_name", tmp_path / name)
    assert not list(tmp_path.glob("x*")) and (tmp_path / "full.png").is_char_device()


def test_missing_packages(tmp_path, tools, monkeypatch):
    """Where an optional package is not installed, a sentence says which."""
    log = metrics_file(tmp_path / "metrics.jsonl")
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    for package, module, words in (
            ("matplotlib", tools("plot_log"), [log, "--output_name", tmp_path / "x.png"]),
            ("tensorboard", tools("to_tensorboard"), [log, "--output_dir", tmp_path / "x"]),
            ("safetensors", generate, ["--model_weights", tmp_path / "w.bin", "--export",
                                       tmp_path / "x.safetensors"])):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        sentence = call(module, *words)
        assert "pip install" in sentence and package in sentence and len(sentence.splitlines()) == 1
    assert not list(tmp_path.glob("x*"))


def test_requirements():
    """make adds all packages of requirements.txt to a Python that has PyTorch."""
    names = set(re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.M))
    listed = re.search(r"^SMALL_PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    listed = {"pillow" if name == "PIL" else name for name in listed.split()}
    assert listed == names - {"torch", "pytest-xdist"}  # which may be missing: see the Makefile


SCRIPTS = {"prepare_data.py": ["numpy", "PIL", "tqdm"], "generate.py": ["numpy", "torch", "tqdm"],
           "train_unet.py": ["numpy", "torch", "tqdm"], "dev/bench/plot_log.py": ["numpy", "tqdm"],
           "dev/bench/to_tensorboard.py": ["numpy", "PIL", "tqdm"], "dev/bench/benchmark.py": ["numpy", "torch", "tqdm"],
           "dev/bench/compare_quality.py": ["numpy", "torch", "tqdm"], "dev/bench/records.py": ["numpy", "torch", "tqdm"]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_missing_requirements(tmp_path, name):
    """A script that can't start for want of a package says so in one sentence, with what docs/guide.md says it needs."""
    guide = (ROOT / "docs/guide.md").read_text()
    needs = re.search(rf"^\| `{re.escape(name)}` \| `(pip install .*?)` \|$", guide, re.M)
    needs = f": {needs[1]} (" if needs else "pip install -r requirements.txt ("
    assert "`make python`" in guide and re.search("^python:", (ROOT / "Makefile").read_text(), re.M)
    for package in SCRIPTS[name]:
        folder = tmp_path / package
        folder.mkdir()
        (folder / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module', name='{package}')")
        refused(sys.executable, ROOT / name, "--help", env=dict(os.environ, PYTHONPATH=str(folder)),
                says=[f"the package {'pillow' if package == 'PIL' else package}:", needs, "`make python`"])


def test_plots_of_a_run(tmp_path, images8, tools):
    """What the program itself writes can be plotted and converted."""
    read = tools("plot_log").read_metrics
    run(TRAIN, *start_flags(Config(**TOY), images8, tmp_path / "run", 4, log_every=1, val_file=images8,
                            val_every=2))
    metrics = read(tmp_path / "run/metrics.jsonl")
    assert metrics["loss"] == losses_in(tmp_path / "run") and list(metrics["val_loss"]) == [2, 4]
    assert all(key in metrics for key in ("smoothed", "grad_norm", "lr"))


def test_to_tensorboard(tmp_path, tools):
    """Every number and grid is in the event file, once, also after a second call."""
    log = metrics_file(tmp_path / "metrics.jsonl", loss_quartiles=[4, 3, None, 1])
    pixels = np.random.default_rng(0).integers(0, 256, (10, 14, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "samples_00000040.png")
    Image.fromarray(pixels).save(tmp_path / "other.png")
    (tmp_path / "events").mkdir()
    (tmp_path / "events/mine.txt").write_text("kept")
    for _ in range(2):
        assert call(tools("to_tensorboard"), log, "--output_dir", tmp_path / "events") == ""
    assert len(list((tmp_path / "events").iterdir())) == 2
    events = EventAccumulator(str(tmp_path / "events"), size_guidance={"images": 0})
    events.Reload()
    found = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    expected = {key: {step: float(np.float32(value)) for step, value in points.items()}
                for key, points in tools("plot_log").read_metrics(log).items() if key != "loss_quartiles"}
    for n, value in ((1, 4), (2, 3), (4, 1)):
        expected[f"loss_quartiles/{n}"] = {step: value for step in expected["loss"]}
    assert found == expected
    [image] = events.Images("samples")
    assert image.step == 40
    assert same_bits(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), pixels)
    target = tmp_path / "x"
    assert "none.jsonl" in call(tools("to_tensorboard"), tmp_path / "none.jsonl", "--output_dir", target)
    assert not target.exists()
