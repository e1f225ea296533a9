// The sampler's private face: one draw, for tests.
#include "sampling.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "bindings.h"
#include "tinyloop/errors.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
std::span<const T> view(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

py::tuple sample_one(const Array<float>& logits, const Array<int32_t>& seen,
                     const tinyloop::SamplingOptions& options, tinyloop::SampleKey key) {
  tinyloop::check_sampling(options);
  if (logits.size() == 0) throw tinyloop::InvalidInputError("cannot sample from 0 logits");
  tinyloop::SampleScratch scratch;
  const auto found = tinyloop::sample(view(logits), options, view(seen), key, scratch);
  return py::make_tuple(found.id, found.logprob);
}

}  // namespace

void bind_sampling(py::module_& m) {
  m.def(
      "_sample",
      [](const Array<float>& logits, const Array<int32_t>& seen, double repetition_penalty,
         double temperature, int64_t top_k, double top_p, double min_p, uint64_t seed,
         uint64_t position) {
        return sample_one(logits, seen, {repetition_penalty, temperature, top_k, top_p, min_p},
                          {seed, position});
      },
      "logits"_a.noconvert(), "seen"_a.noconvert(), py::kw_only(), "repetition_penalty"_a = 1.0,
      "temperature"_a = 0.0, "top_k"_a = 0, "top_p"_a = 1.0, "min_p"_a = 0.0, "seed"_a = 0,
      "position"_a = 0);
}
