// Down-sampling, forward and backward: out = F.avg_pool2d(x, 2), whose gradient repeats a pixel four times.
//
//   make downsample && ./downsample          every version: against PyTorch, then timed
//   ./downsample 1                       version 1 alone
//
//   0  the program's CPU function: the specification
//   1  fp32, NCHW, a thread a number that is written
//   2  bf16, NHWC, a thread a number that is written
//   3  the program's: bf16, NHWC, a thread 16 bytes of the small image
//
// What the steps change: version 1 has a thread for each number written; its four loads are of two rows, and
// every second number at a time. bf16 halves the bytes. In NHWC the four pixels' channels are contiguous, so
// the program's kernel loads 16 bytes from each of them and writes 16. It is a launch of its own there too,
// with another behind it for the sums of the norm that reads the result.
#include "common.h"

// ---- 0 ----------------------------------------------------------------------------------------------------

template <typename T>
static Resample<T> downsample_forward(Problem& p) {
    return {.out = p.tensor_out<T>("out"), .x = p.tensor_in<T>("x"), .factor = 0.25f,
            .accumulate = false};
}
template <typename T>
static Resample<T> downsample_backward(Problem& p) {
    return {.out = p.tensor_out<T>("dx"), .x = p.tensor_in<T>("dout"), .factor = 0.25f,
            .accumulate = false};
}
static void downsample_forward0(Problem& p) { cpu::run(downsample_forward<float>(p)); }
static void downsample_backward0(Problem& p) { cpu::run(downsample_backward<float>(p)); }

#ifdef __CUDACC__
// ---- 1: NCHW ----------------------------------------------------------------------------------------------

// out (B C, H, W) = a quarter of the sum of 2 x 2 pixels of x (B C, 2 H, 2 W).
__global__ void downsample_forward_kernel1(float* out, const float* x, size_t n, int W) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float* first = x + i / W * 4 * W + i % W * 2;  // rows of all planes follow each other
    out[i] = 0.25f * ((first[0] + first[1]) + (first[2 * W] + first[2 * W + 1]));
}
static void downsample_forward1(Problem& p) {
    size_t n = p.find("out").values.size();
    launch(downsample_forward_kernel1, ceil_div(n, 256), 256, 0, p.out<float>("out"), p.in<float>("x"), n,
           p.dim("W") / 2);
}
// out (B C, 2 H, 2 W) = a quarter of x (B C, H, W), each pixel four times.
__global__ void downsample_backward_kernel1(float* out, const float* x, size_t n, int H, int W) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size_t column = i % (2 * W), row = i / (2 * W) % (2 * H), plane = i / (2 * W) / (2 * H);
    out[i] = 0.25f * x[(plane * H + row / 2) * W + column / 2];
}
static void downsample_backward1(Problem& p) {
    size_t n = p.find("dx").values.size();
    launch(downsample_backward_kernel1, ceil_div(n, 256), 256, 0, p.out<float>("dx"), p.in<float>("dout"), n,
           p.dim("H") / 2, p.dim("W") / 2);
}

// ---- 2: NHWC ----------------------------------------------------------------------------------------------

// out (B, H, W, C) = a quarter of the sum of 2 x 2 pixels of x (B, 2 H, 2 W, C).
__global__ void downsample_forward_kernel2(floatX* out, const floatX* x, size_t n, int W, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size_t c = i % C, column = i / C % W, row = i / C / W;  // of all images' rows
    const floatX* first = x + (row * 4 * W + column * 2) * C + c;
    const floatX* second = first + (size_t)2 * W * C;
    out[i] = (floatX)(0.25f * (((float)first[0] + (float)first[C]) + ((float)second[0] + (float)second[C])));
}
static void downsample_forward2(Problem& p) {
    size_t n = p.find("out").values.size();
    launch(downsample_forward_kernel2, ceil_div(n, 256), 256, 0, p.out<floatX>("out"), p.in<floatX>("x"), n,
           p.dim("W") / 2, p.dim("C"));
}
// out (B, 2 H, 2 W, C) = a quarter of x (B, H, W, C), each pixel four times.
__global__ void downsample_backward_kernel2(floatX* out, const floatX* x, size_t n, int W, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size_t c = i % C, column = i / C % (2 * W), row = i / C / (2 * W);  // of all images' rows
    out[i] = (floatX)(0.25f * (float)x[(row / 2 * W + column / 2) * C + c]);
}
static void downsample_backward2(Problem& p) {
    size_t n = p.find("dx").values.size();
    launch(downsample_backward_kernel2, ceil_div(n, 256), 256, 0, p.out<floatX>("dx"), p.in<floatX>("dout"),
           n, p.dim("W") / 2, p.dim("C"));
}

// ---- 3: the program's -------------------------------------------------------------------------------------

static void downsample_forward3(Problem& p) { run(downsample_forward<floatX>(p)); }
static void downsample_backward3(Problem& p) { run(downsample_backward<floatX>(p)); }
#endif

static Work downsample_work(const Problem& p) {  // forward and backward alike: one side in, the other out
    return {0, sizeof(floatX) * (double)(p.find("x").values.size() + p.find("out").values.size())};
}

static const Ladder downsample_ladder = {
    "downsample",
    {{"forward", {"out"}, downsample_work}, {"backward", {"dx"}, downsample_work}},
    {
        {0, "forward", NHWC, CPU_FP32, "the specification", downsample_forward0},
        {0, "backward", NHWC, CPU_FP32, "the specification", downsample_backward0},
#ifdef __CUDACC__
        {1, "forward", NCHW, FP32, "a thread a number written", downsample_forward1},
        {1, "backward", NCHW, FP32, "a thread a number written", downsample_backward1},
        {2, "forward", NHWC, FLOATX, "half the bytes", downsample_forward2},
        {2, "backward", NHWC, FLOATX, "half the bytes", downsample_backward2},
        {3, "forward", NHWC, FLOATX, "16 bytes a thread: the program's", downsample_forward3},
        {3, "backward", NHWC, FLOATX, "16 bytes a thread: the program's", downsample_backward3},
#endif
    }};
LADDER_MAIN(downsample_ladder)
