// Five small passes that do next to no arithmetic: SiLU, up-sampling, down-sampling, the timestep embedding and the loss.
//
//   make elementwise && ./elementwise          every version: against PyTorch, then timed
//   ./elementwise 3                            version 3 of each alone
//   ./elementwise all silu-64x64               every version of one case
//
//   silu, out = x sigmoid(x)
//   0  plain loops on the CPU: the specification; and the program's function there (as for all five)
//   1  fp32, a thread an element
//   2  bf16, a thread an element: half the bytes (the program's own, which only the embedding uses)
//   3  bf16, a thread 16 bytes: fewer and wider loads
//   4  behind a group norm: the norm's kernel, then version 3
//   5  behind a group norm: within the norm's kernel, as the program has it
//
//   upsample, F.interpolate(x, scale_factor=2), whose gradient is the sum of 2 x 2 pixels; downsample, F.avg_pool2d(x, 2),
//   whose gradient repeats a quarter of a pixel four times: the same two kernels
//   1  fp32, NCHW, a thread a number that is written
//   2  bf16, NHWC, a thread a number that is written
//   3  the program's: bf16, NHWC, a thread 16 bytes of the small image
//
//   timestep, out (B, C) = cat(cos(t f), sin(t f)), f_i = 10000^(-i / half), half = C / 2. It has no gradient
//   1  fp32, a thread an output, the angle a product of floats
//   2  fp32, a thread an output, the angle in double
//   3  the program's: a thread an angle, in double, sine and cosine together
//
//   mse, the loss of B samples of n elements: the sums of squares of parts of 4096 elements, whose sum, weighted by what
//   each sample's timestep counts for, over B n is the loss; and dx = 2 weight (x - target) / (B n)
//   1  fp32, a thread an element adds its square to the part; the gradient in a kernel of its own
//   2  bf16, a block a part, its sum through shuffles; the gradient in a kernel of its own
//   3  the program's: a block a part, sum and gradient in one pass
//
// What the steps change: such a pass takes the time of its traffic. bf16 halves that, and 16 bytes a thread need an
// eighth of the instructions to ask for it. The real step is to have no pass: a norm that writes a tensor has it
// in registers, and there a SiLU costs nothing. Version 4 of silu is what version 5 replaces, and the difference between
// the two is a whole SiLU. Resampling asks four times for each number of the small image where a thread is a
// number of the large one. The program's kernel turns that around: a thread takes 16 bytes of the small image and
// writes, or adds up, whole lines of NHWC. The embedding takes the time of a launch, and its versions differ in error
// alone: t reaches 999, so that the last bit of an angle in float is 6e-5 of a radian, which version 1 carries into
// cosine and sine. In version 1 of the loss 4096 threads queue for one address, in an order that differs from run to
// run, and so does the last bit of the loss. A block that sums in its own order is as fast as its loads and gives the
// same bits every time. The gradient needs the same two numbers, so it comes with the sum for one more write.
#include "common.h"

namespace elementwise {

static size_t size_of(const Problem& p, const char* tensor) { return p.find(tensor).values.size(); }

// ==== silu =================================================================================================

enum { GROUPS = 32 };

static void silu_forward0(Problem& p) {
    float* out = p.out<float>("out");
    const float* x = p.in<float>("x");
    for (size_t i = 0; i < size_of(p, "x"); i++) out[i] = x[i] / (1.0f + expf(-x[i]));
}
static void silu_backward0(Problem& p) {
    float* dx = p.out<float>("dx");
    const float *dout = p.in<float>("dout"), *x = p.in<float>("x");
    for (size_t i = 0; i < size_of(p, "x"); i++) {
        float s = 1.0f / (1.0f + expf(-x[i]));
        dx[i] = dout[i] * s * (1.0f + x[i] * (1.0f - s));
    }
}

#ifdef PROGRAM
// All elements in a row: SiLU does not ask for their places.
template <typename T>
static TensorOf<T> row_of(const Problem& p, const T* data) {
    return {(T*)data, 1, 1, 1, (int)size_of(p, "x")};
}
template <typename T>
static SiluForward<T> silu_forward(Problem& p) {
    return {.out = row_of(p, p.out<T>("out")), .x = row_of(p, p.in<T>("x"))};
}
template <typename T>
static SiluBackward<T> silu_backward(Problem& p) {
    return {.dx = row_of(p, p.out<T>("dx")),
            .dout = row_of(p, p.in<T>("dout")),
            .x = row_of(p, p.in<T>("x"))};
}
#endif

#ifdef __CUDACC__
// ---- 1 ----------------------------------------------------------------------------------------------------

__global__ void silu_forward_kernel1(float* out, const float* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] / (1.0f + expf(-x[i]));
}
static void silu_forward1(Problem& p) {
    size_t n = size_of(p, "x");
    launch(silu_forward_kernel1, ceil_div(n, 256), 256, 0, p.out<float>("out"), p.in<float>("x"), n);
}
__global__ void silu_backward_kernel1(float* dx, const float* dout, const float* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float s = 1.0f / (1.0f + expf(-x[i]));
    dx[i] = dout[i] * s * (1.0f + x[i] * (1.0f - s));
}
static void silu_backward1(Problem& p) {
    size_t n = size_of(p, "x");
    launch(silu_backward_kernel1, ceil_div(n, 256), 256, 0, p.out<float>("dx"), p.in<float>("dout"),
           p.in<float>("x"), n);
}

// ---- 3; 2 is the program's --------------------------------------------------------------------------------

// n: a multiple of VEC
__global__ void silu_forward_kernel3(floatX* out, const floatX* x, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    Unpacked value = unpack(x + i);
    for (int k = 0; k < VEC; k++) value[k] *= sigmoid(value[k]);
    *(uint4*)(out + i) = pack(value);
}
static void launch_silu_forward3(floatX* out, const floatX* x, size_t n) {
    assert(n % VEC == 0);
    launch(silu_forward_kernel3, ceil_div(n, 256 * VEC), 256, 0, out, x, n);
}
static void silu_forward3(Problem& p) {
    launch_silu_forward3(p.out<floatX>("out"), p.in<floatX>("x"), size_of(p, "x"));
}
__global__ void silu_backward_kernel3(floatX* dx, const floatX* dout, const floatX* x, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    Unpacked value = unpack(x + i), upstream = unpack(dout + i);
    for (int k = 0; k < VEC; k++) upstream[k] *= silu_gradient(value[k]);
    *(uint4*)(dx + i) = pack(upstream);
}
static void silu_backward3(Problem& p) {
    size_t n = size_of(p, "x");
    assert(n % VEC == 0);
    launch(silu_backward_kernel3, ceil_div(n, 256 * VEC), 256, 0, p.out<floatX>("dx"), p.in<floatX>("dout"),
           p.in<floatX>("x"), n);
}

#ifdef PROGRAM
// ---- 4, 5: behind a group norm ----------------------------------------------------------------------------

// The program's group norm, the moments of x given, with or without the SiLU.
static void silu_normalise(Problem& p, floatX* out, bool silu) {
    Tensor x = p.tensor_in<floatX>("x");
    x.moments = (Moments*)p.in<float>("moments of x");
    Norm norm = {.x = x,
                 .groups = GROUPS,
                 .silu = silu,
                 .w = p.in<float>("w"),
                 .bias = p.in<float>("bias"),
                 .statistics = (GroupStatistics*)p.out<float>("statistics"),
                 .half_scale_shift = (ScaleShift*)p.out<float>(silu ? "half affine" : "affine")};
    groupnorm_forward(p.shaped("x", out), norm);
}
static void silu_norm4(Problem& p) {
    floatX* between = p.out<floatX>("normed");  // where the norm leaves its output, SiLU in place
    silu_normalise(p, between, false);
    launch_silu_forward3(between, between, size_of(p, "x"));
}
static void silu_norm5(Problem& p) { silu_normalise(p, p.out<floatX>("normed"), true); }
#endif
#endif

static Work silu_work(const Problem& p, int tensors) {
    return {0, (double)tensors * sizeof(floatX) * (double)size_of(p, "x")};
}

// ==== upsample, downsample =================================================================================

// Both go between a small image of H x W pixels and one of 2 H x 2 W: what is repeated or added up times a factor.
struct Resampling {
    int images, C, H, W;
    float factor;
    HOST_DEVICE size_t small() const { return (size_t)images * C * H * W; }
};
static Resampling upsampling(const Problem& p) { return {p.dim("B"), p.dim("C"), p.dim("H"), p.dim("W"), 1.0f}; }
static Resampling downsampling(const Problem& p) {
    return {p.dim("B"), p.dim("C"), p.dim("H") / 2, p.dim("W") / 2, 0.25f};
}
typedef void (*Resampler)(Problem&, const char* to, const char* from, Resampling);
// upsample forward repeats and its gradient adds up; downsample is the other way round.
static std::function<void(Problem&)> forward_by(Resampler f, Resampling (*sizes)(const Problem&)) {
    return [=](Problem& p) { f(p, "out", "x", sizes(p)); };
}
static std::function<void(Problem&)> backward_by(Resampler f, Resampling (*sizes)(const Problem&)) {
    return [=](Problem& p) { f(p, "dx", "dout", sizes(p)); };
}

// ---- 0 ----------------------------------------------------------------------------------------------------

static void repeat0(Problem& p, const char* to, const char* from, Resampling s) {
    float* out = p.out<float>(to);
    const float* x = p.in<float>(from);
    for (int row = 0; row < s.images * s.C * 2 * s.H; row++)  // of all planes, which follow each other
        for (int i = 0; i < 2 * s.W; i++) *out++ = s.factor * x[(size_t)(row / 2) * s.W + i / 2];
}
static void pool0(Problem& p, const char* to, const char* from, Resampling s) {
    float* out = p.out<float>(to);
    const float* x = p.in<float>(from);
    for (int row = 0; row < s.images * s.C * s.H; row++, x += 4 * s.W)
        for (int i = 0; i < 2 * s.W; i += 2)
            *out++ = s.factor * (x[i] + x[i + 1] + x[2 * s.W + i] + x[2 * s.W + i + 1]);
}

#ifdef PROGRAM
// The program's layer resamples either way, by the shapes of its tensors.
template <typename T>
static Resample<T> resample(Problem& p, const char* to, const char* from, Resampling s) {
    return {.out = p.tensor_out<T>(to), .x = p.tensor_in<T>(from), .factor = s.factor, .accumulate = false};
}
static void resample_cpu(Problem& p, const char* to, const char* from, Resampling s) {
    cpu::run(resample<float>(p, to, from, s));
}
#endif

#ifdef __CUDACC__
// ---- 1: NCHW ----------------------------------------------------------------------------------------------

// out (B C, 2 H, 2 W) = x (B C, H, W) factor, each pixel four times.
__global__ void repeat_kernel1(float* out, const float* x, Resampling s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 4 * s.small()) return;
    size_t column = i % (2 * s.W), row = i / (2 * s.W);  // of all planes' rows
    out[i] = s.factor * x[row / 2 * s.W + column / 2];
}
static void repeat1(Problem& p, const char* to, const char* from, Resampling s) {
    launch(repeat_kernel1, ceil_div(4 * s.small(), 256), 256, 0, p.out<float>(to), p.in<float>(from), s);
}
// out (B C, H, W) = the sum of 2 x 2 pixels of x (B C, 2 H, 2 W) times factor.
__global__ void pool_kernel1(float* out, const float* x, Resampling s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s.small()) return;
    const float *first = x + i / s.W * 4 * s.W + i % s.W * 2, *second = first + 2 * s.W;
    out[i] = s.factor * ((first[0] + first[1]) + (second[0] + second[1]));
}
static void pool1(Problem& p, const char* to, const char* from, Resampling s) {
    launch(pool_kernel1, ceil_div(s.small(), 256), 256, 0, p.out<float>(to), p.in<float>(from), s);
}

// ---- 2: NHWC ----------------------------------------------------------------------------------------------

// out (B, 2 H, 2 W, C) = x (B, H, W, C) factor, each pixel four times.
__global__ void repeat_kernel2(floatX* out, const floatX* x, Resampling s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 4 * s.small()) return;
    size_t c = i % s.C, column = i / s.C % (2 * s.W), row = i / s.C / (2 * s.W);  // of all images' rows
    out[i] = (floatX)(s.factor * (float)x[(row / 2 * s.W + column / 2) * s.C + c]);
}
static void repeat2(Problem& p, const char* to, const char* from, Resampling s) {
    launch(repeat_kernel2, ceil_div(4 * s.small(), 256), 256, 0, p.out<floatX>(to), p.in<floatX>(from), s);
}
// out (B, H, W, C) = the sum of 2 x 2 pixels of x (B, 2 H, 2 W, C) times factor.
__global__ void pool_kernel2(floatX* out, const floatX* x, Resampling s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s.small()) return;
    size_t c = i % s.C, column = i / s.C % s.W, row = i / s.C / s.W;  // of all images' rows
    const floatX* first = x + (row * 4 * s.W + column * 2) * s.C + c;
    const floatX* second = first + (size_t)2 * s.W * s.C;
    out[i] = (floatX)(s.factor * (((float)first[0] + (float)first[s.C]) + ((float)second[0] + (float)second[s.C])));
}
static void pool2(Problem& p, const char* to, const char* from, Resampling s) {
    launch(pool_kernel2, ceil_div(s.small(), 256), 256, 0, p.out<floatX>(to), p.in<floatX>(from), s);
}

#ifdef PROGRAM
static void resample3(Problem& p, const char* to, const char* from, Resampling s) {
    run(resample<floatX>(p, to, from, s));
}
#endif
#endif

static Work resampling_work(const Problem& p) {  // forward and backward alike: one side in, the other out
    return {0, sizeof(floatX) * (double)(size_of(p, "x") + size_of(p, "out"))};
}

// ==== timestep =============================================================================================

enum { MAX_PERIOD = 10000 };

static void timestep0(Problem& p) {
    float* out = p.out<float>("out");
    const int* t = p.in<int>("t");
    int B = p.dim("B"), C = p.dim("C"), half = C / 2;
    for (int b = 0; b < B; b++)
        for (int i = 0; i < half; i++) {
            double angle = t[b] * exp(-log((double)MAX_PERIOD) * i / half);
            out[b * C + i] = (float)cos(angle), out[b * C + half + i] = (float)sin(angle);
        }
}

#ifdef PROGRAM
template <typename T>
static TimestepEmbedding<T> timestep_layer(Problem& p) {
    return {.out = p.tensor_out<T>("out"), .timesteps = p.in<int>("t"), .max_period = MAX_PERIOD};
}
#endif

#ifdef __CUDACC__
// ---- 1, 2: a thread an output -----------------------------------------------------------------------------

template <typename Angle>
__global__ void timestep_kernel1(float* out, const int* t, int B, int C) {
    int n = blockIdx.x * blockDim.x + threadIdx.x, half = C / 2, b = n / C, i = n % half;
    if (b >= B) return;
    Angle angle = (Angle)t[b] * exp((Angle)-log((Angle)MAX_PERIOD) * i / half);
    out[n] = (float)(n % C < half ? cos(angle) : sin(angle));
}
template <typename Angle>
static void timestep1(Problem& p) {
    int B = p.dim("B"), C = p.dim("C");
    launch(timestep_kernel1<Angle>, ceil_div(B * C, 64), 64, 0, p.out<float>("out"), p.in<int>("t"), B, C);
}
#endif

static Work timestep_work(const Problem& p) {
    return {0, p.dim("B") * (sizeof(int) + sizeof(floatX) * (double)p.dim("C"))};
}

// ==== mse ==================================================================================================

enum { PART = 4096 };
// What the loss needs of the schedule (1000, 10): the weight of a timestep's error is column 4.
HOST_DEVICE static inline float weight_of(const float* schedule, int t) { return schedule[10 * t + 4]; }

static void mse0(Problem& p) {
    int B = p.dim("B"), n = p.dim("n");
    float *losses = p.out<float>("losses"), *dx = p.out<float>("dx");
    const float *x = p.in<float>("x"), *target = p.in<float>("target"), *schedule = p.in<float>("chain");
    const int* t = p.in<int>("t");
    for (int b = 0; b < B; b++)
        for (int first = 0; first < n; first += PART) {
            double sum = 0;
            for (int k = first; k < std::min(n, first + PART); k++) {
                size_t i = (size_t)b * n + k;
                float d = x[i] - target[i];
                sum += d * d;
                dx[i] = 2 * weight_of(schedule, t[b]) * d / ((float)B * n);
            }
            *losses++ = (float)sum;
        }
}

#ifdef PROGRAM
static_assert((int)PART == (int)LOSS_CHUNK);
static_assert(sizeof(ScheduleRow) == 10 * sizeof(float) && offsetof(ScheduleRow, weight) == 4 * sizeof(float));
template <typename Real>
static PredictionLoss<Real> mse_layer(Problem& p) {
    int B = p.dim("B"), n = p.dim("n");
    BatchLoss batch = {p.out<float>("losses"), p.in<int>("t"), (const ScheduleRow*)p.in<float>("chain"),
                       B, n / PIXEL, PIXEL, 1000};
    return {batch, p.in<Real>("x"), p.in<float>("target"), p.out<Real>("dx")};
}
#endif

#ifdef __CUDACC__
// ---- 1: atomic additions ----------------------------------------------------------------------------------

__global__ void mse_losses_kernel1(float* losses, const float* x, const float* target, size_t count, int n, int parts) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    atomicAdd(losses + i / n * parts + i % n / PART, (x[i] - target[i]) * (x[i] - target[i]));
}
template <typename T>
__global__ void mse_gradient_kernel1(T* dx, const T* x, const float* target, const int* t, const float* schedule,
                                     size_t count, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) dx[i] = (T)(2.0f / (float)count * weight_of(schedule, t[i / n]) * ((float)x[i] - target[i]));
}
template <typename T>
static void mse_gradient1(Problem& p) {
    int n = p.dim("n");
    size_t count = (size_t)p.dim("B") * n;
    launch(mse_gradient_kernel1<T>, ceil_div(count, 256), 256, 0, p.out<T>("dx"), p.in<T>("x"),
           p.in<float>("target"), p.in<int>("t"), p.in<float>("chain"), count, n);
}
static void mse1(Problem& p) {
    int n = p.dim("n"), parts = ceil_div(n, PART);
    size_t count = (size_t)p.dim("B") * n;
    float* losses = p.out<float>("losses");
    backend_zero(losses, (size_t)p.dim("B") * parts * sizeof(float));
    launch(mse_losses_kernel1, ceil_div(count, 256), 256, 0, losses, p.in<float>("x"), p.in<float>("target"),
           count, n, parts);
    mse_gradient1<float>(p);
}

// ---- 2: a block a part ------------------------------------------------------------------------------------

__global__ void mse_losses_kernel2(float* losses, const floatX* x, const float* target, int n, int parts) {
    float sum = 0;
    int part = blockIdx.x % parts;
    size_t sample = (size_t)(blockIdx.x / parts) * n, end = sample + min((part + 1) * PART, n);
    for (size_t i = sample + part * PART + threadIdx.x; i < end; i += blockDim.x)
        sum += ((float)x[i] - target[i]) * ((float)x[i] - target[i]);
    sum = team_sum(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = sum;
}
static void mse2(Problem& p) {
    int n = p.dim("n"), parts = ceil_div(n, PART);
    launch(mse_losses_kernel2, p.dim("B") * parts, 256, 0, p.out<float>("losses"), p.in<floatX>("x"),
           p.in<float>("target"), n, parts);
    mse_gradient1<floatX>(p);
}
#endif

static Work mse_work(const Problem& p) {
    return {0, (sizeof(float) + 2.0 * sizeof(floatX)) * p.dim("B") * (double)p.dim("n")};
}

// ==== the ladder ===========================================================================================

static std::vector<Version> versions() {
    const char *up = "upsample forward", *up_back = "upsample backward", *down = "downsample forward",
               *down_back = "downsample backward", *plain = "the specification";
    std::vector<Version> all = {
        {0, "silu forward", NCHW, CPU_FP32, plain, silu_forward0},
        {0, "silu backward", NCHW, CPU_FP32, plain, silu_backward0},
        {0, up, NCHW, CPU_FP32, plain, forward_by(repeat0, upsampling)},
        {0, up_back, NCHW, CPU_FP32, plain, backward_by(pool0, upsampling)},
        {0, down, NCHW, CPU_FP32, plain, forward_by(pool0, downsampling)},
        {0, down_back, NCHW, CPU_FP32, plain, backward_by(repeat0, downsampling)},
        {0, "timestep", NHWC, CPU_FP32, plain, timestep0},
        {0, "mse", NHWC, CPU_FP32, plain, mse0},
    };
    [[maybe_unused]] auto add = [&](std::initializer_list<Version> more) { all.insert(all.end(), more); };
#ifdef PROGRAM
    const char* here = "train_unet.cu on a CPU";
    add({{0, "silu forward", NCHW, CPU_FP32, here, [](Problem& p) { cpu::run(silu_forward<float>(p)); }},
         {0, "silu backward", NCHW, CPU_FP32, here, [](Problem& p) { cpu::run(silu_backward<float>(p)); }},
         {0, up, NHWC, CPU_FP32, here, forward_by(resample_cpu, upsampling)},
         {0, up_back, NHWC, CPU_FP32, here, backward_by(resample_cpu, upsampling)},
         {0, down, NHWC, CPU_FP32, here, forward_by(resample_cpu, downsampling)},
         {0, down_back, NHWC, CPU_FP32, here, backward_by(resample_cpu, downsampling)},
         {0, "timestep", NHWC, CPU_FP32, here, [](Problem& p) { cpu::run(timestep_layer<float>(p)); }},
         {0, "mse", NHWC, CPU_FP32, here, [](Problem& p) { cpu::run(mse_layer<float>(p)); }}});
#endif
#ifdef __CUDACC__
    add({{1, "silu forward", NCHW, FP32, "a thread an element", silu_forward1},
         {1, "silu backward", NCHW, FP32, "a thread an element", silu_backward1}});
#ifdef PROGRAM
    add({{2, "silu forward", NHWC, FLOATX, "half the bytes", [](Problem& p) { run(silu_forward<floatX>(p)); }},
         {2, "silu backward", NHWC, FLOATX, "half the bytes", [](Problem& p) { run(silu_backward<floatX>(p)); }}});
#endif
    add({{3, "silu forward", NHWC, FLOATX, "16 bytes a thread", silu_forward3},
         {3, "silu backward", NHWC, FLOATX, "16 bytes a thread", silu_backward3},
         {1, up, NCHW, FP32, "a thread a number written", forward_by(repeat1, upsampling)},
         {1, up_back, NCHW, FP32, "a thread a number written", backward_by(pool1, upsampling)},
         {2, up, NHWC, FLOATX, "half the bytes", forward_by(repeat2, upsampling)},
         {2, up_back, NHWC, FLOATX, "half the bytes", backward_by(pool2, upsampling)},
         {1, down, NCHW, FP32, "a thread a number written", forward_by(pool1, downsampling)},
         {1, down_back, NCHW, FP32, "a thread a number written", backward_by(repeat1, downsampling)},
         {2, down, NHWC, FLOATX, "half the bytes", forward_by(pool2, downsampling)},
         {2, down_back, NHWC, FLOATX, "half the bytes", backward_by(repeat2, downsampling)},
         {1, "timestep", NHWC, FP32, "angles in float", timestep1<float>, 3e-4},  // of 999 radians
         {2, "timestep", NHWC, FP32, "angles in double", timestep1<double>},
         {1, "mse", NHWC, FP32, "atomic additions, gradient apart", mse1, 0, ATOMICS},
         {2, "mse", NHWC, FLOATX, "a block a part, gradient apart", mse2}});
#ifdef PROGRAM
    const char *wide = "16 bytes a thread: the program's", *pairs = "sine and cosine together: the program's";
    add({{4, "silu norm", NHWC, FLOATX, "group norm, then version 3", silu_norm4},
         {5, "silu norm", NHWC, FLOATX, "within the group norm: the program's", silu_norm5},
         {3, up, NHWC, FLOATX, wide, forward_by(resample3, upsampling)},
         {3, up_back, NHWC, FLOATX, wide, backward_by(resample3, upsampling)},
         {3, down, NHWC, FLOATX, wide, forward_by(resample3, downsampling)},
         {3, down_back, NHWC, FLOATX, wide, backward_by(resample3, downsampling)},
         {3, "timestep", NHWC, FLOATX, pairs, [](Problem& p) { run(timestep_layer<floatX>(p)); }},
         {3, "mse", NHWC, FLOATX, "one pass: the program's", [](Problem& p) { run(mse_layer<floatX>(p)); }}});
#endif
#endif
    return all;
}

}  // namespace elementwise

static const Ladder elementwise_ladder = {
    "elementwise",
    {{"silu forward", {"out"}, [](const Problem& p) { return elementwise::silu_work(p, 2); }, "silu"},
     {"silu backward", {"dx"}, [](const Problem& p) { return elementwise::silu_work(p, 3); }, "silu"},
     {"silu norm",
      {"normed", "statistics/2", "affine/2|half affine/2"},
      [](const Problem& p) { return elementwise::silu_work(p, 2); },
      "silu"},
     {"upsample forward", {"out"}, elementwise::resampling_work, "upsample"},
     {"upsample backward", {"dx"}, elementwise::resampling_work, "upsample"},
     {"downsample forward", {"out"}, elementwise::resampling_work, "downsample"},
     {"downsample backward", {"dx"}, elementwise::resampling_work, "downsample"},
     {"timestep", {"out"}, elementwise::timestep_work, "timestep"},
     {"mse", {"losses", "dx"}, elementwise::mse_work, "mse"}},
    elementwise::versions()};
LADDER_MAIN(elementwise_ladder)
