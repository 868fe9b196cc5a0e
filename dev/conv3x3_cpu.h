// The 3x3 convolution on a CPU before the program's Winograd: versions 2 and 3 of ./conv3x3 there. In the first
// the 3x3 neighbourhoods of some pixels are written out in a thread's cache (im2col) and multiplied by the
// weights; in the second the pixels are multiplied where they lie, a row of them and a tap at a time (direct).
// Version 4, the program's, is Winograd's F(2x2, 3x3); what it took to be faster, on one thread of an Intel
// Xeon with AVX-512 (a loop of FMAs in registers reaches 217 GFLOP/s there), forward of 64 channels at 64x64,
// counted as direct multiplications:
//   101 GFLOP/s   im2col
//   144           direct, inputs broadcast from a padded copy of some rows, nine taps' sums in registers
//   189           Winograd by the program's product
//   241           the product's sums stored straight to where they belong, not by way of a tile on the stack
//   260           weights transformed as packed panels, in a task's own cache; transforms in registers
// Since then, in a training step: weights transformed once a thread took 9% off the forward convolutions, and
// transforms that are no calls 11% off the weight gradients.
// Two traps: a transform must add up in a local variable, not in an array's element (243 became 184); and a
// product's last columns must not be stored by a masked store from its sums, or g++ 12 spills them.
#pragma once
#include "convolution.h"

namespace im2col {
using cpu::KC, cpu::Matrix, cpu::Tensor, cpu::THREAD_FLOATS, cpu::each_tile, cpu::matmul, cpu::thread_floats;
using cpu::transposed;

// Columns [j0, j1) of the 3x3 neighbourhoods, (9, C), of pixels [p0, p1) of x (B, H, W, C), zero outside the
// image, gathered in the thread's scratch.
static Matrix neighbourhoods(Tensor x, int p0, int p1, int j0, int j1) {
    int H = x.H, W = x.W, C = x.C;
    float* columns = thread_floats();
    for (int p = p0; p < p1; p++) {
        int column = p % W, row = p / W % H;
        for (int tap = j0 / C; tap * C < j1; tap++) {
            int first = std::max(j0, tap * C), last = std::min(j1, (tap + 1) * C);
            int dy = tap / 3 - 1, dx = tap % 3 - 1;
            bool inside = row + dy >= 0 && row + dy < H && column + dx >= 0 && column + dx < W;
            const float* source = x.data + ((ptrdiff_t)p + dy * W + dx) * C + (first - tap * C);
            int n = last - first;
            columns = inside ? std::copy_n(source, n, columns) : std::fill_n(columns, n, 0.0f);
        }
    }
    return {thread_floats(), j1 - j0};
}
// So many pixels at a time that they fit there.
static int band_of(int C) { return std::min(252, THREAD_FLOATS / (9 * C)); }

// out = F.conv2d(x, w, bias, padding=1), w (O, 9, C).
static void forward(Tensor out, Tensor x, const float* w, const float* bias) {
    int O = out.C, K = 9 * x.C;
    each_tile(out.rows(), band_of(x.C), O, 128, [&](int p0, int p1, int o0, int o1) {
        for (size_t p = p0; p < (size_t)p1; p++) std::copy(bias + o0, bias + o1, out.data + p * O + o0);
        matmul({p1 - p0, o1 - o0, K}, out.data + (size_t)p0 * O + o0, O, neighbourhoods(x, p0, p1, 0, K),
               transposed(w + (size_t)o0 * K, K), true);
    });
}

// dx = the same of dout, with the weights transposed and their taps flipped.
static void input_gradient(Tensor dx, Tensor dout, const float* w) {
    int C = dx.C, O = dout.C;
    each_tile(dout.rows(), band_of(O), C, 128, [&](int p0, int p1, int c0, int c1) {
        Matrix around = neighbourhoods(dout, p0, p1, 0, 9 * O);
        for (int tap = 0; tap < 9; tap++, around.data += O)
            matmul({p1 - p0, c1 - c0, O}, dx.data + (size_t)p0 * C + c0, C, around,
                   {w + (8 - tap) * C + c0, 9 * C}, tap > 0);
    });
}

// dw = dout^T x's neighbourhoods. Each thread owns a tile of dw and walks over all pixels.
static void weight_gradient(float* dw, Tensor dout, Tensor x) {
    int M = dout.rows(), O = dout.C, K = 9 * x.C;
    each_tile(1, 1, K, 96, [&](int, int, int j0, int j1) {
        for (int p0 = 0, p1; p0 < M; p0 = p1) {
            p1 = std::min(p0 + 2 * KC, M);
            matmul({O, j1 - j0, p1 - p0}, dw + j0, K, transposed(dout.data + (size_t)p0 * O, O),
                   neighbourhoods(x, p0, p1, j0, j1), p0 > 0);
        }
    });
}

}  // namespace im2col

namespace direct {
using cpu::matmul_pack, cpu::packed, cpu::pixels_of, cpu::round_up, cpu::thread_floats, cpu::transposed;
using cpu::Matrix, cpu::Tensor, cpu::THREAD_FLOATS, cpu::TILE_COLUMNS, cpu::each_tile, cpu::matmul;

// work(to, from, n, tap) for every tap of a row of x's image: pixels [to, to + n) of the row take what lies in
// [from, from + n), counted over the batch. Pixels outside the image are left out, so that none are copied.
static void each_tap(Tensor x, int row, auto work) {
    for (int tap = 0; tap < 9; tap++) {
        int dy = tap / 3 - 1, dx = tap % 3 - 1, first = std::max(0, -dx), y = row % x.H + dy;
        if (y < 0 || y >= x.H) continue;
        work(row * x.W + first, (row + dy) * x.W + first + dx, x.W - abs(dx), tap);
    }
}

// out = bias + the sum of nine products of x's pixels with panels (9, C, O), which taps(tap, o0) has unpacked.
static void convolve(Tensor out, Tensor x, const float* bias, auto taps) {
    int C = x.C, columns = std::clamp(THREAD_FLOATS / (9 * C) / TILE_COLUMNS, 1, 4) * TILE_COLUMNS;
    auto panels_of = [=](int tap, int n) {
        return thread_floats() + (size_t)tap * C * round_up(n, TILE_COLUMNS);
    };
    auto multiply = [&](int row0, int row1, int o0, int o1) {
        for (int row = row0; row < row1; row++) {
            for (int p = row * x.W; p < (row + 1) * x.W; p++)
                for (int o = o0; o < o1; o++) out.data[(size_t)p * out.C + o] = bias ? bias[o] : 0;
            each_tap(x, row, [&](int to, int from, int n, int tap) {
                matmul({n, o1 - o0, C}, out.data + (size_t)to * out.C + o0, out.C, pixels_of(x, from),
                       packed(panels_of(tap, o1 - o0), C), true);
            });
        }
    };
    auto pack = [&](int o0, int o1) {
        for (int tap = 0; tap < 9; tap++) matmul_pack(panels_of(tap, o1 - o0), taps(tap, o0), C, o1 - o0);
    };
    each_tile(x.B * x.H, 8, out.C, columns, multiply, pack);
}

static void forward(Tensor out, Tensor x, const float* w, const float* bias) {
    convolve(out, x, bias,
             [=, C = x.C](int tap, int o0) { return transposed(w + ((size_t)o0 * 9 + tap) * C, 9 * C); });
}
static void input_gradient(Tensor dx, Tensor dout, const float* w) {
    convolve(dx, dout, nullptr,
             [=, C = dx.C](int tap, int c0) { return Matrix{w + (8 - tap) * C + c0, 9 * C}; });
}

// Each thread owns some columns of dw and walks over all rows of pixels.
static void weight_gradient(float* dw, Tensor dout, Tensor x) {
    int O = dout.C, C = x.C;
    std::fill_n(dw, (size_t)O * 9 * C, 0.0f);
    each_tile(1, 1, C, TILE_COLUMNS, [&](int, int, int c0, int c1) {
        for (int row = 0; row < x.B * x.H; row++)
            each_tap(x, row, [&](int to, int from, int n, int tap) {
                matmul({O, c1 - c0, n}, dw + (size_t)tap * C + c0, 9 * C,
                       transposed(dout.data + (size_t)to * O, O), pixels_of(x, from, c0), true);
            });
    });
}

}  // namespace direct
