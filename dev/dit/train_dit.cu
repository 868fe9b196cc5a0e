// train_dit.cu: trains and samples a Diffusion Transformer. The network alone is here; all else, diffusion,
// samplers, optimiser, data, files, command line, is train_unet.cu's, which this includes.
//
//   make train_dit                                   two folders above: builds for the GPU or the CPU
//   ./train_dit --preset dit32                       a small one, on the demo's faces
//   ./train_dit --model DiT-S/2 --data_file X.bin    the paper's sizes: S, B, L, XL with patches of 2, 4, 8
//   ./train_dit --help                               every flag with its default
//
// The network is that of Peebles and Xie, "Scalable Diffusion Models with Transformers" (2023), with adaLN-Zero
// blocks; parameters have the names and the order of its authors' program. train_dit.py, the same in PyTorch,
// imports their weights. README.md here tells how to add a network in this way.
//
// D = hidden_size; T tokens an image, h = sqrt(T) a side; P = patch_size. Tokens are a tensor (B, h, h, D).

#include "../../train_unet.cu"

#include "gelu.h"

// ==== 1  CONFIGURATION =====================================================================================

// The UNet's flags give way to ours. Header fields from 119 on are free.
static void set_flags() {
    const std::vector<std::string> of_unet = split(
        "num_channels channel_mult num_res_blocks attention_resolutions norm_groups num_head_channels "
        "dropout num_heads_upsample resblock_updown conv_resample use_scale_shift_norm "
        "use_new_attention_order",
        ' ');
    std::erase_if(FLAGS, [&](const Flag& flag) { return std::ranges::count(of_unet, flag.name); });
    auto place = [](const char* name) { return std::ranges::find(FLAGS, std::string(name), &Flag::name); };
    place("image_size")->standard = "32";
    *place("num_heads") = {FIELD(num_heads), INT, MODEL, FIXED, "6", "of every attention", 1, 1024};
    FLAGS.insert(place("num_heads"),
                 {{FIELD(depth), INT, MODEL, FIXED, "12", "transformer blocks", 1, 1000},
                  {FIELD(hidden_size), INT, MODEL, FIXED, "384", "channels of a token", 8, 8192},
                  {FIELD(patch_size), INT, MODEL, FIXED, "2", "pixels a token is high and wide", 1, 64},
                  {FIELD(mlp_ratio), FLOAT, MODEL, FIXED, "4",
                   "width of a block's MLP in units of hidden_size", 0.125, 64}});
    FLAGS.insert(place("preset"), {FIELD(model), PATH, FILES, FORGOTTEN, "",
                                   "a size of the paper, DiT-S/2 to DiT-XL/8, as listed below"});
#define OF_PATCH(name, patch, flags) \
    Preset { "DiT-" name "/" patch, flags " --patch_size " patch }
#define OF_SIZE(name, flags) \
    OF_PATCH(name, "2", flags), OF_PATCH(name, "4", flags), OF_PATCH(name, "8", flags)
    PRESETS = {{"dit32",
                "--data_file data/faces.bin --image_size 32 --patch_size 4 --depth 8 "
                "--hidden_size 256 --num_heads 4 --predict v --noise_schedule cosine --batch_size 32 "
                "--lr 5e-4 --lr_schedule cosine --warmup_steps 200 --ema_rate 0.999 --steps 8000"},
               OF_SIZE("S", "--depth 12 --hidden_size 384 --num_heads 6"),
               OF_SIZE("B", "--depth 12 --hidden_size 768 --num_heads 12"),
               OF_SIZE("L", "--depth 24 --hidden_size 1024 --num_heads 16"),
               OF_SIZE("XL", "--depth 28 --hidden_size 1152 --num_heads 16")};
}

enum { FREQUENCIES = 256 };  // sines and cosines that a timestep becomes
static int tokens_a_side(const Config& c) { return c.image_size / c.patch_size; }
static int mlp_width(const Config& c) { return (int)((float)c.hidden_size * c.mlp_ratio); }

// Refuses, in a sentence, what can't be.
static void check_network(const Config& c) {
    if (c.image_size % c.patch_size)
        fail("--image_size %d is no multiple of --patch_size %d", c.image_size, c.patch_size);
    if (tokens_a_side(c) > MAX_ATTENTION_SIZE)
        fail("attention between %d x %d tokens does not fit; use a larger --patch_size", tokens_a_side(c),
             tokens_a_side(c));
    if (c.hidden_size % CHANNEL_MULTIPLE || mlp_width(c) % CHANNEL_MULTIPLE)
        fail("--hidden_size %d, and that times --mlp_ratio %s, must be multiples of %d", c.hidden_size,
             float_text(c.mlp_ratio).c_str(), CHANNEL_MULTIPLE);
    if (c.hidden_size % c.num_heads)
        fail("--num_heads %d does not divide --hidden_size %d", c.num_heads, c.hidden_size);
    if ((10 + 2.0 * c.mlp_ratio) * c.depth * c.hidden_size * c.hidden_size > INT32_MAX)
        fail("--depth %d blocks of --hidden_size %d have more than %d parameters", c.depth, c.hidden_size,
             INT32_MAX);
    auto [multiple, most] = head_channels();  // of 8 does as well: DiT-XL has 72
    if (int d = c.hidden_size / c.num_heads; d % std::min(multiple, (int)CHANNEL_MULTIPLE) || d > most)
        fail("heads of %d channels: a GPU's attention takes multiples of 8 up to %d", d, most);
}

// ==== 2  LAYERS ============================================================================================
// Written once for both builds, as in section 3 of train_unet.cu. A vector is 16 bytes of channels.
template <typename T> struct TokenVector {
    enum { N = 16 / sizeof(T) };
    size_t first;  // its place in the tensor
    int b, c;      // image and first channel
    HOST_DEVICE TokenVector(size_t item, const TensorOf<T>& x)
        : first(item * N), b((int)(first / x.C / x.T())), c((int)(first % x.C)) {}
    static size_t count(const TensorOf<T>& x) { return x.count() / N; }
};

// tokens (B, h, h, padded(P P C)): the pixels of an image's patches, by row, column and channel; or the image
// (B, H, W, pitch) from them, and from its gradient theirs. What is padded is 0. An item is a pixel.
template <typename T> struct Patches {
    TensorOf<T> tokens, image;
    int patch, channels;
    bool to_image = false;

    size_t items() const { return (size_t)image.B * image.H * image.W; }
    HOST_DEVICE void operator()(size_t pixel) const {
        int x = (int)(pixel % image.W), row = (int)(pixel / image.W), y = row % image.H, b = row / image.H;
        size_t token = ((size_t)b * tokens.H + y / patch) * tokens.W + x / patch;
        int within = y % patch * patch + x % patch;
        T *in_token = tokens.data + token * tokens.C + within * channels,
          *in_image = image.data + pixel * image.C;
        for (int c = 0; c < channels; c++)
            if (to_image) in_image[c] = in_token[c];
            else in_token[c] = in_image[c];
        for (int c = channels; c < image.C && to_image; c++) in_image[c] = (T)0.0f;
        if (!to_image && within == patch * patch - 1)
            for (int c = channels; within * channels + c < tokens.C; c++) in_token[c] = (T)0.0f;
    }
};

// out (B, h, h, D) = the tokens' places: sines, then cosines, of the column, then of the row, a quarter of D
// each, of frequencies 10000^(-4 i / D). An item is an element of every image.
template <typename T> struct Positions {
    TensorOf<T> out;

    HOST_DEVICE size_t items() const { return (size_t)out.H * out.W * out.C; }
    HOST_DEVICE void operator()(size_t item) const {
        int token = (int)(item / out.C), c = (int)(item % out.C), quarter = out.C / 4, i = c % quarter;
        int place = c / quarter < 2 ? token % out.W : token / out.W;
        double angle = place * exp(-log(10000.0) * i / quarter);
        T value = (T)(float)(c / quarter % 2 ? cos(angle) : sin(angle));
        for (int b = 0; b < out.B; b++) out.data[b * items() + item] = value;
    }
};

// What a team's threads share, and where they wait for each other; on the CPU one thread is all there is.
#ifdef __CUDA_ARCH__
#define SHARED __shared__
#define team_wait() __syncthreads()
#else
#define SHARED
#define team_wait()
#endif

// They are warps: each has tokens of its own, and a thread vectors of their channels.
struct TokenWarp {
    enum { LANES = ON_GPU ? 32 : 1 };
    int number, count, lane;
    HOST_DEVICE TokenWarp(Team team)
        : number(team.thread / LANES), count(team.threads / LANES), lane(team.thread % LANES) {}
    HOST_DEVICE static float sum(Sum value) {  // in every lane
#ifdef __CUDA_ARCH__
        for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
#endif
        return (float)value;
    }
};

// out = F.layer_norm(x, (D,), eps=1e-6) * (1 + scale) + shift, the latter two an image's (B, D); statistics
// (rows): each token's mean and rstd.
template <typename T> struct LayerNormForward {
    TensorOf<T> out, x;
    float2* statistics;
    RowsOf<T> shift, scale;

#ifdef __CUDA_ARCH__
    enum { KEPT = 5 };
#else
    enum { KEPT = 1 };
#endif
    enum { TOKENS = ON_GPU ? 4 : 1, THREADS = TOKENS * TokenWarp::LANES, N = 16 / sizeof(T) };
    enum { BLOCKS = 7 };  // for 72 registers a thread: with 79, an H100 has fewer tokens under way
    size_t items() const { return ceil_div(x.rows(), TOKENS); }
    HOST_DEVICE void operator()(Team team) const {
        const TokenWarp warp(team);
        const int token = team.index * TOKENS + warp.number, b = token / x.T();
        const int C = x.C, begin = warp.lane * N, step = warp.LANES * N;
        if (b >= x.B) return;
        const T* from = x.data + (size_t)token * C;
        T* to = out.data + (size_t)token * C;
        ::Vector<T, N> kept[KEPT] = {};  // a thread's first vectors stay in registers
        UNROLLED_FOR (int i = 0; i < KEPT; i++)
            if (begin + i * step < C) kept[i] = load<N>(from + begin + i * step);
        auto each = [&](auto work) {  // work(first channel, vector)
            UNROLLED_FOR (int i = 0; i < KEPT; i++)
                if (begin + i * step < C) work(begin + i * step, kept[i]);
            for (int c = begin + KEPT * step; c < C; c += step) work(c, load<N>(from + c));
        };
        Sum sum = 0, squares = 0;
        each([&](int, ::Vector<T, N> value) {
            for (int k = 0; k < N; k++) sum += (float)value[k];
        });
        float mean = warp.sum(sum) / C;
        each([&](int, ::Vector<T, N> value) {
            for (int k = 0; k < N; k++) squares += ((float)value[k] - mean) * ((float)value[k] - mean);
        });
        float rstd = 1 / sqrtf(warp.sum(squares) / C + 1e-6f);
        if (warp.lane == 0) statistics[token] = {mean, rstd};
        each([&](int c, ::Vector<T, N> value) {
            ::Vector<T, N> scales = load<N>(scale.row(b) + c), shifts = load<N>(shift.row(b) + c);
            for (int k = 0; k < N; k++)
                value[k] =
                    (T)(((float)value[k] - mean) * rstd * (1 + (float)scales[k]) + (float)shifts[k]);
            store(to + c, value);
        });
    }
};

// out = x + gate * branch, gate an image's (B, D).
template <typename T> struct Gate {
    TensorOf<T> out, branch;
    RowsOf<T> gate;
    TensorOf<T> x;

    size_t items() const { return TokenVector<T>::count(out); }
    HOST_DEVICE void operator()(size_t item) const {
        enum { N = TokenVector<T>::N };
        TokenVector<T> at(item, out);
        ::Vector<T, N> values = load<N>(branch.data + at.first), gates = load<N>(gate.row(at.b) + at.c),
                       sum = load<N>(x.data + at.first);
        for (int k = 0; k < N; k++)
            sum[k] = (T)((float)sum[k] + (float)gates[k] * (float)values[k]);
        store(out.data + at.first, sum);
    }
};

// Backward at a place x of the residual stream, where a branch BEGINS with a norm, normed = norm(x), or one
// ENDS with a gate, x = ... + gate * branch, or both. dx is `around`, the gradient that comes by the stream
// itself (or is without data), and what comes through the norm, whose output has the gradient dy: with g = dy
// (1 + scale) and x^ = (x - mean) rstd it is rstd (g - (sum g + x^ sum g x^) / D). normed is made again, and
// dbranch = gate * dx. A team does SLAB_TOKENS of an image: first each warp the two sums of some tokens, then
// each thread a vector of channels of some. It leaves a row of sums over its tokens that become gradients: of
// shift, dy; of scale, dy x^; of gate, dx branch. SlabSums adds the rows up.
enum { SLAB_TOKENS = 16 };
HOST_DEVICE static inline int slabs_of(int tokens) { return ceil_div(tokens, SLAB_TOKENS); }
template <typename T> struct BranchBegin {
    TensorOf<T> normed, dy, x;
    const float2* statistics;
    RowsOf<T> shift, scale;
    RowsOf<float> dshift, dscale;
};
template <typename T> struct BranchEnd {
    TensorOf<T> dbranch, branch;
    RowsOf<T> gate;
    RowsOf<float> dgate;
};
template <typename T, bool BEGINS, bool ENDS> struct StreamBackward {
    TensorOf<T> dx, around;
    BranchBegin<T> begin;
    BranchEnd<T> end;

    enum { THREADS = ON_GPU ? 576 : 1, BLOCKS = 2, N = 4 };  // tuned on an H100: 1152 / N is half of 576
    size_t items() const { return (size_t)dx.B * slabs_of(dx.T()); }

    struct Channels {  // of a vector of a token
        float dy[N], g[N], normed[N];
    };
    HOST_DEVICE static Channels channels(::Vector<T, N> dy, ::Vector<T, N> x, ::Vector<T, N> scales,
                                         float mean, float rstd) {
        Channels of;
        for (int k = 0; k < N; k++) {
            of.dy[k] = (float)dy[k];
            of.g[k] = of.dy[k] * (1 + (float)scales[k]);
            of.normed[k] = ((float)x[k] - mean) * rstd;
        }
        return of;
    }
    HOST_DEVICE void operator()(Team team) const {
        const int C = dx.C, slabs = slabs_of(dx.T()), b = team.index / slabs,
                  left = dx.T() - team.index % slabs * SLAB_TOKENS,
                  tokens = left < SLAB_TOKENS ? left : SLAB_TOKENS;
        const size_t first = (size_t)(b + 1) * dx.T() - left;
        SHARED float2 statistics[SLAB_TOKENS], means[SLAB_TOKENS];  // the latter of g and of g x^
        const TokenWarp warp(team);
        for (int t = warp.number; t < tokens && BEGINS; t += warp.count) {
            const T *dy = begin.dy.data + (first + t) * C, *x = begin.x.data + (first + t) * C;
            const float2 token = begin.statistics[first + t];
            Sum sum = 0, product = 0;
            for (int c = warp.lane * N; c < C; c += warp.LANES * N) {
                Channels of = channels(load<N>(dy + c), load<N>(x + c), load<N>(begin.scale.row(b) + c),
                                       token.x, token.y);
                for (int k = 0; k < N; k++) sum += of.g[k], product += of.g[k] * of.normed[k];
            }
            float of_g = warp.sum(sum) / C, of_product = warp.sum(product) / C;
            if (warp.lane == 0) statistics[t] = token, means[t] = {of_g, of_product};
        }
        team_wait();

        // As many threads beside each other as there are vectors, and as many such groups as fit.
        SHARED float parts[THREADS * N];
        const int lanes = team.threads < C / N ? team.threads : C / N, groups = team.threads / lanes;
        for (int c0 = 0; c0 < C; c0 += lanes * N) {
            const int c = c0 + team.thread % lanes * N, group = team.thread / lanes;
            const bool works = group < groups && c < C;
            float dshift[N] = {}, dscale[N] = {}, dgate[N] = {};
            ::Vector<T, N> shifts = {}, scales = {}, gates = {};
            if (works && BEGINS)
                shifts = load<N>(begin.shift.row(b) + c), scales = load<N>(begin.scale.row(b) + c);
            if (works && ENDS) gates = load<N>(end.gate.row(b) + c);
            for (int t = group; t < tokens && works; t += groups) {
                const size_t at = (first + t) * C + c;
                ::Vector<T, N> rounded = {}, branch = {}, normed;
                if (around.data) rounded = load<N>(around.data + at);
                if (ENDS) branch = load<N>(end.branch.data + at);
                float gradient[N];
                for (int k = 0; k < N; k++) gradient[k] = (float)rounded[k];
                if (BEGINS) {
                    Channels of = channels(load<N>(begin.dy.data + at), load<N>(begin.x.data + at), scales,
                                           statistics[t].x, statistics[t].y);
                    for (int k = 0; k < N; k++) {
                        gradient[k] += statistics[t].y * (of.g[k] - means[t].x - of.normed[k] * means[t].y);
                        rounded[k] = (T)gradient[k];
                        normed[k] = (T)(of.normed[k] * (1 + (float)scales[k]) + (float)shifts[k]);
                        dshift[k] += of.dy[k], dscale[k] += of.dy[k] * of.normed[k];
                    }
                    store(dx.data + at, rounded), store(begin.normed.data + at, normed);
                }
                for (int k = 0; k < N && ENDS; k++) {
                    dgate[k] += gradient[k] * (float)branch[k];
                    branch[k] = (T)(gradient[k] * (float)gates[k]);
                }
                if (ENDS) store(end.dbranch.data + at, branch);
            }
            auto add_up = [&](RowsOf<float> sums, const float* own) {
                team_wait();
                for (int k = 0; k < N; k++) parts[team.thread * N + k] = own[k];
                team_wait();
                for (int i = team.thread; i < lanes * N && c0 + i < C; i += team.threads) {
                    float total = 0;
                    for (int from = 0; from < groups; from++) total += parts[from * lanes * N + i];
                    sums.row(team.index)[c0 + i] = total;
                }
            };
            if (BEGINS) add_up(begin.dshift, dshift), add_up(begin.dscale, dscale);
            if (ENDS) add_up(end.dgate, dgate);
        }
    }
};
// out (B, C) = the sums of each image's rows of `sums` (B slabs, C), in order.
template <typename T> struct SlabSums {
    RowsOf<T> out;
    const float* sums;
    int B, slabs, C;

    size_t items() const { return (size_t)B * C; }
    HOST_DEVICE void operator()(size_t item) const {
        const int b = (int)(item / C), c = (int)(item % C);
        float total = 0;
        for (int i = 0; i < slabs; i++) total += sums[((size_t)b * slabs + i) * C + c];
        out.row(b)[c] = (T)total;
    }
};

#include "large_products.h"
#include "large_attention.h"

// ==== 3  BLOCKS ============================================================================================
// The embedding of timestep and class is the UNet's EmbedBlock: what comes out are the adaLN projections of
// all blocks behind it, one product, of which each has its channels.

struct DitModule : Module {
    int D = m->config.hidden_size, h = tokens_a_side(m->config);
    // Number i of the block's shifts, scales and gates, (B, D) each, and its gradient.
    Rows modulation(int i) const { return own(output_of(m, m->plan.blocks[0], B), i); }
    Rows dmodulation(int i) const { return own(output_gradient_of(m, m->plan.blocks[0], B), i); }
    Rows own(Tensor all, int i) const { return {all.data + block.emb + i * D, all.C}; }
    float2* statistics(int n = 0) const {
        return (float2*)(m->arena + block.stats.offset) + (size_t)n * B * h * h;
    }
    // out = norm n of x, shifted and scaled by numbers `first` and the next.
    void norm(Tensor out, Tensor x, int n, int first) const {
        run(LayerNormForward<floatX>{out, x, statistics(n), modulation(first), modulation(first + 1)});
    }

    // Backward: where a branch begins with that norm, and where one ends with a gate. The sums that all such
    // places of a block leave, added up, are its modulations' gradients.
    template <bool BEGINS, bool ENDS> using Stream = StreamBackward<floatX, BEGINS, ENDS>;
    int slabs = slabs_of(h * h);
    RowsOf<float> sums = {};  // (B slabs, modulations D)
    void take_sums(int modulations) {
        sums = {take<float>(&m->scratch, (size_t)B * slabs * modulations * D), modulations * D};
    }
    RowsOf<float> sums_of(int i) const { return {sums.data + i * D, sums.pitch}; }
    BranchBegin<floatX> begins(Tensor normed, Tensor dy, Tensor x, int n, int first) const {
        RowsOf<float> dshift = sums_of(first), dscale = sums_of(first + 1);
        return {normed, dy, x, statistics(n), modulation(first), modulation(first + 1), dshift, dscale};
    }
    BranchEnd<floatX> ends(Tensor dbranch, Tensor branch, int gate) const {
        return {dbranch, branch, modulation(gate), sums_of(gate)};
    }
    void add_up_sums() const { run(SlabSums<floatX>{dmodulation(0), sums.data, B, slabs, sums.pitch}); }
};

// ---- patches: a linear layer of each, and its place -------------------------------------------------------
struct PatchesBlock : DitModule {
    Linear projection = layer<Linear>(0);
    int patch = m->config.patch_size;

    void gather(Tensor tokens) const { run(Patches<floatX>{tokens, unet_input(m, B), patch, PIXEL}); }
    void forward() {
        Tensor tokens = take_tensor(h, patch * patch * PIXEL);
        gather(tokens);
        run(Positions<floatX>{out});
        conv1x1_forward(out, tokens, projection, {.residual = out});
        wait_for(m->embedding_ready);  // which the side stream made meanwhile
    }
    void backward() {
        Tensor tokens = take_late(h, patch * patch * PIXEL);
        gather(tokens);
        on_side_stream_deferred([=, *this] { conv1x1_backward_weight(projection, dout, tokens); });
    }
};

// ---- transformer block ------------------------------------------------------------------------------------
// middle = x + gate1 * attention(norm1(x)), out = middle + gate2 * mlp(norm2(middle)), where mlp is linear ->
// GELU -> linear. Kept for backward: all but what is normed, and GELU's output.
enum { BLOCK_QKV, BLOCK_PROJ, BLOCK_FC1, BLOCK_FC2 };
enum { SHIFT1, SCALE1, GATE1, SHIFT2, SCALE2, GATE2, MODULATIONS };

struct TransformerBlock : DitModule {
    int W = mlp_width(m->config);
    Tensor qkv = take_from(&kept_hidden, h, 3 * D), joined = take_from(&kept_hidden, h, D);
    Tensor branches = take_from(&kept_hidden, h, 3 * D);
    Tensor branch1 = branch(0), middle = branch(1), branch2 = branch(2);
    Tensor hidden = take_from(&kept_hidden, h, W);
    float* lse = (float*)statistics(2);
    Linear to_qkv = layer<Linear>(BLOCK_QKV), projection = layer<Linear>(BLOCK_PROJ);
    Linear fc1 = layer<Linear>(BLOCK_FC1), fc2 = layer<Linear>(BLOCK_FC2);

    // Tensor `n` of the three that lie in the memory of `branches`.
    Tensor branch(int n) const { return {branches.data + (size_t)n * B * h * h * D, B, h, h, D}; }
    void forward() {
        Tensor normed = take_tensor(h, D), active = take_tensor(h, W);
        norm(normed, x.first, 0, SHIFT1);
        dit_linear_forward(qkv, normed, to_qkv);
        token_attention_forward(joined, lse, qkv, block.heads);
        dit_linear_forward(branch1, joined, projection);
        run(Gate<floatX>{middle, branch1, modulation(GATE1), x.first});
        norm(normed, middle, 1, SHIFT2);
        dit_linear_forward(hidden, normed, fc1, GeluForward<floatX>{active, hidden});
        dit_linear_forward(branch2, active, fc2);
        run(Gate<floatX>{out, branch2, modulation(GATE2), middle});
    }
    void backward() {
        Tensor dbranch = take_tensor(h, D), active = take_tensor(h, W), dhidden = take_tensor(h, W);
        Tensor normed2 = take_tensor(h, D), dnormed = take_tensor(h, D), dmiddle = take_tensor(h, D);
        Tensor dbranch1 = take_tensor(h, D), normed1 = take_late(h, D);
        Tensor dqkv = branches;  // where branch1, middle and branch2 were
        take_sums(MODULATIONS);
        run(Stream<false, true>{dout, dout, {}, ends(dbranch, branch2, GATE2)});
        dit_linear_backward(dhidden, dbranch, fc2, GeluBackward<floatX, true>{dhidden, dhidden, hidden, active});
        dit_linear_weights(fc2, dbranch, active);
        dit_linear_backward(dnormed, dhidden, fc1);
        run(Stream<true, true>{dmiddle, dout, begins(normed2, dnormed, middle, 1, SHIFT2),
                               ends(dbranch1, branch1, GATE1)});
        dit_linear_weights(fc1, dhidden, normed2);

        dit_linear_weights(projection, dbranch1, joined);
        dit_linear_backward(dnormed, dbranch1, projection);  // of the joined heads
        token_attention_backward(dqkv, dnormed, joined, lse, qkv, block.heads);
        dit_linear_backward(dnormed, dqkv, to_qkv);
        run(Stream<true, false>{dx.first, dmiddle, begins(normed1, dnormed, x.first, 0, SHIFT1), {}});
        add_up_sums();
        dit_linear_weights(to_qkv, dqkv, normed1);
    }
};

// ---- final layer: norm, linear layer, patches to the image ------------------------------------------------
struct FinalBlock : DitModule {
    Linear linear = layer<Linear>(0);
    int patch = m->config.patch_size, O = padded(patch * patch * block.O);

    void forward() {
        Tensor normed = take_tensor(h, D), tokens = take_tensor(h, O);
        norm(normed, x.first, 0, SHIFT1);
        conv1x1_forward(tokens, normed, linear);
        run(Patches<floatX>{tokens, out, patch, block.O, true});
    }
    void backward() {
        Tensor normed = take_late(h, D), dtokens = take_late(h, O), dnormed = take_tensor(h, D);
        take_sums(2);
        run(Patches<floatX>{dtokens, dout, patch, block.O});
        conv1x1_backward_input(dnormed, dtokens, linear);
        run(Stream<true, false>{dx.first, {}, begins(normed, dnormed, x.first, 0, SHIFT1), {}});
        add_up_sums();
        on_side_stream_deferred([=, *this] { conv1x1_backward_weight(linear, dtokens, normed); });
    }
};

// ==== 4  PLAN AND WALK =====================================================================================
// The kinds of blocks are the UNet's BLOCK_EMBED and these.
enum { BLOCK_PATCHES = BLOCK_EMBED + 1, BLOCK_TRANSFORMER, BLOCK_FINAL };
static const char* const DIT_BLOCK_NAMES[] = {"embedding", "patches", "transformer", "final"};

// Declares a linear layer of so many calls an image: xavier-uniform, or zeros. What is padded of its outputs
// are zeros that stay: see CHANNEL_MULTIPLE. Operations as add_block of train_unet.cu counts them.
static void add_linear(Plan* plan, const std::string& name, const std::vector<int>& shape, double calls,
                       bool zeros = false, int products = 3) {
    add_parameter(plan, name + ".weight", shape, zeros ? INIT_ZEROS : INIT_UNIFORM);
    Parameter& weight = plan->tensors.back();
    double out = shape[0], in = (double)weight.count / out;
    if (!zeros) weight.scale = (float)sqrt(6 * in / (in + out));
    size_t padding = shape.size() > 2 ? 0 : (size_t)padded(shape[0]) * shape[1] - weight.size;
    weight.size += padding, plan->num_floats += padding, plan->num_decayed += padding;
    plan->flops += products * 2.0 * (double)weight.count * calls;
    add_parameter(plan, name + ".bias", {shape[0]}, INIT_ZEROS);
}

// A block's projections of the embedding: see place_parameters. Returns its first channel of block 0's output.
static int add_modulation(Plan* plan, const std::string& name, int count, int D) {
    add_linear(plan, name + ".adaLN_modulation.1", {count * D, D}, 1, true);
    for (Parameter& t : std::span(plan->tensors).last(2)) t.joined = true;
    return std::exchange(plan->blocks[0].O, plan->blocks[0].O + count * D);
}

static Plan make_dit_plan(const Config& c, int batch, bool training) {
    check_network(c);
    Plan plan = {.batch = batch, .training = training};
    int D = c.hidden_size, W = mlp_width(c), P = c.patch_size, h = tokens_a_side(c),
        O = c.in_channels << c.learn_sigma;
    size_t B = batch, rows = B * h * h;
    double T = (double)h * h;
    auto bytes_of = [&](size_t count) { return aligned(count * sizeof(floatX)); };
    auto bytes_of_sums = [&](int modulations) {
        return aligned(B * slabs_of(h * h) * modulations * D * sizeof(float));
    };
    auto add = [&](const std::string& name, Block block, int first) {
        snprintf(block.name, sizeof block.name, "%s", name.c_str());
        block.param = first, block.num_params = (int)plan.tensors.size() - first;
        if (!training) block.scratch_backward.bytes = block.late.bytes = 0;
        plan.blocks.push_back(block);
    };

    // The authors' program declares the patches' layer first, and the plan has the embedding first.
    add_linear(&plan, "x_embedder.proj", {D, c.in_channels, P, P}, T, false, 2);
    for (const char* name : {"t_embedder.mlp.0", "t_embedder.mlp.2"}) {
        bool first = plan.tensors.size() == 2;
        add_linear(&plan, name, {D, first ? FREQUENCIES : D}, 1, false, first ? 2 : 3);
    }
    if (int classes = label_rows(c)) add_parameter(&plan, network.label_table, {classes, D}, INIT_NORMAL);
    for (Parameter& t : std::span(plan.tensors).subspan(2))
        if (is_matrix(t)) t.init = INIT_NORMAL, t.scale = 0.02f;
    Block embed = {.kind = BLOCK_EMBED, .C = FREQUENCIES, .H = 1, .out_H = 1};
    embed.hidden.bytes = 4 * bytes_of(B * D) + bytes_of(B * FREQUENCIES);
    embed.scratch_backward.bytes = 2 * bytes_of(B * D);
    add("t_embedder", embed, 2);
    Block patches = {.kind = BLOCK_PATCHES, .C = c.in_channels, .O = D, .H = c.image_size, .out_H = h};
    patches.scratch_forward.bytes = patches.late.bytes = bytes_of(rows * P * P * PIXEL);
    add("x_embedder", patches, 0);
    plan.blocks.back().num_params = 2;

    for (int i = 0; i < c.depth; i++) {
        std::string name = text("blocks.%d", i);
        int first = (int)plan.tensors.size();
        Block block = {.kind = BLOCK_TRANSFORMER, .C = D, .O = D, .H = h, .out_H = h, .input = i + 1};
        block.heads = c.num_heads;
        add_linear(&plan, name + ".attn.qkv", {3 * D, D}, T);
        add_linear(&plan, name + ".attn.proj", {D, D}, T);
        add_linear(&plan, name + ".mlp.fc1", {W, D}, T);
        add_linear(&plan, name + ".mlp.fc2", {D, W}, T);
        block.emb = add_modulation(&plan, name, MODULATIONS, D);
        plan.flops += 3 * 4 * T * T * D;  // scores, and their values
        block.hidden.bytes = 2 * bytes_of(rows * 3 * D) + bytes_of(rows * D) + bytes_of(rows * W);
        block.stats.bytes = aligned(2 * rows * sizeof(float2) + rows * c.num_heads * sizeof(float));
        block.scratch_forward.bytes = bytes_of(rows * D) + bytes_of(rows * W);
        block.scratch_backward.bytes =
            5 * bytes_of(rows * D) + 2 * bytes_of(rows * W) + bytes_of_sums(MODULATIONS);
        block.late.bytes = bytes_of(rows * D);
        add(name, block, first);
    }

    int first = (int)plan.tensors.size(), outputs = P * P * O;
    Block final = {.kind = BLOCK_FINAL, .C = D, .O = O, .H = h, .out_H = c.image_size, .input = c.depth + 1};
    add_linear(&plan, "final_layer.linear", {outputs, D}, T, true);
    final.emb = add_modulation(&plan, "final_layer", 2, D);
    final.stats.bytes = aligned(rows * sizeof(float2));
    final.scratch_forward.bytes = final.late.bytes = bytes_of(rows * D) + bytes_of(rows * padded(outputs));
    final.scratch_backward.bytes = bytes_of(rows * D) + bytes_of_sums(2);
    add("final_layer", final, first);

    place_parameters(&plan);
    for (Block& block : plan.blocks) block.emb_again = block.emb >= 0;
    size_outputs(&plan, c);
    compute_lifetimes(&plan);
    place_buffers(&plan);
    return plan;
}

static void with_dit_module(Model* m, const Block& block, int B, auto pass) {
    switch (block.kind) {
        case BLOCK_EMBED: return pass(EmbedBlock{{m, block, B}});
        case BLOCK_PATCHES: return pass(PatchesBlock{{{m, block, B}}});
        case BLOCK_TRANSFORMER: return pass(TransformerBlock{{{m, block, B}}});
        case BLOCK_FINAL: return pass(FinalBlock{{{m, block, B}}});
    }
}
static void dit_block_forward(Model* m, const Block& block, int B) {
    with_dit_module(m, block, B, [](auto module) { module.forward(); });
}
static void dit_block_backward(Model* m, const Block& block, int B) {
    with_dit_module(m, block, B, [](auto module) { module.backward(); });
}

enum { DIT_MAGIC = 0x00546944 };  // "DiT"
static const bool network_is_dit = [] {
    network = {
        .program = "train_dit",
        .name = "DiT",
        .importer = "python3 dev/dit/train_dit.py --import",
        .magic = DIT_MAGIC,
        .label_table = "y_embedder.embedding_table.weight",
        .block_kinds = DIT_BLOCK_NAMES,
        .make_plan = make_dit_plan,
        .forward = dit_block_forward,
        .backward = dit_block_backward,
    };
    set_flags();
    return true;
}();
