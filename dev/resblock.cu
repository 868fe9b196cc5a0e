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
//   3  bf16     layer after layer, those with arithmetic as the program has them
//   4  bf16     train_unet.cu's block
//
// Every version is given what the forward pass of the program keeps, h and the statistics of the norms, and
// backward makes the normed tensors again. Version 4 is also given the moments of x and x2, which whatever
// wrote them has left behind, and leaves those of out. The embedding's projection, which the program makes
// for all blocks in one product, is in its time.
//
// What the steps change: the figures are for 128 + 64 to 64 channels at 64x64, B = 32, on an H100. Version 2
// is what the definition costs, 20 ms and backward 145, of which the weight gradients are the greatest part:
// a thread sums over all pixels. Version 3 has the program's products, 0.29 ms and 0.67, and attends to
// everything between them as frameworks do, by a pass over memory each: the concatenation, the sums of a
// norm, the norm, its SiLU, the addition of the embedding and that of the skip. Version 4 lets products do
// that on the side. The norm reads x and x2 where they lie and applies the SiLU; the epilogue of a product
// adds bias, embedding and skip and takes the sums of the norm that follows; backward, the input gradient's
// takes it through the SiLU and sums that. What is left between two convolutions is one pass forward and one
// backward: 0.16 ms and 0.42. So fusion alone brings 1.7 times forward and 1.6 backward here, and at 8x8,
// where the block is bound by its launches, 1.5 and 1.4. PyTorch's eager kernels take 6.0 and 3.7 times as
// long as version 4.
#ifndef PROGRAM
#define PROGRAM
#endif
#include "blocks.h"

namespace resblock {

using namespace blocks;

struct Shape {
    int B, C, C2, K, O, H, T, E, G;
    bool widens;
    explicit Shape(const Problem& p)
        : B(p.dim("B")),
          C(p.dim("C")),
          C2(p.dim("C2")),
          K(C + C2),
          O(p.dim("O")),
          H(p.dim("H")),
          T(H * H),
          E(p.dim("E")),
          G(p.dim("G")),
          widens(K != O) {}
    size_t in() const { return (size_t)B * T * K; }
    size_t out() const { return (size_t)B * T * O; }
};

// ---- 1, 2: the definition ---------------------------------------------------------------------------------

// x and x2 as one tensor
static const float* joined1(Problem& p, const Shape& s) {
    if (!s.C2) return p.in<float>("x");
    float* joined = p.scratch<float>("joined", s.in());
    each(p, s.in(),
         Concatenate{joined, (float*)p.in<float>("x"), (float*)p.in<float>("x2"), s.C, s.C2, s.T, false});
    return joined;
}
static void resblock_forward1(Problem& p) {
    Shape s(p);
    Plain plain = {p, s.B, s.G};
    auto w = [&](const char* name) { return p.in<float>(name); };
    const float* x = joined1(p, s);
    float *normed1 = p.scratch<float>("normed1", s.in()), *active1 = p.scratch<float>("active1", s.in()),
          *emb = p.scratch<float>("projected", (size_t)s.B * s.O), *h = p.out<float>("h"),
          *normed2 = p.scratch<float>("normed2", s.out()), *active2 = p.scratch<float>("active2", s.out()),
          *skip = p.scratch<float>("skip", s.out()), *out = p.out<float>("out");
    plain.norm(normed1, p.out<float>("mean1"), p.out<float>("rstd1"), x, w("in_layers.0.weight"),
               w("in_layers.0.bias"), s.K, s.T);
    each(p, s.in(), Silu{active1, normed1});
    plain.conv3x3(h, active1, w("in_layers.2.weight"), w("in_layers.2.bias"), s.K, s.O, s.H);
    plain.linear(emb, p.in<float>("emb"), w("emb_layers.1.weight"), w("emb_layers.1.bias"), s.E, s.O, 1);
    each(p, s.out(), AddEmbedding{h, emb, s.T});
    plain.norm(normed2, p.out<float>("mean2"), p.out<float>("rstd2"), h, w("out_layers.0.weight"),
               w("out_layers.0.bias"), s.O, s.T);
    each(p, s.out(), Silu{active2, normed2});
    plain.conv3x3(out, active2, w("out_layers.3.weight"), w("out_layers.3.bias"), s.O, s.O, s.H);
    if (s.widens)
        plain.linear(skip, x, w("skip_connection.weight"), w("skip_connection.bias"), s.K, s.O, s.T);
    each(p, s.out(), Add{out, s.widens ? skip : x});
}

static void resblock_backward1(Problem& p) {
    Shape s(p);
    Plain plain = {p, s.B, s.G};
    auto w = [&](const char* name) { return p.in<float>(name); };
    auto d = [&](const char* name) { return p.sum<float>(std::string("d") + name); };
    const float *x = joined1(p, s), *h = p.in<float>("h"), *dout = p.in<float>("dout"),
                *mean1 = p.in<float>("mean1"), *rstd1 = p.in<float>("rstd1"), *mean2 = p.in<float>("mean2"),
                *rstd2 = p.in<float>("rstd2");
    float *normed2 = p.scratch<float>("normed2", s.out()), *active2 = p.scratch<float>("active2", s.out()),
          *dactive2 = p.scratch<float>("dactive2", s.out()),
          *dnormed2 = p.scratch<float>("dnormed2", s.out()), *dh = p.scratch<float>("dh", s.out()),
          *projected = p.scratch<float>("dprojected", s.B * s.O),
          *demb = p.scratch<float>("demb of this block", s.B * s.E),
          *normed1 = p.scratch<float>("normed1", s.in()), *active1 = p.scratch<float>("active1", s.in()),
          *dactive1 = p.scratch<float>("dactive1", s.in()), *dnormed1 = p.scratch<float>("dnormed1", s.in()),
          *dskip = p.scratch<float>("dskip", s.in()), *sums = p.scratch<float>("sums", 2 * s.B * s.G),
          *dx = s.C2 ? p.scratch<float>("dx and dx2", s.in()) : p.out<float>("dx");

    plain.norm_again(normed2, mean2, rstd2, h, w("out_layers.0.weight"), w("out_layers.0.bias"), s.O, s.T);
    each(p, s.out(), Silu{active2, normed2});
    plain.conv3x3_backward(dactive2, d("out_layers.3.weight"), d("out_layers.3.bias"), dout, active2,
                           w("out_layers.3.weight"), s.O, s.O, s.H);
    each(p, s.out(), SiluGradient{dnormed2, dactive2, normed2});
    plain.norm_backward(dh, d("out_layers.0.weight"), d("out_layers.0.bias"), sums, dnormed2, mean2, rstd2, h,
                        w("out_layers.0.weight"), s.O, s.T);
    each(p, s.B * s.O, SumPixels{projected, dh, s.T});
    plain.linear_backward(demb, d("emb_layers.1.weight"), d("emb_layers.1.bias"), projected,
                          p.in<float>("emb"), w("emb_layers.1.weight"), s.E, s.O, 1);
    each(p, s.B * s.E, Add{p.sum<float>("demb"), demb});

    plain.norm_again(normed1, mean1, rstd1, x, w("in_layers.0.weight"), w("in_layers.0.bias"), s.K, s.T);
    each(p, s.in(), Silu{active1, normed1});
    plain.conv3x3_backward(dactive1, d("in_layers.2.weight"), d("in_layers.2.bias"), dh, active1,
                           w("in_layers.2.weight"), s.K, s.O, s.H);
    each(p, s.in(), SiluGradient{dnormed1, dactive1, normed1});
    plain.norm_backward(dx, d("in_layers.0.weight"), d("in_layers.0.bias"), sums, dnormed1, mean1, rstd1, x,
                        w("in_layers.0.weight"), s.K, s.T);
    if (s.widens)
        plain.linear_backward(dskip, d("skip_connection.weight"), d("skip_connection.bias"), dout, x,
                              w("skip_connection.weight"), s.K, s.O, s.T);
    each(p, s.in(), Add{dx, s.widens ? dskip : dout});
    if (s.C2) each(p, s.in(), Concatenate{dx, p.out<float>("dx"), p.out<float>("dx2"), s.C, s.C2, s.T, true});
}

#ifdef __CUDACC__
// ---- 3: the program's layers, nothing fused ---------------------------------------------------------------

static Tensor joined3(Problem& p, const Shape& s) {
    Tensor x = p.tensor_in<floatX>("x");
    if (!s.C2) return x;
    Tensor joined = p.tensor_scratch("joined", x.with_channels(s.K));
    each_vector(s.in(),
                ConcatenateVectors{joined.data, x.data, p.tensor_in<floatX>("x2").data, s.C, s.C2, false});
    return joined;
}
static void resblock_forward3(Problem& p) {
    Shape s(p);
    Tensor x = joined3(p, s), emb = p.tensor_in<floatX>("emb"), h = p.tensor_out<floatX>("h"),
           out = p.tensor_out<floatX>("out"), normed1 = p.tensor_scratch("normed1", x),
           active1 = p.tensor_scratch("active1", x),
           projected = p.tensor_scratch("projected", emb.with_channels(s.O)),
           normed2 = p.tensor_scratch("normed2", h), active2 = p.tensor_scratch("active2", h),
           skip = s.widens ? p.tensor_scratch("skip", out) : x;
    norm_alone(normed1, forward_norm(p, "in_layers.0", "1", x));
    each_vector(s.in(), SiluVectors{active1.data, normed1.data});
    conv3x3_forward(h, active1, forward_layer<Conv>(p, "in_layers.2"));
    conv1x1_forward(projected, emb, forward_layer<Linear>(p, "emb_layers.1"));
    each_vector(s.out(), AddEmbeddingVectors{h.data, projected.data, s.T, s.O});
    norm_alone(normed2, forward_norm(p, "out_layers.0", "2", h));
    each_vector(s.out(), SiluVectors{active2.data, normed2.data});
    conv3x3_forward(out, active2, forward_layer<Conv>(p, "out_layers.3"));
    if (s.widens) conv1x1_forward(skip, x, forward_layer<Linear>(p, "skip_connection"));
    each_vector(s.out(), AddVectors{out.data, skip.data});
}

static void resblock_backward3(Problem& p) {
    Shape s(p);
    Tensor x = joined3(p, s), emb = p.tensor_in<floatX>("emb"), h = p.tensor_in<floatX>("h"),
           dout = p.tensor_in<floatX>("dout"), normed2 = p.tensor_scratch("normed2", h),
           active2 = p.tensor_scratch("active2", h), dnormed2 = p.tensor_scratch("dnormed2", h),
           dh = p.tensor_scratch("dh", h),
           dprojected = p.tensor_scratch("dprojected", emb.with_channels(s.O)),
           demb = p.tensor_scratch("demb of this block", emb), normed1 = p.tensor_scratch("normed1", x),
           active1 = p.tensor_scratch("active1", x), dnormed1 = p.tensor_scratch("dnormed1", x),
           dskip = s.widens ? p.tensor_scratch("dskip", x) : dout,
           dx = s.C2 ? p.tensor_scratch("dx and dx2", x) : p.tensor_out<floatX>("dx");
    Norm norm1 = backward_norm(p, "in_layers.0", "1", x), norm2 = backward_norm(p, "out_layers.0", "2", h);
    Conv conv1 = backward_layer<Conv>(p, "in_layers.2"), conv2 = backward_layer<Conv>(p, "out_layers.3");
    Linear projection = backward_layer<Linear>(p, "emb_layers.1");

    // What the norms' backward writes of the normed tensors has been made before, for the SiLU's.
    each_vector(s.out(), NormVectors{normed2.data, norm2});
    each_vector(s.out(), SiluVectors{active2.data, normed2.data});
    on_side_stream_deferred([=] { conv3x3_backward_weight(conv2, dout, active2); });
    conv3x3_backward_input(dnormed2, dout, conv2);
    each_vector(s.out(), SiluBackwardVectors{dnormed2.data, dnormed2.data, normed2.data});
    norm_alone_backward(dh, normed2, dnormed2, norm2);

    each_vector(s.in(), NormVectors{normed1.data, norm1});
    each_vector(s.in(), SiluVectors{active1.data, normed1.data});
    on_side_stream_deferred([=] { conv3x3_backward_weight(conv1, dh, active1, {dprojected.data, s.O}); });
    conv3x3_backward_input(dnormed1, dh, conv1);
    wait_for(newest_event);  // dprojected is the side stream's
    on_side_stream_deferred([=] { conv1x1_backward_weight(projection, dprojected, emb); });
    conv1x1_backward_input(demb, dprojected, projection);
    each_vector(s.B * s.E, AddVectors{p.sum<floatX>("demb"), demb.data});
    each_vector(s.in(), SiluBackwardVectors{dnormed1.data, dnormed1.data, normed1.data});
    norm_alone_backward(dx, normed1, dnormed1, norm1);
    if (s.widens) {
        Linear skip = backward_layer<Linear>(p, "skip_connection");
        on_side_stream_deferred([=] { conv1x1_backward_weight(skip, dout, x); });
        conv1x1_backward_input(dskip, dout, skip);
    }
    each_vector(s.in(), AddVectors{dx.data, dskip.data});
    if (s.C2)
        each_vector(s.in(),
                    ConcatenateVectors{dx.data, p.out<floatX>("dx"), p.out<floatX>("dx2"), s.C, s.C2, true});
}
#endif

// ---- 4: the program's -------------------------------------------------------------------------------------

static void resblock_forward4(Problem& p) {
    Model m = model_of(p, BLOCK_RES, false);
    const Block &embedding = m.plan.blocks[0], &block = m.plan.blocks.back();
    int B = m.plan.batch;
    Tensor emb = p.tensor_in<floatX>("emb"), projected = output_of(&m, embedding, B);
    Linear projection = ResBlock{{&m, block, B}}.layer<Linear>(ResBlock::RES_EMB);
    m.embedding_ready = on_side_stream([=] { conv1x1_forward(projected, emb, projection); });
    ResBlock{{&m, block, B}}.forward();
}
static void resblock_backward4(Problem& p) {
    Model m = model_of(p, BLOCK_RES, true);
    const Block &embedding = m.plan.blocks[0], &block = m.plan.blocks.back();
    int B = m.plan.batch;
    Tensor dprojected = output_gradient_of(&m, embedding, B);
    Linear projection = ResBlock{{&m, block, B}}.layer<Linear>(ResBlock::RES_EMB);
    ResBlock{{&m, block, B}}.backward();
    wait_for(newest_event);  // dprojected is the side stream's
    Tensor emb = p.tensor_in<floatX>("emb");
    on_side_stream_deferred([=] { conv1x1_backward_weight(projection, dprojected, emb); });
    conv1x1_backward_input(p.tensor_out<floatX>("demb"), dprojected, projection);
}

static Work work_of(const Problem& p, bool backward) {
    Shape s(p);
    double M = (double)s.B * s.T, weights = (s.widens ? 10.0 : 9.0) * s.K * s.O + 9.0 * s.O * s.O,
           emb = (double)s.E * s.O, forward = 2 * M * weights + 2 * s.B * emb;
    if (!backward) return {forward, sizeof(floatX) * (M * (s.K + s.O) + weights + emb)};
    return {2 * forward, sizeof(floatX) * (M * (2 * s.K + 2 * s.O) + weights + emb) +
                             sizeof(float) * (weights + emb)};  // x, h, dout, weights in; dx, gradients out
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
