// Scoring over flat arrays.
#pragma once

#include <optional>
#include <vector>

#include "arrays.h"
#include "faces.h"
#include "score.h"

namespace tinyloop {

struct ScoreResult {
  Array<float> logprobs;
  Array<bool> greedy;
  Array<int64_t> offsets;
  Array<int32_t> depths;
  py::object by_depth = py::none();
  py::object gates = py::none();
};

// The ids of several items, one after the other, and how many each scores; every index checked.
struct FlatItems {
  Array<int32_t> ids;
  Array<int64_t> offsets;
  Array<int32_t> n_scored;
  std::vector<std::shared_ptr<PrefixState>> prefixes;  // of each item, or empty
  int64_t total = 0;                                   // scored ids

  FlatItems(const py::object& token_ids, const py::object& offsets, const py::object& n_scored,
            const Prefixes& prefixes);

  size_t size() const { return static_cast<size_t>(n_scored.size()); }
  const int32_t* first_id(size_t item) const { return ids.data() + offsets.data()[item]; }
  size_t n_ids(size_t item) const {
    return static_cast<size_t>(offsets.data()[item + 1] - offsets.data()[item]);
  }
  size_t scored(size_t item) const { return static_cast<size_t>(n_scored.data()[item]); }
  std::shared_ptr<PrefixState> prefix(size_t item) const {
    return prefixes.empty() ? nullptr : prefixes[item];
  }
  // int64 [n + 1]: where each item's scored ids begin.
  Array<int64_t> scored_offsets() const;
};

// An int32 array with one value an item, or null if none was given.
std::optional<Array<int32_t>> per_item(const py::object& values, size_t items, const char* name);

ScoreResult score_items(const PyModel& model, const py::object& token_ids,
                        const py::object& offsets, const py::object& n_scored,
                        const Prefixes& prefixes, const py::object& depth,
                        std::optional<double> exit_threshold, int min_depth, bool by_depth,
                        bool gates, const py::object& prompt_lens);
Array<float> score_tokens(const PyModel& model, const py::object& token_ids,
                          std::optional<int> depth, int64_t prompt_len);

}  // namespace tinyloop
