#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace brim::detail {

/// A measured need: of n samples of a length, or of one size (then `length` is not looked at).
struct ShapePoint {
  double n;
  double length;
  double bytes;
};

inline constexpr std::size_t kMostTerms = 6;

/// How often each coefficient of a phase counts at a shape. Of a batch: 1, n L, n L², n, L, L²; of
/// one size s: 1, s, s². A fit takes the first three unless more of them explain the points far
/// better.
[[nodiscard]] std::array<double, kMostTerms> shape_terms(double n, double length,
                                                         bool batch) noexcept;
[[nodiscard]] inline std::size_t term_count(bool batch) noexcept { return batch ? kMostTerms : 3; }

/// Errors below this are allocators' rounding: nothing is made of them.
inline constexpr double kRounding = 1e-3;

/// Bytes for each time that a term counts, none negative.
using Phase = std::array<double, kMostTerms>;

/// The peak of a program is the most that it holds at any moment, and at each moment it holds a sum
/// of tensors whose sizes are such terms. So the peak is a maximum of phases; the floor is one that
/// does not depend on the size.
struct PhaseFit {
  double floor = 0;
  std::vector<Phase> phases;

  [[nodiscard]] double peak(double n, double length, bool batch) const noexcept;
};

/// The floor and the one or two phases that explain the points best, by relative error and counting
/// what each coefficient costs. `bounds` are shapes that needed more than their bytes: the result
/// is at least that there. Needs at least one point.
[[nodiscard]] PhaseFit fit_phases(std::span<const ShapePoint> points,
                                  std::span<const ShapePoint> bounds, bool batch);

}  // namespace brim::detail
