// GELU, F.gelu(x, approximate="tanh"), as a layer written once for both builds (see section 3 of train_unet.cu, which
// is included first). Three files use it: train_dit.cu, the ladder ../gelu.cu as its last version, and
// ../torch_ops/torch_ops.cu as an operator.
//
// gelu(x) = x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3): Hendrycks and Gimpel, "Gaussian Error Linear
// Units" (2016). Because (1 + tanh u) / 2 = sigmoid(2 u), it is computed as x sigmoid(2 u).
#pragma once

static const float GELU_ROOT = 0.7978845608f;  // sqrt(2 / pi)
static const float GELU_CUBE = 0.044715f;

// sigmoid(2 u)
HOST_DEVICE static inline float gelu_gate(float x) {
    return sigmoid(x * (2 * GELU_ROOT + 2 * GELU_ROOT * GELU_CUBE * (x * x)));
}

HOST_DEVICE static inline float gelu(float x) { return x * gelu_gate(x); }

// The derivative of x s with s = sigmoid(2 u): s + x s (1 - s) times the derivative of 2 u.
HOST_DEVICE static inline float gelu_gradient(float x) {
    float s = gelu_gate(x);
    return s + x * s * (1 - s) * (2 * GELU_ROOT + 6 * GELU_ROOT * GELU_CUBE * (x * x));
}

// An item of these layers is 16 bytes. On the CPU it is one element, so that the loop over items becomes vector code.
#ifdef __CUDACC__
template <typename T> static constexpr int GELU_ELEMENTS = 16 / sizeof(T);
#else
template <typename T> static constexpr int GELU_ELEMENTS = 1;
#endif

// On Hopper both layers can follow a product of large_products.h, whose kernel calls extra() and finish() itself:
// see Nothing there. The last item may have fewer than N elements; it is done one element at a time.

// out = gelu(x)
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
        size_t first = item * N;
        size_t count = x.count();
        if (N == 1 || first + N <= count) {
            finish(first, load<N>(x.data + first), {});
            return;
        }
        for (size_t i = first; i < first + N && i < count; i++) out.data[i] = (T)gelu((float)x.data[i]);
    }
};

// dx = dout times the derivative of gelu at x. With AGAIN it also writes gelu(x) to `again`, for a network that did not
// keep what forward wrote.
template <typename T, bool AGAIN = false> struct GeluBackward {
    TensorOf<T> dx, dout, x, again = {};

    enum { N = GELU_ELEMENTS<T>, OVERWRITES = true };

    typedef ::Vector<T, N> Extra;  // elements of x
    HOST_DEVICE Extra extra(size_t first) const { return load<N>(x.data + first); }

    HOST_DEVICE void finish(size_t first, ::Vector<T, N> gradient, Extra values) const {
        for (int k = 0; k < N; k++) gradient[k] = (T)((float)gradient[k] * gelu_gradient((float)values[k]));
        store(dx.data + first, gradient);

        if (AGAIN) {
            for (int k = 0; k < N; k++) values[k] = (T)gelu((float)values[k]);
            store(again.data + first, values);
        }
    }

    size_t items() const { return (x.count() + N - 1) / N; }
    HOST_DEVICE void operator()(size_t item) const {
        size_t first = item * N;
        size_t count = x.count();
        if (N == 1 || first + N <= count) {
            finish(first, load<N>(dout.data + first), extra(first));
            return;
        }
        for (size_t i = first; i < first + N && i < count; i++) {
            float value = (float)x.data[i];
            dx.data[i] = (T)((float)dout.data[i] * gelu_gradient(value));
            if (AGAIN) again.data[i] = (T)gelu(value);
        }
    }
};
