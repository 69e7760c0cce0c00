#pragma once

#include <brim/predict/allocator_model.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace brim::detail {

/// Bytes as an allocator can be asked for them.
inline std::int64_t whole_bytes(double bytes) noexcept {
  constexpr auto kMost = static_cast<double>(AllocatorModel::kLargestRequest);
  return static_cast<std::int64_t>(std::clamp(std::ceil(bytes), 0.0, kMost));
}

/// The bytes of a request at any size, from what it was at two. It grows along a line, or with a
/// power if it grows faster than in proportion; one that shrinks is taken to stay as it is.
class RequestGrowth {
 public:
  RequestGrowth(double here, double at_size, double there, double other_size) noexcept
      : here_(here), at_size_(at_size), there_(there), other_size_(other_size) {
    // Sizes are whole numbers: a little more than in proportion is rounding.
    constexpr double kStraight = 1.02;
    const double power =
        here > 0 && there > 0 ? std::log(here / there) / std::log(at_size / other_size) : 0.0;
    if (power > kStraight) {
      power_ = std::min(power, kMostPower);
    } else {
      slope_ = std::max((here - there) / (at_size - other_size), 0.0);
    }
    const double most = std::max(at_size, other_size);
    trusted_ = most * std::pow(most / std::min(at_size, other_size), kTrusted);
  }

  [[nodiscard]] std::int64_t at(double size) const noexcept {
    if (power_ > 0) {
      return whole_bytes(here_ * std::pow(size / at_size_, power_));
    }
    const double near = std::min(size, trusted_);
    return whole_bytes((here_ + slope_ * (near - at_size_)) * (size / near));
  }

  /// At least so much at a smaller size, if it grows no faster than with the cube: a line may fall
  /// off too slowly below both sizes.
  [[nodiscard]] std::int64_t least_at(double size) const noexcept {
    const double known = std::min(at_size_, other_size_);
    return size < known ? std::min(at(size), whole_bytes(static_cast<double>(at(known)) *
                                                         std::pow(size / known, kMostPower)))
                        : at(size);
  }

  /// Of several requests together, none of which grows faster than with `power`: at most so much
  /// at a larger size than both.
  [[nodiscard]] std::int64_t most_at(double size, double power) const noexcept {
    const double step = std::pow(at_size_, power) - std::pow(other_size_, power);
    const double times = (std::pow(size, power) - std::pow(at_size_, power)) / step;
    return step > 0 ? std::max(at(size), whole_bytes(here_ + (here_ - there_) * times)) : at(size);
  }

 private:
  static constexpr double kMostPower = 3;
  // Two sizes close to each other may be padded to the same. Beyond the power of their ratio above
  // them, a request is taken to grow in proportion at least.
  static constexpr double kTrusted = 4;

  double here_;
  double at_size_;
  double there_;
  double other_size_;
  double slope_ = 0;
  double power_ = 0;  // 0: a line
  double trusted_ = 0;
};

}  // namespace brim::detail
