// Linear layer of the time embedding, forward and backward: out = x w^T + bias, x (M, C), w (O, C). For the
// same product over an image's pixels see conv1x1.cu.
//
//   make linear && ./linear          every version: against PyTorch, then timed
//   ./linear 2                       version 2 alone
//
//   0  plain loops on the CPU, which are the specification; and the program's function there
//   1  fp32, each thread computes one output
//   2  fp32, tiles of 64 x 64 in shared memory, each thread computes 4 x 4 outputs
//   3  the program's: tensor cores, and the sum is split over blocks where there are few outputs
//
// In version 1 every output reads a row of x and a row of w. So each number goes from the caches to the multiprocessors
// as often as there are outputs that need it. In version 2 a tile goes there once, into shared memory. From there a
// thread loads four numbers of either matrix at a time, and uses each four times: two loads, where version 1 needs 32.
//
// This pays with many rows. The 32 rows of the time embedding make only four tiles for 132 multiprocessors, so there
// version 2 is the slower one. A few blocks then walk a long sum, and so they do in the weight gradient of many rows.
// The program splits such a sum over blocks, and computes it on tensor cores.
#include "common.h"

// x is (M, C) and out is (M, O): M rows, C inputs and O outputs in each.
struct LinearShape {
    int M, C, O;
};

static LinearShape linear_shape(const Problem& p) { return {p.dim("M"), p.dim("C"), p.dim("O")}; }

// ---- 0 ----------------------------------------------------------------------------------------------------

// out (M, O) = x (M, C) w^T (C, O) + bias (O)
static void linear_forward0(Problem& p) {
    LinearShape s = linear_shape(p);
    float* out = p.out<float>("out");
    const float* x = p.in<float>("x");
    const float* w = p.in<float>("w");
    const float* bias = p.in<float>("bias");

    for (int m = 0; m < s.M; m++)
        for (int o = 0; o < s.O; o++) {
            double sum = bias[o];
            for (int c = 0; c < s.C; c++) sum += x[(size_t)m * s.C + c] * w[(size_t)o * s.C + c];
            out[(size_t)m * s.O + o] = (float)sum;
        }
}

// dx (M, C) = dout (M, O) w (O, C), dw (O, C) += dout^T (O, M) x (M, C), dbias (O) += dout.sum(0)
static void linear_backward0(Problem& p) {
    LinearShape s = linear_shape(p);
    float* dx = p.out<float>("dx");
    float* dw = p.sum<float>("dw");
    float* dbias = p.sum<float>("dbias");
    const float* dout = p.in<float>("dout");
    const float* x = p.in<float>("x");
    const float* w = p.in<float>("w");

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
// The program has no linear layer by itself: it is a 1x1 convolution of images of one pixel.
static void linear_forward_cpu(Problem& p) {
    cpu::Tensor out = p.tensor_out<float>("out");
    cpu::Tensor x = p.tensor_in<float>("x");
    cpu::Linear layer = {.w = p.in<float>("w"), .bias = p.in<float>("bias")};
    cpu::conv1x1_forward(out, x, layer, cpu::ForwardOptions());
}

static void linear_backward_cpu(Problem& p) {
    cpu::Tensor dx = p.tensor_out<float>("dx");
    cpu::Tensor dout = p.tensor_in<float>("dout");
    cpu::Tensor x = p.tensor_in<float>("x");
    cpu::Linear layer = {
        .w = p.in<float>("w"),
        .dw = p.out<float>("dw"),
        .dbias = p.out<float>("dbias"),
    };
    cpu::conv1x1_backward_weight(layer, dout, x);
    cpu::conv1x1_backward_input(dx, dout, layer, cpu::BackwardOptions());
}
#endif

#ifdef __CUDACC__
// ---- 1: a thread an output --------------------------------------------------------------------------------
// The loops over outputs become threads. Each still walks its own sum alone, in device memory and the caches.

// out (M, O) = x (M, C) w^T (C, O) + bias (O)
__global__ void linear_forward_kernel1(float* out, const float* x, const float* w, const float* bias, int M, int C,
                                       int O) {
    int o = blockIdx.x * blockDim.x + threadIdx.x;
    int m = blockIdx.y;
    if (o >= O) return;

    float sum = bias[o];
    for (int c = 0; c < C; c++) sum += x[(size_t)m * C + c] * w[(size_t)o * C + c];
    out[(size_t)m * O + o] = sum;
}

static void linear_forward1(Problem& p) {
    LinearShape s = linear_shape(p);
    float* out = p.out<float>("out");
    const float* x = p.in<float>("x");
    const float* w = p.in<float>("w");
    const float* bias = p.in<float>("bias");

    dim3 grid(ceil_div(s.O, 64), s.M);
    launch(linear_forward_kernel1, grid, 64, 0, out, x, w, bias, s.M, s.C, s.O);
}

// dx (M, C) = dout (M, O) w (O, C)
__global__ void linear_input_gradient_kernel1(float* dx, const float* dout, const float* w, int M, int C, int O) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    int m = blockIdx.y;
    if (c >= C) return;

    float sum = 0;
    for (int o = 0; o < O; o++) sum += dout[(size_t)m * O + o] * w[(size_t)o * C + c];
    dx[(size_t)m * C + c] = sum;
}

// dw (O, C) += dout^T (O, M) x (M, C), dbias (O) += dout.sum(0). All threads of a row of dw sum up its dbias, and that
// of column 0 writes it.
__global__ void linear_weight_gradient_kernel1(float* dw, float* dbias, const float* dout, const float* x, int M,
                                               int C, int O) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    int o = blockIdx.y;
    if (c >= C) return;

    float sum = 0;
    float bias_sum = 0;
    for (int m = 0; m < M; m++) {
        float d = dout[(size_t)m * O + o];
        sum += d * x[(size_t)m * C + c];
        bias_sum += d;
    }
    dw[(size_t)o * C + c] += sum;
    if (c == 0) dbias[o] += bias_sum;
}

static void linear_backward1(Problem& p) {
    LinearShape s = linear_shape(p);
    float* dx = p.out<float>("dx");
    float* dw = p.sum<float>("dw");
    float* dbias = p.sum<float>("dbias");
    const float* dout = p.in<float>("dout");
    const float* x = p.in<float>("x");
    const float* w = p.in<float>("w");

    dim3 input_grid(ceil_div(s.C, 64), s.M);
    dim3 weight_grid(ceil_div(s.C, 64), s.O);
    launch(linear_input_gradient_kernel1, input_grid, 64, 0, dx, dout, w, s.M, s.C, s.O);
    launch(linear_weight_gradient_kernel1, weight_grid, 64, 0, dw, dbias, dout, x, s.M, s.C, s.O);
}

// ---- 2: tiles in shared memory ----------------------------------------------------------------------------
// A block computes a tile of 64 x 64 outputs, and a thread 4 x 4 of them. The sum goes in steps of 16 terms. In each
// step all threads load what it needs of both matrices into shared memory, and then multiply from there.

enum {
    LINEAR_TILE = 64,   // the side of a block's tile of outputs
    LINEAR_DEPTH = 16,  // terms of the sum that lie in shared memory at a time
    LINEAR_THREADS = 256,
};

// A matrix whose transpose may be what lies in memory: one of the two strides is 1.
struct LinearMatrix {
    const float* data;
    int row_stride, column_stride;
    __device__ float at(int row, int column) const {
        return data[(size_t)row * row_stride + (size_t)column * column_stride];
    }
};

// What a step needs of a matrix: 64 of its rows and 16 of its columns. The tile holds them transposed, so that a thread
// loads a column's numbers of four rows at once. The four floats more spread what a warp stores over more banks.
typedef float LinearTile[LINEAR_DEPTH][LINEAR_TILE + 4];

// Loads element i of the tile that begins at (row0, column0) of the matrix (rows, columns), or 0 where that is outside.
// Neighbouring i are neighbours in memory, whichever stride is 1.
__device__ static inline void linear_load(LinearTile& tile, const LinearMatrix& matrix, int i, int row0, int column0,
                                          int rows, int columns) {
    bool along_row = matrix.column_stride == 1;
    int column = along_row ? i % LINEAR_DEPTH : i / LINEAR_TILE;
    int row = along_row ? i / LINEAR_DEPTH : i % LINEAR_TILE;
    bool inside = row0 + row < rows && column0 + column < columns;
    tile[column][row] = inside ? matrix.at(row0 + row, column0 + column) : 0;
}

// c (M, N) = a (M, K) b^T (K, N) + bias (N), or c += the same if `add`. bias may be null. Forward and both gradients
// are this product, with different strides of a (M, K) and b (N, K).
__global__ void __launch_bounds__(LINEAR_THREADS)
    linear_product_kernel2(float* c, LinearMatrix a, LinearMatrix b, const float* bias, int M, int N, int K,
                           bool add) {
    __shared__ alignas(16) LinearTile a_tile;
    __shared__ alignas(16) LinearTile b_tile;
    int m0 = blockIdx.y * LINEAR_TILE;
    int n0 = blockIdx.x * LINEAR_TILE;

    float sum[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += LINEAR_DEPTH) {
        __syncthreads();  // all threads have read the tiles of the step before
        for (int i = threadIdx.x; i < LINEAR_TILE * LINEAR_DEPTH; i += LINEAR_THREADS) {
            linear_load(a_tile, a, i, m0, k0, M, K);
            linear_load(b_tile, b, i, n0, k0, N, K);
        }
        __syncthreads();

        for (int k = 0; k < LINEAR_DEPTH; k++) {
            const float* a_column = &a_tile[k][threadIdx.x / 16 * 4];
            const float* b_column = &b_tile[k][threadIdx.x % 16 * 4];
            add_outer_product(sum, a_column, b_column);
        }
    }

    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int m = m0 + threadIdx.x / 16 * 4 + i;
            int n = n0 + threadIdx.x % 16 * 4 + j;
            if (m >= M || n >= N) continue;
            float* target = c + (size_t)m * N + n;
            *target = (add ? *target : 0) + sum[i][j] + (bias ? bias[n] : 0);
        }
}

static void linear_product2(float* c, LinearMatrix a, LinearMatrix b, const float* bias, int M, int N, int K,
                            bool add) {
    dim3 tiles(ceil_div(N, LINEAR_TILE), ceil_div(M, LINEAR_TILE));
    launch(linear_product_kernel2, tiles, LINEAR_THREADS, 0, c, a, b, bias, M, N, K, add);
}

static void linear_forward2(Problem& p) {
    LinearShape s = linear_shape(p);
    float* out = p.out<float>("out");
    LinearMatrix x = {p.in<float>("x"), s.C, 1};
    LinearMatrix w = {p.in<float>("w"), s.C, 1};
    linear_product2(out, x, w, p.in<float>("bias"), s.M, s.O, s.C, false);
}

// dbias (O) += dout (M, O).sum(0). A warp has a column.
__global__ void linear_bias_kernel2(float* dbias, const float* dout, int M, int O) {
    float sum = 0;
    for (int m = threadIdx.x; m < M; m += 32) sum += dout[(size_t)m * O + blockIdx.x];
    for (int step = 16; step; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
    if (threadIdx.x == 0) dbias[blockIdx.x] += sum;
}

static void linear_backward2(Problem& p) {
    LinearShape s = linear_shape(p);
    float* dx = p.out<float>("dx");
    float* dw = p.sum<float>("dw");
    float* dbias = p.sum<float>("dbias");
    const float* x = p.in<float>("x");
    const float* w = p.in<float>("w");
    const float* dout = p.in<float>("dout");

    // dx = dout w, where the kernel's b is w^T; dw += dout^T x, where it is x^T.
    linear_product2(dx, {dout, s.O, 1}, {w, 1, s.C}, nullptr, s.M, s.C, s.O, false);
    linear_product2(dw, {dout, 1, s.O}, {x, 1, s.C}, nullptr, s.O, s.C, s.M, true);
    launch(linear_bias_kernel2, s.O, 32, 0, dbias, dout, s.M, s.O);
}

// ---- 3: the program's -------------------------------------------------------------------------------------
// On tensor cores, in bf16. Where there are few tiles, several blocks share the sum of each.

#ifdef PROGRAM
static void linear_forward3(Problem& p) {
    Tensor out = p.tensor_out<floatX>("out");
    Tensor x = p.tensor_in<floatX>("x");
    Linear layer = {.w = p.in<floatX>("w"), .bias = p.in<floatX>("bias")};
    conv1x1_forward(out, x, layer);
}

// As in the network, the weight gradient goes to the side stream and may run beside the input gradient.
static void linear_backward3(Problem& p) {
    Tensor dx = p.tensor_out<floatX>("dx");
    Tensor dout = p.tensor_in<floatX>("dout");
    Tensor x = p.tensor_in<floatX>("x");
    Linear layer = {
        .w = p.in<floatX>("w"),
        .dw = p.out<float>("dw"),
        .dbias = p.out<float>("dbias"),
    };
    on_side_stream_deferred([=] { conv1x1_backward_weight(layer, dout, x); });
    conv1x1_backward_input(dx, dout, layer);
}
#endif
#endif

static Work linear_forward_work(const Problem& p) {
    LinearShape s = linear_shape(p);
    return convolution_work(s.M, 1, s.C, s.O);
}

// Two products of the same size as forward's. Read are x, dout and w, written are dx and, in fp32, dw.
static Work linear_backward_work(const Problem& p) {
    LinearShape s = linear_shape(p);
    double activations = (double)s.M * (2 * s.C + s.O);
    double weights = (double)s.O * s.C;
    double bytes = sizeof(floatX) * (activations + weights) + sizeof(float) * weights;
    return {2 * linear_forward_work(p).operations, bytes};
}

static const Ladder linear_ladder = {
    "linear",
    {
        {"forward", {"out"}, linear_forward_work},
        {"backward", {"dx", "dw", "dbias"}, linear_backward_work},
    },
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
