// AdamW as torch.optim.AdamW, then the running mean of the weights (EMA) and their copy in the layers'
// precision.
//
//   make adamw && ./adamw        every version: against PyTorch, then timed
//   ./adamw 1                    version 1 alone
//
//   0  plain loops on the CPU: the specification; and the program's function there
//   1  fp32, a kernel for each of m, v, w, EMA and copy
//   2  fp32, one kernel, a thread a parameter
//   3  the program's: one kernel, a thread four parameters
//
// What the steps change: the update does a dozen operations on 38 bytes a parameter, so it is traffic alone.
// Version 1 reads the gradient twice, m and v twice, w three times; version 2 everything once. Version 3 asks
// for it 16 bytes at a time. It is also one launch over all parameters of the network, where an optimiser
// that goes by tensors has 326.
#include "common.h"

// The settings of adamw.py; correction = 1 - beta^n.
struct AdamwSettings {
    float lr, weight_decay, beta1, beta2, eps, correction1, correction2, ema_weight;
};
static AdamwSettings adamw_settings(const Problem& p) {
    const std::vector<float>& h = p.find("hyper").values;
    return {h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]};
}

// ---- 0 ----------------------------------------------------------------------------------------------------

static void adamw_step0(Problem& p) {
    AdamwSettings a = adamw_settings(p);
    float *w = p.update<float>("w"), *m = p.update<float>("m"), *v = p.update<float>("v");
    float *ema = p.update<float>("ema"), *working = p.out<float>("working");
    const float* gradient = p.in<float>("gradient");
    size_t n = p.find("w").values.size();
    for (size_t i = 0; i < n; i++) {
        m[i] = a.beta1 * m[i] + (1 - a.beta1) * gradient[i];
        v[i] = a.beta2 * v[i] + (1 - a.beta2) * gradient[i] * gradient[i];
        float mean = m[i] / a.correction1, square = v[i] / a.correction2;
        w[i] -= a.lr * (mean / (sqrtf(square) + a.eps) + a.weight_decay * w[i]);
        ema[i] += a.ema_weight * (w[i] - ema[i]);
        working[i] = w[i];
    }
}

#ifdef PROGRAM
// The program reads the settings where they change from step to step: on the device.
static const StepState* adamw_state(Problem& p) {
    static StepState *here, *device;
    AdamwSettings a = adamw_settings(p);
    StepState state = StepState();
    state.step = 10, state.accepted = 1;
    state.update = {a.lr,  a.weight_decay, a.beta1,        a.beta2, a.eps, a.correction1,
                    a.correction2, {a.ema_weight}, 1.0f};
    StepState*& memory = p.on_cpu ? here : device;
    if (!memory) {
        memory = (StepState*)p.allocate(sizeof state);
        p.put((char*)memory, &state, sizeof state);
    }
    return memory;
}
// working: the copy of the weights.
template <typename T>
static UpdateWeights<T> adamw_layer(Problem& p, T* working) {
    OptimiserMemory memory = {.master = p.update<float>("w"),
                              .ema = {p.update<float>("ema")},
                              .adam_m = p.update<float>("m"),
                              .adam_v = p.update<float>("v")};
    size_t n = p.find("w").values.size();
    return {memory, p.in<float>("gradient"), working, n, n, adamw_state(p)};  // every parameter decays, as in adamw.py
}
static void adamw_step_cpu(Problem& p) { cpu::run(adamw_layer(p, p.out<float>("working"))); }
#endif

#ifdef __CUDACC__
// ---- 1: a kernel for each ---------------------------------------------------------------------------------

// to = keep to + add x, or + add x^2
__global__ void adamw_moment_kernel1(float* to, const float* x, float keep, float add, bool squared,
                                     size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = keep * to[i] + add * (squared ? x[i] * x[i] : x[i]);
}
__global__ void adamw_weight_kernel1(float* w, const float* m, const float* v, float step, float root,
                                     float decay, float eps, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) w[i] = w[i] * decay - step * m[i] / (sqrtf(v[i]) / root + eps);
}
__global__ void adamw_copy_kernel1(floatX* to, const float* from, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = (floatX)from[i];
}
static void adamw_step1(Problem& p) {
    AdamwSettings a = adamw_settings(p);
    size_t n = p.find("w").values.size();
    unsigned blocks = ceil_div(n, 256);
    float *w = p.update<float>("w"), *m = p.update<float>("m"), *v = p.update<float>("v"),
          *ema = p.update<float>("ema");
    const float* gradient = p.in<float>("gradient");
    launch(adamw_moment_kernel1, blocks, 256, 0, m, gradient, a.beta1, 1 - a.beta1, false, n);
    launch(adamw_moment_kernel1, blocks, 256, 0, v, gradient, a.beta2, 1 - a.beta2, true, n);
    launch(adamw_weight_kernel1, blocks, 256, 0, w, m, v, a.lr / a.correction1, sqrtf(a.correction2),
           1 - a.lr * a.weight_decay, a.eps, n);
    launch(adamw_moment_kernel1, blocks, 256, 0, ema, w, 1 - a.ema_weight, a.ema_weight, false, n);
    launch(adamw_copy_kernel1, blocks, 256, 0, p.out<floatX>("working"), w, n);
}

// ---- 2: one kernel ----------------------------------------------------------------------------------------

__global__ void adamw_kernel2(float* w, float* ema, floatX* working, float* m, float* v,
                              const float* gradient, size_t n, AdamwSettings a) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    m[i] = a.beta1 * m[i] + (1 - a.beta1) * gradient[i];
    v[i] = a.beta2 * v[i] + (1 - a.beta2) * gradient[i] * gradient[i];
    w[i] = w[i] * (1 - a.lr * a.weight_decay) -
           a.lr / a.correction1 * m[i] / (sqrtf(v[i]) / sqrtf(a.correction2) + a.eps);
    ema[i] += a.ema_weight * (w[i] - ema[i]);
    working[i] = (floatX)w[i];
}
static void adamw_step2(Problem& p) {
    size_t n = p.find("w").values.size();
    launch(adamw_kernel2, ceil_div(n, 256), 256, 0, p.update<float>("w"), p.update<float>("ema"),
           p.out<floatX>("working"), p.update<float>("m"), p.update<float>("v"), p.in<float>("gradient"), n,
           adamw_settings(p));
}

// ---- 3: the program's -------------------------------------------------------------------------------------

#ifdef PROGRAM
static void adamw_step3(Problem& p) { run(adamw_layer(p, p.out<floatX>("working"))); }
#endif
#endif

static const Ladder adamw_ladder = {
    "adamw",
    {{"step",
      {"w", "m", "v", "ema", "working"},
      [](const Problem& p) {
          return Work{0, (9 * sizeof(float) + sizeof(floatX)) * (double)p.find("w").values.size()};
      }}},
    {
        {0, "step", NCHW, CPU_FP32, "the specification", adamw_step0},
#ifdef PROGRAM
        {0, "step", NCHW, CPU_FP32, "train_unet.cu on a CPU", adamw_step_cpu},
#endif
#ifdef __CUDACC__
        // the copy of the weights is rounded to the layers' precision
        {1, "step", NCHW, FLOATX, "a kernel each for m, v, w, EMA, copy", adamw_step1},
        {2, "step", NCHW, FLOATX, "one kernel, a thread a parameter", adamw_step2},
#ifdef PROGRAM
        {3, "step", NCHW, FLOATX, "16-byte loads: the program's", adamw_step3},
#endif
#endif
    }};
LADDER_MAIN(adamw_ladder)
