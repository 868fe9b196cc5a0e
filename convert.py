"""Weights in other formats than a .bin of ours: what generate.py --import and --export read and write.

train_unet.load_model calls this for what is no .bin. Everything becomes a unet_io.Checkpoint, whose configuration
tells the whole network, or is refused with a UserError; nothing that a file holds is ever run.
"""
import contextlib
import dataclasses
import json
import math
import os
import pickle
import sys
import warnings

import unet_io  # first, because it explains a missing package

import numpy as np
import torch
from torch import nn

from train_unet import (DIFFUSION, AttentionBlock, Downsample, ResBlock, Upsample, file_order, first_line,
                        timestep_embedding, to_numpy, unet_without_memory, with_old_attention)
from unet_io import Checkpoint, Config, UserError


def read_pt(path, overrides):
    """Checkpoint from save_weights' .pt, or from a bare state dict. overrides: see load_model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} can't be read: no such file") from None
    except pickle.UnpicklingError:
        raise UserError(f"{path} is no plain state dict: for safety only tensors are loaded from a"
                        f" .pt") from None
    except Exception as error:
        raise UserError(f"{path} can't be loaded as a PyTorch file: {first_line(error)}") from None
    if isinstance(state, dict) and isinstance(state.get("config"), dict):
        return _from_state(path, state.get("state_dict"), state["config"], state.get("step", 0),
                           state.get("class_names", ()))
    for key in ("state_dict", "model"):
        state = state[key] if isinstance(state, dict) and isinstance(state.get(key), dict) else state
    return _read_bare(path, state, overrides)


# The names of the layers in the state dicts of the trainer before this one, and guided-diffusion's.
OLD_NAMES = {"gn1": "in_layers.0", "cv3_1": "in_layers.2", "l_emb": "emb_layers.1", "gn2": "out_layers.0",
             "cv3_2": "out_layers.3", "gn": "norm", "proj": "proj_out"}


def _read_bare(path, state, overrides):
    """Checkpoint from a state dict that comes without its configuration.

    The names tell whose it is. guided-diffusion's and UNet's have max_period 10000. The trainer before this
    one had 1000, and other names (see OLD_NAMES); a dict with neither is taken for one of its, by the order
    of the parameters. The width is read from the first tensor. What else no shape tells is as in Config, or
    as overrides say, and what was assumed is printed on stderr.
    """
    _check_tensors(path, state)
    count = len(state)
    state = {name.removeprefix("_orig_mod."): value for name, value in state.items()}  # torch.compile's
    guided = any(".in_layers." in name for name in state)
    overrides = dict(conv_resample=any(".op." in name for name in state)) | overrides
    first = next(iter(state.values())).shape  # time_embed.0.weight: (4 num_channels, num_channels)
    config = Config(num_channels=first[-1] if len(first) == 2 else 0, max_period=10000 if guided else 1000)
    if "label_emb.weight" in state:
        rows = len(state["label_emb.weight"]) - (overrides.get("cond_drop_prob", 0) > 0)
        overrides = dict(class_cond=True, num_classes=rows) | overrides
    config = dataclasses.replace(config, **overrides) if guided else with_old_attention(config, overrides)
    model = unet_without_memory(config.check("" if overrides else path), path)
    expected = _shapes(model)
    names = [".".join(OLD_NAMES.get(part, part) for part in name.split(".")) for name in state]
    if not any(".in_layers." in name for name in names):
        names = [*expected, *names[len(expected):]]
    named = {name: _without_ones(value, expected.get(name)) for name, value in zip(names, state.values())}
    if len(named) < count:
        raise UserError(f"{path} holds two tensors of one name")
    weights = _flat_weights(path, named, model, "the model that it is taken for; say what it is with --preset"
                            " or --image_size, --num_channels, --channel_mult, --attention_resolutions ...")
    untold = ["image_size", "num_head_channels", "norm_groups", "max_period", *DIFFUSION[:3]]
    untold += ["use_new_attention_order"] if guided else []
    assumed = [f"{name} {getattr(config, name)}" for name in untold
               if name not in overrides and not (name == "num_head_channels" and config.num_heads)]
    if assumed:
        print(f"{unet_io.printable(path)} doesn't tell all that it is, and is taken for a model of"
              f" {', '.join(assumed)}; flags of these names say otherwise", file=sys.stderr)
    return Checkpoint(config, {"weights": weights}, tensors=len(expected), old=True)


def _without_ones(value, shape):
    """The tensor in this shape where the two differ in dimensions of 1 alone; otherwise as it is."""
    same = shape and [d for d in shape if d != 1] == [d for d in value.shape if d != 1]
    return value.reshape(shape) if same else value


def _shapes(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _check_tensors(path, state):
    """Raise UserError unless it is a dict, not empty, of names and plain tensors that are really there."""
    if not isinstance(state, dict) or not state:
        raise UserError(f"{path} holds no state dict of tensors")
    held = {}  # bytes of each storage, which tensors may share
    for name, value in state.items():
        if not isinstance(name, str) or not torch.is_tensor(value):
            kind = "tensor" if torch.is_tensor(value) else type(value).__name__
            raise UserError(f"{path} holds no state dict of tensors: {name!r} names a {kind}")
        if value.layout != torch.strided or value.is_meta or not value.is_floating_point():
            raise UserError(f"{path}: {name} is a tensor of {value.dtype} and {value.layout} on"
                            f" {value.device}; plain floating-point numbers are needed")
        held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    claimed = sum(value.numel() * value.element_size() for value in state.values())
    if claimed > sum(held.values()):
        raise UserError(f"{path} is damaged: its tensors claim {claimed} bytes and it holds"
                        f" {sum(held.values())}")


def _flat_weights(path, state, model, where):
    """A dict's tensors, which must fit the model, as one float32 array in the order of a .bin."""
    found, expected = {name: tuple(value.shape) for name, value in state.items()}, _shapes(model)
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            raise UserError(f"{path}: {name} is {found.get(name, 'missing')} there and"
                            f" {expected.get(name, 'no parameter')} in {where}")
    tensors = file_order(model, [state[name] for name in expected])
    return np.concatenate([array.reshape(-1) for array in to_numpy(tensors)])


def read_safetensors(path):
    """Checkpoint from save_weights' .safetensors."""
    safetensors = _need_safetensors(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or 'no such file'}") from None
    except Exception as error:
        raise UserError(f"{path} is damaged or no safetensors file: {first_line(error)}") from None
    if "config" not in metadata:
        raise UserError(f"{path} does not tell the configuration of its model: only files that python"
                        f" generate.py --export wrote can be read")
    try:
        config, step = json.loads(metadata["config"]), int(metadata.get("step", 0))
        names = json.loads(metadata.get("class_names", "[]"))
    except (ValueError, RecursionError):
        config = step = names = None
    return _from_state(path, state, config, step, names)


def _need_safetensors(path):
    try:
        import safetensors.torch
    except ImportError:
        raise UserError(f"{path} needs the package safetensors: pip install safetensors") from None
    return safetensors


def _from_state(path, state, config, step, class_names=()):
    """Checkpoint from tensors by PyTorch's names, a dict with the configuration's fields, and a list."""
    known = {field.name: field.type for field in dataclasses.fields(Config)}
    if not isinstance(config, dict) or not unet_io.is_number(step, int) or not 0 <= step < 2**31:
        raise UserError(f"{path} is damaged: its configuration or its step, {step!r:.40}, can't be read")
    for name in config:
        if name not in known:
            raise UserError(f"{path} has the setting {name}, which this program doesn't know")
    try:
        values = {name: known[name](value) if known[name] in (tuple, unet_io.Rates) else value
                  for name, value in config.items()}
    except (TypeError, ValueError):
        raise UserError(f"{path} is damaged: its configuration can't be read") from None
    config = Config(**values).check(f"{path}: its configuration")
    if not isinstance(class_names, (list, tuple)) or not all(isinstance(name, str) and "\n" not in name
                                                             for name in class_names):
        raise UserError(f"{path} is damaged: its names of classes are no list of texts of a line each")
    names = unet_io.class_section(class_names)
    unet_io.parse_class_names(names.get("class_names", "").encode("utf-8", "surrogatepass"), path, len(class_names),
                              config.num_classes if config.class_cond else 0)
    _check_tensors(path, state)
    model = unet_without_memory(config, path)
    weights = _flat_weights(path, state, model, "the model of its configuration")
    return Checkpoint(config, {"weights": weights} | names, step=step, tensors=len(state))


def save_weights(path, model, checkpoint):
    """Write a model's weights alone, with the configuration and step of the checkpoint they came from.

    By the ending of `path`: .bin, for ./train_unet; .pt, a dict of "state_dict", "config" and "step" that
    torch.load reads with weights_only=True; .safetensors, with "config" (JSON) and "step" in its metadata.
    Where they are known the names of the classes go with them, as "class_names": a list, there in JSON.
    """
    config, step, names = dataclasses.asdict(checkpoint.config), checkpoint.step, list(checkpoint.class_names)
    config["ema_rate"] = tuple(config["ema_rate"])  # torch.load takes no class of ours
    state = {name: p.detach().float().cpu().contiguous() for name, p in model.named_parameters()}
    if path.endswith(".bin"):
        weights = dict(weights=to_numpy(file_order(model, state.values()))) | unet_io.class_section(names)
        unet_io.write_checkpoint(path, Checkpoint(checkpoint.config, weights, step, run=checkpoint.run))
    elif path.endswith((".pt", ".pth")):
        with unet_io.replacing(path) as file:
            told = dict(class_names=names) if names else {}
            torch.save(dict(state_dict=state, config=config, step=step) | told, file)
    elif path.endswith(".safetensors"):
        metadata = dict(format="pt", config=json.dumps(config), step=str(step))
        metadata |= dict(class_names=json.dumps(names)) if names else {}
        block = _need_safetensors(path).torch.save(state, metadata)
        with unet_io.replacing(path) as file:
            file.write(block)
    else:
        raise UserError(f"{path} must end in .bin, .pt or .safetensors, which says how weights are written,"
                        f" or in / for a folder that diffusers opens")


# What the layers within a residual or an attention block are called in diffusers' UNet2DModel.
DIFFUSERS_NAMES = {"in_layers.0": "norm1", "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj",
                   "out_layers.0": "norm2", "out_layers.3": "conv2", "skip_connection": "conv_shortcut",
                   "norm": "group_norm", "proj_out": "to_out.0", "op": "conv", "conv": "conv"}
# It resamples with 3x3 convolutions as with conv_resample, or as with resblock_updown. With these weights, in
# each channel alone, the first such convolution is the mean of 2x2 pixels and the second changes nothing.
MEAN_KERNEL = ((0, 0, 0), (0, 0.25, 0.25), (0, 0.25, 0.25))
SAME_KERNEL = ((0, 0, 0), (0, 1, 0), (0, 0, 0))


def _diffusers_places(model):
    """(name in UNet2DModel, module of a UNet): each block, each resampling, each layer outside of these."""
    yield "time_embedding.linear_1", model.time_embed[0]
    yield "time_embedding.linear_2", model.time_embed[2]
    if model.config.class_cond:
        yield "class_embedding", model.label_emb
    yield "conv_in", model.input_blocks[0][0]
    yield "mid_block.resnets.0", model.middle_block[0]
    yield "mid_block.attentions.0", model.middle_block[1]
    yield "mid_block.resnets.1", model.middle_block[2]
    yield "conv_norm_out", model.out[0]
    yield "conv_out", model.out[2]
    kinds = {nn.Identity: "resnets.{}", AttentionBlock: "attentions.{}", Downsample: "downsamplers.0",
             Upsample: "upsamplers.0"}  # which may be what a ResBlock resamples by
    per_level = model.config.num_res_blocks + 1  # blocks; on the way down the last of them is the pooling
    for part, blocks in (("down_blocks", model.input_blocks[1:]), ("up_blocks", model.output_blocks)):
        for i, block in enumerate(blocks):
            level, place = divmod(i, per_level)
            for layer in block:
                kind = type(getattr(layer, "resample", layer))
                yield f"{part}.{level}.{kinds[kind].format(place)}", layer


def diffusers_tensors(model):
    """The weights of a UNet2DModel that computes what this UNet does: {name: tensor}.

    Its timestep embedding is as wide as the first level, k = channel_mult[0] times ours, and holds ours in
    every k-th column; the others get the weight 0. Where it can't be computed there, it is in a table.
    """
    config, tensors = model.config, {}
    ordered = dict(zip(model.parameters(), file_order(model, model.parameters())))
    for name, layer in _diffusers_places(model):
        if isinstance(layer, ResBlock):
            channels = layer.out_layers[0].num_channels
        elif isinstance(layer, (Downsample, Upsample)) and not config.conv_resample:
            kernel = torch.tensor(MEAN_KERNEL if isinstance(layer, Downsample) else SAME_KERNEL)
            tensors[f"{name}.conv.weight"] = torch.eye(channels)[:, :, None, None] * kernel
            tensors[f"{name}.conv.bias"] = torch.zeros(channels)
        for path, value in layer.named_parameters():
            inner, _, kind = path.rpartition(".")
            value = ordered[value].detach().float().cpu()
            if isinstance(layer, AttentionBlock) and inner != "norm" and kind == "weight":
                value = value.squeeze(-1)  # a linear layer there
            if inner == "qkv":
                for part, third in zip("qkv", value.chunk(3)):
                    tensors[f"{name}.to_{part}.{kind}"] = third.clone()
            else:
                tensors[f"{name}.{DIFFUSERS_NAMES[inner]}.{kind}" if inner else f"{name}.{kind}"] = value

    def widened(columns):
        wide = torch.zeros(len(columns), config.level_widths()[0])
        wide[:, ::int(config.channel_mult[0])] = columns
        return wide

    tensors["time_embedding.linear_1.weight"] = widened(tensors["time_embedding.linear_1.weight"])
    if _needs_table(config):
        tensors["time_proj.weight"] = widened(timestep_embedding(
            torch.arange(config.diffusion_steps), config.num_channels, config.max_period,
            config.timestep_unit()))
    return tensors


def _needs_table(config):
    """Whether UNet2DModel's sinusoids of a timestep would be others than ours."""
    return config.max_period != 10000 or config.timestep_unit() != 1


def diffusers_configs(config):
    """The JSON files in a folder for diffusers' DDPMPipeline: {path: dict}, model_index.json first.

    Raises UserError for what UNet2DModel can't be.
    """
    T, attended = config.diffusion_steps, [s in config.attention_resolutions for s in config.level_sizes()]
    widths = config.level_widths()
    if widths[0] % config.num_channels:
        raise UserError(f"diffusers' UNet2DModel tells the timestep by as many sinusoids as its first level has"
                        f" channels, here {widths[0]}, and this model's {config.num_channels} don't fit: its"
                        f" channel_mult would have to begin with a whole number")
    heads = {width // config.heads(width, decoder) for width, here in zip(widths, attended) if here
             for decoder in (False, True)} | {widths[-1] // config.heads(widths[-1], False)}
    if len(heads) > 1:
        raise UserError(f"diffusers' UNet2DModel has heads of one number of channels, and by num_heads this"
                        f" model has some of {' and some of '.join(map(str, sorted(heads)))}")
    resampling, down, up = (("resnet", "ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D")
                            if config.resblock_updown else ("conv", "DownBlock2D", "UpBlock2D"))
    learned = dict(time_embedding_type="learned", num_train_timesteps=T)  # a table: see diffusers_tensors
    index = dict(_class_name="DDPMPipeline", unet=("diffusers", "UNet2DModel"),
                 scheduler=("diffusers", "DDPMScheduler"))
    unet = dict(
        _class_name="UNet2DModel", sample_size=config.image_size, in_channels=config.in_channels,
        out_channels=config.in_channels * (1 + config.learn_sigma), freq_shift=0, flip_sin_to_cos=True,
        time_embedding_dim=4 * config.num_channels, block_out_channels=widths, downsample_type=resampling,
        upsample_type=resampling, layers_per_block=config.num_res_blocks, attention_head_dim=heads.pop(),
        down_block_types=["AttnDownBlock2D" if here else down for here in attended],
        up_block_types=["AttnUpBlock2D" if here else up for here in reversed(attended)],
        norm_num_groups=config.norm_groups, attn_norm_num_groups=config.norm_groups, norm_eps=1e-5,
        act_fn="silu", downsample_padding=1, dropout=config.dropout,
        resnet_time_scale_shift="scale_shift" if config.use_scale_shift_norm else "default",
        num_class_embeds=config.label_rows() or None, **learned if _needs_table(config) else {})
    scheduler = dict(
        _class_name="DDPMScheduler", num_train_timesteps=T, beta_start=1e-4 * 1000 / T,
        beta_end=0.02 * 1000 / T, rescale_betas_zero_snr=bool(config.zero_terminal_snr),
        beta_schedule={"linear": "linear", "cosine": "squaredcos_cap_v2"}[config.noise_schedule],
        prediction_type={"eps": "epsilon", "v": "v_prediction", "x0": "sample"}[config.predict],
        clip_sample=True, clip_sample_range=1.0, timestep_spacing="linspace",
        variance_type="learned_range" if config.learn_sigma else "fixed_small")
    files = {"model_index.json": index, "scheduler/scheduler_config.json": scheduler,
             "unet/config.json": unet}
    # the first version that has time_embedding_dim
    return {name: values | dict(_diffusers_version="0.32.0") for name, values in files.items()}


def save_diffusers(folder, model):
    """Write a folder that diffusers' DDPMPipeline.from_pretrained opens, and UNet2DModel's with its unet/.

    All are written before the first gets its name; then those of an older export go, and these get theirs,
    the weights first and model_index.json last: so a folder that lacks none is whole, and of one model.
    """
    files = {os.path.join(folder, name): (json.dumps(values, indent=2) + "\n").encode()
             for name, values in diffusers_configs(model.config).items()}
    weights = _need_safetensors(folder).torch.save(diffusers_tensors(model), dict(format="pt"))
    files[os.path.join(folder, "unet/diffusion_pytorch_model.safetensors")] = weights
    for part in map(os.path.dirname, files):
        unet_io.check_folder(part)
    for part in map(os.path.dirname, files):
        os.makedirs(part, exist_ok=True)
    with contextlib.ExitStack() as stack:  # which renames the last file first
        for path, content in files.items():
            file = stack.enter_context(unet_io.replacing(path))
            file.write(content)
            file.flush()
        for path in filter(os.path.exists, files):
            os.remove(path)
