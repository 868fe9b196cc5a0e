// The 1x1 convolution, a linear layer of every pixel: out = F.conv2d(x, w[:, :, None, None], bias), its input
// gradient and its weight gradient.
//
//   make conv1x1 && ./conv1x1        every version of every pass: against PyTorch, then timed
//   ./conv1x1 3                      version 3 alone
//   ./conv1x1 all 64x64              every version of one case
//
//   1  CPU      the definition; on the large case only when asked for: ./conv1x1 1
//   2  CPU      four rows of outputs by four of inputs at a time, nothing packed (without a GPU only)
//   3  CPU      train_unet.cu's own: packed panels, NHWC (without a GPU only)
//   2  fp32     NCHW to NHWC, one cuBLAS product, and back
//   3  fp32     cuBLAS on NCHW as it lies: a product an image
//   4  fp32     direct: a product of our own on NCHW as it lies, bias included
//   5  bf16     train_unet.cu's own
//
// Versions 1 to 4 are NCHW; version 5, and 3 on a CPU, are NHWC; w is (O, C) in both. Whatever else a version
// wants it makes itself, in its time. With T = H*W, an image in NCHW is a matrix (C, T) and its output (O, T)
// = w x. T is a multiple of 4, channels of 8.
//
// What the steps change: a 1x1 convolution has a ninth of a 3x3's arithmetic and all of its traffic, so
// layout and width decide; figures for 192 to 64 channels at 64x64, B = 32, on an H100. Turning NCHW into
// rows of pixels for one product (2) moves every tensor once more, 40% of the time, and for nothing: an
// image in NCHW is a matrix as it lies, and a batch of products (3) reads it in place. What is left on top
// is a pass for the bias. Our own product (4) adds the bias where the sums are and comes within 15% of
// cuBLAS in fifty lines; for the weight gradient, where both matrices arrive with the reduction along their
// lines and must be turned around on the way into shared memory, it takes half as long again. Production (5)
// leaves fp32: in bf16 half the bytes move, tensor cores make the arithmetic nearly free, and in NHWC the
// pixels are rows already. Forward then runs at 86% of the floor; the input gradient, 192 columns wide, at
// 71%, where cuDNN has 73%.
//
// On a CPU, two threads of an Intel Xeon with AVX-512, the same shape at B = 4: in the definition (1) every
// multiplication loads two numbers and stores one, and an image's 3 MB, more than the second-level cache
// holds, are read again for each output: 13.1 ms; the input gradient's 1 MB stays there: 4.7 ms. Four by four
// (2) a number that is loaded serves four multiplications: 3.2 and 3.3 ms. In the program (3) a tile of 12 by
// 32 sums stays in registers for all channels, fed by packed weights at two loads for 24 vectors of products:
// 1.5 and 1.5 ms, 270 GFLOP/s forward. oneDNN takes 1.3 and 2.7.
#include "convolution.h"
#ifdef __CUDACC__
#include "cublas.h"
#endif

namespace conv1x1 {

struct Shape {
    int B, C, O, T;  // T: pixels of an image
    static Shape of(const Problem& p) {
        return {p.dim("B"), p.dim("C"), p.dim("O"), p.dim("H") * p.dim("W")};
    }
};

// ---- 1: the definition. The innermost loop runs along the image, so that a CPU can vectorise it -----------

static void conv1x1_forward_kernel1(Problem&, float* out, const float* x, const float* w, const float* bias,
                                    Shape s) {
#pragma omp parallel for collapse(2)
    for (int b = 0; b < s.B; b++)
        for (int o = 0; o < s.O; o++) {
            float* line = out + ((size_t)b * s.O + o) * s.T;
            for (int t = 0; t < s.T; t++) line[t] = bias[o];
            for (int c = 0; c < s.C; c++)
                for (int t = 0; t < s.T; t++) line[t] += w[o * s.C + c] * x[((size_t)b * s.C + c) * s.T + t];
        }
}
static void conv1x1_input_gradient_kernel1(Problem&, float* dx, const float* dout, const float* w, Shape s) {
#pragma omp parallel for collapse(2)
    for (int b = 0; b < s.B; b++)
        for (int c = 0; c < s.C; c++) {
            float* line = dx + ((size_t)b * s.C + c) * s.T;
            for (int t = 0; t < s.T; t++) line[t] = 0;
            for (int o = 0; o < s.O; o++)
                for (int t = 0; t < s.T; t++)
                    line[t] += w[o * s.C + c] * dout[((size_t)b * s.O + o) * s.T + t];
        }
}
static void conv1x1_weight_gradient_kernel1(Problem&, float* dw, const float* dout, const float* x, Shape s) {
#pragma omp parallel for collapse(2)
    for (int o = 0; o < s.O; o++)
        for (int c = 0; c < s.C; c++) {
            double total = 0;
            for (int b = 0; b < s.B; b++) {
                const float *d = dout + ((size_t)b * s.O + o) * s.T, *z = x + ((size_t)b * s.C + c) * s.T;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int t = 0; t < s.T; t++) sum += d[t] * z[t];
                total += sum;
            }
            dw[o * s.C + c] += (float)total;
        }
}

#ifndef __CUDACC__
#ifdef PROGRAM
// ---- 2 on a CPU: four rows by four rows at a time ---------------------------------------------------------

// out (N, T) = w (N, K) x (K, T) + bias, an image after the other: what is loaded of x serves four rows of
// out, what is loaded of out four of x. N and K are multiples of four. A task keeps some pixels in a cache.
static void conv1x1_product2(float* out, const float* x, cpu::Matrix w, const float* bias, int N, int K,
                             Shape s) {
    const int PIXELS = 1024;
    cpu::each_tile(s.B, 1, s.T, PIXELS, [&](int b, int, int t0, int end) {
        for (int n = 0; n < N; n += 4) {
            float* line[4];
            for (int i = 0; i < 4; i++) {
                line[i] = out + ((size_t)b * N + n + i) * s.T;
                std::fill(line[i] + t0, line[i] + end, bias ? bias[n + i] : 0.0f);
            }
            for (int k = 0; k < K; k += 4) {
                const float *first = x + ((size_t)b * K + k) * s.T, *source[4];
                float weight[4][4];
                for (int i = 0; i < 16; i++) weight[i / 4][i % 4] = *w.from(n + i / 4, k + i % 4).data;
                for (int j = 0; j < 4; j++) source[j] = first + (size_t)j * s.T;
                SIMD_FOR (int t = t0; t < end; t++)
                    REGISTER_FOR (int i = 0; i < 4; i++)
                        REGISTER_FOR (int j = 0; j < 4; j++) line[i][t] += weight[i][j] * source[j][t];
            }
        }
    });
}
static void conv1x1_forward2(Problem&, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    conv1x1_product2(out, x, {w, s.C}, bias, s.O, s.C, s);
}
static void conv1x1_input_gradient2(Problem&, float* dx, const float* dout, const float* w, Shape s) {
    conv1x1_product2(dx, dout, cpu::transposed(w, s.C), nullptr, s.C, s.O, s);
}
// Sixteen sums of products of lines at a time.
static void conv1x1_weight_gradient2(Problem&, float* dw, const float* dout, const float* x, Shape s) {
    cpu::each_tile(s.O, 4, s.C, 4, [&](int o, int, int c, int) {
        double total[16] = {};
        for (int b = 0; b < s.B; b++) {
            const float *d = dout + ((size_t)b * s.O + o) * s.T, *z = x + ((size_t)b * s.C + c) * s.T;
            cpu::Vector sum[16] = {};
            for (int t = 0; t < s.T; t += cpu::VECTOR) {
                cpu::Vector row[4], column[4];
                for (int i = 0; i < 4; i++) row[i] = cpu::load_some(d + (size_t)i * s.T + t, s.T - t);
                for (int i = 0; i < 4; i++) column[i] = cpu::load_some(z + (size_t)i * s.T + t, s.T - t);
                REGISTER_FOR (int i = 0; i < 16; i++) sum[i] += row[i / 4] * column[i % 4];
            }
            for (int i = 0; i < 16; i++)
                for (int lane = 0; lane < cpu::VECTOR; lane++) total[i] += sum[i][lane];
        }
        for (int i = 0; i < 16; i++) dw[(o + i / 4) * s.C + c + i % 4] += (float)total[i];
    });
}
#endif
#else
// to += from, where a product could not add by itself.
__global__ void conv1x1_add_kernel(float* to, const float* from, int parts, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
#pragma unroll 8
    for (int part = 0; part < parts; part++) sum += from[part * n + i];
    to[i] += sum;
}
static void add(float* to, const float* from, int parts, size_t n) {
    launch(conv1x1_add_kernel, ceil_div(n, 128), 128, 0, to, from, parts, n);
}

// ---- 2: pixels as the rows of one product, transposes around it -------------------------------------------

static void conv1x1_forward2(Problem& p, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    int M = s.B * s.T;
    float* rows = p.scratch<float>("rows", (size_t)M * s.C);      // (B, T, C)
    float* result = p.scratch<float>("result", (size_t)M * s.O);  // (B, T, O)
    transpose(rows, x, nullptr, s.B, s.C, s.T);
    cublas_product(result, rows, w, M, s.O, s.C, false, true);
    transpose(out, result, bias, s.B, s.T, s.O);
}
static void conv1x1_input_gradient2(Problem& p, float* dx, const float* dout, const float* w, Shape s) {
    int M = s.B * s.T;
    float* rows = p.scratch<float>("rows", (size_t)M * s.O);      // (B, T, O)
    float* result = p.scratch<float>("result", (size_t)M * s.C);  // (B, T, C)
    transpose(rows, dout, nullptr, s.B, s.O, s.T);
    cublas_product(result, rows, w, M, s.C, s.O, false, false);
    transpose(dx, result, nullptr, s.B, s.T, s.C);
}
static void conv1x1_weight_gradient2(Problem& p, float* dw, const float* dout, const float* x, Shape s) {
    int M = s.B * s.T;
    float* rows = p.scratch<float>("rows", (size_t)M * s.C);      // (B, T, C)
    float* d_rows = p.scratch<float>("d_rows", (size_t)M * s.O);  // (B, T, O)
    float* sums = p.scratch<float>("sums", (size_t)s.O * s.C);
    transpose(rows, x, nullptr, s.B, s.C, s.T);
    transpose(d_rows, dout, nullptr, s.B, s.O, s.T);
    cublas_product(sums, d_rows, rows, s.O, s.C, M, true, false);
    add(dw, sums, 1, (size_t)s.O * s.C);
}

// ---- 3: no transposes: an image of NCHW is a matrix already, and a batch of products takes all of them ----

__global__ void conv1x1_bias_kernel3(float* out, const float* bias, int O, int T, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] += bias[i / T % O];
}
static void conv1x1_forward3(Problem&, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    size_t n = (size_t)s.B * s.O * s.T;
    cublas_product(out, w, x, s.O, s.T, s.C, false, false, s.B, 0, (size_t)s.C * s.T);
    launch(conv1x1_bias_kernel3, ceil_div(n, 256), 256, 0, out, bias, s.O, s.T, n);
}
static void conv1x1_input_gradient3(Problem&, float* dx, const float* dout, const float* w, Shape s) {
    cublas_product(dx, w, dout, s.C, s.T, s.O, true, false, s.B, 0, (size_t)s.O * s.T);
}
static void conv1x1_weight_gradient3(Problem& p, float* dw, const float* dout, const float* x, Shape s) {
    size_t n = (size_t)s.O * s.C;
    float* parts = p.scratch<float>("parts", s.B * n);  // (B, O, C)
    cublas_product(parts, dout, x, s.O, s.C, s.T, false, true, s.B, (size_t)s.O * s.T, (size_t)s.C * s.T);
    add(dw, parts, s.B, n);
}

// ---- 4: a product of our own ------------------------------------------------------------------------------

// A block owns 64 rows by 128 columns of the product, a thread 8 by 4 of them; 16 steps of the reduction lie
// in shared memory at a time.
enum { ROWS = 64, COLUMNS = 128, DEPTH = 16 };
struct Tiles {
    float a[DEPTH][ROWS + 4];  // + 4: a transposed store meets a bank four times, not sixteen
    float b[DEPTH][COLUMNS + 4];
};
// sum += a^T b of a step
static __device__ void multiply(float (&sum)[8][4], const Tiles& tiles) {
    int row = threadIdx.x / 32 * 8, column = threadIdx.x % 32 * 4;
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        float4 a0 = *(const float4*)&tiles.a[k][row], a1 = *(const float4*)&tiles.a[k][row + 4];
        float4 b = *(const float4*)&tiles.b[k][column];
        const float a[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i][0] += a[i] * b.x, sum[i][1] += a[i] * b.y, sum[i][2] += a[i] * b.z,
                sum[i][3] += a[i] * b.w;
    }
}

// out (B, N, T) = w x + bias, with x (B, K, T): w (N, K), or where it is read as its transpose (K, N), for
// the input gradient. Block (columns of an image, rows, b); T is a multiple of four.
template <bool TRANSPOSED>
__global__ void __launch_bounds__(256) conv1x1_forward_kernel4(float* out, const float* x, const float* w,
                                                               const float* bias, int K, int N, int T) {
    __shared__ __align__(16) Tiles tiles;
    int t0 = blockIdx.x * COLUMNS, n0 = blockIdx.y * ROWS;
    x += (size_t)blockIdx.z * K * T, out += (size_t)blockIdx.z * N * T;
    float sum[8][4] = {};
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        for (int i = threadIdx.x; i < DEPTH * ROWS; i += 256) {
            int k = TRANSPOSED ? i / ROWS : i % DEPTH, n = TRANSPOSED ? i % ROWS : i / DEPTH;
            bool inside = k0 + k < K && n0 + n < N;
            tiles.a[k][n] = !inside ? 0.0f : TRANSPOSED ? w[(k0 + k) * N + n0 + n] : w[(n0 + n) * K + k0 + k];
        }
        for (int i = threadIdx.x; i < DEPTH * COLUMNS / 4; i += 256) {
            int k = i / (COLUMNS / 4), t = i % (COLUMNS / 4) * 4;
            float4 v = make_float4(0, 0, 0, 0);
            if (k0 + k < K && t0 + t < T) v = *(const float4*)(x + (size_t)(k0 + k) * T + t0 + t);
            *(float4*)&tiles.b[k][t] = v;
        }
        __syncthreads();
        multiply(sum, tiles);
        __syncthreads();
    }
    int t = t0 + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int n = n0 + threadIdx.x / 32 * 8 + i;
        if (n >= N || t >= T) continue;
        float b = bias ? bias[n] : 0.0f;
        *(float4*)(out + (size_t)n * T + t) =
            make_float4(sum[i][0] + b, sum[i][1] + b, sum[i][2] + b, sum[i][3] + b);
    }
}
static void conv1x1_forward4(Problem&, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    launch(conv1x1_forward_kernel4<false>, dim3(ceil_div(s.T, COLUMNS), ceil_div(s.O, ROWS), s.B), 256, 0,
           out, x, w, bias, s.C, s.O, s.T);
}
static void conv1x1_input_gradient4(Problem&, float* dx, const float* dout, const float* w, Shape s) {
    launch(conv1x1_forward_kernel4<true>, dim3(ceil_div(s.T, COLUMNS), ceil_div(s.C, ROWS), s.B), 256, 0, dx,
           dout, w, nullptr, s.O, s.C, s.T);
}

// parts (splits, O, C) = dout x^T of a split of the pixels: here both matrices have the reduction along their
// lines, so both are transposed on their way into shared memory. Block (channels, outputs, split).
__global__ void __launch_bounds__(256)
    conv1x1_weight_gradient_kernel4(float* parts, const float* dout, const float* x, Shape s) {
    __shared__ __align__(16) Tiles tiles;
    int c0 = blockIdx.x * COLUMNS, o0 = blockIdx.y * ROWS, steps = ceil_div(s.T, DEPTH), all = s.B * steps;
    int first = (int)((long long)all * blockIdx.z / gridDim.z);
    int last = (int)((long long)all * (blockIdx.z + 1) / gridDim.z);
    float sum[8][4] = {};
    for (int step = first; step < last; step++) {
        int b = step / steps, t0 = step % steps * DEPTH;
        for (int i = threadIdx.x; i < (ROWS + COLUMNS) * DEPTH / 4; i += 256) {
            int row = i / (DEPTH / 4), k = i % (DEPTH / 4) * 4;
            bool of_x = row >= ROWS;
            int channel = of_x ? c0 + row - ROWS : o0 + row, channels = of_x ? s.C : s.O;
            float4 v = make_float4(0, 0, 0, 0);
            if (channel < channels && t0 + k < s.T)
                v = *(const float4*)((of_x ? x : dout) + ((size_t)b * channels + channel) * s.T + t0 + k);
            const float value[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 4; e++) (of_x ? tiles.b[k + e][row - ROWS] : tiles.a[k + e][row]) = value[e];
        }
        __syncthreads();
        multiply(sum, tiles);
        __syncthreads();
    }
    parts += (size_t)blockIdx.z * s.O * s.C;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int o = o0 + threadIdx.x / 32 * 8 + i / 4, c = c0 + threadIdx.x % 32 * 4 + i % 4;
        if (o < s.O && c < s.C) parts[(size_t)o * s.C + c] = sum[i / 4][i % 4];
    }
}
static void conv1x1_weight_gradient4(Problem& p, float* dw, const float* dout, const float* x, Shape s) {
    size_t n = (size_t)s.O * s.C;
    int tiles = ceil_div(s.C, COLUMNS) * ceil_div(s.O, ROWS), steps = s.B * ceil_div(s.T, DEPTH);
    int splits = std::min(steps, std::max(1, 4 * gpu_multiprocessors / tiles));
    float* parts = p.scratch<float>("parts", splits * n);
    launch(conv1x1_weight_gradient_kernel4, dim3(ceil_div(s.C, COLUMNS), ceil_div(s.O, ROWS), splits), 256, 0,
           parts, dout, x, s);
    add(dw, parts, splits, n);
}
#endif  // __CUDACC__

// ---- the program's: 5, on a CPU 3 -------------------------------------------------------------------------

#ifdef PROGRAM
static void conv1x1_program_forward(Problem& p) {
    conv1x1_forward(p.tensor_out<floatX>("out"), p.tensor_in<floatX>("x"),
                    {.w = p.in<floatX>("w"), .bias = p.in<floatX>("bias")});
}
static void conv1x1_program_input_gradient(Problem& p) {
    conv1x1_backward_input(p.tensor_out<floatX>("dx"), p.tensor_in<floatX>("dout"), {.w = p.in<floatX>("w")});
}
static void conv1x1_program_weight_gradient(Problem& p) {
    Tensor dout = p.tensor_in<floatX>("dout");
    float* dbias = ON_GPU ? nullptr : p.scratch<float>("dbias", dout.C);  // on a CPU it comes with dw
    conv1x1_backward_weight({.dw = p.out<float>("dw"), .dbias = dbias}, dout, p.tensor_in<floatX>("x"));
}
#endif

static Work work_of(const Problem& p, bool weight_gradient) {
    Shape s = Shape::of(p);
    return convolution_work((double)s.B * s.T, 1, s.C, s.O, weight_gradient ? sizeof(float) : sizeof(floatX));
}
#ifdef __CUDACC__
static const double LONG_SUM = 5e-5;  // allowed where 131072 products meet in fp32
#endif

}  // namespace conv1x1

static const Ladder conv1x1_ladder = {
    "conv1x1",
    {{"forward", {"out"}, [](const Problem& p) { return conv1x1::work_of(p, false); }},
     {"input gradient", {"dx"}, [](const Problem& p) { return conv1x1::work_of(p, false); }},
     {"weight gradient", {"dw"}, [](const Problem& p) { return conv1x1::work_of(p, true); }}},
    []() -> std::vector<Version> {
        using namespace conv1x1;
        const char *in = "input gradient", *weights = "weight gradient";
        return {
            {1, "forward", NCHW, CPU_FP32, "the definition", forward<float>(conv1x1_forward_kernel1)},
            {1, in, NCHW, CPU_FP32, "the definition", input_gradient<float>(conv1x1_input_gradient_kernel1)},
            {1, weights, NCHW, CPU_FP32, "the definition",
             weight_gradient<float>(conv1x1_weight_gradient_kernel1)},
#ifdef __CUDACC__
            {2, "forward", NCHW, FP32, "transposes + cuBLAS", forward<float>(conv1x1_forward2)},
            {2, in, NCHW, FP32, "transposes + cuBLAS", input_gradient<float>(conv1x1_input_gradient2)},
            {2, weights, NCHW, FP32, "transposes + cuBLAS", weight_gradient<float>(conv1x1_weight_gradient2),
             LONG_SUM},
            {3, "forward", NCHW, FP32, "cuBLAS, a product an image", forward<float>(conv1x1_forward3)},
            {3, in, NCHW, FP32, "cuBLAS, a product an image", input_gradient<float>(conv1x1_input_gradient3)},
            {3, weights, NCHW, FP32, "cuBLAS, a product an image",
             weight_gradient<float>(conv1x1_weight_gradient3), LONG_SUM},
            {4, "forward", NCHW, FP32, "direct", forward<float>(conv1x1_forward4)},
            {4, in, NCHW, FP32, "direct", input_gradient<float>(conv1x1_input_gradient4)},
            {4, weights, NCHW, FP32, "direct, partial sums", weight_gradient<float>(conv1x1_weight_gradient4),
             LONG_SUM},
#ifdef PROGRAM
            {5, "forward", NHWC, FLOATX, "train_unet.cu", conv1x1_program_forward},
            {5, in, NHWC, FLOATX, "train_unet.cu", conv1x1_program_input_gradient},
            {5, weights, NHWC, FLOATX, "train_unet.cu", conv1x1_program_weight_gradient},
#endif
#elif defined(PROGRAM)
            {2, "forward", NCHW, CPU_FP32, "4 x 4 rows at a time", forward<float>(conv1x1_forward2)},
            {2, in, NCHW, CPU_FP32, "4 x 4 rows at a time", input_gradient<float>(conv1x1_input_gradient2)},
            {2, weights, NCHW, CPU_FP32, "4 x 4 rows at a time",
             weight_gradient<float>(conv1x1_weight_gradient2)},
            {3, "forward", NHWC, CPU_FP32, "train_unet.cu", conv1x1_program_forward},
            {3, in, NHWC, CPU_FP32, "train_unet.cu", conv1x1_program_input_gradient},
            {3, weights, NHWC, CPU_FP32, "train_unet.cu", conv1x1_program_weight_gradient},
#endif
        };
    }()};
LADDER_MAIN(conv1x1_ladder)
