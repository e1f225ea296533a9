#include "pool.h"

#include "checks.h"

namespace tinyloop {

size_t prefix_bytes_of(const Engine& engine, int64_t begin, int64_t end, int depth,
                       bool upgradable) {
  const CacheRange range{begin, end, 0, engine.schedule.planes(depth)};
  const auto states =
      static_cast<size_t>(engine.schedule.states * range.tokens() * engine.descriptor.hidden_size);
  return accounted_bytes(cache_bytes(engine.cache, range)) +
         (upgradable ? accounted_bytes(states * sizeof(float)) : 0);
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
  room.bytes = prefix_bytes_of(*engine, begin, end, depth, upgradable);
  ledger.check_room(room.bytes, parent);
  return room;
}

int64_t Pool::hold(std::shared_ptr<PrefixState> prefix, std::optional<int64_t> parent) {
  require_open();
  const size_t bytes = prefix->bytes();
  const int depth = prefix->depth;
  return ledger.put({prefix->all_ids(), depth, bytes, parent, std::move(prefix)});
}

int64_t Pool::create(std::span<const int32_t> ids, int depth, std::optional<int64_t> parent,
                     bool upgradable) {
  const ForwardGuard guard(*engine);
  const Room room = check_room_for(ids, depth, parent, upgradable);
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
