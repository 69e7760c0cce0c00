#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace brim::batching {

/// Chooses the source of each sample of a mixture, so that shares follow the weights closely:
///
///     brim::batching::Mixture mixture({0.7, 0.2, 0.1}, seed);
///     while (auto source = mixture.next()) {
///       auto sample = sources[*source].next();  // a std::optional, empty at the end
///       if (!sample) { mixture.drop(*source); continue; }
///       mixture.took(*source);
///       …
///     }
///
/// Each source has turns at equal distances of (size taken) / weight, beginning at a random phase,
/// and the earliest turn is next. With m sources and samples that count 1, a source of share w has
/// had between w·n - m and w·n + m of n samples, at any n since weights were last set: random draws
/// are off by √n. The same choices on every machine for the same seed, weights and sizes.
///
/// For one thread.
class BRIM_API Mixture {
 public:
  /// Weights that were set, and the number of samples before them.
  using Change = std::pair<std::int64_t, std::vector<double>>;

  /// @param weights of any sum. A source with weight 0 has no turn.
  /// @throws std::invalid_argument if there is none, or one is negative, NaN or infinite, or all
  ///     are 0.
  Mixture(std::vector<double> weights, std::uint64_t seed);

  /// As the constructor checks them.
  static void check(const std::vector<double>& weights);

  /// The source of the next sample; empty if none that has a weight is left. The same until took(),
  /// drop() or set_weights() is called.
  [[nodiscard]] std::optional<std::size_t> next() const;

  /// Counts a sample. @param size what it counts: 1 for shares of samples, its tokens for shares of
  ///     tokens. @throws std::invalid_argument if it is negative, NaN or infinite.
  void took(std::size_t source, double size = 1.0);

  /// The source has no more samples. Shares of the others stay in proportion.
  void drop(std::size_t source);

  /// From the next sample on. What was taken before does not count any more: nothing is made up
  /// for. @throws std::invalid_argument as the constructor, or for another number of weights.
  void set_weights(std::vector<double> weights);

  [[nodiscard]] const std::vector<double>& weights() const { return changes_.back().second; }
  /// The number of samples taken.
  [[nodiscard]] std::int64_t taken() const { return taken_; }
  /// All weights so far: another mixture that sets them after as many samples makes the same
  /// choices.
  [[nodiscard]] const std::vector<Change>& changes() const { return changes_; }

 private:
  struct Source {
    double weight;
    double size;  // taken since weights were set, and the phase
    bool dropped;
  };

  void begin(std::vector<double> weights);

  std::uint64_t seed_;
  std::vector<Source> sources_;
  std::vector<Change> changes_;
  std::int64_t taken_ = 0;
};

}  // namespace brim::batching
