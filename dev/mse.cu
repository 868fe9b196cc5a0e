// Mean squared error and its gradient: dx = 2 (x - target) / n, and of the sum of squares the parts, 4096
// elements each, whose sum over n is the loss.
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

static void mse_step0(Problem& p) {
    mse_cpu(p.out<float>("losses"), p.out<float>("dx"), p.in<float>("x"), p.in<float>("target"), p.dim("n"));
}

#ifdef __CUDACC__
// ---- 1: atomic additions ----------------------------------------------------------------------------------

__global__ void mse_losses_kernel1(float* losses, const float* x, const float* target, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    atomicAdd(losses + i / LOSS_CHUNK, (x[i] - target[i]) * (x[i] - target[i]));
}
template <typename T>
__global__ void mse_gradient_kernel1(T* dx, const T* x, const float* target, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dx[i] = (T)(2.0f / (float)n * ((float)x[i] - target[i]));
}
static void mse_step1(Problem& p) {
    size_t n = (size_t)p.dim("n");
    float* losses = p.out<float>("losses");
    CUDA_CHECK(cudaMemsetAsync(losses, 0, ceil_div(n, LOSS_CHUNK) * sizeof(float), main_stream));
    launch(mse_losses_kernel1, ceil_div(n, 256), 256, 0, losses, p.in<float>("x"), p.in<float>("target"), n);
    launch(mse_gradient_kernel1<float>, ceil_div(n, 256), 256, 0, p.out<float>("dx"), p.in<float>("x"),
           p.in<float>("target"), n);
}

// ---- 2: a block a part ------------------------------------------------------------------------------------

__global__ void mse_losses_kernel2(float* losses, const floatX* x, const float* target, size_t n) {
    float sum = 0;
    size_t first = (size_t)blockIdx.x * LOSS_CHUNK, end = min(first + LOSS_CHUNK, n);
    for (size_t i = first + threadIdx.x; i < end; i += blockDim.x)
        sum += ((float)x[i] - target[i]) * ((float)x[i] - target[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = sum;
}
static void mse_step2(Problem& p) {
    size_t n = (size_t)p.dim("n");
    launch(mse_losses_kernel2, ceil_div(n, LOSS_CHUNK), 256, 0, p.out<float>("losses"), p.in<floatX>("x"),
           p.in<float>("target"), n);
    launch(mse_gradient_kernel1<floatX>, ceil_div(n, 256), 256, 0, p.out<floatX>("dx"), p.in<floatX>("x"),
           p.in<float>("target"), n);
}

// ---- 3: the program's -------------------------------------------------------------------------------------

static void mse_step3(Problem& p) {
    mse(p.out<float>("losses"), p.out<floatX>("dx"), p.in<floatX>("x"), p.in<float>("target"),
        (size_t)p.dim("n"));
}
#endif

static const Ladder mse_ladder = {
    "mse",
    {{"step",
      {"losses", "dx"},
      [](const Problem& p) { return Work{0, (sizeof(float) + 2.0 * sizeof(floatX)) * (double)p.dim("n")}; }}},
    {
        {0, "step", NHWC, CPU_FP32, "the specification", mse_step0},
#ifdef __CUDACC__
        {1, "step", NHWC, FP32, "atomic additions, gradient apart", mse_step1, 0, ATOMICS},
        {2, "step", NHWC, FLOATX, "a block a part, gradient apart", mse_step2},
        {3, "step", NHWC, FLOATX, "one pass: the program's", mse_step3},
#endif
    }};
LADDER_MAIN(mse_ladder)
