// torch_ops.cu: the launchers of train_unet.cu behind the interface of torch_ops.h, for torch_ops.cpp to call. It
// includes the program and copies nothing of it. It needs no header of PyTorch:
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

// A library must not end the process that loaded it, so a failed assert of the program throws. glibc's macro calls
// __assert_fail, in whose place this function is put. <cassert> is included before that: when the program includes it
// again, it defines the macro once more but declares nothing.
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
// The launchers know the properties of one GPU only. So all GPUs that a process uses must be of one kind.
static void check_device(int device) {
    static std::mutex one_at_a_time;
    static std::set<int> known;
    std::lock_guard lock(one_at_a_time);
    if (known.count(device)) return;

    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    if (properties.major < 8)
        fail("%s is too old: compute capability %d.%d, and 8.0 is the least", properties.name, properties.major,
             properties.minor);

    if (known.empty()) gpu_properties = properties;
    if (strcmp(properties.name, gpu_properties.name))
        fail("GPUs of one kind only: %s was used first, %s is another", gpu_properties.name, properties.name);
    known.insert(device);
}

// While a StreamScope lives, launches go to the stream `here`. Then they go to the stream before again.
struct StreamScope {
    Stream* before;
    explicit StreamScope(Stream* here) : before(std::exchange(stream, here)) {}
    ~StreamScope() { stream = before; }
};

static void launch_at(const Place& place, size_t workspace_bytes, auto launches) {
    CUDA_CHECK(cudaSetDevice(place.device));  // a thread of autograd may be new to CUDA, and tensor maps need a context
    check_device(place.device);

    Stream here = {(cudaStream_t)place.stream, {}};
    if (workspace_bytes) here.workspace = {(char*)place.allocate(workspace_bytes), workspace_bytes, 0};
    StreamScope scope(&here);
    launches();
}

static void forget_error() { cudaGetLastError(); }

static size_t attention_workspace() { return 0; }
static size_t convolution_workspace() { return GPU_WORKSPACE_BYTES; }

// A bias gradient is made of sums over whole tiles of images, which take more: see launch_weight_sums.
static size_t weight_workspace(const Image& dout) {
    return GPU_WORKSPACE_BYTES + aligned(2 * sizeof(float) * ((size_t)dout.B + 1) * dout.C);
}
#else
// A layer uses all threads and the scratch of each, so that two callers take turns.
static std::mutex one_at_a_time;

static void launch_at(const Place& place, size_t workspace_bytes, auto launches) {
    std::lock_guard lock(one_at_a_time);
    cpu::used_threads = place.threads;
    // Null for a layer that asks for none, because the memory of an earlier call is PyTorch's again.
    cpu::cpu_workspace = workspace_bytes ? (float*)place.allocate(cpu::cpu_workspace_bytes()) : nullptr;
    launches();
}

static void forget_error() {}

// A CPU's workspace has one size, cpu_workspace_bytes(). Here 1 says that a layer needs it.
static size_t attention_workspace() { return 1; }
static size_t convolution_workspace() { return 1; }
static size_t weight_workspace(const Image&) { return 1; }
#endif

// Calls launches(), which launches at this place, with a workspace of so many bytes. What the program refuses and what
// CUDA reports is thrown as torch_ops.h says.
static void at(const Place& place, size_t workspace_bytes, auto launches) {
    try {
        launch_at(place, workspace_bytes, launches);
    } catch (const Failure& failure) {
        forget_error();  // otherwise PyTorch's next check would find it
        throw std::runtime_error(failure.sentence);
    }
}

// ---- the structs of torch_ops.h as those of the program ---------------------------------------------------

static Tensor tensor(const Image& image) { return {(floatX*)image.data, image.B, image.H, image.W, image.C}; }

template <int TAPS> static ConvLayer<TAPS> conv_layer(const void* w, const void* bias = nullptr) {
    return {(const floatX*)w, (const floatX*)bias};
}

// What a convolution adds to its output besides the bias.
static ForwardOptions options_of(const ConvolutionCall& call) {
    return {.emb = {(floatX*)call.emb, call.out.C}, .residual = tensor(call.residual)};
}

// call.record holds norm.statistics, and behind them norm.half_scale_shift.
static Norm norm_of(const NormCall& call, Tensor x) {
    Norm norm = {
        .x = x,
        .groups = call.groups,
        .silu = call.silu,
        .w = call.w,
        .bias = call.bias,
        .dw = call.dw,
        .dbias = call.dbias,
    };

    size_t channels = (size_t)x.B * x.C;
    norm.statistics = (GroupStatistics*)call.record;
    norm.half_scale_shift = (ScaleShift*)(norm.statistics + channels);

    if (call.scale_shift) norm.modulation = {(floatX*)call.scale_shift, 2 * x.C};
    if (call.dscale_shift) norm.dmodulation = {(floatX*)call.dscale_shift, 2 * x.C};
    return norm;
}

static void conv3x3_weight_gradient(Tensor dout, Tensor x, const WeightGradientCall& call) {
    Conv layer = {.dw = call.dw, .dbias = call.dbias};
    conv3x3_backward_weight(layer, dout, x, {(floatX*)call.demb, dout.C});
}

// (B, norm_tiles(H * W), C)
template <typename Sums> static Sums* scratch_sums(const Place& place, Tensor x) {
    return (Sums*)place.allocate(sizeof(Sums) * x.B * norm_tiles(x.T()) * x.C);
}

static Tensor scratch_like(const Place& place, Tensor x) {
    return {(floatX*)place.allocate(x.count() * sizeof(floatX)), x.B, x.H, x.W, x.C};
}

// ---- AdamW over many tensors ------------------------------------------------------------------------------

// Counts the update, and computes what depends on the count. Both are in device memory, so that a CUDA graph can replay
// the update.
struct BeginUpdate {
    StepState* state;
    float* step;  // the number of updates before this one
    Hyper hyper;

    size_t items() const { return 1; }
    HOST_DEVICE void operator()(size_t) const {
        state->update = adamw_at(hyper, 0, (int64_t)*step);
        state->accepted = 1;
        *step += 1;
    }
};

// The program's UpdateWeights, for up to MOST tensors in one launch. An item is four elements of a tensor, or the one
// to three that are left at its end. The items of the tensors follow each other.
struct UpdateTensors {
    enum { MOST = 64 };
    struct Part {
        float *w, *m, *v;
        const float* gradient;
    } parts[MOST];
    unsigned counts[MOST];  // elements of each tensor
    unsigned ends[MOST];    // items of it and of all before it
    int tensors;
    const StepState* state;

    void add(const Update& update) {
        unsigned items = (unsigned)ceil_div(update.n, 4);
        unsigned items_before = tensors ? ends[tensors - 1] : 0;
        parts[tensors] = {update.w, update.m, update.v, update.gradient};
        counts[tensors] = (unsigned)update.n;
        ends[tensors] = items_before + items;
        tensors++;
    }

    // The tensor that an item is of: the first that ends behind the item.
    HOST_DEVICE int tensor_of(size_t item) const {
        int low = 0;
        int high = tensors - 1;
        while (low < high) {
            int middle = (low + high) / 2;
            if (item < ends[middle]) high = middle;
            else low = middle + 1;
        }
        return low;
    }

    size_t items() const { return ends[tensors - 1]; }
    HOST_DEVICE void operator()(size_t item) const {
        const int tensor = tensor_of(item);
        const Part part = parts[tensor];
        const size_t items_before = tensor ? ends[tensor - 1] : 0;
        const size_t first = 4 * (item - items_before);
        const size_t left = counts[tensor] - first;
        const bool whole = left >= 4;

        // UpdateWeights reads and writes four elements at once. Where fewer are left, it gets copies of them.
        ::Vector<float, 4> w = {}, m = {}, v = {}, gradient = {};
        for (size_t j = 0; j < 4 && !whole; j++) {
            if (j >= left) continue;
            w[j] = part.w[first + j];
            m[j] = part.m[first + j];
            v[j] = part.v[first + j];
            gradient[j] = part.gradient[first + j];
        }

        OptimiserMemory memory = {};
        memory.master = whole ? part.w + first : w.elements;
        memory.adam_m = whole ? part.m + first : m.elements;
        memory.adam_v = whole ? part.v + first : v.elements;
        const float* gradients = whole ? part.gradient + first : gradient.elements;
        UpdateWeights<float> update = {
            .memory = memory, .gradient = gradients, .working = nullptr, .n = 4, .decayed = 4, .state = state};
        update(0);

        for (size_t j = 0; j < 4 && !whole; j++) {
            if (j >= left) continue;
            part.w[first + j] = w[j];
            part.m[first + j] = m[j];
            part.v[first + j] = v[j];
        }
    }
};

// ---- the interface ----------------------------------------------------------------------------------------

namespace {
struct LaunchedLayers final : Layers {
    Limits limits(const Place& place) const override {
        Limits found = {
            .convolution_channels = 1,
            .norm_channels = 1,
            .resample_channels = 16 / (int)sizeof(floatX),
            .head_multiple = 1,
            .head_most = INT_MAX,
            .attention_pixels = INT_MAX,
        };
        at(place, 0, [&] {
            std::tie(found.head_multiple, found.head_most) = head_channels();
#ifdef __CUDACC__
            found.convolution_channels = CHANNEL_MULTIPLE;
            found.norm_channels = 32;
#else
            found.attention_pixels = cpu::THREAD_FLOATS / 2;
#endif
        });
        return found;
    }

    void convolution(const Place& place, const ConvolutionCall& c) const override {
        at(place, convolution_workspace(), [&] {
            if (c.taps == 9) conv3x3_forward(tensor(c.out), tensor(c.x), conv_layer<9>(c.w, c.bias), options_of(c));
            else conv1x1_forward(tensor(c.out), tensor(c.x), conv_layer<1>(c.w, c.bias), options_of(c));
        });
    }

    void input_gradient(const Place& place, const ConvolutionCall& c) const override {
        at(place, convolution_workspace(), [&] {
            if (c.taps == 9) conv3x3_backward_input(tensor(c.x), tensor(c.out), conv_layer<9>(c.w));
            else conv1x1_backward_input(tensor(c.x), tensor(c.out), conv_layer<1>(c.w));
        });
    }

    // Not on a side stream as in the program, because PyTorch only waits for its own stream.
    void weight_gradient(const Place& place, const WeightGradientCall& c) const override {
        at(place, weight_workspace(c.dout), [&] {
            if (c.taps == 9) conv3x3_weight_gradient(tensor(c.dout), tensor(c.x), c);
            else conv1x1_backward_weight({.dw = c.dw, .dbias = c.dbias}, tensor(c.dout), tensor(c.x));
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
            Tensor x = tensor(c.x);
            Tensor dy = scratch_like(place, x);
            Norm norm = norm_of(c, x);
            norm.sums = scratch_sums<NormSums>(place, x);

            groupnorm_backward_sums(dy, tensor(c.dout), norm);
            if (c.dscale_shift) run(ModulationBackward<floatX>{norm});
            groupnorm_backward(tensor(c.out), dy, dy, norm);
        });
    }

    void norm_conv3x3(const Place& place, const NormCall& n, const ConvolutionCall& c) const override {
        at(place, convolution_workspace(), [&] {
            Tensor x = tensor(n.x);
            Tensor normed = scratch_like(place, x);
            x.moments = scratch_sums<Moments>(place, x);
            channel_moments(x);

            Concat input = groupnorm_for_conv3x3(normed, norm_of(n, x), c.out.C);
            conv3x3_forward(tensor(c.out), input, conv_layer<9>(c.w, c.bias), options_of(c));
        });
    }

    void norm_conv3x3_backward(const Place& place, const NormCall& n, const ConvolutionCall& c,
                               const WeightGradientCall& weights) const override {
        at(place, weight_workspace(c.out), [&] {
            Tensor x = tensor(n.x);
            Tensor dout = tensor(c.out);
            Tensor dnormed = scratch_like(place, x);
            Tensor normed = dnormed;  // groupnorm_backward reads one and leaves the other
            Norm norm = norm_of(n, x);
            norm.sums = scratch_sums<NormSums>(place, x);

            conv3x3_backward_input(dnormed, dout, conv_layer<9>(c.w), {.norm = norm});
            if (n.dscale_shift) run(ModulationBackward<floatX>{norm});
            groupnorm_backward(tensor(n.out), normed, dnormed, norm);
            conv3x3_weight_gradient(dout, normed, weights);
        });
    }

    void attention(const Place& place, const AttentionCall& c) const override {
        at(place, attention_workspace(), [&] {
            attention_forward(tensor(c.out), c.lse, tensor(c.qkv), c.heads);
        });
    }

    void attention_backward(const Place& place, const AttentionCall& c) const override {
        at(place, attention_workspace(), [&] {
            ::attention_backward(tensor(c.dqkv), tensor(c.dout), tensor(c.out), c.lse, tensor(c.qkv), c.heads);
        });
    }

    void resample(const Place& place, Image out, Image x, float factor) const override {
        at(place, 0, [&] { run(Resample<floatX>{tensor(out), tensor(x), factor}); });
    }

    void timestep_embedding(const Place& place, Image out, const int* t, int max_period, double unit) const override {
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
            hyper.lr = c.lr;
            hyper.lr_schedule = LR_CONSTANT;
            hyper.weight_decay = c.weight_decay;
            hyper.beta1 = c.beta1;
            hyper.beta2 = c.beta2;
            hyper.adam_eps = c.eps;

            StepState* state = (StepState*)place.allocate(sizeof(StepState));
            run(BeginUpdate{state, c.step, hyper});

            UpdateTensors batch = {};
            batch.state = state;
            for (int i = 0; i < c.count; i++) {
                batch.add(c.updates[i]);
                bool is_full = batch.tensors == UpdateTensors::MOST;
                bool is_last = i + 1 == c.count;
                if (!is_full && !is_last) continue;
                run(batch);
                batch.tensors = 0;
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
