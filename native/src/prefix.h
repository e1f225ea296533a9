// PrefixCache: the keys and values of a token prefix in every plane, immutable once built.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine.h"
#include "kv.h"
#include "memory.h"

namespace tinyloop {

// Shared by its handle, by its children and by running calls; memory goes with the last of them.
struct PrefixState {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<PrefixState> parent;
  Block memory;  // keys of all planes, then values: [plane][own_length][kv_width] each
  KvSegment own;
  int depth = 0;

  ~PrefixState();

  int64_t length() const { return own.end; }
  int64_t own_length() const { return own.end - own.begin; }
  // Throws ClosedHandleError after the model was closed.
  void require_open() const;
  // The segments from position 0 on: ancestors first, own last. Made for each call, so that a chain
  // of n prefixes holds n of them and not n squared.
  std::vector<KvSegment> segments() const;
};

// Allocates the planes of `own_length` tokens after `parent` (null: from 0).
std::shared_ptr<PrefixState> make_prefix_state(std::shared_ptr<Engine> engine,
                                               std::shared_ptr<PrefixState> parent,
                                               int64_t own_length, int depth);

}  // namespace tinyloop

// The opaque handle of the public header.
struct tinyloop::PrefixCache {
  std::shared_ptr<tinyloop::PrefixState> state;
};
