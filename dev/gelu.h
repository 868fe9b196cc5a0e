// GELU, F.gelu(x, approximate="tanh"), as a layer written once for both builds (room 3 of train_unet.cu, which is
// included first): the last version of the ladder gelu.cu, a layer of train_dit.cu, and the operator of torch_ops.cu.
// An item is 16 bytes; on the CPU an element, so that the loop becomes vector code.
#pragma once

static const float GELU_ROOT = 0.7978845608f, GELU_CUBE = 0.044715f;

// (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3), which is sigmoid(2 u).
HOST_DEVICE static inline float gelu_gate(float x) {
    float u = GELU_ROOT * (x + GELU_CUBE * x * x * x);
#ifdef __CUDA_ARCH__
    return 0.5f + 0.5f * tanhf(u);
#else
    return sigmoid(2 * u);
#endif
}
// x (1 + tanh u) / 2, and its derivative.
HOST_DEVICE static inline float gelu(float x) { return x * gelu_gate(x); }
HOST_DEVICE static inline float gelu_gradient(float x) {
    float s = gelu_gate(x);
    return s + 2 * x * s * (1 - s) * GELU_ROOT * (1 + 3 * GELU_CUBE * x * x);
}

#ifdef __CUDACC__
template <typename T> static constexpr int GELU_ELEMENTS = 16 / sizeof(T);
#else
template <typename T> static constexpr int GELU_ELEMENTS = 1;
#endif

template <typename T> struct GeluForward {
    TensorOf<T> out, x;

    enum { N = GELU_ELEMENTS<T> };
    size_t items() const { return (x.count() + N - 1) / N; }
    HOST_DEVICE void operator()(size_t item) const {
        size_t first = item * N, count = (size_t)x.B * x.T() * x.C;
        if (N > 1 && first + N <= count) {
            ::Vector<T, N> v = load<N>(x.data + first);
            for (int k = 0; k < N; k++) v.of[k] = (T)gelu((float)v.of[k]);
            store(out.data + first, v);
        } else
            for (size_t i = first; i < first + N && i < count; i++) out.data[i] = (T)gelu((float)x.data[i]);
    }
};
template <typename T> struct GeluBackward {
    TensorOf<T> dx, dout, x;

    enum { N = GELU_ELEMENTS<T> };
    size_t items() const { return (x.count() + N - 1) / N; }
    HOST_DEVICE void operator()(size_t item) const {
        size_t first = item * N, count = (size_t)x.B * x.T() * x.C;
        if (N > 1 && first + N <= count) {
            ::Vector<T, N> v = load<N>(x.data + first), upstream = load<N>(dout.data + first);
            for (int k = 0; k < N; k++) v.of[k] = (T)((float)upstream.of[k] * gelu_gradient((float)v.of[k]));
            store(dx.data + first, v);
        } else
            for (size_t i = first; i < first + N && i < count; i++)
                dx.data[i] = (T)((float)dout.data[i] * gelu_gradient((float)x.data[i]));
    }
};
