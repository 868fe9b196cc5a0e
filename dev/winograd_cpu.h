// The 3x3 convolution on a CPU by Winograd's F(2x2, 3x3), in all three passes: version 3 of ./conv3x3 there.
// Built by g++ alone, for any width of vectors, by the compiler's vector types, as the program's room 11 is.
//
// What it takes to be faster than im2col and one product, on one thread of an Intel Xeon with AVX-512 (a loop
// of FMAs in registers reaches 218 GFLOP/s there), forward of 64 channels at 64x64, counted as direct
// multiplications:
//   101 GFLOP/s   im2col in a thread's cache, then the product: train_unet.cu's own
//   144           direct, inputs broadcast from a padded copy of some rows
//   189           Winograd by the program's product
//   241           the product's sums stored straight to where they belong, not by way of a tile on the stack
//   260           weights transformed as packed panels, in a task's own cache; transforms in registers
// Two traps: a transform must add up in a local variable, not in an array's element (243 became 184); and a
// product's last columns must not be stored by a masked store from its sums, or g++ 12 spills them.
#pragma once
#include "convolution.h"

namespace winograd {
using cpu::KC, cpu::Matrix, cpu::NC, cpu::ROW_BLOCK, cpu::Tensor, cpu::THREAD_FLOATS, cpu::TILE_COLUMNS;
using cpu::TILE_ROWS, cpu::VECTOR, cpu::Vector, cpu::each_tile, cpu::thread_floats, cpu::transposed;

// ---- a product as the program's, which takes operands that are packed, and stores where it can ------------

// c (R, TILE_COLUMNS), its rows ldc apart, = [c +] a (R, K) times panel (K, TILE_COLUMNS).
template <int R> static void product_tile(float* c, int ldc, Matrix a, const float* panel, int K, bool add) {
    Vector sum0[R] = {}, sum1[R] = {};
    for (int k = 0; k < K; k++, a.data += a.column, panel += TILE_COLUMNS) {
        Vector b0 = *(const Vector*)panel, b1 = *(const Vector*)(panel + VECTOR);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            sum0[r] += a.data[r * a.row] * b0;
            sum1[r] += a.data[r * a.row] * b1;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++, c += ldc) {
        Vector &c0 = *(Vector*)c, &c1 = *(Vector*)(c + VECTOR);
        c0 = add ? c0 + sum0[r] : sum0[r], c1 = add ? c1 + sum1[r] : sum1[r];
    }
}

static int round_up(int n, int unit) { return ceil_div(n, unit) * unit; }
// A vector's first n elements, if it has so many; zeros behind them.
static Vector load_some(const float* from, int n) {
    if (n >= VECTOR) return *(const Vector*)from;
    Vector v = {};
    memcpy(&v, from, std::max(0, n) * sizeof(float));
    return v;
}
static void store_some(float* to, Vector v, int n) {
    if (n >= VECTOR) *(Vector*)to = v;
    else memcpy(to, &v, n * sizeof(float));
}

// rows[i][j] and rows[j][i] change places.
static void transpose(Vector (&rows)[VECTOR]) {
#pragma GCC unroll 4
    for (int step = VECTOR / 2; step; step /= 2) {
        int __attribute__((vector_size(sizeof(Vector)))) upper, lower;
        for (int j = 0; j < VECTOR; j++)
            upper[j] = j & step ? VECTOR + j - step : j, lower[j] = j & step ? VECTOR + j : j + step;
#pragma GCC unroll 16
        for (int i = 0; i < VECTOR; i++)
            if (!(i & step)) {
                Vector a = rows[i], b = rows[i + step];
                rows[i] = __builtin_shuffle(a, b, upper), rows[i + step] = __builtin_shuffle(a, b, lower);
            }
    }
}

// b (K, N), rows or columns of which are contiguous, as panels (N / TILE_COLUMNS, K, TILE_COLUMNS) with zeros
// behind N.
static void pack_panels(float* panels, Matrix b, int K, int N) {
    for (int n = 0; n < round_up(N, TILE_COLUMNS); n += VECTOR) {
        float* to = panels + (size_t)(n / TILE_COLUMNS) * K * TILE_COLUMNS + n % TILE_COLUMNS;
        if (b.column == 1)
            for (int k = 0; k < K; k++)
                *(Vector*)(to + k * TILE_COLUMNS) = load_some(b.from(k, n).data, N - n);
        else
            for (int k0 = 0; k0 < K; k0 += VECTOR) {
                Vector rows[VECTOR];
                for (int i = 0; i < VECTOR; i++)
                    rows[i] = load_some(b.from(k0, n + i).data, n + i < N ? K - k0 : 0);
                transpose(rows);
                for (int i = 0; i < std::min((int)VECTOR, K - k0); i++)
                    *(Vector*)(to + (k0 + i) * TILE_COLUMNS) = rows[i];
            }
    }
}

// c (M, N), its rows ldc apart, = [c +] a (M, K) b (K, N). Runs on the calling thread; layers call it from
// their parallel loops. The order of a sum depends on K alone; a long one is added up block by block.
static void product(cpu::ProductSize size, float* c, int ldc, Matrix a, Matrix b, bool accumulate) {
    auto [M, N, K] = size;
    float* panels = thread_floats() + THREAD_FLOATS;  // (NC / TILE_COLUMNS, KC, TILE_COLUMNS)
    float tile[TILE_ROWS * TILE_COLUMNS];
    for (int n0 = 0; n0 < N; n0 += NC)
        for (int k0 = 0; k0 < K; k0 += KC) {
            int block_n = std::min((int)NC, N - n0), block_k = std::min((int)KC, K - k0);
            bool add = accumulate || k0, packed = !b.column;  // by pack_panels
            if (!packed) pack_panels(panels, b.from(k0, n0), block_k, block_n);
            for (int m0 = 0; m0 < M; m0 += ROW_BLOCK)
                for (int n = 0; n < block_n; n += TILE_COLUMNS)
                    for (int m = m0, rows; m < std::min(m0 + ROW_BLOCK, M); m += rows) {
                        const float* panel = packed ? b.data + (size_t)(n0 + n) * K + k0 * TILE_COLUMNS
                                                    : panels + (size_t)n * block_k;
                        Matrix a_rows = a.from(m, k0);
                        rows = M - m >= TILE_ROWS ? TILE_ROWS : M - m >= 4 ? 4 : 1;
                        bool whole = block_n - n >= TILE_COLUMNS;
                        float *target = c + (size_t)m * ldc + n0 + n, *to = whole ? target : tile;
                        int ld = whole ? ldc : (int)TILE_COLUMNS;
                        if (rows == TILE_ROWS)
                            product_tile<TILE_ROWS>(to, ld, a_rows, panel, block_k, whole && add);
                        if (rows == 4) product_tile<4>(to, ld, a_rows, panel, block_k, whole && add);
                        if (rows == 1) product_tile<1>(to, ld, a_rows, panel, block_k, whole && add);
                        for (int r = 0; r < rows && !whole; r++)
                            for (int j = 0; j < block_n - n; j++) {
                                float value = tile[r * TILE_COLUMNS + j], &at = target[(size_t)r * ldc + j];
                                at = add ? at + value : value;
                            }
                    }
        }
}

// ---- the convolution --------------------------------------------------------------------------------------

// 3x3 convolutions are F(2x2, 3x3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks"
// (2016). An image is cut into tiles of 2x2 pixels; with x the 4x4 patch around the tile y,
//   y = A^T ((G w G^T) * (B^T x B)) A,   dw = G^T ((A dy A^T) * (B^T x B)) G
// where * multiplies element by element, 16 times instead of 36; over all tiles and channels it is 16
// products of matrices.
static constexpr float B_T[4][4] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
static constexpr float G[4][3] = {{1, 0, 0}, {0.5f, 0.5f, 0.5f}, {0.5f, -0.5f, 0.5f}, {0, 0, 1}};
static constexpr float G_T[3][4] = {{1, 0.5f, 0.5f, 0}, {0, 0.5f, -0.5f, 0}, {0, 0.5f, 0.5f, 1}};
static constexpr float A[4][2] = {{1, 0}, {1, 1}, {1, -1}, {0, -1}};
static constexpr float A_T[2][4] = {{1, 1, 1, 0}, {0, 1, -1, -1}};

template <int M, int N = M> struct Grid {  // of vectors of channels
    Vector at[M * N];
};
// (m x)^T; twice, m x m^T.
template <const auto& m, int N, int J> static Grid<J, std::size(m)> turned_product(const Grid<N, J>& x) {
    constexpr int M = std::size(m);
    Grid<J, M> out;
#pragma GCC unroll 16
    for (int i = 0; i < J * M; i++) {
        Vector sum = Vector{} - 0.0f;  // adding to it rounds nothing and costs nothing
#pragma GCC unroll 4
        for (int k = 0; k < N; k++)
            if (m[i % M][k] != 0) sum += m[i % M][k] * x.at[k * J + i / M];
        out.at[i] = sum;
    }
    return out;
}
template <const auto& m> static auto transform(const auto& x) {
    return turned_product<m>(turned_product<m>(x));
}
// n channels of each element of a grid; from one to the next it is so many floats.
template <int N> static Grid<N> load_grid(const float* from, size_t stride, int n) {
    Grid<N> x;
#pragma GCC unroll 16
    for (int i = 0; i < N * N; i++) x.at[i] = load_some(from + i * stride, n);
    return x;
}
template <int N> static void store_grid(float* to, size_t stride, const Grid<N>& x, int n) {
#pragma GCC unroll 16
    for (int i = 0; i < N * N; i++) store_some(to + i * stride, x.at[i], n);
}
// Floats of one of the 16 matrices; were it a power of two, all would fall into the same lines of a cache.
static size_t plane_of(int rows, int columns) { return (size_t)rows * columns + 16; }

// use(t - t0, image, y, x) for tiles [t0, t1), the first pixel of each; the last ones may lie half outside.
static int tiles_of(Tensor x) { return x.B * ((x.H + 1) / 2) * ((x.W + 1) / 2); }
static void each_patch(Tensor x, int t0, int t1, auto use) {
    int H = (x.H + 1) / 2, W = (x.W + 1) / 2;
    for (int t = t0; t < t1; t++) use(t - t0, t / W / H, t / W % H * 2, t % W * 2);
}

// to (16, channels / width, tiles, width) = m x m^T of channels [c0, c1) of tiles [t0, t1), or of the patches
// around them, zero outside the image.
template <const auto& m>
static void transform_pixels(float* to, int width, Tensor x, int t0, int t1, int c0, int c1) {
    constexpr int N = std::size(m[0]), before = N / 4;
    size_t plane = plane_of(t1 - t0, round_up(c1 - c0, width));
    each_patch(x, t0, t1, [&](int t, int b, int top, int left) {
        const float* from[N * N];
        for (int i = 0; i < N * N; i++) {
            int row = top - before + i / N, column = left - before + i % N;
            bool inside = row >= 0 && row < x.H && column >= 0 && column < x.W;
            from[i] = inside ? x.data + (((size_t)b * x.H + row) * x.W + column) * x.C : nullptr;
        }
        for (int c = c0; c < c1; c += VECTOR) {
            Grid<N> in;
#pragma GCC unroll 16
            for (int i = 0; i < N * N; i++) in.at[i] = from[i] ? load_some(from[i] + c, c1 - c) : Vector{};
            int panel = (c - c0) / width, j = (c - c0) % width;
            store_grid<4>(to + ((size_t)panel * (t1 - t0) + t) * width + j, plane, transform<m>(in),
                          width - j);
        }
    });
}

// out = the convolution of x by weights (O, 9, C), plus bias; or backward, with taps flipped, by (C, 9, O).
static void convolve(Tensor out, Tensor x, const float* w, bool backward, const float* bias) {
    int O = out.C, most = std::min(x.C, 512), tap_step = backward ? -O : x.C;  // inputs at a time
    int outputs = std::clamp(THREAD_FLOATS / 25 / most / TILE_COLUMNS * TILE_COLUMNS, (int)TILE_COLUMNS, 128);
    for (int k0 = 0; k0 < x.C; k0 += most)
        each_tile(tiles_of(x), 256, O, outputs, [&](int first, int last, int o0, int o1) {
            int K = std::min(most, x.C - k0), n = o1 - o0, size = K * round_up(n, TILE_COLUMNS);
            size_t plane = plane_of(size, 1);
            float *weights = thread_floats(), *patches = weights + 16 * plane;
            Matrix taps = backward ? Matrix{w + 8 * O + (size_t)k0 * 9 * O + o0, 9 * O}
                                   : transposed(w + (size_t)o0 * 9 * x.C + k0, 9 * x.C);
            for (int tap = 0; tap < 9; tap++, taps.data += tap_step)
                pack_panels(patches + tap * size, taps, K, n);
            for (int i = 0; i < size; i += VECTOR)
                store_grid<4>(weights + i, plane, transform<G>(load_grid<3>(patches + i, size, VECTOR)),
                              VECTOR);
            int band = (THREAD_FLOATS - 16 * (int)plane) / (16 * (K + n) + 32) / TILE_ROWS;
            for (int t0 = first, t1; t0 < last; t0 = t1) {
                t1 = std::min(t0 + std::clamp(band, 1, 8) * TILE_ROWS, last);
                size_t from = plane_of(t1 - t0, K), to = plane_of(t1 - t0, n);
                float* products = patches + 16 * from;
                transform_pixels<B_T>(patches, K, x, t0, t1, k0, k0 + K);
                for (int f = 0; f < 16; f++)
                    product({t1 - t0, n, K}, products + f * to, n, {patches + f * from, K},
                            {weights + f * plane, 0, 0}, false);
                each_patch(x, t0, t1, [&](int t, int b, int top, int left) {
                    for (int o = o0; o < o1; o += VECTOR) {
                        auto y = transform<A_T>(load_grid<4>(products + (size_t)t * n + o - o0, to, o1 - o));
                        for (int i = 0; i < 4; i++) {
                            int row = top + i / 2, column = left + i % 2;
                            if (row >= x.H || column >= x.W) continue;
                            size_t at = (((size_t)b * x.H + row) * x.W + column) * O + o;
                            if (k0 || bias) y.at[i] += load_some(k0 ? out.data + at : bias + o, o1 - o);
                            store_some(out.data + at, y.at[i], o1 - o);
                        }
                    }
                });
            }
        });
}

// Each thread owns a tile of dw and walks over all pixels; where tiles are few, over a part of them. Parts
// have sums of their own, in `room`.
enum { PARTS_FLOATS = 1 << 20 };
static void weight_gradient(float* dw, Tensor dout, Tensor x, float* room) {
    enum { SIDE = 64, BAND = 128 };
    int C = x.C, O = dout.C, tiles = tiles_of(x), size = O * 9 * C;
    int parts = std::clamp(PARTS_FLOATS / size, 1, std::min(8, tiles));
    float* sums = parts > 1 ? room : dw;  // (parts, O, 9, C)
    each_tile(ceil_div(O, SIDE) * parts, 1, C, SIDE, [&](int task, int, int c0, int c1) {
        int part = task % parts, o0 = task / parts * SIDE, o1 = std::min(o0 + SIDE, O), n = o1 - o0;
        int begin = (int)((size_t)tiles * part / parts), end = (int)((size_t)tiles * (part + 1) / parts);
        size_t plane = plane_of(SIDE, SIDE);
        float *sum = thread_floats(), *left = sum + 16 * plane, *right = left + 16 * plane_of(BAND, SIDE);
        for (int t0 = begin; t0 < end; t0 += BAND) {
            int t1 = std::min(t0 + BAND, end), count = t1 - t0;
            transform_pixels<A>(left, n, dout, t0, t1, o0, o1);
            transform_pixels<B_T>(right, TILE_COLUMNS, x, t0, t1, c0, c1);
            for (int f = 0; f < 16; f++)
                product({n, c1 - c0, count}, sum + f * plane, SIDE,
                        transposed(left + f * plane_of(count, n), n),
                        {right + f * plane_of(count, round_up(c1 - c0, TILE_COLUMNS)), 0, 0}, t0 > begin);
        }
        for (int o = o0; o < o1; o++)
            for (int c = c0; c < c1; c += VECTOR)
                store_grid<3>(sums + (size_t)part * size + (size_t)o * 9 * C + c, C,
                              transform<G_T>(load_grid<4>(sum + (o - o0) * SIDE + c - c0, plane, c1 - c)),
                              c1 - c);
    });
#pragma omp parallel for
    for (int i = 0; i < size * (parts > 1); i++) {
        dw[i] = sums[i];
        for (int part = 1; part < parts; part++) dw[i] += sums[(size_t)part * size + i];
    }
}

}  // namespace winograd
