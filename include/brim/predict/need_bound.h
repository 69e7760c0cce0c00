#pragma once

#include <brim/export.h>

#include <array>
#include <cstddef>
#include <vector>

namespace brim {

/// The most that work can need at a shape, from what it needed at others.
///
/// A program's peak is a maximum of phases, and each phase is a sum of terms, such as 1, n L and
/// n L², with coefficients that are not negative (see MemoryModel). Whatever these are, no phase
/// exceeds a measurement. So the need is at most that of the steepest phase that stays within all
/// measurements: a linear programme with a variable per term and a constraint per measurement. No
/// coefficient is estimated, so few measurements make the bound loose, never wrong.
///
/// A value type without torch in it. Reading one from several threads is safe.
/// @tparam Count the number of terms.
template <std::size_t Count>
class BRIM_API TermBound {
 public:
  static constexpr std::size_t kTerms = Count;
  using Terms = std::array<double, kTerms>;  ///< how often each term counts; 0 for one not in use

  /// Terms are finite and not negative; bytes are positive.
  void add(const Terms& terms, double bytes);

  /// Never falls as a term grows. Infinite if a term counts that no measurement had.
  [[nodiscard]] double at(const Terms& terms) const;

 private:
  std::vector<Terms> rows_;  // terms per byte, of the measurements that others do not imply
};

/// Of one size of a sample.
using NeedBound = TermBound<9>;
/// Of samples that are padded in several sizes.
using JointNeedBound = TermBound<24>;

}  // namespace brim
