#pragma once

#include <algorithm>
#include <cmath>

namespace brim::detail {

/// The bytes of a request at a size, from what it was at two others. It grows along a line, or with
/// a power if it grows faster than in proportion; one that shrinks is taken to stay as it is.
inline double request_at(double size, double here, double at_size, double there,
                         double other_size) noexcept {
  // Sizes are whole numbers: a little more than in proportion is rounding.
  constexpr double kStraight = 1.02;
  constexpr double kMostPower = 3;
  const double power =
      here > 0 && there > 0 ? std::log(here / there) / std::log(at_size / other_size) : 0.0;
  if (power > kStraight) {
    return here * std::pow(size / at_size, std::min(power, kMostPower));
  }
  const double slope = (here - there) / (at_size - other_size);
  return std::max(here + std::max(slope, 0.0) * (size - at_size), 0.0);
}

}  // namespace brim::detail
