"""generate.py --export FOLDER/ and --import FOLDER: the files, what is refused, and where diffusers is installed what
it makes of them, the same predictions and the same pictures; and what we make of its models.
"""
import json
import math
import os
import shutil
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

import convert
import generate
import train_unet
import unet_io
from harness import ADM, SMALL, TOY, call, error_of, perturbed_file, same_bits
from unet_io import Config, UserError

FILES = ["model_index.json", "scheduler/scheduler_config.json", "unet/config.json",
         "unet/diffusion_pytorch_model.safetensors"]
# the network of the preset tiny, and an objective that diffusers' DDPMScheduler knows
TINY = {name: value for name, value in unet_io.PRESETS["tiny"].items() if name in Config.__dataclass_fields__} | dict(
    predict="v", noise_schedule="cosine", timestep_sampling="uniform")
CONFIGS = {
    "toy": TOY,
    "the preset tiny": TINY,
    "one level": SMALL,
    "classes": TOY | dict(class_cond=True, num_classes=5),
    "classes, some hidden": TOY | dict(class_cond=True, num_classes=5, cond_drop_prob=0.2),
    "grey": TOY | dict(in_channels=1),
    "four channels, attention everywhere": TOY | dict(in_channels=4, attention_resolutions=(8, 4)),
    "three blocks, many heads, two groups": TOY | dict(num_res_blocks=3, num_head_channels=4, norm_groups=2),
    "attention at the first level alone": TOY | dict(image_size=16, channel_mult=(1, 2, 3), norm_groups=16,
                                                     num_head_channels=32, attention_resolutions=(16,)),
    "levels that narrow": TOY | dict(channel_mult=(3, 2, 1), num_head_channels=8, num_res_blocks=2),
    "max_period 1000": TOY | dict(max_period=1000, diffusion_steps=1001),
    "max_period 50, wide first level": TOY | dict(max_period=50, channel_mult=(2, 2)),
    "scale, shift, dropout": TOY | dict(use_scale_shift_norm=True, dropout=0.3, channel_mult=(1, 1, 2),
                                        attention_resolutions=(2,)),
    "learned resampling": TOY | dict(conv_resample=True, channel_mult=(2, 1, 1), num_head_channels=8,
                                     attention_resolutions=(8, 2)),
    "resampling blocks": TOY | dict(resblock_updown=True, channel_mult=(1, 2, 1), num_res_blocks=2),
    "learned variance, rescaled timesteps": TOY | dict(learn_sigma=True, rescale_timesteps=True,
                                                       diffusion_steps=2500),
    "adm shrunk": ADM | dict(num_heads=2, channel_mult=(2, 2), attention_resolutions=(8,),
                             use_new_attention_order=False),
}


def exported(tmp_path, config):
    """(the model, the folder)"""
    model = perturbed_file(tmp_path / "w.bin", config)
    assert call(generate, "--model_weights", tmp_path / "w.bin", "--export", f"{tmp_path}/out/") == ""
    return model.eval(), tmp_path / "out"


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ----------------------------------------------------------------------------------------------------
# without diffusers

def resnet(place, channels, out_channels):
    """The names and shapes of a residual block."""
    shapes = {"norm1": (channels,), "conv1": (out_channels, channels, 3, 3), "norm2": (out_channels,),
              "conv2": (out_channels, out_channels, 3, 3), "time_emb_proj": (out_channels, 128)}
    if channels != out_channels:
        shapes["conv_shortcut"] = (out_channels, channels, 1, 1)
    return {f"{place}.{name}": shape for name, shape in shapes.items()}


def attention(place):
    """Those of an attention block of 64 channels."""
    layers = {"to_q": (64, 64), "to_k": (64, 64), "to_v": (64, 64), "to_out.0": (64, 64), "group_norm": (64,)}
    return {f"{place}.{name}": shape for name, shape in layers.items()}


def test_tensors(tmp_path):
    """TOY with three classes: all names and shapes, where q, k and v went, and the resampling."""
    config = Config(**TOY | dict(class_cond=True, num_classes=3, cond_drop_prob=0.1))
    model, folder = exported(tmp_path, config)
    assert files_in(folder) == FILES
    weights = {
        "time_embedding.linear_1": (128, 32), "time_embedding.linear_2": (128, 128),
        "class_embedding": (4, 128), "conv_in": (32, 3, 3, 3),
        **resnet("down_blocks.0.resnets.0", 32, 32), "down_blocks.0.downsamplers.0.conv": (32, 32, 3, 3),
        **resnet("down_blocks.1.resnets.0", 32, 64), **attention("down_blocks.1.attentions.0"),
        **resnet("mid_block.resnets.0", 64, 64), **attention("mid_block.attentions.0"),
        **resnet("mid_block.resnets.1", 64, 64),
        **resnet("up_blocks.0.resnets.0", 64 + 64, 64), **attention("up_blocks.0.attentions.0"),
        **resnet("up_blocks.0.resnets.1", 64 + 32, 64), **attention("up_blocks.0.attentions.1"),
        "up_blocks.0.upsamplers.0.conv": (64, 64, 3, 3),
        **resnet("up_blocks.1.resnets.0", 64 + 32, 32), **resnet("up_blocks.1.resnets.1", 32 + 32, 32),
        "conv_norm_out": (32,), "conv_out": (3, 32, 3, 3)}
    expected = {f"{name}.weight": shape for name, shape in weights.items()}
    expected |= {f"{name}.bias": shape[:1] for name, shape in weights.items() if name != "class_embedding"}
    tensors = safetensors.torch.load_file(folder / FILES[3])
    assert {name: tuple(value.shape) for name, value in tensors.items()} == expected
    block = model.output_blocks[1][1]
    for i, part in enumerate(("to_q", "to_k", "to_v")):
        for kind, value in (("weight", block.qkv.weight[..., 0]), ("bias", block.qkv.bias)):
            assert torch.equal(tensors[f"up_blocks.0.attentions.1.{part}.{kind}"], value[64 * i:64 * i + 64])
    block = model.output_blocks[3][0]
    assert torch.equal(tensors["up_blocks.1.resnets.1.conv2.weight"], block.out_layers[3].weight)
    x = torch.randn(2, 32, 8, 8)
    name = "down_blocks.0.downsamplers.0.conv"
    pooled = F.conv2d(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], stride=2, padding=1)
    assert error_of(pooled, F.avg_pool2d(x.double(), 2)) < 1e-6
    x = torch.randn(2, 64, 8, 8)
    name = "up_blocks.0.upsamplers.0.conv"
    assert torch.equal(F.conv2d(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], padding=1), x)


def test_configs(tmp_path):
    """What the JSON files say of a model with other than the default flags."""
    config = Config(**TOY | dict(in_channels=1, channel_mult=(2, 1, 3), num_res_blocks=2, norm_groups=4,
                                 attention_resolutions=(8, 2), diffusion_steps=500, predict="v",
                                 max_period=77, zero_terminal_snr=True))
    _, folder = exported(tmp_path, config)
    index, scheduler, unet = (json.loads((folder / name).read_text()) for name in FILES[:3])
    assert index["_class_name"] == "DDPMPipeline" and index["unet"] == ["diffusers", "UNet2DModel"]
    assert unet["down_block_types"] == ["AttnDownBlock2D", "DownBlock2D", "AttnDownBlock2D"]
    assert unet["up_block_types"] == ["AttnUpBlock2D", "UpBlock2D", "AttnUpBlock2D"]
    assert unet["block_out_channels"] == [64, 32, 96] and unet["time_embedding_dim"] == 128
    assert (unet["sample_size"], unet["in_channels"], unet["out_channels"]) == (8, 1, 1)
    assert (unet["layers_per_block"], unet["attention_head_dim"], unet["norm_num_groups"]) == (2, 16, 4)
    assert unet["num_class_embeds"] is None and unet["time_embedding_type"] == "learned"
    assert unet["num_train_timesteps"] == scheduler["num_train_timesteps"] == 500
    assert scheduler["beta_schedule"] == "linear" and scheduler["beta_end"] == 0.04
    assert abs(scheduler["beta_start"] - 2e-4) < 1e-12 and scheduler["rescale_betas_zero_snr"] is True
    assert scheduler["prediction_type"] == "v_prediction" and scheduler["variance_type"] == "fixed_small"
    assert scheduler["timestep_spacing"] == "trailing" and scheduler["steps_offset"] == 0
    files = convert.diffusers_configs(Config(**TOY | dict(predict="x0", noise_schedule="cosine")))
    assert files["scheduler/scheduler_config.json"]["prediction_type"] == "sample"
    assert files["scheduler/scheduler_config.json"]["beta_schedule"] == "squaredcos_cap_v2"
    assert "time_embedding_type" not in files["unet/config.json"]


def test_averaged_or_raw(tmp_path, capsys):
    """--use_ema decides here too, and a folder that exists needs no slash."""
    config = Config(**SMALL)
    raw = train_unet.to_numpy(perturbed_file(tmp_path / "w.bin", config).parameters())
    sections = dict(weights=raw, ema=[2 * w for w in raw])
    unet_io.write_checkpoint(tmp_path / "w.bin", unet_io.Checkpoint(config, sections, 12))
    (tmp_path / "out").mkdir()
    for use_ema, factor, kind in ((1, 2, "averaged"), (0, 1, "raw")):
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--export", tmp_path / "out",
                    "--use_ema", use_ema) == ""
        assert f"out: the {kind} weights of step 12" in capsys.readouterr().out
        tensors = safetensors.torch.load_file(tmp_path / "out" / FILES[3])
        assert torch.equal(tensors["time_embedding.linear_1.weight"], torch.from_numpy(factor * raw[0]))
    assert files_in(tmp_path / "out") == FILES


def test_refusals(tmp_path, monkeypatch):
    """One sentence, and nothing is written."""
    perturbed_file(tmp_path / "w.bin", Config(**SMALL))
    (tmp_path / "file").write_text("x")
    (tmp_path / "half").mkdir()
    (tmp_path / "half/unet").write_text("x")
    (tmp_path / "odd/unet/config.json").mkdir(parents=True)

    def attempt(target, *says):
        before = sorted(tmp_path.rglob("*"))
        sentence = call(generate, "--model_weights", tmp_path / "w.bin", "--export", f"{tmp_path}/{target}")
        assert len(sentence.splitlines()) == 1 and all(text in sentence for text in says), sentence
        return [path for path in sorted(tmp_path.rglob("*")) if path not in before]

    assert attempt("file/", "file is a file, a folder is needed") == []
    assert attempt("file/x/", "file is a file, a folder is needed") == []
    assert attempt("half/", "half/unet is a file, a folder is needed") == []
    assert attempt("odd", "config.json is a folder, a file is needed") == [tmp_path / "odd/scheduler"]
    assert attempt("weights", "must end in .bin, .pt or .safetensors", "diffusers") == []
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert attempt("out/", "out/ needs the package safetensors: pip install safetensors") == []


def test_heads_that_differ(tmp_path):
    """UNet2DModel's heads all have one width. Then as many heads at every width can't be had."""
    for heads, says in ((dict(num_heads=2, attention_resolutions=(8, 4)), "16 and some of 32"),
                        (dict(num_heads=4, num_heads_upsample=2), "16 and some of 32")):
        perturbed_file(tmp_path / "w.bin", Config(**TOY | heads))
        sentence = call(generate, "--model_weights", tmp_path / "w.bin", "--export", f"{tmp_path}/out/")
        assert says in sentence and "\n" not in sentence and not (tmp_path / "out").exists()


@pytest.mark.parametrize("objective", [dict(noise_schedule="flow", predict="flow"), dict(predict="edm")])
def test_objectives_that_schedulers_lack(tmp_path, objective):
    """A DDPMScheduler knows neither flow matching nor EDM: nothing is written that would draw wrong pictures."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY | objective))
    sentence = call(generate, "--model_weights", tmp_path / "w.bin", "--export", f"{tmp_path}/out/")
    assert "DDPMScheduler does not know" in sentence and "\n" not in sentence and not (tmp_path / "out").exists()


@pytest.mark.parametrize("first", [0.5, 1.5])
def test_sinusoids_that_do_not_fit(tmp_path, first):
    """UNet2DModel has as many as its first level has channels; ours are every k-th of them, for a whole k."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(num_channels=64, channel_mult=(first, 1))))
    sentence = call(generate, "--model_weights", tmp_path / "w.bin", "--export", f"{tmp_path}/out/")
    assert f"here {int(64 * first)}, and this model's 64 don't fit" in sentence
    assert "\n" not in sentence and not (tmp_path / "out").exists()


def test_interrupted_export(tmp_path, monkeypatch):
    """Over an older export: what breaks off at a rename leaves nothing that can be opened, or the new one."""
    old, new = (train_unet.UNet(Config(**SMALL | dict(num_head_channels=width))) for width in (8, 16))
    folder, rename = tmp_path / "out", os.replace
    for renames in range(4):
        convert.save_diffusers(str(folder), old)
        left = iter(range(renames))

        def fail(*names):
            if next(left, None) is None:
                raise OSError(5, "Input/output error")
            rename(*names)

        with monkeypatch.context() as patch, pytest.raises(UserError, match="can't be written"):
            patch.setattr(os, "replace", fail)
            convert.save_diffusers(str(folder), new)
        assert files_in(folder) == FILES[4 - renames:]
        if renames > 1:
            assert json.loads((folder / "unet/config.json").read_text())["attention_head_dim"] == 16
            tensors = safetensors.torch.load_file(folder / FILES[3])
            assert torch.equal(tensors["conv_in.weight"], new.input_blocks[0][0].weight)


# ----------------------------------------------------------------------------------------------------
# with diffusers

@pytest.mark.parametrize("name", CONFIGS)
def test_predictions(tmp_path, name):
    """UNet2DModel predicts what the model does, at timesteps from the first to the last, for all classes."""
    diffusers = pytest.importorskip("diffusers")
    config = Config(**CONFIGS[name])
    model, folder = exported(tmp_path, config)
    found, report = diffusers.UNet2DModel.from_pretrained(folder, subfolder="unet", output_loading_info=True)
    assert not any(report.values()), report
    t = torch.tensor([0, 1, 30, 400, 998, 999])
    x = torch.randn(len(t), config.in_channels, config.image_size, config.image_size)
    y = torch.arange(len(t)) % config.label_rows() if config.class_cond else None
    with torch.no_grad():
        error = error_of(found(x, t, y).sample, model(x, t, y))
    assert error < 1e-5


# ----------------------------------------------------------------------------------------------------
# drawing with diffusers

def scheduler_of(kind, folder):
    """One of diffusers' schedulers, as its users make another than the stored one."""
    import diffusers
    stored = diffusers.DDPMScheduler.from_pretrained(folder, subfolder="scheduler")
    return getattr(diffusers, kind).from_config(stored.config)


@torch.no_grad()
def drawn_with(scheduler, model, steps, noise, later=(), **options):
    """Pictures from the noise by a scheduler; later: what DDPM's adds in each step."""
    scheduler.set_timesteps(steps)
    x, later = noise.clone(), iter(later)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *shape, **_: next(later))
        for t in scheduler.timesteps:
            out = model(x, torch.full((len(x),), int(t)))
            if "DDIM" in type(scheduler).__name__:  # which knows nothing of a learned variance
                out = out[:, :x.shape[1]]
            x = scheduler.step(out, t, x, **options).prev_sample
    return x


def sample_at(times, monkeypatch, *arguments, **options):
    """train_unet.sample with these timesteps."""
    monkeypatch.setattr(unet_io, "spaced_timesteps", lambda *_: np.sort(np.asarray(times)))
    return train_unet.sample(*arguments, **options)


SCHEDULERS = {"DDPMScheduler": "ddpm", "DDIMScheduler": "ddim", "DPMSolverMultistepScheduler": "dpmpp"}


@pytest.mark.parametrize("threshold", ["clamp", "none"])
@pytest.mark.parametrize("steps", [10, 50])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(tmp_path, kind, steps, threshold):
    """The exported scheduler, and others made of it, draw what our samplers do with --spacing trailing.

    With DDIM's eps of the clamped picture, as ours.
    """
    pytest.importorskip("diffusers")
    noises = [train_unet.seed_noise([3, 8], (3, 8, 8), n) for n in range(steps + 1)]
    for more in ({}, dict(predict="v", noise_schedule="cosine"), dict(predict="x0", zero_terminal_snr=True)):
        if kind.startswith("DPM") and "zero_terminal_snr" in more:
            continue  # there the signal isn't 0 at last but 2^-12, from which its second step extrapolates
        perturbed_file(tmp_path / "w.bin", Config(**TOY | more))
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--export", f"{tmp_path}/out/", "--threshold",
                    threshold) == ""
        model, _ = train_unet.load_model(str(tmp_path / "w.bin"))
        scheduler = scheduler_of(kind, tmp_path / "out")
        options = dict(use_clipped_model_output=True) if kind.startswith("DDIM") else {}
        drawn = drawn_with(scheduler, model.eval(), steps, noises[0], noises[1:], **options)
        expected = train_unet.sample(model, [3, 8], SCHEDULERS[kind], steps, threshold=threshold, spacing="trailing")
        assert unet_io.trailing_timesteps(1000, steps).tolist() == scheduler.timesteps.tolist()[::-1]
        assert error_of(drawn, expected) < 1e-4, more


class Ideal:
    """The best prediction there is for pictures that are one of `centres` (n, C, H, W), plus normals times width."""
    def __init__(self, config, centres, width):
        self.config, self.centres, self.variance = config, centres.double().flatten(1), width**2
        self.abar = torch.from_numpy(unet_io.alphas_bar(config.diffusion_steps, config.noise_schedule))

    def __call__(self, x, t):
        a, flat = self.abar[t][:, None], x.double().flatten(1)
        total = 1 - a + a * self.variance
        away = torch.cdist(flat, a[0].sqrt() * self.centres).square()
        centre = (-away / (2 * total)).softmax(1) @ self.centres
        x0 = centre + a.sqrt() * self.variance / total * (flat - a.sqrt() * centre)
        eps = (flat - a.sqrt() * x0) / (1 - a).sqrt()
        out = eps if self.config.predict == "eps" else a.sqrt() * eps - (1 - a).sqrt() * x0
        return out.float().reshape(x.shape)


def write_scheduler(folder, config, run):
    (folder / "scheduler").mkdir(exist_ok=True)
    values = convert.diffusers_configs(config, run)["scheduler/scheduler_config.json"]
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("more", [{}, dict(predict="v", noise_schedule="cosine")], ids=["linear", "cosine"])
def test_schedulers_of_an_ideal_model(tmp_path, more):
    """With the exact prediction, DDIM and DPM-Solver++ end as near to the exact solution as our samplers.

    To half of one of 255 levels, for the timesteps are others: ours are 999 ... 0, theirs 999 ... 19 (`trailing`).
    """
    pytest.importorskip("diffusers")
    config = Config(**TOY | more)
    coarse = np.random.default_rng(0).uniform(-0.35, 0.35, (90, 3, 4, 4)).astype("f4")
    model = Ideal(config, F.interpolate(torch.from_numpy(coarse), size=8, mode="bilinear"), 0.2)
    write_scheduler(tmp_path, config, {})
    noise = train_unet.seed_noise(range(32), (3, 8, 8))
    exact = train_unet.sample(model, range(32), "ddim", 1000, threshold="none")

    def rms(x):
        return 127.5 * (x - exact).square().mean().sqrt().item()

    for kind in ("DDIMScheduler", "DPMSolverMultistepScheduler"):
        for steps in (10, 50):
            theirs = rms(drawn_with(scheduler_of(kind, tmp_path), model, steps, noise))
            ours = rms(train_unet.sample(model, range(32), SCHEDULERS[kind], steps))
            print(f"{kind}, {steps} steps: {theirs:.2f} of 255, ours {ours:.2f}")
            assert theirs < ours + 0.5


def test_latents_keep_their_deviation(tmp_path):
    """A run with --threshold none, of data of deviation 1: diffusers clamps nothing (clamped, it would be 0.72).

    In 50 steps it is not quite 1 in any program: ddpm's posterior adds a little less noise than there was.
    """
    pytest.importorskip("diffusers")
    config = Config(**TOY)
    model = Ideal(config, torch.zeros(1, 3, 8, 8), 1.0)
    write_scheduler(tmp_path, config, dict(threshold="none"))
    noises = [train_unet.seed_noise(range(32), (3, 8, 8), n) for n in range(51)]
    for kind, sampler in SCHEDULERS.items():
        drawn = drawn_with(scheduler_of(kind, tmp_path), model, 50, noises[0], noises[1:])
        ours = train_unet.sample(model, range(32), sampler, 50, threshold="none")
        print(f"{kind}: {drawn.std():.4f}, ours {ours.std():.4f}")
        assert abs(drawn.std() / ours.std() - 1) < 0.01 and 0.9 < drawn.std() < 1.05


@pytest.mark.parametrize("more", [
    {}, dict(predict="v", noise_schedule="cosine", zero_terminal_snr=True, max_period=1000),
    dict(predict="x0", zero_terminal_snr=True, in_channels=1, diffusion_steps=50),
    dict(predict="v", noise_schedule="cosine", in_channels=4, diffusion_steps=200),
    dict(predict="v", noise_schedule="cosine", learn_sigma=True)], ids=[
        "eps", "v, cosine, zero SNR, another period", "x0, zero SNR, grey", "v, cosine, four channels",
        "learned variance"])
def test_pictures(tmp_path, monkeypatch, more):
    """DDPMPipeline, given our noise, draws what --sampler ddpm does at its timesteps: schedule and steps are the same.

    With a learned variance it adds a little noise in the last step, too: the variance there, 0, counts as 1e-20 there,
    of which a geometric mean with beta is taken.
    """
    diffusers = pytest.importorskip("diffusers")
    model, folder = exported(tmp_path, Config(**TOY | more))
    pipeline = diffusers.DDPMPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    noises = (train_unet.seed_noise([3, 8], (model.config.in_channels, 8, 8), n) for n in range(99))
    for module in ("pipelines.ddpm.pipeline_ddpm", "schedulers.scheduling_ddpm"):
        monkeypatch.setattr(f"diffusers.{module}.randn_tensor", lambda *shape, **options: next(noises))
    drawn = pipeline(batch_size=2, num_inference_steps=12, output_type="np").images  # (B, H, W, C)
    times = pipeline.scheduler.timesteps
    assert len(times) == 12 and times[0] == model.config.diffusion_steps - 1
    expected = (sample_at(times, monkeypatch, model, [3, 8], "ddpm", 12) / 2 + 0.5).clamp(0, 1)
    assert error_of(drawn, expected.permute(0, 2, 3, 1)) < (1e-3 if "learn_sigma" in more else 1e-4)


def test_names_of_classes(tmp_path, caplog):
    """Names and how often classes were hidden lie in the model's config.json, where diffusers keeps them in silence."""
    config = Config(**TOY | dict(class_cond=True, num_classes=3, cond_drop_prob=0.2))
    model = train_unet.init_weights(train_unet.UNet(config), 1)
    names = ("cat", "Zürich, old town", "犬")
    convert.save_diffusers(str(tmp_path / "out"), model, unet_io.Checkpoint(config, unet_io.class_section(names)))
    assert json.loads((tmp_path / "out/unet/config.json").read_text())["_id2label"] == {
        "0": "cat", "1": "Zürich, old town", "2": "犬"}
    checkpoint = convert.read(str(tmp_path / "out"))
    assert checkpoint.class_names == names and checkpoint.config.cond_drop_prob == 0.2
    diffusers = pytest.importorskip("diffusers")
    diffusers.DDPMPipeline.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert "not expected" not in caplog.text
    checkpoint = convert.read(str(tmp_path / "again"))
    assert checkpoint.class_names == names and checkpoint.config.num_classes == 3


# ----------------------------------------------------------------------------------------------------
# import

def of_network(config):
    """What a UNet2DModel's files tell of a Config."""
    names = set(train_unet.ARCHITECTURE + train_unet.DIFFUSION) - {
        "use_new_attention_order", "num_heads", "num_heads_upsample", "num_head_channels", "attention_resolutions"}
    widths = [(width, config.heads(width, decoder)) for width in config.level_widths() for decoder in (False, True)
              if width == config.level_widths()[-1] or config.attention_resolutions]
    sizes = [size for size in config.level_sizes() if size in config.attention_resolutions]
    return {name: getattr(config, name) for name in names} | dict(heads=widths if config.attention_resolutions else 0, sizes=sizes)


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(tmp_path, name):
    """What was exported comes back bit for bit, architecture and diffusion with it."""
    config = Config(**CONFIGS[name])
    exported(tmp_path, config)
    assert call(generate, "--import", tmp_path / "out") == ""
    before, after = (unet_io.read_checkpoint(str(tmp_path / name)) for name in ("w.bin", "out.bin"))
    assert same_bits(before.sections["weights"], after.sections["weights"])
    assert of_network(before.config) == of_network(after.config)


def test_settings_round_trip(tmp_path, capsys):
    """How a run draws goes out and comes back; what a drawing needs is said."""
    config = Config(**TOY | dict(predict="v", noise_schedule="cosine", zero_terminal_snr=True, diffusion_steps=300))
    model = perturbed_file(tmp_path / "w.bin", config)
    weights = train_unet.to_numpy(model.parameters())
    for threshold, said in dict(clamp="", dynamic="--threshold dynamic", none="--threshold none").items():
        unet_io.write_checkpoint(tmp_path / "w.bin", unet_io.Checkpoint(config, {"weights": weights},
                                                                       run=dict(threshold=threshold)))
        assert call(generate, "--model_weights", tmp_path / "w.bin", "--export", f"{tmp_path}/out/") == ""
        capsys.readouterr()
        assert call(generate, "--import", tmp_path / "out", "--export", tmp_path / "back.bin") == ""
        assert said in capsys.readouterr().err
        back = unet_io.read_checkpoint(str(tmp_path / "back.bin"))
        assert back.run["threshold"] == threshold and of_network(back.config) == of_network(config)


PLAIN = dict(sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
             down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
THEIRS = {
    "plain": {},
    "one head": dict(attention_head_dim=None),
    "attention at the first level alone": dict(
        attention_head_dim=16, block_out_channels=(32, 32, 64), down_block_types=("AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D"), layers_per_block=2),
    "sines first": dict(flip_sin_to_cos=False),
    "classes": dict(num_class_embeds=5),
    "scale and shift": dict(resnet_time_scale_shift="scale_shift", attn_norm_num_groups=8, out_channels=6),
    "resampling blocks": dict(downsample_type="resnet", upsample_type="resnet", down_block_types=(
        "ResnetDownsampleBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "ResnetUpsampleBlock2D")),
    "no attention in the middle": dict(add_attention=False, dropout=0.1),
    "grey, another activation's name": dict(in_channels=1, out_channels=1, act_fn="swish", sample_size=[8, 8]),
    "one level": dict(block_out_channels=(64,), down_block_types=("AttnDownBlock2D",), up_block_types=("AttnUpBlock2D",),
                      downsample_padding=0),  # of which there is none
}


def theirs(folder, more, **options):
    """A random UNet2DModel, saved; norms and biases are random, too."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(1)
    model = diffusers.UNet2DModel(**PLAIN | more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder, **options)
    return model.eval()


def assert_same_prediction(found, model, config, bound=1e-5):
    """Both predict the same for timesteps from the first to the last, and all classes."""
    t = torch.tensor([0, 1, 30, 400, 998, 999])
    x = torch.randn(len(t), config.in_channels, config.image_size, config.image_size)
    y = torch.arange(len(t)) % config.label_rows() if config.class_cond else None
    with torch.no_grad():
        assert error_of(found(x, t, y), model(x, t, y).sample) < bound


@pytest.mark.parametrize("name", THEIRS)
def test_import(tmp_path, name):
    """A UNet2DModel of diffusers, its folder or its weights beside config.json, predicts the same here."""
    model = theirs(tmp_path / "model/unet", THEIRS[name])
    assert call(generate, "--import", tmp_path / "model/unet", "--export", tmp_path / "a.bin") == ""
    loaded, checkpoint = train_unet.load_model(str(tmp_path / "a.bin"))
    assert_same_prediction(loaded.eval(), model, checkpoint.config)
    assert call(generate, "--import", tmp_path / "model/unet/diffusion_pytorch_model.safetensors") == ""
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "model.bin").read_bytes()


def test_import_of_other_files(tmp_path, capsys):
    """Older names in a pickled .bin, parts with an index, bf16, fp16: they predict what the plain file does."""
    model = theirs(tmp_path / "plain", {})
    state = dict(model.state_dict())

    def imported(folder, bound=1e-5):
        target = tmp_path / "x.bin"
        assert call(generate, "--import", folder, "--export", target) == ""
        loaded, checkpoint = train_unet.load_model(str(target))
        assert_same_prediction(loaded.eval(), model, checkpoint.config, bound)

    def folder_like(name):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "plain/config.json", tmp_path / name)
        return tmp_path / name

    older = {}
    for name, value in state.items():
        for now, before in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
            name = name.replace(f".{now}.", f".{before}.") if ".attentions." in name else name
        older[name] = value
    assert len(older.keys() - state.keys()) == 8 * 4  # weights and biases of four blocks
    torch.save(older, folder_like("older") / "diffusion_pytorch_model.bin")
    imported(tmp_path / "older")
    imported(tmp_path / "older/diffusion_pytorch_model.bin")
    model.save_pretrained(tmp_path / "parts", max_shard_size="400KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    imported(tmp_path / "parts")
    imported(tmp_path / "parts/diffusion_pytorch_model.safetensors.index.json")
    for dtype, name, bound in ((torch.float16, "diffusion_pytorch_model.fp16.safetensors", 1e-2),
                               (torch.bfloat16, "diffusion_pytorch_model.safetensors", 5e-2)):
        low = {key: value.to(dtype) for key, value in state.items()}
        safetensors.torch.save_file(low, folder_like(str(dtype)) / name)
        imported(tmp_path / str(dtype), bound)
        loaded, _ = train_unet.load_model(str(tmp_path / "x.bin"))
        assert torch.equal(loaded.input_blocks[0][0].weight, low["conv_in.weight"].float())
    part = next((tmp_path / "parts").glob("*00002-of*"))
    part.unlink()
    assert part.name in call(generate, "--import", tmp_path / "parts", "--export", tmp_path / "y.bin")


def test_import_of_averages(tmp_path, capsys):
    """unet_ema/ beside unet/, as diffusers' training script saves: the former, or with --use_ema 0 the latter."""
    models = {name: theirs(tmp_path / "run" / name, dict(sample_size=size)) for name, size in (("unet", 8), ("unet_ema", 16))}
    assert models["unet"].config.sample_size == 8
    for use_ema, size, kind in ((1, 16, "averaged "), (0, 8, "")):
        assert call(generate, "--import", tmp_path / "run", "--use_ema", use_ema, "--export", tmp_path / "x.bin") == ""
        said = capsys.readouterr()
        assert "unet_ema" in said.err and f"the {kind}weights" in said.out
        assert unet_io.read_checkpoint(str(tmp_path / "x.bin")).config.image_size == size


def write_theirs(folder, changes, scheduler=None):
    """A config.json with UNet2DModel's defaults but these, the weights of PLAIN, and a scheduler_config.json; none of
    it needs diffusers."""
    config = Config(**TOY)
    convert.save_diffusers(str(folder), train_unet.init_weights(train_unet.UNet(config), 1))
    values = json.loads((folder / "unet/config.json").read_text()) | changes
    (folder / "unet/config.json").write_text(json.dumps(values))
    values = json.loads((folder / "scheduler/scheduler_config.json").read_text()) | (scheduler or {})
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(values))


# As google/ddpm-cifar10-32 and google/ddpm-celebahq-256 have it.
GOOGLE = dict(downsample_padding=0, flip_sin_to_cos=False, freq_shift=1, norm_eps=1e-6, attention_head_dim=None)


@pytest.mark.parametrize("changes, says", [
    (GOOGLE, ["downsample_padding 0 (here it is 1", "norm_eps 1e-06 (here it is 1e-05)", "freq_shift 1 (here it is 0"]),
    (dict(norm_eps=1e-6), ["norm_eps 1e-06"]), (dict(freq_shift=1), ["freq_shift 1"]),
    (dict(downsample_padding=0), ["downsample_padding 0"]), (dict(center_input_sample=True), ["center_input_sample True"]),
    (dict(mid_block_scale_factor=1.5), ["mid_block_scale_factor 1.5"]), (dict(act_fn="gelu"), ["act_fn gelu"]),
    (dict(class_embed_type="timestep"), ["class_embed_type timestep"]),
    (dict(time_embedding_type="fourier"), ["time_embedding_type fourier"]),
    (dict(resnet_time_scale_shift="ada_group"), ["resnet_time_scale_shift ada_group"]),
    (dict(down_block_types=["SkipDownBlock2D", "AttnDownBlock2D"]), ["the block SkipDownBlock2D"]),
    (dict(up_block_types=["UpBlock2D", "AttnUpBlock2D"]), ["attention at other levels"]),
    (dict(up_block_types=["ResnetUpsampleBlock2D", "UpBlock2D"], down_block_types=2 * ["DownBlock2D"]), ["several ways"]),
    (dict(out_channels=4), ["4 out_channels of 3"]), (dict(attn_norm_num_groups=4), ["attn_norm_num_groups 4"]),
    (dict(sample_size=[8, 16]), ["images of 8x16"]), (dict(time_embedding_dim=64), ["time_embedding_dim 64"]),
    (dict(mid_block_type=None), ["mid_block_type None"]), (dict(_class_name="UNet2DConditionModel"), ["UNet2DConditionModel"]),
    (dict(block_out_channels=7), ["makes no sense"]), (dict(layers_per_block="x"), ["num_res_blocks"]),
    (dict(layers_per_block=2), ["down_blocks.0.resnets.1.norm1.weight is missing"]),
    (dict(norm_num_groups=32, attn_norm_num_groups=32), ["architecture: norm_num_groups 32 of 32 channels (here a group has"]),
    (dict(norm_num_groups=7, attn_norm_num_groups=7), ["norm_groups 7"]), (dict(num_class_embeds=3), ["class_embedding.weight is missing"]),
    (dict(block_out_channels=[32, 32]), ["mid_block.resnets.0.norm1.weight is (64,) there and (32,)"]),
    (dict(in_channels=1, out_channels=1), ["conv_in.weight is (32, 3, 3, 3)"]), (dict(sample_size=None), ["sample_size"])])
def test_what_can_not_be_held(tmp_path, changes, says):
    """One sentence, which tells every reason; nothing is written."""
    write_theirs(tmp_path / "x", changes)
    sentence = call(generate, "--import", tmp_path / "x")
    assert "\n" not in sentence and sentence.startswith(str(tmp_path / "x")), sentence
    assert all(text in sentence for text in says), sentence
    assert not (tmp_path / "x.bin").exists()


@pytest.mark.parametrize("scheduler, says", [
    (dict(beta_schedule="scaled_linear"), "beta_schedule scaled_linear"), (dict(beta_end=0.012), "betas from 0.0001 to 0.012"),
    (dict(num_train_timesteps=500), "betas from"), (dict(trained_betas=[0.1]), "betas of its own"),
    (dict(prediction_type="flow"), "prediction_type flow"), (dict(num_train_timesteps="x"), "num_train_timesteps 'x'")])
def test_noise_that_is_not_ours(tmp_path, scheduler, says):
    write_theirs(tmp_path / "x", {}, scheduler)
    sentence = call(generate, "--import", tmp_path / "x")
    assert "\n" not in sentence and says in sentence and not (tmp_path / "x.bin").exists(), sentence


def test_what_the_files_do_not_tell(tmp_path, capsys):
    """Flags say what no file does; what contradicts one is refused, and what was assumed is said."""
    write_theirs(tmp_path / "x", dict(warp=3, _private=1))
    shutil.rmtree(tmp_path / "x/scheduler")
    assert call(generate, "--import", tmp_path / "x", "--predict", "v", "--noise_schedule", "cosine") == ""
    said = capsys.readouterr().err
    assert "diffusion_steps 1000" in said and "predict" not in said and "ignored: warp" in said
    config = unet_io.read_checkpoint(str(tmp_path / "x.bin")).config
    assert (config.predict, config.noise_schedule) == ("v", "cosine")
    write_theirs(tmp_path / "y", dict(), dict(variance_type="fixed_large", clip_sample_range=2.0, thresholding=False))
    assert call(generate, "--import", tmp_path / "y") == ""
    said = capsys.readouterr().err
    assert "variance_type fixed_large" in said and "[-2.0, 2.0]" in said
    for words, says in ((["--num_channels", 64], "--num_channels 64 contradicts"), (["--predict", "v"], "--predict v"),
                        (["--max_period", 77], "--max_period 77")):
        assert says in call(generate, "--import", tmp_path / "y", "--export", tmp_path / "z.bin", *words)


def test_damaged_folders(tmp_path):
    """A folder without what is needed, and files that aren't what their names say: one sentence."""
    (tmp_path / "empty").mkdir()
    write_theirs(tmp_path / "x", {})
    folder = tmp_path / "x/unet"
    weights, settings = folder / "diffusion_pytorch_model.safetensors", folder / "config.json"
    good, config = weights.read_bytes(), settings.read_text()

    def attempt(path, *says):
        sentence = call(generate, "--import", path, "--export", tmp_path / "out.bin")
        assert "\n" not in sentence and all(text in sentence for text in says), sentence
        assert not (tmp_path / "out.bin").exists()

    attempt(tmp_path / "empty", "empty is a folder without a config.json", "a file is needed")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    attempt(tmp_path / "x", "diffusion_pytorch_model.safetensors", "Git LFS's pointer", "git lfs pull")
    weights.write_bytes(b"")
    attempt(tmp_path / "x", "diffusion_pytorch_model.safetensors is empty")
    weights.unlink()
    attempt(tmp_path / "x", "holds no diffusion_pytorch_model.safetensors")
    weights.write_bytes(good)
    for text in ("", "[1]", "{", "version https://git-lfs.github.com/spec/v1"):
        settings.write_text(text)
        attempt(tmp_path / "x", "config.json")
    settings.unlink()
    attempt(weights, "config.json must lie beside it")
    settings.write_text(config)
    state = safetensors.torch.load_file(weights)
    for change, says in (({"extra.weight": torch.ones(3)}, "extra.weight is (3,) there and no parameter"),
                         ({"conv_in.bias": torch.full((32,), math.nan)}, "NaN"),
                         ({"conv_in.bias": torch.ones(32, dtype=torch.int32)}, "conv_in.bias")):
        safetensors.torch.save_file(state | change, weights)
        attempt(tmp_path / "x", says)
