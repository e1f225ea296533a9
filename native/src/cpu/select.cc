#include <cpuid.h>

#include <string>

#include "cpu/kernels.h"
#include "tinyloop/errors.h"

namespace tinyloop::cpu {

namespace portable {
extern const Kernels kHalfKernels, kFloatKernels;
}
namespace avx2 {
extern const Kernels kHalfKernels, kFloatKernels;
}
namespace avx512 {
extern const Kernels kHalfKernels, kFloatKernels;
}

namespace {

// Half-precision conversion: CPUID leaf 1, ECX bit 29. Not every compiler knows its name.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1) != 0;
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

}  // namespace

int64_t attention_scratch_floats(int64_t head_dim) {
  const int64_t width = (head_dim + kPanel - 1) / kPanel * kPanel;
  return kQueryBlock * (kMaxHeadDim + kKeyTile + width + 2) + 2 * kKeyTile * width;
}

const Kernels& select_kernels(const char* name, bool fp32) {
  __builtin_cpu_init();
  std::string isa = name;
  if (isa.empty()) isa = has_avx512() ? "avx512" : has_avx2() ? "avx2" : "portable";
  const auto pick = [&](bool present, const Kernels& half, const Kernels& full) -> const Kernels& {
    if (!present) {
      throw LoadError("cannot use the instruction set '" + isa + "': this processor has no " + isa +
                      "; leave TINYLOOP_CPU_ISA unset to take the best one here");
    }
    return fp32 ? full : half;
  };
  if (isa == "avx512") return pick(has_avx512(), avx512::kHalfKernels, avx512::kFloatKernels);
  if (isa == "avx2") return pick(has_avx2(), avx2::kHalfKernels, avx2::kFloatKernels);
  if (isa == "portable") return pick(true, portable::kHalfKernels, portable::kFloatKernels);
  throw LoadError("cannot use the instruction set '" + isa +
                  "': it is none of avx512, avx2, portable");
}

}  // namespace tinyloop::cpu
