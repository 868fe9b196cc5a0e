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

// Both can be done behind a product, see large_products.h: `finish` has 16 bytes of its outputs, at.first being their place.
struct GeluPlace {
    size_t first;
};
template <typename T> struct GeluForward {
    TensorOf<T> out, x;

    enum { N = GELU_ELEMENTS<T>, OVERWRITES = false };
    struct Extra {};
    HOST_DEVICE Extra extra(const auto&) const { return {}; }
    HOST_DEVICE void finish(const auto& at, ::Vector<T, N> values, Extra) const {
        for (int k = 0; k < N; k++) values.of[k] = (T)gelu((float)values.of[k]);
        store(out.data + at.first, values);
    }
    size_t items() const { return (x.count() + N - 1) / N; }
    HOST_DEVICE void operator()(size_t item) const {
        size_t first = item * N, count = (size_t)x.B * x.T() * x.C;
        if (N > 1 && first + N <= count) finish(GeluPlace{first}, load<N>(x.data + first), {});
        else
            for (size_t i = first; i < first + N && i < count; i++) out.data[i] = (T)gelu((float)x.data[i]);
    }
};
// AGAIN: what forward wrote is made once more, for who did not keep it.
template <typename T, bool AGAIN = false> struct GeluBackward {
    TensorOf<T> dx, dout, x, again = {};

    enum { N = GELU_ELEMENTS<T>, OVERWRITES = true };
    typedef ::Vector<T, N> Extra;
    HOST_DEVICE Extra extra(const auto& at) const { return load<N>(x.data + at.first); }
    HOST_DEVICE void finish(const auto& at, ::Vector<T, N> upstream, Extra values) const {
        for (int k = 0; k < N; k++)
            upstream.of[k] = (T)((float)upstream.of[k] * gelu_gradient((float)values.of[k]));
        store(dx.data + at.first, upstream);
        for (int k = 0; k < N; k++) values.of[k] = (T)gelu((float)values.of[k]);
        if (AGAIN) store(again.data + at.first, values);
    }
    size_t items() const { return (x.count() + N - 1) / N; }
    HOST_DEVICE void operator()(size_t item) const {
        size_t first = item * N, count = (size_t)x.B * x.T() * x.C;
        GeluPlace at = {first};
        if (N > 1 && first + N <= count) return finish(at, load<N>(dout.data + first), extra(at));
        for (size_t i = first; i < first + N && i < count; i++) {
            float value = (float)x.data[i];
            dx.data[i] = (T)((float)dout.data[i] * gelu_gradient(value));
            if (AGAIN) again.data[i] = (T)gelu(value);
        }
    }
};
