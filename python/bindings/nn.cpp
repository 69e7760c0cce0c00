#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/core/Tensor.h>
#include <brim/nn/subclasses.h>
#include <torch/csrc/utils/pybind.h>

#include <string_view>

#include "bindings.h"
#include "fast_call.h"

namespace brim::python {

const at::Tensor& plain_tensor(PyObject* value) {
  if (!THPVariable_CheckExact(value)) {
    throw NotPlain();
  }
  return THPVariable_Unpack(value);
}

bool is_watched() {
  return at::impl::torch_function_mode_enabled() || at::tracer::impl::is_dispatch_enabled();
}

PyObject* call_elsewhere(const char* name, PyObject* const* values, Py_ssize_t count) {
  py::tuple args(count + 1);
  args[0] = name;
  for (Py_ssize_t i = 0; i < count; ++i) {
    args[static_cast<std::size_t>(i) + 1] = py::handle(values[i]);
  }
  const py::object run = py::module_::import("brim.nn._elsewhere").attr("elsewhere");
  return PyObject_Call(run.ptr(), args.ptr(), nullptr);
}

namespace {

using at::IntArrayRef;
using at::Tensor;

#define BRIM_OPERATOR(name, ...)                                                \
  constexpr char k_##name[] = #name; /* NOLINT: a template argument needs it */ \
  using Call_##name = FastCall<k_##name, __VA_ARGS__>;

using Maybe = const std::optional<Tensor>&;

BRIM_OPERATOR(gate, Tensor(const Tensor&, std::int64_t, double, double, bool))
BRIM_OPERATOR(gate_, Tensor&(Tensor&, std::int64_t, double, double, bool))
BRIM_OPERATOR(gelu, Tensor(const Tensor&, std::string_view))
BRIM_OPERATOR(silu, Tensor(const Tensor&))
BRIM_OPERATOR(silu_, Tensor&(Tensor&))
BRIM_OPERATOR(dropout, Tensor(const Tensor&, double))
BRIM_OPERATOR(dropout_, Tensor&(Tensor&, double))
BRIM_OPERATOR(linear, Tensor(const Tensor&, const Tensor&, Maybe, bool, bool))
BRIM_OPERATOR(conv, Tensor(const Tensor&, const Tensor&, Maybe, IntArrayRef, IntArrayRef,
                           IntArrayRef, bool, IntArrayRef, std::int64_t, bool, bool))
BRIM_OPERATOR(batch_norm, Tensor(const Tensor&, Maybe, Maybe, Maybe, Maybe, bool, double, double))
BRIM_OPERATOR(layer_norm, Tensor(const Tensor&, IntArrayRef, Maybe, Maybe, double))
BRIM_OPERATOR(group_norm, Tensor(const Tensor&, std::int64_t, Maybe, Maybe, double))
BRIM_OPERATOR(rms_norm, Tensor(const Tensor&, IntArrayRef, Maybe, std::optional<double>))
BRIM_OPERATOR(max_pool,
              Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool))
BRIM_OPERATOR(max_pool_with_indices,
              std::tuple<Tensor, Tensor>(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef,
                                         IntArrayRef, bool))
BRIM_OPERATOR(avg_pool, Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, bool, bool,
                               std::optional<std::int64_t>))
BRIM_OPERATOR(adaptive_avg_pool, Tensor(const Tensor&, IntArrayRef))

#undef BRIM_OPERATOR

bool ask_python(const Tensor& tensor) {
  const py::gil_scoped_acquire locked;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  return py::module_::import("brim.nn._elsewhere").attr("is_known")(object).cast<bool>();
}

template <class Call>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Call::call)),
          METH_FASTCALL, nullptr};
}

}  // namespace

void register_nn(py::module_& m) {
  nn::set_subclass_rule(ask_python);
  py::module_ ops = m.def_submodule("ops", "The operators of brim, called without torch's parser");
  static PyMethodDef methods[] = {
      method<Call_gate>("gate"),
      method<Call_gate_>("gate_"),
      method<Call_gelu>("gelu"),
      method<Call_silu>("silu"),
      method<Call_silu_>("silu_"),
      method<Call_dropout>("dropout"),
      method<Call_dropout_>("dropout_"),
      method<Call_linear>("linear"),
      method<Call_conv>("conv"),
      method<Call_batch_norm>("batch_norm"),
      method<Call_layer_norm>("layer_norm"),
      method<Call_group_norm>("group_norm"),
      method<Call_rms_norm>("rms_norm"),
      method<Call_max_pool>("max_pool"),
      method<Call_max_pool_with_indices>("max_pool_with_indices"),
      method<Call_avg_pool>("avg_pool"),
      method<Call_adaptive_avg_pool>("adaptive_avg_pool"),
      {nullptr, nullptr, 0, nullptr},
  };
  TORCH_CHECK(PyModule_AddFunctions(ops.ptr(), methods) == 0);
}

}  // namespace brim::python
