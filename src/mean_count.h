#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

// What the mean of a loss is divided by. Here, where no module is: `nn` has such losses, and
// `adapt` asks for it.

namespace brim {

/// A node of a graph that is a mean, and knows what it divides by.
class CountedMean {
 public:
  /// The number of terms, or their total weight; nothing if it is a sum.
  [[nodiscard]] virtual std::optional<double> mean_count() = 0;

 protected:
  ~CountedMean() = default;
};

/// What torch's cross entropy divides a mean by: the labels that are not ignored, by the weights of
/// their classes. Waits for an accelerator.
/// @param target class numbers. @param weight of each class; undefined: 1.
[[nodiscard]] double labels_counted(const at::Tensor& target, const at::Tensor& weight,
                                    std::int64_t ignore_index);

}  // namespace brim
