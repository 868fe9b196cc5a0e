"""The layers of train_unet.cu as operators of PyTorch: for any model, with gradients, for torch.compile too.

    import sys; sys.path.insert(0, ".../dev")
    from torch_ops import AdamW, attention, conv3x3, group_norm_silu

    h = conv3x3(group_norm_silu(x, 32, norm.weight, norm.bias), conv.weight, conv.bias)

The first import builds them, which takes one to three minutes, into build/torch_ops/; later ones find them there. They
run on a CPU in float32, and on GPUs from Ampere on (one kind in a process) in bfloat16 and float32. It takes a C++20
compiler and ninja, for GPUs also nvcc; what is missing is said.

Images are (B, C, H, W). They are computed, and come out, in torch.channels_last: a tensor that is not is converted, so
let the model be, x.to(memory_format=torch.channels_last). Weights may be float32 where the images are bfloat16, as under
torch.autocast; their gradients then are float32 too, never rounded. Second derivatives are not there.

    conv3x3, conv1x1, linear, group_norm, group_norm_silu, norm_conv3x3 (the two in one), attention, upsample,
    downsample, timestep_embedding, gelu
    AdamW      the optimiser, an update in a handful of launches

How it is made: torch_ops.h says what the files are for, dev/README.md follows one operator through them.
"""
import concurrent.futures
import os
import pathlib
import sys

import torch
from torch.utils import cpp_extension

HERE = pathlib.Path(__file__).resolve().parent


# ----------------------------------------------------------------------------------------------------
# building

# As in the Makefile above.
CXX_FLAGS = ["-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden",
             "-Wno-unused-function", "-Wno-deprecated-enum-enum-conversion", "-Wno-deprecated-enum-float-conversion"]
NVCC_FLAGS = ["-std=c++20", "-O3", "-diag-suppress", "177", "-Xcompiler", "-fvisibility=hidden",
              "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]  # which cpp_extension defines

# A compiler that links the C++ library statically would give each of ours a copy beside PyTorch's, and streams and
# exceptions go from one to another.
SHARED_LIBRARY = ["-l:libstdc++.so.6"]


def gpu_architecture():
    """The GPU's compute capability times 10, or 0 where there is no GPU, or no nvcc to build for it."""
    if not torch.cuda.is_available() or cpp_extension.CUDA_HOME is None:
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor if major >= 8 else 0


def build():
    """Compile what is not compiled yet, and load it: torch.ops.train_unet. Returns whether it serves GPUs."""
    architecture = gpu_architecture()
    folder = HERE.parent / "build/torch_ops" / f"{torch.__version__}-{architecture or 'cpu'}"
    # pip's ninja lies beside python, which need not be on the PATH
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable)])

    def load(name, sources, cflags, nvcc_flags=(), ldflags=()):
        """Build the library build/.../NAME/NAME.so; returns its path."""
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        cpp_extension.load(name, [str(source) for source in sources], cflags, list(nvcc_flags),
                           extra_ldflags=[*ldflags, *SHARED_LIBRARY], build_directory=str(place), is_python_module=False,
                           with_cuda=bool(architecture))
        return place / f"{name}.so"

    def load_gpu(name):
        """Of a GPU's two: torch_ops.cu in bf16 or fp32."""
        more = ["-DPRECISION_FP32"] if name == "fp32" else ["-DHOPPER"] if architecture == 90 else []
        return load(f"torch_ops_{name}", [HERE / "torch_ops.cu"], [], [*NVCC_FLAGS, *target, *more])

    # as the Makefile's gencode
    target = ["-gencode", "arch=compute_90a,code=sm_90a" if architecture == 90 else
              "arch=compute_90,code=compute_90" if architecture > 90 else
              f"arch=compute_{architecture},code=sm_{architecture}"]

    libraries, flags = [], [*CXX_FLAGS]
    if architecture:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            libraries = [str(path) for path in pool.map(load_gpu, ("bf16", "fp32"))]
        flags.append("-DWITH_CUDA")
    # the same file for the CPU, under a name that cpp_extension does not give to nvcc
    folder.mkdir(parents=True, exist_ok=True)
    cpu, line = folder / "torch_ops_cpu.cpp", f'#include "{HERE}/torch_ops.cu"\n'
    if not cpu.exists() or cpu.read_text() != line:
        cpu.write_text(line)
    load("torch_ops", [HERE / "torch_ops.cpp", cpu], [*flags, "-fopenmp"], target, [*libraries, "-fopenmp"])
    return bool(architecture)


ON_GPU = build()
ops = torch.ops.train_unet


# ----------------------------------------------------------------------------------------------------
# the shapes of outputs, for torch.compile; gradients

def images_like(x, channels, height=None, width=None):
    """An uninitialised (B, channels, H, W) of x's type and device, in channels_last, as all images come out."""
    B, _, H, W = x.shape
    return torch.empty((B, channels, H if height is None else height, W if width is None else width), dtype=x.dtype,
                       device=x.device, memory_format=torch.channels_last)


def floats(like, *shape):
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def cast_like(w, x):
    """A product's weight as it was rounded to x's type, or where that was its own an empty tensor."""
    if w.dtype == x.dtype:
        return torch.empty(0, dtype=x.dtype, device=x.device)
    layout = torch.channels_last if w.ndim == 4 else torch.contiguous_format
    return torch.empty(w.shape, dtype=x.dtype, device=x.device, memory_format=layout)


def fake(name):
    return torch.library.register_fake(f"train_unet::{name}")


def differentiable(name, setup_context, backward):
    """Give an operator its gradient, from operators that have none themselves."""
    torch.library.register_autograd(f"train_unet::{name}", backward, setup_context=setup_context)


def not_twice(name):
    """Of an operator that computes gradients: asked for its own, it says so."""
    def refuse(ctx, *_):
        raise RuntimeError(f"{name}: second derivatives are not implemented")
    torch.library.register_autograd(f"train_unet::{name}", refuse)


# conv3x3 and conv1x1

def register_convolution(name, taps):
    dinput, dweight = (getattr(ops, f"{name}_{of}_gradient") for of in ("input", "weight"))

    @fake(name)
    def _(x, w, bias, *more):
        return images_like(x, w.shape[0]), cast_like(w, x)

    @fake(f"{name}_input_gradient")
    def _(dout, w):
        return images_like(dout, w.shape[1])

    @fake(f"{name}_weight_gradient")
    def _(dout, x, per_image=False):
        (B, O), C = dout.shape[:2], x.shape[1]
        dw = floats(x, O, C, *[3, 3][:taps - 1])
        if taps == 1:
            return dw, floats(x, O)
        dw = torch.empty_like(dw, memory_format=torch.channels_last)
        return dw, floats(x, O), torch.empty((B if per_image else 0, O), dtype=x.dtype, device=x.device)

    def setup(ctx, inputs, output):
        x, w, bias, *_ = inputs  # emb and residual, or residual alone
        _, cast = output
        ctx.save_for_backward(x, w if w.dtype == x.dtype else cast)
        ctx.types = w.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(cast)
        ctx.set_materialize_grads(False)

    def backward(ctx, dout, _):
        (x, w), needed = ctx.saved_tensors, ctx.needs_input_grad
        w_type, bias_type = ctx.types
        if dout is None:
            return (None,) * (4 + (taps == 9))
        dx = dinput(dout, w) if needed[0] else None
        dw = dbias = demb = None
        if taps == 9 and any(needed[1:4]):
            dw, dbias, demb = dweight(dout, x, needed[3])
        elif any(needed[1:3]):
            dw, dbias = dweight(dout, x)
        gradients = (dx, dw.to(w_type) if needed[1] else None, dbias.to(bias_type) if needed[2] else None)
        if taps == 9:
            gradients += (demb if needed[3] else None,)
        return (*gradients, dout if needed[-1] else None)

    differentiable(name, setup, backward)
    not_twice(f"{name}_input_gradient")
    not_twice(f"{name}_weight_gradient")


register_convolution("conv3x3", 9)
register_convolution("conv1x1", 1)


# group norm

@fake("group_norm")
def _(x, w, bias, groups, silu, scale_shift):
    return images_like(x, x.shape[1]), floats(x, 2, x.shape[0], x.shape[1], 2)


@fake("group_norm_backward")
def _(dout, x, w, bias, record, groups, silu, scale_shift):
    B, C = x.shape[:2]
    rows = torch.empty((0 if scale_shift is None else B, 2 * C), dtype=x.dtype, device=x.device)
    return images_like(x, C), floats(x, C), floats(x, C), rows


def setup_norm(ctx, inputs, output):
    x, w, bias, ctx.groups, ctx.silu, scale_shift = inputs
    ctx.save_for_backward(x, w, bias, scale_shift, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def norm_backward(ctx, dout, _):
    x, w, bias, scale_shift, record = ctx.saved_tensors
    if dout is None:
        return (None,) * 6
    dx, dw, dbias, rows = ops.group_norm_backward(dout, x, w, bias, record, ctx.groups, ctx.silu, scale_shift)
    return dx, dw.to(w.dtype), dbias.to(bias.dtype), None, None, None if scale_shift is None else rows


differentiable("group_norm", setup_norm, norm_backward)
not_twice("group_norm_backward")


# conv3x3 of group_norm with SiLU

@fake("norm_conv3x3")
def _(x, norm_w, norm_bias, groups, scale_shift, w, bias, emb, residual):
    return images_like(x, w.shape[0]), floats(x, 2, x.shape[0], x.shape[1], 2), cast_like(w, x)


@fake("norm_conv3x3_backward")
def _(dout, x, norm_w, norm_bias, record, groups, scale_shift, w, per_image):
    (B, C), O = x.shape[:2], w.shape[0]
    rows, demb = (torch.empty(shape, dtype=x.dtype, device=x.device) for shape in (
        (0 if scale_shift is None else B, 2 * C), (B if per_image else 0, O)))
    dw = torch.empty_like(floats(x, O, C, 3, 3), memory_format=torch.channels_last)
    return images_like(x, C), floats(x, C), floats(x, C), rows, dw, floats(x, O), demb


def setup_norm_conv(ctx, inputs, output):
    x, norm_w, norm_bias, ctx.groups, scale_shift, w, bias, _, _ = inputs
    _, record, cast = output
    ctx.save_for_backward(x, norm_w, norm_bias, scale_shift, w if w.dtype == x.dtype else cast, record)
    ctx.types = w.dtype, None if bias is None else bias.dtype
    ctx.mark_non_differentiable(record, cast)
    ctx.set_materialize_grads(False)


def norm_conv_backward(ctx, dout, *_):
    if dout is None:
        return (None,) * 9
    x, norm_w, norm_bias, scale_shift, w, record = ctx.saved_tensors
    *_, wants_bias, wants_emb, wants_residual = ctx.needs_input_grad
    dx, dnorm_w, dnorm_bias, rows, dw, dbias, demb = ops.norm_conv3x3_backward(
        dout, x, norm_w, norm_bias, record, ctx.groups, scale_shift, w, wants_emb)
    return (dx, dnorm_w.to(norm_w.dtype), dnorm_bias.to(norm_bias.dtype), None,
            None if scale_shift is None else rows, dw.to(ctx.types[0]),
            dbias.to(ctx.types[1]) if wants_bias else None, demb if wants_emb else None,
            dout if wants_residual else None)


differentiable("norm_conv3x3", setup_norm_conv, norm_conv_backward)
not_twice("norm_conv3x3_backward")


# attention

@fake("attention")
def _(qkv, heads):
    B, C, H, W = qkv.shape
    return images_like(qkv, C // 3), floats(qkv, B, heads, H * W)


@fake("attention_backward")
def _(dout, out, lse, qkv, heads):
    return images_like(qkv, qkv.shape[1])


def setup_attention(ctx, inputs, output):
    qkv, ctx.heads = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def attention_gradient(ctx, dout, _):
    qkv, out, lse = ctx.saved_tensors
    return None if dout is None else ops.attention_backward(dout, out, lse, qkv, ctx.heads), None


differentiable("attention", setup_attention, attention_gradient)
not_twice("attention_backward")


# resampling, whose gradient is resampling the other way

@fake("resample")
def _(x, up, factor):
    H, W = x.shape[2:]
    return images_like(x, x.shape[1], *((2 * H, 2 * W) if up else (H // 2, W // 2)))


def setup_resample(ctx, inputs, output):
    _, ctx.up, ctx.factor = inputs


differentiable("resample", setup_resample, lambda ctx, dout: (ops.resample(dout, not ctx.up, ctx.factor), None, None))


# the rest

@fake("timestep_embedding")
def _(t, width, max_period, unit, dtype):
    return torch.empty((t.shape[0], width), dtype=dtype, device=t.device)


@fake("gelu")
def _(x):
    return torch.empty_like(x)


@fake("gelu_backward")
def _(dout, x):
    return torch.empty_like(x)


differentiable("gelu", lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
               lambda ctx, dout: ops.gelu_backward(dout, *ctx.saved_tensors))
not_twice("gelu_backward")


@fake("adamw_")
def _(params, gradients, m, v, step, lr, beta1, beta2, eps, weight_decay):
    return None


# ----------------------------------------------------------------------------------------------------
# the operators, as they are called

def conv3x3(x, weight, bias=None, emb=None, residual=None):
    """F.conv2d(x, weight, bias, padding=1) + emb[:, :, None, None] + residual: x (B, C, H, W), weight (O, C, 3, 3),
    bias (O,), emb (B, O), residual (B, O, H, W) -> (B, O, H, W)."""
    return ops.conv3x3(x, weight, bias, emb, residual)[0]


def conv1x1(x, weight, bias=None, residual=None):
    """F.conv2d(x, weight, bias) + residual: x (B, C, H, W), weight (O, C), or with further dimensions of 1, bias (O,),
    residual (B, O, H, W) -> (B, O, H, W)."""
    return ops.conv1x1(x, weight.flatten(1), bias, residual)[0]


def linear(x, weight, bias=None):
    """F.linear(x, weight, bias): x (..., C), weight (O, C), bias (O,) -> (..., O)."""
    rows = x.reshape(-1, x.shape[-1])[:, :, None, None]
    return ops.conv1x1(rows, weight, bias, None)[0].reshape(*x.shape[:-1], weight.shape[0])


def group_norm(x, groups, weight, bias, silu=False, scale_shift=None):
    """F.group_norm(x, groups, weight, bias, eps=1e-5); with scale_shift (B, 2C) times 1 + its first half, plus its
    second; then with silu F.silu: x (B, C, H, W), weight and bias (C,) -> (B, C, H, W).

    On a GPU C is a multiple of 32.
    """
    return ops.group_norm(x, weight, bias, groups, silu, scale_shift)[0]


def group_norm_silu(x, groups, weight, bias, scale_shift=None):
    """F.silu(F.group_norm(x, groups, weight, bias)), see group_norm."""
    return group_norm(x, groups, weight, bias, True, scale_shift)


def norm_conv3x3(x, groups, norm_weight, norm_bias, weight, bias=None, emb=None, residual=None, scale_shift=None):
    """conv3x3(group_norm_silu(x, groups, norm_weight, norm_bias, scale_shift), weight, bias, emb, residual), faster and
    in less memory: what lies between the two is not kept, and on a Hopper GPU mostly not written."""
    return ops.norm_conv3x3(x, norm_weight, norm_bias, groups, scale_shift, weight, bias, emb, residual)[0]


def attention(qkv, heads):
    """F.scaled_dot_product_attention over the pixels: qkv (B, 3C, H, W), all of q, then k, then v, the heads inside each
    -> (B, C, H, W). On a GPU heads have multiples of 16 channels, up to 256."""
    return ops.attention(qkv, heads)[0]


def upsample(x):
    """F.interpolate(x, scale_factor=2, mode="nearest"): (B, C, H, W) -> (B, C, 2H, 2W)."""
    return ops.resample(x, True, 1.0)


def downsample(x):
    """F.avg_pool2d(x, 2): (B, C, H, W), H and W even -> (B, C, H/2, W/2)."""
    return ops.resample(x, False, 0.25)


def timestep_embedding(t, width, max_period=10000, unit=1.0, dtype=torch.float32):
    """Cosines, then sines, of unit * t * max_period^(-i / (width/2)): t (B,), integers -> (B, width) of this type."""
    return ops.timestep_embedding(t, width, max_period, unit, dtype)


def gelu(x):
    """F.gelu(x, approximate="tanh")."""
    return ops.gelu(x)


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW (Loshchilov and Hutter 2019) of float32 parameters, 64 tensors a launch.

    Its state dict is that of torch.optim.AdamW. The count of updates is on the parameters' device, so that a CUDA graph
    can replay an update; lr then is what it was when the graph was captured.
    """
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"AdamW: lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        """One update of the parameters that have a gradient; returns closure()'s loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for step, params in self._by_step(group["params"]):
                states = [self.state[p] for p in params]
                ops.adamw_(params, [p.grad for p in params], [state["exp_avg"] for state in states],
                           [state["exp_avg_sq"] for state in states], step, group["lr"], *group["betas"], group["eps"],
                           group["weight_decay"])
        return loss

    def _by_step(self, params):
        """[(step, parameters)]: those that have a gradient, by device and by the count of updates that they share."""
        new, shared, missing = {}, {}, set()
        for p in params:
            state = self.state[p]
            if p.grad is None:
                missing |= {id(state["step"])} if state else set()
                continue
            if not state:
                if p.device not in new:
                    new[p.device] = torch.zeros((), dtype=torch.float32, device=p.device)
                state.update(step=new[p.device], exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            shared.setdefault(id(state["step"]), []).append(p)
        lists = []
        for key, members in shared.items():
            step = self.state[members[0]]["step"]
            if key in missing or step.device != members[0].device:  # who sits out keeps the old count
                step = step.to(members[0].device, torch.float32, copy=True)
                for p in members:
                    self.state[p]["step"] = step
            lists.append((step, members))
        return lists

    def state_dict(self):
        """As torch.optim.AdamW's: each parameter has a count of its own, on the CPU."""
        found = super().state_dict()
        found["state"] = {key: state | dict(step=state["step"].to("cpu", copy=True))
                          for key, state in found["state"].items()}
        return found

    def load_state_dict(self, state_dict):
        """Counts that are equal, which were loaded as a tensor for each parameter, become one again; moments get the
        order in memory of their parameters."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            counts = {}
            for p in group["params"]:
                if state := self.state.get(p):
                    step = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)
                    state["step"] = counts.setdefault((p.device, float(step)), step)
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.empty_like(p).copy_(state[name])
