"""What the X.py of every ladder shares: random inputs, gradients, the file that X reads, timing; and what writes
measurements into pages: the markers between which they stand, the page of a device, the processor's name.

The file is little-endian: int32 20241127, then tensors. Of a tensor it has an int32 length of the name, the name
("case/tensor"), an int32 number of dimensions, an int32 for each dimension, and float32 values in PyTorch's order. A
case's sizes ("B", "C", ...) are tensors without dimensions. So are "timed" and the microseconds that PyTorch takes on
this GPU, or else on this CPU ("PyTorch forward, ...").
"""
import os
import pathlib
import platform
import re
import statistics
import struct
import sys
import time
from typing import Callable, NamedTuple, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import unet_io  # first, because it explains a missing package

import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
MAGIC = 20241127
ON_GPU = torch.cuda.is_available()
PRECISION = "bf16" if ON_GPU else "fp32"  # in which the program computes, and PyTorch beside it


def text_between(page, name):
    """What stands in a page between <!-- NAME --> and <!-- /NAME -->. Raises UserError if it has no such lines."""
    found = re.findall(rf"^<!-- {name} -->\n(.*?)^<!-- /{name} -->$", page, re.M | re.S)
    if len(found) != 1:
        raise unet_io.UserError(f"one line <!-- {name} --> and one <!-- /{name} --> after it are needed to write"
                                f" between, not {len(found)}")
    return found[0]


def write_between(path, texts):
    """Replace what stands in the file between the markers of each name by its text, as a whole or not at all."""
    page = pathlib.Path(path).read_text(encoding="utf-8")
    for name, text in texts.items():
        marked = f"<!-- {name} -->\n"
        page = page.replace(marked + text_between(page, name), marked + text)
    with unet_io.replacing(path) as file:
        file.write(page.encode())


def results_page(device):
    """The page of a device's tables, bench/results-H100.md for "NVIDIA H100 80GB HBM3". Where a GPU has none yet, its
    page is the H100's without figures."""
    model = re.search(r"(RTX )?[A-Z]*\d+\w*", device)
    name = model[0].replace(" ", "") if model else re.sub(r"\W+", "-", device)
    path = HERE / f"bench/results-{name}.md"
    if not path.exists():
        page = (HERE / "bench/results-H100.md").read_text(encoding="utf-8")
        page = re.sub(r"^(<!-- (\S+) -->\n).*?^(?=<!-- /\2 -->$)", r"\1", page, flags=re.M | re.S)
        path.write_text(page.replace("H100", name), encoding="utf-8")
    return path


def processor_name():
    """The CPU's name as Linux has it, or else its architecture."""
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_tensor(file, name, value):
    """Append a tensor to a ladder's file."""
    value = torch.as_tensor(value).detach().to("cpu", torch.float32).contiguous()
    name = name.encode()
    file.write(struct.pack(f"<i{len(name)}si{value.ndim}i", len(name), name, value.ndim, *value.shape))
    file.write(value.numpy().tobytes())


class Random:
    """random(*shape, scale, mean): normals in float64 with the digits of bfloat16, so that a version that
    computes in bf16 starts from the same numbers as one in fp32."""
    def __init__(self, seed, device):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def __call__(self, *shape, scale=1.0, mean=0.0):
        values = torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return (mean + scale * values).bfloat16().double()

    def integers(self, low, high, shape):
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)


def gradients_of(forward, tensors, names):
    """(outputs of forward(tensors), {"dx": gradient of x, ...}) for the upstream gradient "dout" of the
    first output."""
    tensors = dict(tensors)
    leaves = []
    for name in names:
        tensors[name] = tensors[name].detach().requires_grad_()
        leaves.append(tensors[name])
    outputs = forward(tensors)
    if not names:
        return outputs, {}

    first = next(iter(outputs.values()))
    found = torch.autograd.grad(first, leaves, tensors["dout"].to(first.dtype), retain_graph=True)
    return outputs, {"d" + name: gradient for name, gradient in zip(names, found)}


def microseconds(make):
    """Median time of a call on this machine: make() returns (a function of no arguments, bytes it reads and writes)."""
    return microseconds_on_gpu(make) if ON_GPU else microseconds_on_cpu(make)


def microseconds_on_cpu(make):
    """As in common.h: calls follow one another for half a second, at least two and at most twenty."""
    call, _ = make()
    call()
    times = []
    start = time.perf_counter()
    while len(times) < 2 or (len(times) < 20 and time.perf_counter() < start + 0.5):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def microseconds_on_gpu(make):
    """As in common.h: copies of more than twice the second-level cache take turns in a replayed CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function, size = make()
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        copies = min(200, 2 * cache // max(size, 1) + 2)
        calls = [function] + [make()[0] for _ in range(copies - 1)]
        calls = (calls * 10)[:max(10, copies)]
        for call in calls:
            call()
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]  # noqa: F841: results live as long as the graph
    times = []
    for n in range(23):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if n >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def cast(tensors, dtype):
    """A copy of the tensors: those in floating point in this type and, where they are images, in channels_last."""
    def one(value):
        if not torch.is_tensor(value) or not value.is_floating_point():
            return value
        value = value.to(dtype)
        if value.ndim == 4:
            return value.contiguous(memory_format=torch.channels_last)
        return value.clone()

    return {name: one(value) for name, value in tensors.items()}


def bytes_of(tensors):
    return sum(value.numel() * value.element_size() for value in tensors.values() if torch.is_tensor(value))


def time_pytorch(forward, tensors, names):
    """{"forward": us, "backward": us} of PyTorch in PRECISION on this machine; backward where there are names of leaves."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32

    def make_forward():
        copy = cast(tensors, dtype)
        copy.pop("dout", None)

        def call():
            return forward(copy)
        return call, bytes_of(copy)

    def make_backward():
        copy = cast(tensors, dtype)
        leaves = [copy[name].requires_grad_() for name in names]
        first = next(iter(forward(copy).values()))
        dout = copy["dout"].to(first.dtype)

        def call():
            return torch.autograd.grad(first, leaves, dout, retain_graph=True)
        return call, bytes_of(copy)

    times = {"forward": microseconds(make_forward)}
    if names:
        times["backward"] = microseconds(make_backward)
    return times


def time_convolution(t, padding, together=False):
    """{pass and description: us} of cuDNN, on a CPU of oneDNN, on x, w, bias, dout of t.

    together: on a GPU both gradients at once, too.
    """
    torch.backends.cudnn.benchmark = True  # cuDNN's fastest algorithm, not its first

    def forward(c):
        return F.conv2d(c["x"], c["w"], c.get("bias"), padding=padding)

    def gradient(*mask):
        def call(c):
            return torch.ops.aten.convolution_backward(
                c["dout"], c["x"], c["w"], None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1, [*mask, False])
        return call

    all_gradients = ("dout", "x", "w")
    passes = {"forward": (forward, ("x", "w", "bias")),
              "input gradient": (gradient(True, False), all_gradients),
              "weight gradient": (gradient(False, True), all_gradients)}
    if together and ON_GPU:
        passes["backward"] = (gradient(True, True), all_gradients)

    times = {}
    for name, (function, inputs) in passes.items():
        of_inputs = {key: t[key] for key in inputs}
        if not ON_GPU:
            times[f"{name}, oneDNN, fp32, channels_last"] = time_layout(
                function, of_inputs, torch.float32, torch.channels_last)
            times[f"{name}, oneDNN, fp32"] = time_layout(function, of_inputs, torch.float32, torch.contiguous_format)
            continue
        times[f"{name}, cuDNN, bf16, channels_last"] = time_layout(
            function, of_inputs, torch.bfloat16, torch.channels_last)
        if "model" not in t:
            times[f"{name}, cuDNN, fp32"] = time_layout(function, of_inputs, torch.float32, torch.contiguous_format)
    if ON_GPU:  # PyTorch adds the bias in a kernel of its own; this is cuDNN's alone.
        times["forward, cuDNN, bf16, channels_last, no bias"] = time_layout(
            forward, {key: t[key] for key in ("x", "w")}, torch.bfloat16, torch.channels_last)
    return times


def time_layout(function, tensors, dtype, layout):
    """Microseconds of function(tensors) on a convolution's tensors in this type and memory format."""
    def make():
        copy = {}
        for name, value in tensors.items():
            value = value.to(dtype)
            if name == "w" and value.ndim == 2:  # of a 1x1 convolution
                value = value[:, :, None, None]
            copy[name] = value.contiguous(memory_format=layout) if value.ndim == 4 else value

        def call():
            return function(copy)
        return call, bytes_of(copy)
    return microseconds(make)


class Layer(NamedTuple):
    """What a ladder's file holds of a layer.

    cases       {name: sizes}, and at most one mark among the sizes: timed=1 is a case for a GPU alone, at which all versions
                are timed; model=1 is one for the program's version alone, because at every shape of the default model a
                whole ladder would take too long; cpu=1 is one that is timed where there is no GPU
    inputs      inputs(random, **sizes) -> {name: tensor}, with "dout" where there are gradients
    forward     forward(tensors) -> {name: output}, the layer in PyTorch; `tensors` holds the sizes too
    gradients   names of the inputs whose gradients ("d" + name) are written, where the case has them
    timings     timings(tensors) -> {pass and description: us}; by default forward and backward in PRECISION
    name        where a file has several layers: what the names of its cases and passes begin with
    """
    cases: dict
    inputs: Callable
    forward: Callable
    gradients: Sequence = ()
    timings: Callable | None = None
    name: str = ""

    def times(self, tensors, leaves):
        """{pass and description: us} of PyTorch."""
        if self.timings:
            return self.timings(tensors)
        times = time_pytorch(self.forward, tensors, leaves)
        return {f"{which}, eager, {PRECISION}, channels_last": us for which, us in times.items()}


def write_case(file, layer, name, marked, seed):
    """Write the tensors of a case: its sizes, inputs, outputs and gradients, and the times of PyTorch."""
    sizes = {key: value for key, value in marked.items() if key not in ("timed", "model", "cpu")}
    timed = len(sizes) < len(marked)
    tensors = dict(sizes)
    if timed:
        tensors["timed"] = 1
    if "model" in marked:
        tensors["model"] = 1
    random = Random(seed, "cuda" if timed and ON_GPU else "cpu")
    tensors |= layer.inputs(random, **sizes)

    leaves = [leaf for leaf in layer.gradients if leaf in tensors]
    outputs, found = gradients_of(layer.forward, tensors, leaves)
    everything = tensors | outputs | found
    if timed:
        of = f"PyTorch {layer.name}".strip()
        for which, us in layer.times(tensors, leaves).items():
            everything[f"{of} {which}".replace(" ,", ",")] = us
    for key, value in everything.items():
        write_tensor(file, f"{name}/{key}", value)


def write_ladder(stem, layers, seed=1):
    """Write the ladder's file."""
    folder = pathlib.Path(os.environ.get("DEV_DATA", HERE.parent / "build/dev"))
    folder.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    path = folder / f"{stem}.bin"
    elsewhere = {"cpu"} if ON_GPU else {"timed", "model"}  # marks of cases that are not for this machine
    made = []
    with open(f"{path}.tmp", "wb") as file:
        file.write(struct.pack("<i", MAGIC))
        for layer in layers:
            for case, marked in layer.cases.items():
                if elsewhere & marked.keys():
                    continue
                name = f"{layer.name}-{case}" if layer.name else case
                write_case(file, layer, name, marked, seed)
                made.append(name)
    os.replace(f"{path}.tmp", path)
    print(f"{path}: {', '.join(made)}")


def main(stem, cases, inputs, forward, gradients=(), timings=None, seed=1):
    """Write the file of a ladder of one layer."""
    write_ladder(stem, [Layer(cases, inputs, forward, gradients, timings)], seed)
