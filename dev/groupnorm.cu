// Group norm and SiLU, forward and backward: out = F.silu(F.group_norm(x, 32, w, bias)).
//
// Backward makes out once more, which is not kept, for the weight gradient of the product that reads it.
//
//   make groupnorm && ./groupnorm        every version: against PyTorch, then timed
//   ./groupnorm 3                        version 3 alone
//
//   0  CPU, NCHW: the definition, one group after the other; and the program's function there
//   1  fp32, NCHW, each thread has a group
//   2  fp32, NCHW, each block has a group
//   3  bf16, NCHW, each block has a group, and loads 16 bytes at a time
//   4  bf16, NHWC, each block has a tile of 64 pixels: sums over tiles, then over groups, then the result
//   5  the program's, alone: one launch makes the sums over tiles, the next one adds these up and writes the result
//   6  the program's in the network: whatever wrote x, and backward dout, has left the sums over tiles behind
//
// A build without a GPU has three versions:
//
//   1  NCHW: the definition, one group after the other
//   2  NHWC: all channels of a pixel at a time, twice over an image
//   3  the program's function
//
// Forward, Wu and He, "Group Normalization" (2018), equations 1, 2, 6 and 7. A group is C / 32 channels of an image:
//
//   x_hat = (x - mean) rstd        mean of the group, rstd = 1 / sqrt(variance of the group + eps)
//   y     = x_hat w + bias         w and bias of the channel
//   out   = y sigmoid(y)
//
// Backward, where mean(...) is over the group, and sums are over the pixels of a channel in all images:
//
//   dy    = dout sigmoid(y) (1 + y (1 - sigmoid(y)))
//   dw    = sum(dy x_hat),  dbias = sum(dy)
//   dx    = rstd (w dy - mean(w dy) - x_hat mean(w dy x_hat))
#include "common.h"

enum { GROUPNORM_GROUPS = 32 };
static const float GROUPNORM_EPS = 1e-5f;

// B images of C channels and T = H W pixels, G groups.
struct GroupnormShape {
    int B, C, T, G;
};

static GroupnormShape groupnorm_shape(const Problem& p) {
    return {p.dim("B"), p.dim("C"), p.dim("H") * p.dim("W"), GROUPNORM_GROUPS};
}

#ifdef PROGRAM
// The norm as the program's layers take it.
template <typename Real>
static NormOf<Real> groupnorm_of(Problem& p, float* statistics, float* half_scale_shift) {
    return {.x = p.tensor_in<Real>("x"),
            .groups = GROUPNORM_GROUPS,
            .silu = true,
            .w = p.in<float>("w"),
            .bias = p.in<float>("bias"),
            .statistics = (GroupStatistics*)statistics,
            .half_scale_shift = (ScaleShift*)half_scale_shift};
}

// Forward writes the groups' statistics, and the scales and shifts that follow from them.
template <typename Real>
static NormOf<Real> groupnorm_for_forward(Problem& p) {
    return groupnorm_of<Real>(p, p.out<float>("statistics"), p.out<float>("half affine"));
}

// Backward reads what forward wrote.
template <typename Real>
static NormOf<Real> groupnorm_for_backward(Problem& p) {
    float* statistics = (float*)p.in<float>("statistics");
    float* half_scale_shift = (float*)p.in<float>("half affine");
    NormOf<Real> norm = groupnorm_of<Real>(p, statistics, half_scale_shift);
    norm.dw = p.out<float>("dw");
    norm.dbias = p.out<float>("dbias");
    return norm;
}

// The program's function on a CPU. A task is 128 pixels of an image, so that one image is work for many threads, and
// the sums of 64 channels stay in registers.
static void groupnorm_forward_cpu(Problem& p) {
    cpu::Norm norm = groupnorm_for_forward<float>(p);
    cpu::Tensor& x = norm.x.first;
    x.moments = p.scratch_sums<Moments>("moments", x);
    cpu::channel_moments(x);
    cpu::groupnorm_forward(p.tensor_out<float>("out"), norm);
}

static void groupnorm_backward_cpu(Problem& p) {
    cpu::Norm norm = groupnorm_for_backward<float>(p);
    cpu::Tensor dx = p.tensor_out<float>("dx");
    cpu::Tensor dy = dx;  // until dx overwrites it
    norm.sums = p.scratch_sums<NormSums>("sums", norm.x.first);
    cpu::groupnorm_backward_sums(dy, p.tensor_in<float>("dout"), norm);
    cpu::groupnorm_backward(dx, p.tensor_out<float>("out"), dy, norm, cpu::BackwardOptions());
}
#endif

// dy, the gradient at the norm's output before the SiLU.
HOST_DEVICE static inline float groupnorm_dy(float dout, float x_hat, float w, float bias) {
    float y = x_hat * w + bias;
    float s = 1 / (1 + expf(-y));
    return dout * s * (1 + y * (1 - s));
}

// ---- 0, on a CPU 1: the definition --------------------------------------------------------------------------
// One number after the other, and expf for each.

// Sums over a channel's pixels in one image.
struct GroupnormSums {
    float dy_x_hat, dy;
};

// dw, dbias (C) = sums (B, C), added up over the images
static void groupnorm_weights(Problem& p, const GroupnormSums* sums) {
    GroupnormShape s = groupnorm_shape(p);
    float* dw = p.out<float>("dw");
    float* dbias = p.out<float>("dbias");
    for (int c = 0; c < s.C; c++) {
        double sum = 0;
        double product = 0;
        for (int b = 0; b < s.B; b++) {
            product += sums[b * s.C + c].dy_x_hat;
            sum += sums[b * s.C + c].dy;
        }
        dw[c] = (float)product;
        dbias[c] = (float)sum;
    }
}

// out, x (B, C, T); mean, rstd (B, G); w, bias (C). In NCHW a group is contiguous: group g of image b is the
// n = C / G T floats from (b G + g) n on.
static void groupnorm_forward0(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    float* out = p.out<float>("out");
    float* mean = p.out<float>("mean");
    float* rstd = p.out<float>("rstd");
    const float* x = p.in<float>("x");
    const float* w = p.in<float>("w");
    const float* bias = p.in<float>("bias");
    int group_size = s.C / s.G;  // channels
    int n = group_size * s.T;    // elements

#pragma omp parallel for
    for (int group = 0; group < s.B * s.G; group++) {
        const float* row = x + (size_t)group * n;
        double sum = 0;
        for (int i = 0; i < n; i++) sum += row[i];
        double m = sum / n;

        double squares = 0;
        for (int i = 0; i < n; i++) squares += (row[i] - m) * (row[i] - m);
        mean[group] = (float)m;
        rstd[group] = (float)(1 / sqrt(squares / n + GROUPNORM_EPS));

        for (int i = 0; i < n; i++) {
            int c = group % s.G * group_size + i / s.T;
            float y = (row[i] - mean[group]) * rstd[group] * w[c] + bias[c];
            out[(size_t)group * n + i] = y / (1 + expf(-y));
        }
    }
}

// dx, out, dout, x (B, C, T); mean, rstd (B, G); w, bias (C)
static void groupnorm_backward0(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    float* dx = p.out<float>("dx");
    float* out = p.out<float>("out");
    const float* x = p.in<float>("x");
    const float* w = p.in<float>("w");
    const float* bias = p.in<float>("bias");
    const float* mean = p.in<float>("mean");
    const float* rstd = p.in<float>("rstd");
    const float* dout = p.in<float>("dout");
    GroupnormSums* sums = (GroupnormSums*)p.scratch<float>("sums", (size_t)2 * s.B * s.C);  // (B, C)
    int group_size = s.C / s.G;
    int n = group_size * s.T;

#pragma omp parallel for
    for (int group = 0; group < s.B * s.G; group++) {
        float m = mean[group];
        float r = rstd[group];

        double sum = 0;      // of w dy
        double product = 0;  // of w dy x_hat
        for (int channel = group * group_size; channel < (group + 1) * group_size; channel++) {
            int c = channel % s.C;
            double channel_sum = 0;
            double channel_product = 0;
            for (size_t i = (size_t)channel * s.T; i < (size_t)(channel + 1) * s.T; i++) {
                float x_hat = (x[i] - m) * r;
                float dy = groupnorm_dy(dout[i], x_hat, w[c], bias[c]);
                channel_sum += dy;
                channel_product += dy * x_hat;
            }
            sums[channel] = {(float)channel_product, (float)channel_sum};
            sum += w[c] * channel_sum;
            product += w[c] * channel_product;
        }

        for (size_t i = (size_t)group * n; i < (size_t)(group + 1) * n; i++) {
            int c = (int)(i / s.T % s.C);
            float x_hat = (x[i] - m) * r;
            float dy = groupnorm_dy(dout[i], x_hat, w[c], bias[c]);
            dx[i] = r * (w[c] * dy - (float)((sum + x_hat * product) / n));

            float y = x_hat * w[c] + bias[c];
            out[i] = y / (1 + expf(-y));
        }
    }
    groupnorm_weights(p, sums);
}

#ifndef __CUDACC__
#ifdef PROGRAM
// ---- 2 on a CPU: NHWC, all channels of a pixel at a time, an image a thread -------------------------------
// With the channels last, sums and a polynomial in the place of expf go by vectors of 16 channels. So they do in the
// program, version 3. The times in ms, on two threads of an Intel Xeon with AVX-512, 128 channels at 64x64, B = 4:
//
//                                                        forward   backward
//   1  the definition                                        6.9       14.6
//   2  an image is a task                                   0.59        2.1
//   3  128 pixels of an image are a task                    0.67        1.5
//      if 32 channels of an image were a task                1.0        2.9
//
// The tasks of the last row jump 512 bytes from pixel to pixel.

// y sigmoid(y). With the program's sigmoid version 2 takes seven times as long: g++ 12 multiplies y by what
// either end of the clamp in fast_exp leads to, in all lanes, and chooses afterwards. 1 / (1 + e^88) is
// subnormal, and such a product costs a hundred cycles. Here no factor is below 1e-30.
static inline float groupnorm_silu(float y) { return y / (1 + std::min(fast_exp(-y), 1e30f)); }

// out, x (B, T, C); mean, rstd (B, G); w, bias (C). The norm becomes y = x scale + shift for each channel of an image.
static void groupnorm_forward2(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    float* out = p.out<float>("out");
    float* mean = p.out<float>("mean");
    float* rstd = p.out<float>("rstd");
    const float* x = p.in<float>("x");
    const float* w = p.in<float>("w");
    const float* bias = p.in<float>("bias");
    int C = s.C;
    int group_size = C / s.G;

#pragma omp parallel for
    for (int b = 0; b < s.B; b++) {
        size_t first = (size_t)b * s.T * C;
        size_t last = first + (size_t)s.T * C;

        std::vector<double> sum(C), squares(C);
        for (size_t at = first; at < last; at += C)
            SIMD_FOR (int c = 0; c < C; c++) {
                sum[c] += x[at + c];
                squares[c] += (double)x[at + c] * x[at + c];
            }

        std::vector<float> scale(C), shift(C);
        for (int g = 0; g < s.G; g++) {
            double total = 0;
            double total_squares = 0;
            for (int c = g * group_size; c < (g + 1) * group_size; c++) {
                total += sum[c];
                total_squares += squares[c];
            }
            double n = (double)s.T * group_size;
            double m = total / n;
            double r = 1 / sqrt(total_squares / n - m * m + GROUPNORM_EPS);
            mean[b * s.G + g] = (float)m;
            rstd[b * s.G + g] = (float)r;

            for (int c = g * group_size; c < (g + 1) * group_size; c++) {
                scale[c] = (float)(r * w[c]);
                shift[c] = (float)(bias[c] - m * r * w[c]);
            }
        }

        for (size_t at = first; at < last; at += C)
            SIMD_FOR (int c = 0; c < C; c++) {
                float y = x[at + c] * scale[c] + shift[c];
                out[at + c] = groupnorm_silu(y);
            }
    }
}

// dx, out, dout, x (B, T, C); mean, rstd (B, G); w, bias (C). The second pass over an image computes dy again, which
// costs an exponential and no memory.
static void groupnorm_backward2(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    float* dx = p.out<float>("dx");
    float* out = p.out<float>("out");
    const float* x = p.in<float>("x");
    const float* w = p.in<float>("w");
    const float* bias = p.in<float>("bias");
    const float* mean = p.in<float>("mean");
    const float* rstd = p.in<float>("rstd");
    const float* dout = p.in<float>("dout");
    GroupnormSums* sums = (GroupnormSums*)p.scratch<float>("sums", (size_t)2 * s.B * s.C);  // (B, C)
    int C = s.C;
    int group_size = C / s.G;

#pragma omp parallel for
    for (int b = 0; b < s.B; b++) {
        size_t first = (size_t)b * s.T * C;
        size_t last = first + (size_t)s.T * C;

        std::vector<float> slope(C), offset(C);  // x_hat = x slope + offset
        for (int c = 0; c < C; c++) {
            int group = b * s.G + c / group_size;
            slope[c] = rstd[group];
            offset[c] = -mean[group] * rstd[group];
        }

        std::vector<double> sum(C), product(C);  // of dy, and of dy x_hat
        for (size_t at = first; at < last; at += C)
            SIMD_FOR (int c = 0; c < C; c++) {
                float x_hat = x[at + c] * slope[c] + offset[c];
                float dy = dout[at + c] * silu_gradient(x_hat * w[c] + bias[c]);
                sum[c] += dy;
                product[c] += dy * x_hat;
            }

        std::vector<float> group_mean(C), group_product(C);  // the group's means of w dy, and of w dy x_hat
        for (int c = 0; c < C; c++) {
            sums[b * C + c] = {(float)product[c], (float)sum[c]};

            int c0 = c / group_size * group_size;
            double total = 0;
            double total_product = 0;
            for (int k = c0; k < c0 + group_size; k++) {
                total += w[k] * sum[k];
                total_product += w[k] * product[k];
            }
            group_mean[c] = (float)(total / s.T / group_size);
            group_product[c] = (float)(total_product / s.T / group_size);
        }

        for (size_t at = first; at < last; at += C)
            SIMD_FOR (int c = 0; c < C; c++) {
                float x_hat = x[at + c] * slope[c] + offset[c];
                float y = x_hat * w[c] + bias[c];
                float dy = dout[at + c] * silu_gradient(y);
                dx[at + c] = slope[c] * (w[c] * dy - group_mean[c] - x_hat * group_product[c]);
                out[at + c] = groupnorm_silu(y);
            }
    }
    groupnorm_weights(p, sums);
}
#endif
#else

// The tensors of a version's passes, whose kernels say the shapes. T is what images and parameters are made of: float or
// floatX.
template <class T> struct GroupnormForwardTensors {
    T* out;
    float *mean, *rstd;
    const T *x, *w, *bias;
};
template <class T> static GroupnormForwardTensors<T> groupnorm_forward_tensors(Problem& p) {
    return {.out = p.out<T>("out"),
            .mean = p.out<float>("mean"),
            .rstd = p.out<float>("rstd"),
            .x = p.in<T>("x"),
            .w = p.in<T>("w"),
            .bias = p.in<T>("bias")};
}

template <class T> struct GroupnormBackwardTensors {
    T *dx, *out;
    float *dw, *dbias;
    const T* dout;
    const float *mean, *rstd;
    const T *x, *w, *bias;
};
template <class T> static GroupnormBackwardTensors<T> groupnorm_backward_tensors(Problem& p) {
    return {.dx = p.out<T>("dx"),
            .out = p.out<T>("out"),
            .dw = p.sum<float>("dw"),
            .dbias = p.sum<float>("dbias"),
            .dout = p.in<T>("dout"),
            .mean = p.in<float>("mean"),
            .rstd = p.in<float>("rstd"),
            .x = p.in<T>("x"),
            .w = p.in<T>("w"),
            .bias = p.in<T>("bias")};
}

// ---- 1: a thread a group ----------------------------------------------------------------------------------
// In NCHW a group is contiguous, so that a thread can walk it alone. But 32 images make only 1024 threads on a GPU that
// has room for 270,000, and neighbouring threads read addresses far apart.

// out, x (B, C, T); mean, rstd (B, G); w, bias (C). Group g of image b is the n = C / G T floats from (b G + g) n on.
__global__ void groupnorm_forward_kernel1(float* out, float* mean, float* rstd, const float* x, const float* w,
                                          const float* bias, int groups, int T, int C, int G) {
    int group = blockIdx.x * blockDim.x + threadIdx.x;
    int n = C / G * T;
    if (group >= groups) return;

    const float* group_x = x + (size_t)group * n;
    float sum = 0;
    for (int i = 0; i < n; i++) sum += group_x[i];
    float m = sum / n;

    float squares = 0;
    for (int i = 0; i < n; i++) squares += (group_x[i] - m) * (group_x[i] - m);
    float r = 1 / sqrtf(squares / n + GROUPNORM_EPS);

    for (int i = 0; i < n; i++) {
        int c = group % G * (C / G) + i / T;
        float y = (group_x[i] - m) * r * w[c] + bias[c];
        out[(size_t)group * n + i] = y / (1 + expf(-y));
    }
    mean[group] = m;
    rstd[group] = r;
}

static void groupnorm_forward1(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    auto [out, mean, rstd, x, w, bias] = groupnorm_forward_tensors<float>(p);

    int groups = s.B * s.G;
    launch(groupnorm_forward_kernel1, ceil_div(groups, 32), 32, 0, out, mean, rstd, x, w, bias, groups, s.T, s.C, s.G);
}

// dx, out, dout, x (B, C, T); mean, rstd (B, G); w, bias (C). dx needs sums over the group, so there are two loops.
__global__ void groupnorm_backward_kernel1(float* dx, float* out, const float* dout, const float* mean,
                                           const float* rstd, const float* x, const float* w, const float* bias,
                                           int groups, int T, int C, int G) {
    int group = blockIdx.x * blockDim.x + threadIdx.x;
    int n = C / G * T;
    int c0 = group % G * (C / G);
    if (group >= groups) return;

    const float* group_x = x + (size_t)group * n;
    const float* group_dout = dout + (size_t)group * n;
    float m = mean[group];
    float r = rstd[group];

    float sum = 0;      // of w dy
    float product = 0;  // of w dy x_hat
    for (int i = 0; i < n; i++) {
        int c = c0 + i / T;
        float x_hat = (group_x[i] - m) * r;
        float dy = groupnorm_dy(group_dout[i], x_hat, w[c], bias[c]);
        sum += w[c] * dy;
        product += w[c] * dy * x_hat;
    }

    for (int i = 0; i < n; i++) {
        int c = c0 + i / T;
        float x_hat = (group_x[i] - m) * r;
        float dy = groupnorm_dy(group_dout[i], x_hat, w[c], bias[c]);
        float y = x_hat * w[c] + bias[c];
        dx[(size_t)group * n + i] = r * (w[c] * dy - (sum + x_hat * product) / n);
        out[(size_t)group * n + i] = y / (1 + expf(-y));
    }
}

// dw, dbias (C) += sums of dy x_hat and of dy over a channel's pixels in all images. A thread has a channel.
__global__ void groupnorm_weights_kernel1(float* dw, float* dbias, const float* dout, const float* mean,
                                          const float* rstd, const float* x, const float* w, const float* bias, int B,
                                          int T, int C, int G) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;

    float sum = 0;      // of dy
    float product = 0;  // of dy x_hat
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            size_t i = ((size_t)b * C + c) * T + t;
            int group = b * G + c / (C / G);
            float x_hat = (x[i] - mean[group]) * rstd[group];
            float dy = groupnorm_dy(dout[i], x_hat, w[c], bias[c]);
            sum += dy;
            product += dy * x_hat;
        }
    dw[c] += product;
    dbias[c] += sum;
}

static void groupnorm_backward1(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    auto [dx, out, dw, dbias, dout, mean, rstd, x, w, bias] = groupnorm_backward_tensors<float>(p);

    int groups = s.B * s.G;
    launch(groupnorm_backward_kernel1, ceil_div(groups, 32), 32, 0, dx, out, dout, mean, rstd, x, w, bias, groups, s.T,
           s.C, s.G);
    launch(groupnorm_weights_kernel1, ceil_div(s.C, 32), 32, 0, dw, dbias, dout, mean, rstd, x, w, bias, s.B, s.T, s.C,
           s.G);
}

// ---- 2: a block a group -----------------------------------------------------------------------------------
// The 512 threads of a block walk a group together and add up their sums. That gives work to every multiprocessor, and
// neighbouring threads read neighbouring floats.

// out, x (B, C, T); mean, rstd (B, G); w, bias (C)
__global__ void groupnorm_forward_kernel2(float* out, float* mean, float* rstd, const float* x, const float* w,
                                          const float* bias, int T, int C, int G) {
    int group = blockIdx.x;
    int n = C / G * T;
    const float* group_x = x + (size_t)group * n;

    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += group_x[i];
    float m = team_sum(sum) / n;

    float squares = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) squares += (group_x[i] - m) * (group_x[i] - m);
    float r = 1 / sqrtf(team_sum(squares) / n + GROUPNORM_EPS);

    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int c = group % G * (C / G) + i / T;
        float y = (group_x[i] - m) * r * w[c] + bias[c];
        out[(size_t)group * n + i] = y / (1 + expf(-y));
    }
    if (threadIdx.x == 0) {
        mean[group] = m;
        rstd[group] = r;
    }
}

static void groupnorm_forward2(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    auto [out, mean, rstd, x, w, bias] = groupnorm_forward_tensors<float>(p);
    launch(groupnorm_forward_kernel2, s.B * s.G, 512, 0, out, mean, rstd, x, w, bias, s.T, s.C, s.G);
}

// dx, out, dout, x (B, C, T); mean, rstd (B, G); w, bias (C)
__global__ void groupnorm_backward_kernel2(float* dx, float* out, const float* dout, const float* mean,
                                           const float* rstd, const float* x, const float* w, const float* bias, int T,
                                           int C, int G) {
    int group = blockIdx.x;
    int n = C / G * T;
    int c0 = group % G * (C / G);
    const float* group_x = x + (size_t)group * n;
    const float* group_dout = dout + (size_t)group * n;
    float m = mean[group];
    float r = rstd[group];

    float sum = 0;      // of w dy
    float product = 0;  // of w dy x_hat
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int c = c0 + i / T;
        float x_hat = (group_x[i] - m) * r;
        float dy = groupnorm_dy(group_dout[i], x_hat, w[c], bias[c]);
        sum += w[c] * dy;
        product += w[c] * dy * x_hat;
    }
    sum = team_sum(sum);
    product = team_sum(product);

    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int c = c0 + i / T;
        float x_hat = (group_x[i] - m) * r;
        float dy = groupnorm_dy(group_dout[i], x_hat, w[c], bias[c]);
        float y = x_hat * w[c] + bias[c];
        dx[(size_t)group * n + i] = r * (w[c] * dy - (sum + x_hat * product) / n);
        out[(size_t)group * n + i] = y / (1 + expf(-y));
    }
}

// dw, dbias (C) += sums of dy x_hat and of dy. A block has a channel.
__global__ void groupnorm_weights_kernel2(float* dw, float* dbias, const float* dout, const float* mean,
                                          const float* rstd, const float* x, const float* w, const float* bias, int B,
                                          int T, int C, int G) {
    int c = blockIdx.x;
    float sum = 0;      // of dy
    float product = 0;  // of dy x_hat
    for (int b = 0; b < B; b++)
        for (int t = threadIdx.x; t < T; t += blockDim.x) {
            size_t i = ((size_t)b * C + c) * T + t;
            int group = b * G + c / (C / G);
            float x_hat = (x[i] - mean[group]) * rstd[group];
            float dy = groupnorm_dy(dout[i], x_hat, w[c], bias[c]);
            sum += dy;
            product += dy * x_hat;
        }
    sum = team_sum(sum);
    product = team_sum(product);
    if (threadIdx.x == 0) {
        dw[c] += product;
        dbias[c] += sum;
    }
}

static void groupnorm_backward2(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    auto [dx, out, dw, dbias, dout, mean, rstd, x, w, bias] = groupnorm_backward_tensors<float>(p);
    launch(groupnorm_backward_kernel2, s.B * s.G, 512, 0, dx, out, dout, mean, rstd, x, w, bias, s.T, s.C, s.G);
    launch(groupnorm_weights_kernel2, s.C, 512, 0, dw, dbias, dout, mean, rstd, x, w, bias, s.B, s.T, s.C, s.G);
}

// ---- 3: 16-byte loads -------------------------------------------------------------------------------------
// bf16 halves the traffic, and loads of 16 bytes leave an eighth of the instructions. By itself this kernel is nearly
// as good as any, because its second and third pass over the group find it in the cache. But nothing else here wants
// NCHW.
//
// T is a multiple of VEC, so that the VEC elements of a load belong to one channel.

// out, x (B, C, T); mean, rstd (B, G); w, bias (C)
__global__ void groupnorm_forward_kernel3(floatX* out, float* mean, float* rstd, const floatX* x, const floatX* w,
                                          const floatX* bias, int T, int C, int G) {
    int group = blockIdx.x;
    int n = C / G * T;
    const uint4* group_x = (const uint4*)(x + (size_t)group * n);
    uint4* group_out = (uint4*)(out + (size_t)group * n);

    float sum = 0;
    for (int i = threadIdx.x; i < n / VEC; i += blockDim.x) {
        Unpacked value = unpack(group_x[i]);
        for (int k = 0; k < VEC; k++) sum += value[k];
    }
    float m = team_sum(sum) / n;

    float squares = 0;
    for (int i = threadIdx.x; i < n / VEC; i += blockDim.x) {
        Unpacked value = unpack(group_x[i]);
        for (int k = 0; k < VEC; k++) squares += (value[k] - m) * (value[k] - m);
    }
    float r = 1 / sqrtf(team_sum(squares) / n + GROUPNORM_EPS);

    for (int i = threadIdx.x; i < n / VEC; i += blockDim.x) {
        int c = group % G * (C / G) + i * VEC / T;
        float scale = r * (float)w[c];
        float shift = (float)bias[c] - m * scale;
        Unpacked value = unpack(group_x[i]);
        for (int k = 0; k < VEC; k++) {
            float y = value[k] * scale + shift;
            value[k] = y * sigmoid(y);
        }
        group_out[i] = pack(value);
    }
    if (threadIdx.x == 0) {
        mean[group] = m;
        rstd[group] = r;
    }
}

static void groupnorm_forward3(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    assert(s.T % VEC == 0);
    auto [out, mean, rstd, x, w, bias] = groupnorm_forward_tensors<floatX>(p);
    launch(groupnorm_forward_kernel3, s.B * s.G, 512, 0, out, mean, rstd, x, w, bias, s.T, s.C, s.G);
}

// x_hat and dy of a channel's VEC pixels in x and dout.
__device__ static inline void groupnorm_dy3(Unpacked& x_hat, Unpacked& dy, uint4 x, uint4 dout, float m, float r,
                                            float w, float bias) {
    x_hat = unpack(x);
    dy = unpack(dout);
    for (int k = 0; k < VEC; k++) {
        x_hat[k] = (x_hat[k] - m) * r;
        dy[k] *= silu_gradient(x_hat[k] * w + bias);
    }
}

// dx, out, dout, x (B, C, T); mean, rstd (B, G); w, bias (C)
__global__ void groupnorm_backward_kernel3(floatX* dx, floatX* out, const floatX* dout, const float* mean,
                                           const float* rstd, const floatX* x, const floatX* w, const floatX* bias,
                                           int T, int C, int G) {
    int group = blockIdx.x;
    int n = C / G * T;
    int c0 = group % G * (C / G);
    const uint4* group_x = (const uint4*)(x + (size_t)group * n);
    const uint4* group_dout = (const uint4*)(dout + (size_t)group * n);
    uint4* group_dx = (uint4*)(dx + (size_t)group * n);
    uint4* group_out = (uint4*)(out + (size_t)group * n);
    float m = mean[group];
    float r = rstd[group];
    Unpacked x_hat, dy;

    float sum = 0;      // of w dy
    float product = 0;  // of w dy x_hat
    for (int i = threadIdx.x; i < n / VEC; i += blockDim.x) {
        int c = c0 + i * VEC / T;
        groupnorm_dy3(x_hat, dy, group_x[i], group_dout[i], m, r, (float)w[c], (float)bias[c]);
        for (int k = 0; k < VEC; k++) {
            sum += (float)w[c] * dy[k];
            product += (float)w[c] * dy[k] * x_hat[k];
        }
    }
    float sum_mean = team_sum(sum) / n;
    float product_mean = team_sum(product) / n;

    for (int i = threadIdx.x; i < n / VEC; i += blockDim.x) {
        int c = c0 + i * VEC / T;
        groupnorm_dy3(x_hat, dy, group_x[i], group_dout[i], m, r, (float)w[c], (float)bias[c]);
        Unpacked result_dx, result_out;
        for (int k = 0; k < VEC; k++) {
            float y = x_hat[k] * (float)w[c] + (float)bias[c];
            result_dx[k] = r * ((float)w[c] * dy[k] - (sum_mean + x_hat[k] * product_mean));
            result_out[k] = y * sigmoid(y);
        }
        group_dx[i] = pack(result_dx);
        group_out[i] = pack(result_out);
    }
}

// dw, dbias (C) += sums of dy x_hat and of dy. A block has a channel.
__global__ void groupnorm_weights_kernel3(float* dw, float* dbias, const floatX* dout, const float* mean,
                                          const float* rstd, const floatX* x, const floatX* w, const floatX* bias,
                                          int B, int T, int C, int G) {
    int c = blockIdx.x;
    float sum = 0;      // of dy
    float product = 0;  // of dy x_hat
    Unpacked x_hat, dy;
    for (int b = 0; b < B; b++)
        for (int t = threadIdx.x * VEC; t < T; t += blockDim.x * VEC) {
            size_t i = ((size_t)b * C + c) * T + t;
            int group = b * G + c / (C / G);
            groupnorm_dy3(x_hat, dy, *(const uint4*)(x + i), *(const uint4*)(dout + i), mean[group], rstd[group],
                          (float)w[c], (float)bias[c]);
            for (int k = 0; k < VEC; k++) {
                sum += dy[k];
                product += dy[k] * x_hat[k];
            }
        }
    sum = team_sum(sum);
    product = team_sum(product);
    if (threadIdx.x == 0) {
        dw[c] += product;
        dbias[c] += sum;
    }
}

static void groupnorm_backward3(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    assert(s.T % VEC == 0);
    auto [dx, out, dw, dbias, dout, mean, rstd, x, w, bias] = groupnorm_backward_tensors<floatX>(p);
    launch(groupnorm_backward_kernel3, s.B * s.G, 512, 0, dx, out, dout, mean, rstd, x, w, bias, s.T, s.C, s.G);
    launch(groupnorm_weights_kernel3, s.C, 512, 0, dw, dbias, dout, mean, rstd, x, w, bias, s.B, s.T, s.C, s.G);
}

// ---- 4: NHWC, tiles of pixels -----------------------------------------------------------------------------
// The convolutions want NHWC, where a group is a few bytes of every pixel. So a block takes all channels of a tile of
// 64 pixels, and sums up each channel by itself. A second launch adds up the sums of tiles and channels for each group,
// and a third writes the result. Now that the sums are made by a launch of their own, they can come from elsewhere too.

enum {
    GROUPNORM_TILE = 64,  // pixels
    GROUPNORM_THREADS = 256,
    GROUPNORM_FLOATS = GROUPNORM_THREADS * VEC,  // elements that a block loads at a time, and the most channels
};

// The tile of image blockIdx.y that a block works on, and the part of it that is a thread's: one vector of VEC
// channels, of every rows-th pixel. Where the last threads are too few for a whole pixel, they are idle.
struct GroupnormTile {
    int vectors;     // of a pixel
    int rows;        // pixels that the block loads at a time
    int vector;      // the thread's, among those of a pixel
    int row;         // the thread's first pixel is first + row
    int first, end;  // the tile's pixels

    __device__ GroupnormTile(int T, int C)
        : vectors(C / VEC),
          rows(GROUPNORM_THREADS / vectors),
          vector(threadIdx.x % vectors),
          row(threadIdx.x / vectors),
          first(blockIdx.x * GROUPNORM_TILE),
          end(min(first + GROUPNORM_TILE, T)) {}

    __device__ bool idle() const { return row >= rows; }

    // The k-th of the thread's channels.
    __device__ int channel(int k) const { return vector * VEC + k; }

    // Where the thread's vector of pixel t lies in a tensor (B, T, C / VEC).
    __device__ size_t at(int t, int T) const { return ((size_t)blockIdx.y * T + t) * vectors + vector; }

    // total (C) = the sums of all threads, added up in a fixed order; shared_sums (rows, C) is scratch.
    __device__ void add_up(float* total, float* shared_sums, const float sum[VEC], int C) const {
        if (!idle())
            for (int k = 0; k < VEC; k++) shared_sums[row * C + channel(k)] = sum[k];
        __syncthreads();

        for (int c = threadIdx.x; c < C; c += GROUPNORM_THREADS) {
            float all = 0;
            for (int r = 0; r < rows; r++) all += shared_sums[r * C + c];
            total[c] = all;
        }
        __syncthreads();
    }
};

// tile_mean, tile_m2 (B, tiles, C): for each channel of x (B, T, C) the mean of a tile's pixels, and the sum of their
// squared distances from it.
__global__ void groupnorm_partials_kernel4(float* tile_mean, float* tile_m2, const floatX* x, int T, int C) {
    __shared__ float shared_sums[GROUPNORM_FLOATS], total[GROUPNORM_FLOATS];
    GroupnormTile tile(T, C);
    float n = (float)(tile.end - tile.first);

    float sum[VEC] = {};
    if (!tile.idle())
        for (int t = tile.first + tile.row; t < tile.end; t += tile.rows) {
            Unpacked value = unpack(((const uint4*)x)[tile.at(t, T)]);
            for (int k = 0; k < VEC; k++) sum[k] += value[k];
        }
    tile.add_up(total, shared_sums, sum, C);

    float squares[VEC] = {};
    if (!tile.idle())
        for (int t = tile.first + tile.row; t < tile.end; t += tile.rows) {  // from the cache
            Unpacked value = unpack(((const uint4*)x)[tile.at(t, T)]);
            for (int k = 0; k < VEC; k++) {
                float distance = value[k] - total[tile.channel(k)] / n;
                squares[k] += distance * distance;
            }
        }
    size_t at = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * C;
    for (int c = threadIdx.x; c < C; c += GROUPNORM_THREADS) tile_mean[at + c] = total[c] / n;
    __syncthreads();  // all threads have read total

    tile.add_up(total, shared_sums, squares, C);
    for (int c = threadIdx.x; c < C; c += GROUPNORM_THREADS) tile_m2[at + c] = total[c];
}

// How many values there are, their mean, and the sum of their squared distances from it.
struct GroupnormMoments {
    float n, mean, m2;
};

// The moments of two sets of values together: Chan, Golub and LeVeque (1979).
__device__ static inline GroupnormMoments groupnorm_merge(GroupnormMoments a, GroupnormMoments b) {
    float n = a.n + b.n;
    float distance = b.mean - a.mean;
    if (b.n == 0) return a;
    return {n, a.mean + distance * b.n / n, a.m2 + b.m2 + distance * distance * a.n * b.n / n};
}

// mean, rstd (B, G) from tile_mean, tile_m2 (B, tiles, C). A warp has a group.
__global__ void groupnorm_combine_kernel4(float* mean, float* rstd, const float* tile_mean, const float* tile_m2,
                                          int tiles, int T, int C, int G) {
    int g = blockIdx.x;
    int b = blockIdx.y;
    int group_size = C / G;

    GroupnormMoments moments = {0, 0, 0};
    for (int i = threadIdx.x; i < tiles * group_size; i += 32) {
        int tile = i / group_size;
        size_t at = ((size_t)b * tiles + tile) * C + g * group_size + i % group_size;
        float n = (float)min((int)GROUPNORM_TILE, T - tile * GROUPNORM_TILE);
        moments = groupnorm_merge(moments, {n, tile_mean[at], tile_m2[at]});
    }
    for (int step = 16; step; step /= 2) {
        GroupnormMoments other;
        other.n = __shfl_down_sync(~0u, moments.n, step);
        other.mean = __shfl_down_sync(~0u, moments.mean, step);
        other.m2 = __shfl_down_sync(~0u, moments.m2, step);
        moments = groupnorm_merge(moments, other);
    }
    if (threadIdx.x == 0) {
        mean[b * G + g] = moments.mean;
        rstd[b * G + g] = 1 / sqrtf(moments.m2 / moments.n + GROUPNORM_EPS);
    }
}

// out, x (B, T, C); mean, rstd (B, G); w, bias (C). For each of a thread's channels the norm is y = x scale + shift.
__global__ void groupnorm_forward_kernel4(floatX* out, const float* mean, const float* rstd, const floatX* x,
                                          const floatX* w, const floatX* bias, int T, int C, int G) {
    GroupnormTile tile(T, C);
    if (tile.idle()) return;

    float scale[VEC], shift[VEC];
    for (int k = 0; k < VEC; k++) {
        int c = tile.channel(k);
        int group = blockIdx.y * G + c / (C / G);
        scale[k] = rstd[group] * (float)w[c];
        shift[k] = (float)bias[c] - mean[group] * scale[k];
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
    auto [out, mean, rstd, x, w, bias] = groupnorm_forward_tensors<floatX>(p);
    float* tile_mean = p.scratch<float>("mean of tiles", (size_t)s.B * tiles * s.C);  // (B, tiles, C)
    float* tile_m2 = p.scratch<float>("m2 of tiles", (size_t)s.B * tiles * s.C);      // (B, tiles, C)

    dim3 tile_grid(tiles, s.B);
    dim3 group_grid(s.G, s.B);
    launch(groupnorm_partials_kernel4, tile_grid, GROUPNORM_THREADS, 0, tile_mean, tile_m2, x, s.T, s.C);
    launch(groupnorm_combine_kernel4, group_grid, 32, 0, mean, rstd, tile_mean, tile_m2, tiles, s.T, s.C, s.G);
    launch(groupnorm_forward_kernel4, tile_grid, GROUPNORM_THREADS, 0, out, mean, rstd, x, w, bias, s.T, s.C, s.G);
}

// ---- 4, backward ------------------------------------------------------------------------------------------
// Here the sums over tiles are those of dy and of dy x_hat, for each channel. Added up over all tiles and images they
// are dbias and dw. Weighted by w, and added up over a group, they are the two means that dx needs.

// What belongs to a thread's channels in its image: the statistics of their groups, and their parameters.
struct GroupnormChannels {
    float mean[VEC], rstd[VEC], w[VEC], bias[VEC];

    __device__ GroupnormChannels(const GroupnormTile& tile, const float* means, const float* rstds, const floatX* ws,
                                 const floatX* biases, int C, int G) {
        for (int k = 0; k < VEC; k++) {
            int c = tile.channel(k);
            int group = blockIdx.y * G + c / (C / G);
            mean[k] = means[group];
            rstd[k] = rstds[group];
            w[k] = (float)ws[c];
            bias[k] = (float)biases[c];
        }
    }

    // x_hat and dy of a pixel, from its vectors of x and dout.
    __device__ void gradients(Unpacked& x_hat, Unpacked& dy, uint4 x, uint4 dout) const {
        x_hat = unpack(x);
        dy = unpack(dout);
        for (int k = 0; k < VEC; k++) {
            x_hat[k] = (x_hat[k] - mean[k]) * rstd[k];
            dy[k] *= silu_gradient(x_hat[k] * w[k] + bias[k]);
        }
    }
};

// partials (2, B, tiles, C): for each channel the sums over a tile's pixels of dy, and of dy x_hat. dout, x (B, T, C).
__global__ void groupnorm_backward_partials_kernel4(float* partials, const floatX* dout, const float* mean,
                                                    const float* rstd, const floatX* x, const floatX* w,
                                                    const floatX* bias, int T, int C, int G) {
    __shared__ float shared_sums[GROUPNORM_FLOATS], total[GROUPNORM_FLOATS];
    GroupnormTile tile(T, C);
    float sum[VEC] = {}, product[VEC] = {};  // of dy, and of dy x_hat
    Unpacked x_hat, dy;
    if (!tile.idle()) {
        GroupnormChannels channels(tile, mean, rstd, w, bias, C, G);
        for (int t = tile.first + tile.row; t < tile.end; t += tile.rows) {
            size_t at = tile.at(t, T);
            channels.gradients(x_hat, dy, ((const uint4*)x)[at], ((const uint4*)dout)[at]);
            for (int k = 0; k < VEC; k++) {
                sum[k] += dy[k];
                product[k] += dy[k] * x_hat[k];
            }
        }
    }

    float* sums = partials + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * C;
    float* products = sums + (size_t)gridDim.y * gridDim.x * C;

    tile.add_up(total, shared_sums, sum, C);
    for (int c = threadIdx.x; c < C; c += GROUPNORM_THREADS) sums[c] = total[c];
    __syncthreads();  // all threads have read total

    tile.add_up(total, shared_sums, product, C);
    for (int c = threadIdx.x; c < C; c += GROUPNORM_THREADS) products[c] = total[c];
}

// sums (2, B, C) = partials (2, B, tiles, C).sum(2). A block has an image.
__global__ void groupnorm_sums_kernel4(float* sums, const float* partials, int B, int tiles, int C) {
    for (int i = threadIdx.x; i < 2 * C; i += blockDim.x) {
        int c = i % C;
        size_t image = (size_t)(i / C) * B + blockIdx.x;  // a row of sums, as if it were (2 B, C)
        float sum = 0;
        for (int tile = 0; tile < tiles; tile++) sum += partials[(image * tiles + tile) * C + c];
        sums[image * C + c] = sum;
    }
}

// dx, out, dout, x (B, T, C); sums (2, B, C); mean, rstd (B, G); w, bias (C)
__global__ void groupnorm_backward_kernel4(floatX* dx, floatX* out, const float* sums, const floatX* dout,
                                           const float* mean, const float* rstd, const floatX* x, const floatX* w,
                                           const floatX* bias, int B, int T, int C, int G) {
    GroupnormTile tile(T, C);
    if (tile.idle()) return;

    GroupnormChannels channels(tile, mean, rstd, w, bias, C, G);
    float sum_mean[VEC] = {}, product_mean[VEC] = {};  // over the group, of w dy and of w dy x_hat
    Unpacked x_hat, dy;

    int group_size = C / G;
    float n = (float)(group_size * T);
    const float* image_sums = sums + (size_t)blockIdx.y * C;            // (C), of dy
    const float* image_products = sums + (size_t)(B + blockIdx.y) * C;  // (C), of dy x_hat
    for (int k = 0; k < VEC; k++) {
        int c0 = tile.channel(k) / group_size * group_size;
        for (int c = c0; c < c0 + group_size; c++) {
            sum_mean[k] += (float)w[c] * image_sums[c] / n;
            product_mean[k] += (float)w[c] * image_products[c] / n;
        }
    }

    for (int t = tile.first + tile.row; t < tile.end; t += tile.rows) {
        size_t at = tile.at(t, T);
        channels.gradients(x_hat, dy, ((const uint4*)x)[at], ((const uint4*)dout)[at]);
        for (int k = 0; k < VEC; k++) {  // dx and out take the places of dy and x_hat
            float y = x_hat[k] * channels.w[k] + channels.bias[k];
            dy[k] = channels.rstd[k] * (channels.w[k] * dy[k] - (sum_mean[k] + x_hat[k] * product_mean[k]));
            x_hat[k] = y * sigmoid(y);
        }
        ((uint4*)dx)[at] = pack(dy);
        ((uint4*)out)[at] = pack(x_hat);
    }
}

// dw, dbias (C) += sums (2, B, C), added up over the images. A thread has a channel.
__global__ void groupnorm_weights_kernel4(float* dw, float* dbias, const float* sums, int B, int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;

    float sum = 0;      // of dy
    float product = 0;  // of dy x_hat
    for (int b = 0; b < B; b++) {
        sum += sums[(size_t)b * C + c];
        product += sums[(size_t)(B + b) * C + c];
    }
    dw[c] += product;
    dbias[c] += sum;
}

static void groupnorm_backward4(Problem& p) {
    GroupnormShape s = groupnorm_shape(p);
    assert(s.C % VEC == 0 && s.C <= GROUPNORM_FLOATS);
    int tiles = ceil_div(s.T, GROUPNORM_TILE);
    auto [dx, out, dw, dbias, dout, mean, rstd, x, w, bias] = groupnorm_backward_tensors<floatX>(p);
    float* partials = p.scratch<float>("partials", (size_t)2 * s.B * tiles * s.C);  // (2, B, tiles, C)
    float* sums = p.scratch<float>("sums", (size_t)2 * s.B * s.C);                  // (2, B, C)

    dim3 tile_grid(tiles, s.B);
    launch(groupnorm_backward_partials_kernel4, tile_grid, GROUPNORM_THREADS, 0, partials, dout, mean, rstd, x, w, bias,
           s.T, s.C, s.G);
    launch(groupnorm_sums_kernel4, s.B, 512, 0, sums, partials, s.B, tiles, s.C);
    launch(groupnorm_backward_kernel4, tile_grid, GROUPNORM_THREADS, 0, dx, out, sums, dout, mean, rstd, x, w, bias,
           s.B, s.T, s.C, s.G);
    launch(groupnorm_weights_kernel4, ceil_div(s.C, 32), 32, 0, dw, dbias, sums, s.B, s.C);
}

// ---- 5, 6: the program's ----------------------------------------------------------------------------------

#ifdef PROGRAM
// 5: one launch makes the sums over tiles. In the next, every block adds up those that it needs, and writes its part of
// the result. So there are two launches, where version 4 has three, and four backward. Backward, the first of them also
// turns dout into dy.
static void groupnorm_forward5(Problem& p) {
    Norm norm = groupnorm_for_forward<floatX>(p);
    Tensor& x = norm.x.first;
    x.moments = p.scratch_sums<Moments>("moments", x);
    channel_moments(x);
    groupnorm_forward(p.tensor_out<floatX>("out"), norm);
}

static void groupnorm_backward5(Problem& p) {
    Norm norm = groupnorm_for_backward<floatX>(p);
    norm.sums = p.scratch_sums<NormSums>("sums alone", norm.x.first);
    Tensor dy = p.tensor_scratch("dy alone", norm.x.first);
    groupnorm_backward_sums(dy, p.tensor_in<floatX>("dout"), norm);
    groupnorm_backward(p.tensor_out<floatX>("dx"), p.tensor_out<floatX>("out"), dy, norm);
}

// 6: the convolution before the norm has every value of x in registers, and its epilogue leaves the sums behind. So
// forward is one read and one write. Backward, the epilogue of the next convolution's input gradient has computed dy
// and its sums. What this costs the epilogues is part of resblock's time.
//
// Backward has x in registers when it writes out once more, so that this costs one write, where a pass by itself would
// also read x. PyTorch has kept out since forward, and does not write it.
static void groupnorm_forward6(Problem& p) {
    Norm norm = groupnorm_for_forward<floatX>(p);
    norm.x.first.moments = (Moments*)p.in<float>("moments of x");
    groupnorm_forward(p.tensor_out<floatX>("out"), norm);
}

static void groupnorm_backward6(Problem& p) {
    Norm norm = groupnorm_for_backward<floatX>(p);
    norm.sums = (NormSums*)p.in<float>("sums");
    Tensor dy = p.tensor_in<floatX>("dy");
    groupnorm_backward(p.tensor_out<floatX>("dx"), p.tensor_out<floatX>("out"), dy, norm);
}
#endif
#endif

// The bytes of so many tensors of x's size. The operations are few beside them.
static Work groupnorm_work(const Problem& p, int tensors) {
    double elements = (double)p.find("x").values.size();
    return {0, (double)tensors * sizeof(floatX) * elements};
}

// Reads x, writes out.
static Work groupnorm_forward_work(const Problem& p) { return groupnorm_work(p, 2); }

// Reads x and dout, writes dx and out.
static Work groupnorm_backward_work(const Problem& p) { return groupnorm_work(p, 4); }

static const Ladder groupnorm_ladder = {
    "groupnorm",
    {
        {"forward", {"out", "mean|statistics/2", "rstd|half affine/2"}, groupnorm_forward_work},
        {"backward", {"dx", "out", "dw", "dbias"}, groupnorm_backward_work},
    },
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
        // Version 1 may have larger errors, because one float sums up 16384 numbers.
        {1, "forward", NCHW, FP32, "a thread a group", groupnorm_forward1, 1e-4},
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
