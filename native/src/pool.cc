#include "pool.h"

#include "checks.h"

namespace tinyloop {

size_t prefix_bytes_of(const Engine& engine, int64_t begin, int64_t end, int depth,
                       bool upgradable) {
  const CacheRange range{begin, end, 0, engine.schedule.planes(depth)};
  const auto states = static_cast<size_t>(engine.schedule.states * range.tokens() *
                                          engine.descriptor.hidden_size);
  return accounted_bytes(cache_bytes(engine.cache, range)) +
         (upgradable ? accounted_bytes(states * sizeof(float)) : 0);
}

void Pool::require_open() const {
  if (engine->closed()) throw ClosedHandleError("cannot use the pool: its model was closed");
}

int64_t Pool::create(std::span<const int32_t> ids, int depth, std::optional<int64_t> parent,
                     bool upgradable) {
  require_open();
  check_depth(depth);
  std::shared_ptr<PrefixState> base = parent ? get(*parent) : nullptr;
  const int64_t begin = base ? base->length() : 0;
  ledger.make_room(prefix_bytes_of(*engine, begin, begin + static_cast<int64_t>(ids.size()), depth,
                                   upgradable),
                   parent);
  auto state = prefill(engine, ids.data(), ids.size(), depth, base, upgradable);
  const size_t bytes = state->bytes();
  return ledger.put({state->all_ids(), depth, bytes, parent, std::move(state)});
}

int64_t Pool::put(std::shared_ptr<PrefixState> prefix) {
  require_open();
  if (prefix->engine != engine) {
    throw MismatchError("cannot hold the prefix: it belongs to another model");
  }
  const size_t bytes = prefix->bytes();
  const int depth = prefix->depth;
  return ledger.put({prefix->all_ids(), depth, bytes, std::nullopt, std::move(prefix)});
}

std::shared_ptr<PrefixState> Pool::get(int64_t key) {
  require_open();
  return std::static_pointer_cast<PrefixState>(ledger.get(key));
}

std::optional<int64_t> Pool::find(std::span<const int32_t> ids, int depth) const {
  require_open();
  const bool exactly = engine->schedule.has_coda();
  return ledger.find(ids, depth, exactly ? DepthRule::kExactly : DepthRule::kAtLeast);
}

}  // namespace tinyloop
