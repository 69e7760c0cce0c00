#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace brim::python {

namespace py = pybind11;

/// For `def` of a struct's class: Python pickles and copies it as a tuple of these members.
template <class T, class... Owners, class... Types>
auto pickled(Types Owners::*... members) {
  // Enums as numbers: not all of them are known to Python.
  const auto saved = []<class Type>(const Type& value) {
    if constexpr (std::is_enum_v<Type>) {
      return static_cast<std::int64_t>(value);
    } else {
      return value;
    }
  };
  const auto loaded = []<class Type>(const py::handle& value, Type& into) {
    if constexpr (std::is_enum_v<Type>) {
      into = static_cast<Type>(value.cast<std::int64_t>());
    } else {
      into = value.cast<Type>();
    }
  };
  return py::pickle(
      [saved, members...](const T& from) { return py::make_tuple(saved(from.*members)...); },
      [loaded, members...](const py::tuple& state) {
        T made{};
        std::size_t place = 0;
        (loaded(state[place++], made.*members), ...);
        return made;
      });
}

}  // namespace brim::python
