#pragma once

#include <torch/csrc/autograd/python_variable.h>

namespace brim::python {

/// THPVariable_Check asks Python's isinstance, which takes longer than all the rest of a call.
inline bool is_tensor(PyObject* value) {
  return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

/// The tensor that a Python object is; null where it is something else.
inline const at::Tensor* tensor_in(PyObject* value) {
  return is_tensor(value) ? &THPVariable_Unpack(value) : nullptr;
}

}  // namespace brim::python
