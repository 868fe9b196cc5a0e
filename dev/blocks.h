// What the ladders of whole blocks share: the layers in their plainest form, the layers that fusion does away
// with, and the program's own block on a problem's tensors.
#pragma once
#include "common.h"

namespace blocks {

// What a chain of layers in bf16 is allowed: twice what PyTorch's own bf16 is off at these cases, 0.0104 at the
// most (a bias gradient of a residual block). In fp32 the usual.
static const double LIMIT = sizeof(floatX) == 2 ? 2e-2 : 0;
#ifdef __CUDACC__
static const Type OURS = FLOATX;
#else
static const Type OURS = CPU_FP32;
#endif

// ---- plain layers: fp32, NCHW -----------------------------------------------------------------------------

// element(i) for each i < n: a loop on the CPU, on the GPU a thread each. So the plain versions on either are
// the same text; there a sum over an image has one thread, and that is what makes them slow.
#ifdef __CUDACC__
template <typename Element>
__global__ void each_kernel(Element element, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) element(i);
}
#endif
template <typename Element>
static void each(const Problem& p, size_t n, Element element) {
#ifdef __CUDACC__
    if (!p.on_cpu) return launch(each_kernel<Element>, ceil_div(n, 128), 128, 0, element, n);
#else
    (void)p;
#endif
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) element(i);
}

// y (B, C + C2, T) = x (B, C, T) and x2 (B, C2, T), channel behind channel. With `apart` the other way round.
struct Concatenate {
    float *y, *x, *x2;
    int C, C2, T;
    bool apart;
    HOST_DEVICE void operator()(size_t i) const {
        size_t t = i % T, c = i / T % (C + C2), b = i / T / (C + C2);
        float* one = c < (size_t)C ? x + (b * C + c) * T + t : x2 + (b * C2 + c - C) * T + t;
        if (apart)
            *one = y[i];
        else
            y[i] = *one;
    }
};
struct Add {  // y += x
    float* y;
    const float* x;
    HOST_DEVICE void operator()(size_t i) const { y[i] += x[i]; }
};
struct AddEmbedding {  // h (B, O, T) += emb (B, O)
    float* h;
    const float* emb;
    int T;
    HOST_DEVICE void operator()(size_t i) const { h[i] += emb[i / T]; }
};
struct SumPixels {  // out (B, O) = the sums over the pixels of h (B, O, T)
    float* out;
    const float* h;
    int T;
    HOST_DEVICE void operator()(size_t i) const {
        double sum = 0;
        for (int t = 0; t < T; t++) sum += h[i * T + t];
        out[i] = (float)sum;
    }
};
struct BiasGradient {  // dbias (O) += the sums of dout (B, O, T)
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
struct Silu {  // y = x sigmoid(x)
    float* y;
    const float* x;
    HOST_DEVICE void operator()(size_t i) const { y[i] = x[i] / (1 + expf(-x[i])); }
};
struct SiluGradient {  // dx = dout times the slope at x
    float* dx;
    const float *dout, *x;
    HOST_DEVICE void operator()(size_t i) const {
        float s = 1 / (1 + expf(-x[i]));
        dx[i] = dout[i] * s * (1 + x[i] * (1 - s));
    }
};

// Group norm of x (B, C, T). mean and rstd (B, G): an element a group, which is a run of n = T C / G numbers.
struct NormStatistics {
    float *mean, *rstd;
    const float* x;
    int n;
    HOST_DEVICE void operator()(size_t i) const {
        const float* group = x + i * n;
        double sum = 0, squares = 0;
        for (int j = 0; j < n; j++) sum += group[j];
        for (int j = 0; j < n; j++) squares += (group[j] - sum / n) * (group[j] - sum / n);
        mean[i] = (float)(sum / n), rstd[i] = (float)(1 / sqrt(squares / n + NORM_EPS));
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
// sums (B, G, 2): of w dy and of w dy x^ over a group.
struct NormSums {
    float* sums;
    const float *dy, *x, *mean, *rstd, *w;
    int C, T, n;
    HOST_DEVICE void operator()(size_t i) const {
        double sum = 0, normed = 0;
        for (size_t j = i * n; j < (i + 1) * n; j++) {
            float d = w[j / T % C] * dy[j];
            sum += d, normed += d * (x[j] - mean[i]) * rstd[i];
        }
        sums[2 * i] = (float)sum, sums[2 * i + 1] = (float)normed;
    }
};
struct NormInput {  // dx = rstd (w dy - (sum w dy + x^ sum w dy x^) / n)
    float* dx;
    const float *sums, *dy, *x, *mean, *rstd, *w;
    int C, T, n;
    HOST_DEVICE void operator()(size_t i) const {
        size_t g = i / n;
        float normed = (x[i] - mean[g]) * rstd[g];
        dx[i] = rstd[g] * (w[i / T % C] * dy[i] - (sums[2 * g] + normed * sums[2 * g + 1]) / n);
    }
};
struct NormWeights {  // dw, dbias (C) += sums of dy x^ and of dy
    float *dw, *dbias;
    const float *dy, *x, *mean, *rstd;
    int B, C, T, n;
    HOST_DEVICE void operator()(size_t c) const {
        double sum = 0, normed = 0;
        for (int b = 0; b < B; b++)
            for (size_t i = (b * C + c) * T, end = i + T; i < end; i++)
                sum += dy[i], normed += dy[i] * (x[i] - mean[i / n]) * rstd[i / n];
        dw[c] += (float)normed, dbias[c] += (float)sum;
    }
};

// out (B, O, T) = w x + bias with x (B, C, T), w (O, C); and what the gradients are of that. T = 1 for rows.
struct LinearOutput {
    float* out;
    const float *x, *w, *bias;
    int C, O, T;
    HOST_DEVICE void operator()(size_t i) const {
        size_t t = i % T, o = i / T % O, b = i / T / O;
        float sum = bias[o];
        for (int c = 0; c < C; c++) sum += w[o * C + c] * x[(b * C + c) * T + t];
        out[i] = sum;
    }
};
struct LinearInput {
    float* dx;
    const float *dout, *w;
    int C, O, T;
    HOST_DEVICE void operator()(size_t i) const {
        size_t t = i % T, c = i / T % C, b = i / T / C;
        float sum = 0;
        for (int o = 0; o < O; o++) sum += w[(size_t)o * C + c] * dout[(b * O + o) * T + t];
        dx[i] = sum;
    }
};
struct LinearWeight {
    float* dw;
    const float *dout, *x;
    int B, C, O, T;
    HOST_DEVICE void operator()(size_t i) const {
        size_t c = i % C, o = i / C;
        double sum = 0;
        for (int b = 0; b < B; b++)
            for (int t = 0; t < T; t++) sum += dout[((size_t)b * O + o) * T + t] * x[(b * C + c) * T + t];
        dw[i] += (float)sum;
    }
};

// The 3x3 convolution of x (B, C, H, H) by w (O, C, 3, 3).
struct Conv3x3Output {
    float* out;
    const float *x, *w, *bias;
    int C, O, H;
    HOST_DEVICE void operator()(size_t i) const {
        int u = (int)(i % H), v = (int)(i / H % H);
        size_t o = i / H / H % O, b = i / H / H / O;
        float sum = bias[o];
        for (int c = 0; c < C; c++)
            for (int tap = 0; tap < 9; tap++) {
                int y = v + tap / 3 - 1, z = u + tap % 3 - 1;
                if (y >= 0 && y < H && z >= 0 && z < H)
                    sum += w[(o * C + c) * 9 + tap] * x[((b * C + c) * H + y) * H + z];
            }
        out[i] = sum;
    }
};
struct Conv3x3Input {
    float* dx;
    const float *dout, *w;
    int C, O, H;
    HOST_DEVICE void operator()(size_t i) const {
        int u = (int)(i % H), v = (int)(i / H % H);
        size_t c = i / H / H % C, b = i / H / H / C;
        float sum = 0;
        for (int o = 0; o < O; o++)
            for (int tap = 0; tap < 9; tap++) {
                int y = v + 1 - tap / 3, z = u + 1 - tap % 3;
                if (y >= 0 && y < H && z >= 0 && z < H)
                    sum += w[((size_t)o * C + c) * 9 + tap] * dout[((b * O + o) * H + y) * H + z];
            }
        dx[i] = sum;
    }
};
struct Conv3x3Weight {
    float* dw;
    const float *dout, *x;
    int B, C, O, H;
    HOST_DEVICE void operator()(size_t i) const {
        int tap = (int)(i % 9);
        size_t c = i / 9 % C, o = i / 9 / C;
        double sum = 0;
        for (int b = 0; b < B; b++)
            for (int v = 0; v < H; v++)
                for (int u = 0; u < H; u++) {
                    int y = v + tap / 3 - 1, z = u + tap % 3 - 1;
                    if (y >= 0 && y < H && z >= 0 && z < H)
                        sum += dout[((b * O + o) * H + v) * H + u] * x[((b * C + c) * H + y) * H + z];
                }
        dw[i] += (float)sum;
    }
};

// The plain layers in a row. Each of these is a handful of launches.
struct Plain {
    const Problem& p;
    int B, G;
    void norm(float* y, float* mean, float* rstd, const float* x, const float* w, const float* bias, int C,
              int T) {
        each(p, (size_t)B * G, NormStatistics{mean, rstd, x, C / G * T});
        norm_again(y, mean, rstd, x, w, bias, C, T);
    }
    void norm_again(float* y, const float* mean, const float* rstd, const float* x, const float* w,
                    const float* bias, int C, int T) {
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
    void linear_backward(float* dx, float* dw, float* dbias, const float* dout, const float* x,
                         const float* w, int C, int O, int T) {
        each(p, (size_t)B * C * T, LinearInput{dx, dout, w, C, O, T});
        each(p, (size_t)O * C, LinearWeight{dw, dout, x, B, C, O, T});
        each(p, O, BiasGradient{dbias, dout, B, O, T});
    }
    void conv3x3(float* out, const float* x, const float* w, const float* bias, int C, int O, int H) {
        each(p, (size_t)B * O * H * H, Conv3x3Output{out, x, w, bias, C, O, H});
    }
    void conv3x3_backward(float* dx, float* dw, float* dbias, const float* dout, const float* x,
                          const float* w, int C, int O, int H) {
        each(p, (size_t)B * C * H * H, Conv3x3Input{dx, dout, w, C, O, H});
        each(p, (size_t)O * C * 9, Conv3x3Weight{dw, dout, x, B, C, O, H});
        each(p, O, BiasGradient{dbias, dout, B, O, H * H});
    }
};

// ---- what fusion does away with: NHWC, 16 bytes a thread ----------------------------------------------------

#ifdef __CUDACC__
// element(i) for each i < n / VEC.
template <typename Element>
static void each_vector(size_t n, Element element) {
    assert(n % VEC == 0);
    launch(each_kernel<Element>, ceil_div(n / VEC, 256), 256, 0, element, n / VEC);
}

struct ConcatenateVectors {  // y (M, C + C2) = x (M, C) and x2 (M, C2) side by side; `apart`: the way back
    floatX *y, *x, *x2;
    int C, C2;
    bool apart;
    __device__ void operator()(size_t i) const {
        int C = this->C / VEC, C2 = this->C2 / VEC;
        size_t m = i / (C + C2), c = i % (C + C2);
        uint4* one = c < (size_t)C ? (uint4*)x + m * C + c : (uint4*)x2 + m * C2 + c - C;
        if (apart)
            *one = ((uint4*)y)[i];
        else
            ((uint4*)y)[i] = *one;
    }
};
struct AddVectors {  // y += x
    floatX* y;
    const floatX* x;
    __device__ void operator()(size_t i) const {
        Unpacked sum = unpack(((const uint4*)y)[i]);
        sum += unpack(((const uint4*)x)[i]);
        ((uint4*)y)[i] = pack(sum);
    }
};
struct AddEmbeddingVectors {  // h (B, T, O) += emb (B, O)
    floatX* h;
    const floatX* emb;
    int T, O;
    __device__ void operator()(size_t i) const {
        size_t b = i / (O / VEC) / T, o = i % (O / VEC);
        Unpacked sum = unpack(((const uint4*)h)[i]);
        sum += unpack(((const uint4*)emb)[b * (O / VEC) + o]);
        ((uint4*)h)[i] = pack(sum);
    }
};
struct SiluVectors {
    floatX* y;
    const floatX* x;
    __device__ void operator()(size_t i) const {
        Unpacked value = unpack(((const uint4*)x)[i]);
        for (int e = 0; e < VEC; e++) value[e] *= sigmoid(value[e]);
        ((uint4*)y)[i] = pack(value);
    }
};
struct SiluBackwardVectors {
    floatX* dx;
    const floatX *dout, *x;
    __device__ void operator()(size_t i) const {
        Unpacked value = unpack(((const uint4*)x)[i]), d = unpack(((const uint4*)dout)[i]);
        for (int e = 0; e < VEC; e++) d[e] *= silu_gradient(value[e]);
        ((uint4*)dx)[i] = pack(d);
    }
};
struct NormVectors {  // y = x normed again, without the SiLU; x (B, T, C)
    floatX* y;
    Norm norm;
    __device__ void operator()(size_t i) const {
        const Tensor& x = norm.x.first;
        int c = (int)(i % (x.C / VEC)) * VEC, b = (int)(i / (x.C / VEC) / x.T());
        Unpacked value = unpack(((const uint4*)x.data)[i]);
        for (int e = 0; e < VEC; e++) {
            ScaleShift half = norm.half_scale_shift[(size_t)b * x.C + c + e];
            value[e] = value[e] * half.scale + half.shift;
        }
        ((uint4*)y)[i] = pack(value);
    }
};

// Layer `name` of the block as a pass takes it: forward its weight and bias, backward its weight and both
// gradients.
template <typename Layer>
static Layer forward_layer(Problem& p, const std::string& name) {
    return {.w = p.in<floatX>(name + ".weight"), .bias = p.in<floatX>(name + ".bias")};
}
template <typename Layer>
static Layer backward_layer(Problem& p, const std::string& name) {
    return {.w = p.in<floatX>(name + ".weight"),
            .dw = p.out<float>("d" + name + ".weight"),
            .dbias = p.out<float>("d" + name + ".bias")};
}

// Norm `name` of x as a pass takes it, without the SiLU. What it leaves is called statistics and affine, with a
// number where the block has two norms. Forward it comes with scratch for the moments of x, backward for its
// sums.
static Norm norm_of(Problem& p, const std::string& name, Tensor x) {
    return {.x = x,
            .groups = p.dim("G"),
            .w = p.in<float>(name + ".weight"),
            .bias = p.in<float>(name + ".bias")};
}
static Norm forward_norm(Problem& p, const std::string& name, const std::string& number, Tensor x) {
    x.moments = p.scratch_sums<Moments>("moments" + number, x);
    Norm norm = norm_of(p, name, x);
    norm.statistics = (GroupStatistics*)p.out<float>("statistics" + number);
    norm.half_scale_shift = (ScaleShift*)p.out<float>("affine" + number);
    return norm;
}
static Norm backward_norm(Problem& p, const std::string& name, const std::string& number, Tensor x) {
    Norm norm = norm_of(p, name, x);
    norm.statistics = (GroupStatistics*)p.in<float>("statistics" + number);
    norm.half_scale_shift = (ScaleShift*)p.in<float>("affine" + number);
    norm.dw = p.out<float>("d" + name + ".weight"), norm.dbias = p.out<float>("d" + name + ".bias");
    norm.sums = p.scratch_sums<::NormSums>("sums" + number, x);
    return norm;
}
// The program's norm by itself: no product leaves moments or sums behind for it.
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

// A plan of one block and of what it reads: the embedding (block 0), the skip where there is one, the input.
static Plan plan_of(const Problem& p, const Config& c, BlockKind kind) {
    Plan plan = Plan();
    bool residual = kind == BLOCK_RES;
    int C2 = residual ? p.dim("C2") : 0;
    plan.training = true, plan.batch = p.dim("B");
    add_block(&plan, c, "emb", {.kind = BLOCK_EMBED, .O = embedding_width(c)});
    if (C2) add_block(&plan, c, "x2", {.kind = BLOCK_CONV_IN, .O = C2});
    add_block(&plan, c, "x", {.kind = BLOCK_CONV_IN, .O = p.dim("C")});
    plan.tensors.clear(), plan.num_decayed = 0;  // theirs
    add_block(&plan, c, "block", {.kind = kind, .O = p.dim(residual ? "O" : "C"), .skip = C2 ? 1 : -1});
    place_parameters(&plan);
    size_outputs(&plan, c);
    compute_lifetimes(&plan);
    measure_buffers(&plan, c);
    return plan;
}

// A model of that plan whose buffers are the problem's: a buffer's offset is the way there from an arena that begins
// anywhere but at null, which would only count. The parameters lie one behind the other, in the model's order; the
// file has them by PyTorch's names.
static Model model_of(Problem& p, BlockKind kind, bool backward) {
    Model m = Model();
    m.config.image_size = p.dim("H"), m.config.norm_groups = p.dim("G");
    m.config.num_head_channels = kind == BLOCK_ATTENTION ? p.dim("d") : 1;
    m.config.num_channels = kind == BLOCK_RES ? p.dim("E") / 4 : 0;  // a quarter of the embedding's width
    m.plan = plan_of(p, m.config, kind);
    std::vector<Block>& blocks = m.plan.blocks;
    Block &block = blocks.back(), &x = blocks[block.input], &embedding = blocks[0];
    Names parameters, gradients;
    std::vector<Parameter> tensors = m.plan.tensors;
    std::sort(tensors.begin(), tensors.end(),
              [](const Parameter& a, const Parameter& b) { return a.offset < b.offset; });
    for (const Parameter& tensor : tensors) {
        parameters.push_back(tensor.name.substr(tensor.name.find('.') + 1));
        gradients.push_back("d" + parameters.back());
    }
    m.weights = (floatX*)p.in<floatX>("weights", parameters);
    m.fp32_params = (float*)p.in<float>("exact weights", parameters);
    if (backward) m.dw = p.out<float>("gradients", gradients);

    m.arena = (char*)ALIGNMENT;
    auto at = [&](Buffer* buffer, const void* address) { buffer->offset = (size_t)address - (size_t)m.arena; };
    at(&x.out, p.in<floatX>("x"));
    if (kind == BLOCK_RES)
        at(&embedding.out, p.scratch<floatX>("projected", (size_t)m.plan.batch * embedding.O));
    if (block.skip >= 0) at(&blocks[block.skip].out, p.in<floatX>("x2"));
    Names stats = kind == BLOCK_RES ? Names{"statistics1", "half affine1", "statistics2", "half affine2"}
                                    : Names{"statistics", "affine", "lse"};
    const Names attention = {"qkv", "joined"};
    size_t scratch = (backward ? block.scratch_backward : block.scratch_forward).bytes;
    m.scratch = {p.scratch<char>("scratch", scratch), scratch, 0};
    if (backward) {
        m.late = {p.scratch<char>("late", block.late.bytes), block.late.bytes, 0};
        at(&block.gradient, p.in<floatX>("dout"));
        at(&x.gradient, p.out<floatX>("dx"));
        if (block.skip >= 0) at(&blocks[block.skip].gradient, p.out<floatX>("dx2"));
        if (kind == BLOCK_RES)
            at(&embedding.gradient, p.scratch<floatX>("dprojected", (size_t)m.plan.batch * embedding.O));
        at(&block.stats, p.in<float>("stats", stats));
        if (kind == BLOCK_RES)
            at(&block.hidden, p.update<floatX>("h"));  // becomes its own gradient
        else
            at(&block.hidden, p.in<floatX>("hidden", attention));
    } else {
        at(&x.moments, p.in<float>("moments of x"));  // what wrote x has left them
        if (block.skip >= 0) at(&blocks[block.skip].moments, p.in<float>("moments of x2"));
        at(&block.moments, p.scratch<char>("moments of out", block.moments.bytes));
        at(&block.out, p.out<floatX>("out"));
        if (kind == BLOCK_RES)
            at(&block.hidden, p.out<floatX>("h"));
        else
            at(&block.hidden, p.out<floatX>("hidden", attention));
        at(&block.stats, p.out<float>("stats", stats));
    }
    return m;
}

}  // namespace blocks
