#pragma once

#include <brim/export.h>
#include <brim/predict/memory_model.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace brim::detail {

/// Chooses which of the candidates to measure next: a few, small ones first, each where the least
/// is known of those that cannot need more than the limit. Pure logic.
class BRIM_API ProbePlan {
 public:
  using Shape = std::pair<std::int64_t, std::int64_t>;  ///< n and length; (size, 0) of one size

  /// @throws std::invalid_argument if there are too few different candidates, one is not positive,
  ///     or `probes` is too few for a fit.
  ProbePlan(std::vector<Shape> candidates, SizeKind kind, std::int64_t probes);

  [[nodiscard]] const Shape& smallest() const { return candidates_.front(); }

  /// The next to measure; empty if there are enough, or none is left that is sure to fit. Of one
  /// size up to twice `probes` are measured where fewer do not reach the largest.
  /// @param limit bytes that the work may hold at most.
  /// @param beyond if no candidate is known to stay within the limit, the one with the lowest bound
  ///     is chosen, up to these bytes. At first only the fastest possible growth is known, and work
  ///     with a high floor (an optimizer's step) grows far less.
  [[nodiscard]] std::optional<Shape> next(double limit, double beyond = 0) const;

  /// Takes in a measurement.
  /// @param held what was held beside the work, as far as is known: it does not grow.
  /// @param base what the sample says of that.
  void add(const Shape& shape, double peak, double held, bool out_of_memory, double base = 0);

  [[nodiscard]] const std::vector<MemorySample>& samples() const { return samples_; }

 private:
  [[nodiscard]] double place(const Shape& shape) const;
  [[nodiscard]] std::optional<double> least_need(const Shape& shape) const;

  std::vector<Shape> candidates_;
  Shape least_;  // of each coordinate by itself
  Shape most_;
  SizeKind kind_;
  std::size_t probes_;
  std::vector<MemorySample> samples_;
  std::int64_t largest_ = 0;  // n of what was measured
  NeedBound bound_;           // of what the work itself held
  double held_ = 0;           // the most that was held beside it
};

/// Which batch to measure so that batches can come closer to a limit: of the length at which the
/// model leaves most of the limit unused, as many samples as it expects to fit. Empty if it leaves
/// little unused at every length. One sample of a length of which nothing is known may be more than
/// expected to fit, so that samples are left out only if one was measured to be too long.
/// @param lengths positive, ascending.
/// @param most the number of samples that a batch may have.
/// @param limit bytes.
/// @param beyond bytes that the batch can need at most, if it is not one sample.
[[nodiscard]] BRIM_API std::optional<ProbePlan::Shape> next_at_the_limit(
    const MemoryModel& model, const std::vector<std::int64_t>& lengths, std::int64_t most,
    double limit, double beyond);

}  // namespace brim::detail
