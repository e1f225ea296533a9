// PrefixCache and ResumeHandle for Python.
#include <pybind11/stl.h>

#include "arrays.h"
#include "bindings.h"
#include "faces.h"
#include "making.h"
#include "running_calls.h"

namespace tinyloop {

namespace {

PyPrefix upgrade_face(const PyPrefix& prefix, int depth, const std::optional<PyPrefix>& parent) {
  const std::shared_ptr<PrefixState> state = prefix.open();
  const std::shared_ptr<PrefixState> base = parent ? parent->open() : nullptr;
  const WithoutGil nogil;
  return {upgrade_prefix(state, depth, base)};
}

}  // namespace

std::vector<std::shared_ptr<PrefixState>> open_all(
    const std::vector<std::optional<PyPrefix>>& prefixes, const char* whose) {
  std::vector<std::shared_ptr<PrefixState>> states;
  for (const std::optional<PyPrefix>& prefix : prefixes) {
    if (!prefix) {
      states.push_back(nullptr);
      continue;
    }
    const std::string what = "the prefix of " + (whose + (" " + std::to_string(states.size())));
    states.push_back(prefix->open(what));
  }
  return states;
}

// Other threads may read a handle while its upgrade computes: only with the GIL does it change.
void upgrade_without_gil(const std::shared_ptr<Engine>& engine,
                         const std::vector<std::shared_ptr<ResumeState>>& handles, int depth,
                         const std::vector<std::shared_ptr<PrefixState>>* prefixes) {
  std::function<void()> commit;
  {
    const WithoutGil nogil;
    commit = compute_upgrade(engine, handles, depth, prefixes);
  }
  commit();
}

namespace {

void upgrade_one(const PyResume& handle, int depth, const std::optional<PyPrefix>& prefix) {
  const std::vector<std::shared_ptr<ResumeState>> handles{handle.open()};
  const std::vector<std::shared_ptr<PrefixState>> prefixes{prefix ? prefix->open() : nullptr};
  const std::shared_ptr<Engine> engine = handles[0]->rows->engine;
  upgrade_without_gil(engine, handles, depth, &prefixes);
}

template <typename Face>
void bind_lifetime(py::class_<Face>& face) {
  face.def_property_readonly("closed", [](const Face& f) { return !f.state; })
      .def(
          "close", [](Face& f) { f.state.reset(); },
          "Gives the handle up; its memory goes when nothing else needs it.")
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](Face& f, const py::args&) { f.state.reset(); });
}

void bind_prefix(py::module_& m) {
  py::class_<PyPrefix> face(
      m, "PrefixCache",
      "The prefilled state of a token prefix at one depth. Immutable; any number of "
      "requests may share it.");
  face.def_property_readonly(
          "length", [](const PyPrefix& p) { return p.open()->length(); },
          "Tokens from position 0, parents included.")
      .def_property_readonly(
          "own_length", [](const PyPrefix& p) { return p.open()->own_length(); },
          "Tokens after the parent's.")
      .def_property_readonly(
          "depth", [](const PyPrefix& p) { return p.open()->depth; }, "Loops it was built with.")
      .def_property_readonly(
          "upgradable", [](const PyPrefix& p) { return p.open()->states != nullptr; },
          "Whether it kept the states that upgrade() goes on from.")
      .def_property_readonly(
          "bytes", [](const PyPrefix& p) { return p.open()->bytes(); },
          "Bytes of its own tokens, parents excluded; what it shares with the prefix that it was "
          "upgraded from counts for both.")
      .def_property_readonly(
          "token_ids", [](const PyPrefix& p) { return array_of(p.open()->all_ids()); },
          "int32: ids from position 0, parents included.")
      .def("upgrade", &upgrade_face, py::arg("depth"), py::arg("parent") = py::none());
  bind_lifetime(face);
  refuse_new(face);
}

void bind_resume(py::module_& m) {
  py::class_<PyResume> face(m, "ResumeHandle",
                            "Scored ids that can go deeper later, at the price of the missing "
                            "loops.");
  face.def_property_readonly("depth", [](const PyResume& r) { return r.open()->depth(); })
      .def_property_readonly("max_depth", [](const PyResume& r) { return r.open()->max_depth; })
      .def_property_readonly(
          "length", [](const PyResume& r) { return r.open()->rows->length(); },
          "Tokens from position 0 whose states are kept: all but the last.")
      .def_property_readonly("bytes", [](const PyResume& r) { return r.open()->bytes(); })
      .def_property_readonly(
          "logprobs", [](const PyResume& r) { return array_of(r.open()->logprobs); },
          "float32 [n_scored]: of the scored ids, at the present depth.")
      .def_property_readonly(
          "greedy",
          [](const PyResume& r) {
            const std::vector<uint8_t>& flags = r.open()->greedy;
            Array<bool> greedy(static_cast<py::ssize_t>(flags.size()));
            for (size_t i = 0; i < flags.size(); ++i) greedy.mutable_data()[i] = flags[i] != 0;
            return greedy;
          },
          "bool [n_scored]: the id is the argmax.")
      .def("upgrade", &upgrade_one, py::arg("depth"), py::arg("prefix") = py::none())
      .def("prefix", [](const PyResume& r) { return PyPrefix{r.open()->as_prefix()}; });
  bind_lifetime(face);
  refuse_new(face);
}

}  // namespace

}  // namespace tinyloop

namespace py = pybind11;

void bind_handles(py::module_& m) {
  tinyloop::bind_prefix(m);
  tinyloop::bind_resume(m);
}
