// What the ladders of the 3x3 and the 1x1 convolution share: a version is a plain function of its tensors, and
// forward(), input_gradient() and weight_gradient() make of it what the harness calls. The harness allocates the
// tensors, and converts them to the version's layout and type. Shape is the ladder's own, made by
// Shape::of(problem). A version of the weight gradient adds to dw.
#pragma once
#include "common.h"

template <typename T, typename Shape>
using ForwardFunction = void (*)(Problem&, T* out, const T* x, const T* w, const T* bias, Shape);

template <typename T, typename Shape>
using InputGradientFunction = void (*)(Problem&, T* dx, const T* dout, const T* w, Shape);

template <typename T, typename Shape>
using WeightGradientFunction = void (*)(Problem&, float* dw, const T* dout, const T* x, Shape);

template <typename T, typename Shape>
static std::function<void(Problem&)> forward(ForwardFunction<T, Shape> f) {
    return [f](Problem& p) {
        f(p, p.out<T>("out"), p.in<T>("x"), p.in<T>("w"), p.in<T>("bias"), Shape::of(p));
    };
}

template <typename T, typename Shape>
static std::function<void(Problem&)> input_gradient(InputGradientFunction<T, Shape> f) {
    return [f](Problem& p) {
        f(p, p.out<T>("dx"), p.in<T>("dout"), p.in<T>("w"), Shape::of(p));
    };
}

template <typename T, typename Shape>
static std::function<void(Problem&)> weight_gradient(WeightGradientFunction<T, Shape> f) {
    return [f](Problem& p) {
        f(p, p.sum<float>("dw"), p.in<T>("dout"), p.in<T>("x"), Shape::of(p));
    };
}

#ifdef __CUDACC__
// to (n) += the sum over all parts of from (parts, n).
__global__ void add_parts_kernel(float* to, const float* from, int parts, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;

    float sum = 0;
#pragma unroll 8
    for (int part = 0; part < parts; part++) sum += from[part * n + i];
    to[i] += sum;
}

static void add_parts(float* to, const float* from, int parts, size_t n) {
    launch(add_parts_kernel, ceil_div(n, 128), 128, 0, to, from, parts, n);
}
#endif
