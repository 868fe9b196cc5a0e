"""./train_unet against PyTorch on this machine: a training step of the default model, and a call of the network.

    make bench                                  builds, measures, writes the tables of dev/README.md and README.md
    python dev/benchmark.py --batches 32,128    on a GPU, some of the batch sizes
    python dev/benchmark.py --presets adm64     on a GPU, the official model of 64x64 images alone, at batch 32
    python dev/benchmark.py --presets drawing   on a GPU, calls of small batches and drawing pictures alone

On a CPU the opponent is eager PyTorch in fp32. On a GPU it is PyTorch as fast as it goes: torch.compile,
channels_last, fused attention, bf16 autocast, fused AdamW and the whole step in a CUDA graph; in fp32 it runs
eagerly, without tf32.
"""
import dataclasses
import itertools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import unet_io  # first, because it explains a missing package

import numpy as np
import torch
import torch.nn.functional as F

from common import text_between, write_between
from train_unet import Diffusion, Trainer, UNet, init_weights, make_batch
from unet_io import Config, UserError

DATA = str(ROOT / "data/emoji.bin")
CALL = "import sys; sys.path.insert(0, 'dev'); import benchmark; benchmark."  # python -c CALL + "function()"


# ----------------------------------------------------------------------------------------------------
# on a CPU

BENCHMARK = dict(batch_size=4, warmup=2, timed=8, rounds=2)

# Runs a command, then prints the most memory it held. In a small process of its own, since Linux counts for a
# child what its parent held when it started it.
MEASURE_MEMORY = ("import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]);"
                  " print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, 'KiB'); sys.exit(code)")


def run_measured(*command, **environment):
    """(output, peak memory in GB) of a command run in the folder above. Raises UserError if it fails."""
    done = subprocess.run([sys.executable, "-c", MEASURE_MEMORY, *command], capture_output=True, text=True,
                          cwd=ROOT, env=os.environ | environment)
    if done.returncode:
        raise UserError(f"{command[0]} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    *lines, memory = done.stdout.splitlines()
    return lines, 1024 * int(memory.split()[0]) / 1e9


def time_program(threads):
    """(milliseconds of each timed step, peak memory in GB, how it was built) of ./train_unet."""
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(data_file=DATA, batch_size=BENCHMARK["batch_size"], ema_rate=0, log_every=1,
                     steps=BENCHMARK["warmup"] + BENCHMARK["timed"], num_samples=1, sample_steps=1,
                     out_dir=folder)
        lines, memory = run_measured("./train_unet", *(f"--{name}={value}" for name, value in flags.items()),
                                     OMP_NUM_THREADS=str(threads))
        with open(os.path.join(folder, "metrics.jsonl")) as metrics:
            times = [json.loads(line)["ms"] for line in metrics]
    return times[BENCHMARK["warmup"]:], memory, lines[0].removeprefix("train_unet on the CPU: ")


def time_pytorch(threads):
    """(milliseconds of each timed step, peak memory in GB, PyTorch's version): time_steps in a process."""
    lines, memory = run_measured(sys.executable, "-c", CALL + "time_steps()",
                                 OMP_NUM_THREADS=str(threads), CUDA_VISIBLE_DEVICES="")
    return json.loads(lines[-1])[BENCHMARK["warmup"]:], memory, f"PyTorch {torch.__version__}"


def time_steps():
    """Print the milliseconds of each step of PyTorch, eager, on ./train_unet's batches."""
    config = Config(batch_size=BENCHMARK["batch_size"], ema_rate=0)
    trainer = Trainer(init_weights(UNet(config), 0), unet_io.read_images(DATA), config)
    trainer.model.train()
    steps = range(BENCHMARK["warmup"] + BENCHMARK["timed"])
    batches = [[torch.from_numpy(a) for a in make_batch(trainer.images, config, i)[:2]] for i in steps]
    times = []
    for x0, t in batches:
        start = time.perf_counter()
        x, target = trainer.diffusion.noised(x0, t, torch.randn_like(x0))
        trainer.optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(trainer.model(x, t), target)
        loss.backward()
        trainer.optimizer.step()
        loss.item()
        times.append(1e3 * (time.perf_counter() - start))
    print(json.dumps(times))


def benchmark_cpu():
    """Time both in turn, print the table and write it into the pages."""
    threads, runs = len(os.sched_getaffinity(0)), {"./train_unet": [], "PyTorch": []}
    for _ in range(BENCHMARK["rounds"]):  # in turn, so that a machine that drifts shows
        for name, measure in zip(runs, (time_program, time_pytorch)):
            runs[name].append(measure(threads))
            print(f"{name}: {np.median(runs[name][-1][0]):.0f} ms a step, {runs[name][-1][1]:.2f} GB")
    # the better of the two runs: what else the machine does only ever adds time
    rows = [(min(np.median(times) for times, _, _ in of), max(memory for _, memory, _ in of), of[0][2],
             ", ".join(f"{np.median(times):.0f}" for times, _, _ in of)) for of in runs.values()]
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    (ms, memory, built, _), (torch_ms, torch_memory, torch_name, _) = rows
    text = (f"**{ms / torch_ms:.2f} times PyTorch's time, {memory / torch_memory:.2f} times its memory**, on"
            f" {names[0] if names else platform.machine()}, {threads} threads.\n\n"
            "| | batch | ms a step | of which each run | images/s | memory |\n|---|---:|---:|---:|---:|---:|\n")
    for name, (ms, memory, _, each) in zip((f"`./train_unet`, {built}", f"{torch_name}, eager, fp32"), rows):
        size = BENCHMARK["batch_size"]
        text += f"| {name} | {size} | {ms:.0f} | {each} | {1e3 * size / ms:.2f} | {memory:.2f} GB |\n"
    print("\n" + text)
    write_pages(cpu=text)


# ----------------------------------------------------------------------------------------------------
# on a GPU: each measurement is a process and a line of RESULTS

RESULTS = ROOT / "build/bench_gpu.jsonl"
PROGRAMS = {"bf16": "./train_unet", "fp32": "build/train_unet_fp32"}
PROFILES = {"bf16": "dev/profile", "fp32": "build/profile_fp32"}
EVERYTHING = ("--ema_rate 0.999,0.9999 --grad_clip 1 --skip_outliers 6 --weight_decay 0.01"
              " --lr_schedule linear --warmup_steps 100 --final_lr_fraction 0.1 --predict v"
              " --zero_terminal_snr 1 --min_snr_gamma 5 --offset_noise 0.1 --flip 1")


def launched(command, first_line, **environment):
    """(seconds from the command's start until a line of its output matches, the whole output)."""
    seconds, lines, start = None, [], time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                              env=os.environ | environment) as process:
            for line in process.stdout:
                if seconds is None and re.match(first_line, line):
                    seconds = time.perf_counter() - start
                lines.append(line)
        if process.returncode or seconds is None:
            errors.seek(0)
            said = (errors.read().strip() or "".join(lines).strip() or "no message").splitlines()[-1]
            raise UserError(f"{' '.join(command)} failed with status {process.returncode}: {said}")
    return seconds, "".join(lines)


def measure_program(preset, precision, batch_size):
    """A dict of measurements of ./train_unet, without EMA: what profile.cu prints, and a short training run; and
    the time of a step with the preset's flags, which have one EMA, and with EVERYTHING."""
    batch, no_ema = ["--preset", preset, "--batch_size", str(batch_size)], ["--ema_rate", "0"]
    with tempfile.TemporaryDirectory() as folder:
        data, config = DATA, preset_config(preset, batch_size)
        if config.class_cond:  # some images with so many classes; what they show takes no time
            data, shape = os.path.join(folder, "data.bin"), (config.num_classes, 3) + 2 * (config.image_size,)
            unet_io.write_images(data, np.random.default_rng(0).integers(0, 256, shape, np.uint8),
                                 [f"{i:06}" for i in range(config.num_classes)])
        first, _ = launched([PROGRAMS[precision], *batch, *no_ema, "--out_dir", folder, "--data_file", data,
                             "--steps", "60", "--log_every", "20", "--save_every", "0", "--num_samples", "1",
                             "--sample_steps", "1"], r"step 1/60 \| loss")
        with open(os.path.join(folder, "metrics.jsonl")) as metrics:
            loop = json.loads(metrics.readlines()[-1])["ms"]
    profile = launched([PROFILES[precision], *batch, *no_ema], "train_unet on ")[1]
    found = {name: float(re.search(rf"^{line}: +([\d.]+) ", profile, re.M)[1]) for name, line in
             dict(step_ms="one training step", call_ms="one network call", memory_mib="memory").items()}
    for name, flags in dict(default_ms="", everything_ms=EVERYTHING).items():
        output = launched([PROFILES[precision], *batch, *flags.split()], "train_unet on ")[1]
        found[name] = float(re.search(r"^one training step: +([\d.]+) ", output, re.M)[1])
    return dict(of="train_unet", first_s=first, loop_ms=loop, **found, profile=profile,
                gpu=re.match("train_unet on (.+?): ", profile)[1])


def measure_opponent(preset, precision, batch_size):
    """The same of PyTorch: time_opponent in a process, with empty compilation caches."""
    call = f"{CALL}time_opponent({preset!r}, {precision!r}, {batch_size})"
    with tempfile.TemporaryDirectory() as caches:
        first, output = launched([sys.executable, "-c", call], r'\{"loss"', TORCHINDUCTOR_CACHE_DIR=caches)
    return dict(of="PyTorch", first_s=first, **json.loads(output.splitlines()[-1]))


def replay_of(call, warmup):
    """A CUDA graph's replay of call(), after warm-ups on a stream of their own."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def milliseconds(call, warmup=5, count=20):
    """Median milliseconds of call() by events on the GPU."""
    times = []
    for n in range(warmup + count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end)] if n >= warmup else []
    return float(np.median(times))


def preset_config(preset, batch_size):
    named = {field.name for field in dataclasses.fields(Config)}
    flags = {name: value for name, value in unet_io.PRESETS[preset].items() if name in named}
    return Config(**flags | dict(batch_size=batch_size))


def opponent(config, half):
    """(model, memory format, autocast) of PyTorch on the GPU; half: in bf16, as fast as it goes."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = half
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if half else torch.contiguous_format
    model = UNet(config).to("cuda", memory_format=layout)
    return model, layout, torch.autocast("cuda", torch.bfloat16, enabled=half)


def time_opponent(preset, precision, batch_size):
    """Print a line when the first step's loss is there, then the measurements. fp32: PyTorch as it comes."""
    half = precision == "bf16"
    config = preset_config(preset, batch_size)
    model, layout, autocast = opponent(config, half)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True, capturable=half)
    diffusion, forward = Diffusion(config, "cuda"), torch.compile(model) if half else model
    x0 = torch.randn(batch_size, 3, config.image_size, config.image_size, device="cuda").clamp(-1, 1)
    x0 = x0.to(memory_format=layout)
    y = [torch.randint(0, config.num_classes, (batch_size,), device="cuda")] if config.class_cond else []

    def random_t():
        return torch.randint(0, config.diffusion_steps, (batch_size,), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        t = random_t()
        x, target = diffusion.noised(x0, t, torch.randn_like(x0))
        with autocast:
            out = forward(x, t, *y)
        loss = diffusion.loss(out.float(), target, t, x0)
        loss.backward()
        optimizer.step()
        return loss

    print(json.dumps(dict(loss=step().item())), flush=True)
    if half:
        for_graph = step
        step = replay_of(for_graph, 4)
    step_ms = milliseconds(step)
    memory = torch.cuda.max_memory_allocated() / 2**20
    model.eval()
    t = random_t()
    with torch.no_grad(), autocast:
        call = (lambda: forward(x0, t, *y))
        call = replay_of(call, 3) if half else call
        call_ms = milliseconds(call)
    print(json.dumps(dict(step_ms=step_ms, call_ms=call_ms, memory_mib=memory, torch=torch.__version__)))


def identity():
    """What must agree between two lines of RESULTS for one table to hold both: the GPU itself."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]


def benchmark_gpu(presets, batches):
    """Measure each preset at its batch sizes, a line each as soon as it is known; write the pages.

    unet64 at `batches`, at 32 in fp32 too; others at 32.
    """
    kinds = [("unet64", precision, size) for size in batches
             for precision in (("bf16", "fp32") if size == 32 else ("bf16",))] if "unet64" in presets else []
    kinds += [(preset, "bf16", 32) for preset in presets if preset != "unet64"]
    for kind, measure in itertools.product(kinds, (measure_program, measure_opponent)):
        start = time.time()
        found = measure(*kind)
        result = dict(zip(("preset", "precision", "batch"), kind), uuid=identity(), **found)
        with open(RESULTS, "a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{result['of']}, {', '.join(map(str, kind))}: {result['step_ms']:.2f} ms a step,"
              f" {result['call_ms']:.2f} ms a call, {result['memory_mib']:.0f} MiB, first loss after"
              f" {result['first_s']:.1f} s (measured in {time.time() - start:.0f} s)", flush=True)
    with open(RESULTS) as file:
        lines = [json.loads(line) for line in file]
    for preset in presets:
        texts = render_gpu([line for line in lines if line["preset"] == preset])
        print("\n" + (list(texts.values()) or ["no pair of measurements yet"])[0])
        write_pages(**texts)


def render_gpu(lines):
    """A preset's tables from its lines of RESULTS: of each kind the newest pair that one GPU measured, where
    that is a GPU of the newest pair's name."""
    preset, newest, pairs = lines[-1]["preset"], {}, {}
    for line in lines:
        key = line["precision"], line["batch"]
        newest[(*key, line["uuid"], line["of"])] = line
        both = [newest.get((*key, line["uuid"], of)) for of in ("train_unet", "PyTorch")]
        if all(both):
            pairs.pop(key, None)  # so that the newest comes last
            pairs[key] = both
    if not pairs:
        return {}
    gpu, torch_name = list(pairs.values())[-1][0]["gpu"], f"PyTorch {list(pairs.values())[-1][1]['torch']}"
    pairs = {key: both for key, both in pairs.items() if both[0]["gpu"] == gpu}
    order = sorted(pairs, key=lambda key: (key[0], key[1]))  # bf16 by batch size, then fp32
    faster = [f"{pairs[key][1]['step_ms'] / pairs[key][0]['step_ms']:.2f} times (batch {key[1]})"
              for key in order if key[0] == "bf16"]
    text = f"**{', '.join(faster)} as fast as PyTorch**, on {gpu}.\n\n" if faster else f"On {gpu}.\n\n"
    text += ("| | batch | ms a step | images/s | ms a call | memory | first loss after |\n"
             "|---|---:|---:|---:|---:|---:|---:|\n")
    for precision, size in order:
        ours, theirs = pairs[precision, size]
        how = "torch.compile, CUDA graph, bf16" if precision == "bf16" else "eager, fp32"
        for name, line in ((f"`./train_unet`, {precision}", ours), (f"{torch_name}, {how}", theirs)):
            text += (f"| {name} | {size} | {line['step_ms']:.2f} | {1e3 * size / line['step_ms']:.0f}"
                     f" | {line['call_ms']:.2f} | {line['memory_mib'] / 1024:.2f} GiB"
                     f" | {line['first_s']:.1f} s |\n")
        ratio = {name: theirs[name] / ours[name] for name in ("step_ms", "call_ms", "memory_mib", "first_s")}
        text += (f"| **times better** | {size} | **{ratio['step_ms']:.2f}** | | **{ratio['call_ms']:.2f}** |"
                 f" **{ratio['memory_mib']:.2f}** | **{ratio['first_s']:.0f}** |\n")
    loops = [f"{pairs[key][0]['loop_ms']:.2f} ({key[0]}, batch {key[1]})" for key in order]
    text += f"\nWith data, log and host, a step of the training loop takes, in ms: {', '.join(loops)}.\n"
    costs = []
    for key in order:
        default, everything = (pairs[key][0][name] for name in ("default_ms", "everything_ms"))
        costs.append(f"{100 * (everything / default - 1):+.1f}% ({default:.2f} to {everything:.2f} ms,"
                     f" {key[0]}, batch {key[1]})")
    text += (f"\nWhat else a step can do costs, from the default flags, which have one average, to\n"
             f"`{EVERYTHING}`:\n{'; '.join(costs)}.\n")
    profile = ""
    for key in order:
        if key[0] == "bf16" and key[1] in (32, 128):
            head, kinds, blocks = pairs[key][0]["profile"].split("\n\n")[:3]
            profile += (f"<details><summary>Batch {key[1]}</summary>\n\n"
                        f"```text\n{head}\n\n{kinds}\n\n{blocks}\n```\n\n</details>\n\n")
    if preset != "unet64":
        return {preset: text}
    return dict(gpu=text) | (dict(profile=profile.strip() + "\n") if profile else {})


# ----------------------------------------------------------------------------------------------------
# on a GPU: calls of the network, and drawing pictures with the default model in bf16

CALLS = 10  # of the network in a CUDA graph, as dev/profile --profile_calls has them
# batches: of the calls; batch: what the program draws at a time unless told
DRAWING = dict(batches=(1, 2, 4, 8, 16, 32), batch=32, pictures=64, steps=50, runs=5)


def measure_calls():
    """{batch size: milliseconds of a call} of ./train_unet, and the GPU's name."""
    batches = ",".join(map(str, DRAWING["batches"]))
    output = launched([PROFILES["bf16"], "--profile_calls", batches], "train_unet on ")[1]
    calls = {int(size): float(ms) for size, ms in
             re.findall(r"^one network call, batch (\d+): ([\d.]+) ms$", output, re.M)}
    return calls, re.match("train_unet on (.+?): ", output)[1]


def measure_drawing():
    """Seconds of ./train_unet --generate, from its start to its end: the median of all steps, and of one step."""
    with tempfile.TemporaryDirectory() as folder:
        program, grid = [PROGRAMS["bf16"], "--out_dir", folder], os.path.join(folder, "grid.png")
        launched([*program, "--data_file", DATA, "--steps", "1", "--num_samples", "0"], "train_unet on ")
        seconds = {}
        for steps in (DRAWING["steps"], 1):
            times = []
            for _ in range(DRAWING["runs"]):
                start = time.perf_counter()
                launched([*program, "--generate", str(DRAWING["pictures"]), "--sample_steps", str(steps),
                          "--output_name", grid], "train_unet on ")
                times.append(time.perf_counter() - start)
            seconds[steps] = float(np.median(times))
    return seconds[DRAWING["steps"]], seconds[1]


def time_opponent_calls():
    """Print PyTorch's {batch size: milliseconds of a call}, each size compiled for itself."""
    config = preset_config("unet64", DRAWING["batch"])
    model, layout, autocast = opponent(config, True)
    device, calls = next(model.eval().parameters()).device, {}
    for size in DRAWING["batches"]:
        torch.compiler.reset()  # or a second size would be compiled for any size, and run slower
        forward = torch.compile(model, dynamic=False)
        x = torch.randn(size, config.in_channels, config.image_size, config.image_size, device=device)
        x, t = x.to(memory_format=layout), torch.randint(0, config.diffusion_steps, (size,), device=device)
        with torch.no_grad(), autocast:
            replay = replay_of(lambda: [forward(x, t) for _ in range(CALLS)], 1)
            calls[size] = milliseconds(replay) / CALLS
    print(json.dumps(dict(calls=calls, torch=torch.__version__)))


def benchmark_drawing():
    """Measure calls and drawing, print the table and write it into the page."""
    calls, gpu = measure_calls()
    print(f"./train_unet: ms a call by batch: {calls}", flush=True)
    seconds, seconds_of_one = measure_drawing()
    print(f"./train_unet: {DRAWING['pictures']} pictures in {seconds:.2f} s; now PyTorch is compiled for each of"
          f" {len(calls)} batch sizes, a minute each", flush=True)
    output = launched([sys.executable, "-c", CALL + "time_opponent_calls()"], r'\{"calls"')[1]
    theirs = json.loads(output.splitlines()[-1])
    result = dict(preset="drawing", uuid=identity(), gpu=gpu, ours=calls, seconds=seconds,
                  seconds_of_one=seconds_of_one, torch=theirs["torch"],
                  theirs={int(size): ms for size, ms in theirs["calls"].items()})
    with open(RESULTS, "a") as file:
        file.write(json.dumps(result) + "\n")
    text = render_drawing(result)
    print("\n" + text)
    write_pages(drawing=text)


def render_drawing(found):
    """The table of calls, and what drawing takes beside the time of PyTorch's calls alone."""
    ours, theirs = found["ours"], found["theirs"]
    text = (f"On {found['gpu']}, a call of the network in ms, in bf16; PyTorch {found['torch']} with"
            " torch.compile and a CUDA graph.\n\n"
            "| batch | `./train_unet` | PyTorch | times as fast | images/s | PyTorch's |\n"
            "|---:|---:|---:|---:|---:|---:|\n")
    for size in sorted(ours):
        text += (f"| {size} | {ours[size]:.3f} | {theirs[size]:.3f} | {theirs[size] / ours[size]:.2f}"
                 f" | {1e3 * size / ours[size]:.0f} | {1e3 * size / theirs[size]:.0f} |\n")
    pictures, steps, batch = (DRAWING[name] for name in ("pictures", "steps", "batch"))
    calls = steps * pictures // batch
    alone = {name: 1e-3 * calls * ms[batch] for name, ms in (("ours", ours), ("theirs", theirs))}
    text += (f"\n`./train_unet --generate {pictures} --sample_steps {steps}` takes {found['seconds']:.2f} s from"
             f" its start to the PNG, {pictures / found['seconds']:.1f} pictures a second; with one\nstep"
             f" {found['seconds_of_one']:.2f} s. Its {calls} calls of {batch} pictures alone take"
             f" {alone['ours']:.2f} s; PyTorch's take {alone['theirs']:.2f} s, without start, weights, sampler"
             f" and PNG.\n")
    return text


# ----------------------------------------------------------------------------------------------------
# the tables

PAGE = ROOT / "dev/README.md"


def table_rows(text):
    """The rows of the first table in a text, each a dict from the column's name to the cell."""
    lines = re.findall(r"^\|(.*)\|$", text, re.M)
    names, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [dict(zip(names, row)) for row in rows]


def speed_table(page):
    """README.md's table: the same figures as in the long tables of dev/README.md's text, a pair a line."""
    text = ("| on | model, in | batch | ms a step | PyTorch's | times as fast | memory | PyTorch's |\n"
            "|---|---|---:|---:|---:|---:|---:|---:|\n")
    for name, model in (("gpu", "unet64"), ("adm64", "adm64"), ("cpu", "unet64")):
        table = text_between(page, f"bench:{name}")
        if not table.strip():
            continue
        device = re.search(r"[Oo]n (.+)\.$", table.splitlines()[0])[1]
        rows = [row for row in table_rows(table) if row[""] != "**times better**"]
        for ours, theirs in zip(rows[::2], rows[1::2]):
            faster = float(theirs["ms a step"]) / float(ours["ms a step"])
            text += (f"| {device} | {model}, {ours[''].split(', ')[1]} | {ours['batch']} | {ours['ms a step']}"
                     f" | {theirs['ms a step']} | {faster:.2f} | {ours['memory']} | {theirs['memory']} |\n")
    return text


def write_pages(**texts):
    """Write the tables between their markers in dev/README.md, and the short one of them all into README.md."""
    write_between(PAGE, {f"bench:{name}": text for name, text in texts.items()})
    write_between(ROOT / "README.md", {"bench:speed": speed_table(PAGE.read_text())})


def benchmark(presets, batches):
    """Measure what ./train_unet was built for, and write the tables."""
    built = launched(["./train_unet", "--dry_run"], "train_unet on ")[1].splitlines()[0]
    if built.startswith("train_unet on the CPU: "):
        benchmark_cpu()
    elif not built.endswith(": bf16"):
        raise UserError("make bench compares bf16 first: build ./train_unet without PRECISION=fp32")
    else:
        RESULTS.parent.mkdir(exist_ok=True)
        if trained := [preset for preset in presets if preset != "drawing"]:
            benchmark_gpu(trained, batches)
        if "drawing" in presets:
            benchmark_drawing()


def main():
    parser = unet_io.Parser(description=__doc__)
    parser.add_argument("--batches", type=unet_io.parse_sizes, default=(32, 128, 256), metavar="N,N",
                        help="batch sizes of a GPU's benchmark; fp32 goes with 32 (default: 32,128,256)")
    parser.add_argument("--presets", type=lambda text: text.split(","), default=["unet64", "adm64", "drawing"],
                        metavar="NAME,NAME", help="what a GPU trains in it, and drawing (default:"
                        " unet64,adm64,drawing)")
    args = parser.parse_args()
    if unknown := set(args.presets) - {*unet_io.PRESETS, "drawing"}:
        raise UserError(f"--presets: there is no preset {min(unknown)}")
    benchmark(args.presets, args.batches)


if __name__ == "__main__":
    unet_io.run_script(main)
