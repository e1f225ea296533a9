#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "format.h"
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

// Runs one phase of a load and puts its name before the message of a failure.
template <typename Phase>
void in_phase(const char* name, const std::string& path, Phase phase) {
  const auto where = [&] {
    return "load of '" + display(path) + "' failed in phase '" + name + "': ";
  };
  try {
    phase();
  } catch (const OutOfMemoryError& error) {
    throw OutOfMemoryError(where() + error.what());
  } catch (const LoadError& error) {
    throw LoadError(where() + error.what());
  } catch (const std::bad_alloc&) {
    throw OutOfMemoryError(where() + "the system has no memory for the load's own tables");
  }
}

}  // namespace

std::shared_ptr<Engine> Engine::load(const std::string& path, const LoadOptions& options) {
  auto engine = std::make_shared<Engine>();
  std::unique_ptr<MappedFile> mapped;
  ModelFile file;
  in_phase("header", path, [&] {
    engine->options = resolve_options(options);
    mapped = std::make_unique<MappedFile>(path);
    file = parse_file(mapped->data(), mapped->bytes());
    check_rows(engine->options, file.descriptor);
    apply_state_init(engine->options, file.descriptor);
    engine->descriptor = file.descriptor;
    engine->schedule = make_schedule(engine->descriptor);
    engine->metadata = file.metadata;
    engine->owner_process_ = ::getpid();
    engine->account = std::make_shared<Account>(engine->options.budget_bytes);
    engine->backend = make_cpu_backend(engine->options.cpu_isa, engine->options.threads,
                                       engine->options.numeric_mode == NumericMode::kFp32);
    engine->cache = cache_shape(engine->descriptor, cache_mode(engine->options.cache_mode),
                                engine->backend->activation_bytes());
  });
  in_phase("weights", path, [&] {
    load_weights(file, stores_hidden(engine->cache.mode), *engine->backend, *engine->account,
                 engine->weights);
  });
  in_phase("buffers", path, [&] {
    engine->buffers = allocate_buffers(engine->buffer_shape(), *engine->account);
    engine->backend->allocate_workspace(workspace_shape(engine->descriptor), *engine->account);
  });
  return engine;
}

BufferShape Engine::buffer_shape() const {
  return tinyloop::buffer_shape(descriptor, options, cache.mode, backend->activation_bytes());
}

std::string Engine::numerics_id() const {
  const char* mode = options.numeric_mode == NumericMode::kFp32 ? "fp32" : "fp16";
  std::string state;
  if (descriptor.state_init == StateInit::kZero) state = "/state-zero";
  if (descriptor.state_init == StateInit::kNormal) {
    state = "/state-normal-" + std::to_string(options.state_seed);
  }
  return backend->identity() + "/" + mode + "/kv-" + options.cache_mode + "/fp16cache-" +
         options.fp16_cache + state;
}

void Engine::require_usable() const {
  if (closed_) throw ClosedHandleError("cannot use the model: it was closed");
  if (::getpid() != owner_process_) {
    throw ConcurrentUseError("cannot use the model in process " + std::to_string(::getpid()) +
                             ": it belongs to process " + std::to_string(owner_process_) +
                             ", load it again after a fork");
  }
}

ForwardGuard::ForwardGuard(Engine& engine) : engine_(engine) {
  engine.require_usable();
  if (engine.in_use.test_and_set(std::memory_order_acquire)) {
    throw ConcurrentUseError(
        "cannot start a forward: another one runs on this model; use one thread, a lock, or a "
        "model "
        "for each worker");
  }
}

}  // namespace tinyloop
