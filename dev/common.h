// What every ladder of dev/ shares: it reads the file of PyTorch's numbers, runs a version, checks it, times it and
// prints the table. A ladder by itself takes what it needs from standalone.h. With PROGRAM defined it includes the
// whole program instead, and its last version is the program's own function, not a copy of it.
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
// X.cu lists its passes (what is computed: outputs, work) and its versions (how). gelu.cu is a small one to begin with.
//
// Timing      Caches are cold: every launch takes the next of several copies of inputs and outputs, which together
//             are more than twice as large as the second-level cache. A CUDA graph of many launches is replayed, three
//             times to warm up, then up to twenty times, and the median counts. A version's scratch is not copied.
// Floor       The time that the work of a pass would take if each input were read once and each output written
//             once, at the bandwidth of a copy measured here; or the time of its operations at the rate of the GPU's
//             data sheet, if that is longer. All versions of a pass have the same floor: that of the program's
//             precision.
// Checks      The error of a tensor is the larger of |a - r|_2 / |r|_2 and max|a - r| / max|r|; NaN fails.
//             What a version overwrites is NaN before. What it adds to holds half of the expected values before.
//             A second run must give the same bits, except by versions that are marked ATOMICS.
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
#include <set>
#include <type_traits>

// The order of a tensor's dimensions in memory, if it has three or more. A 3x3 weight is (O, C, 3, 3) or (O, 3, 3, C).
enum Layout { NCHW, NHWC };

#ifdef __CUDACC__
static int device_attribute(cudaDeviceAttr attribute) {
    int device = 0;
    int value = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

// sum (4, 4) += a (4) times b (4), both 16-byte aligned. This is the core of a product whose tiles are in shared
// memory.
__device__ static inline void add_outer_product(float sum[4][4], const float* a, const float* b) {
    float4 x = *(const float4*)a;
    float4 y = *(const float4*)b;
    const float column[4] = {x.x, x.y, x.z, x.w};
    const float row[4] = {y.x, y.y, y.z, y.w};
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

// Reads the file piece by piece, and knows how many bytes are left.
struct CaseReader {
    Reader in;
    std::string stem;
    size_t left = in.size;

    void read(void* to, size_t bytes) {
        if (bytes > left)
            fail("%s is truncated; make it anew with: python3 %s.py", in.path.c_str(), stem.c_str());
        in.read(to, bytes);
        left -= bytes;
    }

    int read_int() {
        int32_t n = 0;
        read(&n, sizeof n);
        return n;
    }

    std::string read_name() {
        int length = std::min(std::max(read_int(), 0), 1000);
        std::string name((size_t)length, ' ');
        read(&name[0], name.size());
        return name;
    }

    Reference read_tensor() {
        Reference tensor;
        size_t count = 1;
        for (int ndim = read_int(); ndim > 0; ndim--) {
            int size = read_int();
            if (size <= 0 || count > left) fail("%s is damaged", in.path.c_str());
            tensor.shape.push_back(size);
            count *= (size_t)size;
        }
        if (count > left / sizeof(float)) fail("%s is truncated; make it anew", in.path.c_str());
        tensor.values.resize(count);
        read(tensor.values.data(), count * sizeof(float));
        return tensor;
    }
};

// The cases in the order of the file, each with its name.
static std::vector<std::pair<std::string, Case>> read_cases(const std::string& path, const std::string& stem) {
    if (!file_exists(path)) fail("%s is not there; make it with: python3 %s.py", path.c_str(), stem.c_str());
    CaseReader file = {Reader(path), stem};
    if (file.read_int() != 20241127) fail("%s was not written by dev/common.py", path.c_str());

    std::vector<std::pair<std::string, Case>> cases;
    while (file.left) {
        std::string name = file.read_name();  // "case/tensor"
        size_t slash = name.rfind('/');
        std::string case_name = name.substr(0, slash);
        std::string tensor_name = name.substr(slash + 1);

        if (cases.empty() || cases.back().first != case_name) cases.push_back({case_name, {}});
        cases.back().second[tensor_name] = file.read_tensor();
    }
    return cases;
}

// ---- a problem: the tensors of a case as a version sees them ----------------------------------------------

// A version asks for its tensors by name: p.in<T>("x"), p.out<T>("out"), p.sum<float>("dw"), p.scratch<T>("s", n). It
// has them in the type and layout of its choice, and the conversion from PyTorch's numbers is not in its time. At every
// launch that is timed, the same names stand for the next copy.
//
// Several tensors of the file can be asked for as one piece of memory, in which they follow each other:
// p.in<T>("weights", {"w", "bias"}).
typedef std::vector<std::string> Names;
struct Problem {
    enum Role { IN, OUT, SUM, UPDATE, SCRATCH };

    // What one name stands for.
    struct Slot {
        Role role;
        size_t count, bytes;
        Names tensors;  // of the file, which follow each other in memory
        std::vector<char*> copies;
        std::function<void(char*)> fill;                        // gives a copy the values that a version finds there
        std::function<std::vector<float>(const char*)> floats;  // reads a copy back
    };

    const Case* data = nullptr;
    Layout layout = NHWC;  // the version's
    bool on_cpu = true;
    std::map<std::string, Slot> slots;
    size_t turn = 0;      // counts the launches that are timed
    bool frozen = false;  // nothing may be allocated while launches are recorded

    ~Problem() {
        for (auto& [name, slot] : slots)
            for (char* copy : slot.copies) backend_free(copy, on_cpu);
    }

    int dim(const char* name) const { return (int)find(name).values.at(0); }
    bool has(const char* name) const { return data->count(name); }

    // To be read.
    template <typename T>
    const T* in(const std::string& name, const Names& tensors = {}) {
        return get<T>(name, IN, tensors);
    }

    // To be overwritten.
    template <typename T>
    T* out(const std::string& name, const Names& tensors = {}) {
        return get<T>(name, OUT, tensors);
    }

    // To be added to.
    template <typename T>
    T* sum(const std::string& name, const Names& tensors = {}) {
        return get<T>(name, SUM, tensors);
    }

    // To be changed in place, into what the file calls "new NAME".
    template <typename T>
    T* update(const std::string& name) {
        return get<T>(name, UPDATE, {});
    }

    template <typename T>
    T* scratch(const std::string& name, size_t count) {
        return get<T>(name, SCRATCH, {}, count);
    }

#ifdef PROGRAM
    // The same as tensors, which the program's layers take. What a layer reads is not const there, but it does not
    // change.
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

    // The tensor's values in the version's layout. In NHWC the channels, axis 1 of three or more, go last.
    std::vector<float> arranged(const Reference& tensor) const {
        if (layout == NCHW || tensor.shape.size() < 3) return tensor.values;
        size_t N = (size_t)tensor.shape[0];
        size_t C = (size_t)tensor.shape[1];
        size_t T = tensor.values.size() / (N * C);
        std::vector<float> values(tensor.values.size());
#pragma omp parallel for
        for (size_t n = 0; n < N; n++)
            for (size_t t = 0; t < T; t++)
                for (size_t c = 0; c < C; c++)
                    values[(n * T + t) * C + c] = tensor.values[(n * C + c) * T + t];
        return values;
    }

    char* allocate(size_t bytes) const { return (char*)backend_allocate(bytes, on_cpu); }

    void put(char* to, const void* from, size_t bytes) const {
        if (on_cpu)
            memcpy(to, from, bytes);
        else
            backend_upload(to, from, bytes);
    }

    // The memory that `name` stands for in this launch. It is allocated and filled when it is asked for first.
    template <typename T>
    T* get(const std::string& name, Role role, const Names& tensors, size_t count = 0) {
        auto found = slots.find(name);
        if (found == slots.end()) found = slots.emplace(name, new_slot<T>(name, role, tensors, count)).first;

        Slot& slot = found->second;
        assert(slot.role == role && (role != SCRATCH || slot.bytes == count * sizeof(T)));
        return (T*)slot.copies[turn % slot.copies.size()];
    }

    template <typename T>
    Slot new_slot(const std::string& name, Role role, Names tensors, size_t count) {
        assert(!frozen);
        if (role != SCRATCH && tensors.empty()) tensors = {name};
        for (auto& tensor : tensors) count += find(tensor).values.size();

        Slot slot;
        slot.role = role;
        slot.count = count;
        slot.bytes = count * sizeof(T);
        slot.tensors = tensors;
        slot.fill = [=, this](char* copy) { fill<T>(copy, role, tensors, count); };
        slot.floats = [=, this](const char* copy) { return floats<T>(copy, count); };
        slot.copies.push_back(allocate_copy(slot));
        slot.fill(slot.copies[0]);
        return slot;
    }

    char* allocate_copy(const Slot& slot) const { return allocate(std::max(slot.bytes, (size_t)16)); }

    // What is overwritten, and scratch, is NaN before; what is added to holds half of what is expected.
    template <typename T>
    void fill(char* copy, Role role, const Names& tensors, size_t count) const {
        std::vector<char> bytes(count * sizeof(T), (char)255);  // NaN in float and bf16
        if (role != OUT && role != SCRATCH) {
            T* to = (T*)bytes.data();
            for (auto& tensor : tensors)
                for (float value : arranged(find(tensor))) {
                    if (role == SUM) value *= 0.5f;
                    *to++ = (T)value;
                }
        }
        put(copy, bytes.data(), bytes.size());
    }

    template <typename T>
    std::vector<float> floats(const char* copy, size_t count) const {
        std::vector<T> values(count);
        if (on_cpu)
            memcpy((void*)values.data(), copy, count * sizeof(T));
        else
            backend_download((void*)values.data(), copy, count * sizeof(T));
        return std::vector<float>(values.begin(), values.end());
    }

    // Where a computed tensor of the file is: in which slot (null: the version does not write it), and which of the
    // slot's elements is its first.
    struct Place {
        const Slot* slot = nullptr;
        size_t first = 0;
    };
    Place written(const std::string& tensor) const {
        for (auto& [name, slot] : slots) {
            if (slot.role == IN) continue;
            size_t first = 0;
            for (auto& other : slot.tensors) {
                if (other == tensor) return {&slot, first};
                first += find(other).values.size();
            }
        }
        return {};
    }

    // Makes so many copies of what is read and written that they take `bytes` together, but no more than `most`.
    size_t make_copies(size_t bytes, size_t most) {
        size_t of_one = 1;
        for (auto& [name, slot] : slots)
            if (slot.role != SCRATCH) of_one += slot.bytes;
        size_t copies = std::min(most, bytes / of_one + 2);

        for (auto& [name, slot] : slots) {
            if (slot.role == SCRATCH) continue;
            while (slot.copies.size() < copies) {
                char* copy = allocate_copy(slot);
                slot.copies.push_back(copy);
                backend_copy(copy, slot.copies[0], slot.bytes);
            }
        }
        return copies;
    }
};

// ---- ladders ----------------------------------------------------------------------------------------------

// What is computed: which tensors come out, and the work where nothing is read or written twice.
struct Pass {
    const char* name;                  // "forward", "backward"
    std::vector<const char*> outputs;  // see parse_output()
    std::function<Work(const Problem&)> work;
    const char* of = "";  // the pass is for the cases whose names begin so
};

enum Type { CPU_FP32, FP32, BF16 };
static const Type FLOATX = sizeof(floatX) == 2 ? BF16 : FP32;  // the program's precision

// Whether two runs give the same bits. With atomics the order of a sum changes from run to run.
enum Bits { SAME_BITS, ATOMICS };

// One way to compute it. A function takes its tensors from the problem. Everything else that it does is timed.
struct Version {
    int number;
    const char* pass;
    Layout layout;
    Type type;
    const char* idea;  // a line
    std::function<void(Problem&)> function;
    double limit = 0;  // the error that is allowed; 0: that of its type, see allowed_error()
    Bits bits = SAME_BITS;
    std::function<bool(const Problem&)> suits = nullptr;  // whether it takes the case's shape; null: any
};

struct Ladder {
    const char* stem;
    std::vector<Pass> passes;
    std::vector<Version> versions;
};

// ---- checks -----------------------------------------------------------------------------------------------

// The larger of |a - r|_2 / |r|_2 and max|a - r| / max|r|, taken of those elements for which counts(i), where r is
// `factor` times the reference; NaN if there is a NaN in either.
template <typename Counts>
static double error_of(const std::vector<float>& a, const std::vector<float>& r, double factor, Counts counts) {
    double difference = 0, size = 0;
    double worst = 0, largest = 0;
    for (size_t i = 0; i < r.size(); i++) {
        if (!counts(i)) continue;
        double expected = factor * r[i];
        double d = fabs(a[i] - expected);
        if (!(d < 1e30)) return NAN;
        difference += d * d;
        size += expected * expected;
        worst = std::max(worst, d);
        largest = std::max(largest, fabs(expected));
    }
    if (worst == 0) return 0;
    return std::max(sqrt(difference / size), worst / largest);
}

// One call. Layers of the program may leave work on the side stream, for which the main stream then waits.
static void call_version(Problem* p, const Version& version) {
    version.function(*p);
#ifdef PROGRAM
    wait_for(newest_event);
#endif
}

// One call, until it is done. The program's workspaces, in which layers have partial sums, hold NaN before it.
static void run_version(Problem* p, const Version& version) {
#if defined(__CUDACC__) && defined(PROGRAM)
    for (const Stream* each : {&main_stream, &side_stream})
        CUDA_CHECK(cudaMemsetAsync(each->workspace.base, 255, GPU_WORKSPACE_BYTES, main_stream.handle));
#endif
    call_version(p, version);
    backend_wait();
}

// An output of a pass, as the list of Pass says it:
//
//   "dx2?"              dx2, where the case has it
//   "statistics/2"      a tensor of two parts along its channels, each with an error of its own
//   "mean|statistics"   whichever of these the version writes
struct Output {
    std::string name;
    size_t parts;
    bool optional;
};
static Output parse_output(const Problem& p, const std::string& listed) {
    size_t bar = listed.find('|');
    if (bar != std::string::npos) {
        Output first = parse_output(p, listed.substr(0, bar));
        if (p.written(first.name).slot) return first;
        return parse_output(p, listed.substr(bar + 1));
    }
    size_t slash = listed.find('/');
    size_t mark = listed.find('?');
    std::string name = listed.substr(0, std::min(slash, mark));
    size_t parts = slash == std::string::npos ? 1 : (size_t)atoi(&listed[slash + 1]);
    return {name, parts, listed.back() == '?'};
}

// 1e-5 where all is fp32. Where inputs are bf16: 1e-2 for outputs in bf16, 1e-4 for outputs in fp32.
static double allowed_error(const Version& version, const Problem::Slot& slot) {
    if (version.limit > 0) return version.limit;
    if (version.type != BF16) return 1e-5;
    bool is_fp32 = slot.bytes == 4 * slot.count;
    return is_fp32 ? 1e-4 : 1e-2;
}

struct Measured {
    double error, limit;
    bool good() const { return error <= limit; }
};

// The errors of a computed tensor: one of each part.
static std::vector<double> errors_of(const Problem& p, const Output& output, const Problem::Place& place) {
    const Problem::Slot& slot = *place.slot;
    bool updated = slot.role == Problem::UPDATE;
    const Reference& tensor = p.find((updated ? "new " : "") + output.name);
    std::vector<float> theirs = p.arranged(tensor);
    std::vector<float> ours = slot.floats(slot.copies[0]);
    ours.erase(ours.begin(), ours.begin() + place.first);

    size_t C = 1;
    size_t inner = 1;  // elements between a channel and the next
    if (tensor.shape.size() > 1) {
        C = (size_t)tensor.shape[1];
        inner = theirs.size() / tensor.shape[0] / C;
    }
    if (p.layout == NHWC && tensor.shape.size() > 2) inner = 1;

    double factor = slot.role == Problem::SUM ? 1.5 : 1.0;  // a sum began with half
    std::vector<double> errors;
    for (size_t part = 0; part < output.parts; part++) {
        auto in_part = [=](size_t i) { return output.parts == 1 || i / inner % C * output.parts / C == part; };
        errors.push_back(error_of(ours, theirs, factor, in_part));
    }
    return errors;
}

// Runs the version once. Returns that error of its outputs that is nearest to its limit, or furthest past it.
static Measured measure(Problem* p, const Version& version, const Pass& pass) {
    run_version(p, version);
    Measured worst = {0, 1};
    for (const char* listed : pass.outputs) {
        Output output = parse_output(*p, listed);
        if (output.optional && !p->has(output.name.c_str())) continue;
        Problem::Place place = p->written(output.name);
        if (!place.slot) fail("version %d does not write '%s'", version.number, output.name.c_str());

        double limit = allowed_error(version, *place.slot);
        for (double error : errors_of(*p, output, place)) {
            if (std::isnan(error)) return {NAN, limit};
            if (error / limit >= worst.error / worst.limit) worst = {error, limit};
        }
    }
    return worst;
}

// Whether a second run, on the same inputs and with other values in scratch, leaves the same bits.
static bool repeats(Problem* p, const Version& version) {
    std::vector<Problem::Slot*> results;
    for (auto& [name, slot] : p->slots)
        if (slot.role != Problem::IN && slot.role != Problem::SCRATCH) results.push_back(&slot);

    std::vector<std::vector<float>> before;
    for (Problem::Slot* slot : results) {
        before.push_back(slot->floats(slot->copies[0]));
        slot->fill(slot->copies[0]);
    }
    run_version(p, version);
    for (size_t i = 0; i < results.size(); i++) {
        std::vector<float> after = results[i]->floats(results[i]->copies[0]);
        if (memcmp(before[i].data(), after.data(), after.size() * sizeof(float))) return false;
    }
    return true;
}

// ---- timing -----------------------------------------------------------------------------------------------

// Microseconds: the median of at least two runs, and of up to twenty if they fit into half a second.
template <typename Run>
static double time_on_cpu(Run run) {
    std::vector<float> times;
    double start = seconds_now();
    while (times.size() < 2 || (times.size() < 20 && seconds_now() < start + 0.5)) {
        double begin = seconds_now();
        run();
        times.push_back((float)(1e6 * (seconds_now() - begin)));
    }
    return median(times);
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
    auto launch_all = [&] {
        for (p->turn = 0; p->turn < launches; p->turn++) call_version(p, version);
    };

    p->frozen = true;
    double us = p->on_cpu ? time_on_cpu(launch_all) : 1e3 * time_replays(launch_all) / (double)launches;
    p->frozen = false;
    p->turn = 0;
    return us;
}

// ---- the table --------------------------------------------------------------------------------------------

struct Row {
    std::string version, layout, type, error, idea;
    double us;  // 0: not timed
};

// The cells of the header and of every row.
static std::vector<std::vector<std::string>> table_cells(const std::vector<Row>& rows, Work work, double floor_us) {
    bool on_gpu = floor_us > 0;
    bool counts_operations = work.operations > 0;  // otherwise bytes
    double amount = counts_operations ? work.operations : work.bytes;
    const char* unit = "GB/s";
    double to_unit = 1e-3;  // from a microsecond's amount
    int decimals = on_gpu ? 0 : 1;
    if (counts_operations) {
        unit = on_gpu ? "TFLOP/s" : "GFLOP/s";
        to_unit = on_gpu ? 1e-6 : 1e-3;
        decimals = on_gpu ? 2 : 1;
    }

    std::vector<std::vector<std::string>> cells = {
        {"version", "layout", "type", "error", "us", unit, on_gpu ? "of the floor" : "", "idea"}};
    for (const Row& row : rows) {
        std::string us, rate, of_floor;
        if (row.us > 0) {
            us = text("%.1f", row.us);
            rate = text("%.*f", decimals, amount / row.us * to_unit);
            if (on_gpu) of_floor = text("%.1f%%", 100 * floor_us / row.us);
        }
        cells.push_back({row.version, row.layout, row.type, row.error, us, rate, of_floor, row.idea});
    }
    return cells;
}

// Prints Markdown that is aligned in a terminal too. Columns 3 to 6 are numbers, which stand on the right.
static void print_table(const std::string& title, const std::vector<Row>& rows, Work work, double floor_us) {
    std::vector<std::vector<std::string>> cells = table_cells(rows, work, floor_us);
    auto is_number = [](size_t column) { return column >= 3 && column <= 6; };

    std::vector<size_t> width(cells[0].size());
    for (auto& row : cells)
        for (size_t i = 0; i < row.size(); i++) width[i] = std::max(width[i], row[i].size());

    auto print_row = [&](const std::vector<std::string>& row) {
        for (size_t i = 0; i < width.size(); i++)
            printf(is_number(i) ? "| %*s " : "| %-*s ", (int)width[i], row[i].c_str());
        printf("|\n");
    };
    auto print_rule = [&] {
        for (size_t i = 0; i < width.size(); i++) {
            if (is_number(i))
                printf("|%s:", std::string(width[i] + 1, '-').c_str());
            else
                printf("|%s", std::string(width[i] + 2, '-').c_str());
        }
        printf("|\n");
    };

    printf("\n%s%s\n\n", title.c_str(), floor_us > 0 ? text(": floor %.3g us", floor_us).c_str() : "");
    print_row(cells[0]);
    print_rule();
    for (size_t n = 1; n < cells.size(); n++) print_row(cells[n]);
}

// ---- a run of a ladder ------------------------------------------------------------------------------------

struct LadderRun {
    const Ladder& ladder;
    int wanted = -1;               // a version's number; -1: all
    std::string wanted_case = "";  // empty: all
    std::vector<std::pair<std::string, Case>> cases = {};
    double bandwidth = 0, peak = 0;  // of the GPU
    int checked = 0, failed = 0;

    // Checks and times every version that is wanted, in every case.
    void run() {
        for (auto& [name, data] : cases) {
            if (!wanted_case.empty() && name != wanted_case) continue;
            for (const Pass& pass : ladder.passes)
                if (name.starts_with(pass.of)) run_pass(pass, name, data);
        }
    }

    void run_pass(const Pass& pass, const std::string& name, const Case& data) {
        std::vector<Row> rows;
        Work work = {};
        bool timed = is_timed(pass, data);
        for (const Version& version : ladder.versions) {
            if (!is_wanted(version, pass, data)) continue;
            Problem p;
            p.data = &data;
            p.layout = version.layout;
            p.on_cpu = version.type == CPU_FP32;
            work = pass.work(p);
            if (version.suits && !version.suits(p)) continue;
            rows.push_back(check_and_time(pass, name, version, &p, timed));
        }
        if (rows.empty() || !timed) return;

        for (const Row& row : rows_of_pytorch(pass, data)) rows.push_back(row);
        std::string title = text("%s %s, %s (%s)", ladder.stem, pass.name, name.c_str(), sizes_of(data).c_str());
        print_table(title, rows, work, floor_us(work));
        printf("\n");
    }

    // Cases marked "model" are many, and only the last version, the program's, is checked in them. Cases marked "timed"
    // are large, and where there are kernels, not for the CPU's version. A version that is asked for by its number is
    // checked in all of them, which may take seconds.
    bool is_wanted(const Version& version, const Pass& pass, const Case& data) const {
        if (strcmp(version.pass, pass.name) != 0) return false;
        if (wanted >= 0) return version.number == wanted;
        if (data.count("model") && version.number != last_version_of(pass)) return false;
#ifdef __CUDACC__
        if (data.count("timed") && version.type == CPU_FP32) return false;
#endif
        return true;
    }

    // What the command line can name.
    std::string choices() const {
        std::set<int> numbers;
        for (const Version& version : ladder.versions) numbers.insert(version.number);

        std::string versions, names;
        for (int number : numbers) versions += text(" %d", number);
        for (auto& [name, data] : cases) names += " '" + name + "'";
        std::string found = "the versions are" + versions + " and the cases" + names;
#ifndef PROGRAM
        found += text("; make %s_program also builds the versions that need the program", ladder.stem);
#endif
        return found;
    }

    int last_version_of(const Pass& pass) const {
        int last = 0;
        for (const Version& version : ladder.versions)
            if (!strcmp(version.pass, pass.name)) last = version.number;
        return last;
    }

    // Timed are the large cases, one that was asked for by name, and a pass's last case: without a GPU the file has no
    // large ones.
    bool is_timed(const Pass& pass, const Case& data) const {
        if (data.count("timed") || !wanted_case.empty()) return true;
        const Case* last = nullptr;
        for (auto& [name, other] : cases)
            if (name.starts_with(pass.of)) last = &other;
        return &data == last;
    }

    Row check_and_time(const Pass& pass, const std::string& name, const Version& version, Problem* p, bool timed) {
        Measured measured = measure(p, version, pass);
        bool same = version.bits == ATOMICS || repeats(p, version);
        bool good = measured.good() && same;
        checked++;
        if (!good) failed++;
        printf("%s %s %s version %d, %s: error %.1e of %.0e allowed%s\n", good ? "ok" : "FAIL", ladder.stem, pass.name,
               version.number, name.c_str(), measured.error, measured.limit,
               same ? "" : ", other bits in a second run");
        fflush(stdout);

        const char* layout = version.layout == NCHW ? "NCHW" : "NHWC";
        const char* type = version.type == BF16 ? "bf16" : "fp32";
        if (p->on_cpu) type = "CPU fp32";
        double us = good && timed ? time_version(p, version) : 0;
        return {text("%d", version.number), layout, type, text("%.0e", measured.error), version.idea, us};
    }

    // What X.py measured on this machine: "PyTorch forward, bf16 ..." in microseconds.
    static std::vector<Row> rows_of_pytorch(const Pass& pass, const Case& data) {
        std::vector<Row> rows;
        std::string prefix = std::string("PyTorch ") + pass.name;
        for (auto& [key, tensor] : data) {
            if (!key.starts_with(prefix)) continue;
            std::string idea = key.substr(std::min(key.size(), prefix.size() + 2));  // behind the comma
            rows.push_back({"PyTorch", "", "", "", idea, (double)tensor.values[0]});
        }
        return rows;
    }

    // "B=32 C=64 ...", for the table's title.
    static std::string sizes_of(const Case& data) {
        std::string sizes;
        for (auto& [key, tensor] : data) {
            if (!tensor.shape.empty() || key == "timed" || key == "model" || key.starts_with("PyTorch")) continue;
            if (!sizes.empty()) sizes += " ";
            sizes += text("%s=%.0f", key.c_str(), tensor.values[0]);
        }
        return sizes;
    }

    // The least time in which the GPU could do the work: the longer of its bytes' and its operations'. 0: not known.
    double floor_us(Work work) const {
        double us = 0;
        if (bandwidth > 0) us = 1e-3 * work.bytes / bandwidth;
        if (peak > 0) us = std::max(us, 1e-6 * work.operations / peak);
        return us;
    }
};

// Checks and times what the command line names; 1 if a check failed.
static int run_ladder(const Ladder& ladder, int argc, char** argv) {
    LadderRun run = {.ladder = ladder};
    if (argc > 1 && strcmp(argv[1], "all") != 0) {
        run.wanted = atoi(argv[1]);
        if (run.wanted == 0 && strcmp(argv[1], "0") != 0)
            fail_usage("usage: ./%s [version|all] [case]", ladder.stem);
    }
    if (argc > 2) run.wanted_case = argv[2];

    backend_init();
#ifdef PROGRAM
    allocate_workspace();
    cpu::allocate_cpu_workspace();
#endif
    const char* folder = getenv("DEV_DATA");  // where X.py writes
    if (!folder) folder = "../build/dev";
    run.cases = read_cases(std::string(folder) + "/" + ladder.stem + ".bin", ladder.stem);

#if defined(__CUDACC__) && defined(PROGRAM)
    kernels_await_inputs = false;  // kernels of the ladders don't wait for the one before, as the program's do
#endif
#ifdef __CUDACC__
    run.bandwidth = copy_bandwidth();
    run.peak = backend_peak();
#endif
    printf("%s on %s\n", ladder.stem, backend_name().c_str());
    if (run.bandwidth > 0) {
        std::string peak = run.peak > 0 ? text(", %.0f TFLOP/s", run.peak) : "";
        printf("floors: %.0f GB/s of a copy measured here%s\n", run.bandwidth, peak.c_str());
    }

    run.run();
    if (!run.checked) fail_usage("there is no such version or case here; %s", run.choices().c_str());
    printf("%d passed, %d failed\n", run.checked - run.failed, run.failed);
    return run.failed ? 1 : 0;
}

// At the end of X.cu. dev/all.cu holds every ladder, to compile the program's kernels once for all of them.
#ifdef ALL_LADDERS
#define LADDER_MAIN(ladder)
#else
#define LADDER_MAIN(ladder) \
    int main(int argc, char** argv) { return guarded([&] { return run_ladder(ladder, argc, argv); }); }
#endif
