// What generated sequences hold: their keys and values, which grow by blocks, and prefixes as
// attention reads them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "cache.h"
#include "engine.h"
#include "generate.h"

namespace tinyloop {

// One request from when it is added until it has ended, and what came of it so far.
struct Job {
  size_t key = 0;
  GenerateItem item;  // its ids are the sequence's
  Completion completion;
};

// A job on its way. Its tokens are those of the prefix, the item and what was generated.
struct Sequence {
  Job* job = nullptr;
  std::vector<int32_t> ids;  // of the item and generated, in order
  int64_t stored = 0;        // of them that are in the cache
  int64_t start = 0;         // position of ids[0]
  const CacheView* prefix = nullptr;
  CacheView before;  // the prefix and all full blocks; used once there is a full one
  std::vector<std::shared_ptr<CacheBlock>> blocks;  // the last one is being filled
  int64_t block_end = 0;                            // positions that the blocks hold
  double alive = 1.0;  // of the row that runs: product of 1 - gate so far
  size_t order = 0;    // when it joined: the greatest is the youngest
  size_t served = 0;   // the last step that had rows of it, or at which it joined

  int64_t pending() const { return static_cast<int64_t>(ids.size()) - stored; }
  int64_t position() const { return start + stored; }
  const CacheView* standing() const {
    if (blocks.size() > 1) return &before;
    return prefix != nullptr && prefix->length > 0 ? prefix : nullptr;
  }
};

// Whether its tokens may end before the deepest loop.
inline bool exits(const GenerateItem& item) { return item.exit_threshold < 1.0; }

class SequenceMemory {
 public:
  explicit SequenceMemory(Engine& engine);

  // The prefix as attention reads it, null for none; in a hidden mode rebuilt once until it is
  // dropped. Throws OutOfMemoryError and changes nothing.
  const CacheView* prefix_view(const GenerateItem& item);
  // Room for the positions below `end`. Throws OutOfMemoryError and changes nothing.
  void grow(Sequence& sequence, int64_t end);
  // Frees the views that `is_idle`; false if there was none.
  bool drop_views(const std::function<bool(const PrefixState*, const CacheView&)>& is_idle);
  void forget(const PrefixState* prefix) { views_.erase(prefix); }

 private:
  struct PrefixView {
    CacheView view;
    std::shared_ptr<CacheBlock> hot;
  };
  void make_hot(const PrefixState& prefix, PrefixView& view);

  Engine& engine_;
  CacheShape hot_;  // running sequences keep keys and values, whatever the cache mode
  std::map<const PrefixState*, PrefixView> views_;
};

}  // namespace tinyloop
