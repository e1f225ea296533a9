// Scoring: log-probabilities of given ids, many items in one ragged batch.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "engine.h"
#include "prefix.h"

namespace tinyloop {

// One item: `ids` follow those of `prefix` (null: none); the last n_scored are scored.
struct ScoreItem {
  const int32_t* ids = nullptr;
  size_t n_ids = 0;
  size_t n_scored = 0;
  const PrefixState* prefix = nullptr;
  int depth = 0;           // loops, at most where exit_threshold ends an item sooner
  int64_t prompt_len = 0;  // prefix-LM: ids that see each other both ways
};

struct ScoreOptions {
  // An item ends after the first loop, min_depth at least, at which every row that predicts one of
  // its scored ids has a cumulative exit probability of this or more. 1 or more: never. No item may
  // be less deep than min_depth.
  double exit_threshold = std::numeric_limits<double>::infinity();
  int min_depth = 1;
};

// Where results go; item after item, S scored ids in all. Null: not asked for. Rows of by_depth and
// gates beyond an item's own depth are NaN.
struct ScoreOutput {
  float* logprobs = nullptr;  // [S], required
  uint8_t* greedy = nullptr;  // [S], required
  int32_t* depths = nullptr;  // [items]: loops that each ran
  float* by_depth = nullptr;  // [max_depth, S]
  float* gates = nullptr;     // [max_depth, S]
  int64_t max_depth = 0;      // at least the greatest depth of an item
};

// See score() of tinyloop.h.
void score(Engine& engine, const std::vector<ScoreItem>& items, const ScoreOptions& options,
           const ScoreOutput& out);

}  // namespace tinyloop
