// train_unet.cu: trains a UNet diffusion model (DDPM) on images, from raw kernels to finished pictures, in
// one file. It includes unet_io.h (flags and files) and unet_cpu.h (the layers on a CPU).
//
//   make train_unet                     builds for the GPU where there is one, otherwise for the CPU
//   ./train_unet --data_file X.bin      trains; X.bin comes from prepare_data.py (default: the demo data)
//   ./train_unet --gpus 4               trains on four GPUs
//   ./train_unet --generate             draws pictures with the newest checkpoint
//   ./train_unet --help all             every flag with its default
//
// The network is the UNet of "Diffusion Models Beat GANs on Image Synthesis" (Dhariwal and Nichol, 2021), the
// training objective that of "Denoising Diffusion Probabilistic Models" (Ho, Jain and Abbeel, 2020).
// train_unet.py holds the same model in PyTorch; it checks this file and is never needed to run it.
//
// -----------------------------------------------------------------------------------------------------------
// Contracts: what every function here may rely on
//
// Names        B images a batch, H W height and width, C input and O output channels, T = H*W (in section 6 the
//              number of timesteps), E embedding width, G groups; x input, y or out output, w weight, dx dy dw
//              their gradients, mean rstd a group's statistics.
// Layout       Activations are NHWC. 3x3 weights lie in memory as (O, 3, 3, C) and in files as (O, C, 3, 3),
//              PyTorch's order; every other weight lies in memory as it does in files. The weights follow
//              each other in another order than in files: see place_parameters. An image's channels, and
//              their weights, are followed by zeros: see padded.
// Precision    floatX holds activations, their gradients and the working weights (float on the CPU), except
//              the weights of norms, which are never rounded. Weight gradients, optimiser state, statistics, loss
//              and every accumulator are float or wider.
// Gradients    A backward pass overwrites the weights' gradients. Where a batch goes through the network as several
//              micro-batches, their gradients are added up in pairs: see tree_gradient. An activation's gradient is
//              overwritten too, unless two blocks read the activation, as the decoder also reads an encoder's output.
//              Then the decoder's backward, which runs first, overwrites, and the encoder's adds: see Block.accumulate.
//              Within a block the first writer of a gradient does what Block.accumulate says, and the later ones add.
// Memory       Everything is sized from the plan and allocated once, before the first step. Activations,
//              their gradients and scratch take turns in one arena (Buffer). A layer never allocates.
//              Weight gradients are computed on a second CUDA stream, the side stream, beside what comes next. What
//              they read stays until they are done: see unet_backward.
// Layers       Declared once, in section 3. In unet_cpu.h namespace cpu::plain holds the specification of each,
//              namespace cpu what a CPU runs; namespace gpu, in the CUDA build, launchers of kernels that do the
//              same. Arguments: outputs, inputs, parameters, options by name. Tensors are values that know their
//              sizes; those of parameters follow from the tensors that they go with. Launchers own their geometry,
//              never synchronise, always check. A configuration has passed check_config before. Elementwise layers and
//              simple reductions are written once for both builds: structs that run() is called with.
// Randomness   A function of (seed, stream, step, sample, element), never a state: see Philox below. Dropout's stream
//              also depends on the block. Any step can be recomputed alone, and resuming needs no saved generator.
// Determinism  Same binary, seed, batch, micro-batch and kind of device: the same bits, whatever the number of
//              ranks (GPUs) and of a CPU's threads. Reductions run in an order that the shapes alone decide.
//
// -----------------------------------------------------------------------------------------------------------
// Contents
//
//   1  CONFIGURATION
//   2  MEMORY, TENSORS, RANDOMNESS: arenas; the machine; ranks; tensors; randomness
//   3  THE LAYERS, DECLARED: what layers take; the layers; layers written once for both builds
//   4  BLOCKS: a block's parameters; what a block reads and writes; embedding; first convolution; residual
//        block; attention block; up- and down-sampling; last block
//   5  PLAN, FORWARD AND BACKWARD: plan; forward and backward
//   6  DIFFUSION AND SAMPLERS: schedules; noising; loss; consistency tuning; paths of the sampler;
//        distribution matching; samplers; samples of a model
//   7  OPTIMISER: AdamW and averaged weights; Muon
//   8  TRAINING: memory of a run; the first and the last launch of a step; a training step; sampling
//   9  CHECKPOINTS
//  10  A RUN AND MAIN: what a run prints; how long a step takes; ranks; from flags to pictures; from flags to
//        a run; the loop; main
//  11  LAYERS ON THE GPU: the machine; what the kernels share; layers written once; group norm + SiLU;
//        attention; linear layers, 1x1 and 3x3 convolutions; vectors and instructions; patches; forward and
//        input gradient; which kernel does a GEMM; weight gradient; launchers
//  12  HOPPER: TMA and WGMMA; forward and input gradient; weight gradient

#include <cassert>
#include <cerrno>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#ifndef NETWORK_ONLY  // a program without files, ranks, training and command line: see dev/web/page.cc
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#ifdef __CUDACC__
#include <cuda.h>
#include <cuda_awbarrier_primitives.h>
#include <cuda_bf16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>
#include <cuda/ptx>
#endif

// ==== 1  CONFIGURATION =====================================================================================
enum {
    MAX_LEVELS = 8,            // of the UNet
    MAX_EMAS = 4,              // averages of the weights
    MAX_PATH_LENGTH = 1024,    // with the 0 at its end
    MAX_CHANNELS = 4,          // of an image
    MAX_ATTENTION_SIZE = 128,  // height and width of the largest image that attention works on
};

// Kernels load 16 bytes of channels at a time, so that channels come in multiples of 8: see padded. An image in
// the network's memory has PIXEL channels, and those behind its own are zeros.
enum { CHANNEL_MULTIPLE = 8, PIXEL = CHANNEL_MULTIPLE };
static_assert(2 * MAX_CHANNELS <= PIXEL, "a prediction and, with --learn_sigma, its variances fit a pixel");

// The number of channels of an attention head is a multiple of the first number, and at most the second.
static std::pair<int, int> head_channels();

enum NoiseSchedule { SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_FLOW, SCHEDULE_EDM };
enum Prediction { PREDICT_EPS, PREDICT_V, PREDICT_X0, PREDICT_FLOW, PREDICT_EDM };
enum TimestepSampling { TIMESTEPS_UNIFORM, TIMESTEPS_LOGNORMAL };
enum LrSchedule { LR_CONSTANT, LR_COSINE, LR_LINEAR };
enum Sampler { SAMPLER_DDIM, SAMPLER_DDPM, SAMPLER_DPMPP, SAMPLER_HEUN, SAMPLER_CONSISTENCY };
enum Help { HELP_NONE, HELP_USUAL, HELP_ALL };
enum Spacing { SPACING_AUTO, SPACING_UNIFORM, SPACING_TRAILING, SPACING_KARRAS };
enum Optimizer { OPTIMIZER_ADAMW, OPTIMIZER_MUON };
enum Threshold { THRESHOLD_CLAMP, THRESHOLD_DYNAMIC, THRESHOLD_NONE };  // dynamic is generate.py's: refused

// The optimiser's settings. They are few enough to be an argument of a kernel.
struct Hyper {
    float lr, final_lr_fraction;
    float weight_decay, beta1, beta2, adam_eps;
    float grad_clip, skip_outliers;
    int lr_schedule, warmup_steps;
    int lr_steps;  // the schedule's length: the --steps of the first start
    int optimizer;
    int ema_warmup;            // 0: the start is a trained model, from which the averages go on at their full rate
    float ema_rate[MAX_EMAS];  // ended by a 0 where shorter
};

typedef char Path[MAX_PATH_LENGTH];

// The values of the flags. FLAGS in unet_io.h says what each of them does. Lists are ended by a 0 where shorter.
struct Config {
    // files
    Path preset;
    Path data_file, val_file;
    Path model_weights;
    Path out_dir, resume;
    Path output_name, output_dir;
    Path config;

    // architecture
    int image_size, in_channels;
    int num_channels, num_res_blocks;
    int num_head_channels, norm_groups;
    int max_period;
    int class_cond, num_classes;
    int use_scale_shift_norm;
    int num_heads, num_heads_upsample;
    int rescale_timesteps;
    int resblock_updown, conv_resample;
    int learn_sigma;
    int use_new_attention_order;
    float cond_drop_prob, dropout;
    float channel_mult[MAX_LEVELS];
    int attention_resolutions[MAX_LEVELS];

    // architecture of the network in dev/dit alone
    Path model;
    int depth, hidden_size, patch_size;
    float mlp_ratio;

    // diffusion
    int diffusion_steps;
    int noise_schedule, predict;
    int zero_terminal_snr;

    // training
    int batch_size, microbatch;
    int steps;
    int flip;
    int consistency, consistency_steps, path_steps;
    int timestep_sampling;
    float timestep_mean, timestep_std;
    unsigned seed;
    Hyper hyper;
    float min_snr_gamma;
    float offset_noise;
    float matching_fraction;
    int log_every, save_every, sample_every, val_every;
    int keep, keep_every;
    int num_samples;

    // sampling
    Path seeds, classes, class_names;
    int generate;
    int sampler, sample_steps, spacing;
    int use_ema, threshold;
    int show;
    float eta, guidance_scale;

    // what to do
    int gpus, processes;
    int resume_given;  // whether there was --resume, which may come without a value
    int print_config, dry_run, help;
};

// How many images go through the network at a time while it is trained.
static int microbatch_size(const Config& c) {
    if (!c.microbatch) return c.batch_size;
    return std::min(c.microbatch, c.batch_size);
}

// The elements of an array before its first 0.
static int list_length(const auto& list) { return (int)(std::find(list, std::end(list), 0) - list); }

static size_t pixels_of(const Config& c) { return (size_t)c.image_size * c.image_size; }

static bool clamps_x0(const Config& c) { return c.threshold == THRESHOLD_CLAMP; }

// Whether each image is noised twice: consistency tuning by pairs.
static bool has_pairs(const Config& c) { return c.consistency && !c.path_steps; }

static bool is_guided(const Config& c) { return c.guidance_scale != 1; }

// The rows that a sample has in a call of the network: with guidance two, one with its class and one without.
static int rows_a_sample(const Config& c) { return is_guided(c) ? 2 : 1; }

static int ema_count(const Config& c) { return list_length(c.hyper.ema_rate); }
static int level_width(const Config& c, int i) { return (int)((float)c.num_channels * c.channel_mult[i]); }

static int sampler_steps(const Config& c) {
    if (c.sample_steps) return c.sample_steps;
    switch (c.sampler) {
        case SAMPLER_DDPM: return c.diffusion_steps;
        case SAMPLER_DDIM: return std::min(50, c.diffusion_steps);
        case SAMPLER_CONSISTENCY: return std::min(c.consistency_steps, c.diffusion_steps);
        default: return std::min(25, c.diffusion_steps);
    }
}

// Rows of the label embedding: one for each class, and one for no class where labels are dropped. 0 means that
// there is no label embedding.
static int label_rows(const Config& c) {
    if (!c.class_cond) return 0;
    bool drops_labels = c.cond_drop_prob > 0;
    return c.num_classes + drops_labels;
}

// The heads of an attention block with this many channels, in the decoder or before it.
static int heads_of(const Config& c, int channels, bool decoder) {
    if (!c.num_heads) return channels / c.num_head_channels;
    if (decoder && c.num_heads_upsample) return c.num_heads_upsample;
    return c.num_heads;
}

// Whether --attention_resolutions names a level's size.
static bool attends(const Config& c, int size) { return std::ranges::count(c.attention_resolutions, size); }

// The processes (ranks) that train together, one for each GPU. They run the same program on the same files. Only
// rank 0 writes any.
static struct World {
    int rank = 0;            // this process's number
    int size = 1;            // how many there are
    int local = 0;           // this process's number among those of its machine
    bool forked = false;     // rank 0 has forked the others; otherwise a launcher has started them
    bool connected = false;  // they can send each other messages
} world;

struct Plan;
struct Model;
struct Block;

// What the program knows of its network, besides Config. A file that includes this one can put another network
// here before main begins: see dev/dit.
struct Network {
    const char *program, *name;
    const char* importer;            // the command that makes its weights files from those of other programs
    int magic;                       // what its weights files begin with
    const char* label_table;         // the parameter that has a row for each class
    const char* const* block_kinds;  // their names, by Block.kind
    Plan (*make_plan)(const Config& c, int batch, bool training);
    void (*forward)(Model* m, const Block& block, int B);
    void (*backward)(Model* m, const Block& block, int B);
};

enum { UNET_MAGIC = 0x54454E55 };  // "UNET"
enum BlockKind { BLOCK_EMBED, BLOCK_CONV_IN, BLOCK_RES, BLOCK_ATTENTION, BLOCK_DOWN, BLOCK_UP, BLOCK_OUT };
static const char* const BLOCK_NAMES[] = {"embedding", "conv", "residual", "attention", "down", "up", "out"};

static Plan make_plan(const Config& c, int batch, bool training);
static void block_forward(Model* m, const Block& block, int B);
static void block_backward(Model* m, const Block& block, int B);

static Network network = {
    .program = "train_unet",
    .name = "UNet",
    .importer = "python3 generate.py --import",
    .magic = UNET_MAGIC,
    .label_table = "label_emb.weight",
    .block_kinds = BLOCK_NAMES,
    .make_plan = make_plan,
    .forward = block_forward,
    .backward = block_backward,
};

// What unet_io.h asks of the program.
static size_t host_memory_available();
static size_t count_parameters(const Config& c);  // of its network; refuses one that can't be

#include "unet_io.h"

// ==== 2  MEMORY, TENSORS, RANDOMNESS =======================================================================
// ---- arenas -----------------------------------------------------------------------------------------------
// A block of memory of a known size, handed out piece by piece. An arena without memory only counts what is taken.
struct Arena {
    char* base = nullptr;
    size_t capacity = SIZE_MAX, used = 0;  // bytes
};

enum { ALIGNMENT = 256 };

// n, rounded up to a multiple of `unit`.
static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
static size_t aligned(size_t bytes) { return round_up(bytes, ALIGNMENT); }

// Takes `count` elements from an arena.
template <typename T> static T* take(Arena* arena, size_t count) {
    size_t bytes = aligned(count * sizeof(T));
    assert(arena->used + bytes <= arena->capacity);  // otherwise the plan has reserved too little
    T* memory = (T*)(arena->base + arena->used);
    arena->used += bytes;
    return memory;
}

// ---- the machine: what the two builds do differently ------------------------------------------------------
#ifdef __CUDACC__
#define DEVICE gpu  // the namespace whose layers the network calls
#define HOST_DEVICE __host__ __device__
#ifdef PRECISION_FP32
typedef float floatX;
#else
typedef __nv_bfloat16 floatX;
#endif
enum { ON_GPU = 1, STEPS_IN_FLIGHT = 3 };  // see mark_step_end
#else
#define DEVICE cpu
#define HOST_DEVICE
typedef float floatX;
struct float2 {  // as CUDA's
    float x, y;
};

enum { ON_GPU = 0, STEPS_IN_FLIGHT = 1 };
#endif

// UNROLLED_FOR is a loop of a few rounds that is unrolled on a GPU, where an array stays in registers only if every
// index is a constant. Sum is the type in which a Team of threads adds up.
#ifdef __CUDA_ARCH__
#define UNROLLED_FOR(...) _Pragma("unroll") for (__VA_ARGS__)
typedef float Sum;
#else
#define UNROLLED_FOR(...) for (__VA_ARGS__)
typedef double Sum;
#endif

HOST_DEVICE static inline int ceil_div(size_t a, size_t b) { return (int)((a + b - 1) / b); }

static void backend_init();         // refuses a machine that can't run this program
static std::string backend_name();  // the device and its precision

[[noreturn]] static void fail_to_allocate(size_t bytes) {
    fail("could not allocate %s; use a smaller batch or model", human_bytes(bytes));
}

// Allocates memory of the device; with on_host pinned memory of the host, which the device reads and writes too.
static void* backend_allocate(size_t bytes, bool on_host = false);
static void backend_free(void* memory, bool on_host = false);

// The same, but the memory is freed when its last owner goes.
template <typename T> static std::shared_ptr<T[]> allocate(size_t count, bool on_host = false) {
    void* memory = backend_allocate(count * sizeof(T), on_host);
    return {(T*)memory, [=](T*) { backend_free(memory, on_host); }};
}

// Free bytes where the layers work; on a CPU no more than `ulimit -v` leaves. 0: not known.
static size_t backend_memory_available();
static size_t workspace_bytes();  // what the layers need besides the model's memory
static void allocate_workspace();

// The device does all its work in the order of the calls. These two may return before it is done.
static void backend_zero(void* memory, size_t bytes);
static void backend_copy(void* to, const void* from, size_t bytes);  // either may be the host's
// Waits until the device has done everything.
static void backend_wait();

// Copies from the host's own memory, or into it, and waits until that is done.
static void backend_upload(void* to, const void* from, size_t bytes) {
    backend_copy(to, from, bytes);
    backend_wait();
}

static void backend_download(void* to, const void* from, size_t bytes) {
    backend_copy(to, from, bytes);
    backend_wait();
}

template <typename T> static void upload(T* to, const std::vector<T>& values) {
    backend_upload(to, values.data(), values.size() * sizeof(T));
}

// The host begins up to STEPS_IN_FLIGHT steps before it waits for the first of them. Each of these steps has a slot:
// mark_step_end marks the end of the work that the device was given so far, and wait_for_step waits until the device
// gets there.
static void mark_step_end(int slot);
static void wait_for_step(int slot);

// An event marks the end of some work of the side stream. Events are numbered from 1; 0 means that there is nothing
// to wait for. The stream runs its work in order, so that whoever waits for one event has waited for all before it.
typedef int Event;
static Event newest_event;

// Gives launches to the side stream, and returns the event of their end. They wait for everything launched so far, and
// then run beside what the main stream is given next. On a CPU they are done at once.
static Event on_side_stream(auto launches);

// The same, but they are launched after the main stream's next kernel, which so gets the multiprocessors first.
// Without the delay a step of an H100 at B = 1 takes 3% longer.
static Event on_side_stream_deferred(auto launches);

// Makes the main stream, not the host, wait for an event.
static void wait_for(Event event);

// A sequence of launches that is the same every time. The first time they are launched one by one, because some set
// something up when they first run. The second time they are captured as a CUDA graph, which is launched from then on.
struct Graph {
    std::shared_ptr<void> executable;  // cudaGraphExec_t; a CPU has none
    int runs = 0;
};

static void launch_graph(Graph* graph, auto launches);

// The device's peak TFLOP/s, in bf16 (dense, added up in fp32) or fp32; 0: not known.
static double backend_peak();

// Prepares what the ranks of a machine will talk through, before they are forked.
static void backend_prepare_fork();

// Connects this rank to the others, and returns the name of what carries messages, for the log.
static std::string backend_connect();

// Disconnects this rank, once every message that was sent has arrived.
static void backend_disconnect();

// PROFILE("3x3 dW", {operations, bytes}) or PROFILE(layer) at the head of a launcher is for dev/bench/profile.cu, whose
// functions the arguments may use. The program itself compiles none of it.
#ifndef PROFILE
#define PROFILE(...)
#endif

// ---- ranks ------------------------------------------------------------------------------------------------
// The share of n things that a rank has: its first thing, and the end behind its last. Groups of `unit` things stay
// together.
static std::pair<size_t, size_t> share_of(size_t n, int rank, size_t unit) {
    size_t share = round_up(n, unit * world.size) / world.size;
    size_t first = std::min(n, rank * share);
    size_t end = std::min(n, first + share);
    return {first, end};
}

#ifndef NETWORK_ONLY
// Memory that rank 0 shares with the ranks that it forks. A process that a launcher has started has its own.
struct ForkedRanks {
    std::atomic<int> stop;      // whether one of them was asked to stop
    std::atomic<int> reporter;  // the one that says why all end: its rank + 1
};

static ForkedRanks* const forked_ranks =
    (ForkedRanks*)mmap(nullptr, sizeof(ForkedRanks), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
static std::atomic<int>& stop_asked = forked_ranks->stop;
#endif

// Sends bytes of the device to another rank and receives some from it, in the order of the calls. The other rank
// makes the same call with what is sent and what is received swapped.
static void backend_exchange(int peer, std::span<const std::byte> sent, std::span<std::byte> received);

// Does the exchanges that `exchanges` calls for at the same time.
static void backend_together(auto exchanges);

// Exchanges bytes of the device with every other rank: this one sends sent(peer), and receives received(peer).
static void exchange_with_all(auto sent, auto received) {
    backend_together([&] {
        for (int peer = 0; peer < world.size; peer++)
            if (peer != world.rank) backend_exchange(peer, sent(peer), received(peer));
    });
}

// Gives every rank all rows of `values`, (ranks, each), of which it has only its own. What lies before element `first`
// is not sent.
template <typename T> static void gather(T* values, size_t each, size_t first = 0) {
    auto row_of = [&](int rank) {
        size_t end = (rank + 1) * each;
        size_t begin = std::clamp(first, end - each, end);
        return std::as_writable_bytes(std::span(values + begin, end - begin));
    };
    auto own_row = [&](int) { return row_of(world.rank); };
    exchange_with_all(own_row, row_of);
}

// ---- tensors ----------------------------------------------------------------------------------------------
enum Init { INIT_UNIFORM, INIT_ONES, INIT_ZEROS, INIT_NORMAL };

// A parameter. It is declared once, by the plan; optimiser, files, tests and reports iterate over the list.
struct Parameter {
    std::string name;             // as PyTorch's named_parameters() calls it
    std::vector<int> shape = {};  // in PyTorch's order
    size_t count = 0;             // elements in files
    size_t offset = 0, size = 0;  // in memory, in floats; zeros may pad it: see place_parameters
    bool joined = false;          // of a residual block's embedding layer, beside those of the others
    Init init;
    float scale = 1;  // its initial values are multiplied by it; only dev/dit sets it
};

static bool is_matrix(const Parameter& t) { return t.shape.size() > 1; }  // a convolution's weight counts as one
static bool is_conv2d(const Parameter& t) { return t.shape.size() == 4; }

// Zeros follow an image's channels up to a multiple of 8. The weights of these channels are zeros too, and stay zeros,
// because their gradients are.
static int padded(int channels) { return (int)round_up(channels, CHANNEL_MULTIPLE); }

// visit(i, j) for every element of a parameter, which is number i in PyTorch's order and number j in memory. There
// a convolution's weights are (O, 3, 3, C), with padded channels; every other parameter is the same in both.
static void for_each_element(const Parameter& t, auto visit) {
    if (!is_conv2d(t)) {
        for (size_t i = 0; i < t.count; i++) visit(i, i);
        return;
    }
    size_t O = t.shape[0], C = t.shape[1];
    size_t taps = t.shape[2] * t.shape[3];

    size_t i = 0;
    for (size_t o = 0; o < O; o++)
        for (size_t c = 0; c < C; c++)
            for (size_t tap = 0; tap < taps; tap++) {
                size_t j = (o * taps + tap) * padded(t.shape[1]) + c;
                visit(i++, j);
            }
}

// Brings a parameter's elements from PyTorch's order, (count), to memory's, (size), or back.
static std::vector<float> reordered(std::span<const float> from, const Parameter& t, bool to_memory) {
    std::vector<float> to(to_memory ? t.size : t.count);
    for_each_element(t, [&](size_t in_file, size_t in_memory) {
        if (to_memory) to[in_memory] = from[in_file];
        else to[in_file] = from[in_memory];
    });
    return to;
}

// ---- randomness -------------------------------------------------------------------------------------------
// Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011). key = (seed, stream),
// counter = (e/4, sample, step, 0), and element e takes word e mod 4.
enum RandomStream {  // mirrored in unet_io.py
    STREAM_INIT,
    STREAM_SHUFFLE,
    STREAM_TIMESTEP,
    STREAM_NOISE,
    STREAM_FLIP,
    STREAM_DROPOUT,
    STREAM_SAMPLER,
    STREAM_VAL_TIMESTEP,
    STREAM_VAL_NOISE,
    STREAM_PERTURB,
    STREAM_LABEL,
    STREAM_OFFSET,
    STREAM_PATH,
    STREAM_MATCHING_TIMESTEP,
    STREAM_MATCHING_NOISE,
    STREAM_SECOND_NOISE
};

struct Philox {
    uint32_t word[4];
};

HOST_DEVICE static inline Philox philox(uint32_t seed, uint32_t stream, uint32_t quad, uint32_t sample,
                                        uint32_t step) {
    uint32_t k0 = seed, k1 = stream;
    uint32_t c0 = quad, c1 = sample, c2 = step, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Philox{{c0, c1, c2, c3}};
}

HOST_DEVICE static inline uint32_t random_word(uint32_t seed, uint32_t stream, uint32_t e, uint32_t sample,
                                               uint32_t step) {
    return philox(seed, stream, e / 4, sample, step).word[e % 4];
}

// The normals of a quad of elements, by Box-Muller: on the host in double, on a GPU in float, which is off by up to
// 2e-6.
HOST_DEVICE static inline void random_normals(float normal[4], uint32_t seed, uint32_t stream, uint32_t quad,
                                              uint32_t sample, uint32_t step) {
    Philox p = philox(seed, stream, quad, sample, step);
    UNROLLED_FOR (int pair = 0; pair < 4; pair += 2) {
#ifdef __CUDA_ARCH__
        float u1 = ((p.word[pair] >> 8) + 1) * 0x1p-24f;  // above 0
        float twice_u2 = (p.word[pair + 1] >> 8) * 0x1p-23f;
        float r = sqrtf(-2.0f * logf(u1));
        float sine, cosine;
        sincospif(twice_u2, &sine, &cosine);
#else
        double u1 = ((p.word[pair] >> 8) + 1) * 0x1p-24;  // above 0
        double u2 = (p.word[pair + 1] >> 8) * 0x1p-24;
        double r = sqrt(-2.0 * log(u1));
        double angle = 2.0 * M_PI * u2;
        double sine = sin(angle), cosine = cos(angle);
#endif
        normal[pair] = (float)(r * cosine);
        normal[pair + 1] = (float)(r * sine);
    }
}

// The normals of elements e to e + 3; e need not start a quad.
HOST_DEVICE static inline void random_normals_at(float normal[4], uint32_t seed, uint32_t stream, uint32_t e,
                                                 uint32_t sample, uint32_t step) {
    float quads[8] = {};
    random_normals(quads, seed, stream, e / 4, sample, step);
    if (e % 4) random_normals(quads + 4, seed, stream, e / 4 + 1, sample, step);

    UNROLLED_FOR (int i = 0; i < 4; i++)
        UNROLLED_FOR (uint32_t shift = 0; shift < 4; shift++)  // normal[i] = quads[i + e % 4], by constant indices
            if (e % 4 == shift) normal[i] = quads[i + shift];
}

// An integer below n.
HOST_DEVICE static inline uint32_t random_below(uint32_t n, uint32_t seed, uint32_t stream, uint32_t e,
                                                uint32_t sample, uint32_t step) {
    uint64_t word = random_word(seed, stream, e, sample, step);
    return (uint32_t)(word * n >> 32);
}

// The order of `count` images in an epoch: a Fisher-Yates shuffle whose draws depend on the epoch.
static void random_permutation(int* order, int count, uint32_t seed, uint32_t epoch) {
    std::iota(order, order + count, 0);
    for (int i = count - 1; i > 0; i--) {
        uint32_t other = random_below(i + 1, seed, STREAM_SHUFFLE, i, 0, epoch);
        std::swap(order[i], order[other]);
    }
}

// ==== 3  THE LAYERS, DECLARED ==============================================================================
// ---- what layers take -------------------------------------------------------------------------------------
// What a norm keeps of a channel are pairs of numbers, which a GPU loads at once.

// The channel's mean in a tile of an image, and its sum of squared distances from that mean.
struct alignas(8) Moments {
    float mean, squares;
};

// Sums over a tile of an image: see groupnorm_backward_sums.
struct alignas(8) NormSums {
    float dy, dy_x_hat;
};

// The statistics of the channel's group in an image.
struct alignas(8) GroupStatistics {
    float mean, rstd;
};

// The norm itself: y = x scale + shift.
struct alignas(8) ScaleShift {
    float scale, shift;
};

// A tensor (B, H, W, C), NHWC, in memory that somebody else owns; without data there is none. The rows of an
// embedding are (B, 1, 1, C). Real: float on the CPU, floatX on the GPU.
template <typename Real> struct TensorOf {
    Real* data = nullptr;
    int B = 0, H = 0, W = 0, C = 0;
    // (B, norm_tiles(H * W), C). Whatever writes a tensor that a norm reads next writes its moments too. Null where
    // no norm reads it.
    Moments* moments = nullptr;

    explicit operator bool() const { return data; }
    HOST_DEVICE int T() const { return H * W; }
    HOST_DEVICE int rows() const { return B * H * W; }
    HOST_DEVICE size_t count() const { return (size_t)B * H * W * C; }
    TensorOf with_channels(int channels) const { return {data, B, H, W, channels}; }
    TensorOf without_moments() const { return {data, B, H, W, C}; }
};

// torch.cat([first, second], dim=1), read and written where the two lie. There may be no second tensor.
template <typename Real> struct ConcatOf {
    TensorOf<Real> first, second;
    // (B, C), or null. If not null, the tensor is still to be normed: whoever reads it applies these, and then SiLU.
    // See Norm.half_scale_shift.
    const ScaleShift* half_scale_shift;

    HOST_DEVICE ConcatOf(TensorOf<Real> one = {}, TensorOf<Real> two = {}, const ScaleShift* half_scale_shift = nullptr)
        : first(one), second(two), half_scale_shift(half_scale_shift) {}

    HOST_DEVICE int C() const { return first.C + second.C; }

    // The tensor that holds channel c, and the channel's number there.
    HOST_DEVICE const TensorOf<Real>& of(int c) const { return c < first.C ? first : second; }
    HOST_DEVICE int within(int c) const { return c < first.C ? c : c - first.C; }

    // Channel c of a pixel, and its moments in a tile. Pixels and tiles are counted through all images.
    Real* at(size_t pixel, int c) const { return of(c).data + pixel * of(c).C + within(c); }
    HOST_DEVICE Moments moments(size_t tile, int c) const { return of(c).moments[tile * of(c).C + within(c)]; }
};

// A row for each image, (B, pitch)[:, :C]: a part of the embedding's projections, or its gradient. Without data there
// are none, and row() is null.
template <typename Real> struct RowsOf {
    Real* data = nullptr;
    int pitch = 0;
    HOST_DEVICE Real* row(int b) const { return data ? data + (size_t)b * pitch : nullptr; }
};

// The parameters of a convolution of nine taps or one: w (O, 3, 3, C) or (O, C), bias (O).
template <typename Real, int TAPS> struct ConvLayerOf {
    const Real *w = nullptr, *bias = nullptr;
    float *dw = nullptr, *dbias = nullptr;
};

// A group norm, F.group_norm(x, groups, w, bias, eps=1e-5), and F.silu of its output if `silu`. A group may lie in both
// tensors of x. For each image and channel the norm is y = x scale + shift. Forward writes statistics and
// half_scale_shift, (B, C), for all who read x again. With SiLU scale and shift are halved and make h = y / 2, because
// silu(y) = h + h tanh(h) takes one instruction less: see silu_of_half.
template <typename Real> struct NormOf {
    ConcatOf<Real> x = {};
    int groups = 1;
    bool silu = false;
    const float *w = nullptr, *bias = nullptr;  // (C), never rounded
    float *dw = nullptr, *dbias = nullptr;
    GroupStatistics* statistics = nullptr;
    ScaleShift* half_scale_shift = nullptr;  // halved where `silu`
    NormSums* sums = nullptr;                // (B, norm_tiles(H * W), C): scratch between the two calls of backward
    // (B, 2C), or null: C scales, then C shifts. Before SiLU the norm's output is multiplied by 1 + scale, and shift is
    // added.
    RowsOf<Real> modulation = {}, dmodulation = {};

    HOST_DEVICE explicit operator bool() const { return half_scale_shift; }  // otherwise there is no norm

    // 1 + the scale of channel c in image b.
    HOST_DEVICE float gain(int b, int c) const {
        if (!modulation.data) return 1;
        return 1 + (float)modulation.row(b)[c];
    }

    // The channel's weight and bias, modulated.
    HOST_DEVICE ScaleShift modulated(int b, int c) const {
        float shift = modulation.data ? (float)modulation.row(b)[x.C() + c] : 0;
        return {w[c] * gain(b, c), bias[c] * gain(b, c) + shift};
    }
};

// What a convolution may add to its output: a row of `emb` to all pixels of an image, and a tensor, which may
// be the output itself.
template <typename Real> struct ForwardOptionsOf {
    RowsOf<Real> emb = {};
    TensorOf<Real> residual = {};
};

// How dx is written.
template <typename Real> struct BackwardOptionsOf {
    // Of a norm: the gradient of a branch around it, which is added to dx.
    TensorOf<Real> residual = {};
    // Whether dx is added to what is there.
    bool accumulate = false;
    // Of a convolution: the norm that wrote what it read. groupnorm_backward_sums(dx, dx, norm) is then done, too.
    NormOf<Real> norm = {};
};

// How the right matrix of a product lies in memory.
enum RightMatrix { RIGHT_IN_ROWS, RIGHT_TRANSPOSED };

// The side of a square tile of a product's output, in elements.
static constexpr int matrix_tile(RightMatrix right_lies) { return right_lies == RIGHT_TRANSPOSED ? 64 : 128; }

// A product of matrices among many: out = alpha left right + beta added. Matrices are tensors (rows, 1, 1, columns),
// whose numbers of rows and columns are multiples of CHANNEL_MULTIPLE.
template <typename Real> struct MatrixProductOf {
    TensorOf<Real> out, left;
    const Real* right;          // (left's columns, out's columns), or the transpose of it
    TensorOf<Real> added = {};  // without data nothing is added
    float alpha = 1, beta = 0;
    int first_tile = 0;         // the number of tiles of the outputs before this one

    // How many tiles its own output has.
    int tiles(RightMatrix right_lies) const {
        const int side = matrix_tile(right_lies);
        return ceil_div(out.rows(), side) * ceil_div(out.C, side);
    }
};

#define LAYER_TYPES(device, Real)                                  \
    namespace device {                                             \
    typedef TensorOf<Real> Tensor;                                 \
    typedef ConcatOf<Real> Concat;                                 \
    typedef RowsOf<Real> Rows;                                     \
    template <int TAPS> using ConvLayer = ConvLayerOf<Real, TAPS>; \
    typedef ConvLayer<9> Conv;                                     \
    typedef ConvLayer<1> Linear;                                   \
    typedef NormOf<Real> Norm;                                     \
    typedef MatrixProductOf<Real> MatrixProduct;                   \
    typedef ForwardOptionsOf<Real> ForwardOptions;                 \
    typedef BackwardOptionsOf<Real> BackwardOptions;               \
    }
LAYER_TYPES(cpu, float)
LAYER_TYPES(gpu, floatX)

// A norm's sums and moments are those of tiles of an image. A tile has 128 pixels, and the last one perhaps fewer.
enum { NORM_TILE = 128 };
HOST_DEVICE static inline int norm_tiles(int pixels) { return ceil_div(pixels, NORM_TILE); }

// ---- the layers -------------------------------------------------------------------------------------------
namespace DEVICE {

// A 3x3 convolution:
//   out (B, H, W, O) = F.conv2d(x, w, bias, padding=1) + emb[:, None, None, :] + residual
// x is a tensor, or one that is still to be normed: see groupnorm_for_conv3x3.
static void conv3x3_forward(Tensor out, Concat x, Conv layer, ForwardOptions options = {});

//   dx = F.conv_transpose2d(dout, w, padding=1), which with options.accumulate is added to dx
static void conv3x3_backward_input(Tensor dx, Tensor dout, Conv layer, BackwardOptions options = {});

//   layer.dw = dout^T x, summed over pixels, for each tap
//   layer.dbias = dout.sum((0, 1, 2))
//   demb = dout.sum((1, 2)), where demb is wanted
static void conv3x3_backward_weight(Conv layer, Tensor dout, Tensor x, Rows demb = {});

// A 1x1 convolution, which is also the linear layer of an embedding's rows, (B, 1, 1, C), as images of one pixel:
//   out (B, H, W, O) = F.linear(x, w, bias) + residual
static void conv1x1_forward(Tensor out, Concat x, Linear layer, ForwardOptions options = {});

//   dx = dout @ w, which with options.accumulate is added to dx
static void conv1x1_backward_input(Concat dx, Tensor dout, Linear layer, BackwardOptions options = {});

//   layer.dw = dout^T x
//   layer.dbias = dout.sum((0, 1, 2))
static void conv1x1_backward_weight(Linear layer, Tensor dout, Concat x);

// Does `count` products, of `tiles` tiles in all. None of them reads the output of another.
static void multiply_matrices(const MatrixProduct* products, int count, int tiles, RightMatrix right_lies);

// Computes x.moments of a tensor that no convolution wrote.
static void channel_moments(Tensor x);

// out = norm(x). Wu and He, "Group Normalization" (2018), equations 1, 2, 6 and 7.
static void groupnorm_forward(Tensor out, const Norm& norm);

// Prepares what a 3x3 convolution with O outputs reads: either the norm's output, written to `normed`, or x
// itself with Concat's half_scale_shift, which the convolution then norms while it loads it. Nobody may write
// `normed`, x or the norm's statistics before that convolution has run.
static Concat groupnorm_for_conv3x3(Tensor normed, const Norm& norm, int O);

// A norm's backward takes two calls. With dy the gradient before SiLU, x_hat = (x - mean) rstd and N elements in a
// group:
//   dw = sum dy x_hat,  dbias = sum dy,  dx = rstd (w dy - (sum w dy + x_hat sum w dy x_hat) / N)
// where w is modulated, so that it differs from image to image; dw and dbias weigh each image's sums by its gain.
//
// The first call computes dy from dout, the gradient of the norm's output, and norm.sums, the sums of dy and dy x_hat.
// dy may be dout.
static void groupnorm_backward_sums(Tensor dy, Tensor dout, const Norm& norm);

// The second call computes dw, dbias and dx, and once more the norm's output, `normed`, which the weight
// gradient of the next convolution reads. normed may be dy. dx.first may be dy, if normed is not; or
// options.residual; or x, if x has no second tensor and nothing is added to dx.
static void groupnorm_backward(Concat dx, Tensor normed, Tensor dy, const Norm& norm, BackwardOptions options = {});

// out (B, H, W, C) = F.scaled_dot_product_attention(q, k, v) over the T = H * W pixels, in heads of d = C / heads
// channels. qkv (B, H, W, 3C) holds all of q, then k, then v, and in each of them head after head. lse (B, heads, T)
// is the log of the softmax's denominator, all that backward needs to compute the probabilities again. Vaswani et al.,
// "Attention Is All You Need" (2017), equation 1; recomputation as in Dao et al., "FlashAttention" (2022).
static void attention_forward(Tensor out, float* lse, Tensor qkv, int heads);

// dqkv is overwritten. With P the probabilities, D_i = sum_j dout_ij out_ij and scale = 1 / sqrt(d):
//   dV = P^T dout,  dS = P (dout V^T - D) scale,  dQ = dS K,  dK = dS^T Q
static void attention_backward(Tensor dqkv, Tensor dout, Tensor out, const float* lse, Tensor qkv, int heads);

// Runs a layer that is a struct: see below.
template <typename Layer> static void run(Layer layer);

}  // namespace DEVICE

using namespace DEVICE;

static const float NORM_EPS = 1e-5f;

// ---- layers written once for both builds ------------------------------------------------------------------
// A layer whose items (elements, vectors of channels, pixels) don't depend on each other is a struct: its
// fields are its arguments, outputs first, and operator() does one item. run() does all of them, on the CPU
// in a loop that the threads share, on a GPU in a thread each. Real, the type of activations, is floatX;
// only where the tests of a CUDA build also run the layer on the CPU, it is float there.

// A layer that adds up is such a struct too, but operator() does the work of a team, and items() counts the teams. A
// team is one thread on the CPU, and on a GPU a block of THREADS threads, BLOCKS of which fit on a multiprocessor.
// Thread i of a team does elements i, i + threads, ...
struct Team {
    int index;    // of the team
    int thread;   // of the team's threads
    int threads;  // that the team has
};

// The sum of what a team's threads have, in a fixed order. Every thread gets it. A team has at most 1024 threads, in
// whole warps.
HOST_DEVICE static inline Sum team_sum(Sum value) {
#ifdef __CUDA_ARCH__
    __shared__ float parts[32];  // a sum of each warp
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);

    __syncthreads();  // until everyone has read the parts of the sum before
    unsigned lane = threadIdx.x % 32;
    unsigned warp = threadIdx.x / 32;
    if (lane == 0) parts[warp] = value;
    __syncthreads();

    unsigned warps = blockDim.x / 32;
    value = lane < warps ? parts[lane] : 0.0f;
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
#endif
    return value;
}

// N elements that are loaded or stored at once, from an address that is a multiple of their size.
template <typename T, int N> struct alignas(N * sizeof(T)) Vector {
    T elements[N];
    HOST_DEVICE T& operator[](int i) { return elements[i]; }
    HOST_DEVICE const T& operator[](int i) const { return elements[i]; }
};

template <int N, typename T> HOST_DEVICE static inline Vector<T, N> load(const T* from) {
    return *(const Vector<T, N>*)from;
}

template <int N, typename T> HOST_DEVICE static inline void store(T* to, const Vector<T, N>& values) {
    *(Vector<T, N>*)to = values;
}

// The sinusoids of timesteps (B): out (B, C) = cos(t f), then sin(t f), with f_i = max_period^(-i / half) for
// i < half = C / 2. An item is an angle. It is computed in double: already at t = 999 a float product would be off by
// 3e-5.
template <typename Real> struct TimestepEmbedding {
    TensorOf<Real> out;
    const int* timesteps;
    int max_period;
    double unit = 1;  // t is unit times the timestep

    size_t items() const { return out.count() / 2; }
    HOST_DEVICE void operator()(size_t item) const {
        int half = out.C / 2;
        int i = (int)(item % half);
        size_t b = item / half;

        double t = unit * timesteps[b];
        double frequency = exp(-log((double)max_period) * i / half);
        double sine, cosine;
        sincos(t * frequency, &sine, &cosine);
        out.data[b * out.C + i] = (Real)(float)cosine;
        out.data[b * out.C + half + i] = (Real)(float)sine;
    }
};

static void timestep_embedding(Tensor out, const int* timesteps, int max_period, double unit) {
    run(TimestepEmbedding<floatX>{out, timesteps, max_period, unit});
}

// A float and its bits. A union, because GCC 12 makes slower code of std::bit_cast in fast_exp.
union FloatBits {
    float value;
    uint32_t bits;
};

// e^x to 2 units in the last place, with x held within [-87, 88]. NaN stays NaN. It is a polynomial, so that loops over
// it become vector code: e^x = 2^n e^r with the integer n nearest to x / ln 2 and r = x - n ln 2.
static inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;  // two ifs become slower code

    FloatBits shifted = {x * 1.44269504f + 12582912.0f};  // 1.5 * 2^23 is added, so that the lowest bits are n
    float n = shifted.value - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts

    float p = 1.9875691500e-4f;  // coefficients: Cephes library, expf
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;

    FloatBits power;
    power.bits = (shifted.bits + 127) << 23;  // 2^n; any number where x is NaN, as p is then
    return p * power.value;
}

#ifdef __CUDACC__
// 1 / x, one instruction: an error of 2^-23.
__device__ static inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh x, one instruction: an error of 2^-11.
__device__ static inline float tanh_fast(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x; in bf16 one instruction, with an error of 2^-22.
#ifdef PRECISION_FP32
__device__ static inline float exp2_fast(float x) { return exp2f(x); }
#else
__device__ static inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif
#endif

// 1 / (1 + e^-x). On a GPU in bf16 the errors of the fast functions are far below a rounding.
HOST_DEVICE static inline float sigmoid(float x) {
#ifndef __CUDA_ARCH__
    return 1.0f / (1.0f + fast_exp(-x));
#elif defined(PRECISION_FP32)
    return 1.0f / (1.0f + expf(-x));
#else
    return reciprocal_fast(1.0f + exp2_fast(-1.44269504f * x));
#endif
}

// F.silu(x) = x sigmoid(x) and its derivative, from h = x / 2. On a GPU in bf16 sigmoid(x) is (1 + tanh h) /
// 2, one instruction instead of two: an error of 2^-12, so that SiLU's is below a rounding of x.
#if !defined(__CUDA_ARCH__) || defined(PRECISION_FP32)
HOST_DEVICE static inline float silu_of_half(float h) { return 2.0f * h * sigmoid(2.0f * h); }
HOST_DEVICE static inline float silu_gradient_of_half(float h) {
    float s = sigmoid(2.0f * h);
    return s * (1.0f + 2.0f * h * (1.0f - s));
}
#else
HOST_DEVICE static inline float silu_of_half(float h) { return h + h * tanh_fast(h); }
HOST_DEVICE static inline float silu_gradient_of_half(float h) {
    float t = tanh_fast(h);
    return 0.5f + 0.5f * (t + h * (1.0f - t * t));
}
#endif
HOST_DEVICE static inline float silu_gradient(float x) { return silu_gradient_of_half(0.5f * x); }

// F.silu(x) = x * sigmoid(x), which the embedding needs by itself; elsewhere it is a part of a norm. An item is an
// element.
template <typename Real> struct SiluForward {
    TensorOf<Real> out, x;

    size_t items() const { return x.count(); }
    HOST_DEVICE void operator()(size_t i) const { out.data[i] = (Real)silu_of_half(0.5f * (float)x.data[i]); }
};

template <typename Real> struct SiluBackward {
    TensorOf<Real> dx, dout, x;

    size_t items() const { return x.count(); }
    HOST_DEVICE void operator()(size_t i) const {
        dx.data[i] = (Real)((float)dout.data[i] * silu_gradient((float)x.data[i]));
    }
};

// out (B, E) = F.embedding(labels, table), the row of table (rows, E) that each of labels (B) names.
template <typename Real> struct LabelForward {
    TensorOf<Real> out;
    const Real* table;
    const int* labels;

    size_t items() const { return out.count(); }
    HOST_DEVICE void operator()(size_t i) const {
        size_t row = labels[i / out.C];
        out.data[i] = table[row * out.C + i % out.C];
    }
};

// dtable (rows, E) = for each row the sum of dout's rows that have its label. An item is an element.
template <typename Real> struct LabelBackward {
    float* dtable;
    TensorOf<Real> dout;
    const int* labels;
    int rows;

    size_t items() const { return (size_t)rows * dout.C; }
    HOST_DEVICE void operator()(size_t i) const {
        int row = (int)(i / dout.C);
        int c = (int)(i % dout.C);

        float sum = 0;
        for (int b = 0; b < dout.B; b++)
            if (labels[b] == row) sum += (float)dout.data[(size_t)b * dout.C + c];
        dtable[i] = sum;
    }
};

// norm.dmodulation, from the finished norm.sums. An item is a channel of an image.
template <typename Real> struct ModulationBackward {
    NormOf<Real> norm;

    size_t items() const { return (size_t)norm.x.first.B * norm.x.C(); }
    HOST_DEVICE void operator()(size_t i) const {
        int C = norm.x.C();
        int b = (int)(i / C);
        int c = (int)(i % C);
        int tiles = norm_tiles(norm.x.first.T());
        const NormSums* sums = norm.sums + (size_t)b * tiles * C + c;

        float dscale = 0, dshift = 0;
        for (int tile = 0; tile < tiles; tile++) {
            NormSums sum = sums[tile * C];
            dshift += sum.dy;
            dscale += norm.w[c] * sum.dy_x_hat + norm.bias[c] * sum.dy;
        }

        Real* row = norm.dmodulation.row(b);
        row[c] = (Real)dscale;
        row[C + c] = (Real)dshift;
    }
};

// x = F.dropout(x, p), or its gradient, which has the same mask: a function of block, sample, step and element. An item
// is four elements.
template <typename Real> struct Dropout {
    TensorOf<Real> x;
    float p;
    uint32_t seed, block;
    int first;  // the sample of the batch that x begins with
    const int64_t* step;

    size_t items() const { return x.count() / 4; }
    HOST_DEVICE void operator()(size_t item) const {
        uint32_t quads = (uint32_t)((size_t)x.T() * x.C / 4);  // of an image
        uint32_t b = (uint32_t)(item / quads);
        uint32_t stream = STREAM_DROPOUT | block << 8;
        Philox words = philox(seed, stream, item % quads, first + b, *step);

        Vector<Real, 4> values = load<4>(x.data + 4 * item);
        for (int i = 0; i < 4; i++) {
            bool kept = (words.word[i] >> 8) * 0x1p-24f >= p;
            values[i] = (Real)(kept ? (float)values[i] / (1 - p) : 0.0f);
        }
        store(x.data + 4 * item, values);
    }
};

// Up-sampling, out (B, 2H, 2W, C) = F.interpolate(x, scale_factor=2, mode="nearest"), repeats each pixel of x
// (B, H, W, C) 2x2 times. Its backward adds up 2x2 pixels. Down-sampling, F.avg_pool2d(x, 2), is the same the
// other way round, with a factor of 1/4. With first_only three of the larger tensor's 2x2 pixels are as if they
// were 0: that is x[:, ::2, ::2] and its backward. An item is 16 bytes of a pixel of the output.
template <typename Real> struct Resample {
    TensorOf<Real> out, x;    // one of them twice as high and wide as the other
    float factor = 1;         // what is written is multiplied by it
    bool accumulate = false;  // to what `out` holds
    bool first_only = false;

    enum { N = 16 / sizeof(Real) };
    size_t items() const { return out.count() / N; }
    HOST_DEVICE void operator()(size_t item) const {
        // The item's pixel and channel of `out`. Rows are counted through all images.
        const unsigned vectors = x.C / N;
        const unsigned pixel = (unsigned)(item / vectors);  // there are fewer than 2^31: see most_images
        const unsigned c = (unsigned)(item - (size_t)pixel * vectors) * N;
        const unsigned row = pixel / out.W;
        const unsigned column = pixel % out.W;

        // The pixels of x that are read: 2x2 from `first` on, or this one alone, or none.
        const bool repeats = out.H > x.H;
        unsigned first;
        if (repeats) first = row / 2 * x.W + column / 2;
        else first = 2 * (row * x.W + column);
        int sources = 4;
        if (repeats || first_only) sources = 1;
        if (repeats && first_only && (row | column) % 2) sources = 0;

        Vector<Real, N> source[4] = {};
        for (int j = 0; j < 4; j++) {
            if (j >= sources) continue;
            size_t at = first + j / 2 * x.W + j % 2;
            source[j] = load<N>(x.data + at * x.C + c);
        }

        Vector<Real, N> result = {};
        if (accumulate) result = load<N>(out.data + item * N);
        for (int k = 0; k < N; k++) {
            float top = (float)source[0][k] + (float)source[1][k];
            float bottom = (float)source[2][k] + (float)source[3][k];
            result[k] = (Real)((float)result[k] + factor * (top + bottom));
        }
        store(out.data + item * N, result);
    }
};

// Up- or down-sampling, whichever the sizes say.
static void resample_forward(Tensor out, Tensor x) {
    run(Resample<floatX>{.out = out, .x = x, .factor = out.H > x.H ? 1 : 0.25f});
}

static void resample_backward(Tensor dx, Tensor dout, bool accumulate = false) {
    run(Resample<floatX>{.out = dx, .x = dout, .factor = dout.H > dx.H ? 1 : 0.25f, .accumulate = accumulate});
}

// ==== 4  BLOCKS ============================================================================================

// A piece of the arena, which is in use from step `first` of the plan to step `last`: block i of n runs
// forward at step i and backward at step 2 n - 1 - i. Buffers that are never in use at the same step may
// overlap.
struct Buffer {
    size_t offset = 0, bytes = 0;
    int first = INT_MAX, last = -1;

    void used_at(int step) {
        first = std::min(first, step);
        last = std::max(last, step);
    }
};

// A block of the network, as the plan knows it. To be run it becomes a Module, see below.
struct Block {
    int kind;  // a BlockKind, or a kind of another network
    char name[48] = "";
    int C = 0, C2 = 0, O = 0;   // channels of the input, of the skip concatenated to it, and of the output
    int H = 0, out_H = 0;       // height and width of the input, and of the output
    int input = -1, skip = -1;  // the blocks whose outputs are read; -1: none
    int emb = -1;               // where this block's projection begins in the channels of block 0's output; -1: none
    bool emb_again = false;     // backward reads its projection again
    int heads = 0;              // of attention; 0 in every other block
    bool accumulate = false;    // the decoder reads the input, too: backward adds to the input's gradient
    int param = 0;              // the block's first parameter in Plan.tensors
    int num_params = 0;         // how many it has from there on

    // The output, (B, out_H, out_H, O).
    Buffer out = {};
    // What backward reads again: of a residual block h (B, out_H, out_H, O), of attention qkv (B, H, H, 3C) and the
    // heads' outputs (B, H, H, C), of the embedding its sinusoids (B, num_channels) and four tensors (B, E).
    Buffer hidden = {};
    // The output's Moments, (B, tiles, O), for the norms that read it.
    Buffer moments = {};
    // GroupStatistics and ScaleShift of each norm, (B, C) each; then attention's lse, (B, heads, T).
    Buffer stats = {};
    // The output's gradient, (B, out_H, out_H, O).
    Buffer gradient = {};
    Buffer scratch_forward = {}, scratch_backward = {};
    // Scratch of backward that the block's last weight gradient reads on the side stream, while the next block's
    // backward is already under way.
    Buffer late = {};
};

static int embedding_width(const Config& c) { return 4 * c.num_channels; }

// The network: its blocks in the order of forward, its parameters in PyTorch's order, and the memory of both.
struct Plan {
    std::vector<Block> blocks = {};
    std::vector<Parameter> tensors = {};
    size_t num_parameters = 0;
    size_t num_floats = 0;   // that the parameters take in memory; with several ranks rounded up: see shard_parameters
    size_t num_decayed = 0;  // the first of these floats: those of the matrices, which alone decay
    double flops = 0;        // of training on one image; an addition and a multiplication are two
    size_t arena_bytes = 0;
    int batch = 0;
    bool training = false;
};

// What an update of the weights reads and writes. Each array has this rank's shard of the parameters, which with a
// single rank is all of them. Checkpoints hold these arrays.
struct OptimiserMemory {
    float* master;              // the weights, in fp32
    float* ema[MAX_EMAS] = {};  // null where there are fewer
    float *adam_m, *adam_v;
};

// What --optimizer muon needs besides OptimiserMemory: see section 7. The arrays of num_floats are laid out as the
// parameters are.
struct Muon {
    floatX *x, *next_x;       // (num_floats): the updates, which become orthogonal
    floatX *A, *B;            // (num_floats): (rows, rows) of each matrix, from where its x begins
    float* scales;            // (num_floats / CHANNEL_MULTIPLE): of the updates; 0 where the parameters are AdamW's
    MatrixProduct* products;  // (MUON_STEPS, 3, count)
    int count = 0;            // of the matrices
    int square_tiles, tiles;  // of all A, and of all x
};

// Consistency tuning with pairs: a sample's image is also noised to an earlier timestep. See section 6.
struct ConsistencyPairs {
    int* timesteps;  // (batch_size): the earlier timestep of each sample
    float* gaps;     // (batch_size): the noise_fraction of the sample's own timestep minus that of the earlier one
    float* errors;   // (B, H, W, PIXEL): see EarlierErrors
    float* weights;  // (batch_size): of the samples' squared errors, see PairWeights
};

// Distribution matching: see section 6. The student is the network that is tuned.
struct DistributionMatching {
    OptimiserMemory fake;     // of the second network, which learns to denoise the student's pictures; without averages
    struct StepState* state;  // of the fake's update
    int* timesteps;           // (batch_size): to which the student's pictures are noised
    float* pictures;          // (images of this rank, C, H, W): what the student draws
    float* drafts;            // the same: where it draws in two steps, what it draws in the first; otherwise null
    float* fake_x0;           // the same: the x0 that the fake predicts from these pictures, noised
    float* teacher_x0;        // the same: the x0 that the teacher predicts
};

// A call of the network, with what it reads besides the images, which are Model.input.
struct NetworkCall {
    int B;                                  // its samples, up to plan.batch
    const int* timesteps;                   // (B)
    const int* labels = nullptr;            // (B): classes, or num_classes for none; null: the network knows none
    int first = 0;                          // the first sample's number: noise and dropout's masks depend on it
    const int64_t* dropout_step = nullptr;  // the step that the masks depend on too; null: nothing is dropped
};

// Where samples are drawn.
struct SamplerMemory {
    struct SampleSpec* specs;  // (B): the seed and the class of each sample
    float *x, *saved;          // (B, H, W, PIXEL): see SampleUpdate
};

// The model of a run: its configuration, its plan, and where its memory lies, which `memory` owns: see lay_out_model.
struct Model : OptimiserMemory {
    Config config;
    Plan plan;
    int ranks = 1, rank = 0;  // how many train it together, and this one's number: see shard_parameters
    size_t shard;             // parameters of a rank: the num_floats are (ranks, shard)

    // The weights as the layers read them, (num_floats): what use_weights was given, or where is_copied() a copy of it.
    floatX* weights;
    float* gradients = nullptr;  // (gradient_buffers, num_floats); null where nothing is trained
    float* dw;                   // (num_floats): where backward leaves the weights' gradients
    float* fp32_params;          // in fp32, for norms; with several ranks only the parameters that are no matrices

    // Of a pass through the network.
    char* arena;                  // activations, their gradients, scratch: where the plan says; null in measure_buffers
    Arena scratch, late;          // what the current block may take from: its buffers scratch_... and late
    Event embedding_ready = 0;    // block 0's output is there
    floatX* input;                // (B, H, W, PIXEL): the noised images
    NetworkCall call;             // of unet_forward; backward reads it again

    // Of a batch. A sample's source is its image, or -1 - image where that is mirrored, or its point of a path.
    // Samples are drawn between training steps. Then images and target are free, and lend the sampler their memory.
    int* timesteps;         // (batch_size), or those of the samples that are drawn
    int* labels;            // the same: their classes, or num_classes for none; only with --class_cond
    int* sources;           // (batch_size)
    float* images;          // (B, C, H, W): clean, planar, as in files
    float* target;          // (B, H, W, PIXEL): what the network should predict
    SamplerMemory sampler;

    // Of a training step.
    struct StepState* state;           // of the current step: see section 7
    float* losses;                     // (batch_size, loss_chunks)
    float* variance_losses = nullptr;  // (batch_size, loss_chunks), with --learn_sigma
    float* grad_norm_sums;             // one a NORM_CHUNK of the parameters
    int* stops;                        // (ranks): whether each was asked to stop
    float* received;                   // (ranks, shard): the others' gradients of this rank's shard
    struct ScheduleRow* schedule;      // (diffusion_steps)
    uint32_t* last_words;              // (diffusion_steps): see draw_timestep

    // Of tuning, and of the optimiser.
    ConsistencyPairs pairs = {};         // with --consistency and no --path_steps
    float* teacher = nullptr;            // with --path_steps: the parameters that are tuned, as they were
    float* points;                       // with --path_steps, of every micro-batch: see LoadPathPoints
    DistributionMatching matching = {};  // with --matching_fraction
    Muon muon = {};                      // with --optimizer muon

    std::shared_ptr<char[]> memory;
    size_t bytes;
    Strings class_names = {};        // of its first classes, by number; empty: they are not known
    std::string data_checksum = "";  // of the images that it is trained on
};

// ---- a block's parameters ---------------------------------------------------------------------------------
// Declares a parameter, as named_parameters() calls it.
static void add_parameter(Plan* plan, const std::string& name, const std::vector<int>& shape, Init init) {
    Parameter t = {.name = name, .shape = shape, .count = 1, .init = init};
    for (int size : shape) t.count *= size;
    t.size = round_up(t.count, CHANNEL_MULTIPLE);
    if (is_conv2d(t)) t.size = (size_t)padded(shape[0]) * padded(shape[1]) * shape[2] * shape[3];

    plan->num_parameters += t.count;
    plan->num_floats += t.size;
    if (is_matrix(t)) plan->num_decayed += t.size;
    plan->tensors.push_back(t);
}

// Declares a layer of the block, a weight and its bias; `layer` is empty or ends in a dot. A matrix costs a
// product in forward and two in backward, for the gradients of its input and of itself, but the first layer of a block
// that reads no other block needs no gradient of its input.
static void add_layer(Plan* plan, const Block& block, const std::string& layer, const std::vector<int>& shape,
                      Init init = INIT_UNIFORM) {
    bool is_first = block.input < 0 && (int)plan->tensors.size() == block.param;
    std::string name = block.name + ("." + layer);

    add_parameter(plan, name + "weight", shape, init);
    if (shape.size() > 1) {
        double pixels = shape.size() == 2 ? 1 : (double)block.out_H * block.out_H;  // an embedding has one
        int products = is_first ? 2 : 3;
        plan->flops += products * 2.0 * (double)plan->tensors.back().count * pixels;
    }
    add_parameter(plan, name + "bias", {shape[0]}, init == INIT_ONES ? INIT_ZEROS : init);
}

// ---- what a block reads and writes ------------------------------------------------------------------------
// A buffer as an arena, which only counts where the model has no memory yet.
static Arena arena_of(const Model* m, const Buffer& b) {
    if (!m->arena) return {};
    return {.base = m->arena + b.offset, .capacity = b.bytes};
}

// The tensor that fills a buffer.
static Tensor tensor_at(const Model* m, const Buffer& b, int B, int H, int C) {
    Tensor tensor = {(floatX*)(m->arena + b.offset), B, H, H, C};
    assert(tensor.count() * sizeof(floatX) <= b.bytes);  // otherwise the plan has reserved too little
    return tensor;
}

static Tensor output_of(const Model* m, const Block& block, int B) {
    Tensor out = tensor_at(m, block.out, B, block.out_H, padded(block.O));
    if (block.moments.bytes) out.moments = (Moments*)(m->arena + block.moments.offset);
    return out;
}

static Tensor output_gradient_of(const Model* m, const Block& block, int B) {
    if (!m->plan.training) return {};
    return tensor_at(m, block.gradient, B, block.out_H, padded(block.O));
}

static Tensor unet_input(const Model* m, int B) {
    return {m->input, B, m->config.image_size, m->config.image_size, PIXEL};
}

// A block that is being run, as PyTorch's nn.Module. Each kind of block is such a struct, in which stand together:
//   declare             its parameters, in the order of PyTorch's named_parameters()
//   the members         what forward keeps for backward, taken from the buffers `hidden` and `stats`
//   reserve_forward     the scratch of forward, and then forward itself
//   reserve_backward    the scratch of backward, and then backward itself
// The plan constructs each block and calls its reserve functions with arenas that only count: see
// measure_buffers.
//
// A new kind is such a struct, a value in BlockKind with its name in BLOCK_NAMES, and a line in with_kind. Then
// make_plan can add blocks of it. What it has to keep to:
//   - The last weight gradient that backward starts with beside() may still run during the next block's backward. So
//     it reads only tensors of take_late(), and `hidden` in a block that reads a projection; or backward waits for it.
//     (The embedding, which is last, and the first and the last convolution read other memory: see compute_lifetimes.)
//   - Forward leaves the moments of its output, if that has any. Convolutions do; others call channel_moments(out).
//   - Backward adds to dx, and does not overwrite it, where block.accumulate is set.
//   - Backward of a block without parameters does not read x.
//   - Backward does not read the block's own output, which lives only until other blocks have read it.
//   - A block that reads the embedding declares a layer for its projection as ResBlock::declare does, and sets
//     emb_again where its backward reads the projection again.
struct Module {
    Model* m;
    const Block& block;
    int B;

    Concat x = inputs();
    Concat dx = of_inputs(output_gradient_of);  // without data where nothing before the block is trained
    Tensor out = output_of(m, block, B);
    Tensor dout = output_gradient_of(m, block, B);
    Arena kept_hidden = arena_of(m, block.hidden);
    Arena kept_stats = arena_of(m, block.stats);

    // What the block reads: other blocks' outputs, or the image.
    Concat inputs() const {
        if (block.input < 0) return unet_input(m, B);
        return of_inputs(output_of);
    }

    // The same tensor of each block whose output is read: that output, or its gradient.
    Concat of_inputs(auto tensor_of) const {
        Concat tensors;
        if (block.input >= 0) tensors.first = tensor_of(m, m->plan.blocks[block.input], B);
        if (block.skip >= 0) tensors.second = tensor_of(m, m->plan.blocks[block.skip], B);
        return tensors;
    }

    // The layer whose weight is tensor `n` of the plan; the next tensor is its bias.
    template <typename Layer> Layer layer_at(size_t n, const auto* weights) const {
        size_t w = m->plan.tensors[n].offset;
        size_t bias = m->plan.tensors[n + 1].offset;
        Layer layer = {.w = weights + w, .bias = weights + bias};
        if (m->dw) {
            layer.dw = m->dw + w;
            layer.dbias = m->dw + bias;
        }
        return layer;
    }

    // Layer `n` of the block.
    template <typename Layer> Layer layer(int n) const { return layer_at<Layer>(block.param + 2 * n, m->weights); }

    // Layer `n`, a norm of `input`.
    Norm norm_of(int n, Concat input) {
        Norm norm = layer_at<Norm>(block.param + 2 * n, m->fp32_params);
        norm.x = input;
        norm.groups = m->config.norm_groups;
        norm.silu = true;

        size_t count = (size_t)B * input.C();
        norm.statistics = take<GroupStatistics>(&kept_stats, count);
        norm.half_scale_shift = take<ScaleShift>(&kept_stats, count);
        return norm;
    }

    // A tensor (B, H, H, C) in one of the block's arenas.
    Tensor take_from(Arena* arena, int H, int C) const {
        return {take<floatX>(arena, (size_t)B * H * H * C), B, H, H, C};
    }
    // In scratch, which the next block overwrites.
    Tensor take_tensor(int H, int C) { return take_from(&m->scratch, H, C); }
    // In scratch that the block's last weight gradient reads.
    Tensor take_late(int H, int C) { return take_from(&m->late, H, C); }

    // Moments or NormSums of a tensor, in scratch.
    template <typename Sums> Sums* take_sums(int H, int C) {
        return take<Sums>(&m->scratch, (size_t)B * norm_tiles(H * H) * C);
    }

    void reserve_forward() {}
    void reserve_backward() {}

    // layer(arguments) on the side stream, beside what the block does next.
    static Event beside(auto layer, auto... arguments) {
        return on_side_stream_deferred([=] { layer(arguments...); });
    }
};

// ---- embedding: sinusoids -> linear -> SiLU -> linear -> SiLU, and its projections to residual blocks -----
// With --class_cond the class's row of a table is added before the second SiLU. The side stream does all of this while
// the image goes through the first convolution.
struct EmbedBlock : Module {
    enum { EMBED_LINEAR1, EMBED_LINEAR2, EMBED_LABELS };

    static void declare(Plan* plan, const Config& c, Block* block) {
        int E = block->O;
        add_layer(plan, *block, "0.", {E, block->C});
        add_layer(plan, *block, "2.", {E, E});
        if (int rows = label_rows(c)) add_parameter(plan, network.label_table, {rows, E}, INIT_NORMAL);
        block->O = 0;  // each residual block adds the channels of its projection
    }

    int E = m->plan.tensors[block.param].shape[0];
    Tensor sinusoids = take_from(&kept_hidden, 1, block.C);
    Tensor hidden = take_from(&kept_hidden, 1, E);
    Tensor silu_hidden = take_from(&kept_hidden, 1, E);
    Tensor linear2 = take_from(&kept_hidden, 1, E);
    Tensor embedding = take_from(&kept_hidden, 1, E);
    Linear linear1_layer = layer<Linear>(EMBED_LINEAR1);
    Linear linear2_layer = layer<Linear>(EMBED_LINEAR2);
    const int* labels = m->call.labels;

    // Where the labels' table begins in the parameters. It has no bias.
    size_t table() const { return m->plan.tensors[block.param + 2 * EMBED_LABELS].offset; }

    // The residual blocks' embedding layers as one: see place_parameters.
    Linear all_projections() const {
        auto first = std::ranges::find(m->plan.tensors, true, &Parameter::joined);
        return layer_at<Linear>(first - m->plan.tensors.begin(), m->weights);
    }

    void forward() {
        Linear projections = all_projections();
        double unit = m->config.rescale_timesteps ? 1000.0 / m->config.diffusion_steps : 1;

        m->embedding_ready = on_side_stream([=, *this] {
            timestep_embedding(sinusoids, m->call.timesteps, m->config.max_period, unit);
            conv1x1_forward(hidden, sinusoids, linear1_layer);
            run(SiluForward<floatX>{.out = silu_hidden, .x = hidden});

            Tensor of_labels = {};  // the table's rows, to which the layer then adds its product
            if (labels) {
                of_labels = linear2;
                run(LabelForward<floatX>{of_labels, m->weights + table(), labels});
            }
            conv1x1_forward(linear2, silu_hidden, linear2_layer, {.residual = of_labels});
            run(SiluForward<floatX>{.out = embedding, .x = linear2});

            conv1x1_forward(out, embedding, projections);
        });
    }

    Tensor dlinear2 = {}, dhidden = {};

    void reserve_backward() {
        dlinear2 = take_tensor(1, E);
        dhidden = take_tensor(1, E);
    }
    void backward() {
        reserve_backward();
        Tensor dembedding = dhidden, dsilu_hidden = dhidden;  // dhidden's memory holds one after the other
        Linear projections = all_projections();

        beside(conv1x1_backward_weight, projections, dout, embedding);
        conv1x1_backward_input(dembedding, dout, projections);

        run(SiluBackward<floatX>{.dx = dlinear2, .dout = dembedding, .x = linear2});
        if (labels) run(LabelBackward<floatX>{m->dw + table(), dlinear2, labels, label_rows(m->config)});
        beside(conv1x1_backward_weight, linear2_layer, dlinear2, silu_hidden);
        conv1x1_backward_input(dsilu_hidden, dlinear2, linear2_layer);

        run(SiluBackward<floatX>{.dx = dhidden, .dout = dsilu_hidden, .x = hidden});
        beside(conv1x1_backward_weight, linear1_layer, dhidden, sinusoids);
    }
};

// ---- first convolution ------------------------------------------------------------------------------------
struct ConvInBlock : Module {
    static void declare(Plan* plan, const Config&, Block* block) {
        add_layer(plan, *block, "", {block->O, block->C, 3, 3});
    }

    Conv conv = layer<Conv>(0);

    void forward() { conv3x3_forward(out, x, conv); }
    void backward() { beside(conv3x3_backward_weight, conv, dout, x.first, Rows()); }
};

// ---- residual block ---------------------------------------------------------------------------------------
// h = conv1(silu(norm1(x))) + projection;  out = conv2(silu(norm2(h))) + skip(x)
//
// x may be two tensors, concatenated. Where the width changes, skip is a 1x1 convolution, or else the identity. With
// --use_scale_shift_norm the projection has twice as many channels and modulates norm2 instead. With --resblock_updown
// some blocks resize what conv1 reads, and x. --dropout drops elements of what conv2 reads.
struct ResBlock : Module {
    enum { RES_NORM1, RES_CONV1, RES_EMB, RES_NORM2, RES_CONV2, RES_SKIP };

    static void declare(Plan* plan, const Config& c, Block* block) {
        int C = block->C + block->C2;
        int O = block->O;
        int projected = c.use_scale_shift_norm ? 2 * O : O;

        add_layer(plan, *block, "in_layers.0.", {C}, INIT_ONES);
        add_layer(plan, *block, "in_layers.2.", {O, C, 3, 3});
        add_layer(plan, *block, "emb_layers.1.", {projected, embedding_width(c)});
        for (Parameter& t : std::span(plan->tensors).last(2)) t.joined = true;
        add_layer(plan, *block, "out_layers.0.", {O}, INIT_ONES);
        add_layer(plan, *block, "out_layers.3.", {O, O, 3, 3}, INIT_ZEROS);
        if (C != O) add_layer(plan, *block, "skip_connection.", {O, C, 1, 1});

        block->emb = plan->blocks[0].O;
        block->emb_again = c.use_scale_shift_norm;
        plan->blocks[0].O += projected;
    }

    bool changes_width = x.C() != block.O;
    bool resizes = block.H != block.out_H;
    bool adds_x = !changes_width && !resizes;  // the residual is x itself
    bool modulates = m->config.use_scale_shift_norm;
    bool drops = m->call.dropout_step && m->config.dropout > 0;

    Tensor h = take_from(&kept_hidden, block.out_H, block.O);
    Norm norm1 = norm_of(RES_NORM1, x);
    Norm norm2 = norm_of(RES_NORM2, h);
    Conv conv1 = layer<Conv>(RES_CONV1);
    Conv conv2 = layer<Conv>(RES_CONV2);
    Linear skip = changes_width ? layer<Linear>(RES_SKIP) : Linear();
    Rows projection = own_channels(output_of(m, m->plan.blocks[0], B));

    // The block's channels of block 0's output, or of its gradient.
    Rows own_channels(Tensor projections) const { return {projections.data + block.emb, projections.C}; }

    void drop(Tensor y) const {
        const Config& c = m->config;
        run(Dropout<floatX>{y, c.dropout, c.seed, (uint32_t)block.param, m->call.first, m->call.dropout_step});
    }

    Tensor normed1 = {}, normed2 = {};  // what the convolutions read
    Tensor before = {};                 // what norm1 writes, before it is resized

    void reserve_forward() {
        Tensor normed = take_tensor(block.out_H, std::max(x.C(), block.O));  // holds one after the other
        normed1 = normed.with_channels(x.C());
        normed2 = normed.with_channels(block.O);
        before = resizes ? take_tensor(block.H, block.C) : normed1;
        h.moments = take_sums<Moments>(block.out_H, block.O);
        norm2.x = h;  // now with its moments
    }
    void forward() {
        reserve_forward();
        Tensor residual = adds_x ? x.first : out.without_moments();  // conv2, which adds to it, leaves the moments

        Event skip_done = 0;
        if (changes_width) skip_done = on_side_stream([&] { conv1x1_forward(residual, x, skip); });

        Concat input1 = conv1_input();
        if (resizes) resample_forward(residual, x.first);
        wait_for(m->embedding_ready);
        conv3x3_forward(h, input1, conv1, {.emb = modulates ? Rows() : projection});

        if (modulates) norm2.modulation = projection;
        Concat input2 = conv2_input();
        wait_for(skip_done);
        conv3x3_forward(out, input2, conv2, {.residual = residual});
    }

    Concat conv1_input() const {
        if (!resizes) return groupnorm_for_conv3x3(normed1, norm1, block.O);
        groupnorm_forward(before, norm1);
        resample_forward(normed1, before);
        return normed1;
    }

    Concat conv2_input() const {
        if (!drops) return groupnorm_for_conv3x3(normed2, norm2, block.O);
        groupnorm_forward(normed2, norm2);
        drop(normed2);
        return normed2;
    }

    // The norms' outputs, which the weight gradients read, are computed again in backward, in the memory of their
    // gradients:
    //
    // memory    holds, one after the other              is read last by
    // normed2   d(norm2's output), norm2's output       conv2's weight gradient
    // h         h, dh                                   conv1's weight gradient, which may run beside the next block
    // normed1   d(conv1's input), conv1's input         the same
    // before    d(norm1's output), norm1's output       resample_forward (normed1 itself where nothing is resized)
    // dx        skip's input gradient, + norm1's        the block before
    void reserve_backward() {
        norm1.sums = norm2.sums = take_sums<NormSums>(std::max(block.H, block.out_H), std::max(x.C(), block.O));
        normed2 = take_tensor(block.out_H, block.O);
        normed1 = take_late(block.out_H, x.C());
        before = resizes ? take_tensor(block.H, block.C) : normed1;
    }
    void backward() {
        reserve_backward();
        Tensor dnormed2 = normed2, dh = h, dnormed1 = normed1, dbefore = before;
        Rows dprojection = own_channels(output_gradient_of(m, m->plan.blocks[0], B));
        if (modulates) {
            norm2.modulation = projection;
            norm2.dmodulation = dprojection;
        }

        conv3x3_backward_input(dnormed2, dout, conv2, {.norm = drops ? Norm() : norm2});
        if (drops) {
            drop(dnormed2);
            groupnorm_backward_sums(dnormed2, dnormed2, norm2);
        }
        if (modulates) run(ModulationBackward<floatX>{norm2});

        if (changes_width) {
            beside(conv1x1_backward_weight, skip, dout, x);
            conv1x1_backward_input(dx, dout, skip, {.accumulate = block.accumulate});
        }

        groupnorm_backward(dh, normed2, dnormed2, norm2);
        if (drops) drop(normed2);
        beside(conv3x3_backward_weight, conv2, dout, normed2, Rows());

        conv3x3_backward_input(dnormed1, dh, conv1, {.norm = resizes ? Norm() : norm1});
        if (resizes) {
            resample_backward(dx.first, dout, block.accumulate);
            resample_backward(dbefore, dnormed1);
            groupnorm_backward_sums(dbefore, dbefore, norm1);
        }

        // Where x is not added itself, dx has the gradient of the residual already.
        groupnorm_backward(dx, before, dbefore, norm1,
                           {.residual = adds_x ? dout : Tensor(), .accumulate = !adds_x || block.accumulate});
        if (resizes) resample_forward(normed1, before);
        beside(conv3x3_backward_weight, conv1, dh, normed1, modulates ? Rows() : dprojection);
    }
};

// ---- attention block --------------------------------------------------------------------------------------
// out = x + projection(attention(qkv(norm(x))))
struct AttentionBlock : Module {
    enum { ATT_NORM, ATT_QKV, ATT_PROJ };

    static void declare(Plan* plan, const Config& c, Block* block) {
        int C = block->C;
        bool in_decoder = std::ranges::any_of(plan->blocks, [](const Block& b) { return b.skip >= 0; });
        block->heads = heads_of(c, C, in_decoder);

        add_layer(plan, *block, "norm.", {C}, INIT_ONES);
        add_layer(plan, *block, "qkv.", {3 * C, C, 1});
        add_layer(plan, *block, "proj_out.", {C, C, 1}, INIT_ZEROS);

        double T = (double)block->H * block->H;
        plan->flops += 3.0 * 4 * T * T * C;  // q k^T and P v, each 2 T T C; backward takes twice as many
    }

    // No SiLU follows attention's norm, as it does every other.
    static Norm without_silu(Norm norm) {
        norm.silu = false;
        return norm;
    }

    Tensor qkv = take_from(&kept_hidden, block.H, 3 * block.C);
    Tensor attended = take_from(&kept_hidden, block.H, block.C);  // the heads' outputs, side by side
    Norm norm = without_silu(norm_of(ATT_NORM, x));
    float* lse = take<float>(&kept_stats, (size_t)B * block.heads * block.H * block.H);
    Linear to_qkv = layer<Linear>(ATT_QKV);
    Linear projection = layer<Linear>(ATT_PROJ);
    Tensor normed = {};

    void reserve_forward() { normed = take_tensor(block.H, block.C); }
    void forward() {
        reserve_forward();
        groupnorm_forward(normed, norm);
        conv1x1_forward(qkv, normed, to_qkv);
        attention_forward(attended, lse, qkv, block.heads);
        conv1x1_forward(out, attended, projection, {.residual = x.first});
    }

    Tensor dattended = {}, dqkv = {};

    void reserve_backward() {
        dattended = take_tensor(block.H, block.C);
        dqkv = take_late(block.H, 3 * block.C);
        normed = take_late(block.H, block.C);
        norm.sums = take_sums<NormSums>(block.H, block.C);
    }
    void backward() {
        reserve_backward();
        Tensor dnormed = dattended;  // overwrites it, once attention's backward has read it

        beside(conv1x1_backward_weight, projection, dout, attended);
        conv1x1_backward_input(dattended, dout, projection);
        attention_backward(dqkv, dattended, attended, lse, qkv, block.heads);
        conv1x1_backward_input(dnormed, dqkv, to_qkv, {.norm = norm});
        groupnorm_backward(dx, normed, dnormed, norm, {.residual = dout, .accumulate = block.accumulate});
        beside(conv1x1_backward_weight, to_qkv, dqkv, normed);
    }
};

// ---- up- and down-sampling --------------------------------------------------------------------------------
// By itself up-sampling is F.interpolate(x, scale_factor=2, mode="nearest"), and down-sampling F.avg_pool2d(x, 2).
// With --conv_resample up-sampling is F.conv2d(F.interpolate(x, scale_factor=2, mode="nearest"), w, bias, padding=1),
// and down-sampling is F.conv2d(x, w, bias, stride=2, padding=1): the convolution is done without a stride, and every
// other pixel of every other row is kept.
struct ResampleBlock : Module {
    static void declare(Plan* plan, const Config& c, Block* block) {
        std::string layer = block->kind == BLOCK_UP ? "conv." : "op.";
        if (c.conv_resample) add_layer(plan, *block, layer, {block->O, block->C, 3, 3});
    }

    bool convolves = block.num_params > 0;
    bool up = block.out_H > block.H;
    Conv conv = convolves ? layer<Conv>(0) : Conv();
    int larger = std::max(block.H, block.out_H);
    Tensor large = {}, dlarge = {};  // at the larger of the two sizes

    void reserve_forward() {
        if (convolves) large = take_tensor(larger, block.C);
    }
    void forward() {
        reserve_forward();
        if (convolves && up) {
            resample_forward(large, x.first);
            conv3x3_forward(out, large, conv);  // which leaves the output's moments
            return;
        }
        if (convolves) {
            conv3x3_forward(large, x, conv);
            run(Resample<floatX>{.out = out, .x = large, .first_only = true});
        } else {
            resample_forward(out, x.first);
        }
        channel_moments(out);
    }

    void reserve_backward() {
        if (!convolves) return;
        large = take_tensor(larger, block.C);
        dlarge = take_tensor(larger, block.C);
    }
    void backward() {
        reserve_backward();
        if (!convolves) return resample_backward(dx.first, dout, block.accumulate);

        Event weights_done;  // the weight gradient reads scratch and dout, which the next block overwrites
        if (up) {
            resample_forward(large, x.first);
            weights_done = beside(conv3x3_backward_weight, conv, dout, large, Rows());
            conv3x3_backward_input(dlarge, dout, conv);
            resample_backward(dx.first, dlarge, block.accumulate);
        } else {
            run(Resample<floatX>{.out = dlarge, .x = dout, .first_only = true});
            weights_done = beside(conv3x3_backward_weight, conv, dlarge, x.first, Rows());
            conv3x3_backward_input(dx.first, dlarge, conv, {.accumulate = block.accumulate});
        }
        wait_for(weights_done);
    }
};

// ---- last block: out = conv(silu(norm(x))) ----------------------------------------------------------------
struct OutBlock : Module {
    enum { OUT_NORM, OUT_CONV };

    static void declare(Plan* plan, const Config&, Block* block) {
        add_layer(plan, *block, "0.", {block->C}, INIT_ONES);
        add_layer(plan, *block, "2.", {block->O, block->C, 3, 3}, INIT_ZEROS);
    }

    Norm norm = norm_of(OUT_NORM, x);
    Conv conv = layer<Conv>(OUT_CONV);
    Tensor normed = {};

    void reserve_forward() { normed = take_tensor(block.H, block.C); }
    void forward() {
        reserve_forward();
        groupnorm_forward(normed, norm);
        conv3x3_forward(out, normed, conv);
    }

    void reserve_backward() {
        normed = take_late(block.H, block.C);
        norm.sums = take_sums<NormSums>(block.H, block.C);
    }
    void backward() {
        reserve_backward();
        Tensor dnormed = dx.first;  // has the same size, and is overwritten at the end

        conv3x3_backward_input(dnormed, dout, conv, {.norm = norm});
        groupnorm_backward(dx, normed, dnormed, norm);
        beside(conv3x3_backward_weight, conv, dout, normed, Rows());
    }
};

// Calls use(type) with the struct of a kind, as a std::type_identity.
static void with_kind(int kind, auto use) {
    switch ((BlockKind)kind) {
        case BLOCK_EMBED: return use(std::type_identity<EmbedBlock>());
        case BLOCK_CONV_IN: return use(std::type_identity<ConvInBlock>());
        case BLOCK_RES: return use(std::type_identity<ResBlock>());
        case BLOCK_ATTENTION: return use(std::type_identity<AttentionBlock>());
        case BLOCK_DOWN:
        case BLOCK_UP: return use(std::type_identity<ResampleBlock>());
        case BLOCK_OUT: return use(std::type_identity<OutBlock>());
    }
}

// Calls pass(module) with a module made for this block.
static void with_module(Model* m, const Block& block, int B, auto pass) {
    with_kind(block.kind, [&]<typename Kind>(std::type_identity<Kind>) { pass(Kind{{m, block, B}}); });
}

static void block_forward(Model* m, const Block& block, int B) {
    with_module(m, block, B, [](auto module) { module.forward(); });
}

static void block_backward(Model* m, const Block& block, int B) {
    with_module(m, block, B, [](auto module) { module.backward(); });
}

// ==== 5  PLAN, FORWARD AND BACKWARD =======================================================================
// ---- plan -------------------------------------------------------------------------------------------------
// Lays the parameters out in memory. Matrices come first, because they alone decay. The embedding layers of
// all residual blocks lie next to each other, so that block 0 computes them as one layer: their weights are
// the last matrices, their biases come next. Files keep PyTorch's order.
static void place_parameters(Plan* plan) {
    std::vector<Parameter*> order;
    for (Parameter& t : plan->tensors) order.push_back(&t);
    enum { MATRIX, JOINED_MATRIX, JOINED_BIAS, OTHER };
    auto group_of = [](const Parameter* t) {
        if (is_matrix(*t)) return t->joined ? JOINED_MATRIX : MATRIX;
        return t->joined ? JOINED_BIAS : OTHER;
    };
    std::ranges::stable_sort(order, {}, group_of);

    size_t offset = 0;
    for (Parameter* t : order) {
        t->offset = offset;
        offset += t->size;
    }
}

static std::vector<Buffer*> buffers_of(Block* b) {
    return {&b->out,      &b->hidden,          &b->moments,          &b->stats,
            &b->gradient, &b->scratch_forward, &b->scratch_backward, &b->late};
}

// Computes the sizes of what blocks leave to others: outputs, their moments, and gradients.
static void size_outputs(Plan* plan, const Config& c) {
    const int n = (int)plan->blocks.size();
    const size_t B = plan->batch;
    for (int i = 0; i < n; i++) {
        Block& b = plan->blocks[i];
        size_t pixels = (size_t)b.out_H * b.out_H;
        b.out.bytes = aligned(B * pixels * padded(b.O) * sizeof(floatX));
        if (plan->training) b.gradient.bytes = b.out.bytes;

        // A group norm may read any output but the embedding and the last. The network of dev/dit has none.
        bool is_normed = i > 0 && i < n - 1 && c.norm_groups;
        if (is_normed) b.moments.bytes = aligned(B * norm_tiles((int)pixels) * b.O * sizeof(Moments));
    }
}

// Computes the live range of every buffer, in steps of the plan.
static void compute_lifetimes(Plan* plan) {
    const int n = (int)plan->blocks.size();
    for (int i = 0; i < n; i++) {
        Block& b = plan->blocks[i];
        const bool is_last = i == n - 1;
        const int back = 2 * n - 1 - i;  // the step of its backward

        for (Buffer* forward : {&b.out, &b.moments, &b.hidden, &b.stats, &b.scratch_forward}) forward->used_at(i);
        for (Buffer* backward : {&b.gradient, &b.scratch_backward, &b.late}) backward->used_at(back);
        if (is_last) b.out.used_at(2 * n);  // by the caller, after the last step

        // The last step at which the block reads what its forward has left. Block 0 runs on the side stream,
        // which may still be at work when the main stream has come to later blocks.
        int kept = i;
        if (plan->training || i == 0) kept = back;
        b.hidden.used_at(kept);
        b.stats.used_at(kept);

        // What the side stream reads beside the next block's backward: `late`; a residual block's h, which
        // has become dh; and the output's gradient where the block's only weight gradient is that of the
        // first or the last convolution.
        b.late.used_at(back + 1);
        if (plan->training && b.emb >= 0) b.hidden.used_at(back + 1);
        if (i == 1 || is_last) b.gradient.used_at(back + 1);

        // Backward of a block with weights reads its inputs again. It reads the projection, which is a part
        // of block 0's output, again if emb_again.
        const int embedding = b.emb < 0 ? -1 : 0;
        for (int source : {b.input, b.skip, embedding}) {
            if (source < 0) continue;
            Block& read = plan->blocks[source];
            bool again = source == 0 ? b.emb_again : b.num_params > 0;
            read.out.used_at(again ? kept : i);
            read.moments.used_at(i);
            read.gradient.used_at(back);
        }
    }
}

// Measures what blocks keep and their scratch: constructs each block over arenas that only count, and has it
// reserve its memory as forward and backward do. Nothing is launched.
static void measure_buffers(Plan* plan, const Config& c) {
    Model m = Model();
    m.config = c;
    m.plan = *plan;
    for (Block& block : plan->blocks) {
        with_module(&m, block, plan->batch, [&](auto constructed) {
            block.hidden.bytes = constructed.kept_hidden.used;
            block.stats.bytes = constructed.kept_stats.used;

            m.scratch = m.late = Arena();
            constructed.reserve_forward();
            block.scratch_forward.bytes = m.scratch.used;
            if (!plan->training) return;

            m.scratch = Arena();
            constructed.reserve_backward();
            block.scratch_backward.bytes = m.scratch.used;
            block.late.bytes = m.late.used;
        });
    }
}

// Gives every buffer an offset, the largest first: the lowest at which it overlaps none that is in use at the
// same step.
static void place_buffers(Plan* plan) {
    std::vector<Buffer*> buffers;
    for (Block& block : plan->blocks) std::ranges::copy(buffers_of(&block), std::back_inserter(buffers));
    std::ranges::stable_sort(buffers, std::greater(), &Buffer::bytes);

    std::vector<Buffer*> placed;  // sorted by offset, so that b has to move upwards only
    for (Buffer* b : buffers) {
        for (const Buffer* other : placed) {
            bool is_live_with = other->first <= b->last && b->first <= other->last;
            bool is_in_the_way = other->offset < b->offset + b->bytes;
            if (is_live_with && is_in_the_way) b->offset = std::max(b->offset, other->offset + other->bytes);
        }
        placed.insert(std::ranges::upper_bound(placed, b->offset, {}, &Buffer::offset), b);
        plan->arena_bytes = std::max(plan->arena_bytes, b->offset + b->bytes);
    }
}

// Adds a block after the last one, whose output it reads. It comes with its kind and O, with `skip` if it
// reads a second output, and with out_H if it changes the size.
static void add_block(Plan* plan, const Config& c, const std::string& name, Block block) {
    snprintf(block.name, sizeof block.name, "%s", name.c_str());
    if (block.kind == BLOCK_EMBED) {
        block.C = c.num_channels;
        block.H = 1;
    } else if (block.kind == BLOCK_CONV_IN) {
        block.C = c.in_channels;
        block.H = c.image_size;
    } else {
        block.input = (int)plan->blocks.size() - 1;
        block.C = plan->blocks.back().O;
        block.H = plan->blocks.back().out_H;
    }
    if (!block.out_H) block.out_H = block.H;

    if (block.skip >= 0) {
        block.C2 = plan->blocks[block.skip].O;
        plan->blocks[block.skip + 1].accumulate = true;  // the encoder's next block, which reads the same output
    }

    block.param = (int)plan->tensors.size();
    with_kind(block.kind, [&]<typename Kind>(std::type_identity<Kind>) { Kind::declare(plan, c, &block); });
    block.num_params = (int)plan->tensors.size() - block.param;
    plan->blocks.push_back(block);
}

// The UNet: a level is num_res_blocks residual blocks, each of which may be followed by attention. The
// encoder goes down from level to level; each of its groups' outputs is a skip, which the decoder reads on
// its way up.
static Plan make_plan(const Config& c, int batch, bool training) {
    Plan plan = {.batch = batch, .training = training};
    const int levels = list_length(c.channel_mult);
    int width = level_width(c, 0);  // output channels of the blocks that are added
    std::vector<int> skips;         // the blocks whose outputs the decoder is still to read
    std::string group;              // of blocks, as files name it
    int number = 0;                 // of the next block in its group
    int output_groups = 0;

    auto begin_group = [&](const std::string& name) {
        group = name;
        number = 0;
    };
    auto last_size = [&] { return plan.blocks.back().out_H; };
    auto add = [&](Block block) {
        block.O = width;
        add_block(&plan, c, text("%s.%d", group, number++), block);
    };
    auto add_residual = [&](int skip = -1) {
        add({.kind = BLOCK_RES, .skip = skip});
        if (attends(c, last_size())) add({.kind = BLOCK_ATTENTION});
    };
    auto add_resampling = [&](BlockKind kind, int out_H) {
        add({.kind = c.resblock_updown ? BLOCK_RES : kind, .out_H = out_H});
    };
    // The last block's output becomes a skip, and the encoder's next group begins.
    auto leave_skip = [&] {
        skips.push_back((int)plan.blocks.size() - 1);
        begin_group(text("input_blocks.%zu", skips.size()));
    };

    add_block(&plan, c, "time_embed", {.kind = BLOCK_EMBED, .O = embedding_width(c)});

    begin_group("input_blocks.0");
    add({.kind = BLOCK_CONV_IN});
    leave_skip();
    for (int level = 0; level < levels; level++) {
        width = level_width(c, level);
        for (int i = 0; i < c.num_res_blocks; i++) {
            add_residual();
            leave_skip();
        }
        if (level == levels - 1) break;
        add_resampling(BLOCK_DOWN, last_size() / 2);
        leave_skip();
    }

    begin_group("middle_block");
    add({.kind = BLOCK_RES});
    add({.kind = BLOCK_ATTENTION});
    add({.kind = BLOCK_RES});

    for (int level = levels - 1; level >= 0; level--) {
        width = level_width(c, level);
        for (int i = 0; i <= c.num_res_blocks; i++) {
            begin_group(text("output_blocks.%d", output_groups++));
            add_residual(skips.back());
            skips.pop_back();
            if (level && i == c.num_res_blocks) add_resampling(BLOCK_UP, 2 * last_size());
        }
    }

    int predictions = c.learn_sigma ? 2 : 1;  // of each channel its value and, if learned, its variance
    add_block(&plan, c, "out", {.kind = BLOCK_OUT, .O = predictions * c.in_channels});

    place_parameters(&plan);
    size_outputs(&plan, c);
    compute_lifetimes(&plan);
    measure_buffers(&plan, c);
    place_buffers(&plan);
    return plan;
}

// ---- forward and backward --------------------------------------------------------------------------------
// A call for the first B samples of the model's batch.
static NetworkCall call_of(const Model* m, int B) {
    return {.B = B, .timesteps = m->timesteps, .labels = m->labels};
}

// input (B, H, W, PIXEL) and the call's timesteps and labels -> the last block's output.
static void unet_forward(Model* m, const NetworkCall& call) {
    m->call = call;
    for (const Block& block : m->plan.blocks) {
        PROFILE(block.name);
        m->scratch = arena_of(m, block.scratch_forward);
        network.forward(m, block, call.B);
    }
}

static floatX* unet_output(const Model* m) { return output_of(m, m->plan.blocks.back(), 1).data; }

// Backward of m->call: the last block's output gradient -> every weight gradient, dw (num_floats). A block's last
// weight gradient on the side stream may go on beside the backward of the next block; its others are waited for.
static void unet_backward(Model* m, float* dw) {
    m->dw = dw;
    for (int i = (int)m->plan.blocks.size() - 1; i >= 0; i--) {
        const Block& block = m->plan.blocks[i];
        PROFILE(block.name);
        m->scratch = arena_of(m, block.scratch_backward);
        m->late = arena_of(m, block.late);

        Event of_block_before = newest_event;
        network.backward(m, block, m->call.B);
        // Waits for all but the newest event, which is of this block; or for all, if the block started none.
        wait_for(std::max(newest_event - 1, of_block_before));
    }
    wait_for(newest_event);
}

// ==== 6  DIFFUSION AND SAMPLERS ============================================================================
// ---- schedules --------------------------------------------------------------------------------------------
// A timestep's share of the image and of the noise: x_t = alpha x0 + sigma eps, equation 4 of Ho et al. (2020).
struct NoiseLevel {
    double alpha, sigma;
};

// The sigma of Karras et al. (2022), infinite where nothing of the image is left.
static double noise_ratio(NoiseLevel level) { return level.sigma / level.alpha; }

// The variance of the noise between a level and a noisier one: beta where alpha^2 + sigma^2 = 1.
static double transition_variance(NoiseLevel less, NoiseLevel more) {
    double ratio = more.alpha / less.alpha;
    return more.sigma * more.sigma - ratio * ratio * less.sigma * less.sigma;
}

// Ho et al. (2020), section 4, stretched to other T as guided-diffusion does. It stays below 1: see
// check_config.
static double linear_beta(int t, int T) {
    double first = 1e-4 * 1000.0 / T;
    double last = 0.02 * 1000.0 / T;
    return first + (last - first) * t / (T - 1);
}

// Nichol and Dhariwal, "Improved Denoising Diffusion Probabilistic Models" (2021), equation 17.
static double cosine_beta(int t, int T) {
    auto f = [](double s) { return pow(cos((s + 0.008) / 1.008 * M_PI / 2), 2); };
    return std::min(1 - f((t + 1.0) / T) / f((double)t / T), 0.999);
}

// Alpha is shifted so that its last is 0 and scaled so that its first stays: algorithm 1 of Lin et al.,
// "Common Diffusion Noise Schedules and Sample Steps are Flawed" (2023). For schedules of betas, where
// alpha^2 + sigma^2 = 1.
static void rescale_to_zero_terminal_snr(std::vector<NoiseLevel>* schedule) {
    double first = schedule->front().alpha;
    double last = schedule->back().alpha;
    for (NoiseLevel& level : *schedule) {
        level.alpha = (level.alpha - last) * first / (first - last);
        level.sigma = sqrt(1 - level.alpha * level.alpha);
    }
}

// Rectified flow: the straight line from the image to the noise. Liu et al., "Flow Straight and Fast" (2022), and
// Lipman et al., "Flow Matching for Generative Modeling" (2022).
static NoiseLevel flow_level(int t, int T) {
    double s = (t + 1.0) / T;
    return {1 - s, s};
}

// Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models" (2022): sigmas from
// 0.002 to 80, spaced by equation 5 with rho = 7, of images whose standard deviation is 0.5. The network's
// input is scaled to a standard deviation of 1, by table 1's c_in.
const double SIGMA_DATA = 0.5;
static NoiseLevel edm_level(int t, int T) {
    double smallest = pow(0.002, 1.0 / 7);
    double largest = pow(80, 1.0 / 7);
    double sigma = pow(smallest + (largest - smallest) * t / (T - 1), 7);
    double c_in = 1 / hypot(sigma, SIGMA_DATA);
    return {c_in, c_in * sigma};
}

// The level of each timestep, from the least noise to the most. The first has some noise, because a step
// divides by its sigma. The last has a sigma of about 1, because sampling begins with noise of that standard
// deviation; its alpha may be 0, but not with --predict eps.
//
// A new schedule is a function such as flow_level, a case here, and a name at the same place in NoiseSchedule
// and in FLAGS of unet_io.h. check_config says what it does not go with, and noise_levels of unet_io.py is
// its mirror.
static std::vector<NoiseLevel> make_schedule(const Config& c) {
    const int T = c.diffusion_steps;
    std::vector<NoiseLevel> schedule;
    double abar = 1;  // alpha-bar of Ho et al. (2020): the product of all 1 - beta so far
    auto add_beta = [&](double beta) {
        abar *= 1 - beta;
        schedule.push_back({sqrt(abar), sqrt(1 - abar)});
    };

    for (int t = 0; t < T; t++) {
        switch ((NoiseSchedule)c.noise_schedule) {
            case SCHEDULE_LINEAR: add_beta(linear_beta(t, T)); break;
            case SCHEDULE_COSINE: add_beta(cosine_beta(t, T)); break;
            case SCHEDULE_FLOW: schedule.push_back(flow_level(t, T)); break;
            case SCHEDULE_EDM: schedule.push_back(edm_level(t, T)); break;
        }
    }
    if (c.zero_terminal_snr) rescale_to_zero_terminal_snr(&schedule);
    return schedule;
}

// What the network predicts: eps times the noise + x0 times the image.
struct Target {
    double eps, x0;
};

// Karras et al. (2022), equation 8: (x0 - c_skip (x0 + noise_ratio eps)) / c_out, with c_skip and c_out of table 1.
static Target edm_target(NoiseLevel level) {
    double scale = hypot(level.sigma, SIGMA_DATA * level.alpha);
    return {-SIGMA_DATA * level.alpha / scale, level.sigma / (SIGMA_DATA * scale)};
}

// A new prediction is a case here, and a name at the same place in the enumeration Prediction and in FLAGS of
// unet_io.h. The loss's weights and the samplers follow from it.
static Target target_at(int predict, NoiseLevel level) {
    switch ((Prediction)predict) {
        case PREDICT_EPS: return {1, 0};
        // Salimans and Ho, "Progressive Distillation for Fast Sampling of Diffusion Models" (2022), appendix D
        case PREDICT_V: return {level.alpha, -level.sigma};
        case PREDICT_FLOW: return {1, -1};  // minus the velocity of Liu et al. (2022)
        case PREDICT_EDM: return edm_target(level);
        case PREDICT_X0: return {0, 1};
    }
    return {};
}

// The image that follows from a prediction: x0 = x times the noised image + out times the prediction.
struct Denoiser {
    double x, out;
};

// Solves the equations of NoiseLevel and Target for x0.
static Denoiser denoiser_at(int predict, NoiseLevel level) {
    Target target = target_at(predict, level);
    double determinant = level.alpha * target.eps - level.sigma * target.x0;
    return {target.eps / determinant, -level.sigma / determinant};
}

// A row of Model.schedule: what training needs of a timestep.
struct ScheduleRow {
    float alpha, sigma;           // of the NoiseLevel
    float target_eps, target_x0;  // of the Target
    float weight;                 // of the squared error
    // For --learn_sigma, of the posterior q(x_t-1 | x_t, x0), equation 7 of Ho et al. (2020):
    float posterior_log_variance_clipped;  // timestep 0 has no variance, and takes timestep 1's
    float log_variance_range;              // log beta minus the line above
    float mean_error;                      // by how much its mean is off where the prediction is off by 1
    // For --consistency:
    float noise_fraction;
    float x0_error;  // by how much x0 is off where the prediction is off by 1
};

// It rises from 0, for the image, to 1, for noise alone. With the flow schedule it rises in equal steps.
static double noise_fraction(NoiseLevel level) { return level.sigma / (level.alpha + level.sigma); }

// The probability that training draws timestep t or one before it. Either all are equally likely, or the
// logarithm of the noise_ratio is normal, as in Karras et al. (2022), table 1; with the flow schedule this is
// the logit-normal distribution of Esser et al., "Scaling Rectified Flow Transformers for High-Resolution
// Image Synthesis" (2024). A timestep stands for the levels that are nearer to it than to its neighbours, by
// their noise_fraction.
static double cumulative_probability(const Config& c, const std::vector<NoiseLevel>& schedule, int t) {
    if (c.timestep_sampling == TIMESTEPS_UNIFORM) return (t + 1.0) / c.diffusion_steps;
    if (t == c.diffusion_steps - 1) return 1;

    double middle = (noise_fraction(schedule[t]) + noise_fraction(schedule[t + 1])) / 2;
    double deviations = (log(middle / (1 - middle)) - c.timestep_mean) / c.timestep_std;
    return erfc(-deviations / sqrt(2.0)) / 2;
}

// For each timestep the largest random word that draws it or an earlier one. These words never fall from one
// timestep to the next. Where two timesteps have the same word, the later one is never drawn.
static std::vector<uint32_t> make_last_words(const Config& c) {
    std::vector<NoiseLevel> schedule = make_schedule(c);
    std::vector<uint32_t> last_words;
    for (int t = 0; t < c.diffusion_steps; t++) {
        double words = ceil(0x1p32 * cumulative_probability(c, schedule, t));
        last_words.push_back((uint32_t)(std::max(words, 1.0) - 1));
    }
    return last_words;
}

// The first timestep before `end` for which holds() is true, or `end`. A binary search: holds() must be true
// for all later timesteps, too.
HOST_DEVICE static inline int first_timestep(int end, const auto& holds) {
    int first = 0;
    while (first < end) {
        int middle = (first + end) / 2;
        if (holds(middle)) {
            end = middle;
        } else {
            first = middle + 1;
        }
    }
    return first;
}

// The timestep, of T, that a random word draws: the first whose last word is at least this word.
HOST_DEVICE static inline int draw_timestep(const uint32_t* last_words, int T, uint32_t word) {
    return first_timestep(T - 1, [&](int t) { return word <= last_words[t]; });
}

// The weight of the prediction's squared error. Without gamma it is 1. With gamma the squared error of x0 has the
// weight min(SNR, gamma): Hang et al., "Efficient Diffusion Training via Min-SNR Weighting Strategy" (2023).
static double loss_weight(double snr, double x0_error, double gamma) {
    if (gamma <= 0) return 1;
    return std::min(snr, gamma) * x0_error * x0_error;
}

static std::vector<ScheduleRow> make_schedule_rows(const Config& c) {
    std::vector<NoiseLevel> schedule = make_schedule(c);
    auto level_at = [&](int t) { return t < 0 ? NoiseLevel{1, 0} : schedule[t]; };
    auto beta_at = [&](int t) { return transition_variance(level_at(t - 1), level_at(t)); };

    std::vector<ScheduleRow> rows;
    for (int t = 0; t < c.diffusion_steps; t++) {
        NoiseLevel level = level_at(t);
        double variance = level.sigma * level.sigma;
        Target target = target_at(c.predict, level);
        double x0_error = denoiser_at(c.predict, level).out;
        double snr = level.alpha * level.alpha / variance;

        int clipped = std::max(t, 1);
        double ratio = schedule[clipped - 1].sigma / schedule[clipped].sigma;
        double posterior_variance = beta_at(clipped) * ratio * ratio;

        rows.push_back({.alpha = (float)level.alpha,
                        .sigma = (float)level.sigma,
                        .target_eps = (float)target.eps,
                        .target_x0 = (float)target.x0,
                        .weight = (float)loss_weight(snr, x0_error, c.min_snr_gamma),
                        .posterior_log_variance_clipped = (float)log(posterior_variance),
                        .log_variance_range = (float)log(beta_at(t) / posterior_variance),
                        .mean_error = (float)(beta_at(t) * level_at(t - 1).alpha / variance * x0_error),
                        .noise_fraction = (float)noise_fraction(level),
                        .x0_error = (float)x0_error});
    }
    return rows;
}

// x0 within [-1, 1]; a NaN stays one.
HOST_DEVICE static inline float clamped(float x0) {
    if (x0 < -1) return -1;
    if (x0 > 1) return 1;
    return x0;
}

// ---- noising ----------------------------------------------------------------------------------------------
// An item of the layers below: four pixels of image b with all channels; the last item of an image may have
// fewer. The noise is in the order (C, H, W), as images are in files, and what the network reads is in
// (B, H, W, PIXEL). An item's pixels lie together in both, so that a GPU's threads read and write whole lines.
struct FourPixels {
    int pixels;  // of the image: H W
    int b;
    int first;  // the number of the item's first pixel in the image
    int n;      // of the item's pixels

    // How many such items there are.
    static size_t count(const auto& images) { return (size_t)images.B * ceil_div(images.T(), 4); }

    HOST_DEVICE FourPixels(size_t item, int pixels) : pixels(pixels) {
        int items = ceil_div(pixels, 4);
        b = (int)(item / items);
        first = 4 * (int)(item % items);
        n = pixels - first < 4 ? pixels - first : 4;
    }

    // Where channel c of the first pixel lies in (C, H, W), and of pixel i in (B, H, W, PIXEL).
    HOST_DEVICE int element(int c) const { return c * pixels + first; }
    HOST_DEVICE size_t at(int i, int c) const { return ((size_t)b * pixels + first + i) * PIXEL + c; }
};

// x_t = alpha x0 + sigma eps, and the network's target. With offset noise eps also has offset_noise times a
// normal that all pixels of a channel share, so that an image's mean is learned, too.
template <typename Real> struct AddNoise {
    TensorOf<Real> x_t;
    float* target;                // (B, H, W, PIXEL)
    const float* images;          // (B, C, H, W): x0
    const ScheduleRow* schedule;  // (diffusion_steps)
    const int* timesteps;         // (B)
    const int64_t* step;          // null in validation, whose noise never changes and has no offset
    int first;                    // the sample of the batch that x_t begins with
    int channels;
    float offset_noise;
    uint32_t seed;
    RandomStream stream = STREAM_NOISE;

    size_t items() const { return FourPixels::count(x_t); }
    HOST_DEVICE void operator()(size_t item) const {
        FourPixels four(item, x_t.H * x_t.W);
        const uint32_t number = step ? (uint32_t)*step : 0;
        const uint32_t sample = first + four.b;
        const ScheduleRow at = schedule[timesteps[four.b]];

        float offset = step ? offset_noise : 0;
        float shift[4] = {};  // by channel
        if (offset > 0) random_normals(shift, seed, STREAM_OFFSET, 0, sample, number);

        Vector<Real, MAX_CHANNELS> noised[4] = {};  // by pixel
        Vector<float, MAX_CHANNELS> wanted[4] = {};
        UNROLLED_FOR (int c = 0; c < MAX_CHANNELS && c < channels; c++) {
            float normal[4];
            random_normals_at(normal, seed, stream, four.element(c), sample, number);
            UNROLLED_FOR (int i = 0; i < 4 && i < four.n; i++) {
                float x0 = images[(size_t)four.b * channels * four.pixels + four.element(c) + i];
                float eps = fmaf(offset, shift[c], normal[i]);
                noised[i][c] = (Real)(at.alpha * x0 + at.sigma * eps);
                wanted[i][c] = fmaf(at.target_eps, eps, at.target_x0 * x0);
            }
        }
        UNROLLED_FOR (int i = 0; i < 4 && i < four.n; i++) {
            store<MAX_CHANNELS>(x_t.data + four.at(i, 0), noised[i]);
            store<MAX_CHANNELS>(target + four.at(i, 0), wanted[i]);
        }
    }
};

// ---- loss -------------------------------------------------------------------------------------------------
// A team adds up a chunk: so many elements of one sample, of all its PIXEL channels.
enum { LOSS_CHUNK = 4096 };
// How many chunks a sample has.
HOST_DEVICE static inline int loss_chunks(int pixels) { return ceil_div((size_t)pixels * PIXEL, LOSS_CHUNK); }

// The loss of a batch: where its sums go, and what the samples' weights follow from. A layer that has a
// BatchLoss works on B of the batch's samples, from `first` on. Its b counts from there.
struct BatchLoss {
    float* chunk_sums;                      // (batch_size, loss_chunks(pixels)), not weighted
    const int* timesteps = nullptr;         // (batch_size)
    const ScheduleRow* schedule = nullptr;  // (diffusion_steps)
    int batch_size, pixels, channels, diffusion_steps;
    float* variance_chunk_sums = nullptr;  // the same of the term that --learn_sigma adds; null: there is none
    const float* weights = nullptr;        // (batch_size); null: those of the schedule
    bool on_paths = false;                 // the loss is path_loss instead of the squared error
    int width = 0;                         // of an image, in pixels; only path_loss reads it
    int first = 0, B = batch_size;

    HOST_DEVICE double elements() const { return (double)batch_size * pixels * channels; }
    HOST_DEVICE int timestep(int b) const { return timesteps[first + b]; }
    HOST_DEVICE const ScheduleRow& at(int b) const { return schedule[timestep(b)]; }
    HOST_DEVICE float weight_of(int b) const { return weights ? weights[first + b] : at(b).weight; }
};

// --learn_sigma adds a thousandth of the variational bound to the loss: Nichol and Dhariwal (2021), equations 15
// and 16. The bound is a sum over the timesteps, in bits for each number of the image. The loss is a mean over
// timesteps, so that a sample adds T times the term of its own timestep. The functions below are named as in
// guided-diffusion.

// A function's value, and its derivative with respect to the logarithm of the variance, to z, or to an error.
struct ValueAndSlope {
    float value, slope;
};

// KL(p || q) of two Gaussians. q has this log_variance, which is larger than p's by `above`, and its mean
// differs from p's by `error`. The slope is with respect to q's log_variance.
HOST_DEVICE static inline ValueAndSlope normal_kl(float error, float log_variance, float above) {
    float spread = expm1f(-above) + error * error * expf(-log_variance);
    return {0.5f * (above + spread), -0.5f * spread};
}

// An approximation of the standard normal distribution function (Page, 1977).
HOST_DEVICE static inline ValueAndSlope approx_standard_normal_cdf(float z) {
    const float k = 1.5957691f;  // sqrt(8 / pi)
    float below = sigmoid(k * (z + 0.044715f * z * z * z));
    return {below, below * (1 - below) * k * (1 + 3 * 0.044715f * z * z)};
}

// The term of t = 0: the logarithm of the probability of x0's byte, which is that between the byte's two
// edges. Black has all below its upper edge, and white all above its lower one. For other bytes only the
// mean's distance from x0 counts: the mean is put above x0, so that no two numbers near 1 are subtracted.
HOST_DEVICE static inline ValueAndSlope discretized_gaussian_log_likelihood(float x0, float error,
                                                                            float log_variance) {
    bool is_black = x0 < -0.999f;
    bool is_white = x0 > 0.999f;
    float away = -fabsf(error);
    if (is_black) away = -error;
    if (is_white) away = error;

    float precision = expf(-0.5f * log_variance);
    float upper = (away + 1 / 255.0f) * precision;
    float lower = (away - 1 / 255.0f) * precision;
    ValueAndSlope within = approx_standard_normal_cdf(upper);
    ValueAndSlope below = {0, 0};
    if (!is_black && !is_white) below = approx_standard_normal_cdf(lower);

    float p = within.value - below.value;
    if (p < 1e-12f) return {logf(1e-12f), 0};
    return {logf(p), -0.5f * (within.slope * upper - below.slope * lower) / p};
}

// The pseudo-Huber loss of Song and Dhariwal, "Improved Techniques for Training Consistency Models" (2023),
// who apply it to whole images: 2 c (sqrt(error^2 + c^2) - c). Beyond c it grows like |error|, so that what a
// network cannot know becomes one of the possible values, a sharp one, instead of their mean.
HOST_DEVICE static inline ValueAndSlope pseudo_huber(float error) {
    const float c = 0.1f;
    float root = sqrtf(fmaf(error, error, c * c));
    return {2 * c * error * error / (root + c), 2 * c * error / root};
}

// The squared error of a batch's samples, and its gradient. With weights of 1 the sum of the batch's parts
// divided by its elements is F.mse_loss(out, target). With --learn_sigma the channels after the prediction,
// from -1 to 1, say where the logarithm of the variance lies between its bounds, and the variational bound's
// term is added; only these channels get a gradient from it. A team does a chunk of a sample.
//
// On paths an element has a pseudo-Huber loss of its error instead, and four more: of the difference between
// its error and that of each neighbouring pixel. So edges count more than areas that are too bright or too
// dark as a whole.
template <typename Real> struct PredictionLoss {
    BatchLoss batch;
    const Real* out;                // (B, H, W, PIXEL)
    const float* target;            // (B, H, W, PIXEL)
    Real* dout = nullptr;           // (B, H, W, PIXEL): the loss's gradient; null: not wanted
    const float* images = nullptr;  // (B, C, H, W), with --learn_sigma; otherwise null

    // The loss on paths of an element with this error. A difference between two pixels counts half for each.
    HOST_DEVICE ValueAndSlope path_loss(size_t at, int pixel, float error) const {
        ValueAndSlope loss = pseudo_huber(error);
        int x = pixel % batch.width;
        int y = pixel / batch.width;
        int height = batch.pixels / batch.width;
        auto add_neighbour = [&](bool is_inside, int steps) {
            if (!is_inside) return;
            size_t there = at + (ptrdiff_t)steps * PIXEL;
            ValueAndSlope between = pseudo_huber(error - ((float)out[there] - target[there]));
            loss.value += 0.5f * between.value;
            loss.slope += between.slope;
        };
        add_neighbour(x > 0, -1);
        add_neighbour(x + 1 < batch.width, 1);
        add_neighbour(y > 0, -batch.width);
        add_neighbour(y + 1 < height, batch.width);
        return loss;
    }

    // The bound's term for channel c of the output, one of those after the prediction, and its derivative
    // with respect to it.
    HOST_DEVICE ValueAndSlope variance_loss(size_t at, int b, int pixel, int c) const {
        const int t = batch.timestep(b);
        const int C = batch.channels;
        const ScheduleRow row = batch.schedule[t];
        float above = 0.5f * ((float)out[at] + 1) * row.log_variance_range;
        float log_variance = row.posterior_log_variance_clipped + above;
        float error = row.mean_error * ((float)out[at - C] - target[at - C]);

        ValueAndSlope term;
        if (t) {
            term = normal_kl(error, log_variance, above);
        } else {
            float x0 = images[((size_t)b * C + c - C) * batch.pixels + pixel];
            term = discretized_gaussian_log_likelihood(x0, error, log_variance);
            term = {-term.value, -term.slope};
        }
        return {term.value, 0.5f * row.log_variance_range * term.slope};
    }

    enum { THREADS = 1024, BLOCKS = 1 };
    size_t items() const { return (size_t)batch.B * loss_chunks(batch.pixels); }
    HOST_DEVICE void operator()(Team team) const {
        const int C = batch.channels;
        const int n = batch.pixels * PIXEL;
        const int chunks = loss_chunks(batch.pixels);
        const int b = team.index / chunks;
        const int chunk = team.index % chunks;
        const size_t sum_at = (size_t)batch.first * chunks + team.index;
        const int begin = chunk * LOSS_CHUNK;
        const int end = chunk + 1 < chunks ? begin + LOSS_CHUNK : n;
        const float scale = (float)(2.0 / batch.elements()) * batch.weight_of(b);
        const float bits = batch.diffusion_steps / 1000.0f / 0.69314718f;  // T / 1000, and nats to bits

        Sum sum = 0, bound = 0;
        for (int i = begin + team.thread; i < end; i += team.threads) {
            const size_t at = (size_t)b * n + i;
            const int c = i % PIXEL;
            const bool is_prediction = c < C;

            float error = is_prediction ? (float)out[at] - target[at] : 0;
            float gradient = scale * error;  // 2 w_b (out - target) / elements of the batch
            Sum loss = (Sum)error * error;
            if (batch.on_paths && is_prediction) {
                ValueAndSlope of_path = path_loss(at, i / PIXEL, error);
                loss = of_path.value;
                gradient = 0.5f * scale * of_path.slope;
            }
            sum += loss;

            const bool is_variance = images && c >= C && c < 2 * C;
            if (is_variance) {
                ValueAndSlope term = variance_loss(at, b, i / PIXEL, c);
                bound += (Sum)(bits * term.value);
                gradient = term.slope * (float)(bits / batch.elements());
            }
            if (dout) dout[at] = (Real)gradient;
        }

        sum = team_sum(sum);
        if (team.thread == 0) batch.chunk_sums[sum_at] = (float)sum;
        if (!images) return;
        bound = team_sum(bound);
        if (team.thread == 0) batch.variance_chunk_sums[sum_at] = (float)bound;
    }
};

// ---- consistency tuning -----------------------------------------------------------------------------------
// Geng et al., "Consistency Models Made Easy" (2024): a trained network learns to predict the same x0 from
// all noised forms of an image, so that one call draws a picture from noise alone. Each image is noised twice
// with the same noise: to the sample's timestep, and to an earlier one. The x0 that the network predicts from
// the second, held constant, is its target for the first.

// The noise_fraction of the earlier timestep is at most this part of the other's: 1/2 in the first of STAGES,
// then 3/4, and 255/256 in the last.
HOST_DEVICE static inline float pair_ratio(int64_t step, int steps) {
    enum { STAGES = 8 };
    int64_t stage = steps > 0 ? step * STAGES / steps : 0;
    if (stage > STAGES - 1) stage = STAGES - 1;
    return 1 - 1 / (float)(2 << stage);
}

// Chooses the earlier timestep of sample b. Where no timestep is early enough, the image itself takes its
// place: then the gap is the whole noise_fraction, and what the network predicts at timestep 0 is not used.
HOST_DEVICE static inline void choose_earlier(const ConsistencyPairs& pairs, const ScheduleRow* schedule, size_t b,
                                              int timestep, float ratio) {
    float own = schedule[timestep].noise_fraction;
    float most = own * ratio;
    // How many timesteps are early enough; the latest of them is chosen.
    int count = first_timestep(timestep, [&](int t) { return schedule[t].noise_fraction > most; });
    pairs.timesteps[b] = count ? count - 1 : 0;
    pairs.gaps[b] = count ? own - schedule[count - 1].noise_fraction : own;
}

// pairs.errors: what is added to the target of the sample's own timestep, so that the target means the x0
// that the network predicts at the earlier one. An item is an element.
template <typename Real> struct EarlierErrors {
    ConsistencyPairs pairs;
    BatchLoss loss;
    const Real* out;      // (B, H, W, PIXEL): the prediction at the earlier timestep
    const float* target;  // (B, H, W, PIXEL): its target

    size_t items() const { return (size_t)loss.B * loss.pixels * PIXEL; }
    HOST_DEVICE void operator()(size_t i) const {
        int b = (int)(i / ((size_t)loss.pixels * PIXEL));
        int sample = loss.first + b;
        bool is_image = pairs.gaps[sample] == loss.at(b).noise_fraction;  // choose_earlier found no timestep
        float x0_error = is_image ? 0 : loss.schedule[pairs.timesteps[sample]].x0_error;
        pairs.errors[i] = x0_error * ((float)out[i] - target[i]) / loss.at(b).x0_error;
    }
};

// pairs.weights: of the samples' squared errors, which PredictionLoss has added up. They keep any sample from
// outweighing the others: the squared error of x0 is divided by its own root, held constant (the paper's
// adaptive weight, with c = 0), and by the gap. An item is a sample.
struct PairWeights {
    ConsistencyPairs pairs;
    BatchLoss loss;

    size_t items() const { return loss.B; }
    HOST_DEVICE void operator()(size_t b) const {
        int sample = loss.first + (int)b;
        int chunks = loss_chunks(loss.pixels);
        float squares = 0;
        for (int i = 0; i < chunks; i++) squares += loss.chunk_sums[sample * chunks + i];

        float root = fmaxf(sqrtf(squares / (float)(loss.pixels * loss.channels)), 1e-6f);
        pairs.weights[sample] = fabsf(loss.at(b).x0_error) / (pairs.gaps[sample] * root);
    }
};

// ---- paths of the sampler ---------------------------------------------------------------------------------
// The other way of consistency tuning is the first stage of Hu et al., "CMT: Mid-Training for Efficient
// Learning of Consistency, Mean Flow, and Flow Map Models" (2025). The model draws pictures by DPM-Solver++,
// and from points of such a path the network that is tuned learns to predict the picture at its end. Only a
// few points of a path are kept: its end, and those at which the consistency_steps steps of the tuned model
// will begin, of which the first is noise alone.
//
// Every path_steps training steps each sample of the batch gets a new path, which takes as many calls of the
// network. In each training step it takes a random one of its newest PATHS_KEPT. So a path is used path_steps
// times, but seldom in steps that follow each other, which would learn the same twice.
enum { PATHS_KEPT = 20 };

// The points that are kept of a path: where each consistency step begins, and the end.
HOST_DEVICE static inline int points_a_path(int consistency_steps) { return consistency_steps + 1; }

// x_t (B, H, W, PIXEL) and target from paths, as AddNoise has them from images and noise. An item is an element.
template <typename Real> struct LoadPathPoints {
    TensorOf<Real> x_t;
    float* target;  // (B, H, W, PIXEL)
    BatchLoss loss;
    const float* points;  // (PATHS_KEPT, consistency_steps + 1, B, H, W, PIXEL)
    const int* chosen;    // (B): the point at which each sample is, of those of all its paths
    int consistency_steps;

    size_t items() const { return x_t.count(); }
    HOST_DEVICE void operator()(size_t i) const {
        size_t b = i / ((size_t)x_t.T() * PIXEL);
        size_t point = chosen[b];
        const size_t path = point / points_a_path(consistency_steps);
        size_t end = path * points_a_path(consistency_steps) + consistency_steps;
        float x = points[point * x_t.count() + i];
        float x0 = points[end * x_t.count() + i];

        const ScheduleRow at = loss.at(b);
        float eps = fmaf(-at.alpha, x0, x) / at.sigma;
        x_t.data[i] = (Real)x;
        target[i] = fmaf(at.target_eps, eps, at.target_x0 * x0);
    }
};

// ---- distribution matching --------------------------------------------------------------------------------
// The end of consistency tuning on paths is that of Yin et al., "One-step Diffusion with Distribution
// Matching Distillation" (2024), section 3.2.
//
// The student, which is the network that is tuned, draws pictures as it will draw them: in one step, or in
// two, of which the first makes a draft. A second network, the fake, begins as the teacher and learns to
// denoise these pictures, as the teacher has learned to denoise images. For the same noised picture the
// teacher's x0 minus the fake's points towards pictures that look more like images. The student learns to
// change its picture in that direction. A training step updates the fake, then the student.
//
// Only the last step of drawing is trained. Drafts are not matched: they would lose variety, and the pictures
// with them. The student learns from its own drafts, as in Yin et al., "Improved Distribution Matching
// Distillation for Fast Image Synthesis" (2024), section 4.5.

// Training steps before those that match distributions.
static int64_t steps_on_paths(const Config& c) {
    int64_t steps = c.hyper.lr_steps;
    return steps - llround((double)c.matching_fraction * (double)steps);
}

// predicted = images + x0_error (out - target): the x0 that the network predicts from noised images. An item
// is an element.
template <typename Real> struct PredictX0 {
    float* predicted;  // (B, C, H, W)
    BatchLoss loss;
    const float* images;  // (B, C, H, W)
    const Real* out;      // (B, H, W, PIXEL): the prediction
    const float* target;  // (B, H, W, PIXEL): its target
    bool clamps;          // to [-1, 1]

    size_t items() const { return (size_t)loss.B * loss.channels * loss.pixels; }
    HOST_DEVICE void operator()(size_t i) const {
        size_t channel = i / loss.pixels;  // counted through all images
        size_t b = channel / loss.channels;
        size_t at = (b * loss.pixels + i % loss.pixels) * PIXEL + channel % loss.channels;
        float x0 = fmaf(loss.at(b).x0_error, (float)out[at] - target[at], images[i]);
        predicted[i] = clamps ? clamped(x0) : x0;
    }
};

// The student's target: its own prediction, plus a change that makes the squared error's gradient the
// paper's. That gradient, by the picture, is (fake - teacher) / mean |picture - teacher|; the denominator,
// equation 8, makes pictures count alike however much noise they got. The picture changes by x0_error where
// the prediction changes by 1, so that the gradient by the prediction is x0_error times as large. A team does
// a sample.
template <typename Real> struct MatchingTarget {
    float* target;  // (B, H, W, PIXEL)
    BatchLoss loss;
    const Real* out;                         // (B, H, W, PIXEL): the student's predictions
    const float *pictures, *teacher, *fake;  // (B, C, H, W): what it drew, and the x0 of the two

    enum { THREADS = 256, BLOCKS = 1 };
    size_t items() const { return loss.B; }
    HOST_DEVICE void operator()(Team team) const {
        const size_t b = team.index;
        const size_t pixels = loss.pixels;
        const size_t elements = loss.channels * pixels;
        const size_t begin = b * elements;

        Sum distance = 0;
        for (size_t i = begin + team.thread; i < begin + elements; i += team.threads)
            distance += fabsf(pictures[i] - teacher[i]);
        float mean = fmaxf((float)(team_sum(distance) / elements), 1e-3f);
        float scale = loss.at(b).x0_error / mean;

        for (size_t i = team.thread; i < pixels * PIXEL; i += team.threads) {
            size_t at = b * pixels * PIXEL + i;
            size_t c = i % PIXEL;
            float change = 0;
            if (c < (size_t)loss.channels) {
                size_t element = begin + c * pixels + i / PIXEL;
                change = scale * (teacher[element] - fake[element]);
            }
            target[at] = (float)out[at] + change;
        }
    }
};

// ---- samplers ---------------------------------------------------------------------------------------------
// A sampler is a list of SamplerSteps, which make_sampler computes before the first of them is taken.
//
// A new sampler is a function beside ddim_step and a branch in make_sampler. Its name goes into the
// enumeration Sampler and, at the same place, into FLAGS of unet_io.h and into sampler_text. sampler_steps
// and spacing_of say how many steps it takes where nothing else is asked for, and at which timesteps.
// SAMPLERS of train_unet.py is the mirror of this list.

// The factors by which a step changes the sample x, with x0 the predicted image and eps fresh noise:
//   next  = update.x0 x0 + update.x x + update.saved saved + update.noise eps
//   saved = update.save_x0 x0 + update.save_x x, for the next call
// What is saved is x0 itself, except in the first of Heun's two calls.
struct SampleUpdate {
    float x0 = 0, x = 0, saved = 0, noise = 0;
    float save_x0 = 1, save_x = 0;
};

// A call of the network, and what follows from its answer. The first step, number 0, makes no call: x becomes noise.
struct SamplerStep {
    uint32_t number = 0;                   // of the call, counted from 1; it keys the noise
    int timestep = -1;                     // what the network is given; -1: it is not called
    float x0_from_x = 0, x0_from_out = 0;  // of the Denoiser
    SampleUpdate update = {};
    // A learned sigma makes the noise up to exp(max_log_sigma_ratio) times as large. 0: it is not learned.
    float max_log_sigma_ratio = 0;
};

// --spacing auto is guided-diffusion's spacing for DDIM and DDPM, and otherwise the one with the smallest error for
// an ideal denoiser (test_ideal.py). The consistency sampler has its own: see sampler_timesteps.
static int spacing_of(const Config& c) {
    if (c.spacing != SPACING_AUTO) return c.spacing;
    bool is_uniform = c.sampler == SAMPLER_DDIM || c.sampler == SAMPLER_DDPM;
    return is_uniform ? SPACING_UNIFORM : SPACING_TRAILING;
}

// guided-diffusion's space_timesteps(T, [count]), which has the first and the last timestep. A single one is
// the last, from which one step makes the mean of all pictures.
static std::vector<int> uniform_timesteps(int T, int count) {
    if (count == 1) return {T - 1};

    std::vector<int> timesteps;
    double stride = (double)(T - 1) / (count - 1);
    double t = 0;
    for (int i = 0; i < count; i++) {
        timesteps.push_back((int)nearbyint(t));
        t += stride;
    }
    return timesteps;
}

// Lin et al. (2023), table 2: all steps, the last to no noise included, are equally long.
static std::vector<int> trailing_timesteps(int T, int count) {
    std::vector<int> timesteps;
    double stride = (double)T / count;
    for (int i = count - 1; i >= 0; i--) timesteps.push_back((int)nearbyint(T - i * stride) - 1);
    return timesteps;
}

// Karras et al. (2022), equation 5 with rho = 7: noise_ratios from 80, or the schedule's largest if that is
// less, to that of timestep 0. Each becomes the timestep whose ratio has the nearest logarithm, of those that
// are not taken. The timesteps are returned rising, and the last is T - 1.
static std::vector<int> karras_timesteps(const std::vector<NoiseLevel>& schedule, int count) {
    int t = (int)schedule.size() - 1;
    std::vector<int> timesteps = {t};
    double largest = pow(std::min(noise_ratio(schedule[t]), 80.0), 1.0 / 7);
    double smallest = pow(noise_ratio(schedule[0]), 1.0 / 7);
    for (int i = 1; i < count; i++) {
        double wanted = 7 * log(largest + (smallest - largest) * i / (count - 1));
        auto distance = [&](int candidate) { return fabs(log(noise_ratio(schedule[candidate])) - wanted); };
        int left = count - 1 - i;  // timesteps that still need a place below this one

        t--;
        while (t > left && distance(t - 1) <= distance(t)) t--;
        timesteps.push_back(t);
    }
    std::ranges::reverse(timesteps);
    return timesteps;
}

// The second of two consistency steps starts at timestep number second_start (from 1) of `count` that are
// evenly spaced. Three tenths of the way up was the best for Fashion-MNIST, of two to seven tenths.
static int second_start(int count) { return ceil_div(3 * count, 10); }

// The timesteps of `count` consistency steps, rising. The last is T - 1. The second of two steps starts three
// tenths of the way up: where the model was tuned on paths, at the very point from which it has learned this
// step. Other numbers of steps are evenly spaced.
static std::vector<int> consistency_timesteps(const Config& c, int count) {
    const int T = c.diffusion_steps;
    if (count != 2) return trailing_timesteps(T, count);

    int spaced = c.path_steps ? c.path_steps : T;
    int second = trailing_timesteps(T, spaced)[second_start(spaced) - 1];
    return {second, T - 1};
}

// The timesteps that a sampler visits, rising.
static std::vector<int> sampler_timesteps(const Config& c, const std::vector<NoiseLevel>& schedule) {
    const int T = c.diffusion_steps;
    const int count = sampler_steps(c);
    if (c.sampler == SAMPLER_CONSISTENCY && c.spacing == SPACING_AUTO) return consistency_timesteps(c, count);
    switch (spacing_of(c)) {
        case SPACING_UNIFORM: return uniform_timesteps(T, count);
        case SPACING_TRAILING: return trailing_timesteps(T, count);
        default: return karras_timesteps(schedule, count);
    }
}

// DDIM, Song et al., "Denoising Diffusion Implicit Models" (2021): equation 12 with the noise derived again
// from the clamped x0, and equation 16. With eta = 1 it is DDPM, Ho et al. (2020): the mean and the variance
// of the posterior, equation 7.
static SampleUpdate ddim_step(NoiseLevel from, NoiseLevel to, double eta) {
    // The part of the variance at `from` that was added after `to`.
    double fresh = transition_variance(to, from) / (from.sigma * from.sigma);
    double direction = to.sigma / from.sigma * sqrt(std::max(0.0, 1 - eta * eta * fresh));
    return {.x0 = (float)(to.alpha - direction * from.alpha),
            .x = (float)direction,
            .noise = (float)(eta * to.sigma * sqrt(fresh))};
}

// Song et al., "Consistency Models" (2023), algorithm 1: the predicted x0 is noised again, to the next level.
static SampleUpdate consistency_step(NoiseLevel to) {
    return {.x0 = (float)to.alpha, .noise = (float)to.sigma};
}

// DPM-Solver++(2M), Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic
// Models" (2022), algorithm 2: DDIM, with x0 extrapolated from that of the step before, which came from
// `before`. A step's length is measured in the paper's lambda, which is -log(noise_ratio).
//
// A step more than twice as long as the one before is DDIM's, because extrapolation would overshoot. So is
// the last, which is infinitely long. After a step that came from noise alone, whose length is infinite, w is
// 0: that makes DDIM's step, too.
static SampleUpdate dpmpp_step(NoiseLevel before, NoiseLevel from, NoiseLevel to) {
    auto length = [](NoiseLevel a, NoiseLevel b) { return log(noise_ratio(a)) - log(noise_ratio(b)); };
    double w = length(from, to) / length(before, from) / 2;

    SampleUpdate update = ddim_step(from, to, 0);
    if (!(w <= 1)) return update;  // also where both steps are infinite
    update.saved = (float)-w * update.x0;
    update.x0 *= (float)(1 + w);
    return update;
}

// Heun's method, Karras et al. (2022), algorithm 1, for x / alpha as a function of the noise_ratio. The first
// call of the network makes DDIM's step. The second is made at the end of that step, and repeats it with the
// mean of the slopes at both ends. The first call saves all terms of the result that do not depend on the
// second.
static std::pair<SampleUpdate, SampleUpdate> heun_step(NoiseLevel from, NoiseLevel to) {
    SampleUpdate first = ddim_step(from, to, 0);
    first.save_x0 = first.x0 / 2;
    first.save_x = (float)(to.alpha / from.alpha + first.x) / 2;

    double half = (1 - noise_ratio(from) / noise_ratio(to)) / 2;
    return {first, {.x0 = (float)(-half * to.alpha), .x = (float)half, .saved = 1}};
}

// Heun's slope at the end of a step is an error divided by the noise_ratio there. Where the ratio falls to less than a
// tenth, that would magnify the error. This excludes the last step, to no noise, and one from noise alone.
static bool suits_heun(NoiseLevel from, NoiseLevel to) { return noise_ratio(to) >= 0.1 * noise_ratio(from); }

// The steps from pure noise to a sample: from timestep to timestep, and at last to no noise, which is x0 itself.
static std::vector<SamplerStep> make_sampler(const Config& c) {
    std::vector<NoiseLevel> schedule = make_schedule(c);
    std::vector<int> timesteps = sampler_timesteps(c, schedule);
    int last = (int)timesteps.size() - 1;
    auto level_of = [&](int i) { return i < 0 ? NoiseLevel{1, 0} : schedule[timesteps[i]]; };

    std::vector<SamplerStep> steps = {{.update = {.noise = 1}}};
    auto call = [&](int i, const SampleUpdate& update) {
        Denoiser x0 = denoiser_at(c.predict, level_of(i));
        steps.push_back({.number = (uint32_t)steps.size(),
                         .timestep = timesteps[i],
                         .x0_from_x = (float)x0.x,
                         .x0_from_out = (float)x0.out,
                         .update = update});
    };

    for (int i = last; i >= 0; i--) {
        NoiseLevel from = level_of(i);
        NoiseLevel to = level_of(i - 1);
        if (c.sampler == SAMPLER_HEUN && suits_heun(from, to)) {
            auto [first, second] = heun_step(from, to);
            call(i, first);
            call(i - 1, second);
        } else if (c.sampler == SAMPLER_DPMPP && i < last) {
            call(i, dpmpp_step(level_of(i + 1), from, to));
        } else if (c.sampler == SAMPLER_CONSISTENCY) {
            call(i, consistency_step(to));
        } else if (c.sampler == SAMPLER_DDPM) {
            call(i, ddim_step(from, to, 1));
            if (c.learn_sigma && i) steps.back().max_log_sigma_ratio = (float)log(from.sigma / to.sigma);
        } else {  // DDIM, and the steps that the others leave to it
            call(i, ddim_step(from, to, c.eta));
        }
    }
    return steps;
}

// The steps of a path; the first makes the noise that it begins with.
static std::vector<SamplerStep> make_path(Config c) {
    c.sampler = SAMPLER_DPMPP;
    c.eta = 0;  // the noise alone decides where a path ends
    c.spacing = SPACING_TRAILING;
    c.sample_steps = c.path_steps;
    return make_sampler(c);
}

static long network_calls(const std::vector<SamplerStep>& steps) { return (long)steps.size() - 1; }

// What decides a sample: the seed of its noise, and its class.
struct SampleSpec {
    uint32_t seed;
    int label;
};

// Samples that are made at the same time, and the network's predictions. With guidance the network makes a
// second prediction of each sample, without the class; these rows follow the others. Then prediction =
// without + guidance (with - without): Ho and Salimans, "Classifier-Free Diffusion Guidance" (2022).
template <typename Real> struct SampleBatch {
    TensorOf<Real> input;     // x for the network; with guidance a copy follows, for the second prediction
    const Real* out;          // (B, H, W, PIXEL): the prediction; with guidance the second follows
    int channels;             // of a sample
    bool clamps;              // x0 to [-1, 1]
    float guidance;           // 1: there is one prediction
    float *x, *saved;         // (B, H, W, PIXEL)
    const SampleSpec* specs;  // (B)

    int rows() const { return guidance == 1 ? input.B : 2 * input.B; }  // of a call of the network

    HOST_DEVICE float predicted_x0(const SamplerStep& step, size_t at) const {
        float prediction = (float)out[at];
        if (guidance != 1) {
            float without = (float)out[input.count() + at];
            prediction = fmaf(guidance, prediction - without, without);
        }
        float x0 = fmaf(step.x0_from_x, x[at], step.x0_from_out * prediction);
        return clamps ? clamped(x0) : x0;
    }
};

// The end of a step: x and saved become what its SampleUpdate says. A sample depends on its SampleSpec, and
// not on the others of its batch. fmaf says how each sum is rounded, so that every compiler makes the same
// bits.
template <typename Real> struct UpdateSamples {
    SampleBatch<Real> batch;
    SamplerStep step;

    size_t items() const { return FourPixels::count(batch.input); }
    HOST_DEVICE void operator()(size_t item) const {
        const SampleUpdate update = step.update;
        FourPixels four(item, batch.input.T());
        UNROLLED_FOR (int c = 0; c < MAX_CHANNELS && c < batch.channels; c++) {
            float normal[4] = {};
            if (update.noise > 0)
                random_normals_at(normal, batch.specs[four.b].seed, STREAM_SAMPLER, four.element(c), 0, step.number);

            UNROLLED_FOR (int i = 0; i < 4 && i < four.n; i++) {
                size_t at = four.at(i, c);
                float x0 = batch.predicted_x0(step, at);
                float x = batch.x[at];
                float saved = batch.saved[at];
                float sigma = update.noise;
                if (step.max_log_sigma_ratio > 0) {
                    float learned = (float)batch.out[at + batch.channels];  // from -1 to 1
                    sigma *= expf(step.max_log_sigma_ratio * 0.5f * (learned + 1));
                }

                float next = fmaf(update.saved, saved, fmaf(update.x0, x0, update.x * x));
                next = fmaf(sigma, normal[i], next);
                batch.x[at] = next;
                batch.saved[at] = fmaf(update.save_x0, x0, update.save_x * x);

                batch.input.data[at] = (Real)next;
                if (batch.guidance != 1) batch.input.data[batch.input.count() + at] = (Real)next;
            }
        }
    }
};

// What a call of the network is given: for each of its rows the timestep, and the class or none.
struct SetModelInputs {
    int *timesteps, *labels;  // (rows); labels null: the network knows no classes
    const SampleSpec* specs;
    int timestep;
    int rows, samples, no_class;  // rows from `samples` on have no class

    size_t items() const { return rows; }
    HOST_DEVICE void operator()(size_t i) const {
        timesteps[i] = timestep;
        if (labels) labels[i] = (int)i < samples ? specs[i].label : no_class;
    }
};

// ---- samples of a model -----------------------------------------------------------------------------------
static SampleBatch<floatX> samples_of(Model* m, int B, float guidance) {
    return {.input = unet_input(m, B),
            .out = unet_output(m),
            .channels = m->config.in_channels,
            .clamps = clamps_x0(m->config),
            .guidance = guidance,
            .x = m->sampler.x,
            .saved = m->sampler.saved,
            .specs = m->sampler.specs};
}

// Clears what the first step multiplies by 0, because 0 times a NaN would be one: x, what was saved, and the
// predictions.
static void begin_samples(Model* m, const SampleBatch<floatX>& batch) {
    size_t values = batch.input.count();
    int predictions = batch.rows() / batch.input.B;  // of each sample
    backend_zero(batch.x, values * sizeof(float));
    backend_zero(batch.saved, values * sizeof(float));
    backend_zero(unet_output(m), predictions * values * sizeof(floatX));
}

// CUDA graphs of the network's calls, by the number of rows. A graph reads the weights that use_weights had
// set when it was captured, so that each set of weights needs a map of its own.
typedef std::map<int, Graph> CallGraphs;

// Calls the network for a step, unless it is the first, which needs no call.
static void predict_samples(Model* m, const SampleBatch<floatX>& batch, const SamplerStep& step,
                            CallGraphs* graphs) {
    if (step.timestep < 0) return;
    int rows = batch.rows();
    run(SetModelInputs{.timesteps = m->timesteps,
                       .labels = m->labels,
                       .specs = m->sampler.specs,
                       .timestep = step.timestep,
                       .rows = rows,
                       .samples = batch.input.B,
                       .no_class = m->config.num_classes});
    launch_graph(&(*graphs)[rows], [&] { unet_forward(m, call_of(m, rows)); });
}

static void take_sampler_step(Model* m, const SampleBatch<floatX>& batch, const SamplerStep& step,
                              CallGraphs* graphs) {
    predict_samples(m, batch, step, graphs);
    run(UpdateSamples<floatX>{batch, step});
}

#ifndef NETWORK_ONLY
// ==== 7  OPTIMISER =========================================================================================
// ---- AdamW and averaged weights ---------------------------------------------------------------------------
// What an update of the weights depends on, besides the gradient.
struct AdamW {
    float lr, weight_decay, beta1, beta2, eps;
    float correction1, correction2;   // 1 - beta^n
    float ema_weight[MAX_EMAS] = {};  // of the new weights in each running mean
    float clip = 1;                   // the gradient is multiplied by it
};

// What changes from step to step. It lives on the device, so that a step takes no arguments from the host.
struct StepState {
    int64_t step;      // optimiser steps done, skipped ones included
    AdamW update;      // of the current step
    int finite;        // whether its loss and the norm of its gradient are finite
    int accepted;      // whether they are also no outliers: then the weights are updated
    int stop;          // whether a rank was asked to stop
    float loss, norm;  // the gradient's norm, before clipping
    // For each quarter of the timesteps: the sum of its samples' mean squared errors, unweighted, and their number.
    float quartile_sums[4] = {}, quartile_counts[4] = {};
    History history;
};

enum { NORM_CHUNK = 65536 };  // parameters whose squares a team adds up

// chunk_sums (n / NORM_CHUNK rounded up): the sum of squares of each chunk of x (n, aligned to 16 bytes).
struct SquaredNorm {
    float* chunk_sums;
    const float* x;
    size_t n;  // a multiple of 4

    enum { THREADS = 512, BLOCKS = 1 };
    size_t items() const { return ceil_div(n, NORM_CHUNK); }
    HOST_DEVICE void operator()(Team team) const {
        const size_t first = (size_t)team.index * NORM_CHUNK;
        const size_t end = first + NORM_CHUNK < n ? first + NORM_CHUNK : n;
        Sum sum = 0;
        for (size_t i = first + 4 * team.thread; i < end; i += 4 * team.threads) {
            Vector<float, 4> v = load<4>(x + i);
            sum += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]);
        }
        sum = team_sum(sum);
        if (team.thread == 0) chunk_sums[team.index] = (float)sum;
    }
};

// Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, as torch.optim.AdamW,
// of the gradient times `clip`:
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   w = (1 - lr weight_decay) w - lr m / correction1 / (sqrt(v / correction2) + eps)
// Then the running means (EMAs) and the layers' copy follow. Weights that Muon updates step along its
// directions instead.
//
// All arrays are (n), a multiple of 4, and aligned to 16 bytes. An item is four elements; w_n, for example,
// are those of w. The EMAs, whose number varies, are loaded first, so that no branch stands between the other
// loads and the arithmetic.
template <typename Real> struct UpdateWeights {
    OptimiserMemory memory;
    const float* gradient;             // (n)
    Real* working;                     // the weights as the layers read them; null where they read master
    size_t n, decayed;                 // weight decay is for the first `decayed` of n
    const StepState* state;            // holds the update; a step that is not accepted changes nothing
    const Real* directions = nullptr;  // Muon's, for elements whose scale is more than 0
    const float* scales = nullptr;     // (n / CHANNEL_MULTIPLE), or null: all elements are AdamW's

    size_t items() const { return n / 4; }
    HOST_DEVICE void operator()(size_t item) const {
        if (!state->accepted) return;
        const AdamW a = state->update;
        const auto& [w, ema, m, v] = memory;
        const size_t i = 4 * item;
        float step_size = a.lr / a.correction1;
        float root = sqrtf(a.correction2);
        float decay = i < decayed ? 1.0f - a.lr * a.weight_decay : 1.0f;

        Vector<float, 4> ema_n[MAX_EMAS];
        for (int k = 0; k < MAX_EMAS; k++)
            if (ema[k]) ema_n[k] = load<4>(ema[k] + i);
        Vector<float, 4> g_n = load<4>(gradient + i);
        Vector<float, 4> w_n = load<4>(w + i);
        Vector<float, 4> m_n = load<4>(m + i);
        Vector<float, 4> v_n = load<4>(v + i);
        float muon_scale = scales ? scales[i / CHANNEL_MULTIPLE] : 0;

        Vector<Real, 4> working_n;
        for (int j = 0; j < 4; j++) {
            float g = g_n[j] * a.clip;
            m_n[j] = fmaf(a.beta1, m_n[j], (1.0f - a.beta1) * g);
            v_n[j] = fmaf(a.beta2, v_n[j], (1.0f - a.beta2) * g * g);
            if (muon_scale > 0) {
                w_n[j] = fmaf(-a.lr * muon_scale, (float)directions[i + j], w_n[j] * decay);
            } else {
                w_n[j] = w_n[j] * decay - step_size * m_n[j] / (sqrtf(v_n[j]) / root + a.eps);
            }
            working_n[j] = (Real)w_n[j];
        }
        store(w + i, w_n);
        store(m + i, m_n);
        store(v + i, v_n);
        if (working) store(working + i, working_n);

        for (int k = 0; k < MAX_EMAS; k++) {
            if (!ema[k]) continue;
            for (int j = 0; j < 4; j++) ema_n[k][j] += a.ema_weight[k] * (w_n[j] - ema_n[k][j]);
            store(ema[k] + i, ema_n[k]);
        }
    }
};

// sum = a + b, (n, a multiple of 4, aligned to 16 bytes).
struct AddFloats {
    float* sum;
    const float *a, *b;
    size_t n;

    size_t items() const { return n / 4; }
    HOST_DEVICE void operator()(size_t item) const {
        Vector<float, 4> total = load<4>(a + 4 * item);
        Vector<float, 4> more = load<4>(b + 4 * item);
        for (int j = 0; j < 4; j++) total[j] += more[j];
        store(sum + 4 * item, total);
    }
};

// The learning rate of step s, counted from 0.
HOST_DEVICE static double learning_rate(const Hyper& c, int64_t s) {
    if (s < c.warmup_steps) return c.lr * (double)(s + 1) / c.warmup_steps;
    if (c.lr_schedule == LR_CONSTANT) return c.lr;

    double span = c.lr_steps > c.warmup_steps ? c.lr_steps - c.warmup_steps : 1;
    double done = fmin((double)(s - c.warmup_steps) / span, 1.0);
    double falling;  // from 1 to 0
    if (c.lr_schedule == LR_COSINE) {
        falling = 0.5 * (1 + cos(M_PI * done));
    } else {
        falling = 1 - done;
    }
    double last = c.final_lr_fraction;
    return c.lr * (last + (1 - last) * falling);
}

// The learning rate goes by steps; the corrections of Adam's moments and the EMAs' warm-up go by the updates
// among them. With ema_warmup an average keeps at most 1 - (1 + n)^-0.75 of itself in update n, so that the
// first weights are soon forgotten; diffusers' EMAModel does this with inv_gamma = 1 and power = 3/4.
HOST_DEVICE static AdamW adamw_at(const Hyper& c, int64_t s, int64_t updates) {
    double n = (double)(updates + 1);
    AdamW a = {.lr = (float)learning_rate(c, s),
               .weight_decay = c.weight_decay,
               .beta1 = c.beta1,
               .beta2 = c.beta2,
               .eps = c.adam_eps,
               .correction1 = (float)(1 - pow((double)c.beta1, n)),
               .correction2 = (float)(1 - pow((double)c.beta2, n))};
    double most_kept = c.ema_warmup ? 1 - pow(1 + n, -0.75) : 1;
    for (int k = 0; k < MAX_EMAS; k++) a.ema_weight[k] = (float)(1 - fmin(most_kept, (double)c.ema_rate[k]));
    return a;
}

// Whether a value lies more than z (unbiased) standard deviations above the mean of those in the window.
// Never, where z is 0 or the window has seen too few.
HOST_DEVICE static inline bool is_outlier(float value, const float* window, int seen, float z) {
    int count = seen < WINDOW ? seen : WINDOW;
    if (!(z > 0) || count < WINDOW_LEAST) return false;

    double mean = 0;
    for (int i = 0; i < count; i++) mean += window[i];
    mean /= count;

    double squares = 0;
    for (int i = 0; i < count; i++) squares += (window[i] - mean) * (window[i] - mean);
    return value - mean > z * sqrt(squares / (count - 1));
}

// Decides, by a step's loss and gradient norm, whether its update is made, and by how much the gradient is clipped (as
// torch.nn.utils.clip_grad_norm_ does it). A finite step counts, even without its update: the data move on.
HOST_DEVICE static inline void conclude_step(StepState* state, float loss, float norm, const Hyper& c) {
    History* h = &state->history;
    bool outlier = is_outlier(loss, h->losses, h->seen, c.skip_outliers) ||
                   is_outlier(norm, h->norms, h->seen, c.skip_outliers);

    state->loss = loss;
    state->norm = norm;
    state->finite = fabsf(loss) <= FLT_MAX && fabsf(norm) <= FLT_MAX;
    state->accepted = state->finite && !outlier;
    float clip = 1;
    if (c.grad_clip > 0) clip = fminf(1.0f, c.grad_clip / (norm + 1e-6f));
    state->update.clip = clip;

    if (!state->finite) return;
    state->step++;
    if (outlier) {
        h->skipped++;
    } else {
        h->losses[h->seen % WINDOW] = loss;
        h->norms[h->seen % WINDOW] = norm;
        h->seen++;
    }
}

// ---- Muon -------------------------------------------------------------------------------------------------
// Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). The direction in which a
// matrix of weights changes is its momentum, with singular values that five steps of Newton and Schulz's
// iteration bring near 1:
//   A = X X^T,  B = b A + c A A,  X <- a X + B X,  from X / |X|
// It is scaled as in Liu et al., "Muon is Scalable for LLM Training" (2025), so that AdamW's learning rate
// and weight decay suit it. A convolution's rows are its outputs. A matrix with more rows than columns counts
// as several.
enum { MUON_STEPS = 5, MUON_UNIT = 16 };
static constexpr float MUON_a = 3.4445f, MUON_b = -4.7750f, MUON_c = 2.0315f;

// Whether Muon updates a parameter. AdamW has the rest: what is no matrix, the table of the classes, and a
// layer whose inputs or outputs are the few channels of an image.
static bool is_for_muon(const Parameter& t) {
    if (!is_matrix(t) || t.name == network.label_table) return false;
    return t.shape[0] % MUON_UNIT == 0 && t.shape[1] % MUON_UNIT == 0;
}

// Where in x, (num_floats), the matrices lie that Muon updates.
static std::vector<Tensor> muon_matrices(const Plan& plan, floatX* x) {
    std::vector<Tensor> matrices;
    for (const Parameter& t : plan.tensors) {
        if (!is_for_muon(t)) continue;
        const int rows = t.shape[0];
        const int columns = (int)(t.count / rows);
        for (int row = 0; row < rows; row += columns) {
            floatX* first = x + t.offset + (size_t)row * columns;
            matrices.push_back({first, std::min(columns, rows - row), 1, 1, columns});
        }
    }
    std::ranges::stable_sort(matrices, std::greater(), &Tensor::C);  // the longest sums begin first
    return matrices;
}

// The products of all steps of the iteration, in the order in which orthogonalise does them: for each step
// those that are A, those that are B, and those that are the next X. Also counts the tiles of their outputs.
static std::vector<MatrixProduct> muon_products(Muon* muon, const std::vector<Tensor>& matrices) {
    std::vector<MatrixProduct> products;
    floatX* from = muon->x;
    floatX* to = muon->next_x;
    for (int step = 0; step < MUON_STEPS; step++) {
        std::vector<MatrixProduct> makes_A, makes_B, makes_next;
        muon->square_tiles = 0;
        muon->tiles = 0;
        for (const Tensor& matrix : matrices) {
            const size_t offset = matrix.data - muon->x;
            const int rows = matrix.rows();
            Tensor X = {from + offset, rows, 1, 1, matrix.C};
            Tensor next = {to + offset, rows, 1, 1, matrix.C};
            Tensor A = {muon->A + offset, rows, 1, 1, rows};
            Tensor B = {muon->B + offset, rows, 1, 1, rows};

            makes_A.push_back({.out = A, .left = X, .right = X.data, .first_tile = muon->square_tiles});
            makes_B.push_back({.out = B,
                               .left = A,
                               .right = A.data,
                               .added = A,
                               .alpha = MUON_c,
                               .beta = MUON_b,
                               .first_tile = muon->square_tiles});
            makes_next.push_back({.out = next,
                                  .left = B,
                                  .right = X.data,
                                  .added = X,
                                  .beta = MUON_a,
                                  .first_tile = muon->tiles});
            muon->square_tiles += makes_A.back().tiles(RIGHT_TRANSPOSED);
            muon->tiles += makes_next.back().tiles(RIGHT_IN_ROWS);
        }

        for (const auto& list : {makes_A, makes_B, makes_next})
            products.insert(products.end(), list.begin(), list.end());
        std::swap(from, to);
    }
    return products;
}

// x = the momentum as it will be after this step, averaged with the gradient once more (Nesterov).
template <typename Real> struct MuonMomentum {
    Real* x;
    const float *momentum, *gradient;
    size_t n;
    const StepState* state;

    size_t items() const { return n; }
    HOST_DEVICE void operator()(size_t i) const {
        const AdamW& a = state->update;
        float new_part = (1 - a.beta1) * (a.clip * gradient[i]);
        x[i] = (Real)fmaf(a.beta1, fmaf(a.beta1, momentum[i], new_part), new_part);
    }
};

// The first X is not divided by its norm in memory. Instead, the factors of the first B and of the next X are
// set here, as they follow from the norm. The square of the norm is the trace of A. A team does a matrix.
template <typename Real> struct MuonNorms {
    MatrixProductOf<Real> *B, *next_x;
    int count;

    enum { THREADS = 128, BLOCKS = 4 };
    size_t items() const { return count; }
    HOST_DEVICE void operator()(Team team) const {
        const auto& A = B[team.index].left;
        Sum trace = 0;
        for (int i = team.thread; i < A.C; i += team.threads) trace += (float)A.data[(size_t)i * A.C + i];
        trace = team_sum(trace);
        if (team.thread) return;

        float norm = fmaxf(sqrtf((float)trace), 1e-7f);
        float norm_squared = norm * norm;
        B[team.index].alpha = MUON_c / norm_squared / norm_squared;
        B[team.index].beta = MUON_b / norm_squared;
        next_x[team.index].alpha = 1 / norm;
        next_x[team.index].beta = MUON_a / norm;
    }
};

// Makes the matrices in muon.x orthogonal, and returns where they are then.
static const floatX* orthogonalise(const Muon& muon) {
    for (int step = 0; step < MUON_STEPS; step++) {
        MatrixProduct* A = muon.products + 3 * step * muon.count;
        MatrixProduct* B = A + muon.count;
        MatrixProduct* next_x = B + muon.count;
        multiply_matrices(A, muon.count, muon.square_tiles, RIGHT_TRANSPOSED);  // X X^T
        if (step == 0) run(MuonNorms<floatX>{B, next_x, muon.count});
        multiply_matrices(B, muon.count, muon.square_tiles, RIGHT_TRANSPOSED);  // A A^T, because A is its own transpose
        multiply_matrices(next_x, muon.count, muon.tiles, RIGHT_IN_ROWS);  // B X
    }
    return MUON_STEPS % 2 ? muon.next_x : muon.x;
}

// ==== 8  TRAINING ==========================================================================================
// ---- memory of a run --------------------------------------------------------------------------------------
// The number of micro-batches of a batch that this rank computes: see share_batch.
static int microbatch_count(const Model* m) {
    return std::max(1, ceil_div(m->config.batch_size, m->plan.batch) / world.size);
}

// The images that a step takes, on this rank and on all. The last micro-batches may be short of a few.
static size_t images_of_rank(const Model* m) { return (size_t)microbatch_count(m) * m->plan.batch; }
static size_t images_of_step(const Model* m) { return m->ranks * images_of_rank(m); }

// The buffers in which micro-batches' gradients are added up in pairs: one, and one for each level of tree_gradient.
static int gradient_buffers(const Model* m) { return 1 + std::bit_width(microbatch_count(m) - 1u); }

// Whether each rank has only its shard of the trained weights, and whether what the layers read is a copy.
static bool is_sharded(const Model* m) { return m->ranks > 1; }
static size_t first_of_shard(const Model* m) { return m->rank * m->shard; }
static bool is_copied(const Model* m) { return sizeof(floatX) != sizeof(float) || is_sharded(m); }

// Every rank updates a shard of the parameters. A shard is whole NORM_CHUNKs, so that the same parameters' squares are
// summed together on any number of ranks.
static void shard_parameters(Model* m) {
    m->shard = m->plan.num_floats;
    if (!m->plan.training || world.size == 1) return;

    m->ranks = world.size;
    m->rank = world.rank;
    m->shard = round_up(m->shard, (size_t)NORM_CHUNK * m->ranks) / m->ranks;
    m->plan.num_floats = m->ranks * m->shard;
}

// Points each of `arrays` to `count` elements of the arena.
template <typename... T> static void place(Arena* arena, size_t count, T*&... arrays) {
    ((arrays = take<T>(arena, count)), ...);
}

// The weights: this rank's shard as it is trained, and what the layers read.
static void place_weights(Model* m, Arena* arena) {
    size_t P = m->plan.num_floats, matrices = m->plan.num_decayed;
    place(arena, m->shard, m->master);
    if (is_copied(m)) place(arena, P, m->weights);
    if (!is_sharded(m)) return;

    place(arena, P, m->received);
    place(arena, P - matrices, m->fp32_params);
    m->fp32_params -= matrices;  // the parameters that are no matrices keep their offset among all
}

static void place_optimiser(Model* m, Arena* arena) {
    size_t P = m->plan.num_floats;
    for (int k = 0; k < ema_count(m->config); k++) place(arena, m->shard, m->ema[k]);
    place(arena, m->shard, m->adam_m, m->adam_v);
    place(arena, P * gradient_buffers(m), m->gradients);
    place(arena, ceil_div(P, NORM_CHUNK), m->grad_norm_sums);
    if (m->config.hyper.optimizer != OPTIMIZER_MUON) return;

    Muon* muon = &m->muon;
    place(arena, P, muon->x, muon->next_x, muon->A, muon->B);
    muon->count = (int)muon_matrices(m->plan, muon->x).size();
    place(arena, P / CHANNEL_MULTIPLE, muon->scales);
    place(arena, (size_t)MUON_STEPS * 3 * muon->count, muon->products);
}

static void place_paths(Model* m, Arena* arena) {
    place(arena, m->shard, m->teacher);
    size_t values = images_of_rank(m) * pixels_of(m->config) * PIXEL;
    place(arena, PATHS_KEPT * points_a_path(m->config.consistency_steps) * values, m->points);
}

static void place_pairs(Model* m, Arena* arena) {
    place(arena, images_of_step(m), m->pairs.timesteps, m->pairs.gaps, m->pairs.weights);
    place(arena, m->plan.batch * pixels_of(m->config) * PIXEL, m->pairs.errors);
}

static void place_matching(Model* m, Arena* arena) {
    const Config& c = m->config;
    DistributionMatching* matching = &m->matching;
    place(arena, m->shard, matching->fake.master, matching->fake.adam_m, matching->fake.adam_v);
    place(arena, 1, matching->state);
    place(arena, images_of_step(m), matching->timesteps);

    size_t values = images_of_rank(m) * pixels_of(c) * c.in_channels;
    place(arena, values, matching->pictures, matching->fake_x0, matching->teacher_x0);
    if (c.consistency_steps == 2) place(arena, values, matching->drafts);
}

// The activations, and what a step knows of its images.
static void place_batch(Model* m, Arena* arena) {
    const Config& c = m->config;
    size_t batch = images_of_step(m), B = m->plan.batch, pixels = pixels_of(c);
    place(arena, m->plan.arena_bytes, m->arena);
    place(arena, B * pixels * PIXEL, m->input, m->target, m->images);
    place(arena, batch, m->timesteps, m->sources);
    if (label_rows(c)) place(arena, batch, m->labels);

    place(arena, B, m->sampler.specs);
    m->sampler.x = m->target;
    m->sampler.saved = m->images;  // which therefore have room for PIXEL channels

    size_t losses = batch * loss_chunks((int)pixels);
    place(arena, losses, m->losses);
    if (m->plan.training && c.learn_sigma) place(arena, losses, m->variance_losses);
}

// Gives every buffer of a run its place in `memory`, and returns the bytes of all. Where memory is null it only counts.
static size_t lay_out_model(Model* m, char* memory) {
    const Config& c = m->config;
    Arena arena = {memory};
    place_weights(m, &arena);
    if (m->plan.training) {
        place_optimiser(m, &arena);
        if (c.path_steps) place_paths(m, &arena);
        if (has_pairs(c)) place_pairs(m, &arena);
        if (c.matching_fraction > 0) place_matching(m, &arena);
    }
    place_batch(m, &arena);
    place(&arena, 1, m->state);
    place(&arena, world.size, m->stops);
    place(&arena, c.diffusion_steps, m->schedule, m->last_words);
    return arena.used;
}

// A model that has sizes and no memory yet.
static Model plan_model(const Config& config, int batch, bool training) {
    Model m = Model();
    m.config = config;
    m.plan = network.make_plan(config, batch, training);
    shard_parameters(&m);
    m.bytes = lay_out_model(&m, nullptr);
    return m;
}

// The bytes that a run of this model allocates, without its images.
static size_t memory_of(const Model& m) { return m.bytes + workspace_bytes(); }

// The most images that the network can take at a time.
static int most_images(const Config& c) {
    const int GRID_ROWS = 65535;    // CUDA's limit of a grid's height
    const int PIXELS = 1 << 30;     // kernels count pixels in an int
    const int BIAS_SUMS = 7000000;  // half a stream's workspace holds a bias's gradient of each image and channel
    int widest = std::max(1, (int)((float)c.num_channels * std::ranges::max(c.channel_mult)));
    return std::min({GRID_ROWS, PIXELS / (int)pixels_of(c), BIAS_SUMS / widest});
}

static bool fits_memory(const Model& m) {
    size_t available = backend_memory_available();
    return !available || memory_of(m) <= available;
}

// Whether this run would fit with another batch size, of which `at_a_time` images go through the network at a time. It
// plans the whole run, because more micro-batches also need more gradient_buffers.
static bool would_fit(const Model& m, int batch_size, int at_a_time) {
    Config other = m.config;
    other.batch_size = batch_size;
    return fits_memory(plan_model(other, at_a_time, m.plan.training));
}

// Why the run is too large, or nothing where it is not.
static std::string why_too_large(const Model& m) {
    int batch = m.plan.batch, size = m.config.image_size;
    if (!fits_memory(m))
        return text("this run needs %s of memory and %s are free", human_bytes(memory_of(m)),
                    human_bytes(backend_memory_available()));
    if (batch > most_images(m.config)) return text("%d images of %d x %d at a time are too many", batch, size, size);
    return "";
}

// Refuses a model that a file's header can't count, or whose run is too large, and names a batch size that would fit.
static void check_memory(const Model& m) {
    const Config& c = m.config;
    if (m.plan.num_parameters > INT32_MAX)
        fail("this model has %zu parameters and %d are the most; use a smaller --channel_mult",
             m.plan.num_parameters, INT32_MAX);

    std::string why = why_too_large(m);
    if (why.empty()) return;

    int fits = std::min(m.plan.batch, most_images(c));  // images at a time
    while (fits > 0 && !would_fit(m, fits * m.ranks, fits)) fits /= 2;
    if (!fits) fail("%s; no batch size would fit: use a smaller model", why);

    std::string in_parts;
    bool is_shared = ceil_div(c.batch_size, fits) % m.ranks == 0;
    if (m.plan.training && is_shared && would_fit(m, c.batch_size, fits))
        in_parts = text("--microbatch %d, the same batch in parts, or ", fits);
    if (!m.plan.training) fits = std::max(1, fits / rows_a_sample(c));
    fail("%s; %s--batch_size %d would fit", why, in_parts, fits * m.ranks);
}

// Refuses more samples than one PNG can hold, or than the host's memory can, in which a CPU's model lies too.
static void check_samples(const Model& m, int samples, const char* remedy) {
    int H = m.config.image_size;
    double pixels = (double)samples * H * H;
    double grid_pixels = (double)samples * (H + 2) * (H + 2);  // with the gaps between the samples
    std::string what = text("%d pictures of %d x %d", samples, H, H);
    bool as_array = !m.plan.training && has_ending(m.config.output_name, ".npy");
    if (grid_pixels > 5e8 && !as_array) fail("%s are too many for one PNG; %s", what, remedy);

    double bytes = PIXEL * sizeof(float) * pixels;
    bytes += 2.0 * m.config.in_channels * grid_pixels;  // the grid, and the file that it becomes
    if (!ON_GPU) bytes += (double)memory_of(m);
    check_host_memory(bytes, "the model and " + what, remedy);
}

// An orthogonal matrix times 0.2 sqrt(columns) has a root mean square of 0.2, as AdamW's updates do: Liu et al. (2025).
static void upload_muon(Muon* muon, const Plan& plan) {
    std::vector<Tensor> matrices = muon_matrices(plan, muon->x);
    std::vector<float> scales(plan.num_floats / CHANNEL_MULTIPLE);
    for (const Tensor& X : matrices) {
        size_t first = (X.data - muon->x) / CHANNEL_MULTIPLE;
        std::fill_n(&scales[first], X.count() / CHANNEL_MULTIPLE, 0.2f * sqrtf((float)X.C));
    }
    upload(muon->scales, scales);
    upload(muon->products, muon_products(muon, matrices));
}

static void allocate_model(Model* m) {
    m->memory = allocate<char>(m->bytes);
    allocate_workspace();
    backend_zero(m->memory.get(), m->bytes);
    lay_out_model(m, m->memory.get());
    upload(m->schedule, make_schedule_rows(m->config));
    upload(m->last_words, make_last_words(m->config));
    if (m->muon.count) upload_muon(&m->muon, m->plan);
}

// to = from, (n), rounded.
struct RoundWeights {
    floatX* to;
    const float* from;
    size_t n;

    size_t items() const { return n; }
    HOST_DEVICE void operator()(size_t i) const { to[i] = (floatX)from[i]; }
};

// Returns the whole array of which `parameters` is this rank's shard. With several ranks it is put together in the
// gradients' memory, and lasts until the next step.
static float* gather_parameters(Model* m, float* parameters) {
    if (!is_sharded(m)) return parameters;

    backend_copy(m->gradients + first_of_shard(m), parameters, m->shard * sizeof(float));
    gather(m->gradients, m->shard);
    return m->gradients;
}

// Makes the layers read these parameters: master, an average, the teacher's or the fake's.
static void use_weights(Model* m, float* parameters) {
    size_t P = m->plan.num_floats, matrices = m->plan.num_decayed;
    parameters = gather_parameters(m, parameters);

    if (is_copied(m)) run(RoundWeights{.to = m->weights, .from = parameters, .n = P});
    else m->weights = (floatX*)parameters;

    if (!is_sharded(m)) m->fp32_params = parameters;
    else backend_copy(m->fp32_params + matrices, parameters + matrices, (P - matrices) * sizeof(float));
}

// Copies `master`, once it is filled, to all that starts the same.
static void start_from_master(Model* m) {
    use_weights(m, m->master);
    for (float* ema : m->ema)
        if (ema) backend_copy(ema, m->master, m->shard * sizeof(float));
    for (float* network : {m->teacher, m->matching.fake.master})
        if (network) backend_copy(network, m->master, m->shard * sizeof(float));
}

// Writes those of a tensor's values that are in this rank's shard to an array of parameters. The values come in the
// order of a file.
static void upload_tensor(const Model& m, float* parameters, const Parameter& t, std::span<const float> values) {
    std::vector<float> in_memory = reordered(values, t, true);
    size_t shard_begin = first_of_shard(&m);
    size_t shard_end = shard_begin + m.shard;
    size_t begin = std::max(t.offset, shard_begin);
    size_t end = std::min(t.offset + t.size, shard_end);
    if (begin >= end) return;

    backend_upload(parameters + (begin - shard_begin), &in_memory[begin - t.offset], (end - begin) * sizeof(float));
}

// The initial values of parameter number `index`: PyTorch's, which are uniform within 1 / sqrt(fan_in) and in a table
// normal, except where guided-diffusion begins with zeros.
static std::vector<float> fresh_values(const Plan& plan, size_t index, uint32_t seed) {
    const Parameter& t = plan.tensors[index];
    const Parameter& weight = plan.tensors[is_matrix(t) ? index : index - 1];  // a bias comes after its layer's weight
    double fan_in = (double)weight.count / weight.shape[0];
    float bound = (float)(1.0 / sqrt(fan_in));

    std::vector<float> values(t.count);
    switch (t.init) {
        case INIT_ZEROS: break;
        case INIT_ONES: std::ranges::fill(values, 1.0f); break;
        case INIT_NORMAL:
            for (size_t e = 0; e < t.count; e += 4) random_normals(&values[e], seed, STREAM_INIT, e / 4, index, 0);
            break;
        case INIT_UNIFORM:
            for (size_t e = 0; e < t.count; e++) {
                uint32_t word = random_word(seed, STREAM_INIT, e, index, 0);
                values[e] = (float)(2.0 * ((word >> 8) * 0x1p-24) - 1.0) * bound;
            }
            break;
    }
    for (float& value : values) value *= t.scale;
    return values;
}

static void initialise_weights(Model* m, uint32_t seed) {
    for (size_t index = 0; index < m->plan.tensors.size(); index++)
        upload_tensor(*m, m->master, m->plan.tensors[index], fresh_values(m->plan, index, seed));
    start_from_master(m);
}

// ---- the first and the last launch of a step --------------------------------------------------------------
// All images, (count, C, size, size), where the device can read them, as bytes or as floats; the other is null. And all
// that decides which of them a step takes. The order of epoch n is row n mod slots.
struct BatchSource {
    const uint8_t* bytes;
    const float* floats;
    const int* order;  // (slots, count)
    int count, slots, batch, size, channels, flip, diffusion_steps;
    uint32_t seed;
    const int* labels = nullptr;  // (count); null: the network knows no classes
    int no_class = 0;             // the label of a sample whose class is dropped
    float drop = 0;               // the probability that it is
    const uint32_t* last_words = nullptr;  // (diffusion_steps): see draw_timestep
    int path_steps = 0;                    // 0: the samples are images
    int consistency_steps = 0;
    int starts[2] = {};  // the timesteps at which the consistency_steps begin, the first at diffusion_steps - 1

    // The class of a sample of an image, unless the random word drops it.
    HOST_DEVICE int label_of(int image, uint32_t word) const {
        float uniform = (word >> 8) * 0x1p-24f;
        return uniform < drop ? no_class : labels[image];
    }
};

// What a word of STREAM_PATH decides. The first three are drawn once for each path, the last in each step.
enum PathDraw { PATH_SEED, PATH_IMAGE, PATH_DROP, PATH_CHOICE };

// The seed and the class of path `number`, from 0, of sample b. The class is that of a random image.
HOST_DEVICE static inline SampleSpec path_start(const BatchSource& s, size_t b, int64_t number) {
    uint32_t seed = random_word(s.seed, STREAM_PATH, PATH_SEED, b, number);
    if (!s.labels) return {seed, 0};

    int image = (int)random_below(s.count, s.seed, STREAM_PATH, PATH_IMAGE, b, number);
    return {seed, s.label_of(image, random_word(s.seed, STREAM_PATH, PATH_DROP, b, number))};
}

// Which of its paths sample b takes in a step: a random one of the newest PATHS_KEPT.
HOST_DEVICE static inline int64_t path_of(const BatchSource& s, size_t b, int64_t step) {
    int64_t newest = step / s.path_steps;
    int64_t older = newest < PATHS_KEPT ? newest : PATHS_KEPT - 1;
    return newest - random_below((int)older + 1, s.seed, STREAM_PATH, PATH_CHOICE, b, step);
}

// Begins a step: chooses the timestep, the source and the label of every sample of the batch, and computes the state's
// update. An item is a sample.
struct BeginStep {
    StepState* state;
    int *timesteps, *sources, *labels;  // (batch)
    BatchSource source;
    Hyper hyper;
    const ScheduleRow* schedule = nullptr;  // (diffusion_steps)
    ConsistencyPairs pairs = {};

    // The source is an image, or -1 - image: mirrored.
    HOST_DEVICE void choose_image(size_t b, int64_t step) const {
        const BatchSource& s = source;
        uint64_t n = (uint64_t)step * s.batch + b;  // the sample's number in the run
        uint64_t epoch = n / s.count;
        int image = s.order[epoch % s.slots * s.count + n % s.count];
        bool mirrored = s.flip && random_word(s.seed, STREAM_FLIP, 0, b, step) >> 31;
        sources[b] = mirrored ? -1 - image : image;

        uint32_t word = random_word(s.seed, STREAM_TIMESTEP, 0, b, step);
        timesteps[b] = draw_timestep(s.last_words, s.diffusion_steps, word);
        if (s.labels) labels[b] = s.label_of(image, random_word(s.seed, STREAM_LABEL, 0, b, step));
    }

    // The source is one of the points of all the sample's paths. Samples take turns at the points where steps begin.
    HOST_DEVICE void choose_point(size_t b, int64_t step) const {
        const BatchSource& s = source;
        int64_t path = path_of(s, b, step);
        int point = (int)((b + step) % s.consistency_steps);
        sources[b] = (int)(path % PATHS_KEPT) * points_a_path(s.consistency_steps) + point;
        timesteps[b] = s.starts[point];
        if (s.labels) labels[b] = path_start(s, b, path).label;
    }

    size_t items() const { return source.batch; }
    HOST_DEVICE void operator()(size_t b) const {
        int64_t step = state->step;
        if (b == 0) state->update = adamw_at(hyper, step, step - state->history.skipped);

        if (source.path_steps) choose_point(b, step);
        else choose_image(b, step);
        if (pairs.gaps) choose_earlier(pairs, schedule, b, timesteps[b], pair_ratio(step, hyper.lr_steps));
    }
};

// Begins a step that matches distributions. The student draws from noise alone, at the last of the timesteps. `noised`
// are those to which its pictures are noised then, not among the first or last fiftieth, as in Yin et al. It also
// computes the fake's update. An item is a sample.
struct BeginMatching {
    StepState* fake_state;
    int *timesteps, *noised;  // (batch)
    const int64_t* step;      // of the run
    int64_t first;            // the first step of the run that matches distributions
    Hyper hyper;              // the fake's
    int batch, diffusion_steps;
    uint32_t seed;

    size_t items() const { return batch; }
    HOST_DEVICE void operator()(size_t b) const {
        if (b == 0) {
            fake_state->update = adamw_at(hyper, *step, *step - first);
            fake_state->accepted = 1;
        }
        timesteps[b] = diffusion_steps - 1;

        int least = diffusion_steps / 50;
        noised[b] = least + (int)random_below(diffusion_steps - 2 * least, seed, STREAM_MATCHING_TIMESTEP, 0, b, *step);
    }
};

// timesteps (count) = timestep. An item is a sample.
struct SetTimesteps {
    int* timesteps;
    int count, timestep;

    size_t items() const { return count; }
    HOST_DEVICE void operator()(size_t b) const { timesteps[b] = timestep; }
};

// images (B, C, size, size) = the images that `sources` (B) names, in [-1, 1]. An item is an element.
struct LoadImages {
    float* images;
    const int* sources;
    BatchSource source;
    int B;

    size_t items() const { return (size_t)B * source.channels * source.size * source.size; }
    HOST_DEVICE void operator()(size_t i) const {
        int W = source.size, elements = source.channels * W * W;
        int image = sources[i / elements], e = i % elements;
        if (image < 0) {  // mirrored
            image = -1 - image;
            e += W - 1 - 2 * (e % W);
        }
        size_t at = (size_t)image * elements + e;
        images[i] = source.bytes ? (float)source.bytes[at] / 127.5f - 1.0f : source.floats[at];
    }
};

// The end of a step, by one team: the loss, also by quarter of the timesteps, the gradient's norm, and conclude_step.
struct FinishStep {
    StepState* state;
    BatchLoss loss;
    const float* grad_norm_sums;  // as SquaredNorm leaves them
    size_t parameters;
    Hyper hyper;
    const int* stops = nullptr;  // (ranks)
    int ranks = 0;

    enum { THREADS = 256, BLOCKS = 1 };
    size_t items() const { return 1; }
    HOST_DEVICE void operator()(Team team) const {
        enum { WEIGHTED_LOSS, SQUARED_NORM, QUARTILES, COUNTS = QUARTILES + 4, SUMS = COUNTS + 4 };
        Sum sums[SUMS] = {};

        int chunks = loss_chunks(loss.pixels);
        for (int i = team.thread; i < loss.B * chunks; i += team.threads) {
            int b = i / chunks;
            int quartile = 4 * loss.timestep(b) / loss.diffusion_steps;
            sums[WEIGHTED_LOSS] += loss.weight_of(b) * loss.chunk_sums[i];
            if (loss.variance_chunk_sums) sums[WEIGHTED_LOSS] += loss.variance_chunk_sums[i];
            UNROLLED_FOR (int q = 0; q < 4; q++) {
                if (q != quartile) continue;
                sums[QUARTILES + q] += loss.chunk_sums[i];
                sums[COUNTS + q] += i % chunks == 0;  // once for each sample
            }
        }
        for (int i = team.thread; i < ceil_div(parameters, NORM_CHUNK); i += team.threads)
            sums[SQUARED_NORM] += grad_norm_sums[i];
        UNROLLED_FOR (int i = 0; i < SUMS; i++) sums[i] = team_sum(sums[i]);
        if (team.thread > 0) return;

        float mean_loss = (float)((double)sums[WEIGHTED_LOSS] / loss.elements());
        UNROLLED_FOR (int q = 0; q < 4; q++) {
            state->quartile_sums[q] = (float)(sums[QUARTILES + q] / (loss.pixels * loss.channels));
            state->quartile_counts[q] = (float)sums[COUNTS + q];
        }
        state->stop = 0;
        for (int rank = 0; rank < ranks; rank++) state->stop |= stops[rank];
        conclude_step(state, mean_loss, (float)sqrt(sums[SQUARED_NORM]), hyper);
    }
};

// Whether the run ends after this step, as all ranks know. stop_asked (section 2) says only that this process, or one
// forked with it, has received a signal. Several ranks first tell each other: in a step by FinishStep, between steps by
// agree_to_stop.
static std::atomic<int> stop_agreed = 0;

// ---- a training step --------------------------------------------------------------------------------------
// What a network learns from.
enum Objective {
    OBJECTIVE_IMAGES,   // training images
    OBJECTIVE_PATHS,    // points of paths
    OBJECTIVE_FAKE,     // in distribution matching, the fake: pictures that the student drew
    OBJECTIVE_STUDENT,  // in distribution matching, the student: what the fake and the teacher predict from these
};

// What the network that is trained, or tuned, learns from in this step of the run.
static Objective objective_of(const Config& c, int64_t step) {
    if (!c.path_steps) return OBJECTIVE_IMAGES;
    bool matches = c.matching_fraction > 0 && step >= steps_on_paths(c);
    return matches ? OBJECTIVE_STUDENT : OBJECTIVE_PATHS;
}

// Parts of --lr; docs/experiments.md compares them with others.
static const float STUDENT_RATE = 0.03f, FAKE_RATE = 0.1f;

// The optimiser's settings for an objective. While distributions are matched, gradients change direction from step to
// step, and the fake has to follow the student. So rates are constant and small, the fake's is the larger one, and
// beta1 is 0. No step is skipped as an outlier, because History has the losses of paths. Nor does --grad_clip apply to
// the fake, because FinishStep, which computes how much is clipped, sees only the student's gradient.
static Hyper hyper_of(const Config& c, Objective objective) {
    Hyper hyper = c.hyper;
    if (objective == OBJECTIVE_IMAGES || objective == OBJECTIVE_PATHS) return hyper;

    hyper.lr *= objective == OBJECTIVE_FAKE ? FAKE_RATE : STUDENT_RATE;
    hyper.lr_schedule = LR_CONSTANT;
    hyper.warmup_steps = 0;
    hyper.beta1 = 0;
    hyper.skip_outliers = 0;
    return hyper;
}

struct Trainer {
    Model model = Model();
    Dataset images, validation;

    // what the run starts from, and what the log says of it
    std::vector<long> checkpoints;    // the steps of those in the run's folder when the run was configured
    WeightsFile start = {};           // without a path: the run starts from fresh weights
    std::vector<int> kept_rows = {};  // for each row of the label embedding the row of `start` that it keeps; -1: fresh
    Strings changes;                  // flags that --resume came with, such as --lr 0.001 (was 0.0001)
    Strings notes;                    // such as what was assumed of the classes

    // what the device reads and writes in a step; the first three arrays are in the host's memory
    std::shared_ptr<int[]> order;          // (slots, count)
    std::shared_ptr<int[]> stop;           // (1): stop_asked, for the step's graph
    std::shared_ptr<StepState[]> results;  // (STEPS_IN_FLIGHT): step n's is number n mod STEPS_IN_FLIGHT
    BatchSource source;
    std::vector<std::shared_ptr<char[]>> copies;  // of images and labels, where the device needs any
    long epochs;                                  // how many epochs have their order in `order`
    std::map<Objective, Graph> graphs;            // of a step
    std::vector<SamplerStep> path;                // the steps of a path
    CallGraphs path_graphs;
    int64_t paths_drawn = 0;  // for each sample: see path_start

    // where the run is
    long begun = 0;                // steps given to the device
    long step = 0;                 // optimiser steps done, as far as the host knows
    long saved = 0, sampled = -1;  // steps of the newest checkpoint and grid of pictures
    float smoothed = 0;            // running mean of the loss, without those of skipped steps
    History history = History();
    Metrics metrics;
    std::map<long, double> validated;  // the validation losses of the whole run, by step
    // those of StepState, added up over the steps since the last line of the log
    std::array<double, 4> quartile_sums = {}, quartile_counts = {};
};

// Returns where the device can read these values; null where there are none. A GPU reads a copy, which stays in the
// host's memory if it would take more than nine tenths of what is free on the GPU.
template <typename T> static const T* for_device(Trainer* t, const std::vector<T>& values) {
    size_t bytes = values.size() * sizeof(T);
    if (!bytes) return nullptr;
    if (!ON_GPU) return values.data();

    bool on_host = bytes > backend_memory_available() / 10 * 9;
    t->copies.push_back(allocate<char>(bytes, on_host));
    char* copy = t->copies.back().get();
    backend_upload(copy, values.data(), bytes);
    return (const T*)copy;
}

// The source of all steps, from t->order, which has `slots` rows. On a GPU t->images gives up its own memory.
static BatchSource make_source(Trainer* t, int slots) {
    const Config& c = t->model.config;
    BatchSource source = {.bytes = for_device(t, t->images.bytes),
                          .floats = for_device(t, t->images.floats),
                          .order = t->order.get(),
                          .count = t->images.count,
                          .slots = slots,
                          .batch = c.batch_size,
                          .size = c.image_size,
                          .channels = c.in_channels,
                          .flip = c.flip,
                          .diffusion_steps = c.diffusion_steps,
                          .seed = c.seed,
                          .no_class = c.num_classes,
                          .drop = c.cond_drop_prob,
                          .last_words = t->model.last_words,
                          .path_steps = c.path_steps,
                          .consistency_steps = c.consistency_steps};
    if (c.path_steps) std::ranges::reverse_copy(consistency_timesteps(c, c.consistency_steps), source.starts);
    if (t->model.labels) source.labels = for_device(t, t->images.labels);

    if (ON_GPU) {
        t->images.bytes = std::vector<uint8_t>();
        t->images.floats = std::vector<float>();
    }
    return source;
}

// Prepares all that steps need besides the model, its weights and t->step.
static void prepare_steps(Trainer* t) {
    Model* m = &t->model;
    const Config& c = m->config;

    // The steps in flight and the next one draw from at most batch_size * (STEPS_IN_FLIGHT + 1) / count + 2 epochs.
    // There are twice as many slots, so that a new order never overwrites one in use.
    int slots = 2 * (c.batch_size * (STEPS_IN_FLIGHT + 1) / t->images.count + 2);
    t->order = allocate<int>((size_t)slots * t->images.count, true);
    t->results = allocate<StepState>(STEPS_IN_FLIGHT, true);
    t->stop = allocate<int>(1, true);
    t->source = make_source(t, slots);
    if (c.path_steps) t->path = make_path(c);

    StepState state = StepState();
    state.step = t->step;
    state.history = t->history;
    backend_upload(m->state, &state, sizeof state);
    t->begun = t->step;
    t->epochs = t->step * c.batch_size / t->images.count;
}

// The loss of a batch. Only pairs have weights other than the schedule's, and only the fake other timesteps.
static BatchLoss batch_loss(const Model* m, Objective objective) {
    const Config& c = m->config;
    return {.chunk_sums = m->losses,
            .timesteps = objective == OBJECTIVE_FAKE ? m->matching.timesteps : m->timesteps,
            .schedule = m->schedule,
            .batch_size = c.batch_size,
            .pixels = (int)pixels_of(c),
            .channels = c.in_channels,
            .diffusion_steps = c.diffusion_steps,
            .variance_chunk_sums = m->variance_losses,
            .weights = m->pairs.weights,
            .on_paths = objective == OBJECTIVE_PATHS,
            .width = c.image_size};
}

// Samples of a batch that go through the network at a time: B of them, from number `first` of the batch on, which is
// number `own` of this rank's samples.
struct MicroBatch : BatchLoss {
    int own;
};

static std::vector<MicroBatch> own_microbatches(const Model* m, Objective objective) {
    int size = m->plan.batch;
    int samples = (int)images_of_rank(m);
    std::vector<MicroBatch> parts;
    for (int own = 0; own < samples; own += size) {
        MicroBatch part = {batch_loss(m, objective), own};
        part.first = m->rank * samples + own;
        part.B = std::min(size, part.batch_size - part.first);
        parts.push_back(part);
    }
    return parts;
}

// A micro-batch's points of paths, as LoadPathPoints has them.
static float* points_of(const Model* m, const MicroBatch& part) {
    const Config& c = m->config;
    return m->points + part.own * PATHS_KEPT * points_a_path(c.consistency_steps) * pixels_of(c) * PIXEL;
}

// A micro-batch's images (B, C, H, W) in one of DistributionMatching's arrays, which hold those of the whole rank.
static float* images_of(float* images, const Model* m, const MicroBatch& part) {
    return images + part.own * m->config.in_channels * pixels_of(m->config);
}

// The network's call for a micro-batch, which drops nothing.
static NetworkCall call_of(const Model* m, const MicroBatch& part) {
    return {.B = part.B,
            .timesteps = part.timesteps + part.first,
            .labels = m->labels ? m->labels + part.first : nullptr,
            .first = part.first};
}

// The same in training, where dropout drops.
static NetworkCall training_call(const Model* m, const MicroBatch& part) {
    NetworkCall call = call_of(m, part);
    call.dropout_step = &m->state->step;
    return call;
}

// Noises the images (B, C, H, W) for a call: makes the network's input and m->target.
static void add_noise(Model* m, const float* images, const NetworkCall& call, RandomStream stream) {
    const Config& c = m->config;
    const int64_t* step = stream == STREAM_VAL_NOISE ? nullptr : &m->state->step;
    run(AddNoise<floatX>{.x_t = unet_input(m, call.B),
                         .target = m->target,
                         .images = images,
                         .schedule = m->schedule,
                         .timesteps = call.timesteps,
                         .step = step,
                         .first = call.first,
                         .channels = c.in_channels,
                         .offset_noise = c.path_steps ? 0 : c.offset_noise,  // a path begins with a sampler's noise
                         .seed = c.seed,
                         .stream = stream});
}

// Calls the network at the earlier timesteps, and makes pairs.errors.
static void predict_earlier(Model* m, const MicroBatch& part) {
    NetworkCall earlier = training_call(m, part);
    earlier.timesteps = m->pairs.timesteps + part.first;
    add_noise(m, m->images, earlier, STREAM_NOISE);
    unet_forward(m, earlier);
    run(EarlierErrors<floatX>{m->pairs, part, unet_output(m), m->target});
}

// Makes the network's input and m->target from training images, noised.
static void load_noised_images(Trainer* t, const MicroBatch& part) {
    Model* m = &t->model;
    run(LoadImages{.images = m->images,
                   .sources = m->sources + part.first,
                   .source = t->source,
                   .B = part.B});
    if (has_pairs(m->config)) predict_earlier(m, part);
    add_noise(m, m->images, call_of(m, part), STREAM_NOISE);
}

// Makes the network's input and m->target from points of paths.
static void load_path_points(Model* m, const MicroBatch& part) {
    run(LoadPathPoints<floatX>{.x_t = unet_input(m, part.B),
                               .target = m->target,
                               .loss = part,
                               .points = points_of(m, part),
                               .chosen = m->sources + part.first,
                               .consistency_steps = m->config.consistency_steps});
}

// What the network sees in a step that matches distributions: images, noised.
struct NoisedImages {
    float* images;  // one of DistributionMatching's arrays; null: zeros, so that the network sees noise alone
    RandomStream stream;
};
static const NoisedImages NOISE_ALONE = {nullptr, STREAM_NOISE};

// What the student sees in its last step of drawing: its drafts. Where it draws in one step, this is also the first.
static NoisedImages student_input(const Model* m) {
    if (!m->matching.drafts) return NOISE_ALONE;
    return {m->matching.drafts, STREAM_SECOND_NOISE};
}

// What the fake and the teacher see: the pictures that the student drew.
static NoisedImages drawn_pictures(const Model* m) { return {m->matching.pictures, STREAM_MATCHING_NOISE}; }

// Makes the network's input and m->target from these images. Returns the micro-batch's, (B, C, H, W).
static const float* load_noised(Model* m, const NoisedImages& noised, const MicroBatch& part) {
    const float* images = m->images;
    if (noised.images) {
        images = images_of(noised.images, m, part);
    } else {
        size_t values = (size_t)part.B * m->config.in_channels * pixels_of(m->config);
        backend_zero(m->images, values * sizeof(float));
    }
    add_noise(m, images, call_of(m, part), noised.stream);
    return images;
}

// Where the x0 goes that the network predicts from noised images, and whether it is clamped to [-1, 1].
struct PredictedImages {
    float* images;  // one of DistributionMatching's arrays
    bool clamps;
};

// Writes the x0 that the network has predicted from a micro-batch's noised images (B, C, H, W).
static void predict_x0(Model* m, const PredictedImages& predicted, const float* images, const MicroBatch& part) {
    run(PredictX0<floatX>{.predicted = images_of(predicted.images, m, part),
                          .loss = part,
                          .images = images,
                          .out = unet_output(m),
                          .target = m->target,
                          .clamps = predicted.clamps});
}

// Makes m->target the student's, from its prediction.
static void load_matching_target(Model* m, const MicroBatch& part) {
    run(MatchingTarget<floatX>{.target = m->target,
                               .loss = part,
                               .out = unet_output(m),
                               .pictures = images_of(m->matching.pictures, m, part),
                               .teacher = images_of(m->matching.teacher_x0, m, part),
                               .fake = images_of(m->matching.fake_x0, m, part)});
}

// Makes m->target the x0 that the network predicted at the earlier timesteps, and then the samples' weights. A weight
// depends on the sample's squared error, which PredictionLoss adds up here without a gradient.
static void load_pair_target(Model* m, const MicroBatch& part) {
    run(AddFloats{m->target, m->target, m->pairs.errors, unet_input(m, part.B).count()});
    run(PredictionLoss<floatX>{part, unet_output(m), m->target});
    run(PairWeights{m->pairs, part});
}

// dw = the gradient of a micro-batch: load, noise, forward, loss, backward.
static void microbatch_gradient(Trainer* t, Objective objective, const MicroBatch& part, float* dw) {
    Model* m = &t->model;
    const Config& c = m->config;
    switch (objective) {
        case OBJECTIVE_IMAGES: load_noised_images(t, part); break;
        case OBJECTIVE_PATHS: load_path_points(m, part); break;
        case OBJECTIVE_FAKE: load_noised(m, drawn_pictures(m), part); break;
        case OBJECTIVE_STUDENT: load_noised(m, student_input(m), part); break;
    }
    unet_forward(m, training_call(m, part));

    if (has_pairs(c)) load_pair_target(m, part);
    if (objective == OBJECTIVE_STUDENT) load_matching_target(m, part);
    if (objective == OBJECTIVE_FAKE) {
        // load_matching_target will need it.
        PredictedImages fake_x0 = {.images = m->matching.fake_x0, .clamps = clamps_x0(c)};
        predict_x0(m, fake_x0, images_of(m->matching.pictures, m, part), part);
    }

    floatX* dout = output_gradient_of(m, m->plan.blocks.back(), part.B).data;
    const float* images = c.learn_sigma ? m->images : nullptr;
    run(PredictionLoss<floatX>{part, unet_output(m), m->target, dout, images});
    unet_backward(m, dw);
}

// dw = the gradient of these micro-batches: that of the first half plus that of the others, so that their number alone
// decides in which order gradients are added. The others' gradient is made in the buffer after dw.
static void tree_gradient(Trainer* t, Objective objective, std::span<const MicroBatch> parts, float* dw) {
    if (parts.size() == 1) return microbatch_gradient(t, objective, parts[0], dw);

    size_t half = parts.size() / 2, P = t->model.plan.num_floats;
    float* other = dw + P;
    tree_gradient(t, objective, parts.first(half), dw);
    tree_gradient(t, objective, parts.subspan(half), other);
    run(AddFloats{.sum = dw, .a = dw, .b = other, .n = P});
}

// Every rank has the gradient of its own images. Adds up all ranks' gradients of this rank's shard, in the order in
// which tree_gradient would go on: in pairs of neighbours, pairs of these, and so on.
static void reduce_gradient(Model* m) {
    float* mine = m->gradients + first_of_shard(m);
    auto from = [&](int rank) { return rank == m->rank ? mine : m->received + rank * m->shard; };
    auto bytes_of = [&](float* shard) { return std::as_writable_bytes(std::span(shard, m->shard)); };
    exchange_with_all([&](int peer) { return bytes_of(m->gradients + peer * m->shard); },
                      [&](int peer) { return bytes_of(from(peer)); });

    for (int stride = 1; stride < m->ranks; stride *= 2) {
        bool is_last = 2 * stride == m->ranks;
        for (int rank = 0; rank < m->ranks; rank += 2 * stride) {
            float* sum = is_last ? mine : from(rank);
            run(AddFloats{.sum = sum, .a = from(rank), .b = from(rank + stride), .n = m->shard});
        }
    }
}

// Gathers what else every rank needs for FinishStep: all ranks' losses, squares of gradients, and `stop`.
static void gather_results(Model* m, const int* stop) {
    size_t images = images_of_rank(m);
    int chunks = loss_chunks((int)pixels_of(m->config));
    backend_copy(m->stops + m->rank, stop, sizeof *stop);
    backend_together([&] {
        for (float* losses : {m->losses, m->variance_losses})
            if (losses) gather(losses, images * chunks);
        if (m->pairs.weights) gather(m->pairs.weights, images);
        gather(m->grad_norm_sums, m->shard / NORM_CHUNK);
        gather(m->stops, 1);
    });
}

// Gathers every rank's shard of the updated weights on all ranks. Those that are no matrices are in fp32_params too.
static void gather_weights(Model* m) {
    size_t begin = first_of_shard(m);
    size_t end = begin + m->shard;
    size_t matrices = m->plan.num_decayed;
    size_t first = std::clamp(matrices, begin, end);  // of the shard's parameters that are no matrices
    if (first < end)
        backend_copy(m->fp32_params + first, m->master + (first - begin), (end - first) * sizeof(float));
    backend_together([&] {
        gather(m->weights, m->shard);
        gather(m->fp32_params, m->shard, matrices);
    });
}

// Computes the batch's gradient, of which each rank gets its shard.
static void batch_gradient(Trainer* t, Objective objective) {
    Model* m = &t->model;
    tree_gradient(t, objective, own_microbatches(m, objective), m->gradients);
    if (is_sharded(m)) reduce_gradient(m);
}

// Muon's directions of all matrices, on every rank. memory: this rank's shard.
static const floatX* muon_directions(Model* m, const OptimiserMemory& memory, const StepState* state) {
    size_t first = first_of_shard(m);
    run(MuonMomentum<floatX>{m->muon.x + first, memory.adam_m, m->gradients + first, m->shard, state});
    if (is_sharded(m)) gather(m->muon.x, m->shard);
    return orthogonalise(m->muon);
}

// Updates this rank's shard of the weights. working: the weights as the layers read them, or null.
static void update_weights(Model* m, const OptimiserMemory& memory, floatX* working, const StepState* state) {
    size_t first = first_of_shard(m);
    size_t decayed = m->plan.num_decayed;
    UpdateWeights<floatX> update = {.memory = memory,
                                    .gradient = m->gradients + first,
                                    .working = working ? working + first : nullptr,
                                    .n = m->shard,
                                    .decayed = decayed - std::min(decayed, first),
                                    .state = state};
    if (m->muon.count) {
        update.directions = muon_directions(m, memory, state) + first;
        update.scales = m->muon.scales + first / CHANNEL_MULTIPLE;
    }
    run(update);
}

// Predicts x0 for all this rank's samples, at the timesteps of this objective.
static void predict_all(Model* m, Objective objective, const NoisedImages& noised, const PredictedImages& predicted) {
    for (const MicroBatch& part : own_microbatches(m, objective)) {
        const float* images = load_noised(m, noised, part);
        unet_forward(m, call_of(m, part));
        predict_x0(m, predicted, images, part);
    }
}

// The first part of a step that matches distributions: the student draws, the fake learns, and the teacher predicts.
static void match_distributions(Trainer* t) {
    Model* m = &t->model;
    const Config& c = m->config;
    DistributionMatching& matching = m->matching;
    run(BeginMatching{.fake_state = matching.state,
                      .timesteps = m->timesteps,
                      .noised = matching.timesteps,
                      .step = &m->state->step,
                      .first = steps_on_paths(c),
                      .hyper = hyper_of(c, OBJECTIVE_FAKE),
                      .batch = c.batch_size,
                      .diffusion_steps = c.diffusion_steps,
                      .seed = c.seed});

    if (matching.drafts) {
        predict_all(m, OBJECTIVE_STUDENT, NOISE_ALONE, {.images = matching.drafts, .clamps = clamps_x0(c)});
        run(SetTimesteps{m->timesteps, c.batch_size, t->source.starts[1]});
    }
    predict_all(m, OBJECTIVE_STUDENT, student_input(m), {.images = matching.pictures, .clamps = false});

    use_weights(m, matching.fake.master);
    batch_gradient(t, OBJECTIVE_FAKE);
    update_weights(m, matching.fake, nullptr, matching.state);

    use_weights(m, m->teacher);
    predict_all(m, OBJECTIVE_FAKE, drawn_pictures(m), {.images = matching.teacher_x0, .clamps = clamps_x0(c)});
    use_weights(m, m->master);
}

// Launches an optimiser step. Its launches are the same in all steps with this objective, so that they can be captured.
static void enqueue_step(Trainer* t, Objective objective) {
    Model* m = &t->model;
    Hyper hyper = hyper_of(m->config, objective);
    BatchSource source = t->source;
    if (objective == OBJECTIVE_STUDENT) source.path_steps = 0;  // it takes the classes of images
    run(BeginStep{.state = m->state,
                  .timesteps = m->timesteps,
                  .sources = m->sources,
                  .labels = m->labels,
                  .source = source,
                  .hyper = hyper,
                  .schedule = m->schedule,
                  .pairs = m->pairs});

    if (objective == OBJECTIVE_STUDENT) match_distributions(t);
    batch_gradient(t, objective);

    size_t first = first_of_shard(m);
    run(SquaredNorm{m->grad_norm_sums + first / NORM_CHUNK, m->gradients + first, m->shard});
    if (is_sharded(m)) gather_results(m, t->stop.get());
    run(FinishStep{.state = m->state,
                   .loss = batch_loss(m, objective),
                   .grad_norm_sums = m->grad_norm_sums,
                   .parameters = m->plan.num_floats,
                   .hyper = hyper,
                   .stops = m->stops,
                   .ranks = m->ranks});

    update_weights(m, *m, is_copied(m) ? m->weights : nullptr, m->state);
    if (is_sharded(m)) gather_weights(m);
}

// specs = the seeds and classes of path `number` of a micro-batch's samples. An item is a path.
struct StartPaths {
    SampleSpec* specs;  // (B)
    BatchSource source;
    int B, first;
    int64_t number;

    size_t items() const { return B; }
    HOST_DEVICE void operator()(size_t b) const { specs[b] = path_start(source, first + b, number); }
};

// Draws path `number` of every sample of this rank, with the weights that the run started from.
static void draw_paths(Trainer* t, int64_t number) {
    Model* m = &t->model;
    const Config& c = m->config;
    int end = c.path_steps;
    int second = 0;  // where the second consistency step begins, if there is one
    if (c.consistency_steps == 2) second = end - second_start(end);

    use_weights(m, m->teacher);
    for (const MicroBatch& part : own_microbatches(m, OBJECTIVE_PATHS)) {
        run(StartPaths{m->sampler.specs, t->source, part.B, part.first, number});
        SampleBatch<floatX> batch = samples_of(m, part.B, 1);
        begin_samples(m, batch);

        size_t values = batch.input.count();
        float* point = points_of(m, part) + number % PATHS_KEPT * points_a_path(c.consistency_steps) * values;
        for (int i = 0; i <= end; i++) {
            take_sampler_step(m, batch, t->path[i], &t->path_graphs);
            if (i != 0 && i != second && i != end) continue;
            backend_copy(point, batch.x, values * sizeof(float));
            point += values;
        }
    }
    use_weights(m, m->master);
}

// Draws the paths that the next step is the first to choose from. A resumed run draws its PATHS_KEPT newest again.
static void draw_due_paths(Trainer* t) {
    int64_t newest = t->begun / t->source.path_steps;
    t->paths_drawn = std::max(t->paths_drawn, newest + 1 - PATHS_KEPT);
    for (; t->paths_drawn <= newest; t->paths_drawn++) draw_paths(t, t->paths_drawn);
}

// Shuffles the epochs that the next step is the first to draw from.
static void shuffle_due_epochs(Trainer* t) {
    const BatchSource& s = t->source;
    for (; t->epochs * s.count < (t->begun + 1) * s.batch; t->epochs++) {
        int* order = t->order.get() + t->epochs % s.slots * s.count;
        random_permutation(order, s.count, s.seed, t->epochs);
    }
}

// Gives the device its next step.
static void begin_next_step(Trainer* t) {
    Objective objective = objective_of(t->model.config, t->begun);
    if (objective == OBJECTIVE_PATHS) draw_due_paths(t);
    shuffle_due_epochs(t);
    t->stop[0] = stop_asked;

    int slot = (int)(t->begun % STEPS_IN_FLIGHT);
    launch_graph(&t->graphs[objective], [&] { enqueue_step(t, objective); });
    backend_copy(&t->results[slot], t->model.state, sizeof(StepState));
    mark_step_end(slot);
    t->begun++;
}

// The result of the oldest step that was begun and not yet awaited.
static StepState await_step(Trainer* t) {
    int slot = (int)(t->step % STEPS_IN_FLIGHT);
    wait_for_step(slot);
    const StepState& result = t->results[slot];

    if (result.stop) {
        stop_asked = 1;
        stop_agreed = 1;
    }
    if (result.accepted) {
        bool is_first = t->step == 0;
        t->smoothed = is_first ? result.loss : 0.98f * t->smoothed + 0.02f * result.loss;
    }
    t->history = result.history;
    if (!result.finite) return result;

    t->step++;
    for (int q = 0; q < 4; q++) {
        t->quartile_sums[q] += result.quartile_sums[q];
        t->quartile_counts[q] += result.quartile_counts[q];
    }
    return result;
}

// The weights that sampling and validation use: the average that --use_ema numbers, from 1, if there is one.
static float* chosen_weights(const Model* m) {
    int number = m->config.use_ema;
    if (number && m->ema[number - 1]) return m->ema[number - 1];
    return m->master;
}

// What the log calls them.
static std::string chosen_name(const Config& c) {
    if (!c.use_ema || c.use_ema > ema_count(c)) return "raw weights";
    return "EMA " + float_text(c.hyper.ema_rate[c.use_ema - 1]);
}

// Every rank's number, on every rank. All of them have to call this.
static std::vector<int> gather_numbers(Model* m, int number) {
    std::vector<int> numbers(world.size, number);
    if (world.size == 1) return numbers;

    upload(m->stops, numbers);
    gather(m->stops, 1);
    backend_download(numbers.data(), m->stops, world.size * sizeof(int));
    return numbers;
}

static bool agree_to_stop(Model* m) {
    bool is_asked = std::ranges::max(gather_numbers(m, stop_asked));
    if (is_asked) {
        stop_asked = 1;
        stop_agreed = 1;
    }
    return stop_agreed;
}

// Gives rank 0 a rank's share of `values`, `unit` of them at a time, through the memory of the sampler's x, which is
// free by then. These two ranks call it.
template <typename T> static void send_share(Model* m, std::vector<T>* values, size_t unit, int rank) {
    auto [begin, end] = share_of(values->size(), rank, unit);
    for (size_t first = begin; first < end; first += unit) {
        T* piece = &(*values)[first];
        size_t bytes = std::min(unit, end - first) * sizeof(T);
        std::span buffer((std::byte*)m->sampler.x, bytes);
        if (world.rank == 0) {
            backend_exchange(rank, {}, buffer);
            backend_download(piece, m->sampler.x, bytes);
        } else {
            backend_upload(m->sampler.x, piece, bytes);
            backend_exchange(0, buffer, {});
        }
    }
}

// Computes `values` with the chosen weights: each rank its share of them, by work(first, count) for `unit` of them at a
// time. Rank 0 gets those of the others. Returns false if the ranks were asked to stop.
template <typename T> static bool share_among_ranks(Model* m, std::vector<T>* values, size_t unit, auto work) {
    use_weights(m, chosen_weights(m));
    auto [begin, end] = share_of(values->size(), world.rank, unit);
    for (size_t first = begin; first < end && !stop_asked; first += unit) {
        size_t count = std::min(unit, end - first);
        work(first, count);
    }
    use_weights(m, m->master);
    if (agree_to_stop(m)) return false;

    for (int rank = 1; rank < world.size; rank++)
        if (world.rank == 0 || world.rank == rank) send_share(m, values, unit, rank);
    return true;
}

// Uploads B validation images, from `first` on, with their timesteps and labels.
static void load_validation_images(Trainer* t, const std::vector<uint32_t>& last_words, int first, int B) {
    Model* m = &t->model;
    const Config& c = m->config;
    size_t elements = c.in_channels * pixels_of(c);
    std::vector<float> images(B * elements);
    for (size_t e = 0; e < images.size(); e++) images[e] = t->validation.value(first * elements + e);

    std::vector<int> timesteps(B);
    for (int b = 0; b < B; b++) {
        uint32_t word = random_word(c.seed, STREAM_VAL_TIMESTEP, 0, first + b, 0);
        timesteps[b] = draw_timestep(last_words.data(), c.diffusion_steps, word);
    }

    upload(m->images, images);
    upload(m->timesteps, timesteps);
    if (m->labels) backend_upload(m->labels, &t->validation.labels[first], B * sizeof(int));
}

// The sum of the losses of B validation images, from `first` on, without the timesteps' weights. An image has the same
// noise and the same timestep every time.
static double validation_batch_loss(Trainer* t, const std::vector<uint32_t>& last_words, int first, int B) {
    Model* m = &t->model;
    load_validation_images(t, last_words, first, B);

    NetworkCall call = call_of(m, B);
    call.first = first;  // the noise goes by an image's number among all validation images
    add_noise(m, m->images, call, STREAM_VAL_NOISE);
    unet_forward(m, call);

    BatchLoss loss = batch_loss(m, OBJECTIVE_IMAGES);
    loss.batch_size = B;
    loss.B = B;
    run(PredictionLoss<floatX>{loss, unet_output(m), m->target});

    std::vector<float> sums((size_t)B * loss_chunks(loss.pixels));
    backend_download(sums.data(), m->losses, sums.size() * sizeof(float));
    double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
    return sum / loss.elements() * B;
}

// Computes the mean loss over the validation images, which only rank 0 has completely. Returns false if the run was
// stopped meanwhile. Each rank has some of the batches; their losses are added up in the order in which a single rank
// adds them.
static bool validation_loss(Trainer* t, double* loss) {
    Model* m = &t->model;
    int count = t->validation.count, batch = m->plan.batch;
    std::vector<uint32_t> last_words = make_last_words(m->config);
    std::vector<double> sums(ceil_div(count, batch));
    bool is_complete = share_among_ranks(m, &sums, 1, [&](size_t i, size_t) {
        int first = (int)i * batch;
        sums[i] = validation_batch_loss(t, last_words, first, std::min(batch, count - first));
    });
    *loss = std::accumulate(sums.begin(), sums.end(), 0.0) / count;
    return is_complete;
}

// ---- sampling ---------------------------------------------------------------------------------------------
// The samples of a grid.
struct SampleGrid {
    std::vector<SampleSpec> specs;
    size_t num_classes;     // of which samples are wanted; 0 where the network knows none
    int columns;            // how many samples stand in a row
    std::string rows = "";  // what the log says of the classes of its rows; empty: they are not grouped by class
};

// Plans a grid with a sample for each seed. The classes of --class, or all, follow each other; where each gets equally
// many samples, the grid groups them by class. names: the names of the classes.
static SampleGrid plan_grid(const Config& c, const std::vector<uint32_t>& seeds, const Strings& names) {
    std::vector<uint32_t> classes = wanted_classes(c, names);
    size_t count = seeds.size(), num_classes = classes.size();
    std::vector<SampleSpec> specs;
    for (size_t n = 0; n < count; n++) {
        int label = num_classes ? (int)classes[n * num_classes / count] : 0;
        specs.push_back({seeds[n], label});
    }

    bool is_grouped = num_classes > 1 && count % num_classes == 0;
    int groups = is_grouped ? (int)num_classes : 0;
    int columns = grid_columns((int)count, groups, c.image_size);
    SampleGrid grid = {specs, num_classes, columns};
    if (is_grouped) grid.rows = rows_text(names, classes, (int)count / groups, columns);
    return grid;
}

// How many of the samples hold a NaN or an infinity.
static long count_broken(const std::vector<float>& samples, size_t count) {
    size_t values = samples.size() / count;  // of a sample
    long broken = 0;
    for (size_t n = 0; n < count; n++) broken += !all_finite(samples.data() + n * values, values);
    return broken;
}

// Prints how many of the network's calls are done: on a terminal every half second, else every ten, and at the end.
struct Progress {
    bool shown;
    long all, done = 0;
    double start = seconds_now(), last = start;

    void count() {
        done++;
        if (!shown) return;
        double now = seconds_now();
        bool is_last = done == all;
        bool is_terminal = isatty(1);
        double pause = is_terminal ? 0.5 : 10;
        if (!is_last && now - last < pause) return;

        double left = (now - start) / done * (all - done);
        const char* line_begin = is_terminal ? "\r" : "";
        const char* line_end = is_terminal && !is_last ? "" : "\n";
        print("%snetwork call %ld of %ld, %s to go   %s", line_begin, done, all, human_time(left), line_end);
        fflush(stdout);
        last = now;
    }
};

// Makes the samples of a batch, which are then in batch.x, unless the run was stopped.
static void sample_batch(Model* m, const SampleBatch<floatX>& batch, const std::vector<SamplerStep>& steps,
                         CallGraphs* graphs, Progress* progress) {
    begin_samples(m, batch);
    int begun = 0;
    for (const SamplerStep& step : steps) {
        int slot = begun++ % STEPS_IN_FLIGHT;
        wait_for_step(slot);  // so that the host, which sees Ctrl-C and counts, does not run far ahead of the device
        if (stop_asked) return;
        take_sampler_step(m, batch, step, graphs);
        mark_step_end(slot);
        if (step.timestep >= 0) progress->count();
    }
}

// Draws samples (count, H, W, PIXEL), of which rank 0 gets all. Returns false if the run was stopped.
static bool sample(Model* m, std::vector<float>* samples, const std::vector<SampleSpec>& specs, bool show_progress) {
    const Config& c = m->config;
    size_t elements = PIXEL * pixels_of(c);          // of a sample
    size_t most = m->plan.batch / rows_a_sample(c);  // samples at a time
    std::vector<SamplerStep> steps = make_sampler(c);
    samples->resize(specs.size() * elements);

    auto [begin, end] = share_of(specs.size(), world.rank, most);
    long calls = network_calls(steps) * ceil_div(end - begin, most);
    Progress progress = {show_progress, calls};
    CallGraphs graphs;
    return share_among_ranks(m, samples, most * elements, [&](size_t first, size_t count) {
        int B = (int)(count / elements);
        backend_upload(m->sampler.specs, &specs[first / elements], B * sizeof(SampleSpec));
        SampleBatch<floatX> batch = samples_of(m, B, c.guidance_scale);
        sample_batch(m, batch, steps, &graphs, &progress);
        backend_download(&(*samples)[first], batch.x, count * sizeof(float));
    });
}

// ==== 9  CHECKPOINTS =======================================================================================
static size_t count_parameters(const Config& c) { return network.make_plan(c, 1, false).num_parameters; }

// The parameters that a run has, each with its section's name.
static std::vector<std::pair<const char*, float*>> arrays_of(const Model& m) {
    const OptimiserMemory& fake = m.matching.fake;
    float* parameters[] = {m.master, m.ema[0],  m.ema[1],    m.ema[2],    m.ema[3],   m.adam_m,
                           m.adam_v, m.teacher, fake.master, fake.adam_m, fake.adam_v};  // as ARRAY_SECTIONS names them
    static_assert(std::size(parameters) == std::size(ARRAY_SECTIONS));
    std::vector<std::pair<const char*, float*>> arrays;
    for (size_t i = 0; i < std::size(parameters); i++)
        if (parameters[i]) arrays.push_back({ARRAY_SECTIONS[i], parameters[i]});
    return arrays;
}

// The table of classes, where the model's classes are not the file's. `kept` has the file's row for each row of the
// model's; -1: the row is fresh.
static std::vector<float> kept_rows_of(const Model& m, size_t index, const std::vector<float>& stored,
                                       const std::vector<int>& kept) {
    const Parameter& t = m.plan.tensors[index];
    size_t width = t.count / t.shape[0];
    std::vector<float> values = fresh_values(m.plan, index, m.config.seed);
    for (size_t row = 0; row < kept.size(); row++) {
        if (kept[row] < 0) continue;
        const float* from = &stored[kept[row] * width];
        std::copy_n(from, width, &values[row * width]);
    }
    return values;
}

// Reads one section of parameters to `to`, this rank's shard of them, on the device. kept: as in kept_rows_of; empty
// where the file's classes are the model's.
static void read_parameters(const Model& m, float* to, const WeightsFile& file, const char* section,
                            const std::vector<int>& kept = {}) {
    Reader in(file.path);
    in.seek(file.sections.at(section).offset);
    for (size_t index = 0; index < m.plan.tensors.size(); index++) {
        const Parameter& t = m.plan.tensors[index];
        bool other_rows = !kept.empty() && t.name == network.label_table;
        size_t count = t.count;
        if (other_rows) count = t.count / t.shape[0] * label_rows(file.config);
        auto stored = in.take<std::vector<float>>(count);
        if (!all_finite(stored.data(), count))
            fail("%s holds NaN or infinity in %s, section %s: its training went wrong; "
                 "delete it, and use the one before",
                 file.path, t.name, section);

        if (other_rows) stored = kept_rows_of(m, index, stored, kept);
        upload_tensor(m, to, t, stored);
    }
}

static void write_parameters(Writer* out, const float* from, const Plan& plan) {
    for (const Parameter& t : plan.tensors) {
        std::vector<float> in_memory(t.size);
        backend_download(in_memory.data(), from + t.offset, t.size * sizeof(float));
        if (!all_finite(in_memory.data(), t.size))
            fail("%s became NaN or infinite and %s was not written; "
                 "go on from the one before with --resume and a lower --lr",
                 t.name, out->path);

        std::vector<float> in_file = reordered(in_memory, t, false);
        out->write(in_file.data(), t.count * sizeof(float));
    }
}

// Enters a section, which comes after those before it, in the header's table.
static void enter_section(int32_t* header, const char* name, uint64_t bytes) {
    int32_t* entry = header + FIELD_SECTION_TABLE + header[FIELD_SECTIONS] * SECTION_INTS;
    strncpy((char*)entry, name, SECTION_NAME_BYTES - 1);
    memcpy(entry + SECTION_NAME_BYTES / sizeof *entry, &bytes, sizeof bytes);
    header[FIELD_SECTIONS]++;
}

// The sections after the parameters, each with its name. Those that would be empty are left out of the file.
static std::vector<std::pair<const char*, std::string>> small_sections(const Model& m, const History& history) {
    std::string state, names;
    if (m.adam_m) state.assign((const char*)&history, sizeof history);
    for (const std::string& name : m.class_names) names += name + "\n";
    return {{"state", state},
            {"config", stored_config(m.config)},
            {"class_names", names},
            {"data_checksum", m.data_checksum}};
}

// Writes all that sampling or resuming needs to `path`, whole or not at all. Rank 0 writes what all ranks have.
static void write_checkpoint(const std::string& path, Model& m, long step, float smoothed, const History& history) {
    if (world.rank) {
        for (auto [section, parameters] : arrays_of(m)) gather_parameters(&m, parameters);
        return;
    }

    int32_t header[HEADER_INTS] = {network.magic, WEIGHTS_VERSION};
    header[FIELD_STEP] = (int32_t)step;
    header[FIELD_PARAMETERS] = (int32_t)m.plan.num_parameters;
    header[FIELD_TENSORS] = (int32_t)m.plan.tensors.size();
    header[FIELD_SMOOTHED] = std::bit_cast<int32_t>(smoothed);
    header[FIELD_LR_STEPS] = m.config.hyper.lr_steps;

    Writer out(path);
    out.rewind_to_header(header, sizeof header);  // keeps its place, until all sections are known
    for (auto [section, parameters] : arrays_of(m)) {
        enter_section(header, section, m.plan.num_parameters * sizeof(float));
        write_parameters(&out, gather_parameters(&m, parameters), m.plan);
    }
    for (const auto& [section, contents] : small_sections(m, history)) {
        if (contents.empty()) continue;
        enter_section(header, section, contents.size());
        out.write(contents);
    }
    header[FIELD_CHECKSUM] = (int32_t)crc32(header, sizeof header, out.crc);
    out.rewind_to_header(header, sizeof header);
    out.commit();
}

// ==== 10  A RUN AND MAIN ===================================================================================
// ---- what a run prints ------------------------------------------------------------------------------------
// Prints the flags with their values, in three columns.
static void print_flags(const Config& c) {
    int column = 0;
    for (const Flag& flag : FLAGS) {
        if (flag.group == OTHER) continue;
        std::string value = flag_text(c, flag);
        if (value.empty()) continue;

        column = (column + 1) % 3;
        print("%-22s %-14s%s", flag.name, printable(value), column ? "  " : "\n");
    }
    if (column) printf("\n");
    printf("\n");
}

// Prints the network's block number i as a line of the table below.
static void print_block(const Plan& plan, int i) {
    Block b = plan.blocks[i];

    std::string reads = text("%d %d %d", b.H, b.H, b.C);
    if (b.C2) reads += text(" + %d", b.C2);
    std::string writes = text("%d %d %d", b.out_H, b.out_H, b.O);
    std::string skip;
    if (b.skip >= 0) skip = text("%d", b.skip);

    size_t parameters = 0;
    for (int k = 0; k < b.num_params; k++) parameters += plan.tensors[b.param + k].count;

    size_t kept = 0;  // bytes that are still read after the block's forward pass
    for (const Buffer* buffer : buffers_of(&b))
        if (buffer->first <= i && buffer->last > i) kept += buffer->bytes;

    print("%-4d %-20s %-10s %-24s %-16s %5s %11zu %10s\n", i, b.name, network.block_kinds[b.kind],
          reads, writes, skip, parameters, human_bytes(kept));
}

static void print_blocks(const Plan& plan) {
    printf("%-4s %-20s %-10s %-24s %-16s %5s %11s %10s\n", "", "block", "kind", "reads (H, W, C)", "writes",
           "skip", "parameters", "kept");
    for (int i = 0; i < (int)plan.blocks.size(); i++) print_block(plan, i);
}

// How often training has an array of the weights' size, and what they hold: " (6 times: gradients, AdamW, EMA)".
static std::string copies_text(const Model& m) {
    const Config& c = m.config;
    int arrays = 3 + gradient_buffers(&m);  // 3: the weights themselves and AdamW's two moments
    std::string names = "gradients, AdamW";
    if (m.muon.count) {
        arrays += 4 * sizeof(floatX) / sizeof(float);
        names += ", Muon";
    }
    if (ema_count(c)) {
        arrays += ema_count(c);
        names += ", EMA";
    }
    if (c.path_steps) {
        arrays++;
        names += ", teacher";
    }
    if (c.matching_fraction > 0) {
        arrays += 3;
        names += ", fake with AdamW";
    }
    return text(" (%d times: %s)", arrays, names);
}

// Prints what each of several ranks computes and sends in a step.
static void print_shards(const Model& m) {
    int images = std::min((int)images_of_rank(&m), m.config.batch_size);
    double sent = (1 - 1.0 / world.size) * (double)m.plan.num_floats;  // floats that a rank sends in a step

    printf("each of %d ranks has this memory and up to %d images of a step, ", world.size, images);
    print("for which it sends %s of gradients ", human_bytes(sent * sizeof(float)));
    print("and %s of weights", human_bytes(sent * sizeof(floatX)));
    if (m.muon.count) printf(", and as much of Muon's momentum");
    printf("; --microbatch %d makes the same on any number of ranks\n\n", microbatch_size(m.config));
}

static void print_memory(const Model& m) {
    const Plan& plan = m.plan;
    std::string copies;
    if (plan.training && !is_sharded(&m)) copies = copies_text(m);
    const char* gradients = plan.training ? ", their gradients" : "";

    printf("%zu parameters in %zu tensors; memory: ", plan.num_parameters, plan.tensors.size());
    print("%s weights%s, ", human_bytes(4.0 * (double)plan.num_parameters), copies);
    print("%s activations%s and scratch; ", human_bytes(plan.arena_bytes), gradients);
    print("%s in all\n\n", human_bytes(memory_of(m)));
    if (is_sharded(&m)) print_shards(m);
}

static void print_run(const Model& m) {
    print_flags(m.config);
    print_blocks(m.plan);
    print_memory(m);
}

// Says which sizes of --attention_resolutions no level has, if they were typed or come from a file. Nothing is said
// of the defaults, which a config.txt may list, and of a preset's sizes: those are meant for any --image_size.
static void note_attention(const Config& c, const GivenFlags& given) {
    const GivenFlag* g = was_given(given, "attention_resolutions");
    if (!g || g->origin.starts_with("--")) return;
    bool from_file = !g->origin.empty();
    if (from_file && g->value == g->flag->standard) return;

    std::set<int> sizes;  // the levels'
    for (int level = 0; level < list_length(c.channel_mult); level++) sizes.insert(c.image_size >> level);
    for (int size : c.attention_resolutions)
        if (size && !sizes.contains(size))
            printf("note: no level has the size %d of --attention_resolutions; they halve from %d to %d\n",
                   size, *sizes.rbegin(), *sizes.begin());
}

// ---- how long a step takes --------------------------------------------------------------------------------
// Prepares a run of this configuration on grey images, with fresh weights, which is about to do step `first`.
static void prepare_trial_run(Trainer* t, const Config& config, long first = 0) {
    int B = config.batch_size;
    t->images.count = B;
    t->images.bytes.assign(B * config.in_channels * pixels_of(config), 127);
    if (config.class_cond)
        for (int i = 0; i < B; i++) t->images.labels.push_back(i % config.num_classes);

    t->model = plan_model(config, microbatch_size(config), true);
    check_memory(t->model);
    allocate_model(&t->model);
    initialise_weights(&t->model, config.seed);
    t->step = first;
    prepare_steps(t);
}

// Milliseconds of a training step of `batch` images: a mean over 20 steps from `first` on, or over as many as
// `seconds` allow.
static double time_step(Config config, int batch, double seconds, long first = 0) {
    Trainer t;
    config.batch_size = batch;
    config.hyper.lr = 0;  // so that no weight becomes infinite
    prepare_trial_run(&t, config, first);

    auto take_step = [&] {
        while (t.begun < t.step + STEPS_IN_FLIGHT) begin_next_step(&t);
        if (!await_step(&t).finite) fail("a step on grey images became NaN or infinite: its time can't be told");
    };
    for (int i = 0; i < STEPS_IN_FLIGHT; i++) take_step();  // to warm up; on a GPU the second step is captured

    double start = seconds_now();
    int steps = 0;
    while (steps < STEPS_IN_FLIGHT || (steps < 20 && seconds_now() - start < seconds)) {
        take_step();
        steps++;
    }
    double taken = seconds_now() - start;
    backend_wait();  // for what is still under way
    return 1e3 * taken / steps;
}

// How many images are timed, of the `own` that a step has on this device: on a GPU all, on a CPU, to be quick, as
// many as take a second.
static int images_to_time(const Config& config, int own) {
    if (ON_GPU) return own;
    int in_a_second = (int)(1000 / time_step(config, 1, 0));
    return std::clamp(in_a_second, 1, own);
}

static std::string milliseconds(double ms) { return text("%.*f ms", ms < 100 ? 2 : 0, ms); }

// Prints how long a training step takes, and all that are left. Afterwards `world` has one rank: the program ends.
static void print_time(const Config& config, long steps_done) {
    int ranks = world.size;
    world = World();  // timed alone, on a CPU with all threads
    int batch_size = config.batch_size;
    int own = ON_GPU ? batch_size / ranks : batch_size;  // the images of a step that run on this device
    int timed = images_to_time(config, own);
    auto ms_from = [&](long first) { return time_step(config, timed, 2, first) * own / timed; };

    double ms = ms_from(0);
    std::string how = "measured, on grey images";
    if (timed != batch_size) how = text("an estimate from %d of its %d images", timed, batch_size);
    print("one training step: %s, %.1f images/s (%s)\n", milliseconds(ms), 1e3 * batch_size / ms, how);

    long left = std::max(0L, config.steps - steps_done);
    double all_ms = left * ms;
    if (config.matching_fraction > 0) {
        long first_matching = (long)steps_on_paths(config);
        long matching = std::clamp(config.steps - first_matching, 0L, left);
        double matching_ms = ms_from(first_matching);
        print("one that matches distributions: %s\n", milliseconds(matching_ms));
        all_ms = (left - matching) * ms + matching * matching_ms;
    }
    print("%s: %s, besides validation, samples and checkpoints\n", counted(left, "step"), human_time(all_ms / 1e3));
}

// ---- ranks: start and end ---------------------------------------------------------------------------------
// The variables of the environment by which a cluster's launcher tells a process its place among the ranks: see World.
struct Launcher {
    const char *rank, *size, *local;
};

static const Launcher LAUNCHERS[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK"},                                            // torchrun
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},  // mpirun
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},                                     // other mpiruns
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"}};                      // srun

// The number in a variable of the environment; -1 where there is none.
static int environment_number(const char* name) {
    std::string value = environment(name);
    int number, end = 0;
    if (sscanf(value.c_str(), "%d%n", &number, &end) != 1) return -1;
    return value[end] ? -1 : number;
}

// If a launcher has started several processes, this one becomes the rank that the launcher says.
static void read_launcher() {
    for (const auto& [rank, size, local] : LAUNCHERS) {
        if (world.size > 1) return;
        if (!getenv(rank) || !getenv(size)) continue;

        world.rank = environment_number(rank);
        world.size = environment_number(size);
        world.local = getenv(local) ? environment_number(local) : world.rank;
        if (std::min(world.rank, world.local) < 0 || std::max(world.rank, world.local) >= world.size)
            fail("the launcher's %s=%s and %s=%s can't be", rank, getenv(rank), size, getenv(size));
    }
}

// When a rank dies, all end, so that nobody is left waiting in the middle of a message. Rank 0 has a thread for
// each rank that it has forked, which waits for this rank and ends rank 0 when it fails. The kernel then ends the
// other ranks: see end_after_rank_0. Ranks that a launcher has started are ended by the launcher. With NCCL each
// rank also ends itself when NCCL says that another is gone: see watch_nccl.
#define OTHERS_END ", and the others end with it; the last checkpoint stands"

// Whether this thread is the first on its machine, among all ranks', to find what ends them. Only the first reports.
static bool first_to_report() {
    int nobody = 0;
    return forked_ranks->reporter.compare_exchange_strong(nobody, world.rank + 1);
}

// Ends this process with a sentence. Where another rank has one to report already, this one waits to be ended.
[[noreturn]] static void end_ranks(int status, const std::string& sentence) {
    while (!first_to_report()) pause();
    fprintf(stderr, "error: %s\n", sentence.c_str());
    _exit(status);
}

// Ends this process from a handler of signals, which may not call printf.
[[noreturn]] static void end_at_signal(const char* sentence) {
    [[maybe_unused]] ssize_t written = write(STDERR_FILENO, sentence, strlen(sentence));  // if not, nobody can be told
    _exit(EXIT_FAILURE);
}

// Waits for a rank that rank 0 has forked, in a thread of rank 0.
static void await_rank(int rank, pid_t process) {
    int status = 0;
    waitpid(process, &status, 0);
    if (!status) return;

    bool has_reported = forked_ranks->reporter == rank + 1;
    if (has_reported) _exit(std::max(1, WEXITSTATUS(status)));
    end_ranks(EXIT_FAILURE, text("rank %d failed or was killed" OTHERS_END, rank));
}

static std::vector<std::thread> rank_watchers;

// Handles the signal that the kernel sends a forked rank when rank 0 has ended.
static void end_after_rank_0(int) {
    if (first_to_report()) end_at_signal("error: rank 0 failed or was killed" OTHERS_END "\n");
    bool reports = forked_ranks->reporter == world.rank + 1;  // the main thread does, and is about to exit
    if (!reports) _exit(EXIT_FAILURE);
}

// Makes this process, which rank 0 has just forked, another rank.
static void become_rank(int rank, pid_t rank_0) {
    world.rank = rank;
    world.local = rank;
    signal(SIGUSR1, end_after_rank_0);
    prctl(PR_SET_PDEATHSIG, SIGUSR1);
    if (getppid() != rank_0) raise(SIGUSR1);  // it had ended before the kernel was asked
}

// Makes this process rank 0, and forks the others. It comes before CUDA is used, which a forked process can't share.
static void fork_ranks() {
    backend_prepare_fork();
    fflush(nullptr);  // or else each process prints what is still buffered
    pid_t rank_0 = getpid();
    std::vector<pid_t> forked;
    for (int rank = 1; rank < world.size; rank++) {
        pid_t process = fork();
        if (process < 0) fail("could not start rank %d: too many processes", rank);
        if (process == 0) return become_rank(rank, rank_0);
        forked.push_back(process);
    }
    for (int rank = 1; rank < world.size; rank++)
        rank_watchers.emplace_back(await_rank, rank, forked[rank - 1]);
}

// Starts the ranks that --gpus or --processes asks for; or becomes one of those that a launcher has started.
static void start_ranks(const Config& c) {
    if (ON_GPU && c.processes > 1) fail_usage("this program was built for the GPU: use --gpus");
    if (!ON_GPU && c.gpus > 1) fail_usage("this program was built for the CPU: use --processes");

    int asked = ON_GPU ? c.gpus : c.processes;
    read_launcher();
    bool is_launched = world.size > 1;
    if (is_launched && (!ON_GPU || asked > 1))
        fail_usage("a launcher has started %d ranks: leave --gpus out, or on a CPU start the program once, with "
                   "--processes %d",
                   world.size, world.size);

    world.forked = asked > 1;
    if (world.forked) world.size = asked;
    if (world.size == 1 || c.dry_run) return;

    if (world.forked) fork_ranks();
    if (world.rank && !freopen("/dev/null", "w", stdout)) fail("can't open /dev/null: %s", strerror(errno));
}

// Connects the ranks, and returns what the log says of them.
static std::string connect_ranks(const Config& c) {
    if (world.size == 1 || c.dry_run) return "";
    std::string through = backend_connect();
    world.connected = true;
    return text(", %d ranks through %s", world.size, through);
}

// An orderly end of the ranks. Rank 0 waits until the ranks that it has forked have ended.
static void leave_ranks() {
    if (!world.connected) return;
    backend_disconnect();
    for (std::thread& watcher : rank_watchers) watcher.join();
}

// ---- from flags to pictures -------------------------------------------------------------------------------
// The seeds of the pictures that --num_samples and --seed, or --seeds, ask for.
static std::vector<uint32_t> wanted_seeds(const Config& c, const GivenFlags& given) {
    if (!*c.seeds) {
        double end = (double)c.seed + c.num_samples;
        if (end > UINT32_MAX + 1.0)
            fail("--seed %u leaves no seeds for %s: the last is %u", c.seed,
                 counted(c.num_samples, "picture"), UINT32_MAX);
        return consecutive(c.seed, c.num_samples);
    }

    std::vector<uint32_t> seeds = parse_list("seeds", c.seeds, UINT32_MAX);
    if (was_typed(given, "num_samples") && c.num_samples != (int)seeds.size())
        fail("--num_samples %d contradicts --seeds, which asks for %s; leave --num_samples out", c.num_samples,
             counted((long)seeds.size(), "picture"));
    return seeds;
}

// "DDIM with eta 0.5 in 50 steps": how pictures are drawn.
static std::string sampler_text(const Config& c) {
    static const char* const NAMES[] = {"DDIM", "DDPM", "DPM-Solver++(2M)", "Heun", "consistency"};  // of Sampler
    std::string line = NAMES[c.sampler];
    if (c.eta > 0) line += text(" with eta %g", c.eta);
    line += " in " + counted(sampler_steps(c), "step");
    long calls = network_calls(make_sampler(c));
    if (calls != sampler_steps(c)) line += text(" (%ld network calls)", calls);
    if (c.threshold == THRESHOLD_NONE) line += ", no threshold";
    return line;
}

// Opens the weights that --generate draws with: --model_weights, or the newest of the run in --out_dir.
static WeightsFile weights_to_draw_with(const Config& c, const GivenFlags& given) {
    // A file for --config that names both is a run's: the run began with --model_weights, and its folder may hold
    // newer ones.
    bool names_both = *c.model_weights && was_given(given, "out_dir");
    bool is_of_run = names_both && !was_typed(given, "model_weights");
    bool has_newer = is_of_run && !list_checkpoints(c.out_dir).empty();
    if (*c.model_weights && !has_newer) return open_weights(c.model_weights);
    return newest_checkpoint(c.out_dir,
                             "name weights with --model_weights FILE, or a run's folder with --out_dir FOLDER");
}

// Refuses a --threshold and notes a --sampler that do not fit the weights of this file.
static void check_sampling(const Config& c, const GivenFlags& given, const WeightsFile& file) {
    if (c.threshold == THRESHOLD_DYNAMIC && !was_given(given, "threshold"))
        fail("%s is drawn with --threshold dynamic, which is generate.py's; name another, such as --threshold clamp",
             file.path);
    if (c.threshold == THRESHOLD_DYNAMIC) refuse_elsewhere("threshold dynamic");
    if (c.sampler == SAMPLER_CONSISTENCY && !c.consistency)
        note(file.path + " was not tuned for --sampler consistency (see --preset consistency)");
}

// What --generate draws with.
struct Drawing {
    Config config;
    WeightsFile file;
    const char* section;  // of the file: the raw weights or one of their averages
    std::string taken;    // the flags that were taken from the file's run, such as --sampler and --sample_steps
};

static Drawing plan_drawing(const GivenFlags& given) {
    Config config = given_config(given);
    const GivenFlag* seed = was_typed(given, "seed");  // one from a file was for training
    if (*config.seeds && seed)
        fail("--seed %s contradicts --seeds, which names every picture; leave one out", seed->value);

    WeightsFile file = weights_to_draw_with(config, given);
    take_from_file(&config, given, file, TO_SAMPLE);
    std::string taken = take_sampling(&config, given, file.config);
    memcpy(config.hyper.ema_rate, file.config.hyper.ema_rate, sizeof config.hyper.ema_rate);
    check_config(config);
    check_sampling(config, given, file);

    if (config.use_ema == 1 && !file.sections.contains("ema")) config.use_ema = 0;
    const char* section = ARRAY_SECTIONS[config.use_ema];
    if (!file.sections.contains(section))
        fail("%s has no section %s for --use_ema %d; choose another, or 0 for the raw weights", file.path, section,
             config.use_ema);

    if (!has_ending(config.output_name, ".png") && !has_ending(config.output_name, ".npy"))
        fail("--output_name %s: pictures are written as PNG or .npy, which docs/formats.md turns into .npz; end the "
             "name in .png or .npy",
             config.output_name);
    return {config, file, section, taken};
}

// Plans the grid of the pictures with these seeds.
static SampleGrid plan_pictures(const Drawing& drawing, const std::vector<uint32_t>& seeds) {
    const Config& c = drawing.config;
    bool has_twins = std::set(seeds.begin(), seeds.end()).size() < seeds.size();
    if (*c.output_dir && has_twins)
        fail_usage("--seeds names a seed twice, and --output_dir writes each picture as SEED.png: draw them in parts");

    SampleGrid grid = plan_grid(c, seeds, shown_names(c, drawing.file.class_names, c.num_classes));
    if (*c.classes && grid.num_classes > seeds.size())
        fail_usage("--class %s names %zu classes, and of %s some would be left out; use --num_samples %zu or more",
                   c.classes, grid.num_classes, counted((long)seeds.size(), "picture"), grid.num_classes);
    return grid;
}

// Says which of the typed flags are for training alone.
static void note_training_flags(const GivenFlags& given) {
    for (const GivenFlag& g : given) {
        bool is_typed = g.origin.empty();
        bool is_used = contains({"batch_size", "seed"}, g.flag->name);
        if (is_typed && !is_used && g.flag->group == TRAINING)
            say("note: --%s does nothing with --generate", g.flag->name);
    }
}

// Writes each picture to a file of its own in --output_dir.
static void write_each_picture(const Config& c, const SampleGrid& grid, const std::vector<float>& samples) {
    size_t count = grid.specs.size();
    size_t elements = samples.size() / count;
    for (size_t n = 0; n < count; n++) {
        std::string path = text("%s/%06u.png", c.output_dir, grid.specs[n].seed);
        write_png(path, draw_grid(std::span(samples).subspan(n * elements, elements), 1, c, 0));
    }
    say("%s: each picture on its own", c.output_dir);
}

// Writes the pictures, which took so many seconds: as a grid or an array, and to --output_dir each on its own.
static void write_samples(const Config& c, const SampleGrid& grid, const std::vector<float>& samples,
                          double seconds) {
    size_t count = grid.specs.size();
    bool as_array = has_ending(c.output_name, ".npy");
    Raster picture;
    if (as_array) {
        write_array(c.output_name, samples, c);
    } else {
        picture = draw_grid(samples, grid.columns, c);
        write_png(c.output_name, picture);
    }
    say("%s: %s in %s, %.3fs each%s", c.output_name, counted((long)count, "picture"),
        human_time(seconds), seconds / (double)count, as_array ? "" : grid.rows);

    if (c.show && !as_array) show_grid(c.output_name, picture);
    if (*c.output_dir) write_each_picture(c, grid, samples);
}

static void draw_pictures(Model* m, const Drawing& drawing, const SampleGrid& grid) {
    const Config& c = m->config;
    const WeightsFile& file = drawing.file;
    long count = (long)grid.specs.size();
    std::string seeds = c.seeds;
    if (seeds.empty()) seeds = text("%u to %u", grid.specs[0].seed, grid.specs.back().seed);
    say("%s with %s (%s, step %ld), %s, seeds %s", counted(count, "picture"), file.path,
        chosen_name(c), file.step, sampler_text(c), seeds);
    fflush(stdout);

    std::vector<float> samples;
    double start = seconds_now();
    bool done = sample(m, &samples, grid.specs, true);
    if (world.rank) return;
    if (!done) {
        fprintf(stderr, "stopped before the pictures were done; nothing was written\n");
        leave_ranks();
        exit(130);
    }

    write_samples(c, grid, samples, seconds_now() - start);
    if (long broken = count_broken(samples, count))
        fail("%s became NaN and black: the weights of %s have grown too large; use those of an earlier step",
             counted(broken, "picture"), file.path);
}

static void run_generate(const GivenFlags& given) {
    Drawing drawing = plan_drawing(given);
    Config& config = drawing.config;
    std::vector<uint32_t> seeds = wanted_seeds(config, given);
    SampleGrid grid = plan_pictures(drawing, seeds);
    note_training_flags(given);

    int count = (int)seeds.size();
    int rows = rows_a_sample(config);
    int at_a_time = std::min({config.batch_size, count, most_images(config) / rows});
    config.batch_size = rows * at_a_time;
    Model m = plan_model(config, config.batch_size, false);
    check_memory(m);
    check_samples(m, count, "draw them in parts, with --seeds");
    if (!drawing.taken.empty()) say("drawing as in training:%s", drawing.taken);
    if (config.dry_run) return print_run(m);

    // what could not be written is refused before the pictures are drawn
    if (!world.rank) Writer trial(config.output_name);
    if (*config.output_dir) make_folder(config.output_dir);

    allocate_model(&m);
    read_parameters(m, m.master, drawing.file, drawing.section);
    draw_pictures(&m, drawing, grid);
}

// ---- from flags to a run ----------------------------------------------------------------------------------
// Refuses a --resume that names a file, and an --out_dir that names another folder.
static void check_resumed_folder(const Config& c, const GivenFlags& given) {
    if (file_exists(c.out_dir) && !is_folder(c.out_dir)) {
        std::string parent = fs::path(c.out_dir).parent_path().string();
        if (parent.empty()) parent = ".";
        fail("%s is a file, and --resume takes a run's folder: --resume %s", c.out_dir, shell_word(parent));
    }

    const GivenFlag* out_dir = was_typed(given, "out_dir");
    if (!out_dir || out_dir->value == c.out_dir) return;
    if (!fs::equivalent(out_dir->value, c.out_dir, ignored))
        fail("--out_dir %s contradicts --resume %s: a run stays in its folder; leave --out_dir out",
             out_dir->value, c.resume);
}

// Takes the newest checkpoint of the run that --resume names, and its configuration, changed by the flags that were
// typed.
static void resume_run(Trainer* t, Config* config, GivenFlags given) {
    check_resumed_folder(*config, given);
    t->checkpoints = list_checkpoints(config->out_dir);
    t->start = newest_checkpoint(config->out_dir,
                                 "start without --resume, or name the run's folder with --resume FOLDER");
    const WeightsFile& file = t->start;
    take_from_file(config, given, file, TO_RESUME);

    // Flags that come from a preset were for the run's start, and must not overwrite what was typed then.
    std::erase_if(given, [](const GivenFlag& g) { return g.origin.starts_with("--"); });
    *config = file.config;
    apply_flags(config, given);

    t->step = file.step;
    t->saved = file.step;
    t->smoothed = file.smoothed;
    t->history = file.history;
}

// Divides a batch among the ranks. Each gets equally many micro-batches, so that reduce_gradient completes their tree.
static void share_batch(Config* c) {
    int ranks = world.size;
    int batch = c->batch_size;
    if (!std::has_single_bit((unsigned)ranks))
        fail("a batch can't be shared by %d ranks; use 2, 4, 8 or 16", ranks);
    if (ranks > 1 && !c->microbatch) c->microbatch = std::max(1, batch / ranks);

    int microbatch = microbatch_size(*c);
    int count = ceil_div(batch, microbatch);
    if (count % ranks)
        fail("%d images in parts of %d make %s, which %d ranks can't share evenly; use a --batch_size that is a "
             "multiple of %d",
             batch, microbatch, counted(count, "part"), ranks, microbatch * ranks);
}

// A name for every row of a model's table of classes. A class without a name has its number, and the last row, which
// stands for no class, has NO_CLASS. Such names begin with a line feed, so that they differ from every real name.
static const char NO_CLASS[] = "\nnone";
static Strings row_names(const Config& c, Strings names) {
    if (!c.class_cond) return {};
    for (int row = (int)names.size(); row < c.num_classes; row++) names.push_back(text("\n%d", row));
    if (c.cond_drop_prob > 0) names.push_back(NO_CLASS);
    return names;
}

static bool is_real_name(const std::string& row) { return row[0] != '\n'; }

// What becomes of a file's table of classes in a model with these rows: "cat and dog are kept, bird is new, and the
// row for no class is dropped".
static std::string change_of_rows(const Strings& rows, const Strings& file_rows) {
    Strings kept, fresh, dropped;
    for (const std::string& name : rows) {
        if (!is_real_name(name)) continue;
        if (contains(file_rows, name)) kept.push_back(name);
        else fresh.push_back(name);
    }
    for (const std::string& name : file_rows)
        if (is_real_name(name) && !contains(rows, name)) dropped.push_back(name);

    auto are = [](const Strings& names, const char* what) {
        return listed(names) + (names.size() > 1 ? " are " : " is ") + what;
    };
    std::string change = kept.empty() ? "none is known" : are(kept, "kept");
    if (!fresh.empty()) change += ", " + are(fresh, "new");
    if (!dropped.empty()) change += ", " + are(dropped, "dropped");

    bool has_none = contains(rows, NO_CLASS);
    bool had_none = contains(file_rows, NO_CLASS);
    if (has_none && !had_none) change += ", and the row for no class is new";
    if (had_none && !has_none) change += ", and the row for no class is dropped";
    return change;
}

// Decides which rows of the file's table of classes a new run keeps, those of the same name, and notes it for the log.
static void plan_rows(Trainer* t, const Config& c, const Strings& rows, const Strings& file_rows) {
    if (rows == file_rows) return;
    for (const std::string& name : rows) t->kept_rows.push_back(index_of(file_rows, name));

    std::string line = t->start.path + " is trained on for the classes of " + c.data_file + ": ";
    line += change_of_rows(rows, file_rows);
    t->notes.push_back(line);
    bool has_fresh_rows = std::ranges::count(t->kept_rows, -1);
    if (c.path_steps && has_fresh_rows)
        fail("%s; --consistency learns from what the model draws: train it for these classes first", line);
}

// The names of the classes of the model that a run starts from; empty: there is none, or it does not tell them.
static Strings class_names_of_start(Trainer* t, const Config& c, const GivenFlags& given, int num_classes) {
    const WeightsFile& file = t->start;
    if (num_classes && file.class_names.empty()) {
        Strings names = shown_names(c, {}, num_classes);  // those of --class_names, if it is given
        check_class_names(names, c.class_names);
        return names;
    }
    if (was_typed(given, "class_names")) {
        std::string named_by = file.class_names.empty() ? c.data_file : file.path;
        t->notes.push_back(text("--class_names %s is not needed: the classes are called as %s calls them",
                                c.class_names, named_by));
    }
    return file.class_names;
}

// The names of a run's classes, by which all files are matched: those of the weights that it continues, or those of
// its images. It also sets the configuration's number of classes.
static Strings plan_classes(Trainer* t, Config* c, const GivenFlags& given) {
    const std::string& path = t->start.path;
    const Config& start = t->start.config;
    int known = start.class_cond ? start.num_classes : 0;  // classes of the model that the run starts from

    Strings names;  // those of the images
    bool is_number_known = c->num_classes || known;
    if (!is_number_known || file_exists(c->data_file)) names = read_class_names(c->data_file);

    Strings start_names = class_names_of_start(t, *c, given, known);
    bool is_assumed = known && start_names.empty();  // that the model has the images' classes, in their order
    if (is_assumed && !names.empty()) {
        t->notes.push_back(text("%s does not name its classes, which are taken for those of %s in their order, "
                                "%s; --class_names FILE tells others",
                                path, c->data_file, listed(names)));
        start_names = names;
    }
    if (c->resume_given) return start_names;

    if (!c->num_classes || !was_given(given, "num_classes")) {
        bool same = known && (names.empty() || names == start_names);
        c->num_classes = same ? known : (int)names.size();
    }
    if (is_assumed && c->num_classes != known)
        fail("--num_classes %d contradicts %s, which was made with %d classes and does not name them; leave "
             "the flag out, or name them with --class_names FILE",
             c->num_classes, path, known);

    long seen = std::max((long)names.size(), (long)known);
    if (c->num_classes > seen)
        t->notes.push_back(text("--num_classes %d: only %ld have images, and the others are never learned",
                                c->num_classes, seen));

    if (!path.empty()) plan_rows(t, *c, row_names(*c, names), row_names(start, start_names));
    return names;
}

// The flags that --resume came with, each as "--lr 0.001 (was 0.0001)".
static Strings changed_flags(const Config& before, const Config& now) {
    Strings changes;
    for (const Flag& flag : FLAGS) {
        if (flag.on_resume == FORGOTTEN) continue;
        std::string old_value = flag_text(before, flag);
        std::string value = flag_text(now, flag);
        if (value != old_value) changes.push_back(text("--%s %s (was %s)", flag.name, value, old_value));
    }
    return changes;
}

// Makes a run's configuration and plan from its flags and from the file that it starts from, if there is one.
static void plan_run(Trainer* t, const GivenFlags& given) {
    Config config = given_config(given);
    if (config.resume_given) {
        resume_run(t, &config, given);
    } else if (*config.model_weights) {
        t->start = open_weights(config.model_weights);
        take_from_file(&config, given, t->start, TO_START);
        take_timestep_sampling(&config, given, t->start.config);
    } else if (config.consistency) {
        fail("--consistency tunes a trained model; name its checkpoint with --model_weights");
    }

    Strings class_names;
    if (config.class_cond) class_names = plan_classes(t, &config, given);
    check_config(config);
    config.hyper.ema_warmup = !config.consistency;
    if (config.threshold == THRESHOLD_DYNAMIC) refuse_elsewhere("threshold dynamic");
    share_batch(&config);
    if (config.num_samples && microbatch_size(config) < rows_a_sample(config))
        fail("--guidance_scale %g calls the network for two rows a picture; use a --batch_size and --microbatch of 2 "
             "or more, or --num_samples 0",
             config.guidance_scale);

    if (config.resume_given) t->changes = changed_flags(t->start.config, config);
    t->model = plan_model(config, microbatch_size(config), true);
    t->model.class_names = class_names;
    for (const std::string& line : idle_flags(config, given)) t->notes.push_back(line);
}

// Locks the run's folder. Its checkpoints must be those that the run was configured with: none, if it is new.
static void lock_folder(Trainer* t) {
    const char* folder = t->model.config.out_dir;
    make_folder(folder);
    int lock = open(folder, O_RDONLY | O_CLOEXEC);  // and never closed: it is held to the program's end
    if (lock < 0 || flock(lock, LOCK_EX | LOCK_NB)) {
        if (errno == EWOULDBLOCK)
            fail("another process is training in %s; name another folder with --out_dir", folder);
        note(text("%s can't be locked (%s): see that no other run is started", folder, strerror(errno)));
    }

    std::vector<long> there = list_checkpoints(folder);
    if (there != t->checkpoints)
        fail("%s already holds a run, at step %ld; continue it with --resume, or name another --out_dir",
             folder, there.empty() ? 0 : there[0]);
}

// Loads what a run starts from: fresh weights, a file's weights, or a checkpoint with the state of its optimiser.
static void load_start(Trainer* t) {
    Model* m = &t->model;
    const WeightsFile& file = t->start;
    if (file.path.empty()) return initialise_weights(m, m->config.seed);

    if (!m->config.resume_given) {
        // consistency tuning starts from the average, which draws better
        bool use_average = m->config.consistency && file.sections.contains("ema");
        read_parameters(*m, m->master, file, use_average ? "ema" : "weights", t->kept_rows);
        return start_from_master(m);
    }

    for (auto [section, parameters] : arrays_of(*m)) {
        if (!file.sections.contains(section))
            fail("%s has no section %s: it is no checkpoint; start from it with --model_weights",
                 file.path, section);
        read_parameters(*m, parameters, file, section);
    }
    use_weights(m, m->master);
}

// Says where a run goes on with other images than it had.
static void note_other_images(Trainer* t) {
    const Config& c = t->model.config;
    const std::string& before = t->start.data_checksum;
    const std::string& now = t->images.checksum;
    if (!c.resume_given || before.empty() || now.empty() || before == now) return;
    t->notes.push_back(text("%s is not the file that the run had images from until step %ld (its checksum is %s, "
                            "and was %s); from here on it learns from this one",
                            c.data_file, t->step, now, before));
}

// Matches the classes of an image file with the model's, and says what was assumed of them.
static void check_classes(Trainer* t, Dataset* data, const char* path) {
    const Config& c = t->model.config;
    const Strings& names = t->model.class_names;
    bool trains = data == &t->images;
    if (!c.class_cond) {
        if (trains && !c.path_steps && data->class_names.size() > 1)
            t->notes.push_back(text("%s has images of %zu classes, which are not told apart without --class_cond 1",
                                    path, data->class_names.size()));
        return;
    }

    if (data->labels.empty() || (int)names.size() > c.num_classes)
        fail("%s has %zu classes and the model %d; see prepare_data.py --labels", path, data->class_names.size(),
             c.num_classes);
    std::string line = match_classes(data, path, names, trains);
    if (!line.empty()) t->notes.push_back(line);
}

static void read_datasets(Trainer* t) {
    const Config& c = t->model.config;
    t->images = read_images(c.data_file, c);
    t->model.data_checksum = t->images.checksum;
    note_other_images(t);
    check_classes(t, &t->images, c.data_file);

    if (*c.val_file) {
        t->validation = read_images(c.val_file, c);
        check_classes(t, &t->validation, c.val_file);
        if (t->validation.checksum == t->images.checksum)
            t->notes.push_back(text("%s holds the images that the run learns from: its loss tells nothing of others",
                                    c.val_file));
    }
    wanted_classes(c, t->model.class_names);  // which refuses a --class that the model does not have
}

// The text of config.txt: the configuration, and in comments what was changed on resuming, now and before.
static std::string config_with_changes(const Trainer& t, const std::string& before) {
    std::string config = config_text(t.model.config);
    for (const std::string& line : split(before, '\n')) {
        long step;
        bool is_change = sscanf(line.c_str(), "# from step %ld on:", &step) == 1;
        if (is_change && step <= t.step) config += line + "\n";
    }
    for (const std::string& change : t.changes)
        config += text("# from step %ld on: %s\n", t.step, change);
    return config;
}

// Writes config.txt and opens metrics.jsonl. Both of the old files are read before either is replaced.
static void begin_files(Trainer* t) {
    const char* folder = t->model.config.out_dir;
    std::string config = text("%s/config.txt", folder);
    std::string metrics = text("%s/metrics.jsonl", folder);
    std::string old_config = read_text(config);
    std::string old_metrics = read_text(metrics);
    write_text(config, config_with_changes(*t, old_config));
    t->metrics.open(metrics, old_metrics, t->step, &t->validated);
}

// Refuses ranks that would go on from different steps, as on machines that do not share the run's folder.
static void check_ranks_agree(Trainer* t) {
    auto [lowest, highest] = std::ranges::minmax(gather_numbers(&t->model, (int)t->step));
    if (lowest != highest)
        fail("the ranks see other checkpoints, of step %d and of %d: they must share %s", lowest, highest,
             t->model.config.out_dir);
}

// Does everything between the plan of a run and its first step.
static void prepare_run(Trainer* t) {
    check_memory(t->model);
    check_samples(t->model, t->model.config.num_samples, "lower --num_samples");
    read_datasets(t);
    if (!world.rank) lock_folder(t);
    allocate_model(&t->model);
    check_ranks_agree(t);
    load_start(t);
    prepare_steps(t);
    if (!world.rank) begin_files(t);
}

// ---- the loop ---------------------------------------------------------------------------------------------
// Whether --lr_schedule has come to its end: the rate is 0 from this step on.
static bool is_schedule_over(const Config& c, long step) {
    if (step == 0 || c.hyper.lr == 0) return false;
    Hyper hyper = hyper_of(c, objective_of(c, step));
    return learning_rate(hyper, step) <= 0;
}

// The flags with which a run whose schedule is over learns on.
static std::string constant_rate_flags(const Config& c) {
    return text("--lr_schedule constant --lr %g", c.hyper.lr / 10);
}

static std::string samples_path(const std::string& folder, long step) {
    return text("%s/samples_%08ld.png", folder, step);
}

// Whether what is done every `every` steps (0: never) is due after this step.
static bool is_due(long step, int every) { return every && step % every == 0; }

// Deletes the checkpoints up to step `newest` that neither --keep nor --keep_every keeps. Those of later steps are
// left alone: they are damaged, because --resume has passed over them.
static void delete_old_checkpoints(const Config& c, long newest) {
    int newer = 0;
    for (long step : list_checkpoints(c.out_dir)) {  // the newest first
        if (step > newest) continue;
        bool is_kept = newer < c.keep || is_due(step, c.keep_every);
        if (!is_kept) unlink(checkpoint_path(c.out_dir, step).c_str());
        newer++;
    }
}

// Saves a checkpoint, and deletes old ones. If it can't be written, the run ends.
static void save(Trainer* t) {
    const Config& c = t->model.config;
    write_checkpoint(checkpoint_path(c.out_dir, t->step), t->model, t->step, t->smoothed, t->history);
    t->saved = t->step;
    if (world.rank) return;

    std::string failure = failure_of([&] { delete_old_checkpoints(c, t->step); });
    if (!failure.empty()) note("old checkpoints stay: " + failure);
}

// Draws a grid of samples, and saves it. If it can't be written, the run goes on.
static void save_samples(Trainer* t) {
    const Config& c = t->model.config;
    t->sampled = t->step;
    if (!c.num_samples || !t->step) return;  // weights that were never trained draw noise

    std::vector<float> samples;
    double start = seconds_now();
    SampleGrid grid = plan_grid(c, consecutive(c.seed, c.num_samples), t->model.class_names);
    bool done = sample(&t->model, &samples, grid.specs, false);
    if (!done || world.rank) return;

    std::string path = samples_path(c.out_dir, t->step);
    std::string failure = failure_of([&] { write_png(path, draw_grid(samples, grid.columns, c)); });
    if (!failure.empty()) return note(failure);
    say("%s in %s (%s): %s%s", counted(c.num_samples, "picture"),
        human_time(seconds_now() - start), chosen_name(c), path, grid.rows);

    if (long broken = count_broken(samples, c.num_samples))
        printf("note: %ld of them became NaN and black: the weights grew too large; lower --lr\n", broken);
}

// Prints the least validation loss, and whether its checkpoint is still there.
static void print_best_validation(const Trainer& t) {
    const char* folder = t.model.config.out_dir;
    long best_step = 0;
    double best = INFINITY;
    for (auto [step, loss] : t.validated) {
        if (!(loss < best)) continue;
        best = loss;
        best_step = step;
    }
    if (!std::isfinite(best)) return;

    bool is_kept = file_exists(checkpoint_path(folder, best_step));
    printf("validation: best loss %.5f at step %ld (its checkpoint is %s)\n", best, best_step,
           is_kept ? "there" : "not kept");
}

// The flags that --resume needs for a run that has come to its end: more steps, and a rate above 0.
static std::string flags_to_go_on(const Config& c, long step) {
    if (step < c.steps) return "";
    std::string flags = text(" --steps %ld", std::max(1L, 2 * step));
    if (is_schedule_over(c, step)) flags += " " + constant_rate_flags(c);
    return flags;
}

// Prints the end of a run that began after step `first`. seconds: the time of all its steps but the first.
static void print_summary(const Trainer& t, long first, double seconds) {
    const Config& c = t.model.config;
    long steps = t.step - first;
    printf("\n%s at step %ld", stop_agreed ? "stopped" : "done", t.step);
    if (steps > 1) {
        double rate = (steps - 1) / seconds;
        printf(" after %ld steps: %.1f ms a step without the first, %.1f images/s", steps, 1e3 / rate,
               c.batch_size * rate);
    }
    printf("\n");
    print_best_validation(t);

    std::string checkpoint = checkpoint_path(c.out_dir, t.step);
    std::string samples = samples_path(c.out_dir, t.step);
    say("checkpoint: %s", checkpoint);
    if (file_exists(samples)) say("samples:    %s", samples);
    say("metrics:    %s/metrics.jsonl", c.out_dir);
    say("config:     %s/config.txt", c.out_dir);
    say("pictures:   ./%s --generate --model_weights %s", network.program, shell_word(checkpoint));
    say("continue:   ./%s --resume %s%s", network.program, shell_word(c.out_dir), flags_to_go_on(c, t.step));
}

// Clears a terminal's line, which is still to be overwritten.
static void clear_line() {
    if (isatty(1)) printf("\r\033[K");
}

static void validate(Trainer* t) {
    double loss;
    if (!validation_loss(t, &loss)) return;

    std::string shown = std::isnan(loss) ? "NaN" : text("%.5f", loss);
    clear_line();
    print("step %ld | validation loss %s (%s)\n", t->step, shown, chosen_name(t->model.config));
    t->metrics.add(text("{\"step\": %ld, \"val_loss\": %s}\n", t->step, json_number(loss)));
    t->validated[t->step] = loss;
}

// Ends the run because a loss or gradient is not finite, and says what to do about it.
static void give_up(Trainer* t, const StepState& result) {
    const Config& c = t->model.config;
    const char* what = std::isfinite(result.loss) ? "gradient" : "loss";
    const char* value = std::isnan(result.loss + result.norm) ? "NaN" : "infinite";
    if (t->step == 0) {  // no update came before it, so that --lr is not to blame
        fail("the %s became %s in step 1, before any update: %s holds values up to %g, which --range or --data_std "
             "of prepare_data.py bring to about 1; or the weights of --model_weights are too large",
             what, value, c.data_file, t->images.largest);
    }

    std::string advice = "start again with a lower --lr";
    if (t->saved)
        advice = text("go on with --resume %s and a lower --lr; if that fails too, delete %s, and it goes on from the "
                      "one before",
                      shell_word(c.out_dir), checkpoint_path(c.out_dir, t->saved));
    fail("the %s became %s in step %ld; %s", what, value, t->step + 1, advice);
}

// The times of a run. What saving, sampling and validating take is left out: pause() moves the times on by it.
struct Pace {
    long first;        // the step that the run began after
    long logged;       // the step of the log's newest line
    double start;      // when the run's first step ended, which is not timed
    double end;        // when the newest step ended
    double log_start;  // when the log's newest line was printed
    double shown;      // when any line was printed, also one that is overwritten

    void pause(double seconds) {
        start += seconds;
        end += seconds;
        log_start += seconds;
    }
};

static Pace begin_pace(long step) {
    double now = seconds_now();
    return {.first = step, .logged = step, .start = now, .end = now, .log_start = now, .shown = now};
}

// Writes a line of metrics.jsonl. ms: a mean since the line before.
static void log_step(Trainer* t, const StepState& result, double ms, double images_per_s) {
    static const double peak = backend_peak() * world.size;
    double tflops = 1e-12 * t->model.plan.flops * images_per_s;  // of the model's own operations

    std::string line = text("{\"step\": %ld, \"loss\": %.9g, \"smoothed\": %.9g", t->step, result.loss, t->smoothed);
    line += text(", \"grad_norm\": %.6g, \"lr\": %.6g", result.norm, result.update.lr);
    line += text(", \"ms\": %.3f, \"images_per_s\": %.2f", ms, images_per_s);
    if (world.size > 1) line += text(", \"images_per_s_per_rank\": %.2f", images_per_s / world.size);
    line += text(", \"tflops\": %.5g", tflops);
    if (peak) line += text(", \"mfu\": %.4f", tflops / peak);
    line += text(", \"memory_gb\": %.4g", 1e-9 * (double)memory_of(t->model));
    line += text(", \"skipped\": %d, \"loss_quartiles\": [", t->history.skipped);

    // the loss by quartile of the timesteps since the last line; null where no sample fell into one
    for (int q = 0; q < 4; q++) {
        if (q) line += ", ";
        line += json_number(t->quartile_sums[q] / t->quartile_counts[q]);
    }
    t->quartile_sums = t->quartile_counts = {};
    t->metrics.add(line + "]}\n");
}

// " | ETA 3m 20s": the time that is left if steps go on taking so many milliseconds. Steps that match distributions
// take longer than those before them; until they begin, it is the time up to the first of them.
static std::string eta_text(const Config& c, long step, double ms) {
    long end = c.steps;
    bool is_on_paths = c.matching_fraction > 0 && objective_of(c, step - 1) == OBJECTIVE_PATHS;
    if (is_on_paths) end = std::min(end, (long)steps_on_paths(c));

    std::string line = " | ETA " + human_time(1e-3 * ms * (double)(end - step));
    if (end < c.steps) line += text(" to step %ld", end);
    return line;
}

// Prints a line of the log every log_every steps and every 30 seconds; on a terminal also every second a line that the
// next one overwrites.
static void show_step(Trainer* t, const StepState& result, Pace* pace) {
    const Config& c = t->model.config;
    bool is_first = t->step == pace->first + 1;
    double now = seconds_now();
    if (is_first) pace->start = now;
    pace->end = now;

    bool logs = is_first || t->step % c.log_every == 0 || t->step == c.steps || now - pace->log_start > 30;
    bool shows = logs || (isatty(1) && now - pace->shown > 1);
    if (!shows) return;
    pace->shown = now;
    double ms = 1e3 * (now - pace->log_start) / (double)(t->step - pace->logged);
    double images_per_s = c.batch_size * 1e3 / ms;

    clear_line();
    printf("step %ld/%d | loss %.5f", t->step, c.steps, result.loss);
    if (logs) {
        printf(" | smoothed %.5f | norm %.3f | lr %.2e", (double)t->smoothed, result.norm, result.update.lr);
        printf(" | %.1f ms | %.1f images/s", ms, images_per_s);
        if (world.size > 1) printf(" (%.1f each of %d)", images_per_s / world.size, world.size);
    }
    print("%s", eta_text(c, t->step, ms));
    if (!logs) return;

    if (t->history.skipped) printf(" | %d skipped", t->history.skipped);
    printf("\n");
    pace->logged = t->step;
    pace->log_start = now;
    log_step(t, result, ms, images_per_s);
}

// Whether the weights of this step are validated: every val_every steps, and at the run's end.
static bool is_validation_due(const Trainer& t, bool is_last) {
    if (!t.validation.count) return false;
    return is_last || is_due(t.step, t.model.config.val_every);
}

// What rank 0 has found, on every rank.
static bool on_rank_0(Trainer* t, bool found) { return gather_numbers(&t->model, found)[0]; }

// Makes up for the validation and the samples that were due at the step from which the run resumes, if it ended
// before.
static void catch_up(Trainer* t) {
    const Config& c = t->model.config;
    bool was_last = t->step == t->start.config.steps;
    if (is_validation_due(*t, was_last)) {
        bool is_validated = on_rank_0(t, t->validated.contains(t->step));
        if (!is_validated) validate(t);
    }

    bool is_sampled = on_rank_0(t, file_exists(samples_path(c.out_dir, t->step)));
    if (is_sampled) t->sampled = t->step;  // so that the run's end does not draw them either
    bool is_sampling_due = was_last || is_due(t->step, c.sample_every);
    if (is_sampling_due && t->sampled != t->step) save_samples(t);
    fflush(stdout);
}

// The step up to which steps may be given to the device: not past one after which the host needs the weights.
static long last_to_begin(const Trainer& t) {
    const Config& c = t.model.config;
    int val_every = t.validation.count ? c.val_every : 0;
    long last = std::min(t.step + STEPS_IN_FLIGHT, (long)c.steps);
    for (int every : {c.save_every, c.sample_every, val_every}) {
        if (!every) continue;
        long next_due = (t.step / every + 1) * every;
        last = std::min(last, next_due);
    }
    return last;
}

// Shows the steps that were under way when the run was stopped.
static void finish_steps(Trainer* t, Pace* pace) {
    while (t->step < t->begun) {
        StepState result = await_step(t);
        if (!result.finite) break;
        show_step(t, result, pace);
    }
}

// Saves and draws what the last step has not.
static void finish_run(Trainer* t) {
    const Config& c = t->model.config;
    bool is_saved = t->saved == t->step && on_rank_0(t, file_exists(checkpoint_path(c.out_dir, t->step)));
    if (!is_saved) save(t);
    if (t->sampled != t->step && !agree_to_stop(&t->model)) save_samples(t);
}

static void train(Trainer* t) {
    const Config& c = t->model.config;
    if (t->step && c.resume_given) catch_up(t);

    Pace pace = begin_pace(t->step);
    while (t->step < c.steps && !stop_agreed) {
        while (t->begun < last_to_begin(*t)) begin_next_step(t);
        StepState result = await_step(t);
        if (!result.finite) give_up(t, result);
        show_step(t, result, &pace);
        fflush(stdout);

        double paused = seconds_now();
        if (is_validation_due(*t, t->step == c.steps)) validate(t);
        if (is_due(t->step, c.save_every)) save(t);
        if (is_due(t->step, c.sample_every)) save_samples(t);
        fflush(stdout);
        pace.pause(seconds_now() - paused);
    }
    finish_steps(t, &pace);
    clear_line();

    finish_run(t);
    print_summary(*t, pace.first, pace.end - pace.start);
}

// ---- main -------------------------------------------------------------------------------------------------
// Ctrl-C and SIGTERM, a closed terminal and a pipe whose reader has gone finish the step, save and end (with
// the last two, whatever is still printed is lost). One such event often sends several signals, as the shell
// and the kernel do, or timeout: only a second later another Ctrl-C or SIGTERM ends at once.
static void handle_signals() {
    auto request_stop = [](int number) {
        stop_asked = 1;
        if (world.size == 1) stop_agreed = 1;
        if (number == SIGINT || number == SIGTERM) alarm(1);
    };
    for (int number : {SIGINT, SIGTERM, SIGPIPE}) signal(number, request_stop);
    if (signal(SIGHUP, request_stop) == SIG_IGN) signal(SIGHUP, SIG_IGN);  // as nohup asks
    signal(SIGALRM, [](int) {
        signal(SIGINT, SIG_DFL);
        signal(SIGTERM, SIG_DFL);
    });
}

// Runs `program`, and reports what it fails with. Returns main's status.
static int guarded(auto program) {
    // the sentence is made while there is memory for it
    Failure failure = {1, "out of memory; use a smaller --batch_size or --num_samples, or fewer images"};
    try {
        return program();
    } catch (const Failure& thrown) {
        failure = thrown;
    } catch (const std::system_error& thrown) {
        failure.sentence = text("the system did not give what was asked of it, such as a thread: %s", thrown.what());
    } catch (const std::bad_alloc&) {
    } catch (const std::length_error&) {
    }

    fflush(stdout);
    if (world.size > 1) end_ranks(failure.status, failure.sentence);  // the device may wait for other ranks
    fprintf(stderr, "error: %s\n", failure.sentence.c_str());
    return failure.status;
}

#ifndef TESTING
// Says where --steps or --lr_schedule leave a run nothing to learn.
static void note_schedule(const Config& c, long step) {
    std::string schedule = flag_text(c, flag_named("lr_schedule"));
    if (step >= c.steps) {
        printf("already at step %ld of --steps %d: nothing is left to train\n", step, c.steps);
    } else if (is_schedule_over(c, step)) {
        print("note: --lr_schedule %s has come to its end: the learning rate is 0; go on with %s\n", schedule,
              constant_rate_flags(c));
    } else if (is_schedule_over(c, c.steps - 1)) {
        print("note: --lr_schedule %s comes to its end before --steps %d, and then the learning rate is 0; see "
              "--lr_schedule constant and a lower --lr\n",
              schedule, c.steps);
    }
}

// Says what is to be known of a run before it starts.
static void print_notes(const Trainer& trainer, const GivenFlags& given) {
    const Config& config = trainer.model.config;
    for (const std::string& change : trainer.changes) say("changed on resume: %s", change);
    for (const std::string& line : trainer.notes) say("note: %s", line);
    note_attention(config, given);
    if (trainer.start.path.empty() && file_exists("unet_init.bin"))
        say("note: unet_init.bin lies here and is not read; to start from it: --model_weights unet_init.bin");
    note_schedule(config, trainer.step);
}

// Says what a run learns from, and where it starts.
static void print_start(const Trainer& trainer) {
    const Config& config = trainer.model.config;
    if (config.path_steps)
        say("note: the network learns from what %s draws; the images are no examples", config.model_weights);

    long last = (long)steps_on_paths(config);
    if (config.matching_fraction > 0 && trainer.step < last && last < config.steps)
        say("note: up to step %ld it learns paths; then it matches distributions, and its loss is another", last);

    say("%s in %s; %s step %ld", counted(trainer.images.count, "image"), config.data_file,
        config.resume_given ? "resumed at" : "starting at", trainer.step);
    fflush(stdout);
}

static void run_training(const GivenFlags& given) {
    Trainer trainer;
    const Config& config = trainer.model.config;
    plan_run(&trainer, given);
    if (!config.dry_run) prepare_run(&trainer);
    print_notes(trainer, given);
    print_run(trainer.model);

    if (config.dry_run) {
        check_memory(trainer.model);
        check_samples(trainer.model, config.num_samples, "lower --num_samples");
        return print_time(config, trainer.step);
    }

    print_start(trainer);
    train(&trainer);
}

#ifndef PROFILING  // dev/bench/profile.cu has its own run_program
// Prints the configuration that a run with these flags would have.
static void print_configuration(const GivenFlags& given) {
    Trainer trainer;
    plan_run(&trainer, given);
    fputs(config_text(trainer.model.config).c_str(), stdout);
}

static void run_program(int argc, char** argv) {
    GivenFlags given = parse_flags({argv + 1, argv + argc});
    Config config = given_config(given);
    if (config.help != HELP_NONE) return print_help(config.help == HELP_ALL);

    bool draws = config.generate || *config.seeds;
    if (config.generate && !config.num_samples)
        fail_usage("--num_samples 0 draws nothing; leave --generate out to train, or say how many pictures");
    const GivenFlag* output_dir = was_typed(given, "output_dir");
    if (output_dir && !draws)
        fail_usage("--output_dir %s draws nothing by itself; add --generate, or say which with --seeds",
                   output_dir->value);
    if (config.print_config) return print_configuration(given);

    start_ranks(config);
    backend_init();
    std::string ranks = connect_ranks(config);
    if (!config.dry_run) handle_signals();  // a timing has nothing to save
    print("%s on %s%s\n", network.program, backend_name(), ranks);

    if (draws) run_generate(given);
    else run_training(given);
    leave_ranks();
}
#endif

// If a standard stream is closed, the next file opened would take its place: /dev/null does instead.
static void open_standard_streams() {
    for (int standard : {0, 1, 2})
        if (fcntl(standard, F_GETFD) < 0) open("/dev/null", O_RDWR);
}

// Fails if what was printed could not be written. If a pipe's reader or the terminal has gone, which sets
// stop_asked, there is nobody to tell.
static void check_output() {
    errno = 0;
    bool is_written = !fflush(stdout) && !ferror(stdout);
    if (!is_written && !stop_asked)
        fail("could not write all of the output: %s", errno ? strerror(errno) : "a part of it got lost");
}

int main(int argc, char** argv) {
    signal(SIGILL, [](int) {  // -march=native has used what the processor has that compiled it
        end_at_signal("error: this program was built for another processor; run make on this machine\n");
    });
    signal(SIGXFSZ, SIG_IGN);  // past a limit of the files' size a write then fails with a message
    open_standard_streams();
    return guarded([&] {
        run_program(argc, argv);
        check_output();
        return EXIT_SUCCESS;
    });
}
#endif
#endif  // NETWORK_ONLY

#include "unet_cpu.h"

// ==== 11  LAYERS ON THE GPU ================================================================================

#ifdef __CUDACC__

// ---- the machine ------------------------------------------------------------------------------------------
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
#ifndef LAUNCH_CHECK  // dev/bench/profile.cu counts launches
#define LAUNCH_CHECK() CUDA_CHECK(cudaGetLastError())
#endif
static void cuda_check(cudaError_t status, const char* expression, const char* file, int line) {
    if (status != cudaSuccess)
        fail("the GPU reported '%s' at %s:%d (%s)", cudaGetErrorString(status), file, line, expression);
}

// A CUDA stream, and the workspace in which its launchers keep the partial sums of split reductions. Every launcher
// takes memory from a copy of the arena, so that the next one finds all of it free, and splits no further than fits.
static struct Stream {
    cudaStream_t handle;
    Arena workspace;
} main_stream, side_stream;
static thread_local Stream* stream = &main_stream;           // the one that launches go to now
static const size_t GPU_WORKSPACE_BYTES = (size_t)64 << 20;  // of a stream

// The side stream's newest events. An older event's slot holds a newer one, for which wait_for then waits; that is
// safe, because the newer one comes later.
enum { SIDE_EVENTS = 4 };
static cudaEvent_t side_begins, side_ends[SIDE_EVENTS];
static Event waited_for;  // the newest event that the main stream has waited for

static cudaEvent_t host_events[STEPS_IN_FLIGHT];
static cudaDeviceProp gpu_properties;
static const int& gpu_multiprocessors = gpu_properties.multiProcessorCount;
// Whether every kernel calls await_inputs, and so may be launched before the one before it has ended. Those of dev/'s
// ladders don't.
static bool kernels_await_inputs = true;

static void create_event(cudaEvent_t* event) { CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming)); }

static void backend_init() {
    const std::string instead = text("build for the CPU: make %s DEVICE=cpu", network.program);
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || !count)
        fail("this program was built for a GPU and finds none (%s); %s", cudaGetErrorString(status), instead);
    if (world.forked && world.size > count)
        fail("--gpus %d asks for more than the %s of this machine", world.size, counted(count, "GPU"));

    const int device = world.local % count;
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaGetDeviceProperties(&gpu_properties, device));
    if (gpu_properties.major < 8)
        fail("%s is too old: compute capability %d.%d, and 8.0 is the least; %s", gpu_properties.name,
             gpu_properties.major, gpu_properties.minor, instead);

    for (Stream* each : {&main_stream, &side_stream})
        CUDA_CHECK(cudaStreamCreateWithFlags(&each->handle, cudaStreamNonBlocking));
    create_event(&side_begins);
    for (cudaEvent_t& event : side_ends) create_event(&event);
    for (cudaEvent_t& event : host_events) create_event(&event);
}

static std::string backend_name() {
    const char* precision = "bf16";
    if (sizeof(floatX) == 4) precision = "fp32";
    else if (gpu_properties.major > 9) precision = "bf16, with portable kernels: newer than Hopper";
    return text("%s: %s", gpu_properties.name, precision);
}

static void* backend_allocate(size_t bytes, bool on_host) {
    void* memory = nullptr;
    cudaError_t status = on_host ? cudaMallocHost(&memory, bytes) : cudaMalloc(&memory, bytes);
    if (status == cudaSuccess) return memory;
    cudaGetLastError();  // clears the error, so that the next check does not find it
    fail_to_allocate(bytes);
}

// Leaves an error to the next check. Freeing waits for the device, which may itself be waiting for other ranks. So
// after a failure with several ranks nothing is freed.
static void backend_free(void* memory, bool on_host) {
    if (world.size > 1 && std::uncaught_exceptions()) return;
    if (on_host) cudaFreeHost(memory);
    else cudaFree(memory);
}

static void backend_zero(void* memory, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream->handle));
}

static void backend_copy(void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream->handle));
}

static void backend_wait() { CUDA_CHECK(cudaStreamSynchronize(main_stream.handle)); }

// The newest launches for the side stream, as long as they are deferred.
static std::function<void()> deferred;

// Does the deferred launches, if there are any. It is called after each kernel of the main stream, before other
// launches are deferred, and where the main stream is to wait for them.
static void flush_deferred() {
    if (!deferred || stream != &main_stream) return;
    auto launches = std::exchange(deferred, nullptr);
    CUDA_CHECK(cudaStreamWaitEvent(side_stream.handle, side_begins, 0));

    stream = &side_stream;
    launches();
    stream = &main_stream;

    CUDA_CHECK(cudaEventRecord(side_ends[newest_event % SIDE_EVENTS], side_stream.handle));
}

static Event on_side_stream_deferred(auto launches) {
    assert(stream == &main_stream);
    flush_deferred();
    CUDA_CHECK(cudaEventRecord(side_begins, main_stream.handle));
    deferred = launches;
    return ++newest_event;
}

static Event on_side_stream(auto launches) {
    Event event = on_side_stream_deferred(launches);
    flush_deferred();
    return event;
}

static void wait_for(Event event) {
    if (event <= waited_for) return;
    if (event == newest_event) flush_deferred();
    CUDA_CHECK(cudaStreamWaitEvent(main_stream.handle, side_ends[event % SIDE_EVENTS], 0));
    waited_for = event;
}

// NCCL is loaded when it is needed, so that the program is built and runs without it.
static void *nccl_library, *nccl_ranks;
// Calls the function of this name, and checks its status.
template <typename... Arguments> static void nccl(const char* name, Arguments... arguments) {
    auto function = (int (*)(Arguments...))dlsym(nccl_library, name);
    if (!function) fail("NCCL lacks %s: 2.14 or later is needed", name);
    int status = function(arguments...);
    if (status)
        fail("NCCL reported error %d in %s; NCCL_DEBUG=WARN in the environment tells more", status, name);
}

enum { CONNECTION_SECONDS = 120 };
static std::atomic<bool> nccl_connected = false, nccl_closing = false;
static std::thread nccl_watcher;

// The host and port at which the ranks meet. Forked ranks derive the port from rank 0's process id; ranks of a launcher
// take the port after the launcher's own.
static std::string nccl_address() {
    if (world.forked) {
        pid_t rank_0 = world.rank ? getppid() : getpid();
        return text("127.0.0.1:%d", 20000 + rank_0 % 40000);
    }
    const char* host = getenv("MASTER_ADDR");
    int port = environment_number("MASTER_PORT");
    if (port < 1 || port >= 65535)
        fail("the ranks of a launcher meet by MASTER_ADDR and MASTER_PORT: set both in the environment");
    return text("%s:%d", host ? host : "127.0.0.1", port + 1);
}

// Fails where NCCL would wait for ever: for a rank that is gone, or that did not come. The ranks began to connect at
// `start`.
static void check_nccl(double start) {
    if (!nccl_connected) {
        if (seconds_now() - start > CONNECTION_SECONDS)
            fail("%d ranks did not meet at %s; see that all were started, and that the port is open", world.size,
                 nccl_address());
        return;
    }
    int status = 0;
    nccl("ncclCommGetAsyncError", nccl_ranks, &status);
    if (status) {
        if (world.forked) sleep(5);  // meanwhile rank 0 finds out which rank has died
        fail("NCCL reported error %d: another rank is gone", status);
    }
}

// What nccl_watcher does: ends this process when check_nccl fails.
static void watch_nccl() {
    double start = seconds_now();
    while (!nccl_closing) {
        std::string why = failure_of([&] { check_nccl(start); });
        if (!why.empty()) end_ranks(EXIT_FAILURE, why + OTHERS_END);
        usleep(20000);
    }
}

static void backend_prepare_fork() {}

static std::string backend_connect() {
    const char* file = getenv("NCCL_LIBRARY");
    nccl_library = dlopen(file ? file : "libnccl.so.2", RTLD_NOW);
    if (!nccl_library)
        fail("several GPUs need NCCL (%s); install it, or name its file with NCCL_LIBRARY", dlerror());
    setenv("NCCL_COMM_ID", nccl_address().c_str(), 0);

    nccl_watcher = std::thread(watch_nccl);
    std::array<char, 128> id;  // ncclUniqueId
    nccl("ncclGetUniqueId", &id);
    nccl("ncclCommInitRank", &nccl_ranks, world.size, id, world.rank);

    // NCCL takes its memory at the first exchange: now, before the free memory is counted.
    auto bytes = allocate<char>(world.size);
    gather(bytes.get(), 1);
    backend_wait();
    nccl_connected = true;

    int version = 0;
    nccl("ncclGetVersion", &version);
    if (version < 21400) fail("this NCCL has version code %d; 2.14 or later is needed", version);
    return text("NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

static void backend_disconnect() {
    nccl("ncclCommFinalize", nccl_ranks);
    // The watcher still asks NCCL for its state, so it ends before there is none.
    nccl_closing = true;
    nccl_watcher.join();
    // This waits for NCCL's own threads, which free memory after ncclCommFinalize and must not outlive main.
    nccl("ncclCommDestroy", nccl_ranks);
}

static void backend_together(auto exchanges) {
    nccl("ncclGroupStart");
    exchanges();
    nccl("ncclGroupEnd");
}

static void backend_exchange(int peer, std::span<const std::byte> sent, std::span<std::byte> received) {
    const int BYTES = 0;  // ncclInt8
    backend_together([&] {
        if (sent.size()) nccl("ncclSend", sent.data(), sent.size(), BYTES, peer, nccl_ranks, stream->handle);
        if (received.size())
            nccl("ncclRecv", received.data(), received.size(), BYTES, peer, nccl_ranks, stream->handle);
    });
}

static std::shared_ptr<void> capture(auto launches) {
    cudaGraph_t captured;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamBeginCapture(main_stream.handle, cudaStreamCaptureModeThreadLocal));
    launches();
    CUDA_CHECK(cudaStreamEndCapture(main_stream.handle, &captured));
    CUDA_CHECK(cudaGraphInstantiate(&executable, captured, 0));
    CUDA_CHECK(cudaGraphDestroy(captured));
    return {executable, cudaGraphExecDestroy};
}

static void launch_graph(Graph* graph, auto launches) {
    graph->runs++;
    if (graph->runs == 1) return launches();
    if (graph->runs == 2) graph->executable = capture(launches);
    CUDA_CHECK(cudaGraphLaunch((cudaGraphExec_t)graph->executable.get(), main_stream.handle));
}

static void mark_step_end(int slot) { CUDA_CHECK(cudaEventRecord(host_events[slot], main_stream.handle)); }
static void wait_for_step(int slot) { CUDA_CHECK(cudaEventSynchronize(host_events[slot])); }

static double backend_peak() {
    // Operations of a multiprocessor in a clock cycle, by NVIDIA's white papers on each architecture.
    struct Rates {
        double fp32, bf16;
    };
    static const std::map<int, Rates> RATES_OF_CAPABILITY = {
        {80, {.fp32 = 128, .bf16 = 2048}},
        {86, {.fp32 = 256, .bf16 = 1024}},
        {89, {.fp32 = 256, .bf16 = 1024}},
        {90, {.fp32 = 256, .bf16 = 4096}},
    };
    const int capability = 10 * gpu_properties.major + gpu_properties.minor;
    const auto found = RATES_OF_CAPABILITY.find(capability);
    if (found == RATES_OF_CAPABILITY.end()) return 0;
    const Rates rates = found->second;

    int device, khz = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device));
    if (sizeof(floatX) == 4) return 1e-9 * khz * gpu_multiprocessors * rates.fp32;

    // An H100 can clock higher than its data sheet assumes for the tensor cores' 989 TFLOP/s. We go by the data sheet.
    if (capability == 90) khz = std::min(khz, 1830000);
    // The tensor cores of a GeForce run at half their rate where they add up in fp32.
    const bool is_halved = strstr(gpu_properties.name, "GeForce");
    return 1e-9 * khz * gpu_multiprocessors * (is_halved ? rates.bf16 / 2 : rates.bf16);
}

enum { MAX_HEAD = 256 };  // in fp32 the backward kernel needs 131 KB of shared memory for it
static std::pair<int, int> head_channels() {
    size_t shared = gpu_properties.sharedMemPerBlockOptin;  // 0 before backend_init: not known yet
    bool too_small = sizeof(floatX) == 4 && shared && shared < (131 << 10);
    return {16, too_small ? MAX_HEAD / 2 : MAX_HEAD};
}

static size_t backend_memory_available() {
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return available;
}

static size_t workspace_bytes() { return 2 * GPU_WORKSPACE_BYTES; }
static void allocate_workspace() {
    for (Stream* each : {&main_stream, &side_stream}) {
        if (each->workspace.base) continue;
        char* base = (char*)backend_allocate(GPU_WORKSPACE_BYTES, false);
        each->workspace = {base, GPU_WORKSPACE_BYTES, 0};
    }
}

namespace gpu {

// ---- what the kernels share -------------------------------------------------------------------------------
enum { VEC = 16 / (int)sizeof(floatX) };  // elements in 16 bytes: 8 in bf16, 4 in fp32

// Element 0 or 1 of two bf16. A bf16 is the upper half of a float.
__device__ inline float bf16_of_pair(uint32_t pair, int which) {
    return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
}

// The elements of 16 bytes as floats.
typedef Vector<float, VEC> Unpacked;
__device__ inline void operator+=(Unpacked& a, Unpacked b) {
    for (int e = 0; e < VEC; e++) a[e] += b[e];
}

__device__ inline Unpacked unpack(uint4 bits) {
    const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
    Unpacked value;
    for (int e = 0; e < VEC; e++) {
        if (VEC == 4) value[e] = __uint_as_float(words[e % 4]);  // fp32
        else value[e] = bf16_of_pair(words[e / 2], e % 2);
    }
    return value;
}

__device__ inline Unpacked unpack(const floatX* from) { return unpack(*(const uint4*)from); }

__device__ inline uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t*)&pair;
}

__device__ inline uint4 pack(Unpacked value) {
    uint4 bits;
    for (int e = 0; e < VEC; e++) ((floatX*)&bits)[e] = (floatX)value[e];
    return bits;
}

__device__ inline void operator+=(float2& a, float2 b) {
    a.x += b.x;
    a.y += b.y;
}

__device__ inline void operator+=(float4& a, float4 b) {
    a.x += b.x;
    a.y += b.y;
    a.z += b.z;
    a.w += b.w;
}

// The block's shared memory, of the size that launch() was given.
template <typename Shared> __device__ inline Shared& shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return *(Shared*)memory;
}

__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Begins to copy 16 bytes from device memory to shared memory, past the registers. Unless `valid`, it writes zeros, and
// `from` may be any address.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}

// Loads four 8x8 matrices of bf16. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// c (16, 8) += a (16, 16) b (16, 8). Lane l holds columns 2 (l % 4) and 2 (l % 4) + 1 of c: c[0] and c[1] are those of
// row l / 4, c[2] and c[3] those of row l / 4 + 8.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The first statement of every kernel: it waits until everything that its stream was given before is done and written.
// This lets a kernel's launch overlap the end of the kernel before it (programmatic dependent launch). Without the
// overlap a call of the network at B = 1 takes 10% longer on an H100.
__device__ inline void await_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// kernel<<<grid, threads, shared>>>(args...) on the current stream. With CLUSTERS, the blocks along x are a cluster.
template <bool CLUSTERS = false, typename... Parameters, typename... Arguments>
static void launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared, Arguments... args) {
    if (shared > 48 * 1024)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));

    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = kernels_await_inputs;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {grid.x, 1, 1};
    unsigned count = 1;
    if (CLUSTERS && grid.x > 1) count = 2;
    if (gpu_properties.major < 9) count = 0;  // a GPU before Hopper knows neither attribute

    cudaLaunchConfig_t config = {grid, threads, shared, stream->handle, attributes, count};
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(args)...));
    LAUNCH_CHECK();
#ifndef PROFILING  // the profiler flushes later, because the launcher's time would contain the deferred launches
    flush_deferred();
#endif
}

// ---- layers written once: see section 3 -------------------------------------------------------------------
// A layer whose items are independent: a thread does one item.
template <typename Layer> __global__ void layer_kernel(Layer layer, size_t count) {
    await_inputs();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) layer(i);
}

// A layer that adds up: a block is a team.
template <typename Layer>
__global__ void __launch_bounds__(Layer::THREADS, Layer::BLOCKS) teams_kernel(Layer layer) {
    await_inputs();
    layer(Team{(int)blockIdx.x, (int)threadIdx.x, (int)blockDim.x});
}

template <typename Layer> static void run(Layer layer) {
    PROFILE(layer);
    size_t items = layer.items();
    if constexpr (requires { Layer::THREADS; }) {
        launch(teams_kernel<Layer>, (int)items, Layer::THREADS, 0, layer);
    } else {
        // Few items are done in small blocks, so that every multiprocessor gets some.
        int threads = items < (1 << 18) ? 64 : 256;
        launch(layer_kernel<Layer>, ceil_div(items, threads), threads, 0, layer, items);
    }
}

// ---- group norm + SiLU ------------------------------------------------------------------------------------
// Group norm runs in streaming passes: every element is read once and written once, 16 bytes at a time, and stays in
// registers between. What a pass must know of the rest of its image comes as sums over tiles of NORM_TILE pixels (the
// last tile may have fewer). These are kept per channel, because a group may lie in both tensors of x:
//   moments (B, tiles, C): a tensor's mean over the tile, and its sum of squares about that mean;
//   sums (B, tiles, C): the sum of dy, the gradient before the SiLU, and the sum of dy x_hat.
// The GEMM that writes the tensor leaves them behind in its epilogue; where it can't, channel_moments and
// groupnorm_backward_sums make them. The channels of a normed tensor are a multiple of 32 (see check_levels), so that
// 16 bytes lie in one tensor of x.
enum {
    // The two passes that only add up: a block reads eight vectors of channels of a tile.
    NORM_TILE_THREADS = 256,
    NORM_TILE_VECTORS = 8,
    NORM_TILE_STRIDE = NORM_TILE_THREADS / NORM_TILE_VECTORS,  // pixels at a time
    NORM_TILE_DEPTH = NORM_TILE / NORM_TILE_STRIDE,            // vectors that a thread loads
    // Streaming passes, tuned on an H100 at B = 32, all 56 norms forward and backward:
    NORM_THREADS = 512,  // 256: 3% slower
    NORM_BLOCKS = 2,     // on a multiprocessor, all resident at once; 4, one after another: forward 20% slower
    NORM_SLAB = 1024,    // the most bytes of a pixel that are one block's; 512: 2% slower
    NORM_CHANNELS = NORM_SLAB / sizeof(floatX),
    NORM_DEPTH = 4,      // loads that a thread of the forward pass has in flight; 2: 1% slower
};

static_assert((int)NORM_CHANNELS <= NORM_THREADS, "each channel of a block needs a thread");

// Loads from shared memory each time it is called, so that the compiler does not keep the values in registers.
__device__ inline Unpacked norm_reload(const float* from) {
    Unpacked value;
    for (int i = 0; i < VEC; i += 4)
        asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(value[i]), "=f"(value[i + 1]), "=f"(value[i + 2]), "=f"(value[i + 3])
                     : "r"(shared_address(from + i)));
    return value;
}

// Adds up a and b over the block's threads, in a fixed order; every ROW-th thread has the same vector of channels.
// Thread c < C writes sums[c] = finish(c, total), where total holds the channel's sum of a and that of b.
template <int ROW, int WARPS>
__device__ static inline void norm_tile_sums(float2 (&shared_sums)[WARPS][ROW * VEC], auto* sums, int C,
                                             Unpacked& a, Unpacked& b, auto finish) {
    static_assert(ROW * VEC <= WARPS * 32, "each channel needs a thread");
    const int warp = (int)threadIdx.x / 32;
    const int lane = (int)threadIdx.x % 32;
    for (int i = 0; i < VEC; i++) {
        for (int offset = ROW; offset < 32; offset *= 2) {
            a[i] += __shfl_xor_sync(~0u, a[i], offset);
            b[i] += __shfl_xor_sync(~0u, b[i], offset);
        }
        if (lane < ROW) shared_sums[warp][lane * VEC + i] = make_float2(a[i], b[i]);
    }
    __syncthreads();

    const int c = threadIdx.x;
    if (c >= min(ROW * VEC, C)) return;
    float2 total = make_float2(0, 0);
    for (auto& of_warp : shared_sums) total += of_warp[c];
    sums[c] = finish(c, total);
}

// The moments of n values: sums.x is the sum of their distances from a pivot, and sums.y that of the squared
// distances. Where the pivot is one of the values, sums.y is at most n + 1 times the squares about the mean, so that
// the subtraction loses few digits.
__device__ inline Moments moments_about(float pivot, float2 sums, float n) {
    float distance = sums.x / n;
    return {pivot + distance, fmaxf(0, sums.y - sums.x * distance)};
}

// The tile of an image that a block of the two kernels below adds up, NORM_TILE_VECTORS vectors of channels wide. The
// grid is (tiles, channels, images). A thread has one vector of every NORM_TILE_STRIDE-th pixel, from `row` on.
struct NormTile {
    const int row = threadIdx.x / NORM_TILE_VECTORS;
    const int c0 = blockIdx.y * NORM_TILE_VECTORS * VEC;            // the block's first channel
    const int c = c0 + (int)threadIdx.x % NORM_TILE_VECTORS * VEC;  // the thread's first channel
    const size_t first;                                             // pixel of the tile, counted through all images
    const int pixels;                                               // how many the tile has
    __device__ NormTile(int T)
        : first((size_t)blockIdx.z * T + blockIdx.x * NORM_TILE),
          pixels(min((int)NORM_TILE, T - (int)blockIdx.x * NORM_TILE)) {}

    // Whether the thread's vector i is in the tile.
    __device__ bool holds(int i) const { return row + i * NORM_TILE_STRIDE < pixels; }
    // Loads the thread's vectors, of which the first lies at `from`. All loads come before the first use.
    __device__ void load(uint4 (&in)[NORM_TILE_DEPTH], const floatX* from, int pitch) const {
        for (int i = 0; i < NORM_TILE_DEPTH; i++)
            if (holds(i)) in[i] = *(const uint4*)(from + i * NORM_TILE_STRIDE * pitch);
    }
    // Adds up a and b over the block, and writes finish(c, total) to the tile's row of `sums`, (B, tiles, C).
    __device__ void add_up(auto* sums, int C, Unpacked& a, Unpacked& b, auto finish) const {
        __shared__ float2 shared_sums[NORM_TILE_THREADS / 32][NORM_TILE_VECTORS * VEC];
        sums += ((size_t)blockIdx.z * gridDim.x + blockIdx.x) * C + c0;
        norm_tile_sums<NORM_TILE_VECTORS>(shared_sums, sums, C - c0, a, b, finish);
    }
};

static dim3 norm_tile_grid(const Tensor& x, int C) {
    return dim3(norm_tiles(x.T()), ceil_div(C, NORM_TILE_VECTORS * VEC), x.B);
}

// x.moments (B, tiles, C): of each tile x.mean(1) and ((x - x.mean(1)) ** 2).sum(1). Sums are taken of x minus a
// pivot, the tile's first pixel, because a plain sum of squares would cancel against the square of the mean. Device
// memory: x is read once.
__global__ void __launch_bounds__(NORM_TILE_THREADS) channel_moments_kernel(const Tensor x) {
    await_inputs();
    const NormTile tile(x.T());
    const floatX* pivots = x.data + tile.first * x.C;
    Unpacked sum = {}, squares = {};
    if (tile.c < x.C) {
        uint4 in[NORM_TILE_DEPTH];
        tile.load(in, pivots + tile.row * x.C + tile.c, x.C);
        const Unpacked pivot = unpack(pivots + tile.c);

        for (int i = 0; i < NORM_TILE_DEPTH; i++) {
            if (!tile.holds(i)) break;
            const Unpacked value = unpack(in[i]);
            for (int e = 0; e < VEC; e++) {
                const float distance = value[e] - pivot[e];
                sum[e] += distance;
                squares[e] += distance * distance;
            }
        }
    }
    tile.add_up(x.moments, x.C, sum, squares, [&](int c, float2 total) {
        return moments_about((float)pivots[tile.c0 + c], total, tile.pixels);
    });
}

static void channel_moments(Tensor x) {
    PROFILE("group norm sums", {0, 1.0 * sizeof(floatX) * x.rows() * x.C});
    launch(channel_moments_kernel, norm_tile_grid(x, x.C), NORM_TILE_THREADS, 0, x);
}

// A norm's gradient before the SiLU, for a vector of channels of an image.
struct NormGradient {
    Vector<GroupStatistics, VEC> statistics;
    Vector<ScaleShift, VEC> half;
    // `at` is the index of the first channel in (B, C).
    __device__ void load(const Norm& norm, size_t at) {
        statistics = ::load<VEC>(norm.statistics + at);
        half = ::load<VEC>(norm.half_scale_shift + at);
    }
    // Turns d from the gradient of the norm's output into the gradient before the SiLU. Adds d to `sum`, and
    // d (x - mean) to `product`, where x is what the norm read.
    __device__ void apply(Unpacked& d, Unpacked x, bool silu, Unpacked& sum, Unpacked& product) const {
        if (silu)
            for (int e = 0; e < VEC; e++) d[e] *= silu_gradient_of_half(x[e] * half[e].scale + half[e].shift);
        for (int e = 0; e < VEC; e++) {
            sum[e] += d[e];
            product[e] += d[e] * (x[e] - statistics[e].mean);
        }
    }
};

// dy = dout * silu'(x scale + shift), the gradient before the SiLU; and norm.sums (B, tiles, C): of each tile
// dy.sum(1) and (dy * (x - mean) * rstd).sum(1). Device memory: x and dout are read and dy is written, once each.
__global__ void __launch_bounds__(NORM_TILE_THREADS)
    groupnorm_backward_sums_kernel(floatX* dy, const floatX* dout, const Norm norm) {
    await_inputs();
    const NormTile tile(norm.x.first.T());
    const int C = norm.x.C();
    const int c = tile.c;
    Unpacked sum = {}, product = {};
    if (c < C) {
        const Tensor& x = norm.x.of(c);
        const size_t pixel = tile.first + tile.row;
        const size_t at = pixel * C + c;
        const size_t channel_of_image = (size_t)blockIdx.z * C + c;  // in (B, C)
        uint4 in[NORM_TILE_DEPTH], upstream[NORM_TILE_DEPTH];
        tile.load(in, x.data + pixel * x.C + norm.x.within(c), x.C);
        tile.load(upstream, dout + at, C);
        NormGradient gradient;
        gradient.load(norm, channel_of_image);

        const bool writes = norm.silu || dy != dout;  // otherwise dy is what it must be
        for (int i = 0; i < NORM_TILE_DEPTH; i++) {
            if (!tile.holds(i)) break;
            const Unpacked value = unpack(in[i]);
            Unpacked d = unpack(upstream[i]);
            gradient.apply(d, value, norm.silu, sum, product);
            if (writes) *(uint4*)(dy + at + (size_t)i * NORM_TILE_STRIDE * C) = pack(d);
        }
    }
    tile.add_up(norm.sums, C, sum, product, [&](int c, float2 total) {
        return NormSums{total.x, total.y * norm.statistics[blockIdx.z * C + tile.c0 + c].rstd};
    });
}

static void groupnorm_backward_sums(Tensor dy, Tensor dout, const Norm& norm) {
    const Tensor& x = norm.x.first;
    PROFILE("group norm sums", {0, 3.0 * sizeof(floatX) * x.rows() * norm.x.C()});
    launch(groupnorm_backward_sums_kernel, norm_tile_grid(x, norm.x.C()), NORM_TILE_THREADS, 0, dy.data,
           dout.data, norm);
}

// The grid of a streaming pass. It cuts a pixel's channels into slabs of whole 128-byte lines, so that no two blocks
// write to one line. A slab may begin or end within a group. The blocks of an image's slab share its pixels.
struct NormGrid {
    int slabs;             // of an image
    int channels, blocks;  // of a slab
    NormGrid(const Concat& x, int other_blocks) {
        const int line = 128 / sizeof(floatX);
        slabs = ceil_div(x.C() * sizeof(floatX), NORM_SLAB);
        channels = ceil_div(x.C(), slabs * line) * line;

        const int most = ceil_div((size_t)x.first.T() * channels, NORM_THREADS * VEC);  // with a vector for each thread
        const int resident = NORM_BLOCKS * gpu_multiprocessors - other_blocks;
        blocks = std::clamp(resident / (x.first.B * slabs), 1, most);
    }
};

// The work of a block and of a thread of a streaming pass. A thread has one vector of channels, so that what belongs
// to a channel stays in registers, and of its image every stride-th pixel.
struct NormWork {
    // The block:
    int b;           // its image
    int slab;        // its slab's first channel
    int channels;    // of the slab
    int block;       // its number among the blocks of the slab
    int group_size;  // channels in a group
    int g0, groups;  // the slab's first group, and how many groups have channels in it

    // The thread:
    bool owner;     // thread i, if owner, computes what belongs to channel slab + i
    int c;          // the first channel of its vector
    int t, stride;  // its first pixel in the image, and the distance from one of its pixels to the next
    // The same in elements: in the tensor of x that has channel c, and in a tensor that has all channels.
    size_t at, at_concat;
    int step, step_concat;

    // Divisions are few and unsigned, because this and the sums that follow are most of the time of a small norm.
    __device__ NormWork(const NormGrid& grid, unsigned index, const Norm& norm) {
        const unsigned T = norm.x.first.T();
        const unsigned C = norm.x.C();
        const unsigned image_slab = index / grid.blocks;
        block = index - image_slab * grid.blocks;
        b = image_slab / grid.slabs;
        slab = (image_slab - b * grid.slabs) * grid.channels;
        channels = min(grid.channels, C - slab);
        owner = (int)threadIdx.x < channels;

        const unsigned vectors = channels / VEC;
        const unsigned rows = NORM_THREADS / vectors;  // pixels that the block does at a time
        const unsigned row = threadIdx.x / vectors;
        c = slab + (threadIdx.x - row * vectors) * VEC;
        group_size = C / norm.groups;
        g0 = (unsigned)slab / group_size;
        groups = (slab + channels - 1) / group_size - g0 + 1;

        t = block * rows + row;
        stride = rows * grid.blocks;
        const int width = norm.x.of(c).C;
        const size_t pixel = (size_t)b * T + t;
        at = pixel * width + norm.x.within(c);
        at_concat = pixel * C + c;
        step = stride * width;
        step_concat = stride * C;
        if (row >= rows) t = T;  // the threads that are left over have no pixels
    }

    // Sums item(tile, channel, the group's first channel) over all tiles and channels of a group, and returns to
    // thread i < channels the sum of the group of channel slab + i. A power of 2 of neighbouring threads shares a
    // group, so that the order follows from the shapes alone. meanwhile() is called once the items have been loaded.
    __device__ float2 group_sum(int tiles, auto item, auto meanwhile) const {
        __shared__ float2 shared_sums[NORM_THREADS];
        const int sharers = 1 << (31 - __clz(NORM_THREADS / groups));  // threads that share a group
        const int lanes = min(sharers, 32);                            // those of them in one warp
        const int parts = sharers / lanes;                             // the warps' sums, which add up to a group's
        const int i = threadIdx.x / sharers;                           // the thread's group, counted from g0
        const int sharer = threadIdx.x % sharers;
        const int c0 = (g0 + i) * group_size;

        // The items of a group are counted from channel to channel, and then from tile to tile. A thread takes every
        // sharers-th.
        const int tile_stride = sharers / (unsigned)group_size;
        const int c_stride = sharers % (unsigned)group_size;
        int tile = sharer / (unsigned)group_size;
        int c = sharer % (unsigned)group_size;
        float2 sum = make_float2(0, 0);
        if (i < groups) {
#pragma unroll 4
            for (; tile < tiles; tile += tile_stride) {
                sum += item(tile, c0 + c, c0);
                c += c_stride;
                if (c >= group_size) {
                    c -= group_size;
                    tile++;
                }
            }
        }
        meanwhile();

        for (int offset = lanes / 2; offset; offset /= 2) {
            sum.x += __shfl_xor_sync(~0u, sum.x, offset);
            sum.y += __shfl_xor_sync(~0u, sum.y, offset);
        }
        if (threadIdx.x % lanes == 0) shared_sums[threadIdx.x / lanes] = sum;
        __syncthreads();

        const int group = (slab + threadIdx.x) / group_size - g0;
        float2 total = make_float2(0, 0);
        if (owner)
            for (int part = group * parts; part < (group + 1) * parts; part++) total += shared_sums[part];
        return total;
    }
};

// F.silu(F.group_norm(cat(x), G, w, bias)). A block first reads its groups' moments and merges them as Chan, Golub and
// LeVeque (1979) do, about a pivot, the mean of the group's first channel and tile. Then one thread for each channel
// computes scale and shift. Where `out` is null, the kernel only writes statistics and half_scale_shift. Device
// memory: x is read and out is written, once each.
__global__ void __launch_bounds__(NORM_THREADS, NORM_BLOCKS)
    groupnorm_forward_kernel(floatX* out, const Norm norm, NormGrid grid) {
    await_inputs();
    __shared__ alignas(16) ScaleShift half_scale_shift[NORM_CHANNELS];  // of the slab's channels
    const int T = norm.x.first.T();
    NormWork work(grid, blockIdx.x, norm);
    const floatX* source = norm.x.of(work.c).data + work.at;
    floatX* target = out + work.at_concat;

    // The group's moments are added up. Meanwhile the thread loads its first vectors of x.
    const int tiles = norm_tiles(T);
    auto moments = [&](int tile, int c) { return norm.x.moments((size_t)work.b * tiles + tile, c); };
    auto item = [&](int tile, int c, int c0) {
        const Moments m = moments(tile, c);
        const float distance = m.mean - moments(0, c0).mean;
        const float n = min((int)NORM_TILE, T - tile * NORM_TILE);
        return make_float2(n * distance, m.squares + n * distance * distance);
    };
    const int c = work.slab + threadIdx.x;  // the channel whose scale and shift this thread computes
    ScaleShift modulated;
    uint4 in[NORM_DEPTH];
    const float2 sum = work.group_sum(tiles, item, [&] {
        if (work.owner) modulated = norm.modulated(work.b, c);
        for (int i = 0; i < NORM_DEPTH; i++)
            if (out && work.t + i * work.stride < T) {
                in[i] = *(const uint4*)source;
                source += work.step;
            }
    });

    if (work.owner) {
        const float n = (float)work.group_size * T;
        const float distance = sum.x / n;  // from the pivot to the mean
        const float mean = moments(0, c - c % work.group_size).mean + distance;
        const float variance = fmaxf(0, sum.y - sum.x * distance) / n;
        const float rstd = rsqrtf(variance + NORM_EPS);
        const float scale = modulated.scale * rstd;
        const float shift = modulated.shift - mean * scale;

        const float factor = norm.silu ? 0.5f : 1;
        const ScaleShift half = {factor * scale, factor * shift};
        const size_t at = (size_t)work.b * norm.x.C() + c;
        half_scale_shift[threadIdx.x] = half;
        if (work.block == 0) {
            norm.statistics[at] = {mean, rstd};
            norm.half_scale_shift[at] = half;
        }
    }
    __syncthreads();

    const auto half = load<VEC>(half_scale_shift + work.c - work.slab);
    for (int t = work.t; out && t < T; t += NORM_DEPTH * work.stride)
        for (int i = 0; i < NORM_DEPTH; i++) {
            if (t + i * work.stride >= T) break;
            Unpacked y = unpack(in[i]);
            if (t + (i + NORM_DEPTH) * work.stride < T) {  // the next vector is under way while this one is normed
                in[i] = *(const uint4*)source;
                source += work.step;
            }
            for (int e = 0; e < VEC; e++) y[e] = y[e] * half[e].scale + half[e].shift;
            if (norm.silu)
                for (int e = 0; e < VEC; e++) y[e] = silu_of_half(y[e]);
            *(uint4*)target = pack(y);
            target += work.step_concat;
        }
}

static void groupnorm_forward(Tensor out, const Norm& norm) {
    PROFILE("group norm forward",
            {0, out ? 2.0 * sizeof(floatX) * out.count()
                    : (double)sizeof(Moments) * norm.x.first.B * norm_tiles(norm.x.first.T()) * norm.x.C()});
    assert(norm.x.first.moments && (norm.x.second.moments || !norm.x.second));
    NormGrid grid(norm.x, 0);
    if (!out) grid.blocks = 1;
    const int blocks = grid.blocks * grid.slabs * norm.x.first.B;
    launch(groupnorm_forward_kernel, blocks, NORM_THREADS, 0, out.data, norm, grid);
}

__device__ inline float2 weighted(NormSums sums, float weight) {
    return make_float2(sums.dy * weight, sums.dy_x_hat * weight);
}

// dbias, dw (C) = sums (B tiles, C).sum(0), each row of which is weighted by its image's gain if MODULATED. A block
// computes those of 32 channels: a lane has one of them, and a warp every WARPS-th row.
template <bool MODULATED>  // a test of each row would make the loads wait for each other
__device__ inline void norm_weights(const Norm& norm, int tiles) {
    enum { WARPS = NORM_THREADS / 32 };
    __shared__ float2 shared_sums[WARPS][32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int c = blockIdx.x * 32 + lane;
    float2 total = make_float2(0, 0);
#pragma unroll 8
    for (int row = warp; row < norm.x.first.B * tiles; row += WARPS) {
        const NormSums sums = norm.sums[(size_t)row * norm.x.C() + c];
        total += weighted(sums, MODULATED ? norm.gain(row / tiles, c) : 1);
    }
    shared_sums[warp][lane] = total;
    __syncthreads();

    if (warp > 0) return;
    for (int i = 1; i < WARPS; i++) total += shared_sums[i][lane];
    norm.dbias[c] = total.x;
    norm.dw[c] = total.y;
}

// dx = rstd (w dy - (sum w dy + x_hat sum w dy x_hat) / N), + dresidual with RESIDUAL, + the old dx with ACCUMULATE.
// The kernel also writes `normed`, which is the norm's output once more. Each block first adds up its groups' sums;
// the first weight_blocks blocks instead make dw and dbias. Device memory: x, dy and dresidual are read, normed and dx
// are written (with ACCUMULATE dx is also read), once each. Section 3 says which of them may be the same tensor.
template <bool RESIDUAL, bool ACCUMULATE>  // arguments instead would be 2% slower on an H100
__global__ void __launch_bounds__(NORM_THREADS, NORM_BLOCKS)
    groupnorm_backward_kernel(const Concat dx, floatX* normed, const floatX* dy, const floatX* dresidual,
                              const Norm norm, NormGrid grid, int weight_blocks) {
    await_inputs();
    __shared__ struct alignas(16) {  // dx = scale dy - (x alpha + beta), and normed = x scale + shift
        float alpha[NORM_CHANNELS], beta[NORM_CHANNELS];
        float scale[NORM_CHANNELS], shift[NORM_CHANNELS];
    } slab;
    const int T = norm.x.first.T();
    const int C = norm.x.C();
    const int tiles = norm_tiles(T);
    if ((int)blockIdx.x < weight_blocks) {
        if (norm.modulation.data) norm_weights<true>(norm, tiles);
        else norm_weights<false>(norm, tiles);
        return;
    }

    NormWork work(grid, blockIdx.x - weight_blocks, norm);
    const floatX* x_from = norm.x.of(work.c).data + work.at;
    const floatX* dy_from = dy + work.at_concat;
    const floatX* residual_from = RESIDUAL ? dresidual + work.at : nullptr;
    floatX* dx_to = dx.of(work.c).data + work.at;
    floatX* normed_to = normed + work.at_concat;
    uint4 x_bits, dy_bits, residual, old;
    auto load_pixel = [&] {
        x_bits = *(const uint4*)x_from;
        x_from += work.step;
        dy_bits = *(const uint4*)dy_from;
        dy_from += work.step_concat;
        if (RESIDUAL) {
            residual = *(const uint4*)residual_from;
            residual_from += work.step;
        }
        if (ACCUMULATE) old = *(const uint4*)dx_to;
    };

    // The group's sums of w dy and w dy x_hat are added up. Meanwhile the thread loads its first pixel.
    const NormSums* sums = norm.sums + (size_t)work.b * tiles * C;
    auto item = [&](int tile, int c, int) {
        return weighted(sums[tile * C + c], norm.w[c] * norm.gain(work.b, c));
    };
    GroupStatistics statistics;
    ScaleShift half;
    const float2 sum = work.group_sum(tiles, item, [&] {
        const size_t at = (size_t)work.b * C + work.slab + threadIdx.x;
        if (work.owner) {
            statistics = norm.statistics[at];
            half = norm.half_scale_shift[at];
        }
        if (work.t < T) load_pixel();
    });

    if (work.owner) {
        const float n = (float)work.group_size * T;
        const float mean = statistics.mean;
        const float rstd = statistics.rstd;
        const float alpha = rstd * rstd * sum.y / n;
        const float whole = norm.silu ? 2 : 1;  // with SiLU, scale and shift are halved
        slab.alpha[threadIdx.x] = alpha;
        slab.beta[threadIdx.x] = rstd * sum.x / n - mean * alpha;
        slab.scale[threadIdx.x] = whole * half.scale;
        slab.shift[threadIdx.x] = whole * half.shift;
    }
    __syncthreads();

    // All but `scale` are loaded again for each pixel, because holding them in registers is 2% slower on an H100.
    const int c = work.c - work.slab;
    const Unpacked scale = norm_reload(&slab.scale[c]);
    for (int t = work.t; t < T; t += work.stride) {
        Unpacked x = unpack(x_bits);
        Unpacked d = unpack(dy_bits);
        const Unpacked beta = norm_reload(&slab.beta[c]);
        for (int e = 0; e < VEC; e++) d[e] = scale[e] * d[e] - beta[e];
        const Unpacked alpha = norm_reload(&slab.alpha[c]);
        for (int e = 0; e < VEC; e++) d[e] -= x[e] * alpha[e];

        const Unpacked shift = norm_reload(&slab.shift[c]);
        for (int e = 0; e < VEC; e++) x[e] = x[e] * scale[e] + shift[e];
        if (norm.silu)
            for (int e = 0; e < VEC; e++) x[e] = silu_of_half(0.5f * x[e]);
        *(uint4*)normed_to = pack(x);
        normed_to += work.step_concat;

        if (RESIDUAL) d += unpack(residual);
        if (ACCUMULATE) d += unpack(old);
        *(uint4*)dx_to = pack(d);
        dx_to += work.step;
        if (t + work.stride < T) load_pixel();
    }
}

static void groupnorm_backward(Concat dx, Tensor normed, Tensor dy, const Norm& norm, BackwardOptions options) {
    const bool has_residual = !!options.residual;
    PROFILE("group norm backward", {0, (4.0 + has_residual + options.accumulate) * sizeof(floatX) * dy.count()});
    typedef decltype(&groupnorm_backward_kernel<false, false>) Kernel;
    static const Kernel KERNELS[2][2] = {  // [has_residual][accumulate]
        {groupnorm_backward_kernel<false, false>, groupnorm_backward_kernel<false, true>},
        {groupnorm_backward_kernel<true, false>, groupnorm_backward_kernel<true, true>},
    };
    const Kernel kernel = KERNELS[has_residual][options.accumulate];

    const int weight_blocks = dy.C / 32;
    const NormGrid grid(norm.x, weight_blocks);
    const int blocks = weight_blocks + grid.blocks * grid.slabs * dy.B;
    launch(kernel, blocks, NORM_THREADS, 0, dx, normed.data, dy.data, options.residual.data, norm, grid, weight_blocks);
}

// ---- attention --------------------------------------------------------------------------------------------
// A block owns ROWS rows (queries, or in backward also keys) of one head of one image, and each warp 16 of them. The
// block goes through the other side, keys or queries, in tiles of COLUMNS rows, so that T x T is never stored and any
// T works. Heads are padded with zeros to D channels. Sums and scores lie in registers as mma lays them out, in fp32
// too, where no mma is used. fp32 has fewer rows, because the shared memory of an RTX 30 or 40 (99 KB) must hold them
// with heads of 128.
enum { ATTENTION_ROWS = sizeof(floatX) == 4 ? 32 : 64 };
static constexpr float LOG2_E = 1.44269504f;  // e^x = 2^(x LOG2_E); 2^x is an instruction in bf16

// The rows of a tile in backward, for heads padded to D channels.
static constexpr int attention_backward_columns(int D) {
    if (D > 128) return 16;
    if (D > 80) return ATTENTION_ROWS / 2;
    return ATTENTION_ROWS;
}

// Blocks on a multiprocessor in forward. With 6, heads of up to 32 are one wave at B = 32, T = 256 on an H100 in bf16.
static constexpr int attention_forward_blocks(int D) {
    if (D > 64) return 2;
    if (D > 32) return 3;
    return 6;
}

// Blocks on a multiprocessor in backward. At the same sizes, on an H100, heads of up to 32 take 40 us with 4; with 3
// they take 43 us, and with 5 and tiles of 32 rows 48 us.
static constexpr int attention_backward_blocks(int D) { return D > 32 ? attention_forward_blocks(D) : 4; }

// q, k, v, the output or a gradient of one head of an image: T rows of d channels, `stride` apart.
struct AttentionHead {
    floatX* data;
    int stride, T, d;
    __device__ floatX* at(int t, int c) const { return data + (size_t)t * stride + c; }
    __device__ bool holds(int t, int c) const { return t < T && c < d; }
};

// The arguments of attention. Backward moves the pointers to the image and head of the block; forward moves only qkv.
struct Attention {
    floatX *dqkv = nullptr, *dout = nullptr;  // null in forward
    floatX *out, *qkv;
    float* lse;  // (B, heads, T)
    int T, C, d;
    float scale;
    // A head's q, k or v, or the gradient of one.
    __device__ AttentionHead input(floatX* qkv, int which) const { return {qkv + which * C, 3 * C, T, d}; }
    // A head's output, or the gradient of it.
    __device__ AttentionHead output(floatX* out) const { return {out, C, T, d}; }
};

enum { ATTENTION_Q, ATTENTION_K, ATTENTION_V };

// The work of a block, for heads padded to D channels. Wide heads get small tiles, as shared memory and registers ask.
template <int D> struct AttentionTile : Attention {
    static constexpr int ROWS = D > 128 ? ATTENTION_ROWS / 2 : ATTENTION_ROWS;
    static constexpr int THREADS = 2 * ROWS;
    static constexpr int COLUMNS = D > 128 ? 16 : ATTENTION_ROWS;
    static constexpr int BACKWARD_COLUMNS = attention_backward_columns(D);
    static constexpr int BLOCKS = attention_forward_blocks(D);
    static constexpr int BACKWARD_BLOCKS = attention_backward_blocks(D);
    static constexpr int VECTORS = D / VEC;  // of a row

    // A row of D channels. Its pad of 16 bytes keeps ldmatrix free of bank conflicts.
    struct Row {
        floatX at[D + VEC];
    };
    // What a block keeps in shared memory: its own rows once, and the other side's in two stages, [stage][row].
    struct Forward {
        Row q[ROWS];
        Row k[2][COLUMNS], v[2][COLUMNS];
    };
    struct BackwardKeys {
        Row k[ROWS], v[ROWS];
        Row q[2][BACKWARD_COLUMNS], dout[2][BACKWARD_COLUMNS], out[2][BACKWARD_COLUMNS];
        float delta[BACKWARD_COLUMNS], exponent[BACKWARD_COLUMNS];  // see find_delta
    };
    struct BackwardQueries {
        Row q[ROWS], dout[ROWS];
        Row k[2][BACKWARD_COLUMNS], v[2][BACKWARD_COLUMNS];
        Row out[ROWS];
        float delta[ROWS], exponent[ROWS];
    };
    union Backward {
        BackwardKeys keys;
        BackwardQueries queries;
    };

    // Where mma leaves element i of fragment n: its row among the block's rows, and its column in the tile. A lane has
    // two rows, the first of which holds elements 0 and 1 of every fragment, and the second elements 2 and 3.
    __device__ static int row(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 * 8; }
    __device__ static int column(int n, int i) { return n * 8 + threadIdx.x % 4 * 2 + i % 2; }

    // Begins to copy COUNT rows of a head, from t0 on, to shared memory; zeros where the head has no row or channel.
    template <int COUNT> __device__ static void load_rows(Row (&tile)[COUNT], AttentionHead source, int t0) {
        UNROLLED_FOR (int n = 0; n < COUNT * VECTORS / THREADS; n++) {
            const unsigned i = n * THREADS + threadIdx.x;
            const int row = i / VECTORS;
            const int c = i % VECTORS * VEC;
            copy_async(shared_address(&tile[row].at[c]), source.at(t0 + row, c), source.holds(t0 + row, c));
        }
    }

    // scores (16, 8 N) += the warp's rows of a (ROWS, D) times b^T, where b is (8 N, D).
    template <int N>
    __device__ static void add_scores(float (&scores)[N][4], const Row* a, const Row* b) {
#ifdef PRECISION_FP32
        for (int k = 0; k < D; k += VEC)
            UNROLLED_FOR (int n = 0; n < N; n++)
                UNROLLED_FOR (int i = 0; i < 4; i++) {
                    Unpacked left = unpack(&a[row(i)].at[k]);
                    Unpacked right = unpack(&b[column(n, i)].at[k]);
                    for (int c = 0; c < VEC; c++) scores[n][i] += left[c] * right[c];
                }
#else
        const int lane = threadIdx.x % 32;
        const int row0 = threadIdx.x / 32 * 16;  // the warp's first row
        UNROLLED_FOR (int k = 0; k < D; k += 16) {
            uint32_t left[4], right[4];
            load_matrices(left, shared_address(&a[row0 + lane % 16].at[k + lane / 16 * 8]));
            UNROLLED_FOR (int n = 0; n < 8 * N; n += 16) {
                const Row& row = b[n + lane / 16 * 8 + lane % 8];
                load_matrices(right, shared_address(&row.at[k + lane / 8 % 2 * 8]));
                mma(scores[n / 8], left, right[0], right[1]);
                mma(scores[n / 8 + 1], left, right[2], right[3]);
            }
        }
#endif
    }
    // Makes the scores of columns past the last minus infinity, so that their probabilities are 0.
    template <int N> __device__ static void mask(float (&scores)[N][4], int columns) {
        if (columns >= 8 * N) return;
        UNROLLED_FOR (int n = 0; n < N; n++)
            for (int i = 0; i < 4; i++)
                if (column(n, i) >= columns) scores[n][i] = -INFINITY;
    }

    // sum (16, D) += p (16, 8 N) b, where p lies in registers as add_scores leaves it, and b is (8 N, D).
    template <int N>
    __device__ static void add_weighted(float (&sum)[D / 8][4], const float (&p)[N][4], const Row* b) {
        const int lane = threadIdx.x % 32;
        UNROLLED_FOR (int k = 0; k < 8 * N; k += 16) {
#ifdef PRECISION_FP32
            float left[2][16];  // p's 16 columns in the lane's two rows, which four lanes share
            UNROLLED_FOR (int row = 0; row < 2; row++)
                UNROLLED_FOR (int c = 0; c < 16; c++) {
                    const int owner = lane / 4 * 4 + c % 8 / 2;  // the lane that has column c
                    left[row][c] = __shfl_sync(~0u, p[k / 8 + c / 8][2 * row + c % 2], owner);
                }
            UNROLLED_FOR (int n = 0; n < D / 8; n++)
                UNROLLED_FOR (int i = 0; i < 4; i++) {
                    float of_16 = 0;
                    for (int c = 0; c < 16; c++) of_16 += left[i / 2][c] * b[k + c].at[column(n, i)];
                    sum[n][i] += of_16;
                }
#else
            const float* p0 = p[k / 8];
            const float* p1 = p[k / 8 + 1];
            const uint32_t left[4] = {
                pack_bf16(p0[0], p0[1]),
                pack_bf16(p0[2], p0[3]),
                pack_bf16(p1[0], p1[1]),
                pack_bf16(p1[2], p1[3]),
            };
            UNROLLED_FOR (int n = 0; n < D; n += 16) {
                uint32_t right[4];
                load_matrices_transposed(right, shared_address(&b[k + lane % 16].at[n + lane / 16 * 8]));
                mma(sum[n / 8], left, right[0], right[1]);
                mma(sum[n / 8 + 1], left, right[2], right[3]);
            }
#endif
        }
    }

    // Stores the warp's 16 rows of a sum (ROWS, D), by way of shared memory, so that device memory is written 16 bytes
    // at a time. The lane's first row is multiplied by factors.x, its second by factors.y.
    __device__ static void store_rows(AttentionHead target, int t0, Row* scratch,
                                      const float sum[D / 8][4], float2 factors) {
        const int lane = threadIdx.x % 32;
        const int row0 = threadIdx.x / 32 * 16;
        __syncwarp();
        UNROLLED_FOR (int n = 0; n < D / 8; n++)
            UNROLLED_FOR (int i = 0; i < 4; i += 2) {
                float factor = i ? factors.y : factors.x;
                floatX* pair = &scratch[row0 + lane / 4 + i * 4].at[n * 8 + lane % 4 * 2];
                store<2>(pair, {(floatX)(sum[n][i] * factor), (floatX)(sum[n][i + 1] * factor)});
            }
        __syncwarp();

        UNROLLED_FOR (int n = 0; n < 16 * VECTORS / 32; n++) {
            const unsigned i = n * 32 + lane;
            const int row = row0 + i / VECTORS;
            const int c = i % VECTORS * VEC;
            if (target.holds(t0 + row, c)) *(uint4*)target.at(t0 + row, c) = *(uint4*)&scratch[row].at[c];
        }
    }

    // Goes through the other side, N rows at a time. load(stage, t) begins to copy the rows from t on to one of two
    // stages. use(stage, t) is called when they have come, while the next ones are on their way.
    template <int N> __device__ void for_each_tile(auto load, auto use) const {
        load(0, 0);
        __pipeline_commit();
        for (int t = 0; t < T; t += N) {
            const int stage = t / N % 2;
            if (t + N < T) load(!stage, t + N);
            __pipeline_commit();
            __pipeline_wait_prior(1);
            __syncthreads();
            use(stage, t);
            __syncthreads();  // the stage is free
        }
    }

    // A step of the running softmax, for row 0 or 1 of the lane's two. Replaces the row's scores p by exponentials
    // relative to the highest score so far. Returns the factor that corrects what was added up relative to the maximum
    // before. `unit` times a score is an exponent of 2.
    template <int N>
    __device__ static float softmax_step(float (&p)[N][4], float& maximum, float& denominator, int row, float unit) {
        float highest = maximum;
        UNROLLED_FOR (int n = 0; n < N; n++)
            for (int i = 2 * row; i < 2 * row + 2; i++) highest = fmaxf(highest, p[n][i]);
        for (int offset = 1; offset < 4; offset *= 2)
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, offset));

        const float correction = exp2_fast((maximum - highest) * unit);
        const float shift = highest * unit;
        float added = 0;
        UNROLLED_FOR (int n = 0; n < N; n++)
            for (int i = 2 * row; i < 2 * row + 2; i++) {
                p[n][i] = exp2_fast(p[n][i] * unit - shift);
                added += p[n][i];
            }

        denominator *= correction;
        denominator += added;
        maximum = highest;
        return correction;
    }

    // F.scaled_dot_product_attention(q, k, v) with a running maximum and denominator: Dao, "FlashAttention-2" (2023),
    // algorithm 1. A block does ROWS queries of a head of an image. Device memory: q is read and out is written once;
    // each block reads all of k and v.
    __device__ void forward() {
        auto& s = shared_memory<Forward>();
        const int head = blockIdx.y;
        const int b = blockIdx.z;
        const int t0 = blockIdx.x * ROWS;
        qkv += (size_t)b * T * 3 * C + head * d;
        const AttentionHead k = input(qkv, ATTENTION_K);
        const AttentionHead v = input(qkv, ATTENTION_V);
        load_rows(s.q, input(qkv, ATTENTION_Q), t0);
        auto load = [&](int stage, int t) {
            load_rows(s.k[stage], k, t);
            load_rows(s.v[stage], v, t);
        };

        const float unit = scale * LOG2_E;
        float sum[D / 8][4] = {};
        float maximum[2] = {-INFINITY, -INFINITY};  // of the scores of the lane's two rows
        float denominator[2] = {};                  // of these rows, but only from the lane's own columns
        for_each_tile<COLUMNS>(load, [&](int stage, int t) {
            float p[COLUMNS / 8][4] = {};
            add_scores(p, s.q, s.k[stage]);
            mask(p, T - t);
            UNROLLED_FOR (int row = 0; row < 2; row++) {
                const float correction = softmax_step(p, maximum[row], denominator[row], row, unit);
                UNROLLED_FOR (int n = 0; n < D / 8; n++)
                    for (int i = 2 * row; i < 2 * row + 2; i++) sum[n][i] *= correction;
            }
            add_weighted(sum, p, s.v[stage]);
        });

        for (int row = 0; row < 2; row++) {
            for (int offset = 1; offset < 4; offset *= 2)
                denominator[row] += __shfl_xor_sync(~0u, denominator[row], offset);
            const int t = t0 + AttentionTile::row(2 * row);
            if (threadIdx.x % 4 == 0 && t < T)
                lse[((size_t)b * gridDim.y + head) * T + t] = maximum[row] * scale + logf(denominator[row]);
        }
        const AttentionHead target = output(out + (size_t)b * T * C + head * d);
        store_rows(target, t0, s.q, sum, {1 / denominator[0], 1 / denominator[1]});
    }

    // For COUNT queries from t0 on: delta, which is FlashAttention-2's D_i = sum_j dout_ij out_ij, and exponent, which
    // is the lse as an exponent of 2. Past the last query the exponent is infinite, so that its probability is 0.
    template <int COUNT>
    __device__ void find_delta(float (&delta)[COUNT], float (&exponent)[COUNT], const Row (&dout)[COUNT],
                               const Row (&out)[COUNT], int t0) const {
        const int threads = THREADS / COUNT;  // that share a row
        const int row = threadIdx.x / threads;
        const int c0 = threadIdx.x % threads * VEC;
        float sum = 0;
        for (int c = c0; c < D; c += threads * VEC) {
            const Unpacked x = unpack(&dout[row].at[c]);
            const Unpacked y = unpack(&out[row].at[c]);
            for (int i = 0; i < VEC; i++) sum += x[i] * y[i];
        }
        for (int offset = 1; offset < threads; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        if (c0) return;
        delta[row] = sum;
        exponent[row] = t0 + row < T ? lse[t0 + row] * LOG2_E : INFINITY;
    }
    // Overwrites p, the scores q k^T, by the probabilities P, and ds, which is dout v^T, by dS / scale. query(n, i) is
    // the index, in delta and exponent, of the query that element i of fragment n belongs to.
    template <int N>
    __device__ void softmax_backward(float (&p)[N][4], float (&ds)[N][4], const float* delta, const float* exponent,
                                     auto query) const {
        UNROLLED_FOR (int n = 0; n < N; n++)
            UNROLLED_FOR (int i = 0; i < 4; i++) {
                p[n][i] = exp2_fast(p[n][i] * (scale * LOG2_E) - exponent[query(n, i)]);
                ds[n][i] = p[n][i] * (ds[n][i] - delta[query(n, i)]);
            }
    }

    // Computes dk and dv of the block's keys, from t0 on, from all queries.
    __device__ void backward_keys(int t0) const {
        auto& s = shared_memory<BackwardKeys>();
        load_rows(s.k, input(qkv, ATTENTION_K), t0);
        load_rows(s.v, input(qkv, ATTENTION_V), t0);
        auto load = [&](int stage, int t) {
            load_rows(s.q[stage], input(qkv, ATTENTION_Q), t);
            load_rows(s.dout[stage], output(dout), t);
            load_rows(s.out[stage], output(out), t);
        };

        float dk[D / 8][4] = {}, dv[D / 8][4] = {};
        for_each_tile<BACKWARD_COLUMNS>(load, [&](int stage, int t) {
            find_delta(s.delta, s.exponent, s.dout[stage], s.out[stage], t);
            __syncthreads();

            // Here both are transposed: a row is a key, and a column is a query.
            float p[BACKWARD_COLUMNS / 8][4] = {}, ds[BACKWARD_COLUMNS / 8][4] = {};
            add_scores(p, s.k, s.q[stage]);
            add_scores(ds, s.v, s.dout[stage]);
            softmax_backward(p, ds, s.delta, s.exponent, [](int n, int i) { return column(n, i); });
            add_weighted(dk, ds, s.q[stage]);
            add_weighted(dv, p, s.dout[stage]);
        });
        store_rows(input(dqkv, ATTENTION_K), t0, s.k, dk, {scale, scale});
        store_rows(input(dqkv, ATTENTION_V), t0, s.v, dv, {1, 1});
    }

    // Computes dq of the block's queries, from t0 on, from all keys.
    __device__ void backward_queries(int t0) const {
        auto& s = shared_memory<BackwardQueries>();
        load_rows(s.q, input(qkv, ATTENTION_Q), t0);
        load_rows(s.dout, output(dout), t0);
        load_rows(s.out, output(out), t0);
        auto load = [&](int stage, int t) {
            load_rows(s.k[stage], input(qkv, ATTENTION_K), t);
            load_rows(s.v[stage], input(qkv, ATTENTION_V), t);
        };

        float dq[D / 8][4] = {};
        for_each_tile<BACKWARD_COLUMNS>(load, [&](int stage, int t) {
            if (t == 0) find_delta(s.delta, s.exponent, s.dout, s.out, t0);
            __syncthreads();

            float p[BACKWARD_COLUMNS / 8][4] = {}, ds[BACKWARD_COLUMNS / 8][4] = {};
            add_scores(p, s.q, s.k[stage]);
            mask(p, T - t);
            add_scores(ds, s.dout, s.v[stage]);
            softmax_backward(p, ds, s.delta, s.exponent, [](int, int i) { return row(i); });
            add_weighted(dq, ds, s.k[stage]);
        });
        store_rows(input(dqkv, ATTENTION_Q), t0, s.q, dq, {scale, scale});
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS) attention_forward_kernel(Tile a) {
    await_inputs();
    a.forward();
}

// With P = exp(q k^T scale - lse) and dS = P (dout v^T - D) scale: dq = dS k, dk = dS^T q, dv = P^T dout. The grid is
// (ROWS queries or keys, head, image). The first half of its x makes dk and dv, the second half dq; both recompute P.
// Device memory: a block's own rows are read once; each block reads all of the other side, mostly from the L2.
template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BACKWARD_BLOCKS) attention_backward_kernel(Tile a) {
    await_inputs();
    const int head = blockIdx.y;
    const int b = blockIdx.z;
    const int tiles = gridDim.x / 2;
    const int t0 = blockIdx.x % tiles * Tile::ROWS;
    const size_t at = (size_t)b * a.T * a.C + head * a.d;
    const size_t at_qkv = (size_t)b * a.T * 3 * a.C + head * a.d;
    a.lse += ((size_t)b * gridDim.y + head) * a.T;
    a.dqkv += at_qkv;
    a.qkv += at_qkv;
    a.dout += at;
    a.out += at;

    if (blockIdx.x < tiles) a.backward_keys(t0);
    else a.backward_queries(t0);
}

// Calls launch_tile(AttentionTile<D>()), where D is the number of channels that heads of d are padded to.
static void with_padded_head(int d, auto launch_tile) {
    assert(d % 8 == 0 && d <= MAX_HEAD);
    if (d <= 32) launch_tile(AttentionTile<32>());
    else if (d <= 64) launch_tile(AttentionTile<64>());
    else if (d <= 80) launch_tile(AttentionTile<80>());
    else if (d <= 128) launch_tile(AttentionTile<128>());
    else launch_tile(AttentionTile<MAX_HEAD>());
}

static Attention attention_of(Tensor out, float* lse, Tensor qkv, int heads) {
    const int d = out.C / heads;
    const float scale = 1 / sqrtf((float)d);
    return {.out = out.data, .qkv = qkv.data, .lse = lse, .T = out.T(), .C = out.C, .d = d, .scale = scale};
}

static void attention_forward(Tensor out, float* lse, Tensor qkv, int heads) {
    PROFILE("attention forward", {4.0 * out.T() * out.count(), 4.0 * sizeof(floatX) * out.count()});
    const Attention a = attention_of(out, lse, qkv, heads);
    with_padded_head(a.d, [&]<class Tile>(Tile) {
        const dim3 grid(ceil_div(a.T, Tile::ROWS), heads, out.B);
        launch(attention_forward_kernel<Tile>, grid, Tile::THREADS, sizeof(typename Tile::Forward), Tile{a});
    });
}

static void attention_backward(Tensor dqkv, Tensor dout, Tensor out, const float* lse, Tensor qkv, int heads) {
    PROFILE("attention backward", {8.0 * out.T() * out.count(), 8.0 * sizeof(floatX) * out.count()});
    Attention a = attention_of(out, (float*)lse, qkv, heads);
    a.dqkv = dqkv.data;
    a.dout = dout.data;
    with_padded_head(a.d, [&]<class Tile>(Tile) {
        const dim3 grid(2 * ceil_div(a.T, Tile::ROWS), heads, out.B);
        launch(attention_backward_kernel<Tile>, grid, Tile::THREADS, sizeof(typename Tile::Backward), Tile{a});
    });
}

// ---- linear layers, 1x1 and 3x3 convolutions --------------------------------------------------------------
// Every linear layer and convolution is one of two kernels, or section 12's for the same; attention has its own:
//   gemm_kernel             out (M, N) = A (M, K) B (K, N), forward and input gradients: a tile per block;
//   weight_gradient_kernel  dw = dout^T A: the reduction runs over the pixels, split over blocks.
// A's row m is pixel m's channels (1x1), or its 3x3 neighbourhood, which is never written out: a block loads
// its patch of the image with a halo of one pixel once per 128 bytes of channels, and the nine taps read it
// at shifted rows. In bf16 the arithmetic is mma.sync on tensor cores with fp32 accumulators; in fp32 plain
// FMAs (never tf32). Both share the loads, and all kernels, Hopper's too, one layout of shared memory:
//
//   row 0   |0|1|2|3|4|5|6|7|    A row is 128 bytes of channels (some are 256), eight 16-byte vectors; vector
//   row 1   |1|0|3|2|5|4|7|6|    v of row r is stored at v ^ (r % 8). So one vector of eight consecutive rows
//   row 2   |2|3|0|1|6|7|4|5|    lies in eight different banks, and a row is still written whole. TMA
//   ...                          and wgmma know this as the 128-byte swizzle.
//   row 7   |7|6|5|4|3|2|1|0|

enum { BK = 8 * VEC };  // channels of a 128-byte row: the depth of a step of gemm_kernel

// ---- vectors and instructions

// The bytes from a tile's start to vector v of row r.
__device__ inline int swizzled(int r, int v, int row_bytes = 128) {
    return r * row_bytes + ((v ^ (r & 7)) << 4);
}

// p + n * pitch. Unsigned factors make this a single multiplication of 32 bits.
__device__ inline const floatX* rows_from(const floatX* p, unsigned n, unsigned pitch) {
    return (const floatX*)((const char*)p + (size_t)n * (pitch * (unsigned)sizeof(floatX)));
}

// Copies a thread's vectors to shared memory: one to each of n rows that lie SWEEP apart, where n is at most N. The
// vector for the row that is i further down comes from pixel_of(i). It is zero where there is no such pixel: -1, or
// not below `pixels`.
template <int N, int SWEEP, int ROW_BYTES = 128>
__device__ __forceinline__ void load_pixels(uint32_t to, int n, const floatX* from, unsigned channels,
                                            unsigned pixels, auto pixel_of) {
    unsigned m[N];  // all pixels are known before the first copy, so that no copy waits for the next one's
    UNROLLED_FOR (int i = 0; i < N; i++) m[i] = i < n ? pixel_of(i * SWEEP) : 0;
    UNROLLED_FOR (int i = 0; i < N; i++)
        if (i < n) copy_async(to + i * SWEEP * ROW_BYTES, rows_from(from, m[i], channels), m[i] < pixels);
}

template <int N> __device__ inline Vector<float, N> load_shared(uint32_t address) {
    return load<N>((const float*)__cvta_shared_to_generic(address));
}

// ---- patches: the pixels of a 3x3 convolution's tile

struct Pixel {
    int b, y, x;
};

// The tensor as a kernel sees it: for 1x1 all pixels are one line, since no pixel has neighbours.
static Tensor shaped(Tensor x, int taps) { return taps > 1 ? x : Tensor{x.data, 1, 1, x.rows(), x.C}; }

// How a tensor is cut into tiles. A tile is `images` patches of 8 x width pixels, width a multiple of 8, so that one ldmatrix
// reads eight neighbours. With its halo a patch is (8 + 2) * (width + 2) rows of shared memory, here for width 8:
//
//      0   1  2  3  4  5  6  7  8   9   Pixel 0 of the tile stands at row 11, pixel 7 at row 18, pixel 8 at
//     10 [11 12 13 14 15 16 17 18] 19  row 21. The outer ring is the halo. row(p) is where the neighbourhood
//     20 [21 22 23 24 25 26 27 28] 29  of pixel p begins, at its upper left: row(0) is 0 and row(8) is 10.
//     ...                              tap(t) is added to reach tap t: 0 1 2, 10 11 12, 20 21 22; so the
//     90  91 92 93 94 95 96 97 98  99   pixel itself, tap 4, is 11 rows further.
struct Tiling {
    int B, H, W;                  // of the tensor
    int images, height, width;    // of a tile; portable kernels for 3x3 have a height of 8, and a width of 8 or 16
    int tiles_y, tiles_x, tiles;  // down and across an image, and in all

    // The images of a tile are a set. A set has this many tiles.
    __host__ __device__ int set_tiles() const { return tiles_y * tiles_x; }
    __host__ __device__ int rows() const { return images * 10 * (width + 2); }

    __device__ int row(int p) const {
        int y = width == 16 ? p / 16 : p / 8;
        int x = p % 8 + (p & 8 & (width - 1));  // p % width
        int halo_lines = y / 8 * 2;             // between this image of the tile and the first
        return (y + halo_lines) * (width + 2) + x;
    }
    __device__ int tap(int t) const { return t / 3 * (width + 2) + t % 3; }

    // A row's column, line and image in the tile with its halo.
    __device__ uchar4 offset(int row) const {
        int line = width == 16 ? row / 18 : row / 10;
        int image = line / 10;
        return make_uchar4(row - line * (width + 2), line - image * 10, image, 0);
    }
    // The first pixel of a tile.
    __device__ Pixel origin(int tile) const {
        const int line = (unsigned)tile / tiles_x;
        const int set = (unsigned)line / tiles_y;
        return {set * images, (line - set * tiles_y) * height, (tile - line * tiles_x) * width};
    }
    // A pixel's index in (B, H, W), or -1 outside.
    __device__ int pixel(Pixel origin, uchar4 offset) const {
        int b = origin.b + offset.z;
        int y = origin.y + offset.y - 1;
        int x = origin.x + offset.x - 1;
        bool inside = b < B && (unsigned)y < (unsigned)H && (unsigned)x < (unsigned)W;
        return inside ? (b * H + y) * W + x : -1;
    }
};

struct Box {
    int width, height, images;  // pixels of a tile, or of a TMA copy
};

static Tiling make_tiling(const Tensor& x, Box tile) {
    int tiles_y = ceil_div(x.H, tile.height);
    int tiles_x = ceil_div(x.W, tile.width);
    return {.B = x.B,
            .H = x.H,
            .W = x.W,
            .images = tile.images,
            .height = tile.height,
            .width = tile.width,
            .tiles_y = tiles_y,
            .tiles_x = tiles_x,
            .tiles = tiles_y * tiles_x * ceil_div(x.B, tile.images)};
}

// 64 pixels are 8 x 8; 128 are 8 x 16, or 8 x 8 of two images if these are no wider.
static Tiling make_tiling(const Tensor& x, int taps, int pixels) {
    if (taps == 1) return make_tiling(shaped(x, 1), {pixels, 1, 1});
    if (pixels == 128 && x.W <= 8) return make_tiling(x, {8, 8, 2});
    return make_tiling(x, {pixels / 8, 8, 1});
}

// ---- forward and input gradient

struct Gemm {
    Concat out;                    // (M, N), of M pixels
    Concat residual = {};          // (M, N), added; may be out itself
    Concat x;                      // (M, K)
    const floatX* w;               // forward (N, taps, K); input gradient (K, taps, N), taps flipped
    const floatX* bias = nullptr;  // (N)
    Rows emb = {};                 // (B, N)
    Norm norm = {};                // Backward.norm: `out` is the gradient of its output
    float2* sums = nullptr;        // (B, tiles, N): forward the output's Moments, backward norm's NormSums; null: not made
    Tiling tiling = {};
    int splits = 1;            // how many blocks share a tile's chunks
    int chunks_a_split = 0;    // how many chunks of a tile each of these blocks adds up
    float* partial = nullptr;  // (splits, M, N), where splits > 1
    float alpha = 1, beta = 1;  // of multiply_matrices: the factors of the product, and of what is added to it
    __host__ __device__ int M() const { return x.first.rows(); }
    __host__ __device__ int N() const { return out.C(); }
    // A chunk is BK of K's channels, which all lie in one tensor of x; a tensor's last chunk may have fewer.
    __host__ __device__ int chunks1() const { return ceil_div(x.first.C, BK); }
    __host__ __device__ int chunks() const { return chunks1() + ceil_div(x.second.C, BK); }
    // A chunk's first channel, among those of both tensors. The first chunk of x.second begins where x.first ends.
    __device__ int first_channel(int chunk) const {
        const int shift = chunk < chunks1() ? 0 : x.first.C - chunks1() * BK;
        return chunk * BK + shift;
    }
};

// out = partial (splits, M, N).sum(0), in order, + bias + emb + residual. A thread makes VEC outputs.
__global__ void gemm_reduce_kernel(const Gemm g) {
    await_inputs();
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    size_t count = (size_t)g.M() * g.N();
    if (i >= count) return;
    int m = (int)(i / g.N());
    int n = (int)(i % g.N());

    Unpacked value = {};
#pragma unroll 4
    for (int s = 0; s < g.splits; s++) value += load<VEC>(g.partial + s * count + i);

    size_t at = (size_t)m * g.out.of(n).C + g.out.within(n);
    if (g.bias) value += unpack(g.bias + n);
    if (g.emb.data) value += unpack(g.emb.row(m / g.x.first.T()) + n);
    if (g.residual.of(n).data) value += unpack(g.residual.of(n).data + at);
    *(uint4*)(g.out.of(n).data + at) = pack(value);
}

// A ThreadBlock is a kernel's argument. It has the kernel's constants, and run(), the work of one block of threads.
template <class ThreadBlock>
__global__ void __launch_bounds__(ThreadBlock::THREADS, ThreadBlock::BLOCKS)
    gemm_kernel(const __grid_constant__ ThreadBlock block) {
    await_inputs();
    block.run(blockIdx.x);
}

// out = F.linear(cat(x, 1), w, bias) + residual, or F.conv2d(x, w, bias, padding=1) + emb + residual,
// or the input gradient of either: x is then dout, and w's taps are read backwards. M pixels, N output
// channels. Block (tile, split) owns BM pixels by BN channels of `out`, or of its split's partial sums. The
// reduction runs over chunks of BK channels and within them over the taps. Per block: each chunk's BM rows
// (3x3: with halo) and BN x BK weights a tap come in once; the output is written once, in 16-byte vectors.
// A warp owns WM pixels by WN channels. TRANSPOSED: w's rows are reduced (an input gradient).
template <int BM, int BN, int WM, int WN, int TAPS, bool TRANSPOSED, int STAGES, int BLOCKS_>
struct GemmBlock : Gemm {
    static constexpr int BLOCKS = BLOCKS_;  // on a multiprocessor
    static constexpr int THREADS = BM / WM * (BN / WN) * 32;
    static constexpr int SWEEP = THREADS / 8;  // rows of A that a block loads at a time, a vector a thread

    // With its halo a patch of 64 pixels has (8 + 2)^2 = 100 rows, and one of 128 (8 + 2) * (16 + 2) = 180.
    static constexpr int A_ROWS = TAPS == 1 ? BM : BM / 64 * 100;
    static constexpr int A_SWEEPS = (A_ROWS + SWEEP - 1) / SWEEP;
    static constexpr int B_BYTES = BN * 128;
    static constexpr int TABLE_BYTES = TAPS == 1 ? 0 : (A_ROWS * 4 + 127) / 128 * 128;
    static constexpr int STAGING_PITCH = BN + 8;  // floats: rows of a fragment lie 8 banks apart

    // The next patch's loads are spread over the first A_PARTS taps, so that the last are at least STAGES - 1 steps early.
    static constexpr int A_PARTS = TAPS == 1 ? 1 : 9 - STAGES;
    static constexpr int A_LOADS = (A_SWEEPS + A_PARTS - 1) / A_PARTS;

    static_assert(TAPS == 1 || A_PARTS + STAGES - 2 <= TAPS, "a patch has arrived when it is first read");
    static_assert(BM % SWEEP == 0 && SWEEP % 8 == 0, "a 1x1 product's A is whole; sweeps keep the swizzle");
    static_assert(!TRANSPOSED || BN >= 64, "swizzling needs eight vectors in a row of w");

    // A patch has `rows` rows of A. Patches take turns in two buffers, but a single chunk needs only one.
    __host__ __device__ static constexpr int shared_bytes(int chunks, int rows) {
        const int patches = chunks < 2 ? chunks : 2;
        const int buffers = TAPS == 1 ? STAGES : patches;
        const int rings = STAGES * B_BYTES + buffers * rows * 128;
        const int staging = BM * STAGING_PITCH * (int)sizeof(float);
        return TABLE_BYTES + (rings > staging ? rings : staging);
    }

    // A warp's accumulators, WM x WN, in the fragments of mma.sync, which fp32 uses too.
    struct Product {
        static constexpr int MI = WM / 16, NI = WN / 8;
        float c[MI][NI][4] = {};
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int m0 = warp / (BN / WN) * WM, n0 = warp % (BN / WN) * WN;

        // column(j) is the first of this lane's two columns of fragment j. multiply() adds to c the product of A's
        // rows, from `shift` rows further down, and of B, over BK channels.
#ifndef PRECISION_FP32
        int row[MI];  // of A: those of which this lane gives ldmatrix the addresses
        __device__ Product(auto row_of) {
            UNROLLED_FOR (int i = 0; i < MI; i++) row[i] = row_of(m0 + i * 16 + lane % 16);
        }
        __device__ int column(int j) const { return n0 + (j * 8 + lane % 4 * 2); }
        __device__ void multiply(uint32_t a_tile, uint32_t b_tile, int shift) {
            // Tiles are aligned to 128 bytes, so that the address of a row's next vectors, also where swizzled, is an XOR away.
            uint32_t a_line[MI];
            UNROLLED_FOR (int i = 0; i < MI; i++) a_line[i] = a_tile + swizzled(row[i] + shift, lane / 16);
            uint32_t b_line = b_tile;
            if (TRANSPOSED) b_line += swizzled(lane % 16, n0 / 8 + lane / 16, BN * 2);
            else b_line += swizzled(n0 + lane / 16 * 8 + lane % 8, lane / 8 % 2);

            UNROLLED_FOR (int k = 0; k < BK / 16; k++) {
                uint32_t a[MI][4], b[NI / 2][4];
                UNROLLED_FOR (int i = 0; i < MI; i++) load_matrices(a[i], a_line[i] ^ k << 5);
                UNROLLED_FOR (int j = 0; j < NI / 2; j++) {
                    if (TRANSPOSED) load_matrices_transposed(b[j], (b_line ^ j << 5) + k * 16 * (BN * 2));
                    else load_matrices(b[j], (b_line ^ k << 5) + j * 16 * 128);
                }
                UNROLLED_FOR (int i = 0; i < MI; i++)
                    UNROLLED_FOR (int j = 0; j < NI; j++)
                        mma(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
#else
        int row[2 * MI];  // of A: those of this lane's sums
        __device__ Product(auto row_of) {
            UNROLLED_FOR (int i = 0; i < 2 * MI; i++) row[i] = row_of(m0 + i * 8 + lane / 4);
        }
        // TRANSPOSED swaps columns among two fragments, so that a lane's four lie together.
        __device__ int column(int j) const {
            if (TRANSPOSED) return n0 + (j / 2 * 16 + lane % 4 * 4 + j % 2 * 2);
            return n0 + (j * 8 + lane % 4 * 2);
        }
        // The sum of the lane's row i and column j. A fragment has two rows and two columns of a lane.
        __device__ float& sum(int i, int j) { return c[i / 2][j / 2][i % 2 * 2 + j % 2]; }
        __device__ void multiply(uint32_t a_tile, uint32_t b_tile, int shift) {
#pragma unroll 2
            for (int k = 0; k < BK; k += 4) {
                Vector<float, 4> a[2 * MI];
                UNROLLED_FOR (int i = 0; i < 2 * MI; i++)
                    a[i] = load_shared<4>(a_tile + swizzled(row[i] + shift, k / 4));
                if (TRANSPOSED)  // four columns of B at a time, those of two fragments
                    UNROLLED_FOR (int q = 0; q < 4; q++)
                        UNROLLED_FOR (int j = 0; j < NI; j += 2) {
                            auto b = load_shared<4>(b_tile + swizzled(k + q, column(j) / 4, BN * 4));
                            UNROLLED_FOR (int i = 0; i < 2 * MI; i++)
                                UNROLLED_FOR (int e = 0; e < 4; e++) sum(i, 2 * j + e) += a[i][q] * b[e];
                        }
                else
                    UNROLLED_FOR (int j = 0; j < 2 * NI; j++) {
                        auto b = load_shared<4>(b_tile + swizzled(column(j / 2) + j % 2, k / 4));
                        UNROLLED_FOR (int i = 0; i < 2 * MI; i++)
                            UNROLLED_FOR (int q = 0; q < 4; q++) sum(i, j) += a[i][q] * b[q];
                    }
            }
        }
#endif
        __device__ void store(float* staging) {
            UNROLLED_FOR (int i = 0; i < MI; i++)
                UNROLLED_FOR (int j = 0; j < NI; j++) {
                    float* p = staging + (m0 + i * 16 + lane / 4) * STAGING_PITCH + column(j);
                    *(float2*)p = make_float2(c[i][j][0], c[i][j][1]);
                    *(float2*)(p + 8 * STAGING_PITCH) = make_float2(c[i][j][2], c[i][j][3]);
                }
        }
    };

    // The epilogue: finishes a block's sums, which lie in `staging` as (BM, PITCH), and writes them to the output. It
    // takes 64 pixels at a time; where a norm's sums are wanted, or an embedding is added, these are of one image. A
    // thread has a vector of channels of every STRIDE-th pixel.
    __device__ __forceinline__ void finish(float* staging, const int* pixel_of_row, int tile, int n0) const {
        constexpr int ROW = BN / VEC, STRIDE = THREADS / ROW, PASSES = 64 / STRIDE, PITCH = STAGING_PITCH;
        const int column = threadIdx.x % ROW * VEC;
        const int n = n0 + column;
        const int row = threadIdx.x / ROW;
        const bool has_norm = TRANSPOSED && norm;
        const int T = x.first.T();
        const int norm_pixels = T == 64 ? 64 : BM;  // in a norm's tile; with sums these tiles are whole
        Unpacked sum = {}, product = {};            // over the pixels of the norm's tile so far: what the norm wants

        UNROLLED_FOR (int p0 = 0; p0 < BM; p0 += 64) {
            // All loads come before the first store, so that none waits for another.
            int m[PASSES];           // the pixels; -1: outside of the image
            uint4 operands[PASSES];  // the residual, or the norm's x
            Unpacked values[PASSES];
            const Concat& source = has_norm ? norm.x : residual;
            const Tensor& of = source.of(n);
            const floatX* from = n < N() && of.data ? of.data + source.within(n) : nullptr;
            UNROLLED_FOR (int i = 0; i < PASSES; i++) {
                const int p = p0 + i * STRIDE + row;
                m[i] = TAPS > 1 ? pixel_of_row[tiling.row(p) + tiling.tap(4)] : tile * BM + p;
                if (n >= N() || m[i] >= M()) m[i] = -1;
                operands[i] = from && m[i] >= 0 ? *(const uint4*)rows_from(from, m[i], of.C) : uint4{};
                values[i] = load<VEC>(staging + p * PITCH + column);
            }

            if (splits > 1) {
                write_partial(m, values, n);
                continue;
            }

            Unpacked added = {};  // bias and embedding
            NormGradient gradient;
            const int image = m[0] / T;
            if (m[0] >= 0 && has_norm) {
                gradient.load(norm, (size_t)image * N() + n);
            } else if (m[0] >= 0) {
                if (bias) added += unpack(bias + n);
                if (emb.data) added += unpack(emb.row(image) + n);
            }

            const Tensor& target = out.of(n);
            floatX* to = target.data + out.within(n);
            UNROLLED_FOR (int i = 0; i < PASSES; i++) {
                Unpacked operand = unpack(operands[i]);
                if (has_norm) {
                    gradient.apply(values[i], operand, norm.silu, sum, product);
                } else {
                    operand += added;
                    UNROLLED_FOR (int e = 0; e < VEC; e++) values[i][e] = alpha * values[i][e] + beta * operand[e];
                }
                if (m[i] >= 0) *(uint4*)rows_from(to, m[i], target.C) = pack(values[i]);
            }
            if (!sums) continue;

            // Moments are sums about a pivot, the first pixel of the norm's tile. It is kept in `staging`, in the place of that
            // pixel's sums.
            const int first = p0 / norm_pixels * norm_pixels;  // of the norm's tile
            const int norm_tile = (tile * BM + first) / norm_pixels;
            float* pivot = staging + first * PITCH;
            if (!has_norm && p0 == first && row == 0) store(pivot + column, values[0]);
            __syncthreads();
            if (!has_norm)
                UNROLLED_FOR (int i = 0; i < PASSES; i++)
                    for (int e = 0; e < VEC; e++) {
                        const float distance = values[i][e] - pivot[column + e];
                        sum[e] += distance;
                        product[e] += distance * distance;
                    }

            // The sums are written when the last pixels of the norm's tile are finished.
            if ((p0 + 64) % norm_pixels) continue;
            if (norm_tile * norm_pixels >= M()) continue;

            // They are added up behind the pivot, where all threads have read `staging`.
            auto& shared_sums = *(float2(*)[THREADS / 32][BN])(pivot + PITCH);
            float2* tile_sums = sums + (size_t)norm_tile * N() + n0;
            norm_tile_sums<ROW>(shared_sums, tile_sums, N() - n0, sum, product, [&](int c, float2 total) {
                if (!has_norm) {
                    const Moments moments = moments_about(pivot[c], total, norm_pixels);
                    return make_float2(moments.mean, moments.squares);
                }
                const int image = norm_tile * norm_pixels / T;
                return make_float2(total.x, total.y * norm.statistics[image * N() + n0 + c].rstd);
            });
            sum = product = {};
        }
    }

    // Where a tile is split, its sums are partial sums as they are.
    template <int PASSES>
    __device__ __forceinline__ void write_partial(const int (&m)[PASSES], const Unpacked (&values)[PASSES], int n) const {
        UNROLLED_FOR (int i = 0; i < PASSES; i++) {
            float* to = partial + ((size_t)blockIdx.y * M() + m[i]) * N() + n;
            if (m[i] >= 0) store(to, values[i]);
        }
    }

    // A step of the reduction is one tap of a chunk.
    struct Step {
        int stage = 0, tap = 0, chunk = 0;
        __device__ void next() {
            stage++;
            if (stage == STAGES) stage = 0;
            tap++;
            if (tap == TAPS) {
                tap = 0;
                chunk++;
            }
        }
    };

    // Computes one tile of the output. Tiles that differ in their channels alone have consecutive numbers.
    __device__ __forceinline__ void run(int number) const {
        static_assert(shared_bytes(2, A_ROWS) <= 99 << 10, "what a block has on an RTX 30 or 40");
        unsigned char* shared = &shared_memory<unsigned char>();
        int* pixel_of_row = (int*)shared;  // 3x3: the pixel that lies in each row of A, -1: outside the image
        const uint32_t b_ring = shared_address(shared) + TABLE_BYTES;
        const uint32_t a_ring = b_ring + STAGES * B_BYTES;
        const int a_rows = TAPS > 1 ? tiling.rows() : BM;
        const int a_bytes = a_rows * 128;

        const unsigned tid = threadIdx.x;
        const unsigned n_tiles = ceil_div(N(), BN);
        const int n0 = number % n_tiles * BN;
        const int tile = number / n_tiles;
        const int first = blockIdx.y * chunks_a_split;
        const int count = min(first + chunks_a_split, chunks()) - first;

        if (TAPS > 1) {
            Pixel origin = tiling.origin(tile);
            for (int r = tid; r < a_rows; r += THREADS)
                pixel_of_row[r] = tiling.pixel(origin, tiling.offset(r));
            __syncthreads();
        }

        // Of a chunk, counted from `first`: whether it lies in x's second tensor, how many channels its tensor has, and
        // which of these is the chunk's first.
        auto is_second = [&](int chunk) { return TAPS == 1 && !TRANSPOSED && first + chunk >= chunks1(); };
        auto channels = [&](int chunk) -> unsigned { return is_second(chunk) ? x.second.C : x.first.C; };
        auto channel = [&](int chunk) {
            const int chunks_before = is_second(chunk) ? chunks1() : 0;
            return (first + chunk - chunks_before) * BK;
        };

        // Loads A_LOADS sweeps of a chunk's pixels.
        const int sweeps = (a_rows - (int)tid / 8 + SWEEP - 1) / SWEEP;  // those with a row for this thread
        auto load_a = [&](int buffer, int chunk, int first_sweep) {
            const Tensor& from = is_second(chunk) ? x.second : x.first;
            const int row = tid / 8 + first_sweep * SWEEP;
            const int v = tid % 8;
            const int c = channel(chunk) + v * VEC;
            const uint32_t to = a_ring + buffer * a_bytes + swizzled(row, v);
            const int left = TAPS > 1 ? sweeps - first_sweep : A_LOADS;
            auto pixel_of = [&](int i) { return TAPS > 1 ? pixel_of_row[row + i] : tile * BM + row + i; };
            load_pixels<A_LOADS, SWEEP>(to, left, from.data + c, from.C, c < from.C ? M() : 0, pixel_of);
        };

        // Loads a tap's weights for the block's BN of N. In shared memory a row is an output n and its vectors are
        // channels c; TRANSPOSED, a row is a channel and its vectors are outputs.
        auto load_b = [&](int stage, int chunk, int tap) {
            constexpr int ROW = TRANSPOSED ? BN / VEC : 8;  // vectors
            constexpr int ROWS = THREADS / ROW;             // that a pass loads
            static_assert(ROWS % 8 == 0 && BN * 8 % THREADS == 0, "passes keep the swizzle, and all are whole");
            const unsigned row = tid / ROW, v = tid % ROW;
            const unsigned O = N(), K = x.C();
            auto load_rows = [&](const floatX* from, unsigned pitch, int left) {
                const uint32_t to = b_ring + stage * B_BYTES + swizzled(row, v, ROW * 16);
                UNROLLED_FOR (int i = 0; i < BN * 8 / THREADS; i++)
                    copy_async(to + i * (ROWS * ROW * 16), rows_from(from, i * ROWS * TAPS, pitch),
                               i * ROWS < left);
            };

            if constexpr (TRANSPOSED) {  // x is dout, one tensor
                const unsigned n = n0 + v * VEC;
                const unsigned c = channel(chunk) + row;
                const floatX* from = rows_from(w + n, c * TAPS + TAPS - 1 - tap, O);
                load_rows(from, O, n < O && c < K ? K - c : 0);
            } else {
                const unsigned n = n0 + row;
                const unsigned c = channel(chunk) + v * VEC;
                const unsigned C = channels(chunk);
                const unsigned column = c + (is_second(chunk) ? K - C : 0);
                const floatX* from = rows_from(w + column, n * TAPS + tap, K);
                load_rows(from, K, n < O && c < C ? O - n : 0);
            }
        };

        // Weights are loaded STAGES - 1 steps early; for 1x1 so are pixels.
        Step step, early;
        auto load_early = [&] {
            if (early.chunk < count) {
                if (TAPS == 1) load_a(early.stage, early.chunk, 0);
                load_b(early.stage, early.chunk, early.tap);
            }
            __pipeline_commit();
            early.next();
        };

        Product product([&](int p) { return TAPS > 1 ? tiling.row(p) : p; });

        if (TAPS > 1)
            for (int sweep = 0; sweep < A_SWEEPS; sweep += A_LOADS) load_a(0, 0, sweep);
        UNROLLED_FOR (int s = 0; s < STAGES - 1; s++) load_early();
        for (; step.chunk < count; step.next()) {
            __pipeline_wait_prior(STAGES - 2);
            __syncthreads();  // the step has arrived for every thread, and all are done with the one before
            if (TAPS > 1 && step.chunk + 1 < count && step.tap < A_PARTS)
                load_a((step.chunk + 1) % 2, step.chunk + 1, step.tap * A_LOADS);
            load_early();
            const int a_buffer = TAPS > 1 ? step.chunk % 2 : step.stage;
            const uint32_t a_tile = a_ring + a_buffer * a_bytes;
            const uint32_t b_tile = b_ring + step.stage * B_BYTES;
            product.multiply(a_tile, b_tile, TAPS > 1 ? tiling.tap(step.tap) : 0);
        }

        __pipeline_wait_prior(0);
        __syncthreads();  // the rings become the staging area
        float* staging = (float*)(shared + TABLE_BYTES);
        product.store(staging);
        __syncthreads();
        finish(staging, pixel_of_row, tile, n0);
    }

    static void launch_tiles(const Gemm& g) {
        GemmBlock block = {g};
        block.tiling = make_tiling(g.x.first, TAPS, BM);
        const int tiles = block.tiling.tiles * ceil_div(g.N(), BN);
        const int bytes = shared_bytes(g.chunks(), TAPS > 1 ? block.tiling.rows() : BM);
        const size_t outputs = (size_t)g.M() * g.N();
        Arena workspace = stream->workspace;
        if (g.splits > 1) block.partial = take<float>(&workspace, g.splits * outputs);
        launch(gemm_kernel<GemmBlock>, dim3(tiles, g.splits), THREADS, bytes, block);
        if (g.splits > 1) launch(gemm_reduce_kernel, ceil_div(outputs / VEC, 256), 256, 0, block);
    }
};

// ---- which kernel does a GEMM

// PORTABLE: by the pixels and channels of a block's tile. HOPPER, of section 12: tiles of 64 channels by 128 pixels, which
// may be two small images, or by 256, which two warpgroups compute in ping-pong. ONE_CHUNK has room for the weights of a
// whole chunk, and NORMED also norms the input on the way. Their order counts: HOPPER_128 is the first of section 12, and
// HOPPER_256 the first of the large ones.
enum GemmKernel {
    PORTABLE_128x128,
    PORTABLE_128x64,
    PORTABLE_64x64,
    PORTABLE_128x16,
    HOPPER_128,
    HOPPER_TWO_IMAGES,
    HOPPER_256,
    HOPPER_256_ONE_CHUNK,
    HOPPER_256_NORMED,
};

struct GemmChoice {
    GemmKernel kernel;
    int splits = 1;  // of the sum over K, as partial sums in device memory or in a cluster of blocks
};
#ifdef HOPPER  // compute capability 9.0's own instructions (sm_90a), and bf16
enum { HAS_HOPPER = true };
#else
enum { HAS_HOPPER = false };
#endif

// The pixels of a tile of Hopper's kernels.
static constexpr Box hopper_tile(int taps, GemmKernel kernel) {
    if (taps == 1) return {128, 1, 1};
    if (kernel == HOPPER_TWO_IMAGES) return {8, 8, 2};
    return {kernel == HOPPER_128 ? 8 : 16, 16, 1};
}

// Hopper's kernels write 64 channels at once, all to one tensor.
static bool hopper_writes(const Concat& x) { return !x.second.C || x.first.C % 64 == 0; }
// Whether the kernel also makes the moments or sums that a norm wants; otherwise a pass of its own does. A tile
// of the kernel must hold whole tiles of the norm, so that a block knows all of their pixels.
static bool leaves_sums(const Gemm& g, int taps, GemmChoice choice) {
    const int H = g.x.first.H, W = g.x.first.W, T = H * W;
    const bool portable = choice.kernel < HOPPER_128;
    if (portable && choice.splits > 1) return false;
    if (!portable && !hopper_writes(g.norm.x)) return false;
    if (T == 64) return taps == 1 || H == 8;
    if (T % NORM_TILE || choice.kernel == PORTABLE_64x64) return false;
    if (taps == 1) return true;
    if (portable) return H % 8 == 0 && W % 16 == 0;
    return H % 16 == 0 && W % 8 == 0;
}

// Where `blocks` leave multiprocessors without work, up to `most` times as many blocks share the tiles' chunks, if each
// keeps enough steps to pay for adding up the parts. The bounds were measured on an H100.
static int choose_splits(const Gemm& g, int taps, int blocks, int most, int least_steps) {
    const int steps = taps * g.chunks();
    int splits = 1;
    while (splits < most) {
        const bool has_idle = splits * blocks <= gpu_multiprocessors;
        const bool has_work = 2 * splits <= g.chunks() && steps >= least_steps * splits;
        if (!has_idle || !has_work) break;
        splits *= 2;
    }
    return splits;
}

// Chooses the largest tile of which there are enough to keep the multiprocessors busy to the end. Where even the smallest
// are too few, blocks split a tile's chunks.
static GemmChoice choose_portable(const Gemm& g, int taps, bool transposed) {
    auto tiles = [&](int pixels, int channels) {
        return make_tiling(g.x.first, taps, pixels).tiles * ceil_div(g.N(), channels);
    };
    if (!transposed && g.N() <= 16) return {PORTABLE_128x16};  // an image
    const bool is_even = ceil_div(g.N(), 64) % 2 == 0;  // otherwise half of a tile of 128 channels is empty
    if (is_even && tiles(128, 128) >= gpu_multiprocessors) return {PORTABLE_128x128};
    if (2 * tiles(128, 64) >= 3 * gpu_multiprocessors) return {PORTABLE_128x64};

    const int least_steps = sizeof(floatX) == 2 ? 18 : 1;
    return {PORTABLE_64x64, choose_splits(g, taps, tiles(64, 64), 8, least_steps)};
}

// Whether there are enough tiles of 256 pixels to occupy all multiprocessors.
static bool enough_256(const Tensor& x, int N) {
    const int tiles = make_tiling(x, hopper_tile(9, HOPPER_256)).tiles * ceil_div(N, 64);
    return 2 * tiles >= 3 * gpu_multiprocessors;
}

// Whether a 3x3 convolution with O outputs norms what it reads: HOPPER_256_NORMED does, whole tiles and whole chunks.
static bool conv3x3_norms(const Norm& norm, int O) {
    const Tensor &x = norm.x.first, &second = norm.x.second;
    const bool whole_tiles = x.H % 16 == 0 && x.W % 16 == 0;
    const bool whole_chunks = x.C % 64 == 0 && second.C % 64 == 0;
    return HAS_HOPPER && norm.silu && whole_tiles && whole_chunks && O > 16 && enough_256(x, O);
}

static Concat groupnorm_for_conv3x3(Tensor normed, const Norm& norm, int O) {
    if (conv3x3_norms(norm, O)) {
        groupnorm_forward(Tensor(), norm);  // writes statistics, scales and shifts alone
        return Concat(norm.x.first, norm.x.second, norm.half_scale_shift);
    }
    groupnorm_forward(normed, norm);
    return normed;
}

static GemmChoice choose_hopper(const Gemm& g, int taps) {
    const Tensor& x = g.x.first;
    const bool small = taps > 1 && x.H <= 8 && x.W <= 8;
    if (g.x.half_scale_shift) return {HOPPER_256_NORMED};  // see groupnorm_for_conv3x3
    if (taps > 1 && !small && enough_256(x, g.N())) {
        const bool one_chunk = g.chunks() == 1;
        return {one_chunk ? HOPPER_256_ONE_CHUNK : HOPPER_256};
    }

    // The blocks of a cluster share a long reduction, as long as each block still has a multiprocessor to itself.
    const GemmKernel kernel = small ? HOPPER_TWO_IMAGES : HOPPER_128;
    const int blocks = make_tiling(shaped(x, taps), hopper_tile(taps, kernel)).tiles * ceil_div(g.N(), 64);
    return {kernel, choose_splits(g, taps, 2 * blocks, 4, 18)};
}

// Chooses the kernel that does a GEMM, by the sizes, the GPU, the build, and whether the input is still to be normed.
static GemmChoice choose(const Gemm& g, int taps, bool transposed) {
    if (HAS_HOPPER && g.N() > 16 && hopper_writes(g.out)) return choose_hopper(g, taps);
    return choose_portable(g, taps, transposed);
}

template <int TAPS, bool TRANSPOSED> static void launch_hopper(const Gemm& g, GemmKernel kernel);

template <int TAPS, bool TRANSPOSED> static void launch_gemm(const Gemm& asked, GemmChoice choice) {
    assert(TAPS > 1 || !asked.emb.data);
    assert(!asked.norm || !asked.residual.first);
    assert(!asked.x.half_scale_shift || choice.kernel == HOPPER_256_NORMED);

    Gemm g = asked;
    g.chunks_a_split = ceil_div(g.chunks(), choice.splits);
    g.splits = ceil_div(g.chunks(), g.chunks_a_split);  // every split has a chunk
    const bool sums_are_left = leaves_sums(g, TAPS, choice);
    if (!sums_are_left) g.norm = {};
    else if (g.norm) g.sums = (float2*)g.norm.sums;
    else g.sums = (float2*)g.out.first.moments;

    constexpr bool BF16 = sizeof(floatX) == 2;
    constexpr int COLUMNS = BF16 ? 64 : 32;  // a warp's columns: fp32 has 64 sums a thread at most
    // Numbers: a block's pixels and channels, a warp's; then stages, and blocks on a multiprocessor.
    switch (choice.kernel) {
        case PORTABLE_128x128:
            GemmBlock<128, 128, 64, COLUMNS, TAPS, TRANSPOSED, 3, BF16 ? 2 : 1>::launch_tiles(g);
            break;
        case PORTABLE_128x64:
            GemmBlock<128, 64, 64, 32, TAPS, TRANSPOSED, 3, BF16 ? 4 : 3>::launch_tiles(g);
            break;
        case PORTABLE_64x64:
            GemmBlock<64, 64, 32, 32, TAPS, TRANSPOSED, TAPS == 1 ? 3 : 5, 4>::launch_tiles(g);
            break;
        case PORTABLE_128x16:
            if constexpr (!TRANSPOSED) GemmBlock<128, 16, 32, 16, TAPS, false, 3, 3>::launch_tiles(g);
            else assert(false);  // choose_portable chooses it for forward only
            break;
        default:
            if constexpr (HAS_HOPPER) launch_hopper<TAPS, TRANSPOSED>(g, choice.kernel);
    }

    if (sums_are_left) return;
    if (asked.out.first.moments) channel_moments(asked.out.first);
    if (asked.norm) groupnorm_backward_sums(asked.out.first, asked.out.first, asked.norm);
}

// ---- weight gradient
// dw[o, tap, c] = the sum of dout[p, o] x[p + tap, c] over all pixels p, for convolutions of one tap and of nine.
//
// Two kernels compute it. weight_gradient_kernel, below, runs on every GPU and in both precisions. On Hopper, in bf16,
// 3x3 convolutions go to hopper_weight_gradient_kernel of section 12 instead, which is built on wgmma; 1x1
// convolutions stay with the one below, because their many small blocks find room beside those of other layers:
// wgmma made them no faster (dev/README.md). gemm_backward_weight, under "launchers", decides.
//
// Either kernel works in two passes where the sum over pixels is split: every split leaves partial sums in memory, and
// weight_reduce_kernel adds them up in a fixed order, so that the bits never depend on which block was first.

struct WeightGradient {
    float *dw, *dbias;  // (O, taps, C), (O); dbias null: not wanted
    Tensor dout;        // (B, H, W, O); 1x1: all pixels are one line, see shaped
    Concat x;           // (B, H, W, C)
    Rows per_image;     // (B, O): the sums of dout over each image, for demb; null: not wanted
    int taps;
    Tiling tiling = {};
    int splits = 1;                  // of the tiles
    float* partial = nullptr;        // (splits, O, taps, C), where splits > 1
    float* bias_partials = nullptr;  // (splits + sets, images of a set, O)
    __host__ __device__ size_t count() const { return (size_t)dout.C * taps * x.C(); }  // of dw
    // A tile of dw has 64 output channels, and 64 input channels of one tensor of x.
    __host__ __device__ int c_tiles() const { return ceil_div(x.first.C, 64) + ceil_div(x.second.C, 64); }
    int tiles() const { return ceil_div(dout.C, 64) * c_tiles(); }
    // Split s has the tiles [first_tile(s), first_tile(s + 1)).
    __device__ int first_tile(int s) const { return (int)((long long)s * tiling.tiles / splits); }
    // The split that has tile t.
    __device__ int split_of(int t) const { return (int)(((t + 1ll) * splits - 1) / tiling.tiles); }
    // The sum of dout's channel o over an image's pixels in a split. A split and the next may both have tiles of one set.
    __device__ float& bias_partial(int split, int set, int image, int o) const {
        return bias_partials[((size_t)(split + set) * tiling.images + image) * dout.C + o];
    }

    // Where there is one image: the bias gradient of channel o, summed over every 32nd split from s on.
    __device__ float bias_of_splits(int o, int s) const {
        float sum = 0;
#pragma unroll 8
        for (; s < splits; s += 32) sum += bias_partial(s, 0, 0, o);
        return sum;
    }
    // Where there are several images: the same, summed over every 32nd image from b on. Each image's own sum goes
    // to per_image.
    __device__ float bias_of_images(int o, int b) const {
        const int images = tiling.images;
        const int set_tiles = tiling.set_tiles();
        float total = 0;
        for (; b < dout.B; b += 32) {
            const int set = b / images;
            const int last_split = split_of((set + 1) * set_tiles - 1);
            float sum = 0;
#pragma unroll 8
            for (int s = split_of(set * set_tiles); s <= last_split; s++)
                sum += bias_partial(s, set, b % images, o);
            if (per_image.data) per_image.row(b)[o] = (floatX)sum;
            total += sum;
        }
        return total;
    }
    // Computes dbias and per_image from bias_partials. A block's 256 threads own channels [8 block, 8 block + 8): each has 32.
    __device__ void reduce_bias(int block) const {
        __shared__ float sums[32][8];
        const int column = threadIdx.x % 8;
        const int y = threadIdx.x / 8;
        const int o = block * 8 + column;
        const bool one_image = dout.B == 1;

        float total = 0;
        if (o < dout.C) total = one_image ? bias_of_splits(o, y) : bias_of_images(o, y);
        sums[y][column] = total;
        __syncthreads();

        if (y != 0 || o >= dout.C) return;
        for (int i = 1; i < 32; i++) total += sums[i][column];
        if (per_image.data && one_image) per_image.data[o] = (floatX)total;
        dbias[o] = total;
    }
};

template <class ThreadBlock>
__global__ void __launch_bounds__(ThreadBlock::THREADS, ThreadBlock::BLOCKS)
    weight_gradient_kernel(const ThreadBlock block) {
    await_inputs();
    block.run();
}

// dw (O, taps, C) = einsum('mo,mtc->otc', dout, neighbourhoods of cat(x, 1)), over M pixels. Block (tile,
// split) owns 64 x taps x 64 of dw, or of its split's partial sums; the splits share the tiles evenly. Per
// block its pixels' 64 channels of dout and of x (3x3: with halo) come in once, for all taps. Of the blocks that read the same
// channels of dout, the first also sums these for the bias. A step of the reduction is PIXELS pixels.
template <int TAPS> struct WeightBlock : WeightGradient {
    static constexpr bool HAS_HALO = TAPS > 1;
    static constexpr int PIXELS = (HAS_HALO ? 16 : 8) * VEC;
    static constexpr int STAGES = HAS_HALO ? 2 : 4;
    static constexpr int BLOCKS = HAS_HALO ? 1 : 3;   // on a multiprocessor
    static constexpr int WARPS_O = HAS_HALO ? 1 : 2;  // warps that share the output channels
    static constexpr int WARPS_N = HAS_HALO ? 8 : 2;  // warps that share the input channels
    static constexpr int THREADS = WARPS_O * WARPS_N * 32;
    static constexpr int ROW = 64 / VEC, ROW_BYTES = ROW * 16;  // of shared memory, in vectors, bytes
    static constexpr int SWEEP = THREADS / ROW;  // rows of shared memory that a block loads at a time
    static constexpr int PATCH_ROWS = HAS_HALO ? PIXELS / 64 * 100 : PIXELS;  // see GemmBlock::A_ROWS
    static constexpr int D_SWEEPS = PIXELS / SWEEP;
    static constexpr int X_SWEEPS = (PATCH_ROWS + SWEEP - 1) / SWEEP;
    static constexpr int X_ROWS = X_SWEEPS * SWEEP;
    struct Shared {
        // For 3x3: the pixel that lies in each row of this tile and of the next, or -1 outside of the image.
        alignas(128) int pixel_of_row[2][HAS_HALO ? X_ROWS : 1];
        int row_of_pixel[HAS_HALO ? PIXELS : 1];
        struct alignas(128) Stage {
            unsigned char dout[PIXELS * ROW_BYTES], x[X_ROWS * ROW_BYTES];
        } stages[STAGES];
    };

#ifndef PRECISION_FP32
    // The 64 x (taps * 64) sums are cut into 16 x 8 fragments; a warp owns MI x NI of them. Both operands lie
    // with the reduction down the rows, so both are read transposed, and a tap is again a shift of rows.
    struct Product {
        static constexpr int MI = 4 / WARPS_O, NI = TAPS * 8 / WARPS_N;
        static_assert(TAPS == 1 || NI == TAPS, "3x3: a warp owns eight input channels, and all taps");
        static_assert(MI * WARPS_O == 4 && NI * WARPS_N == TAPS * 8, "warps share the work evenly");
        float c[MI][NI][4] = {};
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int o0 = warp / WARPS_N * MI * 16, n0 = warp % WARPS_N;
        float sums[MI][4] = {};  // of dout over the pixels, a column an image of the set

        // Fragment j has a tap, and eight input channels: a vector of x's row.
        __device__ static int tap(int j) { return HAS_HALO ? j : 0; }
        __device__ int vector(int j) const { return HAS_HALO ? n0 : n0 * NI + j; }

        __device__ void multiply(uint32_t d_tile, uint32_t x_tile, const int* row_of_pixel, const Tiling& tiling,
                                 bool sums_bias) {
#pragma unroll 1
            for (int k = 0; k < PIXELS; k += 32) {
                uint32_t a[2][MI][4];
                uint32_t a_line = d_tile + swizzled(k + lane / 16 * 8 + lane % 8, o0 / 8 + lane / 8 % 2);
                UNROLLED_FOR (int h = 0; h < 2; h++)
                    UNROLLED_FOR (int i = 0; i < MI; i++)
                        load_matrices_transposed(a[h][i], (a_line ^ i << 5) + h * 16 * 128);
                if (sums_bias && n0 == 0) {  // a product with ones in the column of the pixels' image
                    uint32_t ones = lane / 4 == k * tiling.images / PIXELS ? 0x3f803f80 : 0;
                    UNROLLED_FOR (int i = 0; i < MI; i++)
                        UNROLLED_FOR (int h = 0; h < 2; h++) mma(sums[i], a[h][i], ones, ones);
                }

                int row = HAS_HALO ? row_of_pixel[k + lane] : k + lane;
                UNROLLED_FOR (int j = 0; j < NI; j++) {
                    uint32_t b[4];
                    load_matrices_transposed(b, x_tile + swizzled(row + tiling.tap(tap(j)), vector(j)));
                    UNROLLED_FOR (int i = 0; i < MI; i++) mma(c[i][j], a[0][i], b[0], b[1]);
                    UNROLLED_FOR (int i = 0; i < MI; i++) mma(c[i][j], a[1][i], b[2], b[3]);
                }
            }
        }
        // put(image, o, the sum) for each sum, which then begins again at 0
        __device__ void flush_sums(auto put) {
            UNROLLED_FOR (int i = 0; i < MI; i++)
                UNROLLED_FOR (int e = 0; e < 4; e++) {
                    if (n0 == 0 && lane % 4 == 0) put(e % 2, o0 + i * 16 + lane / 4 + e / 2 * 8, sums[i][e]);
                    sums[i][e] = 0;
                }
        }
        // put(o, tap, c, two sums of neighbouring c)
        __device__ void store(auto put) {
            UNROLLED_FOR (int i = 0; i < MI; i++)
                UNROLLED_FOR (int j = 0; j < NI; j++) {
                    int o = o0 + i * 16 + lane / 4;
                    int channel = vector(j) * 8 + lane % 4 * 2;
                    put(o, tap(j), channel, make_float2(c[i][j][0], c[i][j][1]));
                    put(o + 8, tap(j), channel, make_float2(c[i][j][2], c[i][j][3]));
                }
        }
    };
#else
    // A thread owns 8 output channels and, 3x3, 2 input channels and all taps, or 1x1 4 input channels.
    struct Product {
        static constexpr int NC = HAS_HALO ? 2 : 4;
        static_assert(THREADS * 8 * NC == 64 * 64, "every sum has one owner");
        float c[8][TAPS][NC] = {};
        const int o0 = threadIdx.x / (64 / NC) * 8, c0 = threadIdx.x % (64 / NC) * NC;
        float sums[8] = {};  // of dout over the pixels
        __device__ static uint32_t at(uint32_t tile, int row, int channel) {
            return tile + swizzled(row, channel / 4, 256) + channel % 4 * 4;
        }
        __device__ void multiply(uint32_t d_tile, uint32_t x_tile, const int* row_of_pixel, const Tiling& tiling,
                                 bool sums_bias) {
#pragma unroll 4
            for (int k = 0; k < PIXELS; k++) {
                Vector<float, 4> dout[2] = {load_shared<4>(at(d_tile, k, o0)),
                                            load_shared<4>(at(d_tile, k, o0 + 4))};
                if (sums_bias)
                    UNROLLED_FOR (int o = 0; o < 8; o++) sums[o] += dout[o / 4][o % 4];
                int row = HAS_HALO ? row_of_pixel[k] : k;
                UNROLLED_FOR (int t = 0; t < TAPS; t++) {
                    auto x = load_shared<NC>(at(x_tile, row + tiling.tap(t), c0));
                    UNROLLED_FOR (int o = 0; o < 8; o++)
                        UNROLLED_FOR (int e = 0; e < NC; e++) c[o][t][e] += dout[o / 4][o % 4] * x[e];
                }
            }
        }
        __device__ void flush_sums(auto put) {
            UNROLLED_FOR (int o = 0; o < 8; o++) {
                if (c0 == 0) put(0, o0 + o, sums[o]);
                sums[o] = 0;
            }
        }
        __device__ void store(auto put) {
            UNROLLED_FOR (int o = 0; o < 8; o++)
                UNROLLED_FOR (int t = 0; t < TAPS; t++)
                    UNROLLED_FOR (int e = 0; e < NC; e += 2)
                        put(o0 + o, t, c0 + e, make_float2(c[o][t][e], c[o][t][e + 1]));
        }
    };
#endif

    __device__ __forceinline__ void run() const {
        auto& shared = shared_memory<Shared>();
        const int tid = threadIdx.x;
        const int tiles1 = ceil_div(x.first.C, 64);
        const int c_tile = blockIdx.x % c_tiles();
        const int o0 = blockIdx.x / c_tiles() * 64;
        const bool second = c_tile >= tiles1;  // whether the channels lie in x's second tensor
        const floatX* dout_from = dout.data;
        const floatX* x_from = second ? x.second.data : x.first.data;
        const int channels = second ? x.second.C : x.first.C;
        const int c0 = (second ? c_tile - tiles1 : c_tile) * 64;
        const int M = dout.rows();
        const int O = dout.C;
        const int set_tiles = tiling.set_tiles();
        const int first = first_tile(blockIdx.y);
        const int last = first_tile(blockIdx.y + 1);
        const bool sums_bias = bias_partials && c_tile == 0;

        // For 3x3: finds the tile's pixels, before it is loaded.
        const uchar4 offset = tiling.offset(tid);
        auto locate = [&](int tile) {
            static_assert(TAPS == 1 || (X_ROWS <= THREADS && STAGES == 2), "a thread a row; two tables");
            if (!HAS_HALO || tid >= X_ROWS || tile >= last) return;
            const int pixel = tiling.pixel(tiling.origin(tile), offset);
            shared.pixel_of_row[tile % 2][tid] = tid < tiling.rows() ? pixel : -1;
        };
        if (HAS_HALO) {
            for (int p = tid; p < PIXELS; p += THREADS) shared.row_of_pixel[p] = tiling.row(p);
            locate(first);
            locate(first + 1);
            __syncthreads();
        }

        const int row = tid / ROW, v = tid % ROW;
        auto load = [&](int tile) {
            if (tile >= last) return;
            auto& stage = shared.stages[(tile - first) % STAGES];
            const int at = swizzled(row, v, ROW_BYTES);
            const int o = o0 + v * VEC;
            const int c = c0 + v * VEC;
            const int* pixels = shared.pixel_of_row[HAS_HALO ? tile % 2 : 0];
            auto pixel_of_x = [&](int i) { return HAS_HALO ? pixels[row + i] : tile * PIXELS + row + i; };
            auto pixel_of_dout = [&](int i) {
                if (!HAS_HALO) return tile * PIXELS + row + i;
                return pixels[shared.row_of_pixel[row + i] + tiling.tap(4)];
            };
            const uint32_t dout_to = shared_address(stage.dout) + at;
            load_pixels<D_SWEEPS, SWEEP, ROW_BYTES>(dout_to, D_SWEEPS, dout_from + o, O, o < O ? M : 0, pixel_of_dout);
            const uint32_t x_to = shared_address(stage.x) + at;
            load_pixels<X_SWEEPS, SWEEP, ROW_BYTES>(x_to, X_SWEEPS, x_from + c, channels, c < channels ? M : 0, pixel_of_x);
        };

        Product product;
        // The bias sums of a set of images go to row split + set when the block leaves the set. No two blocks write to one
        // row: from block to block split grows, and set does not fall.
        int set = first / set_tiles;
        auto flush_sums = [&] {
            product.flush_sums([&](int image, int o, float sum) {
                if (image < tiling.images && o0 + o < O) bias_partial(blockIdx.y, set, image, o0 + o) = sum;
            });
        };

        for (int s = 0; s < STAGES - 1; s++) {
            load(first + s);
            __pipeline_commit();
        }
        for (int tile = first; tile < last; tile++) {
            __pipeline_wait_prior(STAGES - 2);
            __syncthreads();  // this tile has arrived, and every thread is done with the one before
            load(tile + STAGES - 1);
            __pipeline_commit();
            locate(tile + 2);

            auto& stage = shared.stages[(tile - first) % STAGES];
            if (sums_bias && tile == (set + 1) * set_tiles) {
                flush_sums();
                set++;
            }
            const uint32_t d_tile = shared_address(stage.dout);
            const uint32_t x_tile = shared_address(stage.x);
            product.multiply(d_tile, x_tile, shared.row_of_pixel, tiling, sums_bias);
        }
        __pipeline_wait_prior(0);
        if (sums_bias) flush_sums();

        float* to = partial ? partial + blockIdx.y * count() : dw;
        product.store([&](int o, int tap, int c, float2 value) {
            if (o0 + o >= O || c0 + c >= channels) return;
            size_t row = (size_t)(o0 + o) * TAPS + tap;
            *(float2*)(to + row * x.C() + (second ? x.first.C : 0) + c0 + c) = value;
        });
    }

    static void launch_tiles(const WeightGradient& g) {
        launch(weight_gradient_kernel<WeightBlock>, dim3(g.tiles(), g.splits), THREADS, sizeof(Shared), WeightBlock{g});
    }
};

// dw = the sum of the splits' partial sums, in a fixed order: each of eight threads adds every eighth split, and then their
// sums are added. Block b owns elements [128 b, 128 b + 128) of dw; the blocks from weight_blocks on reduce the bias gradient.
__global__ void weight_reduce_kernel(const WeightGradient g, size_t n, int weight_blocks) {
    await_inputs();
    if (blockIdx.x >= (unsigned)weight_blocks) return g.reduce_bias(blockIdx.x - weight_blocks);
    enum { REDUCERS = 8 };  // threads that share a sum
    __shared__ float4 sums[REDUCERS][32];
    int lane = threadIdx.x % 32;
    int reducer = threadIdx.x / 32;
    size_t i = ((size_t)blockIdx.x * 32 + lane) * 4;

    float4 sum = make_float4(0, 0, 0, 0);
    for (int first = reducer; i < n && first < g.splits; first += 8 * REDUCERS) {
        float4 loaded[8] = {};  // eight loads are under way at once
        for (int k = 0; k < 8; k++) {
            int s = first + k * REDUCERS;
            if (s < g.splits) loaded[k] = *(const float4*)(g.partial + s * n + i);
        }
        for (float4 more : loaded) sum += more;
    }
    sums[reducer][lane] = sum;
    __syncthreads();

    if (reducer != 0 || i >= n) return;
    for (int p = 1; p < REDUCERS; p++) sum += sums[p][lane];
    *(float4*)(g.dw + i) = sum;
}

// Takes memory for the splits' partial sums, has launch_sums(g) fill it, and launches what adds them up.
static void launch_weight_sums(WeightGradient g, auto launch_sums) {
    size_t bias_rows = g.splits + ceil_div(g.dout.B, g.tiling.images);
    Arena workspace = stream->workspace;
    if (g.dbias) g.bias_partials = take<float>(&workspace, bias_rows * g.tiling.images * g.dout.C);
    if (g.splits > 1) g.partial = take<float>(&workspace, g.splits * g.count());
    launch_sums(g);

    int weight_blocks = g.partial ? ceil_div(g.count(), 128) : 0;
    int bias_blocks = g.dbias ? ceil_div(g.dout.C, 8) : 0;
    int blocks = weight_blocks + bias_blocks;
    if (blocks) launch(weight_reduce_kernel, blocks, 256, 0, g, g.count(), weight_blocks);
}

// ---- launchers; maths and shapes stand in section 3, at the declarations of the same names

template <int TAPS>
static Gemm forward_gemm(Tensor out, Concat x, ConvLayer<TAPS> layer, const ForwardOptions& options) {
    return {.out = out, .residual = options.residual, .x = x, .w = layer.w, .bias = layer.bias, .emb = options.emb};
}

template <int TAPS>
static Gemm backward_input_gemm(Concat dx, Tensor dout, ConvLayer<TAPS> layer, const BackwardOptions& options) {
    const Concat residual = options.accumulate ? dx : Concat();
    return {.out = dx, .residual = residual, .x = dout, .w = layer.w, .norm = options.norm};
}

template <int TAPS, bool TRANSPOSED> static void launch_gemm(const Gemm& g) {
    launch_gemm<TAPS, TRANSPOSED>(g, choose(g, TAPS, TRANSPOSED));
}

template <int TAPS> static void launch_hopper_weight_gradient(WeightGradient g);  // section 12

// How many blocks share the pixels of a weight gradient. A block's pixels take a time of tiles / splits, and the
// reduction one of splits O C. The sum of the two is least where they are equal: at the root of tiles / (O C), times a
// factor that was measured on an H100. 3x3 has at most one block on a multiprocessor, and 1x1 two, so that all partial
// sums fit into half the workspace.
static int choose_weight_splits(const WeightGradient& g) {
    const int most_blocks = (g.taps > 1 ? 1 : 2) * gpu_multiprocessors;
    const int most = std::min(g.tiling.tiles, most_blocks / g.tiles());
    const int factor = sizeof(floatX) == 2 ? 480 : 830;
    const int balanced = (int)(factor * sqrtf((float)g.tiling.tiles / g.dout.C / g.x.C()));
    return std::max(1, std::min(most, balanced + 1));
}

template <int TAPS>
static void gemm_backward_weight(ConvLayer<TAPS> layer, Tensor dout, Concat x, Rows demb) {
    assert(!x.half_scale_shift);
    WeightGradient g = {
        .dw = layer.dw,
        .dbias = layer.dbias,
        .dout = shaped(dout, TAPS),
        .x = {shaped(x.first, TAPS), shaped(x.second, TAPS)},
        .per_image = demb,
        .taps = TAPS,
    };
    if constexpr (HAS_HOPPER && TAPS > 1) return launch_hopper_weight_gradient<TAPS>(g);

    using ThreadBlock = WeightBlock<TAPS>;
    g.tiling = make_tiling(g.dout, TAPS, ThreadBlock::PIXELS);
    g.splits = choose_weight_splits(g);
    launch_weight_sums(g, ThreadBlock::launch_tiles);
}

static void conv3x3_forward(Tensor out, Concat x, Conv layer, ForwardOptions options) {
    PROFILE("3x3 forward", convolution_work(out.rows(), 9, x.C(), out.C));
    launch_gemm<9, false>(forward_gemm(out, x, layer, options));
}

static void conv3x3_backward_input(Tensor dx, Tensor dout, Conv layer, BackwardOptions options) {
    PROFILE("3x3 dX", convolution_work(dout.rows(), 9, dx.C, dout.C));
    launch_gemm<9, true>(backward_input_gemm(dx, dout, layer, options));
}

static void conv3x3_backward_weight(Conv layer, Tensor dout, Tensor x, Rows demb) {
    PROFILE("3x3 dW", convolution_work(dout.rows(), 9, x.C, dout.C, sizeof(float)));
    gemm_backward_weight(layer, dout, x, demb);
}

static void conv1x1_forward(Tensor out, Concat x, Linear layer, ForwardOptions options) {
    PROFILE("1x1 forward", convolution_work(out.rows(), 1, x.C(), out.C));
    launch_gemm<1, false>(forward_gemm(out, x, layer, options));
}

static void conv1x1_backward_input(Concat dx, Tensor dout, Linear layer, BackwardOptions options) {
    PROFILE("1x1 dX", convolution_work(dout.rows(), 1, dx.C(), dout.C));
    launch_gemm<1, true>(backward_input_gemm(dx, dout, layer, options));
}

static void conv1x1_backward_weight(Linear layer, Tensor dout, Concat x) {
    PROFILE("1x1 dW", convolution_work(dout.rows(), 1, x.C(), dout.C, sizeof(float)));
    gemm_backward_weight(layer, dout, x, {});
}

// The product that has the tile: the last one whose first tile is no later.
__device__ inline int product_of_tile(const MatrixProduct* products, int count, int tile) {
    int first = 0;
    int end = count;
    while (end - first > 1) {
        const int middle = (first + end) / 2;
        if (products[middle].first_tile <= tile) first = middle;
        else end = middle;
    }
    return first;
}

// Block i does tile i of all products.
template <class ThreadBlock>
__global__ void __launch_bounds__(ThreadBlock::THREADS, ThreadBlock::BLOCKS)
    products_kernel(const MatrixProduct* products, int count) {
    await_inputs();
    const int tile = blockIdx.x;
    const MatrixProduct p = products[product_of_tile(products, count, tile)];
    ThreadBlock block = {{.out = p.out, .residual = p.added, .x = p.left, .w = p.right, .alpha = p.alpha, .beta = p.beta}};
    block.chunks_a_split = block.chunks();
    block.run(tile - p.first_tile);
}

static void multiply_matrices(const MatrixProduct* products, int count, int tiles, RightMatrix right_lies) {
    PROFILE("Muon", {});
    constexpr bool BF16 = sizeof(floatX) == 2;
    constexpr int SMALL = matrix_tile(RIGHT_TRANSPOSED);
    constexpr int LARGE = matrix_tile(RIGHT_IN_ROWS);
    using SmallBlock = GemmBlock<SMALL, SMALL, 32, 32, 1, false, 3, 4>;
    using LargeBlock = GemmBlock<LARGE, LARGE, 64, BF16 ? 64 : 32, 1, true, 3, BF16 ? 2 : 1>;
    auto launch_blocks = [&]<class ThreadBlock>(ThreadBlock) {
        const int bytes = ThreadBlock::shared_bytes(2, ThreadBlock::A_ROWS);
        launch(products_kernel<ThreadBlock>, tiles, ThreadBlock::THREADS, bytes, products, count);
    };
    if (right_lies == RIGHT_TRANSPOSED) launch_blocks(SmallBlock());
    else launch_blocks(LargeBlock());
}

}  // namespace gpu
#endif  // __CUDACC__

// ==== 12  HOPPER ===========================================================================================

#ifdef HOPPER
namespace gpu {
static_assert(sizeof(floatX) == 2, "HOPPER is for bf16: build without it for fp32");

// How a large 3x3 convolution runs. A block stays on its multiprocessor and computes one tile of outputs after
// another, 64 channels by 256 pixels each. Its warpgroups have different jobs:
//
//   warpgroup 0   multiplies tile 0 | finishes tile 0  | multiplies tile 2 | finishes tile 2  | ...
//   warpgroup 1                     | multiplies tile 1 | finishes tile 1  | multiplies tile 3 | ...
//   warpgroup 2   one thread loads patches of pixels into a ring of buffers, another loads weights into a
//                 second ring: both run ahead of the products, up to a tile
//   warpgroup 3   norms each patch where it lies, between its load and its product; only in tiles with NORMS
//
// Ping-pong: the two warpgroups that multiply take turns, so that the tensor cores are busy while outputs are
// finished (bias, residual, norm) and stored. See await_turn and pass_turn.
//
// Rings: every buffer has a barrier "full", which TMA completes when all bytes have come, and a barrier "empty",
// on which its readers arrive when they are done. Nobody waits for the whole block. See Ring and RingBarriers.
//
// Fused norm: a convolution that reads silu(norm(x)) loads x itself and norms it in shared memory, so that the
// normed tensor never crosses device memory. See norm_patches.
//
// Resident weights: where the ring has room for all weights that a block needs, they are loaded for the block's
// first tile and stay. See weights_resident.
//
// Smaller convolutions and 1x1 ones have tiles of 128 pixels. One warpgroup multiplies there, two blocks share a
// multiprocessor, and the blocks of a cluster may split a tile's sum over input channels. See combine.

// ---- TMA and WGMMA

namespace ptx = cuda::ptx;

// A barrier in shared memory. A phase is over when its threads have arrived and the expected bytes have come.
struct Barrier {
    uint64_t state;
    __device__ void init(int arrivals) { __mbarrier_init(&state, arrivals); }
    __device__ void expect(uint32_t bytes) {  // and arrive
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &state, bytes);
    }
    __device__ void arrive() { __mbarrier_arrive(&state); }
    // Until the phase of this parity is over.
    __device__ void wait(uint32_t parity) {
        while (!ptx::mbarrier_try_wait_parity(&state, parity)) continue;
    }
};

// The barriers of a ring of N buffers. One thread fills a buffer, by TMA, and then `readers` warpgroups read it.
template <int N> struct RingBarriers {
    Barrier full[N], empty[N];
    __device__ void init(int readers) {
        for (int i = 0; i < N; i++) {
            full[i].init(1);
            empty[i].init(readers);
        }
    }
};

// A thread's position in a ring: the buffer, and the parity of the barrier's phase that it waits for. A thread that fills
// buffers begins with parity 1, for which a new barrier does not wait: at first the buffers are empty.
template <int N> struct Ring {
    int slot = 0, parity = 0;
    __device__ int previous() const { return slot ? slot - 1 : N - 1; }
    __device__ void next() {
        slot++;
        if (slot == N) {
            slot = 0;
            parity ^= 1;
        }
    }
    __device__ void skip(int buffers) {
        slot += buffers;
        parity ^= slot / N & 1;
        slot %= N;
    }
};

// Waits for all threads of the warpgroup. Barrier 0 is that of __syncthreads.
__device__ inline void warpgroup_barrier(int warpgroup) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warpgroup), "r"(128) : "memory");
}

// A thread's warpgroup. The shuffle tells the compiler that it is the same for a whole warp, so that what
// follows from it is computed once a warp; without it the addresses for wgmma took longer than the products.
__device__ inline int this_warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }
// Sets the number of registers of a warpgroup's threads. "inc" waits until others have given up enough by "dec".
#define SET_REGISTERS(change, count) asm volatile("setmaxnreg." change ".sync.aligned.u32 %0;" ::"n"(count))

// Copies by TMA a box of a tensor, 64 channels of the pixels from `at` on, to shared memory or back: rows of 128 bytes,
// swizzled, with zeros where the box leaves the tensor. The bytes that come count towards those that the barrier expects.
__device__ inline void tma_load(void* to, const CUtensorMap& map, Barrier& barrier, int c, Pixel at) {
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, &map, {c, at.x, at.y, at.b},
                              &barrier.state);
}

__device__ inline void tma_store(const CUtensorMap& map, const void* from, int c, Pixel at) {
    ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &map, {c, at.x, at.y, at.b}, from);
    ptx::cp_async_bulk_commit_group();
}

// Needed between a thread's stores to shared memory and TMA or tensor cores that read what was stored.
__device__ inline void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void cluster_barrier() {
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
}

// The descriptor of a matrix that wgmma reads from shared memory. K-major: rows of 64 k, groups of eight
// rows `stride` bytes apart. MN-major (transposed): rows of 64 m or n, one a k, groups of eight k `stride`
// bytes apart; the next 64 m or n lie `next` bytes further. The swizzle depends on the address alone, so that a
// matrix may start at any row: another tap of a 3x3 convolution is another start address.
__device__ inline uint64_t matrix_descriptor(uint32_t address, uint32_t stride, uint32_t next = 16) {
    const uint64_t swizzle_128_bytes = 1ull << 62;
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(next >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           swizzle_128_bytes;
}

__device__ inline uint64_t advance(uint64_t matrix, int bytes) { return matrix + (bytes >> 4); }
__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Where element c[e] of a thread's registers lies in the 64 rows and N columns of a product, counted from the
// thread's c[0]. That one lies in row 16 * (warp of the warpgroup) + lane / 4 and column lane % 4 * 2.
struct Fragment {
    __device__ static constexpr int row_half(int e) { return e / 2 % 2; }  // every thread has two rows
    __device__ static constexpr int row(int e) { return row_half(e) * 8; }
    __device__ static constexpr int column(int e) { return e / 4 * 8 + e % 2; }
};

// clang-format off
#define REGISTERS_8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), \
                          "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
// c (64, N) += a (64, 16) b (16, N), a and b by their matrix descriptors. Fragment says which elements a
// thread has.
template <int N, int TRANSPOSED_A, int TRANSPOSED_B>
__device__ inline void wgmma(float* c, uint64_t a, uint64_t b) {  // c: N / 2 registers
    static_assert(N == 8 || N == 64 || N == 128 || N == 192, "one of the shapes below");
    if constexpr (N == 8)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3}, "
            "%4, %5, 1, 1, 1, %6, %7;"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
    if constexpr (N == 64)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "%32, %33, 1, 1, 1, %34, %35;"
            : REGISTERS_8(c, 0), REGISTERS_8(c, 8), REGISTERS_8(c, 16), REGISTERS_8(c, 24)
            : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
    if constexpr (N == 128)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "%64, %65, 1, 1, 1, %66, %67;"
            : REGISTERS_8(c, 0), REGISTERS_8(c, 8), REGISTERS_8(c, 16), REGISTERS_8(c, 24),
              REGISTERS_8(c, 32), REGISTERS_8(c, 40), REGISTERS_8(c, 48), REGISTERS_8(c, 56)
            : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
    if constexpr (N == 192)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
            "%96, %97, 1, 1, 1, %98, %99;"
            : REGISTERS_8(c, 0), REGISTERS_8(c, 8), REGISTERS_8(c, 16), REGISTERS_8(c, 24),
              REGISTERS_8(c, 32), REGISTERS_8(c, 40), REGISTERS_8(c, 48), REGISTERS_8(c, 56),
              REGISTERS_8(c, 64), REGISTERS_8(c, 72), REGISTERS_8(c, 80), REGISTERS_8(c, 88)
            : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
// clang-format on
}

typedef unsigned char Rows64[64 * 128];  // 64 rows of 64 channels, swizzled
// The tensor map by which TMA loads and stores boxes of x: of 64 channels, or of 16 in the 32-byte swizzle (dev/dit).
static CUtensorMap tensor_map(const Tensor& x, Box box, cuuint32_t channels = 64) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    if (!encode)
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000,
                                                    cudaEnableDefault));
    assert(encode);
    CUtensorMap map;
    const cuuint64_t row = (cuuint64_t)x.C * sizeof(floatX);
    const cuuint64_t sizes[] = {(cuuint64_t)x.C, (cuuint64_t)x.W, (cuuint64_t)x.H, (cuuint64_t)x.B};
    const cuuint64_t strides[] = {row, row * x.W, row * x.W * x.H};
    const cuuint32_t extent[] = {channels, (cuuint32_t)box.width, (cuuint32_t)box.height, (cuuint32_t)box.images};
    const cuuint32_t element_strides[] = {1, 1, 1, 1};
    const auto swizzle = channels == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B;
    CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x.data, sizes, strides, extent,
                             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    assert(status == CUDA_SUCCESS);
    return map;
}

// ---- forward and input gradient

// One tensor, or two side by side, of which the second begins at column `columns`.
struct ConcatMaps {
    CUtensorMap first, second;
    int columns;
    __device__ const CUtensorMap& of(int column) const { return column < columns ? first : second; }
    __device__ int within(int column) const { return column < columns ? column : column - columns; }
};

struct HopperGemm : Gemm {
    ConcatMaps x_map, out_map;
    ConcatMaps operand_map = {};  // the residual, or a norm's x, loaded where the outputs go; 0 columns: none
    CUtensorMap w_map = {};
};

__device__ inline void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

template <class ThreadBlock>
__global__ void __launch_bounds__(ThreadBlock::THREADS, ThreadBlock::BLOCKS)
    hopper_gemm_kernel(const __grid_constant__ HopperGemm g) {
    await_inputs();
    ThreadBlock block = {g, shared_memory<typename ThreadBlock::Shared>()};
    block.run();
}

// gemm_kernel's work, 64 output channels by a tile of pixels at a time. TMA fills two rings for the warpgroups that multiply.
// One ring has the patches of a tile, one for each chunk of 64 input channels, followed by a buffer for the tile's outputs,
// into which the residual or the norm's x is loaded first. The other ring has the weights of each tap and chunk.
//
// Block (rank in the cluster, channels, z) takes tiles z, z + gridDim.z, ... The blocks of a cluster take the same tile, and a
// share of its chunks each. With NORMS a warpgroup norms each patch that has come. Device memory: for each tile its patches
// and 64 channels' weights are read once; resident weights once for all of a block's tiles.
template <int TAPS, bool TRANSPOSED, GemmKernel KERNEL> struct HopperGemmBlock {
    static constexpr bool PAIRS = KERNEL == HOPPER_TWO_IMAGES;
    static constexpr bool NORMS = KERNEL == HOPPER_256_NORMED;     // a fourth warpgroup norms x on the way
    static constexpr int SUBTILES = KERNEL >= HOPPER_256 ? 2 : 1;  // sub-tiles of 128 pixels, side by side
    static constexpr int BLOCKS = 2 / SUBTILES;                    // on a multiprocessor
    // The threads that multiply: two warpgroups in ping-pong where a tile has two sub-tiles.
    static constexpr int READERS = SUBTILES * 128;
    // The threads that feed them. For 1x1 one thread fills both rings; for 3x3 two threads, in two warps, fill one each. With
    // two sub-tiles these warps are a warpgroup of their own, which leaves its registers to the others.
    static constexpr int feeders() {
        if (NORMS) return 256;
        if (SUBTILES > 1) return 128;
        return TAPS > 1 ? 64 : 32;
    }
    static constexpr int THREADS = READERS + feeders();
    // With two sub-tiles, the registers of a thread that multiplies, loads or norms. All threads begin with as many as fit, 168
    // (or 128 where there are four warpgroups); what loading and norming threads give up goes to those that multiply.
    static constexpr int LOADER_REGISTERS = 24, NORM_REGISTERS = 88;
    static constexpr int ALL_REGISTERS = NORMS ? 4 * 128 : 3 * 168;  // of one thread of each warpgroup
    static constexpr int FEEDER_REGISTERS = NORMS ? LOADER_REGISTERS + NORM_REGISTERS : LOADER_REGISTERS;
    static constexpr int READER_REGISTERS = (ALL_REGISTERS - FEEDER_REGISTERS) / 2;

    static constexpr int HALO = TAPS > 1;
    static constexpr Box PIXELS = hopper_tile(TAPS, KERNEL);
    static constexpr Box SUBTILE = {PIXELS.width / SUBTILES, PIXELS.height, PIXELS.images};
    static constexpr Box PATCH = {PIXELS.width + 2 * HALO, PIXELS.height + 2 * HALO, PIXELS.images};
    static constexpr int PITCH = TAPS == 1 ? 8 : PATCH.width;  // rows from eight pixels to the next eight
    static constexpr int IMAGE_ROWS = PATCH.width * PATCH.height, PATCH_ROWS = IMAGE_ROWS * PATCH.images;
    // A buffer has whole sweeps: swizzling repeats after eight rows, and the norming warpgroup takes 16 at a time.
    static constexpr int SWEEP = 16, SWEEPS = (PATCH_ROWS + SWEEP - 1) / SWEEP;

    // The buffers of the rings, of weights and of patches: as many as shared memory holds.
    struct Rings {
        int stages, patches;
    };
    static constexpr Rings rings() {
        if (TAPS == 1) return {4, 4};
        switch (KERNEL) {
            case HOPPER_128: return {8, 2};
            case HOPPER_TWO_IMAGES: return {7, 2};
            case HOPPER_256_ONE_CHUNK: return {9, 3};
            default: return {7, 4};
        }
    }
    static constexpr int STAGES = rings().stages, PATCHES = rings().patches;

    struct Shared {
        union Patch {
            unsigned char pixels[SWEEPS * SWEEP * 128];
            Rows64 outputs[SUBTILES][2];
        } patches[PATCHES];  // see also combine
        Rows64 w[STAGES];
        RingBarriers<PATCHES> patch_ring;
        RingBarriers<STAGES> stage;
        Barrier ping_pong[SUBTILES];  // each warpgroup waits for its own before it multiplies
        Barrier normed[PATCHES];      // with NORMS: completed when the patch is normed
        static_assert(sizeof(Patch) % 1024 == 0, "the swizzle depends on the address");
    };
    const HopperGemm& g;
    Shared& shared;
    const int o = blockIdx.y * 64;  // the block's first output channel
    const int warpgroup = this_warpgroup();
    const bool leads = threadIdx.x % 128 == 0;  // the first thread of its warpgroup
    const int splits = SUBTILES == 1 ? gridDim.x : 1;
    const int cluster_rank = SUBTILES == 1 ? blockIdx.x : 0;
    const int first = cluster_rank * g.chunks_a_split;  // the block's chunks: [first, last)
    const int last = min(first + g.chunks_a_split, g.chunks());
    const bool weights_resident = (last - first) * TAPS <= STAGES;  // loaded once, for all of the block's tiles
    Barrier* const ready = NORMS ? shared.normed : shared.patch_ring.full;  // completed when a patch may be multiplied

    // The first pixel of a tile.
    __device__ Pixel origin(int tile) const {
        if (TAPS == 1) return {0, 0, tile * PIXELS.width};
        return g.tiling.origin(tile);
    }
    // The first pixel of sub-tile k, in a tile that begins at `at`.
    __device__ static Pixel subtile(Pixel at, int k) { return {at.b, at.y, at.x + k * SUBTILE.width}; }

    // Done by one thread: loads patches and operands (the residual or the norm's x), or weights, or both.
    enum { LOAD_PATCHES = 1, LOAD_WEIGHTS = 2 };
    __device__ __forceinline__ void produce(int loads) {
        Ring<PATCHES> patch = {0, 1};
        Ring<STAGES> stage = {0, 1};
        for (int tile = blockIdx.z; tile < g.tiling.tiles; tile += gridDim.z) {
            const Pixel at = origin(tile);
            for (int chunk = first; chunk <= last; chunk++) {
                const int channel = g.first_channel(chunk);
                if (loads & LOAD_PATCHES) {
                    load_patch(at, chunk, channel, patch.slot, patch.parity);
                    patch.next();
                }
                const bool has_chunk = loads & LOAD_WEIGHTS && chunk < last;
                const bool wanted = has_chunk && (!weights_resident || tile == (int)blockIdx.z);
                for (int tap = 0; tap < TAPS && wanted; tap++, stage.next()) load_weights(channel, tap, stage);
            }
        }
    }
    // Loads the weights of a tap, for the chunk that begins at channel c.
    __device__ __forceinline__ void load_weights(int c, int tap, const Ring<STAGES>& stage) {
        Barrier& full = shared.stage.full[stage.slot];
        shared.stage.empty[stage.slot].wait(stage.parity);
        full.expect(sizeof(Rows64));
        const Pixel row = TRANSPOSED ? Pixel{0, c, TAPS - 1 - tap} : Pixel{0, o, tap};
        tma_load(shared.w[stage.slot], g.w_map, full, TRANSPOSED ? o : c, row);
    }
    // Loads a chunk's patch, or after the last chunk the operand, where the outputs will be put together.
    __device__ __forceinline__ void load_patch(Pixel at, int chunk, int c, int slot, int parity) {
        auto& to = shared.patches[slot];
        Barrier& full = shared.patch_ring.full[slot];
        shared.patch_ring.empty[slot].wait(parity);
        if (chunk < last) {
            full.expect(PATCH_ROWS * 128);
            tma_load(to.pixels, g.x_map.of(c), full, g.x_map.within(c), {at.b, at.y - HALO, at.x - HALO});
        } else if (g.operand_map.columns && cluster_rank == 0) {
            full.expect(sizeof to.outputs);
            for (int k = 0; k < SUBTILES; k++)
                tma_load(to.outputs[k], g.operand_map.of(o), full, g.operand_map.within(o), subtile(at, k));
        } else {
            full.arrive();
        }
    }

    // Done by a warpgroup: norms patches where they lie. Outside of the image they stay zero.
    __device__ __forceinline__ void norm_patches() {
        static_assert(!NORMS || (SWEEPS <= 32 && SUBTILES == 2), "a bit for each row; no clusters");
        const int vector = threadIdx.x % 8;
        const int first_row = threadIdx.x % 128 / 8;
        uint32_t left = 0, right = 0, top = 0, bottom = 0;  // bit i: the thread's row i lies in this side of the halo
#pragma unroll 1
        for (int i = 0; i < SWEEPS; i++) {
            const int row = first_row + i * SWEEP;
            const int y = row / PATCH.width;
            const int x = row % PATCH.width;
            left |= (x == 0) << i;
            right |= (x == PATCH.width - 1) << i;
            top |= (y == 0) << i;
            bottom |= (y == PATCH.height - 1) << i;
        }

        Ring<PATCHES> patch;
        for (int tile = blockIdx.z; tile < g.tiling.tiles; tile += gridDim.z) {
            const Pixel at = origin(tile);
            uint32_t outside = 0;  // bit i: the thread's row i lies outside of the image
            if (at.x == 0) outside |= left;
            if (at.y == 0) outside |= top;
            if (at.x + PIXELS.width == g.x.first.W) outside |= right;
            if (at.y + PIXELS.height == g.x.first.H) outside |= bottom;

            for (int chunk = first; chunk <= last; chunk++, patch.next()) {
                Vector<ScaleShift, VEC> half;
                if (chunk < last)
                    half = load<VEC>(g.x.half_scale_shift + at.b * g.x.C() + g.first_channel(chunk) + vector * VEC);
                shared.patch_ring.full[patch.slot].wait(patch.parity);
                unsigned char* rows = shared.patches[patch.slot].pixels + swizzled(first_row, vector);
                if (chunk < last)
                    UNROLLED_FOR (int i = 0; i < SWEEPS; i++) {
                        uint4* row = (uint4*)(rows + i * SWEEP * 128);
                        Unpacked y = unpack(*row);
                        UNROLLED_FOR (int e = 0; e < VEC; e++)
                            y[e] = silu_of_half(y[e] * half[e].scale + half[e].shift);
                        *row = outside >> i & 1 ? uint4{} : pack(y);
                    }
                fence_shared();
                shared.normed[patch.slot].arrive();
            }
        }
    }

    // The warpgroups' turns at the tensor cores. Each waits for its own barrier before a tile's products, and has
    // the other go on as soon as the last of them has been issued.
    __device__ __forceinline__ void await_turn(int& parity) {
        if constexpr (SUBTILES > 1) {
            shared.ping_pong[warpgroup].wait(parity);
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void pass_turn() {
        if constexpr (SUBTILES > 1)
            if (leads) shared.ping_pong[!warpgroup].arrive();
    }

    // Frees the weights that were read last.
    __device__ __forceinline__ void release_weights(const Ring<STAGES>& stage) {
        if (!weights_resident) shared.stage.empty[stage.previous()].arrive();
    }

    // c = a tile's sums over this block's chunks, 64 for each sub-tile: rows are channels, columns a sub-tile's pixels.
    __device__ __forceinline__ void multiply(float (&c)[SUBTILES * 64], Ring<PATCHES>& patch,
                                             Ring<STAGES>& stage) {
        UNROLLED_FOR (float& sum : c) sum = 0;
        if (weights_resident) stage = {};
#pragma unroll 1
        for (int chunk = first; chunk < last; chunk++, patch.next()) {
            ready[patch.slot].wait(patch.parity);
            const uint64_t pixels = matrix_descriptor(shared_address(shared.patches[patch.slot].pixels), PITCH * 128);
            UNROLLED_FOR (int tap = 0; tap < TAPS; tap++) {
                shared.stage.full[stage.slot].wait(stage.parity);
                const uint64_t w = matrix_descriptor(shared_address(shared.w[stage.slot]), 1024);
                wgmma_begin();
                const int tap_row = tap / 3 * PITCH + tap % 3;  // of the patch: the tap's first pixel
                UNROLLED_FOR (int k = 0; k < 4; k++) {
                    const uint64_t a = advance(w, k * (TRANSPOSED ? 2048 : 32));
                    auto b = [&](int row) { return advance(pixels, (tap_row + row) * 128 + k * 32); };
                    if constexpr (PAIRS) {
                        wgmma<64, TRANSPOSED, 0>(c, a, b(0));
                        wgmma<64, TRANSPOSED, 0>(c + 32, a, b(IMAGE_ROWS));
                    } else {
                        wgmma<128, TRANSPOSED, 0>(c, a, b(0));
                        if (SUBTILES > 1) wgmma<128, TRANSPOSED, 0>(c + 64, a, b(SUBTILE.width));
                    }
                }
                wgmma_commit();
                wgmma_wait<1>();  // the step before is done
                if (leads && (tap > 0 || chunk > first)) release_weights(stage);
                if (leads && tap == 0 && chunk > first) shared.patch_ring.empty[patch.previous()].arrive();
                stage.next();
            }
        }

        // Waits for the tile's operand, too, so that all buffers up to here have been full when the other warpgroup goes on: it
        // knows phases by their parity only, and could take an earlier one for its own.
        ready[patch.slot].wait(patch.parity);
        pass_turn();
        wgmma_wait<0>();
        if (leads) {
            release_weights(stage);
            shared.patch_ring.empty[patch.previous()].arrive();
        }
    }

    // The first block of the cluster adds the others' sums, which they leave in place of their patches, to its own.
    __device__ __forceinline__ void combine(float (&c)[SUBTILES * 64]) {
        static_assert(SUBTILES > 1 || sizeof shared.patches >= 128 * sizeof c, "the sums fit");
        float4* sums = (float4*)shared.patches + threadIdx.x;
        if (cluster_rank > 0) {
            warpgroup_barrier(0);  // the patches have been read
            UNROLLED_FOR (int e = 0; e < 64; e += 4) sums[e / 4 * 128] = *(const float4*)(c + e);
        }
        cluster_barrier();
        if (cluster_rank == 0)
            for (int r = 1; r < splits; r++)
                UNROLLED_FOR (int e = 0; e < 64; e += 4)
                    *(float4*)(c + e) += *(const float4*)__cluster_map_shared_rank(sums + e / 4 * 128, r);
        cluster_barrier();  // nobody leaves while another reads its shared memory
    }

    // Done by the threads beyond READERS: each of their warps does the one job that it has.
    __device__ __forceinline__ void feed() {
        if (NORMS && threadIdx.x >= READERS + 128) {
            SET_REGISTERS("dec", NORM_REGISTERS);
            return norm_patches();
        }
        if (SUBTILES > 1) SET_REGISTERS("dec", LOADER_REGISTERS);
        if (threadIdx.x == READERS) produce(TAPS == 1 ? LOAD_PATCHES | LOAD_WEIGHTS : LOAD_PATCHES);
        if (threadIdx.x == READERS + 32) produce(LOAD_WEIGHTS);
        __syncwarp();
        if (splits > 1) {  // as in combine, where all threads of the cluster meet twice
            cluster_barrier();
            cluster_barrier();
        }
    }

    // Finishes a sub-tile's sums as GemmBlock::finish does: adds bias, embedding and residual, or makes the gradient before a
    // norm's SiLU. A thread has channels row and row + 8, and of each 32 pixels.
    struct Epilogue {
        static constexpr int IMAGES = PAIRS || TAPS == 1 ? 2 : 1;  // how many a sub-tile may hold
        static_assert(SUBTILES == 1 || IMAGES == 1, "all sub-tiles are of one image");
        const HopperGemm& g;
        Pixel at;  // the first pixel of the tile, then of the current sub-tile
        const int lane = threadIdx.x % 32;
        const int row = blockIdx.y * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
        const int images = PAIRS || g.x.first.T() == 64 ? IMAGES : 1;  // how many it does hold
        const int image = TAPS == 1 ? at.x / g.x.first.T() : at.b;     // the first of them
        const bool has_norm = TRANSPOSED && g.norm;
        // For each image and row: bias and embedding; the norm's parameters; sums for this norm or the next.
        float bias[IMAGES][2] = {};
        GroupStatistics statistics[IMAGES][2];
        ScaleShift half[IMAGES][2];
        float sum[IMAGES][2], product[IMAGES][2];
        // The image of a thread's element e, of 64. Columns are pixels, of two images one after the other.
        __device__ static constexpr int image_of(int e) { return Fragment::column(e) * IMAGES / 128; }

        __device__ __forceinline__ void load() {
            UNROLLED_FOR (int i = 0; i < IMAGES; i++)
                UNROLLED_FOR (int r = 0; r < 2; r++) {
                    int n = min(row + 8 * r, g.N() - 1);
                    int b = min(image + (images == 1 ? 0 : i), g.x.first.B - 1);
                    if (!TRANSPOSED && g.bias) bias[i][r] = (float)g.bias[n];
                    if (!TRANSPOSED && g.emb.data) bias[i][r] += (float)g.emb.row(b)[n];
                    if (!has_norm) continue;
                    statistics[i][r] = g.norm.statistics[b * g.N() + n];
                    half[i][r] = g.norm.half_scale_shift[b * g.N() + n];
                }
        }

        // Finishes c (64), rounds it, and transposes it into shared memory, over the operand that was loaded there. The kind of
        // operand is a template argument: branches between the elements made each wait for the one before, and a step of the
        // default model at batch 32 took 5% longer on an H100.
        __device__ __forceinline__ void finish(float* c, Pixel first, uint32_t outputs) {
            at = first;
            UNROLLED_FOR (int i = 0; i < IMAGES; i++) sum[i][0] = sum[i][1] = product[i][0] = product[i][1] = 0;

            if (has_norm && g.norm.silu) finish_with<NORM_SILU>(c, outputs);
            else if (has_norm) finish_with<NORM>(c, outputs);
            else if (g.operand_map.columns) finish_with<RESIDUAL>(c, outputs);
            else finish_with<NO_OPERAND>(c, outputs);
        }
        enum Operand { NO_OPERAND, RESIDUAL, NORM, NORM_SILU };
        template <Operand OPERAND> __device__ __forceinline__ void finish_with(float* c, uint32_t outputs) {
            int line = lane % 8 + lane / 16 * 8;
            int vector = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
            uint32_t rows = outputs + swizzled(line, vector);
            uint32_t operands[4][4];  // four loads come before the first store, so that none waits for another
            UNROLLED_FOR (int j = 0; j < 16; j += 2) {
                uint32_t(&bits)[4] = operands[j / 2 % 4];
                if (j % 8 == 0 && OPERAND != NO_OPERAND)  // those of this and the next three rounds
                    UNROLLED_FOR (int k = 0; k < 4; k++)
                        load_matrices_transposed(operands[k], rows + (j + 2 * k) * 1024);

                UNROLLED_FOR (int e = 0; e < 8; e++) {
                    const int i = image_of(4 * j);
                    const int r = Fragment::row_half(e);
                    float& value = c[4 * j + e];
                    float operand = bf16_of_pair(bits[e / 2], e % 2);
                    if constexpr (!TRANSPOSED) value += bias[i][r];
                    if constexpr (OPERAND == RESIDUAL) value += operand;
                    if constexpr (OPERAND == NORM_SILU)
                        value *= silu_gradient_of_half(operand * half[i][r].scale + half[i][r].shift);
                    if constexpr (OPERAND == NORM || OPERAND == NORM_SILU) {
                        sum[i][r] += value;
                        product[i][r] += value * operand;
                    }
                }

                UNROLLED_FOR (int e = 0; e < 4; e++) bits[e] = pack_bf16(c[4 * j + 2 * e], c[4 * j + 2 * e + 1]);
                store_matrices_transposed(rows + j * 1024, bits);
            }
        }

        // Adds up over the four lanes that share a row and, where a sub-tile is of one image, over its two halves.
        __device__ __forceinline__ void add_up(float (&sums)[IMAGES][2]) {
            UNROLLED_FOR (int r = 0; r < 2; r++) {
                UNROLLED_FOR (int i = 0; i < IMAGES; i++)
                    for (int offset = 1; offset < 4; offset *= 2)
                        sums[i][r] += __shfl_xor_sync(~0u, sums[i][r], offset);
                if (IMAGES == 2 && images == 1) {
                    const float both = sums[0][r] + sums[IMAGES - 1][r];
                    sums[0][r] = sums[IMAGES - 1][r] = both;
                }
            }
        }
        // The outputs' moments: sum becomes their mean, and product this thread's part of the squares about it.
        __device__ __forceinline__ void take_moments(const float* c) {
            UNROLLED_FOR (int e = 0; e < 64; e++) sum[image_of(e)][Fragment::row_half(e)] += c[e];
            add_up(sum);
            UNROLLED_FOR (int i = 0; i < IMAGES; i++) {
                sum[i][0] /= 128 / images;
                sum[i][1] /= 128 / images;
            }

            UNROLLED_FOR (int e = 0; e < 64; e++) {
                const int i = image_of(e);
                const int r = Fragment::row_half(e);
                float distance = c[e] - sum[i][r];
                product[i][r] += distance * distance;
            }
        }
        // Writes the sums that a norm needs: forward the moments of the outputs, backward NormSums, which finish() has begun.
        __device__ __forceinline__ void write_sums(const float* c) {
            if constexpr (TRANSPOSED) add_up(sum);
            else take_moments(c);
            int pixel = TAPS == 1 ? at.x : image * g.x.first.T();  // how many pixels lie in tiles before this one
            if (TAPS > 1 && !PAIRS) pixel += (at.y / 16 * (g.x.first.W / 8) + at.x / 8) * 128;
            add_up(product);

            UNROLLED_FOR (int r = 0; r < 2; r++)
                UNROLLED_FOR (int i = 0; i < IMAGES; i++) {
                    const int norm_tile = images == 1 ? pixel / 128 : pixel / 64 + i;
                    const int n = row + 8 * r;
                    if (lane % 4 || i >= images || n >= g.N()) continue;
                    if (norm_tile * (128 / images) >= g.x.first.rows()) continue;
                    if (SUBTILES > 1 && at.x >= g.x.first.W) continue;
                    if (has_norm) {
                        const GroupStatistics of = statistics[i][r];
                        product[i][r] = (product[i][r] - of.mean * sum[i][r]) * of.rstd;
                    }
                    g.sums[(size_t)norm_tile * g.N() + n] = make_float2(sum[i][r], product[i][r]);
                }
        }
    };

    __device__ __forceinline__ void run() {
        if (threadIdx.x == 0) {
            shared.patch_ring.init(1);
            shared.stage.init(1);
            for (Barrier& barrier : shared.ping_pong) barrier.init(1);
            for (Barrier& normed : shared.normed) normed.init(128);
            ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        }
        __syncthreads();

        if (threadIdx.x >= READERS) return feed();
        if (SUBTILES > 1) SET_REGISTERS("inc", READER_REGISTERS);

        Ring<PATCHES> patch;
        Ring<STAGES> stage;
        const int chunks = last - first;
        auto skip = [&](int tiles) {  // passes over the buffers of the other warpgroup's tiles
            patch.skip(tiles * (chunks + 1));
            stage.skip(tiles * chunks * TAPS);
        };
        skip(warpgroup);
        int parity = warpgroup == 0;  // of its ping-pong barrier: warpgroup 0 does not wait the first time
        int tile = blockIdx.z + warpgroup * gridDim.z;
        while (tile < g.tiling.tiles) {
            const Pixel at = origin(tile);
            Epilogue epilogue = {g, at};
            epilogue.load();
            float c[SUBTILES * 64];
            await_turn(parity);
            multiply(c, patch, stage);
            if (splits > 1) combine(c);
            if (cluster_rank > 0) return;  // the blocks of a cluster have only one tile

            UNROLLED_FOR (int k = 0; k < SUBTILES; k++) {
                auto& outputs = shared.patches[patch.slot].outputs[k];
                epilogue.finish(c + 64 * k, subtile(at, k), shared_address(outputs));
                fence_shared();
                warpgroup_barrier(warpgroup);
                if (leads) tma_store(g.out_map.of(o), outputs, g.out_map.within(o), epilogue.at);
                if (g.sums) epilogue.write_sums(c + 64 * k);
            }
            if (leads) {  // waits until TMA has read the outputs
                ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
                shared.patch_ring.empty[patch.slot].arrive();
            }
            patch.next();

            tile += SUBTILES * gridDim.z;
            skip(SUBTILES - 1);
        }
    }

    static void launch_tiles(const Gemm& g) {
        auto maps_of = [&](const Concat& x, Box box) {
            ConcatMaps maps = {tensor_map(shaped(x.first, TAPS), box), {}, x.first.C};
            if (x.second.C) maps.second = tensor_map(shaped(x.second, TAPS), box);
            return maps;
        };
        HopperGemm h = {g, maps_of(g.x, PATCH), maps_of(g.out, SUBTILE)};
        h.tiling = make_tiling(shaped(g.x.first, TAPS), PIXELS);
        const int rows = TRANSPOSED ? g.x.C() : g.N();
        const int channels = TRANSPOSED ? g.N() : g.x.C();
        h.w_map = tensor_map({(floatX*)g.w, 1, rows, TAPS, channels}, {1, 64, 1});
        const Concat& operand = g.norm ? g.norm.x : g.residual;
        if (operand.first) h.operand_map = maps_of(operand, SUBTILE);

        // Blocks take one tile after another, so that a tile's loads overlap the epilogue of the tile before.
        const int columns = ceil_div(g.N(), 64);
        const int blocks = std::min(h.tiling.tiles, std::max(1, BLOCKS * gpu_multiprocessors / columns));
        assert(g.splits == 1 || (SUBTILES == 1 && blocks == h.tiling.tiles));
        launch<true>(hopper_gemm_kernel<HopperGemmBlock>, dim3(g.splits, columns, blocks), THREADS, sizeof(Shared), h);
    }
};

template <int TAPS, bool TRANSPOSED> static void launch_hopper(const Gemm& g, GemmKernel kernel) {
    if constexpr (TAPS == 1) {
        HopperGemmBlock<1, TRANSPOSED, HOPPER_128>::launch_tiles(g);
    } else {
        switch (kernel) {
            case HOPPER_TWO_IMAGES: HopperGemmBlock<9, TRANSPOSED, HOPPER_TWO_IMAGES>::launch_tiles(g); break;
            case HOPPER_256: HopperGemmBlock<9, TRANSPOSED, HOPPER_256>::launch_tiles(g); break;
            case HOPPER_256_ONE_CHUNK: HopperGemmBlock<9, TRANSPOSED, HOPPER_256_ONE_CHUNK>::launch_tiles(g); break;
            case HOPPER_256_NORMED: HopperGemmBlock<9, false, HOPPER_256_NORMED>::launch_tiles(g); break;
            default: HopperGemmBlock<9, TRANSPOSED, HOPPER_128>::launch_tiles(g);
        }
    }
}

// ---- weight gradient
// The weight gradient of 3x3 convolutions on wgmma, in place of section 11's weight_gradient_kernel: that one says what
// is computed, and adds up the splits of this one too, in weight_reduce_kernel.

template <class ThreadBlock>
__global__ void __launch_bounds__(ThreadBlock::THREADS, ThreadBlock::BLOCKS)
    hopper_weight_gradient_kernel(const __grid_constant__ ThreadBlock block) {
    await_inputs();
    block.run();
}

// weight_gradient_kernel's work on wgmma. Block (split, tile) owns its split's partial sums of one tile of
// dw. One warp fills a ring of stages by TMA; a stage has 64 pixels of dout, and those of x with their halo. All the
// block's warpgroups read it: a tap is a shift of the start address. A block's pixels come in once. Where there is one
// split, the sums go straight to dw. Of the blocks that read the same channels of dout, the first also sums these over each
// image, by a product with a matrix of eight columns, of which the image's is ones and the others are zeros.
//
// Each warpgroup has 64 output channels by 64 input channels at the three taps of a line. A block has three
// warpgroups, one for each line of taps; or it has one, where reading the pixels three times costs less than
// adding up three times as many sums. A step of the reduction is 8 x 8 pixels.
template <int WARPGROUPS> struct HopperWeightBlock : WeightGradient {
    CUtensorMap dout_map, x_map;
    static constexpr int BLOCKS = WARPGROUPS == 1 ? 2 : 1;
    static constexpr int READERS = WARPGROUPS * 128, THREADS = READERS + 32;
    static constexpr Box DOUT = {8, 8, 1}, X = {10, 7 + WARPGROUPS, 1};  // of a step
    struct Stage {
        Rows64 dout;
        unsigned char x[(X.width * X.height + 7) / 8 * 1024];
    };
    static constexpr int STAGES = (216 << 10) / BLOCKS / (int)sizeof(Stage);
    struct Shared {
        Stage stages[STAGES];
        RingBarriers<STAGES> ring;
        // Row 7 is ones, all others are zeros: the eight rows from 7 - n on are a matrix whose row n is ones.
        alignas(16) uint32_t ones[15][4];
        // Nobody reads this: compute-sanitizer takes a product's 6144 bytes of x, lines apart, for one piece.
        unsigned char unread[4096];
    };

    // Done by one thread: loads tiles [first, last), of dout the channels from o0 on, of x those from c0 on.
    __device__ __forceinline__ void load(Shared& shared, int first, int last, int o0, int c0, int tap_line) const {
        Pixel at = tiling.origin(first);
        Ring<STAGES> stage = {0, 1};
        for (int t = first; t < last; t++, stage.next()) {
            auto& to = shared.stages[stage.slot];
            Barrier& full = shared.ring.full[stage.slot];
            shared.ring.empty[stage.slot].wait(stage.parity);
            full.expect(sizeof to.dout + X.width * X.height * 128);
            tma_load(to.x, x_map, full, c0, {at.b, at.y + tap_line - 1, at.x - 1});
            tma_load(to.dout, dout_map, full, o0, at);

            // The next tile. Divisions instead would take this one thread longer than a product takes the others.
            at.x += 8;
            if (at.x >= tiling.W) {
                at.x = 0;
                at.y += 8;
            }
            if (at.y >= tiling.H) {
                at.y = 0;
                at.b++;
            }
        }
    }

    __device__ __forceinline__ void run() const {
        constexpr int PITCH = X.width;
        auto& shared = shared_memory<Shared>();
        const int lane = threadIdx.x % 32;
        const int warpgroup = this_warpgroup();
        // The place of a thread's c[0], see Fragment. Rows are output channels. Columns are images, or input channels at three
        // taps.
        const int row = threadIdx.x % 128 / 32 * 16 + lane / 4;
        const int column = lane % 4 * 2;
        const int split = blockIdx.x;
        const int tile = WARPGROUPS == 1 ? blockIdx.y / 3 : blockIdx.y;
        const int tap_line = WARPGROUPS == 1 ? blockIdx.y % 3 : 0;  // the first of the block's lines of taps: 0, 1 or 2
        const int C = x.first.C;
        const int O = dout.C;
        const int c_tiles = ceil_div(C, 64);
        const int c0 = tile % c_tiles * 64;
        const int o0 = tile / c_tiles * 64;
        const int first = first_tile(split);
        const int last = first_tile(split + 1);

        if (threadIdx.x == 0) {
            shared.ring.init(WARPGROUPS);
            ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        }
        if (threadIdx.x < 60)  // see Shared
            shared.ones[threadIdx.x / 4][threadIdx.x % 4] = threadIdx.x / 4 == 7 ? 0x3f803f80 : 0;
        fence_shared();
        __syncthreads();

        if (threadIdx.x >= READERS) {
            if (threadIdx.x == READERS) load(shared, first, last, o0, c0, tap_line);
            return;
        }

        float c[96] = {};  // a warpgroup's sums over this block's pixels
        Ring<STAGES> stage;
        auto release = [&] {  // of the stage before
            if (threadIdx.x % 128 == 0) shared.ring.empty[stage.previous()].arrive();
        };
        // Adds the products of all steps to c, and with the bias makes its partial sums. Steps are then done in runs,
        // each of at most eight images, whose sums are the eight columns.
        auto multiply = [&](auto with_bias) {
            constexpr bool BIAS = decltype(with_bias)::value;
            const int steps = tiling.set_tiles();  // of an image
            int end;
            for (int begin = first; begin < last; begin = end) {
                const int first_image = begin / steps;
                const int image0 = first_image / 8 * 8;  // that of column 0
                end = BIAS ? min(last, (image0 + 8) * steps) : last;
                int left = (first_image + 1) * steps - begin;  // steps left of the image
                // The matrix is not swizzled. Its rows have eight k, which serve for the other eight, too.
                uint32_t ones = shared_address(shared.ones[7 - (first_image - image0)]);
                float sums[4] = {0, 0, 0, 0};
#pragma unroll 1
                for (int t = begin; t < end; t++, stage.next()) {
                    auto& from = shared.stages[stage.slot];
                    const uint64_t dout_matrix = matrix_descriptor(shared_address(from.dout), 1024);
                    const uint32_t line = shared_address(from.x) + warpgroup * PITCH * 128;  // the next tap: a row on
                    const uint64_t x_matrix = matrix_descriptor(line, PITCH * 128, 128);
                    shared.ring.full[stage.slot].wait(stage.parity);
                    wgmma_begin();
                    for (int k = 0; k < 4; k++) {
                        const uint64_t a = advance(dout_matrix, k * 2048);
                        wgmma<192, 1, 1>(c, a, advance(x_matrix, k * 2 * PITCH * 128));
                        if (BIAS) wgmma<8, 1, 0>(sums, a, (ones & 0x3ffff) >> 4);
                    }
                    wgmma_commit();
                    wgmma_wait<1>();  // the step before is over
                    if (t > begin) release();
                    if (BIAS && --left == 0) {  // the next image, and its column
                        left = steps;
                        ones -= 16;
                    }
                }
                wgmma_wait<0>();
                release();

                if (BIAS)
                    for (int e = 0; e < 4; e++) {
                        const int o = o0 + row + Fragment::row(e);
                        const int image = image0 + column + Fragment::column(e);
                        if (o < O && image >= first_image && image <= (end - 1) / steps)
                            bias_partial(split, image, 0, o) = sums[e];
                    }
            }
        };

        // All warpgroups read dout; the first also sums it.
        const bool sums_bias = bias_partials && c0 == 0 && tap_line == 0 && warpgroup == 0;
        if (sums_bias) multiply(std::true_type());
        else multiply(std::false_type());

        float* to = partial ? partial + split * count() : dw;
        UNROLLED_FOR (int e = 0; e < 96; e += 2) {  // columns: 64 input channels at each of the line's three taps
            const int o = o0 + row + Fragment::row(e);
            const int tap = (tap_line + warpgroup) * 3 + Fragment::column(e) / 64;
            const int channel = c0 + Fragment::column(e) % 64 + column;
            if (o >= O || channel >= C) continue;
            *(float2*)(to + ((size_t)o * 9 + tap) * C + channel) = make_float2(c[e], c[e + 1]);
        }
    }

    static void launch_tiles(const WeightGradient& g) {
        HopperWeightBlock block = {g, tensor_map(g.dout, DOUT), tensor_map(g.x.first, X)};
        const int tiles = g.tiles() * (3 / WARPGROUPS);
        launch(hopper_weight_gradient_kernel<HopperWeightBlock>, dim3(g.splits, tiles), THREADS, sizeof(Shared), block);
    }
};

// conv3x3_backward_weight with the warpgroups and splits that should take the least time on an H100. The time is estimated as
// the rounds of blocks, times a block's steps, plus that of adding up the splits.
template <int TAPS> static void launch_hopper_weight_gradient(WeightGradient g) {
    g.tiling = make_tiling(g.dout, TAPS, 64);
    const int pixel_tiles = g.tiling.tiles;
    int best_warpgroups = 0;
    float least_us = FLT_MAX;
    for (int warpgroups : {3, 1}) {
        const int tiles = g.tiles() * (3 / warpgroups);
        const float step_us = warpgroups == 3 ? 0.75f : 0.3f;
        const int most_splits = std::max(1, std::min(pixel_tiles, gpu_multiprocessors / tiles));
        for (int splits = 1; splits <= most_splits; splits++) {
            const int rounds = ceil_div(splits * tiles, gpu_multiprocessors);
            const int steps = ceil_div(pixel_tiles, splits);
            float us = rounds * steps * step_us;
            if (splits > 1) us += 6.0f + 1e-5f * splits * g.dout.C * g.x.first.C;
            if (us >= least_us) continue;
            least_us = us;
            best_warpgroups = warpgroups;
            g.splits = splits;
        }
    }
    if (best_warpgroups == 3) launch_weight_sums(g, HopperWeightBlock<3>::launch_tiles);
    else launch_weight_sums(g, HopperWeightBlock<1>::launch_tiles);
}

}  // namespace gpu
#endif  // HOPPER
