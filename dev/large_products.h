// large_products.h: linear layers with many rows, on Hopper's tensor cores, for train_dit.cu, after which it is included.
//
// The program's own 1x1 products have tiles of 64 channels by 128 pixels: right for a UNet's, of which there are
// many small ones. Each of their sums costs a byte of the L2's bandwidth for every 43 operations, which
// keeps an H200 at half its peak. Here two warpgroups share a tile of 128 by 192, for 77 operations a byte. 192 divides
// the widths of the paper's models.
//
// What follows a product element by element, GELU or a gate, is done where its outputs still are at hand: it is a layer
// that has, besides operator() for where it is run by itself,
//     Extra extra(at)                  loads what it needs at `at`, a TokenVector
//     void finish(at, product, extra)  does its work on the product's vector; OVERWRITES: nobody reads the product
// and both ways give the same bits.
#pragma once

struct Nothing {
    enum { OVERWRITES = false };
    struct Extra {};
    HOST_DEVICE Extra extra(const auto&) const { return {}; }
    HOST_DEVICE void finish(const auto&, const auto&, Extra) const {}
};

#ifdef HOPPER
namespace gpu {

static int forced_large = -1;  // set by tests: 1, every product; 0, none

// Sums over k of A (M, K) times B (N, K). A or B lies as it is written here, or, as COLUMNS, transposed: (K, M), (K, N).
enum { LARGE_M = 128, LARGE_N = 192, LARGE_STAGES = 4 };
struct LargeProduct {
    CUtensorMap a, b;
    int M, N, K, splits = 1;   // parts of K, whose sums are apart
    Tensor out = {};           // (M, N), of a linear layer forward, or its input gradient
    const floatX* bias = {};   // (N), or null
    float* sums = {};          // (splits, M, N), of a weight gradient
    float* bias_sums = {};     // (splits, M): A's rows added up, or null
    __host__ __device__ int m_tiles() const { return ceil_div(M, LARGE_M); }
    __host__ __device__ int n_tiles() const { return ceil_div(N, LARGE_N); }
    __host__ __device__ int tiles() const { return splits * m_tiles() * n_tiles(); }
    // Split s has chunks of 64 k [first_chunk(s), first_chunk(s + 1)).
    __device__ int first_chunk(int s) const { return (int)((long long)s * ceil_div(K, 64) / splits); }
};
struct LargeShared {
    struct Stage {
        Rows64 a[2], b[3];
    } stages[LARGE_STAGES];
    Rows64 outputs[2][3];  // of a warpgroup
    RingBarriers<LARGE_STAGES> ring;
    uint32_t ones[32];  // eight rows of eight k, in bf16
};

__device__ inline void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// What becomes of a warpgroup's sums, 64 rows from m0 on by LARGE_N columns: rounded, and through shared memory, so that
// threads next to each other have vectors next to each other.
template <class After>
__device__ __forceinline__ void large_outputs(const LargeProduct& g, const After& after, Rows64 (&outputs)[3],
                                              const float (&c)[96], const uint32_t (&bias)[24], int m0, int n0,
                                              int warpgroup) {
    const int lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16;
    warpgroup_barrier(warpgroup);  // the last tile's have been read
    UNROLLED_FOR (int j = 0; j < 24; j += 2) {
        uint32_t r[4];
        UNROLLED_FOR (int i = 0; i < 4; i++) {
            const float* pair = c + 4 * (j + i / 2) + 2 * (i % 2);
            const uint32_t added = bias[j + i / 2];
            r[i] = pack_bf16(pair[0] + bf16_of_pair(added, 0), pair[1] + bf16_of_pair(added, 1));
        }
        const int vector = j + lane / 16;
        store_matrices(shared_address(outputs[vector / 8]) + swizzled(line + lane % 16, vector % 8), r);
    }
    warpgroup_barrier(warpgroup);
    enum { AT_ONCE = 4 };  // whose loads come before their stores: none waits for another
    UNROLLED_FOR (int i = 0; i < 64 * 24 / 128; i += AT_ONCE) {
        Vector<floatX, VEC> product[AT_ONCE];
        typename After::Extra extra[AT_ONCE];
        TokenVector<floatX> at[AT_ONCE];
        bool inside[AT_ONCE];
        UNROLLED_FOR (int k = 0; k < AT_ONCE; k++) {
            const int item = (i + k) * 128 + threadIdx.x % 128, row = item / 24, vector = item % 24;
            product[k] = *(const Vector<floatX, VEC>*)(outputs[vector / 8] + swizzled(row, vector % 8));
            at[k] = TokenVector<floatX>(m0 + row, n0 + vector * VEC, g.out);
            inside[k] = m0 + row < g.M && n0 + vector * VEC < g.N;
            if (inside[k]) extra[k] = after.extra(at[k]);
        }
        UNROLLED_FOR (int k = 0; k < AT_ONCE; k++) {
            if (!inside[k]) continue;
            if (!After::OVERWRITES) store(g.out.data + at[k].first, product[k]);
            after.finish(at[k], product[k], extra[k]);
        }
    }
}

// A block takes tile after tile: a thread lets the copy engine fill a ring with chunks of 64 k, of which each of two
// warpgroups multiplies its 64 rows of A with all of B. The next tile's chunks come while this one's outputs leave.
template <bool A_COLUMNS, bool B_COLUMNS, class After>
__global__ void __launch_bounds__(384, 1)
    large_product_kernel(const __grid_constant__ LargeProduct g, const __grid_constant__ After after) {
    await_inputs();
    extern __shared__ __align__(1024) unsigned char hopper_shared[];
    auto& shared = *(LargeShared*)hopper_shared;
    const int warpgroup = this_warpgroup(), lane = threadIdx.x % 32, n_tiles = g.n_tiles(),
              sum_tiles = g.m_tiles() * n_tiles, tiles = g.tiles();
    if (threadIdx.x == 0) {
        shared.ring.init(2);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    if (threadIdx.x < 32) shared.ones[threadIdx.x] = 0x3f803f80;
    fence_shared();
    __syncthreads();

    if (warpgroup == 2) {
        SET_REGISTERS("dec", 40);
        if (threadIdx.x > 256) return;
        Ring<LARGE_STAGES> stage = {0, 1};
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int split = tile / sum_tiles, m0 = tile % sum_tiles / n_tiles * LARGE_M,
                      n0 = tile % n_tiles * LARGE_N, last = g.first_chunk(split + 1);
            for (int chunk = g.first_chunk(split); chunk < last; chunk++, stage.next()) {
                auto& to = shared.stages[stage.slot];
                Barrier& full = shared.ring.full[stage.slot];
                shared.ring.empty[stage.slot].wait(stage.parity);
                full.expect(sizeof to);
                if (!A_COLUMNS) copy_box(to.a, g.a, full, chunk * 64, {0, 0, m0});
                for (int i = 0; i < 2 && A_COLUMNS; i++)
                    copy_box(to.a[i], g.a, full, m0 + 64 * i, {0, 0, chunk * 64});
                if (!B_COLUMNS) copy_box(to.b, g.b, full, chunk * 64, {0, 0, n0});
                for (int i = 0; i < 3 && B_COLUMNS; i++)
                    copy_box(to.b[i], g.b, full, n0 + 64 * i, {0, 0, chunk * 64});
            }
        }
        return;
    }

    SET_REGISTERS("inc", 232);  // all begin with 168: 2 * 232 + 40 = 3 * 168
    const int line = threadIdx.x % 128 / 32 * 16;  // the first of a warp's 16 rows of its warpgroup's 64
    Ring<LARGE_STAGES> stage;
    auto release = [&] {  // the stage before
        if (threadIdx.x % 128 == 0) shared.ring.empty[stage.previous()].arrive();
    };
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int split = tile / sum_tiles, m0 = tile % sum_tiles / n_tiles * LARGE_M + warpgroup * 64,
                  n0 = tile % n_tiles * LARGE_N;
        const int first = g.first_chunk(split), last = g.first_chunk(split + 1);
        uint32_t bias[24] = {};  // of a thread's two columns of each eight; it arrives during the product
        if (g.bias)
            UNROLLED_FOR (int j = 0; j < 24; j++) {
                const int n = n0 + 8 * j + lane % 4 * 2;
                if (n < g.N) bias[j] = *(const uint32_t*)(g.bias + n);
            }
        float c[96] = {}, row_sums[4] = {};
        auto multiply = [&](auto with_bias) {
            constexpr bool BIAS = decltype(with_bias)::value;
#pragma unroll 1
            for (int chunk = first; chunk < last; chunk++, stage.next()) {
                auto& from = shared.stages[stage.slot];
                const uint64_t a = shared_matrix(shared_address(from.a[warpgroup]), 1024);
                const uint64_t b = shared_matrix(shared_address(from.b), 1024, sizeof(Rows64));
                shared.ring.full[stage.slot].wait(stage.parity);
                wgmma_begin();
                UNROLLED_FOR (int k = 0; k < 4; k++) {
                    const uint64_t left = further(a, k * (A_COLUMNS ? 2048 : 32));
                    wgmma<192, A_COLUMNS, B_COLUMNS>(c, left, further(b, k * (B_COLUMNS ? 2048 : 32)));
                    if (BIAS) wgmma<8, A_COLUMNS, 0>(row_sums, left, (shared_address(shared.ones) & 0x3ffff) >> 4);
                }
                wgmma_commit();
                wgmma_wait<1>();  // the chunk before is done
                if (chunk > first) release();
            }
            wgmma_wait<0>();
            release();
        };
        if (A_COLUMNS && g.bias_sums && n0 == 0) multiply(std::true_type());
        else multiply(std::false_type());

        if constexpr (A_COLUMNS) {  // a weight gradient, in fp32
            float* to = g.sums + (size_t)split * g.M * g.N;
            const int m = m0 + line + lane / 4;
            UNROLLED_FOR (int i = 0; i < 48; i++) {
                const int row = m + i % 2 * 8, n = n0 + i / 2 * 8 + lane % 4 * 2;
                if (row < g.M && n < g.N) *(float2*)(to + (size_t)row * g.N + n) = make_float2(c[2 * i], c[2 * i + 1]);
            }
            for (int h = 0; h < 2 && n0 == 0 && g.bias_sums; h++)
                if (lane % 4 == 0 && m + 8 * h < g.M) g.bias_sums[(size_t)split * g.M + m + 8 * h] = row_sums[2 * h];
        } else {
            large_outputs(g, after, shared.outputs[warpgroup], c, bias, m0, n0, warpgroup);
        }
    }
}

// A matrix (rows, columns) in copies of so many rows of 64 columns.
static CUtensorMap matrix_map(const floatX* data, int rows, int columns, int box) {
    return tensor_map({(floatX*)data, 1, 1, rows, columns}, {box, 1, 1});
}
template <bool A_COLUMNS, bool B_COLUMNS, class After>
static void launch_large(const LargeProduct& g, const After& after) {
    launch(large_product_kernel<A_COLUMNS, B_COLUMNS, After>, std::min(g.tiles(), gpu_multiprocessors), 384,
           sizeof(LargeShared), g, after);
}
// Whether a product has enough tiles for every multiprocessor.
static bool is_large(int M, int N) {
    return forced_large >= 0 ? forced_large : ceil_div(M, LARGE_M) * ceil_div(N, LARGE_N) >= gpu_multiprocessors;
}

template <class After> static bool large_forward(Tensor out, Tensor x, const Linear& layer, const After& after) {
    const int M = x.rows(), N = out.C, K = x.C;
    if (!is_large(M, N)) return false;
    PROFILE("1x1 forward", convolution_work(M, 1, K, N));
    LargeProduct g = {matrix_map(x.data, M, K, LARGE_M), matrix_map(layer.w, N, K, LARGE_N), M, N, K};
    g.out = out, g.bias = layer.bias;
    launch_large<false, false>(g, after);
    return true;
}
template <class After> static bool large_input_gradient(Tensor dx, Tensor dout, const Linear& layer, const After& after) {
    const int M = dx.rows(), N = dx.C, K = dout.C;
    if (!is_large(M, N)) return false;
    PROFILE("1x1 dX", convolution_work(M, 1, K, N));
    LargeProduct g = {matrix_map(dout.data, M, K, LARGE_M), matrix_map(layer.w, K, N, 64), M, N, K};
    g.out = dx;
    launch_large<false, true>(g, after);
    return true;
}
// The splits that take the least time, estimated in clocks of an H200: blocks' turns, and moving the sums.
static bool large_weight_gradient(Linear layer, Tensor dout, Tensor x) {
    const int M = dout.C, N = x.C, K = x.rows(), chunks = ceil_div(K, 64);
    const int tiles = ceil_div(M, LARGE_M) * ceil_div(N, LARGE_N);
    if (forced_large < 0 ? tiles * chunks < 8 * gpu_multiprocessors : !forced_large) return false;
    on_side_lane([=] {
        PROFILE("1x1 dW", convolution_work(K, 1, N, M, sizeof(float)));
        const double most = (double)(lane->workspace.capacity - ((size_t)1 << 20));
        double least = 0;
        int splits = 1;
        for (int s = 1; s == 1 || (s <= chunks && s <= 32 && 4.0 * s * (M + 0.0) * (N + 1) < most); s++) {
            double clocks = ceil_div(s * tiles, gpu_multiprocessors) * (ceil_div(chunks, s) * 850.0 + 3000);
            if (s > 1) clocks += 8.0 * s * M * N / 1800 + 3000;
            if (s == 1 || clocks < least) least = clocks, splits = s;
        }
        WeightGradient sums = {layer.dw, layer.dbias, {dout.data, 1, 1, K, M}, {{x.data, 1, 1, K, N}}, {}, 1};
        sums.patch.images = 1, sums.splits = splits;
        launch_weight_sums(sums, [&](const WeightGradient& w) {
            LargeProduct g = {matrix_map(dout.data, K, M, 64), matrix_map(x.data, K, N, 64), M, N, K, splits};
            g.sums = w.partial ? w.partial : w.dw, g.bias_sums = w.bias_parts;
            launch_large<true, true>(g, Nothing());
        });
    }, true);
    return true;
}

}  // namespace gpu
using gpu::large_forward, gpu::large_input_gradient, gpu::large_weight_gradient;
#else
static bool large_forward(Tensor, Tensor, const Linear&, const auto&) { return false; }
static bool large_input_gradient(Tensor, Tensor, const Linear&, const auto&) { return false; }
static bool large_weight_gradient(const Linear&, Tensor, Tensor) { return false; }
#endif

// A linear layer and what follows it; for shapes see room 3 of train_unet.cu. Weight gradients as there.
template <class After> static void linear_forward(Tensor out, Tensor x, Linear layer, const After& after) {
    if (large_forward(out, x, layer, after)) return;
    product_forward(out, x, layer);
    if constexpr (requires { after.items(); }) run(after);
}
template <class After> static void linear_backward(Tensor dx, Tensor dout, Linear layer, const After& after) {
    if (large_input_gradient(dx, dout, layer, after)) return;
    input_gradient(dx, dout, layer);
    if constexpr (requires { after.items(); }) run(after);
}
static void linear_weights(Linear layer, Tensor dout, Tensor x) {
    if (!large_weight_gradient(layer, dout, x)) weight_gradient(layer, dout, x);
}
