#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/detail/item_contrast.h>
#include <brim/adapt/detail/part_weights.h>
#include <brim/export.h>

#include <cstdint>
#include <vector>

namespace brim::detail {

/// Finds out, in the first batches that are split, whether the losses of parts add up to that of
/// the whole, and by which weights.
///
/// A few neighbouring items are run together and apart. Which ones: see ItemContrast. A batch in
/// which all items are alike tells nothing, and is followed by others.
///
/// Belongs to one thread at a time.
class BRIM_API SplitCheck {
 public:
  /// What a batch has shown.
  enum class Result : std::uint8_t {
    right,
    undecided,
    failed,   ///< the loss function, with so few items
    random,   ///< nothing can be compared, but the graph shows that it is right
    unknown,  ///< nothing can be compared: worth a warning
  };

  /// Whether items should be run although none of them differ more than those before.
  [[nodiscard]] bool is_open() const noexcept { return left_ > 0; }

  /// @param items the number of items in the batch. @param size of the parts.
  /// @param places from ItemContrast::pairs. The random state moves on, buffers may change.
  /// @throws c10::ValueError if the loss has no parts, or not those that `reduction` says; what the
  ///     loss function throws only if memory ran out, and smaller parts are possible.
  Result run(PartWeights& weights, std::int64_t items, std::int64_t size,
             std::vector<std::int64_t> places, PartWeights::Forward forward,
             PartWeights::Gradients gradients);

 private:
  [[nodiscard]] Result compare(PartWeights& weights, std::int64_t items, std::int64_t size,
                               std::int64_t place, PartWeights::Forward forward,
                               PartWeights::Gradients gradients);

  int left_ = 3;  // batches that may leave it undecided
  bool is_random_ = false;
};

/// What to warn of where the result is unknown.
inline constexpr const char* kUnknownParts =
    "whether the loss can be computed in parts could not be checked: it is random (two runs of the "
    "same items differ), and its graph does not show how it is reduced. If it is right, pass "
    "check=False";

/// PartWeights::Gradients by torch's own function.
BRIM_API std::vector<at::Tensor> gradients_by(const at::Tensor& loss,
                                              const std::vector<at::Tensor>& leaves);

}  // namespace brim::detail
