#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/part_loss.h>
#include <brim/export.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>
#include <vector>

namespace brim::detail {

/// How much the loss of a part counts in that of a batch.
///
/// A mean counts by what it divides by. That is what the loss function says (PartLoss::count), or
/// what the loss's own graph shows: the elements of a mean, the total weight of a cross entropy,
/// what a sum is divided by. Where it shows nothing, items count. Whether the losses of parts
/// really add up to that of the whole is a matter of numbers: `compare` runs a few items together
/// and apart, and finds which of the two holds, if any.
///
/// Belongs to one thread at a time.
class BRIM_API PartWeights {
 public:
  using Forward = c10::function_ref<PartLoss(std::int64_t begin, std::int64_t end)>;
  /// The gradients of the loss by these leaves, undefined for those that it does not reach; empty
  /// if there is no way to get them. Keeps the graph.
  using Gradients = c10::function_ref<std::vector<at::Tensor>(const at::Tensor& loss,
                                                              const std::vector<at::Tensor>&)>;

  explicit PartWeights(Reduction reduction) : reduction_(reduction) {}

  /// What a part counts.
  struct Count {
    double value = 0;
    bool is_own = false;  ///< not its items
    /// By how much further terms of the loss count, relative to the first. A loss of several terms
    /// has one weight per part only if this is the same in all parts.
    double others = 0;
  };
  /// @throws c10::ValueError if neither items nor the graph tell.
  [[nodiscard]] Count count(const PartLoss& part, std::int64_t items) const;

  /// What a comparison showed.
  struct Verdict {
    bool tells = false;      ///< the halves differ, so that a wrong weight would have been noticed
    bool is_random = false;  ///< two runs of the same items differ: nothing can be compared
    bool is_shown = false;   ///< the graph alone shows that it is what `reduction` says
    std::string error{};     ///< why the loss cannot be run in parts; empty if it can
  };
  /// Compares the losses and gradients of `width` items from `at` on, and of as many after them,
  /// with those of both together. Calls `forward` three times, or four. The random state moves on.
  [[nodiscard]] Verdict compare(std::int64_t at, std::int64_t width, Forward forward,
                                Gradients gradients);

 private:
  struct Measured;
  class Comparison;
  /// Of a term: it counts what its graph shows, or items, or does not depend on the batch, as
  /// weight decay.
  enum class Kind : std::uint8_t { counted, items, constant };
  enum class Looks : std::uint8_t { sum, mean, mixed, other };
  [[nodiscard]] std::string refuse(const Measured& whole, const Measured& first,
                                   const Measured& second, Looks looks) const;

  Reduction reduction_;
  bool by_terms_ = true;  // what the graph shows was right so far
  bool by_items_ = true;
  std::vector<Kind> kinds_;  // of the terms; empty: not known
};

}  // namespace brim::detail
