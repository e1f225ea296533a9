#include "generation.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "making.h"
#include "running_calls.h"

namespace tinyloop {

PyGenerateRequest make_request(const py::object& token_ids, int max_new_tokens,
                               const std::optional<PyPrefix>& prefix, std::optional<int> depth,
                               double temperature, int64_t top_k, double top_p, double min_p,
                               double repetition_penalty,
                               const std::optional<std::vector<int32_t>>& stop_ids, uint64_t seed,
                               std::optional<double> exit_threshold, int min_depth) {
  PyGenerateRequest request;
  const auto ids = require<int32_t>(token_ids, "token_ids");
  request.token_ids = Array<int32_t>(ids.size(), ids.data());  // its own: the caller's may change
  request.max_new_tokens = max_new_tokens;
  request.prefix = prefix;
  request.depth = depth;
  request.sampling.temperature = temperature;
  request.sampling.top_k = top_k;
  request.sampling.top_p = top_p;
  request.sampling.min_p = min_p;
  request.sampling.repetition_penalty = repetition_penalty;
  request.stop_ids = stop_ids;
  request.seed = seed;
  request.exit_threshold = exit_threshold;
  request.min_depth = min_depth;
  check_sampling(request.sampling);
  return request;
}

GenerateItem make_item(const PyModel& model, const PyGenerateRequest& r,
                       std::shared_ptr<PrefixState> prefix) {
  const Descriptor& descriptor = model.open()->descriptor;
  GenerateItem item;
  item.ids = r.token_ids.data();
  item.n_ids = static_cast<size_t>(r.token_ids.size());
  item.prefix = std::move(prefix);
  item.depth = model.depth_or_default(r.depth);
  item.max_new_tokens = r.max_new_tokens;
  if (r.stop_ids) {
    item.stop_ids = *r.stop_ids;
  } else {
    item.stop_ids.assign(descriptor.eos_ids.begin(), descriptor.eos_ids.end());
  }
  item.sampling = r.sampling;
  item.seed = r.seed;
  if (r.exit_threshold) item.exit_threshold = *r.exit_threshold;
  item.min_depth = r.min_depth;
  return item;
}

namespace {

std::vector<GenerateItem> make_items(const PyModel& model,
                                     const std::vector<PyGenerateRequest>& requests) {
  std::vector<std::optional<PyPrefix>> given;
  for (const PyGenerateRequest& r : requests) given.push_back(r.prefix);
  const std::vector<std::shared_ptr<PrefixState>> prefixes = open_all(given, "request");
  std::vector<GenerateItem> items;
  for (const PyGenerateRequest& r : requests) {
    items.push_back(make_item(model, r, prefixes[items.size()]));
  }
  return items;
}

}  // namespace

int checked_batch(std::optional<int> max_batch) {
  if (max_batch && *max_batch < 1) {
    throw InvalidInputError("cannot generate with max_batch=" + std::to_string(*max_batch) +
                            ": it must be at least 1, or None for 64");
  }
  return max_batch.value_or(0);
}

const char* name(Finish finish) { return finish == Finish::kStop ? "stop" : "length"; }

py::list generate_face(const PyModel& model, const std::vector<PyGenerateRequest>& requests,
                       const py::object& on_token, std::optional<int> max_batch) {
  const std::shared_ptr<Engine> engine = model.open();
  const std::vector<GenerateItem> items = make_items(model, requests);
  const int batch = checked_batch(max_batch);
  OnToken callback;
  if (!on_token.is_none()) {
    callback = [&](size_t request, int32_t id, float logprob) {
      const py::gil_scoped_acquire gil;
      on_token(request, id, logprob);
    };
  }
  std::vector<Completion> completions;
  {
    const WithoutGil nogil;
    completions = generate(engine, items, batch, callback);
  }
  py::list out;
  for (Completion& completion : completions) out.append(std::move(completion));
  return out;
}

}  // namespace tinyloop

namespace py = pybind11;

void bind_generation(py::module_& m) {
  using namespace tinyloop;
  using namespace py::literals;
  py::class_<PyGenerateRequest> request(m, "GenerateRequest");
  require_constructor(request);
  request.def(py::init(&make_request), "token_ids"_a, "max_new_tokens"_a, py::kw_only(),
              "prefix"_a = py::none(), "depth"_a = py::none(), "temperature"_a = 0.0, "top_k"_a = 0,
              "top_p"_a = 1.0, "min_p"_a = 0.0, "repetition_penalty"_a = 1.0,
              "stop_ids"_a = py::none(), "seed"_a = 0, "exit_threshold"_a = py::none(),
              "min_depth"_a = 1);
  py::class_<Completion> completion(m, "Completion");
  refuse_new(completion);
  completion
      .def_property_readonly(
          "token_ids", [](const Completion& c) { return array_of(c.ids); },
          "int32: generated ids, a stop id included.")
      .def_property_readonly(
          "logprobs", [](const Completion& c) { return array_of(c.logprobs); },
          "float32: natural-log probability of each under the model's own distribution.")
      .def_property_readonly(
          "depths", [](const Completion& c) { return array_of(c.depths); },
          "int32: loops that the row which predicted each id ran.")
      .def_property_readonly(
          "finish_reason", [](const Completion& c) { return name(c.finish); },
          "\"stop\" after a stop id, \"length\" after max_new_tokens.");
}
