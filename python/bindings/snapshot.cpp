#include "snapshot.h"

#include <brim/nn/block.h>
#include <brim/nn/rehearsal.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "bindings.h"
#include "interpreter.h"

namespace brim::python {
namespace {

// Classes of torch.
PyTypeObject* modules = nullptr;
PyTypeObject* scripted = nullptr;
PyTypeObject* synchronised = nullptr;
PyTypeObject* norms = nullptr;

// Names: flags, and tables of hooks, which stay themselves. Those of a forward do not: a program
// may take its hooks away after the forward, or a hook may take itself away.
PyObject* of_every_module = nullptr;

/// Whether it has state that is not in its attributes: `__slots__`, or that of a base in C.
bool has_more_than_attributes(PyObject* module) {
  return Py_TYPE(module)->tp_basicsize != modules->tp_basicsize;
}

bool is_a(PyObject* object, PyTypeObject* kind) {
  return PyType_IsSubtype(Py_TYPE(object), kind) != 0;
}

py::object owned(PyObject* object) {
  if (object == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(object);
}

py::object attributes_of(PyObject* module) {
  return owned(PyObject_GenericGetDict(module, nullptr));
}

/// As `object.__setattr__` does: PyObject_GenericSetDict of Python 3.13 leaves an object without
/// any.
void set_attributes(const py::object& module, const py::object& attributes) {
  static PyObject* const name = PyUnicode_InternFromString("__dict__");
  if (PyObject_GenericSetAttr(module.ptr(), name, attributes.ptr()) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace

void Snapshot::set_up() {
  const auto class_of = [](const char* module, const char* name) {
    return reinterpret_cast<PyTypeObject*>(
        attribute(py::module_::import(module), name).release().ptr());
  };
  modules = class_of("torch.nn", "Module");
  scripted = class_of("torch.jit", "ScriptModule");
  synchronised = class_of("torch.nn", "SyncBatchNorm");
  norms = class_of("torch.nn.modules.batchnorm", "_NormBase");
  const py::object plain = attributes_of(
      py::reinterpret_steal<py::object>(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(modules)))
          .ptr());
  py::set names(plain);
  for (const char* const own :
       {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"}) {
    names.attr("discard")(own);
  }
  of_every_module = names.release().ptr();
}

Snapshot::~Snapshot() {
  for (const Entry& entry : entries_) {
    Py_XDECREF(entry.held);
  }
}

// -- Taking it -----------------------------------------------------------------------------------

void Snapshot::add_entry(const Entry& entry) {
  entries_.push_back(entry);
  Py_XINCREF(entry.held);
}

bool Snapshot::add_module(PyObject* module) {
  if (!find_modules(module)) {
    return false;
  }
  for (PyObject* const each : std::exchange(modules_, {})) {
    add_attributes(each);
  }
  return true;
}

/// First of all, so that any attribute can be one of them.
bool Snapshot::find_modules(PyObject* module) {
  if (!known_.insert(module).second) {
    return true;
  }
  if (is_a(module, scripted) || is_a(module, synchronised) || has_more_than_attributes(module)) {
    return false;
  }
  modules_.push_back(module);
  const py::object attributes = attributes_of(module);
  PyObject* const children = PyDict_GetItemString(attributes.ptr(), "_modules");
  PyObject* name = nullptr;
  PyObject* child = nullptr;
  Py_ssize_t place = 0;
  while (children != nullptr && PyDict_Next(children, &place, &name, &child) != 0) {
    if (child != Py_None && !find_modules(child)) {
      return false;
    }
  }
  return true;
}

void Snapshot::add_attributes(PyObject* module) {
  const py::object attributes = attributes_of(module);
  const bool has_statistics =
      PyDict_GetItemString(attributes.ptr(), "training") == Py_True && is_a(module, norms);
  add_entry({.kind = Kind::module,
             .held = reinterpret_cast<PyObject*>(Py_TYPE(module)),
             .which = module,
             .count = static_cast<std::size_t>(PyDict_Size(attributes.ptr()))});
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(attributes.ptr(), &place, &name, &value) != 0) {
    add_itself(name);
    if (PySet_Contains(of_every_module, name) == 1) {
      add_itself(value);
      continue;
    }
    are_statistics_ = has_statistics && PyUnicode_CompareWithASCIIString(name, "_buffers") == 0;
    add(value);
  }
  are_statistics_ = false;
}

void Snapshot::add_arguments(PyObject* const* values, Py_ssize_t count) {
  add_entry({.kind = Kind::tuple, .count = static_cast<std::size_t>(count)});
  for (Py_ssize_t i = 0; i < count; ++i) {
    add(values[i]);
  }
}

void Snapshot::add_named(PyObject* names, PyObject* const* values) {
  const Py_ssize_t count = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  add_entry({.kind = Kind::dict, .count = static_cast<std::size_t>(count)});
  for (Py_ssize_t i = 0; i < count; ++i) {
    add_itself(PyTuple_GET_ITEM(names, i));
    add(values[i]);
  }
}

void Snapshot::add(PyObject* value) {
  if (THPVariable_Check(value)) {
    add_tensor(value);
  } else if (PyTuple_CheckExact(value)) {
    add_entry({.kind = Kind::tuple, .count = static_cast<std::size_t>(PyTuple_GET_SIZE(value))});
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      add(PyTuple_GET_ITEM(value, i));
    }
  } else if (known_.contains(value)) {
    add_entry({.kind = Kind::again, .which = value});
  } else if (PyList_CheckExact(value)) {
    known_.insert(value);
    add_entry({.kind = Kind::list,
               .which = value,
               .count = static_cast<std::size_t>(PyList_GET_SIZE(value))});
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      add(PyList_GET_ITEM(value, i));
    }
  } else if (PyDict_CheckExact(value) || PyODict_CheckExact(value)) {
    known_.insert(value);
    add_entry({.kind = PyDict_CheckExact(value) ? Kind::dict : Kind::ordered_dict,
               .which = value,
               .count = static_cast<std::size_t>(PyDict_Size(value))});
    add_items(value);
  } else if (PyMethod_Check(value) && known_.contains(PyMethod_Self(value))) {
    add_entry(
        {.kind = Kind::method, .held = PyMethod_Function(value), .which = PyMethod_Self(value)});
  } else {
    add_itself(value);
  }
}

void Snapshot::add_items(PyObject* dict) {
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(dict, &place, &name, &value) != 0) {
    add_itself(name);
    add(value);
  }
}

void Snapshot::add_tensor(PyObject* value) {
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (!are_statistics_ && !tensor.is_inference()) {
    parts_.push_back({tensor, tensor._version()});
  }
  const bool has_past =
      (THPVariable_CheckExact(value) || nn::is_rehearsed(tensor)) && tensor.grad_fn() != nullptr;
  if (!has_past) {
    add_itself(value);
    return;
  }
  PyObject*& alone = alone_[value];
  if (alone != nullptr) {
    add_itself(alone);
    return;
  }
  const py::object made = owned(THPVariable_Wrap(nn::Block::without_past(tensor)));
  add_itself(made.ptr());
  alone = made.ptr();
}

std::optional<std::vector<at::Tensor>> Snapshot::take_unchanged() {
  known_.clear();
  alone_.clear();
  std::vector<at::Tensor> found;
  found.reserve(parts_.size());
  for (Part& part : std::exchange(parts_, {})) {
    if (part.tensor._version() != part.version) {
      return std::nullopt;
    }
    found.push_back(std::move(part.tensor));
  }
  return found;
}

// -- Copies of it --------------------------------------------------------------------------------

class Snapshot::Copier {
 public:
  /// Makes the modules, so that any attribute can be one of them.
  explicit Copier(const std::vector<Entry>& entries) : entries_(entries) {
    for (const Entry& entry : entries) {
      if (entry.kind == Kind::module) {
        auto* const type = reinterpret_cast<PyTypeObject*>(entry.held);
        const auto [made, is_new] = made_.try_emplace(
            entry.which, owned(PyBaseObject_Type.tp_new(type, py::tuple().ptr(), nullptr)));
        modules_.push_back(made->second);
      }
    }
  }

  Copies copy() {
    while (entries_[next_].kind == Kind::module) {
      const Entry& entry = entries_[next_++];
      const py::dict attributes;
      fill(attributes, entry.count);
      set_attributes(made_.at(entry.which), attributes);
    }
    py::object args = next();
    py::object kwargs = next();
    return {std::move(modules_), std::move(args), std::move(kwargs)};
  }

 private:
  py::object next() {
    const Entry& entry = entries_[next_++];
    switch (entry.kind) {
      case Kind::tuple: {
        py::tuple copy(entry.count);
        for (std::size_t i = 0; i < entry.count; ++i) {
          PyTuple_SET_ITEM(copy.ptr(), static_cast<Py_ssize_t>(i), next().release().ptr());
        }
        return copy;
      }
      case Kind::list: {
        py::list copy;
        made_.emplace(entry.which, copy);
        for (std::size_t i = 0; i < entry.count; ++i) {
          copy.append(next());
        }
        return copy;
      }
      case Kind::dict:
        return filled(entry, py::dict());
      case Kind::ordered_dict:
        return filled(entry, owned(PyODict_New()));
      case Kind::method:
        return owned(PyMethod_New(entry.held, made_.at(entry.which).ptr()));
      case Kind::again:
        return made_.at(entry.which);
      default:
        return py::reinterpret_borrow<py::object>(entry.held);
    }
  }

  py::object filled(const Entry& entry, py::object copy) {
    made_.emplace(entry.which, copy);
    fill(copy, entry.count);
    return copy;
  }

  void fill(const py::object& dict, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      PyObject* const name = entries_[next_++].held;
      if (PyObject_SetItem(dict.ptr(), name, next().ptr()) != 0) {
        throw py::error_already_set();
      }
    }
  }

  const std::vector<Entry>& entries_;
  std::size_t next_ = 0;
  std::unordered_map<const void*, py::object> made_;  // of modules, lists and dicts
  std::vector<py::object> modules_;
};

Snapshot::Copies Snapshot::copies() const { return Copier(entries_).copy(); }

void Snapshot::end(Copies copies) const {
  std::vector<py::weakref> left;
  left.reserve(copies.modules.size());
  for (const py::object& module : copies.modules) {
    left.emplace_back(module);
  }
  copies = {};
  if (std::ranges::all_of(left, [](const py::weakref& each) { return each().is_none(); })) {
    return;
  }
  const Copies anew = this->copies();
  for (std::size_t i = 0; i < left.size(); ++i) {
    const py::object module = left[i]();
    const py::object attributes = owned(PyDict_Copy(attributes_of(anew.modules[i].ptr()).ptr()));
    if (!module.is_none()) {
      set_attributes(module, attributes);
    }
  }
}

}  // namespace brim::python
