// The program, and what its work is measured against: the operations and bytes of a layer, and the rate of a
// copy. profile.cu includes this file, and so do the ladders, which need not have the program.
#pragma once
#include <cstddef>

// The operations of a layer's maths, and the bytes that must move where each input is read once and each
// output written once.
struct Work {
    double operations, bytes;
};
// What a convolution of M pixels from C to O channels or either of its gradients costs; weight: bytes of one,
// without it those of a floatX.
static Work convolution_work(double M, int taps, int C, int O);
static Work convolution_work(double M, int taps, int C, int O, size_t weight);

#if defined(STANDALONE)
#include "../standalone.h"
#elif defined(DIT)
#include "../dit/train_dit.cu"
#else
#include "../../train_unet.cu"
#endif

static Work convolution_work(double M, int taps, int C, int O, size_t weight) {
    double weights = (double)taps * C * O;
    return {2 * M * weights, sizeof(floatX) * M * (C + O) + weight * weights};
}
static Work convolution_work(double M, int taps, int C, int O) {
    return convolution_work(M, taps, C, O, sizeof(floatX));
}

static double median(std::vector<float> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

// A time: on a GPU when the work that was given to it so far is done.
struct Moment {
#ifdef __CUDACC__
    cudaEvent_t event;
    Moment() { CUDA_CHECK(cudaEventCreate(&event)); }
    ~Moment() { cudaEventDestroy(event); }
    void take() { CUDA_CHECK(cudaEventRecord(event, main_stream.handle)); }
    float ms_until(const Moment& end) const {  // waits for the end
        float ms = 0;
        CUDA_CHECK(cudaEventSynchronize(end.event));
        CUDA_CHECK(cudaEventElapsedTime(&ms, event, end.event));
        return ms;
    }
#else
    double seconds = 0;
    void take() { seconds = seconds_now(); }
    float ms_until(const Moment& end) const { return (float)(1e3 * (end.seconds - seconds)); }
#endif
};

// Median milliseconds of 20 runs of a sequence, or of as many as fit into ten seconds, at the least three.
template <typename Launches>
static double time_replays(Launches launches) {
    const int WARMUP = STEPS_IN_FLIGHT;  // 3 on the GPU, where the second is recorded
    Graph graph;
    Moment begin, end;
    std::vector<float> ms;
    double start = seconds_now();
    for (int n = 0; n < WARMUP + 20 && (n < WARMUP + 3 || seconds_now() - start < 10); n++) {
        begin.take();
        launch_graph(&graph, launches);
        end.take();
        float taken = begin.ms_until(end);
        if (n >= WARMUP) ms.push_back(taken);
    }
    return median(ms);
}

// GB/s, read and written, of a copy between two pieces of memory that no cache holds.
static double copy_bandwidth() {
    size_t bytes = (size_t)256 << 20;
    char* memory = (char*)backend_allocate(2 * bytes);
    backend_zero(memory, 2 * bytes);
    double ms = time_replays([&] { backend_copy(memory, memory + bytes, bytes); });
    backend_free(memory);
    return 2e-6 * (double)bytes / ms;
}
