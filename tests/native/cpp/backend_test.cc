// Every operation of the CPU backend against a plain loop in double precision that is written here,
// and its bits across instruction sets, thread counts and row splits. One line a check; the exit
// status is 1 if any failed.
#include <cstdio>

#include "checks.h"
#include "cpu/kernels.h"
#include "tinyloop/errors.h"

namespace tinyloop {

namespace cpu::simulated {
extern const Kernels kSplitKernels;
}

namespace {

struct Engine {
  std::string name;
  std::shared_ptr<Account> account = std::make_shared<Account>(0);
  std::unique_ptr<Backend> backend;
};

constexpr WorkspaceShape kWorkspace{1200, 600, 1100, 600, 8, 8, 64, 512, 512};

bool has_fused_multiply_add() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

// The tile unit's own code, also where the processor has no such unit.
Engine simulated_tiles() {
  Engine engine;
  engine.name = "simulated amx";
  engine.backend = cpu::make_backend(cpu::simulated::kSplitKernels, 2, NumericMode::kBf16);
  engine.backend->allocate_workspace(kWorkspace, *engine.account);
  return engine;
}

std::vector<Engine> engines(NumericMode mode) {
  std::vector<Engine> all;
  for (const char* isa : {"portable", "avx2", "avx512", "amx"}) {
    for (const int threads : {1, 3}) {
      try {
        all.emplace_back();
        all.back().name = std::string(isa) + " x" + std::to_string(threads);
        all.back().backend = make_cpu_backend(isa, threads, mode);
        all.back().backend->allocate_workspace(kWorkspace, *all.back().account);
      } catch (const LoadError&) {
        all.pop_back();  // this machine lacks it
      }
    }
  }
  if (mode == NumericMode::kBf16 && has_fused_multiply_add()) all.push_back(simulated_tiles());
  return all;
}

bool report(bool good, const std::string& text) {
  std::printf("%s %s\n", good ? "ok    " : "FAILED", text.c_str());
  return good;
}

bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

const char* name_of(NumericMode mode) {
  return mode == NumericMode::kFp16 ? "fp16 " : mode == NumericMode::kBf16 ? "bf16 " : "fp32 ";
}

double tolerance(const Case& c, NumericMode mode) {
  switch (mode) {
    case NumericMode::kFp32:
      return c.float_tolerance;
    case NumericMode::kFp16:
      return c.half_tolerance;
    case NumericMode::kBf16:
      return c.half_tolerance == kFloatTolerance ? kSplitTolerance : c.half_tolerance;
  }
  return kExact;
}

bool check(const Case& c, const std::vector<Engine>& all, NumericMode mode) {
  const Values first = c.run(*all.front().backend, kWhole);
  const double error = error_of(first, c.want(mode == NumericMode::kFp32));
  const double allowed = tolerance(c, mode);
  std::string text = name_of(mode) + c.name;
  char numbers[64];
  std::snprintf(numbers, sizeof(numbers), ": error %.1e of %.1e", error, allowed);
  text += numbers;
  bool good = error <= allowed;
  for (const Engine& engine : all) {
    for (const int64_t split : {kWhole, int64_t{3}}) {
      if (same_bits(first, c.run(*engine.backend, split))) continue;
      good = false;
      text += ", other bits in " + engine.name + (split == kWhole ? "" : " split");
    }
  }
  return report(good, text);
}

// What upload() and allocate_workspace() take is what the sizes say.
bool check_sizes(NumericMode mode) {
  const auto rounded_sum = [](const std::vector<size_t>& sizes) {
    size_t sum = 0;
    for (const size_t size : sizes) sum += (size + 63) / 64 * 64;
    return sum;
  };
  bool good = true;
  const auto backend = make_cpu_backend("", 2, mode);
  for (const TensorKind kind :
       {TensorKind::kF32, TensorKind::kF16, TensorKind::kQ4, TensorKind::kQ8}) {
    const auto account = std::make_shared<Account>(0);
    const auto tensor = make_tensor(kind, 50, 100);
    const auto weight = backend->upload(tensor->entry, 3, 40, WeightUse::kOnce, *account);
    good &= account->live_bytes() == rounded_sum(backend->upload_bytes(
                                         kind, 37, 100, tensor->entry.group, WeightUse::kOnce));
  }
  const auto account = std::make_shared<Account>(0);
  backend->allocate_workspace(kWorkspace, *account);
  good &= account->live_bytes() == rounded_sum(backend->workspace_bytes(kWorkspace));
  return report(good, std::string(name_of(mode)) + "sizes are those allocated");
}

bool check_all() {
  bool good = true;
  for (const NumericMode mode : {NumericMode::kFp16, NumericMode::kFp32, NumericMode::kBf16}) {
    const std::vector<Engine> all = engines(mode);
    good &= check_sizes(mode);
    for (const auto& cases :
         {product_cases(), row_cases(), cache_cases(), attention_cases(), scoring_cases()}) {
      for (const Case& c : cases) good &= check(c, all, mode);
    }
  }
  return good;
}

}  // namespace
}  // namespace tinyloop

int main() { return tinyloop::check_all() ? 0 : 1; }
