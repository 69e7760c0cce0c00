#pragma once

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <string>

namespace brim::python {

/// Sizes as Python code has them, one at a time. `what` and `place` go into the error, as in "sizes
/// … at index 7".
struct NumberPlace {
  const char* what;
  const char* place;
  std::int64_t index;
};

[[noreturn]] inline void not_a_number(PyObject* value, const NumberPlace& at) {
  PyErr_Clear();
  TORCH_CHECK_TYPE(false, at.what, " must be ints or floats, got ",
                   pybind11::repr(pybind11::handle(value)).cast<std::string>(), " at ", at.place,
                   " ", at.index);
}

/// An int that fits 64 bits. @throws c10::TypeError, c10::ValueError.
inline std::int64_t whole_number(PyObject* value, const NumberPlace& at) {
  int overflow = 0;
  long long result = 0;
  if (PyLong_Check(value)) {
    result = PyLong_AsLongLongAndOverflow(value, &overflow);
  } else {
    const auto number = pybind11::reinterpret_steal<pybind11::object>(PyNumber_Index(value));
    if (!number) {
      not_a_number(value, at);
    }
    result = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  }
  TORCH_CHECK_VALUE(overflow == 0, at.what, " must fit 64 bits, got ",
                    pybind11::str(pybind11::handle(value)).cast<std::string>(), " at ", at.place,
                    " ", at.index);
  return result;
}

/// Whether a number is whole by its type.
inline bool is_whole(PyObject* value) { return PyLong_Check(value) || PyIndex_Check(value) != 0; }

/// Any real number. @throws c10::TypeError for what is none, text included; c10::ValueError for an
/// int that a double cannot hold exactly.
inline double real_number(PyObject* value, const NumberPlace& at) {
  if (PyFloat_Check(value)) {
    return PyFloat_AS_DOUBLE(value);
  }
  if (is_whole(value)) {
    const std::int64_t whole = whole_number(value, at);
    TORCH_CHECK_VALUE(std::abs(static_cast<double>(whole)) <= 0x1p53, at.what,
                      " must not exceed 2^53, got ", whole, " at ", at.place, " ", at.index);
    return static_cast<double>(whole);
  }
  if (PyNumber_Check(value) == 0) {
    not_a_number(value, at);
  }
  const auto number = pybind11::reinterpret_steal<pybind11::object>(PyNumber_Float(value));
  if (!number) {
    not_a_number(value, at);
  }
  return PyFloat_AS_DOUBLE(number.ptr());
}

/// The same, finite and not negative.
inline double size_number(PyObject* value, const NumberPlace& at) {
  const double size = real_number(value, at);
  TORCH_CHECK_VALUE(size >= 0 && std::isfinite(size), at.what,
                    " must be finite and not negative, got ", size, " at ", at.place, " ",
                    at.index);
  return size;
}

}  // namespace brim::python
