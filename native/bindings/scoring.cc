#include "scoring.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.h"
#include "checks.h"
#include "making.h"
#include "running_calls.h"

namespace tinyloop {

namespace {

[[noreturn]] void bad(const std::string& what) { throw InvalidInputError("cannot score: " + what); }

int one_depth(const py::object& depth) {
  try {
    return depth.cast<int>();
  } catch (const py::cast_error&) {
    throw py::type_error("depth must be an integer of 32 bits or a numpy array of int32, found " +
                         std::string(py::repr(depth)));
  }
}

// The depth of each item: one for all, or one each.
std::vector<int> item_depths(const PyModel& model, const py::object& depth, size_t items) {
  if (depth.is_none()) return std::vector<int>(items, model.depth_or_default(std::nullopt));
  if (!py::isinstance<py::array>(depth)) return std::vector<int>(items, one_depth(depth));
  const auto values = *per_item(depth, items, "depth");
  return {values.data(), values.data() + values.size()};
}

py::object matrix(int64_t rows, int64_t columns) { return py::array_t<float>({rows, columns}); }

float* values_of(py::object& array) {
  return array.is_none() ? nullptr : array.cast<py::array_t<float>>().mutable_data();
}

}  // namespace

FlatItems::FlatItems(const py::object& token_ids, const py::object& item_offsets,
                     const py::object& scored, const Prefixes& given)
    : ids(require<int32_t>(token_ids, "token_ids")),
      offsets(require<int64_t>(item_offsets, "offsets")),
      n_scored(require<int32_t>(scored, "n_scored")) {
  const auto n = n_scored.size();
  if (given) prefixes = open_all(*given, "item");
  if (offsets.size() != n + 1) {
    bad("offsets has " + std::to_string(offsets.size()) + " entries for " + std::to_string(n) +
        " items; it needs one more than items");
  }
  if (offsets.data()[0] != 0 || offsets.data()[n] != ids.size()) {
    bad("offsets must run from 0 to the number of token ids, " + std::to_string(ids.size()));
  }
  if (given && static_cast<py::ssize_t>(prefixes.size()) != n) {
    bad("there are " + std::to_string(prefixes.size()) + " prefixes for " + std::to_string(n) +
        " items");
  }
  for (py::ssize_t i = 0; i < n; ++i) {
    const int64_t begin = offsets.data()[i], end = offsets.data()[i + 1];
    if (end < begin || end > ids.size()) bad("offsets must not fall, at item " + std::to_string(i));
    // Here and not only in the engine: the results are allocated by this number.
    if (n_scored.data()[i] < 1 || n_scored.data()[i] > end - begin) {
      bad("n_scored of item " + std::to_string(i) + " is " + std::to_string(n_scored.data()[i]) +
          ", and it has " + std::to_string(end - begin) + " ids");
    }
    total += n_scored.data()[i];
  }
}

Array<int64_t> FlatItems::scored_offsets() const {
  Array<int64_t> starts(static_cast<py::ssize_t>(size()) + 1);
  int64_t at = 0;
  for (size_t i = 0; i < size(); ++i) {
    starts.mutable_data()[i] = at;
    at += n_scored.data()[i];
  }
  starts.mutable_data()[size()] = at;
  return starts;
}

std::optional<Array<int32_t>> per_item(const py::object& values, size_t items, const char* name) {
  if (values.is_none()) return std::nullopt;
  auto array = require<int32_t>(values, name);
  if (static_cast<size_t>(array.size()) != items) {
    bad(std::string(name) + " has " + std::to_string(array.size()) + " entries for " +
        std::to_string(items) + " items");
  }
  return array;
}

ScoreResult score_items(const PyModel& model, const py::object& token_ids,
                        const py::object& offsets, const py::object& n_scored,
                        const Prefixes& prefixes, const py::object& depth,
                        std::optional<double> exit_threshold, int min_depth, bool by_depth,
                        bool gates, const py::object& prompt_lens) {
  const std::shared_ptr<Engine> engine = model.open();
  const FlatItems flat(token_ids, offsets, n_scored, prefixes);
  const std::vector<int> depths = item_depths(model, depth, flat.size());
  const auto prompts = per_item(prompt_lens, flat.size(), "prompt_lens");
  std::vector<ScoreItem> items;
  int64_t deepest = 0;
  for (size_t i = 0; i < flat.size(); ++i) {
    items.push_back({flat.first_id(i), flat.n_ids(i), flat.scored(i), flat.prefix(i).get(),
                     depths[i], prompts ? prompts->data()[i] : 0});
    deepest = std::max<int64_t>(deepest, depths[i]);
  }
  // A depth out of range is refused by the engine; only then would its rows be allocated.
  const int64_t rows = std::clamp<int64_t>(deepest, 0, kMaxDepth);
  ScoreResult result{Array<float>(flat.total), Array<bool>(flat.total), flat.scored_offsets(),
                     Array<int32_t>(static_cast<py::ssize_t>(flat.size()))};
  if (by_depth) result.by_depth = matrix(rows, flat.total);
  if (gates) result.gates = matrix(rows, flat.total);
  ScoreOutput out;
  out.logprobs = result.logprobs.mutable_data();
  out.greedy = reinterpret_cast<uint8_t*>(result.greedy.mutable_data());
  out.depths = result.depths.mutable_data();
  out.by_depth = values_of(result.by_depth);
  out.gates = values_of(result.gates);
  out.max_depth = rows;
  ScoreOptions options;
  if (exit_threshold) options.exit_threshold = *exit_threshold;
  options.min_depth = min_depth;
  {
    const WithoutGil nogil;
    score(*engine, items, options, out);
  }
  return result;
}

Array<float> score_tokens(const PyModel& model, const py::object& token_ids,
                          std::optional<int> depth, int64_t prompt_len) {
  const std::shared_ptr<Engine> engine = model.open();
  const auto ids = require<int32_t>(token_ids, "token_ids");
  if (ids.size() < 1) throw InvalidInputError("cannot score 0 token ids: give at least one");
  const auto n = static_cast<size_t>(ids.size());
  Array<float> logprobs(static_cast<py::ssize_t>(n - 1));
  const int loops = model.depth_or_default(depth);
  if (n == 1) return logprobs;
  const std::vector<ScoreItem> items{{ids.data(), n, n - 1, nullptr, loops, prompt_len}};
  ScoreOutput out;
  out.logprobs = logprobs.mutable_data();
  {
    const WithoutGil nogil;
    std::vector<uint8_t> greedy(n - 1);
    out.greedy = greedy.data();
    score(*engine, items, {}, out);
  }
  return logprobs;
}

}  // namespace tinyloop

namespace py = pybind11;

void bind_scoring(py::module_& m) {
  using tinyloop::ScoreResult;
  py::class_<ScoreResult> result(m, "ScoreResult");
  tinyloop::refuse_new(result);
  result
      .def_readonly("logprobs", &ScoreResult::logprobs,
                    "float32 [S]: natural-log probability of each scored id, item after item.")
      .def_readonly("greedy", &ScoreResult::greedy,
                    "bool [S]: the id is the argmax, the lowest id on ties.")
      .def_readonly("offsets", &ScoreResult::offsets,
                    "int64 [n + 1]: item i's values are [offsets[i], offsets[i + 1]).")
      .def_readonly("depths", &ScoreResult::depths, "int32 [n]: loops that each item ran.")
      .def_readonly("by_depth", &ScoreResult::by_depth,
                    "float32 [depth, S] or None: log-probabilities after each loop; NaN beyond an "
                    "item's own depth.")
      .def_readonly("gates", &ScoreResult::gates,
                    "float32 [depth, S] or None: the exit gate's probability at the row that "
                    "predicts each scored id; NaN beyond an item's own depth.");
}
