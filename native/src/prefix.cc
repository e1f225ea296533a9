#include "prefix.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace tinyloop {

namespace {

// Bytes of keys (or of values) of all planes; the largest size if the product passes 64 bits, which
// no allocation survives.
size_t planes_bytes(size_t plane_bytes, int64_t planes) {
  size_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(plane_bytes, static_cast<size_t>(planes), &bytes);
  return overflow ? std::numeric_limits<size_t>::max() / 4 : bytes;
}

}  // namespace

PrefixState::~PrefixState() {
  // A long chain goes link by link: each link's own destructor would go as deep as the chain is
  // long.
  std::shared_ptr<PrefixState> next = std::move(parent);
  while (next && next.use_count() == 1) next = std::exchange(next->parent, nullptr);
}

void PrefixState::require_open() const {
  if (engine->closed()) throw ClosedHandleError("cannot use the prefix: its model was closed");
}

std::vector<KvSegment> PrefixState::segments() const {
  std::vector<KvSegment> chain;
  for (const PrefixState* state = this; state != nullptr; state = state->parent.get()) {
    chain.push_back(state->own);
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

std::shared_ptr<PrefixState> make_prefix_state(std::shared_ptr<Engine> engine,
                                               std::shared_ptr<PrefixState> parent,
                                               int64_t own_length, int depth) {
  auto state = std::make_shared<PrefixState>();
  const Descriptor& d = engine->descriptor;
  const size_t plane_bytes =
      static_cast<size_t>(own_length * d.kv_width()) * engine->backend->activation_bytes();
  const size_t half = planes_bytes(plane_bytes, d.n_layers * depth);
  state->memory = engine->account->allocate(2 * half, Owner::kPrefix, "prefix keys and values");
  state->depth = depth;
  state->own.keys = state->memory.as<uint8_t>();
  state->own.values = state->own.keys + half;
  state->own.plane_bytes = plane_bytes;
  state->own.begin = parent ? parent->length() : 0;
  state->own.end = state->own.begin + own_length;
  state->engine = std::move(engine);
  state->parent = std::move(parent);
  return state;
}

}  // namespace tinyloop
