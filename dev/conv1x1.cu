// The 1x1 convolution, a linear layer of every pixel: out = F.conv2d(x, w[:, :, None, None], bias), its input gradient
// and its weight gradient.
//
// With T = H*W pixels an image in NCHW is a matrix x (C, T), and
//
//   out (O, T) = w (O, C) x (C, T) + bias
//   dx (C, T) = w^T (C, O) dout (O, T)
//   dw (O, C) += the sum over all images of dout (O, T) x^T (T, C)
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
// Versions 1 to 4 are NCHW; version 5, and 3 on a CPU, are NHWC. w is (O, C) in all of them. T is a multiple of 4, and
// the channels are multiples of 8. Whatever else a version wants it makes itself, and that is part of its time.
//
// What the steps change: a 1x1 convolution has a ninth of the arithmetic of a 3x3 convolution and all of its traffic.
// So the layout and the width of the elements decide. These figures are for 192 to 64 channels at 64x64, B = 32, on an
// H100:
//
//   2  Turning NCHW into rows of pixels, for one large product, moves every tensor once more. It takes 40% of the time.
//   3  That is not needed: an image in NCHW is a matrix as it lies, and a batch of products reads it in place. What
//      remains beside the products is a pass for the bias.
//   4  Our own product adds the bias where the sums are. In fifty lines it comes within 15% of cuBLAS. For the weight
//      gradient both matrices arrive with the sum running along their rows, and must be transposed on their way into
//      shared memory. There it takes half as long again as cuBLAS.
//   5  The program leaves fp32. In bf16 half the bytes move, tensor cores make the arithmetic nearly free, and in NHWC
//      the pixels are rows already. Forward runs at 86% of the floor. The input gradient, 192 columns wide, runs at
//      71%, where cuDNN has 73%.
//
// These are for the same shape at B = 4 on a CPU, two threads of an Intel Xeon with AVX-512:
//
//   1  Every multiplication loads two numbers and stores one. The 3 MB of an image are more than the second-level cache
//      holds, and are read again for each output: 13.1 ms. The input gradient's 1 MB stays there: 4.7 ms.
//   2  Four by four, a number that is loaded serves four multiplications: 3.2 and 3.3 ms.
//   3  In the program a tile of 12 by 32 sums stays in registers for all channels. It is fed by packed weights, with
//      two loads for 24 vectors of products: 1.5 and 1.5 ms. For forward that is 270 GFLOP/s. oneDNN takes 1.3 and
//      2.7 ms.
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

// ---- 1: the definition ------------------------------------------------------------------------------------
// x and dx are (B, C, T), out and dout (B, O, T). A row is a channel of an image. The innermost loop runs along a row,
// so that a CPU can vectorise it.

static void conv1x1_forward_kernel1(Problem&, float* out, const float* x, const float* w, const float* bias,
                                    Shape s) {
#pragma omp parallel for collapse(2)
    for (int b = 0; b < s.B; b++)
        for (int o = 0; o < s.O; o++) {
            float* out_row = out + ((size_t)b * s.O + o) * s.T;
            for (int t = 0; t < s.T; t++) out_row[t] = bias[o];
            for (int c = 0; c < s.C; c++) {
                const float* x_row = x + ((size_t)b * s.C + c) * s.T;
                for (int t = 0; t < s.T; t++) out_row[t] += w[o * s.C + c] * x_row[t];
            }
        }
}

static void conv1x1_input_gradient_kernel1(Problem&, float* dx, const float* dout, const float* w, Shape s) {
#pragma omp parallel for collapse(2)
    for (int b = 0; b < s.B; b++)
        for (int c = 0; c < s.C; c++) {
            float* dx_row = dx + ((size_t)b * s.C + c) * s.T;
            for (int t = 0; t < s.T; t++) dx_row[t] = 0;
            for (int o = 0; o < s.O; o++) {
                const float* dout_row = dout + ((size_t)b * s.O + o) * s.T;
                for (int t = 0; t < s.T; t++) dx_row[t] += w[o * s.C + c] * dout_row[t];
            }
        }
}

static void conv1x1_weight_gradient_kernel1(Problem&, float* dw, const float* dout, const float* x, Shape s) {
#pragma omp parallel for collapse(2)
    for (int o = 0; o < s.O; o++)
        for (int c = 0; c < s.C; c++) {
            double total = 0;
            for (int b = 0; b < s.B; b++) {
                const float* dout_row = dout + ((size_t)b * s.O + o) * s.T;
                const float* x_row = x + ((size_t)b * s.C + c) * s.T;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int t = 0; t < s.T; t++) sum += dout_row[t] * x_row[t];
                total += sum;
            }
            dw[o * s.C + c] += (float)total;
        }
}

#if !defined(__CUDACC__) && defined(PROGRAM)
// ---- 2 on a CPU: four rows by four rows at a time ---------------------------------------------------------

// out (B, N, T) = w (N, K) x (B, K, T) + bias (N), where bias may be null. What is loaded of x serves four rows of out,
// and what is loaded of out serves four rows of x. N and K are multiples of four. A tile is some pixels of an image,
// few enough that x stays in the cache there.
static void conv1x1_product2(float* out, const float* x, cpu::Matrix w, const float* bias, int N, int K,
                             Shape s) {
    const int PIXELS = 1024;
    cpu::each_tile(s.B, 1, s.T, PIXELS, [&](int b, int, int t0, int t1) {
        for (int n = 0; n < N; n += 4) {
            float* out_row[4];
            for (int i = 0; i < 4; i++) {
                out_row[i] = out + ((size_t)b * N + n + i) * s.T;
                std::fill(out_row[i] + t0, out_row[i] + t1, bias ? bias[n + i] : 0.0f);
            }

            for (int k = 0; k < K; k += 4) {
                const float* x_row[4];
                for (int j = 0; j < 4; j++) x_row[j] = x + ((size_t)b * K + k + j) * s.T;
                float weight[4][4];
                for (int i = 0; i < 4; i++)
                    for (int j = 0; j < 4; j++) weight[i][j] = *w.from(n + i, k + j).data;

                SIMD_FOR (int t = t0; t < t1; t++)
                    REGISTER_FOR (int i = 0; i < 4; i++)
                        REGISTER_FOR (int j = 0; j < 4; j++) out_row[i][t] += weight[i][j] * x_row[j][t];
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

// A tile is 4 by 4 elements of dw (O, C), of which number i is in row i / 4 and column i % 4. Their sixteen sums of
// products grow together, so that a vector that is loaded serves four of them.
static void conv1x1_weight_gradient2(Problem&, float* dw, const float* dout, const float* x, Shape s) {
    cpu::each_tile(s.O, 4, s.C, 4, [&](int o, int, int c, int) {
        double total[16] = {};
        for (int b = 0; b < s.B; b++) {
            const float* dout_rows = dout + ((size_t)b * s.O + o) * s.T;
            const float* x_rows = x + ((size_t)b * s.C + c) * s.T;
            cpu::Vector sum[16] = {};
            for (int t = 0; t < s.T; t += cpu::VECTOR) {
                cpu::Vector of_dout[4], of_x[4];
                for (int i = 0; i < 4; i++) of_dout[i] = cpu::load_some(dout_rows + (size_t)i * s.T + t, s.T - t);
                for (int i = 0; i < 4; i++) of_x[i] = cpu::load_some(x_rows + (size_t)i * s.T + t, s.T - t);
                REGISTER_FOR (int i = 0; i < 16; i++) sum[i] += of_dout[i / 4] * of_x[i % 4];
            }

            for (int i = 0; i < 16; i++)
                for (int lane = 0; lane < cpu::VECTOR; lane++) total[i] += sum[i][lane];
        }
        for (int i = 0; i < 16; i++) dw[(o + i / 4) * s.C + c + i % 4] += (float)total[i];
    });
}
#endif

#ifdef __CUDACC__
// ---- 2: pixels as the rows of one product, transposes around it -------------------------------------------
// The M = B T pixels of all images are the rows of one matrix.

static void conv1x1_forward2(Problem& p, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    int M = s.B * s.T;
    float* rows = p.scratch<float>("rows", (size_t)M * s.C);      // (B, T, C)
    float* result = p.scratch<float>("result", (size_t)M * s.O);  // (B, T, O)
    transpose(rows, x, nullptr, s.B, s.C, s.T);
    cublas_product(result, rows, w, M, s.O, s.C, false, true);  // result = rows w^T
    transpose(out, result, bias, s.B, s.T, s.O);
}

static void conv1x1_input_gradient2(Problem& p, float* dx, const float* dout, const float* w, Shape s) {
    int M = s.B * s.T;
    float* rows = p.scratch<float>("rows", (size_t)M * s.O);      // (B, T, O)
    float* result = p.scratch<float>("result", (size_t)M * s.C);  // (B, T, C)
    transpose(rows, dout, nullptr, s.B, s.O, s.T);
    cublas_product(result, rows, w, M, s.C, s.O, false, false);  // result = rows w
    transpose(dx, result, nullptr, s.B, s.T, s.C);
}

static void conv1x1_weight_gradient2(Problem& p, float* dw, const float* dout, const float* x, Shape s) {
    int M = s.B * s.T;
    float* rows = p.scratch<float>("rows", (size_t)M * s.C);      // (B, T, C)
    float* d_rows = p.scratch<float>("d_rows", (size_t)M * s.O);  // (B, T, O)
    float* sums = p.scratch<float>("sums", (size_t)s.O * s.C);    // (O, C)
    transpose(rows, x, nullptr, s.B, s.C, s.T);
    transpose(d_rows, dout, nullptr, s.B, s.O, s.T);
    cublas_product(sums, d_rows, rows, s.O, s.C, M, true, false);  // sums = d_rows^T rows
    add_parts(dw, sums, 1, (size_t)s.O * s.C);
}

// ---- 3: no transposes -------------------------------------------------------------------------------------
// An image of NCHW is a matrix already, and a batch of products takes all images.

// out (B, O, T) += bias (O)
__global__ void conv1x1_bias_kernel3(float* out, const float* bias, int O, int T, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] += bias[i / T % O];
}

static void conv1x1_forward3(Problem&, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    size_t n = (size_t)s.B * s.O * s.T;
    cublas_product(out, w, x, s.O, s.T, s.C, false, false, s.B, 0, (size_t)s.C * s.T);  // out = w x
    launch(conv1x1_bias_kernel3, ceil_div(n, 256), 256, 0, out, bias, s.O, s.T, n);
}

static void conv1x1_input_gradient3(Problem&, float* dx, const float* dout, const float* w, Shape s) {
    cublas_product(dx, w, dout, s.C, s.T, s.O, true, false, s.B, 0, (size_t)s.O * s.T);  // dx = w^T dout
}

static void conv1x1_weight_gradient3(Problem& p, float* dw, const float* dout, const float* x, Shape s) {
    size_t n = (size_t)s.O * s.C;
    size_t dout_stride = (size_t)s.O * s.T;
    size_t x_stride = (size_t)s.C * s.T;
    float* parts = p.scratch<float>("parts", s.B * n);  // (B, O, C)
    cublas_product(parts, dout, x, s.O, s.C, s.T, false, true, s.B, dout_stride, x_stride);  // parts = dout x^T
    add_parts(dw, parts, s.B, n);
}

// ---- 4: a product of our own ------------------------------------------------------------------------------

// A block of 256 threads owns 64 rows by 128 columns of the product, and a thread 8 by 4 of them. The sum runs over the
// channels, or for the weight gradient over the pixels: 16 of its terms are in shared memory at a time.
enum { ROWS = 64, COLUMNS = 128, DEPTH = 16 };

// Of the two factors: a (DEPTH, ROWS), which is transposed, and b (DEPTH, COLUMNS). In rows that are 4 floats longer a
// transposed store meets each bank of shared memory at most twice, and not up to sixteen times.
struct Tiles {
    float a[DEPTH][ROWS + 4];
    float b[DEPTH][COLUMNS + 4];
};

// sum (8, 4) += the thread's elements of a^T b.
static __device__ void multiply(float (&sum)[8][4], const Tiles& tiles) {
    int row = threadIdx.x / 32 * 8;
    int column = threadIdx.x % 32 * 4;
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        float4 a0 = *(const float4*)&tiles.a[k][row];
        float4 a1 = *(const float4*)&tiles.a[k][row + 4];
        float4 b0 = *(const float4*)&tiles.b[k][column];
        const float a[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
        const float b[4] = {b0.x, b0.y, b0.z, b0.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sum[i][j] += a[i] * b[j];
    }
}

// out (B, N, T) = w x + bias, with x (B, K, T) and w (N, K). For the input gradient w is TRANSPOSED: it is stored as
// (K, N), and bias is null. Block (columns, rows, b) owns 128 pixels of 64 channels of an image.
template <bool TRANSPOSED>
__global__ void __launch_bounds__(256) conv1x1_forward_kernel4(float* out, const float* x, const float* w,
                                                               const float* bias, int K, int N, int T) {
    __shared__ __align__(16) Tiles tiles;
    int t0 = blockIdx.x * COLUMNS;
    int n0 = blockIdx.y * ROWS;
    x += (size_t)blockIdx.z * K * T;
    out += (size_t)blockIdx.z * N * T;

    float sum[8][4] = {};
    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        // Neighbouring threads load neighbouring weights, whichever way these lie.
        for (int i = threadIdx.x; i < DEPTH * ROWS; i += 256) {
            int k = TRANSPOSED ? i / ROWS : i % DEPTH;
            int n = TRANSPOSED ? i % ROWS : i / DEPTH;
            float weight = 0;
            if (k0 + k < K && n0 + n < N) weight = TRANSPOSED ? w[(k0 + k) * N + n0 + n] : w[(n0 + n) * K + k0 + k];
            tiles.a[k][n] = weight;
        }
        for (int i = threadIdx.x; i < DEPTH * COLUMNS / 4; i += 256) {
            int k = i / (COLUMNS / 4);
            int t = i % (COLUMNS / 4) * 4;
            float4 pixels = make_float4(0, 0, 0, 0);
            if (k0 + k < K && t0 + t < T) pixels = *(const float4*)(x + (size_t)(k0 + k) * T + t0 + t);
            *(float4*)&tiles.b[k][t] = pixels;
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
        float bias_n = bias ? bias[n] : 0.0f;
        float4 pixels = make_float4(sum[i][0] + bias_n, sum[i][1] + bias_n, sum[i][2] + bias_n, sum[i][3] + bias_n);
        *(float4*)(out + (size_t)n * T + t) = pixels;
    }
}

static void conv1x1_forward4(Problem&, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    dim3 grid(ceil_div(s.T, COLUMNS), ceil_div(s.O, ROWS), s.B);
    launch(conv1x1_forward_kernel4<false>, grid, 256, 0, out, x, w, bias, s.C, s.O, s.T);
}

static void conv1x1_input_gradient4(Problem&, float* dx, const float* dout, const float* w, Shape s) {
    dim3 grid(ceil_div(s.T, COLUMNS), ceil_div(s.C, ROWS), s.B);
    launch(conv1x1_forward_kernel4<true>, grid, 256, 0, dx, dout, w, nullptr, s.O, s.C, s.T);
}

// parts (splits, O, C) = dout x^T, each over its split of the steps of 16 pixels that all images have together. The sum
// runs along the rows of dout (B, O, T) and x (B, C, T), so both are transposed on their way into shared memory. Block
// (channels, outputs, split) owns 128 channels of 64 outputs.
__global__ void __launch_bounds__(256)
    conv1x1_weight_gradient_kernel4(float* parts, const float* dout, const float* x, Shape s) {
    __shared__ __align__(16) Tiles tiles;
    int c0 = blockIdx.x * COLUMNS;
    int o0 = blockIdx.y * ROWS;
    int image_steps = ceil_div(s.T, DEPTH);
    int all_steps = s.B * image_steps;
    int first = (int)((long long)all_steps * blockIdx.z / gridDim.z);
    int last = (int)((long long)all_steps * (blockIdx.z + 1) / gridDim.z);

    float sum[8][4] = {};
    for (int step = first; step < last; step++) {
        int b = step / image_steps;
        int t0 = step % image_steps * DEPTH;
        // The ROWS rows of dout come first, then the COLUMNS rows of x.
        for (int i = threadIdx.x; i < (ROWS + COLUMNS) * DEPTH / 4; i += 256) {
            int row = i / (DEPTH / 4);
            int k = i % (DEPTH / 4) * 4;
            bool of_x = row >= ROWS;
            const float* matrix = of_x ? x : dout;
            int channel = of_x ? c0 + row - ROWS : o0 + row;
            int channels = of_x ? s.C : s.O;
            float4 pixels = make_float4(0, 0, 0, 0);
            if (channel < channels && t0 + k < s.T)
                pixels = *(const float4*)(matrix + ((size_t)b * channels + channel) * s.T + t0 + k);
            const float value[4] = {pixels.x, pixels.y, pixels.z, pixels.w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (of_x) tiles.b[k + e][row - ROWS] = value[e];
                else tiles.a[k + e][row] = value[e];
            }
        }
        __syncthreads();

        multiply(sum, tiles);
        __syncthreads();
    }

    parts += (size_t)blockIdx.z * s.O * s.C;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int o = o0 + threadIdx.x / 32 * 8 + i;
            int c = c0 + threadIdx.x % 32 * 4 + j;
            if (o < s.O && c < s.C) parts[(size_t)o * s.C + c] = sum[i][j];
        }
}

// The tiles of dw (O, C) alone would not fill the GPU. So the sum is split, until there are about four blocks for each
// multiprocessor.
static void conv1x1_weight_gradient4(Problem& p, float* dw, const float* dout, const float* x, Shape s) {
    size_t n = (size_t)s.O * s.C;
    int tiles = ceil_div(s.C, COLUMNS) * ceil_div(s.O, ROWS);
    int steps = s.B * ceil_div(s.T, DEPTH);
    int splits = std::min(steps, std::max(1, 4 * gpu_multiprocessors / tiles));
    float* parts = p.scratch<float>("parts", splits * n);  // (splits, O, C)
    dim3 grid(ceil_div(s.C, COLUMNS), ceil_div(s.O, ROWS), splits);
    launch(conv1x1_weight_gradient_kernel4, grid, 256, 0, parts, dout, x, s);
    add_parts(dw, parts, splits, n);
}
#endif

#ifdef PROGRAM
// ---- the program's: 5, on a CPU 3 -------------------------------------------------------------------------

static void conv1x1_program_forward(Problem& p) {
    Tensor out = p.tensor_out<floatX>("out");
    Tensor x = p.tensor_in<floatX>("x");
    conv1x1_forward(out, x, {.w = p.in<floatX>("w"), .bias = p.in<floatX>("bias")});
}

static void conv1x1_program_input_gradient(Problem& p) {
    Tensor dx = p.tensor_out<floatX>("dx");
    Tensor dout = p.tensor_in<floatX>("dout");
    conv1x1_backward_input(dx, dout, {.w = p.in<floatX>("w")});
}

static void conv1x1_program_weight_gradient(Problem& p) {
    Tensor dout = p.tensor_in<floatX>("dout");
    Tensor x = p.tensor_in<floatX>("x");
    float* dw = p.out<float>("dw");
    float* dbias = ON_GPU ? nullptr : p.scratch<float>("dbias", dout.C);  // on a CPU it comes with dw
    conv1x1_backward_weight({.dw = dw, .dbias = dbias}, dout, x);
}
#endif

static Work work_of(const Problem& p, bool weight_gradient) {
    Shape s = Shape::of(p);
    size_t weight_bytes = weight_gradient ? sizeof(float) : sizeof(floatX);
    return convolution_work((double)s.B * s.T, 1, s.C, s.O, weight_bytes);
}

static std::vector<Version> versions() {
    const char* input = "input gradient";
    const char* weight = "weight gradient";
    [[maybe_unused]] const double LONG_SUM = 5e-5;  // the error allowed where 131072 products are added up in fp32
    return {
        {1, "forward", NCHW, CPU_FP32, "the definition", forward<float>(conv1x1_forward_kernel1)},
        {1, input, NCHW, CPU_FP32, "the definition", input_gradient<float>(conv1x1_input_gradient_kernel1)},
        {1, weight, NCHW, CPU_FP32, "the definition", weight_gradient<float>(conv1x1_weight_gradient_kernel1)},
#ifdef __CUDACC__
        {2, "forward", NCHW, FP32, "transposes + cuBLAS", forward<float>(conv1x1_forward2)},
        {2, input, NCHW, FP32, "transposes + cuBLAS", input_gradient<float>(conv1x1_input_gradient2)},
        {2, weight, NCHW, FP32, "transposes + cuBLAS", weight_gradient<float>(conv1x1_weight_gradient2),
         LONG_SUM},
        {3, "forward", NCHW, FP32, "cuBLAS, a product an image", forward<float>(conv1x1_forward3)},
        {3, input, NCHW, FP32, "cuBLAS, a product an image", input_gradient<float>(conv1x1_input_gradient3)},
        {3, weight, NCHW, FP32, "cuBLAS, a product an image", weight_gradient<float>(conv1x1_weight_gradient3),
         LONG_SUM},
        {4, "forward", NCHW, FP32, "direct", forward<float>(conv1x1_forward4)},
        {4, input, NCHW, FP32, "direct", input_gradient<float>(conv1x1_input_gradient4)},
        {4, weight, NCHW, FP32, "direct, partial sums", weight_gradient<float>(conv1x1_weight_gradient4),
         LONG_SUM},
#ifdef PROGRAM
        {5, "forward", NHWC, FLOATX, "train_unet.cu", conv1x1_program_forward},
        {5, input, NHWC, FLOATX, "train_unet.cu", conv1x1_program_input_gradient},
        {5, weight, NHWC, FLOATX, "train_unet.cu", conv1x1_program_weight_gradient},
#endif
#elif defined(PROGRAM)
        {2, "forward", NCHW, CPU_FP32, "4 x 4 rows at a time", forward<float>(conv1x1_forward2)},
        {2, input, NCHW, CPU_FP32, "4 x 4 rows at a time", input_gradient<float>(conv1x1_input_gradient2)},
        {2, weight, NCHW, CPU_FP32, "4 x 4 rows at a time", weight_gradient<float>(conv1x1_weight_gradient2)},
        {3, "forward", NHWC, CPU_FP32, "train_unet.cu", conv1x1_program_forward},
        {3, input, NHWC, CPU_FP32, "train_unet.cu", conv1x1_program_input_gradient},
        {3, weight, NHWC, CPU_FP32, "train_unet.cu", conv1x1_program_weight_gradient},
#endif
    };
}

}  // namespace conv1x1

static const Ladder conv1x1_ladder = {
    "conv1x1",
    {{"forward", {"out"}, [](const Problem& p) { return conv1x1::work_of(p, false); }},
     {"input gradient", {"dx"}, [](const Problem& p) { return conv1x1::work_of(p, false); }},
     {"weight gradient", {"dw"}, [](const Problem& p) { return conv1x1::work_of(p, true); }}},
    conv1x1::versions()};
LADDER_MAIN(conv1x1_ladder)
