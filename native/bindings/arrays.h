// NumPy arrays in and out, checked and never copied on the way in.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

namespace tinyloop {

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// A one-dimensional C-contiguous array of exactly this type, not copied. Read-only is fine: that is
// what a shared object store hands out.
template <typename T>
Array<T> require(const py::object& object, const char* name) {
  const std::string wanted = py::str(py::dtype::of<T>());
  if (!py::isinstance<py::array>(object)) {
    throw py::type_error(std::string(name) + " must be a numpy array of " + wanted + ", found " +
                         std::string(py::str(py::type::of(object))));
  }
  const auto array = py::reinterpret_borrow<py::array>(object);
  const bool contiguous = (array.flags() & py::array::c_style) != 0;
  // Equal, not identical: an array that came through a pickle has a dtype object of its own.
  if (!array.dtype().equal(py::dtype::of<T>()) || array.ndim() != 1 || !contiguous) {
    throw py::type_error(std::string(name) + " must be a contiguous array of " + wanted +
                         " with one axis, found " + std::string(py::str(array.dtype())) + " with " +
                         std::to_string(array.ndim()) + " axes");
  }
  return py::reinterpret_borrow<Array<T>>(object);
}

template <typename T>
Array<T> array_of(const std::vector<T>& values) {
  return Array<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace tinyloop
