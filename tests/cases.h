// cases.h: what network.cu, readers.cu, kernels.cu and dit_layers.cu share, behind the program that either includes: reports and errors,
// files of tensors, and a side stream whose calls wait. Comparisons are written so that a NaN fails.
#include <cstdarg>

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

// ---- reports and errors -----------------------------------------------------------------------------------

static int passed, failed;

__attribute__((format(printf, 3, 4))) static bool report(bool ok, const std::string& name, const char* format,
                                                         ...) {
    char detail[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(detail, sizeof detail, format, args);
    va_end(args);
    printf("%s %s: %s\n", ok ? "ok" : "FAIL", name.c_str(), detail);
    fflush(stdout);
    ok ? passed++ : failed++;
    return ok;
}
static int summary() {
    printf("%d passed, %d failed\n", passed, failed);
    fflush(stdout);
    return failed ? 1 : 0;
}

// The error of a tensor: the larger of ||a - r|| / ||r|| and max|a - r| / max|r|. NaN where either holds one,
// infinite where r is all zeros and a is not.
template <typename A>
static double error_of(const A* a, const double* r, size_t n) {
    double difference = 0, size = 0, worst = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - r[i]);
        if (std::isnan(d)) return NAN;
        difference += d * d, size += r[i] * r[i];
        worst = std::max(worst, d), largest = std::max(largest, fabs(r[i]));
    }
    return worst == 0 ? 0 : std::max(sqrt(difference / size), worst / largest);
}
template <typename A>
static double error_of(const std::vector<A>& a, const std::vector<double>& r) {
    return a.size() == r.size() ? error_of(a.data(), r.data(), a.size()) : NAN;
}
static double error_of(const std::vector<float>& a, const std::vector<float>& r) {
    return error_of(a, std::vector<double>(r.begin(), r.end()));
}

// Whether an error is the worst so far; a NaN is, and stays it.
static bool worsens(double error, double worst) { return std::isnan(error) || error > worst; }

// ---- files of tensors, see unet_io.write_tensors ------------------------------------------------------------

// A tensor of a tensor file, widened: fp32 and int32 are exact in double.
struct TestTensor {
    int type = 0;
    std::vector<int64_t> shape;
    std::vector<double> values;
};

// The tensors whose names share what stands before the slash; the first word says what they are for.
struct Case {
    std::string name;
    std::map<std::string, TestTensor> tensors;

    bool has(const std::string& what) const { return tensors.count(what) != 0; }
    const std::vector<double>& at(const std::string& what) const {
        if (!has(what)) fail("the case %s has no tensor %s", name.c_str(), what.c_str());
        return tensors.at(what).values;
    }
    std::vector<float> floats(const std::string& what) const {
        return has(what) ? std::vector<float>(at(what).begin(), at(what).end()) : std::vector<float>();
    }
    // args (n): the integers that describe the case
    int arg(int i) const { return (int)(int64_t)at("args").at(i); }
    uint32_t word(int i) const { return (uint32_t)(int64_t)at("args").at(i); }
    bool is(const char* kind) const { return name.substr(0, name.find(' ')) == kind; }
};

static std::vector<Case> read_cases(const char* path) {
    Reader in(path);
    int32_t header[HEADER_INTS];
    in.read(header, sizeof header);
    if (header[0] != 0x534E4554 || header[1] != 1) fail("%s is no tensor file of version 1", path);
    std::vector<Case> cases;
    for (int i = 0; i < header[2]; i++) {
        char name[65] = {0};
        int32_t type_ndim[2];
        int64_t dims[4];
        in.read(name, 64), in.read(type_ndim, sizeof type_ndim), in.read(dims, sizeof dims);
        TestTensor tensor;
        tensor.type = type_ndim[0];
        tensor.shape.assign(dims, dims + type_ndim[1]);
        tensor.values.resize((size_t)(dims[0] * dims[1] * dims[2] * dims[3]));
        for (size_t first = 0; first < tensor.values.size(); first += 65536) {
            size_t n = std::min((size_t)65536, tensor.values.size() - first);
            static float single[65536];
            static int32_t integer[65536];
            if (tensor.type == 1) {
                in.read(&tensor.values[first], n * sizeof(double));
            } else if (tensor.type == 0) {
                in.read(single, n * sizeof(float));
                std::copy(single, single + n, &tensor.values[first]);
            } else {
                in.read(integer, n * sizeof(int32_t));
                std::copy(integer, integer + n, &tensor.values[first]);
            }
        }
        std::string whole = name, group = whole.substr(0, whole.find('/'));
        if (cases.empty() || cases.back().name != group) cases.push_back({group, {}});
        cases.back().tensors[whole.substr(std::min(whole.size(), group.size() + 1))] = std::move(tensor);
    }
    return cases;
}

// Collects the comparisons of one case: its line names the worst.
struct Verdict {
    double worst = 0, tolerance;
    std::string where = "nothing";
    int count = 0;
    bool bad = false;
    explicit Verdict(double tolerance) : tolerance(tolerance) {}
    void note(const std::string& what, double error) {
        count++;
        if (!(error < tolerance)) bad = true;
        if (where == "nothing" || worsens(error, worst)) worst = error, where = what;
    }
    void compare(const std::string& what, const std::vector<float>& a, const std::vector<double>& r) {
        note(what, error_of(a, r));
    }
    // A tensor that is zero by mathematics: `scale` is what it would be measured against.
    void compare_zero(const std::string& what, const std::vector<float>& a, double scale) {
        double largest = 0;
        for (float value : a)
            if (worsens(fabs(value), largest)) largest = fabs(value);
        note(what + " (zero)", largest / scale < 1e-6 ? 0 : INFINITY);
    }
    void line(const std::string& name) const {
        report(!bad && count > 0, name, "%d tensors, worst %.2g (%s), tolerance %g", count, worst,
               where.c_str(), tolerance);
    }
};

// ---- the side stream ----------------------------------------------------------------------------------------

#ifdef LATE_SIDE_STREAM
// What the side stream is given is done at once; as late as the waits permit; or at any time between.
enum SideStream { AT_ONCE, LATE, ANY_TIME };
static SideStream side_stream = AT_ONCE;
static std::deque<std::function<void()>> side_stream_calls;  // that are not done
static void do_side_stream(size_t left) {
    for (; side_stream_calls.size() > left; side_stream_calls.pop_front()) side_stream_calls.front()();
}
static Event on_side_stream(auto launches) {
    newest_event++;
    side_stream_calls.push_back(launches);
    uint32_t waiting = (uint32_t)side_stream_calls.size(), draw = (uint32_t)newest_event;
    uint32_t some = random_below(waiting + 1, 1, STREAM_PERTURB, draw, 0, 0);
    do_side_stream(side_stream == AT_ONCE ? 0 : side_stream == LATE ? SIZE_MAX : some);
    return newest_event;
}
static void wait_for(Event event) { do_side_stream(newest_event - event); }
#endif
