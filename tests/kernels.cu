// kernels.cu: compares every launcher of a build for the GPU with the CPU function of the same name. It includes the
// program, so that what is tested is what runs.
//
//   build/kernels_bf16             every launcher, in many shapes
//   build/kernels_bf16 tiny        few and small shapes, for compute-sanitizer
//   build/kernels_bf16 limits      the largest sizes that the flags allow; takes some minutes
//   build/kernels_bf16 tiny NAME   only layers whose name contains NAME; also behind limits and check
//
// One line is printed for each layer and pass. Inputs are rounded to the layers' precision first, so that an error is
// the launcher's own. What a launcher overwrites is NaN before it runs, and so is the workspace. It runs twice, and the
// two runs must agree in every bit. Comparisons are written so that a NaN fails.

#include <curand_kernel.h>

#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// Counts the launchers that read a tensor only for the sums that a norm wants. Where a product leaves these sums
// behind, there is no such launch.
static int sum_passes = 0;
#define PROFILE(...) (sum_passes += std::string_view(#__VA_ARGS__).starts_with("\"group norm sums\""))
#define TESTING
#include "../train_unet.cu"

#include "cases.h"
#include "microbatch.h"

// What the checks of one layer and pass came to.
struct Line {
    std::string layer;
    std::string worst_at;  // shape and output of the check that came closest to its limit
    std::string first_fault;
    int shapes = 0;
    int faults = 0;
    double worst = 0;    // the error of the check that came closest to its limit
    double allowed = 0;  // its limit
    double share = 0;    // worst / allowed
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
    if (line.faults == 0) line.first_fault = what;
    line.faults++;
}

static std::string only;  // layers whose name does not contain it are left out

static bool left_out(const std::string& layer) { return layer.find(only) == std::string::npos; }

static void report_lines() {
    for (const Line& line : lines) {
        if (left_out(line.layer)) continue;

        std::string faults = "";
        if (line.faults) faults = text("; %d faults, the first: %s", line.faults, line.first_fault.c_str());
        report(!line.faults, line.layer, "%d shapes, worst error %.1e of %.0e allowed (%s)%s", line.shapes, line.worst,
               line.allowed, line.worst_at.c_str(), faults.c_str());
    }
    lines.clear();
}

// ---- tensors and checks -----------------------------------------------------------------------------------

// The largest errors that are allowed, by error_of in cases.h. LIMIT is for what is stored in the layers' precision,
// FLOAT_LIMIT for what is stored in fp32, ROUNDINGS for a few operations in fp32.
static const double LIMIT = sizeof(floatX) == 2 ? 4e-3 : 1e-5;
static const double FLOAT_LIMIT = 1e-5;
static const double ROUNDINGS = 1e-6;
static const double EXACT = 0;
// Gradients of weights are sums over up to a million pixels, and the two sides add in different orders.
static const double WEIGHT_LIMIT = sizeof(floatX) == 2 ? 2e-5 : 1e-5;
// In bf16 it is twice PyTorch's own error, of which 2.6e-3 is the median of 200 draws, and 3.9e-3 the most (T = 64, two
// heads of 64 channels, an H200). Probabilities are rounded too, and their sums are small beside them.
static const double ATTENTION_LIMIT = sizeof(floatX) == 2 ? 5.2e-3 : 1e-5;
// dq and dk are computed from probabilities and their gradients, both rounded to bf16. The limit is the rounding that
// was measured, without a margin.
static const double ATTENTION_BACKWARD_LIMIT = sizeof(floatX) == 2 ? 8e-3 : 1e-5;

static float rounded(float value) { return (float)(floatX)value; }

// A nearly normal number of mean 0 and variance 1: the sum of four uniform ones.
static float random_normal() {
    static uint64_t state = 1;
    float sum = -2;
    for (int i = 0; i < 4; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        sum += (float)(state >> 40) * 0x1p-24f;
    }
    return sum * 1.7320508f;
}

// append() adds the numbers of an element that are compared.
template <typename T> static void append(std::vector<double>* numbers, const T& element) {
    numbers->push_back((double)element);
}

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

static void append(std::vector<double>* numbers, const SampleSpec& spec) {
    numbers->insert(numbers->end(), {(double)spec.seed, (double)spec.label});
}

static void append(std::vector<double>* numbers, const ScheduleRow& row) {
    numbers->insert(numbers->end(), {row.alpha, row.sigma, row.target_eps, row.target_x0, row.weight,
                                     row.posterior_log_variance_clipped, row.log_variance_range, row.mean_error});
}

static void append(std::vector<double>* numbers, const SamplerStep& step) {
    numbers->insert(numbers->end(), {(double)step.number, (double)step.timestep, step.update.x});
}

// Where the numbers of a StepState stand, in the order in which the append() below adds them.
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

static void append(std::vector<double>* numbers, const StepState& state) {
    const AdamW& update = state.update;
    numbers->insert(numbers->end(), {(double)state.step, update.lr, update.weight_decay, update.beta1, update.beta2,
                                     update.eps, update.correction1, update.correction2});
    numbers->insert(numbers->end(), update.ema_weight, update.ema_weight + MAX_EMAS);
    numbers->insert(numbers->end(),
                    {update.clip, (double)state.finite, (double)state.accepted, state.loss, state.norm});
    numbers->insert(numbers->end(), state.quartile_sums, state.quartile_sums + 4);
    numbers->insert(numbers->end(), state.quartile_counts, state.quartile_counts + 4);

    const History& history = state.history;
    numbers->insert(numbers->end(), {(double)history.skipped, (double)history.seen});
    numbers->insert(numbers->end(), history.losses, history.losses + WINDOW);
    numbers->insert(numbers->end(), history.norms, history.norms + WINDOW);
}

// A tensor of any type on both sides: on the device, and on the host for the CPU's functions.
struct AnyBuffer {
    virtual ~AnyBuffer() {}
    virtual void upload() = 0;                   // the host's values to the device
    virtual void poison() = 0;                   // makes the device's NaN
    virtual std::vector<char> bits() const = 0;  // the device's
    virtual std::vector<double> numbers(bool of_host) const = 0;
};

// On the device it holds T. So it does on the host, except that floatX is a float there. The device's memory is no
// larger than the tensor, so that compute-sanitizer's memcheck sees an access past its end.
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

    // Rounds the host's values to T, so that both sides start from the same numbers.
    void upload() override {
        std::vector<T> values(host.begin(), host.end());
        for (size_t i = 0; i < host.size(); i++) host[i] = (Host)values[i];
        backend_upload(device, values.data(), bytes());
    }

    // Bytes of 255 are NaN in any float type.
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

    std::vector<double> numbers(bool of_host) const override {
        std::vector<double> all;
        all.reserve(host.size());
        if (of_host)
            for (const Host& value : host) append(&all, value);
        else
            for (const T& value : download()) append(&all, (Host)value);
        return all;
    }
};
typedef Pair<floatX> Layer;
typedef Pair<float> Floats;

// OnDevice and OnHost are the two sides of a check. A test writes the call of a launcher once, as a lambda of a side
// `on`: on(x) is the memory of the Pair x on that side, or null where `present` is false, and on.groupnorm_forward is
// that side's function. LAYERS_OF declares what both sides have.
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

// A matrix product is done by the kernel that the program chooses, unless forced_tile is a portable one (0 to 2, as in
// GemmKernel). A portable kernel splits the sum as the program chooses, unless forced_splits says into how many parts.
static int forced_tile = -1;
static int forced_splits = 0;

static void force(int tile, int splits) {
    forced_tile = tile;
    forced_splits = splits;
}

static void force_nothing() { force(-1, 0); }

static std::string forced() {
    if (forced_tile < 0 && forced_splits == 0) return "";
    return text(" tile %d splits %d", forced_tile, forced_splits);
}

// Products with 16 channels or fewer have a kernel of their own, PORTABLE_128x16, which is always left to them.
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
    static constexpr bool is_host = false;
    typedef floatX T;

    template <typename Element> Element* operator()(Pair<Element>& pair, bool present = true) const {
        return present ? pair.device : nullptr;
    }

    template <typename Layer> void run(Layer layer) const { gpu::run(layer); }

    template <int TAPS>
    static void product_forward(Tensor out, Concat x, ConvLayer<TAPS> layer, gpu::ForwardOptions options = {}) {
        launch_as_forced<TAPS, false>(gpu::forward_gemm(out, x, layer, options));
    }

    template <int TAPS>
    static void input_gradient(Concat dx, Tensor dout, ConvLayer<TAPS> layer, gpu::BackwardOptions options = {}) {
        launch_as_forced<TAPS, true>(gpu::backward_input_gemm(dx, dout, layer, options));
    }

    // A portable kernel cannot norm what it reads, so that before one the norm is a launch of its own.
    static Concat groupnorm_for_conv3x3(Tensor normed, const gpu::Norm& norm, int O) {
        if (forced_tile < 0) return gpu::groupnorm_for_conv3x3(normed, norm, O);

        gpu::groupnorm_forward(normed, norm);
        return normed;
    }
};

struct OnHost {
    LAYERS_OF(cpu, at_once)
    static constexpr bool is_host = true;
    typedef float T;

    template <typename Element>
    typename Pair<Element>::Host* operator()(Pair<Element>& pair, bool present = true) const {
        return present ? pair.host.data() : nullptr;
    }

    template <typename Layer> void run(Layer layer) const { cpu::run(layer); }

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
};

// A launcher overwrites what is there (WRITTEN: NaN before), or adds to it or works in place (KEPT).
enum Before { WRITTEN, KEPT };

// A tensor that a launcher writes, and how near the two sides must be. If there is more than one of `parts`, only the
// one numbered `part` is compared: the tensor is then rows of so many parts, each of `width` numbers.
struct Output {
    AnyBuffer* buffer;
    Before before;
    const char* name;
    double limit;
    int part = 0, parts = 1, width = 1;

    std::vector<double> numbers(bool of_host) const {
        std::vector<double> all = buffer->numbers(of_host);
        if (parts == 1) return all;

        std::vector<double> own;
        for (size_t i = 0; i < all.size(); i++)
            if ((int)(i / width % parts) == part) own.push_back(all[i]);
        return own;
    }
};

// How much of what is allowed an error takes: more than 1 is a fault.
static double share_of(double error, double limit) {
    if (error == 0) return 0;
    if (std::isnan(error) || limit == 0) return INFINITY;
    return error / limit;
}

// Runs call(OnDevice()) twice and call(OnHost()) once, and compares what they left in the outputs. The CPU's results
// stay in `host`, for the test to go on with.
template <typename Call>
static void check(const std::string& layer, const std::string& shape, const std::vector<Output>& outputs, Call call) {
    if (left_out(layer)) return;
    line_of(layer).shapes++;

    std::vector<std::vector<char>> bits[2];  // of each run's outputs
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
        double share = share_of(error, o.limit);
        if (line.worst_at.empty() || share > line.share) {
            line.worst = error;
            line.allowed = o.limit;
            line.share = share;
            line.worst_at = shape + " " + o.name;
        }
    }
}

// The same for a function of each side: call(function, on).
template <typename Gpu, typename Cpu, typename Call>
static void check(const std::string& layer, const std::string& shape, const std::vector<Output>& outputs, Gpu gpu,
                  Cpu cpu, Call call) {
    check(layer, shape, outputs, [&](auto on) {
        if constexpr (on.is_host) call(cpu, on);
        else call(gpu, on);
    });
}

// ---- matrix products --------------------------------------------------------------------------------------
// M is the number of pixels of all images, and K that of the channels of x and x2 together.

// The parameters of a product, w (O, TAPS, C) and bias (O), and their gradients.
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

// A 3x3 convolution of x (B, H, W, C) to out (B, H, W, O).
struct ConvTest {
    int B, H, W, C, O;
    bool emb = false;       // forward adds a row for each image
    bool residual = false;  // forward adds a tensor
    bool in_place = false;  // forward adds what `out` holds
    bool dx = true;         // backward computes the gradient of x
    bool demb = false;      // backward computes the gradient of emb
};

static void test_conv(const ConvTest& s) {
    int B = s.B, H = s.H, W = s.W, C = s.C, O = s.O;
    std::string shape = text("B%d H%d W%d C%d O%d", B, H, W, C, O) + forced();
    size_t M = (size_t)B * H * W;
    int pitch = O + 24;  // what stands behind an image's O channels in a row of demb stays as it is
    Layer x(M * C);                // (B, H, W, C)
    Layer emb((size_t)B * pitch);  // (B, pitch), of which (B, O) are read
    Layer residual(M * O);         // (B, H, W, O)
    Layer out(M * O);              // (B, H, W, O)
    Weights<9> weights(O, C);

    check("conv3x3 forward", shape, {{&out, s.in_place ? KEPT : WRITTEN, "out", LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::Tensor Tensor;
        Tensor to = {on(out), B, H, W, O};
        Tensor added = s.in_place ? to : Tensor{on(residual, s.residual), B, H, W, O};
        on.product_forward(to, Tensor{on(x), B, H, W, C}, weights(on),
                           {.emb = {on(emb, s.emb), pitch}, .residual = added});
    });

    Layer dout(M * O);              // (B, H, W, O)
    Layer dx(M * C);                // (B, H, W, C)
    Layer demb((size_t)B * pitch);  // (B, pitch), of which (B, O) are written
    std::vector<Output> outputs = weights.gradients(WEIGHT_LIMIT);
    if (s.dx) outputs.push_back({&dx, WRITTEN, "dx", LIMIT});
    if (s.demb) outputs.push_back({&demb, KEPT, "demb", LIMIT});
    check("conv3x3 backward", shape, outputs, [&](auto on) {
        typedef typename decltype(on)::Tensor Tensor;
        Tensor from = {on(dout), B, H, W, O};
        on.weight_gradient(weights(on), from, Tensor{on(x), B, H, W, C}, {on(demb, s.demb), pitch});
        if (s.dx) on.input_gradient(Tensor{on(dx), B, H, W, C}, from, weights(on));

        // Over so many pixels the fast CPU function, which sums in fp32, is no measure. The plain one sums in double.
        if constexpr (on.is_host)
            if (M >= 300000)
                cpu::plain::conv3x3_backward_weight(weights(on), from, Tensor{on(x), B, H, W, C},
                                                    {on(demb, s.demb), pitch});
    });
}

// A linear layer of x (M, C) and x2 (M, C2) side by side, to out (M, O).
struct LinearTest {
    int M, C, C2 = 0, O = 0;
    bool residual = false;    // forward adds a tensor
    bool dx = true;           // backward computes the gradients of x and x2
    bool accumulate = false;  // backward adds to dx
};

static void test_linear(const LinearTest& s) {
    std::string shape = text("M%d C%d+%d O%d", s.M, s.C, s.C2, s.O) + forced();
    size_t M = s.M;
    Layer x(M * s.C);         // (M, C)
    Layer x2(M * s.C2);       // (M, C2)
    Layer residual(M * s.O);  // (M, O)
    Layer out(M * s.O);       // (M, O)
    Weights<1> weights(s.O, s.C + s.C2);
    auto joined = [&](auto on, Layer& first, Layer& second) {
        typedef typename decltype(on)::Tensor Tensor;
        typedef typename decltype(on)::Concat Concat;
        return Concat(Tensor{on(first), s.M, 1, 1, s.C}, Tensor{on(second, s.C2), s.M, 1, 1, s.C2});
    };

    check("linear forward", shape, {{&out, WRITTEN, "out", LIMIT}}, [&](auto on) {
        on.product_forward({on(out), s.M, 1, 1, s.O}, joined(on, x, x2), weights(on),
                           {.residual = {on(residual, s.residual), s.M, 1, 1, s.O}});
    });

    Layer dout(M * s.O);  // (M, O)
    Layer dx(M * s.C);    // (M, C)
    Layer dx2(M * s.C2);  // (M, C2)
    Before before = s.accumulate ? KEPT : WRITTEN;
    std::vector<Output> outputs = weights.gradients(WEIGHT_LIMIT);
    if (s.dx) outputs.push_back({&dx, before, "dx", LIMIT});
    if (s.dx && s.C2) outputs.push_back({&dx2, before, "dx2", LIMIT});
    check("linear backward", shape, outputs, [&](auto on) {
        typename decltype(on)::Tensor from = {on(dout), s.M, 1, 1, s.O};
        on.weight_gradient(weights(on), from, joined(on, x, x2));
        if (s.dx) on.input_gradient(joined(on, dx, dx2), from, weights(on), {.accumulate = s.accumulate});
    });
}

// ---- group norm, attention, resampling --------------------------------------------------------------------

// Zeros for each channel of every tile of the images.
template <typename T> static std::vector<T> of_tiles(int B, int pixels, int C) {
    return std::vector<T>((size_t)B * norm_tiles(pixels) * C);
}

// A group norm of x (B, H, W, C) and x2 (B, H, W, C2) side by side, with all that belongs to it.
struct NormTensors {
    int B, H, W, C, C2, G;
    bool silu;
    Layer x, x2;
    Floats w, bias, dw, dbias;
    Pair<GroupStatistics> statistics;
    Pair<ScaleShift> half_scale_shift;
    Pair<Moments> moments, moments2;  // of x and of x2
    Pair<NormSums> sums;
    bool modulated;
    Layer modulation, dmodulation;  // (B, pitch()), of which 2 (C + C2) numbers are read

    NormTensors(int B, int H, int W, int C, int C2, int G, bool silu, float mean = 0, bool modulated = false)
        : B(B),
          H(H),
          W(W),
          C(C),
          C2(C2),
          G(G),
          silu(silu),
          x((size_t)B * H * W * C, 1, mean),
          x2((size_t)B * H * W * C2, 1, mean),
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
        joined_x.first.moments = on(moments);
        joined_x.second.moments = on(moments2, C2);

        typedef std::remove_pointer_t<decltype(on(x))> Real;
        return NormOf<Real>{.x = joined_x,
                            .groups = G,
                            .silu = silu,
                            .w = on(w),
                            .bias = on(bias),
                            .dw = on(dw),
                            .dbias = on(dbias),
                            .statistics = on(statistics),
                            .half_scale_shift = on(half_scale_shift),
                            .sums = on(sums),
                            .modulation = {on(modulation, modulated), pitch()},
                            .dmodulation = {on(dmodulation, modulated), pitch()}};
    }

    // What forward leaves of each image's channels, for backward.
    std::vector<Output> record(double limit) {
        return {{&statistics, WRITTEN, "mean", limit, 0, 2},
                {&statistics, WRITTEN, "rstd", limit, 1, 2},
                {&half_scale_shift, WRITTEN, "scale", limit, 0, 2},
                {&half_scale_shift, WRITTEN, "shift", limit, 1, 2}};
    }
    void upload_record() {
        statistics.upload();
        half_scale_shift.upload();
    }

    // The moments of x and x2, which forward reads.
    template <typename On> void measure(On on) {
        auto x = (*this)(on).x;
        if (!on.is_host) {
            moments.poison();
            moments2.poison();
        }
        on.channel_moments(x.first);
        if (C2) on.channel_moments(x.second);
    }
};

// A group norm over images of T pixels.
struct NormTest {
    int B, T, C, C2 = 0, G = 32;
    bool silu = true;
    bool accumulate = false;  // backward adds to dx
    bool residual = false;    // backward adds a tensor to dx
    float mean = 0.3f;        // of x
    bool modulated = false;
};

static void test_norm(const NormTest& s) {
    std::string shape = text("B%d T%d C%d+%d G%d", s.B, s.T, s.C, s.C2, s.G);
    if (s.silu) shape += " SiLU";
    if (s.accumulate) shape += " adding";
    if (s.residual) shape += " residual";
    if (s.modulated) shape += " modulated";
    int K = s.C + s.C2;
    size_t M = (size_t)s.B * s.T;
    NormTensors norm(s.B, 1, s.T, s.C, s.C2, s.G, s.silu, s.mean, s.modulated);
    Layer out(M * K);  // (B, 1, T, K)

    std::vector<Output> written = norm.record(FLOAT_LIMIT);
    written.push_back({&out, WRITTEN, "out", LIMIT});
    check("groupnorm forward", shape, written, [&](auto on) {
        norm.measure(on);
        on.groupnorm_forward({on(out), s.B, 1, s.T, K}, norm(on));
    });
    norm.upload_record();  // from here on both sides start from the CPU's

    bool in_place = !s.accumulate && !s.C2 && !s.residual;  // dx is then the memory of dy
    Layer dy(M * K);          // (B, 1, T, K)
    Layer residual(M * s.C);  // (B, 1, T, C)
    Layer dx(M * s.C);        // (B, 1, T, C)
    Layer dx2(M * s.C2);      // (B, 1, T, C2)
    Layer& first_dx = in_place ? dy : dx;
    Before before = s.accumulate || in_place ? KEPT : WRITTEN;

    // Backward also writes the normed activations, over dy or into a tensor of their own.
    for (bool over_dy : {false, true}) {
        if (over_dy && in_place) continue;
        Layer& normed = over_dy ? dy : out;
        // dy is rounded on the way to dx, which may add half as much again
        std::vector<Output> outputs = {{&norm.dw, WRITTEN, "dw", FLOAT_LIMIT},
                                       {&norm.dbias, WRITTEN, "dbias", FLOAT_LIMIT},
                                       {&first_dx, before, "dx", 1.5 * LIMIT},
                                       {&normed, over_dy ? KEPT : WRITTEN, "normed", LIMIT}};
        if (s.C2) outputs.push_back({&dx2, before, "dx2", 1.5 * LIMIT});
        if (s.modulated) outputs.push_back({&norm.dmodulation, KEPT, "dmodulation", LIMIT});

        check("groupnorm backward", shape + (over_dy ? " normed over dy" : ""), outputs, [&](auto on) {
            typedef typename decltype(on)::Tensor Tensor;
            typedef typename decltype(on)::T T;
            Tensor gradient = {on(dy), s.B, 1, s.T, K};  // first of the norm's output, then before the SiLU
            if (!on.is_host) {
                dy.upload();
                norm.sums.poison();
            }
            on.groupnorm_backward_sums(gradient, gradient, norm(on));
            if (s.modulated) on.run(ModulationBackward<T>{norm(on)});

            Tensor added = {on(residual, s.residual), s.B, 1, s.T, s.C};
            on.groupnorm_backward(norm.joined(on, first_dx, dx2), {on(normed), s.B, 1, s.T, K}, gradient, norm(on),
                                  {.residual = added, .accumulate = s.accumulate});
        });
    }
}

// A norm between two products, of 3x3 or 1x1. The first product leaves the moments of its output behind. The input
// gradient of the second computes the first half of the norm's gradient. In backward the norm's input is split into
// C and C2 channels.
struct NormedProductTest {
    int B, H, W, C, C2 = 0, O = 64, G = 32;
    bool silu = true, modulated = false;
    bool on_the_way = false;  // on Hopper the second product must itself norm what it reads
};

template <int TAPS> static void test_normed_product(const NormedProductTest& s) {
    std::string shape = text("B%d H%d W%d C%d+%d O%d G%d", s.B, s.H, s.W, s.C, s.C2, s.O, s.G);
    if (s.silu) shape += " SiLU";
    if (s.modulated) shape += " modulated";
    shape += forced();
    int B = s.B, H = s.H, W = s.W, O = s.O;
    int T = H * W;
    int K = s.C + s.C2;
    size_t M = (size_t)B * T;
    NormTensors norm(B, H, W, K, 0, s.G, s.silu, 0, s.modulated);
    Layer x(M * O);    // (B, H, W, O)
    Layer out(M * K);  // (B, H, W, K)
    Weights<TAPS> weights(K, O);
    const char* layer = TAPS == 9 ? "conv3x3 then norm" : "linear then norm";

    // A portable tile that is not split must leave a norm's sums behind if it holds whole parts of images, and only
    // then.
    bool whole = forced_tile < 2 && T % 128 == 0 && (TAPS == 1 || (H % 8 == 0 && W % 16 == 0));
    if (T == 64) whole = TAPS == 1 || H == 8;
    auto check_sums = [&](int before) {
        if (forced_tile >= 0 && forced_splits == 1 && (sum_passes > before) == whole)
            fault(layer, shape + (whole ? ": left no sums behind" : ": left sums behind"));
    };

    // The first product, and the norm of it.
    check(layer, shape, {{&norm.x, WRITTEN, "product", LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::Tensor Tensor;
        Tensor from = {on(x), B, H, W, O};
        const int before = sum_passes;
        if (!on.is_host) norm.moments.poison();
        on.product_forward(norm(on).x.first, from, weights(on));
        if (!on.is_host) check_sums(before);
    });

    // From here on both sides read the product that the launcher wrote.
    std::vector<floatX> product = norm.x.download();
    norm.x.host.assign(product.begin(), product.end());
    cpu::channel_moments(norm(OnHost()).x.first);
    std::vector<Output> written = norm.record(LIMIT);
    written.push_back({&out, WRITTEN, "out", 1.5 * LIMIT});
    check(layer, shape, written, [&](auto on) { on.groupnorm_forward({on(out), B, H, W, K}, norm(on)); });

    // Forward through a norm and the second product.
    NormTensors split(B, H, W, s.C, s.C2, s.G, s.silu, 0, s.modulated);
    Weights<TAPS> second(O, K);
    if (TAPS == 9) {
        Layer normed(M * K);  // (B, H, W, K)
        Layer next(M * O);    // (B, H, W, O)
        std::vector<Output> outputs = split.record(LIMIT);
        outputs.push_back({&next, WRITTEN, "product", LIMIT});
        check("norm then conv3x3", shape, outputs, [&](auto on) {
            split.measure(on);
            auto from = on.groupnorm_for_conv3x3({on(normed), B, H, W, K}, split(on), O);
            if (on.is_host)
                for (float& value : normed.host) value = rounded(value);
#ifdef HOPPER
            else if (s.on_the_way && !from.half_scale_shift)
                report(false, "norm then conv3x3", "%s: not normed on the way", shape.c_str());
#endif
            on.product_forward({on(next), B, H, W, O}, from, second(on));
        });
    }

    // Backward through the second product and the norm.
    Layer dout(M * O);     // (B, H, W, O)
    Layer dnormed(M * K);  // (B, H, W, K)
    Layer dx(M * s.C);     // (B, H, W, C)
    Layer dx2(M * s.C2);   // (B, H, W, C2)
    split.measure(OnHost());
    cpu::groupnorm_forward({out.host.data(), B, H, W, K}, split(OnHost()));
    split.upload_record();

    std::vector<Output> outputs = {{&dx, WRITTEN, "dx", 2 * LIMIT},
                                   {&out, WRITTEN, "normed", LIMIT},
                                   {&split.dw, WRITTEN, "dw", LIMIT},
                                   {&split.dbias, WRITTEN, "dbias", LIMIT}};
    if (s.C2) outputs.push_back({&dx2, WRITTEN, "dx2", 2 * LIMIT});
    // Whether on the device the first half of the norm's gradient is a kernel of its own. It then reads a gradient
    // that was rounded, and so must the CPU's.
    bool apart = false;
    check(TAPS == 9 ? "conv3x3 backward to a norm" : "linear backward to a norm", shape, outputs, [&](auto on) {
        typedef typename decltype(on)::Tensor Tensor;
        Tensor dy = {on(dnormed), B, H, W, K};
        auto of = split(on);
        auto begun = of;  // the norm whose gradient the product begins
        if (on.is_host && apart) begun = {};
        const int before = sum_passes;
        if (!on.is_host) split.sums.poison();
        on.input_gradient(dy, {on(dout), B, H, W, O}, second(on), {.norm = begun});
        if (!on.is_host) {
            apart = sum_passes > before;
            check_sums(before);
        }
        if (on.is_host && apart) {
            for (float& value : dnormed.host) value = rounded(value);
            on.groupnorm_backward_sums(dy, dy, of);
        }
        on.groupnorm_backward(split.joined(on, dx, dx2), {on(out), B, H, W, K}, dy, of, {});
    });
}

static void test_normed_product(const NormedProductTest& s, int taps) {
    if (taps == 9) test_normed_product<9>(s);
    else test_normed_product<1>(s);
}

static void test_attention(int B, int T, int heads, int d) {
    std::string shape = text("B%d T%d heads %d of %d", B, T, heads, d);
    int C = heads * d;
    size_t N = (size_t)B * T * C;
    Layer qkv(3 * N);                   // (B, T, 3, heads, d)
    Layer out(N);                       // (B, T, heads, d)
    Layer dout(N);                      // (B, T, heads, d)
    Layer dqkv(3 * N);                  // (B, T, 3, heads, d)
    Floats lse((size_t)B * heads * T);  // (B, heads, T)

    check("attention forward", shape, {{&out, WRITTEN, "out", ATTENTION_LIMIT}, {&lse, WRITTEN, "lse", FLOAT_LIMIT}},
          [&](auto on) {
              on.attention_forward({on(out), B, 1, T, C}, on(lse), {on(qkv), B, 1, T, 3 * C}, heads);
          });
    for (float& value : out.host) value = rounded(value);
    out.upload();
    lse.upload();

    // The three parts of dqkv differ in size, so that each is compared by itself.
    const double limit = ATTENTION_BACKWARD_LIMIT;
    std::vector<Output> outputs = {{&dqkv, WRITTEN, "dv", limit, 2, 3, C}};
    if (T > 1) {  // of a single pixel dq and dk are zero, with which an error cannot be compared
        outputs.push_back({&dqkv, WRITTEN, "dq", limit, 0, 3, C});
        outputs.push_back({&dqkv, WRITTEN, "dk", limit, 1, 3, C});
    }
    check("attention backward", shape, outputs, [&](auto on) {
        on.attention_backward({on(dqkv), B, 1, T, 3 * C}, {on(dout), B, 1, T, C}, {on(out), B, 1, T, C}, on(lse),
                              {on(qkv), B, 1, T, 3 * C}, heads);
    });
}

// What the limit of --num_head_channels follows from: an RTX 30 or 40 lets a block have 99 KB of shared memory.
static_assert(sizeof(gpu::AttentionTile<MAX_HEAD>::Backward) <= (sizeof(floatX) == 4 ? 131 : 99) << 10 &&
                  sizeof(gpu::AttentionTile<MAX_HEAD>::Forward) <= 99 << 10,
              "heads of 256 channels");
static_assert(sizeof(gpu::AttentionTile<MAX_HEAD / 2>::Backward) <= 99 << 10 &&
                  sizeof(gpu::AttentionTile<MAX_HEAD / 2>::Forward) <= 99 << 10,
              "heads of 128 channels");

// Attention over so many pixels T of one image, with one head of d channels, that the CPU cannot do it in full. It
// computes in double every `stride`-th row: as a query its out, lse and dq, as a key its dk and dv. For dk and dv it
// takes the out and lse of all queries from the device, where the same kernel wrote the rows that are checked.
//
// With s = 1 / sqrt(d) and p_ij = exp(s q_i k_j - lse_i), whose sum over the keys j is 1:
//   out_i = sum over j of p_ij v_j
//   dq_i = s sum over j of p_ij (dout_i v_j - dout_i out_i) k_j
//   dk_j = s sum over i of p_ij (dout_i v_j - dout_i out_i) q_i
//   dv_j = sum over i of p_ij dout_i
static void test_long_attention(int T, int d, int stride) {
    std::string shape = text("B1 T%d heads 1 of %d, every %d-th row", T, d, stride);
    size_t N = (size_t)T * d;
    Layer qkv(3 * N);   // (T, 3, d)
    Layer out(N);       // (T, d)
    Layer dout(N);      // (T, d)
    Layer dqkv(3 * N);  // (T, 3, d)
    Floats lse(T);
    attention_forward({out.device, 1, 1, T, d}, lse.device, {qkv.device, 1, 1, T, 3 * d}, 1);
    attention_backward({dqkv.device, 1, 1, T, 3 * d}, {dout.device, 1, 1, T, d}, {out.device, 1, 1, T, d}, lse.device,
                       {qkv.device, 1, 1, T, 3 * d}, 1);
    std::vector<double> device_out = out.numbers(false);
    std::vector<double> device_lse = lse.numbers(false);
    std::vector<double> device_dqkv = dqkv.numbers(false);

    // The rows of pixel t, each of d numbers.
    auto q = [&](size_t t) { return qkv.host.data() + t * 3 * d; };
    auto k = [&](size_t t) { return q(t) + d; };
    auto v = [&](size_t t) { return q(t) + 2 * d; };
    auto gradient = [&](size_t t) { return dout.host.data() + t * d; };

    double scale = 1 / sqrt((double)d);
    auto dot = [&](const float* a, const float* b) {
        double sum = 0;
        for (int c = 0; c < d; c++) sum += (double)a[c] * b[c];
        return sum;
    };

    // Returns the lse of query i, and computes its out and dq (d), which are zero before.
    auto compute_query = [&](size_t i, double* out, double* dq) {
        double largest = -INFINITY;
        for (int j = 0; j < T; j++) largest = std::max(largest, scale * dot(q(i), k(j)));

        double total = 0;
        for (int j = 0; j < T; j++) {
            double p = exp(scale * dot(q(i), k(j)) - largest);
            total += p;
            for (int c = 0; c < d; c++) out[c] += p * v(j)[c];
        }
        for (int c = 0; c < d; c++) out[c] /= total;

        double dout_out = 0;  // their product
        for (int c = 0; c < d; c++) dout_out += gradient(i)[c] * out[c];
        for (int j = 0; j < T; j++) {
            double p = exp(scale * dot(q(i), k(j)) - largest);
            double ds = scale * p / total * (dot(gradient(i), v(j)) - dout_out);
            for (int c = 0; c < d; c++) dq[c] += ds * k(j)[c];
        }
        return largest + log(total);
    };

    std::vector<double> dout_out(T);  // of every query
    for (int t = 0; t < T; t++)
        for (int c = 0; c < d; c++) dout_out[t] += gradient(t)[c] * device_out[(size_t)t * d + c];

    // Computes dk and dv (d) of key j, which are zero before.
    auto compute_key = [&](size_t j, double* dk, double* dv) {
        for (int i = 0; i < T; i++) {
            double p = exp(scale * dot(q(i), k(j)) - device_lse[i]);
            double ds = scale * p * (dot(gradient(i), v(j)) - dout_out[i]);
            for (int c = 0; c < d; c++) {
                dk[c] += ds * q(i)[c];
                dv[c] += p * gradient(i)[c];
            }
        }
    };

    enum { OUT, DQ, DK, DV, TENSORS };
    int rows = (T + stride - 1) / stride;
    std::vector<double> exact[TENSORS];
    std::vector<double> exact_lse(rows);
    for (std::vector<double>& tensor : exact) tensor.resize((size_t)rows * d);
#pragma omp parallel for
    for (int r = 0; r < rows; r++) {
        size_t row = (size_t)r * stride;
        size_t at = (size_t)r * d;
        exact_lse[r] = compute_query(row, &exact[OUT][at], &exact[DQ][at]);
        compute_key(row, &exact[DK][at], &exact[DV][at]);
    }

    std::vector<double> found[TENSORS];
    std::vector<double> found_lse;
    for (int r = 0; r < rows; r++) {
        size_t row = (size_t)r * stride;
        found_lse.push_back(device_lse[row]);
        for (int c = 0; c < d; c++) {
            found[OUT].push_back(device_out[row * d + c]);
            for (int part = 0; part < 3; part++) found[DQ + part].push_back(device_dqkv[(row * 3 + part) * d + c]);
        }
    }

    line_of("long attention").shapes++;
    auto compare = [&](const char* name, const std::vector<double>& a, const std::vector<double>& r, double limit) {
        double error = error_of(a, r);
        Line& line = line_of("long attention");
        if (!(error <= limit))
            fault("long attention", text("%s %s: error %.2e of %.0e", shape.c_str(), name, error, limit));
        if (!(error <= line.worst)) {
            line.worst = error;
            line.allowed = limit;
            line.worst_at = shape + " " + name;
        }
    };
    compare("lse", found_lse, exact_lse, FLOAT_LIMIT);
    compare("out", found[OUT], exact[OUT], LIMIT);
    compare("dq", found[DQ], exact[DQ], ATTENTION_BACKWARD_LIMIT);
    compare("dk", found[DK], exact[DK], ATTENTION_BACKWARD_LIMIT);
    compare("dv", found[DV], exact[DV], ATTENTION_BACKWARD_LIMIT);
}

// Repeats each pixel of `small` (B, H, W, C) four times, and adds up four pixels of `big` (B, 2H, 2W, C) to one.
static void test_resample(int B, int H, int W, int C) {
    std::string shape = text("B%d H%d W%d C%d", B, H, W, C);
    size_t n = (size_t)B * H * W * C;
    Layer small(n);
    Layer big(4 * n);
    Layer to_small(n);
    Layer to_big(4 * n);

    for (bool adding : {false, true}) {
        for (float factor : {1.0f, 0.25f}) {
            bool first_only = adding == (factor == 1);
            Before before = adding ? KEPT : WRITTEN;
            std::string how = shape;
            if (adding) how += " adding";
            if (first_only) how += " one of four";

            check("repeat 2x2", how, {{&to_big, before, "out", LIMIT}}, [&](auto on) {
                typedef typename decltype(on)::T T;
                on.run(Resample<T>{.out = {on(to_big), B, 2 * H, 2 * W, C},
                                   .x = {on(small), B, H, W, C},
                                   .factor = factor,
                                   .accumulate = adding,
                                   .first_only = first_only});
            });
            check("sum 2x2", how, {{&to_small, before, "out", LIMIT}}, [&](auto on) {
                typedef typename decltype(on)::T T;
                on.run(Resample<T>{.out = {on(to_small), B, H, W, C},
                                   .x = {on(big), B, 2 * H, 2 * W, C},
                                   .factor = factor,
                                   .accumulate = adding,
                                   .first_only = first_only});
            });
        }
    }
}

// ---- embedding, loss, noise, samplers ---------------------------------------------------------------------

static std::vector<int> some_timesteps(int B) {
    std::vector<int> t(B);
    for (int b = 0; b < B; b++) t[b] = (b * 379 + 999) % 1000;
    return t;
}

// The layers that read timesteps, labels or weights, and SiLU.
static void test_embedding(int B, int C) {
    std::string shape = text("B%d C%d", B, C);
    Pair<int> timesteps(some_timesteps(B));
    size_t n = (size_t)B * C + 5;
    Layer sinusoids((size_t)B * C);
    Layer x(n, 3);
    Layer dout(n);
    Layer y(n);
    Floats weights(n);

    check("timestep embedding", shape, {{&sinusoids, WRITTEN, "out", LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::T T;
        on.run(TimestepEmbedding<T>{
            .out = {on(sinusoids), B, 1, 1, C}, .timesteps = on(timesteps), .max_period = 10000});
    });

    check("SiLU forward", shape, {{&y, WRITTEN, "out", LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::T T;
        on.run(SiluForward<T>{.out = {on(y), 1, 1, 1, (int)n}, .x = {on(x), 1, 1, 1, (int)n}});
    });
    check("SiLU backward", shape, {{&dout, KEPT, "dx", LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::T T;
        typename decltype(on)::Tensor dx = {on(dout), 1, 1, 1, (int)n};  // in the place of dout
        on.run(SiluBackward<T>{.dx = dx, .dout = dx, .x = {on(x), 1, 1, 1, (int)n}});
    });

    enum { CLASSES = 7 };  // the row behind them is that of no class
    std::vector<SampleSpec> some_specs;  // of half of the rows: the others have no class
    for (int i = 0; i < ceil_div(B, 2); i++) some_specs.push_back({(uint32_t)i, i * i % CLASSES});
    Pair<SampleSpec> specs(some_specs);
    std::vector<int> some_labels = some_timesteps(B);
    for (int& label : some_labels) label %= CLASSES + 1;
    Pair<int> labels(some_labels);
    check("set the model's inputs", shape,
          {{&timesteps, WRITTEN, "timesteps", EXACT}, {&labels, WRITTEN, "labels", EXACT}}, [&](auto on) {
              on.run(SetModelInputs{.timesteps = on(timesteps),
                                    .labels = on(labels),
                                    .specs = on(specs),
                                    .timestep = 731,
                                    .rows = B,
                                    .samples = (int)some_specs.size(),
                                    .no_class = CLASSES});
          });

    Layer table((size_t)(CLASSES + 1) * C);
    Layer rows((size_t)B * C);
    Floats dtable((size_t)(CLASSES + 1) * C);
    check("label embedding", shape, {{&rows, WRITTEN, "out", EXACT}}, [&](auto on) {
        typedef typename decltype(on)::T T;
        on.run(LabelForward<T>{.out = {on(rows), B, 1, 1, C}, .table = on(table), .labels = on(labels)});
    });
    check("label embedding backward", shape, {{&dtable, WRITTEN, "dtable", FLOAT_LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::T T;
        on.run(LabelBackward<T>{
            .dtable = on(dtable), .dout = {on(rows), B, 1, 1, C}, .labels = on(labels), .rows = CLASSES + 1});
    });

    auto round_on_device = [](floatX* to, const float* from, size_t n) {
        run(RoundWeights{.to = to, .from = from, .n = n});
    };
    auto round_on_host = [](float* to, const float* from, size_t n) { std::transform(from, from + n, to, rounded); };
    check("round weights", shape, {{&y, WRITTEN, "working copy", EXACT}}, round_on_device, round_on_host,
          [&](auto round, auto on) { round(on(y), on(weights), n); });
}

// A schedule that no --schedule makes, but in which all numbers count.
static std::vector<ScheduleRow> some_schedule(int predict) {
    std::vector<ScheduleRow> rows;
    for (int i = 0; i < 1000; i++) {
        ScheduleRow row;
        row.alpha = 0.3f + 0.001f * i;
        row.sigma = 0.9f - 0.0007f * i;
        row.target_eps = predict == PREDICT_EPS;
        row.target_x0 = predict == PREDICT_X0;
        if (predict == PREDICT_V) {  // alpha eps - sigma x0
            row.target_eps = row.alpha;
            row.target_x0 = -row.sigma;
        }
        row.weight = 0.5f + 0.001f * i;
        row.posterior_log_variance_clipped = -3 - 0.005f * i;
        row.log_variance_range = 0.3f;
        row.mean_error = 0.1f;
        row.noise_fraction = 0.001f * (i + 1);
        row.x0_error = 0.2f + 0.001f * i;
        rows.push_back(row);
    }
    return rows;
}

static StepState state_at(int64_t step) {
    StepState state = StepState();
    state.step = step;
    return state;
}

// What training and drawing compute beside the network, for B images of H x W pixels. The tests run in this order: some
// read what others left.
struct DiffusionTest {
    int B, H, W, predict;
    std::string shape;
    int channels = 1 + predict;
    size_t n = (size_t)B * H * W * PIXEL;

    Floats images{(size_t)B * channels * H * W, 0.5f};  // (B, channels, H, W)
    Floats target{n};                                   // (B, H, W, PIXEL), as all below but the losses
    Floats x{n};
    Floats losses{(size_t)B * loss_chunks(H * W)};
    Layer x_t{n};
    Layer input{2 * n};  // with guidance for two predictions
    Layer out{2 * n};
    Layer dout{n};

    Pair<ScheduleRow> schedule{some_schedule(predict)};
    Pair<int> timesteps{some_timesteps(B)};
    Pair<int> mixed_timesteps{with_first_timesteps(B)};
    Pair<StepState> state{std::vector<StepState>(1, state_at(123456))};

    // Every other is timestep 0, where --learn_sigma has another loss.
    static std::vector<int> with_first_timesteps(int B) {
        std::vector<int> t = some_timesteps(B);
        for (int b = 0; b < B; b += 2) t[b] = 0;
        return t;
    }

    // The loss of a batch whose samples have these timesteps.
    template <typename On> BatchLoss loss_of(On on, Pair<int>& timesteps) {
        return {.chunk_sums = on(losses),
                .timesteps = on(timesteps),
                .schedule = on(schedule),
                .batch_size = (int)timesteps.host.size(),
                .pixels = H * W,
                .channels = channels,
                .diffusion_steps = 1000};
    }

    // with_state: the noise depends on the step's number.
    void test_add_noise(bool with_state) {
        std::vector<Output> outputs = {{&x_t, KEPT, "x_t", LIMIT}, {&target, KEPT, "target", FLOAT_LIMIT}};
        check("add noise", shape, outputs, [&](auto on) {
            typedef typename decltype(on)::T T;
            on.run(AddNoise<T>{.x_t = {on(x_t), B, H, W, PIXEL},
                               .target = on(target),
                               .images = on(images),
                               .schedule = on(schedule),
                               .timesteps = on(timesteps),
                               .step = with_state ? &on(state)->step : nullptr,
                               .first = 5,
                               .channels = channels,
                               .offset_noise = 0.3f,
                               .seed = 77,
                               .stream = STREAM_MATCHING_NOISE});
        });
        target.upload();
    }

    void test_samplers() {
        std::vector<SampleSpec> some_specs;
        for (uint32_t seed : consecutive(41, B)) some_specs.push_back({seed, 0});
        some_specs.back() = {4000000000u, 0};
        Pair<SampleSpec> specs(some_specs);
        Floats saved(n);

        auto check_update = [&](const char* name, const SamplerStep& step, bool clamps, float guidance) {
            std::vector<Output> outputs = {{&x, KEPT, "x", FLOAT_LIMIT},
                                           {&saved, KEPT, "saved", FLOAT_LIMIT},
                                           {&input, KEPT, "input", LIMIT}};
            check(name, shape, outputs, [&](auto on) {
                typedef typename decltype(on)::T T;
                SampleBatch<T> batch = {.input = {on(input), B, H, W, PIXEL},
                                        .out = on(out),
                                        .channels = channels,
                                        .clamps = clamps,
                                        .guidance = guidance,
                                        .x = on(x),
                                        .saved = on(saved),
                                        .specs = on(specs)};
                on.run(UpdateSamples<T>{batch, step});
            });
        };

        check_update("start pictures", {.update = {.noise = 1}}, true, 2.5f);
        for (float noise : {0.21f, 0.0f}) {
            for (bool within : {true, false}) {  // clamps, with guidance and a learned sigma; or none of these
                SamplerStep step = {.number = 9, .timestep = 500, .x0_from_x = 1.1f, .x0_from_out = -0.4f};
                step.update = {
                    .x0 = 0.3f, .x = 0.65f, .saved = -0.2f, .noise = noise, .save_x0 = 0.7f, .save_x = 0.4f};
                if (within && channels <= PIXEL / 2) step.max_log_sigma_ratio = 0.7f;
                x.upload();
                check_update("update pictures", step, within, within ? 2.5f : 1);
            }
        }
    }

    void test_losses() {
        for (bool training : {true, false}) {
            std::vector<Output> outputs = {{&losses, WRITTEN, "losses", FLOAT_LIMIT}};
            if (training) outputs.push_back({&dout, WRITTEN, "dout", LIMIT});
            check("mean squared error", shape, outputs, [&](auto on) {
                typedef typename decltype(on)::T T;
                on.run(PredictionLoss<T>{.batch = loss_of(on, timesteps),
                                         .out = on(out),
                                         .target = on(target),
                                         .dout = on(dout, training)});
            });
        }

        // At the ends of [-1, 1] the loss of --learn_sigma is another.
        Floats bounds(losses.host.size());
        for (size_t i = 0; i < images.host.size(); i += 7) images.host[i] = i % 2 ? 1 : -1;
        images.upload();
        std::vector<Output> outputs = {{&losses, WRITTEN, "losses", FLOAT_LIMIT},
                                       {&bounds, WRITTEN, "bounds", 10 * FLOAT_LIMIT},
                                       {&dout, WRITTEN, "dout", LIMIT}};
        check("variance loss", shape, outputs, [&](auto on) {
            typedef typename decltype(on)::T T;
            BatchLoss batch = loss_of(on, mixed_timesteps);
            batch.variance_chunk_sums = on(bounds);
            on.run(PredictionLoss<T>{.batch = batch,
                                     .out = on(out),
                                     .target = on(target),
                                     .dout = on(dout),
                                     .images = on(images)});
        });
    }

    // --consistency: each sample has an earlier timestep, at which the network's answer is its target.
    void test_consistency() {
        Floats gaps(B);
        Floats weights(B);
        Floats errors(n);
        std::vector<int> earlier_timesteps = mixed_timesteps.host;
        for (int b = 0; b < B; b++) {
            earlier_timesteps[b] /= 2;
            gaps.host[b] = 0.1f;
            bool is_image = b % 3 == 0;  // the earlier of the pair is the image itself
            if (is_image) gaps.host[b] = schedule.host[mixed_timesteps.host[b]].noise_fraction;
        }
        gaps.upload();
        Pair<int> earlier(earlier_timesteps);
        auto pairs = [&](auto on) {
            return ConsistencyPairs{
                .timesteps = on(earlier), .gaps = on(gaps), .errors = on(errors), .weights = on(weights)};
        };

        check("errors of the earlier", shape, {{&errors, WRITTEN, "errors", FLOAT_LIMIT}}, [&](auto on) {
            typedef typename decltype(on)::T T;
            on.run(EarlierErrors<T>{
                .pairs = pairs(on), .loss = loss_of(on, mixed_timesteps), .out = on(out), .target = on(target)});
        });
        check("weights of pairs", shape, {{&weights, WRITTEN, "weights", FLOAT_LIMIT}},
              [&](auto on) { on.run(PairWeights{pairs(on), loss_of(on, mixed_timesteps)}); });
    }

    // Tuning on the paths of the sampler. The batch is a part of a larger one, from sample 2B + 1 on.
    void test_paths() {
        std::vector<Output> outputs = {{&losses, WRITTEN, "losses", FLOAT_LIMIT}, {&dout, WRITTEN, "dout", LIMIT}};
        check("pseudo-Huber loss", shape, outputs, [&](auto on) {
            typedef typename decltype(on)::T T;
            BatchLoss batch = loss_of(on, timesteps);
            batch.on_paths = true;
            batch.width = W;
            on.run(PredictionLoss<T>{.batch = batch, .out = on(out), .target = on(target), .dout = on(dout)});
        });

        Pair<int> batch_timesteps(some_timesteps(3 * B + 1));
        auto part_of_batch = [&](auto on) {
            BatchLoss batch = loss_of(on, batch_timesteps);
            batch.first = 2 * B + 1;
            batch.B = B;
            return batch;
        };

        Floats points(3 * n);  // of a path: noise alone, the start of the second consistency step, and the end
        std::vector<int> chosen_steps(B);
        for (int b = 0; b < B; b++) chosen_steps[b] = (b + 1) % 2;
        Pair<int> chosen(chosen_steps);
        outputs = {{&x_t, WRITTEN, "x_t", LIMIT}, {&target, WRITTEN, "target", FLOAT_LIMIT}};
        check("load points of paths", shape, outputs, [&](auto on) {
            typedef typename decltype(on)::T T;
            on.run(LoadPathPoints<T>{.x_t = {on(x_t), B, H, W, PIXEL},
                                     .target = on(target),
                                     .loss = part_of_batch(on),
                                     .points = on(points),
                                     .chosen = on(chosen),
                                     .consistency_steps = 2});
        });

        Floats pictures(images.host.size());
        Floats teacher(images.host.size());
        Floats fake(images.host.size());
        check("predicted x0", shape, {{&pictures, WRITTEN, "x0", FLOAT_LIMIT}}, [&](auto on) {
            typedef typename decltype(on)::T T;
            on.run(PredictX0<T>{.predicted = on(pictures),
                                .loss = part_of_batch(on),
                                .images = on(images),
                                .out = on(out),
                                .target = on(target),
                                .clamps = predict == PREDICT_V});
        });
        check("matching target", shape, {{&target, WRITTEN, "target", FLOAT_LIMIT}}, [&](auto on) {
            typedef typename decltype(on)::T T;
            on.run(MatchingTarget<T>{.target = on(target),
                                     .loss = part_of_batch(on),
                                     .out = on(out),
                                     .pictures = on(pictures),
                                     .teacher = on(teacher),
                                     .fake = on(fake)});
        });
    }

    void test_dropout() {
        check("dropout", shape, {{&dout, KEPT, "x", LIMIT}}, [&](auto on) {
            typedef typename decltype(on)::T T;
            on.run(Dropout<T>{.x = {on(dout), B, H, W, PIXEL},
                              .p = 0.3f,
                              .seed = 99,
                              .block = 77,
                              .first = 5,
                              .step = &on(state)->step});
        });
    }
};

static void test_diffusion(int B, int H, int W, int predict, bool with_state) {
    const char* const predictions[] = {"eps", "v", "x0"};
    std::string shape = text("B%d H%d W%d %s", B, H, W, predictions[predict]);
    DiffusionTest test = {.B = B, .H = H, .W = W, .predict = predict, .shape = shape};
    test.test_add_noise(with_state);
    test.test_samplers();
    test.test_losses();
    test.test_consistency();
    test.test_paths();
    test.test_dropout();
}

// A thread computes a quad: four words, by the program's Philox and by cuRAND's, and four normals.
__global__ void philox_kernel(uint32_t* ours, uint32_t* curand, float* normals, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;

    Philox p = philox(12345 + i % 7, STREAM_NOISE, i, i / 3, 1000 - i % 1000);
    uint4 c = curand_Philox4x32_10(make_uint4(i, i / 3, 1000 - i % 1000, 0), make_uint2(12345 + i % 7, STREAM_NOISE));
    const uint32_t word[4] = {c.x, c.y, c.z, c.w};
    for (int k = 0; k < 4; k++) {
        ours[4 * i + k] = p.word[k];
        curand[4 * i + k] = word[k];
    }
    random_normals(normals + 4 * i, 12345 + i % 7, STREAM_NOISE, i, i / 3, 1000 - i % 1000);
}

static void test_philox(int n) {
    Pair<uint32_t> ours(std::vector<uint32_t>(4 * n));
    Pair<uint32_t> curand(std::vector<uint32_t>(4 * n));
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
          gpu, cpu, [&](auto words, auto on) { words(on(ours), on(curand), on(normals)); });
}

// ---- a step's beginning and end, optimiser ----------------------------------------------------------------

// What a training step begins with: the choice of its samples, and the update that is to come.
static void test_step(int count, int batch, int size, int64_t step, int lr_schedule, bool bytes) {
    std::string shape = text("%d images of %d, batch %d, step %ld", count, size, batch, step);
    int slots = 2 * (batch / count + 2);
    int channels = 1 + size % 4;
    int elements = channels * size * size;  // of an image

    std::vector<int> shuffled((size_t)slots * count);
    for (size_t i = 0; i < shuffled.size(); i++) shuffled[i] = (int)(i * 7 % count);
    std::vector<uint8_t> values((size_t)count * elements);
    for (size_t i = 0; i < values.size(); i++) values[i] = (uint8_t)((uint32_t)i * 2654435761u >> 24);
    Pair<int> order(shuffled);
    Pair<int> timesteps(some_timesteps(batch));
    Pair<int> sources(some_timesteps(batch));
    Pair<int> labels(some_timesteps(count));        // of the images
    Pair<int> batch_labels(some_timesteps(batch));  // of the samples
    Pair<uint8_t> byte_pixels(values);
    Floats pixels(values.size(), 0.5f);
    Floats images((size_t)batch * elements);

    StepState before = StepState();
    before.step = step;
    before.history.skipped = 2;
    Pair<StepState> state(std::vector<StepState>(1, before));
    Pair<StepState> fake_state(std::vector<StepState>(1, before));

    Config config = default_config();
    config.diffusion_steps = 1000;
    config.timestep_sampling = bytes ? TIMESTEPS_LOGNORMAL : TIMESTEPS_UNIFORM;
    config.hyper.lr_schedule = lr_schedule;
    config.hyper.warmup_steps = 100;
    config.hyper.lr_steps = 5000;
    config.hyper.weight_decay = 0.01f;
    config.hyper.final_lr_fraction = 0.1f;
    config.hyper.ema_rate[1] = 0.9999f;

    Pair<uint32_t> last_words(make_last_words(config));
    auto source = [&](auto on) {
        return BatchSource{.bytes = on(byte_pixels, bytes),
                           .floats = on(pixels, !bytes),
                           .order = on(order),
                           .count = count,
                           .slots = slots,
                           .batch = batch,
                           .size = size,
                           .channels = channels,
                           .flip = 1,
                           .diffusion_steps = 1000,
                           .seed = 99,
                           .labels = on(labels),
                           .no_class = 1000,
                           .drop = 0.3f,
                           .last_words = on(last_words)};
    };

    // The numbers of the update are compared one by one, because they differ in size.
    static const char* const NAMES[] = {"step", "lr",          "weight decay", "beta1",      "beta2",
                                        "eps",  "correction1", "correction2",  "EMA weight", "2nd EMA weight"};
    const std::vector<Output> choice = {{&timesteps, WRITTEN, "timesteps", EXACT},
                                        {&sources, WRITTEN, "sources", EXACT},
                                        {&batch_labels, WRITTEN, "labels", EXACT}};
    std::vector<Output> outputs = choice;
    outputs.push_back({&state, KEPT, "step", EXACT, STEP, FIELDS});
    for (int field = LR; field <= EMA_WEIGHTS + 1; field++)
        outputs.push_back({&state, KEPT, NAMES[field], ROUNDINGS, field, FIELDS});
    check("begin step", shape, outputs, [&](auto on) {
        on.run(BeginStep{.state = on(state),
                         .timesteps = on(timesteps),
                         .sources = on(sources),
                         .labels = on(batch_labels),
                         .source = source(on),
                         .hyper = config.hyper});
    });

    sources.upload();
    outputs = {{&images, WRITTEN, "images", EXACT}};
    check("load images", shape + (bytes ? " bytes" : " floats"), outputs, [&](auto on) {
        on.run(LoadImages{.images = on(images), .sources = on(sources), .source = source(on), .B = batch});
    });

    Pair<ScheduleRow> schedule(make_schedule_rows(config));
    Pair<int> earlier(std::vector<int>(batch, 0));
    Floats gaps(batch);
    outputs = {{&earlier, WRITTEN, "earlier", EXACT}, {&gaps, WRITTEN, "gaps", EXACT}};
    check("begin step on pairs", shape, outputs, [&](auto on) {
        ConsistencyPairs pairs = {.timesteps = on(earlier), .gaps = on(gaps), .errors = nullptr, .weights = nullptr};
        on.run(BeginStep{.state = on(state),
                         .timesteps = on(timesteps),
                         .sources = on(sources),
                         .labels = on(batch_labels),
                         .source = source(on),
                         .hyper = config.hyper,
                         .schedule = on(schedule),
                         .pairs = pairs});
    });

    Pair<SampleSpec> specs(std::vector<SampleSpec>((size_t)batch));
    auto path_source = [&](auto on) {
        BatchSource with_paths = source(on);
        with_paths.path_steps = 3;
        with_paths.consistency_steps = 2;
        with_paths.starts[0] = 999;
        with_paths.starts[1] = 77;
        return with_paths;
    };
    check("begin step on paths", shape, choice, [&](auto on) {
        on.run(BeginStep{.state = on(state),
                         .timesteps = on(timesteps),
                         .sources = on(sources),
                         .labels = on(batch_labels),
                         .source = path_source(on),
                         .hyper = config.hyper});
    });
    check("start paths", shape, {{&specs, WRITTEN, "specs", EXACT}}, [&](auto on) {
        on.run(StartPaths{.specs = on(specs), .source = path_source(on), .B = batch, .first = 3, .number = 70000});
    });

    Pair<int> noised(some_timesteps(batch));
    outputs = {{&timesteps, WRITTEN, "timesteps", EXACT},
               {&noised, WRITTEN, "noised", EXACT},
               {&fake_state, KEPT, "accepted", EXACT, ACCEPTED, FIELDS}};
    for (int field = LR; field <= EMA_WEIGHTS + 1; field++)
        outputs.push_back({&fake_state, KEPT, NAMES[field], ROUNDINGS, field, FIELDS});
    check("begin matching", shape, outputs, [&](auto on) {
        on.run(BeginMatching{.fake_state = on(fake_state),
                             .timesteps = on(timesteps),
                             .noised = on(noised),
                             .step = &on(state)->step,
                             .first = step / 2,
                             .hyper = config.hyper,
                             .batch = batch,
                             .diffusion_steps = 1000,
                             .seed = 99});
    });

    check("begin second step", shape, {{&timesteps, WRITTEN, "timesteps", EXACT}}, [&](auto on) {
        on.run(SetTimesteps{.timesteps = on(timesteps), .count = batch, .timestep = 299});
    });
}

// What is special about a step. One whose loss or gradient is not finite must not count. One that has an outlier
// counts as skipped, unless the history is too short to tell.
enum Special { NOTHING, LOSS_NAN, NORM_INFINITE, LOSS_OUTLIER, NORM_OUTLIER, HISTORY_SHORT, SPECIALS };

static void test_finish(int batch, int elements, size_t parameters, Special special) {
    static const char* const WHAT[] = {"",
                                       ", loss NaN",
                                       ", gradient infinite",
                                       ", loss an outlier",
                                       ", gradient an outlier",
                                       ", the history short"};
    std::string shape = text("%d of %d elements, %zu parameters%s", batch, elements, parameters, WHAT[special]);
    Pair<int> timesteps(some_timesteps(batch));
    std::vector<ScheduleRow> rows(1000);
    for (int i = 0; i < 1000; i++) rows[i].weight = 0.8f + 0.0004f * i;
    Pair<ScheduleRow> schedule(rows);

    const int chunks = loss_chunks(elements / PIXEL);  // of a sample
    Floats losses((size_t)batch * chunks, 500, 4000);
    Floats norms((parameters + NORM_CHUNK - 1) / NORM_CHUNK, 1, 8);
    if (special == LOSS_NAN) losses.host.back() = NAN;
    if (special == NORM_INFINITE) norms.host[0] = INFINITY;
    losses.upload();
    norms.upload();

    double loss = 0;
    for (size_t i = 0; i < losses.host.size(); i++) {
        int timestep = timesteps.host[i / chunks];
        loss += (double)rows[timestep].weight * losses.host[i] / batch / elements;
    }
    if (special == LOSS_NAN) loss = 1;
    double squared_norm = 0;
    for (float part : norms.host) squared_norm += part;
    if (special == NORM_INFINITE) squared_norm = 1;

    // The history's standard deviation is a tenth of its mean, which is this step's loss or norm, or a third of it.
    double usual_loss = loss;
    double usual_norm = sqrt(squared_norm);
    if (special == LOSS_OUTLIER || special == HISTORY_SHORT) usual_loss = loss / 3;
    if (special == NORM_OUTLIER) usual_norm = sqrt(squared_norm) / 3;
    StepState before = StepState();
    before.step = 1234567;
    before.update = {.lr = 0.25f,
                     .weight_decay = 0.01f,
                     .beta1 = 0.9f,
                     .beta2 = 0.99f,
                     .eps = 1e-8f,
                     .correction1 = 0.5f,
                     .correction2 = 0.6f,
                     .ema_weight = {0.7f},
                     .clip = 1};
    before.history.seen = special == HISTORY_SHORT ? WINDOW_LEAST - 1 : 1000;
    for (int i = 0; i < WINDOW; i++) {
        float by = i % 2 ? 0.1f : -0.1f;
        before.history.losses[i] = (float)usual_loss * (1 + by);
        before.history.norms[i] = (float)usual_norm * (1 + by);
    }
    Pair<StepState> state(std::vector<StepState>(1, before));
    Config config = default_config();
    config.hyper.skip_outliers = 6;
    config.hyper.grad_clip = (float)sqrt(squared_norm) / 2;

    std::vector<Output> outputs;
    static const std::pair<int, const char*> EXACT_FIELDS[] = {{STEP, "step"},       {LR, "lr"},
                                                               {FINITE, "finite"},   {ACCEPTED, "accepted"},
                                                               {SKIPPED, "skipped"}, {SEEN, "seen"}};
    for (auto [field, name] : EXACT_FIELDS) outputs.push_back({&state, KEPT, name, EXACT, field, FIELDS});
    if (special != LOSS_NAN) {
        outputs.push_back({&state, KEPT, "loss", FLOAT_LIMIT, LOSS, FIELDS});
        for (int q = 0; q < 4; q++) {
            outputs.push_back({&state, KEPT, "quartile's sum", FLOAT_LIMIT, QUARTILE_SUMS + q, FIELDS});
            outputs.push_back({&state, KEPT, "quartile's samples", EXACT, QUARTILE_COUNTS + q, FIELDS});
        }
    }
    if (special != NORM_INFINITE) {
        outputs.push_back({&state, KEPT, "norm", FLOAT_LIMIT, NORM, FIELDS});
        outputs.push_back({&state, KEPT, "clip", FLOAT_LIMIT, CLIP, FIELDS});
    }
    outputs.push_back({&state, KEPT, "window", FLOAT_LIMIT, HISTORY + 1000 % WINDOW, FIELDS});
    check("finish step", shape, outputs, [&](auto on) {
        BatchLoss batch_loss = {.chunk_sums = on(losses),
                                .timesteps = on(timesteps),
                                .schedule = on(schedule),
                                .batch_size = batch,
                                .pixels = elements / PIXEL,
                                .channels = PIXEL,
                                .diffusion_steps = 1000};
        on.run(FinishStep{.state = on(state),
                          .loss = batch_loss,
                          .grad_norm_sums = on(norms),
                          .parameters = parameters,
                          .hyper = config.hyper});
    });

    // The two sides agree. What the CPU's did is also what is meant:
    const StepState& after = state.host[0];
    bool counts = special != LOSS_NAN && special != NORM_INFINITE;
    bool skipped = special == LOSS_OUTLIER || special == NORM_OUTLIER;
    bool accepted = counts && !skipped;
    bool as_meant = after.step == before.step + counts && after.accepted == accepted &&
                    after.history.skipped == skipped && after.history.seen == before.history.seen + accepted;
    if (counts) as_meant &= fabs(after.update.clip - 0.5f) <= 1e-3f;
    if (!as_meant) fault("finish step", shape + ": the specification errs");
}

// `emas` running means of n parameters are kept. A step that is not accepted changes nothing.
static void test_optimiser(size_t n, int emas, bool accepted) {
    std::string shape = text("%zu parameters, %d EMAs%s", n, emas, accepted ? "" : ", skipped");
    Floats w(n);
    Floats m(n, 0.1f);
    Floats v(n, 0.01f);
    Floats gradient(n, 0.1f);
    Floats parts((n + NORM_CHUNK - 1) / NORM_CHUNK);
    Floats ema[MAX_EMAS] = {Floats(n), Floats(n), Floats(n), Floats(n)};
    Layer working(n);
    for (float& value : v.host) value = fabsf(value);

    StepState before = StepState();
    before.update = {.lr = 1e-3f,
                     .weight_decay = 100,
                     .beta1 = 0.9f,
                     .beta2 = 0.999f,
                     .eps = 1e-8f,
                     .correction1 = 0.5f,
                     .correction2 = 0.3f,
                     .ema_weight = {0.01f, 0.001f, 0.5f, 1},
                     .clip = 0.5f};
    before.accepted = accepted;
    Pair<StepState> state(std::vector<StepState>(1, before));

    double limit = accepted ? ROUNDINGS : EXACT;
    size_t decayed = n / 12 * 4;  // a third of the parameters
    std::vector<Output> outputs = {{&w, KEPT, "w", limit},
                                   {&ema[0], KEPT, "EMA", limit},
                                   {&ema[1], KEPT, "2nd EMA", limit},
                                   {&ema[2], KEPT, "3rd EMA", limit},
                                   {&ema[3], KEPT, "4th EMA", limit},
                                   {&m, KEPT, "m", limit},
                                   {&v, KEPT, "v", limit},
                                   {&working, KEPT, "working copy", accepted ? LIMIT : EXACT}};
    check("AdamW", shape, outputs, [&](auto on) {
        typedef typename decltype(on)::T T;
        OptimiserMemory memory = {.master = on(w), .adam_m = on(m), .adam_v = on(v)};
        for (int k = 0; k < MAX_EMAS; k++) memory.ema[k] = on(ema[k], emas > k);
        on.run(UpdateWeights<T>{.memory = memory,
                                .gradient = on(gradient),
                                .working = on(working),
                                .n = n,
                                .decayed = decayed,
                                .state = on(state)});
    });

    // On the device itself the working copy is w, rounded.
    if (accepted) {
        std::vector<float> device_w = w.download();
        std::vector<floatX> device_working = working.download();
        bool same = true;
        for (size_t i = 0; i < n; i++) same &= (float)device_working[i] == rounded(device_w[i]);
        if (!same) fault("AdamW", shape + ": the working copy is not w, rounded");
    }

    Layer x(n);
    Layer directions(n);
    Floats scales(n / CHANNEL_MULTIPLE + 1);
    for (size_t i = 0; i < scales.host.size(); i++) scales.host[i] = i % 3 ? 0.2f * i : 0;  // 0: AdamW's
    scales.upload();
    outputs = {{&w, KEPT, "w", limit}, {&m, KEPT, "m", limit}, {&v, KEPT, "v", limit}};
    check("Muon's update", shape, outputs, [&](auto on) {
        typedef typename decltype(on)::T T;
        on.run(UpdateWeights<T>{.memory = {.master = on(w), .adam_m = on(m), .adam_v = on(v)},
                                .gradient = on(gradient),
                                .working = nullptr,
                                .n = n,
                                .decayed = decayed,
                                .state = on(state),
                                .directions = on(directions),
                                .scales = on(scales)});
    });
    check("Muon's momentum", shape, {{&x, WRITTEN, "x", LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::T T;
        on.run(
            MuonMomentum<T>{.x = on(x), .momentum = on(m), .gradient = on(gradient), .n = n, .state = on(state)});
    });

    check("squared norm", shape, {{&parts, WRITTEN, "parts", FLOAT_LIMIT}},
          [&](auto on) { on.run(SquaredNorm{.chunk_sums = on(parts), .x = on(gradient), .n = n}); });
    check("sum of gradients", shape, {{&m, KEPT, "sum", EXACT}},
          [&](auto on) { on.run(AddFloats{.sum = on(m), .a = on(m), .b = on(gradient), .n = n}); });
}

// Several products of matrices in one launch, out = alpha left right + beta added, where some outputs are no whole
// tiles. With norms, alpha and beta are as MuonNorms makes them.
static void test_products(RightMatrix right_lies, bool has_norms) {
    struct Size {
        int rows, columns;
    };
    const std::vector<Size> sizes = {{64, 144}, {16, 16}, {200, 48}, {128, 1152}, {16, 272}};
    size_t squares = 0;
    size_t wholes = 0;
    for (Size s : sizes) {
        squares += s.rows * s.rows;
        wholes += s.rows * s.columns;
    }
    Layer out(wholes);
    Layer left(squares, 0.2f, 0.3f);
    Layer right(wholes);
    Layer added(wholes);

    const char* lies = right_lies == RIGHT_TRANSPOSED ? "transposed" : "plain";
    std::string shape = text("%s%s", lies, has_norms ? ", norms" : "");
    check("products of matrices", shape, {{&out, WRITTEN, "out", LIMIT}}, [&](auto on) {
        typedef typename decltype(on)::T T;
        typedef MatrixProductOf<T> Product;
        std::vector<Product> products;
        size_t square = 0;
        size_t whole = 0;
        int tiles = 0;
        for (Size s : sizes) {
            Product product = {.out = {on(out) + whole, s.rows, 1, 1, s.columns},
                               .left = {on(left) + square, s.rows, 1, 1, s.rows},
                               .right = on(right) + whole,
                               .alpha = 0.5f,
                               .beta = 0.25f,
                               .first_tile = tiles};
            // without norms nothing is added to the first
            if (has_norms || tiles) product.added = {on(added) + whole, s.rows, 1, 1, s.columns};
            products.push_back(product);

            tiles += product.tiles(right_lies);
            square += s.rows * s.rows;
            whole += s.rows * s.columns;
        }

        // MuonNorms sets alpha and beta in both lists. Of the second only the first product is computed.
        std::vector<Product> others = products;
        size_t count = products.size();
        size_t bytes = count * sizeof(Product);
        Product* list = products.data();
        Product* other_list = others.data();
        if (!on.is_host) {
            list = (Product*)backend_allocate(2 * bytes);
            other_list = list + count;
            backend_upload(list, products.data(), bytes);
            backend_upload(other_list, others.data(), bytes);
        }

        if (has_norms) on.run(MuonNorms<T>{.B = other_list, .next_x = list, .count = (int)count});
        on.multiply_matrices(list, (int)count, tiles, right_lies);
        if (has_norms) on.multiply_matrices(other_list, 1, products[0].tiles(right_lies), right_lies);

        if (!on.is_host) {
            wait_for(newest_event);
            CUDA_CHECK(cudaDeviceSynchronize());
            backend_free(list);
        }
    });
}

// ---- what is checked --------------------------------------------------------------------------------------

static void check_tiny() {
    test_conv({.B = 1, .H = 7, .W = 9, .C = 96, .O = 64, .emb = true, .in_place = true, .demb = true});
    force(-1, 2);
    test_conv({.B = 2, .H = 8, .W = 8, .C = 128, .O = 32, .emb = true, .residual = true, .demb = true});
    force_nothing();
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

    test_attention(1, 49, 2, 16);
    test_attention(3, 130, 1, 48);
    test_attention(1, 64, 2, 64);
    test_attention(1, 49, 1, 128);
    test_attention(1, 49, 1, 256);
    test_resample(3, 7, 9, 96);
    test_resample(1, 3, 5, 32);

    test_embedding(3, 32);
    test_diffusion(1, 7, 9, PREDICT_EPS, true);
    test_diffusion(3, 16, 16, PREDICT_V, false);
    test_step(5, 7, 6, 3, LR_COSINE, true);
    test_finish(1, 10000, 200000, NOTHING);
    test_finish(3, 10000, 200000, LOSS_OUTLIER);
    test_optimiser(70004, 2, true);
    test_optimiser(4, 0, true);
    for (RightMatrix right_lies : {RIGHT_IN_ROWS, RIGHT_TRANSPOSED}) {
        for (bool has_norms : {false, true}) test_products(right_lies, has_norms);
    }
    test_philox(1000);

    // Hopper's tiles of two parts, which are taken where there are many tiles: these have many channels.
    test_normed_product({.B = 4, .H = 32, .W = 32, .C = 64, .O = 1024}, 9);
    test_normed_product({.B = 4, .H = 32, .W = 32, .C = 64, .C2 = 64, .O = 1024}, 9);
    test_normed_product({.B = 4, .H = 32, .W = 32, .C = 1024, .O = 64}, 9);
    test_normed_product({.B = 13, .H = 16, .W = 16, .C = 1024, .O = 64}, 9);
    report_lines();
}

// The products of a model, each shape once.
static void test_model_products(const Plan& plan) {
    std::vector<std::vector<int>> seen;
    auto first = [&](std::vector<int> shape) {
        bool fresh = std::find(seen.begin(), seen.end(), shape) == seen.end();
        seen.push_back(shape);
        return fresh;
    };
    for (const Block& b : plan.blocks) {
        int M = 3 * b.H * b.H;
        int K = padded(b.C + b.C2);
        int O = padded(b.O);
        bool res = b.kind == BLOCK_RES;
        bool conv = res || b.kind == BLOCK_CONV_IN || b.kind == BLOCK_OUT;
        if (conv && first({9, b.H, K, O})) {
            bool dx = K > PIXEL;  // the gradient of the images is not wanted
            test_conv({.B = 3, .H = b.H, .W = b.H, .C = K, .O = O,
                       .emb = true, .residual = true, .dx = dx, .demb = true});
        }
        if (res && first({9, b.H, b.O, b.O}))
            test_conv({.B = 3, .H = b.H, .W = b.H, .C = b.O, .O = b.O, .in_place = true});
        if (res && K != b.O && first({1, b.H, b.C, b.C2, b.O}))
            test_linear({.M = M, .C = b.C, .C2 = b.C2, .O = b.O, .accumulate = b.accumulate});
        if (b.kind == BLOCK_ATTENTION && first({1, b.H, b.C, 3})) {
            test_linear({.M = M, .C = b.C, .O = 3 * b.C});
            test_linear({.M = M, .C = b.C, .O = b.C, .residual = true, .accumulate = true});
        }
    }
}

// The shapes of the default model, and those at the edges of what the kernels take at once.
static void check_products(const Plan& plan) {
    for (int tile = -1; tile < 3; tile++) {
        for (int splits : {0, 3}) {
            if (tile < 0 && splits) continue;
            force(tile, splits);
            test_conv({.B = 1, .H = 7, .W = 7, .C = 96, .O = 320, .emb = true, .residual = true, .demb = true});
            test_conv({.B = 3, .H = 9, .W = 13, .C = 320, .O = 96, .emb = true, .demb = true});
            test_conv({.B = 3, .H = 13, .W = 9, .C = 32, .O = 32, .in_place = true});
            test_conv({.B = 3, .H = 8, .W = 8, .C = 192, .O = 64, .emb = true, .residual = true, .demb = true});
            test_conv({.B = 1, .H = 17, .W = 40, .C = 64, .O = 160, .residual = true, .dx = false, .demb = true});
            test_linear({.M = 1, .C = 64, .O = 256});
            test_linear({.M = 3, .C = 256, .O = 64, .residual = true, .accumulate = true});
            test_linear({.M = 169, .C = 96, .C2 = 32, .O = 320, .residual = true, .accumulate = true});
            test_linear({.M = 500, .C = 320, .C2 = 96, .O = 96});
            test_linear({.M = 1000, .C = 32, .C2 = 32, .O = 32, .dx = false});
        }
    }
    force_nothing();

    for (int B : {1, 3}) {
        test_conv({.B = B, .H = 13, .W = 9, .C = 8, .O = 64, .dx = false});
        test_conv({.B = B, .H = 9, .W = 7, .C = 8, .O = 32, .emb = true, .residual = true, .demb = true});
        test_conv({.B = B, .H = 9, .W = 13, .C = 64, .O = 8});
        test_conv({.B = B, .H = 7, .W = 7, .C = 96, .O = 8, .emb = true, .residual = true, .demb = true});
    }
    test_conv({.B = 1, .H = 8, .W = 8, .C = 1024, .O = 512});
    // more tiles than blocks
    test_conv({.B = 14, .H = 64, .W = 64, .C = 96, .O = 96, .emb = true, .residual = true, .demb = true});
    test_linear({.M = 40000, .C = 128, .O = 128, .residual = true, .accumulate = true});
    for (int taps : {9, 1}) {
        test_normed_product({.B = 14, .H = 64, .W = 64, .C = 64, .C2 = 64}, taps);
        test_normed_product({.B = 780, .H = 8, .W = 8, .C = 64, .C2 = 64}, taps);
    }
    test_linear({.M = 3, .C = 256, .O = 3712});

    test_model_products(plan);

    // The bias gradient: of images smaller and larger than a tile, and of fewer and more images than go at once.
    static const int SIZES[][2] = {{1, 1}, {7, 7}, {40, 25}};
    for (int O : {8, 32, 96, 320}) {
        for (auto& [H, W] : SIZES) {
            test_conv({.B = 3, .H = H, .W = W, .C = 8, .O = O, .emb = true, .dx = false, .demb = true});
            test_conv({.B = 1, .H = H, .W = W, .C = 8, .O = O, .emb = true, .dx = false});
            test_conv({.B = 70, .H = H, .W = W, .C = 8, .O = O, .emb = true, .dx = false, .demb = true});
        }
    }
    report_lines();
}

// Norms by themselves and between products.
static void test_norms() {
    static const struct {
        int B, T, C, C2, G;
    } NORMS[] = {{3, 63, 96, 32, 32},     {1, 63, 128, 64, 32},  {3, 63, 192, 0, 8},
                 {2, 49, 32, 0, 8},       {1, 256, 64, 32, 8},   {2, 4096, 64, 0, 32},
                 {1, 4096, 128, 64, 32},  {3, 4096, 64, 64, 32}, {2, 1024, 128, 0, 32},
                 {2, 1024, 192, 128, 32}, {3, 256, 192, 0, 32},  {2, 256, 256, 192, 32},
                 {3, 64, 256, 0, 32},     {1, 64, 256, 256, 32}, {1, 49, 1024, 0, 32},
                 {1, 63, 992, 0, 32},     {1, 16384, 96, 32, 8}, {1, 65536, 64, 0, 32}};
    int i = 0;  // which options a case has
    for (auto& n : NORMS) {
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
    }

    for (int taps : {9, 1}) {
        for (int tile : {-1, 0, 1, 2}) {  // the fastest kernel, and the portable ones
            force(tile, tile >= 0);
            for (int H : {8, 16, 32, 12}) {
                test_normed_product({.B = 3, .H = H, .W = H, .C = 64, .C2 = 64, .O = 128}, taps);
                test_normed_product({.B = 2, .H = H, .W = H, .C = 96, .C2 = 32}, taps);
                test_normed_product({.B = 1, .H = H, .W = H, .C = 192, .O = 192, .silu = false}, taps);
                test_normed_product({.B = 3, .H = H, .W = H, .C = 192, .O = 64, .modulated = true}, taps);
            }
            test_normed_product({.B = 2, .H = 64, .W = 64, .C = 64, .C2 = 128}, taps);
            force_nothing();
        }
    }

    for (bool adding : {false, true}) {
        for (bool residual : {false, true}) {
            for (int H : {8, 16, 32, 64}) {
                int C2 = residual ? 0 : 64;
                test_norm(
                    {.B = 256 / H, .T = H * H, .C = 192, .C2 = C2, .accumulate = adding, .residual = residual});
            }
        }
    }
}

static void check_all(const Plan& plan) {
    check_products(plan);
    test_norms();

    static const int ATTENTIONS[][4] = {
        {1, 49, 2, 16},   {3, 130, 1, 48},   {1, 64, 2, 64},   {1, 49, 1, 128},   {2, 64, 8, 32},
        {2, 256, 6, 32},  {3, 256, 2, 16},   {1, 256, 4, 64},  {1, 256, 2, 128},  {1, 1024, 2, 32},
        {1, 1024, 1, 64}, {1, 1024, 2, 128}, {1, 256, 2, 192}, {2, 1024, 1, 256}, {1, 1, 1, 240},
        {1, 1, 2, 32},    {1, 2500, 1, 96},  {1, 4100, 1, 32}};
    for (auto& [B, T, heads, d] : ATTENTIONS) test_attention(B, T, heads, d);

    test_resample(3, 7, 9, 96);
    test_resample(1, 4, 4, 256);
    test_resample(2, 32, 32, 64);
    test_resample(1, 3, 5, 32);
    report_lines();

    test_embedding(1, 64);
    test_embedding(32, 64);
    test_embedding(3, 32);
    test_embedding(300, 32);
    test_diffusion(1, 7, 9, PREDICT_EPS, true);
    test_diffusion(3, 16, 16, PREDICT_V, true);
    test_diffusion(2, 64, 64, PREDICT_EPS, false);
    test_diffusion(2, 8, 8, PREDICT_X0, true);
    report_lines();

    test_step(5, 7, 6, 3, LR_COSINE, true);
    test_step(5, 7, 6, 2500, LR_COSINE, false);
    test_step(5, 7, 6, 2500, LR_LINEAR, false);
    test_step(300, 32, 17, 70, LR_CONSTANT, true);
    test_step(100, 300, 8, (int64_t)1 << 33, LR_CONSTANT, false);
    for (int special = 0; special < SPECIALS; special++) {
        test_finish(1, 10000, 200000, (Special)special);
        test_finish(32, 12288, 20494211, (Special)special);
    }
    test_optimiser(3000004, 1, true);
    test_optimiser(65536 + 8, 0, true);
    for (int emas = 0; emas <= MAX_EMAS; emas++) {
        test_optimiser(4, emas, true);
        test_optimiser(70004, emas, true);
    }
    test_optimiser(70004, 2, false);
    for (RightMatrix right_lies : {RIGHT_IN_ROWS, RIGHT_TRANSPOSED}) {
        for (bool has_norms : {false, true}) test_products(right_lies, has_norms);
    }
    test_philox(2000000);

    // Hopper's tiles of two parts: the weights stay or don't, x is normed on the way or not, and the second part may
    // lie outside the image.
    test_normed_product({.B = 14, .H = 64, .W = 64, .C = 64, .on_the_way = true}, 9);
    test_normed_product({.B = 14, .H = 64, .W = 64, .C = 64, .C2 = 128, .modulated = true, .on_the_way = true}, 9);
    test_normed_product({.B = 14, .H = 64, .W = 64, .C = 64, .silu = false}, 9);
    test_normed_product({.B = 210, .H = 16, .W = 16, .C = 64, .C2 = 64}, 9);
    test_normed_product({.B = 105, .H = 16, .W = 24, .C = 64}, 9);
    test_normed_product({.B = 25, .H = 48, .W = 48, .C = 96, .C2 = 32}, 9);
    report_lines();
}

// The largest sizes that the flags allow, where indices, grids and workspaces end.
static void check_limits() {
    for (int tile : {-1, 1}) {  // the fastest kernel, and a portable one
        force(tile, 0);
        test_conv({.B = 1, .H = 1024, .W = 1024, .C = 8, .O = 32,
                   .emb = true, .residual = true, .dx = false, .demb = true});
        test_conv({.B = 2, .H = 808, .W = 1000, .C = 8, .O = 32, .emb = true, .dx = false, .demb = true});
        test_conv({.B = 1, .H = 1024, .W = 1024, .C = 32, .O = 8});
        test_conv({.B = 65535, .H = 2, .W = 2, .C = 8, .O = 32, .emb = true, .dx = false});
        test_conv({.B = 65535, .H = 2, .W = 2, .C = 8, .O = 32, .emb = true, .dx = false, .demb = true});
        // as many images as most_images takes of so many channels
        test_conv({.B = 43750, .H = 1, .W = 1, .C = 32, .O = 160, .emb = true, .residual = true, .demb = true});
        test_conv({.B = 21875, .H = 1, .W = 1, .C = 8, .O = 320, .emb = true, .residual = true, .dx = false});
        test_conv({.B = 1, .H = 4, .W = 4, .C = 4096, .O = 32});
        test_conv({.B = 1, .H = 4, .W = 4, .C = 32, .O = 8192, .emb = true, .demb = true});
        test_linear({.M = 16, .C = 8192, .C2 = 8192, .O = 64, .accumulate = true});
        test_linear({.M = 16, .C = 64, .O = 24576});
        test_normed_product({.B = 65535, .H = 2, .W = 1, .C = 64, .O = 32, .G = 4}, 9);
        test_normed_product({.B = 65535, .H = 2, .W = 1, .C = 64, .O = 32, .G = 4, .silu = false}, 1);
        report_lines();
    }
    force_nothing();

    test_normed_product({.B = 1, .H = 1024, .W = 1024, .C = 32, .O = 32, .G = 8}, 9);
    report_lines();

    test_conv({.B = 3, .H = 2, .W = 2, .C = 8, .O = 8192, .emb = true, .dx = false, .demb = true});
    test_norm({.B = 1, .T = 1 << 20, .C = 32, .G = 8});
    test_norm({.B = 65535, .T = 1, .C = 32, .C2 = 32, .G = 8});
    for (int G : {1, 32, 1024})
        test_norm({.B = 2, .T = 16, .C = 8192, .C2 = 8192, .G = G, .accumulate = true});
    report_lines();

    test_attention(65535, 1, 2, 16);
    test_attention(1, 64, 512, 16);
    test_attention(1, 64, 64, 128);
    test_attention(1, 64, 32, 256);
    for (int d : {32, 128, 256}) test_long_attention(MAX_ATTENTION_SIZE * MAX_ATTENTION_SIZE, d, 9973);
    test_resample(1, 512, 512, 32);
    test_resample(65535, 1, 1, 32);
    test_resample(1, 2, 2, 8192);
    report_lines();

    test_embedding(65535, 32);
    test_embedding(3, 1024);
    test_diffusion(1, 1024, 1024, PREDICT_EPS, true);
    test_diffusion(65535, 1, 4, PREDICT_V, true);
    test_step(3, 65535, 4, 99999999, LR_COSINE, true);
    test_step(2, 1, 1024, 3, LR_CONSTANT, true);
    test_finish(65536, 48, 1000, NOTHING);
    test_finish(1, 3 << 20, 2147483647, NOTHING);
    report_lines();
}

static int run_tests(int argc, char** argv) {
    std::string mode = argc > 1 ? argv[1] : "check";
    if (mode != "check" && mode != "tiny" && mode != "limits")
        fail_usage("this program knows check, tiny and limits, and no %s", mode.c_str());
    if (argc > 2) only = argv[2];

    backend_init();
    allocate_workspace();
    cpu::allocate_cpu_workspace();
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
