// GELU, forward and backward: out = F.gelu(x, approximate="tanh"). The UNet does not use it. The ladder shows what a
// chain of elementwise kernels costs.
//
// The formula is an approximation by Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016):
//
//   u = sqrt(2 / pi) (x + 0.044715 x^3)      du/dx = sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
//   out = x / 2 (1 + tanh(u))
//   dx = dout ((1 + tanh(u)) / 2 + x / 2 (1 - tanh(u)^2) du/dx)
//
//   make gelu && ./gelu          every version: against PyTorch, then timed
//   ./gelu 1                     version 1 alone
//
//   0  plain loops on the CPU
//   1  fp32, a kernel for each operation of the formula, as an array library runs it
//   2  fp32, all in one pass
//   3  bf16, all in one pass, 16 bytes a thread
//
// What the steps change: in version 1 every kernel of the chain reads its operands from memory and writes its result
// back. That moves eight times the bytes of version 2 (backward eleven times), where the intermediate values stay in
// registers. Version 3 halves what is left, because bf16 has half the bytes. At 16 bytes a thread it also asks for them
// with so few instructions that it reaches the bandwidth of a copy. How tanh is computed is hidden behind that traffic.
// (Within a matrix product's kernel it is not hidden: dit/gelu.h computes a sigmoid of two fast instructions instead.)
//
// Version 3 is the layer of dit/gelu.h, which train_dit.cu uses, and which torch_ops.cu makes an operator of PyTorch.
#include "common.h"

#ifdef PROGRAM
#include "dit/gelu.h"
#endif

static const float SQRT_2_OVER_PI = 0.7978845608f, CUBE_WEIGHT = 0.044715f;

// tanh(u), out and d(out)/dx of one element.
HOST_DEVICE static inline float gelu_tanh(float x) {
    return tanhf(SQRT_2_OVER_PI * (x + CUBE_WEIGHT * x * x * x));
}

HOST_DEVICE static inline float gelu_of(float x) { return 0.5f * x * (1 + gelu_tanh(x)); }

HOST_DEVICE static inline float gelu_derivative(float x) {
    float t = gelu_tanh(x);
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * SQRT_2_OVER_PI * (1 + 3 * CUBE_WEIGHT * x * x);
}

// ---- 0: plain loops ---------------------------------------------------------------------------------------
// All arrays are (n): an elementwise pass need not know that they are images, (B, C, H, W).

static void gelu_forward0(Problem& p) {
    size_t n = p.find("x").values.size();
    float* out = p.out<float>("out");
    const float* x = p.in<float>("x");
    for (size_t i = 0; i < n; i++) out[i] = gelu_of(x[i]);
}

static void gelu_backward0(Problem& p) {
    size_t n = p.find("x").values.size();
    float* dx = p.out<float>("dx");
    const float* x = p.in<float>("x");
    const float* dout = p.in<float>("dout");
    for (size_t i = 0; i < n; i++) dx[i] = dout[i] * gelu_derivative(x[i]);
}

#ifdef __CUDACC__
// ---- 1: a kernel an operation -----------------------------------------------------------------------------

enum GeluLink { GELU_PRODUCT, GELU_SCALED_SUM, GELU_TANH, GELU_AFFINE };

// One operation of the formula. All arrays are (n), and `out` may be an operand.
__global__ void gelu_link_kernel1(float* out, const float* a, const float* b, GeluLink link, float scale,
                                  float shift, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;

    if (link == GELU_PRODUCT) out[i] = a[i] * b[i];
    if (link == GELU_SCALED_SUM) out[i] = a[i] + scale * b[i];
    if (link == GELU_TANH) out[i] = tanhf(a[i]);
    if (link == GELU_AFFINE) out[i] = scale * a[i] + shift;
}

// Each call is a launch: n elements make the way from memory and back.
struct GeluChain {
    size_t n;

    void launch_link(GeluLink link, float* out, const float* a, const float* b, float scale, float shift) {
        launch(gelu_link_kernel1, ceil_div(n, 256), 256, 0, out, a, b, link, scale, shift, n);
    }
    // out = a b
    void multiply(float* out, const float* a, const float* b) { launch_link(GELU_PRODUCT, out, a, b, 1, 0); }
    // out = a + scale b
    void add(float* out, const float* a, const float* b, float scale = 1) {
        launch_link(GELU_SCALED_SUM, out, a, b, scale, 0);
    }
    // out = scale a + shift
    void affine(float* out, const float* a, float scale, float shift) {
        launch_link(GELU_AFFINE, out, a, nullptr, scale, shift);
    }
    // t = tanh(u)
    void tanh_of_u(float* t, const float* x) {
        multiply(t, x, x);
        multiply(t, t, x);
        add(t, x, t, CUBE_WEIGHT);  // x + 0.044715 x^3
        affine(t, t, SQRT_2_OVER_PI, 0);
        launch_link(GELU_TANH, t, t, nullptr, 1, 0);
    }
};

static void gelu_forward1(Problem& p) {
    GeluChain chain = {p.find("x").values.size()};
    const float* x = p.in<float>("x");
    float* t = p.scratch<float>("t", chain.n);

    chain.tanh_of_u(t, x);
    chain.affine(t, t, 0.5f, 0.5f);  // (1 + tanh(u)) / 2
    chain.multiply(p.out<float>("out"), t, x);
}

static void gelu_backward1(Problem& p) {
    GeluChain chain = {p.find("x").values.size()};
    const float* x = p.in<float>("x");
    float* t = p.scratch<float>("t", chain.n);
    float* term = p.scratch<float>("term", chain.n);
    float* factor = p.scratch<float>("factor", chain.n);

    chain.tanh_of_u(t, x);

    // The derivative's second term, x / 2 (1 - tanh(u)^2) du/dx.
    chain.multiply(term, t, t);
    chain.affine(term, term, -0.5f * SQRT_2_OVER_PI, 0.5f * SQRT_2_OVER_PI);  // sqrt(2 / pi) / 2 (1 - tanh(u)^2)
    chain.multiply(term, term, x);
    chain.multiply(factor, x, x);
    chain.affine(factor, factor, 3 * CUBE_WEIGHT, 1);  // 1 + 3 * 0.044715 x^2
    chain.multiply(term, term, factor);

    chain.affine(t, t, 0.5f, 0.5f);  // the first term, (1 + tanh(u)) / 2
    chain.add(t, t, term);
    chain.multiply(p.out<float>("dx"), t, p.in<float>("dout"));
}

// ---- 2: one pass ------------------------------------------------------------------------------------------
// A thread loads its element once, computes the whole formula in registers, and stores the result. All arrays are (n).

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
    if (i < n) dx[i] = dout[i] * gelu_derivative(x[i]);
}

static void gelu_backward2(Problem& p) {
    size_t n = p.find("x").values.size();
    launch(gelu_backward_kernel2, ceil_div(n, 256), 256, 0, p.out<float>("dx"), p.in<float>("dout"),
           p.in<float>("x"), n);
}

#ifdef PROGRAM
// ---- 3: 16 bytes a thread ---------------------------------------------------------------------------------

static void gelu_forward3(Problem& p) {
    Tensor out = p.tensor_out<floatX>("out");
    Tensor x = p.tensor_in<floatX>("x");
    run(GeluForward<floatX>{out, x});
}

static void gelu_backward3(Problem& p) {
    Tensor dx = p.tensor_out<floatX>("dx");
    Tensor dout = p.tensor_in<floatX>("dout");
    Tensor x = p.tensor_in<floatX>("x");
    run(GeluBackward<floatX>{dx, dout, x});
}
#endif
#endif

// The least traffic, in the program's precision: `tensors` are read or written once each.
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
