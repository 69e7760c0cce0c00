#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string_view>
#include <vector>

#include "bindings.h"
#include "interpreter.h"

namespace brim::python {
namespace {

/// Whether C++ code sees the device that a fake tensor stands for, or that of its storage (meta).
/// Where it sees the first, the autograd engine asks that device for streams and threads, and fails
/// if there is none. Where it sees the second, is_cuda() stays true nevertheless, because it then
/// follows the dispatch keys: that is what autocast and composite operators look at.
void show_fake_device(const std::vector<at::Tensor>& tensors, bool show) {
  for (const at::Tensor& tensor : tensors) {
    tensor.unsafeGetTensorImpl()->set_python_custom_device(show);
  }
}

/// Gives each of two tensors the values, the class, the attributes and the hooks of the other.
/// Python code cannot do this in one step: an interrupt between the steps would leave a tensor in
/// pieces.
void exchange_tensors(const py::object& a, const py::object& b) {
  provided("swap_tensors")(a, b);  // first: torch refuses it where C++ code has weak references
  for (const char* name :
       {"__class__", "__dict__", "_backward_hooks", "_post_accumulate_grad_hooks"}) {
    const py::object of_a = a.attr(name);
    const py::object of_b = b.attr(name);
    if (!of_a.is(of_b)) {  // without hooks there are none to clear, such as those of C++
      a.attr(name) = of_b;
      b.attr(name) = of_a;
    }
  }
}

/// What a mode of Python does with an operator: `mode.handle`, or `mode.answer` for a question such
/// as that for a tensor's device. C++ code that asks it may not throw, and an exception ends the
/// process: so no code of ours runs then, in which an interrupt could be raised.
py::object dispatch(const py::object& mode, const py::object& func, const py::object& types,
                    const py::tuple& args, const py::object& kwargs) {
  const bool asks = func.attr("namespace").cast<std::string_view>() == "prim";
  const py::object run = mode.attr(asks ? "answer" : "handle");
  return run(func, types, args, kwargs.is_none() ? py::dict() : kwargs);
}

/// The answer of a mode that has none of its own.
py::object pass_on(const py::object& func, const py::object& /*types*/, const py::tuple& args,
                   const py::dict& kwargs) {
  return func(*args, **kwargs);
}

}  // namespace

void register_fake_tensor(py::module_& m) {
  m.def("show_fake_device", &show_fake_device);
  m.def("exchange_tensors", &exchange_tensors);
  m.def("dispatch", &dispatch, py::arg("mode"), py::arg("func"), py::arg("types"),
        py::arg("args") = py::tuple(), py::arg("kwargs") = py::none());
  m.def("pass_on", &pass_on);
}

}  // namespace brim::python
