#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace brim::nn {

/// at::pad with mode "reflect", "replicate" or "circular"; keeps no input, where torch's own keeps
/// it for its form.
at::Tensor pad(const at::Tensor& input, at::IntArrayRef padding, std::string_view mode);

}  // namespace brim::nn
