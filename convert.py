"""Weights in other formats than a .bin of ours: what generate.py --import and --export read and write.

1. files                  what_it_is, read_tensors
2. which of its weights   take_weights, take_network
3. files of ours          save_weights
4. bare state dicts       guided-diffusion's names, without a configuration
5. diffusers              read_diffusers, save_diffusers

train_unet.load_model calls `read` for what is no .bin. Everything becomes a unet_io.Checkpoint whose configuration
tells the whole network, or is refused with a UserError. What a file doesn't tell, and what of it was taken, is said
on stderr. Nothing that a file holds is ever run.
"""
import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import pickle
import re
import sys
import warnings

import unet_io  # first, because it explains a missing package

import numpy as np
import torch
from torch import nn

from train_unet import (DIFFUSION, AttentionBlock, Downsample, ResBlock, Upsample, file_order, first_line,
                        refuse_contradictions, timestep_embedding, to_numpy, unet_without_memory,
                        with_old_attention)
from unet_io import Checkpoint, Config, UserError


def read(path, overrides=None, use_ema=1, free=()):
    """Checkpoint from a .pt, .safetensors or page of ours, a bare state dict, or a UNet2DModel of diffusers.

    Its section `weights` is what use_ema asks for, averaged weights where there are any or with 0 the raw ones;
    `ema` is the same where they are known to be averaged. overrides, free: see train_unet.load_model.
    """
    overrides = dict(overrides or {})
    if os.path.isdir(path):
        return read_diffusers(path, overrides, use_ema, free)
    if what_it_is(path) == "page":
        return unet_io.import_from_dev("web/page").read_page(path)
    loaded, metadata = read_tensors(path)
    if "config" in metadata:
        return _from_safetensors(path, loaded, metadata)
    if isinstance(loaded, dict) and isinstance(loaded.get("config"), dict) and "state_dict" in loaded:
        return _from_state(path, loaded["state_dict"], loaded["config"], loaded.get("step", 0),
                           loaded.get("class_names", ()))
    state, averaged = take_network(path, loaded, use_ema)
    if any(name.startswith("down_blocks.") for name in state):
        return read_diffusers(path, overrides, use_ema, free, (state, averaged))
    return _read_bare(path, state, averaged, overrides)


def note(path, text):
    """Say a line about a file, on stderr."""
    print(unet_io.printable(f"{path} {text}"), file=sys.stderr)


# ----------------------------------------------------------------------------------------------------
# 1. files

POINTER = b"version https://git-lfs"


def pointer_alone(path):
    return UserError(f"{path} is not the file itself but Git LFS's pointer to it: git lfs pull brings the file")


def what_it_is(path):
    """What a file is: "bin", "torch", "safetensors", "page" (of --export_page), "index" (of parts), "folder".

    Its content decides, whatever its name is; only where that tells nothing does its ending. Raises UserError for what
    can be none of these.
    """
    if os.path.isdir(path):
        return "folder"
    try:
        with open(path, "rb") as file:
            begins = file.read(64)
    except OSError as error:
        raise UserError(f"{path} can't be read: {(error.strerror or 'no such file').lower()}") from None
    if not begins:
        raise UserError(f"{path} is empty")
    if begins.startswith(POINTER):
        raise pointer_alone(path)
    if begins[:4] in (b"UNET", b"DiT\0", unet_io.OLD_WEIGHTS_MAGIC.to_bytes(4, "little")):
        return "bin"
    if begins[4:9] == bytes(4) + b"{":  # a length of 8 bytes, then JSON
        return "safetensors"
    if begins.startswith((b"PK\3\4", b"\x80")):  # a zip, or a pickle of protocol 2 or later
        return "torch"
    if begins.startswith(b"<!doctype html>"):
        return "page"
    if path.endswith(".index.json"):
        return "index"
    if path.endswith(".safetensors"):
        return "safetensors"
    if path.endswith((".pt", ".pth", ".ckpt")):
        return "torch"
    return "bin"


def tells_all(path):
    """Whether a file of weights tells its whole configuration, so that flags can only contradict it."""
    kind = what_it_is(path)
    if kind == "safetensors":
        return "config" in _read_safetensors(path, tensors=False)[1]
    return kind in ("bin", "page")


def is_export(path):
    """Whether save_weights wrote a file, so that another call may replace it."""
    if path.endswith(".bin"):
        return unet_io.what_it_holds(path) == "weights"
    try:
        if path.endswith((".pt", ".pth")):
            told = read_tensors(path)[0]
            return isinstance(told, dict) and {"state_dict", "config", "step"} <= told.keys()
        return tells_all(path)
    except UserError:
        return False


def read_tensors(path):
    """(what a file of PyTorch or safetensors holds, its metadata): usually a dict of tensors by name."""
    kind = what_it_is(path)
    if kind == "safetensors":
        return _read_safetensors(path)
    if kind == "folder":
        raise UserError(f"{path} is a folder, a file is needed")
    if kind == "index":
        return _read_parts(path), {}
    return _read_torch(path), {}


def _read_torch(path):
    # Checkpoints also hold the results of argparse and NumPy's numbers, which are harmless.
    make_number = np.float64(0).__reduce__()[0]
    number_types = [type(np.dtype(name)) for name in ("f8", "f4", "i8")]
    torch.serialization.add_safe_globals([argparse.Namespace, np.dtype, *number_types, make_number])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} can't be read: no such file") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it holds a {named[1]}" if named else "it is damaged, or holds something else"
        raise UserError(f"{path} is no plain state dict: {what}, and for safety only tensors are loaded, since"
                        f" anything else may run code; where you trust it, save its state dict alone") from None
    except Exception as error:
        raise UserError(f"{path} can't be loaded as a PyTorch file: {first_line(error)}") from None


def _read_safetensors(path, tensors=True):
    """(tensors by name, metadata); with tensors False the names alone."""
    safetensors = _need_safetensors(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if not tensors:
                return dict.fromkeys(file.keys()), metadata
            return {name: file.get_tensor(name) for name in file.keys()}, metadata
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or 'no such file'}") from None
    except Exception as error:
        raise UserError(f"{path} is damaged or no safetensors file: {first_line(error)}") from None


def _need_safetensors(path):
    try:
        import safetensors.torch
    except ImportError:
        raise UserError(f"{path} needs the package safetensors: pip install safetensors") from None
    return safetensors


def _read_parts(path):
    """All tensors of the files that an index, X.index.json, names."""
    index = _read_json(path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise UserError(f"{path} is no index of files: it has no weight_map")
    state = {}
    for name in sorted(set(index.values())):
        if os.path.basename(name) != name:
            raise UserError(f"{path} names a file in another folder, {name}")
        part, _ = read_tensors(os.path.join(os.path.dirname(path), name))
        state |= {key: value for key, value in part.items() if index.get(key) == name}
    missing = sorted(index.keys() - state.keys())
    if missing:
        raise UserError(f"{path} names {missing[0]}, which {index[missing[0]]} does not hold")
    return state


def _read_json(path):
    """A dict from a file of JSON."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if text.startswith(POINTER.decode()):
            raise pointer_alone(path)
        values = json.loads(text)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: it is no object of JSON")
    return values


# ----------------------------------------------------------------------------------------------------
# 2. which of its weights

# What a name, of which dots and underscores separate the words, has where weights are averaged ...
AVERAGED = {"ema", "averaged", "average", "avg", "swa", "shadow"}
# ... and where something is no weights at all.
NO_WEIGHTS = {"opt", "optim", "optimizer", "optimizers", "scheduler", "sched", "scaler", "callbacks", "loops", "args",
              "hyper", "hparams", "config", "cfg"}
# Where the weights are if a checkpoint has several dicts of tensors that are not averaged.
USUAL = ("state_dict", "model_state_dict", "model", "model_state", "module", "net", "network", "unet", "params",
         "weights")
# First words of names that a wrapper puts before those of the network.
WRAPPERS = ("model.", "diffusion_model.", "network.", "net.", "unet.", "denoiser.")
ANCHORS = ("time_embed.0.weight", "time_embedding.linear_1.weight", "x_embedder.proj.weight")  # of the networks read


def _words(name):
    return set(re.split(r"[._\d]+", str(name).lower()))


def _has_tensors(value):
    return isinstance(value, dict) and any(map(torch.is_tensor, value.values()))


def _states_within(loaded, inside=""):
    """(name, its tensors) of the state dicts and the lists of tensors that lie in a dict, down to the fourth level.

    inside: the name of the dict where it lies in another.
    """
    for key, value in loaded.items():
        if not isinstance(key, str) or _words(key) & NO_WEIGHTS:
            continue
        name = f"{inside}.{key}" if inside else key
        if _has_tensors(value) or _is_list(value):
            yield name, value
        elif isinstance(value, dict) and name.count(".") < 3:
            yield from _states_within(value, name)


def _is_list(value):
    """Whether it is a list of tensors alone, as some averages are kept, in the order of the parameters."""
    return isinstance(value, (list, tuple)) and len(value) > 1 and all(map(torch.is_tensor, value))


def take_weights(path, loaded, use_ema=1):
    """(state dict, whether it is averaged) from what a checkpoint of any trainer holds. Raises UserError.

    Averaged weights are preferred; with use_ema 0 the raw ones are. What was taken is said.
    """
    if not isinstance(loaded, dict):
        return loaded, False
    found = dict(_states_within(loaded))
    if _has_tensors(loaded):
        only_numbers = all(torch.numel(value) == 1 for value in loaded.values() if torch.is_tensor(value))
        if not found or not only_numbers:
            return loaded, False
    averaged = [name for name in found if _words(name) & AVERAGED]
    raw = [name for name in found if name not in averaged and not isinstance(found[name], (list, tuple))]
    raw.sort(key=lambda name: USUAL.index(name) if name in USUAL else len(USUAL))
    if len(raw) > 1 and raw[0] not in USUAL:
        raise UserError(f"{path} holds more than one state dict, {', '.join(raw)}: save one of them alone")
    if not averaged and not raw:
        return {}, False
    is_averaged = bool(averaged and (use_ema or not raw))
    name = averaged[0] if is_averaged else raw[0]
    state = found[name]
    if isinstance(state, (list, tuple)):
        state = _by_order(path, name, state, found[raw[0]] if raw else {})
    if is_averaged or len(averaged) + len(raw) > 1:
        kind = "averaged" if is_averaged else "raw"
        text = f"holds {' and '.join(found)}: the {kind} weights, {name}, are taken"
        if is_averaged and raw:
            text += ", --use_ema 0 takes the raw ones"
        elif is_averaged and not use_ema:
            text += ", for there are no raw ones"
        note(path, text)
    return state, is_averaged


def _by_order(path, name, tensors, like):
    """{name: tensor} of a list of tensors, by the order and the shapes of a state dict's floating-point ones."""
    like = {key: value for key, value in like.items() if torch.is_tensor(value) and value.is_floating_point()}
    if [value.shape for value in like.values()] != [value.shape for value in tensors]:
        raise UserError(f"{path} has in {name} {len(tensors)} tensors without names, which don't fit those of its state"
                        f" dict one by one; --use_ema 0 takes the raw weights")
    return dict(zip(like, tensors))


def take_network(path, loaded, use_ema=1):
    """(tensors by the names that they have in the network, whether they are averaged), of any checkpoint.

    What wrappers put before the names is taken off, and what lies beside the network is left out and said.
    """
    state, averaged = take_weights(path, loaded, use_ema)
    if not isinstance(state, dict) or not state:
        raise UserError(f"{path} holds no state dict of tensors")
    for name, value in state.items():
        if not isinstance(name, str):
            raise UserError(f"{path} holds no state dict of tensors: {name!r} names a {type(value).__name__.lower()}")
    plain = _without_torch_prefixes(path, state)
    prefixes = _network_prefixes(plain)
    if not prefixes:  # names that nobody knows
        prefix = next((word for word in WRAPPERS if all(name.startswith(word) for name in plain)), "")
        return {name.removeprefix(prefix): value for name, value in plain.items()}, averaged
    of_means = [prefix for prefix in prefixes if _words(prefix) & AVERAGED]
    raw = [prefix for prefix in prefixes if prefix not in of_means]
    if max(len(raw), len(of_means)) > 1:
        raise UserError(f"{path} holds more than one network, {', '.join(map(repr, raw or of_means))}: save one of them"
                        f" alone")

    takes_means = of_means and (use_ema or not raw)
    prefix = of_means[0] if takes_means else raw[0]
    longer = tuple(other for other in prefixes if len(other) > len(prefix))
    taken = {name.removeprefix(prefix): value for name, value in plain.items()
             if name.startswith(prefix) and not name.startswith(longer)}

    text = f"the tensors named {prefix}... are taken"
    if of_means:
        averaged = prefix in of_means
        text = f"the {'averaged' if averaged else 'raw'} weights, named {prefix}..., are taken"
    elif use_ema and (means := _flat_names(plain, prefix)):
        taken = means
        averaged = True
        text = "the averaged weights, named model_ema..., are taken, --use_ema 0 takes the raw ones"
    left = len(plain) - len(taken)
    if left:
        other = next((name for name in plain if not name.startswith(prefix)), "")
        text += f", and {unet_io.counted(left, 'other')} such as {other} left out"
    if left or of_means:
        note(path, text)
    return taken, averaged


def _without_torch_prefixes(path, state):
    """The tensors of a state dict without what torch.compile and DistributedDataParallel put into their names."""
    plain = {re.sub(r"(^|\.)(?:(?:_orig_mod|module)\.)+", r"\1", name): value for name, value in state.items()}
    if len(plain) < len(state):
        raise UserError(f"{path} holds two tensors of one name")
    return plain


def _network_prefixes(names):
    """What stands before the names of each network among these, "" where nothing does: a list."""
    prefixes = {}
    for anchor in ANCHORS:
        for name in names:
            if name == anchor or name.endswith("." + anchor):
                prefixes[name.removesuffix(anchor)] = True
    return list(prefixes)


def _flat_names(state, prefix):
    """{name: mean} where a state dict has the means too, otherwise {}.

    As in latent-diffusion's LitEma their names are those of the network's tensors without the dots.
    """
    names = [name for name in state if name.startswith(prefix)]
    flat = {name: "model_ema." + name.removeprefix("model.").replace(".", "") for name in names}
    if not all(mean in state for mean in flat.values()):
        return {}
    return {name.removeprefix(prefix): state[mean] for name, mean in flat.items()}


# ----------------------------------------------------------------------------------------------------
# 3. files of ours

def _from_safetensors(path, state, metadata):
    """Checkpoint from save_weights' .safetensors."""
    try:
        config = json.loads(metadata["config"])
        step = int(metadata.get("step", 0))
        names = json.loads(metadata.get("class_names", "[]"))
    except (ValueError, RecursionError):
        config = step = names = None
    return _from_state(path, state, config, step, names)


def _from_state(path, state, config, step, class_names):
    """Checkpoint from tensors by PyTorch's names, a dict with the configuration's fields, and a list."""
    known = {field.name: field.type for field in dataclasses.fields(Config)}
    if not isinstance(config, dict) or not unet_io.is_number(step, int) or not 0 <= step < 2**31:
        raise UserError(f"{path} is damaged: its configuration or its step, {step!r:.40}, can't be read")
    for name in config:
        if name not in known:
            raise UserError(f"{path} has the setting {name}, which this program doesn't know")
    values = dict(config)
    try:
        for name, value in config.items():
            if known[name] in (tuple, unet_io.Rates):
                values[name] = known[name](value)
    except (TypeError, ValueError):
        raise UserError(f"{path} is damaged: its configuration can't be read") from None
    config = Config(**values).check(f"{path}: its configuration")
    names = _named(path, class_names, config)
    check_tensors(path, state)
    model = unet_without_memory(config, path)
    weights = _flat_weights(path, state, model, "the model of its configuration")
    return Checkpoint(config, {"weights": weights} | names, step=step, tensors=len(state))


def _named(path, names, config):
    """The section class_names of a list of names; {} without any. Raises UserError where this model can't have them."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and "\n" not in name for name in names):
        raise UserError(f"{path} is damaged: its names of classes are no list of texts of a line each")
    section = unet_io.class_section(names)
    unet_io.parse_class_names(section.get("class_names", "").encode("utf-8", "surrogatepass"), path, len(names),
                              config.num_classes if config.class_cond else 0)
    return section


def check_tensors(path, state):
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


def _shapes(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _flat_weights(path, state, model, where, hint=None):
    """A dict's tensors, which must fit the model, as one float32 array in the order of a .bin.

    where: what the model is called in an error. hint: a function that says more of a tensor that doesn't fit, from
    its name and its shape here and there.
    """
    found = {name: tuple(value.shape) for name, value in state.items()}
    expected = _shapes(model)
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            more = hint(name, found.get(name), expected.get(name)) if hint else ""
            raise UserError(f"{path}: {name} is {found.get(name, 'missing')} there and"
                            f" {expected.get(name, 'no parameter')} in {where}{more}")
    tensors = file_order(model, [state[name] for name in expected])
    return np.concatenate([array.reshape(-1) for array in to_numpy(tensors)])


def save_pickle(path, value):
    """As torch.save, which does not say why it ends where a disk is full."""
    held = io.BytesIO()
    torch.save(value, held)
    with unet_io.replacing(path) as file:
        file.write(held.getbuffer())


def save_weights(path, model, checkpoint):
    """Write a model's weights alone, with the configuration and step of the checkpoint they came from.

    By the ending of `path`: .bin, for ./train_unet; .pt, a dict of "state_dict", "config" and "step" that
    torch.load reads with weights_only=True; .safetensors, with "config" (JSON) and "step" in its metadata.
    Where they are known the names of the classes go with them, as "class_names": a list, there in JSON.
    """
    step = checkpoint.step
    names = list(checkpoint.class_names)
    config = dataclasses.asdict(checkpoint.config)
    config["ema_rate"] = tuple(config["ema_rate"])  # torch.load takes no class of ours
    state = {name: p.detach().float().cpu().contiguous() for name, p in model.named_parameters()}
    if path.endswith(".bin"):
        weights = dict(weights=to_numpy(file_order(model, state.values()))) | unet_io.class_section(names)
        run = {name: value for name, value in checkpoint.run.items() if name != "use_ema"}  # there is nothing to choose
        unet_io.write_checkpoint(path, Checkpoint(checkpoint.config, weights, step, run=run))
    elif path.endswith((".pt", ".pth")):
        value = dict(state_dict=state, config=config, step=step)
        if names:
            value["class_names"] = names
        save_pickle(path, value)
    elif path.endswith(".safetensors"):
        metadata = dict(format="pt", config=json.dumps(config), step=str(step))
        if names:
            metadata["class_names"] = json.dumps(names)
        block = _need_safetensors(path).torch.save(state, metadata)
        with unet_io.replacing(path) as file:
            file.write(block)
    else:
        raise UserError(f"{path} must end in .bin, .pt or .safetensors, which says how weights are written,"
                        f" or in / for a folder that diffusers opens")


# ----------------------------------------------------------------------------------------------------
# 4. bare state dicts

# The names of layers in the state dicts of the trainer before this one, and what guided-diffusion calls them.
OLD_NAMES = {"gn1": "in_layers.0", "cv3_1": "in_layers.2", "l_emb": "emb_layers.1", "gn2": "out_layers.0",
             "cv3_2": "out_layers.3", "gn": "norm", "proj": "proj_out"}
# Which flags decide about the shape of a tensor, by a part of its name; the first that fits counts.
DECIDES = (("time_embed.", "--num_channels"), ("label_emb.", "--class_cond and --num_classes"),
           ("input_blocks.0.0.", "--in_channels and --num_channels"),
           ("out.2.", "--in_channels and --learn_sigma"),
           ("emb_layers.", "--use_scale_shift_norm, --num_channels and --channel_mult"),
           (".op.", "--conv_resample and --resblock_updown"), (".conv.", "--conv_resample and --resblock_updown"),
           ("qkv.", "--attention_resolutions and --image_size"),
           (".norm.", "--attention_resolutions and --image_size"),
           ("proj_out.", "--attention_resolutions and --image_size"))


def _deciding_flag(name, found, expected):
    """What to say of a tensor that doesn't fit the model that a bare state dict is taken for."""
    flags = next((flags for part, flags in DECIDES if part in name),
                 "--channel_mult, --num_res_blocks and --attention_resolutions")
    verb = "decide" if " and " in flags else "decides"
    return (f"; {flags} {verb} about it: say what it is with --preset or --image_size,"
            f" --num_channels, --channel_mult, --attention_resolutions ...")


def _read_bare(path, state, averaged, overrides):
    """Checkpoint from a state dict that comes without its configuration.

    The names tell whose it is. guided-diffusion's and UNet's have max_period 10000. The trainer before this
    one had 1000, and other names (see OLD_NAMES); a dict with neither is taken for one of its, by the order
    of the parameters. The width is read from the first tensor. What else no shape tells is as in Config, or
    as overrides say, and what was assumed is printed on stderr.
    """
    check_tensors(path, state)
    if "x_embedder.proj.weight" in state:
        raise UserError(f"{path} holds a DiT: python3 dev/dit/train_dit.py --import makes a .bin of it")
    guided = any(".in_layers." in name for name in state)
    overrides = dict(conv_resample=any(".op." in name for name in state)) | overrides
    if "label_emb.weight" in state:
        rows = len(state["label_emb.weight"]) - (overrides.get("cond_drop_prob", 0) > 0)
        overrides = dict(class_cond=True, num_classes=rows) | overrides
    first = state.get(ANCHORS[0], next(iter(state.values()))).shape  # (4 num_channels, num_channels)
    config = Config(num_channels=first[-1] if len(first) == 2 else 0, max_period=10000 if guided else 1000)
    if guided:
        config = dataclasses.replace(config, **overrides)
    else:
        config = with_old_attention(config, overrides)
    model = unet_without_memory(config.check("" if overrides else path), path)

    expected = _shapes(model)
    names = _names_of_bare(path, state, list(expected))
    named = {name: _without_ones(value, expected.get(name)) for name, value in zip(names, state.values())}
    if len(named) < len(state):
        raise UserError(f"{path} holds two tensors of one name")
    weights = _flat_weights(path, named, model, "the model that it is taken for", _deciding_flag)

    untold = ["image_size", "num_head_channels", "norm_groups", "max_period", *DIFFUSION[:3]]
    if guided:
        untold.append("use_new_attention_order")
    if config.num_heads:
        untold.remove("num_head_channels")
    note_assumed(path, [f"{name} {getattr(config, name)}" for name in untold if name not in overrides])
    return Checkpoint(config, _sections(weights, averaged), tensors=len(expected), old=True)


def _names_of_bare(path, state, expected):
    """What a UNet calls the tensors of a bare state dict, one by one. expected: its parameters' names, in order."""
    names = [".".join(OLD_NAMES.get(part, part) for part in name.split(".")) for name in state]
    if any(".in_layers." in name for name in names):
        return names
    if what_it_is(path) == "safetensors":
        raise UserError(f"{path} names its tensors as no known model does, such as {names[0]}, and has them in no"
                        f" order")
    return [*expected, *names[len(expected):]]


def note_assumed(path, assumed):
    """Say what a file doesn't tell; assumed: texts such as "norm_groups 32"."""
    if assumed:
        note(path, f"doesn't tell all that it is, and is taken for a model of {', '.join(assumed)}; flags of these names"
             f" say otherwise")


def _sections(weights, averaged):
    """The sections of a Checkpoint. Where the weights are averaged, there are no others, and so they stand for both."""
    if averaged:
        return dict(weights=weights, ema=weights)
    return dict(weights=weights)


def _without_ones(value, shape):
    """The tensor in this shape where the two differ in dimensions of 1 alone; otherwise as it is."""
    same = shape and [d for d in shape if d != 1] == [d for d in value.shape if d != 1]
    return value.reshape(shape) if same else value


# ----------------------------------------------------------------------------------------------------
# 5. diffusers

# What diffusers' UNet2DModel calls the layers within a residual or an attention block.
DIFFUSERS_NAMES = {"in_layers.0": "norm1", "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj",
                   "out_layers.0": "norm2", "out_layers.3": "conv2", "skip_connection": "conv_shortcut",
                   "norm": "group_norm", "proj_out": "to_out.0", "op": "conv", "conv": "conv"}
# What diffusers called those of an attention block before its version 0.12, and calls them now.
OLDER_DIFFUSERS_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
# UNet2DModel resamples by 3x3 convolutions, as with conv_resample, or as with resblock_updown. For a model without
# either, its convolutions get these weights within each channel, and 0 between channels: the first then takes the
# mean of 2x2 pixels, and the second, after pixels were repeated, changes nothing.
MEAN_KERNEL = ((0, 0, 0), (0, 0.25, 0.25), (0, 0.25, 0.25))
SAME_KERNEL = ((0, 0, 0), (0, 1, 0), (0, 0, 0))


def _diffusers_places(model):
    """Yield (name in UNet2DModel, module of a UNet) of each block, each resampling and each layer outside of these."""
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


def _fixed_kernel(layer, channels):
    """The weights of the 3x3 convolution that resamples as a Downsample or Upsample without conv_resample."""
    kernel = torch.tensor(MEAN_KERNEL if isinstance(layer, Downsample) else SAME_KERNEL)
    return torch.eye(channels)[:, :, None, None] * kernel


def diffusers_tensors(model):
    """The weights of a UNet2DModel that computes what this UNet does: {name: tensor}.

    Its timestep embedding is as wide as the first level, k = channel_mult[0] times ours, and holds ours in
    every k-th column; the others get the weight 0. Where it can't be computed there, it is in a table.
    """
    config = model.config
    tensors = {}
    ordered = dict(zip(model.parameters(), file_order(model, model.parameters())))
    for name, layer in _diffusers_places(model):
        if isinstance(layer, ResBlock):
            channels = layer.out_layers[0].num_channels  # of the resampling that follows, too
        elif isinstance(layer, (Downsample, Upsample)) and not config.conv_resample:
            tensors[f"{name}.conv.weight"] = _fixed_kernel(layer, channels)
            tensors[f"{name}.conv.bias"] = torch.zeros(channels)
        for path, parameter in layer.named_parameters():
            tensors |= _diffusers_parameter(name, layer, path, ordered[parameter].detach().float().cpu())

    def widened(columns):
        wide = torch.zeros(len(columns), config.level_widths()[0])
        wide[:, ::int(config.channel_mult[0])] = columns
        return wide

    tensors["time_embedding.linear_1.weight"] = widened(tensors["time_embedding.linear_1.weight"])
    if _needs_table(config):
        timesteps = torch.arange(config.diffusion_steps)
        sinusoids = timestep_embedding(timesteps, config.num_channels, config.max_period, config.timestep_unit())
        tensors["time_proj.weight"] = widened(sinusoids)
    return tensors


def _diffusers_parameter(name, layer, path, value):
    """{name: tensor} in UNet2DModel of a parameter: `path` is its name in the layer, `name` the layer's in UNet2DModel."""
    inner, _, kind = path.rpartition(".")
    if isinstance(layer, AttentionBlock) and inner != "norm" and kind == "weight":
        value = value.squeeze(-1)  # a linear layer there
    if inner == "qkv":
        return {f"{name}.to_{part}.{kind}": third.clone() for part, third in zip("qkv", value.chunk(3))}
    if inner:
        return {f"{name}.{DIFFUSERS_NAMES[inner]}.{kind}": value}
    return {f"{name}.{kind}": value}


def _needs_table(config):
    """Whether UNet2DModel's sinusoids of a timestep would be others than ours."""
    return config.max_period != 10000 or config.timestep_unit() != 1


PREDICTIONS = {"eps": "epsilon", "v": "v_prediction", "x0": "sample"}
SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
UNLIMITED = 1e6  # what no prediction exceeds: JSON knows no infinity


def scheduler_config(config, run):
    """What a DDPMScheduler is made of, and from its .config any other of diffusers' schedulers: a dict.

    run: a checkpoint's settings. Schedulers without clip_sample, such as DPM-Solver's, clamp by `thresholding`, which
    with sample_max_value 1 does the same. timestep_spacing is `trailing`, whatever --spacing was: DDIMScheduler always
    steps from t to t - T / N, which is wrong with `linspace`. Raises UserError for a noise that no such scheduler has.
    """
    T = config.diffusion_steps
    threshold = run.get("threshold", "clamp")
    if config.noise_schedule not in SCHEDULES or config.predict not in PREDICTIONS:
        raise UserError(f"this model has --noise_schedule {config.noise_schedule} and --predict {config.predict}, which"
                        f" diffusers' DDPMScheduler does not know: it knows {unet_io.listed(SCHEDULES)}, and"
                        f" {unet_io.listed(PREDICTIONS)}")
    return dict(
        _class_name="DDPMScheduler", num_train_timesteps=T, beta_start=1e-4 * 1000 / T,
        beta_end=0.02 * 1000 / T, rescale_betas_zero_snr=bool(config.zero_terminal_snr),
        beta_schedule=SCHEDULES[config.noise_schedule], prediction_type=PREDICTIONS[config.predict],
        clip_sample=threshold == "clamp", clip_sample_range=1.0, thresholding=threshold != "none",
        dynamic_thresholding_ratio=0.995, sample_max_value=UNLIMITED if threshold == "dynamic" else 1.0,
        timestep_spacing="trailing", steps_offset=0,
        variance_type="learned_range" if config.learn_sigma else "fixed_small")


def diffusers_configs(config, run=None, class_names=()):
    """The JSON files in a folder for diffusers' DDPMPipeline: {path: dict}, model_index.json first.

    run, class_names: a checkpoint's. Raises UserError for what UNet2DModel can't be.
    """
    index = dict(_class_name="DDPMPipeline", unet=("diffusers", "UNet2DModel"),
                 scheduler=("diffusers", "DDPMScheduler"))
    unet = _unet2d_config(config, class_names)
    scheduler = scheduler_config(config, run or {})
    files = {"model_index.json": index, "scheduler/scheduler_config.json": scheduler, "unet/config.json": unet}
    # the first version that has time_embedding_dim
    return {name: values | dict(_diffusers_version="0.32.0") for name, values in files.items()}


def _unet2d_config(config, class_names):
    """The config.json of a UNet2DModel: a dict. Raises UserError."""
    widths = config.level_widths()
    if widths[0] % config.num_channels:
        raise UserError(f"diffusers' UNet2DModel tells the timestep by as many sinusoids as its first level has"
                        f" channels, here {widths[0]}, and this model's {config.num_channels} don't fit: its"
                        f" channel_mult would have to begin with a whole number")
    attended = [size in config.attention_resolutions for size in config.level_sizes()]
    if config.resblock_updown:
        resampling = "resnet"
        down = "ResnetDownsampleBlock2D"
        up = "ResnetUpsampleBlock2D"
    else:
        resampling = "conv"
        down = "DownBlock2D"
        up = "UpBlock2D"
    more = {}
    if _needs_table(config):
        more |= dict(time_embedding_type="learned", num_train_timesteps=config.diffusion_steps)
    if config.class_cond:
        more["_cond_drop_prob"] = config.cond_drop_prob  # diffusers keeps what begins with _, and says nothing of it
    if class_names:  # as DiTPipeline's id2label
        more["_id2label"] = dict(enumerate(class_names))
    return dict(
        _class_name="UNet2DModel", sample_size=config.image_size, in_channels=config.in_channels,
        out_channels=config.in_channels * (1 + config.learn_sigma), freq_shift=0, flip_sin_to_cos=True,
        time_embedding_dim=4 * config.num_channels, block_out_channels=widths, downsample_type=resampling,
        upsample_type=resampling, layers_per_block=config.num_res_blocks, attention_head_dim=_head_channels(config),
        down_block_types=["AttnDownBlock2D" if attends else down for attends in attended],
        up_block_types=["AttnUpBlock2D" if attends else up for attends in reversed(attended)],
        norm_num_groups=config.norm_groups, attn_norm_num_groups=config.norm_groups, norm_eps=1e-5,
        act_fn="silu", downsample_padding=1, dropout=config.dropout,
        resnet_time_scale_shift="scale_shift" if config.use_scale_shift_norm else "default",
        num_class_embeds=config.label_rows() or None, **more)


def _head_channels(config):
    """The channels of every attention head; None where each block has one head of all its channels. Raises UserError."""
    widths = config.level_widths()
    found = {widths[-1] // config.heads(widths[-1], False)}  # in the middle
    for width, size in zip(widths, config.level_sizes()):
        if size in config.attention_resolutions:
            for decoder in (False, True):
                found.add(width // config.heads(width, decoder))
    if len(found) == 1:
        return found.pop()
    if config.num_heads == 1 and config.num_heads_upsample in (0, 1):
        return None
    raise UserError(f"diffusers' UNet2DModel has heads of one number of channels, and by num_heads this"
                    f" model has some of {' and some of '.join(map(str, sorted(found)))}")


def save_diffusers(folder, model, checkpoint=None):
    """Write a folder that diffusers' DDPMPipeline.from_pretrained opens, and UNet2DModel's with its unet/.

    checkpoint: where the model comes from, which tells how it is drawn with and the names of its classes.
    All files are written before the first gets its name. Then those of an older export are removed, and the new ones
    get their names, the weights first and model_index.json last. So a folder that lacks no file is of one model.
    """
    if checkpoint:
        configs = diffusers_configs(model.config, checkpoint.run, checkpoint.class_names)
    else:
        configs = diffusers_configs(model.config)
    files = {os.path.join(folder, name): (json.dumps(values, indent=2) + "\n").encode()
             for name, values in configs.items()}
    weights = _need_safetensors(folder).torch.save(diffusers_tensors(model), dict(format="pt"))
    files[os.path.join(folder, "unet/diffusion_pytorch_model.safetensors")] = weights
    for part in map(os.path.dirname, files):
        unet_io.check_folder(part)
    for part in map(os.path.dirname, files):
        os.makedirs(part, exist_ok=True)
    with contextlib.ExitStack() as stack:  # at its end the last file gets its name first
        for path, content in files.items():
            file = stack.enter_context(unet_io.replacing(path))
            file.write(content)
            file.flush()
        for path in filter(os.path.exists, files):
            os.remove(path)


# What UNet2DModel takes for what its config.json doesn't say, in diffusers 0.32.
UNET2D_DEFAULTS = dict(
    sample_size=None, in_channels=3, out_channels=3, center_input_sample=False, time_embedding_type="positional",
    time_embedding_dim=None, freq_shift=0, flip_sin_to_cos=True,
    down_block_types=["DownBlock2D"] + 3 * ["AttnDownBlock2D"], mid_block_type="UNetMidBlock2D",
    up_block_types=3 * ["AttnUpBlock2D"] + ["UpBlock2D"], block_out_channels=[224, 448, 672, 896], layers_per_block=2,
    mid_block_scale_factor=1, downsample_padding=1, downsample_type="conv", upsample_type="conv", dropout=0.0,
    act_fn="silu", attention_head_dim=8, norm_num_groups=32, attn_norm_num_groups=None, norm_eps=1e-5,
    resnet_time_scale_shift="default", add_attention=True, class_embed_type=None, num_class_embeds=None,
    num_train_timesteps=None)
# What has only one value here.
FIXED_IN_UNET2D = dict(center_input_sample=False, mid_block_type="UNetMidBlock2D", mid_block_scale_factor=1,
                       act_fn="silu", norm_eps=1e-5, class_embed_type=None)
# The names of UNet2DModel's blocks: (whether they have attention, what the block resamples by where its name tells).
BLOCKS = {"DownBlock2D": (False, "conv"), "AttnDownBlock2D": (True, None), "ResnetDownsampleBlock2D": (False, "resnet"),
          "UpBlock2D": (False, "conv"), "AttnUpBlock2D": (True, None), "ResnetUpsampleBlock2D": (False, "resnet")}
WEIGHT_FILES = [f"diffusion_pytorch_model{variant}.{ending}" for variant in ("", ".fp16")
                for ending in ("safetensors", "safetensors.index.json", "bin", "bin.index.json")]


@dataclasses.dataclass
class Pipeline:
    """Where the parts of a model of diffusers lie; "" for what isn't there."""
    unet: str = ""       # the folder of its config.json
    weights: str = ""
    scheduler: str = ""
    index: str = ""
    averaged: bool = False


def _find_pipeline(path, use_ema, weights_known=False):
    """The Pipeline of a folder with unet/ and scheduler/, of a folder with config.json, or of weights in such a one.

    weights_known: whether they have been read, so that no file of them is looked for.
    """
    folder = _unet_folder(path, use_ema)
    found = Pipeline(averaged=os.path.basename(os.path.abspath(folder)) == "unet_ema")
    if _first_file(folder, "config.json"):
        found.unet = folder
    if not weights_known:
        names = WEIGHT_FILES
        if not use_ema:
            names = [name.replace("model.", "model.non_ema.", 1) for name in WEIGHT_FILES] + names
        found.weights = path if os.path.isfile(path) else _first_file(folder, *names)
    around = os.path.dirname(os.path.abspath(folder))
    found.scheduler = (_first_file(folder, "scheduler_config.json", "scheduler/scheduler_config.json")
                       or _first_file(around, "scheduler/scheduler_config.json"))
    found.index = _first_file(folder, "model_index.json") or _first_file(around, "model_index.json")
    return found


def _first_file(folder, *names):
    """The path of the first of these files that is in the folder; "" where there is none."""
    paths = (os.path.join(folder, name) for name in names)
    return next((path for path in paths if os.path.isfile(path)), "")


def _unet_folder(path, use_ema):
    """The folder of the UNet2DModel that a folder or a file of weights belongs to."""
    if not os.path.isdir(path):
        return os.path.dirname(path) or "."
    if _first_file(path, "config.json"):
        return path
    parts = ["unet_ema", "unet"] if use_ema else ["unet", "unet_ema"]
    parts = [part for part in parts if _first_file(os.path.join(path, part), "config.json")]
    if not parts:
        raise UserError(f"{path} is a folder without a config.json: a file is needed, or the folder of a UNet2DModel"
                        f" or of a pipeline of diffusers")
    if len(parts) > 1:
        note(path, f"holds averaged weights, unet_ema, and raw ones, unet: {parts[0]} is taken")
    return os.path.join(path, parts[0])


def read_diffusers(path, overrides, use_ema=1, free=(), known=None):
    """Checkpoint of a UNet2DModel: a pipeline's folder, the model's, or its weights beside its config.json.

    known: (its tensors, whether they are averaged), where they have been read. Raises UserError for what a UNet can't
    compute, and says what no file told.
    """
    found = _find_pipeline(path, use_ema, weights_known=known is not None)
    if not found.unet:
        raise UserError(f"{path} holds weights by the names of diffusers' UNet2DModel, whose config.json must lie"
                        f" beside it")
    if known is None and not found.weights:
        raise UserError(f"{path} holds no {WEIGHT_FILES[0]} (nor .bin, nor an index of parts)")
    values = _read_json(os.path.join(found.unet, "config.json"))
    if values.get("_class_name", "UNet2DModel") != "UNet2DModel":
        raise UserError(f"{path} is a {values['_class_name']!s:.60} of diffusers; only a UNet2DModel can be taken")
    if known:
        state, averaged = known
    else:
        loaded, _ = read_tensors(found.weights)
        state, averaged = take_network(found.weights, loaded, use_ema)
    check_tensors(path, state)
    state = {_newer_name(name): value for name, value in state.items()}

    told = _told_by_unet(path, UNET2D_DEFAULTS | values, state)
    noise = _told_by_scheduler(path, found.scheduler) if found.scheduler else {}
    if noise and told.get("diffusion_steps", noise["diffusion_steps"]) != noise["diffusion_steps"]:
        raise UserError(f"{path} has a table of {told['diffusion_steps']} timesteps and a scheduler of"
                        f" {noise['diffusion_steps']}")
    run = noise.pop("run", {})
    told |= noise
    index = _read_json(found.index) if found.index else {}
    names = _names_of(path, values.get("_id2label") or values.get("id2label") or index.get("id2label"))
    told |= _classes_told(path, told.pop("rows"), len(names), values, overrides)

    flags = {name: value for name, value in overrides.items() if name in told and name not in free}
    refuse_contradictions(flags, argparse.Namespace(**told), path)
    config = Config(**(overrides | told)).check(f"{path}, by its config.json")
    if told.get("image_size", overrides.get("image_size")) is None:
        raise UserError(f"{path} doesn't tell the size of its images: say it with --image_size")
    note_assumed(path, [f"{name} {getattr(config, name)}" for name in DIFFUSION if name not in told | overrides])
    unknown = [name for name in values if name not in UNET2D_DEFAULTS and name != "id2label" and name[:1] != "_"]
    if unknown:
        note(path, f"has settings that UNet2DModel doesn't have, which are ignored: {', '.join(unknown)}")

    model = unet_without_memory(config, path)
    weights = _flat_weights(path, _from_diffusers(path, model, state), model, "the model of its config.json")
    sections = _sections(weights, averaged or found.averaged) | _named(path, names, config)
    return Checkpoint(config, sections, tensors=len(_shapes(model)), run=run)


def _classes_told(path, rows, named, values, overrides):
    """Fields of Config by the rows of the label table, the last of which may be of no class. named: how many have names."""
    if not rows:
        return dict(class_cond=False, num_classes=0, cond_drop_prob=0.0)
    likely = 0.1 if named == rows - 1 > 0 else 0
    drop = values.get("_cond_drop_prob", overrides.get("cond_drop_prob", likely))
    if not unet_io.is_number(drop, float):
        raise UserError(f"{path}: its config.json says _cond_drop_prob {drop!r:.40}, which is no number")
    return dict(class_cond=True, num_classes=rows - (drop > 0), cond_drop_prob=float(drop))


def _newer_name(name):
    """A tensor's name as diffusers has it since version 0.12."""
    if ".attentions." not in name:
        return name
    return ".".join(OLDER_DIFFUSERS_NAMES.get(part, part) for part in name.split("."))


def _names_of(path, labels):
    """The names of classes by an id2label, {"0": name, ...}: a list; empty where there is none."""
    if not labels:
        return []
    try:
        numbered = {int(number): name for number, name in labels.items()}
        names = [str(numbered[i]) for i in range(len(numbered))]
        unet_io.parse_class_names("".join(f"{name}\n" for name in names).encode(), path, len(names), len(names))
        return names
    except (AttributeError, KeyError, TypeError, ValueError, UserError):
        note(path, "has an id2label that does not name each of classes 0, 1, 2 ... otherwise, in a line: it is left out")
        return []


def _told_by_unet(path, values, state):
    """Fields of Config by the config.json of a UNet2DModel and its tensors, and `rows` of its classes.

    Raises UserError, which names every reason, where the architecture can't be it.
    """
    try:
        return _fields_of_unet(path, values, state)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError):
        raise UserError(f"{path}: its config.json, or a tensor, makes no sense as a UNet2DModel's") from None


def _fields_of_unet(path, values, state):
    if values["act_fn"] == "swish":
        values["act_fn"] = "silu"
    widths = list(values["block_out_channels"])
    levels = len(widths)
    width = values["time_embedding_dim"] or 4 * widths[0]
    columns = _columns(values, state, width // 4)
    reasons = [*_reasons_of_blocks(values), *_reasons_of_timesteps(values), *_reasons_of_layers(values)]
    if width % 4 or columns is None:
        reasons.append(f"time_embedding_dim {width} (here it is 4 times the channels that channel_mult counts in, and of"
                       f" these there are as many sinusoids)")
    if reasons:
        raise UserError(f"{path} can't be held by this architecture: {'; '.join(reasons)}")

    resampling = _resampling_told(values)
    by_convolution = resampling == {"conv"}
    told = dict(num_channels=width // 4, num_res_blocks=values["layers_per_block"], in_channels=values["in_channels"],
                norm_groups=values["norm_num_groups"], dropout=float(values["dropout"]),
                learn_sigma=values["out_channels"] != values["in_channels"],
                channel_mult=tuple(_multiplier(w, width) for w in widths),
                resblock_updown=resampling == {"resnet"}, rescale_timesteps=False, max_period=10000,
                use_scale_shift_norm=values["resnet_time_scale_shift"] == "scale_shift",
                conv_resample=by_convolution and not _resamples_plainly(state, levels),
                rows=values["num_class_embeds"] or 0)
    if values["attention_head_dim"] is None:
        told["num_heads"] = 1
    else:
        told |= dict(num_head_channels=values["attention_head_dim"], num_heads=0)
    told |= _sizes_told(path, values)
    told |= _timesteps_told(path, values, state, width // 4, columns)
    if not values["add_attention"]:
        _add_no_attention(state, widths[-1])
        note(path, "has no attention in the middle: it is given one whose weights are 0, which adds nothing")
    return told


def _multiplier(width, embedding):
    """The entry of channel_mult for a level of this width. embedding: that of the timestep embedding, 4 num_channels."""
    if 4 * width % embedding == 0:
        return 4 * width // embedding
    return 4 * width / embedding


def _block_names(values, way):
    """The names of the blocks on a way, "down" or "up", as they are in BLOCKS, one for each level. Raises ValueError."""
    names = [name.removeprefix("UNetRes") for name in values[f"{way}_block_types"]]
    if len(names) != len(values["block_out_channels"]):
        raise ValueError
    return names


def _blocks(values, way):
    """What BLOCKS says of each block on a way."""
    return [BLOCKS.get(name, (False, None)) for name in _block_names(values, way)]


def _attended(values, way):
    """Whether each block on a way has attention."""
    return [attends for attends, _ in _blocks(values, way)]


def _resampling_told(values):
    """By what levels are resampled, "conv", "resnet" or others: a set, empty where there is one level."""
    found = set()
    for way in ("down", "up"):
        for _, kind in _blocks(values, way)[:-1]:  # nothing is resampled after the last
            found.add(kind or values[f"{way}sample_type"] or "conv")
    return found


def _reasons_of_blocks(values):
    """What this architecture can't have of a UNet2DModel's constants, blocks and resampling: texts."""
    for name, fixed in FIXED_IN_UNET2D.items():
        if values[name] != fixed:
            yield f"{name} {values[name]} (here it is {fixed})"
    for way in ("down", "up"):
        for name in _block_names(values, way):
            if name not in BLOCKS:
                yield f"the block {name}"
    if _attended(values, "down") != _attended(values, "up")[::-1]:
        yield "attention at other levels on the way up than on the way down"
    resampling = _resampling_told(values)
    if len(resampling) > 1 or not resampling <= {"conv", "resnet"}:
        yield f"levels that are resampled in several ways ({', '.join(map(str, sorted(resampling)))})"
    if resampling == {"conv"} and values["downsample_padding"] != 1:
        yield (f"downsample_padding {values['downsample_padding']} (here it is 1: another would move the"
               f" picture)")


def _reasons_of_timesteps(values):
    """What this architecture can't have of the ways in which a UNet2DModel takes the timestep: texts."""
    kind = values["time_embedding_type"]
    if kind not in ("positional", "learned"):
        yield f"time_embedding_type {kind} (here it is positional)"
    if kind == "positional" and values["freq_shift"]:
        yield f"freq_shift {values['freq_shift']} (here it is 0: other frequencies)"
    if values["resnet_time_scale_shift"] not in ("default", "scale_shift"):
        yield f"resnet_time_scale_shift {values['resnet_time_scale_shift']}"


def _reasons_of_layers(values):
    """What this architecture can't have of a UNet2DModel's norms and numbers of channels: texts."""
    groups = values["norm_num_groups"]
    modulates = values["resnet_time_scale_shift"] == "scale_shift"
    attention_groups = values["attn_norm_num_groups"] or (None if modulates else groups)
    if values["add_attention"] and attention_groups != groups:
        yield f"attn_norm_num_groups {values['attn_norm_num_groups']} (here it is norm_num_groups, {groups})"
    narrowest = min(values["block_out_channels"])
    if narrowest < 2 * groups:
        yield f"norm_num_groups {groups} of {narrowest} channels (here a group has two or more)"
    inputs = values["in_channels"]
    outputs = values["out_channels"]
    if outputs not in (inputs, 2 * inputs):
        yield (f"{outputs} out_channels of {inputs} in_channels (here they are as many, or with learn_sigma"
               f" twice as many)")


def _sizes_told(path, values):
    """Fields of Config by sample_size: the images' size, and those at which there is attention. Raises UserError."""
    attended = _attended(values, "down")
    size = values["sample_size"]
    if isinstance(size, (list, tuple)):
        if len(set(size)) > 1:
            raise UserError(f"{path} can't be held by this architecture: images of {size[0]}x{size[-1]}, only square ones"
                            f" can be")
        size = size[0]
    if size:
        resolutions = tuple(size >> level for level, attends in enumerate(attended) if attends)
        return dict(image_size=size, attention_resolutions=resolutions)
    if any(attended):
        raise UserError(f"{path} doesn't tell the size of its images: put it into its config.json, as sample_size")
    return {}


def _timesteps_told(path, values, state, sinusoids, columns):
    """Fields of Config by the table of timesteps that a "learned" embedding has; {} without one.

    Changes the tensors: the table goes, and the first layer of the timestep embedding keeps as many columns as there
    are sinusoids here. columns: see _columns.
    """
    kind = values["time_embedding_type"]
    first = state["time_embedding.linear_1.weight"]
    if values["flip_sin_to_cos"] is not True and kind == "positional":  # sines first: ours are second
        first = first.roll(first.shape[1] // 2, 1)
    state["time_embedding.linear_1.weight"] = first[:, ::columns]
    if kind != "learned":
        return {}
    table = state.pop("time_proj.weight")
    return _told_by_table(path, table[:, ::columns], sinusoids) | dict(diffusion_steps=len(table))


def _columns(values, state, sinusoids):
    """k, where only every k-th column of the timestep embedding counts, as many as there are sinusoids; None otherwise."""
    weight = state["time_embedding.linear_1.weight"]
    if sinusoids < 1 or weight.shape[1] % sinusoids:
        return None
    k = weight.shape[1] // sinusoids
    others = weight.clone()
    others[:, ::k] = 0
    if k > 1 and (others.any() or values["flip_sin_to_cos"] is not True):
        return None
    return k


def _resamples_plainly(state, levels):
    """Whether a UNet2DModel's convolutions that resample are all those of an export without conv_resample."""
    for part, kind in (("down", Downsample), ("up", Upsample)):
        for level in range(levels - 1):
            name = f"{part}_blocks.{level}.{part}samplers.0.conv"
            weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
            plain = _fixed_kernel(kind(1, False), len(bias))
            if weight.shape != plain.shape or not torch.equal(weight.float(), plain) or bias.any():
                return False
    return True


def _told_by_table(path, table, sinusoids):
    """max_period and rescale_timesteps of a table of sinusoids, (T, sinusoids), as an export has it."""
    T = len(table)
    half = sinusoids // 2
    table = table.float()
    for rescales in (False, True):
        unit = 1000 / T if rescales else 1
        slowest = math.asin(min(max(float(table[1, -1]), 1e-30), 1)) / unit
        period = round(slowest ** (-half / (half - 1)))
        for guess in (period, period - 1, period + 1):
            if not 2 <= guess <= 10**8:
                continue
            exact = timestep_embedding(torch.arange(T), sinusoids, guess, unit).float()
            if torch.allclose(table, exact, rtol=torch.finfo(table.dtype).eps, atol=1e-6):
                return dict(max_period=guess, rescale_timesteps=rescales)
    raise UserError(f"{path} can't be held by this architecture: its table of timesteps, time_proj, has been trained, or"
                    f" holds no sinusoids")


def _add_no_attention(state, channels):
    """Give the middle of a UNet2DModel's tensors an attention that adds nothing."""
    name = "mid_block.attentions.0"
    for layer in ("to_q", "to_k", "to_v", "to_out.0"):
        state[f"{name}.{layer}.weight"] = torch.zeros(channels, channels)
        state[f"{name}.{layer}.bias"] = torch.zeros(channels)
    state[f"{name}.group_norm.weight"] = torch.ones(channels)
    state[f"{name}.group_norm.bias"] = torch.zeros(channels)


def _told_by_scheduler(path, file):
    """Fields of Config by a scheduler_config.json, and `run`, what of a run's settings it tells."""
    values = _read_json(file)
    kind = values.get("_class_name", "DDPMScheduler")
    has_betas = "beta_start" in values or "beta_schedule" in values
    values = dict(num_train_timesteps=1000, beta_start=1e-4, beta_end=0.02, beta_schedule="linear", trained_betas=None,
                  prediction_type="epsilon", rescale_betas_zero_snr=False, thresholding=False, sample_max_value=1.0,
                  clip_sample=kind in ("DDPMScheduler", "DDIMScheduler"), clip_sample_range=1.0,
                  variance_type="fixed_small") | values
    schedules = {theirs: ours for ours, theirs in SCHEDULES.items()}
    predictions = {theirs: ours for ours, theirs in PREDICTIONS.items()}
    reasons = []
    if not has_betas:
        reasons.append(f"no betas, being a {kind!s:.60},")
    else:
        reasons += _reasons_of_betas(values, schedules)
    if values["prediction_type"] not in predictions:
        reasons.append(f"prediction_type {values['prediction_type']}")
    if reasons:
        raise UserError(f"{path}: its scheduler has {' and '.join(reasons)}, and there is no such noise here")
    threshold = _threshold_told(path, values)
    if values["variance_type"] not in ("fixed_small", "fixed_small_log", "learned_range"):
        note(path, f"has a scheduler with variance_type {values['variance_type']}: --sampler ddpm here adds the least"
             f" noise, as fixed_small does")
    return dict(diffusion_steps=values["num_train_timesteps"], noise_schedule=schedules[values["beta_schedule"]],
                predict=predictions[values["prediction_type"]],
                zero_terminal_snr=bool(values["rescale_betas_zero_snr"]), run=dict(threshold=threshold))


def _reasons_of_betas(values, schedules):
    """Why there are no such betas here: a list of one text, or of none. schedules: those there are."""
    T = values["num_train_timesteps"]
    schedule = values["beta_schedule"]
    if schedule not in schedules:
        return [f"beta_schedule {schedule}"]
    if values["trained_betas"] is not None:
        return ["betas of its own"]
    if not unet_io.is_number(T, int) or T < 1:
        return [f"num_train_timesteps {T!r:.40}"]
    ends = [values["beta_start"], values["beta_end"]]
    if schedule == "linear" and not np.allclose(ends, [0.1 / T, 20 / T], rtol=1e-6):
        return [f"betas from {ends[0]} to {ends[1]} (here they go from {0.1 / T:g} to {20 / T:g} in {T} timesteps)"]
    return []


def _threshold_told(path, values):
    """--threshold as a scheduler clamps; notes where that is none or differs."""
    threshold = "clamp" if values["clip_sample"] else "none"
    if values["thresholding"]:
        threshold = "dynamic" if values["sample_max_value"] > 1 else "clamp"
    if threshold != "clamp":
        note(path, f"has a scheduler that does not clamp to [-1, 1]: pictures are drawn with --threshold"
                   f" {threshold}")
    elif values["clip_sample"] and not values["thresholding"] and values["clip_sample_range"] != 1:
        limit = values["clip_sample_range"]
        note(path, f"has a scheduler that clamps to [-{limit}, {limit}]: --threshold clamp does to [-1, 1], none not at"
             f" all")
    return threshold


def _from_diffusers(path, model, tensors):
    """{name in a UNet: tensor} from those of a UNet2DModel, of which each must have its place."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    left = dict(tensors)
    state = {}

    def take(name, shape):
        if name not in left:
            raise UserError(f"{path}: {name} is missing")
        value = _without_ones(left.pop(name), shape)
        if value.shape != shape:
            raise UserError(f"{path}: {name} is {tuple(value.shape)} there and {tuple(shape)} in the model of its"
                            f" config.json")
        return value

    for place, layer in _diffusers_places(model):
        if isinstance(layer, (Downsample, Upsample)) and not model.config.conv_resample:
            del left[f"{place}.conv.weight"], left[f"{place}.conv.bias"]  # see _resamples_plainly
        for inner_name, parameter in layer.named_parameters():
            inner, _, kind = inner_name.rpartition(".")
            if inner == "qkv":
                shape = torch.Size([len(parameter) // 3, *parameter.shape[1:]])
                value = torch.cat([take(f"{place}.to_{part}.{kind}", shape) for part in "qkv"])
            else:
                value = take(f"{place}.{DIFFUSERS_NAMES[inner]}.{kind}" if inner else f"{place}.{kind}", parameter.shape)
            state[names[parameter]] = value
    if left:
        name, value = next(iter(left.items()))
        raise UserError(f"{path}: {name} is {tuple(value.shape)} there and no parameter in the model of its config.json")
    return state
