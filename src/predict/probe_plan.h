#pragma once

#include <brim/export.h>
#include <brim/predict/memory_model.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace brim::detail {

/// Chooses which of the candidates to measure next: a few, spread over number and length, small
/// ones first, and only if their need is expected to stay within the limit. Pure logic.
class BRIM_API ProbePlan {
 public:
  using Shape = std::pair<std::int64_t, std::int64_t>;  ///< n and length; (size, 0) of one size

  /// @throws std::invalid_argument if there are too few different candidates, one is not positive,
  ///     or `probes` is too few for a fit.
  ProbePlan(std::vector<Shape> candidates, SizeKind kind, std::int64_t probes);

  [[nodiscard]] const Shape& smallest() const { return candidates_.front(); }

  /// The next to measure; empty if there are enough, or none is left that is expected to fit. Of
  /// one size up to twice `probes` are measured where fewer do not reach the largest.
  /// @param limit bytes that the work may hold at most.
  /// @param beyond if no candidate is known to stay within the limit, the one with the lowest bound
  ///     is chosen, up to these bytes. At first only the fastest possible growth is known, and work
  ///     with a high floor (an optimizer's step) grows far less.
  [[nodiscard]] std::optional<Shape> next(double limit, double beyond = 0);

  /// Takes in a measurement.
  /// @param start what was held before the work began.
  /// @param base what of that was held all the time.
  void add(const Shape& shape, double peak, double start, bool out_of_memory, double base = 0);

  [[nodiscard]] const std::vector<MemorySample>& samples() const { return samples_; }

 private:
  struct Target {
    double n;       ///< 0 (least) to 1 (most), on a logarithmic scale
    double length;  ///< likewise
  };

  [[nodiscard]] std::vector<Target> targets() const;
  [[nodiscard]] Target place(const Shape& shape) const;
  [[nodiscard]] double cautious_need(const Shape& shape) const;
  [[nodiscard]] bool open(const Shape& shape) const;
  [[nodiscard]] std::int64_t largest_measured() const;
  [[nodiscard]] bool may_climb() const;
  [[nodiscard]] std::optional<double> length_of(const Shape& shape) const;

  std::vector<Shape> candidates_;
  Shape least_;  // of each coordinate by itself
  Shape most_;
  SizeKind kind_;
  std::size_t probes_;
  std::vector<Target> targets_;  // the next one last
  std::vector<MemorySample> samples_;
  NeedBound bound_;                   // of what the work itself held
  double start_ = 0;                  // the most that was held before it began
  std::optional<MemoryModel> model_;  // once a measured size has confirmed it
};

}  // namespace brim::detail
