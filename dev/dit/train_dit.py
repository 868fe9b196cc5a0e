"""The PyTorch twin of train_dit.cu: the Diffusion Transformer of Peebles and Xie 2022, "Scalable Diffusion Models with
Transformers", with the names of its authors' program, whose weights it makes .bin files of.

    python3 dev/dit/train_dit.py --import DiT-XL-2-256x256.pt --output_name dit_xl.bin    for ./train_dit --model_weights
    python3 dev/dit/train_dit.py --export out/checkpoint_00020000.bin --output_name X.pt  and back

Of averaged and raw weights it takes the former, unless --use_ema 0.

Diffusion, batches and training steps are those of train_unet.py, whose Trainer and sample take this model as well.

Shapes: B images, C channels, D = hidden_size, P = patch_size, T tokens an image.
"""
import argparse
import dataclasses
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import unet_io  # first, because it explains a missing package

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import convert
import train_unet
from unet_io import Checkpoint, Stream, UserError

FREQUENCIES = 256  # sines and cosines that a timestep becomes
OF_UNET = {"num_channels", "channel_mult", "num_res_blocks", "attention_resolutions", "norm_groups", "num_head_channels",
           "dropout", "num_heads_upsample", "resblock_updown", "conv_resample", "use_scale_shift_norm",
           "use_new_attention_order", "num_heads", "image_size"}
HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}  # of the paper's sizes, by hidden_size


# ----------------------------------------------------------------------------------------------------
# configuration

class DitSettings(unet_io.Settings):
    """Methods of Config."""
    magic = unet_io.DIT_MAGIC
    dropout = 0.0       # there is none

    def mlp_width(self):
        """Channels within a block's MLP."""
        return int(np.float32(self.hidden_size) * np.float32(self.mlp_ratio))

    def side(self):
        """Tokens that an image is high and wide."""
        return self.image_size // self.patch_size

    def check_network(self, prefix):
        """Raise UserError for an architecture that can't be."""
        if self.image_size % self.patch_size or self.side() > unet_io.MAX_ATTENTION_SIZE:
            raise UserError(f"{prefix}patch_size {self.patch_size} does not divide image_size {self.image_size} into"
                            f" up to {unet_io.MAX_ATTENTION_SIZE} patches a side")
        if self.hidden_size % 8 or self.mlp_width() % 8 or self.hidden_size % self.num_heads:
            raise UserError(f"{prefix}hidden_size {self.hidden_size}, and that times mlp_ratio {self.mlp_ratio}, must"
                            f" be multiples of 8, and the former of num_heads {self.num_heads}")


def _fields():
    """The fields of Config: what unet_io.Config has besides the UNet's, and ours."""
    ours = [("image_size", int, unet_io._setting(32, "height and width of the images, in pixels", low=4, high=1024)),
            ("depth", int, unet_io._setting(12, "transformer blocks", low=1, high=1000)),
            ("hidden_size", int, unet_io._setting(384, "channels of a token", low=8, high=8192)),
            ("patch_size", int, unet_io._setting(2, "pixels a token is high and wide", low=1, high=64)),
            ("mlp_ratio", float, unet_io._setting(4.0, "width of an MLP by hidden_size", low=0.125, high=64)),
            ("num_heads", int, unet_io._setting(6, "heads of every attention", low=1, high=1024))]
    shared = [(f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata))
              for f in dataclasses.fields(unet_io.Config) if f.name not in OF_UNET]
    return ours + shared


Config = dataclasses.make_dataclass("Config", _fields(), bases=(DitSettings,))


# ----------------------------------------------------------------------------------------------------
# the model

def positions(side, width):
    """The tokens' places, by row, then column: (1, side * side, width) float32.

    Sines, then cosines, of the column in the first half of the channels, of the row in the second.
    """
    frequencies = 10000.0 ** (-np.arange(width // 4) / (width // 4))
    row, column = np.divmod(np.arange(side * side), side)
    angles = [place[:, None] * frequencies for place in (column, row)]
    table = np.concatenate([f(angle) for angle in angles for f in (np.sin, np.cos)], 1)
    return torch.from_numpy(table.astype(np.float32))[None]


def modulate(x, shift, scale):
    """x (B, T, D) times 1 + scale, plus shift, (B, D) both."""
    return x * (1 + scale[:, None]) + shift[:, None]


class PatchEmbed(nn.Module):
    """(B, C, H, W) -> (B, T, D)"""
    def __init__(self, config):
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv2d(config.in_channels, config.hidden_size, size, stride=size)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, self.period, self.unit = config.hidden_size, config.max_period, config.timestep_unit()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, D), nn.SiLU(), nn.Linear(D, D))

    def forward(self, t):
        waves = train_unet.timestep_embedding(t, FREQUENCIES, self.period, self.unit)
        return self.mlp(waves.to(self.mlp[0].weight.dtype))


class LabelEmbedder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding_table = nn.Embedding(config.label_rows(), config.hidden_size)

    def forward(self, y):
        return self.embedding_table(y)


class Attention(nn.Module):
    legacy = False  # of qkv's outputs all of q come first, then k, then v: see train_unet.file_order

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, d)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


def layer_norm(width):
    return nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)


class Block(nn.Module):
    """adaLN-Zero: the condition c (B, D) shifts and scales what is normed, and gates what is added."""
    def __init__(self, config):
        super().__init__()
        D = config.hidden_size
        self.norm1, self.attn = layer_norm(D), Attention(D, config.num_heads)
        self.norm2, self.mlp = layer_norm(D), Mlp(D, config.mlp_width())
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, 1)
        x = x + gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class FinalLayer(nn.Module):
    def __init__(self, config, outputs):
        super().__init__()
        D = config.hidden_size
        self.norm_final, self.linear = layer_norm(D), nn.Linear(D, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D))

    def forward(self, x, c):
        return self.linear(modulate(self.norm_final(x), *self.adaLN_modulation(c).chunk(2, 1)))


class DiT(nn.Module):
    """model(x, t, y) as train_unet.UNet's: x (B, C, H, W), t (B,), y (B,) with class_cond only."""
    def __init__(self, config):
        super().__init__()
        self.config = config.check()
        self.x_embedder, self.t_embedder = PatchEmbed(config), TimestepEmbedder(config)
        if config.class_cond:
            self.y_embedder = LabelEmbedder(config)
        self.register_buffer("pos_embed", positions(config.side(), config.hidden_size))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_layer = FinalLayer(config, config.patch_size**2 * (config.in_channels << config.learn_sigma))

    def forward(self, x, t, y=None):
        if (y is None) == self.config.class_cond:
            raise ValueError("y, the classes of the images, goes with class_cond, and only with it")
        side, size = self.config.side(), self.config.patch_size
        c = self.t_embedder(t)
        if y is not None:
            c = c + self.y_embedder(y)
        x = self.x_embedder(x) + self.pos_embed
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c).unflatten(2, (size, size, -1)).unflatten(1, (side, side))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)  # (B, C, row, y, column, x)


def init_weights(model, seed):
    """Initialise as the authors do, with the numbers of stream INIT, as ./train_dit does."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        shape, count = tuple(parameter.shape), parameter.numel()
        inputs = count // shape[0]
        value = np.zeros(shape, np.float32)
        if "embedding_table" in name or name.startswith("t_embedder") and parameter.ndim > 1:
            value = unet_io.normals(seed, Stream.INIT, count, index).reshape(shape) * np.float32(0.02)
        elif parameter.ndim > 1 and "adaLN" not in name and not name.startswith("final_layer"):
            scale = np.float32((6 * inputs / (inputs + shape[0])) ** 0.5)  # Glorot and Bengio 2010
            value = unet_io.init_uniform(seed, index, shape, inputs) * scale
        parameter.data.copy_(torch.from_numpy(value))
    return model


# ----------------------------------------------------------------------------------------------------
# files

def load_model(path, use_ema=None, overrides=None):
    """(DiT, Checkpoint) from a .bin of ./train_dit; the rest as in train_unet.load_model. Raises UserError."""
    checkpoint = unet_io.read_checkpoint(path, Config)
    train_unet.refuse_contradictions(overrides or {}, checkpoint.config, path)
    flat = train_unet.chosen_weights(checkpoint, use_ema, path)
    model = DiT(checkpoint.config)
    train_unet.set_tensors(model, model.parameters(), flat, path)
    return model.eval(), checkpoint


def save_model(path, model, config):
    """Write a model's weights as a .bin for ./train_dit --model_weights."""
    weights = train_unet.to_numpy(model.parameters())
    unet_io.write_checkpoint(path, Checkpoint(config, {"weights": weights}))


def ratio_of(width, inner):
    """The mlp_ratio, a float32, of an MLP of `inner` channels: its product with the width is cut to whole ones."""
    ratio = np.float32(inner / width)
    return float(ratio if int(np.float32(width) * ratio) == inner else np.nextafter(ratio, np.float32(np.inf)))


UNTOLD = (*train_unet.DIFFUSION, "max_period", "rescale_timesteps", "cond_drop_prob")  # by a state dict


def from_official(state, num_heads=0, path="this", num_classes=0, **told):
    """(DiT, Config) from a state dict of the authors' program; num_heads is needed for sizes not theirs.

    num_classes, where it is known: then there may be no row for no class. told: values of UNTOLD; otherwise, as the
    authors' models, a tenth of the classes were hidden, and in 1000 timesteps, linear, it predicts the noise.
    Raises UserError where it is none.
    """
    try:
        width, channels, size, _ = state["x_embedder.proj.weight"].shape
        outputs, tokens = len(state["final_layer.linear.bias"]) // size**2, state["pos_embed"].shape[1]
        depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
        rows = len(state.get("y_embedder.embedding_table.weight", ()))
        hidden = rows > 0 and told.get("cond_drop_prob", rows != num_classes) > 0
        config = Config(image_size=int(tokens**0.5) * size, in_channels=channels, hidden_size=width, patch_size=size,
                        depth=depth, mlp_ratio=ratio_of(width, len(state["blocks.0.mlp.fc1.bias"])),
                        num_heads=num_heads or HEADS.get(width, 0), learn_sigma=outputs == 2 * channels,
                        class_cond=rows > 0, num_classes=rows - hidden, **dict(cond_drop_prob=0.1 * hidden) | told)
    except KeyError as error:
        raise UserError(f"{path} is no state dict of a DiT: {error.args[0]} is missing") from None
    except (ValueError, IndexError, ZeroDivisionError):
        raise UserError(f"{path} is no state dict of a DiT: its first layer or its positions have another"
                        f" shape") from None
    if not config.num_heads:
        raise UserError(f"{path} is of a size that is not the paper's, and so tells no heads: say them with --num_heads")
    config.check(path)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in DiT(config).state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            raise UserError(f"{path} is no state dict of a DiT: {name} is {found.get(name, 'missing')} there and"
                            f" {expected.get(name, 'nothing')} in such a model")
    model = DiT(config)
    if not same_to_rounding(state["pos_embed"], model.pos_embed):
        raise UserError(f"{path}: this DiT's pos_embed are not the sines and cosines that ./train_dit has")
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path} holds NaN or infinity in {name}: its training had gone wrong")
    model.load_state_dict(state | dict(pos_embed=model.pos_embed))
    return model, config


def same_to_rounding(stored, exact):
    """Whether a tensor holds these float32 numbers, as they are or rounded to the precision that it is stored in,
    or was before it was widened."""
    stored = stored.float()
    kinds = [kind for kind in (torch.float32, torch.bfloat16, torch.float16)
             if torch.equal(stored, stored.to(kind).float())]
    return any(torch.allclose(stored, exact, rtol=torch.finfo(kind).eps / 2, atol=1e-5) for kind in kinds)


def main():
    parser = unet_io.Parser(may_be_empty=(), description=__doc__)
    parser.add_argument("--import", dest="source", default="", help="a .pt or .safetensors of the authors' program")
    parser.add_argument("--export", default="", help="a .bin of ./train_dit")
    parser.add_argument("--use_ema", type=int, choices=range(5), default=1,
                        help="which of the averaged weights, where the file has any; 0: the raw weights (default: 1)")
    parser.add_argument("--num_heads", type=int, default=0, help="of --import, for sizes that are not the paper's")
    parser.add_argument("--output_name", required=True, help="what is written: of --import a .bin, of --export a .pt")
    kinds = {bool: unet_io.parse_bool}
    for field in dataclasses.fields(Config):
        if field.name in UNTOLD:
            parser.add_argument(f"--{field.name}", type=kinds.get(field.type, field.type), choices=field.metadata["choices"],
                                help=f"of --import: {field.metadata['help']}")
    args = parser.parse_args()
    if bool(args.source) == bool(args.export):
        raise UserError("--import a .pt or --export a .bin")
    ending = ".pt" if args.export else ".bin"
    if not args.output_name.endswith(ending):
        raise UserError(f"--output_name {args.output_name} must end in {ending}, which is what is written")
    if os.path.realpath(args.output_name) == os.path.realpath(args.source or args.export):
        raise UserError(f"--output_name {args.output_name} is the file that the weights come from: name another")
    unet_io.check_target(args.output_name)
    unet_io.check_kept(args.output_name, "output_name", "images", "a checkpoint of a run")
    told = {name: getattr(args, name) for name in UNTOLD if getattr(args, name) is not None}
    if args.export:
        if told or args.num_heads:
            raise UserError(f"--{[*told, 'num_heads'][0]} goes with --import: {args.export} tells it")
        model, checkpoint = load_model(args.export, args.use_ema)
        averaged = args.use_ema and "ema" in checkpoint.sections
        convert.save_pickle(args.output_name, model.state_dict())
    else:
        model, averaged = import_official(args.source, args.output_name, args.use_ema, args.num_heads, told)
    unsaid = [f"{name} {getattr(model.config, name)}" for name in UNTOLD]
    if args.export:
        unet_io.say(f"a state dict does not tell num_heads {model.config.num_heads}, {', '.join(unsaid)}: to --import it"
                    f" again, say what differs from {', '.join(f'{name} {getattr(Config(), name)}' for name in UNTOLD[:-1])}")
    else:
        convert.note_assumed(args.source, [text for text in unsaid if text.split()[0] not in told])
    count = sum(p.numel() for p in model.parameters())
    unet_io.say(f"{args.output_name}: {count:,} parameters{', averaged' * bool(averaged)},"
                f" {os.path.getsize(args.output_name):,} bytes")


def import_official(source, target, use_ema, num_heads, told):
    """Write a .bin of a checkpoint of the authors' program, or of its weights alone; (DiT, whether they are averaged)."""
    loaded, _ = convert.read_tensors(source)
    state, averaged = convert.take_network(source, loaded, use_ema)
    convert.check_tensors(source, state)
    arguments = loaded.get("args")
    num_classes = getattr(arguments, "num_classes", 0) if isinstance(arguments, argparse.Namespace) else 0
    model, config = from_official(state, num_heads, source, num_classes, **told)
    save_model(target, model, config)
    return model, averaged


if __name__ == "__main__":
    unet_io.run_script(main)
