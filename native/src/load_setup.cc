#include "load_setup.h"

#include <algorithm>
#include <cstdlib>

#include "threads.h"

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

LoadOptions resolve_options(LoadOptions o) {
  o.device = resolve(o.device, "TINYLOOP_DEVICE", "cpu");
  o.cache_mode = resolve(o.cache_mode, "TINYLOOP_KV", "fp16");
  o.fp16_cache = resolve(o.fp16_cache, "TINYLOOP_FP16_CACHE", "auto");
  o.cpu_isa = resolve(o.cpu_isa, "TINYLOOP_CPU_ISA", "");
  const std::string deterministic = resolve("", "TINYLOOP_DETERMINISTIC", "1");
  expect("device", o.device, {"cpu"}, "");
  cache_mode(o.cache_mode);
  expect("fp16_cache", o.fp16_cache, {"off", "auto"},
         ": the CPU backend unpacks weights in registers and has no FP16 cache");
  expect("TINYLOOP_DETERMINISTIC", deterministic, {"1"},
         ": the CPU backend is always deterministic");
  o.fp16_cache = "off";  // what auto means for this device, whatever the header and the budget
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

LoadSetup::LoadSetup(const std::string& path, const LoadOptions& given)
    : options(resolve_options(given)),
      mapped(path),
      file(parse_file(mapped.data(), mapped.bytes())),
      descriptor(file.descriptor) {
  check_rows(options, descriptor);
  apply_state_init(options, descriptor);
  backend = make_cpu_backend(options.cpu_isa, options.threads, options.numeric_mode);
  cache = cache_shape(descriptor, cache_mode(options.cache_mode), backend->activation_bytes());
}

}  // namespace tinyloop
