// torch_ops.h: what stands between PyTorch and the launchers of train_unet.cu.
//
//   torch_ops.py   builds the rest, and gives every operator its gradient and the shapes of its outputs
//   torch_ops.cpp  knows PyTorch: schemas, checks, memory, streams. It calls the functions of a Layers.
//   torch_ops.cu   knows the program: a Layers that calls its launchers. It is compiled up to three times: for the
//                  CPU (float32), and by nvcc in bfloat16 and in float32, each in a library of its own.
//
// Neither of the two includes the other's headers, so that each compiles in half the time and without the other.
#pragma once
#include <cstddef>
#include <functional>

// Where a call runs. A launcher takes its stream from here and its memory from nowhere else.
struct Place {
    int device = 0;                               // number of the GPU
    void* stream = nullptr;                       // cudaStream_t
    int threads = 1;                              // those of a CPU that the call may use
    std::function<void*(size_t bytes)> allocate;  // scratch until the call is over, a multiple of 16
};

// A tensor (B, H, W, C) of the library's type, C running fastest; without data there is none. Aligned to 16 bytes.
struct Image {
    void* data = nullptr;
    int B = 0, H = 0, W = 0, C = 0;
};

// A 3x3 convolution (taps 9) or a 1x1 one (taps 1); w (O, 3, 3, C) or (O, C), bias (O).
struct ProductCall {
    int taps = 9;
    Image out, x;
    const void *w = nullptr, *bias = nullptr;
    const void* emb = nullptr;  // (B, O), added to all pixels of an image; with nine taps only
    Image residual = {};        // of out's shape, added
};
struct WeightGradientCall {
    int taps = 9;
    float *dw = nullptr, *dbias = nullptr;
    void* demb = nullptr;  // (B, O): dout's sums over each image; null: not wanted
    Image dout, x;
};
// y = group norm of x, y (1 + scale) + shift, SiLU; the latter two where wanted. In backward `out` is dx.
struct NormCall {
    Image out, x, dout = {};
    int groups = 1;
    bool silu = false;
    const float *w = nullptr, *bias = nullptr;  // (C)
    const void* scale_shift = nullptr;          // (B, 2C)
    float* record = nullptr;                    // (2, B, C, 2), from forward to backward
    float *dw = nullptr, *dbias = nullptr;
    void* dscale_shift = nullptr;
};
// qkv (B, H, W, 3C): all of q, then k, then v, heads inside each; lse (B, heads, H W).
struct AttentionCall {
    Image out, qkv;
    float* lse = nullptr;
    int heads = 1;
    Image dqkv = {}, dout = {};  // backward
};
// A parameter with its moments, n elements each, in one order.
struct Update {
    float *w, *m, *v;
    const float* gradient;
    size_t n;
};
struct AdamWCall {
    const Update* updates;
    int count;
    float* step;  // on the device: updates so far, and one more afterwards
    float lr, beta1, beta2, eps, weight_decay;
};

// What a library takes.
struct Limits {
    int product_channels, norm_channels;  // multiples of these
    int resample_channels;
    int head_multiple, head_most;  // channels of attention's heads
    int attention_pixels;          // of an image, at most
};

// The layers for a device and a type. What a launcher refuses, and what the device reports, is thrown as a
// std::runtime_error with a sentence; the next call works.
struct Layers {
    virtual Limits limits(const Place& place) const = 0;
    virtual void product_forward(const Place& place, const ProductCall& call) const = 0;
    virtual void input_gradient(const Place& place,
                                const ProductCall& call) const = 0;  // call.x from call.out
    virtual void weight_gradient(const Place& place, const WeightGradientCall& call) const = 0;
    virtual void group_norm(const Place& place, const NormCall& call) const = 0;
    virtual void group_norm_backward(const Place& place, const NormCall& call) const = 0;
    // conv3x3 of SiLU of a norm, which is computed on the way where that can be; call.x does not count. Backward:
    // dx in norm.out, from call.out.
    virtual void norm_product(const Place& place, const NormCall& norm, const ProductCall& call) const = 0;
    virtual void norm_product_backward(const Place& place, const NormCall& norm, const ProductCall& call,
                                       const WeightGradientCall& weights) const = 0;
    virtual void attention(const Place& place, const AttentionCall& call) const = 0;
    virtual void attention_backward(const Place& place, const AttentionCall& call) const = 0;
    // Nearest neighbours or sums of 2x2 pixels, as out is the larger or x, times `factor`.
    virtual void resample(const Place& place, Image out, Image x, float factor) const = 0;
    virtual void timestep_embedding(const Place& place, Image out, const int* t, int max_period,
                                    double unit) const = 0;
    virtual void gelu(const Place& place, Image out, Image x) const = 0;
    virtual void gelu_backward(const Place& place, Image dx, Image dout, Image x) const = 0;
    virtual void adamw(const Place& place, const AdamWCall& call) const = 0;

protected:
    ~Layers() = default;
};

extern "C" const Layers* unet_layers_cpu();
extern "C" const Layers* unet_layers_bf16();
extern "C" const Layers* unet_layers_fp32();
