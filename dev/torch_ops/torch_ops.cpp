// torch_ops.cpp: the layers of train_unet.cu as operators of PyTorch, torch.ops.train_unet.*: the schemas, at the
// end, and a function for each. A function
//
//   refuses what its layer does not take, with a sentence (TORCH_CHECK: a RuntimeError in Python);
//   brings its inputs into the layer's form: channels_last, aligned, float32 or bfloat16; where they are, nothing
//   is copied. A GPU wants channels in multiples of 8: a product's are padded with zeros, and cut off again;
//   takes outputs and scratch from PyTorch's allocator, and the stream that is current there;
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
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, op,
                " computes in bfloat16 or float32 on a GPU, not in ", type,
                "; torch.autocast takes dtype=torch.bfloat16");
#ifdef WITH_CUDA
    return type == at::kFloat ? *unet_layers_fp32() : *unet_layers_bf16();
#else
    TORCH_CHECK(false, op, ": the operators were built without a GPU");
#endif
}

// A tensor's numbers may be gone while its shape stays: FSDP frees the storage of parameters between two uses.
void check_memory(const char* op, const char* name, const Tensor& t) {
    if (!t.numel()) return;
    int64_t last = t.storage_offset();
    for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
    TORCH_CHECK(t.has_storage() && t.storage().nbytes() >= (last + 1) * t.itemsize(), op, ": ", name,
                " has shape ", t.sizes(), " and no memory for it: its storage was freed or made smaller");
}

// A call of an operator on the device of x, with the memory that it asks for until it is over.
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

    // What the launchers count in 32 bits, and a grid's 16.
    void check_images(const Tensor& images, const char* name) const {
        TORCH_CHECK(images.dim() == 4, op, ": ", name, " is (B, C, H, W), not of ", images.dim(),
                    " dimensions");
        int64_t B = images.size(0), C = images.size(1), H = images.size(2), W = images.size(3);
        TORCH_CHECK(C > 0 && H > 0 && W > 0, op, ": ", name, " has images of ", C, " x ", H, " x ", W);
        TORCH_CHECK(C <= 3 << 14, op, ": ", name, " has ", C, " channels, and 49152 are the most");
        TORCH_CHECK((B <= 65535 || H * W == 1) && B * H * W <= 1 << 30, op, ": ", name, " has ", B,
                    " images of ", H, " x ", W, " pixels; 65535 images and 2^30 pixels in all are the most");
        TORCH_CHECK(H * W * C < (int64_t)1 << 31, op, ": an image of ", name, " has more than 2^31 numbers");
    }
    void check_like(const Tensor& t, const char* name, at::IntArrayRef sizes) const {
        TORCH_CHECK(t.device() == x.device(), op, ": ", name, " is on ", t.device(), " and x on ",
                    x.device());
        TORCH_CHECK(t.sizes() == sizes, op, ": ", name, " has shape ", t.sizes(), ", needed is ", sizes);
        check_memory(op, name, t);
    }
    // Of x's type too.
    void check_activation(const Tensor& t, const char* name, at::IntArrayRef sizes) const {
        check_like(t, name, sizes);
        TORCH_CHECK(t.scalar_type() == x.scalar_type(), op, ": ", name, " is in ", t.scalar_type(),
                    " and x in ", x.scalar_type());
    }
    // Parameters may stay float32 where x is not.
    void check_parameter(const Tensor& t, const char* name, at::IntArrayRef sizes) const {
        check_like(t, name, sizes);
        TORCH_CHECK(t.scalar_type() == x.scalar_type() || t.scalar_type() == at::kFloat, op, ": ", name,
                    " is in ", t.scalar_type(), ", needed is float32",
                    x.scalar_type() == at::kFloat ? "" : " or x's type");
    }
    at::TensorOptions floats() const { return x.options().dtype(at::kFloat); }
};

Tensor aligned(Tensor t) { return (uintptr_t)t.const_data_ptr() % 16 ? t.clone() : t; }
int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Images as the layers have them, with so many channels, of which zeros are the last.
Tensor images_with(const Tensor& t, int64_t channels) {
    if (t.size(1) == channels) return aligned(t.contiguous(CHANNELS_LAST));
    Tensor padded =
        at::empty({t.size(0), channels, t.size(2), t.size(3)}, t.options(), CHANNELS_LAST).zero_();
    padded.narrow(1, 0, t.size(1)).copy_(t);
    return padded;
}
Tensor images_like(const Tensor& t, int64_t C, int64_t H, int64_t W) {
    return at::empty({t.size(0), C, H, W}, t.options(), CHANNELS_LAST);
}
Tensor cut_channels(const Tensor& t, int64_t C) {
    return t.size(1) == C ? t : t.narrow(1, 0, C).contiguous(CHANNELS_LAST);
}
// A parameter (O, ...), or rows (B, C), as contiguous numbers of this type; up to C columns zeros follow.
Tensor rows_with(const Tensor& t, int64_t columns, at::ScalarType type) {
    if (t.size(-1) == columns) return aligned(t.to(type).contiguous());
    std::vector<int64_t> sizes = t.sizes().vec();
    sizes.back() = columns;
    Tensor padded = at::zeros(sizes, t.options().dtype(type));
    padded.narrow(-1, 0, t.size(-1)).copy_(t);
    return padded;
}
Image image(const Tensor& t) {
    return {t.data_ptr(), (int)t.size(0), (int)t.size(2), (int)t.size(3), (int)t.size(1)};
}
void* data(const optional<Tensor>& t) { return t && t->defined() ? t->data_ptr() : nullptr; }

// ---- 3x3 and 1x1 convolutions -----------------------------------------------------------------------------

// w (O, C, 3, 3) or (O, C) as the layers have it, (O, 3, 3, C) or (O, C), in the type of the images.
Tensor weight_with(const Tensor& w, int64_t O, int64_t C, at::ScalarType type) {
    bool same = w.size(0) == O && w.size(1) == C;
    auto format = w.dim() == 4 ? CHANNELS_LAST : at::MemoryFormat::Contiguous;
    if (same && w.scalar_type() == type && w.is_contiguous(format)) return aligned(w);
    std::vector<int64_t> sizes = w.sizes().vec();
    sizes[0] = O, sizes[1] = C;
    Tensor made = same ? at::empty(sizes, w.options().dtype(type), format)
                       : at::zeros(sizes, w.options().dtype(type)).contiguous(format);
    made.narrow(0, 0, w.size(0)).narrow(1, 0, w.size(1)).copy_(w);
    return made;
}
Tensor cut_weight(const Tensor& w, int64_t O, int64_t C) {
    auto format = w.dim() == 4 ? CHANNELS_LAST : at::MemoryFormat::Contiguous;
    return w.narrow(0, 0, O).narrow(1, 0, C).contiguous(format);
}
void check_weight(const Call& call, const Tensor& w, int taps, int64_t C) {
    int64_t O = w.dim() ? w.size(0) : 0;
    if (taps == 9) call.check_parameter(w, "w", {O, C, 3, 3});
    else call.check_parameter(w, "w", {O, C});
    TORCH_CHECK(O > 0 && O <= 3 << 14, call.op, ": w has ", O, " output channels; 1 to 49152 can be had");
    TORCH_CHECK(taps * O * C < (int64_t)1 << 31, call.op, ": w has more than 2^31 numbers");
}

// The output; and w in the type of x, for the input gradient to read, or an empty tensor where w has that type.
std::tuple<Tensor, Tensor> product(const char* op, int taps, const Tensor& x, const Tensor& w,
                                   const optional<Tensor>& bias, const optional<Tensor>& emb,
                                   const optional<Tensor>& residual) {
    Call call(op, x);
    call.check_images(x, "x");
    check_weight(call, w, taps, x.size(1));
    int64_t B = x.size(0), O = w.size(0), H = x.size(2), W = x.size(3);
    if (bias) call.check_parameter(*bias, "bias", {O});
    if (emb) call.check_activation(*emb, "emb", {B, O});
    if (residual) call.check_activation(*residual, "residual", {B, O, H, W});
    at::ScalarType type = x.scalar_type();
    int multiple = call.limits().convolution_channels;
    int64_t C8 = round_up(x.size(1), multiple), O8 = round_up(O, multiple);
    Tensor weight = weight_with(w, O8, C8, type), cast = at::empty({0}, x.options());
    if (w.scalar_type() != type) cast = cut_weight(weight, O, x.size(1));
    if (!x.numel()) return {images_like(x, O, H, W), cast};
    Tensor in = images_with(x, C8), out = images_like(x, O8, H, W);
    Tensor b = bias ? rows_with(*bias, O8, type) : at::zeros({O8}, x.options()), rows, around;
    if (emb) rows = rows_with(*emb, O8, type);
    if (residual) around = images_with(*residual, O8);
    call.layers.convolution(call.place, {taps, image(out), image(in), weight.data_ptr(), b.data_ptr(),
                                             data(rows), residual ? image(around) : Image()});
    return {cut_channels(out, O), cast};
}
Tensor input_gradient(const char* op, int taps, const Tensor& dout, const Tensor& w) {
    Call call(op, dout);
    call.check_images(dout, "dout");
    TORCH_CHECK(w.dim() >= 2, op, ": w has ", w.dim(), " dimensions");
    int64_t C = w.size(1), H = dout.size(2), W = dout.size(3);
    check_weight(call, w, taps, C);
    TORCH_CHECK(w.size(0) == dout.size(1), op, ": dout has ", dout.size(1), " channels and w makes ",
                w.size(0));
    if (!dout.numel()) return images_like(dout, C, H, W);
    int multiple = call.limits().convolution_channels;
    int64_t C8 = round_up(C, multiple), O8 = round_up(w.size(0), multiple);
    Tensor upstream = images_with(dout, O8), weight = weight_with(w, O8, C8, dout.scalar_type()),
           dx = images_like(dout, C8, H, W);
    call.layers.input_gradient(call.place, {taps, image(upstream), image(dx), weight.data_ptr()});
    return cut_channels(dx, C);
}
// Of w and bias in float32, and of emb where it is wanted.
std::tuple<Tensor, Tensor, Tensor> weight_gradient(const char* op, int taps, const Tensor& dout,
                                                   const Tensor& x, bool per_image) {
    Call call(op, x);
    call.check_images(x, "x"), call.check_images(dout, "dout");
    int64_t B = x.size(0), C = x.size(1), O = dout.size(1);
    call.check_activation(dout, "dout", {B, O, x.size(2), x.size(3)});
    TORCH_CHECK(taps * O * C < (int64_t)1 << 31, op, ": w has more than 2^31 numbers");
    int multiple = call.limits().convolution_channels;
    int64_t C8 = round_up(C, multiple), O8 = round_up(O, multiple);
    auto floats = call.floats();
    Tensor dw = taps == 9 ? at::empty({O8, C8, 3, 3}, floats, CHANNELS_LAST) : at::empty({O8, C8}, floats);
    Tensor dbias = at::empty({O8}, floats), demb = at::empty({per_image ? B : 0, O8}, x.options());
    if (x.numel()) {
        Tensor in = images_with(x, C8), upstream = images_with(dout, O8);
        call.layers.weight_gradient(call.place,
                                    {taps, dw.data_ptr<float>(), dbias.data_ptr<float>(),
                                     per_image ? demb.data_ptr() : nullptr, image(upstream), image(in)});
    } else {
        dw.zero_(), dbias.zero_();
    }
    if (O8 != O) dbias = dbias.narrow(0, 0, O).clone(), demb = demb.narrow(1, 0, O).contiguous();
    return {cut_weight(dw, O, C), dbias, demb};
}

std::tuple<Tensor, Tensor> conv3x3(const Tensor& x, const Tensor& w, const optional<Tensor>& bias,
                                   const optional<Tensor>& emb, const optional<Tensor>& residual) {
    return product("conv3x3", 9, x, w, bias, emb, residual);
}
Tensor conv3x3_input_gradient(const Tensor& dout, const Tensor& w) {
    return input_gradient("conv3x3_input_gradient", 9, dout, w);
}
std::tuple<Tensor, Tensor, Tensor> conv3x3_weight_gradient(const Tensor& dout, const Tensor& x,
                                                           bool per_image) {
    return weight_gradient("conv3x3_weight_gradient", 9, dout, x, per_image);
}
std::tuple<Tensor, Tensor> conv1x1(const Tensor& x, const Tensor& w, const optional<Tensor>& bias,
                                   const optional<Tensor>& residual) {
    return product("conv1x1", 1, x, w, bias, {}, residual);
}
Tensor conv1x1_input_gradient(const Tensor& dout, const Tensor& w) {
    return input_gradient("conv1x1_input_gradient", 1, dout, w);
}
std::tuple<Tensor, Tensor> conv1x1_weight_gradient(const Tensor& dout, const Tensor& x) {
    auto [dw, dbias, demb] = weight_gradient("conv1x1_weight_gradient", 1, dout, x, false);
    return {dw, dbias};
}

// ---- group norm -------------------------------------------------------------------------------------------

struct NormInputs {
    Tensor x, w, bias, scale_shift;
    NormCall call;
};
NormInputs norm_inputs(const Call& call, const Tensor& x, const Tensor& w, const Tensor& bias, int64_t groups,
                       bool silu, const optional<Tensor>& scale_shift) {
    call.check_images(x, "x");
    int64_t C = x.size(1);
    call.check_parameter(w, "w", {C}), call.check_parameter(bias, "bias", {C});
    if (scale_shift) call.check_activation(*scale_shift, "scale_shift", {x.size(0), 2 * C});
    TORCH_CHECK(groups > 0 && C % groups == 0, call.op, ": ", groups, " groups do not divide ", C,
                " channels");
    TORCH_CHECK(C / groups > 1, call.op, ": ", groups, " groups leave one channel a group; use fewer");
    int multiple = call.limits().norm_channels;
    TORCH_CHECK(C % multiple == 0, call.op, ": on a GPU channels come in multiples of ", multiple, ", not ",
                C);
    TORCH_CHECK(C <= 1 << 14, call.op, ": x has ", C, " channels, and 16384 are the most");
    if (!x.numel()) return {};
    NormInputs in = {images_with(x, C), rows_with(w, C, at::kFloat), rows_with(bias, C, at::kFloat), {}, {}};
    if (scale_shift) in.scale_shift = rows_with(*scale_shift, 2 * C, x.scalar_type());
    in.call = {.out = {},
               .x = image(in.x),
               .groups = (int)groups,
               .silu = silu,
               .w = in.w.data_ptr<float>(),
               .bias = in.bias.data_ptr<float>(),
               .scale_shift = data(in.scale_shift)};
    return in;
}
// record (2, B, C, 2), for backward: statistics, then what the norm comes to; see NormOf in train_unet.cu.
std::tuple<Tensor, Tensor> group_norm(const Tensor& x, const Tensor& w, const Tensor& bias, int64_t groups,
                                      bool silu, const optional<Tensor>& scale_shift) {
    Call call("group_norm", x);
    NormInputs in = norm_inputs(call, x, w, bias, groups, silu, scale_shift);
    Tensor out = images_like(x, x.size(1), x.size(2), x.size(3));
    Tensor record = at::empty({2, x.size(0), x.size(1), 2}, call.floats());
    if (!x.numel()) return {out, record};
    in.call.out = image(out), in.call.record = record.data_ptr<float>();
    call.layers.group_norm(call.place, in.call);
    return {out, record};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_backward(const Tensor& dout, const Tensor& x,
                                                               const Tensor& w, const Tensor& bias,
                                                               const Tensor& record, int64_t groups,
                                                               bool silu,
                                                               const optional<Tensor>& scale_shift) {
    Call call("group_norm_backward", x);
    NormInputs in = norm_inputs(call, x, w, bias, groups, silu, scale_shift);
    int64_t B = x.size(0), C = x.size(1);
    call.check_activation(dout, "dout", x.sizes()), call.check_like(record, "record", {2, B, C, 2});
    TORCH_CHECK(record.scalar_type() == at::kFloat && record.is_contiguous(), call.op,
                ": record is not of group_norm");
    Tensor dx = images_like(x, C, x.size(2), x.size(3)), dw = at::zeros({C}, call.floats()),
           dbias = at::zeros_like(dw);
    Tensor dscale_shift = at::empty({scale_shift ? B : 0, 2 * C}, x.options());
    if (!x.numel()) return {dx, dw, dbias, dscale_shift};
    Tensor upstream = images_with(dout, C);
    in.call.out = image(dx), in.call.dout = image(upstream), in.call.record = record.data_ptr<float>();
    in.call.dw = dw.data_ptr<float>(), in.call.dbias = dbias.data_ptr<float>();
    if (scale_shift) in.call.dscale_shift = dscale_shift.data_ptr();
    call.layers.group_norm_backward(call.place, in.call);
    return {dx, dw, dbias, dscale_shift};
}

// conv3x3(group_norm_silu(x)), of which autograd keeps x alone; the record of group_norm, and conv3x3's weight.
std::tuple<Tensor, Tensor, Tensor> norm_conv3x3(const Tensor& x, const Tensor& norm_w,
                                                const Tensor& norm_bias, int64_t groups,
                                                const optional<Tensor>& scale_shift, const Tensor& w,
                                                const optional<Tensor>& bias, const optional<Tensor>& emb,
                                                const optional<Tensor>& residual) {
    Call call("norm_conv3x3", x);
    NormInputs in = norm_inputs(call, x, norm_w, norm_bias, groups, true, scale_shift);
    int64_t B = x.size(0), C = x.size(1), H = x.size(2), W = x.size(3);
    check_weight(call, w, 9, C);
    int64_t O = w.size(0), O8 = round_up(O, call.limits().convolution_channels);
    if (bias) call.check_parameter(*bias, "bias", {O});
    if (emb) call.check_activation(*emb, "emb", {B, O});
    if (residual) call.check_activation(*residual, "residual", {B, O, H, W});
    at::ScalarType type = x.scalar_type();
    Tensor record = at::empty({2, B, C, 2}, call.floats()), cast = at::empty({0}, x.options());
    Tensor weight = weight_with(w, O8, C, type), out = images_like(x, O8, H, W);
    if (w.scalar_type() != type) cast = cut_weight(weight, O, C);
    if (x.numel()) {
        Tensor b = bias ? rows_with(*bias, O8, type) : at::zeros({O8}, x.options()), rows, around;
        if (emb) rows = rows_with(*emb, O8, type);
        if (residual) around = images_with(*residual, O8);
        in.call.record = record.data_ptr<float>();
        call.layers.norm_conv3x3(call.place, in.call,
                                 {9,
                                  image(out),
                                  {},
                                  weight.data_ptr(),
                                  b.data_ptr(),
                                  data(rows),
                                  residual ? image(around) : Image()});
    }
    return {cut_channels(out, O), record, cast};
}
// dx, of norm_w and norm_bias, of scale_shift where it is there, of w and bias, of emb where it is wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> norm_conv3x3_backward(
    const Tensor& dout, const Tensor& x, const Tensor& norm_w, const Tensor& norm_bias, const Tensor& record,
    int64_t groups, const optional<Tensor>& scale_shift, const Tensor& w, bool per_image) {
    Call call("norm_conv3x3_backward", x);
    NormInputs in = norm_inputs(call, x, norm_w, norm_bias, groups, true, scale_shift);
    int64_t B = x.size(0), C = x.size(1), H = x.size(2), W = x.size(3);
    check_weight(call, w, 9, C);
    int64_t O = w.size(0), O8 = round_up(O, call.limits().convolution_channels);
    call.check_activation(dout, "dout", {B, O, H, W}), call.check_like(record, "record", {2, B, C, 2});
    TORCH_CHECK(record.scalar_type() == at::kFloat && record.is_contiguous(), call.op,
                ": record is not of norm_conv3x3");
    auto floats = call.floats();
    Tensor dx = images_like(x, C, H, W), dnorm_w = at::zeros({C}, floats),
           dnorm_bias = at::zeros({C}, floats);
    Tensor dscale_shift = at::empty({scale_shift ? B : 0, 2 * C}, x.options());
    Tensor dw = at::empty({O8, C, 3, 3}, floats, CHANNELS_LAST), dbias = at::empty({O8}, floats);
    Tensor demb = at::empty({per_image ? B : 0, O8}, x.options());
    if (x.numel()) {
        Tensor upstream = images_with(dout, O8), weight = weight_with(w, O8, C, x.scalar_type());
        in.call.out = image(dx), in.call.record = record.data_ptr<float>();
        in.call.dw = dnorm_w.data_ptr<float>(), in.call.dbias = dnorm_bias.data_ptr<float>();
        if (scale_shift) in.call.dscale_shift = dscale_shift.data_ptr();
        call.layers.norm_conv3x3_backward(call.place, in.call, {9, image(upstream), {}, weight.data_ptr()},
                                          {9,
                                           dw.data_ptr<float>(),
                                           dbias.data_ptr<float>(),
                                           per_image ? demb.data_ptr() : nullptr,
                                           {},
                                           {}});
    } else {
        dw.zero_(), dbias.zero_();
    }
    if (O8 != O) dbias = dbias.narrow(0, 0, O).clone(), demb = demb.narrow(1, 0, O).contiguous();
    return {dx, dnorm_w, dnorm_bias, dscale_shift, cut_weight(dw, O, C), dbias, demb};
}

// ---- attention --------------------------------------------------------------------------------------------

void check_attention(const Call& call, const Tensor& qkv, int64_t heads) {
    call.check_images(qkv, "qkv");
    int64_t C = qkv.size(1) / 3, T = qkv.size(2) * qkv.size(3);
    TORCH_CHECK(qkv.size(1) % 3 == 0, call.op, ": qkv has ", qkv.size(1),
                " channels, which are not q, k and v");
    TORCH_CHECK(heads > 0 && heads <= 65535 && C % heads == 0, call.op, ": ", heads, " heads do not divide ",
                C, " channels");
    TORCH_CHECK(qkv.size(0) <= 65535, call.op, ": ", qkv.size(0), " images are more than 65535");
    Limits limits = call.limits();
    TORCH_CHECK(C / heads % limits.head_multiple == 0 && C / heads <= limits.head_most, call.op,
                ": heads of ", C / heads, " channels: on a GPU they have a multiple of ",
                limits.head_multiple, " up to ", limits.head_most);
    TORCH_CHECK(T <= limits.attention_pixels, call.op, ": ", T, " pixels are more than ",
                limits.attention_pixels);
}
std::tuple<Tensor, Tensor> attention(const Tensor& qkv, int64_t heads) {
    Call call("attention", qkv);
    check_attention(call, qkv, heads);
    int64_t C = qkv.size(1) / 3, H = qkv.size(2), W = qkv.size(3);
    Tensor out = images_like(qkv, C, H, W), lse = at::empty({qkv.size(0), heads, H * W}, call.floats());
    if (!qkv.numel()) return {out, lse};
    Tensor in = images_with(qkv, 3 * C);
    call.layers.attention(call.place, {image(out), image(in), lse.data_ptr<float>(), (int)heads});
    return {out, lse};
}
Tensor attention_backward(const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& qkv,
                          int64_t heads) {
    Call call("attention_backward", qkv);
    check_attention(call, qkv, heads);
    int64_t C = qkv.size(1) / 3, H = qkv.size(2), W = qkv.size(3);
    call.check_activation(dout, "dout", {qkv.size(0), C, H, W}),
        call.check_activation(out, "out", dout.sizes());
    call.check_like(lse, "lse", {qkv.size(0), heads, H * W});
    TORCH_CHECK(lse.scalar_type() == at::kFloat, call.op, ": lse is not of attention");
    Tensor dqkv = images_like(qkv, 3 * C, H, W);
    if (!qkv.numel()) return dqkv;
    Tensor in = images_with(qkv, 3 * C), made = images_with(out, C), upstream = images_with(dout, C),
           sums = lse.contiguous();
    call.layers.attention_backward(call.place, {image(made), image(in), sums.data_ptr<float>(), (int)heads,
                                                image(dqkv), image(upstream)});
    return dqkv;
}

// ---- layers of independent items --------------------------------------------------------------------------

// Twice as large, each pixel 2x2 times, or half as large, the sums of 2x2 pixels; times `factor`.
Tensor resample(const Tensor& x, bool up, double factor) {
    Call call("resample", x);
    call.check_images(x, "x");
    int64_t C = x.size(1), H = x.size(2), W = x.size(3);
    TORCH_CHECK(up || (H % 2 == 0 && W % 2 == 0), call.op, ": images of ", H, " x ", W, " can't be halved");
    TORCH_CHECK(!up || x.size(0) * H * W <= 1 << 28, call.op, ": x has more than 2^28 pixels");
    H = up ? 2 * H : H / 2, W = up ? 2 * W : W / 2;
    if (!x.numel()) return images_like(x, C, H, W);
    int64_t C8 = round_up(C, call.limits().resample_channels);
    Tensor in = images_with(x, C8), out = images_like(x, C8, H, W);
    call.layers.resample(call.place, image(out), image(in), (float)factor);
    return cut_channels(out, C);
}

Tensor timestep_embedding(const Tensor& t, int64_t width, int64_t max_period, double unit,
                          at::ScalarType type) {
    TORCH_CHECK(t.dim() == 1 && at::isIntegralType(t.scalar_type(), false),
                "timestep_embedding: t is (B,), of integers");
    check_memory("timestep_embedding", "t", t);
    TORCH_CHECK(width > 0 && width % 2 == 0, "timestep_embedding: width is even, not ", width);
    TORCH_CHECK(max_period > 0 && max_period < 1 << 30, "timestep_embedding: max_period is 1 to 2^30, not ",
                max_period);
    Tensor out = at::empty({t.size(0), width}, t.options().dtype(type)),
           numbers = t.to(at::kInt).contiguous();
    Call call("timestep_embedding", out);
    TORCH_CHECK(out.numel() < (int64_t)1 << 31, call.op, ": more than 2^31 numbers");
    if (!out.numel()) return out;
    call.layers.timestep_embedding(call.place, {out.data_ptr(), (int)t.size(0), 1, 1, (int)width},
                                   numbers.data_ptr<int>(), (int)max_period, unit);
    return out;
}

// A tensor's numbers in the order in which `like`, without gaps, has its own; as a row.
Tensor in_order_of(const Tensor& like, const Tensor& t) {
    return aligned(t.strides() == like.strides() ? t : at::empty_like(like).copy_(t));
}
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
    Tensor in = in_order_of(dx, x), upstream = in_order_of(dx, dout);
    call.layers.gelu_backward(call.place, row(dx), row(upstream), row(in));
    return dx;
}

// ---- AdamW ------------------------------------------------------------------------------------------------

// One update of all parameters, in place; step, a scalar on their device, counts the updates.
void adamw_(at::TensorList params, at::TensorList gradients, at::TensorList m, at::TensorList v, Tensor step,
            double lr, double beta1, double beta2, double eps, double weight_decay) {
    TORCH_CHECK(params.size() == gradients.size() && params.size() == m.size() && params.size() == v.size(),
                "adamw_: so many parameters, gradients and moments: ", params.size(), ", ", gradients.size(),
                ", ", m.size(), ", ", v.size());
    if (params.empty()) return;
    Call call("adamw_", params[0]);
    TORCH_CHECK(call.x.scalar_type() == at::kFloat, "adamw_: parameters are float32, not ",
                call.x.scalar_type());
    call.check_activation(step, "step", {});
    std::vector<Tensor> ordered;  // gradients in the order of their parameters
    std::vector<Update> updates;
    for (size_t i = 0; i < params.size(); i++) {
        const Tensor& w = params[i];
        call.check_activation(w, "a parameter", w.sizes());
        TORCH_CHECK(w.is_non_overlapping_and_dense(), "adamw_: a parameter of shape ", w.sizes(),
                    " has gaps in memory");
        TORCH_CHECK(w.numel() < (int64_t)1 << 32, "adamw_: a parameter has more than 2^32 numbers");
        for (const Tensor& moment : {m[i], v[i]}) {
            call.check_activation(moment, "a moment", w.sizes());
            TORCH_CHECK(moment.strides() == w.strides(),
                        "adamw_: a moment is not in the order of its parameter");
        }
        call.check_like(gradients[i], "a gradient", w.sizes());
        ordered.push_back(in_order_of(w, gradients[i].to(at::kFloat)));
        for (const Tensor& t : {w, m[i], v[i]})
            TORCH_CHECK((uintptr_t)t.data_ptr() % 16 == 0,
                        "adamw_: a parameter or moment is not aligned to 16 bytes");
        if (w.numel())
            updates.push_back({w.data_ptr<float>(), m[i].data_ptr<float>(), v[i].data_ptr<float>(),
                               ordered.back().data_ptr<float>(), (size_t)w.numel()});
    }
    call.layers.adamw(call.place, {updates.data(), (int)updates.size(), step.data_ptr<float>(), (float)lr,
                                   (float)beta1, (float)beta2, (float)eps, (float)weight_decay});
}

// ---- autocast ---------------------------------------------------------------------------------------------

// Within torch.autocast activations are taken in its type (on a CPU in float32, which is what there is), whatever
// they come in. Parameters stay as they are: a layer rounds them itself, and their gradients stay float32.
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& arguments = op.schema().arguments();
    size_t first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
        c10::IValue& value = (*stack)[first + i];
        const std::string& name = arguments[i].name();
        if (!value.isTensor() || name.ends_with("w") || name.ends_with("bias")) continue;
        Tensor t = value.toTensor();
        if (!t.is_floating_point() || t.scalar_type() == at::kDouble) continue;
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
    for (const char* op :
         {"conv3x3", "conv1x1", "group_norm", "norm_conv3x3", "attention", "resample", "gelu"})
        m.impl(op, torch::CppFunction::makeFromBoxedFunction<&autocast>());
}
TORCH_LIBRARY_IMPL(train_unet, AutocastCPU, m) { implement_autocast(m); }
TORCH_LIBRARY_IMPL(train_unet, AutocastCUDA, m) { implement_autocast(m); }
