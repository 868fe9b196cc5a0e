// The program, and what its work is measured against: the operations and bytes of a layer, and the rate of a
// copy. The ladders and profile.cu include this file.
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

#include "../train_unet.cu"

static Work convolution_work(double M, int taps, int C, int O, size_t weight) {
    double weights = (double)taps * C * O;
    return {2 * M * weights, sizeof(floatX) * M * (C + O) + weight * weights};
}
static Work convolution_work(double M, int taps, int C, int O) {
    return convolution_work(M, taps, C, O, sizeof(floatX));
}

// GB/s, read and written, of a copy between two pieces of memory that no cache holds.
static double copy_bandwidth() {
    size_t bytes = (size_t)256 << 20;
    char* memory = (char*)backend_allocate(2 * bytes);
    if (!memory) fail("could not allocate %s of memory", human_bytes(2.0 * bytes).c_str());
    backend_zero(memory, 2 * bytes);
    double ms = time_replays([&] { backend_copy(memory, memory + bytes, bytes); });
    backend_free(memory);
    return 2e-6 * (double)bytes / ms;
}
