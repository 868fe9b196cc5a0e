// kernels.cu: in a build for the GPU, every launcher against the CPU function of its name. It includes the program, so
// that what is tested is what runs.
//
//   build/kernels_bf16          every launcher, many shapes
//   build/kernels_bf16 tiny     few and small shapes, for compute-sanitizer; behind it a layer's NAME
//   build/kernels_bf16 limits   the largest sizes that the flags allow, some minutes
//
// One line a layer and pass. Inputs are rounded to the layers' precision first, so that an error is the launcher's own.
// What is overwritten is NaN before, as is the workspace; two runs must agree in every bit. Comparisons are written so
// that a NaN fails.

#include <curand_kernel.h>

#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

static int sum_passes = 0;  // launchers that have read a tensor only for the sums that a norm wants
#define PROFILE(...) (sum_passes += std::string_view(#__VA_ARGS__).starts_with("\"group norm sums\""))
#define TESTING
#include "../train_unet.cu"

#include "cases.h"
#include "microbatch.h"

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
static void append(std::vector<double>* numbers, const Moments& tile) {
    numbers->insert(numbers->end(), {(double)tile.mean, (double)tile.squares});
}
static void append(std::vector<double>* numbers, const NormSums& sums) {
    numbers->insert(numbers->end(), {(double)sums.dy, (double)sums.dy_x_hat});
}
static void append(std::vector<double>* numbers, const GroupStatistics& group) {
    numbers->insert(numbers->end(), {(double)group.mean, (double)group.rstd});
}
static void append(std::vector<double>* numbers, const ScaleShift& channel) {
    numbers->insert(numbers->end(), {(double)channel.scale, (double)channel.shift});
}
static void append(std::vector<double>* numbers, const SampleSpec& p) {
    numbers->insert(numbers->end(), {(double)p.seed, (double)p.label});
}
static void append(std::vector<double>* numbers, const ScheduleRow& t) {
    numbers->insert(numbers->end(), {t.alpha, t.sigma, t.target_eps, t.target_x0, t.weight,
                                     t.posterior_log_variance_clipped, t.log_variance_range, t.mean_error});
}
static void append(std::vector<double>* numbers, const SamplerStep& s) {
    numbers->insert(numbers->end(), {(double)s.number, (double)s.timestep, s.update.x});
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
    typedef side::Concat Concat;                                                                 \
    template <int TAPS> using ConvLayer = side::ConvLayer<TAPS>;                                 \
    static void weight_gradient(side::Conv layer, Tensor dout, Tensor x, side::Rows demb = {}) { \
        launched([=] { side::conv3x3_backward_weight(layer, dout, x, demb); });                  \
    }                                                                                            \
    static void weight_gradient(side::Linear layer, Tensor dout, Concat x) {                     \
        launched([=] { side::conv1x1_backward_weight(layer, dout, x); });                        \
    }                                                                                            \
    static constexpr auto groupnorm_forward = side::groupnorm_forward;                           \
    static constexpr auto groupnorm_backward_sums = side::groupnorm_backward_sums;               \
    static constexpr auto groupnorm_backward = side::groupnorm_backward;                         \
    static constexpr auto attention_forward = side::attention_forward;                           \
    static constexpr auto attention_backward = side::attention_backward;                         \
    static constexpr auto multiply_matrices = side::multiply_matrices;                           \
    static void channel_moments(Tensor x) { side::channel_moments(x); }

// A GEMM is done by the kernel that the program chooses, unless a test names a portable one (0 to 2), or how many
// splits there are.
static int forced_tile = -1, forced_splits = 0;
static std::string forced() {
    return forced_tile < 0 && !forced_splits ? "" : text(" tile %d splits %d", forced_tile, forced_splits);
}
template <int TAPS, bool TRANSPOSED> static void launch_as_forced(const gpu::Gemm& g) {
    gpu::GemmChoice choice = gpu::choose(g, TAPS, TRANSPOSED);
    const bool forces = forced_tile >= 0 || (forced_splits && choice.kernel < gpu::HOPPER_128);
    if (forces && choice.kernel != gpu::PORTABLE_128x16) {
        const auto kernel = forced_tile < 0 ? choice.kernel : (gpu::GemmKernel)forced_tile;
        const int splits = forced_splits ? forced_splits : gpu::choose_portable(g, TAPS, TRANSPOSED).splits;
        choice = {kernel, std::min(splits, g.chunks())};
    }
    gpu::launch_gemm<TAPS, TRANSPOSED>(g, choice);
}

static void at_once(auto launches) { launches(); }

struct OnDevice {
    LAYERS_OF(gpu, on_side_stream_deferred)
    template <int TAPS>
    static void product_forward(Tensor out, Concat x, ConvLayer<TAPS> layer, gpu::ForwardOptions options = {}) {
        launch_as_forced<TAPS, false>(gpu::forward_gemm(out, x, layer, options));
    }
    template <int TAPS>
    static void input_gradient(Concat dx, Tensor dout, ConvLayer<TAPS> layer, gpu::BackwardOptions options = {}) {
        launch_as_forced<TAPS, true>(gpu::backward_input_gemm(dx, dout, layer, options));
    }
    static Concat groupnorm_for_conv3x3(Tensor normed, const gpu::Norm& norm, int O) {
        if (forced_tile < 0) return gpu::groupnorm_for_conv3x3(normed, norm, O);
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
    static void product_forward(Tensor out, Concat x, cpu::Conv layer, cpu::ForwardOptions options = {}) {
        cpu::conv3x3_forward(out, x, layer, options);
    }
    static void product_forward(Tensor out, Concat x, cpu::Linear layer, cpu::ForwardOptions options = {}) {
        cpu::conv1x1_forward(out, x, layer, options);
    }
    static void input_gradient(Tensor dx, Tensor dout, cpu::Conv layer, cpu::BackwardOptions options = {}) {
        cpu::conv3x3_backward_input(dx, dout, layer, options);
    }
    static void input_gradient(Concat dx, Tensor dout, cpu::Linear layer, cpu::BackwardOptions options = {}) {
        cpu::conv1x1_backward_input(dx, dout, layer, options);
    }
    static constexpr auto groupnorm_for_conv3x3 = cpu::groupnorm_for_conv3x3;
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
        return typename On::template ConvLayer<TAPS>{on(w), on(bias), on(dw), on(dbias)};
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
        return typename decltype(on)::Concat(Tensor{on(a), s.M, 1, 1, s.C},
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

template <typename T> static std::vector<T> of_tiles(int B, int pixels, int C) {
    return std::vector<T>((size_t)B * norm_tiles(pixels) * C);
}

// A group norm of (B, H, W, C) and (B, H, W, C2), with all that belongs to it.
struct NormTensors {
    int B, H, W, C, C2, G;
    bool silu;
    Layer x, x2;
    Floats w, bias, dw, dbias;
    Pair<GroupStatistics> statistics;
    Pair<ScaleShift> half_scale_shift;
    Pair<Moments> moments, moments2;
    Pair<NormSums> sums;
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
          statistics(of_tiles<GroupStatistics>(B, 1, C + C2)),
          half_scale_shift(of_tiles<ScaleShift>(B, 1, C + C2)),
          moments(of_tiles<Moments>(B, H * W, C)),
          moments2(of_tiles<Moments>(B, H * W, C2)),
          sums(of_tiles<NormSums>(B, H * W, C + C2)),
          modulated(modulated),
          modulation((size_t)B * pitch(), 0.5f),
          dmodulation((size_t)B * pitch()) {}
    int pitch() const { return 2 * (C + C2) + 8; }
    template <typename On> auto joined(On on, Layer& first, Layer& second) {
        typedef typename On::Tensor Tensor;
        return typename On::Concat(Tensor{on(first), B, H, W, C}, Tensor{on(second, C2), B, H, W, C2});
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
                            on(half_scale_shift),
                            on(sums),
                            {on(modulation, modulated), pitch()},
                            {on(dmodulation, modulated), pitch()}};
    }
    // What forward leaves of each image's channels.
    std::vector<Output> record(double limit) {
        return {{&statistics, WRITTEN, "mean", limit, 0, 2},
                {&statistics, WRITTEN, "rstd", limit, 1, 2},
                {&half_scale_shift, WRITTEN, "scale", limit, 0, 2},
                {&half_scale_shift, WRITTEN, "shift", limit, 1, 2}};
    }
    void upload_record() { statistics.upload(), half_scale_shift.upload(); }
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
            auto from = on.groupnorm_for_conv3x3({on(normed), B, H, W, K}, split(on), O);
            if (on.here)
                for (float& value : normed.host) value = rounded(value);
#ifdef HOPPER
            else if (s.on_the_way && !from.half_scale_shift)
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
    std::vector<SampleSpec> pictures;
    for (int i = 0; i < ceil_div(B, 2); i++) pictures.push_back({(uint32_t)i, i * i % 7});
    Pair<SampleSpec> begins(pictures);
    std::vector<int> some_labels = some_timesteps(B);
    for (int& label : some_labels) label %= 8;
    Pair<int> labels(some_labels);
    check("set the model's inputs", shape,
          {{&t, WRITTEN, "timesteps", EXACT}, {&labels, WRITTEN, "labels", EXACT}}, [&](auto on) {
              on.run(SetModelInputs{on(t), on(labels), on(begins), 731, B, (int)pictures.size(), 7});
          });
    Layer table((size_t)8 * C), rows((size_t)B * C);
    Floats dtable((size_t)8 * C);
    check("label embedding", shape, {{&rows, WRITTEN, "out", EXACT}}, [&](auto on) {
        typename decltype(on)::Tensor out = {on(rows), B, 1, 1, C};
        on.run(LabelForward<typename decltype(on)::T>{out, on(table), on(labels)});
    });
    check("label embedding backward", shape, {{&dtable, WRITTEN, "dtable", FLOAT_LIMIT}}, [&](auto on) {
        typename decltype(on)::Tensor from = {on(rows), B, 1, 1, C};
        on.run(LabelBackward<typename decltype(on)::T>{on(dtable), from, on(labels), 8});
    });
    auto round_there = [](floatX* to, const float* from, size_t n) {
        run(RoundWeights{.to = to, .from = from, .n = n});
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
    Floats images((size_t)B * channels * H * W, 0.5f), target(n), x(n), losses((size_t)B * loss_chunks(H * W));
    std::vector<ScheduleRow> timesteps;
    // the two parts of the target that `predict` names
    auto eps_part = [&](float alpha) { return predict == PREDICT_EPS ? 1 : predict == PREDICT_V ? alpha : 0; };
    auto x0_part = [&](float sigma) { return predict == PREDICT_EPS ? 0 : predict == PREDICT_V ? -sigma : 1; };
    for (int i = 0; i < 1000; i++)
        timesteps.push_back(
            {0.3f + 0.001f * i, 0.9f - 0.0007f * i, eps_part(0.3f + 0.001f * i), x0_part(0.9f - 0.0007f * i),
             0.5f + 0.001f * i, -3 - 0.005f * i, 0.3f, 0.1f, 0.001f * (i + 1), 0.2f + 0.001f * i});
    Pair<ScheduleRow> chain(timesteps);
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
                                                        .seed = 77,
                                                        .stream = STREAM_MATCHING_NOISE});
          });
    target.upload();

    Output input_output = {&input, KEPT, "input", LIMIT};
    std::vector<SampleSpec> noises;
    for (uint32_t seed : consecutive(41, B)) noises.push_back({seed, 0});
    noises.back() = {4000000000u, 0};
    Pair<SampleSpec> begins(noises);
    Floats saved(n);
    SamplerStep step = {.update = {.noise = 1}};
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
                                                 .specs = on(begins)};
    };
    auto check_update = [&](const char* name) {
        check(name, shape,
              {{&x, KEPT, "x", FLOAT_LIMIT},
               {&saved, KEPT, "saved", FLOAT_LIMIT},
               input_output},
              [&](auto on) { on.run(UpdateSamples<typename decltype(on)::T>{drawing(on), step}); });
    };
    check_update("start pictures");
    for (float sigma : {0.21f, 0.0f})
        for (bool within : {true, false}) {
            step = {9, 500, 1.1f, -0.4f, {0.3f, 0.65f, -0.2f, sigma, 0.7f, 0.4f}};
            clamps = within;
            guidance = within ? 2.5f : 1;
            step.max_log_sigma_ratio = within && channels <= PIXEL / 2 ? 0.7f : 0;
            x.upload();
            check_update("update pictures");
        }
    for (bool training : {true, false}) {
        std::vector<Output> outputs = {{&losses, WRITTEN, "losses", FLOAT_LIMIT}};
        if (training) outputs.push_back({&dout, WRITTEN, "dout", LIMIT});
        check("mean squared error", shape, outputs, [&](auto on) {
            BatchLoss batch = {on(losses), on(t), on(chain), B, H * W, channels, 1000};
            on.run(PredictionLoss<typename decltype(on)::T>{batch, on(out), on(target), on(dout, training)});
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
              on.run(PredictionLoss<typename decltype(on)::T>{batch, on(out), on(target), on(dout), on(images)});
          });
    Floats gaps(B), weights(B), errors(n);
    std::vector<int> before = early;
    for (int b = 0; b < B; b++) {
        before[b] /= 2;
        gaps.host[b] = b % 3 ? 0.1f : timesteps[early[b]].noise_fraction;  // every third time it is the image itself
    }
    gaps.upload();
    Pair<int> earlier(before);
    auto pairs = [&](auto on) { return ConsistencyPairs{on(earlier), on(gaps), on(errors), on(weights)}; };
    check("errors of the earlier", shape, {{&errors, WRITTEN, "errors", FLOAT_LIMIT}}, [&](auto on) {
        BatchLoss batch = {on(losses), on(mixed), on(chain), B, H * W, channels, 1000};
        on.run(EarlierErrors<typename decltype(on)::T>{pairs(on), batch, on(out), on(target)});
    });
    check("weights of pairs", shape, {{&weights, WRITTEN, "weights", FLOAT_LIMIT}}, [&](auto on) {
        BatchLoss batch = {on(losses), on(mixed), on(chain), B, H * W, channels, 1000};
        on.run(PairWeights{pairs(on), batch});
    });
    check("pseudo-Huber loss", shape, {{&losses, WRITTEN, "losses", FLOAT_LIMIT}, {&dout, WRITTEN, "dout", LIMIT}},
          [&](auto on) {
              BatchLoss batch = {on(losses), on(t), on(chain), B, H * W, channels, 1000};
              batch.on_paths = true;
              batch.width = W;
              on.run(PredictionLoss<typename decltype(on)::T>{batch, on(out), on(target), on(dout)});
          });
    Pair<int> of_batch(some_timesteps(3 * B + 1));
    auto part_of_batch = [&](auto on) {
        BatchLoss batch = {on(losses), on(of_batch), on(chain), 3 * B + 1, H * W, channels, 1000};
        batch.first = 2 * B + 1;
        batch.B = B;
        return batch;
    };
    Floats points(3 * n);  // noise alone, the start of the second step, and the end
    std::vector<int> of_samples(B);
    for (int b = 0; b < B; b++) of_samples[b] = (b + 1) % 2;
    Pair<int> chosen(of_samples);
    check("load points of paths", shape, {input_output, {&target, WRITTEN, "target", FLOAT_LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::T T;
        on.run(LoadPathPoints<T>{.x_t = {on(x_t), B, H, W, PIXEL},
                                 .target = on(target),
                                 .loss = part_of_batch(on),
                                 .points = on(points),
                                 .chosen = on(chosen),
                                 .consistency_steps = 2});
    });
    Floats pictures(images.host.size()), teacher(images.host.size()), fake(images.host.size());
    check("predicted x0", shape, {{&pictures, WRITTEN, "x0", FLOAT_LIMIT}}, [&](auto on) {
        on.run(PredictX0<typename decltype(on)::T>{.predicted = on(pictures),
                                                   .loss = part_of_batch(on),
                                                   .images = on(images),
                                                   .out = on(out),
                                                   .target = on(target),
                                                   .clamps = predict == PREDICT_V});
    });
    check("matching target", shape, {{&target, WRITTEN, "target", FLOAT_LIMIT}}, [&](auto on) {
        on.run(MatchingTarget<typename decltype(on)::T>{.target = on(target),
                                                        .loss = part_of_batch(on),
                                                        .out = on(out),
                                                        .pictures = on(pictures),
                                                        .teacher = on(teacher),
                                                        .fake = on(fake)});
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
    std::string shape = text("%d images of %d, batch %d, step %ld", count, size, batch, step);
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
    Pair<StepState> state(std::vector<StepState>(1, before)), fakes(std::vector<StepState>(1, before));
    Config config = default_config();
    config.diffusion_steps = 1000, config.timestep_sampling = bytes ? TIMESTEPS_LOGNORMAL : TIMESTEPS_UNIFORM;
    Pair<uint32_t> last_words(make_last_words(config));
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
                           0.3f,
                           on(last_words)};
    };
    config.hyper.lr_schedule = lr_schedule, config.hyper.warmup_steps = 100,
    config.hyper.lr_steps = 5000;
    config.hyper.weight_decay = 0.01f, config.hyper.final_lr_fraction = 0.1f,
    config.hyper.ema_rate[1] = 0.9999f;
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
                         .hyper = config.hyper});
    });
    sources.upload();
    check("load images", shape + (bytes ? " bytes" : " floats"), {{&images, WRITTEN, "images", EXACT}},
          [&](auto on) {
              on.run(
                  LoadImages{.images = on(images), .sources = on(sources), .source = source(on), .B = batch});
          });
    Pair<ScheduleRow> chain(make_schedule_rows(config));
    Pair<int> earlier(std::vector<int>(batch, 0));
    Floats gaps(batch);
    check("begin step on pairs", shape,
          {{&earlier, WRITTEN, "earlier", EXACT}, {&gaps, WRITTEN, "gaps", EXACT}}, [&](auto on) {
              ConsistencyPairs pairs = {
                  .timesteps = on(earlier), .gaps = on(gaps), .errors = nullptr, .weights = nullptr};
              on.run(BeginStep{on(state), on(timesteps), on(sources), on(told), source(on), config.hyper,
                               on(chain), pairs});
          });
    Pair<SampleSpec> specs(std::vector<SampleSpec>((size_t)batch));
    auto paths = [&](auto on) {
        BatchSource with_paths = source(on);
        with_paths.path_steps = 3;
        with_paths.consistency_steps = 2;
        with_paths.starts[0] = 999;
        with_paths.starts[1] = 77;
        return with_paths;
    };
    outputs.resize(3);
    check("begin step on paths", shape, outputs, [&](auto on) {
        on.run(BeginStep{on(state), on(timesteps), on(sources), on(told), paths(on), config.hyper});
    });
    check("start paths", shape, {{&specs, WRITTEN, "specs", EXACT}},
          [&](auto on) { on.run(StartPaths{on(specs), paths(on), batch, 3, 70000}); });
    Pair<int> noised(some_timesteps(batch));
    std::vector<Output> matching = {{&timesteps, WRITTEN, "timesteps", EXACT},
                                    {&noised, WRITTEN, "noised", EXACT},
                                    {&fakes, KEPT, "accepted", EXACT, ACCEPTED, FIELDS}};
    for (int field = LR; field <= EMA_WEIGHTS + 1; field++)
        matching.push_back({&fakes, KEPT, NAMES[field], ROUNDINGS, field, FIELDS});
    check("begin matching", shape, matching, [&](auto on) {
        on.run(BeginMatching{.fake_state = on(fakes),
                             .timesteps = on(timesteps),
                             .noised = on(noised),
                             .step = &on(state)->step,
                             .first = step / 2,
                             .hyper = config.hyper,
                             .batch = batch,
                             .diffusion_steps = 1000,
                             .seed = 99});
    });
    check("begin second step", shape, {{&timesteps, WRITTEN, "timesteps", EXACT}},
          [&](auto on) { on.run(SetTimesteps{on(timesteps), batch, 299}); });
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
    std::vector<ScheduleRow> timesteps(1000);
    for (int i = 0; i < 1000; i++) timesteps[i].weight = 0.8f + 0.0004f * i;
    Pair<ScheduleRow> chain(timesteps);
    Floats losses((size_t)batch * loss_chunks(elements / PIXEL), 500, 4000),
        norms((parameters + NORM_CHUNK - 1) / NORM_CHUNK, 1, 8);
    if (broken == 1) losses.host.back() = NAN;
    if (broken == 2) norms.host[0] = INFINITY;
    losses.upload(), norms.upload();
    StepState before = StepState();
    before.step = 1234567, before.update = {0.25f, 0.01f, 0.9f, 0.99f, 1e-8f, 0.5f, 0.6f, {0.7f}, 1.0f};
    before.history.seen = broken == 5 ? WINDOW_LEAST - 1 : 1000;
    double loss = 0, norm = 0;
    for (size_t i = 0; i < losses.host.size(); i++)
        loss += (double)timesteps[t.host[i / loss_chunks(elements / PIXEL)]].weight * losses.host[i] / batch /
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
    config.hyper.skip_outliers = 6, config.hyper.grad_clip = (float)sqrt(norm) / 2;
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
        on.run(FinishStep{on(state), batch_loss, on(norms), parameters, config.hyper});
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
              OptimiserMemory p = {.master = on(w), .adam_m = on(m), .adam_v = on(v)};
              for (int k = 0; k < MAX_EMAS; k++) p.ema[k] = on(ema[k], emas > k);
              on.run(UpdateWeights<typename decltype(on)::T>{p, on(gradient), on(working), n, n / 12 * 4, on(state)});
          });
    std::vector<float> device_w = w.download();
    std::vector<floatX> device_working = working.download();
    bool same = true;
    for (size_t i = 0; accepted && i < n; i++) same &= (float)device_working[i] == rounded(device_w[i]);
    if (!same) fault("AdamW", shape + ": the working copy is not w, rounded");
    Layer x(n), directions(n);
    Floats scales(n / CHANNEL_MULTIPLE + 1);
    for (size_t i = 0; i < scales.host.size(); i++) scales.host[i] = i % 3 ? 0.2f * i : 0;
    scales.upload();
    check("Muon's update", shape, {{&w, KEPT, "w", limit}, {&m, KEPT, "m", limit}, {&v, KEPT, "v", limit}}, [&](auto on) {
        OptimiserMemory p = {.master = on(w), .adam_m = on(m), .adam_v = on(v)};
        on.run(UpdateWeights<typename decltype(on)::T>{p, on(gradient), nullptr, n, n / 12 * 4, on(state), on(directions), on(scales)});
    });
    check("Muon's momentum", shape, {{&x, WRITTEN, "x", LIMIT}}, [&](auto on) {
        on.run(MuonMomentum<typename decltype(on)::T>{on(x), on(m), on(gradient), n, on(state)});
    });
    check("squared norm", shape, {{&parts, WRITTEN, "parts", FLOAT_LIMIT}},
          [&](auto on) { on.run(SquaredNorm{.chunk_sums = on(parts), .x = on(gradient), .n = n}); });
    check("sum of gradients", shape, {{&m, KEPT, "sum", EXACT}},
          [&](auto on) { on.run(AddFloats{.sum = on(m), .a = on(m), .b = on(gradient), .n = n}); });
}

// Products of matrices at once, some of which are no whole tiles. With norms their factors are as MuonNorms makes them.
static void test_products(RightMatrix right_lies, bool has_norms) {
    struct Size {
        int rows, columns;
    };
    const std::vector<Size> sizes = {{64, 144}, {16, 16}, {200, 48}, {128, 1152}, {16, 272}};
    size_t squares = 0, wholes = 0;
    for (Size s : sizes) squares += s.rows * s.rows, wholes += s.rows * s.columns;
    Layer out(wholes), left(squares, 0.2f, 0.3f), right(wholes), added(wholes);

    const char* lies = right_lies == RIGHT_TRANSPOSED ? "transposed" : "plain";
    check("products of matrices", text("%s%s", lies, has_norms ? ", norms" : ""),
          {{&out, WRITTEN, "out", LIMIT}}, [&](auto on) {
              typedef MatrixProductOf<typename decltype(on)::T> Product;
              std::vector<Product> products;
              size_t square = 0, whole = 0;
              int tiles = 0;
              for (Size s : sizes) {
                  Product product = {.out = {on(out) + whole, s.rows, 1, 1, s.columns},
                                     .left = {on(left) + square, s.rows, 1, 1, s.rows},
                                     .right = on(right) + whole,
                                     .alpha = 0.5f,
                                     .beta = 0.25f,
                                     .first_tile = tiles};
                  if (has_norms || tiles) product.added = {on(added) + whole, s.rows, 1, 1, s.columns};
                  tiles += product.tiles(right_lies);
                  products.push_back(product);
                  square += s.rows * s.rows, whole += s.rows * s.columns;
              }
              size_t count = products.size(), bytes = count * sizeof(Product);
              std::vector<Product> others = products;
              Product *list = products.data(), *other_list = others.data();
              if (!on.here) {
                  list = (Product*)backend_allocate(2 * bytes), other_list = list + count;
                  backend_upload(list, products.data(), bytes);
                  backend_upload(other_list, others.data(), bytes);
              }
              if (has_norms) on.run(MuonNorms<typename decltype(on)::T>{other_list, list, (int)count});
              on.multiply_matrices(list, (int)count, tiles, right_lies);
              if (has_norms) on.multiply_matrices(other_list, 1, products[0].tiles(right_lies), right_lies);
              if (!on.here) {
                  wait_for(newest_event);
                  CUDA_CHECK(cudaDeviceSynchronize());
                  backend_free(list);
              }
          });
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
    for (RightMatrix right_lies : {RIGHT_IN_ROWS, RIGHT_TRANSPOSED}) {
        for (bool has_norms : {false, true}) test_products(right_lies, has_norms);
    }
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
    for (RightMatrix right_lies : {RIGHT_IN_ROWS, RIGHT_TRANSPOSED}) {
        for (bool has_norms : {false, true}) test_products(right_lies, has_norms);
    }
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
        fail_usage("this program knows check, tiny and limits, and no %s", mode.c_str());
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

int main(int argc, char** argv) {
    return guarded([&] { return run_tests(argc, argv); });
}
