#pragma once

#include <brim/export.h>
#include <brim/predict/need_bound.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace brim {

/// What the sizes of a MemoryModel are.
enum class SizeKind : std::uint8_t {
  size,   ///< one number s
  batch,  ///< a pair (n, L): n samples, the longest of length L
};

/// What one piece of work needed.
struct MemorySample {
  double n = 0;       ///< the number of samples; of SizeKind::size the size itself
  double length = 0;  ///< of the longest sample; 0 of SizeKind::size
  double peak = 0;    ///< bytes held at most; if it ran out of memory, a lower bound of the need
  bool out_of_memory = false;
  double base = 0;  ///< bytes that were held before the work and all the time; 0 if not known

  bool operator==(const MemorySample&) const = default;
};

/// How far a model is off for samples that it has not seen, as shares of the measured peaks.
struct ModelError {
  double median = 0;
  double worst = 0;
  std::vector<double> each;  ///< predicted / measured - 1, in the order of the measured samples
};

/// Everything that a fitted model consists of, for saving it.
struct MemoryModelState {
  SizeKind kind = SizeKind::size;
  double floor = 0;                         ///< bytes
  std::vector<std::vector<double>> phases;  ///< bytes per term, in the order of term_names()
  double margin = 0;
  ModelError error;
  std::vector<MemorySample> samples;
};

/// How many bytes a piece of work needs at its peak, as a function of its size.
///
///     brim::MemoryModel model;
///     model.fit(samples, brim::SizeKind::batch);  // {{1, 128, 3e6}, {8, 64, 9e6}, …}
///     std::int64_t n = model.largest_batch(512, 8e9);
///
/// The peak is `max(floor, phases…)`, each phase a sum of terms with coefficients that are not
/// negative: of 1, nL, nL² (and n or L² if the samples require it) for a batch, of 1, s, s²
/// for one size. So it never falls as n or L grows. Up to two phases are fitted, by non-negative
/// least squares of the relative error. See docs/explanation/predict.md.
///
/// Bytes are those of the whole device (PeakSample::peak), so they compare with a budget.
/// A value type without torch in it. Reading one from several threads is safe.
class BRIM_API MemoryModel {
 public:
  /// The largest answer of largest_batch() and largest_size(): the need does not grow, or the
  /// budget is beyond everything.
  static constexpr std::int64_t kLargestSize = std::int64_t{1} << 53;

  /// A model that knows nothing yet.
  MemoryModel() = default;

  /// Fits to the samples, forgetting earlier ones. A sample that ran out of memory is a lower
  /// bound: the model is at least that there.
  /// @throws std::invalid_argument if a figure is not finite and positive, or fewer than 2 (of one
  ///     size) or 3 (of batches) different sizes were measured. The earlier fit then stays.
  /// @param with_error whether to work out error(), which takes most of the time.
  void fit(std::span<const MemorySample> samples, SizeKind kind, bool with_error = true);

  /// @throws std::invalid_argument if the state is not of a fitted model.
  static MemoryModel from_state(MemoryModelState state);
  [[nodiscard]] const MemoryModelState& state() const { return state_; }

  [[nodiscard]] bool fitted() const { return !state_.phases.empty(); }
  [[nodiscard]] SizeKind kind() const { return state_.kind; }

  /// Bytes expected at the peak, no more than safe_peak(). @throws std::invalid_argument before
  /// fit(), for the other kind of size, or one that is negative, not finite or above 1e100.
  /// @param n the size, or the number of samples of that length.
  [[nodiscard]] double peak(double n, std::optional<double> length = std::nullopt) const;

  /// Of one batch of samples of these lengths: n × the longest. 0 for none.
  [[nodiscard]] double peak_of(std::span<const double> lengths) const;

  /// What to compare with a budget: the most that any program of this kind can need whose peaks at
  /// the samples were those, and the margin on top. No less than was measured at a size that is not
  /// larger, no more than at one that is not smaller. Never falls as n or L grows. What every
  /// sample held all the time (MemorySample::base) is part of every phase, so it does not grow.
  [[nodiscard]] double safe_peak(double n, std::optional<double> length = std::nullopt) const;

  /// The largest n with safe_peak(n, length) <= bytes; 0 for none. Costs some microseconds.
  [[nodiscard]] std::int64_t largest_batch(double length, double bytes) const;

  /// The largest whole size with safe_peak(size) <= bytes; 0 for none.
  [[nodiscard]] std::int64_t largest_size(double bytes) const;

  /// Leave-one-out: each measured sample predicted by a model fitted without it (of more than 16
  /// samples, every 16th at once). Empty `each` and zeros where there are too few for that.
  [[nodiscard]] const ModelError& error() const { return state_.error; }

  /// Share that safe_peak() adds to what grows: 0.1 % for allocators' rounding, and 1.5 times the
  /// share by which a sample exceeds the bound from the others (at most 150 %). Large if the need
  /// is not of this kind.
  [[nodiscard]] double margin() const { return state_.margin; }

  [[nodiscard]] const std::vector<MemorySample>& samples() const { return state_.samples; }

  /// A jump of the need to more than twice what shorter samples allow, at a length above `after`
  /// and up to `from`.
  struct Jump {
    double after = 0;  ///< the longest length before it that was measured with so many samples
    double from = 0;   ///< the length that showed it
    double n = 0;      ///< with this many samples
  };

  /// Where the need jumps, in ascending order of length; none of one size. What was measured before
  /// a jump says nothing about what is needed after it.
  [[nodiscard]] std::vector<Jump> jumps() const;

  /// "1", "nL", "nL²", "n", "L", "L²", or "1", "s", "s²".
  [[nodiscard]] static std::vector<std::string> term_names(SizeKind kind);

  /// Several lines for people: floor, phases, error and margin.
  [[nodiscard]] std::string to_string() const;

 private:
  void check(SizeKind kind) const;
  void check(double n, std::optional<double> length) const;
  void learn();
  [[nodiscard]] double bound(double n, double length) const;
  [[nodiscard]] double least(double n, double length) const;
  [[nodiscard]] double safe(double n, double length) const;
  [[nodiscard]] std::int64_t largest(double length, double bytes) const;

  struct Range {
    Jump jump;        // with which it begins
    NeedBound bound;  // of what the work needs beyond base_, from the samples after the jump
  };

  MemoryModelState state_;
  std::vector<Range> ranges_;     // of lengths, each up to the longest
  double base_ = 0;               // bytes that all samples held all the time
  std::vector<double> envelope_;  // of each sample: the most that it or a smaller one needed
};

}  // namespace brim
