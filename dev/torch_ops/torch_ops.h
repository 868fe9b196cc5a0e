// torch_ops.h: the interface between PyTorch and the launchers of train_unet.cu.
//
//   torch_ops.py   builds the other files, and gives every operator its gradient and the shapes of its outputs.
//   torch_ops.cpp  knows PyTorch: schemas, checks, memory and streams. It calls the functions of a Layers.
//   torch_ops.cu   knows the program: it has a Layers whose functions call the program's launchers. It is compiled up
//                  to three times, each time into a library of its own: by g++ for the CPU, in float32, and by nvcc in
//                  bfloat16 and in float32.
//
// torch_ops.cpp includes nothing of the program, and torch_ops.cu nothing of PyTorch. So each compiles in half the
// time, and without the other.
#pragma once
#include <cstddef>
#include <functional>

// Where a call runs. A launcher takes its stream from here, and its memory from nowhere else.
struct Place {
    int device = 0;          // the GPU's number
    void* stream = nullptr;  // a cudaStream_t
    int threads = 1;         // how many of a CPU's threads the call may use

    // Returns scratch, aligned to 16 bytes, which is freed when the call is over.
    std::function<void*(size_t bytes)> allocate;
};

// A tensor (B, H, W, C) of the library's type, aligned to 16 bytes. C runs fastest. Without data there is no tensor.
struct Image {
    void* data = nullptr;
    int B = 0, H = 0, W = 0, C = 0;
};

// A 3x3 convolution, with nine taps, or a 1x1 convolution, with one: out = conv(x, w) + bias + emb + residual.
struct ConvolutionCall {
    int taps = 9;
    Image out = {};              // (B, H, W, O)
    Image x = {};                // (B, H, W, C)
    const void* w = nullptr;     // (O, 3, 3, C) or (O, C)
    const void* bias = nullptr;  // (O)
    const void* emb = nullptr;   // (B, O), added to all pixels of an image, or null; only with nine taps
    Image residual = {};         // (B, H, W, O), or none
};

struct WeightGradientCall {
    int taps = 9;
    float* dw = nullptr;     // (O, 3, 3, C) or (O, C)
    float* dbias = nullptr;  // (O)
    void* demb = nullptr;    // (B, O), the sums of dout over each image's pixels, or null: not wanted
    Image dout = {};         // (B, H, W, O)
    Image x = {};            // (B, H, W, C)
};

// A group norm. Its output y becomes y (1 + scale) + shift if there is scale_shift, and then SiLU of that if `silu`.
struct NormCall {
    Image out = {};   // (B, H, W, C); in backward it is dx
    Image x = {};     // (B, H, W, C)
    Image dout = {};  // (B, H, W, C), of backward
    int groups = 1;
    bool silu = false;
    const float* w = nullptr;           // (C)
    const float* bias = nullptr;        // (C)
    const void* scale_shift = nullptr;  // (B, 2C), C scales and then C shifts, or null
    float* record = nullptr;            // (2, B, C, 2), which forward writes and backward reads
    float* dw = nullptr;                // (C)
    float* dbias = nullptr;             // (C)
    void* dscale_shift = nullptr;       // (B, 2C), or null
};

// Self-attention over the pixels of each image.
struct AttentionCall {
    Image out = {};        // (B, H, W, C)
    Image qkv = {};        // (B, H, W, 3C): all of q, then k, then v, each with the heads one after the other
    float* lse = nullptr;  // (B, heads, H W), the log-sum-exp of each row of scores, for backward
    int heads = 1;
    Image dqkv = {};  // (B, H, W, 3C), of backward
    Image dout = {};  // (B, H, W, C), of backward
};

// A parameter w with its moments m and v and its gradient, n elements each, all in the same order.
struct Update {
    float *w, *m, *v;
    const float* gradient;
    size_t n;
};

struct AdamWCall {
    const Update* updates;  // (count)
    int count;
    float* step;  // on the device: the number of updates so far, to which the call adds one
    float lr, beta1, beta2, eps, weight_decay;
};

// What the layers of a library take.
struct Limits {
    int convolution_channels;  // channels are a multiple of this
    int norm_channels;         // channels are a multiple of this
    int resample_channels;     // channels are a multiple of this
    int head_multiple;         // the channels of an attention head are a multiple of this,
    int head_most;             // and at most this
    int attention_pixels;      // the most that an image may have
};

// The layers for one device and type. What a launcher refuses, and what the device reports, is thrown as a
// std::runtime_error with a sentence. The next call works all the same.
struct Layers {
    virtual Limits limits(const Place& place) const = 0;

    virtual void convolution(const Place& place, const ConvolutionCall& call) const = 0;
    // Writes call.x, the gradient of the input, from call.out, the gradient of the output.
    virtual void input_gradient(const Place& place, const ConvolutionCall& call) const = 0;
    virtual void weight_gradient(const Place& place, const WeightGradientCall& call) const = 0;

    virtual void group_norm(const Place& place, const NormCall& call) const = 0;
    virtual void group_norm_backward(const Place& place, const NormCall& call) const = 0;

    // The 3x3 convolution `conv` of the norm's output, which is computed within the convolution where possible.
    // norm.out and conv.x are not used.
    virtual void norm_conv3x3(const Place& place, const NormCall& norm, const ConvolutionCall& conv) const = 0;
    // Writes norm.out, the gradient of norm.x, from conv.out, the gradient of the output; and the gradients of all
    // parameters. The images of `weights` are not used.
    virtual void norm_conv3x3_backward(const Place& place, const NormCall& norm, const ConvolutionCall& conv,
                                       const WeightGradientCall& weights) const = 0;

    virtual void attention(const Place& place, const AttentionCall& call) const = 0;
    virtual void attention_backward(const Place& place, const AttentionCall& call) const = 0;

    // Where out is larger than x, each pixel of x is repeated 2x2 times; where it is smaller, 2x2 pixels are added up.
    // The result is multiplied by `factor`.
    virtual void resample(const Place& place, Image out, Image x, float factor) const = 0;

    virtual void timestep_embedding(const Place& place, Image out, const int* t, int max_period, double unit) const = 0;

    virtual void gelu(const Place& place, Image out, Image x) const = 0;
    virtual void gelu_backward(const Place& place, Image dx, Image dout, Image x) const = 0;

    virtual void adamw(const Place& place, const AdamWCall& call) const = 0;

protected:
    ~Layers() = default;
};

extern "C" const Layers* unet_layers_cpu();
extern "C" const Layers* unet_layers_bf16();
extern "C" const Layers* unet_layers_fp32();
