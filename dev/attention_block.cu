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
// What the steps change: the times are those of forward and backward for 192 channels at 16x16, B = 32, on an
// H100. Version 2 writes the scores to memory. It reads them back for the softmax and for the product with v,
// and backward four times more: 3.0 ms and 12.9. Version 3 has the program's attention, which never writes
// them, and tensor cores for all products: 43 us and 97. Version 4 fuses what lies around those. Whatever wrote
// x has left the sums of the norm, and the epilogue of the projection adds x and takes the sums for the next
// norm. Backward, the epilogue of qkv's input gradient takes the norm's sums, and the norm's pass adds the
// branch around the block: 36 us and 91. These tensors are small, so that fewer launches save as much as fewer
// bytes do. A tenth of the floor is reached: attention itself is the longest part, and runs on mma.sync, not on
// Hopper's wider instruction.
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
    size_t size() const { return (size_t)B * T * C; }      // of x
    size_t rows() const { return (size_t)B * heads * T; }  // of the scores, T in each
};

// ---- 1, 2: the definition ---------------------------------------------------------------------------------

// qkv (B, 3 C, T) has all of q, then all of k, then all of v. Of the C channels of each, and of those of joined
// (B, C, T), a head has d = C / heads, one head behind the other.

// What belongs to number i of the scores (B, heads, T, T).
struct Pair {
    size_t t, u;     // its query and its key
    size_t q, k, v;  // where the head's rows begin in qkv: (d, T) each
    size_t joined;   // where they begin in joined
    HOST_DEVICE Pair(size_t i, int T, int C, int heads) {
        size_t b = i / T / T / heads;
        size_t head = i / T / T % heads;
        int d = C / heads;
        t = i / T % T;
        u = i % T;
        q = (b * 3 * C + head * d) * T;
        k = q + (size_t)C * T;
        v = k + (size_t)C * T;
        joined = (b * C + head * d) * T;
    }
};

struct Scores {  // scores (B, heads, T, T) = q k^T / sqrt(d)
    float* scores;
    const float* qkv;
    int T, C, heads;
    HOST_DEVICE void operator()(size_t i) const {
        Pair at(i, T, C, heads);
        int d = C / heads;
        float sum = 0;
        for (int j = 0; j < d; j++) sum += qkv[at.q + j * T + at.t] * qkv[at.k + j * T + at.u];
        scores[i] = sum / sqrtf((float)d);
    }
};

struct Softmax {  // scores (rows, T) become probabilities; lse (rows)
    float* scores;
    float* lse;
    int T;
    HOST_DEVICE void operator()(size_t row) const {
        float* s = scores + row * T;
        float maximum = s[0];
        for (int u = 1; u < T; u++) maximum = fmaxf(maximum, s[u]);

        float sum = 0;
        for (int u = 0; u < T; u++) {
            s[u] = expf(s[u] - maximum);
            sum += s[u];
        }
        for (int u = 0; u < T; u++) s[u] /= sum;
        lse[row] = maximum + logf(sum);
    }
};

struct Probabilities {  // scores (rows, T) become probabilities again, by the lse that forward has kept
    float* scores;
    const float* lse;
    int T;
    HOST_DEVICE void operator()(size_t i) const { scores[i] = expf(scores[i] - lse[i / T]); }
};

struct Values {  // joined (B, C, T) = p v
    float* joined;
    const float* p;  // (B, heads, T, T)
    const float* qkv;
    int T, C, heads;
    HOST_DEVICE void operator()(size_t i) const {
        size_t t = i % T;
        size_t c = i / T % C;
        size_t b = i / T / C;
        size_t head = c / (C / heads);
        const float* row = p + ((b * heads + head) * T + t) * T;
        const float* v = qkv + (b * 3 * C + 2 * C + c) * T;
        float sum = 0;
        for (int u = 0; u < T; u++) sum += row[u] * v[u];
        joined[i] = sum;
    }
};

struct ProbabilityGradient {  // dp (B, heads, T, T) = djoined v^T
    float* dp;
    const float* djoined;
    const float* qkv;
    int T, C, heads;
    HOST_DEVICE void operator()(size_t i) const {
        Pair at(i, T, C, heads);
        int d = C / heads;
        float sum = 0;
        for (int j = 0; j < d; j++) sum += djoined[at.joined + j * T + at.t] * qkv[at.v + j * T + at.u];
        dp[i] = sum;
    }
};

struct SoftmaxBackward {  // dp (rows, T) becomes ds, the gradient of q k^T: scale p (dp - sum of p dp)
    float* dp;
    const float* p;
    int T;
    float scale;
    HOST_DEVICE void operator()(size_t row) const {
        float delta = 0;
        for (size_t i = row * T; i < (row + 1) * T; i++) delta += p[i] * dp[i];
        for (size_t i = row * T; i < (row + 1) * T; i++) dp[i] = scale * p[i] * (dp[i] - delta);
    }
};

struct QkvGradient {  // dqkv (B, 3 C, T): dq = ds k, dk = ds^T q, dv = p^T djoined
    float* dqkv;
    const float* p;   // (B, heads, T, T)
    const float* ds;  // (B, heads, T, T)
    const float* djoined;
    const float* qkv;
    int T, C, heads;
    HOST_DEVICE void operator()(size_t i) const {
        size_t t = i % T;
        size_t c = i / T % C;
        size_t part = i / T / C % 3;  // of q, k and v
        size_t b = i / T / C / 3;
        size_t head = c / (C / heads);
        size_t q = (b * 3 * C + c) * T;
        size_t k = q + (size_t)C * T;
        size_t joined = (b * C + c) * T;
        size_t square = (b * heads + head) * T * T;  // the head's p, and its ds
        float sum = 0;
        for (int u = 0; u < T; u++) {
            float product;
            if (part == 0) product = ds[square + t * T + u] * qkv[k + u];
            else if (part == 1) product = ds[square + u * T + t] * qkv[q + u];
            else product = p[square + u * T + t] * djoined[joined + u];
            sum += product;
        }
        dqkv[i] = sum;
    }
};

static void attention_block_forward1(Problem& p) {
    Shape s(p);
    Plain plain = {p, s.B, s.G};
    auto w = [&](const char* name) { return p.in<float>(name); };
    const float* x = p.in<float>("x");
    float* normed = p.scratch<float>("normed", s.size());
    float* qkv = p.out<float>("qkv");
    float* scores = p.scratch<float>("scores", s.rows() * s.T);
    float* joined = p.out<float>("joined");
    float* out = p.out<float>("out");

    plain.norm(normed, p.out<float>("mean"), p.out<float>("rstd"), x, w("norm.weight"), w("norm.bias"), s.C,
               s.T);
    plain.linear(qkv, normed, w("qkv.weight"), w("qkv.bias"), s.C, 3 * s.C, s.T);

    // joined = softmax(q k^T / sqrt(d)) v
    each(p, s.rows() * s.T, Scores{scores, qkv, s.T, s.C, s.heads});
    each(p, s.rows(), Softmax{scores, p.out<float>("lse"), s.T});
    each(p, s.size(), Values{joined, scores, qkv, s.T, s.C, s.heads});

    // out = x + projection(joined)
    plain.linear(out, joined, w("proj_out.weight"), w("proj_out.bias"), s.C, s.C, s.T);
    each(p, s.size(), Add{out, x});
}

static void attention_block_backward1(Problem& p) {
    Shape s(p);
    Plain plain = {p, s.B, s.G};
    auto w = [&](const char* name) { return p.in<float>(name); };
    auto d = [&](const char* name) { return p.sum<float>(std::string("d") + name); };
    const float* x = p.in<float>("x");
    const float* dout = p.in<float>("dout");
    const float* qkv = p.in<float>("qkv");
    const float* joined = p.in<float>("joined");
    const float* mean = p.in<float>("mean");
    const float* rstd = p.in<float>("rstd");
    float* djoined = p.scratch<float>("djoined", s.size());
    float* probabilities = p.scratch<float>("probabilities", s.rows() * s.T);
    float* ds = p.scratch<float>("ds", s.rows() * s.T);
    float* dqkv = p.scratch<float>("dqkv", 3 * s.size());
    float* normed = p.scratch<float>("normed", s.size());
    float* dnormed = p.scratch<float>("dnormed", s.size());
    float* sums = p.scratch<float>("sums", 2 * s.B * s.G);
    float* dx = p.out<float>("dx");

    // out = ... + projection(joined)
    plain.linear_backward(djoined, d("proj_out.weight"), d("proj_out.bias"), dout, joined,
                          w("proj_out.weight"), s.C, s.C, s.T);

    // joined = softmax(q k^T / sqrt(d)) v
    each(p, s.rows() * s.T, Scores{probabilities, qkv, s.T, s.C, s.heads});
    each(p, s.rows() * s.T, Probabilities{probabilities, p.in<float>("lse"), s.T});
    each(p, s.rows() * s.T, ProbabilityGradient{ds, djoined, qkv, s.T, s.C, s.heads});
    each(p, s.rows(), SoftmaxBackward{ds, probabilities, s.T, 1 / sqrtf((float)s.d)});
    each(p, 3 * s.size(), QkvGradient{dqkv, probabilities, ds, djoined, qkv, s.T, s.C, s.heads});

    // The linear layer to qkv, and the norm.
    plain.norm_again(normed, mean, rstd, x, w("norm.weight"), w("norm.bias"), s.C, s.T);
    plain.linear_backward(dnormed, d("qkv.weight"), d("qkv.bias"), dqkv, normed, w("qkv.weight"), s.C,
                          3 * s.C, s.T);
    plain.norm_backward(dx, d("norm.weight"), d("norm.bias"), sums, dnormed, mean, rstd, x, w("norm.weight"),
                        s.C, s.T);

    // out = x + ...
    each(p, s.size(), Add{dx, dout});
}

#ifdef __CUDACC__
// ---- 3: the program's layers, nothing fused ---------------------------------------------------------------

static void attention_block_forward3(Problem& p) {
    Shape s(p);
    Tensor x = p.tensor_in<floatX>("x");
    Tensor normed = p.tensor_scratch("normed", x);
    Tensor qkv = p.tensor_out<floatX>("qkv");
    Tensor joined = p.tensor_out<floatX>("joined");
    Tensor out = p.tensor_out<floatX>("out");

    norm_alone(normed, forward_norm(p, "norm", "", x));
    conv1x1_forward(qkv, normed, forward_layer<Linear>(p, "qkv"));
    attention_forward(joined, p.out<float>("lse"), qkv, s.heads);
    conv1x1_forward(out, joined, forward_layer<Linear>(p, "proj_out"));
    each_vector(s.size(), AddVectors{out.data, x.data});
}

// Weight gradients run on the side stream, beside what follows, as in the program.
static void attention_block_backward3(Problem& p) {
    Shape s(p);
    Tensor x = p.tensor_in<floatX>("x");
    Tensor qkv = p.tensor_in<floatX>("qkv");
    Tensor joined = p.tensor_in<floatX>("joined");
    Tensor dout = p.tensor_in<floatX>("dout");
    Tensor djoined = p.tensor_scratch("djoined", joined);
    Tensor dqkv = p.tensor_scratch("dqkv", qkv);
    Tensor normed = p.tensor_scratch("normed", x);
    Tensor dnormed = p.tensor_scratch("dnormed", normed);
    Tensor dx = p.tensor_out<floatX>("dx");
    Norm norm = backward_norm(p, "norm", "", x);
    Linear to_qkv = backward_layer<Linear>(p, "qkv");
    Linear projection = backward_layer<Linear>(p, "proj_out");

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
    double M = (double)s.B * s.T;
    double C = s.C;
    double weights = 4 * C * C;                        // of both linear layers
    double scores = 2 * s.rows() * (double)s.T * s.d;  // operations of one product with T x T scores
    if (!backward) {
        double operations = 2 * M * weights + 2 * scores;
        double bytes = sizeof(floatX) * (2 * M * C + weights);  // x and weights in, out out
        return {operations, bytes};
    }
    double operations = 4 * M * weights + 5 * scores;  // one of the five makes the scores again
    // x, qkv, joined, dout and weights in; dx and the gradients of the weights out
    double bytes = sizeof(floatX) * (7 * M * C + weights) + sizeof(float) * weights;
    return {operations, bytes};
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
