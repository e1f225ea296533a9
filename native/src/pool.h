// PrefixPool: prefixes of one model under a byte budget.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine.h"
#include "prefix.h"
#include "prefix_pool.h"

namespace tinyloop {

// The books, and the model whose prefixes they hold. Calls are serialised by the caller.
struct Pool {
  std::shared_ptr<Engine> engine;
  PoolLedger ledger;

  Pool(std::shared_ptr<Engine> owner, size_t budget_bytes, EvictPolicy policy)
      : engine(std::move(owner)), ledger(budget_bytes, policy) {}

  // Building a prefix after a held one (or from position 0) takes three steps, so that the caller
  // may let go of its lock while the second, prefill_guarded(), computes under the ForwardGuard.
  // First: what will be refused is refused, and nothing is evicted.
  // Where an equal prefix is held already there is nothing to build: `held` is its key, now used.
  struct Room {
    std::shared_ptr<PrefixState> parent;
    size_t bytes = 0;
    std::optional<int64_t> held;
  };
  Room check_room_for(std::span<const int32_t> ids, int depth, std::optional<int64_t> parent,
                      bool upgradable);
  // Last: holds what was built after `parent`. Returns its key, or that of an equal prefix that is
  // held already. Equal are prefixes of the same ids, depth, states (kept or not) and prompt.
  int64_t hold(std::shared_ptr<PrefixState> prefix, std::optional<int64_t> parent);
  // All three, for a caller without a lock of its own.
  int64_t create(std::span<const int32_t> ids, int depth, std::optional<int64_t> parent,
                 bool upgradable);
  // Holds a prefix that was built elsewhere; its ancestors stay alive with it and are not counted.
  int64_t put(std::shared_ptr<PrefixState> prefix);
  std::shared_ptr<PrefixState> get(int64_t key);
  std::optional<int64_t> find(std::span<const int32_t> ids, int depth) const;
  void require_open() const;
};

// Bytes that a prefix of these tokens and this depth will take.
size_t prefix_bytes_of(const Engine& engine, int64_t begin, int64_t end, int depth,
                       bool upgradable);

}  // namespace tinyloop
