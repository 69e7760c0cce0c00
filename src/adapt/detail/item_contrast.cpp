#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sum.h>
#include <brim/adapt/detail/item_contrast.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace brim::detail {
namespace {

constexpr std::size_t kMostPairs = 3;
constexpr std::int64_t kAtOnce = std::int64_t{1} << 20;  // elements
constexpr double kNew = 2.0;                             // times what was compared before

double difference(double one, double other) {
  const double most = std::max(std::abs(one), std::abs(other));
  const double share = most > 0 ? std::abs(one - other) / most : 0.0;
  return std::isfinite(share) ? share : 0.0;
}

bool is_measurable(const at::Tensor& tensor, std::int64_t dim) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_complex() &&
         !tensor.is_nested() && !tensor.is_meta() && !tensor.is_quantized() && tensor.dim() > dim &&
         tensor.size(dim) > 1;
}

}  // namespace

std::vector<std::int64_t> ItemContrast::pairs(std::span<const at::Tensor> batch, std::int64_t dim) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> measured;
  for (const at::Tensor& tensor : batch) {
    if (!is_measurable(tensor, dim)) {
      continue;
    }
    std::vector<std::int64_t> others;
    for (std::int64_t i = 0; i < tensor.dim(); ++i) {
      if (i != dim) {
        others.push_back(i);
      }
    }
    // In the tensor's own type, or of a few items at a time: anything else would copy the batch.
    const at::Tensor values = tensor.detach();
    const auto sums = [&](const at::Tensor& some) {
      return (others.empty() ? some : some.sum(others)).to(at::kCPU, at::kDouble);
    };
    if (values.is_floating_point()) {
      measured.push_back(sums(values));
      continue;
    }
    const std::int64_t items = values.size(dim);
    const std::int64_t most =
        std::max<std::int64_t>(1, kAtOnce / std::max<std::int64_t>(1, values.numel() / items));
    std::array<std::vector<at::Tensor>, 3> found;  // labels and masks
    for (std::int64_t first = 0; first < items; first += most) {
      const at::Tensor some = values.narrow(dim, first, std::min(most, items - first));
      found[0].push_back(sums(some));
      found[1].push_back(sums(some.ne(0)));
      found[2].push_back(sums(some.ne(-100)));
    }
    for (const std::vector<at::Tensor>& each : found) {
      measured.push_back(at::cat(each));
    }
  }
  std::vector<std::vector<double>> traits;
  for (const at::Tensor& each : measured) {
    const at::Tensor values = each.contiguous();
    const auto* first = values.const_data_ptr<double>();
    traits.emplace_back(first, first + values.numel());
  }
  return pairs(traits);
}

std::vector<std::int64_t> ItemContrast::pairs(const std::vector<std::vector<double>>& traits) {
  compared_.resize(std::max(compared_.size(), traits.size()));
  found_ = compared_;
  std::vector<std::int64_t> places;
  for (std::size_t trait = 0; trait < traits.size(); ++trait) {
    const std::vector<double>& values = traits[trait];
    double most = 0;
    std::int64_t place = -1;
    for (std::size_t i = 1; i < values.size(); ++i) {
      if (const double step = difference(values[i - 1], values[i]); step > most) {
        most = step;
        place = static_cast<std::int64_t>(i) - 1;
      }
    }
    if (place < 0 || most <= kNew * compared_[trait]) {
      continue;
    }
    const bool known = std::ranges::find(places, place) != places.end();
    if (known || places.size() < kMostPairs) {
      found_[trait] = most;
      if (!known) {
        places.push_back(place);
      }
    }
  }
  return places;
}

}  // namespace brim::detail
