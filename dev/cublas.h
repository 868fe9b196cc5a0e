// Matrix products by cuBLAS, for the versions of the ladders that use it. The program itself never does.
#pragma once
#include <cublas_v2.h>

static void cublas_check(cublasStatus_t status, const char* expression) {
    if (status != CUBLAS_STATUS_SUCCESS)
        fail("cuBLAS reported '%s' (%s)", cublasGetStatusString(status), expression);
}
#define CUBLAS_CHECK(call) cublas_check((call), #call)

// The one handle, on the stream that is timed. It gets its workspace here, because nothing may be allocated while a
// CUDA graph is recorded.
static cublasHandle_t cublas_handle() {
    static cublasHandle_t handle = nullptr;
    if (handle) return handle;

    size_t bytes = (size_t)32 << 20;
    CUBLAS_CHECK(cublasCreate(&handle));
    CUBLAS_CHECK(cublasSetStream(handle, main_stream.handle));
    CUBLAS_CHECK(cublasSetWorkspace(handle, backend_allocate(bytes), bytes));
    return handle;
}

// c (batch, M, N) = a (batch, M, K) b (batch, K, N), row-major, in true fp32. With transpose_a, a is (batch, K, M), and
// with transpose_b, b is (batch, N, K). With a stride of 0 the whole batch uses the same a or b.
//
// cuBLAS takes matrices to be column-major. To it, each of ours is its own transpose. So it is asked for
// c^T (N, M) = b^T (N, K) a^T (K, M), and b comes first.
static void cublas_product(float* c, const float* a, const float* b, int M, int N, int K, bool transpose_a,
                           bool transpose_b, int batch, size_t stride_a, size_t stride_b) {
    const float one = 1;
    const float zero = 0;
    const cublasOperation_t op_a = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int lda = transpose_a ? M : K;  // the leading dimension: the length of a row in memory
    const int ldb = transpose_b ? K : N;
    const long long stride_c = (long long)M * N;
    CUBLAS_CHECK(cublasSgemmStridedBatched(cublas_handle(), op_b, op_a, N, M, K, &one, b, ldb, (long long)stride_b,
                                           a, lda, (long long)stride_a, &zero, c, N, stride_c, batch));
}

// The same for a single product.
static void cublas_product(float* c, const float* a, const float* b, int M, int N, int K, bool transpose_a,
                           bool transpose_b) {
    const float one = 1;
    const float zero = 0;
    const cublasOperation_t op_a = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int lda = transpose_a ? M : K;
    const int ldb = transpose_b ? K : N;
    CUBLAS_CHECK(cublasSgemm(cublas_handle(), op_b, op_a, N, M, K, &one, b, ldb, a, lda, &zero, c, N));
}

// to (B, S, R) = from (B, R, S).transpose(1, 2) + bias (S)[:, None], or without the bias where it is null. A block
// moves a tile of 32 x 32 through shared memory, so that reads and writes both go along rows.
__global__ void transpose_kernel(float* to, const float* from, const float* bias, int R, int S) {
    __shared__ float tile[32][33];  // the 33rd column keeps the elements of a column in different banks
    int r0 = blockIdx.x * 32;
    int s0 = blockIdx.y * 32;
    int x = threadIdx.x % 32;
    int y = threadIdx.x / 32;
    size_t matrix = (size_t)blockIdx.z * R * S;

    for (int i = y; i < 32; i += 8)
        if (r0 + i < R && s0 + x < S) tile[i][x] = from[matrix + (size_t)(r0 + i) * S + s0 + x];
    __syncthreads();

    for (int i = y; i < 32; i += 8)
        if (r0 + x < R && s0 + i < S)
            to[matrix + (size_t)(s0 + i) * R + r0 + x] = tile[x][i] + (bias ? bias[s0 + i] : 0.0f);
}

static void transpose(float* to, const float* from, const float* bias, int B, int R, int S) {
    dim3 tiles(ceil_div(R, 32), ceil_div(S, 32), B);
    launch(transpose_kernel, tiles, 256, 0, to, from, bias, R, S);
}
