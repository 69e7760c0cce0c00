#include "nn/autograd/autocast.h"

#include <ATen/autocast_mode.h>

namespace brim::nn {

Autocast::Autocast(c10::DeviceType device)
    : device_(device),
      low_(at::autocast::get_lower_precision_fp_from_device_type(device)),
      off_(at::autocast::get_autocast_dispatch_key_from_device_type(device)) {}

at::Tensor Autocast::cast(at::ScalarType to, const at::Tensor& tensor) const {
  return at::autocast::cached_cast(to, tensor, device_);
}

std::optional<at::Tensor> Autocast::cast(at::ScalarType to,
                                         const std::optional<at::Tensor>& tensor) const {
  return at::autocast::cached_cast(to, tensor, device_);
}

}  // namespace brim::nn
