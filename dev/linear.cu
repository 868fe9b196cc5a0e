// Linear layer of the time embedding, forward and backward: out = x w^T + bias, x (M, C), w (O, C). For the
// same product over an image's pixels see conv1x1.cu.
//
//   make linear && ./linear          every version: against PyTorch, then timed
//   ./linear 2                       version 2 alone
//
//   0  plain loops on the CPU: the specification; and the program's function there
//   1  fp32, a thread an output
//   2  fp32, tiles of 64 x 64 in shared memory, a thread 4 x 4
//   3  the program's: tensor cores, the sum split over blocks where outputs are few
//
// What the steps change: in version 1 every output reads a row of x and a row of w, so each number crosses
// from the caches to the multiprocessors as often as there are outputs that need it. A tile in shared memory
// is read from there by 16 threads, and a number in a register is used four times: 1/16 of the loads. That
// pays with many rows. The 32 rows of the time embedding are four tiles for 132 multiprocessors, and then
// version 2 is the slower one: there, and for the weight gradient of many rows, the time is that of few
// blocks walking a long sum. The program splits such a sum over blocks, on tensor cores.
#include "common.h"

struct LinearShape {
    int M, C, O;
};
static LinearShape linear_shape(const Problem& p) { return {p.dim("M"), p.dim("C"), p.dim("O")}; }

// ---- 0 ----------------------------------------------------------------------------------------------------

static void linear_forward0(Problem& p) {
    LinearShape s = linear_shape(p);
    float* out = p.out<float>("out");
    const float *x = p.in<float>("x"), *w = p.in<float>("w"), *bias = p.in<float>("bias");
    for (int m = 0; m < s.M; m++)
        for (int o = 0; o < s.O; o++) {
            double sum = bias[o];
            for (int c = 0; c < s.C; c++) sum += x[(size_t)m * s.C + c] * w[(size_t)o * s.C + c];
            out[(size_t)m * s.O + o] = (float)sum;
        }
}
// dx = dout w, dw += dout^T x, dbias += the column sums of dout.
static void linear_backward0(Problem& p) {
    LinearShape s = linear_shape(p);
    float *dx = p.out<float>("dx"), *dw = p.sum<float>("dw"), *dbias = p.sum<float>("dbias");
    const float *dout = p.in<float>("dout"), *x = p.in<float>("x"), *w = p.in<float>("w");
    std::fill_n(dx, (size_t)s.M * s.C, 0.0f);
    for (int m = 0; m < s.M; m++)
        for (int o = 0; o < s.O; o++) {
            float d = dout[(size_t)m * s.O + o];
            dbias[o] += d;
            for (int c = 0; c < s.C; c++) {
                dx[(size_t)m * s.C + c] += d * w[(size_t)o * s.C + c];
                dw[(size_t)o * s.C + c] += d * x[(size_t)m * s.C + c];
            }
        }
}

#ifdef PROGRAM
static void linear_forward_cpu(Problem& p) {
    cpu::conv1x1_forward(p.tensor_out<float>("out"), p.tensor_in<float>("x"),
                         {.w = p.in<float>("w"), .bias = p.in<float>("bias")}, cpu::ForwardOptions());
}
static void linear_backward_cpu(Problem& p) {
    cpu::Tensor dout = p.tensor_in<float>("dout");
    cpu::conv1x1_backward_weight({.dw = p.out<float>("dw"), .dbias = p.out<float>("dbias")}, dout,
                                 p.tensor_in<float>("x"));
    cpu::conv1x1_backward_input(p.tensor_out<float>("dx"), dout, {.w = p.in<float>("w")}, cpu::BackwardOptions());
}
#endif

#ifdef __CUDACC__
// ---- 1: a thread an output --------------------------------------------------------------------------------

__global__ void linear_forward_kernel1(float* out, const float* x, const float* w, const float* bias, int M,
                                       int C, int O) {
    int o = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y;
    if (o >= O) return;
    float sum = bias[o];
    for (int c = 0; c < C; c++) sum += x[(size_t)m * C + c] * w[(size_t)o * C + c];
    out[(size_t)m * O + o] = sum;
}
static void linear_forward1(Problem& p) {
    LinearShape s = linear_shape(p);
    launch(linear_forward_kernel1, dim3(ceil_div(s.O, 64), s.M), 64, 0, p.out<float>("out"), p.in<float>("x"),
           p.in<float>("w"), p.in<float>("bias"), s.M, s.C, s.O);
}
// dx = dout w
__global__ void linear_input_gradient_kernel1(float* dx, const float* dout, const float* w, int M, int C,
                                              int O) {
    int c = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y;
    if (c >= C) return;
    float sum = 0;
    for (int o = 0; o < O; o++) sum += dout[(size_t)m * O + o] * w[(size_t)o * C + c];
    dx[(size_t)m * C + c] = sum;
}
// dw += dout^T x; the threads of column 0 add up dbias.
__global__ void linear_weight_gradient_kernel1(float* dw, float* dbias, const float* dout, const float* x,
                                               int M, int C, int O) {
    int c = blockIdx.x * blockDim.x + threadIdx.x, o = blockIdx.y;
    if (c >= C) return;
    float sum = 0, column = 0;
    for (int m = 0; m < M; m++) {
        sum += dout[(size_t)m * O + o] * x[(size_t)m * C + c];
        column += dout[(size_t)m * O + o];
    }
    dw[(size_t)o * C + c] += sum;
    if (c == 0) dbias[o] += column;
}
static void linear_backward1(Problem& p) {
    LinearShape s = linear_shape(p);
    launch(linear_input_gradient_kernel1, dim3(ceil_div(s.C, 64), s.M), 64, 0, p.out<float>("dx"),
           p.in<float>("dout"), p.in<float>("w"), s.M, s.C, s.O);
    launch(linear_weight_gradient_kernel1, dim3(ceil_div(s.C, 64), s.O), 64, 0, p.sum<float>("dw"),
           p.sum<float>("dbias"), p.in<float>("dout"), p.in<float>("x"), s.M, s.C, s.O);
}

// ---- 2: tiles in shared memory ----------------------------------------------------------------------------

enum { LINEAR_TILE = 64, LINEAR_DEPTH = 16 };

// A matrix whose element (i, k) lies at i * rows + k * columns.
struct LinearMatrix {
    const float* data;
    int rows, columns;
};
// c (M, N) = [c +] a (M, K) b^T (K, N) [+ bias (N)]: forward and both gradients differ only in their strides.
__global__ void __launch_bounds__(256)
    linear_product_kernel2(float* c, LinearMatrix a, LinearMatrix b, const float* bias, int M, int N, int K,
                           bool add) {
    __shared__ alignas(16) float a_tile[LINEAR_DEPTH][LINEAR_TILE + 4];
    __shared__ alignas(16) float b_tile[LINEAR_DEPTH][LINEAR_TILE + 4];
    int m0 = blockIdx.y * LINEAR_TILE, n0 = blockIdx.x * LINEAR_TILE;
    float sum[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += LINEAR_DEPTH) {
        __syncthreads();
        for (int i = threadIdx.x; i < LINEAR_TILE * LINEAR_DEPTH; i += 256) {
            // neighbouring threads read neighbouring floats, whichever index those belong to
            int k = a.columns == 1 ? i % LINEAR_DEPTH : i / LINEAR_TILE,
                r = a.columns == 1 ? i / LINEAR_DEPTH : i % LINEAR_TILE;
            bool in = m0 + r < M && k0 + k < K;
            a_tile[k][r] = in ? a.data[(size_t)(m0 + r) * a.rows + (size_t)(k0 + k) * a.columns] : 0;
            k = b.columns == 1 ? i % LINEAR_DEPTH : i / LINEAR_TILE;
            r = b.columns == 1 ? i / LINEAR_DEPTH : i % LINEAR_TILE;
            in = n0 + r < N && k0 + k < K;
            b_tile[k][r] = in ? b.data[(size_t)(n0 + r) * b.rows + (size_t)(k0 + k) * b.columns] : 0;
        }
        __syncthreads();
        for (int k = 0; k < LINEAR_DEPTH; k++)
            add_outer_product(sum, &a_tile[k][threadIdx.x / 16 * 4], &b_tile[k][threadIdx.x % 16 * 4]);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int m = m0 + threadIdx.x / 16 * 4 + i, n = n0 + threadIdx.x % 16 * 4 + j;
            if (m >= M || n >= N) continue;
            float* target = c + (size_t)m * N + n;
            *target = (add ? *target : 0) + sum[i][j] + (bias ? bias[n] : 0);
        }
}
static void linear_product2(float* c, LinearMatrix a, LinearMatrix b, const float* bias, int M, int N, int K,
                            bool add) {
    launch(linear_product_kernel2, dim3(ceil_div(N, LINEAR_TILE), ceil_div(M, LINEAR_TILE)), 256, 0, c, a, b,
           bias, M, N, K, add);
}
static void linear_forward2(Problem& p) {
    LinearShape s = linear_shape(p);
    linear_product2(p.out<float>("out"), {p.in<float>("x"), s.C, 1}, {p.in<float>("w"), s.C, 1},
                    p.in<float>("bias"), s.M, s.O, s.C, false);
}
// dbias (O) += the column sums of dout. A warp a column.
__global__ void linear_bias_kernel2(float* dbias, const float* dout, int M, int O) {
    float sum = 0;
    for (int m = threadIdx.x; m < M; m += 32) sum += dout[(size_t)m * O + blockIdx.x];
    for (int step = 16; step; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
    if (threadIdx.x == 0) dbias[blockIdx.x] += sum;
}
static void linear_backward2(Problem& p) {
    LinearShape s = linear_shape(p);
    const float *x = p.in<float>("x"), *dout = p.in<float>("dout");
    linear_product2(p.out<float>("dx"), {dout, s.O, 1}, {p.in<float>("w"), 1, s.C}, nullptr, s.M, s.C, s.O,
                    false);
    linear_product2(p.sum<float>("dw"), {dout, 1, s.O}, {x, 1, s.C}, nullptr, s.O, s.C, s.M, true);
    launch(linear_bias_kernel2, s.O, 32, 0, p.sum<float>("dbias"), dout, s.M, s.O);
}

// ---- 3: the program's -------------------------------------------------------------------------------------

#ifdef PROGRAM
static void linear_forward3(Problem& p) {
    conv1x1_forward(p.tensor_out<floatX>("out"), p.tensor_in<floatX>("x"),
                   {.w = p.in<floatX>("w"), .bias = p.in<floatX>("bias")});
}
static void linear_backward3(Problem& p) {
    Tensor dout = p.tensor_in<floatX>("dout");
    Linear gradients = {.dw = p.out<float>("dw"), .dbias = p.out<float>("dbias")};
    Tensor x = p.tensor_in<floatX>("x");
    on_side_stream_deferred([=] { conv1x1_backward_weight(gradients, dout, x); });
    conv1x1_backward_input(p.tensor_out<floatX>("dx"), dout, {.w = p.in<floatX>("w")});
}
#endif
#endif

static Work linear_work(const Problem& p, bool backward) {
    LinearShape s = linear_shape(p);
    Work one = convolution_work(s.M, 1, s.C, s.O);
    if (!backward) return one;
    return {2 * one.operations, sizeof(floatX) * ((double)s.M * (2 * s.C + s.O) + (double)s.O * s.C) +
                                    sizeof(float) * (double)s.O * s.C};
}

static const Ladder linear_ladder = {
    "linear",
    {{"forward", {"out"}, [](const Problem& p) { return linear_work(p, false); }},
     {"backward", {"dx", "dw", "dbias"}, [](const Problem& p) { return linear_work(p, true); }}},
    {
        {0, "forward", NHWC, CPU_FP32, "the specification", linear_forward0},
        {0, "backward", NHWC, CPU_FP32, "the specification", linear_backward0},
#ifdef PROGRAM
        {0, "forward", NHWC, CPU_FP32, "train_unet.cu on a CPU", linear_forward_cpu},
        {0, "backward", NHWC, CPU_FP32, "train_unet.cu on a CPU", linear_backward_cpu},
#endif
#ifdef __CUDACC__
        {1, "forward", NHWC, FP32, "a thread an output", linear_forward1},
        {1, "backward", NHWC, FP32, "a thread an output", linear_backward1},
        {2, "forward", NHWC, FP32, "tiles in shared memory", linear_forward2},
        {2, "backward", NHWC, FP32, "tiles in shared memory", linear_backward2},
#ifdef PROGRAM
        {3, "forward", NHWC, FLOATX, "tensor cores: the program's", linear_forward3},
        {3, "backward", NHWC, FLOATX, "tensor cores: the program's", linear_backward3},
#endif
#endif
    }};
LADDER_MAIN(linear_ladder)
