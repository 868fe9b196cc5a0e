"""Random numbers, schedules, samplers and learning rates against their twins in Python."""
import dataclasses
import json
import re
import warnings

import numpy as np
import pytest
import torch

import train_unet
import unet_io
from harness import (
    PREDICTIONS, QUICK, RESUMED, ROOT, NETWORK, SCHEDULES, TOY, TRAIN, TRAINING, checkpoint_in, effective,
    perturbed_file, run, same_bits, script, target_of)
from unet_io import Config, Stream, flags_of


def int32(values):
    return np.asarray(values, np.uint64).astype(np.uint32).view(np.int32)


def respaced_sampler(T, schedule, predict, sampler, count):
    """The sampler's numbers from the published formulas, written another way than in the programs.

    Respacing as in guided-diffusion: the betas that are left are derived from the products that are left,
    then Ho et al. 2020, equation 7, or Song et al. 2021, equation 12. float64 (count, 6), last timestep
    first: the timestep; x0 = n1 x + n2 out; x <- n3 x0 + n4 x + n5 noise.
    """
    if schedule == "linear":
        betas = np.minimum(np.linspace(1e-4 * 1000 / T, 0.02 * 1000 / T, T), 0.999)
    else:
        def bar(s):
            return np.cos((s + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.array([min(1 - bar((i + 1) / T) / bar(i / T), 0.999) for i in range(T)])
    products = np.cumprod(1 - betas)
    stride, place, kept = (T - 1) / (count - 1) if count > 1 else 0, 0.0 if count > 1 else T - 1, []
    for _ in range(count):
        kept.append(round(place))
        place += stride
    left, last = [], 1.0
    for t in kept:
        left.append(1 - products[t] / last)
        last = products[t]
    alphas = 1 - np.array(left)
    bar, rows = np.cumprod(alphas), []
    for i in reversed(range(count)):
        before = bar[i - 1] if i else 1.0
        n1, n2 = ((np.sqrt(bar[i]), -np.sqrt(1 - bar[i])) if predict == "v"
                  else (1 / np.sqrt(bar[i]), -np.sqrt(1 / bar[i] - 1)))
        if sampler == "ddpm":
            n3 = left[i] * np.sqrt(before) / (1 - bar[i])
            n4 = (1 - before) * np.sqrt(alphas[i]) / (1 - bar[i])
            n5 = np.sqrt(left[i] * (1 - before) / (1 - bar[i])) if i else 0.0
        else:  # x = sqrt(before) x0 + sqrt(1 - before) eps with eps = (x - sqrt(bar) x0) / sqrt(1 - bar)
            n4, n5 = np.sqrt((1 - before) / (1 - bar[i])), 0.0
            n3 = np.sqrt(before) - n4 * np.sqrt(bar[i])
        rows.append([kept[i], n1, n2, n3, n4, n5])
    return np.array(rows)


class Network:
    """A made-up network, the same in network.cu: it takes x for noise on a picture 1.6 tanh(x + t / 2T)."""
    def __init__(self, config):
        self.config = config
        self.levels = unet_io.noise_levels(config.diffusion_steps, config.noise_schedule, config.zero_terminal_snr)

    def __call__(self, x, t):
        t, x = int(t[0]), x.double()
        alpha, sigma = (float(level[t]) for level in self.levels)
        x0 = 1.6 * torch.tanh(x + t / self.config.diffusion_steps / 2)
        return target_of(self.config.predict, alpha, sigma, x0, (x - alpha * x0) / sigma).float()


def chain_cases(add):
    """Whole pictures by every sampler from the made-up network."""
    for sampler, flags, predict, schedule, zero in (
            ("ddim", {}, "eps", "linear", False), ("ddim", dict(eta=0.7), "v", "cosine", False),
            ("ddim", dict(eta=1.0), "v", "linear", True),
            ("ddpm", {}, "x0", "linear", True), ("ddpm", dict(threshold="none"), "eps", "linear", False),
            ("dpmpp", {}, "v", "cosine", True), ("dpmpp", dict(threshold="none"), "eps", "linear", False),
            ("dpmpp", dict(sample_steps=1), "x0", "cosine", False),
            ("dpmpp", dict(sample_steps=2), "v", "linear", False),
            ("heun", {}, "eps", "linear", False), ("heun", dict(threshold="none"), "x0", "cosine", False),
            ("heun", dict(threshold="none", sample_steps=40), "v", "linear", True),
            *((sampler, dict(spacing=spacing, sample_steps=steps), "v", schedule, zero)
              for sampler, spacing, steps, schedule, zero in (
                  ("ddim", "trailing", 7, "linear", False), ("ddpm", "karras", 9, "cosine", False),
                  ("ddim", "karras", 299, "linear", True), ("dpmpp", "uniform", 13, "linear", False),
                  ("dpmpp", "karras", 11, "cosine", True), ("heun", "uniform", 3, "cosine", False),
                  ("heun", "karras", 20, "linear", True), ("heun", "trailing", 1, "linear", False),
                  ("ddpm", "uniform", 1, "linear", False))),
            ("ddim", {}, "flow", "flow", False), ("ddim", dict(eta=0.6, sample_steps=11), "v", "flow", False),
            ("ddpm", dict(sample_steps=30), "x0", "flow", False), ("dpmpp", {}, "flow", "flow", False),
            ("heun", dict(sample_steps=9), "flow", "flow", False), ("heun", dict(spacing="karras", threshold="none"), "edm", "edm", False),
            ("ddim", dict(spacing="karras", sample_steps=18), "edm", "edm", False),
            ("dpmpp", dict(threshold="none"), "edm", "edm", False),
            ("ddpm", dict(threshold="none"), "edm", "edm", False), ("ddim", {}, "flow", "cosine", False)):
        config = Config(**TOY | dict(image_size=9, channel_mult=(1,), diffusion_steps=300, predict=predict,
                                     zero_terminal_snr=zero, noise_schedule=schedule))
        pictures = train_unet.sample(Network(config), [5, 4000000000], sampler, **flags).numpy()
        assert np.isfinite(pictures).all() and pictures.std() > 0.1
        args = [PREDICTIONS.index(predict), SCHEDULES.index(schedule), zero,
                list(train_unet.SAMPLERS).index(sampler), flags.get("sample_steps", 0),
                ["clamp", "dynamic", "none"].index(flags.get("threshold", "clamp")), 300, 9,
                unet_io.SPACINGS.index(flags.get("spacing", "auto")), 5, 4000000000, 0]
        name = " ".join(["chain", sampler, predict, schedule, *map(str, flags.values()), *["to 0"] * zero])
        add(name, args, pictures.reshape(-1), reals=np.array([flags.get("eta", 0.0)]))


def twin_cases():
    tensors = {}

    def add(name, args, values, **others):
        for what, value in dict(args=np.array(args), values=values, **others).items():
            value = np.asarray(value)
            if value.dtype not in (np.float32, np.float64):
                value = int32(value)
            tensors[f"{name}/{what}"] = value

    for stream in Stream:
        add(f"words {stream.name}", [2**32 - 5, stream, 3, 99], unet_io.words(2**32 - 5, stream, 1001, 3, 99))
    for seed, sample, step in ((0, 0, 0), (1, 31, 19999), (2**32 - 1, 2**31 + 7, 2**32 - 1)):
        add(f"words {seed} {sample} {step}", [seed, Stream.NOISE, sample, step],
            unet_io.words(seed, Stream.NOISE, 400, sample, step))
        add(f"normals {seed} {sample} {step}", [seed, Stream.NOISE, sample, step],
            unet_io.normals(seed, Stream.NOISE, 12289, sample, step))
    for T, schedule, sampling, mean, std in (
            (1000, "linear", "uniform", 0, 1), (77, "cosine", "uniform", 0, 1), (4000, "flow", "uniform", 0, 1),
            (1000, "flow", "lognormal", 0, 1), (1000, "edm", "lognormal", -1.2, 1.2), (50, "cosine", "lognormal", 1, 0.5),
            (100, "flow", "lognormal", -20, 0.01), (100, "flow", "lognormal", 20, 0.01), (2, "flow", "lognormal", 0, 20)):
        config = Config(diffusion_steps=T, noise_schedule=schedule, seed=5, timestep_sampling=sampling,
                        timestep_mean=mean, timestep_std=std)
        add(f"timesteps of {T} {schedule} {sampling} {mean} {std}",
            [5, Stream.TIMESTEP, 7, T, SCHEDULES.index(schedule), sampling == "lognormal"],
            unet_io.timesteps(config, np.arange(1000), 7), reals=np.float32([mean, std]).astype(np.float64))
    for schedule, predict, gamma in (("linear", "eps", 5), ("linear", "v", 5), ("cosine", "x0", 1.5), ("flow", "flow", 5),
                                     ("cosine", "v", 0), ("cosine", "eps", 20), ("edm", "edm", 5)):
        # the published formula, w = min(SNR, gamma) / r with r = 1, SNR, SNR + 1 for x0, eps, v; r is the square of the
        # prediction's change where x stays and x0 changes by 1
        levels = unet_io.noise_levels(200, schedule)
        snr = (levels.alpha / levels.sigma) ** 2
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = {"x0": 1, "eps": snr, "v": snr + 1, "flow": (1 + levels.alpha / levels.sigma) ** 2,
                     "edm": (1 / snr + 0.25) / (0.25 / snr)}[predict]
        weights = np.minimum(snr, gamma) / ratio if gamma else np.ones(200)
        found = unet_io.loss_weights(levels, predict, gamma)
        assert np.abs(found - weights).max() <= 1e-12 * np.abs(weights).max()
        choices = [200, SCHEDULES.index(schedule), PREDICTIONS.index(predict)]
        add(f"weights {schedule} {predict} {gamma}", choices, weights, reals=np.array([float(gamma)]))
    for epoch, n in ((0, 1), (3, 2), (1, 78), (123456, 1626)):
        add(f"permutation {epoch} of {n}", [2**31 + 1, epoch], unet_io.permutation(2**31 + 1, epoch, n))
    add("batches across epochs", [6, 7],
        np.concatenate([unet_io.batch_indices(6, step, 5, 7) for step in range(6)]))
    for T, schedule in ((1000, "linear"), (1000, "cosine"), (100, "linear"), (21, "linear"), (77, "cosine")):
        for zero in (False, True):
            add(f"abar {schedule} {T} zero {zero}", [T, schedule == "cosine", zero],
                unet_io.alphas_bar(T, schedule, zero))
    for T, schedule in ((1000, "linear"), (1000, "flow"), (2, "flow"), (1000, "edm"), (2, "edm"), (4000, "cosine")):
        levels = unet_io.noise_levels(T, schedule)
        add(f"levels {schedule} {T}", [T, SCHEDULES.index(schedule)], np.concatenate(levels))
    for T, schedule, predict, sampler, count in (
            (1000, "linear", "eps", "ddim", 50), (1000, "linear", "eps", "ddpm", 1000),
            (1000, "cosine", "v", "ddim", 50), (1000, "cosine", "v", "ddpm", 250),
            (100, "linear", "v", "ddim", 1), (100, "cosine", "eps", "ddpm", 7),
            (500, "linear", "eps", "ddim", 499)):
        add(f"sampler {schedule} {T} {predict} {sampler} {count}",
            [T, schedule == "cosine", predict == "v", sampler == "ddpm", count],
            respaced_sampler(T, schedule, predict, sampler, count).reshape(-1))
    chain_cases(add)
    at = [0, 1, 2, 4, 5, 6, 9, 10, 50, 98, 99, 100, 101, 5000]
    kinds = ("constant", "cosine", "linear")
    for schedule, warmup, length, last, skipped in (
            ("constant", 0, 100, 0.5, 0), ("constant", 10, 100, 0, 0), ("cosine", 0, 100, 0, 0),
            ("cosine", 10, 100, 0, 0), ("cosine", 100, 100, 0.25, 0), ("cosine", 200, 100, 0.25, 0),
            ("cosine", 10, 100, 0.25, 0), ("linear", 0, 100, 0, 0), ("linear", 10, 100, 0.1, 4),
            ("linear", 100, 100, 0.1, 0), ("linear", 200, 100, 0.1, 0)):
        config = Config(lr=3e-4, lr_schedule=schedule, warmup_steps=warmup, lr_steps=length,
                        final_lr_fraction=last, ema_rate=(0.995, 0.9))
        steps = [s for s in at if s >= skipped]
        for rises in (True, False):
            values = [[unet_io.learning_rate(config, s), *(1 - unet_io.ema_decay(rate, s - skipped, warmup=rises)
                                                           for rate in config.ema_rate)] for s in steps]
            add(f"rate {schedule}, {warmup} of {length}, to {last}, {skipped} skipped, {rises}",
                [kinds.index(schedule), warmup, length, skipped, rises], np.array(values).reshape(-1),
                reals=np.array([3e-4, last, *config.ema_rate]), at=steps)
    return tensors


def test_program(cpp, tmp_path):
    unet_io.write_tensors(tmp_path / "twin.bin", twin_cases())
    cpp(NETWORK, "--reference", tmp_path / "twin.bin")


def test_device_twin(images8, tools):
    """The random numbers that PyTorch makes on its device: the integers equal, the batches to 2e-6."""
    compare_quality = tools("compare_quality")
    for seed, stream, step in ((0, Stream.NOISE, 0), (2**32 - 1, Stream.PERTURB, 9), (7, Stream.FLIP, 2**31)):
        rows = torch.tensor([0, 1, 31, 2**31 + 5])
        words = compare_quality.device_words(seed, stream, 400, rows, torch.tensor([step]))
        assert np.array_equal(words.numpy(), unet_io.words(seed, stream, 400, rows.numpy(), step))
    config = Config(**TOY | dict(flip=True, batch_size=5, seed=3, offset_noise=0.2))
    images = unet_io.read_images(images8)
    replayed = compare_quality.DeviceReplay(train_unet.UNet(config), images, config, 7, "cpu")
    for step in range(7):
        for ours, theirs in zip(replayed.batch(), train_unet.make_batch(images, config, step)[:3]):
            assert ours.dtype == torch.from_numpy(theirs).dtype and ours.shape == theirs.shape
            assert np.abs(ours.numpy() - theirs).max() <= (2e-6 if ours.is_floating_point() else 0)
        replayed.step_index += 1


def test_compare_quality(tmp_path, images8):
    """Both programs from fresh weights, with everything that may vary from step to step."""
    config = dataclasses.replace(RESUMED, ema_rate=0.0, class_cond=False, num_classes=0, cond_drop_prob=0.0,
                                 use_scale_shift_norm=False, dropout=0.0)
    result = script("dev/bench/compare_quality.py", "--output_name", tmp_path / "x/curves.jsonl",
                    *flags_of(config), "--steps", 12, "--data_file", images8, "--device", "cpu")
    assert "within 1%: the losses fall alike" in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "x/curves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(abs(line["train_unet"] / line["pytorch"] - 1) < 1e-5 for line in lines)


def test_bytes():
    """No value wraps: what lies beyond the ends becomes them, and a NaN is black, in both programs."""
    values = [-np.inf, -1e30, -1.01, -1.0, -0.99609, 0.0, 0.99609, 1.0, 1.004, 1.0079, 3.0, 1e30, np.inf, np.nan]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unet_io.to_uint8(values).tolist() == [0, 0, 0, 0, 0, 128, 255, 255, 255, 255, 255, 255, 255, 0]


def test_schedule_by_known_values():
    """The published schedule's ends, and guided-diffusion's choice of 10 of 1000 timesteps."""
    abar = unet_io.alphas_bar(1000, "linear")
    assert abs(abar[0] - 0.9999) < 1e-12 and abs(abar[-1] - 4.0358e-5) < 1e-8
    # zero terminal SNR, from the paper's algorithm by way of its betas
    alphas = (np.sqrt(abar) - np.sqrt(abar[-1])) / (np.sqrt(abar[0]) - np.sqrt(abar[-1])) * np.sqrt(abar[0])
    alphas = alphas**2
    betas = 1 - np.append(alphas[0], alphas[1:] / alphas[:-1])
    rescaled = unet_io.alphas_bar(1000, "linear", True)
    assert np.abs(np.cumprod(1 - betas) - rescaled).max() < 1e-12
    assert rescaled[-1] == 0 and abs(rescaled[0] - abar[0]) < 1e-15 and (np.diff(rescaled) < 0).all()
    assert unet_io.space_timesteps(1000, 10).tolist() == [0, 111, 222, 333, 444, 555, 666, 777, 888, 999]
    assert unet_io.space_timesteps(1000, 1).tolist() == [999]


@pytest.mark.parametrize("schedule, zero", [("linear", False), ("cosine", False), ("linear", True), ("flow", False),
                                            ("edm", False)])
def test_order_of_samplers(schedule, zero):
    """Of data N(0.3, 0.5^2) the perfect network and the exact picture of a noise are known. Twice the steps:
    half the error of a sampler of first order, a quarter of one of second."""
    class Perfect(Network):
        def __call__(self, x, t):
            a, s = (float(level[int(t[0])]) for level in self.levels)
            x0 = 0.3 + 0.25 * a / (0.25 * a**2 + s**2) * (x.double() - 0.3 * a)
            return target_of("v", a, s, x0, (x - a * x0) / s)

    config = Config(**TOY | dict(diffusion_steps=4000, predict="v", noise_schedule=schedule,
                                 zero_terminal_snr=zero))
    network, seeds = Perfect(config), [1, 2]
    # the noise of picture y at the first timestep is the same multiple of its standard deviation
    a, s = (level[-1] for level in network.levels)
    z = train_unet.seed_noise(seeds, (3, 8, 8)).double()
    exact = 0.3 + 0.5 * (z - 0.3 * a) / np.sqrt(0.25 * a**2 + s**2)
    for sampler, least, most in (("ddim", 1.9, 2.1), ("dpmpp", 3, 6), ("heun", 3.7, 6)):
        drawn = [train_unet.sample(network, seeds, sampler, n, threshold="none", spacing="uniform") for n in (100, 200)]
        errors = [float((x - exact).abs().max()) for x in drawn]
        print(sampler, errors)
        assert least < errors[0] / errors[1] < most and errors[1] < 0.03


@pytest.mark.parametrize("seed", [0, 2**32 - 2])
def test_initial_weights(tmp_path, images8, seed):
    """Both programs draw the same weights, to the bit; as PyTorch would: bounds, zeros, ones."""
    config = Config(**TOY | dict(seed=seed))
    run(TRAIN, *flags_of(config), "--steps", 0, "--data_file", images8, "--out_dir", tmp_path / "run", *QUICK)
    file = unet_io.read_checkpoint(str(checkpoint_in(tmp_path / "run", 0)))
    model = train_unet.init_weights(train_unet.UNet(config), seed)
    parameters = dict(model.named_parameters())
    flat = np.concatenate([p.ravel() for p in train_unet.to_numpy(parameters.values())])
    assert same_bits(file.sections["weights"], flat) and same_bits(file.sections["ema"], flat)
    assert not file.sections["adam_m"].any() and not file.sections["adam_v"].any()
    assert file.tensors == len(parameters) and file.step == 0
    fresh = dict(train_unet.UNet(config).named_parameters())  # as PyTorch draws them
    for name, parameter in parameters.items():
        values, theirs, n = parameter.detach(), fresh[name].detach(), parameter.numel()
        if theirs.unique().numel() == 1:  # zeros and ones
            assert torch.equal(values, theirs), name
            continue
        bound = model.get_submodule(name.rpartition(".")[0]).weight[0].numel() ** -0.5
        for drawn in (values, theirs):
            assert drawn.abs().max() <= bound * 1.000001, name
            assert abs(drawn.std() / bound * 3**0.5 - 1) < 0.05 + 4 / n**0.5, name
            assert abs(drawn.mean() / bound) < 0.02 + 4 / n**0.5, name


def test_flags_of_both_programs(tmp_path):
    """./train_unet --help and unet_io.Config agree on defaults; train_unet.py's file needs no flags again."""
    text = run(TRAIN, "--help", "all").stdout
    listed = dict(re.findall(r"^  --(\w+) .*?(?:\(default ([^)]*)\))?$", text, re.M))
    for field in dataclasses.fields(Config):
        if not field.metadata["help"]:
            continue
        default = field.default
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        if field.type is bool:
            assert (listed[field.name] == "1") == default
        elif field.type is float:
            assert float(listed[field.name]) == default, field.name
        else:
            assert listed[field.name] == str(default), field.name
    for config in (TRAINING["clipping, linear, averages"], TRAINING["no average"]):  # and back
        assert train_unet.parse_flags([*flags_of(config), "--steps", "20"])[1] == dataclasses.replace(
            config, lr_steps=20)
    shared = {field.name for field in dataclasses.fields(Config)} | train_unet.RUN_FLAGS.keys()
    perturbed_file(tmp_path / "start.bin", Config(**TOY | dict(predict="v")))
    for preset, values in unet_io.PRESETS.items():
        start = ["--model_weights", tmp_path / "start.bin"] if preset == "consistency" else []  # it tunes a model
        standard, theirs = effective(*start), effective("--preset", preset, *start)
        if start:
            assert theirs.pop("sampler") == "consistency"
        assert {name for name in shared & theirs.keys() if theirs[name] != standard[name]} <= values.keys()
        for name, value in values.items():
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            assert theirs[name] == str(shown) or float(theirs[name]) == float(shown), (preset, name)
        for name in ("data_file", "val_file"):
            assert not theirs[name] or (ROOT / f"{theirs[name]}.gz").exists(), (preset, name)
    for preset in ("small32", "fashion32", "unet64"):  # as the records draw
        assert effective("--preset", preset)["sampler"] == "dpmpp" and effective("--preset", preset)["sample_steps"] == "20"
    listed = re.search(r"^Presets\n(.*)", text, re.M | re.S).group(1)
    assert re.findall(r"^  (\w+):", listed, re.M) == list(unet_io.PRESETS)
