"""The PyTorch twin of train_dit.cu: the Diffusion Transformer of Peebles and Xie 2022, "Scalable Diffusion Models with
Transformers", with the names of its authors' program, whose weights it makes .bin files of.

    python dev/train_dit.py --import DiT-XL-2-256x256.pt --output_name dit_xl.bin    for ./train_dit --model_weights
    python dev/train_dit.py --export out/checkpoint_00020000.bin --output_name X.pt  and back, the averaged weights

Diffusion, batches and training steps are those of train_unet.py, whose Trainer and sample take this model as well.

Shapes: B images, C channels, D = hidden_size, P = patch_size, T tokens an image.
"""
import dataclasses
import os
import pathlib
import pickle
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import unet_io  # first, because it explains a missing package

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

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
    magic = 0x00546944  # the bytes "DiT"
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
    ours = [("image_size", int, unet_io._setting(32, 16, "height and width of the images, in pixels", low=4, high=1024)),
            ("depth", int, unet_io._setting(12, 119, "transformer blocks", low=1, high=1000)),
            ("hidden_size", int, unet_io._setting(384, 120, "channels of a token", low=8, high=8192)),
            ("patch_size", int, unet_io._setting(2, 121, "pixels a token is high and wide", low=1, high=64)),
            ("mlp_ratio", float, unet_io._setting(4.0, 122, "width of an MLP by hidden_size", low=0.125, high=64)),
            ("num_heads", int, unet_io._setting(6, 111, "heads of every attention", low=1, high=1024))]
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

def load_model(path, use_ema=1, overrides=None):
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


def from_official(state, num_heads=0):
    """(DiT, Config) from a state dict of the authors' program; num_heads is needed for sizes not theirs.

    Their models know classes, a tenth of which were hidden; in 1000 timesteps, linear, they predict the noise.
    Raises UserError where it is none.
    """
    try:
        width, channels, size, _ = state["x_embedder.proj.weight"].shape
        outputs, tokens = len(state["final_layer.linear.bias"]) // size**2, state["pos_embed"].shape[1]
        depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
        config = Config(image_size=int(tokens**0.5) * size, in_channels=channels, hidden_size=width, patch_size=size,
                        depth=depth, mlp_ratio=len(state["blocks.0.mlp.fc1.bias"]) / width,
                        num_heads=num_heads or HEADS.get(width, 0), learn_sigma=outputs == 2 * channels,
                        class_cond=True, num_classes=len(state["y_embedder.embedding_table.weight"]) - 1,
                        cond_drop_prob=0.1)
        model = DiT(config)
        different = [name for name, tensor in model.state_dict().items() if state[name].shape != tensor.shape]
        unknown = state.keys() - model.state_dict().keys()
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(f"this is no state dict of a DiT: {error}") from None
    if different or unknown:
        raise UserError(f"this is no state dict of a DiT: {sorted([*different, *unknown])[0]} does not fit")
    if not torch.allclose(state["pos_embed"].float(), model.pos_embed, atol=1e-5):
        raise UserError("this DiT's pos_embed are not the sines and cosines that ./train_dit has")
    model.load_state_dict(state)
    return model, config


def main():
    parser = unet_io.Parser(description=__doc__)
    parser.add_argument("--import", dest="source", default="", help="a .pt of the authors' program")
    parser.add_argument("--export", default="", help="a .bin of ./train_dit")
    parser.add_argument("--num_heads", type=int, default=0, help="of --import, for sizes that are not the paper's")
    parser.add_argument("--output_name", required=True, help="what is written: of --import a .bin, of --export a .pt")
    args = parser.parse_args()
    if bool(args.source) == bool(args.export):
        raise UserError("--import a .pt or --export a .bin")
    unet_io.check_target(args.output_name)
    if args.export:
        model, _ = load_model(args.export)
        with unet_io.replacing(args.output_name) as file:
            torch.save(model.state_dict(), file)
    else:
        try:
            state = torch.load(args.source, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
            raise UserError(f"{args.source} can't be read: {str(error).splitlines()[0]}") from None
        if not isinstance(state, dict):
            raise UserError(f"{args.source} holds no state dict")
        model, config = from_official(state.get("ema", state), args.num_heads)
        save_model(args.output_name, model, config)
    count = sum(p.numel() for p in model.parameters())
    unet_io.say(f"{args.output_name}: {count:,} parameters, {os.path.getsize(args.output_name):,} bytes")


if __name__ == "__main__":
    unet_io.run_script(main)
