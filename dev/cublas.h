// A matrix product by cuBLAS, for the ladders' versions that lean on it. The program itself never does.
#pragma once
#include <cublas_v2.h>

static void cublas_check(cublasStatus_t status, const char* expression) {
    if (status != CUBLAS_STATUS_SUCCESS)
        fail("cuBLAS reported '%s' (%s)", cublasGetStatusString(status), expression);
}
#define CUBLAS_CHECK(call) cublas_check((call), #call)

// The handle, on the stream that is timed, with a workspace that exists before a graph is recorded.
static cublasHandle_t cublas_handle() {
    static cublasHandle_t handle = nullptr;
    if (!handle) {
        size_t bytes = (size_t)32 << 20;
        CUBLAS_CHECK(cublasCreate(&handle));
        CUBLAS_CHECK(cublasSetStream(handle, main_stream.handle));
        CUBLAS_CHECK(cublasSetWorkspace(handle, backend_allocate(bytes), bytes));
    }
    return handle;
}

// c (batch, M, N) = a (batch, M, K) b (batch, K, N), rows first, in true fp32. transpose_a: a is (batch, K,
// M); transpose_b: b is (batch, N, K). A stride of 0 takes the same a or b for all of the batch. cuBLAS
// thinks in columns, where each of these is its own transpose: c^T = b^T a^T.
static void cublas_product(float* c, const float* a, const float* b, int M, int N, int K, bool transpose_a,
                           bool transpose_b, int batch, size_t stride_a, size_t stride_b) {
    const float one = 1, zero = 0;
    CUBLAS_CHECK(cublasSgemmStridedBatched(cublas_handle(), transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                                           transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, N, M, K, &one, b,
                                           transpose_b ? K : N, (long long)stride_b, a, transpose_a ? M : K,
                                           (long long)stride_a, &zero, c, N, (long long)M * N, batch));
}
static void cublas_product(float* c, const float* a, const float* b, int M, int N, int K, bool transpose_a,
                           bool transpose_b) {
    const float one = 1, zero = 0;
    CUBLAS_CHECK(cublasSgemm(cublas_handle(), transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                             transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, N, M, K, &one, b, transpose_b ? K : N,
                             a, transpose_a ? M : K, &zero, c, N));
}

// to (B, S, R) = from (B, R, S) transposed, + bias (S), where there is one.
__global__ void transpose_kernel(float* to, const float* from, const float* bias, int R, int S) {
    __shared__ float tile[32][33];
    int r0 = blockIdx.x * 32, s0 = blockIdx.y * 32, x = threadIdx.x % 32, y = threadIdx.x / 32;
    size_t image = (size_t)blockIdx.z * R * S;
    for (int i = y; i < 32; i += 8)
        if (r0 + i < R && s0 + x < S) tile[i][x] = from[image + (size_t)(r0 + i) * S + s0 + x];
    __syncthreads();
    for (int i = y; i < 32; i += 8)
        if (r0 + x < R && s0 + i < S)
            to[image + (size_t)(s0 + i) * R + r0 + x] = tile[x][i] + (bias ? bias[s0 + i] : 0.0f);
}
static void transpose(float* to, const float* from, const float* bias, int B, int R, int S) {
    launch(transpose_kernel, dim3(ceil_div(R, 32), ceil_div(S, 32), B), 256, 0, to, from, bias, R, S);
}
