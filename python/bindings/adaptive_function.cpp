// The callable that a decorator returns, written against CPython's own interface: pybind11 or
// Python code on the path of a call would cost more than the call may.
#include "adaptive_function.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>
#include <pybind11/stl.h>
#include <structmember.h>

#include <new>
#include <string>
#include <utility>

#include "adaptive_call.h"
#include "leaving_error.h"
#include "python_error.h"

namespace brim::python {
namespace py = pybind11;

namespace {

struct AdaptiveFunction {
  PyObject_HEAD PyObject* function;              // what was decorated; null in a bound one
  std::shared_ptr<const AdaptiveConfig> config;  // null in a bound one
  vectorcallfunc vectorcall;
  PyObject* base;      // of a bound one, as `__func__` of a method: the function that was bound
  PyObject* instance;  // of a bound one, as `__self__` of a method
  PyObject* dict;      // a bound one shares that of its base
  PyObject* weak_references;
};

AdaptiveFunction* as_function(PyObject* object) {
  return reinterpret_cast<AdaptiveFunction*>(object);
}

/// What was decorated and how, of a function or of what it is bound from. @throws a ReferenceError
/// for what the garbage collector took apart: a finaliser may try to call it.
const AdaptiveFunction& decorated(PyObject* self) {
  const AdaptiveFunction* function = as_function(self);
  if (function->base != nullptr) {
    function = as_function(function->base);
  }
  if (function->function == nullptr || function->config == nullptr) [[unlikely]] {
    PyErr_SetString(PyExc_ReferenceError, "this adaptive function is being made or destroyed");
    throw py::error_already_set();
  }
  return *function;
}

/// Calls `then(config, function, arguments)`, with the instance of a bound one ahead of the others.
template <class Then>
PyObject* with_arguments(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names,
                         const Then& then) {
  const AdaptiveFunction& function = decorated(self);
  const AdaptiveConfig& config = *function.config;
  PyObject* const instance = as_function(self)->instance;
  const bool method = instance != nullptr || (config.has_receiver && count > 0);
  CallArguments arguments{values, count, names,
                          method && config.kind != AdaptKind::maximize ? 1 : 0};
  c10::SmallVector<PyObject*, 16> all;
  if (instance != nullptr) {
    all.push_back(instance);
    all.append(values, values + arguments.count());
    arguments.values = all.data();
    ++arguments.positional;
  }
  return then(config, function.function, arguments);
}

/// Runs the body of an adaptive call. Its out-of-memory error is explained, unless another adaptive
/// call is around it.
template <class Body>
PyObject* adapted(const Body& body) {
  PyObject* result = nullptr;
  {
    const InAdaptiveCall inside;
    result = called_by_python(body);
  }
  if (result == nullptr) [[unlikely]] {
    explain_pending_error();
  }
  return result;
}

PyObject* call(PyObject* self, PyObject* const* values, std::size_t count, PyObject* names) {
  return adapted([&] {
    return with_arguments(self, values, PyVectorcall_NARGS(count), names,
                          [](const auto& config, PyObject* function, const auto& arguments) {
                            return adaptive_call(config, function, arguments, nullptr);
                          });
  });
}

/// `function.record(*args, **kwargs)` → (result, `Attempts`).
PyObject* record(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  return adapted([&] {
    std::vector<Attempt> attempts;
    const py::object result = new_reference(
        with_arguments(self, values, count, names,
                       [&](const auto& config, PyObject* function, const auto& arguments) {
                         return adaptive_call(config, function, arguments, &attempts);
                       }));
    return py::make_tuple(result, provided("Attempts")(std::move(attempts)));
  });
}

/// `function.clear()`: forgets every size that was learned.
PyObject* clear_sizes(PyObject* self, PyObject* /*unused*/) {
  return called_by_python([&] {
    forget_all(*decorated(self).config);
    return py::none();
  });
}

/// `function.forget(*args, **kwargs)`: forgets what was learned of calls with such arguments.
PyObject* forget(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  return called_by_python([&] {
    return with_arguments(self, values, count, names,
                          [](const auto& config, PyObject* /*function*/, const auto& arguments) {
                            adaptive_forget(config, arguments);
                            return Py_NewRef(Py_None);
                          });
  });
}

PyTypeObject* type_object();

py::object make() {
  py::object made = new_reference(PyType_GenericAlloc(type_object(), 0));
  as_function(made.ptr())->vectorcall = &call;
  new (&as_function(made.ptr())->config) std::shared_ptr<const AdaptiveConfig>();
  return made;
}

PyObject* bind(PyObject* self, PyObject* instance, PyObject* owner) {
  return called_by_python([&] {
    const Binding binding = decorated(self).config->binding;
    if (binding == Binding::owner) {
      instance = owner != nullptr ? owner : reinterpret_cast<PyObject*>(Py_TYPE(instance));
    }
    if (binding == Binding::none || instance == nullptr || instance == Py_None ||
        as_function(self)->base != nullptr) {
      return py::reinterpret_borrow<py::object>(self);
    }
    py::object bound = make();
    as_function(bound.ptr())->base = Py_NewRef(self);
    as_function(bound.ptr())->instance = Py_NewRef(instance);
    as_function(bound.ptr())->dict = Py_XNewRef(as_function(self)->dict);
    return bound;
  });
}

/// `type(method)(function, instance)` binds, as for a method. Without arguments it makes one that
/// cannot be called until its state is set: what is pickled by value may refer to itself.
PyObject* construct(PyTypeObject* /*type*/, PyObject* arguments, PyObject* keywords) {
  PyObject* function = nullptr;
  PyObject* instance = nullptr;
  if (keywords != nullptr || PyTuple_GET_SIZE(arguments) == 1 ||
      PyArg_UnpackTuple(arguments, "AdaptiveFunction", 0, 2, &function, &instance) == 0 ||
      (function != nullptr && Py_TYPE(function) != type_object())) {
    PyErr_SetString(PyExc_TypeError,
                    "an AdaptiveFunction is made by brim.maximize, batch, range or chunked");
    return nullptr;
  }
  return function == nullptr ? called_by_python(&make) : bind(function, instance, nullptr);
}

/// A method of CPython's own kind, which knows all that a method can be asked for.
py::object as_method(PyObject* self) {
  return new_reference(PyMethod_New(as_function(self)->base, as_function(self)->instance));
}

/// What was decorated; of a bound one, bound.
PyObject* wrapped(PyObject* self, void* /*closure*/) {
  return called_by_python([&] {
    PyObject* const function = decorated(self).function;
    PyObject* const instance = as_function(self)->instance;
    return instance == nullptr ? py::reinterpret_borrow<py::object>(function)
                               : new_reference(PyMethod_New(function, instance));
  });
}

/// The signature that callers see; without the instance where it is bound.
PyObject* signature(PyObject* self, void* /*closure*/) {
  if (as_function(self)->base == nullptr) {
    PyObject* const shown = as_function(self)->dict == nullptr
                                ? nullptr
                                : PyDict_GetItemString(as_function(self)->dict, "__signature__");
    if (shown == nullptr) {
      PyErr_SetString(PyExc_AttributeError, "__signature__");  // that of __wrapped__
    }
    return Py_XNewRef(shown);
  }
  return called_by_python([&] {
    return py::object(py::module_::import("inspect").attr("signature")(as_method(self)));
  });
}

int set_signature(PyObject* self, PyObject* value, void* /*closure*/) {
  PyObject* const dict = PyObject_GenericGetDict(self, nullptr);
  if (dict == nullptr) {
    return -1;
  }
  const int failed = value == nullptr ? PyDict_DelItemString(dict, "__signature__")
                                      : PyDict_SetItemString(dict, "__signature__", value);
  Py_DECREF(dict);
  return failed;
}

/// Bound ones are equal as methods are: the same function of the same instance.
PyObject* compare(PyObject* self, PyObject* other, int operation) {
  if (as_function(self)->base == nullptr || Py_TYPE(other) != type_object() ||
      as_function(other)->base == nullptr) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  return called_by_python([&] {
    return PyObject_RichCompare(as_method(self).ptr(), as_method(other).ptr(), operation);
  });
}

Py_hash_t hash(PyObject* self) {
  if (as_function(self)->base == nullptr) {
    return PyBaseObject_Type.tp_hash(self);
  }
  const auto method = py::reinterpret_steal<py::object>(
      PyMethod_New(as_function(self)->base, as_function(self)->instance));
  return method ? PyObject_Hash(method.ptr()) : -1;
}

/// The Python objects of a configuration: an observer or a default may refer back to the function.
int traverse(const AdaptiveConfig& config, visitproc visit, void* arg) {
  // Allocates nothing: an exception could not leave the collector.
  const auto visit_all = [&](const std::vector<ArgumentSlot>& slots) {
    for (const ArgumentSlot& slot : slots) {
      Py_VISIT(slot.default_value.ptr());
    }
    return 0;
  };
  if (const int stop = visit_all(config.parameters)) {
    return stop;
  }
  if (const int stop = config.key_arguments ? visit_all(*config.key_arguments) : 0) {
    return stop;
  }
  if (const int stop = visit_all(config.restore_arguments)) {
    return stop;
  }
  if (config.infer) {
    Py_VISIT(config.infer->default_value.ptr());
  }
  for (const py::object* object :
       {&config.foresee, &config.progress, &config.hasher, &config.observer, &config.recipe,
        &config.restore, &config.ranks}) {
    Py_VISIT(object->ptr());
  }
  return 0;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const AdaptiveFunction* function = as_function(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(function->function);
  Py_VISIT(function->base);
  Py_VISIT(function->instance);
  Py_VISIT(function->dict);
  return function->config == nullptr ? 0 : traverse(*function->config, visit, arg);
}

int clear(PyObject* self) {
  AdaptiveFunction* function = as_function(self);
  Py_CLEAR(function->function);
  Py_CLEAR(function->base);
  Py_CLEAR(function->instance);
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

/// `<brim.maximize(batch_size) of knn>`, `<brim.chunked(1024) of work>`.
PyObject* represent(PyObject* self) {
  return called_by_python([&] {
    const AdaptiveConfig& config = *decorated(self).config;
    return py::str(c10::str(
        "<", as_function(self)->base == nullptr ? "" : "bound ", "brim.",
        kAdaptKinds.begin()[static_cast<std::size_t>(config.kind)], "(",
        config.kind == AdaptKind::maximize ? config.options.name : std::to_string(config.initial),
        ") of ", config.log_name, ">"));
  });
}

/// A bound one is pickled as a method is, a function by its name, or by value for cloudpickle.
PyObject* reduce(PyObject* self, PyObject* /*unused*/) {
  return called_by_python([&] {
    const AdaptiveFunction& function = decorated(self);
    return as_function(self)->base != nullptr
               ? py::object(as_method(self).attr("__reduce__")())
               : py::object(provided("reduce")(py::handle(self), function.config->recipe));
  });
}

/// Becomes what the recipe makes.
PyObject* set_state(PyObject* self, PyObject* recipe) {
  return called_by_python([&] {
    const py::object made = new_reference(PyObject_CallNoArgs(recipe));
    TORCH_CHECK_TYPE(Py_TYPE(made.ptr()) == type_object(),
                     "the state of an adaptive function must make one");
    std::swap(as_function(self)->function, as_function(made.ptr())->function);
    std::swap(as_function(self)->dict, as_function(made.ptr())->dict);
    std::swap(as_function(self)->config, as_function(made.ptr())->config);
    return py::none();
  });
}

PyTypeObject* type_object() {
  static PyMemberDef members[] = {
      {"__dictoffset__", T_PYSSIZET, offsetof(AdaptiveFunction, dict), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(AdaptiveFunction, weak_references), READONLY,
       nullptr},
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(AdaptiveFunction, vectorcall), READONLY,
       nullptr},
      {"__self__", T_OBJECT_EX, offsetof(AdaptiveFunction, instance), READONLY, nullptr},
      {"__func__", T_OBJECT_EX, offsetof(AdaptiveFunction, base), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyMethodDef methods[] = {
      {"record", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&record)),
       METH_FASTCALL | METH_KEYWORDS,
       "Call the function and return its result and the list of attempts that it took."},
      {"clear", &clear_sizes, METH_NOARGS, "Forget every size that was learned."},
      {"forget", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&forget)),
       METH_FASTCALL | METH_KEYWORDS, "Forget what was learned of calls with such arguments."},
      {"__reduce__", &reduce, METH_NOARGS, nullptr},
      {"__setstate__", &set_state, METH_O, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef attributes[] = {
      {"__dict__", &PyObject_GenericGetDict, &PyObject_GenericSetDict, nullptr, nullptr},
      {"__wrapped__", &wrapped, nullptr, "The function that was decorated.", nullptr},
      {"__signature__", &signature, &set_signature, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static constexpr const char* kDoc = R"(A function that adapts its size to the memory there is.

Made by `maximize`, `batch`, `range` and `chunked`; works as a method too. Calling it calls the
function with the largest size that fits.

Example:
    >>> import brim
    >>> @brim.batch(64)
    ... def work(size):
    ...     return size
    >>> work(), work.__wrapped__(3)
    (64, 3)
)";
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>(kDoc)},
      {Py_tp_new, reinterpret_cast<void*>(&construct)},
      {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
      {Py_tp_descr_get, reinterpret_cast<void*>(&bind)},
      {Py_tp_traverse, reinterpret_cast<void*>(static_cast<traverseproc>(&traverse))},
      {Py_tp_clear, reinterpret_cast<void*>(&clear)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
      {Py_tp_repr, reinterpret_cast<void*>(&represent)},
      {Py_tp_richcompare, reinterpret_cast<void*>(&compare)},
      {Py_tp_hash, reinterpret_cast<void*>(&hash)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {0, nullptr}};
  static PyType_Spec spec = {"brim._C.AdaptiveFunction", sizeof(AdaptiveFunction), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                             slots};
  static const py::handle type = new_reference(PyType_FromSpec(&spec)).release();
  return reinterpret_cast<PyTypeObject*>(type.ptr());
}

}  // namespace

py::object make_adaptive_function(const py::object& function,
                                  std::shared_ptr<const AdaptiveConfig> config) {
  py::object made = make();
  as_function(made.ptr())->function = Py_NewRef(function.ptr());
  as_function(made.ptr())->config = std::move(config);
  return made;
}

py::object adaptive_function_type() {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type_object()));
}

}  // namespace brim::python
