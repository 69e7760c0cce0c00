#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "bindings.h"

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

/// Gives each of two tensors the values, the class, the attributes and the hooks of the other. Python
/// code cannot do this in one step: an interrupt between the steps would leave a tensor in pieces.
void exchange_tensors(const py::object& a, const py::object& b) {
  static const py::handle exchange =
      py::module_::import("torch._C").attr("_swap_tensor_impl").cast<py::object>().release();
  exchange(a, b);  // first: torch refuses it where C++ code has weak references
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

/// The state of torch that belongs to the calling thread when this is made: grad and inference
/// mode, autocast, modes of Python, hooks of saved tensors.
class ThreadState {
 public:
  void put_back() const { at::ThreadLocalState::setThreadLocalState(state_); }

 private:
  at::ThreadLocalState state_;
};

}  // namespace

void register_fake_tensor(py::module_& m) {
  m.def("show_fake_device", &show_fake_device);
  m.def("exchange_tensors", &exchange_tensors);
  py::class_<ThreadState>(m, "ThreadState")
      .def(py::init<>())
      .def("put_back", &ThreadState::put_back);
}

}  // namespace brim::python
