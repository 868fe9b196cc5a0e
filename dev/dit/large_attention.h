// large_attention.h: attention between 256 tokens on Hopper's tensor cores; train_dit.cu includes it.
//
// The program's own attention gives a block 64 rows of a head. The block reads the other side's rows again for each
// of them, and in backward makes the probabilities twice. Here a block has a head of an image to itself, all of it in
// shared memory, and nothing is read twice. All scores of a row are there before its softmax. Backward makes P and dS
// once, and all three gradients from them: five products instead of seven, without parts to add up. 256 tokens are
// what the paper's models have of images of 256 x 256, in latents; other numbers of tokens take the program's own
// attention.
//
// Heads of up to 72 channels are padded with zeros by the copy engine. It sees q, k and v of an image as (T, heads, d).
// Where a box leaves the d channels, it loads zeros, and it stores nothing.
#pragma once

#ifdef HOPPER
namespace gpu {

enum { LARGE_TOKENS = 256 };

// ---- rows of a head in shared memory, and products of them

// A thread's number in its warpgroup, and this_warpgroup(). What follows from either is computed anew where it is
// needed. Otherwise the compiler would compute it before a loop and keep it, in registers that the sums need.
__device__ inline int thread_now() {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread % 128;
}

__device__ inline int warpgroup_now() {
    int warpgroup = threadIdx.x / 128;
    asm volatile("" : "+r"(warpgroup));
    return __shfl_sync(~0u, warpgroup, 0);
}

// The descriptors by which products read rows of a head: of the first 64 channels, and of the others.
struct HeadMatrix {
    uint64_t wide, narrow;
};

// ROWS tokens of a head of D channels. The first 64 channels are rows of 128 bytes, as everywhere. For a head of 72,
// behind all of these rows come rows of 32 bytes: the other 8 channels, and 8 zeros. In every other four of them the
// two vectors of 16 bytes change places. The copy engine and wgmma know that as the 32-byte swizzle.
template <int D, int ROWS> struct HeadRows {
    static_assert(D == 64 || D == 72, "heads of 80 leave backward too few registers");
    static_assert(ROWS % 64 == 0,
                  "rows of either kind begin at a multiple of 1024 bytes: swizzling goes by it");
    enum { NARROW = ROWS * 128 };  // where the rows of 32 bytes begin
    unsigned char bytes[NARROW + (D > 64 ? ROWS * 32 : 0)];

    __device__ HeadMatrix matrix() const {
        const uint32_t at = shared_address(bytes);
        return {matrix_descriptor(at, 1024), matrix_descriptor(at + NARROW, 256) | 2ull << 62};
    }

    // Stores a warpgroup's sums c (64, D) as rows from `first` on, rounded. A thread has two rows, each of which is
    // multiplied by a factor.
    __device__ __forceinline__ void put(int first, const float* c, float factor0, float factor1) {
        const int thread = thread_now();
        const int right = thread / 16 % 2;  // which of two vectors the thread addresses
        const int row = first + thread / 32 * 16 + thread % 16;
        UNROLLED_FOR (int j = 0; j < D / 8; j += 2) {
            uint32_t r[4] = {};
            UNROLLED_FOR (int i = 0; i < 4; i++) {
                const float factor = i % 2 ? factor1 : factor0;
                const float* pair = c + 4 * j + 2 * i;
                if (j + i / 2 < D / 8) r[i] = pack_bf16(pair[0] * factor, pair[1] * factor);
            }
            const int wide = swizzled(row, j + right);
            const int narrow = (right ^ (row / 4 & 1)) * 16;
            store_matrices(shared_address(bytes) + (j < 8 ? wide : NARROW + row * 32 + narrow), r);
        }
    }
};

// The maps of a tensor (B, T, heads, d), by which the copy engine moves rows of a head. In qkv, heads are those of q,
// then of k, then of v.
struct HeadMaps {
    CUtensorMap wide, narrow;
};

// Done by one thread: copies rows of a head to shared memory, from token at.y of head at.x on, or back.
template <int D, int ROWS>
__device__ inline void load_rows(HeadRows<D, ROWS>& to, const HeadMaps& maps, Barrier& full, Pixel at) {
    tma_load(to.bytes, maps.wide, full, 0, at);
    if (D > 64) tma_load(to.bytes + to.NARROW, maps.narrow, full, 64, at);
}

template <int D, int ROWS>
__device__ inline void store_rows(const HeadMaps& maps, const HeadRows<D, ROWS>& from, int row, Pixel at) {
    tma_store(maps.wide, from.bytes + row * 128, 0, at);
    if (D > 64) tma_store(maps.narrow, from.bytes + from.NARROW + row * 32, 64, at);
}

// c (64, N) += a (64, 16) b (16, N), b transposed. a is in registers, in the order in which a product leaves its sums.
template <int N> __device__ inline void wgmma_of_registers(float* c, const uint32_t* a, uint64_t b) {
    static_assert(N == 8 || N == 64, "a shape that is spelled below");
    // clang-format off
    if constexpr (N == 8)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, %8, 1, 1, 1, 1;"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    if constexpr (N == 64)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
            : REGISTERS_8(c, 0), REGISTERS_8(c, 8), REGISTERS_8(c, 16), REGISTERS_8(c, 24)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    // clang-format on
}

// What is done with sums before this stays before it, and what is done with them after it stays after it. Otherwise the
// compiler would move some of it between the products there, and then let each product wait for the one before.
template <int N> __device__ __forceinline__ void keep_in_place(float (&c)[N]) {
    UNROLLED_FOR (float& sum : c) asm volatile("" : "+f"(sum)::"memory");
}

template <int N> __device__ __forceinline__ void begin_sums(float (&c)[N]) {
    UNROLLED_FOR (float& sum : c) sum = 0;
    keep_in_place(c);
}

// Waits for all products that were begun before, not only those of c.
template <int N> __device__ __forceinline__ void await_sums(float (&c)[N]) {
    wgmma_wait<0>();
    keep_in_place(c);
}

// c (64, N) += a (64, D) b^T, b (N, D). A step takes 16 channels, which are 32 bytes.
template <int D, int N> __device__ __forceinline__ void add_scores(float* c, HeadMatrix a, HeadMatrix b) {
    UNROLLED_FOR (int k = 0; k < 4; k++) wgmma<N, 0, 0>(c, advance(a.wide, 32 * k), advance(b.wide, 32 * k));
    if (D > 64) wgmma<N, 0, 0>(c, a.narrow, b.narrow);
}

// c (64, D) += p (64, 16 STEPS) b, b (16 STEPS, D). A step takes 16 rows, which are 2048 bytes of wide rows, and 512 of
// narrow ones.
template <int D, int STEPS>
__device__ __forceinline__ void add_weighted(float* c, const uint32_t* p, HeadMatrix b) {
    UNROLLED_FOR (int k = 0; k < STEPS; k++) {
        wgmma_of_registers<64>(c, p + 4 * k, advance(b.wide, 2048 * k));
        if (D > 64) wgmma_of_registers<8>(c + 32, p + 4 * k, advance(b.narrow, 512 * k));
    }
}

// ---- forward

struct LargeForward {
    HeadMaps qkv, out;  // of 128 rows, of 64
    float* lse;         // (B, heads, T)
    int heads, items;   // heads of an image, and of all images
    float scale;
};

// An item is a head of an image. It comes in pieces of 128 rows: two of q, two of k and two of v.
enum { PIECE_Q = 0, PIECE_K = 2, PIECE_V = 4, PIECES = 6 };

template <int D> struct LargeForwardShared {
    enum { SLOTS = D > 64 ? 11 : 12 };
    static_assert((int)SLOTS > PIECES, "the next item comes while this one is worked on");
    HeadRows<D, 128> slots[SLOTS];
    RingBarriers<SLOTS> ring;
    Barrier turn[2];  // each warpgroup waits for its own before it multiplies
};

// out = softmax(q k^T scale) v, and lse = the logarithm of each row's sum of exp(q k^T scale).
//
// A block does item after item. One thread lets the copy engine fill a ring with pieces. Each of two warpgroups has
// 128 queries, and does 64 of them at a time: S = q k^T, all 256 scores of a row; then P = exp(S scale - the row's
// largest); then P v, divided by the row's sum of P. The outputs go out by way of where q was. The warpgroups make S
// in turn, so that one multiplies while the other makes P. Device memory: qkv in and out out, once each.
template <int D>
__global__ void __launch_bounds__(384, 1) large_forward_kernel(const __grid_constant__ LargeForward g) {
    await_inputs();
    using Shared = LargeForwardShared<D>;
    using Place = Ring<Shared::SLOTS>;
    extern __shared__ __align__(1024) unsigned char hopper_shared[];
    auto& shared = *(Shared*)hopper_shared;
    const int warpgroup = this_warpgroup();
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        shared.ring.init(2);
        for (Barrier& turn : shared.turn) turn.init(1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    __syncthreads();

    if (warpgroup == 2) {
        SET_REGISTERS("dec", 24);
        if (threadIdx.x > 256) return;
        Place at = {0, 1};
        for (int item = blockIdx.x; item < g.items; item += gridDim.x)
            for (int n = 0; n < PIECES; n++, at.next()) {
                shared.ring.empty[at.slot].wait(at.parity);
                shared.ring.full[at.slot].expect(sizeof shared.slots[0]);
                load_rows(shared.slots[at.slot], g.qkv, shared.ring.full[at.slot],
                          {item / g.heads, n % 2 * 128, n / 2 * g.heads + item % g.heads});
            }
        return;
    }

    SET_REGISTERS("inc", 240);  // all begin with 168: 2 * 240 + 24 = 3 * 168
    const bool leads = threadIdx.x % 128 == 0;
    int turn = warpgroup == 0;  // its parity: the first comes at once
    Place at;                   // of the item's first piece
    auto piece = [&](int n) {
        Place place = at;
        place.skip(n);
        return place;
    };
    auto await = [&](int n) {  // waits for a piece, and returns it as a matrix
        const Place place = piece(n);
        shared.ring.full[place.slot].wait(place.parity);
        return shared.slots[place.slot].matrix();
    };
    auto release = [&](int n) {
        if (leads) shared.ring.empty[piece(n).slot].arrive();
    };

    const float unit = g.scale * 1.44269504f;  // scale / ln 2, because exp(x) = exp2(x / ln 2)

    for (int item = blockIdx.x; item < g.items; item += gridDim.x, at.skip(PIECES))
#pragma unroll 1
        for (int tile = 0; tile < 2; tile++) {
            const Place rows = piece(PIECE_Q + warpgroup);  // where q is, and the outputs go

            // S (64, 256), of which a thread has four of each eight keys, as wgmma leaves them.
            float s[128];
            HeadMatrix q = await(PIECE_Q + warpgroup);
            HeadMatrix k[2] = {await(PIECE_K), await(PIECE_K + 1)};
            if (tile) {
                q.wide = advance(q.wide, 64 * 128);
                q.narrow = advance(q.narrow, 64 * 32);
            }
            shared.turn[warpgroup].wait(turn);
            turn ^= 1;
            begin_sums(s);
            wgmma_begin();
            UNROLLED_FOR (int i = 0; i < 2; i++) add_scores<D, 128>(s + 64 * i, q, k[i]);
            wgmma_commit();
            await_sums(s);
            if (leads) shared.turn[!warpgroup].arrive();
            if (tile) {
                release(PIECE_K);
                release(PIECE_K + 1);
            } else {
                await(PIECE_Q + !warpgroup);  // the other warpgroup's, which this one does not read
                release(PIECE_Q + !warpgroup);
            }

            // P, with each row's largest score and sum. A row's scores are in four threads.
            float top[2], offset[2], total[2];  // of the thread's two rows
            UNROLLED_FOR (int i = 0; i < 2; i++) {
                top[i] = s[2 * i];
                total[i] = 0;
                UNROLLED_FOR (int j = 2 * i; j < 128; j += 4) top[i] = fmaxf(top[i], fmaxf(s[j], s[j + 1]));
                for (int step = 1; step < 4; step *= 2)
                    top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
                offset[i] = top[i] * unit;
            }
            uint32_t p[64];  // rows of each 16 keys, as wgmma takes them
            UNROLLED_FOR (int j = 0; j < 64; j++) {
                const float low = exp2_fast(s[2 * j] * unit - offset[j % 2]);
                const float high = exp2_fast(s[2 * j + 1] * unit - offset[j % 2]);
                total[j % 2] += low;
                total[j % 2] += high;
                p[j] = pack_bf16(low, high);
            }
            UNROLLED_FOR (int i = 0; i < 2; i++)
                for (int step = 1; step < 4; step *= 2) total[i] += __shfl_xor_sync(~0u, total[i], step);

            // P v (64, D)
            float o[D / 2];
            const HeadMatrix v[2] = {await(PIECE_V), await(PIECE_V + 1)};
            begin_sums(o);
            wgmma_begin();
            UNROLLED_FOR (int i = 0; i < 2; i++) add_weighted<D, 8>(o, p + 32 * i, v[i]);
            wgmma_commit();
            await_sums(o);
            if (tile) {
                release(PIECE_V);
                release(PIECE_V + 1);
            }

            const int first = 128 * warpgroup + 64 * tile;  // of these 64 queries
            const int row = first + threadIdx.x % 128 / 32 * 16 + lane / 4;
            for (int i = 0; i < 2; i++)
                if (lane % 4 == 0)
                    g.lse[(size_t)item * LARGE_TOKENS + row + 8 * i] = top[i] * g.scale + logf(total[i]);

            auto& outputs = shared.slots[rows.slot];
            warpgroup_barrier(warpgroup);  // q has been read
            outputs.put(64 * tile, o, 1 / total[0], 1 / total[1]);
            fence_shared();
            warpgroup_barrier(warpgroup);
            if (leads) {
                store_rows(g.out, outputs, 64 * tile, {item / g.heads, first, item % g.heads});
                if (tile) {
                    ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
                    shared.ring.empty[rows.slot].arrive();
                }
            }
        }
}

// ---- backward

struct LargeBackward {
    HeadMaps qkv, dout_maps, dqkv;  // of 64 rows
    const floatX *dout, *out;       // (B, h, h, heads d)
    const float* lse;               // (B, heads, T)
    int heads, items, d;            // heads of an image, and of all images; their channels
    float scale;
};

template <int D> struct LargeBackwardShared {
    HeadRows<D, 64> q[4], dout[4], k[4], v[4];
    Rows64 ds[2][4];  // dS^T, all keys by 64 queries, of two tiles of queries
    float dots[LARGE_TOKENS], normalisers[LARGE_TOKENS];  // of the queries, as in attention_dots
    Barrier queries[4], keys[2];                          // q and dout; k and v of a warpgroup's keys
};
static_assert(sizeof(LargeForwardShared<72>) <= 227 << 10 && sizeof(LargeBackwardShared<72>) <= 227 << 10,
              "what a block may have");

// P = exp(q k^T scale - lse), dS = P (dout v^T - dots) scale, where dots are each query's dot product of dout and out;
// then dv = P^T dout, dk = dS^T q, dq = dS k.
//
// A block does item after item. Each of two warpgroups has 128 keys. Of 64 of them and 64 queries at a time it makes
// S^T = k q^T and dP^T = v dout^T. So P^T and dS^T, rounded, are in registers as the products for dv and dk take
// them. One product waits for the other: all that could run at once has no room beside the sums of 128 keys. dS^T
// also goes to shared memory: after every 128 queries each warpgroup makes dq of 64 of them, over all keys.
//
// Gradients go out by way of where q, k and v were. A warpgroup's first thread sends them off, and lets the next item
// come there. Device memory: qkv, dout and out in, dqkv out, once each, but dout twice.
template <int D>
__global__ void __launch_bounds__(256, 1) large_backward_kernel(const __grid_constant__ LargeBackward g) {
    await_inputs();
    extern __shared__ __align__(1024) unsigned char hopper_shared[];
    auto& shared = *(LargeBackwardShared<D>*)hopper_shared;
    const int warpgroup = this_warpgroup();
    const bool leads = threadIdx.x % 128 == 0;
    enum { PART_Q, PART_K, PART_V };
    auto at = [&](int item, int part, int tile) {  // 64 rows of q, k or v
        return Pixel{item / g.heads, 64 * tile, part * g.heads + item % g.heads};
    };
    auto load_queries = [&](int item, int tile) {
        shared.queries[tile].expect(2 * sizeof shared.q[0]);
        load_rows(shared.q[tile], g.qkv, shared.queries[tile], at(item, PART_Q, tile));
        load_rows(shared.dout[tile], g.dout_maps, shared.queries[tile], at(item, PART_Q, tile));
    };
    auto load_keys = [&](int item) {
        Barrier& full = shared.keys[warpgroup];
        full.expect(4 * sizeof shared.k[0]);
        for (int tile = 2 * warpgroup; tile < 2 * warpgroup + 2; tile++) {
            load_rows(shared.k[tile], g.qkv, full, at(item, PART_K, tile));
            load_rows(shared.v[tile], g.qkv, full, at(item, PART_V, tile));
        }
    };
    if (threadIdx.x == 0) {
        for (Barrier& barrier : shared.queries) barrier.init(1);
        for (Barrier& barrier : shared.keys) barrier.init(1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    __syncthreads();
    if (leads) {
        load_keys(blockIdx.x);
        for (int step = 0; step < 2; step++) load_queries(blockIdx.x, 2 * step + warpgroup);
    }

    const float unit = g.scale * 1.44269504f;  // scale / ln 2, because exp(x) = exp2(x / ln 2)
    int parity = 0;  // of the item's queries and keys
    for (int item = blockIdx.x; item < g.items; item += gridDim.x) {
        const int next = item + gridDim.x;
        // Stores what dS needs of each query: the dot product of dout and out, and lse / ln 2. Eight threads have every
        // 32nd row.
        {
            const int C = g.heads * g.d;
            const int row = threadIdx.x / 8;
            const size_t first = ((size_t)(item / g.heads) * LARGE_TOKENS + row) * C + item % g.heads * g.d;
            float dots[8] = {};
            for (int c = threadIdx.x % 8 * VEC; c < g.d; c += 8 * VEC)
                UNROLLED_FOR (int i = 0; i < 8; i++) {
                    const size_t from = first + (size_t)i * 32 * C + c;
                    Unpacked a = unpack(g.dout + from);
                    Unpacked b = unpack(g.out + from);
                    UNROLLED_FOR (int e = 0; e < VEC; e++) dots[i] += a[e] * b[e];
                }
            UNROLLED_FOR (int i = 0; i < 8; i++) {
                for (int step = 1; step < 8; step *= 2) dots[i] += __shfl_xor_sync(~0u, dots[i], step);
                if (threadIdx.x % 8 == 0) shared.dots[row + 32 * i] = dots[i];
            }
            shared.normalisers[threadIdx.x] = g.lse[(size_t)item * LARGE_TOKENS + threadIdx.x] * 1.44269504f;
        }
        __syncthreads();

        float dk[2][D / 2] = {}, dv[2][D / 2] = {};  // of each 64 of the keys
        shared.keys[warpgroup].wait(parity);
#pragma unroll 1
        for (int step = 0; step < 2; step++) {
#pragma unroll 1
            for (int n = 0; n < 2; n++) {
                const int tile = 2 * step + n;
                const HeadMatrix q = shared.q[tile].matrix();
                const HeadMatrix dout = shared.dout[tile].matrix();
                const int warpgroup = warpgroup_now();
                const int thread = thread_now();
                const int key = thread / 32 * 16 + thread % 16;
                const int query = 64 * tile + thread % 4 * 2;  // of each eight columns a thread has two
                shared.queries[tile].wait(parity);
                UNROLLED_FOR (int half = 0; half < 2; half++) {
                    const int keys = 2 * warpgroup + half;
                    float p[32], ds[32];
                    uint32_t rounded_p[16], rounded_ds[16];

                    begin_sums(p);  // S^T, then P^T
                    wgmma_begin();
                    add_scores<D, 64>(p, shared.k[keys].matrix(), q);
                    wgmma_commit();
                    await_sums(p);
                    UNROLLED_FOR (int j = 0; j < 16; j++) {
                        const float2 normaliser = *(const float2*)(shared.normalisers + query + j / 2 * 8);
                        p[2 * j] = exp2_fast(p[2 * j] * unit - normaliser.x);
                        p[2 * j + 1] = exp2_fast(p[2 * j + 1] * unit - normaliser.y);
                        rounded_p[j] = pack_bf16(p[2 * j], p[2 * j + 1]);
                    }

                    begin_sums(ds);  // dP^T
                    wgmma_begin();
                    add_weighted<D, 4>(dv[half], rounded_p, dout);
                    add_scores<D, 64>(ds, shared.v[keys].matrix(), dout);
                    wgmma_commit();
                    await_sums(ds);
                    UNROLLED_FOR (int j = 0; j < 16; j++) {  // dS^T without scale, by which dk and dq are multiplied
                        const float2 dot = *(const float2*)(shared.dots + query + j / 2 * 8);
                        rounded_ds[j] =
                            pack_bf16(p[2 * j] * (ds[2 * j] - dot.x), p[2 * j + 1] * (ds[2 * j + 1] - dot.y));
                    }

                    wgmma_begin();
                    add_weighted<D, 4>(dk[half], rounded_ds, q);
                    wgmma_commit();
                    UNROLLED_FOR (int j = 0; j < 8; j += 2)
                        store_matrices(
                            shared_address(shared.ds[n][keys]) + swizzled(key, j + thread / 16 % 2),
                            rounded_ds + 2 * j);
                }
            }
            wgmma_wait<0>();
            shared.keys[!warpgroup].wait(parity);
            fence_shared();
            __syncthreads();  // dS is there, and nobody reads these q and dout any more

            const int tile = 2 * step + warpgroup;
            float dq[D / 2];
            begin_sums(dq);
            wgmma_begin();
            UNROLLED_FOR (int keys = 0; keys < 4; keys++) {
                const uint64_t a = matrix_descriptor(shared_address(shared.ds[warpgroup][keys]), 1024);
                const HeadMatrix b = shared.k[keys].matrix();
                UNROLLED_FOR (int k = 0; k < 4; k++) {
                    wgmma<64, 1, 1>(dq, advance(a, 2048 * k), advance(b.wide, 2048 * k));
                    if (D > 64) wgmma<8, 1, 1>(dq + 32, advance(a, 2048 * k), advance(b.narrow, 512 * k));
                }
            }
            wgmma_commit();
            await_sums(dq);
            __syncthreads();  // dS has been read, and after the last step k too

            shared.q[tile].put(0, dq, g.scale, g.scale);
            fence_shared();
            warpgroup_barrier(warpgroup);
            if (leads) {
                store_rows(g.dqkv, shared.q[tile], 0, at(item, PART_Q, tile));
                ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
                if (next < g.items) load_queries(next, tile);
            }
        }

        UNROLLED_FOR (int half = 0; half < 2; half++) {
            shared.k[2 * warpgroup + half].put(0, dk[half], g.scale, g.scale);
            shared.v[2 * warpgroup + half].put(0, dv[half], 1, 1);
        }
        fence_shared();
        warpgroup_barrier(warpgroup);
        if (leads) {
            for (int tile = 2 * warpgroup; tile < 2 * warpgroup + 2; tile++) {
                store_rows(g.dqkv, shared.k[tile], 0, at(item, PART_K, tile));
                store_rows(g.dqkv, shared.v[tile], 0, at(item, PART_V, tile));
            }
            ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
            if (next < g.items) load_keys(next);
        }
        parity ^= 1;
    }
}

// ---- launchers. Each returns whether it took the attention; otherwise the program's own does it.

static HeadMaps head_maps(Tensor x, int d, int rows) {
    const Tensor heads = {x.data, x.B, x.T(), x.C / d, d};
    const Box box = {1, rows, 1};
    return {tensor_map(heads, box), d > 64 ? tensor_map(heads, box, 16) : CUtensorMap()};
}

// Small heads are not taken: padded to 64 channels they take longer than with the program's own.
static bool takes_large_attention(Tensor out, int heads) {
    const int d = out.C / heads;
    return out.T() == LARGE_TOKENS && d % 8 == 0 && d <= 72 && takes_large(d > 32);
}

// launch(D), where heads are padded to D channels, which are a constant of the kernels.
static void with_large_head(int d, auto launch) {
    if (d > 64) launch(std::integral_constant<int, 72>());
    else launch(std::integral_constant<int, 64>());
}

static bool large_attention_forward(Tensor out, float* lse, Tensor qkv, int heads) {
    if (!takes_large_attention(out, heads)) return false;

    const int d = out.C / heads;
    const int items = out.B * heads;
    PROFILE("attention forward", {4.0 * LARGE_TOKENS * out.count(), 4.0 * sizeof(floatX) * out.count()});
    LargeForward g = {
        .qkv = head_maps(qkv, d, 128),
        .out = head_maps(out, d, 64),
        .lse = lse,
        .heads = heads,
        .items = items,
        .scale = 1 / sqrtf((float)d),
    };
    with_large_head(d, [&](auto D) {
        launch(large_forward_kernel<D>, std::min(items, gpu_multiprocessors), 384,
               sizeof(LargeForwardShared<D>), g);
    });
    return true;
}

static bool large_attention_backward(Tensor dqkv, Tensor dout, Tensor out, const float* lse, Tensor qkv,
                                     int heads) {
    if (!takes_large_attention(out, heads)) return false;

    const int d = out.C / heads;
    const int items = out.B * heads;
    PROFILE("attention backward", {8.0 * LARGE_TOKENS * out.count(), 8.0 * sizeof(floatX) * out.count()});
    LargeBackward g = {
        .qkv = head_maps(qkv, d, 64),
        .dout_maps = head_maps(dout, d, 64),
        .dqkv = head_maps(dqkv, d, 64),
        .dout = dout.data,
        .out = out.data,
        .lse = lse,
        .heads = heads,
        .items = items,
        .d = d,
        .scale = 1 / sqrtf((float)d),
    };
    with_large_head(d, [&](auto D) {
        launch(large_backward_kernel<D>, std::min(items, gpu_multiprocessors), 256,
               sizeof(LargeBackwardShared<D>), g);
    });
    return true;
}

}  // namespace gpu
using gpu::large_attention_forward, gpu::large_attention_backward;
#else
static bool large_attention_forward(Tensor, float*, Tensor, int) { return false; }
static bool large_attention_backward(Tensor, Tensor, Tensor, const float*, Tensor, int) { return false; }
#endif

// Attention between tokens; maths and shapes stand in section 3 of train_unet.cu.
static void token_attention_forward(Tensor out, float* lse, Tensor qkv, int heads) {
    if (large_attention_forward(out, lse, qkv, heads)) return;
    attention_forward(out, lse, qkv, heads);
}

static void token_attention_backward(Tensor dqkv, Tensor dout, Tensor out, const float* lse, Tensor qkv,
                                     int heads) {
    if (large_attention_backward(dqkv, dout, out, lse, qkv, heads)) return;
    attention_backward(dqkv, dout, out, lse, qkv, heads);
}
