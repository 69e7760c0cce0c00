#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rand.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "adapt/thread_ranks.h"

// A model, its data and its ranks, for the tests of Microbatches.

namespace brim::tests {

/// Two layers with dropout between them, one weight frozen.
struct Model {
  std::vector<at::Tensor> weights{weight({8, 4}), weight({8}), weight({1, 8})};
  double dropout = 0.0;

  explicit Model(double p = 0.0) : dropout(p) { weights[1].set_requires_grad(false); }

  static at::Tensor weight(at::IntArrayRef shape) {
    return (at::rand(shape, at::kDouble) - 0.5).requires_grad_(true);
  }
  at::Tensor operator()(const at::Tensor& x) const {
    const at::Tensor hidden = at::linear(x, weights[0], weights[1]).tanh();
    return at::linear(at::dropout(hidden, dropout, true), weights[2]).squeeze(-1);
  }
  at::Tensor gradients() const {
    return at::cat({weights[0].grad().flatten(), weights[2].grad().flatten()});
  }
  void zero() const {
    for (const at::Tensor& each : weights) {
      each.mutable_grad() = at::Tensor();
    }
  }
};

struct Data {
  at::Tensor x = at::rand({10, 4}, at::kDouble);
  at::Tensor y = at::rand({10}, at::kDouble);
};

/// Sums of tensors over two ranks, which every rank adds up in the same order.
class ThreadSum {
 public:
  std::function<void(const at::Tensor&)> of(std::int64_t rank) {
    return [this, rank, round = 0, channel = std::make_shared<ThreadChannel>(meet_, rank)](
               const at::Tensor& tensor) mutable {
      std::vector<at::Tensor>* now = nullptr;
      {
        const std::lock_guard lock(mutex_);
        now = &given_[round++];
        now->resize(2);
        (*now)[static_cast<std::size_t>(rank)] = tensor.clone();
      }
      std::vector<std::int64_t> arrived{0};
      channel->least(arrived);
      tensor.copy_((*now)[0] + (*now)[1]);
    };
  }

 private:
  ThreadRanks meet_{2};
  std::mutex mutex_;
  std::map<int, std::vector<at::Tensor>> given_;  // by round
};

}  // namespace brim::tests
