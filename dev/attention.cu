// Attention, forward and backward: out = softmax(q k^T / sqrt(d)) v, head by head.
//
//   make attention && ./attention        every version: against PyTorch, then timed
//   ./attention 2                        version 2 alone
//
// In a build for a GPU:
//
//   0  CPU: the definition, query by query, and the program's function there
//   1  fp32: heads copied apart, batched products by cuBLAS, softmax kernels, heads copied together
//   2  fp32: heads read where they lie; row maxima and sums in the blocks of the first product, normalisation
//      in the second, the softmax's gradient in the products of the backward pass
//   3  bf16 data: tiles that stay on the chip, a thread a row; backward makes the probabilities again
//   4  the program's: the same tiles in tensor cores
//
// In a build without one:
//
//   1  the definition, query by query
//   2  a block of keys for all queries, online softmax
//   3  the program's, which keeps the scores of 64 queries in the cache
//
// What the steps change: version 1 moves the T x T scores through memory four times forward and seven times
// backward, and copies q, k, v and the result for a layout that a stride would have served. Version 2 drops
// the copies and two of the passes over the scores: a block that has computed a tile of them knows the tile's
// row maxima and sums, so no kernel need read scores for a softmax alone. But its products are plain ones,
// and where the scores are many, cuBLAS's better product is worth more than what version 2 saves. Version 3
// never stores scores. It keeps a running maximum and sum, and rescales a row of the result as tiles of k and
// v go by ("FlashAttention", Dao et al. 2022). Backward makes a probability again from one stored number a
// row. That trades traffic for arithmetic, which a thread a row in fp32 can't do fast enough; in tensor
// cores, version 4, it costs nothing.
//
// On a CPU, two threads of an Intel Xeon with AVX-512, 6 heads of 32 at 16x16, B = 4: the definition (1) adds
// up each score across a vector and calls expf, 8.5 ms forward and 16.7 backward. With a block of keys
// transposed (2) a vector holds the scores of 16 keys, and the maximum runs along as on a GPU: 3.7 and 8.5
// ms. But a running maximum saves memory traffic, of which there is none here: a cache holds the scores of 64
// queries with all keys. So the program (3) rescales nothing and leaves everything else to its matrix
// product: 1.2 and 2.7 ms.
#include "common.h"

// qkv and dqkv (B, T, 3 C): for each of the T pixels of an image q, then k, then v. out and dout (B, T, C).
// The C channels of each are those of the heads, one head behind the other, d channels each.
// lse (B, heads, T) = torch.logsumexp(q k^T / sqrt(d), dim=-1). Forward leaves it for backward.
struct AttentionShape {
    int B, T, C, heads, d;
    float scale;  // 1 / sqrt(d)

    // Where in these arrays the row of pixel t of a head begins.
    size_t q(int b, int head, int t) const { return ((size_t)b * T + t) * 3 * C + head * d; }
    size_t k(int b, int head, int t) const { return q(b, head, t) + C; }
    size_t v(int b, int head, int t) const { return q(b, head, t) + 2 * C; }
    size_t out(int b, int head, int t) const { return ((size_t)b * T + t) * C + head * d; }
    size_t lse(int b, int head, int t) const { return ((size_t)b * heads + head) * T + t; }
};

static AttentionShape attention_shape(const Problem& p) {
    int heads = p.dim("heads");
    int d = p.dim("d");
    float scale = 1 / sqrtf((float)d);
    return {p.dim("B"), p.dim("T"), heads * d, heads, d, scale};
}

// ---- 0, on a CPU 1: the definition, query by query ----------------------------------------------------------

static float attention_dot0(const float* a, const float* b, int d) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < d; c++) sum += a[c] * b[c];
    return sum;
}

static void attention_add0(float* to, float factor, const float* from, int d) {
#pragma omp simd
    for (int c = 0; c < d; c++) to[c] += factor * from[c];
}

// Sets `count` rows of d channels, `stride` apart, to zero.
static void attention_clear0(float* rows, int count, int stride, int d) {
    for (int i = 0; i < count; i++) std::fill_n(rows + (size_t)i * stride, d, 0.0f);
}

static void attention_forward0(Problem& p) {
    AttentionShape s = attention_shape(p);
    float* out = p.out<float>("out");
    float* lse = p.out<float>("lse");
    const float* qkv = p.in<float>("qkv");
#pragma omp parallel for
    for (int i = 0; i < s.B * s.heads; i++) {
        int b = i / s.heads;
        int head = i % s.heads;
        std::vector<float> scores(s.T);  // of a query with each key; then their exponentials
        for (int t = 0; t < s.T; t++) {
            const float* q = qkv + s.q(b, head, t);
            float maximum = -FLT_MAX;
            for (int u = 0; u < s.T; u++) {
                const float* k = qkv + s.k(b, head, u);
                scores[u] = s.scale * attention_dot0(q, k, s.d);
                maximum = std::max(maximum, scores[u]);
            }

            float denominator = 0;
            for (int u = 0; u < s.T; u++) {
                scores[u] = expf(scores[u] - maximum);
                denominator += scores[u];
            }

            float* out_row = out + s.out(b, head, t);
            std::fill_n(out_row, s.d, 0.0f);
            for (int u = 0; u < s.T; u++) {
                const float* v = qkv + s.v(b, head, u);
                attention_add0(out_row, scores[u] / denominator, v, s.d);
            }
            lse[s.lse(b, head, t)] = maximum + logf(denominator);
        }
    }
}

// With probabilities P = exp(q k^T / sqrt(d) - lse) and delta_i = sum_j dout_ij out_ij:
//   dv = P^T dout,  dS = P (dout v^T - delta) / sqrt(d),  dq = dS k,  dk = dS^T q
static void attention_backward0(Problem& p) {
    AttentionShape s = attention_shape(p);
    float* dqkv = p.out<float>("dqkv");
    const float* dout = p.in<float>("dout");
    const float* out = p.in<float>("out");
    const float* lse = p.in<float>("lse");
    const float* qkv = p.in<float>("qkv");
#pragma omp parallel for
    for (int i = 0; i < s.B * s.heads; i++) {
        int b = i / s.heads;
        int head = i % s.heads;
        attention_clear0(dqkv + s.q(b, head, 0), 3 * s.T, s.C, s.d);  // dq, dk and dv are C apart
        for (int t = 0; t < s.T; t++) {
            const float* q = qkv + s.q(b, head, t);
            const float* dout_row = dout + s.out(b, head, t);
            float* dq = dqkv + s.q(b, head, t);
            float row_lse = lse[s.lse(b, head, t)];
            float delta = attention_dot0(dout_row, out + s.out(b, head, t), s.d);
            for (int u = 0; u < s.T; u++) {
                const float* k = qkv + s.k(b, head, u);
                const float* v = qkv + s.v(b, head, u);
                float* dk = dqkv + s.k(b, head, u);
                float* dv = dqkv + s.v(b, head, u);

                float probability = expf(s.scale * attention_dot0(q, k, s.d) - row_lse);
                float dprobability = attention_dot0(dout_row, v, s.d);
                float ds = s.scale * probability * (dprobability - delta);
                attention_add0(dq, ds, k, s.d);
                attention_add0(dk, ds, q, s.d);
                attention_add0(dv, probability, dout_row, s.d);
            }
        }
    }
}

#ifdef PROGRAM
static void attention_forward_cpu(Problem& p) {
    cpu::attention_forward(p.tensor_out<float>("out"), p.out<float>("lse"), p.tensor_in<float>("qkv"),
                           p.dim("heads"));
}

static void attention_backward_cpu(Problem& p) {
    cpu::attention_backward(p.tensor_out<float>("dqkv"), p.tensor_in<float>("dout"),
                            p.tensor_in<float>("out"), p.in<float>("lse"), p.tensor_in<float>("qkv"),
                            p.dim("heads"));
}
#endif

#ifndef __CUDACC__
#ifdef PROGRAM
// ---- 2 on a CPU: online softmax, a block of keys for all queries ------------------------------------------
// A vector holds one query's scores with as many keys as it has elements, so that nothing is added up across a
// vector. For this a block of keys is transposed once, and then serves all queries.

enum { ATTENTION_KEYS = 4 * cpu::VECTOR };  // of a block: four vectors of sums stay in registers

// columns (d, ATTENTION_KEYS) = the transpose of rows (n, d), which are `stride` apart; zeros behind the n-th.
static void attention_transpose2(float* columns, const float* rows, int stride, int n, int d) {
    for (int c = 0; c < d; c++)
        for (int j = 0; j < ATTENTION_KEYS; j++)
            columns[c * ATTENTION_KEYS + j] = j < n ? rows[(size_t)j * stride + c] : 0;
}

// products (ATTENTION_KEYS) = row (d) times columns (d, ATTENTION_KEYS)
static void attention_multiply2(float* products, const float* row, const float* columns, int d) {
    cpu::Vector sum[4] = {};
    for (int c = 0; c < d; c++) {
        const float* column = columns + c * ATTENTION_KEYS;
        REGISTER_FOR (int i = 0; i < 4; i++)
            sum[i] += row[c] * *(const cpu::Vector*)(column + i * cpu::VECTOR);
    }
    memcpy(products, sum, sizeof sum);
}

// A step of the online softmax: a query meets n more keys. Replaces their scores by exponentials relative to
// the highest score so far. Returns the factor that corrects what was added up relative to the maximum before.
static float attention_softmax_step2(float* scores, int n, float scale, float* maximum, float* denominator) {
    float highest = *maximum;
#pragma omp simd reduction(max : highest)
    for (int j = 0; j < n; j++) highest = scores[j] > highest ? scores[j] : highest;

    float added = 0;
#pragma omp simd reduction(+ : added)
    for (int j = 0; j < n; j++) {
        scores[j] = fast_exp(scale * (scores[j] - highest));
        added += scores[j];
    }

    float correction = fast_exp(scale * (*maximum - highest));
    *denominator = correction * *denominator + added;
    *maximum = highest;
    return correction;
}

static void attention_forward2(Problem& p) {
    AttentionShape s = attention_shape(p);
    float* out = p.out<float>("out");
    float* lse = p.out<float>("lse");
    const float* qkv = p.in<float>("qkv");
    cpu::each_tile(s.B, 1, s.heads, 1, [&](int b, int, int head, int) {
        float* keys = cpu::thread_floats();            // (d, ATTENTION_KEYS)
        float* maximum = keys + s.d * ATTENTION_KEYS;  // (T), of each query's scores so far
        float* denominator = maximum + s.T;            // (T)
        attention_clear0(out + s.out(b, head, 0), s.T, s.C, s.d);
        std::fill_n(maximum, s.T, -FLT_MAX);
        std::fill_n(denominator, s.T, 0.0f);

        for (int u0 = 0; u0 < s.T; u0 += ATTENTION_KEYS) {
            int n = std::min((int)ATTENTION_KEYS, s.T - u0);
            attention_transpose2(keys, qkv + s.k(b, head, u0), 3 * s.C, n, s.d);
            for (int t = 0; t < s.T; t++) {
                float scores[ATTENTION_KEYS];
                attention_multiply2(scores, qkv + s.q(b, head, t), keys, s.d);
                float correction = attention_softmax_step2(scores, n, s.scale, &maximum[t], &denominator[t]);

                float* row = out + s.out(b, head, t);
                SIMD_FOR (int c = 0; c < s.d; c++) row[c] *= correction;
                for (int j = 0; j < n; j++) attention_add0(row, scores[j], qkv + s.v(b, head, u0 + j), s.d);
            }
        }

        for (int t = 0; t < s.T; t++) {
            float* row = out + s.out(b, head, t);
            for (int c = 0; c < s.d; c++) row[c] /= denominator[t];
            lse[s.lse(b, head, t)] = s.scale * maximum[t] + logf(denominator[t]);
        }
    });
}

static void attention_backward2(Problem& p) {
    AttentionShape s = attention_shape(p);
    float* dqkv = p.out<float>("dqkv");
    const float* dout = p.in<float>("dout");
    const float* out = p.in<float>("out");
    const float* lse = p.in<float>("lse");
    const float* qkv = p.in<float>("qkv");
    cpu::each_tile(s.B, 1, s.heads, 1, [&](int b, int, int head, int) {
        float* keys = cpu::thread_floats();           // (d, ATTENTION_KEYS)
        float* values = keys + s.d * ATTENTION_KEYS;  // (d, ATTENTION_KEYS)
        attention_clear0(dqkv + s.q(b, head, 0), 3 * s.T, s.C, s.d);

        for (int u0 = 0; u0 < s.T; u0 += ATTENTION_KEYS) {
            int n = std::min((int)ATTENTION_KEYS, s.T - u0);
            attention_transpose2(keys, qkv + s.k(b, head, u0), 3 * s.C, n, s.d);
            attention_transpose2(values, qkv + s.v(b, head, u0), 3 * s.C, n, s.d);
            for (int t = 0; t < s.T; t++) {
                const float* q = qkv + s.q(b, head, t);
                const float* dout_row = dout + s.out(b, head, t);
                float row_lse = lse[s.lse(b, head, t)];
                float delta = attention_dot0(dout_row, out + s.out(b, head, t), s.d);

                float probability[ATTENTION_KEYS];  // first the scores
                float ds[ATTENTION_KEYS];           // first the gradient of the probabilities
                attention_multiply2(probability, q, keys, s.d);
                attention_multiply2(ds, dout_row, values, s.d);
                SIMD_FOR (int j = 0; j < ATTENTION_KEYS; j++) {
                    probability[j] = fast_exp(s.scale * probability[j] - row_lse);
                    ds[j] = s.scale * probability[j] * (ds[j] - delta);
                }

                float* dq = dqkv + s.q(b, head, t);
                for (int j = 0; j < n; j++) {
                    attention_add0(dq, ds[j], qkv + s.k(b, head, u0 + j), s.d);
                    attention_add0(dqkv + s.k(b, head, u0 + j), ds[j], q, s.d);
                    attention_add0(dqkv + s.v(b, head, u0 + j), probability[j], dout_row, s.d);
                }
            }
        }
    });
}
#endif
#else
#include "cublas.h"

// The sum, and the maximum, of the values of neighbouring lanes, which each of them gets: 32 or 16 lanes, as many
// as share a row.
__device__ static float attention_lane_sum(float value, int lanes) {
    for (int step = lanes / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

__device__ static float attention_lane_max(float value, int lanes) {
    for (int step = lanes / 2; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

// ---- 1: cuBLAS and copies ---------------------------------------------------------------------------------
// Here heads are copied apart, so that each is a matrix by itself: (B, heads, T, d) for each of q, k and v. All
// heads together are one batched product.

// c (batch, M, N) = op(a) op(b)
static void attention_product1(float* c, const float* a, const float* b, int batch, int M, int N, int K,
                               bool transpose_a, bool transpose_b) {
    cublas_product(c, a, b, M, N, K, transpose_a, transpose_b, batch, (size_t)M * K, (size_t)K * N);
}

// Copies one of the parts of x (B, T, parts, heads, d) to head (B, heads, T, d), or `back`, from there to x. A
// thread copies a float.
__global__ void attention_permute_kernel1(float* head, float* x, int n, int T, int heads, int d, int part,
                                          int parts, bool back) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int j = i % d;
    int t = i / d % T;
    int h = i / d / T % heads;
    int b = i / d / T / heads;
    size_t at = ((((size_t)b * T + t) * parts + part) * heads + h) * d + j;
    if (back) x[at] = head[i];
    else head[i] = x[at];
}

// p (rows, T), the scores, become softmax(scale p) in place; lse (rows). A warp does a row.
__global__ void attention_softmax_kernel1(float* p, float* lse, int rows, int T, float scale) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= rows) return;
    p += (size_t)row * T;

    float maximum = -FLT_MAX;
    for (int j = lane; j < T; j += 32) maximum = fmaxf(maximum, p[j]);
    maximum = attention_lane_max(maximum, 32);

    float denominator = 0;
    for (int j = lane; j < T; j += 32) {
        p[j] = expf(scale * (p[j] - maximum));
        denominator += p[j];
    }
    denominator = attention_lane_sum(denominator, 32);

    for (int j = lane; j < T; j += 32) p[j] /= denominator;
    if (lane == 0) lse[row] = scale * maximum + logf(denominator);
}

// dp (rows, T), the gradient of the probabilities p, becomes that of q k^T in place: scale p (dp - delta),
// where delta is the sum of p dp over the row. A warp does a row.
__global__ void attention_softmax_backward_kernel1(float* dp, const float* p, int rows, int T, float scale) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= rows) return;
    dp += (size_t)row * T;
    p += (size_t)row * T;

    float delta = 0;
    for (int j = lane; j < T; j += 32) delta += p[j] * dp[j];
    delta = attention_lane_sum(delta, 32);
    for (int j = lane; j < T; j += 32) dp[j] = scale * p[j] * (dp[j] - delta);
}

static void attention_permute1(float* head, float* x, const AttentionShape& s, int part, int parts,
                               bool back) {
    int n = s.B * s.T * s.C;
    launch(attention_permute_kernel1, ceil_div(n, 256), 256, 0, head, x, n, s.T, s.heads, s.d, part, parts,
           back);
}

// heads (parts, B, heads, T, d) = x (B, T, parts, heads, d)
static void attention_split_heads1(float* heads, const float* x, const AttentionShape& s, int parts) {
    size_t n = (size_t)s.B * s.T * s.C;
    for (int part = 0; part < parts; part++)
        attention_permute1(heads + part * n, (float*)x, s, part, parts, false);
}

// x (B, T, parts, heads, d) = heads (parts, B, heads, T, d)
static void attention_join_heads1(float* x, float* heads, const AttentionShape& s, int parts) {
    size_t n = (size_t)s.B * s.T * s.C;
    for (int part = 0; part < parts; part++) attention_permute1(heads + part * n, x, s, part, parts, true);
}

static void attention_forward1(Problem& p) {
    AttentionShape s = attention_shape(p);
    int batch = s.B * s.heads;
    int rows = batch * s.T;
    size_t n = (size_t)s.B * s.T * s.C;
    float* q = p.scratch<float>("q, k, v", 4 * n);  // (4, B, heads, T, d): q, k, v and their output
    float* k = q + n;
    float* v = k + n;
    float* out = v + n;
    float* scores = p.scratch<float>("scores", (size_t)batch * s.T * s.T);  // then the probabilities

    attention_split_heads1(q, p.in<float>("qkv"), s, 3);
    attention_product1(scores, q, k, batch, s.T, s.T, s.d, false, true);  // q k^T
    launch(attention_softmax_kernel1, ceil_div(rows, 8), 256, 0, scores, p.out<float>("lse"), rows, s.T,
           s.scale);
    attention_product1(out, scores, v, batch, s.T, s.d, s.T, false, false);  // P v
    attention_join_heads1(p.out<float>("out"), out, s, 1);
}

// The probabilities were kept by the forward pass.
static void attention_backward1(Problem& p) {
    AttentionShape s = attention_shape(p);
    int batch = s.B * s.heads;
    int rows = batch * s.T;
    size_t n = (size_t)s.B * s.T * s.C;
    float* q = p.scratch<float>("q, k, v", 4 * n);  // (4, B, heads, T, d): q, k, v and dout
    float* k = q + n;
    float* v = k + n;
    float* dout = v + n;
    float* dq = p.scratch<float>("dq, dk, dv", 3 * n);  // (3, B, heads, T, d)
    float* dk = dq + n;
    float* dv = dk + n;
    float* dp = p.scratch<float>("dp", (size_t)batch * s.T * s.T);  // then dS
    const float* probabilities = p.in<float>("p");

    attention_split_heads1(q, p.in<float>("qkv"), s, 3);
    attention_split_heads1(dout, p.in<float>("dout"), s, 1);
    attention_product1(dv, probabilities, dout, batch, s.T, s.d, s.T, true, false);  // P^T dout
    attention_product1(dp, dout, v, batch, s.T, s.T, s.d, false, true);              // dout v^T
    launch(attention_softmax_backward_kernel1, ceil_div(rows, 8), 256, 0, dp, probabilities, rows, s.T,
           s.scale);
    attention_product1(dq, dp, k, batch, s.T, s.d, s.T, false, false);  // dS k
    attention_product1(dk, dp, q, batch, s.T, s.d, s.T, true, false);   // dS^T q
    attention_join_heads1(p.out<float>("dqkv"), dq, s, 3);
}

// ---- 2: softmax in the products ---------------------------------------------------------------------------
// q, k and v are read where they lie. A block of 16 x 16 threads computes a tile of 64 x 64 numbers of a product,
// and each thread 4 x 4 of them.

enum {
    ATTENTION_SIDE = 64,   // rows and columns of a block's tile
    ATTENTION_DEPTH = 16,  // of the product's sum, a step
};

// A block's operands of a step, [index of the sum][row or column of the tile].
struct AttentionTiles {
    alignas(16) float a[ATTENTION_DEPTH][ATTENTION_SIDE + 4];
    alignas(16) float b[ATTENTION_DEPTH][ATTENTION_SIDE + 4];
};

// The first of the four rows, and of the four columns, that this thread has in its block's tile.
__device__ static int attention_row2() { return threadIdx.x / 16 * 4; }
__device__ static int attention_column2() { return threadIdx.x % 16 * 4; }

// sum (4, 4) = the thread's part of the tile of a b^T at row0 and column0. a and b (T, d) have rows that are
// stride_a and stride_b apart. Rows past T count as zero.
__device__ static void attention_tile2(float sum[4][4], AttentionTiles& shared, const float* a,
                                       size_t stride_a, int row0, const float* b, size_t stride_b,
                                       int column0, int T, int d) {
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sum[i][j] = 0;

    for (int k0 = 0; k0 < d; k0 += ATTENTION_DEPTH) {
        __syncthreads();
        for (int i = threadIdx.x; i < ATTENTION_SIDE * ATTENTION_DEPTH; i += 256) {
            int k = i % ATTENTION_DEPTH;
            int r = i / ATTENTION_DEPTH;
            bool in = k0 + k < d;
            shared.a[k][r] = in && row0 + r < T ? a[(row0 + r) * stride_a + k0 + k] : 0;
            shared.b[k][r] = in && column0 + r < T ? b[(column0 + r) * stride_b + k0 + k] : 0;
        }
        __syncthreads();

        for (int k = 0; k < ATTENTION_DEPTH; k++)
            add_outer_product(sum, &shared.a[k][attention_row2()], &shared.b[k][attention_column2()]);
    }
}

// scores (B heads, T, T) = q k^T / sqrt(d), from qkv (B, T, 3 C). A block computes a tile, and so knows of each
// of its rows the maximum and the sum of exponentials relative to it: parts (B heads, T, tiles).
__global__ void __launch_bounds__(256)
    attention_scores_kernel2(float* scores, float2* parts, const float* qkv, int T, int C, int heads,
                             float scale) {
    __shared__ AttentionTiles shared;
    int index = blockIdx.z;
    int b = index / heads;
    int head = index % heads;
    int row0 = blockIdx.y * ATTENTION_SIDE;
    int column0 = blockIdx.x * ATTENTION_SIDE;
    int d = C / heads;
    const float* q = qkv + (size_t)b * T * 3 * C + head * d;
    const float* k = q + C;
    float sum[4][4];
    attention_tile2(sum, shared, q, 3 * C, row0, k, 3 * C, column0, T, d);

    int row = row0 + attention_row2();
    int column = column0 + attention_column2();
    for (int i = 0; i < 4; i++) {
        float maximum = -FLT_MAX;
        for (int j = 0; j < 4; j++) {
            sum[i][j] *= scale;
            if (column + j < T) maximum = fmaxf(maximum, sum[i][j]);
        }
        maximum = attention_lane_max(maximum, 16);  // 16 lanes have the 64 columns of a row

        float denominator = 0;
        for (int j = 0; j < 4; j++)
            if (column + j < T) denominator += expf(sum[i][j] - maximum);
        denominator = attention_lane_sum(denominator, 16);

        if (row + i >= T) continue;
        size_t at = (size_t)index * T + row + i;
        for (int j = 0; j < 4; j++)
            if (column + j < T) scores[at * T + column + j] = sum[i][j];
        if (threadIdx.x % 16 == 0) parts[at * gridDim.x + blockIdx.x] = make_float2(maximum, denominator);
    }
}

// lse = torch.logsumexp(scores, dim=-1), out (B, T, C) = exp(scores - lse) v. A block does 64 rows of a head, whose
// d is at most 64.
__global__ void __launch_bounds__(256)
    attention_values_kernel2(float* out, float* lse, const float* scores, const float2* parts,
                             const float* qkv, int T, int C, int heads, int tiles) {
    __shared__ alignas(16) float p[ATTENTION_DEPTH][ATTENTION_SIDE + 4];
    __shared__ alignas(16) float values[ATTENTION_DEPTH][ATTENTION_SIDE + 4];
    __shared__ float row_lse[ATTENTION_SIDE];
    int row0 = blockIdx.x * ATTENTION_SIDE;
    int index = blockIdx.y;
    int b = index / heads;
    int head = index % heads;
    int d = C / heads;
    const float* v = qkv + (size_t)b * T * 3 * C + 2 * C + head * d;

    if (threadIdx.x < ATTENTION_SIDE && row0 + threadIdx.x < T) {
        size_t at = (size_t)index * T + row0 + threadIdx.x;
        float maximum = -FLT_MAX;
        float denominator = 0;
        for (int i = 0; i < tiles; i++) maximum = fmaxf(maximum, parts[at * tiles + i].x);
        for (int i = 0; i < tiles; i++) {
            float2 part = parts[at * tiles + i];
            denominator += part.y * expf(part.x - maximum);
        }
        lse[at] = maximum + logf(denominator);
        row_lse[threadIdx.x] = lse[at];
    }

    float sum[4][4] = {};
    for (int k0 = 0; k0 < T; k0 += ATTENTION_DEPTH) {
        __syncthreads();
        for (int i = threadIdx.x; i < ATTENTION_SIDE * ATTENTION_DEPTH; i += 256) {
            // Neighbouring threads read scores along a row ...
            int k = i % ATTENTION_DEPTH;
            int r = i / ATTENTION_DEPTH;
            bool in = k0 + k < T && row0 + r < T;
            p[k][r] = in ? expf(scores[((size_t)index * T + row0 + r) * T + k0 + k] - row_lse[r]) : 0;

            // ... and values along the channels.
            int c = i % ATTENTION_SIDE;
            int t = i / ATTENTION_SIDE;
            values[t][c] = c < d && k0 + t < T ? v[(size_t)(k0 + t) * 3 * C + c] : 0;
        }
        __syncthreads();

        for (int k = 0; k < ATTENTION_DEPTH; k++)
            add_outer_product(sum, &p[k][attention_row2()], &values[k][attention_column2()]);
    }

    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int t = row0 + attention_row2() + i;
            int c = attention_column2() + j;
            if (t < T && c < d) out[((size_t)b * T + t) * C + head * d + c] = sum[i][j];
        }
}

static void attention_forward2(Problem& p) {
    AttentionShape s = attention_shape(p);
    assert(s.d <= ATTENTION_SIDE);
    int batch = s.B * s.heads;
    int tiles = ceil_div(s.T, ATTENTION_SIDE);
    float* scores = p.scratch<float>("scores", (size_t)batch * s.T * s.T);
    float2* parts = (float2*)p.scratch<float>("parts", (size_t)2 * batch * s.T * tiles);
    const float* qkv = p.in<float>("qkv");
    launch(attention_scores_kernel2, dim3(tiles, tiles, batch), 256, 0, scores, parts, qkv, s.T, s.C, s.heads,
           s.scale);
    launch(attention_values_kernel2, dim3(tiles, batch), 256, 0, p.out<float>("out"), p.out<float>("lse"),
           scores, parts, qkv, s.T, s.C, s.heads, tiles);
}

// delta (B heads, T): the sum of dout times out over the d channels of a row. A thread does a row.
__global__ void attention_dots_kernel2(float* delta, const float* dout, const float* out, int T, int C,
                                       int heads, int rows) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    int d = C / heads;
    if (row >= rows) return;
    int index = row / T;
    int b = index / heads;
    int t = row % T;
    int head = index % heads;
    size_t at = ((size_t)b * T + t) * C + head * d;

    float sum = 0;
    for (int j = 0; j < d; j++) sum += dout[at + j] * out[at + j];
    delta[row] = sum;
}

// p = exp(q k^T scale - lse), ds = scale p (dout v^T - delta): both (B heads, T, T). A block computes the same tile
// of both products, q k^T and dout v^T.
__global__ void __launch_bounds__(256)
    attention_gradients_kernel2(float* p, float* ds, const float* qkv, const float* dout, const float* lse,
                                const float* delta, int T, int C, int heads, float scale) {
    __shared__ AttentionTiles shared;
    int index = blockIdx.z;
    int b = index / heads;
    int head = index % heads;
    int row0 = blockIdx.y * ATTENTION_SIDE;
    int column0 = blockIdx.x * ATTENTION_SIDE;
    int d = C / heads;
    const float* q = qkv + (size_t)b * T * 3 * C + head * d;
    const float* k = q + C;
    const float* v = q + 2 * C;
    const float* dout_head = dout + (size_t)b * T * C + head * d;
    float scores[4][4];
    float dp[4][4];
    attention_tile2(scores, shared, q, 3 * C, row0, k, 3 * C, column0, T, d);
    attention_tile2(dp, shared, dout_head, C, row0, v, 3 * C, column0, T, d);

    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int t = row0 + attention_row2() + i;
            int u = column0 + attention_column2() + j;
            if (t >= T || u >= T) continue;
            size_t row = (size_t)index * T + t;
            float probability = expf(scale * scores[i][j] - lse[row]);
            p[row * T + u] = probability;
            ds[row * T + u] = scale * probability * (dp[i][j] - delta[row]);
        }
}

// to (T, d) = m (T, T) x, or m^T x, for each head of each image. The rows of `to` and x, which are (B, T, channels),
// are to_stride and x_stride apart. A block does 64 rows.
__global__ void __launch_bounds__(256)
    attention_apply_kernel2(float* to, int to_stride, const float* m, const float* x, int x_stride, int T,
                            int d, int heads, bool transposed) {
    __shared__ alignas(16) float a[ATTENTION_DEPTH][ATTENTION_SIDE + 4];
    __shared__ alignas(16) float b[ATTENTION_DEPTH][ATTENTION_SIDE + 4];
    int index = blockIdx.y;
    int row0 = blockIdx.x * ATTENTION_SIDE;
    m += (size_t)index * T * T;
    int image = index / heads;
    int head = index % heads;
    x += (size_t)image * T * x_stride + head * d;
    to += (size_t)image * T * to_stride + head * d;

    float sum[4][4] = {};
    for (int k0 = 0; k0 < T; k0 += ATTENTION_DEPTH) {
        __syncthreads();
        for (int i = threadIdx.x; i < ATTENTION_SIDE * ATTENTION_DEPTH; i += 256) {
            // Neighbouring threads read m along whichever index is contiguous.
            int k = transposed ? i / ATTENTION_SIDE : i % ATTENTION_DEPTH;
            int r = transposed ? i % ATTENTION_SIDE : i / ATTENTION_DEPTH;
            size_t at = transposed ? (size_t)(k0 + k) * T + row0 + r : (size_t)(row0 + r) * T + k0 + k;
            a[k][r] = k0 + k < T && row0 + r < T ? m[at] : 0;

            int c = i % ATTENTION_SIDE;
            int t = i / ATTENTION_SIDE;
            b[t][c] = c < d && k0 + t < T ? x[(size_t)(k0 + t) * x_stride + c] : 0;
        }
        __syncthreads();

        for (int k = 0; k < ATTENTION_DEPTH; k++)
            add_outer_product(sum, &a[k][attention_row2()], &b[k][attention_column2()]);
    }

    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int t = row0 + attention_row2() + i;
            int c = attention_column2() + j;
            if (t < T && c < d) to[(size_t)t * to_stride + c] = sum[i][j];
        }
}

static void attention_backward2(Problem& p) {
    AttentionShape s = attention_shape(p);
    assert(s.d <= ATTENTION_SIDE);
    int batch = s.B * s.heads;
    int tiles = ceil_div(s.T, ATTENTION_SIDE);
    int rows = batch * s.T;
    float* probabilities = p.scratch<float>("probabilities", (size_t)rows * s.T);
    float* ds = p.scratch<float>("ds", (size_t)rows * s.T);
    float* delta = p.scratch<float>("dots", rows);
    float* dqkv = p.out<float>("dqkv");
    const float* qkv = p.in<float>("qkv");
    const float* dout = p.in<float>("dout");
    launch(attention_dots_kernel2, ceil_div(rows, 128), 128, 0, delta, dout, p.in<float>("out"), s.T, s.C,
           s.heads, rows);
    launch(attention_gradients_kernel2, dim3(tiles, tiles, batch), 256, 0, probabilities, ds, qkv, dout,
           p.in<float>("lse"), delta, s.T, s.C, s.heads, s.scale);

    auto apply = [&](float* to, const float* m, const float* x, int x_stride, bool transposed) {
        launch(attention_apply_kernel2, dim3(tiles, batch), 256, 0, to, 3 * s.C, m, x, x_stride, s.T, s.d,
               s.heads, transposed);
    };
    const float* q = qkv;
    const float* k = qkv + s.C;
    apply(dqkv, ds, k, 3 * s.C, false);                     // dq = dS k
    apply(dqkv + s.C, ds, q, 3 * s.C, true);                // dk = dS^T q
    apply(dqkv + 2 * s.C, probabilities, dout, s.C, true);  // dv = P^T dout
}

// ---- 3: nothing of size T x T -----------------------------------------------------------------------------
// A thread keeps a row in registers, and a block of 64 goes through the other side's rows, keys or queries, in
// tiles of 16, which lie in shared memory. Heads are padded with zeros to 32 channels.

enum {
    ATTENTION_WIDTH = 32,     // channels of a head, at most
    ATTENTION_THREADS3 = 64,  // rows of a block
    ATTENTION_STEP = 16,      // rows of a tile
};

// Copies rows [t0, t0 + STEP) of a head to shared memory; zeros past T and d.
__device__ static void attention_load3(float (*tile)[ATTENTION_WIDTH], const floatX* source, size_t stride,
                                       int t0, int T, int d) {
    for (int i = threadIdx.x; i < ATTENTION_STEP * ATTENTION_WIDTH; i += ATTENTION_THREADS3) {
        int t = i / ATTENTION_WIDTH;
        int c = i % ATTENTION_WIDTH;
        tile[t][c] = t0 + t < T && c < d ? (float)source[(t0 + t) * stride + c] : 0;
    }
}

// Copies the thread's row to registers; zeros if it lies past T, and past d.
__device__ static void attention_load_row3(float row[ATTENTION_WIDTH], const floatX* source, bool inside,
                                           int d) {
#pragma unroll
    for (int c = 0; c < ATTENTION_WIDTH; c++) row[c] = inside && c < d ? (float)source[c] : 0;
}

__device__ static float attention_dot3(const float a[ATTENTION_WIDTH], const float* b) {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < ATTENTION_WIDTH; c += 4) {
        float4 four = *(const float4*)(b + c);
        sum += a[c] * four.x + a[c + 1] * four.y + a[c + 2] * four.z + a[c + 3] * four.w;
    }
    return sum;
}

// sum += factor b
__device__ static void attention_add3(float sum[ATTENTION_WIDTH], float factor, const float* b) {
#pragma unroll
    for (int c = 0; c < ATTENTION_WIDTH; c += 4) {
        float4 four = *(const float4*)(b + c);
        sum[c] += factor * four.x;
        sum[c + 1] += factor * four.y;
        sum[c + 2] += factor * four.z;
        sum[c + 3] += factor * four.w;
    }
}

// out (B, T, C) and lse (B, heads, T) from qkv (B, T, 3 C), with a running maximum and denominator: Dao et al.,
// "FlashAttention" (2022), algorithm 1. A block does 64 queries of a head, a thread one of them.
__global__ void __launch_bounds__(ATTENTION_THREADS3)
    attention_forward_kernel3(floatX* out, float* lse, const floatX* qkv, int T, int C, int heads,
                              float scale) {
    __shared__ alignas(16) float k[ATTENTION_STEP][ATTENTION_WIDTH];
    __shared__ alignas(16) float v[ATTENTION_STEP][ATTENTION_WIDTH];
    size_t b = blockIdx.z;
    int head = blockIdx.y;
    int t = blockIdx.x * ATTENTION_THREADS3 + threadIdx.x;
    int d = C / heads;
    const floatX* qkv_head = qkv + b * T * 3 * C + head * d;
    float q[ATTENTION_WIDTH];
    attention_load_row3(q, qkv_head + (size_t)t * 3 * C, t < T, d);

    float sum[ATTENTION_WIDTH] = {};
    float maximum = -FLT_MAX;
    float denominator = 0;
    for (int u0 = 0; u0 < T; u0 += ATTENTION_STEP) {
        __syncthreads();
        attention_load3(k, qkv_head + C, 3 * C, u0, T, d);
        attention_load3(v, qkv_head + 2 * C, 3 * C, u0, T, d);
        __syncthreads();

        float score[ATTENTION_STEP];
        float highest = maximum;
#pragma unroll
        for (int u = 0; u < ATTENTION_STEP; u++) {
            score[u] = u0 + u < T ? scale * attention_dot3(q, k[u]) : -FLT_MAX;
            highest = fmaxf(highest, score[u]);
        }

        // What was added up so far was relative to a lower maximum.
        float correction = expf(maximum - highest);
        maximum = highest;
        denominator *= correction;
#pragma unroll
        for (int c = 0; c < ATTENTION_WIDTH; c++) sum[c] *= correction;

#pragma unroll
        for (int u = 0; u < ATTENTION_STEP; u++) {
            float exponential = expf(score[u] - maximum);
            denominator += exponential;
            attention_add3(sum, exponential, v[u]);
        }
    }

    if (t >= T) return;
    lse[(b * heads + head) * T + t] = maximum + logf(denominator);
    floatX* target = out + (b * T + t) * C + head * d;
#pragma unroll
    for (int c = 0; c < ATTENTION_WIDTH; c++)
        if (c < d) target[c] = (floatX)(sum[c] / denominator);
}

static void attention_forward3(Problem& p) {
    AttentionShape s = attention_shape(p);
    assert(s.d <= ATTENTION_WIDTH);
    dim3 grid(ceil_div(s.T, ATTENTION_THREADS3), s.heads, s.B);
    launch(attention_forward_kernel3, grid, ATTENTION_THREADS3, 0, p.out<floatX>("out"), p.out<float>("lse"),
           p.in<floatX>("qkv"), s.T, s.C, s.heads, s.scale);
}

// dqkv (B, T, 3 C) from dout and out (B, T, C), lse (B, heads, T) and qkv (B, T, 3 C). The equations stand at
// version 0. The first half of the blocks computes dq, the second half dk and dv, and both make the
// probabilities again.
__global__ void __launch_bounds__(ATTENTION_THREADS3)
    attention_backward_kernel3(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse,
                               const floatX* qkv, int T, int C, int heads, float scale) {
    __shared__ alignas(16) float a[ATTENTION_STEP][ATTENTION_WIDTH];  // a tile of k, or of q
    __shared__ alignas(16) float b[ATTENTION_STEP][ATTENTION_WIDTH];  // of v, or of dout
    __shared__ float deltas[ATTENTION_STEP];                          // of the tile's queries
    __shared__ float lses[ATTENTION_STEP];
    int head = blockIdx.y;
    int d = C / heads;
    int blocks = gridDim.x / 2;
    bool has_queries = (int)blockIdx.x < blocks;
    int t = (blockIdx.x % blocks) * ATTENTION_THREADS3 + threadIdx.x;
    size_t image = blockIdx.z;
    const floatX* qkv_head = qkv + image * T * 3 * C + head * d;
    const floatX* dout_head = dout + image * T * C + head * d;
    const floatX* out_head = out + image * T * C + head * d;
    const float* lse_head = lse + (image * heads + head) * T;
    floatX* target = dqkv + (image * T + t) * 3 * C + head * d;

    // dq: the thread has a query, and keys and values go by.
    if (has_queries) {
        float q[ATTENTION_WIDTH];
        float dout_row[ATTENTION_WIDTH];
        float out_row[ATTENTION_WIDTH];
        float row_lse = t < T ? lse_head[t] : 0;
        attention_load_row3(q, qkv_head + (size_t)t * 3 * C, t < T, d);
        attention_load_row3(dout_row, dout_head + (size_t)t * C, t < T, d);
        attention_load_row3(out_row, out_head + (size_t)t * C, t < T, d);
        float delta = attention_dot3(dout_row, out_row);

        float dq[ATTENTION_WIDTH] = {};
        for (int u0 = 0; u0 < T; u0 += ATTENTION_STEP) {
            __syncthreads();
            attention_load3(a, qkv_head + C, 3 * C, u0, T, d);
            attention_load3(b, qkv_head + 2 * C, 3 * C, u0, T, d);
            __syncthreads();

            for (int u = 0; u < min((int)ATTENTION_STEP, T - u0); u++) {
                const float* k = a[u];
                const float* v = b[u];
                float p = expf(scale * attention_dot3(q, k) - row_lse);
                float ds = scale * p * (attention_dot3(dout_row, v) - delta);
                attention_add3(dq, ds, k);
            }
        }

        if (t >= T) return;
#pragma unroll
        for (int c = 0; c < ATTENTION_WIDTH; c++)
            if (c < d) target[c] = (floatX)dq[c];
        return;
    }

    // dk and dv: the thread has a key and its value, and queries go by.
    float k[ATTENTION_WIDTH];
    float v[ATTENTION_WIDTH];
    attention_load_row3(k, qkv_head + C + (size_t)t * 3 * C, t < T, d);
    attention_load_row3(v, qkv_head + 2 * C + (size_t)t * 3 * C, t < T, d);

    float dk[ATTENTION_WIDTH] = {};
    float dv[ATTENTION_WIDTH] = {};
    for (int u0 = 0; u0 < T; u0 += ATTENTION_STEP) {
        __syncthreads();
        attention_load3(a, qkv_head, 3 * C, u0, T, d);
        attention_load3(b, dout_head, C, u0, T, d);
        if (threadIdx.x < ATTENTION_STEP && u0 + threadIdx.x < T) {
            size_t row = (size_t)(u0 + threadIdx.x) * C;
            float delta = 0;
            for (int c = 0; c < d; c++) delta += (float)dout_head[row + c] * (float)out_head[row + c];
            deltas[threadIdx.x] = delta;
            lses[threadIdx.x] = lse_head[u0 + threadIdx.x];
        }
        __syncthreads();

        for (int u = 0; u < min((int)ATTENTION_STEP, T - u0); u++) {
            const float* q = a[u];
            const float* dout_row = b[u];
            float p = expf(scale * attention_dot3(k, q) - lses[u]);
            float ds = scale * p * (attention_dot3(v, dout_row) - deltas[u]);
            attention_add3(dk, ds, q);
            attention_add3(dv, p, dout_row);
        }
    }

    if (t >= T) return;
#pragma unroll
    for (int c = 0; c < ATTENTION_WIDTH; c++)
        if (c < d) {
            target[C + c] = (floatX)dk[c];
            target[2 * C + c] = (floatX)dv[c];
        }
}

static void attention_backward3(Problem& p) {
    AttentionShape s = attention_shape(p);
    assert(s.d <= ATTENTION_WIDTH);
    dim3 grid(2 * ceil_div(s.T, ATTENTION_THREADS3), s.heads, s.B);
    launch(attention_backward_kernel3, grid, ATTENTION_THREADS3, 0, p.out<floatX>("dqkv"),
           p.in<floatX>("dout"), p.in<floatX>("out"), p.in<float>("lse"), p.in<floatX>("qkv"), s.T, s.C,
           s.heads, s.scale);
}

// ---- 4: the program's -------------------------------------------------------------------------------------

#ifdef PROGRAM
static void attention_forward4(Problem& p) {
    attention_forward(p.tensor_out<floatX>("out"), p.out<float>("lse"), p.tensor_in<floatX>("qkv"),
                      p.dim("heads"));
}

static void attention_backward4(Problem& p) {
    attention_backward(p.tensor_out<floatX>("dqkv"), p.tensor_in<floatX>("dout"), p.tensor_in<floatX>("out"),
                       p.in<float>("lse"), p.tensor_in<floatX>("qkv"), p.dim("heads"));
}
#endif
#endif

// Of so many products of T x T x d a head, where so many tensors of B x T x C go in or out.
static Work attention_work(const Problem& p, int products, int tensors) {
    AttentionShape s = attention_shape(p);
    double operations = 2.0 * products * s.B * s.T * s.T * s.C;
    double bytes = (double)tensors * sizeof(floatX) * s.B * s.T * s.C;
    return {operations, bytes};
}

static const Ladder attention_ladder = {
    "attention",
    {{"forward", {"out", "lse"}, [](const Problem& p) { return attention_work(p, 2, 4); }},
     {"backward", {"dqkv/3"}, [](const Problem& p) { return attention_work(p, 5, 8); }}},
    {
#ifndef __CUDACC__
        {1, "forward", NHWC, CPU_FP32, "the definition", attention_forward0},
        {1, "backward", NHWC, CPU_FP32, "the definition", attention_backward0},
#ifdef PROGRAM
        {2, "forward", NHWC, CPU_FP32, "online softmax, a block of keys at a time", attention_forward2},
        {2, "backward", NHWC, CPU_FP32, "a block of keys at a time", attention_backward2},
        {3, "forward", NHWC, CPU_FP32, "train_unet.cu", attention_forward_cpu},
        {3, "backward", NHWC, CPU_FP32, "train_unet.cu", attention_backward_cpu},
#endif
#else
        {0, "forward", NHWC, CPU_FP32, "the definition", attention_forward0},
        {0, "backward", NHWC, CPU_FP32, "the definition", attention_backward0},
#ifdef PROGRAM
        {0, "forward", NHWC, CPU_FP32, "train_unet.cu on a CPU", attention_forward_cpu},
        {0, "backward", NHWC, CPU_FP32, "train_unet.cu on a CPU", attention_backward_cpu},
#endif
        {1, "forward", NHWC, FP32, "heads copied apart, cuBLAS, softmax, copied together",
         attention_forward1},
        {1, "backward", NHWC, FP32, "heads copied apart, cuBLAS, softmax, copied together",
         attention_backward1},
        {2, "forward", NHWC, FP32, "no copies; the softmax within the products", attention_forward2},
        {2, "backward", NHWC, FP32, "no copies; the softmax within the products", attention_backward2},
        {3, "forward", NHWC, FLOATX, "tiles on the chip, a thread a row", attention_forward3},
        {3, "backward", NHWC, FLOATX, "probabilities made again, a thread a row", attention_backward3},
#ifdef PROGRAM
        {4, "forward", NHWC, FLOATX, "tensor cores: the program's", attention_forward4},
        {4, "backward", NHWC, FLOATX, "tensor cores: the program's", attention_backward4},
#endif
#endif
    }};
LADDER_MAIN(attention_ladder)
