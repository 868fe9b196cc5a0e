// The attention block, forward and backward: out = x + projection(attention(qkv(GN(x)))).
//
// This ladder is about the program's block, and is always built with the program.
//
//   make attention_block && ./attention_block    every version: against PyTorch, then timed
//   ./attention_block 4                          version 4 alone
//
//   1  CPU      layer after layer, the definition of each
//   2  fp32     the same on the GPU, a thread a number
//   3  bf16     layer after layer, those with arithmetic as the program has them
//   4  bf16     train_unet.cu's block
//
// Every version is given what the forward pass of the program keeps: qkv, the joined heads, the statistics of
// the norm and of the softmax. Version 4 is also given the moments of x, which whatever wrote it has left
// behind, and leaves those of out.
//
// What the steps change: version 2 writes the scores to memory and reads them back for the softmax, for the
// product with v and, backward, four times more: 3.0 ms and 12.9 for 192 channels at 16x16, B = 32, on an
// H100. Version 3 has the program's attention, which never writes them, and tensor cores for the three
// products: 43 us and 97. What version 4 fuses is around those: the sums of the norm come from whatever wrote
// x, the epilogue of the projection adds x and takes the sums for the next norm, and backward the epilogue
// behind qkv takes the norm's sums and the norm's pass adds the branch around the block: 36 us and 91. These
// are small tensors, so that what is saved is launches as much as bytes. A tenth of the floor is what is
// reached: attention itself is the longest part, and runs on mma.sync, not on Hopper's wider instruction.
#ifndef PROGRAM
#define PROGRAM
#endif
#include "blocks.h"

namespace attentionblock {  // the program has a function attention_block

using namespace blocks;

struct Shape {
    int B, C, H, T, G, d, heads;
    explicit Shape(const Problem& p)
        : B(p.dim("B")), C(p.dim("C")), H(p.dim("H")), T(H * H), G(p.dim("G")), d(p.dim("d")), heads(C / d) {}
    size_t size() const { return (size_t)B * T * C; }
    size_t rows() const { return (size_t)B * heads * T; }
};

// ---- 1, 2: the definition ---------------------------------------------------------------------------------

// qkv (B, 3 C, T): all of q, then k, then v, heads inside each. Number i of (B, heads, T, T) is of query t
// and key u of a head; q, k, v point to the head's first channel.
struct Pair {
    size_t b, head, t, u, q, k, v, joined;
    HOST_DEVICE Pair(size_t i, int T, int C, int heads)
        : b(i / T / T / heads),
          head(i / T / T % heads),
          t(i / T % T),
          u(i % T),
          q((b * 3 * C + head * (C / heads)) * T),
          k(q + (size_t)C * T),
          v(k + (size_t)C * T),
          joined((b * C + head * (C / heads)) * T) {}
};
struct Scores {  // scores = q k^T / sqrt(d)
    float* scores;
    const float* qkv;
    int T, C, heads;
    HOST_DEVICE void operator()(size_t i) const {
        Pair at(i, T, C, heads);
        float sum = 0;
        for (int j = 0; j < C / heads; j++) sum += qkv[at.q + j * T + at.t] * qkv[at.k + j * T + at.u];
        scores[i] = sum / sqrtf((float)(C / heads));
    }
};
struct Softmax {  // scores (rows, T) become probabilities; lse (rows)
    float *scores, *lse;
    int T;
    HOST_DEVICE void operator()(size_t row) const {
        float *s = scores + row * T, top = s[0], sum = 0;
        for (int u = 1; u < T; u++) top = fmaxf(top, s[u]);
        for (int u = 0; u < T; u++) sum += s[u] = expf(s[u] - top);
        for (int u = 0; u < T; u++) s[u] /= sum;
        lse[row] = top + logf(sum);
    }
};
struct Probabilities {  // scores become probabilities again
    float* scores;
    const float* lse;
    int T;
    HOST_DEVICE void operator()(size_t i) const { scores[i] = expf(scores[i] - lse[i / T]); }
};
struct Values {  // joined (B, C, T) = p v
    float* joined;
    const float *p, *qkv;
    int T, C, heads;
    HOST_DEVICE void operator()(size_t i) const {
        size_t t = i % T, c = i / T % C, b = i / T / C, head = c / (C / heads);
        const float *row = p + ((b * heads + head) * T + t) * T, *v = qkv + (b * 3 * C + 2 * C + c) * T;
        float sum = 0;
        for (int u = 0; u < T; u++) sum += row[u] * v[u];
        joined[i] = sum;
    }
};
struct ProbabilityGradient {  // dp = djoined v^T
    float* dp;
    const float *djoined, *qkv;
    int T, C, heads;
    HOST_DEVICE void operator()(size_t i) const {
        Pair at(i, T, C, heads);
        float sum = 0;
        for (int j = 0; j < C / heads; j++)
            sum += djoined[at.joined + j * T + at.t] * qkv[at.v + j * T + at.u];
        dp[i] = sum;
    }
};
struct SoftmaxBackward {  // dp (rows, T) become the gradient of q k^T
    float* dp;
    const float* p;
    int T;
    float scale;
    HOST_DEVICE void operator()(size_t row) const {
        float dot = 0;
        for (size_t i = row * T; i < (row + 1) * T; i++) dot += p[i] * dp[i];
        for (size_t i = row * T; i < (row + 1) * T; i++) dp[i] = scale * p[i] * (dp[i] - dot);
    }
};
struct QkvGradient {  // dqkv (B, 3 C, T): dq = ds k, dk = ds^T q, dv = p^T djoined
    float* dqkv;
    const float *p, *ds, *djoined, *qkv;
    int T, C, heads;
    HOST_DEVICE void operator()(size_t i) const {
        size_t t = i % T, c = i / T % C, part = i / T / C % 3, b = i / T / C / 3, head = c / (C / heads);
        size_t q = (b * 3 * C + c) * T, k = q + (size_t)C * T, joined = (b * C + c) * T;
        size_t square = (b * heads + head) * T * T;
        float sum = 0;
        for (int u = 0; u < T; u++)
            sum += part == 0   ? ds[square + t * T + u] * qkv[k + u]
                   : part == 1 ? ds[square + u * T + t] * qkv[q + u]
                               : p[square + u * T + t] * djoined[joined + u];
        dqkv[i] = sum;
    }
};

static void attention_block_forward1(Problem& p) {
    Shape s(p);
    Plain plain = {p, s.B, s.G};
    auto w = [&](const char* name) { return p.in<float>(name); };
    const float* x = p.in<float>("x");
    float *normed = p.scratch<float>("normed", s.size()), *qkv = p.out<float>("qkv"),
          *scores = p.scratch<float>("scores", s.rows() * s.T), *joined = p.out<float>("joined"),
          *out = p.out<float>("out");
    plain.norm(normed, p.out<float>("mean"), p.out<float>("rstd"), x, w("norm.weight"), w("norm.bias"), s.C,
               s.T);
    plain.linear(qkv, normed, w("qkv.weight"), w("qkv.bias"), s.C, 3 * s.C, s.T);
    each(p, s.rows() * s.T, Scores{scores, qkv, s.T, s.C, s.heads});
    each(p, s.rows(), Softmax{scores, p.out<float>("lse"), s.T});
    each(p, s.size(), Values{joined, scores, qkv, s.T, s.C, s.heads});
    plain.linear(out, joined, w("proj_out.weight"), w("proj_out.bias"), s.C, s.C, s.T);
    each(p, s.size(), Add{out, x});
}

static void attention_block_backward1(Problem& p) {
    Shape s(p);
    Plain plain = {p, s.B, s.G};
    auto w = [&](const char* name) { return p.in<float>(name); };
    auto d = [&](const char* name) { return p.sum<float>(std::string("d") + name); };
    const float *x = p.in<float>("x"), *dout = p.in<float>("dout"), *qkv = p.in<float>("qkv"),
                *joined = p.in<float>("joined"), *mean = p.in<float>("mean"), *rstd = p.in<float>("rstd");
    float *normed = p.scratch<float>("normed", s.size()), *djoined = p.scratch<float>("djoined", s.size()),
          *probabilities = p.scratch<float>("probabilities", s.rows() * s.T),
          *ds = p.scratch<float>("ds", s.rows() * s.T), *dqkv = p.scratch<float>("dqkv", 3 * s.size()),
          *dnormed = p.scratch<float>("dnormed", s.size()), *sums = p.scratch<float>("sums", 2 * s.B * s.G),
          *dx = p.out<float>("dx");
    plain.linear_backward(djoined, d("proj_out.weight"), d("proj_out.bias"), dout, joined,
                          w("proj_out.weight"), s.C, s.C, s.T);
    each(p, s.rows() * s.T, Scores{probabilities, qkv, s.T, s.C, s.heads});
    each(p, s.rows() * s.T, Probabilities{probabilities, p.in<float>("lse"), s.T});
    each(p, s.rows() * s.T, ProbabilityGradient{ds, djoined, qkv, s.T, s.C, s.heads});
    each(p, s.rows(), SoftmaxBackward{ds, probabilities, s.T, 1 / sqrtf((float)s.d)});
    each(p, 3 * s.size(), QkvGradient{dqkv, probabilities, ds, djoined, qkv, s.T, s.C, s.heads});
    plain.norm_again(normed, mean, rstd, x, w("norm.weight"), w("norm.bias"), s.C, s.T);
    plain.linear_backward(dnormed, d("qkv.weight"), d("qkv.bias"), dqkv, normed, w("qkv.weight"), s.C,
                          3 * s.C, s.T);
    plain.norm_backward(dx, d("norm.weight"), d("norm.bias"), sums, dnormed, mean, rstd, x, w("norm.weight"),
                        s.C, s.T);
    each(p, s.size(), Add{dx, dout});
}

#ifdef __CUDACC__
// ---- 3: the program's layers, nothing fused ---------------------------------------------------------------

static void attention_block_forward3(Problem& p) {
    Shape s(p);
    Tensor x = p.tensor_in<floatX>("x"), qkv = p.tensor_out<floatX>("qkv"),
           joined = p.tensor_out<floatX>("joined"), out = p.tensor_out<floatX>("out"),
           normed = p.tensor_scratch("normed", x);
    norm_alone(normed, forward_norm(p, "norm", "", x));
    conv1x1_forward(qkv, normed, forward_layer<Linear>(p, "qkv"));
    attention_forward(joined, p.out<float>("lse"), qkv, s.heads);
    conv1x1_forward(out, joined, forward_layer<Linear>(p, "proj_out"));
    each_vector(s.size(), AddVectors{out.data, x.data});
}

static void attention_block_backward3(Problem& p) {
    Shape s(p);
    Tensor x = p.tensor_in<floatX>("x"), dout = p.tensor_in<floatX>("dout"), dx = p.tensor_out<floatX>("dx"),
           qkv = p.tensor_in<floatX>("qkv"), joined = p.tensor_in<floatX>("joined"),
           normed = p.tensor_scratch("normed", x), djoined = p.tensor_scratch("djoined", joined),
           dqkv = p.tensor_scratch("dqkv", qkv), dnormed = p.tensor_scratch("dnormed", normed);
    Norm norm = backward_norm(p, "norm", "", x);
    Linear to_qkv = backward_layer<Linear>(p, "qkv"), projection = backward_layer<Linear>(p, "proj_out");
    on_side_stream_deferred([=] { conv1x1_backward_weight(projection, dout, joined); });
    conv1x1_backward_input(djoined, dout, projection);
    attention_backward(dqkv, djoined, joined, p.in<float>("lse"), qkv, s.heads);
    conv1x1_backward_input(dnormed, dqkv, to_qkv);
    norm_alone_backward(dx, normed, dnormed, norm);
    on_side_stream_deferred([=] { conv1x1_backward_weight(to_qkv, dqkv, normed); });
    each_vector(s.size(), AddVectors{dx.data, dout.data});
}
#endif

// ---- 4: the program's -------------------------------------------------------------------------------------

static void attention_block_forward4(Problem& p) {
    Model m = model_of(p, BLOCK_ATTENTION, false);
    AttentionBlock{{&m, m.plan.blocks.back(), m.plan.batch}}.forward();
}
static void attention_block_backward4(Problem& p) {
    Model m = model_of(p, BLOCK_ATTENTION, true);
    AttentionBlock{{&m, m.plan.blocks.back(), m.plan.batch}}.backward();
}

static Work work_of(const Problem& p, bool backward) {
    Shape s(p);
    double M = (double)s.B * s.T, C = s.C, weights = 4 * C * C;
    double scores = 2 * s.rows() * (double)s.T * s.d;  // operations of a product with them, of which forward
    if (!backward)                                     // has two and backward, which makes p again, five
        return {2 * M * weights + 2 * scores, sizeof(floatX) * (2 * M * C + weights)};
    return {4 * M * weights + 5 * scores,  // x, qkv, joined, dout, weights in; dx and gradients out
            sizeof(floatX) * (7 * M * C + weights) + sizeof(float) * weights};
}

}  // namespace attentionblock

static const Ladder attention_block_ladder = {
    "attention_block",
    {{"forward",
      {"out", "qkv", "joined", "mean|statistics/2", "rstd|affine/2", "lse"},
      [](const Problem& p) { return attentionblock::work_of(p, false); }},
     {"backward",
      {"dx", "dnorm.weight", "dnorm.bias", "dqkv.weight", "dqkv.bias", "dproj_out.weight", "dproj_out.bias"},
      [](const Problem& p) { return attentionblock::work_of(p, true); }}},
    []() -> std::vector<Version> {
        using namespace attentionblock;
        return {
            {1, "forward", NCHW, CPU_FP32, "the definition", attention_block_forward1},
            {1, "backward", NCHW, CPU_FP32, "the definition", attention_block_backward1},
#ifdef __CUDACC__
            {2, "forward", NCHW, FP32, "the definition, a thread a number", attention_block_forward1},
            {2, "backward", NCHW, FP32, "the definition, a thread a number", attention_block_backward1},
            {3, "forward", NHWC, FLOATX, "the program's layers, nothing fused", attention_block_forward3,
             LIMIT},
            {3, "backward", NHWC, FLOATX, "the program's layers, nothing fused", attention_block_backward3,
             LIMIT},
#endif
            {4, "forward", NHWC, OURS, "train_unet.cu", attention_block_forward4, LIMIT},
            {4, "backward", NHWC, OURS, "train_unet.cu", attention_block_backward4, LIMIT},
        };
    }()};
LADDER_MAIN(attention_block_ladder)
