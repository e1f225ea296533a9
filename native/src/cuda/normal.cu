// The seeded normal of cpu/normal.cc, operation by operation: the intrinsics keep the compiler from
// fusing a product and a sum, and so the bits the CPU's.
#include "counter_random.h"
#include "cuda/elements.cuh"
#include "cuda/rows.h"

namespace tinyloop::cuda {

namespace {

constexpr int kThreads = 256;
constexpr double kCut = 0.0013498980316300945267;  // Phi(-3)

template <typename... Terms>
__device__ __forceinline__ double polynomial(double x, double first, Terms... terms) {
  double sum = first;
  ((sum = __dadd_rn(__dmul_rn(sum, x), terms)), ...);
  return sum;
}

// ln x for x in (0, 1): x = m 2^e with m in [sqrt(1/2), sqrt(2)).
__device__ __forceinline__ double natural_log(double x) {
  int exponent = 0;
  double m = frexp(x, &exponent);
  if (m < 0.70710678118654752) {
    m = __dmul_rn(m, 2.0);
    exponent -= 1;
  }
  const double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
  const double artanh =
      polynomial(__dmul_rn(s, s), 1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0);
  return __dadd_rn(__dmul_rn(exponent, 0.69314718055994531), __dmul_rn(__dmul_rn(2.0, s), artanh));
}

// Phi^-1(p), by Wichura's rational approximations.
__device__ __forceinline__ double inverse_normal(double p) {
  const double q = __dsub_rn(p, 0.5);
  if (fabs(q) <= 0.425) {
    const double r = __dsub_rn(0.180625, __dmul_rn(q, q));
    const double above =
        polynomial(r, 2509.0809287301226727, 33430.575583588128105, 67265.770927008700853,
                   45921.953931549871457, 13731.693765509461125, 1971.5909503065514427,
                   133.14166789178437745, 3.3871328727963666080);
    const double below =
        polynomial(r, 5226.4952788528545610, 28729.085735721942674, 39307.895800092710610,
                   21213.794301586595867, 5394.1960214247511077, 687.18700749205790830,
                   42.313330701600911252, 1.0);
    return __ddiv_rn(__dmul_rn(q, above), below);
  }
  const double tail = q < 0.0 ? p : __dsub_rn(1.0, p);
  const double r = __dsub_rn(__dsqrt_rn(-natural_log(tail)), 1.6);
  const double above =
      polynomial(r, 7.7454501427834140764e-4, 2.27238449892691845833e-2, 2.4178072517745061177e-1,
                 1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055,
                 4.6303378461565452959, 1.42343711074968357734);
  const double below =
      polynomial(r, 1.05075007164441684324e-9, 5.475938084995344946e-4, 1.51986665636164571966e-2,
                 1.4810397642748007459e-1, 6.8976733498510000455e-1, 1.6763848301838038494,
                 2.05319162663775882187, 1.0);
  const double x = __ddiv_rn(above, below);
  return q < 0.0 ? -x : x;
}

// bits of (seed, position, channel) -> u in (0, 1) -> p in (Phi(-3), Phi(3)) -> Phi^-1(p).
__global__ void __launch_bounds__(kThreads)
    init_normal_kernel(float* state, const int32_t* positions, int64_t width, float std,
                       uint64_t seed) {
  wait_for_previous();
  let_next_start();
  const int64_t r = blockIdx.x;
  const int64_t c = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (c >= width) return;
  const auto position = static_cast<uint64_t>(static_cast<int64_t>(positions[r]));
  const uint64_t bits = counter_bits(counter_row(seed, position), static_cast<uint64_t>(c));
  const double u = __dmul_rn(__dadd_rn(static_cast<double>(bits >> 40), 0.5), 0x1p-24);
  const double x = inverse_normal(__dadd_rn(kCut, __dmul_rn(u, 1.0 - 2.0 * kCut)));
  state[r * width + c] = __fmul_rn(__double2float_rn(x), std);
}

}  // namespace

void init_normal(cudaStream_t stream, float* state, const int32_t* positions, int64_t rows,
                 int64_t width, float std, uint64_t seed) {
  if (rows == 0) return;
  const Grid grid{dim3(static_cast<unsigned>(rows), blocks_for(width, kThreads)), kThreads, 0};
  launch(stream, grid, init_normal_kernel, state, positions, width, std, seed);
}

}  // namespace tinyloop::cuda
