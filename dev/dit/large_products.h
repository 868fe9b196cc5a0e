// large_products.h: linear layers with many rows, on Hopper's tensor cores; train_dit.cu includes it.
//
// The program's own 1x1 products have tiles of 64 channels by 128 pixels: right for a UNet's, of which there are many
// small ones. Each byte that a tile takes from the L2 serves 43 operations, which keeps an H200 at half its peak. Here
// tiles are 128 by 192, for 77 operations a byte. 192 divides the widths of the paper's models, but not 1024.
//
// GELU, or its gradient, is done while a product's outputs are at hand: see Nothing. A gate is not done there: its
// loads made a product of DiT-XL/2 take 40 us longer on an H200, and by itself it takes 12.
#pragma once

#ifdef HOPPER
namespace gpu {

static int forced_large = -1;  // set by tests: 1, every product is a large one; 0, none is

// A product sums A (M, K) times B (N, K) over k. Either matrix lies in memory as it is written here or, as COLUMNS,
// transposed: (K, M), (K, N).
//
// A weight gradient is a product with A as COLUMNS. It has few tiles and many k, so that whole tiles would leave blocks
// without work in the last round. When every block has had the same number of whole tiles, the tiles that are left are
// split along k, and their parts are added up by a second kernel.
enum { LARGE_M = 128, LARGE_N = 192, LARGE_STAGES = 4 };

// A part of a tile's sums, and of the sums of A's rows, which are the gradient of a bias.
struct LargePart {
    float sums[LARGE_M][LARGE_N], rows[LARGE_M];
};

struct LargeProduct {
    CUtensorMap a, b;
    int M, N, K;
    floatX* out = {};             // (M, N), of a linear layer forward, or its input gradient
    const floatX* bias = {};      // (N), or null
    float *dw = {}, *dbias = {};  // (M, N), (M) or null: of a weight gradient
    int whole = 0, splits = 1;    // the tiles from `whole` on are split into so many parts
    LargePart* parts = {};        // (splits, tiles that are split)

    __host__ __device__ int n_tiles() const { return ceil_div(N, LARGE_N); }
    __host__ __device__ int tiles() const { return ceil_div(M, LARGE_M) * n_tiles(); }
    __host__ __device__ int chunks() const { return ceil_div(K, 64); }  // of 64 k
    __host__ __device__ int items() const { return whole + splits * (tiles() - whole); }
};

// What is done to a large product's outputs while they are at hand: nothing, or a layer of gelu.h. Such a layer can
// also be run by itself, with the same bits. A thread calls
//     extra(first)                   to load what the layer needs for the 16 bytes from element `first` on
//     finish(first, product, extra)  to do the layer's work on these bytes of the product
// and stores the product itself, unless OVERWRITES says that the layer's output takes its place.
struct Nothing {
    enum { OVERWRITES = false };
    __device__ int extra(size_t) const { return 0; }
    __device__ void finish(size_t, const auto&, int) const {}
};

// A block's way through the items. An item is a tile, or a part of one: its chunks [first, last), for the outputs from
// row m0 and column n0 on. Parts come after the whole tiles, and all first parts before all second ones. So all blocks
// are at about the same k at a time, and what several of them need comes from the L2.
struct LargeWalk {
    const LargeProduct& g;
    int item = blockIdx.x - gridDim.x, first, last, m0, n0;

    // Goes to the block's next item. False: there is none.
    __device__ bool next() {
        item += gridDim.x;
        if (item >= g.items()) return false;

        const int rest = g.tiles() - g.whole;  // tiles that are split
        const int split = item < g.whole ? 0 : (item - g.whole) / rest;
        const int tile = item - split * rest;
        const int splits = item < g.whole ? 1 : g.splits;
        first = split * g.chunks() / splits;
        last = (split + 1) * g.chunks() / splits;
        m0 = tile / g.n_tiles() * LARGE_M;
        n0 = tile % g.n_tiles() * LARGE_N;
        return true;
    }
};

struct LargeShared {
    struct Stage {
        Rows64 a[2], b[3];
    } stages[LARGE_STAGES];
    Rows64 outputs[2][3];  // of each warpgroup: 64 rows of its tile
    RingBarriers<LARGE_STAGES> ring;
    Barrier turn[2];    // each warpgroup waits for its own before it multiplies
    uint32_t ones[64];  // eight rows of 16 k, in bf16: a product with them adds up A's rows
};

// Stores four 8x8 matrices, a register of each in every thread, to the address that each thread names for a row.
__device__ inline void store_matrices(uint32_t address, const uint32_t* r) {  // r: 4
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Finishes a warpgroup's tile, c (128, 192) from row m0 and column n0 of the outputs on: adds the bias, rounds, and
// does what comes `then`. The outputs go through shared memory, 64 rows at a time, so that threads next to each other
// store vectors next to each other.
template <class After>
__device__ __forceinline__ void large_outputs(const LargeProduct& g, const After& then, Rows64 (&outputs)[3],
                                              const float (&c)[192], int m0, int n0, int warpgroup) {
    int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const int line = thread / 32 * 16;  // the warp's first row, of 64

    // Of each half of the rows: two columns of a thread's row, then of the row eight further down.
    uint32_t rounded[2][48];
    UNROLLED_FOR (int j = 0; j < 24; j++) {
        const int n = n0 + 8 * j + lane % 4 * 2;
        const uint32_t bias = g.bias && n < g.N ? *(const uint32_t*)(g.bias + n) : 0;
        const float low = bf16_of_pair(bias, 0);
        const float high = bf16_of_pair(bias, 1);
        UNROLLED_FOR (int i = 0; i < 4; i++) {
            const float* pair = c + i / 2 * 96 + 4 * j + 2 * (i % 2);
            rounded[i / 2][2 * j + i % 2] = pack_bf16(pair[0] + low, pair[1] + high);
        }
    }

    UNROLLED_FOR (int half = 0; half < 2; half++) {
        // Without this the compiler computes early what follows from `thread`, and keeps it in registers that the sums
        // need.
        asm volatile("" : "+r"(thread));

        // A thread has a vector of every 16th row, in each panel of 64 columns. What `then` reads of the next panel is
        // loaded before this panel's outputs are stored.
        const int row = thread / 8;
        const int vector = thread % 8;
        const int m = m0 + 64 * half + row;
        size_t at[4];
        decltype(then.extra(0)) extra[4], next[4];
        // How many rows there are from the thread's first on, or 0 if the outputs have no such columns.
        auto rows = [&](int panel) { return n0 + panel * 64 + vector * VEC < g.N ? g.M - m : 0; };
        auto load_next = [&](int panel) {
            UNROLLED_FOR (int k = 0; k < 4; k++)
                if (16 * k < rows(panel)) next[k] = then.extra(at[k] + 64 * panel);
        };
        UNROLLED_FOR (int k = 0; k < 4; k++) at[k] = (size_t)(m + 16 * k) * g.N + n0 + vector * VEC;
        load_next(0);

        warpgroup_barrier(warpgroup);  // the last have been read
        UNROLLED_FOR (int j = 0; j < 24; j += 2) {
            const int to = j + lane / 16;
            store_matrices(shared_address(outputs[to / 8]) + swizzled(line + lane % 16, to % 8),
                           rounded[half] + 2 * j);
        }
        warpgroup_barrier(warpgroup);

        UNROLLED_FOR (int panel = 0; panel < 3; panel++) {
            UNROLLED_FOR (int k = 0; k < 4; k++) extra[k] = next[k];
            if (panel < 2) load_next(panel + 1);
            UNROLLED_FOR (int k = 0; k < 4; k++) {
                if (16 * k >= rows(panel)) break;
                auto product = *(const Vector<floatX, VEC>*)(outputs[panel] + swizzled(row + 16 * k, vector));
                if (!After::OVERWRITES) store(g.out + at[k] + 64 * panel, product);
                then.finish(at[k] + 64 * panel, product, extra[k]);
            }
        }
    }
}

// Done by one thread: fills the ring with chunks of 64 k, of all items that the block does.
template <bool A_COLUMNS, bool B_COLUMNS>
__device__ __forceinline__ void large_produce(const LargeProduct& g, LargeShared& shared, LargeWalk& at) {
    Ring<LARGE_STAGES> stage = {0, 1};
    while (at.next())
        for (int chunk = at.first; chunk < at.last; chunk++, stage.next()) {
            auto& to = shared.stages[stage.slot];
            Barrier& full = shared.ring.full[stage.slot];
            shared.ring.empty[stage.slot].wait(stage.parity);
            full.expect(sizeof to);

            if (A_COLUMNS) {
                for (int i = 0; i < 2; i++) tma_load(to.a[i], g.a, full, at.m0 + 64 * i, {0, 0, chunk * 64});
            } else {
                tma_load(to.a, g.a, full, chunk * 64, {0, 0, at.m0});
            }
            if (B_COLUMNS) {
                for (int i = 0; i < 3; i++) tma_load(to.b[i], g.b, full, at.n0 + 64 * i, {0, 0, chunk * 64});
            } else {
                tma_load(to.b, g.b, full, chunk * 64, {0, 0, at.n0});
            }
        }
}

// A block does item after item. One thread lets the copy engine fill a ring with chunks of 64 k. Two warpgroups take
// items in turn, so that one multiplies while the other's outputs leave. Device memory: of each item its chunks of A
// and B in, and its outputs out.
template <bool A_COLUMNS, bool B_COLUMNS, class After>
__global__ void __launch_bounds__(384, 1)
    large_product_kernel(const __grid_constant__ LargeProduct g, const __grid_constant__ After then) {
    await_inputs();
    extern __shared__ __align__(1024) unsigned char hopper_shared[];
    auto& shared = *(LargeShared*)hopper_shared;
    const int warpgroup = this_warpgroup();
    LargeWalk at = {g};
    if (threadIdx.x == 0) {
        shared.ring.init(1);
        for (Barrier& turn : shared.turn) turn.init(1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    if (threadIdx.x < 64) shared.ones[threadIdx.x] = 0x3f803f80;
    fence_shared();
    __syncthreads();

    if (warpgroup == 2) {
        SET_REGISTERS("dec", 24);
        if (threadIdx.x > 256) return;
        large_produce<A_COLUMNS, B_COLUMNS>(g, shared, at);
        return;
    }

    SET_REGISTERS("inc", 240);  // all begin with 168: 2 * 240 + 24 = 3 * 168
    const bool leads = threadIdx.x % 128 == 0;
    Ring<LARGE_STAGES> stage;
    auto release = [&] {  // the stage before
        if (leads) shared.ring.empty[stage.previous()].arrive();
    };
    auto skip = [&] {  // the other warpgroup's item
        bool more = at.next();
        if (more) stage.skip(at.last - at.first);
        return more;
    };
    int parity = warpgroup == 0;  // of its turn: the first comes at once
    bool more = warpgroup == 0 || skip();  // whether there may be another item
    while (more && at.next()) {
        float c[2 * 96] = {};
        float row_sums[2][4] = {};
        shared.turn[warpgroup].wait(parity);
        parity ^= 1;

        auto multiply = [&](auto with_bias) {
            constexpr bool BIAS = decltype(with_bias)::value;
#pragma unroll 1
            for (int chunk = at.first; chunk < at.last; chunk++, stage.next()) {
                auto& from = shared.stages[stage.slot];
                const uint64_t a = matrix_descriptor(shared_address(from.a), 1024);
                const uint64_t b = matrix_descriptor(shared_address(from.b), 1024, sizeof(Rows64));
                shared.ring.full[stage.slot].wait(stage.parity);
                wgmma_begin();
                UNROLLED_FOR (int k = 0; k < 4; k++)
                    UNROLLED_FOR (int half = 0; half < 2; half++) {
                        const uint64_t left = advance(a, half * sizeof(Rows64) + k * (A_COLUMNS ? 2048 : 32));
                        const uint64_t right = advance(b, k * (B_COLUMNS ? 2048 : 32));
                        wgmma<192, A_COLUMNS, B_COLUMNS>(c + 96 * half, left, right);
                        if (BIAS)
                            wgmma<8, A_COLUMNS, 0>(row_sums[half], left,
                                                   (shared_address(shared.ones) & 0x3ffff) >> 4);
                    }
                wgmma_commit();
                wgmma_wait<1>();  // the chunk before is done
                if (chunk > at.first) release();
            }
            if (leads) shared.turn[!warpgroup].arrive();
            wgmma_wait<0>();
            release();
        };
        const bool with_bias = A_COLUMNS && g.dbias && at.n0 == 0;  // one tile of each row of tiles
        if (with_bias) multiply(std::true_type());
        else multiply(std::false_type());

        if constexpr (A_COLUMNS) {
            // A weight gradient: the item is a whole tile, or a part of one.
            const int lane = threadIdx.x % 32;
            const bool whole = g.splits == 1 || at.item < g.whole;
            LargePart* part = g.parts + (at.item - g.whole);
            UNROLLED_FOR (int half = 0; half < 2; half++) {
                const int row = half * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
                UNROLLED_FOR (int i = 0; i < 48; i++) {
                    const int m = row + i % 2 * 8;
                    const int n = i / 2 * 8 + lane % 4 * 2;
                    const float2 sums = {c[half * 96 + 2 * i], c[half * 96 + 2 * i + 1]};
                    if (!whole) *(float2*)&part->sums[m][n] = sums;
                    else if (at.m0 + m < g.M && at.n0 + n < g.N)
                        *(float2*)(g.dw + (size_t)(at.m0 + m) * g.N + at.n0 + n) = sums;
                }

                // All eight columns of row_sums are the same, and one thread of four stores one.
                for (int h = 0; h < 2 && with_bias && lane % 4 == 0; h++) {
                    const int m = row + 8 * h;
                    if (!whole) part->rows[m] = row_sums[half][2 * h];
                    else if (at.m0 + m < g.M) g.dbias[at.m0 + m] = row_sums[half][2 * h];
                }
            }
        } else {
            large_outputs(g, then, shared.outputs[warpgroup], c, at.m0, at.n0, warpgroup);
        }
        more = skip();
    }
}

// Adds up the parts of the tiles that were split, in the order of k. A tile takes LARGE_SLICES blocks, and a thread has
// four columns of a row.
enum { LARGE_SLICES = 16, LARGE_ADDERS = LARGE_M / LARGE_SLICES * LARGE_N / 4 };
__global__ void __launch_bounds__(LARGE_ADDERS) large_reduce_kernel(const __grid_constant__ LargeProduct g) {
    await_inputs();
    const int rest = g.tiles() - g.whole;  // tiles that are split
    const int part = blockIdx.x / LARGE_SLICES;
    const int tile = g.whole + part;
    auto sum = [&](auto of) {  // of(part), over the tile's parts
        auto total = of(g.parts[part]);
#pragma unroll 4
        for (int split = 1; split < g.splits; split++) total += of(g.parts[split * rest + part]);
        return total;
    };

    const int row = blockIdx.x % LARGE_SLICES * (LARGE_M / LARGE_SLICES) + threadIdx.x / (LARGE_N / 4);
    const int column = threadIdx.x % (LARGE_N / 4) * 4;
    const int m = tile / g.n_tiles() * LARGE_M + row;
    const int n = tile % g.n_tiles() * LARGE_N + column;
    if (m >= g.M || n >= g.N) return;

    *(float4*)(g.dw + (size_t)m * g.N + n) =
        sum([&](const LargePart& from) { return *(const float4*)&from.sums[row][column]; });
    if (g.dbias && n == 0) g.dbias[m] = sum([&](const LargePart& from) { return from.rows[row]; });
}

// ---- launchers. Each returns whether it took the product; otherwise the program's own does it.

// The map of a matrix (rows, columns), for copies of `box` rows of 64 columns.
static CUtensorMap matrix_map(const floatX* data, int rows, int columns, int box) {
    return tensor_map({(floatX*)data, 1, 1, rows, columns}, {box, 1, 1});
}

template <bool A_COLUMNS, bool B_COLUMNS, class After>
static void launch_large(const LargeProduct& g, const After& then) {
    launch(large_product_kernel<A_COLUMNS, B_COLUMNS, After>, std::min(g.items(), gpu_multiprocessors), 384,
           sizeof(LargeShared), g, then);
}

// Large tiles are taken where there are enough of them, or where tests say so.
static bool takes_large(bool enough) { return forced_large < 0 ? enough : forced_large; }
static bool fills_multiprocessors(int M, int N) {
    return ceil_div(M, LARGE_M) * ceil_div(N, LARGE_N) >= gpu_multiprocessors;
}

template <class After = Nothing>
static bool large_forward(Tensor out, Tensor x, const Linear& layer, const After& then = {}) {
    const int M = x.rows();
    const int N = out.C;
    const int K = x.C;
    if (!takes_large(fills_multiprocessors(M, N))) return false;

    PROFILE("1x1 forward", convolution_work(M, 1, K, N));
    LargeProduct g = {matrix_map(x.data, M, K, LARGE_M), matrix_map(layer.w, N, K, LARGE_N), M, N, K};
    g.out = out.data;
    g.bias = layer.bias;
    launch_large<false, false>(g, then);
    return true;
}

template <class After = Nothing>
static bool large_input_gradient(Tensor dx, Tensor dout, const Linear& layer, const After& then = {}) {
    const int M = dx.rows();
    const int N = dx.C;
    const int K = dout.C;
    if (!takes_large(fills_multiprocessors(M, N))) return false;

    PROFILE("1x1 dX", convolution_work(M, 1, K, N));
    LargeProduct g = {matrix_map(dout.data, M, K, LARGE_M), matrix_map(layer.w, K, N, 64), M, N, K};
    g.out = dx.data;
    launch_large<false, true>(g, then);
    return true;
}

// Into how many parts the `rest` tiles of a weight gradient are split: the number that takes the least time, estimated
// in clocks of an H200, of those whose parts have room in `bytes`.
static int best_splits(const LargeProduct& g, int rest, size_t bytes) {
    int splits = 1;
    double least = INFINITY;
    for (int s = 1; s <= std::min(g.chunks(), 16) && s * rest * sizeof(LargePart) <= bytes; s++) {
        double clocks = ceil_div(s * rest, gpu_multiprocessors) * (ceil_div(g.chunks(), s) * 800.0 + 2500);
        if (s > 1) clocks += 5000 + 90.0 * s * rest;  // the second kernel
        if (clocks < least) {
            least = clocks;
            splits = s;
        }
    }
    return splits;
}

static bool large_weight_gradient(Linear layer, Tensor dout, Tensor x) {
    const int M = dout.C;
    const int N = x.C;
    const int K = x.rows();
    LargeProduct g = {matrix_map(dout.data, K, M, 64), matrix_map(x.data, K, N, 64), M, N, K};
    const int rest = g.tiles() % gpu_multiprocessors;  // tiles that no longer give every block one
    if (!takes_large((double)g.tiles() * g.chunks() >= 8.0 * gpu_multiprocessors)) return false;

    on_side_stream_deferred([=]() mutable {
        PROFILE("1x1 dW", convolution_work(K, 1, N, M, sizeof(float)));
        Arena workspace = stream->workspace;
        g.dw = layer.dw;
        g.dbias = layer.dbias;
        g.whole = g.tiles() - rest;
        g.splits = best_splits(g, rest, workspace.capacity);
        if (g.splits > 1) g.parts = take<LargePart>(&workspace, g.splits * rest);
        launch_large<true, true>(g, Nothing());
        if (g.splits > 1) launch(large_reduce_kernel, rest * LARGE_SLICES, LARGE_ADDERS, 0, g);
    });
    return true;
}

}  // namespace gpu
using gpu::large_forward, gpu::large_input_gradient, gpu::large_weight_gradient;
#else
static bool large_forward(Tensor, Tensor, const Linear&, const auto&...) { return false; }
static bool large_input_gradient(Tensor, Tensor, const Linear&, const auto&...) { return false; }
static bool large_weight_gradient(const Linear&, Tensor, Tensor) { return false; }
#endif

// A linear layer and its gradients: a large product, or the program's own; for shapes see section 3 of train_unet.cu.
static void dit_linear_forward(Tensor out, Tensor x, Linear layer) {
    if (large_forward(out, x, layer)) return;
    conv1x1_forward(out, x, layer);
}

static void dit_linear_backward(Tensor dx, Tensor dout, Linear layer) {
    if (large_input_gradient(dx, dout, layer)) return;
    conv1x1_backward_input(dx, dout, layer);
}

static void dit_linear_weights(Linear layer, Tensor dout, Tensor x) {
    if (large_weight_gradient(layer, dout, x)) return;
    on_side_stream_deferred([=] { conv1x1_backward_weight(layer, dout, x); });
}

// The same, followed by a layer that reads what they wrote. It is a pass of its own, unless the product is a large one.
static void dit_linear_forward(Tensor out, Tensor x, Linear layer, const auto& then) {
    if (large_forward(out, x, layer, then)) return;
    conv1x1_forward(out, x, layer);
    run(then);
}

static void dit_linear_backward(Tensor dx, Tensor dout, Linear layer, const auto& then) {
    if (large_input_gradient(dx, dout, layer, then)) return;
    conv1x1_backward_input(dx, dout, layer);
    run(then);
}
