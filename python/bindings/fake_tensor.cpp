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

}  // namespace

void register_fake_tensor(py::module_& m) { m.def("show_fake_device", &show_fake_device); }

}  // namespace brim::python
