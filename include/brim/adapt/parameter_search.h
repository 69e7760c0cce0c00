#pragma once

#include <brim/export.h>
#include <brim/need/size_search.h>
#include <brim/need/strategy.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace brim {

/// One integer that may be lowered until the work fits. The fields are those of a SizeSearch.
struct Parameter {
  std::int64_t maximum = 0;
  std::int64_t quantum = 1;
  std::int64_t lower = 1;
};

/// What a ParameterSearch looks for.
struct ParameterSearchOptions {
  Strategy strategy = Strategy::predictive;
  Start start = Start::at_upper;
  std::vector<Parameter> parameters{};
  /// Indices into `parameters`, each exactly once: a group's parameters shrink together, and groups
  /// are lowered in this order. Empty: each parameter is a group of its own, in the order of
  /// `parameters`.
  std::vector<std::vector<std::size_t>> groups{};
  Circumstances circumstances{};
  bool cautious = false;  ///< as in SizeSearchOptions
  /// Whether values that failed at the floor of one group are tried again as the maximum of the
  /// next. They can only fail again: it reproduces the exact sequence of torch_max_mem.
  bool revisit_floor = false;
};

/// Finds values of several parameters that fit, lowering one group of them after the other.
///
/// The first group is searched with all others at their maximum. Only if it fails at its floor
/// (each of its parameters at `lower`) is the next group lowered, with the first at its floor, and
/// so on. Within a group all parameters have the same fraction of their maximum, each rounded down
/// by its own quantum and never below its own `lower`.
///
/// With `Strategy::halving`, groups of one and `revisit_floor`, the values are those of
/// torch_max_mem in the same order.
///
/// Owns its values; not thread-safe: one search belongs to one call.
///
/// @code
/// ParameterSearch search({.parameters = {{.maximum = 4096, .quantum = 32}, {.maximum = 128}}});
/// while (!search.finished()) {
///   const auto values = search.next();  // values[0], values[1]
///   ...
///   search.record(attempt);
///   if (attempt.fitted()) break;
/// }
/// @endcode
class BRIM_API ParameterSearch {
 public:
  /// @throws std::invalid_argument naming what is wrong, its value, and what is allowed.
  explicit ParameterSearch(const ParameterSearchOptions& options);

  /// Takes in attempts of earlier calls, oldest first; see SizeSearch::remember. Values that no
  /// search with these groups visits say nothing about the order of lowering and are ignored.
  /// @return whether any was taken in.
  /// @throws std::invalid_argument when the number of values is wrong or one is below 1.
  bool remember(std::span<const Attempt> attempts);
  bool remember(const Attempt& attempt) { return remember(std::span(&attempt, 1)); }

  /// The values to try now, in the order of the parameters; valid until the next call of a
  /// non-const member. Once finished: the values to use, which are `best()`, or the floor of all
  /// when nothing fits.
  [[nodiscard]] std::span<const std::int64_t> next() const noexcept { return next_; }

  /// Takes in what happened at `next()`. `attempt.values` is not read.
  void record(Attempt attempt);

  /// Takes in what happened at `attempt.values`, which another search with these parameters has
  /// chosen (that of another rank). After a failure `next()` is below.
  /// @return whether a search with these groups visits such values; else it is ignored.
  bool record_elsewhere(const Attempt& attempt);

  [[nodiscard]] bool finished() const noexcept { return groups_[current_].search.finished(); }
  [[nodiscard]] std::optional<std::int64_t> expected() const noexcept {
    return groups_[current_].search.expected();
  }

  /// The largest values known to fit, in the order of lowering.
  [[nodiscard]] std::optional<std::vector<std::int64_t>> best() const;

  /// The number of recorded attempts.
  [[nodiscard]] std::int64_t attempts() const noexcept { return attempts_; }

 private:
  // A group is searched by one number, its scale: that of its largest parameter, of which the
  // others have the same fraction. Different scales may round to the same values; `same` is the
  // range that does.
  struct Group {
    std::vector<std::size_t> members;
    std::int64_t scale;  // at the maximum
    SizeSearch search;
  };
  struct Range {
    std::int64_t first;
    std::int64_t last;
  };

  [[nodiscard]] std::int64_t value(const Group& group, std::size_t parameter,
                                   std::int64_t scale) const;
  [[nodiscard]] bool equal(const Group& group, std::int64_t scale, std::int64_t other) const;
  [[nodiscard]] Range same(const Group& group, std::int64_t scale) const;
  [[nodiscard]] Group make_group(const ParameterSearchOptions& options,
                                 std::vector<std::size_t> members) const;
  [[nodiscard]] std::vector<std::int64_t> values_at(std::size_t current, std::int64_t scale) const;
  [[nodiscard]] std::optional<std::int64_t> scale_of(const Group& group,
                                                     std::span<const std::int64_t> values) const;
  // Calls `take(index of a group, the attempt at a scale of it)` for the groups that visit its
  // values.
  template <class Take>
  bool place(const Attempt& attempt, const Take& take);
  // The current group failed at its floor, and there is another.
  [[nodiscard]] bool exhausted() const;
  void advance();

  std::vector<Parameter> parameters_;
  std::vector<Group> groups_;
  std::vector<std::int64_t> next_;
  std::size_t current_ = 0;
  std::int64_t attempts_ = 0;
  bool revisit_floor_;
};

}  // namespace brim
