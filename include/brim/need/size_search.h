#pragma once

#include <brim/export.h>
#include <brim/need/attempt.h>
#include <brim/need/strategy.h>
#include <brim/predict/allocator_model.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace brim {

class Need;

/// Where a predictive search begins when it remembers nothing.
enum class Start : std::uint8_t {
  at_upper,  ///< with the largest size: for work that ends with the first fit (`batch`, `maximize`)
  probe,     ///< with a small one, and grows: for work in parts, where a small part costs little
             ///< (`range`, `chunked`)
  traced,    ///< with the largest: for work that is traced on fake tensors, where an attempt costs
             ///< the same whether it fits or not and shows all that is needed: nothing is spared
};

/// What the next attempt finds.
struct Circumstances {
  std::optional<std::int64_t> available{};  ///< bytes that it may use; empty: not known
  /// Whether all free bytes can be used, as on the CPU. Else as much stays free as CUDA's allocator
  /// takes at once, and requests are replayed on `allocator`.
  bool packs = true;
  double margin = 0.0;  ///< share of the bytes that stay free in any case, [0, 0.5]
  /// Where it does not pack: the device's allocator as it is now; empty if the device does not
  /// tell.
  std::function<std::optional<AllocatorModel>()> allocator{};
  /// Whether the block at an address that an earlier attempt left is in use now.
  std::function<bool(std::int64_t)> in_use{};
};

struct SizeSearchOptions {
  Strategy strategy = Strategy::predictive;
  Start start = Start::at_upper;  ///< for `Strategy::predictive` only; the others begin at `upper`
  std::int64_t upper = 0;  ///< the largest size; allowed even where it is no multiple of `quantum`
  std::int64_t lower = 1;  ///< the smallest size; allowed even where it is no multiple of `quantum`
  std::int64_t quantum = 1;  ///< sizes above it are its multiples, sizes up to it are all allowed
  double power = 1;  ///< of the size with which most needs grow: how many arguments it scales
  Circumstances circumstances{};  ///< an attempt that is recorded has its own available bytes
  /// Whether similar work has failed: then a single fit is not left for the upper bound at once.
  bool cautious = false;
};

/// `x` itself up to `quantum`, above it the largest multiple of `quantum` not above `x`.
[[nodiscard]] constexpr std::int64_t floor_to_multiple(std::int64_t x,
                                                       std::int64_t quantum) noexcept {
  return x <= quantum ? x : x / quantum * quantum;
}

/// Finds the largest size that fits, from what happened at the sizes tried so far.
///
/// It keeps a bracket: the largest size that fitted and the smallest that failed, in circumstances
/// that still hold. The next size is the largest in it that the Need of the work says to fit.
/// Whatever that says:
/// - a size that failed, or a larger one, is not tried again in the same circumstances;
/// - a call fails at most once more often than halving would, and does not end below it;
/// - a size that fitted is left for a smaller one only where bytes show that it no longer fits.
///
/// Pure logic: it runs nothing and owns only numbers. Not thread-safe: one search belongs to one
/// call; what outlives the call is given to the next search by `remember`.
///
/// `halving` ends at the first fit. `bisect` and `predictive` from `at_upper` continue until the
/// largest size that fits is known exactly; a caller that needs one success stops at the first.
/// `predictive` from `probe` ends when nothing larger is expected to fit safely: it does not
/// provoke a failure to learn the last percent. It moves again when the available bytes do.
///
/// @code
/// SizeSearch search({.upper = 65536});
/// while (!search.finished()) {
///   const std::int64_t size = search.next();
///   const Attempt attempt = try_at(size);
///   search.record(attempt);
///   if (attempt.fitted()) break;  // or continue, for the exact maximum
/// }
/// @endcode
class BRIM_API SizeSearch {
 public:
  /// @throws std::invalid_argument naming the option that is wrong, its value, and what is allowed.
  explicit SizeSearch(const SizeSearchOptions& options);

  /// Takes in an attempt of an earlier call. It shapes the predictions. It is a bound only if the
  /// available bytes justify it: a fit if no less is available than then, a failure if no more is
  /// available or if it needed more than is available now.
  ///
  /// What was traced on fake tensors is neither a fit nor a failure. The first size comes from it,
  /// and it shows how the requests of runs grow.
  /// @throws std::invalid_argument when the size is below 1.
  void remember(const Attempt& attempt);
  void remember(std::span<const Attempt> attempts);  ///< several, oldest first

  /// Takes in what happened at a size: `next()`, or another (the shorter last part of a range).
  /// @throws std::invalid_argument when the size is below 1.
  void record(const Attempt& attempt);

  /// The size to try now. Once finished: the size to use, `best()`, or `lower` when nothing fits.
  [[nodiscard]] std::int64_t next() const noexcept { return next_; }

  /// Whether nothing is left that is worth trying; without a `best()`, nothing fits.
  [[nodiscard]] bool finished() const noexcept { return finished_; }

  /// Bytes that `next()` is expected to need, where it was chosen for that.
  [[nodiscard]] std::optional<std::int64_t> expected() const noexcept { return expected_need_; }

  /// The largest size known to fit, the smallest known not to: from this call or remembered.
  [[nodiscard]] std::optional<std::int64_t> best() const noexcept;
  [[nodiscard]] std::optional<std::int64_t> smallest_failure() const noexcept;

  /// The number of recorded attempts, without the remembered ones.
  [[nodiscard]] std::int64_t attempts() const noexcept { return fits_ + failures_; }

 private:
  // Only sizes that differ are kept, and a search visits few: older ones have been superseded.
  static constexpr std::size_t kMostKnown = 24;

  void add(const Attempt& attempt, bool remembered);
  void update_bounds();
  void choose();
  [[nodiscard]] bool bounds(const Attempt& attempt) const;
  [[nodiscard]] double room() const noexcept;
  [[nodiscard]] double usable() const noexcept;
  [[nodiscard]] double left_to_search() const noexcept;
  [[nodiscard]] const Attempt* last_fit() const noexcept;
  [[nodiscard]] bool is_trusted() const;
  [[nodiscard]] std::int64_t unforeseen() const;
  [[nodiscard]] std::int64_t largest_expected(const Need& need, std::int64_t most,
                                              double power) const;
  [[nodiscard]] std::optional<std::int64_t> known_choice(std::int64_t high);
  std::int64_t expect(std::int64_t size, double power);
  [[nodiscard]] std::int64_t first_choice(std::int64_t high);
  [[nodiscard]] std::int64_t expected_choice(std::int64_t high) const;
  [[nodiscard]] std::int64_t traced_choice(std::int64_t high);
  [[nodiscard]] std::int64_t shrink_choice(std::int64_t high) const;
  [[nodiscard]] std::int64_t narrow_choice(std::int64_t high) const;
  [[nodiscard]] std::int64_t probe_choice(std::int64_t high);
  [[nodiscard]] std::int64_t hint() const noexcept;  // a fit without bytes; 0: none
  [[nodiscard]] std::int64_t half() const noexcept;
  [[nodiscard]] std::int64_t middle(std::int64_t high) const noexcept;
  [[nodiscard]] std::int64_t clamp(double size, std::int64_t low, std::int64_t high) const noexcept;

  SizeSearchOptions options_;
  std::vector<Attempt> known_;        // oldest first
  std::vector<Attempt> foreseen_;     // traced on fake tensors, and did not run
  std::shared_ptr<const Need> need_;  // of these; null if nothing has fitted
  std::int64_t available_;            // to the next attempt; -1: not known
  std::int64_t chosen_for_ = -1;      // what was available when next_ was chosen
  std::int64_t best_ = 0;             // 0: none
  std::int64_t failure_ = 0;          // 0: none
  std::int64_t next_ = 0;
  std::int64_t first_ = 0;                // the first size that was recorded
  std::int64_t fits_ = 0, failures_ = 0;  // recorded
  std::int64_t grown_ = 0;                // recorded at a larger size than the one before
  int stalls_ = 0;             // recorded in a row that did not halve what is left to search
  int fits_in_a_row_ = 0;      // recorded
  int doubtful_failures_ = 0;  // recorded
  int missed_ = 0;             // recorded failures of which the need had said that they fit
  bool failed_here_ = false;   // failure_ was recorded, not remembered
  std::optional<std::int64_t> expected_need_{};
  bool finished_ = false;
};

}  // namespace brim
