#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "nn/autograd/autocast.h"
#include "nn/autograd/known.h"

// How operators are defined and called: one static object per operator, in its file of ops/.
// libbrim_cuda registers its own kernels when it is loaded (cuda/kernels.cpp).

namespace brim::nn {

/// Defines an operator and registers its kernels; removes them at the end of the process. Does
/// nothing in a second copy of libbrim: torch would throw from that library's initialisers, which
/// ends the process.
class Registration {
 public:
  /// @param schema of the operator, without "brim::"
  Registration(const std::string& schema, const std::vector<at::Tag>& tags);
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  ~Registration() = default;

  [[nodiscard]] const char* name() const { return name_.c_str(); }

  template <class Kernel>
  void add(c10::DispatchKey key, Kernel* kernel) {
    if (kernel != nullptr && is_first_copy_) {
      library_.impl(name_.c_str(), torch::dispatch(key, kernel));
    }
  }

 private:
  torch::Library library_;
  const std::string name_;
  bool is_first_copy_;
};

/// @throws c10::Error if it is not registered.
[[nodiscard]] c10::OperatorHandle find_operator(const char* name);

/// Loads libbrim_cuda for the first tensor on CUDA. @returns whether it did
[[nodiscard]] bool loads_cuda_library(const at::Tensor& tensor);

template <class Option>
[[nodiscard]] constexpr bool loads_cuda_library(const Option& /*option*/) {
  return false;
}

/// An operator that is called through torch's dispatcher.
/// @tparam Known one of its kernels. It identifies the operator: no other may have the same.
template <auto Known, class Pointer = decltype(Known)>
class Dispatched;

template <auto Known, class Result, class... Args>
class Dispatched<Known, Result (*)(Args...)> : public Registration {
 public:
  using Kernel = Result (*)(Args...);

  /// @param kernels may be null
  explicit Dispatched(const std::string& schema, const std::vector<at::Tag>& tags,
                      std::initializer_list<std::pair<c10::DispatchKey, Kernel>> kernels = {})
      : Registration(schema, tags) {
    operator_name = name();
    for (const auto& [key, kernel] : kernels) {
      add(key, kernel);
    }
  }

  Result operator()(Args... args) const { return call(args...); }

  static Result call(Args... args) {
    static const auto op = find_operator(operator_name).typed<Result(Args...)>();
    return op.call(args...);
  }

 private:
  static inline const char* operator_name = nullptr;
};

/// An operator that a layer or its node calls. torch.compile takes it as a whole.
///
///     const Operator<pack_bits_anywhere> kPackBits(
///         "pack_bits(Tensor mask) -> Tensor", {.cpu = pack_bits_cpu, .meta = pack_bits_meta});
///     at::Tensor bits = kPackBits(mask);
///
/// @tparam Anywhere the kernel for devices without one of their own, made of ATen operators. It
///         identifies the operator.
template <auto Anywhere, class Pointer = decltype(Anywhere)>
class Operator;

template <auto Anywhere, class Result, class... Args>
class Operator<Anywhere, Result (*)(Args...)> : public Dispatched<Anywhere> {
 public:
  using Kernel = Result (*)(Args...);

  struct Kernels {
    Kernel cpu = nullptr;
    Kernel meta = nullptr;
    Kernel autograd = nullptr;
  };

  explicit Operator(const std::string& schema, const Kernels& kernels = {},
                    const std::vector<at::Tag>& tags = {})
      : Dispatched<Anywhere>(schema, tags,
                             {{c10::DispatchKey::CompositeExplicitAutograd, &anywhere},
                              {c10::DispatchKey::CPU, kernels.cpu},
                              {c10::DispatchKey::Meta, kernels.meta},
                              {c10::DispatchKey::Autograd, kernels.autograd}}) {}

 private:
  /// On CUDA the first call loads the library, which may bring a kernel for this operator.
  static Result anywhere(Args... args) {
    return (loads_cuda_library(args) || ...) ? Dispatched<Anywhere>::call(args...)
                                             : Anywhere(args...);
  }
};

/// What autocast does with the tensors of a layer.
enum class CastTo {
  nothing,
  float32,
  float32_inside,  // float32, but the layer casts its input: its last argument tells it to
  float32_in_3d,   // float32 on the CPU if the second argument has a number for three dimensions
  low,             // the low precision type that the user asked for
};

/// The tag of a layer that keeps less than torch.compile would: its operator is part of the graph.
/// For layers without it, torch.compile gets torch's operators and decides what is kept.
inline constexpr at::Tag kInGraphs = at::Tag::pt2_compliant_tag;

/// Whether torch has an autocast rule for its operator of the same name.
[[nodiscard]] bool torch_casts(const char* name, c10::DispatchKey autocast_key);

/// The operator of a layer. Tensors that brim does not know (see known.h) get torch's own operator;
/// so does everything under vmap, because torch knows how to batch its own operators.
///
///     const LayerOperator<pad_autograd, torch_pad> kPad(
///         "pad(Tensor input, int[] padding, str mode) -> Tensor");
///     at::Tensor padded = kPad(input, padding, mode);
///
/// Autocast casts on the devices where torch casts its operator of the same name. With
/// CastTo::low, a layer whose arguments begin with (input, weight, bias) and end with
/// (parameter, recompute, runs_again) is told what the weight was cast from. It keeps that, and
/// casts it again in backward. With CastTo::float32_inside a layer keeps its input as it came.
///
/// @tparam Ours the kernel for autograd
/// @tparam Torchs torch's operator with the arguments of ours. It identifies the operator.
/// @tparam Below what runs below autograd, for tensors that brim knows
template <auto Ours, auto Torchs, CastTo Cast = CastTo::nothing, auto Below = Torchs,
          class Pointer = decltype(Torchs)>
class LayerOperator;

template <auto Ours, auto Torchs, CastTo Cast, auto Below, class Result, class... Args>
class LayerOperator<Ours, Torchs, Cast, Below, Result (*)(Args...)> : public Dispatched<Torchs> {
 public:
  explicit LayerOperator(const std::string& schema, const std::vector<at::Tag>& tags = {})
      : Dispatched<Torchs>(schema, tags,
                           {{Key::Autograd, kWithFallback<Ours, Torchs>},
                            {Key::CompositeExplicitAutograd, kWithFallback<Below, Torchs>},
                            // A kernel for all backends does not serve nested tensors.
                            {Key::CompositeImplicitAutogradNestedTensor, Torchs},
                            {Key::FuncTorchBatched, Torchs}}) {
    if (std::ranges::count(tags, at::Tag::nondeterministic_seeded) != 0) {
      // torch decides what is random under vmap, also for input that is not batched.
      this->add(Key::FuncTorchVmapMode, Torchs);
    }
    if constexpr (Cast == CastTo::float32_in_3d) {
      this->add(Key::AutocastCPU, &autocast<at::kCPU>);
    } else if constexpr (Cast != CastTo::nothing) {
      add_autocast<at::kCPU>(Key::AutocastCPU);
      add_autocast<at::kCUDA>(Key::AutocastCUDA);
    }
  }

 private:
  using Key = c10::DispatchKey;

  /// The place of `parameter`; 0 for none.
  static constexpr std::size_t kParameter =
      Cast == CastTo::low && sizeof...(Args) >= 6 ? sizeof...(Args) - 3 : 0;

  template <c10::DeviceType Device>
  void add_autocast(Key key) {
    if (kParameter != 0 || torch_casts(this->name(), key)) {
      this->add(key, &autocast<Device>);
    }
  }

  template <c10::DeviceType Device>
  static Result autocast(Args... args) {
    const Autocast autocast(Device);
    if constexpr (Cast == CastTo::float32_in_3d) {
      if (std::get<1>(std::tie(args...)).size() != 3) {
        return Dispatched<Torchs>::call(args...);
      }
    }
    const at::ScalarType type = Cast == CastTo::low ? autocast.low() : at::kFloat;
    const at::Tensor& input = std::get<0>(std::tie(args...));
    const bool inside = Cast == CastTo::float32_inside && autocast.changes(type, input);
    const auto cast = [&](const auto& arg) -> std::decay_t<decltype(arg)> {
      const bool is_input = static_cast<const void*>(&arg) == &input;
      return is_input && inside ? arg : autocast.cast(type, arg);
    };
    std::tuple<std::decay_t<Args>...> given(cast(args)...);
    if constexpr (Cast == CastTo::float32_inside) {
      std::get<sizeof...(Args) - 1>(given) = inside;
    }
    if constexpr (kParameter != 0) {
      const at::Tensor& weight = std::get<1>(std::tie(args...));
      // A weight that was computed for this call lives no longer than its copy.
      if (weight.is_leaf() && !std::get<1>(given).is_same(weight)) {
        std::get<kParameter>(given) = weight;
      }
    }
    return std::apply(Dispatched<Torchs>::call, given);
  }
};

}  // namespace brim::nn
