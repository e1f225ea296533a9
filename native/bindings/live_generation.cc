// A batch of requests that lives between its steps, for Python.
#include <pybind11/stl.h>

#include <chrono>

#include "bindings.h"
#include "generate_batch.h"
#include "generation.h"
#include "making.h"
#include "running_calls.h"

namespace tinyloop {

namespace {

// A live batch for Python. The model stays as it is: closing it makes the calls of this one raise.
struct PyGeneration {
  PyModel model;
  std::shared_ptr<GenerateBatch> batch;  // null once closed

  // The batch, to be held over a call: another thread may close this face.
  std::shared_ptr<GenerateBatch> open() const {
    if (!batch) throw ClosedHandleError("cannot use the generation: it was closed");
    model.open();
    return batch;
  }
  void close() {
    if (!batch) return;
    std::shared_ptr<GenerateBatch> last = std::move(batch);
    batch.reset();
    const BrieflyWithoutGil nogil;  // joins the compute threads if this was the last owner
    last.reset();
  }
};

// What steps brought, in arrays.
struct PyGenerationStep {
  Array<int64_t> keys;
  Array<int32_t> token_ids;
  Array<float> logprobs;
  Array<int32_t> depths;
  py::list finished;
  py::list failed;
};

py::object as_python(const std::exception_ptr& fault) {
  const py::module_ core = py::module_::import("tinyloop.native._core");
  try {
    std::rethrow_exception(fault);
  } catch (const OutOfMemoryError& error) {
    return core.attr("OutOfMemoryError")(error.what());
  } catch (const Error& error) {
    return core.attr("TinyLoopError")(error.what());
  }
}

PyGenerationStep as_arrays(const GenerateEvents& events) {
  PyGenerationStep out;
  const auto n = static_cast<py::ssize_t>(events.tokens.size());
  out.keys = Array<int64_t>(n);
  out.token_ids = Array<int32_t>(n);
  out.logprobs = Array<float>(n);
  out.depths = Array<int32_t>(n);
  for (py::ssize_t i = 0; i < n; ++i) {
    const GeneratedToken& token = events.tokens[static_cast<size_t>(i)];
    out.keys.mutable_data()[i] = static_cast<int64_t>(token.key);
    out.token_ids.mutable_data()[i] = token.id;
    out.logprobs.mutable_data()[i] = token.logprob;
    out.depths.mutable_data()[i] = token.depth;
  }
  for (const auto& [key, completion] : events.finished) {
    out.finished.append(py::make_tuple(key, name(completion.finish)));
  }
  for (const auto& [key, fault] : events.failed) {
    out.failed.append(py::make_tuple(key, as_python(fault)));
  }
  return out;
}

size_t add_request(const PyGeneration& face, const py::object& token_ids, int max_new_tokens,
                   const std::optional<PyPrefix>& prefix, std::optional<int> depth,
                   double temperature, int64_t top_k, double top_p, double min_p,
                   double repetition_penalty, const std::optional<std::vector<int32_t>>& stop_ids,
                   uint64_t seed, std::optional<double> exit_threshold, int min_depth) {
  const std::shared_ptr<GenerateBatch> batch = face.open();
  const PyGenerateRequest request =
      make_request(token_ids, max_new_tokens, prefix, depth, temperature, top_k, top_p, min_p,
                   repetition_penalty, stop_ids, seed, exit_threshold, min_depth);
  const GenerateItem item = make_item(face.model, request, prefix ? prefix->open() : nullptr);
  const ForwardGuard guard(*face.model.open());
  return batch->add(item);
}

bool cancel_request(const PyGeneration& face, size_t key) {
  const std::shared_ptr<GenerateBatch> batch = face.open();
  const ForwardGuard guard(*face.model.open());
  return batch->cancel(key);
}

void put_all_back(const PyGeneration& face) {
  const std::shared_ptr<GenerateBatch> batch = face.open();
  const ForwardGuard guard(*face.model.open());
  batch->put_back();
}

PyGenerationStep step_for(const PyGeneration& face, double seconds) {
  if (!(seconds >= 0.0)) {
    throw InvalidInputError("cannot generate for " + std::to_string(seconds) +
                            " seconds: it must be 0 or more");
  }
  const std::shared_ptr<GenerateBatch> batch = face.open();
  const std::shared_ptr<Engine> engine = face.model.open();
  GenerateEvents events;
  {
    const WithoutGil nogil;
    const ForwardGuard guard(*engine);
    const auto begin = std::chrono::steady_clock::now();
    const auto past = [&] { return std::chrono::steady_clock::now() - begin; };
    while (batch->step() && std::chrono::duration<double>(past()).count() < seconds) {
    }
    events = batch->take_events();
  }
  return as_arrays(events);
}

void bind_step(py::module_& m) {
  using namespace py::literals;
  py::class_<PyGenerationStep> step(m, "GenerationStep");
  refuse_new(step);
  step.def_property_readonly(
          "keys", [](const PyGenerationStep& s) { return s.keys; },
          "int64 [n]: the request of each id that came, in the order in which they came.")
      .def_property_readonly(
          "token_ids", [](const PyGenerationStep& s) { return s.token_ids; }, "int32 [n].")
      .def_property_readonly(
          "logprobs", [](const PyGenerationStep& s) { return s.logprobs; },
          "float32 [n]: natural-log probability of each under the model's own distribution.")
      .def_property_readonly(
          "depths", [](const PyGenerationStep& s) { return s.depths; },
          "int32 [n]: loops that the row which predicted each id ran.")
      .def_property_readonly(
          "finished", [](const PyGenerationStep& s) { return s.finished; },
          "(key, \"stop\" or \"length\") of each request that ended well.")
      .def_property_readonly(
          "failed", [](const PyGenerationStep& s) { return s.failed; },
          "(key, error) of each that did not: OutOfMemoryError where it does not fit alone, "
          "TinyLoopError where its logits have no number. The others go on.");
}

void bind_live(py::module_& m) {
  using namespace py::literals;
  py::class_<PyGeneration> live(
      m, "Generation",
      "A batch that requests join and leave between its steps. What a request comes to depends on "
      "itself alone: not on when it joined, on its mates, or on what the model did meanwhile.");
  refuse_new(live);
  live.def("add", &add_request, "token_ids"_a, "max_new_tokens"_a, py::kw_only(),
           "prefix"_a = py::none(), "depth"_a = py::none(), "temperature"_a = 0.0, "top_k"_a = 0,
           "top_p"_a = 1.0, "min_p"_a = 0.0, "repetition_penalty"_a = 1.0,
           "stop_ids"_a = py::none(), "seed"_a = 0, "exit_threshold"_a = py::none(),
           "min_depth"_a = 1,
           "Takes a request in and returns its key. Parameters and errors are those of "
           "GenerateRequest and Model.generate; a refused request changes nothing.")
      .def("cancel", &cancel_request, "key"_a,
           "Forgets a request and frees its memory; False if it had ended.")
      .def("step", &step_for, "seconds"_a = 0.0,
           "Runs one step at least, and more until that time is over or nothing is left to do. "
           "What came until an error that it raises is in the next one's answer.")
      .def("put_back", &put_all_back,
           "Frees the memory of all sequences but those with an early exit; they are computed "
           "again when they go on, to the same numbers.")
      .def_property_readonly(
          "running", [](const PyGeneration& g) { return g.open()->running(); },
          "Requests that hold memory.")
      .def_property_readonly(
          "waiting", [](const PyGeneration& g) { return g.open()->waiting(); },
          "Requests that wait for a place or for memory.")
      .def_property_readonly("closed", [](const PyGeneration& g) { return !g.batch; })
      .def("close", &PyGeneration::close, "Forgets every request and frees their memory.")
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyGeneration& g, const py::args&) { g.close(); });
}

PyGeneration start_live(const PyModel& model, std::optional<int> max_batch) {
  return {model, start_batch(model.open(), checked_batch(max_batch))};
}

}  // namespace

}  // namespace tinyloop

namespace py = pybind11;

void bind_live_generation(py::module_& m) {
  tinyloop::bind_step(m);
  tinyloop::bind_live(m);
}

void tinyloop::bind_start_of_generation(py::class_<PyModel>& model) {
  model.def("generation", &start_live, py::arg("max_batch") = py::none());
}
