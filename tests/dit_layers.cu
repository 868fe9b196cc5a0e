// The layers of dev/train_dit.cu against PyTorch, and the program with its side lane as late as may be:
//
//   dit_layers --layers FILE   FILE: what tests/test_dit.py writes, inputs and PyTorch's outputs in float64
//   dit_layers --late FLAGS    train_dit in which each call of the side lane is done only where it is waited for
//
// Built by nvcc, the former tests the kernels; the latter is for the CPU.
#include <deque>
#include <functional>

#ifndef __CUDACC__
#define LATE_SIDE_LANE
#endif
#define main train_dit_main
#include "../dev/train_dit.cu"
#undef main

#ifdef LATE_SIDE_LANE
static std::deque<std::function<void()>> waiting;  // calls of the side lane
static void on_side_lane(auto launches, bool) { side_calls++, waiting.push_back(launches); }
static void backend_join(int call) {
    size_t left = call >= side_calls ? 0 : side_calls - call;
    for (; waiting.size() > left; waiting.pop_front()) waiting.front()();
}
#endif

static const double LIMIT = sizeof(floatX) == 2 ? 4e-3 : 1e-5;
static int passed = 0, failed = 0;

// A tensor of the file: see unet_io.write_tensors.
struct Values {
    std::vector<int64_t> shape;
    std::vector<double> numbers;
};
static std::map<std::string, std::map<std::string, Values>> read_cases(const std::string& path) {
    Reader in(path);
    std::map<std::string, std::map<std::string, Values>> cases;
    in.seek(HEADER_BYTES);
    for (int i = 0; i < in.header[2]; i++) {
        std::string name = in.take<std::string>(64).c_str();
        auto kind = in.take<std::vector<int32_t>>(2);
        auto shape = in.take<std::vector<int64_t>>(4);
        shape.resize(kind[1]);
        size_t count = 1;
        for (int64_t size : shape) count *= size;
        Values values = {shape, std::vector<double>(count)};
        if (kind[0] == 0) std::ranges::copy(in.take<std::vector<float>>(count), values.numbers.begin());
        if (kind[0] == 1) values.numbers = in.take<std::vector<double>>(count);
        if (kind[0] == 2) std::ranges::copy(in.take<std::vector<int32_t>>(count), values.numbers.begin());
        size_t slash = name.find('/');
        cases[name.substr(0, slash)][name.substr(slash + 1)] = values;
    }
    return cases;
}

// A case's tensors on the device, freed with it. Outputs begin as NaN, so that what is not written is found.
struct Case {
    std::string name;
    std::map<std::string, Values> values;
    std::vector<std::shared_ptr<floatX[]>> memory = {};

    int arg(int i) const { return (int)values.at("args").numbers[i]; }
    bool has(const std::string& what) const { return values.contains(what); }
    floatX* place(const std::vector<float>& numbers) {
        std::vector<floatX> rounded(numbers.size());
        for (size_t i = 0; i < numbers.size(); i++) rounded[i] = (floatX)numbers[i];
        memory.push_back(allocate<floatX>(numbers.size()));
        backend_upload(memory.back().get(), rounded.data(), rounded.size() * sizeof(floatX));
        return memory.back().get();
    }
    Tensor tensor(const std::string& what, bool output = false) {
        const Values& v = values.at(what);
        std::vector<float> numbers(v.numbers.begin(), v.numbers.end());
        if (output) std::ranges::fill(numbers, NAN);
        auto size = [&](size_t i) { return i < v.shape.size() ? (int)v.shape[i] : 1; };
        if (v.shape.size() == 2) return {place(numbers), size(0), 1, 1, size(1)};
        return {place(numbers), size(0), size(1), size(2), size(3)};
    }
    Tensor out(const std::string& what) { return tensor(what, true); }
    Rows rows(Tensor t) const { return {t.data, t.C}; }
    void compare(const std::string& what, Tensor got) {
        const std::vector<double>& r = values.at(what).numbers;
        std::vector<floatX> a(r.size());
        backend_download(a.data(), got.data, a.size() * sizeof(floatX));
        double difference = 0, size = 0, worst = 0, largest = 0;
        for (size_t i = 0; i < a.size(); i++) {
            double d = fabs((double)(float)a[i] - r[i]);
            if (!(d <= worst)) worst = d;  // a NaN stays: nothing is above it
            difference += d * d, size += r[i] * r[i], largest = std::max(largest, fabs(r[i]));
        }
        double error = std::isnan(difference) ? NAN : std::max(sqrt(difference / size), worst / largest);
        bool fine = error < LIMIT;
        fine ? passed++ : failed++;
        printf("%s %s %s: error %.2g\n", fine ? "ok  " : "FAIL", name.c_str(), what.c_str(), error);
    }
};

static void test_layer(Case c) {
    if (c.name.starts_with("patches")) {
        Tensor tokens = c.out("tokens"), image = c.out("again");
        run(Patches<floatX>{tokens, c.tensor("image"), c.arg(0), c.arg(1)});
        run(Patches<floatX>{tokens, image, c.arg(0), c.arg(1), true});
        c.compare("tokens", tokens), c.compare("again", image);
    } else if (c.name.starts_with("positions")) {
        Tensor out = c.out("out");
        run(Positions<floatX>{out});
        c.compare("out", out);
    } else if (c.name.starts_with("norm")) {
        Tensor x = c.tensor("x"), dy = c.tensor("dy"), out = c.out("out"), dx = c.out("dx");
        Tensor dshift = c.out("dshift"), dscale = c.out("dscale"), scale = c.tensor("scale");
        auto statistics = allocate<float2>(x.rows());
        run(LayerNormForward<floatX>{out, x, statistics.get(), c.rows(c.tensor("shift")), c.rows(scale)});
        run(TokenSums<floatX>{c.rows(dshift), c.rows(dscale), dy, x, statistics.get()});
        Tensor residual = c.has("residual") ? c.tensor("residual") : Tensor();
        run(LayerNormBackward<floatX>{dx, dy, x, residual, statistics.get(), c.rows(scale)});
        c.compare("out", out), c.compare("dx", dx), c.compare("dshift", dshift), c.compare("dscale", dscale);
    } else if (c.name.starts_with("gate")) {
        Tensor x = c.tensor("x"), branch = c.tensor("branch"), dout = c.tensor("dout"), out = c.out("out");
        Tensor dbranch = c.out("dbranch"), dgate = c.out("dgate");
        Rows gate = c.rows(c.tensor("gate"));
        run(Gate<floatX>{out, branch, gate, x});
        run(Gate<floatX>{dbranch, dout, gate});
        run(TokenSums<floatX>{{}, c.rows(dgate), dout, branch});
        c.compare("out", out), c.compare("dbranch", dbranch), c.compare("dgate", dgate);
    } else if (c.name.starts_with("gelu")) {
        Tensor x = c.tensor("x"), dout = c.tensor("dout"), out = c.out("out"), dx = c.out("dx");
        run(GeluForward<floatX>{out, x});
        run(GeluBackward<floatX>{dx, dout, x});
        c.compare("out", out), c.compare("dx", dx);
    } else fail("no layer is called %s", c.name.c_str());
}

int main(int argc, char** argv) {
    if (argc > 1 && !strcmp(argv[1], "--late")) {
        setenv("OMP_WAIT_POLICY", "passive", 1);  // or the program would begin again, without our word
        return train_dit_main(argc - 1, argv + 1);
    }
    return guarded([&] {
        if (argc != 3 || strcmp(argv[1], "--layers")) fail_usage("dit_layers --layers FILE");
        backend_init();
        allocate_workspace();
        for (const auto& [name, values] : read_cases(argv[2])) test_layer({name, values});
        printf("%d passed, %d failed\n", passed, failed);
        return failed ? EXIT_FAILURE : EXIT_SUCCESS;
    });
}
