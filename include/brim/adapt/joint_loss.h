#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/call_key.h>
#include <brim/adapt/detail/joint_pass.h>
#include <brim/adapt/microbatches.h>
#include <brim/memory/stats.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace brim {
namespace detail {

/// How encoders take the tensors of a batch: all of them one function, or a tuple of functions one
/// each.
template <class Encode>
struct Encoders {
  static constexpr bool kEach = false;
  template <class... Tensors>
  static constexpr std::size_t count = 1;
};
template <class... Functions>
struct Encoders<std::tuple<Functions...>> {
  static constexpr bool kEach = true;
  template <class... Tensors>
  static constexpr std::size_t count = sizeof...(Functions);
};

inline std::vector<at::Tensor> outputs_of(at::Tensor output) { return {std::move(output)}; }
inline std::vector<at::Tensor> outputs_of(std::vector<at::Tensor> outputs) { return outputs; }

/// Outputs as the encoder returned them.
template <class Result>
Result outputs_as(const std::vector<at::Tensor>& outputs) {
  if constexpr (std::is_same_v<Result, at::Tensor>) {
    return outputs.front();
  } else {
    return outputs;
  }
}

}  // namespace detail

/// Microbatches for a loss that needs all items at once, such as a contrastive one.
///
///     brim::Microbatches step(
///         [&](const at::Tensor& images, const at::Tensor& texts) {  // the embeddings of all
///           return contrastive_loss(images, texts, temperature);
///         },
///         std::tuple([&](const at::Tensor& x) { return vision->forward(x); },
///                    [&](const at::Tensor& x) { return language->forward(x); }));
///     const at::Tensor loss = step(pixels, tokens);  // backward has run
///
/// `encode` is one function of a part of all tensors, or a tuple of functions, each for its own
/// tensor; these may differ in length. It returns a tensor with a row per item, or a vector of
/// such, and `loss` gets the same of all items. Parts are encoded without a graph, then again with
/// one and the same random numbers; see detail::JointPass. Gradients are those of the whole batch:
/// to the bit where one part is enough, else up to rounding.
///
/// With `adapt.ranks`, `loss` gets the embeddings of all ranks, by rank, and must draw no random
/// numbers. Each encoder must treat items apart from each other and write to no tensor of the
/// batch; neither is checked here.
template <class LossFunction, class Encode>
class Microbatches : public detail::MicrobatchSteps {
  using Outputs = std::vector<at::Tensor>;

 public:
  Microbatches(LossFunction loss, Encode encode, MicrobatchOptions options = {})
      : MicrobatchSteps(checked(std::move(options)), Reduction::sum),
        loss_(std::move(loss)),
        encode_(std::move(encode)) {
    meets_in_attempts_ = true;
  }

  /// @return the loss of the whole batch, without a graph.
  /// @throws c10::OutOfMemoryError with a summary if a part does not fit even at the floor; then,
  ///     and if a function throws, gradients and buffers are as before.
  template <class... Tensors>
    requires(std::convertible_to<const Tensors&, const at::Tensor&> && ...)
  at::Tensor operator()(const at::Tensor& first, const Tensors&... others) {
    const std::vector<at::Tensor> batch{first, others...};
    CallKey key(options_.adapt.key);
    telling_ranks([&] {
      for (const at::Tensor& tensor : batch) {
        TORCH_CHECK_VALUE(tensor.defined(), "the batch has an undefined tensor");
        const std::int64_t dim = detail::chunk_dim(tensor.dim(), options_.dim);
        TORCH_CHECK_VALUE(kEach || tensor.size(dim) == first.size(dim),
                          "the tensors of a batch must have the same length along dimension ", dim,
                          ", got shapes ", first.sizes(), " and ", tensor.sizes());
        key.add(tensor, dim);
      }
    });
    return run(batch, key.value(), std::make_index_sequence<1 + sizeof...(Tensors)>());
  }

 private:
  static constexpr bool kEach = detail::Encoders<Encode>::kEach;

  static MicrobatchOptions checked(MicrobatchOptions options) {
    TORCH_CHECK_VALUE(options.adapt.ranks == nullptr || !options.adapt.ranks->options().per_rank,
                      "per_rank cannot be had with encode: all ranks exchange their embeddings "
                      "between the parts");
    return options;
  }

  template <std::size_t... I>
  at::Tensor run(const std::vector<at::Tensor>& batch, std::uint64_t key,
                 std::index_sequence<I...> /*tensors*/) {
    std::vector<std::int64_t> items;
    for (const at::Tensor& tensor : batch) {
      if (kEach || items.empty()) {
        items.push_back(tensor.size(detail::chunk_dim(tensor.dim(), options_.dim)));
      }
    }
    const auto part = [&](std::size_t i, std::int64_t begin, std::int64_t end) {
      return batch[i].narrow(detail::chunk_dim(batch[i].dim(), options_.dim), begin, end - begin);
    };
    detail::JointPass::Work work{
        .items = items,
        .encode = {},
        .loss = {},
        .backward = [](const Outputs& roots,
                       const Outputs& gradients) { torch::autograd::backward(roots, gradients); },
        .device = options_.adapt.device.value_or(batch.front().device()),
        .buffers = {.tensors = options_.buffers}};
    for (std::size_t i = 0; i < options_.buffers.size(); ++i) {
      work.buffers.names.push_back(std::to_string(i));
    }
    if constexpr (kEach) {
      static_assert(sizeof...(I) == std::tuple_size_v<Encode>, "one tensor for each encoder");
      work.encode = [&](std::size_t encoder, std::int64_t begin, std::int64_t end) {
        Outputs outputs;
        ((encoder == I
              ? void(outputs = detail::outputs_of(std::get<I>(encode_)(part(I, begin, end))))
              : void()),
         ...);
        return outputs;
      };
      work.loss = [&](const std::vector<Outputs>& outputs) {
        return loss_(
            detail::outputs_as<std::decay_t<
                std::invoke_result_t<std::tuple_element_t<I, Encode>&, const at::Tensor&>>>(
                outputs[I])...);
      };
    } else {
      using Result = std::decay_t<decltype(encode_(batch[I]...))>;
      work.encode = [&](std::size_t /*encoder*/, std::int64_t begin, std::int64_t end) {
        return detail::outputs_of(encode_(part(I, begin, end)...));
      };
      work.loss = [&](const std::vector<Outputs>& outputs) {
        return loss_(detail::outputs_as<Result>(outputs.front()));
      };
    }
    const detail::JointPass::Ranks ranks{.agreement = options_.adapt.ranks,
                                         .sum = options_.sum_over_ranks};
    at::Tensor loss = run_steps(std::ranges::max(items), key, [&] {
      at::Tensor own = detail::JointPass::run(pass_, work, size_, reduces() ? &ranks : nullptr);
      if (reduces() && own.defined()) {
        over_ranks_.prepare(own, 1.0);
      }
      return own;
    });
    pass_.finish();
    return loss;
  }

  LossFunction loss_;
  Encode encode_;
};

// Doxygen takes it for a function of that name.
/// @cond
template <class LossFunction, class Encode>
  requires(!std::is_same_v<Encode, MicrobatchOptions>)
Microbatches(LossFunction, Encode, MicrobatchOptions = {}) -> Microbatches<LossFunction, Encode>;
/// @endcond

}  // namespace brim
