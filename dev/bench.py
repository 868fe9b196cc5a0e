"""Writes README.md from what the ladders printed on this GPU: `make bench` runs them and then this.

Above each table stands the end of the comment that opens X.cu, from "What the steps change" on.
"""
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


def section(stem, output):
    title = (HERE / f"{stem}.cu").read_text().split("\n", 1)[0].lstrip("/ ")
    tables = re.findall(rf"^({stem} [^\n]*: floor [^\n]*)\n\n((?:\|[^\n]*\n)+)", output, re.M)
    if not tables:
        sys.exit(f"{stem} printed no table with a floor: it ran without a GPU")
    return "\n".join([f"## {stem}\n", title + "\n", explanation(stem) + "\n"]
                     + [f"{heading}\n\n{table}" for heading, table in tables])


def main():
    folder = HERE.parent / "build/dev"
    stems = [stem for stem in ORDER if (folder / f"{stem}.txt").exists()]
    outputs = {stem: (folder / f"{stem}.txt").read_text() for stem in stems}
    devices = {re.search(r" on (.*): \w+$", output, re.M)[1] for output in outputs.values()}
    if len(devices) != 1:
        sys.exit(f"these times come from several devices: {', '.join(sorted(devices))}")
    measured = f"All times are of one {devices.pop()}.\n"
    sections = [section(stem, outputs[stem]) for stem in stems]
    (HERE / "README.md").write_text("\n".join([INTRODUCTION, measured, *sections, CLOSING]))
    print(f"{HERE / 'README.md'}: {', '.join(stems)}")


if __name__ == "__main__":
    main()
