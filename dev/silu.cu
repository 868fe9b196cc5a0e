// SiLU, forward and backward: out = x sigmoid(x).
//
//   make silu && ./silu          every version: against PyTorch, then timed
//   ./silu 3                     version 3 alone
//
//   0  the program's CPU function: the specification
//   1  fp32, a thread an element
//   2  bf16, a thread an element: half the bytes (the program's own, which only the embedding uses)
//   3  bf16, a thread 16 bytes: fewer and wider loads
//   4  behind a group norm: the norm's kernel, then version 3
//   5  behind a group norm: within the norm's kernel, as the program has it
//
// What the steps change: an elementwise function does next to no arithmetic, so its time is its traffic.
// Version 2 halves that against version 1, version 3 needs an eighth of the instructions to ask for it. The
// real step is the last: the tensor is in registers anyway when the group norm before it writes it, and there
// a sigmoid costs nothing. Version 4 is what version 5 replaces, and the difference between the two is a
// whole SiLU.
#include "common.h"

enum { SILU_GROUPS = 32 };

// ---- 0 ----------------------------------------------------------------------------------------------------

// All elements in a row: SiLU does not ask for their places.
template <typename T>
static TensorOf<T> silu_row(const Problem& p, const T* data) {
    return {(T*)data, 1, 1, 1, (int)p.find("x").values.size()};
}
template <typename T>
static SiluForward<T> silu_forward(Problem& p) {
    return {.out = silu_row(p, p.out<T>("out")), .x = silu_row(p, p.in<T>("x"))};
}
template <typename T>
static SiluBackward<T> silu_backward(Problem& p) {
    return {.dx = silu_row(p, p.out<T>("dx")),
            .dout = silu_row(p, p.in<T>("dout")),
            .x = silu_row(p, p.in<T>("x"))};
}
static void silu_forward0(Problem& p) { cpu::run(silu_forward<float>(p)); }
static void silu_backward0(Problem& p) { cpu::run(silu_backward<float>(p)); }

#ifdef __CUDACC__
// ---- 1 ----------------------------------------------------------------------------------------------------

__global__ void silu_forward_kernel1(float* out, const float* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] / (1.0f + expf(-x[i]));
}
static void silu_forward1(Problem& p) {
    size_t n = p.find("x").values.size();
    launch(silu_forward_kernel1, ceil_div(n, 256), 256, 0, p.out<float>("out"), p.in<float>("x"), n);
}
__global__ void silu_backward_kernel1(float* dx, const float* dout, const float* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float s = 1.0f / (1.0f + expf(-x[i]));
    dx[i] = dout[i] * s * (1.0f + x[i] * (1.0f - s));
}
static void silu_backward1(Problem& p) {
    size_t n = p.find("x").values.size();
    launch(silu_backward_kernel1, ceil_div(n, 256), 256, 0, p.out<float>("dx"), p.in<float>("dout"),
           p.in<float>("x"), n);
}

// ---- 2: the program's -------------------------------------------------------------------------------------

static void silu_forward2(Problem& p) { run(silu_forward<floatX>(p)); }
static void silu_backward2(Problem& p) { run(silu_backward<floatX>(p)); }

// ---- 3 ----------------------------------------------------------------------------------------------------

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
    launch_silu_forward3(p.out<floatX>("out"), p.in<floatX>("x"), p.find("x").values.size());
}
__global__ void silu_backward_kernel3(floatX* dx, const floatX* dout, const floatX* x, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    Unpacked value = unpack(x + i), upstream = unpack(dout + i);
    for (int k = 0; k < VEC; k++) upstream[k] *= silu_gradient(value[k]);
    *(uint4*)(dx + i) = pack(upstream);
}
static void silu_backward3(Problem& p) {
    size_t n = p.find("x").values.size();
    assert(n % VEC == 0);
    launch(silu_backward_kernel3, ceil_div(n, 256 * VEC), 256, 0, p.out<floatX>("dx"), p.in<floatX>("dout"),
           p.in<floatX>("x"), n);
}

// ---- 4, 5: behind a group norm ----------------------------------------------------------------------------

// The program's group norm, the moments of x given, with or without the SiLU.
static void silu_normalise(Problem& p, floatX* out, bool silu) {
    Tensor x = p.tensor_in<floatX>("x");
    x.moments = (Moments*)p.in<float>("moments of x");
    Norm norm = {.x = x,
                 .groups = SILU_GROUPS,
                 .silu = silu,
                 .w = p.in<float>("w"),
                 .bias = p.in<float>("bias"),
                 .statistics = (GroupStatistics*)p.out<float>("statistics"),
                 .half_scale_shift = (ScaleShift*)p.out<float>(silu ? "half affine" : "affine")};
    groupnorm_forward(p.shaped("x", out), norm);
}
static void silu_forward4(Problem& p) {
    size_t n = p.find("x").values.size();
    floatX* between = p.out<floatX>("normed");  // where the norm leaves its output, SiLU in place
    silu_normalise(p, between, false);
    launch_silu_forward3(between, between, n);
}
static void silu_forward5(Problem& p) { silu_normalise(p, p.out<floatX>("normed"), true); }
#endif

static Work silu_work(const Problem& p, int tensors) {
    return {0, (double)tensors * sizeof(floatX) * (double)p.find("x").values.size()};
}

static const Ladder silu_ladder = {
    "silu",
    {{"forward", {"out"}, [](const Problem& p) { return silu_work(p, 2); }},
     {"backward", {"dx"}, [](const Problem& p) { return silu_work(p, 3); }},
     {"norm",
      {"normed", "statistics/2", "affine/2|half affine/2"},
      [](const Problem& p) { return silu_work(p, 2); }}},
    {
        {0, "forward", NCHW, CPU_FP32, "the specification", silu_forward0},
        {0, "backward", NCHW, CPU_FP32, "the specification", silu_backward0},
#ifdef __CUDACC__
        {1, "forward", NCHW, FP32, "a thread an element", silu_forward1},
        {1, "backward", NCHW, FP32, "a thread an element", silu_backward1},
        {2, "forward", NHWC, FLOATX, "half the bytes", silu_forward2},
        {2, "backward", NHWC, FLOATX, "half the bytes", silu_backward2},
        {3, "forward", NHWC, FLOATX, "16 bytes a thread", silu_forward3},
        {3, "backward", NHWC, FLOATX, "16 bytes a thread", silu_backward3},
        {4, "norm", NHWC, FLOATX, "group norm, then version 3", silu_forward4},
        {5, "norm", NHWC, FLOATX, "within the group norm: the program's", silu_forward5},
#endif
    }};
LADDER_MAIN(silu_ladder)
