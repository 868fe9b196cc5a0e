// The layers of dev/dit/train_dit.cu against PyTorch, and the program with its side stream as late as it may be:
//
//   dit_layers --layers FILE   FILE: what tests/test_dit.py writes, inputs and PyTorch's outputs in float64
//   dit_layers --late FLAGS    train_dit in which each call of the side stream is done only where it is waited for
//
// Built by nvcc, --layers tests the kernels. --late is for the CPU.
#ifndef __CUDACC__
#define LATE_SIDE_STREAM
#endif
#define main train_dit_main
#include "train_dit.cu"
#undef main

#include "../../tests/cases.h"

static const bool IS_BF16 = sizeof(floatX) == 2;
static const double LIMIT = IS_BF16 ? 4e-3 : 1e-5;

// A case with its tensors on the device, which are freed with it. Outputs begin as NaN, so that an element that is not
// written is found.
struct LayerCase : Case {
    Verdict verdict = Verdict(LIMIT);
    std::vector<std::shared_ptr<floatX[]>> memory = {};
    explicit LayerCase(const Case& c) : Case(c) {}

    // A tensor of the file. One of two dimensions is (B, C), and one of fewer than four has 1 in the places of those
    // that it lacks.
    Tensor tensor(const std::string& what, bool output = false) {
        std::vector<floatX> numbers;
        for (double value : at(what)) numbers.push_back((floatX)(output ? NAN : (float)value));
        memory.push_back(allocate<floatX>(numbers.size()));
        floatX* data = memory.back().get();
        upload(data, numbers);

        const std::vector<int64_t>& shape = tensors.at(what).shape;
        auto size = [&](size_t i) { return i < shape.size() ? (int)shape[i] : 1; };
        if (shape.size() == 2) return {data, size(0), 1, 1, size(1)};
        return {data, size(0), size(1), size(2), size(3)};
    }
    Tensor out(const std::string& what) { return tensor(what, true); }
    Rows rows(Tensor t) const { return {t.data, t.C}; }

    std::vector<floatX> elements(Tensor t) const {
        std::vector<floatX> values(t.count());
        backend_download(values.data(), t.data, values.size() * sizeof(floatX));
        return values;
    }

    // Notes whether two tensors agree bit for bit, and have no NaN.
    void same(const std::string& what, Tensor a, Tensor b) {
        std::vector<floatX> of_a = elements(a);
        std::vector<floatX> of_b = elements(b);
        bool has_nan = std::ranges::any_of(of_a, [](floatX value) { return std::isnan((float)value); });
        bool agree = !memcmp(of_a.data(), of_b.data(), a.count() * sizeof(floatX));
        verdict.note(what, agree && !has_nan ? 0 : INFINITY);
    }

    void compare(const std::string& what, Tensor got) {
        std::vector<floatX> found = elements(got);
        verdict.compare(what, std::vector<float>(found.begin(), found.end()), at(what));
    }
};

// Numbers on the device.
static std::shared_ptr<float[]> uploaded(const std::vector<float>& numbers) {
    auto memory = allocate<float>(numbers.size());
    upload(memory.get(), numbers);
    return memory;
}

// A linear layer and its gradients; then with GELU behind its products, which must give the bits of GELU by itself.
static void test_linear(LayerCase& c) {
    Tensor x = c.tensor("x");
    Tensor dout = c.tensor("dout");
    Tensor out = c.out("out");
    Tensor dx = c.out("dx");
    const size_t outputs = out.C;
    const size_t inputs = x.C;
    std::vector<float> found(outputs * inputs + outputs, NAN);  // dw, then dbias
    auto gradients = uploaded(found);
    Linear layer = {c.tensor("w").data, c.tensor("bias").data, gradients.get(), gradients.get() + outputs * inputs};

    dit_linear_forward(out, x, layer);
    dit_linear_backward(dx, dout, layer);
    dit_linear_weights(layer, dout, x);
    wait_for(newest_event);
    backend_download(found.data(), gradients.get(), found.size() * sizeof(float));
    c.compare("out", out);
    c.compare("dx", dx);
    c.verdict.compare("dw", {found.begin(), found.end() - outputs}, c.at("dw"));
    c.verdict.compare("dbias", {found.end() - outputs, found.end()}, c.at("dbias"));

    Tensor hidden = c.tensor("hidden");
    Tensor out2 = c.out("out");
    Tensor dhidden = c.out("dx");
    Tensor active = c.out("out");
    Tensor active2 = c.out("out");
    Tensor again = c.out("dx");
    Tensor again2 = c.out("dx");
    dit_linear_forward(out2, x, layer, GeluForward<floatX>{active, out2});
    run(GeluForward<floatX>{active2, out});
    c.same("out before GELU", out2, out);
    c.same("GELU", active, active2);
    dit_linear_backward(dhidden, dout, layer, GeluBackward<floatX, true>{dhidden, dhidden, hidden, again});
    run(GeluBackward<floatX, true>{dx, dx, hidden, again2});
    c.same("GELU's gradient", dhidden, dx);
    c.same("GELU again", again, again2);
}

// Calls test() once for every kernel that may do a linear layer: the large one, and the program's own.
static void with_every_product(auto test) {
#ifdef HOPPER
    for (bool large : {true, false}) {
        forced_large = large;
        test();
    }
#else
    test();
#endif
}

// Attention between tokens and its gradients, each of them done twice, with the same bits. tests/kernels.cu has the
// same limits and says why; errors here are in units of them.
static void test_attention(LayerCase& c, const char* which) {
    const double limit = IS_BF16 ? 5.2e-3 : 1e-5;
    const double backward_limit = IS_BF16 ? 8e-3 : 1e-5;
    c.verdict.tolerance = 1;
    auto compare = [&](const std::string& what, const std::vector<float>& found, double limit) {
        double error = error_of(found, c.at(what));
        c.verdict.note(text("%s%s %.1e", which, what.c_str(), error), error / limit);
    };

    const int heads = c.arg(0);
    Tensor qkv = c.tensor("qkv");
    Tensor dout = c.tensor("dout");
    Tensor out = c.out("out");
    Tensor out2 = c.out("out");
    std::vector<float> found(c.at("lse").size(), NAN);
    auto lse = uploaded(found);
    token_attention_forward(out2, lse.get(), qkv, heads);
    token_attention_forward(out, lse.get(), qkv, heads);
    backend_download(found.data(), lse.get(), found.size() * sizeof(float));
    compare("lse", found, 1e-5);
    std::vector<floatX> values = c.elements(out);
    compare("out", {values.begin(), values.end()}, limit);
    c.same(text("%sout again", which), out, out2);

    Tensor dqkv = c.out("qkv");
    Tensor dqkv2 = c.out("qkv");
    token_attention_backward(dqkv2, dout, out, lse.get(), qkv, heads);
    token_attention_backward(dqkv, dout, out, lse.get(), qkv, heads);

    // dq, dk and dv differ in size, so that each is compared by itself.
    static const char* const PARTS[] = {"dq", "dk", "dv"};
    values = c.elements(dqkv);
    for (int part = 0; part < 3; part++) {
        std::vector<float> gradient;
        for (size_t i = 0; i < values.size(); i++)
            if ((int)(i / out.C % 3) == part) gradient.push_back((float)values[i]);
        compare(PARTS[part], gradient, backward_limit);
    }
    c.same(text("%sgradients again", which), dqkv, dqkv2);
}

// A place of the residual stream where a branch begins, or ends, or both, forward and backward: see StreamBackward.
static void test_stream(LayerCase& c) {
    const bool begins = c.has("dy");
    const bool ends = c.has("branch");
    Tensor x = c.tensor("x");
    Tensor around;
    Tensor dx = c.out("dx");
    Tensor dmodulations = c.out("dmodulations");
    if (c.has("around")) around = c.tensor("around");

    const int B = x.B;
    const int D = x.C;
    const int slabs = slabs_of(x.T());
    std::vector<float> zeros((size_t)B * slabs * 3 * D);  // the sums of a modulation that is not there stay zeros
    auto sums = uploaded(zeros);
    auto sums_of = [&](int i) { return RowsOf<float>{sums.get() + i * D, 3 * D}; };

    auto statistics = allocate<float2>(x.rows());
    BranchBegin<floatX> begin = {};
    if (begins) {
        Rows shift = c.rows(c.tensor("shift"));
        Rows scale = c.rows(c.tensor("scale"));
        Tensor out = c.out("out");
        run(LayerNormForward<floatX>{out, x, statistics.get(), shift, scale});
        c.compare("out", out);
        begin = {
            .normed = c.out("out"),
            .dy = c.tensor("dy"),
            .x = x,
            .statistics = statistics.get(),
            .shift = shift,
            .scale = scale,
            .dshift = sums_of(0),
            .dscale = sums_of(1),
        };
    } else {
        dx = around;
    }

    BranchEnd<floatX> end = {};
    if (ends) {
        Tensor out = c.out("ended");
        end = {
            .dbranch = c.out("dbranch"),
            .branch = c.tensor("branch"),
            .gate = c.rows(c.tensor("gate")),
            .dgate = sums_of(2),
        };
        run(Gate<floatX>{out, end.branch, end.gate, c.tensor("before")});
        c.compare("ended", out);
    }

    if (begins && ends) run(StreamBackward<floatX, true, true>{dx, around, begin, end});
    else if (begins) run(StreamBackward<floatX, true, false>{dx, around, begin, end});
    else run(StreamBackward<floatX, false, true>{dx, around, begin, end});
    run(SlabSums<floatX>{c.rows(dmodulations), sums.get(), B, slabs, 3 * D});
    c.compare("dx", dx);
    c.compare("dmodulations", dmodulations);
    if (begins) c.compare("out", begin.normed);  // it is made again
    if (ends) c.compare("dbranch", end.dbranch);
}

// An image cut into patches, and put together again.
static void test_patches(LayerCase& c) {
    Tensor image = c.tensor("image");
    Tensor tokens = c.out("tokens");
    Tensor again = c.out("again");
    const int patch = c.arg(0);
    const int channels = c.arg(1);
    run(Patches<floatX>{tokens, image, patch, channels});
    run(Patches<floatX>{tokens, again, patch, channels, true});
    c.compare("tokens", tokens);
    c.compare("again", again);
}

static void test_positions(LayerCase& c) {
    Tensor out = c.out("out");
    run(Positions<floatX>{out});
    c.compare("out", out);
}

static void test_gelu(LayerCase& c) {
    Tensor x = c.tensor("x");
    Tensor dout = c.tensor("dout");
    Tensor out = c.out("out");
    Tensor dx = c.out("dx");
    run(GeluForward<floatX>{out, x});
    run(GeluBackward<floatX>{dx, dout, x});
    c.compare("out", out);
    c.compare("dx", dx);
}

static void test_layer(LayerCase c) {
    if (c.is("linear")) {
        with_every_product([&] { test_linear(c); });
    } else if (c.is("attention")) {
#ifdef HOPPER
        for (bool large : {false, true}) {
            forced_large = large;
            test_attention(c, large ? "large " : "");
        }
#else
        test_attention(c, "");
#endif
    } else if (c.is("patches")) {
        test_patches(c);
    } else if (c.is("positions")) {
        test_positions(c);
    } else if (c.is("stream")) {
        test_stream(c);
    } else if (c.is("gelu")) {
        test_gelu(c);
    } else {
        fail("no layer is called %s", c.name.c_str());
    }
    c.verdict.line(c.name);
}

int main(int argc, char** argv) {
#ifdef LATE_SIDE_STREAM
    if (argc > 1 && !strcmp(argv[1], "--late")) {
        side_stream = LATE;
        return train_dit_main(argc - 1, argv + 1);
    }
#endif
    return guarded([&] {
        if (argc != 3 || strcmp(argv[1], "--layers")) fail_usage("dit_layers --layers FILE");
        backend_init();
        allocate_workspace();
        for (const Case& c : read_cases(argv[2])) test_layer(LayerCase(c));
        return summary();
    });
}
