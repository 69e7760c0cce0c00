// What code finds in place of torch's functions and of the modules of Python that hold them.
// Without pybind11: each call of a function in a converted module passes here.

#include <ATen/core/Tensor.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <span>

#include "bindings.h"

namespace brim::python {
namespace {

// For the life of the process
PyTypeObject* fake_tensor = nullptr;  // runs as a real one does
PyObject* is_paused = nullptr;        // a ContextVar

bool is_plain(PyObject* value) {
  return THPVariable_CheckExact(value) || Py_TYPE(value) == fake_tensor;
}

bool is_named(PyObject* name, const char* text) {
  return PyUnicode_CompareWithASCIIString(name, text) == 0;
}

/// Whether the input is a plain tensor of a floating type, and the others are plain too.
bool fit(PyObject* const* values, Py_ssize_t count, PyObject* names) {
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  PyObject* input = count > 0 ? values[0] : nullptr;
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(names, i);
    if (is_named(name, "out")) {
      return false;
    }
    if (input == nullptr && is_named(name, "input")) {
      input = values[count + i];
    }
  }
  for (PyObject* const each : std::span(values, static_cast<std::size_t>(count + named))) {
    if (THPVariable_Check(each) && !is_plain(each)) {
      return false;
    }
  }
  if (input == nullptr || !THPVariable_Check(input)) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(input);
  const at::ScalarType type = tensor.scalar_type();
  const bool is_floating =
      type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
  return is_floating && tensor.layout() == at::kStrided;
}

/// A function of torch, to which it is equal; a call runs brim's where that fits.
struct Redirect {
  PyObject_HEAD vectorcallfunc call;
  PyObject* torchs;
  PyObject* own;
};

Redirect& as_redirect(PyObject* self) { return *reinterpret_cast<Redirect*>(self); }

extern "C" PyObject* call_redirect(PyObject* self, PyObject* const* values, std::size_t count,
                                   PyObject* names) {
  PyObject* run = as_redirect(self).torchs;
  if (fit(values, PyVectorcall_NARGS(count), names)) {
    PyObject* paused = nullptr;
    if (PyContextVar_Get(is_paused, nullptr, &paused) != 0) {
      return nullptr;
    }
    run = paused == Py_True ? run : as_redirect(self).own;
    Py_DECREF(paused);
  }
  return PyObject_Vectorcall(run, values, count, names);
}

extern "C" PyObject* compare_redirect(PyObject* self, PyObject* other, int how) {
  PyObject* const right = Py_TYPE(other) == Py_TYPE(self) ? as_redirect(other).torchs : other;
  return PyObject_RichCompare(as_redirect(self).torchs, right, how);
}

extern "C" Py_hash_t hash_redirect(PyObject* self) {
  return PyObject_Hash(as_redirect(self).torchs);
}

extern "C" PyObject* attribute_of_redirect(PyObject* self, PyObject* name) {
  return PyObject_GetAttr(as_redirect(self).torchs, name);
}

/// A module of Python, such as torch.nn.functional, with other values for some of its attributes.
struct Home {
  PyObject_HEAD PyObject* module;
  PyObject* instead;
};

extern "C" PyObject* attribute_of_home(PyObject* self, PyObject* name) {
  const Home& home = *reinterpret_cast<Home*>(self);
  PyObject* const value = PyObject_GetAttr(home.module, name);
  if (value == nullptr) {
    return nullptr;
  }
  PyObject* const other = PyDict_GetItemWithError(home.instead, value);
  if (other == nullptr) {
    PyErr_Clear();  // it has no hash
    return value;
  }
  Py_INCREF(other);
  Py_DECREF(value);
  return other;
}

extern "C" int set_attribute_of_home(PyObject* self, PyObject* name, PyObject* value) {
  return PyObject_SetAttr(reinterpret_cast<Home*>(self)->module, name, value);
}

template <class Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

template <class Object>
PyTypeObject* make_type(const char* name, unsigned flags, PyType_Slot* slots) {
  PyType_Spec spec{name, sizeof(Object), 0, Py_TPFLAGS_DEFAULT | flags, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

/// Both live as long as the process, in tables of brim.
template <class Object>
Object* make(PyTypeObject* type) {
  auto* const made = PyObject_New(Object, type);
  if (made == nullptr) {
    throw py::error_already_set();
  }
  return made;
}

py::object redirect(py::object torchs, py::object own) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Redirect, call), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_call, slot(&PyVectorcall_Call)},       {Py_tp_richcompare, slot(&compare_redirect)},
      {Py_tp_hash, slot(&hash_redirect)},           {Py_tp_getattro, slot(&attribute_of_redirect)},
      {Py_tp_members, static_cast<void*>(members)}, {0, nullptr}};
  static PyTypeObject* const type =
      make_type<Redirect>("brim._C.Redirect", Py_TPFLAGS_HAVE_VECTORCALL, slots);
  auto* const made = make<Redirect>(type);
  made->call = call_redirect;
  made->torchs = torchs.release().ptr();
  made->own = own.release().ptr();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
}

py::object home(py::object module, py::dict instead) {
  static PyType_Slot slots[] = {{Py_tp_getattro, slot(&attribute_of_home)},
                                {Py_tp_setattro, slot(&set_attribute_of_home)},
                                {0, nullptr}};
  static PyTypeObject* const type = make_type<Home>("brim._C.Home", 0, slots);
  auto* const made = make<Home>(type);
  made->module = module.release().ptr();
  made->instead = instead.release().ptr();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
}

}  // namespace

void register_redirect(py::module_& m) {
  m.def("redirect", redirect, "A function of torch that runs brim's where its arguments fit.");
  m.def("home", home, "A module of Python with other values for some of its attributes.");
  m.def("set_redirection", [](py::object fake, py::object paused) {
    fake_tensor = reinterpret_cast<PyTypeObject*>(fake.release().ptr());
    is_paused = paused.release().ptr();
  });
}

}  // namespace brim::python
