// GELU, F.gelu(x, approximate="tanh"), as a layer written once for both builds (section 3 of train_unet.cu, which is
// included first): a layer of train_dit.cu, the last version of the ladder ../gelu.cu, and the operator of ../torch_ops/torch_ops.cu.
// An item is 16 bytes; on the CPU an element, so that the loop becomes vector code.
#pragma once

static const float GELU_ROOT = 0.7978845608f, GELU_CUBE = 0.044715f;

// (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3), which is sigmoid(2 u).
HOST_DEVICE static inline float gelu_gate(float x) {
    return sigmoid(x * (2 * GELU_ROOT + 2 * GELU_ROOT * GELU_CUBE * (x * x)));
}
// x (1 + tanh u) / 2, and its derivative.
HOST_DEVICE static inline float gelu(float x) { return x * gelu_gate(x); }
HOST_DEVICE static inline float gelu_gradient(float x) {
    float s = gelu_gate(x);
    return s + x * s * (1 - s) * (2 * GELU_ROOT + 6 * GELU_ROOT * GELU_CUBE * (x * x));
}

#ifdef __CUDACC__
template <typename T> static constexpr int GELU_ELEMENTS = 16 / sizeof(T);
#else
template <typename T> static constexpr int GELU_ELEMENTS = 1;
#endif

// On Hopper both can follow a product of large_products.h, whose kernel calls extra() and finish() itself.
template <typename T> struct GeluForward {
    TensorOf<T> out, x;

    enum { N = GELU_ELEMENTS<T>, OVERWRITES = false };
    struct Extra {};
    HOST_DEVICE Extra extra(size_t) const { return {}; }
    HOST_DEVICE void finish(size_t first, ::Vector<T, N> values, Extra) const {
        for (int k = 0; k < N; k++) values[k] = (T)gelu((float)values[k]);
        store(out.data + first, values);
    }
    size_t items() const { return (x.count() + N - 1) / N; }
    HOST_DEVICE void operator()(size_t item) const {
        size_t first = item * N, count = (size_t)x.B * x.T() * x.C;
        if (N == 1 || first + N <= count) return finish(first, load<N>(x.data + first), {});
        for (size_t i = first; i < first + N && i < count; i++) out.data[i] = (T)gelu((float)x.data[i]);
    }
};
// AGAIN: what forward wrote is made once more, for who did not keep it.
template <typename T, bool AGAIN = false> struct GeluBackward {
    TensorOf<T> dx, dout, x, again = {};

    enum { N = GELU_ELEMENTS<T>, OVERWRITES = true };
    typedef ::Vector<T, N> Extra;
    HOST_DEVICE Extra extra(size_t first) const { return load<N>(x.data + first); }
    HOST_DEVICE void finish(size_t first, ::Vector<T, N> upstream, Extra values) const {
        for (int k = 0; k < N; k++)
            upstream[k] = (T)((float)upstream[k] * gelu_gradient((float)values[k]));
        store(dx.data + first, upstream);
        for (int k = 0; k < N; k++) values[k] = (T)gelu((float)values[k]);
        if (AGAIN) store(again.data + first, values);
    }
    size_t items() const { return (x.count() + N - 1) / N; }
    HOST_DEVICE void operator()(size_t item) const {
        size_t first = item * N, count = (size_t)x.B * x.T() * x.C;
        if (N == 1 || first + N <= count) return finish(first, load<N>(dout.data + first), extra(first));
        for (size_t i = first; i < first + N && i < count; i++) {
            float value = (float)x.data[i];
            dx.data[i] = (T)((float)dout.data[i] * gelu_gradient(value));
            if (AGAIN) again.data[i] = (T)gelu(value);
        }
    }
};
