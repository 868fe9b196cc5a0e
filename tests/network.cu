// network.cu: tests of the program on the CPU: random numbers, layers, plan, threads, training and sampling. It
// includes the program, so that what is tested is what runs.
//
//   build/network                        every test that needs no file from outside
//   build/network --only NAME            those of them whose name contains NAME
//
// The Python tests write reference values with PyTorch and NumPy and call:
//
//   build/network --layers FILE              each layer, forward and backward
//   build/network --model W.bin FILE         output, loss and every gradient of the model in W.bin
//   build/network --reference FILE           random numbers, schedules, samplers, learning rates
//   build/network --images X.bin SIZE FILE   the images of X.bin as floats
//   build/network --same A.bin B.bin         the weights of two files, bit for bit
//
// Each test prints one line, `ok NAME detail` or `FAIL NAME detail`. The last line counts them, and the exit status
// is 1 where one failed. Comparisons are written so that a NaN fails.
//
// -----------------------------------------------------------------------------------------------------------
// Contents
//
//   1  RANDOM NUMBERS, CHECKSUM
//   2  THE CPU'S MATRIX PRODUCT AND LAYERS
//   3  GRADIENTS BY FINITE DIFFERENCES
//   4  PLAN
//   5  THREADS AND BATCHES
//   6  AGAINST PYTORCH AND NUMPY
//   7  MAIN

#include <cfloat>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#pragma GCC diagnostic ignored "-Wunused-function"  // main's own helpers have no caller here
#define TESTING
#define LATE_SIDE_STREAM
#include "../train_unet.cu"

#include "cases.h"
#include "harness.h"
#include "microbatch.h"

// Every other test judges by error_of and is_sentence, so these come first.
static void test_error_measure() {
    auto is_near = [](const std::vector<float>& a, const std::vector<double>& r) { return error_of(a, r) < 1e-5; };
    std::vector<double> ones(1000, 1.0);
    std::vector<double> zeros(1000, 0.0);
    std::vector<float> a(1000, 1.0f);
    bool ok = is_near(a, ones);

    for (float bad : {1.0001f, (float)NAN, (float)INFINITY}) {
        a[500] = bad;
        ok &= !is_near(a, ones);
    }
    ok &= !is_near(std::vector<float>(999, 1.0f), ones);
    ok &= !is_near(std::vector<float>(1000, 1e-30f), zeros);

    ok &= is_sentence("a.bin is damaged: it ends inside its section 2");
    ok &= !is_sentence("");
    ok &= !is_sentence("It is bad. Do something else");
    ok &= !is_sentence("two\nlines of text");
    report(ok, "error measure", "a NaN, one bad element and a wrong length fail");
}

// Columns [first, first + n) of a matrix (rows, width).
template <typename T>
static std::vector<T> columns_of(const std::vector<T>& matrix, size_t width, size_t first, size_t n) {
    std::vector<T> part;
    for (size_t row = 0; row + width <= matrix.size(); row += width)
        part.insert(part.end(), matrix.begin() + row + first, matrix.begin() + row + first + n);
    return part;
}

// ===========================================================================================================
// 1  RANDOM NUMBERS, CHECKSUM
// ===========================================================================================================

// The orders of the images in some epochs.
struct Orders {
    std::vector<int> order;  // (epochs, count)
    BatchSource source = BatchSource();

    Orders(int count, int epochs, uint32_t seed) : order((size_t)count * epochs) {
        for (int epoch = 0; epoch < epochs; epoch++)
            random_permutation(order.data() + (size_t)epoch * count, count, seed, epoch);

        source.order = order.data();
        source.count = count;
        source.slots = epochs;
        source.batch = 1;
        source.seed = seed;
    }

    // The image that sample n of a run shows. With one sample a batch, that is what step n draws.
    int at(uint64_t n) const {
        int timestep, image;
        StepState state = StepState();
        state.step = (int64_t)n;
        BeginStep{.state = &state,
                  .timesteps = &timestep,
                  .sources = &image,
                  .labels = nullptr,
                  .source = source,
                  .hyper = Config().hyper}(0);
        return image;
    }
};

// Philox4x32-10 as Salmon et al. (2011) define it, for any counter c and key k. The program's philox has a counter
// whose fourth word is always 0.
static Philox philox_rounds(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Philox{{c0, c1, c2, c3}};
}

// Against two of the vectors that were published with the generator (Random123's kat_vectors): all bits 0, all bits 1.
static void test_philox() {
    Philox zero = philox(0, 0, 0, 0, 0);
    const uint32_t expected[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    report(same_bits(zero.word, expected, sizeof expected), "philox zeros", "%08x %08x %08x %08x",
           zero.word[0], zero.word[1], zero.word[2], zero.word[3]);

    Philox ones = philox_rounds(~0u, ~0u, ~0u, ~0u, ~0u, ~0u);
    const uint32_t expected_ones[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
    bool same = same_bits(ones.word, expected_ones, sizeof expected_ones);

    Dice dice{5};
    for (int i = 0; i < 1000; i++) {
        uint32_t seed = dice.next();
        uint32_t stream = dice.next();
        uint32_t quad = dice.next();
        uint32_t sample = dice.next();
        uint32_t step = dice.next();
        Philox ours = philox(seed, stream, quad, sample, step);
        Philox theirs = philox_rounds(quad, sample, step, 0, seed, stream);
        same &= same_bits(ours.word, theirs.word, sizeof ours.word);
    }
    report(same, "philox ones", "and 1000 random keys and counters against the rounds spelled out");
}

static void test_permutation() {
    bool permutes = true, differs = true;
    for (int n : {1, 2, 3, 78, 1000}) {
        std::vector<int> first(n), second(n), again(n);
        random_permutation(first.data(), n, 7, 0);
        random_permutation(second.data(), n, 7, 1);
        random_permutation(again.data(), n, 7, 0);
        permutes &= first == again;
        for (auto* order : {&first, &second}) {
            std::vector<int> sorted = *order;
            std::sort(sorted.begin(), sorted.end());
            for (int i = 0; i < n; i++) permutes &= sorted[i] == i;
        }
        if (n > 50) differs &= first != second;
    }
    report(permutes && differs, "permutation", "holds each image once, and changes with the epoch");
}

static void test_random() {
    test_philox();
    test_permutation();

    // Samples 20 to 29 are an epoch. Sample 14 is the fifth of the epoch before, and can be asked for after them.
    Orders orders(10, 3, 3);
    std::vector<int> seen(10), order(10);
    for (uint64_t n = 20; n < 30; n++) seen[orders.at(n)]++;
    random_permutation(order.data(), 10, 3, 1);
    bool ok = std::count(seen.begin(), seen.end(), 1) == 10 && orders.at(14) == order[4];
    report(ok, "order of the images", "an epoch holds each once, a step can be recomputed alone");

    // The moments of N(0, 1): 0, 1 and, the fourth, 3.
    double sum = 0, squares = 0, fourth = 0;
    std::vector<float> values = normals_of(1, 1 << 18);
    for (float v : values) {
        sum += v;
        squares += (double)v * v;
        fourth += pow(v, 4);
    }
    double n = (double)values.size();
    ok = fabs(sum / n) < 0.01 && fabs(squares / n - 1) < 0.02 && fabs(fourth / n - 3) < 0.1;
    report(ok, "normals", "mean %.4f, variance %.4f, fourth moment %.3f", sum / n, squares / n, fourth / n);
}

static void test_checksum() {
    uint32_t whole = crc32("123456789", 9);
    uint32_t parts = crc32("6789", 4, crc32("12345", 5));

    // The definition: one bit of the message at a time through the reversed polynomial.
    std::vector<float> noise = normals_of(2, 1000);
    uint32_t remainder = ~0u;
    for (size_t i = 0; i < 4000; i++) {
        remainder ^= ((const uint8_t*)noise.data())[i];
        for (int bit = 0; bit < 8; bit++) {
            bool lowest = remainder & 1;
            remainder >>= 1;
            if (lowest) remainder ^= 0xEDB88320u;
        }
    }
    bool noise_ok = crc32(noise.data(), 4000) == ~remainder;

    // 0xCBF43926 is the check value that definitions of CRC-32 name.
    report(whole == 0xCBF43926 && parts == whole && noise_ok, "crc32", "%08x, in parts %08x", whole, parts);
}

// ===========================================================================================================
// 2  THE CPU'S MATRIX PRODUCT AND LAYERS
// ===========================================================================================================

struct MatmulShape {
    int M, N, K;
};

// C (M, N) = A (M, K) B (K, N), or C += A B. Each of a, b and c lies in memory in rows of lda, ldb and ldc floats;
// a transposed A as (K, M), a transposed B as (N, K). Raises *worst to the error of C, and clears *clean where matmul
// writes between the rows of C.
static void compare_matmul(MatmulShape s, int variant, double* worst, bool* clean) {
    bool transposes_a = variant & 1;
    bool transposes_b = variant & 2;
    bool accumulate = variant & 4;
    int gap = variant & 8 ? 5 : 0;  // between the rows

    auto [M, N, K] = s;
    int a_rows = transposes_a ? K : M;
    int b_rows = transposes_b ? N : K;
    int lda = (transposes_a ? M : K) + gap;
    int ldb = (transposes_b ? K : N) + gap;
    int ldc = N + gap;
    std::vector<float> a = normals_of(variant, (size_t)a_rows * lda);
    std::vector<float> b = normals_of(variant + 100, (size_t)b_rows * ldb);
    std::vector<float> c = normals_of(variant + 200, (size_t)M * ldc);
    std::vector<float> before = c;
    Matrix A = transposes_a ? transposed(a.data(), lda) : Matrix{a.data(), lda};
    Matrix B = transposes_b ? transposed(b.data(), ldb) : Matrix{b.data(), ldb};
    matmul({M, N, K}, c.data(), ldc, A, B, accumulate);

    std::vector<double> expected(before.begin(), before.end());
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) {
            double sum = accumulate ? before[(size_t)m * ldc + n] : 0;
            for (int k = 0; k < K; k++) {
                size_t a_index = transposes_a ? (size_t)k * lda + m : (size_t)m * lda + k;
                size_t b_index = transposes_b ? (size_t)n * ldb + k : (size_t)k * ldb + n;
                sum += (double)a[a_index] * b[b_index];
            }
            expected[(size_t)m * ldc + n] = sum;
        }
    }
    double error = error_of(c, expected);
    keep_worse(worst, error);

    for (int m = 0; m < M; m++)
        for (int n = N; n < ldc; n++) *clean &= c[(size_t)m * ldc + n] == before[(size_t)m * ldc + n];
}

static void test_matmul() {
    const MatmulShape shapes[] = {{1, 1, 1},    {3, 5, 7},      {12, 32, 256},  {13, 33, 257},  {120, 64, 64},
                                  {121, 65, 3}, {7, 513, 31},   {131, 545, 91}, {252, 128, 27}, {64, 17, 600},
                                  {1, 300, 40}, {250, 31, 513}, {5, 1, 1000},   {20, 64, 8192}, {37, 48, 1}};
    double worst = 0;
    bool clean = true;
    int count = 0;
    for (const MatmulShape& shape : shapes) {
        for (int variant = 0; variant < 16; variant++) {
            compare_matmul(shape, variant, &worst, &clean);
            count++;
        }
    }
    report(worst < 2e-6 && clean, "matmul",
           "%d products of odd shapes, transposed, strided, accumulated: worst %.2g", count, worst);

    double exponential = 0;
    for (float x = -86.9f; x < 88.0f; x += 0.00731f)
        keep_worse(&exponential, fabs(fast_exp(x) / exp((double)x) - 1));
    bool edges = std::isnan(fast_exp(NAN));
    edges &= fast_exp(-1000.0f) < 1e-37f && fast_exp(1000.0f) > 1e38f;
    edges &= sigmoid(-200.0f) < 1e-37f && sigmoid(200.0f) == 1.0f;
    edges &= fast_exp(0.0f) == 1.0f;
    report(exponential < 2.5e-7 && edges, "exp", "worst relative error %.2g; NaN stays NaN", exponential);
}

// ---- the fast layers against their specification ----------------------------------------------------------

// The same layers twice: as plain loops that say what they compute, and as the program runs them.
struct PlainLayers {
    static constexpr auto conv3x3_forward = cpu::plain::conv3x3_forward;
    static constexpr auto conv3x3_backward_input = cpu::plain::conv3x3_backward_input;
    static constexpr auto conv3x3_backward_weight = cpu::plain::conv3x3_backward_weight;
    static constexpr auto conv1x1_forward = cpu::plain::conv1x1_forward;
    static constexpr auto conv1x1_backward_input = cpu::plain::conv1x1_backward_input;
    static constexpr auto conv1x1_backward_weight = cpu::plain::conv1x1_backward_weight;
    static constexpr auto groupnorm_silu_forward = cpu::plain::groupnorm_silu_forward;
    static constexpr auto groupnorm_silu_backward = cpu::plain::groupnorm_silu_backward;
    static constexpr auto attention_forward = cpu::plain::attention_forward;
    static constexpr auto attention_backward = cpu::plain::attention_backward;
};

struct FastLayers {
    static constexpr auto conv3x3_forward = cpu::conv3x3_forward;
    static constexpr auto conv3x3_backward_input = cpu::conv3x3_backward_input;
    static constexpr auto conv3x3_backward_weight = cpu::conv3x3_backward_weight;
    static constexpr auto conv1x1_forward = cpu::conv1x1_forward;
    static constexpr auto conv1x1_backward_input = cpu::conv1x1_backward_input;
    static constexpr auto conv1x1_backward_weight = cpu::conv1x1_backward_weight;
    static constexpr auto attention_forward = cpu::attention_forward;
    static constexpr auto attention_backward = cpu::attention_backward;

    static void groupnorm_silu_forward(Tensor out, const Norm& norm) {
        cpu::channel_moments(norm.x.first);
        if (norm.x.second) cpu::channel_moments(norm.x.second);
        cpu::groupnorm_forward(out, norm);
    }

    static void groupnorm_silu_backward(Concat dx, Tensor dout, const Norm& norm, BackwardOptions options) {
        std::vector<float> dy(dout.count()), normed(dout.count());
        Tensor dy_tensor = dout, normed_tensor = dout;
        dy_tensor.data = dy.data();
        normed_tensor.data = normed.data();
        cpu::groupnorm_backward_sums(dy_tensor, dout, norm);
        if (norm.dmodulation.data) cpu::run(ModulationBackward<float>{norm});
        cpu::groupnorm_backward(dx, normed_tensor, dy_tensor, norm, options);
    }
};

// The tensors that a layer writes, by name.
typedef std::map<std::string, std::vector<float>> Written;

// A tensor of which a layer must write every element: NaN where it does not.
static std::vector<float> unwritten(size_t n) { return std::vector<float>(n, NAN); }

// Runs a layer, plain and fast, and notes how far apart the tensors are that they write. call(layers, written) calls
// that layer of PlainLayers or FastLayers; what it writes to holds `before`. The fast one finds NaN in its workspace.
static void compare(Verdict* verdict, const std::string& name, const Written& before, auto call) {
    Written expected = before;
    Written found = before;
    memset(cpu::cpu_workspace, 255, cpu::cpu_workspace_bytes());
    call(PlainLayers(), expected);
    call(FastLayers(), found);

    for (auto& [tensor, values] : expected)
        if (values.size()) verdict->note(name + " " + tensor, error_of(found[tensor], values));
}

// A layer from C channels, with a second input C + C2 of them, to O. C2 is 0 where there is no second input.
struct LayerShape {
    int B, H, W, C, C2, O;

    std::string name() const { return text("B%d %dx%d C%d+%d O%d", B, H, W, C, C2, O); }

    // (B, H, W, channels)
    std::vector<float> normals(uint32_t seed, int channels) const {
        return normals_of(seed, (size_t)B * H * W * channels);
    }

    Tensor tensor(std::vector<float>& values) const {
        int channels = (int)(values.size() / ((size_t)B * H * W));
        return {values.data(), B, H, W, channels};
    }

    Concat joined(std::vector<float>& first, std::vector<float>& second) const {
        return {tensor(first), C2 ? tensor(second) : Tensor()};
    }
};

// Where it adds, an embedding and a residual are added to the output, and dx to what stands in its place.
static void compare_conv3x3(Verdict* verdict, LayerShape s, bool adds) {
    std::vector<float> x = s.normals(1, s.C);
    std::vector<float> dout = s.normals(2, s.O);
    std::vector<float> residual = s.normals(3, s.O);
    std::vector<float> w = normals_of(4, (size_t)s.O * 9 * s.C);  // (O, 3, 3, C)
    std::vector<float> bias = normals_of(5, s.O);
    std::vector<float> emb = normals_of(6, (size_t)s.B * s.O);
    Conv layer = {.w = w.data(), .bias = bias.data()};
    ForwardOptions options;
    if (adds) options = {.emb = {emb.data(), s.O}, .residual = s.tensor(residual)};

    compare(verdict, s.name(), {{"out", unwritten(dout.size())}}, [&](auto layers, Written& to) {
        layers.conv3x3_forward(s.tensor(to["out"]), s.tensor(x), layer, options);
    });

    compare(verdict, s.name(), {{"dx", adds ? x : unwritten(x.size())}}, [&](auto layers, Written& to) {
        layers.conv3x3_backward_input(s.tensor(to["dx"]), s.tensor(dout), layer, {.accumulate = adds});
    });

    Written gradients = {{"dw", unwritten(w.size())}, {"dbias", unwritten(s.O)}, {"demb", unwritten(emb.size())}};
    compare(verdict, s.name(), gradients, [&](auto layers, Written& to) {
        Conv trained = {.dw = to["dw"].data(), .dbias = to["dbias"].data()};
        layers.conv3x3_backward_weight(trained, s.tensor(dout), s.tensor(x), {to["demb"].data(), s.O});
    });
}

// Where it adds, a residual is added to the output, and dx to what stands in its place.
static void compare_conv1x1(Verdict* verdict, LayerShape s, bool adds) {
    std::vector<float> x = s.normals(1, s.C);
    std::vector<float> x2 = s.normals(2, s.C2);
    std::vector<float> dout = s.normals(3, s.O);
    std::vector<float> residual = s.normals(4, s.O);
    std::vector<float> w = normals_of(5, (size_t)s.O * (s.C + s.C2));
    std::vector<float> bias = normals_of(6, s.O);
    Linear layer = {.w = w.data(), .bias = bias.data()};
    ForwardOptions options;
    if (adds) options.residual = s.tensor(residual);

    compare(verdict, s.name(), {{"out", unwritten(dout.size())}}, [&](auto layers, Written& to) {
        layers.conv1x1_forward(s.tensor(to["out"]), s.joined(x, x2), layer, options);
    });

    Written dx = {{"dx", adds ? x : unwritten(x.size())}, {"dx2", adds ? x2 : unwritten(x2.size())}};
    compare(verdict, s.name(), dx, [&](auto layers, Written& to) {
        layers.conv1x1_backward_input(s.joined(to["dx"], to["dx2"]), s.tensor(dout), layer, {.accumulate = adds});
    });

    Written gradients = {{"dw", unwritten(w.size())}, {"dbias", unwritten(s.O)}};
    compare(verdict, s.name(), gradients, [&](auto layers, Written& to) {
        Linear trained = {.dw = to["dw"].data(), .dbias = to["dbias"].data()};
        layers.conv1x1_backward_weight(trained, s.tensor(dout), s.joined(x, x2));
    });
}

// Where it adds, the norm is modulated, dx is added to what stands in its place, and a norm of one input also adds the
// gradient of a branch around it.
static void compare_groupnorm(Verdict* verdict, LayerShape s, int groups, bool silu, bool adds) {
    const int C = s.C + s.C2;
    std::vector<float> x = s.normals(1, s.C);
    std::vector<float> x2 = s.normals(2, s.C2);
    std::vector<float> dout = s.normals(3, C);
    std::vector<float> branch = s.normals(4, s.C);
    std::vector<float> w = normals_of(5, C);
    std::vector<float> bias = normals_of(6, C);
    std::vector<float> modulation = normals_of(7, (size_t)s.B * 2 * C);  // (B, 2C): a scale and a shift
    for (float& value : x) value += 3;  // mean(x^2) - mean(x)^2 would lose digits here

    std::vector<GroupStatistics> statistics((size_t)s.B * C);
    std::vector<ScaleShift> half_scale_shift(statistics.size());
    std::vector<NormSums> sums(statistics.size() * norm_tiles(s.H * s.W));
    std::vector<Moments> moments(sums.size()), moments2(sums.size());

    Norm norm = {.x = s.joined(x, x2), .groups = groups, .silu = silu, .w = w.data(), .bias = bias.data()};
    norm.x.first.moments = moments.data();
    norm.x.second.moments = moments2.data();
    norm.statistics = statistics.data();
    norm.half_scale_shift = half_scale_shift.data();
    norm.sums = sums.data();
    if (adds) norm.modulation = {modulation.data(), 2 * C};
    std::string name = s.name() + text(" G%d%s%s", groups, silu ? " SiLU" : "", adds ? " adds" : "");

    compare(verdict, name, {{"out", unwritten(dout.size())}}, [&](auto layers, Written& to) {
        layers.groupnorm_silu_forward(s.tensor(to["out"]), norm);
    });

    Written gradients = {{"dx", adds ? x : unwritten(x.size())},
                         {"dx2", adds ? x2 : unwritten(x2.size())},
                         {"dw", unwritten(C)},
                         {"dbias", unwritten(C)},
                         {"dmodulation", unwritten(adds ? modulation.size() : 0)}};
    BackwardOptions options = {.accumulate = adds};
    if (adds && !s.C2) options.residual = s.tensor(branch);
    compare(verdict, name, gradients, [&](auto layers, Written& to) {
        Norm trained = norm;
        trained.dw = to["dw"].data();
        trained.dbias = to["dbias"].data();
        if (adds) trained.dmodulation = {to["dmodulation"].data(), 2 * C};
        layers.groupnorm_silu_backward(s.joined(to["dx"], to["dx2"]), s.tensor(dout), trained, options);
    });
}

static void compare_attention(Verdict* verdict, LayerShape s, int heads) {
    std::vector<float> qkv = s.normals(1, 3 * s.C);
    std::vector<float> dout = s.normals(2, s.C);
    std::vector<float> out = unwritten(dout.size());
    std::vector<float> lse = unwritten((size_t)s.B * heads * s.H * s.W);  // (B, heads, H*W): log sum exp
    cpu::plain::attention_forward(s.tensor(out), lse.data(), s.tensor(qkv), heads);
    std::string name = s.name() + text(" heads %d", heads);

    Written forward = {{"out", unwritten(out.size())}, {"lse", unwritten(lse.size())}};
    compare(verdict, name, forward, [&](auto layers, Written& to) {
        layers.attention_forward(s.tensor(to["out"]), to["lse"].data(), s.tensor(qkv), heads);
    });

    // Backward starts from the plain forward's output in both.
    compare(verdict, name, {{"dqkv", unwritten(qkv.size())}}, [&](auto layers, Written& to) {
        layers.attention_backward(s.tensor(to["dqkv"]), s.tensor(dout), s.tensor(out), lse.data(), s.tensor(qkv),
                                  heads);
    });
}

static void test_plain_layers() {
    Verdict conv3x3(5e-6), conv1x1(1e-6), groupnorm(2e-6), attention(3e-6);

    // The last shapes need two passes, tasks of many outputs and of many tiles, and a norm's second tile.
    const LayerShape shapes[] = {{1, 1, 1, 1, 0, 1},    {2, 1, 5, 3, 5, 2},    {1, 7, 2, 8, 16, 40},
                                 {3, 5, 3, 40, 24, 17}, {2, 9, 11, 32, 64, 8}, {1, 3, 3, 520, 8, 24},
                                 {1, 4, 5, 24, 0, 150}, {5, 15, 17, 16, 8, 8}};
    for (const LayerShape& s : shapes) {
        for (bool adds : {false, true}) {
            compare_conv3x3(&conv3x3, s, adds);
            compare_conv1x1(&conv1x1, s, adds);
        }
    }

    for (bool silu : {false, true}) {
        for (bool adds : {false, true}) {
            compare_groupnorm(&groupnorm, {1, 1, 3, 8, 0, 0}, 1, silu, adds);
            compare_groupnorm(&groupnorm, {2, 5, 3, 24, 0, 0}, 3, silu, adds);
            compare_groupnorm(&groupnorm, {3, 15, 17, 40, 56, 0}, 2, silu, adds);
            compare_groupnorm(&groupnorm, {1, 16, 16, 136, 0, 0}, 34, silu, adds);
        }
    }

    compare_attention(&attention, {1, 1, 1, 8, 0, 0}, 1);
    compare_attention(&attention, {2, 3, 5, 40, 0, 0}, 5);
    compare_attention(&attention, {1, 9, 9, 48, 0, 0}, 2);
    compare_attention(&attention, {1, 64, 65, 4, 0, 0}, 1);

    conv3x3.line("conv3x3, plain and fast");
    conv1x1.line("conv1x1, plain and fast");
    groupnorm.line("groupnorm_silu, plain and fast");
    attention.line("attention, plain and fast");
}

// ===========================================================================================================
// 3  GRADIENTS BY FINITE DIFFERENCES
// ===========================================================================================================

// The derivative of the loss along `direction`. The central difference over a distance h is the derivative plus
// terms of h^2, h^4, ...; with d(h) and d(2h), (4 d(h) - d(2h)) / 3 is free of the term of h^2.
static double slope_along(Model* m, int B, const std::vector<float>& weights,
                          const std::vector<float>& direction, double h) {
    std::vector<float> moved(weights.size());
    auto loss_at = [&](double distance) {
        for (size_t i = 0; i < weights.size(); i++) moved[i] = (float)(weights[i] + distance * direction[i]);
        backend_upload(m->master, moved.data(), moved.size() * sizeof(float));
        return forward_loss(m, B);
    };
    double near = (loss_at(h) - loss_at(-h)) / (2 * h);
    double far = (loss_at(2 * h) - loss_at(-2 * h)) / (4 * h);
    backend_upload(m->master, weights.data(), weights.size() * sizeof(float));
    return (4 * near - far) / 3;
}

// Random directions, each with a share of the gradient so that it slopes.
static void test_slopes_of_all_weights(Model* m, int B, const std::vector<float>& weights,
                                       const std::vector<float>& gradient, double norm) {
    size_t P = weights.size();
    std::vector<float> direction(P);
    double worst = 0;
    for (int k = 0; k < 10; k++) {
        std::vector<float> random = normals_of(100 + k, P);
        double expected = 0;
        for (size_t i = 0; i < P; i++) {
            direction[i] = (float)(random[i] / sqrt((double)P) + 0.5 * gradient[i] / norm);
            expected += (double)direction[i] * gradient[i];
        }
        double error = fabs(slope_along(m, B, weights, direction, 0.02) / expected - 1);
        keep_worse(&worst, error);
    }
    report(worst < 1e-3, "finite differences, all weights", "10 random directions, worst relative error %.2g",
           worst);
}

// Each tensor along its own gradient, and along two of its elements: that of the largest gradient and one picked at
// random.
static void test_slopes_of_tensors(Model* m, int B, const std::vector<float>& weights,
                                   const std::vector<float>& gradient, double norm) {
    std::vector<float> direction(weights.size());
    double worst = 0, worst_element = 0;
    std::string where, where_element;
    Dice dice{9};
    for (const Parameter& t : m->plan.tensors) {
        const size_t end = t.offset + t.count;
        double length = 0, largest = 0;
        size_t top = t.offset;
        for (size_t i = t.offset; i < end; i++) {
            length += (double)gradient[i] * gradient[i];
            if (fabs(gradient[i]) > largest) {
                largest = fabs(gradient[i]);
                top = i;
            }
        }
        length = sqrt(length);
        if (!(length > 1e-6 * norm)) {  // a tensor without a gradient: the test would prove nothing
            where = t.name;
            worst = NAN;
            continue;
        }

        std::fill(direction.begin(), direction.end(), 0.0f);
        for (size_t i = t.offset; i < end; i++) direction[i] = (float)(gradient[i] / length);
        double expected = 0;
        for (size_t i = t.offset; i < end; i++) expected += (double)direction[i] * gradient[i];
        double h = std::min(0.05, 0.01 / length);
        double error = fabs(slope_along(m, B, weights, direction, h) / expected - 1);
        if (worsens(error, worst)) {
            worst = error;
            where = t.name;
        }

        // The element at random is one whose gradient is not small beside the largest.
        auto stands_out = [&](size_t i) { return fabs(gradient[i]) > 0.1 * largest; };
        size_t picked = t.offset;
        for (int attempt = 0; attempt < 100 && !stands_out(picked); attempt++)
            picked = t.offset + dice.below((uint32_t)t.count);
        if (!stands_out(picked)) picked = top;
        for (size_t i : {top, picked}) {
            std::fill(direction.begin(), direction.end(), 0.0f);
            direction[i] = 1;
            double slope = slope_along(m, B, weights, direction, 0.05);
            error = fabs(slope - gradient[i]) / std::max(largest, 1e-3 * norm);
            if (worsens(error, worst_element)) {
                worst_element = error;
                where_element = t.name;
            }
        }
    }
    report(worst < 5e-3, "finite differences, each tensor", "%zu tensors, worst relative error %.2g (%s)",
           m->plan.tensors.size(), worst, where.c_str());
    report(worst_element < 1e-2, "finite differences, elements",
           "2 of each tensor, worst error %.2g of its largest gradient (%s)", worst_element,
           where_element.c_str());
}

static void test_finite_differences() {
    const int B = 2;
    set_threads(1);  // in so small a network, more would only wait for each other
    Model m = Model();
    build_model(&m, config_of(toy_flags()), B, true);
    perturbed_weights(&m, 11);
    random_batch(&m, B, 12);
    std::vector<float> weights = downloaded(m.master, m.plan.num_floats);
    backend_zero(m.gradients, m.plan.num_floats * sizeof(float));
    forward_loss(&m, B);
    unet_backward(&m, m.gradients);
    std::vector<float> gradient = gradients_of(&m);

    double squares = 0;
    for (float g : gradient) squares += (double)g * g;
    double norm = sqrt(squares);
    test_slopes_of_all_weights(&m, B, weights, gradient, norm);
    test_slopes_of_tensors(&m, B, weights, gradient, norm);
    set_threads(TEST_THREADS);
}

// ===========================================================================================================
// 4  PLAN
// ===========================================================================================================

// Names two of a plan's buffers that are in use at the same moment and share memory, or one that leaves the arena.
// Returns "" where there are none.
static std::string collision(Plan* plan) {
    static const char* const NAMES[] = {"out",      "hidden",  "moments",      "stats",
                                        "gradient", "scratch", "scratch back", "late"};
    std::vector<std::pair<Buffer*, std::string>> buffers;
    for (Block& block : plan->blocks) {
        std::vector<Buffer*> of_block = buffers_of(&block);
        for (size_t k = 0; k < of_block.size(); k++)
            if (of_block[k]->bytes) buffers.push_back({of_block[k], text("%s %s", block.name, NAMES[k])});
    }

    for (size_t i = 0; i < buffers.size(); i++) {
        const Buffer& a = *buffers[i].first;
        if (a.offset + a.bytes > plan->arena_bytes || a.first > a.last) return buffers[i].second;
        for (size_t j = 0; j < i; j++) {
            const Buffer& b = *buffers[j].first;
            bool same_time = a.first <= b.last && b.first <= a.last;
            bool same_place = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
            if (same_time && same_place) return buffers[i].second + " and " + buffers[j].second;
        }
    }
    return "";
}

static void test_plan() {
    Plan plan = make_plan(default_config(), 32, true);

    // In the order of their offsets each tensor begins where the one before ends, and each has a name of its own.
    std::vector<Parameter> tensors = plan.tensors;
    std::sort(tensors.begin(), tensors.end(),
              [](const Parameter& a, const Parameter& b) { return a.offset < b.offset; });
    bool chained = true;
    size_t offset = 0;
    std::vector<std::string> names;
    for (const Parameter& t : tensors) {
        chained &= t.offset == offset && t.count > 0 && t.size >= t.count;
        offset += t.size;
        names.push_back(t.name);
    }
    chained &= offset == plan.num_floats;
    std::sort(names.begin(), names.end());
    chained &= std::unique(names.begin(), names.end()) == names.end();
    report(plan.num_parameters == 20494211 && chained, "plan of the default model",
           "%zu parameters in %zu tensors, without gaps, each name once", plan.num_parameters,
           plan.tensors.size());

    // Buffers in use at the same moment lie apart and within the arena; the check finds one that does not.
    Config small = default_config();
    small.image_size = 8;
    Config wide = default_config();
    wide.image_size = 256;
    for (const Config& config : {default_config(), small, wide}) {
        for (bool training : {true, false}) {
            Plan p = make_plan(config, 3, training);
            std::string where = collision(&p);
            report(where.empty(), "places of the buffers", "image size %d, %s: %s in the arena%s%s",
                   config.image_size, training ? "training" : "drawing",
                   human_bytes((double)p.arena_bytes).c_str(), where.empty() ? "" : "; ", where.c_str());

            Block& last = p.blocks[p.blocks.size() - 1];
            Block& before = p.blocks[p.blocks.size() - 2];
            last.out.offset = before.out.offset + before.out.bytes / 2;
            report(!collision(&p).empty(), "a planted collision of buffers", "is found");
        }
    }
}

// Small networks of every kind: some chosen for their extremes, then 14 at random.
static std::vector<Flags> tiny_configurations() {
    std::vector<Flags> list = {
        {{"image_size", "4"}, {"channel_mult", "1"}},
        {{"image_size", "8"}, {"channel_mult", "2,1"}},
        {{"image_size", "8"}, {"channel_mult", "1,1,2"}, {"attention_resolutions", "8,4,2"}},
        {{"image_size", "8"}, {"channel_mult", "1,3"}, {"attention_resolutions", "0"}},
        {{"image_size", "12"}, {"channel_mult", "1,2"}, {"attention_resolutions", "6"}},
        {{"image_size", "16"}, {"channel_mult", "1,1,1,1"}, {"num_res_blocks", "1"}},
        {{"image_size", "8"}, {"channel_mult", "1,2"}, {"num_res_blocks", "3"}},
        {{"image_size", "8"}, {"channel_mult", "4,1"}, {"norm_groups", "1"}},
        {{"image_size", "8"},
         {"channel_mult", "2,3"},
         {"norm_groups", "32"},
         {"num_head_channels", "96"},
         {"attention_resolutions", "4"}},
        {{"image_size", "6"}, {"channel_mult", "3,2"}, {"norm_groups", "16"}, {"num_head_channels", "1"}},
        {{"num_channels", "64"}, {"image_size", "8"}, {"channel_mult", "0.5,1.5"}},
    };

    static const char* const mults[] = {"1", "2", "1,2", "2,1", "1,1,2", "3,1,2", "1,2,3"};
    static const char* const groups[] = {"1", "2", "4", "8", "16"};
    static const char* const heads[] = {"4", "8", "16", "32"};
    static const char* const sizes[] = {"4", "8", "12", "16"};
    static const char* const attention[] = {"0", "16,8,4,2", "4", "8"};
    Dice dice{4};
    for (int i = 0; i < 14; i++) {
        list.push_back({{"image_size", sizes[dice.below(4)]},
                        {"channel_mult", mults[dice.below(7)]},
                        {"norm_groups", groups[dice.below(5)]},
                        {"num_head_channels", heads[dice.below(4)]},
                        {"attention_resolutions", attention[dice.below(4)]},
                        {"num_res_blocks", text("%d", 1 + dice.below(3))}});
        for (const char* option : {"resblock_updown", "conv_resample", "use_scale_shift_norm", "learn_sigma"})
            list.back().push_back({option, text("%d", dice.below(2))});
    }
    return list;
}

// Runs forward and backward of one configuration with `used` images. Returns what went wrong, "" where nothing did.
// `roomy` is planned for `batch` images, which may be more. Then plants lifetimes of buffers that end too early, and
// counts those that are found: in found[1] where `hidden` alone does, in found[0] where `late` does too.
static std::string run_configuration(const Config& config, int batch, int used, int found[2]) {
    std::string bad;
    Model exact = Model(), roomy = Model(), inference = Model();
    build_model(&exact, config, used, true);
    build_model(&roomy, config, batch, true);
    build_model(&inference, config, used, false);

    // The first finds its memory as it was allocated; in that of the others every float is NaN.
    std::vector<float> output[3], gradient[2];
    Model* models[] = {&exact, &roomy, &inference};
    for (int k = 0; k < 3; k++) {
        Model* m = models[k];
        perturbed_weights(m, 3);
        random_batch(m, used, 4);
        if (k) poison(m);
        double loss = forward_loss(m, used);
        output[k] = output_values(m, used);
        if (!std::isfinite(loss)) bad = "forward";
        if (m == &inference) continue;

        // Backward overwrites its gradients, whatever they hold.
        memset(m->gradients, k ? 255 : 0, m->plan.num_floats * sizeof(float));
        unet_backward(m, m->gradients);
        gradient[k] = gradients_of(m);
        double sum = 0;
        for (float g : gradient[k]) sum += fabs(g);
        if (!(sum > 0 && std::isfinite(sum))) bad = "backward";
    }
    if (output[0] != output[1] || gradient[0] != gradient[1])
        bad = "poisoned memory or a larger plan changes the result";
    if (output[0] != output[2]) bad = "an inference plan changes the output";

    // What the side stream reads late is still there.
    auto same_with = [&](SideStream when) {
        poison(&exact);
        backend_zero(exact.gradients, exact.plan.num_floats * sizeof(float));
        side_stream = when;
        forward_loss(&exact, used);
        unet_backward(&exact, exact.gradients);
        side_stream = AT_ONCE;
        return output_values(&exact, used) == output[0] && gradients_of(&exact) == gradient[0];
    };
    if (!same_with(LATE) || !same_with(ANY_TIME)) bad = "a late side stream changes the result";

    // The check finds a plan that forgets about these late reads. First the lifetimes of h, which is `hidden` of the
    // residual blocks, end a step too early; then those of every block's `late` do too.
    for (bool hidden : {true, false}) {
        for (Block& block : exact.plan.blocks) {
            if (!hidden) block.late.last--;
            else if (block.kind == BLOCK_RES) block.hidden.last--;
            for (Buffer* buffer : buffers_of(&block)) buffer->offset = 0;
        }
        place_buffers(&exact.plan);
        found[hidden] += !same_with(LATE);
    }
    return bad;
}

// Runs one step of many configurations at tiny sizes. take() stops the program where the scratch that the
// plan counted does not suffice; poisoned arenas show that nothing is read before it is written.
static void test_configurations() {
    set_threads(1);
    int runs = 0, found[2] = {};
    std::string bad;
    std::vector<Flags> list = tiny_configurations();
    for (size_t i = 0; i < list.size(); i++) {
        Flags flags = with({{"num_channels", "32"},
                            {"norm_groups", "8"},
                            {"num_res_blocks", "1"},
                            {"num_head_channels", "16"}},
                           list[i]);
        Config config = config_of(flags);
        std::string described;
        for (auto& [name, value] : list[i]) described += text(" --%s %s", name.c_str(), value.c_str());

        std::string refused = refusal([&] { check_config(config); });
        if (!refused.empty()) {
            bad = described + ": " + refused;
            continue;
        }
        int batch = 1 + (int)(i % 4);
        int used = std::max(1, batch - 1);  // a batch may have fewer images than its plan
        std::string wrong = run_configuration(config, batch, used, found);
        if (!wrong.empty()) bad = described + ": " + wrong;
        runs++;
    }
    report(bad.empty(), "configurations", "%d run forward and backward in poisoned memory%s", runs,
           bad.empty() ? "" : (", but" + bad).c_str());
    report(found[0] == runs && found[1] > runs / 3, "planted lifetimes",
           "that end too early are found in %d of %d, those of h alone in %d", found[0], runs, found[1]);
    set_threads(TEST_THREADS);
}

// Configurations that check_config refuses, and words that stand in the sentence with which it does.
static void test_refused_configurations() {
    const struct {
        Flags flags;
        const char* says;
    } list[] = {
        {{{"num_channels", "48"}}, "multiple of 32"},
        {{{"image_size", "36"}}, "halved"},
        {{{"image_size", "64"}, {"channel_mult", "1,1,1,1,1,1,1,1"}}, "halved"},
        {{{"num_channels", "32"}}, "use 16"},
        {{{"num_channels", "32"}, {"norm_groups", "5"}}, "must divide"},
        {{{"norm_groups", "64"}}, "time embedding"},
        {{{"num_head_channels", "40"}}, "--num_head_channels 40"},
        {{{"attention_resolutions", "32"}, {"num_head_channels", "256"}}, "32x32"},
        {{{"num_channels", "1024"}, {"channel_mult", "1,2,3,9"}}, "8192"},
        {{{"image_size", "1024"}, {"attention_resolutions", "1024"}}, "attention"},  // more than a thread holds
        {{{"image_size", "736"}, {"channel_mult", "1"}}, "attention"},
        {{{"sample_steps", "1001"}}, "--diffusion_steps 1000"},
        {{{"num_channels", "64.5"}}, "whole number"},
        {{{"num_channels", "0"}}, "between"},
        {{{"num_channels", "999999999999"}}, "between"},
        {{{"lr", "fast"}}, "a number"},
        {{{"lr", "nan"}}, "a number"},
        {{{"lr", ""}}, "a number"},
        {{{"lr", "1e-4x"}}, "a number"},
        {{{"lr", "1e-60"}}, "the least float above it"},
        {{{"lr", "-1e-39"}}, "(a float)"},
        {{{"lr", "1e60"}}, "between"},
        {{{"ema_rate", "0.9,1e-40"}}, "the least float above it"},
        {{{"adam_eps", "0"}}, "between 1e-20"},
        {{{"adam_eps", "1e-21"}}, "between 1e-20"},
        {{{"diffusion_steps", "20"}}, "use 21 or more, or cosine"},
        {{{"beta1", "1"}}, "between"},
        {{{"seed", "-1"}}, "between"},
        {{{"seed", "4294967296"}}, "between"},
        {{{"channel_mult", "1,,2"}}, "a number"},
        {{{"channel_mult", "0.1"}}, "between 0.125"},
        {{{"channel_mult", "nan"}}, "between 0.125"},
        {{{"channel_mult", "0.3"}}, "--num_channels 64 is no multiple of 32"},
        {{{"channel_mult", "0.25,1"}}, "--num_channels 64 is no multiple of 32"},
        {{{"num_heads_upsample", "2"}}, "without --num_heads"},
        {{{"channel_mult", "0"}}, "between"},
        {{{"channel_mult", ""}}, "a number"},
        {{{"channel_mult", "1,1,1,1,1,1,1,1,1"}}, "at most 8"},
        {{{"attention_resolutions", "16;8"}}, "whole number"},
        {{{"predict", "x1"}}, "eps|v|x0"},
        {{{"zero_terminal_snr", "1"}}, "--predict v or x0"},
        {{{"offset_noise", "-0.1"}}, "between"},
        {{{"noise_schedule", ""}}, "linear|cosine"},
        {{{"flip", "maybe"}}, "0 or 1"},
        {{{"ema_rate", "0.9,fast"}}, "a number"},
        {{{"ema_rate", "1"}}, "between"},
        {{{"ema_rate", "0.9,0,0.99"}}, "0 stands alone"},
        {{{"ema_rate", "0.9,0.9,0.9,0.9,0.9"}}, "at most 4"},
        {{{"ema_rate", "0.9,0.99"}, {"use_ema", "3"}}, "makes 2"},
        {{{"use_ema", "5"}}, "between"},
        {{{"final_lr_fraction", "1.5"}}, "between"},
        {{{"skip_outliers", "-1"}}, "between"},
        {{{"out_dir", std::string(5000, 'a')}}, "longer"},
        {{{"preset", std::string(5000, 'a')}}, "longer"},
        {{{"data_file", " a.bin"}}, "blank"},
        {{{"data_file", "a.bin\t"}}, "blank"},
        {{{"data_file", "\"a.bin\""}}, "quote"},
        {{{"consistency", "1"}}, "--predict eps"},
        {{{"consistency", "1"}, {"predict", "v"}, {"learn_sigma", "1"}}, "--learn_sigma"},
        {{{"path_steps", "10"}}, "--path_steps 10 goes with --consistency 1"},
        {{{"consistency", "1"},
          {"predict", "v"},
          {"path_steps", "11"},
          {"diffusion_steps", "10"},
          {"noise_schedule", "cosine"}},
         "--path_steps 11 is more than --diffusion_steps 10"},
        {{{"consistency", "1"},
          {"predict", "v"},
          {"path_steps", "4"},
          {"sampler", "consistency"},
          {"sample_steps", "5"}},
         "--sample_steps 5 is more than --consistency_steps 2, in which the model learns to draw"},
        {{{"consistency", "1"}, {"predict", "v"}, {"matching_fraction", "0.5"}},
         "--matching_fraction 0.5 needs --path_steps"},
        {{{"consistency", "1"}, {"predict", "v"}, {"path_steps", "1"}},
         "--path_steps 1 is less than --consistency_steps 2"},
        {{{"consistency", "1"}, {"predict", "v"}, {"path_steps", "10"}, {"matching_fraction", "0.95"}}, "between"},
        {{{"consistency", "1"}, {"predict", "v"}, {"min_snr_gamma", "5"}}, "--min_snr_gamma"},
    };
    int refused = 0;
    std::string bad;
    for (auto& entry : list) {
        std::string message = refusal([&] { check_config(config_of(entry.flags)); });
        if (is_sentence(message) && message.find(entry.says) != std::string::npos) {
            refused++;
            continue;
        }
        auto& [name, value] = entry.flags.back();
        bad += text(" --%s %s: '%s'", name.c_str(), value.substr(0, 30).c_str(), message.c_str());
    }
    report(bad.empty(), "refusals", "%d configurations, each with one sentence%s", refused, bad.c_str());
}

// Nothing that works is refused.
static void test_sound_configurations() {
    const Flags list[] = {Flags(),
                          toy_flags(),
                          {{"num_channels", "32"}, {"norm_groups", "16"}},
                          {{"attention_resolutions", "0"}},
                          {{"channel_mult", "1"}},
                          {{"ema_rate", "0"}},
                          {{"lr", "1.2e-38"}},
                          {{"adam_eps", "1e-20"}},
                          {{"diffusion_steps", "21"}},
                          {{"num_samples", "0"}},
                          {{"diffusion_steps", "2"}, {"noise_schedule", "cosine"}},
                          {{"ema_rate", "0.9,0.99"}, {"use_ema", "2"}},
                          {{"image_size", "1024"}, {"channel_mult", "1,1,1,1,1,1,1,1"}}};
    bool good = true;
    for (const Flags& flags : list) good &= refusal([&] { check_config(config_of(flags)); }).empty();
    for (const Preset& preset : PRESETS) {
        Config config = given_config(parse_flags({"--preset", preset.name}));
        if (config.consistency) config.predict = PREDICT_V;  // of the model that it tunes
        good &= refusal([&] { check_config(config); }).empty();
    }
    report(good, "presets", "and other sound configurations are let through");
}

// One to three flags, now and then with a wrong letter, and values that often do not fit them.
static std::vector<std::string> random_command_line(Dice* dice) {
    static const char* const values[] = {
        "0", "1", "-1", "8", "32", "64", "1e9", "1e-9", "2147483648", "x", "", "1,2",
        "1,2,3,4", ",", "eps", "v", "nan", "inf", "--", "0x10", "cosine", "999999999999999999999", "1,1,1,1,1,1,1,1",
        "4"};
    std::vector<std::string> words;
    int flags = 1 + dice->below(3);
    for (int k = 0; k < flags; k++) {
        std::string flag = FLAGS[dice->below((uint32_t)std::size(FLAGS))].name;
        if (dice->one_in(20) && !flag.empty()) flag[dice->below((uint32_t)flag.size())] = (char)dice->next();
        std::string value = values[dice->below((uint32_t)std::size(values))];
        if (dice->one_in(2)) {
            words.push_back("--" + flag + "=" + value);
        } else {
            words.push_back("--" + flag);
            words.push_back(value);
        }
    }
    return words;
}

// Random words as a command line: an answer or one sentence, and what is let through has a plan.
static void test_random_command_lines() {
    Dice dice{21};
    int accepted = 0, rejected = 0;
    std::string wrong;
    for (int i = 0; i < 20000; i++) {
        std::vector<std::string> words = random_command_line(&dice);
        std::string message = refusal([&] {
            Config config = given_config(parse_flags(words));
            check_config(config);
            Plan plan = make_plan(config, config.batch_size, true);
            if (plan.blocks.empty() || !plan.num_parameters) fail("!! no plan");
            make_sampler(config);
        });
        if (message.empty()) {
            accepted++;
            continue;
        }
        rejected++;

        if (!is_sentence(message)) wrong = message;  // although what the user typed may be any bytes
    }
    report(wrong.empty() && accepted > 1000 && rejected > 1000, "random command lines",
           "%d accepted, %d refused with one sentence each%s", accepted, rejected, wrong.c_str());
}

static void test_refusals() {
    test_refused_configurations();
    test_sound_configurations();
    test_random_command_lines();
}

// ===========================================================================================================
// 5  THREADS AND BATCHES
// ===========================================================================================================

static Dataset random_images(int count, int size, uint32_t seed) {
    Dataset data;
    data.count = count;
    data.bytes.resize((size_t)count * 3 * size * size);
    for (size_t i = 0; i < data.bytes.size(); i++) data.bytes[i] = random_word(seed, 1003, i, 0, 0) >> 24;
    return data;
}

// What training left: what no number of threads may change.
struct Trained {
    double sum = 0;              // of each step's loss and gradient norm
    std::vector<float> weights;  // and behind them their moving average
};

// Three steps of a network large enough for every sum to be formed in several blocks.
static Trained train_three_steps() {
    Trainer t;
    Config config = config_of(
        with(toy_flags(), {{"image_size", "16"}, {"batch_size", "3"}, {"flip", "1"}, {"predict", "v"}}));
    build_model(&t.model, config, config.batch_size, true);
    perturbed_weights(&t.model, 1);
    t.images = random_images(7, 16, 5);
    prepare_steps(&t);

    Trained trained;
    for (int step = 0; step < 3; step++) {
        StepState result = train_step(&t);
        trained.sum += (double)result.loss + result.norm;
    }
    trained.weights = downloaded(t.model.master, t.model.plan.num_floats);
    std::vector<float> ema = downloaded(t.model.ema[0], t.model.plan.num_floats);
    trained.weights.insert(trained.weights.end(), ema.begin(), ema.end());
    return trained;
}

static void test_threads() {
    set_threads(1);
    Trained alone = train_three_steps();
    bool same = std::isfinite(alone.sum);
    for (int threads : {2, 3, 4}) {
        set_threads(threads);
        Trained shared = train_three_steps();
        same &= shared.sum == alone.sum;
        same &= same_bits(shared.weights.data(), alone.weights.data(), alone.weights.size() * sizeof(float));
    }
    set_threads(TEST_THREADS);
    report(same, "threads", "3 training steps with 1, 2, 3 and 4 threads give the same bits");
}

static void test_batches() {
    const int B = 5;
    Config config = config_of(toy_flags());
    Model m = Model();
    build_model(&m, config, B, true);
    perturbed_weights(&m, 8);
    size_t image = (size_t)PIXEL * 8 * 8;
    size_t P = m.plan.num_floats;
    std::vector<float> input = random_pixels(31, B * 64, 3);
    std::vector<float> dout = random_pixels(32, B * 64, 3);
    std::vector<int> timesteps = {0, 999, 17, 500, 250};

    // Images [first, first + n) forward and backward.
    auto run = [&](int first, int n) {
        backend_upload(m.input, &input[first * image], n * image * sizeof(float));
        backend_upload(m.timesteps, &timesteps[first], n * sizeof(int));
        unet_forward(&m, call_of(&m, n));
        backend_upload(output_gradient_of(&m, m.plan.blocks.back(), n).data, &dout[first * image],
                       n * image * sizeof(float));
        unet_backward(&m, m.gradients);
        return output_values(&m, n);
    };
    std::vector<float> whole = run(0, B);
    std::vector<float> gradient = gradients_of(&m);

    // Two, one and two images: the outputs come one behind the other, the gradients add up.
    std::vector<float> parts, sum(P);
    for (auto [first, n] : {std::pair<int, int>{0, 2}, {2, 1}, {3, 2}}) {
        std::vector<float> part = run(first, n);
        std::vector<float> more = gradients_of(&m);
        parts.insert(parts.end(), part.begin(), part.end());
        for (size_t i = 0; i < P; i++) sum[i] += more[i];
    }
    double outputs = error_of(parts, whole);
    double gradients = error_of(sum, gradient);
    report(outputs < 1e-6 && gradients < 2e-6, "micro-batches",
           "2 + 1 + 2 images instead of 5: outputs differ by %.2g, sums of the gradients by %.2g", outputs,
           gradients);

    // No image sees another: with image 2 changed, those before and behind it are drawn as they were.
    for (size_t i = 2 * image; i < 3 * image; i++) input[i] += 1;
    std::vector<float> other = run(0, B);
    bool before_same = same_bits(&other[0], &whole[0], 2 * image * sizeof(float));
    bool behind_same = same_bits(&other[3 * image], &whole[3 * image], 2 * image * sizeof(float));
    bool itself_same = same_bits(&other[2 * image], &whole[2 * image], image * sizeof(float));
    report(before_same && behind_same && !itself_same, "images of a batch",
           "changing one leaves the others' outputs as they were, to the bit");
}

// Images drawn alone and in batches are the same, whatever their number.
static void test_sampling() {
    const Flags samplers[] = {{{"sampler", "ddim"}},
                              {{"sampler", "ddpm"}},
                              {{"sampler", "dpmpp"}},
                              {{"sampler", "heun"}},
                              {{"eta", "0.5"}}};
    const size_t n = (size_t)PIXEL * 8 * 8;
    bool same = true;
    double worst = 0;
    for (const Flags& sampler : samplers) {
        Flags flags = with(toy_flags(), {{"sample_steps", "5"}, {"predict", "v"}, {"ema_rate", "0"}});
        Config config = config_of(with(flags, sampler));
        std::vector<std::vector<float>> drawn;
        for (int batch : {1, 3}) {
            Model m = Model();
            build_model(&m, config, batch, false);
            perturbed_weights(&m, 2);
            std::vector<float> pictures, one;
            same &= sample(&m, &pictures, {{100, 0}, {5, 0}, {102, 0}, {7, 0}}, false) &&
                    sample(&m, &one, {{102, 0}}, false);
            std::vector<float> third(pictures.begin() + 2 * n, pictures.begin() + 3 * n);  // of the same seed
            double error = error_of(third, one);
            keep_worse(&worst, error);
            for (float value : pictures) same &= value >= -3 && value <= 3;
            drawn.push_back(pictures);
        }

        double error = error_of(drawn[0], drawn[1]);
        keep_worse(&worst, error);
        same &= !same_bits(&drawn[0][0], &drawn[0][n], n * sizeof(float));  // another seed, another picture
    }
    report(same && worst < 1e-5, "pictures", "drawn alone or in batches, from any seeds: %.2g apart", worst);
}

// ===========================================================================================================
// 6  AGAINST PYTORCH AND NUMPY
// ===========================================================================================================

static float* pointer(std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

// A view of some floats; none of an empty vector.
static Tensor tensor_of(std::vector<float>& values, int B, int H, int W, int C) {
    return {pointer(values), B, H, W, C};
}

// args: M, C, C2, O, accumulate; x (M, C), x2 (M, C2), w (O, C + C2), out (M, O); dx0, dx20: what dx is added to
static void linear_case(const Case& c, Verdict* v) {
    int M = c.arg(0), C = c.arg(1), C2 = c.arg(2), O = c.arg(3);
    bool accumulate = c.arg(4);
    bool wants_dx = c.has("dx");
    std::vector<float> x = c.floats("x");
    std::vector<float> x2 = c.floats("x2");
    std::vector<float> w = c.floats("w");
    std::vector<float> b = c.floats("b");
    std::vector<float> residual = c.floats("residual");
    std::vector<float> dout = c.floats("dout");
    std::vector<float> dw = unwritten(w.size());
    std::vector<float> db = unwritten(b.size());
    std::vector<float> out = unwritten((size_t)M * O);
    std::vector<float> dx = accumulate ? c.floats("dx0") : unwritten((size_t)M * C);
    std::vector<float> dx2 = accumulate ? c.floats("dx20") : unwritten((size_t)M * C2);

    Concat joined = {tensor_of(x, M, 1, 1, C), tensor_of(x2, M, 1, 1, C2)};
    Concat gradient = {tensor_of(dx, M, 1, 1, C), tensor_of(dx2, M, 1, 1, C2)};
    Tensor upstream = tensor_of(dout, M, 1, 1, O);
    Linear layer = {w.data(), b.data(), dw.data(), db.data()};
    conv1x1_forward(tensor_of(out, M, 1, 1, O), joined, layer, {.residual = tensor_of(residual, M, 1, 1, O)});
    conv1x1_backward_weight(layer, upstream, joined);
    if (wants_dx) conv1x1_backward_input(gradient, upstream, layer, {.accumulate = accumulate});

    v->compare("out", out, c.at("out"));
    v->compare("dw", dw, c.at("dw"));
    v->compare("db", db, c.at("db"));
    if (wants_dx) v->compare("dx", dx, c.at("dx"));
    if (wants_dx && C2) v->compare("dx2", dx2, c.at("dx2"));
}

// args: B, H, W, C, O, whether the output overwrites the residual; x (B, H, W, C), w (O, 3, 3, C), emb (B, O)
static void conv_case(const Case& c, Verdict* v) {
    int B = c.arg(0), H = c.arg(1), W = c.arg(2), C = c.arg(3), O = c.arg(4);
    bool in_place = c.arg(5);
    bool wants_dx = c.has("dx");
    bool wants_demb = c.has("demb");
    std::vector<float> x = c.floats("x");
    std::vector<float> w = c.floats("w");
    std::vector<float> b = c.floats("b");
    std::vector<float> emb = c.floats("emb");
    std::vector<float> residual = c.floats("residual");
    std::vector<float> dout = c.floats("dout");
    std::vector<float> dw = unwritten(w.size());
    std::vector<float> db = unwritten(b.size());
    std::vector<float> out = in_place ? residual : unwritten((size_t)B * H * W * O);
    std::vector<float> dx = unwritten((size_t)B * H * W * C);
    std::vector<float> demb = unwritten((size_t)B * O);

    Conv layer = {w.data(), b.data(), dw.data(), db.data()};
    Tensor input = tensor_of(x, B, H, W, C);
    Tensor output = tensor_of(out, B, H, W, O);
    Tensor added = in_place ? output : tensor_of(residual, B, H, W, O);
    Tensor upstream = tensor_of(dout, B, H, W, O);
    conv3x3_forward(output, input, layer, {.emb = {pointer(emb), O}, .residual = added});
    conv3x3_backward_weight(layer, upstream, input, {wants_demb ? demb.data() : nullptr, O});
    if (wants_dx) conv3x3_backward_input(tensor_of(dx, B, H, W, C), upstream, layer);

    v->compare("out", out, c.at("out"));
    v->compare("dw", dw, c.at("dw"));
    v->compare("db", db, c.at("db"));
    if (wants_dx) v->compare("dx", dx, c.at("dx"));
    if (wants_demb) v->compare("demb", demb, c.at("demb"));
}

// One member of every element.
static std::vector<float> column(const auto& of, auto member) {
    std::vector<float> values;
    for (const auto& element : of) values.push_back(element.*member);
    return values;
}

// args: B, T, C, C2, groups, silu, accumulate; x (B, T, C), x2 (B, T, C2), out (B, T, C + C2)
static void norm_case(const Case& c, Verdict* v) {
    int B = c.arg(0), T = c.arg(1), C = c.arg(2), C2 = c.arg(3), G = c.arg(4);
    bool silu = c.arg(5);
    bool accumulate = c.arg(6);
    std::vector<float> x = c.floats("x");
    std::vector<float> x2 = c.floats("x2");
    std::vector<float> w = c.floats("w");
    std::vector<float> b = c.floats("b");
    std::vector<float> dout = c.floats("dout");
    std::vector<float> dresidual = c.floats("dresidual");
    std::vector<float> out = unwritten((size_t)B * T * (C + C2));
    std::vector<NormSums> sums((size_t)B * norm_tiles(T) * (C + C2), {NAN, NAN});
    std::vector<Moments> moments(sums.size(), {NAN, NAN});
    std::vector<Moments> moments2 = moments;
    std::vector<GroupStatistics> statistics((size_t)B * (C + C2), {NAN, NAN});
    std::vector<ScaleShift> half_scale_shift(statistics.size(), {NAN, NAN});

    Norm norm = {.x = {tensor_of(x, B, 1, T, C), tensor_of(x2, B, 1, T, C2)}, .groups = G, .silu = silu};
    norm.x.first.moments = moments.data();
    norm.x.second.moments = moments2.data();
    norm.w = w.data();
    norm.bias = b.data();
    norm.statistics = statistics.data();
    norm.half_scale_shift = half_scale_shift.data();
    norm.sums = sums.data();
    channel_moments(norm.x.first);
    channel_moments(norm.x.second);
    groupnorm_forward(tensor_of(out, B, 1, T, C + C2), norm);
    v->compare("out", out, c.at("out"));
    v->compare("mean", column(statistics, &GroupStatistics::mean), c.at("mean"));
    v->compare("rstd", column(statistics, &GroupStatistics::rstd), c.at("rstd"));
    v->compare("scale", column(half_scale_shift, &ScaleShift::scale), c.at("scale"));
    v->compare("shift", column(half_scale_shift, &ScaleShift::shift), c.at("shift"));

    // Backward writes the output of forward once more, over the gradient dy or to memory of its own.
    for (bool over_dy : {false, true}) {
        std::vector<float> dw = unwritten(w.size());
        std::vector<float> db = unwritten(b.size());
        std::vector<float> dy = unwritten(out.size());
        std::vector<float> apart = dy;
        std::vector<float>& normed = over_dy ? dy : apart;
        std::vector<float> dx = accumulate ? c.floats("dx0") : unwritten((size_t)B * T * C);
        std::vector<float> dx2 = accumulate ? c.floats("dx20") : unwritten((size_t)B * T * C2);

        Tensor gradient = tensor_of(dy, B, 1, T, C + C2);
        norm.dw = dw.data();
        norm.dbias = db.data();
        groupnorm_backward_sums(gradient, tensor_of(dout, B, 1, T, C + C2), norm);
        groupnorm_backward({tensor_of(dx, B, 1, T, C), tensor_of(dx2, B, 1, T, C2)},
                           tensor_of(normed, B, 1, T, C + C2), gradient, norm,
                           {.residual = tensor_of(dresidual, B, 1, T, C), .accumulate = accumulate});

        v->compare("made again", normed, c.at("out"));
        v->compare("dw", dw, c.at("dw"));
        v->compare("db", db, c.at("db"));
        v->compare("dx", dx, c.at("dx"));
        if (C2) v->compare("dx2", dx2, c.at("dx2"));
    }
}

// args: B, T, C, heads; qkv (B, T, 3C): q, k and v behind one another in each pixel; out (B, T, C), lse (B, heads, T)
static void attention_case(const Case& c, Verdict* v) {
    int B = c.arg(0), T = c.arg(1), C = c.arg(2), heads = c.arg(3);
    std::vector<float> qkv = c.floats("qkv");
    std::vector<float> dout = c.floats("dout");
    std::vector<float> out = unwritten((size_t)B * T * C);
    std::vector<float> lse = unwritten((size_t)B * heads * T);
    std::vector<float> dqkv = unwritten((size_t)B * T * 3 * C);

    Tensor input = tensor_of(qkv, B, 1, T, 3 * C);
    Tensor output = tensor_of(out, B, 1, T, C);
    attention_forward(output, lse.data(), input, heads);
    attention_backward(tensor_of(dqkv, B, 1, T, 3 * C), tensor_of(dout, B, 1, T, C), output, lse.data(),
                       input, heads);

    v->compare("out", out, c.at("out"));
    v->compare("lse", lse, c.at("lse"));
    double scale = largest_of(c.at("dqkv"));
    for (int third = 0; third < 3; third++) {
        std::vector<double> r = columns_of(c.at("dqkv"), 3 * C, third * C, C);
        std::vector<float> a = columns_of(dqkv, 3 * C, third * C, C);
        std::string name = std::string("d") + "qkv"[third];
        // With one pixel the softmax is 1 whatever q and k are.
        bool is_zero = largest_of(r) < 1e-12 * scale;
        if (is_zero) v->compare_zero(name, a, scale);
        else v->compare(name, a, r);
    }
}

// args: B, H, W, C, accumulate; x (B, H, W, C), out (B, 2H, 2W, C) or (B, H/2, W/2, C)
static void resample_case(const Case& c, Verdict* v) {
    int B = c.arg(0), H = c.arg(1), W = c.arg(2), C = c.arg(3);
    bool accumulate = c.arg(4);
    std::vector<float> x = c.floats("x");
    std::vector<float> dout = c.floats("dout");
    std::vector<float> out = unwritten(c.at("out").size());
    std::vector<float> dx = accumulate ? c.floats("dx0") : unwritten(x.size());

    bool upsamples = c.is("upsample");
    int out_H = upsamples ? 2 * H : H / 2;
    int out_W = upsamples ? 2 * W : W / 2;
    resample_forward(tensor_of(out, B, out_H, out_W, C), tensor_of(x, B, H, W, C));
    resample_backward(tensor_of(dx, B, H, W, C), tensor_of(dout, B, out_H, out_W, C), accumulate);

    v->compare("out", out, c.at("out"));
    v->compare("dx", dx, c.at("dx"));
}

// args: width E of the embedding, max_period; t (B), out (B, E)
static void embedding_case(const Case& c, Verdict* v) {
    std::vector<int> t(c.at("t").begin(), c.at("t").end());
    std::vector<float> out = unwritten(t.size() * c.arg(0));
    Tensor sinusoids = tensor_of(out, (int)t.size(), 1, 1, c.arg(0));
    cpu::run(TimestepEmbedding<float>{.out = sinusoids, .timesteps = t.data(), .max_period = c.arg(1)});
    v->compare("out", out, c.at("out"));
}

static void silu_case(const Case& c, Verdict* v) {
    std::vector<float> x = c.floats("x");
    std::vector<float> dout = c.floats("dout");
    std::vector<float> out = unwritten(x.size());
    std::vector<float> dx = unwritten(x.size());
    auto row = [](std::vector<float>& values) { return tensor_of(values, 1, 1, 1, (int)values.size()); };
    cpu::run(SiluForward<float>{.out = row(out), .x = row(x)});
    cpu::run(SiluBackward<float>{.dx = row(dx), .dout = row(dout), .x = row(x)});
    v->compare("out", out, c.at("out"));
    v->compare("dx", dx, c.at("dx"));
}

// args: B, elements of a sample, timesteps; x and target (B, elements), t (B), weights (timesteps)
static void mse_case(const Case& c, Verdict* v) {
    int B = c.arg(0), n = c.arg(1), T = c.arg(2);
    std::vector<float> x = c.floats("x");
    std::vector<float> target = c.floats("target");
    std::vector<int> t(c.at("t").begin(), c.at("t").end());
    std::vector<float> losses = unwritten((size_t)B * loss_chunks(n / PIXEL));
    std::vector<float> dx = unwritten(x.size());
    std::vector<ScheduleRow> chain;
    for (float weight : c.floats("weights")) {
        chain.push_back({});
        chain.back().weight = weight;
    }

    BatchLoss loss = {losses.data(), t.data(), chain.data(), B, n / PIXEL, PIXEL, T};
    cpu::run(PredictionLoss<float>{loss, x.data(), target.data(), dx.data()});
    StepState state = StepState();
    std::vector<float> no_norm = {0};
    cpu::run(FinishStep{&state, loss, no_norm.data(), 1, default_config().hyper});
    v->compare("loss", {state.loss}, c.at("loss"));
    const float* sums = state.quartile_sums;
    v->compare("by quartile", std::vector<float>(sums, sums + 4), c.at("quartiles"));
    for (int q = 0; q < 4; q++)
        v->note("samples of a quartile", state.quartile_counts[q] == c.at("counts")[q] ? 0 : INFINITY);

    // A sample at a time, and without a gradient, the loss has the same bits.
    std::vector<float> only = unwritten(losses.size());
    loss.chunk_sums = only.data();
    loss.B = 1;
    for (int b = 0; b < B; b++) {
        loss.first = b;
        cpu::run(PredictionLoss<float>{loss, x.data() + (size_t)b * n, target.data() + (size_t)b * n});
    }
    v->note("loss without gradient", only == losses ? 0 : INFINITY);
    v->compare("dx", dx, c.at("dx"));
}

static void test_layers(const char* path) {
    const struct {
        const char* kind;
        void (*run)(const Case&, Verdict*);
    } kinds[] = {{"embedding", embedding_case}, {"silu", silu_case},         {"mse", mse_case},
                 {"linear", linear_case},       {"conv3x3", conv_case},      {"groupnorm", norm_case},
                 {"attention", attention_case}, {"upsample", resample_case}, {"downsample", resample_case}};
    for (const Case& c : read_cases(path)) {
        Verdict verdict(1e-5);
        running = c.name;
        for (auto& kind : kinds)
            if (c.is(kind.kind)) kind.run(c, &verdict);
        verdict.line(c.name);
    }
}

// Images as PyTorch has them, (B, C, H, H), in the program's layout: (B, H, H, PIXEL), zeros behind the C channels.
static std::vector<double> interleaved(const std::vector<double>& from, int B, int H) {
    std::vector<double> to((size_t)B * H * H * PIXEL);
    int C = (int)(from.size() / B / H / H);  // with --learn_sigma twice as many come out
    for (size_t i = 0; i < from.size(); i++) {
        size_t image = i / (C * H * H);
        size_t channel = i / (H * H) % C;
        size_t pixel = i % (H * H);
        to[(image * H * H + pixel) * PIXEL + channel] = from[i];
    }
    return to;
}

// Every gradient of the model against "grad.NAME" of the case.
static void compare_gradients(const Model& m, const Case& c) {
    Verdict verdict(1e-5);
    double largest = 0;
    for (const Parameter& tensor : m.plan.tensors)
        largest = std::max(largest, largest_of(c.at("grad." + tensor.name)));

    std::vector<float> gradients = gradients_of(&m);
    size_t stored = 0;
    for (const Parameter& tensor : m.plan.tensors) {
        std::string name = tensor.name;
        const std::vector<double>& r = c.at("grad." + name);
        std::vector<float> a = reordered({&gradients[tensor.offset], tensor.size}, tensor, false);
        stored += r.size();

        // The gradients of queries, keys and values differ in size, so each is judged by itself.
        bool is_qkv = name.find(".qkv.") != std::string::npos;
        int parts = is_qkv ? 3 : 1;
        for (int third = 0; third < parts; third++) {
            if (r.size() != tensor.count) {
                verdict.note(name + ", whose length is wrong", INFINITY);
                continue;
            }
            size_t part = r.size() / parts;
            size_t first = third * part;
            std::vector<double> expected(r.begin() + first, r.begin() + first + part);
            std::vector<float> got(a.begin() + first, a.begin() + first + part);
            std::string what = is_qkv ? name + " " + "qkv"[third] : name;
            // The gradient of the keys' bias is zero: adding the same to every key changes no softmax.
            bool is_key_bias = is_qkv && third == 1 && tensor.shape.size() == 1;
            if (is_key_bias) verdict.compare_zero(what, got, largest);
            else verdict.compare(what, got, expected);
        }
    }
    verdict.line("gradients, one by one");
    report(stored == m.plan.num_parameters, "every parameter", "%zu of %zu have a reference", stored,
           m.plan.num_parameters);
}

// Output, loss and gradients of the model in `weights`, a file of train_unet.py's debug_state beside it.
static void test_model(const char* weights, const char* state) {
    WeightsFile file = open_weights(weights);
    std::vector<Case> cases = read_cases(state);
    Case c = cases.at(0);
    for (Case& other : cases) c.tensors[other.name] = other.tensors.begin()->second;
    int B = (int)c.at("t").size(), H = file.config.image_size;
    size_t n = (size_t)B * H * H * PIXEL;
    Model m = Model();
    build_model(&m, file.config, B, true);
    read_parameters(m, m.master, file, "weights");
    start_from_master(&m);
    poison(&m);

    std::vector<double> x = interleaved(c.at("x"), B, H);
    std::vector<double> target = interleaved(c.at("target"), B, H);
    std::vector<float> input(x.begin(), x.end());
    std::vector<float> wanted(target.begin(), target.end());
    std::vector<int> t(c.at("t").begin(), c.at("t").end());
    std::vector<float> x0(c.at("x0").begin(), c.at("x0").end());
    backend_upload(m.input, input.data(), n * sizeof(float));
    backend_upload(m.target, wanted.data(), n * sizeof(float));
    backend_upload(m.timesteps, t.data(), B * sizeof(int));
    backend_upload(m.images, x0.data(), x0.size() * sizeof(float));
    if (m.labels) {
        std::vector<int> labels(c.at("y").begin(), c.at("y").end());
        backend_upload(m.labels, labels.data(), B * sizeof(int));
    }
    double loss = forward_loss(&m, B);
    backend_zero(m.gradients, m.plan.num_floats * sizeof(float));
    unet_backward(&m, m.gradients);

    Verdict output(1e-5), scalar(1e-5);
    output.compare("out", output_values(&m, B), interleaved(c.at("out"), B, H));
    output.line("output");
    scalar.note("loss", fabs(loss / c.at("loss")[0] - 1));
    scalar.line("loss");
    compare_gradients(m, c);
}

// Two networks that are formulas of x and of how much of the picture and of the noise there is in it, alpha and sigma,
// and that predict the picture, x0. The first takes x for noise on a picture 1.6 tanh(x + t / 2T).
static std::vector<double> made_up_x0(const std::vector<float>& x, double t, double T) {
    std::vector<double> x0;
    for (float value : x) x0.push_back(1.6 * tanh(value + t / T / 2));
    return x0;
}

// The second is the ideal denoiser of a few pictures p_i, their mean weighed by how likely x comes of each:
// x0 = sum_i w_i p_i with w = softmax_i(-|x - alpha p_i|^2 / (2 sigma^2)). x (B, P, PIXEL), pictures (n, 3, P).
static std::vector<double> ideal_x0(const std::vector<float>& x, double alpha, double sigma, int B,
                                    const std::vector<double>& pictures) {
    int P = (int)x.size() / B / PIXEL;
    int elements = 3 * P;
    int n = (int)pictures.size() / elements;
    auto place = [&](int b, int e) { return ((size_t)b * P + e % P) * PIXEL + e / P; };
    std::vector<double> x0(x.size());
    for (int b = 0; b < B; b++) {
        std::vector<double> weights;
        for (int i = 0; i < n; i++) {
            double squares = 0;
            for (int e = 0; e < elements; e++)
                squares += pow(x[place(b, e)] - alpha * pictures[(size_t)i * elements + e], 2);
            weights.push_back(-squares / (2 * sigma * sigma));
        }

        double most = std::ranges::max(weights);
        double sum = 0;
        for (double& weight : weights) {
            weight = exp(weight - most);
            sum += weight;
        }
        for (int i = 0; i < n; i++)
            for (int e = 0; e < elements; e++)
                x0[place(b, e)] += weights[i] / sum * pictures[(size_t)i * elements + e];
    }
    return x0;
}

// What a network that predicts `predict` puts out, whose x0 is given: x = alpha x0 + sigma eps.
static double output_for(int predict, double x, double x0, double alpha, double sigma) {
    double eps = (x - alpha * x0) / sigma;
    switch (predict) {
        case PREDICT_EPS: return eps;
        case PREDICT_V: return alpha * eps - sigma * x0;
        case PREDICT_FLOW: return eps - x0;
        case PREDICT_EDM: {
            double scale = hypot(sigma, alpha / 2);  // EDM's, of images with a standard deviation of a half
            return (2 * sigma * x0 - alpha * eps / 2) / scale;
        }
        default: return x0;
    }
}

// Each of the following compares what the program computes with a case of NumPy's: real numbers by notes to the
// verdict. They return how many integers, or other values that must be equal, are not.

// args: seed, stream, sample, step
static int words_case(const Case& c, Verdict*) {
    const std::vector<double>& values = c.at("values");
    int wrong = 0;
    for (size_t e = 0; e < values.size(); e++) {
        uint32_t word = random_word(c.word(0), c.word(1), (uint32_t)e, c.word(2), c.word(3));
        wrong += (int32_t)word != values[e];
    }
    return wrong;
}

// args: seed, stream, sample, step
static int normals_case(const Case& c, Verdict*) {
    const std::vector<double>& values = c.at("values");
    int wrong = 0;
    for (size_t e = 0; e < values.size(); e++) {
        float four[4];
        random_normals(four, c.word(0), c.word(1), (uint32_t)e / 4, c.word(2), c.word(3));
        wrong += !(fabs(four[e % 4] - values[e]) < 2e-6);
    }
    return wrong;
}

// args: seed, stream, step, T, schedule, sampling; reals: mean, deviation
static int timesteps_case(const Case& c, Verdict*) {
    const std::vector<double>& values = c.at("values");
    int T = c.arg(3), sampling = c.arg(5);
    Config config = default_config();
    config.diffusion_steps = T;
    config.noise_schedule = c.arg(4);
    config.timestep_sampling = sampling;
    config.timestep_mean = (float)c.at("reals")[0];
    config.timestep_std = (float)c.at("reals")[1];
    std::vector<uint32_t> last_words = make_last_words(config);
    int wrong = 0;
    for (size_t b = 0; b < values.size(); b++) {
        uint32_t word = random_word(c.word(0), c.word(1), 0, (uint32_t)b, c.word(2));
        int t = draw_timestep(last_words.data(), T, word);
        wrong += t != values[b];
        bool is_uniform = sampling == 0;
        if (is_uniform) wrong += t != (int)((uint64_t)word * T >> 32);
    }
    return wrong;
}

// args: T, schedule; values: alphas, then sigmas
static int levels_case(const Case& c, Verdict* v) {
    const std::vector<double>& values = c.at("values");
    Config config = default_config();
    config.diffusion_steps = c.arg(0);
    config.noise_schedule = c.arg(1);
    std::vector<NoiseLevel> schedule = make_schedule(config);
    if (schedule.size() * 2 != values.size()) return 1;

    for (size_t t = 0; t < schedule.size(); t++) {
        v->note(text("t = %zu, alpha", t), fabs(schedule[t].alpha - values[t]));
        v->note(text("t = %zu, sigma", t), fabs(schedule[t].sigma / values[schedule.size() + t] - 1));
    }
    return 0;
}

// args: seed, epoch
static int permutation_case(const Case& c, Verdict*) {
    const std::vector<double>& values = c.at("values");
    std::vector<int> order(values.size());
    random_permutation(order.data(), (int)order.size(), c.word(0), c.word(1));
    int wrong = 0;
    for (size_t i = 0; i < values.size(); i++) wrong += order[i] != values[i];
    return wrong;
}

// args: seed, images
static int batches_case(const Case& c, Verdict*) {
    const std::vector<double>& values = c.at("values");
    int images = c.arg(1);
    int epochs = (int)(values.size() / images) + 1;
    Orders orders(images, epochs, c.word(0));
    int wrong = 0;
    for (size_t i = 0; i < values.size(); i++) wrong += orders.at(i) != values[i];
    return wrong;
}

// args: T, schedule, zero terminal SNR; values: alpha^2, the "alpha bar" of Ho et al.
static int abar_case(const Case& c, Verdict* v) {
    const std::vector<double>& values = c.at("values");
    Config config = default_config();
    config.diffusion_steps = c.arg(0);
    config.noise_schedule = c.arg(1);
    config.zero_terminal_snr = c.arg(2);
    std::vector<NoiseLevel> schedule = make_schedule(config);
    for (size_t t = 0; t < values.size(); t++) {
        double abar = pow(schedule.at(t).alpha, 2);
        double rest = pow(schedule.at(t).sigma, 2);
        v->note(text("t = %zu", t), values[t] ? fabs(abar / values[t] - 1) : abar);
        v->note(text("t = %zu, sigma", t), fabs(rest - (1 - values[t])));
    }
    return schedule.size() != values.size();
}

// args: T, schedule, predict; reals: gamma
static int weights_case(const Case& c, Verdict* v) {
    const std::vector<double>& values = c.at("values");
    Config config = default_config();
    config.diffusion_steps = c.arg(0);
    config.noise_schedule = c.arg(1);
    config.predict = c.arg(2);
    config.min_snr_gamma = (float)c.at("reals")[0];
    std::vector<ScheduleRow> chain = make_schedule_rows(config);
    for (size_t t = 0; t < values.size(); t++) {
        double weight = chain.at(t).weight;
        v->note(text("t = %zu", t), fabs(values[t] ? weight / values[t] - 1 : weight));
    }
    return 0;
}

// args: T, schedule, predict, sampler, steps; values (steps, 6): the timestep and five coefficients
static int sampler_case(const Case& c, Verdict* v) {
    const std::vector<double>& values = c.at("values");
    Config config = default_config();
    config.diffusion_steps = c.arg(0);
    config.noise_schedule = c.arg(1);
    config.predict = c.arg(2);
    config.sampler = c.arg(3);
    config.sample_steps = c.arg(4);
    std::vector<SamplerStep> steps = make_sampler(config);
    steps.erase(steps.begin());  // the start, which calls no network
    if (steps.size() * 6 != values.size()) return 1;

    int wrong = 0;
    for (size_t i = 0; i < steps.size(); i++) {
        const SamplerStep& s = steps[i];
        const double* r = &values[6 * i];
        wrong += s.timestep != r[0];
        const float ours[] = {s.x0_from_x, s.x0_from_out, s.update.x0, s.update.x, s.update.noise};
        for (int k = 0; k < 5; k++) {
            double error = fabs(ours[k] - r[k + 1]) / (1e-3 + fabs(r[k + 1]));
            v->note(text("step %zu, number %d", i, k), error);
        }
    }
    return wrong;
}

// args: predict, schedule, zero terminal SNR, sampler, steps, threshold, T, H, spacing, two seeds, path_steps;
// reals: eta; values (2, 3, H, H): what is drawn by the made-up network, or by the ideal one of `pictures`
static int chain_case(const Case& c, Verdict* v) {
    const std::vector<double>& values = c.at("values");
    Config config = default_config();
    config.predict = c.arg(0);
    config.noise_schedule = c.arg(1);
    config.zero_terminal_snr = c.arg(2);
    config.sampler = c.arg(3);
    config.sample_steps = c.arg(4);
    config.threshold = c.arg(5);
    config.diffusion_steps = c.arg(6);
    config.eta = (float)c.at("reals")[0];
    std::vector<NoiseLevel> schedule = make_schedule(config);
    config.spacing = c.arg(8);
    config.path_steps = c.arg(11);

    int B = 2, H = c.arg(7);
    int image = PIXEL * H * H;
    std::vector<SampleSpec> specs = {{c.word(9), 0}, {c.word(10), 0}};
    std::vector<float> x(B * image), input(x), out(x), saved(x);
    SampleBatch<float> drawing = {.input = tensor_of(input, B, H, H, PIXEL),
                                  .out = out.data(),
                                  .channels = 3,
                                  .clamps = config.threshold == THRESHOLD_CLAMP,
                                  .guidance = 1,
                                  .x = x.data(),
                                  .saved = saved.data(),
                                  .specs = specs.data()};
    for (const SamplerStep& s : make_sampler(config)) {
        int t = std::max(0, s.timestep);  // the start has none
        auto [alpha, sigma] = schedule[t];
        std::vector<double> x0 = c.has("pictures") ? ideal_x0(input, alpha, sigma, B, c.at("pictures"))
                                                   : made_up_x0(input, t, config.diffusion_steps);
        for (size_t i = 0; i < x.size(); i++)
            out[i] = (float)output_for(config.predict, input[i], x0[i], alpha, sigma);
        cpu::run(UpdateSamples<float>{drawing, s});
    }

    if (values.size() != (size_t)B * 3 * H * H) return 1;
    for (size_t i = 0; i < values.size(); i++) {
        size_t b = i / (3 * H * H);
        size_t channel = i / (H * H) % 3;
        size_t pixel = i % (H * H);
        v->note(text("value %zu", i), fabs(x[b * image + pixel * PIXEL + channel] - values[i]));
    }
    return 0;
}

// args: schedule, warm-up, lr_steps, skipped, ema_warmup; reals: lr, last fraction, two EMA rates; at: steps;
// values (n, 3): the learning rate and the two averages' weights at each step
static int rate_case(const Case& c, Verdict* v) {
    const std::vector<double>& values = c.at("values");
    const std::vector<double>& reals = c.at("reals");
    Config config = default_config();
    config.hyper.lr_schedule = c.arg(0);
    config.hyper.warmup_steps = c.arg(1);
    config.hyper.lr_steps = c.arg(2);
    config.hyper.ema_warmup = c.arg(4);
    config.hyper.lr = (float)reals[0];
    config.hyper.final_lr_fraction = (float)reals[1];
    config.hyper.ema_rate[0] = (float)reals[2];
    config.hyper.ema_rate[1] = (float)reals[3];
    for (size_t i = 0; i < c.at("at").size(); i++) {
        double s = c.at("at")[i];
        AdamW a = adamw_at(config.hyper, (long)s, (long)s - c.arg(3));
        v->note(text("lr at %g", s), fabs(a.lr - values[3 * i]) / (double)config.hyper.lr);
        for (int k = 0; k < 2; k++)
            v->note(text("ema %d at %g", k + 1, s), fabs(a.ema_weight[k] / values[3 * i + 1 + k] - 1));
    }
    return 0;
}

static void test_reference(const char* path) {
    const struct {
        const char* kind;
        int (*run)(const Case&, Verdict*);
        double tolerance = 2e-6;
    } kinds[] = {{"words", words_case},
                 {"normals", normals_case},
                 {"timesteps", timesteps_case},
                 {"levels", levels_case},
                 {"permutation", permutation_case},
                 {"batches", batches_case},
                 {"abar", abar_case, 1e-10},
                 {"weights", weights_case},
                 {"sampler", sampler_case},
                 {"chain", chain_case, 5e-5},  // hundreds of steps
                 {"rate", rate_case}};
    for (const Case& c : read_cases(path)) {
        running = c.name;
        auto kind = std::find_if(std::begin(kinds), std::end(kinds), [&](auto& k) { return c.is(k.kind); });
        if (kind == std::end(kinds)) {
            report(false, c.name, "is of no kind that network.cu knows");
            continue;
        }
        Verdict verdict(kind->tolerance);
        int wrong = kind->run(c, &verdict);
        if (wrong) verdict.note(text("%d values are wrong", wrong), INFINITY);
        else verdict.note("integers", 0);
        verdict.line(c.name);
    }
}

// Files are read to the same floats in NumPy, bit for bit, upright and mirrored.
static void test_images(const char* path, int size, const char* expected) {
    Case c = read_cases(expected).at(0);
    Config config = {};
    config.image_size = size;
    config.in_channels = 3;
    Dataset data = read_images(path, config);
    BatchSource source = BatchSource();
    source.bytes = data.bytes.empty() ? nullptr : data.bytes.data();
    source.floats = data.floats.data();
    source.batch = 1;
    source.size = size;
    source.channels = 3;

    const std::vector<double>& upright = c.at("upright");
    const std::vector<double>& mirrored = c.at("mirrored");
    size_t elements = (size_t)3 * size * size;
    size_t wrong = 0;
    std::vector<float> image(elements);
    bool ok = upright.size() == data.count * elements && mirrored.size() == upright.size();
    for (int i = 0; ok && i < data.count; i++) {
        for (bool flipped : {false, true}) {
            int chosen = flipped ? -1 - i : i;
            const std::vector<double>& wanted = flipped ? mirrored : upright;
            cpu::run(LoadImages{.images = image.data(), .sources = &chosen, .source = source, .B = 1});
            for (size_t e = 0; e < elements; e++) wrong += !(image[e] == wanted[i * elements + e]);
        }
    }
    report(ok && !wrong, c.name, "%d images of %dx%d, %zu values differ", data.count, size, size, wrong);
}

static void test_same_weights(const char* first, const char* second) {
    WeightsFile a = open_weights(first);
    WeightsFile b = open_weights(second);
    Model one = plan_model(a.config, 1, false);
    Model two = plan_model(b.config, 1, false);
    std::vector<float> x(one.plan.num_floats);
    std::vector<float> y(two.plan.num_floats);
    read_parameters(one, x.data(), a, "weights");
    read_parameters(two, y.data(), b, "weights");

    auto same_name = [](const Parameter& s, const Parameter& t) { return s.name == t.name; };
    bool named = std::ranges::equal(one.plan.tensors, two.plan.tensors, same_name);
    bool same_flags = true;
    for (const Flag& flag : FLAGS)
        if (flag.group == MODEL) same_flags &= flag_text(a.config, flag) == flag_text(b.config, flag);
    bool same_values = x.size() == y.size() && same_bits(x.data(), y.data(), x.size() * sizeof(float));
    report(named && same_flags && same_values, "same weights", "%zu parameters of %s and %s", x.size(), first,
           second);
}

// ===========================================================================================================
// 7  MAIN
// ===========================================================================================================

static const struct {
    const char* name;
    void (*run)();
} TESTS[] = {{"measure", test_error_measure},
             {"random", test_random},
             {"checksum", test_checksum},
             {"matmul", test_matmul},
             {"plain layers", test_plain_layers},
             {"differences", test_finite_differences},
             {"plan", test_plan},
             {"plan configurations", test_configurations},
             {"plan refusals", test_refusals},
             {"threads", test_threads},
             {"batches", test_batches},
             {"microbatch", [] { test_microbatch(1e-5); }},
             {"sampling", test_sampling}};

static int run_tests(int argc, char** argv) {
    std::string mode = argc > 1 ? argv[1] : "";
    auto argument = [&](int i) -> const char* { return argc > i ? argv[i] : "(no file named)"; };
    begin_tests();

    if (mode == "--layers") {
        test_layers(argument(2));
    } else if (mode == "--model") {
        test_model(argument(2), argument(3));
    } else if (mode == "--reference") {
        test_reference(argument(2));
    } else if (mode == "--images") {
        test_images(argument(2), atoi(argument(3)), argument(4));
    } else if (mode == "--same") {
        test_same_weights(argument(2), argument(3));
    } else if (mode == "" || mode == "--only") {
        std::string wanted = mode == "--only" ? argument(2) : "";
        if (argc > 3 || (argc == 2 && mode == "--only")) fail_usage("usage: network [--only NAME]");
        for (auto& test : TESTS) {
            if (!strstr(test.name, wanted.c_str())) continue;
            running = test.name;
            test.run();
        }
        if (!passed && !failed) fail_usage("network --only: no test's name contains %s", wanted.c_str());
    } else {
        fail_usage("network knows no %s; the first lines of network.cu tell what it knows", mode.c_str());
    }
    return summary();
}

int main(int argc, char** argv) {
    return guarded([&] { return run_tests(argc, argv); });
}
