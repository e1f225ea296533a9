// Every operation of the CPU backend against a plain loop in double precision that is written here,
// and its bits across instruction sets, thread counts and row splits. One line a check; the exit
// status is 1 if any failed.
#include <cstdio>

#include "checks.h"
#include "tinyloop/errors.h"

namespace tinyloop {
namespace {

struct Engine {
  std::string name;
  std::shared_ptr<Account> account = std::make_shared<Account>(0);
  std::unique_ptr<Backend> backend;
};

constexpr WorkspaceShape kWorkspace{1200, 600, 1100, 600, 8, 8, 64, 512, 512};

std::vector<Engine> engines(bool fp32) {
  std::vector<Engine> all;
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    for (const int threads : {1, 3}) {
      try {
        all.emplace_back();
        all.back().name = std::string(isa) + " x" + std::to_string(threads);
        all.back().backend = make_cpu_backend(isa, threads, fp32);
        all.back().backend->allocate_workspace(kWorkspace, *all.back().account);
      } catch (const LoadError&) {
        all.pop_back();  // this machine lacks it
      }
    }
  }
  return all;
}

bool report(bool good, const std::string& text) {
  std::printf("%s %s\n", good ? "ok    " : "FAILED", text.c_str());
  return good;
}

bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

bool check(const Case& c, const std::vector<Engine>& all, bool fp32) {
  const Values first = c.run(*all.front().backend, kWhole);
  const double error = error_of(first, c.want(fp32));
  const double allowed = fp32 ? c.float_tolerance : c.half_tolerance;
  std::string text = std::string(fp32 ? "fp32 " : "fp16 ") + c.name;
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
bool check_sizes(bool fp32) {
  const auto rounded_sum = [](const std::vector<size_t>& sizes) {
    size_t sum = 0;
    for (const size_t size : sizes) sum += (size + 63) / 64 * 64;
    return sum;
  };
  bool good = true;
  const auto backend = make_cpu_backend("", 2, fp32);
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
  return report(good, std::string(fp32 ? "fp32" : "fp16") + " sizes are those allocated");
}

bool check_all() {
  bool good = true;
  for (const bool fp32 : {false, true}) {
    const std::vector<Engine> all = engines(fp32);
    good &= check_sizes(fp32);
    for (const auto& cases :
         {product_cases(), row_cases(), cache_cases(), attention_cases(), scoring_cases()}) {
      for (const Case& c : cases) good &= check(c, all, fp32);
    }
  }
  return good;
}

}  // namespace
}  // namespace tinyloop

int main() { return tinyloop::check_all() ? 0 : 1; }
