#include "prefix.h"

namespace tinyloop {

std::shared_ptr<PrefixState> make_prefix_state(std::shared_ptr<Engine> engine,
                                               std::shared_ptr<PrefixState> parent,
                                               int64_t own_length, int depth) {
  auto state = std::make_shared<PrefixState>();
  const Descriptor& d = engine->descriptor;
  const size_t plane_bytes =
      static_cast<size_t>(own_length * d.kv_width()) * engine->backend->activation_bytes();
  const size_t half = plane_bytes * static_cast<size_t>(d.n_layers * depth);
  state->memory = engine->account->allocate(2 * half, Owner::kPrefix, "prefix keys and values");
  state->begin = parent ? parent->length() : 0;
  state->own_length = own_length;
  state->depth = depth;
  if (parent) state->segments = parent->segments;
  KvSegment own;
  own.keys = state->memory.as<uint8_t>();
  own.values = own.keys + half;
  own.plane_bytes = plane_bytes;
  own.begin = state->begin;
  own.end = state->length();
  state->segments.push_back(own);
  state->engine = std::move(engine);
  state->parent = std::move(parent);
  return state;
}

}  // namespace tinyloop
