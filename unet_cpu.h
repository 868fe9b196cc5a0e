// unet_cpu.h: the layers on a CPU, the specification that the GPU's kernels are tested against.
//
// train_unet.cu includes it behind the layers' declarations, where their comments stand.
#pragma once

#if !defined(__CUDACC__) || defined(TESTING)  // the specification of every layer
// Loops whose rounds are registers of vectors, and loops that become vectors.
#define REGISTER_FOR(...) _Pragma("GCC unroll 16") for (__VA_ARGS__)
#define SIMD_FOR(...) _Pragma("omp simd") for (__VA_ARGS__)
namespace cpu {

// ---- CPU workspace ----------------------------------------------------------------------------------------
// What a layer's threads share, the parts of a weight gradient; then each thread's own scratch: transformed
// operands of a convolution, attention scores, and matmul's packed panels.
enum { SHARED_FLOATS = 1 << 20, THREAD_FLOATS = 1 << 19, KC = 256, NC = 512 };
enum { SCRATCH_FLOATS = THREAD_FLOATS + KC * NC };  // of a thread
static float* cpu_workspace;

static float* thread_floats() {
    return cpu_workspace + SHARED_FLOATS + (size_t)omp_get_thread_num() * SCRATCH_FLOATS;
}
static size_t cpu_workspace_bytes() {
    return sizeof(float) * (SHARED_FLOATS + (size_t)omp_get_max_threads() * SCRATCH_FLOATS);
}
static void allocate_cpu_workspace() {
    if (!cpu_workspace) cpu_workspace = (float*)backend_allocate(cpu_workspace_bytes(), true);
}

// work(m0, m1, n0, n1) for every tile, rows x columns, of a product (M, N), dealt out to the threads; before
// its first one of some columns a thread calls prepare(n0, n1), if given, to have weights in its scratch.
// Shapes decide what a tile is, never the number of threads.
static void each_tile(int M, int rows, int N, int columns, auto work, auto... prepare) {
#pragma omp parallel
    {
        int prepared = -1;
#pragma omp for collapse(2) schedule(dynamic)
        for (int n = 0; n < N; n += columns)
            for (int m = 0; m < M; m += rows) {
                int end = std::min(n + columns, N);
                if (std::exchange(prepared, n) != n) (prepare(n, end), ...);
                work(m, std::min(m + rows, M), n, end);
            }
    }
}

// ---- layers written once: see section 3 of train_unet.cu -----------------------------------------------------
template <typename Layer> static void run(Layer layer) {
    PROFILE(layer);
    size_t items = layer.items();
    if constexpr (requires { Layer::THREADS; }) {
#pragma omp parallel for
        for (size_t i = 0; i < items; i++) layer(Team{(int)i, 0, 1});
    } else {
#pragma omp parallel for simd firstprivate(layer)
        for (size_t i = 0; i < items; i++) layer(i);
    }
}

// ---- matrix product ---------------------------------------------------------------------------------------
// The register tile: 12 x 2 vectors fill 24 of AVX-512's 32 registers, 6 x 2 fill 12 of AVX2's 16.
#if defined(__AVX512F__)
enum { VECTOR = 16, TILE_ROWS = 12 };
#else
enum { VECTOR = 8, TILE_ROWS = 6 };
#endif
enum { TILE_COLUMNS = 2 * VECTOR };
typedef float Vector __attribute__((vector_size(VECTOR * sizeof(float)), aligned(4)));

// A row-major matrix whose rows in memory are ld apart, or its transpose, as an operand of a product: how far
// it is to the next row's element and to the next column's; 0 tells matmul_pack's panels, of `row` rows.
struct Matrix {
    const float* data;
    ptrdiff_t row, column = 1;
    Matrix from(int i, int j) const { return {data + i * row + j * column, row, column}; }
};
static Matrix transposed(const float* data, int ld) { return {data, 1, ld}; }
static Matrix packed(const float* panels, int rows) { return {panels, rows, 0}; }
static Matrix pixels_of(Tensor x, int p = 0, int c = 0) { return {x.data + (size_t)p * x.C + c, x.C}; }
static int round_up(int n, int unit) { return ceil_div(n, unit) * unit; }

// c (R, TILE_COLUMNS), its rows ldc apart, = [c +] a (R, K) times panel (K, TILE_COLUMNS).
template <int R> static void multiply(float* c, int ldc, Matrix a, const float* panel, int K, bool add) {
    Vector sum0[R] = {}, sum1[R] = {};
    REGISTER_FOR (int r = 0; r < R; r++)
        __builtin_prefetch(c + r * ldc, 1), __builtin_prefetch(c + r * ldc + VECTOR, 1);
    for (int k = 0; k < K; k++, a.data += a.column, panel += TILE_COLUMNS) {
        Vector b0 = *(const Vector*)panel, b1 = *(const Vector*)(panel + VECTOR);
        REGISTER_FOR (int r = 0; r < R; r++) {
            sum0[r] += a.data[r * a.row] * b0;
            sum1[r] += a.data[r * a.row] * b1;
        }
    }
    REGISTER_FOR (int r = 0; r < R; r++, c += ldc) {
        Vector &c0 = *(Vector*)c, &c1 = *(Vector*)(c + VECTOR);
        c0 = add ? c0 + sum0[r] : sum0[r], c1 = add ? c1 + sum1[r] : sum1[r];
    }
}

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
// b (K, N) as panels (N / TILE_COLUMNS, K, TILE_COLUMNS), zeros behind N.
static void matmul_pack(float* panels, Matrix b, int K, int N) {
    for (int n = 0; n < N; n += TILE_COLUMNS)
        for (int k = 0; k < K; k++, panels += TILE_COLUMNS) {
            const float* row = b.from(k, n).data;
            int width = std::min((int)TILE_COLUMNS, N - n);
            if (b.column == 1 && width == TILE_COLUMNS) memcpy(panels, row, TILE_COLUMNS * sizeof(float));
            else
                SIMD_FOR (int j = 0; j < TILE_COLUMNS; j++) panels[j] = j < width ? row[j * b.column] : 0;
        }
}

// c (M, N), its rows ldc apart, = [c +] a (M, K) b (K, N). Runs on the calling thread; layers call it from
// their parallel loops. The order of a sum depends on K alone; a long one is added up block by block.
static void matmul(std::array<int, 3> size, float* c, int ldc, Matrix a, Matrix b, bool accumulate) {
    auto [M, N, K] = size;
    float* panels = thread_floats() + THREAD_FLOATS;  // (NC / TILE_COLUMNS, KC, TILE_COLUMNS)
    float corner[TILE_ROWS * TILE_COLUMNS];           // a tile of which c has some columns only
    for (int n0 = 0; n0 < N; n0 += NC)
        for (int k0 = 0; k0 < K; k0 += KC) {
            int block_n = std::min((int)NC, N - n0), block_k = std::min((int)KC, K - k0);
            bool add = accumulate || k0;
            if (b.column) matmul_pack(panels, b.from(k0, n0), block_k, block_n);
            for (int n = 0; n < block_n; n += TILE_COLUMNS)
                for (int m = 0, rows; m < M; m += rows) {
                    rows = M - m >= TILE_ROWS ? TILE_ROWS : M - m >= 4 ? 4 : 1;
                    auto tile = rows == 1 ? multiply<1> : rows == 4 ? multiply<4> : multiply<TILE_ROWS>;
                    const float* panel = panels + (size_t)n * block_k;
                    if (!b.column) panel = b.data + (n0 + n) * b.row + k0 * TILE_COLUMNS;
                    float* to = c + (size_t)m * ldc + n0 + n;
                    int columns = block_n - n;
                    if (columns >= TILE_COLUMNS) tile(to, ldc, a.from(m, k0), panel, block_k, add);
                    else {
                        tile(corner, TILE_COLUMNS, a.from(m, k0), panel, block_k, false);
                        for (int r = 0; r < rows; r++, to += ldc)
                            for (int j = 0; j < columns; j++)
                                to[j] = corner[r * TILE_COLUMNS + j] + (add ? to[j] : 0);
                    }
                }
        }
}

// ---- bias gradient ----------------------------------------------------------------------------------------
// A product with ones, an image at a time.
static void bias_backward(const auto& layer, Rows per_image, Tensor dout) {
    PROFILE("bias gradient", {0, (double)sizeof(float) * dout.count()});
    each_tile(1, 1, dout.C, TILE_COLUMNS, [&](int, int, int o0, int o1) {
        const float one = 1;
        float image[TILE_COLUMNS];
        double total[TILE_COLUMNS] = {};
        for (int b = 0; b < dout.B; b++) {
            matmul({1, o1 - o0, dout.T()}, image, 0, {&one, 0, 0}, pixels_of(dout, b * dout.T(), o0), false);
            for (int o = o0; o < o1; o++) {
                total[o - o0] += image[o - o0];
                if (per_image.data) per_image.row(b)[o] = image[o - o0];
            }
        }
        for (int o = o0; o < o1; o++) layer.dbias[o] = (float)total[o - o0];
    });
}

// ---- group norm + SiLU ------------------------------------------------------------------------------------
// work(b, t0, t1, c, n, row) for every part of an image, pixels [t0, t1) of image b, and every n <= SLAB
// channels of x from c on that lie together in one of the two tensors: row(t) is where they lie at pixel t.
// What adds up SLAB channels does it in registers.
enum { SLAB = 64 };
static void each_slab(const Joined& x, auto work) {
    each_tile(x.first.B, 1, x.first.T(), NORM_PART, [&](int b, int, int t0, int t1) {
        for (int c = 0, n; c < x.C(); c += n) {
            auto row = [&x, b, c](int t) { return x.at((size_t)b * x.first.T() + t, c); };
            n = std::min((int)SLAB, x.of(c).C - x.within(c));
            if (n == SLAB) work(b, t0, t1, c, std::integral_constant<int, SLAB>(), row);
            else if (n == SLAB / 2) work(b, t0, t1, c, std::integral_constant<int, SLAB / 2>(), row);
            else work(b, t0, t1, c, n, row);
        }
    });
}

static void channel_moments(Tensor x) {
    PROFILE("group norm sums", {0, 1.0 * sizeof(float) * x.count()});
    each_slab(x, [&](int b, int t0, int t1, int c, auto n, auto row) {
        const float* pivot = row(t0);
        float sum[SLAB] = {}, squares[SLAB] = {};  // of x - pivot, which is one of them: little cancels
        for (int t = t0; t < t1; t++) {
            const float* x_t = row(t);
            SIMD_FOR (int k = 0; k < n; k++) {
                float d = x_t[k] - pivot[k];
                sum[k] += d, squares[k] += d * d;
            }
        }
        float2* moments = x.moments + ((size_t)b * norm_parts(x.T()) + t0 / NORM_PART) * x.C + c;
        for (int k = 0; k < n; k++) {
            float shift = sum[k] / (t1 - t0);
            moments[k] = {pivot[k] + shift, std::max(0.0f, squares[k] - sum[k] * shift)};
        }
    });
}

// A slab's norm as a map of each channel: x^ = x slope + offset, and the norm is x scale + shift.
struct NormMap {
    float slope[SLAB], offset[SLAB], scale[SLAB], shift[SLAB];
    bool silu;
    NormMap(const Norm& norm, int b, int c, int n) : silu(norm.silu) {
        size_t at = (size_t)b * norm.x.C() + c;
        for (int k = 0; k < n; k++, at++) {
            float2 group = norm.statistics[at], affine = norm.affine[at];
            slope[k] = group.y, offset[k] = -group.x * group.y;
            scale[k] = (silu ? 2 : 1) * affine.x, shift[k] = (silu ? 2 : 1) * affine.y;
        }
    }
    float normed(float x, int k) const {
        float y = x * scale[k] + shift[k];
        return silu ? y * sigmoid(y) : y;
    }
};

// The moments of a group's channels and parts are joined as by Chan, Golub and LeVeque (1979).
static void groupnorm_forward(Tensor out, const Norm& norm) {
    PROFILE("group norm forward", {0, 2.0 * sizeof(float) * out.count()});
    assert(norm.x.first.moments && (norm.x.second.moments || !norm.x.second));
    int T = out.H * out.W, parts = norm_parts(T), width = out.C / norm.groups;
    each_tile(out.B, 1, out.C, width, [&](int b, int, int c0, int end) {
        double n = 0, mean = 0, squares = 0;
        for (int part = 0; part < parts; part++)
            for (int c = c0; c < end; c++) {
                float2 more = norm.x.moments((size_t)b * parts + part, c);
                double pixels = std::min((int)NORM_PART, T - part * NORM_PART), apart = more.x - mean;
                n += pixels, mean += apart * pixels / n;
                squares += more.y + apart * apart * pixels * (n - pixels) / n;
            }
        float2 group = {(float)mean, (float)(1.0 / sqrt(squares / n + NORM_EPS))};
        for (int c = c0; c < end; c++) {
            float2 layer = norm.modulated(b, c);
            float scale = group.y * layer.x, shift = layer.y - group.x * scale, part = norm.silu ? 0.5f : 1;
            size_t at = (size_t)b * out.C + c;
            norm.statistics[at] = group, norm.affine[at] = {part * scale, part * shift};
        }
    });
    each_slab(norm.x, [&](int b, int t0, int t1, int c, auto n, auto row) {
        NormMap map(norm, b, c, n);
        for (int t = t0; t < t1; t++) {
            float *target = out.data + ((size_t)b * T + t) * out.C + c, *x_t = row(t);
            SIMD_FOR (int k = 0; k < n; k++) target[k] = map.normed(x_t[k], k);
        }
    });
}
static Joined groupnorm_for_product(Tensor normed, const Norm& norm, int) {
    groupnorm_forward(normed, norm);
    return normed;
}

static void groupnorm_backward_sums(Tensor dy, Tensor dout, const Norm& norm) {
    PROFILE("group norm sums", {0, 3.0 * sizeof(float) * dy.count()});
    int T = dy.T(), parts = norm_parts(T), C = dy.C;
    each_slab(norm.x, [&](int b, int t0, int t1, int c, auto n, auto row) {
        NormMap map(norm, b, c, n);
        float sum[SLAB] = {}, product[SLAB] = {};
        for (int t = t0; t < t1; t++) {
            size_t at = ((size_t)b * T + t) * C + c;
            const float *x_t = row(t), *upstream = dout.data + at;
            float d[SLAB];
            std::copy(upstream, upstream + n, d);
            if (norm.silu)
                SIMD_FOR (int k = 0; k < n; k++) d[k] *= silu_gradient(x_t[k] * map.scale[k] + map.shift[k]);
            SIMD_FOR (int k = 0; k < n; k++)
                sum[k] += d[k], product[k] += d[k] * (x_t[k] * map.slope[k] + map.offset[k]);
            std::copy(d, d + n, dy.data + at);
        }
        for (int k = 0; k < n; k++)
            norm.sums[((size_t)b * parts + t0 / NORM_PART) * C + c + k] = {sum[k], product[k]};
    });
}

static void groupnorm_backward(Joined dx, Tensor normed, Tensor dy, const Norm& norm, Backward options) {
    PROFILE("group norm backward",
            {0, (4.0 + !!options.residual + options.accumulate) * sizeof(float) * dy.count()});
    int T = dy.H * dy.W, parts = norm_parts(T), C = dy.C, width = C / norm.groups;
#pragma omp parallel for
    for (int c = 0; c < C; c++) {
        double dw = 0, dbias = 0;
        for (int i = 0; i < dy.B * parts; i++) {
            double gain = norm.gain(i / parts, c);
            dbias += gain * norm.sums[(size_t)i * C + c].x, dw += gain * norm.sums[(size_t)i * C + c].y;
        }
        norm.dw[c] = (float)dw, norm.dbias[c] = (float)dbias;
    }
    // the means over a group, of w dy and of w dy x^, come in place of the sums of an image's first part
    each_tile(dy.B, 1, C, width, [&](int b, int, int c0, int end) {
        double a = 0, q = 0;
        float2* sums = norm.sums + (size_t)b * parts * C;
        for (int part = 0; part < parts; part++)
            for (int c = c0; c < end; c++) {
                double weight = norm.w[c] * norm.gain(b, c);
                a += weight * sums[(size_t)part * C + c].x, q += weight * sums[(size_t)part * C + c].y;
            }
        std::fill(sums + c0, sums + end, float2{(float)(a / T / width), (float)(q / T / width)});
    });
    each_slab(norm.x, [&](int b, int t0, int t1, int c, auto n, auto row) {
        NormMap map(norm, b, c, n);
        float2 mean[SLAB];
        std::copy_n(norm.sums + (size_t)b * parts * C + c, (int)n, mean);
        const Tensor& target = dx.of(c);
        for (int t = t0; t < t1; t++) {
            size_t pixel = (size_t)b * T + t, at = pixel * target.C + dx.within(c);
            const float *upstream = dy.data + pixel * C + c, *x_t = row(t);
            float again[SLAB];  // for normed may be dy, and dx x
            SIMD_FOR (int k = 0; k < n; k++) again[k] = map.normed(x_t[k], k);
            SIMD_FOR (int k = 0; k < n; k++) {
                float x_hat = x_t[k] * map.slope[k] + map.offset[k];
                float d = map.scale[k] * upstream[k] - map.slope[k] * (mean[k].x + x_hat * mean[k].y);
                if (options.residual) d += options.residual.data[at + k];
                target.data[at + k] = options.accumulate ? target.data[at + k] + d : d;
            }
            std::copy(again, again + n, normed.data + pixel * C + c);
        }
    });
}

// ---- 3x3 convolutions by Winograd's algorithm --------------------------------------------------------------
// By F(2x2, 3x3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016). An image is
// cut into tiles of 2x2 pixels; with x the 4x4 patch around the tile y,
//   y = A^T ((G w G^T) * (B^T x B)) A,   dw = G^T ((A dy A^T) * (B^T x B)) G
// where * multiplies element by element, 16 times instead of 36; over all tiles and channels it is 16
// products of matrices.
static constexpr float B_T[4][4] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
static constexpr float G[4][3] = {{1, 0, 0}, {0.5f, 0.5f, 0.5f}, {0.5f, -0.5f, 0.5f}, {0, 0, 1}};
static constexpr float G_T[3][4] = {{1, 0.5f, 0.5f, 0}, {0, 0.5f, -0.5f, 0}, {0, 0.5f, 0.5f, 1}};
static constexpr float A[4][2] = {{1, 0}, {1, 1}, {1, -1}, {0, -1}};
static constexpr float A_T[2][4] = {{1, 1, 1, 0}, {0, 1, -1, -1}};

// put(i, element i of m x m^T), get(i) being x's: vectors of channels. On a Xeon a call takes twice as long.
template <const auto& m> [[gnu::always_inline]] static inline void transform(auto get, auto put) {
    constexpr int M = std::size(m), N = std::size(m[0]);
    auto dot = [](const float(&row)[N], const Vector* column, int step) {
        Vector sum = Vector{} * -1.0f;  // -0: adding to it changes nothing and costs nothing
        REGISTER_FOR (int k = 0; k < N; k++)
            if (row[k] != 0) sum += row[k] * column[k * step];
        return sum;
    };
    Vector x[N * N], half[M * N];
    REGISTER_FOR (int i = 0; i < N * N; i++) x[i] = get(i);
    REGISTER_FOR (int i = 0; i < M * N; i++) half[i] = dot(m[i / N], x + i % N, N);
    REGISTER_FOR (int i = 0; i < M * M; i++) put(i, dot(m[i % M], half + i / M * N, 1));
}

// use(t - t0, image, y, x) for tiles [t0, t1), the first pixel of each; the last ones may lie half outside.
static int tiles_of(Tensor x) { return x.B * ((x.H + 1) / 2) * ((x.W + 1) / 2); }
static void each_patch(Tensor x, int t0, int t1, auto use) {
    int H = (x.H + 1) / 2, W = (x.W + 1) / 2;
    for (int t = t0; t < t1; t++) use(t - t0, t / W / H, t / W % H * 2, t % W * 2);
}
// Of pixel (row, column) of an image, where its channels lie; `outside`, if it is, or if there is no x.
static float* pixel_at(Tensor x, int b, int row, int column, float* outside = nullptr) {
    bool inside = x && row >= 0 && row < x.H && column >= 0 && column < x.W;
    return inside ? x.data + (((size_t)b * x.H + row) * x.W + column) * x.C : outside;
}
enum { MOST = 512 };       // channels that a convolution adds up at a time
static float zeros[MOST];  // of a pixel outside, so that reading patches asks nothing of each
// Floats of one of the 16 matrices; were it a power of two, all would fall into the same lines of a cache.
static size_t plane_of(int rows, int columns) { return (size_t)rows * columns + 16; }

// to (16, channels / width, tiles, width) = m x m^T of channels [c0, c1) of tiles [t0, t1), or of the patches
// around them, zero outside the image; zeros behind c1, to whole vectors.
template <const auto& m>
static void transform_pixels(float* to, size_t plane, int width, Tensor x, int t0, int t1, int c0, int c1) {
    constexpr int N = std::size(m[0]), before = N / 4;
    x.data += c0;
    each_patch(x, t0, t1, [&](int t, int b, int top, int left) {
        const float* from[N * N];
        for (int i = 0; i < N * N; i++)
            from[i] = pixel_at(x, b, top - before + i / N, left - before + i % N, zeros);
        for (int c = 0; c < c1 - c0; c += VECTOR) {
            float* at = to + ((size_t)(c / width) * (t1 - t0) + t) * width + c % width;
            transform<m>([&](int i) { return load_some(from[i] + c, c1 - c0 - c); },
                         [&](int i, Vector v) { *(Vector*)(at + i * plane) = v; });
        }
    });
}

// out = the convolution of x by weights (O, 9, C), plus what is there to add; or backward, with taps flipped,
// by (C, 9, O).
static void convolve(Tensor out, Tensor x, Conv layer, bool backward, Forward options) {
    int O = out.C, C = x.C, tap_step = backward ? -O : C;
    int outputs = std::clamp(THREAD_FLOATS / 25 / std::min(C, (int)MOST) / TILE_COLUMNS * TILE_COLUMNS,
                             (int)TILE_COLUMNS, 128);
    for (int k0 = 0; k0 < C; k0 += MOST) {
        if (k0) layer.bias = nullptr, options = {.residual = out};
        int K = std::min((int)MOST, C - k0), width = round_up(K, VECTOR);
        size_t plane = plane_of(K, outputs);
        int band = (THREAD_FLOATS - 16 * (int)plane) / (16 * (width + outputs) + 32) / TILE_ROWS;
        auto transform_weights = [&](int o0, int o1) {
            float *weights = thread_floats(), *taken = weights + 16 * plane;
            size_t size = (size_t)K * round_up(o1 - o0, TILE_COLUMNS);
            Matrix taps = backward ? Matrix{layer.w + 8 * O + (size_t)k0 * 9 * O + o0, 9 * O}
                                   : transposed(layer.w + (size_t)o0 * 9 * C + k0, 9 * C);
            for (int tap = 0; tap < 9; tap++, taps.data += tap_step)
                matmul_pack(taken + tap * size, taps, K, o1 - o0);
            for (size_t i = 0; i < size; i += VECTOR)
                transform<G>([&](int tap) { return *(Vector*)(taken + tap * size + i); },
                             [&](int f, Vector v) { *(Vector*)(weights + f * plane + i) = v; });
        };
        auto convolve_tiles = [&](int first, int last, int o0, int o1) {
            float *weights = thread_floats(), *patches = weights + 16 * plane;
            int n = round_up(o1 - o0, TILE_COLUMNS);
            for (int t0 = first, t1; t0 < last; t0 = t1) {
                t1 = std::min(t0 + std::clamp(band, 1, 4) * TILE_ROWS, last);
                size_t from = plane_of(t1 - t0, width), to = plane_of(t1 - t0, n);
                float* products = patches + 16 * from;
                transform_pixels<B_T>(patches, from, width, x, t0, t1, k0, k0 + K);
                for (int f = 0; f < 16; f++)
                    matmul({t1 - t0, n, K}, products + f * to, n, {patches + f * from, width},
                           packed(weights + f * plane, K), false);
                each_patch(x, t0, t1, [&](int t, int b, int top, int left) {
                    const float* emb = options.emb.row(b);
                    for (int o = o0; o < o1; o += VECTOR)
                        transform<A_T>(
                            [&](int f) { return *(Vector*)(products + f * to + (size_t)t * n + o - o0); },
                            [&](int i, Vector y) {
                                float* at = pixel_at(out, b, top + i / 2, left + i % 2);
                                if (!at) return;
                                const float* rest = pixel_at(options.residual, b, top + i / 2, left + i % 2);
                                for (const float* more : {layer.bias, emb, rest})
                                    if (more) y += load_some(more + o, o1 - o);
                                store_some(at + o, y, o1 - o);
                            });
                });
            }
        };
        each_tile(tiles_of(x), 264, O, outputs, convolve_tiles, transform_weights);
    }
}

// Each thread owns a tile of dw and walks over all pixels; where tiles are few, a part, with its own sums.
static void convolution_weight_gradient(float* dw, Tensor dout, Tensor x) {
    enum { OUTPUTS = 64, INPUTS = 64, TILES = 128 };
    int C = x.C, O = dout.C, tiles = tiles_of(x);
    size_t size = (size_t)O * 9 * C;
    int parts = std::clamp((int)(SHARED_FLOATS / size), 1, std::min(8, tiles));
    float* sums = parts > 1 ? cpu_workspace : dw;  // (parts, O, 9, C)
    each_tile(ceil_div(O, OUTPUTS) * parts, 1, C, INPUTS, [&](int task, int, int c0, int c1) {
        int part = task % parts, o0 = task / parts * OUTPUTS, o1 = std::min(o0 + OUTPUTS, O);
        int begin = (int)((size_t)tiles * part / parts), end = (int)((size_t)tiles * (part + 1) / parts);
        int n = round_up(o1 - o0, VECTOR), k = round_up(c1 - c0, TILE_COLUMNS);
        size_t plane = plane_of(n, k), left_plane = plane_of(TILES, n), right_plane = plane_of(TILES, k);
        float *sum = thread_floats(), *left = sum + 16 * plane, *right = left + 16 * left_plane;
        for (int t0 = begin; t0 < end; t0 += TILES) {
            int t1 = std::min(t0 + TILES, end);
            transform_pixels<A>(left, left_plane, n, dout, t0, t1, o0, o1);
            transform_pixels<B_T>(right, right_plane, TILE_COLUMNS, x, t0, t1, c0, c1);
            for (int f = 0; f < 16; f++)
                matmul({o1 - o0, k, t1 - t0}, sum + f * plane, k, transposed(left + f * left_plane, n),
                       packed(right + f * right_plane, t1 - t0), t0 > begin);
        }
        for (int o = o0; o < o1; o++)
            for (int c = c0; c < c1; c += VECTOR) {
                const float* from = sum + (o - o0) * k + c - c0;
                float* to = sums + part * size + (size_t)o * 9 * C + c;
                transform<G_T>([&](int f) { return *(const Vector*)(from + f * plane); },
                               [&](int tap, Vector v) { store_some(to + tap * C, v, c1 - c); });
            }
    });
#pragma omp parallel for
    for (size_t i = 0; i < size * (parts > 1); i++) {
        dw[i] = sums[i];
        for (int part = 1; part < parts; part++) dw[i] += sums[part * size + i];
    }
}

// ---- linear layers, 1x1 and 3x3 convolutions --------------------------------------------------------------
enum { BAND = 252 };  // pixels of a task's products

static void conv3x3_forward(Tensor out, Joined x, Conv layer, Forward options) {
    PROFILE("3x3 forward", convolution_work(out.rows(), 9, x.C(), out.C));
    convolve(out, x.first, layer, false, options);
    if (out.moments) channel_moments(out);
}
static void conv3x3_backward_input(Tensor dx, Tensor dout, Conv layer, Backward options) {
    PROFILE("3x3 dX", convolution_work(dout.rows(), 9, dx.C, dout.C));
    convolve(dx, dout, {layer.w}, true, {.residual = options.accumulate ? dx : Tensor()});
    if (options.norm.affine) groupnorm_backward_sums(dx, dx, options.norm);
}
static void conv3x3_backward_weight(Conv layer, Tensor dout, Tensor x, Rows demb) {
    bias_backward(layer, demb, dout);
    PROFILE("3x3 dW", convolution_work(dout.rows(), 9, x.C, dout.C, sizeof(float)));
    convolution_weight_gradient(layer.dw, dout, x);
}

static void conv1x1_forward(Tensor out, Joined x, Linear layer, Forward options) {
    int M = out.rows(), O = out.C, K = x.C();
    PROFILE("1x1 forward", convolution_work(M, 1, K, O));
    bool fits = K <= THREAD_FLOATS / TILE_COLUMNS;  // or else matmul packs block by block
    auto weights = [&](int o0, int c) { return transposed(layer.w + (size_t)o0 * K + c, K); };
    auto pack = [&](int o0, int o1) { matmul_pack(thread_floats(), weights(o0, 0), fits * K, o1 - o0); };
    auto multiply_band = [&](int p0, int p1, int o0, int o1) {
        const float *bias = layer.bias, *residual = options.residual.data;
        for (size_t p = p0; p < (size_t)p1; p++)
            SIMD_FOR (int o = o0; o < o1; o++)
                out.data[p * O + o] = bias[o] + (residual ? residual[p * O + o] : 0.0f);
        float* target = out.data + (size_t)p0 * O + o0;
        for (int c : {0, x.first.C}) {
            Matrix w = fits ? packed(thread_floats() + c * TILE_COLUMNS, K) : weights(o0, c);
            matmul({p1 - p0, o1 - o0, x.of(c).C}, target, O, pixels_of(x.of(c), p0), w, true);
        }
    };
    int columns = std::clamp(THREAD_FLOATS / K / TILE_COLUMNS * TILE_COLUMNS, (int)TILE_COLUMNS, 128);
    each_tile(M, BAND, O, columns, multiply_band, pack);
    if (out.moments) channel_moments(out);
}
static void conv1x1_backward_input(Joined dx, Tensor dout, Linear layer, Backward options) {
    int O = dout.C, K = dx.C();
    PROFILE("1x1 dX", convolution_work(dout.rows(), 1, K, O));
    for (int first : {0, dx.first.C}) {
        const Tensor& of = dx.of(first);
        each_tile(of.C, 128, dout.rows(), BAND, [&](int c0, int c1, int p0, int p1) {  // band by band
            matmul({p1 - p0, c1 - c0, O}, of.data + (size_t)p0 * of.C + c0, of.C, pixels_of(dout, p0),
                   {layer.w + first + c0, K}, options.accumulate);
        });
    }
    if (options.norm.affine) groupnorm_backward_sums(dx.first, dx.first, options.norm);
}
static void conv1x1_backward_weight(Linear layer, Tensor dout, Joined x) {
    int M = dout.rows(), O = dout.C, K = x.C();
    bias_backward(layer, {}, dout);
    PROFILE("1x1 dW", convolution_work(M, 1, K, O, sizeof(float)));
    for (int first : {0, x.first.C}) {  // each thread owns a tile of dw and walks over all pixels
        const Tensor& of = x.of(first);
        each_tile(O, 48, of.C, 64, [&](int o0, int o1, int c0, int c1) {
            matmul({o1 - o0, c1 - c0, M}, layer.dw + (size_t)o0 * K + first + c0, K,
                   transposed(dout.data + o0, O), pixels_of(of, 0, c0), false);
        });
    }
}

static void linear_forward(Tensor out, Tensor x, Linear layer, Forward options) {
    conv1x1_forward(out, x, layer, options);
}
static void linear_backward_input(Tensor dx, Tensor dout, Linear layer) {
    conv1x1_backward_input(dx, dout, layer, {});
}
static void linear_backward_weight(Linear layer, Tensor dout, Tensor x) {
    conv1x1_backward_weight(layer, dout, x);
}

// ---- attention --------------------------------------------------------------------------------------------
static_assert(2 * MAX_ATTENTION_SIZE * MAX_ATTENTION_SIZE <= THREAD_FLOATS, "two rows of scores fit");

// work(b, head, t0, rows) for every image, head and band of rows of the score matrix, of which a thread holds
// so many at a time; a head's bands follow each other.
static void each_band(Tensor qkv, int heads, auto work) {
    int T = qkv.H * qkv.W, most = std::max(1, std::min(64, (int)THREAD_FLOATS / (2 * T)));
    each_tile(qkv.B, 1, heads, 1, [&](int b, int, int head, int) {
        for (int t0 = 0; t0 < T; t0 += most) work(b, head, t0, std::min(most, T - t0));
    });
}

static void attention_forward(Tensor out, float* lse, Tensor qkv, int heads) {
    int T = out.H * out.W, C = out.C, d = C / heads;
    PROFILE("attention forward", {4.0 * T * out.count(), 4.0 * sizeof(float) * out.count()});
    float scale = 1.0f / sqrtf((float)d);
    each_band(qkv, heads, [=](int b, int head, int t0, int rows) {
        const float *q = qkv.data + (size_t)b * T * 3 * C + head * d, *k = q + C, *v = q + 2 * C;
        float* scores = thread_floats();  // (rows, T)
        matmul({rows, T, d}, scores, T, {q + (size_t)t0 * 3 * C, 3 * C}, transposed(k, 3 * C), false);
        for (int i = 0; i < rows; i++) {
            float* s = scores + (size_t)i * T;
            float top = -FLT_MAX, sum = 0;
#pragma omp simd reduction(max : top)
            for (int j = 0; j < T; j++) top = s[j] > top ? s[j] : top;
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < T; j++) sum += s[j] = fast_exp(scale * (s[j] - top));
            float inverse = 1.0f / sum;
            SIMD_FOR (int j = 0; j < T; j++) s[j] *= inverse;
            lse[((size_t)b * heads + head) * T + t0 + i] = scale * top + logf(sum);
        }
        matmul({rows, d, T}, out.data + ((size_t)b * T + t0) * C + head * d, C, {scores, T}, {v, 3 * C},
               false);
    });
}

static void attention_backward(Tensor dqkv, Tensor dout, Tensor out, const float* lse, Tensor qkv,
                               int heads) {
    int T = out.H * out.W, C = out.C, d = C / heads;
    PROFILE("attention backward", {8.0 * T * out.count(), 8.0 * sizeof(float) * out.count()});
    float scale = 1.0f / sqrtf((float)d);
    each_band(qkv, heads, [=](int b, int head, int t0, int rows) {
        size_t at = (size_t)b * T * 3 * C + head * d, out_at = ((size_t)b * T + t0) * C + head * d;
        const float *q_rows = qkv.data + at + (size_t)t0 * 3 * C, *k = qkv.data + at + C, *v = k + C;
        const float *dout_rows = dout.data + out_at, *out_rows = out.data + out_at;
        float *dq_rows = dqkv.data + at + (size_t)t0 * 3 * C, *dk = dqkv.data + at + C, *dv = dk + C;
        float *p = thread_floats(), *ds = p + (size_t)rows * T;  // (rows, T) each
        matmul({rows, T, d}, p, T, {q_rows, 3 * C}, transposed(k, 3 * C), false);
        matmul({rows, T, d}, ds, T, {dout_rows, C}, transposed(v, 3 * C), false);
        for (int i = 0; i < rows; i++) {
            float D = 0, normaliser = lse[((size_t)b * heads + head) * T + t0 + i];
#pragma omp simd reduction(+ : D)
            for (int j = 0; j < d; j++) D += dout_rows[(size_t)i * C + j] * out_rows[(size_t)i * C + j];
            float *p_row = p + (size_t)i * T, *ds_row = ds + (size_t)i * T;
            SIMD_FOR (int j = 0; j < T; j++) {
                p_row[j] = fast_exp(scale * p_row[j] - normaliser);
                ds_row[j] = scale * p_row[j] * (ds_row[j] - D);
            }
        }
        matmul({rows, d, T}, dq_rows, 3 * C, {ds, T}, {k, 3 * C}, false);
        matmul({T, d, rows}, dk, 3 * C, transposed(ds, T), {q_rows, 3 * C}, t0 > 0);
        matmul({T, d, rows}, dv, 3 * C, transposed(p, T), {dout_rows, C}, t0 > 0);
    });
}

}  // namespace cpu
#endif

// ---- the machine ------------------------------------------------------------------------------------------
static size_t host_memory_available() {
    size_t kilobytes = 0, pages = 0;
    std::ifstream memory("/proc/meminfo"), own("/proc/self/statm");
    for (std::string word; memory >> word && word != "MemAvailable:";) continue;
    memory >> kilobytes, own >> pages;
    size_t share = kilobytes * 1024 / (world.forked ? world.size : 1);  // ranks of this machine
    rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur == RLIM_INFINITY) return share;
    size_t taken = pages * (size_t)sysconf(_SC_PAGESIZE);
    return std::min(share, limit.rlim_cur > taken ? (size_t)limit.rlim_cur - taken : 1);
}

#ifndef __CUDACC__
// (ranks, ranks): the socket by which the first talks with the second.
static std::vector<int> sockets;

static void backend_connect() {
    sockets.resize(world.size * world.size);
    for (int a = 0; a < world.size; a++)
        for (int b = 0; b < a; b++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
                fail("no sockets for %d processes to talk (%s): see ulimit -n", world.size, strerror(errno));
            sockets[a * world.size + b] = pair[0];
            sockets[b * world.size + a] = pair[1];
        }
}

// Of two ranks, the lower one sends first. Exchanges come one after the other: of those that are left, the one
// between the lowest ranks can always take place. Where the peer has died, this waits until its rank is ended.
static void backend_exchange(int peer, std::span<const std::byte> sent, std::span<std::byte> received) {
    int socket = sockets[world.rank * world.size + peer];
    for (bool sends : {world.rank < peer, world.rank > peer})
        while (sends ? sent.size() : received.size()) {
            ssize_t bytes = sends ? send(socket, sent.data(), sent.size(), 0)
                                  : recv(socket, received.data(), received.size(), 0);
            if (bytes < 0) fail("messages between processes: %s", strerror(errno));
            if (sends) sent = sent.subspan(bytes);
            else received = received.subspan(bytes);
        }
}
static void backend_together(auto exchanges) { exchanges(); }
static std::string backend_meet() {
    omp_set_num_threads(std::max(1, omp_get_max_threads() / world.size));
    return "sockets";
}
static void backend_part() {}
static std::string backend_name() {
    std::string threads = counted(omp_get_max_threads(), "thread");
    return text("the CPU: fp32, %s, vectors of %d", threads.c_str(), (int)cpu::VECTOR);
}
static void backend_init() {}
static void* backend_allocate(size_t bytes, bool) {
    if (void* memory = aligned_alloc(ALIGNMENT, aligned(bytes))) return memory;
    fail_to_allocate(bytes);
}
static void backend_free(void* memory, bool) { free(memory); }
static void backend_zero(void* memory, size_t bytes) { memset(memory, 0, bytes); }
static void backend_copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
static void backend_wait() {}

#ifndef LATE_SIDE_STREAM  // test_unet.cu has one that does everything as late as it may be done
static Event on_side_stream(auto launches) {
    launches();
    return {};
}
static void wait_for(Event) {}
#endif
static Event on_side_stream_deferred(auto launches) { return on_side_stream(launches); }
static void launch_graph(Graph*, auto launches) { launches(); }
static void record_event(int) {}
static void synchronize_event(int) {}
static double backend_peak() { return 0; }
static std::pair<int, int> head_channels() { return {1, INT_MAX}; }
static size_t backend_memory_available() { return host_memory_available(); }
static size_t workspace_bytes() { return cpu::cpu_workspace_bytes(); }
static void allocate_workspace() { cpu::allocate_cpu_workspace(); }
#endif
