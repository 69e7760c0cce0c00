#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/agreement.h>
#include <brim/adapt/call_key.h>
#include <brim/adapt/detail/batch_pass.h>
#include <brim/adapt/detail/gradient_reduction.h>
#include <brim/adapt/options.h>
#include <brim/adapt/part_loss.h>
#include <brim/adapt/saved_state.h>
#include <brim/adapt/size_memory.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace brim {

/// Options of Microbatches.
struct MicrobatchOptions {
  Reduction reduction = Reduction::mean;
  std::int64_t size = 0;  ///< the longest part; 0: the whole batch
  std::int64_t dim = 0;   ///< of a tensor, along which it is cut
  /// How the size is found. Sizes are remembered by the Microbatches itself if `memory` is null.
  AdaptOptions adapt{};

  /// With `adapt.ranks`: the model's parameters, and what replaces a tensor by its sum over all
  /// ranks (an all-reduce). Gradients and loss are then those of all ranks' batches together.
  std::vector<at::Tensor> parameters{};
  std::function<void(const at::Tensor&)> sum_over_ranks{};
};

/// Trains on batches in parts that fit, with the gradients of the whole batch.
///
///     brim::Microbatches step([&](const at::Tensor& x, const at::Tensor& y) {
///       return torch::cross_entropy_loss(model->forward(x), y);
///     });
///     const at::Tensor loss = step(x, y);  // backward has run
///     optimizer.step();
///
/// The loss function gets a part of each tensor, along `dim`, and returns its loss, or
/// `PartLoss(loss, count)` if that is the mean of something else than the batch's items. A loss
/// function of two integers gets the bounds of the part instead, and the step the number of items:
/// `step(1000)`. Gradients are added to those that are there.
///
/// The loss must treat the items of a batch apart from each other: see brim/adapt/whole_batch.h.
/// After out of memory the whole batch is run again in smaller parts, with the same random state:
/// the gradients are those of a run that had that size from the start, to the bit.
///
/// Belongs to one thread at a time.
template <class LossFunction>
class Microbatches {
 public:
  explicit Microbatches(LossFunction loss_fn, MicrobatchOptions options = {})
      : loss_fn_(std::move(loss_fn)),
        options_(std::move(options)),
        pass_(options_.reduction, options_.parameters),
        over_ranks_(options_.reduction, options_.parameters) {
    TORCH_CHECK_VALUE(options_.size >= 0, "size must be 0 or more, got ", options_.size);
    TORCH_CHECK_VALUE(!reduces() || options_.sum_over_ranks,
                      "sum_over_ranks must be given for parts on several ranks");
    TORCH_CHECK_VALUE(
        !reduces() || options_.adapt.ranks->options().collectives == Collectives::between,
        "ranks must have their collectives between the calls: the gradients are "
        "reduced after the parts");
    if (options_.adapt.memory == nullptr) {
      options_.adapt.memory = &sizes_;
    }
    options_.adapt.name = "part size";
    if (reduces()) {
      options_.adapt.ranks->vote_with(
          [this](bool done) { return over_ranks_.vote(done, options_.sum_over_ranks); });
    }
  }
  ~Microbatches() {
    if (reduces()) {
      options_.adapt.ranks->vote_with({});
    }
  }
  Microbatches(const Microbatches&) = delete;
  Microbatches& operator=(const Microbatches&) = delete;

  /// @return the loss of the whole batch, without a graph.
  /// @throws c10::OutOfMemoryError with a summary if a part does not fit even at the floor; then,
  ///     and if the loss function throws, the gradients are as before.
  template <class... Tensors>
    requires(std::convertible_to<const Tensors&, const at::Tensor&> && ...)
  at::Tensor operator()(const at::Tensor& first, const Tensors&... others) {
    std::int64_t dim = 0;
    CallKey key(options_.adapt.key);
    const auto check = [&](const at::Tensor& tensor) {
      TORCH_CHECK_VALUE(tensor.dim() > dim && tensor.size(dim) == first.size(dim),
                        "the tensors of a batch must have the same length along dimension ", dim,
                        ", got shapes ", first.sizes(), " and ", tensor.sizes());
      key.add(tensor, dim);
    };
    telling_ranks([&] {
      TORCH_CHECK_VALUE(first.defined(), "the batch has an undefined tensor");
      dim = detail::chunk_dim(first.dim(), options_.dim);
      check(first);
      (check(others), ...);
    });
    return run(first.size(dim), key.value(), [&](std::int64_t begin, std::int64_t end) {
      const auto part = [&](const at::Tensor& tensor) {
        return tensor.narrow(dim, begin, end - begin);
      };
      return std::invoke(loss_fn_, part(first), part(others)...);
    });
  }

  /// For a loss function of the bounds of a part.
  at::Tensor operator()(std::int64_t items)
    requires(std::invocable<LossFunction&, std::int64_t, std::int64_t>)
  {
    return run(items, options_.adapt.key,
               [&](std::int64_t begin, std::int64_t end) { return loss_fn_(begin, end); });
  }

  /// The size of the parts of the last batch; 0 before the first.
  [[nodiscard]] std::int64_t size() const noexcept { return size_; }

 private:
  template <class Part>
  at::Tensor run(std::int64_t items, std::uint64_t key, const Part& part) {
    telling_ranks(
        [&] { TORCH_CHECK_VALUE(items >= 1, "the batch must have 1 item or more, got ", items); });
    AdaptOptions adapt = options_.adapt;
    adapt.key = key;
    if (reduces()) {  // an attempt that fitted here is undone if it failed elsewhere
      adapt.restore = [&](SavedState& state) {
        if (options_.adapt.restore) {
          options_.adapt.restore(state);
        }
        state.add([&] { pass_.undo(); });
      };
    }
    const auto forward = [&](std::int64_t begin, std::int64_t end) -> PartLoss {
      return part(begin, end);
    };
    const auto backward = [](const at::Tensor& loss, const at::Tensor& weight) {
      loss.backward(weight);
    };
    const std::int64_t largest = options_.size == 0 ? items : std::min(options_.size, items);
    at::Tensor loss = detail::until_it_fits({.maxima = {&largest, 1},
                                             .quanta = {&adapt.quantum, 1},
                                             .options = adapt,
                                             .maxima_may_differ = true,
                                             .maxima_are_lengths = true,
                                             .counts_items = true},
                                            [&](std::span<const std::int64_t> values) {
                                              size_ = values.front();
                                              at::Tensor own =
                                                  pass_.run(items, size_, forward, backward);
                                              if (reduces()) {
                                                over_ranks_.prepare(own, pass_.count());
                                              }
                                              return own;
                                            });
    if (reduces()) {
      loss = over_ranks_.run(options_.sum_over_ranks);
    }
    pass_.finish();
    return loss;
  }

  /// Runs checks of the arguments, whose errors must reach the other ranks too.
  template <class Checks>
  void telling_ranks(const Checks& checks) {
    if (reduces() && !over_ranks_.is_planned()) {
      options_.adapt.ranks->count_exchange(false);
    }
    try {
      checks();
    } catch (const c10::Error& error) {
      if (reduces()) {
        options_.adapt.ranks->refuse_call(error.what_without_backtrace());
      }
      throw;
    }
  }

  [[nodiscard]] bool reduces() const noexcept { return options_.adapt.ranks != nullptr; }

  LossFunction loss_fn_;
  SizeMemory sizes_;
  MicrobatchOptions options_;
  detail::BatchPass pass_;
  detail::GradientReduction over_ranks_;
  std::int64_t size_ = 0;
};

}  // namespace brim
