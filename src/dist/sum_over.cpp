#include <ATen/ops/view_as_real.h>
#include <brim/dist/sum_over.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <utility>
#include <vector>

#include "waiting.h"

namespace brim {

namespace {

/// To destroy a group may wait for a thread of its own that wants Python's GIL.
struct Held {
  c10::intrusive_ptr<c10d::ProcessGroup> group;

  explicit Held(c10::intrusive_ptr<c10d::ProcessGroup> held) : group(std::move(held)) {}
  ~Held() {
    waiting([&] { group.reset(); });
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
};

}  // namespace

std::function<void(const at::Tensor&)> sum_over(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  TORCH_CHECK_VALUE(group, "group must be a process group, got none");
  return [held = std::make_shared<Held>(std::move(group))](const at::Tensor& tensor) {
    std::vector<at::Tensor> tensors{tensor.is_complex() ? at::view_as_real(tensor) : tensor};
    c10d::AllreduceOptions options;
    options.asyncOp = false;
    waiting([&] {
      if (const auto work = held->group->allreduce(tensors, options)) {  // null: done already
        work->wait();
      }
    });
  };
}

}  // namespace brim
