// What every ladder of dev/ shares: reading the file of PyTorch's numbers, running a version, checking and
// timing it, and the table. A ladder by itself takes what it needs from standalone.h. With PROGRAM defined it
// includes the whole program instead, and its last version is the program's own function, not a copy of it.
//
// A ladder X is dev/X.cu and dev/X.py:
//
//   python3 X.py             writes ../build/dev/X.bin: inputs, outputs and gradients from a seed, computed
//                            by PyTorch in float64; also large cases, of which most need a GPU, and
//                            PyTorch's own times there
//   make X                   builds the ladder by itself, in seconds; make X_program with the program's version
//   ./X                      checks and times every version of every case
//   ./X 3                    version 3 alone
//   ./X 3 64x64              and this case alone
//
// X.cu lists its passes (what is computed: outputs, work) and its versions (how); see gelu.cu, a small one.
//
// Timing      Cold caches: every launch takes the next of several copies of inputs and outputs, which
//             together are more than twice the second-level cache. A CUDA graph of many launches is replayed,
//             three times to warm up, then up to twenty times; the median counts. Scratch is a version's own
//             affair and stays where it is.
// Floor       The time that the work of a pass would take if each input were read once and each output
//             written once, at the bandwidth of a copy measured here, or its operations at the GPU's data
//             sheet, if longer. It is the same for all versions of a pass: that of the program's precision.
// Checks      The error of a tensor is the larger of |a - r|_2 / |r|_2 and max|a - r| / max|r|; NaN fails.
//             What a version overwrites is NaN before; what it adds to holds half of the expected before.
//             A second run must give the same bits, but for versions that are marked ATOMICS.
#pragma once
#ifndef PROGRAM
#define STANDALONE
#elif !defined(TESTING)
#define TESTING
#endif
#include "bench/work.h"

#include <functional>
#include <map>
#include <memory>
#include <type_traits>

// Of tensors of three dimensions and more; a 3x3 weight is (O, C, 3, 3) or (O, 3, 3, C).
enum Layout { NCHW, NHWC };

#ifdef __CUDACC__
static int device_attribute(cudaDeviceAttr attribute) {
    int value = 0, device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

// sum (4, 4) += a (4) times b (4), both 16-byte aligned: the core of a product whose tiles are in shared
// memory.
__device__ static inline void add_outer_product(float sum[4][4], const float* a, const float* b) {
    float4 x = *(const float4*)a, y = *(const float4*)b;
    const float column[4] = {x.x, x.y, x.z, x.w}, row[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] += column[i] * row[j];
}
#endif

// ---- the file of PyTorch's numbers ------------------------------------------------------------------------

// common.py writes it and describes it. A scalar is a tensor of one element without dimensions.
struct Reference {
    std::vector<int> shape;
    std::vector<float> values;  // in PyTorch's order: NCHW
};
typedef std::map<std::string, Reference> Case;

static std::vector<std::pair<std::string, Case>> read_cases(const std::string& path,
                                                            const std::string& stem) {
    if (!file_exists(path)) fail("%s is not there; make it with: python3 %s.py", path.c_str(), stem.c_str());
    Reader in(path);
    std::vector<std::pair<std::string, Case>> cases;
    size_t left = in.size;
    auto read = [&](void* to, size_t bytes) {
        if (bytes > left)
            fail("%s is truncated; make it anew with: python3 %s.py", path.c_str(), stem.c_str());
        in.read(to, bytes), left -= bytes;
    };
    auto number = [&] {
        int32_t n = 0;
        read(&n, sizeof n);
        return n;
    };
    if (number() != 20241127) fail("%s was not written by dev/common.py", path.c_str());
    while (left) {
        std::string name((size_t)std::min(std::max(number(), 0), 1000), ' ');
        read(&name[0], name.size());
        Reference tensor;
        size_t count = 1;
        for (int ndim = number(); ndim > 0; ndim--) {
            tensor.shape.push_back(number());
            if (tensor.shape.back() <= 0 || count > left) fail("%s is damaged", path.c_str());
            count *= (size_t)tensor.shape.back();
        }
        if (count > left / sizeof(float)) fail("%s is truncated; make it anew", path.c_str());
        tensor.values.resize(count);
        read(tensor.values.data(), count * sizeof(float));
        size_t slash = name.rfind('/');
        std::string of = name.substr(0, slash);
        if (cases.empty() || cases.back().first != of) cases.push_back({of, {}});
        cases.back().second[name.substr(slash + 1)] = std::move(tensor);
    }
    return cases;
}

// ---- a problem: the tensors of a case as a version sees them ----------------------------------------------

// A version asks for its tensors by name: p.in<T>("x"), p.out<T>("out"), p.sum<float>("dw"),
// p.scratch<T>("s", n). Type and layout are its own; the conversion from PyTorch's numbers is not in its
// time. At every launch that is timed, the same names stand for the next copy. Several tensors of the file can
// be asked for as one run of memory, in which they follow each other: p.in<T>("weights", {"w", "bias"}).
typedef std::vector<std::string> Names;
struct Problem {
    enum Role { IN, OUT, SUM, UPDATE, SCRATCH };
    struct Slot {
        std::string name;
        Role role;
        Layout layout;
        size_t count, bytes;
        Names tensors;  // of the file, one behind the other
        std::vector<char*> copies;
        std::function<void(char*)> fill;                        // a copy, as a version finds it
        std::function<std::vector<float>(const char*)> floats;  // of the memory of a copy, read back
    };
    const Case* data = nullptr;
    Layout layout = NHWC;  // the version's
    bool on_cpu = true;
    std::map<std::string, Slot> slots;
    size_t turn = 0;      // counts the launches that are timed
    bool frozen = false;  // while launches are recorded nothing may be allocated

    ~Problem() { clear(); }
    int dim(const char* name) const { return (int)find(name).values.at(0); }
    bool has(const char* name) const { return data->count(name); }
    template <typename T>
    const T* in(const std::string& name, const Names& tensors = {}) {
        return get<T>(name, IN, tensors);
    }
    template <typename T>
    T* out(const std::string& name, const Names& tensors = {}) {  // to be overwritten
        return get<T>(name, OUT, tensors);
    }
    template <typename T>
    T* sum(const std::string& name, const Names& tensors = {}) {  // to be added to
        return get<T>(name, SUM, tensors);
    }
    template <typename T>
    T* update(const std::string& name) {  // to be changed in place, into what the file calls "new NAME"
        return get<T>(name, UPDATE, {});
    }
    template <typename T>
    T* scratch(const std::string& name, size_t count) {
        return get<T>(name, SCRATCH, {}, count);
    }

#ifdef PROGRAM
    // The same as values that the program's layers take. What a layer reads is not const there, but it stays
    // as it is.
    template <typename Real>
    TensorOf<Real> tensor_in(const std::string& name) {
        return shaped(name, (Real*)in<Real>(name));
    }
    template <typename Real>
    TensorOf<Real> tensor_out(const std::string& name) {
        return shaped(name, out<Real>(name));
    }
    template <typename Real>
    TensorOf<Real> tensor_scratch(const std::string& name, TensorOf<Real> like) {
        return {scratch<Real>(name, like.count()), like.B, like.H, like.W, like.C};
    }
    // Scratch for the moments of x, or for the sums that a norm of x takes in its backward pass.
    template <typename Sums, typename Real>
    Sums* scratch_sums(const std::string& name, TensorOf<Real> x) {
        return (Sums*)scratch<float>(name, (size_t)2 * x.B * norm_tiles(x.H * x.W) * x.C);
    }
    // Memory as a tensor of the shape that the file has for `name`: (B, C), (B, C, T) or (B, C, H, W).
    template <typename Real>
    TensorOf<Real> shaped(const std::string& name, Real* data) const {
        std::vector<int> shape = find(name).shape;
        assert(shape.size() >= 2 && (layout == NHWC || shape.size() == 2));
        shape.resize(4, 1);
        return {data, shape[0], shape[2], shape[3], shape[1]};
    }
#endif

    const Reference& find(const std::string& name) const {
        auto found = data->find(name);
        if (found == data->end()) fail("the case has no tensor '%s'", name.c_str());
        return found->second;
    }
    // PyTorch's order to the version's: the channels, axis 1 of three and more, go last.
    std::vector<float> arranged(const Reference& tensor) const {
        if (layout == NCHW || tensor.shape.size() < 3) return tensor.values;
        size_t N = (size_t)tensor.shape[0], C = (size_t)tensor.shape[1], T = tensor.values.size() / (N * C);
        std::vector<float> values(tensor.values.size());
#pragma omp parallel for
        for (size_t n = 0; n < N; n++)
            for (size_t t = 0; t < T; t++)
                for (size_t c = 0; c < C; c++)
                    values[(n * T + t) * C + c] = tensor.values[(n * C + c) * T + t];
        return values;
    }

    char* allocate(size_t bytes) const {
        char* memory = (char*)backend_allocate(bytes, on_cpu);
        return memory;
    }
    void put(char* to, const void* from, size_t bytes) const {
        on_cpu ? (void)memcpy(to, from, bytes) : backend_upload(to, from, bytes);
    }
    void clear() {
        for (auto& [name, slot] : slots)
            for (char* copy : slot.copies) backend_free(copy, on_cpu);
        slots.clear(), turn = 0;
    }

    template <typename T>
    T* get(const std::string& name, Role role, Names tensors, size_t count = 0) {
        auto found = slots.find(name);
        if (found == slots.end()) {
            assert(!frozen);
            if (role != SCRATCH && tensors.empty()) tensors = {name};
            for (auto& tensor : tensors) count += find(tensor).values.size();
            Slot slot = {name, role, layout, count, count * sizeof(T), tensors, {}, {}, {}};
            slot.fill = [=, this](char* memory) {
                std::vector<char> bytes(count * sizeof(T), (char)255);  // NaN in float and bf16
                T* to = (T*)bytes.data();
                if (role == IN || role == SUM || role == UPDATE)
                    for (auto& tensor : tensors)
                        for (float value : arranged(find(tensor)))
                            *to++ = (T)(role == SUM ? 0.5f * value : value);
                put(memory, bytes.data(), bytes.size());
            };
            slot.copies.push_back(allocate(std::max(slot.bytes, (size_t)16)));
            slot.fill(slot.copies[0]);
            bool here = on_cpu;
            slot.floats = [count, here](const char* memory) {
                std::vector<T> values(count);
                if (here)
                    memcpy((void*)values.data(), memory, count * sizeof(T));
                else
                    backend_download((void*)values.data(), memory, count * sizeof(T));
                return std::vector<float>(values.begin(), values.end());
            };
            found = slots.emplace(name, slot).first;
        }
        Slot& slot = found->second;
        assert(slot.role == role && (role != SCRATCH || slot.bytes == count * sizeof(T)));
        return (T*)slot.copies[turn % slot.copies.size()];
    }

    // The slot with the computed values of a tensor, null: none; `first` becomes the tensor's place in it.
    const Slot* written(const std::string& tensor, size_t* first) const {
        for (auto& [name, slot] : slots) {
            *first = 0;
            for (auto& other : slot.tensors) {
                if (other == tensor && slot.role != IN) return &slot;
                *first += find(other).values.size();
            }
        }
        return nullptr;
    }

    // As many copies of what is read and written as make `bytes` together, but no more than `most`.
    size_t make_copies(size_t bytes, size_t most) {
        size_t together = 1;
        for (auto& [name, slot] : slots)
            if (slot.role != SCRATCH) together += slot.bytes;
        size_t copies = std::min(most, bytes / together + 2);
        for (auto& [name, slot] : slots)
            while (slot.role != SCRATCH && slot.copies.size() < copies) {
                slot.copies.push_back(allocate(std::max(slot.bytes, (size_t)16)));
                on_cpu ? (void)memcpy(slot.copies.back(), slot.copies[0], slot.bytes)
                       : backend_copy(slot.copies.back(), slot.copies[0], slot.bytes);
            }
        return copies;
    }
};

// ---- ladders ----------------------------------------------------------------------------------------------

// What is computed: which tensors come out, and the work where nothing is read or written twice.
struct Pass {
    const char* name;                  // "forward", "backward"
    // "dx2?": where the case has it; "dqkv/3": three parts, each its own; "mean|statistics": what is written
    std::vector<const char*> outputs;
    std::function<Work(const Problem&)> work;
    const char* of = "";  // the cases that it is for: those whose name begins so
};
enum Type { CPU_FP32, FP32, BF16 };
static const Type FLOATX = sizeof(floatX) == 2 ? BF16 : FP32;  // the program's precision
enum Bits { SAME_BITS, ATOMICS };  // whether two runs give the same; ATOMICS: sums in the order of the day

// One way to compute it. A function takes its tensors from the problem; everything else that it does is
// timed.
struct Version {
    int number;
    const char* pass;
    Layout layout;
    Type type;
    const char* idea;  // a line
    std::function<void(Problem&)> function;
    double limit = 0;  // the error that is allowed; 0: see measure()
    Bits bits = SAME_BITS;
    std::function<bool(const Problem&)> suits = nullptr;  // whether it takes the case's shape; null: any
};
struct Ladder {
    const char* stem;
    std::vector<Pass> passes;
    std::vector<Version> versions;
};

// The larger of |a - r|_2 / |r|_2 and max|a - r| / max|r|, r being `factor` times the reference; NaN where
// either holds one. Only of the elements for which counts(i).
template <typename Counts>
static double error_of(const std::vector<float>& a, const std::vector<float>& r, double factor,
                       Counts counts) {
    double difference = 0, size = 0, worst = 0, largest = 0;
    for (size_t i = 0; i < r.size(); i++) {
        if (!counts(i)) continue;
        double expected = factor * r[i], d = fabs(a[i] - expected);
        if (!(d < 1e30)) return NAN;
        difference += d * d, size += expected * expected;
        worst = std::max(worst, d), largest = std::max(largest, fabs(expected));
    }
    return worst == 0 ? 0 : std::max(sqrt(difference / size), worst / largest);
}

// An error and what is allowed: 1e-5, of what is bf16 1e-2, of what is float but made from bf16 1e-4.
struct Measured {
    double error, limit;
    bool good() const { return error <= limit; }
};
// One call. The program's layers may have work on its second stream and partial sums in workspaces, which hold
// NaN before.
static void call_version(Problem* p, const Version& version) {
    version.function(*p);
#ifdef PROGRAM
    wait_for(newest_event);
#endif
}
static void run_version(Problem* p, const Version& version) {
#if defined(__CUDACC__) && defined(PROGRAM)
    for (const Stream* each : {&main_stream, &side_stream})
        CUDA_CHECK(cudaMemsetAsync(each->workspace.base, 255, GPU_WORKSPACE_BYTES, main_stream.handle));
#endif
    call_version(p, version);
    backend_wait();
}
// Runs the version once; of its outputs the error that is nearest to its limit, or past it.
static Measured measure(Problem* p, const Version& version, const Pass& pass) {
    run_version(p, version);
    Measured worst = {0, 1};
    for (std::string output : pass.outputs) {
        for (size_t bar, ignored; (bar = output.find('|')) != std::string::npos;) {
            std::string one = output.substr(0, bar);
            output = p->written(one.substr(0, one.find('/')), &ignored) ? one : output.substr(bar + 1);
        }
        size_t slash = output.find('/'),
               parts = slash == std::string::npos ? 1 : (size_t)atoi(&output[slash + 1]), first = 0;
        std::string name = output.substr(0, std::min(slash, output.find('?')));
        if (output.back() == '?' && !p->has(name.c_str())) continue;
        const Problem::Slot* found = p->written(name, &first);
        if (!found) fail("version %d does not write '%s'", version.number, name.c_str());
        const Problem::Slot& slot = *found;
        const Reference& tensor = p->find((slot.role == Problem::UPDATE ? "new " : "") + name);
        std::vector<float> ours = slot.floats(slot.copies[0]), theirs = p->arranged(tensor);
        ours.erase(ours.begin(), ours.begin() + first);
        size_t C = tensor.shape.size() > 1 ? (size_t)tensor.shape[1] : 1,
               inner = tensor.shape.size() > 1 ? theirs.size() / tensor.shape[0] / C : 1;
        if (p->layout == NHWC && tensor.shape.size() > 2) inner = 1;  // the channels are last
        for (size_t part = 0; part < parts; part++) {
            double error = error_of(ours, theirs, slot.role == Problem::SUM ? 1.5 : 1.0, [=](size_t i) {
                return parts == 1 || i / inner % C * parts / C == part;
            });
            double limit = version.limit > 0              ? version.limit
                           : version.type != BF16         ? 1e-5
                           : slot.bytes == 4 * slot.count ? 1e-4
                                                          : 1e-2;
            if (std::isnan(error)) return {NAN, limit};
            if (error / limit >= worst.error / worst.limit) worst = {error, limit};
        }
    }
    return worst;
}

// Whether a second run, on the same inputs and behind other scratch, leaves the same bits.
static bool repeats(Problem* p, const Version& version) {
    auto results = [&] {
        std::vector<std::vector<float>> values;
        for (auto& [name, slot] : p->slots)
            if (slot.role != Problem::IN && slot.role != Problem::SCRATCH)
                values.push_back(slot.floats(slot.copies[0]));
        return values;
    };
    auto before = results();
    for (auto& [name, slot] : p->slots)
        if (slot.role != Problem::IN && slot.role != Problem::SCRATCH) slot.fill(slot.copies[0]);
    run_version(p, version);
    auto after = results();
    for (size_t i = 0; i < before.size(); i++)
        if (memcmp(before[i].data(), after[i].data(), before[i].size() * sizeof(float))) return false;
    return true;
}

// Microseconds of a launch.
static double time_version(Problem* p, const Version& version) {
    size_t launches = 1;
    if (!p->on_cpu) {
        size_t cache = 1 << 20;
#ifdef __CUDACC__
        cache = (size_t)device_attribute(cudaDevAttrL2CacheSize);
#endif
        launches = std::max((size_t)10, p->make_copies(2 * cache, 200));
    }
    p->frozen = true;
    auto all = [&] {
        for (p->turn = 0; p->turn < launches; p->turn++) call_version(p, version);
    };
    double us = 0;
    if (p->on_cpu) {  // twice at least, half a second at most
        std::vector<float> times;
        for (double start = seconds_now();
             times.size() < 2 || (times.size() < 20 && seconds_now() < start + 0.5);) {
            double begin = seconds_now();
            all();
            times.push_back((float)(1e6 * (seconds_now() - begin)));
        }
        us = median(times);
    } else
        us = 1e3 * time_replays(all) / (double)launches;
    p->frozen = false, p->turn = 0;
    return us;
}

// ---- the table --------------------------------------------------------------------------------------------

struct Row {
    std::string version, layout, type, error, idea;
    double us;
};

// Markdown that is aligned in a terminal too.
static void print_table(const std::string& title, const std::vector<Row>& rows, Work work, double floor_us) {
    bool rates = work.operations > 0, on_gpu = floor_us > 0;
    const char* unit = !rates ? "GB/s" : on_gpu ? "TFLOP/s" : "GFLOP/s";
    int decimals = !on_gpu ? 1 : rates ? 2 : 0;
    std::vector<std::vector<std::string>> cells = {
        {"version", "layout", "type", "error", "us", unit, on_gpu ? "of the floor" : "", "idea"}};
    for (const Row& row : rows) {
        double rate = rates ? work.operations / row.us * (on_gpu ? 1e-6 : 1e-3) : work.bytes / row.us * 1e-3;
        cells.push_back({row.version, row.layout, row.type, row.error, row.us > 0 ? text("%.1f", row.us) : "",
                         row.us > 0 ? text("%.*f", decimals, rate) : "",
                         row.us > 0 && on_gpu ? text("%.1f%%", 100 * floor_us / row.us) : "",
                         row.idea});
    }
    std::vector<size_t> width(cells[0].size());
    for (auto& row : cells)
        for (size_t i = 0; i < row.size(); i++) width[i] = std::max(width[i], row[i].size());
    printf("\n%s%s\n\n", title.c_str(), floor_us > 0 ? text(": floor %.3g us", floor_us).c_str() : "");
    for (size_t n = 0; n < cells.size(); n++) {
        for (size_t i = 0; i < width.size(); i++)
            printf(i >= 3 && i <= 6 ? "| %*s " : "| %-*s ", (int)width[i], cells[n][i].c_str());
        printf("|\n");
        for (size_t i = 0; n == 0 && i < width.size(); i++)
            printf(i >= 3 && i <= 6 ? "|%s:" : "|%s",
                   std::string(width[i] + (i >= 3 && i <= 6 ? 1 : 2), '-').c_str());
        if (n == 0) printf("|\n");
    }
}

// Checks and times what the command line names; 1 if a check failed.
static int run_ladder(const Ladder& ladder, int argc, char** argv) {
    std::string wanted_case = argc > 2 ? argv[2] : "";
    int wanted = argc > 1 && strcmp(argv[1], "all") != 0 ? atoi(argv[1]) : -1;
    if (argc > 1 && wanted == 0 && strcmp(argv[1], "0") != 0 && strcmp(argv[1], "all") != 0)
        fail_usage("usage: ./%s [version|all] [case]", ladder.stem);
    backend_init();
#ifdef PROGRAM
    allocate_workspace(), cpu::allocate_cpu_workspace();
#endif
    const char* folder = getenv("DEV_DATA");  // where X.py writes
    auto cases =
        read_cases(std::string(folder ? folder : "../build/dev") + "/" + ladder.stem + ".bin", ladder.stem);
    double bandwidth = 0, peak = 0;
    std::string names;
#if defined(__CUDACC__) && defined(PROGRAM)
    kernels_await_inputs = false;  // those of the ladders don't
#endif
#ifdef __CUDACC__
    bandwidth = copy_bandwidth(), peak = backend_peak();
#endif
    printf("%s on %s\n", ladder.stem, backend_name().c_str());
    if (bandwidth > 0)
        printf("floors: %.0f GB/s of a copy measured here%s\n", bandwidth,
               peak > 0 ? text(", %.0f TFLOP/s", peak).c_str() : "");
    int checked = 0, failed = 0;
    for (auto& [name, data] : cases) {
        names += " " + name;
        if (!wanted_case.empty() && name != wanted_case) continue;
        bool timed = data.count("timed") != 0;      // large: not for the CPU's version beside kernels
        bool last_only = data.count("model") != 0;  // one of the model's many shapes: for the program's alone
        for (const Pass& pass : ladder.passes) {
            if (name.compare(0, strlen(pass.of), pass.of)) continue;
            std::vector<Row> rows;
            Work work = {};
            int last = 0;
            const Case* shown = nullptr;  // without a GPU: the last of its cases
            for (auto& [other, of_other] : cases)
                if (!other.compare(0, strlen(pass.of), pass.of)) shown = &of_other;
            for (const Version& version : ladder.versions)
                if (!strcmp(version.pass, pass.name)) last = version.number;
            for (const Version& version : ladder.versions) {
                if (strcmp(version.pass, pass.name) || (wanted >= 0 && version.number != wanted)) continue;
                if (last_only && wanted < 0 && version.number != last) continue;
                bool on_cpu = version.type == CPU_FP32;
#ifdef __CUDACC__
                if (on_cpu && timed && wanted < 0) continue;  // asked for by number, it may take seconds
#endif
                Problem p;
                p.data = &data, p.layout = version.layout, p.on_cpu = on_cpu;
                work = pass.work(p);
                if (version.suits && !version.suits(p)) continue;
                Measured measured = measure(&p, version, pass);
                bool same = version.bits == ATOMICS || repeats(&p, version), good = measured.good() && same;
                checked++, failed += !good;
                printf("%s %s %s version %d, %s: error %.1e of %.0e allowed%s\n", good ? "ok" : "FAIL",
                       ladder.stem, pass.name, version.number, name.c_str(), measured.error, measured.limit,
                       same ? "" : ", other bits in a second run");
                fflush(stdout);
                bool time = good && (timed || &data == shown || !wanted_case.empty());
                rows.push_back({text("%d", version.number), version.layout == NCHW ? "NCHW" : "NHWC",
                                on_cpu                 ? "CPU fp32"
                                : version.type == BF16 ? "bf16"
                                                       : "fp32",
                                text("%.0e", measured.error), version.idea,
                                time ? time_version(&p, version) : 0});
            }
            if (rows.empty() || !(timed || &data == shown || !wanted_case.empty())) continue;
            std::string theirs = std::string("PyTorch ") + pass.name;
            for (auto& [key, tensor] : data)  // what X.py measured here: "PyTorch forward, bf16 ..."
                if (key.compare(0, theirs.size(), theirs) == 0)
                    rows.push_back({"PyTorch", "", "", "",
                                    key.substr(std::min(key.size(), theirs.size() + 2)),
                                    (double)tensor.values[0]});
            double floor_us = 0;
            if (bandwidth > 0) floor_us = 1e-3 * work.bytes / bandwidth;
            if (peak > 0) floor_us = std::max(floor_us, 1e-6 * work.operations / peak);
            std::string shape;
            for (auto& [key, tensor] : data)
                if (tensor.shape.empty() && key != "timed" && key != "model" && key.compare(0, 7, "PyTorch"))
                    shape += text(" %s=%.0f", key.c_str(), tensor.values[0]);
            print_table(
                text("%s %s, %s (%s)", ladder.stem, pass.name, name.c_str(), shape.c_str() + !shape.empty()),
                rows, work, floor_us);
            printf("\n");
        }
    }
    if (!checked) fail_usage("nothing of that name or number; the cases are:%s", names.c_str());
    printf("%d passed, %d failed\n", checked - failed, failed);
    return failed ? 1 : 0;
}

// At the end of X.cu. dev/all.cu holds every ladder, to compile the program's kernels once for all of them.
#ifdef ALL_LADDERS
#define LADDER_MAIN(ladder)
#else
#define LADDER_MAIN(ladder) \
    int main(int argc, char** argv) { return guarded([&] { return run_ladder(ladder, argc, argv); }); }
#endif
