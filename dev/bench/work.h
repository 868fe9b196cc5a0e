// What the time of work is measured with and compared to: a clock, the operations and bytes of a layer, and the rate
// of a copy. profile.cu includes this file, and so do the ladders. It includes the program, or what a ladder by
// itself has in its place.
#pragma once
#include <cstddef>

// The operations of a layer's maths, and the bytes that must move if each input is read once and each output written
// once.
struct Work {
    double operations, bytes;
};

// The work of a convolution of M pixels from C to O channels, or of either of its gradients. A weight takes as many
// bytes as a floatX, if nothing else is said. The program calls these where it says PROFILE, so that they are declared
// before it is included.
static Work convolution_work(double M, int taps, int C, int O);
static Work convolution_work(double M, int taps, int C, int O, size_t weight_bytes);

#if defined(STANDALONE)
#include "../standalone.h"
#elif defined(DIT)
#include "../dit/train_dit.cu"
#else
#include "../../train_unet.cu"
#endif

static Work convolution_work(double M, int taps, int C, int O, size_t weight_bytes) {
    double weights = (double)taps * C * O;
    double operations = 2 * M * weights;  // a multiplication and an addition
    double bytes = sizeof(floatX) * M * (C + O) + weight_bytes * weights;
    return {operations, bytes};
}

static Work convolution_work(double M, int taps, int C, int O) {
    return convolution_work(M, taps, C, O, sizeof(floatX));
}

static double median(std::vector<float> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

// A point in time. On a GPU it is when the work is done that was launched before take().
struct Moment {
#ifdef __CUDACC__
    cudaEvent_t event;

    Moment() { CUDA_CHECK(cudaEventCreate(&event)); }
    ~Moment() { cudaEventDestroy(event); }

    void take() { CUDA_CHECK(cudaEventRecord(event, main_stream.handle)); }

    // Waits for the end.
    float ms_until(const Moment& end) const {
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

// Milliseconds of a sequence of launches: the median of 20 runs, or of as many as fit into ten seconds, but at least
// three.
template <typename Launches>
static double time_replays(Launches launches) {
    const int WARMUP = STEPS_IN_FLIGHT;  // 3 on the GPU, where the second is recorded
    Graph graph;
    Moment begin, end;
    std::vector<float> ms;
    double start = seconds_now();
    for (int n = 0; n < WARMUP + 20; n++) {
        bool enough = n >= WARMUP + 3;
        if (enough && seconds_now() - start >= 10) break;

        begin.take();
        launch_graph(&graph, launches);
        end.take();
        float taken = begin.ms_until(end);
        if (n >= WARMUP) ms.push_back(taken);
    }
    return median(ms);
}

// GB/s of a copy, both what it reads and what it writes, between two pieces of memory that no cache holds.
static double copy_bandwidth() {
    size_t bytes = (size_t)256 << 20;
    char* memory = (char*)backend_allocate(2 * bytes);
    backend_zero(memory, 2 * bytes);

    double ms = time_replays([&] { backend_copy(memory, memory + bytes, bytes); });

    backend_free(memory);
    return 2e-6 * (double)bytes / ms;
}
