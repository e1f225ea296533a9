#include "load_setup.h"

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "threads.h"
#include "weights.h"

namespace tinyloop {

namespace {

// The explicit option, else the environment switch, else the default.
std::string resolve(const std::string& option, const char* variable, const char* fallback) {
  if (!option.empty()) return option;
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' ? value : fallback;
}

void expect(const std::string& what, const std::string& value,
            std::initializer_list<const char*> known, const std::string& hint) {
  if (std::find(known.begin(), known.end(), value) != known.end()) return;
  std::string names;
  for (const char* name : known) names += (names.empty() ? "" : ", ") + std::string(name);
  throw LoadError("cannot load with " + what + "='" + value + "': this build knows " + names +
                  hint);
}

// The number of "cuda" (0) or "cuda:N".
std::optional<int> cuda_device(const std::string& device) {
  if (device == "cuda") return 0;
  const std::string prefix = "cuda:";
  if (device.rfind(prefix, 0) != 0) return std::nullopt;
  const std::string digits = device.substr(prefix.size());
  const bool number = !digits.empty() && digits.size() <= 3 &&
                      digits.find_first_not_of("0123456789") == std::string::npos;
  return number ? std::optional(std::stoi(digits)) : std::nullopt;
}

LoadOptions resolve_options(LoadOptions o) {
  o.device = resolve(o.device, "TINYLOOP_DEVICE", "cpu");
  o.cache_mode = resolve(o.cache_mode, "TINYLOOP_KV", "fp16");
  o.fp16_cache = resolve(o.fp16_cache, "TINYLOOP_FP16_CACHE", "auto");
  o.cpu_isa = resolve(o.cpu_isa, "TINYLOOP_CPU_ISA", "");
  o.deterministic = resolve(o.deterministic, "TINYLOOP_DETERMINISTIC", "1");
  cache_mode(o.cache_mode);
  if (cuda_device(o.device).has_value()) {
    expect("fp16_cache", o.fp16_cache, {"off", "loop", "all", "auto"}, "");
    expect("deterministic", o.deterministic, {"1", "0"}, "");
    if (o.deterministic == "0" && o.numeric_mode == NumericMode::kFp32) {
      throw LoadError("cannot load with deterministic='0': the mode fp32 has no faster sums");
    }
  } else {
    expect("device", o.device, {"cpu"}, ", cuda, cuda:N");
    expect("fp16_cache", o.fp16_cache, {"off", "auto"},
           ": the CPU backend unpacks weights in registers and has no FP16 cache");
    expect("deterministic", o.deterministic, {"1"}, ": the CPU's results always are, at no cost");
    o.fp16_cache = "off";  // what auto means for this device, whatever the header and the budget
  }
  if (o.threads < 0 || o.threads > kMaxThreads) {
    throw LoadError("cannot load with threads=" + std::to_string(o.threads) + ": it must be 0.." +
                    std::to_string(kMaxThreads) + ", 0 for all processors");
  }
  return o;
}

// The caller may choose how the loops start, where the model leaves that open.
void apply_state_init(const LoadOptions& o, Descriptor& d) {
  if (o.state_init.empty()) return;
  expect("state_init", o.state_init, {"zero", "normal"}, "");
  if (d.state_init == StateInit::kInput) {
    throw LoadError("cannot load with state_init='" + o.state_init +
                    "': this model's loops start from its tokens");
  }
  if (o.state_init == "normal" && !(d.state_std > 0.0)) {
    throw LoadError("cannot load with state_init='normal': the model has no state_std");
  }
  d.state_init = o.state_init == "zero" ? StateInit::kZero : StateInit::kNormal;
}

void check_rows(const LoadOptions& o, const Descriptor& d) {
  const auto refuse = [&](const std::string& name, int value, int64_t low, int64_t high) {
    throw LoadError("cannot load with " + name + "=" + std::to_string(value) + ": it must be " +
                    std::to_string(low) + ".." + std::to_string(high));
  };
  const int64_t limit = std::min<int64_t>(d.max_positions, INT32_MAX);
  if (o.max_seq_len < 1 || o.max_seq_len > limit) {
    throw LoadError("cannot load with max_seq_len=" + std::to_string(o.max_seq_len) +
                    ": the model has positions for 1.." + std::to_string(limit) + " rows");
  }
  if (o.prefill_chunk < 0 || o.prefill_chunk > o.max_seq_len) {
    refuse("prefill_chunk", o.prefill_chunk, 0, o.max_seq_len);
  }
}

}  // namespace

// FP16 copies of the loop block make scoring faster and may take at most half of the budget with
// everything else that a load holds. The header and the budget decide, never the device's state:
// every replica of a pool must decide the same.
std::string LoadSetup::resolve_fp16_cache() const {
  if (options.budget_bytes == 0) return "loop";
  size_t bytes = 0;
  Weights nowhere;
  place_weights(descriptor, false, nowhere, [&](const Placement& p) {
    for (const Destination& to : p.matrix) {
      const auto values = static_cast<size_t>((to.end - to.begin) * p.cols);
      bytes += values + (p.use == WeightUse::kLoop ? 2 * values : 0);  // codes are 1 byte at most
    }
  });
  return bytes <= options.budget_bytes / 2 ? "loop" : "off";
}

LoadSetup::LoadSetup(const std::string& path, const LoadOptions& given)
    : options(resolve_options(given)),
      mapped(path),
      file(parse_file(mapped.data(), mapped.bytes())),
      descriptor(file.descriptor) {
  check_rows(options, descriptor);
  apply_state_init(options, descriptor);
  if (const auto device = cuda_device(options.device)) {
    if (options.numeric_mode == NumericMode::kBf16) {
      throw LoadError("cannot load with numeric_mode='bf16' on device '" + options.device +
                      "': it is a mode of the CPU; use fp16");
    }
    const bool fp32 = options.numeric_mode == NumericMode::kFp32;
    if (options.fp16_cache == "auto") options.fp16_cache = fp32 ? "off" : resolve_fp16_cache();
    backend = make_cuda_backend(
        {*device, fp32, options.fp16_cache, options.packages, options.deterministic == "0"});
  } else {
    backend = make_cpu_backend(options.cpu_isa, options.threads, options.numeric_mode);
  }
  cache = cache_shape(descriptor, cache_mode(options.cache_mode), backend->activation_bytes());
}

}  // namespace tinyloop
