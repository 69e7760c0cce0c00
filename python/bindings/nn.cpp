#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "bindings.h"
#include "fast_call.h"

namespace brim::python {

const at::Tensor& plain_tensor(PyObject* value) {
  if (!THPVariable_CheckExact(value)) {
    throw NotPlain();
  }
  return THPVariable_Unpack(value);
}

bool modes_are_active() { return at::impl::torch_function_mode_enabled(); }

PyObject* call_operator(const char* name, PyObject* const* values, Py_ssize_t count) {
  const py::object op = py::module_::import("torch").attr("ops").attr("brim").attr(name);
  return PyObject_Vectorcall(op.ptr(), values, static_cast<std::size_t>(count), nullptr);
}

namespace {

using at::IntArrayRef;
using at::Tensor;

#define BRIM_OPERATOR(name, ...)                                                \
  constexpr char k_##name[] = #name; /* NOLINT: a template argument needs it */ \
  using Call_##name = FastCall<k_##name, __VA_ARGS__>;

BRIM_OPERATOR(gate, Tensor(const Tensor&, std::int64_t, double, double))
BRIM_OPERATOR(gate_, Tensor&(Tensor&, std::int64_t, double, double))

#undef BRIM_OPERATOR

template <class Call>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Call::call)),
          METH_FASTCALL, nullptr};
}

}  // namespace

void register_nn(py::module_& m) {
  py::module_ ops = m.def_submodule("ops", "The operators of brim, called without torch's parser");
  static PyMethodDef methods[] = {
      method<Call_gate>("gate"),
      method<Call_gate_>("gate_"),
      {nullptr, nullptr, 0, nullptr},
  };
  TORCH_CHECK(PyModule_AddFunctions(ops.ptr(), methods) == 0);
}

}  // namespace brim::python
