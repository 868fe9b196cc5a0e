// Timestep embedding: out (B, C) = cat(cos(t f), sin(t f)), f_i = 10000^(-i / half), half = C / 2. There is
// no gradient: nothing is learned here, and nobody needs that of t.
//
//   make timestep_embedding && ./timestep_embedding        every version: against PyTorch, then timed
//   ./timestep_embedding 1                                 version 1 alone
//
//   0  the program's CPU function: the specification
//   1  fp32, a thread an output, the angle a product of floats
//   2  fp32, a thread an output, the angle in double
//   3  the program's: a thread an angle, in double, sine and cosine together
//
// What the steps change: only the error, and that on purpose. t reaches 999, so an angle's last bit is 6e-5
// of a radian in float, which version 1 carries into cosine and sine; in double nothing of it is left.
// Sharing the angle's exponential between sine and cosine pays for the double. All versions take the time of
// a launch: a step has one of them.
#include "common.h"

enum { TIMESTEP_PERIOD = 10000 };

// ---- 0 ----------------------------------------------------------------------------------------------------

template <typename T>
static TimestepEmbedding<T> timestep_embedding(Problem& p) {
    return {.out = p.tensor_out<T>("out"), .timesteps = p.in<int>("t"), .max_period = TIMESTEP_PERIOD};
}
static void timestep_embedding_forward0(Problem& p) { cpu::run(timestep_embedding<float>(p)); }

#ifdef __CUDACC__
// ---- 1, 2: a thread an output -----------------------------------------------------------------------------

template <typename Angle>
__global__ void timestep_embedding_forward_kernel1(float* out, const int* t, int B, int C) {
    int n = blockIdx.x * blockDim.x + threadIdx.x, half = C / 2, b = n / C, i = n % half;
    if (b >= B) return;
    Angle angle = (Angle)t[b] * exp((Angle)-log((Angle)TIMESTEP_PERIOD) * i / half);
    out[n] = (float)(n % C < half ? cos(angle) : sin(angle));
}
template <typename Angle>
static void timestep_embedding_forward1(Problem& p) {
    int B = p.dim("B"), C = p.dim("C");
    launch(timestep_embedding_forward_kernel1<Angle>, ceil_div(B * C, 64), 64, 0, p.out<float>("out"),
           p.in<int>("t"), B, C);
}

// ---- 3: the program's -------------------------------------------------------------------------------------

static void timestep_embedding_forward3(Problem& p) { run(timestep_embedding<floatX>(p)); }
#endif

static const Ladder timestep_embedding_ladder = {
    "timestep_embedding",
    {{"forward",
      {"out"},
      [](const Problem& p) {
          return Work{0, p.dim("B") * (sizeof(int) + sizeof(floatX) * (double)p.dim("C"))};
      }}},
    {
        {0, "forward", NHWC, CPU_FP32, "the specification", timestep_embedding_forward0},
#ifdef __CUDACC__
        {1, "forward", NHWC, FP32, "angles in float", timestep_embedding_forward1<float>,
         3e-4},  // of 999 radians
        {2, "forward", NHWC, FP32, "angles in double", timestep_embedding_forward1<double>},
        {3, "forward", NHWC, FLOATX, "sine and cosine of an angle together: the program's",
         timestep_embedding_forward3},
#endif
    }};
LADDER_MAIN(timestep_embedding_ladder)
