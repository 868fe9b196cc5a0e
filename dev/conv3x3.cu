// The 3x3 convolution: out = F.conv2d(x, w, bias, padding=1), its input gradient and its weight gradient.
//
//   make conv3x3 && ./conv3x3        every version of every pass: against PyTorch, then timed
//   ./conv3x3 5                      version 5 alone
//   ./conv3x3 all 64x64              every version of one case
//
//   1  CPU      the definition: seven loops; on the large case only when asked for: ./conv3x3 1
//   2  CPU      im2col in a thread's cache, a product a tile: conv3x3_cpu.h (without a GPU only)
//   3  CPU      direct, a product a tap and row of pixels: conv3x3_cpu.h (without a GPU only)
//   4  CPU      Winograd, F(2x2): train_unet.cu's own (without a GPU only)
//   1  fp32     the definition on the GPU: a thread an output; weight gradient: a block a filter
//   2  fp32     im2col buffer + one cuBLAS product, transposes around it
//   3  fp32     direct: a thread a patch of pixels, products scattered with atomics
//   4  fp32     version 3 with 16-byte loads, and the weights transposed in shared memory
//   5  fp32     no atomics: each block loads its apron; weight gradient: each block walks over all pixels
//   6  fp32     no atomics: partial sums to a buffer, added up by a second kernel
//   7  fp32     Winograd, F(2x2) and F(4x4): fewer multiplications, larger errors
//   8  bf16     implicit GEMM on tensor cores: mma.sync fed by cp.async
//   9  bf16     train_unet.cu's own
//
// The pass "backward" is input and weight gradient together: version 8 is one kernel that loads dout once,
// version 9 is train_unet.cu's two kernels side by side.
//
// Versions 1 to 7 are NCHW with w (O, C, 3, 3), as in PyTorch; versions 8 and 9 are NHWC with w (O, 3, 3, C).
// If a version wants anything else (flipped weights, other layouts), it makes that itself, and is timed with
// it. Sizes need not be multiples of a tile, but versions 4 to 8 need a W that is a multiple of 4 and channels
// that are multiples of 8. At the shapes of the default model, its three-channel ends among them, only version
// 9 is run unless another is asked for.
//
// What the steps change, forward. The figures are for 192 to 64 channels at 64x64, B = 32, which is 29 GFLOP,
// on an H100.
//   1  The loops take 370 ms on 16 cores. A thread an output uses all of the GPU, but pays two loads for each
//      multiplication: 5.1 ms.
//   2  The im2col buffer turns the layer into what a GPU is best at, a matrix product. The price is to write and
//      to read 0.9 GB, which takes half of the time. Direct versions (3 to 5) need only shared memory.
//   3  Scattering lets a thread multiply the pixels it has without a look at their neighbours. But each output
//      now is four atomic additions, and a weight read from shared memory serves only four multiplications.
//   4  Wide reads bring four weights at a time, which takes a quarter off the time.
//   5  The apron is the step that pays. A thread that gathers needs no registers for its neighbours' sums, so
//      the same 64 registers hold four times the outputs, a 16-byte read serves 32 multiplications instead of
//      16, and the atomics are gone. This is within 4% of cuDNN's fp32 kernel.
//   6  The buffer of partial sums gives the same bits on every run too. It has four times the output's traffic,
//      but costs less than the atomics.
//   7  Winograd is the way past the peak of the fp32 units. F(2x2) has 2.25 times fewer multiplications and
//      F(4x4) four times fewer; the transforms and their traffic leave 1.3 and 2.1 of that. The error of F(4x4)
//      is thirty times as large.
//   8  Tensor cores make plain arithmetic nearly twice as fast again, although every tap fetches its pixels
//      anew, 0.7 GB through the second-level cache.
//   9  The program fetches a patch of the image once for all nine taps, and on Hopper leaves fetching and
//      multiplying to the copy engine and wgmma: 3.7 times as fast as version 8, and faster than cuDNN. Its
//      portable kernel takes 90 us there.
//
// Input gradient: it is the same convolution with flipped weights, from 64 to 192 channels, so versions 1 to 8
// are the same ladder behind a small kernel that flips. With three times the outputs, whatever writes outputs
// costs more (atomics, partial sums, Winograd's last transform). With a third of the inputs, im2col costs less.
// The program reads the weights as they lie. Its blocks take several tiles each, so that the next tile's patch
// is on its way while the outputs of one are written: 57 us, and 63 with a block a tile. After these were
// measured, the kernel changed: two warpgroups take the tiles in turn, and no condition is tested for each
// element. That made the input gradients of a step 18 to 22% shorter on an H100.
//
// Weight gradient: the sums run over 131,072 pixels and the outputs are few, so the question is not how to
// multiply but who adds up.
//   3, 4  With atomics 2,048 blocks meet in each of 110,592 sums, and nothing else matters: the better loads of
//         version 4 change nothing.
//   5     One owner for each sum needs no atomics, but leaves six blocks for 132 multiprocessors. It is seven
//         times slower.
//   6     The pixels are split over just as many blocks as the GPU holds, which makes 44 partial sums of 2,048
//         additions. It is 3.4 times faster than the atomics, gives the same bits on every run, and has a fifth
//         of their rounding error.
//   9     The program keeps all nine taps of 64 x 64 channels in registers while x and dout stream by once. A
//         second kernel adds up the sums of the splits.
//
// Backward: should one kernel compute both gradients, since both read dout? Version 8 does so with the
// fragments of the program's portable kernels and takes 189 us; those two kernels side by side take 191 us (in
// a build without Hopper's instructions). All there is to save is one reading of dout, 17 MB or 6 us. The price
// is 176 sums a thread and so one block a multiprocessor, one split of the pixels for both gradients, and, for
// more than 64 output channels, a launch for each 64. Two kernels, each with the tile, the split and the
// instructions that suit it, take 104 us. The idea doesn't pay.
//
// On a CPU, two threads of an Intel Xeon with AVX-512, the same shape at B = 4. Times are of forward, input
// gradient and weight gradient.
//   1  The definition takes 161, 140 and 258 ms, as its multiplications load two numbers each and most store
//      one.
//   2  Neighbourhoods written out in a thread's cache make a product whose sums stay in registers: 16, 14 and
//      18 ms.
//   3  Pixels multiplied where they lie, a tap and a row at a time, need no copies, but the sums pass through
//      the first-level cache once a tap: 13, 14 and 14 ms.
//   4  Winograd has 2.25 times fewer multiplications and is twice as fast: 6.5, 7.8 and 7.7 ms.
#include "convolution.h"
#ifdef __CUDACC__
#include "cublas.h"
#elif defined(PROGRAM)
#include "conv3x3_cpu.h"
#endif

namespace conv3x3 {

struct Shape {
    int B, C, O, H, W;  // x is (B, C, H, W), out is (B, O, H, W)

    static Shape of(const Problem& p) { return {p.dim("B"), p.dim("C"), p.dim("O"), p.dim("H"), p.dim("W")}; }
};

// ---- forward ----------------------------------------------------------------------------------------------

// 1: the definition, w (O, C, 3, 3):
//     out[b][o][oy][ox] = bias[o] + sum over c, tap_y, tap_x of
//                         w[o][c][tap_y][tap_x] x[b][c][oy + tap_y - 1][ox + tap_x - 1]
// The loop over a line's pixels is innermost, so that a CPU can vectorise it.
static void conv3x3_forward_kernel1(Problem&, float* out, const float* x, const float* w, const float* bias,
                                    Shape s) {
#pragma omp parallel for collapse(3)
    for (int b = 0; b < s.B; b++)
        for (int o = 0; o < s.O; o++)
            for (int oy = 0; oy < s.H; oy++) {
                float* line = out + (((size_t)b * s.O + o) * s.H + oy) * s.W;
                for (int ox = 0; ox < s.W; ox++) line[ox] = bias ? bias[o] : 0.0f;

                for (int c = 0; c < s.C; c++)
                    for (int tap_y = 0; tap_y < 3; tap_y++) {
                        int iy = oy + tap_y - 1;
                        if (iy < 0 || iy >= s.H) continue;

                        const float* source = x + (((size_t)b * s.C + c) * s.H + iy) * s.W;
                        for (int tap_x = 0; tap_x < 3; tap_x++) {
                            float weight = w[(((size_t)o * s.C + c) * 3 + tap_y) * 3 + tap_x];
                            int first = tap_x == 0 ? 1 : 0;
                            int last = tap_x == 2 ? s.W - 1 : s.W;
                            for (int ox = first; ox < last; ox++) line[ox] += weight * source[ox + tap_x - 1];
                        }
                    }
            }
}

#ifdef __CUDACC__
// 1 on the GPU: each thread computes an output. Neighbouring threads read neighbouring pixels, and all of them
// the same weight, so caches catch most of it. But a multiplication still costs two loads.
//
// out (B, O, H, W) of x (B, C, H, W), w (O, C, 9) and bias (O), which may be null, as in all versions to 7.
//
// In all kernels a coordinate is compared as an unsigned number: below 0 it is larger than any size, so one
// comparison finds both ends of the image.
__global__ void conv3x3_forward_thread_kernel1(float* out, const float* x, const float* w, const float* bias,
                                               Shape s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)s.B * s.O * s.H * s.W) return;

    int ox = (int)(i % s.W);
    int oy = (int)(i / s.W % s.H);
    int o = (int)(i / s.W / s.H % s.O);
    size_t b = i / s.W / s.H / s.O;

    const float* image = x + b * s.C * s.H * s.W;
    float sum = bias ? bias[o] : 0.0f;
    for (int c = 0; c < s.C; c++)
        for (int tap = 0; tap < 9; tap++) {
            int iy = oy + tap / 3 - 1;
            int ix = ox + tap % 3 - 1;
            if ((unsigned)iy < (unsigned)s.H && (unsigned)ix < (unsigned)s.W)
                sum += w[((size_t)o * s.C + c) * 9 + tap] * image[((size_t)c * s.H + iy) * s.W + ix];
        }
    out[i] = sum;
}

static void conv3x3_forward1(Problem&, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    size_t outputs = (size_t)s.B * s.O * s.H * s.W;
    launch(conv3x3_forward_thread_kernel1, ceil_div(outputs, 256), 256, 0, out, x, w, bias, s);
}

// 2: the convolution as one matrix product. Row m of `columns` (B*H*W, 9, C) holds the 3x3 neighbourhood of
// pixel m, so every element of x is written nine times and read back by the product:
//     rows (B*H*W, O) = columns (B*H*W, 9 C) w^T (9 C, O)
enum { IM2COL_CHANNELS = 32 };  // 128 bytes of a row

// columns (B*H*W, 9, C) of x (B, C, H, W). Block (tile, channels, b) copies 8 x 8 pixels of 32 channels. It
// reads x along the image and writes along the channels; shared memory turns the tile around.
__global__ void conv3x3_im2col_kernel2(float* columns, const float* x, Shape s) {
    // A channel has 10 x 10 pixels, one more on each side than the block's. With one more element, the 32
    // channels that a warp reads lie in 32 different banks.
    __shared__ float xs[IM2COL_CHANNELS][101];
    int tiles_x = ceil_div(s.W, 8);
    int y0 = blockIdx.x / tiles_x * 8;
    int x0 = blockIdx.x % tiles_x * 8;
    int c0 = blockIdx.y * IM2COL_CHANNELS;
    int b = blockIdx.z;

    for (int i = threadIdx.x; i < IM2COL_CHANNELS * 100; i += blockDim.x) {
        int c = c0 + i / 100;
        int iy = y0 - 1 + i / 10 % 10;
        int ix = x0 - 1 + i % 10;
        bool inside = c < s.C && (unsigned)iy < (unsigned)s.H && (unsigned)ix < (unsigned)s.W;
        xs[i / 100][i % 100] = inside ? x[(((size_t)b * s.C + c) * s.H + iy) * s.W + ix] : 0.0f;
    }
    __syncthreads();

    int c = threadIdx.x % 32;
    if (c0 + c >= s.C) return;

    for (int i = threadIdx.x / 32; i < 64 * 9; i += blockDim.x / 32) {
        int pixel = i / 9;
        int tap = i % 9;
        int py = pixel / 8;
        int px = pixel % 8;
        if (y0 + py >= s.H || x0 + px >= s.W) continue;

        size_t m = ((size_t)b * s.H + y0 + py) * s.W + x0 + px;
        columns[(m * 9 + tap) * s.C + c0 + c] = xs[c][(py + tap / 3) * 10 + px + tap % 3];
    }
}

static float* im2col(Problem& p, const float* x, Shape s) {
    float* columns = p.scratch<float>("columns", (size_t)s.B * s.H * s.W * 9 * s.C);  // (B*H*W, 9, C)
    dim3 grid(ceil_div(s.H, 8) * ceil_div(s.W, 8), ceil_div(s.C, IM2COL_CHANNELS), s.B);
    launch(conv3x3_im2col_kernel2, grid, 256, 0, columns, x, s);
    return columns;
}

// Moves the taps of n weights before the channels, to (O, 9, C) = from (O, C, 9). With `back` it is the other
// way, and adds: to (O, C, 9) += from (O, 9, C).
__global__ void conv3x3_taps_kernel2(float* to, const float* from, int C, size_t n, bool back) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;

    size_t o = i / (9 * C);
    size_t tap = i % (9 * C) / C;
    size_t c = i % (9 * C) % C;
    size_t planar = (o * C + c) * 9 + tap;
    if (back)
        to[planar] += from[i];
    else
        to[i] = from[planar];
}

static void conv3x3_forward2(Problem& p, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    int M = s.B * s.H * s.W;
    int K = 9 * s.C;
    size_t n = (size_t)s.O * K;

    float* columns = im2col(p, x, s);                         // (M, 9, C)
    float* weights = p.scratch<float>("weights", n);          // (O, 9, C)
    float* rows = p.scratch<float>("rows", (size_t)M * s.O);  // (B, H*W, O)
    launch(conv3x3_taps_kernel2, ceil_div(n, 256), 256, 0, weights, w, s.C, n, false);
    cublas_product(rows, columns, weights, M, s.O, K, false, true);
    transpose(out, rows, bias, s.B, s.H * s.W, s.O);
}

// 3: no buffer. A block owns 8 x 8 pixels of x and 64 output channels, a thread 2 x 2 of the pixels and 4 of
// the channels. A thread multiplies its pixels by all nine taps, which gives a part of the sums of 4 x 4 pixels
// of the output. These overlap with those of its neighbours, so that all parts are added with atomics, to an
// output that starts as the bias.
enum {
    OUTPUTS = 64,  // output channels of a block
    STEP = 8       // channels of x in shared memory at a time
};

__global__ void conv3x3_fill_kernel3(float* out, const float* bias, int O, int T, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = bias ? bias[i / T % O] : 0.0f;
}

// out (B, O, H, W) = bias (O), or zeros where there is none.
static void fill(float* out, const float* bias, Shape s) {
    size_t n = (size_t)s.B * s.O * s.H * s.W;
    launch(conv3x3_fill_kernel3, ceil_div(n, 256), 256, 0, out, bias, s.O, s.H * s.W, n);
}

// What a thread of the scattering kernels owns. Sixteen threads share four channels and have a patch each.
struct ScatterPlace {
    int b, o0, y0, x0;  // the block's image, first output channel and pixel
    int o, py, px;      // the thread's own within them

    __device__ ScatterPlace(Shape s) {
        int tiles_x = ceil_div(s.W, 8);
        int patch = threadIdx.x % 16;
        b = blockIdx.z;
        o0 = blockIdx.y * OUTPUTS;
        y0 = blockIdx.x / tiles_x * 8;
        x0 = blockIdx.x % tiles_x * 8;
        o = threadIdx.x / 16 * 4;
        py = patch / 4 * 2;
        px = patch % 4 * 2;
    }
};

static dim3 scatter_grid(Shape s) {
    return dim3(ceil_div(s.H, 8) * ceil_div(s.W, 8), ceil_div(s.O, OUTPUTS), s.B);
}

// Adds a thread's sums, 4 channels of 4 x 4 pixels, to out (B, O, H, W). Their first pixel is one above and one
// to the left of the thread's own.
static __device__ void scatter(float* out, const float (&sum)[4][4][4], ScatterPlace place, Shape s) {
#pragma unroll
    for (int i = 0; i < 64; i++) {
        int k = i / 16;
        int y = i / 4 % 4;
        int x = i % 4;
        int o = place.o0 + place.o + k;
        int oy = place.y0 + place.py - 1 + y;
        int ox = place.x0 + place.px - 1 + x;
        if (o < s.O && (unsigned)oy < (unsigned)s.H && (unsigned)ox < (unsigned)s.W)
            atomicAdd(out + (((size_t)place.b * s.O + o) * s.H + oy) * s.W + ox, sum[k][y][x]);
    }
}

// out (B, O, H, W) += the convolution of x (B, C, H, W) by w (O, C, 9).
__global__ void __launch_bounds__(256)
    conv3x3_forward_kernel3(float* out, const float* x, const float* w, Shape s) {
    __shared__ float xs[STEP][8][8];
    __shared__ float ws[OUTPUTS][STEP * 9];
    ScatterPlace place(s);
    float sum[4][4][4] = {};  // channel, line and column of the output

    for (int c0 = 0; c0 < s.C; c0 += STEP) {
        for (int i = threadIdx.x; i < STEP * 64; i += 256) {
            int c = c0 + i / 64;
            int line = i / 8 % 8;
            int column = i % 8;
            int iy = place.y0 + line;
            int ix = place.x0 + column;
            bool inside = c < s.C && iy < s.H && ix < s.W;
            float value = inside ? x[(((size_t)place.b * s.C + c) * s.H + iy) * s.W + ix] : 0.0f;
            xs[i / 64][line][column] = value;
        }
        for (int i = threadIdx.x; i < OUTPUTS * STEP * 9; i += 256) {
            int row = i / (STEP * 9);
            int o = place.o0 + row;
            int column = i % (STEP * 9);
            int k = c0 * 9 + column;
            bool inside = o < s.O && k < s.C * 9;
            ws[row][column] = inside ? w[(size_t)o * s.C * 9 + k] : 0.0f;
        }
        __syncthreads();

#pragma unroll 1
        for (int c = 0; c < STEP; c++) {
            float in[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++) in[i / 2][i % 2] = xs[c][place.py + i / 2][place.px + i % 2];

#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int tap = 0; tap < 9; tap++) {
                    float weight = ws[place.o + k][c * 9 + tap];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sum[k][i / 2 + 2 - tap / 3][i % 2 + 2 - tap % 3] += weight * in[i / 2][i % 2];
                }
        }
        __syncthreads();
    }
    scatter(out, sum, place, s);
}

static void conv3x3_forward3(Problem&, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    fill(out, bias, s);
    launch(conv3x3_forward_kernel3, scatter_grid(s), 256, 0, out, x, w, s);
}

// 4: the same sums. Shared memory is filled with 16-byte loads, and the weights lie in it with the output
// channels innermost: one 16-byte read brings a tap of all four channels, and the threads of a warp no longer
// meet in a bank. W and C are multiples of four.

// ws (STEP, 9, OUTPUTS) = w (O, C, 9), from output o0 and channel c0 on, transposed.
template <int THREADS>
static __device__ void load_weights(float (&ws)[STEP * 9][OUTPUTS], const float* w, int o0, int c0, Shape s) {
    // Neighbouring threads have neighbouring output channels. Each reads a cache line of its own, but they write
    // to different banks, and the rest of a line is still in L1 when it is wanted.
    for (int i = threadIdx.x; i < OUTPUTS * STEP * 9 / 4; i += THREADS) {
        int o = i % OUTPUTS;
        int k = i / OUTPUTS * 4;
        float4 v = make_float4(0, 0, 0, 0);
        if (o0 + o < s.O && c0 * 9 + k < s.C * 9)
            v = *(const float4*)(w + ((size_t)(o0 + o) * s.C + c0) * 9 + k);
        ws[k][o] = v.x;
        ws[k + 1][o] = v.y;
        ws[k + 2][o] = v.z;
        ws[k + 3][o] = v.w;
    }
}

// A thread's sums for scatter(), of x (B, C, H, W) and w (O, C, 9).
static __device__ void scattered_sums(float (&sum)[4][4][4], const float* x, const float* w,
                                      ScatterPlace place, Shape s) {
    __shared__ __align__(16) float xs[STEP][8][12];  // 12: a warp's 16 patches lie in different banks
    __shared__ __align__(16) float ws[STEP * 9][OUTPUTS];

    for (int c0 = 0; c0 < s.C; c0 += STEP) {
        for (int i = threadIdx.x; i < STEP * 16; i += 256) {
            int c = c0 + i / 16;
            int line = i / 2 % 8;
            int column = i % 2 * 4;
            int iy = place.y0 + line;
            int ix = place.x0 + column;
            float4 v = make_float4(0, 0, 0, 0);
            if (c < s.C && iy < s.H && ix < s.W)
                v = *(const float4*)(x + (((size_t)place.b * s.C + c) * s.H + iy) * s.W + ix);
            *(float4*)&xs[i / 16][line][column] = v;
        }
        load_weights<256>(ws, w, place.o0, c0, s);
        __syncthreads();

#pragma unroll 1
        for (int c = 0; c < STEP; c++) {
            float2 in[2];  // the thread's two lines of two pixels
            in[0] = *(const float2*)&xs[c][place.py][place.px];
            in[1] = *(const float2*)&xs[c][place.py + 1][place.px];

#pragma unroll
            for (int tap = 0; tap < 9; tap++) {
                float4 v = *(const float4*)&ws[c * 9 + tap][place.o];
                const float weight[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int y = 0; y < 2; y++) {
                        sum[k][y + 2 - tap / 3][2 - tap % 3] += weight[k] * in[y].x;
                        sum[k][y + 2 - tap / 3][3 - tap % 3] += weight[k] * in[y].y;
                    }
            }
        }
        __syncthreads();
    }
}

__global__ void __launch_bounds__(256)
    conv3x3_forward_kernel4(float* out, const float* x, const float* w, Shape s) {
    ScatterPlace place(s);
    float sum[4][4][4] = {};
    scattered_sums(sum, x, w, place, s);
    scatter(out, sum, place, s);
}

static void conv3x3_forward4(Problem&, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    fill(out, bias, s);
    launch(conv3x3_forward_kernel4, scatter_grid(s), 256, 0, out, x, w, s);
}

// 5: no atomics. A block owns 8 x 16 pixels of the *output*. It reads these pixels of x with an apron, one more
// pixel on each side, which train_unet.cu calls a halo. That is 1.4 times the loads of x, but every sum has one
// owner and the output is written once. The registers that held the border of a patch now hold outputs, 2 x 4
// pixels of 8 channels a thread, so that each read of shared memory serves more than twice the multiplications.
__global__ void __launch_bounds__(128, 4)
    conv3x3_forward_kernel5(float* out, const float* x, const float* w, const float* bias, Shape s) {
    __shared__ __align__(16) float xs[STEP][10][24];  // columns from x0 - 4 on, so that all loads are aligned
    __shared__ __align__(16) float ws[STEP * 9][OUTPUTS];
    int tiles_x = ceil_div(s.W, 16);
    int b = blockIdx.z;
    int o0 = blockIdx.y * OUTPUTS;
    int y0 = blockIdx.x / tiles_x * 8;
    int x0 = blockIdx.x % tiles_x * 16;

    // The thread's own channels and pixels within the block's.
    int patch = threadIdx.x % 16;
    int o = threadIdx.x / 16 * 8;
    int py = patch / 4 * 2;
    int px = patch % 4 * 4;
    float sum[8][2][4] = {};  // channel, line and column

    for (int c0 = 0; c0 < s.C; c0 += STEP) {
        for (int i = threadIdx.x; i < STEP * 60; i += 128) {
            int c = c0 + i / 60;
            int line = i / 6 % 10;
            int column = i % 6 * 4;
            int iy = y0 - 1 + line;
            int ix = x0 - 4 + column;
            float4 v = make_float4(0, 0, 0, 0);
            if (c < s.C && (unsigned)iy < (unsigned)s.H && (unsigned)ix < (unsigned)s.W)
                v = *(const float4*)(x + (((size_t)b * s.C + c) * s.H + iy) * s.W + ix);
            *(float4*)&xs[i / 60][line][column] = v;
        }
        load_weights<128>(ws, w, o0, c0, s);
        __syncthreads();

#pragma unroll 1
        for (int c = 0; c < STEP; c++) {
            float in[4][6];  // the thread's pixels and one more on each side
#pragma unroll
            for (int y = 0; y < 4; y++) {
                const float* line = xs[c][py + y] + px;
                float4 v = *(const float4*)(line + 4);
                in[y][0] = line[3];
                in[y][1] = v.x;
                in[y][2] = v.y;
                in[y][3] = v.z;
                in[y][4] = v.w;
                in[y][5] = line[8];
            }

#pragma unroll
            for (int tap = 0; tap < 9; tap++)
#pragma unroll
                for (int half = 0; half < 8; half += 4) {
                    float4 v = *(const float4*)&ws[c * 9 + tap][o + half];
                    const float weight[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int k = 0; k < 4; k++)
#pragma unroll
                        for (int i = 0; i < 8; i++)
                            sum[half + k][i / 4][i % 4] += weight[k] * in[i / 4 + tap / 3][i % 4 + tap % 3];
                }
        }
        __syncthreads();
    }

#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
        for (int y = 0; y < 2; y++) {
            if (o0 + o + k >= s.O || y0 + py + y >= s.H || x0 + px >= s.W) continue;

            float add = bias ? bias[o0 + o + k] : 0.0f;
            const float* v = sum[k][y];
            float4 finished = make_float4(v[0] + add, v[1] + add, v[2] + add, v[3] + add);
            size_t line = ((size_t)b * s.O + o0 + o + k) * s.H + y0 + py + y;
            *(float4*)(out + line * s.W + x0 + px) = finished;
        }
}

static void conv3x3_forward5(Problem&, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    dim3 grid(ceil_div(s.H, 8) * ceil_div(s.W, 16), ceil_div(s.O, OUTPUTS), s.B);
    launch(conv3x3_forward_kernel5, grid, 128, 0, out, x, w, bias, s);
}

// 6: version 4 without atomics. Each thread's 4 x 4 sums go to a buffer, four times the output's size, and a
// second kernel adds the up to four sums of every output, in a fixed order.

// parts (B, O, patches down, 4 lines, patches across, 4 columns): a line of a patch is 16 bytes.
__global__ void __launch_bounds__(256)
    conv3x3_forward_kernel6(float4* parts, const float* x, const float* w, Shape s) {
    ScatterPlace place(s);
    float sum[4][4][4] = {};
    scattered_sums(sum, x, w, place, s);

    int down = ceil_div(s.H, 8) * 4;
    int across = ceil_div(s.W, 8) * 4;
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int y = 0; y < 4; y++) {
            int o = place.o0 + place.o + k;
            size_t line = (((size_t)place.b * s.O + o) * down + (place.y0 + place.py) / 2) * 4 + y;
            const float* v = sum[k][y];
            float4 part = make_float4(v[0], v[1], v[2], v[3]);
            if (o < s.O) parts[line * across + (place.x0 + place.px) / 2] = part;
        }
}

// out (B, O, H, W) = bias + the parts. Patch p holds lines 2 p - 1 to 2 p + 2 of the output, so line y is in
// patch (y + 1) / 2 and in the one before; columns likewise.
__global__ void conv3x3_forward_reduce_kernel6(float* out, const float* parts, const float* bias, Shape s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)s.B * s.O * s.H * s.W) return;

    int ox = (int)(i % s.W);
    int oy = (int)(i / s.W % s.H);
    size_t plane = i / s.W / s.H;
    int down = ceil_div(s.H, 8) * 4;
    int across = ceil_div(s.W, 8) * 4;

    float sum = bias ? bias[plane % s.O] : 0.0f;
    for (int p = (oy + 1) / 2 - 1; p <= (oy + 1) / 2; p++)
        for (int q = (ox + 1) / 2 - 1; q <= (ox + 1) / 2; q++) {
            if (p < 0 || p >= down || q < 0 || q >= across) continue;

            size_t line = (plane * down + p) * 4 + oy + 1 - 2 * p;
            sum += parts[(line * across + q) * 4 + ox + 1 - 2 * q];
        }
    out[i] = sum;
}

static void conv3x3_forward6(Problem& p, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    size_t planes = (size_t)s.B * s.O;
    size_t tiles = (size_t)ceil_div(s.H, 8) * ceil_div(s.W, 8);  // of an image
    float* parts = p.scratch<float>("parts", planes * tiles * 16 * 16);
    launch(conv3x3_forward_kernel6, scatter_grid(s), 256, 0, (float4*)parts, x, w, s);
    launch(conv3x3_forward_reduce_kernel6, ceil_div(planes * s.H * s.W, 256), 256, 0, out, parts, bias, s);
}

// 7: Winograd's algorithm F(M x M, 3 x 3) (Lavin and Gray 2016, "Fast Algorithms for Convolutional Neural
// Networks", equation 8). A tile of M x M outputs takes A x A inputs, A = M + 2, and as many multiplications a
// channel instead of 9 M^2, which is 2.25 times fewer for M = 2 and 4 times for M = 4. With . element by
// element, a tile y of the output is, of a tile d of an input channel and its filter g,
//     y = A^T [(G g G^T) . (B^T d B)] A, the brackets summed over the channels.
// So transforms of x, of w and of the products surround A^2 matrix products, which are cuBLAS's. For M = 4 the
// constants differ widely in size, and that costs precision.
//
// Each transform is of a vector: input() is B^T, weights() is G, output() is A^T.
template <int M>
struct Winograd;

template <>
struct Winograd<2> {
    __device__ static void input(float (&t)[4], const float (&d)[4]) {
        t[0] = d[0] - d[2];
        t[1] = d[1] + d[2];
        t[2] = d[2] - d[1];
        t[3] = d[1] - d[3];
    }

    __device__ static void weights(float (&t)[4], const float (&g)[3]) {
        t[0] = g[0];
        t[1] = (g[0] + g[1] + g[2]) / 2;
        t[2] = (g[0] - g[1] + g[2]) / 2;
        t[3] = g[2];
    }

    __device__ static void output(float (&t)[2], const float (&m)[4]) {
        t[0] = m[0] + m[1] + m[2];
        t[1] = m[1] - m[2] - m[3];
    }
};

template <>
struct Winograd<4> {
    __device__ static void input(float (&t)[6], const float (&d)[6]) {
        t[0] = 4 * d[0] - 5 * d[2] + d[4];
        t[1] = d[4] - 4 * d[2] + (d[3] - 4 * d[1]);
        t[2] = d[4] - 4 * d[2] - (d[3] - 4 * d[1]);
        t[3] = d[4] - d[2] + 2 * (d[3] - d[1]);
        t[4] = d[4] - d[2] - 2 * (d[3] - d[1]);
        t[5] = 4 * d[1] - 5 * d[3] + d[5];
    }

    __device__ static void weights(float (&t)[6], const float (&g)[3]) {
        t[0] = g[0] / 4;
        t[1] = -(g[0] + g[1] + g[2]) / 6;
        t[2] = -(g[0] - g[1] + g[2]) / 6;
        t[3] = g[0] / 24 + g[1] / 12 + g[2] / 6;
        t[4] = g[0] / 24 - g[1] / 12 + g[2] / 6;
        t[5] = g[2];
    }

    __device__ static void output(float (&t)[4], const float (&m)[6]) {
        t[0] = m[0] + (m[1] + m[2]) + (m[3] + m[4]);
        t[1] = (m[1] - m[2]) + 2 * (m[3] - m[4]);
        t[2] = (m[1] + m[2]) + 4 * (m[3] + m[4]);
        t[3] = (m[1] - m[2]) + 8 * (m[3] - m[4]) + m[5];
    }
};

// u (A^2, O, C) = G g G^T of the O x C filters g of w (O, C, 3, 3). Each thread transforms a filter.
template <int M>
__global__ void conv3x3_weights_kernel7(float* u, const float* w, int filters) {
    constexpr int A = M + 2;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= filters) return;

    float half[3][A];  // G g, a column each
#pragma unroll
    for (int k = 0; k < 3; k++) {
        const float g[3] = {w[(size_t)i * 9 + k], w[(size_t)i * 9 + 3 + k], w[(size_t)i * 9 + 6 + k]};
        Winograd<M>::weights(half[k], g);
    }

#pragma unroll
    for (int y = 0; y < A; y++) {
        const float g[3] = {half[0][y], half[1][y], half[2][y]};
        float t[A];
        Winograd<M>::weights(t, g);
#pragma unroll
        for (int k = 0; k < A; k++) u[(size_t)(y * A + k) * filters + i] = t[k];
    }
}

// v (A^2, C, P) = B^T d B of the P tiles d of x (B, C, H, W). Each thread transforms a tile of a channel. Tiles
// overlap by two pixels, and the first begins one above and one to the left of the image.
template <int M>
__global__ void conv3x3_input_kernel7(float* v, const float* x, Shape s) {
    constexpr int A = M + 2;
    int across = ceil_div(s.W, M);
    int down = ceil_div(s.H, M);
    int P = s.B * down * across;
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    int c = blockIdx.y;
    if (p >= P) return;

    int y0 = p / across % down * M - 1;
    int x0 = p % across * M - 1;
    int b = p / across / down;
    const float* plane = x + ((size_t)b * s.C + c) * s.H * s.W;

    float half[A][A];  // B^T d, a column each
#pragma unroll
    for (int k = 0; k < A; k++) {
        float d[A];
#pragma unroll
        for (int y = 0; y < A; y++) {
            bool inside = (unsigned)(y0 + y) < (unsigned)s.H && (unsigned)(x0 + k) < (unsigned)s.W;
            d[y] = inside ? plane[(y0 + y) * s.W + x0 + k] : 0.0f;
        }
        Winograd<M>::input(half[k], d);
    }

#pragma unroll
    for (int y = 0; y < A; y++) {
        float d[A], t[A];
#pragma unroll
        for (int k = 0; k < A; k++) d[k] = half[k][y];
        Winograd<M>::input(t, d);
#pragma unroll
        for (int k = 0; k < A; k++) v[((size_t)(y * A + k) * s.C + c) * P + p] = t[k];
    }
}

// out (B, O, H, W) = A^T m A + bias, with m (A^2, O, P). Each thread transforms a tile of a channel.
template <int M>
__global__ void conv3x3_output_kernel7(float* out, const float* m, const float* bias, Shape s) {
    constexpr int A = M + 2;
    int across = ceil_div(s.W, M);
    int down = ceil_div(s.H, M);
    int P = s.B * down * across;
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    int o = blockIdx.y;
    if (p >= P) return;

    float half[A][M];  // A^T m, a column each
#pragma unroll
    for (int k = 0; k < A; k++) {
        float d[A];
#pragma unroll
        for (int y = 0; y < A; y++) d[y] = m[((size_t)(y * A + k) * s.O + o) * P + p];
        Winograd<M>::output(half[k], d);
    }

    int y0 = p / across % down * M;
    int x0 = p % across * M;
    int b = p / across / down;
    float* plane = out + ((size_t)b * s.O + o) * s.H * s.W;
    float add = bias ? bias[o] : 0.0f;
#pragma unroll
    for (int y = 0; y < M; y++) {
        float d[A], t[M];
#pragma unroll
        for (int k = 0; k < A; k++) d[k] = half[k][y];
        Winograd<M>::output(t, d);
#pragma unroll
        for (int k = 0; k < M; k++)
            if (y0 + y < s.H && x0 + k < s.W) plane[(y0 + y) * s.W + x0 + k] = t[k] + add;
    }
}

template <int M>
static void conv3x3_forward7(Problem& p, float* out, const float* x, const float* w, const float* bias,
                             Shape s) {
    constexpr int A2 = (M + 2) * (M + 2);
    int P = s.B * ceil_div(s.H, M) * ceil_div(s.W, M);
    float* u = p.scratch<float>("u", (size_t)A2 * s.O * s.C);  // (A2, O, C)
    float* v = p.scratch<float>("v", (size_t)A2 * s.C * P);    // (A2, C, P)
    float* m = p.scratch<float>("m", (size_t)A2 * s.O * P);    // (A2, O, P)
    launch(conv3x3_weights_kernel7<M>, ceil_div(s.O * s.C, 128), 128, 0, u, w, s.O * s.C);
    launch(conv3x3_input_kernel7<M>, dim3(ceil_div(P, 128), s.C), 128, 0, v, x, s);
    cublas_product(m, u, v, s.O, P, s.C, false, false, A2, (size_t)s.O * s.C, (size_t)s.C * P);
    launch(conv3x3_output_kernel7<M>, dim3(ceil_div(P, 128), s.O), 128, 0, out, m, bias, s);
}

#ifndef PRECISION_FP32
// 8: implicit GEMM on tensor cores, NHWC and bf16. It is the product of version 2, but its matrix of
// neighbourhoods is never written. A block owns 128 pixels by 64 output channels. Each step of the sum is 32
// channels of one tap: the block fetches the pixels that this tap shifts to, zeros outside of the image,
// straight into shared memory with cp.async. Two steps are under way while a third is multiplied. In NHWC a
// pixel's channels follow each other, so every fetch is a 16-byte vector whatever the tap.
enum {
    GEMM_PIXELS = 128,
    GEMM_OUTPUTS = 64,
    GEMM_DEPTH = 32,  // channels of a step
    GEMM_STAGES = 3,
    GEMM_PITCH = GEMM_DEPTH + 8  // 80 bytes: eight rows of a matrix lie in different banks
};

// out (B, H, W, O) of x (B, H, W, C), w (O, 3, 3, C) and bias (O); C is a multiple of 8, O of 2.
__global__ void __launch_bounds__(128, 4)
    conv3x3_forward_kernel8(floatX* out, const floatX* x, const floatX* w, const floatX* bias, Shape s) {
    __shared__ __align__(16) floatX xs[GEMM_STAGES][GEMM_PIXELS][GEMM_PITCH];
    __shared__ __align__(16) floatX ws[GEMM_STAGES][GEMM_OUTPUTS][GEMM_PITCH];
    int M = s.B * s.H * s.W;
    int m0 = blockIdx.x * GEMM_PIXELS;
    int n0 = blockIdx.y * GEMM_OUTPUTS;
    int chunks = ceil_div(s.C, GEMM_DEPTH);
    int steps = 9 * chunks;

    // A thread fetches vector tid % 4 of rows tid / 4, + 32, ...: four pixels and two rows of weights.
    int row = threadIdx.x / 4;
    int vector = threadIdx.x % 4 * 8;
    int py[4], px[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int m = m0 + row + 32 * i;
        py[i] = m < M ? m / s.W % s.H : -2;  // -2: every tap is outside
        px[i] = m % s.W;
    }

    int next_tap = 0, next_chunk = 0, next_stage = 0;  // of the step to load next
    auto load = [&] {
        int c = next_chunk * GEMM_DEPTH + vector;
        int dy = next_tap / 3 - 1;
        int dx = next_tap % 3 - 1;
        int tap = next_tap;
        int stage = next_stage;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bool inside = (unsigned)(py[i] + dy) < (unsigned)s.H && (unsigned)(px[i] + dx) < (unsigned)s.W;
            ptrdiff_t m = m0 + row + 32 * i + dy * s.W + dx;
            bool valid = inside && c < s.C;
            uint32_t to = shared_address(&xs[stage][row + 32 * i][vector]);
            copy_async(to, valid ? x + m * s.C + c : x, valid);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int n = n0 + row + 32 * i;
            bool valid = n < s.O && c < s.C;
            uint32_t to = shared_address(&ws[stage][row + 32 * i][vector]);
            copy_async(to, valid ? w + ((size_t)n * 9 + tap) * s.C + c : w, valid);
        }

        next_chunk++;
        if (next_chunk == chunks) {
            next_chunk = 0;
            next_tap++;
        }
        next_stage++;
        if (next_stage == GEMM_STAGES) next_stage = 0;
    };

    // A warp owns 64 pixels by 32 outputs: 4 x 4 fragments of 16 x 8.
    int lane = threadIdx.x % 32;
    int warp = threadIdx.x / 32;
    int m1 = warp / 2 * 64;
    int n1 = warp % 2 * 32;
    float sum[4][4][4] = {};

    for (int step = 0; step < GEMM_STAGES - 1; step++) {
        load();
        __pipeline_commit();
    }
    for (int step = 0; step < steps; step++) {
        __pipeline_wait_prior(GEMM_STAGES - 2);
        __syncthreads();  // this step has arrived, and every thread is done with the one before
        if (step + GEMM_STAGES - 1 < steps) load();
        __pipeline_commit();

        int stage = step % GEMM_STAGES;
#pragma unroll
        for (int k = 0; k < GEMM_DEPTH; k += 16) {
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int m = m1 + i * 16 + lane % 16;
                load_matrices(a[i], shared_address(&xs[stage][m][k + lane / 16 * 8]));
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int n = n1 + j * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(b[j], shared_address(&ws[stage][n][k + lane / 8 % 2 * 8]));
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }

#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int m = m0 + m1 + i * 16 + half * 8 + lane / 4;
                int n = n0 + n1 + j * 8 + lane % 4 * 2;
                if (m >= M || n >= s.O) continue;

                float add0 = bias ? (float)bias[n] : 0.0f;
                float add1 = bias ? (float)bias[n + 1] : 0.0f;
                const float* v = &sum[i][j][half * 2];
                *(uint32_t*)(out + (size_t)m * s.O + n) = pack_bf16(v[0] + add0, v[1] + add1);
            }
}

static void conv3x3_forward8(Problem&, floatX* out, const floatX* x, const floatX* w, const floatX* bias,
                             Shape s) {
    dim3 grid(ceil_div((size_t)s.B * s.H * s.W, GEMM_PIXELS), ceil_div(s.O, GEMM_OUTPUTS));
    launch(conv3x3_forward_kernel8, grid, 128, 0, out, x, w, bias, s);
}
#endif

#ifdef PROGRAM
// 9: the program's own function.
static void conv3x3_forward9(Problem& p) {
    conv3x3_forward(p.tensor_out<floatX>("out"), p.tensor_in<floatX>("x"),
                    {.w = p.in<floatX>("w"), .bias = p.in<floatX>("bias")});
}
#endif

#endif  // __CUDACC__

// ---- input gradient ---------------------------------------------------------------------------------------

// 1: the definition, w (O, C, 3, 3):
//     dx[b][c][iy][ix] = sum over o, tap_y, tap_x of
//                        w[o][c][tap_y][tap_x] dout[b][o][iy + 1 - tap_y][ix + 1 - tap_x]
static void conv3x3_input_gradient_kernel1(Problem&, float* dx, const float* dout, const float* w, Shape s) {
#pragma omp parallel for collapse(3)
    for (int b = 0; b < s.B; b++)
        for (int c = 0; c < s.C; c++)
            for (int iy = 0; iy < s.H; iy++) {
                float* line = dx + (((size_t)b * s.C + c) * s.H + iy) * s.W;
                memset(line, 0, s.W * sizeof(float));

                for (int o = 0; o < s.O; o++)
                    for (int tap_y = 0; tap_y < 3; tap_y++) {
                        int oy = iy + 1 - tap_y;
                        if (oy < 0 || oy >= s.H) continue;

                        const float* source = dout + (((size_t)b * s.O + o) * s.H + oy) * s.W;
                        for (int tap_x = 0; tap_x < 3; tap_x++) {
                            float weight = w[(((size_t)o * s.C + c) * 3 + tap_y) * 3 + tap_x];
                            int first = tap_x == 2 ? 1 : 0;
                            int last = tap_x == 0 ? s.W - 1 : s.W;
                            for (int ix = first; ix < last; ix++) line[ix] += weight * source[ix + 1 - tap_x];
                        }
                    }
            }
}

#ifdef __CUDACC__
// dx is the convolution of dout by flipped weights whose inputs and outputs have changed places, so versions
// 1 to 8 are one small kernel and then the forward version of the same number.
static Shape swapped(Shape s) { return {s.B, s.O, s.C, s.H, s.W}; }

// The taps backwards, and outputs and inputs swapped. NCHW: flipped (C, O, 9) of w (O, C, 9). NHWC: flipped
// (C, 9, O) of w (O, 9, C).
template <typename T, bool NHWC>
__global__ void conv3x3_flip_kernel(T* flipped, const T* w, int O, int C) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= O * C * 9) return;

    int c = i / (9 * O);
    if constexpr (NHWC) {
        int tap = i / O % 9;
        int o = i % O;
        flipped[i] = w[((size_t)o * 9 + 8 - tap) * C + c];
    } else {
        int tap = i % 9;
        int o = i / 9 % O;
        flipped[i] = w[((size_t)o * C + c) * 9 + 8 - tap];
    }
}

// 1 to 8: the forward version, called with flipped weights.
template <typename T, bool NHWC>
static void conv3x3_input_gradient_by(Problem& p, ForwardFunction<T, Shape> forward) {
    Shape s = Shape::of(p);
    size_t n = (size_t)s.O * s.C * 9;
    T* flipped = p.scratch<T>("flipped", n);
    launch(conv3x3_flip_kernel<T, NHWC>, ceil_div(n, 256), 256, 0, flipped, p.in<T>("w"), s.O, s.C);
    forward(p, p.out<T>("dx"), p.in<T>("dout"), flipped, nullptr, swapped(s));
}

#ifdef PROGRAM
// 9: the program's own. It reads w as it lies: the flip is an index, the swap a transposed ldmatrix.
static void conv3x3_input_gradient9(Problem& p) {
    conv3x3_backward_input(p.tensor_out<floatX>("dx"), p.tensor_in<floatX>("dout"), {.w = p.in<floatX>("w")});
}
#endif

#endif  // __CUDACC__

// ---- weight gradient --------------------------------------------------------------------------------------

// All versions below add to dw, but for the program's, which overwrites it.

// 1: the definition, dw (O, C, 3, 3):
//     dw[o][c][tap_y][tap_x] += sum over b, oy, ox of
//                               dout[b][o][oy][ox] x[b][c][oy + tap_y - 1][ox + tap_x - 1]
static void conv3x3_weight_gradient_kernel1(Problem&, float* dw, const float* dout, const float* x, Shape s) {
#pragma omp parallel for collapse(2)
    for (int o = 0; o < s.O; o++)
        for (int c = 0; c < s.C; c++)
            for (int tap = 0; tap < 9; tap++) {
                // Only outputs whose tap lies inside of the image count.
                int shift_y = tap / 3 - 1;
                int shift_x = tap % 3 - 1;
                int first_y = shift_y < 0 ? 1 : 0;
                int last_y = shift_y > 0 ? s.H - 1 : s.H;
                int first_x = shift_x < 0 ? 1 : 0;
                int last_x = shift_x > 0 ? s.W - 1 : s.W;

                double total = 0;
                for (int b = 0; b < s.B; b++)
                    for (int oy = first_y; oy < last_y; oy++) {
                        int iy = oy + shift_y;
                        const float* dout_line = dout + (((size_t)b * s.O + o) * s.H + oy) * s.W;
                        const float* x_line = x + (((size_t)b * s.C + c) * s.H + iy) * s.W;
                        float sum = 0;
#pragma omp simd reduction(+ : sum)
                        for (int ox = first_x; ox < last_x; ox++) sum += dout_line[ox] * x_line[ox + shift_x];
                        total += sum;
                    }
                dw[((size_t)o * s.C + c) * 9 + tap] += (float)total;
            }
}

#ifdef __CUDACC__
// 1 on the GPU: each block computes the nine sums of a filter, and its threads share the pixels.
// dw (O, C, 9) += the gradient, of dout (B, O, H, W) and x (B, C, H, W), as in all versions to 6.
__global__ void conv3x3_weight_gradient_thread_kernel1(float* dw, const float* dout, const float* x,
                                                       Shape s) {
    int c = blockIdx.x;
    int o = blockIdx.y;
    int T = s.H * s.W;

    float sum[9] = {};
    for (int i = threadIdx.x; i < s.B * T; i += blockDim.x) {
        int b = i / T;
        int oy = i % T / s.W;
        int ox = i % s.W;
        float d = dout[((size_t)b * s.O + o) * T + i % T];
        const float* plane = x + ((size_t)b * s.C + c) * T;
#pragma unroll
        for (int tap = 0; tap < 9; tap++) {
            int iy = oy + tap / 3 - 1;
            int ix = ox + tap % 3 - 1;
            if ((unsigned)iy < (unsigned)s.H && (unsigned)ix < (unsigned)s.W)
                sum[tap] += d * plane[iy * s.W + ix];
        }
    }

#pragma unroll
    for (int tap = 0; tap < 9; tap++) {
        float total = team_sum(sum[tap]);
        if (threadIdx.x == 0) dw[((size_t)o * s.C + c) * 9 + tap] += total;
    }
}

static void conv3x3_weight_gradient1(Problem&, float* dw, const float* dout, const float* x, Shape s) {
    launch(conv3x3_weight_gradient_thread_kernel1, dim3(s.C, s.O), 256, 0, dw, dout, x, s);
}

// 2: one matrix product with the buffer of forward version 2. dout is transposed before it, and dw after it.
//     sums (O, 9 C) = dout^T (O, B*H*W) columns (B*H*W, 9 C)
static void conv3x3_weight_gradient2(Problem& p, float* dw, const float* dout, const float* x, Shape s) {
    int M = s.B * s.H * s.W;
    int K = 9 * s.C;
    size_t n = (size_t)s.O * K;

    float* columns = im2col(p, x, s);                         // (M, 9, C)
    float* rows = p.scratch<float>("rows", (size_t)M * s.O);  // (B, H*W, O)
    float* sums = p.scratch<float>("sums", n);                // (O, 9, C)
    transpose(rows, dout, nullptr, s.B, s.O, s.H * s.W);
    cublas_product(sums, rows, columns, s.O, K, M, true, false);
    launch(conv3x3_taps_kernel2, ceil_div(n, 256), 256, 0, dw, sums, s.C, n, true);
}

// 3: direct. A block owns 8 x 8 pixels, 64 output and 32 input channels, a thread 8 of the outputs, one input
// and all nine taps. These are 72 sums over its pixels. It adds them to dw with atomics, where the blocks of
// all pixels meet.
enum { SLAB = 32 };  // input channels of a block

// What a thread of these kernels owns.
struct WeightPlace {
    int o0, c0, o, c;  // the block's first channels, the thread's own within them

    __device__ WeightPlace(Shape s) {
        int slabs = ceil_div(s.C, SLAB);
        o0 = blockIdx.x / slabs * OUTPUTS;
        c0 = blockIdx.x % slabs * SLAB;
        o = threadIdx.x / 32 * 8;
        c = threadIdx.x % 32;
    }
};

// The pixels of a tile, 8 x 8 of an image: the image and the first of them.
struct PixelTile {
    int b, y0, x0;

    __device__ PixelTile(int number, Shape s) {
        int tiles_x = ceil_div(s.W, 8);
        int tiles_y = ceil_div(s.H, 8);
        b = number / (tiles_x * tiles_y);
        y0 = number / tiles_x % tiles_y * 8;
        x0 = number % tiles_x * 8;
    }
};

// How many blocks share dw, and how many tiles the batch has.
static int weight_slabs(Shape s) { return ceil_div(s.O, OUTPUTS) * ceil_div(s.C, SLAB); }
static int weight_tiles(Shape s) { return s.B * ceil_div(s.H, 8) * ceil_div(s.W, 8); }

// Calls put(index in dw (O, C, 9), sum) for each of a thread's sums.
template <class Put>
static __device__ void store_sums(const float (&sum)[8][9], WeightPlace place, Shape s, Put put) {
#pragma unroll
    for (int i = 0; i < 72; i++) {
        int o = place.o0 + place.o + i / 9;
        int c = place.c0 + place.c;
        if (o < s.O && c < s.C) put(((size_t)o * s.C + c) * 9 + i % 9, sum[i / 9][i % 9]);
    }
}

__global__ void __launch_bounds__(256, 2)
    conv3x3_weight_gradient_kernel3(float* dw, const float* dout, const float* x, Shape s) {
    __shared__ float xs[SLAB][101];    // (8 + 2)^2 pixels, and one more against bank conflicts
    __shared__ float ds[OUTPUTS][65];  // 8^2 pixels, and one more
    WeightPlace place(s);
    PixelTile tile(blockIdx.y, s);

    for (int i = threadIdx.x; i < SLAB * 100; i += 256) {
        int c = place.c0 + i / 100;
        int iy = tile.y0 - 1 + i / 10 % 10;
        int ix = tile.x0 - 1 + i % 10;
        bool inside = c < s.C && (unsigned)iy < (unsigned)s.H && (unsigned)ix < (unsigned)s.W;
        xs[i / 100][i % 100] = inside ? x[(((size_t)tile.b * s.C + c) * s.H + iy) * s.W + ix] : 0.0f;
    }
    for (int i = threadIdx.x; i < OUTPUTS * 64; i += 256) {
        int o = place.o0 + i / 64;
        int oy = tile.y0 + i / 8 % 8;
        int ox = tile.x0 + i % 8;
        bool inside = o < s.O && oy < s.H && ox < s.W;
        ds[i / 64][i % 64] = inside ? dout[(((size_t)tile.b * s.O + o) * s.H + oy) * s.W + ox] : 0.0f;
    }
    __syncthreads();

    float sum[8][9] = {};  // output channel and tap
#pragma unroll 1
    for (int y = 0; y < 8; y++) {
        // The 3 x 3 neighbourhood of a pixel slides along the line, so that a pixel takes three loads of x.
        float in[3][3];
#pragma unroll
        for (int r = 0; r < 3; r++) {
            in[r][1] = xs[place.c][(y + r) * 10];
            in[r][2] = xs[place.c][(y + r) * 10 + 1];
        }

#pragma unroll
        for (int px = 0; px < 8; px++) {
#pragma unroll
            for (int r = 0; r < 3; r++) {
                in[r][0] = in[r][1];
                in[r][1] = in[r][2];
                in[r][2] = xs[place.c][(y + r) * 10 + px + 2];
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float d = ds[place.o + k][y * 8 + px];
#pragma unroll
                for (int tap = 0; tap < 9; tap++) sum[k][tap] += d * in[tap / 3][tap % 3];
            }
        }
    }
    store_sums(sum, place, s, [&](size_t i, float value) { atomicAdd(dw + i, value); });
}

static void conv3x3_weight_gradient3(Problem&, float* dw, const float* dout, const float* x, Shape s) {
    launch(conv3x3_weight_gradient_kernel3, dim3(weight_slabs(s), weight_tiles(s)), 256, 0, dw, dout, x, s);
}

// 4: the same sums. Loads are of 16 bytes, and both tensors lie in shared memory with the channels innermost: a
// pixel's 8 outputs are two 16-byte reads, and no two threads of a warp meet in a bank. W is a multiple of four.

// A thread's sums over the tiles [first, last).
static __device__ void weight_sums(float (&sum)[8][9], const float* dout, const float* x, WeightPlace place,
                                   int first, int last, Shape s) {
    __shared__ __align__(16) float xs[100][SLAB];
    __shared__ __align__(16) float ds[64][OUTPUTS];

#pragma unroll 1
    for (int number = first; number < last; number++) {
        PixelTile tile(number, s);
        __syncthreads();  // every thread is done with the tile before

        // Ten pixels of a line, from x0 - 1 on, lie in four aligned vectors, from x0 - 4 on.
        for (int i = threadIdx.x; i < SLAB * 40; i += 256) {
            int c = i % SLAB;
            int line = i / SLAB / 4;
            int column = i / SLAB % 4 * 4 - 3;
            int iy = tile.y0 - 1 + line;
            int ix = tile.x0 - 1 + column;
            float4 v = make_float4(0, 0, 0, 0);
            if (place.c0 + c < s.C && (unsigned)iy < (unsigned)s.H && (unsigned)ix < (unsigned)s.W)
                v = *(const float4*)(x + (((size_t)tile.b * s.C + place.c0 + c) * s.H + iy) * s.W + ix);
            const float value[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                if ((unsigned)(column + e) < 10) xs[line * 10 + column + e][c] = value[e];
        }
        for (int i = threadIdx.x; i < OUTPUTS * 16; i += 256) {
            int o = i % OUTPUTS;
            int pixel = i / OUTPUTS * 4;
            int oy = tile.y0 + pixel / 8;
            int ox = tile.x0 + pixel % 8;
            float4 v = make_float4(0, 0, 0, 0);
            if (place.o0 + o < s.O && oy < s.H && ox < s.W)
                v = *(const float4*)(dout + (((size_t)tile.b * s.O + place.o0 + o) * s.H + oy) * s.W + ox);
            ds[pixel][o] = v.x;
            ds[pixel + 1][o] = v.y;
            ds[pixel + 2][o] = v.z;
            ds[pixel + 3][o] = v.w;
        }
        __syncthreads();

#pragma unroll 1
        for (int y = 0; y < 8; y++) {
            float in[3][3];  // slides along the line, as in version 3
#pragma unroll
            for (int r = 0; r < 3; r++) {
                in[r][1] = xs[(y + r) * 10][place.c];
                in[r][2] = xs[(y + r) * 10 + 1][place.c];
            }

#pragma unroll
            for (int px = 0; px < 8; px++) {
#pragma unroll
                for (int r = 0; r < 3; r++) {
                    in[r][0] = in[r][1];
                    in[r][1] = in[r][2];
                    in[r][2] = xs[(y + r) * 10 + px + 2][place.c];
                }
                float4 low = *(const float4*)&ds[y * 8 + px][place.o];
                float4 high = *(const float4*)&ds[y * 8 + px][place.o + 4];
                const float d[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int k = 0; k < 8; k++)
#pragma unroll
                    for (int tap = 0; tap < 9; tap++) sum[k][tap] += d[k] * in[tap / 3][tap % 3];
            }
        }
    }
}

__global__ void __launch_bounds__(256, 2)
    conv3x3_weight_gradient_kernel4(float* dw, const float* dout, const float* x, Shape s) {
    WeightPlace place(s);
    float sum[8][9] = {};
    weight_sums(sum, dout, x, place, blockIdx.y, blockIdx.y + 1, s);
    store_sums(sum, place, s, [&](size_t i, float value) { atomicAdd(dw + i, value); });
}

static void conv3x3_weight_gradient4(Problem&, float* dw, const float* dout, const float* x, Shape s) {
    launch(conv3x3_weight_gradient_kernel4, dim3(weight_slabs(s), weight_tiles(s)), 256, 0, dw, dout, x, s);
}

// 5: no atomics. A block owns its part of dw and walks over all pixels. Every sum has one owner, but most of
// the GPU has nothing to do: 192 to 64 channels are six blocks.
__global__ void __launch_bounds__(256, 2)
    conv3x3_weight_gradient_kernel5(float* dw, const float* dout, const float* x, int tiles, Shape s) {
    WeightPlace place(s);
    float sum[8][9] = {};
    weight_sums(sum, dout, x, place, 0, tiles, s);
    store_sums(sum, place, s, [&](size_t i, float value) { dw[i] += value; });
}

static void conv3x3_weight_gradient5(Problem&, float* dw, const float* dout, const float* x, Shape s) {
    launch(conv3x3_weight_gradient_kernel5, weight_slabs(s), 256, 0, dw, dout, x, weight_tiles(s), s);
}

// 6: no atomics, and the whole GPU. The pixels are split over as many blocks as it holds at a time. Each block
// writes its sums to a buffer of its own, and a second kernel adds them up, in a fixed order.

// The first of n tiles that split number `split` takes, so that all `splits` take nearly the same number. The
// product may need more than 32 bits.
static __device__ int first_of_split(long long n, long long split, long long splits) {
    return (int)(n * split / splits);
}

// parts (splits, O, C, 9)
__global__ void __launch_bounds__(256, 2)
    conv3x3_weight_gradient_kernel6(float* parts, const float* dout, const float* x, int tiles, Shape s) {
    WeightPlace place(s);
    float sum[8][9] = {};
    int split = blockIdx.y;
    int splits = gridDim.y;
    int first = first_of_split(tiles, split, splits);
    int last = first_of_split(tiles, split + 1, splits);
    weight_sums(sum, dout, x, place, first, last, s);
    parts += (size_t)split * s.O * s.C * 9;
    store_sums(sum, place, s, [&](size_t i, float value) { parts[i] = value; });
}

static void conv3x3_weight_gradient6(Problem& p, float* dw, const float* dout, const float* x, Shape s) {
    size_t n = (size_t)s.O * s.C * 9;
    int tiles = weight_tiles(s);
    int slabs = weight_slabs(s);
    int fitting = 2 * gpu_multiprocessors / slabs;  // a multiprocessor holds two blocks
    int splits = std::min(tiles, std::max(1, fitting));
    float* parts = p.scratch<float>("parts", splits * n);  // (splits, O, C, 9)
    launch(conv3x3_weight_gradient_kernel6, dim3(slabs, splits), 256, 0, parts, dout, x, tiles, s);
    add_parts(dw, parts, splits, n);
}

#ifndef PRECISION_FP32
// 8: implicit GEMM on tensor cores, NHWC and bf16: dw (O, 9, C) = dout^T (O, pixels) columns (pixels, 9, C).
// A block owns 64 outputs by 64 channels of one tap, and a split of the pixels. In both tensors, as they lie in
// memory, the pixels go down the rows, so ldmatrix transposes both. The blocks of the nine taps each fetch x for
// themselves.
enum {
    WG_TILE = 64,
    WG_DEPTH = 32,  // pixels of a step
    WG_STAGES = 4,
    WG_PITCH = WG_TILE + 8  // 144 bytes: eight rows of a matrix lie in different banks
};

// parts (splits, O, 9, C) of dout (B, H, W, O) and x (B, H, W, C)
__global__ void __launch_bounds__(128, 4)
    conv3x3_weight_gradient_kernel8(float* parts, const floatX* dout, const floatX* x, Shape s) {
    __shared__ __align__(16) floatX ds[WG_STAGES][WG_DEPTH][WG_PITCH];
    __shared__ __align__(16) floatX xs[WG_STAGES][WG_DEPTH][WG_PITCH];
    int slabs = ceil_div(s.C, WG_TILE);
    int c0 = blockIdx.x % slabs * WG_TILE;
    int tap = blockIdx.x / slabs % 9;
    int o0 = blockIdx.x / slabs / 9 * WG_TILE;
    int dy = tap / 3 - 1;
    int dx = tap % 3 - 1;

    int M = s.B * s.H * s.W;
    int all_steps = ceil_div(M, WG_DEPTH);
    int first = first_of_split(all_steps, blockIdx.y, gridDim.y);
    int steps = first_of_split(all_steps, blockIdx.y + 1, gridDim.y) - first;

    // A thread fetches vector tid % 8 of pixels tid / 8 and + 16, of both tensors.
    int row = threadIdx.x / 8;
    int vector = threadIdx.x % 8 * 8;
    auto load = [&](int step) {
        int stage = step % WG_STAGES;
#pragma unroll
        for (int i = 0; i < WG_DEPTH; i += 16) {
            int m = (first + step) * WG_DEPTH + row + i;
            int py = m / s.W % s.H + dy;
            int px = m % s.W + dx;

            bool valid = m < M && o0 + vector < s.O;
            copy_async(shared_address(&ds[stage][row + i][vector]),
                       valid ? dout + (size_t)m * s.O + o0 + vector : dout, valid);

            valid = m < M && c0 + vector < s.C;
            valid = valid && (unsigned)py < (unsigned)s.H && (unsigned)px < (unsigned)s.W;
            copy_async(shared_address(&xs[stage][row + i][vector]),
                       valid ? x + ((ptrdiff_t)m + dy * s.W + dx) * s.C + c0 + vector : x, valid);
        }
    };

    // A warp owns 32 outputs by 32 channels: 2 x 4 fragments of 16 x 8.
    int lane = threadIdx.x % 32;
    int warp = threadIdx.x / 32;
    int o1 = warp / 2 * 32;
    int c1 = warp % 2 * 32;
    float sum[2][4][4] = {};

    for (int step = 0; step < WG_STAGES - 1; step++) {
        if (step < steps) load(step);
        __pipeline_commit();
    }
    for (int step = 0; step < steps; step++) {
        __pipeline_wait_prior(WG_STAGES - 2);
        __syncthreads();  // this step has arrived, and every thread is done with the one before
        if (step + WG_STAGES - 1 < steps) load(step + WG_STAGES - 1);
        __pipeline_commit();

        int stage = step % WG_STAGES;
#pragma unroll
        for (int k = 0; k < WG_DEPTH; k += 16) {
            uint32_t a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int pixel = k + lane / 16 * 8 + lane % 8;
                int o = o1 + i * 16 + lane / 8 % 2 * 8;
                load_matrices_transposed(a[i], shared_address(&ds[stage][pixel][o]));
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int c = c1 + j * 16 + lane / 16 * 8;
                load_matrices_transposed(b[j], shared_address(&xs[stage][k + lane % 16][c]));
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }

    parts += (size_t)blockIdx.y * s.O * 9 * s.C;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int o = o0 + o1 + i * 16 + half * 8 + lane / 4;
                int c = c0 + c1 + j * 8 + lane % 4 * 2;
                const float* v = &sum[i][j][half * 2];
                if (o < s.O && c < s.C)
                    *(float2*)(parts + ((size_t)o * 9 + tap) * s.C + c) = make_float2(v[0], v[1]);
            }
}

static void conv3x3_weight_gradient8(Problem& p, float* dw, const floatX* dout, const floatX* x, Shape s) {
    size_t n = (size_t)s.O * 9 * s.C;
    int tiles = ceil_div(s.O, WG_TILE) * 9 * ceil_div(s.C, WG_TILE);
    int steps = ceil_div((size_t)s.B * s.H * s.W, WG_DEPTH);
    int fitting = 4 * gpu_multiprocessors / tiles;  // a multiprocessor holds four blocks
    int splits = std::min(steps, std::max(1, fitting));
    float* parts = p.scratch<float>("parts", splits * n);  // (splits, O, 9, C)
    launch(conv3x3_weight_gradient_kernel8, dim3(tiles, splits), 128, 0, parts, dout, x, s);
    add_parts(dw, parts, splits, n);
}
#endif

#ifdef PROGRAM
// 9: the program's own.
static void conv3x3_weight_gradient9(Problem& p) {
    Conv gradients = {.dw = p.out<float>("dw")};
    conv3x3_backward_weight(gradients, p.tensor_in<floatX>("dout"), p.tensor_in<floatX>("x"));
}

// ---- backward: both gradients -----------------------------------------------------------------------------

#ifndef PRECISION_FP32
// 8: both gradients need dout, so one kernel computes both and loads each tile of dout once. A block owns 64
// input channels (blockIdx.x) and a split of the tiles of 8 x 16 pixels. It keeps the weights of its channels in
// shared memory. For each tile it fetches dout and x, both with an apron of one pixel, while the tile before is
// multiplied
//     by the weights, into dx: 128 pixels by 64 channels, finished with the tile;
//     by x, into dw: 64 x 9 x 64 sums, which stay in registers until the block is done.
// That is 32 + 144 sums a thread, and one block a multiprocessor. A launch takes 64 output channels; those after
// the first add to dx.
typedef GemmBlock<128, 64, 32, 32, 9, true, 3, 1> JointInput;  // the sums of dx: the program's own fragments
typedef WeightBlock<9> JointWeight;                            // the sums of dw
enum {
    JOINT_ROWS = 200,  // the most of a tile with its apron: two images' 10 x 10; one of 8 x 16 has 10 x 18
    JOINT_TABLES = (JOINT_ROWS + 128) * 4 / 128 * 128 + 128,  // bytes, as are those below
    JOINT_WEIGHTS = 9 * 64 * 128,                             // (9, 64 outputs, 64 channels)
    JOINT_STAGE = 2 * JOINT_ROWS * 128,                       // dout and x, rows of 64 channels
    JOINT_SHARED = JOINT_TABLES + JOINT_WEIGHTS + 2 * JOINT_STAGE
};

// A tile's part of dw. It is WeightBlock::Product::multiply, but dout has an apron here too.
static __device__ __forceinline__ void add_to_dw(JointWeight::Product& dw, uint32_t d_tile, uint32_t x_tile,
                                                 const int* row_of_pixel, const Tiling& tiling) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int k = 0; k < 128; k += 32) {
        uint32_t a[2][4][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = row_of_pixel[k + h * 16 + lane / 16 * 8 + lane % 8] + tiling.tap(4);
            uint32_t line = d_tile + swizzled(r, lane / 8 % 2);
#pragma unroll
            for (int i = 0; i < 4; i++) load_matrices_transposed(a[h][i], line ^ i << 5);
        }

        int row = row_of_pixel[k + lane];
#pragma unroll
        for (int tap = 0; tap < 9; tap++) {
            uint32_t b[4];
            load_matrices_transposed(b, x_tile + swizzled(row + tiling.tap(tap), dw.vector(tap)));
#pragma unroll
            for (int i = 0; i < 4; i++) mma(dw.c[i][tap], a[0][i], b[0], b[1]);
#pragma unroll
            for (int i = 0; i < 4; i++) mma(dw.c[i][tap], a[1][i], b[2], b[3]);
        }
    }
}

// dx (B, H, W, C), = for o0 = 0, else +=, and parts (splits, O, 9, C), of dout (B, H, W, O), x (B, H, W, C) and
// w (O, 9, C), of the 64 output channels from o0 on.
__global__ void __launch_bounds__(256, 1)
    conv3x3_backward_kernel8(floatX* dx, float* parts, const floatX* dout, const floatX* x, const floatX* w,
                             int o0, Tiling tiling, Shape s) {
    extern __shared__ __align__(128) unsigned char shared[];
    uchar4* offset_of_row = (uchar4*)shared;
    int* row_of_pixel = (int*)(offset_of_row + JOINT_ROWS);
    uint32_t weights = shared_address(shared) + JOINT_TABLES;
    uint32_t ring = weights + JOINT_WEIGHTS;

    int tid = threadIdx.x;
    int lane = tid % 32;
    int c0 = blockIdx.x * 64;
    int rows = tiling.rows();
    int first = first_of_split(tiling.tiles, blockIdx.y, gridDim.y);
    int last = first_of_split(tiling.tiles, blockIdx.y + 1, gridDim.y);

    for (int r = tid; r < rows; r += 256) offset_of_row[r] = tiling.offset(r);
    for (int p = tid; p < 128; p += 256) row_of_pixel[p] = tiling.row(p);

    // Rows of shared memory are eight 16-byte vectors, swizzled as everywhere in the program. The taps lie
    // backwards, as the input gradient wants them.
    for (int i = tid; i < 9 * 64 * 8; i += 256) {
        int v = i % 8;
        int o = i / 8 % 64;
        int tap = i / 512;
        int c = c0 + v * 8;
        bool valid = o0 + o < s.O && c < s.C;
        copy_async(weights + swizzled(tap * 64 + o, v),
                   valid ? w + ((size_t)(o0 + o) * 9 + 8 - tap) * s.C + c : w, valid);
    }
    __syncthreads();

    auto load = [&](int tile) {
        uint32_t to = ring + (tile - first) % 2 * JOINT_STAGE;
        Pixel origin = tiling.origin(tile);
        for (int i = tid; i < rows * 8; i += 256) {
            int r = i / 8;
            int v = i % 8;
            int m = tiling.pixel(origin, offset_of_row[r]);
            uint32_t at = to + swizzled(r, v);
            bool valid = m >= 0 && o0 + v * 8 < s.O;
            copy_async(at, valid ? dout + (size_t)m * s.O + o0 + v * 8 : dout, valid);
            valid = m >= 0 && c0 + v * 8 < s.C;
            copy_async(at + JOINT_ROWS * 128, valid ? x + (size_t)m * s.C + c0 + v * 8 : x, valid);
        }
    };

    JointWeight::Product dw;  // a warp: all 64 outputs, eight channels, nine taps
    if (first < last) load(first);
    __pipeline_commit();
    for (int tile = first; tile < last; tile++) {
        if (tile + 1 < last) load(tile + 1);
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();

        uint32_t d_tile = ring + (tile - first) % 2 * JOINT_STAGE;
        uint32_t x_tile = d_tile + JOINT_ROWS * 128;

        JointInput::Product product([&](int p) { return tiling.row(p); });
#pragma unroll 1
        for (int tap = 0; tap < 9; tap++) product.multiply(d_tile, weights + tap * 64 * 128, tiling.tap(tap));

        Pixel origin = tiling.origin(tile);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int p = product.m0 + i / 2 * 16 + i % 2 * 8 + lane / 4;
            int m = tiling.pixel(origin, offset_of_row[row_of_pixel[p] + tiling.tap(4)]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int c = c0 + product.n0 + j * 8 + lane % 4 * 2;
                if (m < 0 || c >= s.C) continue;

                uint32_t* to = (uint32_t*)(dx + (size_t)m * s.C + c);
                float low = product.c[i / 2][j][i % 2 * 2];
                float high = product.c[i / 2][j][i % 2 * 2 + 1];
                if (o0) {  // a bf16 is the upper half of a float
                    low += __uint_as_float(*to << 16);
                    high += __uint_as_float(*to & 0xffff0000u);
                }
                *to = pack_bf16(low, high);
            }
        }

        add_to_dw(dw, d_tile, x_tile, row_of_pixel, tiling);
        __syncthreads();  // everyone is done with this tile's buffer
    }
    __pipeline_wait_prior(0);

    parts += (size_t)blockIdx.y * s.O * 9 * s.C;
    dw.store([&](int o, int tap, int c, float2 value) {
        if (o0 + o < s.O && c0 + c < s.C)
            *(float2*)(parts + ((size_t)(o0 + o) * 9 + tap) * s.C + c0 + c) = value;
    });
}

static void conv3x3_backward8(Problem& p) {
    Shape s = Shape::of(p);
    if (JOINT_SHARED > device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) {
        static bool said = false;
        if (!said)
            printf("backward version 8 as two kernels: one needs %d KB of shared memory\n",
                   JOINT_SHARED / 1024);
        said = true;
        conv3x3_input_gradient_by<floatX, true>(p, conv3x3_forward8);
        conv3x3_weight_gradient8(p, p.sum<float>("dw"), p.in<floatX>("dout"), p.in<floatX>("x"), s);
        return;
    }

    Tiling tiling = make_tiling(p.tensor_in<floatX>("x"), 9, 128);
    size_t n = (size_t)s.O * 9 * s.C;
    int slabs = ceil_div(s.C, 64);
    int splits = std::min(tiling.tiles, std::max(1, gpu_multiprocessors / slabs));
    float* parts = p.scratch<float>("parts", splits * n);  // (splits, O, 9, C)
    for (int o0 = 0; o0 < s.O; o0 += 64)
        launch(conv3x3_backward_kernel8, dim3(slabs, splits), 256, JOINT_SHARED, p.out<floatX>("dx"), parts,
               p.in<floatX>("dout"), p.in<floatX>("x"), p.in<floatX>("w"), o0, tiling, s);
    add_parts(p.sum<float>("dw"), parts, splits, n);
}
#endif

// 9: the program's own: two kernels, on two streams.
static void conv3x3_backward9(Problem& p) {
    Conv gradients = {.dw = p.out<float>("dw")};
    Tensor dout = p.tensor_in<floatX>("dout");
    Tensor x = p.tensor_in<floatX>("x");
    on_side_stream_deferred([=] { conv3x3_backward_weight(gradients, dout, x); });
    conv3x3_input_gradient9(p);
}
#endif  // PROGRAM
#endif  // __CUDACC__

// ---- the ladder -------------------------------------------------------------------------------------------

static const char* const FORWARD = "forward";
static const char* const INPUT_GRADIENT = "input gradient";
static const char* const WEIGHT_GRADIENT = "weight gradient";
static const char* const BACKWARD = "backward";

// What a pass computes and moves at least; w or dw has elements of `weight_bytes`.
static Work work_of(const Problem& p, size_t weight_bytes) {
    Shape s = Shape::of(p);
    return convolution_work((double)s.B * s.H * s.W, 9, s.C, s.O, weight_bytes);
}

static Work work_of_both(const Problem& p) {  // dout, x and w read, dx and dw written
    Shape s = Shape::of(p);
    double M = (double)s.B * s.H * s.W;
    double weights = 9.0 * s.C * s.O;
    double bytes = sizeof(floatX) * (M * (2 * s.C + s.O) + weights) + sizeof(float) * weights;
    return {4 * M * weights, bytes};
}

static bool channels_suit(const Problem& p) { return p.dim("C") % 8 == 0 && p.dim("O") % 8 == 0; }

#if !defined(__CUDACC__) && defined(PROGRAM)
static void add_cpu_versions(std::vector<Version>* versions) {
    auto forward_by = [](auto f) {
        return [f](Problem& p) {
            f(p.tensor_out<float>("out"), p.tensor_in<float>("x"), p.in<float>("w"), p.in<float>("bias"));
        };
    };
    auto input_gradient_by = [](auto f) {
        return [f](Problem& p) {
            f(p.tensor_out<float>("dx"), p.tensor_in<float>("dout"), p.in<float>("w"));
        };
    };
    auto weight_gradient_by = [](auto f) {
        return [f](Problem& p) {
            f(p.out<float>("dw"), p.tensor_in<float>("dout"), p.tensor_in<float>("x"));
        };
    };

    auto forward4 = [](Tensor out, Tensor x, const float* w, const float* bias) {
        conv3x3_forward(out, x, {.w = w, .bias = bias});
    };
    auto input_gradient4 = [](Tensor dx, Tensor dout, const float* w) {
        conv3x3_backward_input(dx, dout, {.w = w});
    };
    auto weight_gradient4 = [](Problem& p) {
        Tensor dout = p.tensor_in<float>("dout");
        Conv gradients = {.dw = p.out<float>("dw"), .dbias = p.scratch<float>("dbias", dout.C)};
        conv3x3_backward_weight(gradients, dout, p.tensor_in<float>("x"));
    };

    auto add = [&](int number, const char* pass, const char* idea, std::function<void(Problem&)> function) {
        Version version = {number, pass, NHWC, CPU_FP32, idea, function};
        version.suits = channels_suit;
        versions->push_back(version);
    };
    add(2, FORWARD, "im2col", forward_by(im2col::forward));
    add(2, INPUT_GRADIENT, "im2col", input_gradient_by(im2col::input_gradient));
    add(2, WEIGHT_GRADIENT, "im2col", weight_gradient_by(im2col::weight_gradient));
    add(3, FORWARD, "direct", forward_by(direct::forward));
    add(3, INPUT_GRADIENT, "direct", input_gradient_by(direct::input_gradient));
    add(3, WEIGHT_GRADIENT, "direct", weight_gradient_by(direct::weight_gradient));

    const char* program = "train_unet.cu: Winograd F(2x2)";
    add(4, FORWARD, program, forward_by(forward4));
    add(4, INPUT_GRADIENT, program, input_gradient_by(input_gradient4));
    add(4, WEIGHT_GRADIENT, program, weight_gradient4);
}
#endif

#ifdef __CUDACC__
// Versions 1 to 7, in fp32.
static void add_fp32_versions(std::vector<Version>* versions) {
    auto add = [&](int number, const char* idea, ForwardFunction<float, Shape> function, double limit = 0,
                   Bits bits = SAME_BITS) {
        auto flipping = [=](Problem& p) { conv3x3_input_gradient_by<float, false>(p, function); };
        versions->push_back({number, FORWARD, NCHW, FP32, idea, forward<float>(function), limit, bits});
        versions->push_back({number, INPUT_GRADIENT, NCHW, FP32, idea, flipping, limit, bits});
    };
    add(1, "a thread an output", conv3x3_forward1);
    add(2, "im2col buffer + cuBLAS", conv3x3_forward2);
    add(3, "direct, atomics", conv3x3_forward3, 0, ATOMICS);
    add(4, "16-byte loads, weights transposed", conv3x3_forward4, 0, ATOMICS);
    add(5, "each block loads its apron", conv3x3_forward5);
    add(6, "partial sums to a buffer", conv3x3_forward6);
    add(7, "Winograd F(2x2)", conv3x3_forward7<2>, 1e-4);
    add(7, "Winograd F(4x4)", conv3x3_forward7<4>, 1e-3);

    // Up to 131072 products go into one fp32 sum. Where one thread adds them all, rounding shows.
    const double LONG_SUM = 5e-5;
    auto add_weight_gradient = [&](int number, const char* idea,
                                   WeightGradientFunction<float, Shape> function, Bits bits = SAME_BITS) {
        versions->push_back({number, WEIGHT_GRADIENT, NCHW, FP32, idea, weight_gradient<float>(function),
                             LONG_SUM, bits});
    };
    add_weight_gradient(1, "a block a filter", conv3x3_weight_gradient1);
    add_weight_gradient(2, "im2col buffer + cuBLAS", conv3x3_weight_gradient2);
    add_weight_gradient(3, "direct, atomics", conv3x3_weight_gradient3, ATOMICS);
    add_weight_gradient(4, "16-byte loads, both transposed", conv3x3_weight_gradient4, ATOMICS);
    add_weight_gradient(5, "each block walks over all pixels", conv3x3_weight_gradient5);
    add_weight_gradient(6, "partial sums to a buffer", conv3x3_weight_gradient6);
}

// Versions 8 and 9, on tensor cores.
static void add_tensor_core_versions(std::vector<Version>* versions) {
#ifndef PRECISION_FP32
    const char* idea = "implicit GEMM, mma.sync";
    auto input_gradient8 = [](Problem& p) { conv3x3_input_gradient_by<floatX, true>(p, conv3x3_forward8); };
    auto weight_gradient8 = weight_gradient<floatX>(conv3x3_weight_gradient8);
    versions->push_back({8, FORWARD, NHWC, BF16, idea, forward<floatX>(conv3x3_forward8)});
    versions->push_back({8, INPUT_GRADIENT, NHWC, BF16, idea, input_gradient8});
    versions->push_back({8, WEIGHT_GRADIENT, NHWC, BF16, idea, weight_gradient8});
#ifdef PROGRAM
    versions->push_back({8, BACKWARD, NHWC, BF16, "one kernel for both, mma.sync", conv3x3_backward8});
#endif
#endif
#ifdef PROGRAM
    const char* program = "train_unet.cu";
    versions->push_back({9, FORWARD, NHWC, FLOATX, program, conv3x3_forward9});
    versions->push_back({9, INPUT_GRADIENT, NHWC, FLOATX, program, conv3x3_input_gradient9});
    versions->push_back({9, WEIGHT_GRADIENT, NHWC, FLOATX, program, conv3x3_weight_gradient9});
    versions->push_back({9, BACKWARD, NHWC, FLOATX, "train_unet.cu: two kernels", conv3x3_backward9});
#endif
}

static void add_gpu_versions(std::vector<Version>* versions) {
    add_fp32_versions(versions);
    add_tensor_core_versions(versions);
    for (Version& version : *versions) {
        if (version.number >= 4 && version.number <= 8)
            version.suits = [](const Problem& p) { return channels_suit(p) && p.dim("W") % 4 == 0; };
        if (version.number == 9) version.suits = channels_suit;
    }
}
#endif

static std::vector<Version> all_versions() {
    std::vector<Version> versions = {
        {1, FORWARD, NCHW, CPU_FP32, "the definition", forward<float>(conv3x3_forward_kernel1)},
        {1, INPUT_GRADIENT, NCHW, CPU_FP32, "the definition",
         input_gradient<float>(conv3x3_input_gradient_kernel1)},
        {1, WEIGHT_GRADIENT, NCHW, CPU_FP32, "the definition",
         weight_gradient<float>(conv3x3_weight_gradient_kernel1)},
    };
#ifdef __CUDACC__
    add_gpu_versions(&versions);
#elif defined(PROGRAM)
    add_cpu_versions(&versions);
#endif
    return versions;
}

}  // namespace conv3x3

static const Ladder conv3x3_ladder = {
    "conv3x3",
    {{conv3x3::FORWARD, {"out"}, [](const Problem& p) { return conv3x3::work_of(p, sizeof(floatX)); }},
     {conv3x3::INPUT_GRADIENT, {"dx"}, [](const Problem& p) { return conv3x3::work_of(p, sizeof(floatX)); }},
     {conv3x3::WEIGHT_GRADIENT, {"dw"}, [](const Problem& p) { return conv3x3::work_of(p, sizeof(float)); }},
     {conv3x3::BACKWARD, {"dx", "dw"}, conv3x3::work_of_both}},
    conv3x3::all_versions()};
LADDER_MAIN(conv3x3_ladder)
