#pragma once

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "interpreter.h"

namespace brim::python {

/// Where a number stands, for errors: an argument by its name, an item of a list also by its place,
/// as in "sizes … at index 7".
struct NumberPlace {
  const char* what;
  const char* place = nullptr;
  std::int64_t index = 0;

  std::string suffix() const {
    return place == nullptr ? "" : std::string(" at ") + place + " " + std::to_string(index);
  }
};

[[noreturn]] inline void not_a_number(PyObject* value, const NumberPlace& at, const char* must) {
  PyErr_Clear();
  TORCH_CHECK_TYPE(false, at.what, " must be ", must, ", got ",
                   invoke(provided("shown"), pybind11::handle(value)).cast<std::string>(),
                   at.suffix());
}

/// An int that fits 64 bits; empty for what is no int, bools included. Tensors claim to be an index
/// whatever they hold, so they are asked. @throws c10::ValueError for one that does not fit, which
/// says what the number `must` be.
inline std::optional<std::int64_t> whole_if_any(PyObject* value, const NumberPlace& at,
                                                const char* must = "fit 64 bits") {
  if (PyIndex_Check(value) == 0 || PyBool_Check(value)) {
    return std::nullopt;
  }
  pybind11::object index;  // of an int it is the value itself: not made anew for millions of them
  if (!PyLong_Check(value)) {
    index = pybind11::reinterpret_steal<pybind11::object>(
        entering_python([&] { return PyNumber_Index(value); }));
    if (!index) {
      PyErr_Clear();
      return std::nullopt;
    }
  }
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(index ? index.ptr() : value, &overflow);
  TORCH_CHECK_VALUE(overflow == 0, at.what, " must ", must, ", got ",
                    pybind11::str(pybind11::handle(value)).cast<std::string>(), at.suffix());
  return result;
}

/// The same, where it must be one. @throws c10::TypeError, c10::ValueError.
inline std::int64_t whole_number(PyObject* value, const NumberPlace& at,
                                 const char* must = "fit 64 bits") {
  const auto whole = whole_if_any(value, at, must);
  if (!whole) {
    not_a_number(value, at, at.place == nullptr ? "an int" : "ints");
  }
  return *whole;
}

/// Any real number. @throws c10::TypeError for what is none, text and bools included;
/// c10::ValueError for an int that a double cannot hold exactly.
inline double real_number(PyObject* value, const NumberPlace& at) {
  if (PyFloat_Check(value)) {
    return PyFloat_AS_DOUBLE(value);
  }
  if (const auto whole = whole_if_any(value, at)) {
    TORCH_CHECK_VALUE(std::abs(static_cast<double>(*whole)) <= 0x1p53, at.what,
                      " must not exceed 2^53, got ", *whole, at.suffix());
    return static_cast<double>(*whole);
  }
  if (PyNumber_Check(value) == 0 || PyBool_Check(value)) {
    not_a_number(value, at, "ints or floats");
  }
  const auto number = pybind11::reinterpret_steal<pybind11::object>(PyNumber_Float(value));
  if (!number) {
    not_a_number(value, at, "ints or floats");
  }
  return PyFloat_AS_DOUBLE(number.ptr());
}

/// The same, finite and not negative.
inline double size_number(PyObject* value, const NumberPlace& at) {
  const double size = real_number(value, at);
  TORCH_CHECK_VALUE(size >= 0 && std::isfinite(size), at.what,
                    " must be finite and not negative, got ", size, at.suffix());
  return size;
}

}  // namespace brim::python
