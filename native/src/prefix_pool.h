// The books of a pool of prefixes: who is held, for whom, and who goes next. Pure bookkeeping; what
// an entry holds is opaque, so that nothing here depends on the engine.
//
// Two invariants. A parent outlives its children: it cannot go while one of them is held. A child
// is never more recently used than its parent: a use of a child is a use of all its ancestors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tinyloop/tinyloop.h"

namespace tinyloop {

// Which entries serve a request of some depth: a model with a coda needs its own depth's planes.
enum class DepthRule { kAtLeast, kExactly };

// A prefix to be held.
struct PoolEntry {
  std::vector<int32_t> ids;  // from position 0 on, the parent's included
  int depth = 0;
  int64_t variant = 0;            // what else tells entries of equal ids and depth apart
  size_t bytes = 0;               // its own; the parent's are the parent's
  std::optional<int64_t> parent;  // key
  std::shared_ptr<void> payload;
};

// Thread: one at a time; the owner serialises calls. Every call but closed(), close() and the
// destructor throws ClosedHandleError after close().
class PoolLedger {
 public:
  // budget_bytes 0: no limit.
  PoolLedger(size_t budget_bytes, EvictPolicy policy) : budget_(budget_bytes), policy_(policy) {}

  // Makes room as make_room() does, then holds the entry and returns its key: positive, rising,
  // never used twice. Where an equal entry is held already, that is a use of it and its key the
  // result; it keeps its parent, its pins and its payload, and nothing is evicted. Throws
  // InvalidInputError for no ids, a depth below 1 or an unknown parent, MismatchError if the ids do
  // not continue the parent's, OutOfMemoryError; then nothing changed.
  int64_t put(PoolEntry entry);

  // Evicts until `bytes` more fit, oldest use first; never a pinned entry, a parent, or `keep`.
  // Says whether any went. All or nothing: throws OutOfMemoryError and evicts nothing if the
  // entries that may go are not enough, or none may.
  bool make_room(size_t bytes, std::optional<int64_t> keep = std::nullopt);

  // Throws what make_room() would, and evicts nothing.
  void check_room(size_t bytes, std::optional<int64_t> keep = std::nullopt) const;

  // The payload; a use of the entry and of its ancestors. It stays alive with its last holder, also
  // after an eviction.
  std::shared_ptr<void> get(int64_t key);

  // The key of the entry that equals one of these ids, depth and variant. Not a use.
  std::optional<int64_t> find_equal(std::span<const int32_t> ids, int depth, int64_t variant) const;

  // The key of the longest held prefix of `ids` (which may be all of them) that serves `depth`;
  // among equals the shallowest, then the oldest. Not a use.
  std::optional<int64_t> find(std::span<const int32_t> ids, int depth,
                              DepthRule rule = DepthRule::kAtLeast) const;

  // A pinned entry is not evicted. Pins are counted.
  void pin(int64_t key);
  void unpin(int64_t key);

  // Throws InvalidInputError while the entry is pinned or has held children.
  void evict(int64_t key);

  // Every eviction since the last call, in order.
  std::vector<Eviction> evicted();

  size_t bytes() const;
  size_t budget_bytes() const { return budget_; }
  // The least recently used first.
  std::vector<int64_t> keys() const;

  // Drops all entries, children first. Idempotent.
  void close();
  bool closed() const { return closed_; }

 private:
  struct Held {
    PoolEntry entry;
    uint64_t last_use = 0;
    int64_t children = 0;
    int64_t pins = 0;
  };
  // Lexicographic, also between an owned and a borrowed sequence.
  struct IdsLess {
    using is_transparent = void;
    bool operator()(std::span<const int32_t> a, std::span<const int32_t> b) const;
  };
  using ByDepth = std::map<std::pair<int, int64_t>, Held*>;  // (depth, key)

  void require_open() const;
  Held& held(int64_t key, const char* what);
  [[noreturn]] void refuse_key(int64_t key, const char* what) const;
  void check(const PoolEntry& entry);
  void touch(Held& used);
  std::vector<int64_t> room_for(size_t bytes, std::optional<int64_t> keep) const;
  std::vector<int64_t> victims(size_t excess, std::optional<int64_t> keep) const;
  void drop(int64_t key, bool asked);

  size_t budget_;
  EvictPolicy policy_;
  bool closed_ = false;
  size_t bytes_ = 0;
  int64_t next_key_ = 1;
  uint64_t clock_ = 0;
  std::map<int64_t, Held> held_;
  std::map<uint64_t, int64_t> by_use_;  // last use -> key
  std::map<std::vector<int32_t>, ByDepth, IdsLess> by_ids_;
  std::vector<Eviction> report_;
};

}  // namespace tinyloop
