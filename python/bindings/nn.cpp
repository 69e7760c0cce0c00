#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/core/Tensor.h>
#include <brim/memory/stats.h>
#include <brim/nn/pressure.h>
#include <brim/nn/rerun.h>
#include <brim/nn/subclasses.h>
#include <brim/nn/watching.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "fast_call.h"
#include "interpreter.h"

namespace brim::python {

const at::Tensor& plain_tensor(PyObject* value) {
  check_plain(THPVariable_CheckExact(value));
  return THPVariable_Unpack(value);
}

bool is_watched() {
  return at::impl::torch_function_mode_enabled() || at::tracer::impl::is_dispatch_enabled();
}

PyObject* call_via_dispatcher(const char* name, PyObject* const* values, Py_ssize_t count) {
  py::tuple args(count + 1);
  args[0] = name;
  for (Py_ssize_t i = 0; i < count; ++i) {
    args[static_cast<std::size_t>(i) + 1] = py::handle(values[i]);
  }
  return PyObject_Call(provided("via_dispatcher").ptr(), args.ptr(), nullptr);
}

namespace {

using at::IntArrayRef;
using at::Tensor;

using Maybe = const std::optional<Tensor>&;

/// Binds an operator that has one of these signatures.
template <class... Signatures>
struct Binder {
  static void bind(py::module_& ops, const c10::OperatorHandle& op) {
    PyObject* function = nullptr;
    const auto fits = [&](PyObject* made) {
      function = made;
      return made != nullptr;
    };
    if ((fits(FastCall<Signatures>::make(op)) || ...)) {
      const std::string name = op.schema().name().substr(std::string_view("brim::").size());
      ops.attr(name.c_str()) = py::reinterpret_steal<py::object>(function);
    }
  }
};

using Int = std::int64_t;  // `recompute` is one, too

using Operators = Binder<
    // Activations, without options, with one or two numbers, in place, and others
    Tensor(const Tensor&, Int), Tensor&(Tensor&, Int), Tensor(const Tensor&, double, Int),
    Tensor&(Tensor&, double, Int), Tensor(const Tensor&, double, double, Int),
    Tensor&(Tensor&, double, double, Int), Tensor(const Tensor&, std::string_view, Int),
    Tensor(const Tensor&, const Tensor&),
    // Gated activations
    Tensor(const Tensor&, const Tensor&, std::string_view, Int),
    Tensor(const Tensor&, std::string_view, bool, Int, Int),
    // Sums in place, products
    Tensor&(Tensor&, const Tensor&), Tensor(const Tensor&, const Tensor&, Int),
    // Dropout
    Tensor(const Tensor&, double), Tensor&(Tensor&, double),
    // Linear, convolutions
    Tensor(const Tensor&, const Tensor&, Maybe, Maybe, Int, bool),
    Tensor(const Tensor&, const Tensor&, Maybe, IntArrayRef, IntArrayRef, IntArrayRef, bool,
           IntArrayRef, Int, Maybe, Int, bool),
    // Batch, layer, group and RMS norm
    Tensor(const Tensor&, Maybe, Maybe, Maybe, Maybe, bool, double, double),
    Tensor(const Tensor&, IntArrayRef, Maybe, Maybe, double, bool),
    Tensor(const Tensor&, std::int64_t, Maybe, Maybe, double, bool),
    Tensor(const Tensor&, IntArrayRef, Maybe, std::optional<double>, bool),
    Tensor(const Tensor&, Maybe, double, double, bool),
    // Pools
    Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool),
    std::tuple<Tensor, Tensor>(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef,
                               bool),
    Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, bool, bool,
           std::optional<std::int64_t>),
    Tensor(const Tensor&, IntArrayRef),
    // Losses
    Tensor(const Tensor&, const Tensor&, Maybe, Int, Int, double, bool, Int),
    Tensor(const Tensor&, const Tensor&, Maybe, const Tensor&, Maybe, std::int64_t, std::int64_t,
           double, double, double, bool, bool, std::int64_t)>;

thread_local PyObject* watching_unpack = nullptr;

bool watching_hooks_hold(const torch::autograd::SavedVariable& saved) {
  const py::gil_scoped_acquire locked;
  const auto held = saved.retrieve_unpack_hook_data();
  return held && held->first.ptr(getPyInterpreter()) == watching_unpack;
}

/// @param unpack, below functions of pairs of saved-tensor hooks, or None
void watch_hooks(const py::object& unpack, const py::object& below) {
  watching_unpack = unpack.is_none() ? nullptr : unpack.ptr();
  nn::set_hooks_that_watch({.unpack = watching_unpack,
                            .below = below.is_none() ? nullptr : below.ptr(),
                            .holds = watching_hooks_hold});
}

bool ask_python(const Tensor& tensor) {
  const py::gil_scoped_acquire locked;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  return provided("is_known")(object).cast<bool>();
}

bool is_compiling() {
  const py::gil_scoped_acquire locked;
  return provided("is_compiling")().cast<bool>();
}

}  // namespace

void register_nn(py::module_& m) {
  nn::set_subclass_rule(ask_python, is_compiling);
  py::module_ ops = m.def_submodule("ops", "The operators of brim, called without torch's parser");
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.starts_with("brim::")) {
      Operators::bind(ops, *dispatcher.findSchema(name));
    }
  }
  m.def("watch_hooks", watch_hooks);
  m.def("rerun", torch::wrap_pybind_function_no_gil(
                     [](std::function<Tensor(const std::vector<Tensor>&)> function,
                        const std::vector<Tensor>& inputs, Int recompute, bool is_cheap) {
                       return nn::functional::rerun(std::move(function), inputs, recompute,
                                                    is_cheap);
                     }));
  m.def("pressure", [] {
    const nn::Pressure now = nn::pressure();
    return std::tuple(now.values, now.value_bytes, now.requests, now.dropped, now.dropped_bytes,
                      now.foreseen, now.foreseen_bytes, now.recomputed, now.blocks, now.seconds);
  });
  m.def("reset_pressure", nn::reset_pressure);
  m.def("record_pressure", [](const py::function& work, const py::object& device) {
    std::vector<std::tuple<Int, Int, Int, Int>> moments;
    for (const nn::PressureMoment& each :
         nn::record_pressure([&] { work(); }, resolve_device(device_argument(device)))) {
      moments.emplace_back(each.held, each.given_up, each.dropped, each.again);
    }
    return moments;
  });
}

}  // namespace brim::python
