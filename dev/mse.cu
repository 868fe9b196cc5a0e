// Mean squared error of B samples of n elements and its gradient: dx = 2 w_b (x - target) / (B n), where w_b
// = chain[t_b].weight is what the sample's timestep counts for, and of each sample's sum of squares the
// parts, 4096 elements each, whose weighted sum over B n is the loss.
//
//   make mse && ./mse        every version: against PyTorch, then timed
//   ./mse 1                  version 1 alone
//
//   0  the program's CPU function: the specification
//   1  fp32, a thread an element adds its square to the part; the gradient in a kernel of its own
//   2  bf16, a block a part, its sum through shuffles; the gradient in a kernel of its own
//   3  the program's: a block a part, sum and gradient in one pass
//
// What the steps change: in version 1, 4096 threads queue for one address, in an order that differs from run
// to run, and so does the last bit of the loss. A block that sums in its own order is as fast as its loads
// and gives the same bits every time. The gradient needs the same two numbers, so it comes with the sum for
// one more write.
#include "common.h"

// ---- 0 ----------------------------------------------------------------------------------------------------

template <typename Real>
static PredictionLoss<Real> mse_of(Problem& p) {
    int B = p.dim("B"), n = p.dim("n");
    BatchLoss batch = {p.out<float>("losses"), p.in<int>("t"), (const Timestep*)p.in<float>("chain"),
                       B, n / PIXEL, PIXEL, 1000};
    return {batch, 0, B, p.in<Real>("x"), p.in<float>("target"), p.out<Real>("dx")};
}
static void mse_step0(Problem& p) { cpu::run(mse_of<float>(p)); }

#ifdef __CUDACC__
// ---- 1: atomic additions ----------------------------------------------------------------------------------

__global__ void mse_losses_kernel1(float* losses, const float* x, const float* target, size_t count, int n,
                                   int parts) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    atomicAdd(losses + i / n * parts + i % n / LOSS_CHUNK, (x[i] - target[i]) * (x[i] - target[i]));
}
template <typename T>
__global__ void mse_gradient_kernel1(T* dx, const T* x, const float* target, const int* t,
                                     const Timestep* chain, size_t count, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) dx[i] = (T)(2.0f / (float)count * chain[t[i / n]].weight * ((float)x[i] - target[i]));
}
template <typename T>
static void mse_gradient1(Problem& p) {
    int n = p.dim("n");
    size_t count = (size_t)p.dim("B") * n;
    launch(mse_gradient_kernel1<T>, ceil_div(count, 256), 256, 0, p.out<T>("dx"), p.in<T>("x"),
           p.in<float>("target"), p.in<int>("t"), (const Timestep*)p.in<float>("chain"), count, n);
}
static void mse_step1(Problem& p) {
    int n = p.dim("n"), parts = loss_parts(n / PIXEL);
    size_t count = (size_t)p.dim("B") * n;
    float* losses = p.out<float>("losses");
    CUDA_CHECK(cudaMemsetAsync(losses, 0, (size_t)p.dim("B") * parts * sizeof(float), main_stream.handle));
    launch(mse_losses_kernel1, ceil_div(count, 256), 256, 0, losses, p.in<float>("x"), p.in<float>("target"),
           count, n, parts);
    mse_gradient1<float>(p);
}

// ---- 2: a block a part ------------------------------------------------------------------------------------

__global__ void mse_losses_kernel2(float* losses, const floatX* x, const float* target, int n, int parts) {
    float sum = 0;
    int part = blockIdx.x % parts;
    size_t sample = (size_t)(blockIdx.x / parts) * n, end = sample + min((part + 1) * LOSS_CHUNK, n);
    for (size_t i = sample + part * LOSS_CHUNK + threadIdx.x; i < end; i += blockDim.x)
        sum += ((float)x[i] - target[i]) * ((float)x[i] - target[i]);
    sum = team_sum(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = sum;
}
static void mse_step2(Problem& p) {
    int n = p.dim("n"), parts = loss_parts(n / PIXEL);
    launch(mse_losses_kernel2, p.dim("B") * parts, 256, 0, p.out<float>("losses"), p.in<floatX>("x"),
           p.in<float>("target"), n, parts);
    mse_gradient1<floatX>(p);
}

// ---- 3: the program's -------------------------------------------------------------------------------------

static void mse_step3(Problem& p) { run(mse_of<floatX>(p)); }
#endif

static const Ladder mse_ladder = {
    "mse",
    {{"step",
      {"losses", "dx"},
      [](const Problem& p) {
          return Work{0, (sizeof(float) + 2.0 * sizeof(floatX)) * p.dim("B") * (double)p.dim("n")};
      }}},
    {
        {0, "step", NHWC, CPU_FP32, "the specification", mse_step0},
#ifdef __CUDACC__
        {1, "step", NHWC, FP32, "atomic additions, gradient apart", mse_step1, 0, ATOMICS},
        {2, "step", NHWC, FLOATX, "a block a part, gradient apart", mse_step2},
        {3, "step", NHWC, FLOATX, "one pass: the program's", mse_step3},
#endif
    }};
LADDER_MAIN(mse_ladder)
