#pragma once

#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <cstddef>

#include "adaptive_config.h"
#include "interpreter.h"

namespace brim::python {

/// Arguments with some values replaced or added, ready for another vectorcall.
class ChangedArguments {
 public:
  /// @param front how many values are added ahead of the others, behind the instance of a method.
  ChangedArguments(const CallArguments& original, std::size_t front)
      : receivers_(static_cast<std::size_t>(original.receivers)),
        front_(front),
        positional_(static_cast<std::size_t>(original.positional) + front) {
    values_.resize(1, nullptr);  // one slot ahead of the arguments, which a callee may borrow
    values_.append(original.values, original.values + receivers_);
    values_.append(front, nullptr);
    values_.append(original.values + receivers_, original.values + original.count());
    names_ = pybind11::reinterpret_borrow<pybind11::object>(original.names);  // perhaps null
  }

  void set_front(std::size_t i, PyObject* value) { values_[1 + receivers_ + i] = value; }
  /// Another value for an original one that is no receiver.
  void set(Py_ssize_t original_index, PyObject* value) {
    values_[1 + front_ + static_cast<std::size_t>(original_index)] = value;
  }

  /// Appends a keyword argument; returns its index for `set`.
  Py_ssize_t add_keyword(const pybind11::object& name) {
    const pybind11::object added = pybind11::make_tuple(name);
    names_ = names_ ? names_ + added : added;
    values_.push_back(nullptr);
    return static_cast<Py_ssize_t>(values_.size() - 2 - front_);
  }

  PyObject* call(PyObject* function) const {
    return entering_python([&] {
      return PyObject_Vectorcall(function, values_.data() + 1,
                                 positional_ | PY_VECTORCALL_ARGUMENTS_OFFSET, names_.ptr());
    });
  }

 private:
  std::size_t receivers_;
  std::size_t front_;
  std::size_t positional_;
  c10::SmallVector<PyObject*, 16> values_;
  pybind11::object names_;  // a tuple, or null
};

}  // namespace brim::python
