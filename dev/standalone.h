// What a ladder by itself needs in the place of the program, so that it compiles in seconds: errors, memory,
// launches, and the few device functions that its versions call. With PROGRAM defined the program is included instead
// of this file.
#pragma once

#include <algorithm>
#include <cassert>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
struct float2 {  // as CUDA's
    float x, y;
};
#endif

// The precision of activations and weights: bf16 on a GPU, unless PRECISION_FP32 is defined.
#if defined(__CUDACC__) && !defined(PRECISION_FP32)
typedef __nv_bfloat16 floatX;
#else
typedef float floatX;
#endif

HOST_DEVICE static inline int ceil_div(size_t a, size_t b) { return (int)((a + b - 1) / b); }

// ---- sentences, errors, time ------------------------------------------------------------------------------

__attribute__((format(printf, 1, 2))) static std::string text(const char* format, ...) {
    char buffer[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    return buffer;
}

// A sentence for the user, and the exit status: 1, or 2 where the command line is wrong.
struct Failure {
    int status;
    std::string sentence;
};
#define fail(...) throw Failure({1, text(__VA_ARGS__)})
#define fail_usage(...) throw Failure({2, text(__VA_ARGS__)})

template <typename Program>
static int guarded(Program program) {
    try {
        return program();
    } catch (const Failure& failure) {
        fflush(stdout);
        fprintf(stderr, "error: %s\n", failure.sentence.c_str());
        return failure.status;
    }
}

static double seconds_now() {
    auto since_epoch = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since_epoch).count();
}

// ---- files ------------------------------------------------------------------------------------------------

static bool file_exists(const std::string& path) {
    FILE* file = fopen(path.c_str(), "rb");
    if (file) fclose(file);
    return file;
}

struct Reader {
    std::unique_ptr<FILE, int (*)(FILE*)> file;
    std::string path;
    size_t size = 0;

    explicit Reader(const std::string& name) : file(fopen(name.c_str(), "rb"), fclose), path(name) {
        if (!file) fail("can't open %s", name.c_str());
        fseeko(file.get(), 0, SEEK_END);
        size = (size_t)ftello(file.get());
        rewind(file.get());
    }

    void read(void* to, size_t bytes) {
        if (bytes && fread(to, 1, bytes, file.get()) != bytes) fail("could not read %s", path.c_str());
    }
};

// ---- the machine ------------------------------------------------------------------------------------------

#ifdef __CUDACC__
enum { STEPS_IN_FLIGHT = 3 };  // the runs that warm up, see launch_graph()

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
static void cuda_check(cudaError_t status, const char* expression, const char* file, int line) {
    if (status != cudaSuccess)
        fail("the GPU reported '%s' at %s:%d (%s)", cudaGetErrorString(status), file, line, expression);
}

static struct Stream {
    cudaStream_t handle;
} main_stream;
static cudaDeviceProp gpu_properties;
static const int& gpu_multiprocessors = gpu_properties.multiProcessorCount;

static void backend_init() {
    CUDA_CHECK(cudaGetDeviceProperties(&gpu_properties, 0));
    CUDA_CHECK(cudaStreamCreateWithFlags(&main_stream.handle, cudaStreamNonBlocking));
}

static std::string backend_name() {
    return text("%s: %s", gpu_properties.name, sizeof(floatX) == 2 ? "bf16" : "fp32");
}

static void* backend_allocate(size_t bytes, bool on_host = false) {
    void* memory = nullptr;
    CUDA_CHECK(on_host ? cudaMallocHost(&memory, bytes) : cudaMalloc(&memory, bytes));
    return memory;
}

static void backend_free(void* memory, bool on_host = false) {
    if (on_host)
        cudaFreeHost(memory);
    else
        cudaFree(memory);
}

static void backend_zero(void* memory, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, main_stream.handle));
}

static void backend_copy(void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, main_stream.handle));
}

static void backend_wait() { CUDA_CHECK(cudaStreamSynchronize(main_stream.handle)); }

// The most TFLOP/s in bf16, or in fp32 where floatX is float, counted as the program does; 0: not known. They are the
// operations of a multiprocessor in a clock cycle, times the number of multiprocessors, times the clock rate.
static double backend_peak() {
    struct Rates {
        double fp32, bf16;
    };
    static const std::map<int, Rates> RATES_OF_CAPABILITY = {
        {80, {.fp32 = 128, .bf16 = 2048}},
        {86, {.fp32 = 256, .bf16 = 1024}},
        {89, {.fp32 = 256, .bf16 = 1024}},
        {90, {.fp32 = 256, .bf16 = 4096}},
    };
    int capability = 10 * gpu_properties.major + gpu_properties.minor;
    auto found = RATES_OF_CAPABILITY.find(capability);
    if (found == RATES_OF_CAPABILITY.end()) return 0;
    Rates rates = found->second;

    int khz = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
    if (sizeof(floatX) == 4) return 1e-9 * khz * gpu_multiprocessors * rates.fp32;

    // An H100 can clock higher than its data sheet assumes for the tensor cores' 989 TFLOP/s. We go by the data sheet.
    if (capability == 90) khz = std::min(khz, 1830000);
    // The tensor cores of a GeForce run at half their rate where they add up in fp32.
    bool is_halved = strstr(gpu_properties.name, "GeForce");
    return 1e-9 * khz * gpu_multiprocessors * (is_halved ? rates.bf16 / 2 : rates.bf16);
}

// A sequence of launches. The first run launches them one by one, the second records them as a CUDA graph and replays
// it, and every later run replays it again.
struct Graph {
    std::shared_ptr<void> executable;
    int runs = 0;
};
template <typename Launches>
static void launch_graph(Graph* graph, Launches launches) {
    graph->runs++;
    if (graph->runs == 1) return launches();

    if (graph->runs == 2) {
        cudaGraph_t captured;
        cudaGraphExec_t executable;
        CUDA_CHECK(cudaStreamBeginCapture(main_stream.handle, cudaStreamCaptureModeThreadLocal));
        launches();
        CUDA_CHECK(cudaStreamEndCapture(main_stream.handle, &captured));
        CUDA_CHECK(cudaGraphInstantiate(&executable, captured, 0));
        CUDA_CHECK(cudaGraphDestroy(captured));
        graph->executable = {executable, cudaGraphExecDestroy};
    }
    CUDA_CHECK(cudaGraphLaunch((cudaGraphExec_t)graph->executable.get(), main_stream.handle));
}

// kernel<<<grid, threads, shared>>>(args...)
template <typename... Parameters, typename... Arguments>
static void launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared, Arguments... args) {
    if (shared > 48 * 1024)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    kernel<<<grid, threads, shared, main_stream.handle>>>(Parameters(args)...);
    CUDA_CHECK(cudaGetLastError());
}
#else
enum { STEPS_IN_FLIGHT = 1 };

static void backend_init() {}
static std::string backend_name() { return "the CPU: fp32"; }

static void* backend_allocate(size_t bytes, bool = false) {
    size_t whole_lines = (bytes + 255) / 256 * 256;
    return aligned_alloc(256, whole_lines);
}
static void backend_free(void* memory, bool = false) { free(memory); }
static void backend_zero(void* memory, size_t bytes) { memset(memory, 0, bytes); }
static void backend_copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
static void backend_wait() {}

struct Graph {};
template <typename Launches>
static void launch_graph(Graph*, Launches launches) {
    launches();
}
#endif

static void backend_upload(void* to, const void* from, size_t bytes) {
    backend_copy(to, from, bytes);
    backend_wait();
}
static void backend_download(void* to, const void* from, size_t bytes) { backend_upload(to, from, bytes); }

// ---- what versions call on the device ---------------------------------------------------------------------

#ifdef __CUDACC__
__device__ static inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// The derivative of SiLU, which is x sigmoid(x).
__device__ static inline float silu_gradient(float x) {
    float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

// Returns the sum of the values of a block's threads to all of them. It is added up in a fixed order, first in each
// warp, then over the warps. A block has whole warps and at most 1024 threads.
__device__ static inline float team_sum(float value) {
    __shared__ float parts[32];  // the sum of each warp
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);

    __syncthreads();  // the parts of the call before have been read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();

    value = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f;
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// 16 bytes of memory and their elements as floats: 8 in bf16, 4 in fp32.
enum { VEC = 16 / (int)sizeof(floatX) };
struct Unpacked {
    float of[VEC];
    __device__ float& operator[](int e) { return of[e]; }
};

__device__ static inline Unpacked unpack(uint4 bits) {
    Unpacked value;
    for (int e = 0; e < VEC; e++) value[e] = (float)((const floatX*)&bits)[e];
    return value;
}
__device__ static inline Unpacked unpack(const floatX* from) { return unpack(*(const uint4*)from); }

__device__ static inline uint4 pack(Unpacked value) {
    uint4 bits;
    for (int e = 0; e < VEC; e++) ((floatX*)&bits)[e] = (floatX)value[e];
    return bits;
}

// Two elements in a register, as tensor cores read them.
__device__ static inline uint32_t pack_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t*)&pair;
}

__device__ static inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Copies 16 bytes from device memory to shared memory without registers between. Where not `valid` it writes zeros, and
// reads nothing.
__device__ static inline void copy_async(uint32_t to, const void* from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}

// Loads four 8x8 matrices of bf16. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ static inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ static inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// c (16, 8) += a (16, 16) b (16, 8). Lane l has columns 2 (l % 4) and 2 (l % 4) + 1 of c: c[0] and c[1] in row l / 4,
// c[2] and c[3] in row l / 4 + 8.
__device__ static inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
