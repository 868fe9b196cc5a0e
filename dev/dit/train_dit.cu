// train_dit.cu: trains and samples a Diffusion Transformer. Only the network is here. Everything else comes from
// train_unet.cu, which this file includes: diffusion, samplers, optimiser, data, files and command line.
//
//   make train_dit                                   two folders above: builds for the GPU or the CPU
//   ./train_dit --preset dit32                       a small one, on the demo's faces
//   ./train_dit --model DiT-S/2 --data_file X.bin    the paper's sizes: S, B, L, XL with patches of 2, 4, 8
//   ./train_dit --help                               every flag with its default
//
// The network is that of Peebles and Xie, "Scalable Diffusion Models with Transformers" (2023), with adaLN-Zero
// blocks. Its parameters have the names and the order of the authors' program. train_dit.py, the same network in
// PyTorch, imports their weights. README.md here tells how to add a network in this way.
//
// D = hidden_size, P = patch_size. An image is T tokens, h = sqrt(T) a side: a tensor (B, h, h, D).

#include "../../train_unet.cu"

#include "gelu.h"

// ==== 1  CONFIGURATION =====================================================================================

// Takes the UNet's flags away and puts the DiT's in their place. Header fields from 119 on are free.
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

// Each of the paper's sizes is a preset with patches of 2, of 4 and of 8 pixels.
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

// Refuses a network that can't be, in a sentence that says why.
static void check_network(const Config& c) {
    if (c.image_size % c.patch_size)
        fail("--image_size %d is no multiple of --patch_size %d", c.image_size, c.patch_size);

    int side = tokens_a_side(c);
    if (side > MAX_ATTENTION_SIZE)
        fail("attention between %d x %d tokens does not fit; use a larger --patch_size", side, side);

    if (c.hidden_size % CHANNEL_MULTIPLE || mlp_width(c) % CHANNEL_MULTIPLE)
        fail("--hidden_size %d, and that times --mlp_ratio %s, must be multiples of %d", c.hidden_size,
             float_text(c.mlp_ratio).c_str(), CHANNEL_MULTIPLE);
    if (c.hidden_size % c.num_heads)
        fail("--num_heads %d does not divide --hidden_size %d", c.num_heads, c.hidden_size);

    // Of a block: 4 D^2 of attention, 6 D^2 of the modulations, 2 mlp_ratio D^2 of the MLP.
    double parameters = (10 + 2.0 * c.mlp_ratio) * c.depth * c.hidden_size * c.hidden_size;
    if (parameters > INT32_MAX)
        fail("--depth %d blocks of --hidden_size %d have more than %d parameters", c.depth, c.hidden_size,
             INT32_MAX);

    // head_channels() asks for a multiple of 16 on a GPU. A multiple of 8 does as well: DiT-XL's heads have 72.
    auto [multiple, most] = head_channels();
    int d = c.hidden_size / c.num_heads;
    if (d % std::min(multiple, (int)CHANNEL_MULTIPLE) || d > most)
        fail("heads of %d channels: a GPU's attention takes multiples of 8 up to %d", d, most);
}

// ==== 2  LAYERS ============================================================================================
// Written once for both builds, as in section 3 of train_unet.cu.

// Which channels an item has, in a layer whose item is a vector: 16 bytes of the channels of a token.
template <typename T> struct TokenVector {
    enum { N = 16 / sizeof(T) };
    size_t first;  // the vector's place in the tensor, in elements
    int b, c;      // its image and its first channel

    HOST_DEVICE TokenVector(size_t item, const TensorOf<T>& x)
        : first(item * N), b((int)(first / x.C / x.T())), c((int)(first % x.C)) {}
    static size_t count(const TensorOf<T>& x) { return x.count() / N; }
};

// Cuts an image (B, H, W, pitch) into patches of P by P pixels: tokens (B, h, h, padded(P P C)) have the pixels of
// their patch, by row, column and channel. With to_image it puts the image together from them. Backward calls it with
// gradients in their places. What is padded becomes 0. An item is a pixel.
template <typename T> struct Patches {
    TensorOf<T> tokens, image;
    int patch, channels;  // P and C
    bool to_image = false;

    size_t items() const { return (size_t)image.B * image.H * image.W; }
    HOST_DEVICE void operator()(size_t pixel) const {
        int x = (int)(pixel % image.W);
        int row = (int)(pixel / image.W);
        int y = row % image.H;
        int b = row / image.H;

        size_t token = ((size_t)b * tokens.H + y / patch) * tokens.W + x / patch;
        int within = y % patch * patch + x % patch;  // the pixel's number in its patch
        T* in_token = tokens.data + token * tokens.C + within * channels;
        T* in_image = image.data + pixel * image.C;

        for (int c = 0; c < channels; c++)
            if (to_image) in_image[c] = in_token[c];
            else in_token[c] = in_image[c];

        for (int c = channels; c < image.C && to_image; c++) in_image[c] = (T)0.0f;
        if (!to_image && within == patch * patch - 1)
            for (int c = channels; within * channels + c < tokens.C; c++) in_token[c] = (T)0.0f;
    }
};

// out (B, h, h, D) = the position of each token, the same in every image. A quarter of the channels each has
//   sin(column f), cos(column f), sin(row f), cos(row f)    with f_i = 10000^(-i / (D / 4)).
// An item is an element of every image.
template <typename T> struct Positions {
    TensorOf<T> out;

    HOST_DEVICE size_t items() const { return (size_t)out.H * out.W * out.C; }
    HOST_DEVICE void operator()(size_t item) const {
        int token = (int)(item / out.C);
        int c = (int)(item % out.C);
        int quarter = out.C / 4;
        int i = c % quarter;

        int place = c / quarter < 2 ? token % out.W : token / out.W;  // column, or row
        double angle = place * exp(-log(10000.0) * i / quarter);
        T value = (T)(float)(c / quarter % 2 ? cos(angle) : sin(angle));
        for (int b = 0; b < out.B; b++) out.data[b * items() + item] = value;
    }
};

// Memory that a team's threads share, and where they wait for each other. On the CPU a team is one thread.
#ifdef __CUDA_ARCH__
#define SHARED __shared__
#define team_wait() __syncthreads()
#else
#define SHARED
#define team_wait()
#endif

// A team's warps. Each has tokens of its own, and each of a warp's threads has vectors of their channels.
struct TokenWarp {
    enum { LANES = ON_GPU ? 32 : 1 };
    int number, count, lane;

    HOST_DEVICE TokenWarp(Team team)
        : number(team.thread / LANES), count(team.threads / LANES), lane(team.thread % LANES) {}

    // The sum of what the warp's threads have, in every thread.
    HOST_DEVICE static float sum(Sum value) {
#ifdef __CUDA_ARCH__
        for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
#endif
        return (float)value;
    }
};

// out = F.layer_norm(x, (D,), eps=1e-6) * (1 + scale) + shift. out and x are (B, h, h, D), scale and shift are of an
// image, (B, D). statistics (B h h): each token's mean and rstd, for backward.
//
// A warp has a token. Its threads keep their first vectors in registers, because mean, variance and output each need
// all of x: of up to 1280 channels in bf16 nothing is read again. Device memory: x in and out out, once each.
template <typename T> struct LayerNormForward {
    TensorOf<T> out, x;
    float2* statistics;
    RowsOf<T> shift, scale;

#ifdef __CUDA_ARCH__
    enum { KEPT = 5 };  // vectors that a thread keeps in registers
#else
    enum { KEPT = 1 };
#endif
    enum { TOKENS = ON_GPU ? 4 : 1, THREADS = TOKENS * TokenWarp::LANES, N = 16 / sizeof(T) };
    enum { BLOCKS = 7 };  // for 72 registers a thread: with 79, an H100 has fewer tokens under way

    size_t items() const { return ceil_div(x.rows(), TOKENS); }
    HOST_DEVICE void operator()(Team team) const {
        const TokenWarp warp(team);
        const int token = team.index * TOKENS + warp.number;
        const int b = token / x.T();
        const int C = x.C;
        const int begin = warp.lane * N;
        const int step = warp.LANES * N;
        if (b >= x.B) return;

        const T* from = x.data + (size_t)token * C;
        T* to = out.data + (size_t)token * C;
        ::Vector<T, N> kept[KEPT] = {};
        UNROLLED_FOR (int i = 0; i < KEPT; i++)
            if (begin + i * step < C) kept[i] = load<N>(from + begin + i * step);

        // work(first channel, vector) for each of the thread's vectors.
        auto each = [&](auto work) {
            UNROLLED_FOR (int i = 0; i < KEPT; i++)
                if (begin + i * step < C) work(begin + i * step, kept[i]);
            for (int c = begin + KEPT * step; c < C; c += step) work(c, load<N>(from + c));
        };

        Sum sum = 0;
        each([&](int, ::Vector<T, N> value) {
            for (int k = 0; k < N; k++) sum += (float)value[k];
        });
        float mean = warp.sum(sum) / C;

        Sum squares = 0;
        each([&](int, ::Vector<T, N> value) {
            for (int k = 0; k < N; k++) squares += ((float)value[k] - mean) * ((float)value[k] - mean);
        });
        float rstd = 1 / sqrtf(warp.sum(squares) / C + 1e-6f);
        if (warp.lane == 0) statistics[token] = {mean, rstd};

        each([&](int c, ::Vector<T, N> value) {
            ::Vector<T, N> scales = load<N>(scale.row(b) + c);
            ::Vector<T, N> shifts = load<N>(shift.row(b) + c);
            for (int k = 0; k < N; k++)
                value[k] =
                    (T)(((float)value[k] - mean) * rstd * (1 + (float)scales[k]) + (float)shifts[k]);
            store(to + c, value);
        });
    }
};

// out = x + gate * branch. out, x and branch are (B, h, h, D), gate is of an image, (B, D).
template <typename T> struct Gate {
    TensorOf<T> out, branch;
    RowsOf<T> gate;
    TensorOf<T> x;

    size_t items() const { return TokenVector<T>::count(out); }
    HOST_DEVICE void operator()(size_t item) const {
        enum { N = TokenVector<T>::N };
        TokenVector<T> at(item, out);
        ::Vector<T, N> values = load<N>(branch.data + at.first);
        ::Vector<T, N> gates = load<N>(gate.row(at.b) + at.c);
        ::Vector<T, N> sum = load<N>(x.data + at.first);
        for (int k = 0; k < N; k++)
            sum[k] = (T)((float)sum[k] + (float)gates[k] * (float)values[k]);
        store(out.data + at.first, sum);
    }
};

// Backward at a place x of the residual stream: a transformer block's input, its middle or its output. There a branch
// BEGINS with a norm, normed = norm(x), or a branch ENDS with a gate, x = ... + gate * branch, or both. Tensors are
// (B, h, h, D).
//
// The gradient dx is a sum of two. `around` is the gradient that comes along the stream itself, past the branch that
// begins; without data there is none. The other comes through the norm: dy is the gradient of its output, and with
// g = dy (1 + scale) and x^ = (x - mean) rstd it is
//     rstd (g - mean of g - x^ * mean of (g x^)),    where means are over the token's D channels.
// Where no branch begins, dx is `around` itself and is not written. The norm's output `normed` is made again, for the
// weight gradient of the layer behind it. Where a branch ends, dbranch = gate * dx.
//
// The gradients of shift, scale and gate are sums over an image's tokens: of dy, of dy x^, and of dx branch. A team
// does a slab of an image, SLAB_TOKENS tokens, and leaves these sums over it: a row of dshift, dscale and dgate each.
// SlabSums adds the rows up.
enum { SLAB_TOKENS = 16 };
HOST_DEVICE static inline int slabs_of(int tokens) { return ceil_div(tokens, SLAB_TOKENS); }

template <typename T> struct BranchBegin {
    TensorOf<T> normed, dy, x;
    const float2* statistics;  // (B h h): mean and rstd
    RowsOf<T> shift, scale;
    RowsOf<float> dshift, dscale;  // (B slabs, D)
};

template <typename T> struct BranchEnd {
    TensorOf<T> dbranch, branch;
    RowsOf<T> gate;
    RowsOf<float> dgate;  // (B slabs, D)
};

template <typename T, bool BEGINS, bool ENDS> struct StreamBackward {
    TensorOf<T> dx, around;
    BranchBegin<T> begin;
    BranchEnd<T> end;

    enum { THREADS = ON_GPU ? 576 : 1, BLOCKS = 2, N = 4 };  // tuned on an H100: 1152 / N is half of 576
    size_t items() const { return (size_t)dx.B * slabs_of(dx.T()); }

    // What dy and x give, of a vector of a token's channels.
    struct Channels {
        float dy[N], g[N], normed[N];  // normed: x^
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
        const int C = dx.C;
        const int slabs = slabs_of(dx.T());
        const int b = team.index / slabs;
        const int left = dx.T() - team.index % slabs * SLAB_TOKENS;  // tokens of the image, from the slab's first on
        const int tokens = left < SLAB_TOKENS ? left : SLAB_TOKENS;
        const size_t first = (size_t)(b + 1) * dx.T() - left;

        // First each warp takes some of the tokens, and computes their means of g and of g x^.
        SHARED float2 statistics[SLAB_TOKENS], means[SLAB_TOKENS];
        const TokenWarp warp(team);
        for (int t = warp.number; t < tokens && BEGINS; t += warp.count) {
            const T* dy = begin.dy.data + (first + t) * C;
            const T* x = begin.x.data + (first + t) * C;
            const float2 token = begin.statistics[first + t];
            Sum sum = 0, product = 0;
            for (int c = warp.lane * N; c < C; c += warp.LANES * N) {
                Channels of = channels(load<N>(dy + c), load<N>(x + c), load<N>(begin.scale.row(b) + c),
                                       token.x, token.y);
                for (int k = 0; k < N; k++) {
                    sum += of.g[k];
                    product += of.g[k] * of.normed[k];
                }
            }
            float mean_g = warp.sum(sum) / C;
            float mean_product = warp.sum(product) / C;
            if (warp.lane == 0) {
                statistics[t] = token;
                means[t] = {mean_g, mean_product};
            }
        }
        team_wait();

        // Then each thread takes a vector of channels through some of the tokens. As many threads as there are vectors
        // stand beside each other, and do one token; as many such groups as fit take tokens in turn.
        SHARED float parts[THREADS * N];
        const int lanes = team.threads < C / N ? team.threads : C / N;
        const int groups = team.threads / lanes;
        for (int c0 = 0; c0 < C; c0 += lanes * N) {
            const int c = c0 + team.thread % lanes * N;
            const int group = team.thread / lanes;
            const bool works = group < groups && c < C;
            float dshift[N] = {}, dscale[N] = {}, dgate[N] = {};
            ::Vector<T, N> shifts = {}, scales = {}, gates = {};
            if (works && BEGINS) {
                shifts = load<N>(begin.shift.row(b) + c);
                scales = load<N>(begin.scale.row(b) + c);
            }
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
                        dshift[k] += of.dy[k];
                        dscale[k] += of.dy[k] * of.normed[k];
                    }
                    store(dx.data + at, rounded);
                    store(begin.normed.data + at, normed);
                }

                if (ENDS) {
                    for (int k = 0; k < N; k++) {
                        dgate[k] += gradient[k] * (float)branch[k];
                        branch[k] = (T)(gradient[k] * (float)gates[k]);
                    }
                    store(end.dbranch.data + at, branch);
                }
            }

            // Adds up what the groups have of these channels, as the slab's row of `sums`.
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
            if (BEGINS) {
                add_up(begin.dshift, dshift);
                add_up(begin.dscale, dscale);
            }
            if (ENDS) add_up(end.dgate, dgate);
        }
    }
};

// out (B, C) = the sum of each image's rows of `sums` (B slabs, C), added up in order.
template <typename T> struct SlabSums {
    RowsOf<T> out;
    const float* sums;
    int B, slabs, C;

    size_t items() const { return (size_t)B * C; }
    HOST_DEVICE void operator()(size_t item) const {
        const int b = (int)(item / C);
        const int c = (int)(item % C);
        float total = 0;
        for (int i = 0; i < slabs; i++) total += sums[((size_t)b * slabs + i) * C + c];
        out.row(b)[c] = (T)total;
    }
};

#include "large_products.h"
#include "large_attention.h"

// ==== 3  BLOCKS ============================================================================================
// The embedding of timestep and class is the UNet's EmbedBlock, unchanged. Its last layer makes the adaLN projections
// of all other blocks at once: each of them reads its own channels of block 0's output.

struct DitModule : Module {
    int D = m->config.hidden_size;
    int h = tokens_a_side(m->config);

    // Number i of the block's shifts, scales and gates, (B, D), in a tensor that has those of all blocks.
    Rows modulation_in(Tensor all, int i) const { return {all.data + block.emb + i * D, all.C}; }
    Rows modulation(int i) const { return modulation_in(output_of(m, m->plan.blocks[0], B), i); }
    Rows dmodulation(int i) const { return modulation_in(output_gradient_of(m, m->plan.blocks[0], B), i); }

    // The mean and rstd of each token, (B h h), in the block's norm n.
    float2* statistics(int n) const {
        return (float2*)(m->arena + block.stats.offset) + (size_t)n * B * h * h;
    }

    // out = the block's norm n of x, with modulation `first` as its shift and the next one as its scale.
    void norm(Tensor out, Tensor x, int n, int first) const {
        run(LayerNormForward<floatX>{
            .out = out,
            .x = x,
            .statistics = statistics(n),
            .shift = modulation(first),
            .scale = modulation(first + 1),
        });
    }

    // Backward runs a Stream at each place of the residual stream. Each leaves in `sums` the slabs' rows of the
    // modulations there, and add_up_sums makes the gradients of all of the block's modulations from them.
    template <bool BEGINS, bool ENDS> using Stream = StreamBackward<floatX, BEGINS, ENDS>;
    int slabs = slabs_of(h * h);
    RowsOf<float> sums = {};  // (B slabs, modulations D)

    void take_slab_sums(int modulations) {
        sums = {take<float>(&m->scratch, (size_t)B * slabs * modulations * D), modulations * D};
    }
    RowsOf<float> sums_of(int i) const { return {sums.data + i * D, sums.pitch}; }
    void add_up_sums() const {
        run(SlabSums<floatX>{.out = dmodulation(0), .sums = sums.data, .B = B, .slabs = slabs, .C = sums.pitch});
    }

    // A branch begins: normed = norm n of x, with its shift and scale as in norm().
    BranchBegin<floatX> begins(Tensor normed, Tensor dy, Tensor x, int n, int first) const {
        return {
            .normed = normed,
            .dy = dy,
            .x = x,
            .statistics = statistics(n),
            .shift = modulation(first),
            .scale = modulation(first + 1),
            .dshift = sums_of(first),
            .dscale = sums_of(first + 1),
        };
    }
    // A branch ends with modulation `gate`.
    BranchEnd<floatX> ends(Tensor dbranch, Tensor branch, int gate) const {
        return {.dbranch = dbranch, .branch = branch, .gate = modulation(gate), .dgate = sums_of(gate)};
    }
};

// ---- patches: a linear layer of each patch, plus the position of its token --------------------------------
struct PatchesBlock : DitModule {
    Linear projection = layer<Linear>(0);
    int patch = m->config.patch_size;

    void gather(Tensor tokens) const {
        run(Patches<floatX>{.tokens = tokens, .image = unet_input(m, B), .patch = patch, .channels = PIXEL});
    }

    void forward() {
        Tensor tokens = take_tensor(h, patch * patch * PIXEL);
        gather(tokens);
        run(Positions<floatX>{out});
        conv1x1_forward(out, tokens, projection, {.residual = out});
        wait_for(m->embedding_ready);  // the side stream has made the embedding meanwhile
    }

    void backward() {
        Tensor tokens = take_late(h, patch * patch * PIXEL);
        gather(tokens);
        beside(conv1x1_backward_weight, projection, dout, tokens);
    }
};

// ---- transformer block ------------------------------------------------------------------------------------
// middle = x + gate1 * attention(norm1(x)),  out = middle + gate2 * mlp(norm2(middle)),
// where mlp is linear -> GELU -> linear. All tensors are kept for backward but the norms' outputs and GELU's.
enum { BLOCK_QKV, BLOCK_PROJ, BLOCK_FC1, BLOCK_FC2 };
enum { SHIFT1, SCALE1, GATE1, SHIFT2, SCALE2, GATE2, MODULATIONS };

struct TransformerBlock : DitModule {
    int W = mlp_width(m->config);
    Tensor qkv = take_from(&kept_hidden, h, 3 * D);
    Tensor attended = take_from(&kept_hidden, h, D);  // the heads' outputs, side by side
    Tensor branches = take_from(&kept_hidden, h, 3 * D);
    Tensor branch1 = third_of_branches(0);
    Tensor middle = third_of_branches(1);
    Tensor branch2 = third_of_branches(2);
    Tensor hidden = take_from(&kept_hidden, h, W);
    float* lse = (float*)statistics(2);  // behind the statistics of the block's two norms
    Linear to_qkv = layer<Linear>(BLOCK_QKV);
    Linear projection = layer<Linear>(BLOCK_PROJ);
    Linear fc1 = layer<Linear>(BLOCK_FC1);
    Linear fc2 = layer<Linear>(BLOCK_FC2);

    // Three tensors share the memory of `branches`, which backward then uses as one.
    Tensor third_of_branches(int n) const { return {branches.data + (size_t)n * B * h * h * D, B, h, h, D}; }

    void forward() {
        Tensor normed = take_tensor(h, D);
        Tensor active = take_tensor(h, W);

        norm(normed, x.first, 0, SHIFT1);
        dit_linear_forward(qkv, normed, to_qkv);
        token_attention_forward(attended, lse, qkv, block.heads);
        dit_linear_forward(branch1, attended, projection);
        run(Gate<floatX>{.out = middle, .branch = branch1, .gate = modulation(GATE1), .x = x.first});

        norm(normed, middle, 1, SHIFT2);
        dit_linear_forward(hidden, normed, fc1, GeluForward<floatX>{.out = active, .x = hidden});
        dit_linear_forward(branch2, active, fc2);
        run(Gate<floatX>{.out = out, .branch = branch2, .gate = modulation(GATE2), .x = middle});
    }

    void backward() {
        Tensor dbranch2 = take_tensor(h, D);
        Tensor active = take_tensor(h, W);
        Tensor dhidden = take_tensor(h, W);
        Tensor normed2 = take_tensor(h, D);
        Tensor dnormed = take_tensor(h, D);  // of either norm
        Tensor dmiddle = take_tensor(h, D);
        Tensor dbranch1 = take_tensor(h, D);
        Tensor normed1 = take_late(h, D);
        Tensor dattended = dnormed;  // their memory holds one after the other
        Tensor dqkv = branches;      // overwrites branch1, middle and branch2, when they have been read
        take_slab_sums(MODULATIONS);

        run(Stream<false, true>{.dx = dout, .around = dout, .begin = {}, .end = ends(dbranch2, branch2, GATE2)});
        dit_linear_backward(dhidden, dbranch2, fc2, GeluBackward<floatX, true>{dhidden, dhidden, hidden, active});
        dit_linear_weights(fc2, dbranch2, active);
        dit_linear_backward(dnormed, dhidden, fc1);
        run(Stream<true, true>{
            .dx = dmiddle,
            .around = dout,
            .begin = begins(normed2, dnormed, middle, 1, SHIFT2),
            .end = ends(dbranch1, branch1, GATE1),
        });
        dit_linear_weights(fc1, dhidden, normed2);

        dit_linear_weights(projection, dbranch1, attended);
        dit_linear_backward(dattended, dbranch1, projection);
        token_attention_backward(dqkv, dattended, attended, lse, qkv, block.heads);
        dit_linear_backward(dnormed, dqkv, to_qkv);
        run(Stream<true, false>{
            .dx = dx.first,
            .around = dmiddle,
            .begin = begins(normed1, dnormed, x.first, 0, SHIFT1),
            .end = {},
        });
        add_up_sums();
        dit_linear_weights(to_qkv, dqkv, normed1);
    }
};

// ---- final layer: norm, linear layer, and the patches put together as an image ----------------------------
struct FinalBlock : DitModule {
    Linear linear = layer<Linear>(0);
    int patch = m->config.patch_size;
    int O = padded(patch * patch * block.O);

    void forward() {
        Tensor normed = take_tensor(h, D);
        Tensor tokens = take_tensor(h, O);

        norm(normed, x.first, 0, SHIFT1);
        conv1x1_forward(tokens, normed, linear);
        run(Patches<floatX>{.tokens = tokens, .image = out, .patch = patch, .channels = block.O, .to_image = true});
    }

    void backward() {
        Tensor normed = take_late(h, D);
        Tensor dtokens = take_late(h, O);
        Tensor dnormed = take_tensor(h, D);
        take_slab_sums(2);

        run(Patches<floatX>{.tokens = dtokens, .image = dout, .patch = patch, .channels = block.O});
        conv1x1_backward_input(dnormed, dtokens, linear);
        run(Stream<true, false>{
            .dx = dx.first,
            .around = {},
            .begin = begins(normed, dnormed, x.first, 0, SHIFT1),
            .end = {},
        });
        add_up_sums();
        beside(conv1x1_backward_weight, linear, dtokens, normed);
    }
};

// ==== 4  PLAN AND WALK =====================================================================================
// The kinds of blocks are the UNet's BLOCK_EMBED and these.
enum { BLOCK_PATCHES = BLOCK_EMBED + 1, BLOCK_TRANSFORMER, BLOCK_FINAL };
static const char* const DIT_BLOCK_NAMES[] = {"embedding", "patches", "transformer", "final"};

struct LinearOptions {
    Init init = INIT_UNIFORM;  // xavier-uniform; or INIT_ZEROS
    int products = 3;          // in a training step: forward and the gradients of its input and its weight
};

// Declares a linear layer, weight and bias, that an image calls `calls` times: once a token, or once in all. A weight's
// rows are padded with zeros that stay zeros: see CHANNEL_MULTIPLE. A patch's layer is declared with four dimensions,
// which add_parameter has padded already.
static void add_linear(Plan* plan, const std::string& name, const std::vector<int>& shape, double calls,
                       const LinearOptions& options = {}) {
    add_parameter(plan, name + ".weight", shape, options.init);
    Parameter& weight = plan->tensors.back();
    double out = shape[0];
    double in = (double)weight.count / out;
    if (options.init == INIT_UNIFORM) weight.scale = (float)sqrt(6 * in / (in + out));

    if (shape.size() == 2) {
        size_t padding = (size_t)padded(shape[0]) * shape[1] - weight.size;
        weight.size += padding;
        plan->num_floats += padding;
        plan->num_decayed += padding;
    }
    plan->flops += options.products * 2.0 * (double)weight.count * calls;
    add_parameter(plan, name + ".bias", {shape[0]}, INIT_ZEROS);
}

// Declares a block's part of the embedding's projections: `count` shifts, scales and gates of D channels. Returns the
// first of its channels in block 0's output. See place_parameters for how the parts become one layer.
static int add_modulation(Plan* plan, const std::string& name, int count, int D) {
    add_linear(plan, name + ".adaLN_modulation.1", {count * D, D}, 1, {.init = INIT_ZEROS});
    for (Parameter& t : std::span(plan->tensors).last(2)) t.joined = true;

    int first = plan->blocks[0].O;
    plan->blocks[0].O += count * D;
    return first;
}

// What make_dit_plan builds the network from: its sizes, and the parts that it adds one after another. A block's
// buffers get the bytes that its Module takes from them.
struct DitPlanner {
    const Config& c;
    Plan plan;
    int D = c.hidden_size;
    int W = mlp_width(c);
    int P = c.patch_size;
    int h = tokens_a_side(c);
    size_t B = plan.batch;
    size_t rows = B * h * h;   // tokens of a batch
    double T = (double)h * h;  // tokens of an image

    size_t bytes_of(size_t count) const { return aligned(count * sizeof(floatX)); }
    size_t bytes_of_sums(int modulations) const {
        return aligned(B * slabs_of(h * h) * modulations * D * sizeof(float));
    }

    // Adds a block whose parameters are those from `first` on.
    void add(const std::string& name, Block block, int first) {
        snprintf(block.name, sizeof block.name, "%s", name.c_str());
        block.param = first;
        block.num_params = (int)plan.tensors.size() - first;
        if (!plan.training) {
            block.scratch_backward.bytes = 0;
            block.late.bytes = 0;
        }
        plan.blocks.push_back(block);
    }

    // The authors' program declares the patches' layer first, and the plan has the embedding's block first: so the two
    // declare their parameters together, those of the patches being the first two.
    void add_embedding_and_patches() {
        enum { PATCH_PARAMETERS = 2 };
        add_linear(&plan, "x_embedder.proj", {D, c.in_channels, P, P}, T, {.products = 2});
        add_linear(&plan, "t_embedder.mlp.0", {D, FREQUENCIES}, 1, {.products = 2});
        add_linear(&plan, "t_embedder.mlp.2", {D, D}, 1);
        if (int classes = label_rows(c)) add_parameter(&plan, network.label_table, {classes, D}, INIT_NORMAL);
        for (Parameter& t : std::span(plan.tensors).subspan(PATCH_PARAMETERS)) {
            if (!is_matrix(t)) continue;
            t.init = INIT_NORMAL;
            t.scale = 0.02f;
        }

        Block embed = {.kind = BLOCK_EMBED, .C = FREQUENCIES, .H = 1, .out_H = 1};
        embed.hidden.bytes = 4 * bytes_of(B * D) + bytes_of(B * FREQUENCIES);
        embed.scratch_backward.bytes = 2 * bytes_of(B * D);
        add("t_embedder", embed, PATCH_PARAMETERS);

        Block patches = {.kind = BLOCK_PATCHES, .C = c.in_channels, .O = D, .H = c.image_size, .out_H = h};
        patches.scratch_forward.bytes = bytes_of(rows * P * P * PIXEL);
        patches.late.bytes = patches.scratch_forward.bytes;
        add("x_embedder", patches, 0);
        plan.blocks.back().num_params = PATCH_PARAMETERS;
    }

    void add_transformer(int i) {
        std::string name = text("blocks.%d", i);
        int first = (int)plan.tensors.size();
        Block block = {.kind = BLOCK_TRANSFORMER, .C = D, .O = D, .H = h, .out_H = h, .input = i + 1};
        block.heads = c.num_heads;

        add_linear(&plan, name + ".attn.qkv", {3 * D, D}, T);
        add_linear(&plan, name + ".attn.proj", {D, D}, T);
        add_linear(&plan, name + ".mlp.fc1", {W, D}, T);
        add_linear(&plan, name + ".mlp.fc2", {D, W}, T);
        block.emb = add_modulation(&plan, name, MODULATIONS, D);
        plan.flops += 3 * 4 * T * T * D;  // q k^T and P v, each 2 T T D; backward takes twice as many

        block.hidden.bytes = 2 * bytes_of(rows * 3 * D) + bytes_of(rows * D) + bytes_of(rows * W);
        block.stats.bytes = aligned(2 * rows * sizeof(float2) + rows * c.num_heads * sizeof(float));
        block.scratch_forward.bytes = bytes_of(rows * D) + bytes_of(rows * W);
        block.scratch_backward.bytes =
            5 * bytes_of(rows * D) + 2 * bytes_of(rows * W) + bytes_of_sums(MODULATIONS);
        block.late.bytes = bytes_of(rows * D);
        add(name, block, first);
    }

    void add_final() {
        int first = (int)plan.tensors.size();
        int predictions = c.learn_sigma ? 2 : 1;  // of each channel its value and, if learned, its variance
        int O = predictions * c.in_channels;
        int outputs = P * P * O;
        Block final = {.kind = BLOCK_FINAL, .C = D, .O = O, .H = h, .out_H = c.image_size, .input = c.depth + 1};

        add_linear(&plan, "final_layer.linear", {outputs, D}, T, {.init = INIT_ZEROS});
        final.emb = add_modulation(&plan, "final_layer", 2, D);

        final.stats.bytes = aligned(rows * sizeof(float2));
        final.scratch_forward.bytes = bytes_of(rows * D) + bytes_of(rows * padded(outputs));
        final.late.bytes = final.scratch_forward.bytes;
        final.scratch_backward.bytes = bytes_of(rows * D) + bytes_of_sums(2);
        add("final_layer", final, first);
    }
};

static Plan make_dit_plan(const Config& c, int batch, bool training) {
    check_network(c);
    DitPlanner planner = {c, {.batch = batch, .training = training}};
    planner.add_embedding_and_patches();
    for (int i = 0; i < c.depth; i++) planner.add_transformer(i);
    planner.add_final();

    Plan plan = planner.plan;
    place_parameters(&plan);
    for (Block& block : plan.blocks) block.emb_again = block.emb >= 0;
    size_outputs(&plan, c);
    compute_lifetimes(&plan);
    place_buffers(&plan);
    return plan;
}

// pass(module), with the Module that a block is when it is run.
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

// Before main begins, the DiT takes the UNet's place.
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
