// The object that a decorated function is: a callable of CPython's own kind, because everything
// that pybind11 or Python code does on the way of a call costs more than the call may.
#include "adaptive_function.h"

#include <structmember.h>
#include <torch/csrc/Exceptions.h>

#include <new>
#include <utility>

#include "adaptive_call.h"

namespace brim::python {
namespace py = pybind11;

namespace {

struct AdaptiveFunction {
  PyObject_HEAD PyObject* function;
  PyObject* dict;
  PyObject* weak_references;
  vectorcallfunc vectorcall;
  std::shared_ptr<const AdaptiveConfig> config;
};

AdaptiveFunction* as_function(PyObject* object) {
  return reinterpret_cast<AdaptiveFunction*>(object);
}

/// What the garbage collector took apart can be called no more, but a finaliser may try to.
bool usable(const AdaptiveFunction* function) {
  if (function->function != nullptr && function->config != nullptr) {
    return true;
  }
  PyErr_SetString(PyExc_ReferenceError, "this adaptive function is being destroyed");
  return false;
}

PyObject* call(PyObject* self, PyObject* const* values, std::size_t count, PyObject* names) {
  const AdaptiveFunction* function = as_function(self);
  if (!usable(function)) {
    return nullptr;
  }
  return adaptive_call(*function->config, function->function,
                       {values, PyVectorcall_NARGS(count), names}, nullptr);
}

/// `function.record(*args, **kwargs)` → (result, list of tries).
PyObject* record(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  const AdaptiveFunction* function = as_function(self);
  if (!usable(function)) {
    return nullptr;
  }
  std::vector<Attempt> attempts;
  PyObject* result =
      adaptive_call(*function->config, function->function, {values, count, names}, &attempts);
  if (result == nullptr) {
    return nullptr;
  }
  const auto owned = py::reinterpret_steal<py::object>(result);
  try {
    py::list list;
    for (Attempt& attempt : attempts) {
      list.append(py::cast(std::move(attempt)));
    }
    return py::make_tuple(owned, list).release().ptr();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

/// `function.clear()`: forgets every size that was learned.
PyObject* clear_sizes(PyObject* self, PyObject* /*unused*/) {
  if (!usable(as_function(self))) {
    return nullptr;
  }
  return adaptive_clear(*as_function(self)->config);
}

/// `function.forget(*args, **kwargs)`: forgets what was learned of calls with such arguments.
PyObject* forget(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  const AdaptiveFunction* function = as_function(self);
  if (!usable(function)) {
    return nullptr;
  }
  return adaptive_forget(*function->config, {values, count, names});
}

PyTypeObject* type_object();

PyObject* make(PyObject* function, std::shared_ptr<const AdaptiveConfig> config) {
  PyObject* self = PyType_GenericAlloc(type_object(), 0);
  if (self == nullptr) {
    return nullptr;
  }
  AdaptiveFunction* made = as_function(self);
  made->function = Py_NewRef(function);
  made->vectorcall = &call;
  new (&made->config) std::shared_ptr<const AdaptiveConfig>(std::move(config));
  return self;
}

/// The signature that a decorated function shows has the instance first; a bound copy's has not.
void drop_self_from_signature(PyObject* dict) {
  PyObject* signature = dict == nullptr ? nullptr : PyDict_GetItemString(dict, "__signature__");
  if (signature == nullptr) {
    return;
  }
  try {
    const auto whole = py::reinterpret_borrow<py::object>(signature);
    const py::list parameters(whole.attr("parameters").attr("values")());
    const py::object rest =
        parameters[py::slice(1, static_cast<py::ssize_t>(parameters.size()), 1)];
    const py::object shorter = whole.attr("replace")(py::arg("parameters") = rest);
    PyDict_SetItemString(dict, "__signature__", shorter.ptr());
  } catch (py::error_already_set&) {
    PyErr_Clear();  // it is only shown
  }
}

/// `maximize` finds its arguments by their place in the signature, `self` included, so an ordinary
/// bound method does. The others put values in front of the arguments, which must come behind
/// `self`: they wrap the bound method instead.
PyObject* bind(PyObject* self, PyObject* instance, PyObject* /*owner*/) {
  if (instance == nullptr || instance == Py_None) {
    return Py_NewRef(self);
  }
  const AdaptiveFunction* function = as_function(self);
  if (!usable(function)) {
    return nullptr;
  }
  if (function->config->kind == AdaptKind::maximize) {
    return PyMethod_New(self, instance);
  }
  PyObject* method = PyMethod_New(function->function, instance);
  if (method == nullptr) {
    return nullptr;
  }
  PyObject* bound = make(method, function->config);
  Py_DECREF(method);
  if (bound != nullptr && function->dict != nullptr) {
    as_function(bound)->dict = PyDict_Copy(function->dict);
    drop_self_from_signature(as_function(bound)->dict);
  }
  return bound;
}

/// The Python objects of a configuration: an observer or a default may refer back to the function.
int traverse(const AdaptiveConfig& config, visitproc visit, void* arg) {
  for (const auto* slots : {&config.parameters, &config.key_arguments}) {
    for (const ArgumentSlot& slot : *slots) {
      Py_VISIT(slot.otherwise.ptr());
    }
  }
  if (config.infer) {
    Py_VISIT(config.infer->otherwise.ptr());
  }
  for (const py::object* object :
       {&config.progress, &config.hasher, &config.observer, &config.logger, &config.collect}) {
    Py_VISIT(object->ptr());
  }
  return 0;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const AdaptiveFunction* function = as_function(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(function->function);
  Py_VISIT(function->dict);
  // Shared with bound copies while there are any; counted once for each it would look unreachable.
  if (function->config.use_count() == 1) {
    return traverse(*function->config, visit, arg);
  }
  return 0;
}

int clear(PyObject* self) {
  AdaptiveFunction* function = as_function(self);
  Py_CLEAR(function->function);
  Py_CLEAR(function->dict);
  function->config.reset();
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  AdaptiveFunction* function = as_function(self);
  if (function->weak_references != nullptr) {
    PyObject_ClearWeakRefs(self);
  }
  clear(self);
  function->config.~shared_ptr();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* represent(PyObject* self) {
  return PyUnicode_FromFormat("<adaptive %R>", as_function(self)->function);
}

// Pickled by name, as a plain function is: the module's attribute of that name is this object.
PyObject* reduce(PyObject* self, PyObject* /*unused*/) {
  return PyObject_GetAttrString(self, "__qualname__");
}

PyTypeObject* type_object() {
  static PyMemberDef members[] = {
      {"__dictoffset__", T_PYSSIZET, offsetof(AdaptiveFunction, dict), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(AdaptiveFunction, weak_references), READONLY,
       nullptr},
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(AdaptiveFunction, vectorcall), READONLY,
       nullptr},
      {"__wrapped__", T_OBJECT, offsetof(AdaptiveFunction, function), READONLY,
       "The function that was decorated."},
      {nullptr, 0, 0, 0, nullptr}};
  static PyMethodDef methods[] = {
      {"record", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&record)),
       METH_FASTCALL | METH_KEYWORDS,
       "Call the function and return its result and the list of tries that it took."},
      {"clear", &clear_sizes, METH_NOARGS, "Forget every size that was learned."},
      {"forget", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&forget)),
       METH_FASTCALL | METH_KEYWORDS, "Forget what was learned of calls with such arguments."},
      {"__reduce__", &reduce, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef attributes[] = {
      {"__dict__", &PyObject_GenericGetDict, &PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
      {Py_tp_descr_get, reinterpret_cast<void*>(&bind)},
      {Py_tp_traverse, reinterpret_cast<void*>(static_cast<traverseproc>(&traverse))},
      {Py_tp_clear, reinterpret_cast<void*>(&clear)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
      {Py_tp_repr, reinterpret_cast<void*>(&represent)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {0, nullptr}};
  static PyType_Spec spec = {"brim._C.AdaptiveFunction", sizeof(AdaptiveFunction), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                 Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots};
  static PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

py::object make_adaptive_function(const py::object& function,
                                  std::shared_ptr<const AdaptiveConfig> config) {
  PyObject* made = make(function.ptr(), std::move(config));
  if (made == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(made);
}

py::object adaptive_function_type() {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type_object()));
}

}  // namespace brim::python
