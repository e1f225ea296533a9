#include "engine.h"

#include <unistd.h>

#include <optional>

#include "load_setup.h"

namespace tinyloop {

std::shared_ptr<Engine> Engine::load(const std::string& path, const LoadOptions& options) {
  auto engine = std::make_shared<Engine>();
  std::unique_ptr<LoadSetup> setup;
  in_phase("header", path, [&] {
    setup = std::make_unique<LoadSetup>(path, options);
    engine->options = setup->options;
    engine->descriptor = setup->descriptor;
    engine->schedule = make_schedule(engine->descriptor);
    engine->cache = setup->cache;
    engine->metadata = setup->file.metadata;
    engine->owner_process_ = ::getpid();
    engine->backend = std::move(setup->backend);
  });
  in_phase("device", path, [&] {
    engine->backend->start();
    engine->account =
        std::make_shared<Account>(engine->options.budget_bytes, engine->backend->memory());
    engine->host_account =
        engine->backend->is_host() ? engine->account : std::make_shared<Account>(0);
  });
  // A load's operations are as those of a forward: with the device current in this thread.
  struct Entered {
    explicit Entered(Backend& entered) : backend(entered) { backend.enter(); }
    ~Entered() { backend.leave(); }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;
    Backend& backend;
  };
  std::optional<Entered> entered;
  in_phase("device", path, [&] { entered.emplace(*engine->backend); });
  in_phase("weights", path, [&] {
    load_weights(setup->file, stores_hidden(engine->cache.mode), *engine->backend, *engine->account,
                 engine->weights);
  });
  in_phase("buffers", path, [&] {
    engine->buffers =
        allocate_buffers(engine->buffer_shape(), *engine->account, *engine->host_account);
    engine->backend->allocate_workspace(workspace_shape(engine->descriptor, engine->options),
                                        *engine->account);
  });
  return engine;
}

BufferShape Engine::buffer_shape() const {
  return tinyloop::buffer_shape(descriptor, options, cache.mode, backend->activation_bytes());
}

namespace {

const char* name(NumericMode mode) {
  switch (mode) {
    case NumericMode::kFp16:
      return "fp16";
    case NumericMode::kFp32:
      return "fp32";
    case NumericMode::kBf16:
      return "bf16";
  }
  return "";
}

}  // namespace

std::string Engine::numerics_id() const {
  std::string state;
  if (descriptor.state_init == StateInit::kZero) state = "/state-zero";
  if (descriptor.state_init == StateInit::kNormal) {
    state = "/state-normal-" + std::to_string(options.state_seed);
  }
  return backend->identity() + "/" + name(options.numeric_mode) + "/kv-" + options.cache_mode +
         "/fp16cache-" + options.fp16_cache + state;
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
  try {
    engine.backend->enter();
  } catch (...) {
    engine.in_use.clear(std::memory_order_release);
    throw;
  }
}

}  // namespace tinyloop
