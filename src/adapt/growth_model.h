#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace brim::detail {

/// Bytes needed at a size: of a fit its peak, of a failure at least what it held and asked for.
struct NeedPoint {
  std::int64_t size;
  std::int64_t need;
};

/// An attempt that failed while it held `peak` bytes and asked for `requested` more.
struct FailurePoint {
  std::int64_t size;
  std::int64_t peak;
  std::int64_t requested;

  [[nodiscard]] double need() const noexcept {
    return static_cast<double>(peak) + static_cast<double>(requested);
  }
};

/// The largest size expected to fit, and how it came about.
struct Growth {
  double size;     ///< infinite when the need does not grow
  bool confirmed;  ///< a third point lies where the first two put it
  double affine;   ///< of two points only: where their line ends, which is less cautious than
                   ///< `size`; else `size`
};

/// The size at which the need is expected to be `available`, for sizes of which none has fitted
/// yet.
///
/// With one failure the need is taken as proportional to the size. That is optimistic when part of
/// it is constant, on purpose: where it fails, it fails close by, and two failures give a line.
/// `larger` is a failure at a larger size.
[[nodiscard]] double size_after_failures(const FailurePoint& newest,
                                         const std::optional<FailurePoint>& larger,
                                         double available);

/// The largest size whose need is expected to be within `available`, from fits (and, where they lie
/// on the same line, failures); both ascending in size. Empty when no fit says anything about sizes
/// so large.
///
/// Cautious: until a third point confirms a line, it assumes the steepest growth that the points
/// allow, up to quadratic; `probing` allows for a quadratic one after a single fit too, where the
/// need is else taken as proportional.
[[nodiscard]] std::optional<Growth> largest_within(std::span<const NeedPoint> fits,
                                                   std::span<const NeedPoint> failures,
                                                   double available, bool probing);

}  // namespace brim::detail
