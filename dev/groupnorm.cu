// Group norm and SiLU, forward and backward: out = F.silu(F.group_norm(x, 32, w, bias)). Backward makes out
// once more, which is not kept, for the weight gradient of the product that reads it.
//
//   make groupnorm && ./groupnorm        every version: against PyTorch, then timed
//   ./groupnorm 3                        version 3 alone
//
//   0  CPU, NCHW: the definition, a group after the other; and the program's function there. Without a GPU these are
//      versions 1 and 3, and between them is
//      2  CPU, NHWC: all channels of a pixel at a time, twice over an image
//   1  fp32, NCHW, a thread a group
//   2  fp32, NCHW, a block a group
//   3  bf16, NCHW, a block a group, 16-byte loads
//   4  bf16, NHWC, a block a tile of 64 pixels: partial sums, then the groups' sums, then the result
//   5  the program's, alone: a launch sums, another joins the sums as it begins and writes the result
//   6  the program's in the network: the sums come from the epilogue of whatever wrote x, backward of dout
//
// What the steps change: a group is contiguous in NCHW, so a thread can walk it alone, but then 1024 threads
// are all there are on a machine for 270,000, and neighbours read addresses far apart. A block a group gives
// every multiprocessor work and reads whole lines; bf16 and 16-byte loads halve the traffic and leave an
// eighth of the instructions. As a kernel by itself that is nearly as good as any: its second and third look
// at the group find it in the cache. But NCHW suits nothing else here. NHWC, which the convolutions want,
// tears a group into pieces of a few bytes a pixel; version 4 therefore sums by channel over a tile of pixels
// and adds tiles and channels up afterwards, in three launches. That split is what lets the sums come from
// elsewhere. Version 5 takes them in a pass of its own and joins them in every block that needs them, one
// launch less. In the network (version 6) the convolution before has every value in registers and leaves the
// sums behind, so that what remains is a read and a write; backward, the input gradient's epilogue has taken
// it through the SiLU and summed it too. What that costs the epilogues is part of resblock's time. Backward, x
// is in registers when out is wanted again: that is one write more, where a pass by itself would read x again.
// PyTorch has kept out, and does not write it.
//
// On a CPU, two threads of an Intel Xeon with AVX-512, 128 channels at 64x64, B = 4: the definition (1) adds
// one number after the other and calls expf for each, 6.9 ms forward and 14.6 backward. With the channels
// last (2), sums and a polynomial for the exponential go by vectors of 16 channels: 0.59 and 2.1 ms. The
// program (3) takes 0.67 and 1.5: a task is 128 pixels of an image, so that one image is work for many
// threads, and the sums of 64 channels stay in registers. Before, its tasks were 32 channels of an image, so
// that it jumped 512 bytes from pixel to pixel: 1.0 and 2.9.
#include "common.h"

enum { GROUPNORM_GROUPS = 32, GROUPNORM_TILE = 64 };
static const float GROUPNORM_EPS = 1e-5f;

struct GroupnormShape {
    int B, C, T, G;
};
static GroupnormShape groupnorm_shape(const Problem& p) {
    return {p.dim("B"), p.dim("C"), p.dim("H") * p.dim("W"), GROUPNORM_GROUPS};
}

#ifdef PROGRAM
// The norm as the program's layers take it: to measure, its statistics to be written; trained, with these and
// the gradients of its parameters.
template <typename Real>
static NormOf<Real> groupnorm_of(Problem& p, float* statistics, float* affine) {
    return {.x = p.tensor_in<Real>("x"),
            .groups = GROUPNORM_GROUPS,
            .silu = true,
            .w = p.in<float>("w"),
            .bias = p.in<float>("bias"),
            .statistics = (GroupStatistics*)statistics,
            .half_scale_shift = (ScaleShift*)affine};
}
template <typename Real>
static NormOf<Real> groupnorm_to_measure(Problem& p) {
    return groupnorm_of<Real>(p, p.out<float>("statistics"), p.out<float>("half affine"));
}
template <typename Real>
static NormOf<Real> groupnorm_trained(Problem& p) {
    NormOf<Real> norm =
        groupnorm_of<Real>(p, (float*)p.in<float>("statistics"), (float*)p.in<float>("half affine"));
    norm.dw = p.out<float>("dw"), norm.dbias = p.out<float>("dbias");
    return norm;
}

// On a CPU.
static void groupnorm_forward_cpu(Problem& p) {
    cpu::Norm norm = groupnorm_to_measure<float>(p);
    norm.x.first.moments = p.scratch_sums<Moments>("moments", norm.x.first);
    cpu::channel_moments(norm.x.first);
    cpu::groupnorm_forward(p.tensor_out<float>("out"), norm);
}
static void groupnorm_backward_cpu(Problem& p) {
    cpu::Norm norm = groupnorm_trained<float>(p);
    cpu::Tensor dx = p.tensor_out<float>("dx"), dy = dx;
    norm.sums = p.scratch_sums<NormSums>("sums", norm.x.first);
    cpu::groupnorm_backward_sums(dy, p.tensor_in<float>("dout"), norm);
    cpu::groupnorm_backward(dx, p.tensor_out<float>("out"), dy, norm, cpu::BackwardOptions());
}
#endif

// The gradient at the norm's output before the SiLU.
HOST_DEVICE static inline float groupnorm_dy(float dout, float normed, float w, float bias) {
    float y = normed * w + bias, s = 1 / (1 + expf(-y));
    return dout * s * (1 + y * (1 - s));
}

// ---- 0, on a CPU 1: the definition --------------------------------------------------------------------------

// dw, dbias (C): sums (B, C), of dy x^ and of dy, over the images.
static void groupnorm_weights(Problem& p, const float2* sums) {
    GroupnormShape s = groupnorm_shape(p);
    float *dw = p.out<float>("dw"), *dbias = p.out<float>("dbias");
    for (int c = 0; c < s.C; c++) {
        double total_product = 0, total = 0;
        for (int b = 0; b < s.B; b++) total_product += sums[b * s.C + c].x, total += sums[b * s.C + c].y;
        dw[c] = (float)total_product, dbias[c] = (float)total;
    }
}

// x, out (B, C, T): group g of image b is the run of T C / G floats that begins at (b G + g) T C / G.
static void groupnorm_forward0(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    float *out = p.out<float>("out"), *mean = p.out<float>("mean"), *rstd = p.out<float>("rstd");
    const float *x = p.in<float>("x"), *w = p.in<float>("w"), *bias = p.in<float>("bias");
    int width = s.C / s.G, n = width * s.T;
#pragma omp parallel for
    for (int group = 0; group < s.B * s.G; group++) {
        const float* row = x + (size_t)group * n;
        double sum = 0, squares = 0;
        for (int i = 0; i < n; i++) sum += row[i];
        double m = sum / n;
        for (int i = 0; i < n; i++) squares += (row[i] - m) * (row[i] - m);
        mean[group] = (float)m, rstd[group] = (float)(1 / sqrt(squares / n + GROUPNORM_EPS));
        for (int i = 0; i < n; i++) {
            int c = group % s.G * width + i / s.T;
            float y = (row[i] - mean[group]) * rstd[group] * w[c] + bias[c];
            out[(size_t)group * n + i] = y / (1 + expf(-y));
        }
    }
}
static void groupnorm_backward0(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    float *dx = p.out<float>("dx"), *out = p.out<float>("out");
    const float *x = p.in<float>("x"), *w = p.in<float>("w"), *bias = p.in<float>("bias");
    const float *mean = p.in<float>("mean"), *rstd = p.in<float>("rstd"), *dout = p.in<float>("dout");
    float2* sums = (float2*)p.scratch<float>("sums", (size_t)2 * s.B * s.C);
    int width = s.C / s.G, n = width * s.T;
#pragma omp parallel for
    for (int group = 0; group < s.B * s.G; group++) {
        float m = mean[group], r = rstd[group];
        double sum = 0, product = 0;  // of w dy and of w dy x^
        for (int channel = group * width; channel < (group + 1) * width; channel++) {
            double channel_sum = 0, channel_product = 0;
            int c = channel % s.C;
            for (size_t i = (size_t)channel * s.T; i < (size_t)(channel + 1) * s.T; i++) {
                float normed = (x[i] - m) * r, dy = groupnorm_dy(dout[i], normed, w[c], bias[c]);
                channel_sum += dy, channel_product += dy * normed;
            }
            sums[channel] = {(float)channel_product, (float)channel_sum};
            sum += w[c] * channel_sum, product += w[c] * channel_product;
        }
        for (size_t i = (size_t)group * n; i < (size_t)(group + 1) * n; i++) {
            int c = (int)(i / s.T % s.C);
            float normed = (x[i] - m) * r, dy = groupnorm_dy(dout[i], normed, w[c], bias[c]);
            float y = normed * w[c] + bias[c];
            dx[i] = r * (w[c] * dy - (float)((sum + normed * product) / n));
            out[i] = y / (1 + expf(-y));
        }
    }
    groupnorm_weights(p, sums);
}

#ifndef __CUDACC__
#ifdef PROGRAM
// ---- 2 on a CPU: NHWC, all channels of a pixel at a time, an image a thread -------------------------------

// y sigmoid(y). With the program's sigmoid version 2 takes seven times as long: g++ 12 multiplies y by what
// either end of the clamp in fast_exp leads to, in all lanes, and chooses afterwards. 1 / (1 + e^88) is
// subnormal, and such a product costs a hundred cycles. Here no factor is below 1e-30.
static inline float groupnorm_silu(float y) { return y / (1 + std::min(fast_exp(-y), 1e30f)); }

static void groupnorm_forward2(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    float *out = p.out<float>("out"), *mean = p.out<float>("mean"), *rstd = p.out<float>("rstd");
    const float *x = p.in<float>("x"), *w = p.in<float>("w"), *bias = p.in<float>("bias");
    int C = s.C, width = C / s.G;
#pragma omp parallel for
    for (int b = 0; b < s.B; b++) {
        std::vector<double> sum(C), squares(C);
        std::vector<float> scale(C), shift(C);
        size_t first = (size_t)b * s.T * C, last = first + (size_t)s.T * C;
        for (size_t at = first; at < last; at += C)
            SIMD_FOR (int c = 0; c < C; c++) sum[c] += x[at + c], squares[c] += (double)x[at + c] * x[at + c];
        for (int g = 0; g < s.G; g++) {
            double n = (double)s.T * width, total = 0, total_squares = 0;
            for (int c = g * width; c < (g + 1) * width; c++) total += sum[c], total_squares += squares[c];
            double m = total / n, r = 1 / sqrt(total_squares / n - m * m + GROUPNORM_EPS);
            mean[b * s.G + g] = (float)m, rstd[b * s.G + g] = (float)r;
            for (int c = g * width; c < (g + 1) * width; c++)
                scale[c] = (float)(r * w[c]), shift[c] = (float)(bias[c] - m * r * w[c]);
        }
        for (size_t at = first; at < last; at += C)
            SIMD_FOR (int c = 0; c < C; c++) {
                float y = x[at + c] * scale[c] + shift[c];
                out[at + c] = groupnorm_silu(y);
            }
    }
}
// The second pass makes dy again, which costs an exponential and no memory.
static void groupnorm_backward2(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    float *dx = p.out<float>("dx"), *out = p.out<float>("out");
    const float *x = p.in<float>("x"), *w = p.in<float>("w"), *bias = p.in<float>("bias");
    const float *mean = p.in<float>("mean"), *rstd = p.in<float>("rstd"), *dout = p.in<float>("dout");
    float2* sums = (float2*)p.scratch<float>("sums", (size_t)2 * s.B * s.C);
    int C = s.C, width = C / s.G;
#pragma omp parallel for
    for (int b = 0; b < s.B; b++) {
        std::vector<double> sum(C), product(C);  // of dy, of dy x^
        std::vector<float> slope(C), offset(C), mean_dy(C), mean_product(C);
        size_t first = (size_t)b * s.T * C, last = first + (size_t)s.T * C;
        for (int c = 0; c < C; c++) {
            int group = b * s.G + c / width;
            slope[c] = rstd[group], offset[c] = -mean[group] * rstd[group];
        }
        for (size_t at = first; at < last; at += C)
            SIMD_FOR (int c = 0; c < C; c++) {
                float normed = x[at + c] * slope[c] + offset[c];
                float dy = dout[at + c] * silu_gradient(normed * w[c] + bias[c]);
                sum[c] += dy, product[c] += dy * normed;
            }
        for (int c = 0; c < C; c++) {
            double a = 0, q = 0;  // over the group, of w dy and of w dy x^
            for (int k = c / width * width; k < (c / width + 1) * width; k++)
                a += w[k] * sum[k], q += w[k] * product[k];
            mean_dy[c] = (float)(a / s.T / width), mean_product[c] = (float)(q / s.T / width);
            sums[b * C + c] = {(float)product[c], (float)sum[c]};
        }
        for (size_t at = first; at < last; at += C)
            SIMD_FOR (int c = 0; c < C; c++) {
                float normed = x[at + c] * slope[c] + offset[c], y = normed * w[c] + bias[c];
                float dy = dout[at + c] * silu_gradient(y);
                dx[at + c] = slope[c] * (w[c] * dy - mean_dy[c] - normed * mean_product[c]);
                out[at + c] = groupnorm_silu(y);
            }
    }
    groupnorm_weights(p, sums);
}
#endif
#else

// ---- 1: a thread a group ----------------------------------------------------------------------------------

// x, out (B, C, T): group g of image b is the run of T C / G floats that begins at (b G + g) T C / G.
__global__ void groupnorm_forward_kernel1(float* out, float* mean, float* rstd, const float* x,
                                          const float* w, const float* bias, int groups, int T, int C,
                                          int G) {
    int group = blockIdx.x * blockDim.x + threadIdx.x, n = C / G * T;
    if (group >= groups) return;
    const float* row = x + (size_t)group * n;
    float sum = 0, squares = 0;
    for (int i = 0; i < n; i++) sum += row[i];
    float m = sum / n;
    for (int i = 0; i < n; i++) squares += (row[i] - m) * (row[i] - m);
    float r = 1 / sqrtf(squares / n + GROUPNORM_EPS);
    for (int i = 0; i < n; i++) {
        int c = group % G * (C / G) + i / T;
        float y = (row[i] - m) * r * w[c] + bias[c];
        out[(size_t)group * n + i] = y / (1 + expf(-y));
    }
    mean[group] = m, rstd[group] = r;
}
static void groupnorm_forward1(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    launch(groupnorm_forward_kernel1, ceil_div(s.B * s.G, 32), 32, 0, p.out<float>("out"),
           p.out<float>("mean"), p.out<float>("rstd"), p.in<float>("x"), p.in<float>("w"),
           p.in<float>("bias"), s.B * s.G, s.T, s.C, s.G);
}

__global__ void groupnorm_backward_kernel1(float* dx, float* out, const float* dout, const float* mean,
                                           const float* rstd, const float* x, const float* w,
                                           const float* bias, int groups, int T, int C, int G) {
    int group = blockIdx.x * blockDim.x + threadIdx.x, n = C / G * T, c0 = group % G * (C / G);
    if (group >= groups) return;
    const float *row = x + (size_t)group * n, *upstream = dout + (size_t)group * n;
    float m = mean[group], r = rstd[group], sum = 0, sum_normed = 0;
    for (int i = 0; i < n; i++) {
        int c = c0 + i / T;
        float normed = (row[i] - m) * r, dy = groupnorm_dy(upstream[i], normed, w[c], bias[c]);
        sum += w[c] * dy, sum_normed += w[c] * dy * normed;
    }
    for (int i = 0; i < n; i++) {
        int c = c0 + i / T;
        float normed = (row[i] - m) * r, dy = groupnorm_dy(upstream[i], normed, w[c], bias[c]);
        float y = normed * w[c] + bias[c];
        dx[(size_t)group * n + i] = r * (w[c] * dy - (sum + normed * sum_normed) / n);
        out[(size_t)group * n + i] = y / (1 + expf(-y));
    }
}
// dw, dbias (C) +=: a thread a channel
__global__ void groupnorm_weights_kernel1(float* dw, float* dbias, const float* dout, const float* mean,
                                          const float* rstd, const float* x, const float* w,
                                          const float* bias, int B, int T, int C, int G) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    float sum = 0, sum_normed = 0;
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            size_t i = ((size_t)b * C + c) * T + t;
            int group = b * G + c / (C / G);
            float normed = (x[i] - mean[group]) * rstd[group],
                  dy = groupnorm_dy(dout[i], normed, w[c], bias[c]);
            sum += dy, sum_normed += dy * normed;
        }
    dw[c] += sum_normed, dbias[c] += sum;
}
static void groupnorm_backward1(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    launch(groupnorm_backward_kernel1, ceil_div(s.B * s.G, 32), 32, 0, p.out<float>("dx"),
           p.out<float>("out"), p.in<float>("dout"), p.in<float>("mean"), p.in<float>("rstd"),
           p.in<float>("x"), p.in<float>("w"), p.in<float>("bias"), s.B * s.G, s.T, s.C, s.G);
    launch(groupnorm_weights_kernel1, ceil_div(s.C, 32), 32, 0, p.sum<float>("dw"), p.sum<float>("dbias"),
           p.in<float>("dout"), p.in<float>("mean"), p.in<float>("rstd"), p.in<float>("x"), p.in<float>("w"),
           p.in<float>("bias"), s.B, s.T, s.C, s.G);
}

// ---- 2: a block a group -----------------------------------------------------------------------------------

__global__ void groupnorm_forward_kernel2(float* out, float* mean, float* rstd, const float* x,
                                          const float* w, const float* bias, int T, int C, int G) {
    int group = blockIdx.x, n = C / G * T;
    const float* row = x + (size_t)group * n;
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += row[i];
    float m = team_sum(sum) / n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) squares += (row[i] - m) * (row[i] - m);
    float r = 1 / sqrtf(team_sum(squares) / n + GROUPNORM_EPS);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int c = group % G * (C / G) + i / T;
        float y = (row[i] - m) * r * w[c] + bias[c];
        out[(size_t)group * n + i] = y / (1 + expf(-y));
    }
    if (threadIdx.x == 0) mean[group] = m, rstd[group] = r;
}
static void groupnorm_forward2(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    launch(groupnorm_forward_kernel2, s.B * s.G, 512, 0, p.out<float>("out"), p.out<float>("mean"),
           p.out<float>("rstd"), p.in<float>("x"), p.in<float>("w"), p.in<float>("bias"), s.T, s.C, s.G);
}

__global__ void groupnorm_backward_kernel2(float* dx, float* out, const float* dout, const float* mean,
                                           const float* rstd, const float* x, const float* w,
                                           const float* bias, int T, int C, int G) {
    int group = blockIdx.x, n = C / G * T, c0 = group % G * (C / G);
    const float *row = x + (size_t)group * n, *upstream = dout + (size_t)group * n;
    float m = mean[group], r = rstd[group], sum = 0, sum_normed = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int c = c0 + i / T;
        float normed = (row[i] - m) * r, dy = groupnorm_dy(upstream[i], normed, w[c], bias[c]);
        sum += w[c] * dy, sum_normed += w[c] * dy * normed;
    }
    sum = team_sum(sum), sum_normed = team_sum(sum_normed);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int c = c0 + i / T;
        float normed = (row[i] - m) * r, dy = groupnorm_dy(upstream[i], normed, w[c], bias[c]);
        float y = normed * w[c] + bias[c];
        dx[(size_t)group * n + i] = r * (w[c] * dy - (sum + normed * sum_normed) / n);
        out[(size_t)group * n + i] = y / (1 + expf(-y));
    }
}
// a block a channel
__global__ void groupnorm_weights_kernel2(float* dw, float* dbias, const float* dout, const float* mean,
                                          const float* rstd, const float* x, const float* w,
                                          const float* bias, int B, int T, int C, int G) {
    int c = blockIdx.x;
    float sum = 0, sum_normed = 0;
    for (int b = 0; b < B; b++)
        for (int t = threadIdx.x; t < T; t += blockDim.x) {
            size_t i = ((size_t)b * C + c) * T + t;
            int group = b * G + c / (C / G);
            float normed = (x[i] - mean[group]) * rstd[group],
                  dy = groupnorm_dy(dout[i], normed, w[c], bias[c]);
            sum += dy, sum_normed += dy * normed;
        }
    sum = team_sum(sum), sum_normed = team_sum(sum_normed);
    if (threadIdx.x == 0) dw[c] += sum_normed, dbias[c] += sum;
}
static void groupnorm_backward2(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    launch(groupnorm_backward_kernel2, s.B * s.G, 512, 0, p.out<float>("dx"), p.out<float>("out"),
           p.in<float>("dout"), p.in<float>("mean"), p.in<float>("rstd"), p.in<float>("x"), p.in<float>("w"),
           p.in<float>("bias"), s.T, s.C, s.G);
    launch(groupnorm_weights_kernel2, s.C, 512, 0, p.sum<float>("dw"), p.sum<float>("dbias"),
           p.in<float>("dout"), p.in<float>("mean"), p.in<float>("rstd"), p.in<float>("x"), p.in<float>("w"),
           p.in<float>("bias"), s.B, s.T, s.C, s.G);
}

// ---- 3: 16-byte loads -------------------------------------------------------------------------------------

// T: a multiple of VEC, so that 16 bytes belong to one channel
__global__ void groupnorm_forward_kernel3(floatX* out, float* mean, float* rstd, const floatX* x,
                                          const floatX* w, const floatX* bias, int T, int C, int G) {
    int group = blockIdx.x, n = C / G * T;
    const uint4* row = (const uint4*)(x + (size_t)group * n);
    uint4* target = (uint4*)(out + (size_t)group * n);
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < n / VEC; i += blockDim.x) {
        Unpacked value = unpack(row[i]);
        for (int k = 0; k < VEC; k++) sum += value[k];
    }
    float m = team_sum(sum) / n;
    for (int i = threadIdx.x; i < n / VEC; i += blockDim.x) {
        Unpacked value = unpack(row[i]);
        for (int k = 0; k < VEC; k++) squares += (value[k] - m) * (value[k] - m);
    }
    float r = 1 / sqrtf(team_sum(squares) / n + GROUPNORM_EPS);
    for (int i = threadIdx.x; i < n / VEC; i += blockDim.x) {
        int c = group % G * (C / G) + i * VEC / T;
        float scale = r * (float)w[c], shift = (float)bias[c] - m * scale;
        Unpacked value = unpack(row[i]);
        for (int k = 0; k < VEC; k++) {
            float y = value[k] * scale + shift;
            value[k] = y * sigmoid(y);
        }
        target[i] = pack(value);
    }
    if (threadIdx.x == 0) mean[group] = m, rstd[group] = r;
}
static void groupnorm_forward3(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    assert(s.T % VEC == 0);
    launch(groupnorm_forward_kernel3, s.B * s.G, 512, 0, p.out<floatX>("out"), p.out<float>("mean"),
           p.out<float>("rstd"), p.in<floatX>("x"), p.in<floatX>("w"), p.in<floatX>("bias"), s.T, s.C, s.G);
}

// normed and dy of 16 bytes of x and dout
__device__ static inline void groupnorm_dy3(Unpacked& normed, Unpacked& dy, uint4 x, uint4 dout, float m,
                                            float r, float w, float bias) {
    normed = unpack(x), dy = unpack(dout);
    for (int k = 0; k < VEC; k++) {
        normed[k] = (normed[k] - m) * r;
        dy[k] *= silu_gradient(normed[k] * w + bias);
    }
}
__global__ void groupnorm_backward_kernel3(floatX* dx, floatX* out, const floatX* dout, const float* mean,
                                           const float* rstd, const floatX* x, const floatX* w,
                                           const floatX* bias, int T, int C, int G) {
    int group = blockIdx.x, n = C / G * T, c0 = group % G * (C / G);
    const uint4 *row = (const uint4*)(x + (size_t)group * n),
                *upstream = (const uint4*)(dout + (size_t)group * n);
    uint4 *target = (uint4*)(dx + (size_t)group * n), *again = (uint4*)(out + (size_t)group * n);
    float m = mean[group], r = rstd[group], sum = 0, sum_normed = 0;
    Unpacked normed, dy;
    for (int i = threadIdx.x; i < n / VEC; i += blockDim.x) {
        int c = c0 + i * VEC / T;
        groupnorm_dy3(normed, dy, row[i], upstream[i], m, r, (float)w[c], (float)bias[c]);
        for (int k = 0; k < VEC; k++)
            sum += (float)w[c] * dy[k], sum_normed += (float)w[c] * dy[k] * normed[k];
    }
    sum = team_sum(sum) / n, sum_normed = team_sum(sum_normed) / n;
    for (int i = threadIdx.x; i < n / VEC; i += blockDim.x) {
        int c = c0 + i * VEC / T;
        groupnorm_dy3(normed, dy, row[i], upstream[i], m, r, (float)w[c], (float)bias[c]);
        for (int k = 0; k < VEC; k++) {
            float y = normed[k] * (float)w[c] + (float)bias[c];
            dy[k] = r * ((float)w[c] * dy[k] - (sum + normed[k] * sum_normed));
            normed[k] = y * sigmoid(y);
        }
        target[i] = pack(dy), again[i] = pack(normed);
    }
}
__global__ void groupnorm_weights_kernel3(float* dw, float* dbias, const floatX* dout, const float* mean,
                                          const float* rstd, const floatX* x, const floatX* w,
                                          const floatX* bias, int B, int T, int C, int G) {
    int c = blockIdx.x;
    float sum = 0, sum_normed = 0;
    Unpacked normed, dy;
    for (int b = 0; b < B; b++)
        for (int t = threadIdx.x * VEC; t < T; t += blockDim.x * VEC) {
            size_t i = ((size_t)b * C + c) * T + t;
            int group = b * G + c / (C / G);
            groupnorm_dy3(normed, dy, *(const uint4*)(x + i), *(const uint4*)(dout + i), mean[group],
                          rstd[group], (float)w[c], (float)bias[c]);
            for (int k = 0; k < VEC; k++) sum += dy[k], sum_normed += dy[k] * normed[k];
        }
    sum = team_sum(sum), sum_normed = team_sum(sum_normed);
    if (threadIdx.x == 0) dw[c] += sum_normed, dbias[c] += sum;
}
static void groupnorm_backward3(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    assert(s.T % VEC == 0);
    launch(groupnorm_backward_kernel3, s.B * s.G, 512, 0, p.out<floatX>("dx"), p.out<floatX>("out"),
           p.in<floatX>("dout"), p.in<float>("mean"), p.in<float>("rstd"), p.in<floatX>("x"),
           p.in<floatX>("w"), p.in<floatX>("bias"), s.T, s.C, s.G);
    launch(groupnorm_weights_kernel3, s.C, 512, 0, p.sum<float>("dw"), p.sum<float>("dbias"),
           p.in<floatX>("dout"), p.in<float>("mean"), p.in<float>("rstd"), p.in<floatX>("x"),
           p.in<floatX>("w"), p.in<floatX>("bias"), s.B, s.T, s.C, s.G);
}

// ---- 4: NHWC, tiles of pixels -----------------------------------------------------------------------------

enum { GROUPNORM_THREADS = 256, GROUPNORM_FLOATS = GROUPNORM_THREADS * VEC };

// A block owns pixels [first, end) of image blockIdx.y; a thread always the same 16 bytes of a pixel, of
// every rows-th pixel. Threads that would begin a row they can't complete are idle.
struct GroupnormTile {
    int vectors, rows, v, row, first, end;
    __device__ GroupnormTile(int T, int C)
        : vectors(C / VEC),
          rows(GROUPNORM_THREADS / vectors),
          v(threadIdx.x % vectors),
          row(threadIdx.x / vectors),
          first(blockIdx.x * GROUPNORM_TILE),
          end(min(first + GROUPNORM_TILE, T)) {}
    __device__ bool idle() const { return row >= rows; }
    __device__ size_t at(int t, int T) const {
        return ((size_t)blockIdx.y * T + t) * vectors + v;
    }  // in 16 bytes
    // Adds up the threads' sums: total (C), in a fixed order. room (rows, C).
    __device__ void add_up(float* total, float* room, const float sum[VEC], int C) const {
        if (!idle())
            for (int k = 0; k < VEC; k++) room[row * C + v * VEC + k] = sum[k];
        __syncthreads();
        for (int c = threadIdx.x; c < C; c += GROUPNORM_THREADS) {
            float all = 0;
            for (int r = 0; r < rows; r++) all += room[r * C + c];
            total[c] = all;
        }
        __syncthreads();
    }
};

// tile_mean, tile_m2 (B, tiles, C): of a tile's pixels the mean and the squares about it.
__global__ void groupnorm_partials_kernel4(float* tile_mean, float* tile_m2, const floatX* x, int T, int C) {
    __shared__ float room[GROUPNORM_FLOATS], total[GROUPNORM_FLOATS];
    GroupnormTile tile(T, C);
    float sum[VEC] = {}, squares[VEC] = {};
    float n = (float)(tile.end - tile.first);
    if (!tile.idle())
        for (int t = tile.first + tile.row; t < tile.end; t += tile.rows) {
            Unpacked value = unpack(((const uint4*)x)[tile.at(t, T)]);
            for (int k = 0; k < VEC; k++) sum[k] += value[k];
        }
    tile.add_up(total, room, sum, C);
    if (!tile.idle())
        for (int t = tile.first + tile.row; t < tile.end; t += tile.rows) {  // from the cache
            Unpacked value = unpack(((const uint4*)x)[tile.at(t, T)]);
            for (int k = 0; k < VEC; k++) {
                float d = value[k] - total[tile.v * VEC + k] / n;
                squares[k] += d * d;
            }
        }
    size_t at = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * C;
    for (int c = threadIdx.x; c < C; c += GROUPNORM_THREADS) tile_mean[at + c] = total[c] / n;
    __syncthreads();
    tile.add_up(total, room, squares, C);
    for (int c = threadIdx.x; c < C; c += GROUPNORM_THREADS) tile_m2[at + c] = total[c];
}

// Count, mean and squares about it of some numbers; those of two sets together: Chan, Golub and LeVeque
// (1983).
struct GroupnormMoments {
    float n, mean, m2;
};
__device__ static inline GroupnormMoments groupnorm_merge(GroupnormMoments a, GroupnormMoments b) {
    float n = a.n + b.n, d = b.mean - a.mean;
    if (b.n == 0) return a;
    return {n, a.mean + d * b.n / n, a.m2 + b.m2 + d * d * a.n * b.n / n};
}
// mean, rstd (B, G) from the tiles'. A warp a group.
__global__ void groupnorm_combine_kernel4(float* mean, float* rstd, const float* tile_mean,
                                          const float* tile_m2, int tiles, int T, int C, int G) {
    int g = blockIdx.x, b = blockIdx.y, size = C / G;
    GroupnormMoments all = {0, 0, 0};
    for (int i = threadIdx.x; i < tiles * size; i += 32) {
        int tile = i / size;
        size_t at = ((size_t)b * tiles + tile) * C + g * size + i % size;
        float n = (float)min((int)GROUPNORM_TILE, T - tile * GROUPNORM_TILE);
        all = groupnorm_merge(all, {n, tile_mean[at], tile_m2[at]});
    }
    for (int step = 16; step; step /= 2) {
        GroupnormMoments other = {__shfl_down_sync(~0u, all.n, step), __shfl_down_sync(~0u, all.mean, step),
                                  __shfl_down_sync(~0u, all.m2, step)};
        all = groupnorm_merge(all, other);
    }
    if (threadIdx.x == 0) mean[b * G + g] = all.mean, rstd[b * G + g] = 1 / sqrtf(all.m2 / all.n + GROUPNORM_EPS);
}
__global__ void groupnorm_forward_kernel4(floatX* out, const float* mean, const float* rstd, const floatX* x,
                                          const floatX* w, const floatX* bias, int T, int C, int G) {
    GroupnormTile tile(T, C);
    if (tile.idle()) return;
    float scale[VEC], shift[VEC];
    for (int k = 0; k < VEC; k++) {
        int c = tile.v * VEC + k, group = blockIdx.y * G + c / (C / G);
        scale[k] = rstd[group] * (float)w[c], shift[k] = (float)bias[c] - mean[group] * scale[k];
    }
    for (int t = tile.first + tile.row; t < tile.end; t += tile.rows) {
        Unpacked value = unpack(((const uint4*)x)[tile.at(t, T)]);
        for (int k = 0; k < VEC; k++) {
            float y = value[k] * scale[k] + shift[k];
            value[k] = y * sigmoid(y);
        }
        ((uint4*)out)[tile.at(t, T)] = pack(value);
    }
}
static void groupnorm_forward4(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    assert(s.C % VEC == 0 && s.C <= GROUPNORM_FLOATS);
    int tiles = ceil_div(s.T, GROUPNORM_TILE);
    float *tile_mean = p.scratch<float>("mean of tiles", (size_t)s.B * tiles * s.C),
          *tile_m2 = p.scratch<float>("m2 of tiles", (size_t)s.B * tiles * s.C), *mean = p.out<float>("mean"),
          *rstd = p.out<float>("rstd");
    const floatX* x = p.in<floatX>("x");
    launch(groupnorm_partials_kernel4, dim3(tiles, s.B), GROUPNORM_THREADS, 0, tile_mean, tile_m2, x, s.T,
           s.C);
    launch(groupnorm_combine_kernel4, dim3(s.G, s.B), 32, 0, mean, rstd, tile_mean, tile_m2, tiles, s.T, s.C,
           s.G);
    launch(groupnorm_forward_kernel4, dim3(tiles, s.B), GROUPNORM_THREADS, 0, p.out<floatX>("out"), mean,
           rstd, x, p.in<floatX>("w"), p.in<floatX>("bias"), s.T, s.C, s.G);
}

// ---- 4, backward ------------------------------------------------------------------------------------------

// A thread's channels: statistics of their groups, weight and bias.
struct GroupnormChannels {
    float mean[VEC], rstd[VEC], w[VEC], bias[VEC];
    __device__ GroupnormChannels(const GroupnormTile& tile, const float* means, const float* rstds,
                                 const floatX* ws, const floatX* biases, int C, int G) {
        for (int k = 0; k < VEC; k++) {
            int c = tile.v * VEC + k, group = blockIdx.y * G + c / (C / G);
            mean[k] = means[group], rstd[k] = rstds[group], w[k] = (float)ws[c], bias[k] = (float)biases[c];
        }
    }
    __device__ void gradients(Unpacked& normed, Unpacked& dy, uint4 x, uint4 dout) const {
        normed = unpack(x), dy = unpack(dout);
        for (int k = 0; k < VEC; k++) {
            normed[k] = (normed[k] - mean[k]) * rstd[k];
            dy[k] *= silu_gradient(normed[k] * w[k] + bias[k]);
        }
    }
};

// partials (2, B, tiles, C): the sums over a tile's pixels of dy and of dy normed.
__global__ void groupnorm_backward_partials_kernel4(float* partials, const floatX* dout, const float* mean,
                                                    const float* rstd, const floatX* x, const floatX* w,
                                                    const floatX* bias, int T, int C, int G) {
    __shared__ float room[GROUPNORM_FLOATS], total[GROUPNORM_FLOATS];
    GroupnormTile tile(T, C);
    float sum[VEC] = {}, sum_normed[VEC] = {};
    Unpacked normed, dy;
    if (!tile.idle()) {
        GroupnormChannels channels(tile, mean, rstd, w, bias, C, G);
        for (int t = tile.first + tile.row; t < tile.end; t += tile.rows) {
            channels.gradients(normed, dy, ((const uint4*)x)[tile.at(t, T)],
                               ((const uint4*)dout)[tile.at(t, T)]);
            for (int k = 0; k < VEC; k++) sum[k] += dy[k], sum_normed[k] += dy[k] * normed[k];
        }
    }
    size_t at = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * C, half = (size_t)gridDim.y * gridDim.x * C;
    tile.add_up(total, room, sum, C);
    for (int c = threadIdx.x; c < C; c += GROUPNORM_THREADS) partials[at + c] = total[c];
    __syncthreads();
    tile.add_up(total, room, sum_normed, C);
    for (int c = threadIdx.x; c < C; c += GROUPNORM_THREADS) partials[half + at + c] = total[c];
}
// sums (2, B, C) over the tiles. A block an image.
__global__ void groupnorm_sums_kernel4(float* sums, const float* partials, int B, int tiles, int C) {
    for (int i = threadIdx.x; i < 2 * C; i += blockDim.x) {
        size_t image = (size_t)(i / C) * B + blockIdx.x;
        float sum = 0;
        for (int tile = 0; tile < tiles; tile++) sum += partials[(image * tiles + tile) * C + i % C];
        sums[image * C + i % C] = sum;
    }
}
__global__ void groupnorm_backward_kernel4(floatX* dx, floatX* out, const float* sums, const floatX* dout,
                                           const float* mean, const float* rstd, const floatX* x,
                                           const floatX* w, const floatX* bias, int B, int T, int C, int G) {
    GroupnormTile tile(T, C);
    if (tile.idle()) return;
    GroupnormChannels channels(tile, mean, rstd, w, bias, C, G);
    float a[VEC] = {}, q[VEC] = {};  // the group's means of w dy and of w dy normed
    Unpacked normed, dy;
    int size = C / G;
    for (int k = 0; k < VEC; k++)
        for (int c = (tile.v * VEC + k) / size * size, last = c + size; c < last; c++) {
            a[k] += (float)w[c] * sums[(size_t)blockIdx.y * C + c] / (float)(size * T);
            q[k] += (float)w[c] * sums[(size_t)(B + blockIdx.y) * C + c] / (float)(size * T);
        }
    for (int t = tile.first + tile.row; t < tile.end; t += tile.rows) {
        channels.gradients(normed, dy, ((const uint4*)x)[tile.at(t, T)], ((const uint4*)dout)[tile.at(t, T)]);
        for (int k = 0; k < VEC; k++) {
            float y = normed[k] * channels.w[k] + channels.bias[k];
            dy[k] = channels.rstd[k] * (channels.w[k] * dy[k] - (a[k] + normed[k] * q[k]));
            normed[k] = y * sigmoid(y);
        }
        ((uint4*)dx)[tile.at(t, T)] = pack(dy), ((uint4*)out)[tile.at(t, T)] = pack(normed);
    }
}
__global__ void groupnorm_weights_kernel4(float* dw, float* dbias, const float* sums, int B, int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    float sum = 0, sum_normed = 0;
    for (int b = 0; b < B; b++) sum += sums[(size_t)b * C + c], sum_normed += sums[(size_t)(B + b) * C + c];
    dw[c] += sum_normed, dbias[c] += sum;
}
static void groupnorm_backward4(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    assert(s.C % VEC == 0 && s.C <= GROUPNORM_FLOATS);
    int tiles = ceil_div(s.T, GROUPNORM_TILE);
    float *partials = p.scratch<float>("partials", (size_t)2 * s.B * tiles * s.C),
          *sums = p.scratch<float>("sums", (size_t)2 * s.B * s.C);
    const float *mean = p.in<float>("mean"), *rstd = p.in<float>("rstd");
    const floatX *x = p.in<floatX>("x"), *dout = p.in<floatX>("dout"), *w = p.in<floatX>("w"),
                 *bias = p.in<floatX>("bias");
    launch(groupnorm_backward_partials_kernel4, dim3(tiles, s.B), GROUPNORM_THREADS, 0, partials, dout, mean,
           rstd, x, w, bias, s.T, s.C, s.G);
    launch(groupnorm_sums_kernel4, s.B, 512, 0, sums, partials, s.B, tiles, s.C);
    launch(groupnorm_backward_kernel4, dim3(tiles, s.B), GROUPNORM_THREADS, 0, p.out<floatX>("dx"),
           p.out<floatX>("out"), sums, dout, mean, rstd, x, w, bias, s.B, s.T, s.C, s.G);
    launch(groupnorm_weights_kernel4, ceil_div(s.C, 32), 32, 0, p.sum<float>("dw"), p.sum<float>("dbias"),
           sums, s.B, s.C);
}

// ---- 5, 6: the program's ----------------------------------------------------------------------------------

#ifdef PROGRAM
// 5: alone, the program's norm measures its input first; backward, it takes the gradient through the SiLU and
// sums that.
static void groupnorm_forward5(Problem& p) {
    Norm norm = groupnorm_to_measure<floatX>(p);
    Tensor& x = norm.x.first;
    x.moments = p.scratch_sums<Moments>("moments", x);
    channel_moments(x);
    groupnorm_forward(p.tensor_out<floatX>("out"), norm);
}
static void groupnorm_backward5(Problem& p) {
    Norm norm = groupnorm_trained<floatX>(p);
    norm.sums = p.scratch_sums<NormSums>("sums alone", norm.x.first);
    Tensor dy = p.tensor_scratch("dy alone", norm.x.first);
    groupnorm_backward_sums(dy, p.tensor_in<floatX>("dout"), norm);
    groupnorm_backward(p.tensor_out<floatX>("dx"), p.tensor_out<floatX>("out"), dy, norm);
}
// 6: in the network, the epilogues of the products before and, backward, behind it have done so.
static void groupnorm_forward6(Problem& p) {
    Norm norm = groupnorm_to_measure<floatX>(p);
    norm.x.first.moments = (Moments*)p.in<float>("moments of x");
    groupnorm_forward(p.tensor_out<floatX>("out"), norm);
}
static void groupnorm_backward6(Problem& p) {
    Norm norm = groupnorm_trained<floatX>(p);
    norm.sums = (NormSums*)p.in<float>("sums");
    groupnorm_backward(p.tensor_out<floatX>("dx"), p.tensor_out<floatX>("out"), p.tensor_in<floatX>("dy"),
                       norm);
}
#endif
#endif

static Work groupnorm_work(const Problem& p, int tensors) {
    return {0, (double)tensors * sizeof(floatX) * (double)p.find("x").values.size()};
}

static const Ladder groupnorm_ladder = {
    "groupnorm",
    {{"forward",
      {"out", "mean|statistics/2", "rstd|half affine/2"},
      [](const Problem& p) { return groupnorm_work(p, 2); }},
     {"backward", {"dx", "out", "dw", "dbias"}, [](const Problem& p) { return groupnorm_work(p, 4); }}},
    {
#ifndef __CUDACC__
        {1, "forward", NCHW, CPU_FP32, "the definition", groupnorm_forward0},
        {1, "backward", NCHW, CPU_FP32, "the definition", groupnorm_backward0},
#ifdef PROGRAM
        {2, "forward", NHWC, CPU_FP32, "by pixels, all channels at a time", groupnorm_forward2},
        {2, "backward", NHWC, CPU_FP32, "by pixels, all channels at a time", groupnorm_backward2},
        {3, "forward", NHWC, CPU_FP32, "train_unet.cu", groupnorm_forward_cpu},
        {3, "backward", NHWC, CPU_FP32, "train_unet.cu", groupnorm_backward_cpu},
#endif
#else
        {0, "forward", NCHW, CPU_FP32, "the definition", groupnorm_forward0},
        {0, "backward", NCHW, CPU_FP32, "the definition", groupnorm_backward0},
#ifdef PROGRAM
        {0, "forward", NHWC, CPU_FP32, "train_unet.cu on a CPU", groupnorm_forward_cpu},
        {0, "backward", NHWC, CPU_FP32, "train_unet.cu on a CPU", groupnorm_backward_cpu},
#endif
        {1, "forward", NCHW, FP32, "a thread a group", groupnorm_forward1,
         1e-4},  // one float sums 16384 numbers
        {1, "backward", NCHW, FP32, "a thread a group, a thread a channel", groupnorm_backward1, 1e-3},
        {2, "forward", NCHW, FP32, "a block a group", groupnorm_forward2},
        {2, "backward", NCHW, FP32, "a block a group, a block a channel", groupnorm_backward2},
        {3, "forward", NCHW, FLOATX, "16-byte loads", groupnorm_forward3},
        {3, "backward", NCHW, FLOATX, "16-byte loads", groupnorm_backward3},
        {4, "forward", NHWC, FLOATX, "NHWC: sums of tiles, then of groups", groupnorm_forward4},
        {4, "backward", NHWC, FLOATX, "NHWC: sums of tiles, then of groups", groupnorm_backward4},
#ifdef PROGRAM
        {5, "forward", NHWC, FLOATX, "the program's, alone", groupnorm_forward5},
        {5, "backward", NHWC, FLOATX, "the program's, alone", groupnorm_backward5},
        {6, "forward", NHWC, FLOATX, "the program's, sums from the producer", groupnorm_forward6},
        {6, "backward", NHWC, FLOATX, "the program's, sums from the producer", groupnorm_backward6},
#endif
#endif
    }};
LADDER_MAIN(groupnorm_ladder)
