#pragma once

#include <brim/predict/attempt.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <span>

namespace brim::detail {

/// How much memory work needs at which size, from the attempts at it. Pure logic. SizeSearch asks
/// it for every size that it predicts.
///
/// A fit shows the need, a failure a lower bound of it. Attempts without bytes are ignored.
class Growth {
 public:
  explicit Growth(std::span<const Attempt> attempts);  // which must outlive it
  Growth(const Growth&) = delete;
  Growth& operator=(const Growth&) = delete;

  struct Prediction {
    double size;     ///< infinite if the need does not grow
    bool confirmed;  ///< the attempts agree: it is more than a guess
  };

  /// The largest size expected to need at most `bytes`, if anything has fitted.
  ///
  /// Safe for a need that grows with the size or its square, with a constant part or without: from
  /// one fit it grows as far as the square allows, or a failure that shows a higher power; from one
  /// or two items by one more, where that fits in proportion and no failure contradicts. Once
  /// three fits lie on a line, or a fit on the curve of a failure that one tensor caused, the need
  /// follows it.
  ///
  /// Work that goes through its items in parts of the size and keeps their results allocates less
  /// often at larger sizes. It needs in proportion to the size while the number of parts stays the
  /// same, and less where there is one part less: no line through its fits is followed.
  /// @param trust_two whether the line through two fits is followed too, unless a failure shows
  ///     that the need rises above it. Else the need is taken to be the steepest sum of 1, s and s²
  ///     that passes through both (the terms of a MemoryModel).
  [[nodiscard]] Prediction largest_within(double bytes, bool trust_two) const;

  /// Whatever is larger needs more than `bytes`, if the need grows along a line, or as one that is
  /// the maximum of two: it reaches at least what the nearest failure needed there. Infinite
  /// without failures.
  [[nodiscard]] double ceiling(double bytes) const;

  /// What a failure shows before anything has fitted.
  struct Ceiling {
    double size;   ///< whatever is larger fails too, if the need grows at most with the cube
    double guess;  ///< the largest size that fits if one tensor makes up the need; 0: unlikely
  };

  /// From the failure at `size` and those at larger sizes. Empty if the bytes of that failure are
  /// missing or do not explain it.
  ///
  /// A failure's bytes are a lower bound of the need. They are the need itself only where one
  /// tensor dominates. Two failures show how it grows if what they held and what they asked for
  /// grew alike; equal tensors that failed one after the other do not look like that.
  [[nodiscard]] std::optional<Ceiling> below_failure(std::int64_t size, double bytes) const;

  /// The fit of the largest size; null if there is none.
  [[nodiscard]] const Attempt* largest_fit() const {
    return fits_.empty() ? nullptr : fits_.back();
  }
  [[nodiscard]] std::size_t fits() const { return fits_.size(); }

 private:
  [[nodiscard]] std::size_t apart_from(std::size_t fit) const;
  [[nodiscard]] double below_fits(double bytes) const;
  [[nodiscard]] double steepest_power() const;
  [[nodiscard]] Prediction beyond_two_fits(double bytes, bool trust_two) const;
  template <class Curve>
  [[nodiscard]] bool refuted(const Curve& size_at) const;

  c10::SmallVector<const Attempt*, 24> points_;  // fits, then failures, each ascending in size
  std::span<const Attempt* const> fits_;         // of points_
  std::span<const Attempt* const> failures_;
  bool in_parts_ = false;  // smaller fits allocated more often, in proportion
  bool overshot_ = false;  // a size failed after another had fitted: the need curves upwards
};

/// Whether figures differ by no more than what an allocator rounds.
[[nodiscard]] bool alike(double a, double b);

/// Whether a failure's bytes explain it: at least half of what was available. One that needed less
/// failed because something else held memory for a moment, or its bytes are wrong.
[[nodiscard]] bool explains(const Attempt& failure, double available);

}  // namespace brim::detail
