// cases.h: what network.cu, readers.cu, kernels.cu and dit_layers.cu share: reports and errors, files of tensors, and a
// side stream whose calls wait. Each includes it behind the program. Comparisons are written so that a NaN fails.
#include <cstdarg>

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

// ---- reports and errors -----------------------------------------------------------------------------------

static int passed, failed;

// Prints the line of one test, and returns `ok`.
__attribute__((format(printf, 3, 4))) static bool report(bool ok, const std::string& name, const char* format,
                                                         ...) {
    char detail[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(detail, sizeof detail, format, args);
    va_end(args);

    printf("%s %s: %s\n", ok ? "ok" : "FAIL", name.c_str(), detail);
    fflush(stdout);
    if (ok) passed++;
    else failed++;
    return ok;
}

// Prints how many tests passed, and returns the exit status of the program.
static int summary() {
    printf("%d passed, %d failed\n", passed, failed);
    fflush(stdout);
    return failed ? 1 : 0;
}

// The error of tensor a beside the reference r: the larger of ||a - r|| / ||r|| and max|a - r| / max|r|. It is NaN if
// either holds a NaN, or if they differ in size. It is infinite if r is all zeros and a is not.
template <typename A>
static double error_of(const A* a, const double* r, size_t n) {
    double difference = 0;  // ||a - r||^2
    double size = 0;        // ||r||^2
    double worst = 0;       // max|a - r|
    double largest = 0;     // max|r|
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - r[i]);
        if (std::isnan(d)) return NAN;
        difference += d * d;
        size += r[i] * r[i];
        worst = std::max(worst, d);
        largest = std::max(largest, fabs(r[i]));
    }
    if (worst == 0) return 0;
    return std::max(sqrt(difference / size), worst / largest);
}

template <typename A>
static double error_of(const std::vector<A>& a, const std::vector<double>& r) {
    return a.size() == r.size() ? error_of(a.data(), r.data(), a.size()) : NAN;
}

static double error_of(const std::vector<float>& a, const std::vector<float>& r) {
    return error_of(a, std::vector<double>(r.begin(), r.end()));
}

// Whether an error is the worst so far. A NaN is, and remains the worst.
static bool worsens(double error, double worst) { return std::isnan(error) || error > worst; }

static inline void keep_worse(double* worst, double error) {
    if (worsens(error, *worst)) *worst = error;
}

// ---- files of tensors, see unet_io.write_tensors ------------------------------------------------------------

// A tensor of a tensor file. Its values are doubles, which hold fp32 and int32 exactly.
struct TestTensor {
    int type = 0;  // 0: float32, 1: float64, 2: int32
    std::vector<int64_t> shape;
    std::vector<double> values;
};

// The tensors of a file whose names share what stands before the slash, which is the name of the case. Its first word
// says what the case is for.
struct Case {
    std::string name;
    std::map<std::string, TestTensor> tensors;

    bool has(const std::string& what) const { return tensors.count(what) != 0; }

    const std::vector<double>& at(const std::string& what) const {
        if (!has(what)) fail("the case %s has no tensor %s", name.c_str(), what.c_str());
        return tensors.at(what).values;
    }

    // Without such a tensor it is empty.
    std::vector<float> floats(const std::string& what) const {
        if (!has(what)) return {};
        return std::vector<float>(at(what).begin(), at(what).end());
    }

    // args (n): the integers that describe the case
    int arg(int i) const { return (int)(int64_t)at("args").at(i); }
    uint32_t word(int i) const { return (uint32_t)(int64_t)at("args").at(i); }

    bool is(const char* kind) const { return name.substr(0, name.find(' ')) == kind; }
};

// Reads the values of a tensor of this type, a part at a time.
static void read_values(Reader* in, int type, std::vector<double>* values) {
    enum { FLOAT32, FLOAT64, INT32, PART = 65536 };
    static float single[PART];
    static int32_t integer[PART];
    for (size_t first = 0; first < values->size(); first += PART) {
        size_t n = std::min((size_t)PART, values->size() - first);
        double* part = values->data() + first;
        if (type == FLOAT64) {
            in->read(part, n * sizeof(double));
        } else if (type == FLOAT32) {
            in->read(single, n * sizeof(float));
            std::copy(single, single + n, part);
        } else {
            in->read(integer, n * sizeof(int32_t));
            std::copy(integer, integer + n, part);
        }
    }
}

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
        in.read(name, 64);
        in.read(type_ndim, sizeof type_ndim);
        in.read(dims, sizeof dims);

        TestTensor tensor;
        tensor.type = type_ndim[0];
        tensor.shape.assign(dims, dims + type_ndim[1]);
        tensor.values.resize((size_t)(dims[0] * dims[1] * dims[2] * dims[3]));
        read_values(&in, tensor.type, &tensor.values);

        // the name is CASE/TENSOR, or CASE alone
        std::string whole = name;
        std::string group = whole.substr(0, whole.find('/'));
        std::string rest = whole.substr(std::min(whole.size(), group.size() + 1));
        if (cases.empty() || cases.back().name != group) cases.push_back({group, {}});
        cases.back().tensors[rest] = std::move(tensor);
    }
    return cases;
}

// Collects the comparisons of one case, for which one line is printed. It names the worst of them.
struct Verdict {
    double worst = 0, tolerance;
    std::string where = "nothing";  // the worst is
    int count = 0;
    bool bad = false;

    explicit Verdict(double tolerance) : tolerance(tolerance) {}

    void note(const std::string& what, double error) {
        count++;
        if (!(error < tolerance)) bad = true;
        if (where == "nothing" || worsens(error, worst)) {
            worst = error;
            where = what;
        }
    }

    void compare(const std::string& what, const std::vector<float>& a, const std::vector<double>& r) {
        note(what, error_of(a, r));
    }

    // For a tensor that is zero by mathematics. Beside `scale` it must be nothing.
    void compare_zero(const std::string& what, const std::vector<float>& a, double scale) {
        double largest = 0;
        for (float value : a)
            if (worsens(fabs(value), largest)) largest = fabs(value);
        note(what + " (zero)", largest / scale < 1e-6 ? 0 : INFINITY);
    }

    void line(const std::string& name) const {
        report(!bad && count > 0, name, "%d tensors, worst %.2g (%s), tolerance %g", count, worst, where.c_str(),
               tolerance);
    }
};

// ---- the side stream ----------------------------------------------------------------------------------------

#ifdef LATE_SIDE_STREAM
// When the calls that the side stream is given are done: at once, as late as the waits permit, or at any time between.
enum SideStream { AT_ONCE, LATE, ANY_TIME };
static SideStream side_stream = AT_ONCE;
static std::deque<std::function<void()>> side_stream_calls;  // those that are not done

// Does the oldest calls, until `left` are left.
static void do_side_stream(size_t left) {
    while (side_stream_calls.size() > left) {
        side_stream_calls.front()();
        side_stream_calls.pop_front();
    }
}

static Event on_side_stream(auto launches) {
    newest_event++;
    side_stream_calls.push_back(launches);
    if (side_stream == AT_ONCE) do_side_stream(0);
    if (side_stream == ANY_TIME) {
        uint32_t waiting = (uint32_t)side_stream_calls.size();
        uint32_t draw = (uint32_t)newest_event;
        do_side_stream(random_below(waiting + 1, 1, STREAM_PERTURB, draw, 0, 0));
    }
    return newest_event;
}

static void wait_for(Event event) { do_side_stream(newest_event - event); }
#endif
