// Generation in one call: its requests join, decode and leave in one continuous batch.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "prefix.h"
#include "sampling.h"
#include "tinyloop/tinyloop.h"

namespace tinyloop {

struct GenerateItem {
  const int32_t* ids = nullptr;  // at least one; they follow those of `prefix`
  size_t n_ids = 0;
  std::shared_ptr<const PrefixState> prefix;
  int depth = 0;
  int max_new_tokens = 0;
  std::vector<int32_t> stop_ids;
  SamplingOptions sampling;
  uint64_t seed = 0;
  // A decoded token ends after the first loop, min_depth at least, at which its cumulative exit
  // probability is this or more. Readers of its deeper planes get those of its last loop, so the
  // result is approximate. 1 or more: never.
  double exit_threshold = std::numeric_limits<double>::infinity();
  int min_depth = 1;
};

// What errors call a request.
std::string request_name(size_t index);

// Throws what refuses an item, named by its index. Reads the item's ids.
void check_item(const Engine& engine, const GenerateItem& item, size_t index);

// A completion depends on its own item only: not on batch mates, max_batch or order. max_batch:
// most sequences at a time; 0: 64. When memory runs short the youngest sequence is put back and
// computed again, to the same numbers. Throws as score() does; OutOfMemoryError only when one
// sequence alone does not fit.
std::vector<Completion> generate(const std::shared_ptr<Engine>& engine,
                                 const std::vector<GenerateItem>& items, int max_batch,
                                 const OnToken& on_token);

}  // namespace tinyloop
