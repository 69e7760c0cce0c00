#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/agreement.h>
#include <brim/adapt/detail/batch_pass.h>
#include <brim/adapt/detail/random_state.h>
#include <brim/export.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace brim::detail {

/// What encoders move on beside torch's random state, such as Python's generators. Both may be
/// empty.
struct MoreState {
  std::function<std::int64_t()> take{};  ///< a number of the state as it is; of equal ones the same
  std::function<void(std::int64_t)> put_back{};
};

/// The tensors that an encoder's forward may change, and what they are called.
struct NamedTensors {
  std::vector<at::Tensor> tensors{};
  std::vector<std::string> names{};
};

/// A pass over a batch whose loss needs the outputs of all items at once, as a contrastive one
/// does. There may be several encoders, each with its own items.
///
///     1. Each part is encoded without a graph. Its random state is remembered.
///     2. The loss of all outputs, and its backward: gradients of the outputs, and of what the loss
///        itself uses.
///     3. Each part is encoded again, with a graph and the same random numbers, and the gradients
///        of its outputs are passed on.
///
/// A batch of one part takes the plain way, a forward and a backward.
///
/// Of each encoder, parts run in grad mode until one has outputs with a graph, which is dropped: so
/// it is known which outputs need gradients, and an encoder that is frozen does not run twice.
/// Where no random numbers are drawn, later parts of step 1 are longer: as long as a part without a
/// graph may be that takes no more memory than one with a graph, by what both were seen to take.
///
/// Buffers that a forward changes: each part begins with what the encoder's first part found, and
/// all must leave the same, which stays: as one pass over the whole batch (the vectors of spectral
/// norm, counters). What depends on the items cannot be had like that and is an error, unless the
/// buffer is among those that may carry over from part to part (running statistics of layers that
/// are allowed). These change in step 1 only.
///
/// With ranks, each encodes its own items, and all have the outputs of all: the loss is that of all
/// items, on every rank. Then the gradients must be summed over the ranks.
class BRIM_API JointPass {
 public:
  using Outputs = std::vector<at::Tensor>;

  struct Work {
    std::span<const std::int64_t> items;  ///< of each encoder
    /// The outputs of items [begin, end): with the items along their first dimension.
    std::function<Outputs(std::size_t encoder, std::int64_t begin, std::int64_t end)> encode;
    /// Of all outputs of each encoder: one element, with its graph.
    std::function<at::Tensor(const std::vector<Outputs>&)> loss;
    /// Calls backward. @param gradients undefined: of the loss
    std::function<void(const Outputs& roots, const Outputs& gradients)> backward;
    c10::Device device;  ///< on which memory is measured and random numbers are drawn
    MoreState more{};
    NamedTensors buffers{};
    std::vector<at::Tensor> carried{};  ///< buffers that may carry over from part to part
  };

  /// Other ranks, which call `run` at the same time.
  struct Ranks {
    Agreement* agreement = nullptr;
    /// Replaces a tensor by its sum over all ranks. Must not fail. Not a copy: it may count rounds.
    c10::function_ref<void(const at::Tensor&)> sum{};
  };

  /// @param size of the parts of the encoder with the most items; others are cut into as many.
  /// @param ranks null: there are no others
  /// @return the loss, without a graph; undefined if another rank failed and this one stopped.
  /// @throws what the functions throw, and c10::ValueError for outputs or a loss that cannot be
  ///     used. Gradients and buffers are then as before.
  static at::Tensor run(BatchPass& pass, const Work& work, std::int64_t size,
                        const Ranks* ranks = nullptr);
};

/// The length of an encoder's parts, so that there are as many as of the longest.
[[nodiscard]] constexpr std::int64_t part_length(std::int64_t items, std::int64_t longest,
                                                 std::int64_t size) {
  const std::int64_t parts = (longest + size - 1) / size;
  return items == longest ? size : (items + parts - 1) / parts;
}

}  // namespace brim::detail
