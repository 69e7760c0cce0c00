#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/adapt.h>
#include <brim/adapt/agreement.h>
#include <brim/adapt/call_key.h>
#include <brim/adapt/detail/batch_pass.h>
#include <brim/adapt/detail/gradient_reduction.h>
#include <brim/adapt/detail/item_contrast.h>
#include <brim/adapt/detail/joint_pass.h>
#include <brim/adapt/detail/random_state.h>
#include <brim/adapt/detail/split_check.h>
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
#include <tuple>
#include <utility>
#include <vector>

namespace brim {

/// Options of Microbatches.
struct MicrobatchOptions {
  Reduction reduction = Reduction::mean;
  std::int64_t size = 0;  ///< the longest part; 0: the whole batch
  std::int64_t dim = 0;   ///< of a tensor, along which it is cut
  /// Compare a few items together and apart in the first batch that is split, and refuse a loss
  /// that does not follow from its parts. The loss function is then called some times more.
  bool check = true;
  /// How the size is found. Sizes are remembered by the Microbatches itself if `memory` is null.
  AdaptOptions adapt{};

  /// With `adapt.ranks`: the model's parameters, and what replaces a tensor by its sum over all
  /// ranks (an all-reduce). Gradients and loss are then those of all ranks' batches together.
  std::vector<at::Tensor> parameters{};
  std::function<void(const at::Tensor&)> sum_over_ranks{};

  /// With `encode`: what its forward may change beside tensors that it returns. See JointPass.
  std::vector<at::Tensor> buffers{};
};

namespace detail {

/// What all Microbatches have in common: options, remembered sizes, and the attempts of a step.
class MicrobatchSteps {
 public:
  MicrobatchSteps(const MicrobatchSteps&) = delete;
  MicrobatchSteps& operator=(const MicrobatchSteps&) = delete;

  /// The size of the parts of the last batch; 0 before the first.
  [[nodiscard]] std::int64_t size() const noexcept { return size_; }

 protected:
  MicrobatchSteps(MicrobatchOptions options, Reduction over_ranks)
      : options_(std::move(options)),
        pass_(options_.reduction, options_.parameters),
        over_ranks_(over_ranks, options_.parameters) {
    TORCH_CHECK_VALUE(options_.size >= 0, "size must be 0 or more, got ", options_.size);
    TORCH_CHECK_VALUE(!reduces() || options_.sum_over_ranks,
                      "sum_over_ranks must be given for parts on several ranks");
    TORCH_CHECK_VALUE(
        !reduces() || options_.adapt.ranks->options().collectives == Collectives::between,
        "ranks must have their collectives between the calls: the gradients are "
        "reduced after the parts");
    pass_.count_always(reduces());
    if (options_.adapt.memory == nullptr) {
      options_.adapt.memory = &sizes_;
    }
    options_.adapt.name = "part size";
  }
  ~MicrobatchSteps() = default;

  /// While it lives, calls are as these steps need them. Others may have the same Agreement, also
  /// around this: a step inside of another is refused, and must leave the outer one as it was.
  class AgreedStep {
   public:
    explicit AgreedStep(MicrobatchSteps& steps) : ranks_(steps.options_.adapt.ranks) {
      if (ranks_ != nullptr) {
        const auto& sum = steps.options_.sum_over_ranks;
        ending_before_ =
            ranks_->end_with({.vote = [&](bool done) { return steps.over_ranks_.vote(done, sum); },
                              .run = [&] { steps.sum_gradients(); }});
        met_before_ = ranks_->meet_in_attempts(steps.meets_in_attempts_);
      }
    }
    ~AgreedStep() {
      if (ranks_ != nullptr) {
        ranks_->meet_in_attempts(met_before_);
        ranks_->end_with(std::move(ending_before_));
      }
    }
    AgreedStep(const AgreedStep&) = delete;
    AgreedStep& operator=(const AgreedStep&) = delete;

   private:
    Agreement* ranks_;
    Agreement::Ending ending_before_;
    bool met_before_ = false;
  };

  /// @param attempt runs the batch in parts of `size_`. @return the loss, of all ranks
  template <class Attempt>
  at::Tensor run_steps(std::int64_t items, std::uint64_t key, const Attempt& attempt) {
    telling_ranks(
        [&] { TORCH_CHECK_VALUE(items >= 1, "the batch must have 1 item or more, got ", items); });
    const AgreedStep agreed(*this);
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
    const std::int64_t largest = options_.size == 0 ? items : std::min(options_.size, items);
    at::Tensor loss = until_it_fits({.maxima = {&largest, 1},
                                     .quanta = {&adapt.quantum, 1},
                                     .options = adapt,
                                     .items = items,
                                     .maxima_may_differ = true,
                                     .maxima_are_lengths = true},
                                    [&](std::span<const std::int64_t> values) {
                                      size_ = values.front();
                                      return at::Tensor(attempt());
                                    });
    return reduces() ? over_ranks_.loss() : loss;
  }

  /// Runs checks of the arguments, whose errors must reach the other ranks too.
  template <class Checks>
  void telling_ranks(const Checks& checks) {
    const AgreedStep agreed(*this);
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

  void sum_gradients() {
    try {
      over_ranks_.run(options_.sum_over_ranks);
    } catch (...) {
      pass_.undo();
      throw;
    }
  }

  [[nodiscard]] bool reduces() const noexcept { return options_.adapt.ranks != nullptr; }

  SizeMemory sizes_;
  MicrobatchOptions options_;
  BatchPass pass_;
  GradientReduction over_ranks_;
  std::int64_t size_ = 0;
  bool meets_in_attempts_ = false;  // the ranks: Agreement::meet_in_attempts
};

}  // namespace detail

/// Trains on batches in parts that fit, with the gradients of the whole batch.
///
///     brim::Microbatches step([&](const at::Tensor& x, const at::Tensor& y) {
///       return torch::cross_entropy_loss(model->forward(x), y);
///     });
///     const at::Tensor loss = step(x, y);  // backward has run
///     optimizer.step();
///
/// The loss function gets a part of each tensor, along `dim`, and returns its loss. What a mean
/// divides by is read from the loss's graph: elements, labels that are not ignored, weights of
/// classes. Where that does not show it, return `PartLoss(loss, count)`. A loss function of two
/// integers gets the bounds of the part instead, and the step the number of items: `step(1000)`.
/// Gradients are added to those that are there.
///
/// The loss must treat the items of a batch apart from each other (see brim/adapt/whole_batch.h);
/// one that does not is refused, as far as a few items show it.
/// After out of memory the whole batch is run again in smaller parts, with the same random state:
/// the gradients are those of a run that had that size from the start, to the bit.
/// Where layers drop values so that a part fits (brim/nn/pressure.h), smaller parts that drop
/// nothing are timed beside it in some steps, and the faster ones stay.
///
/// Belongs to one thread at a time.
template <class LossFunction, class Encode = void>
class Microbatches;

template <class LossFunction>
class Microbatches<LossFunction, void> : public detail::MicrobatchSteps {
 public:
  explicit Microbatches(LossFunction loss_fn, MicrobatchOptions options = {})
      : MicrobatchSteps(options, options.reduction), loss_fn_(std::move(loss_fn)) {}

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
    const std::vector<at::Tensor> batch{first, others...};
    return run(
        first.size(dim), key.value(), first.device(), [&] { return contrast_.pairs(batch, dim); },
        [&](std::int64_t begin, std::int64_t end) {
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
    return run(
        items, options_.adapt.key, options_.adapt.device.value_or(at::kCPU),
        [] { return std::vector<std::int64_t>(); },
        [&](std::int64_t begin, std::int64_t end) { return loss_fn_(begin, end); });
  }

  /// Runs several batches as if they were one: the gradients and the loss are means over all of
  /// them together (by tokens, where the loss is a mean over tokens), not sums of means.
  /// @param batches a range of tuples of what the step takes: tensors, or a number of items.
  /// @throws as a step. The gradients are then as before the first batch.
  template <class Batches>
  at::Tensor accumulate(const Batches& batches) {
    pools_ = true;
    pass_.count_always(true);
    const auto end = [this] {
      pools_ = false;
      pass_.count_always(reduces());
    };
    try {
      for (const auto& batch : batches) {
        std::apply([this](const auto&... members) { (*this)(members...); }, batch);
      }
      at::Tensor loss = pass_.finish_pool();
      end();
      return loss;
    } catch (...) {
      pass_.undo_pool();
      end();
      throw;
    }
  }

 private:
  template <class Pairs, class Part>
  at::Tensor run(std::int64_t items, std::uint64_t key, c10::Device device, const Pairs& pairs,
                 const Part& part) {
    const auto forward = [&](std::int64_t begin, std::int64_t end) -> PartLoss {
      return part(begin, end);
    };
    const auto backward = [](const at::Tensor& loss, const at::Tensor& weight) {
      loss.backward(weight);
    };
    const at::Tensor loss = run_steps(items, key, [&] {
      if (options_.check && size_ < items) {
        check(items, device, pairs, forward);
      }
      at::Tensor own = pass_.run(items, size_, forward, backward);
      if (reduces()) {
        over_ranks_.prepare(own, pass_.count(), pass_.shape());
      }
      return own;
    });
    if (pools_) {
      pass_.pool(loss, reduces() ? over_ranks_.total() : pass_.count(),
                 reduces() ? over_ranks_.shape() : pass_.shape());
    } else {
      pass_.finish();
    }
    return loss;
  }

  /// In an attempt, before its parts: the other ranks hear of an error there.
  template <class Pairs, class Forward>
  void check(std::int64_t items, c10::Device device, const Pairs& pairs, const Forward& forward) {
    const RandomState random(device);
    std::vector<std::int64_t> places = pairs();
    if (places.empty() && !check_.is_open()) {
      return;
    }
    const auto result =
        check_.run(pass_.weights(), items, size_, std::move(places), forward, detail::gradients_by);
    if (result == detail::SplitCheck::Result::unknown) {
      TORCH_WARN(detail::kUnknownParts);
    }
    contrast_.compared();
    random.restore();
  }

  LossFunction loss_fn_;
  detail::SplitCheck check_;
  detail::ItemContrast contrast_;
  bool pools_ = false;
};

template <class LossFunction>
explicit Microbatches(LossFunction, MicrobatchOptions = {}) -> Microbatches<LossFunction, void>;

}  // namespace brim
