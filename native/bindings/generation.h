// Generation for Python.
#pragma once

#include <vector>

#include "arrays.h"
#include "faces.h"
#include "generate.h"

namespace tinyloop {

struct PyGenerateRequest {
  Array<int32_t> token_ids;
  int max_new_tokens = 0;
  std::optional<PyPrefix> prefix;
  std::optional<int> depth;
  SamplingOptions sampling;
  std::optional<std::vector<int32_t>> stop_ids;
  uint64_t seed = 0;
  std::optional<double> exit_threshold;
  int min_depth = 1;
};

// The arguments of a request, checked as far as they can be without a model.
PyGenerateRequest make_request(const py::object& token_ids, int max_new_tokens,
                               const std::optional<PyPrefix>& prefix, std::optional<int> depth,
                               double temperature, int64_t top_k, double top_p, double min_p,
                               double repetition_penalty,
                               const std::optional<std::vector<int32_t>>& stop_ids, uint64_t seed,
                               std::optional<double> exit_threshold, int min_depth);

// A request as the engine takes it; the ids are the request's. `prefix` is its own, open.
GenerateItem make_item(const PyModel& model, const PyGenerateRequest& request,
                       std::shared_ptr<PrefixState> prefix);

// At least 1, or 0 for the engine's own.
int checked_batch(std::optional<int> max_batch);

const char* name(Finish finish);

// Model.generation
void bind_start_of_generation(py::class_<PyModel>& model);

py::list generate_face(const PyModel& model, const std::vector<PyGenerateRequest>& requests,
                       const py::object& on_token, std::optional<int> max_batch);

}  // namespace tinyloop
