#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace brim::batching {

/// What a batch costs, from the sizes of its samples.
///
/// No cost falls when a sample is added or made longer, so a part of a batch never costs more than
/// the whole.
class BRIM_API Cost {
 public:
  enum class Kind : std::uint8_t {
    sum,
    count,
    padded,
    padded_product,
    padded_squared,
    flops,
    joined,
    custom
  };

  /// Σ size: concatenated samples (packed tokens, nodes of graphs).
  static Cost sum() { return Cost(Kind::sum); }
  /// n, whatever the sizes.
  static Cost count() { return Cost(Kind::count); }
  /// n × longest: every sample padded to the longest.
  static Cost padded() { return Cost(Kind::padded); }
  /// n × the product of the longest of each size: images padded in height and width, alignments in
  /// length and depth. Of one size the same as padded(); see joined().
  static Cost padded_product() { return Cost(Kind::padded_product); }
  /// n × longest²: every sample padded, with a matrix of all pairs of positions (attention).
  static Cost padded_squared() { return Cost(Kind::padded_squared); }
  /// n × flops(longest): the work of a transformer on padded samples; see balance.h. That on
  /// samples laid end to end is a sum, with the flops of the samples as their sizes.
  static Cost flops() { return Cost(Kind::flops); }

  /// Of a further size of samples that are padded in several: it counts against the limit of the
  /// column before, together with the sizes there. `longest` of padded(), padded_squared() and
  /// flops() is then the sum of the longest of each size: source and target of a translation.
  static Cost joined() { return Cost(Kind::joined); }
  /// How many sizes one limit may count.
  static constexpr std::size_t kMostSizes = 8;

  /// The cost of this name: "sum", "count", "padded", "padded_product", "padded_squared", "flops".
  /// @throws std::invalid_argument listing the names.
  static Cost named(std::string_view name);
  /// All names, quoted and separated by commas, for error messages.
  static std::string names();

  /// How many samples of size `longest` stay within `budget`.
  using LargestCount = std::function<std::int64_t(double longest, double budget)>;
  /// What `count` samples padded to `longest` cost.
  using Price = std::function<double(std::int64_t count, double longest)>;

  /// Any cost of the number of samples and the longest one, such as the bytes that a memory model
  /// predicts (see model_limit). The functions must depend on nothing else, because batches are
  /// built again when a run is resumed. `largest_count` must not rise with `longest`.
  static Cost custom(LargestCount largest_count, Price price);
  /// The same, with a search for the largest count. `price` must not fall with either argument; an
  /// infinite one exceeds every budget.
  static Cost priced(Price price);

  /// The same for samples that may be padded in several sizes: of the longest of each.
  using JointCount = std::function<std::int64_t(std::span<const double> longest, double budget)>;
  using JointPrice = std::function<double(std::int64_t count, std::span<const double> longest)>;
  static Cost joint(JointCount largest_count, JointPrice price);
  /// The same, with a search for the largest count, whose answers are remembered.
  static Cost joint(JointPrice price);

  [[nodiscard]] Kind kind() const { return kind_; }
  [[nodiscard]] const LargestCount& largest_count() const { return largest_count_; }
  [[nodiscard]] const Price& price() const { return price_; }
  /// Empty unless the cost is a joint() one.
  [[nodiscard]] const JointCount& joint_count() const { return joint_count_; }
  [[nodiscard]] const JointPrice& joint_price() const { return joint_price_; }

 private:
  explicit Cost(Kind kind) : kind_(kind) {}

  Kind kind_;
  LargestCount largest_count_;
  Price price_;
  JointCount joint_count_;
  JointPrice joint_price_;
};

/// Remembers the answers for whole lengths below 2^16 and the budget that is asked for first:
/// batches ask about the same lengths again and again. Safe to call from several threads.
[[nodiscard]] BRIM_API Cost::LargestCount remembered(Cost::LargestCount largest_count);

/// A budget: no batch's cost may exceed `maximum`.
class BRIM_API Limit {
 public:
  /// @throws std::invalid_argument if `maximum` is not positive.
  Limit(Cost cost, std::int64_t maximum);
  /// @throws std::invalid_argument if `maximum` is not positive, or not finite.
  Limit(Cost cost, double maximum);
  /// Of a column whose sizes count against the limit of the column before; see Cost::joined().
  static Limit joined() { return {Cost::joined(), std::int64_t{1}}; }

  [[nodiscard]] const Cost& cost() const { return cost_; }
  /// For whole sizes, whose costs are whole: the fraction is dropped.
  [[nodiscard]] std::int64_t whole() const { return whole_; }
  [[nodiscard]] double real() const { return real_; }

  /// The largest size of a sample that fits by itself: whole, or real.
  /// @throws std::invalid_argument if none does.
  [[nodiscard]] std::int64_t largest_whole_size() const;
  [[nodiscard]] double largest_real_size() const;

 private:
  Cost cost_;
  std::int64_t whole_;
  double real_;
};

}  // namespace brim::batching
