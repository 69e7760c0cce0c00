#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <brim/adapt/agreement.h>
#include <brim/adapt/detail/gradient_reduction.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <ranges>
#include <utility>

#include "adapt/detail/gradient_of.h"
#include "waiting.h"

namespace brim::detail {
namespace {

constexpr std::int64_t kBucketBytes = std::int64_t{25} << 20;  // as DDP's

// The numbers that are summed first.
constexpr std::size_t kNotReady = 0;
constexpr std::size_t kCount = 1;
constexpr std::size_t kLoss = 2;          // times the count, for a mean
constexpr std::size_t kRanks = 3;         // that count something
constexpr std::size_t kShape = 4;         // of their losses
constexpr std::size_t kShapeSquared = 5;  // by which shapes that differ are found
constexpr std::size_t kGradient = 6;      // from here on: whether each parameter has one

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

}  // namespace

bool GradientReduction::is_planned() const {
  const auto needs = [](const at::Tensor& parameter) { return parameter.requires_grad(); };
  const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  return !trained_.empty() &&
         std::ranges::equal(parameters_ | std::views::filter(needs), trained_, same);
}

void GradientReduction::plan() {
  if (is_planned()) {
    return;
  }
  std::vector<at::Tensor> trained;
  std::copy_if(parameters_.begin(), parameters_.end(), std::back_inserter(trained),
               [](const at::Tensor& parameter) { return parameter.requires_grad(); });
  TORCH_CHECK_VALUE(!trained.empty(), "no parameter of the model needs a gradient");
  const c10::Device device = trained.front().device();
  trained_.clear();  // planned anew next time if this fails
  groups_.clear();
  std::int64_t longest = 0;
  for (const at::Tensor& parameter : trained) {
    TORCH_CHECK_VALUE(parameter.device() == device,
                      "with ranks the model must be on one device, got parameters on ", device,
                      " and ", parameter.device());
    const std::int64_t bytes = bytes_of(parameter);
    const bool alone = parameter.is_contiguous() && bytes >= kBucketBytes;
    const bool joins = !alone && !groups_.empty() && !groups_.back().alone &&
                       groups_.back().factor.scalar_type() == parameter.scalar_type() &&
                       groups_.back().bytes + bytes <= kBucketBytes;
    if (!joins) {
      const at::TensorOptions options = parameter.options().requires_grad(false);
      groups_.push_back({.alone = alone, .factor = at::empty({}, options)});
    }
    groups_.back().parameters.push_back(parameter);
    groups_.back().bytes += bytes;
    longest = std::max(longest, alone ? 0 : groups_.back().bytes);
  }
  bucket_ = at::empty({longest}, trained.front().options().dtype(at::kByte).requires_grad(false));
  own_ = at::zeros({static_cast<std::int64_t>(kGradient + trained.size())}, at::kDouble);
  sums_ = at::zeros_like(own_);
  reduced_ = device.is_cpu() ? sums_ : at::empty_like(own_, device);
  trained_ = std::move(trained);
}

void GradientReduction::prepare(const at::Tensor& loss, double count, double shape) {
  const at::NoGradGuard no_grad;
  plan();
  count_ = count;
  loss_ = at::empty_like(loss);
  voted_ = false;
  auto* const number = own_.mutable_data_ptr<double>();
  number[kCount] = count;
  number[kLoss] = count == 0                      ? 0.0
                  : reduction_ == Reduction::mean ? loss.item<double>() * count
                                                  : loss.item<double>();
  number[kRanks] = count > 0 ? 1.0 : 0.0;
  number[kShape] = count > 0 ? shape : 0.0;
  number[kShapeSquared] = number[kShape] * shape;
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    at::Tensor& gradient = gradient_of(trained_[i]);
    number[kGradient + i] = gradient.defined() ? 1.0 : 0.0;
    if (!gradient.defined()) {
      gradient = at::zeros_like(trained_[i]);
    }
    TORCH_CHECK_VALUE(gradient.layout() == at::kStrided,
                      "gradients must be dense to be reduced over ranks, got ", gradient.layout());
  }
  for (const Group& group : groups_) {
    if (group.alone) {
      at::Tensor& gradient = gradient_of(group.parameters.front());
      gradient = gradient.contiguous();
    }
  }
}

bool GradientReduction::vote(bool ready, Sum sum) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(reduced_.defined(), "a rank can vote only after its first call");
  if (ready) {
    sums_.copy_(own_);
  } else {
    sums_.zero_();
    sums_.mutable_data_ptr<double>()[kNotReady] = 1;
  }
  if (!reduced_.is_same(sums_)) {
    reduced_.copy_(sums_);
  }
  sum(reduced_);
  if (!reduced_.is_same(sums_)) {
    waiting([&] { sums_.copy_(reduced_); });  // for the other ranks, where `sum` only begins one
  }
  voted_ = sums_.const_data_ptr<double>()[kNotReady] == 0;
  return voted_;
}

void GradientReduction::run(Sum sum) {
  const at::NoGradGuard no_grad;
  if (!voted_ && !vote(true, sum)) {
    throw RankError("another rank ended its call before the gradients were summed");
  }
  voted_ = false;
  const auto* number = sums_.const_data_ptr<double>();
  const bool mean = reduction_ == Reduction::mean;
  const double total = number[kCount];
  total_ = total;
  shape_ = number[kRanks] > 0 ? number[kShape] / number[kRanks] : 0.0;
  const double spread = number[kRanks] * number[kShapeSquared] - number[kShape] * number[kShape];
  TORCH_CHECK_VALUE(!mean || spread <= 1e-9 * std::max(1.0, number[kShape] * number[kShape]),
                    "the losses of the ranks are means over different things, or sums of such "
                    "means, whose counts are not in proportion: return (loss, count) from the loss "
                    "function, or pass reduction=\"sum\"");
  loss_.fill_(mean ? number[kLoss] / total : number[kLoss]);
  for (const Group& group : groups_) {
    group.factor.fill_(mean && total > 0 ? count_ / total : 1.0);
    reduce(group, sum);
  }
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    if (number[kGradient + i] == 0) {
      gradient_of(trained_[i]) = at::Tensor();
    }
  }
}

void GradientReduction::reduce(const Group& group, Sum sum) {
  if (group.alone) {
    const at::Tensor& gradient = gradient_of(group.parameters.front());
    gradient.mul_(group.factor);
    sum(gradient);
    return;
  }
  const at::Tensor bucket = bucket_.narrow(0, 0, group.bytes).view(group.factor.scalar_type());
  std::int64_t length = 0;
  const auto in_bucket = [&](const at::Tensor& gradient) {
    const std::int64_t begin = std::exchange(length, length + gradient.numel());
    return bucket.narrow(0, begin, gradient.numel()).view(gradient.sizes());
  };
  for (const at::Tensor& parameter : group.parameters) {
    const at::Tensor& gradient = gradient_of(parameter);
    in_bucket(gradient).copy_(gradient);
  }
  bucket.mul_(group.factor);
  sum(bucket);
  length = 0;
  for (const at::Tensor& parameter : group.parameters) {
    const at::Tensor& gradient = gradient_of(parameter);
    gradient.copy_(in_bucket(gradient));
  }
}

}  // namespace brim::detail
