// Do the tensor cores' instructions sum alike? One chain over the inputs, in steps of 16, by
// mma.sync m16n8k16, by pairs of m16n8k8, by wgmma of two widths, and by cuBLASLt: are the bits the
// same; and how long is a step of each chain. Its own main; prints a line per question; the exit
// status says only whether it could run and whether its sums are right at all.
//
// From the repository's root (needs an sm_90a device):
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -I native/src -I native/include
//     tests/native/cpp/cuda/chain_probe.cu native/src/cuda/cublas_lt.cc -ldl -o chain_probe
//   ./chain_probe [FOLDER with the nvidia wheels]
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/check.h"
#include "cuda/cublas_lt.h"
#include "cuda/mma.cuh"

using tinyloop::cuda::check;

namespace {

constexpr int kOutputs = 64;  // of a wgmma
constexpr int kRows = 128;

// Fragments straight from memory: no kernel of the engine is in this program.
__device__ uint32_t pair_at(const __half* matrix, int row, int k, int inputs) {
  return *reinterpret_cast<const uint32_t*>(matrix + static_cast<int64_t>(row) * inputs + k);
}

__device__ void store_fragment(float* out, const float* c, int output, int row) {
  for (int i = 0; i < 4; ++i) out[(row + i % 2) * kOutputs + output + i / 2 * 8] = c[i];
}

// One warp a block: outputs 16 blockIdx.x .., rows 8 blockIdx.y ...
__global__ void mma16_kernel(const __half* w, const __half* x, int inputs, float* out) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4 * 2;
  const int output = static_cast<int>(blockIdx.x) * 16 + g;
  const int row = static_cast<int>(blockIdx.y) * 8;
  float c[4] = {};
  for (int k = 0; k < inputs; k += 16) {
    const uint32_t a[4] = {pair_at(w, output, k + t, inputs), pair_at(w, output + 8, k + t, inputs),
                           pair_at(w, output, k + t + 8, inputs),
                           pair_at(w, output + 8, k + t + 8, inputs)};
    tinyloop::cuda::multiply(c, a, pair_at(x, row + g, k + t, inputs),
                             pair_at(x, row + g, k + t + 8, inputs));
  }
  store_fragment(out, c, output, row + t);
}

__device__ void multiply8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

__global__ void mma8_kernel(const __half* w, const __half* x, int inputs, float* out) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4 * 2;
  const int output = static_cast<int>(blockIdx.x) * 16 + g;
  const int row = static_cast<int>(blockIdx.y) * 8;
  float c[4] = {};
  for (int k = 0; k < inputs; k += 8) {
    multiply8(c, pair_at(w, output, k + t, inputs), pair_at(w, output + 8, k + t, inputs),
              pair_at(x, row + g, k + t, inputs));
  }
  store_fragment(out, c, output, row + t);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define PROBE_WGMMA 1
#endif

// A shared matrix without swizzle: 8 x 8 halves lie together (128 bytes), `rows / 8` of them follow
// each other along the rows, then the next 8 inputs.
__device__ uint64_t descriptor(const void* p, int rows) {
  const uint64_t address = tinyloop::cuda::shared_address(p);
  const uint64_t along_inputs = static_cast<uint64_t>(rows / 8 * 128), along_rows = 128;
  return (address & 0x3FFFF) >> 4 | (along_inputs >> 4) << 16 | (along_rows >> 4) << 32;
}

__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// d = a * b + (add ? d : 0), 64 outputs, 16 inputs, 8 rows.
__device__ void wgmma_8(float (&d)[4], uint64_t a, uint64_t b, int add) {
#ifdef PROBE_WGMMA
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(add));
#endif
}
// The same with the outputs' fragment in registers.
__device__ void wgmma_8_registers(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
#ifdef PROBE_WGMMA
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, "
      "1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
// 128 rows.
__device__ void wgmma_128(float (&d)[64], uint64_t a, uint64_t b, int add) {
#ifdef PROBE_WGMMA
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "%64, %65, p, 1, 1, 0, 0; }"
      : D16(0), D16(16), D16(32), D16(48)
      : "l"(a), "l"(b), "r"(add));
#undef D16
#undef D4
#endif
}

// Rows [first, first + rows) of a matrix, inputs k .. k + 15, to shared memory as described above.
__device__ void stage(__half* to, const __half* matrix, int first, int rows, int k, int inputs) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * 16; i += static_cast<int>(blockDim.x)) {
    const int row = i / 16, column = i % 16;
    to[(column / 8 * (rows / 8) + row / 8) * 64 + row % 8 * 8 + column % 8] =
        matrix[static_cast<int64_t>(first + row) * inputs + k + column];
  }
}

// One warpgroup; kWidth rows a block.
template <int kWidth>
__global__ void __launch_bounds__(128)
    wgmma_kernel(const __half* w, const __half* x, int inputs, float* out) {
  __shared__ __align__(128) __half a[kOutputs * 16], b[kWidth * 16];
  const int first = static_cast<int>(blockIdx.x) * kWidth;
  float d[kWidth / 2] = {};
  for (int k = 0; k < inputs; k += 16) {
    stage(a, w, 0, kOutputs, k, inputs);
    stage(b, x, first, kWidth, k, inputs);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    wgmma_fence();
    if constexpr (kWidth == 8) {
      wgmma_8(d, descriptor(a, kOutputs), descriptor(b, kWidth), k > 0);
    } else {
      wgmma_128(d, descriptor(a, kOutputs), descriptor(b, kWidth), k > 0);
    }
    wgmma_commit();
    wgmma_wait();
    __syncthreads();
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int output = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  for (int n = 0; n < kWidth / 8; ++n) {
    store_fragment(out, d + n * 4, output, first + n * 8 + lane % 4 * 2);
  }
}

// ---- latencies --------------------------------------------------------------------------------

constexpr int kSteps = 512;

enum class Chain { kMma16, kMma8, kWgmmaShared, kWgmmaRegisters, kMma16Four };

// Cycles of kSteps dependent steps; kMma16Four: four chains side by side.
template <Chain kChain>
__global__ void __launch_bounds__(128)
    latency_kernel(const uint32_t* in, float* out, long long* cycles) {
  __shared__ __align__(128) __half a_shared[kOutputs * 16], b_shared[8 * 16];
  for (int i = static_cast<int>(threadIdx.x); i < kOutputs * 16; i += 128) {
    a_shared[i] = __float2half(0.001f * static_cast<float>(i));
    if (i < 8 * 16) b_shared[i] = __float2half(0.002f * static_cast<float>(i));
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  uint32_t a[4];
  for (int i = 0; i < 4; ++i) a[i] = in[threadIdx.x * 4 + i];
  float c[4][4] = {};
  const uint64_t da = descriptor(a_shared, kOutputs), db = descriptor(b_shared, 8);
  __syncthreads();
  const long long before = clock64();
  if constexpr (kChain == Chain::kWgmmaShared || kChain == Chain::kWgmmaRegisters) {
#pragma unroll 1
    for (int i = 0; i < kSteps / 16; ++i) {
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if constexpr (kChain == Chain::kWgmmaShared) {
          wgmma_8(c[0], da, db, 1);
        } else {
          wgmma_8_registers(c[0], a, db);
        }
      }
      wgmma_commit();
    }
    wgmma_wait();
  } else {
#pragma unroll 16
    for (int i = 0; i < kSteps; ++i) {
      if constexpr (kChain == Chain::kMma8) {
        multiply8(c[0], a[0], a[1], a[2]);
      } else {
        tinyloop::cuda::multiply(c[0], a, a[0], a[1]);
        if constexpr (kChain == Chain::kMma16Four) {
          for (int j = 1; j < 4; ++j) tinyloop::cuda::multiply(c[j], a, a[1], a[j]);
        }
      }
    }
  }
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
  asm volatile("" ::"f"(sum) : "memory");  // the clock is read behind the sums
  const long long after = clock64();
  out[threadIdx.x] = sum;
  if (threadIdx.x == 0) *cycles = after - before;
}

template <Chain kChain>
void print_latency(const char* name, int threads) {
  uint32_t* in;
  float* out;
  long long* cycles;
  check(cudaMalloc(&in, 128 * 16), "allocate");
  check(cudaMemset(in, 0, 128 * 16), "clear");
  check(cudaMalloc(&out, 128 * 4), "allocate");
  check(cudaMalloc(&cycles, 8), "allocate");
  long long taken = 0;
  for (int i = 0; i < 3; ++i) {
    latency_kernel<kChain><<<1, threads>>>(in, out, cycles);
    check(cudaDeviceSynchronize(), "time a chain");
    check(cudaMemcpy(&taken, cycles, 8, cudaMemcpyDeviceToHost), "read the cycles");
  }
  std::printf("cycles per step of %-44s %6.1f\n", name, static_cast<double>(taken) / kSteps);
  cudaFree(in);
  cudaFree(out);
  cudaFree(cycles);
}

// ---- comparisons ------------------------------------------------------------------------------

int64_t ordered(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits < 0 ? -static_cast<int64_t>(bits & 0x7FFFFFFF) : bits;
}

void compare(const char* name, const std::vector<float>& base, const std::vector<float>& other) {
  size_t different = 0;
  int64_t most = 0;
  for (size_t i = 0; i < base.size(); ++i) {
    const int64_t ulps = std::llabs(ordered(base[i]) - ordered(other[i]));
    different += ulps != 0 ? 1 : 0;
    most = std::max<int64_t>(most, ulps);
  }
  std::printf("  %-28s %s: %zu of %zu differ, at most %lld ulp\n", name,
              different == 0 ? "SAME BITS" : "different", different, base.size(),
              static_cast<long long>(most));
}

struct Case {
  const char* name;
  int inputs;
  double spread;  // of the exponents: values are normal * 2^(spread * normal)
};

bool probe(const Case& c, tinyloop::cuda::CublasLt* lt) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto fill = [&](int rows) {
    std::vector<__half> values(static_cast<size_t>(rows) * static_cast<size_t>(c.inputs));
    for (__half& v : values) {
      const float scale = std::exp2(static_cast<float>(c.spread) * normal(random));
      v = __float2half(std::min(60000.0f, std::max(-60000.0f, normal(random) * scale)));
    }
    return values;
  };
  // cuBLASLt is asked about a product of the size it will see; the others take its first rows.
  const int lt_outputs = 2048, lt_rows = 2048;
  const std::vector<__half> w = fill(lt_outputs), x = fill(lt_rows);
  __half *dw, *dx;
  float* out;
  check(cudaMalloc(&dw, w.size() * 2), "allocate");
  check(cudaMalloc(&dx, x.size() * 2), "allocate");
  check(cudaMalloc(&out, static_cast<size_t>(lt_outputs) * lt_rows * 4), "allocate");
  check(cudaMemcpy(dw, w.data(), w.size() * 2, cudaMemcpyHostToDevice), "copy");
  check(cudaMemcpy(dx, x.data(), x.size() * 2, cudaMemcpyHostToDevice), "copy");

  const auto read = [&](int stride) {
    check(cudaDeviceSynchronize(), "run a chain");
    std::vector<float> all(static_cast<size_t>(kRows) * static_cast<size_t>(stride));
    check(cudaMemcpy(all.data(), out, all.size() * 4, cudaMemcpyDeviceToHost), "read the sums");
    std::vector<float> values;
    for (int r = 0; r < kRows; ++r) {
      for (int n = 0; n < kOutputs; ++n) values.push_back(all[static_cast<size_t>(r * stride + n)]);
    }
    return values;
  };
  const auto clear = [&] { check(cudaMemset(out, 0xFF, kRows * kOutputs * 4), "clear"); };

  std::printf("%s, %d inputs\n", c.name, c.inputs);
  clear();
  mma16_kernel<<<dim3(kOutputs / 16, kRows / 8), 32>>>(dw, dx, c.inputs, out);
  const std::vector<float> base = read(kOutputs);
  double error = 0.0, norm = 0.0;
  for (int r = 0; r < kRows; ++r) {
    for (int n = 0; n < kOutputs; ++n) {
      double sum = 0.0;
      for (int k = 0; k < c.inputs; ++k) {
        sum += static_cast<double>(__half2float(w[static_cast<size_t>(n * c.inputs + k)])) *
               static_cast<double>(__half2float(x[static_cast<size_t>(r * c.inputs + k)]));
      }
      const double miss = base[static_cast<size_t>(r * kOutputs + n)] - sum;
      error += miss * miss;
      norm += sum * sum;
    }
  }
  const double relative = std::sqrt(error / norm);
  std::printf("  mma m16n8k16 against FP64: %.2e\n", relative);
  clear();
  mma8_kernel<<<dim3(kOutputs / 16, kRows / 8), 32>>>(dw, dx, c.inputs, out);
  compare("pairs of mma m16n8k8", base, read(kOutputs));
  clear();
  wgmma_kernel<8><<<kRows / 8, 128>>>(dw, dx, c.inputs, out);
  compare("wgmma m64n8k16", base, read(kOutputs));
  clear();
  wgmma_kernel<128><<<kRows / 128, 128>>>(dw, dx, c.inputs, out);
  compare("wgmma m64n128k16", base, read(kOutputs));
  if (lt != nullptr) {
    tinyloop::cuda::LtProduct p;
    p.outputs = lt_outputs;
    p.inputs = p.weight_stride = p.in_stride = c.inputs;
    p.weight = dw;
    p.in = dx;
    p.output = {tinyloop::cuda::OutputKind::kFloat, out, lt_outputs};
    for (const int rows : {2048, 129, 128}) {
      p.rows = rows;
      check(cudaMemset(out, 0xFF, static_cast<size_t>(lt_outputs) * lt_rows * 4), "clear");
      if (!lt->multiply(nullptr, p)) {
        std::printf("  cuBLASLt refuses %d rows\n", rows);
        continue;
      }
      compare(("cuBLASLt, " + std::to_string(rows) + " rows").c_str(), base, read(lt_outputs));
    }
    std::printf("  cuBLASLt's algorithm: %s\n",
                lt->algorithm(lt_outputs, c.inputs, tinyloop::cuda::OutputKind::kFloat).c_str());
  }
  cudaFree(dw);
  cudaFree(dx);
  cudaFree(out);
  return relative < 1e-4;
}

}  // namespace

int main(int argc, char** argv) {
  std::string why_not;
  const auto lt = tinyloop::cuda::CublasLt::open(argc > 1 ? argv[1] : "", why_not);
  if (lt == nullptr) {
    std::printf("%s\n", why_not.c_str());
  } else {
    std::printf("cuBLASLt %zu\n", lt->version());
  }
  bool right = true;
  for (const Case& c : {Case{"normal values", 2048, 0.0}, Case{"normal values", 5632, 0.0},
                        Case{"values of wide range", 2048, 2.0}, Case{"one step", 16, 0.0},
                        Case{"one step of wide range", 16, 2.0}}) {
    right = probe(c, lt.get()) && right;
  }
  print_latency<Chain::kMma16>("mma m16n8k16, one chain, one warp", 32);
  print_latency<Chain::kMma16Four>("mma m16n8k16, four chains, one warp", 32);
  print_latency<Chain::kMma16>("mma m16n8k16, one chain, four warps", 128);
  print_latency<Chain::kMma8>("mma m16n8k8, one chain, one warp", 32);
  print_latency<Chain::kWgmmaShared>("wgmma m64n8k16, both from shared memory", 128);
  print_latency<Chain::kWgmmaRegisters>("wgmma m64n8k16, outputs from registers", 128);
  std::printf("%s\n", right ? "the sums are right" : "THE SUMS ARE WRONG");
  return right ? 0 : 1;
}
