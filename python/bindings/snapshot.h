#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace brim::python {

/// What a call of a module works with, as it is before the call: the call can be made again with
/// copies of it, whatever the program has changed since, and nobody sees what the second call
/// changes. Tensors are not copied. Modules are, as torch's DataParallel does it, since others may
/// use them at the same time.
///
/// To take one is a walk that makes no objects of Python, since few calls are made again: copies
/// would take four times as long, and the garbage collector would go through them. The caller holds
/// the GIL, also when it ends.
class Snapshot {
 public:
  /// Once, before the first of them.
  static void set_up();

  Snapshot() = default;
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;
  ~Snapshot();

  /// A module and those inside of it. @returns false if it cannot be called again: compiled ones
  /// (TorchScript) and those with `__slots__` hold their state elsewhere, and for those that talk
  /// to other processes (SyncBatchNorm) all of these would have to run again.
  [[nodiscard]] bool add_module(PyObject* module);

  /// Its arguments, after the module.
  void add_arguments(PyObject* const* values, Py_ssize_t count);
  /// @param names a tuple, or null for none
  void add_named(PyObject* names, PyObject* const* values);

  /// After the call: the tensors in all of that, which are not held any longer; none if one was
  /// written to. Not the statistics of norms, to which a call in training writes, also without
  /// autograd's knowledge: its values do not depend on them.
  [[nodiscard]] std::optional<std::vector<at::Tensor>> take_unchanged();

  /// Lists, dicts, tuples and modules are new, also in bound methods, tensors have no past, and
  /// anything else is itself.
  struct Copies {
    std::vector<pybind11::object> modules;  // the one that is called, and those inside of it
    pybind11::object args;                  // a tuple
    pybind11::object kwargs;                // a dict
  };
  [[nodiscard]] Copies copies() const;

  /// After the call with them: modules that lead back to themselves, as those that hold one of
  /// their methods do, wait for the garbage collector. Until then they do without what the call
  /// left in them, which may be all that it computed.
  void end(Copies copies) const;

 private:
  class Copier;

  enum class Kind : std::uint8_t {
    itself,
    list,
    tuple,
    dict,
    ordered_dict,
    module,
    method,  // bound to a module
    again    // a module, list or dict that has an entry of its own
  };

  /// Nothing that the call may change is held: what it leaves there may lead back to whoever holds
  /// this. Of what has parts `count` entries follow, each with its own: of dicts and modules names
  /// and values by turns.
  struct Entry {
    Kind kind = Kind::itself;
    PyObject* held = nullptr;     // itself; of a module its class, of a method its function
    const void* which = nullptr;  // module, list or dict: its address then
    std::size_t count = 0;
  };

  struct Part {
    at::Tensor tensor;
    std::int64_t version = 0;
  };

  [[nodiscard]] bool find_modules(PyObject* module);
  void add_entry(const Entry& entry);
  void add_itself(PyObject* value) { add_entry({.held = value}); }
  void add(PyObject* value);
  void add_items(PyObject* dict);
  void add_tensor(PyObject* value);
  void add_attributes(PyObject* module);

  std::vector<Entry> entries_;
  std::vector<Part> parts_;
  std::vector<PyObject*> modules_;         // while they are found
  std::unordered_set<const void*> known_;  // modules, lists and dicts
  // Tensors, and what stands for them without their past: one that comes twice stays one, since
  // code asks `if query is key` (nn.MultiheadAttention does).
  std::unordered_map<const void*, PyObject*> alone_;
  bool are_statistics_ = false;  // what is added now
};

}  // namespace brim::python
