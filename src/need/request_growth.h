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

  /// At least so much at a smaller size. A line is no bound: it may fall off too slowly below both
  /// sizes. What grows no faster than in proportion between them does not do so below them.
  [[nodiscard]] std::int64_t least_at(double size) const noexcept {
    const double power = power_ > 0 ? kMostPower : kStraight;
    return size >= std::min(at_size_, other_size_)
               ? at(size)
               : std::max(least_of(here_, at_size_, size, power),
                          least_of(there_, other_size_, size, power));
  }

  /// At least so much at a smaller size than the one with these bytes, if they grow no faster than
  /// with this power: as many parts of it as make up the other, which padding does not change.
  [[nodiscard]] static std::int64_t least_of(double bytes, double at_size, double size,
                                             double power = kMostPower) noexcept {
    return static_cast<std::int64_t>(bytes / std::pow(std::ceil(at_size / size), power));
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
  // Sizes are whole numbers: a little more than in proportion is rounding.
  static constexpr double kStraight = 1.02;
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
