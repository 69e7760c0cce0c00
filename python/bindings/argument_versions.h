#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "adaptive_config.h"
#include "tensor_argument.h"

namespace brim::python {

/// How often tensors among the arguments had been written to before an attempt. On the path of a
/// call that fits.
class ArgumentVersions {
 public:
  void take(const CallArguments& arguments) {
    versions_.clear();
    const Py_ssize_t count = arguments.count();
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyObject* const value = arguments.values[place];
      if (PyLong_CheckExact(value) || value == Py_None) {
        continue;  // faster than to find that its type does not derive from torch.Tensor
      }
      if (const at::Tensor* tensor = tensor_in(value)) {
        versions_.push_back({place, version_of(*tensor)});
      }
    }
  }

  /// Calls `then(place, tensor)` for each argument that was written to since.
  template <class Then>
  void changed(const CallArguments& arguments, const Then& then) const {
    for (const auto& [place, version] : versions_) {
      const at::Tensor& tensor = *tensor_in(arguments.values[place]);
      if (version_of(tensor) != version) {
        then(place, tensor);
      }
    }
  }

 private:
  static std::uint32_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference()
               ? 0
               : tensor.unsafeGetTensorImpl()->version_counter().current_version();
  }

  struct Version {
    Py_ssize_t place;
    std::uint32_t number;
  };
  c10::SmallVector<Version, 4> versions_;
};

}  // namespace brim::python
