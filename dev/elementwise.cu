// Small passes that do next to no arithmetic: SiLU, up-sampling, down-sampling, the timestep embedding and the loss.
//
//   make elementwise && ./elementwise          every version: against PyTorch, then timed
//   ./elementwise 3                            version 3 of each alone
//   ./elementwise all silu-64x64               every version of one case
//
//   Version 0 of every pass is plain loops on the CPU, the specification, and the program's own function there.
//
//   silu: out = x sigmoid(x)
//   1  fp32, a thread an element
//   2  bf16, a thread an element: half the bytes (the program's own, which only the embedding uses)
//   3  bf16, a thread 16 bytes: fewer and wider loads
//   4  behind a group norm: the norm's kernel, then version 3
//   5  behind a group norm: within the norm's kernel, as the program has it
//
//   upsample: F.interpolate(x, scale_factor=2), whose gradient is the sum of 2 x 2 pixels.
//   downsample: F.avg_pool2d(x, 2), whose gradient repeats a quarter of a pixel four times. Both have the same kernels.
//   1  fp32, NCHW, a thread a number that is written
//   2  bf16, NHWC, a thread a number that is written
//   3  the program's: bf16, NHWC, a thread 16 bytes of what is written
//
//   timestep: out (B, C) = cat(cos(t f), sin(t f)), f_i = 10000^(-i / half), half = C / 2. It has no gradient.
//   1  fp32, a thread an output, the angle a product of floats
//   2  fp32, a thread an output, the angle in double
//   3  the program's: a thread an angle, in double, sine and cosine together
//
//   mse: the loss of B samples of n elements is the sum of weight (x - target)^2 / (B n). The weight follows from the
//   sample's timestep. Its gradient is dx = 2 weight (x - target) / (B n). The ladder computes dx, but of the loss
//   only the sums of squares of parts of 4096 elements, which are not weighted yet.
//   1  fp32, a thread an element adds its square to the part; the gradient in a kernel of its own
//   2  bf16, a block a part, its sum through shuffles; the gradient in a kernel of its own
//   3  the program's: a block a part, sum and gradient in one pass
//
// What the steps change: such a pass takes the time of its traffic. bf16 halves that, and a thread that asks for 16
// bytes needs an eighth of the instructions. Beyond that:
//
//   silu        The real step is to have no pass at all. A norm that writes a tensor has it in registers, where a SiLU
//               costs nothing. Version 5 replaces version 4, and the difference between the two is a whole SiLU.
//   upsample,   A thread that writes one number also loads single numbers, and works out where they lie each time. The
//   downsample  program's kernel does so once for 16 bytes of a pixel, whose channels lie next to each other in NHWC.
//   timestep    The embedding takes the time of a launch, and its versions differ in error alone. t reaches 999, where
//               the last bit of a float is 6e-5 of a radian. Version 1 carries that error into cosine and sine.
//   mse         Version 1 has 4096 threads queue for one address. Their order differs from run to run, and so does the
//               last bit of the loss. A block that sums in an order of its own is as fast as its loads, and gives the
//               same bits every time. The gradient needs the two numbers that the sum needs, so that in version 3 it
//               costs no more than its own writes.
#include "common.h"

namespace elementwise {

static size_t size_of(const Problem& p, const char* tensor) { return p.find(tensor).values.size(); }

// ==== silu =================================================================================================

enum { GROUPS = 32 };

// ---- 0: the specification ---------------------------------------------------------------------------------
// All arrays are (n): SiLU need not know that they are images, (B, C, H, W).

static void silu_forward0(Problem& p) {
    size_t n = size_of(p, "x");
    float* out = p.out<float>("out");
    const float* x = p.in<float>("x");
    for (size_t i = 0; i < n; i++) out[i] = x[i] / (1.0f + expf(-x[i]));
}

static void silu_backward0(Problem& p) {
    size_t n = size_of(p, "x");
    float* dx = p.out<float>("dx");
    const float* dout = p.in<float>("dout");
    const float* x = p.in<float>("x");
    for (size_t i = 0; i < n; i++) {
        float s = 1.0f / (1.0f + expf(-x[i]));
        dx[i] = dout[i] * s * (1.0f + x[i] * (1.0f - s));
    }
}

#ifdef PROGRAM
// The program's layer, on the CPU and as version 2. It takes all elements as one pixel, (1, 1, 1, n).
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
// ---- 1: a thread an element -------------------------------------------------------------------------------

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

// ---- 3: a thread 16 bytes ---------------------------------------------------------------------------------
// A thread loads and stores the VEC elements of 16 bytes at once. n is a multiple of VEC.

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

    Unpacked value = unpack(x + i);
    Unpacked gradient = unpack(dout + i);
    for (int k = 0; k < VEC; k++) gradient[k] *= silu_gradient(value[k]);
    *(uint4*)(dx + i) = pack(gradient);
}

static void silu_backward3(Problem& p) {
    size_t n = size_of(p, "x");
    assert(n % VEC == 0);
    launch(silu_backward_kernel3, ceil_div(n, 256 * VEC), 256, 0, p.out<floatX>("dx"), p.in<floatX>("dout"),
           p.in<floatX>("x"), n);
}

#ifdef PROGRAM
// ---- 4, 5: behind a group norm ----------------------------------------------------------------------------

// The program's group norm, with or without the SiLU. The moments of x are given. Where a SiLU follows, the norm keeps
// half of its scale and shift instead of the whole.
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
    floatX* out = p.out<floatX>("normed");
    silu_normalise(p, out, false);
    launch_silu_forward3(out, out, size_of(p, "x"));  // SiLU reads the norm's output and overwrites it
}

static void silu_norm5(Problem& p) { silu_normalise(p, p.out<floatX>("normed"), true); }
#endif
#endif

// The least traffic: `tensors` of x's size are read or written once each.
static Work silu_work(const Problem& p, int tensors) {
    return {0, (double)tensors * sizeof(floatX) * (double)size_of(p, "x")};
}

// ==== upsample, downsample =================================================================================

// Both go between a small image of H x W pixels and a large one of 2H x 2W. The one direction repeats each pixel 2 x 2
// times, the other adds 2 x 2 pixels up. Both multiply what they write by a factor.
struct Resampling {
    int B, C, H, W;
    float factor;

    // The number of elements of all small images. The large ones have four times as many.
    HOST_DEVICE size_t small_size() const { return (size_t)B * C * H * W; }
};

static Resampling upsampling(const Problem& p) {
    return {p.dim("B"), p.dim("C"), p.dim("H"), p.dim("W"), 1.0f};
}

static Resampling downsampling(const Problem& p) {
    return {p.dim("B"), p.dim("C"), p.dim("H") / 2, p.dim("W") / 2, 0.25f};
}

// Upsample's forward repeats pixels, and its gradient adds them up. Downsample is the other way round. So each version
// has two functions, one that repeats and one that adds up, and each of them serves two passes. It is told the names of
// the tensors that it writes and reads.
typedef void (*Resampler)(Problem&, const char* to, const char* from, Resampling);

static std::function<void(Problem&)> forward_by(Resampler f, Resampling (*sizes)(const Problem&)) {
    return [=](Problem& p) { f(p, "out", "x", sizes(p)); };
}

static std::function<void(Problem&)> backward_by(Resampler f, Resampling (*sizes)(const Problem&)) {
    return [=](Problem& p) { f(p, "dx", "dout", sizes(p)); };
}

// ---- 0: the specification ---------------------------------------------------------------------------------
// Here and in versions 1 and 2 rows are counted through all images. A large image has an even number of rows, so that
// small row r / 2 still is the one that large row r belongs to.

// to (B, C, 2H, 2W) = factor times from (B, C, H, W), each pixel four times.
static void repeat0(Problem& p, const char* to, const char* from, Resampling s) {
    float* out = p.out<float>(to);
    const float* x = p.in<float>(from);
    int rows = s.B * s.C * 2 * s.H;
    for (int row = 0; row < rows; row++) {
        const float* source = x + (size_t)(row / 2) * s.W;
        for (int column = 0; column < 2 * s.W; column++) *out++ = s.factor * source[column / 2];
    }
}

// to (B, C, H, W) = factor times the sum of 2 x 2 pixels of from (B, C, 2H, 2W).
static void pool0(Problem& p, const char* to, const char* from, Resampling s) {
    float* out = p.out<float>(to);
    const float* x = p.in<float>(from);
    int rows = s.B * s.C * s.H;
    for (int row = 0; row < rows; row++) {
        const float* top = x + (size_t)row * 4 * s.W;
        const float* bottom = top + 2 * s.W;
        for (int i = 0; i < 2 * s.W; i += 2)
            *out++ = s.factor * (top[i] + top[i + 1] + bottom[i] + bottom[i + 1]);
    }
}

#ifdef PROGRAM
// The program's layer, on the CPU and as version 3. It repeats or adds up, whichever the shapes of its tensors say.
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
// A thread writes one number. Each channel is an image of its own, so that rows are counted through all channels too.

// out (B, C, 2H, 2W) = factor times x (B, C, H, W), each pixel four times.
__global__ void repeat_kernel1(float* out, const float* x, Resampling s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 4 * s.small_size()) return;

    size_t column = i % (2 * s.W);
    size_t row = i / (2 * s.W);
    out[i] = s.factor * x[row / 2 * s.W + column / 2];
}

static void repeat1(Problem& p, const char* to, const char* from, Resampling s) {
    launch(repeat_kernel1, ceil_div(4 * s.small_size(), 256), 256, 0, p.out<float>(to), p.in<float>(from), s);
}

// out (B, C, H, W) = factor times the sum of 2 x 2 pixels of x (B, C, 2H, 2W).
__global__ void pool_kernel1(float* out, const float* x, Resampling s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s.small_size()) return;

    size_t column = i % s.W;
    size_t row = i / s.W;
    const float* top = x + row * 4 * s.W + column * 2;
    const float* bottom = top + 2 * s.W;
    out[i] = s.factor * ((top[0] + top[1]) + (bottom[0] + bottom[1]));
}

static void pool1(Problem& p, const char* to, const char* from, Resampling s) {
    launch(pool_kernel1, ceil_div(s.small_size(), 256), 256, 0, p.out<float>(to), p.in<float>(from), s);
}

// ---- 2: NHWC ----------------------------------------------------------------------------------------------
// The same in bf16, and with the channels last, as the program has them.

// out (B, 2H, 2W, C) = factor times x (B, H, W, C), each pixel four times.
__global__ void repeat_kernel2(floatX* out, const floatX* x, Resampling s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 4 * s.small_size()) return;

    size_t c = i % s.C;
    size_t column = i / s.C % (2 * s.W);
    size_t row = i / s.C / (2 * s.W);
    size_t pixel = row / 2 * s.W + column / 2;
    out[i] = (floatX)(s.factor * (float)x[pixel * s.C + c]);
}

static void repeat2(Problem& p, const char* to, const char* from, Resampling s) {
    launch(repeat_kernel2, ceil_div(4 * s.small_size(), 256), 256, 0, p.out<floatX>(to), p.in<floatX>(from), s);
}

// out (B, H, W, C) = factor times the sum of 2 x 2 pixels of x (B, 2H, 2W, C).
__global__ void pool_kernel2(floatX* out, const floatX* x, Resampling s) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s.small_size()) return;

    size_t c = i % s.C;
    size_t column = i / s.C % s.W;
    size_t row = i / s.C / s.W;
    const floatX* top = x + (row * 4 * s.W + column * 2) * s.C + c;
    const floatX* bottom = top + (size_t)2 * s.W * s.C;
    float top_sum = (float)top[0] + (float)top[s.C];
    float bottom_sum = (float)bottom[0] + (float)bottom[s.C];
    out[i] = (floatX)(s.factor * (top_sum + bottom_sum));
}

static void pool2(Problem& p, const char* to, const char* from, Resampling s) {
    launch(pool_kernel2, ceil_div(s.small_size(), 256), 256, 0, p.out<floatX>(to), p.in<floatX>(from), s);
}

#ifdef PROGRAM
static void resample3(Problem& p, const char* to, const char* from, Resampling s) {
    run(resample<floatX>(p, to, from, s));
}
#endif
#endif

// The least traffic, forward and backward alike: one of the two images is read, the other is written.
static Work resampling_work(const Problem& p) {
    return {0, sizeof(floatX) * (double)(size_of(p, "x") + size_of(p, "out"))};
}

// ==== timestep =============================================================================================

enum { MAX_PERIOD = 10000 };

// ---- 0: the specification ---------------------------------------------------------------------------------

// out (B, C) = the cosines of half = C / 2 angles, then their sines. Angle i is t 10000^(-i / half).
static void timestep0(Problem& p) {
    float* out = p.out<float>("out");
    const int* timesteps = p.in<int>("t");
    int B = p.dim("B");
    int C = p.dim("C");
    int half = C / 2;
    for (int b = 0; b < B; b++)
        for (int i = 0; i < half; i++) {
            double frequency = exp(-log((double)MAX_PERIOD) * i / half);
            double angle = timesteps[b] * frequency;
            out[b * C + i] = (float)cos(angle);
            out[b * C + half + i] = (float)sin(angle);
        }
}

#ifdef PROGRAM
// The program's layer, on the CPU and as version 3.
template <typename T>
static TimestepEmbedding<T> timestep_layer(Problem& p) {
    return {.out = p.tensor_out<T>("out"), .timesteps = p.in<int>("t"), .max_period = MAX_PERIOD};
}
#endif

#ifdef __CUDACC__
// ---- 1, 2: a thread an output -----------------------------------------------------------------------------
// out (B, C), timesteps (B). The two versions are one kernel, whose Angle is float or double.

template <typename Angle>
__global__ void timestep_kernel1(float* out, const int* timesteps, int B, int C) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;  // the place in out (B, C)
    int half = C / 2;
    int b = n / C;
    int i = n % half;
    if (b >= B) return;

    Angle t = (Angle)timesteps[b];
    Angle frequency = exp((Angle)-log((Angle)MAX_PERIOD) * i / half);
    Angle angle = t * frequency;
    bool is_cosine = n % C < half;
    out[n] = (float)(is_cosine ? cos(angle) : sin(angle));
}

template <typename Angle>
static void timestep1(Problem& p) {
    int B = p.dim("B");
    int C = p.dim("C");
    launch(timestep_kernel1<Angle>, ceil_div(B * C, 64), 64, 0, p.out<float>("out"), p.in<int>("t"), B, C);
}
#endif

static Work timestep_work(const Problem& p) {
    return {0, p.dim("B") * (sizeof(int) + sizeof(floatX) * (double)p.dim("C"))};
}

// ==== mse ==================================================================================================

// Elements of a sample whose squares are added up to one number. A sample has n / PART of these, rounded up.
enum { PART = 4096 };

// The weight of a timestep's error is column 4 of the schedule, (1000, 10).
HOST_DEVICE static inline float weight_of(const float* schedule, int t) { return schedule[10 * t + 4]; }

// ---- 0: the specification ---------------------------------------------------------------------------------

// x, target and dx are (B, n), losses (B, parts) and t (B).
static void mse0(Problem& p) {
    int B = p.dim("B");
    int n = p.dim("n");
    float* losses = p.out<float>("losses");
    float* dx = p.out<float>("dx");
    const float* x = p.in<float>("x");
    const float* target = p.in<float>("target");
    const float* schedule = p.in<float>("chain");
    const int* t = p.in<int>("t");

    for (int b = 0; b < B; b++)
        for (int first = 0; first < n; first += PART) {
            int end = std::min(n, first + PART);
            double sum = 0;
            for (int k = first; k < end; k++) {
                size_t i = (size_t)b * n + k;
                float error = x[i] - target[i];
                sum += error * error;
                dx[i] = 2 * weight_of(schedule, t[b]) * error / ((float)B * n);
            }
            *losses++ = (float)sum;
        }
}

#ifdef PROGRAM
static_assert((int)PART == (int)LOSS_CHUNK);
static_assert(sizeof(ScheduleRow) == 10 * sizeof(float) && offsetof(ScheduleRow, weight) == 4 * sizeof(float));

// The program's layer, on the CPU and as version 3.
template <typename Real>
static PredictionLoss<Real> mse_layer(Problem& p) {
    BatchLoss batch = {.chunk_sums = p.out<float>("losses"),
                       .timesteps = p.in<int>("t"),
                       .schedule = (const ScheduleRow*)p.in<float>("chain"),
                       .batch_size = p.dim("B"),
                       .pixels = p.dim("n") / PIXEL,
                       .channels = PIXEL,
                       .diffusion_steps = 1000};
    return {.batch = batch,
            .out = p.in<Real>("x"),
            .target = p.in<float>("target"),
            .dout = p.out<Real>("dx")};
}
#endif

#ifdef __CUDACC__
// ---- 1: atomic additions ----------------------------------------------------------------------------------

// losses (B, parts), zero before: a thread has an element of x and target (B, n), and adds its square to the sum of the
// element's part. count is B n.
__global__ void mse_losses_kernel1(float* losses, const float* x, const float* target, size_t count, int n,
                                   int parts) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;

    size_t b = i / n;
    size_t part = i % n / PART;
    float error = x[i] - target[i];
    atomicAdd(losses + b * parts + part, error * error);
}

// dx (B, n) = 2 weight (x - target) / (B n), with x and target (B, n) and t (B). Version 2 has this kernel too.
template <typename T>
__global__ void mse_gradient_kernel1(T* dx, const T* x, const float* target, const int* t, const float* schedule,
                                     size_t count, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;

    float weight = weight_of(schedule, t[i / n]);
    float error = (float)x[i] - target[i];
    dx[i] = (T)(2.0f / (float)count * weight * error);
}

template <typename T>
static void mse_gradient1(Problem& p) {
    int n = p.dim("n");
    size_t count = (size_t)p.dim("B") * n;
    launch(mse_gradient_kernel1<T>, ceil_div(count, 256), 256, 0, p.out<T>("dx"), p.in<T>("x"),
           p.in<float>("target"), p.in<int>("t"), p.in<float>("chain"), count, n);
}

static void mse1(Problem& p) {
    int B = p.dim("B");
    int n = p.dim("n");
    int parts = ceil_div(n, PART);
    size_t count = (size_t)B * n;
    float* losses = p.out<float>("losses");
    backend_zero(losses, (size_t)B * parts * sizeof(float));
    launch(mse_losses_kernel1, ceil_div(count, 256), 256, 0, losses, p.in<float>("x"), p.in<float>("target"),
           count, n, parts);
    mse_gradient1<float>(p);
}

// ---- 2: a block a part ------------------------------------------------------------------------------------

// losses (B, parts), of x and target (B, n): a block owns a part. Each of its threads adds up every blockDim.x-th
// square, and team_sum adds up the threads' sums in a fixed order.
__global__ void mse_losses_kernel2(float* losses, const floatX* x, const float* target, int n, int parts) {
    int part = blockIdx.x % parts;
    size_t sample = (size_t)(blockIdx.x / parts) * n;
    size_t end = sample + min((part + 1) * PART, n);

    float sum = 0;
    for (size_t i = sample + part * PART + threadIdx.x; i < end; i += blockDim.x) {
        float error = (float)x[i] - target[i];
        sum += error * error;
    }
    sum = team_sum(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = sum;
}

static void mse2(Problem& p) {
    int n = p.dim("n");
    int parts = ceil_div(n, PART);
    launch(mse_losses_kernel2, p.dim("B") * parts, 256, 0, p.out<float>("losses"), p.in<floatX>("x"),
           p.in<float>("target"), n, parts);
    mse_gradient1<floatX>(p);
}
#endif

// The least traffic: x and target are read, dx is written.
static Work mse_work(const Problem& p) {
    return {0, (sizeof(float) + 2.0 * sizeof(floatX)) * p.dim("B") * (double)p.dim("n")};
}

// ==== the ladder ===========================================================================================

static std::vector<Version> versions() {
    const char* up = "upsample forward";
    const char* up_back = "upsample backward";
    const char* down = "downsample forward";
    const char* down_back = "downsample backward";
    const char* plain = "the specification";
    [[maybe_unused]] const char* on_cpu = "train_unet.cu on a CPU";
    [[maybe_unused]] const char* wide = "16 bytes a thread: the program's";
    [[maybe_unused]] const char* pairs = "sine and cosine together: the program's";
    return {
        {0, "silu forward", NCHW, CPU_FP32, plain, silu_forward0},
        {0, "silu backward", NCHW, CPU_FP32, plain, silu_backward0},
        {0, up, NCHW, CPU_FP32, plain, forward_by(repeat0, upsampling)},
        {0, up_back, NCHW, CPU_FP32, plain, backward_by(pool0, upsampling)},
        {0, down, NCHW, CPU_FP32, plain, forward_by(pool0, downsampling)},
        {0, down_back, NCHW, CPU_FP32, plain, backward_by(repeat0, downsampling)},
        {0, "timestep", NHWC, CPU_FP32, plain, timestep0},
        {0, "mse", NHWC, CPU_FP32, plain, mse0},
#ifdef PROGRAM
        {0, "silu forward", NCHW, CPU_FP32, on_cpu, [](Problem& p) { cpu::run(silu_forward<float>(p)); }},
        {0, "silu backward", NCHW, CPU_FP32, on_cpu, [](Problem& p) { cpu::run(silu_backward<float>(p)); }},
        {0, up, NHWC, CPU_FP32, on_cpu, forward_by(resample_cpu, upsampling)},
        {0, up_back, NHWC, CPU_FP32, on_cpu, backward_by(resample_cpu, upsampling)},
        {0, down, NHWC, CPU_FP32, on_cpu, forward_by(resample_cpu, downsampling)},
        {0, down_back, NHWC, CPU_FP32, on_cpu, backward_by(resample_cpu, downsampling)},
        {0, "timestep", NHWC, CPU_FP32, on_cpu, [](Problem& p) { cpu::run(timestep_layer<float>(p)); }},
        {0, "mse", NHWC, CPU_FP32, on_cpu, [](Problem& p) { cpu::run(mse_layer<float>(p)); }},
#endif
#ifdef __CUDACC__
        {1, "silu forward", NCHW, FP32, "a thread an element", silu_forward1},
        {1, "silu backward", NCHW, FP32, "a thread an element", silu_backward1},
#ifdef PROGRAM
        {2, "silu forward", NHWC, FLOATX, "half the bytes", [](Problem& p) { run(silu_forward<floatX>(p)); }},
        {2, "silu backward", NHWC, FLOATX, "half the bytes", [](Problem& p) { run(silu_backward<floatX>(p)); }},
#endif
        {3, "silu forward", NHWC, FLOATX, "16 bytes a thread", silu_forward3},
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
        {2, "mse", NHWC, FLOATX, "a block a part, gradient apart", mse2},
#ifdef PROGRAM
        {4, "silu norm", NHWC, FLOATX, "group norm, then version 3", silu_norm4},
        {5, "silu norm", NHWC, FLOATX, "within the group norm: the program's", silu_norm5},
        {3, up, NHWC, FLOATX, wide, forward_by(resample3, upsampling)},
        {3, up_back, NHWC, FLOATX, wide, backward_by(resample3, upsampling)},
        {3, down, NHWC, FLOATX, wide, forward_by(resample3, downsampling)},
        {3, down_back, NHWC, FLOATX, wide, backward_by(resample3, downsampling)},
        {3, "timestep", NHWC, FLOATX, pairs, [](Problem& p) { run(timestep_layer<floatX>(p)); }},
        {3, "mse", NHWC, FLOATX, "one pass: the program's", [](Problem& p) { run(mse_layer<floatX>(p)); }},
#endif
#endif
    };
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
