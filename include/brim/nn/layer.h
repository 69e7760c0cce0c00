#pragma once

#include <brim/export.h>
#include <brim/nn/again.h>
#include <brim/nn/saving.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>

namespace brim::nn {

namespace detail {

/// Writes `text`, which names a layer of torch::nn, with our namespace in place of torch's.
BRIM_API void print_as_ours(std::ostream& stream, const std::string& text);

/// The region of one layer (saving.h). Those that users opened around it count again inside of a
/// layer that is left out.
class BRIM_API LayerRegion {
 public:
  explicit LayerRegion(Recompute recompute);
  LayerRegion(const LayerRegion&) = delete;
  LayerRegion& operator=(const LayerRegion&) = delete;
  ~LayerRegion();

 private:
  Saving::State before_;
};

}  // namespace detail

/// What every layer of ours shares: it is a layer of torch::nn (`Base`) whose forward runs in a
/// region (saving.h). The options, the names of the parameters and buffers, `to`, `train` and
/// archives are the base's own, so that what one saves the other loads.
///
/// forward is not virtual in torch::nn. Whoever holds a layer of ours by torch's type
/// (`torch::nn::Conv2d`, `as<torch::nn::Conv2d>()`) and calls it gets torch's forward: the same
/// values, and torch's memory.
///
/// A layer is made from the options of torch::nn, or from a layer of torch::nn, whose parameters
/// and buffers it then shares (the same tensors, not copies).
///
///     brim::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 64, 7).stride(2).padding(3));
///     brim::nn::Conv2d same(*torch_conv);  // trains with torch_conv
///
/// Ownership and threads: as every module of torch::nn.
template <class Impl, class Base>
class BRIM_API Layer : public Base {
 public:
  using Theirs = Base;
  using Base::Base;

  // Public, because the layers inherit it as their own.
  // NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility)
  explicit Layer(const Base& base) : Base(base) {}

  /// A layer of ours again, with copies of the tensors. As in torch::nn, the copies of all
  /// parameters need a gradient, those of frozen ones too.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    const std::shared_ptr<torch::nn::Module> base = Base::clone(device);
    auto copy = std::make_shared<Impl>(static_cast<const Impl&>(*this));
    static_cast<Base&>(*copy) = static_cast<const Base&>(*base);
    return copy;
  }

  void pretty_print(std::ostream& stream) const override {
    std::ostringstream text;
    Base::pretty_print(text);
    detail::print_as_ours(stream, text.str());
  }

 protected:
  /// torch's forward in the region of this layer: the functions that it calls are brim's.
  at::Tensor in_region(const at::Tensor& input) {
    return in_region([&] { return Base::forward(input); });
  }

  /// What the layer was asked to compute again.
  static Recompute asked_of(const Impl& layer) {
    if constexpr (requires { layer.runs_again; }) {
      if (layer.runs_again && !layer.recompute.is_if_short()) {
        return Recompute::products;
      }
    }
    if constexpr (requires { layer.recompute; }) {
      return layer.recompute.is_if_short() ? Recompute::automatic
             : layer.recompute.is_always() ? Recompute::cheap
                                           : Recompute::nothing;
    }
    return Recompute::nothing;
  }

  template <class Run>
  auto in_region(const Run& run) {
    const auto& layer = static_cast<const Impl&>(*this);
    const detail::LayerRegion region(asked_of(layer));
    return run();
  }
};

/// A layer that can do without what it would keep.
template <class Impl, class Base>
// NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility): as the base classes of torch::nn
class BRIM_API RecomputingLayer : public Layer<Impl, Base> {
 public:
  using Layer<Impl, Base>::Layer;

  /// Keep no input, output or bits where the layer before can recompute its output in backward.
  Again recompute = false;
};

/// A linear layer or a convolution.
template <class Impl, class Base>
// NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility): as the base classes of torch::nn
class BRIM_API ProductLayer : public RecomputingLayer<Impl, Base> {
 public:
  using RecomputingLayer<Impl, Base>::RecomputingLayer;

  /// Run again in backward for the next layer, which then does not keep the output, if that is
  /// larger than the input. Implies `recompute`.
  bool runs_again = false;
};

/// Defines a layer and its holder, as TORCH_MODULE does: torch's forward in a region.
/// @param Name of the layer of torch::nn
/// @param Kind Layer, RecomputingLayer, ProductLayer, …
/// @param Input what torch's forward takes, which decides what an AnyModule accepts
// NOLINTBEGIN(bugprone-macro-parentheses)
#define BRIM_LAYER(Name, Kind, Input)                                    \
  struct BRIM_API Name##Impl : Kind<Name##Impl, torch::nn::Name##Impl> { \
    using Kind::Kind;                                                    \
    at::Tensor forward(Input input) { return in_region(input); }         \
  };                                                                     \
  TORCH_MODULE(Name)
// NOLINTEND(bugprone-macro-parentheses)

/// A list of layers.
template <class... Impls>
struct Layers {};

}  // namespace brim::nn
