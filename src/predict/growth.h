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

  /// The largest size expected to need at most `bytes`; empty if the fits do not show it.
  ///
  /// Once three attempts lie on a line, the need follows it. Until then it is taken to be the
  /// steepest sum of 1, s and s² that passes through the two largest fits (the terms of a
  /// MemoryModel).
  /// @param cautious whether a single fit bounds the need too. Else the need is taken as
  ///     proportional to the size, up to a few times that fit's size.
  [[nodiscard]] std::optional<Prediction> largest_within(double bytes, bool cautious) const;

  /// The same if nothing has fitted yet: from the failure at `size` and the next larger one. Empty
  /// if the bytes of that failure are missing or do not explain it.
  ///
  /// From one failure the need is taken as proportional to the size. That is optimistic on purpose:
  /// if part of the need is constant, the next size fails close by, and two failures give a line.
  /// Two failures agree if they happened at the same place: where the larger one held and
  /// asked for more.
  [[nodiscard]] std::optional<Prediction> below_failure(std::int64_t size, double bytes) const;

  /// The fit of the largest size; null if there is none.
  [[nodiscard]] const Attempt* largest_fit() const {
    return fits_.empty() ? nullptr : fits_.back();
  }
  [[nodiscard]] std::size_t fits() const { return fits_.size(); }

 private:
  [[nodiscard]] std::size_t apart_from(std::size_t fit) const;
  [[nodiscard]] double below_fits(double bytes) const;

  c10::SmallVector<const Attempt*, 24> points_;  // fits, then failures, each ascending in size
  std::span<const Attempt* const> fits_;         // of points_
  std::span<const Attempt* const> failures_;
};

/// Whether a failure's bytes explain it: at least half of what was available. One that needed less
/// failed because something else held memory for a moment, or its bytes are wrong.
[[nodiscard]] bool explains(const Attempt& failure, double available);

}  // namespace brim::detail
