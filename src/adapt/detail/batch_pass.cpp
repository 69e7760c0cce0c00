#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mul.h>
#include <brim/adapt/detail/batch_pass.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "adapt/detail/gradient_of.h"
#include "adapt/detail/graph_leaves.h"

namespace brim::detail {
namespace {

constexpr double kRounding = 1e-12;  // relative

constexpr const char* kDifferentTerms =
    "the loss is a sum of means over different things (as of labels that are not ignored and of "
    "items), whose counts are not in proportion, so that no part of a batch has one weight: pass "
    "reduction=\"sum\", and divide each sum in the loss function by what the whole batch counts";

/// Whether losses can be added up by one weight each, see BatchPass::shape.
bool same_shape(double one, double other) {
  return std::abs(one - other) <= 1e-6 * std::max({std::abs(one), std::abs(other), 1.0});
}

/// How much each part counts, and the weighted sum of their losses.
///
/// Where the parts count for themselves, the total is known only after the last one. Until then a
/// part is weighted in units of a total that is expected from the first one: by the count itself,
/// gradients in half precision would overflow.
class WeightedLoss {
 public:
  /// @param unit of all weights; 0: all items, or the first count.
  WeightedLoss(Reduction reduction, std::int64_t items, double unit)
      : reduction_(reduction), items_(static_cast<double>(items)), unit_(unit) {}

  /// The weight of a part. @param items COUNT; 0: it does not count, whatever it says.
  double add(const PartLoss& part, std::int64_t items, const PartWeights& weights, bool counted) {
    check(part);
    const PartWeights::Count own =
        counted ? weights.count(part, items)
                : PartWeights::Count{.value = part.count.value_or(static_cast<double>(items)),
                                     .is_own = part.count.has_value()};
    const double count = items == 0 ? 0.0 : own.value;
    TORCH_CHECK_VALUE(std::isfinite(count) && count >= 0,
                      "the count of a part must be 0 or more, got ", count);
    counts_ |= own.is_own;
    count_ += count;
    options_ = part.value.options().requires_grad(false);
    if (unit_ == 0) {
      unit_ = own.is_own ? count * items_ / static_cast<double>(std::max<std::int64_t>(items, 1))
                         : items_;
    }
    if (count == 0) {
      return 0.0;  // a mean over nothing is NaN
    }
    const double shape = own.is_own ? own.others : -1.0;
    TORCH_CHECK_VALUE(same_shape(shape_.value_or(shape), shape), kDifferentTerms);
    shape_ = shape;
    const double weight = reduction_ == Reduction::sum ? 1.0 : count / unit_;
    const at::Tensor value = part.value.detach().to(at::toOpMathType(part.value.scalar_type()));
    if (!sum_.defined()) {
      sum_ = weight == 1.0 ? value : at::mul(value, weight);
    } else {
      sum_ = at::add(sum_, value, weight);
    }
    return weight;
  }

  /// By which what is weighted is multiplied in the end. @param count of all parts.
  [[nodiscard]] double factor(double count) const {
    const double last = reduction_ == Reduction::sum || count == 0 ? 1.0 : unit_ / count;
    return std::abs(last - 1) < kRounding ? 1.0 : last;
  }

  [[nodiscard]] double count() const { return count_; }
  /// Whether the parts count for themselves.
  [[nodiscard]] bool counts() const { return counts_; }
  [[nodiscard]] double shape() const { return shape_.value_or(-1.0); }

  /// Of the weighted losses.
  [[nodiscard]] double sum() const { return sum_.defined() ? sum_.item<double>() : 0.0; }

  /// The loss of a batch that has this sum of weighted losses, and counts this.
  [[nodiscard]] at::Tensor total(double sum, double count) const {
    const double nothing = std::numeric_limits<double>::quiet_NaN();
    return at::full({}, count == 0 ? nothing : sum * factor(count), options_);
  }

  [[nodiscard]] at::Tensor total() const {
    if (!sum_.defined()) {
      return at::full({}, std::numeric_limits<double>::quiet_NaN(), options_);
    }
    const double last = factor(count_);
    return (last == 1.0 ? sum_ : at::mul(sum_, last)).to(options_.dtype());
  }

 private:
  void check(const PartLoss& part) {
    TORCH_CHECK_VALUE(
        part.value.defined() && part.value.numel() == 1,
        "the loss of a part must have one element, such as a mean over its items, got ",
        part.value.defined() ? c10::str("shape ", part.value.sizes()) : "none");
    TORCH_CHECK_VALUE(part.value.requires_grad(),
                      "the loss of a part does not depend on anything that needs a gradient",
                      at::GradMode::is_enabled() ? "" : ": gradients are off, as by no_grad");
    TORCH_CHECK_VALUE(!has_count_ || *has_count_ == part.count.has_value(),
                      "the loss function returned a count for some parts only");
    has_count_ = part.count.has_value();
    if (part.count) {
      TORCH_CHECK_VALUE(reduction_ == Reduction::mean,
                        "the loss function returned a count, which is for reduction \"mean\"");
      TORCH_CHECK_VALUE(std::isfinite(*part.count) && *part.count >= 0,
                        "the count of a part must be 0 or more, got ", *part.count);
    }
  }

  Reduction reduction_;
  double items_;
  double count_ = 0;
  double unit_;
  std::optional<bool> has_count_;  // whether parts say their count; empty before the first
  bool counts_ = false;
  std::optional<double> shape_;  // of the parts that count
  at::Tensor sum_;
  at::TensorOptions options_;  // of the parts' losses
};

}  // namespace

at::Tensor BatchPass::run(std::int64_t items, std::int64_t size, Forward forward, Backward backward,
                          const AllRanks* all) {
  TORCH_CHECK_VALUE(items >= 1, "the batch must have 1 item or more, got ", items);
  TORCH_CHECK_VALUE(size >= 1, "the size of a part must be 1 or more, got ", size);
  undo();
  try {
    return run_parts(items, size, forward, backward, all);
  } catch (...) {
    undo();  // before the driver checks how much memory came back
    throw;
  }
}

at::Tensor BatchPass::run_parts(std::int64_t items, std::int64_t size, Forward forward,
                                Backward backward, const AllRanks* all) {
  put_aside_named();
  WeightedLoss loss(reduction_, items, all != nullptr ? all->unit : 0.0);
  const std::int64_t parts = all != nullptr ? all->parts : (items + size - 1) / size;
  const auto start = [&](std::int64_t part) {
    return all != nullptr ? part * items / parts : std::min(part * size, items);
  };
  for (std::int64_t i = 0; i < parts; ++i) {
    const std::int64_t begin = start(i);
    const std::int64_t count = start(i + 1) - begin;
    const PartLoss part = count == 0 ? forward(0, 1) : forward(begin, begin + count);
    if (i == 0) {
      check_no_gradients();
    }
    const double weight =
        loss.add(part, count, weights_, parts > 1 || all != nullptr || counts_always_);
    if (weight > 0 || all != nullptr) {  // where other ranks wait, a part that counts 0 runs too
      for (const at::Tensor& leaf : leaves_of(part.value)) {
        put_aside(leaf);
      }
      backward(part.value, weight == 1.0 ? at::Tensor() : at::full_like(part.value, weight));
    }
  }
  count_ = loss.count();
  shape_ = loss.shape();
  at::Tensor total;
  if (all != nullptr && reduction_ == Reduction::mean) {
    const double own = count_ > 0 ? 1.0 : 0.0;
    const std::vector<double> means =
        all->means({own, own * shape_, own * shape_ * shape_, count_, loss.sum()});
    TORCH_CHECK_VALUE(
        same_shape(std::sqrt(std::max(0.0, means[0] * means[2] - means[1] * means[1])), 0.0),
        kDifferentTerms);
    shape_ = means[0] > 0 ? means[1] / means[0] : shape_;
    count_ = means[3];
    total = loss.total(means[4], count_);
  } else {
    total = loss.total();
  }
  if (const double factor = loss.factor(count_); factor != 1.0) {
    scale_gradients(factor);
  }
  return total;
}

at::Tensor BatchPass::run_as(c10::function_ref<at::Tensor()> work) {
  undo();
  try {
    put_aside_named();
    ran_backward_ = false;
    return work();
  } catch (...) {
    undo();
    throw;
  }
}

void BatchPass::reach(const at::Tensor& root, std::span<const at::Tensor> but) {
  if (!std::exchange(ran_backward_, true)) {
    check_no_gradients();
  }
  for (const at::Tensor& leaf : leaves_of(root)) {
    if (std::ranges::none_of(but, [&](const at::Tensor& each) { return each.is_same(leaf); })) {
      put_aside(leaf);
    }
  }
}

void BatchPass::drop_gradients() {
  for (const Leaf& leaf : leaves_) {
    gradient_of(leaf.tensor) = at::Tensor();
  }
}

void BatchPass::check_no_gradients() const {
  for (const Leaf& leaf : leaves_) {
    TORCH_CHECK_VALUE(!gradient_of(leaf.tensor).defined(),
                      "the loss function called backward itself: it must only return the loss, on "
                      "which Microbatches calls backward");
  }
}

std::vector<at::Tensor> BatchPass::not_named() const {
  std::vector<at::Tensor> found;
  for (std::size_t i = named_leaves_; i < leaves_.size(); ++i) {
    if (gradient_of(leaves_[i].tensor).defined()) {
      found.push_back(leaves_[i].tensor);
    }
  }
  return found;
}

void BatchPass::put_aside_named() {
  for (const at::Tensor& leaf : named_) {
    if (leaf.requires_grad()) {
      put_aside(leaf);
    }
  }
  named_leaves_ = leaves_.size();
}

void BatchPass::put_aside(const at::Tensor& leaf) {
  if (known_.insert(leaf.unsafeGetTensorImpl()).second) {
    leaves_.push_back({leaf, std::exchange(gradient_of(leaf), at::Tensor())});
  }
}

void BatchPass::scale_gradients(double factor) {
  std::vector<at::Tensor> gradients;
  for (const Leaf& leaf : leaves_) {
    if (const at::Tensor& gradient = gradient_of(leaf.tensor); gradient.defined()) {
      gradients.push_back(gradient);
    }
  }
  if (!gradients.empty()) {
    const at::NoGradGuard no_grad;
    at::_foreach_mul_(gradients, factor);
  }
}

void BatchPass::finish() {
  const at::NoGradGuard no_grad;
  // What may run out of memory comes first, while everything can still be undone.
  std::vector<at::Tensor> sums(leaves_.size());
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    const Leaf& leaf = leaves_[i];
    const at::Tensor& gradient = gradient_of(leaf.tensor);
    if (leaf.before.defined() && gradient.defined() && leaf.before.is_sparse()) {
      sums[i] = at::add(gradient, leaf.before);
    }
  }
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    Leaf& leaf = leaves_[i];
    at::Tensor& gradient = gradient_of(leaf.tensor);
    if (sums[i].defined()) {
      gradient = sums[i];
    } else if (leaf.before.defined()) {
      if (gradient.defined()) {
        leaf.before.add_(gradient);
      }
      gradient = std::move(leaf.before);
    }
  }
  leaves_.clear();
  known_.clear();
}

void BatchPass::pool(const at::Tensor& loss, double count, double shape) {
  const at::NoGradGuard no_grad;
  if (count > 0) {
    TORCH_CHECK_VALUE(same_shape(pooled_shape_.value_or(shape), shape), kDifferentTerms);
    pooled_shape_ = shape;
  }
  const bool is_sum = reduction_ == Reduction::sum;
  const double total = pooled_count_ + count;
  const double kept = is_sum || total == 0 ? 1.0 : pooled_count_ / total;
  const double added = is_sum ? 1.0 : total == 0 ? 0.0 : count / total;
  std::unordered_set<const c10::TensorImpl*> before;
  for (const Leaf& leaf : pooled_) {
    before.insert(leaf.tensor.unsafeGetTensorImpl());
    if (!known_.contains(leaf.tensor.unsafeGetTensorImpl())) {
      if (const at::Tensor& gradient = gradient_of(leaf.tensor); gradient.defined()) {
        gradient.mul_(kept);
      }
    }
  }
  for (Leaf& leaf : leaves_) {
    at::Tensor& gradient = gradient_of(leaf.tensor);
    if (gradient.defined()) {
      gradient.mul_(added);
    }
    if (!before.contains(leaf.tensor.unsafeGetTensorImpl())) {
      pooled_.push_back(std::move(leaf));
    } else if (leaf.before.defined()) {  // what was pooled
      leaf.before.mul_(kept);
      if (!gradient.defined()) {
        gradient = std::move(leaf.before);
      } else if (leaf.before.is_sparse()) {
        gradient = at::add(gradient, leaf.before);
      } else {
        leaf.before.add_(gradient);
        gradient = std::move(leaf.before);
      }
    }
  }
  leaves_.clear();
  known_.clear();
  if (!pooled_loss_.defined()) {
    pooled_loss_ = loss.to(at::toOpMathType(loss.scalar_type()), /*non_blocking=*/false,
                           /*copy=*/true);
    last_loss_ = loss;
  } else if (added > 0) {
    pooled_loss_ = pooled_count_ == 0 && !is_sum ? loss.to(pooled_loss_.scalar_type())
                                                 : pooled_loss_ * kept + loss * added;
  }
  pooled_count_ = total;
}

at::Tensor BatchPass::finish_pool() {
  TORCH_CHECK_VALUE(pooled_loss_.defined(), "there must be 1 batch or more, got none");
  leaves_ = std::move(pooled_);
  pooled_.clear();
  finish();
  const at::Tensor loss = pooled_loss_.to(last_loss_.scalar_type());
  undo_pool();
  return loss;
}

void BatchPass::undo_pool() noexcept {
  undo();
  leaves_ = std::move(pooled_);
  pooled_.clear();
  undo();
  pooled_count_ = 0;
  pooled_shape_.reset();
  pooled_loss_ = last_loss_ = at::Tensor();
}

void BatchPass::undo() noexcept {
  for (Leaf& leaf : leaves_) {
    gradient_of(leaf.tensor) = std::move(leaf.before);
  }
  leaves_.clear();
  known_.clear();
}

}  // namespace brim::detail
