#pragma once

#include <brim/batching/cost.h>
#include <brim/export.h>
#include <brim/predict/need_bound.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace brim {

/// About how many bytes a batch needs whose samples are padded in several sizes, as fit_batching
/// measured: source and target of a translation, height and width of images, length and depth of
/// alignments.
///
///     need = Σ weight · term
///
/// For sizes a and b of n samples, the terms are 1, n, n², n · (a, b, a², ab, b², a²b, ab², a²b²),
/// and a², b², ab for what is held for one sample at a time. Weights are not negative, so the need
/// never falls as a batch grows.
///
/// A value type without torch in it. Reading one from several threads is safe.
class BRIM_API PaddedNeed {
 public:
  static constexpr std::size_t kMostSizes = 4;

  /// @throws std::invalid_argument unless there are 1 to 4 sizes, and a weight that is finite and
  ///     not negative for each term.
  PaddedNeed(std::size_t sizes, std::vector<double> weights);

  /// How often each term counts for n samples with these longest sizes.
  [[nodiscard]] static JointNeedBound::Terms terms(double n, std::span<const double> longest);
  /// "1", "n", "n²", "n·a", …, as many as there are weights.
  [[nodiscard]] static std::vector<std::string> term_names(std::size_t sizes);

  [[nodiscard]] std::size_t sizes() const { return sizes_; }
  [[nodiscard]] const std::vector<double>& weights() const { return weights_; }

  [[nodiscard]] double at(double n, std::span<const double> longest) const;
  /// The largest n that needs no more than `bytes`; 0 for none.
  [[nodiscard]] std::int64_t largest_count(std::span<const double> longest, double bytes) const;

  /// A limit on the column of the first size; those of the others have Limit::joined().
  [[nodiscard]] batching::Limit limit(std::int64_t bytes) const;

  [[nodiscard]] std::string to_string() const;

 private:
  std::size_t sizes_;
  std::vector<double> weights_;
};

}  // namespace brim
