"""generate.py --export FOLDER/: the files, what is refused, and where diffusers is installed what it makes of
them, the same predictions and the same pictures.
"""
import json
import os
import sys

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

import convert
import generate
import train_unet
import unet_io
from harness import ADM, SMALL, TOY, call, error_of, perturbed_file
from unet_io import Config, UserError

FILES = ["model_index.json", "scheduler/scheduler_config.json", "unet/config.json",
         "unet/diffusion_pytorch_model.safetensors"]
TINY = {name: value for name, value in unet_io.PRESETS["tiny"].items() if name in Config.__dataclass_fields__}
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
    assert call(generate, "--model_filename", tmp_path / "w.bin", "--export", f"{tmp_path}/out/") == ""
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
        assert call(generate, "--model_filename", tmp_path / "w.bin", "--export", tmp_path / "out",
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
        sentence = call(generate, "--model_filename", tmp_path / "w.bin", "--export", f"{tmp_path}/{target}")
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
        sentence = call(generate, "--model_filename", tmp_path / "w.bin", "--export", f"{tmp_path}/out/")
        assert says in sentence and "\n" not in sentence and not (tmp_path / "out").exists()


@pytest.mark.parametrize("first", [0.5, 1.5])
def test_sinusoids_that_do_not_fit(tmp_path, first):
    """UNet2DModel has as many as its first level has channels; ours are every k-th of them, for a whole k."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY | dict(num_channels=64, channel_mult=(first, 1))))
    sentence = call(generate, "--model_filename", tmp_path / "w.bin", "--export", f"{tmp_path}/out/")
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


@pytest.mark.parametrize("more", [
    {}, dict(predict="v", noise_schedule="cosine", zero_terminal_snr=True, max_period=1000),
    dict(predict="x0", zero_terminal_snr=True, in_channels=1, diffusion_steps=50),
    dict(predict="v", noise_schedule="cosine", in_channels=4, diffusion_steps=200),
    dict(predict="v", noise_schedule="cosine", learn_sigma=True)], ids=[
        "eps", "v, cosine, zero SNR, another period", "x0, zero SNR, grey", "v, cosine, four channels",
        "learned variance"])
def test_pictures(tmp_path, monkeypatch, more):
    """DDPMPipeline, given our noise, draws what --sampler ddpm does: schedule and steps are the same."""
    diffusers = pytest.importorskip("diffusers")
    model, folder = exported(tmp_path, Config(**TOY | more))
    pipeline = diffusers.DDPMPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    noises = (train_unet.seed_noise([3, 8], (model.config.in_channels, 8, 8), n) for n in range(99))
    for module in ("pipelines.ddpm.pipeline_ddpm", "schedulers.scheduling_ddpm"):
        monkeypatch.setattr(f"diffusers.{module}.randn_tensor", lambda *shape, **options: next(noises))
    drawn = pipeline(batch_size=2, num_inference_steps=12, output_type="np").images  # (B, H, W, C)
    expected = (train_unet.sample(model, [3, 8], "ddpm", 12) / 2 + 0.5).clamp(0, 1)
    assert error_of(drawn, expected.permute(0, 2, 3, 1)) < 1e-4
