// The residual block, forward and backward: h = conv1(SiLU(GN([x, x2]))) + linear(emb) per channel, out =
// conv2(SiLU(GN(h))) + [x, x2], through a 1x1 convolution where the width changes. emb comes with its SiLU.
//
// This ladder is about the program's block, and is always built with the program.
//
//   make resblock && ./resblock          every version: against PyTorch, then timed
//   ./resblock 4                         version 4 alone
//
//   1  CPU      layer after layer, the definition of each
//   2  fp32     the same on the GPU, a thread a number
//   3  bf16     layer after layer: the program's convolutions, products and norms, and a pass for each thing between
//   4  bf16     train_unet.cu's block
//
// Every version is given what the forward pass of the program keeps: h and the statistics of the norms. Backward
// computes the normed tensors again. Version 4 is also given the moments of x and x2, which whatever wrote them has
// left behind, and leaves those of out. The projection of the embedding is in its time, although the program makes
// those of all blocks in one product.
//
// What the steps change: the figures are for 128 + 64 to 64 channels at 64x64, B = 32, on an H100. Version 2 is what
// the definition costs: 20 ms forward and 145 backward. The weight gradients are the greatest part, because a thread
// sums over all pixels. Version 3 has the program's products, and takes 0.29 ms and 0.67. Everything between them is
// a pass over memory of its own, as in a framework: the concatenation, the sums of a norm, the norm, its SiLU, the
// addition of the embedding, and that of the skip.
//
// Version 4 lets the products do that on the side. The norm reads x and x2 where they lie, and applies the SiLU. The
// epilogue of a product adds bias, embedding and skip, and takes the sums of the norm that follows. Backward, the
// epilogue of an input gradient multiplies it by the SiLU's derivative, and takes the sums of the norm before. What
// is left between two convolutions is one pass forward and one backward: 0.16 ms and 0.42.
//
// So fusion alone makes this block 1.7 times as fast forward and 1.6 times backward. At 8x8, where the block is bound
// by its launches, it is 1.5 and 1.4 times. PyTorch's eager kernels take 6.0 and 3.7 times as long as version 4.
#ifndef PROGRAM
#define PROGRAM
#endif
#include "blocks.h"

namespace resblock {

using namespace blocks;

// PyTorch's names of the layers are
//   in_layers.0, in_layers.2      norm1, conv1
//   emb_layers.1                  the projection of the embedding
//   out_layers.0, out_layers.3    norm2, conv2
//   skip_connection               skip, a 1x1 convolution where the width changes

struct Shape {
    int B, C, C2;  // images; channels of x and of x2 (0: there is none)
    int K, O;      // channels of both together, and of the output
    int H, T;      // height and width; pixels
    int E, G;      // width of the embedding; groups of a norm
    bool changes_width;

    explicit Shape(const Problem& p) {
        B = p.dim("B");
        C = p.dim("C");
        C2 = p.dim("C2");
        K = C + C2;
        O = p.dim("O");
        H = p.dim("H");
        T = H * H;
        E = p.dim("E");
        G = p.dim("G");
        changes_width = K != O;
    }

    size_t in() const { return (size_t)B * T * K; }
    size_t out() const { return (size_t)B * T * O; }
};

// ---- 1, 2: the definition ---------------------------------------------------------------------------------
// The equations as they stand, a call for each layer. Both versions are this text: on the CPU a call is a loop over its
// output's elements, on the GPU a launch with a thread for each of them.

// x (B, C, T) and x2 (B, C2, T) as one tensor (B, K, T)
static const float* joined1(Problem& p, const Shape& s) {
    const float* x = p.in<float>("x");
    if (!s.C2) return x;
    const float* x2 = p.in<float>("x2");
    float* joined = p.scratch<float>("joined", s.in());
    each(p, s.in(), Concatenate{joined, x, x2, s.C, s.C2, s.T});
    return joined;
}

static void resblock_forward1(Problem& p) {
    Shape s(p);
    Plain plain = {p, s.B, s.G};
    auto w = [&](const char* name) { return p.in<float>(name); };
    const float* x = joined1(p, s);
    float* normed1 = p.scratch<float>("normed1", s.in());
    float* active1 = p.scratch<float>("active1", s.in());
    float* projected = p.scratch<float>("projected", (size_t)s.B * s.O);
    float* h = p.out<float>("h");
    float* normed2 = p.scratch<float>("normed2", s.out());
    float* active2 = p.scratch<float>("active2", s.out());
    float* skip = p.scratch<float>("skip", s.out());
    float* out = p.out<float>("out");

    // h = conv1(SiLU(norm1(x))) + linear(emb)
    plain.norm(normed1, p.out<float>("mean1"), p.out<float>("rstd1"), x, w("in_layers.0.weight"), w("in_layers.0.bias"),
               s.K, s.T);
    each(p, s.in(), Silu{active1, normed1});
    plain.conv3x3(h, active1, w("in_layers.2.weight"), w("in_layers.2.bias"), s.K, s.O, s.H);
    plain.linear(projected, p.in<float>("emb"), w("emb_layers.1.weight"), w("emb_layers.1.bias"), s.E, s.O, 1);
    each(p, s.out(), AddEmbedding{h, projected, s.T});

    // out = conv2(SiLU(norm2(h))) + skip(x)
    plain.norm(normed2, p.out<float>("mean2"), p.out<float>("rstd2"), h, w("out_layers.0.weight"),
               w("out_layers.0.bias"), s.O, s.T);
    each(p, s.out(), Silu{active2, normed2});
    plain.conv3x3(out, active2, w("out_layers.3.weight"), w("out_layers.3.bias"), s.O, s.O, s.H);
    if (s.changes_width)
        plain.linear(skip, x, w("skip_connection.weight"), w("skip_connection.bias"), s.K, s.O, s.T);
    each(p, s.out(), Add{out, s.changes_width ? skip : x});
}

static void resblock_backward1(Problem& p) {
    Shape s(p);
    Plain plain = {p, s.B, s.G};
    auto w = [&](const char* name) { return p.in<float>(name); };
    auto d = [&](const char* name) { return p.sum<float>(std::string("d") + name); };
    const float* x = joined1(p, s);
    const float* h = p.in<float>("h");
    const float* dout = p.in<float>("dout");
    const float* mean1 = p.in<float>("mean1");
    const float* rstd1 = p.in<float>("rstd1");
    const float* mean2 = p.in<float>("mean2");
    const float* rstd2 = p.in<float>("rstd2");
    float* normed2 = p.scratch<float>("normed2", s.out());
    float* active2 = p.scratch<float>("active2", s.out());
    float* dactive2 = p.scratch<float>("dactive2", s.out());
    float* dnormed2 = p.scratch<float>("dnormed2", s.out());
    float* dh = p.scratch<float>("dh", s.out());
    float* dprojected = p.scratch<float>("dprojected", s.B * s.O);
    float* demb = p.scratch<float>("demb of this block", s.B * s.E);
    float* normed1 = p.scratch<float>("normed1", s.in());
    float* active1 = p.scratch<float>("active1", s.in());
    float* dactive1 = p.scratch<float>("dactive1", s.in());
    float* dnormed1 = p.scratch<float>("dnormed1", s.in());
    float* dskip = p.scratch<float>("dskip", s.in());
    float* sums = p.scratch<float>("sums", 2 * s.B * s.G);
    float* dx = s.C2 ? p.scratch<float>("dx and dx2", s.in()) : p.out<float>("dx");

    // out = conv2(SiLU(norm2(h)))
    plain.norm_again(normed2, mean2, rstd2, h, w("out_layers.0.weight"), w("out_layers.0.bias"), s.O, s.T);
    each(p, s.out(), Silu{active2, normed2});
    plain.conv3x3_backward(dactive2, d("out_layers.3.weight"), d("out_layers.3.bias"), dout, active2,
                           w("out_layers.3.weight"), s.O, s.O, s.H);
    each(p, s.out(), SiluGradient{dnormed2, dactive2, normed2});
    plain.norm_backward(dh, d("out_layers.0.weight"), d("out_layers.0.bias"), sums, dnormed2, mean2, rstd2, h,
                        w("out_layers.0.weight"), s.O, s.T);

    // h = ... + linear(emb)
    each(p, s.B * s.O, SumPixels{dprojected, dh, s.T});
    plain.linear_backward(demb, d("emb_layers.1.weight"), d("emb_layers.1.bias"), dprojected, p.in<float>("emb"),
                          w("emb_layers.1.weight"), s.E, s.O, 1);
    each(p, s.B * s.E, Add{p.sum<float>("demb"), demb});  // other blocks add theirs

    // h = conv1(SiLU(norm1(x)))
    plain.norm_again(normed1, mean1, rstd1, x, w("in_layers.0.weight"), w("in_layers.0.bias"), s.K, s.T);
    each(p, s.in(), Silu{active1, normed1});
    plain.conv3x3_backward(dactive1, d("in_layers.2.weight"), d("in_layers.2.bias"), dh, active1,
                           w("in_layers.2.weight"), s.K, s.O, s.H);
    each(p, s.in(), SiluGradient{dnormed1, dactive1, normed1});
    plain.norm_backward(dx, d("in_layers.0.weight"), d("in_layers.0.bias"), sums, dnormed1, mean1, rstd1, x,
                        w("in_layers.0.weight"), s.K, s.T);

    // out = ... + skip(x)
    if (s.changes_width)
        plain.linear_backward(dskip, d("skip_connection.weight"), d("skip_connection.bias"), dout, x,
                              w("skip_connection.weight"), s.K, s.O, s.T);
    each(p, s.in(), Add{dx, s.changes_width ? dskip : dout});
    if (s.C2) each(p, s.in(), Split{p.out<float>("dx"), p.out<float>("dx2"), dx, s.C, s.C2, s.T});
}

#ifdef __CUDACC__
// ---- 3: the program's layers, nothing fused ---------------------------------------------------------------
// The same calls in bf16, NHWC. Convolutions and products are the program's, on the tensor cores, and so are the
// norms. All other calls read and write 16 bytes a thread, with which they are bound by memory.

// x (B, H, H, C) and x2 (B, H, H, C2) as one tensor (B, H, H, K)
static Tensor joined3(Problem& p, const Shape& s) {
    Tensor x = p.tensor_in<floatX>("x");
    if (!s.C2) return x;
    Tensor x2 = p.tensor_in<floatX>("x2");
    Tensor joined = p.tensor_scratch("joined", x.with_channels(s.K));
    each_vector(s.in(), ConcatenateVectors{joined.data, x.data, x2.data, s.C, s.C2});
    return joined;
}

static void resblock_forward3(Problem& p) {
    Shape s(p);
    Tensor x = joined3(p, s);
    Tensor emb = p.tensor_in<floatX>("emb");
    Tensor h = p.tensor_out<floatX>("h");
    Tensor out = p.tensor_out<floatX>("out");
    Tensor normed1 = p.tensor_scratch("normed1", x);
    Tensor active1 = p.tensor_scratch("active1", x);
    Tensor projected = p.tensor_scratch("projected", emb.with_channels(s.O));
    Tensor normed2 = p.tensor_scratch("normed2", h);
    Tensor active2 = p.tensor_scratch("active2", h);
    Tensor skip = s.changes_width ? p.tensor_scratch("skip", out) : x;

    // h = conv1(SiLU(norm1(x))) + linear(emb)
    norm_alone(normed1, forward_norm(p, "in_layers.0", "1", x));
    each_vector(s.in(), SiluVectors{active1.data, normed1.data});
    conv3x3_forward(h, active1, forward_layer<Conv>(p, "in_layers.2"));
    conv1x1_forward(projected, emb, forward_layer<Linear>(p, "emb_layers.1"));
    each_vector(s.out(), AddEmbeddingVectors{h.data, projected.data, s.T, s.O});

    // out = conv2(SiLU(norm2(h))) + skip(x)
    norm_alone(normed2, forward_norm(p, "out_layers.0", "2", h));
    each_vector(s.out(), SiluVectors{active2.data, normed2.data});
    conv3x3_forward(out, active2, forward_layer<Conv>(p, "out_layers.3"));
    if (s.changes_width) conv1x1_forward(skip, x, forward_layer<Linear>(p, "skip_connection"));
    each_vector(s.out(), AddVectors{out.data, skip.data});
}

// Weight gradients run on the side stream, beside what follows, as in the program.
static void resblock_backward3(Problem& p) {
    Shape s(p);
    Tensor x = joined3(p, s);
    Tensor emb = p.tensor_in<floatX>("emb");
    Tensor h = p.tensor_in<floatX>("h");
    Tensor dout = p.tensor_in<floatX>("dout");
    Tensor normed2 = p.tensor_scratch("normed2", h);
    Tensor active2 = p.tensor_scratch("active2", h);
    Tensor dnormed2 = p.tensor_scratch("dnormed2", h);
    Tensor dh = p.tensor_scratch("dh", h);
    Tensor dprojected = p.tensor_scratch("dprojected", emb.with_channels(s.O));
    Tensor demb = p.tensor_scratch("demb of this block", emb);
    Tensor normed1 = p.tensor_scratch("normed1", x);
    Tensor active1 = p.tensor_scratch("active1", x);
    Tensor dnormed1 = p.tensor_scratch("dnormed1", x);
    Tensor dskip = s.changes_width ? p.tensor_scratch("dskip", x) : dout;
    Tensor dx = s.C2 ? p.tensor_scratch("dx and dx2", x) : p.tensor_out<floatX>("dx");
    Norm norm1 = backward_norm(p, "in_layers.0", "1", x);
    Norm norm2 = backward_norm(p, "out_layers.0", "2", h);
    Conv conv1 = backward_layer<Conv>(p, "in_layers.2");
    Conv conv2 = backward_layer<Conv>(p, "out_layers.3");
    Linear projection = backward_layer<Linear>(p, "emb_layers.1");

    // out = conv2(SiLU(norm2(h))). NormVectors computes normed2, because SiLU's gradient reads it before
    // norm_alone_backward, which writes it once more.
    each_vector(s.out(), NormVectors{normed2.data, norm2});
    each_vector(s.out(), SiluVectors{active2.data, normed2.data});
    on_side_stream_deferred([=] { conv3x3_backward_weight(conv2, dout, active2); });
    conv3x3_backward_input(dnormed2, dout, conv2);
    each_vector(s.out(), SiluBackwardVectors{dnormed2.data, dnormed2.data, normed2.data});
    norm_alone_backward(dh, normed2, dnormed2, norm2);

    // h = conv1(active1) + linear(emb). The weight gradient of conv1 also sums dh over the pixels, into dprojected.
    each_vector(s.in(), NormVectors{normed1.data, norm1});
    each_vector(s.in(), SiluVectors{active1.data, normed1.data});
    on_side_stream_deferred([=] { conv3x3_backward_weight(conv1, dh, active1, {dprojected.data, s.O}); });
    conv3x3_backward_input(dnormed1, dh, conv1);
    wait_for(newest_event);  // dprojected is written on the side stream
    on_side_stream_deferred([=] { conv1x1_backward_weight(projection, dprojected, emb); });
    conv1x1_backward_input(demb, dprojected, projection);
    each_vector(s.B * s.E, AddVectors{p.sum<floatX>("demb"), demb.data});  // other blocks add theirs

    // active1 = SiLU(norm1(x))
    each_vector(s.in(), SiluBackwardVectors{dnormed1.data, dnormed1.data, normed1.data});
    norm_alone_backward(dx, normed1, dnormed1, norm1);

    // out = ... + skip(x)
    if (s.changes_width) {
        Linear skip = backward_layer<Linear>(p, "skip_connection");
        on_side_stream_deferred([=] { conv1x1_backward_weight(skip, dout, x); });
        conv1x1_backward_input(dskip, dout, skip);
    }
    each_vector(s.in(), AddVectors{dx.data, dskip.data});
    if (s.C2) each_vector(s.in(), SplitVectors{p.out<floatX>("dx"), p.out<floatX>("dx2"), dx.data, s.C, s.C2});
}
#endif

// ---- 4: the program's -------------------------------------------------------------------------------------
// ResBlock of train_unet.cu. Concatenation, SiLU, additions and the sums of a norm are no passes any more. They are
// done where a convolution or a norm reads or writes.

// Block 0 of the program computes the projections of the embedding for all residual blocks. Here the block's own is
// computed beside it.
static void resblock_forward4(Problem& p) {
    Model m = model_of(p, BLOCK_RES, false);
    const Block& embedding = m.plan.blocks[0];
    const Block& block = m.plan.blocks.back();
    int B = m.plan.batch;
    Tensor emb = p.tensor_in<floatX>("emb");
    Tensor projected = output_of(&m, embedding, B);
    Linear projection = ResBlock{{&m, block, B}}.layer<Linear>(ResBlock::RES_EMB);

    m.embedding_ready = on_side_stream([=] { conv1x1_forward(projected, emb, projection); });
    ResBlock{{&m, block, B}}.forward();
}

static void resblock_backward4(Problem& p) {
    Model m = model_of(p, BLOCK_RES, true);
    const Block& embedding = m.plan.blocks[0];
    const Block& block = m.plan.blocks.back();
    int B = m.plan.batch;
    Tensor emb = p.tensor_in<floatX>("emb");
    Tensor dprojected = output_gradient_of(&m, embedding, B);
    Linear projection = ResBlock{{&m, block, B}}.layer<Linear>(ResBlock::RES_EMB);

    ResBlock{{&m, block, B}}.backward();
    wait_for(newest_event);  // dprojected is written on the side stream
    on_side_stream_deferred([=] { conv1x1_backward_weight(projection, dprojected, emb); });
    conv1x1_backward_input(p.tensor_out<floatX>("demb"), dprojected, projection);
}

static Work work_of(const Problem& p, bool backward) {
    Shape s(p);
    double M = (double)s.B * s.T;
    double taps = s.changes_width ? 10.0 : 9.0;  // of conv1 and skip
    double weights = taps * s.K * s.O + 9.0 * s.O * s.O;
    double projection = (double)s.E * s.O;
    double forward = 2 * M * weights + 2 * s.B * projection;
    if (!backward) return {forward, sizeof(floatX) * (M * (s.K + s.O) + weights + projection)};

    double tensors = M * (2 * s.K + 2 * s.O);  // x and dx, h and dout
    double bytes = sizeof(floatX) * (tensors + weights + projection);
    bytes += sizeof(float) * (weights + projection);  // their gradients
    return {2 * forward, bytes};
}

}  // namespace resblock

static const Ladder resblock_ladder = {
    "resblock",
    {{"forward",
      {"out", "h", "mean1|statistics1/2", "rstd1|affine1/2|half affine1/2", "mean2|statistics2/2",
       "rstd2|affine2/2|half affine2/2"},
      [](const Problem& p) { return resblock::work_of(p, false); }},
     {"backward",
      {"dx", "dx2?", "demb", "din_layers.0.weight", "din_layers.0.bias", "din_layers.2.weight",
       "din_layers.2.bias", "demb_layers.1.weight", "demb_layers.1.bias", "dout_layers.0.weight",
       "dout_layers.0.bias", "dout_layers.3.weight", "dout_layers.3.bias", "dskip_connection.weight?",
       "dskip_connection.bias?"},
      [](const Problem& p) { return resblock::work_of(p, true); }}},
    []() -> std::vector<Version> {
        using namespace resblock;
        return {
            {1, "forward", NCHW, CPU_FP32, "the definition", resblock_forward1},
            {1, "backward", NCHW, CPU_FP32, "the definition", resblock_backward1},
#ifdef __CUDACC__
            {2, "forward", NCHW, FP32, "the definition, a thread a number", resblock_forward1},
            {2, "backward", NCHW, FP32, "the definition, a thread a number", resblock_backward1},
            {3, "forward", NHWC, FLOATX, "the program's layers, nothing fused", resblock_forward3, LIMIT},
            {3, "backward", NHWC, FLOATX, "the program's layers, nothing fused", resblock_backward3, LIMIT},
#endif
            {4, "forward", NHWC, OURS, "train_unet.cu", resblock_forward4, LIMIT},
            {4, "backward", NHWC, OURS, "train_unet.cu", resblock_backward4, LIMIT},
        };
    }()};
LADDER_MAIN(resblock_ladder)
