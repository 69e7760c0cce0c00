#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

#include <cstdint>
#include <span>
#include <vector>

namespace brim::detail {

/// Finds neighbours in a batch that differ most in what the mean of a loss may depend on: how many
/// labels are not -100, how much is not padding (0), the sum of all values.
///
/// Batches are searched as long as one differs by more than twice what was compared before.
/// Belongs to one thread at a time.
class BRIM_API ItemContrast {
 public:
  /// The places of the first items of such pairs, at most three; none where nothing new differs.
  /// Needs memory for a few numbers per item. @param dim along which the items are.
  [[nodiscard]] std::vector<std::int64_t> pairs(std::span<const at::Tensor> batch,
                                                std::int64_t dim);

  /// The same for traits that the caller has measured. @param traits of each item, by trait.
  [[nodiscard]] std::vector<std::int64_t> pairs(const std::vector<std::vector<double>>& traits);

  /// The pairs that were found last have been compared.
  void compared() { compared_ = found_; }

 private:
  std::vector<double> compared_;  // by trait: by how much the pairs differed
  std::vector<double> found_;
};

}  // namespace brim::detail
