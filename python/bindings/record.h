#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <type_traits>

namespace brim::python {

namespace py = pybind11;

template <class T, class Owner>
struct Field {
  /// Enums are pickled as numbers: not all of them are known to Python.
  using Pickled = typename std::conditional_t<std::is_enum_v<T>, std::underlying_type<T>,
                                              std::type_identity<T>>::type;
  const char* name;
  T Owner::* member;
  const char* doc;

  Pickled save(const Owner& from) const { return static_cast<Pickled>(from.*member); }
  void load(Owner& into, const py::handle& saved) const {
    into.*member = static_cast<T>(saved.cast<Pickled>());
  }
};

/// @param name null: a copy has it too, but Python cannot read it as it is.
template <class T, class Owner>
Field<T, Owner> field(const char* name, T Owner::* member, const char* doc = "") {
  return {name, member, doc};
}

/// The class of a struct, to which the rest is added. Python reads its fields, and pickles and
/// copies it as a tuple of them.
template <class T, class... Fields>
py::class_<T> record(py::module_& m, const char* name, const char* doc, const Fields&... fields) {
  py::class_<T> made(m, name, doc);
  const auto readable = [&](const auto& one) {
    if (one.name != nullptr) {
      made.def_readonly(one.name, one.member, one.doc);
    }
  };
  (readable(fields), ...);
  made.def(py::pickle([fields...](const T& from) { return py::make_tuple(fields.save(from)...); },
                      [fields...](const py::tuple& saved) {
                        T read{};
                        std::size_t place = 0;
                        (fields.load(read, saved[place++]), ...);
                        return read;
                      }));
  return made;
}

}  // namespace brim::python
