// test_unet.cu: tests of train_unet.cu. It includes the program, so that what is tested is what runs.
//
//   ./test_unet                            every test that needs no file from outside
//   ./test_unet --only NAME                those of them whose name contains NAME
//   ./test_unet --fuzz N [--seed S]        the file readers alone, with N random mutations
//
// Built by nvcc it holds the kernels beside the CPU layers and compares those instead: see CUDA LAYERS.
//
// test_unet.py writes reference values with PyTorch and NumPy and calls:
//
//   ./test_unet --layers FILE              each layer, forward and backward
//   ./test_unet --model W.bin FILE         output, loss and every gradient of the model in W.bin
//   ./test_unet --twin FILE                random numbers, schedules, samplers, learning rates
//   ./test_unet --images X.bin SIZE FILE   the images of X.bin as floats
//   ./test_unet --same A.bin B.bin         the weights of two files, bit for bit
//
// Each test prints one line, `ok NAME detail` or `FAIL NAME detail`; the last line counts them, and the exit
// status is 1 where one failed. Comparisons are written so that a NaN fails.
//
// -----------------------------------------------------------------------------------------------------------
// Contents
//
//   1  HARNESS
//   2  RANDOM NUMBERS, CHECKSUM
//   3  THE CPU'S MATRIX PRODUCT AND LAYERS
//   4  GRADIENTS BY FINITE DIFFERENCES
//   5  PLAN
//   6  THREADS AND BATCHES
//   7  FILE READERS
//   8  AGAINST PYTORCH AND NUMPY
//   9  MAIN
//  10  A STEP IN PARTS, IN BOTH BUILDS

#include <cerrno>
#include <cfloat>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

static void test_microbatch(double limit);  // below, in section 10

#ifdef __CUDACC__
static int sum_passes = 0;  // launchers that have read a tensor only for the sums that a norm wants
#define PROFILE(...) (sum_passes += std::string_view(#__VA_ARGS__).starts_with("\"group norm sums\""))
#define TESTING
#include "train_unet.cu"

#include "tests/cases.h"

// ===========================================================================================================
// CUDA LAYERS
// ===========================================================================================================

// In a build for the GPU, every launcher against the CPU function of its name:
//
//   build/test_unet_cuda_bf16          check: every launcher, many shapes
//   build/test_unet_cuda_bf16 tiny     few and small shapes, for compute-sanitizer; behind it a layer's NAME
//   build/test_unet_cuda_bf16 limits   the largest sizes that the flags allow, some minutes
//
// One line a layer and pass. Inputs are rounded to the layers' precision first, so that an error is the
// launcher's own. What is overwritten is NaN before, as is the workspace; two runs must agree in every bit.

#include <curand_kernel.h>

#include <functional>
#include <map>
#include <type_traits>
#include <utility>

// What the checks of one layer and pass came to.
struct Line {
    std::string layer, worst_at, first_fault;
    int shapes = 0, faults = 0;
    double worst = 0, allowed = 0, share = 0;  // of the check that came closest to its limit; worst / allowed
};
static std::vector<Line> lines;
static Line& line_of(const std::string& layer) {
    for (Line& line : lines)
        if (line.layer == layer) return line;
    lines.push_back({});
    lines.back().layer = layer;
    return lines.back();
}
static void fault(const std::string& layer, const std::string& what) {
    Line& line = line_of(layer);
    if (!line.faults++) line.first_fault = what;
}
static std::string only;  // layers with another name are left out
static void report_lines() {
    for (const Line& line : lines) {
        if (line.layer.find(only) == std::string::npos) continue;
        report(!line.faults, line.layer, "%d shapes, worst error %.1e of %.0e allowed (%s)%s", line.shapes,
               line.worst, line.allowed, line.worst_at.c_str(),
               line.faults ? text("; %d faults, the first: %s", line.faults, line.first_fault.c_str()).c_str()
                           : "");
    }
    lines.clear();
}

// ---- tensors and checks -----------------------------------------------------------------------------------

static const double LIMIT = sizeof(floatX) == 2 ? 4e-3 : 1e-5, FLOAT_LIMIT = 1e-5, ROUNDINGS = 1e-6,
                    EXACT = 0;
// Sums over up to a million pixels, whose order differs between the two.
static const double WEIGHT_LIMIT = sizeof(floatX) == 2 ? 2e-5 : 1e-5;
// Twice PyTorch's own error in bf16: 2.6e-3 is the median of 200 draws, 3.9e-3 the most (T = 64, two heads of
// 64 channels, an H200). Probabilities are rounded too, and their sums are small beside them.
static const double ATTENTION_LIMIT = sizeof(floatX) == 2 ? 5.2e-3 : 1e-5;
// dq and dk come from probabilities and their gradients rounded to bf16: measured rounding, not a margin.
static const double ATTENTION_BACKWARD_LIMIT = sizeof(floatX) == 2 ? 8e-3 : 1e-5;

static float rounded(float value) { return (float)(floatX)value; }

static float random_normal() {  // nearly: the sum of four uniform numbers, variance 1
    static uint64_t state = 1;
    float sum = -2;
    for (int i = 0; i < 4; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        sum += (float)(state >> 40) * 0x1p-24f;
    }
    return sum * 1.7320508f;
}

// The numbers of an element, to be compared.
template <typename T> static void append(std::vector<double>* numbers, const T& element) {
    numbers->push_back((double)element);
}
enum {
    STEP,
    LR,
    WEIGHT_DECAY,
    BETA1,
    BETA2,
    EPS,
    CORRECTION1,
    CORRECTION2,
    EMA_WEIGHTS,
    CLIP = EMA_WEIGHTS + MAX_EMAS,
    FINITE,
    ACCEPTED,
    LOSS,
    NORM,
    QUARTILE_SUMS,
    QUARTILE_COUNTS = QUARTILE_SUMS + 4,
    SKIPPED = QUARTILE_COUNTS + 4,
    SEEN,
    HISTORY,
    FIELDS = HISTORY + 2 * WINDOW
};
static void append(std::vector<double>* numbers, const float2& sums) {
    numbers->insert(numbers->end(), {(double)sums.x, (double)sums.y});
}
static void append(std::vector<double>* numbers, const SampleSpec& p) {
    numbers->insert(numbers->end(), {(double)p.seed, (double)p.label});
}
static void append(std::vector<double>* numbers, const Timestep& t) {
    numbers->insert(numbers->end(), {t.alpha, t.sigma, t.target_eps, t.target_x0, t.weight,
                                     t.posterior_log_variance_clipped, t.log_variance_range, t.mean_error});
}
static void append(std::vector<double>* numbers, const SamplerStep& s) {
    numbers->insert(numbers->end(), {(double)s.number, (double)s.timestep, s.update.x});
}
static void append(std::vector<double>* numbers, const SamplerState& s) {
    numbers->push_back(s.done);
    append(numbers, s.step);
}
static void append(std::vector<double>* numbers, const StepState& s) {
    const AdamW& a = s.update;
    numbers->insert(numbers->end(), {(double)s.step, a.lr, a.weight_decay, a.beta1, a.beta2, a.eps,
                                     a.correction1, a.correction2});
    numbers->insert(numbers->end(), a.ema_weight, a.ema_weight + MAX_EMAS);
    numbers->insert(numbers->end(), {a.clip, (double)s.finite, (double)s.accepted, s.loss, s.norm});
    numbers->insert(numbers->end(), s.quartile_sums, s.quartile_sums + 4);
    numbers->insert(numbers->end(), s.quartile_counts, s.quartile_counts + 4);
    numbers->insert(numbers->end(), {(double)s.history.skipped, (double)s.history.seen});
    numbers->insert(numbers->end(), s.history.losses, s.history.losses + WINDOW);
    numbers->insert(numbers->end(), s.history.norms, s.history.norms + WINDOW);
}

// A tensor on both sides: T on the device, float here where T is floatX. The device's is no larger than it
// says, so that memcheck sees a step past its end.
struct AnyBuffer {
    virtual ~AnyBuffer() {}
    virtual void upload() = 0;
    virtual void poison() = 0;
    virtual std::vector<char> bits() const = 0;  // of the device's
    virtual std::vector<double> numbers(bool here) const = 0;
};
template <typename T> struct Pair : AnyBuffer {
    typedef std::conditional_t<std::is_same_v<T, floatX>, float, T> Host;
    std::vector<Host> host;
    T* device;

    explicit Pair(std::vector<Host> values) : host(std::move(values)) {
        device = (T*)backend_allocate(std::max(bytes(), (size_t)16));
        upload();
    }
    explicit Pair(size_t n, float scale = 1, float mean = 0) : Pair(normals(n, scale, mean)) {}
    Pair(const Pair&) = delete;
    ~Pair() { backend_free(device); }

    static std::vector<Host> normals(size_t n, float scale, float mean) {
        std::vector<Host> values(n);
        for (Host& value : values) value = (Host)(T)(mean + scale * random_normal());
        return values;
    }
    size_t bytes() const { return host.size() * sizeof(T); }
    // Both sides start from the same numbers.
    void upload() override {
        std::vector<T> values(host.begin(), host.end());
        for (size_t i = 0; i < host.size(); i++) host[i] = (Host)values[i];
        backend_upload(device, values.data(), bytes());
    }
    void poison() override { CUDA_CHECK(cudaMemsetAsync(device, 255, bytes(), main_stream.handle)); }
    std::vector<T> download() const {
        std::vector<T> values(host.size());
        backend_download(values.data(), device, bytes());
        return values;
    }
    std::vector<char> bits() const override {
        std::vector<T> values = download();
        return std::vector<char>((char*)values.data(), (char*)values.data() + bytes());
    }
    std::vector<double> numbers(bool here) const override {
        std::vector<double> all;
        all.reserve(host.size());
        if (here)
            for (const Host& value : host) append(&all, value);
        else
            for (const T& value : download()) append(&all, (Host)value);
        return all;
    }
};
typedef Pair<floatX> Layer;
typedef Pair<float> Floats;

// A launcher's arguments on either side, null where `present` is not, and the layers there.
#define LAYERS_OF(side, launched)                                                                \
    typedef side::Tensor Tensor;                                                                 \
    typedef side::Joined Joined;                                                                 \
    template <int TAPS> using Product = side::Product<TAPS>;                                     \
    static void weight_gradient(side::Conv layer, Tensor dout, Tensor x, side::Rows demb = {}) { \
        launched([=] { side::conv3x3_backward_weight(layer, dout, x, demb); });                  \
    }                                                                                            \
    static void weight_gradient(side::Linear layer, Tensor dout, Joined x) {                     \
        launched([=] { side::conv1x1_backward_weight(layer, dout, x); });                        \
    }                                                                                            \
    static constexpr auto groupnorm_forward = side::groupnorm_forward;                           \
    static constexpr auto groupnorm_backward_sums = side::groupnorm_backward_sums;               \
    static constexpr auto groupnorm_backward = side::groupnorm_backward;                         \
    static constexpr auto attention_forward = side::attention_forward;                           \
    static constexpr auto attention_backward = side::attention_backward;                         \
    static void channel_moments(Tensor x) { side::channel_moments(x); }

// A GEMM is done by the kernel that the program chooses, unless a test names a portable one (0 to 2), or how many
// splits there are.
static int forced_tile = -1, forced_splits = 0;
static std::string forced() {
    return forced_tile < 0 && !forced_splits ? "" : text(" tile %d splits %d", forced_tile, forced_splits);
}
template <int TAPS, bool TRANSPOSED> static void launch_as_forced(const gpu::Gemm& g) {
    gpu::GemmChoice choice = gpu::choose<TAPS, TRANSPOSED>(g);
    const bool forces = forced_tile >= 0 || (forced_splits && choice.kernel < gpu::HOPPER_128);
    if (forces && choice.kernel != gpu::PORTABLE_128x16) {
        const auto kernel = forced_tile < 0 ? choice.kernel : (gpu::GemmKernel)forced_tile;
        const int splits = forced_splits ? forced_splits : gpu::choose_portable<TAPS, TRANSPOSED>(g).splits;
        choice = gpu::portable_choice(g, TAPS, kernel, std::min(splits, g.chunks()));
    }
    gpu::launch_gemm<TAPS, TRANSPOSED>(g, choice);
}

static void at_once(auto launches) { launches(); }

struct OnDevice {
    LAYERS_OF(gpu, on_side_stream_deferred)
    template <int TAPS>
    static void product_forward(Tensor out, Joined x, Product<TAPS> layer, gpu::Forward options = {}) {
        launch_as_forced<TAPS, false>(gpu::forward_gemm(out, x, layer, options));
    }
    template <int TAPS>
    static void input_gradient(Joined dx, Tensor dout, Product<TAPS> layer, gpu::Backward options = {}) {
        launch_as_forced<TAPS, true>(gpu::backward_input_gemm(dx, dout, layer, options));
    }
    static Joined groupnorm_for_product(Tensor normed, const gpu::Norm& norm, int O) {
        if (forced_tile < 0) return gpu::groupnorm_for_product(normed, norm, O);
        gpu::groupnorm_forward(normed, norm);
        return normed;
    }
    static constexpr bool here = false;
    typedef floatX T;
    template <typename Element> Element* operator()(Pair<Element>& b, bool present = true) const {
        return present ? b.device : nullptr;
    }
    template <typename Layer> void run(Layer layer) const { gpu::run(layer); }
};
struct OnHost {
    LAYERS_OF(cpu, at_once)
    static void product_forward(Tensor out, Joined x, cpu::Conv layer, cpu::Forward options = {}) {
        cpu::conv3x3_forward(out, x, layer, options);
    }
    static void product_forward(Tensor out, Joined x, cpu::Linear layer, cpu::Forward options = {}) {
        cpu::conv1x1_forward(out, x, layer, options);
    }
    static void input_gradient(Tensor dx, Tensor dout, cpu::Conv layer, cpu::Backward options = {}) {
        cpu::conv3x3_backward_input(dx, dout, layer, options);
    }
    static void input_gradient(Joined dx, Tensor dout, cpu::Linear layer, cpu::Backward options = {}) {
        cpu::conv1x1_backward_input(dx, dout, layer, options);
    }
    static constexpr auto groupnorm_for_product = cpu::groupnorm_for_product;
    static constexpr bool here = true;
    typedef float T;
    template <typename Element>
    typename Pair<Element>::Host* operator()(Pair<Element>& b, bool present = true) const {
        return present ? b.host.data() : nullptr;
    }
    template <typename Layer> void run(Layer layer) const { cpu::run(layer); }
};

// What a launcher writes: over whatever is there (WRITTEN: NaN before), or by adding or in place (KEPT).
// Compared are runs of `width` numbers, the one numbered `part` of every `parts`.
enum Before { WRITTEN, KEPT };
struct Output {
    AnyBuffer* buffer;
    Before before;
    const char* name;
    double limit;
    int part = 0, parts = 1, width = 1;

    std::vector<double> numbers(bool here) const {
        std::vector<double> all = buffer->numbers(here), some;
        if (parts == 1) return all;
        for (size_t i = 0; i < all.size(); i++)
            if ((int)(i / width % parts) == part) some.push_back(all[i]);
        return some;
    }
};

// call(on) calls the launcher, then the CPU's layer, which leaves its results in `host`.
template <typename Call>
static void check(const std::string& layer, const std::string& shape, const std::vector<Output>& outputs,
                  Call call) {
    std::vector<std::vector<char>> bits[2];
    if (layer.find(only) == std::string::npos) return;
    line_of(layer).shapes++;
    for (auto& of_run : bits) {
        for (const Output& o : outputs) {
            o.buffer->upload();
            if (o.before == WRITTEN) o.buffer->poison();
        }
        for (const Stream* each : {&main_stream, &side_stream})
            CUDA_CHECK(cudaMemsetAsync(each->workspace.base, 255, GPU_WORKSPACE_BYTES, main_stream.handle));
        call(OnDevice());
        wait_for(newest_event);
        for (const Output& o : outputs) of_run.push_back(o.buffer->bits());
    }
    call(OnHost());
    for (size_t i = 0; i < outputs.size(); i++) {
        const Output& o = outputs[i];
        if (bits[0][i] != bits[1][i]) fault(layer, shape + " " + o.name + ": two runs differ");
        double error = error_of(o.numbers(false), o.numbers(true));
        if (!(error <= o.limit))
            fault(layer, text("%s %s: error %.2e of %.0e", shape.c_str(), o.name, error, o.limit));
        Line& line = line_of(layer);
        double share = error == 0 ? 0 : std::isnan(error) || o.limit == 0 ? INFINITY : error / o.limit;
        if (line.worst_at.empty() || share > line.share)
            line.worst = error, line.allowed = o.limit, line.share = share,
            line.worst_at = shape + " " + o.name;
    }
}
// With a function for each side: call(function, on).
template <typename Gpu, typename Cpu, typename Call>
static void check(const std::string& layer, const std::string& shape, const std::vector<Output>& outputs,
                  Gpu gpu, Cpu cpu, Call call) {
    check(layer, shape, outputs, [&](auto on) {
        if constexpr (on.here) call(cpu, on);
        else call(gpu, on);
    });
}

// ---- matrix products --------------------------------------------------------------------------------------

// The parameters of a product, (O, TAPS, C) and (O), and their gradients.
template <int TAPS> struct Weights {
    Layer w, bias;
    Floats dw, dbias;
    Weights(int O, int C)
        : w((size_t)O * TAPS * C, 1 / sqrtf((float)TAPS * C)), bias(O), dw(w.host.size()), dbias(O) {}
    std::vector<Output> gradients(double limit) {
        return {{&dw, WRITTEN, "dw", limit}, {&dbias, WRITTEN, "dbias", limit}};
    }
    template <typename On> auto operator()(On on) {
        return typename On::template Product<TAPS>{on(w), on(bias), on(dw), on(dbias)};
    }
};

struct ConvTest {
    int B, H, W, C, O;
    bool emb = false, residual = false, in_place = false, dx = true, demb = false;
};
static void test_conv(const ConvTest& s) {
    int B = s.B, H = s.H, W = s.W, C = s.C, O = s.O;
    std::string shape = text("B%d H%d W%d C%d O%d", B, H, W, C, O) + forced();
    size_t M = (size_t)B * H * W;
    int pitch = O + 24;  // what lies behind an image's channels stays as it is
    Layer x(M * C), e((size_t)B * pitch), r(M * O), out(M * O);
    Weights<9> weights(O, C);
    check("conv3x3 forward", shape, {{&out, s.in_place ? KEPT : WRITTEN, "out", LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::Tensor Tensor;
        Tensor to = {on(out), B, H, W, O}, added = s.in_place ? to : Tensor{on(r, s.residual), B, H, W, O};
        on.product_forward(to, Tensor{on(x), B, H, W, C}, weights(on),
                           {.emb = {on(e, s.emb), pitch}, .residual = added});
    });

    Layer dout(M * O), gx(M * C), ge((size_t)B * pitch);
    std::vector<Output> outputs = weights.gradients(WEIGHT_LIMIT);
    if (s.dx) outputs.push_back({&gx, WRITTEN, "dx", LIMIT});
    if (s.demb) outputs.push_back({&ge, KEPT, "demb", LIMIT});
    check("conv3x3 backward", shape, outputs, [&](auto on) {
        typedef typename decltype(on)::Tensor Tensor;
        Tensor from = {on(dout), B, H, W, O};
        on.weight_gradient(weights(on), from, Tensor{on(x), B, H, W, C}, {on(ge, s.demb), pitch});
        if (s.dx) on.input_gradient(Tensor{on(gx), B, H, W, C}, from, weights(on));
        if constexpr (on.here)
            if (M >= 300000)  // for which sums in fp32 are no measure
                cpu::plain::conv3x3_backward_weight(weights(on), from, Tensor{on(x), B, H, W, C},
                                                    {on(ge, s.demb), pitch});
    });
}

struct LinearTest {
    int M, C, C2 = 0, O = 0;
    bool residual = false, dx = true, accumulate = false;
};
static void test_linear(const LinearTest& s) {
    std::string shape = text("M%d C%d+%d O%d", s.M, s.C, s.C2, s.O) + forced();
    size_t M = s.M;
    Layer x(M * s.C), x2(M * s.C2), r(M * s.O), out(M * s.O);
    Weights<1> weights(s.O, s.C + s.C2);
    auto joined = [&](auto on, Layer& a, Layer& b) {
        typedef typename decltype(on)::Tensor Tensor;
        return typename decltype(on)::Joined(Tensor{on(a), s.M, 1, 1, s.C},
                                             Tensor{on(b, s.C2), s.M, 1, 1, s.C2});
    };
    check("linear forward", shape, {{&out, WRITTEN, "out", LIMIT}}, [&](auto on) {
        on.product_forward({on(out), s.M, 1, 1, s.O}, joined(on, x, x2), weights(on),
                           {.residual = {on(r, s.residual), s.M, 1, 1, s.O}});
    });

    Layer dout(M * s.O), gx(M * s.C), gx2(M * s.C2);
    std::vector<Output> outputs = weights.gradients(WEIGHT_LIMIT);
    if (s.dx) outputs.push_back({&gx, s.accumulate ? KEPT : WRITTEN, "dx", LIMIT});
    if (s.dx && s.C2) outputs.push_back({&gx2, s.accumulate ? KEPT : WRITTEN, "dx2", LIMIT});
    check("linear backward", shape, outputs, [&](auto on) {
        typename decltype(on)::Tensor from = {on(dout), s.M, 1, 1, s.O};
        on.weight_gradient(weights(on), from, joined(on, x, x2));
        if (s.dx) on.input_gradient(joined(on, gx, gx2), from, weights(on), {.accumulate = s.accumulate});
    });
}

// ---- group norm, attention, resampling --------------------------------------------------------------------

typedef Pair<float2> Sums;
static Sums sums_of(int B, int T, int C) { return Sums(std::vector<float2>((size_t)B * norm_parts(T) * C)); }
static Sums record_of(int B, int C) { return sums_of(B, 1, C); }

// A group norm of (B, H, W, C) and (B, H, W, C2), with all that belongs to it.
struct NormTensors {
    int B, H, W, C, C2, G;
    bool silu;
    Layer x, x2;
    Floats w, bias, dw, dbias;
    Sums statistics, affine, moments, moments2, sums;
    bool modulated;
    Layer modulation, dmodulation;  // rows longer than what is read of them
    NormTensors(int B, int H, int W, int C, int C2, int G, bool silu, float middle = 0,
                bool modulated = false)
        : B(B),
          H(H),
          W(W),
          C(C),
          C2(C2),
          G(G),
          silu(silu),
          x((size_t)B * H * W * C, 1, middle),
          x2((size_t)B * H * W * C2, 1, middle),
          w(C + C2, 0.5f, 1),
          bias(C + C2, 0.5f),
          dw(C + C2),
          dbias(C + C2),
          statistics(record_of(B, C + C2)),
          affine(record_of(B, C + C2)),
          moments(sums_of(B, H * W, C)),
          moments2(sums_of(B, H * W, C2)),
          sums(sums_of(B, H * W, C + C2)),
          modulated(modulated),
          modulation((size_t)B * pitch(), 0.5f),
          dmodulation((size_t)B * pitch()) {}
    int pitch() const { return 2 * (C + C2) + 8; }
    template <typename On> auto joined(On on, Layer& first, Layer& second) {
        typedef typename On::Tensor Tensor;
        return typename On::Joined(Tensor{on(first), B, H, W, C}, Tensor{on(second, C2), B, H, W, C2});
    }
    template <typename On> auto operator()(On on) {
        auto joined_x = joined(on, x, x2);
        joined_x.first.moments = on(moments), joined_x.second.moments = on(moments2, C2);
        typedef std::remove_pointer_t<decltype(on(x))> Real;
        return NormOf<Real>{joined_x,
                            G,
                            silu,
                            on(w),
                            on(bias),
                            on(dw),
                            on(dbias),
                            on(statistics),
                            on(affine),
                            on(sums),
                            {on(modulation, modulated), pitch()},
                            {on(dmodulation, modulated), pitch()}};
    }
    // What forward leaves of each image's channels.
    std::vector<Output> record(double limit) {
        return {{&statistics, WRITTEN, "mean", limit, 0, 2},
                {&statistics, WRITTEN, "rstd", limit, 1, 2},
                {&affine, WRITTEN, "scale", limit, 0, 2},
                {&affine, WRITTEN, "shift", limit, 1, 2}};
    }
    void upload_record() { statistics.upload(), affine.upload(); }
    template <typename On> void measure(On on) {
        auto x = (*this)(on).x;
        if (!on.here) moments.poison(), moments2.poison();
        on.channel_moments(x.first);
        if (C2) on.channel_moments(x.second);
    }
};

struct NormTest {
    int B, T, C, C2 = 0, G = 32;
    bool silu = true, accumulate = false, residual = false;
    float mean = 0.3f;
    bool modulated = false;
};
static void test_norm(const NormTest& s) {
    std::string shape =
        text("B%d T%d C%d+%d G%d%s%s%s%s", s.B, s.T, s.C, s.C2, s.G, s.silu ? " SiLU" : "",
             s.accumulate ? " adding" : "", s.residual ? " residual" : "", s.modulated ? " modulated" : "");
    int K = s.C + s.C2;
    size_t N = (size_t)s.B * s.T;
    NormTensors norm(s.B, 1, s.T, s.C, s.C2, s.G, s.silu, s.mean, s.modulated);
    Layer out(N * K);
    std::vector<Output> written = norm.record(FLOAT_LIMIT);
    written.push_back({&out, WRITTEN, "out", LIMIT});
    check("groupnorm forward", shape, written, [&](auto on) {
        norm.measure(on);
        on.groupnorm_forward({on(out), s.B, 1, s.T, K}, norm(on));
    });
    norm.upload_record();  // from here on both sides start from the CPU's

    bool in_place = !s.accumulate && !s.C2 && !s.residual;  // dx is then the memory of dy
    Layer dy(N * K), dresidual(N * s.C), dx(N * s.C), dx2(N * s.C2);
    Before before = s.accumulate || in_place ? KEPT : WRITTEN;
    for (bool over_dy : {false, true}) {  // where normed is written
        if (over_dy && in_place) continue;
        // dy is rounded on the way to dx: up to half as much again
        std::vector<Output> outputs = {{&norm.dw, WRITTEN, "dw", FLOAT_LIMIT},
                                       {&norm.dbias, WRITTEN, "dbias", FLOAT_LIMIT},
                                       {in_place ? &dy : &dx, before, "dx", 1.5 * LIMIT},
                                       {over_dy ? &dy : &out, over_dy ? KEPT : WRITTEN, "normed", LIMIT}};
        if (s.C2) outputs.push_back({&dx2, before, "dx2", 1.5 * LIMIT});
        if (s.modulated) outputs.push_back({&norm.dmodulation, KEPT, "dmodulation", LIMIT});
        check("groupnorm backward", shape + (over_dy ? " normed over dy" : ""), outputs, [&](auto on) {
            typedef typename decltype(on)::Tensor Tensor;
            Tensor gradient = {on(dy), s.B, 1, s.T, K};  // first the norm's output's, then before the SiLU
            if (!on.here) dy.upload(), norm.sums.poison();
            on.groupnorm_backward_sums(gradient, gradient, norm(on));
            if (s.modulated) on.run(ModulationBackward<typename decltype(on)::T>{norm(on)});
            on.groupnorm_backward(
                norm.joined(on, in_place ? dy : dx, dx2), {on(over_dy ? dy : out), s.B, 1, s.T, K}, gradient,
                norm(on),
                {.residual = {on(dresidual, s.residual), s.B, 1, s.T, s.C}, .accumulate = s.accumulate});
        });
    }
}

// A norm between two products, 3x3 or 1x1: the first leaves its output's moments behind, the input gradient
// of the second makes the first half of the norm's gradient. The norm's input is split into C and C2 channels on
// the way back.
struct NormedProductTest {
    int B, H, W, C, C2 = 0, O = 64, G = 32;
    bool silu = true, modulated = false;
    bool on_the_way = false;  // on Hopper the second product must norm what it reads itself
};
template <int TAPS> static void test_normed_product(const NormedProductTest& s) {
    std::string shape = text("B%d H%d W%d C%d+%d O%d G%d%s%s", s.B, s.H, s.W, s.C, s.C2, s.O, s.G,
                             s.silu ? " SiLU" : "", s.modulated ? " modulated" : "") +
                        forced();
    int B = s.B, H = s.H, W = s.W, T = H * W, K = s.C + s.C2, O = s.O;
    size_t M = (size_t)B * T;
    NormTensors norm(B, H, W, K, 0, s.G, s.silu, 0, s.modulated);
    Layer x(M * O), out(M * K);
    Weights<TAPS> weights(K, O);
    const char* layer = TAPS == 9 ? "conv3x3 then norm" : "linear then norm";
    // A portable tile, unsplit, that holds whole parts of images must leave a norm's sums behind, and no other.
    const bool whole = T == 64
                           ? TAPS == 1 || H == 8
                           : forced_tile < 2 && T % 128 == 0 && (TAPS == 1 || (H % 8 == 0 && W % 16 == 0));
    auto check_sums = [&](int before) {
        if (forced_tile >= 0 && forced_splits == 1 && (sum_passes > before) == whole)
            fault(layer, shape + (whole ? ": left no sums behind" : ": left sums behind"));
    };
    check(layer, shape, {{&norm.x, WRITTEN, "product", LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::Tensor Tensor;
        Tensor from = {on(x), B, H, W, O};
        const int before = sum_passes;
        if (!on.here) norm.moments.poison();
        on.product_forward(norm(on).x.first, from, weights(on));
        if (!on.here) check_sums(before);
    });
    std::vector<floatX> product = norm.x.download();  // both norms read the launcher's
    norm.x.host.assign(product.begin(), product.end());
    cpu::channel_moments(norm(OnHost()).x.first);
    std::vector<Output> written = norm.record(LIMIT);
    written.push_back({&out, WRITTEN, "out", 1.5 * LIMIT});
    check(layer, shape, written, [&](auto on) { on.groupnorm_forward({on(out), B, H, W, K}, norm(on)); });

    NormTensors split(B, H, W, s.C, s.C2, s.G, s.silu, 0, s.modulated);
    Weights<TAPS> second(O, K);
    if (TAPS == 9) {
        Layer normed(M * K), next(M * O);
        std::vector<Output> outputs = split.record(LIMIT);
        outputs.push_back({&next, WRITTEN, "product", LIMIT});
        check("norm then conv3x3", shape, outputs, [&](auto on) {
            split.measure(on);
            auto from = on.groupnorm_for_product({on(normed), B, H, W, K}, split(on), O);
            if (on.here)
                for (float& value : normed.host) value = rounded(value);
#ifdef HOPPER
            else if (s.on_the_way && !from.affine)
                report(false, "norm then conv3x3", "%s: not normed on the way", shape.c_str());
#endif
            on.product_forward({on(next), B, H, W, O}, from, second(on));
        });
    }
    Layer dout(M * O), dnormed(M * K), dx(M * s.C), dx2(M * s.C2);
    // The first half of the norm's gradient is a kernel of its own, which reads rounded numbers.
    bool apart = false;
    split.measure(OnHost());
    cpu::groupnorm_forward({out.host.data(), B, H, W, K}, split(OnHost()));
    split.upload_record();
    std::vector<Output> outputs = {{&dx, WRITTEN, "dx", 2 * LIMIT},
                                   {&out, WRITTEN, "normed", LIMIT},
                                   {&split.dw, WRITTEN, "dw", LIMIT},
                                   {&split.dbias, WRITTEN, "dbias", LIMIT}};
    if (s.C2) outputs.push_back({&dx2, WRITTEN, "dx2", 2 * LIMIT});
    check(TAPS == 9 ? "conv3x3 backward to a norm" : "linear backward to a norm", shape, outputs,
          [&](auto on) {
              typedef typename decltype(on)::Tensor Tensor;
              Tensor dy = {on(dnormed), B, H, W, K};
              auto of = split(on);
              const int before = sum_passes;
              if (!on.here) split.sums.poison();
              on.input_gradient(dy, {on(dout), B, H, W, O}, second(on),
                                {.norm = on.here && apart ? decltype(of)() : of});
              if (!on.here) apart = sum_passes > before, check_sums(before);
              if (on.here && apart) {
                  for (float& value : dnormed.host) value = rounded(value);
                  on.groupnorm_backward_sums(dy, dy, of);
              }
              on.groupnorm_backward(split.joined(on, dx, dx2), {on(out), B, H, W, K}, dy, of, {});
          });
}
static void test_normed_product(const NormedProductTest& s, int taps) {
    taps == 9 ? test_normed_product<9>(s) : test_normed_product<1>(s);
}

static void test_attention(int B, int T, int heads, int d) {
    std::string shape = text("B%d T%d heads %d of %d", B, T, heads, d);
    int C = heads * d;
    size_t N = (size_t)B * T * C;
    Layer qkv(3 * N), out(N), dout(N), dqkv(3 * N);
    Floats lse((size_t)B * heads * T);
    check("attention forward", shape,
          {{&out, WRITTEN, "out", ATTENTION_LIMIT}, {&lse, WRITTEN, "lse", FLOAT_LIMIT}}, [&](auto on) {
              on.attention_forward({on(out), B, 1, T, C}, on(lse), {on(qkv), B, 1, T, 3 * C}, heads);
          });
    for (float& value : out.host) value = rounded(value);
    out.upload(), lse.upload();

    const double limit = ATTENTION_BACKWARD_LIMIT;  // of each part: they differ in size
    std::vector<Output> outputs = {{&dqkv, WRITTEN, "dv", limit, 2, 3, C}};
    if (T > 1)  // of one pixel, dq and dk are zero: nothing to compare with
        outputs.insert(outputs.end(),
                       {{&dqkv, WRITTEN, "dq", limit, 0, 3, C}, {&dqkv, WRITTEN, "dk", limit, 1, 3, C}});
    check("attention backward", shape, outputs, [&](auto on) {
        on.attention_backward({on(dqkv), B, 1, T, 3 * C}, {on(dout), B, 1, T, C}, {on(out), B, 1, T, C},
                              on(lse), {on(qkv), B, 1, T, 3 * C}, heads);
    });
}

// What head_channels goes by; an RTX 30 or 40 lets a block have 99 KB.
static_assert(sizeof(gpu::AttentionTile<MAX_HEAD>::Backward) <= (sizeof(floatX) == 4 ? 131 : 99) << 10 &&
                  sizeof(gpu::AttentionTile<MAX_HEAD>::Forward) <= 99 << 10,
              "heads of 256 channels");
static_assert(sizeof(gpu::AttentionTile<MAX_HEAD / 2>::Backward) <= 99 << 10 &&
                  sizeof(gpu::AttentionTile<MAX_HEAD / 2>::Forward) <= 99 << 10,
              "heads of 128 channels");

// T pixels of one image and head, as many as the CPU can't do in full: every `stride`-th query, and every
// such key's gradients, in double. The rest of the device's tensors enters only by what was checked for rows
// of the same kernel: out and lse.
static void test_long_attention(int T, int d, int stride) {
    std::string shape = text("B1 T%d heads 1 of %d, every %d-th row", T, d, stride);
    size_t N = (size_t)T * d;
    Layer qkv(3 * N), out(N), dout(N), dqkv(3 * N);
    Floats lse(T);
    attention_forward({out.device, 1, 1, T, d}, lse.device, {qkv.device, 1, 1, T, 3 * d}, 1);
    attention_backward({dqkv.device, 1, 1, T, 3 * d}, {dout.device, 1, 1, T, d}, {out.device, 1, 1, T, d},
                       lse.device, {qkv.device, 1, 1, T, 3 * d}, 1);
    std::vector<double> o = out.numbers(false), l = lse.numbers(false), g = dqkv.numbers(false), D(T);
    const float *q = qkv.host.data(), *k = q + d, *v = k + d;  // rows of 3 d
    double scale = 1 / sqrt((double)d);
    auto dot = [&](const float* a, const float* b) {
        double sum = 0;
        for (int c = 0; c < d; c++) sum += (double)a[c] * b[c];
        return sum;
    };
    for (int t = 0; t < T; t++)
        for (int c = 0; c < d; c++) D[t] += dout.host[(size_t)t * d + c] * o[(size_t)t * d + c];
    int rows = (T + stride - 1) / stride;
    std::vector<double> found[4], exact[4], logs, logs_exact;  // out, dq, dk, dv
    for (auto& e : exact) e.resize((size_t)rows * d);
    logs_exact.resize(rows);
#pragma omp parallel for
    for (int r = 0; r < rows; r++) {
        size_t i = (size_t)r * stride;
        double top = -INFINITY, total = 0, own = 0;
        for (int j = 0; j < T; j++) top = std::max(top, scale * dot(q + i * 3 * d, k + (size_t)j * 3 * d));
        for (int pass = 0; pass < 2; pass++)  // out and lse first, then dq from them
            for (size_t j = 0; j < (size_t)T; j++) {
                double p = exp(scale * dot(q + i * 3 * d, k + j * 3 * d) - top);
                if (pass == 0) {
                    total += p;
                    for (int c = 0; c < d; c++) exact[0][r * d + c] += p * v[j * 3 * d + c];
                    if (j + 1 < (size_t)T) continue;
                    for (int c = 0; c < d; c++) exact[0][r * d + c] /= total;
                    for (int c = 0; c < d; c++) own += dout.host[i * d + c] * exact[0][r * d + c];
                    logs_exact[r] = top + log(total);
                } else {
                    double ds = scale * p / total * (dot(&dout.host[i * d], v + j * 3 * d) - own);
                    for (int c = 0; c < d; c++) exact[1][r * d + c] += ds * k[j * 3 * d + c];
                }
            }
        for (size_t j = 0; j < (size_t)T; j++) {  // row i as a key, of queries j
            double p = exp(scale * dot(q + j * 3 * d, k + i * 3 * d) - l[j]);
            double ds = scale * p * (dot(&dout.host[j * d], v + i * 3 * d) - D[j]);
            for (int c = 0; c < d; c++) {
                exact[2][r * d + c] += ds * q[j * 3 * d + c];
                exact[3][r * d + c] += p * dout.host[j * d + c];
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < d; c++) {
            size_t i = (size_t)r * stride;
            found[0].push_back(o[i * d + c]);
            for (int part = 0; part < 3; part++) found[1 + part].push_back(g[(i * 3 + part) * d + c]);
        }
    for (int r = 0; r < rows; r++) logs.push_back(l[(size_t)r * stride]);
    line_of("long attention").shapes++;
    auto compare = [&](const char* name, const std::vector<double>& a, const std::vector<double>& r,
                       double limit) {
        double error = error_of(a, r);
        Line& line = line_of("long attention");
        if (!(error <= limit))
            fault("long attention", text("%s %s: error %.2e of %.0e", shape.c_str(), name, error, limit));
        if (!(error <= line.worst))
            line.worst = error, line.allowed = limit, line.worst_at = shape + " " + name;
    };
    compare("lse", logs, logs_exact, FLOAT_LIMIT);
    const char* const names[] = {"out", "dq", "dk", "dv"};
    for (int n = 0; n < 4; n++) compare(names[n], found[n], exact[n], n ? ATTENTION_BACKWARD_LIMIT : LIMIT);
}

static void test_resample(int B, int H, int W, int C) {  // H, W: the small side
    std::string shape = text("B%d H%d W%d C%d", B, H, W, C);
    size_t n = (size_t)B * H * W * C;
    Layer small(n), big(4 * n), to_small(n), to_big(4 * n);
    for (bool adding : {false, true})
        for (float factor : {1.0f, 0.25f}) {
            bool first_only = adding == (factor == 1);
            Before before = adding ? KEPT : WRITTEN;
            std::string how = shape + (adding ? " adding" : "") + (first_only ? " one of four" : "");
            check("repeat 2x2", how, {{&to_big, before, "out", LIMIT}}, [&](auto on) {
                on.run(Resample<typename decltype(on)::T>{.out = {on(to_big), B, 2 * H, 2 * W, C},
                                                          .x = {on(small), B, H, W, C},
                                                          .factor = factor,
                                                          .accumulate = adding,
                                                          .first_only = first_only});
            });
            check("sum 2x2", how, {{&to_small, before, "out", LIMIT}}, [&](auto on) {
                on.run(Resample<typename decltype(on)::T>{.out = {on(to_small), B, H, W, C},
                                                          .x = {on(big), B, 2 * H, 2 * W, C},
                                                          .factor = factor,
                                                          .accumulate = adding,
                                                          .first_only = first_only});
            });
        }
}

// ---- embedding, loss, noise, samplers ---------------------------------------------------------------------

static std::vector<int> some_timesteps(int B) {
    std::vector<int> t(B);
    for (int b = 0; b < B; b++) t[b] = (b * 379 + 999) % 1000;
    return t;
}

static void test_embedding(int B, int C) {
    std::string shape = text("B%d C%d", B, C);
    Pair<int> t(some_timesteps(B));
    size_t n = (size_t)B * C + 5;
    Layer sinusoids((size_t)B * C), x(n, 3), dout(n), y(n);
    Floats weights(n);
    check("timestep embedding", shape, {{&sinusoids, WRITTEN, "out", LIMIT}}, [&](auto on) {
        on.run(TimestepEmbedding<typename decltype(on)::T>{
            .out = {on(sinusoids), B, 1, 1, C}, .timesteps = on(t), .max_period = 10000});
    });
    check("SiLU forward", shape, {{&y, WRITTEN, "out", LIMIT}}, [&](auto on) {
        typename decltype(on)::Tensor out = {on(y), 1, 1, 1, (int)n}, from = {on(x), 1, 1, 1, (int)n};
        on.run(SiluForward<typename decltype(on)::T>{.out = out, .x = from});
    });
    check("SiLU backward", shape, {{&dout, KEPT, "dx", LIMIT}}, [&](auto on) {
        typename decltype(on)::Tensor dx = {on(dout), 1, 1, 1, (int)n}, from = {on(x), 1, 1, 1, (int)n};
        on.run(SiluBackward<typename decltype(on)::T>{.dx = dx, .dout = dx, .x = from});
    });
    std::vector<SampleSpec> pictures = specs_of(consecutive(0, ceil_div(B, 2)));
    for (size_t i = 0; i < pictures.size(); i++) pictures[i].label = (int)(i * i % 7);
    Pair<SampleSpec> begins(pictures);
    std::vector<int> some_labels = some_timesteps(B);
    for (int& label : some_labels) label %= 8;
    Pair<int> labels(some_labels);
    Pair<SamplerStep> sampler(std::vector<SamplerStep>{{.timestep = 5}, {.number = 2, .timestep = 731}});
    Pair<SamplerState> state(std::vector<SamplerState>{{.done = 1, .step = {}}});
    check("set the model's inputs", shape,
          {{&t, WRITTEN, "timesteps", EXACT},
           {&labels, WRITTEN, "labels", EXACT},
           {&state, KEPT, "state", EXACT}},
          [&](auto on) {
              on.run(SetModelInputs{on(state), on(t), on(labels), on(sampler), on(begins), B,
                                 (int)pictures.size(), 7});
          });
    Layer table((size_t)8 * C), rows((size_t)B * C);
    Floats dtable((size_t)8 * C);
    check("label embedding", shape, {{&rows, WRITTEN, "out", EXACT}}, [&](auto on) {
        typename decltype(on)::Tensor out = {on(rows), B, 1, 1, C};
        on.run(LabelForward<typename decltype(on)::T>{out, on(table), on(labels)});
    });
    check("label embedding backward", shape, {{&dtable, WRITTEN, "dtable", FLOAT_LIMIT}}, [&](auto on) {
        typename decltype(on)::Tensor from = {on(rows), B, 1, 1, C};
        typename decltype(on)::template Product<1> of = {.dw = on(dtable)};
        on.run(LabelBackward<typename decltype(on)::T>{of, from, on(labels), 8});
    });
    auto round_there = [](floatX* to, const float* from, size_t n) {
        run(RoundWeights<floatX>{.to = to, .from = from, .n = n});
    };
    auto round_here = [](float* to, const float* from, size_t n) {
        std::transform(from, from + n, to, rounded);
    };
    check("round weights", shape, {{&y, WRITTEN, "working copy", EXACT}}, round_there, round_here,
          [&](auto f, auto on) { f(on(y), on(weights), n); });
}

static void test_diffusion(int B, int H, int W, int predict, bool with_state) {
    const char* const predictions[] = {"eps", "v", "x0"};
    std::string shape = text("B%d H%d W%d %s", B, H, W, predictions[predict]);
    size_t n = (size_t)B * H * W * PIXEL;
    int channels = 1 + predict % 4;
    Floats images((size_t)B * channels * H * W, 0.5f), target(n), x(n), losses((size_t)B * loss_parts(H * W));
    std::vector<Timestep> timesteps;
    // the two parts of the target that `predict` names
    auto eps_part = [&](float alpha) { return predict == PREDICT_EPS ? 1 : predict == PREDICT_V ? alpha : 0; };
    auto x0_part = [&](float sigma) { return predict == PREDICT_EPS ? 0 : predict == PREDICT_V ? -sigma : 1; };
    for (int i = 0; i < 1000; i++)
        timesteps.push_back(
            {0.3f + 0.001f * i, 0.9f - 0.0007f * i, eps_part(0.3f + 0.001f * i), x0_part(0.9f - 0.0007f * i),
             0.5f + 0.001f * i, -3 - 0.005f * i, 0.3f, 0.1f});
    Pair<Timestep> chain(timesteps);
    Layer x_t(n), input(2 * n), out(2 * n), dout(n);
    Pair<int> t(some_timesteps(B));
    StepState some_step = StepState();
    some_step.step = 123456;
    Pair<StepState> state(std::vector<StepState>(1, some_step));
    check("add noise", shape, {{&x_t, KEPT, "x_t", LIMIT}, {&target, KEPT, "target", FLOAT_LIMIT}},
          [&](auto on) {
              on.run(AddNoise<typename decltype(on)::T>{.x_t = {on(x_t), B, H, W, PIXEL},
                                                        .target = on(target),
                                                        .images = on(images),
                                                        .schedule = on(chain),
                                                        .timesteps = on(t),
                                                        .step = with_state ? &on(state)->step : nullptr,
                                                        .first = 5,
                                                        .channels = channels,
                                                        .offset_noise = 0.3f,
                                                        .seed = 77});
          });
    target.upload();

    Output input_output = {&input, KEPT, "input", LIMIT};
    std::vector<SampleSpec> noises = specs_of(consecutive(41, B));
    noises.back() = {4000000000u, 0};
    Pair<SampleSpec> begins(noises);
    Floats saved(n);
    Pair<SamplerState> sampler(std::vector<SamplerState>(1));
    bool clamps = true;
    float guidance = 2.5f;
    auto drawing = [&](auto on) {
        return SampleBatch<typename decltype(on)::T>{.input = {on(input), B, H, W, PIXEL},
                                                 .out = on(out),
                                                 .channels = channels,
                                                 .clamps = clamps,
                                                 .guidance = guidance,
                                                 .x = on(x),
                                                 .saved = on(saved),
                                                 .specs = on(begins),
                                                 .state = on(sampler)};
    };
    auto check_update = [&](const char* name) {
        check(name, shape,
              {{&x, KEPT, "x", FLOAT_LIMIT},
               {&saved, KEPT, "saved", FLOAT_LIMIT},
               {&sampler, KEPT, "state", EXACT},
               input_output},
              [&](auto on) { on.run(UpdateSamples<typename decltype(on)::T>{drawing(on)}); });
    };
    sampler.host[0] = {.done = 0, .step = {.update = {.noise = 1}}};
    sampler.upload();
    check_update("start pictures");
    for (float sigma : {0.21f, 0.0f})
        for (bool within : {true, false}) {
            SamplerStep s = {9, 500, 1.1f, -0.4f, {0.3f, 0.65f, -0.2f, sigma, 0.7f, 0.4f}};
            clamps = within;
            guidance = within ? 2.5f : 1;
            s.max_log_sigma_ratio = within && channels <= PIXEL / 2 ? 0.7f : 0;
            sampler.host[0] = {.done = 6, .step = s};
            x.upload(), sampler.upload();
            check_update("update pictures");
        }
    for (bool training : {true, false}) {
        std::vector<Output> outputs = {{&losses, WRITTEN, "losses", FLOAT_LIMIT}};
        if (training) outputs.push_back({&dout, WRITTEN, "dout", LIMIT});
        check("mean squared error", shape, outputs, [&](auto on) {
            BatchLoss batch = {on(losses), on(t), on(chain), B, H * W, channels, 1000};
            on.run(PredictionLoss<typename decltype(on)::T>{batch, 0, B, on(out), on(target),
                                                            on(dout, training)});
        });
    }
    Floats bounds(losses.host.size());
    std::vector<int> early = some_timesteps(B);
    for (int b = 0; b < B; b += 2) early[b] = 0;  // where the loss is another
    Pair<int> mixed(early);
    for (size_t i = 0; i < images.host.size(); i += 7) images.host[i] = i % 2 ? 1 : -1;
    images.upload();
    check("variance loss", shape,
          {{&losses, WRITTEN, "losses", FLOAT_LIMIT},
           {&bounds, WRITTEN, "bounds", 10 * FLOAT_LIMIT},
           {&dout, WRITTEN, "dout", LIMIT}},
          [&](auto on) {
              BatchLoss batch = {on(losses), on(mixed), on(chain), B, H * W, channels, 1000, on(bounds)};
              on.run(PredictionLoss<typename decltype(on)::T>{batch, 0, B, on(out), on(target), on(dout),
                                                              on(images)});
          });
    check("dropout", shape, {{&dout, KEPT, "x", LIMIT}}, [&](auto on) {
        on.run(
            Dropout<typename decltype(on)::T>{{on(dout), B, H, W, PIXEL}, 0.3f, 99, 77, 5, &on(state)->step});
    });
}

__global__ void philox_kernel(uint32_t* ours, uint32_t* curand, float* normals, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Philox p = philox(12345 + i % 7, STREAM_NOISE, i, i / 3, 1000 - i % 1000);
    uint4 c = curand_Philox4x32_10(make_uint4(i, i / 3, 1000 - i % 1000, 0),
                                   make_uint2(12345 + i % 7, STREAM_NOISE));
    const uint32_t word[4] = {c.x, c.y, c.z, c.w};
    for (int k = 0; k < 4; k++) ours[4 * i + k] = p.word[k], curand[4 * i + k] = word[k];
    random_normals(normals + 4 * i, 12345 + i % 7, STREAM_NOISE, i, i / 3, 1000 - i % 1000);
}
static void test_philox(int n) {
    Pair<uint32_t> ours(std::vector<uint32_t>(4 * n)), curand(std::vector<uint32_t>(4 * n));
    Floats normals(4 * n);
    auto gpu = [=](uint32_t* ours, uint32_t* curand, float* normals) {
        philox_kernel<<<ceil_div(n, 128), 128, 0, main_stream.handle>>>(ours, curand, normals, n);
        LAUNCH_CHECK();
    };
    auto cpu = [=](uint32_t* ours, uint32_t* curand, float* normals) {
        for (int i = 0; i < n; i++) {
            Philox p = philox(12345 + i % 7, STREAM_NOISE, i, i / 3, 1000 - i % 1000);
            for (int k = 0; k < 4; k++) ours[4 * i + k] = curand[4 * i + k] = p.word[k];
            random_normals(normals + 4 * i, 12345 + i % 7, STREAM_NOISE, i, i / 3, 1000 - i % 1000);
        }
    };
    check("Philox", text("%d quads", n),
          {{&ours, WRITTEN, "words", EXACT},
           {&curand, WRITTEN, "cuRAND's words", EXACT},
           {&normals, WRITTEN, "normals", ROUNDINGS}},
          gpu, cpu, [&](auto f, auto on) { f(on(ours), on(curand), on(normals)); });
}

// ---- a step's beginning and end, optimiser ----------------------------------------------------------------

static void test_step(int count, int batch, int size, int64_t step, int lr_schedule, bool bytes) {
    std::string shape = text("%d images of %d, batch %d, step %lld", count, size, batch, (long long)step);
    int slots = 2 * (batch / count + 2), channels = 1 + size % 4, elements = channels * size * size;
    std::vector<int> shuffled((size_t)slots * count);
    for (size_t i = 0; i < shuffled.size(); i++) shuffled[i] = (int)(i * 7 % count);
    std::vector<uint8_t> values((size_t)count * elements);
    for (size_t i = 0; i < values.size(); i++) values[i] = (uint8_t)((uint32_t)i * 2654435761u >> 24);
    Pair<int> order(shuffled), timesteps(some_timesteps(batch)), sources(some_timesteps(batch)),
        labels(some_timesteps(count)), told(some_timesteps(batch));
    Pair<uint8_t> byte_pixels(values);
    Floats pixels(values.size(), 0.5f), images((size_t)batch * elements);
    StepState before = StepState();
    before.step = step, before.history.skipped = 2;
    Pair<StepState> state(std::vector<StepState>(1, before));
    auto source = [&](auto on) {
        return BatchSource{on(byte_pixels, bytes),
                           on(pixels, !bytes),
                           on(order),
                           count,
                           slots,
                           batch,
                           size,
                           channels,
                           1,
                           1000,
                           99,
                           on(labels),
                           1000,
                           0.3f};
    };
    Config config = default_config();
    config.optimiser.lr_schedule = lr_schedule, config.optimiser.warmup_steps = 100,
    config.optimiser.lr_steps = 5000;
    config.optimiser.weight_decay = 0.01f, config.optimiser.final_lr_fraction = 0.1f,
    config.optimiser.ema_rate[1] = 0.9999f;
    std::vector<Output> outputs = {{&timesteps, WRITTEN, "timesteps", EXACT},
                                   {&sources, WRITTEN, "sources", EXACT},
                                   {&told, WRITTEN, "labels", EXACT}};
    static const char* const NAMES[] = {
        "step", "lr",          "weight decay", "beta1",      "beta2",
        "eps",  "correction1", "correction2",  "EMA weight", "2nd EMA weight"};
    for (int field = STEP; field <= EMA_WEIGHTS + 1; field++)  // each on its own: they differ in size
        outputs.push_back({&state, KEPT, NAMES[field], field == STEP ? EXACT : ROUNDINGS, field, FIELDS});
    check("begin step", shape, outputs, [&](auto on) {
        on.run(BeginStep{.state = on(state),
                         .timesteps = on(timesteps),
                         .sources = on(sources),
                         .labels = on(told),
                         .source = source(on),
                         .hyper = config.optimiser});
    });
    sources.upload();
    check("load images", shape + (bytes ? " bytes" : " floats"), {{&images, WRITTEN, "images", EXACT}},
          [&](auto on) {
              on.run(
                  LoadImages{.images = on(images), .sources = on(sources), .source = source(on), .B = batch});
          });
}

// `broken`: a loss (1) or a gradient norm (2) that is not finite, the step must not count; a loss (3) or a
// norm (4) that is an outlier, it counts as skipped; one (5) that would be, but for too short a history.
static void test_finish(int batch, int elements, size_t parameters, int broken) {
    static const char* const WHAT[] = {"",
                                       ", loss NaN",
                                       ", gradient infinite",
                                       ", loss an outlier",
                                       ", gradient an outlier",
                                       ", the history short"};
    std::string shape =
        text("%d of %d elements, %zu parameters%s", batch, elements, parameters, WHAT[broken]);
    Pair<int> t(some_timesteps(batch));
    std::vector<Timestep> timesteps(1000);
    for (int i = 0; i < 1000; i++) timesteps[i].weight = 0.8f + 0.0004f * i;
    Pair<Timestep> chain(timesteps);
    Floats losses((size_t)batch * loss_parts(elements / PIXEL), 500, 4000),
        norms((parameters + NORM_CHUNK - 1) / NORM_CHUNK, 1, 8);
    if (broken == 1) losses.host.back() = NAN;
    if (broken == 2) norms.host[0] = INFINITY;
    losses.upload(), norms.upload();
    StepState before = StepState();
    before.step = 1234567, before.update = {0.25f, 0.01f, 0.9f, 0.99f, 1e-8f, 0.5f, 0.6f, {0.7f}, 1.0f};
    before.history.seen = broken == 5 ? WINDOW_LEAST - 1 : 1000;
    double loss = 0, norm = 0;
    for (size_t i = 0; i < losses.host.size(); i++)
        loss += (double)timesteps[t.host[i / loss_parts(elements / PIXEL)]].weight * losses.host[i] / batch /
                elements;
    for (float part : norms.host) norm += part;
    if (broken == 1) loss = 1;
    if (broken == 2) norm = 1;
    for (int i = 0; i < WINDOW; i++) {  // its standard deviation is a tenth of what is to come
        float by = i % 2 ? 0.1f : -0.1f;
        before.history.losses[i] = (float)(broken == 3 || broken == 5 ? loss / 3 : loss) * (1 + by);
        before.history.norms[i] = (float)(sqrt(norm) / (broken == 4 ? 3 : 1)) * (1 + by);
    }
    Config config = default_config();
    config.optimiser.skip_outliers = 6, config.optimiser.grad_clip = (float)sqrt(norm) / 2;
    Pair<StepState> state(std::vector<StepState>(1, before));
    std::vector<Output> outputs;
    static const std::pair<int, const char*> EXACTLY[] = {{STEP, "step"},       {LR, "lr"},
                                                          {FINITE, "finite"},   {ACCEPTED, "accepted"},
                                                          {SKIPPED, "skipped"}, {SEEN, "seen"}};
    for (auto [field, name] : EXACTLY) outputs.push_back({&state, KEPT, name, EXACT, field, FIELDS});
    if (broken != 1) outputs.push_back({&state, KEPT, "loss", FLOAT_LIMIT, LOSS, FIELDS});
    for (int q = 0; broken != 1 && q < 4; q++) {
        outputs.push_back({&state, KEPT, "quartile's sum", FLOAT_LIMIT, QUARTILE_SUMS + q, FIELDS});
        outputs.push_back({&state, KEPT, "quartile's samples", EXACT, QUARTILE_COUNTS + q, FIELDS});
    }
    if (broken != 2) outputs.push_back({&state, KEPT, "norm", FLOAT_LIMIT, NORM, FIELDS});
    if (broken != 2) outputs.push_back({&state, KEPT, "clip", FLOAT_LIMIT, CLIP, FIELDS});
    outputs.push_back({&state, KEPT, "window", FLOAT_LIMIT, HISTORY + 1000 % WINDOW, FIELDS});
    check("finish step", shape, outputs, [&](auto on) {
        BatchLoss batch_loss = {on(losses), on(t), on(chain), batch, elements / PIXEL, PIXEL, 1000};
        on.run(FinishStep{on(state), batch_loss, on(norms), parameters, config.optimiser});
    });
    const StepState& after = state.host[0];
    bool counts = broken != 1 && broken != 2, skipped = broken == 3 || broken == 4;
    if (after.step != before.step + counts || after.accepted != (counts && !skipped) ||
        after.history.skipped != skipped ||
        after.history.seen != before.history.seen + (counts && !skipped) ||
        (counts && !(fabs(after.update.clip - 0.5f) <= 1e-3f)))
        fault("finish step", shape + ": the specification errs");
}

static void test_optimiser(size_t n, int emas, bool accepted) {
    std::string shape = text("%zu parameters, %d EMAs%s", n, emas, accepted ? "" : ", skipped");
    Floats w(n), m(n, 0.1f), v(n, 0.01f), gradient(n, 0.1f), parts((n + NORM_CHUNK - 1) / NORM_CHUNK);
    Floats ema[MAX_EMAS] = {Floats(n), Floats(n), Floats(n), Floats(n)};
    Layer working(n);
    for (float& value : v.host) value = fabsf(value);
    StepState before = StepState();
    before.update = {1e-3f, 100, 0.9f, 0.999f, 1e-8f, 0.5f, 0.3f, {0.01f, 0.001f, 0.5f, 1}, 0.5f};
    before.accepted = accepted;
    Pair<StepState> state(std::vector<StepState>(1, before));
    double limit = accepted ? ROUNDINGS : EXACT;
    check("AdamW", shape,
          {{&w, KEPT, "w", limit},
           {&ema[0], KEPT, "EMA", limit},
           {&ema[1], KEPT, "2nd EMA", limit},
           {&ema[2], KEPT, "3rd EMA", limit},
           {&ema[3], KEPT, "4th EMA", limit},
           {&m, KEPT, "m", limit},
           {&v, KEPT, "v", limit},
           {&working, KEPT, "working copy", accepted ? LIMIT : EXACT}},
          [&](auto on) {
              OptimiserMemory p = {
                  .master = on(w), .adam_m = on(m), .adam_v = on(v), .gradients = on(gradient)};
              for (int k = 0; k < MAX_EMAS; k++) p.ema[k] = on(ema[k], emas > k);
              on.run(UpdateWeights<typename decltype(on)::T>{p, on(working), n, n / 12 * 4, on(state)});
          });
    std::vector<float> device_w = w.download();
    std::vector<floatX> device_working = working.download();
    bool same = true;
    for (size_t i = 0; accepted && i < n; i++) same &= (float)device_working[i] == rounded(device_w[i]);
    if (!same) fault("AdamW", shape + ": the working copy is not w, rounded");
    check("squared norm", shape, {{&parts, WRITTEN, "parts", FLOAT_LIMIT}},
          [&](auto on) { on.run(SquaredNorm{.parts = on(parts), .x = on(gradient), .n = n}); });
    check("sum of gradients", shape, {{&m, KEPT, "sum", EXACT}},
          [&](auto on) { on.run(AddGradients{.sum = on(m), .a = on(m), .b = on(gradient), .n = n}); });
}

// ---- what is checked --------------------------------------------------------------------------------------

static void check_tiny() {
    test_conv({.B = 1, .H = 7, .W = 9, .C = 96, .O = 64, .emb = true, .in_place = true, .demb = true});
    forced_splits = 2;
    test_conv({.B = 2, .H = 8, .W = 8, .C = 128, .O = 32, .emb = true, .residual = true, .demb = true});
    forced_splits = 0;
    test_conv({.B = 1, .H = 9, .W = 7, .C = 8, .O = 32, .dx = false});
    test_conv({.B = 1, .H = 9, .W = 7, .C = 32, .O = 8});
    test_linear({.M = 77, .C = 96, .C2 = 64, .O = 96, .residual = true, .accumulate = true});
    test_linear({.M = 3, .C = 64, .O = 1280});  // dX is split
    test_conv({.B = 3, .H = 7, .W = 7, .C = 8, .O = 96, .emb = true, .dx = false, .demb = true});
    test_norm({.B = 3, .T = 63, .C = 96, .C2 = 32});
    test_norm({.B = 1, .T = 63, .C = 128, .C2 = 64, .accumulate = true});
    test_norm({.B = 2, .T = 49, .C = 32, .G = 8, .silu = false, .residual = true, .mean = 30});
    test_norm({.B = 2, .T = 1024, .C = 64});
    test_norm({.B = 3, .T = 130, .C = 96, .accumulate = true, .modulated = true});
    for (int taps : {9, 1}) {
        test_normed_product({.B = 3, .H = 8, .W = 8, .C = 64, .C2 = 64}, taps);
        test_normed_product({.B = 1, .H = 16, .W = 16, .C = 96, .O = 32, .G = 8, .silu = false}, taps);
        test_normed_product({.B = 2, .H = 9, .W = 7, .C = 32, .C2 = 64, .O = 96}, taps);
        test_normed_product({.B = 2, .H = 16, .W = 8, .C = 128, .modulated = true}, taps);
    }
    test_norm({.B = 1, .T = 4096, .C = 64, .residual = true});
    test_attention(1, 49, 2, 16), test_attention(3, 130, 1, 48), test_attention(1, 64, 2, 64);
    test_attention(1, 49, 1, 128), test_attention(1, 49, 1, 256);
    test_resample(3, 7, 9, 96), test_resample(1, 3, 5, 32);
    test_embedding(3, 32);
    test_diffusion(1, 7, 9, PREDICT_EPS, true), test_diffusion(3, 16, 16, PREDICT_V, false);
    test_step(5, 7, 6, 3, LR_COSINE, true);
    test_finish(1, 10000, 200000, 0), test_finish(3, 10000, 200000, 3);
    test_optimiser(70004, 2, true), test_optimiser(4, 0, true);
    test_philox(1000);
    // Hopper's tiles of two parts, of which there are enough with many channels
    test_normed_product({.B = 4, .H = 32, .W = 32, .C = 64, .O = 1024}, 9);
    test_normed_product({.B = 4, .H = 32, .W = 32, .C = 64, .C2 = 64, .O = 1024}, 9);
    test_normed_product({.B = 4, .H = 32, .W = 32, .C = 1024, .O = 64}, 9);
    test_normed_product({.B = 13, .H = 16, .W = 16, .C = 1024, .O = 64}, 9);
    report_lines();
}

// The shapes of the default model, and those at the edges of what the kernels take at once.
static void check_products(const Plan& plan) {
    for (int tile = -1; tile < 3; tile++)
        for (int splits : {0, 3}) {
            forced_tile = tile, forced_splits = splits;
            if (tile < 0 && splits) continue;
            test_conv(
                {.B = 1, .H = 7, .W = 7, .C = 96, .O = 320, .emb = true, .residual = true, .demb = true});
            test_conv({.B = 3, .H = 9, .W = 13, .C = 320, .O = 96, .emb = true, .demb = true});
            test_conv({.B = 3, .H = 13, .W = 9, .C = 32, .O = 32, .in_place = true});
            test_conv(
                {.B = 3, .H = 8, .W = 8, .C = 192, .O = 64, .emb = true, .residual = true, .demb = true});
            test_conv(
                {.B = 1, .H = 17, .W = 40, .C = 64, .O = 160, .residual = true, .dx = false, .demb = true});
            test_linear({.M = 1, .C = 64, .O = 256});
            test_linear({.M = 3, .C = 256, .O = 64, .residual = true, .accumulate = true});
            test_linear({.M = 169, .C = 96, .C2 = 32, .O = 320, .residual = true, .accumulate = true});
            test_linear({.M = 500, .C = 320, .C2 = 96, .O = 96});
            test_linear({.M = 1000, .C = 32, .C2 = 32, .O = 32, .dx = false});
        }
    forced_tile = -1, forced_splits = 0;
    for (int B : {1, 3}) {
        test_conv({.B = B, .H = 13, .W = 9, .C = 8, .O = 64, .dx = false});
        test_conv({.B = B, .H = 9, .W = 7, .C = 8, .O = 32, .emb = true, .residual = true, .demb = true});
        test_conv({.B = B, .H = 9, .W = 13, .C = 64, .O = 8});
        test_conv({.B = B, .H = 7, .W = 7, .C = 96, .O = 8, .emb = true, .residual = true, .demb = true});
    }
    test_conv({.B = 1, .H = 8, .W = 8, .C = 1024, .O = 512});
    test_conv({.B = 14,
               .H = 64,
               .W = 64,
               .C = 96,
               .O = 96,
               .emb = true,
               .residual = true,
               .demb = true});  // more tiles than blocks
    test_linear({.M = 40000, .C = 128, .O = 128, .residual = true, .accumulate = true});
    for (int taps : {9, 1}) {
        test_normed_product({.B = 14, .H = 64, .W = 64, .C = 64, .C2 = 64}, taps);
        test_normed_product({.B = 780, .H = 8, .W = 8, .C = 64, .C2 = 64}, taps);
    }
    test_linear({.M = 3, .C = 256, .O = 3712});
    std::vector<std::vector<int>> seen;
    auto first = [&](std::vector<int> shape) {
        bool fresh = std::find(seen.begin(), seen.end(), shape) == seen.end();
        seen.push_back(shape);
        return fresh;
    };
    for (const Block& b : plan.blocks) {
        int M = 3 * b.H * b.H, K = padded(b.C + b.C2), O = padded(b.O);
        bool res = b.kind == BLOCK_RES, conv = res || b.kind == BLOCK_CONV_IN || b.kind == BLOCK_OUT;
        if (conv && first({9, b.H, K, O}))
            test_conv({.B = 3,
                       .H = b.H,
                       .W = b.H,
                       .C = K,
                       .O = O,
                       .emb = true,
                       .residual = true,
                       .dx = K > PIXEL,
                       .demb = true});
        if (res && first({9, b.H, b.O, b.O}))
            test_conv({.B = 3, .H = b.H, .W = b.H, .C = b.O, .O = b.O, .in_place = true});
        if (res && K != b.O && first({1, b.H, b.C, b.C2, b.O}))
            test_linear({.M = M, .C = b.C, .C2 = b.C2, .O = b.O, .accumulate = b.accumulate});
        if (b.kind == BLOCK_ATTENTION && first({1, b.H, b.C, 3})) {
            test_linear({.M = M, .C = b.C, .O = 3 * b.C});
            test_linear({.M = M, .C = b.C, .O = b.C, .residual = true, .accumulate = true});
        }
    }
    // The bias gradient: images smaller than a tile and larger, in numbers on both sides of what goes at once.
    static const int SIZES[][2] = {{1, 1}, {7, 7}, {40, 25}};
    for (int O : {8, 32, 96, 320})
        for (auto& [H, W] : SIZES) {
            test_conv({.B = 3, .H = H, .W = W, .C = 8, .O = O, .emb = true, .dx = false, .demb = true});
            test_conv({.B = 1, .H = H, .W = W, .C = 8, .O = O, .emb = true, .dx = false});
            test_conv({.B = 70, .H = H, .W = W, .C = 8, .O = O, .emb = true, .dx = false, .demb = true});
        }
    report_lines();
}

static void check_all(const Plan& plan) {
    check_products(plan);

    static const struct {
        int B, T, C, C2, G;
    } NORMS[] = {{3, 63, 96, 32, 32},     {1, 63, 128, 64, 32},  {3, 63, 192, 0, 8},
                 {2, 49, 32, 0, 8},       {1, 256, 64, 32, 8},   {2, 4096, 64, 0, 32},
                 {1, 4096, 128, 64, 32},  {3, 4096, 64, 64, 32}, {2, 1024, 128, 0, 32},
                 {2, 1024, 192, 128, 32}, {3, 256, 192, 0, 32},  {2, 256, 256, 192, 32},
                 {3, 64, 256, 0, 32},     {1, 64, 256, 256, 32}, {1, 49, 1024, 0, 32},
                 {1, 63, 992, 0, 32},     {1, 16384, 96, 32, 8}, {1, 65536, 64, 0, 32}};
    int i = 0;
    for (auto& n : NORMS)
        for (int repeat = 0; repeat < 2; repeat++) {
            test_norm({.B = n.B,
                       .T = n.T,
                       .C = n.C,
                       .C2 = n.C2,
                       .G = n.G,
                       .silu = i % 8 != 3,
                       .accumulate = i % 3 == 1,
                       .residual = !n.C2 && i % 4 < 2,
                       .mean = i % 5 == 0 ? 30 : 0.3f,
                       .modulated = repeat == 1});
            if (n.T < 5000)
                test_norm({.B = n.B, .T = n.T, .C = n.C, .C2 = n.C2, .G = n.G, .accumulate = i % 3 == 2});
            i++;
        }
    for (int taps : {9, 1})
        for (int tile : {-1, 0, 1, 2}) {  // the fastest kernel, and the portable ones
            forced_tile = tile, forced_splits = tile >= 0;
            for (int H : {8, 16, 32, 12}) {
                test_normed_product({.B = 3, .H = H, .W = H, .C = 64, .C2 = 64, .O = 128}, taps);
                test_normed_product({.B = 2, .H = H, .W = H, .C = 96, .C2 = 32}, taps);
                test_normed_product({.B = 1, .H = H, .W = H, .C = 192, .O = 192, .silu = false}, taps);
                test_normed_product({.B = 3, .H = H, .W = H, .C = 192, .O = 64, .modulated = true}, taps);
            }
            test_normed_product({.B = 2, .H = 64, .W = 64, .C = 64, .C2 = 128}, taps);
            forced_tile = -1, forced_splits = 0;
        }
    for (bool adding : {false, true})
        for (bool residual : {false, true})
            for (int H : {8, 16, 32, 64})
                test_norm({.B = 256 / H,
                           .T = H * H,
                           .C = 192,
                           .C2 = residual ? 0 : 64,
                           .accumulate = adding,
                           .residual = residual});
    static const int ATTENTIONS[][4] = {
        {1, 49, 2, 16},   {3, 130, 1, 48},   {1, 64, 2, 64},   {1, 49, 1, 128},   {2, 64, 8, 32},
        {2, 256, 6, 32},  {3, 256, 2, 16},   {1, 256, 4, 64},  {1, 256, 2, 128},  {1, 1024, 2, 32},
        {1, 1024, 1, 64}, {1, 1024, 2, 128}, {1, 256, 2, 192}, {2, 1024, 1, 256}, {1, 1, 1, 240},
        {1, 1, 2, 32},    {1, 2500, 1, 96},  {1, 4100, 1, 32}};
    for (auto& a : ATTENTIONS) test_attention(a[0], a[1], a[2], a[3]);
    test_resample(3, 7, 9, 96), test_resample(1, 4, 4, 256), test_resample(2, 32, 32, 64);
    test_resample(1, 3, 5, 32);
    report_lines();

    test_embedding(1, 64), test_embedding(32, 64), test_embedding(3, 32), test_embedding(300, 32);
    test_diffusion(1, 7, 9, PREDICT_EPS, true), test_diffusion(3, 16, 16, PREDICT_V, true);
    test_diffusion(2, 64, 64, PREDICT_EPS, false), test_diffusion(2, 8, 8, PREDICT_X0, true);
    report_lines();

    test_step(5, 7, 6, 3, LR_COSINE, true), test_step(5, 7, 6, 2500, LR_COSINE, false);
    test_step(5, 7, 6, 2500, LR_LINEAR, false);
    test_step(300, 32, 17, 70, LR_CONSTANT, true),
        test_step(100, 300, 8, (int64_t)1 << 33, LR_CONSTANT, false);
    for (int broken = 0; broken < 6; broken++)
        test_finish(1, 10000, 200000, broken), test_finish(32, 12288, 20494211, broken);
    test_optimiser(3000004, 1, true), test_optimiser(65536 + 8, 0, true);
    for (int emas = 0; emas <= MAX_EMAS; emas++)
        test_optimiser(4, emas, true), test_optimiser(70004, emas, true);
    test_optimiser(70004, 2, false);
    test_philox(2000000);
    // Hopper's tiles of two parts: weights stay or don't; x is normed on the way or not; the second outside.
    test_normed_product({.B = 14, .H = 64, .W = 64, .C = 64, .on_the_way = true}, 9);
    test_normed_product(
        {.B = 14, .H = 64, .W = 64, .C = 64, .C2 = 128, .modulated = true, .on_the_way = true}, 9);
    test_normed_product({.B = 14, .H = 64, .W = 64, .C = 64, .silu = false}, 9);
    test_normed_product({.B = 210, .H = 16, .W = 16, .C = 64, .C2 = 64}, 9);
    test_normed_product({.B = 105, .H = 16, .W = 24, .C = 64}, 9);
    test_normed_product({.B = 25, .H = 48, .W = 48, .C = 96, .C2 = 32}, 9);
    report_lines();
}

// The largest sizes that the flags allow, where indices, grids and workspaces end.
static void check_limits() {
    for (int tile : {-1, 1}) {  // the fastest kernel, and a portable one
        forced_tile = tile;
        test_conv({.B = 1,
                   .H = 1024,
                   .W = 1024,
                   .C = 8,
                   .O = 32,
                   .emb = true,
                   .residual = true,
                   .dx = false,
                   .demb = true});
        test_conv({.B = 2, .H = 808, .W = 1000, .C = 8, .O = 32, .emb = true, .dx = false, .demb = true});
        test_conv({.B = 1, .H = 1024, .W = 1024, .C = 32, .O = 8});
        test_conv({.B = 65535, .H = 2, .W = 2, .C = 8, .O = 32, .emb = true, .dx = false});
        test_conv({.B = 65535, .H = 2, .W = 2, .C = 8, .O = 32, .emb = true, .dx = false, .demb = true});
        // as many images as most_images takes of so many channels
        test_conv(
            {.B = 43750, .H = 1, .W = 1, .C = 32, .O = 160, .emb = true, .residual = true, .demb = true});
        test_conv({.B = 21875, .H = 1, .W = 1, .C = 8, .O = 320, .emb = true, .residual = true, .dx = false});
        test_conv({.B = 1, .H = 4, .W = 4, .C = 4096, .O = 32});
        test_conv({.B = 1, .H = 4, .W = 4, .C = 32, .O = 8192, .emb = true, .demb = true});
        test_linear({.M = 16, .C = 8192, .C2 = 8192, .O = 64, .accumulate = true});
        test_linear({.M = 16, .C = 64, .O = 24576});
        test_normed_product({.B = 65535, .H = 2, .W = 1, .C = 64, .O = 32, .G = 4}, 9);
        test_normed_product({.B = 65535, .H = 2, .W = 1, .C = 64, .O = 32, .G = 4, .silu = false}, 1);
        report_lines();
    }
    forced_tile = -1;
    test_normed_product({.B = 1, .H = 1024, .W = 1024, .C = 32, .O = 32, .G = 8}, 9);
    report_lines();
    test_conv({.B = 3, .H = 2, .W = 2, .C = 8, .O = 8192, .emb = true, .dx = false, .demb = true});
    test_norm({.B = 1, .T = 1 << 20, .C = 32, .G = 8});
    test_norm({.B = 65535, .T = 1, .C = 32, .C2 = 32, .G = 8});
    for (int G : {1, 32, 1024})
        test_norm({.B = 2, .T = 16, .C = 8192, .C2 = 8192, .G = G, .accumulate = true});
    report_lines();
    test_attention(65535, 1, 2, 16), test_attention(1, 64, 512, 16), test_attention(1, 64, 64, 128),
        test_attention(1, 64, 32, 256);
    for (int d : {32, 128, 256}) test_long_attention(MAX_ATTENTION_SIZE * MAX_ATTENTION_SIZE, d, 9973);
    test_resample(1, 512, 512, 32), test_resample(65535, 1, 1, 32), test_resample(1, 2, 2, 8192);
    report_lines();
    test_embedding(65535, 32), test_embedding(3, 1024);
    test_diffusion(1, 1024, 1024, PREDICT_EPS, true), test_diffusion(65535, 1, 4, PREDICT_V, true);
    test_step(3, 65535, 4, 99999999, LR_COSINE, true), test_step(2, 1, 1024, 3, LR_CONSTANT, true);
    test_finish(65536, 48, 1000, 0), test_finish(1, 3 << 20, 2147483647, 0);
    report_lines();
}

static int run_tests(int argc, char** argv) {
    std::string mode = argc > 1 ? argv[1] : "check";
    if (mode != "check" && mode != "tiny" && mode != "limits")
        fail_usage("test_unet knows check, tiny and limits, and no %s", mode.c_str());
    if (argc > 2) only = argv[2];
    backend_init();
    allocate_workspace(), cpu::allocate_cpu_workspace();
    Config config = default_config();
    Plan plan = make_plan(config, config.batch_size, true);
    printf("%s\n", backend_name().c_str());
    if (mode == "tiny") check_tiny();
    else if (mode == "limits") check_limits();
    else check_all(plan);
    if (only.empty()) test_microbatch(sizeof(floatX) == 2 ? 2e-2 : 1e-5);
    if (!passed && !failed) fail_usage("no layer's name contains '%s'", only.c_str());
    return summary();
}

#else  // the CPU build: everything below

// ---- allocations are counted, so that a file's header can be shown to claim no memory ---------------------

static std::atomic<size_t> live_bytes, peak_bytes, largest_request;
static size_t allocation_limit = SIZE_MAX;  // a larger request is refused

__attribute__((noinline)) static void count_allocation(void* memory, size_t requested) {
    size_t live = live_bytes += malloc_usable_size(memory), peak = peak_bytes;
    while (live > peak && !peak_bytes.compare_exchange_weak(peak, live)) {
    }
    size_t largest = largest_request;
    while (requested > largest && !largest_request.compare_exchange_weak(largest, requested)) {
    }
}
__attribute__((noinline)) static void* counted_malloc(size_t bytes) {
    if (bytes > allocation_limit) largest_request = bytes;
    void* memory = bytes > allocation_limit ? nullptr : malloc(bytes ? bytes : 1);
    if (memory) count_allocation(memory, bytes);
    return memory;
}
__attribute__((noinline)) static void counted_free(void* memory) {
    if (memory) live_bytes -= malloc_usable_size(memory);
    free(memory);
}
void* operator new(size_t bytes) {
    void* memory = counted_malloc(bytes);
    if (!memory) throw std::bad_alloc();
    return memory;
}
void operator delete(void* memory) noexcept { counted_free(memory); }
void operator delete(void* memory, size_t) noexcept { counted_free(memory); }

#define malloc counted_malloc
#define free counted_free

#pragma GCC diagnostic ignored "-Wunused-function"  // main's own helpers have no caller here
#define TESTING
#define LATE_SIDE_STREAM
#include "train_unet.cu"

#include "tests/cases.h"

// ===========================================================================================================
// 1  HARNESS
// ===========================================================================================================

static std::string running = "start";  // the group of tests under way, for the last words of a crash

static void last_words(int signal_number) {
    report(false, running, "%s",
           signal_number == SIGALRM   ? "hangs"
           : signal_number == SIGABRT ? "stopped by an assertion (see above)"
                                      : "crashed");
    summary();
    _exit(1);
}

static double largest_of(const std::vector<double>& r) {
    double largest = 0;
    for (double value : r) largest = std::max(largest, fabs(value));
    return largest;
}

// One optimiser step. A loss or gradient that is not finite leaves the weights and the step as they were.
static StepState train_step(Trainer* t) {
    begin_next_step(t);
    return await_step(t);
}

static bool same_bits(const void* a, const void* b, size_t bytes) { return memcmp(a, b, bytes) == 0; }

// The sentence with which `act` is refused, "" where it is not. Anything else than a sentence is marked.
static std::string refusal(const std::function<void()>& act) {
    try {
        return failure_of(act);
    } catch (std::bad_alloc&) {
        return "!! ran out of memory";
    }
}

// One sentence: one line of printable text that does not start a second sentence.
static bool is_sentence(const std::string& message) {
    if (message.size() < 12 || message.size() > 1500 || message[0] == '!') return false;
    for (size_t i = 0; i < message.size(); i++) {
        if ((unsigned char)message[i] < ' ' || message[i] == 127) return false;
        if (message[i] == '.' && i + 2 < message.size() && message[i + 1] == ' ' && isupper(message[i + 2]))
            return false;
    }
    return true;
}

// A small generator for the tests' own choices.
struct Dice {
    uint32_t seed, count = 0;
    uint32_t next() { return philox(seed, 1000, count++, 0, 0).word[0]; }
    uint32_t below(uint32_t n) { return (uint32_t)(((uint64_t)next() * n) >> 32); }
    bool one_in(uint32_t n) { return below(n) == 0; }
    float normal() {
        float four[4];
        random_normals(four, seed, 1001, count++, 0, 0);
        return four[0];
    }
};
static std::vector<float> normals_of(uint32_t seed, size_t n) {
    std::vector<float> values((n + 3) / 4 * 4);
    for (size_t quad = 0; quad < values.size() / 4; quad++)
        random_normals(&values[4 * quad], seed, 1002, (uint32_t)quad, 0, 0);
    values.resize(n);
    return values;
}

typedef std::vector<std::pair<std::string, std::string>> Flags;

static Config config_of(const Flags& flags) {
    Config config = default_config();
    for (auto& [name, value] : flags) set_flag(&config, flag_named(name), value);
    return config;
}

// A network that runs in milliseconds and still has every kind of block.
static Flags toy_flags() {
    return {{"image_size", "8"},
            {"num_channels", "32"},
            {"channel_mult", "1,2"},
            {"num_res_blocks", "1"},
            {"attention_resolutions", "4"},
            {"num_head_channels", "16"},
            {"norm_groups", "8"},
            {"batch_size", "2"}};
}
static Flags with(Flags flags, const Flags& more) {
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
}

static void build_model(Model* m, const Config& config, int batch, bool training) {
    *m = plan_model(config, batch, training);
    check_memory(*m);
    allocate_model(m);
}

// Fresh weights and N(0, 0.02^2) on every parameter: as initialised, nearly every gradient is exactly zero.
static void perturbed_weights(Model* m, uint32_t seed) {
    initialise_weights(m, seed);
    for (const Parameter& t : m->plan.tensors) {
        std::vector<float> noise = reordered(normals_of(seed + 77 + (uint32_t)t.offset, t.count), t, true),
                           weights(t.size);
        backend_download(weights.data(), m->master + t.offset, t.size * sizeof(float));
        for (size_t i = 0; i < t.size; i++) weights[i] += 0.02f * noise[i];
        backend_upload(m->master + t.offset, weights.data(), t.size * sizeof(float));
    }
}

// Normals (pixels, PIXEL), zeros behind the channels.
static std::vector<float> random_pixels(uint32_t seed, size_t pixels, int channels) {
    std::vector<float> values = normals_of(seed, pixels * PIXEL);
    for (size_t i = 0; i < values.size(); i++)
        if ((int)(i % PIXEL) >= channels) values[i] = 0;
    return values;
}

// Random images, target and timesteps for the first B images of the model.
static void random_batch(Model* m, int B, uint32_t seed) {
    size_t pixels = (size_t)B * m->config.image_size * m->config.image_size, n = pixels * PIXEL;
    std::vector<float> input = random_pixels(seed, pixels, m->config.in_channels),
                       target = random_pixels(seed + 1, pixels, m->config.in_channels);
    std::vector<int> timesteps(B);
    for (int b = 0; b < B; b++) timesteps[b] = (int)random_below(1000, seed, STREAM_TIMESTEP, 0, b, 0);
    backend_upload(m->input, input.data(), n * sizeof(float));
    backend_upload(m->target, target.data(), n * sizeof(float));
    backend_upload(m->timesteps, timesteps.data(), B * sizeof(int));
}

static std::vector<float> downloaded(const float* from, size_t n) {
    std::vector<float> values(n);
    backend_download(values.data(), from, n * sizeof(float));
    return values;
}

// The mean loss of the first B images, and where the model trains the gradient of its output.
static double forward_loss(Model* m, int B) {
    BatchLoss batch = batch_loss(m, B);
    floatX* dout = output_gradient_of(m, m->plan.blocks.back(), B).data;
    const float* images = m->variance_losses ? m->images : nullptr;
    unet_forward(m, B);
    run(PredictionLoss<floatX>{batch, 0, B, unet_output(m), m->target, dout, images});
    double loss = 0;
    for (const float* losses : {m->losses, m->variance_losses}) {
        if (!losses) continue;
        std::vector<float> parts = downloaded(losses, (size_t)B * loss_parts(batch.pixels));
        loss += std::accumulate(parts.begin(), parts.end(), 0.0) / batch.elements();
    }
    return loss;
}

static std::vector<float> gradients_of(const Model* m) {
    return downloaded(m->gradients, m->plan.num_floats);
}
static std::vector<float> output_values(const Model* m, int B) {
    return downloaded(unet_output(m), (size_t)B * PIXEL * m->config.image_size * m->config.image_size);
}

// Every layer's memory as if nobody had ever written there: bytes of 255 are NaN in any float type.
static void poison(Model* m) {
    memset(m->arena, 255, m->plan.arena_bytes);
    if (cpu::cpu_workspace) memset(cpu::cpu_workspace, 255, cpu::cpu_workspace_bytes());
}

enum { TEST_THREADS = 4 };
static void set_threads(int threads) { omp_set_num_threads(threads); }

static void test_error_measure() {
    std::vector<double> r(1000, 1.0), zeros(1000, 0.0);
    std::vector<float> a(1000, 1.0f);
    bool ok = error_of(a, r) < 1e-5;
    a[500] = 1.0001f;
    ok &= !(error_of(a, r) < 1e-5);
    a[500] = NAN;
    ok &= !(error_of(a, r) < 1e-5);
    a[500] = INFINITY;
    ok &= !(error_of(a, r) < 1e-5);
    ok &= !(error_of(std::vector<float>(999, 1.0f), r) < 1e-5);
    ok &= !(error_of(std::vector<float>(1000, 1e-30f), zeros) < 1e-5);
    ok &= is_sentence("a.bin is damaged: it ends inside its section 2") && !is_sentence("") &&
          !is_sentence("It is bad. Do something else") && !is_sentence("two\nlines of text");
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
// 2  RANDOM NUMBERS, CHECKSUM
// ===========================================================================================================

// The orders of some epochs, and the image that sample n of a run takes from them.
struct Orders {
    std::vector<int> order;
    BatchSource source = BatchSource();
    Orders(int count, int epochs, uint32_t seed) : order((size_t)count * epochs) {
        for (int epoch = 0; epoch < epochs; epoch++)
            random_permutation(order.data() + (size_t)epoch * count, count, seed, epoch);
        source.order = order.data(), source.count = count, source.slots = epochs, source.batch = 1,
        source.seed = seed;
    }
    int at(uint64_t n) const {
        int timestep, image;
        StepState state = StepState();
        state.step = (int64_t)n;
        BeginStep{.state = &state,
                  .timesteps = &timestep,
                  .sources = &image,
                  .labels = nullptr,
                  .source = source,
                  .hyper = Config().optimiser}(0);
        return image;
    }
};

static void test_random() {
    // the vectors published with the generator (Random123's kat_vectors): counter 0, and all bits set
    Philox zero = philox(0, 0, 0, 0, 0);
    const uint32_t expected[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    report(same_bits(zero.word, expected, sizeof expected), "philox zeros", "%08x %08x %08x %08x",
           zero.word[0], zero.word[1], zero.word[2], zero.word[3]);
    // the fourth word of our counters is always 0, so the other vectors need the rounds spelled out with it
    auto rounds = [](uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1, c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)p0, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        return Philox{{c0, c1, c2, c3}};
    };
    Philox ones = rounds(~0u, ~0u, ~0u, ~0u, ~0u, ~0u);
    const uint32_t expected_ones[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
    bool same = same_bits(ones.word, expected_ones, sizeof expected_ones);
    Dice dice{5};
    for (int i = 0; i < 1000; i++) {
        uint32_t seed = dice.next(), stream = dice.next(), quad = dice.next(), sample = dice.next(),
                 step = dice.next();
        Philox ours = philox(seed, stream, quad, sample, step),
               theirs = rounds(quad, sample, step, 0, seed, stream);
        same &= same_bits(ours.word, theirs.word, sizeof ours.word);
    }
    report(same, "philox ones", "and 1000 random keys and counters against the rounds spelled out");

    bool permutes = true, differs = true;
    for (int n : {1, 2, 3, 78, 1000}) {
        std::vector<int> first(n), second(n), again(n), sorted;
        random_permutation(first.data(), n, 7, 0), random_permutation(second.data(), n, 7, 1);
        random_permutation(again.data(), n, 7, 0);
        permutes &= first == again;
        for (auto* order : {&first, &second}) {
            sorted = *order;
            std::sort(sorted.begin(), sorted.end());
            for (int i = 0; i < n; i++) permutes &= sorted[i] == i;
        }
        if (n > 50) differs &= first != second;
    }
    report(permutes && differs, "permutation", "holds each image once, and changes with the epoch");

    // Over an epoch of batches each image comes once, batches run across epochs, and going back works.
    Orders orders(10, 3, 3);
    std::vector<int> seen(10), order(10);
    for (uint64_t n = 20; n < 30; n++) seen[orders.at(n)]++;
    random_permutation(order.data(), 10, 3, 1);
    bool ok = std::count(seen.begin(), seen.end(), 1) == 10 && orders.at(14) == order[4];
    report(ok, "order of the images", "an epoch holds each once, a step can be recomputed alone");

    double sum = 0, squares = 0, fourth = 0;
    std::vector<float> values = normals_of(1, 1 << 18);
    for (float v : values) sum += v, squares += (double)v * v, fourth += pow(v, 4);
    double n = (double)values.size();
    ok = fabs(sum / n) < 0.01 && fabs(squares / n - 1) < 0.02 && fabs(fourth / n - 3) < 0.1;
    report(ok, "normals", "mean %.4f, variance %.4f, fourth moment %.3f", sum / n, squares / n, fourth / n);
}

static void test_checksum() {
    uint32_t whole = crc32("123456789", 9), parts = crc32("6789", 4, crc32("12345", 5));
    std::vector<float> noise = normals_of(2, 1000);
    uint32_t slow = ~0u;  // bit by bit
    for (size_t i = 0; i < 4000; i++) {
        slow ^= ((const uint8_t*)noise.data())[i];
        for (int bit = 0; bit < 8; bit++) slow = slow & 1 ? slow >> 1 ^ 0xEDB88320u : slow >> 1;
    }
    report(whole == 0xCBF43926 && parts == whole && crc32(noise.data(), 4000) == ~slow, "crc32",
           "%08x, in parts %08x", whole, parts);
}

// ===========================================================================================================
// 3  THE CPU'S MATRIX PRODUCT AND LAYERS
// ===========================================================================================================

static void test_matmul() {
    struct Shape {
        int M, N, K;
    };
    const Shape shapes[] = {{1, 1, 1},    {3, 5, 7},      {12, 32, 256},  {13, 33, 257},  {120, 64, 64},
                            {121, 65, 3}, {7, 513, 31},   {131, 545, 91}, {252, 128, 27}, {64, 17, 600},
                            {1, 300, 40}, {250, 31, 513}, {5, 1, 1000},   {20, 64, 8192}, {37, 48, 1}};
    double worst = 0;
    bool clean = true;
    int count = 0;
    for (const Shape& s : shapes)
        for (int variant = 0; variant < 16; variant++) {
            bool ta = variant & 1, tb = variant & 2, accumulate = variant & 4;
            int M = s.M, N = s.N, K = s.K, gap = variant & 8 ? 5 : 0;  // leading dimensions beyond the width
            int lda = (ta ? M : K) + gap, ldb = (tb ? K : N) + gap, ldc = N + gap;
            std::vector<float> a = normals_of(variant, (size_t)(ta ? K : M) * lda),
                               b = normals_of(variant + 100, (size_t)(tb ? N : K) * ldb),
                               c = normals_of(variant + 200, (size_t)M * ldc), before = c;
            matmul({M, N, K}, c.data(), ldc, ta ? transposed(a.data(), lda) : Matrix{a.data(), lda},
                   tb ? transposed(b.data(), ldb) : Matrix{b.data(), ldb}, accumulate);
            std::vector<double> expected(before.begin(), before.end());
            for (int m = 0; m < M; m++)
                for (int n = 0; n < N; n++) {
                    double sum = accumulate ? before[(size_t)m * ldc + n] : 0;
                    for (int k = 0; k < K; k++)
                        sum += (double)a[ta ? (size_t)k * lda + m : (size_t)m * lda + k] *
                               b[tb ? (size_t)n * ldb + k : (size_t)k * ldb + n];
                    expected[(size_t)m * ldc + n] = sum;
                }
            for (int m = 0; m < M; m++)  // what lies between the rows stays as it was
                for (int n = N; n < ldc; n++) clean &= c[(size_t)m * ldc + n] == before[(size_t)m * ldc + n];
            double error = error_of(c, expected);
            if (worsens(error, worst)) worst = error;
            count++;
        }
    report(worst < 2e-6 && clean, "matmul",
           "%d products of odd shapes, transposed, strided, accumulated: worst %.2g", count, worst);

    double exponential = 0;
    for (float x = -86.9f; x < 88.0f; x += 0.00731f)
        exponential = std::max(exponential, fabs(fast_exp(x) / exp((double)x) - 1));
    bool edges = std::isnan(fast_exp(NAN)) && fast_exp(-1000.0f) < 1e-37f && fast_exp(1000.0f) > 1e38f &&
                 sigmoid(-200.0f) < 1e-37f && sigmoid(200.0f) == 1.0f && fast_exp(0.0f) == 1.0f;
    report(exponential < 2.5e-7 && edges, "exp", "worst relative error %.2g; NaN stays NaN", exponential);
}

// ---- the fast layers against their specification ----------------------------------------------------------

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
    static void groupnorm_silu_backward(Joined dx, Tensor dout, const Norm& norm, Backward options) {
        std::vector<float> dy(dout.count()), normed(dout.count());
        Tensor dy_tensor = dout, normed_tensor = dout;
        dy_tensor.data = dy.data(), normed_tensor.data = normed.data();
        cpu::groupnorm_backward_sums(dy_tensor, dout, norm);
        if (norm.dmodulation.data) cpu::run(ModulationBackward<float>{norm});
        cpu::groupnorm_backward(dx, normed_tensor, dy_tensor, norm, options);
    }
};

// The tensors that a layer writes, by name.
typedef std::map<std::string, std::vector<float>> Written;
static std::vector<float> unwritten(size_t n) { return std::vector<float>(n, NAN); }

// call(layers, written) calls a layer, plain and fast, each over the same numbers. The fast one finds NaN in its
// workspace.
static void compare(Verdict* verdict, const std::string& name, const Written& before, auto call) {
    Written expected = before, found = before;
    memset(cpu::cpu_workspace, 255, cpu::cpu_workspace_bytes());
    call(PlainLayers(), expected);
    call(FastLayers(), found);
    for (auto& [tensor, values] : expected)
        if (values.size()) verdict->note(name + " " + tensor, error_of(found[tensor], values));
}

struct LayerShape {
    int B, H, W, C, C2, O;  // C2: channels of a second input, or 0
    std::string name() const { return text("B%d %dx%d C%d+%d O%d", B, H, W, C, C2, O); }
    std::vector<float> normals(uint32_t seed, int channels) const {
        return normals_of(seed, (size_t)B * H * W * channels);
    }
    Tensor tensor(std::vector<float>& values) const {
        int channels = (int)(values.size() / ((size_t)B * H * W));
        return {values.data(), B, H, W, channels};
    }
    Joined joined(std::vector<float>& first, std::vector<float>& second) const {
        return {tensor(first), C2 ? tensor(second) : Tensor()};
    }
};

// adds: a row of an embedding, the residual, and to what dx holds
static void compare_conv3x3(Verdict* verdict, LayerShape s, bool adds) {
    std::vector<float> x = s.normals(1, s.C), dout = s.normals(2, s.O), residual = s.normals(3, s.O),
                       w = normals_of(4, (size_t)s.O * 9 * s.C), bias = normals_of(5, s.O),
                       emb = normals_of(6, (size_t)s.B * s.O);
    Conv layer = {.w = w.data(), .bias = bias.data()};
    Forward options;
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

static void compare_conv1x1(Verdict* verdict, LayerShape s, bool adds) {
    std::vector<float> x = s.normals(1, s.C), x2 = s.normals(2, s.C2), dout = s.normals(3, s.O),
                       residual = s.normals(4, s.O), w = normals_of(5, (size_t)s.O * (s.C + s.C2)),
                       bias = normals_of(6, s.O);
    Linear layer = {.w = w.data(), .bias = bias.data()};
    Forward options;
    if (adds) options.residual = s.tensor(residual);

    compare(verdict, s.name(), {{"out", unwritten(dout.size())}}, [&](auto layers, Written& to) {
        layers.conv1x1_forward(s.tensor(to["out"]), s.joined(x, x2), layer, options);
    });
    Written dx = {{"dx", adds ? x : unwritten(x.size())}, {"dx2", adds ? x2 : unwritten(x2.size())}};
    compare(verdict, s.name(), dx, [&](auto layers, Written& to) {
        layers.conv1x1_backward_input(s.joined(to["dx"], to["dx2"]), s.tensor(dout), layer, {.accumulate = adds});
    });
    compare(verdict, s.name(), {{"dw", unwritten(w.size())}, {"dbias", unwritten(s.O)}},
            [&](auto layers, Written& to) {
                Linear trained = {.dw = to["dw"].data(), .dbias = to["dbias"].data()};
                layers.conv1x1_backward_weight(trained, s.tensor(dout), s.joined(x, x2));
            });
}

// adds: modulated, to what dx holds, and where the norm has one input the gradient of a branch around it
static void compare_groupnorm(Verdict* verdict, LayerShape s, int groups, bool silu, bool adds) {
    const int C = s.C + s.C2;
    std::vector<float> x = s.normals(1, s.C), x2 = s.normals(2, s.C2), dout = s.normals(3, C),
                       branch = s.normals(4, s.C), w = normals_of(5, C), bias = normals_of(6, C),
                       modulation = normals_of(7, (size_t)s.B * 2 * C);
    for (float& value : x) value += 3;
    std::vector<float2> statistics((size_t)s.B * C), affine(statistics),
        sums(statistics.size() * norm_parts(s.H * s.W)), moments(sums), moments2(sums);
    Norm norm = {.x = s.joined(x, x2), .groups = groups, .silu = silu, .w = w.data(), .bias = bias.data()};
    norm.x.first.moments = moments.data(), norm.x.second.moments = moments2.data();
    norm.statistics = statistics.data(), norm.affine = affine.data(), norm.sums = sums.data();
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
    Backward options = {.residual = adds && !s.C2 ? s.tensor(branch) : Tensor(), .accumulate = adds};
    compare(verdict, name, gradients, [&](auto layers, Written& to) {
        Norm trained = norm;
        trained.dw = to["dw"].data(), trained.dbias = to["dbias"].data();
        if (adds) trained.dmodulation = {to["dmodulation"].data(), 2 * C};
        layers.groupnorm_silu_backward(s.joined(to["dx"], to["dx2"]), s.tensor(dout), trained, options);
    });
}

static void compare_attention(Verdict* verdict, LayerShape s, int heads) {
    std::vector<float> qkv = s.normals(1, 3 * s.C), dout = s.normals(2, s.C), out = unwritten(dout.size()),
                       lse = unwritten((size_t)s.B * heads * s.H * s.W);
    cpu::plain::attention_forward(s.tensor(out), lse.data(), s.tensor(qkv), heads);
    std::string name = s.name() + text(" heads %d", heads);

    Written forward = {{"out", unwritten(out.size())}, {"lse", unwritten(lse.size())}};
    compare(verdict, name, forward, [&](auto layers, Written& to) {
        layers.attention_forward(s.tensor(to["out"]), to["lse"].data(), s.tensor(qkv), heads);
    });
    compare(verdict, name, {{"dqkv", unwritten(qkv.size())}}, [&](auto layers, Written& to) {
        layers.attention_backward(s.tensor(to["dqkv"]), s.tensor(dout), s.tensor(out), lse.data(), s.tensor(qkv),
                                  heads);
    });
}

static void test_plain_layers() {
    Verdict conv3x3(5e-6), conv1x1(1e-6), groupnorm(2e-6), attention(3e-6);
    // the last shapes need two passes, tasks of many outputs and of many tiles, and a norm's second tile
    const LayerShape shapes[] = {{1, 1, 1, 1, 0, 1},    {2, 1, 5, 3, 5, 2},    {1, 7, 2, 8, 16, 40},
                                 {3, 5, 3, 40, 24, 17}, {2, 9, 11, 32, 64, 8}, {1, 3, 3, 520, 8, 24},
                                 {1, 4, 5, 24, 0, 150}, {5, 15, 17, 16, 8, 8}};
    for (const LayerShape& s : shapes)
        for (bool adds : {false, true}) {
            compare_conv3x3(&conv3x3, s, adds);
            compare_conv1x1(&conv1x1, s, adds);
        }
    for (bool silu : {false, true})
        for (bool adds : {false, true}) {
            compare_groupnorm(&groupnorm, {1, 1, 3, 8, 0, 0}, 1, silu, adds);
            compare_groupnorm(&groupnorm, {2, 5, 3, 24, 0, 0}, 3, silu, adds);
            compare_groupnorm(&groupnorm, {3, 15, 17, 40, 56, 0}, 2, silu, adds);
            compare_groupnorm(&groupnorm, {1, 16, 16, 136, 0, 0}, 34, silu, adds);
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
// 4  GRADIENTS BY FINITE DIFFERENCES
// ===========================================================================================================

// The derivative of the loss along `direction` by central differences, with the h^2 term removed.
static double slope_along(Model* m, int B, const std::vector<float>& weights,
                          const std::vector<float>& direction, double h) {
    std::vector<float> moved(weights.size());
    auto loss_at = [&](double distance) {
        for (size_t i = 0; i < weights.size(); i++) moved[i] = (float)(weights[i] + distance * direction[i]);
        backend_upload(m->master, moved.data(), moved.size() * sizeof(float));
        return forward_loss(m, B);
    };
    double near = (loss_at(h) - loss_at(-h)) / (2 * h), far = (loss_at(2 * h) - loss_at(-2 * h)) / (4 * h);
    backend_upload(m->master, weights.data(), weights.size() * sizeof(float));
    return (4 * near - far) / 3;
}

static void test_finite_differences() {
    const int B = 2;
    set_threads(1);  // so small a network only waits for more
    Model m = Model();
    build_model(&m, config_of(toy_flags()), B, true);
    perturbed_weights(&m, 11);
    random_batch(&m, B, 12);
    size_t P = m.plan.num_floats;
    std::vector<float> weights = downloaded(m.master, P), direction(P);
    backend_zero(m.gradients, P * sizeof(float));
    forward_loss(&m, B);
    unet_backward(&m, B, m.gradients);
    std::vector<float> gradient = gradients_of(&m);

    double worst = 0, norm = 0;
    for (float g : gradient) norm += (double)g * g;
    norm = sqrt(norm);
    for (int k = 0; k < 10; k++) {  // random directions, each with a share of the gradient so that it slopes
        std::vector<float> random = normals_of(100 + k, P);
        double expected = 0;
        for (size_t i = 0; i < P; i++) {
            direction[i] = (float)(random[i] / sqrt((double)P) + 0.5 * gradient[i] / norm);
            expected += (double)direction[i] * gradient[i];
        }
        double error = fabs(slope_along(&m, B, weights, direction, 0.02) / expected - 1);
        if (worsens(error, worst)) worst = error;
    }
    report(worst < 1e-3, "finite differences, all weights", "10 random directions, worst relative error %.2g",
           worst);

    // Each tensor along its own gradient, and two of its elements: the largest and one picked at random.
    worst = 0;
    double worst_element = 0;
    std::string where, where_element;
    Dice dice{9};
    for (const Parameter& t : m.plan.tensors) {
        double length = 0, largest = 0;
        size_t top = t.offset, picked = t.offset;
        for (size_t i = t.offset; i < t.offset + t.count; i++) {
            length += (double)gradient[i] * gradient[i];
            if (fabs(gradient[i]) > largest) largest = fabs(gradient[i]), top = i;
        }
        length = sqrt(length);
        if (!(length > 1e-6 * norm)) {
            where = t.name, worst = NAN;  // a tensor without a gradient: the test would prove nothing
            continue;
        }
        std::fill(direction.begin(), direction.end(), 0.0f);
        for (size_t i = t.offset; i < t.offset + t.count; i++) direction[i] = (float)(gradient[i] / length);
        double expected = 0;
        for (size_t i = t.offset; i < t.offset + t.count; i++) expected += (double)direction[i] * gradient[i];
        double h = std::min(0.05, 0.01 / length),
               error = fabs(slope_along(&m, B, weights, direction, h) / expected - 1);
        if (worsens(error, worst)) worst = error, where = t.name;

        for (int attempt = 0; attempt < 100 && !(fabs(gradient[picked]) > 0.1 * largest); attempt++)
            picked = t.offset + dice.below((uint32_t)t.count);
        if (!(fabs(gradient[picked]) > 0.1 * largest)) picked = top;
        for (size_t i : {top, picked}) {
            std::fill(direction.begin(), direction.end(), 0.0f);
            direction[i] = 1;
            double slope = slope_along(&m, B, weights, direction, 0.05);
            error = fabs(slope - gradient[i]) / std::max(largest, 1e-3 * norm);
            if (worsens(error, worst_element)) worst_element = error, where_element = t.name;
        }
    }
    report(worst < 5e-3, "finite differences, each tensor", "%zu tensors, worst relative error %.2g (%s)",
           m.plan.tensors.size(), worst, where.c_str());
    report(worst_element < 1e-2, "finite differences, elements",
           "2 of each tensor, worst error %.2g of its largest gradient (%s)", worst_element,
           where_element.c_str());
    set_threads(TEST_THREADS);
}

// ===========================================================================================================
// 5  PLAN
// ===========================================================================================================

// The first two of a plan's buffers that share memory at some moment, or one that leaves the arena.
static std::string collision(Plan* plan) {
    std::vector<std::pair<Buffer*, std::string>> buffers;
    static const char* const NAMES[] = {"out",      "hidden",  "inner",        "moments", "stats",
                                        "gradient", "scratch", "scratch back", "late"};
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
            if (a.first <= b.last && b.first <= a.last && a.offset < b.offset + b.bytes &&
                b.offset < a.offset + a.bytes)
                return buffers[i].second + " and " + buffers[j].second;
        }
    }
    return "";
}
static void test_plan() {
    Plan plan = make_plan(default_config(), 32, true);
    bool chained = true;
    size_t offset = 0;
    std::vector<std::string> names;
    std::vector<Parameter> tensors = plan.tensors;
    std::sort(tensors.begin(), tensors.end(),
              [](const Parameter& a, const Parameter& b) { return a.offset < b.offset; });
    for (const Parameter& t : tensors) {
        chained &= t.offset == offset && t.count > 0 && t.size >= t.count;
        offset += t.size;
        names.push_back(t.name);
    }
    std::sort(names.begin(), names.end());
    chained &= offset == plan.num_floats && std::unique(names.begin(), names.end()) == names.end();
    report(plan.num_parameters == 20494211 && chained, "plan of the default model",
           "%zu parameters in %zu tensors, without gaps, each name once", plan.num_parameters,
           plan.tensors.size());

    // Buffers in use at the same moment lie apart and within the arena; the check finds one that does not.
    Config small = default_config(), wide = default_config();
    small.image_size = 8, wide.image_size = 256;
    for (const Config& config : {default_config(), small, wide})
        for (bool training : {true, false}) {
            Plan p = make_plan(config, 3, training);
            std::string where = collision(&p);
            report(where.empty(), "places of the buffers", "image size %d, %s: %s in the arena%s%s",
                   config.image_size, training ? "training" : "drawing",
                   human_bytes((double)p.arena_bytes).c_str(), where.empty() ? "" : "; ", where.c_str());
            Block &last = p.blocks[p.blocks.size() - 1], &before = p.blocks[p.blocks.size() - 2];
            last.out.offset = before.out.offset + before.out.bytes / 2;
            report(!collision(&p).empty(), "a planted collision of buffers", "is found");
        }
}

// Runs one step of many configurations at tiny sizes. take() stops the program where the scratch that the
// plan counted does not suffice; poisoned arenas show that nothing is read before it is written.
static void test_configurations() {
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
    Dice dice{4};
    for (int i = 0; i < 14; i++) {
        static const char* const mults[] = {"1", "2", "1,2", "2,1", "1,1,2", "3,1,2", "1,2,3"};
        static const char* const groups[] = {"1", "2", "4", "8", "16"};
        static const char* const heads[] = {"4", "8", "16", "32"};
        static const char* const sizes[] = {"4", "8", "12", "16"};
        static const char* const attention[] = {"0", "16,8,4,2", "4", "8"};
        list.push_back({{"image_size", sizes[dice.below(4)]},
                        {"channel_mult", mults[dice.below(7)]},
                        {"norm_groups", groups[dice.below(5)]},
                        {"num_head_channels", heads[dice.below(4)]},
                        {"attention_resolutions", attention[dice.below(4)]},
                        {"num_res_blocks", text("%d", 1 + dice.below(3))}});
        for (const char* option : {"resblock_updown", "conv_resample", "use_scale_shift_norm", "learn_sigma"})
            list.back().push_back({option, text("%d", dice.below(2))});
    }
    set_threads(1);
    int runs = 0, found[2] = {};
    std::string bad;
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
        int batch = 1 + (int)(i % 4), used = std::max(1, batch - 1);
        Model exact = Model(), roomy = Model(), inference = Model();
        build_model(&exact, config, used, true);
        build_model(&roomy, config, batch, true);  // B may be less than the plan's batch
        build_model(&inference, config, used, false);
        std::vector<float> output[3], gradient[2];
        Model* models[] = {&exact, &roomy, &inference};
        for (int k = 0; k < 3; k++) {
            Model* m = models[k];
            perturbed_weights(m, 3);
            random_batch(m, used, 4);
            if (k) poison(m);
            double loss = forward_loss(m, used);
            output[k] = output_values(m, used);
            if (!std::isfinite(loss)) bad = described + ": forward";
            if (k == 2) continue;
            memset(m->gradients, k ? 255 : 0,
                   m->plan.num_floats * sizeof(float));  // what is there is overwritten
            unet_backward(m, used, m->gradients);
            gradient[k] = gradients_of(m);
            double sum = 0;
            for (float g : gradient[k]) sum += fabs(g);
            if (!(sum > 0 && std::isfinite(sum))) bad = described + ": backward";
        }
        if (output[0] != output[1] || gradient[0] != gradient[1])
            bad = described + ": poisoned memory or a larger plan changes the result";
        if (output[0] != output[2]) bad = described + ": an inference plan changes the output";
        // What the side stream reads late is still there; not so where the plan forgets that it does.
        auto same_with = [&](SideStream when) {
            poison(&exact);
            backend_zero(exact.gradients, exact.plan.num_floats * sizeof(float));
            side_stream = when;
            forward_loss(&exact, used);
            unet_backward(&exact, used, exact.gradients);
            side_stream = AT_ONCE;
            return output_values(&exact, used) == output[0] && gradients_of(&exact) == gradient[0];
        };
        if (!same_with(LATE) || !same_with(ANY_TIME))
            bad = described + ": a late side stream changes the result";
        for (bool hidden : {true, false}) {  // first those of h alone, then also what comes late
            for (Block& block : exact.plan.blocks) {
                (hidden ? block.hidden : block.late).last -= !hidden || block.kind == BLOCK_RES;
                for (Buffer* buffer : buffers_of(&block)) buffer->offset = 0;
            }
            place_buffers(&exact.plan);
            found[hidden] += !same_with(LATE);
        }
        for (Model* m : models) *m = Model();
        runs++;
    }
    report(bad.empty(), "configurations", "%d run forward and backward in poisoned memory%s", runs,
           bad.empty() ? "" : (", but" + bad).c_str());
    report(found[0] == runs && found[1] > runs / 3, "planted lifetimes",
           "that end too early are found in %d of %d, those of h alone in %d", found[0], runs, found[1]);
    set_threads(TEST_THREADS);
}

static void test_refusals() {
    const struct {
        Flags flags;
        const char* says;
    } list[] = {
        {{{"num_channels", "48"}}, "multiple of 32"},
        {{{"image_size", "36"}}, "halved"},
        {{{"image_size", "64"}, {"channel_mult", "1,1,1,1,1,1,1,1"}}, "halved"},
        {{{"num_channels", "32"}}, "use 8"},
        {{{"num_channels", "32"}, {"norm_groups", "5"}}, "must divide"},
        {{{"norm_groups", "64"}}, "time embedding"},
        {{{"num_head_channels", "40"}}, "--num_head_channels 40"},
        {{{"attention_resolutions", "32"}, {"num_head_channels", "256"}}, "32x32"},
        {{{"num_channels", "1024"}, {"channel_mult", "1,2,3,9"}}, "8192"},
        {{{"image_size", "1024"}, {"attention_resolutions", "1024"}},
         "attention"},  // more than a thread holds
        {{{"image_size", "736"}, {"channel_mult", "1"}}, "attention"},
        {{{"sample_steps", "1001"}}, "--diffusion_steps 1000"},
        {{{"num_channels", "64.5"}}, "whole number"},
        {{{"num_channels", "0"}}, "between"},
        {{{"num_channels", "999999999999"}}, "between"},
        {{{"lr", "fast"}}, "a number"},
        {{{"lr", "nan"}}, "a number"},
        {{{"lr", ""}}, "a number"},
        {{{"lr", "1e-4x"}}, "a number"},
        {{{"lr", "1e-60"}}, "(a float)"},
        {{{"lr", "-1e-39"}}, "(a float)"},
        {{{"lr", "1e60"}}, "between"},
        {{{"ema_rate", "0.9,1e-40"}}, "(a float)"},
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
    };
    int refused = 0;
    std::string bad;
    for (auto& entry : list) {
        std::string message = refusal([&] { check_config(config_of(entry.flags)); });
        bool ok = is_sentence(message) && message.find(entry.says) != std::string::npos;
        if (ok) refused++;
        else
            bad += text(" --%s %s: '%s'", entry.flags.back().first.c_str(),
                        entry.flags.back().second.substr(0, 30).c_str(), message.c_str());
    }
    report(bad.empty(), "refusals", "%d configurations, each with one sentence%s", refused, bad.c_str());

    bool good = true;  // and nothing that works is refused
    for (const Flags& flags :
         {Flags(), toy_flags(), Flags{{"num_channels", "32"}, {"norm_groups", "16"}},
          Flags{{"attention_resolutions", "0"}}, Flags{{"channel_mult", "1"}}, Flags{{"ema_rate", "0"}},
          Flags{{"lr", "1.2e-38"}}, Flags{{"adam_eps", "1e-20"}}, Flags{{"diffusion_steps", "21"}},
          Flags{{"num_samples", "0"}}, Flags{{"diffusion_steps", "2"}, {"noise_schedule", "cosine"}},
          Flags{{"ema_rate", "0.9,0.99"}, {"use_ema", "2"}},
          Flags{{"image_size", "1024"}, {"channel_mult", "1,1,1,1,1,1,1,1"}}})
        good &= refusal([&] { check_config(config_of(flags)); }).empty();
    for (const Preset& preset : PRESETS) {
        Config config = given_config(parse_flags({"--preset", preset.name}));
        good &= refusal([&] { check_config(config); }).empty();
    }
    report(good, "presets", "and other sound configurations are let through");

    // Random words as a command line: an answer or one sentence, and what is let through has a plan.
    Dice dice{21};
    int accepted = 0, rejected = 0;
    std::string wrong;
    static const char* const values[] = {"0",
                                         "1",
                                         "-1",
                                         "8",
                                         "32",
                                         "64",
                                         "1e9",
                                         "1e-9",
                                         "2147483648",
                                         "x",
                                         "",
                                         "1,2",
                                         "1,2,3,4",
                                         ",",
                                         "eps",
                                         "v",
                                         "nan",
                                         "inf",
                                         "--",
                                         "0x10",
                                         "cosine",
                                         "999999999999999999999",
                                         "1,1,1,1,1,1,1,1",
                                         "4"};
    for (int i = 0; i < 20000; i++) {
        std::vector<std::string> words;
        for (int k = 1 + dice.below(3); k > 0; k--) {
            std::string flag = FLAGS[dice.below((uint32_t)std::size(FLAGS))].name;
            if (dice.one_in(20) && !flag.empty()) flag[dice.below((uint32_t)flag.size())] = (char)dice.next();
            std::string value = values[dice.below(sizeof values / sizeof *values)];
            if (dice.one_in(2)) words.push_back("--" + flag + "=" + value);
            else words.push_back("--" + flag), words.push_back(value);
        }
        std::string message = refusal([&] {
            Config config = given_config(parse_flags(words));
            check_config(config);
            Plan plan = make_plan(config, config.batch_size, true);
            if (plan.blocks.empty() || !plan.num_parameters) fail("!! no plan");
            make_sampler(config);
        });
        message.empty() ? accepted++ : rejected++;
        std::string printable = message;  // what the user typed may be any bytes
        for (char& c : printable) c = (unsigned char)c < ' ' || c == 127 ? '?' : c;
        if (!message.empty() && !is_sentence(printable)) wrong = message;
    }
    report(wrong.empty() && accepted > 1000 && rejected > 1000, "random command lines",
           "%d accepted, %d refused with one sentence each%s", accepted, rejected, wrong.c_str());
}

// ===========================================================================================================
// 6  THREADS AND BATCHES
// ===========================================================================================================

static Dataset random_images(int count, int size, uint32_t seed) {
    Dataset data;
    data.count = count;
    data.bytes.resize((size_t)count * 3 * size * size);
    for (size_t i = 0; i < data.bytes.size(); i++) data.bytes[i] = random_word(seed, 1003, i, 0, 0) >> 24;
    return data;
}

static void test_threads() {
    std::vector<std::vector<float>> weights;
    std::vector<double> losses;
    const int counts[] = {1, 2, 3, 4};
    for (int threads : counts) {
        set_threads(threads);
        Trainer t;
        // large enough for every sum to be formed in several blocks
        Config config = config_of(
            with(toy_flags(), {{"image_size", "16"}, {"batch_size", "3"}, {"flip", "1"}, {"predict", "v"}}));
        build_model(&t.model, config, config.batch_size, true);
        perturbed_weights(&t.model, 1);
        t.images = random_images(7, 16, 5);
        prepare_steps(&t);
        double sum = 0;
        for (int step = 0; step < 3; step++) {
            StepState result = train_step(&t);
            sum += (double)result.loss + result.norm;
        }
        losses.push_back(sum);
        weights.push_back(downloaded(t.model.master, t.model.plan.num_floats));
        std::vector<float> ema = downloaded(t.model.ema[0], t.model.plan.num_floats);
        weights.back().insert(weights.back().end(), ema.begin(), ema.end());
    }
    set_threads(TEST_THREADS);
    bool same = std::isfinite(losses[0]);
    for (size_t i = 1; i < weights.size(); i++)
        same &= losses[i] == losses[0] &&
                same_bits(weights[i].data(), weights[0].data(), weights[0].size() * sizeof(float));
    report(same, "threads", "3 training steps with 1, 2, 3 and 4 threads give the same bits");
}

static void test_batches() {
    const int B = 5;
    Config config = config_of(toy_flags());
    Model m = Model();
    build_model(&m, config, B, true);
    perturbed_weights(&m, 8);
    size_t image = (size_t)PIXEL * 8 * 8, P = m.plan.num_floats;
    std::vector<float> input = random_pixels(31, B * 64, 3), dout = random_pixels(32, B * 64, 3);
    std::vector<int> timesteps = {0, 999, 17, 500, 250};
    // images [first, first + n) forward and backward
    auto run = [&](int first, int n) {
        backend_upload(m.input, &input[first * image], n * image * sizeof(float));
        backend_upload(m.timesteps, &timesteps[first], n * sizeof(int));
        unet_forward(&m, n);
        backend_upload(output_gradient_of(&m, m.plan.blocks.back(), n).data, &dout[first * image],
                       n * image * sizeof(float));
        unet_backward(&m, n, m.gradients);
        return output_values(&m, n);
    };
    std::vector<float> whole = run(0, B), gradient = gradients_of(&m), sum(P), parts;
    for (auto [first, n] : {std::pair<int, int>{0, 2}, {2, 1}, {3, 2}}) {
        std::vector<float> part = run(first, n), more = gradients_of(&m);
        parts.insert(parts.end(), part.begin(), part.end());
        for (size_t i = 0; i < P; i++) sum[i] += more[i];
    }
    double outputs = error_of(parts, whole), gradients = error_of(sum, gradient);
    report(outputs < 1e-6 && gradients < 2e-6, "micro-batches",
           "2 + 1 + 2 images instead of 5: outputs differ by %.2g, sums of the gradients by %.2g", outputs,
           gradients);
    std::vector<float> changed = input;  // no image sees another
    for (size_t i = 2 * image; i < 3 * image; i++) changed[i] += 1;
    std::swap(input, changed);
    std::vector<float> other = run(0, B);
    bool apart = same_bits(&other[0], &whole[0], 2 * image * sizeof(float)) &&
                 same_bits(&other[3 * image], &whole[3 * image], 2 * image * sizeof(float)) &&
                 !same_bits(&other[2 * image], &whole[2 * image], image * sizeof(float));
    report(apart, "images of a batch", "changing one leaves the others' outputs as they were, to the bit");
}

// Images drawn alone and in batches are the same, whatever their number.
static void test_sampling() {
    bool same = true;
    double worst = 0;
    for (Flags how : {Flags{{"sampler", "ddim"}}, Flags{{"sampler", "ddpm"}}, Flags{{"sampler", "dpmpp"}},
                      Flags{{"sampler", "heun"}}, Flags{{"eta", "0.5"}}}) {
        Config config = config_of(
            with(with(toy_flags(), {{"sample_steps", "5"}, {"predict", "v"}, {"ema_rate", "0"}}), how));
        std::vector<std::vector<float>> drawn;
        size_t n = (size_t)PIXEL * 8 * 8;
        for (int batch : {1, 3}) {
            Model m = Model();
            build_model(&m, config, batch, false);
            perturbed_weights(&m, 2);
            std::vector<float> pictures, one;
            same &= sample(&m, &pictures, specs_of({100, 5, 102, 7}), false) &&
                    sample(&m, &one, specs_of({102}), false);
            double error =
                error_of(std::vector<float>(pictures.begin() + 2 * n, pictures.begin() + 3 * n), one);
            if (worsens(error, worst)) worst = error;
            for (float value : pictures) same &= value >= -3 && value <= 3;
            drawn.push_back(pictures);
        }
        double error = error_of(drawn[0], drawn[1]);
        if (worsens(error, worst)) worst = error;
        same &= !same_bits(&drawn[0][0], &drawn[0][n], n * sizeof(float));
    }
    report(same && worst < 1e-5, "pictures", "drawn alone or in batches, from any seeds: %.2g apart", worst);
}

// ===========================================================================================================
// 7  FILE READERS
// ===========================================================================================================

// The smallest network that the flags allow: its files are read thousands of times.
static Flags smallest_flags() {
    return {{"image_size", "4"},
            {"num_channels", "32"},
            {"channel_mult", "1"},
            {"num_res_blocks", "1"},
            {"attention_resolutions", "0"},
            {"norm_groups", "8"},
            {"num_head_channels", "8"},
            {"batch_size", "3"}};
}

enum FileKind { NEW_IMAGES, LABELLED_IMAGES, OLD_IMAGES, WEIGHTS, CHECKPOINT, FILE_KINDS };
static const char* const KIND_NAMES[] = {"images", "labelled images", "old images", "weights", "checkpoint"};

// A valid file on the disk that is changed in place, read, and mended.
struct Victim {
    FileKind kind;
    std::string path;
    int image_size;  // asked for when reading images; 0: theirs
    int fd;
    size_t size;
    std::vector<char> content;
    Section settings;  // of weights, the section config
    uint32_t data_checksum;
    int checksum_field() const {
        return kind == NEW_IMAGES || kind == LABELLED_IMAGES ? (int)IMAGES_CHECKSUM_FIELD
               : kind == WEIGHTS || kind == CHECKPOINT       ? (int)FIELD_CHECKSUM
                                                             : -1;
    }
};

static std::string test_folder;

static std::string file_text(const std::string& path) {
    std::string content;
    FILE* f = fopen(path.c_str(), "rb");
    char buffer[65536];
    for (size_t n; f && (n = fread(buffer, 1, sizeof buffer, f)) > 0;) content.append(buffer, n);
    if (f) fclose(f);
    return content;
}

// What `act` prints on stderr.
static std::string stderr_of(const std::function<void()>& act) {
    std::string path = test_folder + "/stderr";
    fflush(stderr);
    int kept = dup(2), file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0666);
    assert(kept >= 0 && file >= 0);
    dup2(file, 2), close(file);
    act();
    fflush(stderr);
    dup2(kept, 2), close(kept);
    return file_text(path);
}

static size_t files_in(const std::string& folder) {
    size_t count = 0;
    DIR* dir = opendir(folder.c_str());
    while (dir && readdir(dir)) count++;
    if (dir) closedir(dir);
    return count;
}

static void write_whole(const std::string& path, const std::vector<char>& content, size_t size) {
    FILE* f = fopen(path.c_str(), "wb");
    assert(f && fwrite(content.data(), 1, content.size(), f) == content.size());
    assert(fflush(f) == 0 && ftruncate(fileno(f), (off_t)size) == 0);
    fclose(f);
}

static void seal(std::vector<char>* content, int checksum_field) {
    int32_t header[HEADER_INTS];
    memcpy(header, content->data(), sizeof header);
    header[checksum_field] = 0;
    uint32_t crc = crc32(content->data() + HEADER_BYTES, content->size() - HEADER_BYTES);
    header[checksum_field] = (int32_t)crc32(header, sizeof header, crc);
    memcpy(content->data(), header, sizeof header);
}

// [magic, N, C, H, W, version, type, classes, bytes of names, checksum], then the data: see FORMATS.md.
static std::vector<char> image_file(int N, int size, bool old, bool labels) {
    std::string names = labels ? "cat\ndog\n" : "";
    int32_t header[HEADER_INTS] = {IMAGES_MAGIC, N, 3, size, size};
    size_t pixels = (size_t)N * 3 * size * size;
    std::vector<char> content(HEADER_BYTES);
    if (old) {
        std::vector<float> values(pixels);
        for (size_t i = 0; i < pixels; i++)
            values[i] = (float)(random_word(1, 1004, i, 0, 0) >> 8) * 0x1p-23f - 1;
        content.insert(content.end(), (char*)values.data(), (char*)(values.data() + pixels));
    } else {
        for (size_t i = 0; i < pixels; i++) content.push_back((char)(random_word(1, 1004, i, 0, 0) >> 24));
        for (int32_t i = 0; labels && i < N; i++) {
            int32_t label = i % 2;
            content.insert(content.end(), (char*)&label, (char*)(&label + 1));
        }
        content.insert(content.end(), names.begin(), names.end());
        header[5] = 1, header[6] = 1, header[7] = labels ? 2 : 0, header[8] = (int32_t)names.size();
    }
    memcpy(content.data(), header, sizeof header);
    if (!old) seal(&content, IMAGES_CHECKSUM_FIELD);
    return content;
}

static Config smallest_config() {
    Config config = config_of(smallest_flags());
    strcpy(config.data_file, "some/images.bin");
    config.optimiser.lr_steps = 123, config.seed = 4000000000u, config.predict = PREDICT_V, config.flip = 1;
    config.optimiser.lr = 0.00123f, config.optimiser.warmup_steps = 7,
    config.noise_schedule = SCHEDULE_COSINE;
    config.optimiser.ema_rate[1] = 0.9999f, config.use_ema = 2, config.optimiser.grad_clip = 1.5f,
    config.optimiser.skip_outliers = 6;
    config.optimiser.lr_schedule = LR_LINEAR, config.optimiser.final_lr_fraction = 0.1f;
    return config;
}

// After 40 steps of which 3 were skipped.
static History some_history() {
    History history = {3, 37, {}, {}};
    for (int i = 0; i < 37; i++) history.losses[i] = 1 / (1.0f + i), history.norms[i] = 0.5f + i;
    return history;
}

// A file of every kind: checkpoints by the program's own writer, the others by hand.
static Victim make_victim(FileKind kind, int image_size = 0) {
    Victim v = {};
    v.kind = kind, v.image_size = image_size;
    v.path = text("%s/victim_%d_%d.bin", test_folder.c_str(), kind, image_size);
    std::vector<char> content;
    v.size = 0;
    if (kind == NEW_IMAGES || kind == LABELLED_IMAGES || kind == OLD_IMAGES) {
        content = image_file(kind == OLD_IMAGES ? 9 : 33, 8, kind == OLD_IMAGES, kind == LABELLED_IMAGES);
        write_whole(v.path, content, content.size());
    } else {
        Model m = Model();
        build_model(&m, smallest_config(), 1, kind == CHECKPOINT);
        perturbed_weights(&m, 5);
        for (size_t i = 0; kind == CHECKPOINT && i < m.plan.num_floats; i++)
            m.adam_m[i] = (float)i, m.adam_v[i] = 2 * (float)i;
        if (kind == WEIGHTS) m.ema[0] = m.ema[1] = nullptr;
        else m.data_checksum = "0123abcd";
        write_checkpoint(v.path, m, 40, 0.25f, some_history());
        std::string written = file_text(v.path);
        content.assign(written.begin(), written.end());
        v.settings = open_weights(v.path).sections["config"];
    }
    if (!v.size) v.size = content.size();
    v.data_checksum = crc32(content.data() + HEADER_BYTES, content.size() - HEADER_BYTES);
    v.content.swap(content);
    v.fd = open(v.path.c_str(), O_RDWR);
    assert(v.fd >= 0);
    return v;
}

// What a program does with such a file, and what must then hold. Returns what is wrong, "" where nothing is.
static std::string use_file(const Victim& v, bool read_data) {
    if (v.kind <= OLD_IMAGES) {
        Config config = {};
        config.image_size = v.image_size ? v.image_size : Reader(v.path).header[3], config.in_channels = 3;
        Dataset data = read_images(v.path, config);
        size_t elements = (size_t)3 * config.image_size * config.image_size;
        if (data.count < 1 || data.bytes.size() + data.floats.size() != data.count * elements)
            return "a set of images with wrong sizes";
        std::vector<float> image(elements);
        for (int index : {0, data.count - 1}) {
            for (size_t e = 0; e < image.size(); e++) image[e] = data.value(index * image.size() + e);
            for (float value : image)
                if (!(value >= -1.01f && value <= 1.01f)) return "a pixel outside [-1, 1]";
        }
        return "";
    }
    WeightsFile file = open_weights(v.path);
    std::string bad = refusal([&] { check_config(file.config); });
    if (!bad.empty()) return "a configuration that is refused: " + bad;
    Config stored = default_config();
    read_stored_config(&stored, stored_config(file.config), v.path);
    for (const Flag& flag : FLAGS)
        if (flag.on_resume != FORGOTTEN && flag_text(stored, flag) != flag_text(file.config, flag))
            return text("another %s when it is stored again", flag.name);
    Plan plan = make_plan(file.config, 1, false);
    if (!file.sections.contains("weights") || file.step < 0) return "no weights or a negative step";
    for (const SamplerStep& s : make_sampler(file.config))
        if (!std::isfinite(s.x0_from_x + s.x0_from_out + s.update.x0 + s.update.x))
            return "a sampler that is no numbers";
    std::string written = config_text(file.config), again = test_folder + "/config_of_file.txt";
    write_whole(again, std::vector<char>(written.begin(), written.end()), written.size());
    if (config_text(given_config(read_config_file(again))) != written) return "a configuration that changes";
    for (const char* section : {"weights", "ema", "ema_2", "ema_3", "ema_4", "adam_m", "adam_v"}) {
        if (!file.sections.contains(section)) continue;
        auto [offset, bytes] = file.sections.at(section);
        if (bytes != plan.num_parameters * sizeof(float) || offset < HEADER_BYTES)
            return text("a section %s of a wrong length", section);
        if (!read_data) continue;
        std::vector<float> values(plan.num_floats);
        read_parameters(plan_model(file.config, 1, false), values.data(), file, section);
        if (!all_finite(values.data(), values.size()))
            return text("a section %s that is no numbers", section);
    }
    return "";
}

struct Tally {
    long accepted = 0, refused = 0;
    double slowest = 0;
    size_t most_memory = 0;  // beyond the file's size
    std::string bad;
};

// Reads the file as it now lies on the disk. `sealed`: its checksum is right (or it has none).
static void read_victim(const Victim& v, size_t size, bool sealed, bool read_data, const std::string& what,
                        Tally* tally) {
    // The plan of the widest and deepest network a header can describe, error messages, and the buffer that a
    // file is read through; the data themselves may be held twice while they are filtered or put in order.
    const size_t allowance = 1 << 20;
    size_t before = live_bytes, limit = 2 * std::min(size, (size_t)64 << 20) + allowance;
    peak_bytes = before, largest_request = 0, allocation_limit = limit;
    alarm(600);  // even on the busiest machine
    double start = seconds_now();
    std::string wrong, message = refusal([&] { wrong = use_file(v, read_data); });
    double elapsed = seconds_now() - start;
    alarm(0);
    allocation_limit = SIZE_MAX;
    size_t used = peak_bytes - before;
    tally->slowest = std::max(tally->slowest, elapsed);
    tally->most_memory = std::max(tally->most_memory, used > 2 * size ? used - 2 * size : 0);
    message.empty() ? tally->accepted++ : tally->refused++;
    if (!message.empty() && !is_sentence(message)) wrong = "says '" + message + "'";
    if (message.empty() && !sealed) wrong = "accepted though its checksum is wrong";
    if (used > limit || largest_request > limit)
        wrong = text("takes %zu bytes of memory for a file of %zu", std::max(used, (size_t)largest_request),
                     size);
    if (!wrong.empty() && tally->bad.empty())
        tally->bad = text("; %s, %s: %s", KIND_NAMES[v.kind], what.c_str(), wrong.c_str());
}

static void put(const Victim& v, size_t offset, const void* data, size_t bytes) {
    assert(pwrite(v.fd, data, bytes, (off_t)offset) == (ssize_t)bytes);
}

// The header with its checksum made right again.
static void seal_header(const Victim& v, int32_t header[HEADER_INTS], uint32_t data_checksum) {
    int field = v.checksum_field();
    if (field < 0) return;
    header[field] = 0;
    header[field] = (int32_t)crc32(header, HEADER_BYTES, data_checksum);
}

static void report_tally(const std::string& name, const Tally& t) {
    report(t.bad.empty() && t.refused > 0, name,
           "%ld refused with one sentence, %ld read; slowest %.1f ms, at most %s beyond twice the file%s",
           t.refused, t.accepted, 1e3 * t.slowest, human_bytes((double)t.most_memory).c_str(), t.bad.c_str());
}

static void test_valid_files(std::vector<Victim>* victims) {
    int good = 0;
    std::string bad;
    for (const Victim& v : *victims) {
        std::string wrong, message = refusal([&] { wrong = use_file(v, true); });
        if (message.empty() && wrong.empty()) good++;
        else bad += text("; %s: %s%s", KIND_NAMES[v.kind], message.c_str(), wrong.c_str());
    }
    report(bad.empty(), "valid files", "%d read%s", good, bad.c_str());

    // What was written is what is read: every flag, the step, the sections, the text.
    const Victim& v = victims->at(CHECKPOINT);
    WeightsFile file = open_weights(v.path);
    Config expected = smallest_config();
    std::string differing;
    for (const Flag& flag : FLAGS)
        if (flag.on_resume != FORGOTTEN && flag_text(file.config, flag) != flag_text(expected, flag))
            differing += std::string(" ") + flag.name;
    Model m = Model();
    build_model(&m, file.config, 1, true);
    read_parameters(m, m.master, file, "weights");
    read_parameters(m, m.adam_m, file, "adam_m");
    std::vector<float> stored = downloaded(m.master, m.plan.num_floats);
    History history = some_history();
    perturbed_weights(&m, 5);
    bool same = downloaded(m.master, m.plan.num_floats) == stored && m.adam_m[77] == 77.0f &&
                file.step == 40 && file.smoothed == 0.25f && file.config.optimiser.lr_steps == 123 &&
                !strcmp(file.config.data_file, "some/images.bin") && !*file.config.val_file &&
                same_bits(&file.history, &history, sizeof history) && file.data_checksum == "0123abcd";
    write_checkpoint(test_folder + "/again.bin", m, 40, 0.25f, history);
    report(same && differing.empty(), "checkpoint, written and read", "weights, moments and every flag%s",
           differing.c_str());

    // The damaged newest checkpoint of a folder is passed over; other files there are no checkpoints.
    std::string folder = test_folder + "/run";
    make_folder(folder);
    write_whole(checkpoint_path(folder, 40), v.content, v.size);
    std::vector<char> damaged = v.content;
    damaged[damaged.size() / 2] ^= 1;
    write_whole(checkpoint_path(folder, 50), damaged, v.size);
    write_whole(checkpoint_path(folder, 60), v.content, v.size - 4096);
    write_whole(checkpoint_path(folder, 70) + ".tmp", v.content, v.size);
    write_whole(folder + "/metrics.jsonl", {0}, 1);
    std::vector<long> steps = list_checkpoints(folder);
    bool ok = steps == std::vector<long>({60, 50, 40});
    std::string message,
        notes =
            stderr_of([&] { message = refusal([&] { ok &= newest_checkpoint(folder, "").step == 40; }); });
    for (long step : {50, 60}) ok &= notes.find(checkpoint_path(folder, step)) != std::string::npos;
    unlink(checkpoint_path(folder, 40).c_str());
    std::string none;
    stderr_of([&] { none = refusal([&] { newest_checkpoint(folder, "start anew"); }); });
    report(ok && message.empty() && is_sentence(none), "newest whole checkpoint",
           "two damaged ones are named and passed over; alone they are refused");

    // Lines of steps that will be done again go; so does one that was cut short.
    std::string metrics = folder + "/metrics.jsonl", kept;
    FILE* f = fopen(metrics.c_str(), "w");
    std::string before =
        "{\"step\": 1, \"loss\": 0.5}\n{\"step\": 4, \"val_loss\": 0.5}\n{\"step\": 8, \"val_loss\": 0.25}\n"
        "{\"step\": 10, \"val_loss\": nan}\n{\"step\": 10, \"loss\": 0.25}\n";
    fprintf(f, "%srubbish\n{\"step\": 11, \"loss\": 0.1}\n{\"step\": 12, \"val_loss\": 0.1}\n",
            before.c_str());
    fprintf(f, "{\"step\": 2, \"lo");
    fclose(f);
    std::map<long, double> validated;
    {
        Metrics log;
        open_metrics(&log, metrics, read_text(metrics), 10, &validated);
        add_metrics(&log, "{\"step\": 11, \"loss\": 0.2}\n");
    }
    kept = file_text(metrics);
    bool losses =
        validated.size() == 3 && validated[4] == 0.5 && validated[8] == 0.25 && std::isnan(validated[10]);
    report(losses && kept == before + "{\"step\": 11, \"loss\": 0.2}\n", "metrics on resume",
           "%zu bytes kept, validation losses known", kept.size());
}

static void test_config_files() {
    // Whatever the flags are, the file that is written for them says the same.
    Dice dice{31};
    std::string bad, path = test_folder + "/config.txt";
    const char* const pieces[] = {" ", "#", "\"", "\\", "=", "a", "x/y", "\t", "'", "é"};
    for (int i = 0; i < 2000 && bad.empty(); i++) {
        std::string name;
        for (int k = 1 + dice.below(6); k > 0; k--) name += pieces[dice.below(10)];
        name = "x" + name + "x";
        Config config = config_of({{"data_file", name},
                                   {"out_dir", name + "é"},
                                   {"model_weights", i % 2 ? name : ""},
                                   {"lr", text("%.9g", 1e-4 * (1 + dice.below(1000000) * 1e-6))},
                                   {"seed", text("%u", dice.next())},
                                   {"attention_resolutions", i % 3 ? "16,4" : "0"},
                                   {"predict", "v"},
                                   {"flip", "1"}});
        std::string contents = config_text(config);
        write_whole(path, std::vector<char>(contents.begin(), contents.end()), contents.size());
        std::string message = refusal([&] {
            Config again = given_config(read_config_file(path));
            for (const Flag& flag : FLAGS)
                if (flag.group != OTHER && flag_text(again, flag) != flag_text(config, flag)) bad = flag.name;
        });
        if (!message.empty()) bad = message;
    }
    report(bad.empty(), "configuration, written and read", "names with spaces, quotes and #: %s",
           bad.c_str());

    const struct {
        const char *line, *flag, *value;
    } forms[] = {{"lr 1e-3", "lr", "0.001"},
                 {"  lr=1e-3  ", "lr", "0.001"},
                 {"\tlr\t=\t1e-3\r", "lr", "0.001"},
                 {"out_dir = my run # 2", "out_dir", "my run # 2"},
                 {"out_dir the \"run\" ", "out_dir", "the \"run\""},
                 {"val_file =", "val_file", ""},
                 {"val_file", "val_file", ""},
                 {"data_file = =x", "data_file", "=x"},
                 {"channel_mult 1,2", "channel_mult", "1,2"}};
    for (auto& form : forms) {
        Config config = given_config({parse_config_line(form.line, "here")});
        if (flag_text(config, flag_named(form.flag)) != form.value) bad += form.line;
    }
    report(bad.empty(), "lines of a configuration", "%zu ways to write them%s", sizeof forms / sizeof *forms,
           bad.c_str());

    // Random bytes in such a file: an answer or one sentence.
    int accepted = 0, rejected = 0;
    std::string whole = config_text(default_config());
    for (int i = 0; i < 4000; i++) {
        std::string broken = whole;
        for (int k = dice.below(3); k >= 0; k--) {
            size_t at = dice.below((uint32_t)broken.size());
            if (dice.one_in(2)) broken[at] = (char)dice.next();
            else broken.erase(at, 1 + dice.below(3));
        }
        write_whole(path, std::vector<char>(broken.begin(), broken.end()), broken.size());
        std::string message = refusal([&] { check_config(given_config(read_config_file(path))); });
        for (char& c : message) c = (unsigned char)c < ' ' || c == 127 ? '?' : c;
        message.empty() ? accepted++ : rejected++;
        if (!message.empty() && !is_sentence(message)) bad = message;
    }
    report(bad.empty() && accepted > 300 && rejected > 300, "broken configurations",
           "%d accepted, %d refused with one sentence each%s", accepted, rejected, bad.c_str());
}

static void test_corrupted_fields(const std::vector<Victim>& victims) {
    Tally tally;
    Dice dice{6};
    running = "header fields";
    for (const Victim& v : victims) {
        const int32_t* header = (const int32_t*)v.content.data();
        for (int field = 0; field < HEADER_INTS; field++) {
            if (v.kind == CHECKPOINT && field > 175) break;  // as in a file of weights alone, read at length
            int32_t value = header[field];
            const int32_t values[] = {0,
                                      -1,
                                      1,
                                      INT_MAX,
                                      INT_MIN,
                                      (int32_t)((uint32_t)value + 1),
                                      (int32_t)((uint32_t)value - 1),
                                      (int32_t)dice.next(),
                                      (int32_t)dice.below(100),
                                      0x7FC00000 /* NaN */};
            int tried = 0;
            for (int32_t changed : values) {
                // three values will do for a field of a long file that means nothing
                if (v.kind >= WEIGHTS && !value && field > FIELD_LR_STEPS && ++tried > 3) break;
                if (changed == value) continue;
                std::string what = text("field %d = %d", field, changed);
                for (bool sealed : {false, true}) {
                    if (sealed != (v.checksum_field() < 0) && !sealed && v.kind == CHECKPOINT) continue;
                    if (!sealed && v.checksum_field() < 0) continue;
                    int32_t copy[HEADER_INTS];
                    memcpy(copy, header, sizeof copy);
                    copy[field] = changed;
                    if (sealed) seal_header(v, copy, v.data_checksum);
                    put(v, 0, copy, sizeof copy);
                    read_victim(v, v.size, sealed || same_bits(copy, header, sizeof copy), false, what,
                                &tally);
                }
            }
        }
        put(v, 0, v.content.data(), HEADER_BYTES);
        // fields without a meaning are of no interest to the old format
        if (v.kind == OLD_IMAGES) {
            Tally ignored;
            for (int field = 10; field < HEADER_INTS; field++) {
                int32_t copy[HEADER_INTS];
                memcpy(copy, header, sizeof copy);
                copy[field] = (int32_t)dice.next();
                put(v, 0, copy, sizeof copy);
                read_victim(v, v.size, true, false, text("undefined field %d", field), &ignored);
            }
            put(v, 0, v.content.data(), HEADER_BYTES);
            if (ignored.refused && tally.bad.empty())
                tally.bad = text("; %s: an undefined field is not ignored", KIND_NAMES[v.kind]);
        }
    }
    report_tally("header fields", tally);
}

static void test_truncated_files(const std::vector<Victim>& victims) {
    Tally tally;
    running = "truncated files";
    for (const Victim& v : victims) {
        std::vector<size_t> sizes;
        for (size_t size = 0; size <= 1100; size++) sizes.push_back(size);
        for (size_t size = 4096; size < v.size; size += 4096) sizes.push_back(size);
        for (size_t less = 1; less <= 8; less++) sizes.push_back(v.size - less);
        for (size_t more : {1, 4, 4096}) sizes.push_back(v.size + more);
        std::sort(sizes.rbegin(), sizes.rend());  // shrinking in place; the file is mended afterwards
        for (size_t size : sizes) {
            if (size == v.size) continue;
            assert(ftruncate(v.fd, (off_t)size) == 0);
            read_victim(v, size, false, false, text("%zu of %zu bytes", size, v.size), &tally);
        }
        put(v, 0, v.content.data(), v.content.size());
        assert(ftruncate(v.fd, (off_t)v.size) == 0);
    }
    report(tally.accepted == 0 && tally.bad.empty(), "truncated files",
           "%ld lengths, each refused with one sentence%s", tally.refused, tally.bad.c_str());
}

static int32_t odd_value(Dice* dice, int32_t value) {
    static const float reals[] = {NAN, INFINITY, -1.0f, 1e30f, 0.0f, -0.0f, 1e-40f};
    int32_t bits;
    switch (dice->below(9)) {
        case 0: return (int32_t)dice->next();
        case 1: return (int32_t)dice->below(70);
        case 2: return -(int32_t)dice->below(3);
        case 3: return dice->one_in(2) ? INT_MAX : INT_MIN;
        case 4: return (int32_t)((uint32_t)value + dice->below(5) - 2);
        case 5: return (int32_t)(1u << dice->below(32));
        case 6: return (int32_t)((uint32_t)value << dice->below(4));
        case 7: return value ^ (int32_t)(1u << dice->below(32));
        default: memcpy(&bits, &reals[dice->below(7)], sizeof bits); return bits;
    }
}

// A mutation is a handful of edits of the header, of a section's entry, of single bytes and of the length;
// half of them leave with a checksum that is right.
static void test_mutations(const std::vector<Victim>& victims, long count, uint32_t seed) {
    Tally tally;
    Dice dice{seed};
    running = "mutations";
    long sealed_count = 0;
    for (long i = 0; i < count; i++) {
        // the files of weights are long, so their turn comes less often
        uint32_t turn = dice.below(100);
        const Victim& v = victims[turn < 24   ? (size_t)WEIGHTS
                                  : turn < 34 ? (size_t)CHECKPOINT
                                  : turn < 50 ? (size_t)NEW_IMAGES
                                  : turn < 66 ? (size_t)LABELLED_IMAGES
                                  : turn < 82 ? (size_t)OLD_IMAGES
                                              : (size_t)FILE_KINDS + turn % 2];
        int32_t header[HEADER_INTS];
        memcpy(header, v.content.data(), sizeof header);
        size_t size = v.size;
        std::vector<std::pair<size_t, char>> bytes;  // behind the header
        std::string what = text("mutation %ld of seed %u", i, seed);
        for (int edit = 1 + dice.below(4); edit > 0; edit--) switch (dice.below(8)) {
                case 0:
                case 1:
                case 2: {  // a field that means something, or a letter of a setting
                    if (v.settings.bytes && !dice.one_in(3)) {
                        static const char letters[] = "0123456789.,- =\nex";
                        size_t at = v.settings.offset + dice.below((uint32_t)v.settings.bytes);
                        bytes.push_back({at, letters[dice.below(sizeof letters - 1)]});
                        break;
                    }
                    int field = dice.below(v.kind <= OLD_IMAGES ? 10 : FIELD_LR_STEPS + 1);
                    header[field] = odd_value(&dice, header[field]);
                    break;
                }
                case 3: {  // any field
                    int field = dice.below(HEADER_INTS);
                    header[field] = odd_value(&dice, header[field]);
                    break;
                }
                case 4: {  // a section's entry: another's name, or another length
                    int32_t* entry = header + FIELD_SECTION_TABLE + SECTION_INTS * dice.below(MAX_SECTIONS);
                    const int32_t* other = header + FIELD_SECTION_TABLE + SECTION_INTS * dice.below(6);
                    if (dice.one_in(2)) memcpy(entry, other, SECTION_NAME_BYTES);
                    else entry[6 + dice.below(2)] = odd_value(&dice, other[6]);
                    break;
                }
                case 5: ((char*)header)[dice.below(HEADER_BYTES)] ^= (char)(1 << dice.below(8)); break;
                case 6: {
                    if (size <= HEADER_BYTES) break;
                    size_t at = HEADER_BYTES + dice.below((uint32_t)(v.content.size() - HEADER_BYTES));
                    bytes.push_back({at, (char)dice.next()});
                    break;
                }
                case 7: {
                    if (!dice.one_in(4)) break;
                    size = dice.one_in(2)
                               ? dice.below((uint32_t)v.size)
                               : v.size + (dice.below(17) - (size_t)8) * (dice.one_in(2) ? 1 : 512);
                    break;
                }
            }
        for (auto& [at, value] : bytes) put(v, at, &value, 1);
        bool sealed = v.checksum_field() < 0;
        if (!sealed && dice.one_in(2)) {
            sealed = true;
            uint32_t checksum = v.data_checksum;
            size_t held = std::min(size, v.content.size());
            if (!bytes.empty() || size != v.size) {
                std::vector<char> changed = v.content;
                for (auto& [at, value] : bytes) changed[at] = value;
                changed.resize(size);
                checksum =
                    held > HEADER_BYTES ? crc32(changed.data() + HEADER_BYTES, size - HEADER_BYTES) : 0;
            }
            seal_header(v, header, checksum);
        }
        put(v, 0, header, sizeof header);
        if (size != v.size) assert(ftruncate(v.fd, (off_t)size) == 0);
        bool untouched =
            bytes.empty() && size == v.size && same_bits(header, v.content.data(), sizeof header);
        for (auto& [at, value] : bytes) untouched |= v.content[at] == value;  // written over with itself
        read_victim(v, size, sealed || untouched, v.kind != CHECKPOINT, what, &tally);
        sealed_count += sealed;
        if (size != v.size) {
            assert(ftruncate(v.fd, (off_t)v.size) == 0);
            put(v, 0, v.content.data(), v.content.size());
        } else {
            put(v, 0, v.content.data(), HEADER_BYTES);
            for (auto& [at, value] : bytes) put(v, at, &v.content[at], 1);
        }
    }
    report(
        tally.bad.empty() && tally.refused > count / 4 && tally.accepted > count / 50, "mutations",
        "%ld, %ld of them with a right checksum: %ld refused with one sentence, %ld read; slowest %.1f ms%s",
        count, sealed_count, tally.refused, tally.accepted, 1e3 * tally.slowest, tally.bad.c_str());
}

// A weights file of these sections, whatever they hold, with a right table and checksum.
typedef std::vector<std::pair<std::string, std::string>> Sections;
static std::vector<char> sealed_weights(const int32_t* fields, const Sections& sections) {
    int32_t header[HEADER_INTS];
    memcpy(header, fields, sizeof header);
    memset(header + FIELD_SECTION_TABLE, 0, sizeof header - FIELD_SECTION_TABLE * sizeof(int32_t));
    header[FIELD_SECTIONS] = (int32_t)sections.size();
    std::vector<char> content(HEADER_BYTES);
    int32_t* entry = header + FIELD_SECTION_TABLE;
    for (auto& [name, data] : sections) {
        uint64_t bytes = data.size();
        memcpy(entry, name.data(), std::min(name.size(), (size_t)SECTION_NAME_BYTES));
        memcpy(entry + SECTION_NAME_BYTES / 4, &bytes, sizeof bytes);
        content.insert(content.end(), data.begin(), data.end());
        entry += SECTION_INTS;
    }
    memcpy(content.data(), header, sizeof header);
    seal(&content, FIELD_CHECKSUM);
    return content;
}

// Another line in the section config.
static void add_setting(Sections* sections, const std::string& name, const std::string& value) {
    for (auto& [section, data] : *sections)
        if (section == "config") data += name + " = " + value + "\n";
}

// Images whose header, labels, names and length fit each other or nearly do.
static std::vector<char> sealed_images(Dice* dice) {
    static const int32_t sizes[] = {1, 2, 4, 8, 9, 16};
    int32_t H = sizes[dice->below(6)], W = dice->one_in(5) ? sizes[dice->below(6)] : H,
            N = (int32_t)dice->below(5), classes = dice->one_in(2) ? (int32_t)dice->below(4) : 0,
            names = classes ? (int32_t)dice->below(40) : 0,
            header[HEADER_INTS] = {IMAGES_MAGIC, N, 3, H, W, 1, IMAGES_UINT8, classes, names};
    size_t bytes = (size_t)N * 3 * H * W + (classes ? 4 * N + names : 0);
    if (dice->one_in(4)) header[1 + dice->below(8)] = odd_value(dice, header[1 + dice->below(8)]);
    std::vector<char> content(HEADER_BYTES);
    memcpy(content.data(), header, sizeof header);
    while (content.size() < HEADER_BYTES + bytes) content.push_back((char)dice->next());
    if (dice->one_in(8)) content.resize(HEADER_BYTES + dice->below((uint32_t)bytes + 9));
    seal(&content, IMAGES_CHECKSUM_FIELD);
    return content;
}

// Files written anew with a right table and checksum, so that all that is behind the checksum is reached:
// other sections, other names and lengths, hostile names of files, numbers that are none, odd fields.
static void test_sealed_files(const std::vector<Victim>& victims, long count, uint32_t seed) {
    Tally tally;
    Dice dice{seed};
    running = "files with a right checksum";
    const Victim& v = victims[CHECKPOINT];
    WeightsFile file = open_weights(v.path);
    Sections whole;
    for (auto& [name, section] : file.sections)  // two sets of parameters are enough
        if (name != "ema_2" && name != "adam_m" && name != "adam_v")
            whole.push_back({name, std::string(&v.content[section.offset], section.bytes)});
    const char* const names[] = {"weights",
                                 "ema",
                                 "ema_2",
                                 "adam_m",
                                 "state",
                                 "config",
                                 "",
                                 "more",
                                 "class_names",
                                 "data_checksum",
                                 "a name of 24 bytes, whole"};
    const uint32_t all = sizeof names / sizeof *names;
    for (long i = 0; i < count && tally.bad.empty(); i++) {
        Victim now = {};
        now.path = test_folder + "/sealed.bin", now.kind = CHECKPOINT;
        std::vector<char> content;
        if (i % 2) {
            now.kind = NEW_IMAGES, now.image_size = dice.one_in(2) ? 0 : 4;
            content = sealed_images(&dice);
        } else {
            Sections sections = whole;
            int32_t header[HEADER_INTS];
            memcpy(header, v.content.data(), sizeof header);
            for (int edit = 1 + dice.below(3); edit > 0; edit--) {
                auto& [name, data] = sections[dice.below((uint32_t)sections.size())];
                switch (dice.below(8)) {
                    case 0: name = names[dice.below(all)]; break;
                    case 1: std::swap(data, sections[dice.below((uint32_t)sections.size())].second); break;
                    case 2:
                        data.resize(data.size() + dice.below(9) - std::min(data.size(), (size_t)4));
                        break;
                    case 3:
                        if (sections.size() < MAX_SECTIONS) sections.push_back(sections[dice.below(4)]);
                        sections.back().first = names[dice.below(all)];
                        break;
                    case 4: {  // a file's name of any bytes, up to longer than one may be
                        std::string hostile;
                        for (int k = dice.below(dice.one_in(4) ? 2 * MAX_PATH_LENGTH : 20); k > 0; k--)
                            hostile += dice.one_in(3) ? (char)dice.next() : (char)(32 + dice.below(95));
                        static const char* const files[] = {"data_file", "val_file", "model_weights"};
                        add_setting(&sections, files[dice.below(3)], hostile);
                        break;
                    }
                    case 5: {
                        float value = dice.one_in(2) ? NAN : INFINITY;
                        if (data.size() < sizeof value) break;
                        memcpy(&data[4 * dice.below((uint32_t)data.size() / 4)], &value, sizeof value);
                        break;
                    }
                    case 6:
                        if (!data.empty()) data[dice.below((uint32_t)data.size())] = (char)dice.next();
                        break;
                    case 7: {
                        static const char* const values[] = {"0", "1", "2", "-1", "64", "0.5", "1e-9", "1e39", "",
                                                             "1,2,3", "0,0", "nan", "v", "ddim", "1 1"};
                        const Flag& flag = FLAGS[dice.below((uint32_t)FLAGS.size())];
                        add_setting(&sections, flag.name, values[dice.below(15)]);
                        break;
                    }
                }
            }
            content = sealed_weights(header, sections);
        }
        write_whole(now.path, content, content.size());
        read_victim(now, content.size(), true, true, text("file %ld of seed %u", i, seed), &tally);
    }
    report(tally.bad.empty() && tally.refused > count / 4 && tally.accepted > count / 20,
           "files with a right checksum", "%ld refused with one sentence, %ld read; slowest %.1f ms%s",
           tally.refused, tally.accepted, 1e3 * tally.slowest, tally.bad.c_str());

    // What training must never leave behind: weights that are no numbers. What was there stays as it was.
    std::string path = test_folder + "/broken.bin", bad;
    Model m = Model();
    build_model(&m, smallest_config(), 1, true);
    perturbed_weights(&m, 5);
    write_checkpoint(path, m, 40, 0.25f, some_history());
    std::string before = file_text(path);
    size_t files = files_in(test_folder);
    for (float value : {NAN, INFINITY, -INFINITY})
        for (float* parameters : {m.master, m.ema[1], m.adam_v}) {
            std::swap(parameters[1234], value);
            std::string message = refusal([&] { write_checkpoint(path, m, 41, 0.25f, some_history()); });
            std::swap(parameters[1234], value);
            if (!is_sentence(message) || message.find(path) == std::string::npos) bad += "; " + message;
        }
    report(bad.empty() && file_text(path) == before && files_in(test_folder) == files,
           "weights that are no numbers", "are never written%s", bad.c_str());
}

// The names of classes in files of images and of weights: what can't be names is refused, each with its reason.
static void test_class_names() {
    std::string path = test_folder + "/names.bin", bad;
    const struct {
        std::string names, says;  // of two classes; "" where they are fine
    } cases[] = {{"cat\ndog\n", ""},
                 {"10\n9\n", ""},
                 {"d\xC3\xB8g\n\xF0\x9F\x90\x88\n", ""},
                 {"cat, the small\n0-4\n", ""},
                 {"cat\n", "1 names of classes for 2 classes"},
                 {"cat\ndog\nfox\n", "3 names of classes for 2 classes"},
                 {"cat\ndog", "1 names of classes for 2 classes"},
                 {"cat\ndog\nfox", "2 names of classes for 2 classes"},
                 {"", "0 names of classes for 2 classes"},
                 {"cat\ncat\n", "two classes called cat"},
                 {"cat\n\n", "a class without a name"},
                 {std::string("c\0t\ndog\n", 8), "UTF-8"},
                 {"cat\xFF\ndog\n", "UTF-8"},
                 {"cat\xC3\ndog\n", "UTF-8"},          // a letter that ends too soon
                 {"cat\x80\ndog\n", "UTF-8"},          // begins too late
                 {"cat\xC0\xAF\ndog\n", "UTF-8"},      // has more bytes than it needs
                 {"cat\xED\xA0\x80\ndog\n", "UTF-8"},  // is half of a pair of UTF-16
                 {"cat\xF4\x90\x80\x80\ndog\n", "UTF-8"},
                 {std::string(300, 'x') + "\n" + std::string(300, 'x') + "\n", "two classes called xxx"}};
    Config config = smallest_config();
    config.class_cond = 1, config.num_classes = 2;
    for (auto& c : cases)
        for (bool images : {true, false}) {
            if (images) {
                std::vector<char> content = image_file(6, 8, false, true);
                content.erase(content.end() - strlen("cat\ndog\n"), content.end());
                content.insert(content.end(), c.names.begin(), c.names.end());
                int32_t bytes = (int32_t)c.names.size();
                memcpy(&content[8 * sizeof bytes], &bytes, sizeof bytes);
                seal(&content, IMAGES_CHECKSUM_FIELD);
                write_whole(path, content, content.size());
            } else {
                Model m = Model();
                build_model(&m, config, 1, false);
                perturbed_weights(&m, 5);
                write_checkpoint(path, m, 40, 0.25f, some_history());
                WeightsFile file = open_weights(path);
                Section weights = file.sections["weights"];
                Sections sections = {{"weights", file_text(path).substr(weights.offset, weights.bytes)},
                                     {"config", stored_config(config)},
                                     {"class_names", c.names}};
                std::vector<char> content = sealed_weights(Reader(path).header, sections);
                write_whole(path, content, content.size());
            }
            std::vector<std::string> found;
            std::string message = refusal([&] {
                Config wanted = {};
                wanted.image_size = 8, wanted.in_channels = 3;
                found = images ? read_images(path, wanted).class_names : open_weights(path).class_names;
            });
            std::string joined;
            for (const std::string& name : found) joined += name + "\n";
            // weights may name fewer classes than they have, or none
            bool fewer = !images && (c.names == "cat\n" || c.names.empty());
            bool right = c.says.empty() || fewer
                             ? message.empty() && joined == c.names
                             : is_sentence(message) && message.find(c.says) != message.npos &&
                                   message.find(path) != message.npos;
            if (!right) bad += text("; %s: '%s'", printable(c.names).c_str(), message.c_str());
        }
    report(bad.empty(), "names of classes", "%zu, in images and in weights%s", sizeof cases / sizeof *cases,
           bad.c_str());
}

// Files that random changes do not hit upon: each must be refused, its checksum being right.
static void test_crafted_files(const std::vector<Victim>& victims) {
    const Victim& v = victims[CHECKPOINT];
    int32_t header[HEADER_INTS];
    uint64_t whole = make_plan(smallest_config(), 1, false).num_parameters * sizeof(float),
             texts = v.settings.bytes + strlen("0123abcd"), rest = v.size - HEADER_BYTES - texts;
    typedef std::vector<std::pair<std::string, uint64_t>> Table;
    const Table tables[] = {
        // lengths that sum up to the file's only because 64 bits overflow
        {{"pad", 0 - whole}, {"weights", whole}, {"more", rest}},
        {{"pad", 0 - (uint64_t)HEADER_BYTES}, {"weights", whole}, {"more", rest - whole + HEADER_BYTES}},
        {{"weights", whole}, {"a", UINT64_MAX}, {"b", rest - whole + 1}},
        // lengths of other models, in a sum that is right
        {{"weights", whole - 4}, {"ema", whole + 4}, {"more", rest - 2 * whole}},
        {{"weights", whole}, {"ema", whole + 4}, {"more", rest - 2 * whole - 4}},
        {{"weights", whole}, {"adam_m", 0}, {"adam_v", 0}, {"more", rest - whole}},
        {{"weights", rest}},
        // two of a name; none of weights; too short a sum
        {{"weights", whole}, {"weights", whole}, {"more", rest - 2 * whole}},
        {{"ema", whole}, {"adam_m", whole}, {"more", rest - 2 * whole}},
        {{"weights", whole}, {"more", rest - whole - 4}},
        {{"weights", whole}, {"ema_4", whole + 4}, {"more", rest - 2 * whole - 4}},
        {{"weights", whole}, {"state", rest - whole}},
    };
    int refused = 0, count = 0;
    std::string bad;
    auto expect_refusal = [&](const Victim& file) {
        std::string wrong, message = refusal([&] { wrong = use_file(file, true); });
        count++;
        if (is_sentence(message)) refused++;
        else bad += text("; file %d: '%s' %s", count, message.c_str(), wrong.c_str());
    };
    for (Table table : tables) {
        table.push_back({"config", v.settings.bytes});
        table.push_back({"data_checksum", strlen("0123abcd")});
        memcpy(header, v.content.data(), sizeof header);
        memset(header + FIELD_SECTION_TABLE, 0, sizeof header - FIELD_SECTION_TABLE * sizeof(int32_t));
        header[FIELD_SECTIONS] = (int32_t)table.size();
        for (size_t i = 0; i < table.size(); i++) {
            int32_t* entry = header + FIELD_SECTION_TABLE + SECTION_INTS * i;
            memcpy(entry, table[i].first.data(), table[i].first.size());
            memcpy(entry + SECTION_NAME_BYTES / 4, &table[i].second, sizeof(uint64_t));
        }
        seal_header(v, header, v.data_checksum);
        put(v, 0, header, sizeof header);
        expect_refusal(v);
    }
    put(v, 0, v.content.data(), HEADER_BYTES);
    // counts and a loss that can't be, in the section `state`
    const std::pair<size_t, int32_t> damages[] = {
        {0, -1}, {0, 4}, {4, -1}, {4, 38}, {8, 0x7FC00000 /* NaN */}, {sizeof(History) - 4, 0x7F800000}};
    for (auto [offset, value] : damages) {
        std::vector<char> changed = v.content;
        size_t at = HEADER_BYTES + 5 * whole + offset;
        memcpy(&changed[at], &value, sizeof value);
        memcpy(header, changed.data(), sizeof header);
        seal_header(v, header, crc32(changed.data() + HEADER_BYTES, changed.size() - HEADER_BYTES));
        put(v, at, &value, sizeof value), put(v, 0, header, sizeof header);
        expect_refusal(v);
        put(v, at, &v.content[at], sizeof value), put(v, 0, v.content.data(), HEADER_BYTES);
    }
    bool sound = rest == 5 * whole + sizeof(History);  // the tables above were made for this file
    const Victim& images = victims[OLD_IMAGES];
    for (float pixel : {NAN, INFINITY, -INFINITY, 2.0f, -1.5f, 1e-3f}) {
        size_t at = images.size - sizeof pixel;
        put(images, at, &pixel, sizeof pixel);
        if (pixel == 1e-3f) sound &= refusal([&] { use_file(images, true); }).empty();
        else expect_refusal(images);
        put(images, at, &images.content[at], sizeof pixel);
    }
    report(bad.empty() && sound, "crafted files", "%d of %d refused with one sentence%s", refused, count,
           bad.c_str());
}

static void test_readers(long mutations, uint32_t seed) {
    std::vector<Victim> victims;
    for (int kind = 0; kind < FILE_KINDS; kind++) victims.push_back(make_victim((FileKind)kind));
    victims.push_back(make_victim(NEW_IMAGES, 4));  // box-filtered to half the size
    victims.push_back(make_victim(OLD_IMAGES, 4));
    size_t files = files_in("/proc/self/fd");
    test_valid_files(&victims);
    test_config_files();
    test_corrupted_fields(victims);
    test_truncated_files(victims);
    test_crafted_files(victims);
    test_mutations(victims, mutations, seed);
    test_sealed_files(victims, mutations / 20, seed);
    test_class_names();
    running = "after the mutations";
    bool mended = true;
    std::string wrong;
    for (const Victim& v : victims) mended &= refusal([&] { wrong += use_file(v, true); }).empty();
    size_t left = files_in("/proc/self/fd");
    report(mended && wrong.empty() && left == files, "no file left open",
           "%zu before and %zu after, and the valid files can be read again", files, left);
    for (const Victim& v : victims) close(v.fd);
}

// ===========================================================================================================
// 8  AGAINST PYTORCH AND NUMPY
// ===========================================================================================================

// A buffer that a layer is to overwrite: NaN where it does not.
static std::vector<float> blank(size_t n) { return std::vector<float>(n, NAN); }
static float* pointer(std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

// A view of some floats; none of an empty vector.
static Tensor tensor_of(std::vector<float>& values, int B, int H, int W, int C) {
    return {pointer(values), B, H, W, C};
}

static void linear_case(const Case& c, Verdict* v) {
    int M = c.arg(0), C = c.arg(1), C2 = c.arg(2), O = c.arg(3);
    bool accumulate = c.arg(4), wants_dx = c.has("dx");
    std::vector<float> x = c.floats("x"), x2 = c.floats("x2"), w = c.floats("w"), b = c.floats("b"),
                       residual = c.floats("residual"), dout = c.floats("dout"), dw = blank(w.size()),
                       db = blank(b.size()), out = blank((size_t)M * O),
                       dx = accumulate ? c.floats("dx0") : blank((size_t)M * C),
                       dx2 = accumulate ? c.floats("dx20") : blank((size_t)M * C2);
    Joined joined = {tensor_of(x, M, 1, 1, C), tensor_of(x2, M, 1, 1, C2)},
           gradient = {tensor_of(dx, M, 1, 1, C), tensor_of(dx2, M, 1, 1, C2)};
    Tensor upstream = tensor_of(dout, M, 1, 1, O);
    Linear layer = {w.data(), b.data(), dw.data(), db.data()};
    conv1x1_forward(tensor_of(out, M, 1, 1, O), joined, layer, {.residual = tensor_of(residual, M, 1, 1, O)});
    conv1x1_backward_weight(layer, upstream, joined);
    if (wants_dx) conv1x1_backward_input(gradient, upstream, layer, {.accumulate = accumulate});
    v->compare("out", out, c.at("out"));
    v->compare("dw", dw, c.at("dw")), v->compare("db", db, c.at("db"));
    if (wants_dx) v->compare("dx", dx, c.at("dx"));
    if (wants_dx && C2) v->compare("dx2", dx2, c.at("dx2"));
}

static void conv_case(const Case& c, Verdict* v) {
    int B = c.arg(0), H = c.arg(1), W = c.arg(2), C = c.arg(3), O = c.arg(4);
    bool in_place = c.arg(5), wants_dx = c.has("dx"), wants_demb = c.has("demb");
    std::vector<float> x = c.floats("x"), w = c.floats("w"), b = c.floats("b"), emb = c.floats("emb"),
                       residual = c.floats("residual"), dout = c.floats("dout"), dw = blank(w.size()),
                       db = blank(b.size()), out = in_place ? residual : blank((size_t)B * H * W * O),
                       dx = blank((size_t)B * H * W * C), demb = blank((size_t)B * O);
    Conv layer = {w.data(), b.data(), dw.data(), db.data()};
    Tensor input = tensor_of(x, B, H, W, C), output = tensor_of(out, B, H, W, O),
           upstream = tensor_of(dout, B, H, W, O);
    conv3x3_forward(
        output, input, layer,
        {.emb = {pointer(emb), O}, .residual = in_place ? output : tensor_of(residual, B, H, W, O)});
    conv3x3_backward_weight(layer, upstream, input, {wants_demb ? demb.data() : nullptr, O});
    if (wants_dx) conv3x3_backward_input(tensor_of(dx, B, H, W, C), upstream, layer);
    v->compare("out", out, c.at("out"));
    v->compare("dw", dw, c.at("dw")), v->compare("db", db, c.at("db"));
    if (wants_dx) v->compare("dx", dx, c.at("dx"));
    if (wants_demb) v->compare("demb", demb, c.at("demb"));
}

static void norm_case(const Case& c, Verdict* v) {
    int B = c.arg(0), T = c.arg(1), C = c.arg(2), C2 = c.arg(3), G = c.arg(4);
    bool silu = c.arg(5), accumulate = c.arg(6);
    std::vector<float> x = c.floats("x"), x2 = c.floats("x2"), w = c.floats("w"), b = c.floats("b"),
                       dout = c.floats("dout"), dresidual = c.floats("dresidual"),
                       out = blank((size_t)B * T * (C + C2));
    std::vector<float2> sums((size_t)B * norm_parts(T) * (C + C2), float2{NAN, NAN}), moments = sums,
                                                                                      moments2 = sums;
    std::vector<float2> statistics((size_t)B * (C + C2), float2{NAN, NAN}), affine = statistics;
    Norm norm = {.x = {tensor_of(x, B, 1, T, C), tensor_of(x2, B, 1, T, C2)}, .groups = G, .silu = silu};
    norm.x.first.moments = moments.data(), norm.x.second.moments = moments2.data();
    norm.w = w.data(), norm.bias = b.data();
    norm.statistics = statistics.data(), norm.affine = affine.data(), norm.sums = sums.data();
    channel_moments(norm.x.first), channel_moments(norm.x.second);
    groupnorm_forward(tensor_of(out, B, 1, T, C + C2), norm);
    v->compare("out", out, c.at("out"));
    auto column = [](const std::vector<float2>& of, float float2::*member) {
        std::vector<float> values;
        for (const float2& pair : of) values.push_back(pair.*member);
        return values;
    };
    v->compare("mean", column(statistics, &float2::x), c.at("mean"));
    v->compare("rstd", column(statistics, &float2::y), c.at("rstd"));
    v->compare("scale", column(affine, &float2::x), c.at("scale"));
    v->compare("shift", column(affine, &float2::y), c.at("shift"));
    for (bool over_dy : {false, true}) {  // where what was normed is written again
        std::vector<float> dw = blank(w.size()), db = blank(b.size()), dy = blank(out.size()), apart = dy,
                           dx = accumulate ? c.floats("dx0") : blank((size_t)B * T * C),
                           dx2 = accumulate ? c.floats("dx20") : blank((size_t)B * T * C2),
                           &normed = over_dy ? dy : apart;
        Tensor gradient = tensor_of(dy, B, 1, T, C + C2);
        norm.dw = dw.data(), norm.dbias = db.data();
        groupnorm_backward_sums(gradient, tensor_of(dout, B, 1, T, C + C2), norm);
        groupnorm_backward({tensor_of(dx, B, 1, T, C), tensor_of(dx2, B, 1, T, C2)},
                           tensor_of(normed, B, 1, T, C + C2), gradient, norm,
                           {.residual = tensor_of(dresidual, B, 1, T, C), .accumulate = accumulate});
        v->compare("made again", normed, c.at("out"));
        v->compare("dw", dw, c.at("dw")), v->compare("db", db, c.at("db")), v->compare("dx", dx, c.at("dx"));
        if (C2) v->compare("dx2", dx2, c.at("dx2"));
    }
}

static void attention_case(const Case& c, Verdict* v) {
    int B = c.arg(0), T = c.arg(1), C = c.arg(2), heads = c.arg(3);
    std::vector<float> qkv = c.floats("qkv"), dout = c.floats("dout"), out = blank((size_t)B * T * C),
                       lse = blank((size_t)B * heads * T), dqkv = blank((size_t)B * T * 3 * C);
    Tensor input = tensor_of(qkv, B, 1, T, 3 * C), output = tensor_of(out, B, 1, T, C);
    attention_forward(output, lse.data(), input, heads);
    attention_backward(tensor_of(dqkv, B, 1, T, 3 * C), tensor_of(dout, B, 1, T, C), output, lse.data(),
                       input, heads);
    v->compare("out", out, c.at("out")), v->compare("lse", lse, c.at("lse"));
    double scale = largest_of(c.at("dqkv"));
    for (int third = 0; third < 3; third++) {
        std::vector<double> r = columns_of(c.at("dqkv"), 3 * C, third * C, C);
        std::vector<float> a = columns_of(dqkv, 3 * C, third * C, C);
        std::string name = std::string("d") + "qkv"[third];
        if (largest_of(r) < 1e-12 * scale)  // with one pixel the softmax is 1 whatever q and k are
            v->compare_zero(name, a, scale);
        else v->compare(name, a, r);
    }
}

static void resample_case(const Case& c, Verdict* v) {
    int B = c.arg(0), H = c.arg(1), W = c.arg(2), C = c.arg(3);
    bool accumulate = c.arg(4);
    std::vector<float> x = c.floats("x"), dout = c.floats("dout"), out = blank(c.at("out").size()),
                       dx = accumulate ? c.floats("dx0") : blank(x.size());
    Tensor from = tensor_of(x, B, H, W, C), gradient = tensor_of(dx, B, H, W, C);
    if (c.is("upsample")) {
        Tensor to = tensor_of(out, B, 2 * H, 2 * W, C), upstream = tensor_of(dout, B, 2 * H, 2 * W, C);
        upsample_forward(to, from);
        upsample_backward(gradient, upstream, accumulate);
    } else {
        Tensor to = tensor_of(out, B, H / 2, W / 2, C), upstream = tensor_of(dout, B, H / 2, W / 2, C);
        downsample_forward(to, from);
        downsample_backward(gradient, upstream, accumulate);
    }
    v->compare("out", out, c.at("out")), v->compare("dx", dx, c.at("dx"));
}

static void pointwise_case(const Case& c, Verdict* v) {
    if (c.is("embedding")) {
        std::vector<int> t(c.at("t").begin(), c.at("t").end());
        std::vector<float> out = blank(t.size() * c.arg(0));
        Tensor sinusoids = tensor_of(out, (int)t.size(), 1, 1, c.arg(0));
        cpu::run(TimestepEmbedding<float>{.out = sinusoids, .timesteps = t.data(), .max_period = c.arg(1)});
        v->compare("out", out, c.at("out"));
        return;
    }
    std::vector<float> x = c.floats("x"), dout = c.floats("dout"), out = blank(x.size()), dx = out;
    if (c.is("silu")) {
        auto row = [](std::vector<float>& values) { return tensor_of(values, 1, 1, 1, (int)values.size()); };
        cpu::run(SiluForward<float>{.out = row(out), .x = row(x)});
        cpu::run(SiluBackward<float>{.dx = row(dx), .dout = row(dout), .x = row(x)});
        v->compare("out", out, c.at("out"));
    } else {  // mse; args: B, elements of a sample, timesteps
        int B = c.arg(0), n = c.arg(1), T = c.arg(2);
        std::vector<float> target = c.floats("target"), losses = blank((size_t)B * loss_parts(n / PIXEL)),
                           no_norm = {0};
        std::vector<int> t(c.at("t").begin(), c.at("t").end());
        std::vector<Timestep> chain;
        for (float weight : c.floats("weights")) {
            chain.push_back({});
            chain.back().weight = weight;
        }
        BatchLoss loss = {losses.data(), t.data(), chain.data(), B, n / PIXEL, PIXEL, T};
        cpu::run(PredictionLoss<float>{loss, 0, B, x.data(), target.data(), dx.data()});
        StepState state = StepState();
        cpu::run(FinishStep{&state, loss, no_norm.data(), 1, default_config().optimiser});
        v->compare("loss", {state.loss}, c.at("loss"));
        const float* sums = state.quartile_sums;
        v->compare("by quartile", std::vector<float>(sums, sums + 4), c.at("quartiles"));
        for (int q = 0; q < 4; q++)
            v->note("samples of a quartile", state.quartile_counts[q] == c.at("counts")[q] ? 0 : INFINITY);
        std::vector<float> only = blank(losses.size());
        loss.parts = only.data();
        for (int b = 0; b < B; b++)  // a sample at a time
            cpu::run(
                PredictionLoss<float>{loss, b, 1, x.data() + (size_t)b * n, target.data() + (size_t)b * n});
        v->note("loss without gradient", only == losses ? 0 : INFINITY);
    }
    v->compare("dx", dx, c.at("dx"));
}

static void test_layers(const char* path) {
    const struct {
        const char* kind;
        void (*run)(const Case&, Verdict*);
    } kinds[] = {{"embedding", pointwise_case}, {"silu", pointwise_case},    {"mse", pointwise_case},
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

// Output, loss and gradients of the model in `weights`, a file of train_unet.py's debug_state beside it.
static void test_model(const char* weights, const char* state) {
    WeightsFile file = open_weights(weights);
    Case c = read_cases(state).at(0);
    for (Case& other : read_cases(state)) c.tensors[other.name] = other.tensors.begin()->second;
    int B = (int)c.at("t").size(), H = file.config.image_size;
    size_t n = (size_t)B * H * H * PIXEL;
    Model m = Model();
    build_model(&m, file.config, B, true);
    read_parameters(m, m.master, file, "weights");
    start_from_master(&m);
    poison(&m);
    auto interleaved = [&](const std::string& what) {  // (B, C, H, W) -> (B, H, W, PIXEL)
        std::vector<double> to(n);
        const std::vector<double>& from = c.at(what);
        int C = (int)(from.size() / B / H / H);  // with --learn_sigma twice as many come out
        for (size_t i = 0; i < from.size(); i++)
            to[(i / (C * H * H) * H * H + i % (H * H)) * PIXEL + i / (H * H) % C] = from[i];
        return to;
    };
    std::vector<double> x = interleaved("x"), target = interleaved("target");
    std::vector<float> input(x.begin(), x.end()), wanted(target.begin(), target.end());
    std::vector<int> t(c.at("t").begin(), c.at("t").end());
    backend_upload(m.input, input.data(), n * sizeof(float));
    backend_upload(m.target, wanted.data(), n * sizeof(float));
    backend_upload(m.timesteps, t.data(), B * sizeof(int));
    std::vector<float> x0(c.at("x0").begin(), c.at("x0").end());
    backend_upload(m.images, x0.data(), x0.size() * sizeof(float));
    if (m.labels) {
        std::vector<int> labels(c.at("y").begin(), c.at("y").end());
        backend_upload(m.labels, labels.data(), B * sizeof(int));
    }
    double loss = forward_loss(&m, B);
    backend_zero(m.gradients, m.plan.num_floats * sizeof(float));
    unet_backward(&m, B, m.gradients);

    Verdict output(1e-5), scalar(1e-5), gradient(1e-5);
    output.compare("out", output_values(&m, B), interleaved("out"));
    output.line("output");
    scalar.note("loss", fabs(loss / c.at("loss")[0] - 1));
    scalar.line("loss");
    std::vector<float> flat = gradients_of(&m);
    double largest = 0;
    size_t stored = 0;
    for (const Parameter& tensor : m.plan.tensors)
        largest = std::max(largest, largest_of(c.at("grad." + tensor.name)));
    for (const Parameter& tensor : m.plan.tensors) {
        std::string name = tensor.name;
        const std::vector<double>& r = c.at("grad." + name);
        std::vector<float> a = reordered({&flat[tensor.offset], tensor.size}, tensor, false);
        stored += r.size();
        bool is_qkv = name.find(".qkv.") != std::string::npos;
        for (int third = 0; third < (is_qkv ? 3 : 1); third++) {
            size_t part = is_qkv ? r.size() / 3 : r.size(), first = third * part;
            if (r.size() != tensor.count) {
                gradient.note(name + ", whose length is wrong", INFINITY);
                continue;
            }
            std::vector<double> expected(r.begin() + first, r.begin() + first + part);
            std::vector<float> got(a.begin() + first, a.begin() + first + part);
            std::string what = is_qkv ? name + " " + "qkv"[third] : name;
            // adding the same to every key changes no softmax
            if (is_qkv && third == 1 && tensor.shape.size() == 1) gradient.compare_zero(what, got, largest);
            else gradient.compare(what, got, expected);
        }
    }
    gradient.line("gradients, one by one");
    report(stored == m.plan.num_parameters, "every parameter", "%zu of %zu have a reference", stored,
           m.plan.num_parameters);
}

// Networks that are formulas of x and of how much of the picture and of the noise there is in it, alpha and
// sigma, and that predict the picture. This one takes x for noise on a picture 1.6 tanh(x + t / 2T).
static std::vector<double> made_up_x0(const std::vector<float>& x, double t, double T) {
    std::vector<double> x0;
    for (float value : x) x0.push_back(1.6 * tanh(value + t / T / 2));
    return x0;
}

// The ideal denoiser of a few pictures: the mean of them all, each weighed by how likely x comes of it. x (B, P,
// PIXEL), pictures (n, 3, P).
static std::vector<double> ideal_x0(const std::vector<float>& x, double alpha, double sigma, int B,
                                    const std::vector<double>& pictures) {
    int P = (int)x.size() / B / PIXEL, elements = 3 * P, n = (int)pictures.size() / elements;
    std::vector<double> x0(x.size());
    auto place = [&](int b, int e) { return ((size_t)b * P + e % P) * PIXEL + e / P; };
    for (int b = 0; b < B; b++) {
        std::vector<double> weights;
        for (int i = 0; i < n; i++) {
            double squares = 0;
            for (int e = 0; e < elements; e++)
                squares += pow(x[place(b, e)] - alpha * pictures[(size_t)i * elements + e], 2);
            weights.push_back(-squares / (2 * sigma * sigma));
        }
        double most = std::ranges::max(weights), sum = 0;
        for (double& weight : weights) sum += weight = exp(weight - most);
        for (int i = 0; i < n; i++)
            for (int e = 0; e < elements; e++)
                x0[place(b, e)] += weights[i] / sum * pictures[(size_t)i * elements + e];
    }
    return x0;
}

static void twin_case(const Case& c, Verdict* v) {
    size_t n = c.at("values").size();
    const std::vector<double>& values = c.at("values");
    double wrong = 0;
    auto differ = [&](double ours, double theirs) { wrong += !(ours == theirs); };
    if (c.is("words")) {  // args: seed, stream, sample, step
        for (size_t e = 0; e < n; e++)
            differ((int32_t)random_word(c.word(0), c.word(1), (uint32_t)e, c.word(2), c.word(3)), values[e]);
    } else if (c.is("normals")) {
        for (size_t e = 0; e < n; e++) {
            float four[4];
            random_normals(four, c.word(0), c.word(1), (uint32_t)e / 4, c.word(2), c.word(3));
            wrong += !(fabs(four[e % 4] - values[e]) < 2e-6);
        }
    } else if (c.is("timesteps")) {  // args: seed, stream, step, T
        for (size_t b = 0; b < n; b++)
            differ(random_below(c.arg(3), c.word(0), c.word(1), 0, (uint32_t)b, c.word(2)), values[b]);
    } else if (c.is("permutation")) {  // args: seed, epoch
        std::vector<int> order(n);
        random_permutation(order.data(), (int)n, c.word(0), c.word(1));
        for (size_t i = 0; i < n; i++) differ(order[i], values[i]);
    } else if (c.is("batches")) {  // args: seed, images
        Orders orders(c.arg(1), (int)(n / c.arg(1)) + 1, c.word(0));
        for (size_t i = 0; i < n; i++) differ(orders.at(i), values[i]);
    } else if (c.is("abar")) {  // args: T, schedule, zero terminal SNR
        Config config = default_config();
        config.diffusion_steps = c.arg(0), config.noise_schedule = c.arg(1);
        config.zero_terminal_snr = c.arg(2);
        std::vector<NoiseLevel> schedule = make_schedule(config);
        for (size_t t = 0; t < n; t++) {
            double abar = pow(schedule.at(t).alpha, 2), rest = pow(schedule.at(t).sigma, 2);
            v->note(text("t = %zu", t), values[t] ? fabs(abar / values[t] - 1) : abar);
            v->note(text("t = %zu, sigma", t), fabs(rest - (1 - values[t])));
        }
        wrong = schedule.size() != n;
    } else if (c.is("weights")) {  // args: T, schedule, predict; reals: gamma
        Config config = default_config();
        config.diffusion_steps = c.arg(0), config.noise_schedule = c.arg(1);
        config.predict = c.arg(2), config.min_snr_gamma = (float)c.at("reals")[0];
        std::vector<Timestep> chain = make_timesteps(config);
        for (size_t t = 0; t < n; t++) v->note(text("t = %zu", t), fabs(chain.at(t).weight / values[t] - 1));
    } else if (c.is("sampler")) {  // args: T, schedule, predict, sampler, steps; values (S, 6)
        Config config = default_config();
        config.diffusion_steps = c.arg(0), config.noise_schedule = c.arg(1), config.predict = c.arg(2);
        config.sampler = c.arg(3), config.sample_steps = c.arg(4);
        std::vector<SamplerStep> steps = make_sampler(config);
        steps.erase(steps.begin());  // the start, which calls no network
        wrong = steps.size() * 6 != n;
        for (size_t i = 0; i < steps.size() && !wrong; i++) {
            const SamplerStep& s = steps[i];
            const double* r = &values[6 * i];
            differ(s.timestep, r[0]);
            const float ours[] = {s.x0_from_x, s.x0_from_out, s.update.x0, s.update.x, s.update.noise};
            for (int k = 0; k < 5; k++)
                v->note(text("step %zu, number %d", i, k),
                        fabs(ours[k] - r[k + 1]) / (1e-3 + fabs(r[k + 1])));
        }
    } else if (c.is("chain")) {
        // args: predict, schedule, zero terminal SNR, sampler, steps, threshold, T, H, spacing, two seeds; reals:
        // eta; values (2, 3, H, H): what is drawn by a made-up network, or an ideal one of `pictures`
        Config config = default_config();
        config.predict = c.arg(0), config.noise_schedule = c.arg(1), config.zero_terminal_snr = c.arg(2);
        config.sampler = c.arg(3), config.sample_steps = c.arg(4), config.threshold = c.arg(5);
        config.diffusion_steps = c.arg(6), config.eta = (float)c.at("reals")[0];
        int B = 2, H = c.arg(7), image = PIXEL * H * H;
        std::vector<NoiseLevel> schedule = make_schedule(config);
        config.spacing = c.arg(8);
        std::vector<SampleSpec> begins = specs_of({c.word(9), c.word(10)});
        std::vector<float> x(B * image), input(x), out(x), saved(x);
        SamplerState state = {};
        SampleBatch<float> drawing = {.input = tensor_of(input, B, H, H, PIXEL),
                                      .out = out.data(),
                                      .channels = 3,
                                      .clamps = config.threshold == THRESHOLD_CLAMP,
                                      .guidance = 1,
                                      .x = x.data(),
                                      .saved = saved.data(),
                                      .specs = begins.data(),
                                      .state = &state};
        for (const SamplerStep& s : make_sampler(config)) {
            int t = std::max(0, s.timestep);  // the start tells none
            auto [a, b] = schedule[t];
            std::vector<double> x0 = c.has("pictures") ? ideal_x0(input, a, b, B, c.at("pictures"))
                                                       : made_up_x0(input, t, config.diffusion_steps);
            for (size_t i = 0; i < x.size(); i++) {
                double eps = (input[i] - a * x0[i]) / b;
                out[i] = (float)(config.predict == PREDICT_EPS ? eps
                                 : config.predict == PREDICT_V ? a * eps - b * x0[i]
                                                               : x0[i]);
            }
            state.step = s;
            cpu::run(UpdateSamples<float>{drawing});
        }
        wrong = n != (size_t)B * 3 * H * H;
        for (size_t i = 0; i < n && !wrong; i++) {
            size_t b = i / (3 * H * H), channel = i / (H * H) % 3, pixel = i % (H * H);
            v->note(text("value %zu", i), fabs(x[b * image + pixel * PIXEL + channel] - values[i]));
        }
    } else if (c.is("rate")) {  // args: schedule, warm-up, lr_steps, skipped; reals: lr, last fraction, rates
        const std::vector<double>& reals = c.at("reals");  // at: steps; values (n, 3)
        Config config = default_config();
        config.optimiser.lr_schedule = c.arg(0), config.optimiser.warmup_steps = c.arg(1),
        config.optimiser.lr_steps = c.arg(2);
        config.optimiser.lr = (float)reals[0], config.optimiser.final_lr_fraction = (float)reals[1];
        config.optimiser.ema_rate[0] = (float)reals[2], config.optimiser.ema_rate[1] = (float)reals[3];
        for (size_t i = 0; i < c.at("at").size(); i++) {
            double s = c.at("at")[i];
            AdamW a = adamw_at(config.optimiser, (long)s, (long)s - c.arg(3));
            v->note(text("lr at %g", s), fabs(a.lr - values[3 * i]) / (double)config.optimiser.lr);
            for (int k = 0; k < 2; k++)
                v->note(text("ema %d at %g", k + 1, s), fabs(a.ema_weight[k] / values[3 * i + 1 + k] - 1));
        }
    } else {
        wrong = 1;
    }
    v->note(wrong ? text("%g values are wrong", wrong) : "integers", wrong ? INFINITY : 0);
}

static void test_twin(const char* path) {
    for (const Case& c : read_cases(path)) {
        Verdict verdict(c.is("abar") ? 1e-10 : c.is("chain") ? 5e-5 : 2e-6);  // chain: hundreds of steps
        running = c.name;
        twin_case(c, &verdict);
        verdict.line(c.name);
    }
}

// Files are read to the same floats in NumPy, bit for bit, upright and mirrored.
static void test_images(const char* path, int size, const char* expected) {
    Case c = read_cases(expected).at(0);
    Config config = {};
    config.image_size = size, config.in_channels = 3;
    Dataset data = read_images(path, config);
    const std::vector<double>&upright = c.at("upright"), &mirrored = c.at("mirrored");
    size_t elements = (size_t)3 * size * size, wrong = 0;
    std::vector<float> image(elements);
    BatchSource source = BatchSource();
    source.bytes = data.bytes.empty() ? nullptr : data.bytes.data(), source.floats = data.floats.data();
    source.batch = 1, source.size = size, source.channels = 3;
    bool ok = upright.size() == data.count * elements && mirrored.size() == upright.size();
    for (int i = 0; ok && i < data.count; i++)
        for (bool flipped : {false, true}) {
            int chosen = flipped ? -1 - i : i;
            cpu::run(LoadImages{.images = image.data(), .sources = &chosen, .source = source, .B = 1});
            for (size_t e = 0; e < elements; e++)
                wrong += !(image[e] == (flipped ? mirrored : upright)[i * elements + e]);
        }
    report(ok && !wrong, c.name, "%d images of %dx%d, %zu values differ", data.count, size, size, wrong);
}

static void test_same_weights(const char* first, const char* second) {
    WeightsFile a = open_weights(first), b = open_weights(second);
    Model one = plan_model(a.config, 1, false), two = plan_model(b.config, 1, false);
    const Plan &plan = one.plan, &other = two.plan;
    std::vector<float> x(plan.num_floats), y(other.num_floats);
    read_parameters(one, x.data(), a, "weights"), read_parameters(two, y.data(), b, "weights");
    bool named = plan.tensors.size() == other.tensors.size();
    for (size_t i = 0; named && i < plan.tensors.size(); i++)
        named = plan.tensors[i].name == other.tensors[i].name;
    bool model = true;
    for (const Flag& flag : FLAGS)
        if (flag.group == MODEL) model &= flag_text(a.config, flag) == flag_text(b.config, flag);
    report(named && model && x.size() == y.size() && same_bits(x.data(), y.data(), x.size() * sizeof(float)),
           "same weights", "%zu parameters of %s and %s", x.size(), first, second);
}

// ===========================================================================================================
// 9  MAIN
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
#ifdef _OPENMP
    // as in train_unet.cu, but at once: threads that spin are slow where there are more threads than cores
    if (!getenv("OMP_WAIT_POLICY") && !setenv("OMP_WAIT_POLICY", "passive", 1)) execv("/proc/self/exe", argv);
#endif
    std::string mode = argc > 1 ? argv[1] : "";
    auto argument = [&](int i) { return argc > i ? argv[i] : (char*)"(no file named)"; };
    for (int signal_number : {SIGABRT, SIGALRM}) signal(signal_number, last_words);
#ifndef __SANITIZE_ADDRESS__  // which reports crashes itself, and better
    for (int signal_number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) signal(signal_number, last_words);
#endif
    set_threads(TEST_THREADS);
    cpu::cpu_workspace =
        (float*)backend_allocate(cpu::cpu_workspace_bytes());  // for as many threads as a test may set

    if (mode == "--layers") {
        test_layers(argument(2));
    } else if (mode == "--model") {
        test_model(argument(2), argument(3));
    } else if (mode == "--twin") {
        test_twin(argument(2));
    } else if (mode == "--images") {
        test_images(argument(2), atoi(argument(3)), argument(4));
    } else if (mode == "--same") {
        test_same_weights(argument(2), argument(3));
    } else if (mode == "" || mode == "--only" || mode == "--fuzz") {
        bool found = mode != "--only";
        for (auto& test : TESTS) found |= argc > 2 && strstr(test.name, argv[2]);
        if (!found) fail_usage("test_unet --only: no test's name contains %s", argument(2));
        const char* temporary = getenv("TMPDIR");
        std::string folder = text("%s/test_unet_XXXXXX", temporary ? temporary : "/tmp");
        if (!mkdtemp(&folder[0])) fail("can't make a folder like %s", folder.c_str());
        test_folder = folder;
        for (auto& test : TESTS)
            if (mode == "" || (mode == "--only" && strstr(test.name, argument(2))))
                running = test.name, test.run();
        if (mode != "--only") {
            long mutations = mode == "--fuzz" ? atol(argument(2)) : 20000;
            bool seeded = mode == "--fuzz" && !strcmp(argument(3), "--seed");
            test_readers(mutations, seeded ? (uint32_t)atol(argument(4)) : 1);
        }
        if (system(("rm -r '" + test_folder + "'").c_str())) fail("can't remove %s", test_folder.c_str());
    } else {
        fail_usage("test_unet knows no %s; its first lines tell what it knows", mode.c_str());
    }
    return summary();
}
#endif  // __CUDACC__

// ===========================================================================================================
// 10  A STEP IN PARTS, IN BOTH BUILDS
// ===========================================================================================================

// Three steps (on a GPU the first is run, the second recorded, the third replayed) of five images at once, in
// parts of 2, 2 and 1, and one by one: the same losses, quartiles and gradients to `limit`, in less memory.
static void test_microbatch(double limit) {
    Config config = default_config();
    for (auto [name, value] : {std::pair<const char*, const char*>{"image_size", "16"},
                               {"num_channels", "32"},
                               {"channel_mult", "1,2"},
                               {"num_res_blocks", "1"},
                               {"attention_resolutions", "8"},
                               {"num_head_channels", "16"},
                               {"norm_groups", "8"},
                               {"batch_size", "5"},
                               {"min_snr_gamma", "5"},
                               {"lr", "0"}})
        set_flag(&config, flag_named(name), value);
    double losses = 0, gradients = 0, quartiles = 0;
    std::vector<double> whole_gradient;
    StepState whole = StepState();
    size_t activations = 0;
    bool less = true, pairwise = true, orders_differ = false;
    for (int microbatch : {0, 2, 1}) {
        Trainer t;
        Model* m = &t.model;
        config.microbatch = microbatch;
        *m = plan_model(config, microbatch_of(config), true);
        allocate_model(m);
        initialise_weights(m, 1);
        std::vector<float> values(m->plan.num_floats);
        backend_download(values.data(), m->master, values.size() * sizeof(float));
        for (size_t i = 0; i < values.size(); i++) {  // as initialised, nearly every gradient is zero
            float normal[4];
            random_normals(normal, 1, STREAM_PERTURB, (uint32_t)i, 0, 0);
            values[i] += 0.02f * normal[0];
        }
        backend_upload(m->master, values.data(), values.size() * sizeof(float));
        use_weights(m, m->master);
        t.images.count = 7, t.images.bytes.resize((size_t)7 * 3 * 16 * 16);
        for (size_t i = 0; i < t.images.bytes.size(); i++)
            t.images.bytes[i] = (uint8_t)random_word(2, STREAM_PERTURB, (uint32_t)i, 0, 0);
        prepare_steps(&t);
        std::vector<float> garbage(values.size(), NAN);
        backend_upload(m->gradients, garbage.data(), garbage.size() * sizeof(float));
        StepState last = StepState();
        for (int step = 0; step < 3; step++) begin_next_step(&t), last = await_step(&t);
        backend_download(values.data(), m->gradients, values.size() * sizeof(float));
        if (!microbatch) {
            whole = last, activations = m->plan.arena_bytes;
            whole_gradient.assign(values.begin(), values.end());
        } else {
            auto worse = [](double* worst, double error) {
                *worst = worsens(error, *worst) ? error : *worst;
            };
            worse(&losses, fabs(last.loss / whole.loss - 1));
            worse(&gradients, error_of(values.data(), whole_gradient.data(), values.size()));
            std::vector<double> sums(whole.quartile_sums, whole.quartile_sums + 4);
            worse(&quartiles, error_of(last.quartile_sums, sums.data(), 4));
            for (int q = 0; q < 4; q++) less &= last.quartile_counts[q] == whole.quartile_counts[q];
            less &= m->plan.arena_bytes < activations, activations = m->plan.arena_bytes;
        }
        if (microbatch == 1) {         // halves before the whole, whatever the order of time
            std::vector<float> of[6];  // each part's, then that of all five
            for (int part = 0; part <= 5; part++) {
                tree_gradient(&t, part % 5, part < 5 ? 1 : 5, m->gradients);
                of[part].resize(values.size());
                backend_download(of[part].data(), m->gradients, values.size() * sizeof(float));
            }
            for (size_t i = 0; i < values.size(); i++) {
                float halves = (of[0][i] + of[1][i]) + (of[2][i] + (of[3][i] + of[4][i]));
                pairwise &= of[5][i] == halves;
                orders_differ |= halves != (((of[0][i] + of[1][i]) + of[2][i]) + of[3][i]) + of[4][i];
            }
        }
    }
    report(pairwise && orders_differ, "sum of five parts", "in pairs, bit for bit");
    report(less && losses < limit && gradients < limit && quartiles < limit && whole.step == 3,
           "micro-batches of a step", "losses %.2g apart, quartiles %.2g, gradients %.2g", losses, quartiles,
           gradients);
}

int main(int argc, char** argv) {
    return guarded([&] { return run_tests(argc, argv); });
}
