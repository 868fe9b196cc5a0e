"""The rest of guided-diffusion's family, in Python: resampling, learned variance, the order of q, k and v,
official state dicts. Against the published definitions, written another way than in train_unet.py.
"""
import dataclasses
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import generate
import train_unet
import unet_io
from harness import (
    ADM, PREDICTIONS, SCHEDULES, TOY, TRAIN, call, error_of, perturbed_file, run, same_bits, target_of, write_toy_images)
from unet_io import Config

OPTIONS = {
    "plain": {},
    "learned resampling": dict(conv_resample=True),
    "resampling blocks": dict(resblock_updown=True),
    "resampling blocks, scale and shift": dict(resblock_updown=True, use_scale_shift_norm=True,
                                               conv_resample=True),  # which then says nothing
    "learned variance": dict(learn_sigma=True, in_channels=1),
    "legacy order": dict(use_new_attention_order=False, num_head_channels=8, attention_resolutions=(8, 4)),
    "legacy order, other heads in the decoder": dict(use_new_attention_order=False, num_heads=4,
                                                     num_heads_upsample=2, conv_resample=True),
    "narrow first level": dict(num_channels=64, channel_mult=(0.5, 1.5)),
    "rescaled timesteps": dict(rescale_timesteps=True, diffusion_steps=250),
    "adm": ADM | dict(num_heads=4, use_new_attention_order=False, cond_drop_prob=0.1, dropout=0.0,
                      channel_mult=(2, 1, 2), attention_resolutions=(8, 4)),
}


def network(config, state, x, t, y):
    """guided-diffusion's UNet, from Dhariwal and Nichol 2021 and its state dict's names, without modules."""
    def norm(name, h):
        return F.group_norm(h, config.norm_groups, state[f"{name}.weight"], state[f"{name}.bias"])

    def conv(name, h, **how):
        w = state[f"{name}.weight"]
        return F.conv2d(h, w, state[f"{name}.bias"], padding=w.shape[-1] // 2, **how)

    def linear(name, h):
        return h @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def smaller(h):
        return (h[..., ::2, ::2] + h[..., 1::2, ::2] + h[..., ::2, 1::2] + h[..., 1::2, 1::2]) / 4

    def larger(h):
        return h.repeat_interleave(2, -1).repeat_interleave(2, -2)

    def residual(name, h, resample=lambda h: h):
        inner = conv(f"{name}.in_layers.2", resample(F.silu(norm(f"{name}.in_layers.0", h))))
        added = linear(f"{name}.emb_layers.1", F.silu(emb))[..., None, None]
        if config.use_scale_shift_norm:
            half = added.shape[1] // 2
            inner = norm(f"{name}.out_layers.0", inner) * (1 + added[:, :half]) + added[:, half:]
        else:
            inner = norm(f"{name}.out_layers.0", inner + added)
        skip = resample(h)
        if f"{name}.skip_connection.weight" in state:
            skip = conv(f"{name}.skip_connection", skip)
        return skip + conv(f"{name}.out_layers.3", F.silu(inner))

    def attention(name, h, heads):
        C = h.shape[1]
        d, flat = C // heads, norm(f"{name}.norm", h).flatten(2)
        rows = torch.einsum("oc,bct->bot", state[f"{name}.qkv.weight"][..., 0], flat)
        rows = rows + state[f"{name}.qkv.bias"][:, None]
        out = []
        for head in range(heads):
            if config.use_new_attention_order:
                q, k, v = (rows[:, part * C + head * d:][:, :d] for part in range(3))
            else:
                q, k, v = (rows[:, (3 * head + part) * d:][:, :d] for part in range(3))
            weights = (torch.einsum("bcs,bct->bst", q, k) / math.sqrt(d)).softmax(-1)
            out.append(torch.einsum("bst,bct->bcs", weights, v))
        w, b = state[f"{name}.proj_out.weight"][..., 0], state[f"{name}.proj_out.bias"]
        return h + (torch.einsum("oc,bct->bot", w, torch.cat(out, 1)) + b[:, None]).reshape(h.shape)

    def level(name, h, size, heads):
        h = residual(f"{name}.0", h)
        if size in config.attention_resolutions:
            h = attention(f"{name}.1", h, heads or h.shape[1] // config.num_head_channels)
        return h

    half = config.num_channels // 2
    told = t * 1000 / config.diffusion_steps if config.rescale_timesteps else t
    angles = told[:, None] * config.max_period ** (-torch.arange(half).double() / half)
    emb = F.silu(linear("time_embed.0", torch.cat([angles.cos(), angles.sin()], 1)))
    emb = linear("time_embed.2", emb)
    if config.class_cond:
        emb = emb + state["label_emb.weight"][y]
    heads, levels, size = config.num_heads, len(config.channel_mult), config.image_size
    h = conv("input_blocks.0.0", x)
    stack, at = [h], 1
    for depth in range(levels):
        for _ in range(config.num_res_blocks):
            h = level(f"input_blocks.{at}", h, size, heads)
            stack, at = [*stack, h], at + 1
        if depth < levels - 1:
            name, size = f"input_blocks.{at}.0", size // 2
            if config.resblock_updown:
                h = residual(name, h, smaller)
            else:
                h = conv(f"{name}.op", h, stride=2) if config.conv_resample else smaller(h)
            stack, at = [*stack, h], at + 1
    h = residual("middle_block.0", h)
    h = attention("middle_block.1", h, heads or h.shape[1] // config.num_head_channels)
    h = residual("middle_block.2", h)
    heads, at = config.num_heads_upsample or heads, 0
    for depth in reversed(range(levels)):
        for i in range(config.num_res_blocks + 1):
            h = level(f"output_blocks.{at}", torch.cat([h, stack.pop()], 1), size, heads)
            if depth and i == config.num_res_blocks:
                name = f"output_blocks.{at}.{1 + (size in config.attention_resolutions)}"
                if config.resblock_updown:
                    h = residual(name, h, larger)
                else:
                    h = conv(f"{name}.conv", larger(h)) if config.conv_resample else larger(h)
                size *= 2
            at += 1
    return conv("out.2", F.silu(norm("out.0", h)))


@pytest.mark.parametrize("name", OPTIONS)
def test_architecture(name):
    """The output and the gradient of every parameter, in float64."""
    config = Config(**TOY | OPTIONS[name])
    model = train_unet.perturb(train_unet.init_weights(train_unet.UNet(config), 3), 3).double().eval()
    state = {key: value.clone().requires_grad_() for key, value in model.state_dict().items()}
    x = torch.randn(3, config.in_channels, 8, 8, dtype=torch.float64)
    t, y = torch.tensor([0, 99, 249]), torch.tensor([2, 0, 1]) if config.class_cond else None
    ours, theirs = model(x, t, y), network(config, state, x, t, y)
    assert ours.shape == (3, config.in_channels * (1 + config.learn_sigma), 8, 8)
    assert error_of(ours.detach(), theirs.detach()) < 1e-11
    g = torch.randn_like(ours)
    (ours * g).sum().backward()
    (theirs * g).sum().backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad - state[key].grad).norm() < 1e-9 * (1 + state[key].grad.norm()), key


@pytest.mark.parametrize("preset, more, count, gigabytes", [
    ("adm64", {}, 295904454, 6.2), ("adm128", {}, 421529606, 9.1), ("adm256", {}, 553838086, 13.1),
    ("adm256", dict(class_cond=False), 552814086, 13.1),
    ("adm256", dict(image_size=512, channel_mult=(0.5, 1, 1, 2, 2, 4, 4)), 558997638, 16.1)])
def test_official_sizes(preset, more, count, gigabytes):
    """The parameters of the official models, counted in guided-diffusion: in both programs, by preset and
    by its flags, channel_mult being its choice for the image size. A batch of one fits where so much memory is free."""
    values = {name: value for name, value in (unet_io.PRESETS[preset] | more).items()
              if name in train_unet.ARCHITECTURE}
    with torch.device("meta"):
        models = [train_unet.UNet(Config(**values)), train_unet.create_model(**values),
                  train_unet.create_model(**values | dict(channel_mult=""))]
    assert [sum(p.numel() for p in model.parameters()) for model in models] == [count] * 3
    assert models[0].config == models[1].config == models[2].config
    refusal = run(TRAIN, *unet_io.flags_of(models[0].config), "--batch_size", 65536, "--dry_run", status=1)
    assert f"{count} parameters in" in refusal.stdout
    line = r" and ([\d.]+) GB are free; (--batch_size [1-9]\d*|no batch size) would fit"
    free, fits = re.search(line, refusal.stderr).groups()
    assert fits != "no batch size" or float(free) < gigabytes, refusal.stderr


# ----------------------------------------------------------------------------------------------------
# the learned variance

def betas_of(config, steps=None):
    """The betas of the chain, or of the one that is left of it, and each of its timesteps."""
    abar = unet_io.alphas_bar(config.diffusion_steps, config.noise_schedule, config.zero_terminal_snr)
    kept = unet_io.space_timesteps(config.diffusion_steps, steps or config.diffusion_steps)
    betas, last = [], 1.0
    for t in kept:
        betas.append(1 - abar[t] / last)
        last = abar[t]
    return np.array(betas), kept


def posterior(betas):
    """(log variance, factor of x0, factor of x_t) of q(x_{t-1} | x_t, x_0); Ho et al. 2020, equation 7."""
    bar = np.cumprod(1 - betas)
    before = np.append(1.0, bar[:-1])
    variance = betas * (1 - before) / (1 - bar)
    variance[0] = variance[1]
    return (np.log(variance), betas * np.sqrt(before) / (1 - bar),
            (1 - before) * np.sqrt(1 - betas) / (1 - bar))


def bits(config, x0, t, noise, out, v):
    """One image's term of the bound (Nichol and Dhariwal 2021, section 3.1), in bits a dimension."""
    betas, _ = betas_of(config)
    bar = np.cumprod(1 - betas)[t]
    x = np.sqrt(bar) * x0 + np.sqrt(1 - bar) * noise
    guess = {"eps": lambda: (x - np.sqrt(1 - bar) * out) / np.sqrt(bar), "x0": lambda: out,
             "v": lambda: np.sqrt(bar) * x - np.sqrt(1 - bar) * out}[config.predict]()
    log_variance, of_x0, of_x = (row[t] for row in posterior(betas))
    f = (v + 1) / 2
    learned = f * np.log(betas[t]) + (1 - f) * log_variance
    true_mean, mean = of_x0 * x0 + of_x * x, of_x0 * guess + of_x * x
    if t:
        nats = 0.5 * (learned - log_variance - 1 + np.exp(log_variance - learned)
                      + (true_mean - mean)**2 * np.exp(-learned))
        return nats.mean() / np.log(2)

    def cdf(z):
        return 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    above, below = (cdf((x0 + side / 255 - mean) * np.exp(-0.5 * learned)) for side in (1, -1))
    chance = np.where(x0 < -0.999, above, np.where(x0 > 0.999, 1 - below, above - below))
    return -np.log(np.maximum(chance, 1e-12)).mean() / np.log(2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_posterior(schedule):
    """The tables of the bound, from the joint distribution of a timestep and the one before: precisions add up."""
    levels = unet_io.noise_levels(100, schedule)
    (alpha, sigma), (after, more) = (level[:-1] for level in levels), (level[1:] for level in levels)
    kept, fresh = after / alpha, more**2 - (after / alpha * sigma) ** 2  # x' = kept x + a normal of the variance fresh
    variance = 1 / (1 / sigma**2 + kept**2 / fresh)
    least, span = unet_io.variance_range(levels)
    assert np.abs(least[1:] - np.log(variance)).max() < 1e-9 and least[0] == least[1]
    assert np.abs((least + span)[1:] - np.log(fresh)).max() < 1e-9
    for predict in PREDICTIONS[1:]:
        factor = unet_io.mean_factors(levels, predict)[1:]
        x0 = target_of(predict, after[:-1], more[:-1], 0.3, 0.0), target_of(predict, after[:-1], more[:-1], 1.3, -after[:-1] / more[:-1])
        expected = (variance * alpha / sigma**2)[:-1] / (x0[1] - x0[0])  # the second has the same x and an x0 larger by 1
        assert np.abs(factor[:-1] / expected - 1).max() < 1e-8, predict


BOUNDS = [Config(**TOY | dict(learn_sigma=True) | more) for more in (
    dict(), dict(predict="v", noise_schedule="cosine", diffusion_steps=50, min_snr_gamma=2.0),
    dict(predict="x0", diffusion_steps=4000, noise_schedule="cosine"),
    dict(predict="v", zero_terminal_snr=True, in_channels=1))]


@pytest.mark.parametrize("config", BOUNDS, ids=["eps", "v, min-SNR", "x0", "v, zero terminal SNR"])
def test_bound(config):
    """Against NumPy in float64: at t = 0 with black and white pixels, close by and far away; at the last t.
    The prediction's gradient is that of the simple loss; v's is the bound's."""
    T, rng, diffusion = config.diffusion_steps, np.random.default_rng(4), train_unet.Diffusion(config)
    t = np.array([0, 0, 0, 1, 2, T // 2, T - 1])
    shape = (len(t), config.in_channels, 8, 8)
    x0 = rng.integers(0, 256, shape) / 127.5 - 1
    x0[:, :, :2], x0[:, :, 2:4], noise = -1, 1, rng.standard_normal(shape)
    bar = np.cumprod(1 - betas_of(config)[0])[t, None, None, None]
    target = {"eps": noise, "x0": x0, "v": np.sqrt(bar) * noise - np.sqrt(1 - bar) * x0}[config.predict]
    scale = np.array([1e-3, 0.05, 2, 0.3, 0.3, 0.3, 0.3])[:, None, None, None]
    out = target + scale * rng.standard_normal(shape)
    v = rng.uniform(-1.3, 1.3, shape)
    v[0, 0, 0, 0], v[3, 0, 0, 0] = -1, 1
    expected = np.array([bits(config, *values) for values in zip(x0, t, noise, out, v)])

    both = torch.from_numpy(np.concatenate([out, v], 1)).requires_grad_()
    prediction, spread = both.split(config.in_channels, 1)
    target, x0, when = torch.from_numpy(target), torch.from_numpy(x0), torch.from_numpy(t)
    found = diffusion.bound(target - prediction.detach(), spread, when, x0).detach().numpy()
    assert np.abs(found / expected - 1).max() < 2e-5  # the tables are float32
    single = diffusion.bound((target - prediction).detach().float(), spread.float(), when, x0.float())
    assert np.abs(single.detach().numpy() / expected - 1).max() < 1e-4

    loss = diffusion.loss(both, target, when, x0)
    simple = diffusion.weights[when].double() * (prediction - target).square().mean((1, 2, 3))
    assert abs(loss.item() / (simple.detach().numpy() + T / 1000 * expected).mean() - 1) < 2e-5
    gradient, = torch.autograd.grad(loss, both)
    of_simple, = torch.autograd.grad(simple.mean(), both)
    C = config.in_channels
    assert error_of(gradient[:, :C], of_simple[:, :C]) < 1e-12
    for i, place in enumerate([(0, 0, 0), (0, 2, 3), (0, 5, 5), (0, 0, 0), (0, 7, 1), (0, 3, 3), (0, 4, 4)]):
        moved = []
        for step in (1e-4, -1e-4):
            other = v[i].copy()
            other[place] += step
            moved.append(bits(config, x0[i].numpy(), t[i], noise[i], out[i], other))
        slope = T / 1000 / len(t) * (moved[0] - moved[1]) / 2e-4
        assert abs(gradient[i, C:][place] - slope) < 1e-4 * abs(slope) + 1e-9, (t[i], place)


def test_validation_is_of_the_prediction(tmp_path):
    """The simple loss, with the variance or without it; the training loss has the bound, too."""
    data = unet_io.read_images(write_toy_images(tmp_path / "toy.bin"))
    config = Config(**TOY | dict(learn_sigma=True, seed=3))
    model = train_unet.perturb(train_unet.init_weights(train_unet.UNet(config), 3), 3)
    plain = train_unet.UNet(dataclasses.replace(config, learn_sigma=False))
    plain.load_state_dict({name: value[:3] if name.startswith("out.2") else value
                           for name, value in model.state_dict().items()})
    ours, theirs = (train_unet.Trainer(m, data, m.config) for m in (model, plain))
    assert abs(ours.validation_loss(data) / theirs.validation_loss(data) - 1) < 1e-6
    assert ours.step() > theirs.step()


class Known:
    """A made-up network: x0 = tanh(x / 2) moved by the class, in eps; and what it says of the variance."""
    def __init__(self, config):
        self.config = config
        self.abar = unet_io.alphas_bar(config.diffusion_steps, config.noise_schedule)

    def __call__(self, x, t, y):
        a, none = self.abar[int(t[0])], (y == self.config.num_classes)[:, None, None, None]
        x0 = torch.tanh(x.double() / 2) + 0.1 * y[:, None, None, None]
        eps = (x - np.sqrt(a) * x0) / np.sqrt(1 - a)
        return torch.cat([eps, torch.where(none, 5.0, torch.sin(3 * x.double()))], 1)


@pytest.mark.parametrize("steps", [None, 7])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_sampling_with_learned_variance(steps, scale):
    """ddpm on the whole chain and on what is left of one; guidance is for the prediction alone."""
    config = Config(**TOY | dict(learn_sigma=True, class_cond=True, num_classes=3, cond_drop_prob=0.1,
                                 diffusion_steps=60))
    model, seeds, y = Known(config), [5, 4000000000], torch.tensor([2, 0])
    drawn = train_unet.sample(model, seeds, "ddpm", steps, classes=[2, 0], guidance_scale=scale)
    betas, kept = betas_of(config, steps)
    log_variance, of_x0, of_x = posterior(betas)
    bar = np.cumprod(1 - betas)
    x = train_unet.seed_noise(seeds, (3, 8, 8)).double()
    for call_number, i in enumerate(reversed(range(len(kept))), 1):
        t = torch.full((2,), kept[i])
        told, free = model(x, t, y), model(x, t, torch.full_like(y, 3))
        eps = free[:, :3] + scale * (told[:, :3] - free[:, :3])
        x0 = ((x - np.sqrt(1 - bar[i]) * eps) / np.sqrt(bar[i])).clamp(-1, 1)
        f, x = (told[:, 3:] + 1) / 2, of_x0[i] * x0 + of_x[i] * x
        if i:
            deviation = torch.exp((f * np.log(betas[i]) + (1 - f) * log_variance[i]) / 2)
            x = x + deviation * train_unet.seed_noise(seeds, (3, 8, 8), call_number)
    assert error_of(drawn, x) < 1e-5
    for sampler in ("ddim", "heun", "dpmpp"):  # which take the prediction alone
        assert train_unet.sample(model, seeds, sampler, 5, classes=[2, 0]).shape == (2, 3, 8, 8)


# ----------------------------------------------------------------------------------------------------
# the order of q, k and v, and official state dicts

LEGACY = Config(**ADM | dict(num_heads=2, use_new_attention_order=False, seed=8, batch_size=3, lr=1e-3,
                             ema_rate=(0.9,), adam_eps=1e-3))  # so that rounding errors make no steps


def test_order_of_files(tmp_path):
    """Whatever order the module has: the same initial weights, the same file, the same training."""
    data = unet_io.read_images(write_toy_images(tmp_path / "toy.bin"))
    files, losses = [], []
    for new in (False, True):
        config = dataclasses.replace(LEGACY, use_new_attention_order=new)
        model = perturbed_file(tmp_path / f"{new}.bin", config)
        start = unet_io.read_checkpoint(str(tmp_path / f"{new}.bin"))
        assert start.config == config and start.tensors == len(list(model.parameters()))
        loaded, _ = train_unet.load_model(str(tmp_path / f"{new}.bin"))
        assert all(same_bits(a.detach(), b.detach()) for a, b in zip(loaded.parameters(), model.parameters()))
        trainer = train_unet.Trainer(model, data, config)
        losses.append([trainer.step() for _ in range(3)])
        files.append((start, trainer.checkpoint()))
        unet_io.write_checkpoint(tmp_path / "run.bin", files[-1][1])
        loaded, checkpoint = train_unet.load_model(str(tmp_path / "run.bin"), use_ema=0)
        again = train_unet.Trainer(loaded, data, config)
        again.restore(checkpoint, "run.bin")
        for ours, theirs in zip([again.parameters, *again.emas], [trainer.parameters, *trainer.emas]):
            assert all(same_bits(a.detach(), b.detach()) for a, b in zip(ours, theirs))
        assert again.step() == trainer.step()
    assert same_bits(files[0][0].sections["weights"], files[1][0].sections["weights"])
    assert np.abs(np.array(losses[0]) / losses[1] - 1).max() < 1e-5
    for name in ("weights", "ema", "adam_m"):
        ours, theirs = (np.concatenate([a.ravel() for a in file.sections[name]]) for _, file in files)
        assert np.linalg.norm(ours - theirs) < 1e-2 * np.linalg.norm(theirs - files[0][0].sections["weights"])


def test_official_state_dict(tmp_path, capsys, monkeypatch):
    """In legacy order and partly fp16, by preset: the file's rows, the pictures, and back to the bit."""
    values = {name: value for name, value in LEGACY.__dict__.items() if name in train_unet.ARCHITECTURE}
    values = {name: value for name, value in values.items() if name != "num_head_channels"}
    monkeypatch.setitem(unet_io.PRESETS, "adm128", values | dict(batch_size=3))
    model = train_unet.perturb(train_unet.init_weights(train_unet.create_model(**values), 1), 2)
    state = {name: value.half() if "blocks" in name else value for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    model.load_state_dict(state)  # widened
    assert call(generate, "--import", tmp_path / "w.pt", "--preset", "adm128") == ""
    assert capsys.readouterr().err == ""  # nothing is left to assume
    file = unet_io.read_checkpoint(str(tmp_path / "w.bin"))
    assert not file.config.use_new_attention_order and file.config.learn_sigma
    at, blocks = 0, 0
    for name, value in model.state_dict().items():
        found = file.sections["weights"][at:at + value.numel()].reshape(value.shape)
        at += value.numel()
        if ".qkv." in name:
            C, d, blocks = len(value) // 3, len(value) // 6, blocks + 1
            for part in range(3):
                for head in range(2):
                    theirs = value[(3 * head + part) * d:][:d]
                    assert same_bits(found[part * C + head * d:][:d], theirs), name
        else:
            assert same_bits(found, value), name
    assert at == len(file.sections["weights"]) and blocks >= 8
    x, t, y = torch.randn(2, 3, 8, 8), torch.tensor([3, 900]), torch.tensor([0, 2])
    new = train_unet.UNet(dataclasses.replace(model.config, use_new_attention_order=True)).eval()
    train_unet.set_tensors(new, new.parameters(), file.sections["weights"], "w.bin")
    legacy = train_unet.load_model(str(tmp_path / "w.bin"))[0].eval()
    with torch.no_grad():
        expected = model.eval()(x, t, y)
        assert torch.equal(legacy(x, t, y), expected) and error_of(new(x, t, y), expected) < 1e-6
    for ending in ("pt", "safetensors"):  # and back
        there = tmp_path / f"x.{ending}"
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--export", there) == ""
        assert call(generate, "--import", there, "--export", tmp_path / "back.bin") == ""
        assert same_bits(unet_io.read_checkpoint(str(tmp_path / "back.bin")).sections["weights"],
                         file.sections["weights"])
    back = torch.load(tmp_path / "x.pt", weights_only=True)["state_dict"]
    assert list(back) == list(state) and all(same_bits(back[name], value.float())
                                             for name, value in state.items())


@pytest.mark.parametrize("damage, says", [
    ("missing", "input_blocks.2.0.in_layers.2.weight is missing there and (32, 32, 3, 3) in"),
    ("extra", "label_emb.bias is (3,) there and no parameter in"),
    ("shape", "out.2.weight is (3, 32, 3, 3) there and (6, 32, 3, 3) in"),
    ("flag", "input_blocks.1.0.emb_layers.1.weight is (64, 128) there and (32, 128) in")])
def test_official_state_dict_that_does_not_fit(tmp_path, damage, says):
    """The first tensor that is missing, too much or of another shape is named, and nothing is written."""
    model = train_unet.UNet(LEGACY)
    state = dict(model.state_dict())
    if damage == "missing":
        del state["input_blocks.2.0.in_layers.2.weight"]
    elif damage == "extra":
        state["label_emb.bias"] = torch.zeros(3)
    elif damage == "shape":
        state["out.2.weight"] = state["out.2.weight"][:3].clone()
    torch.save(state, tmp_path / "w.pt")
    words = unet_io.flags_of(LEGACY)
    words = [word for flag, value in zip(words[::2], words[1::2]) for word in (flag, value)
             if flag[2:] in train_unet.ARCHITECTURE and not (damage == "flag" and "scale_shift" in flag)]
    sentence = call(generate, "--import", tmp_path / "w.pt", *words)
    assert f"w.pt: {says}" in sentence and "\n" not in sentence, sentence
    assert not (tmp_path / "w.bin").exists()
