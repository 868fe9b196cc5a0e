// torch_ops.cpp: the layers of train_unet.cu as operators of PyTorch, torch.ops.train_unet.*. Each operator has a
// schema, at the end, and a function. The function
//
//   refuses what its layer does not take, with a sentence: TORCH_CHECK raises a RuntimeError in Python;
//   brings its inputs into the layer's form: channels_last, aligned, float32 or bfloat16. An input that has this form
//   is not copied. On a GPU a convolution takes channels in multiples of 8: zeros are added, and cut off again;
//   takes outputs and scratch from PyTorch's allocator, and runs on PyTorch's current stream;
//   calls the layer, through torch_ops.h.
//
// Gradients, and the shapes of outputs for torch.compile, are registered in torch_ops.py.
#include <torch/library.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <array>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "torch_ops.h"

namespace {
using at::Tensor;
using std::optional;
const auto CHANNELS_LAST = at::MemoryFormat::ChannelsLast;

// ---- where and by what a call is computed -----------------------------------------------------------------

const Layers& layers_for(const char* op, const Tensor& x) {
    at::ScalarType type = x.scalar_type();
    if (x.is_cpu()) {
        TORCH_CHECK(type == at::kFloat, op, " computes in float32 on a CPU, not in ", type);
        return *unet_layers_cpu();
    }

    TORCH_CHECK(x.is_cuda(), op, " runs on a CPU or a CUDA GPU, not on ", x.device());
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, op, " computes in bfloat16 or float32 on a GPU, not in ",
                type, "; torch.autocast takes dtype=torch.bfloat16");
#ifdef WITH_CUDA
    return type == at::kFloat ? *unet_layers_fp32() : *unet_layers_bf16();
#else
    TORCH_CHECK(false, op, ": the operators were built without a GPU");
#endif
}

// A tensor may keep its shape and lose its memory: FSDP frees the storage of parameters between two uses.
void check_memory(const char* op, const char* name, const Tensor& t) {
    if (!t.numel()) return;
    int64_t last = t.storage_offset();
    for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
    TORCH_CHECK(t.has_storage() && t.storage().nbytes() >= (last + 1) * t.itemsize(), op, ": ", name, " has shape ",
                t.sizes(), " and no memory for it: its storage was freed or made smaller");
}

// (B, C, H, W) of a tensor of images.
std::array<int64_t, 4> shape_of(const Tensor& images) {
    return {images.size(0), images.size(1), images.size(2), images.size(3)};
}

// A call of an operator, on the device of x. It owns the memory that the layer asks for.
struct Call {
    const char* op;
    Tensor x;
    c10::OptionalDeviceGuard guard;
    const Layers& layers;
    std::vector<Tensor> scratch;
    Place place;

    Call(const char* name, const Tensor& like)
        : op(name), x(like), guard(like.device()), layers(layers_for(name, like)) {
        check_memory(op, "the first tensor", x);
#ifdef WITH_CUDA
        if (x.is_cuda()) {
            place.device = x.get_device();
            place.stream = c10::cuda::getCurrentCUDAStream(x.device().index()).stream();
        }
#endif
        place.threads = at::get_num_threads();
        place.allocate = [this](size_t bytes) {
            scratch.push_back(at::empty({(int64_t)bytes}, x.options().dtype(at::kByte)));
            return scratch.back().data_ptr();
        };
    }
    Call(const Call&) = delete;

    Limits limits() const { return layers.limits(place); }
    at::TensorOptions floats() const { return x.options().dtype(at::kFloat); }

    // The launchers count pixels and elements in 32 bits, and images in the 16 bits of a grid's dimension.
    void check_images(const Tensor& images, const char* name) const {
        TORCH_CHECK(images.dim() == 4, op, ": ", name, " is (B, C, H, W), not of ", images.dim(), " dimensions");
        auto [B, C, H, W] = shape_of(images);
        TORCH_CHECK(C > 0 && H > 0 && W > 0, op, ": ", name, " has images of ", C, " x ", H, " x ", W);
        TORCH_CHECK(C <= 3 << 14, op, ": ", name, " has ", C, " channels, and 49152 are the most");
        TORCH_CHECK((B <= 65535 || H * W == 1) && B * H * W <= 1 << 30, op, ": ", name, " has ", B, " images of ", H,
                    " x ", W, " pixels; 65535 images and 2^30 pixels in all are the most");
        TORCH_CHECK(H * W * C < (int64_t)1 << 31, op, ": an image of ", name, " has more than 2^31 numbers");
    }

    void check_like(const Tensor& t, const char* name, at::IntArrayRef sizes) const {
        TORCH_CHECK(t.device() == x.device(), op, ": ", name, " is on ", t.device(), " and x on ", x.device());
        TORCH_CHECK(t.sizes() == sizes, op, ": ", name, " has shape ", t.sizes(), ", needed is ", sizes);
        check_memory(op, name, t);
    }

    // Activations have the type of x.
    void check_activation(const Tensor& t, const char* name, at::IntArrayRef sizes) const {
        check_like(t, name, sizes);
        TORCH_CHECK(t.scalar_type() == x.scalar_type(), op, ": ", name, " is in ", t.scalar_type(), " and x in ",
                    x.scalar_type());
    }

    // Parameters have the type of x, or are float32.
    void check_parameter(const Tensor& t, const char* name, at::IntArrayRef sizes) const {
        check_like(t, name, sizes);
        TORCH_CHECK(t.scalar_type() == x.scalar_type() || t.scalar_type() == at::kFloat, op, ": ", name, " is in ",
                    t.scalar_type(), ", needed is float32", x.scalar_type() == at::kFloat ? "" : " or x's type");
    }
};

// ---- tensors in the form that the layers take -------------------------------------------------------------

Tensor aligned(Tensor t) { return (uintptr_t)t.const_data_ptr() % 16 ? t.clone() : t; }

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Images with so many channels: behind those of t the channels are zeros.
Tensor images_with(const Tensor& t, int64_t channels) {
    if (t.size(1) == channels) return aligned(t.contiguous(CHANNELS_LAST));
    auto [B, C, H, W] = shape_of(t);
    Tensor padded = at::empty({B, channels, H, W}, t.options(), CHANNELS_LAST).zero_();
    padded.narrow(1, 0, C).copy_(t);
    return padded;
}

Tensor images_like(const Tensor& t, int64_t C, int64_t H, int64_t W) {
    return at::empty({t.size(0), C, H, W}, t.options(), CHANNELS_LAST);
}

Tensor cut_channels(const Tensor& t, int64_t C) {
    return t.size(1) == C ? t : t.narrow(1, 0, C).contiguous(CHANNELS_LAST);
}

// A parameter (O, ...) or rows (B, C), contiguous, of this type, and with so many columns: behind those of t they are
// zeros.
Tensor rows_with(const Tensor& t, int64_t columns, at::ScalarType type) {
    if (t.size(-1) == columns) return aligned(t.to(type).contiguous());
    std::vector<int64_t> sizes = t.sizes().vec();
    sizes.back() = columns;
    Tensor padded = at::zeros(sizes, t.options().dtype(type));
    padded.narrow(-1, 0, t.size(-1)).copy_(t);
    return padded;
}

// The structs of torch_ops.h know an undefined tensor as one without data.
Image image(const Tensor& t) {
    if (!t.defined()) return {};
    return {t.data_ptr(), (int)t.size(0), (int)t.size(2), (int)t.size(3), (int)t.size(1)};
}

void* data(const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }

// ---- 3x3 and 1x1 convolutions -----------------------------------------------------------------------------

at::MemoryFormat weight_format(const Tensor& w) { return w.dim() == 4 ? CHANNELS_LAST : at::MemoryFormat::Contiguous; }

// A weight (O, C, 3, 3) or (O, C) as the layers take it: in memory (O, 3, 3, C) or (O, C), of this type, and with so
// many output and input channels, of which the last are zeros.
Tensor weight_with(const Tensor& w, int64_t O, int64_t C, at::ScalarType type) {
    at::MemoryFormat format = weight_format(w);
    bool same_sizes = w.size(0) == O && w.size(1) == C;
    if (same_sizes && w.scalar_type() == type && w.is_contiguous(format)) return aligned(w);

    std::vector<int64_t> sizes = w.sizes().vec();
    sizes[0] = O;
    sizes[1] = C;
    at::TensorOptions options = w.options().dtype(type);
    Tensor made;
    if (same_sizes) made = at::empty(sizes, options, format);
    else made = at::zeros(sizes, options).contiguous(format);
    made.narrow(0, 0, w.size(0)).narrow(1, 0, w.size(1)).copy_(w);
    return made;
}

Tensor cut_weight(const Tensor& w, int64_t O, int64_t C) {
    return w.narrow(0, 0, O).narrow(1, 0, C).contiguous(weight_format(w));
}

void check_weight_size(const char* op, int taps, int64_t O, int64_t C) {
    TORCH_CHECK(taps * O * C < (int64_t)1 << 31, op, ": w has more than 2^31 numbers");
}

void check_weight(const Call& call, const Tensor& w, int taps, int64_t C) {
    int64_t O = w.dim() ? w.size(0) : 0;
    if (taps == 9) call.check_parameter(w, "w", {O, C, 3, 3});
    else call.check_parameter(w, "w", {O, C});
    TORCH_CHECK(O > 0 && O <= 3 << 14, call.op, ": w has ", O, " output channels; 1 to 49152 can be had");
    check_weight_size(call.op, taps, O, C);
}

// What a convolution reads besides x, its channels padded. The tensors own what `call` points to.
struct ConvolutionInputs {
    Tensor w, bias, emb, residual;  // undefined where there is none
    ConvolutionCall call;           // without out and x
};

// x (B, C, H, W), w (O, C, 3, 3) or (O, C), bias (O), emb (B, O), residual (B, O, H, W).
ConvolutionInputs convolution_inputs(const Call& call, int taps, const Tensor& x, const Tensor& w,
                                     const optional<Tensor>& bias, const optional<Tensor>& emb,
                                     const optional<Tensor>& residual) {
    auto [B, C, H, W] = shape_of(x);
    check_weight(call, w, taps, C);
    int64_t O = w.size(0);
    if (bias) call.check_parameter(*bias, "bias", {O});
    if (emb) call.check_activation(*emb, "emb", {B, O});
    if (residual) call.check_activation(*residual, "residual", {B, O, H, W});

    at::ScalarType type = x.scalar_type();
    int multiple = call.limits().convolution_channels;
    int64_t padded_C = round_up(C, multiple);
    int64_t padded_O = round_up(O, multiple);
    ConvolutionInputs in;
    in.w = weight_with(w, padded_O, padded_C, type);
    in.bias = bias ? rows_with(*bias, padded_O, type) : at::zeros({padded_O}, x.options());
    if (emb) in.emb = rows_with(*emb, padded_O, type);
    if (residual) in.residual = images_with(*residual, padded_O);
    in.call = {
        .taps = taps,
        .w = in.w.data_ptr(),
        .bias = in.bias.data_ptr(),
        .emb = data(in.emb),
        .residual = image(in.residual),
    };
    return in;
}

// w in the type of x, for the input gradient to read. Where w has that type already, it is an empty tensor.
Tensor cast_weight(const Tensor& padded, const Tensor& w, const Tensor& x) {
    if (w.scalar_type() == x.scalar_type()) return at::empty({0}, x.options());
    return cut_weight(padded, w.size(0), w.size(1));
}

// Returns the output (B, O, H, W), and cast_weight.
std::tuple<Tensor, Tensor> convolution(const char* op, int taps, const Tensor& x, const Tensor& w,
                                       const optional<Tensor>& bias, const optional<Tensor>& emb,
                                       const optional<Tensor>& residual) {
    Call call(op, x);
    call.check_images(x, "x");
    ConvolutionInputs in = convolution_inputs(call, taps, x, w, bias, emb, residual);

    auto [B, C, H, W] = shape_of(x);
    int64_t O = w.size(0);
    Tensor cast = cast_weight(in.w, w, x);
    if (!x.numel()) return {images_like(x, O, H, W), cast};

    Tensor out = images_like(x, in.w.size(0), H, W);
    Tensor images = images_with(x, in.w.size(1));
    in.call.out = image(out);
    in.call.x = image(images);
    call.layers.convolution(call.place, in.call);
    return {cut_channels(out, O), cast};
}

Tensor input_gradient(const char* op, int taps, const Tensor& dout, const Tensor& w) {
    Call call(op, dout);
    call.check_images(dout, "dout");
    TORCH_CHECK(w.dim() >= 2, op, ": w has ", w.dim(), " dimensions");
    auto [B, O, H, W] = shape_of(dout);
    int64_t C = w.size(1);
    check_weight(call, w, taps, C);
    TORCH_CHECK(w.size(0) == O, op, ": dout has ", O, " channels and w makes ", w.size(0));
    if (!dout.numel()) return images_like(dout, C, H, W);

    int multiple = call.limits().convolution_channels;
    int64_t padded_C = round_up(C, multiple);
    int64_t padded_O = round_up(O, multiple);
    Tensor upstream = images_with(dout, padded_O);
    Tensor weight = weight_with(w, padded_O, padded_C, dout.scalar_type());
    Tensor dx = images_like(dout, padded_C, H, W);
    ConvolutionCall arguments = {.taps = taps, .out = image(upstream), .x = image(dx), .w = weight.data_ptr()};
    call.layers.input_gradient(call.place, arguments);
    return cut_channels(dx, C);
}

// The gradients of a convolution's parameters in float32, and that of emb. Their channels are padded until cut() is
// called. The tensors own what `call` points to.
struct WeightGradients {
    Tensor dw, dbias, demb;
    WeightGradientCall call;  // without dout and x

    WeightGradients(const Call& caller, int taps, int64_t B, int64_t O, int64_t C, bool per_image) {
        at::TensorOptions floats = caller.floats();
        if (taps == 9) dw = at::empty({O, C, 3, 3}, floats, CHANNELS_LAST);
        else dw = at::empty({O, C}, floats);
        dbias = at::empty({O}, floats);
        demb = at::empty({per_image ? B : 0, O}, caller.x.options());
        call = {
            .taps = taps,
            .dw = dw.data_ptr<float>(),
            .dbias = dbias.data_ptr<float>(),
            .demb = per_image ? demb.data_ptr() : nullptr,
        };
    }

    void zero() {
        dw.zero_();
        dbias.zero_();
    }

    void cut(int64_t O, int64_t C) {
        dw = cut_weight(dw, O, C);
        if (dbias.size(0) == O) return;
        dbias = dbias.narrow(0, 0, O).clone();
        demb = demb.narrow(1, 0, O).contiguous();
    }
};

// Returns dw, dbias and demb. With per_image demb is (B, O), otherwise (0, O).
std::tuple<Tensor, Tensor, Tensor> weight_gradient(const char* op, int taps, const Tensor& dout, const Tensor& x,
                                                   bool per_image) {
    Call call(op, x);
    call.check_images(x, "x");
    call.check_images(dout, "dout");
    auto [B, C, H, W] = shape_of(x);
    int64_t O = dout.size(1);
    call.check_activation(dout, "dout", {B, O, H, W});
    check_weight_size(op, taps, O, C);

    int multiple = call.limits().convolution_channels;
    int64_t padded_C = round_up(C, multiple);
    int64_t padded_O = round_up(O, multiple);
    WeightGradients gradients(call, taps, B, padded_O, padded_C, per_image);
    if (x.numel()) {
        Tensor images = images_with(x, padded_C);
        Tensor upstream = images_with(dout, padded_O);
        gradients.call.dout = image(upstream);
        gradients.call.x = image(images);
        call.layers.weight_gradient(call.place, gradients.call);
    } else {
        gradients.zero();
    }
    gradients.cut(O, C);
    return {gradients.dw, gradients.dbias, gradients.demb};
}

std::tuple<Tensor, Tensor> conv3x3(const Tensor& x, const Tensor& w, const optional<Tensor>& bias,
                                   const optional<Tensor>& emb, const optional<Tensor>& residual) {
    return convolution("conv3x3", 9, x, w, bias, emb, residual);
}

Tensor conv3x3_input_gradient(const Tensor& dout, const Tensor& w) {
    return input_gradient("conv3x3_input_gradient", 9, dout, w);
}

std::tuple<Tensor, Tensor, Tensor> conv3x3_weight_gradient(const Tensor& dout, const Tensor& x, bool per_image) {
    return weight_gradient("conv3x3_weight_gradient", 9, dout, x, per_image);
}

std::tuple<Tensor, Tensor> conv1x1(const Tensor& x, const Tensor& w, const optional<Tensor>& bias,
                                   const optional<Tensor>& residual) {
    return convolution("conv1x1", 1, x, w, bias, {}, residual);
}

Tensor conv1x1_input_gradient(const Tensor& dout, const Tensor& w) {
    return input_gradient("conv1x1_input_gradient", 1, dout, w);
}

std::tuple<Tensor, Tensor> conv1x1_weight_gradient(const Tensor& dout, const Tensor& x) {
    auto [dw, dbias, demb] = weight_gradient("conv1x1_weight_gradient", 1, dout, x, false);
    return {dw, dbias};
}

// ---- group norm -------------------------------------------------------------------------------------------

// What a norm reads. The tensors own what `call` points to.
struct NormInputs {
    Tensor x, w, bias, scale_shift;
    NormCall call;
};

// x (B, C, H, W), w and bias (C), scale_shift (B, 2C). Without images nothing is converted.
NormInputs norm_inputs(const Call& call, const Tensor& x, const Tensor& w, const Tensor& bias, int64_t groups,
                       bool silu, const optional<Tensor>& scale_shift) {
    call.check_images(x, "x");
    int64_t B = x.size(0);
    int64_t C = x.size(1);
    call.check_parameter(w, "w", {C});
    call.check_parameter(bias, "bias", {C});
    if (scale_shift) call.check_activation(*scale_shift, "scale_shift", {B, 2 * C});
    TORCH_CHECK(groups > 0 && C % groups == 0, call.op, ": ", groups, " groups do not divide ", C, " channels");
    TORCH_CHECK(C / groups > 1, call.op, ": ", groups, " groups leave one channel a group; use fewer");
    int multiple = call.limits().norm_channels;
    TORCH_CHECK(C % multiple == 0, call.op, ": on a GPU channels come in multiples of ", multiple, ", not ", C);
    TORCH_CHECK(C <= 1 << 14, call.op, ": x has ", C, " channels, and 16384 are the most");
    if (!x.numel()) return {};

    NormInputs in;
    in.x = images_with(x, C);
    in.w = rows_with(w, C, at::kFloat);
    in.bias = rows_with(bias, C, at::kFloat);
    if (scale_shift) in.scale_shift = rows_with(*scale_shift, 2 * C, x.scalar_type());
    in.call = {
        .x = image(in.x),
        .groups = (int)groups,
        .silu = silu,
        .w = in.w.data_ptr<float>(),
        .bias = in.bias.data_ptr<float>(),
        .scale_shift = data(in.scale_shift),
    };
    return in;
}

// (2, B, C, 2), which forward leaves for backward: the statistics of each channel, and then its scale and shift. See
// NormOf in train_unet.cu.
Tensor new_record(const Call& call, const Tensor& x) { return at::empty({2, x.size(0), x.size(1), 2}, call.floats()); }

void check_record(const Call& call, const Tensor& record, const Tensor& x, const char* forward) {
    call.check_like(record, "record", {2, x.size(0), x.size(1), 2});
    TORCH_CHECK(record.scalar_type() == at::kFloat && record.is_contiguous(), call.op, ": record is not of ", forward);
}

// Returns the output (B, C, H, W), and the record.
std::tuple<Tensor, Tensor> group_norm(const Tensor& x, const Tensor& w, const Tensor& bias, int64_t groups, bool silu,
                                      const optional<Tensor>& scale_shift) {
    Call call("group_norm", x);
    NormInputs in = norm_inputs(call, x, w, bias, groups, silu, scale_shift);

    auto [B, C, H, W] = shape_of(x);
    Tensor out = images_like(x, C, H, W);
    Tensor record = new_record(call, x);
    if (!x.numel()) return {out, record};

    in.call.out = image(out);
    in.call.record = record.data_ptr<float>();
    call.layers.group_norm(call.place, in.call);
    return {out, record};
}

// The gradients of what a norm reads. The tensors own what add_to's call points to.
struct NormGradients {
    Tensor dx, dw, dbias, dscale_shift;  // dscale_shift (0, 2C) where there is no scale_shift

    NormGradients(const Call& call, const Tensor& x, bool modulates) {
        auto [B, C, H, W] = shape_of(x);
        dx = images_like(x, C, H, W);
        dw = at::zeros({C}, call.floats());
        dbias = at::zeros({C}, call.floats());
        dscale_shift = at::empty({modulates ? B : 0, 2 * C}, x.options());
    }

    void add_to(NormCall* call) const {
        call->out = image(dx);
        call->dw = dw.data_ptr<float>();
        call->dbias = dbias.data_ptr<float>();
        if (call->scale_shift) call->dscale_shift = dscale_shift.data_ptr();
    }
};

// Returns the gradients of x, w, bias and scale_shift.
std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_backward(const Tensor& dout, const Tensor& x, const Tensor& w,
                                                               const Tensor& bias, const Tensor& record, int64_t groups,
                                                               bool silu, const optional<Tensor>& scale_shift) {
    Call call("group_norm_backward", x);
    NormInputs in = norm_inputs(call, x, w, bias, groups, silu, scale_shift);
    call.check_activation(dout, "dout", x.sizes());
    check_record(call, record, x, "group_norm");

    NormGradients gradients(call, x, scale_shift.has_value());
    if (x.numel()) {
        Tensor upstream = images_with(dout, x.size(1));
        in.call.dout = image(upstream);
        in.call.record = record.data_ptr<float>();
        gradients.add_to(&in.call);
        call.layers.group_norm_backward(call.place, in.call);
    }
    return {gradients.dx, gradients.dw, gradients.dbias, gradients.dscale_shift};
}

// ---- a 3x3 convolution of a norm --------------------------------------------------------------------------

// conv3x3(group_norm_silu(x)), of whose activations autograd keeps x alone. Returns the output (B, O, H, W), the record
// as group_norm does, and cast_weight.
std::tuple<Tensor, Tensor, Tensor> norm_conv3x3(const Tensor& x, const Tensor& norm_w, const Tensor& norm_bias,
                                                int64_t groups, const optional<Tensor>& scale_shift, const Tensor& w,
                                                const optional<Tensor>& bias, const optional<Tensor>& emb,
                                                const optional<Tensor>& residual) {
    Call call("norm_conv3x3", x);
    NormInputs norm = norm_inputs(call, x, norm_w, norm_bias, groups, true, scale_shift);
    ConvolutionInputs conv = convolution_inputs(call, 9, x, w, bias, emb, residual);

    auto [B, C, H, W] = shape_of(x);
    int64_t O = w.size(0);
    Tensor out = images_like(x, conv.w.size(0), H, W);
    Tensor record = new_record(call, x);
    Tensor cast = cast_weight(conv.w, w, x);
    if (x.numel()) {
        norm.call.record = record.data_ptr<float>();
        conv.call.out = image(out);
        call.layers.norm_conv3x3(call.place, norm.call, conv.call);
    }
    return {cut_channels(out, O), record, cast};
}

// Returns the gradients of x, norm_w, norm_bias, scale_shift, w, bias and emb. That of emb is (B, O) with per_image,
// otherwise (0, O).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> norm_conv3x3_backward(
    const Tensor& dout, const Tensor& x, const Tensor& norm_w, const Tensor& norm_bias, const Tensor& record,
    int64_t groups, const optional<Tensor>& scale_shift, const Tensor& w, bool per_image) {
    Call call("norm_conv3x3_backward", x);
    NormInputs norm = norm_inputs(call, x, norm_w, norm_bias, groups, true, scale_shift);
    auto [B, C, H, W] = shape_of(x);
    check_weight(call, w, 9, C);
    int64_t O = w.size(0);
    call.check_activation(dout, "dout", {B, O, H, W});
    check_record(call, record, x, "norm_conv3x3");

    int64_t padded_O = round_up(O, call.limits().convolution_channels);  // C needs none: see Limits.norm_channels
    NormGradients of_norm(call, x, scale_shift.has_value());
    WeightGradients of_conv(call, 9, B, padded_O, C, per_image);
    if (x.numel()) {
        Tensor upstream = images_with(dout, padded_O);
        Tensor weight = weight_with(w, padded_O, C, x.scalar_type());
        norm.call.record = record.data_ptr<float>();
        of_norm.add_to(&norm.call);
        ConvolutionCall conv = {.taps = 9, .out = image(upstream), .w = weight.data_ptr()};
        call.layers.norm_conv3x3_backward(call.place, norm.call, conv, of_conv.call);
    } else {
        of_conv.zero();
    }
    of_conv.cut(O, C);
    return {of_norm.dx, of_norm.dw, of_norm.dbias, of_norm.dscale_shift, of_conv.dw, of_conv.dbias, of_conv.demb};
}

// ---- attention --------------------------------------------------------------------------------------------

// qkv (B, 3C, H, W): q, k and v, C channels each.
void check_attention(const Call& call, const Tensor& qkv, int64_t heads) {
    call.check_images(qkv, "qkv");
    auto [B, qkv_channels, H, W] = shape_of(qkv);
    int64_t C = qkv_channels / 3;
    int64_t pixels = H * W;
    TORCH_CHECK(qkv_channels % 3 == 0, call.op, ": qkv has ", qkv_channels, " channels, which are not q, k and v");
    TORCH_CHECK(heads > 0 && heads <= 65535 && C % heads == 0, call.op, ": ", heads, " heads do not divide ", C,
                " channels");
    TORCH_CHECK(B <= 65535, call.op, ": ", B, " images are more than 65535");

    Limits limits = call.limits();
    int64_t head_channels = C / heads;
    TORCH_CHECK(head_channels % limits.head_multiple == 0 && head_channels <= limits.head_most, call.op, ": heads of ",
                head_channels, " channels: on a GPU they have a multiple of ", limits.head_multiple, " up to ",
                limits.head_most);
    TORCH_CHECK(pixels <= limits.attention_pixels, call.op, ": ", pixels, " pixels are more than ",
                limits.attention_pixels);
}

// Returns the output (B, C, H, W), and lse (B, heads, H W), which backward reads.
std::tuple<Tensor, Tensor> attention(const Tensor& qkv, int64_t heads) {
    Call call("attention", qkv);
    check_attention(call, qkv, heads);

    auto [B, qkv_channels, H, W] = shape_of(qkv);
    Tensor out = images_like(qkv, qkv_channels / 3, H, W);
    Tensor lse = at::empty({B, heads, H * W}, call.floats());
    if (!qkv.numel()) return {out, lse};

    Tensor in = images_with(qkv, qkv_channels);
    AttentionCall arguments = {
        .out = image(out), .qkv = image(in), .lse = lse.data_ptr<float>(), .heads = (int)heads};
    call.layers.attention(call.place, arguments);
    return {out, lse};
}

Tensor attention_backward(const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv, int64_t heads) {
    Call call("attention_backward", qkv);
    check_attention(call, qkv, heads);
    auto [B, qkv_channels, H, W] = shape_of(qkv);
    int64_t C = qkv_channels / 3;
    call.check_activation(dout, "dout", {B, C, H, W});
    call.check_activation(out, "out", dout.sizes());
    call.check_like(lse, "lse", {B, heads, H * W});
    TORCH_CHECK(lse.scalar_type() == at::kFloat, call.op, ": lse is not of attention");

    Tensor dqkv = images_like(qkv, qkv_channels, H, W);
    if (!qkv.numel()) return dqkv;

    Tensor qkv_images = images_with(qkv, qkv_channels);
    Tensor out_images = images_with(out, C);
    Tensor upstream = images_with(dout, C);
    Tensor contiguous_lse = lse.contiguous();
    AttentionCall arguments = {
        .out = image(out_images),
        .qkv = image(qkv_images),
        .lse = contiguous_lse.data_ptr<float>(),
        .heads = (int)heads,
        .dqkv = image(dqkv),
        .dout = image(upstream),
    };
    call.layers.attention_backward(call.place, arguments);
    return dqkv;
}

// ---- layers of independent items --------------------------------------------------------------------------

// x (B, C, H, W) becomes (B, C, 2H, 2W), each pixel repeated 2x2 times, or (B, C, H/2, W/2), the sums of 2x2 pixels.
// The result is multiplied by `factor`.
Tensor resample(const Tensor& x, bool up, double factor) {
    Call call("resample", x);
    call.check_images(x, "x");
    auto [B, C, H, W] = shape_of(x);
    TORCH_CHECK(up || (H % 2 == 0 && W % 2 == 0), call.op, ": images of ", H, " x ", W, " can't be halved");
    TORCH_CHECK(!up || B * H * W <= 1 << 28, call.op, ": x has more than 2^28 pixels");

    int64_t out_H = up ? 2 * H : H / 2;
    int64_t out_W = up ? 2 * W : W / 2;
    if (!x.numel()) return images_like(x, C, out_H, out_W);

    int64_t padded_C = round_up(C, call.limits().resample_channels);
    Tensor in = images_with(x, padded_C);
    Tensor out = images_like(x, padded_C, out_H, out_W);
    call.layers.resample(call.place, image(out), image(in), (float)factor);
    return cut_channels(out, C);
}

// t (B) to (B, width).
Tensor timestep_embedding(const Tensor& t, int64_t width, int64_t max_period, double unit, at::ScalarType type) {
    TORCH_CHECK(t.dim() == 1 && at::isIntegralType(t.scalar_type(), false),
                "timestep_embedding: t is (B,), of integers");
    check_memory("timestep_embedding", "t", t);
    TORCH_CHECK(width > 0 && width % 2 == 0, "timestep_embedding: width is even, not ", width);
    TORCH_CHECK(max_period > 0 && max_period < 1 << 30, "timestep_embedding: max_period is 1 to 2^30, not ",
                max_period);

    int64_t B = t.size(0);
    Tensor out = at::empty({B, width}, t.options().dtype(type));
    Tensor timesteps = t.to(at::kInt).contiguous();
    Call call("timestep_embedding", out);
    TORCH_CHECK(out.numel() < (int64_t)1 << 31, call.op, ": more than 2^31 numbers");
    if (!out.numel()) return out;

    Image rows = {out.data_ptr(), (int)B, 1, 1, (int)width};
    call.layers.timestep_embedding(call.place, rows, timesteps.data_ptr<int>(), (int)max_period, unit);
    return out;
}

// t, its elements in memory in the same order as those of `like`, which has no gaps.
Tensor in_order_of(const Tensor& like, const Tensor& t) {
    if (t.strides() == like.strides()) return aligned(t);
    return aligned(at::empty_like(like).copy_(t));
}

// All elements, as they lie in memory, as one row.
Image row(const Tensor& t) { return {t.data_ptr(), 1, 1, 1, (int)t.numel()}; }

Tensor gelu(const Tensor& x) {
    Call call("gelu", x);
    TORCH_CHECK(x.numel() < (int64_t)1 << 31, call.op, ": x has more than 2^31 numbers");
    Tensor out = at::empty_like(x);
    if (!x.numel()) return out;

    Tensor in = in_order_of(out, x);
    call.layers.gelu(call.place, row(out), row(in));
    return out;
}

Tensor gelu_backward(const Tensor& dout, const Tensor& x) {
    Call call("gelu_backward", x);
    TORCH_CHECK(x.numel() < (int64_t)1 << 31, call.op, ": x has more than 2^31 numbers");
    call.check_activation(dout, "dout", x.sizes());
    Tensor dx = at::empty_like(x);
    if (!x.numel()) return dx;

    Tensor in = in_order_of(dx, x);
    Tensor upstream = in_order_of(dx, dout);
    call.layers.gelu_backward(call.place, row(dx), row(upstream), row(in));
    return dx;
}

// ---- AdamW ------------------------------------------------------------------------------------------------

// A parameter w and its moments m and v, which are updated in place.
void check_updated(const Call& call, const Tensor& w, const Tensor& m, const Tensor& v) {
    call.check_activation(w, "a parameter", w.sizes());
    TORCH_CHECK(w.is_non_overlapping_and_dense(), "adamw_: a parameter of shape ", w.sizes(), " has gaps in memory");
    TORCH_CHECK(w.numel() < (int64_t)1 << 32, "adamw_: a parameter has more than 2^32 numbers");
    for (const Tensor& moment : {m, v}) {
        call.check_activation(moment, "a moment", w.sizes());
        TORCH_CHECK(moment.strides() == w.strides(), "adamw_: a moment is not in the order of its parameter");
    }
}

// One update of all parameters, in place. step, a scalar on their device, counts the updates.
void adamw_(at::TensorList params, at::TensorList gradients, at::TensorList m, at::TensorList v, Tensor step, double lr,
            double beta1, double beta2, double eps, double weight_decay) {
    TORCH_CHECK(params.size() == gradients.size() && params.size() == m.size() && params.size() == v.size(),
                "adamw_: so many parameters, gradients and moments: ", params.size(), ", ", gradients.size(), ", ",
                m.size(), ", ", v.size());
    if (params.empty()) return;

    Call call("adamw_", params[0]);
    TORCH_CHECK(call.x.scalar_type() == at::kFloat, "adamw_: parameters are float32, not ", call.x.scalar_type());
    call.check_activation(step, "step", {});

    std::vector<Tensor> ordered;  // gradients in the order of their parameters
    std::vector<Update> updates;
    for (size_t i = 0; i < params.size(); i++) {
        const Tensor& w = params[i];
        check_updated(call, w, m[i], v[i]);
        call.check_like(gradients[i], "a gradient", w.sizes());
        ordered.push_back(in_order_of(w, gradients[i].to(at::kFloat)));
        for (const Tensor& t : {w, m[i], v[i]})
            TORCH_CHECK((uintptr_t)t.data_ptr() % 16 == 0, "adamw_: a parameter or moment is not aligned to 16 bytes");
        if (!w.numel()) continue;

        Update update = {
            .w = w.data_ptr<float>(),
            .m = m[i].data_ptr<float>(),
            .v = v[i].data_ptr<float>(),
            .gradient = ordered.back().data_ptr<float>(),
            .n = (size_t)w.numel(),
        };
        updates.push_back(update);
    }

    AdamWCall arguments = {
        .updates = updates.data(),
        .count = (int)updates.size(),
        .step = step.data_ptr<float>(),
        .lr = (float)lr,
        .beta1 = (float)beta1,
        .beta2 = (float)beta2,
        .eps = (float)eps,
        .weight_decay = (float)weight_decay,
    };
    call.layers.adamw(call.place, arguments);
}

// ---- autocast ---------------------------------------------------------------------------------------------

// Whether autocast converts an argument of this name. It leaves parameters as they are: a layer rounds them itself, and
// their gradients stay float32.
bool autocasts(const std::string& name, const c10::IValue& value) {
    if (!value.isTensor() || name.ends_with("w") || name.ends_with("bias")) return false;
    Tensor t = value.toTensor();
    return t.is_floating_point() && t.scalar_type() != at::kDouble;
}

// Within torch.autocast activations are converted to its type, whatever they come in. On a CPU they become float32,
// because the operators compute in nothing else there.
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& arguments = op.schema().arguments();
    size_t first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
        c10::IValue& value = (*stack)[first + i];
        if (!autocasts(arguments[i].name(), value)) continue;
        Tensor t = value.toTensor();
        at::ScalarType type = t.is_cpu() ? at::kFloat : at::autocast::get_autocast_dtype(t.device().type());
        value = t.to(type);
    }

    c10::impl::ExcludeDispatchKeyGuard once(c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
}
}  // namespace

// ---- the operators ----------------------------------------------------------------------------------------

TORCH_LIBRARY(train_unet, m) {
    m.def("conv3x3(Tensor x, Tensor w, Tensor? bias, Tensor? emb, Tensor? residual) -> (Tensor, Tensor)");
    m.def("conv3x3_input_gradient(Tensor dout, Tensor w) -> Tensor");
    m.def("conv3x3_weight_gradient(Tensor dout, Tensor x, bool per_image) -> (Tensor, Tensor, Tensor)");
    m.def("conv1x1(Tensor x, Tensor w, Tensor? bias, Tensor? residual) -> (Tensor, Tensor)");
    m.def("conv1x1_input_gradient(Tensor dout, Tensor w) -> Tensor");
    m.def("conv1x1_weight_gradient(Tensor dout, Tensor x) -> (Tensor, Tensor)");
    m.def(
        "group_norm(Tensor x, Tensor w, Tensor bias, int groups, bool silu, Tensor? scale_shift)"
        " -> (Tensor, Tensor)");
    m.def(
        "group_norm_backward(Tensor dout, Tensor x, Tensor w, Tensor bias, Tensor record, int groups,"
        " bool silu, Tensor? scale_shift) -> (Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "norm_conv3x3(Tensor x, Tensor norm_w, Tensor norm_bias, int groups, Tensor? scale_shift, Tensor w,"
        " Tensor? bias, Tensor? emb, Tensor? residual) -> (Tensor, Tensor, Tensor)");
    m.def(
        "norm_conv3x3_backward(Tensor dout, Tensor x, Tensor norm_w, Tensor norm_bias, Tensor record,"
        " int groups, Tensor? scale_shift, Tensor w, bool per_image)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def("attention(Tensor qkv, int heads) -> (Tensor, Tensor)");
    m.def("attention_backward(Tensor dout, Tensor out, Tensor lse, Tensor qkv, int heads) -> Tensor");
    m.def("resample(Tensor x, bool up, float factor) -> Tensor");
    m.def("timestep_embedding(Tensor t, int width, int max_period, float unit, ScalarType dtype) -> Tensor");
    m.def("gelu(Tensor x) -> Tensor");
    m.def("gelu_backward(Tensor dout, Tensor x) -> Tensor");
    m.def(
        "adamw_(Tensor(a!)[] params, Tensor[] gradients, Tensor(b!)[] m, Tensor(c!)[] v, Tensor(d!) step,"
        " float lr, float beta1, float beta2, float eps, float weight_decay) -> ()");
}

static void implement(torch::Library& m) {
    m.impl("conv3x3", conv3x3);
    m.impl("conv3x3_input_gradient", conv3x3_input_gradient);
    m.impl("conv3x3_weight_gradient", conv3x3_weight_gradient);
    m.impl("conv1x1", conv1x1);
    m.impl("conv1x1_input_gradient", conv1x1_input_gradient);
    m.impl("conv1x1_weight_gradient", conv1x1_weight_gradient);
    m.impl("group_norm", group_norm);
    m.impl("group_norm_backward", group_norm_backward);
    m.impl("norm_conv3x3", norm_conv3x3);
    m.impl("norm_conv3x3_backward", norm_conv3x3_backward);
    m.impl("attention", attention);
    m.impl("attention_backward", attention_backward);
    m.impl("resample", resample);
    m.impl("timestep_embedding", timestep_embedding);
    m.impl("gelu", gelu);
    m.impl("gelu_backward", gelu_backward);
    m.impl("adamw_", adamw_);
}
TORCH_LIBRARY_IMPL(train_unet, CPU, m) { implement(m); }
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(train_unet, CUDA, m) { implement(m); }
#endif

static void implement_autocast(torch::Library& m) {
    for (const char* op : {"conv3x3", "conv1x1", "group_norm", "norm_conv3x3", "attention", "resample", "gelu"})
        m.impl(op, torch::CppFunction::makeFromBoxedFunction<&autocast>());
}
TORCH_LIBRARY_IMPL(train_unet, AutocastCPU, m) { implement_autocast(m); }
TORCH_LIBRARY_IMPL(train_unet, AutocastCUDA, m) { implement_autocast(m); }
