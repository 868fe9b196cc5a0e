"""The layers of train_unet.cu as operators of PyTorch: for any model, with gradients, for torch.compile too.

    import sys; sys.path.insert(0, ".../dev/torch_ops")
    from torch_ops import AdamW, attention, conv3x3, group_norm_silu

    h = conv3x3(group_norm_silu(x, 32, norm.weight, norm.bias), conv.weight, conv.bias)

    conv3x3, conv1x1, linear, group_norm, group_norm_silu, attention, upsample, downsample, timestep_embedding, gelu
    norm_conv3x3    group_norm_silu and conv3x3 in one
    AdamW           the optimiser, which updates in a handful of launches

The first import builds the operators, which takes one to three minutes. The result lies in a folder for this PyTorch,
GPU and processor, in build/torch_ops/ or in torch_ops/ of the folder that TORCH_EXTENSIONS_DIR names. Later imports
find it there, and need neither a compiler nor the right to write. Building takes a C++20 compiler and ninja, and nvcc
for a GPU; an error says what is missing. The operators run on a CPU in float32, and on GPUs from Ampere on in bfloat16
and float32. A process may use one kind of GPU.

Images are (B, C, H, W). Inputs are converted to torch.channels_last where they lie otherwise, and all outputs are
channels_last. So let the model be too: model.to(memory_format=torch.channels_last). Weights may be float32 where the
images are bfloat16, as under torch.autocast. Then their gradients are float32 too and never rounded.

torch.func.grad, vjp, jacrev and vmap go through all operators; vmap takes one image at a time. Forward-mode derivatives
(torch.func.jvp, jacfwd, dual tensors) go through conv3x3, conv1x1, linear, upsample, downsample and gelu, and through
the gradients of all of these but gelu. The other operators refuse them. Second derivatives by reverse mode are refused
by all but upsample and downsample.

torch_ops.h says what each file is for. README.md follows one operator through all of them.
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
PROGRAM = ("train_unet.cu", "unet_io.h", "unet_cpu.h")  # what torch_ops.cu includes


# ----------------------------------------------------------------------------------------------------
# building

# As in the Makefile at the root.
CXX_FLAGS = ["-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden",
             "-Wno-unused-function", "-Wno-deprecated-enum-enum-conversion", "-Wno-deprecated-enum-float-conversion"]
NVCC_FLAGS = ["-std=c++20", "-O3", "-diag-suppress", "177", "-Xcompiler", "-fvisibility=hidden",
              "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]  # cpp_extension defines it

# Exceptions and streams go from one of our libraries to another and to PyTorch's. So all must share one C++ library,
# also where the compiler would link a copy of it into each.
SHARED_LIBRARY = ["-l:libstdc++.so.6"]


def gpu_architecture():
    """The GPU's compute capability times 10, or 0 where there is no GPU from Ampere on, or no nvcc to build for it."""
    if not torch.cuda.is_available() or cpp_extension.CUDA_HOME is None:
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor if major >= 8 else 0


def processor():
    """A name of what this machine's processor can do, for which -march=native compiles: others may lack some of it."""
    flags = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    _, _, words = flags.partition(":")
    ordered = " ".join(sorted(words.split()))
    return f"{platform.machine()}-{hashlib.sha256(ordered.encode()).hexdigest()[:8]}"


def contents(folder, architecture):
    """What the libraries in the folder are made of: a hash of the sources, the flags, the compiler and the place."""
    settings = [CXX_FLAGS, NVCC_FLAGS, os.environ.get("CXX", "c++"), architecture, HERE, folder]
    sources = [ROOT / name for name in PROGRAM]
    sources += sorted(HERE.glob("torch_ops.[ch]*"))
    sources.append(ROOT / "dev/dit/gelu.h")

    found = hashlib.sha256(repr([str(value) for value in settings]).encode())
    for source in sources:
        found.update(source.read_bytes())
    return found.hexdigest()


@contextlib.contextmanager
def alone_in(folder):
    """Meanwhile other processes that build in this folder wait. The system frees the lock of one that is killed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "building", "w")
    except OSError as error:
        raise OSError(f"the operators of dev/torch_ops/torch_ops.py are not built yet for this machine, and {folder}"
                      f" can't be written: {error.strerror}; set TORCH_EXTENSIONS_DIR to a folder that can") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # of a process that was killed: some versions of PyTorch wait for it for ever
        for lock in folder.glob("*/lock"):
            lock.unlink()
        yield


def build():
    """Load torch.ops.train_unet, compiled first where it is not yet. Returns whether it runs on GPUs."""
    architecture = gpu_architecture()
    place = os.environ.get("TORCH_EXTENSIONS_DIR", ROOT / "build")
    folder = pathlib.Path(place).absolute() / "torch_ops"
    folder /= f"{torch.__version__}-{architecture or 'cpu'}-{processor()}"
    built = folder / "built"  # holds the contents of what was built
    wanted = contents(folder, architecture)

    def is_built():
        return built.exists() and built.read_text() == wanted

    if not is_built():
        with alone_in(folder):
            if not is_built():  # not even by a process that this one waited for
                compile_into(folder, architecture)
                built.write_text(wanted)
    torch.ops.load_library(str(folder / "torch_ops/torch_ops.so"))
    return bool(architecture)


def target_flags(architecture):
    """nvcc's flags for this GPU, as the Makefile's gencode."""
    if architecture == 90:
        code = "arch=compute_90a,code=sm_90a"
    elif architecture > 90:
        code = "arch=compute_90,code=compute_90"
    else:
        code = f"arch=compute_{architecture},code=sm_{architecture}"
    return ["-gencode", code]


def precision_flags(precision, architecture):
    """nvcc's flags for the library of torch_ops.cu in "bf16" or "fp32"."""
    if precision == "fp32":
        return ["-DPRECISION_FP32"]
    return ["-DHOPPER"] if architecture == 90 else []


def compile_into(folder, architecture):
    """Make folder/torch_ops/torch_ops.so, and the libraries for a GPU of this architecture that it loads."""
    # pip's ninja lies beside python, which need not be on the PATH
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable)])
    target = target_flags(architecture)

    def load(name, sources, cflags, nvcc_flags=(), ldflags=()):
        """Build the library folder/NAME/NAME.so; returns its path."""
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        cpp_extension.load(name, [str(source) for source in sources], cflags, list(nvcc_flags),
                           extra_ldflags=[*ldflags, *SHARED_LIBRARY], build_directory=str(place),
                           is_python_module=False, with_cuda=bool(architecture))
        return place / f"{name}.so"

    def load_gpu(precision):
        flags = [*NVCC_FLAGS, *target, *precision_flags(precision, architecture)]
        return load(f"torch_ops_{precision}", [HERE / "torch_ops.cu"], [], flags)

    libraries = []
    flags = [*CXX_FLAGS]
    if architecture:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            libraries = [str(path) for path in pool.map(load_gpu, ("bf16", "fp32"))]
        flags.append("-DWITH_CUDA")
    flags.append("-fopenmp-simd")

    # torch_ops.cu for the CPU, under a name that cpp_extension does not give to nvcc
    cpu = folder / "torch_ops_cpu.cpp"
    line = f'#include "{HERE}/torch_ops.cu"\n'
    if not cpu.exists() or cpu.read_text() != line:
        cpu.write_text(line)
    load("torch_ops", [HERE / "torch_ops.cpp", cpu], flags, target, libraries)


ON_GPU = build()
ops = torch.ops.train_unet


# ----------------------------------------------------------------------------------------------------
# the shapes of outputs, for torch.compile, and gradients

def images_like(x, channels, height=None, width=None):
    """An uninitialised (B, channels, H, W) of x's type and device, in channels_last, as all images come out."""
    B, _, H, W = x.shape
    height = H if height is None else height
    width = W if width is None else width
    return torch.empty((B, channels, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def rows_like(x, *shape):
    """Uninitialised rows of this shape, of x's type and device."""
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def floats_like(x, *shape):
    """An uninitialised float32 tensor of this shape, on x's device."""
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def weight_gradient_like(x, O, C):
    """The float32 gradient of a 3x3 convolution's weight, (O, C, 3, 3) in channels_last."""
    return torch.empty_like(floats_like(x, O, C, 3, 3), memory_format=torch.channels_last)


def norm_record_like(x):
    """What a norm's forward leaves for its backward, (2, B, C, 2)."""
    return floats_like(x, 2, x.shape[0], x.shape[1], 2)


def cast_like(w, x):
    """A convolution's weight, rounded to x's type. Where it has that type already, an empty tensor."""
    if w.dtype == x.dtype:
        return torch.empty(0, dtype=x.dtype, device=x.device)
    layout = torch.channels_last if w.ndim == 4 else torch.contiguous_format
    return torch.empty(w.shape, dtype=x.dtype, device=x.device, memory_format=layout)


def fake(name):
    """A decorator: the function makes an operator's outputs, with their shapes but uninitialised. torch.compile traces
    with it, where tensors have no memory."""
    def register(function):
        @functools.wraps(function)
        def checked(*inputs):
            lists = [value if isinstance(value, (list, tuple)) else [value] for value in inputs]
            devices = {t.device for values in lists for t in values if torch.is_tensor(t)}
            if len(devices) > 1:  # otherwise, if one of them is on "meta", outputs would be made but never computed
                raise RuntimeError(f"{name}: its tensors are on {' and '.join(sorted(map(str, devices)))}")
            return function(*inputs)
        return torch.library.register_fake(f"train_unet::{name}")(checked)
    return register


LIBRARY = torch.library.Library("train_unet", "IMPL")  # what it registers lasts as long as it does


def differentiable(name, setup_context, backward, jvp=None):
    """Give an operator its gradient, which operators compute, and its derivative in forward mode.

    setup_context and backward are those of torch.autograd.Function. jvp(inputs, tangents) returns the tangent of the
    output or of each output, None for an output that has none. A tangent among its arguments that is None is zero.
    Without jvp forward mode is refused.

    torch.library.register_autograd does the same for plain autograd. But it refuses torch.func.grad, and in forward
    mode it drops the tangent without a word. A transform calls `kernel` once on each of its levels, with tensors of
    that level, and `below` calls the operator on the next level. So the Function is one of a single level.
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
            if ctx.transformed:  # jvp may be called
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
        gradients = torch.is_grad_enabled()
        tangents = torch._C._is_fwd_grad_enabled()

        def below(*inputs):
            with torch._C._AutoDispatchBelowAutograd(), contextlib.ExitStack() as stack:
                if in_transform:  # a Function has turned both off, but the next levels need them
                    stack.enter_context(torch.set_grad_enabled(gradients))
                    stack.enter_context(forward_ad._set_fwd_grad_enabled(tangents))
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

        is_dual = tangents and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
        is_differentiated = gradients and any(t.requires_grad for t in tensors)
        if in_transform or is_dual or is_differentiated:
            with enable_single_level_autograd_function():
                return Derivative.apply(*inputs, below, in_transform or is_dual)
        return below(*inputs)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def refuse_gradient(name, jvp=None):
    """Make an operator that computes a gradient refuse to be differentiated itself, in reverse mode."""
    def refuse(ctx, *_):
        raise RuntimeError(f"{name}: second derivatives are not implemented")
    differentiable(name, lambda ctx, inputs, output: None, refuse, jvp)


def sum_of(parts):
    """The sum of those that are not None."""
    return functools.reduce(torch.add, [part for part in parts if part is not None])


# conv3x3 and conv1x1

def register_convolution(name, taps):
    """Of "conv3x3", with nine taps, or of "conv1x1", with one. Only the former has emb."""
    forward = getattr(ops, name)
    input_gradient = getattr(ops, f"{name}_input_gradient")
    weight_gradient = getattr(ops, f"{name}_weight_gradient")
    has_emb = taps == 9

    @fake(name)
    def _(x, w, bias, *more):
        return images_like(x, w.shape[0]), cast_like(w, x)

    @fake(f"{name}_input_gradient")
    def _(dout, w):
        return images_like(dout, w.shape[1])

    @fake(f"{name}_weight_gradient")
    def _(dout, x, per_image=False):
        B, O = dout.shape[:2]
        C = x.shape[1]
        if taps == 1:
            return floats_like(x, O, C), floats_like(x, O)
        demb = rows_like(x, B if per_image else 0, O)
        return weight_gradient_like(x, O, C), floats_like(x, O), demb

    def setup(ctx, inputs, output):
        x, w, bias, *_ = inputs  # then emb, if has_emb, and residual
        _, cast = output
        # forward has rounded the weight for backward already; but a transform needs w itself, for cast has no tangent
        ctx.save_for_backward(x, w if w.dtype == x.dtype or ctx.transformed else cast)
        ctx.types = w.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(cast)
        ctx.set_materialize_grads(False)

    def backward(ctx, dout, _):
        x, w = ctx.saved_tensors
        w_type, bias_type = ctx.types
        x_needed, w_needed, bias_needed, *_ = ctx.needs_input_grad
        emb_needed = has_emb and ctx.needs_input_grad[3]
        residual_needed = ctx.needs_input_grad[4 if has_emb else 3]
        if dout is None:
            return (None,) * (5 if has_emb else 4)

        dx = dw = dbias = demb = None
        if x_needed:
            dx = input_gradient(dout, w.to(x.dtype))
        if has_emb and (w_needed or bias_needed or emb_needed):
            dw, dbias, demb = weight_gradient(dout, x, emb_needed)
        elif w_needed or bias_needed:
            dw, dbias = weight_gradient(dout, x)

        gradients = [dx, dw.to(w_type) if w_needed else None, dbias.to(bias_type) if bias_needed else None]
        if has_emb:
            gradients.append(demb if emb_needed else None)
        gradients.append(dout if residual_needed else None)
        return tuple(gradients)

    # Each of the three is linear in each of two tensors, so its tangent is the sum of the operator with one tangent and
    # of the operator with the other.

    def forward_jvp(inputs, tangents):
        x, w, *_ = inputs
        tx, tw, *others = tangents  # of bias, emb and residual, which are added, so that their tangents are too
        of_w = of_others = None
        if tw is not None:
            of_w, _ = forward(x, tw, *[None] * len(others))
        if tx is not None or any(t is not None for t in others):
            if tx is None:
                tx = torch.zeros_like(x)
            of_others, _ = forward(tx, w, *others)
        return sum_of([of_w, of_others]), None

    def input_gradient_jvp(inputs, tangents):
        dout, w = inputs
        tdout, tw = tangents
        of_dout = None if tdout is None else input_gradient(tdout, w)
        of_w = None if tw is None else input_gradient(dout, tw)
        return sum_of([of_dout, of_w])

    def weight_gradient_jvp(inputs, tangents):
        dout, x, *options = inputs
        tdout, tx, *_ = tangents
        of_dout = [None] * (3 if has_emb else 2)
        if tdout is not None:
            of_dout = weight_gradient(tdout, x, *options)
        of_x = None if tx is None else weight_gradient(dout, tx, *options)[0]
        return sum_of([of_dout[0], of_x]), *of_dout[1:]  # dbias and demb are linear in dout alone

    differentiable(name, setup, backward, forward_jvp)
    refuse_gradient(f"{name}_input_gradient", input_gradient_jvp)
    refuse_gradient(f"{name}_weight_gradient", weight_gradient_jvp)


register_convolution("conv3x3", 9)
register_convolution("conv1x1", 1)


# group norm

@fake("group_norm")
def _(x, w, bias, groups, silu, scale_shift):
    return images_like(x, x.shape[1]), norm_record_like(x)


@fake("group_norm_backward")
def _(dout, x, w, bias, record, groups, silu, scale_shift):
    B, C = x.shape[:2]
    dscale_shift = rows_like(x, 0 if scale_shift is None else B, 2 * C)
    return images_like(x, C), floats_like(x, C), floats_like(x, C), dscale_shift


def setup_norm(ctx, inputs, output):
    x, w, bias, ctx.groups, ctx.silu, scale_shift = inputs
    _, record = output
    ctx.save_for_backward(x, w, bias, scale_shift, record)
    ctx.mark_non_differentiable(record)
    ctx.set_materialize_grads(False)


def norm_backward(ctx, dout, _):
    x, w, bias, scale_shift, record = ctx.saved_tensors
    if dout is None:
        return (None,) * 6
    dx, dw, dbias, dscale_shift = ops.group_norm_backward(dout, x, w, bias, record, ctx.groups, ctx.silu, scale_shift)
    if scale_shift is None:
        dscale_shift = None
    return dx, dw.to(w.dtype), dbias.to(bias.dtype), None, None, dscale_shift


differentiable("group_norm", setup_norm, norm_backward)
refuse_gradient("group_norm_backward")


# conv3x3 of group_norm with SiLU

@fake("norm_conv3x3")
def _(x, norm_w, norm_bias, groups, scale_shift, w, bias, emb, residual):
    return images_like(x, w.shape[0]), norm_record_like(x), cast_like(w, x)


@fake("norm_conv3x3_backward")
def _(dout, x, norm_w, norm_bias, record, groups, scale_shift, w, per_image):
    B, C = x.shape[:2]
    O = w.shape[0]
    dscale_shift = rows_like(x, 0 if scale_shift is None else B, 2 * C)
    demb = rows_like(x, B if per_image else 0, O)
    of_norm = images_like(x, C), floats_like(x, C), floats_like(x, C), dscale_shift
    return *of_norm, weight_gradient_like(x, O, C), floats_like(x, O), demb


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
    w_type, bias_type = ctx.types
    bias_needed, emb_needed, residual_needed = ctx.needs_input_grad[6:9]
    dx, dnorm_w, dnorm_bias, dscale_shift, dw, dbias, demb = ops.norm_conv3x3_backward(
        dout, x, norm_w, norm_bias, record, ctx.groups, scale_shift, w, emb_needed)
    return (
        dx,
        dnorm_w.to(norm_w.dtype),
        dnorm_bias.to(norm_bias.dtype),
        None,  # groups
        None if scale_shift is None else dscale_shift,
        dw.to(w_type),
        dbias.to(bias_type) if bias_needed else None,
        demb if emb_needed else None,
        dout if residual_needed else None,
    )


differentiable("norm_conv3x3", setup_norm_conv, norm_conv_backward)
refuse_gradient("norm_conv3x3_backward")


# attention

@fake("attention")
def _(qkv, heads):
    B, channels, H, W = qkv.shape
    return images_like(qkv, channels // 3), floats_like(qkv, B, heads, H * W)


@fake("attention_backward")
def _(dout, out, lse, qkv, heads):
    return images_like(qkv, qkv.shape[1])


def setup_attention(ctx, inputs, output):
    qkv, ctx.heads = inputs
    out, lse = output
    ctx.save_for_backward(qkv, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def attention_gradient(ctx, dout, _):
    qkv, out, lse = ctx.saved_tensors
    if dout is None:
        return None, None
    return ops.attention_backward(dout, out, lse, qkv, ctx.heads), None


differentiable("attention", setup_attention, attention_gradient)
refuse_gradient("attention_backward")


# resampling, whose gradient is resampling the other way

@fake("resample")
def _(x, up, factor):
    _, C, H, W = x.shape
    if up:
        return images_like(x, C, 2 * H, 2 * W)
    return images_like(x, C, H // 2, W // 2)


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
    return ops.gelu_backward(tangents[0], inputs[0])  # the Jacobian is diagonal, so it is its own transpose


differentiable("gelu", setup_gelu, gelu_gradient, gelu_jvp)
refuse_gradient("gelu_backward")


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
    """F.scaled_dot_product_attention over the pixels: qkv (B, 3C, H, W), all of q, then k, then v, the heads inside
    each -> (B, C, H, W). On a GPU heads have multiples of 16 channels, up to 256."""
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

    Its state dict is that of torch.optim.AdamW. Further options of the latter are refused where they would change the
    result. The count of updates is on the parameters' device, so that a CUDA graph can replay an update. A replayed
    update has the lr of the time when the graph was captured.
    """
    # further options that a group of torch.optim.AdamW or Adam may have, with the values that mean what this class does
    SAME = dict(amsgrad=False, maximize=False, differentiable=False, decoupled_weight_decay=True)

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._check_numbers(defaults)
        super().__init__(params, defaults)

    @staticmethod
    def _check_numbers(group):
        lr, betas, eps, weight_decay = (group.get(name) for name in ("lr", "betas", "eps", "weight_decay"))
        complete = None not in (lr, eps, weight_decay) and betas is not None and len(betas) == 2
        if not complete or not (
                lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"AdamW: lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}")

    def _check_options(self, group):
        for name, same in self.SAME.items():
            if bool(group.get(name, same)) != same:
                raise ValueError(f"AdamW: {name}={group[name]} is not implemented here; torch.optim has it")

    def add_param_group(self, param_group):
        """As torch.optim.Optimizer does, but a group that asks for what this optimiser does not do is refused."""
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
            self._check_options(group)  # anyone may have changed them
            for step, params in self._by_step(group["params"]):
                gradients = [p.grad for p in params]
                m = [self.state[p]["exp_avg"] for p in params]
                v = [self.state[p]["exp_avg_sq"] for p in params]
                ops.adamw_(params, gradients, m, v, step, group["lr"], *group["betas"], group["eps"],
                           group["weight_decay"])
        return loss

    def _by_step(self, params):
        """[(step, parameters)]: the parameters that have a gradient, by the count of updates that they share.

        A count is a tensor, state["step"], which parameters of a device share while they are always updated together.
        Parameters without a gradient keep the count, and those that shared it with them go on with a copy of it.
        """
        new_counts = {}  # by device
        sharing = {}  # id of a count: the parameters to be updated
        left_out = set()  # ids of the counts of parameters that are not
        for p in params:
            state = self.state[p]
            if p.grad is None:
                if state:
                    left_out.add(id(state["step"]))
                continue
            if not state:
                if p.device not in new_counts:
                    new_counts[p.device] = torch.zeros((), dtype=torch.float32, device=p.device)
                state.update(step=new_counts[p.device], exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            sharing.setdefault(id(state["step"]), []).append(p)

        lists = []
        for key, members in sharing.items():
            step = self.state[members[0]]["step"]
            device = members[0].device
            if key in left_out or step.device != device:
                step = step.to(device, torch.float32, copy=True)
                for p in members:
                    self.state[p]["step"] = step
            lists.append((step, members))
        return lists

    def state_dict(self):
        """As torch.optim.AdamW's: each parameter has a count of its own, on the CPU."""
        found = super().state_dict()
        states = found["state"]
        found["state"] = {key: state | dict(step=state["step"].to("cpu", copy=True)) for key, state in states.items()}
        return found

    def _check_state(self, state_dict):
        """Refuse a state dict of another optimiser, of other options or for other parameters."""
        for group in state_dict["param_groups"]:
            self._check_options(group)
            self._check_numbers(group)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        if len(numbers) != len(params):
            return  # Optimizer.load_state_dict refuses it
        for number, p in zip(numbers, params):
            state = state_dict["state"].get(number)
            if state is not None:  # otherwise the parameter was never updated
                self._check_parameter_state(number, p, state)

    @staticmethod
    def _check_parameter_state(number, p, state):
        if set(state) != {"step", "exp_avg", "exp_avg_sq"}:
            raise ValueError(f"AdamW: the state of parameter {number} holds {', '.join(map(str, state)) or 'nothing'};"
                             f" needed are step, exp_avg and exp_avg_sq: it is of another optimiser")

        for name in ("exp_avg", "exp_avg_sq"):
            moment = state[name]
            if torch.is_tensor(moment) and moment.is_floating_point() and moment.shape == p.shape:
                continue
            what = f"{moment.dtype} of shape {list(moment.shape)}" if torch.is_tensor(moment) else type(moment)
            raise ValueError(f"AdamW: {name} of parameter {number} is {what}, and the parameter has shape"
                             f" {list(p.shape)}")

        step = torch.as_tensor(state["step"])
        if step.numel() != 1 or step.is_complex() or not 0 <= float(step) < math.inf or float(step) % 1:
            raise ValueError(f"AdamW: step of parameter {number} is {state['step']}, which counts no updates")

    def load_state_dict(self, state_dict):
        """As torch.optim.Optimizer does. Then the parameters of a group that have equal counts share one tensor again,
        see _by_step, and moments have the order in memory of their parameters."""
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            counts = {}  # by device and number
            for p in group["params"]:
                state = self.state.get(p)
                if not state:
                    continue
                step = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device).reshape(())
                state["step"] = counts.setdefault((p.device, float(step)), step)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.empty_like(p).copy_(state[name])
