#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace brim::python {

/// Copies of what a call of a module works with, as it is before the call: the call can be made
/// again with them, whatever the program has changed since, and nobody sees what the second call
/// changes. Tensors are not copied. Modules are, as torch's DataParallel does it, since others may
/// use them at the same time.
class Copies {
 public:
  /// Once, before the first of them.
  static void set_up();

  /// A module and those inside of it. None if it cannot be called again: compiled ones
  /// (TorchScript) and those with `__slots__` hold their state elsewhere, and for those that talk
  /// to other processes (SyncBatchNorm) all of these would have to run again.
  [[nodiscard]] std::optional<pybind11::object> of_module(PyObject* module);

  /// Lists, dicts and tuples with copies of what is in them, tensors without their past, anything
  /// else itself. Modules of which there is a copy become that one, also in bound methods.
  [[nodiscard]] pybind11::object of(PyObject* value);

  /// The tensors in all of that; none if one was written to since. Not the statistics of norms,
  /// to which a call in training writes, also without autograd's knowledge: its values do not
  /// depend on them.
  [[nodiscard]] std::optional<std::vector<at::Tensor>> unchanged() const;

 private:
  struct Part {
    at::Tensor tensor;
    std::int64_t version = 0;
  };

  [[nodiscard]] bool add(PyObject* module);
  void fill(PyObject* module, PyObject* copy);
  [[nodiscard]] pybind11::object of_tensor(PyObject* value);
  [[nodiscard]] pybind11::object of_dict(PyObject* value, pybind11::object copy);

  std::unordered_map<PyObject*, pybind11::object> made_;  // of modules, lists and dicts
  std::vector<std::pair<PyObject*, PyObject*>> modules_;  // each with its copy
  std::vector<Part> parts_;
  bool are_statistics_ = false;  // what is copied now
};

}  // namespace brim::python
