"""The layers of train_unet.cu as operators of PyTorch: for any model, with gradients, for torch.compile too.

    import sys; sys.path.insert(0, ".../dev/torch_ops")
    from torch_ops import AdamW, attention, conv3x3, group_norm_silu

    h = conv3x3(group_norm_silu(x, 32, norm.weight, norm.bias), conv.weight, conv.bias)

The first import builds them, which takes one to three minutes, into a folder of build/torch_ops/ (or of the folder that
TORCH_EXTENSIONS_DIR names) for this PyTorch, GPU and processor; later ones find them there, and need neither a compiler
nor the right to write. They run on a CPU in float32, and on GPUs from Ampere on (one kind in a process) in bfloat16 and
float32. It takes a C++20 compiler and ninja, for GPUs also nvcc; what is missing is said.

Images are (B, C, H, W). They are computed, and come out, in torch.channels_last: a tensor that is not is converted, so
let the model be, x.to(memory_format=torch.channels_last). Weights may be float32 where the images are bfloat16, as under
torch.autocast; their gradients then are float32 too, never rounded.

torch.func.grad, vjp, jacrev and vmap go through all of them (vmap one image at a time). Forward-mode derivatives
(torch.func.jvp, jacfwd, dual tensors) go through conv3x3, conv1x1, linear, upsample, downsample and gelu, and through
the gradients of all of these but gelu; the others refuse them. Second derivatives by reverse mode are refused, but for
upsample and downsample.

    conv3x3, conv1x1, linear, group_norm, group_norm_silu, norm_conv3x3 (the two in one), attention, upsample,
    downsample, timestep_embedding, gelu
    AdamW      the optimiser, an update in a handful of launches

How it is made: torch_ops.h says what the files are for, README.md beside it follows one operator through them.
"""
import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import math
import os
import pathlib
import platform
import sys

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils import cpp_extension

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAM = ("train_unet.cu", "unet_io.h", "unet_cpu.h")  # which the operators are made of


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


def processor():
    """A name of what this machine's processor can do, for which -march=native compiles and which another may not."""
    flags = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    words = " ".join(sorted(flags.partition(":")[2].split()))
    return f"{platform.machine()}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"


def contents(folder, architecture):
    """What the libraries in the folder are made of: a hash of the sources, the flags, the compiler and the place."""
    found = hashlib.sha256()
    made_of = [CXX_FLAGS, NVCC_FLAGS, os.environ.get("CXX", "c++"), architecture, HERE, folder]
    found.update(repr(list(map(str, made_of))).encode())
    for source in (*(ROOT / name for name in PROGRAM), *sorted(HERE.glob("torch_ops.[ch]*")), ROOT / "dev/dit/gelu.h"):
        found.update(source.read_bytes())
    return found.hexdigest()


@contextlib.contextmanager
def alone_in(folder):
    """While other processes wait that build there too. The system releases the lock of one that is killed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "building", "w")
    except OSError as error:
        raise OSError(f"the operators of dev/torch_ops/torch_ops.py are not built yet for this machine, and {folder} can't be"
                      f" written: {error.strerror}; set TORCH_EXTENSIONS_DIR to a folder that can") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for lock in folder.glob("*/lock"):  # of a process that was killed: some versions of PyTorch wait for it for ever
            lock.unlink()
        yield


def build():
    """Load torch.ops.train_unet, and before that compile what is not compiled yet. Returns whether it serves GPUs."""
    architecture = gpu_architecture()
    place = os.environ.get("TORCH_EXTENSIONS_DIR", ROOT / "build")
    folder = pathlib.Path(place).absolute() / "torch_ops"
    folder /= f"{torch.__version__}-{architecture or 'cpu'}-{processor()}"
    built, wanted = folder / "built", contents(folder, architecture)

    def is_built():
        return built.exists() and built.read_text() == wanted

    if not is_built():
        with alone_in(folder):
            if not is_built():  # by the one that we waited for
                compile_into(folder, architecture)
                built.write_text(wanted)
    torch.ops.load_library(str(folder / "torch_ops/torch_ops.so"))
    return bool(architecture)


def compile_into(folder, architecture):
    """Make folder/torch_ops/torch_ops.so, and the libraries for a GPU of this architecture that it loads."""
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
    cpu, line = folder / "torch_ops_cpu.cpp", f'#include "{HERE}/torch_ops.cu"\n'
    if not cpu.exists() or cpu.read_text() != line:
        cpu.write_text(line)
    load("torch_ops", [HERE / "torch_ops.cpp", cpu], [*flags, "-fopenmp-simd"], target, libraries)


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
    """Register a function as what makes an operator's outputs without numbers, of tensors that have none."""
    def register(function):
        @functools.wraps(function)
        def checked(*inputs):
            lists = [value if isinstance(value, (list, tuple)) else [value] for value in inputs]
            devices = {t.device for values in lists for t in values if torch.is_tensor(t)}
            if len(devices) > 1:  # or one on "meta" would have another's output be made, and never computed
                raise RuntimeError(f"{name}: its tensors are on {' and '.join(sorted(map(str, devices)))}")
            return function(*inputs)
        return torch.library.register_fake(f"train_unet::{name}")(checked)
    return register


LIBRARY = torch.library.Library("train_unet", "IMPL")  # what is registered below stays while this does


def differentiable(name, setup_context, backward, jvp=None):
    """Give an operator its gradient, from operators, and its derivative in forward mode.

    setup_context and backward are those of torch.autograd.Function. jvp(inputs, tangents): the tangent of the output,
    or of each output, None for one that has none; a tangent that is None is zero. Without jvp forward mode is refused.

    As torch.library.register_autograd does, but for the transforms of torch.func and for forward mode: there they are
    refused, or lose the tangent without a word. A transform calls this kernel once on each of its levels, with tensors
    of that level, and the operator's own kernel below is the next level's. So the Function is one of a single level.
    """
    op = getattr(ops, name).default

    class Derivative(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def forward(*inputs):
            *inputs, below, _ = inputs
            return below(*inputs)

        @staticmethod
        def setup_context(ctx, inputs, output):
            *inputs, _, ctx.transformed = inputs
            if ctx.transformed:
                ctx.others = [None if torch.is_tensor(value) else value for value in inputs]
                ctx.save_for_forward(*[value if torch.is_tensor(value) else None for value in inputs])
            setup_context(ctx, inputs, output)

        @staticmethod
        def backward(ctx, *gradients):
            return (*backward(ctx, *gradients), None, None)

        @staticmethod
        def jvp(ctx, *tangents):
            if jvp is None:
                raise NotImplementedError(f"{name} has no derivative in forward mode (torch.func.jvp, jacfwd, dual"
                                          f" tensors); use PyTorch's own operators where you need one")
            inputs = [other if t is None else t for t, other in zip(ctx.saved_tensors, ctx.others)]
            return jvp(inputs, tangents[:-2])

    Derivative.__name__ = Derivative.__qualname__ = name

    def kernel(keyset, *inputs):
        tensors = [value for value in inputs if torch.is_tensor(value)]
        in_transform = torch._C._are_functorch_transforms_active()
        gradients, tangents = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()

        def below(*inputs):
            with torch._C._AutoDispatchBelowAutograd(), contextlib.ExitStack() as stack:
                if in_transform:  # a Function turns off what the next levels go by
                    stack.enter_context(torch.set_grad_enabled(gradients))
                    stack.enter_context(forward_ad._set_fwd_grad_enabled(tangents))
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

        is_dual = tangents and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
        if in_transform or is_dual or gradients and any(t.requires_grad for t in tensors):
            with enable_single_level_autograd_function():
                return Derivative.apply(*inputs, below, in_transform or is_dual)
        return below(*inputs)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def not_twice(name, jvp=None):
    """Of an operator that computes gradients: asked for its own, it says so."""
    def refuse(ctx, *_):
        raise RuntimeError(f"{name}: second derivatives are not implemented")
    differentiable(name, lambda ctx, inputs, output: None, refuse, jvp)


def total(parts):
    """The sum of the tensors that are there."""
    return functools.reduce(torch.add, [part for part in parts if part is not None])


# conv3x3 and conv1x1

def register_convolution(name, taps):
    forward, dinput, dweight = (getattr(ops, name + of) for of in ("", "_input_gradient", "_weight_gradient"))

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
        ctx.save_for_backward(x, w if w.dtype == x.dtype or ctx.transformed else cast)  # a cast has no tangent
        ctx.types = w.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(cast)
        ctx.set_materialize_grads(False)

    def backward(ctx, dout, _):
        (x, w), needed = ctx.saved_tensors, ctx.needs_input_grad[:4 + (taps == 9)]
        w_type, bias_type = ctx.types
        if dout is None:
            return (None,) * len(needed)
        dx = dinput(dout, w.to(x.dtype)) if needed[0] else None
        dw = dbias = demb = None
        if taps == 9 and any(needed[1:4]):
            dw, dbias, demb = dweight(dout, x, needed[3])
        elif any(needed[1:3]):
            dw, dbias = dweight(dout, x)
        gradients = (dx, dw.to(w_type) if needed[1] else None, dbias.to(bias_type) if needed[2] else None)
        if taps == 9:
            gradients += (demb if needed[3] else None,)
        return (*gradients, dout if needed[-1] else None)

    # all three are linear in each of two tensors

    def forward_jvp(inputs, tangents):
        (x, w, *_), (tx, tw, *others) = inputs, tangents
        parts = [None if tw is None else forward(x, tw, *[None] * len(others))[0]]
        if tx is not None or any(t is not None for t in others):
            parts.append(forward(torch.zeros_like(x) if tx is None else tx, w, *others)[0])
        return total(parts), None

    def input_gradient_jvp(inputs, tangents):
        (dout, w), (tdout, tw) = inputs, tangents
        return total([None if tdout is None else dinput(tdout, w), None if tw is None else dinput(dout, tw)])

    def weight_gradient_jvp(inputs, tangents):
        (dout, x, *options), (tdout, tx, *_) = inputs, tangents
        of_dout = [None] * (2 + (taps == 9)) if tdout is None else dweight(tdout, x, *options)
        return total([of_dout[0], None if tx is None else dweight(dout, tx, *options)[0]]), *of_dout[1:]

    differentiable(name, setup, backward, forward_jvp)
    not_twice(f"{name}_input_gradient", input_gradient_jvp)
    not_twice(f"{name}_weight_gradient", weight_gradient_jvp)


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
    wants_bias, wants_emb, wants_residual = ctx.needs_input_grad[6:9]
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


def resample_gradient(ctx, dout):
    return ops.resample(dout, not ctx.up, ctx.factor), None, None


def resample_jvp(inputs, tangents):
    _, up, factor = inputs
    return ops.resample(tangents[0], up, factor)


differentiable("resample", setup_resample, resample_gradient, resample_jvp)


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


def setup_gelu(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def gelu_gradient(ctx, dout):
    return (ops.gelu_backward(dout, *ctx.saved_tensors),)


def gelu_jvp(inputs, tangents):
    return ops.gelu_backward(tangents[0], inputs[0])  # each number has its own derivative


differentiable("gelu", setup_gelu, gelu_gradient, gelu_jvp)
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

    Its state dict is that of torch.optim.AdamW. Its other options are refused where they would change the result. The
    count of updates is on the parameters' device, so that a CUDA graph can replay an update; lr then is what it was when
    the graph was captured.
    """
    # in a group, what torch.optim.AdamW and Adam know besides, and the values of it that are the same as here
    SAME = dict(amsgrad=False, maximize=False, differentiable=False, decoupled_weight_decay=True)

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._check_numbers(defaults)
        super().__init__(params, defaults)

    @staticmethod
    def _check_numbers(group):
        lr, betas, eps, weight_decay = (group.get(name) for name in ("lr", "betas", "eps", "weight_decay"))
        if None in (lr, eps, weight_decay) or betas is None or len(betas) != 2 or not (
                lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"AdamW: lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}")

    def _check_options(self, group):
        for name, same in self.SAME.items():
            if bool(group.get(name, same)) != same:
                raise ValueError(f"AdamW: {name}={group[name]} is not implemented here; torch.optim has it")

    def add_param_group(self, param_group):
        """As torch.optim.Optimizer does; what a group asks for and this optimiser does not do is refused."""
        self._check_options(param_group)
        self._check_numbers(self.defaults | param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        """One update of the parameters that have a gradient; returns closure()'s loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._check_options(group)  # which anyone may have changed
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

    def _check_state(self, state_dict):
        """Refuse a state dict of another optimiser, of other options or for other parameters."""
        for group in state_dict["param_groups"]:
            self._check_options(group)
            self._check_numbers(group)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        if len(numbers) != len(params):
            return  # which Optimizer.load_state_dict refuses
        for number, p in zip(numbers, params):
            state = state_dict["state"].get(number)
            if state is None:  # it was never updated
                continue
            if set(state) != {"step", "exp_avg", "exp_avg_sq"}:
                raise ValueError(f"AdamW: the state of parameter {number} holds {', '.join(map(str, state)) or 'nothing'};"
                                 f" needed are step, exp_avg and exp_avg_sq: it is of another optimiser")
            for name in ("exp_avg", "exp_avg_sq"):
                moment = state[name]
                if not torch.is_tensor(moment) or not moment.is_floating_point() or moment.shape != p.shape:
                    what = f"{moment.dtype} of shape {list(moment.shape)}" if torch.is_tensor(moment) else type(moment)
                    raise ValueError(f"AdamW: {name} of parameter {number} is {what}, and the parameter has shape"
                                     f" {list(p.shape)}")
            step = torch.as_tensor(state["step"])
            if step.numel() != 1 or step.is_complex() or not 0 <= float(step) < math.inf or float(step) % 1:
                raise ValueError(f"AdamW: step of parameter {number} is {state['step']}, which counts no updates")

    def load_state_dict(self, state_dict):
        """Counts that are equal, which were loaded as a tensor for each parameter, become one again; moments get the
        order in memory of their parameters."""
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            counts = {}
            for p in group["params"]:
                if state := self.state.get(p):
                    step = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device).reshape(())
                    state["step"] = counts.setdefault((p.device, float(step)), step)
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.empty_like(p).copy_(state[name])
