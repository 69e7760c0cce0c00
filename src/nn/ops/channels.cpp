#include "nn/ops/channels.h"

#include "nn/autograd/node.h"

namespace brim::nn {

at::Tensor sum_in_parts(const at::Tensor& tensor, at::IntArrayRef dims, at::ScalarType type) {
  constexpr std::int64_t kParts = 16;
  constexpr std::int64_t kFewElements = 65536;  // their copy is not worth the calls
  if (!tensor.is_cpu() || is_traced(tensor) || tensor.numel() < kFewElements ||
      !at::isReducedFloatingType(tensor.scalar_type())) {
    return tensor.sum(dims, false, type);
  }
  at::Tensor sum;
  for (const at::Tensor& part : tensor.chunk(kParts, 0)) {
    const at::Tensor more = part.sum(dims, false, at::kFloat);
    sum = sum.defined() ? sum.add(more) : more;
  }
  return sum.to(type);
}

}  // namespace brim::nn
