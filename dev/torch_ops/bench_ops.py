"""The operators of torch_ops.py beside PyTorch's own, on this machine's GPU: each by itself, and a training step.

    make bench_ops                                       measures, writes the tables into README.md beside this file
    python3 dev/torch_ops/bench_ops.py --batches 32,128  some batch sizes of steps; each adds the time in which PyTorch compiles it

A step is that of the default model, as in benchmark.py: in bf16 autocast, channels_last, with a fused AdamW; in CUDA
graphs where the table says so. An operator is timed in a CUDA graph, with copies of its tensors that together exceed the
second-level cache, as in the ladders. Each step is measured in a process of its own.
"""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))
import benchmark  # first, because it finds the folders above
import torch
import torch.nn.functional as F
from benchmark import CALL, launched, milliseconds, opponent, preset_config, replay_of, training_step
from common import bytes_of, microseconds, write_between

import train_unet
import unet_io
from unet_io import UserError

PAGE = pathlib.Path(__file__).resolve().parent / "README.md"
WAYS = {  # name: (operators, compiled, in a CUDA graph)
    "eager": ("torch", False, False),
    "eager, these operators": ("native", False, False),
    "eager, CUDA graph": ("torch", False, True),
    "eager, CUDA graph, these operators": ("native", False, True),
    "`torch.compile`, CUDA graph": ("torch", True, True),
    "`torch.compile`, CUDA graph, these operators": ("native", True, True),
}


# ----------------------------------------------------------------------------------------------------
# a training step

def time_step(way, batch_size):
    """Print the milliseconds of a step, the memory and the first and last loss."""
    operators, compiled, in_graph = WAYS[way]
    torch.manual_seed(0)
    config = preset_config("unet64", batch_size)
    model, layout, autocast = opponent(config, True)
    if operators == "native":
        train_unet.use_native_operators(model)
        optimizer = train_unet.ops.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True, capturable=True)
    forward = torch.compile(model, fullgraph=operators == "native") if compiled else model
    step = training_step(config, model, forward, optimizer, layout, autocast)[0]
    first = step().item()
    measured = replay_of(step, 4) if in_graph else step
    ms = milliseconds(measured)
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(dict(ms=ms, memory=memory, first=first, last=step().item(), torch=torch.__version__)))


def bench_steps(batches):
    """Yield {(way, batch): measurements} whenever there is one more; what fails is told and left out."""
    found = {}
    for batch in batches:
        for way in WAYS:
            call = f"{CALL.replace('dev/bench', 'dev/torch_ops').replace('benchmark', 'bench_ops')}time_step({way!r}, {batch})"
            try:
                seconds, output = launched([sys.executable, "-c", call], r'\{"ms"')
            except UserError as error:
                print(f"{way}, batch {batch}: {error}", flush=True)
                continue
            found[way, batch] = json.loads(output.splitlines()[-1])
            print(f"{way}, batch {batch}: {found[way, batch]} after {seconds:.0f} s", flush=True)
            yield found


def render_steps(found, gpu):
    """The table of steps."""
    text = (f"A training step of the default model on {gpu}, PyTorch {next(iter(found.values()))['torch']}, bf16:\n\n"
            "| | batch | ms a step | images/s | memory | times as fast as without |\n|---|---:|---:|---:|---:|---:|\n")
    for (way, batch), line in found.items():
        without = found.get((way.removesuffix(", these operators"), batch))
        ratio = f"{without['ms'] / line['ms']:.2f}" if without and without is not line else ""
        text += (f"| {way} | {batch} | {line['ms']:.2f} | {1e3 * batch / line['ms']:.0f} | {line['memory']:.2f} GiB"
                 f" | {ratio} |\n")
    return text


# ----------------------------------------------------------------------------------------------------
# operators

def cases(ops):
    """(name, shape, ours, PyTorch's, {input: shape}): at the default model's shapes, batch 32."""
    def conv(C, O, size, taps=3):
        return dict(x=(32, C, size, size), weight=(O, C, taps, taps), bias=(O,))

    for C, size in ((64, 64), (128, 32), (192, 16), (256, 8)):
        yield ("conv3x3", f"{C} channels, {size}x{size}", lambda x, weight, bias: ops.conv3x3(x, weight, bias),
               lambda x, weight, bias: F.conv2d(x, weight, bias, padding=1), conv(C, C, size))
    for C, O, size in ((192, 64, 64), (192, 576, 16), (256, 768, 8)):
        yield ("conv1x1", f"{C} to {O} channels, {size}x{size}", lambda x, weight, bias: ops.conv1x1(x, weight, bias),
               lambda x, weight, bias: F.conv2d(x, weight, bias), conv(C, O, size, 1))
    for C, size in ((64, 64), (128, 32), (256, 8)):
        yield ("group_norm_silu", f"{C} channels, {size}x{size}",
               lambda x, weight, bias: ops.group_norm_silu(x, 32, weight, bias),
               lambda x, weight, bias: F.silu(F.group_norm(x, 32, weight.to(x), bias.to(x))),
               dict(x=(32, C, size, size), weight=(C,), bias=(C,)))
    for C, size in ((64, 64), (128, 32), (256, 8)):
        yield ("norm_conv3x3", f"{C} channels, {size}x{size}",
               lambda x, norm_weight, norm_bias, weight, bias: ops.norm_conv3x3(
                   x, 32, norm_weight, norm_bias, weight, bias),
               lambda x, norm_weight, norm_bias, weight, bias: F.conv2d(
                   F.silu(F.group_norm(x, 32, norm_weight.to(x), norm_bias.to(x))), weight, bias, padding=1),
               conv(C, C, size) | dict(norm_weight=(C,), norm_bias=(C,)))
    for C, size in ((192, 16), (256, 8)):
        yield ("attention", f"{C} channels, {C // 32} heads, {size}x{size}", lambda x, h=C // 32: ops.attention(x, h),
               lambda x, h=C // 32: pytorch_attention(x, h), dict(x=(32, 3 * C, size, size)))
    yield ("upsample", "128 channels, 32x32", ops.upsample, lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
           dict(x=(32, 128, 32, 32)))
    yield "downsample", "64 channels, 64x64", ops.downsample, lambda x: F.avg_pool2d(x, 2), dict(x=(32, 64, 64, 64))
    yield ("linear", "256 to 256", lambda x, weight, bias: ops.linear(x, weight, bias), F.linear,
           dict(x=(32, 256), weight=(256, 256), bias=(256,)))
    yield "gelu", "128 channels, 64x64", ops.gelu, lambda x: F.gelu(x, approximate="tanh"), dict(x=(32, 128, 64, 64))


def pytorch_attention(x, heads):
    B, C, H, W = x.shape
    q, k, v = x.permute(0, 2, 3, 1).reshape(B, H * W, 3, heads, -1).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).reshape(B, H, W, C // 3).permute(0, 3, 1, 2)


def time_both(function, shapes):
    """(forward, backward) in microseconds, in bf16; a norm's parameters in float32."""
    def made():
        tensors = {}
        for name, shape in shapes.items():
            of_norm = name.startswith("norm_") or name != "x" and len(shapes["weight"]) == 1
            value = torch.randn(shape, device="cuda") / (shape[1]**0.5 if name == "weight" and not of_norm else 1)
            value = value if of_norm else value.bfloat16()
            layout = torch.channels_last if value.ndim == 4 else torch.contiguous_format
            tensors[name] = value.contiguous(memory_format=layout).requires_grad_()
        return tensors

    def make_forward():
        tensors = made()

        def call():
            with torch.no_grad():
                return function(**tensors)
        return call, bytes_of(tensors)

    def make_backward():
        tensors = made()
        out = function(**tensors)
        dout = torch.randn_like(out)
        leaves = list(tensors.values())
        return (lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)), bytes_of(tensors)

    return microseconds(make_forward), microseconds(make_backward)


def time_adamw(kind):
    """Microseconds of an update of the default model's parameters."""
    model = train_unet.UNet(preset_config("unet64", 1)).to("cuda")
    optimizer = kind(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return 1e3 * milliseconds(replay_of(optimizer.step, 3))


def bench_operators():
    """The table's rows: (operator, shape, pass, ours, PyTorch's) in microseconds."""
    import torch_ops  # which builds them
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    rows = []
    for name, shape, ours, theirs, shapes in cases(torch_ops):
        for which, *us in zip(("forward", "backward"), time_both(ours, shapes), time_both(theirs, shapes)):
            rows.append((name, shape, which, *us))
            print(*rows[-1], flush=True)
    us = [time_adamw(kind) for kind in (torch_ops.AdamW, lambda p: torch.optim.AdamW(p, fused=True, capturable=True))]
    rows.append(("AdamW", "20,494,211 parameters", "update", *us))
    print(*rows[-1], flush=True)
    return rows


def render_operators(rows, gpu):
    text = (f"Each operator on {gpu} beside PyTorch's own, eager, bf16, batch 32, in microseconds:\n\n"
            "| operator | of | pass | us | PyTorch's | times as fast |\n|---|---|---|---:|---:|---:|\n")
    for name, shape, which, ours, theirs in rows:
        text += f"| `{name}` | {shape} | {which} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} |\n"
    return text


def main():
    parser = unet_io.Parser(description=__doc__)
    parser.add_argument("--batches", type=unet_io.parse_sizes, default=(32,), metavar="N,N",
                        help="batch sizes of the steps (default: 32)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("dev/torch_ops/bench_ops.py measures on a GPU, and PyTorch finds none here")
    gpu = torch.cuda.get_device_name()
    text = render_operators(bench_operators(), gpu)
    write_between(PAGE, {"bench:operators": text})
    print("\n" + text, flush=True)
    for found in bench_steps(args.batches):  # each is in the page as soon as it is known
        steps = render_steps(found, gpu)
        write_between(PAGE, {"bench:operators": f"{steps}\n{text}"})
    print("\n" + steps)


if __name__ == "__main__":
    unet_io.run_script(main)
