"""./train_unet against PyTorch on this machine: a training step of the default model, and a call of the network.

    make bench                                         builds, measures, writes the tables beside this file and in README.md
    python3 dev/bench/benchmark.py --batches 32,128    on a GPU, some of the batch sizes
    python3 dev/bench/benchmark.py --presets adm64     on a GPU, the official model of 64x64 images alone, at batch 32
    python3 dev/bench/benchmark.py --presets drawing   on a GPU, calls of small batches and drawing pictures alone
    python3 dev/bench/benchmark.py --presets ranks     on several GPUs, steps on 1, 2, 4 of them
    python3 dev/bench/benchmark.py --presets DiT-XL/2  on a GPU, the Diffusion Transformer of that size, at batch 32

On a CPU the opponent is PyTorch in fp32: eager or torch.compile, with channels_last or without, the best of
these four in each case. On a GPU it is PyTorch as fast as it goes: torch.compile,
channels_last, fused attention, bf16 autocast, fused AdamW and the whole step in a CUDA graph; in fp32 it runs
eagerly, without tf32.
"""
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "dev")]
import unet_io  # first, because it explains a missing package

import numpy as np
import torch

from common import processor_name, results_page, text_between, write_between
from train_unet import Diffusion, UNet
from unet_io import Config, UserError

train_dit = unet_io.import_from_dev("dit/train_dit")

DATA = str(ROOT / "data/emoji.bin")
CALL = "import sys; sys.path.insert(0, 'dev/bench'); import benchmark; benchmark."  # python -c CALL + "function()"


# ----------------------------------------------------------------------------------------------------
# on a CPU

class Case(NamedTuple):
    what: str  # "step" of training, or "call" of the network
    preset: str
    batch_size: int
    timed: int  # steps or calls of a round
    busy: str = "no"  # whether other programs keep "one" core busy, or "each"


CASES = (Case("step", "unet64", 4, 2), Case("step", "tiny", 8, 10),
         Case("step", "tiny", 8, 10, "one"), Case("step", "tiny", 8, 10, "each"),
         Case("call", "unet64", 1, 8), Case("call", "unet64", 16, 2))
KINDS = ("eager", "eager, channels_last", "torch.compile", "torch.compile, channels_last")  # of PyTorch
OPTIMIZER = "adamw"  # of all steps, because that is PyTorch's
ROUNDS = 5  # of a case: the program, then each kind of PyTorch
WARMUP = 2  # steps or calls, before the timed ones
PICTURES = dict(pictures=16, steps=20, runs=3)  # drawn by the program alone

# Runs a command, then prints the most memory that it held. It is a small process of its own, because Linux counts for
# a child what its parent held when it started it.
MEASURE_MEMORY = ("import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]);"
                  " print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, 'KiB'); sys.exit(code)")


def run_measured(*command, **environment):
    """(lines of output, peak memory in GB) of a command run in the folder above. Raises UserError if it fails."""
    done = subprocess.run([sys.executable, "-c", MEASURE_MEMORY, *command], capture_output=True, text=True,
                          cwd=ROOT, env=os.environ | environment)
    if done.returncode:
        raise UserError(f"{command[0]} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    *lines, memory = done.stdout.splitlines()
    return lines, 1024 * int(memory.split()[0]) / 1e9


def time_program(case, threads):
    """[median milliseconds, peak memory in GB] of a round of the program."""
    if case.what == "call":
        lines, memory = run_measured("dev/bench/profile", "--preset", case.preset, "--profile_calls",
                                     str(case.batch_size), OMP_NUM_THREADS=str(threads))
        return [float(re.search(r": ([\d.]+) ms$", lines[-1])[1]), memory]

    with tempfile.TemporaryDirectory() as folder:
        flags = dict(preset=case.preset, data_file=DATA, batch_size=case.batch_size, optimizer=OPTIMIZER, ema_rate=0,
                     log_every=1, steps=WARMUP + case.timed, num_samples=1, sample_steps=1, out_dir=folder)
        words = [f"--{name}={value}" for name, value in flags.items()]
        _, memory = run_measured("./train_unet", *words, OMP_NUM_THREADS=str(threads))
        with open(os.path.join(folder, "metrics.jsonl")) as metrics:
            times = [json.loads(line)["ms"] for line in metrics]
    return [float(np.median(times[WARMUP:])), memory]


def time_pytorch(kind, *case):
    """A worker process: sets a kind of PyTorch up for a case and prints a line when it is ready.

    Then, for each line on stdin, it times a round and prints [median milliseconds, peak memory in GB so far].
    """
    case = Case(*case)
    config = preset_config(case.preset, case.batch_size)
    layout = torch.channels_last if "channels_last" in kind else torch.contiguous_format
    model = UNet(config).to(memory_format=layout)
    forward = torch.compile(model) if "torch.compile" in kind else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    step, x, _ = training_step(config, model, forward, optimizer, layout, contextlib.nullcontext())
    model.train(case.what == "step")
    t = random_t(config, "cpu")

    def call():
        with torch.no_grad():
            forward(x, t)

    def milliseconds_of(work):
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)

    work = step if case.what == "step" else call
    for _ in range(WARMUP):
        work()
    print("ready", flush=True)
    for _ in sys.stdin:
        work()  # brings back what the others' turns took out of the caches
        ms = float(np.median([milliseconds_of(work) for _ in range(case.timed)]))
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
        print(json.dumps([ms, memory]), flush=True)


def answer(worker):
    """A worker's next line. Raises UserError if it ended; why stands on the terminal."""
    if line := worker.stdout.readline():
        return line
    raise UserError("PyTorch's process ended before it had measured")


@contextlib.contextmanager
def busy_cores(which):
    """Keeps "one" core busy meanwhile, "each" of those that this process may use, or "no" core."""
    cores = sorted(os.sched_getaffinity(0))
    others = []
    try:
        for core in {"no": [], "one": cores[:1], "each": cores}[which]:
            others.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            os.sched_setaffinity(others[-1].pid, {core})
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure_case(case, threads):
    """{"./train_unet" or a kind of PyTorch: (median of the rounds in ms, peak memory in GB)}."""
    found = {name: [] for name in ("./train_unet", *KINDS)}
    with contextlib.ExitStack() as running:  # at its end the workers' stdin closes, and they end
        workers = {}
        for kind in KINDS:
            workers[kind] = running.enter_context(pytorch_worker(kind, case, threads))
            answer(workers[kind])  # one after another: each has the processors for itself
        running.enter_context(busy_cores(case.busy))
        for _ in range(ROUNDS):
            found["./train_unet"].append(time_program(case, threads))
            for kind, worker in workers.items():
                print(file=worker.stdin, flush=True)
                found[kind].append(json.loads(answer(worker)))

    print(f"a {case.what} of {case.preset}, batch {case.batch_size}, {case.busy} core busy with another program:")
    medians = {}
    for name, rounds in found.items():
        ms = float(np.median([ms for ms, _ in rounds]))
        memory = max(memory for _, memory in rounds)
        medians[name] = ms, memory
        each = ", ".join(f"{ms:.1f}" for ms, _ in rounds)
        print(f"    {name}: {ms:.1f} ms ({each}), {memory:.2f} GB", flush=True)
    return medians


def pytorch_worker(kind, case, threads):
    """A process that runs time_pytorch."""
    command = [sys.executable, "-c", f"{CALL}time_pytorch({kind!r}, *{tuple(case)})"]
    environment = os.environ | dict(OMP_NUM_THREADS=str(threads), CUDA_VISIBLE_DEVICES="")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def seconds_to_draw(threads):
    """Median seconds of ./train_unet --generate with the preset tiny, from its start to its end."""
    with tempfile.TemporaryDirectory() as folder:
        program = ["./train_unet", "--out_dir", folder]
        run_measured(*program, "--preset", "tiny", "--data_file", DATA, "--steps", "1", "--num_samples", "0")
        drawing = [*program, "--generate", "--num_samples", str(PICTURES["pictures"]), "--sampler", "dpmpp",
                   "--sample_steps", str(PICTURES["steps"]), "--output_name", os.path.join(folder, "grid.png")]
        times = []
        for _ in range(PICTURES["runs"]):
            start = time.perf_counter()
            launched(drawing, "train_unet on ", OMP_NUM_THREADS=str(threads))
            times.append(time.perf_counter() - start)
    return float(np.median(times))


def fastest_kind(times):
    """The kind of PyTorch that took the least time, of what measure_case found."""
    return min(KINDS, key=lambda kind: times[kind][0])


def compared(times):
    """Cells of a table: the milliseconds of the program and of PyTorch, their ratio, and PyTorch's fastest kind."""
    best = fastest_kind(times)
    ours, _ = times["./train_unet"]
    theirs, _ = times[best]
    return f"{ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} | {best}"


def render_steps(found, built):
    """Steps of training while no other program runs: of each case a row of the program and one of PyTorch."""
    text = ("| | model | batch | ms a step | images/s | memory | times as fast |\n"
            "|---|---|---:|---:|---:|---:|---:|\n")
    for case, times in found.items():
        if case.what != "step" or case.busy != "no":
            continue
        best = fastest_kind(times)
        faster = times[best][0] / times["./train_unet"][0]
        text += (step_row(f"`./train_unet`, {built}", case, times["./train_unet"], f" {faster:.2f}")
                 + step_row(f"PyTorch {torch.__version__}, {best}", case, times[best], ""))
    return text


def step_row(name, case, measured, faster):
    ms, memory = measured
    size = case.batch_size
    return f"| {name} | {case.preset} | {size} | {ms:.1f} | {1e3 * size / ms:.1f} | {memory:.2f} GB |{faster} |\n"


def render_calls(found):
    """Calls of the network."""
    text = ("| a call of | batch | `./train_unet`, ms | PyTorch's | times as fast | PyTorch's best |\n"
            "|---|---:|---:|---:|---:|---|\n")
    for case, times in found.items():
        if case.what == "call":
            text += f"| {case.preset} | {case.batch_size} | {compared(times)} |\n"
    return text


def render_shared(found):
    """Steps of the preset tiny beside other programs."""
    text = ("| a step of `tiny` while | `./train_unet`, ms | PyTorch's | times as fast | PyTorch's best |\n"
            "|---|---:|---:|---:|---|\n")
    for case, times in found.items():
        if case.preset == "tiny":
            text += f"| {case.busy} core is busy with another program | {compared(times)} |\n"
    return text


def render_cpu(found, seconds, processor, built):
    """The tables from {case: measure_case's dict}, and the line of what drawing takes in seconds."""
    pictures = PICTURES["pictures"]
    return (f"On {processor}.\n\n{render_steps(found, built)}\n{render_shared(found)}\n{render_calls(found)}\n"
            f"Drawing: `./train_unet --generate --num_samples {pictures} --sampler dpmpp"
            f" --sample_steps {PICTURES['steps']}` of a `tiny` checkpoint takes\n{seconds:.2f} s from its start to"
            f" its end, {seconds / pictures:.3f} s a picture.\n")


def benchmark_cpu(built):
    """Measure every case, print the tables and write them into the pages. built: how the program was."""
    threads = len(os.sched_getaffinity(0))
    found = {case: measure_case(case, threads) for case in CASES}
    seconds = seconds_to_draw(threads)
    processor = f"{processor_name()}, {threads} threads"
    text = render_cpu(found, seconds, processor, built)
    print("\n" + text)
    write_pages("CPU", cpu=text)


# ----------------------------------------------------------------------------------------------------
# on a GPU: each measurement is a process and a line of RESULTS

RESULTS = ROOT / "build/bench_gpu.jsonl"
PROGRAMS = {"bf16": "./train_unet", "fp32": "build/train_unet_fp32", "dit": "./train_dit"}
PROFILES = {"bf16": "dev/bench/profile", "fp32": "build/profile_fp32", "dit": "dev/bench/profile_dit"}
DITS = {"DiT-B/2": dict(depth=12, hidden_size=768, num_heads=12),
        "DiT-XL/2": dict(depth=28, hidden_size=1152, num_heads=16)}  # on latents of 256 x 256 pixels, as their authors
OF_DITS = dict(in_channels=4, learn_sigma=1, class_cond=1, num_classes=1000, cond_drop_prob=0.1)
EVERYTHING = ("--ema_rate 0.999,0.9999 --grad_clip 1 --skip_outliers 6 --weight_decay 0.01"
              " --lr_schedule linear --warmup_steps 100 --final_lr_fraction 0.1 --predict v --noise_schedule cosine"
              " --timestep_sampling uniform --zero_terminal_snr 1 --min_snr_gamma 5 --offset_noise 0.1 --flip 1")


def launched(command, first_line, **environment):
    """(seconds from the command's start until a line of its output matches, the whole output)."""
    seconds = None
    lines = []
    start = time.perf_counter()
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


def note_result(result):
    with open(RESULTS, "a") as file:
        file.write(json.dumps(result) + "\n")


def figure_in(output, name):
    """The number in the line "NAME: 12.3 ms" of what the program or profile.cu printed."""
    return float(re.search(rf"^{name}: +([\d.]+) ", output, re.M)[1])


def measure_program(preset, precision, batch_size):
    """A dict of measurements of ./train_unet, without EMA: what profile.cu prints, and a short training run; and
    the time of a step with the preset's flags, which have one EMA, and with EVERYTHING."""
    kind = "dit" if preset in DITS else precision
    program = [PROGRAMS[kind], "--preset", preset, "--batch_size", str(batch_size), "--optimizer", OPTIMIZER]
    if preset in DITS:
        program += [f"--{name}={value}" for name, value in OF_DITS.items()]
    no_ema = ["--ema_rate", "0"]

    first_s, loop_ms = time_training([*program, *no_ema], preset_config(preset, batch_size))
    profile = launched([PROFILES[kind], *program[1:], *no_ema], r"train_\w+ on ")[1]
    default = launched([*program, "--dry_run"], r"train_\w+ on ")[1]
    everything = launched([*program, "--dry_run", *EVERYTHING.split()], r"train_\w+ on ")[1]
    return dict(of="the program", program=PROGRAMS[kind], first_s=first_s, loop_ms=loop_ms,
                step_ms=figure_in(profile, "one training step"), call_ms=figure_in(profile, "one network call"),
                memory_mib=figure_in(profile, "memory"), default_ms=figure_in(default, "one training step"),
                everything_ms=figure_in(everything, "one training step"), profile=profile,
                gpu=re.match(r"train_\w+ on (.+?): ", profile)[1])


def time_training(program, config):
    """(seconds from the start of a training run to its first loss, milliseconds of a step at its end)."""
    with tempfile.TemporaryDirectory() as folder:
        data = DATA
        if config.class_cond:
            data = os.path.join(folder, "data.bin")
            write_noise(data, config)
        first_s, _ = launched([*program, "--out_dir", folder, "--data_file", data, "--steps", "60", "--log_every", "20",
                               "--save_every", "0", "--num_samples", "1", "--sample_steps", "1"], r"step 1/60 \| loss")
        with open(os.path.join(folder, "metrics.jsonl")) as metrics:
            return first_s, json.loads(metrics.readlines()[-1])["ms"]


def write_noise(path, config):
    """Write an image of noise for each class, since what images show takes no time."""
    shape = config.num_classes, config.in_channels, config.image_size, config.image_size
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    unet_io.write_images(path, pixels, [f"{i:06}" for i in range(config.num_classes)])


def measure_opponent(preset, precision, batch_size):
    """A dict of measurements of PyTorch: time_opponent in a process of its own, with empty compilation caches."""
    call = f"{CALL}time_opponent({preset!r}, {precision!r}, {batch_size})"
    with tempfile.TemporaryDirectory() as caches:
        first, output = launched([sys.executable, "-c", call], r'\{"loss"', TORCHINDUCTOR_CACHE_DIR=caches)
    return dict(of="PyTorch", first_s=first, **json.loads(output.splitlines()[-1]))


def replay_of(call, warmup):
    """A CUDA graph's replay of call(), after warm-ups on a stream of their own."""
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
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
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if n >= warmup:
            times.append(start.elapsed_time(end))
    return float(np.median(times))


def preset_config(preset, batch_size):
    """The Config of a preset: of a UNet, or of a Diffusion Transformer."""
    if preset in DITS:
        return train_dit.Config(**DITS[preset] | OF_DITS, batch_size=batch_size)
    named = {field.name for field in dataclasses.fields(Config)}
    flags = {name: value for name, value in unet_io.PRESETS[preset].items() if name in named}
    return Config(**flags | dict(batch_size=batch_size))


def opponent(config, half):
    """(model, memory format, autocast) of PyTorch on the GPU; half: in bf16, as fast as it goes."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = half
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if half else torch.contiguous_format
    network = train_dit.DiT if isinstance(config, train_dit.Config) else UNet
    model = network(config).to("cuda", memory_format=layout)
    return model, layout, torch.autocast("cuda", torch.bfloat16, enabled=half)


def training_step(config, model, forward, optimizer, layout, autocast):
    """(step, x0, y): a function that does a step of training on the model's device and returns the loss; the images,
    (B, C, H, W); and a list that holds their classes, (B,), or nothing where the model knows none."""
    device = next(model.parameters()).device
    diffusion = Diffusion(config, device)
    shape = config.batch_size, config.in_channels, config.image_size, config.image_size
    x0 = torch.randn(shape, device=device).clamp(-1, 1).to(memory_format=layout)
    y = [torch.randint(0, config.num_classes, (config.batch_size,), device=device)] if config.class_cond else []

    def step():
        optimizer.zero_grad(set_to_none=True)
        t = random_t(config, device)
        x, target = diffusion.noised(x0, t, torch.randn_like(x0))
        with autocast:
            out = forward(x, t, *y)
        loss = diffusion.loss(out.float(), target, t, x0)
        loss.backward()
        optimizer.step()
        return loss

    model.train()
    return step, x0, y


def random_t(config, device="cuda"):
    """The timesteps of a batch: int64 (B,)."""
    return torch.randint(0, config.diffusion_steps, (config.batch_size,), device=device)


def time_opponent(preset, precision, batch_size):
    """Print a line when the first step's loss is there, then the measurements. fp32: PyTorch as it comes."""
    half = precision == "bf16"
    config = preset_config(preset, batch_size)
    model, layout, autocast = opponent(config, half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True, capturable=half)
    forward = torch.compile(model) if half else model
    step, x0, y = training_step(config, model, forward, optimizer, layout, autocast)
    print(json.dumps(dict(loss=step().item())), flush=True)
    step_ms = milliseconds(replay_of(step, 4) if half else step)
    memory = torch.cuda.max_memory_allocated() / 2**20

    model.eval()
    t = random_t(config)

    def call():
        return forward(x0, t, *y)

    with torch.no_grad(), autocast:
        call_ms = milliseconds(replay_of(call, 3) if half else call)
    print(json.dumps(dict(step_ms=step_ms, call_ms=call_ms, memory_mib=memory, torch=torch.__version__)))


def identity():
    """What must agree between two lines of RESULTS for one table to hold both: the GPU itself."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]


def kinds_of(presets, batches):
    """[(preset, precision, batch size)] of what is measured: unet64 at `batches`, at 32 in fp32 too; others at 32."""
    kinds = []
    if "unet64" in presets:
        for size in batches:
            kinds.append(("unet64", "bf16", size))
            if size == 32:
                kinds.append(("unet64", "fp32", size))
    return kinds + [(preset, "bf16", 32) for preset in presets if preset != "unet64"]


def benchmark_gpu(presets, batches):
    """Measure each preset at its batch sizes, a line each as soon as it is known; write the pages."""
    for kind, measure in itertools.product(kinds_of(presets, batches), (measure_program, measure_opponent)):
        start = time.time()
        found = measure(*kind)
        result = dict(zip(("preset", "precision", "batch"), kind), uuid=identity(), **found)
        note_result(result)
        print(f"{result['of']}, {', '.join(map(str, kind))}: {result['step_ms']:.2f} ms a step,"
              f" {result['call_ms']:.2f} ms a call, {result['memory_mib']:.0f} MiB, first loss after"
              f" {result['first_s']:.1f} s (measured in {time.time() - start:.0f} s)", flush=True)

    with open(RESULTS) as file:
        lines = [json.loads(line) for line in file]
    gpu = [line["gpu"] for line in lines if "gpu" in line][-1]
    for preset in presets:
        texts = render_gpu([line for line in lines if line["preset"] == preset])
        print("\n" + (list(texts.values()) or ["no pair of measurements yet"])[0])
        write_pages(gpu, **texts)


def newest_pairs(lines):
    """{(precision, batch): (line of the program, line of PyTorch)} from a preset's lines of RESULTS, the newest last.

    Of each precision and batch size it is the newest pair that one GPU measured, where that is a GPU of the name that the
    newest pair of all has.
    """
    newest = {}
    pairs = {}
    for line in lines:
        kind = line["precision"], line["batch"]
        newest[(*kind, line["uuid"], line["of"])] = line
        ours = newest.get((*kind, line["uuid"], "the program"))
        theirs = newest.get((*kind, line["uuid"], "PyTorch"))
        if ours and theirs:
            pairs.pop(kind, None)  # so that it comes last now
            pairs[kind] = ours, theirs
    if not pairs:
        return {}
    gpu = list(pairs.values())[-1][0]["gpu"]
    return {kind: (ours, theirs) for kind, (ours, theirs) in pairs.items() if ours["gpu"] == gpu}


def render_gpu(lines):
    """A preset's tables from its lines of RESULTS: {name of a marker: text}."""
    preset = lines[-1]["preset"]
    pairs = newest_pairs(lines)
    if not pairs:
        return {}
    newest_ours, newest_theirs = list(pairs.values())[-1]
    pairs = {kind: pairs[kind] for kind in sorted(pairs)}  # bf16 by batch size, then fp32

    text = headline(pairs, newest_ours["gpu"]) + render_pairs(pairs, f"PyTorch {newest_theirs['torch']}")
    text += "\n" + render_costs(pairs)
    if preset in DITS:
        parts = pairs["bf16", 32][0]["profile"].split("\n\n")[:2]
        text += "\n" + folded("Where the time goes", parts)
    if preset != "unet64":
        return {preset: text}

    profiles = []
    for (precision, size), (ours, _) in pairs.items():
        if precision == "bf16" and size in (32, 128):
            profiles.append(folded(f"Batch {size}", ours["profile"].split("\n\n")[:3]))
    texts = dict(gpu=text)
    if profiles:
        texts["profile"] = "\n".join(profiles)
    return texts


def headline(pairs, gpu):
    """How many times as fast a step in bf16 is."""
    ratios = []
    for (precision, size), (ours, theirs) in pairs.items():
        if precision == "bf16":
            ratios.append(f"{theirs['step_ms'] / ours['step_ms']:.2f} times (batch {size})")
    if not ratios:
        return f"On {gpu}.\n\n"
    return f"**{', '.join(ratios)} as fast as PyTorch**, on {gpu}.\n\n"


def render_pairs(pairs, torch_name):
    """Three rows a pair: the program, PyTorch, and how many times better the program is."""
    text = ("| | batch | ms a step | images/s | ms a call | memory | first loss after |\n"
            "|---|---:|---:|---:|---:|---:|---:|\n")
    for (precision, size), (ours, theirs) in pairs.items():
        how = "torch.compile, CUDA graph, bf16" if precision == "bf16" else "eager, fp32"
        text += gpu_row(f"`{ours['program']}`, {precision}", size, ours) + gpu_row(f"{torch_name}, {how}", size, theirs)
        ratio = {name: theirs[name] / ours[name] for name in ("step_ms", "call_ms", "memory_mib", "first_s")}
        text += (f"| **times better** | {size} | **{ratio['step_ms']:.2f}** | | **{ratio['call_ms']:.2f}** |"
                 f" **{ratio['memory_mib']:.2f}** | **{ratio['first_s']:.0f}** |\n")
    return text


def gpu_row(name, size, line):
    return (f"| {name} | {size} | {line['step_ms']:.2f} | {1e3 * size / line['step_ms']:.0f} | {line['call_ms']:.2f}"
            f" | {line['memory_mib'] / 1024:.2f} GiB | {line['first_s']:.1f} s |\n")


def render_costs(pairs):
    """Two sentences: what a step of the training loop takes, and what EVERYTHING costs."""
    loops = []
    costs = []
    for (precision, size), (ours, _) in pairs.items():
        default = ours["default_ms"]
        everything = ours["everything_ms"]
        loops.append(f"{ours['loop_ms']:.2f} ({precision}, batch {size})")
        costs.append(f"{100 * (everything / default - 1):+.1f}% ({default:.2f} to {everything:.2f} ms, {precision},"
                     f" batch {size})")
    return (f"With data, log and host, a step of the training loop takes, in ms: {', '.join(loops)}.\n\n"
            f"What else a step can do costs, from the default flags, which have one average, to\n"
            f"`{EVERYTHING}`:\n{'; '.join(costs)}.\n")


def folded(title, parts):
    """Parts of a profile, folded away below a title."""
    text = "\n\n".join(parts)
    return f"<details><summary>{title}</summary>\n\n```text\n{text}\n```\n\n</details>\n"


# ----------------------------------------------------------------------------------------------------
# on a GPU: calls of the network, and drawing pictures with the default model in bf16

CALLS = 10  # of the network in a CUDA graph, as dev/bench/profile --profile_calls has them
# batches: of the calls; batch: what the program draws at a time unless told
DRAWING = dict(batches=(1, 2, 4, 8, 16, 32), batch=32, pictures=64, steps=50, runs=5)


def measure_calls():
    """{batch size: milliseconds of a call} of ./train_unet, and the GPU's name."""
    batches = ",".join(map(str, DRAWING["batches"]))
    output = launched([PROFILES["bf16"], "--profile_calls", batches], "train_unet on ")[1]
    found = re.findall(r"^one network call, batch (\d+): ([\d.]+) ms$", output, re.M)
    calls = {int(size): float(ms) for size, ms in found}
    return calls, re.match("train_unet on (.+?): ", output)[1]


def measure_drawing():
    """Seconds of ./train_unet --generate, from its start to its end: the median of all steps, and of one step."""
    with tempfile.TemporaryDirectory() as folder:
        program = [PROGRAMS["bf16"], "--out_dir", folder]
        launched([*program, "--data_file", DATA, "--steps", "1", "--num_samples", "0"], "train_unet on ")

        def seconds_of(steps):
            times = []
            for _ in range(DRAWING["runs"]):
                start = time.perf_counter()
                launched([*program, "--generate", "--num_samples", str(DRAWING["pictures"]), "--sample_steps", str(steps),
                          "--output_name", os.path.join(folder, "grid.png")], "train_unet on ")
                times.append(time.perf_counter() - start)
            return float(np.median(times))

        return seconds_of(DRAWING["steps"]), seconds_of(1)


def time_opponent_calls():
    """Print PyTorch's {batch size: milliseconds of a call}, each size compiled for itself."""
    config = preset_config("unet64", DRAWING["batch"])
    model, layout, autocast = opponent(config, True)
    device = next(model.eval().parameters()).device
    calls = {}
    for size in DRAWING["batches"]:
        torch.compiler.reset()  # or a second size would be compiled for any size, and run slower
        forward = torch.compile(model, dynamic=False)
        x = torch.randn(size, config.in_channels, config.image_size, config.image_size, device=device)
        x = x.to(memory_format=layout)
        t = torch.randint(0, config.diffusion_steps, (size,), device=device)

        def several_calls():
            return [forward(x, t) for _ in range(CALLS)]

        with torch.no_grad(), autocast:
            calls[size] = milliseconds(replay_of(several_calls, 1)) / CALLS
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
    note_result(result)
    text = render_drawing(result)
    print("\n" + text)
    write_pages(gpu, drawing=text)


def render_drawing(found):
    """The table of calls, and what drawing takes beside the time of PyTorch's calls alone."""
    ours = found["ours"]
    theirs = found["theirs"]
    text = (f"On {found['gpu']}, a call of the network in ms, in bf16; PyTorch {found['torch']} with"
            " torch.compile and a CUDA graph.\n\n"
            "| batch | `./train_unet` | PyTorch | times as fast | images/s | PyTorch's |\n"
            "|---:|---:|---:|---:|---:|---:|\n")
    for size in sorted(ours):
        text += (f"| {size} | {ours[size]:.3f} | {theirs[size]:.3f} | {theirs[size] / ours[size]:.2f}"
                 f" | {1e3 * size / ours[size]:.0f} | {1e3 * size / theirs[size]:.0f} |\n")

    pictures = DRAWING["pictures"]
    steps = DRAWING["steps"]
    batch = DRAWING["batch"]
    calls = steps * pictures // batch
    return text + (
        f"\n`./train_unet --generate --num_samples {pictures} --sample_steps {steps}` takes {found['seconds']:.2f} s from"
        f" its start to the PNG, {pictures / found['seconds']:.1f} pictures a second; with one\nstep"
        f" {found['seconds_of_one']:.2f} s. Its {calls} calls of {batch} pictures alone take"
        f" {1e-3 * calls * ours[batch]:.2f} s; PyTorch's take {1e-3 * calls * theirs[batch]:.2f} s, without start, weights,"
        f" sampler and PNG.\n")


# ----------------------------------------------------------------------------------------------------
# on several GPUs: a step on 1, 2, 4, ... of them

# batches: images a GPU; seconds: of a run, long enough for the clocks of the GPUs to settle
RANKS = dict(batches=(32, 128), preset="unet64", seconds=6)
# NCCL, but nothing is sent or received in a step that is recorded, so that a replayed step waits for nothing. The first
# step, and what comes before it, sends everything: with zeros in place of the others' weights a GPU would be faster.
NO_MESSAGES = """
#include <dlfcn.h>
#include <stddef.h>
static void* find(const char* name) {
    static void* library;
    if (!library) library = dlopen(LIBRARY, RTLD_NOW);
    return dlsym(library, name);
}
static int recorded(void* stream) {
    int status = 0;
    ((int (*)(void*, int*))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuStreamIsCapturing"))(stream, &status);
    return status;
}
typedef struct { char bytes[128]; } Id;
int ncclGetUniqueId(void* id) { return ((int (*)(void*))find("ncclGetUniqueId"))(id); }
int ncclGetVersion(void* version) { return ((int (*)(void*))find("ncclGetVersion"))(version); }
int ncclCommInitRank(void* ranks, int size, Id id, int rank) {
    return ((int (*)(void*, int, Id, int))find("ncclCommInitRank"))(ranks, size, id, rank);
}
int ncclCommGetAsyncError(void* ranks, void* status) {
    return ((int (*)(void*, void*))find("ncclCommGetAsyncError"))(ranks, status);
}
int ncclCommFinalize(void* ranks) { return ((int (*)(void*))find("ncclCommFinalize"))(ranks); }
int ncclCommDestroy(void* ranks) { return ((int (*)(void*))find("ncclCommDestroy"))(ranks); }
int ncclGroupStart() { return ((int (*)())find("ncclGroupStart"))(); }
int ncclGroupEnd() { return ((int (*)())find("ncclGroupEnd"))(); }
#define MESSAGE(name)                                                                    \\
    int name(void* data, size_t n, int type, int peer, void* ranks, void* stream) {      \\
        typedef int (*Function)(void*, size_t, int, int, void*, void*);                  \\
        if (recorded(stream)) return 0;                                                  \\
        return ((Function)find(#name))(data, n, type, peer, ranks, stream);              \\
    }
MESSAGE(ncclSend)
MESSAGE(ncclRecv)
"""


def nccl_library():
    """The file of NCCL, among PyTorch's packages or for the loader to find."""
    for folder in sys.path:
        for path in pathlib.Path(folder).glob("nvidia/nccl/lib/libnccl.so.2"):
            return str(path)
    return "libnccl.so.2"


def images_per_second(batch, gpus, library, visible=None):
    """Of the program's loop on so many GPUs, the median of its log's lines but the first ones. visible: the GPU, if one."""
    environment = dict(NCCL_LIBRARY=library)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(visible)
    steps = int(RANKS["seconds"] * 5600 / batch)  # the fewer images a step has, the less it takes
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--preset", RANKS["preset"], "--data_file", DATA, "--out_dir", folder,
                 "--batch_size", str(batch * gpus), "--microbatch", str(batch), "--gpus", str(gpus),
                 "--optimizer", OPTIMIZER, "--ema_rate", "0", "--lr", "1e-9", "--steps", str(steps),
                 "--log_every", str(steps // 10), "--save_every", "0", "--num_samples", "0"]
        launched([PROGRAMS["bf16"], *flags], "train_unet on ", **environment)
        with open(os.path.join(folder, "metrics.jsonl")) as metrics:
            rates = [json.loads(line)["images_per_s"] for line in metrics]
    return float(np.median(rates[4:]))


def recorded(step, stream):
    """(a replay of step() in a CUDA graph, "CUDA graph"), or (step, "no graph") where PyTorch can't record it."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    except RuntimeError as error:
        print(f"not recorded: {error}", file=sys.stderr)
        return step, "no graph"
    return graph.replay, "CUDA graph"


def time_data_parallel(batch):
    """One rank of DistributedDataParallel: print its images a second; the whole step is a CUDA graph if it can be."""
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    config = preset_config(RANKS["preset"], batch)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # PyTorch wants what is recorded to be made on the stream that records
        model, layout, autocast = opponent(config, True)
        parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0, fused=True, capturable=True)
        step, _, _ = training_step(config, parallel, torch.compile(parallel), optimizer, layout, autocast)
        for _ in range(12):  # it settles on its buckets by then
            step()
        torch.cuda.synchronize()
        replay, how = recorded(step, stream)
        for _ in range(40):
            replay()
        torch.cuda.synchronize()
        torch.distributed.barrier()

        count = int(RANKS["seconds"] * 2200 / batch)
        start = time.perf_counter()
        for _ in range(count):
            replay()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    if rank == 0:
        print(json.dumps(dict(images_per_s=batch * ranks * count / seconds, how=how, torch=torch.__version__)), flush=True)
    os._exit(0)  # NCCL's recorded calls and its end wait for each other


def data_parallel(batch, gpus):
    """What time_data_parallel prints on so many GPUs. Raises UserError if it fails."""
    command = [sys.executable, "-c", f"{CALL}time_data_parallel({batch})"]
    with tempfile.TemporaryDirectory() as caches:
        ranks = []
        for rank in range(gpus):
            environment = dict(RANK=str(rank), WORLD_SIZE=str(gpus), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                               MASTER_PORT="29533", TORCHINDUCTOR_CACHE_DIR=caches)
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                                          env=os.environ | environment))
        output = ranks[0].communicate()[0]
        if any(process.wait() for process in ranks):
            raise UserError("DistributedDataParallel failed")
    return json.loads(output.splitlines()[-1])


def build_without_messages(library, path):
    """Build the library of NO_MESSAGES around NCCL's own."""
    command = ["cc", "-D_GNU_SOURCE", f'-DLIBRARY="{library}"', "-shared", "-fPIC", "-x", "c", "-", "-o", path, "-ldl"]
    subprocess.run(command, input=NO_MESSAGES, text=True, check=True)


def benchmark_ranks():
    """Measure, print the table and write it into docs/guide.md."""
    listed = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    names = listed.stdout.splitlines()
    numbers = [number for number in (2, 4, 8) if number <= len(names)]
    if not numbers:
        raise UserError("--presets ranks: this machine has one GPU")

    library = nccl_library()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        silent_library = os.path.join(folder, "no_messages.so")
        build_without_messages(library, silent_library)
        for batch in RANKS["batches"]:
            alone = [images_per_second(batch, 1, library, gpu) for gpu in range(numbers[-1])]
            print(f"batch {batch}, each GPU alone: {', '.join(f'{rate:.0f}' for rate in alone)} images/s", flush=True)
            for gpus in numbers:
                ours = images_per_second(batch, gpus, library)
                silent = images_per_second(batch, gpus, silent_library)
                print(f"{gpus} GPUs: {ours:.0f} images/s, {silent:.0f} if nothing travels", flush=True)
                theirs = None
                try:
                    theirs = data_parallel(batch, gpus)
                except UserError as error:  # ours is in the table all the same
                    print(error, file=sys.stderr)
                print(f"DistributedDataParallel: {theirs}", flush=True)
                rows.append(dict(batch=batch, gpus=gpus, alone=float(np.mean(alone[:gpus])), ours=ours, silent=silent,
                                 theirs=theirs))

    result = dict(preset="ranks", gpu=names[0], rows=rows)
    note_result(result)
    text = render_ranks(result)
    print("\n" + text)
    write_between(ROOT / "docs/guide.md", {"bench:ranks": text})


def render_ranks(found):
    """The table of several GPUs, with the sentence above it."""
    how = " or ".join(sorted({row["theirs"]["how"] for row in found["rows"] if row["theirs"]}))
    text = (f"`unet64` in bf16 on {found['gpu']}. Efficiency is 100% where N GPUs do N times one GPU's images. PyTorch is"
            f" DistributedDataParallel with torch.compile, {how}.\n\n"
            "| GPUs | images a step on each | images/s | efficiency | PyTorch's images/s | times PyTorch"
            " | sent by each GPU a step | of a step, waiting for it |\n"
            "|---:|---:|---:|---:|---:|---:|---:|---:|\n")
    return text + "".join(map(ranks_row, found["rows"]))


def ranks_row(row):
    """A row of render_ranks.

    Each GPU sends the default model's gradients in fp32 and its weights in bf16. A step waits for them as much longer as it
    is than the same step that sends nothing.
    """
    gpus = row["gpus"]
    ours = row["ours"]
    images = row["batch"] * gpus
    floats = 320 * 65536  # of the gradients, as 2, 4 and 8 ranks divide them
    sent_mb = (1 - 1 / gpus) * floats * (4 + 2) / 1e6
    waiting_ms = 1e3 * images * (1 / ours - 1 / row["silent"])

    theirs = "not measured"
    faster = ""
    if row["theirs"]:
        theirs = f"{row['theirs']['images_per_s']:.0f}"
        faster = f"{ours / row['theirs']['images_per_s']:.2f}"
    return (f"| {gpus} | {row['batch']} | {ours:.0f} | {100 * ours / (gpus * row['alone']):.1f}% | {theirs}"
            f" | {faster} | {sent_mb:.0f} MB | {waiting_ms:.2f} of {1e3 * images / ours:.2f} ms |\n")


# ----------------------------------------------------------------------------------------------------
# the tables

def table_rows(text):
    """The rows of the first table in a text, each a dict from the column's name to the cell."""
    first = re.search(r"(^\|.*\|\n)+", text, re.M)[0]
    lines = re.findall(r"^\|(.*)\|$", first, re.M)
    names, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [dict(zip(names, row)) for row in rows]


def speed_table(pages):
    """README.md's table: the same figures as in the long tables in the texts of the devices' pages, a pair a line."""
    text = ("| on | model, in | batch | ms a step | PyTorch's, ms | times as fast | memory | PyTorch's memory |\n"
            "|---|---|---:|---:|---:|---:|---:|---:|\n")
    models = {"gpu": "unet64", "adm64": "adm64", "cpu": "unet64"}
    for (name, model), page in itertools.product(models.items(), pages):
        table = text_between(page, f"bench:{name}") if f"<!-- bench:{name} -->" in page else ""
        if table:
            text += speed_rows(table, model)
    return text


def speed_rows(table, model):
    """The rows of speed_table from one long table, whose own column of models counts where it has one."""
    device = re.search(r"[Oo]n (.+)\.$", table.splitlines()[0])[1]
    rows = [row for row in table_rows(table) if row[""] != "**times better**"]
    text = ""
    for ours, theirs in zip(rows[::2], rows[1::2]):
        faster = float(theirs["ms a step"]) / float(ours["ms a step"])
        precision = ours[""].split(", ")[1]
        text += (f"| {device} | {ours.get('model', model)}, {precision} | {ours['batch']} | {ours['ms a step']}"
                 f" | {theirs['ms a step']} | {faster:.2f} | {ours['memory']} | {theirs['memory']} |\n")
    return text


def write_pages(device, **texts):
    """Write the tables of a device between their markers, and the short one of all UNets into README.md.

    A Diffusion Transformer's table stands in dev/dit/README.md, others in the page of the device.
    """
    for name, text in texts.items():
        page = ROOT / "dev/dit/README.md" if name in DITS else results_page(device)
        write_between(page, {f"bench:{name}": text})
    pages = [path.read_text() for path in sorted((ROOT / "dev/bench").glob("results-*.md"))]
    write_between(ROOT / "README.md", {"bench:speed": speed_table(pages)})


def benchmark(presets, batches):
    """Measure what ./train_unet was built for, and write the tables."""
    built = launched(["./train_unet", "--dry_run"], "train_unet on ")[1].splitlines()[0]
    if built.startswith("train_unet on the CPU: "):
        benchmark_cpu(built.removeprefix("train_unet on the CPU: "))
    elif not built.endswith(": bf16"):
        raise UserError("make bench compares bf16 first: build ./train_unet without PRECISION=fp32")
    else:
        RESULTS.parent.mkdir(exist_ok=True)
        trained = [preset for preset in presets if preset not in ("drawing", "ranks")]
        if trained:
            benchmark_gpu(trained, batches)
        if "drawing" in presets:
            benchmark_drawing()
        if "ranks" in presets:
            benchmark_ranks()


def main():
    parser = unet_io.Parser(description=__doc__)
    parser.add_argument("--batches", type=unet_io.parse_sizes, default=(32, 128, 256), metavar="N,N",
                        help="batch sizes of a GPU's benchmark; fp32 goes with 32 (default: 32,128,256)")
    parser.add_argument("--presets", type=lambda text: text.split(","), default=["unet64", "adm64", "drawing"],
                        metavar="NAME,NAME", help="what a GPU trains in it, drawing, and ranks (default:"
                        " unet64,adm64,drawing)")
    args = parser.parse_args()
    unknown = set(args.presets) - {*unet_io.PRESETS, *DITS, "drawing", "ranks"}
    if unknown:
        raise UserError(f"--presets: there is no preset {min(unknown)}")
    benchmark(args.presets, args.batches)


if __name__ == "__main__":
    unet_io.run_script(main)
