// train_unet.cu: trains a UNet diffusion model (DDPM) on images, from raw kernels to finished pictures, in
// one file.
//
//   make train_unet                     builds for the GPU where there is one, otherwise for the CPU
//   ./train_unet --data_file X.bin      trains; X.bin comes from prepare_data.py (default: the demo data)
//   ./train_unet --generate 64          draws pictures with the newest checkpoint
//   ./train_unet --help                 every flag with its default
//
// The network is the UNet of "Diffusion Models Beat GANs on Image Synthesis" (Dhariwal and Nichol, 2021), the
// training objective that of "Denoising Diffusion Probabilistic Models" (Ho, Jain and Abbeel, 2020).
// train_unet.py holds the same model in PyTorch; it checks this file and is never needed to run it.
//
// -----------------------------------------------------------------------------------------------------------
// Contracts: what every function here may rely on
//
// Names        B images a batch, H W height and width, C input and O output channels, T = H*W, E embedding
//              width, G groups; x input, y or out output, w weight, dx dy dw their gradients, mean rstd a
//              group's statistics.
// Layout       Activations are NHWC. 3x3 weights lie in memory as (O, 3, 3, C) and in files as (O, C, 3, 3),
//              PyTorch's order; every other weight lies in memory as it does in files. The weights follow
//              each other in another order than in files: see join_projections. On a GPU an image's three
//              channels, and their weights, are followed by zeros: see padded.
// Precision    floatX holds activations, their gradients and the working weights (float on the CPU). Weight
//              gradients, optimiser state, statistics, loss and every accumulator are float or wider.
// Gradients    Weight gradients accumulate (+=). Activation gradients overwrite, except where a tensor feeds
//              two consumers: an encoder output is read by the next block and, as a skip, by the decoder. The
//              decoder's backward runs first and overwrites, the encoder's then adds: Block.accumulate.
// Memory       Everything is sized from the plan and allocated once, before the first step. Activations,
//              their gradients and scratch take turns in one arena (Buffer). A layer never allocates.
// Layers       Declared once, in room 3. namespace cpu holds the specification of each; namespace gpu, in the
//              CUDA build, launchers of kernels that do the same. Arguments: outputs, inputs, sizes. Launchers
//              own their geometry, never synchronise, always check.
// Randomness   A function of (seed, stream, step, sample, element), never a state: see Philox below. Any step
//              can be recomputed alone, and resuming needs no saved generator.
// Determinism  Same binary, seed, batch and device: the same bits, on the CPU whatever the number of threads.
//              Reductions run in an order that the shapes alone decide.
//
// -----------------------------------------------------------------------------------------------------------
// Contents
//
//   1  CONFIGURATION AND ERRORS: errors; configuration
//   2  MEMORY, TENSORS, RANDOMNESS: arenas; the machine; tensors; randomness
//   3  THE LAYERS, DECLARED
//   4  BLOCKS: embedding; first convolution; residual block; attention block; last block
//   5  PLAN AND WALK: plan; walk
//   6  DIFFUSION AND SAMPLERS: schedules; noising; samplers
//   7  OPTIMISER
//   8  TRAINING: memory of a run; the first and the last launch of a step; a training step; drawing pictures;
//        the loop
//   9  FILES: flags; checksums; files; images; weights and checkpoints; pictures; logs
//  10  COMMAND LINE AND MAIN: flags as they are typed; configuration files; what a run prints; how long a
//        step takes; from flags to a run
//  11  LAYERS ON THE CPU: the machine; CPU workspace; matrix product; timestep embedding, SiLU; bias
//        gradient; linear and 1x1 convolution; 3x3 convolution; group norm + SiLU; attention; up- and
//        down-sampling; loss; noise and samplers; optimiser; the first and the last launch of a step
//  12  LAYERS ON THE GPU: the machine; what the kernels share; timestep embedding, SiLU; group norm + SiLU;
//        attention; up- and down-sampling; loss; noise and samplers; optimiser; the first and the last launch
//        of a step; linear layers, 1x1 and 3x3 convolutions; vectors and instructions; patches; forward and
//        input gradient; weight gradient; bias gradient; launchers
//  13  HOPPER: tensor copies and warpgroup products; forward and input gradient; weight gradient

#include <cerrno>
#include <cfloat>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include <algorithm>
#include <atomic>
#include <new>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#if defined(_OPENMP)
#include <omp.h>
#elif !defined(__CUDACC__) || defined(TESTING)
static int omp_get_max_threads() { return 1; }
static int omp_get_thread_num() { return 0; }
#endif
#ifdef OPENBLAS
#include <cblas.h>
#endif
#ifdef __CUDACC__
#ifdef HOPPER
#include <cuda.h>
#endif
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#endif

// ===========================================================================================================
//  1  CONFIGURATION AND ERRORS
// ===========================================================================================================

// ---- errors -----------------------------------------------------------------------------------------------

// A mistake the user can mend: one sentence that names the file, flag or value and what to do, exit status 1.
// The fuzzer of test_unet.cu replaces the handler by one that throws, to see that a bad file always ends here
// and nowhere else.
static void exit_with_message(int status, const char* message) {
    fflush(stdout);
    fprintf(stderr, "error: %s\n", message);
    exit(status);
}
static void (*fail_handler)(int status, const char* message) = exit_with_message;

// "FILE, line N: " while a configuration file is read; every sentence starts with it.
static std::string error_place;

// Bytes as a message may show them: a control byte as \x1B, so that no file's name can drive the terminal.
// Whole characters of UTF-8 stay, without the control characters among them.
static std::string printable(const std::string& bytes) {
    std::string shown;
    for (size_t i = 0, length; i < bytes.size(); i += length) {
        uint8_t first = (uint8_t)bytes[i];
        bool plain = first < 0x80 ? first >= ' ' && first != 127 : first >= 0xC2 && first < 0xF5;
        length = first < 0xC2 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
        for (size_t k = 1; k < length; k++) plain &= i + k < bytes.size() && (bytes[i + k] & 0xC0) == 0x80;
        if (plain && first == 0xC2) plain = (uint8_t)bytes[i + 1] >= 0xA0;
        if (!plain) length = 1;
        char code[8];
        snprintf(code, sizeof code, "\\x%02X", first);
        shown += plain ? bytes.substr(i, length) : code;
    }
    return shown;
}

[[noreturn]] static void vfail(int status, const char* format, va_list args) {
    char message[2048];
    vsnprintf(message, sizeof message, format, args);
    std::string sentence = printable(error_place + message);
    error_place.clear();
    fail_handler(status, sentence.c_str());
    abort();
}
[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    vfail(1, format, args);
}
[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail_usage(const char* format, ...) {
    va_list args;
    va_start(args, format);
    vfail(2, format, args);
}

// The sentence that `work` fails with, "" where it succeeds: what is not worth ending the program for.
template <typename Work>
static std::string failure_of(Work work) {
    struct Handler {
        void (*before)(int, const char*) = fail_handler;
        ~Handler() { fail_handler = before; }
    } handler;
    fail_handler = [](int, const char* message) { throw std::string(message); };
    try {
        work();
    } catch (std::string& message) {
        return message;
    }
    return "";
}

// A mistake of ours: the expression that failed, file and line.
#define ASSERT(condition)                                                                             \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            fprintf(stderr, "%s:%d: assertion failed: %s (please report this)\n", __FILE__, __LINE__, \
                    #condition);                                                                      \
            abort();                                                                                  \
        }                                                                                             \
    } while (0)

__attribute__((format(printf, 1, 2))) static std::string text(const char* format, ...) {
    char buffer[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    return buffer;
}

// A line for the reader that may hold names: `format` ends in a line break.
__attribute__((format(printf, 1, 2))) static void say(const char* format, ...) {
    char line[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    printf("%s\n", printable(std::string(line, strcspn(line, "\n"))).c_str());
}

// "1 picture", "2 pictures"
static std::string counted(long n, const char* noun) { return text("%ld %s%s", n, noun, n == 1 ? "" : "s"); }

// The shortest text that reads back as the same float.
static std::string float_text(float value) {
    for (int digits = 1; digits < 9; digits++) {
        std::string shorter = text("%.*g", digits, (double)value);
        if (strtof(shorter.c_str(), nullptr) == value) return shorter;
    }
    return text("%.9g", (double)value);
}

static std::string human_bytes(double bytes) {
    return bytes >= 1e9   ? text("%.2f GB", bytes / 1e9)
           : bytes >= 1e6 ? text("%.1f MB", bytes / 1e6)
                          : text("%.1f kB", bytes / 1e3);
}

static std::string human_time(double seconds) {
    long s = (long)(seconds + 0.5);
    if (s < 60) return text("%lds", s);
    if (s < 3600) return text("%ldm %02lds", s / 60, s % 60);
    if (s < 48 * 3600) return text("%ldh %02ldm", s / 3600, s / 60 % 60);
    return text("%ldd %02ldh", s / 86400, s / 3600 % 24);
}

static double seconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// ---- configuration ----------------------------------------------------------------------------------------

enum { MAX_LEVELS = 8, MAX_EMAS = 4, MAX_PATH_LENGTH = 1024, IMAGE_CHANNELS = 3, MAX_ATTENTION_SIZE = 512 };

enum NoiseSchedule { SCHEDULE_LINEAR, SCHEDULE_COSINE };
enum Prediction { PREDICT_EPS, PREDICT_V, PREDICT_X0 };
enum LrSchedule { LR_CONSTANT, LR_COSINE, LR_LINEAR };
enum Sampler { SAMPLER_DDIM, SAMPLER_DDPM, SAMPLER_DPMPP, SAMPLER_HEUN };
enum Threshold { THRESHOLD_CLAMP, THRESHOLD_DYNAMIC, THRESHOLD_NONE };

struct Config {
    // files
    char preset[32], data_file[MAX_PATH_LENGTH], val_file[MAX_PATH_LENGTH], model_weights[MAX_PATH_LENGTH];
    char out_dir[MAX_PATH_LENGTH], resume[MAX_PATH_LENGTH], output_name[MAX_PATH_LENGTH];
    char output_dir[MAX_PATH_LENGTH];
    char config[MAX_PATH_LENGTH];
    // architecture
    int image_size, num_channels, num_res_blocks, num_head_channels, norm_groups, max_period;
    int channel_mult[MAX_LEVELS], attention_resolutions[MAX_LEVELS];  // ended by a 0 where shorter
    // diffusion
    int diffusion_steps, noise_schedule, predict, zero_terminal_snr;
    // training
    int batch_size, microbatch, steps, flip, lr_schedule, warmup_steps, lr_steps;
    unsigned seed;
    float lr, final_lr_fraction, weight_decay, beta1, beta2, adam_eps, grad_clip, skip_outliers,
        min_snr_gamma, offset_noise;
    float ema_rate[MAX_EMAS];  // ended by a 0 where shorter
    int log_every, save_every, sample_every, val_every, keep, num_samples;
    int keep_every;
    // sampling
    char seeds[MAX_PATH_LENGTH];
    int generate, sampler, sample_steps, use_ema, threshold, interpolate, strip;
    float eta;
    // what to do
    int resume_given, print_config, dry_run, help;
};

// Images that go through the network at a time while it is trained.
static int microbatch_of(const Config& c) {
    return c.microbatch ? std::min(c.microbatch, c.batch_size) : c.batch_size;
}

static int list_length(const int* list) {
    int n = 0;
    while (n < MAX_LEVELS && list[n]) n++;
    return n;
}

static int ema_count(const Config& c) {
    int n = 0;
    while (n < MAX_EMAS && c.ema_rate[n] > 0) n++;
    return n;
}

// Refuses, in a sentence, what can't work. Everything behind it may rely on what it lets through.
static void check_config(const Config& c) {
    int levels = list_length(c.channel_mult);
    if (c.num_channels % 32) fail("--num_channels must be a multiple of 32, not %d", c.num_channels);
    if (c.image_size % (1 << (levels - 1)))
        fail(
            "--image_size %d can't be halved %d times, once between each two of the %d levels of "
            "--channel_mult; use a "
            "multiple of %d or fewer levels",
            c.image_size, levels - 1, levels, 1 << (levels - 1));
    for (int i = 0; i < levels; i++) {
        int width = c.num_channels * c.channel_mult[i], size = c.image_size >> i;
        if (width > 8192)
            fail("--channel_mult %d makes a level %d channels wide; 8192 is the most", c.channel_mult[i],
                 width);
        if (width % c.norm_groups)
            fail("--norm_groups %d does not divide level %d's %d channels", c.norm_groups, i + 1, width);
        if (width / c.norm_groups < 2)
            fail(
                "--norm_groups %d leaves one channel a group at a width of %d: such a norm wipes out the "
                "time embedding "
                "that was just added, so the level would ignore the timestep; use --norm_groups %d or fewer",
                c.norm_groups, width, width / 4);
        bool attends = i == levels - 1;  // the middle block always does
        for (int j = 0; j < list_length(c.attention_resolutions); j++)
            attends |= c.attention_resolutions[j] == size;
        if (attends && size > MAX_ATTENTION_SIZE)
            fail(
                "attention at %dx%d does not fit; %dx%d is the largest: use more levels or other "
                "--attention_resolutions",
                size, size, MAX_ATTENTION_SIZE, MAX_ATTENTION_SIZE);
#ifdef __CUDACC__
        if (attends && (c.num_head_channels % 16 || c.num_head_channels > 128))
            fail("--num_head_channels %d: a GPU's attention takes multiples of 16 up to 128",
                 c.num_head_channels);
#endif
        if (attends && width % c.num_head_channels)
            fail("--num_head_channels %d does not divide the %d channels of the attention at %dx%d",
                 c.num_head_channels, width, size, size);
    }
    for (int i = 1; i < MAX_EMAS; i++)
        if (c.ema_rate[i] > 0 && !(c.ema_rate[i - 1] > 0))
            fail("--ema_rate has a 0 before %s; 0 stands alone, for no averaged weights",
                 float_text(c.ema_rate[i]).c_str());
    if (c.use_ema > std::max(1, ema_count(c)))
        fail("--use_ema %d names none of the averaged weights; --ema_rate makes %d", c.use_ema, ema_count(c));
    if (c.noise_schedule == SCHEDULE_LINEAR && c.diffusion_steps <= 20)
        fail(
            "--diffusion_steps %d is too few for --noise_schedule linear, whose last beta would be %.3g; use "
            "21 or more, or cosine",
            c.diffusion_steps, 20.0 / c.diffusion_steps);
    if (c.zero_terminal_snr && c.predict == PREDICT_EPS)
        fail(
            "--zero_terminal_snr leaves nothing but noise at the last timestep, where --predict eps says "
            "nothing of the image; use --predict v or x0");
    if (c.eta > 0 && c.sampler != SAMPLER_DDIM)
        fail("--eta %g goes with --sampler ddim only; use --eta 0", (double)c.eta);
    if (c.sample_steps > c.diffusion_steps)
        fail("--sample_steps %d is more than the chain's --diffusion_steps %d", c.sample_steps,
             c.diffusion_steps);
}

// ===========================================================================================================
//  2  MEMORY, TENSORS, RANDOMNESS
// ===========================================================================================================

// ---- arenas -----------------------------------------------------------------------------------------------

// A block of memory of a known size, handed out piece by piece.
struct Arena {
    char* base;
    size_t capacity, used;  // bytes
};
enum { ALIGNMENT = 256 };

static size_t aligned(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

template <typename T>
static T* take(Arena* arena, size_t count) {
    size_t bytes = aligned(count * sizeof(T));
    ASSERT(arena->used + bytes <= arena->capacity);  // less was counted than is taken
    T* memory = (T*)(arena->base + arena->used);
    arena->used += bytes;
    return memory;
}

// ---- the machine: what the two builds do differently besides the layers -----------------------------------

#if !defined(__CUDACC__) || defined(TESTING)
#define CPU_LAYERS 1  // the specification of every layer is compiled
#endif

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#ifdef PRECISION_FP32
typedef float floatX;
#else
typedef __nv_bfloat16 floatX;
#endif
enum { STEPS_IN_FLIGHT = 3 };  // steps begun before the first of them is awaited
#else
#define HOST_DEVICE
typedef float floatX;
struct float2 {  // as CUDA's
    float x, y;
};
enum { STEPS_IN_FLIGHT = 1 };
#endif

HOST_DEVICE static inline int ceil_div(size_t a, size_t b) { return (int)((a + b - 1) / b); }

static void backend_init();         // refuses a machine that can't run this program
static std::string backend_name();  // the device and its precision

// Memory where the layers work (null: there is not enough), and the host's that the device copies fastest.
static void* backend_allocate(size_t bytes);
static void backend_free(void* memory);
static void* backend_allocate_host(size_t bytes);
static void backend_free_host(void* memory);
// Bytes that are left where the layers work, and to the host, where `ulimit -v` counts too; 0: not known.
static size_t backend_memory_available();
static size_t host_memory_available();
static size_t workspace_bytes();  // what the layers need besides the model's memory
static bool allocate_workspace();

// Everything below is done in the order of the calls. An _async one may return before it is done.
static void backend_zero(void* memory, size_t bytes);
static void backend_copy(void* to, const void* from, size_t bytes);
static void backend_upload(void* to, const void* from, size_t bytes);
static void backend_upload_async(void* to, const void* from, size_t bytes);
static void backend_download(void* to, const void* from, size_t bytes);
static void backend_download_async(void* to, const void* from, size_t bytes);
// A mark in the work given to the device, of which a slot keeps the last; waiting until the device is there;
// milliseconds between two marks, where the device has been.
static void backend_mark(int slot);
static void backend_await(int slot);
static float backend_milliseconds(int first, int last);
// Launches on a side stream. They wait for everything launched so far, and run at the same time as what comes
// next, until backend_join. Returns the number of this call.
template <typename Launches>
static int backend_aside(Launches launches);
// What follows waits for the launches of that call and of all earlier ones; without a number, for all.
static void backend_join(int call = INT_MAX);
// A sequence of launches that is the same every time: run as it is the first time (which also sets up what a
// launch sets up once), recorded as a graph the second, replayed from then on.
struct Recording {
    void* graph = nullptr;  // cudaGraphExec_t; on the CPU nothing is recorded
    int runs = 0;
};
template <typename Launches>
static void backend_replay(Recording* recording, Launches launches);
static void backend_forget(Recording* recording);
// TFLOP/s at the most, in bf16 (dense, added up in fp32) or fp32, and how that was computed; 0: not known.
static double backend_peak(std::string* source);

// What a launcher costs: PROFILE("3x3 dW", {operations, bytes}) at its head, for dev/profile.cu.
#ifndef PROFILE
#define PROFILE(...)
#endif

// ---- tensors ----------------------------------------------------------------------------------------------

enum Init { INIT_UNIFORM, INIT_ONES, INIT_ZEROS };

// A parameter. It is declared once, by the plan; optimiser, files, tests and reports iterate over the list.
struct Tensor {
    char name[64];        // as PyTorch's named_parameters() calls it
    int shape[4], ndim;   // in PyTorch's order
    size_t count;         // elements, as in files
    size_t offset, size;  // in memory, in floats; without gaps, in the order that join_projections makes
    Init init;
    int fan_in;
};

static bool is_conv3x3(const Tensor& t) { return t.ndim == 4 && t.shape[2] == 3; }

// Kernels load 16 bytes of channels at a time, so that in the CUDA build channels come in multiples of 8. Only
// an image's are no such multiple; zeros follow them. The weights of these are zeros too, which the optimiser
// leaves zeros, because their gradients are.
#ifdef __CUDACC__
enum { CHANNEL_MULTIPLE = 8 };
#else
enum { CHANNEL_MULTIPLE = 1 };
#endif
HOST_DEVICE static constexpr int padded(int channels) {
    return (channels + CHANNEL_MULTIPLE - 1) / CHANNEL_MULTIPLE * CHANNEL_MULTIPLE;
}
enum { PIXEL = padded(IMAGE_CHANNELS) };  // elements from one pixel to the next, as the network has images
// Where element i of (B, H, W, 3) is in (B, H, W, PIXEL), and its setting, with the zeros behind the last.
HOST_DEVICE static inline size_t padded_at(size_t i) {
    return i / IMAGE_CHANNELS * PIXEL + i % IMAGE_CHANNELS;
}
template <typename T>
HOST_DEVICE static inline void set_padded(T* padded, size_t i, float value) {
    T* at = padded + padded_at(i);
    *at = (T)value;
    if (i % IMAGE_CHANNELS == IMAGE_CHANNELS - 1)
        for (int zero = 1; zero <= PIXEL - IMAGE_CHANNELS; zero++) at[zero] = (T)0.0f;
}

// From PyTorch's order, (count), to the order in memory, (size), or back. Only 3x3 weights differ, (O, C, 3,
// 3) against (O, 3, 3, C), and what is padded.
static void reorder(float* to, const float* from, const Tensor& t, bool to_memory) {
    if (to_memory) std::fill(to, to + t.size, 0.0f);
    if (!is_conv3x3(t)) {
        memcpy(to, from, t.count * sizeof(float));
        return;
    }
    int O = t.shape[0], C = t.shape[1], pitch = padded(C);
    for (int o = 0; o < O; o++)
        for (int c = 0; c < C; c++)
            for (int tap = 0; tap < 9; tap++) {
                size_t file = ((size_t)o * C + c) * 9 + tap, memory = ((size_t)o * 9 + tap) * pitch + c;
                if (to_memory)
                    to[memory] = from[file];
                else
                    to[file] = from[memory];
            }
}

// ---- randomness -------------------------------------------------------------------------------------------

// Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011). key = (seed, stream),
// counter = (e/4, sample, step, 0), and element e takes word e mod 4.
enum Stream {  // mirrored in unet_io.py
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
    STREAM_OFFSET
};

struct Philox {
    uint32_t word[4];
};

HOST_DEVICE static inline Philox philox(uint32_t seed, uint32_t stream, uint32_t quad, uint32_t sample,
                                        uint32_t step) {
    uint32_t k0 = seed, k1 = stream, c0 = quad, c1 = sample, c2 = step, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0, c1 = (uint32_t)p1, c2 = n2, c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return Philox{{c0, c1, c2, c3}};
}

HOST_DEVICE static inline uint32_t random_word(uint32_t seed, uint32_t stream, uint32_t e, uint32_t sample,
                                               uint32_t step) {
    return philox(seed, stream, e / 4, sample, step).word[e % 4];
}

// The four normals of a quad of elements, by Box-Muller from words (0, 1) and (2, 3).
static inline void random_normals(float normal[4], uint32_t seed, uint32_t stream, uint32_t quad,
                                  uint32_t sample, uint32_t step) {
    Philox p = philox(seed, stream, quad, sample, step);
    for (int pair = 0; pair < 4; pair += 2) {
        double u1 = ((p.word[pair] >> 8) + 1) * 0x1p-24, u2 = (p.word[pair + 1] >> 8) * 0x1p-24;
        double r = sqrt(-2.0 * log(u1)), angle = 2.0 * M_PI * u2;
        normal[pair] = (float)(r * cos(angle));
        normal[pair + 1] = (float)(r * sin(angle));
    }
}

HOST_DEVICE static inline uint32_t random_timestep(uint32_t seed, Stream stream, uint32_t sample,
                                                   uint32_t step, int diffusion_steps) {
    return (uint32_t)(((uint64_t)random_word(seed, stream, 0, sample, step) * (uint32_t)diffusion_steps) >>
                      32);
}

// The order of `count` images in an epoch: a Fisher-Yates shuffle whose draws are keyed by the epoch.
static void random_permutation(int* order, int count, uint32_t seed, uint32_t epoch) {
    for (int i = 0; i < count; i++) order[i] = i;
    for (int i = count - 1; i > 0; i--) {
        uint32_t j =
            (uint32_t)(((uint64_t)random_word(seed, STREAM_SHUFFLE, i, 0, epoch) * (uint32_t)(i + 1)) >> 32);
        std::swap(order[i], order[j]);
    }
}

// ===========================================================================================================
//  3  THE LAYERS, DECLARED
// ===========================================================================================================

// A group norm's sums go by parts of an image of NORM_PART pixels, the last perhaps of fewer, and by channel:
// in the CUDA build whatever writes a tensor that is normalised next leaves its moments (B, parts, C) behind,
// mean and sum of squares about it. On the CPU the norm measures its input itself.
enum { NORM_PART = 128 };
HOST_DEVICE static inline int norm_parts(int T) { return ceil_div(T, NORM_PART); }

// What a norm read and knew, for the input gradient of the product behind it, whose launcher then does the
// first half of the norm's gradient: dx is taken through the SiLU, and its sums and those of dx x^ over each
// part are left in `sums` (B, parts, C + C2). On the CPU groupnorm_backward does both halves.
struct Normed {
    const floatX *x, *x2;
    const float *w, *bias;     // (C + C2): a norm's parameters are never rounded
    const float *mean, *rstd;  // (B, G); null: there is no norm
    int C, C2, G;
    bool silu;
    float2* sums;
};

#ifdef __CUDACC__
#define DEVICE gpu
#else
#define DEVICE cpu
#endif

namespace DEVICE {

// out (B, C): cos(t f) then sin(t f) with f_i = max_period^(-i / half), i < half = C / 2. t (B). The angles
// are formed in double: t reaches 999, and a float product would cost 3e-5 of an angle.
static void timestep_embedding_forward(floatX* out, const int* t, int B, int C, int max_period);

// F.silu(x): x * sigmoid(x), elementwise; only the embedding needs it alone, elsewhere group norm carries it.
static void silu_forward(floatX* out, const floatX* x, size_t n);
static void silu_backward(floatX* dx, const floatX* dout, const floatX* x, size_t n);

// dout (B, T, O) summed: dbias (O) += over B and T; per_image (B, pitch)[:, :O] = over T, where it is wanted
// (the gradient of what was added per image, the time embedding).
static void bias_backward(float* dbias, floatX* per_image, int pitch, const floatX* dout, int B, int T,
                          int O);

// out (M, O) = F.linear(cat([x, x2], 1), w, bias) + residual, over the M = B*H*W pixels (or the B rows of an
// embedding). x (M, C) and x2 (M, C2) are read where they lie; C2 = 0: no second input. w (O, C + C2), bias
// (O), residual (M, O) or null.
static void linear_forward(floatX* out, const floatX* x, const floatX* x2, const floatX* w,
                           const floatX* bias, const floatX* residual, int M, int C, int C2, int O,
                           float2* moments = nullptr, int T = 1);
// dx (M, C) and dx2 (M, C2) = [+=] dout w; dw += dout^T [x, x2]; dbias += the column sums of dout. dx null:
// not wanted. The launcher leaves dw and dbias under way, until backend_join; so does conv3x3_backward.
static void linear_backward(floatX* dx, floatX* dx2, float* dw, float* dbias, const floatX* dout,
                            const floatX* x, const floatX* x2, const floatX* w, int M, int C, int C2, int O,
                            bool accumulate, const Normed& norm = Normed(), int T = 1);

// out (B, H, W, O) = F.conv2d(x, w, bias, padding=1) + emb[:, None, None, :] + residual, with x (B, H, W, C),
// w (O, 3, 3, C), bias (O), emb (B, emb_pitch)[:, :O] or null, residual (B, H, W, O) or null; residual may be
// out itself.
static void conv3x3_forward(floatX* out, const floatX* x, const floatX* w, const floatX* bias,
                            const floatX* emb, int emb_pitch, const floatX* residual, int B, int H, int W,
                            int C, int O, float2* moments = nullptr);
// dx (B, H, W, C) = the same convolution of dout with flipped taps (null: not wanted); dw += ; dbias += ;
// demb (B, emb_pitch)[:, :O] = the sums of dout over each image (null: not wanted).
static void conv3x3_backward(floatX* dx, float* dw, float* dbias, floatX* demb, int emb_pitch,
                             const floatX* dout, const floatX* x, const floatX* w, int B, int H, int W, int C,
                             int O, const Normed& norm = Normed());

// out (B, T, C + C2) = F.silu(F.group_norm(cat([x, x2], 1), G, w, bias, eps=1e-5)), or without the SiLU. x
// (B, T, C) and x2 (B, T, C2) are read where they lie; a group may straddle them. mean, rstd (B, G). Wu and
// He, "Group Normalization" (2018), equations 1 to 6.
static void channel_moments(float2* moments, const floatX* x, int B, int T, int C);
static void groupnorm_forward(floatX* out, float* mean, float* rstd, const floatX* x, const floatX* x2,
                              const float2* moments, const float2* moments2, const float* w,
                              const float* bias, int B, int T, int C, int C2, int G, bool silu);
static void groupnorm_apply(floatX* out, const float* mean, const float* rstd, const floatX* x,
                            const floatX* x2, const float* w, const float* bias, int B, int T, int C, int C2,
                            int G, bool silu);
// With dy the gradient at the norm's output before the SiLU and x^ = (x - mean) rstd, over the N elements of
// a group:
//   dw += sum dy x^,  dbias += sum dy,  dx = rstd (w dy - (sum w dy + x^ sum w dy x^) / N)
// dx (B, T, C), dx2 (B, T, C2): overwritten, or added to with `accumulate`; dresidual (B, T, C), where not
// null, is the gradient of a branch around the norm and is added to dx (only with C2 = 0). sums: scratch, (B,
// C + C2). With C2 = 0 and nothing to add to, dx may be dout or x itself.
static void groupnorm_backward(floatX* dx, floatX* dx2, float* dw, float* dbias, float2* sums,
                               const floatX* dy, const floatX* dresidual, const float* mean,
                               const float* rstd, const floatX* x, const floatX* x2, const float* w,
                               const float* bias, int B, int T, int C, int C2, int G, bool silu,
                               bool accumulate);

// out (B, T, C) = F.scaled_dot_product_attention(q, k, v) in heads of d = C / heads channels; qkv (B, T, 3C)
// holds all of q, then k, then v, heads inside each. lse (B, heads, T): log of the softmax's denominator, all
// that backward needs to make the probabilities again. Vaswani et al., "Attention Is All You Need" (2017),
// equation 1; recomputation as in Dao et al., "FlashAttention" (2022).
static void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int heads);
// dqkv (B, T, 3C) overwritten. With P the probabilities, D_i = sum_j dout_ij out_ij:
//   dV = P^T dout,  dS = P (dout V^T - D) scale,  dQ = dS K,  dK = dS^T Q
static void attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse,
                               const floatX* qkv, int B, int T, int C, int heads);

// upsample:   out (B, 2H, 2W, C) = F.interpolate(x, scale_factor=2, mode="nearest"), x (B, H, W, C).
// downsample: out (B, H/2, W/2, C) = F.avg_pool2d(x, 2).
// Each one's backward is the other, up to a factor of 4: `upsample` repeats `factor` times a pixel, `sum2x2`
// adds up.
static void upsample_forward(floatX* out, const floatX* x, int B, int H, int W, int C);
static void upsample_backward(floatX* dx, const floatX* dout, int B, int H, int W, int C, bool accumulate);
static void downsample_forward(floatX* out, const floatX* x, int B, int H, int W, int C);
static void downsample_backward(floatX* dx, const floatX* dout, int B, int H, int W, int C, bool accumulate);

// The squared error of B samples of n elements, a batch or a part of it, and its gradient: target (B, n); out
// (B, n, padded); dout (B, n, padded, or null) = 2 w_b (out - target) / total, where the whole batch has total
// elements and w_b = weights[t_b] is what the sample's timestep counts for (weights null: 1). losses (B,
// loss_parts(n)): the sum of squares of each chunk of each sample, not weighted. With weights of 1 their sum
// over total is F.mse_loss(out, target).
static void mse(float* losses, floatX* dout, const floatX* out, const float* target, const int* timesteps,
                const float* weights, int B, int n, size_t total);

#ifdef __CUDACC__
static void round_weights(floatX* to, const float* from, size_t n);
#endif

}  // namespace DEVICE
using namespace DEVICE;

static const float NORM_EPS = 1e-5f;
enum { LOSS_CHUNK = 4096 };
HOST_DEVICE static inline int loss_parts(int n) { return ceil_div(n, LOSS_CHUNK); }

// ===========================================================================================================
//  4  BLOCKS
// ===========================================================================================================

enum BlockKind { BLOCK_EMBED, BLOCK_CONV_IN, BLOCK_RES, BLOCK_ATTENTION, BLOCK_DOWN, BLOCK_UP, BLOCK_OUT };
static const char* const BLOCK_NAMES[] = {"embedding", "conv", "residual", "attention", "down", "up", "out"};

// A piece of the arena, in use from moment `first` of the walk to moment `last`: block i of n runs forward at
// moment i and backward at moment 2 n - 1 - i. Buffers that are never in use at the same moment may share
// their place.
struct Buffer {
    size_t offset, bytes;
    int first, last;
};

// One entry of the plan.
struct Block {
    BlockKind kind;
    char name[48];
    int C, C2, O;     // channels of the input, of the skip concatenated to it (0: none), of the output
    int H;            // height and width of the input
    int out_H;        // and of the output
    int input, skip;  // the blocks whose outputs are read; -1: none
    int emb;          // residual: its first channel of block 0's output
    bool is_skip;     // the decoder reads the output too
    bool accumulate;  // the input feeds two consumers: its gradient is added to, not overwritten
    int param;        // its first tensor; the others follow
    int num_params;
    Buffer out;       // (B, out_H, out_H, O)
    Buffer hidden;    // residual (B, H, H, O), attention's qkv (B, T, 3C), embedding's three of (B, E)
    Buffer inner;     // attention's heads joined (B, T, C), embedding's sinusoids (B, num_channels)
    Buffer moments;   // float2 (B, parts, O): of out, for the norms that read it
    Buffer stats;     // float: mean and rstd (B, G) of each norm in turn; then attention's lse (B, heads, T)
    Buffer gradient;  // (B, out_H, out_H, O): of the output
    Buffer scratch_forward, scratch_backward;
};

struct Plan {
    std::vector<Block> blocks;
    std::vector<Tensor> tensors;
    size_t num_parameters;
    size_t num_floats;  // that they take in memory
    size_t arena_bytes;
    int batch, image_size, norm_groups, num_head_channels, embed,
        base;  // base = num_channels, embed = 4 * base
    int max_period;
    bool training;
};

struct StepState;     // of the step under way: see OPTIMISER
struct PictureNoise;  // where a picture begins: see DIFFUSION

// Section 5 and up own the memory; a block sees it through these.
struct Model {
    Config config;
    Plan plan;
    floatX* weights;     // what the layers read: master, or an EMA while drawing; a rounded copy in bf16
    float* master;       // (num_floats)
    const float* exact;  // what `weights` were rounded from: master, or an EMA
    float* gradients;    // (num_floats)
    float *adam_m, *adam_v;
    float* ema[MAX_EMAS];   // null where there are fewer
    uint8_t* decays;        // one a DECAY_CHUNK: weight decay is for it, a part of a matrix
    char* arena;            // activations, their gradients, scratch: where the plan says
    Arena scratch;          // the part of it that the block under way may take from
    floatX* input;          // (B, H, W, PIXEL): the noised images
    float* target;          // (B, H, W, 3)
    float* images;          // (B, 3, H, W): clean, planar, as in the files
    int* timesteps;         // (batch_size): of the whole batch, also where B is a part of it
    int* sources;           // (batch_size): the image of each sample, or -1 - image where it is mirrored
    StepState* state;       // (1 + RESULT_SLOTS): of the step under way, then the results of the last steps
    float* losses;          // (batch_size, loss_parts)
    float* norm_parts;      // one a NORM_CHUNK of the parameters
    float *signal, *noise;  // (diffusion_steps): sqrt(abar), sqrt(1 - abar)
    PictureNoise* begins;   // (B): of the pictures being drawn
    float* limits;          // (B): theirs, for dynamic thresholding
    float* loss_weights;    // (diffusion_steps): what the loss of a timestep counts for
    char* memory;
    size_t bytes;
};

static floatX* weight_of(const Model* m, const Block& block, int k) {
    return m->weights + m->plan.tensors[block.param + k].offset;
}
static const float* norm_of(const Model* m, const Block& block, int k) {
    return m->exact + m->plan.tensors[block.param + k].offset;
}
static float* gradient_of(const Model* m, const Block& block, int k) {
    return m->gradients + m->plan.tensors[block.param + k].offset;
}
static floatX* activation(const Model* m, const Buffer& b) { return (floatX*)(m->arena + b.offset); }
static float* block_stats(const Model* m, const Block& b) { return (float*)(m->arena + b.stats.offset); }
static float2* moments_of(const Model* m, const Block& b) { return (float2*)(m->arena + b.moments.offset); }
static floatX* output_of(const Model* m, int i) { return activation(m, m->plan.blocks[i].out); }
static floatX* output_gradient_of(const Model* m, int i) { return activation(m, m->plan.blocks[i].gradient); }
// What a block reads: its input, its skip (null: none).
static const floatX* input_of(const Model* m, const Block& block) { return output_of(m, block.input); }
static const floatX* skip_of(const Model* m, const Block& block) {
    return block.skip < 0 ? nullptr : output_of(m, block.skip);
}

// ---- embedding: sinusoids -> linear -> SiLU -> linear -> SiLU, and its projections to residual blocks -----

enum { EMBED_W1, EMBED_B1, EMBED_W2, EMBED_B2 };

// The residual blocks' embedding layers in one product; their parameters lie first, and together (see
// join_projections). embedding (B, E), with its SiLU -> block 0's output (B, O): O channels in all.
static void project_embedding(Model* m, const floatX* embedding, int B) {
    int E = m->plan.embed, O = m->plan.blocks[0].O;
    linear_forward(output_of(m, 0), embedding, nullptr, m->weights, m->weights + (size_t)E * O, nullptr, B, E,
                   0, O);
}
static void project_embedding_backward(Model* m, floatX* dembedding, const floatX* embedding, int B) {
    int E = m->plan.embed, O = m->plan.blocks[0].O;
    linear_backward(dembedding, nullptr, m->gradients, m->gradients + (size_t)E * O, output_gradient_of(m, 0),
                    embedding, nullptr, m->weights, B, E, 0, O, false);
}

static void embed_forward(Model* m, const Block& block, int B, const int* timesteps) {
    int base = m->plan.base, E = m->plan.embed;
    floatX *sinusoids = activation(m, block.inner),
           *hidden = activation(m, block.hidden);                                    // (B, base), (B, E)
    floatX *linear2 = hidden + (size_t)B * E, *embedding = linear2 + (size_t)B * E;  // (B, E)
    floatX* active = take<floatX>(&m->scratch, (size_t)B * E);
    timestep_embedding_forward(sinusoids, timesteps, B, base, m->plan.max_period);
    linear_forward(hidden, sinusoids, nullptr, weight_of(m, block, EMBED_W1), weight_of(m, block, EMBED_B1),
                   nullptr, B, base, 0, E);
    silu_forward(active, hidden, (size_t)B * E);
    linear_forward(linear2, active, nullptr, weight_of(m, block, EMBED_W2), weight_of(m, block, EMBED_B2),
                   nullptr, B, E, 0, E);
    silu_forward(embedding, linear2, (size_t)B * E);
    project_embedding(m, embedding, B);
}

static void embed_backward(Model* m, const Block& block, int B) {
    int base = m->plan.base, E = m->plan.embed;
    floatX *sinusoids = activation(m, block.inner), *hidden = activation(m, block.hidden),
           *linear2 = hidden + (size_t)B * E, *embedding = linear2 + (size_t)B * E;
    floatX* active = take<floatX>(&m->scratch, (size_t)B * E);
    floatX* dlinear2 = take<floatX>(&m->scratch, (size_t)B * E);
    floatX* dhidden = take<floatX>(&m->scratch, (size_t)B * E);
    floatX *dembedding = dhidden, *dactive = dhidden;  // one after the other
    project_embedding_backward(m, dembedding, embedding, B);
    silu_backward(dlinear2, dembedding, linear2, (size_t)B * E);
    silu_forward(active, hidden, (size_t)B * E);
    linear_backward(dactive, nullptr, gradient_of(m, block, EMBED_W2), gradient_of(m, block, EMBED_B2),
                    dlinear2, active, nullptr, weight_of(m, block, EMBED_W2), B, E, 0, E, false);
    silu_backward(dhidden, dactive, hidden, (size_t)B * E);
    linear_backward(nullptr, nullptr, gradient_of(m, block, EMBED_W1), gradient_of(m, block, EMBED_B1),
                    dhidden, sinusoids, nullptr, weight_of(m, block, EMBED_W1), B, base, 0, E, false);
}

// ---- first convolution ------------------------------------------------------------------------------------

static void conv_in_forward(Model* m, const Block& block, int B) {
    conv3x3_forward(activation(m, block.out), m->input, weight_of(m, block, 0), weight_of(m, block, 1),
                    nullptr, 0, nullptr, B, block.H, block.H, PIXEL, block.O, moments_of(m, block));
}

static void conv_in_backward(Model* m, const Block& block, int B, const floatX* dout) {
    conv3x3_backward(nullptr, gradient_of(m, block, 0), gradient_of(m, block, 1), nullptr, 0, dout, m->input,
                     weight_of(m, block, 0), B, block.H, block.H, PIXEL, block.O);
}

// ---- residual block ---------------------------------------------------------------------------------------

// h = conv1(SiLU(GN([x, skip]))) + linear(SiLU(emb)) per channel;  out = conv2(SiLU(GN(h))) + [x, skip],
// through a 1x1 convolution where the width changes. Kept for backward: h and the norms' statistics; the
// normed tensors are made again.
enum {
    RES_NORM1_W,
    RES_NORM1_B,
    RES_CONV1_W,
    RES_CONV1_B,
    RES_EMB_W,
    RES_EMB_B,
    RES_NORM2_W,
    RES_NORM2_B,
    RES_CONV2_W,
    RES_CONV2_B,
    RES_SKIP_W,
    RES_SKIP_B
};

static void res_forward(Model* m, const Block& block, int B) {
    int C = block.C, C2 = block.C2, K = C + C2, O = block.O, H = block.H, T = H * H, G = m->plan.norm_groups;
    const floatX *x = input_of(m, block), *x2 = skip_of(m, block);
    floatX *h = activation(m, block.hidden), *out = activation(m, block.out);
    float *mean1 = block_stats(m, block), *rstd1 = mean1 + B * G, *mean2 = rstd1 + B * G,
          *rstd2 = mean2 + B * G;
    const floatX* emb = output_of(m, 0) + block.emb;  // (B, emb_pitch)[:, :O]
    int emb_pitch = m->plan.blocks[0].O;
    floatX* normed = take<floatX>(&m->scratch, (size_t)B * T * std::max(K, O));  // (B, T, K), then (B, T, O)
    float2* moments = take<float2>(&m->scratch, (size_t)B * norm_parts(T) * O);  // of h
    const float2 *moments1 = moments_of(m, m->plan.blocks[block.input]),
                 *moments2 = block.skip < 0 ? nullptr : moments_of(m, m->plan.blocks[block.skip]);

    const floatX* residual = x;
    if (block.num_params > RES_SKIP_W) {
        residual = out;
        backend_aside([&] {
            linear_forward(out, x, x2, weight_of(m, block, RES_SKIP_W), weight_of(m, block, RES_SKIP_B),
                           nullptr, B * T, C, C2, O);
        });
    }
    groupnorm_forward(normed, mean1, rstd1, x, x2, moments1, moments2, norm_of(m, block, RES_NORM1_W),
                      norm_of(m, block, RES_NORM1_B), B, T, C, C2, G, true);
    backend_join();
    conv3x3_forward(h, normed, weight_of(m, block, RES_CONV1_W), weight_of(m, block, RES_CONV1_B), emb,
                    emb_pitch, nullptr, B, H, H, K, O, moments);
    groupnorm_forward(normed, mean2, rstd2, h, nullptr, moments, nullptr, norm_of(m, block, RES_NORM2_W),
                      norm_of(m, block, RES_NORM2_B), B, T, O, 0, G, true);
    conv3x3_forward(out, normed, weight_of(m, block, RES_CONV2_W), weight_of(m, block, RES_CONV2_B), nullptr,
                    0, residual, B, H, H, O, O, moments_of(m, block));
}

static void res_backward(Model* m, const Block& block, int B, const floatX* dout, floatX* dx, floatX* dx2) {
    int C = block.C, C2 = block.C2, K = C + C2, O = block.O, H = block.H, T = H * H, G = m->plan.norm_groups;
    const floatX *x = input_of(m, block), *x2 = skip_of(m, block);
    float *mean1 = block_stats(m, block), *rstd1 = mean1 + B * G, *mean2 = rstd1 + B * G,
          *rstd2 = mean2 + B * G;
    floatX *h = activation(m, block.hidden), *dh = h;     // (B, T, O)
    floatX* demb = output_gradient_of(m, 0) + block.emb;  // (B, emb_pitch)[:, :O]
    int emb_pitch = m->plan.blocks[0].O;
    float2* sums = take<float2>(&m->scratch, (size_t)B * norm_parts(T) * std::max(K, O));
    // The weight gradients are made aside, and the normed tensors, which only they read. The rest waits for
    // no more than the last reading of h.
    floatX* normed = take<floatX>(&m->scratch, (size_t)B * T * std::max(K, O));   // (B, T, O), then (B, T, K)
    floatX* dnormed = take<floatX>(&m->scratch, (size_t)B * T * std::max(K, O));  // (B, T, O), then (B, T, K)

    const float *norm1_w = norm_of(m, block, RES_NORM1_W), *norm1_b = norm_of(m, block, RES_NORM1_B),
                *norm2_w = norm_of(m, block, RES_NORM2_W), *norm2_b = norm_of(m, block, RES_NORM2_B);
    Normed norm1 = {x, x2, norm1_w, norm1_b, mean1, rstd1, C, C2, G, true, sums},
           norm2 = {h, nullptr, norm2_w, norm2_b, mean2, rstd2, O, 0, G, true, sums};

    int made = backend_aside(
        [&] { groupnorm_apply(normed, mean2, rstd2, h, nullptr, norm2_w, norm2_b, B, T, O, 0, G, true); });
    conv3x3_backward(dnormed, gradient_of(m, block, RES_CONV2_W), gradient_of(m, block, RES_CONV2_B), nullptr,
                     0, dout, normed, weight_of(m, block, RES_CONV2_W), B, H, H, O, O, norm2);
    bool widens = block.num_params > RES_SKIP_W;
    if (widens)
        linear_backward(dx, dx2, gradient_of(m, block, RES_SKIP_W), gradient_of(m, block, RES_SKIP_B), dout,
                        x, x2, weight_of(m, block, RES_SKIP_W), B * T, C, C2, O, block.accumulate);
    backend_join(made);  // h is read no more
    groupnorm_backward(dh, nullptr, gradient_of(m, block, RES_NORM2_W), gradient_of(m, block, RES_NORM2_B),
                       sums, dnormed, nullptr, mean2, rstd2, h, nullptr, norm2_w, norm2_b, B, T, O, 0, G,
                       true, false);
    backend_aside(
        [&] { groupnorm_apply(normed, mean1, rstd1, x, x2, norm1_w, norm1_b, B, T, C, C2, G, true); });
    conv3x3_backward(dnormed, gradient_of(m, block, RES_CONV1_W), gradient_of(m, block, RES_CONV1_B), demb,
                     emb_pitch, dh, normed, weight_of(m, block, RES_CONV1_W), B, H, H, K, O, norm1);
    groupnorm_backward(dx, dx2, gradient_of(m, block, RES_NORM1_W), gradient_of(m, block, RES_NORM1_B), sums,
                       dnormed, widens ? nullptr : dout, mean1, rstd1, x, x2, norm1_w, norm1_b, B, T, C, C2,
                       G, true, widens || block.accumulate);
}

// ---- attention block --------------------------------------------------------------------------------------

// out = x + projection(attention(qkv(GN(x)))). Kept for backward: qkv, the joined heads, statistics and lse.
enum { ATT_NORM_W, ATT_NORM_B, ATT_QKV_W, ATT_QKV_B, ATT_PROJ_W, ATT_PROJ_B };

static void attention_block_forward(Model* m, const Block& block, int B) {
    int C = block.C, T = block.H * block.H, G = m->plan.norm_groups, heads = C / m->plan.num_head_channels;
    const floatX* x = input_of(m, block);
    floatX *qkv = activation(m, block.hidden), *joined = activation(m, block.inner);
    float *mean = block_stats(m, block), *rstd = mean + B * G, *lse = rstd + B * G;
    floatX* normed = take<floatX>(&m->scratch, (size_t)B * T * C);  // (B, T, C)
    groupnorm_forward(normed, mean, rstd, x, nullptr, moments_of(m, m->plan.blocks[block.input]), nullptr,
                      norm_of(m, block, ATT_NORM_W), norm_of(m, block, ATT_NORM_B), B, T, C, 0, G, false);
    linear_forward(qkv, normed, nullptr, weight_of(m, block, ATT_QKV_W), weight_of(m, block, ATT_QKV_B),
                   nullptr, B * T, C, 0, 3 * C);
    attention_forward(joined, lse, qkv, B, T, C, heads);
    linear_forward(activation(m, block.out), joined, nullptr, weight_of(m, block, ATT_PROJ_W),
                   weight_of(m, block, ATT_PROJ_B), x, B * T, C, 0, C, moments_of(m, block), T);
}

static void attention_block_backward(Model* m, const Block& block, int B, const floatX* dout, floatX* dx) {
    int C = block.C, T = block.H * block.H, G = m->plan.norm_groups, heads = C / m->plan.num_head_channels;
    const floatX *x = input_of(m, block), *qkv = activation(m, block.hidden),
                 *joined = activation(m, block.inner);
    float *mean = block_stats(m, block), *rstd = mean + B * G, *lse = rstd + B * G;
    floatX* dqkv = take<floatX>(&m->scratch, (size_t)B * T * 3 * C);  // (B, T, 3C)
    floatX* normed = take<floatX>(&m->scratch, (size_t)B * T * C);    // (B, T, C)
    floatX* djoined = take<floatX>(&m->scratch, (size_t)B * T * C);   // (B, T, C)
    floatX* dnormed = djoined;                                        // (B, T, C)
    float2* sums = take<float2>(&m->scratch, (size_t)B * norm_parts(T) * C);
    Normed norm = {
        x,     nullptr, norm_of(m, block, ATT_NORM_W), norm_of(m, block, ATT_NORM_B), mean, rstd, C, 0, G,
        false, sums};
    backend_aside([&] {
        groupnorm_apply(normed, mean, rstd, x, nullptr, norm_of(m, block, ATT_NORM_W),
                        norm_of(m, block, ATT_NORM_B), B, T, C, 0, G, false);
    });
    linear_backward(djoined, nullptr, gradient_of(m, block, ATT_PROJ_W), gradient_of(m, block, ATT_PROJ_B),
                    dout, joined, nullptr, weight_of(m, block, ATT_PROJ_W), B * T, C, 0, C, false);
    attention_backward(dqkv, djoined, joined, lse, qkv, B, T, C, heads);
    linear_backward(dnormed, nullptr, gradient_of(m, block, ATT_QKV_W), gradient_of(m, block, ATT_QKV_B),
                    dqkv, normed, nullptr, weight_of(m, block, ATT_QKV_W), B * T, C, 0, 3 * C, false, norm,
                    T);
    groupnorm_backward(dx, nullptr, gradient_of(m, block, ATT_NORM_W), gradient_of(m, block, ATT_NORM_B),
                       sums, dnormed, dout, mean, rstd, x, nullptr, norm_of(m, block, ATT_NORM_W),
                       norm_of(m, block, ATT_NORM_B), B, T, C, 0, G, false, block.accumulate);
}

// ---- last block: group norm, SiLU, convolution to the image -----------------------------------------------

enum { OUT_NORM_W, OUT_NORM_B, OUT_CONV_W, OUT_CONV_B };

static void out_forward(Model* m, const Block& block, int B) {
    int C = block.C, H = block.H, G = m->plan.norm_groups;
    float *mean = block_stats(m, block), *rstd = mean + B * G;
    floatX* normed = take<floatX>(&m->scratch, (size_t)B * H * H * C);  // (B, H, H, C)
    groupnorm_forward(normed, mean, rstd, input_of(m, block), nullptr,
                      moments_of(m, m->plan.blocks[block.input]), nullptr, norm_of(m, block, OUT_NORM_W),
                      norm_of(m, block, OUT_NORM_B), B, H * H, C, 0, G, true);
    conv3x3_forward(activation(m, block.out), normed, weight_of(m, block, OUT_CONV_W),
                    weight_of(m, block, OUT_CONV_B), nullptr, 0, nullptr, B, H, H, C, PIXEL);
}

static void out_backward(Model* m, const Block& block, int B, const floatX* dout, floatX* dx) {
    int C = block.C, H = block.H, G = m->plan.norm_groups;
    float *mean = block_stats(m, block), *rstd = mean + B * G;
    const floatX* x = input_of(m, block);
    const float *norm_w = norm_of(m, block, OUT_NORM_W), *norm_b = norm_of(m, block, OUT_NORM_B);
    float2* sums = take<float2>(&m->scratch, (size_t)B * norm_parts(H * H) * C);
    Normed norm = {x, nullptr, norm_w, norm_b, mean, rstd, C, 0, G, true, sums};
    floatX *normed = take<floatX>(&m->scratch, (size_t)B * H * H * C), *dnormed = dx;  // (B, H, H, C)
    backend_aside(
        [&] { groupnorm_apply(normed, mean, rstd, x, nullptr, norm_w, norm_b, B, H * H, C, 0, G, true); });
    conv3x3_backward(dnormed, gradient_of(m, block, OUT_CONV_W), gradient_of(m, block, OUT_CONV_B), nullptr,
                     0, dout, normed, weight_of(m, block, OUT_CONV_W), B, H, H, C, PIXEL, norm);
    groupnorm_backward(dx, nullptr, gradient_of(m, block, OUT_NORM_W), gradient_of(m, block, OUT_NORM_B),
                       sums, dnormed, nullptr, mean, rstd, x, nullptr, norm_w, norm_b, B, H * H, C, 0, G,
                       true, false);
}

// ===========================================================================================================
//  5  PLAN AND WALK
// ===========================================================================================================

// ---- plan -------------------------------------------------------------------------------------------------

static void add_tensor(Plan* plan, Block* block, const char* name, std::vector<int> shape, Init init,
                       int fan_in) {
    Tensor t;
    memset(&t, 0, sizeof t);
    snprintf(t.name, sizeof t.name, "%s.%s", block->name, name);
    t.ndim = (int)shape.size(), t.count = 1, t.init = init, t.fan_in = fan_in;
    for (int i = 0; i < t.ndim; i++) t.shape[i] = shape[i], t.count *= shape[i];
    t.size = is_conv3x3(t) ? (size_t)padded(shape[0]) * 9 * padded(shape[1])
             : t.ndim == 1 ? padded(shape[0])
                           : t.count;
    if (block->num_params++ == 0) block->param = (int)plan->tensors.size();
    plan->num_parameters += t.count, plan->num_floats += t.size;
    plan->tensors.push_back(t);
}
// A weight and its bias.
static void add_pair(Plan* plan, Block* block, const char* name, std::vector<int> shape, Init init) {
    int fan_in = 1;
    for (size_t i = 1; i < shape.size(); i++) fan_in *= shape[i];
    add_tensor(plan, block, text("%s.weight", name).c_str(), shape, init, fan_in);
    add_tensor(plan, block, text("%s.bias", name).c_str(), {shape[0]}, init == INIT_ONES ? INIT_ZEROS : init,
               fan_in);
}

static size_t reserve(size_t* total, size_t bytes) {
    size_t offset = *total;
    *total += aligned(bytes);
    return offset;
}

// Adds a block behind the last one and declares its tensors in the order of PyTorch's named_parameters().
static Block* add_block(Plan* plan, BlockKind kind, const std::string& name, int O, int skip = -1) {
    Block block;
    memset(&block, 0, sizeof block);
    int index = (int)plan->blocks.size();
    Block* previous = index ? &plan->blocks.back() : nullptr;
    block.kind = kind, block.O = O, block.skip = skip, block.input = index - 1;
    snprintf(block.name, sizeof block.name, "%s", name.c_str());
    if (kind == BLOCK_EMBED || kind == BLOCK_CONV_IN) {
        block.input = -1;
        block.C = kind == BLOCK_EMBED ? plan->base : (int)IMAGE_CHANNELS;
        block.H = kind == BLOCK_EMBED ? 1 : plan->image_size;
    } else {
        block.C = previous->O, block.H = previous->out_H;
    }
    if (skip >= 0) {
        block.C2 = plan->blocks[skip].O;
        plan->blocks[skip].is_skip = true;
    }
    block.out_H = kind == BLOCK_DOWN ? block.H / 2 : kind == BLOCK_UP ? block.H * 2 : block.H;
    int K = block.C + block.C2;
    switch (kind) {
        case BLOCK_EMBED:
            add_pair(plan, &block, "0", {O, plan->base}, INIT_UNIFORM);
            add_pair(plan, &block, "2", {O, O}, INIT_UNIFORM);
            break;
        case BLOCK_CONV_IN:
            add_tensor(plan, &block, "weight", {O, K, 3, 3}, INIT_UNIFORM, K * 9);
            add_tensor(plan, &block, "bias", {O}, INIT_UNIFORM, K * 9);
            break;
        case BLOCK_RES:
            add_pair(plan, &block, "in_layers.0", {K}, INIT_ONES);
            add_pair(plan, &block, "in_layers.2", {O, K, 3, 3}, INIT_UNIFORM);
            add_pair(plan, &block, "emb_layers.1", {O, plan->embed}, INIT_UNIFORM);
            add_pair(plan, &block, "out_layers.0", {O}, INIT_ONES);
            add_pair(plan, &block, "out_layers.3", {O, O, 3, 3}, INIT_ZEROS);
            if (K != O) add_pair(plan, &block, "skip_connection", {O, K, 1, 1}, INIT_UNIFORM);
            break;
        case BLOCK_ATTENTION:
            add_pair(plan, &block, "norm", {K}, INIT_ONES);
            add_pair(plan, &block, "qkv", {3 * K, K, 1}, INIT_UNIFORM);
            add_pair(plan, &block, "proj_out", {K, K, 1}, INIT_ZEROS);
            break;
        case BLOCK_OUT:
            add_pair(plan, &block, "0", {K}, INIT_ONES);
            add_pair(plan, &block, "2", {O, K, 3, 3}, INIT_ZEROS);
            break;
        case BLOCK_DOWN:
        case BLOCK_UP: break;
    }
    plan->blocks.push_back(block);
    return &plan->blocks.back();
}

// Makes the residual blocks' embedding layers one layer: block 0 has all their outputs, and their weights lie
// before the other parameters, one behind the other, then their biases. Files keep PyTorch's order.
static void join_projections(Plan* plan) {
    Block& embedding = plan->blocks[0];
    std::vector<Tensor*> order;
    embedding.O = 0;
    for (Block& b : plan->blocks) {
        if (b.kind != BLOCK_RES) continue;
        b.emb = embedding.O, embedding.O += b.O;
        order.push_back(&plan->tensors[b.param + RES_EMB_W]);
    }
    for (size_t i = 0, n = order.size(); i < n; i++) order.push_back(order[i] + 1);
    for (Tensor& t : plan->tensors)
        if (std::find(order.begin(), order.end(), &t) == order.end()) order.push_back(&t);
    size_t offset = 0;
    for (Tensor* t : order) t->offset = offset, offset += t->size;
}

static std::vector<Buffer*> buffers_of(Block* b) {
    return {&b->out,   &b->hidden,   &b->inner,           &b->moments,
            &b->stats, &b->gradient, &b->scratch_forward, &b->scratch_backward};
}

// Every buffer's size, and the moments from its first writer to its last reader. Backward reads again what
// forward read, but for what the resampling blocks read and the embedding's output. The network's own output
// stays for the caller. take() stops the program where scratch is counted too small.
static void size_buffers(Plan* plan) {
    int n = (int)plan->blocks.size();
    size_t B = plan->batch;
    auto room = [](size_t count) { return aligned(count * sizeof(floatX)); };
    for (int i = 0; i < n; i++) {
        Block& b = plan->blocks[i];
        size_t T = (size_t)b.H * b.H, C = b.C, O = b.O, E = plan->embed, wide = std::max(C + b.C2, O);
        size_t hidden = 0, inner = 0, stats = 0, forward = 0, backward = 0;
        size_t norm = 2 * B * plan->norm_groups, parts = norm_parts((int)T);
        size_t sums = aligned(B * parts * wide * sizeof(float2)),
               moments = aligned(B * parts * O * sizeof(float2));
        switch (b.kind) {
            case BLOCK_EMBED:
                hidden = room(3 * B * E), inner = room(B * C);
                forward = room(B * E), backward = 3 * room(B * E);
                break;
            case BLOCK_RES:
                hidden = room(B * T * O), stats = 2 * norm;
                forward = room(B * T * wide) + moments;
                backward = 2 * room(B * T * wide) + sums;
                break;
            case BLOCK_ATTENTION:
                hidden = room(3 * B * T * C), inner = room(B * T * C);
                stats = norm + B * (C / plan->num_head_channels) * T;
                forward = room(B * T * C), backward = room(3 * B * T * C) + 2 * forward + sums;
                break;
            case BLOCK_OUT: stats = norm, forward = room(B * T * C), backward = forward + sums; break;
            case BLOCK_CONV_IN:
            case BLOCK_DOWN:
            case BLOCK_UP: break;
        }
        int back = 2 * n - 1 - i, kept = plan->training ? back : i;  // the block's moment in backward
        size_t out = room(B * b.out_H * b.out_H * padded(b.O));
        b.out = {0, out, i, i < n - 1 ? i : 2 * n};
        b.hidden = {0, hidden, i, kept};
        size_t normed = b.kind == BLOCK_EMBED ? 0 : O;  // channels that a norm reads
        b.moments = {0, aligned(B * norm_parts(b.out_H * b.out_H) * normed * sizeof(float2)), i, i};
        b.inner = {0, inner, i, kept};
        b.stats = {0, aligned(stats * sizeof(float)), i, kept};
        b.scratch_forward = {0, forward, i, i};
        if (plan->training) {  // before the walk back the network's gradient is given
            b.gradient = {0, out, i == n - 1 ? n : back, back};
            b.scratch_backward = {0, backward, back, back};
        }
        for (int source : {b.input, b.skip, b.kind == BLOCK_RES ? 0 : -1}) {
            if (source < 0) continue;
            Block& read = plan->blocks[source];
            bool once = b.kind == BLOCK_DOWN || b.kind == BLOCK_UP || source == 0;
            read.out.last = std::max(read.out.last, once ? i : kept);
            read.moments.last = i;
            read.gradient.first = std::min(read.gradient.first, back);
        }
        b.accumulate = b.input >= 0 && plan->blocks[b.input].is_skip;
    }
}

// Gives every buffer a place, the largest first, each the lowest where it meets none in use at the same time.
static void place_buffers(Plan* plan) {
    size_buffers(plan);
    std::vector<Buffer*> buffers, placed;  // placed: by offset
    for (Block& block : plan->blocks)
        for (Buffer* buffer : buffers_of(&block))
            if (buffer->bytes) buffers.push_back(buffer);
    auto larger = [](const Buffer* a, const Buffer* b) {
        return a->bytes != b->bytes ? a->bytes > b->bytes : a < b;  // the same order everywhere
    };
    auto lower = [](const Buffer* a, const Buffer* b) { return a->offset < b->offset; };
    std::sort(buffers.begin(), buffers.end(), larger);
    for (Buffer* b : buffers) {
        for (const Buffer* other : placed)
            if (other->first <= b->last && b->first <= other->last && other->offset < b->offset + b->bytes)
                b->offset = std::max(b->offset, other->offset + other->bytes);
        placed.insert(std::upper_bound(placed.begin(), placed.end(), b, lower), b);
        plan->arena_bytes = std::max(plan->arena_bytes, b->offset + b->bytes);
    }
}

static bool attends(const Config& c, int size) {
    for (int i = 0; i < list_length(c.attention_resolutions); i++)
        if (c.attention_resolutions[i] == size) return true;
    return false;
}

static Plan make_plan(const Config& c, int batch, bool training) {
    Plan plan = Plan();
    plan.batch = batch, plan.training = training, plan.image_size = c.image_size,
    plan.norm_groups = c.norm_groups;
    plan.num_head_channels = c.num_head_channels, plan.base = c.num_channels, plan.embed = 4 * c.num_channels;
    plan.max_period = c.max_period;
    int levels = list_length(c.channel_mult), size = c.image_size, count = 0;
    std::vector<int> skips;
    auto encoder_output = [&] { skips.push_back((int)plan.blocks.size() - 1); };

    add_block(&plan, BLOCK_EMBED, "time_embed", plan.embed);
    add_block(&plan, BLOCK_CONV_IN, text("input_blocks.%d.0", count++), c.num_channels * c.channel_mult[0]);
    encoder_output();
    for (int level = 0; level < levels; level++) {
        int width = c.num_channels * c.channel_mult[level];
        for (int i = 0; i < c.num_res_blocks; i++, count++) {
            add_block(&plan, BLOCK_RES, text("input_blocks.%d.0", count), width);
            if (attends(c, size)) add_block(&plan, BLOCK_ATTENTION, text("input_blocks.%d.1", count), width);
            encoder_output();
        }
        if (level == levels - 1) break;
        add_block(&plan, BLOCK_DOWN, text("input_blocks.%d.0", count++), width);
        encoder_output();
        size /= 2;
    }
    int width = plan.blocks.back().O;
    add_block(&plan, BLOCK_RES, "middle_block.0", width);
    add_block(&plan, BLOCK_ATTENTION, "middle_block.1", width);
    add_block(&plan, BLOCK_RES, "middle_block.2", width);
    count = 0;
    for (int level = levels - 1; level >= 0; level--) {
        width = c.num_channels * c.channel_mult[level];
        for (int i = 0; i <= c.num_res_blocks; i++, count++) {
            int part = 0, skip = skips.back();
            skips.pop_back();
            add_block(&plan, BLOCK_RES, text("output_blocks.%d.%d", count, part++), width, skip);
            if (attends(c, size))
                add_block(&plan, BLOCK_ATTENTION, text("output_blocks.%d.%d", count, part++), width);
            if (level && i == c.num_res_blocks) {
                add_block(&plan, BLOCK_UP, text("output_blocks.%d.%d", count, part++), width);
                size *= 2;
            }
        }
    }
    ASSERT(skips.empty());
    add_block(&plan, BLOCK_OUT, "out", IMAGE_CHANNELS);
    join_projections(&plan);
    place_buffers(&plan);
    return plan;
}

// Operations of training on one image, a multiplication and an addition being two: every product forward, and
// as many for each of its two gradients; what the network is given needs none. A weight meets every pixel,
// but those of two dimensions, the embeddings', meet every image.
static double training_flops(const Plan& plan) {
    double flops = 0;
    for (const Block& b : plan.blocks) {
        double pixels = (double)b.H * b.H;
        for (int k = 0; k < b.num_params; k++) {
            const Tensor& t = plan.tensors[b.param + k];
            int products = k == 0 && b.input < 0 ? 2 : 3;
            if (t.ndim > 1) flops += products * 2.0 * (double)t.count * (t.ndim == 2 ? 1 : pixels);
        }
        if (b.kind == BLOCK_ATTENTION) flops += 3 * 4 * pixels * pixels * b.C;  // scores, and their values
    }
    return flops;
}

// ---- walk -------------------------------------------------------------------------------------------------

static void set_scratch(Model* m, const Buffer& scratch) {
    m->scratch = {m->arena + scratch.offset, scratch.bytes, 0};
}

// input (B, H, W, PIXEL) and timesteps [first, first + B) -> the last block's output (B, H, W, PIXEL). B may
// be less than the plan's batch.
static void unet_forward(Model* m, int B, int first = 0) {
    for (const Block& block : m->plan.blocks) {
        PROFILE(block.name);
        floatX* out = activation(m, block.out);
        set_scratch(m, block.scratch_forward);
        switch (block.kind) {
            case BLOCK_EMBED: embed_forward(m, block, B, m->timesteps + first); break;
            case BLOCK_CONV_IN: conv_in_forward(m, block, B); break;
            case BLOCK_RES: res_forward(m, block, B); break;
            case BLOCK_ATTENTION: attention_block_forward(m, block, B); break;
            case BLOCK_DOWN:
            case BLOCK_UP:
                (block.kind == BLOCK_UP ? upsample_forward : downsample_forward)(out, input_of(m, block), B,
                                                                                 block.H, block.H, block.C);
                channel_moments(moments_of(m, block), out, B, block.out_H * block.out_H, block.O);
                break;
            case BLOCK_OUT: out_forward(m, block, B); break;
        }
    }
}

static floatX* unet_output(const Model* m) { return output_of(m, (int)m->plan.blocks.size() - 1); }
static floatX* unet_output_gradient(const Model* m) {
    return output_gradient_of(m, (int)m->plan.blocks.size() - 1);
}

// The last block's output gradient -> every weight gradient (added to).
static void unet_backward(Model* m, int B) {
    for (int i = (int)m->plan.blocks.size() - 1; i >= 0; i--) {
        const Block& block = m->plan.blocks[i];
        PROFILE(block.name);
        const floatX* dout = output_gradient_of(m, i);
        floatX* dx = block.input < 0 ? nullptr : output_gradient_of(m, block.input);
        floatX* dx2 = block.skip < 0 ? nullptr : output_gradient_of(m, block.skip);
        set_scratch(m, block.scratch_backward);
        switch (block.kind) {
            case BLOCK_EMBED: embed_backward(m, block, B); break;
            case BLOCK_CONV_IN: conv_in_backward(m, block, B, dout); break;
            case BLOCK_RES: res_backward(m, block, B, dout, dx, dx2); break;
            case BLOCK_ATTENTION: attention_block_backward(m, block, B, dout, dx); break;
            case BLOCK_DOWN:
                downsample_backward(dx, dout, B, block.H, block.H, block.C, block.accumulate);
                break;
            case BLOCK_UP: upsample_backward(dx, dout, B, block.H, block.H, block.C, block.accumulate); break;
            case BLOCK_OUT: out_backward(m, block, B, dout, dx); break;
        }
        backend_join();
    }
}

// ===========================================================================================================
//  6  DIFFUSION AND SAMPLERS
// ===========================================================================================================

// ---- schedules --------------------------------------------------------------------------------------------

// The products abar_t = prod (1 - beta) of a chain of T steps. Linear: Ho et al. (2020), section 4, stretched
// to other T as guided-diffusion does; cosine: Nichol and Dhariwal, "Improved DDPM" (2021), equation 17. Zero
// terminal SNR: sqrt(abar) shifted so that its last is 0 and scaled so that its first stays, algorithm 1 of
// Lin et al., "Common Diffusion Noise Schedules and Sample Steps are Flawed" (2023).
static std::vector<double> make_abar(const Config& c) {
    int T = c.diffusion_steps, schedule = c.noise_schedule;
    std::vector<double> abar(T);
    double product = 1;
    auto f = [](double s) { return pow(cos((s + 0.008) / 1.008 * M_PI / 2), 2); };
    for (int t = 0; t < T; t++) {
        double first = 1e-4 * 1000.0 / T, last = 0.02 * 1000.0 / T;  // below 1: see check_config
        double beta = schedule == SCHEDULE_LINEAR ? first + (last - first) * t / (T - 1)
                                                  : std::min(1 - f((t + 1.0) / T) / f((double)t / T), 0.999);
        abar[t] = product *= 1 - beta;
    }
    double first = sqrt(abar[0]), last = sqrt(abar[T - 1]);
    for (int t = 0; t < T && c.zero_terminal_snr; t++)
        abar[t] = pow((sqrt(abar[t]) - last) * first / (first - last), 2);
    return abar;
}

// What the loss of each timestep counts for. Hang et al., "Efficient Diffusion Training via Min-SNR Weighting
// Strategy" (2023): the error in x0 counts min(SNR, gamma), SNR = abar / (1 - abar); the squared error in eps
// is SNR times that in x0, in v SNR + 1 times, and counts so much less. gamma = 0: all alike.
static std::vector<float> make_loss_weights(const std::vector<double>& abar, int predict, double gamma) {
    std::vector<float> weights;
    for (double a : abar) {
        double snr = a / (1 - a), weight = 1;
        if (gamma > 0 && predict == PREDICT_X0) weight = std::min(snr, gamma);
        if (gamma > 0 && predict == PREDICT_V) weight = std::min(snr, gamma) / (snr + 1);
        if (gamma > 0 && predict == PREDICT_EPS && snr > gamma) weight = gamma / snr;
        weights.push_back((float)weight);
    }
    return weights;
}

// The `count` timesteps of a shortened chain, rising: guided-diffusion's space_timesteps(T, [count]).
static std::vector<int> space_timesteps(int T, int count) {
    std::vector<int> taken;
    double stride = count > 1 ? (double)(T - 1) / (count - 1) : 1, position = 0;
    for (int i = 0; i < count; i++, position += stride) taken.push_back((int)nearbyint(position));
    return taken;
}

// ---- noising ----------------------------------------------------------------------------------------------

// What the network is to predict of x0 and eps, where x_t = signal x0 + noise eps.
HOST_DEVICE static inline float target_of(int predict, float x0, float eps, float signal, float noise) {
    return predict == PREDICT_EPS ? eps : predict == PREDICT_V ? signal * eps - noise * x0 : x0;
}

// x_t = sqrt(abar) x0 + sqrt(1 - abar) eps, equation 4 of Ho et al.; target = eps, or v = sqrt(abar) eps -
// sqrt(1 - abar) x0 of Salimans and Ho, "Progressive Distillation" (2022), appendix D, or x0. x_t, target (B,
// H, W, 3); images (B, 3, H, W) clean; timesteps (B); signal[t] = sqrt(abar_t), noise[t] = sqrt(1 - abar_t).
// Image b's noise is that of sample first + b. The step is the state's (null: 0). Offset noise: eps has
// `offset` times one more normal, the same for all pixels of a channel, so that the network learns to move a
// picture's mean.
namespace DEVICE {
static void add_noise(floatX* x_t, float* target, const float* images, const int* timesteps,
                      const float* signal, const float* noise, int B, int H, int W, int predict,
                      uint32_t seed, Stream stream, uint32_t first, float offset, const StepState* state);
}

// ---- samplers ---------------------------------------------------------------------------------------------

// A call of the network and what a sampler makes of it, whichever sampler it is: linear in the prediction of
// the picture, the noisy picture x and what an earlier call saved,
//   x0 = threshold(from_x x + from_out out)
//   x <- to_x0 x0 + to_x x + to_saved saved + sigma noise,   saved <- save_x0 x0 + save_x x,
// with the old x and saved on the right.
struct SamplerStep {
    int timestep;  // what the network is told
    int threshold;
    float from_x, from_out, to_x0, to_x, to_saved, sigma;
    float save_x0, save_x;  // 1 and 0, so that x0 itself is saved, but where Heun's step has a second call
};

static const char* const SAMPLER_NAMES[] = {"DDIM", "DDPM", "DPM-Solver++(2M)", "Heun"};

static int sampler_steps(const Config& c) {
    if (c.sample_steps) return c.sample_steps;
    int usual = c.sampler == SAMPLER_DDPM ? c.diffusion_steps : c.sampler == SAMPLER_DDIM ? 50 : 25;
    return std::min(usual, c.diffusion_steps);
}

// The calls from pure noise to a picture, in order. With alpha = sqrt(abar), and each step going from
// timestep to timestep of the shortened chain and at last to abar = 1, which is x0 itself:
//   DDIM   equation 12 of Song et al. (2021), the noise derived again from the thresholded x0, and its sigma
//          (equation 16). With eta = 1 it is DDPM's step, equation 7 of Ho et al. with the posterior
//          variance.
//   DPM-Solver++(2M)  algorithm 2 of Lu et al. (2022): DDIM's step from x0 extrapolated by means of the one
//          before, lambda = ln(alpha / sqrt(1 - abar)) being the time. Three steps are of first order, which
//          is DDIM: the first lacks one before, the last ends where lambda is infinite, and the last but one
//          is so much longer in lambda than its predecessor that extrapolation would overshoot.
//   Heun   algorithm 1 of Karras et al. (2022) without churn, for x / alpha at the noise level
//          sqrt(1 - abar) / alpha: a DDIM step, then the same again with the mean of the slopes at both ends.
//          The first call saves what does not depend on the second. The last step is DDIM's, and so is one
//          from a level above HEUN_MOST_NOISE, such as the infinite one of zero terminal SNR: the levels at
//          the ends are so far apart that the mean of the slopes would magnify the difference of the
//          predictions.
static const double HEUN_MOST_NOISE = 1000;
static std::vector<SamplerStep> make_sampler(const Config& c) {
    std::vector<double> abar = make_abar(c);
    std::vector<int> timesteps = space_timesteps(c.diffusion_steps, sampler_steps(c));
    double eta = c.sampler == SAMPLER_DDPM ? 1 : c.sampler == SAMPLER_DDIM ? (double)c.eta : 0;
    auto call_at = [&](int timestep) {
        double alpha = sqrt(abar[timestep]), noise = sqrt(1 - abar[timestep]);
        SamplerStep s = SamplerStep();
        s.timestep = timestep, s.threshold = c.threshold, s.save_x0 = 1;
        switch (c.predict) {
            case PREDICT_EPS: s.from_x = (float)(1 / alpha), s.from_out = (float)(-noise / alpha); break;
            case PREDICT_V: s.from_x = (float)alpha, s.from_out = (float)-noise; break;
            case PREDICT_X0: s.from_x = 0, s.from_out = 1; break;
        }
        return s;
    };
    auto lambda = [](double a) { return 0.5 * log(a / (1 - a)); };
    std::vector<SamplerStep> calls;
    for (int count = (int)timesteps.size(), i = count - 1; i >= 0; i--) {
        double a = abar[timesteps[i]], next = i ? abar[timesteps[i - 1]] : 1.0;
        double fresh = (1 - a / next) / (1 - a);  // noise of the step from next to a, as a part of all at a
        double keep = sqrt((1 - next) / (1 - a) * std::max(0.0, 1 - eta * eta * fresh));
        double to_x0 = sqrt(next) - keep * sqrt(a);
        SamplerStep s = call_at(timesteps[i]);
        s.to_x0 = (float)to_x0, s.to_x = (float)keep, s.sigma = (float)(eta * sqrt((1 - next) * fresh));
        if (c.sampler == SAMPLER_DPMPP && i < count - 1 && i > 1) {
            double before = abar[timesteps[i + 1]];
            double w = (lambda(next) - lambda(a)) / (lambda(a) - lambda(before)) / 2;
            s.to_x0 = (float)(to_x0 * (1 + w)), s.to_saved = (float)(-to_x0 * w);
        }
        if (c.sampler == SAMPLER_HEUN && i > 0 && sqrt(1 - a) <= HEUN_MOST_NOISE * sqrt(a)) {
            s.save_x0 = (float)(to_x0 / 2), s.save_x = (float)((sqrt(next / a) + keep) / 2);
            calls.push_back(s);
            s = call_at(timesteps[i - 1]);
            double half = (1 - sqrt((1 / a - 1) / (1 / next - 1))) / 2;
            s.to_x0 = (float)(-half * sqrt(next)), s.to_x = (float)half, s.to_saved = 1;
        }
        calls.push_back(s);
    }
    return calls;
}

// The picture that a call predicts, kept within [-1, 1]; limit: of dynamic thresholding.
HOST_DEVICE static inline float predicted_x0(const SamplerStep& s, float x, float out) {
    return s.from_x * x + s.from_out * out;
}
HOST_DEVICE static inline float thresholded_x0(const SamplerStep& s, float x, float out, float limit) {
    float x0 = predicted_x0(s, x, out);
    if (s.threshold == THRESHOLD_NONE) return x0;
    if (s.threshold == THRESHOLD_CLAMP) limit = 1;
    return (x0 < -limit ? -limit : x0 > limit ? limit : x0) / limit;  // a NaN stays one
}

// Of dynamic thresholding: the 99.5th percentile of a picture's |x0|, at least 1 (Saharia et al.,
// "Photorealistic Text-to-Image Diffusion Models", 2022, section 2.3). It is one of the values, number
// percentile_rank of n in rising order. Floats above 0 are in the order of their bits, so that the value is
// found exactly, eight bits at a time: count what agrees in the bits found so far by the next eight.
static int percentile_rank(int n) { return (int)((995L * (n - 1) + 999) / 1000); }
HOST_DEVICE static inline uint32_t magnitude_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x7FFFFFFF;
}
HOST_DEVICE static inline float limit_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value > 1 ? value : 1;
}

// Where a picture begins: at weight z(seed) + other_weight z(other), z(s) being seed s's normals. Noise that
// a sampler adds later is the seed's.
struct PictureNoise {
    uint32_t seed, other;
    float weight, other_weight;
};

// sampler_start: x (B, H, W, 3) becomes noise, and input, its copy for the network.
// sampler_limits: limits (B) for the call s.
// sampler_step: x, its copy and saved (B, H, W, 3) updated in place from out (B, H, W, 3), the network's
// answer; call counts the network's calls from 1.
// A picture depends on its PictureNoise alone, whatever the batch it is drawn in.
namespace DEVICE {
static void sampler_start(float* x, floatX* input, const PictureNoise* begins, int B, int H, int W);
static void sampler_limits(float* limits, const float* x, const floatX* out, SamplerStep s, int B, int H,
                           int W);
static void sampler_step(float* x, float* saved, floatX* input, const floatX* out, const float* limits,
                         const PictureNoise* begins, SamplerStep s, int B, int H, int W, uint32_t call);
}  // namespace DEVICE

// ===========================================================================================================
//  7  OPTIMISER
// ===========================================================================================================

// What an update of the weights depends on, besides the gradient.
struct AdamW {
    float lr, weight_decay, beta1, beta2, eps;
    float correction1, correction2;  // 1 - beta^n
    float ema_weight[MAX_EMAS];      // share of the new weights in each running mean
    float clip;                      // factor of the gradient
};

// What --skip_outliers goes by; the section `state` of a checkpoint.
enum { WINDOW = 128, WINDOW_LEAST = 32 };  // steps that are looked back on, and seen before one is skipped
struct History {
    int32_t skipped;  // steps that updated nothing
    int32_t seen;     // steps that were entered below: the n-th in place n mod WINDOW
    float losses[WINDOW], norms[WINDOW];
};

// What changes from step to step. It lives on the device, so that a step takes no arguments from the host.
struct StepState {
    int64_t step;      // optimiser steps done, those that were skipped among them
    AdamW update;      // of the step under way
    int finite;        // its loss and gradient norm are
    int accepted;      // and no outliers: the weights may be updated
    float loss, norm;  // these are they, the norm before clipping
    // by quartile of the timesteps: the sum of its samples' mean squared errors, unweighted, and their number
    float quartile_sums[4] = {};
    int quartile_counts[4] = {};
    History history;
};
enum { DECAY_CHUNK = 32 };    // parameters that are decayed or not together; it divides every offset
enum { NORM_CHUNK = 65536 };  // parameters whose squares are summed together
enum { RESULT_SLOTS = 8 };    // step n's state is kept in slot n mod RESULT_SLOTS until the host has read it

// parts (n / NORM_CHUNK rounded up): the sum of squares of each chunk, in order.
namespace DEVICE {
static void squared_norm(float* parts, const float* x, size_t n);
}

// The running means of the weights, (n) each; null where there are fewer than MAX_EMAS.
struct Emas {
    float* of[MAX_EMAS];
    int count() const {
        int k = 0;
        while (k < MAX_EMAS && of[k]) k++;
        return k;
    }
};

// Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, as torch.optim.AdamW,
// of the gradient times `clip`; then the EMAs. All (n); decays (n / DECAY_CHUNK rounded up); working: the
// layers' copy of the weights where floatX is no float, otherwise null. The state says how, and a step that
// is not accepted changes nothing.
namespace DEVICE {
static void adamw(float* w, Emas emas, floatX* working, float* m, float* v, const float* gradient,
                  const uint8_t* decays, size_t n, const StepState* state);
}

// What the optimiser's settings are: the part of Config that a kernel can be handed.
struct Hyper {
    float lr, final_lr_fraction, weight_decay, beta1, beta2, adam_eps, grad_clip, skip_outliers;
    int lr_schedule, warmup_steps, lr_steps;
    float ema_rate[MAX_EMAS];
};
static Hyper hyper_of(const Config& c) {
    Hyper hyper = {c.lr,        c.final_lr_fraction, c.weight_decay, c.beta1,        c.beta2,    c.adam_eps,
                   c.grad_clip, c.skip_outliers,     c.lr_schedule,  c.warmup_steps, c.lr_steps, {}};
    std::copy(c.ema_rate, c.ema_rate + MAX_EMAS, hyper.ema_rate);
    return hyper;
}

// The learning rate of step s, counted from 0; Settings: Config or Hyper.
template <typename Settings>
HOST_DEVICE static double learning_rate(const Settings& c, int64_t s) {
    double rate = c.lr;
    if (s < c.warmup_steps) return rate * (double)(s + 1) / c.warmup_steps;
    if (c.lr_schedule == LR_CONSTANT) return rate;
    double span = c.lr_steps > c.warmup_steps ? c.lr_steps - c.warmup_steps : 1,
           done = (double)(s - c.warmup_steps) / span, last = c.final_lr_fraction;
    if (done > 1) done = 1;
    return rate *
           (last + (1 - last) * (c.lr_schedule == LR_COSINE ? 0.5 * (1 + cos(M_PI * done)) : 1 - done));
}

// The learning rate goes by steps; what the moments and the running means hold, by the updates among them.
template <typename Settings>
HOST_DEVICE static AdamW adamw_at(const Settings& c, int64_t s, int64_t updates) {
    double n = (double)(updates + 1), rising = 1 - pow(1 + n, -0.75);
    AdamW a = {(float)learning_rate(c, s),
               c.weight_decay,
               c.beta1,
               c.beta2,
               c.adam_eps,
               (float)(1 - pow((double)c.beta1, n)),
               (float)(1 - pow((double)c.beta2, n)),
               {},
               1.0f};
    for (int k = 0; k < MAX_EMAS; k++) {
        double rate = c.ema_rate[k];
        a.ema_weight[k] = (float)(1 - (rising < rate ? rising : rate));
    }
    return a;
}

// Whether a value lies more than z (unbiased) standard deviations above the mean of those in the window.
HOST_DEVICE static inline bool is_outlier(float value, const float* window, int count, float z) {
    double mean = 0, squares = 0;
    for (int i = 0; i < count; i++) mean += window[i];
    mean /= count;
    for (int i = 0; i < count; i++) squares += (window[i] - mean) * (window[i] - mean);
    return value - mean > z * sqrt(squares / (count - 1));
}

// What a step's loss and gradient norm decide: whether its update is made, and of how much of the gradient
// (as torch.nn.utils.clip_grad_norm_). Only a finite step counts; a skipped one does, so that the data move
// on.
HOST_DEVICE static inline void conclude_step(StepState* state, float loss, float norm, const Hyper& c) {
    History* h = &state->history;
    int count = h->seen < WINDOW ? h->seen : WINDOW;
    bool outlier = c.skip_outliers > 0 && count >= WINDOW_LEAST &&
                   (is_outlier(loss, h->losses, count, c.skip_outliers) ||
                    is_outlier(norm, h->norms, count, c.skip_outliers));
    state->loss = loss, state->norm = norm;
    state->finite = fabsf(loss) <= FLT_MAX && fabsf(norm) <= FLT_MAX;
    state->accepted = state->finite && !outlier;
    state->update.clip = c.grad_clip > 0 ? fminf(1.0f, c.grad_clip / (norm + 1e-6f)) : 1.0f;
    if (state->accepted)
        h->losses[h->seen % WINDOW] = loss, h->norms[h->seen % WINDOW] = norm, h->seen++;
    else if (state->finite)
        h->skipped++;
    if (state->finite) state->step++;
}

// ===========================================================================================================
//  8  TRAINING
// ===========================================================================================================

// ---- memory of a run --------------------------------------------------------------------------------------

// Every buffer of a run, in one list: with memory null it only counts, otherwise it hands out the pieces.
static size_t lay_out_model(Model* m, char* memory) {
    const Plan& plan = m->plan;
    size_t total = 0, P = plan.num_floats, B = plan.batch;
    size_t image = IMAGE_CHANNELS * plan.image_size * plan.image_size, pixels = B * image;
    size_t whole = std::max(plan.batch, m->config.batch_size);  // of which the plan's may be a part
    auto place = [&](size_t bytes) { return memory + reserve(&total, bytes); };
    m->master = (float*)place(P * sizeof(float));
    m->weights = (floatX*)m->master;
    m->exact = m->master;
    if (sizeof(floatX) != sizeof(float)) m->weights = (floatX*)place(P * sizeof(floatX));
    for (int k = 0; k < ema_count(m->config); k++) m->ema[k] = (float*)place(P * sizeof(float));
    if (plan.training) {
        m->gradients = (float*)place(P * sizeof(float));
        m->adam_m = (float*)place(P * sizeof(float));
        m->adam_v = (float*)place(P * sizeof(float));
        m->norm_parts = (float*)place((P / NORM_CHUNK + 1) * sizeof(float));
        m->decays = (uint8_t*)place(P / DECAY_CHUNK + 1);
    }
    m->arena = place(plan.arena_bytes);
    m->input = (floatX*)place(B * plan.image_size * plan.image_size * PIXEL * sizeof(floatX));
    m->target = (float*)place(pixels * sizeof(float));
    m->images = (float*)place(pixels * sizeof(float));
    m->timesteps = (int*)place(whole * sizeof(int));
    m->sources = (int*)place(whole * sizeof(int));
    m->state = (StepState*)place((1 + RESULT_SLOTS) * sizeof(StepState));
    m->signal = (float*)place(m->config.diffusion_steps * sizeof(float));
    m->noise = (float*)place(m->config.diffusion_steps * sizeof(float));
    m->loss_weights = (float*)place(m->config.diffusion_steps * sizeof(float));
    m->losses = (float*)place(whole * loss_parts((int)image) * sizeof(float));
    m->begins = (PictureNoise*)place(B * sizeof(PictureNoise));
    m->limits = (float*)place(B * sizeof(float));
    return total;
}

// Bytes that a run of this configuration allocates, all told (the images of the data file aside).
static size_t memory_needed(const Config& config, int batch, bool training) {
    Model m = Model();
    m.config = config, m.plan = make_plan(config, batch, training);
    return lay_out_model(&m, nullptr) + workspace_bytes();
}

// Images that the network can take at a time: more than a grid has rows, or more pixels than 32 bits can
// number with room to spare, are refused.
static int most_images(const Config& config) {
    const int GRID_ROWS = 65535, PIXELS = 1 << 30;
    return std::min(GRID_ROWS, PIXELS / (config.image_size * config.image_size));
}

// Refuses what a checkpoint's header and the kernels can't count, and what this machine's memory can't hold.
static void check_memory(const Config& config, int batch, bool training) {
    size_t parameters = make_plan(config, 1, false).num_parameters;
    if (parameters > INT32_MAX)
        fail(
            "this model has %zu parameters and %d are the most; use fewer --num_channels or a smaller "
            "--channel_mult",
            parameters, INT32_MAX);
    size_t needed = memory_needed(config, batch, training), available = backend_memory_available();
    bool enough = !available || needed <= available;
    if (enough && batch <= most_images(config)) return;
    std::string why =
        enough
            ? text("%d images of %d x %d at a time are too many", batch, config.image_size, config.image_size)
            : text("this run needs %s of memory and %s are free", human_bytes((double)needed).c_str(),
                   human_bytes((double)available).c_str());
    int fits = std::min(batch, most_images(config));
    while (fits > 0 && available && memory_needed(config, fits, training) > available) fits /= 2;
    std::string parts = training ? text("--microbatch %d, the same batch in parts, or ", fits) : "";
    fail("%s; %s", why.c_str(),
         fits ? text("%s--batch_size %d would fit", parts.c_str(), fits).c_str()
              : "no batch size would fit: use a smaller model");
}

static void build_model(Model* m, const Config& config, int batch, bool training) {
    check_memory(config, batch, training);
    m->config = config;
    m->plan = make_plan(config, batch, training);
    m->bytes = lay_out_model(m, nullptr);
    m->memory = (char*)backend_allocate(m->bytes);
    if (!m->memory || !allocate_workspace())
        fail("could not allocate %s of memory; use a smaller --batch_size",
             human_bytes((double)(m->bytes + workspace_bytes())).c_str());
    backend_zero(m->memory, m->bytes);
    lay_out_model(m, m->memory);
    if (!training) return;
    std::vector<uint8_t> decays(m->plan.num_floats / DECAY_CHUNK + 1);
    for (const Tensor& t : m->plan.tensors) {
        ASSERT(t.offset % DECAY_CHUNK == 0);
        for (size_t i = 0; t.ndim > 1 && i < t.size; i += DECAY_CHUNK)
            decays[(t.offset + i) / DECAY_CHUNK] = 1;
    }
    backend_upload(m->decays, decays.data(), decays.size());
}

static void free_model(Model* m) {
    backend_free(m->memory);
    *m = Model();
}

// Makes the layers read these parameters: master, or an EMA.
static void use_weights(Model* m, const float* parameters) {
    m->exact = parameters;
#if defined(__CUDACC__) && !defined(PRECISION_FP32)
    round_weights(m->weights, parameters, m->plan.num_floats);
#else
    m->weights = (floatX*)parameters;
#endif
}

// What every run starts from once `master` is filled.
static void start_from_master(Model* m) {
    use_weights(m, m->master);
    for (float* ema : m->ema)
        if (ema) backend_copy(ema, m->master, m->plan.num_floats * sizeof(float));
}

// Fresh weights, as PyTorch's defaults draw them: uniform within 1 / sqrt(fan_in), with guided-diffusion's
// zeros.
static void initialise_weights(Model* m, uint32_t seed) {
    std::vector<float> values, reordered;
    for (size_t index = 0; index < m->plan.tensors.size(); index++) {
        const Tensor& t = m->plan.tensors[index];
        values.assign(t.count, t.init == INIT_ONES ? 1.0f : 0.0f);
        reordered.resize(t.size);
        float bound = (float)(1.0 / sqrt((double)t.fan_in));
        for (size_t quad = 0; t.init == INIT_UNIFORM && quad < (t.count + 3) / 4; quad++) {
            Philox p = philox(seed, STREAM_INIT, (uint32_t)quad, (uint32_t)index, 0);
            for (size_t e = 4 * quad; e < std::min(4 * quad + 4, t.count); e++)
                values[e] = (float)(2.0 * ((p.word[e % 4] >> 8) * 0x1p-24) - 1.0) * bound;
        }
        reorder(reordered.data(), values.data(), t, true);
        backend_upload(m->master + t.offset, reordered.data(), t.size * sizeof(float));
    }
    start_from_master(m);
}

// Mean of the squared error of the first B samples against their targets, without weights.
static double loss_of(const Model* m, int B) {
    int n = IMAGE_CHANNELS * m->plan.image_size * m->plan.image_size;
    std::vector<float> losses((size_t)B * loss_parts(n));
    backend_download(losses.data(), m->losses, losses.size() * sizeof(float));
    double sum = 0;
    for (float part : losses) sum += part;
    return sum / ((double)B * n);
}

// ---- the first and the last launch of a step --------------------------------------------------------------

// All images, (count, 3, size, size), as bytes or as floats (the other is null), where the device can read
// them, and what decides which of them a step takes: sample n = step * batch + b of the run is image order[n
// mod count] of epoch n / count, whose order lies in row (n / count) mod slots.
struct BatchSource {
    const uint8_t* bytes;
    const float* floats;
    const int* order;  // (slots, count)
    int count, slots, batch, size, flip, diffusion_steps;
    uint32_t seed;
};

// Sample b of step s: its timestep, and its image, or -1 - image where it is mirrored.
HOST_DEVICE static inline void choose_sample(int* timestep, int* source, const BatchSource& s, int b,
                                             int64_t step) {
    uint64_t n = (uint64_t)step * s.batch + b;
    int image = s.order[n / s.count % s.slots * s.count + n % s.count];
    bool mirrored = s.flip && random_word(s.seed, STREAM_FLIP, 0, b, (uint32_t)step) >> 31;
    *source = mirrored ? -1 - image : image;
    *timestep = (int)random_timestep(s.seed, STREAM_TIMESTEP, b, (uint32_t)step, s.diffusion_steps);
}

// Element e of sample b, a float in [-1, 1], from the image that its source names.
HOST_DEVICE static inline float pixel_of(const BatchSource& s, int source, int e) {
    int W = s.size, elements = IMAGE_CHANNELS * W * W;
    size_t at = (size_t)(source < 0 ? -1 - source : source) * elements +
                (source < 0 ? e - e % W + (W - 1 - e % W) : e);
    return s.bytes ? (float)s.bytes[at] / 127.5f - 1.0f : s.floats[at];
}

// The parts of a whole batch's losses, as mse leaves them, and what tells each sample's weight and quartile.
struct BatchLoss {
    const float* parts;    // (batch, loss_parts(elements))
    const int* timesteps;  // (batch)
    const float* weights;  // (diffusion_steps)
    int batch, elements, diffusion_steps;
};
HOST_DEVICE static inline int quartile_of(int timestep, int diffusion_steps) {
    return 4 * timestep / diffusion_steps;
}

// begin_step: the state's update, and each sample's timestep and source. load_images: images (B, 3, size,
// size). finish_step: loss, by quartile too, and gradient norm from their parts, and what they decide;
// state[1 + slot] keeps what the host will read.
namespace DEVICE {
static void begin_step(StepState* state, int* timesteps, int* sources, BatchSource source, Hyper hyper);
static void load_images(float* images, const int* sources, BatchSource source, int B);
static void finish_step(StepState* state, BatchLoss batch, const float* norm_parts, size_t parameters,
                        Hyper hyper);
static void fill_timesteps(int* timesteps, int B, int value);
}  // namespace DEVICE

// ---- a training step --------------------------------------------------------------------------------------

// The images of a .bin in memory, planar (N, 3, H, W): bytes as they are, or floats in [-1, 1].
struct Dataset {
    int count = 0, size = 0;  // images; height and width
    std::vector<uint8_t> bytes;
    std::vector<float> floats;
};

// The lowest validation loss of a run so far.
struct Best {
    double loss = INFINITY;
    long step = -1, last = -1;  // last: the step of the newest one
    void update(double new_loss, long new_step) {
        if (new_loss < loss) loss = new_loss, step = new_step;
        last = new_step;
    }
};

// metrics.jsonl of a run's folder, a record a line. Records that can't be written wait in memory for the next
// attempt, as on a disk that is full for a while; the file holds whole lines only.
struct Metrics {
    enum { MOST_WAITING = 16 << 20 };  // bytes; records that come while so many wait are lost
    std::string path, waiting;
    int file = -1;
    off_t end = 0;  // of the last whole line
    long lost = 0;  // records
    bool warned = false, drops = false;
    std::string kept;

    // On resume, lines of steps that are about to be done again are dropped; the others tell the best
    // validation loss so far. Nothing is written before open().
    void read(const std::string& name, long resumed_step, Best* best);
    void open();
    void add(const std::string& record);
    void write_waiting();
    void close();
};

static volatile sig_atomic_t stop_requested = 0;

struct Trainer {
    Model model = Model();
    Dataset images, validation;
    BatchSource source;
    void* pixels = nullptr;       // the images where the device reads them, if that is a copy
    bool pixels_on_host = false;  // which lies in the host's memory, for want of room on the device
    int *order, *host_order;      // (slots, count): the device's and the host's, which is ahead of it
    long epochs;                  // whose orders were sent
    StepState* results;           // (RESULT_SLOTS), the host's
    Recording recording;
    int folder = -1;     // the run's, locked against other processes as long as it is open
    long begun = 0;      // steps given to the device
    long step = 0;       // optimiser steps done, as far as the host knows
    float smoothed = 0;  // running mean of the loss, without those of skipped steps
    History history = History();
    Metrics metrics;
    Best best;
    // what was due at the step that is resumed; where a stop or a crash came before it, it is made up for
    bool owes_validation = false, owes_samples = false;
    // flags that --resume came with, such as --lr 0.001 (was 0.0001)
    std::vector<std::string> changes;
    // by quartile of the timesteps, since the last line of the log: the samples' losses, and their number
    double quartile_sums[4] = {0};
    long quartile_counts[4] = {0};
};

static void upload_schedule(Model* m) {
    std::vector<double> abar = make_abar(m->config);
    std::vector<float> signal, noise;
    for (double a : abar) signal.push_back((float)sqrt(a)), noise.push_back((float)sqrt(1 - a));
    std::vector<float> weights = make_loss_weights(abar, m->config.predict, m->config.min_snr_gamma);
    backend_upload(m->signal, signal.data(), signal.size() * sizeof(float));
    backend_upload(m->noise, noise.data(), noise.size() * sizeof(float));
    backend_upload(m->loss_weights, weights.data(), weights.size() * sizeof(float));
}

// Everything that steps need besides the model, once weights and `step` are in place. The images stay in the
// device's memory where they fit, otherwise in host memory that the device reads.
static void prepare_steps(Trainer* t) {
    Model* m = &t->model;
    const Config& c = m->config;
    const Dataset& data = t->images;
    bool floats = data.bytes.empty();
    const void* pixels = floats ? (const void*)data.floats.data() : data.bytes.data();
#ifdef __CUDACC__
    size_t bytes = floats ? data.floats.size() * sizeof(float) : data.bytes.size();
    t->pixels_on_host = bytes > backend_memory_available() / 10 * 9;
    t->pixels = t->pixels_on_host ? backend_allocate_host(bytes) : backend_allocate(bytes);
    if (!t->pixels) fail("could not allocate %s for the images", human_bytes((double)bytes).c_str());
    if (t->pixels_on_host)
        memcpy(t->pixels, pixels, bytes);
    else
        backend_upload(t->pixels, pixels, bytes);
    pixels = t->pixels;
#endif
    int slots = 2 * (c.batch_size * (STEPS_IN_FLIGHT + 1) / data.count + 2);
    size_t order_bytes = (size_t)slots * data.count * sizeof(int);
    t->order = (int*)backend_allocate(order_bytes);
    t->host_order = (int*)backend_allocate_host(order_bytes);
    t->results = (StepState*)backend_allocate_host(RESULT_SLOTS * sizeof(StepState));
    if (!t->order || !t->host_order || !t->results)
        fail("could not allocate %s for the order of the images",
             human_bytes(2.0 * (double)order_bytes).c_str());
    t->source = {floats ? nullptr : (const uint8_t*)pixels,
                 floats ? (const float*)pixels : nullptr,
                 t->order,
                 data.count,
                 slots,
                 c.batch_size,
                 c.image_size,
                 c.flip,
                 c.diffusion_steps,
                 c.seed};
    StepState state = StepState();
    state.step = t->begun = t->step, state.history = t->history;
    backend_upload(m->state, &state, sizeof state);
    t->epochs = (long)((uint64_t)t->step * c.batch_size / data.count);
}

static void finish_steps(Trainer* t) {
    if (t->folder >= 0) close(t->folder);
    backend_forget(&t->recording);
    if (t->pixels_on_host)
        backend_free_host(t->pixels);
    else if (t->pixels)
        backend_free(t->pixels);
    backend_free(t->order);
    backend_free_host(t->host_order);
    backend_free_host(t->results);
}

// Every launch of an optimiser step. It reads nothing from the host, so that it can be recorded. A batch
// larger than the plan's goes through the network in parts, [first, first + B), whose gradients add up.
static void enqueue_step(Trainer* t) {
    Model* m = &t->model;
    const Config& c = m->config;
    int batch = c.batch_size, H = c.image_size, elements = IMAGE_CHANNELS * H * H;
    size_t P = m->plan.num_floats;
    begin_step(m->state, m->timesteps, m->sources, t->source, hyper_of(c));
    backend_zero(m->gradients, P * sizeof(float));
    for (int first = 0; first < batch; first += m->plan.batch) {
        int B = std::min(m->plan.batch, batch - first);
        load_images(m->images, m->sources + first, t->source, B);
        add_noise(m->input, m->target, m->images, m->timesteps + first, m->signal, m->noise, B, H, H,
                  c.predict, c.seed, STREAM_NOISE, first, c.offset_noise, m->state);
        unet_forward(m, B, first);
        mse(m->losses + (size_t)first * loss_parts(elements), unet_output_gradient(m), unet_output(m),
            m->target, m->timesteps + first, m->loss_weights, B, elements, (size_t)batch * elements);
        unet_backward(m, B);
    }
    squared_norm(m->norm_parts, m->gradients, P);
    finish_step(m->state, {m->losses, m->timesteps, m->loss_weights, batch, elements, c.diffusion_steps},
                m->norm_parts, P, hyper_of(c));
    adamw(m->master, {{m->ema[0], m->ema[1], m->ema[2], m->ema[3]}},
          sizeof(floatX) == sizeof(float) ? nullptr : m->weights, m->adam_m, m->adam_v, m->gradients,
          m->decays, P, m->state);
}

static void send_orders(Trainer* t, long last_epoch) {
    int count = t->images.count;
    for (; t->epochs <= last_epoch; t->epochs++) {
        size_t at = (size_t)(t->epochs % t->source.slots) * count;
        random_permutation(t->host_order + at, count, t->source.seed, (uint32_t)t->epochs);
        backend_upload_async(t->order + at, t->host_order + at, count * sizeof(int));
    }
}

// Gives the device its next step, and before it the orders of the epochs that the step draws from.
static void begin_next_step(Trainer* t) {
    int slot = (int)(t->begun % RESULT_SLOTS);
    send_orders(t, (long)((((uint64_t)t->begun + 1) * t->source.batch - 1) / t->images.count));
    backend_replay(&t->recording, [&] { enqueue_step(t); });
    backend_download_async(t->results + slot, t->model.state + 1 + slot, sizeof(StepState));
    backend_mark(slot);
    t->begun++;
}

struct StepResult {
    double loss, norm;
    bool finite() const { return std::isfinite(loss) && std::isfinite(norm); }
};

// The result of the oldest step that was begun and not yet awaited.
static StepResult await_step(Trainer* t) {
    int slot = (int)(t->step % RESULT_SLOTS);
    backend_await(slot);
    const StepState& result = t->results[slot];
    if (result.accepted) t->smoothed = t->step ? 0.98f * t->smoothed + 0.02f * result.loss : result.loss;
    t->step += result.finite;
    t->history = result.history;
    for (int q = 0; result.finite && q < 4; q++) {
        t->quartile_sums[q] += result.quartile_sums[q];
        t->quartile_counts[q] += result.quartile_counts[q];
    }
    return {result.loss, result.norm};
}

#ifdef TESTING
// One optimiser step. A loss or gradient that is not finite leaves the weights and the step as they were.
static StepResult train_step(Trainer* t) {
    begin_next_step(t);
    return await_step(t);
}
#endif

// Image `index` as floats in [-1, 1], (3, H, W).
static void copy_image(float* to, const Dataset& data, int index);

// The weights that sampling and validation use, and what the log calls them.
static const float* chosen_weights(const Model* m) {
    const float* ema = m->config.use_ema ? m->ema[m->config.use_ema - 1] : nullptr;
    return ema ? ema : m->master;
}
static std::string chosen_name(const Config& c) {
    bool raw = !c.use_ema || c.use_ema > ema_count(c);
    return raw ? "raw weights" : "EMA " + float_text(c.ema_rate[c.use_ema - 1]);
}

// Loss over the validation images with noise and timesteps that never change, of the weights that sampling
// would use. A stop breaks it off; then it means nothing.
static double validation_loss(Trainer* t) {
    Model* m = &t->model;
    const Config& c = m->config;
    size_t elements = (size_t)IMAGE_CHANNELS * c.image_size * c.image_size;
    int most = m->plan.batch;
    std::vector<float> images(most * elements);
    std::vector<int> timesteps(most);
    double sum = 0;
    use_weights(m, chosen_weights(m));
    for (int first = 0; first < t->validation.count && !stop_requested; first += most) {
        int B = std::min(most, t->validation.count - first);
        for (int b = 0; b < B; b++) {
            copy_image(images.data() + b * elements, t->validation, first + b);
            timesteps[b] = (int)random_timestep(c.seed, STREAM_VAL_TIMESTEP, first + b, 0, c.diffusion_steps);
        }
        backend_upload(m->images, images.data(), B * elements * sizeof(float));
        backend_upload(m->timesteps, timesteps.data(), B * sizeof(int));
        add_noise(m->input, m->target, m->images, m->timesteps, m->signal, m->noise, B, c.image_size,
                  c.image_size, c.predict, c.seed, STREAM_VAL_NOISE, first, 0, nullptr);
        unet_forward(m, B);
        mse(m->losses, nullptr, unet_output(m), m->target, nullptr, nullptr, B, (int)elements, B * elements);
        sum += loss_of(m, B) * B;
    }
    use_weights(m, m->master);
    return sum / t->validation.count;
}

// ---- drawing pictures -------------------------------------------------------------------------------------

// Pictures as the seeds say, without interpolation.
static std::vector<PictureNoise> noise_of_seeds(const std::vector<uint32_t>& seeds) {
    std::vector<PictureNoise> begins;
    for (uint32_t seed : seeds) begins.push_back({seed, 0, 1.0f, 0.0f});
    return begins;
}
static std::vector<uint32_t> consecutive_seeds(uint32_t first, int count) {
    std::vector<uint32_t> seeds;
    for (int i = 0; i < count; i++) seeds.push_back(first + i);
    return seeds;
}
static bool all_finite(const float* values, size_t n);

// How many of the pictures hold a number that is none.
static long count_broken(const std::vector<float>& pictures, size_t count) {
    long broken = 0;
    for (size_t n = 0, size = pictures.size() / count; n < count; n++)
        broken += !all_finite(pictures.data() + n * size, size);
    return broken;
}

// pictures (count, H, W, 3). strip (count, columns, H, W, 3), where columns are asked for: what each picture
// was predicted to be after steps evenly spread from the first to the last. Says how far it is where asked;
// stops early, and returns false, on Ctrl-C. The network's call is recorded once for each size of batch.
// While nothing is trained target and images are free for x and what the sampler saves.
static bool draw_pictures(Model* m, std::vector<float>* pictures, const std::vector<PictureNoise>& begins,
                          bool show_progress, std::vector<float>* strip = nullptr, int columns = 0) {
    const Config& c = m->config;
    int H = c.image_size, elements = IMAGE_CHANNELS * H * H, count = (int)begins.size(), recorded = 0;
    std::vector<SamplerStep> calls = make_sampler(c);
    pictures->resize((size_t)count * elements);
    if (strip) strip->resize((size_t)count * columns * elements);
    use_weights(m, chosen_weights(m));
    float *x = m->target, *saved = m->images;  // (B, H, W, 3)
    double start = seconds_now(), shown = 0;
    long done = 0, all_calls = (long)calls.size() * ((count + m->plan.batch - 1) / m->plan.batch);
    Recording network;
    for (int first = 0; first < count && !stop_requested; first += m->plan.batch) {
        int B = std::min(m->plan.batch, count - first), step = 0, column = 0;
        if (B != recorded) backend_forget(&network);
        recorded = B;
        backend_upload(m->begins, &begins[first], B * sizeof(PictureNoise));
        sampler_start(x, m->input, m->begins, B, H, H);
        backend_zero(saved,
                     (size_t)B * elements * sizeof(float));  // it is multiplied by 0, and may hold a NaN
        for (size_t i = 0; i < calls.size() && !stop_requested; i++) {
            const SamplerStep& s = calls[i];
            fill_timesteps(m->timesteps, B, s.timestep);
            backend_replay(&network, [&] { unet_forward(m, B); });
            if (s.threshold == THRESHOLD_DYNAMIC) sampler_limits(m->limits, x, unet_output(m), s, B, H, H);
            sampler_step(x, saved, m->input, unet_output(m), m->limits, m->begins, s, B, H, H,
                         (uint32_t)i + 1);
            if (s.save_x == 0) {  // a step ends, and what is saved is x0; for a strip we wait for it
                int last = sampler_steps(c) - 1;
                for (; column < columns && step == (columns > 1 ? column * last / (columns - 1) : last);
                     column++)
                    for (int b = 0; b < B; b++)
                        backend_download(&(*strip)[((size_t)(first + b) * columns + column) * elements],
                                         saved + (size_t)b * elements, elements * sizeof(float));
                step++;
            }
            double elapsed = seconds_now() - start;
            done++;
            if (show_progress && (elapsed - shown > (isatty(1) ? 0.5 : 10) || done == all_calls)) {
                printf("%snetwork call %ld of %ld, %s to go%s", isatty(1) ? "\r" : "", done, all_calls,
                       human_time(elapsed / done * (all_calls - done)).c_str(),
                       isatty(1) && done < all_calls ? "   " : "   \n");
                fflush(stdout);
                shown = elapsed;
            }
        }
        backend_download(pictures->data() + (size_t)first * elements, x,
                         (size_t)B * elements * sizeof(float));
    }
    backend_forget(&network);
    use_weights(m, m->master);
    return !stop_requested;
}

// ---- the loop ---------------------------------------------------------------------------------------------

// Of FILES and COMMAND LINE, what the loop calls.
static bool file_exists(const std::string& path);
static std::string shell_word(const std::string& path);
static std::string json_number(double value);
static std::string checkpoint_path(const std::string& folder, long step);
static std::vector<long> list_checkpoints(const std::string& folder);
static void write_checkpoint(const std::string& path, const Model& m, long step, float smoothed,
                             const History& history);
static void write_grid(const std::string& path, const std::vector<float>& pictures, int N, int H,
                       int columns = 0, int gap = 2);

// Where no checkpoint can be written, the run ends, after a last attempt at what the log lacks.
static void save(Trainer* t) {
    const Config& c = t->model.config;
    std::string path = checkpoint_path(c.out_dir, t->step);
    std::string why = failure_of([&] { write_checkpoint(path, t->model, t->step, t->smoothed, t->history); });
    if (!why.empty()) t->metrics.close(), fail("%s", why.c_str());
    why = failure_of([&] {
        // up to this step: later ones are damaged, or --resume would not have passed over them
        int newest = 0;
        for (long step : list_checkpoints(c.out_dir))
            if (step <= t->step && newest++ >= c.keep && !(c.keep_every && step % c.keep_every == 0))
                unlink(checkpoint_path(c.out_dir, step).c_str());
    });
    if (!why.empty()) fprintf(stderr, "note: old checkpoints stay: %s\n", why.c_str());
}

static std::string samples_path(const std::string& folder, long step) {
    return text("%s/samples_%08ld.png", folder.c_str(), step);
}

// A grid that can't be written is no reason to end a run.
static void save_samples(Trainer* t) {
    const Config& c = t->model.config;
    if (!c.num_samples || !t->step) return;  // of weights that were never trained there is nothing to see
    std::vector<float> pictures;
    double start = seconds_now();
    auto begins = noise_of_seeds(consecutive_seeds(c.seed, c.num_samples));
    if (!draw_pictures(&t->model, &pictures, begins, false)) return;
    std::string path = samples_path(c.out_dir, t->step);
    std::string failure = failure_of([&] { write_grid(path, pictures, c.num_samples, c.image_size); });
    if (!failure.empty()) {
        fprintf(stderr, "note: %s\n", failure.c_str());
        return;
    }
    say("%s in %s (%s): %s\n", counted(c.num_samples, "picture").c_str(),
        human_time(seconds_now() - start).c_str(), chosen_name(c).c_str(), path.c_str());
    if (long broken = count_broken(pictures, c.num_samples))
        printf("note: %ld of them became NaN and black: the weights have grown too large; try a lower --lr\n",
               broken);
}

// TFLOP/s of the model's own operations at so many milliseconds a step.
static double model_tflops(const Model& m, double ms) {
    return 1e-9 * training_flops(m.plan) * m.config.batch_size / ms;
}

// The loss by quartile of the timesteps since the last call, as JSON; null where no sample fell into one.
static std::string take_quartiles(Trainer* t) {
    std::string list;
    for (int q = 0; q < 4; q++) {
        bool any = t->quartile_counts[q] > 0;
        list += q ? ", " : "";
        list += json_number(any ? t->quartile_sums[q] / (double)t->quartile_counts[q] : NAN);
        t->quartile_sums[q] = 0, t->quartile_counts[q] = 0;
    }
    return "[" + list + "]";
}

// The next step after `step` that `every` divides; never where every is 0.
static long next_due(long step, int every) { return every ? (step / every + 1) * every : LONG_MAX; }

// The end of a run: `seconds` for the steps from `first` on but the very first, where there is another.
static void print_summary(const Trainer& t, long first, double seconds) {
    const Config& c = t.model.config;
    std::string checkpoint = checkpoint_path(c.out_dir, t.step);
    long steps = t.step - first;
    printf("\n%s at step %ld", stop_requested ? "stopped" : "done", t.step);
    if (steps > 1) {
        double ms = 1e3 * seconds / (steps - 1);
        printf(" after %ld steps: %.1f ms a step without the first, %.1f images/s", steps, ms,
               c.batch_size * 1e3 / ms);
    }
    printf("\n");
    if (t.best.step >= 0)
        printf("validation: best loss %.5f at step %ld (its checkpoint is %s)\n", t.best.loss, t.best.step,
               file_exists(checkpoint_path(c.out_dir, t.best.step)) ? "there" : "not kept");
    say("checkpoint: %s\n", checkpoint.c_str());
    std::string samples = samples_path(c.out_dir, t.step);
    if (file_exists(samples)) say("samples:    %s\n", samples.c_str());
    say("metrics:    %s/metrics.jsonl\n", c.out_dir);
    say("config:     %s/config.txt\n", c.out_dir);
    say("pictures:   ./train_unet --generate 64 --model_weights %s\n", shell_word(checkpoint).c_str());
    if (t.step < c.steps) {
        say("continue:   ./train_unet --resume %s\n", shell_word(c.out_dir).c_str());
    } else {
        bool over = t.step && !(learning_rate(c, t.step) > 0);  // a schedule that has come to its end
        say("continue:   ./train_unet --resume %s --steps %ld%s\n", shell_word(c.out_dir).c_str(),
            std::max(1L, 2 * t.step), over ? " --lr_schedule constant" : "");
    }
}

static void validate(Trainer* t) {
    double loss = validation_loss(t);
    if (stop_requested) return;
    std::string shown = std::isnan(loss) ? "NaN" : text("%.5f", loss);
    printf("%sstep %ld | validation loss %s (%s)\n", isatty(1) ? "\r\033[K" : "", t->step, shown.c_str(),
           chosen_name(t->model.config).c_str());
    t->metrics.add(text("{\"step\": %ld, \"val_loss\": %s}", t->step, json_number(loss).c_str()));
    t->best.update(loss, t->step);
}

static void train(Trainer* t) {
    const Config& c = t->model.config;
    long first = t->step, last_saved = t->step, last_sampled = -1, logged = t->step;
    if (t->owes_validation && t->validation.count && t->best.last != t->step) validate(t);
    if (t->owes_samples && !file_exists(samples_path(c.out_dir, t->step)))
        save_samples(t), last_sampled = t->step;
    fflush(stdout);
    double start = seconds_now(), log_start = start, paused = 0, shown = start;
    bool terminal = isatty(1);
    std::string source;
    double peak = backend_peak(&source), gigabytes = 1e-9 * (double)(t->model.bytes + workspace_bytes());
    auto due = [&](int every) { return every && t->step % every == 0; };
    while (t->step < c.steps && !stop_requested) {
        // keep the device fed, but not past a step after which the host works with the weights
        long limit =
            std::min({(long)c.steps, next_due(t->step, c.save_every), next_due(t->step, c.sample_every),
                      next_due(t->step, t->validation.count ? c.val_every : 0)});
        while (t->begun < std::min(limit, t->step + STEPS_IN_FLIGHT)) begin_next_step(t);
        StepResult result = await_step(t);
        double now = seconds_now();
        if (!result.finite()) {
            t->metrics.close();
            std::string saved = checkpoint_path(c.out_dir, last_saved),
                        what_to_do = !last_saved ? "nothing was saved before it: start again"
                                     : t->step == last_saved
                                         ? "the weights of " + saved + " lead to it: resume from an older one"
                                         : "the weights before it are " + saved + ": resume from there";
            fail("the %s became %s in step %ld; %s with a lower --lr",
                 std::isfinite(result.loss) ? "gradient" : "loss",
                 std::isnan(result.loss + result.norm) ? "NaN" : "infinite", t->step + 1, what_to_do.c_str());
        }
        // the first step, in which much is set up, counts only while there is no other
        double rate =
            t->step == first + 1 ? 1 / (now - start) : (t->step - first - 1) / (now - start - paused);
        std::string to_go = human_time((c.steps - t->step) / rate);
        // a line every log_every steps, the first step, and at least every 30 seconds
        if (due(c.log_every) || t->step == first + 1 || t->step == c.steps || now - log_start > 30) {
            double ms = 1e3 * (now - log_start) / (t->step - logged), lr = learning_rate(c, t->step - 1);
            double tflops = model_tflops(t->model, ms);
            std::string mfu = peak ? text(", \"mfu\": %.4f", tflops / peak) : "";
            printf(
                "%sstep %ld/%d | loss %.5f | smoothed %.5f | norm %.3f | lr %.2e | %.1f ms | %.1f images/s | "
                "ETA %s%s\n",
                terminal ? "\r\033[K" : "", t->step, c.steps, result.loss, (double)t->smoothed, result.norm,
                lr, ms, c.batch_size * 1e3 / ms, to_go.c_str(),
                t->history.skipped ? text(" | %d skipped", t->history.skipped).c_str() : "");
            t->metrics.add(
                text("{\"step\": %ld, \"loss\": %.9g, \"smoothed\": %.9g, \"grad_norm\": %.6g, \"lr\": %.6g, "
                     "\"ms\": %.3f, \"images_per_s\": %.2f, \"tflops\": %.5g%s, \"memory_gb\": %.4g, "
                     "\"skipped\": %d, \"loss_quartiles\": %s}",
                     t->step, result.loss, (double)t->smoothed, result.norm, lr, ms, c.batch_size * 1e3 / ms,
                     tflops, mfu.c_str(), gigabytes, t->history.skipped, take_quartiles(t).c_str()));
            fflush(stdout);
            logged = t->step, log_start = shown = now;
        } else if (terminal && now - shown > 1) {
            printf("\r\033[Kstep %ld/%d | loss %.5f | ETA %s", t->step, c.steps, result.loss, to_go.c_str());
            fflush(stdout);
            shown = now;
        }
        if (t->validation.count && (due(c.val_every) || t->step == c.steps)) validate(t);
        if (due(c.save_every)) save(t), last_saved = t->step;
        if (due(c.sample_every)) save_samples(t), last_sampled = t->step;
        fflush(stdout);
        double after = seconds_now();  // saving, sampling and validating are no part of a step's time
        paused += after - now, log_start += after - now;
        if (t->step == first + 1) start = after, paused = 0;
    }
    while (t->step < t->begun && await_step(t).finite()) continue;  // what Ctrl-C left under way
    double seconds = seconds_now() - start - paused;
    if (terminal) printf("\r\033[K");
    if (last_saved != t->step || !file_exists(checkpoint_path(c.out_dir, t->step))) save(t);
    if (last_sampled != t->step && !stop_requested) save_samples(t);
    t->metrics.close();
    print_summary(*t, first, seconds);
}

// ===========================================================================================================
//  9  FILES
// ===========================================================================================================

// ---- flags ------------------------------------------------------------------------------------------------

// A new sample of the default configuration is `flag.text` parsed; a stored one lies in int32 fields of a
// .bin header.
enum FlagKind {
    FLAG_INT,
    FLAG_UINT,
    FLAG_FLOAT,
    FLAG_BOOL,
    FLAG_LIST,
    FLAG_FLOAT_LIST,
    FLAG_CHOICE,
    FLAG_PATH,
    FLAG_OPTIONAL_PATH
};
enum FlagGroup { GROUP_FILES, GROUP_MODEL, GROUP_DIFFUSION, GROUP_TRAINING, GROUP_SAMPLING, GROUP_OTHER };
static const char* const GROUP_TITLES[] = {"Files", "Model", "Diffusion", "Training", "Sampling", "Other"};

// What may become of a flag that is typed together with --resume: a FIXED one must equal the checkpoint's
// value.
enum FlagResume { FREE, FIXED };

struct Flag {
    const char* name;
    FlagKind kind;
    FlagGroup group;
    FlagResume on_resume;
    int field;             // first int32 field of the .bin header that stores it, 0: not stored
    size_t offset;         // in Config
    const char* standard;  // the default, as it would be typed
    double least, most;    // range of a number or of a list's elements
    const char* choices;   // of a FLAG_CHOICE, separated by |
    const char* help;
};

#define AT(member) offsetof(Config, member)
static const Flag FLAGS[] = {
    {"preset", FLAG_PATH, GROUP_FILES, FREE, 0, AT(preset), "", 0, 0, 0,
     "a named set of defaults, listed below: tiny (for a CPU), small32, unet64 or large64"},
    {"data_file", FLAG_PATH, GROUP_FILES, FREE, 0, AT(data_file), "data/emoji.bin", 0, 0, 0,
     "training images, made by prepare_data.py"},
    {"val_file", FLAG_PATH, GROUP_FILES, FREE, 0, AT(val_file), "", 0, 0, 0,
     "validation images: their loss, with fixed noise, every --val_every steps"},
    {"model_weights", FLAG_PATH, GROUP_FILES, FIXED, 0, AT(model_weights), "", 0, 0, 0,
     "start from (or generate with) the weights of this .bin; its configuration comes with it"},
    {"out_dir", FLAG_PATH, GROUP_FILES, FREE, 0, AT(out_dir), "out", 0, 0, 0,
     "folder for checkpoints, samples, metrics.jsonl and config.txt"},
    {"resume", FLAG_OPTIONAL_PATH, GROUP_FILES, FREE, 0, AT(resume), "", 0, 0, 0,
     "continue the newest whole checkpoint of this folder (or of --out_dir where none is named)"},
    {"output_name", FLAG_PATH, GROUP_FILES, FREE, 0, AT(output_name), "samples.png", 0, 0, 0,
     "PNG grid that --generate writes"},
    {"output_dir", FLAG_PATH, GROUP_FILES, FREE, 0, AT(output_dir), "", 0, 0, 0,
     "folder into which --generate also writes each picture, as SEED.png"},

    {"image_size", FLAG_INT, GROUP_MODEL, FIXED, 16, AT(image_size), "64", 4, 1024, 0,
     "height and width in pixels"},
    {"num_channels", FLAG_INT, GROUP_MODEL, FIXED, 18, AT(num_channels), "64", 32, 1024, 0,
     "width of the first level, a multiple of 32"},
    {"channel_mult", FLAG_LIST, GROUP_MODEL, FIXED, 24, AT(channel_mult), "1,2,3,4", 1, 64, 0,
     "width of each level as a multiple of num_channels; each level halves the image"},
    {"num_res_blocks", FLAG_INT, GROUP_MODEL, FIXED, 19, AT(num_res_blocks), "2", 1, 16, 0,
     "residual blocks a level"},
    {"attention_resolutions", FLAG_LIST, GROUP_MODEL, FIXED, 32, AT(attention_resolutions), "16,8", 0, 1024,
     0, "image sizes at which residual blocks are followed by attention; 0: none (the middle always has it)"},
    {"num_head_channels", FLAG_INT, GROUP_MODEL, FIXED, 20, AT(num_head_channels), "32", 1, 1024, 0,
     "channels of an attention head"},
    {"norm_groups", FLAG_INT, GROUP_MODEL, FIXED, 21, AT(norm_groups), "32", 1, 1024, 0,
     "groups of a group norm; every level needs two channels a group or more"},
    {"max_period", FLAG_INT, GROUP_MODEL, FIXED, 22, AT(max_period), "10000", 2, 100000000, 0,
     "longest period of the timestep embedding"},

    {"diffusion_steps", FLAG_INT, GROUP_DIFFUSION, FIXED, 40, AT(diffusion_steps), "1000", 2, 100000, 0,
     "timesteps T of the noising chain"},
    {"noise_schedule", FLAG_CHOICE, GROUP_DIFFUSION, FIXED, 41, AT(noise_schedule), "linear", 0, 0,
     "linear|cosine", "how fast the chain adds noise"},
    {"predict", FLAG_CHOICE, GROUP_DIFFUSION, FIXED, 42, AT(predict), "eps", 0, 0, "eps|v|x0",
     "what the network predicts: the noise, the velocity v, or the image"},
    {"zero_terminal_snr", FLAG_BOOL, GROUP_DIFFUSION, FIXED, 90, AT(zero_terminal_snr), "0", 0, 1, 0,
     "rescale the schedule so that nothing of the image is left at the last timestep; not with eps"},

    {"batch_size", FLAG_INT, GROUP_TRAINING, FIXED, 48, AT(batch_size), "32", 1, 65536, 0, "images a step"},
    {"microbatch", FLAG_INT, GROUP_TRAINING, FREE, 72, AT(microbatch), "0", 0, 65536, 0,
     "images at a time: a batch's gradients add up over its parts, in less memory; 0: all at once"},
    {"steps", FLAG_INT, GROUP_TRAINING, FREE, 61, AT(steps), "20000", 0, 99999999, 0,
     "optimiser steps in all; 0 trains nothing, and saves the initial weights"},
    {"lr", FLAG_FLOAT, GROUP_TRAINING, FREE, 51, AT(lr), "1e-4", 0, 1e3, 0, "learning rate"},
    {"lr_schedule", FLAG_CHOICE, GROUP_TRAINING, FREE, 52, AT(lr_schedule), "constant", 0, 0,
     "constant|cosine|linear",
     "how it falls over the --steps of the first start; a later --steps does not bend it"},
    {"final_lr_fraction", FLAG_FLOAT, GROUP_TRAINING, FREE, 79, AT(final_lr_fraction), "0", 0, 1, 0,
     "part of --lr that cosine and linear end at"},
    {"warmup_steps", FLAG_INT, GROUP_TRAINING, FREE, 53, AT(warmup_steps), "0", 0, 1e9, 0,
     "steps over which the learning rate rises to --lr"},
    {"weight_decay", FLAG_FLOAT, GROUP_TRAINING, FREE, 55, AT(weight_decay), "0", 0, 1e3, 0,
     "decoupled, as in AdamW; of matrices and convolutions only, not of biases and norms"},
    {"beta1", FLAG_FLOAT, GROUP_TRAINING, FREE, 56, AT(beta1), "0.9", 0, 0.99999, 0, "AdamW's first moment"},
    {"beta2", FLAG_FLOAT, GROUP_TRAINING, FREE, 57, AT(beta2), "0.999", 0, 0.9999999, 0,
     "AdamW's second moment"},
    {"adam_eps", FLAG_FLOAT, GROUP_TRAINING, FREE, 58, AT(adam_eps), "1e-8", 1e-20, 1, 0, "AdamW's epsilon"},
    {"grad_clip", FLAG_FLOAT, GROUP_TRAINING, FREE, 78, AT(grad_clip), "0", 0, 1e9, 0,
     "longest gradient (norm over all parameters): a longer one is scaled down to it; 0: none is"},
    {"skip_outliers", FLAG_FLOAT, GROUP_TRAINING, FREE, 80, AT(skip_outliers), "0", 0, 1e9, 0,
     "leave out an update whose loss or norm is this many standard deviations above the last 128; 0: none"},
    {"ema_rate", FLAG_FLOAT_LIST, GROUP_TRAINING, FIXED, 59, AT(ema_rate), "0.999", 0, 0.9999999, 0,
     "running means of the weights, up to 4 rates; see --use_ema; 0: none"},
    {"min_snr_gamma", FLAG_FLOAT, GROUP_TRAINING, FIXED, 71, AT(min_snr_gamma), "0", 0, 1e6, 0,
     "weigh the loss by min-SNR: signal-to-noise ratios over this (5 is usual) count no more; 0: unweighted"},
    {"flip", FLAG_BOOL, GROUP_TRAINING, FIXED, 50, AT(flip), "0", 0, 1, 0,
     "mirror half of the images left to right"},
    {"offset_noise", FLAG_FLOAT, GROUP_TRAINING, FIXED, 91, AT(offset_noise), "0", 0, 10, 0,
     "add to the training noise this much of one normal a channel, for very dark and bright pictures"},
    {"seed", FLAG_UINT, GROUP_TRAINING, FIXED, 49, AT(seed), "0", 0, 4294967295.0, 0,
     "decides weights, order, noise; with --generate the first picture's seed"},
    {"log_every", FLAG_INT, GROUP_TRAINING, FREE, 62, AT(log_every), "50", 1, 1e9, 0,
     "steps between two log lines"},
    {"save_every", FLAG_INT, GROUP_TRAINING, FREE, 63, AT(save_every), "1000", 0, 1e9, 0,
     "steps between two checkpoints; 0: only at the end"},
    {"keep", FLAG_INT, GROUP_TRAINING, FREE, 64, AT(keep), "2", 1, 1e9, 0, "newest checkpoints to keep"},
    {"keep_every", FLAG_INT, GROUP_TRAINING, FREE, 106, AT(keep_every), "0", 0, 1e9, 0,
     "also keep every checkpoint whose step is a multiple of this, for ever; 0: none"},
    {"sample_every", FLAG_INT, GROUP_TRAINING, FREE, 65, AT(sample_every), "1000", 0, 1e9, 0,
     "steps between two sample grids; 0: only at the end"},
    {"val_every", FLAG_INT, GROUP_TRAINING, FREE, 66, AT(val_every), "1000", 1, 1e9, 0,
     "steps between two validation losses"},

    {"generate", FLAG_INT, GROUP_SAMPLING, FREE, 0, AT(generate), "0", 0, 1e6, 0,
     "draw this many pictures and exit, with --model_weights or the newest checkpoint"},
    {"seeds", FLAG_PATH, GROUP_SAMPLING, FREE, 0, AT(seeds), "", 0, 0, 0,
     "draw the pictures of these seeds, such as 0-63 or 3,7,10-12, and exit"},
    {"interpolate", FLAG_INT, GROUP_SAMPLING, FREE, 0, AT(interpolate), "0", 0, 1e6, 0,
     "draw this many pictures on the way from the first of two --seeds to the second"},
    {"strip", FLAG_INT, GROUP_SAMPLING, FREE, 0, AT(strip), "0", 0, 1000, 0,
     "--generate also writes OUTPUT_strip.png: a row a picture, this many steps from noise to picture"},
    {"num_samples", FLAG_INT, GROUP_SAMPLING, FREE, 67, AT(num_samples), "16", 0, 1e6, 0,
     "pictures of a sample grid while training; 0: no grids"},
    {"sampler", FLAG_CHOICE, GROUP_SAMPLING, FREE, 68, AT(sampler), "ddim", 0, 0, "ddim|ddpm|dpmpp|heun",
     "DDIM, DDPM (adds noise at every step), DPM-Solver++(2M) or Heun's (both second order)"},
    {"sample_steps", FLAG_INT, GROUP_SAMPLING, FREE, 69, AT(sample_steps), "0", 0, 100000, 0,
     "steps a picture; 0: ddim 50, ddpm all, dpmpp and heun 25. A step calls the network once, heun's twice"},
    {"eta", FLAG_FLOAT, GROUP_SAMPLING, FREE, 92, AT(eta), "0", 0, 1, 0,
     "how much of ddpm's noise ddim adds at every step"},
    {"threshold", FLAG_CHOICE, GROUP_SAMPLING, FREE, 93, AT(threshold), "clamp", 0, 0, "clamp|dynamic|none",
     "how each step keeps its picture in [-1, 1]; dynamic: scaled by the 99.5th percentile"},
    {"use_ema", FLAG_INT, GROUP_SAMPLING, FREE, 70, AT(use_ema), "1", 0, 4, 0,
     "sample and validate with this one of the running means where there is one; 0: the raw weights"},

    {"config", FLAG_PATH, GROUP_OTHER, FREE, 0, AT(config), "", 0, 0, 0,
     "take flags from this file, a line each: NAME = VALUE; flags typed come over it"},
    {"print_config", FLAG_BOOL, GROUP_OTHER, FREE, 0, AT(print_config), "0", 0, 1, 0,
     "print every flag's value as a file for --config, and exit"},
    {"dry_run", FLAG_BOOL, GROUP_OTHER, FREE, 0, AT(dry_run), "0", 0, 1, 0,
     "print the plan, the memory it needs and the time a step takes here, and exit; needs no data"},
    {"help", FLAG_BOOL, GROUP_OTHER, FREE, 0, AT(help), "0", 0, 1, 0, "print this text, and exit"},
};
enum {
    NUM_FLAGS = sizeof FLAGS / sizeof FLAGS[0],
    FIELD_LR_STEPS = 54,     // the schedule's length has no flag
    FIELD_MORE_FLOATS = 75,  // a FLAG_FLOAT_LIST's second number and on, which do not fit beside its first
};

// A preset is a text of flags that come before those of --config and those the user types.
struct Preset {
    const char *name, *flags;
};
static const Preset PRESETS[] = {
    // 32 groups would leave one channel a group at this width: see check_config
    {"tiny",
     "--data_file data/faces.bin --image_size 32 --num_channels 32 --channel_mult 1,2,2 "
     "--num_res_blocks 1 --attention_resolutions 8 --norm_groups 8 --predict v --noise_schedule cosine "
     "--batch_size 8 --lr 1e-3 --lr_schedule cosine --warmup_steps 100 --ema_rate 0.995 --steps 4000 "
     "--save_every 1000 --sample_every 1000 --val_every 1000"},
    {"small32",
     "--image_size 32 --num_channels 64 --channel_mult 1,2,2 --num_res_blocks 2 "
     "--attention_resolutions 16,8 --predict v --noise_schedule cosine --batch_size 64 --lr 3e-4 "
     "--lr_schedule cosine --warmup_steps 500 --steps 20000"},
    {"unet64", ""},
    {"large64",
     "--image_size 64 --num_channels 128 --channel_mult 1,2,3,4 --num_res_blocks 3 "
     "--attention_resolutions 32,16,8 --num_head_channels 64 --noise_schedule cosine --batch_size 64 "
     "--lr 1e-4 --warmup_steps 1000 --ema_rate 0.9999 --steps 200000 --save_every 5000 "
     "--sample_every 5000 --val_every 5000"},
};

static const Flag* find_flag(const std::string& name) {
    for (const Flag& flag : FLAGS)
        if (name == flag.name) return &flag;
    return nullptr;
}

static bool is_real(const Flag& flag) { return flag.kind == FLAG_FLOAT || flag.kind == FLAG_FLOAT_LIST; }

// Whether the flag takes this number, typed or stored. A float below FLT_MIN is 0 or has lost digits.
static bool in_range(const Flag& flag, double number) {
    if (!(is_real(flag) && fabs(number) <= FLT_MAX)) return number >= flag.least && number <= flag.most;
    float value = (float)number;
    return value >= (float)flag.least && value <= (float)flag.most &&
           (number == 0 || fabsf(value) >= FLT_MIN);
}

// The number in `value`, which must be all of it and within [least, most].
static double parse_number(const Flag& flag, const std::string& value) {
    char* end;
    double number = strtod(value.c_str(), &end);
    bool real = is_real(flag), whole = real || number == floor(number);
    if (value.empty() || *end || !std::isfinite(number) || !whole)
        fail_usage("--%s needs %s, not '%s'", flag.name, real ? "a number" : "a whole number", value.c_str());
    if (real && number != 0 && fabs(number) < FLT_MIN)
        fail_usage("--%s %s is too close to 0 for a float; the least above it is 1.2e-38", flag.name,
                   value.c_str());
    if (!in_range(flag, number))
        fail_usage("--%s must lie between %g and %.10g, not %s", flag.name, flag.least, flag.most,
                   value.c_str());
    return number;
}

// How many numbers of 4 bytes it has; a path aside.
static int flag_length(const Flag& flag) {
    return flag.kind == FLAG_LIST ? MAX_LEVELS : flag.kind == FLAG_FLOAT_LIST ? MAX_EMAS : 1;
}

static void set_flag(Config* config, const Flag& flag, const std::string& value) {
    void* target = (char*)config + flag.offset;
    switch (flag.kind) {
        case FLAG_INT: *(int*)target = (int)parse_number(flag, value); break;
        case FLAG_UINT: *(unsigned*)target = (unsigned)parse_number(flag, value); break;
        case FLAG_FLOAT: *(float*)target = (float)parse_number(flag, value); break;
        case FLAG_BOOL:
            if (value == "1" || value == "true" || value == "True")
                *(int*)target = 1;
            else if (value == "0" || value == "false" || value == "False")
                *(int*)target = 0;
            else
                fail_usage("--%s is 0 or 1, not '%s'", flag.name, value.c_str());
            break;
        case FLAG_LIST:
        case FLAG_FLOAT_LIST: {
            int count = 0, most = flag_length(flag);
            memset(target, 0, most * sizeof(int));
            for (size_t start = 0; start <= value.size();) {
                size_t comma = std::min(value.find(',', start), value.size());
                if (count == most)
                    fail_usage("--%s takes at most %d numbers: '%s'", flag.name, most, value.c_str());
                double number = parse_number(flag, value.substr(start, comma - start));
                if (flag.kind == FLAG_LIST && number == 0 && value.find(',') != std::string::npos)
                    fail_usage("--%s %s has a 0 among its numbers; 0 stands alone, for none", flag.name,
                               value.c_str());
                if (flag.kind == FLAG_LIST)
                    ((int*)target)[count++] = (int)number;
                else
                    ((float*)target)[count++] = (float)number;
                start = comma + 1;
            }
            break;
        }
        case FLAG_CHOICE: {
            std::string choices = flag.choices;
            int index = 0;
            for (size_t start = 0; start <= choices.size(); index++) {
                size_t bar = std::min(choices.find('|', start), choices.size());
                if (choices.substr(start, bar - start) == value) {
                    *(int*)target = index;
                    return;
                }
                start = bar + 1;
            }
            fail_usage("--%s is one of %s, not '%s'", flag.name, flag.choices, value.c_str());
        }
        case FLAG_PATH:
        case FLAG_OPTIONAL_PATH: {
            size_t room = flag.offset == AT(preset) ? sizeof config->preset : (size_t)MAX_PATH_LENGTH;
            if (value.size() >= room) fail_usage("--%s is longer than %zu characters", flag.name, room - 1);
            if (value.empty() && *flag.standard) fail_usage("--%s needs a value, not ''", flag.name);
            if (value.find_first_of("\r\n") != std::string::npos)
                fail_usage("--%s must not hold a line break", flag.name);
            strcpy((char*)target, value.c_str());
            break;
        }
    }
}

// The value as it would be typed.
static std::string flag_text(const Config& config, const Flag& flag) {
    const void* source = (const char*)&config + flag.offset;
    switch (flag.kind) {
        case FLAG_INT:
        case FLAG_BOOL: return text("%d", *(const int*)source);
        case FLAG_UINT: return text("%u", *(const unsigned*)source);
        case FLAG_FLOAT: return float_text(*(const float*)source);
        case FLAG_LIST: {
            std::string joined;
            for (int i = 0; i < MAX_LEVELS && ((const int*)source)[i]; i++)
                joined += text("%s%d", i ? "," : "", ((const int*)source)[i]);
            return joined.empty() ? "0" : joined;
        }
        case FLAG_FLOAT_LIST: {
            std::string joined;
            for (int i = 0; i < MAX_EMAS && ((const float*)source)[i] > 0; i++)
                joined += (i ? "," : "") + float_text(((const float*)source)[i]);
            return joined.empty() ? "0" : joined;
        }
        case FLAG_CHOICE: {
            const char* choice = flag.choices;
            for (int i = *(const int*)source; i > 0; i--) choice = strchr(choice, '|') + 1;
            return std::string(choice, strcspn(choice, "|"));
        }
        case FLAG_PATH:
        case FLAG_OPTIONAL_PATH: return (const char*)source;
    }
    return "";
}

static Config default_config() {
    Config config;
    memset(&config, 0, sizeof config);
    for (const Flag& flag : FLAGS) set_flag(&config, flag, flag.standard);
    return config;
}

// ---- checksums --------------------------------------------------------------------------------------------

// CRC-32 as zlib computes it, eight bytes at a time; continue a sum by passing it in.
struct Crc32Table {
    uint32_t row[8][256];
    Crc32Table() {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int bit = 0; bit < 8; bit++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
            row[0][i] = c;
        }
        for (int k = 1; k < 8; k++)
            for (int i = 0; i < 256; i++) row[k][i] = row[0][row[k - 1][i] & 255] ^ (row[k - 1][i] >> 8);
    }
};
static uint32_t crc32(const void* data, size_t bytes, uint32_t crc = 0) {
    static const Crc32Table table;
    const uint8_t* p = (const uint8_t*)data;
    crc = ~crc;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint32_t low, high;
        memcpy(&low, p, 4), memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = table.row[7][low & 255] ^ table.row[6][low >> 8 & 255] ^ table.row[5][low >> 16 & 255] ^
              table.row[4][low >> 24] ^ table.row[3][high & 255] ^ table.row[2][high >> 8 & 255] ^
              table.row[1][high >> 16 & 255] ^ table.row[0][high >> 24];
    }
    while (bytes--) crc = table.row[0][(crc ^ *p++) & 255] ^ (crc >> 8);
    return ~crc;
}

// ---- files ------------------------------------------------------------------------------------------------

enum { HEADER_INTS = 256, HEADER_BYTES = 1024 };

// An open file for reading, closed when it leaves its scope; every read is checked.
struct Reader {
    FILE* file;
    std::string path;
    size_t size;
    explicit Reader(const std::string& name) : file(fopen(name.c_str(), "rb")), path(name), size(0) {
        struct stat info;
        if (!file) fail("can't open %s: %s", name.c_str(), strerror(errno));
        if (fstat(fileno(file), &info) || !S_ISREG(info.st_mode)) {
            fclose(file);
            fail("%s is not a regular file", name.c_str());
        }
        size = (size_t)info.st_size;
    }
    Reader(const Reader&) = delete;
    ~Reader() { fclose(file); }
    void read(void* to, size_t bytes) {
        if (bytes && fread(to, 1, bytes, file) != bytes)
            fail("could not read %s: %s", path.c_str(), ferror(file) ? strerror(errno) : "it is truncated");
    }
    void seek(size_t offset) {
        if (fseeko(file, (off_t)offset, SEEK_SET))
            fail("could not read %s: %s", path.c_str(), strerror(errno));
    }
};

// The checksum of a file, in the order that lets a writer stream: data first, then the header with its
// checksum field 0.
static uint32_t file_checksum(Reader* in, const int32_t header[HEADER_INTS], int checksum_field) {
    std::vector<char> buffer(std::min(in->size, (size_t)1 << 20));
    uint32_t crc = 0;
    in->seek(HEADER_BYTES);
    for (size_t left = in->size - HEADER_BYTES; left;) {
        size_t bytes = std::min(left, buffer.size());
        in->read(buffer.data(), bytes);
        crc = crc32(buffer.data(), bytes, crc);
        left -= bytes;
    }
    int32_t copy[HEADER_INTS];
    memcpy(copy, header, sizeof copy);
    copy[checksum_field] = 0;
    return crc32(copy, sizeof copy, crc);
}

// A path as a word for the shell.
static std::string shell_word(const std::string& path) {
    bool plain = !path.empty();
    std::string quoted;
    for (char c : path) {
        plain &= isalnum((unsigned char)c) || strchr("/._-+,=:@%", c);
        quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    }
    return plain ? path : "'" + quoted + "'";
}

static bool file_exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// The text of a file, "" where there is none; what is there and can't be read is refused.
static std::string read_text(const std::string& path) {
    struct stat info;
    if (stat(path.c_str(), &info) && errno == ENOENT) return "";
    Reader in(path);
    std::string contents(in.size, '\0');
    in.read(&contents[0], in.size);
    return contents;
}

// Its lines, with their line feeds; what follows the last one was cut short.
static std::vector<std::string> whole_lines(const std::string& contents) {
    std::vector<std::string> lines;
    for (size_t start = 0, end; (end = contents.find('\n', start)) != std::string::npos; start = end + 1)
        lines.push_back(contents.substr(start, end + 1 - start));
    return lines;
}

// The names in a folder; false, with errno, where they can't all be had.
static bool list_folder(const std::string& path, std::vector<std::string>* names) {
    DIR* dir = opendir(path.c_str());
    if (!dir) return false;
    errno = 0;
    while (dirent* entry = readdir(dir)) names->push_back(entry->d_name);
    int error = errno;
    closedir(dir);
    errno = error;
    return !error;
}

static void make_folder(const std::string& path) {
    for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
        std::string part = path.substr(0, slash);
        if (mkdir(part.c_str(), 0777) && errno != EEXIST)
            fail("can't make the folder %s: %s", part.c_str(), strerror(errno));
        if (slash == std::string::npos) break;
    }
    if (access(path.c_str(), W_OK)) fail("can't write into the folder %s: %s", path.c_str(), strerror(errno));
}

// Removes the temporary files that killed processes left in a folder. A live Writer holds a lock on its own.
static void remove_stale_temporaries(const std::string& folder) {
    std::vector<std::string> names;
    list_folder(folder, &names);
    for (const std::string& name : names) {
        int end = 0;
        size_t mark = name.rfind(".unet-");
        if (mark == std::string::npos) continue;
        sscanf(&name[mark], ".unet-%*d-%*d.tmp%n", &end);
        if (!end || name[mark + end]) continue;
        int file = open((folder + name).c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (file < 0) continue;
        if (!flock(file, LOCK_EX | LOCK_NB)) unlink((folder + name).c_str());
        close(file);
    }
}

// A file that appears under its name only when it is whole: written beside it, flushed to the disk, renamed.
struct Writer {
    std::string path, folder, temporary;
    FILE* file = nullptr;
    uint32_t crc = 0;
    explicit Writer(const std::string& name) : path(name) {
        struct stat info;
        char* target = realpath(name.c_str(), nullptr);  // behind a link, where there is something
        if (target) path = target;
        free(target);
        if (!stat(path.c_str(), &info) && !S_ISREG(info.st_mode))
            fail("can't write %s: it is not a regular file", name.c_str());
        size_t slash = path.rfind('/');
        folder = slash == std::string::npos ? "./" : path.substr(0, slash + 1);
        static std::set<std::string> tidied;
        if (tidied.insert(folder).second) remove_stale_temporaries(folder);
        open_temporary();
        if (!file) fail("can't write %s: %s", name.c_str(), strerror(errno));
    }
    Writer(const Writer&) = delete;
    ~Writer() {
        if (file) give_up();
    }
    // Under a name that nobody has used, and locked; under another where it was removed as stale before that.
    void open_temporary() {
        static int number = 0;
        struct stat info;
        int descriptor;
        do {
            temporary = path + text(".unet-%d-%d.tmp", (int)getpid(), ++number);
            descriptor = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
            if (descriptor >= 0 && !flock(descriptor, LOCK_EX) && !fstat(descriptor, &info) && !info.st_nlink)
                close(descriptor), descriptor = -1, errno = EEXIST;
        } while (descriptor < 0 && errno == EEXIST);
        if (descriptor >= 0 && !(file = fdopen(descriptor, "wb")))
            unlink(temporary.c_str()), close(descriptor), errno = ENOMEM;
    }
    void give_up() {
        fclose(file);
        file = nullptr;
        unlink(temporary.c_str());
    }
    void check(bool ok) {
        if (ok) return;
        std::string why = strerror(errno);
        give_up();
        fail("could not write %s: %s; what was there before is untouched", path.c_str(), why.c_str());
    }
    void write(const void* data, size_t bytes) {
        check(fwrite(data, 1, bytes, file) == bytes);
        crc = crc32(data, bytes, crc);
    }
    void rewind_to_header(const void* header, size_t bytes) {
        check(fseeko(file, 0, SEEK_SET) == 0 && fwrite(header, 1, bytes, file) == bytes);
    }
    void commit() {
        check(fflush(file) == 0 && fsync(fileno(file)) == 0);
        check(rename(temporary.c_str(), path.c_str()) == 0);
        fclose(file);  // and with it goes the lock
        file = nullptr;
        int directory = open(folder.c_str(), O_RDONLY | O_CLOEXEC);
        if (directory >= 0) {
            fsync(directory);  // the new name survives a power cut too
            close(directory);
        }
    }
};

// ---- images -----------------------------------------------------------------------------------------------

enum { IMAGES_MAGIC = 20240620, IMAGES_VERSION = 1, IMAGES_UINT8 = 1, IMAGES_CHECKSUM_FIELD = 9 };

// The command that makes images of a size. It never names a file that is there.
static std::string prepare_command(std::string path, int image_size) {
    while (file_exists(path)) {
        bool bin = path.size() > 4 && path.compare(path.size() - 4, 4, ".bin") == 0;
        path = text("%s_%d.bin", path.substr(0, path.size() - (bin ? 4 : 0)).c_str(), image_size);
    }
    return text("python prepare_data.py --data_dir FOLDER --image_size %d --output_name %s", image_size,
                shell_word(path).c_str());
}

// Refuses what the host's memory can't hold.
static void check_host_memory(double bytes, const std::string& what, const char* instead) {
    double available = (double)host_memory_available();
    if (available && bytes > available)
        fail("%s take %s of memory and %s are free; %s", what.c_str(), human_bytes(bytes).c_str(),
             human_bytes(available).c_str(), instead);
}

// The format is described in FORMATS.md. A file `factor` times as large as image_size is averaged over factor
// x factor pixels; any other size is refused with the command that mends it. image_size 0: as it is in the
// file.
static Dataset read_images(const std::string& path, int image_size) {
    Reader in(path);
    int32_t header[HEADER_INTS];
    if (in.size < HEADER_BYTES)
        fail("%s is no image file: it is shorter than a header (prepare_data.py makes one)", path.c_str());
    in.read(header, sizeof header);
    if (header[0] != IMAGES_MAGIC)
        fail("%s is no image file: its first number is %d, not %d (prepare_data.py makes one)", path.c_str(),
             header[0], IMAGES_MAGIC);
    int32_t N = header[1], C = header[2], H = header[3], W = header[4], version = header[5],
            classes = header[7], names = header[8];
    if (version != 0 && version != IMAGES_VERSION)
        fail("%s has version %d of the image format; this program reads versions 0 and %d", path.c_str(),
             version, IMAGES_VERSION);
    if (version && header[6] != IMAGES_UINT8)
        fail("%s stores elements of type %d; this program reads type %d (uint8)", path.c_str(), header[6],
             IMAGES_UINT8);
    if (N < 1 || H < 1 || W < 1 || H > 65536 || W > 65536)
        fail("%s is damaged: its header says %d images of %d x %d", path.c_str(), N, H, W);
    if (C != IMAGE_CHANNELS)
        fail("%s has %d channels; this program trains on RGB images (prepare_data.py makes them)",
             path.c_str(), C);
    if (version && (classes < 0 || names < 0))
        fail("%s is damaged: its header says %d classes in %d bytes", path.c_str(), classes, names);
    // 65536^2 pixels * 3 * 2^31 images fit 128 bits only; a double is exact enough to refuse what no disk
    // holds
    double claimed =
        (double)N * C * H * W * (version ? 1 : 4) + (version && classes ? 4.0 * N + names : 0) + HEADER_BYTES;
    if (claimed != (double)in.size)
        fail(
            "%s is damaged: its header asks for %.0f bytes and it has %zu; make it again with "
            "prepare_data.py",
            path.c_str(), claimed, in.size);
    if (version &&
        file_checksum(&in, header, IMAGES_CHECKSUM_FIELD) != (uint32_t)header[IMAGES_CHECKSUM_FIELD])
        fail("%s is damaged: its checksum does not match; make it again with prepare_data.py", path.c_str());
    int factor = image_size ? H / image_size : 1, wanted = image_size ? image_size : H;
    if (H != W || (image_size && (H % image_size || factor < 1)))
        fail(
            "%s holds %d x %d images and the network's are %d x %d (--image_size); make a file that fits: %s",
            path.c_str(), H, W, wanted, wanted, prepare_command(path, wanted).c_str());
    check_host_memory((double)in.size + (factor > 1 ? 4.0 * N * C * image_size * image_size : 0),
                      "the images of " + path, "use fewer or smaller ones");

    Dataset data;
    data.count = N, data.size = H / factor;
    size_t count = (size_t)N * C * H * W;
    in.seek(HEADER_BYTES);
    if (version) {
        data.bytes.resize(count);
        in.read(data.bytes.data(), count);
    } else {
        data.floats.resize(count);
        in.read(data.floats.data(), count * sizeof(float));
        for (float value : data.floats)
            if (!(value >= -1.001f && value <= 1.001f))
                fail("%s is damaged: it holds a pixel of %g, outside [-1, 1]", path.c_str(), (double)value);
    }
    if (factor == 1) return data;
    std::vector<float> smaller((size_t)N * C * data.size * data.size);
    float divisor = (version ? 127.5f : 1.0f) * (float)(factor * factor);
    for (size_t plane = 0, to = 0; plane < (size_t)N * C; plane++)
        for (int y = 0; y < data.size; y++)
            for (int x = 0; x < data.size; x++, to++) {
                float sum = 0;
                for (int dy = 0; dy < factor; dy++)
                    for (int dx = 0; dx < factor; dx++) {
                        size_t from = (plane * H + (size_t)y * factor + dy) * W + (size_t)x * factor + dx;
                        sum += version ? (float)data.bytes[from] : data.floats[from];
                    }
                smaller[to] = version ? sum / divisor - 1.0f : sum / divisor;
            }
    data.bytes = std::vector<uint8_t>();
    data.floats.swap(smaller);
    return data;
}

// Image `index` as floats in [-1, 1], (3, H, W).
static void copy_image(float* to, const Dataset& data, int index) {
    size_t elements = (size_t)IMAGE_CHANNELS * data.size * data.size, from = index * elements;
    for (size_t e = 0; e < elements; e++)
        to[e] = data.bytes.empty() ? data.floats[from + e] : (float)data.bytes[from + e] / 127.5f - 1.0f;
}

// ---- weights and checkpoints ------------------------------------------------------------------------------

enum { UNET_MAGIC = 0x54454E55, UNET_VERSION = 1, OLD_WEIGHTS_MAGIC = 12345678, RNG_RECORD_BYTES = 48 };
enum {
    FIELD_VERSION = 1,
    FIELD_CHECKSUM,
    FIELD_SECTIONS,
    FIELD_STEP,
    FIELD_PARAMETERS,
    FIELD_TENSORS,
    FIELD_CHANNELS = 17,
    FIELD_SMOOTHED = 60,
    FIELD_SECTION_TABLE = 128,
    SECTION_INTS = 8,
    SECTION_NAME_BYTES = 24,
    MAX_SECTIONS = 16
};

struct Section {
    std::string name;
    size_t offset, bytes;
};

// What a weights file says of itself, everything checked against its length; the sections are read later.
struct WeightsFile {
    std::string path;
    Config config;  // the default one with what the file stores
    long step = 0;
    float smoothed = 0;
    History history = History();
    std::vector<Section> sections;
    const Section* find(const char* name) const {
        for (const Section& s : sections)
            if (s.name == name) return &s;
        return nullptr;
    }
};

static const char* const EMA_SECTIONS[MAX_EMAS] = {"ema", "ema_2", "ema_3", "ema_4"};
static const char* const TEXT_SECTIONS[] = {"data_file", "val_file", "model_weights"};  // flags' names

// The header's field of a flag's i-th number.
static int field_of(const Flag& flag, int i) {
    return flag.kind == FLAG_FLOAT_LIST && i ? FIELD_MORE_FLOATS + i - 1 : flag.field + i;
}

// Flags to header fields and back.
static void flags_to_fields(int32_t* header, const Config& config) {
    for (const Flag& flag : FLAGS) {
        for (int i = 0; flag.field && i < flag_length(flag); i++)
            memcpy(header + field_of(flag, i), (const int*)((const char*)&config + flag.offset) + i,
                   sizeof(int));
    }
    header[FIELD_LR_STEPS] = config.lr_steps;
}
static void fields_to_flags(Config* config, const int32_t* header, const std::string& path) {
    for (const Flag& flag : FLAGS) {
        if (!flag.field) continue;
        int32_t field[MAX_LEVELS];
        int length = flag_length(flag), choices = 1;
        for (const char* c = flag.choices; flag.kind == FLAG_CHOICE && *c; c++) choices += *c == '|';
        bool good = true;
        for (int i = 0; i < length; i++) {
            float real;
            field[i] = header[field_of(flag, i)];
            memcpy(&real, field + i, sizeof real);
            double value = is_real(flag)            ? (double)real
                           : flag.kind == FLAG_UINT ? (double)(uint32_t)field[i]
                                                    : (double)field[i];
            if (flag.kind == FLAG_CHOICE)
                good &= value >= 0 && value < choices;
            else
                good &= in_range(flag, value) || (flag.kind == FLAG_LIST && i && value == 0);
        }
        if (!good) fail("%s is damaged: its %s is out of range", path.c_str(), flag.name);
        memcpy((char*)config + flag.offset, field, length * sizeof(int));
    }
    config->lr_steps = std::max(0, header[FIELD_LR_STEPS]);
}

// check_config of what a file stores.
static void check_stored(const WeightsFile& file) {
    std::string why = failure_of([&] { check_config(file.config); });
    if (!why.empty()) fail("%s holds a configuration that can't work: %s", file.path.c_str(), why.c_str());
}

// The header of a .bin of the first generation of this format (PyTorch order, fp32, its own fixed
// architecture).
static void open_old_weights(WeightsFile* file, const int32_t* header, size_t size) {
    const char* path = file->path.c_str();
    int B = header[1], C_in = header[2], base = header[3], C_out = header[4], H = header[5], W = header[6],
        period = header[7];
    bool has_adamw = header[8] != 0, has_rng = header[9] != 0;
    if (C_in != IMAGE_CHANNELS || C_out != IMAGE_CHANNELS || H != W)
        fail(
            "%s is a model of %d x %d images with %d channels in and %d out; this program trains square RGB "
            "images",
            path, H, W, C_in, C_out);
    if (B < 1 || B > 65536 || base < 32 || base > 1024 || H < 8 || H > 1024 || period < 2)
        fail("%s is damaged: its header says batch %d, width %d, size %d, max_period %d", path, B, base, H,
             period);
    Config* c = &file->config;
    c->num_channels = base, c->image_size = H, c->max_period = period;
    c->attention_resolutions[0] = H / 4, c->attention_resolutions[1] = H / 8, c->attention_resolutions[2] = 0;
    c->batch_size = B;
    check_stored(*file);
    size_t bytes = make_plan(*c, 1, false).num_parameters * sizeof(float);
    size_t rng = has_rng ? (size_t)B * C_in * H * W * RNG_RECORD_BYTES : 0,
           expected = HEADER_BYTES + bytes * (has_adamw ? 3 : 1) + rng;
    if (size != expected)
        fail("%s is damaged: its header asks for %zu bytes and it has %zu", path, expected, size);
    file->sections.push_back({"weights", HEADER_BYTES, bytes});
}

static WeightsFile open_weights(const std::string& path) {
    Reader in(path);
    WeightsFile file;
    file.path = path, file.config = default_config();
    int32_t header[HEADER_INTS];
    if (in.size < HEADER_BYTES) fail("%s is no weights file: it is shorter than a header", path.c_str());
    in.read(header, sizeof header);
    if (header[0] == OLD_WEIGHTS_MAGIC) {
        open_old_weights(&file, header, in.size);
        return file;
    }
    if (header[0] == IMAGES_MAGIC)
        fail("%s holds images; weights were expected (images go to --data_file)", path.c_str());
    if (header[0] != UNET_MAGIC)
        fail("%s is no weights file (of a .pt or .safetensors, python generate.py --import makes one)",
             path.c_str());
    if (header[FIELD_VERSION] != UNET_VERSION)
        fail("%s has version %d of the weights format; this program reads version %d", path.c_str(),
             header[FIELD_VERSION], UNET_VERSION);
    int count = header[FIELD_SECTIONS];
    if (count < 1 || count > MAX_SECTIONS)
        fail("%s is damaged: its header says %d sections", path.c_str(), count);
    size_t offset = HEADER_BYTES;
    for (int i = 0; i < count; i++) {
        const int32_t* entry = header + FIELD_SECTION_TABLE + i * SECTION_INTS;
        char name[SECTION_NAME_BYTES + 1] = {0};
        uint64_t bytes;
        memcpy(name, entry, SECTION_NAME_BYTES), memcpy(&bytes, entry + SECTION_NAME_BYTES / 4, sizeof bytes);
        if (bytes > in.size - offset)
            fail("%s is damaged: it ends inside its section %d", path.c_str(), i + 1);
        if (file.find(name)) fail("%s is damaged: two sections have the same name", path.c_str());
        file.sections.push_back({name, offset, (size_t)bytes});
        offset += bytes;
    }
    if (offset != in.size)
        fail("%s is damaged: its sections end at byte %zu and it has %zu", path.c_str(), offset, in.size);
    if (file_checksum(&in, header, FIELD_CHECKSUM) != (uint32_t)header[FIELD_CHECKSUM])
        fail("%s is damaged: its checksum does not match", path.c_str());
    if (header[FIELD_CHANNELS] != IMAGE_CHANNELS)
        fail("%s is a model of images with %d channels; this program trains RGB images", path.c_str(),
             header[FIELD_CHANNELS]);
    fields_to_flags(&file.config, header, path);
    file.step = header[FIELD_STEP];
    memcpy(&file.smoothed, header + FIELD_SMOOTHED, sizeof file.smoothed);
    if (!std::isfinite(file.smoothed)) fail("%s is damaged: its loss is no number", path.c_str());
    check_stored(file);
    size_t parameters = make_plan(file.config, 1, false).num_parameters;
    if (file.step < 0 || header[FIELD_PARAMETERS] != (int64_t)parameters)
        fail("%s is damaged: it says %d parameters and step %ld; its configuration has %zu parameters",
             path.c_str(), header[FIELD_PARAMETERS], file.step, parameters);
    if (!file.find("weights")) fail("%s holds no weights", path.c_str());
    for (const char* name : {"weights", "ema", "ema_2", "ema_3", "ema_4", "adam_m", "adam_v"})
        if (file.find(name) && file.find(name)->bytes != parameters * sizeof(float))
            fail("%s is damaged: its section %s has the wrong length", path.c_str(), name);
    if (const Section* s = file.find("state")) {
        History* h = &file.history;
        bool sound = s->bytes == sizeof *h;
        in.seek(s->offset);
        if (sound) in.read(h, sizeof *h);
        sound &= h->skipped >= 0 && h->seen >= 0 && (long)h->skipped + h->seen <= file.step;
        for (int i = 0; i < WINDOW; i++)
            sound &= fabsf(h->losses[i]) <= FLT_MAX && fabsf(h->norms[i]) <= FLT_MAX;
        if (!sound) fail("%s is damaged: its section state makes no sense", path.c_str());
    }
    for (const char* name : TEXT_SECTIONS) {
        const Section* s = file.find(name);
        if (s && s->bytes) {
            if (s->bytes >= MAX_PATH_LENGTH)
                fail("%s is damaged: its section %s is too long", path.c_str(), name);
            std::string value(s->bytes, '\0');
            in.seek(s->offset);
            in.read(&value[0], s->bytes);
            if (value.find_first_of("\r\n", 0, 3) != std::string::npos)  // 3: also the 0
                fail("%s is damaged: its section %s names no file", path.c_str(), name);
            set_flag(&file.config, *find_flag(name), value);
        }
    }
    return file;
}

static bool all_finite(const float* values, size_t n) {
    bool finite = true;  // without a way out of the loop, which is vector code then
    for (size_t i = 0; i < n; i++) finite &= fabsf(values[i]) <= FLT_MAX;
    return finite;
}

// One section of parameters, from a file's order to memory's. `to` (num_floats) is on the device.
static void read_parameters(float* to, const WeightsFile& file, const char* section, const Plan& plan) {
    Reader in(file.path);
    std::vector<float> stored, reordered;
    in.seek(file.find(section)->offset);
    for (const Tensor& t : plan.tensors) {
        stored.resize(t.count), reordered.resize(t.size);
        in.read(stored.data(), t.count * sizeof(float));
        if (!all_finite(stored.data(), t.count))
            fail("%s holds NaN or infinity in %s, section %s: its training went wrong; use an older one",
                 file.path.c_str(), t.name, section);
        reorder(reordered.data(), stored.data(), t, true);
        backend_upload(to + t.offset, reordered.data(), t.size * sizeof(float));
    }
}

static void write_parameters(Writer* out, const float* from, const Plan& plan) {
    std::vector<float> held, reordered;
    for (const Tensor& t : plan.tensors) {
        held.resize(t.size), reordered.resize(t.count);
        backend_download(held.data(), from + t.offset, t.size * sizeof(float));
        if (!all_finite(held.data(), t.size)) {
            out->give_up();
            fail(
                "%s became NaN or infinite, so that %s was not written; resume from an older checkpoint, or "
                "start again, with a lower --lr",
                t.name, out->path.c_str());
        }
        reorder(reordered.data(), held.data(), t, false);
        out->write(reordered.data(), t.count * sizeof(float));
    }
}

// Everything that sampling or resuming needs, under `path`, whole or not at all.
static void write_checkpoint(const std::string& path, const Model& m, long step, float smoothed,
                             const History& history) {
    const Config& c = m.config;
    int32_t header[HEADER_INTS] = {UNET_MAGIC, UNET_VERSION};
    header[FIELD_STEP] = (int32_t)step;
    header[FIELD_PARAMETERS] = (int32_t)m.plan.num_parameters,
    header[FIELD_TENSORS] = (int32_t)m.plan.tensors.size();
    header[FIELD_CHANNELS] = IMAGE_CHANNELS;
    memcpy(header + FIELD_SMOOTHED, &smoothed, sizeof smoothed);
    flags_to_fields(header, c);
    const struct {
        const char* name;
        const float* parameters;
    } arrays[] = {{"weights", m.master}, {"ema", m.ema[0]},    {"ema_2", m.ema[1]}, {"ema_3", m.ema[2]},
                  {"ema_4", m.ema[3]},   {"adam_m", m.adam_m}, {"adam_v", m.adam_v}};
    auto declare = [&](const char* name, uint64_t bytes) {
        int32_t* entry = header + FIELD_SECTION_TABLE + header[FIELD_SECTIONS]++ * SECTION_INTS;
        strncpy((char*)entry, name, SECTION_NAME_BYTES - 1);
        memcpy(entry + SECTION_NAME_BYTES / 4, &bytes, sizeof bytes);
    };
    for (auto& a : arrays)
        if (a.parameters) declare(a.name, m.plan.num_parameters * sizeof(float));
    if (m.adam_m) declare("state", sizeof history);
    for (const char* name : TEXT_SECTIONS)
        if (size_t length = flag_text(c, *find_flag(name)).size()) declare(name, length);

    Writer out(path);
    out.rewind_to_header(header, sizeof header);
    for (auto& a : arrays)
        if (a.parameters) write_parameters(&out, a.parameters, m.plan);
    if (m.adam_m) out.write(&history, sizeof history);
    for (const char* name : TEXT_SECTIONS) {
        std::string value = flag_text(c, *find_flag(name));
        out.write(value.data(), value.size());
    }
    header[FIELD_CHECKSUM] = (int32_t)crc32(header, sizeof header, out.crc);
    out.rewind_to_header(header, sizeof header);
    out.commit();
}

static std::string checkpoint_path(const std::string& folder, long step) {
    return text("%s/checkpoint_%08ld.bin", folder.c_str(), step);
}

// Steps of the checkpoints in a folder, newest first, whole or not.
static std::vector<long> list_checkpoints(const std::string& folder) {
    std::vector<std::string> names;
    if (!list_folder(folder, &names) && errno != ENOENT && errno != ENOTDIR)
        fail("can't list the folder %s: %s", folder.c_str(), strerror(errno));
    std::vector<long> steps;
    for (const std::string& name : names) {
        long step = -1;
        sscanf(name.c_str(), "checkpoint_%8ld", &step);
        if (step >= 0 && folder + "/" + name == checkpoint_path(folder, step)) steps.push_back(step);
    }
    std::sort(steps.rbegin(), steps.rend());
    return steps;
}

// The newest checkpoint of a folder that is whole; a damaged one is named and passed over.
static WeightsFile newest_checkpoint(const std::string& folder, const char* otherwise) {
    struct stat info;
    if (!stat(folder.c_str(), &info) && !S_ISDIR(info.st_mode))
        fail("%s is a file; name the folder of a run", folder.c_str());
    std::vector<long> steps = list_checkpoints(folder);
    for (long step : steps) {
        WeightsFile file;
        std::string damage = failure_of([&] { file = open_weights(checkpoint_path(folder, step)); });
        if (damage.empty()) return file;
        fprintf(stderr, "note: passed over: %s\n", damage.c_str());
    }
    fail("there is no %scheckpoint in %s; %s", steps.empty() ? "" : "whole ", folder.c_str(), otherwise);
}

// ---- pictures ---------------------------------------------------------------------------------------------

static void put_big_endian(std::string* out, uint32_t value) {
    for (int shift = 24; shift >= 0; shift -= 8) out->push_back((char)(value >> shift));
}

static void write_png_chunk(Writer* out, const std::string& type, const std::string& data) {
    std::string chunk;
    put_big_endian(&chunk, (uint32_t)data.size());
    chunk += type + data;
    put_big_endian(&chunk, crc32(chunk.data() + 4, chunk.size() - 4));
    out->write(chunk.data(), chunk.size());
}

// rgb (height, width, 3). Pixels are stored, not compressed (PNG specification, RFC 1950 and 1951): no
// library is needed, and any viewer reads it. Each line is a chunk or more of its own, so that neither the
// length of a chunk nor memory for a copy of them all limits the picture.
static void write_png(const std::string& path, const std::vector<uint8_t>& rgb, int width, int height) {
    std::string header, data = "\x78\x01";
    put_big_endian(&header, (uint32_t)width), put_big_endian(&header, (uint32_t)height);
    header += std::string("\x08\x02\x00\x00\x00", 5);  // 8 bits, RGB
    Writer out(path);
    out.write("\x89PNG\r\n\x1A\n", 8);
    write_png_chunk(&out, "IHDR", header);
    uint32_t a = 1, b = 0;  // Adler-32
    for (int y = 0; y < height; y++) {
        std::string line(1, '\0');  // no filter
        line.append((const char*)rgb.data() + (size_t)y * width * 3, (size_t)width * 3);
        for (char value : line) a = (a + (uint8_t)value) % 65521, b = (b + a) % 65521;
        for (size_t start = 0; start < line.size(); start += 65535) {
            size_t bytes = std::min((size_t)65535, line.size() - start);
            bool last = y == height - 1 && start + bytes == line.size();
            data += (char)last;
            for (size_t value : {bytes, ~bytes}) data += (char)value, data += (char)(value >> 8);
            data.append(line, start, bytes);
            if (last) put_big_endian(&data, b << 16 | a);
            write_png_chunk(&out, "IDAT", data);
            data.clear();
        }
    }
    write_png_chunk(&out, "IEND", "");
    out.commit();
}

// pictures (N, H, W, 3) in [-1, 1] as a grid, `gap` white pixels around and between; columns 0: as square as
// it can be. A NaN is black.
static void write_grid(const std::string& path, const std::vector<float>& pictures, int N, int H, int columns,
                       int gap) {
    if (!columns) columns = (int)ceil(sqrt((double)N));
    int rows = (N + columns - 1) / columns;
    int width = columns * (H + gap) + gap, height = rows * (H + gap) + gap;
    std::vector<uint8_t> rgb((size_t)width * height * 3, 255);
    for (int n = 0; n < N; n++)
        for (int y = 0; y < H; y++)
            for (int e = 0; e < 3 * H; e++) {
                float value = pictures[((size_t)n * H + y) * 3 * H + e];
                value = value > 1.0f ? 1.0f : value >= -1.0f ? value : -1.0f;
                size_t row = (size_t)(n / columns) * (H + gap) + gap + y,
                       column = (size_t)(n % columns) * (H + gap) + gap;
                rgb[(row * width + column) * 3 + e] = (uint8_t)((value + 1.0f) * 127.5f + 0.5f);
            }
    write_png(path, rgb, width, height);
}

// ---- logs -------------------------------------------------------------------------------------------------

// A number as JSON, which knows no NaN.
static std::string json_number(double value) { return std::isfinite(value) ? text("%.9g", value) : "null"; }

void Metrics::read(const std::string& name, long resumed_step, Best* best) {
    path = name;
    std::string old = read_text(path);
    for (const std::string& line : whole_lines(old)) {
        long step;
        if (sscanf(line.c_str(), "{\"step\": %ld", &step) != 1 || step > resumed_step) continue;
        kept += line;
        const char* at = strstr(line.c_str(), "\"val_loss\": ");
        double loss;
        if (at && sscanf(at, "\"val_loss\": %lf", &loss) == 1) best->update(loss, step);
        if (at) best->last = step;  // that of weights which are no numbers says null
    }
    drops = kept.size() < old.size();
}

void Metrics::open() {
    if (drops) {
        Writer out(path);
        out.write(kept.data(), kept.size());
        out.commit();
    }
    file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0 || (end = lseek(file, 0, SEEK_END)) < 0)
        fail("can't write %s: %s", path.c_str(), strerror(errno));
}

void Metrics::add(const std::string& record) {
    bool room = waiting.size() + record.size() < MOST_WAITING;
    if (room) waiting += record + "\n";
    lost += !room;
    write_waiting();
}

void Metrics::write_waiting() {
    size_t written = 0;
    ssize_t n = 0;
    while (written < waiting.size() && (n = ::write(file, &waiting[written], waiting.size() - written)) > 0)
        written += (size_t)n;
    bool all = written == waiting.size();
    if (!all && !warned)
        fprintf(stderr, "note: could not write %s: %s; what is missing there is added once it can be\n",
                printable(path).c_str(), strerror(errno));
    warned |= !all;
    if (!all && !ftruncate(file, end)) written = 0;  // otherwise the next attempt continues the line
    waiting.erase(0, written), end += (off_t)written;
}

void Metrics::close() {
    write_waiting();
    lost += std::count(waiting.begin(), waiting.end(), '\n');
    if (lost) fprintf(stderr, "note: %s lacks %s\n", printable(path).c_str(), counted(lost, "line").c_str());
    ::close(file);
}

// ===========================================================================================================
// 10  COMMAND LINE AND MAIN
// ===========================================================================================================

// ---- flags as they are typed ------------------------------------------------------------------------------

// Edits (insert, delete, replace) that turn a into b.
static size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) row[j] = j;
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min(replaced, 1 + std::min(row[j], row[j - 1]));
        }
    }
    return row[b.size()];
}

// The name in a table (FLAGS, PRESETS) that `name` resembles most.
template <typename Entry, size_t N>
static const char* nearest(const Entry (&table)[N], const std::string& name) {
    const Entry* best = table;
    for (const Entry& entry : table)
        if (edit_distance(name, entry.name) < edit_distance(name, best->name)) best = &entry;
    return best->name;
}

static void print_help() {
    printf(
        "train_unet: trains a UNet diffusion model on images\n\n"
        "  ./train_unet --data_file X.bin     train (X.bin: python prepare_data.py --data_dir D "
        "--output_name X.bin)\n"
        "  ./train_unet --resume              continue\n"
        "  ./train_unet --generate 64         draw pictures with the newest checkpoint\n\n"
        "Flags are written --name value or --name=value.\n");
    for (int group = 0; group <= GROUP_OTHER; group++) {
        printf("\n%s\n", GROUP_TITLES[group]);
        for (const Flag& flag : FLAGS) {
            if (flag.group != group) continue;
            std::string left = text("--%s %s", flag.name, flag.kind == FLAG_CHOICE ? flag.choices : "");
            std::string standard =
                *flag.standard && flag.kind != FLAG_BOOL ? text(" (default %s)", flag.standard) : "";
            printf("  %-37s %s%s\n", left.c_str(), flag.help, standard.c_str());
        }
    }
    printf("\nPresets\n");
    for (const Preset& preset : PRESETS)
        printf("  %s: %s\n", preset.name, *preset.flags ? preset.flags : "the defaults above");
}

// A flag that was given. `origin` says where, if it was not typed: "--preset tiny" or "my.txt, line 3".
struct GivenFlag {
    const Flag* flag;
    std::string value, origin;
};

static const GivenFlag* was_given(const std::vector<GivenFlag>& given, const char* name) {
    const GivenFlag* last = nullptr;
    for (const GivenFlag& g : given)
        if (!strcmp(g.flag->name, name)) last = &g;
    return last;
}

static std::vector<GivenFlag> preset_flags(const std::string& name) {
    std::vector<GivenFlag> given;
    std::string names;
    for (const Preset& preset : PRESETS) {
        names += std::string(names.empty() ? "" : ", ") + preset.name;
        if (name != preset.name) continue;
        std::istringstream words(preset.flags);
        for (std::string flag, value; words >> flag >> value;)
            given.push_back({find_flag(flag.substr(2)), value, "--preset " + name});
        return given;
    }
    fail_usage("there is no preset '%s'; did you mean %s? (there are: %s)", name.c_str(),
               nearest(PRESETS, name), names.c_str());
}

static std::vector<GivenFlag> read_config_file(const std::string& path);

// Every flag that was given, each coming over those before it: a preset's, a file's, the typed ones. They are
// applied later, over the defaults or a checkpoint's configuration.
static std::vector<GivenFlag> parse_command_line(int argc, char** argv) {
    std::vector<GivenFlag> given;
    for (int i = 1; i < argc; i++) {
        std::string argument = argv[i];
        if (argument == "-h") argument = "--help";
        if (argument.compare(0, 2, "--") != 0)
            fail_usage("'%s' is not a flag; flags are written --name value (see --help)", argument.c_str());
        size_t equals = argument.find('=');
        std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
        const Flag* flag = find_flag(name);
        if (name == "log_file")  // of an earlier trainer, whose files this one reads
            fail_usage("there is no --log_file: a run's log is metrics.jsonl in its --out_dir");
        if (!flag)
            fail_usage("unknown flag --%s; did you mean --%s? (--help lists them all)", name.c_str(),
                       nearest(FLAGS, name));
        bool more = i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0;
        std::string value;
        if (equals != std::string::npos)
            value = argument.substr(equals + 1);
        else if (flag->kind == FLAG_BOOL)
            value = more ? argv[++i] : "1";
        else if (flag->kind == FLAG_OPTIONAL_PATH)
            value = more ? argv[++i] : "";
        else if (i + 1 < argc)
            value = argv[++i];
        else
            fail_usage("--%s needs a value", name.c_str());
        given.push_back({flag, value, ""});
    }
    if (const GivenFlag* file = was_given(given, "config")) {
        std::vector<GivenFlag> more = read_config_file(file->value);
        given.insert(given.begin(), more.begin(), more.end());
    }
    if (const GivenFlag* preset = was_given(given, "preset")) {
        if (!preset->origin.empty()) error_place = preset->origin + ": ";
        std::vector<GivenFlag> more = preset_flags(preset->value);
        error_place.clear();
        given.insert(given.begin(), more.begin(), more.end());
    }
    return given;
}

static void apply_flags(Config* config, const std::vector<GivenFlag>& given) {
    for (const GivenFlag& g : given) set_flag(config, *g.flag, g.value);
    config->resume_given = was_given(given, "resume") != nullptr;
}

// ---- configuration files ----------------------------------------------------------------------------------

// What a configuration file holds: everything but what is to be done this time.
static bool is_setting(const Flag& flag) {
    return flag.group != GROUP_OTHER && flag.kind != FLAG_OPTIONAL_PATH;
}

// `value` as it is written into a file for --config: in quotes where it would be read as something else.
static std::string quoted_value(const std::string& value) {
    bool plain =
        value.empty() || (!isspace((unsigned char)value.front()) && value.front() != '"' &&
                          !isspace((unsigned char)value.back()) && value.find('#') == std::string::npos);
    if (plain) return value;
    std::string quoted = "\"";
    for (char c : value) quoted += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return quoted + '"';
}

// One line of a configuration file: NAME VALUE or NAME = VALUE. A # starts a comment at the head of a line or
// after a space; a value in double quotes (where \" is a quote and \\ a backslash) holds anything.
static GivenFlag parse_config_line(const std::string& line, const std::string& origin) {
    const char* space = " \t\r";
    size_t start = line.find_first_not_of(space), end = line.find_first_of(" \t\r=", start);
    std::string name = line.substr(start, end - start), value;
    const Flag* flag = find_flag(name);
    if (!flag)
        fail_usage("there is no flag '%s'; did you mean %s? (--help lists them all)", name.c_str(),
                   nearest(FLAGS, name));
    if (!is_setting(*flag)) fail_usage("%s can only be typed, as --%s", flag->name, flag->name);
    size_t at = line.find_first_not_of(space, end);
    if (at < line.size() && line[at] == '=') at = line.find_first_not_of(space, at + 1);
    if (at < line.size() && line[at] == '"') {
        for (at++; at < line.size() && line[at] != '"'; at++) {
            if (line[at] == '\\' && at + 1 < line.size()) at++;
            value += line[at];
        }
        if (at >= line.size()) fail_usage("the quote after %s does not end", flag->name);
        at = line.find_first_not_of(space, at + 1);
        if (at < line.size() && line[at] != '#') fail_usage("more follows %s's quoted value", flag->name);
    } else if (at < line.size()) {
        while (at < line.size() && (line[at] != '#' || !strchr(space, line[at - 1]))) value += line[at++];
        value.erase(value.find_last_not_of(space) + 1);
    }
    return {flag, value, origin};
}

static std::vector<GivenFlag> read_config_file(const std::string& path) {
    if (path.empty()) fail_usage("--config needs a file's name, not ''");
    std::vector<GivenFlag> given;
    Reader in(path);
    std::string contents(std::min(in.size, (size_t)1 << 20), '\0');
    in.read(&contents[0], contents.size());
    if (in.size > contents.size() || contents.find('\0') != std::string::npos)
        fail("%s is no configuration: --config takes a text, a line each: NAME = VALUE", path.c_str());
    if (contents.compare(0, 3, "\xEF\xBB\xBF") == 0) contents.erase(0, 3);  // some editors' byte order mark
    Config scratch;  // sets each flag once here, so that a bad value is named with its line
    int number = 0;
    for (size_t start = 0; start < contents.size(); number++) {
        size_t end = std::min(contents.find('\n', start), contents.size());
        std::string line = contents.substr(start, end - start);
        start = end + 1;
        size_t first = line.find_first_not_of(" \t\r");
        if (first == std::string::npos || line[first] == '#') continue;
        std::string origin = text("%s, line %d", path.c_str(), number + 1);
        error_place = origin + ": ";
        given.push_back(parse_config_line(line, origin));
        set_flag(&scratch, *given.back().flag, given.back().value);
        error_place.clear();
    }
    return given;
}

// Every setting as a file that --config reads, under the titles of --help.
static std::string config_text(const Config& config) {
    std::string lines =
        "# Flags of train_unet, read with --config FILE; flags typed beside it come over these.\n";
    for (int group = 0; group < GROUP_OTHER; group++) {
        lines += text("\n# %s\n", GROUP_TITLES[group]);
        for (const Flag& flag : FLAGS)
            if (flag.group == group && is_setting(flag) && flag.offset != AT(preset))
                lines += text("%s =%s", flag.name, *flag_text(config, flag).c_str() ? " " : "") +
                         quoted_value(flag_text(config, flag)) + "\n";
    }
    return lines;
}

// config.txt of a run's folder: its configuration, and in comments what was changed on resuming.
static void write_config(const Config& config, long step, const std::vector<std::string>& changes) {
    std::string path = text("%s/config.txt", config.out_dir), contents = config_text(config);
    for (const std::string& line : whole_lines(read_text(path))) {
        long changed;
        if (sscanf(line.c_str(), "# from step %ld on:", &changed) == 1 && changed <= step) contents += line;
    }
    for (const std::string& change : changes) contents += text("# from step %ld on: ", step) + change + "\n";
    Writer out(path);
    out.write(contents.data(), contents.size());
    out.commit();
}

// ---- what a run prints ------------------------------------------------------------------------------------

static void print_plan(const Plan& plan) {
    printf("%-4s %-20s %-10s %-24s %-16s %5s %11s %10s\n", "", "block", "kind", "reads (H, W, C)", "writes",
           "skip", "parameters", "kept");
    for (size_t i = 0; i < plan.blocks.size(); i++) {
        Block b = plan.blocks[i];
        size_t parameters = 0, kept = 0;
        for (const Buffer* buffer : buffers_of(&b))
            if (buffer->first <= (int)i && buffer->last > (int)i) kept += buffer->bytes;
        for (int k = 0; k < b.num_params; k++) parameters += plan.tensors[b.param + k].count;
        std::string in = text(b.C2 ? "%d %d %d + %d" : "%d %d %d", b.H, b.H, b.C, b.C2),
                    skip = b.skip < 0 ? "" : text("%d", b.skip);
        printf("%-4zu %-20s %-10s %-24s %-16s %5s %11zu %10s\n", i, b.name, BLOCK_NAMES[b.kind], in.c_str(),
               text("%d %d %d", b.out_H, b.out_H, b.O).c_str(), skip.c_str(), parameters,
               human_bytes((double)kept).c_str());
    }
}

static void print_run(const Config& c, const Plan& plan, size_t bytes) {
    int column = 0;
    for (const Flag& flag : FLAGS) {
        std::string value = flag_text(c, flag);
        if (flag.group == GROUP_OTHER || value.empty() || flag.kind == FLAG_OPTIONAL_PATH) continue;
        printf("%-22s %-14s%s", flag.name, printable(value).c_str(), ++column % 3 ? "  " : "\n");
    }
    printf("%s\n", column % 3 ? "\n" : "");
    print_plan(plan);
    size_t activations = 0, gradients = 0, scratch = 0;
    for (const Block& b : plan.blocks) {
        activations += b.out.bytes + b.hidden.bytes + b.inner.bytes + b.stats.bytes;
        gradients += b.gradient.bytes;
        scratch = std::max({scratch, b.scratch_forward.bytes, b.scratch_backward.bytes});
    }
    printf(
        "%zu parameters in %zu tensors; memory: %s weights%s, %s where %s activations, %s gradients of them "
        "and up to %s scratch take turns; %s in all\n\n",
        plan.num_parameters, plan.tensors.size(), human_bytes(4.0 * (double)plan.num_parameters).c_str(),
        plan.training
            ? text(" (%d times: gradients, AdamW%s)", 4 + ema_count(c), ema_count(c) ? ", EMA" : "").c_str()
            : "",
        human_bytes((double)plan.arena_bytes).c_str(), human_bytes((double)activations).c_str(),
        human_bytes((double)gradients).c_str(), human_bytes((double)scratch).c_str(),
        human_bytes((double)bytes).c_str());
}

// Says which sizes of --attention_resolutions no level has, where they were typed or a file names them. The
// defaults, which config.txt lists too, and a preset's are meant for any --image_size.
static void note_attention(const Config& c, const std::vector<GivenFlag>& given) {
    const GivenFlag* g = was_given(given, "attention_resolutions");
    if (!g || !g->origin.compare(0, 2, "--")) return;
    if (!g->origin.empty() && g->value == g->flag->standard) return;
    std::vector<int> sizes;
    std::string levels, missing;
    for (int i = 0; i < list_length(c.channel_mult); i++) {
        sizes.push_back(c.image_size >> i);
        levels += text("%s%d", i ? ", " : "", sizes[i]);
    }
    for (int i = 0; i < list_length(c.attention_resolutions); i++)
        if (std::find(sizes.begin(), sizes.end(), c.attention_resolutions[i]) == sizes.end())
            missing += text("%s%d", missing.empty() ? "" : ", ", c.attention_resolutions[i]);
    if (!missing.empty())
        printf("note: no level has the size %s of --attention_resolutions; the levels have %s\n",
               missing.c_str(), levels.c_str());
}

// ---- how long a step takes --------------------------------------------------------------------------------

static double median(std::vector<float> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

// Median milliseconds of 20 runs of a sequence, or of as many as fit into `seconds`, at the least `least`.
template <typename Launches>
static double time_replays(Launches launches, double seconds = 10, int least = 3) {
    const int WARMUP = STEPS_IN_FLIGHT;  // 3 on the GPU, where the second is recorded
    Recording recording;
    std::vector<float> ms;
    double start = seconds_now();
    for (int n = 0; n < WARMUP + 20 && (n < WARMUP + least || seconds_now() - start < seconds); n++) {
        backend_mark(0);
        backend_replay(&recording, launches);
        backend_mark(1);
        backend_await(1);
        if (n >= WARMUP) ms.push_back(backend_milliseconds(0, 1));
    }
    backend_forget(&recording);
    return median(ms);
}

// A new run of this configuration on random images.
static void prepare_trial_run(Trainer* t, const Config& config) {
    int B = config.batch_size, H = config.image_size;
    t->images.count = B, t->images.size = H, t->images.bytes.resize((size_t)B * IMAGE_CHANNELS * H * H);
    for (size_t i = 0; i < t->images.bytes.size(); i++)
        t->images.bytes[i] = (uint8_t)random_word(config.seed, STREAM_PERTURB, (uint32_t)i, 0, 0);
    build_model(&t->model, config, microbatch_of(config), true);
    upload_schedule(&t->model);
    initialise_weights(&t->model, config.seed);
    prepare_steps(t);
    send_orders(t, t->source.slots - 1);  // as many epochs as there is room for; then they come again
}

// Milliseconds of a training step of `batch` images.
static double time_step(Config config, int batch, double seconds, int least) {
    Trainer t;
    config.batch_size = batch;
    prepare_trial_run(&t, config);
    double ms = time_replays([&] { enqueue_step(&t); }, seconds, least);
    finish_steps(&t);
    free_model(&t.model);
    return ms;
}

// Prints how long a training step takes on this machine, and the steps that are left. A CPU may time some of
// the batch only: this has to be quick.
static void print_time(const Config& config, long steps_done) {
    int batch = config.batch_size;
#ifndef __CUDACC__
    double one = time_step(config, 1, 0, 1);
    batch = std::max(1, std::min(batch, (int)(1000 / one)));
    double ms = batch > 1 ? time_step(config, batch, 2, 1) : one;
#else
    double ms = time_step(config, batch, 2, 3);
#endif
    std::string how = "measured, on random images";
    if (batch < config.batch_size)
        how = text("an estimate from %d of its %d images", batch, config.batch_size);
    ms *= (double)config.batch_size / batch;
    long left = std::max(0L, config.steps - steps_done);
    std::string step = ms < 1e4 ? text("%.*f ms", ms < 100 ? 2 : 0, ms) : text("%.4g s", ms / 1e3);
    printf("one training step: %s, %.1f images/s (%s)\n", step.c_str(), 1e3 * config.batch_size / ms,
           how.c_str());
    printf("%s: %s, besides validation, samples and checkpoints\n", counted(left, "step").c_str(),
           human_time(left * ms / 1e3).c_str());
}

// ---- from flags to a run ----------------------------------------------------------------------------------

// Refuses a given flag of this kind that contradicts what a file stores, with both values.
static void refuse_contradictions(const std::vector<GivenFlag>& given, const WeightsFile& file,
                                  bool model_only) {
    for (const Flag& flag : FLAGS) {
        const GivenFlag* g = was_given(given, flag.name);
        bool is_model = flag.group == GROUP_MODEL || flag.group == GROUP_DIFFUSION;
        if (!g || flag.on_resume != FIXED || (model_only && !is_model)) continue;
        Config wanted = file.config;
        set_flag(&wanted, flag, g->value);
        std::string asked = flag_text(wanted, flag), stored = flag_text(file.config, flag);
        if (asked != stored)
            fail("--%s %s%s contradicts %s, which was made with %s; leave the flag out, or start a new run",
                 flag.name, asked.c_str(), g->origin.empty() ? "" : (" (" + g->origin + ")").c_str(),
                 file.path.c_str(), stored.empty() ? "none" : stored.c_str());
    }
}

static void take_model_flags(Config* config, const Config& from) {
    for (const Flag& flag : FLAGS)
        if (flag.group == GROUP_MODEL || flag.group == GROUP_DIFFUSION)
            set_flag(config, flag, flag_text(from, flag));
}

static Config given_config(const std::vector<GivenFlag>& given) {
    Config config = default_config();
    apply_flags(&config, given);
    return config;
}

// check_config, whose sentence names the line of a --config file or the preset that its first flag is from.
static void check_given(const Config& config, const std::vector<GivenFlag>& given) {
    std::string why = failure_of([&] { check_config(config); });
    if (why.empty()) return;
    size_t name = std::min(why.find("--") + 2, why.size());
    const GivenFlag* g = was_given(given, why.substr(name, why.find_first_of(" ;", name) - name).c_str());
    fail("%s%s", g && !g->origin.empty() ? (g->origin + ": ").c_str() : "", why.c_str());
}

static Dataset load_dataset(const std::string& path, int image_size) {
    if (!file_exists(path) && file_exists(path + ".gz"))
        fail("%s is still packed; run `make data` (or gzip -dk %s.gz)", path.c_str(), path.c_str());
    if (!file_exists(path))
        fail("there is no %s; make one from a folder of images: %s", path.c_str(),
             prepare_command(path, image_size).c_str());
    return read_images(path, image_size);
}

// The seeds of a text such as 0-63 or 3,7,10-12.
static std::vector<uint32_t> parse_seeds(const std::string& list) {
    std::vector<uint32_t> seeds;
    for (size_t start = 0; start <= list.size();) {
        std::string part = list.substr(start, list.find(',', start) - start);
        start += part.size() + 1;
        size_t dash = std::min(part.find('-'), part.size());
        std::string ends[] = {part.substr(0, dash), dash < part.size() ? part.substr(dash + 1) : part};
        uint64_t number[2];
        for (int i : {0, 1}) {
            bool digits = !ends[i].empty() && ends[i].size() <= 10 &&
                          ends[i].find_first_not_of("0123456789") == std::string::npos;
            number[i] = digits ? strtoull(ends[i].c_str(), nullptr, 10) : UINT64_MAX;
        }
        if (number[0] > number[1] || number[1] > UINT32_MAX)
            fail_usage(
                "--seeds is a list of numbers and ranges up to 4294967295, such as 3,7,10-12, not '%s'",
                list.c_str());
        if (seeds.size() + (number[1] - number[0]) >= 1000000)
            fail_usage("--seeds %s are more than a million; draw them in parts", list.c_str());
        for (uint64_t seed = number[0]; seed <= number[1]; seed++) seeds.push_back((uint32_t)seed);
    }
    return seeds;
}

// Noise that turns from one seed's to another's in equal angles (slerp), so that its length stays that of
// noise.
static std::vector<PictureNoise> noise_between(uint32_t seed, uint32_t other, int count, int elements) {
    double product = 0, square = 0, other_square = 0;
    for (int e = 0; e < elements; e++) {
        float a[4], b[4];
        random_normals(a, seed, STREAM_SAMPLER, e / 4, 0, 0);
        random_normals(b, other, STREAM_SAMPLER, e / 4, 0, 0);
        double x = a[e % 4], y = b[e % 4];
        product += x * y, square += x * x, other_square += y * y;
    }
    double angle = acos(product / sqrt(square * other_square));
    std::vector<PictureNoise> begins;
    for (int i = 0; i < count; i++) {
        double part = (double)i / (count - 1);
        begins.push_back({seed, other, (float)(sin((1 - part) * angle) / sin(angle)),
                          (float)(sin(part * angle) / sin(angle))});
    }
    return begins;
}

// Refuses what the model and a grid of so many pictures need and can't have: memory, and room in one PNG. The
// pictures are held as floats, and as bytes with their gaps.
static void check_room(const Config& c, int batch, bool training, double pictures, const char* instead) {
    check_memory(c, batch, training);
    double pixels = pictures * pow(c.image_size, 2), with_gaps = pictures * pow(c.image_size + 2, 2),
           model = 0;
    std::string what = text("%.0f pictures of %d x %d", pictures, c.image_size, c.image_size);
    if (with_gaps > 5e8) fail("%s are too many for one PNG; %s", what.c_str(), instead);
#ifndef __CUDACC__
    model = (double)memory_needed(c, batch, training);
#endif
    check_host_memory(model + IMAGE_CHANNELS * (sizeof(float) * pixels + with_gaps), "the model and " + what,
                      instead);
}

// Says that the disk may be too small for the checkpoints to come.
static void note_disk(const Trainer& t) {
    const Config& c = t.model.config;
    struct statvfs disk;
    if (statvfs(c.out_dir, &disk)) return;
    auto multiples = [&](int every) { return every ? c.steps / every - t.step / every : 0; };  // to come
    bool saves_last = !c.save_every || c.steps % c.save_every || !c.steps;
    long there = (long)list_checkpoints(c.out_dir).size(), saves = multiples(c.save_every) + saves_last,
         more = std::min(saves, std::max(1L, c.keep + 1L - there) + multiples(c.keep_every));
    if (t.step >= c.steps && there) return;
    double bytes = (3.0 + ema_count(c)) * sizeof(float) * (double)t.model.plan.num_parameters,
           room = (double)disk.f_bavail * (double)disk.f_frsize;
    if ((double)more * bytes > room)
        say("note: the disk of %s has %s free and this run needs room for %s of %s more\n", c.out_dir,
            human_bytes(room).c_str(), counted(more, "checkpoint").c_str(), human_bytes(bytes).c_str());
}

// Which pictures --generate, --seed, --seeds and --interpolate ask for.
static std::vector<PictureNoise> wanted_pictures(const Config& c) {
    std::vector<uint32_t> seeds = *c.seeds ? parse_seeds(c.seeds) : consecutive_seeds(c.seed, c.generate);
    int count = c.interpolate ? c.interpolate : (int)seeds.size();
    if (c.generate && c.generate != count)
        fail("--generate %d contradicts --%s, which asks for %s; leave --generate out", c.generate,
             c.interpolate ? "interpolate" : "seeds", counted(count, "picture").c_str());
    if (c.strip > sampler_steps(c))
        fail("--strip %d shows more steps than the sampler takes, %d", c.strip, sampler_steps(c));
    if (!c.interpolate) return noise_of_seeds(seeds);
    if (!*c.seeds || seeds.size() != 2 || seeds[0] == seeds[1] || count < 2)
        fail(
            "--interpolate draws two or more pictures between two seeds, such as --seeds 3,9 --interpolate "
            "8");
    if (c.sampler == SAMPLER_DDPM || c.eta > 0)
        fail("--interpolate needs a sampler that adds no noise: another than ddpm, and no --eta");
    return noise_between(seeds[0], seeds[1], count, IMAGE_CHANNELS * c.image_size * c.image_size);
}

static std::string sampler_text(const Config& c) {
    std::string line = SAMPLER_NAMES[c.sampler];
    size_t calls = make_sampler(c).size();
    if (c.eta > 0) line += text(" with eta %g", (double)c.eta);
    line += " in " + counted(sampler_steps(c), "step");
    if ((int)calls != sampler_steps(c)) line += text(" (%zu network calls)", calls);
    if (c.threshold != THRESHOLD_CLAMP)
        line += c.threshold == THRESHOLD_DYNAMIC ? ", dynamic threshold" : ", no threshold";
    return line;
}

static int run_generate(const std::vector<GivenFlag>& given) {
    Config config = given_config(given);
    const GivenFlag* seed = was_given(given, "seed");
    if (*config.seeds && seed && seed->origin.empty())  // a file's is that of a run
        fail("--seed %s contradicts --seeds, which names every picture; leave one out", seed->value.c_str());
    std::string folder = *config.resume ? config.resume : config.out_dir;
    const char* otherwise = "name weights with --model_weights FILE, or a run's folder with --out_dir FOLDER";
    WeightsFile file =
        *config.model_weights ? open_weights(config.model_weights) : newest_checkpoint(folder, otherwise);
    refuse_contradictions(given, file, true);
    take_model_flags(&config, file.config);
    std::copy(file.config.ema_rate, file.config.ema_rate + MAX_EMAS, config.ema_rate);
    check_given(config, given);
    std::vector<PictureNoise> begins = wanted_pictures(config);
    int count = (int)begins.size();
    const char* section = config.use_ema ? EMA_SECTIONS[config.use_ema - 1] : "weights";
    if (config.use_ema <= 1 && !file.find(section)) config.use_ema = 0, section = "weights";
    if (!file.find(section))
        fail("%s has no section %s: --use_ema %d can't be had", file.path.c_str(), section, config.use_ema);
    std::string weights = chosen_name(config), grid = config.output_name;
    if (grid.size() < 4 || strcasecmp(&grid[grid.size() - 4], ".png"))
        fail("--output_name %s: pictures are written as PNG; end the name in .png", grid.c_str());
    memset(config.ema_rate, 0, sizeof config.ema_rate);  // one set of weights is enough
    config.batch_size = std::min({config.batch_size, count, most_images(config)});
    check_room(config, config.batch_size, false, (double)count * (1 + config.strip),
               "draw them in parts, with --seeds");
    Model m = Model();
    if (config.dry_run) {
        print_run(config, make_plan(config, config.batch_size, false),
                  memory_needed(config, config.batch_size, false));
        return 0;
    }
    { Writer trial(grid); }  // what can't be written is better said before the pictures are drawn
    if (*config.output_dir) make_folder(config.output_dir);
    build_model(&m, config, config.batch_size, false);
    read_parameters(m.master, file, section, m.plan);
    use_weights(&m, m.master);
    std::string seeds = *config.seeds ? config.seeds : text("%u to %u", begins[0].seed, begins.back().seed);
    say("%s with %s (%s, step %ld), %s, seeds %s%s\n", counted(count, "picture").c_str(), file.path.c_str(),
        weights.c_str(), file.step, sampler_text(config).c_str(), seeds.c_str(),
        config.interpolate ? " and between" : "");
    std::vector<float> pictures, strip;
    double start = seconds_now();
    if (!draw_pictures(&m, &pictures, begins, true, config.strip ? &strip : nullptr, config.strip)) {
        fprintf(stderr, "stopped before the pictures were done; nothing was written\n");
        return 130;
    }
    // the way from one seed to another in a row, if it is not too long
    write_grid(grid, pictures, count, config.image_size, config.interpolate <= 16 ? config.interpolate : 0);
    say("%s: %s in %s\n", grid.c_str(), counted(count, "picture").c_str(),
        human_time(seconds_now() - start).c_str());
    if (config.strip) {
        size_t dot = grid.rfind('.'), slash = grid.rfind('/');
        if (dot == std::string::npos || (slash != std::string::npos && dot < slash)) dot = grid.size();
        grid.insert(dot, "_strip");
        write_grid(grid, strip, count * config.strip, config.image_size, config.strip);
        say("%s: %s of each\n", grid.c_str(), counted(config.strip, "step").c_str());
    }
    if (*config.output_dir) {  // between two seeds the pictures are numbered instead
        size_t elements = pictures.size() / count;
        for (int n = 0; n < count; n++)
            write_grid(text("%s/%06u.png", config.output_dir, config.interpolate ? n : begins[n].seed),
                       {pictures.begin() + n * elements, pictures.begin() + (n + 1) * elements}, 1,
                       config.image_size, 1, 0);
        say("%s: each picture on its own\n", config.output_dir);
    }
    free_model(&m);
    if (long broken = count_broken(pictures, count))
        fail("%s became NaN and black: the weights of %s have grown too large; use those of an earlier step",
             counted(broken, "picture").c_str(), file.path.c_str());
    return 0;
}

// Sets up a run from its flags: new, from given weights, or resumed.
static void prepare_run(Trainer* t, std::vector<GivenFlag> given, Config* config) {
    *config = given_config(given);
    WeightsFile file;
    std::vector<long> there;  // checkpoints, as they were before any was read: see below
    if (config->resume_given) {
        std::string folder = *config->resume ? config->resume : config->out_dir;
        const GivenFlag* out_dir = was_given(given, "out_dir");
        if (*config->resume && out_dir && out_dir->origin.empty() && out_dir->value != folder)
            fail("--out_dir %s contradicts --resume %s: a run stays in its folder; leave --out_dir out",
                 out_dir->value.c_str(), folder.c_str());
        there = list_checkpoints(folder);
        file = newest_checkpoint(folder,
                                 "start without --resume, or name the run's folder with --resume FOLDER");
        refuse_contradictions(given, file, false);
        // a preset's free flags were for the run's start: what was typed then came over them
        given.erase(std::remove_if(given.begin(), given.end(),
                                   [](const GivenFlag& g) { return !g.origin.compare(0, 2, "--"); }),
                    given.end());
        *config = file.config;
        apply_flags(config, given);
        strcpy(config->out_dir, folder.c_str());
        for (const Flag& flag : FLAGS) {
            std::string before = flag_text(file.config, flag), now = flag_text(*config, flag);
            bool stored = flag.field || flag.offset == AT(data_file) || flag.offset == AT(val_file);
            if (stored && before != now)
                t->changes.push_back(text("--%s %s (was %s)", flag.name, now.c_str(), before.c_str()));
        }
        t->step = file.step, t->smoothed = file.smoothed, t->history = file.history;
        auto was_due = [&](int every) {
            return t->step && (t->step == file.config.steps || (every && t->step % every == 0));
        };
        t->owes_validation = *file.config.val_file && was_due(file.config.val_every);
        t->owes_samples = was_due(file.config.sample_every);
        std::vector<const char*> needed = {"adam_m", "adam_v"};
        needed.insert(needed.end(), EMA_SECTIONS, EMA_SECTIONS + ema_count(*config));
        for (const char* section : needed)
            if (!file.find(section))
                fail("%s has no section %s: it is no checkpoint; start from it with --model_weights",
                     file.path.c_str(), section);
    } else if (*config->model_weights) {
        file = open_weights(config->model_weights);
        refuse_contradictions(given, file, true);
        take_model_flags(config, file.config);
    }
    if (!config->resume_given) config->lr_steps = config->steps;
    check_given(*config, given);
    if (config->dry_run || config->print_config) return;

    if (!config->resume_given) there = list_checkpoints(config->out_dir);
    if (!config->resume_given && !there.empty())
        fail(
            "%s already holds a run, at step %ld; continue it with --resume, or name another folder with "
            "--out_dir",
            config->out_dir, there[0]);
    check_room(*config, microbatch_of(*config), true, config->num_samples, "lower --num_samples");
    t->images = load_dataset(config->data_file, config->image_size);
    if (*config->val_file) t->validation = load_dataset(config->val_file, config->image_size);
    make_folder(config->out_dir);
    t->folder = open(config->out_dir, O_RDONLY | O_CLOEXEC);
    if (t->folder < 0 || flock(t->folder, LOCK_EX | LOCK_NB)) {
        if (t->folder >= 0 && errno == EWOULDBLOCK)
            fail("another process is training in %s; name another folder with --out_dir", config->out_dir);
        fprintf(stderr, "note: %s can't be locked (%s): see that no other run is started in it\n",
                printable(config->out_dir).c_str(), strerror(errno));
    }
    if (list_checkpoints(config->out_dir) != there)
        fail(
            "%s already holds a run that another process has trained meanwhile; continue it with --resume, "
            "or name another folder with --out_dir",
            config->out_dir);
    build_model(&t->model, *config, microbatch_of(*config), true);
    upload_schedule(&t->model);
    if (config->resume_given) {
        read_parameters(t->model.master, file, "weights", t->model.plan);
        read_parameters(t->model.adam_m, file, "adam_m", t->model.plan);
        read_parameters(t->model.adam_v, file, "adam_v", t->model.plan);
        for (int k = 0; k < ema_count(*config); k++)
            read_parameters(t->model.ema[k], file, EMA_SECTIONS[k], t->model.plan);
        use_weights(&t->model, t->model.master);
    } else if (*config->model_weights) {
        read_parameters(t->model.master, file, "weights", t->model.plan);
        start_from_master(&t->model);
    } else {
        initialise_weights(&t->model, config->seed);
    }
    prepare_steps(t);
    // both of the old files are read before either is replaced
    t->metrics.read(text("%s/metrics.jsonl", config->out_dir), t->step, &t->best);
    write_config(*config, t->step, t->changes);
    t->metrics.open();
}

// Ctrl-C and SIGTERM, a closed terminal and a pipe whose reader has gone finish the step, save and end (with
// the last two, whatever is still printed is lost). One such event often sends several signals, as the shell
// and the kernel do, or timeout: only Ctrl-C or SIGTERM a second or more after the first ends at once.
static void request_stop(int signal_number) {
    static std::atomic<int64_t> first_asked{0};  // milliseconds
    stop_requested = 1;
    if (signal_number == SIGHUP || signal_number == SIGPIPE) return;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t ms = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000, first = 0;
    if (first_asked.compare_exchange_strong(first, ms) || ms - first < 1000) return;
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void handle_signals() {
    struct sigaction action = {}, before;
    action.sa_handler = request_stop, action.sa_flags = SA_RESTART;
    for (int number : {SIGINT, SIGTERM, SIGPIPE}) sigaction(number, &action, nullptr);
    sigaction(SIGHUP, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);  // as nohup asks
    signal(SIGXFSZ, SIG_IGN);  // past a limit of the files' size a write fails, and says so
}

#ifndef TESTING
#ifndef PROFILING  // dev/profile.cu has its own
static int run_program(int argc, char** argv) {
    std::vector<GivenFlag> given = parse_command_line(argc, argv);
    Config config = given_config(given);
    Trainer trainer;
    if (config.help) {
        print_help();
        return 0;
    }
    bool draws = config.generate || *config.seeds || config.interpolate;
    for (const GivenFlag& g : given)  // that were typed, and would do nothing
        if (!draws && g.origin.empty() &&
            (!strcmp(g.flag->name, "generate") || !strcmp(g.flag->name, "strip") ||
             !strcmp(g.flag->name, "output_dir")))
            fail_usage("--%s %s draws nothing by itself; say how many with --generate, or which with --seeds",
                       g.flag->name, g.value.c_str());
    if (config.print_config) {
        prepare_run(&trainer, given, &config);
        printf("%s", config_text(config).c_str());
        return 0;
    }
    backend_init();
#ifdef OPENBLAS
    openblas_set_num_threads(1);  // the layers' own loops keep every core busy
#endif
    handle_signals();
    printf("train_unet on %s\n", backend_name().c_str());
    if (draws) return run_generate(given);
    prepare_run(&trainer, given, &config);
    for (const std::string& change : trainer.changes) say("changed on resume: %s\n", change.c_str());
    note_attention(config, given);
    if (!config.resume_given && !*config.model_weights && file_exists("unet_init.bin"))
        printf(
            "note: unet_init.bin lies here and is not read: the weights come from --seed; to start from it, "
            "--model_weights unet_init.bin\n");
    if (trainer.step >= config.steps)
        printf("already at step %ld of --steps %d: nothing is left to train\n", trainer.step, config.steps);
    else if (trainer.step && !(learning_rate(config, trainer.step) > 0))
        printf(
            "note: --lr_schedule %s has come to its end, so that the learning rate is 0; constant goes on\n",
            flag_text(config, *find_flag("lr_schedule")).c_str());
    if (config.dry_run) {
        print_run(config, make_plan(config, microbatch_of(config), true),
                  memory_needed(config, microbatch_of(config), true));
        check_room(config, microbatch_of(config), true, config.num_samples, "lower --num_samples");
        print_time(config, trainer.step);
        return 0;
    }
    print_run(config, trainer.model.plan, trainer.model.bytes + workspace_bytes());
    say("%s in %s; %s step %ld\n", counted(trainer.images.count, "image").c_str(), config.data_file,
        config.resume_given ? "resumed at" : "starting at", trainer.step);
    note_disk(trainer);
    fflush(stdout);
    train(&trainer);
    finish_steps(&trainer);
    free_model(&trainer.model);
    return 0;
}
#endif

int main(int argc, char** argv) {
    // A file must not become standard output because that was closed: its descriptors are taken first.
    int taken = 0;
    while (taken >= 0 && taken < 3) taken = open("/dev/null", O_RDWR);
    if (taken > 2) close(taken);
#ifdef _OPENMP
    // Threads that spin while they wait are no faster here, and many times slower where something else runs
    // beside us. OpenMP reads this setting before main, so the program starts itself again with it, and with
    // that of OpenBLAS, whose own threads have nothing to do here.
    if (!getenv("OMP_WAIT_POLICY") && !setenv("OMP_WAIT_POLICY", "passive", 1) &&
        !setenv("OPENBLAS_NUM_THREADS", "1", 0))
        execv("/proc/self/exe", argv);
#endif
    int status = 1;
    const char* memory =
        "out of memory; use a smaller --batch_size, --num_samples or --generate, or fewer images";
    try {
        status = run_program(argc, argv);
    } catch (const std::bad_alloc&) {
        fail("%s", memory);
    } catch (const std::length_error&) {
        fail("%s", memory);
    }
    // where a reader has gone, or a terminal, there is nobody to tell
    errno = 0;
    if ((fflush(stdout) || ferror(stdout)) && !stop_requested)
        fail("could not write all of the output: %s", errno ? strerror(errno) : "a part of it got lost");
    return status;
}
#endif

// ===========================================================================================================
// 11  LAYERS ON THE CPU
// ===========================================================================================================

// ---- the machine ------------------------------------------------------------------------------------------

static size_t host_memory_available() {
    size_t kilobytes = 0, pages = 0;
    FILE* f = fopen("/proc/meminfo", "r");
    for (char line[128]; f && fgets(line, sizeof line, f);)
        if (sscanf(line, "MemAvailable: %zu kB", &kilobytes) == 1) break;
    if (f) fclose(f);
    rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur == RLIM_INFINITY) return kilobytes * 1024;
    if ((f = fopen("/proc/self/statm", "r"))) {
        if (fscanf(f, "%zu", &pages) != 1) pages = 0;
        fclose(f);
    }
    size_t taken = pages * (size_t)sysconf(_SC_PAGESIZE);
#ifdef OPENBLAS
    taken += 2 * (size_t)omp_get_max_threads() << 27;  // OpenBLAS's buffers; without them it waits for ever
#endif
    return std::min(kilobytes * 1024, limit.rlim_cur > taken ? (size_t)limit.rlim_cur - taken : 1);
}

#ifndef __CUDACC__
static void backend_init() {}
static void* backend_allocate(size_t bytes) {
    void* memory = nullptr;
    return posix_memalign(&memory, 4096, bytes) ? nullptr : memory;
}
static void backend_free(void* memory) { free(memory); }
static void* backend_allocate_host(size_t bytes) { return backend_allocate(bytes); }
static void backend_free_host(void* memory) { free(memory); }
static void backend_zero(void* memory, size_t bytes) {
    PROFILE("zeroing", {0, (double)bytes});
    memset(memory, 0, bytes);
}
static void backend_copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
static void backend_upload(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
static void backend_upload_async(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
static void backend_download(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
static void backend_download_async(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }

template <typename Launches>
static int backend_aside(Launches launches) {
    launches();
    return 0;
}
static void backend_join(int) {}
template <typename Launches>
static void backend_replay(Recording*, Launches launches) {
    launches();
}
static void backend_forget(Recording*) {}
static double cpu_marks[RESULT_SLOTS];  // seconds
static void backend_mark(int slot) { cpu_marks[slot] = seconds_now(); }
static void backend_await(int) {}
static float backend_milliseconds(int first, int last) {
    return (float)(1e3 * (cpu_marks[last] - cpu_marks[first]));
}
static double backend_peak(std::string*) { return 0; }
static size_t backend_memory_available() { return host_memory_available(); }
#endif

#ifdef CPU_LAYERS
namespace cpu {

// ---- CPU workspace ----------------------------------------------------------------------------------------

// Each thread's own scratch: gathered inputs of a matrix product, attention scores, and matmul's packed
// panels.
enum { THREAD_FLOATS = 1 << 19, KC = 256, NC = 512 };
static float* cpu_workspace;

static size_t cpu_workspace_bytes() {
    return (size_t)omp_get_max_threads() * (THREAD_FLOATS + KC * NC) * sizeof(float);
}
static bool allocate_cpu_workspace() {
    return cpu_workspace || !posix_memalign((void**)&cpu_workspace, 4096, cpu_workspace_bytes());
}
static float* thread_floats() {
    return cpu_workspace + (size_t)omp_get_thread_num() * (THREAD_FLOATS + KC * NC);
}

// `n` work items cut into pieces of at most `most`, as even as can be; only shapes decide, never the number
// of threads.
struct Pieces {
    int count, size, total;
    int begin(int i) const { return std::min(i * size, total); }
    int end(int i) const { return std::min((i + 1) * size, total); }
};
static Pieces cut(int total, int most, int multiple = 1) {
    int count = (total + most - 1) / most;
    int size = ((total + count - 1) / count + multiple - 1) / multiple * multiple;
    return {(total + size - 1) / size, size, total};
}

// ---- matrix product ---------------------------------------------------------------------------------------

// Rows and columns of the register tile: 12 x 2 vectors fill 24 of AVX-512's 32 registers, 6 x 2 fill 12 of
// AVX2's 16.
#if defined(__AVX512F__)
enum { VECTOR = 16, TILE_ROWS = 12 };
#else
enum { VECTOR = 8, TILE_ROWS = 6 };
#endif
enum { TILE_COLUMNS = 2 * VECTOR, ROW_BLOCK = 10 * TILE_ROWS };
typedef float Vector __attribute__((vector_size(VECTOR * sizeof(float)), aligned(4)));

// The sum over K is formed apart and then added, so that long sums are added up block by block.
// c (R, TILE_COLUMNS) = [c +] a (R, K) times panel (K, TILE_COLUMNS); a's element (r, k) lies at r * rows + k
// * columns.
template <int R>
static void matmul_tile(float* c, const float* a, const float* panel, int K, int ldc, size_t rows,
                        size_t columns, bool accumulate) {
    Vector sum0[R], sum1[R];
    for (int r = 0; r < R; r++) {
        sum0[r] = Vector{};
        sum1[r] = Vector{};
    }
    for (int k = 0; k < K; k++, a += columns, panel += TILE_COLUMNS) {
        Vector b0 = *(const Vector*)panel, b1 = *(const Vector*)(panel + VECTOR);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            sum0[r] += a[r * rows] * b0;
            sum1[r] += a[r * rows] * b1;
        }
    }
    for (int r = 0; r < R; r++) {
        Vector *c0 = (Vector*)(c + (size_t)r * ldc), *c1 = c0 + 1;
        *c0 = accumulate ? *c0 + sum0[r] : sum0[r];
        *c1 = accumulate ? *c1 + sum1[r] : sum1[r];
    }
}

static void matmul_rows(float* c, const float* a, const float* panel, int M, int K, int ldc, size_t rows,
                        size_t columns, bool accumulate) {
    int m = 0;
    for (; m + TILE_ROWS <= M; m += TILE_ROWS)
        matmul_tile<TILE_ROWS>(c + (size_t)m * ldc, a + m * rows, panel, K, ldc, rows, columns, accumulate);
    for (; m + 4 <= M; m += 4)
        matmul_tile<4>(c + (size_t)m * ldc, a + m * rows, panel, K, ldc, rows, columns, accumulate);
    for (; m < M; m++)
        matmul_tile<1>(c + (size_t)m * ldc, a + m * rows, panel, K, ldc, rows, columns, accumulate);
}

// b (K, N), whose element (k, n) lies at k * rows + n * columns, as panels (N / TILE_COLUMNS, K,
// TILE_COLUMNS), zero-filled.
static void matmul_pack(float* panels, const float* b, int K, int N, size_t rows, size_t columns) {
    for (int n = 0; n < N; n += TILE_COLUMNS, panels += (size_t)K * TILE_COLUMNS) {
        int width = std::min((int)TILE_COLUMNS, N - n);
        if (width < TILE_COLUMNS) memset(panels, 0, (size_t)K * TILE_COLUMNS * sizeof(float));
        if (columns == 1)
            for (int k = 0; k < K; k++)
                memcpy(panels + (size_t)k * TILE_COLUMNS, b + k * rows + n, width * sizeof(float));
        else  // a transposed b: blocks of 16 keep the lines being written in the first-level cache
            for (int k0 = 0; k0 < K; k0 += 16)
                for (int j = 0; j < width; j++)
                    for (int k = k0; k < std::min(k0 + 16, K); k++)
                        panels[(size_t)k * TILE_COLUMNS + j] = b[k * rows + (n + j) * columns];
    }
}

#ifdef OPENBLAS
static bool own_matmul = false;  // tests set it to compare our loop with the library
#endif

// c (M, N) = [c +] op(a) (M, K) times op(b) (K, N), row-major with the given leading dimensions. Runs on the
// calling thread; layers call it from their parallel loops. The order of a sum depends on K alone.
static void matmul(float* c, const float* a, const float* b, int M, int N, int K, int ldc, int lda, int ldb,
                   bool transpose_a, bool transpose_b, bool accumulate) {
#ifdef OPENBLAS
    if (!own_matmul) {
        cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
                    transpose_b ? CblasTrans : CblasNoTrans, M, N, K, 1.0f, a, lda, b, ldb,
                    accumulate ? 1.0f : 0.0f, c, ldc);
        return;
    }
#endif
    size_t a_rows = transpose_a ? 1 : lda, a_columns = transpose_a ? lda : 1;
    size_t b_rows = transpose_b ? 1 : ldb, b_columns = transpose_b ? ldb : 1;
    float* panels = thread_floats() + THREAD_FLOATS;  // (NC / TILE_COLUMNS, KC, TILE_COLUMNS)
    float edge[ROW_BLOCK * TILE_COLUMNS];
    for (int n0 = 0; n0 < N; n0 += NC)
        for (int k0 = 0; k0 < K; k0 += KC) {
            int block_n = std::min((int)NC, N - n0), block_k = std::min((int)KC, K - k0);
            bool add = accumulate || k0;
            matmul_pack(panels, b + k0 * b_rows + n0 * b_columns, block_k, block_n, b_rows, b_columns);
            for (int m0 = 0; m0 < M; m0 += ROW_BLOCK)
                for (int n = 0; n < block_n; n += TILE_COLUMNS) {
                    int rows = std::min((int)ROW_BLOCK, M - m0),
                        width = std::min((int)TILE_COLUMNS, block_n - n);
                    const float* panel = panels + (size_t)n * block_k;
                    const float* a_block = a + m0 * a_rows + k0 * a_columns;
                    float* c_block = c + (size_t)m0 * ldc + n0 + n;
                    if (width == TILE_COLUMNS) {
                        matmul_rows(c_block, a_block, panel, rows, block_k, ldc, a_rows, a_columns, add);
                        continue;
                    }
                    matmul_rows(edge, a_block, panel, rows, block_k, TILE_COLUMNS, a_rows, a_columns, false);
                    for (int m = 0; m < rows; m++)
                        for (int j = 0; j < width; j++) {
                            float* target = c_block + (size_t)m * ldc + j;
                            *target = (add ? *target : 0) + edge[m * TILE_COLUMNS + j];
                        }
                }
        }
}

// e^x to 2 units in the last place, from a polynomial, so that loops over it become vector code. NaN stays
// NaN.
static inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    union {
        float value;
        uint32_t bits;
    } shifted = {x * 1.44269504f + 12582912.0f}, scale;  // its lowest bits are the nearest integer, n
    float n = shifted.value - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    float p = 1.9875691500e-4f;                             // coefficients: Cephes library, expf
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    scale.bits = (shifted.bits + 127) << 23;  // 2^n; any number where x is NaN, as p is then
    return p * scale.value;
}
static inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

// ---- timestep embedding, SiLU -----------------------------------------------------------------------------

static void timestep_embedding_forward(float* out, const int* t, int B, int C, int max_period) {
    PROFILE("embedding, SiLU", {0, (double)sizeof(floatX) * B * C});
    int half = C / 2;
    for (int b = 0; b < B; b++)
        for (int i = 0; i < half; i++) {
            double angle = t[b] * exp(-log((double)max_period) * i / half);
            out[(size_t)b * C + i] = (float)cos(angle);
            out[(size_t)b * C + half + i] = (float)sin(angle);
        }
}

static inline float silu_gradient(float x) {
    float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}
static void silu_forward(float* out, const float* x, size_t n) {
    PROFILE("embedding, SiLU", {0, 2.0 * sizeof(floatX) * n});
#pragma omp simd
    for (size_t i = 0; i < n; i++) out[i] = x[i] * sigmoid(x[i]);
}
static void silu_backward(float* dx, const float* dout, const float* x, size_t n) {
    PROFILE("embedding, SiLU", {0, 3.0 * sizeof(floatX) * n});
#pragma omp simd
    for (size_t i = 0; i < n; i++) dx[i] = dout[i] * silu_gradient(x[i]);
}

// ---- bias gradient ----------------------------------------------------------------------------------------

static void bias_backward(float* dbias, float* per_image, int pitch, const float* dout, int B, int T, int O) {
    PROFILE("bias gradient", {0, (double)sizeof(floatX) * B * T * O});
    Pieces channels = cut(O, 16);
#pragma omp parallel for schedule(dynamic)
    for (int piece = 0; piece < channels.count; piece++) {
        int o0 = channels.begin(piece), n = channels.end(piece) - o0;
        double total[16] = {0};
        for (int b = 0; b < B; b++) {
            double image[16] = {0};
            for (int t0 = 0; t0 < T; t0 += 64) {  // short float sums, long double ones
                float sum[16] = {0};
                for (int t = t0; t < std::min(t0 + 64, T); t++) {
                    const float* row = dout + ((size_t)b * T + t) * O + o0;
#pragma omp simd
                    for (int o = 0; o < n; o++) sum[o] += row[o];
                }
                for (int o = 0; o < n; o++) image[o] += sum[o];
            }
            for (int o = 0; o < n; o++) total[o] += image[o];
            if (per_image)
                for (int o = 0; o < n; o++) per_image[(size_t)b * pitch + o0 + o] = (float)image[o];
        }
        for (int o = 0; o < n; o++) dbias[o0 + o] += (float)total[o];
    }
}

// ---- linear and 1x1 convolution ---------------------------------------------------------------------------

static void linear_forward(float* out, const float* x, const float* x2, const float* w, const float* bias,
                           const float* residual, int M, int C, int C2, int O, float2*, int) {
    PROFILE("1x1 forward", convolution_work(M, 1, C + C2, O));
    Pieces rows = cut(M, 252), columns = cut(O, 128, TILE_COLUMNS);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int i = 0; i < rows.count; i++)
        for (int j = 0; j < columns.count; j++) {
            int m0 = rows.begin(i), m1 = rows.end(i), o0 = columns.begin(j), o1 = columns.end(j), K = C + C2;
            float* target = out + (size_t)m0 * O + o0;
            const float* weight = w + (size_t)o0 * K;
            matmul(target, x + (size_t)m0 * C, weight, m1 - m0, o1 - o0, C, O, C, K, false, true, false);
            if (C2)
                matmul(target, x2 + (size_t)m0 * C2, weight + C, m1 - m0, o1 - o0, C2, O, C2, K, false, true,
                       true);
            for (int m = m0; m < m1; m++)
#pragma omp simd
                for (int o = o0; o < o1; o++)
                    out[(size_t)m * O + o] += bias[o] + (residual ? residual[(size_t)m * O + o] : 0.0f);
        }
}

static void linear_backward(float* dx, float* dx2, float* dw, float* dbias, const float* dout, const float* x,
                            const float* x2, const float* w, int M, int C, int C2, int O, bool accumulate,
                            const Normed&, int) {
    int K = C + C2;
    bias_backward(dbias, nullptr, 0, dout, 1, M, O);
    for (int input = 0; input < (C2 ? 2 : 1); input++) {
        const float* source = input ? x2 : x;
        float* target = input ? dx2 : dx;
        int width = input ? C2 : C, first = input ? C : 0;
        Pieces rows = cut(M, 252), columns = cut(width, 128, TILE_COLUMNS);
        if (target) {
            PROFILE("1x1 dX", convolution_work(M, 1, width, O));
#pragma omp parallel for collapse(2) schedule(dynamic)
            for (int i = 0; i < rows.count; i++)
                for (int j = 0; j < columns.count; j++) {
                    int m0 = rows.begin(i), c0 = columns.begin(j);
                    matmul(target + (size_t)m0 * width + c0, dout + (size_t)m0 * O, w + first + c0,
                           rows.end(i) - m0, columns.end(j) - c0, O, width, O, K, false, false, accumulate);
                }
        }
        PROFILE("1x1 dW", convolution_work(M, 1, width, O, sizeof(float)));
        Pieces outputs = cut(O, 120, TILE_ROWS);
#pragma omp parallel for collapse(2) schedule(dynamic)
        for (int i = 0; i < outputs.count; i++)
            for (int j = 0; j < columns.count; j++) {
                int o0 = outputs.begin(i), c0 = columns.begin(j);
                matmul(dw + (size_t)o0 * K + first + c0, dout + o0, source + c0, outputs.end(i) - o0,
                       columns.end(j) - c0, M, K, O, width, true, false, true);
            }
    }
}

// ---- 3x3 convolution --------------------------------------------------------------------------------------

// Columns [j0, j1) of the matrix whose row p holds the 3x3 neighbourhood of pixel p, (9, C), for pixels [p0,
// p1) of x (B, H, W, C); outside the image it is zero. In NHWC a row of three neighbours is 3C consecutive
// floats.
static void im2col(float* columns, const float* x, int p0, int p1, int j0, int j1, int H, int W, int C) {
    for (int p = p0; p < p1; p++) {
        int column = p % W, row = p / W % H;
        for (int dy = 0; dy < 3; dy++) {
            int first = std::max(j0, 3 * C * dy), last = std::min(j1, 3 * C * (dy + 1));
            if (first >= last) continue;
            int inside0 = column == 0 ? 3 * C * dy + C : first;         // the left neighbour lies outside
            int inside1 = column == W - 1 ? 3 * C * dy + 2 * C : last;  // the right one does
            inside0 = std::min(std::max(inside0, first), last),
            inside1 = std::max(std::min(inside1, last), inside0);
            if (row + dy < 1 || row + dy > H) inside0 = inside1 = last;
            memset(columns, 0, (inside0 - first) * sizeof(float));
            const float* source = x + ((ptrdiff_t)p + (dy - 1) * W - 1) * C + (inside0 - 3 * C * dy);
            memcpy(columns + (inside0 - first), source, (inside1 - inside0) * sizeof(float));
            memset(columns + (inside1 - first), 0, (last - inside1) * sizeof(float));
            columns += last - first;
        }
    }
}

// Pixels that a thread gathers at a time.
static Pieces conv3x3_bands(int pixels, int columns) {
    return cut(pixels, std::min(252, (int)THREAD_FLOATS / columns));
}

static void conv3x3_forward(float* out, const float* x, const float* w, const float* bias, const float* emb,
                            int emb_pitch, const float* residual, int B, int H, int W, int C, int O,
                            float2*) {
    PROFILE("3x3 forward", convolution_work((double)B * H * W, 9, C, O));
    Pieces bands = conv3x3_bands(B * H * W, 9 * C), outputs = cut(O, 128, TILE_COLUMNS);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int i = 0; i < bands.count; i++)
        for (int j = 0; j < outputs.count; j++) {
            int p0 = bands.begin(i), p1 = bands.end(i), o0 = outputs.begin(j), o1 = outputs.end(j);
            float* columns = thread_floats();  // (p1 - p0, 9, C)
            im2col(columns, x, p0, p1, 0, 9 * C, H, W, C);
            matmul(out + (size_t)p0 * O + o0, columns, w + (size_t)o0 * 9 * C, p1 - p0, o1 - o0, 9 * C, O,
                   9 * C, 9 * C, false, true, residual == out);
            for (int p = p0; p < p1; p++) {
                const float* per_image = emb ? emb + (size_t)(p / (H * W)) * emb_pitch : nullptr;
                const float* added = residual && residual != out ? residual + (size_t)p * O : nullptr;
#pragma omp simd
                for (int o = o0; o < o1; o++)
                    out[(size_t)p * O + o] +=
                        bias[o] + (per_image ? per_image[o] : 0.0f) + (added ? added[o] : 0.0f);
            }
        }
}

static void conv3x3_backward(float* dx, float* dw, float* dbias, float* demb, int emb_pitch,
                             const float* dout, const float* x, const float* w, int B, int H, int W, int C,
                             int O, const Normed&) {
    bias_backward(dbias, demb, emb_pitch, dout, B, H * W, O);
    if (dx) {
        PROFILE("3x3 dX", convolution_work((double)B * H * W, 9, C, O));
        Pieces bands = conv3x3_bands(B * H * W, 9 * O), inputs = cut(C, 128, TILE_COLUMNS);
#pragma omp parallel for collapse(2) schedule(dynamic)
        for (int i = 0; i < bands.count; i++)
            for (int j = 0; j < inputs.count; j++) {
                int p0 = bands.begin(i), p1 = bands.end(i), c0 = inputs.begin(j), c1 = inputs.end(j);
                float* columns = thread_floats();  // (p1 - p0, 9, O)
                im2col(columns, dout, p0, p1, 0, 9 * O, H, W, O);
                for (int tap = 0; tap < 9; tap++)
                    matmul(dx + (size_t)p0 * C + c0, columns + tap * O, w + (8 - tap) * C + c0, p1 - p0,
                           c1 - c0, O, C, 9 * O, 9 * C, false, false, tap > 0);
            }
    }
    PROFILE("3x3 dW", convolution_work((double)B * H * W, 9, C, O, sizeof(float)));
    // Each thread owns some columns of dw and walks over all pixels: no partial sums to add up.
    Pieces owned = cut(9 * C, 96);
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < owned.count; i++) {
        int j0 = owned.begin(i), n = owned.end(i) - j0;
        float* columns = thread_floats();  // (p1 - p0, n)
        for (int p0 = 0; p0 < B * H * W; p0 += 2 * KC) {
            int p1 = std::min(p0 + 2 * KC, B * H * W);
            im2col(columns, x, p0, p1, j0, j0 + n, H, W, C);
            matmul(dw + j0, dout + (size_t)p0 * O, columns, O, n, p1 - p0, 9 * C, O, n, true, false, true);
        }
    }
}

// ---- group norm + SiLU ------------------------------------------------------------------------------------

// A work item: some whole groups of one image, as one or two runs of channels, one a tensor.
struct NormRun {
    const float* x;  // the run's first channel at the image's first pixel
    int stride;      // channels of its tensor
    int c0, n;       // its first channel within the concatenation, and how many
};
struct NormItem {
    NormRun runs[2];
    int b, g0, g1, group;  // group: channels in one
};
enum { NORM_CHANNELS = 64 };  // channels an item aims at

static Pieces norm_pieces(int C, int C2, int G) {
    return cut(G, std::max(1, NORM_CHANNELS / ((C + C2) / G)));
}

static NormItem norm_item(const Pieces& groups, int b, int piece, const float* x, const float* x2, int T,
                          int C, int C2, int G) {
    NormItem item;
    item.b = b, item.g0 = groups.begin(piece), item.g1 = groups.end(piece), item.group = (C + C2) / G;
    int c0 = item.g0 * item.group, c1 = item.g1 * item.group;
    item.runs[0] = {x + (size_t)b * T * C + c0, C, c0, std::max(0, std::min(c1, C) - c0)};
    int first = std::max(c0, C);
    item.runs[1] = {C2 ? x2 + (size_t)b * T * C2 + (first - C) : nullptr, C2, first, std::max(0, c1 - first)};
    return item;
}

// Sums over the image's pixels: accumulate(sum, row, c0, n, t) adds pixel t's channels [c0, c0 + n) to the
// SUMS rows of sum, short float sums that are then added up in double. sums (SUMS, channels of the item).
template <int SUMS, typename Accumulate>
static void norm_reduce(double* sums, const NormItem& item, int T, Accumulate accumulate) {
    int channels = (item.g1 - item.g0) * item.group;
    for (const NormRun& run : item.runs)
        for (int start = 0; start < run.n; start += NORM_CHANNELS) {
            int n = std::min((int)NORM_CHANNELS, run.n - start), c0 = run.c0 + start;
            double total[SUMS][NORM_CHANNELS] = {};
            for (int t0 = 0; t0 < T; t0 += 64) {
                float sum[SUMS][NORM_CHANNELS] = {};
                for (int t = t0; t < std::min(t0 + 64, T); t++)
                    accumulate(sum, run.x + (size_t)t * run.stride + start, c0, n, t);
                for (int i = 0; i < SUMS; i++)
                    for (int c = 0; c < n; c++) total[i][c] += sum[i][c];
            }
            for (int i = 0; i < SUMS; i++)
                for (int c = 0; c < n; c++) sums[i * channels + c0 + c - item.g0 * item.group] = total[i][c];
        }
}

// The affine map of each channel of the item: y = x * scale + shift.
static void norm_affine(float* scale, float* shift, const NormItem& item, const float* mean,
                        const float* rstd, const float* w, const float* bias, int G) {
    for (int g = item.g0; g < item.g1; g++)
        for (int c = g * item.group; c < (g + 1) * item.group; c++) {
            int i = c - item.g0 * item.group;
            scale[i] = rstd[item.b * G + g] * w[c];
            shift[i] = bias[c] - mean[item.b * G + g] * scale[i];
        }
}

// out from stored statistics; backward calls it to make again what forward did not keep.
static void groupnorm_apply_item(float* out, const NormItem& item, const float* mean, const float* rstd,
                                 const float* w, const float* bias, int T, int channels, int G, bool silu,
                                 float* scale, float* shift) {
    norm_affine(scale, shift, item, mean, rstd, w, bias, G);
    int base = item.g0 * item.group;
    for (const NormRun& run : item.runs)
        for (int t = 0; run.n && t < T; t++) {
            const float* row = run.x + (size_t)t * run.stride;
            float* target = out + ((size_t)item.b * T + t) * channels + run.c0;
            const float *s = scale + run.c0 - base, *h = shift + run.c0 - base;
            if (silu)
#pragma omp simd
                for (int c = 0; c < run.n; c++) {
                    float y = row[c] * s[c] + h[c];
                    target[c] = y * sigmoid(y);
                }
            else
#pragma omp simd
                for (int c = 0; c < run.n; c++) target[c] = row[c] * s[c] + h[c];
        }
}

static void groupnorm_forward(float* out, float* mean, float* rstd, const float* x, const float* x2,
                              const float2*, const float2*, const float* w, const float* bias, int B, int T,
                              int C, int C2, int G, bool silu) {
    PROFILE("group norm forward", {0, 2.0 * sizeof(floatX) * B * T * (C + C2)});
    Pieces groups = norm_pieces(C, C2, G);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++)
        for (int piece = 0; piece < groups.count; piece++) {
            NormItem item = norm_item(groups, b, piece, x, x2, T, C, C2, G);
            int channels = (item.g1 - item.g0) * item.group, base = item.g0 * item.group;
            float* room = thread_floats();
            float *center = room, *scale = room + channels, *shift = room + 2 * channels;
            double* sums = (double*)(room + 4 * channels);
            norm_reduce<1>(sums, item, T, [](float sum[][NORM_CHANNELS], const float* row, int, int n, int) {
#pragma omp simd
                for (int c = 0; c < n; c++) sum[0][c] += row[c];
            });
            for (int g = item.g0; g < item.g1; g++) {
                double total = 0;
                for (int c = g * item.group; c < (g + 1) * item.group; c++) total += sums[c - base];
                mean[b * G + g] = (float)(total / ((double)item.group * T));
                for (int c = g * item.group; c < (g + 1) * item.group; c++)
                    center[c - base] = mean[b * G + g];
            }
            norm_reduce<1>(sums, item, T,
                           [=](float sum[][NORM_CHANNELS], const float* row, int c0, int n, int) {
                               const float* middle = center + c0 - base;
#pragma omp simd
                               for (int c = 0; c < n; c++)
                                   sum[0][c] += (row[c] - middle[c]) * (row[c] - middle[c]);
                           });
            for (int g = item.g0; g < item.g1; g++) {
                double squares = 0;
                for (int c = g * item.group; c < (g + 1) * item.group; c++) squares += sums[c - base];
                rstd[b * G + g] = (float)(1.0 / sqrt(squares / ((double)item.group * T) + NORM_EPS));
            }
            groupnorm_apply_item(out, item, mean, rstd, w, bias, T, C + C2, G, silu, scale, shift);
        }
}

static void groupnorm_apply(float* out, const float* mean, const float* rstd, const float* x, const float* x2,
                            const float* w, const float* bias, int B, int T, int C, int C2, int G,
                            bool silu) {
    PROFILE("group norm apply", {0, 2.0 * sizeof(floatX) * B * T * (C + C2)});
    Pieces groups = norm_pieces(C, C2, G);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++)
        for (int piece = 0; piece < groups.count; piece++) {
            NormItem item = norm_item(groups, b, piece, x, x2, T, C, C2, G);
            int channels = (item.g1 - item.g0) * item.group;
            float* room = thread_floats();
            groupnorm_apply_item(out, item, mean, rstd, w, bias, T, C + C2, G, silu, room, room + channels);
        }
}

static void groupnorm_backward(float* dx, float* dx2, float* dw, float* dbias, float2* sums,
                               const float* dout, const float* dresidual, const float* mean,
                               const float* rstd, const float* x, const float* x2, const float* w,
                               const float* bias, int B, int T, int C, int C2, int G, bool silu,
                               bool accumulate) {
    PROFILE("group norm backward",
            {0, (3.0 + (dresidual != nullptr) + accumulate) * sizeof(floatX) * B * T * (C + C2)});
    Pieces groups = norm_pieces(C, C2, G);
    int K = C + C2;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++)
        for (int piece = 0; piece < groups.count; piece++) {
            NormItem item = norm_item(groups, b, piece, x, x2, T, C, C2, G);
            int channels = (item.g1 - item.g0) * item.group, base = item.g0 * item.group;
            float* room = thread_floats();
            float *scale = room, *shift = room + channels, *slope = room + 2 * channels,
                  *offset = room + 3 * channels;
            double* totals = (double*)(room + 4 * channels);
            norm_affine(scale, shift, item, mean, rstd, w, bias, G);
            for (int g = item.g0; g < item.g1; g++)
                for (int c = g * item.group; c < (g + 1) * item.group; c++)  // x^ = x slope + offset
                    slope[c - base] = rstd[b * G + g], offset[c - base] = -mean[b * G + g] * rstd[b * G + g];
            // dy of pixel t's channels [c0, c0 + n)
            auto dy_row = [=](float* dy, const float* row, int c0, int n, int t) {
                const float *upstream = dout + ((size_t)b * T + t) * K + c0, *s = scale + c0 - base,
                            *h = shift + c0 - base;
                if (silu)
#pragma omp simd
                    for (int c = 0; c < n; c++) dy[c] = upstream[c] * silu_gradient(row[c] * s[c] + h[c]);
                else
#pragma omp simd
                    for (int c = 0; c < n; c++) dy[c] = upstream[c];
            };
            norm_reduce<2>(totals, item, T,
                           [=](float sum[][NORM_CHANNELS], const float* row, int c0, int n, int t) {
                               float dy[NORM_CHANNELS];
                               const float *s = slope + c0 - base, *h = offset + c0 - base;
                               dy_row(dy, row, c0, n, t);
#pragma omp simd
                               for (int c = 0; c < n; c++)
                                   sum[0][c] += dy[c], sum[1][c] += dy[c] * (row[c] * s[c] + h[c]);
                           });
            float2* sum = sums + (size_t)b * K;
            for (int c = 0; c < channels; c++)
                sum[base + c] = {(float)totals[c], (float)totals[channels + c]};
            // dx = scale dy - (x alpha + beta), from the group's two sums
            float *alpha = slope, *beta = offset;
            for (int g = item.g0; g < item.g1; g++) {
                double a = 0, q = 0;
                for (int c = g * item.group; c < (g + 1) * item.group; c++)
                    a += (double)w[c] * sum[c].x, q += (double)w[c] * sum[c].y;
                double n = (double)item.group * T, r = rstd[b * G + g], m = mean[b * G + g];
                for (int c = g * item.group; c < (g + 1) * item.group; c++) {
                    alpha[c - base] = (float)(r * r * q / n);
                    beta[c - base] = (float)(r * (a - r * m * q) / n);
                }
            }
            for (int r = 0; r < 2; r++)
                for (int start = 0; start < item.runs[r].n; start += NORM_CHANNELS) {
                    const NormRun& run = item.runs[r];
                    int n = std::min((int)NORM_CHANNELS, run.n - start), c0 = run.c0 + start;
                    const float *s = scale + c0 - base, *a = alpha + c0 - base, *h = beta + c0 - base;
                    for (int t = 0; t < T; t++) {
                        float dy[NORM_CHANNELS];
                        const float* row = run.x + (size_t)t * run.stride + start;
                        size_t at = ((size_t)b * T + t) * run.stride + c0 - (r ? C : 0);
                        float* target = (r ? dx2 : dx) + at;
                        dy_row(dy, row, c0, n, t);
#pragma omp simd
                        for (int c = 0; c < n; c++) dy[c] = s[c] * dy[c] - (row[c] * a[c] + h[c]);
                        if (dresidual)
#pragma omp simd
                            for (int c = 0; c < n; c++) dy[c] += dresidual[at + c];
                        if (accumulate)
#pragma omp simd
                            for (int c = 0; c < n; c++) target[c] += dy[c];
                        else
                            memcpy(target, dy, n * sizeof(float));
                    }
                }
        }
#pragma omp parallel for
    for (int c = 0; c < K; c++) {
        double scale_gradient = 0, shift_gradient = 0;
        for (int b = 0; b < B; b++)
            shift_gradient += sums[(size_t)b * K + c].x, scale_gradient += sums[(size_t)b * K + c].y;
        dw[c] += (float)scale_gradient, dbias[c] += (float)shift_gradient;
    }
}

// ---- attention --------------------------------------------------------------------------------------------

static_assert(2 * MAX_ATTENTION_SIZE * MAX_ATTENTION_SIZE <= THREAD_FLOATS,
              "two rows of scores fit a thread's room");

// Rows of the score matrix that a thread holds at a time.
static int attention_rows(int T) { return std::max(1, std::min(64, (int)THREAD_FLOATS / (2 * T))); }

static void attention_forward(float* out, float* lse, const float* qkv, int B, int T, int C, int heads) {
    PROFILE("attention forward", {4.0 * B * T * T * C, 4.0 * sizeof(floatX) * B * T * C});
    int d = C / heads, R = attention_rows(T);
    float scale = 1.0f / sqrtf((float)d);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++)
        for (int head = 0; head < heads; head++) {
            const float *q = qkv + (size_t)b * T * 3 * C + head * d, *k = q + C, *v = q + 2 * C;
            float* scores = thread_floats();  // (rows, T)
            for (int t0 = 0; t0 < T; t0 += R) {
                int rows = std::min(R, T - t0);
                matmul(scores, q + (size_t)t0 * 3 * C, k, rows, T, d, T, 3 * C, 3 * C, false, true, false);
                for (int i = 0; i < rows; i++) {
                    float* s = scores + (size_t)i * T;
                    float top = -FLT_MAX, sum = 0;
                    for (int j = 0; j < T; j++) top = s[j] > top ? s[j] : top;
#pragma omp simd reduction(+ : sum)
                    for (int j = 0; j < T; j++) sum += s[j] = fast_exp(scale * (s[j] - top));
                    float inverse = 1.0f / sum;
#pragma omp simd
                    for (int j = 0; j < T; j++) s[j] *= inverse;
                    lse[((size_t)b * heads + head) * T + t0 + i] = scale * top + logf(sum);
                }
                matmul(out + ((size_t)b * T + t0) * C + head * d, scores, v, rows, d, T, C, T, 3 * C, false,
                       false, false);
            }
        }
}

static void attention_backward(float* dqkv, const float* dout, const float* out, const float* lse,
                               const float* qkv, int B, int T, int C, int heads) {
    PROFILE("attention backward", {8.0 * B * T * T * C, 8.0 * sizeof(floatX) * B * T * C});
    int d = C / heads, R = attention_rows(T);
    float scale = 1.0f / sqrtf((float)d);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < B; b++)
        for (int head = 0; head < heads; head++) {
            size_t at = (size_t)b * T * 3 * C + head * d;
            const float *q = qkv + at, *k = q + C, *v = q + 2 * C;
            float *dq = dqkv + at, *dk = dq + C, *dv = dq + 2 * C;
            float *p = thread_floats(), *ds = p + (size_t)R * T;  // (rows, T) each
            for (int t0 = 0; t0 < T; t0 += R) {
                int rows = std::min(R, T - t0);
                const float *q_rows = q + (size_t)t0 * 3 * C,
                            *dout_rows = dout + ((size_t)b * T + t0) * C + head * d;
                const float* out_rows = out + ((size_t)b * T + t0) * C + head * d;
                matmul(p, q_rows, k, rows, T, d, T, 3 * C, 3 * C, false, true, false);
                matmul(ds, dout_rows, v, rows, T, d, T, C, 3 * C, false, true, false);
                for (int i = 0; i < rows; i++) {
                    float D = 0, normaliser = lse[((size_t)b * heads + head) * T + t0 + i];
                    for (int j = 0; j < d; j++)
                        D += dout_rows[(size_t)i * C + j] * out_rows[(size_t)i * C + j];
                    float *p_row = p + (size_t)i * T, *ds_row = ds + (size_t)i * T;
#pragma omp simd
                    for (int j = 0; j < T; j++) {
                        p_row[j] = fast_exp(scale * p_row[j] - normaliser);
                        ds_row[j] = scale * p_row[j] * (ds_row[j] - D);
                    }
                }
                matmul(dq + (size_t)t0 * 3 * C, ds, k, rows, d, T, 3 * C, T, 3 * C, false, false, false);
                matmul(dk, ds, q_rows, T, d, rows, 3 * C, T, 3 * C, true, false, t0 > 0);
                matmul(dv, p, dout_rows, T, d, rows, 3 * C, T, C, true, false, t0 > 0);
            }
        }
}

// ---- up- and down-sampling --------------------------------------------------------------------------------

static void repeat2x2(float* out, const float* x, int B, int H, int W, int C, float factor, bool accumulate) {
    PROFILE("resampling", {0, (accumulate ? 9.0 : 5.0) * sizeof(floatX) * B * H * W * C});
#pragma omp parallel for
    for (int row = 0; row < B * 2 * H; row++)
        for (int column = 0; column < 2 * W; column++) {
            const float* source = x + ((size_t)(row / 2) * W + column / 2) * C;
            float* target = out + ((size_t)row * 2 * W + column) * C;
#pragma omp simd
            for (int c = 0; c < C; c++) target[c] = (accumulate ? target[c] : 0.0f) + factor * source[c];
        }
}
static void sum2x2(float* out, const float* x, int B, int H, int W, int C, float factor, bool accumulate) {
    PROFILE("resampling", {0, (accumulate ? 6.0 : 5.0) * sizeof(floatX) * B * H * W * C});
#pragma omp parallel for
    for (int row = 0; row < B * H; row++)
        for (int column = 0; column < W; column++) {
            const float *top = x + ((size_t)row * 2 * 2 * W + 2 * column) * C,
                        *bottom = top + (size_t)2 * W * C;
            float* target = out + ((size_t)row * W + column) * C;
#pragma omp simd
            for (int c = 0; c < C; c++)
                target[c] = (accumulate ? target[c] : 0.0f) +
                            factor * ((top[c] + top[C + c]) + (bottom[c] + bottom[C + c]));
        }
}
static void upsample_forward(float* out, const float* x, int B, int H, int W, int C) {
    repeat2x2(out, x, B, H, W, C, 1.0f, false);
}
static void upsample_backward(float* dx, const float* dout, int B, int H, int W, int C, bool accumulate) {
    sum2x2(dx, dout, B, H, W, C, 1.0f, accumulate);
}
static void downsample_forward(float* out, const float* x, int B, int H, int W, int C) {
    sum2x2(out, x, B, H / 2, W / 2, C, 0.25f, false);
}
static void downsample_backward(float* dx, const float* dout, int B, int H, int W, int C, bool accumulate) {
    repeat2x2(dx, dout, B, H / 2, W / 2, C, 0.25f, accumulate);
}

// ---- loss -------------------------------------------------------------------------------------------------

static void mse(float* losses, float* dout, const float* out, const float* target, const int* timesteps,
                const float* weights, int B, int n, size_t total) {
    PROFILE("loss", {0, (sizeof(float) + (dout ? 2.0 : 1.0) * sizeof(floatX)) * B * n});
    int parts = loss_parts(n);
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int part = 0; part < parts; part++) {
            float scale = (float)(2.0 / (double)total) * (weights ? weights[timesteps[b]] : 1.0f);
            size_t first = (size_t)b * n, end = first + std::min((part + 1) * LOSS_CHUNK, n);
            double sum = 0;
            for (size_t i = first + part * LOSS_CHUNK; i < end; i++) {
                float difference = out[padded_at(i)] - target[i];
                sum += (double)difference * difference;
                if (dout) set_padded(dout, i, scale * difference);
            }
            losses[b * parts + part] = (float)sum;
        }
}

// ---- noise and samplers -----------------------------------------------------------------------------------

static void add_noise(float* x_t, float* target, const float* images, const int* timesteps,
                      const float* signal, const float* noise, int B, int H, int W, int predict,
                      uint32_t seed, Stream stream, uint32_t first, float offset, const StepState* state) {
    PROFILE("noising", {0, (2.0 * sizeof(float) + sizeof(floatX)) * B * IMAGE_CHANNELS * H * W});
    int elements = IMAGE_CHANNELS * H * W;
    uint32_t step = state ? (uint32_t)state->step : 0;
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int quad = 0; quad < (elements + 3) / 4; quad++) {
            float eps[4], shift[4] = {}, a = signal[timesteps[b]], s = noise[timesteps[b]];
            random_normals(eps, seed, stream, quad, first + b, step);
            if (offset > 0) random_normals(shift, seed, STREAM_OFFSET, 0, first + b, step);
            for (int e = 4 * quad; e < std::min(4 * quad + 4, elements); e++) {
                float x0 = images[(size_t)b * elements + e], n = eps[e % 4] + offset * shift[e / (H * W)];
                size_t at = ((size_t)b * H * W + e % (H * W)) * IMAGE_CHANNELS + e / (H * W);
                set_padded(x_t, at, a * x0 + s * n);
                target[at] = target_of(predict, x0, n, a, s);
            }
        }
}

static void sampler_start(float* x, float* input, const PictureNoise* begins, int B, int H, int W) {
    int elements = IMAGE_CHANNELS * H * W;
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int quad = 0; quad < (elements + 3) / 4; quad++) {
            float normal[4], other[4] = {};
            PictureNoise from = begins[b];
            random_normals(normal, from.seed, STREAM_SAMPLER, quad, 0, 0);
            if (from.other_weight != 0) random_normals(other, from.other, STREAM_SAMPLER, quad, 0, 0);
            for (int e = 4 * quad; e < std::min(4 * quad + 4, elements); e++) {
                size_t at = ((size_t)b * H * W + e % (H * W)) * IMAGE_CHANNELS + e / (H * W);
                x[at] = from.weight * normal[e % 4] + from.other_weight * other[e % 4];
                set_padded(input, at, x[at]);
            }
        }
}

static void sampler_limits(float* limits, const float* x, const float* out, SamplerStep s, int B, int H,
                           int W) {
    int elements = IMAGE_CHANNELS * H * W;
#pragma omp parallel for
    for (int b = 0; b < B; b++) {
        uint32_t found = 0;
        int rank = percentile_rank(elements);  // among what agrees with the bits found
        for (int shift = 24; shift >= 0; shift -= 8) {
            int counts[256] = {}, digit = 0;
            for (size_t i = (size_t)b * elements; i < (size_t)(b + 1) * elements; i++) {
                uint32_t bits = magnitude_bits(predicted_x0(s, x[i], out[padded_at(i)]));
                if ((bits ^ found) >> shift < 256) counts[bits >> shift & 255]++;
            }
            while (rank >= counts[digit]) rank -= counts[digit++];
            found |= (uint32_t)digit << shift;
        }
        limits[b] = limit_of_bits(found);
    }
}

static void sampler_step(float* x, float* saved, float* input, const float* out, const float* limits,
                         const PictureNoise* begins, SamplerStep s, int B, int H, int W, uint32_t call) {
    int elements = IMAGE_CHANNELS * H * W;
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int quad = 0; quad < (elements + 3) / 4; quad++) {
            float normal[4] = {0};
            if (s.sigma > 0) random_normals(normal, begins[b].seed, STREAM_SAMPLER, quad, 0, call);
            for (int e = 4 * quad; e < std::min(4 * quad + 4, elements); e++) {
                size_t at = ((size_t)b * H * W + e % (H * W)) * IMAGE_CHANNELS + e / (H * W);
                float x0 = thresholded_x0(s, x[at], out[padded_at(at)], limits[b]), before = x[at];
                x[at] = s.to_x0 * x0 + s.to_x * before + s.to_saved * saved[at] + s.sigma * normal[e % 4];
                set_padded(input, at, x[at]);
                saved[at] = s.save_x0 * x0 + s.save_x * before;
            }
        }
}

// ---- optimiser --------------------------------------------------------------------------------------------

static void squared_norm(float* parts, const float* x, size_t n) {
    PROFILE("gradient norm", {0, (double)sizeof(float) * n});
    int chunks = (int)((n + NORM_CHUNK - 1) / NORM_CHUNK);
#pragma omp parallel for
    for (int chunk = 0; chunk < chunks; chunk++) {
        double sum = 0;
        for (size_t i = (size_t)chunk * NORM_CHUNK; i < std::min((size_t)(chunk + 1) * NORM_CHUNK, n);) {
            float part[16] = {0};
            size_t end = std::min(std::min(i + 1024, (size_t)(chunk + 1) * NORM_CHUNK), n);
            for (; i + 16 <= end; i += 16)
                for (int lane = 0; lane < 16; lane++) part[lane] += x[i + lane] * x[i + lane];
            for (; i < end; i++) part[0] += x[i] * x[i];
            for (float p : part) sum += p;
        }
        parts[chunk] = (float)sum;
    }
}

static void adamw(float* w, Emas emas, floatX*, float* m, float* v, const float* gradient,
                  const uint8_t* decays, size_t n, const StepState* state) {
    PROFILE("AdamW", {0, adamw_bytes(emas.count(), n)});
    AdamW a = state->update;
    if (!state->accepted) return;
    float step = a.lr / a.correction1, root = sqrtf(a.correction2), keep = 1.0f - a.lr * a.weight_decay;
#pragma omp parallel for
    for (size_t first = 0; first < n; first += DECAY_CHUNK) {
        size_t end = std::min(first + DECAY_CHUNK, n);
        float decay = decays[first / DECAY_CHUNK] ? keep : 1.0f;
#pragma omp simd
        for (size_t i = first; i < end; i++) {
            float g = gradient[i] * a.clip;
            m[i] = a.beta1 * m[i] + (1.0f - a.beta1) * g;
            v[i] = a.beta2 * v[i] + (1.0f - a.beta2) * g * g;
            w[i] = w[i] * decay - step * m[i] / (sqrtf(v[i]) / root + a.eps);
        }
        for (int k = 0; k < emas.count(); k++) {
            float *ema = emas.of[k], weight = a.ema_weight[k];
#pragma omp simd
            for (size_t i = first; i < end; i++) ema[i] += weight * (w[i] - ema[i]);
        }
    }
}

// ---- the first and the last launch of a step --------------------------------------------------------------

static void begin_step(StepState* state, int* timesteps, int* sources, BatchSource source, Hyper hyper) {
    state->update = adamw_at(hyper, state->step, state->step - state->history.skipped);
    for (int b = 0; b < source.batch; b++) choose_sample(timesteps + b, sources + b, source, b, state->step);
}
static void load_images(float* images, const int* sources, BatchSource source, int B) {
    int elements = IMAGE_CHANNELS * source.size * source.size;
#pragma omp parallel for
    for (int b = 0; b < B; b++)
        for (int e = 0; e < elements; e++) images[(size_t)b * elements + e] = pixel_of(source, sources[b], e);
}
static void finish_step(StepState* state, BatchLoss batch, const float* norm_parts, size_t parameters,
                        Hyper hyper) {
    double loss = 0, norm = 0, quartiles[4] = {0};
    int parts = loss_parts(batch.elements);
    for (int& count : state->quartile_counts) count = 0;
    for (int b = 0; b < batch.batch; b++) {
        double sum = 0;
        for (int part = 0; part < parts; part++) sum += batch.parts[b * parts + part];
        int t = batch.timesteps[b], quartile = quartile_of(t, batch.diffusion_steps);
        loss += batch.weights[t] * sum;
        quartiles[quartile] += sum, state->quartile_counts[quartile]++;
    }
    for (int q = 0; q < 4; q++) state->quartile_sums[q] = (float)(quartiles[q] / batch.elements);
    for (size_t i = 0; i < (parameters + NORM_CHUNK - 1) / NORM_CHUNK; i++) norm += norm_parts[i];
    StepState* result = state + 1 + state->step % RESULT_SLOTS;
    conclude_step(state, (float)(loss / ((double)batch.batch * batch.elements)), (float)sqrt(norm), hyper);
    *result = *state;
}
static void fill_timesteps(int* timesteps, int B, int value) {
    for (int b = 0; b < B; b++) timesteps[b] = value;
}

#ifndef __CUDACC__
static void channel_moments(float2*, const float*, int, int, int) {}
#endif

}  // namespace cpu
#endif  // CPU_LAYERS

#ifndef __CUDACC__
static std::string backend_name() {
#ifdef OPENBLAS
    const char* products = "OpenBLAS";
#else
    const char* products = "its own loop";
#endif
    return text("the CPU: fp32, %s, matrix products by %s, vectors of %d",
                counted(omp_get_max_threads(), "thread").c_str(), products, (int)cpu::VECTOR);
}
static size_t workspace_bytes() { return cpu::cpu_workspace_bytes(); }
static bool allocate_workspace() { return cpu::allocate_cpu_workspace(); }
#endif

// ===========================================================================================================
// 12  LAYERS ON THE GPU
// ===========================================================================================================

#ifdef __CUDACC__

// ---- the machine ------------------------------------------------------------------------------------------

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
#ifndef LAUNCH_CHECK  // dev/profile.cu counts launches
#define LAUNCH_CHECK() CUDA_CHECK(cudaGetLastError())
#endif
static void cuda_check(cudaError_t status, const char* expression, const char* file, int line) {
    if (status != cudaSuccess)
        fail("the GPU reported '%s' at %s:%d (%s)", cudaGetErrorString(status), file, line, expression);
}

// A stream, and the workspace of its launchers, for the partial sums of split reductions. A launcher
// splits no further than fits and gives back what it took; the stream's next launch may overwrite it.
struct Lane {
    cudaStream_t stream;
    Arena workspace;
};
static Lane main_lane, side_lane, *lane = &main_lane;        // lane: the one that launches go to now
static const size_t GPU_WORKSPACE_BYTES = (size_t)64 << 20;  // of a lane
// While a Borrowed lives, launchers may take of the lane's workspace; its end gives all of that back.
struct Borrowed {
    size_t used = lane->workspace.used;
    Borrowed() {}
    Borrowed(const Borrowed&) = delete;
    ~Borrowed() { lane->workspace.used = used; }
    static size_t left() { return lane->workspace.capacity - lane->workspace.used; }  // bytes
};
enum { SIDE_EVENTS = 4 };  // an older call is waited for by the event of a newer one, which has its slot
static cudaEvent_t side_begins, side_ended[SIDE_EVENTS];  // of the last calls of backend_aside
static int side_calls, side_joined;  // how many calls there were; how many the main stream has waited for
static int gpu_multiprocessors;
static cudaEvent_t gpu_marks[RESULT_SLOTS];

static void backend_init() {
    int count = 0, driver = 0;  // 0: there is no driver
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver)
        fail(
            "the GPU's driver is older than this program's CUDA %d.%d; update the driver, or build for the "
            "CPU: make train_unet DEVICE=cpu",
            CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (status != cudaSuccess || !count)
        fail(
            "this program was built for a GPU and finds none (%s); build it for the CPU: make train_unet "
            "DEVICE=cpu",
            cudaGetErrorString(status));
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    if (properties.major < 8)
        fail(
            "%s is too old: compute capability %d.%d, and 8.0 is the least; build for the CPU: make "
            "train_unet DEVICE=cpu",
            properties.name, properties.major, properties.minor);
    gpu_multiprocessors = properties.multiProcessorCount;
    for (Lane* each : {&main_lane, &side_lane})
        CUDA_CHECK(cudaStreamCreateWithFlags(&each->stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&side_begins, cudaEventDisableTiming));
    for (cudaEvent_t& event : side_ended)
        CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (cudaEvent_t& mark : gpu_marks) CUDA_CHECK(cudaEventCreate(&mark));
}
static std::string backend_name() {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    return text("%s: %s", properties.name, sizeof(floatX) == 2 ? "bf16" : "fp32");
}
static void* backend_allocate(size_t bytes) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError();  // not to be found by the next check
    return nullptr;
}
static void backend_free(void* memory) { CUDA_CHECK(cudaFree(memory)); }
static void* backend_allocate_host(size_t bytes) {
    void* memory = nullptr;
    CUDA_CHECK(cudaMallocHost(&memory, bytes));
    return memory;
}
static void backend_free_host(void* memory) { CUDA_CHECK(cudaFreeHost(memory)); }
static void backend_zero(void* memory, size_t bytes) {
    PROFILE("zeroing", {0, (double)bytes});
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, main_lane.stream));
}
static void backend_copy(void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, main_lane.stream));
}
static void backend_upload_async(void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, main_lane.stream));
}
static void backend_upload(void* to, const void* from, size_t bytes) {
    backend_upload_async(to, from, bytes);
    CUDA_CHECK(cudaStreamSynchronize(main_lane.stream));
}
static void backend_download_async(void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, main_lane.stream));
}
static void backend_download(void* to, const void* from, size_t bytes) {
    backend_download_async(to, from, bytes);
    CUDA_CHECK(cudaStreamSynchronize(main_lane.stream));
}
template <typename Launches>
static int backend_aside(Launches launches) {
    CUDA_CHECK(cudaEventRecord(side_begins, main_lane.stream));
    CUDA_CHECK(cudaStreamWaitEvent(side_lane.stream, side_begins, 0));
    ASSERT(lane == &main_lane);
    lane = &side_lane;
    launches();
    lane = &main_lane;
    CUDA_CHECK(cudaEventRecord(side_ended[side_calls % SIDE_EVENTS], side_lane.stream));
    return ++side_calls;
}
static void backend_join(int call) {
    call = std::min(call, side_calls);
    if (call <= side_joined) return;
    CUDA_CHECK(cudaStreamWaitEvent(main_lane.stream, side_ended[(call - 1) % SIDE_EVENTS], 0));
    side_joined = call;
}

template <typename Launches>
static void backend_replay(Recording* recording, Launches launches) {
    if (recording->runs++ == 0) {
        launches();
        return;
    }
    if (!recording->graph) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamBeginCapture(main_lane.stream, cudaStreamCaptureModeThreadLocal));
        launches();
        CUDA_CHECK(cudaStreamEndCapture(main_lane.stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate((cudaGraphExec_t*)&recording->graph, graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaGraphLaunch((cudaGraphExec_t)recording->graph, main_lane.stream));
}
static void backend_forget(Recording* recording) {
    if (recording->graph) CUDA_CHECK(cudaGraphExecDestroy((cudaGraphExec_t)recording->graph));
    *recording = Recording();
}
static void backend_mark(int slot) { CUDA_CHECK(cudaEventRecord(gpu_marks[slot], main_lane.stream)); }
static void backend_await(int slot) { CUDA_CHECK(cudaEventSynchronize(gpu_marks[slot])); }
static float backend_milliseconds(int first, int last) {
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, gpu_marks[first], gpu_marks[last]));
    return ms;
}
// What a multiprocessor does in a clock, by NVIDIA's white papers on each architecture, times
// multiprocessors and clock. An H100's clock goes higher than the one behind its data sheet's 989 TFLOP/s
// of the tensor cores: that one counts.
static double backend_peak(std::string* source) {
    static const struct {
        int capability;
        double bf16, fp32;  // operations a clock
        int tensor_khz;     // at most
    } PEAKS[] = {
        {80, 2048, 128, INT_MAX},
        {86, 512, 256, INT_MAX},
        {89, 512, 256, INT_MAX},
        {90, 4096, 256, 1830000},
    };
    cudaDeviceProp properties;
    int khz = 0;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
    bool tensor = sizeof(floatX) == 2;
    for (auto& peak : PEAKS) {
        if (peak.capability != 10 * properties.major + properties.minor) continue;
        khz = tensor ? std::min(khz, peak.tensor_khz) : khz;
        *source = text("%d multiprocessors at %.0f MHz, %s", properties.multiProcessorCount, 1e-3 * khz,
                       tensor ? "dense bf16" : "fp32");
        return 1e-9 * khz * properties.multiProcessorCount * (tensor ? peak.bf16 : peak.fp32);
    }
    return 0;
}

static size_t backend_memory_available() {
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return available;
}

static size_t workspace_bytes() {
    size_t bytes = 2 * GPU_WORKSPACE_BYTES;
#ifdef CPU_LAYERS
    bytes += cpu::cpu_workspace_bytes();
#endif
    return bytes;
}
static bool allocate_workspace() {
#ifdef CPU_LAYERS
    if (!cpu::allocate_cpu_workspace()) return false;
#endif
    for (Lane* each : {&main_lane, &side_lane}) {
        if (!each->workspace.base)
            each->workspace = {(char*)backend_allocate(GPU_WORKSPACE_BYTES), GPU_WORKSPACE_BYTES, 0};
        if (!each->workspace.base) return false;
    }
    return true;
}

namespace gpu {

// ---- what the kernels share -------------------------------------------------------------------------------

enum { VEC = 16 / (int)sizeof(floatX) };  // elements in 16 bytes: 8 in bf16, 4 in fp32

__device__ static inline void unpack(float value[VEC], uint4 bits) {
    const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#ifdef PRECISION_FP32
        value[i] = __uint_as_float(word[i]);
#else
        value[2 * i] = __uint_as_float(word[i] << 16);
        value[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
#endif
    }
}
__device__ static inline uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t*)&pair;
}
__device__ static inline uint4 pack(const float value[VEC]) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#ifdef PRECISION_FP32
        word[i] = __float_as_uint(value[i]);
#else
        word[i] = pack_bf16(value[2 * i], value[2 * i + 1]);
#endif
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}
__device__ static inline void store_pair(floatX* to, float first, float second) {
#ifdef PRECISION_FP32
    *(float2*)to = make_float2(first, second);
#else
    *(uint32_t*)to = pack_bf16(first, second);
#endif
}

__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
// 16 bytes from device memory to shared memory, past the registers; zeros where not `valid`.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>  // groups that may still be under way
__device__ inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#ifndef PRECISION_FP32
// Four 8x8 matrices of bf16; lane l gives the address of row l % 8 of matrix l / 8.
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
// c (16, 8) += a (16, 16) b (16, 8). Lane l holds c's rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the
// next.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// 2^x, and 1 / (1 + e^-x). In bf16 one instruction each for power and reciprocal: errors of 2^-22, far below
// a rounding.
__device__ static inline float exp2_fast(float x) {
#ifdef PRECISION_FP32
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
__device__ static inline float sigmoid(float x) {
#ifdef PRECISION_FP32
    return 1.0f / (1.0f + expf(-x));
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp2_fast(-1.44269504f * x)));
    return y;
#endif
}
// In bf16 by way of sigmoid x = (1 + tanh(x / 2)) / 2, one instruction instead of two: an error of 2^-12,
// below a rounding of what it multiplies.
__device__ static inline float silu_gradient(float x) {
#ifdef PRECISION_FP32
    float s = sigmoid(x);
#else
    float s;
    asm("tanh.approx.f32 %0, %1;" : "=f"(s) : "f"(0.5f * x));
    s = 0.5f + 0.5f * s;
#endif
    return s * (1.0f + x * (1.0f - s));
}

// kernel<<<grid, threads, shared>>>(args...) on lane->stream, in clusters of `cluster` blocks along x.
template <typename... Parameters, typename... Arguments>
static void launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared,
                            int cluster, Arguments... arguments) {
    if (shared > 48 * 1024)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {grid, threads, shared, lane->stream, &attribute, cluster > 1 ? 1u : 0u};
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
    LAUNCH_CHECK();
}
template <typename... Parameters, typename... Arguments>
static void launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared,
                   Arguments... arguments) {
    launch_clusters(kernel, grid, threads, shared, 1, arguments...);
}

// Sum of a block's values in a fixed order, in thread 0. At most 1024 threads, whole warps.
__device__ static inline float block_sum(float value) {
    __shared__ float parts[32];
    for (int step = 16; step; step /= 2) value += __shfl_down_sync(~0u, value, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0.0f;
    if (threadIdx.x < 32)
        for (int step = 16; step; step /= 2) value += __shfl_down_sync(~0u, value, step);
    return value;
}

// to (n) = from (n), rounded to the layers' precision.
__global__ void round_weights_kernel(floatX* to, const float* from, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = (floatX)from[i];
}
static void round_weights(floatX* to, const float* from, size_t n) {
    launch(round_weights_kernel, ceil_div(n, 256), 256, 0, to, from, n);
}

// ---- timestep embedding, SiLU -----------------------------------------------------------------------------

// torch.cat([cos(t * f), sin(t * f)], 1), f_i = max_period^(-i / half). One thread an angle, in double. (B,
// C)
__global__ void timestep_embedding_forward_kernel(floatX* out, const int* t, int B, int C, int max_period) {
    int half = C / 2, n = blockIdx.x * blockDim.x + threadIdx.x, b = n / half, i = n % half;
    if (b >= B) return;
    double sine, cosine;
    sincos(t[b] * exp(-log((double)max_period) * i / half), &sine, &cosine);
    out[(size_t)b * C + i] = (floatX)(float)cosine;
    out[(size_t)b * C + half + i] = (floatX)(float)sine;
}
static void timestep_embedding_forward(floatX* out, const int* t, int B, int C, int max_period) {
    PROFILE("embedding, SiLU", {0, (double)sizeof(floatX) * B * C});
    launch(timestep_embedding_forward_kernel, ceil_div((size_t)B * (C / 2), 64), 64, 0, out, t, B, C,
           max_period);
}

// F.silu(x). One thread an element: the embedding's few thousand.
__global__ void silu_forward_kernel(floatX* out, const floatX* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (floatX)((float)x[i] * sigmoid((float)x[i]));
}
static void silu_forward(floatX* out, const floatX* x, size_t n) {
    PROFILE("embedding, SiLU", {0, 2.0 * sizeof(floatX) * n});
    launch(silu_forward_kernel, ceil_div(n, 256), 256, 0, out, x, n);
}
__global__ void silu_backward_kernel(floatX* dx, const floatX* dout, const floatX* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dx[i] = (floatX)((float)dout[i] * silu_gradient((float)x[i]));
}
static void silu_backward(floatX* dx, const floatX* dout, const floatX* x, size_t n) {
    PROFILE("embedding, SiLU", {0, 3.0 * sizeof(floatX) * n});
    launch(silu_backward_kernel, ceil_div(n, 256), 256, 0, dx, dout, x, n);
}

// ---- group norm + SiLU ------------------------------------------------------------------------------------

// Group norm in streaming passes: every element is read once and written once, 16 bytes at a time, and waits
// in registers. What a pass must know of the rest of its image comes as sums over parts of the image of
// NORM_PART pixels each (only the last has fewer), per channel, because a group may straddle x and x2:
//   moments (B, parts, C): a tensor's mean over the part, and its sum of squares about that mean;
//   sums (B, parts, C + C2): of the gradient dy before the SiLU, and of dy x^.
// The epilogue of the product that writes the tensor leaves them behind, or else channel_moments and
// groupnorm_gradient do. No 16 bytes straddle x and x2: channels come in multiples of 32.
enum {
    NORM_PART_THREADS = 256,                       // a part is read 8 vectors of channels wide,
    NORM_PART_STEP = NORM_PART_THREADS / 8,        // so many pixels at a time,
    NORM_PART_DEPTH = NORM_PART / NORM_PART_STEP,  // so many times
    // Streaming passes, tuned on an H100 at B = 32, all 56 norms forward and backward:
    NORM_THREADS = 512,  // 256: 3% slower
    NORM_BLOCKS = 2,     // on a multiprocessor, all there at once; 4 by turns: forward 20% slower
    NORM_SLAB = 1024,    // bytes of a pixel that are a block's, at most; 512: 2% slower on an H100
    NORM_DEPTH = 4,      // vectors that a thread of the forward pass awaits; 2: 1% slower
};
static_assert(NORM_SLAB / sizeof(floatX) <= NORM_THREADS, "each group of a block needs a thread");

__device__ static inline void norm_parameters(float (&value)[VEC], const float* from) {
#pragma unroll
    for (int i = 0; i < VEC; i += 4) *(float4*)(value + i) = *(const float4*)(from + i);
}

// put(c, sums) for each of the block's channels: a and q, summed over its threads in a fixed order.
template <typename Put>
__device__ static inline void norm_part_sums(float (&a)[VEC], float (&q)[VEC], Put put) {
    __shared__ float2 room[NORM_PART_THREADS / 32][8 * VEC];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        for (int step = 8; step < 32; step *= 2)
            a[i] += __shfl_xor_sync(~0u, a[i], step), q[i] += __shfl_xor_sync(~0u, q[i], step);
        if (lane < 8) room[warp][lane * VEC + i] = make_float2(a[i], q[i]);
    }
    __syncthreads();
    if (threadIdx.x >= 8 * VEC) return;
    float2 total = make_float2(0, 0);
    for (auto& of_warp : room) total.x += of_warp[threadIdx.x].x, total.y += of_warp[threadIdx.x].y;
    put(blockIdx.y * 8 * VEC + threadIdx.x, total);
}

// A thread's vectors of a part of n pixels: in[i] is of pixel threadIdx.x / 8 + i NORM_PART_STEP, in[0] at x.
__device__ static inline void norm_part_load(uint4 in[NORM_PART_DEPTH], const floatX* x, int stride, int n) {
    int r = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < NORM_PART_DEPTH; i++)
        if (r + i * NORM_PART_STEP < n) in[i] = *(const uint4*)(x + i * NORM_PART_STEP * stride);
}

// moments (B, parts, C) = x.mean(1), ((x - x.mean(1)) ** 2).sum(1) of each part of x (B, T, C). Block (part,
// 8 vectors of channels, image); x is read once. Squares are summed about the part's first pixel: over n
// values of which the pivot is one, that is at most n + 1 times the sum about the mean: little cancels.
__global__ void __launch_bounds__(NORM_PART_THREADS)
    channel_moments_kernel(float2* moments, const floatX* x, int T, int C) {
    int t0 = blockIdx.x * NORM_PART, n = min((int)NORM_PART, T - t0), r = threadIdx.x / 8;
    int c = (blockIdx.y * 8 + threadIdx.x % 8) * VEC;
    const floatX* first = x + ((size_t)blockIdx.z * T + t0) * C;
    float sum[VEC] = {}, squares[VEC] = {};
    if (c < C) {
        uint4 in[NORM_PART_DEPTH];
        norm_part_load(in, first + r * C + c, C, n);
        float pivot[VEC], d[VEC];
        unpack(pivot, *(const uint4*)(first + c));
#pragma unroll
        for (int i = 0; i < NORM_PART_DEPTH; i++) {
            if (r + i * NORM_PART_STEP >= n) break;
            unpack(d, in[i]);
#pragma unroll
            for (int e = 0; e < VEC; e++) d[e] -= pivot[e], sum[e] += d[e], squares[e] += d[e] * d[e];
        }
    }
    norm_part_sums(sum, squares, [&](int c, float2 total) {
        if (c >= C) return;
        float shift = total.x / n;
        moments[((size_t)blockIdx.z * gridDim.x + blockIdx.x) * C + c] =
            make_float2((float)first[c] + shift, fmaxf(0, total.y - total.x * shift));
    });
}
static void channel_moments(float2* moments, const floatX* x, int B, int T, int C) {
    PROFILE("group norm sums", {0, 1.0 * sizeof(floatX) * B * T * C});
    launch(channel_moments_kernel, dim3(norm_parts(T), ceil_div(C, 8 * VEC), B), NORM_PART_THREADS, 0,
           moments, x, T, C);
}

// A streaming pass cuts a pixel's channels into slabs of whole 128-byte lines, of which no two blocks write
// the same, and deals an image's pixels out to `ranks` blocks a slab. A slab may hold parts of groups.
struct NormGrid {
    int channels, slabs, ranks;  // of a slab
};
static NormGrid norm_grid(int B, int T, int K, int other_blocks) {
    NormGrid s;
    const int line = 128 / sizeof(floatX);
    s.slabs = ceil_div(K * sizeof(floatX), NORM_SLAB), s.channels = ceil_div(K, s.slabs * line) * line;
    int most = ceil_div((size_t)T * s.channels, NORM_THREADS * VEC);  // a vector a thread
    s.ranks = (NORM_BLOCKS * gpu_multiprocessors - other_blocks) / (B * s.slabs);
    s.ranks = std::max(1, std::min(s.ranks, most));
    return s;
}

// each(i, g) for i < VEC: channel c + i belongs to group g.
template <typename Each>
__device__ static inline void norm_each_channel(int c, int group, Each each) {
    int g = c / group, within = c - g * group;
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        each(i, g);
        if (++within == group) within = 0, g++;
    }
}

// Where a block of such a pass stands, and its thread: every stride-th pixel of image b from t on, and one
// vector of channels, so that what belongs to a channel stays in registers.
struct NormPlace {
    int b, t, stride, c, c0;  // c0: channel c, counted from the first of the block's groups
    int rank, slab;           // the block's; its first channel
    int group, g0, groups;    // channels in a group; the block's first group, and how many there are
    bool second;              // the channels lie in x2
    size_t at, at_joined;     // the thread's first element in its tensor, and in one of C + C2 channels
    int step, step_joined;    // from one of its pixels to the next
    __device__ NormPlace(const NormGrid& s, int block, int T, int C, int C2, int G) {
        int K = C + C2;
        rank = block % s.ranks, slab = block / s.ranks % s.slabs * s.channels, b = block / s.ranks / s.slabs;
        int vectors = min(s.channels, K - slab) / VEC, r = threadIdx.x / vectors, R = NORM_THREADS / vectors;
        c = slab + threadIdx.x % vectors * VEC;
        group = K / G, g0 = slab / group, groups = (slab + vectors * VEC - 1) / group - g0 + 1;
        c0 = c - g0 * group, second = c >= C, t = rank * R + r, stride = R * s.ranks;
        size_t pixel = (size_t)b * T + t;
        at = second ? pixel * C2 + c - C : pixel * C + c, at_joined = pixel * K + c;
        step = stride * (second ? C2 : C), step_joined = stride * K;
        if (r >= R) t = T;  // a thread too many
    }
};

// In thread i < p.groups the sum over group g0 + i of item(part, channel, the group's first channel), in an
// order that the shapes alone decide: a power of 2 of neighbouring threads shares a group. meanwhile() is
// called when the items have come in.
template <typename Item, typename Meanwhile>
__device__ static inline float2 norm_group_sum(const NormPlace& p, int parts, Item item,
                                               Meanwhile meanwhile) {
    __shared__ float2 room[NORM_THREADS];
    int lanes = 1 << (31 - __clz(NORM_THREADS / p.groups)), width = min(lanes, 32), warps = lanes / width;
    int i = threadIdx.x / lanes, lane = threadIdx.x % lanes, c0 = (p.g0 + i) * p.group;
    int part = lane / p.group, c = lane % p.group, part_step = lanes / p.group, c_step = lanes % p.group;
    float2 sum = make_float2(0, 0);
    if (i < p.groups)
#pragma unroll 4
        for (; part < parts; part += part_step) {
            float2 more = item(part, c0 + c, c0);
            sum.x += more.x, sum.y += more.y;
            if ((c += c_step) >= p.group) c -= p.group, part++;
        }
    meanwhile();
    for (int step = width / 2; step; step /= 2)
        sum.x += __shfl_xor_sync(~0u, sum.x, step), sum.y += __shfl_xor_sync(~0u, sum.y, step);
    if (threadIdx.x % width == 0) room[threadIdx.x / width] = sum;
    __syncthreads();
    sum = make_float2(0, 0);
    if ((int)threadIdx.x < p.groups)
        for (int i = threadIdx.x * warps; i < (threadIdx.x + 1) * warps; i++)
            sum.x += room[i].x, sum.y += room[i].y;
    return sum;
}

// F.silu(F.group_norm(cat([x, x2]), G, w, bias)). Device memory: x and x2 in, out out, once each; before that
// each block reads its groups' moments (null, for groupnorm_apply: mean and rstd). They are joined as by
// Chan, Golub and LeVeque (1979), about the mean of the group's first channel and part.
__global__ void __launch_bounds__(NORM_THREADS, NORM_BLOCKS)
    groupnorm_forward_kernel(floatX* out, float* mean, float* rstd, const floatX* x, const floatX* x2,
                             const float2* moments, const float2* moments2, const float* w, const float* bias,
                             int T, int C, int C2, int G, bool silu, NormGrid s) {
    __shared__ float2 statistics[NORM_THREADS];  // mean, rstd
    NormPlace p(s, blockIdx.x, T, C, C2, G);
    const floatX* source = (p.second ? x2 : x) + p.at;
    floatX* target = out + p.at_joined;
    uint4 in[NORM_DEPTH];
    auto load_first = [&] {
#pragma unroll
        for (int i = 0; i < NORM_DEPTH; i++)
            if (p.t + i * p.stride < T) in[i] = *(const uint4*)source, source += p.step;
    };
    mean += p.b * G + p.g0, rstd += p.b * G + p.g0;
    if (!moments) {
        load_first();
        if ((int)threadIdx.x < p.groups)
            statistics[threadIdx.x] = make_float2(mean[threadIdx.x], rstd[threadIdx.x]);
    } else {
        int parts = norm_parts(T);
        auto moment = [&](int part, int c) {
            size_t row = (size_t)p.b * parts + part;
            return c < C ? moments[row * C + c] : moments2[row * C2 + c - C];
        };
        auto item = [&](int part, int c, int c0) {
            float2 m = moment(part, c);
            float d = m.x - moment(0, c0).x, n = min((int)NORM_PART, T - part * NORM_PART);
            return make_float2(n * d, m.y + n * d * d);
        };
        float2 sum = norm_group_sum(p, parts, item, load_first);
        if ((int)threadIdx.x < p.groups) {
            int c0 = (p.g0 + threadIdx.x) * p.group;
            float n = (float)p.group * T, d = sum.x / n, middle = moment(0, c0).x + d;
            float r = rsqrtf(fmaxf(0, sum.y - sum.x * d) / n + NORM_EPS);
            statistics[threadIdx.x] = make_float2(middle, r);
            // Of the slabs that share a group, one writes: their sums may differ in order.
            if (p.rank == 0 && c0 >= p.slab) mean[threadIdx.x] = middle, rstd[threadIdx.x] = r;
        }
    }
    __syncthreads();
    float scale[VEC], shift[VEC];
    norm_parameters(scale, w + p.c), norm_parameters(shift, bias + p.c);
    norm_each_channel(p.c0, p.group, [&](int i, int g) {
        scale[i] *= statistics[g].y, shift[i] -= statistics[g].x * scale[i];
    });
    for (int t = p.t; t < T; t += NORM_DEPTH * p.stride)
#pragma unroll
        for (int i = 0; i < NORM_DEPTH; i++) {
            if (t + i * p.stride >= T) break;
            float y[VEC];
            unpack(y, in[i]);
            if (t + (i + NORM_DEPTH) * p.stride < T) in[i] = *(const uint4*)source, source += p.step;
#pragma unroll
            for (int e = 0; e < VEC; e++) y[e] = y[e] * scale[e] + shift[e];
            if (silu)
#pragma unroll
                for (int e = 0; e < VEC; e++) y[e] *= sigmoid(y[e]);
            *(uint4*)target = pack(y), target += p.step_joined;
        }
}
static void groupnorm_forward(floatX* out, float* mean, float* rstd, const floatX* x, const floatX* x2,
                              const float2* moments, const float2* moments2, const float* w,
                              const float* bias, int B, int T, int C, int C2, int G, bool silu) {
    PROFILE("group norm forward", {0, 2.0 * sizeof(floatX) * B * T * (C + C2)});
    NormGrid s = norm_grid(B, T, C + C2, 0);
    launch(groupnorm_forward_kernel, s.ranks * s.slabs * B, NORM_THREADS, 0, out, mean, rstd, x, x2, moments,
           moments2, w, bias, T, C, C2, G, silu, s);
}
static void groupnorm_apply(floatX* out, const float* mean, const float* rstd, const floatX* x,
                            const floatX* x2, const float* w, const float* bias, int B, int T, int C, int C2,
                            int G, bool silu) {
    PROFILE("group norm apply", {0, 2.0 * sizeof(floatX) * B * T * (C + C2)});
    groupnorm_forward(out, (float*)mean, (float*)rstd, x, x2, nullptr, nullptr, w, bias, B, T, C, C2, G,
                      silu);
}

// The gradient before the SiLU, dy = dnormed * silu'(x scale + shift), and its sums. Blocks as in
// channel_moments. Device memory: x and dnormed in, dy out, once each. dy may be dnormed.
__global__ void __launch_bounds__(NORM_PART_THREADS)
    groupnorm_gradient_kernel(float2* sums, floatX* dy, const floatX* dnormed, const floatX* x,
                              const floatX* x2, const float* mean, const float* rstd, const float* w,
                              const float* bias, int T, int C, int C2, int G, bool silu) {
    int K = C + C2, group = K / G, r = threadIdx.x / 8, c = (blockIdx.y * 8 + threadIdx.x % 8) * VEC;
    int n = min((int)NORM_PART, T - (int)blockIdx.x * NORM_PART), stride = c < C ? C : C2;
    size_t pixel = (size_t)blockIdx.z * T + blockIdx.x * NORM_PART + r, at = pixel * K + c;
    const floatX* source = c < C ? x + pixel * C + c : x2 + pixel * C2 + c - C;
    mean += blockIdx.z * G, rstd += blockIdx.z * G;
    float sum[VEC] = {}, sum_normed[VEC] = {};
    if (c < K) {
        uint4 in[NORM_PART_DEPTH], upstream[NORM_PART_DEPTH];
        norm_part_load(in, source, stride, n), norm_part_load(upstream, dnormed + at, K, n);
        float middle[VEC], scale[VEC], shift[VEC];
        norm_parameters(scale, w + c), norm_parameters(shift, bias + c);
        norm_each_channel(c, group, [&](int i, int g) {
            middle[i] = mean[g], scale[i] *= rstd[g], shift[i] -= middle[i] * scale[i];
        });
#pragma unroll
        for (int i = 0; i < NORM_PART_DEPTH; i++) {
            if (r + i * NORM_PART_STEP >= n) break;
            float value[VEC], d[VEC];
            unpack(value, in[i]), unpack(d, upstream[i]);
            if (silu)
#pragma unroll
                for (int e = 0; e < VEC; e++) d[e] *= silu_gradient(value[e] * scale[e] + shift[e]);
#pragma unroll
            for (int e = 0; e < VEC; e++) sum[e] += d[e], sum_normed[e] += d[e] * (value[e] - middle[e]);
            if (silu || dy != dnormed) *(uint4*)(dy + at + (size_t)i * NORM_PART_STEP * K) = pack(d);
        }
    }
    norm_part_sums(sum, sum_normed, [&](int c, float2 total) {
        if (c < K)
            sums[((size_t)blockIdx.z * gridDim.x + blockIdx.x) * K + c] =
                make_float2(total.x, total.y * rstd[c / group]);
    });
}
static void groupnorm_gradient(floatX* dy, const floatX* dnormed, const Normed& norm, int B, int T) {
    int K = norm.C + norm.C2;
    PROFILE("group norm sums", {0, 3.0 * sizeof(floatX) * B * T * K});
    launch(groupnorm_gradient_kernel, dim3(norm_parts(T), ceil_div(K, 8 * VEC), B), NORM_PART_THREADS, 0,
           norm.sums, dy, dnormed, norm.x, norm.x2, norm.mean, norm.rstd, norm.w, norm.bias, T, norm.C,
           norm.C2, norm.G, norm.silu);
}

// dbias, dw (K) += sums (rows, K).sum(0), channels [32 block, 32 block + 32): a lane a channel, a warp a row.
__device__ static inline void norm_weights(float* dw, float* dbias, const float2* sums, int rows, int K) {
    enum { WARPS = NORM_THREADS / 32 };
    __shared__ float2 room[WARPS][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float2 total = make_float2(0, 0);
#pragma unroll 8
    for (int i = warp; i < rows; i += WARPS) {
        float2 more = sums[(size_t)i * K + c];
        total.x += more.x, total.y += more.y;
    }
    room[warp][lane] = total;
    __syncthreads();
    if (warp > 0) return;
    for (int i = 1; i < WARPS; i++) total.x += room[i][lane].x, total.y += room[i][lane].y;
    dbias[c] += total.x, dw[c] += total.y;
}

// dx = rstd (w dy - (sum w dy + x^ sum w dy x^) / N), + dresidual, + the old dx with `accumulate`. Device
// memory: x, dy and dresidual in, dx out (in and out where it accumulates), once each; before that each block
// reads its groups' sums. dx may be dy or dresidual. The first weight_blocks blocks make dw and dbias.
template <bool RESIDUAL, bool ACCUMULATE>  // as arguments: 2% slower on an H100
__global__ void __launch_bounds__(NORM_THREADS, NORM_BLOCKS)
    groupnorm_backward_kernel(floatX* dx, floatX* dx2, float* dw, float* dbias, const float2* sums,
                              const floatX* dy, const floatX* dresidual, const float* mean, const float* rstd,
                              const floatX* x, const floatX* x2, const float* w, int B, int T, int C, int C2,
                              int G, NormGrid s, int weight_blocks) {
    __shared__ float3 coefficients[NORM_THREADS];  // rstd, alpha, beta
    int K = C + C2, parts = norm_parts(T);
    if ((int)blockIdx.x < weight_blocks) {
        norm_weights(dw, dbias, sums, B * parts, K);
        return;
    }
    NormPlace p(s, blockIdx.x - weight_blocks, T, C, C2, G);
    const floatX *source = (p.second ? x2 : x) + p.at, *gradient = dy + p.at_joined;
    const floatX* around = RESIDUAL ? dresidual + p.at : nullptr;
    floatX* target = (p.second ? dx2 : dx) + p.at;
    uint4 in, upstream, residual, old;
    auto load = [&](const floatX* before) {
        in = *(const uint4*)source, source += p.step;
        upstream = *(const uint4*)gradient, gradient += p.step_joined;
        if (RESIDUAL) residual = *(const uint4*)around, around += p.step;
        if (ACCUMULATE) old = *(const uint4*)before;
    };
    mean += p.b * G + p.g0, rstd += p.b * G + p.g0, sums += (size_t)p.b * parts * K;
    auto item = [&](int part, int c, int) {
        float2 sum = sums[(size_t)part * K + c];
        float weight = w[c];
        return make_float2(weight * sum.x, weight * sum.y);
    };
    float2 sum = norm_group_sum(p, parts, item, [&] {
        if (p.t < T) load(target);
    });
    if ((int)threadIdx.x < p.groups) {
        float n = (float)p.group * T, r = rstd[threadIdx.x], slope = r * r * sum.y / n;
        coefficients[threadIdx.x] = make_float3(r, slope, r * sum.x / n - mean[threadIdx.x] * slope);
    }
    __syncthreads();
    float scale[VEC], alpha[VEC], beta[VEC];  // dx = scale dy - (x alpha + beta)
    norm_parameters(scale, w + p.c);
    norm_each_channel(p.c0, p.group, [&](int i, int g) {
        float3 of_group = coefficients[g];
        scale[i] *= of_group.x, alpha[i] = of_group.y, beta[i] = of_group.z;
    });
    for (int t = p.t; t < T; t += p.stride) {
        float value[VEC], d[VEC], more[VEC];
        unpack(value, in), unpack(d, upstream);
#pragma unroll
        for (int e = 0; e < VEC; e++) d[e] = scale[e] * d[e] - (value[e] * alpha[e] + beta[e]);
        auto add = [&](uint4 bits) {
            unpack(more, bits);
#pragma unroll
            for (int e = 0; e < VEC; e++) d[e] += more[e];
        };
        if (RESIDUAL) add(residual);
        if (ACCUMULATE) add(old);
        *(uint4*)target = pack(d), target += p.step;
        if (t + p.stride < T) load(target);
    }
}
static void groupnorm_backward(floatX* dx, floatX* dx2, float* dw, float* dbias, float2* sums,
                               const floatX* dy, const floatX* dresidual, const float* mean,
                               const float* rstd, const floatX* x, const floatX* x2, const float* w,
                               const float*, int B, int T, int C, int C2, int G, bool, bool accumulate) {
    PROFILE("group norm backward",
            {0, (3.0 + (dresidual != nullptr) + accumulate) * sizeof(floatX) * B * T * (C + C2)});
    int weight_blocks = (C + C2) / 32;
    NormGrid s = norm_grid(B, T, C + C2, weight_blocks);
    auto pass = groupnorm_backward_kernel<false, false>;
    if (dresidual)
        pass = accumulate ? groupnorm_backward_kernel<true, true> : groupnorm_backward_kernel<true, false>;
    if (!dresidual && accumulate) pass = groupnorm_backward_kernel<false, true>;
    launch(pass, weight_blocks + s.ranks * s.slabs * B, NORM_THREADS, 0, dx, dx2, dw, dbias, sums, dy,
           dresidual, mean, rstd, x, x2, w, B, T, C, C2, G, s, weight_blocks);
}

// ---- attention --------------------------------------------------------------------------------------------

// A block owns ATTENTION_ROWS rows (queries, or in backward keys) of one head of one image, a warp 16 of
// them, and walks over the other side in tiles of COLUMNS, so that T x T is never stored and any T works.
// Heads are padded with zeros to D channels. Sums and scores are fragments of mma.sync, in fp32 too: of 16
// x 8 elements a lane holds columns 2 (lane % 4) and the next, of row lane / 4 in [0], [1] and of the row
// 8 below in [2], [3].
#ifdef PRECISION_FP32
enum { ATTENTION_ROWS = 32 };  // what the shared memory of an RTX 30 or 40 (99 KB) holds with heads of 128
#else
enum { ATTENTION_ROWS = 64 };
#endif
// Of backward with heads of up to 32, on an H100 in bf16 at T = 256: 40 us; 32 columns and 5 blocks 48, 64
// and 3 blocks 43.
enum { ATTENTION_COLUMNS = ATTENTION_ROWS, ATTENTION_THREADS = 2 * ATTENTION_ROWS, ATTENTION_BLOCKS = 4 };

#ifdef PRECISION_FP32
// A sum over the rows of the other side, up to 262,144 of them, of which a plain float would lose 3e-5: what
// rounding took is kept and given back with the next addition (Kahan, 1965).
struct AttentionSum {
    float value, taken;
    __device__ operator float() const { return value; }
    __device__ void operator*=(float factor) { value *= factor, taken *= factor; }
    __device__ void operator+=(float x) {
        float y = x - taken, sum = value + y;
        taken = (sum - value) - y, value = sum;
    }
};
#else
typedef float AttentionSum;
#endif

// Rows t0 and on of a head, zeros outside (T, d). The pad of 16 bytes a row keeps ldmatrix free of conflicts.
template <int D>
struct AttentionRow {
    floatX at[D + VEC];
};
template <int ROWS, int D>
__device__ static void attention_load(AttentionRow<D>* tile, const floatX* source, size_t stride, int t0,
                                      int T, int d) {
    for (int i = threadIdx.x; i < ROWS * (D / VEC); i += ATTENTION_THREADS) {
        int row = i / (D / VEC), c = i % (D / VEC) * VEC;
        bool inside = t0 + row < T && c < d;
        copy_async(shared_address(&tile[row].at[c]), inside ? source + (t0 + row) * stride + c : source,
                   inside);
    }
}

// scores (16, COLUMNS) = the warp's rows of a (ROWS, D) times b^T, b (COLUMNS, D)
template <int D, int COLUMNS>
__device__ static void attention_scores(float scores[COLUMNS / 8][4], const AttentionRow<D>* a,
                                        const AttentionRow<D>* b) {
    int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
        for (int i = 0; i < 4; i++) scores[n][i] = 0;
#ifdef PRECISION_FP32
    for (int k = 0; k < D; k += VEC)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float left[VEC], right[VEC];
                unpack(left, *(const uint4*)&a[row0 + lane / 4 + i / 2 * 8].at[k]);
                unpack(right, *(const uint4*)&b[n * 8 + lane % 4 * 2 + i % 2].at[k]);
                for (int c = 0; c < VEC; c++) scores[n][i] += left[c] * right[c];
            }
#else
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t left[4], right[4];
        load_matrices(left, shared_address(&a[row0 + lane % 16].at[k + lane / 16 * 8]));
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 16) {
            load_matrices(right, shared_address(&b[n + lane / 16 * 8 + lane % 8].at[k + lane / 8 % 2 * 8]));
            mma(scores[n / 8], left, right[0], right[1]);
            mma(scores[n / 8 + 1], left, right[2], right[3]);
        }
    }
#endif
}
// Scores of the tile's columns past the last: their probabilities are 0.
template <int COLUMNS>
__device__ static void attention_mask(float scores[COLUMNS / 8][4], int columns) {
    if (columns >= COLUMNS) return;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
        for (int i = 0; i < 4; i++)
            if (n * 8 + threadIdx.x % 4 * 2 + i % 2 >= columns) scores[n][i] = -INFINITY;
}
// sum (16, D) += p (16, COLUMNS), in registers as attention_scores leaves it, times b (COLUMNS, D)
template <int D, int COLUMNS>
__device__ static void attention_weigh(AttentionSum sum[D / 8][4], const float p[COLUMNS / 8][4],
                                       const AttentionRow<D>* b) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < COLUMNS; k += 16) {
#ifdef PRECISION_FP32
        float left[2][16];  // of the lane's two rows; four lanes hold a row
#pragma unroll
        for (int i = 0; i < 32; i++)
            left[i / 16][i % 16] =
                __shfl_sync(~0u, p[k / 8 + i % 16 / 8][i / 16 * 2 + i % 2], lane / 4 * 4 + i % 8 / 2);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float part = 0;
                for (int c = 0; c < 16; c++)
                    part += left[i / 2][c] * b[k + c].at[n * 8 + lane % 4 * 2 + i % 2];
                sum[n][i] += part;
            }
#else
        const float *p0 = p[k / 8], *p1 = p[k / 8 + 1];
        uint32_t left[4] = {pack_bf16(p0[0], p0[1]), pack_bf16(p0[2], p0[3]), pack_bf16(p1[0], p1[1]),
                            pack_bf16(p1[2], p1[3])};
#pragma unroll
        for (int n = 0; n < D; n += 16) {
            uint32_t right[4];
            load_matrices_transposed(right, shared_address(&b[k + lane % 16].at[n + lane / 16 * 8]));
            mma(sum[n / 8], left, right[0], right[1]);
            mma(sum[n / 8 + 1], left, right[2], right[3]);
        }
#endif
    }
}
// The warp's rows of sum (ROWS, D), by way of its rows of `scratch`, to target, in pieces of 16 bytes.
template <int D>
__device__ static void attention_store(floatX* target, size_t stride, int t0, int T, int d,
                                       AttentionRow<D>* scratch, const AttentionSum sum[D / 8][4],
                                       float factor0, float factor1) {
    int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        int c = n * 8 + lane % 4 * 2;
        store_pair(&scratch[row0 + lane / 4].at[c], sum[n][0] * factor0, sum[n][1] * factor0);
        store_pair(&scratch[row0 + lane / 4 + 8].at[c], sum[n][2] * factor1, sum[n][3] * factor1);
    }
    __syncwarp();
    for (int i = lane; i < 16 * (D / VEC); i += 32) {
        int row = row0 + i / (D / VEC), c = i % (D / VEC) * VEC;
        if (t0 + row < T && c < d) *(uint4*)(target + (t0 + row) * stride + c) = *(uint4*)&scratch[row].at[c];
    }
}

template <int D>
struct AttentionForwardShared {
    AttentionRow<D> q[ATTENTION_ROWS], k[2][ATTENTION_COLUMNS], v[2][ATTENTION_COLUMNS];  // [stage]
};

// F.scaled_dot_product_attention(q, k, v) with a running maximum and denominator (Dao et al., algorithm 1).
// Block (ROWS queries, head, image). Device memory: q in and out out once, k and v once a block.
template <int D>
__global__ void __launch_bounds__(ATTENTION_THREADS, D > 64   ? 2
                                                     : D > 32 ? 3
                                                              : 6)  // 6: T = 256 at B = 32 is one wave
    attention_forward_kernel(floatX* out, float* lse, const floatX* qkv, int T, int C, int d, float scale) {
    constexpr int COLUMNS = ATTENTION_COLUMNS;
    extern __shared__ uint4 attention_shared[];
    AttentionForwardShared<D>& s = *(AttentionForwardShared<D>*)attention_shared;
    int lane = threadIdx.x % 32, head = blockIdx.y, b = blockIdx.z, t0 = blockIdx.x * ATTENTION_ROWS;
    const floatX *q = qkv + (size_t)b * T * 3 * C + head * d, *k = q + C, *v = q + 2 * C;
    attention_load<ATTENTION_ROWS, D>(s.q, q, 3 * C, t0, T, d);
    attention_load<COLUMNS, D>(s.k[0], k, 3 * C, 0, T, d);
    attention_load<COLUMNS, D>(s.v[0], v, 3 * C, 0, T, d);
    copy_commit();
    // Of a lane's two rows; e^x is 2^(x / ln 2), in bf16 one instruction.
    AttentionSum sum[D / 8][4] = {}, total[2] = {};
    float top[2] = {-INFINITY, -INFINITY}, unit = scale * 1.44269504f;
    for (int j = 0; j * COLUMNS < T; j++) {
        int stage = j % 2;
        if ((j + 1) * COLUMNS < T) {
            attention_load<COLUMNS, D>(s.k[!stage], k, 3 * C, (j + 1) * COLUMNS, T, d);
            attention_load<COLUMNS, D>(s.v[!stage], v, 3 * C, (j + 1) * COLUMNS, T, d);
        }
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        float p[COLUMNS / 8][4];
        attention_scores<D, COLUMNS>(p, s.q, s.k[stage]);
        attention_mask<COLUMNS>(p, T - j * COLUMNS);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float highest = top[half], part = 0;  // of the scores, unscaled
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                for (int i = 2 * half; i < 2 * half + 2; i++) highest = fmaxf(highest, p[n][i]);
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
            float keep = exp2_fast((top[half] - highest) * unit), offset = highest * unit;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                for (int i = 2 * half; i < 2 * half + 2; i++)
                    part += p[n][i] = exp2_fast(p[n][i] * unit - offset);
            total[half] *= keep, total[half] += part, top[half] = highest;
#pragma unroll
            for (int n = 0; n < D / 8; n++) sum[n][2 * half] *= keep, sum[n][2 * half + 1] *= keep;
        }
        attention_weigh<D, COLUMNS>(sum, p, s.v[stage]);
        __syncthreads();  // the stage is free
    }
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(~0u, (float)total[half], 1);
        total[half] += __shfl_xor_sync(~0u, (float)total[half], 2);
        int t = t0 + threadIdx.x / 32 * 16 + lane / 4 + 8 * half;
        if (lane % 4 == 0 && t < T)
            lse[((size_t)b * gridDim.y + head) * T + t] = top[half] * scale + logf(total[half]);
    }
    attention_store<D>(out + (size_t)b * T * C + head * d, C, t0, T, d, s.q, sum, 1 / total[0], 1 / total[1]);
}

// dots (ROWS): each row's D_i = sum_j dout_ij out_ij; normalisers (ROWS): lse in units of ln 2, +inf past T,
// so that the probabilities there are 0.
template <int ROWS, int D>
__device__ static void attention_dots(float* dots, float* normalisers, const AttentionRow<D>* dout,
                                      const AttentionRow<D>* out, const float* lse, int t0, int T) {
    const int lanes = ATTENTION_THREADS / ROWS;  // threads a row
    int row = threadIdx.x / lanes, c0 = threadIdx.x % lanes * VEC;
    float sum = 0;
    for (int c = c0; c < D; c += lanes * VEC) {
        float a[VEC], b[VEC];
        unpack(a, *(const uint4*)&dout[row].at[c]), unpack(b, *(const uint4*)&out[row].at[c]);
        for (int i = 0; i < VEC; i++) sum += a[i] * b[i];
    }
    for (int step = 1; step < lanes; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (c0) return;
    dots[row] = sum, normalisers[row] = t0 + row < T ? lse[t0 + row] * 1.44269504f : INFINITY;
}

template <int D, int COLUMNS>
struct AttentionBackwardShared {
    // q, dout of the queries or k, v of the keys; and [stage] of the other side
    AttentionRow<D> row1[ATTENTION_ROWS], row2[ATTENTION_ROWS], column1[2][COLUMNS], column2[2][COLUMNS];
    AttentionRow<D> out[2 * COLUMNS];  // of the queries: [stage] of columns, or of the rows
    float dots[ATTENTION_ROWS], normalisers[ATTENTION_ROWS];
    static_assert(2 * COLUMNS >= ATTENTION_ROWS && COLUMNS <= ATTENTION_ROWS,
                  "what out, dots and normalisers hold");
};

// A block's queries (KEYS false: dq) or keys (dk, dv), see the kernel below.
template <int D, int COLUMNS, bool KEYS>
__device__ static void attention_backward_rows(floatX* dqkv, const floatX* dout, const floatX* out,
                                               const float* lse, const floatX* qkv, int t0, int T, int C,
                                               int d, float scale) {
    extern __shared__ uint4 attention_shared[];
    AttentionBackwardShared<D, COLUMNS>& s = *(AttentionBackwardShared<D, COLUMNS>*)attention_shared;
    const floatX *q = qkv, *k = qkv + C, *v = qkv + 2 * C;
    int lane = threadIdx.x % 32, tiles = (T + COLUMNS - 1) / COLUMNS;
    attention_load<ATTENTION_ROWS, D>(s.row1, KEYS ? k : q, 3 * C, t0, T, d);
    attention_load<ATTENTION_ROWS, D>(s.row2, KEYS ? v : dout, KEYS ? 3 * C : C, t0, T, d);
    if (!KEYS) attention_load<ATTENTION_ROWS, D>(s.out, out, C, t0, T, d);
    auto load = [&](int j) {
        int stage = j % 2;
        if (j < tiles) {
            attention_load<COLUMNS, D>(s.column1[stage], KEYS ? q : k, 3 * C, j * COLUMNS, T, d);
            attention_load<COLUMNS, D>(s.column2[stage], KEYS ? dout : v, KEYS ? C : 3 * C, j * COLUMNS, T,
                                       d);
            if (KEYS) attention_load<COLUMNS, D>(s.out + stage * COLUMNS, out, C, j * COLUMNS, T, d);
        }
        copy_commit();
    };
    load(0);
    AttentionSum sum1[D / 8][4] = {}, sum2[D / 8][4] = {};  // dq or dk; dv
    for (int j = 0; j < tiles; j++) {
        int stage = j % 2;
        load(j + 1);
        copy_wait<1>();
        __syncthreads();
        if (KEYS)
            attention_dots<COLUMNS, D>(s.dots, s.normalisers, s.column2[stage], s.out + stage * COLUMNS, lse,
                                       j * COLUMNS, T);
        else if (j == 0)
            attention_dots<ATTENTION_ROWS, D>(s.dots, s.normalisers, s.row2, s.out, lse, t0, T);
        __syncthreads();
        float p[COLUMNS / 8][4], ds[COLUMNS / 8][4];
        attention_scores<D, COLUMNS>(p, s.row1, s.column1[stage]);
        if (!KEYS) attention_mask<COLUMNS>(p, T - j * COLUMNS);
        attention_scores<D, COLUMNS>(ds, s.row2, s.column2[stage]);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int query =
                    KEYS ? n * 8 + lane % 4 * 2 + i % 2 : threadIdx.x / 32 * 16 + lane / 4 + i / 2 * 8;
                p[n][i] = exp2_fast(p[n][i] * (scale * 1.44269504f) - s.normalisers[query]);
                ds[n][i] = p[n][i] * (ds[n][i] - s.dots[query]);  // times scale in the end
            }
        attention_weigh<D, COLUMNS>(sum1, ds, s.column1[stage]);
        if (KEYS) attention_weigh<D, COLUMNS>(sum2, p, s.column2[stage]);
        __syncthreads();  // the stage is free
    }
    attention_store<D>(dqkv + (KEYS ? C : 0), 3 * C, t0, T, d, s.row1, sum1, scale, scale);
    if (KEYS) attention_store<D>(dqkv + 2 * C, 3 * C, t0, T, d, s.row2, sum2, 1, 1);
}

// P = exp(q k^T scale - lse), dS = P (dout v^T - D) scale: dq = dS k, dk = dS^T q, dv = P^T dout. Blocks
// (ROWS queries or keys, head, image): the first half of the grid's x makes dk and dv, the second dq; both
// make P again. Device memory: a block's own rows once, the other side's once a block; within the L2.
template <int D, int COLUMNS>
__global__ void __launch_bounds__(ATTENTION_THREADS, D > 64   ? 2
                                                     : D > 32 ? 3
                                                              : ATTENTION_BLOCKS)
    attention_backward_kernel(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse,
                              const floatX* qkv, int T, int C, int d, float scale) {
    int head = blockIdx.y, b = blockIdx.z, tiles = gridDim.x / 2, t0 = blockIdx.x % tiles * ATTENTION_ROWS;
    size_t at = (size_t)b * T * C + head * d, at3 = (size_t)b * T * 3 * C + head * d;
    lse += ((size_t)b * gridDim.y + head) * T;
    if (blockIdx.x < tiles)
        attention_backward_rows<D, COLUMNS, true>(dqkv + at3, dout + at, out + at, lse, qkv + at3, t0, T, C,
                                                  d, scale);
    else
        attention_backward_rows<D, COLUMNS, false>(dqkv + at3, dout + at, out + at, lse, qkv + at3, t0, T, C,
                                                   d, scale);
}

template <int D>
static void attention_forward_launch(floatX* out, float* lse, const floatX* qkv, int B, int T, int C,
                                     int heads) {
    launch(attention_forward_kernel<D>, dim3(ceil_div(T, ATTENTION_ROWS), heads, B), ATTENTION_THREADS,
           sizeof(AttentionForwardShared<D>), out, lse, qkv, T, C, C / heads, 1 / sqrtf((float)(C / heads)));
}
template <int D>
static void attention_backward_launch(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse,
                                      const floatX* qkv, int B, int T, int C, int heads) {
    const int COLUMNS = D > 64 ? ATTENTION_COLUMNS / 2 : ATTENTION_COLUMNS;  // what the registers hold
    launch(attention_backward_kernel<D, COLUMNS>, dim3(2 * ceil_div(T, ATTENTION_ROWS), heads, B),
           ATTENTION_THREADS, sizeof(AttentionBackwardShared<D, COLUMNS>), dqkv, dout, out, lse, qkv, T, C,
           C / heads, 1 / sqrtf((float)(C / heads)));
}

static void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int heads) {
    PROFILE("attention forward", {4.0 * B * T * T * C, 4.0 * sizeof(floatX) * B * T * C});
    int d = C / heads;
    ASSERT(d % 16 == 0 && d <= 128 && d * heads == C);
    if (d <= 32)
        attention_forward_launch<32>(out, lse, qkv, B, T, C, heads);
    else if (d <= 64)
        attention_forward_launch<64>(out, lse, qkv, B, T, C, heads);
    else
        attention_forward_launch<128>(out, lse, qkv, B, T, C, heads);
}
static void attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse,
                               const floatX* qkv, int B, int T, int C, int heads) {
    PROFILE("attention backward", {8.0 * B * T * T * C, 8.0 * sizeof(floatX) * B * T * C});
    int d = C / heads;
    ASSERT(d % 16 == 0 && d <= 128 && d * heads == C);
    if (d <= 32)
        attention_backward_launch<32>(dqkv, dout, out, lse, qkv, B, T, C, heads);
    else if (d <= 64)
        attention_backward_launch<64>(dqkv, dout, out, lse, qkv, B, T, C, heads);
    else
        attention_backward_launch<128>(dqkv, dout, out, lse, qkv, B, T, C, heads);
}

// ---- up- and down-sampling --------------------------------------------------------------------------------

// out (B, 2H, 2W, C) [+]= factor x (B, H, W, C), each pixel four times. A block a row of x; a thread 16
// bytes. Device memory: x in and out out once (out in too where it accumulates).
__global__ void repeat2x2_kernel(floatX* out, const floatX* x, int W, int C, float factor, bool accumulate) {
    int vectors = C / VEC, row = W * vectors;  // 16-byte pieces of a pixel, of a row
    for (int i = threadIdx.x; i < row; i += blockDim.x) {
        float source[VEC], value[4][VEC];
        unpack(source, ((const uint4*)x)[(size_t)blockIdx.x * row + i]);
        uint4* first = (uint4*)out + (size_t)blockIdx.x * 4 * row + i / vectors * 2 * vectors + i % vectors;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (accumulate) unpack(value[j], first[j / 2 * 2 * row + j % 2 * vectors]);
            for (int n = 0; n < VEC; n++)
                value[j][n] = (accumulate ? value[j][n] : 0.0f) + factor * source[n];
        }
#pragma unroll
        for (int j = 0; j < 4; j++) first[j / 2 * 2 * row + j % 2 * vectors] = pack(value[j]);
    }
}
// out (B, H, W, C) [+]= factor times the sum of the 2x2 pixels of x (B, 2H, 2W, C). A block a row of out.
__global__ void sum2x2_kernel(floatX* out, const floatX* x, int W, int C, float factor, bool accumulate) {
    int vectors = C / VEC, row = W * vectors;
    for (int i = threadIdx.x; i < row; i += blockDim.x) {
        float value[4][VEC], before[VEC] = {};
        const uint4* first =
            (const uint4*)x + (size_t)blockIdx.x * 4 * row + i / vectors * 2 * vectors + i % vectors;
        uint4* target = (uint4*)out + (size_t)blockIdx.x * row + i;
#pragma unroll
        for (int j = 0; j < 4; j++) unpack(value[j], first[j / 2 * 2 * row + j % 2 * vectors]);
        if (accumulate) unpack(before, *target);
        for (int n = 0; n < VEC; n++)
            before[n] += factor * ((value[0][n] + value[1][n]) + (value[2][n] + value[3][n]));
        *target = pack(before);
    }
}
static void repeat2x2(floatX* out, const floatX* x, int B, int H, int W, int C, float factor,
                      bool accumulate) {
    PROFILE("resampling", {0, (accumulate ? 9.0 : 5.0) * sizeof(floatX) * B * H * W * C});
    launch(repeat2x2_kernel, B * H, std::min(256, W * C / VEC), 0, out, x, W, C, factor, accumulate);
}
static void sum2x2(floatX* out, const floatX* x, int B, int H, int W, int C, float factor, bool accumulate) {
    PROFILE("resampling", {0, (accumulate ? 6.0 : 5.0) * sizeof(floatX) * B * H * W * C});
    launch(sum2x2_kernel, B * H, std::min(256, W * C / VEC), 0, out, x, W, C, factor, accumulate);
}
static void upsample_forward(floatX* out, const floatX* x, int B, int H, int W, int C) {
    repeat2x2(out, x, B, H, W, C, 1.0f, false);
}
static void upsample_backward(floatX* dx, const floatX* dout, int B, int H, int W, int C, bool accumulate) {
    sum2x2(dx, dout, B, H, W, C, 1.0f, accumulate);
}
static void downsample_forward(floatX* out, const floatX* x, int B, int H, int W, int C) {
    sum2x2(out, x, B, H / 2, W / 2, C, 0.25f, false);
}
static void downsample_backward(floatX* dx, const floatX* dout, int B, int H, int W, int C, bool accumulate) {
    repeat2x2(dx, dout, B, H / 2, W / 2, C, 0.25f, accumulate);
}

// ---- loss -------------------------------------------------------------------------------------------------

// losses (B, parts) the sums of squares, dout (B, n, or null) = scale w_b (out - target). A block a part.
__global__ void mse_kernel(float* losses, floatX* dout, const floatX* out, const float* target,
                           const int* timesteps, const float* weights, int n, int parts, float scale) {
    int b = blockIdx.x / parts, part = blockIdx.x % parts;
    size_t first = (size_t)b * n, end = first + min((part + 1) * LOSS_CHUNK, n);
    if (weights) scale *= weights[timesteps[b]];
    float sum = 0;
#pragma unroll 4
    for (size_t i = first + part * LOSS_CHUNK + threadIdx.x; i < end; i += blockDim.x) {
        float difference = (float)out[padded_at(i)] - target[i];
        sum += difference * difference;
        if (dout) set_padded(dout, i, scale * difference);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = sum;
}
static void mse(float* losses, floatX* dout, const floatX* out, const float* target, const int* timesteps,
                const float* weights, int B, int n, size_t total) {
    PROFILE("loss", {0, (sizeof(float) + (dout ? 2.0 : 1.0) * sizeof(floatX)) * B * n});
    launch(mse_kernel, B * loss_parts(n), 1024, 0, losses, dout, out, target, timesteps, weights, n,
           loss_parts(n), (float)(2.0 / (double)total));
}

// ---- noise and samplers -----------------------------------------------------------------------------------

// The four normals of a quad of elements: the host's integers, the transform in float (2e-6 from the host's).
__device__ static inline void random_normals_device(float normal[4], uint32_t seed, uint32_t stream,
                                                    uint32_t quad, uint32_t sample, uint32_t step) {
    Philox p = philox(seed, stream, quad, sample, step);
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {
        float u1 = ((p.word[pair] >> 8) + 1) * 0x1p-24f, twice_u2 = (p.word[pair + 1] >> 8) * 0x1p-23f;
        float r = sqrtf(-2.0f * logf(u1)), sine, cosine;
        sincospif(twice_u2, &sine, &cosine);
        normal[pair] = r * cosine, normal[pair + 1] = r * sine;
    }
}

// The normals of elements e to e + 4, in the order (C, H, W) of the noise; e need not start a quad.
__device__ static inline void random_normals_at(float normal[4], uint32_t seed, uint32_t stream, int e,
                                                uint32_t sample, uint32_t step) {
    float two[8];
    random_normals_device(two, seed, stream, e / 4, sample, step);
    if (e % 4) random_normals_device(two + 4, seed, stream, e / 4 + 1, sample, step);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        normal[i] = two[i];
#pragma unroll
        for (int shift = 1; shift < 4; shift++)
            if (e % 4 == shift) normal[i] = two[i + shift];
    }
}

// Each of the following has a thread 4 pixels of image b, all channels: reads of planes and writes of pixels
// both cover whole lines. Blocks (pixels, image). n: how many pixels the thread has.
struct PixelQuad {
    int b, first, n;
    __device__ PixelQuad(int pixels) {
        b = blockIdx.y, first = 4 * (blockIdx.x * blockDim.x + threadIdx.x), n = min(4, pixels - first);
    }
    __device__ size_t pixel(int i, int c, int pixels) const {  // in (B, H, W, 3)
        return ((size_t)b * pixels + first + i) * IMAGE_CHANNELS + c;
    }
};
enum { QUAD_THREADS = 64 };
static dim3 quad_blocks(int B, int pixels) { return dim3(ceil_div(pixels, 4 * QUAD_THREADS), B); }

// x_t = signal x0 + noise eps; target = eps, signal eps - noise x0, or x0. Device memory: images in, x_t,
// target out.
__global__ void add_noise_kernel(floatX* __restrict__ x_t, float* __restrict__ target,
                                 const float* __restrict__ images, const int* timesteps, const float* signal,
                                 const float* noise, int pixels, int predict, uint32_t seed, uint32_t stream,
                                 uint32_t first, float offset, const StepState* state) {
    PixelQuad q(pixels);
    uint32_t step = state ? (uint32_t)state->step : 0;
    if (q.n <= 0) return;
    float a = signal[timesteps[q.b]], s = noise[timesteps[q.b]], shift[4] = {};
    if (offset > 0) random_normals_device(shift, seed, STREAM_OFFSET, 0, first + q.b, step);
#pragma unroll
    for (int c = 0; c < IMAGE_CHANNELS; c++) {
        float eps[4];
        int e = c * pixels + q.first;
        random_normals_at(eps, seed, stream, e, first + q.b, step);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i >= q.n) break;
            float x0 = images[(size_t)q.b * IMAGE_CHANNELS * pixels + e + i], n = eps[i] + offset * shift[c];
            size_t at = q.pixel(i, c, pixels);
            set_padded(x_t, at, a * x0 + s * n);
            target[at] = target_of(predict, x0, n, a, s);
        }
    }
}
static void add_noise(floatX* x_t, float* target, const float* images, const int* timesteps,
                      const float* signal, const float* noise, int B, int H, int W, int predict,
                      uint32_t seed, Stream stream, uint32_t first, float offset, const StepState* state) {
    PROFILE("noising", {0, (2.0 * sizeof(float) + sizeof(floatX)) * B * IMAGE_CHANNELS * H * W});
    launch(add_noise_kernel, quad_blocks(B, H * W), QUAD_THREADS, 0, x_t, target, images, timesteps, signal,
           noise, H * W, predict, seed, stream, first, offset, state);
}

// A thread 4 pixels of picture b; x and its copy for the network, input, are (B, H, W, 3).
__global__ void sampler_start_kernel(float* x, floatX* input, const PictureNoise* begins, int pixels) {
    PixelQuad q(pixels);
    if (q.n <= 0) return;
    PictureNoise from = begins[q.b];
    for (int c = 0; c < IMAGE_CHANNELS; c++) {
        float normal[4], other[4] = {};
        random_normals_at(normal, from.seed, STREAM_SAMPLER, c * pixels + q.first, 0, 0);
        if (from.other_weight != 0)
            random_normals_at(other, from.other, STREAM_SAMPLER, c * pixels + q.first, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i >= q.n) break;
            size_t at = q.pixel(i, c, pixels);
            x[at] = from.weight * normal[i] + from.other_weight * other[i];
            set_padded(input, at, x[at]);
        }
    }
}
static void sampler_start(float* x, floatX* input, const PictureNoise* begins, int B, int H, int W) {
    launch(sampler_start_kernel, quad_blocks(B, H * W), QUAD_THREADS, 0, x, input, begins, H * W);
}

// A block a picture: |x0|'s value number `rank` in rising order, eight bits a round. Its counts are integers,
// so that it does not matter in which order they are added up.
__global__ void sampler_limits_kernel(float* limits, const float* x, const floatX* out, SamplerStep s,
                                      int elements, int rank) {
    __shared__ int counts[256], rank_left;
    __shared__ uint32_t found;
    x += (size_t)blockIdx.x * elements, out += padded_at((size_t)blockIdx.x * elements);
    int digit = threadIdx.x;
    if (digit == 0) found = 0, rank_left = rank;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (digit < 256) counts[digit] = 0;
        __syncthreads();
        uint32_t prefix = found;
        int wanted = rank_left, below = 0;
        for (int i = threadIdx.x; i < elements; i += blockDim.x) {
            uint32_t bits = magnitude_bits(predicted_x0(s, x[i], (float)out[padded_at(i)]));
            if ((bits ^ prefix) >> shift < 256) atomicAdd(counts + (bits >> shift & 255), 1);
        }
        __syncthreads();
        for (int i = 0; i < digit && digit < 256; i++) below += counts[i];
        if (digit < 256 && below <= wanted && wanted < below + counts[digit])  // for one thread
            found = prefix | (uint32_t)digit << shift, rank_left = wanted - below;
        __syncthreads();
    }
    if (digit == 0) limits[blockIdx.x] = limit_of_bits(found);
}
static void sampler_limits(float* limits, const float* x, const floatX* out, SamplerStep s, int B, int H,
                           int W) {
    int elements = IMAGE_CHANNELS * H * W;
    launch(sampler_limits_kernel, B, 1024, 0, limits, x, out, s, elements, percentile_rank(elements));
}

// x <- to_x0 x0 + to_x x + to_saved saved + sigma noise, saved <- save_x0 x0 + save_x x, in place.
__global__ void sampler_step_kernel(float* x, float* saved, floatX* input, const floatX* out,
                                    const float* limits, const PictureNoise* begins, SamplerStep s,
                                    int pixels, uint32_t call) {
    PixelQuad q(pixels);
    for (int c = 0; c < IMAGE_CHANNELS && q.n > 0; c++) {
        float normal[4] = {};
        if (s.sigma > 0)
            random_normals_at(normal, begins[q.b].seed, STREAM_SAMPLER, c * pixels + q.first, 0, call);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i >= q.n) break;
            size_t at = q.pixel(i, c, pixels);
            float x0 = thresholded_x0(s, x[at], (float)out[padded_at(at)], limits[q.b]), before = x[at];
            x[at] = s.to_x0 * x0 + s.to_x * before + s.to_saved * saved[at] + s.sigma * normal[i];
            saved[at] = s.save_x0 * x0 + s.save_x * before;
            set_padded(input, at, x[at]);
        }
    }
}
static void sampler_step(float* x, float* saved, floatX* input, const floatX* out, const float* limits,
                         const PictureNoise* begins, SamplerStep s, int B, int H, int W, uint32_t call) {
    launch(sampler_step_kernel, quad_blocks(B, H * W), QUAD_THREADS, 0, x, saved, input, out, limits, begins,
           s, H * W, call);
}

// ---- optimiser --------------------------------------------------------------------------------------------

// parts (n / NORM_CHUNK rounded up): the sum of squares of each chunk, a block each. x 16-byte aligned.
__global__ void squared_norm_kernel(float* parts, const float* x, size_t n) {
    size_t first = (size_t)blockIdx.x * NORM_CHUNK, end = min(first + NORM_CHUNK, n);
    float sum = 0;
#pragma unroll 8
    for (size_t i = first + 4 * threadIdx.x; i + 4 <= end; i += 4 * blockDim.x) {
        float4 v = *(const float4*)(x + i);
        sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
    if (threadIdx.x < (end - first) % 4) {
        float v = x[end - 1 - threadIdx.x];
        sum += v * v;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
static void squared_norm(float* parts, const float* x, size_t n) {
    PROFILE("gradient norm", {0, (double)sizeof(float) * n});
    launch(squared_norm_kernel, ceil_div(n, NORM_CHUNK), 512, 0, parts, x, n);
}

__device__ static inline void adamw_element(float& w, float& m, float& v, float g, const AdamW& a, float step,
                                            float root, float decay) {
    g *= a.clip;
    m = a.beta1 * m + (1.0f - a.beta1) * g;
    v = a.beta2 * v + (1.0f - a.beta2) * g * g;
    w = w * decay - step * m / (sqrtf(v) / root + a.eps);
}

// torch.optim.AdamW, then EMAS running means of the weights and the layers' copy of them, `working`: 30 bytes
// a parameter and 8 a mean, each once. All (n) and 16-byte aligned; working may be null. A thread 4
// parameters.
template <int EMAS>
__global__ void adamw_kernel(float* w, Emas emas, floatX* working, float* m, float* v, const float* gradient,
                             const uint8_t* decays, size_t n, const StepState* state) {
    if (!state->accepted) return;
    AdamW a = state->update;
    size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    float step = a.lr / a.correction1, root = sqrtf(a.correction2), decay = 1.0f;
    if (i < n && a.weight_decay > 0 && decays[i / DECAY_CHUNK]) decay -= a.lr * a.weight_decay;
    if (i + 4 <= n) {
        float4 g4 = *(const float4*)(gradient + i), w4 = *(const float4*)(w + i),
               m4 = *(const float4*)(m + i), v4 = *(const float4*)(v + i), e4[EMAS + 1];
#pragma unroll
        for (int k = 0; k < EMAS; k++) e4[k] = *(const float4*)(emas.of[k] + i);
        adamw_element(w4.x, m4.x, v4.x, g4.x, a, step, root, decay);
        adamw_element(w4.y, m4.y, v4.y, g4.y, a, step, root, decay);
        adamw_element(w4.z, m4.z, v4.z, g4.z, a, step, root, decay);
        adamw_element(w4.w, m4.w, v4.w, g4.w, a, step, root, decay);
        *(float4*)(w + i) = w4, *(float4*)(m + i) = m4, *(float4*)(v + i) = v4;
#pragma unroll
        for (int k = 0; k < EMAS; k++) {
            float weight = a.ema_weight[k];
            e4[k].x += weight * (w4.x - e4[k].x), e4[k].y += weight * (w4.y - e4[k].y);
            e4[k].z += weight * (w4.z - e4[k].z), e4[k].w += weight * (w4.w - e4[k].w);
            *(float4*)(emas.of[k] + i) = e4[k];
        }
#ifdef PRECISION_FP32
        if (working) *(float4*)(working + i) = w4;
#else
        if (working) *(uint2*)(working + i) = make_uint2(pack_bf16(w4.x, w4.y), pack_bf16(w4.z, w4.w));
#endif
        return;
    }
    for (; i < n; i++) {  // the last thread's
        adamw_element(w[i], m[i], v[i], gradient[i], a, step, root, decay);
#pragma unroll
        for (int k = 0; k < EMAS; k++) emas.of[k][i] += a.ema_weight[k] * (w[i] - emas.of[k][i]);
        if (working) working[i] = (floatX)w[i];
    }
}
static void adamw(float* w, Emas emas, floatX* working, float* m, float* v, const float* gradient,
                  const uint8_t* decays, size_t n, const StepState* state) {
    PROFILE("AdamW", {0, adamw_bytes(emas.count(), n)});
    static decltype(&adamw_kernel<0>) const kernels[] = {adamw_kernel<0>, adamw_kernel<1>, adamw_kernel<2>,
                                                         adamw_kernel<3>, adamw_kernel<MAX_EMAS>};
    launch(kernels[emas.count()], ceil_div(n, 4 * 256), 256, 0, w, emas, working, m, v, gradient, decays, n,
           state);
}

// ---- the first and the last launch of a step --------------------------------------------------------------

// One block: a thread a sample.
__global__ void begin_step_kernel(StepState* state, int* timesteps, int* sources, BatchSource source,
                                  Hyper hyper) {
    if (threadIdx.x == 0) state->update = adamw_at(hyper, state->step, state->step - state->history.skipped);
    for (int b = threadIdx.x; b < source.batch; b += blockDim.x)
        choose_sample(timesteps + b, sources + b, source, b, state->step);
}
static void begin_step(StepState* state, int* timesteps, int* sources, BatchSource source, Hyper hyper) {
    PROFILE("begin, images, end", {0, 0});
    launch(begin_step_kernel, 1, 256, 0, state, timesteps, sources, source, hyper);
}

// A thread an element. Grid (elements, B).
__global__ void load_images_kernel(float* images, const int* sources, BatchSource source, int elements) {
    int e = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
    if (e < elements) images[(size_t)b * elements + e] = pixel_of(source, sources[b], e);
}
static void load_images(float* images, const int* sources, BatchSource source, int B) {
    PROFILE("begin, images, end", {0, 5.0 * B * IMAGE_CHANNELS * source.size * source.size});
    int elements = IMAGE_CHANNELS * source.size * source.size;
    launch(load_images_kernel, dim3(ceil_div(elements, 256), B), 256, 0, images, sources, source, elements);
}

// One block adds up the parts, in an order that their number decides, and copies the state.
__global__ void finish_step_kernel(StepState* state, BatchLoss batch, const float* norm_parts,
                                   int norm_parts_count, Hyper hyper) {
    StepState* result = state + 1 + state->step % RESULT_SLOTS;
    enum { WEIGHTED, SQUARED_NORM, QUARTILE, COUNT = QUARTILE + 4, SUMS = COUNT + 4 };
    float sums[SUMS] = {};
    int parts = loss_parts(batch.elements);
    for (int i = threadIdx.x; i < batch.batch * parts; i += blockDim.x) {
        int t = batch.timesteps[i / parts], quartile = quartile_of(t, batch.diffusion_steps);
        float part = batch.parts[i];
        sums[WEIGHTED] += batch.weights[t] * part;
#pragma unroll
        for (int q = 0; q < 4; q++)
            if (q == quartile) sums[QUARTILE + q] += part, sums[COUNT + q] += i % parts == 0;
    }
    for (int i = threadIdx.x; i < norm_parts_count; i += blockDim.x) sums[SQUARED_NORM] += norm_parts[i];
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        sums[i] = block_sum(sums[i]);
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        float loss = (float)((double)sums[WEIGHTED] / ((double)batch.batch * batch.elements));
#pragma unroll
        for (int q = 0; q < 4; q++)
            state->quartile_sums[q] = sums[QUARTILE + q] / batch.elements,
            state->quartile_counts[q] = (int)sums[COUNT + q];
        conclude_step(state, loss, sqrtf(sums[SQUARED_NORM]), hyper);
    }
    __syncthreads();
    for (size_t i = threadIdx.x; i < sizeof *state / sizeof(int); i += blockDim.x)
        ((int*)result)[i] = ((const int*)state)[i];
}
static void finish_step(StepState* state, BatchLoss batch, const float* norm_parts, size_t parameters,
                        Hyper hyper) {
    PROFILE("begin, images, end", {0, 0});
    launch(finish_step_kernel, 1, 256, 0, state, batch, norm_parts, (int)ceil_div(parameters, NORM_CHUNK),
           hyper);
}

__global__ void fill_timesteps_kernel(int* timesteps, int B, int value) {
    for (int b = threadIdx.x; b < B; b += blockDim.x) timesteps[b] = value;
}
static void fill_timesteps(int* timesteps, int B, int value) {
    launch(fill_timesteps_kernel, 1, 256, 0, timesteps, B, value);
}

// ---- linear layers, 1x1 and 3x3 convolutions --------------------------------------------------------------

// Every product of the network is one of two kernels:
//   gemm_kernel             out (M, N) = A (M, K) B (K, N), forward and input gradients: a tile per block;
//   weight_gradient_kernel  dw = dout^T A: the reduction runs over the pixels, split over blocks.
// A's row m is pixel m's channels (1x1), or its 3x3 neighbourhood, which is never written out: a block loads
// its patch of the image with a border of one pixel once per 128 bytes of channels, and the nine taps read
// it at shifted rows. In bf16 the arithmetic is mma.sync on tensor cores with fp32 accumulators; in fp32
// plain FMAs (never tf32). Both share the loads, since shared memory is laid out in bytes: rows of eight
// 16-byte vectors, vector v of row r stored at v ^ (r % 8), so that eight consecutive rows never meet in a
// bank.

enum {
    BK = 8 * VEC,      // channels of a 128-byte row: the depth of a step of gemm_kernel
    REDUCE_GROUPS = 8  // threads that share one output of a reduction over splits
};

// ---- vectors and instructions

__device__ inline void add_vector(float (&sum)[VEC], const floatX* p) {
    float x[VEC];
    unpack(x, *(const uint4*)p);
#pragma unroll
    for (int e = 0; e < VEC; e++) sum[e] += x[e];
}
#ifdef PRECISION_FP32
__device__ inline float4 load_shared4(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
__device__ inline float2 load_shared2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
#endif

// ---- patches: the pixels of a 3x3 convolution's tile

// A tile is `images` patches of 8 x width pixels, width a multiple of 8 (what one ldmatrix reads is then
// eight neighbours in a row). With its border a patch is (8 + 2) * (width + 2) rows of shared memory; tile
// pixel p with tap (dy, dx) is row patch_row(p) + dy * (width + 2) + dx.
struct Patch {
    int B, H, W;        // the tensor
    int images, width;  // the tile; width is 8 or 16, its height always 8
    int tiles_y, tiles_x, tiles;
    struct Origin {
        int b, y, x;
    };
    __host__ __device__ int rows() const { return images * 10 * (width + 2); }
    __device__ int row(int p) const {
        int y = width == 16 ? p / 16 : p / 8, x = p % 8 + (p & 8 & (width - 1));
        return (y + 2 * (y / 8)) * (width + 2) + x;
    }
    __device__ int tap(int t) const { return t / 3 * (width + 2) + t % 3; }
    // Image, line and column within the tile of a row, packed; the border counts: the pixel is (y - 1, x -
    // 1).
    __device__ int place(int row) const {
        int y = width == 16 ? row / 18 : row / 10, image = y / 10;
        return image << 16 | (y - image * 10) << 8 | (row - y * (width + 2));
    }
    __device__ Origin origin(int tile) const {
        int line = tile / tiles_x, b = line / tiles_y;
        return {b * images, (line - b * tiles_y) * 8 - 1, (tile - line * tiles_x) * width - 1};
    }
    // The pixel's index in (B, H, W), or -1 outside.
    __device__ int pixel(Origin o, int place) const {
        int b = o.b + (place >> 16), y = o.y + (place >> 8 & 255), x = o.x + (place & 255);
        bool inside = b < B && (unsigned)y < (unsigned)H && (unsigned)x < (unsigned)W;
        return inside ? (b * H + y) * W + x : -1;
    }
};
// 64 pixels: 8 x 8. 128: 8 x 16, or two images' 8 x 8 where the image is no wider.
static Patch make_patch(int B, int H, int W, int pixels) {
    Patch p = {B, H, W, 1, 8, 0, 0, 0};
    if (pixels == 128) (W <= 8 ? p.images : p.width) *= 2;
    p.tiles_y = ceil_div(H, 8), p.tiles_x = ceil_div(W, p.width);
    p.tiles = ceil_div(B, p.images) * p.tiles_y * p.tiles_x;
    return p;
}

// ---- forward and input gradient

struct Gemm {
    floatX *out, *out2;                  // (M, N1), (M, N - N1): the output's columns, in one tensor or two
    const floatX *residual, *residual2;  // likewise, added; null: none. May be out itself
    const floatX *x, *x2;                // (M, C), (M, C2)
    const floatX* w;           // forward (N, taps, C + C2); input gradient (C, taps, N), taps flipped
    const floatX *bias, *emb;  // (N), (M / T, emb_pitch)[:, :N]; null: none
    int emb_pitch;
    float* partial;   // (splits, M, N), where splits > 1
    float2* moments;  // (M / T, parts, N) of the output; null: not wanted
    Normed norm;      // or it is behind a norm
    int M, N, N1, C, C2, T;
    int splits;
    Patch patch;  // 3x3 only
};

// BM pixels by BN channels a block, WM x WN a warp. TRANSPOSED: w's rows are the reduction, as in an input
// gradient.
template <int BM_, int BN_, int WM_, int WN_, int TAPS_, bool TRANSPOSED_, int STAGES_, int BLOCKS_>
struct GemmTile {
    static constexpr int BM = BM_, BN = BN_, WM = WM_, WN = WN_, TAPS = TAPS_, STAGES = STAGES_,
                         BLOCKS = BLOCKS_;
    static constexpr bool TRANSPOSED = TRANSPOSED_;
    static constexpr int THREADS = BM / WM * (BN / WN) * 32;
    static constexpr int A_ROWS =
        TAPS == 1 ? BM : BM / 64 * 100;  // 100 = (8 + 2)^2 >= (8 + 2) * (16 + 2) / 2
    static constexpr int B_BYTES = BN * 128;
    static constexpr int TABLE_BYTES = TAPS == 1 ? 0 : (A_ROWS * 4 + 127) / 128 * 128;
    static constexpr int STAGING_PITCH = BN + 8;  // floats: rows of a fragment lie 8 banks apart
    static constexpr int A_VECTORS = (A_ROWS * 8 + THREADS - 1) / THREADS;  // of a thread, one buffer
    static constexpr int A_PARTS =
        STAGES < 5 ? 6 : 5;  // taps over which the next patch's loads are spread; they must end
                             // STAGES - 1 steps before its first use
    static_assert(TAPS == 1 || A_PARTS + STAGES - 1 <= TAPS,
                  "a patch must have arrived when it is first read");
    static_assert(!TRANSPOSED || BN >= 64, "swizzling needs eight vectors in a row of w");
    // The first buffer of a single chunk of channels is the only one; rows: of A that a patch has.
    static int shared_bytes(int chunks, int rows) {
        int ring = STAGES * B_BYTES + (TAPS == 1 ? STAGES : chunks < 2 ? chunks : 2) * rows * 128;
        int staging = BM * STAGING_PITCH * (int)sizeof(float);
        return TABLE_BYTES + (ring > staging ? ring : staging);
    }
};

// A warp's WM x WN accumulators.
#ifndef PRECISION_FP32
template <class Tile>
struct WarpProduct {
    static constexpr int MI = Tile::WM / 16, NI = Tile::WN / 8;
    float c[MI][NI][4];
    int row[MI];  // of A, for this lane's ldmatrix
    int lane, m0, n0;
    template <class RowOf>
    __device__ WarpProduct(RowOf row_of) {
        int warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        m0 = warp / (Tile::BN / Tile::WN) * Tile::WM, n0 = warp % (Tile::BN / Tile::WN) * Tile::WN;
#pragma unroll
        for (int i = 0; i < MI; i++) {
            row[i] = row_of(m0 + i * 16 + lane % 16);
#pragma unroll
            for (int j = 0; j < NI; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) c[i][j][e] = 0;
        }
    }
    // c += A's rows, `shift` further down, times B; a step of BK.
    __device__ void multiply(uint32_t a_tile, uint32_t b_tile, int shift) {
        // Tiles are 128-byte aligned, so stepping through a row's vectors, swizzled or not, is flipping
        // address bits.
        uint32_t a_line[MI], b_line;
#pragma unroll
        for (int i = 0; i < MI; i++) {
            int r = row[i] + shift;
            a_line[i] = a_tile + r * 128 + ((lane / 16 ^ (r & 7)) << 4);
        }
        if (Tile::TRANSPOSED)
            b_line = b_tile + lane % 16 * (Tile::BN * 2) + (((n0 / 8 + lane / 16) ^ (lane & 7)) << 4);
        else
            b_line = b_tile + (n0 + lane / 16 * 8 + lane % 8) * 128 + ((lane / 8 % 2 ^ (lane & 7)) << 4);
#pragma unroll
        for (int k = 0; k < BK / 16; k++) {
            uint32_t a[MI][4], b[NI / 2][4];
#pragma unroll
            for (int i = 0; i < MI; i++) load_matrices(a[i], a_line[i] ^ k << 5);
#pragma unroll
            for (int j = 0; j < NI / 2; j++)
                if (Tile::TRANSPOSED)
                    load_matrices_transposed(b[j], (b_line ^ j << 5) + k * 16 * (Tile::BN * 2));
                else
                    load_matrices(b[j], (b_line ^ k << 5) + j * 16 * 128);
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int j = 0; j < NI; j++) mma(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
    __device__ void store(float* staging) {
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int j = 0; j < NI; j++) {
                float* p =
                    staging + (m0 + i * 16 + lane / 4) * Tile::STAGING_PITCH + n0 + j * 8 + lane % 4 * 2;
                *(float2*)p = make_float2(c[i][j][0], c[i][j][1]);
                *(float2*)(p + 8 * Tile::STAGING_PITCH) = make_float2(c[i][j][2], c[i][j][3]);
            }
    }
};
#else
// Lane l owns pixels l / 4 + 8 i and channels l % 4 + 4 j (TRANSPOSED: groups of four, 16 apart), so that a
// warp's vector loads touch eight, or four, neighbouring rows.
template <class Tile>
struct WarpProduct {
    static constexpr int MI = Tile::WM / 8, NI = Tile::WN / 4;
    float c[MI][NI];
    int row[MI];
    int lane, m0, n0;
    template <class RowOf>
    __device__ WarpProduct(RowOf row_of) {
        int warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        m0 = warp / (Tile::BN / Tile::WN) * Tile::WM, n0 = warp % (Tile::BN / Tile::WN) * Tile::WN;
#pragma unroll
        for (int i = 0; i < MI; i++) {
            row[i] = row_of(m0 + i * 8 + lane / 4);
#pragma unroll
            for (int j = 0; j < NI; j++) c[i][j] = 0;
        }
    }
    __device__ void multiply(uint32_t a_tile, uint32_t b_tile, int shift) {
#pragma unroll 2
        for (int k = 0; k < 8; k++) {
            float4 a[MI];
#pragma unroll
            for (int i = 0; i < MI; i++) {
                int r = row[i] + shift;
                a[i] = load_shared4(a_tile + r * 128 + ((k ^ (r & 7)) << 4));
            }
            if (Tile::TRANSPOSED) {
#pragma unroll
                for (int q = 0; q < 4; q++)
#pragma unroll
                    for (int j = 0; j < NI / 4; j++) {
                        int r = k * 4 + q, v = n0 / 4 + j * 4 + lane % 4;
                        float4 b = load_shared4(b_tile + r * (Tile::BN * 4) + ((v ^ (r & 7)) << 4));
#pragma unroll
                        for (int i = 0; i < MI; i++) {
                            float s = q == 0 ? a[i].x : q == 1 ? a[i].y : q == 2 ? a[i].z : a[i].w;
                            c[i][j * 4 + 0] += s * b.x, c[i][j * 4 + 1] += s * b.y;
                            c[i][j * 4 + 2] += s * b.z, c[i][j * 4 + 3] += s * b.w;
                        }
                    }
            } else {
#pragma unroll
                for (int j = 0; j < NI; j++) {
                    int r = n0 + j * 4 + lane % 4;
                    float4 b = load_shared4(b_tile + r * 128 + ((k ^ (r & 7)) << 4));
#pragma unroll
                    for (int i = 0; i < MI; i++) {
                        c[i][j] += a[i].x * b.x, c[i][j] += a[i].y * b.y;
                        c[i][j] += a[i].z * b.z, c[i][j] += a[i].w * b.w;
                    }
                }
            }
        }
    }
    __device__ void store(float* staging) {
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int j = 0; j < NI; j++) {
                int n = Tile::TRANSPOSED ? j / 4 * 16 + lane % 4 * 4 + j % 4 : j * 4 + lane % 4;
                staging[(m0 + i * 8 + lane / 4) * Tile::STAGING_PITCH + n0 + n] = c[i][j];
            }
    }
};
#endif

// VEC neighbouring columns of the output, from column n: what is added to the sums, and where they go. Loads
// are apart from stores, so that several pixels' loads can be under way: the compiler can't know that
// residual, which may be out itself, is never read after it was written.
struct OutputColumns {
    floatX* out;
    const floatX *residual, *emb;
    int width, emb_pitch;
    float bias[VEC];
    __device__ OutputColumns(const Gemm& g, int n) {
        bool second = n >= g.N1;
        int column = second ? n - g.N1 : n;
        width = second ? g.N - g.N1 : g.N1, emb_pitch = g.emb_pitch;
        out = (second ? g.out2 : g.out) + column, residual = second ? g.residual2 : g.residual;
        if (residual) residual += column;
        emb = g.emb ? g.emb + n : nullptr;
#pragma unroll
        for (int e = 0; e < VEC; e++) bias[e] = 0;
        if (g.bias) add_vector(bias, g.bias + n);
    }
    // To the sums: the bias and the embedding of an image.
    __device__ void add(float (&value)[VEC], int image) const {
        if (emb) add_vector(value, emb + (size_t)image * emb_pitch);
#pragma unroll
        for (int e = 0; e < VEC; e++) value[e] += bias[e];
    }
    __device__ uint4 load(int m) const { return *(const uint4*)(residual + (size_t)m * width); }
    __device__ void store(float (&value)[VEC], uint4 added, int m) const {
        if (residual) {
            float x[VEC];
            unpack(x, added);
#pragma unroll
            for (int e = 0; e < VEC; e++) value[e] += x[e];
        }
        *(uint4*)(out + (size_t)m * width) = pack(value);
    }
};

// out = F.linear(cat([x, x2], 1), w, bias) + residual, or F.conv2d(x, w, bias, padding=1) + emb + residual,
// or the input gradient of either: x is then dout, and w's taps are read backwards. M pixels, N output
// channels. Block (tile, split) owns BM pixels by BN channels of `out`, or of its split's partial sums. The
// reduction runs over chunks of BK channels and within them over the taps. Per block: each chunk's BM rows
// (3x3: with border) and BN x BK weights a tap come from device memory or L2 once; the output is written
// once, in 16-byte vectors.
template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS) gemm_kernel(const __grid_constant__ Gemm g) {
    constexpr int TAPS = Tile::TAPS, STAGES = Tile::STAGES, BM = Tile::BM, BN = Tile::BN,
                  THREADS = Tile::THREADS;
    extern __shared__ __align__(128) unsigned char shared[];
    int* pixel_of_row = (int*)shared;  // 3x3: the pixel that lies in each row of A, -1: outside the image
    uint32_t b_ring = shared_address(shared) + Tile::TABLE_BYTES, a_ring = b_ring + STAGES * Tile::B_BYTES;
    const int a_rows = TAPS > 1 ? g.patch.rows() : BM, a_bytes = a_rows * 128;
    int tid = threadIdx.x, n_tiles = (g.N + BN - 1) / BN;
    int n0 = blockIdx.x % n_tiles * BN, tile = blockIdx.x / n_tiles;

    int chunks1 = (g.C + BK - 1) / BK, chunks = chunks1 + (g.C2 + BK - 1) / BK;
    int first = (int)((long long)blockIdx.y * chunks / g.splits);
    int last = (int)((long long)(blockIdx.y + 1) * chunks / g.splits), steps = (last - first) * TAPS;

    if (TAPS > 1) {
        Patch::Origin origin = g.patch.origin(tile);
        for (int r = tid; r < a_rows; r += THREADS) pixel_of_row[r] = g.patch.pixel(origin, g.patch.place(r));
        __syncthreads();
    }
    auto load_a = [&](int buffer, int chunk, int begin, int end) {
        bool second = TAPS == 1 && chunk >= chunks1;
        const floatX* x = second ? g.x2 : g.x;
        int channels = second ? g.C2 : g.C, c0 = (second ? chunk - chunks1 : chunk) * BK;
        uint32_t to = a_ring + buffer * a_bytes;
#pragma unroll
        for (int i = begin; i < end; i++) {
            int r = (i * THREADS + tid) / 8, v = tid % 8;  // THREADS is a multiple of 8
            if ((TAPS > 1 || BM * 8 % THREADS != 0) && r >= a_rows) break;
            int c = c0 + v * VEC, m = TAPS > 1 ? pixel_of_row[r] : tile * BM + r;
            bool valid = (TAPS > 1 ? m >= 0 : m < g.M) && c < channels;
            copy_async(to + r * 128 + ((v ^ (r & 7)) << 4), valid ? x + (size_t)m * channels + c : x, valid);
        }
    };
    // The tile of w's rows and vectors: n and c, or TRANSPOSED c and n. Called once a step, in order.
    constexpr int ROW = Tile::TRANSPOSED ? BN / VEC : 8, ROWS = THREADS / ROW;  // vectors a row, rows a pass
    int b_row = tid / ROW, b_vector = tid % ROW, b_chunk = first, b_tap = 0, b_stage = 0;
    const size_t stride = (size_t)TAPS * (Tile::TRANSPOSED ? g.N : g.C + g.C2);
    const floatX* b_from =
        g.w + b_vector * VEC + (Tile::TRANSPOSED ? b_row * stride + n0 : (n0 + b_row) * stride);
    const uint32_t b_to = b_ring + b_row * (ROW * 16) + ((b_vector ^ (b_row & 7)) << 4);
    static_assert(ROWS % 8 == 0 || BN * 8 <= THREADS, "passes keep the swizzle");
    auto load_b = [&] {
        bool second = TAPS == 1 && b_chunk >= chunks1;
        int channels = second ? g.C2 : g.C, c0 = (second ? b_chunk - chunks1 : b_chunk) * BK, rows;
        const floatX* from = b_from;
        if (Tile::TRANSPOSED) {
            rows = n0 + b_vector * VEC < g.N ? channels - c0 - b_row : 0;
            from += c0 * stride + (size_t)(TAPS - 1 - b_tap) * g.N;
        } else {
            rows = c0 + b_vector * VEC < channels ? g.N - n0 - b_row : 0;
            from += b_tap * g.C + (second ? g.C : 0) + c0;
        }
#pragma unroll
        for (int i = 0; i < (BN * 8 + THREADS - 1) / THREADS; i++) {
            if (BN * 8 % THREADS != 0 && i * THREADS + tid >= BN * 8) break;
            bool valid = i * ROWS < rows;
            copy_async(b_to + b_stage * Tile::B_BYTES + i * (ROWS * ROW * 16), valid ? from : g.w, valid);
            from += ROWS * stride;
        }
        if (++b_stage == STAGES) b_stage = 0;
        if (++b_tap == TAPS) b_tap = 0, b_chunk++;
    };

    WarpProduct<Tile> product([&](int p) { return TAPS > 1 ? g.patch.row(p) : p; });
    if (TAPS > 1) load_a(0, first, 0, Tile::A_VECTORS);
    for (int s = 0; s < STAGES - 1; s++) {
        if (TAPS == 1 && s < steps) load_a(s, first + s, 0, Tile::A_VECTORS);
        if (s < steps) load_b();
        copy_commit();
    }
    int tap = 0, chunk = 0, stage = 0;  // of step s, the chunk counted from `first`
    for (int s = 0; s < steps; s++) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // step s has arrived for every thread, and every thread is done with step s - 1
        int next = s + STAGES - 1;
        if (TAPS > 1 && first + chunk + 1 < last && tap < Tile::A_PARTS) {
            constexpr int PART = (Tile::A_VECTORS + Tile::A_PARTS - 1) / Tile::A_PARTS;
            int begin = tap * PART;
#pragma unroll
            for (int i = 0; i < PART; i++)
                if (begin + i < Tile::A_VECTORS)
                    load_a((chunk + 1) % 2, first + chunk + 1, begin + i, begin + i + 1);
        }
        if (next < steps) {
            if (TAPS == 1) load_a(next % STAGES, first + next, 0, Tile::A_VECTORS);
            load_b();
        }
        copy_commit();
        product.multiply(a_ring + (TAPS > 1 ? chunk % 2 : stage) * a_bytes, b_ring + stage * Tile::B_BYTES,
                         TAPS > 1 ? g.patch.tap(tap) : 0);
        if (++tap == TAPS) tap = 0, chunk++;
        if (++stage == STAGES) stage = 0;
    }

    copy_wait<0>();
    __syncthreads();  // the rings become the staging area
    float* staging = (float*)(shared + Tile::TABLE_BYTES);
    product.store(staging);
    __syncthreads();
    // A pass takes PASS pixels; a batch of passes stays within 64 pixels and so, in a 3x3 convolution, in an
    // image.
    constexpr int PASS = THREADS / (BN / VEC), BATCH = PASS >= 64 ? 1 : PASS >= 32 ? 2 : 4;
    int column = tid % (BN / VEC) * VEC, n = n0 + column;
    if (n >= g.N) return;
    bool finishes = g.splits == 1;
    OutputColumns columns(g, n);
    int image0 = TAPS > 1 ? g.patch.origin(tile).b : 0;
    const float* from = staging + tid / (BN / VEC) * Tile::STAGING_PITCH + column;
#pragma unroll 1
    for (int p0 = tid / (BN / VEC); p0 < BM; p0 += BATCH * PASS) {
        int m[BATCH];
        uint4 residual[BATCH];
        float added[VEC] = {0};
        if (finishes && TAPS > 1)
            columns.add(added, min(image0 + (g.patch.images > 1 ? p0 / 64 : 0), g.patch.B - 1));
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int p = p0 + i * PASS;
            m[i] = TAPS > 1 ? pixel_of_row[g.patch.row(p) + g.patch.tap(4)] : tile * BM + p;
            if (m[i] >= g.M) m[i] = -1;
            if (m[i] >= 0 && finishes && columns.residual) residual[i] = columns.load(m[i]);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++, from += PASS * Tile::STAGING_PITCH) {
            if (m[i] < 0) continue;
            float value[VEC];
#pragma unroll
            for (int e = 0; e < VEC; e += 4) *(float4*)(value + e) = *(const float4*)(from + e);
            if (finishes) {
                if (TAPS > 1)
#pragma unroll
                    for (int e = 0; e < VEC; e++) value[e] += added[e];
                else
                    columns.add(value, g.emb ? m[i] / g.T : 0);
                columns.store(value, residual[i], m[i]);
            } else {
                float* to = g.partial + ((size_t)blockIdx.y * g.M + m[i]) * g.N + n;
#pragma unroll
                for (int e = 0; e < VEC; e += 4) *(float4*)(to + e) = *(float4*)(value + e);
            }
        }
    }
}

// out = the sum over splits of partial (splits, M, N), in order, and what is added to it. A thread owns VEC
// outputs.
__global__ void gemm_reduce_kernel(const Gemm g) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * VEC, n = (size_t)g.M * g.N;
    if (i >= n) return;
    int m = (int)(i / g.N);
    OutputColumns columns(g, (int)(i % g.N));
    uint4 residual;
    if (columns.residual) residual = columns.load(m);
    float value[VEC] = {0};
#pragma unroll 4
    for (int s = 0; s < g.splits; s++)
#pragma unroll
        for (int e = 0; e < VEC; e += 4) {
            float4 part = *(const float4*)(g.partial + s * n + i + e);
            value[e] += part.x, value[e + 1] += part.y, value[e + 2] += part.z, value[e + 3] += part.w;
        }
    columns.add(value, m / g.T);
    columns.store(value, residual, m);
}

template <class Tile>
static void launch_gemm_tile(Gemm g) {
    if (Tile::TAPS > 1) g.patch = make_patch(g.patch.B, g.patch.H, g.patch.W, Tile::BM);
    int chunks = ceil_div(g.C, BK) + ceil_div(g.C2, BK);
    int tiles = (Tile::TAPS > 1 ? g.patch.tiles : ceil_div(g.M, Tile::BM)) * ceil_div(g.N, Tile::BN);
    int bytes = Tile::shared_bytes(chunks, Tile::TAPS > 1 ? g.patch.rows() : Tile::BM);
    launch(gemm_kernel<Tile>, dim3(tiles, g.splits), Tile::THREADS, bytes, g);
    if (g.splits > 1) launch(gemm_reduce_kernel, ceil_div((size_t)g.M * g.N / VEC, 256), 256, 0, g);
}

#ifdef HOPPER  // compute capability 9.0 with its own instructions (sm_90a), in bf16; defined by the Makefile
template <int TAPS, bool TRANSPOSED>
static bool launch_hopper(Gemm* g);
#endif

#ifdef TESTING
static int forced_tile = -1, forced_splits = 0;  // tests and tuning: instead of the estimate below
#endif

// The tile and the split with the least estimated time. A block's time is its arithmetic at the rate that
// its tile reaches; blocks that share a multiprocessor share that rate, and a lone one reaches half of it.
template <int TAPS, bool TRANSPOSED>
static void launch_portable(Gemm g) {
    if constexpr (!TRANSPOSED)
        if (g.N <= 16) {  // an image
            g.splits = 1;
            launch_gemm_tile<GemmTile<128, 16, 32, 16, TAPS, false, 3, 3>>(g);
            return;
        }
    // Relative rates, and microseconds a block spends before and after its arithmetic: measured on an H100.
    static const int BM[] = {128, 128, 64}, BN[] = {128, 64, 64};
    static const float RATE[] = {1.0f, 0.92f, 0.75f}, FIXED[] = {1.6f, 0.9f, 0.5f};
    constexpr int COLUMNS =
        sizeof(floatX) == 2 ? 64 : 32;  // a warp's columns: fp32 has 64 sums a thread at most
    int chunks = ceil_div(g.C, BK) + ceil_div(g.C2, BK), best = 0, splits = 1;
    float least = 1e30f;
    for (int t = 0; t < 3; t++) {
        int pixel_tiles =
            TAPS > 1 ? make_patch(g.patch.B, g.patch.H, g.patch.W, BM[t]).tiles : ceil_div(g.M, BM[t]);
        int tiles = pixel_tiles * ceil_div(g.N, BN[t]);
        for (int s = 1; s <= chunks && s <= 8; s++) {
            if (s > 1 && (size_t)s * g.M * g.N * sizeof(float) > Borrowed::left()) break;
            float step = 2.0f * BM[t] * BN[t] * BK / 3.2e6f / RATE[t];  // at 3.2 TFLOP/s
            if (sizeof(floatX) == 4) step *= 10;
            int load = ceil_div((size_t)tiles * s, gpu_multiprocessors);
            float time =
                load * (step * TAPS * ceil_div(chunks, s) * (load == 1 ? 1.8f : 1.0f) + FIXED[t]) + 2.0f;
            if (s > 1) time += 2.0f + 8.0f * s * g.M * g.N / 3e6f;
            if (time < least) least = time, best = t, splits = s;
        }
    }
#ifdef TESTING
    if (forced_tile >= 0) best = forced_tile;
    if (forced_splits > 0) splits = forced_splits > chunks ? chunks : forced_splits;
#endif
    Borrowed borrowed;
    g.splits = splits;
    if (splits > 1) g.partial = take<float>(&lane->workspace, (size_t)splits * g.M * g.N);
    if (best == 0)
        launch_gemm_tile<GemmTile<128, 128, 64, COLUMNS, TAPS, TRANSPOSED, 3, COLUMNS == 64 ? 2 : 1>>(g);
    if (best == 1) launch_gemm_tile<GemmTile<128, 64, 64, 32, TAPS, TRANSPOSED, 3, 3>>(g);
    if (best == 2) launch_gemm_tile<GemmTile<64, 64, 32, 32, TAPS, TRANSPOSED, TAPS == 1 ? 3 : 5, 4>>(g);
}

template <int TAPS, bool TRANSPOSED>
static void launch_gemm(Gemm g) {
    ASSERT(g.C % CHANNEL_MULTIPLE + g.C2 % CHANNEL_MULTIPLE + g.N % CHANNEL_MULTIPLE +
               g.N1 % CHANNEL_MULTIPLE ==
           0);
    bool done = false;
#ifdef HOPPER
#ifdef TESTING
    if (forced_tile < 0)
#endif
        done = launch_hopper<TAPS, TRANSPOSED>(&g);
#endif
    if (!done) launch_portable<TAPS, TRANSPOSED>(g);
    if (g.moments) channel_moments(g.moments, g.out, g.M / g.T, g.T, g.N);
    if (g.norm.mean) groupnorm_gradient(g.out, g.out, g.norm, g.M / g.T, g.T);
}

// ---- weight gradient

struct WeightGradient {
    float* dw;             // (O, taps, C + C2): added to, where partial is null
    float* partial;        // (splits, O, taps, C + C2): overwritten
    const floatX* dout;    // (M, O)
    const floatX *x, *x2;  // (M, C), (M, C2)
    float* dbias;          // (O): added to; null: not wanted here
    floatX* per_image;     // (B, image_pitch)[:, :O]: the sums of dout over each image; null: not wanted
    int image_pitch;
    float* bias_parts;  // (splits + groups, group_images, O)
    int M, O, C, C2;
    int splits, tiles;                 // of the pixels
    int partials;                      // partial sums of dw: one a split, or a cluster of splits
    int B, group_images, group_tiles;  // 3x3: images that share tiles are a group; 1x1: all is one
    Patch patch;                       // 3x3 only
    // The split that tile t belongs to, if split s has tiles [s * tiles / splits, (s + 1) * tiles / splits).
    __device__ int split_of(int t) const { return (int)(((t + 1ll) * splits - 1) / tiles); }
};

#ifdef HOPPER
static void launch_hopper_weight_gradient(WeightGradient g);
#endif

// 64 output channels by 64 input channels and all taps a block; PIXELS a step of the reduction.
template <int TAPS_, int PIXELS_, int WARPS_O_, int WARPS_N_, int STAGES_, int BLOCKS_>
struct WeightTile {
    static constexpr int TAPS = TAPS_, PIXELS = PIXELS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr int WARPS_O = WARPS_O_, WARPS_N = WARPS_N_, THREADS = WARPS_O * WARPS_N * 32;
    static constexpr int ROW = 64 / VEC,
                         ROW_BYTES = 64 * (int)sizeof(floatX);  // of shared memory, in vectors, bytes
    static constexpr int X_ROWS = TAPS == 1 ? PIXELS : PIXELS / 64 * 100;
    static constexpr int STAGE_BYTES = (PIXELS + X_ROWS) * ROW_BYTES;
    static constexpr int TABLE_BYTES = TAPS == 1 ? 0 : ((X_ROWS + PIXELS) * 4 + 127) / 128 * 128;
    static constexpr int WARPS = THREADS / 32, BIAS_BYTES = THREADS * VEC * (int)sizeof(float);
    static constexpr int SHARED_BYTES = TABLE_BYTES + BIAS_BYTES + STAGES * STAGE_BYTES;
};

// Column sums of a block's dout tiles, taken from shared memory. A thread adds up one vector of channels of
// its warp's pixels in a place of its own; on leaving a group of images the block writes part split + group:
// the pair (split, group) never goes down, so no two pairs have the same sum.
template <class Tile>
struct BiasSums {
    float* area;  // BIAS_BYTES of shared memory
    int group;
    __device__ float4* own() const { return (float4*)area + threadIdx.x; }
    __device__ void clear() {
#pragma unroll
        for (int e = 0; e < VEC / 4; e++) own()[e * Tile::THREADS] = make_float4(0, 0, 0, 0);
    }
    // Called by the whole block.
    __device__ void flush(const WeightGradient& g, int o0) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float4 sum[VEC / 4];
#pragma unroll
        for (int e = 0; e < VEC / 4; e++) {
            sum[e] = own()[e * Tile::THREADS];
#pragma unroll
            for (int step = Tile::ROW; step < 32; step *= 2) {
                sum[e].x += __shfl_xor_sync(~0u, sum[e].x, step),
                    sum[e].y += __shfl_xor_sync(~0u, sum[e].y, step);
                sum[e].z += __shfl_xor_sync(~0u, sum[e].z, step),
                    sum[e].w += __shfl_xor_sync(~0u, sum[e].w, step);
            }
        }
        __syncthreads();
        if (lane < Tile::ROW)
#pragma unroll
            for (int e = 0; e < VEC / 4; e++) *(float4*)(area + warp * 64 + lane * VEC + 4 * e) = sum[e];
        __syncthreads();
        int warps = Tile::WARPS / g.group_images, image = threadIdx.x / 64, o = threadIdx.x % 64;
        if (image < g.group_images && o0 + o < g.O) {
            float total = 0;
            for (int w = image * warps; w < (image + 1) * warps; w++) total += area[w * 64 + o];
            g.bias_parts[((size_t)(blockIdx.y + group) * g.group_images + image) * g.O + o0 + o] = total;
        }
        __syncthreads();
    }
    __device__ void add(const unsigned char* d_tile) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, v = lane % Tile::ROW;
        float sum[VEC] = {0};
#pragma unroll
        for (int i = 0; i < Tile::PIXELS / Tile::WARPS * Tile::ROW / 32; i++) {
            int p = warp * (Tile::PIXELS / Tile::WARPS) + i * (32 / Tile::ROW) + lane / Tile::ROW;
            add_vector(sum, (const floatX*)(d_tile + p * Tile::ROW_BYTES + ((v ^ (p & 7)) << 4)));
        }
#pragma unroll
        for (int e = 0; e < VEC / 4; e++) {
            float4 old = own()[e * Tile::THREADS];
            own()[e * Tile::THREADS] = make_float4(old.x + sum[4 * e], old.y + sum[4 * e + 1],
                                                   old.z + sum[4 * e + 2], old.w + sum[4 * e + 3]);
        }
    }
};

#ifndef PRECISION_FP32
// The 64 x (taps * 64) sums are cut into 16 x 8 fragments; a warp owns MI x NI of them. Both operands lie
// with the reduction down the rows, so both are read transposed, and a tap is again a shift of rows.
template <class Tile>
struct WeightProduct {
    static constexpr int MI = 4 / Tile::WARPS_O, NI = Tile::TAPS * 8 / Tile::WARPS_N;
    static_assert(Tile::TAPS == 1 || NI == Tile::TAPS, "3x3: a warp owns eight input channels, and all taps");
    static_assert(MI * Tile::WARPS_O == 4 && NI * Tile::WARPS_N == Tile::TAPS * 8,
                  "warps share the work evenly");
    float c[MI][NI][4];
    int lane, o0, n0;
    // Eight input channels of fragment j; its tap is j.
    __device__ int vector(int j) const { return Tile::TAPS > 1 ? n0 : n0 * NI + j; }
    __device__ WeightProduct() {
        int warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        o0 = warp / Tile::WARPS_N * MI * 16, n0 = warp % Tile::WARPS_N;
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int j = 0; j < NI; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) c[i][j][e] = 0;
    }
    __device__ void multiply(uint32_t d_tile, uint32_t x_tile, const int* row_of_pixel, const Patch& patch) {
#pragma unroll 1
        for (int k = 0; k < Tile::PIXELS; k += 32) {
            uint32_t a[2][MI][4], a_line = d_tile + (k + lane / 16 * 8 + lane % 8) * 128;
            a_line += ((o0 / 8 + lane / 8 % 2) ^ (lane & 7)) << 4;
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < MI; i++)
                    load_matrices_transposed(a[h][i], (a_line ^ i << 5) + h * 16 * 128);
            int row = Tile::TAPS > 1 ? row_of_pixel[k + lane] : k + lane;
#pragma unroll
            for (int j = 0; j < NI; j++) {
                uint32_t b[4];
                int r = Tile::TAPS > 1 ? row + patch.tap(j) : row, v = vector(j);
                load_matrices_transposed(b, x_tile + r * 128 + ((v ^ (r & 7)) << 4));
#pragma unroll
                for (int i = 0; i < MI; i++) mma(c[i][j], a[0][i], b[0], b[1]);
#pragma unroll
                for (int i = 0; i < MI; i++) mma(c[i][j], a[1][i], b[2], b[3]);
            }
        }
    }
    // put(o, tap, c, two sums of neighbouring c)
    template <class Put>
    __device__ void store(Put put) {
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
            for (int j = 0; j < NI; j++) {
                int o = o0 + i * 16 + lane / 4, channel = vector(j) * 8 + lane % 4 * 2,
                    tap = Tile::TAPS > 1 ? j : 0;
                put(o, tap, channel, make_float2(c[i][j][0], c[i][j][1]));
                put(o + 8, tap, channel, make_float2(c[i][j][2], c[i][j][3]));
            }
    }
};
#else
// 3x3: a thread owns 8 output channels, 2 input channels and all taps. Along eight pixels of a line a 3 x 3
// window of x slides in registers, so that a pixel costs three new loads of x and two of dout for 144 FMAs.
// 1x1: 8 output channels by 4 input channels.
template <class Tile>
struct WeightProduct {
    static constexpr int NC = Tile::TAPS > 1 ? 2 : 4;
    float c[8][Tile::TAPS][NC];
    int o0, c0;
    __device__ WeightProduct() {
        static_assert(Tile::THREADS * 8 * NC == 64 * 64, "every sum has one owner");
        o0 = threadIdx.x / (64 / NC) * 8, c0 = threadIdx.x % (64 / NC) * NC;
#pragma unroll
        for (int o = 0; o < 8; o++)
#pragma unroll
            for (int t = 0; t < Tile::TAPS; t++)
#pragma unroll
                for (int e = 0; e < NC; e++) c[o][t][e] = 0;
    }
    __device__ static uint32_t at(uint32_t tile, int row, int channel) {
        return tile + row * 256 + (((channel / 4) ^ (row & 7)) << 4) + channel % 4 * 4;
    }
    __device__ void multiply(uint32_t d_tile, uint32_t x_tile, const int* row_of_pixel, const Patch& patch) {
        if constexpr (Tile::TAPS > 1) {
#pragma unroll 1
            for (int k = 0; k < Tile::PIXELS; k += 8) {
                int row = row_of_pixel[k];
                float2 x[3][3];
#pragma unroll
                for (int t = 0; t < 9; t++)
                    if (t % 3 < 2) x[t / 3][t % 3] = load_shared2(at(x_tile, row + patch.tap(t), c0));
#pragma unroll
                for (int p = 0; p < 8; p++) {
#pragma unroll
                    for (int y = 0; y < 3; y++)
                        x[y][(p + 2) % 3] = load_shared2(at(x_tile, row + p + patch.tap(3 * y + 2), c0));
                    float4 d[2] = {load_shared4(at(d_tile, k + p, o0)),
                                   load_shared4(at(d_tile, k + p, o0 + 4))};
                    const float dout[8] = {d[0].x, d[0].y, d[0].z, d[0].w, d[1].x, d[1].y, d[1].z, d[1].w};
#pragma unroll
                    for (int o = 0; o < 8; o++)
#pragma unroll
                        for (int t = 0; t < 9; t++) {
                            c[o][t][0] += dout[o] * x[t / 3][(p + t) % 3].x;
                            c[o][t][1] += dout[o] * x[t / 3][(p + t) % 3].y;
                        }
                }
            }
        } else {
#pragma unroll 4
            for (int k = 0; k < Tile::PIXELS; k++) {
                float4 x = load_shared4(at(x_tile, k, c0));
                float4 d[2] = {load_shared4(at(d_tile, k, o0)), load_shared4(at(d_tile, k, o0 + 4))};
                const float dout[8] = {d[0].x, d[0].y, d[0].z, d[0].w, d[1].x, d[1].y, d[1].z, d[1].w};
#pragma unroll
                for (int o = 0; o < 8; o++) {
                    c[o][0][0] += dout[o] * x.x, c[o][0][1] += dout[o] * x.y;
                    c[o][0][2] += dout[o] * x.z, c[o][0][3] += dout[o] * x.w;
                }
            }
        }
    }
    template <class Put>
    __device__ void store(Put put) {
#pragma unroll
        for (int o = 0; o < 8; o++)
#pragma unroll
            for (int t = 0; t < Tile::TAPS; t++)
#pragma unroll
                for (int e = 0; e < NC; e += 2)
                    put(o0 + o, t, c0 + e, make_float2(c[o][t][e], c[o][t][e + 1]));
    }
};
#endif

// dw (O, taps, C + C2) = einsum('mo,mtc->otc', dout, neighbourhoods of cat([x, x2], 1)), over M pixels.
// Block (tile, split) owns 64 x taps x 64 of dw, or of its split's partial sums; splits divide the pixels'
// tiles evenly. Per block: its split's pixels' 64 channels of dout and of x (3x3: with border) come in once,
// for all taps. The first of the blocks that share dout's channels also writes their column sums.
template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)
    weight_gradient_kernel(const WeightGradient g) {
    constexpr int TAPS = Tile::TAPS, STAGES = Tile::STAGES, PIXELS = Tile::PIXELS, ROW = Tile::ROW;
    constexpr int THREADS = Tile::THREADS;
    extern __shared__ __align__(128) unsigned char shared[];
    int *place_of_row = (int*)shared, *row_of_pixel = place_of_row + Tile::X_ROWS;
    unsigned char* ring_bytes = shared + Tile::TABLE_BYTES + Tile::BIAS_BYTES;
    uint32_t ring = shared_address(ring_bytes);
    int tid = threadIdx.x;
    int tiles1 = ceil_div(g.C, 64), c_tiles = tiles1 + ceil_div(g.C2, 64), c_tile = blockIdx.x % c_tiles;
    bool second = c_tile >= tiles1;
    const floatX* x = second ? g.x2 : g.x;
    int channels = second ? g.C2 : g.C, c0 = (second ? c_tile - tiles1 : c_tile) * 64;
    int o0 = blockIdx.x / c_tiles * 64;
    int first = (int)((long long)blockIdx.y * g.tiles / g.splits);
    int last = (int)((long long)(blockIdx.y + 1) * g.tiles / g.splits);
    bool sums_bias = g.bias_parts && c_tile == 0;
    BiasSums<Tile> bias = {(float*)(shared + Tile::TABLE_BYTES), first / g.group_tiles};
    if (sums_bias) bias.clear();

    if (TAPS > 1) {
        for (int r = tid; r < Tile::X_ROWS; r += THREADS) place_of_row[r] = g.patch.place(r);
        for (int p = tid; p < PIXELS; p += THREADS) row_of_pixel[p] = g.patch.row(p);
        __syncthreads();
    }
    auto load = [&](int tile) {
        uint32_t d_tile = ring + (tile - first) % STAGES * Tile::STAGE_BYTES,
                 x_tile = d_tile + PIXELS * Tile::ROW_BYTES;
        Patch::Origin origin = {0, 0, 0};
        if (TAPS > 1) origin = g.patch.origin(tile);
#pragma unroll
        for (int i = 0; i < PIXELS * ROW / THREADS; i++) {
            int p = (i * THREADS + tid) / ROW, v = tid % ROW, o = o0 + v * VEC;
            int m = tile * PIXELS + p;
            if (TAPS > 1) m = g.patch.pixel(origin, place_of_row[row_of_pixel[p] + g.patch.tap(4)]);
            bool valid = m >= 0 && m < g.M && o < g.O;
            copy_async(d_tile + p * Tile::ROW_BYTES + ((v ^ (p & 7)) << 4),
                       valid ? g.dout + (size_t)m * g.O + o : g.dout, valid);
        }
#pragma unroll
        for (int i = 0; i < (Tile::X_ROWS * ROW + THREADS - 1) / THREADS; i++) {
            int r = (i * THREADS + tid) / ROW, v = tid % ROW, c = c0 + v * VEC;
            if (TAPS > 1 && r >= g.patch.rows()) break;
            int m = TAPS > 1 ? g.patch.pixel(origin, place_of_row[r]) : tile * PIXELS + r;
            bool valid = m >= 0 && m < g.M && c < channels;
            copy_async(x_tile + r * Tile::ROW_BYTES + ((v ^ (r & 7)) << 4),
                       valid ? x + (size_t)m * channels + c : x, valid);
        }
    };
    WeightProduct<Tile> product;
    for (int s = 0; s < STAGES - 1; s++) {
        if (first + s < last) load(first + s);
        copy_commit();
    }
    for (int tile = first; tile < last; tile++) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // this tile has arrived, and every thread is done with the one before
        if (tile + STAGES - 1 < last) load(tile + STAGES - 1);
        copy_commit();
        int stage = (tile - first) % STAGES * Tile::STAGE_BYTES;
        uint32_t d_tile = ring + stage;
        if (sums_bias) {
            if (tile / g.group_tiles != bias.group) {
                bias.flush(g, o0);
                bias.clear();
                bias.group = tile / g.group_tiles;
            }
            bias.add(ring_bytes + stage);
        }
        product.multiply(d_tile, d_tile + PIXELS * Tile::ROW_BYTES, row_of_pixel, g.patch);
    }
    copy_wait<0>();
    if (sums_bias) bias.flush(g, o0);
    int K = g.C + g.C2;
    float* to = g.partial ? g.partial + (size_t)blockIdx.y * g.O * TAPS * K : g.dw;
    product.store([&](int o, int tap, int c, float2 value) {
        if (o0 + o >= g.O || c0 + c >= channels) return;
        float2* p = (float2*)(to + ((size_t)(o0 + o) * TAPS + tap) * K + (second ? g.C : 0) + c0 + c);
        *p = g.partial ? value : make_float2(p->x + value.x, p->y + value.y);
    });
}

// per_image and dbias += from bias_parts; 256 threads own channels [8 block, 8 block + 8). Each image has
// `lanes` of the 32 threads a channel, which take its parts in turn; with fewer than 32 images that is more
// than one.
__device__ void reduce_bias(const WeightGradient& g, int block) {
    __shared__ float sums[32][8];
    int o = block * 8 + threadIdx.x % 8, y = threadIdx.x / 8, lanes = 1;
    while (lanes * 2 * g.B <= 32) lanes *= 2;
    float total = 0;
    for (int b0 = 0; b0 < g.B; b0 += 32 / lanes) {
        int b = b0 + y / lanes, group = b / g.group_images, image = b % g.group_images;
        float sum = 0;
        if (b < g.B && o < g.O) {
            int s0 = g.split_of(group * g.group_tiles), s1 = g.split_of((group + 1) * g.group_tiles - 1) + 1;
#pragma unroll 8
            for (int s = s0 + y % lanes; s < s1; s += lanes)
                sum += g.bias_parts[((size_t)(s + group) * g.group_images + image) * g.O + o];
        }
        sums[y][threadIdx.x % 8] = sum;
        __syncthreads();
        if (y % lanes == 0 && b < g.B && o < g.O) {
            for (int i = 1; i < lanes; i++) sum += sums[y + i][threadIdx.x % 8];
            if (g.per_image) g.per_image[(size_t)b * g.image_pitch + o] = (floatX)sum;
            total += sum;
        }
        __syncthreads();
    }
    sums[y][threadIdx.x % 8] = y % lanes == 0 ? total : 0.0f;
    __syncthreads();
    if (y != 0 || o >= g.O) return;
    for (int i = 1; i < 32; i++) total += sums[i][threadIdx.x % 8];
    g.dbias[o] += total;
}

// dw += the sum over splits of partial (splits, n), in a fixed order: a thread adds every eighth split, then
// the eight meet. Block b owns sums [128 b, 128 b + 128); the blocks from weight_blocks on reduce the bias
// gradient.
__global__ void weight_reduce_kernel(const WeightGradient g, size_t n, int weight_blocks) {
    if (blockIdx.x >= (unsigned)weight_blocks) {
        reduce_bias(g, blockIdx.x - weight_blocks);
        return;
    }
    __shared__ float4 sums[REDUCE_GROUPS][32];
    int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    size_t i = ((size_t)blockIdx.x * 32 + lane) * 4;
    float4 sum = make_float4(0, 0, 0, 0), old = sum;
    if (group == 0 && i < n) old = *(const float4*)(g.dw + i);
    if (i < n)
        for (int first = group; first < g.partials; first += 8 * REDUCE_GROUPS) {
            float4 part[8];  // so many loads under way
#pragma unroll
            for (int k = 0; k < 8; k++) {
                int s = first + k * REDUCE_GROUPS;
                part[k] = s < g.partials ? *(const float4*)(g.partial + s * n + i) : make_float4(0, 0, 0, 0);
            }
#pragma unroll
            for (int k = 0; k < 8; k++)
                sum.x += part[k].x, sum.y += part[k].y, sum.z += part[k].z, sum.w += part[k].w;
        }
    sums[group][lane] = sum;
    __syncthreads();
    if (group != 0 || i >= n) return;
    for (int other = 1; other < REDUCE_GROUPS; other++) {
        float4 part = sums[other][lane];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    *(float4*)(g.dw + i) = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
}

// Borrows the partial sums of dbias, `rows` of (O). Those of thousands of images are better taken apart.
static void take_bias_parts(WeightGradient* g, size_t rows) {
    if (g->dbias && rows * g->O * sizeof(float) > Borrowed::left() / 2) {
        bias_backward(g->dbias, g->per_image, g->image_pitch, g->dout, g->B, g->M / g->B, g->O);
        g->dbias = nullptr;
    }
    g->bias_parts = g->dbias ? take<float>(&lane->workspace, rows * g->O) : nullptr;
}

template <int TAPS>
static void launch_weight_gradient(WeightGradient g) {
    ASSERT(g.O % CHANNEL_MULTIPLE + g.C % CHANNEL_MULTIPLE + g.C2 % CHANNEL_MULTIPLE == 0);
#ifdef HOPPER
    if (TAPS > 1) return launch_hopper_weight_gradient(g);
#endif
    Borrowed borrowed;
    constexpr bool HALF = sizeof(floatX) == 2;
    using Tile = typename std::conditional<(TAPS > 1), WeightTile<9, HALF ? 128 : 64, 1, 8, 2, 1>,
                                           WeightTile<1, HALF ? 64 : 32, 2, 2, 4, 3>>::type;
    if (TAPS > 1) g.patch = make_patch(g.patch.B, g.patch.H, g.patch.W, Tile::PIXELS);
    g.tiles = TAPS > 1 ? g.patch.tiles : ceil_div(g.M, Tile::PIXELS);
    g.B = TAPS > 1 ? g.patch.B : 1, g.group_images = TAPS > 1 ? g.patch.images : 1;
    g.group_tiles = TAPS > 1 ? g.patch.tiles_y * g.patch.tiles_x : g.tiles;
    int tiles = ceil_div(g.O, 64) * (ceil_div(g.C, 64) + ceil_div(g.C2, 64));
    int most = std::max(1, std::min(g.tiles, 2 * gpu_multiprocessors / (TAPS > 1 ? 2 : 1) / tiles));

    take_bias_parts(&g, (size_t)(most + ceil_div(g.B, g.group_images)) * g.group_images);

    // More splits shorten a block's walk over the pixels and lengthen the reduction.
    size_t n = (size_t)g.O * TAPS * (g.C + g.C2);
    most = std::max(1, std::min(most, (int)(Borrowed::left() / (n * sizeof(float)))));
    float least = 1e30f, tile_us = (HALF ? 4.0f : 12.0f) * (TAPS > 1 ? 1.0f : 0.12f);  // measured on an H100
    for (int s = 1; s <= most; s++) {
        float time = ceil_div(g.tiles, s) * tile_us + 8.0f * s * n / 4e6f;
        if (time < least) least = time, g.splits = s;
    }
    g.partials = g.splits;
    g.partial = g.splits > 1 ? take<float>(&lane->workspace, g.partials * n) : nullptr;
    launch(weight_gradient_kernel<Tile>, dim3(tiles, g.splits), Tile::THREADS, Tile::SHARED_BYTES, g);
    int weight_blocks = g.partial ? ceil_div(n, 128) : 0, bias_blocks = g.dbias ? ceil_div(g.O, 8) : 0;
    if (weight_blocks + bias_blocks == 0) return;
    launch(weight_reduce_kernel, weight_blocks + bias_blocks, 256, 0, g, n, weight_blocks);
}

// ---- bias gradient

// parts (B, chunks, O) = dout (B, T, O).sum(1), a chunk of pixels at a time. Block (slab, chunk, b) owns up
// to 8 vectors of channels of its chunk; dout is read once.
__global__ void bias_parts_kernel(float* parts, const floatX* dout, int T, int O, int chunk_rows) {
    __shared__ float sums[32][8 * VEC + 1];
    int v = threadIdx.x % 8, group = threadIdx.x / 8, o = (blockIdx.x * 8 + v) * VEC;
    int chunk = blockIdx.y, b = blockIdx.z, end = min((chunk + 1) * chunk_rows, T);
    float sum[VEC] = {0};
    for (int t = chunk * chunk_rows + group; t < end; t += 32) {
        const floatX* row = dout + ((size_t)b * T + t) * O + o;
        if (o < O) add_vector(sum, row);
    }
#pragma unroll
    for (int e = 0; e < VEC; e++) sums[group][v * VEC + e] = sum[e];
    __syncthreads();
    int channel = threadIdx.x;
    if (channel >= 8 * VEC || blockIdx.x * 8 * VEC + channel >= (unsigned)O) return;
    float total = 0;
    for (int i = 0; i < 32; i++) total += sums[i][channel];
    parts[((size_t)b * gridDim.y + chunk) * O + blockIdx.x * 8 * VEC + channel] = total;
}

// per_image (B, pitch)[:, :O] = parts.sum(1), where wanted; dbias (O) += parts.sum((0, 1)). Block b owns
// channels [32 b, 32 b + 32); eight threads a channel take every eighth image.
__global__ void bias_finish_kernel(float* dbias, floatX* per_image, int pitch, const float* parts, int B,
                                   int chunks, int O) {
    __shared__ float sums[REDUCE_GROUPS][32];
    int o = blockIdx.x * 32 + threadIdx.x;
    float total = 0;
    if (o < O)
        for (int b = threadIdx.y; b < B; b += REDUCE_GROUPS) {
            float sum = 0;
#pragma unroll 8
            for (int i = 0; i < chunks; i++) sum += parts[((size_t)b * chunks + i) * O + o];
            if (per_image) per_image[(size_t)b * pitch + o] = (floatX)sum;
            total += sum;
        }
    sums[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0 || o >= O) return;
    for (int group = 1; group < REDUCE_GROUPS; group++) total += sums[group][threadIdx.x];
    dbias[o] += total;
}

static void bias_backward(float* dbias, floatX* per_image, int pitch, const floatX* dout, int B, int T,
                          int O) {
    int slabs = ceil_div(O, 8 * VEC), chunks = ceil_div(4 * gpu_multiprocessors, B * slabs);
    chunks = std::max(1, std::min(chunks, ceil_div(T, 64)));
    int rows = ceil_div(T, chunks);
    chunks = ceil_div(T, rows);
    Borrowed borrowed;
    size_t most = std::max((size_t)1, Borrowed::left() / ((size_t)chunks * O * sizeof(float)));
    int images = (int)std::min((size_t)B, most);  // as many at a time as fit
    float* parts = take<float>(&lane->workspace, (size_t)images * chunks * O);
    for (int b = 0; b < B; b += images) {
        int count = std::min(images, B - b);
        launch(bias_parts_kernel, dim3(slabs, chunks, count), 256, 0, parts, dout + (size_t)b * T * O, T, O,
               rows);
        // Without per-image sums every part may go to any of the eight threads.
        launch(bias_finish_kernel, ceil_div(O, 32), dim3(32, REDUCE_GROUPS), 0, dbias,
               per_image ? per_image + (size_t)b * pitch : nullptr, pitch, parts,
               per_image ? count : count * chunks, per_image ? chunks : 1, O);
    }
}

// ---- launchers; maths and shapes stand above the CPU functions of the same names

static void linear_forward(floatX* out, const floatX* x, const floatX* x2, const floatX* w,
                           const floatX* bias, const floatX* residual, int M, int C, int C2, int O,
                           float2* moments, int T) {
    PROFILE("1x1 forward", convolution_work(M, 1, C + C2, O));
    Gemm g = {};
    g.out = out, g.residual = residual, g.x = x, g.x2 = x2, g.w = w, g.bias = bias, g.moments = moments;
    g.M = M, g.N = g.N1 = O, g.C = C, g.C2 = C2, g.T = T;
    launch_gemm<1, false>(g);
}

static void linear_input_gradient(floatX* dx, floatX* dx2, const floatX* dout, const floatX* w, int M, int C,
                                  int C2, int O, bool accumulate, const Normed& norm, int T) {
    PROFILE("1x1 dX", convolution_work(M, 1, C + C2, O));
    Gemm g = {};
    g.out = dx, g.out2 = dx2, g.x = dout, g.w = w;
    if (accumulate) g.residual = dx, g.residual2 = dx2;
    g.M = M, g.N = C + C2, g.N1 = C, g.C = O, g.T = T, g.norm = norm;
    launch_gemm<1, true>(g);
}

static void linear_weight_gradient(float* dw, float* dbias, const floatX* dout, const floatX* x,
                                   const floatX* x2, int M, int C, int C2, int O) {
    PROFILE("1x1 dW", convolution_work(M, 1, C + C2, O, sizeof(float)));
    WeightGradient g = {};
    g.dw = dw, g.dbias = dbias, g.dout = dout, g.x = x, g.x2 = x2, g.M = M, g.O = O, g.C = C, g.C2 = C2;
    launch_weight_gradient<1>(g);
}

static void linear_backward(floatX* dx, floatX* dx2, float* dw, float* dbias, const floatX* dout,
                            const floatX* x, const floatX* x2, const floatX* w, int M, int C, int C2, int O,
                            bool accumulate, const Normed& norm, int T) {
    backend_aside([&] { linear_weight_gradient(dw, dbias, dout, x, x2, M, C, C2, O); });
    if (dx) linear_input_gradient(dx, dx2, dout, w, M, C, C2, O, accumulate, norm, T);
}

static void conv3x3_forward(floatX* out, const floatX* x, const floatX* w, const floatX* bias,
                            const floatX* emb, int emb_pitch, const floatX* residual, int B, int H, int W,
                            int C, int O, float2* moments) {
    PROFILE("3x3 forward", convolution_work((double)B * H * W, 9, C, O));
    Gemm g = {};
    g.out = out, g.residual = residual, g.x = x, g.w = w, g.bias = bias, g.emb = emb, g.emb_pitch = emb_pitch;
    g.M = B * H * W, g.N = g.N1 = O, g.C = C, g.T = H * W, g.moments = moments;
    g.patch.B = B, g.patch.H = H, g.patch.W = W;
    launch_gemm<9, false>(g);
}

static void conv3x3_input_gradient(floatX* dx, const floatX* dout, const floatX* w, int B, int H, int W,
                                   int C, int O, const Normed& norm) {
    PROFILE("3x3 dX", convolution_work((double)B * H * W, 9, C, O));
    Gemm g = {};
    g.out = dx, g.x = dout, g.w = w;
    g.M = B * H * W, g.N = g.N1 = C, g.C = O, g.T = H * W, g.norm = norm;
    g.patch.B = B, g.patch.H = H, g.patch.W = W;
    launch_gemm<9, true>(g);
}

static void conv3x3_weight_gradient(float* dw, float* dbias, floatX* demb, int emb_pitch, const floatX* dout,
                                    const floatX* x, int B, int H, int W, int C, int O) {
    PROFILE("3x3 dW", convolution_work((double)B * H * W, 9, C, O, sizeof(float)));
    WeightGradient g = {};
    g.dw = dw;
    g.dbias = dbias, g.per_image = demb, g.image_pitch = emb_pitch;
    g.dout = dout, g.x = x, g.M = B * H * W, g.O = O, g.C = C;
    g.patch.B = B, g.patch.H = H, g.patch.W = W;
    launch_weight_gradient<9>(g);
}

static void conv3x3_backward(floatX* dx, float* dw, float* dbias, floatX* demb, int emb_pitch,
                             const floatX* dout, const floatX* x, const floatX* w, int B, int H, int W, int C,
                             int O, const Normed& norm) {
    backend_aside([&] { conv3x3_weight_gradient(dw, dbias, demb, emb_pitch, dout, x, B, H, W, C, O); });
    if (dx) conv3x3_input_gradient(dx, dout, w, B, H, W, C, O, norm);
}

}  // namespace gpu
#endif  // __CUDACC__

// ===========================================================================================================
// 13  HOPPER
// ===========================================================================================================

#ifdef HOPPER
namespace gpu {

// ---- tensor copies and warpgroup products

// A box of a tensor in device memory, up to five dimensions, copied to shared memory by the copy engine: rows
// of 64 channels, 128 bytes, swizzled as everywhere here, zeros where the box leaves the tensor. Completion
// counts down the bytes that a barrier in shared memory expects.
__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ inline void barrier_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Until the phase of this parity is over.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra "
        "AGAIN;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Where a thread stands in a ring of N barriers: the slot, and the parity of the phase to wait for. Who waits
// for slots to become empty begins with parity 1: the first time round at once.
template <int N>
struct Ring {
    int slot = 0, parity = 0;
    __device__ int before() const { return slot ? slot - 1 : N - 1; }
    __device__ void next() {
        if (++slot == N) slot = 0, parity ^= 1;
    }
};
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c, int x, int y,
                                int b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3, %4, %5}], "
        "[%6];" ::"r"(to),
        "l"(&map), "r"(c), "r"(x), "r"(y), "r"(b), "r"(barrier)
        : "memory");
}

// All threads of a cluster meet.
__device__ inline void cluster_barrier() {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
// From the shared memory of block `rank` of the cluster.
__device__ inline float4 load_cluster(uint32_t address, int rank) {
    float4 v;
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, "
        "%2, %3}, [there];\n}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(address), "r"(rank)
        : "memory");
    return v;
}

// What a warpgroup product reads from shared memory. K-major: rows of 64 k, groups of eight rows `stride`
// bytes apart. MN-major (transposed): rows of 64 m or n, one a k, groups of eight k `stride` bytes apart; the
// next 64 m or n lie `next` bytes further. The swizzle follows the address, so that a start may be any row: a
// tap of a 3x3 convolution is a shift of the start address.
__device__ inline uint64_t shared_matrix(uint32_t address, uint32_t stride, uint32_t next = 16) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(next >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}
__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
#define REGISTERS_8(c, i)                                                                       \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
        "+f"(c[i + 6]), "+f"(c[i + 7])
#define REGISTERS_32(c, i) \
    REGISTERS_8(c, i), REGISTERS_8(c, i + 8), REGISTERS_8(c, i + 16), REGISTERS_8(c, i + 24)
#define NAMES_10(t) \
    "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define NAMES_30 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," NAMES_10(1) "," NAMES_10(2)
#define NAMES_60 NAMES_30 "," NAMES_10(3) "," NAMES_10(4) "," NAMES_10(5)
#define NAMES_90 NAMES_60 "," NAMES_10(6) "," NAMES_10(7) "," NAMES_10(8)
// c (64, N) += a (64, 16) b (16, N); c[4 j + e] of thread t: row t / 32 * 16 + t % 32 / 4 + e / 2 * 8, column
// 8 j + t % 4 * 2 + e % 2.
template <int N, int TRANSPOSED_A, int TRANSPOSED_B>
__device__ inline void wgmma(float* c, uint64_t a, uint64_t b) {  // c: N / 2 registers
    static_assert(N == 64 || N == 128 || N == 192, "");
    if constexpr (N == 64)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_30
                     ",%30,%31}, %32, %33, 1, 1, 1, %34, %35;"
                     : REGISTERS_32(c, 0)
                     : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
    if constexpr (N == 128)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_60
                     ",%60,%61,%62,%63}, %64, %65, 1, 1, 1, %66, %67;"
                     : REGISTERS_32(c, 0), REGISTERS_32(c, 32)
                     : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
    if constexpr (N == 192)
        asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" NAMES_90
                     ",%90,%91,%92,%93,%94,%95}, %96, %97, 1, 1, 1, %98, %99;"
                     : REGISTERS_32(c, 0), REGISTERS_32(c, 32), REGISTERS_32(c, 64)
                     : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
}

// The map of x (B, H, W, C) for boxes of 64 channels, `width` columns, `height` lines and `images`.
static CUtensorMap tensor_map(const floatX* x, int C, int W, int H, int B, int width, int height,
                              int images) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&encode, 12000,
                                                    cudaEnableDefault, &found));
        ASSERT(found == cudaDriverEntryPointSuccess);
    }
    CUtensorMap map;
    cuuint64_t row = (cuuint64_t)C * sizeof(floatX);
    cuuint64_t sizes[4] = {(cuuint64_t)C, (cuuint64_t)W, (cuuint64_t)H, (cuuint64_t)B},
               strides[3] = {row, row * W, row * W * H};
    cuuint32_t box[4] = {64, (cuuint32_t)width, (cuuint32_t)height, (cuuint32_t)images},
               steps[4] = {1, 1, 1, 1};
    CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)x, sizes, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    ASSERT(status == CUDA_SUCCESS);
    return map;
}

// ---- forward and input gradient

struct HopperGemm {
    CUtensorMap x, x2, w, out, out2;
    CUtensorMap beside, beside2;  // read where the outputs go: the residual, or a norm's x
    const floatX *bias, *emb;     // (N), (B, emb_pitch)[:, :N]; null: none
    int emb_pitch;
    float2* sums;  // (B, parts, N): the output's moments, or its norm's sums; null: none
    Normed norm;
    int C, N, N1, chunks1, chunks;  // out2 has the columns from N1 on
    int beside1;                    // beside2 those from here on
    bool has_beside;
    int B, H, W, T, tiles_x, tiles_y, tiles;
    int share;  // the chunks of one of a cluster's blocks
};

// 64 channels by 128 BLOCKS pixels a block; a warpgroup owns 128 of the pixels: 16 lines of 8, or with PAIRS,
// for images no larger than 8 x 8, two whole images; without neighbours (1x1) any 128 in a row.
template <int TAPS_, bool TRANSPOSED_, bool PAIRS_, int BLOCKS_, int STAGES_, int RESIDENT_>
struct HopperTile {
    static constexpr int TAPS = TAPS_, BLOCKS = BLOCKS_, STAGES = STAGES_, RESIDENT = RESIDENT_;
    static constexpr bool TRANSPOSED = TRANSPOSED_, PAIRS = PAIRS_ && TAPS > 1;
    static constexpr int THREADS = BLOCKS * 128 + 32;                          // one more warp: the producer
    static constexpr int PITCH = TAPS == 1 ? 8 : PAIRS ? 10 : 8 * BLOCKS + 2;  // rows from line to line
    static constexpr int PATCH_ROWS = TAPS == 1 ? 128 * BLOCKS : PAIRS ? 200 * BLOCKS : 18 * PITCH;
    static constexpr int PATCH_BYTES = (PATCH_ROWS * 128 + 1023) / 1024 * 1024;  // and enough for the outputs
    static constexpr int PATCHES = TAPS == 1 ? STAGES : 2, W_BYTES = 8192;
    static constexpr int SHARED_BYTES = PATCHES * PATCH_BYTES + STAGES * W_BYTES + 256;
};

__device__ inline void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ inline void store_box(const CUtensorMap& map, uint32_t from, int c, int x, int y, int b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
        "r"(c), "r"(x), "r"(y), "r"(b), "r"(from)
        : "memory");
}
// Before the copy engine or the tensor cores read what this thread stored to shared memory.
__device__ inline void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void barrier_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The products of gemm_kernel, for 64 channels by a tile of pixels at a time. One warp has the patches of a
// tile's 64-channel chunks and the weights of its taps copied into two rings, and after the last chunk what
// is added to the outputs, where these are then put together; it is soon a tile ahead of the warpgroups that
// multiply. Block (rank, channels, z) takes tiles z, z + gridDim.z, ... In a cluster, the blocks of all ranks
// take one and the same tile, and a share of its chunks each. Per tile: its patch and 64 channels' weights
// come from L2 once.
template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::RESIDENT)
    hopper_gemm_kernel(const __grid_constant__ HopperGemm g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int STAGES = Tile::STAGES, PATCHES = Tile::PATCHES, TAPS = Tile::TAPS, BLOCKS = Tile::BLOCKS;
    constexpr bool PAIRS = Tile::PAIRS;
    extern __shared__ __align__(1024) unsigned char hopper_shared[];
    const uint32_t patches = shared_address(hopper_shared), w_ring = patches + PATCHES * Tile::PATCH_BYTES,
                   barriers = w_ring + STAGES * Tile::W_BYTES;
    auto patch_full = [&](int i) { return barriers + 8 * i; };
    auto patch_empty = [&](int i) { return barriers + 8 * (PATCHES + i); };
    auto w_full = [&](int i) { return barriers + 8 * (2 * PATCHES + i); };
    auto w_empty = [&](int i) { return barriers + 8 * (2 * PATCHES + STAGES + i); };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int o = blockIdx.y * 64, splits = BLOCKS == 1 ? gridDim.x : 1, rank = BLOCKS == 1 ? blockIdx.x : 0;
    const int first = rank * g.share, last = min(first + g.share, g.chunks);
    struct Place {  // of a tile's first pixel
        int b, y, x;
    };
    auto place = [&](int tile) {
        if (TAPS == 1) return Place{0, 0, tile * 128 * BLOCKS};
        if (PAIRS) return Place{tile * 2 * BLOCKS, 0, 0};
        return Place{tile / (g.tiles_x * g.tiles_y), tile / g.tiles_x % g.tiles_y * 16,
                     tile % g.tiles_x * 8 * BLOCKS};
    };
    // A chunk's tensor, its first channel there and in the concatenation.
    auto second = [&](int chunk) { return chunk >= g.chunks1; };
    auto channel = [&](int chunk) { return (second(chunk) ? chunk - g.chunks1 : chunk) * 64; };
    auto joined = [&](int chunk) { return channel(chunk) + (second(chunk) ? g.C : 0); };

    if (threadIdx.x == 0) {
        for (int i = 0; i < PATCHES; i++)
            barrier_init(patch_full(i), 1), barrier_init(patch_empty(i), BLOCKS);
        for (int i = 0; i < STAGES; i++) barrier_init(w_full(i), 1), barrier_init(w_empty(i), BLOCKS);
        barrier_publish();
    }
    __syncthreads();

    if (warp == BLOCKS * 4) {  // the producer
        Ring<PATCHES> patch = {0, 1};
        Ring<STAGES> stage = {0, 1};
        for (int tile = blockIdx.z; lane == 0 && tile < g.tiles; tile += gridDim.z) {
            const Place at = place(tile);
            auto load_patch = [&](int chunk) {
                uint32_t to = patches + patch.slot * Tile::PATCH_BYTES, full = patch_full(patch.slot);
                barrier_wait(patch_empty(patch.slot), patch.parity);
                if (chunk < last) {
                    barrier_expect(full, Tile::PATCH_ROWS * 128);
                    copy_box(to, second(chunk) ? g.x2 : g.x, full, channel(chunk),
                             TAPS == 1 ? at.x : at.x - 1, TAPS == 1 ? 0 : at.y - 1, at.b);
                } else if (g.has_beside && rank == 0) {  // where the outputs will be put together
                    bool other = g.beside1 < g.N && o >= g.beside1;
                    barrier_expect(full, BLOCKS * 16384);
                    for (int k = 0; k < BLOCKS; k++)
                        copy_box(to + k * 16384, other ? g.beside2 : g.beside, full,
                                 other ? o - g.beside1 : o,
                                 TAPS == 1 ? at.x + 128 * k
                                 : PAIRS   ? 0
                                           : at.x + 8 * k,
                                 at.y, PAIRS ? at.b + 2 * k : at.b);
                } else {
                    barrier_arrive(full);
                }
                patch.next();
            };
            load_patch(first);
            for (int chunk = first; chunk < last; chunk++)
                for (int tap = 0; tap < TAPS; tap++, stage.next()) {
                    if (TAPS > 1 && tap == (STAGES < TAPS ? STAGES : TAPS - 1))
                        load_patch(chunk + 1);  // every warpgroup has begun this chunk, or will without it
                    uint32_t to = w_ring + stage.slot * Tile::W_BYTES, full = w_full(stage.slot);
                    barrier_wait(w_empty(stage.slot), stage.parity);
                    barrier_expect(full, Tile::W_BYTES);
                    if (Tile::TRANSPOSED)
                        copy_box(to, g.w, full, o, TAPS - 1 - tap, joined(chunk), 0);
                    else
                        copy_box(to, g.w, full, joined(chunk), tap, o, 0);
                    if (TAPS == 1) load_patch(chunk + 1);
                }
        }
        __syncwarp();
        if (splits > 1) cluster_barrier(), cluster_barrier();
        return;
    }

    const int group = warp / 4;
    const bool leads = threadIdx.x % 128 == 0;
    Ring<PATCHES> patch;
    Ring<STAGES> stage;
    for (int tile = blockIdx.z; tile < g.tiles; tile += gridDim.z) {
        const Place at = place(tile);
        float c[64];
#pragma unroll
        for (int e = 0; e < 64; e++) c[e] = 0;
        for (int chunk = first; chunk < last; chunk++, patch.next()) {
            barrier_wait(patch_full(patch.slot), patch.parity);
            uint32_t pixels = patches + patch.slot * Tile::PATCH_BYTES;
            for (int tap = 0; tap < TAPS; tap++, stage.next()) {
                barrier_wait(w_full(stage.slot), stage.parity);
                uint32_t w = w_ring + stage.slot * Tile::W_BYTES,
                         shifted = pixels + (tap / 3 * Tile::PITCH + tap % 3) * 128;
                wgmma_begin();
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    uint64_t a = shared_matrix(w + k * (Tile::TRANSPOSED ? 2048 : 32), 1024);
                    if (PAIRS) {
                        uint32_t from = shifted + group * 200 * 128 + k * 32;
                        wgmma<64, Tile::TRANSPOSED, 0>(c, a, shared_matrix(from, 1280));
                        wgmma<64, Tile::TRANSPOSED, 0>(c + 32, a, shared_matrix(from + 100 * 128, 1280));
                    } else {
                        uint32_t from = shifted + group * (TAPS == 1 ? 128 : 8) * 128 + k * 32;
                        wgmma<128, Tile::TRANSPOSED, 0>(c, a, shared_matrix(from, Tile::PITCH * 128));
                    }
                }
                wgmma_commit();
                wgmma_wait<1>();  // the step before is done
                if (leads && (tap > 0 || chunk > first)) {
                    barrier_arrive(w_empty(stage.before()));
                    if (tap == 0) barrier_arrive(patch_empty(patch.before()));
                }
            }
        }
        wgmma_wait<0>();
        if (leads) barrier_arrive(w_empty(stage.before())), barrier_arrive(patch_empty(patch.before()));
        if (splits > 1) {  // the first of the cluster adds the others' sums to its own, rank by rank
            constexpr int ADDERS = BLOCKS * 128;
            static_assert(ADDERS * 64 * sizeof(float) <= PATCHES * Tile::PATCH_BYTES, "");
            float4* mine = (float4*)hopper_shared + threadIdx.x;
            if (rank > 0) {
                barrier_threads(1, ADDERS);  // the patches have been read
#pragma unroll
                for (int e = 0; e < 64; e += 4)
                    mine[e / 4 * ADDERS] = make_float4(c[e], c[e + 1], c[e + 2], c[e + 3]);
            }
            cluster_barrier();
            if (rank == 0)
                for (int r = 1; r < splits; r++)
#pragma unroll
                    for (int e = 0; e < 64; e += 4) {
                        float4 part = load_cluster(patches + (e / 4 * ADDERS + threadIdx.x) * 16, r);
                        c[e] += part.x, c[e + 1] += part.y, c[e + 2] += part.z, c[e + 3] += part.w;
                    }
            cluster_barrier();  // nobody leaves while another reads its shared memory
            if (rank > 0) return;
        }

        // Outputs: what is added, rounding, transposition through shared memory, and whole boxes to device
        // memory.
        const int row = o + warp % 4 * 16 + lane / 4;  // this thread's channels: row, row + 8
        const int block_x = TAPS == 1 ? at.x + 128 * group : PAIRS ? 0 : at.x + 8 * group;
        constexpr int IMAGES = PAIRS || TAPS == 1 ? 2 : 1;   // whose pixels a warpgroup may hold
        const int images = PAIRS || g.T == 64 ? IMAGES : 1;  // and does
        const int block_b = TAPS == 1 ? block_x / g.T : PAIRS ? at.b + 2 * group : at.b;
        uint32_t to = patches + patch.slot * Tile::PATCH_BYTES + group * 16384;
        int line = lane % 8 + lane / 16 * 8, vector = warp % 4 * 2 + lane / 8 % 2;
        uint32_t rows = to + line * 128 + ((vector ^ (line & 7)) << 4);
        const bool gradient = Tile::TRANSPOSED && g.norm.mean;
        float added[IMAGES][2] = {}, scale[IMAGES][2], shift[IMAGES][2], mean[IMAGES][2];  // by image and row
        float sum[IMAGES][2] = {}, other[IMAGES][2] = {};
#pragma unroll
        for (int i = 0; i < IMAGES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int n = min(row + 8 * h, g.N - 1), b = min(block_b + (images == 1 ? 0 : i), g.B - 1);
                if (!Tile::TRANSPOSED && g.bias) added[i][h] = (float)g.bias[n];
                if (!Tile::TRANSPOSED && g.emb) added[i][h] += (float)g.emb[(size_t)b * g.emb_pitch + n];
                if (!gradient) continue;
                int of = b * g.norm.G + n / (g.N / g.norm.G);
                mean[i][h] = g.norm.mean[of], scale[i][h] = g.norm.rstd[of] * g.norm.w[n];
                shift[i][h] = g.norm.bias[n] - mean[i][h] * scale[i][h];
            }
        barrier_wait(patch_full(patch.slot), patch.parity);
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            const int i = j * IMAGES / 16;
            uint32_t r[4];
            if (g.has_beside) load_matrices_transposed(r, rows + j * 1024);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const int h = e / 2 % 2;
                float& value = c[4 * j + e];
                float beside = __uint_as_float(e % 2 ? r[e / 2] & 0xffff0000u : r[e / 2] << 16);
                if (!Tile::TRANSPOSED) value += added[i][h];
                if (gradient) {
                    if (g.norm.silu) value *= silu_gradient(beside * scale[i][h] + shift[i][h]);
                    sum[i][h] += value, other[i][h] += value * (beside - mean[i][h]);
                } else if (g.has_beside) {
                    value += beside;
                }
            }
#pragma unroll
            for (int e = 0; e < 4; e++) r[e] = pack_bf16(c[4 * j + 2 * e], c[4 * j + 2 * e + 1]);
            store_matrices_transposed(rows + j * 1024, r);
        }
        fence_shared();
        barrier_threads(1 + group, 128);
        if (leads) {
            bool second = g.N1 < g.N && o >= g.N1;
            store_box(second ? g.out2 : g.out, to, second ? o - g.N1 : o, block_x, at.y,
                      TAPS == 1 ? 0 : block_b);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        if (g.sums) {
            auto total = [](float x) {  // over the four lanes that share a row
                x += __shfl_xor_sync(~0u, x, 1);
                return x + __shfl_xor_sync(~0u, x, 2);
            };
            if (!Tile::TRANSPOSED)  // moments: now the sum, then the squares about the mean
#pragma unroll
                for (int e = 0; e < 64; e++) sum[e * IMAGES / 64][e / 2 % 2] += c[e];
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int i = 0; i < IMAGES; i++) sum[i][h] = total(sum[i][h]);
                if (IMAGES == 2 && images == 1)
                    sum[0][h] = sum[IMAGES - 1][h] = sum[0][h] + sum[IMAGES - 1][h];
            }
            if (!Tile::TRANSPOSED) {
#pragma unroll
                for (int i = 0; i < IMAGES; i++) sum[i][0] /= 128 / images, sum[i][1] /= 128 / images;
#pragma unroll
                for (int e = 0; e < 64; e++) {
                    float d = c[e] - sum[e * IMAGES / 64][e / 2 % 2];
                    other[e * IMAGES / 64][e / 2 % 2] += d * d;
                }
            }
            int pixel = TAPS == 1 ? block_x
                                  : block_b * g.T + (PAIRS ? 0 : (at.y / 16 * (g.W / 8) + block_x / 8) * 128);
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int i = 0; i < IMAGES; i++) other[i][h] = total(other[i][h]);
                if (IMAGES == 2 && images == 1) other[0][h] += other[IMAGES - 1][h];
#pragma unroll
                for (int i = 0; i < IMAGES; i++) {
                    int part = images == 1 ? pixel / 128 : pixel / 64 + i, n = row + 8 * h;
                    if (lane % 4 || i >= images || n >= g.N || part * (128 / images) >= g.B * g.T) continue;
                    if (gradient)
                        other[i][h] *=
                            g.norm.rstd[min(block_b + i, g.B - 1) * g.norm.G + n / (g.N / g.norm.G)];
                    g.sums[(size_t)part * g.N + n] = make_float2(sum[i][h], other[i][h]);
                }
            }
        }
        if (leads) {  // the copy engine has read the outputs
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            barrier_arrive(patch_empty(patch.slot));
        }
        patch.next();
    }
#endif
}

// B images of H x W; 1x1: all pixels are one line.
struct HopperShape {
    int B, H, W;
};
template <class Tile>
static void launch_hopper_tile(const Gemm& g, HopperShape s) {
    constexpr int TAPS = Tile::TAPS, BLOCKS = Tile::BLOCKS;
    constexpr bool PAIRS = Tile::PAIRS;
    HopperGemm h;
    int width = TAPS == 1 ? 128 * BLOCKS : Tile::PITCH, height = TAPS == 1 ? 1 : PAIRS ? 10 : 18;
    int images = PAIRS ? 2 * BLOCKS : 1;
    auto pixels = [&](const floatX* x, int C) {
        return tensor_map(x, C, s.W, s.H, s.B, width, height, images);
    };
    auto outputs = [&](const floatX* x, int C) {
        return tensor_map(x, C, s.W, s.H, s.B, TAPS == 1 ? 128 : 8,
                          TAPS == 1 ? 1
                          : PAIRS   ? 8
                                    : 16,
                          PAIRS ? 2 : 1);
    };
    int K = g.C + g.C2;
    h.x = pixels(g.x, g.C);
    if (g.C2) h.x2 = pixels(g.x2, g.C2);
    h.w = Tile::TRANSPOSED ? tensor_map(g.w, g.N, TAPS, K, 1, 1, 64, 1)
                           : tensor_map(g.w, K, TAPS, g.N, 1, 1, 64, 1);
    h.out = outputs(g.out, g.N1);
    if (g.N1 < g.N) h.out2 = outputs(g.out2, g.N - g.N1);
    const floatX *beside = g.norm.mean ? g.norm.x : g.residual,
                 *beside2 = g.norm.mean ? g.norm.x2 : g.residual2;
    h.has_beside = beside, h.beside1 = g.norm.mean ? g.norm.C : g.N1;
    if (beside) h.beside = outputs(beside, h.beside1);
    if (beside && h.beside1 < g.N) h.beside2 = outputs(beside2, g.N - h.beside1);
    h.bias = g.bias, h.emb = g.emb, h.emb_pitch = g.emb_pitch, h.norm = g.norm,
    h.sums = g.norm.mean ? g.norm.sums : g.moments;
    h.C = g.C, h.N = g.N, h.N1 = g.N1;
    h.chunks1 = ceil_div(g.C, 64), h.chunks = h.chunks1 + ceil_div(g.C2, 64);
    h.B = TAPS == 1 ? g.M / g.T : s.B, h.H = s.H, h.W = s.W, h.T = g.T;
    h.tiles_x = ceil_div(s.W, 8 * BLOCKS), h.tiles_y = ceil_div(s.H, 16);
    int tiles = TAPS == 1 ? ceil_div(s.W, 128 * BLOCKS)
                : PAIRS   ? ceil_div(s.B, images)
                          : s.B * h.tiles_x * h.tiles_y;
    // Where tiles leave multiprocessors without work, clusters share the long reductions. The bounds here and
    // below were measured on an H100.
    int columns = ceil_div(g.N, 64), splits = 1;
    while (BLOCKS == 1 && splits < 4 && 2 * splits * tiles * columns <= gpu_multiprocessors &&
           h.chunks * TAPS >= 18 * splits)
        splits *= 2;
    h.tiles = tiles, h.share = ceil_div(h.chunks, splits);
    splits = ceil_div(h.chunks, h.share);  // none without a chunk
    // Blocks take one tile after another where that keeps all of them busy: a tile's loads then hide behind
    // the outputs before. Elsewhere a block a tile: the last ones go where a multiprocessor is free first.
    int slots = std::max(1, Tile::RESIDENT * gpu_multiprocessors / columns), rounds = ceil_div(tiles, slots);
    int blocks = TAPS == 1 || tiles >= 0.8f * rounds * slots ? std::min(tiles, slots) : tiles;
    ASSERT(splits == 1 || blocks == tiles);
    launch_clusters(hopper_gemm_kernel<Tile>, dim3(splits, columns, std::min(blocks, 65535)), Tile::THREADS,
                    Tile::SHARED_BYTES, splits, h);
}
// Whether the kernel above takes this product, launched here if so. The sums it leaves out are no longer
// wanted of g.
template <int TAPS, bool TRANSPOSED>
static bool launch_hopper(Gemm* g) {
    HopperShape s = {g->patch.B, g->patch.H, g->patch.W};
    bool small = TAPS > 1 && s.H <= 8 && s.W <= 8;
    if (g->N <= 16 || (g->N1 < g->N && g->N1 % 64)) return false;
    if (TAPS == 1 && g->emb) return false;
    // A warpgroup's 128 pixels are a part of an image, or two images of 64.
    bool whole_parts =
        g->T == 64 ? TAPS == 1 || small : g->T % 128 == 0 && (TAPS == 1 || (s.H % 16 == 0 && s.W % 8 == 0));
    bool norm_fits = TRANSPOSED && (g->norm.C == g->N || g->norm.C % 64 == 0);
    Gemm asked = *g;
    if (!whole_parts) asked.moments = nullptr;
    if (!whole_parts || !norm_fits) asked.norm = Normed();
    if (asked.moments) g->moments = nullptr;
    if (asked.norm.mean) g->norm = Normed();
    if constexpr (TAPS == 1) {
        s = {1, 1, g->M};
        // many tiles: more of them on a multiprocessor; few: more loads under way in each
        bool many = ceil_div(g->M, 128) * ceil_div(g->N, 64) > 2 * gpu_multiprocessors;
        if (TRANSPOSED && many)
            launch_hopper_tile<HopperTile<1, true, false, 1, 3, 3>>(asked, s);
        else
            launch_hopper_tile<HopperTile<1, TRANSPOSED, false, 1, 4, 2>>(asked, s);
    } else if (small) {
        launch_hopper_tile<HopperTile<9, TRANSPOSED, true, 1, 4, 2>>(asked, s);
    } else if (2 * s.B * ceil_div(s.H, 16) * ceil_div(s.W, 16) * ceil_div(g->N, 64) >=
               3 * gpu_multiprocessors) {
        launch_hopper_tile<HopperTile<9, TRANSPOSED, false, 2, 3, 2>>(asked, s);
    } else {
        launch_hopper_tile<HopperTile<9, TRANSPOSED, false, 1, 4, 2>>(asked, s);
    }
    return true;
}

// ---- weight gradient

// What a block multiplies: each of GROUPS warpgroups has 64 output channels by 64 input channels at a line's
// three taps; the groups are the three lines of taps; or one line a block, where reading the pixels three
// times costs less than adding up three times as many sums. A step of the reduction is 8 x 8 pixels.
template <int GROUPS_>
struct HopperWeightTile {
    static constexpr int GROUPS = GROUPS_, THREADS = GROUPS * 128 + 32, RESIDENT = GROUPS == 1 ? 2 : 1;
    static constexpr int PITCH = 10, LINES = 7 + GROUPS;  // of x a step, in shared memory
    static constexpr int D_BYTES = 8192, X_BYTES = PITCH * LINES * 128;
    static constexpr int STAGE_BYTES = D_BYTES + (X_BYTES + 1023) / 1024 * 1024;
    static constexpr int STAGES = (216 << 10) / RESIDENT / STAGE_BYTES;
    // Behind the last stage, besides barriers and ones, room that nobody reads: compute-sanitizer takes the
    // 6144 bytes of x of a product, lines apart in truth, for one piece that begins at the first.
    static constexpr int SHARED_BYTES = STAGES * (STAGE_BYTES + 16) + 384 + 4096;
    static constexpr int SUMS_PITCH = 64 + 8;  // floats a row of the finished sums
    static constexpr int SUMS_BYTES = GROUPS * 3 * 64 * SUMS_PITCH * (int)sizeof(float);
    static_assert(STAGES * STAGE_BYTES >= SUMS_BYTES + 512, "the sums fit into the ring");
};

// *p += v, without waiting for it.
__device__ inline void add_global(float* p, float4 v) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
}
// c (64, 8) += a (64, 16), transposed, times b (16, 8), eight n of eight k each, 16 bytes a row; the same for
// both halves of k.
__device__ inline void wgmma_narrow(float (&c)[4], uint64_t a, uint32_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 1, 0;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "l"(a), "l"((uint64_t)((b & 0x3ffff) >> 4)));
}

// per_image and dbias += from bias_parts of channels [o0 + rank * channels, + channels), by 128 threads; at
// most eight splits.
__device__ inline void finish_bias(const WeightGradient& g, float* totals, int o0, int channels, int rank,
                                   int thread) {
    int o = o0 + rank * channels + thread % channels, lanes = 128 / channels;
    float total = 0;
    for (int b0 = thread / channels; b0 < g.B && o < g.O; b0 += 4 * lanes) {
        float sum[4];  // of images b0, b0 + lanes, ...: four loads under way
        int split[4], last[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            unsigned b = min(b0 + k * lanes, g.B - 1);  // split_of in 32 bits
            split[k] = ((b * g.group_tiles + 1) * g.splits - 1) / (unsigned)g.tiles;
            last[k] = ((b + 1) * g.group_tiles * g.splits - 1) / (unsigned)g.tiles;
            sum[k] = __ldcg(g.bias_parts + (size_t)(split[k] + b) * g.O + o);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int b = b0 + k * lanes;
            if (b >= g.B) break;
            while (split[k] < last[k]) sum[k] += __ldcg(g.bias_parts + (size_t)(++split[k] + b) * g.O + o);
            if (g.per_image) g.per_image[(size_t)b * g.image_pitch + o] = (floatX)sum[k];
            total += sum[k];
        }
    }
    totals[thread] = total;
    barrier_threads(2, 128);
    if (thread >= channels || o >= g.O) return;
    for (int i = 1; i < lanes; i++) total += totals[thread + i * channels];
    g.dbias[o] += total;
}

// weight_gradient_kernel's work on wgmma. Block (split, tile) owns its split's partial sums of one tile of
// dw; a warp lets the copy engine fill a ring of stages, 64 pixels of dout and x (3x3: with border) each,
// which all the block's warpgroups read: a tap is a shift of the start address. Per block: its pixels come in
// once. The splits of a cluster then add up their sums through each other's shared memory, in the order of
// their ranks, each a part of the tile, so that one part in `cluster` of the partial sums goes to device
// memory; without other clusters the sums go straight to dw. The first of the blocks that share dout's
// channels also sums dout over each image: a product with a column of ones, one of eight columns an image.
template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::RESIDENT)
    hopper_weight_gradient_kernel(const __grid_constant__ WeightGradient g,
                                  const __grid_constant__ CUtensorMap dout_map,
                                  const __grid_constant__ CUtensorMap x_map, int cluster) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int GROUPS = Tile::GROUPS, STAGES = Tile::STAGES;
    extern __shared__ __align__(1024) unsigned char hopper_shared[];
    const uint32_t ring = shared_address(hopper_shared), full = ring + STAGES * Tile::STAGE_BYTES,
                   empty = full + 8 * STAGES, ones = empty + 8 * STAGES;
    int group = threadIdx.x / 128, lane = threadIdx.x % 32, split = blockIdx.x, rank = split % cluster;
    int c_tiles = ceil_div(g.C, 64), tile = blockIdx.y, dy = group;
    if (GROUPS == 1) dy = tile % 3, tile /= 3;
    int c0 = tile % c_tiles * 64, o0 = tile / c_tiles * 64;
    int first = (int)((long long)split * g.tiles / g.splits);
    int last = (int)((long long)(split + 1) * g.tiles / g.splits);

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, GROUPS);
        barrier_publish();
    }
    // A row of ones amid rows of zeros: eight rows from 7 - n on are a matrix whose row n is ones.
    if (threadIdx.x < 60)
        ((uint32_t*)(hopper_shared + (ones - ring)))[threadIdx.x] = threadIdx.x / 4 == 7 ? 0x3f803f80 : 0;
    fence_shared();
    __syncthreads();

    if (group == GROUPS) {
        if (lane == 0) {
            Patch::Origin from = g.patch.origin(first);
            Ring<STAGES> stage = {0, 1};
            for (int t = first; t < last; t++, stage.next()) {
                uint32_t to = ring + stage.slot * Tile::STAGE_BYTES, barrier = full + 8 * stage.slot;
                barrier_wait(empty + 8 * stage.slot, stage.parity);
                barrier_expect(barrier, Tile::D_BYTES + Tile::X_BYTES);
                copy_box(to + Tile::D_BYTES, x_map, barrier, c0, from.x, from.y + (GROUPS == 1 ? dy : 0),
                         from.b);
                copy_box(to, dout_map, barrier, o0, from.x + 1, from.y + 1, from.b);
                // The next tile; divisions would take this one thread longer than the product.
                if ((from.x += 8) >= g.patch.W - 1) from.x = -1, from.y += 8;
                if (from.y >= g.patch.H - 1) from.y = -1, from.b++;
            }
        }
        __syncwarp();
        if (cluster > 1) cluster_barrier(), cluster_barrier();
        return;
    }

    int row = threadIdx.x % 128 / 32 * 16 + lane / 4 + o0;  // of the sums: an output channel, and that + 8
    float c[96];
#pragma unroll
    for (int i = 0; i < 96; i++) c[i] = 0;
    Ring<STAGES> stage;
    auto release = [&] {  // the stage before
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * stage.before());
    };
    auto multiply = [&](auto sums_bias) {
        constexpr bool BIAS = decltype(sums_bias)::value;
        // The ends of a run of steps: with the bias, of those that share the eight columns' images.
        for (int begin = first, end; begin < last; begin = end) {
            int first_image = begin / g.group_tiles, images = first_image / 8 * 8;
            end = BIAS ? min(last, (images + 8) * g.group_tiles) : last;
            int left = (first_image + 1) * g.group_tiles - begin;  // steps of this image
            uint32_t one = ones + 112 - (first_image - images) * 16;
            float sums[4] = {0, 0, 0, 0};
            for (int t = begin; t < end; t++, stage.next()) {
                uint32_t d = ring + stage.slot * Tile::STAGE_BYTES, x = d + Tile::D_BYTES;
                if (GROUPS > 1) x += group * Tile::PITCH * 128;
                barrier_wait(full + 8 * stage.slot, stage.parity);
                wgmma_begin();
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    uint64_t a = shared_matrix(d + k * 2048, 1024);
                    uint32_t lines = x + k * 2 * Tile::PITCH * 128;
                    wgmma<192, 1, 1>(c, a, shared_matrix(lines, Tile::PITCH * 128, 128));  // a tap: a row on
                    if (BIAS) wgmma_narrow(sums, a, one);
                }
                wgmma_commit();
                wgmma_wait<1>();  // the step before is over
                if (t > begin) release();
                if (BIAS && --left == 0) left = g.group_tiles, one -= 16;
            }
            wgmma_wait<0>();
            release();
            if (BIAS)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int o = row + e / 2 * 8, image = images + lane % 4 * 2 + e % 2;
                    if (o < g.O && image >= first_image && image <= (end - 1) / g.group_tiles)
                        g.bias_parts[(size_t)(split + image) * g.O + o] = sums[e];
                }
        }
    };
    bool sums_bias = g.bias_parts && c0 == 0 && dy == 0;
    if (sums_bias)
        multiply(std::true_type());
    else
        multiply(std::false_type());

    // The sums go where the ring was, as rows of 64 columns, (dy, dx, output channel), 8 banks apart.
    barrier_threads(1, GROUPS * 128);  // the ring has been read
    float* own = (float*)hopper_shared + lane % 4 * 2 +
                 (group * 3 * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4) * Tile::SUMS_PITCH;
#pragma unroll
    for (int v = 0; v < 24; v++) {
        float* p = own + v / 8 * 64 * Tile::SUMS_PITCH + v % 8 * 8;
        *(float2*)p = make_float2(c[4 * v], c[4 * v + 1]);
        *(float2*)(p + 8 * Tile::SUMS_PITCH) = make_float2(c[4 * v + 2], c[4 * v + 3]);
    }
    if (cluster > 1)
        cluster_barrier();
    else
        barrier_threads(1, GROUPS * 128);
    float* to = g.partial ? g.partial + (size_t)(split / cluster) * g.O * 9 * g.C : g.dw;
    int rows = GROUPS * 3 * 64 / cluster;
#pragma unroll 2
    for (int i = threadIdx.x; i < rows * 16; i += GROUPS * 128) {
        int row = rank * rows + i / 16, o = o0 + row % 64, column = c0 + i % 16 * 4;
        int tap = (GROUPS == 1 ? dy * 3 : 0) + row / 64;
        uint32_t at = (row * Tile::SUMS_PITCH + i % 16 * 4) * sizeof(float);
        float4 sum;
        if (cluster == 1) {
            sum = *(float4*)(hopper_shared + at);
        } else {
            float4 parts[8];
#pragma unroll
            for (int r = 0; r < 8; r++)
                if (r < cluster) parts[r] = load_cluster(ring + at, r);
            sum = parts[0];
#pragma unroll
            for (int r = 1; r < 8; r++)
                if (r < cluster)
                    sum.x += parts[r].x, sum.y += parts[r].y, sum.z += parts[r].z, sum.w += parts[r].w;
        }
        if (o >= g.O || column >= g.C) continue;
        float* p = to + ((size_t)o * 9 + tap) * g.C + column;
        if (g.partial)
            *(float4*)p = sum;
        else
            add_global(p, sum);
    }
    // Without other clusters all parts are here: ranks share the channels, threads the images.
    if (sums_bias && !g.partial)
        finish_bias(g, (float*)(hopper_shared + Tile::SUMS_BYTES), o0, 64 / cluster, rank, threadIdx.x % 128);
    if (cluster > 1) cluster_barrier();  // nobody leaves while another reads its shared memory
#endif
}

struct HopperWeightPlan {
    int tiles, splits, cluster;
    float us;  // estimated
};
// The splits and clusters with the least estimated time. The figures, microseconds and bytes a microsecond,
// were fitted to 900 timings on an H100; the choices cost 1% more than the best ones.
template <class Tile>
static HopperWeightPlan plan_hopper_weight(const WeightGradient& g, size_t bytes) {
    int tiles = ceil_div(g.O, 64) * ceil_div(g.C, 64) * (3 / Tile::GROUPS);
    size_t n = (size_t)g.O * 9 * g.C;
    HopperWeightPlan best = {tiles, 1, 1, 1e30f};
    // Every block loads its own pixels from L2; all of them come from device memory once.
    float load =
        std::max((float)tiles * g.tiles * Tile::STAGE_BYTES / 8.1e6f, (float)g.M * (g.O + g.C) * 2 / 2.7e6f);
    float step = Tile::GROUPS == 3 ? 0.73f : 0.27f;
    for (int cluster = 1; cluster <= 8; cluster *= 2) {
        // Larger clusters leave some multiprocessors without work: theirs are not a multiple of the cluster.
        int slots = gpu_multiprocessors * Tile::RESIDENT * (cluster > 2 ? 10 : 11) / 11;
        for (int splits = cluster; splits <= g.tiles && (splits == 1 || splits * tiles <= slots);
             splits += cluster) {
            int partials = splits / cluster;
            bool partial = partials > 1;
            if (partial && partials * n * sizeof(float) > bytes) break;
            float product = ceil_div((size_t)splits * tiles, slots) * ceil_div(g.tiles, splits) * step;
            if (Tile::RESIDENT > 1 && splits * tiles > gpu_multiprocessors) product *= 1.87f;
            float us =
                std::max(product, load) + 0.12f * std::min(product, load) + (Tile::GROUPS == 3 ? 4.5f : 3.5f);
            if (cluster > 1) us += cluster < 8 ? 2.3f : 3.0f;
            if (partial) us += 3.9f + n / 136e3f + 8.0f * partials * n / 8.9e6f;
            if (us < best.us) best = {tiles, splits, cluster, us};
        }
    }
    return best;
}

template <class Tile>
static void launch_hopper_weight_tile(WeightGradient g, HopperWeightPlan plan) {
    size_t n = (size_t)g.O * 9 * g.C;
    g.splits = plan.splits, g.partials = plan.splits / plan.cluster;
    g.partial = g.partials > 1 ? take<float>(&lane->workspace, g.partials * n) : nullptr;
    auto box = [&](const floatX* x, int channels, int width, int height) {
        return tensor_map(x, channels, g.patch.W, g.patch.H, g.B, width, height, 1);
    };
    launch_clusters(hopper_weight_gradient_kernel<Tile>, dim3(plan.splits, plan.tiles), Tile::THREADS,
                    Tile::SHARED_BYTES, plan.cluster, g, box(g.dout, g.O, 8, 8),
                    box(g.x, g.C, 10, Tile::LINES), plan.cluster);
    if (!g.partial) return;
    int weight_blocks = ceil_div(n, 128), bias_blocks = g.dbias ? ceil_div(g.O, 8) : 0;
    launch(weight_reduce_kernel, weight_blocks + bias_blocks, 256, 0, g, n, weight_blocks);
}

// launch_weight_gradient on Hopper, for 3x3.
static void launch_hopper_weight_gradient(WeightGradient g) {
    Borrowed borrowed;
    g.patch = make_patch(g.patch.B, g.patch.H, g.patch.W, 64);
    g.tiles = g.patch.tiles, g.B = g.patch.B, g.group_images = 1;
    g.group_tiles = g.patch.tiles_y * g.patch.tiles_x;
    take_bias_parts(&g, (size_t)2 * gpu_multiprocessors + g.B);
    HopperWeightPlan all = plan_hopper_weight<HopperWeightTile<3>>(g, Borrowed::left()),
                     line = plan_hopper_weight<HopperWeightTile<1>>(g, Borrowed::left());
    if (line.us < all.us)
        launch_hopper_weight_tile<HopperWeightTile<1>>(g, line);
    else
        launch_hopper_weight_tile<HopperWeightTile<3>>(g, all);
}

}  // namespace gpu
#endif  // HOPPER
