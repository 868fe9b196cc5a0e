// What a training step's time goes to: by kind of kernel, and by block of the network.
//
//   make profile                            in the folder above: builds and runs this
//   make profile FLAGS="--batch_size 1"     with flags of the program
//   make profile FLAGS="--profile_trace step.json"
//                                           also writes one step's timeline, a row a stream, in Chrome's trace
//                                           format: chrome://tracing and ui.perfetto.dev open it. The events
//                                           make the step longer: on an H100 8.3 ms instead of 6.1
//   make profile FLAGS="--profile_calls 1,2,4"
//                                           only times a call of the network with so many images
//
// It is the program with hooks in its launchers. A launcher opens a scope at its head, PROFILE("3x3 dW", {operations,
// bytes}) or PROFILE(layer), that lasts until it returns; a scope within another is a part of it. PROFILE(name) says of
// which block of the network the scopes within it are. On a GPU events in the step's graph take the times.
#define PROFILING
#define PROFILE(...) auto profile_scope = open_scope(__VA_ARGS__)
#define LAUNCH_CHECK() (count_launch(), CUDA_CHECK(cudaGetLastError()))

#include <cstddef>

struct Work;
struct LauncherScope {
    ~LauncherScope();
};
struct BlockScope {
    ~BlockScope();
};
static LauncherScope open_scope(const char* kind, const Work& work);
static BlockScope open_scope(const char* name);
template <typename Layer> static LauncherScope open_scope(const Layer& layer);
static void count_launch();
static void run_program(int argc, char** argv);

#include "work.h"

// ---- what the hooks note ----------------------------------------------------------------------------------

// A point in the work that the device is given. Where that work is recorded, the stamp becomes a node of the graph, and
// each replay takes its time anew. Its event was made when the work was done before, without a graph.
#ifdef __CUDACC__
typedef cudaEvent_t Stamp;

static void take_stamp(Stamp* stamp) {
    cudaStreamCaptureStatus capturing;
    CUDA_CHECK(cudaStreamIsCapturing(stream->handle, &capturing));
    bool is_recorded = capturing != cudaStreamCaptureStatusNone;
    if (!*stamp) CUDA_CHECK(cudaEventCreate(stamp));
    CUDA_CHECK(cudaEventRecordWithFlags(*stamp, stream->handle,
                                        is_recorded ? cudaEventRecordExternal : cudaEventRecordDefault));
}

static double milliseconds_between(Stamp begin, Stamp end) {
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    return ms;
}

static bool is_side_stream() { return stream == &side_stream; }
#else
typedef double Stamp;
static void take_stamp(Stamp* stamp) { *stamp = seconds_now(); }
static double milliseconds_between(Stamp begin, Stamp end) { return 1e3 * (end - begin); }
static bool is_side_stream() { return false; }
#endif

// A scope of the step: what it is counted among, and its times.
struct Entry {
    std::string kind, block;
    Work work;
    int launches = 0;
    bool side;  // launched on the side stream
    Stamp begin = {}, end = {};
    std::vector<float> ms = {};  // of each repetition
};
static std::vector<Entry> entries;  // in the order of the step
static bool measuring = false;      // false: the hooks do nothing
static const char* block = "step";  // of the network, under way
static size_t opened = 0;           // scopes of the step that were opened
static int depth = 0;               // scopes that are open
static int uncounted = 0;           // launches outside of any scope

static LauncherScope open_scope(const char* kind, const Work& work) {
    if (!measuring) return {};
    depth++;
    if (depth > 1) return {};

    bool is_new = opened == entries.size();
    if (is_new) entries.push_back({.kind = kind, .block = block, .work = work, .side = is_side_stream()});
    Entry* entry = &entries[opened];
    opened++;
    entry->launches = 0;
    take_stamp(&entry->begin);
    return {};
}

LauncherScope::~LauncherScope() {
    if (measuring) {
        depth--;
        if (depth == 0) take_stamp(&entries[opened - 1].end);
    }
#ifdef __CUDACC__
    if (depth == 0) flush_deferred();  // a scope of its own
#endif
}

static BlockScope open_scope(const char* name) {
    block = name;
    return {};
}

BlockScope::~BlockScope() {
#ifdef __CUDACC__
    if (measuring) flush_deferred();  // so that it is counted for this block; otherwise when the program would
#endif
    block = "step";
}

static void count_launch() {
    if (!measuring) return;
    if (depth) entries[opened - 1].launches++;
    else uncounted++;
}

// ---- the layers that are written once: what they are counted among, and the bytes that must move ----------
struct Kind {
    const char* name = "other";
    double bytes = 0;
};

static Kind kind_of(...) { return {}; }

template <typename T> static Kind kind_of(const TimestepEmbedding<T>& l) {
    return {"embedding, SiLU", (double)sizeof(T) * l.out.count()};
}

template <typename T> static Kind kind_of(const SiluForward<T>& l) {
    return {"embedding, SiLU", 2.0 * sizeof(T) * l.x.count()};
}

template <typename T> static Kind kind_of(const SiluBackward<T>& l) {
    return {"embedding, SiLU", 3.0 * sizeof(T) * l.x.count()};
}

template <typename T> static Kind kind_of(const LabelForward<T>& l) {
    return {"embedding, SiLU", 2.0 * sizeof(T) * l.out.count()};
}

template <typename T> static Kind kind_of(const LabelBackward<T>& l) {
    return {"embedding, SiLU", 1.0 * sizeof(T) * l.dout.count()};
}

template <typename T> static Kind kind_of(const Resample<T>& l) {
    return {"resampling", (double)sizeof(T) * (l.x.count() + (l.accumulate ? 2 : 1) * l.out.count())};
}

template <typename T> static Kind kind_of(const AddNoise<T>& l) {
    return {"noising", (2.0 * sizeof(float) + sizeof(T)) * l.channels * l.x_t.rows()};
}

template <typename T> static Kind kind_of(const PredictionLoss<T>& l) {
    double bytes = (sizeof(float) + (l.dout ? 2.0 : 1.0) * sizeof(T)) * PIXEL;  // of a pixel
    if (l.images) bytes += sizeof(float) * l.batch.channels;
    return {"loss", bytes * l.batch.B * l.batch.pixels};
}

template <typename T> static Kind kind_of(const Dropout<T>& l) {
    return {"dropout", 2.0 * sizeof(T) * l.x.count()};
}

template <typename T> static Kind kind_of(const ModulationBackward<T>& l) {
    return {"group norm sums",
            (double)sizeof(Moments) * l.norm.x.first.B * norm_tiles(l.norm.x.first.T()) * l.norm.x.C()};
}

static Kind kind_of(const AddFloats& l) { return {"gradients of parts", 3.0 * sizeof(float) * l.n}; }
static Kind kind_of(const SquaredNorm& l) { return {"gradient norm", (double)sizeof(float) * l.n}; }

template <typename T> static Kind kind_of(const UpdateWeights<T>& l) {
    double bytes = 7.0 * sizeof(float) + (l.working ? sizeof(T) : 0);
    for (float* mean : l.memory.ema) bytes += mean ? 2 * sizeof(float) : 0;
    return {"AdamW", bytes * l.n};
}

static Kind kind_of(const BeginStep&) { return {"begin, images, end", 0}; }
static Kind kind_of(const LoadImages& l) { return {"begin, images, end", (sizeof(float) + 1.0) * l.items()}; }
static Kind kind_of(const FinishStep&) { return {"begin, images, end", 0}; }

#ifdef DIT
template <typename T> static Kind kind_of(const LayerNormForward<T>& l) {
    return {"layer norm", 2.0 * sizeof(T) * l.x.count()};
}

template <typename T, bool BEGINS, bool ENDS> static Kind kind_of(const StreamBackward<T, BEGINS, ENDS>& l) {
    int tensors = (l.around.data != nullptr) + 4 * BEGINS + 2 * ENDS;
    return {"norms and gates backward", (double)tensors * sizeof(T) * l.dx.count()};
}

template <typename T> static Kind kind_of(const SlabSums<T>& l) {
    return {"norms and gates backward", (double)sizeof(float) * l.B * l.slabs * l.C};
}

template <typename T> static Kind kind_of(const Gate<T>& l) {
    return {"gate", 3.0 * sizeof(T) * l.out.count()};
}

template <typename T> static Kind kind_of(const GeluForward<T>& l) {
    return {"GELU", 2.0 * sizeof(T) * l.x.count()};
}

template <typename T, bool AGAIN> static Kind kind_of(const GeluBackward<T, AGAIN>& l) {
    return {"GELU", (3.0 + AGAIN) * sizeof(T) * l.x.count()};
}
#endif

template <typename Layer> static LauncherScope open_scope(const Layer& layer) {
    Kind kind = kind_of(layer);
    return open_scope(kind.name, Work{0, kind.bytes});
}

// ---- what is measured and printed -------------------------------------------------------------------------

// Fills `entries` with a training step and the times of 20 repetitions, or of as many as fit into ten seconds, at the
// least three.
static void measure_entries(Trainer* t) {
    entries.clear();
    const int WARMUP = STEPS_IN_FLIGHT;  // on the GPU the second is recorded
    const int RUNS = 20;
    Graph graph;
    double start = seconds_now();
    for (int n = 0; n < WARMUP + RUNS; n++) {
        bool is_late = seconds_now() - start >= 10;
        if (n >= WARMUP + 3 && is_late) break;

        launch_graph(&graph, [&] {
            measuring = true;
            opened = 0;
            uncounted = 0;
            enqueue_step(t, objective_of(t->model.config, t->step));
            measuring = false;
        });
        mark_step_end(0);
        wait_for_step(0);
        if (n < WARMUP) continue;
        for (Entry& entry : entries) entry.ms.push_back((float)milliseconds_between(entry.begin, entry.end));
    }
}

// Writes the last step measured, as events of Chrome's trace format: times in microseconds from the first on.
static void write_trace(const std::string& path) {
    std::string events;
    for (int tid : {0, 1})
        events += text("{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": 0, \"tid\": %d, "
                       "\"args\": {\"name\": \"%s stream\"}},\n", tid, tid ? "side" : "main");
    for (const Entry& e : entries) {
        double begin_us = 1e3 * milliseconds_between(entries[0].begin, e.begin);
        double duration_us = 1e3 * milliseconds_between(e.begin, e.end);
        events += text("{\"ph\": \"X\", \"name\": \"%s\", \"cat\": \"%s\", \"pid\": 0, \"tid\": %d, "
                       "\"ts\": %.2f, \"dur\": %.2f},\n",
                       e.kind.c_str(), e.block.c_str(), (int)e.side, begin_us, duration_us);
    }
    events.resize(events.size() - 2);  // without the last comma
    write_text(path, "{\"traceEvents\": [\n" + events + "\n]}\n");
    say("%s: the step's timeline, for chrome://tracing or ui.perfetto.dev", path.c_str());
}

// What the device can do: TFLOP/s, or 0 where that is not known, and GB/s of a copy.
struct Rates {
    double peak, bandwidth;
};

// A line of a table: some entries, summed up.
struct Row {
    std::string name;
    double launches = 0, ms = 0, floor_ms = 0, operations = 0, bytes = 0;

    void add(const Entry& e, const Rates& rates) {
        launches += std::max(1, e.launches);  // on the CPU a scope counts as one
        ms += median(e.ms);
        operations += e.work.operations;
        bytes += e.work.bytes;
        if (rates.peak)
            floor_ms += std::max(e.work.operations / rates.peak / 1e9, e.work.bytes / rates.bandwidth / 1e6);
    }

    // total_ms: that of all rows.
    void print_line(double total_ms, const Rates& rates) const {
        std::string floor = rates.peak ? text("%.0f%%", 100 * floor_ms / ms) : "-";
        printf("%-22s %8.0f %10.3f %6.1f%% %9.2f %9.1f %7s\n", name.c_str(), launches, ms, 100 * ms / total_ms,
               operations / ms / 1e9, bytes / ms / 1e6, floor.c_str());
    }
};

// Prints a table of the entries, summed up by the member `name`: in the order of the step, or the slowest first.
static void print_table(std::string Entry::*name, bool slowest_first, const Rates& rates) {
    std::vector<Row> rows;
    Row sum = {.name = "sum of the parts"};
    for (const Entry& e : entries) {
        auto row = std::ranges::find(rows, e.*name, &Row::name);
        if (row == rows.end()) row = rows.insert(row, {.name = e.*name});
        row->add(e, rates);
        sum.add(e, rates);
    }
    if (slowest_first) std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.ms > b.ms; });

    printf("\n%-22s %8s %10s %7s %9s %9s %7s\n", "", "launches", "ms", "share", "TFLOP/s", "GB/s", "floor");
    rows.push_back(sum);
    for (const Row& row : rows) row.print_line(sum.ms, rates);
}

// Makes a model with fresh weights that is to draw B pictures, and gives it noise and a timestep halfway.
static void prepare_drawing(Model* m, Config config, int B) {
    config.hyper.ema_rate[0] = 0;  // one set of weights is enough
    *m = plan_model(config, B, false);
    check_memory(*m);
    allocate_model(m);
    initialise_weights(m, config.seed);

    std::vector<SampleSpec> specs;
    for (uint32_t seed : consecutive(config.seed, B)) specs.push_back({seed, 0});
    backend_upload(m->sampler.specs, specs.data(), B * sizeof(SampleSpec));
    SamplerStep halfway = {.timestep = config.diffusion_steps / 2, .update = {.noise = 1}};
    run(SetModelInputs{m->timesteps, m->labels, m->sampler.specs, halfway.timestep, B, B, 0});
    run(UpdateSamples<floatX>{samples_of(m, B, 1), halfway});
}

// Prints the milliseconds of a call of the network, a line for each number of images. A graph on a GPU holds ten calls,
// which a sampler makes as close one after another: by itself, a short call would also count how long its launch takes.
static void print_calls(const Config& config, const std::string& list) {
#ifdef __CUDACC__
    const int CALLS = 10;
#else
    const int CALLS = 1;
#endif
    std::vector<uint32_t> batches = parse_list("profile_calls", list, most_images(config));
    if (std::ranges::count(batches, 0u)) fail_usage("--profile_calls times calls of an image or more");

    Model m;
    prepare_drawing(&m, config, (int)std::ranges::max(batches));
    for (uint32_t B : batches) {
        double ms = time_replays([&] {
            for (int n = 0; n < CALLS; n++) unet_forward(&m, call_of(&m, (int)B));
        });
        printf("one network call, batch %u: %.4f ms\n", B, ms / CALLS);
        fflush(stdout);
    }
}

// The flags of this program: the name of the trace, and the list of calls to time. The others are train_unet's.
struct ProfileFlags {
    std::string trace, calls;
    std::vector<std::string> others;
};

static ProfileFlags parse_profile_flags(int argc, char** argv) {
    ProfileFlags flags;
    for (int i = 1; i < argc; i++) {
        std::vector<std::string> words = split(argv[i], '=');
        bool is_calls = words[0] == "--profile_calls";
        bool is_trace = words[0] == "--profile_trace";
        if (!is_calls && !is_trace) {
            flags.others.push_back(argv[i]);
            continue;
        }

        if (words.size() == 1 && i + 1 < argc) {
            i++;
            words.push_back(argv[i]);
        }
        if (words.size() != 2 || words[1].empty())
            fail_usage("%s needs %s", words[0].c_str(), is_calls ? "numbers of images" : "the name of a file");
        if (is_calls) flags.calls = words[1];
        else flags.trace = words[1];
    }
    return flags;
}

// Makes a run that trains on grey images. The order of its images is drawn for as many epochs as there is room for;
// then these come again.
static void prepare_training(Trainer* t, const Config& config) {
    prepare_trial_run(t, config);
    for (int n = 0; n < t->source.slots; n++)
        random_permutation(t->order.get() + (size_t)n * t->source.count, t->source.count, config.seed, n);
}

// Times a training step on grey images and one call of the network as it is made to draw, then the parts of
// the step.
static void run_program(int argc, char** argv) {
    ProfileFlags flags = parse_profile_flags(argc, argv);
    Config config = given_config(parse_flags(flags.others));
    if (config.help != HELP_NONE) return print_help(config.help == HELP_ALL);
    backend_init();
    printf("%s on %s, batch %d\n", network.program, backend_name().c_str(), config.batch_size);
    check_config(config);
    if (!flags.calls.empty()) return print_calls(config, flags.calls);
    if (!flags.trace.empty()) Writer trial(flags.trace);  // what can't be written is better said now

    Rates rates = {.peak = backend_peak(), .bandwidth = copy_bandwidth()};
    int B = config.batch_size;
    double step_ms = time_step(config, B, 10);

    Model m;
    int drawn = microbatch_size(config);
    prepare_drawing(&m, config, drawn);
    double call_ms = time_replays([&] { unet_forward(&m, call_of(&m, drawn)); });
    size_t bytes_to_draw = memory_of(m);

    Trainer t;
    prepare_training(&t, config);
    if (!flags.trace.empty()) {
        measure_entries(&t);
        write_trace(flags.trace);
    }
#ifdef __CUDACC__
    side_stream.handle = main_stream.handle;  // from now on launches run one after another
#endif
    measure_entries(&t);
    size_t bytes_to_train = memory_of(t.model);

    printf(
        "floor: the longer of the time of the operations at the peak (%.3g TFLOP/s, 0: not known)\n"
        "and of the bytes at %.0f GB/s (a copy, measured now), each input and output moved once\n",
        rates.peak, rates.bandwidth);
    print_table(&Entry::kind, true, rates);
    print_table(&Entry::block, false, rates);
    if (uncounted) printf("launches that no line counts: %d\n", uncounted);

    printf("\n%-22s %.3f ms, %.1f images/s (without the profile; on a GPU a replay of its graph)\n",
           "one training step:", step_ms, 1e3 * B / step_ms);
    printf("%-22s %.3f ms, %.1f images/s (forward alone)\n", "one network call:", call_ms,
           1e3 * drawn / call_ms);
    const Plan& plan = t.model.plan;
    size_t ema_bytes = ema_count(config) * plan.num_floats * sizeof(float);
    printf("%-22s %.2f GFLOP an image and training step\n", "operations:", plan.flops / 1e9);
    printf("%-22s %.1f MiB to train, of which EMA %.1f MiB; %.1f MiB to draw\n", "memory:",
           bytes_to_train / 0x1p20, ema_bytes / 0x1p20, bytes_to_draw / 0x1p20);
}
