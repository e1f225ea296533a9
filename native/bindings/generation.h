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

py::list generate_face(const PyModel& model, const std::vector<PyGenerateRequest>& requests,
                       const py::object& on_token, std::optional<int> max_batch);

}  // namespace tinyloop
