#pragma once

#include <brim/predict/memory_model.h>
#include <brim/predict/need_bound.h>

#include <cstddef>
#include <span>
#include <vector>

namespace brim::detail {

/// How often each coefficient of a phase counts at a shape. Of a batch: 1, n L, n L², n, L, L²; of
/// one size s: 1, s, s². A fit takes the first three unless more of them explain the samples far
/// better.
[[nodiscard]] NeedBound::Terms shape_terms(double n, double length, SizeKind kind) noexcept;
[[nodiscard]] inline std::size_t term_count(SizeKind kind) noexcept {
  return kind == SizeKind::batch ? 6 : 3;
}

/// How many different shapes a fit needs.
[[nodiscard]] inline std::size_t least_shapes(SizeKind kind) noexcept {
  return kind == SizeKind::batch ? 3 : 2;
}

/// Errors below this are allocators' rounding: nothing is made of them.
inline constexpr double kRounding = 1e-3;

/// Bytes for each time that a term counts, none negative.
using Phase = std::vector<double>;

/// The peak of a program is the most that it holds at any moment, and at each moment it holds a sum
/// of tensors whose sizes are such terms. So the peak is a maximum of phases; the floor is one that
/// does not depend on the size.
struct PhaseFit {
  double floor = 0;
  std::vector<Phase> phases;
};

[[nodiscard]] double peak_of_phases(double floor, std::span<const Phase> phases,
                                    const NeedBound::Terms& terms) noexcept;

/// The floor and the one or two phases that explain the samples best, by relative error and
/// counting what each coefficient costs. Samples that ran out of memory needed more than their
/// peak: the result is at least that there. Needs at least one that did not.
[[nodiscard]] PhaseFit fit_phases(std::span<const MemorySample> samples, SizeKind kind);

}  // namespace brim::detail
