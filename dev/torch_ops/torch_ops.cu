// torch_ops.cu: the launchers of train_unet.cu behind the interface of torch_ops.h, for torch_ops.cpp to call. It
// includes the program; nothing of it is copied. It needs no header of PyTorch:
//
//   g++ -x c++ -std=c++20 -fopenmp -c torch_ops.cu                      float32 on the CPU
//   nvcc -std=c++20 -c torch_ops.cu                                     bfloat16 on a GPU
//   nvcc -std=c++20 -DPRECISION_FP32 -c torch_ops.cu                    float32 on a GPU
//
// torch_ops.py adds the flags of the Makefile at the root, which compiles all three for the tests.
#include "torch_ops.h"

#include <cassert>
#include <mutex>
#include <stdexcept>

// A failed check of the program is an exception here, for a library must not end the program that loaded it.
// glibc's assert calls this; the program's include of <cassert> makes the macro anew and declares nothing again.
[[noreturn]] static void check_failed(const char* expression, const char* file, unsigned line, const char*) {
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + expression +
                             " does not hold: please report how this came about");
}
#define __assert_fail check_failed
#define main train_unet_main
#include "../../train_unet.cu"
#undef main

#include "../dit/gelu.h"

// ---- where a call runs ------------------------------------------------------------------------------------

#ifdef __CUDACC__
// The launchers know the properties of one GPU: others must be of its kind.
static void know_device(int device) {
    static std::mutex one_at_a_time;
    static std::set<int> known;
    std::lock_guard lock(one_at_a_time);
    if (known.count(device)) return;
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    if (properties.major < 8)
        fail("%s is too old: compute capability %d.%d, and 8.0 is the least", properties.name,
             properties.major, properties.minor);
    if (known.empty()) gpu_properties = properties;
    if (strcmp(properties.name, gpu_properties.name))
        fail("GPUs of one kind only: %s was used first, %s is another", gpu_properties.name, properties.name);
    known.insert(device);
}
#else
// A layer has all threads, and the scratch of each: two callers take turns.
static std::mutex one_at_a_time;
#endif

// Does what launches() launches at this place, with so much workspace on a GPU.
static void at(const Place& place, size_t workspace, auto launches) {
    try {
#ifdef __CUDACC__
        CUDA_CHECK(cudaSetDevice(place.device));  // autograd's thread may be new to CUDA: tensor maps need a context
        know_device(place.device);
        Stream here = {(cudaStream_t)place.stream, {}};
        if (workspace) here.workspace = {(char*)place.allocate(workspace), workspace, 0};
        struct Restore {
            Stream* before;
            ~Restore() { stream = before; }
        } restore = {std::exchange(stream, &here)};
#else
        std::lock_guard lock(one_at_a_time);
        cpu::used_threads = place.threads;
        // none for a layer that asks for none: what an earlier call had is PyTorch's again
        cpu::cpu_workspace = workspace ? (float*)place.allocate(cpu::cpu_workspace_bytes()) : nullptr;
#endif
        launches();
    } catch (const Failure& failure) {
#ifdef __CUDACC__
        cudaGetLastError();  // not to be found by PyTorch's next check
#endif
        throw std::runtime_error(failure.sentence);
    }
}

#ifdef __CUDACC__
static size_t product_workspace() { return GPU_WORKSPACE_BYTES; }
// And the sums of each image that a bias gradient is made of, of whole tiles: see launch_weight_sums.
static size_t weight_workspace(const Image& dout) {
    return GPU_WORKSPACE_BYTES + aligned(2 * sizeof(float) * ((size_t)dout.B + 1) * dout.C);
}
#else
static size_t product_workspace() { return 1; }
static size_t weight_workspace(const Image&) { return 1; }
#endif

// ---- what torch_ops.h calls a tensor, as the program does -------------------------------------------------

static Tensor tensor(const Image& image) { return {(floatX*)image.data, image.B, image.H, image.W, image.C}; }
template <int TAPS> static ConvLayer<TAPS> product(const void* w, const void* bias = nullptr) {
    return {(const floatX*)w, (const floatX*)bias};
}
static Norm norm_of(const NormCall& call, Tensor x) {
    size_t channels = (size_t)x.B * x.C;
    Norm norm = {.x = x, .groups = call.groups, .silu = call.silu, .w = call.w, .bias = call.bias};
    norm.dw = call.dw, norm.dbias = call.dbias;
    norm.statistics = (GroupStatistics*)call.record;
    norm.half_scale_shift = (ScaleShift*)(norm.statistics + channels);
    if (call.scale_shift) norm.modulation = {(floatX*)call.scale_shift, 2 * x.C};
    if (call.dscale_shift) norm.dmodulation = {(floatX*)call.dscale_shift, 2 * x.C};
    return norm;
}
template <typename Sums> static Sums* scratch_sums(const Place& place, Tensor x) {
    return (Sums*)place.allocate(sizeof(Sums) * x.B * norm_tiles(x.T()) * x.C);
}

static Tensor scratch_like(const Place& place, Tensor x) {
    return {(floatX*)place.allocate(x.count() * sizeof(floatX)), x.B, x.H, x.W, x.C};
}

// ---- AdamW over many tensors ------------------------------------------------------------------------------

// Counts the step, and works out what depends on it. In the device's memory, so that a CUDA graph can replay it.
struct BeginUpdate {
    StepState* state;
    float* step;
    Hyper hyper;

    size_t items() const { return 1; }
    HOST_DEVICE void operator()(size_t) const {
        state->update = adamw_at(hyper, 0, (int64_t)*step);
        state->accepted = 1;
        *step += 1;
    }
};
// UpdateWeights of up to MOST tensors, whose items follow each other. What four do not divide is an item too.
struct UpdateTensors {
    enum { MOST = 64 };
    struct Part {
        float *w, *m, *v;
        const float* gradient;
    } parts[MOST];
    unsigned counts[MOST], ends[MOST];  // elements; items, those of earlier tensors included
    int tensors;
    const StepState* state;

    size_t items() const { return ends[tensors - 1]; }
    HOST_DEVICE void operator()(size_t item) const {
        int low = 0, high = tensors - 1;  // the first tensor that ends behind the item
        while (low < high) {
            int middle = (low + high) / 2;
            if (item < ends[middle]) high = middle;
            else low = middle + 1;
        }
        const Part part = parts[low];
        size_t first = 4 * (item - (low ? ends[low - 1] : 0)), left = counts[low] - first;
        ::Vector<float, 4> w = {}, m = {}, v = {}, gradient = {};
        bool whole = left >= 4;
        for (size_t j = 0; j < 4 && !whole; j++)
            if (j < left)
                w[j] = part.w[first + j], m[j] = part.m[first + j], v[j] = part.v[first + j],
                gradient[j] = part.gradient[first + j];
        OptimiserMemory memory = {};
        memory.master = whole ? part.w + first : w.elements, memory.adam_m = whole ? part.m + first : m.elements;
        memory.adam_v = whole ? part.v + first : v.elements;
        const float* gradients = whole ? part.gradient + first : gradient.elements;
        UpdateWeights<float>{memory, gradients, nullptr, 4, 4, state}(0);
        for (size_t j = 0; j < 4 && !whole; j++)
            if (j < left)
                part.w[first + j] = w[j], part.m[first + j] = m[j], part.v[first + j] = v[j];
    }
};

// ---- the interface ----------------------------------------------------------------------------------------

namespace {
struct LaunchedLayers final : Layers {
    Limits limits(const Place& place) const override {
        Limits found = {1, 1, 16 / (int)sizeof(floatX), 1, INT_MAX, INT_MAX};
        at(place, 0, [&] {
            std::tie(found.head_multiple, found.head_most) = head_channels();
#ifdef __CUDACC__
            found.product_channels = CHANNEL_MULTIPLE, found.norm_channels = 32;
#else
            found.attention_pixels = cpu::THREAD_FLOATS / 2;
#endif
        });
        return found;
    }

    void product_forward(const Place& place, const ProductCall& c) const override {
        ForwardOptions options = {{(floatX*)c.emb, c.out.C}, tensor(c.residual)};
        at(place, product_workspace(), [&] {
            if (c.taps == 9) conv3x3_forward(tensor(c.out), tensor(c.x), product<9>(c.w, c.bias), options);
            else conv1x1_forward(tensor(c.out), tensor(c.x), product<1>(c.w, c.bias), options);
        });
    }
    void input_gradient(const Place& place, const ProductCall& c) const override {
        at(place, product_workspace(), [&] {
            if (c.taps == 9) conv3x3_backward_input(tensor(c.x), tensor(c.out), product<9>(c.w));
            else conv1x1_backward_input(tensor(c.x), tensor(c.out), product<1>(c.w));
        });
    }
    void weight_gradient(const Place& place, const WeightGradientCall& c) const override {
        Rows demb = {(floatX*)c.demb, c.dout.C};
        at(place, weight_workspace(c.dout), [&] {  // not on a side stream: PyTorch waits for its own alone
            if (c.taps == 9)
                conv3x3_backward_weight({nullptr, nullptr, c.dw, c.dbias}, tensor(c.dout), tensor(c.x), demb);
            else
                conv1x1_backward_weight({nullptr, nullptr, c.dw, c.dbias}, tensor(c.dout), tensor(c.x));
        });
    }

    void group_norm(const Place& place, const NormCall& c) const override {
        at(place, 0, [&] {
            Tensor x = tensor(c.x);
            x.moments = scratch_sums<Moments>(place, x);
            channel_moments(x);
            groupnorm_forward(tensor(c.out), norm_of(c, x));
        });
    }
    void group_norm_backward(const Place& place, const NormCall& c) const override {
        at(place, 0, [&] {
            Tensor x = tensor(c.x), dy = scratch_like(place, x);
            Norm norm = norm_of(c, x);
            norm.sums = scratch_sums<NormSums>(place, x);
            groupnorm_backward_sums(dy, tensor(c.dout), norm);
            if (c.dscale_shift) run(ModulationBackward<floatX>{norm});
            groupnorm_backward(tensor(c.out), dy, dy, norm);
        });
    }

    void norm_product(const Place& place, const NormCall& n, const ProductCall& c) const override {
        ForwardOptions options = {{(floatX*)c.emb, c.out.C}, tensor(c.residual)};
        at(place, product_workspace(), [&] {
            Tensor x = tensor(n.x), normed = scratch_like(place, x);
            x.moments = scratch_sums<Moments>(place, x);
            channel_moments(x);
            Concat input = groupnorm_for_conv3x3(normed, norm_of(n, x), c.out.C);
            conv3x3_forward(tensor(c.out), input, product<9>(c.w, c.bias), options);
        });
    }
    void norm_product_backward(const Place& place, const NormCall& n, const ProductCall& c,
                               const WeightGradientCall& weights) const override {
        at(place, weight_workspace(c.out), [&] {
            Tensor x = tensor(n.x), dnormed = scratch_like(place, x), normed = dnormed, dout = tensor(c.out);
            Norm norm = norm_of(n, x);
            norm.sums = scratch_sums<NormSums>(place, x);
            conv3x3_backward_input(dnormed, dout, product<9>(c.w), {.norm = norm});
            if (n.dscale_shift) run(ModulationBackward<floatX>{norm});
            groupnorm_backward(tensor(n.out), normed, dnormed, norm);
            conv3x3_backward_weight({nullptr, nullptr, weights.dw, weights.dbias}, dout, normed,
                                    {(floatX*)weights.demb, dout.C});
        });
    }

    void attention(const Place& place, const AttentionCall& c) const override {
        at(place, 1, [&] { attention_forward(tensor(c.out), c.lse, tensor(c.qkv), c.heads); });
    }
    void attention_backward(const Place& place, const AttentionCall& c) const override {
        at(place, 1, [&] {
            ::attention_backward(tensor(c.dqkv), tensor(c.dout), tensor(c.out), c.lse, tensor(c.qkv),
                                 c.heads);
        });
    }

    void resample(const Place& place, Image out, Image x, float factor) const override {
        at(place, 0, [&] { run(Resample<floatX>{tensor(out), tensor(x), factor}); });
    }
    void timestep_embedding(const Place& place, Image out, const int* t, int max_period,
                            double unit) const override {
        at(place, 0, [&] { run(TimestepEmbedding<floatX>{tensor(out), t, max_period, unit}); });
    }
    void gelu(const Place& place, Image out, Image x) const override {
        at(place, 0, [&] { run(GeluForward<floatX>{tensor(out), tensor(x)}); });
    }
    void gelu_backward(const Place& place, Image dx, Image dout, Image x) const override {
        at(place, 0, [&] { run(GeluBackward<floatX>{tensor(dx), tensor(dout), tensor(x)}); });
    }

    void adamw(const Place& place, const AdamWCall& c) const override {
        at(place, 0, [&] {
            Hyper hyper = {};
            hyper.lr = c.lr, hyper.weight_decay = c.weight_decay, hyper.lr_schedule = LR_CONSTANT;
            hyper.beta1 = c.beta1, hyper.beta2 = c.beta2, hyper.adam_eps = c.eps;
            StepState* state = (StepState*)place.allocate(sizeof(StepState));
            run(BeginUpdate{state, c.step, hyper});
            UpdateTensors tensors = {};
            tensors.state = state;
            for (int i = 0; i < c.count; i++) {
                const auto& [w, m, v, gradient, n] = c.updates[i];
                int k = tensors.tensors++;
                tensors.parts[k] = {w, m, v, gradient}, tensors.counts[k] = (unsigned)n;
                tensors.ends[k] = (k ? tensors.ends[k - 1] : 0) + (unsigned)ceil_div(n, 4);
                if (k + 1 == UpdateTensors::MOST || i + 1 == c.count) run(tensors), tensors.tensors = 0;
            }
        });
    }
};
}  // namespace

#ifndef __CUDACC__
#define LAYERS unet_layers_cpu
#elif defined(PRECISION_FP32)
#define LAYERS unet_layers_fp32
#else
#define LAYERS unet_layers_bf16
#endif
extern "C" __attribute__((visibility("default"))) const Layers* LAYERS() {
    static const LaunchedLayers layers;
    return &layers;
}
