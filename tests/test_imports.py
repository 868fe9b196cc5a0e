"""Tests of what comes from elsewhere: others' weights, guided-diffusion's flags, the earlier trainer's flags,
values out of range, and what the Python programs say about all that.
"""
import argparse
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch

import generate
import train_unet
import unet_io
from harness import (
    QUICK, ROOT, SMALL, TOY, TRAIN, call, checkpoint_in, effective, perturbed_file, refused, run, same_bits,
    script, write_setting)
from unet_io import Checkpoint, Config, UserError, flags_of

PYTHON = sys.executable
SHAPE = dict(image_size=8, num_channels=32, channel_mult="1,2", num_res_blocks=1, attention_resolutions="4",
             num_head_channels=16, norm_groups=8)  # TOY's network in guided-diffusion's flags
SHAPE_FLAGS = [word for name, value in SHAPE.items() for word in (f"--{name}", value)]
OLD_NAMES = [("in_layers.0", "gn1"), ("in_layers.2", "cv3_1"), ("emb_layers.1", "l_emb"),
             ("out_layers.0", "gn2"), ("out_layers.3", "cv3_2"), (".norm.", ".gn."), ("proj_out", "proj")]


def old_name(name):
    """What a layer was called in the state dicts of the earlier trainer."""
    for ours, theirs in OLD_NAMES:
        name = name.replace(ours, theirs)
    return name


def toy_model(**more):
    return train_unet.perturb(train_unet.create_model(**SHAPE | more), 5)


# ----------------------------------------------------------------------------------------------------
# weights

@pytest.mark.parametrize("family, max_period", [("guided", 10000), ("old", 1000), ("compiled", 10000),
                                                ("parameters", 10000), ("shuffled", 1000), ("half", 10000)])
def test_bare_state_dict(tmp_path, capsys, family, max_period):
    """The names tell the family, and with it max_period; the flags beside --import tell the architecture."""
    model = toy_model(max_period=max_period)
    state = dict(model.state_dict())
    if family == "parameters":
        state = dict(model.named_parameters())
    if family in ("old", "shuffled"):
        state = {old_name(name): value for name, value in state.items()}
    if family == "compiled":
        state = {"_orig_mod." + name: value for name, value in state.items()}
    if family == "shuffled":  # by name, not by place; the first tells the width
        state = dict([*list(state.items())[:1], *reversed(list(state.items())[1:])])
    if family == "half":
        state = {name: value.half() for name, value in state.items()}
    torch.save(state, tmp_path / "w.pt")
    assert call(generate, "--import", tmp_path / "w.pt", *SHAPE_FLAGS) == ""
    assert f"max_period {max_period}" in capsys.readouterr().err
    loaded, checkpoint = train_unet.load_model(str(tmp_path / "w.bin"))
    assert checkpoint.config.max_period == max_period and loaded.config.num_head_channels == 16
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([3, 900])
    with torch.no_grad():
        expected = model.half().float()(x, t) if family == "half" else model(x, t)
        assert torch.equal(loaded(x, t), expected)
    # a period that is typed counts, and then it isn't said to be assumed
    assert call(generate, "--import", tmp_path / "w.pt", *SHAPE_FLAGS, "--max_period", 77,
                "--export", tmp_path / "typed.bin") == ""
    assert "max_period" not in capsys.readouterr().err
    assert unet_io.read_checkpoint(str(tmp_path / "typed.bin")).config.max_period == 77


def test_bare_state_dict_of_another_architecture(tmp_path):
    """Without the flags the shapes don't fit, and the sentence names the flags; nothing is written."""
    torch.save(toy_model().state_dict(), tmp_path / "w.pt")
    for words, says in (([], ["w.pt", "--norm_groups"]), (["--norm_groups", 8], ["w.pt", "--channel_mult"]),
                        ([*SHAPE_FLAGS, "--num_channels", 64], ["w.pt: time_embed.0.weight is (128, 32)"]),
                        ([*SHAPE_FLAGS, "--image_size", 63], ["--image_size 63"]),
                        ([*SHAPE_FLAGS, "--norm_groups", 32], ["w.pt", "--norm_groups"])):
        sentence = call(generate, "--import", tmp_path / "w.pt", *words)
        assert all(text in sentence for text in says) and "\n" not in sentence, sentence
    assert os.listdir(tmp_path) == ["w.pt"]


class Elsewhere:
    """A class that torch.load must not make."""


def hostile_states():
    """{name: (object to save, what the sentence names)}"""
    whole = dict(toy_model().state_dict())
    first, name = "time_embed.0.weight", "out.2.bias"

    def other(value):
        return whole | {name: value}
    huge = {key: torch.zeros(1).expand(10**12 if key == name else value.numel()).reshape(-1)
            for key, value in whole.items()}
    flat = {key: torch.zeros(1).as_strided(value.shape, [0] * value.dim()) for key, value in whole.items()}
    cases = {
        "sparse": (other(torch.ones(3).to_sparse()), name),
        "complex": (other(torch.ones(3, dtype=torch.complex64)), name),
        "bool": (other(torch.ones(3, dtype=torch.bool)), name),
        "integers": (other(torch.ones(3, dtype=torch.int64)), name),
        "meta": (other(torch.ones(3, device="meta")), name),
        "shape": (other(torch.ones(4)), name),
        "NaN": (other(torch.tensor([0, math.nan, 0])), "NaN"),
        "infinite": (other(torch.tensor([0, 0, math.inf])), "NaN or infinity"),
        "too large for float32": (other(torch.full((3,), 1e300, dtype=torch.float64)), "NaN or infinity"),
        "huge": (huge, "claim"), "no memory behind it": (flat, "claim"),
        "number": (other(3), name), "text": (other("x"), name), "none": (other(None), name),
        "nested": (other({"weight": torch.ones(3)}), name), "list": (other([1.0, 2.0]), name),
        "integer keys": (dict(enumerate(whole.values())), "0"), "one integer key": (whole | {7: first}, "7"),
        "empty": ({}, "no state dict"), "a list": ([torch.ones(3)], "no state dict"),
        "a tensor": (torch.ones(3), "no state dict"), "nothing": (None, "no state dict"),
        "empty inside": ({"state_dict": {}}, "no state dict"),
        "missing": ({key: value for key, value in whole.items() if key != name}, "missing"),
        "twice": (whole | {"_orig_mod." + name: whole[name].clone()}, "two tensors"),
        "more": (whole | {"extra": torch.ones(3)}, "extra"),
        "class": (whole | {"x": Elsewhere()}, "only tensors"),
        "learned resampling": (whole | {"input_blocks.2.0.op.weight": torch.ones(3)}, "input_blocks.2.0.op"),
        "classes": (whole | {"label_emb.weight": torch.ones(3)}, "label_emb.weight"),
    }
    config = Config(**TOY).__dict__ | dict(ema_rate=(0.999,))
    good = dict(state_dict=whole, config=config)
    for step in (2**31, -1, 1.5, "many", None, True, math.nan):
        cases[f"step {step}"] = (good | dict(step=step), "step")
    for change, says in ((dict(num_channels="32"), "num_channels"), (dict(flip="False"), "flip"),
                         (dict(seed=2**32), "seed"), (dict(beta2=2.0), "beta2"), (dict(lr=1e-60), "lr"),
                         (dict(diffusion_steps=20), "diffusion_steps"), (dict(num_res_blocks=2.7), "num_res"),
                         (dict(channel_mult=(1,) * 9), "channel_mult")):
        cases[f"config {change}"] = (dict(state_dict=whole, config=config | change), says)
    cases["Parameters"] = (dict(state_dict={key: torch.nn.Parameter(value) for key, value in whole.items()},
                                config=config), "")
    return cases


def test_hostile_state_dicts(tmp_path):
    """Whatever a .pt holds: it is read, or one sentence names the file and what is wrong."""
    for case, (state, says) in hostile_states().items():
        path = tmp_path / "w.pt"
        torch.save(state, path)
        sentence = call(generate, "--import", path, *SHAPE_FLAGS, "--export", tmp_path / "out.bin")
        if not says:
            assert sentence == "" and (tmp_path / "out.bin").exists(), (case, sentence)
            os.remove(tmp_path / "out.bin")
            continue
        assert "w.pt" in sentence and says in sentence and "\n" not in sentence, (case, sentence)
        assert not (tmp_path / "out.bin").exists(), case


@pytest.mark.filterwarnings("ignore")
def test_quantised_state_dict(tmp_path):
    try:
        value = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    except (RuntimeError, AttributeError, NotImplementedError):
        pytest.skip("this PyTorch has no quantised tensors")
    torch.save(dict(toy_model().state_dict()) | {"out.2.bias": value}, tmp_path / "w.pt")
    sentence = call(generate, "--import", tmp_path / "w.pt", *SHAPE_FLAGS)
    assert "w.pt" in sentence and "\n" not in sentence and not (tmp_path / "w.bin").exists()


def test_hostile_pt_files(tmp_path):
    """Files that are no state dict at all, or none that torch.load takes for safe."""
    path = tmp_path / "w.pt"
    for content in (pickle.dumps(Elsewhere), pickle.dumps({"x": 1}), b"\x80\x02}q\x00.", b"PK\x03\x04" * 99):
        path.write_bytes(content)
        sentence = call(generate, "--import", path)
        assert "w.pt" in sentence and "\n" not in sentence, sentence
    os.remove(path)
    for make, ending in ((os.mkdir, "pt"), (os.mkfifo, "pt"), (os.mkfifo, "safetensors"), (os.mkfifo, "bin")):
        place = tmp_path / f"{make.__name__}.{ending}"
        make(place)
        sentence = call(generate, "--model_weights", place)
        assert place.name in sentence and "a file is needed" in sentence
    # an error that holds control bytes is printed without them, on one line
    bad = tmp_path / "a\n\x1b[31mb\udcff.pt"
    result = script("generate.py", "--import", bad, status=1)
    assert "a\\x0A\\x1B[31mb\\xFF.pt" in result.stderr and result.stderr.count("\n") == 1


def test_hostile_safetensors(tmp_path):
    """Headers that lie, JSON that is too deep, steps and configurations that make no sense."""
    safetensors = pytest.importorskip("safetensors.torch")
    state = {name: value.contiguous() for name, value in toy_model().state_dict().items()}
    config = json.dumps(Config(**TOY).__dict__)
    path = tmp_path / "w.safetensors"

    def attempt(says):
        sentence = call(generate, "--import", path)
        assert "w.safetensors" in sentence and says in sentence and "\n" not in sentence, sentence
        assert not (tmp_path / "w.bin").exists()

    for step in (str(2**31), "-1", "9" * 5000, "1.5"):
        safetensors.save_file(state, path, dict(config=config, step=step))
        attempt("step")
    for bad, says in (("[" * 100000, "configuration"), ("[1]", "configuration"), ('"x"', "configuration"),
                      ('{"channel_mult": 7}', "configuration"), ('{"\\ud800": 1}', "setting")):
        safetensors.save_file(state, path, dict(config=bad))
        attempt(says)
    safetensors.save_file(state | {"out.2.bias": torch.full((3,), math.nan)}, path, dict(config=config))
    attempt("NaN")
    safetensors.save_file(state | {"out.2.bias": torch.ones(3, dtype=torch.int8)}, path, dict(config=config))
    attempt("out.2.bias")
    for header in (dict(x=dict(dtype="F32", shape=[10**12], data_offsets=[0, 4 * 10**12])),
                   dict(x=dict(dtype="F32", shape=[2**63, 4], data_offsets=[0, 0])),
                   dict(x=dict(dtype="Q8", shape=[1], data_offsets=[0, 1])), dict(x=[]), []):
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
        attempt("")
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    attempt("")


def test_nan_weights_draw_nothing(tmp_path, images8):
    """A .bin whose weights are NaN: no black picture, a sentence; nor does a run start from it."""
    config = Config(**TOY)
    model = perturbed_file(tmp_path / "good.bin", config)
    for name, bad in (("nan", math.nan), ("inf", -math.inf)):
        weights = train_unet.to_numpy(model.parameters())
        weights[3] = weights[3].copy()
        weights[3].flat[0] = bad
        unet_io.write_checkpoint(tmp_path / f"{name}.bin", Checkpoint(config, {"weights": weights}))
        sentence = call(generate, "--model_weights", tmp_path / f"{name}.bin", "--device", "cpu",
                        "--output_name", tmp_path / "x.png", "--num_samples", 1)
        assert f"{name}.bin holds NaN or infinity" in sentence and "\n" not in sentence
        sentence = call(train_unet, "--model_weights", tmp_path / f"{name}.bin", "--data_file", images8,
                        "--out_dir", tmp_path / "run", "--device", "cpu")
        assert f"{name}.bin holds NaN or infinity" in sentence
    # weights that are numbers and outputs that aren't
    large = [np.full_like(w, 1e30) for w in train_unet.to_numpy(model.parameters())]
    unet_io.write_checkpoint(tmp_path / "large.bin", Checkpoint(config, {"weights": large}))
    sentence = call(generate, "--model_weights", tmp_path / "large.bin", "--device", "cpu",
                    "--output_name", tmp_path / "x.png", "--num_samples", 1)
    assert "large.bin" in sentence and "NaN" in sentence
    assert not (tmp_path / "x.png").exists() and not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------------------------
# what other trainers put around weights

def halved(state):
    return {name: value / 2 for name, value in state.items()}


def wrapped_states(model):
    """{name: (object to save, the factor of the averaged weights or None, what is said)}"""
    state = dict(model.state_dict())

    def named(prefix, tensors=state):
        return {prefix + name: value for name, value in tensors.items()}

    buffers = {"betas": torch.ones(9), "model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(3)}
    flat = {"model_ema." + name.removeprefix("model.").replace(".", ""): value / 2
            for name, value in named("model.diffusion_model.").items()}
    optimizer = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(7.0)}}, "param_groups": [{"lr": 0.1}]}
    cases = {prefix or "bare": (named(prefix), None, "") for prefix in (
        "", "module.", "model.", "_orig_mod.", "diffusion_model.", "module._orig_mod.", "_orig_mod.module.",
        "model.diffusion_model.", "model.module.diffusion_model._orig_mod.", "denoiser.unet.")}
    return cases | {
        "model and ema": ({"model": state, "ema": halved(state), "opt": optimizer, "step": 9}, 0.5, "holds model and ema"),
        "state_dict": ({"state_dict": named("module."), "epoch": 3}, None, ""),
        "model_state_dict": ({"model_state_dict": state, "optimizer_state_dict": optimizer, "loss": 0.5}, None, ""),
        "only params_ema": ({"params_ema": halved(state)}, 0.5, "params_ema"),
        "params, params_ema": ({"params": state, "params_ema": named("module.", halved(state))}, 0.5, "params_ema"),
        "a counter that is a tensor": ({"model": state, "global_step": torch.tensor(9)}, None, ""),
        "ema within": ({"model": state, "ema": {"decay": 0.99, "shadow": halved(state)}}, 0.5, "ema.shadow"),
        "a list of averages": ({"model": state, "ema": {"decay": 0.99, "shadow_params": [v / 2 for v in state.values()]}},
                               0.5, "ema.shadow_params"),
        "ema_model beside online_model": (named("online_model.") | named("ema_model.", halved(state))
                                          | {"initted": torch.tensor(True), "step": torch.tensor(4)}, 0.5, "ema_model."),
        "Lightning": ({"state_dict": named("model."), "hyper_parameters": {"lr": 0.1, "model": "unet"}, "epoch": 3,
                       "global_step": 99, "pytorch-lightning_version": "2.1", "loops": {"fit_loop": {}},
                       "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "x"}},
                       "optimizer_states": [optimizer], "lr_schedulers": [{"gamma": 0.1}]}, None, ""),
        "latent diffusion": ({"state_dict": named("model.diffusion_model.") | flat | buffers
                              | {"first_stage_model.conv.weight": torch.ones(3)}}, 0.5, "model_ema"),
        "argparse's arguments": ({"model": state, "args": argparse.Namespace(lr=0.1)}, None, ""),
    }


def test_what_others_put_around(tmp_path, capsys):
    """Prefixes and dictionaries of other trainers: averages are taken where there are any, --use_ema 0 takes the raw."""
    model = toy_model()
    reference = np.concatenate([p.ravel() for p in train_unet.to_numpy(model.parameters())])
    for case, (content, factor, says) in wrapped_states(model).items():
        torch.save(content, tmp_path / "w.ckpt")
        for use_ema in (1, 0):
            capsys.readouterr()
            sentence = call(generate, "--import", tmp_path / "w.ckpt", *SHAPE_FLAGS, "--use_ema", use_ema, "--export",
                            tmp_path / "out.bin")
            assert sentence == "", (case, sentence)
            said = capsys.readouterr()
            weights = unet_io.read_checkpoint(str(tmp_path / "out.bin")).sections["weights"]
            only = case == "only params_ema"
            expected = reference * (factor if factor and (use_ema or only) else 1)
            assert same_bits(weights, expected.astype("<f4")), case
            assert says in said.err if use_ema else "w.ckpt" in said.err, (case, said.err)
            kind = "averaged " if factor and (use_ema or only) else ""
            assert f"out.bin: the {kind}weights" in said.out, (case, said.out)


def test_what_was_left_out_is_said(tmp_path, capsys):
    content, *_ = wrapped_states(toy_model())["latent diffusion"]
    torch.save(content, tmp_path / "w.pt")
    assert call(generate, "--import", tmp_path / "w.pt", *SHAPE_FLAGS, "--use_ema", 0) == ""
    assert re.search(r"\d+ others such as model_ema\S+ left out", capsys.readouterr().err)


def test_bare_safetensors(tmp_path, capsys):
    """As a bare .pt: flags tell the architecture, prefixes go, averages are the caller's; its names must be known."""
    model = toy_model()
    for kind, prefix in ((torch.float32, ""), (torch.bfloat16, "model.")):
        state = {prefix + name: value.to(kind).contiguous() for name, value in model.state_dict().items()}
        safetensors.torch.save_file(state, tmp_path / "w.safetensors")
        assert call(generate, "--import", tmp_path / "w.safetensors", *SHAPE_FLAGS, "--export", tmp_path / "out.bin") == ""
        assert "max_period 10000" in capsys.readouterr().err
        loaded, checkpoint = train_unet.load_model(str(tmp_path / "out.bin"))
        for name, p in loaded.named_parameters():
            assert torch.equal(p, model.state_dict()[name].to(kind).float())
    safetensors.torch.save_file({f"p{i}": value.contiguous() for i, value in enumerate(model.state_dict().values())},
                                tmp_path / "w.safetensors")
    sentence = call(generate, "--import", tmp_path / "w.safetensors", *SHAPE_FLAGS)
    assert "names its tensors as no known model does" in sentence and not (tmp_path / "w.bin").exists()


def test_training_from_other_files(tmp_path, train):
    """train_unet.py --model_weights takes what generate.py --import takes: a bare safetensors, a Lightning checkpoint."""
    state = {name: value.contiguous() for name, value in toy_model().state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    torch.save({"state_dict": {f"model.{name}": value for name, value in state.items()}}, tmp_path / "w.ckpt")
    found = []
    for name in ("w.safetensors", "w.ckpt"):
        train(*SHAPE_FLAGS, "--steps", 0, "--out_dir", tmp_path / name[2:], "--model_weights", tmp_path / name)
        found.append(unet_io.read_checkpoint(str(checkpoint_in(tmp_path / name[2:], 0))).sections["weights"])
    assert same_bits(*found) and same_bits(found[0][:state["time_embed.0.weight"].numel()], state["time_embed.0.weight"])


class Runs:
    """A pickle that runs a command when it is loaded as such."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def test_files_that_are_no_weights(tmp_path):
    """One sentence that names the file and what it is; no code is run, and nothing is written."""
    state = dict(toy_model().state_dict())
    saved = {"runs": ({"state_dict": state, "x": Runs(tmp_path / "ran")}, ["system", "only tensors", "run code"]),
             "a class": ({"state_dict": state, "callbacks": {"c": Elsewhere()}}, ["test_imports.Elsewhere", "only tensors"]),
             "two models": ({"generator": state, "discriminator": state}, ["generator, discriminator", "more than one"]),
             "two networks": ({f"{part}.{name}": value for part in "ab" for name, value in state.items()},
                              ["more than one network", "'a.', 'b.'"]),
             "optimizer alone": ({"optimizer": {"state": {}}, "epoch": 3}, ["no state dict of tensors"]),
             "a list that does not fit": ({"model": state, "ema": {"shadow_params": [torch.ones(3), torch.ones(4)]}},
                                          ["ema.shadow_params", "--use_ema 0"]),
             "diffusers' names": ({"down_blocks.0.resnets.0.conv1.weight": torch.ones(3),
                                   "time_embedding.linear_1.weight": torch.ones(3)}, ["config.json must lie beside it"]),
             "a DiT": ({"x_embedder.proj.weight": torch.ones(3)}, ["holds a DiT", "dev/dit/train_dit.py --import"])}

    def attempt(path, says):
        sentence = call(generate, "--import", path, *SHAPE_FLAGS, "--export", tmp_path / "out.bin")
        assert path.name in sentence and "\n" not in sentence, sentence
        assert all(text in sentence for text in says), sentence
        assert not (tmp_path / "out.bin").exists() and not (tmp_path / "ran").exists()

    for content, says in saved.values():
        torch.save(content, tmp_path / "w.pt")
        attempt(tmp_path / "w.pt", says)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    for ending in ("pt", "pth", "ckpt", "safetensors", "bin"):
        path = tmp_path / f"w.{ending}"
        path.write_bytes(pointer)
        attempt(path, ["Git LFS's pointer", "git lfs pull"])
        path.write_bytes(b"")
        attempt(path, ["is empty"])
    (tmp_path / "folder").mkdir()
    attempt(tmp_path / "folder", ["a folder without a config.json", "a file is needed"])


@pytest.mark.parametrize("flags, says", [
    (dict(num_channels=64), "--num_channels"), (dict(use_scale_shift_norm=True), "--use_scale_shift_norm"),
    (dict(class_cond=True, num_classes=3), "--class_cond and --num_classes"),
    (dict(conv_resample=True), "--conv_resample"), (dict(in_channels=1), "--in_channels"),
    (dict(learn_sigma=True), "--learn_sigma"), (dict(num_res_blocks=2), "--num_res_blocks"),
    (dict(channel_mult="1,3"), "--channel_mult"), (dict(attention_resolutions="8,4"), "--attention_resolutions")])
def test_a_tensor_names_its_flag(tmp_path, flags, says):
    """What doesn't fit is told by the tensor, both shapes, and the flags that decide about it."""
    torch.save(dict(toy_model().state_dict()), tmp_path / "w.pt")
    words = [word for name, value in (SHAPE | flags).items() for word in (f"--{name}", value)]
    sentence = call(generate, "--import", tmp_path / "w.pt", *words)
    assert re.search(r"w\.pt: \S+ is (\(.*\)|missing) there and (\(.*\)|no parameter) in the model", sentence), sentence
    assert says in sentence and "\n" not in sentence and not (tmp_path / "w.bin").exists(), sentence


# ----------------------------------------------------------------------------------------------------
# guided-diffusion's flags

def test_channel_mult_follows_the_image_size():
    """channel_mult="" and none: guided-diffusion's, by image_size (script_util.create_model)."""
    for size, mult in ((64, (1, 2, 3, 4)), (128, (1, 1, 2, 3, 4)), (256, (1, 1, 2, 2, 4, 4)),
                       (512, (0.5, 1, 1, 2, 2, 4, 4))):
        for flags in (dict(channel_mult=""), {}):
            with torch.device("meta"):
                model = train_unet.create_model(image_size=size, num_channels=64, norm_groups=8, **flags)
            assert model.config.channel_mult == mult
    for size in (32, 100):
        with pytest.raises(UserError, match="channel_mult"):
            train_unet.create_model(image_size=size)
    with torch.device("meta"):
        model = train_unet.create_model(64, 32, 1, "1,2", norm_groups=8)  # in guided-diffusion's order
    config = model.config
    assert (config.num_channels, config.num_res_blocks, config.channel_mult) == (32, 1, (1, 2))


def test_size_beside_guided_diffusion():
    """The numbers of docs/formats.md: ours, and with a 3x3 convolution at each change of resolution theirs."""
    with torch.device("meta"):
        ours, theirs = (sum(p.numel() for p in train_unet.create_model(
            image_size=64, num_channels=64, attention_resolutions="16,8", conv_resample=learned).parameters())
            for learned in (False, True))
    assert (ours, theirs) == (20494211, 22080323)
    page, lesson = (ROOT / "docs/formats.md").read_text(), train_unet.create_model.__doc__
    assert all(f"{n:,}" in text for n in (ours, theirs) for text in (page, lesson))


@pytest.mark.parametrize("asked, attended", [("16", [16]), ("24", [32]), ("16,8", [16, 8]), ("64", [64]),
                                             ("128", []), ("20", []), ("10", []), ("", [])])
def test_attention_resolutions(asked, attended):
    """guided-diffusion attends where the image was shrunk image_size // r times, be r such a size or not."""
    with torch.device("meta"):
        model = train_unet.create_model(image_size=64, num_channels=64, attention_resolutions=asked)
    sizes, found = 64, []
    for block in model.input_blocks:
        found += [sizes] * any(isinstance(layer, train_unet.AttentionBlock) for layer in block)
        sizes //= 2 if isinstance(block[0], train_unet.Downsample) else 1
    assert sorted(set(found), reverse=True) == attended


def test_flags_that_another_model_needs():
    """What this model can't do is refused by its name; what it does anyway is taken."""
    fixed = dict(use_checkpoint=False, use_fp16=False, timestep_respacing="", use_kl=False,
                 predict_xstart=False)
    free = dict(learn_sigma=True, use_scale_shift_norm=True, dropout=0.5, resblock_updown=True,
                use_new_attention_order=False, rescale_timesteps=True, conv_resample=True, class_cond=True)
    either = dict(rescale_learned_sigmas=True)
    config = train_unet.create_model(**SHAPE | free | either).config
    assert all(getattr(config, name) == value for name, value in free.items()) and config.num_classes == 1000
    heads = dict(num_heads=4, num_heads_upsample=-1, num_head_channels=16)  # the width comes first, there too
    assert train_unet.create_model(**SHAPE | fixed | heads).config.num_head_channels == 16
    for name, value in fixed.items():
        other = "ddim25" if value == "" else not value
        with pytest.raises(UserError, match=f"create_model: {name}="):
            train_unet.create_model(**SHAPE | {name: other})
    bare = {name: value for name, value in SHAPE.items() if name != "num_head_channels"}
    for heads in (dict(num_head_channels=-1), dict(num_heads=4)):  # guided-diffusion's 4
        assert train_unet.create_model(**bare | heads).config.num_heads == 4
    for flags, says in ((dict(num_heads=3), "num_heads"), (dict(channel_mult=None), "channel_mult"),
                        (dict(channel_mult="0.5,1"), "channel_mult"), (dict(channel_mult=3), "channel_mult"),
                        (dict(channel_mult=()), "channel_mult"), (dict(channel_mult="nan,1"), "channel_mult"),
                        (dict(attention_resolutions=None), "attention_resolutions"),
                        (dict(attention_resolutions="4.5"), "attention_resolutions.*whole"),
                        (dict(image_size="8"), "image_size"), (dict(num_channels=32.5), "num_channels"),
                        (dict(num_channels=True), "num_channels"), (dict(warp=1), "no flag warp")):
        with pytest.raises(UserError, match=says):
            train_unet.create_model(**bare | flags)


# ----------------------------------------------------------------------------------------------------
# ranges

def flags_of_the_program():
    """{flag: (least, most)} of every number that ./train_unet takes, from its table."""
    table = (ROOT / "unet_io.h").read_text().split("static std::vector<Flag> FLAGS = {")[1].split("\n};")[0]
    number = r"(-?[\d.]+(?:e-?\d+)?)"
    found = re.findall(r'(?:FIELD|OPTIMISER)\((\w+)\), (?:INT|FLOAT), \w+, \w+,\s*"[^"]*",\s*"[^"]*",\s*'
                       + number + ", " + number + r"\}", table)
    assert len(found) == len(re.findall(r"\), (?:INT|FLOAT), ", table)) > 30
    ranks = ("gpus", "processes")  # which the other program has none of
    return {name: (float(least), float(most)) for name, least, most in found if name not in ranks}


def test_both_programs_take_the_same_ranges():
    """Every number's range stands in unet_io.h and in unet_io.py, and is the same."""
    program, config = flags_of_the_program(), {}
    for name, field in Config.__dataclass_fields__.items():
        if field.metadata["help"] and field.metadata["high"] is not None:
            config[name] = (field.metadata["low"], field.metadata["high"])
    of_generate = ("interpolate", "strip", "strength", "jump_length", "jump_n_sample")  # which alone has them
    ranges = config | {name: pair for name, pair in unet_io.RANGES.items() if name not in of_generate}
    assert not set(config) & (set(unet_io.RANGES) - {"batch_size"})
    assert {name: tuple(map(float, pair)) for name, pair in ranges.items()} == program
    assert config["batch_size"] == unet_io.RANGES["batch_size"]
    for name, (low, high) in config.items():  # and they count
        kind = Config.__dataclass_fields__[name].type
        for value in (low - 1, high * 1.01 + 1, math.nan):
            value = int(value) if kind is int and value == value else value
            with pytest.raises(UserError, match=name):
                Config(**{name: (value,) if kind in (tuple, unet_io.Rates) else value}).check()


@pytest.mark.parametrize("words, says", [
    (["--lr", "1e-60"], "lr"), (["--lr", "1e-40"], "lr"), (["--beta1", 1], "beta1"),
    (["--beta2", -1], "beta2"), (["--image_size", 2048], "image_size"), (["--max_period", 1], "max_period"),
    (["--batch_size", 65537], "batch_size"), (["--channel_mult", "1,65"], "channel_mult"),
    (["--num_channels", 1024, "--channel_mult", "9"], "8192"), (["--channel_mult", "0.1"], "channel_mult"),
    (["--channel_mult", "0.3,1"], "--channel_mult 0.3 times num_channels 64 is no multiple of 32"),
    (["--num_heads_upsample", 2], "--num_heads_upsample 2 does nothing without num_heads"), (["--log_every", 0], "log_every"),
    (["--image_size", 1024, "--channel_mult", "1", "--norm_groups", 8], "128x128"),
    (["--steps", -1], "steps"), (["--save_every", -1], "save_every"), (["--steps", 10**8], "steps"),
    (["--diffusion_steps", 20], "--diffusion_steps 20 is too few"),
    (["--diffusion_steps", 1], "diffusion_steps")])
def test_flags_out_of_range(words, says):
    sentence = call(train_unet, *words)
    assert says in sentence and "\n" not in sentence, sentence


def test_short_linear_schedules():
    """Betas of T timesteps end at 20 / T (Ho et al. 2020, stretched): 21 is the least T below 1."""
    for T in (2, 10, 20):
        with pytest.raises(UserError, match="21 or more"):
            unet_io.alphas_bar(T, "linear")
        assert 0 < unet_io.alphas_bar(T, "cosine")[-1] < 1
    for T in (21, 22, 50):
        betas = np.linspace(0.1 / T, 20 / T, T)
        error = unet_io.alphas_bar(T, "linear") / np.cumprod(1 - betas) - 1
        assert betas.max() < 1 and np.abs(error).max() < 1e-12
    says = call(train_unet, "--diffusion_steps", 20)
    refused(TRAIN, "--diffusion_steps", 20, "--dry_run", says=says)  # the very same sentence


def test_stored_values_out_of_range(tmp_path):
    """A file whose checksum is right and whose settings are not: refused by the name of the setting."""
    perturbed_file(tmp_path / "good.bin", Config(**TOY))
    stored = unet_io.read_checkpoint(str(tmp_path / "good.bin"))
    stored.run = dict(log_every=50, save_every=1000, eta=0.0, sampler="ddim")
    unet_io.write_checkpoint(tmp_path / "good.bin", stored)
    good = (tmp_path / "good.bin").read_bytes()
    for name, value in (("batch_size", 0), ("batch_size", 70000), ("flip", 2), ("lr", "nan"), ("lr", -1), ("lr", "fast"),
                        ("adam_eps", 0), ("beta1", 1), ("beta2", "inf"), ("adam_eps", -1), ("ema_rate", 1.5),
                        ("min_snr_gamma", -1), ("offset_noise", 11), ("lr_schedule", "step"), ("diffusion_steps", 20),
                        ("zero_terminal_snr", 5), ("log_every", 0), ("save_every", -1), ("eta", 2), ("sampler", "plms")):
        path = tmp_path / f"{name}.bin"
        path.write_bytes(good)
        write_setting(path, name, value)
        with pytest.raises(UserError, match=f"{path.name}.*{name}"):
            unet_io.read_checkpoint(str(path))
    write_setting(path, "sampler", "ddpm")  # the checksum was right
    unet_io.read_checkpoint(str(path))


def test_fractions_of_num_channels(tmp_path, images8):
    """A channel_mult that is no whole number is stored as the shortest text of its float32, in both programs."""
    config = Config(**TOY | dict(num_channels=96, channel_mult=(2, 1 / 3), num_head_channels=32))
    perturbed_file(tmp_path / "w.bin", config)
    run(TRAIN, *flags_of(config), "--model_weights", tmp_path / "w.bin", "--data_file", images8, "--steps", 1,
        "--out_dir", tmp_path / "run", *QUICK)
    path = checkpoint_in(tmp_path / "run", 1)
    for name in (tmp_path / "w.bin", path):
        assert b"\nchannel_mult = 2,0.33333334\n" in name.read_bytes()
    assert effective("--resume", tmp_path / "run")["channel_mult"] == "2,0.33333334"
    assert "channel_mult = 2,0.33333334\n" in (tmp_path / "run/config.txt").read_text()
    found = unet_io.read_checkpoint(str(path))
    assert found.config.channel_mult == (2, 0.33333334) and found.config.level_widths() == [192, 32]
    unet_io.write_checkpoint(tmp_path / "again.bin", found)
    assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()
    model, _ = train_unet.load_model(str(path))
    torch.save(model.state_dict(), tmp_path / "bare.pt")  # as guided-diffusion's, told by flags
    words = flags_of(found.config)
    words = [word for flag, value in zip(words[::2], words[1::2]) for word in (flag, value)
             if flag[2:] in train_unet.ARCHITECTURE]
    assert call(generate, "--import", tmp_path / "bare.pt", *words) == ""
    bare = unet_io.read_checkpoint(str(tmp_path / "bare.bin"))
    assert same_bits(bare.sections["weights"], found.sections["ema"])
    good = path.read_bytes()
    for value in (0.25, 0.1, 65, -0.0, -1 / 3, math.nan, math.inf, -1, ""):
        path.write_bytes(good)
        write_setting(path, "channel_mult", f"2,{value}")
        with pytest.raises(UserError, match=f"{path.name}.*channel_mult"):
            unet_io.read_checkpoint(str(path))
        refused(TRAIN, "--model_weights", path, "--generate", "--num_samples", 1, says=[path.name, "channel_mult"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2.0])
def test_old_images_that_are_no_pictures(tmp_path, bad):
    """Old float images with a pixel that is NaN, infinite or outside [-1, 1]: refused by both programs."""
    pixels = np.zeros((4, 3, 4, 4), "<f4")
    unet_io.write_old_images(tmp_path / "x.bin", pixels)
    assert len(unet_io.read_images(str(tmp_path / "x.bin"))) == 4
    pixels[2, 1, 3, 0] = bad
    unet_io.write_old_images(tmp_path / "x.bin", pixels)
    with pytest.raises(UserError, match="x.bin is damaged: it holds a pixel of"):
        unet_io.read_images(str(tmp_path / "x.bin"))
    refused(TRAIN, *flags_of(Config(**SMALL)), "--data_file", tmp_path / "x.bin",
            "--out_dir", tmp_path / "run", says=["x.bin is damaged: it holds a pixel of"])


# ----------------------------------------------------------------------------------------------------
# the earlier trainer's flags

def test_flags_of_the_earlier_trainer(tmp_path, capsys):
    """--iterations, --log_interval, --save_interval, --output_filename are taken, the others named."""
    _, _, values = train_unet.parse_flags("--iterations 7 --log_interval 3 --save_interval 5".split())
    assert (values.steps, values.log_every, values.save_every) == (7, 3, 5)
    for word, says in (("--log_dir", "--out_dir"), ("--model_dir=x", "--out_dir"),
                       ("--resume_checkpoint", "--resume PLACE")):
        with pytest.raises(SystemExit, match="2"):
            train_unet.parse_flags([word])
        sentence = capsys.readouterr().err
        assert word.split("=")[0] in sentence and says in sentence and sentence.count("\n") == 1
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    assert call(generate, "--model_weights", tmp_path / "w.bin", "--num_samples", 1, "--sample_steps", 1,
                "--device", "cpu", "--output_filename", tmp_path / "sample.jpg") == ""
    assert (tmp_path / "sample.jpg").exists()


@pytest.fixture
def train(monkeypatch, capsys, images8):
    """train(*flags): runs train_unet.py here, on the toy images; (lines of its output, of its errors)."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own

    def run_here(*flags):
        assert call(train_unet, "--data_file", images8, "--device", "cpu", *flags) == ""
        said = capsys.readouterr()
        return said.out.splitlines(), said.err.splitlines()
    return run_here


def test_unet_init_in_the_folder(tmp_path, monkeypatch, train):
    """unet_init.bin was the earlier trainer's start: that it is not this run's is said in a line."""
    monkeypatch.chdir(tmp_path)
    perturbed_file("unet_init.bin", Config(**TOY))
    words = [*flags_of(Config(**TOY)), "--steps", 0, "--out_dir"]
    out, _ = train(*words, "a")
    assert sum(line.startswith("note: unet_init.bin lies here and is not read") for line in out) == 1
    assert any("nothing is trained" in line for line in out)
    first = unet_io.read_checkpoint("a/checkpoint_00000000.bin").sections["weights"]
    out, _ = train(*words, "b", "--model_weights", "unet_init.bin")
    assert not any("unet_init.bin" in line for line in out)
    second, theirs = (unet_io.read_checkpoint(path).sections["weights"]
                      for path in ("b/checkpoint_00000000.bin", "unet_init.bin"))
    assert same_bits(second, theirs) and not same_bits(first, theirs)
    torch.save(toy_model().state_dict(), "bare.pt")  # of which the flags tell the architecture
    train(*words, "c", "--model_weights", "bare.pt")
    assert unet_io.read_checkpoint("c/checkpoint_00000000.bin").config.num_head_channels == 16
    # and a file is not written over by what comes from it
    assert "the weights come from" in call(train_unet, "--init_model_only", 1, "--model_weights",
                                           "unet_init.bin")
    assert same_bits(unet_io.read_checkpoint("unet_init.bin").sections["weights"], theirs)


# ----------------------------------------------------------------------------------------------------
# what is printed and written

def test_metrics_are_json(tmp_path):
    """No NaN and no infinity in metrics.jsonl; a line begins afresh; a full disk is said once."""
    metrics = train_unet.Metrics(str(tmp_path / "metrics.jsonl"), 0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')  # cut short by what stopped the run before
    metrics.note(step=2, loss=math.nan, smoothed=-math.inf, ms=1.5)
    metrics.note(step=3, val_loss=0.25)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[1:] == [
        '{"step": 2, "loss": null, "smoothed": null, "ms": 1.5}', '{"step": 3, "val_loss": 0.25}']


def test_run_on_a_full_disk(tmp_path, train):
    """metrics.jsonl and a grid that can't be written are said in a line each; the run goes on to its end."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").symlink_to("/dev/full")
    (folder / "samples_00000002.png").mkdir()
    _, errors = train(*flags_of(Config(**TOY)), "--steps", 2, "--log_every", 1, "--sample_every", 2,
                      "--out_dir", folder)
    assert len(errors) == 2 and "metrics.jsonl" in errors[0] and "samples_00000002.png" in errors[1], errors
    assert (folder / "checkpoint_00000002.bin").exists()


def test_nan_run(tmp_path, images8, train):
    """A run whose gradients are never finite: JSON all the same, and no step is taken for a number."""
    large = [np.full(p.shape, 1e30, np.float32) for p in train_unet.UNet(Config(**TOY)).parameters()]
    unet_io.write_checkpoint(tmp_path / "large.bin", Checkpoint(Config(**TOY), {"weights": large}))
    train("--model_weights", tmp_path / "large.bin", "--batch_size", 2, "--steps", 2, "--log_every", 1,
          "--val_file", images8, "--sample_every", 0, "--out_dir", tmp_path / "run")

    def no_number(word):
        raise AssertionError(f"{word} is no JSON")
    lines = [json.loads(line, parse_constant=no_number)
             for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == [None, None]
    assert lines[-1] == dict(step=2, val_loss=None)


def test_nan_is_not_saved(images8):
    """Weights that became NaN end in a sentence, not in a checkpoint."""
    trainer = train_unet.Trainer(train_unet.UNet(Config(**TOY)), unet_io.read_images(images8), Config(**TOY))
    assert trainer.checkpoint().step == 0
    trainer.emas[0][3].flatten()[1] = math.nan
    with pytest.raises(UserError, match="ema became NaN"):
        trainer.checkpoint()


def test_standard_output_is_full():
    """Output that can't be written: status 1 and a sentence, no traceback; a closed one harms nothing."""
    for name in ("generate.py", "prepare_data.py"):
        with open("/dev/full", "w") as full:
            result = subprocess.run([PYTHON, ROOT / name, "--help"], stdout=full, stderr=subprocess.PIPE,
                                    text=True)
        assert result.returncode == 1 and result.stderr == "error: standard output: No space left on device\n"
    assert run("sh", "-c", f"'{PYTHON}' '{ROOT}/prepare_data.py' --help >&-").stderr == ""


def test_out_of_memory():
    """Whoever says that memory doesn't suffice: a sentence and status 1; our mistakes keep a traceback."""
    code = """import numpy, sys, torch, unet_io
for act in (lambda: bytearray(2**62), lambda: numpy.empty(2**58), lambda: torch.empty(2**50)):
    try:
        unet_io.run_script(act)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
unet_io.run_script(lambda: 1 / 0)"""
    lines = run(PYTHON, "-c", code, status=1, cwd=ROOT).stderr.splitlines()
    assert all(line.startswith("error: this takes more memory than there is") for line in lines[0:6:2]), lines
    assert lines[1:6:2] == ["1"] * 3 and "Traceback" in lines[6] and "ZeroDivisionError" in lines[-1]


@pytest.mark.parametrize("words, says", [
    (["--num_samples", 0], "--num_samples"), (["--num_samples", 10**12], "--num_samples"),
    (["--batch_size", 0], "--batch_size"), (["--batch_size", 10**9], "--batch_size"),
    (["--seeds", "1,2", "--interpolate", 10**9], "--interpolate"), (["--strip", 10**6], "--strip"),
    (["--sample_steps", -1], "--sample_steps"), (["--eta", "nan"], "--eta")])
def test_counts_of_pictures(tmp_path, words, says):
    """Counts are checked before anything is read or allocated."""
    sentence = call(generate, "--model_weights", tmp_path / "none.bin", *words)
    assert says in sentence and "none.bin" not in sentence and "\n" not in sentence, sentence


def test_more_pictures_than_memory(tmp_path, monkeypatch):
    """What a run will certainly need is refused at its start."""
    perturbed_file(tmp_path / "w.bin", Config(**TOY))
    monkeypatch.setattr(os, "sysconf", lambda name: 1000)  # a megabyte
    monkeypatch.setattr(generate, "sample", None)
    sentence = call(generate, "--model_weights", tmp_path / "w.bin", "--num_samples", 10**4,
                    "--device", "cpu", "--output_name", tmp_path / "x.png")
    assert "10000 pictures of 8x8 need" in sentence
