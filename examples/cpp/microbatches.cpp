// A training step that fits whatever memory there is, with the gradients of the whole batch.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <brim/adapt/microbatches.h>
#include <brim/memory/budget.h>
#include <brim/memory/cpu.h>
#include <brim/memory/stats.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <vector>

int main() {
  brim::install_cpu_allocator();
  std::vector<at::Tensor> weights{at::rand({512, 64}) - 0.5, at::rand({512, 512}) - 0.5,
                                  at::rand({10, 512}) - 0.5};
  for (at::Tensor& weight : weights) {
    weight.requires_grad_(true);
  }
  const at::Tensor x = at::rand({2048, 64});
  const at::Tensor y = at::randint(10, {2048}, at::kLong);

  brim::Microbatches step([&](const at::Tensor& part, const at::Tensor& labels) {
    const at::Tensor hidden = at::linear(part, weights[0]).tanh();
    return at::cross_entropy_loss(at::linear(at::linear(hidden, weights[1]).tanh(), weights[2]),
                                  labels);
  });

  const at::Tensor loss = step(x, y);
  const at::Tensor whole = weights[0].grad().clone();
  std::cout << "without a budget: parts of " << step.size() << ", loss " << loss.item<float>()
            << '\n';
  for (const std::int64_t mebibytes : {16, 8}) {
    for (at::Tensor& weight : weights) {
      weight.mutable_grad() = at::Tensor();
    }
    const std::int64_t held = brim::memory_stats(at::kCPU).allocated;
    const brim::Budget budget(held + (mebibytes << 20), at::kCPU);
    step(x, y);
    if (!weights[0].grad().allclose(whole, 1e-4, 1e-7)) {
      std::cerr << "the gradients differ\n";
      return EXIT_FAILURE;
    }
    std::cout << "with " << mebibytes << " MiB more: parts of " << step.size() << '\n';
  }
  return EXIT_SUCCESS;
}
