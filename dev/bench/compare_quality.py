"""The same run in ./train_unet and in PyTorch: do the losses fall alike?

    python3 dev/bench/compare_quality.py --output_name curves.jsonl --batch_size 64 --steps 3000

Both start from the same weights and see the same batches with the same noise, in bf16 where ./train_unet computes in
bf16. Writes both curves, and fails unless they end within 1% of each other. Takes the flags of train_unet.py too.
"""
import json
import math
import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import unet_io  # first, because it explains a missing package

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import train_unet
from benchmark import launched, replay_of
from train_unet import Diffusion, UNet, decay_groups, init_weights
from unet_io import Stream, UserError


# ----------------------------------------------------------------------------------------------------
# The random numbers made on the device, so that a whole step, data and all, is one CUDA graph.

def device_words(seed, stream, count, sample, step):
    """unet_io.words on the device of `sample`: int64 (B, count), 4 | count; sample (B,), step (1,)."""
    low = 0xFFFFFFFF
    c0 = torch.arange(count // 4, device=sample.device)
    c1 = sample[:, None]
    c2 = step[:, None]
    c3 = torch.zeros_like(c2)
    k0 = int(seed)
    k1 = int(stream)
    for _ in range(10):
        p0 = c0 * 0xD2511F53  # modulo 2^64: the bits of the unsigned products
        p1 = c2 * 0xCD9E8D57
        c0 = ((p1 >> 32) & low) ^ c1 ^ k0
        c2 = ((p0 >> 32) & low) ^ c3 ^ k1
        c1 = p1 & low
        c3 = p0 & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1).flatten(1)


def device_normals(seed, stream, count, sample, step):
    """unet_io.normals on the device: float32 (B, count), 4 | count."""
    x = (device_words(seed, stream, count, sample, step) >> 8).double()
    radius = torch.sqrt(-2 * torch.log((x[:, 0::2] + 1) * 2.0**-24))
    angle = 2 * math.pi * (x[:, 1::2] * 2.0**-24)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(1).float()


class DeviceReplay:
    """A run of ./train_unet whose every step draws its batch on the device, as make_batch does on the host.

    losses: (steps,), after run().
    """
    def __init__(self, model, images, config, steps, device, precision="fp32", compile=False):
        images.check_size(config.image_size, config.in_channels)
        self.config = config
        self.steps = steps
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"

        self.model = model.to(device)
        if on_gpu and precision == "bf16":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.forward = torch.compile(self.model) if compile else self.model
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")
        self.diffusion = Diffusion(config, device)

        # what the steps read from the device
        self.images = torch.from_numpy(images.floats(range(len(images)), config.image_size)).to(device)
        places = [unet_io.batch_indices(config.seed, n, config.batch_size, len(images)) for n in range(steps)]
        self.places = torch.from_numpy(np.stack(places)).to(device)  # (steps, B)
        self.rates = torch.tensor([unet_io.learning_rate(config, n) for n in range(steps)], device=device)
        self.bounds = torch.from_numpy(config.last_words().astype(np.int64)).to(device)
        self.rows = torch.arange(config.batch_size, device=device)
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(steps, device=device)

        self.rate = torch.zeros((), device=device) if on_gpu else None
        fast = dict(fused=True, capturable=True) if on_gpu else {}
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.model.parameters(), config), lr=self.rate if on_gpu else config.lr,
            betas=(config.beta1, config.beta2), eps=config.adam_eps, **fast)

    def batch(self):
        """make_batch of the step that step_index holds: float32 images, int64 timesteps, float32 noise."""
        config = self.config
        step = self.step_index
        x0 = self.images[self.places.index_select(0, step)[0]]
        if config.flip:
            mirrored = device_words(config.seed, Stream.FLIP, 4, self.rows, step)[:, 0] >> 31 != 0
            x0 = torch.where(mirrored[:, None, None, None], x0.flip(-1), x0)
        words = device_words(config.seed, Stream.TIMESTEP, 4, self.rows, step)[:, 0]
        noise = device_normals(config.seed, Stream.NOISE, x0[0].numel(), self.rows, step).reshape(x0.shape)
        if config.offset_noise:
            shift = device_normals(config.seed, Stream.OFFSET, 4, self.rows, step)[:, :x0.shape[1]]
            noise = noise + config.offset_noise * shift[..., None, None]
        return x0, torch.searchsorted(self.bounds, words), noise

    def step(self):
        """One AdamW step. It reads nothing from the host but, on a CPU, the learning rate."""
        self.optimizer.zero_grad(set_to_none=True)
        x0, t, noise = self.batch()
        x, target = self.diffusion.noised(x0, t, noise)
        with self.autocast:
            prediction = self.forward(x, t)
        loss = self.diffusion.loss(prediction.float(), target, t, x0)
        loss.backward()
        if self.config.grad_clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        if self.rate is None:
            for group in self.optimizer.param_groups:
                group["lr"] = float(self.rates[self.step_index])
        else:
            self.rate.copy_(self.rates.index_select(0, self.step_index)[0])
        self.optimizer.step()
        self.losses.index_copy_(0, self.step_index, loss.detach()[None])
        self.step_index += 1

    def run(self):
        """Take all steps; on a GPU the first five launch their kernels one by one, the others are replays."""
        step = self.step
        first = 0
        if self.device.type == "cuda" and self.steps > 8:
            self.step()
            step = replay_of(self.step, 4)
            first = 5  # the call above and the four warm-ups were steps of the run, the recording was none
        for _ in tqdm(range(first, self.steps), "PyTorch", self.steps, initial=first, disable=None):
            step()


# ----------------------------------------------------------------------------------------------------
# the comparison

def smoothed(losses, rate=0.98):
    """The running mean of the losses, after each step: float64 (steps,)."""
    values = [losses[0]]
    for loss in losses[1:]:
        values.append(rate * values[-1] + (1 - rate) * loss)
    return np.array(values)


def check_comparable(config, steps):
    """Raises UserError for what DeviceReplay can't do."""
    if config.skip_outliers:
        raise UserError("dev/bench/compare_quality.py replays every step: leave out --skip_outliers")
    if config.class_cond or config.dropout or config.consistency:
        raise UserError("dev/bench/compare_quality.py knows neither classes, nor dropout, nor tuning: leave out"
                        " --class_cond, --dropout and --consistency")
    if steps < 1:
        raise UserError(f"--steps {steps} compares nothing: give 1 or more")
    if config.optimizer != "adamw":
        raise UserError("dev/bench/compare_quality.py replays AdamW: give --optimizer adamw")


def losses_of_the_program(config, data_file, steps):
    """Train with ./train_unet, and print what came out: (losses (steps,), "bf16" or "fp32")."""
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(data_file=os.path.abspath(data_file), out_dir=folder, steps=steps, log_every=1,
                     save_every=0, sample_every=0, num_samples=1, sample_steps=1)
        words = [f"--{name}={value}" for name, value in flags.items()]
        program = os.environ.get("TRAIN_UNET", "./train_unet")
        output = launched([program, *unet_io.flags_of(config), *words], "train_unet on ")[1]
        with open(os.path.join(folder, "metrics.jsonl")) as metrics:
            losses = np.array([json.loads(line)["loss"] for line in metrics])

    built = output.splitlines()[0].removeprefix("train_unet on ")
    print(f"./train_unet on {built}: {steps} steps of batch {config.batch_size} in"
          f" {time.time() - start:.0f} s, smoothed loss {smoothed(losses)[-1]:.5f}")
    return losses, "bf16" if built.endswith(": bf16") else "fp32"


def losses_of_pytorch(config, data_file, steps, device, precision, compile):
    """Train with PyTorch, and print what came out: losses (steps,)."""
    start = time.time()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    model = init_weights(UNet(config), config.seed)
    replayed = DeviceReplay(model, unet_io.read_images(data_file), config, steps, device, precision, compile)
    replayed.run()
    losses = replayed.losses.double().cpu().numpy()
    print(f"PyTorch, {precision}: {steps} steps in {time.time() - start:.0f} s, smoothed loss"
          f" {smoothed(losses)[-1]:.5f}")
    return losses


def compare_quality(config, run, path):
    """Write both loss curves, a step a line, and print how far apart they end. Raises UserError beyond 1%."""
    device = train_unet.pick_device(run.device)
    steps = run.steps
    check_comparable(config, steps)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    ours, precision = losses_of_the_program(config, run.data_file, steps)
    compile = device != "cpu" if run.compile is None else run.compile
    theirs = losses_of_pytorch(config, run.data_file, steps, device, precision, compile)

    with unet_io.replacing(path) as file:
        for n, (a, b) in enumerate(zip(ours, theirs), 1):
            file.write((json.dumps(dict(step=n, train_unet=a, pytorch=b)) + "\n").encode())

    last = min(500, steps)
    ends = {"smoothed (0.98)": (smoothed(ours)[-1], smoothed(theirs)[-1]),
            f"mean of the last {last}": (ours[-last:].mean(), theirs[-last:].mean())}
    alike = len(ours) == steps
    for name, (a, b) in ends.items():
        print(f"{name}: {a:.6f} against {b:.6f}, {100 * (a / b - 1):+.3f}%")
        alike = alike and abs(a / b - 1) < 0.01
    if not alike:
        raise UserError(f"the losses of ./train_unet and PyTorch are not within 1% of each other, see {path}")
    print(f"within 1%: the losses fall alike; both curves are in {path}")


def main():
    parser = unet_io.Parser(description=__doc__)
    parser.add_argument("--output_name", default="curves.jsonl", metavar="FILE",
                        help="both losses of every step, a line each (default: curves.jsonl)")
    args, rest = parser.parse_known_args()
    _, config, run = train_unet.parse_flags(rest)
    compare_quality(config, run, args.output_name)


if __name__ == "__main__":
    unet_io.run_script(main)
