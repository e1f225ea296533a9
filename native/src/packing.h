// Which of many items run together: their rows, cut into passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "engine.h"
#include "prefix.h"

namespace tinyloop {

// What one item brings to a pass: its new rows, and what they stand on (null: nothing).
struct PassNeeds {
  const PrefixState* prefix = nullptr;
  int64_t rows = 0;
};

struct Packed {
  // Items by index, pass by pass. Those on one prefix lie side by side, so that a pass reads its
  // tiles once; prefixes come by first appearance.
  std::vector<std::vector<size_t>> passes;
  std::map<const PrefixState*, CacheView> views;  // one for each prefix

  // Null for no prefix. It lives as long as this.
  const CacheView* view(const PrefixState* prefix) const {
    return prefix != nullptr ? &views.at(prefix) : nullptr;
  }
};

// A pass takes as many items as fit max_seq_len new rows, and in a hidden mode the buffer of
// rebuilt keys; at least one.
Packed pack(const Engine& engine, const std::vector<PassNeeds>& needs);

}  // namespace tinyloop
