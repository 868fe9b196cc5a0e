// AdamW as torch.optim.AdamW, then the running mean of the weights (EMA) and their copy in the layers' precision.
//
// It is algorithm 2 of Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), with g the gradient:
//
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   w = w - lr (m / correction1 / (sqrt(v / correction2) + eps) + weight_decay w)      correction = 1 - beta^step
//   ema = ema + ema_weight (w - ema)
//   working = w
//
//   make adamw && ./adamw        every version: against PyTorch, then timed
//   ./adamw 1                    version 1 alone
//
//   0  plain loops on the CPU: the specification; and the program's function there
//   1  fp32, a kernel for each of m, v, w, EMA and copy
//   2  fp32, one kernel, a thread a parameter
//   3  the program's: one kernel, a thread four parameters
//
// What the steps change: the update does a dozen operations on the 38 bytes of a parameter, so its time is that of its
// traffic. Version 1 reads the gradient, m and v twice, and w three times. Version 2 reads everything once. Version 3
// asks for it 16 bytes at a time. Versions 2 and 3 also are a single launch for all parameters of the network, where an
// optimiser that goes by tensors has 326.
#include "common.h"

// The settings of adamw.py, in the order of its "hyper".
struct AdamwSettings {
    float lr, weight_decay, beta1, beta2, eps;
    float correction1, correction2;  // 1 - beta^step
    float ema_weight;
};

static AdamwSettings adamw_settings(const Problem& p) {
    const std::vector<float>& h = p.find("hyper").values;
    return {h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]};
}

// ---- 0: the specification ---------------------------------------------------------------------------------
// All arrays are (n), the parameters of the network in a row.

static void adamw_step0(Problem& p) {
    AdamwSettings a = adamw_settings(p);
    float* w = p.update<float>("w");
    float* m = p.update<float>("m");
    float* v = p.update<float>("v");
    float* ema = p.update<float>("ema");
    float* working = p.out<float>("working");
    const float* gradient = p.in<float>("gradient");
    size_t n = p.find("w").values.size();

    for (size_t i = 0; i < n; i++) {
        m[i] = a.beta1 * m[i] + (1 - a.beta1) * gradient[i];
        v[i] = a.beta2 * v[i] + (1 - a.beta2) * gradient[i] * gradient[i];
        float mean = m[i] / a.correction1;
        float square = v[i] / a.correction2;
        w[i] -= a.lr * (mean / (sqrtf(square) + a.eps) + a.weight_decay * w[i]);
        ema[i] += a.ema_weight * (w[i] - ema[i]);
        working[i] = w[i];
    }
}

#ifdef PROGRAM
// The settings as the program's layer reads them. They lie on the device, because they change from step to step. The
// first call puts them there, as nothing may be allocated while launches are recorded.
static const StepState* adamw_state(Problem& p) {
    static StepState *on_cpu, *on_gpu;
    StepState*& memory = p.on_cpu ? on_cpu : on_gpu;
    if (memory) return memory;

    AdamwSettings a = adamw_settings(p);
    StepState state = StepState();
    state.accepted = 1;
    state.update = {.lr = a.lr,
                    .weight_decay = a.weight_decay,
                    .beta1 = a.beta1,
                    .beta2 = a.beta2,
                    .eps = a.eps,
                    .correction1 = a.correction1,
                    .correction2 = a.correction2,
                    .ema_weight = {a.ema_weight}};
    memory = (StepState*)p.allocate(sizeof state);
    p.put((char*)memory, &state, sizeof state);
    return memory;
}

template <typename T>
static UpdateWeights<T> adamw_layer(Problem& p, T* working) {
    OptimiserMemory memory = {.master = p.update<float>("w"),
                              .ema = {p.update<float>("ema")},
                              .adam_m = p.update<float>("m"),
                              .adam_v = p.update<float>("v")};
    size_t n = p.find("w").values.size();
    return {.memory = memory,
            .gradient = p.in<float>("gradient"),
            .working = working,
            .n = n,
            .decayed = n,  // every parameter decays, as in adamw.py
            .state = adamw_state(p)};
}

static void adamw_step_cpu(Problem& p) { cpu::run(adamw_layer(p, p.out<float>("working"))); }
#endif

#ifdef __CUDACC__
// ---- 1: a kernel for each ---------------------------------------------------------------------------------
// All arrays are (n), and a thread has one element. Every kernel reads what the one before it wrote to memory.

// mean = keep mean + add x, or with `squared` keep mean + add x^2: for m, v and the EMA.
__global__ void adamw_moment_kernel1(float* mean, const float* x, float keep, float add, bool squared,
                                     size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) mean[i] = keep * mean[i] + add * (squared ? x[i] * x[i] : x[i]);
}

// w = decay w - step_size m / (sqrt(v) / root + eps), which is the formula above in other words: step_size is
// lr / correction1, root is sqrt(correction2), and decay is 1 - lr weight_decay. The host computes them.
__global__ void adamw_weight_kernel1(float* w, const float* m, const float* v, float step_size, float root,
                                     float decay, float eps, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) w[i] = w[i] * decay - step_size * m[i] / (sqrtf(v[i]) / root + eps);
}

__global__ void adamw_copy_kernel1(floatX* working, const float* w, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) working[i] = (floatX)w[i];
}

static void adamw_step1(Problem& p) {
    AdamwSettings a = adamw_settings(p);
    float* w = p.update<float>("w");
    float* m = p.update<float>("m");
    float* v = p.update<float>("v");
    float* ema = p.update<float>("ema");
    floatX* working = p.out<floatX>("working");
    const float* gradient = p.in<float>("gradient");
    size_t n = p.find("w").values.size();

    unsigned blocks = ceil_div(n, 256);
    float step_size = a.lr / a.correction1;
    float root = sqrtf(a.correction2);
    float decay = 1 - a.lr * a.weight_decay;
    launch(adamw_moment_kernel1, blocks, 256, 0, m, gradient, a.beta1, 1 - a.beta1, false, n);
    launch(adamw_moment_kernel1, blocks, 256, 0, v, gradient, a.beta2, 1 - a.beta2, true, n);
    launch(adamw_weight_kernel1, blocks, 256, 0, w, m, v, step_size, root, decay, a.eps, n);
    launch(adamw_moment_kernel1, blocks, 256, 0, ema, w, 1 - a.ema_weight, a.ema_weight, false, n);
    launch(adamw_copy_kernel1, blocks, 256, 0, working, w, n);
}

// ---- 2: one kernel ----------------------------------------------------------------------------------------
// A thread does the whole update of one parameter, so that device memory is read and written once. All arrays are (n).

__global__ void adamw_kernel2(float* w, float* ema, floatX* working, float* m, float* v,
                              const float* gradient, size_t n, AdamwSettings a) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;

    m[i] = a.beta1 * m[i] + (1 - a.beta1) * gradient[i];
    v[i] = a.beta2 * v[i] + (1 - a.beta2) * gradient[i] * gradient[i];

    float step_size = a.lr / a.correction1;
    float root = sqrtf(a.correction2);
    float decay = 1 - a.lr * a.weight_decay;
    w[i] = w[i] * decay - step_size * m[i] / (sqrtf(v[i]) / root + a.eps);

    ema[i] += a.ema_weight * (w[i] - ema[i]);
    working[i] = (floatX)w[i];
}

static void adamw_step2(Problem& p) {
    size_t n = p.find("w").values.size();
    launch(adamw_kernel2, ceil_div(n, 256), 256, 0, p.update<float>("w"), p.update<float>("ema"),
           p.out<floatX>("working"), p.update<float>("m"), p.update<float>("v"), p.in<float>("gradient"), n,
           adamw_settings(p));
}

#ifdef PROGRAM
// ---- 3: the program's, 16 bytes at a time -----------------------------------------------------------------

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
        // These are FLOATX, because the copy of the weights is rounded to the layers' precision.
        {1, "step", NCHW, FLOATX, "a kernel each for m, v, w, EMA, copy", adamw_step1},
        {2, "step", NCHW, FLOATX, "one kernel, a thread a parameter", adamw_step2},
#ifdef PROGRAM
        {3, "step", NCHW, FLOATX, "16-byte loads: the program's", adamw_step3},
#endif
#endif
    }};
LADDER_MAIN(adamw_ladder)
