// The extension module: errors first, then the model, then its handles.
#include <pybind11/pybind11.h>

#include "bindings.h"
#include "tinyloop/errors.h"

namespace py = pybind11;

namespace {

template <typename E>
void add_error(py::module_& m, const char* name, py::handle base) {
  py::register_exception<E>(m, name, base);
}

// The tree of include/tinyloop/errors.h, name for name.
void bind_errors(py::module_& m) {
  // pybind11 tries translators newest first, so the base comes before what derives from it.
  const auto& base = py::register_exception<tinyloop::Error>(m, "TinyLoopError");
  add_error<tinyloop::LoadError>(m, "LoadError", base);
  add_error<tinyloop::OutOfMemoryError>(m, "OutOfMemoryError", base);
  add_error<tinyloop::RowBudgetError>(m, "RowBudgetError", base);
  add_error<tinyloop::ConcurrentUseError>(m, "ConcurrentUseError", base);
  add_error<tinyloop::ClosedHandleError>(m, "ClosedHandleError", base);
  add_error<tinyloop::MismatchError>(m, "MismatchError", base);
  add_error<tinyloop::DeviceError>(m, "DeviceError", base);
  add_error<tinyloop::InvalidInputError>(m, "InvalidInputError",
                                         py::make_tuple(base, py::handle(PyExc_ValueError)));
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "TinyLoop's engine. Use tinyloop.native, which documents these names.";
  bind_errors(m);
  bind_handles(m);
  bind_scoring(m);
  bind_generation(m);
  bind_live_generation(m);
  bind_model(m);
  bind_pool(m);
  bind_sampling(m);
  bind_pool_ledger(m);
}
