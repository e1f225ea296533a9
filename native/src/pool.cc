#include "pool.h"

#include <algorithm>

#include "checks.h"

namespace tinyloop {

namespace {

// What tells prefixes of the same ids and depth apart: whether they kept their states, and in a
// prefix-LM model how many of the ids saw each other both ways.
int64_t variant_of(bool upgradable, int64_t open_end) {
  return 2 * open_end + (upgradable ? 1 : 0);
}

int64_t variant_of(const PrefixState& prefix) {
  int64_t open_end = 0;
  for (const PrefixState* at = &prefix; at != nullptr; at = at->parent.get()) {
    open_end = std::max(open_end, at->open_end);
  }
  return variant_of(prefix.states != nullptr, open_end);
}

}  // namespace

size_t prefix_bytes_of(const Engine& engine, int64_t begin, int64_t end, int depth,
                       bool upgradable) {
  const CacheRange range{begin, end, 0, engine.schedule.planes(depth)};
  const auto states =
      static_cast<size_t>(engine.schedule.states * range.tokens() * engine.descriptor.hidden_size);
  const size_t alignment = engine.account->alignment();
  return accounted_bytes(cache_bytes(engine.cache, range), alignment) +
         (upgradable ? accounted_bytes(states * sizeof(float), alignment) : 0);
}

void Pool::require_open() const {
  if (engine->closed()) throw ClosedHandleError("cannot use the pool: its model was closed");
  engine->require_usable();
}

Pool::Room Pool::check_room_for(std::span<const int32_t> ids, int depth,
                                std::optional<int64_t> parent, bool upgradable) {
  require_open();
  Room room;
  room.parent = parent ? get(*parent) : nullptr;
  check_prefill(*engine, ids.data(), ids.size(), depth, room.parent.get());
  const int64_t begin = room.parent ? room.parent->length() : 0;
  const int64_t end = begin + static_cast<int64_t>(ids.size());
  std::vector<int32_t> all = room.parent ? room.parent->all_ids() : std::vector<int32_t>();
  all.insert(all.end(), ids.begin(), ids.end());
  const int64_t open_end = engine->descriptor.prefix_lm ? end : 0;
  room.held = ledger.find_equal(all, depth, variant_of(upgradable, open_end));
  if (room.held) {
    ledger.get(*room.held);
    return room;
  }
  room.bytes = prefix_bytes_of(*engine, begin, end, depth, upgradable);
  ledger.check_room(room.bytes, parent);
  return room;
}

int64_t Pool::hold(std::shared_ptr<PrefixState> prefix, std::optional<int64_t> parent) {
  require_open();
  PoolEntry entry{prefix->all_ids(), prefix->depth, variant_of(*prefix),
                  prefix->bytes(),   parent,        {}};
  entry.payload = std::move(prefix);
  return ledger.put(std::move(entry));
}

int64_t Pool::create(std::span<const int32_t> ids, int depth, std::optional<int64_t> parent,
                     bool upgradable) {
  const Room room = check_room_for(ids, depth, parent, upgradable);
  if (room.held) return *room.held;
  const ForwardGuard guard(*engine);
  const auto build = [&] {
    return prefill_guarded(engine, ids.data(), ids.size(), depth, room.parent, upgradable);
  };
  std::shared_ptr<PrefixState> built;
  try {
    built = build();
  } catch (const OutOfMemoryError&) {
    // The memory of those that must go anyway may be what was missing.
    if (!ledger.make_room(room.bytes, parent)) throw;
    built = build();
  }
  return hold(std::move(built), parent);
}

int64_t Pool::put(std::shared_ptr<PrefixState> prefix) {
  require_open();
  if (prefix->engine != engine) {
    throw MismatchError("cannot hold the prefix: it belongs to another model");
  }
  return hold(std::move(prefix), std::nullopt);
}

std::shared_ptr<PrefixState> Pool::get(int64_t key) {
  require_open();
  return std::static_pointer_cast<PrefixState>(ledger.get(key));
}

std::optional<int64_t> Pool::find(std::span<const int32_t> ids, int depth) const {
  require_open();
  check_depth(depth, "the request");
  const bool exactly = engine->schedule.has_coda();
  return ledger.find(ids, depth, exactly ? DepthRule::kExactly : DepthRule::kAtLeast);
}

}  // namespace tinyloop
