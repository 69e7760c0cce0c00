#pragma once

#include <algorithm>
#include <cmath>

namespace brim::detail {

/// The bytes of a request at any size, from what it was at two. It grows along a line, or with a
/// power if it grows faster than in proportion; one that shrinks is taken to stay as it is.
class RequestGrowth {
 public:
  RequestGrowth(double here, double at_size, double there, double other_size) noexcept
      : here_(here), at_size_(at_size) {
    // Sizes are whole numbers: a little more than in proportion is rounding.
    constexpr double kStraight = 1.02;
    constexpr double kMostPower = 3;
    const double power =
        here > 0 && there > 0 ? std::log(here / there) / std::log(at_size / other_size) : 0.0;
    if (power > kStraight) {
      power_ = std::min(power, kMostPower);
    } else {
      slope_ = std::max((here - there) / (at_size - other_size), 0.0);
    }
  }

  [[nodiscard]] double at(double size) const noexcept {
    if (power_ > 0) {
      return here_ * std::pow(size / at_size_, power_);
    }
    return std::max(here_ + slope_ * (size - at_size_), 0.0);
  }

 private:
  double here_;
  double at_size_;
  double slope_ = 0;
  double power_ = 0;  // 0: a line
};

}  // namespace brim::detail
