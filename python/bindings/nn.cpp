#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/core/Tensor.h>
#include <brim/nn/rerun.h>
#include <brim/nn/subclasses.h>
#include <brim/nn/watching.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "fast_call.h"
#include "interpreter.h"

namespace brim::python {

const at::Tensor& plain_tensor(PyObject* value) {
  check_plain(THPVariable_CheckExact(value));
  return THPVariable_Unpack(value);
}

namespace {

PyTypeObject* saving_mode = nullptr;  // the class of brim.saving(), which leaves brim's alone

/// Whether any mode is active that may want to see a call of brim's operators.
bool is_mode_watching() {
  using Modes = at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) {
    return false;
  }
  for (std::int64_t i = 0; i < Modes::stack_len(); ++i) {
    if (Py_TYPE(Modes::get_stack_at(i)->ptr(getPyInterpreter())) != saving_mode) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool is_watched() { return is_mode_watching() || at::tracer::impl::is_dispatch_enabled(); }

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

using Operators = Binder<
    // Activations, without options, with one or two numbers, in place, and others
    Tensor(const Tensor&, bool), Tensor&(Tensor&, bool), Tensor(const Tensor&, double, bool),
    Tensor&(Tensor&, double, bool), Tensor(const Tensor&, double, double, bool),
    Tensor&(Tensor&, double, double, bool), Tensor(const Tensor&, std::string_view, bool),
    Tensor(const Tensor&, const Tensor&),
    // Gated activations
    Tensor(const Tensor&, const Tensor&, std::string_view, bool),
    Tensor(const Tensor&, std::string_view, bool, std::int64_t, bool),
    // Sums in place, products
    Tensor&(Tensor&, const Tensor&), Tensor(const Tensor&, const Tensor&, bool),
    // Dropout
    Tensor(const Tensor&, double), Tensor&(Tensor&, double),
    // Linear, convolutions
    Tensor(const Tensor&, const Tensor&, Maybe, Maybe, bool, bool),
    Tensor(const Tensor&, const Tensor&, Maybe, IntArrayRef, IntArrayRef, IntArrayRef, bool,
           IntArrayRef, std::int64_t, Maybe, bool, bool),
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
    Tensor(const Tensor&, const Tensor&, Maybe, std::int64_t, std::int64_t, double, bool, bool),
    Tensor(const Tensor&, const Tensor&, Maybe, const Tensor&, Maybe, std::int64_t, std::int64_t,
           double, double, double, bool, bool, std::int64_t)>;

/// Which tensors of a call need a gradient, as one number: the parameters of a module and of those
/// inside of it, and the arguments. Without Python's iterators, which would take some microseconds
/// per parameter.
class GradientPattern {
 public:
  void add_module(PyObject* module) {
    if (!enter(module)) {
      return;
    }
    const auto members = py::reinterpret_steal<py::dict>(PyObject_GenericGetDict(module, nullptr));
    if (!members) {
      throw py::error_already_set();
    }
    static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
    static PyObject* const modules = PyUnicode_InternFromString("_modules");
    for_each(PyDict_GetItem(members.ptr(), parameters), [&](PyObject* each) { add_tensor(each); });
    for_each(PyDict_GetItem(members.ptr(), modules), [&](PyObject* each) {
      if (each != Py_None) {
        add_module(each);
      }
    });
    around_.pop_back();
  }

  /// Tensors in any nesting of tuples, lists and dictionaries.
  void add_value(PyObject* value) {
    const bool is_sequence = PyTuple_Check(value) || PyList_Check(value);
    if (!is_sequence && !PyDict_Check(value)) {
      add_tensor(value);
    } else if (enter(value)) {
      for (Py_ssize_t i = 0; is_sequence && i < PySequence_Fast_GET_SIZE(value); ++i) {
        add_value(PySequence_Fast_GET_ITEM(value, i));
      }
      for_each(value, [&](PyObject* each) { add_value(each); });
      around_.pop_back();
    }
  }

  [[nodiscard]] std::uint64_t number() const { return number_; }

 private:
  /// False inside of itself.
  bool enter(PyObject* object) {
    const bool is_new = std::ranges::count(around_, object) == 0;
    if (is_new) {
      around_.push_back(object);
    }
    return is_new;
  }

  /// The values of a dictionary; nothing for anything else.
  template <class Run>
  static void for_each(PyObject* dict, const Run& run) {
    PyObject* each = nullptr;
    for (Py_ssize_t at = 0; dict != nullptr && PyDict_Next(dict, &at, nullptr, &each) != 0;) {
      run(each);
    }
  }

  void add_tensor(PyObject* value) {
    if (THPVariable_Check(value)) {
      constexpr std::uint64_t kPrime = 1099511628211;  // as in FNV-1a
      number_ = (number_ ^ (THPVariable_Unpack(value).requires_grad() ? 2U : 1U)) * kPrime;
    }
  }

  std::vector<PyObject*> around_;
  std::uint64_t number_ = 14695981039346656037U;
};

std::uint64_t gradient_pattern(const py::object& module, const py::tuple& args,
                               const py::dict& kwargs) {
  GradientPattern pattern;
  pattern.add_module(module.ptr());
  pattern.add_value(args.ptr());
  pattern.add_value(kwargs.ptr());
  return pattern.number();
}

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

}  // namespace

void register_nn(py::module_& m) {
  nn::set_subclass_rule(ask_python);
  m.def("set_saving_mode", [](const py::type& mode) {
    saving_mode = reinterpret_cast<PyTypeObject*>(py::type(mode).release().ptr());
  });
  py::module_ ops = m.def_submodule("ops", "The operators of brim, called without torch's parser");
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.starts_with("brim::")) {
      Operators::bind(ops, *dispatcher.findSchema(name));
    }
  }
  m.def("gradient_pattern", gradient_pattern);
  m.def("outputs_shared", nn::outputs_shared);
  m.def("watch_hooks", watch_hooks);
  m.def("rerun", torch::wrap_pybind_function_no_gil(nn::functional::rerun));
}

}  // namespace brim::python
