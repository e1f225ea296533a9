// How instances of bound classes come to be. Left alone, Class.__new__(Class), which is also what
// copy.copy() calls, would give an object with nothing behind it, and its first use would read
// memory that nobody wrote. Every bound class calls one of these two.
#pragma once

#include <pybind11/pybind11.h>

namespace tinyloop {

inline void set_new(const pybind11::object& type, newfunc make) {
  auto* const python_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  python_type->tp_new = make;
  PyType_Modified(python_type);
}

// For classes whose instances only the engine makes.
inline void refuse_new(const pybind11::object& type) {
  set_new(type, [](PyTypeObject* wanted, PyObject*, PyObject*) -> PyObject* {
    PyErr_Format(PyExc_TypeError, "cannot create a %s: the engine's calls make them",
                 wanted->tp_name);
    return nullptr;
  });
}

// For classes with a constructor: Class(...) works, Class.__new__() does not. That the class has a
// way to allocate of its own is enough: Python then refuses the inherited __new__.
inline void require_constructor(const pybind11::object& type) {
  set_new(type, [](PyTypeObject* wanted, PyObject*, PyObject*) -> PyObject* {
    return pybind11::detail::make_new_instance(wanted);
  });
}

}  // namespace tinyloop
