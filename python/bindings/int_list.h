#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace brim::python {

/// A list of ints; null with Python's error set where that fails.
inline PyObject* as_list(std::span<const std::int64_t> numbers) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(numbers.size()));
  if (list == nullptr) {
    return nullptr;
  }
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    PyObject* number = PyLong_FromLongLong(numbers[i]);
    if (number == nullptr) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), number);
  }
  return list;
}

}  // namespace brim::python
