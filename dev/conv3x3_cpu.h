// The 3x3 convolution on a CPU before the program's Winograd: versions 2 and 3 of ./conv3x3 there.
//
// Version 2 (im2col) writes the 3x3 neighbourhoods of some pixels out in a thread's cache and multiplies them by
// the weights. Version 3 (direct) multiplies the pixels where they lie, a row of them and a tap at a time.
// Version 4, the program's, is Winograd's F(2x2, 3x3).
//
// What it took for version 4 to be faster, forward, 64 channels at 64x64, on one thread of an Intel Xeon with
// AVX-512. Rates count the multiplications of the direct method. A loop of FMAs in registers reaches 217
// GFLOP/s there.
//   101 GFLOP/s   im2col
//   144           direct: inputs broadcast from a padded copy of some rows, nine taps' sums in registers
//   189           Winograd by the program's product
//   241           the product's sums stored straight to where they belong, not by way of a tile on the stack
//   260           weights transformed as packed panels, in a task's own cache; transforms in registers
//
// Since then, weights that are transformed once a thread took 9% off the forward convolutions of a training
// step, and transforms that are no calls took 11% off its weight gradients.
//
// There are two traps. A transform must add up in a local variable and not in an array's element, or 243 become
// 184. And a product's last columns must not be stored from its sums by a masked store, or g++ 12 spills them.
#pragma once
#include "convolution.h"

// In both, x is (B, H, W, C), out (B, H, W, O), w and dw (O, 9, C). A pixel's number counts through the batch.

// ---- 2: im2col --------------------------------------------------------------------------------------------

namespace im2col {
using cpu::each_tile, cpu::element, cpu::matmul, cpu::thread_floats, cpu::transposed;
using cpu::KC, cpu::Matrix, cpu::Tensor, cpu::THREAD_FLOATS;

// Columns [j0, j1) of the neighbourhoods (pixels, 9, C) of pixels [p0, p1) of x, zero outside of the image. They
// lie in the thread's scratch, until the thread's next call.
static Matrix neighbourhoods(Tensor x, int p0, int p1, int j0, int j1) {
    int C = x.C;
    float* columns = thread_floats();
    for (int p = p0; p < p1; p++) {
        int column = p % x.W;
        int row = p / x.W % x.H;
        for (int tap = j0 / C; tap * C < j1; tap++) {
            int first = std::max(j0, tap * C);
            int last = std::min(j1, (tap + 1) * C);
            int n = last - first;
            int dy = tap / 3 - 1;
            int dx = tap % 3 - 1;
            bool inside = row + dy >= 0 && row + dy < x.H && column + dx >= 0 && column + dx < x.W;
            if (inside)
                columns = std::copy_n(element(x, p + dy * x.W + dx, first - tap * C), n, columns);
            else
                columns = std::fill_n(columns, n, 0.0f);
        }
    }
    return {thread_floats(), j1 - j0};
}

// How many pixels a thread takes at a time, so that their neighbourhoods fit into its scratch.
static int band_of(int C) { return std::min(252, THREAD_FLOATS / (9 * C)); }

// out = F.conv2d(x, w, bias, padding=1): out (pixels, O) = bias + neighbourhoods (pixels, 9 C) w^T.
static void forward(Tensor out, Tensor x, const float* w, const float* bias) {
    int O = out.C;
    int K = 9 * x.C;
    each_tile(out.rows(), band_of(x.C), O, 128, [&](int p0, int p1, int o0, int o1) {
        for (int p = p0; p < p1; p++) std::copy(bias + o0, bias + o1, element(out, p, o0));

        Matrix around = neighbourhoods(x, p0, p1, 0, K);
        Matrix weights = transposed(w + (size_t)o0 * K, K);
        matmul({p1 - p0, o1 - o0, K}, element(out, p0, o0), O, around, weights, true);
    });
}

// dx is the same of dout, with the weights transposed and their taps backwards. As w lies, the weights of a tap
// are a matrix (O, C) whose rows are 9 C apart, so each tap is a product.
static void input_gradient(Tensor dx, Tensor dout, const float* w) {
    int C = dx.C;
    int O = dout.C;
    each_tile(dout.rows(), band_of(O), C, 128, [&](int p0, int p1, int c0, int c1) {
        Matrix around = neighbourhoods(dout, p0, p1, 0, 9 * O);
        for (int tap = 0; tap < 9; tap++) {
            Matrix weights = {w + (8 - tap) * C + c0, 9 * C};
            matmul({p1 - p0, c1 - c0, O}, element(dx, p0, c0), C, around.from(0, tap * O), weights, tap > 0);
        }
    });
}

// dw (O, 9 C) = dout^T neighbourhoods (pixels, 9 C) of x. Each thread owns some columns of dw and walks over all
// pixels.
static void weight_gradient(float* dw, Tensor dout, Tensor x) {
    int M = dout.rows();
    int O = dout.C;
    int K = 9 * x.C;
    each_tile(1, 1, K, 96, [&](int, int, int j0, int j1) {
        for (int p0 = 0; p0 < M; p0 += 2 * KC) {
            int p1 = std::min(p0 + 2 * KC, M);
            Matrix d_out = transposed(element(dout, p0, 0), O);
            matmul({O, j1 - j0, p1 - p0}, dw + j0, K, d_out, neighbourhoods(x, p0, p1, j0, j1), p0 > 0);
        }
    });
}

}  // namespace im2col

// ---- 3: direct --------------------------------------------------------------------------------------------

namespace direct {
using cpu::each_tile, cpu::element, cpu::matmul, cpu::matmul_pack, cpu::packed, cpu::pixels_of;
using cpu::round_up, cpu::thread_floats, cpu::transposed;
using cpu::Matrix, cpu::Tensor, cpu::THREAD_FLOATS, cpu::TILE_COLUMNS;

// Calls work(to, from, n, tap) for every tap of a row of x's images, counted through the batch: n pixels from
// `to` on take what lies in the n pixels from `from` on. Pixels whose tap is outside of the image are left out,
// so no padded copy is needed.
static void each_tap(Tensor x, int row, auto work) {
    for (int tap = 0; tap < 9; tap++) {
        int dy = tap / 3 - 1;
        int dx = tap % 3 - 1;
        int y = row % x.H + dy;
        if (y < 0 || y >= x.H) continue;

        int first = std::max(0, -dx);
        int to = row * x.W + first;
        int from = (row + dy) * x.W + first + dx;
        work(to, from, x.W - abs(dx), tap);
    }
}

// out = bias + the sum over nine taps of x's pixels (n, C) times weights (C, O). weights_of(tap, o0) is the
// matrix of a tap from output o0 on, which a thread packs once into its scratch.
static void convolve(Tensor out, Tensor x, const float* bias, auto weights_of) {
    int C = x.C;
    int fitting = THREAD_FLOATS / (9 * C) / TILE_COLUMNS;
    int columns = std::clamp(fitting, 1, 4) * TILE_COLUMNS;

    auto panels_of = [=](int tap, int n) {
        return thread_floats() + (size_t)tap * C * round_up(n, TILE_COLUMNS);
    };
    auto pack = [&](int o0, int o1) {
        for (int tap = 0; tap < 9; tap++)
            matmul_pack(panels_of(tap, o1 - o0), weights_of(tap, o0), C, o1 - o0);
    };
    auto multiply = [&](int row0, int row1, int o0, int o1) {
        for (int row = row0; row < row1; row++) {
            for (int p = row * x.W; p < (row + 1) * x.W; p++)
                for (int o = o0; o < o1; o++) *element(out, p, o) = bias ? bias[o] : 0;

            each_tap(x, row, [&](int to, int from, int n, int tap) {
                Matrix weights = packed(panels_of(tap, o1 - o0), C);
                matmul({n, o1 - o0, C}, element(out, to, o0), out.C, pixels_of(x, from), weights, true);
            });
        }
    };
    each_tile(x.B * x.H, 8, out.C, columns, multiply, pack);
}

static void forward(Tensor out, Tensor x, const float* w, const float* bias) {
    int C = x.C;
    convolve(out, x, bias, [=](int tap, int o0) { return transposed(w + ((size_t)o0 * 9 + tap) * C, 9 * C); });
}

static void input_gradient(Tensor dx, Tensor dout, const float* w) {
    int C = dx.C;
    convolve(dx, dout, nullptr, [=](int tap, int c0) { return Matrix{w + (8 - tap) * C + c0, 9 * C}; });
}

// Each thread owns some columns of dw and walks over all rows of pixels.
static void weight_gradient(float* dw, Tensor dout, Tensor x) {
    int O = dout.C;
    int C = x.C;
    std::fill_n(dw, (size_t)O * 9 * C, 0.0f);
    each_tile(1, 1, C, TILE_COLUMNS, [&](int, int, int c0, int c1) {
        for (int row = 0; row < x.B * x.H; row++)
            each_tap(x, row, [&](int to, int from, int n, int tap) {
                float* sums = dw + (size_t)tap * C + c0;
                Matrix d_out = transposed(element(dout, to, 0), O);
                matmul({O, c1 - c0, n}, sums, 9 * C, d_out, pixels_of(x, from, c0), true);
            });
    });
}

}  // namespace direct
