#include "mean_count.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sum.h>

namespace brim {

double labels_counted(const at::Tensor& target, const at::Tensor& weight,
                      std::int64_t ignore_index) {
  const at::NoGradGuard no_grad;
  const at::Tensor counts = target.ne(ignore_index);
  if (!weight.defined()) {
    return counts.sum().item<double>();
  }
  return weight.index_select(0, target.masked_select(counts)).sum(at::kDouble).item<double>();
}

}  // namespace brim
