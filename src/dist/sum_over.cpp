#include <ATen/ops/view_as_real.h>
#include <brim/dist/sum_over.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>
#include <vector>

#include "waiting.h"

namespace brim {

std::function<void(const at::Tensor&)> sum_over(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return [group = std::move(group)](const at::Tensor& tensor) {
    std::vector<at::Tensor> tensors{tensor.is_complex() ? at::view_as_real(tensor) : tensor};
    c10d::AllreduceOptions options;
    options.asyncOp = false;
    waiting([&] {
      if (const auto work = group->allreduce(tensors, options)) {  // null: done already
        work->wait();
      }
    });
  };
}

}  // namespace brim
