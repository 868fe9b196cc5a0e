// unet_cpu.h: the layers on a CPU.
//
// Namespace cpu::plain is the specification of each layer: short loops that say its equation. The program calls the
// fast layers of namespace cpu, which have the same names. tests/network.cu compares the two, and tests/kernels.cu
// compares the GPU's kernels with the fast layers. Layers of independent elements are written once for both machines,
// as structs in train_unet.cu. That file declares all layers, with their shapes and sources, before it includes this.
#pragma once

#if !defined(__CUDACC__) || defined(TESTING)
namespace cpu {

// ---- the specification ------------------------------------------------------------------------------------
// Sums are doubles, except gradients to which several images or queries add. The declarations in train_unet.cu say what
// the sizes are and when a gradient is added to what is there.
namespace plain {

inline void each_pixel(Tensor x, auto work) {
    for (int b = 0; b < x.B; b++)
        for (int h = 0; h < x.H; h++)
            for (int w = 0; w < x.W; w++) work(b, h, w);
}

inline float& at(const Concat& x, int b, int h, int w, int c) {
    return *x.at(((size_t)b * x.first.H + h) * x.first.W + w, c);
}

// The same, and zero outside the image.
inline double padded(const Concat& x, int b, int h, int w, int c) {
    bool inside = h >= 0 && h < x.first.H && w >= 0 && w < x.first.W;
    return inside ? at(x, b, h, w, c) : 0;
}

// A convolution has a kernel of K x K weights, 3x3 or 1x1, for each output o and input c. Its weights are (O, K, K, C).
template <int K> size_t place(int o, int i, int j, int c, int C) { return ((size_t)(o * K + i) * K + j) * C + c; }

// F.conv2d(x, w, bias, padding="same") + emb[:, None, None, :] + residual
template <int K> void convolution_forward(Tensor out, Concat x, ConvLayer<K * K> layer, ForwardOptions options) {
    const int C = x.C();
    each_pixel(out, [&](int b, int h, int w) {
        for (int o = 0; o < out.C; o++) {
            double sum = layer.bias[o];
            for (int i = 0; i < K; i++)
                for (int j = 0; j < K; j++)
                    for (int c = 0; c < C; c++)
                        sum += padded(x, b, h + i - K / 2, w + j - K / 2, c) * layer.w[place<K>(o, i, j, c, C)];

            if (options.emb.data) sum += options.emb.row(b)[o];
            if (options.residual) sum += at(options.residual, b, h, w, o);
            at(out, b, h, w, o) = (float)sum;
        }
    });
}

// dx = [dx +] F.conv_transpose2d(dout, w, padding="same")
template <int K>
void convolution_backward_input(Concat dx, Tensor dout, ConvLayer<K * K> layer, BackwardOptions options) {
    const int C = dx.C();
    each_pixel(dout, [&](int b, int h, int w) {
        for (int c = 0; c < C; c++) {
            double sum = options.accumulate ? at(dx, b, h, w, c) : 0;
            for (int i = 0; i < K; i++)
                for (int j = 0; j < K; j++)
                    for (int o = 0; o < dout.C; o++)
                        sum += padded(dout, b, h + K / 2 - i, w + K / 2 - j, o) * layer.w[place<K>(o, i, j, c, C)];
            at(dx, b, h, w, c) = (float)sum;
        }
    });
}

// dw = the sum over all pixels of dout times x around the pixel, dbias = dout.sum((0, 1, 2)), demb = dout.sum((1, 2))
template <int K>
void convolution_backward_weight(ConvLayer<K * K> layer, Tensor dout, Concat x, Rows demb) {
    const int C = x.C();
    for (int o = 0; o < dout.C; o++) {
        std::vector<double> dw(K * K * C);
        double dbias = 0;
        for (int b = 0; b < dout.B; b++) {
            double sum = 0;
            for (int h = 0; h < dout.H; h++)
                for (int w = 0; w < dout.W; w++) {
                    double d = at(dout, b, h, w, o);
                    sum += d;
                    for (int i = 0; i < K; i++)
                        for (int j = 0; j < K; j++)
                            for (int c = 0; c < C; c++)
                                dw[place<K>(0, i, j, c, C)] += d * padded(x, b, h + i - K / 2, w + j - K / 2, c);
                }
            if (demb.data) demb.row(b)[o] = (float)sum;
            dbias += sum;
        }
        layer.dbias[o] = (float)dbias;
        std::copy(dw.begin(), dw.end(), layer.dw + place<K>(o, 0, 0, 0, C));
    }
}

inline constexpr auto conv3x3_forward = convolution_forward<3>;
inline constexpr auto conv3x3_backward_input = convolution_backward_input<3>;
inline constexpr auto conv3x3_backward_weight = convolution_backward_weight<3>;
inline constexpr auto conv1x1_forward = convolution_forward<1>;
inline constexpr auto conv1x1_backward_input = convolution_backward_input<1>;
inline void conv1x1_backward_weight(Linear layer, Tensor dout, Concat x) {
    convolution_backward_weight<1>(layer, dout, x, {});
}

inline double sigmoid(double y) { return 1 / (1 + exp(-y)); }

// Channels [c0, c1) of image b, whose pixels are [first, end), counted through the batch.
struct Group {
    const Norm& norm;
    int b, c0, c1;
    size_t first, end;
    double count, mean = 0, rstd = 0;

    Group(const Norm& norm, int b, int c0, int c1) : norm(norm), b(b), c0(c0), c1(c1) {
        first = (size_t)b * norm.x.first.T();
        end = first + norm.x.first.T();
        count = (double)(end - first) * (c1 - c0);

        for (size_t p = first; p < end; p++)
            for (int c = c0; c < c1; c++) mean += *norm.x.at(p, c) / count;
        double variance = 0;
        for (size_t p = first; p < end; p++)
            for (int c = c0; c < c1; c++) variance += pow(*norm.x.at(p, c) - mean, 2) / count;
        rstd = 1 / sqrt(variance + NORM_EPS);
    }

    // Modulation multiplies weight and bias by the gain, 1 + scale, and adds the shift.
    double gain(int c) const {
        if (!norm.modulation.data) return 1;
        return 1 + (double)norm.modulation.row(b)[c];
    }
    double shift(int c) const {
        if (!norm.modulation.data) return 0;
        return norm.modulation.row(b)[norm.x.C() + c];
    }
    double weight(int c) const { return norm.w[c] * gain(c); }

    double x_hat(size_t p, int c) const { return (*norm.x.at(p, c) - mean) * rstd; }
    double y(size_t p, int c) const { return x_hat(p, c) * weight(c) + norm.bias[c] * gain(c) + shift(c); }
};

inline void each_group(const Norm& norm, auto work) {
    int width = norm.x.C() / norm.groups;
    for (int g = 0; g < norm.groups; g++)
        for (int b = 0; b < norm.x.first.B; b++) work(Group(norm, b, g * width, (g + 1) * width));
}

// F.silu(F.group_norm(x, groups, w, bias)), or without F.silu
inline void groupnorm_silu_forward(Tensor out, const Norm& norm) {
    each_group(norm, [&](const Group& group) {
        for (size_t p = group.first; p < group.end; p++)
            for (int c = group.c0; c < group.c1; c++) {
                double y = group.y(p, c);
                out.data[p * out.C + c] = (float)(norm.silu ? y * sigmoid(y) : y);
            }
    });
}

// With dy the gradient before SiLU and x_hat = (x - mean) rstd:
//   dw = sum dy x_hat,  dbias = sum dy,  dx = rstd (w dy - mean(w dy) - x_hat mean(w dy x_hat))
inline void groupnorm_silu_backward(Concat dx, Tensor dout, const Norm& norm, BackwardOptions options) {
    const int C = dout.C;
    std::fill_n(norm.dw, C, 0.0f);
    std::fill_n(norm.dbias, C, 0.0f);

    each_group(norm, [&](const Group& group) {
        auto dy = [&](size_t p, int c) {
            double d = dout.data[p * C + c];
            double y = group.y(p, c);
            return norm.silu ? d * sigmoid(y) * (1 + y * (1 - sigmoid(y))) : d;
        };

        double mean_w_dy = 0, mean_w_dy_x_hat = 0;
        for (int c = group.c0; c < group.c1; c++) {
            double sum_dy = 0, sum_dy_x_hat = 0;
            for (size_t p = group.first; p < group.end; p++) {
                sum_dy += dy(p, c);
                sum_dy_x_hat += dy(p, c) * group.x_hat(p, c);
            }
            norm.dbias[c] += (float)(group.gain(c) * sum_dy);
            norm.dw[c] += (float)(group.gain(c) * sum_dy_x_hat);
            if (norm.dmodulation.data) {
                float* row = norm.dmodulation.row(group.b);
                row[c] = (float)(norm.w[c] * sum_dy_x_hat + norm.bias[c] * sum_dy);
                row[C + c] = (float)sum_dy;
            }
            mean_w_dy += group.weight(c) * sum_dy / group.count;
            mean_w_dy_x_hat += group.weight(c) * sum_dy_x_hat / group.count;
        }

        for (size_t p = group.first; p < group.end; p++)
            for (int c = group.c0; c < group.c1; c++) {
                double w_dy = group.weight(c) * dy(p, c);
                double d = group.rstd * (w_dy - mean_w_dy - group.x_hat(p, c) * mean_w_dy_x_hat);
                if (options.residual) d += options.residual.data[p * C + c];
                if (options.accumulate) d += *dx.at(p, c);
                *dx.at(p, c) = (float)d;
            }
    });
}

// Head h of image b, whose channels follow those of the heads before it in q, in k, in v and in the output.
struct Head {
    Tensor qkv;
    int b, h, d;
    float& of(Tensor x, int t, int c) const { return x.data[((size_t)b * x.T() + t) * x.C + h * d + c]; }
    double q(int t, int c) const { return of(qkv, t, c); }
    double k(int t, int c) const { return of(qkv, t, qkv.C / 3 + c); }
    double v(int t, int c) const { return of(qkv, t, 2 * qkv.C / 3 + c); }
    double score(int i, int j) const {
        double sum = 0;
        for (int c = 0; c < d; c++) sum += q(i, c) * k(j, c);
        return sum / sqrt((double)d);
    }
};

inline void each_head(Tensor qkv, int heads, auto work) {
    for (int b = 0; b < qkv.B; b++)
        for (int h = 0; h < heads; h++) work(Head{qkv, b, h, qkv.C / 3 / heads}, (size_t)b * heads + h);
}

// F.scaled_dot_product_attention(q, k, v), and lse = torch.logsumexp(q k^T / sqrt(d), dim=-1)
inline void attention_forward(Tensor out, float* lse, Tensor qkv, int heads) {
    const int T = out.T();
    each_head(qkv, heads, [&](Head head, size_t index) {
        for (int i = 0; i < T; i++) {
            std::vector<double> sum(head.d);
            double denominator = 0;
            for (int j = 0; j < T; j++) {
                double e = exp(head.score(i, j));
                denominator += e;
                for (int c = 0; c < head.d; c++) sum[c] += e * head.v(j, c);
            }
            for (int c = 0; c < head.d; c++) head.of(out, i, c) = (float)(sum[c] / denominator);
            lse[index * T + i] = (float)log(denominator);
        }
    });
}

// With probabilities P = exp(q k^T / sqrt(d) - lse) and D_i = sum_j dout_ij out_ij:
//   dV = P^T dout,  dS = P (dout V^T - D),  dQ = dS K / sqrt(d),  dK = dS^T Q / sqrt(d)
inline void attention_backward(Tensor dqkv, Tensor dout, Tensor out, const float* lse, Tensor qkv,
                               int heads) {
    const int T = out.T(), C = out.C;
    std::fill_n(dqkv.data, dqkv.count(), 0.0f);
    each_head(qkv, heads, [&](Head head, size_t index) {
        for (int i = 0; i < T; i++)
            for (int j = 0; j < T; j++) {
                double p = exp(head.score(i, j) - lse[index * T + i]);
                double dp = 0;  // (dout V^T)_ij - D_i
                for (int c = 0; c < head.d; c++)
                    dp += head.of(dout, i, c) * (head.v(j, c) - head.of(out, i, c));
                double ds = p * dp / sqrt((double)head.d);

                for (int c = 0; c < head.d; c++) {
                    head.of(dqkv, i, c) += (float)(ds * head.k(j, c));
                    head.of(dqkv, j, C + c) += (float)(ds * head.q(i, c));
                    head.of(dqkv, j, 2 * C + c) += (float)(p * head.of(dout, i, c));
                }
            }
    });
}

}  // namespace plain

// ---- threads ----------------------------------------------------------------------------------------------
// REGISTER_FOR unrolls a loop over an array of vectors, so that these stay in registers. SIMD_FOR lets the compiler do
// several rounds at once, as the elements of a vector.
#define REGISTER_FOR(...) _Pragma("GCC unroll 16") for (__VA_ARGS__)
#define SIMD_FOR(...) _Pragma("omp simd") for (__VA_ARGS__)

#ifndef NETWORK_ONLY
// A layer's work is cut into pieces. Each thread has a share of them, neighbours, which it does one after the other,
// and then it helps with the shares of others. So a thread mostly works on what its cache holds from the layer before,
// and nobody waits for a thread that the system has put aside for another program, unless that thread is in the
// middle of a piece. The thread that brings the work has a share too, and goes on when all pieces are finished.
// The result of a piece does not depend on the thread that does it.
enum { MAX_THREADS = 1024 };
struct alignas(64) Share {
    std::atomic<uint64_t> left = 0;  // the pieces [first, end) that nobody has claimed: end is the upper half
};
struct SharedWork {
    Share shares[MAX_THREADS];
    std::atomic<int> unfinished = 0;  // pieces
    std::atomic<int> number = 0;      // of this work: how many came before

    // What a thread does with its pieces, from the first that it has claimed on. Both stay as they are until every
    // piece is finished.
    void (*job)(void* context, int piece) = nullptr;
    void* context = nullptr;
};
static SharedWork shared_work;
static thread_local int thread_number = 0;  // 0: the thread that brings the work
static int started_threads = 1;
static int used_threads = 0;  // 0: nobody has asked yet

// The number of the piece that the calling thread is now to do, or -1 where all are claimed.
static int claim_piece() {
    for (int i = 0; i < used_threads; i++) {
        Share& share = shared_work.shares[(thread_number + i) % used_threads];
        uint64_t left = share.left.load(std::memory_order_acquire);
        while (true) {
            uint32_t first = (uint32_t)left;
            uint32_t end = (uint32_t)(left >> 32);
            if (first >= end) break;
            if (share.left.compare_exchange_weak(left, left + 1, std::memory_order_acquire)) return (int)first;
        }
    }
    return -1;
}

// The same for a thread that is done with a piece. It claims before it says so, because other work may begin once all
// pieces are finished.
static int claim_next_piece() {
    int piece = claim_piece();
    if (shared_work.unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) shared_work.unfinished.notify_one();
    return piece;
}

// The cores that this process may use, which can be fewer than there are.
static int usable_cores() {
#ifdef __linux__
    cpu_set_t usable;
    if (sched_getaffinity(0, sizeof usable, &usable) == 0) return CPU_COUNT(&usable);
#endif
    return (int)std::thread::hardware_concurrency();
}

// The threads that layers use. OMP_NUM_THREADS sets their number, as in programs that use OpenMP.
static int thread_count() {
    if (used_threads) return used_threads;

    int wanted = 0;
    if (const char* asked = getenv("OMP_NUM_THREADS")) wanted = atoi(asked);
    if (wanted <= 0) wanted = usable_cores();
    used_threads = std::clamp(wanted, 1, (int)MAX_THREADS);
    return used_threads;
}

// Waits while a number is `old`: up to a millisecond at full speed, because the next piece often comes at once, and
// then asleep, so that another program may have the core. With a tenth of these SPINS a step of the preset tiny takes
// 10% longer with 16 threads of a Xeon, and where another program has a core, a step gains nothing by it.
static void wait_while(const std::atomic<int>& number, int old) {
    enum { SPINS = 20000 };
    for (int spin = 0; spin < SPINS; spin++) {
        if (number.load(std::memory_order_acquire) != old) return;
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
    number.wait(old, std::memory_order_acquire);
}

// What a helping thread of this number does until the program ends.
[[noreturn]] static void help_forever(int number) {
    thread_number = number;
    int seen = 0;  // the number of the last work
    while (true) {
        wait_while(shared_work.number, seen);
        seen = shared_work.number.load(std::memory_order_acquire);
        if (number >= used_threads) continue;

        int piece = claim_piece();
        if (piece >= 0) shared_work.job(shared_work.context, piece);
    }
}

// Starts the threads with the first work that there is, so that ranks can be forked before.
static void start_threads() {
    try {
        while (started_threads < thread_count()) {
            std::thread(help_forever, started_threads).detach();
            started_threads++;
        }
    } catch (const std::system_error&) {
        used_threads = started_threads;  // the system gives no more
    }
}

// Does `count` pieces of work: every thread that has claimed one calls job(piece), which goes on with
// claim_next_piece() until that is -1.
static void share_work(int count, auto job) {
    if (count <= 0) return;
    start_threads();

    shared_work.job = [](void* context, int piece) { (*(decltype(job)*)context)(piece); };
    shared_work.context = &job;
    shared_work.unfinished.store(count, std::memory_order_relaxed);
    for (int t = 0; t < used_threads; t++) {
        uint64_t first = (uint64_t)count * t / used_threads;
        uint64_t end = (uint64_t)count * (t + 1) / used_threads;
        shared_work.shares[t].left.store(end << 32 | first, std::memory_order_release);
    }
    shared_work.number.fetch_add(1, std::memory_order_release);
    if (count > 1 && used_threads > 1) shared_work.number.notify_all();

    if (int piece = claim_piece(); piece >= 0) job(piece);
    while (int left = shared_work.unfinished.load(std::memory_order_acquire))
        wait_while(shared_work.unfinished, left);
}
#else
// One thread does all the pieces, one after the other: a browser runs several such programs beside each other.
static const int thread_number = 0;
static int thread_count() { return 1; }
static int next_piece = 0, piece_count = 0;
static int claim_next_piece() { return next_piece < piece_count ? next_piece++ : -1; }
static void share_work(int count, auto job) {
    next_piece = 0;
    piece_count = count;
    if (int piece = claim_next_piece(); piece >= 0) job(piece);
}
#endif

// Deals out an output (M, N) to the threads in tiles, for each of which it calls work(m0, m1, n0, n1). Before a
// thread's first tile of some columns it calls prepare(n0, n1), which puts their weights into the thread's scratch. A
// tile's size depends on shapes alone.
static void each_tile(int M, int rows, int N, int columns, auto work, auto prepare) {
    int tiles_down = ceil_div(M, rows);
    share_work(tiles_down * ceil_div(N, columns), [&](int piece) {
        int prepared = -1;
        for (; piece >= 0; piece = claim_next_piece()) {
            int m = piece % tiles_down * rows;
            int n = piece / tiles_down * columns;
            int end = std::min(n + columns, N);
            if (prepared != n) prepare(n, end);
            prepared = n;
            work(m, std::min(m + rows, M), n, end);
        }
    });
}

static void each_tile(int M, int rows, int N, int columns, auto work) {
    each_tile(M, rows, N, columns, work, [](int, int) {});
}

// Deals out n items that don't depend on each other, at least `least` at a time, by calls of work(first, end).
static void each_range(size_t n, size_t least, auto work) {
    enum { MOST_RANGES = 64 };
    size_t length = std::max(least, n / MOST_RANGES + 1);
    share_work(ceil_div(n, length), [&](int piece) {
        for (; piece >= 0; piece = claim_next_piece()) work(piece * length, std::min(n, (piece + 1) * length));
    });
}

// A layer that is written once, as a struct: see section 3 of train_unet.cu.
template <typename Layer> static void run(Layer layer) {
    PROFILE(layer);
    if constexpr (requires { Layer::THREADS; }) {
        each_range(layer.items(), 1, [=](size_t first, size_t end) {
            for (size_t i = first; i < end; i++) layer(Team{(int)i, 0, 1});
        });
    } else if constexpr (requires { requires Layer::N > 1; }) {  // an item is a vector already
        each_range(layer.items(), 1024, [=](size_t first, size_t end) {
            for (size_t i = first; i < end; i++) layer(i);
        });
    } else {
        each_range(layer.items(), 1024, [=](size_t first, size_t end) {
            SIMD_FOR (size_t i = first; i < end; i++) layer(i);
        });
    }
}

// ---- the workspace of the threads -------------------------------------------------------------------------
// SHARED_FLOATS      what a layer's threads share: partial sums of a weight gradient
// then for each thread
//     THREAD_FLOATS  a layer's scratch: operands of a convolution, or attention scores
//     KC * NC        matmul's: a block of its right operand, as packed panels
enum { SHARED_FLOATS = 1 << 20, THREAD_FLOATS = 1 << 19, KC = 256, NC = 512 };
enum { SCRATCH_FLOATS = THREAD_FLOATS + KC * NC };
static float* cpu_workspace;

static float* thread_floats() {
    return cpu_workspace + SHARED_FLOATS + (size_t)thread_number * SCRATCH_FLOATS;
}

static size_t cpu_workspace_bytes() {
    return sizeof(float) * (SHARED_FLOATS + (size_t)thread_count() * SCRATCH_FLOATS);
}

static void allocate_cpu_workspace() {
    if (!cpu_workspace) cpu_workspace = (float*)backend_allocate(cpu_workspace_bytes(), true);
}

// ---- vectors ----------------------------------------------------------------------------------------------
// matmul's register tile: 12 x 2 vectors fill 24 of AVX-512's 32 registers, 6 x 2 fill 12 of AVX2's 16. WebAssembly has
// as many as AVX2, and its compiler needs some for itself: in Node 20 on an EPYC a call of the preset tiny takes 9.4 ms
// with 4 x 2, 10 with 3 x 2 and 12 with 6 x 2.
#if defined(__AVX512F__)
enum { VECTOR = 16, TILE_ROWS = 12 };
#elif defined(__wasm_simd128__)
enum { VECTOR = 4, TILE_ROWS = 4 };
#else
enum { VECTOR = 8, TILE_ROWS = 6 };
#endif
enum { TILE_COLUMNS = 2 * VECTOR };
typedef float Vector __attribute__((vector_size(VECTOR * sizeof(float)), aligned(4)));  // loaded from anywhere

static int round_up(int n, int unit) { return ceil_div(n, unit) * unit; }

// These load and store only the first n elements of a vector, where n is less than VECTOR. The others are loaded as 0.
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

// ---- matrix product ---------------------------------------------------------------------------------------
// An operand of a product, in memory.
struct Matrix {
    const float* data;
    // The distances from an element to those of the next row and column. A matrix that matmul_pack wrote has `column`
    // 0, and `row` is the number of its panels' rows.
    ptrdiff_t row, column = 1;

    Matrix from(int i, int j) const { return {data + i * row + j * column, row, column}; }
};
static Matrix transposed(const float* data, int ld) { return {data, 1, ld}; }
static Matrix transposed(Matrix m) { return {m.data, m.column, m.row}; }
static Matrix packed(const float* panels, int rows) { return {panels, rows, 0}; }

// Channel c of pixel p, counted through the batch, and the pixels and channels from there on as a matrix.
static float* element(Tensor x, size_t p, int c) { return x.data + p * x.C + c; }
static Matrix pixels_of(Tensor x, size_t p = 0, int c = 0) { return {element(x, p, c), x.C}; }

#ifdef __wasm_simd128__
// Writes four columns of four numbers, which lie `ld` apart, as the beginnings of four rows of a panel.
static void pack_transposed(float* panel, const float* from, ptrdiff_t ld) {
    Vector a = *(const Vector*)from;
    Vector b = *(const Vector*)(from + ld);
    Vector c = *(const Vector*)(from + 2 * ld);
    Vector d = *(const Vector*)(from + 3 * ld);
    Vector ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    Vector cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    Vector ab_below = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    Vector cd_below = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    *(Vector*)panel = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    *(Vector*)(panel + TILE_COLUMNS) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    *(Vector*)(panel + 2 * TILE_COLUMNS) = __builtin_shufflevector(ab_below, cd_below, 0, 1, 4, 5);
    *(Vector*)(panel + 3 * TILE_COLUMNS) = __builtin_shufflevector(ab_below, cd_below, 2, 3, 6, 7);
}
#endif

// Writes a row of a panel: `width` elements, which lie `column` apart, and zeros behind them.
static void pack_row(float* panel, const float* row, ptrdiff_t column, int width) {
    if (width < TILE_COLUMNS) {
        SIMD_FOR (int j = 0; j < TILE_COLUMNS; j++) panel[j] = j < width ? row[j * column] : 0;
    } else if (column == 1) {
        memcpy(panel, row, TILE_COLUMNS * sizeof(float));
    } else {
        SIMD_FOR (int j = 0; j < TILE_COLUMNS; j++) panel[j] = row[j * column];
    }
}

// Writes b (K, N) as panels (N / TILE_COLUMNS, K, TILE_COLUMNS), with zeros behind column N.
static void matmul_pack(float* panels, Matrix b, int K, int N) {
    for (int n = 0; n < N; n += TILE_COLUMNS) {
        int width = std::min((int)TILE_COLUMNS, N - n);
        int k = 0;
#ifdef __wasm_simd128__
        for (; b.row == 1 && width == TILE_COLUMNS && k + VECTOR <= K; k += VECTOR) {
            for (int j = 0; j < TILE_COLUMNS; j += VECTOR) pack_transposed(panels + j, b.from(k, n + j).data, b.column);
            panels += VECTOR * TILE_COLUMNS;
        }
#endif
        for (; k < K; k++) {
            pack_row(panels, b.from(k, n).data, b.column, width);
            panels += TILE_COLUMNS;
        }
    }
}

// c (R, TILE_COLUMNS), its rows ldc apart, = [c +] a (R, K) times panel (K, TILE_COLUMNS).
template <int R> static void multiply_tile(float* c, int ldc, Matrix a, const float* panel, int K, bool add) {
    Vector left[R] = {}, right[R] = {};
    REGISTER_FOR (int r = 0; r < R; r++) {
        __builtin_prefetch(c + r * ldc, 1);
        __builtin_prefetch(c + r * ldc + VECTOR, 1);
    }

    for (int k = 0; k < K; k++) {
        Vector b_left = *(const Vector*)panel;
        Vector b_right = *(const Vector*)(panel + VECTOR);
        REGISTER_FOR (int r = 0; r < R; r++) {
            left[r] += a.data[r * a.row] * b_left;
            right[r] += a.data[r * a.row] * b_right;
        }
        a.data += a.column;
        panel += TILE_COLUMNS;
    }

    REGISTER_FOR (int r = 0; r < R; r++) {
        Vector& c_left = *(Vector*)c;
        Vector& c_right = *(Vector*)(c + VECTOR);
        c_left = add ? c_left + left[r] : left[r];
        c_right = add ? c_right + right[r] : right[r];
        c += ldc;
    }
}

// c (M, columns) = [c +] a (M, K) times the first columns of panel (K, TILE_COLUMNS). The number of rows of a tile is a
// constant, so that the compiler can inline multiply_tile: WebAssembly passes a Matrix in memory, and waiting for that
// takes 8% of a call of the preset tiny in Node 20 on an EPYC.
static void multiply_panel(float* c, int ldc, int M, int columns, Matrix a, const float* panel, int K,
                           bool add) {
    int m = 0;
    auto multiply_rows = [&](auto rows) {
        for (; m + rows <= M; m += rows) {
            float* target = c + (size_t)m * ldc;
            if (columns >= TILE_COLUMNS) {
                multiply_tile<rows>(target, ldc, a.from(m, 0), panel, K, add);
                continue;
            }

            float whole[rows * TILE_COLUMNS];
            multiply_tile<rows>(whole, TILE_COLUMNS, a.from(m, 0), panel, K, false);
            for (int r = 0; r < rows; r++)
                for (int j = 0; j < columns; j++) {
                    float& element = target[r * ldc + j];
                    float before = add ? element : 0;
                    element = whole[r * TILE_COLUMNS + j] + before;
                }
        }
    };
    multiply_rows(std::integral_constant<int, TILE_ROWS>());
    multiply_rows(std::integral_constant<int, 4>());
    multiply_rows(std::integral_constant<int, 1>());
}

struct MatmulSize {
    int M, N, K;
};
// c (M, N), its rows ldc apart, = [c +] a (M, K) b (K, N). It runs on the calling thread; layers call it from
// their parallel loops. The order of a sum depends on K alone: a long one is added up block by block.
static void matmul(MatmulSize size, float* c, int ldc, Matrix a, Matrix b, bool accumulate) {
    float* panels = thread_floats() + THREAD_FLOATS;  // (NC / TILE_COLUMNS, KC, TILE_COLUMNS)
    bool is_packed = !b.column;

    for (int n0 = 0; n0 < size.N; n0 += NC) {
        int block_n = std::min((int)NC, size.N - n0);
        for (int k0 = 0; k0 < size.K; k0 += KC) {
            int block_k = std::min((int)KC, size.K - k0);
            if (!is_packed) matmul_pack(panels, b.from(k0, n0), block_k, block_n);

            for (int n = 0; n < block_n; n += TILE_COLUMNS) {
                const float* panel = panels + (size_t)n * block_k;
                if (is_packed) panel = b.data + (n0 + n) * b.row + k0 * TILE_COLUMNS;
                multiply_panel(c + n0 + n, ldc, size.M, block_n - n, a.from(0, k0), panel, block_k,
                               accumulate || k0);
            }
        }
    }
}

// ---- bias gradient ----------------------------------------------------------------------------------------
// dbias is a product of ones with dout, an image at a time.
static void bias_backward(const auto& layer, Rows per_image, Tensor dout) {
    PROFILE("bias gradient", {0, (double)sizeof(float) * dout.count()});
    each_tile(1, 1, dout.C, TILE_COLUMNS, [&](int, int, int o0, int o1) {
        const float one = 1;
        const Matrix ones = {&one, 0, 0};  // on the left, distances of 0 make every element the same one
        float image[TILE_COLUMNS];
        double total[TILE_COLUMNS] = {};
        for (int b = 0; b < dout.B; b++) {
            matmul({1, o1 - o0, dout.T()}, image, 0, ones, pixels_of(dout, b * dout.T(), o0), false);
            for (int o = o0; o < o1; o++) {
                total[o - o0] += image[o - o0];
                if (per_image.data) per_image.row(b)[o] = image[o - o0];
            }
        }
        for (int o = o0; o < o1; o++) layer.dbias[o] = (float)total[o - o0];
    });
}

// ---- group norm + SiLU ------------------------------------------------------------------------------------
// Channels are added up in blocks: many at once, in registers, which takes a loop of fixed length.
enum { CHANNEL_BLOCK = 64 };

// A block of channels [c, c + n) of x in one tile of an image, pixels [t0, t1) of image b.
struct ChannelBlock {
    const Concat& x;
    int b, t0, t1, c;

    int T() const { return x.first.T(); }
    size_t pixel(int t) const { return (size_t)b * T() + t; }
    const float* row(int t) const { return x.at(pixel(t), c); }
    // Where the block's sums begin in an array (B, norm_tiles(T), C).
    size_t partial() const { return ((size_t)b * norm_tiles(T()) + t0 / NORM_TILE) * x.C() + c; }
};

// Calls work(block, n) for every block of x. A block lies in one of x's two tensors. The compiler knows n where it is
// CHANNEL_BLOCK or half of it; for the few channels that remain n is an int.
static void each_channel_block(const Concat& x, auto work) {
    each_tile(x.first.B, 1, x.first.T(), NORM_TILE, [&](int b, int, int t0, int t1) {
        int n = 0;
        for (int c = 0; c < x.C(); c += n) {
            ChannelBlock block = {x, b, t0, t1, c};
            n = std::min((int)CHANNEL_BLOCK, x.of(c).C - x.within(c));
            if (n == CHANNEL_BLOCK) work(block, std::integral_constant<int, CHANNEL_BLOCK>());
            else if (n == CHANNEL_BLOCK / 2) work(block, std::integral_constant<int, CHANNEL_BLOCK / 2>());
            else work(block, n);
        }
    });
}

static void channel_moments(Tensor x) {
    PROFILE("group norm sums", {0, 1.0 * sizeof(float) * x.count()});
    each_channel_block(x, [&](ChannelBlock block, auto n) {
        const float* pivot = block.row(block.t0);  // sums are of x - pivot, so that little cancels
        float sum[CHANNEL_BLOCK] = {}, squares[CHANNEL_BLOCK] = {};
        for (int t = block.t0; t < block.t1; t++) {
            const float* x_t = block.row(t);
            SIMD_FOR (int k = 0; k < n; k++) {
                float d = x_t[k] - pivot[k];
                sum[k] += d;
                squares[k] += d * d;
            }
        }

        Moments* moments = x.moments + block.partial();
        for (int k = 0; k < n; k++) {
            float shift = sum[k] / (block.t1 - block.t0);
            moments[k] = {pivot[k] + shift, std::max(0.0f, squares[k] - sum[k] * shift)};
        }
    });
}

// The norm of a block of channels is x scale + shift, and x_hat is x slope + offset.
struct NormMap {
    float slope[CHANNEL_BLOCK], offset[CHANNEL_BLOCK], scale[CHANNEL_BLOCK], shift[CHANNEL_BLOCK];
    bool silu;

    NormMap(const Norm& norm, const ChannelBlock& block, int n) : silu(norm.silu) {
        const int halves = silu ? 2 : 1;  // that make the whole
        for (int k = 0; k < n; k++) {
            size_t at = (size_t)block.b * norm.x.C() + block.c + k;
            GroupStatistics group = norm.statistics[at];
            slope[k] = group.rstd;
            offset[k] = -group.mean * group.rstd;
            ScaleShift half = norm.half_scale_shift[at];
            scale[k] = halves * half.scale;
            shift[k] = halves * half.shift;
        }
    }
    float normed(float x, int k) const {
        float y = x * scale[k] + shift[k];
        return silu ? y * sigmoid(y) : y;
    }
};

// Merges the moments of a group's channels [c0, c1) and tiles as Chan, Golub and LeVeque (1979) do.
static GroupStatistics group_statistics(const Concat& x, int b, int c0, int c1) {
    int T = x.first.T();
    int tiles = norm_tiles(T);
    double n = 0, mean = 0, squares = 0;
    for (int tile = 0; tile < tiles; tile++)
        for (int c = c0; c < c1; c++) {
            Moments more = x.moments((size_t)b * tiles + tile, c);
            double pixels = std::min((int)NORM_TILE, T - tile * NORM_TILE);
            double delta = more.mean - mean;
            n += pixels;
            mean += delta * pixels / n;
            squares += more.squares + delta * delta * pixels * (n - pixels) / n;
        }
    return {(float)mean, (float)(1.0 / sqrt(squares / n + NORM_EPS))};
}

static void groupnorm_forward(Tensor out, const Norm& norm) {
    PROFILE("group norm forward", {0, 2.0 * sizeof(float) * out.count()});
    assert(norm.x.first.moments && (norm.x.second.moments || !norm.x.second));
    int C = out.C;
    each_tile(out.B, 1, C, C / norm.groups, [&](int b, int, int c0, int c1) {
        GroupStatistics group = group_statistics(norm.x, b, c0, c1);
        float half = norm.silu ? 0.5f : 1;
        for (int c = c0; c < c1; c++) {
            ScaleShift modulated = norm.modulated(b, c);
            float scale = group.rstd * modulated.scale;
            float shift = modulated.shift - group.mean * scale;
            norm.statistics[(size_t)b * C + c] = group;
            norm.half_scale_shift[(size_t)b * C + c] = {half * scale, half * shift};
        }
    });

    each_channel_block(norm.x, [&](ChannelBlock block, auto n) {
        NormMap map(norm, block, n);
        for (int t = block.t0; t < block.t1; t++) {
            const float* x_t = block.row(t);
            float* target = out.data + block.pixel(t) * C + block.c;
            SIMD_FOR (int k = 0; k < n; k++) target[k] = map.normed(x_t[k], k);
        }
    });
}

static Concat groupnorm_for_conv3x3(Tensor normed, const Norm& norm, int) {
    groupnorm_forward(normed, norm);
    return normed;
}

static void groupnorm_backward_sums(Tensor dy, Tensor dout, const Norm& norm) {
    PROFILE("group norm sums", {0, 3.0 * sizeof(float) * dy.count()});
    each_channel_block(norm.x, [&](ChannelBlock block, auto n) {
        NormMap map(norm, block, n);
        float sum_dy[CHANNEL_BLOCK] = {}, sum_dy_x_hat[CHANNEL_BLOCK] = {};
        for (int t = block.t0; t < block.t1; t++) {
            const float* x_t = block.row(t);
            size_t at = block.pixel(t) * dy.C + block.c;
            float d[CHANNEL_BLOCK];
            std::copy_n(dout.data + at, (int)n, d);
            if (norm.silu)
                SIMD_FOR (int k = 0; k < n; k++) d[k] *= silu_gradient(x_t[k] * map.scale[k] + map.shift[k]);
            SIMD_FOR (int k = 0; k < n; k++) {
                sum_dy[k] += d[k];
                sum_dy_x_hat[k] += d[k] * (x_t[k] * map.slope[k] + map.offset[k]);
            }
            std::copy_n(d, (int)n, dy.data + at);
        }

        NormSums* sums = norm.sums + block.partial();
        for (int k = 0; k < n; k++) sums[k] = {sum_dy[k], sum_dy_x_hat[k]};
    });
}

static void groupnorm_backward_weight(Tensor dy, const Norm& norm) {
    int tiles = norm_tiles(dy.T());
    each_range(dy.C, 16, [&](size_t first, size_t end) {
        for (size_t c = first; c < end; c++) {
            double dw = 0, dbias = 0;
            for (int i = 0; i < dy.B * tiles; i++) {
                double gain = norm.gain(i / tiles, (int)c);
                NormSums sums = norm.sums[(size_t)i * dy.C + c];
                dbias += gain * sums.dy;
                dw += gain * sums.dy_x_hat;
            }
            norm.dw[c] = (float)dw;
            norm.dbias[c] = (float)dbias;
        }
    });
}

// Overwrites the sums of an image's first tile by the group's means of w dy and of w dy x_hat.
static void groupnorm_backward_means(Tensor dy, const Norm& norm) {
    int C = dy.C, T = dy.T();
    int width = C / norm.groups;
    int tiles = norm_tiles(T);
    each_tile(dy.B, 1, C, width, [&](int b, int, int c0, int c1) {
        double w_dy = 0, w_dy_x_hat = 0;
        NormSums* sums = norm.sums + (size_t)b * tiles * C;
        for (int tile = 0; tile < tiles; tile++)
            for (int c = c0; c < c1; c++) {
                double weight = norm.w[c] * norm.gain(b, c);
                w_dy += weight * sums[(size_t)tile * C + c].dy;
                w_dy_x_hat += weight * sums[(size_t)tile * C + c].dy_x_hat;
            }
        NormSums means = {(float)(w_dy / T / width), (float)(w_dy_x_hat / T / width)};
        std::fill(sums + c0, sums + c1, means);
    });
}

static void groupnorm_backward(Concat dx, Tensor normed, Tensor dy, const Norm& norm, BackwardOptions options) {
    PROFILE("group norm backward",
            {0, (4.0 + !!options.residual + options.accumulate) * sizeof(float) * dy.count()});
    groupnorm_backward_weight(dy, norm);
    groupnorm_backward_means(dy, norm);

    int C = dy.C;
    int tiles = norm_tiles(dy.T());
    each_channel_block(norm.x, [&](ChannelBlock block, auto n) {
        NormMap map(norm, block, n);
        NormSums mean[CHANNEL_BLOCK];
        std::copy_n(norm.sums + (size_t)block.b * tiles * C + block.c, (int)n, mean);
        const Tensor& target = dx.of(block.c);
        for (int t = block.t0; t < block.t1; t++) {
            const float* x_t = block.row(t);
            const float* dy_t = dy.data + block.pixel(t) * C + block.c;
            float again[CHANNEL_BLOCK];  // the norm's output, stored last because normed may be dy, and dx may be x
            SIMD_FOR (int k = 0; k < n; k++) again[k] = map.normed(x_t[k], k);

            size_t at = block.pixel(t) * target.C + dx.within(block.c);
            SIMD_FOR (int k = 0; k < n; k++) {
                float x_hat = x_t[k] * map.slope[k] + map.offset[k];
                float d = map.scale[k] * dy_t[k] - map.slope[k] * (mean[k].dy + x_hat * mean[k].dy_x_hat);
                if (options.residual) d += options.residual.data[at + k];
                target.data[at + k] = options.accumulate ? target.data[at + k] + d : d;
            }
            std::copy_n(again, (int)n, normed.data + block.pixel(t) * C + block.c);
        }
    });
}

// ---- 3x3 convolutions by Winograd's algorithm --------------------------------------------------------------
// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016). The output is cut into tiles y. With x
// the patch of the input around a tile, which is a pixel larger on each side,
//   y = A^T ((G w G^T) * (B^T x B)) A,   dw = G^T ((A dy A^T) * (B^T x B)) G
// where * multiplies element by element. Over all tiles and channels these are matrix products, one for each element
// of a transformed patch.
//
// With tiles of 2x2 pixels, F(2x2, 3x3), a tile takes 16 multiplications instead of 36. With tiles of 4x4, F(4x4, 3x3),
// it takes 36 instead of 144, but more additions, and the rounding error is three times as large. WebAssembly has tiles
// of 4x4: products take longest there, and it only draws, with weights that are rounded anyway.
#ifdef __wasm_simd128__
enum { TILE = 4 };
static constexpr float B_T[6][6] = {{4, 0, -5, 0, 1, 0},  {0, -4, -4, 1, 1, 0}, {0, 4, -4, -1, 1, 0},
                                    {0, -2, -1, 2, 1, 0}, {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}};
static constexpr float G[6][3] = {{1 / 4.0f, 0, 0},
                                  {-1 / 6.0f, -1 / 6.0f, -1 / 6.0f},
                                  {-1 / 6.0f, 1 / 6.0f, -1 / 6.0f},
                                  {1 / 24.0f, 1 / 12.0f, 1 / 6.0f},
                                  {1 / 24.0f, -1 / 12.0f, 1 / 6.0f},
                                  {0, 0, 1}};
static constexpr float G_T[3][6] = {{1 / 4.0f, -1 / 6.0f, -1 / 6.0f, 1 / 24.0f, 1 / 24.0f, 0},
                                    {0, -1 / 6.0f, 1 / 6.0f, 1 / 12.0f, -1 / 12.0f, 0},
                                    {0, -1 / 6.0f, -1 / 6.0f, 1 / 6.0f, 1 / 6.0f, 1}};
static constexpr float A[6][4] = {{1, 0, 0, 0},  {1, 1, 1, 1},   {1, -1, 1, -1},
                                  {1, 2, 4, 8}, {1, -2, 4, -8}, {0, 0, 0, 1}};
static constexpr float A_T[4][6] = {{1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}};
#define PATCH_FOR(...) for (__VA_ARGS__)  // line by line: a patch has more vectors than there are registers
#else
enum { TILE = 2 };
static constexpr float B_T[4][4] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
static constexpr float G[4][3] = {{1, 0, 0}, {0.5f, 0.5f, 0.5f}, {0.5f, -0.5f, 0.5f}, {0, 0, 1}};
static constexpr float G_T[3][4] = {{1, 0.5f, 0.5f, 0}, {0, 0.5f, -0.5f, 0}, {0, 0.5f, 0.5f, 1}};
static constexpr float A[4][2] = {{1, 0}, {1, 1}, {1, -1}, {0, -1}};
static constexpr float A_T[2][4] = {{1, 1, 1, 0}, {0, 1, -1, -1}};
#define PATCH_FOR(...) REGISTER_FOR (__VA_ARGS__)
#endif
enum { PATCH = TILE + 2, ELEMENTS = PATCH * PATCH };  // the side of a patch, and its elements
enum { TILE_PIXELS = TILE * TILE, TAPS = 9 };         // of a tile, and of a filter

// A row of a matrix times x.
template <int N> [[gnu::always_inline]] static inline Vector dot(const float (&row)[N], const Vector* x) {
    Vector sum = Vector{} * -1.0f;  // -0: the compiler may leave out the addition of it, since -0 + y is y for every y
    REGISTER_FOR (int k = 0; k < N; k++)
        if (row[k] != 0) sum += row[k] * x[k];
    return sum;
}

// m x m^T for vectors of channels: load(i) is element i of x (N, N), and store(i, y) takes element i of the result
// (M, M). Inlined, its loops become additions of registers, and zeros of m cost nothing. As a call it takes twice as
// long on a Xeon.
template <int M, int N>
[[gnu::always_inline]] static inline void transform(const float (&m)[M][N], auto load, auto store) {
    Vector mx[M][N];
    PATCH_FOR (int j = 0; j < N; j++) {
        Vector column[N];
        REGISTER_FOR (int i = 0; i < N; i++) column[i] = load(i * N + j);
        REGISTER_FOR (int i = 0; i < M; i++) mx[i][j] = dot(m[i], column);
    }

    PATCH_FOR (int i = 0; i < M; i++)
        REGISTER_FOR (int j = 0; j < M; j++) store(i * M + j, dot(m[j], mx[i]));
}

// From `first` up to, and without, `end`.
struct Range {
    int first, end;
    int count() const { return end - first; }
};

// The operands or results of the products: a matrix for each of the ELEMENTS of a patch. If `size` were a power of two,
// all of them would fall into the same lines of a cache; PLANE_GAP more floats prevent that.
enum { PLANE_GAP = 16, PLANE_GAPS = ELEMENTS * PLANE_GAP };
struct Planes {
    float* data;
    size_t size;
    Planes(float* data, int rows, int columns) : data(data), size((size_t)rows * columns + PLANE_GAP) {}
    float* operator[](int element) const { return data + element * size; }
    float* end() const { return data + ELEMENTS * size; }
};

// Tile t, counted over all images, and its upper left pixel. An image's last tiles may lie half outside.
struct WinogradTile {
    int b, row, column;

    WinogradTile(Tensor x, int t) {
        int H = ceil_div(x.H, (int)TILE);
        int W = ceil_div(x.W, (int)TILE);
        b = t / W / H;
        row = t / W % H * TILE;
        column = t % W * TILE;
    }

    // Where the channels of a pixel lie, counted from the tile's first; null outside the image or without x.
    float* pixel(Tensor x, int down, int right) const {
        int h = row + down;
        int w = column + right;
        bool inside = x && h >= 0 && h < x.H && w >= 0 && w < x.W;
        if (!inside) return nullptr;
        return x.data + (((size_t)b * x.H + h) * x.W + w) * x.C;
    }

    static int count(Tensor x) { return x.B * ceil_div(x.H, (int)TILE) * ceil_div(x.W, (int)TILE); }
};

enum { MAX_INPUTS = 512 };       // channels that a convolution adds up at a time
static float zeros[MAX_INPUTS];  // the channels of a pixel outside the image, so that it is read as any other

// Transforms tiles of x (m = A) or the patches around them (m = B_T) to planes (channels / width, tiles, width), with
// zeros behind the last channel, up to a whole vector.
template <int N>
static void transform_tiles(Planes to, int width, const float (&m)[PATCH][N], Tensor x, Range tiles,
                            Range channels) {
    const int halo = N == PATCH;
    x.data += channels.first;
    for (int t = 0; t < tiles.count(); t++) {
        WinogradTile tile(x, tiles.first + t);
        const float* from[N * N];
        for (int i = 0; i < N * N; i++) {
            const float* pixel = tile.pixel(x, i / N - halo, i % N - halo);
            from[i] = pixel ? pixel : zeros;
        }

        int panel = 0;  // its first channel
        for (int c = 0; c < channels.count(); c += VECTOR) {
            if (c == panel + width) panel = c;
            const size_t at = (size_t)panel * tiles.count() + (size_t)t * width + c - panel;
            auto load = [&](int i) { return load_some(from[i] + c, channels.count() - c); };
            transform(m, load, [&](int f, Vector element) { *(Vector*)(to[f] + at) = element; });
        }
    }
}

// One pass of a convolution, over `inputs`, at most MAX_INPUTS channels of x. Forward, the weights are
// (O, 3, 3, C). Backward, x is the output's gradient and out the input's: weights are (C, 3, 3, O), and taps are
// flipped.
//
// A task is WINOGRAD_TILES tiles of `outputs` channels. A thread's scratch holds the transformed weights of its task's
// outputs, for as long as its tasks have the same ones. Behind them lie first the packed taps of a panel, while the
// weights are transformed, and then the transformed patches and the products of `band` tiles at a time.
enum { WINOGRAD_TILES = 264, MAX_BAND = 4 * TILE_ROWS };
enum Direction { FORWARD, BACKWARD };
struct Winograd {
    Tensor out, x;
    Conv layer;
    Direction direction;
    ForwardOptions options;
    Range inputs;
    int outputs = 0, band = 0;

    static const int FLOATS = THREAD_FLOATS - 3 * PLANE_GAPS;  // of the scratch, for the planes' contents
    static_assert((ELEMENTS + TAPS) * MAX_INPUTS * TILE_COLUMNS <= FLOATS, "the fewest outputs fit");

    void choose_sizes() {
        const int C = inputs.count();
        const int most = FLOATS / ((ELEMENTS + TAPS) * C);
        outputs = std::clamp(most / TILE_COLUMNS * TILE_COLUMNS, (int)TILE_COLUMNS, 128);

        const int left = FLOATS - ELEMENTS * C * outputs;
        const int tiles = left / (ELEMENTS * (round_up(C, VECTOR) + outputs));
        band = std::min(tiles / TILE_ROWS * TILE_ROWS, (int)MAX_BAND);
        assert(band > 0);
    }

    void run() const {
        auto convolve_task = [this](int t0, int t1, int o0, int o1) { convolve({t0, t1}, {o0, o1}); };
        auto prepare = [this](int o0, int o1) { transform_weights({o0, o1}); };
        each_tile(WinogradTile::count(x), WINOGRAD_TILES, out.C, outputs, convolve_task, prepare);
    }

    Planes weights() const { return Planes(thread_floats(), inputs.count(), outputs); }

    // Tap 0 as a matrix (inputs, o). Backward, where taps are flipped, it is the last one in memory.
    Matrix first_tap(Range o) const {
        if (direction == BACKWARD) {
            const int row = TAPS * out.C;
            return {layer.w + (size_t)inputs.first * row + (TAPS - 1) * out.C + o.first, row};
        }
        const int row = TAPS * x.C;
        return transposed(layer.w + (size_t)o.first * row + inputs.first, row);
    }
    int distance_of_taps() const { return direction == BACKWARD ? -out.C : x.C; }

    // It goes panel by panel, so that a panel's taps stay in the nearest cache.
    void transform_weights(Range o) const {
        for (int first = o.first; first < o.end; first += TILE_COLUMNS) {
            const Range panel = {first, std::min(first + TILE_COLUMNS, o.end)};
            transform_panel(panel, (size_t)(first - o.first) * inputs.count());
        }
    }

    // In each of the weights' planes the panel begins at `start`.
    void transform_panel(Range o, size_t start) const {
        const Planes transformed = weights();
        float* packed_taps = transformed.end();  // (TAPS, inputs, TILE_COLUMNS)
        const size_t size = (size_t)inputs.count() * TILE_COLUMNS;
        Matrix tap = first_tap(o);
        for (int i = 0; i < TAPS; i++) {
            matmul_pack(packed_taps + i * size, tap, inputs.count(), o.count());
            tap.data += distance_of_taps();
        }

        for (size_t at = 0; at < size; at += VECTOR) {
            auto load = [&](int i) { return *(Vector*)(packed_taps + i * size + at); };
            transform(G, load, [&](int f, Vector element) { *(Vector*)(transformed[f] + start + at) = element; });
        }
    }

    void convolve(Range tiles, Range o) const {
        const int K = inputs.count();
        const int width = round_up(K, VECTOR);
        const int n = round_up(o.count(), TILE_COLUMNS);
        for (int t = tiles.first; t < tiles.end; t += band) {
            const Range some = {t, std::min(t + band, tiles.end)};
            const Planes patches(weights().end(), some.count(), width);
            const Planes products(patches.end(), some.count(), n);
            assert(products.end() <= thread_floats() + THREAD_FLOATS);

            transform_tiles(patches, width, B_T, x, some, inputs);
            for (int f = 0; f < ELEMENTS; f++)
                matmul({some.count(), n, K}, products[f], n, {patches[f], width}, packed(weights()[f], K), false);
            for (int i = 0; i < some.count(); i++)
                store_tile(products, (size_t)i * n, WinogradTile(out, some.first + i), o);
        }
    }

    // Transforms a tile's products to its pixels. In each of the products' planes the tile's row begins at `at`.
    void store_tile(Planes products, size_t at, WinogradTile tile, Range o) const {
        float* pixels[TILE_PIXELS];
        const float* residuals[TILE_PIXELS];
        for (int i = 0; i < TILE_PIXELS; i++) {
            pixels[i] = tile.pixel(out, i / TILE, i % TILE);
            residuals[i] = tile.pixel(options.residual, i / TILE, i % TILE);
        }
        const float* emb = options.emb.row(tile.b);

        for (int c = o.first; c < o.end; c += VECTOR) {
            auto load = [&](int f) { return *(const Vector*)(products[f] + at + c - o.first); };
            transform(A_T, load, [&](int i, Vector sum) {
                if (!pixels[i]) return;
                if (layer.bias) sum += load_some(layer.bias + c, o.end - c);
                if (emb) sum += load_some(emb + c, o.end - c);
                if (residuals[i]) sum += load_some(residuals[i] + c, o.end - c);
                store_some(pixels[i] + c, sum, o.end - c);
            });
        }
    }
};

static void convolve(Tensor out, Tensor x, Conv layer, Direction direction, ForwardOptions options) {
    for (int c = 0; c < x.C; c += MAX_INPUTS) {
        const Range inputs = {c, std::min(c + MAX_INPUTS, x.C)};
        Winograd pass = {out, x, layer, direction, options, inputs};
        pass.choose_sizes();
        pass.run();

        layer.bias = nullptr;  // the next pass adds to what this one wrote
        options = {.residual = out};
    }
}

// A thread's piece of dw has so many outputs and inputs, and so many tiles are transformed at a time.
enum { FILTER_OUTPUTS = 64, FILTER_INPUTS = 64, FILTER_TILES = 256 / TILE };
enum { FILTER_SUMS = FILTER_OUTPUTS * FILTER_INPUTS };
enum { FILTER_OPERANDS = FILTER_TILES * (FILTER_OUTPUTS + FILTER_INPUTS) };
static_assert(FILTER_OUTPUTS % TILE_COLUMNS == 0, "a piece is whole register tiles");
static_assert(FILTER_INPUTS % TILE_COLUMNS == 0, "a piece is whole register tiles");
static_assert(ELEMENTS * (FILTER_SUMS + FILTER_OPERANDS) + 3 * PLANE_GAPS <= THREAD_FLOATS, "all planes fit");

// Writes a piece of dw, outputs o and inputs c, as the sum over some tiles.
static void filter_gradient(float* dw, Tensor dout, Tensor x, Range tiles, Range o, Range c) {
    const int n = round_up(o.count(), VECTOR);
    const int k = round_up(c.count(), TILE_COLUMNS);
    const Planes sum(thread_floats(), n, k);
    const Planes left(sum.end(), FILTER_TILES, n);
    const Planes right(left.end(), FILTER_TILES, k);
    for (int t = tiles.first; t < tiles.end; t += FILTER_TILES) {
        const Range some = {t, std::min(t + FILTER_TILES, tiles.end)};
        transform_tiles(left, n, A, dout, some, o);
        transform_tiles(right, TILE_COLUMNS, B_T, x, some, c);
        for (int f = 0; f < ELEMENTS; f++)
            matmul({o.count(), k, some.count()}, sum[f], k, transposed(left[f], n),
                   packed(right[f], some.count()), t > tiles.first);
    }

    for (int row = 0; row < o.count(); row++)
        for (int column = 0; column < c.count(); column += VECTOR) {
            float* to = dw + (size_t)(o.first + row) * TAPS * x.C + c.first + column;
            auto load = [&](int f) { return *(Vector*)(sum[f] + row * k + column); };
            transform(G_T, load, [&](int i, Vector tap) { store_some(to + i * x.C, tap, c.count() - column); });
        }
}

enum { MAX_PARTIALS = 8 };

// Each thread owns a piece of dw and goes through all pixels. A small dw has few pieces: then each is made several
// times, from other pixels, and these partial sums are added up at the end.
static void convolution_weight_gradient(float* dw, Tensor dout, Tensor x) {
    const int C = x.C, O = dout.C;
    const int tiles = WinogradTile::count(x);
    const size_t size = (size_t)O * TAPS * C;
    const int partials = std::clamp((int)(SHARED_FLOATS / size), 1, std::min((int)MAX_PARTIALS, tiles));
    float* sums = partials > 1 ? cpu_workspace : dw;  // (partials, O, 3, 3, C)
    auto first_tile = [=](int partial) { return (int)((size_t)tiles * partial / partials); };

    each_tile(ceil_div(O, FILTER_OUTPUTS) * partials, 1, C, FILTER_INPUTS, [&](int i, int, int c0, int c1) {
        const int partial = i % partials;
        const Range some = {first_tile(partial), first_tile(partial + 1)};
        const int o = i / partials * FILTER_OUTPUTS;
        filter_gradient(sums + partial * size, dout, x, some, {o, std::min(o + FILTER_OUTPUTS, O)}, {c0, c1});
    });

    if (partials == 1) return;
    each_range(size, 4096, [&](size_t first, size_t end) {
        for (size_t i = first; i < end; i++) {
            dw[i] = sums[i];
            for (int partial = 1; partial < partials; partial++) dw[i] += sums[partial * size + i];
        }
    });
}

// ---- linear layers, 1x1 and 3x3 convolutions --------------------------------------------------------------
static void conv3x3_forward(Tensor out, Concat x, Conv layer, ForwardOptions options) {
    PROFILE("3x3 forward", convolution_work(out.rows(), 9, x.C(), out.C));
    convolve(out, x.first, layer, FORWARD, options);
    if (out.moments) channel_moments(out);
}

static void conv3x3_backward_input(Tensor dx, Tensor dout, Conv layer, BackwardOptions options) {
    PROFILE("3x3 dX", convolution_work(dout.rows(), 9, dx.C, dout.C));
    const ForwardOptions added = {.residual = options.accumulate ? dx : Tensor()};
    convolve(dx, dout, {layer.w}, BACKWARD, added);
    if (options.norm) groupnorm_backward_sums(dx, dx, options.norm);
}

static void conv3x3_backward_weight(Conv layer, Tensor dout, Tensor x, Rows demb) {
    bias_backward(layer, demb, dout);
    PROFILE("3x3 dW", convolution_work(dout.rows(), 9, x.C, dout.C, sizeof(float)));
    convolution_weight_gradient(layer.dw, dout, x);
}

enum { BAND = 252 };  // pixels of a task: a multiple of TILE_ROWS

static void conv1x1_forward(Tensor out, Concat x, Linear layer, ForwardOptions options) {
    const int M = out.rows(), O = out.C, K = x.C();
    PROFILE("1x1 forward", convolution_work(M, 1, K, O));
    const bool fits = K <= THREAD_FLOATS / TILE_COLUMNS;  // otherwise matmul packs the weights block by block
    auto weights = [&](int o, int c) { return transposed(layer.w + (size_t)o * K + c, K); };
    auto pack = [&](int o0, int o1) {
        if (fits) matmul_pack(thread_floats(), weights(o0, 0), K, o1 - o0);
    };

    auto multiply_band = [&](int p0, int p1, int o0, int o1) {
        const float* bias = layer.bias;
        const float* residual = options.residual.data;
        for (size_t p = p0; p < (size_t)p1; p++)
            SIMD_FOR (int o = o0; o < o1; o++)
                out.data[p * O + o] = bias[o] + (residual ? residual[p * O + o] : 0.0f);

        for (int c : {0, x.first.C}) {  // where the channels of the two inputs begin
            const Tensor& input = x.of(c);
            Matrix w = fits ? packed(thread_floats() + c * TILE_COLUMNS, K) : weights(o0, c);
            matmul({p1 - p0, o1 - o0, input.C}, element(out, p0, o0), O, pixels_of(input, p0), w, true);
        }
    };
    const int columns = std::clamp(THREAD_FLOATS / K / TILE_COLUMNS * TILE_COLUMNS, (int)TILE_COLUMNS, 128);
    each_tile(M, BAND, O, columns, multiply_band, pack);
    if (out.moments) channel_moments(out);
}

static void conv1x1_backward_input(Concat dx, Tensor dout, Linear layer, BackwardOptions options) {
    const int O = dout.C, K = dx.C();
    PROFILE("1x1 dX", convolution_work(dout.rows(), 1, K, O));
    for (int first : {0, dx.first.C}) {
        const Tensor& part = dx.of(first);
        each_tile(part.C, 128, dout.rows(), BAND, [&](int c0, int c1, int p0, int p1) {
            const Matrix w = {layer.w + first + c0, K};
            matmul({p1 - p0, c1 - c0, O}, element(part, p0, c0), part.C, pixels_of(dout, p0), w, options.accumulate);
        });
    }
    if (options.norm) groupnorm_backward_sums(dx.first, dx.first, options.norm);
}

// Each thread owns a piece of dw and goes through all pixels, so that there are no partial sums to add up.
static void conv1x1_backward_weight(Linear layer, Tensor dout, Concat x) {
    const int M = dout.rows(), O = dout.C, K = x.C();
    bias_backward(layer, {}, dout);
    PROFILE("1x1 dW", convolution_work(M, 1, K, O, sizeof(float)));
    for (int first : {0, x.first.C}) {
        const Tensor& part = x.of(first);
        each_tile(O, 48, part.C, 64, [&](int o0, int o1, int c0, int c1) {
            float* dw = layer.dw + (size_t)o0 * K + first + c0;
            const Matrix d_out = transposed(pixels_of(dout, 0, o0));
            matmul({o1 - o0, c1 - c0, M}, dw, K, d_out, pixels_of(part, 0, c0), false);
        });
    }
}

static void multiply_matrices(const MatrixProduct* products, int count, int, RightMatrix right_lies) {
    PROFILE("Muon", {});
    for (const MatrixProduct& p : std::span(products, count)) {
        const int rows = p.out.rows(), columns = p.out.C, depth = p.left.C;
        const Matrix right = right_lies == RIGHT_TRANSPOSED ? transposed(p.right, depth) : Matrix{p.right, columns};
        each_tile(columns, 128, rows, 64, [&](int c0, int c1, int r0, int r1) {
            const Matrix left = pixels_of(p.left, r0);
            matmul({r1 - r0, c1 - c0, depth}, element(p.out, r0, c0), columns, left, right.from(0, c0), false);
            for (int r = r0; r < r1; r++) {
                float* out = element(p.out, r, c0);
                const float* added = p.added ? element(p.added, r, c0) : nullptr;
                for (int c = 0; c < c1 - c0; c++) {
                    float addend = added ? p.beta * added[c] : 0.0f;
                    out[c] = fmaf(p.alpha, out[c], addend);
                }
            }
        });
    }
}

// ---- attention --------------------------------------------------------------------------------------------
static_assert(2 * MAX_ATTENTION_SIZE * MAX_ATTENTION_SIZE <= THREAD_FLOATS, "two rows of scores fit");

// Calls work(b, head, t0, rows) for every image, head and band of rows of the scores. A thread's scratch holds two such
// bands. One thread does all bands of a head, one after the other.
static void each_band(Tensor qkv, int heads, auto work) {
    int T = qkv.T();
    int most = std::clamp((int)THREAD_FLOATS / (2 * T), 1, 64);
    each_tile(qkv.B, 1, heads, 1, [&](int b, int, int head, int) {
        for (int t0 = 0; t0 < T; t0 += most) work(b, head, t0, std::min(most, T - t0));
    });
}

// s (T) = softmax(scale s). Returns the logarithm of its denominator.
static float softmax(float* s, int T, float scale) {
    float largest = -FLT_MAX;
#pragma omp simd reduction(max : largest)
    for (int j = 0; j < T; j++) largest = s[j] > largest ? s[j] : largest;

    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < T; j++) {
        s[j] = fast_exp(scale * (s[j] - largest));
        sum += s[j];
    }

    float inverse = 1.0f / sum;
    SIMD_FOR (int j = 0; j < T; j++) s[j] *= inverse;
    return scale * largest + logf(sum);
}

static void attention_forward(Tensor out, float* lse, Tensor qkv, int heads) {
    const int T = out.T(), C = out.C, d = C / heads;
    PROFILE("attention forward", {4.0 * T * out.count(), 4.0 * sizeof(float) * out.count()});
    const float scale = 1.0f / sqrtf((float)d);
    each_band(qkv, heads, [=](int b, int head, int t0, int rows) {
        const int image = b * T;  // its first pixel
        const int c = head * d;   // the head's first channel
        const Matrix q = pixels_of(qkv, image + t0, c);
        const Matrix k = pixels_of(qkv, image, C + c);
        const Matrix v = pixels_of(qkv, image, 2 * C + c);
        float* scores = thread_floats();  // (rows, T)
        float* band_lse = lse + ((size_t)b * heads + head) * T + t0;

        matmul({rows, T, d}, scores, T, q, transposed(k), false);
        for (int i = 0; i < rows; i++) band_lse[i] = softmax(scores + (size_t)i * T, T, scale);
        matmul({rows, d, T}, element(out, image + t0, c), C, {scores, T}, v, false);
    });
}

// The equations stand at the declaration in train_unet.cu. ds already has the factor `scale`.
static void attention_backward(Tensor dqkv, Tensor dout, Tensor out, const float* lse, Tensor qkv, int heads) {
    const int T = out.T(), C = out.C, d = C / heads;
    PROFILE("attention backward", {8.0 * T * out.count(), 8.0 * sizeof(float) * out.count()});
    const float scale = 1.0f / sqrtf((float)d);
    each_band(qkv, heads, [=](int b, int head, int t0, int rows) {
        const int image = b * T;  // its first pixel
        const int c = head * d;   // the head's first channel
        const Matrix q = pixels_of(qkv, image + t0, c);
        const Matrix k = pixels_of(qkv, image, C + c);
        const Matrix v = pixels_of(qkv, image, 2 * C + c);
        const Matrix d_out = pixels_of(dout, image + t0, c);
        const float* band_lse = lse + ((size_t)b * heads + head) * T + t0;
        float* p = thread_floats();        // (rows, T): first the scores, then the probabilities
        float* ds = p + (size_t)rows * T;  // (rows, T): first the probabilities' gradient, then the scores'

        matmul({rows, T, d}, p, T, q, transposed(k), false);
        matmul({rows, T, d}, ds, T, d_out, transposed(v), false);
        for (int i = 0; i < rows; i++) {
            const float* out_row = element(out, image + t0 + i, c);
            const float* dout_row = element(dout, image + t0 + i, c);
            float delta = 0;  // D_i
#pragma omp simd reduction(+ : delta)
            for (int j = 0; j < d; j++) delta += dout_row[j] * out_row[j];

            float* p_row = p + (size_t)i * T;
            float* ds_row = ds + (size_t)i * T;
            float row_lse = band_lse[i];
            SIMD_FOR (int j = 0; j < T; j++) {
                p_row[j] = fast_exp(scale * p_row[j] - row_lse);
                ds_row[j] = scale * p_row[j] * (ds_row[j] - delta);
            }
        }

        bool adds = t0 > 0;  // to what the bands before it gave
        matmul({rows, d, T}, element(dqkv, image + t0, c), 3 * C, {ds, T}, k, false);
        matmul({T, d, rows}, element(dqkv, image, C + c), 3 * C, transposed(ds, T), q, adds);
        matmul({T, d, rows}, element(dqkv, image, 2 * C + c), 3 * C, transposed(p, T), d_out, adds);
    });
}

}  // namespace cpu
#endif

// ---- the machine ------------------------------------------------------------------------------------------
#ifdef NETWORK_ONLY
static size_t host_memory_available() { return 0; }  // not known
#else
static size_t host_memory_available() {
    std::ifstream memory("/proc/meminfo");
    std::string word;
    while (memory >> word && word != "MemAvailable:") continue;
    size_t kilobytes = 0;
    memory >> kilobytes;
    int ranks_here = world.forked ? world.size : 1;
    size_t share = kilobytes * 1024 / ranks_here;

    rlimit limit;
    bool has_limit = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    if (!has_limit) return share;

    std::ifstream own("/proc/self/statm");
    size_t pages = 0;
    own >> pages;
    size_t taken = pages * (size_t)sysconf(_SC_PAGESIZE);
    size_t left = limit.rlim_cur > taken ? (size_t)limit.rlim_cur - taken : 1;  // 0 would say that it is not known
    return std::min(share, left);
}
#endif

#ifndef __CUDACC__
#ifndef NETWORK_ONLY
// (ranks, ranks): the socket by which one rank talks with another.
static std::vector<int> sockets;

static void backend_prepare_fork() {
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

static void send_all(int socket, std::span<const std::byte> data) {
    while (!data.empty()) {
        ssize_t bytes = send(socket, data.data(), data.size(), 0);
        if (bytes < 0) fail("messages between processes: %s", strerror(errno));
        data = data.subspan(bytes);
    }
}

// When the peer has died, this rank waits here until it is ended.
static void receive_all(int socket, std::span<std::byte> data) {
    while (!data.empty()) {
        ssize_t bytes = recv(socket, data.data(), data.size(), 0);
        if (bytes < 0) fail("messages between processes: %s", strerror(errno));
        data = data.subspan(bytes);
    }
}

// The lower of two ranks sends first. Exchanges come one after the other, and this cannot deadlock: among the
// exchanges that are left, the one between the lowest ranks can always take place.
static void backend_exchange(int peer, std::span<const std::byte> sent, std::span<std::byte> received) {
    int socket = sockets[world.rank * world.size + peer];
    if (world.rank < peer) {
        send_all(socket, sent);
        receive_all(socket, received);
    } else {
        receive_all(socket, received);
        send_all(socket, sent);
    }
}

static void backend_together(auto exchanges) { exchanges(); }
static std::string backend_connect() {
    cpu::used_threads = std::max(1, cpu::thread_count() / world.size);
    return "sockets";
}

static void backend_disconnect() {}
#endif
static std::string backend_name() {
    std::string threads = counted(cpu::thread_count(), "thread");
    return text("the CPU: fp32, %s, vectors of %d", threads, (int)cpu::VECTOR);
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

#ifndef LATE_SIDE_STREAM  // tests/network.cu has one that does everything as late as it may be done
static Event on_side_stream(auto launches) {
    launches();
    return {};
}

static void wait_for(Event) {}
#endif
static Event on_side_stream_deferred(auto launches) { return on_side_stream(launches); }
static void launch_graph(Graph*, auto launches) { launches(); }
static void mark_step_end(int) {}
static void wait_for_step(int) {}
static double backend_peak() { return 0; }
static std::pair<int, int> head_channels() { return {1, INT_MAX}; }
static size_t backend_memory_available() { return host_memory_available(); }
static size_t workspace_bytes() { return cpu::cpu_workspace_bytes(); }
static void allocate_workspace() { cpu::allocate_cpu_workspace(); }
#endif
