// GELU, forward and backward: out = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). The UNet does not use
// it; it shows what a chain of elementwise kernels costs.
//
//   make gelu && ./gelu          every version: against PyTorch, then timed
//   ./gelu 1                     version 1 alone
//
//   0  plain loops on the CPU
//   1  fp32, a kernel for each operation of the formula, as an array library runs it
//   2  fp32, all in one pass
//   3  bf16, all in one pass, 16 bytes a thread
//
// What the steps change: every link of the chain reads its operands from memory and writes its result back,
// so version 1 moves seven times (backward: a dozen times) the bytes that version 2 does, which has the
// intermediate values in registers. Half the element halves the rest, and 16 bytes a thread ask for it with
// few enough instructions to reach a copy's bandwidth. How tanh is computed is
// hidden behind that. (Behind a product it is not: there it is a sigmoid of two fast instructions.)
//
// Version 3 is a layer as the program has them, in dit/gelu.h: of train_dit.cu, and by torch_ops.cu an operator of
// PyTorch.
#include "common.h"

#ifdef PROGRAM
#include "dit/gelu.h"
#endif

// With u = sqrt(2 / pi) (x + 0.044715 x^3): x / 2 (1 + tanh u), and its derivative.
static const float TANH_SCALE = 0.7978845608f, TANH_CUBE = 0.044715f;
HOST_DEVICE static inline float gelu_of(float x) {
    return 0.5f * x * (1 + tanhf(TANH_SCALE * (x + TANH_CUBE * x * x * x)));
}
HOST_DEVICE static inline float gelu_slope(float x) {
    float t = tanhf(TANH_SCALE * (x + TANH_CUBE * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * TANH_SCALE * (1 + 3 * TANH_CUBE * x * x);
}

// ---- 0 ----------------------------------------------------------------------------------------------------

static void gelu_forward0(Problem& p) {
    size_t n = p.find("x").values.size();
    float* out = p.out<float>("out");
    const float* x = p.in<float>("x");
    for (size_t i = 0; i < n; i++) out[i] = gelu_of(x[i]);
}
static void gelu_backward0(Problem& p) {
    size_t n = p.find("x").values.size();
    float* dx = p.out<float>("dx");
    const float *x = p.in<float>("x"), *dout = p.in<float>("dout");
    for (size_t i = 0; i < n; i++) dx[i] = dout[i] * gelu_slope(x[i]);
}

#ifdef __CUDACC__
// ---- 1: a kernel an operation -----------------------------------------------------------------------------

enum GeluLink { GELU_PRODUCT, GELU_SCALED_SUM, GELU_TANH, GELU_AFFINE };
// out = a b, a + scale b, tanh(a), or scale a + shift
__global__ void gelu_link_kernel1(float* out, const float* a, const float* b, GeluLink link, float scale,
                                  float shift, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (link == GELU_PRODUCT) out[i] = a[i] * b[i];
    if (link == GELU_SCALED_SUM) out[i] = a[i] + scale * b[i];
    if (link == GELU_TANH) out[i] = tanhf(a[i]);
    if (link == GELU_AFFINE) out[i] = scale * a[i] + shift;
}
struct GeluChain {
    size_t n;
    void operator()(GeluLink link, float* out, const float* a, const float* b, float scale = 1,
                    float shift = 0) {
        launch(gelu_link_kernel1, ceil_div(n, 256), 256, 0, out, a, b, link, scale, shift, n);
    }
    void tangent(float* t, const float* x) {  // tanh(sqrt(2 / pi) (x + 0.044715 x^3))
        (*this)(GELU_PRODUCT, t, x, x);
        (*this)(GELU_PRODUCT, t, t, x);
        (*this)(GELU_SCALED_SUM, t, x, t, TANH_CUBE);
        (*this)(GELU_AFFINE, t, t, nullptr, TANH_SCALE);
        (*this)(GELU_TANH, t, t, nullptr);
    }
};
static void gelu_forward1(Problem& p) {
    GeluChain chain = {p.find("x").values.size()};
    const float* x = p.in<float>("x");
    float* t = p.scratch<float>("t", chain.n);
    chain.tangent(t, x);
    chain(GELU_AFFINE, t, t, nullptr, 0.5f, 0.5f);
    chain(GELU_PRODUCT, p.out<float>("out"), t, x);
}
static void gelu_backward1(Problem& p) {
    GeluChain chain = {p.find("x").values.size()};
    const float* x = p.in<float>("x");
    float *t = p.scratch<float>("t", chain.n), *slope = p.scratch<float>("slope", chain.n),
          *u = p.scratch<float>("u", chain.n);
    chain.tangent(t, x);
    chain(GELU_PRODUCT, slope, t, t);
    chain(GELU_AFFINE, slope, slope, nullptr, -0.5f * TANH_SCALE,
          0.5f * TANH_SCALE);  // sqrt(2 / pi) / 2 (1 - t^2)
    chain(GELU_PRODUCT, slope, slope, x);
    chain(GELU_PRODUCT, u, x, x);
    chain(GELU_AFFINE, u, u, nullptr, 3 * TANH_CUBE, 1);
    chain(GELU_PRODUCT, slope, slope, u);
    chain(GELU_AFFINE, t, t, nullptr, 0.5f, 0.5f);
    chain(GELU_SCALED_SUM, t, t, slope);
    chain(GELU_PRODUCT, p.out<float>("dx"), t, p.in<float>("dout"));
}

// ---- 2: one pass ------------------------------------------------------------------------------------------

__global__ void gelu_forward_kernel2(float* out, const float* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = gelu_of(x[i]);
}
static void gelu_forward2(Problem& p) {
    size_t n = p.find("x").values.size();
    launch(gelu_forward_kernel2, ceil_div(n, 256), 256, 0, p.out<float>("out"), p.in<float>("x"), n);
}
__global__ void gelu_backward_kernel2(float* dx, const float* dout, const float* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dx[i] = dout[i] * gelu_slope(x[i]);
}
static void gelu_backward2(Problem& p) {
    size_t n = p.find("x").values.size();
    launch(gelu_backward_kernel2, ceil_div(n, 256), 256, 0, p.out<float>("dx"), p.in<float>("dout"),
           p.in<float>("x"), n);
}

// ---- 3: 16 bytes a thread ---------------------------------------------------------------------------------

#ifdef PROGRAM
static void gelu_forward3(Problem& p) {
    run(GeluForward<floatX>{p.tensor_out<floatX>("out"), p.tensor_in<floatX>("x")});
}
static void gelu_backward3(Problem& p) {
    run(GeluBackward<floatX>{p.tensor_out<floatX>("dx"), p.tensor_in<floatX>("dout"), p.tensor_in<floatX>("x")});
}
#endif
#endif

static Work gelu_work(const Problem& p, int tensors) {
    return {0, (double)tensors * sizeof(floatX) * (double)p.find("x").values.size()};
}

static const Ladder gelu_ladder = {
    "gelu",
    {{"forward", {"out"}, [](const Problem& p) { return gelu_work(p, 2); }},
     {"backward", {"dx"}, [](const Problem& p) { return gelu_work(p, 3); }}},
    {
        {0, "forward", NCHW, CPU_FP32, "plain loops", gelu_forward0},
        {0, "backward", NCHW, CPU_FP32, "plain loops", gelu_backward0},
#ifdef __CUDACC__
        {1, "forward", NCHW, FP32, "a kernel an operation", gelu_forward1},
        {1, "backward", NCHW, FP32, "a kernel an operation", gelu_backward1},
        {2, "forward", NCHW, FP32, "one pass", gelu_forward2},
        {2, "backward", NCHW, FP32, "one pass", gelu_backward2},
#ifdef PROGRAM
        {3, "forward", NHWC, FLOATX, "one pass, 16 bytes a thread", gelu_forward3},
        {3, "backward", NHWC, FLOATX, "one pass, 16 bytes a thread", gelu_backward3},
#endif
#endif
    }};
LADDER_MAIN(gelu_ladder)
