// Up-sampling to the nearest neighbour, forward and backward: out = F.interpolate(x, scale_factor=2), whose
// gradient is the sum of 2 x 2 pixels.
//
//   make upsample && ./upsample          every version: against PyTorch, then timed
//   ./upsample 1                       version 1 alone
//
//   0  the program's CPU function: the specification
//   1  fp32, NCHW, a thread a number that is written
//   2  bf16, NHWC, a thread a number that is written
//   3  the program's: bf16, NHWC, a thread 16 bytes of the small image
//
// What the steps change: version 1 has a thread for each number written, so each number of x is asked for
// four times, and what the caches save of that still costs the instructions. bf16 halves the bytes. The
// program's kernel turns it around: a thread takes 16 bytes of x once and writes them four times, whole lines
// of NHWC each time. It is a launch of its own there too, with another behind it for the sums of the norm
// that reads the result.
#include "common.h"

// ---- 0 ----------------------------------------------------------------------------------------------------

template <typename T>
static Resample<T> upsample_forward(Problem& p) {
    return {.out = p.tensor_out<T>("out"), .x = p.tensor_in<T>("x"), .factor = 1,
            .accumulate = false};
}
template <typename T>
static Resample<T> upsample_backward(Problem& p) {
    return {.out = p.tensor_out<T>("dx"), .x = p.tensor_in<T>("dout"), .factor = 1,
            .accumulate = false};
}
static void upsample_forward0(Problem& p) { cpu::run(upsample_forward<float>(p)); }
static void upsample_backward0(Problem& p) { cpu::run(upsample_backward<float>(p)); }

#ifdef __CUDACC__
// ---- 1: NCHW ----------------------------------------------------------------------------------------------

// out (B C, 2 H, 2 W) = x (B C, H, W), each pixel four times.
__global__ void upsample_forward_kernel1(float* out, const float* x, size_t n, int H, int W) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size_t column = i % (2 * W), row = i / (2 * W) % (2 * H), plane = i / (2 * W) / (2 * H);
    out[i] = x[(plane * H + row / 2) * W + column / 2];
}
static void upsample_forward1(Problem& p) {
    size_t n = p.find("out").values.size();
    launch(upsample_forward_kernel1, ceil_div(n, 256), 256, 0, p.out<float>("out"), p.in<float>("x"), n,
           p.dim("H"), p.dim("W"));
}
// out (B C, H, W) = the sum of 2 x 2 pixels of x (B C, 2 H, 2 W).
__global__ void upsample_backward_kernel1(float* out, const float* x, size_t n, int W) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float* first = x + i / W * 4 * W + i % W * 2;  // rows of all planes follow each other
    out[i] = ((first[0] + first[1]) + (first[2 * W] + first[2 * W + 1]));
}
static void upsample_backward1(Problem& p) {
    size_t n = p.find("dx").values.size();
    launch(upsample_backward_kernel1, ceil_div(n, 256), 256, 0, p.out<float>("dx"), p.in<float>("dout"), n,
           p.dim("W"));
}

// ---- 2: NHWC ----------------------------------------------------------------------------------------------

// out (B, 2 H, 2 W, C) = x (B, H, W, C), each pixel four times.
__global__ void upsample_forward_kernel2(floatX* out, const floatX* x, size_t n, int W, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size_t c = i % C, column = i / C % (2 * W), row = i / C / (2 * W);  // of all images' rows
    out[i] = x[(row / 2 * W + column / 2) * C + c];
}
static void upsample_forward2(Problem& p) {
    size_t n = p.find("out").values.size();
    launch(upsample_forward_kernel2, ceil_div(n, 256), 256, 0, p.out<floatX>("out"), p.in<floatX>("x"), n,
           p.dim("W"), p.dim("C"));
}
// out (B, H, W, C) = the sum of 2 x 2 pixels of x (B, 2 H, 2 W, C).
__global__ void upsample_backward_kernel2(floatX* out, const floatX* x, size_t n, int W, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size_t c = i % C, column = i / C % W, row = i / C / W;  // of all images' rows
    const floatX* first = x + (row * 4 * W + column * 2) * C + c;
    const floatX* second = first + (size_t)2 * W * C;
    out[i] = (floatX)((((float)first[0] + (float)first[C]) + ((float)second[0] + (float)second[C])));
}
static void upsample_backward2(Problem& p) {
    size_t n = p.find("dx").values.size();
    launch(upsample_backward_kernel2, ceil_div(n, 256), 256, 0, p.out<floatX>("dx"), p.in<floatX>("dout"), n,
           p.dim("W"), p.dim("C"));
}

// ---- 3: the program's -------------------------------------------------------------------------------------

static void upsample_forward3(Problem& p) { run(upsample_forward<floatX>(p)); }
static void upsample_backward3(Problem& p) { run(upsample_backward<floatX>(p)); }
#endif

static Work upsample_work(const Problem& p) {  // forward and backward alike: one side in, the other out
    return {0, sizeof(floatX) * (double)(p.find("x").values.size() + p.find("out").values.size())};
}

static const Ladder upsample_ladder = {
    "upsample",
    {{"forward", {"out"}, upsample_work}, {"backward", {"dx"}, upsample_work}},
    {
        {0, "forward", NHWC, CPU_FP32, "the specification", upsample_forward0},
        {0, "backward", NHWC, CPU_FP32, "the specification", upsample_backward0},
#ifdef __CUDACC__
        {1, "forward", NCHW, FP32, "a thread a number written", upsample_forward1},
        {1, "backward", NCHW, FP32, "a thread a number written", upsample_backward1},
        {2, "forward", NHWC, FLOATX, "half the bytes", upsample_forward2},
        {2, "backward", NHWC, FLOATX, "half the bytes", upsample_backward2},
        {3, "forward", NHWC, FLOATX, "16 bytes a thread: the program's", upsample_forward3},
        {3, "backward", NHWC, FLOATX, "16 bytes a thread: the program's", upsample_backward3},
#endif
    }};
LADDER_MAIN(upsample_ladder)
