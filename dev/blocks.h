// What the ladders of whole blocks share: the layers in their plainest form, the elementwise layers that fusion does
// away with, and the program's own block on a problem's tensors.
#pragma once
#include "common.h"

namespace blocks {

// The error that is allowed of a chain of layers. In bf16 it is twice that of PyTorch's own bf16 in these cases, which
// is at most 0.0104, of a bias gradient of a residual block. In fp32 it is the usual.
static const double LIMIT = sizeof(floatX) == 2 ? 2e-2 : 0;
#ifdef __CUDACC__
static const Type OURS = FLOATX;
#else
static const Type OURS = CPU_FP32;
#endif

// ---- plain layers: fp32, NCHW -----------------------------------------------------------------------------

// Calls element(i) for each i < n: in a loop on the CPU, in a thread each on the GPU. So the plain versions are the
// same text on both. On the GPU they are slow, because even a sum over an image is the work of one thread.
#ifdef __CUDACC__
template <typename Element>
__global__ void each_kernel(Element element, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) element(i);
}
#endif

template <typename Element>
static void each([[maybe_unused]] const Problem& p, size_t n, Element element) {
#ifdef __CUDACC__
    if (!p.on_cpu) return launch(each_kernel<Element>, ceil_div(n, 128), 128, 0, element, n);
#endif
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) element(i);
}

// Where number i of the concatenation (B, C + C2, T) is: in x (B, C, T) or in x2 (B, C2, T).
template <typename Element>
HOST_DEVICE static inline Element* in_either(Element* x, Element* x2, int C, int C2, int T, size_t i) {
    size_t t = i % T;
    size_t c = i / T % (C + C2);
    size_t b = i / T / (C + C2);
    if (c < (size_t)C) return x + (b * C + c) * T + t;
    return x2 + (b * C2 + c - C) * T + t;
}

// y (B, C + C2, T) = torch.cat([x, x2], 1)
struct Concatenate {
    float* y;
    const float *x, *x2;
    int C, C2, T;
    HOST_DEVICE void operator()(size_t i) const { y[i] = *in_either(x, x2, C, C2, T, i); }
};

// x (B, C, T), x2 (B, C2, T) = y.split([C, C2], 1)
struct Split {
    float *x, *x2;
    const float* y;
    int C, C2, T;
    HOST_DEVICE void operator()(size_t i) const { *in_either(x, x2, C, C2, T, i) = y[i]; }
};

// y += x
struct Add {
    float* y;
    const float* x;
    HOST_DEVICE void operator()(size_t i) const { y[i] += x[i]; }
};

// h (B, O, T) += emb (B, O)
struct AddEmbedding {
    float* h;
    const float* emb;
    int T;
    HOST_DEVICE void operator()(size_t i) const { h[i] += emb[i / T]; }
};

// out (B, O) = the sums over the pixels of h (B, O, T)
struct SumPixels {
    float* out;
    const float* h;
    int T;
    HOST_DEVICE void operator()(size_t i) const {
        double sum = 0;
        for (int t = 0; t < T; t++) sum += h[i * T + t];
        out[i] = (float)sum;
    }
};

// dbias (O) += the sums over images and pixels of dout (B, O, T)
struct BiasGradient {
    float* dbias;
    const float* dout;
    int B, O, T;
    HOST_DEVICE void operator()(size_t o) const {
        double sum = 0;
        for (int b = 0; b < B; b++)
            for (int t = 0; t < T; t++) sum += dout[((size_t)b * O + o) * T + t];
        dbias[o] += (float)sum;
    }
};

// y = x sigmoid(x) = x / (1 + e^-x)
struct Silu {
    float* y;
    const float* x;
    HOST_DEVICE void operator()(size_t i) const { y[i] = x[i] / (1 + expf(-x[i])); }
};

// dx = dout s (1 + x (1 - s)) with s = sigmoid(x)
struct SiluGradient {
    float* dx;
    const float *dout, *x;
    HOST_DEVICE void operator()(size_t i) const {
        float s = 1 / (1 + expf(-x[i]));
        dx[i] = dout[i] * s * (1 + x[i] * (1 - s));
    }
};

// Group norm of x (B, C, T): y = w x^ + bias with x^ = (x - mean) rstd. mean and rstd are (B, G), a number for each
// group of an image. A group is C / G channels, which are n = C / G * T numbers in a row.
struct NormStatistics {
    float *mean, *rstd;
    const float* x;
    int n;
    HOST_DEVICE void operator()(size_t i) const {
        const float* group = x + i * n;
        double sum = 0;
        double squares = 0;
        for (int j = 0; j < n; j++) sum += group[j];
        for (int j = 0; j < n; j++) squares += (group[j] - sum / n) * (group[j] - sum / n);
        mean[i] = (float)(sum / n);
        rstd[i] = (float)(1 / sqrt(squares / n + NORM_EPS));
    }
};

struct NormOutput {
    float* y;
    const float *x, *mean, *rstd, *w, *bias;
    int C, T, n;
    HOST_DEVICE void operator()(size_t i) const {
        size_t c = i / T % C;
        y[i] = (x[i] - mean[i / n]) * rstd[i / n] * w[c] + bias[c];
    }
};

// sums (B, G, 2): the sums over a group of w dy and of w dy x^
struct NormSums {
    float* sums;
    const float *dy, *x, *mean, *rstd, *w;
    int C, T, n;
    HOST_DEVICE void operator()(size_t i) const {
        double sum = 0;
        double normed = 0;
        for (size_t j = i * n; j < (i + 1) * n; j++) {
            float d = w[j / T % C] * dy[j];
            sum += d;
            normed += d * (x[j] - mean[i]) * rstd[i];
        }
        sums[2 * i] = (float)sum;
        sums[2 * i + 1] = (float)normed;
    }
};

// dx = rstd (w dy - (sum of w dy + x^ sum of w dy x^) / n)
struct NormInput {
    float* dx;
    const float *sums, *dy, *x, *mean, *rstd, *w;
    int C, T, n;
    HOST_DEVICE void operator()(size_t i) const {
        size_t g = i / n;
        float normed = (x[i] - mean[g]) * rstd[g];
        dx[i] = rstd[g] * (w[i / T % C] * dy[i] - (sums[2 * g] + normed * sums[2 * g + 1]) / n);
    }
};

// dw, dbias (C) += the sums over images and pixels of dy x^ and of dy
struct NormWeights {
    float *dw, *dbias;
    const float *dy, *x, *mean, *rstd;
    int B, C, T, n;
    HOST_DEVICE void operator()(size_t c) const {
        double sum = 0;
        double normed = 0;
        for (int b = 0; b < B; b++) {
            size_t first = (b * C + c) * T;
            for (size_t i = first; i < first + T; i++) {
                sum += dy[i];
                normed += dy[i] * (x[i] - mean[i / n]) * rstd[i / n];
            }
        }
        dw[c] += (float)normed;
        dbias[c] += (float)sum;
    }
};

// The linear layer at each pixel, which is a 1x1 convolution: out (B, O, T) = w (O, C) x (B, C, T) + bias (O). For rows
// T is 1.
struct LinearOutput {
    float* out;
    const float *x, *w, *bias;
    int C, O, T;
    HOST_DEVICE void operator()(size_t i) const {
        size_t t = i % T;
        size_t o = i / T % O;
        size_t b = i / T / O;
        float sum = bias[o];
        for (int c = 0; c < C; c++) sum += w[o * C + c] * x[(b * C + c) * T + t];
        out[i] = sum;
    }
};

// dx = w^T dout
struct LinearInput {
    float* dx;
    const float *dout, *w;
    int C, O, T;
    HOST_DEVICE void operator()(size_t i) const {
        size_t t = i % T;
        size_t c = i / T % C;
        size_t b = i / T / C;
        float sum = 0;
        for (int o = 0; o < O; o++) sum += w[(size_t)o * C + c] * dout[(b * O + o) * T + t];
        dx[i] = sum;
    }
};

// dw += dout x^T, summed over images
struct LinearWeight {
    float* dw;
    const float *dout, *x;
    int B, C, O, T;
    HOST_DEVICE void operator()(size_t i) const {
        size_t c = i % C;
        size_t o = i / C;
        double sum = 0;
        for (int b = 0; b < B; b++)
            for (int t = 0; t < T; t++) sum += dout[((size_t)b * O + o) * T + t] * x[(b * C + c) * T + t];
        dw[i] += (float)sum;
    }
};

// The 3x3 convolution of x (B, C, H, H) by w (O, C, 3, 3): an output is the sum over channels and taps of w times the
// input one row above to one row below, one column to the left to one to the right. Outside the image x is zero.
struct Conv3x3Output {
    float* out;
    const float *x, *w, *bias;
    int C, O, H;
    HOST_DEVICE void operator()(size_t i) const {
        int column = (int)(i % H);
        int row = (int)(i / H % H);
        size_t o = i / H / H % O;
        size_t b = i / H / H / O;
        float sum = bias[o];
        for (int c = 0; c < C; c++) {
            for (int tap = 0; tap < 9; tap++) {
                int in_row = row + tap / 3 - 1;
                int in_column = column + tap % 3 - 1;
                if (in_row >= 0 && in_row < H && in_column >= 0 && in_column < H)
                    sum += w[(o * C + c) * 9 + tap] * x[((b * C + c) * H + in_row) * H + in_column];
            }
        }
        out[i] = sum;
    }
};

// dx is the sum over the outputs that the input was multiplied into, which lie the other way: a tap that reads from the
// row above is one of the row below.
struct Conv3x3Input {
    float* dx;
    const float *dout, *w;
    int C, O, H;
    HOST_DEVICE void operator()(size_t i) const {
        int column = (int)(i % H);
        int row = (int)(i / H % H);
        size_t c = i / H / H % C;
        size_t b = i / H / H / C;
        float sum = 0;
        for (int o = 0; o < O; o++) {
            for (int tap = 0; tap < 9; tap++) {
                int out_row = row + 1 - tap / 3;
                int out_column = column + 1 - tap % 3;
                if (out_row >= 0 && out_row < H && out_column >= 0 && out_column < H)
                    sum += w[((size_t)o * C + c) * 9 + tap] * dout[((b * O + o) * H + out_row) * H + out_column];
            }
        }
        dx[i] = sum;
    }
};

// dw += the sum over images and pixels of dout times the input that the tap reads
struct Conv3x3Weight {
    float* dw;
    const float *dout, *x;
    int B, C, O, H;
    HOST_DEVICE void operator()(size_t i) const {
        int tap = (int)(i % 9);
        size_t c = i / 9 % C;
        size_t o = i / 9 / C;
        double sum = 0;
        for (int b = 0; b < B; b++) {
            for (int row = 0; row < H; row++) {
                for (int column = 0; column < H; column++) {
                    int in_row = row + tap / 3 - 1;
                    int in_column = column + tap % 3 - 1;
                    if (in_row >= 0 && in_row < H && in_column >= 0 && in_column < H)
                        sum += dout[((b * O + o) * H + row) * H + column] *
                               x[((b * C + c) * H + in_row) * H + in_column];
                }
            }
        }
        dw[i] += (float)sum;
    }
};

// The plain layers on whole tensors: outputs first, then inputs, then sizes.
struct Plain {
    const Problem& p;
    int B, G;

    void norm(float* y, float* mean, float* rstd, const float* x, const float* w, const float* bias, int C, int T) {
        each(p, (size_t)B * G, NormStatistics{mean, rstd, x, C / G * T});
        norm_again(y, mean, rstd, x, w, bias, C, T);
    }

    // The norm where its statistics are known.
    void norm_again(float* y, const float* mean, const float* rstd, const float* x, const float* w, const float* bias,
                    int C, int T) {
        each(p, (size_t)B * C * T, NormOutput{y, x, mean, rstd, w, bias, C, T, C / G * T});
    }

    void norm_backward(float* dx, float* dw, float* dbias, float* sums, const float* dy, const float* mean,
                       const float* rstd, const float* x, const float* w, int C, int T) {
        int n = C / G * T;
        each(p, (size_t)B * G, NormSums{sums, dy, x, mean, rstd, w, C, T, n});
        each(p, (size_t)B * C * T, NormInput{dx, sums, dy, x, mean, rstd, w, C, T, n});
        each(p, C, NormWeights{dw, dbias, dy, x, mean, rstd, B, C, T, n});
    }

    void linear(float* out, const float* x, const float* w, const float* bias, int C, int O, int T) {
        each(p, (size_t)B * O * T, LinearOutput{out, x, w, bias, C, O, T});
    }

    void linear_backward(float* dx, float* dw, float* dbias, const float* dout, const float* x, const float* w, int C,
                         int O, int T) {
        each(p, (size_t)B * C * T, LinearInput{dx, dout, w, C, O, T});
        each(p, (size_t)O * C, LinearWeight{dw, dout, x, B, C, O, T});
        each(p, O, BiasGradient{dbias, dout, B, O, T});
    }

    void conv3x3(float* out, const float* x, const float* w, const float* bias, int C, int O, int H) {
        each(p, (size_t)B * O * H * H, Conv3x3Output{out, x, w, bias, C, O, H});
    }

    void conv3x3_backward(float* dx, float* dw, float* dbias, const float* dout, const float* x, const float* w, int C,
                          int O, int H) {
        each(p, (size_t)B * C * H * H, Conv3x3Input{dx, dout, w, C, O, H});
        each(p, (size_t)O * C * 9, Conv3x3Weight{dw, dout, x, B, C, O, H});
        each(p, O, BiasGradient{dbias, dout, B, O, H * H});
    }
};

// ---- what fusion does away with: NHWC, 16 bytes a thread ----------------------------------------------------

#ifdef __CUDACC__
// Calls element(i) for each vector i < n / VEC, in a thread each. A vector is 16 bytes.
template <typename Element>
static void each_vector(size_t n, Element element) {
    assert(n % VEC == 0);
    launch(each_kernel<Element>, ceil_div(n / VEC, 256), 256, 0, element, n / VEC);
}

// y (M, C + C2) = torch.cat([x, x2], 1)
struct ConcatenateVectors {
    floatX* y;
    const floatX *x, *x2;
    int C, C2;
    __device__ void operator()(size_t i) const {
        ((uint4*)y)[i] = *in_either((const uint4*)x, (const uint4*)x2, C / VEC, C2 / VEC, 1, i);
    }
};

// x (M, C), x2 (M, C2) = y.split([C, C2], 1)
struct SplitVectors {
    floatX *x, *x2;
    const floatX* y;
    int C, C2;
    __device__ void operator()(size_t i) const {
        *in_either((uint4*)x, (uint4*)x2, C / VEC, C2 / VEC, 1, i) = ((const uint4*)y)[i];
    }
};

// y += x
struct AddVectors {
    floatX* y;
    const floatX* x;
    __device__ void operator()(size_t i) const {
        Unpacked sum = unpack(((const uint4*)y)[i]);
        sum += unpack(((const uint4*)x)[i]);
        ((uint4*)y)[i] = pack(sum);
    }
};

// h (B, T, O) += emb (B, O)
struct AddEmbeddingVectors {
    floatX* h;
    const floatX* emb;
    int T, O;
    __device__ void operator()(size_t i) const {
        size_t b = i / (O / VEC) / T;
        size_t o = i % (O / VEC);
        Unpacked sum = unpack(((const uint4*)h)[i]);
        sum += unpack(((const uint4*)emb)[b * (O / VEC) + o]);
        ((uint4*)h)[i] = pack(sum);
    }
};

// y = x sigmoid(x)
struct SiluVectors {
    floatX* y;
    const floatX* x;
    __device__ void operator()(size_t i) const {
        Unpacked value = unpack(((const uint4*)x)[i]);
        for (int e = 0; e < VEC; e++) value[e] *= sigmoid(value[e]);
        ((uint4*)y)[i] = pack(value);
    }
};

// dx = dout times the derivative of SiLU at x
struct SiluBackwardVectors {
    floatX* dx;
    const floatX *dout, *x;
    __device__ void operator()(size_t i) const {
        Unpacked value = unpack(((const uint4*)x)[i]);
        Unpacked d = unpack(((const uint4*)dout)[i]);
        for (int e = 0; e < VEC; e++) d[e] *= silu_gradient(value[e]);
        ((uint4*)dx)[i] = pack(d);
    }
};

// y (B, T, C) = x normed again, without SiLU, with the scale and shift that forward has left
struct NormVectors {
    floatX* y;
    Norm norm;
    __device__ void operator()(size_t i) const {
        const Tensor& x = norm.x.first;
        int c = (int)(i % (x.C / VEC)) * VEC;
        int b = (int)(i / (x.C / VEC) / x.T());
        Unpacked value = unpack(((const uint4*)x.data)[i]);
        for (int e = 0; e < VEC; e++) {
            ScaleShift affine = norm.half_scale_shift[(size_t)b * x.C + c + e];  // not halved, as there is no SiLU
            value[e] = value[e] * affine.scale + affine.shift;
        }
        ((uint4*)y)[i] = pack(value);
    }
};

// The parameters of layer `name` as forward takes them: weight and bias.
template <typename Layer>
static Layer forward_layer(Problem& p, const std::string& name) {
    return {.w = p.in<floatX>(name + ".weight"), .bias = p.in<floatX>(name + ".bias")};
}

// The same for backward: the weight, and both gradients.
template <typename Layer>
static Layer backward_layer(Problem& p, const std::string& name) {
    return {.w = p.in<floatX>(name + ".weight"),
            .dw = p.out<float>("d" + name + ".weight"),
            .dbias = p.out<float>("d" + name + ".bias")};
}

static Norm norm_of(Problem& p, const std::string& name, Tensor x) {
    return {.x = x,
            .groups = p.dim("G"),
            .w = p.in<float>(name + ".weight"),
            .bias = p.in<float>(name + ".bias")};
}

// Norm `name` of x, without SiLU, as forward takes it: with scratch for the moments of x. What it leaves to backward is
// called "statistics" and "affine", followed by `number` where the block has two norms.
static Norm forward_norm(Problem& p, const std::string& name, const std::string& number, Tensor x) {
    x.moments = p.scratch_sums<Moments>("moments" + number, x);
    Norm norm = norm_of(p, name, x);
    norm.statistics = (GroupStatistics*)p.out<float>("statistics" + number);
    norm.half_scale_shift = (ScaleShift*)p.out<float>("affine" + number);
    return norm;
}

// The same for backward: with scratch for its sums.
static Norm backward_norm(Problem& p, const std::string& name, const std::string& number, Tensor x) {
    Norm norm = norm_of(p, name, x);
    norm.statistics = (GroupStatistics*)p.in<float>("statistics" + number);
    norm.half_scale_shift = (ScaleShift*)p.in<float>("affine" + number);
    norm.dw = p.out<float>("d" + name + ".weight");
    norm.dbias = p.out<float>("d" + name + ".bias");
    norm.sums = p.scratch_sums<::NormSums>("sums" + number, x);
    return norm;
}

// The program's norm by itself. It takes the moments of x, or in backward the sums, in a pass of its own, because no
// convolution or product has left them.
static void norm_alone(Tensor out, const Norm& norm) {
    channel_moments(norm.x.first);
    groupnorm_forward(out, norm);
}

static void norm_alone_backward(Tensor dx, Tensor normed, Tensor dy, const Norm& norm) {
    groupnorm_backward_sums(dy, dy, norm);
    groupnorm_backward(dx, normed, dy, norm);
}
#endif

// ---- the program's block ----------------------------------------------------------------------------------

// A plan of one block and of the blocks whose outputs it reads: the embedding (block 0), the skip where there is one,
// and the input.
static Plan plan_of(const Problem& p, const Config& c, BlockKind kind) {
    bool residual = kind == BLOCK_RES;
    int C2 = residual ? p.dim("C2") : 0;
    int O = p.dim(residual ? "O" : "C");
    int skip = C2 ? 1 : -1;

    Plan plan = Plan();
    plan.training = true;
    plan.batch = p.dim("B");
    add_block(&plan, c, "emb", {.kind = BLOCK_EMBED, .O = embedding_width(c)});
    if (C2) add_block(&plan, c, "x2", {.kind = BLOCK_CONV_IN, .O = C2});
    add_block(&plan, c, "x", {.kind = BLOCK_CONV_IN, .O = p.dim("C")});
    plan.tensors.clear();  // the parameters of these blocks, which are not run
    plan.num_decayed = 0;
    add_block(&plan, c, "block", {.kind = kind, .O = O, .skip = skip});

    place_parameters(&plan);
    size_outputs(&plan, c);
    compute_lifetimes(&plan);
    measure_buffers(&plan, c);
    return plan;
}

// The names of the block's parameters as PyTorch has them, in the order in which the model lays them out in memory.
static Names parameter_names(const Plan& plan) {
    std::vector<Parameter> tensors = plan.tensors;
    std::sort(tensors.begin(), tensors.end(),
              [](const Parameter& a, const Parameter& b) { return a.offset < b.offset; });
    Names names;
    for (const Parameter& tensor : tensors) names.push_back(tensor.name.substr(tensor.name.find('.') + 1));
    return names;
}

// Lets a buffer of the model's arena be memory of the problem. The model knows a buffer by its offset from where the
// arena begins, which may be the distance to any memory.
static void place(const Model* m, Buffer* buffer, const void* memory) {
    buffer->offset = (size_t)memory - (size_t)m->arena;
}

// The names of what lies in a block's buffer `stats`, in the model's order.
static Names kept_stats(BlockKind kind) {
    if (kind == BLOCK_RES) return {"statistics1", "half affine1", "statistics2", "half affine2"};
    return {"statistics", "affine", "lse"};
}

// The buffers that only forward reads and writes, or that it leaves to backward.
static void place_forward(Problem& p, Model* m, BlockKind kind) {
    std::vector<Block>& blocks = m->plan.blocks;
    Block& block = blocks.back();
    Block& x = blocks[block.input];
    place(m, &x.moments, p.in<float>("moments of x"));  // what wrote x has left them
    if (block.skip >= 0) place(m, &blocks[block.skip].moments, p.in<float>("moments of x2"));

    place(m, &block.out, p.out<floatX>("out"));
    place(m, &block.moments, p.scratch<char>("moments of out", block.moments.bytes));
    if (kind == BLOCK_RES)
        place(m, &block.hidden, p.out<floatX>("h"));
    else
        place(m, &block.hidden, p.out<floatX>("hidden", {"qkv", "joined"}));
    place(m, &block.stats, p.out<float>("stats", kept_stats(kind)));
}

// The buffers of backward: gradients, and what forward has left.
static void place_backward(Problem& p, Model* m, BlockKind kind) {
    std::vector<Block>& blocks = m->plan.blocks;
    Block& block = blocks.back();
    Block& x = blocks[block.input];
    place(m, &block.gradient, p.in<floatX>("dout"));
    if (kind == BLOCK_RES)
        place(m, &block.hidden, p.update<floatX>("h"));  // becomes its own gradient
    else
        place(m, &block.hidden, p.in<floatX>("hidden", {"qkv", "joined"}));
    place(m, &block.stats, p.in<float>("stats", kept_stats(kind)));

    place(m, &x.gradient, p.out<floatX>("dx"));
    if (block.skip >= 0) place(m, &blocks[block.skip].gradient, p.out<floatX>("dx2"));
    if (kind == BLOCK_RES) {
        size_t count = (size_t)m->plan.batch * blocks[0].O;  // (B, O)
        place(m, &blocks[0].gradient, p.scratch<floatX>("dprojected", count));
    }
    m->late = {p.scratch<char>("late", block.late.bytes), block.late.bytes, 0};
}

// A model of that plan whose buffers and parameters are the problem's tensors. Its arena must not begin at null,
// because an arena there only counts what is taken from it. Any other address will do, as nothing lies in the arena
// itself.
static Model model_of(Problem& p, BlockKind kind, bool backward) {
    Model m = Model();
    m.config.image_size = p.dim("H");
    m.config.norm_groups = p.dim("G");
    m.config.num_head_channels = kind == BLOCK_ATTENTION ? p.dim("d") : 1;
    m.config.num_channels = kind == BLOCK_RES ? p.dim("E") / 4 : 0;  // a quarter of the embedding's width
    m.plan = plan_of(p, m.config, kind);
    m.arena = (char*)ALIGNMENT;

    Names parameters = parameter_names(m.plan);
    Names gradients;
    for (const std::string& name : parameters) gradients.push_back("d" + name);
    m.weights = (floatX*)p.in<floatX>("weights", parameters);
    m.fp32_params = (float*)p.in<float>("exact weights", parameters);
    if (backward) m.dw = p.out<float>("gradients", gradients);

    std::vector<Block>& blocks = m.plan.blocks;
    Block& block = blocks.back();
    place(&m, &blocks[block.input].out, p.in<floatX>("x"));
    if (block.skip >= 0) place(&m, &blocks[block.skip].out, p.in<floatX>("x2"));
    if (kind == BLOCK_RES) {
        size_t count = (size_t)m.plan.batch * blocks[0].O;  // (B, O)
        place(&m, &blocks[0].out, p.scratch<floatX>("projected", count));
    }

    size_t scratch = (backward ? block.scratch_backward : block.scratch_forward).bytes;
    m.scratch = {p.scratch<char>("scratch", scratch), scratch, 0};

    if (backward)
        place_backward(p, &m, kind);
    else
        place_forward(p, &m, kind);
    return m;
}

}  // namespace blocks
