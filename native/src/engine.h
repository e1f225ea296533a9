// The engine behind a Model: weights, buffers and the one-forward-at-a-time rule.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "buffers.h"
#include "cache.h"
#include "memory.h"
#include "schedule.h"
#include "tinyloop/tinyloop.h"
#include "weights.h"

namespace tinyloop {

// Totals since load, for tests and reports.
struct Counters {
  std::atomic<int64_t> rows{0}, head_rows{0}, passes{0};
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // All phases of a load, or LoadError / OutOfMemoryError with everything released.
  static std::shared_ptr<Engine> load(const std::string& path, const LoadOptions& options);

  std::string numerics_id() const;
  // Throws ClosedHandleError after close(), ConcurrentUseError in a forked child.
  void require_usable() const;
  // The shape of the buffers, for what is allocated later.
  BufferShape buffer_shape() const;
  void close() { closed_ = true; }
  bool closed() const { return closed_; }

  Descriptor descriptor;
  Schedule schedule;
  std::map<std::string, std::string> metadata;
  LoadOptions options;                    // resolved: no empty strings
  CacheShape cache;                       // how handles and requests store tokens
  std::shared_ptr<Account> account;       // the backend's memory
  std::shared_ptr<Account> host_account;  // what the engine itself reads; may be the same
  std::unique_ptr<Backend> backend;
  Weights weights;
  BufferPool buffers;
  Counters counters;
  std::atomic_flag in_use = ATOMIC_FLAG_INIT;

 private:
  std::atomic<bool> closed_{false};
  pid_t owner_process_ = 0;
};

// Held for the length of a forward. Throws ConcurrentUseError if another holds it.
class ForwardGuard {
 public:
  explicit ForwardGuard(Engine& engine);
  ~ForwardGuard() {
    engine_.backend->leave();
    engine_.in_use.clear(std::memory_order_release);
  }
  ForwardGuard(const ForwardGuard&) = delete;
  ForwardGuard& operator=(const ForwardGuard&) = delete;

 private:
  Engine& engine_;
};

}  // namespace tinyloop
