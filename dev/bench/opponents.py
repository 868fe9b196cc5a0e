"""Training in PyTorch as fast as it goes, for dev/bench/records.py: other projects' recipes on the network of train_unet.py.

On a GPU the network is compiled, channels-last and in bf16, and a whole step is one CUDA graph, with images, random numbers,
learning rate and averaged weights on the device; a CPU runs the same eagerly. A run's folder holds what ./train_unet's does:
checkpoint_STEP.bin, here of the averaged weights alone, and metrics.jsonl; and state.pt, from which it goes on.
"""
import dataclasses
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import unet_io  # first, because it explains a missing package

import numpy as np
import torch
from torch import nn

from benchmark import opponent, random_t, replay_of
from train_unet import Diffusion, Metrics, UNet, decay_groups, file_order, to_numpy
from unet_io import Checkpoint, UserError

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
MOST_STEPS = 1 << 20  # of a run


class Unfinished(UserError):
    """The time that was given is over, and what was done so far is kept."""
    def __init__(self):
        super().__init__("the time of --seconds is over before the end: call the same job again, and it goes on")


def checkpoint_in(folder, step):
    return folder / f"checkpoint_{step:08d}.bin"


def log_interval(every):
    """Steps between two lines of metrics.jsonl where a checkpoint comes every so many steps."""
    return max(1, every // 20)


class PyTorch:
    """A run of train_unet.py's UNet with a Config, on a file of images; it goes on from what its folder (a Path) holds.

    Each image of a batch is drawn from all, independently of the others, and its timestep uniformly. Raises UserError where
    the images don't fit or the Config draws timesteps otherwise.
    """
    def __init__(self, config, images, folder):
        if config.timestep_sampling != "uniform":
            raise UserError(f"PyTorch draws timesteps uniformly here, not by --timestep_sampling {config.timestep_sampling}")
        self.config = config
        self.folder = folder
        self.state_file = folder / "state.pt"
        images = unet_io.read_images(images)
        images.check_size(config.image_size, config.in_channels)
        images.check_labels(config)
        self.class_names = images.class_names if config.class_cond else ()

        folder.mkdir(parents=True, exist_ok=True)
        saved = None
        if self.state_file.exists():
            saved = torch.load(self.state_file, map_location=DEVICE, weights_only=True)
        steps_before = int(saved[-1]) if saved else 0
        torch.manual_seed(config.seed + (steps_before << 32))  # other numbers than before the cut

        layout = self.make_model()
        self.images = torch.from_numpy(images.floats(range(len(images)), config.image_size))
        self.images = self.images.to(DEVICE, memory_format=layout)
        self.labels = torch.from_numpy(images.labels.astype(np.int64)).to(DEVICE) if config.class_cond else None
        self.make_optimizer()

        first = [p.clone() for p in self.weights]
        self.model.train()
        self.step()  # compiles, and makes the optimiser's moments
        self.replay = replay_of(self.step, 4) if ON_GPU else self.step
        self.restore(saved or [*first, *first])

    def make_model(self):
        """The network with new weights, and what computes with it. Returns the memory format of its images."""
        if ON_GPU:
            self.model, layout, self.autocast = opponent(self.config, True)
            self.forward = torch.compile(self.model)
        else:
            self.model = UNet(self.config)
            layout = torch.contiguous_format
            self.autocast = torch.autocast("cpu", enabled=False)
            self.forward = self.model
        self.diffusion = Diffusion(self.config, DEVICE)
        return layout

    def make_optimizer(self):
        """The optimiser, the averaged weights, and what they read at each step."""
        config = self.config
        self.parameters = list(self.model.parameters())
        self.weights = [p.detach() for p in self.parameters]
        self.average = [p.detach().clone() for p in self.parameters]
        self.steps_done = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.rates = torch.zeros(MOST_STEPS, device=DEVICE)  # the learning rate of each step
        self.renewed = torch.zeros(MOST_STEPS, device=DEVICE)  # of each step, for update_average
        self.rate = torch.zeros((), device=DEVICE)
        fast = dict(lr=self.rate, fused=True, capturable=True) if ON_GPU else dict(lr=0.0)
        self.optimizer = torch.optim.AdamW(decay_groups(self.parameters, config), betas=(config.beta1, config.beta2),
                                           eps=config.adam_eps, **fast)

    def state(self):
        """All tensors that a step changes: weights, average, moments and, as the last one, the number of steps."""
        moments = []
        for p in self.parameters:
            moments += [self.optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq", "step")]
        return [*self.weights, *self.average, *moments, self.steps_done]

    def restore(self, tensors):
        """Copy what state() gave into the memory that a recorded step works on. What is missing at the end becomes 0."""
        for n, tensor in enumerate(self.state()):
            if n < len(tensors):
                tensor.copy_(tensors[n])
            else:
                tensor.zero_()

    def batch(self):
        """Images (B, C, H, W) in [-1, 1], timesteps (B,), normals (B, C, H, W), and a list.

        The list holds the classes, (B,), or nothing where the model knows none.
        """
        places = torch.randint(0, len(self.images), (self.config.batch_size,), device=DEVICE)
        x0 = self.images[places]
        if self.config.flip:
            x0 = torch.where(torch.rand(len(x0), 1, 1, 1, device=DEVICE) < 0.5, x0.flip(-1), x0)
        t = random_t(self.config, DEVICE)
        noise = torch.randn_like(x0)
        classes = [] if self.labels is None else [self.labels[places]]
        return x0, t, noise, classes

    def loss(self, x0, t, noise, classes):
        """The mean squared error of what the Config predicts.

        That is the noise (Ho et al. 2020, equation 14), or the direction from image to noise (Lipman et al. 2022,
        equation 23).
        """
        x, target = self.diffusion.noised(x0, t, noise)
        with self.autocast:
            out = self.forward(x, t, *classes)
        return self.diffusion.loss(out.float(), target, t, x0)

    def step(self):
        """A step of training. It reads nothing from the host but, on a CPU, the learning rate."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(*self.batch()).backward()
        if self.config.grad_clip:
            nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip)
        self.rate.copy_(self.rates.index_select(0, self.steps_done)[0])
        if not ON_GPU:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate.item()
        self.optimizer.step()
        self.update_average()
        self.steps_done += 1

    @torch.no_grad()
    def update_average(self):
        """average += renewed[step] (weights - average); 1 - renewed is unet_io.ema_decay, which diffusers has too."""
        changes = torch._foreach_sub(self.weights, self.average)
        torch._foreach_mul_(changes, self.renewed.index_select(0, self.steps_done)[0])
        torch._foreach_add_(self.average, changes)

    def timed(self, count):
        """Seconds that so many steps take."""
        start = time.perf_counter()
        for _ in range(count):
            self.replay()
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def step_seconds(self, seconds):
        """The median time of a step in the second half of so many seconds, after which all is as before."""
        before = [tensor.clone() for tensor in self.state()]
        times = []
        start = time.monotonic()
        while not times or time.monotonic() < start + seconds:
            times.append(self.timed(20) / 20)
        self.restore(before)
        return statistics.median(times[len(times) // 2:])

    def train(self, steps, every, deadline):
        """Train up to this step, with a checkpoint every so many steps. deadline: of time.monotonic(). Raises Unfinished."""
        if steps > MOST_STEPS:
            raise UserError(f"a run in PyTorch has at most {MOST_STEPS} steps, not {steps}")
        config = dataclasses.replace(self.config, lr_steps=steps)
        (ema_rate,) = config.ema_rate
        self.rates[:steps] = torch.tensor([unet_io.learning_rate(config, n) for n in range(steps)])
        self.renewed[:steps] = torch.tensor([1 - unet_io.ema_decay(ema_rate, n) for n in range(steps)])

        done = int(self.steps_done)
        interval = log_interval(every)
        metrics = Metrics(str(self.folder / "metrics.jsonl"), done)
        while done < steps:
            if time.monotonic() > deadline:
                self.save()
                raise Unfinished
            count = min(interval - done % interval, every - done % every, steps - done)
            seconds = self.timed(count)
            done += count
            metrics.note(step=done, ms=1e3 * seconds / count)
            if done % every == 0 or done == steps:
                self.save()

    def save(self):
        """Write all that a step changes, and the averaged weights for ./train_unet to draw with.

        Raises UserError for weights that are NaN or infinite.
        """
        step = int(self.steps_done)
        average = to_numpy(file_order(self.model, self.average))
        if not all(np.isfinite(array).all() for array in average):
            raise UserError(f"the weights became NaN or infinite by step {step}, in {self.folder}")
        sections = {"weights": average} | unet_io.class_section(self.class_names)
        unet_io.write_checkpoint(checkpoint_in(self.folder, step), Checkpoint(self.config, sections, step))
        # After the weights, so that a run that is cut between the two goes on from before them.
        with unet_io.replacing(self.state_file) as file:
            torch.save(self.state(), file)
