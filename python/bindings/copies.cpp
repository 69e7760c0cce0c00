#include "copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <brim/nn/rehearsal.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings.h"
#include "interpreter.h"

namespace brim::python {
namespace {

// Classes of torch.
PyTypeObject* modules = nullptr;
PyTypeObject* scripted = nullptr;
PyTypeObject* synchronised = nullptr;
PyTypeObject* norms = nullptr;

PyObject* of_every_module = nullptr;  // names: flags, and tables of hooks, which stay themselves

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

py::object itself(PyObject* value) { return py::reinterpret_borrow<py::object>(value); }

py::object attributes_of(PyObject* module) {
  return owned(PyObject_GenericGetDict(module, nullptr));
}

/// The same values for a graph of their own. The graph that gave them may lead back to whoever
/// holds them: with `x += block(x)` it does, and neither would ever end.
at::Tensor without_past(const at::Tensor& tensor) {
  const at::AutoGradMode with_grad(true);
  return at::alias(tensor.detach().set_requires_grad(true));
}

}  // namespace

void Copies::set_up() {
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
  for (const char* const own : {"_parameters", "_buffers", "_modules"}) {
    names.attr("discard")(own);
  }
  of_every_module = names.release().ptr();
}

std::optional<py::object> Copies::of_module(PyObject* module) {
  if (!add(module)) {
    return std::nullopt;
  }
  for (const auto& [each, copy] : modules_) {
    fill(each, copy);
  }
  return made_.at(module);
}

std::optional<std::vector<at::Tensor>> Copies::unchanged() const {
  std::vector<at::Tensor> found;
  for (const Part& part : parts_) {
    if (part.tensor._version() != part.version) {
      return std::nullopt;
    }
    found.push_back(part.tensor);
  }
  return found;
}

/// Makes the copies, so that any attribute can be one of them.
bool Copies::add(PyObject* module) {
  if (made_.contains(module)) {
    return true;
  }
  if (is_a(module, scripted) || is_a(module, synchronised) || has_more_than_attributes(module)) {
    return false;
  }
  const py::object& copy =
      made_
          .try_emplace(module,
                       owned(PyBaseObject_Type.tp_new(Py_TYPE(module), py::tuple().ptr(), nullptr)))
          .first->second;
  modules_.emplace_back(module, copy.ptr());
  const py::object attributes = attributes_of(module);
  PyObject* const children = PyDict_GetItemString(attributes.ptr(), "_modules");
  PyObject* name = nullptr;
  PyObject* child = nullptr;
  Py_ssize_t place = 0;
  while (children != nullptr && PyDict_Next(children, &place, &name, &child) != 0) {
    if (child != Py_None && !add(child)) {
      return false;
    }
  }
  return true;
}

void Copies::fill(PyObject* module, PyObject* copy) {
  const py::object attributes = attributes_of(module);
  const bool has_statistics =
      PyDict_GetItemString(attributes.ptr(), "training") == Py_True && is_a(module, norms);
  const py::object copied = owned(PyDict_Copy(attributes.ptr()));
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(attributes.ptr(), &place, &name, &value) != 0) {
    if (PySet_Contains(of_every_module, name) == 1) {
      continue;
    }
    are_statistics_ = has_statistics && PyUnicode_CompareWithASCIIString(name, "_buffers") == 0;
    const py::object own = of(value);
    if (own.ptr() != value && PyDict_SetItem(copied.ptr(), name, own.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  are_statistics_ = false;
  if (PyObject_GenericSetDict(copy, copied.ptr(), nullptr) != 0) {
    throw py::error_already_set();
  }
}

py::object Copies::of(PyObject* value) {
  if (THPVariable_Check(value)) {
    return of_tensor(value);
  }
  if (PyTuple_CheckExact(value)) {
    py::tuple copy(PyTuple_GET_SIZE(value));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      PyTuple_SET_ITEM(copy.ptr(), i, of(PyTuple_GET_ITEM(value, i)).release().ptr());
    }
    return copy;
  }
  if (PyMethod_Check(value)) {
    const auto of_self = made_.find(PyMethod_Self(value));
    return of_self == made_.end()
               ? itself(value)
               : owned(PyMethod_New(PyMethod_Function(value), of_self->second.ptr()));
  }
  if (const auto made = made_.find(value); made != made_.end()) {
    return made->second;
  }
  if (PyList_CheckExact(value)) {
    py::list copy;
    made_.emplace(value, copy);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      copy.append(of(PyList_GET_ITEM(value, i)));
    }
    return copy;
  }
  if (PyDict_CheckExact(value)) {
    return of_dict(value, py::dict());
  }
  return PyODict_CheckExact(value) ? of_dict(value, owned(PyODict_New())) : itself(value);
}

py::object Copies::of_dict(PyObject* value, py::object copy) {
  made_.emplace(value, copy);
  PyObject* name = nullptr;
  PyObject* each = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(value, &place, &name, &each) != 0) {
    if (PyObject_SetItem(copy.ptr(), name, of(each).ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  return copy;
}

py::object Copies::of_tensor(PyObject* value) {
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (!are_statistics_ && !tensor.is_inference()) {
    parts_.push_back({tensor, tensor._version()});
  }
  const bool has_past =
      (THPVariable_CheckExact(value) || nn::is_rehearsed(tensor)) && tensor.grad_fn() != nullptr;
  return has_past ? owned(THPVariable_Wrap(without_past(tensor))) : itself(value);
}

}  // namespace brim::python
