// The stored state of a run of tokens: what a PrefixCache is, and what a ResumeHandle goes on from.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache.h"
#include "engine.h"

namespace tinyloop {

// Planes [first, last) of some tokens, in a block that other states may share.
struct PlaneRange {
  std::shared_ptr<CacheBlock> block;
  int64_t first = 0;
  int64_t last = 0;
};

// Tokens [begin, end) of a sequence after `depth` loops. Immutable once built; shared by its
// handle, its children, its upgrades and running calls; memory goes with the last of them.
struct PrefixState {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<PrefixState> parent;
  std::vector<PlaneRange> planes;  // disjoint; empty: only the states were kept
  std::shared_ptr<Block> states;   // float32 [states][tokens][hidden] after the last loop, or null
  std::vector<int32_t> ids;        // of the own tokens
  int64_t begin = 0;
  int64_t end = 0;
  int depth = 0;
  int64_t open_end = 0;  // prefix-LM: tokens below this position saw each other both ways

  ~PrefixState();

  int64_t length() const { return end; }
  int64_t own_length() const { return end - begin; }
  bool has_planes() const { return !planes.empty(); }
  // Bytes of its own tokens, also where it shares them with what it was upgraded from.
  size_t bytes() const;
  // Throws ClosedHandleError after the model was closed; `what` is the prefix as the caller knows
  // it.
  void require_open(const std::string& what = "the prefix") const;
  // All tokens from position 0 on: ancestors first, own last. Made for each call, so that a chain
  // of n prefixes holds n of them and not n squared.
  CacheView view() const;
  // The ids from position 0 on.
  std::vector<int32_t> all_ids() const;
};

// Throws what refuses a prefix of these ids after `parent`, before anything is done for it.
void check_prefill(const Engine& engine, const int32_t* ids, size_t n_ids, int depth,
                   const PrefixState* parent);

// Builds a prefix; see build_prefix() of tinyloop.h. upgradable: keep the states.
std::shared_ptr<PrefixState> prefill(const std::shared_ptr<Engine>& engine, const int32_t* ids,
                                     size_t n_ids, int depth, std::shared_ptr<PrefixState> parent,
                                     bool upgradable);
// The same for a caller that holds the engine's ForwardGuard.
std::shared_ptr<PrefixState> prefill_guarded(const std::shared_ptr<Engine>& engine,
                                             const int32_t* ids, size_t n_ids, int depth,
                                             std::shared_ptr<PrefixState> parent, bool upgradable);

// A state at a greater depth that shares all planes but the coda's; `parent` replaces the old one's
// and must serve `depth`. reserve: null, or a block with room for the planes of `depth`. what: the
// handle, for errors.
struct Upgrade {
  std::shared_ptr<PrefixState> from;
  std::shared_ptr<PrefixState> parent;
  std::shared_ptr<CacheBlock> reserve;
  Owner owner = Owner::kPrefix;
  std::string what;
};
// An empty state to run `upgrade` into: allocates what it needs, checks what it stands on.
std::shared_ptr<PrefixState> prepare_upgrade(const Upgrade& upgrade, int depth);

// Upgrades one prefix. Throws MismatchError if it kept no states or its parent is too shallow.
std::shared_ptr<PrefixState> upgrade_prefix(const std::shared_ptr<PrefixState>& prefix, int depth,
                                            std::shared_ptr<PrefixState> parent);

// Where a pass keeps what it computes for a state: the planes that run once, and the loops' planes.
struct KeepPlaces {
  CachePlaces once, loops;
  bool any = false;
};
KeepPlaces keep_places(const PrefixState& state);

// float32 [states][tokens][hidden] for a state.
std::shared_ptr<Block> allocate_states(const Engine& engine, int64_t tokens, Owner owner);

}  // namespace tinyloop
