#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>

#include "cpu/kernels.h"
#include "tinyloop/errors.h"

namespace tinyloop::cpu {

namespace portable {
extern const Kernels kHalfKernels, kFloatKernels, kSplitKernels;
}
namespace avx2 {
extern const Kernels kHalfKernels, kFloatKernels, kSplitKernels;
}
namespace avx512 {
extern const Kernels kHalfKernels, kFloatKernels, kSplitKernels;
}
namespace amx {
extern const Kernels kSplitKernels;
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

// The system saves the tile unit's registers: XCR0, bits 17 and 18.
bool saves_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kOsxsave = 1u << 27;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsxsave) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileConfigAndData = 3u << 17;
  return (low & kTileConfigAndData) == kTileConfigAndData;
}
// Linux gives a process the registers when it asks; its threads then have them too.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
// CPUID leaf 7, EDX: bit 22 bf16 products, bit 24 tiles.
bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kBoth = 1u << 22 | 1u << 24;
  return has_avx512() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
         (edx & kBoth) == kBoth && saves_tiles() && may_use_tiles();
}

const char* best_isa(NumericMode mode) {
  if (mode == NumericMode::kBf16 && has_amx()) return "amx";
  return has_avx512() ? "avx512" : has_avx2() ? "avx2" : "portable";
}

const Kernels& of_mode(NumericMode mode, const Kernels& half, const Kernels& full,
                       const Kernels& split) {
  switch (mode) {
    case NumericMode::kFp16:
      return half;
    case NumericMode::kFp32:
      return full;
    case NumericMode::kBf16:
      return split;
  }
  return half;
}

}  // namespace

int64_t attention_scratch_floats(int64_t head_dim, int64_t query_vectors) {
  const int64_t width = (head_dim + kPanel - 1) / kPanel * kPanel;
  return query_vectors * (2 * kMaxHeadDim + kKeyTile + width + 2) +
         kKeyTile * (kMaxHeadDim + 2 * width);
}

const Kernels& select_kernels(const char* name, NumericMode mode) {
  __builtin_cpu_init();
  const std::string isa = *name == '\0' ? best_isa(mode) : name;
  const auto require = [&](bool present) {
    if (present) return;
    throw LoadError("cannot use the instruction set '" + isa + "': this processor has no " + isa +
                    "; leave TINYLOOP_CPU_ISA unset to take the best one here");
  };
  if (isa == "amx") {
    if (mode != NumericMode::kBf16) {
      throw LoadError(
          "cannot use the instruction set 'amx': it computes numeric_mode='bf16' alone; ask for "
          "that "
          "mode or another instruction set");
    }
    require(has_amx());
    return amx::kSplitKernels;
  }
  if (isa == "avx512") {
    require(has_avx512());
    return of_mode(mode, avx512::kHalfKernels, avx512::kFloatKernels, avx512::kSplitKernels);
  }
  if (isa == "avx2") {
    require(has_avx2());
    return of_mode(mode, avx2::kHalfKernels, avx2::kFloatKernels, avx2::kSplitKernels);
  }
  if (isa == "portable") {
    return of_mode(mode, portable::kHalfKernels, portable::kFloatKernels, portable::kSplitKernels);
  }
  throw LoadError("cannot use the instruction set '" + isa +
                  "': it is none of amx, avx512, avx2, portable");
}

}  // namespace tinyloop::cpu
