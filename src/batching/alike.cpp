#include "batching/alike.h"

#include <algorithm>

#include "batching/permutation.h"

namespace brim::batching::detail {

void AlikeOrder::arrange(std::size_t last, std::size_t strips, std::span<const double> share,
                         std::uint64_t seed, std::vector<std::uint32_t>& order) {
  const std::size_t count = share.size();
  strip_.assign(count, 0);
  std::size_t all = 1;  // strips so far
  // One more strip than asked for if the first edge is at random.
  const double shift = seed == 0 ? 0.0 : static_cast<double>(mix(seed, strips) >> 11U) * 0x1p-53;
  const std::size_t cuts = strips == 1 ? 1 : strips + (seed == 0 ? 0 : 1);
  for (std::size_t c = 0; c + 1 < sorted_.size() && all * cuts <= count + cuts; ++c) {
    totals_.assign(all, 0.0);
    passed_.assign(all, 0.0);
    for (std::size_t i = 0; i < count; ++i) {
      totals_[strip_[i]] += share[i];
    }
    for (const std::uint32_t i : sorted_[(last + 1 + c) % sorted_.size()]) {
      const std::uint32_t outer = strip_[i];
      const double place = totals_[outer] > 0 ? passed_[outer] / totals_[outer] : 0.0;
      passed_[outer] += share[i];
      const auto within =
          std::min(static_cast<std::size_t>(place * static_cast<double>(strips) + shift), cuts - 1);
      strip_[i] =
          static_cast<std::uint32_t>(outer * cuts + (outer % 2 == 0 ? within : cuts - 1 - within));
    }
    all *= cuts;
  }
  starts_.assign(all, 0);
  for (const std::uint32_t strip : strip_) {
    ++starts_[strip];
  }
  counts_to_starts(starts_);
  order.resize(count);
  for (const std::uint32_t i : sorted_[last]) {
    order[starts_[strip_[i]]++] = i;
  }
  // starts_ are ends by now.
  for (std::size_t strip = 1; strip < all; strip += 2) {
    std::reverse(order.begin() + starts_[strip - 1], order.begin() + starts_[strip]);
  }
}

}  // namespace brim::batching::detail
