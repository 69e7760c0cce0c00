#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

// What an operator's autocast kernel does. Apart from torch's header, which pulls in all of ATen.

namespace brim::nn {

/// Autocast on `device` during one call. Below it autocast is off, as in torch's own kernels.
class Autocast {
 public:
  explicit Autocast(c10::DeviceType device);

  /// The low precision type that the user asked for.
  [[nodiscard]] at::ScalarType low() const { return low_; }

  /// Whether cast() changes the type of `tensor`.
  [[nodiscard]] bool changes(at::ScalarType to, const at::Tensor& tensor) const;

  /// `tensor` as `to` where autocast may change it, else itself. Part of the graph; torch keeps the
  /// copy of a trainable weight until the region of autocast ends.
  [[nodiscard]] at::Tensor cast(at::ScalarType to, const at::Tensor& tensor) const;
  [[nodiscard]] std::optional<at::Tensor> cast(at::ScalarType to,
                                               const std::optional<at::Tensor>& tensor) const;

  /// Options stay as they are.
  template <class Option>
  [[nodiscard]] Option cast(at::ScalarType /*to*/, Option option) const {
    return option;
  }

 private:
  c10::DeviceType device_;
  at::ScalarType low_;
  c10::impl::ExcludeDispatchKeyGuard off_;
};

/// What autocast does on a device at one moment, to be put in force again in backward.
struct AutocastState {
  /// The state of this moment.
  explicit AutocastState(c10::DeviceType of);

  c10::DeviceType device;
  bool enabled = false;
  at::ScalarType type = at::kFloat;

  bool operator==(const AutocastState&) const = default;
};

/// In force while this object lives. Casts are not cached: no region's end would clear them, and
/// those made without a graph would be used by operators that need one.
class AutocastAs {
 public:
  explicit AutocastAs(const AutocastState& state);
  AutocastAs(const AutocastAs&) = delete;
  AutocastAs& operator=(const AutocastAs&) = delete;
  ~AutocastAs();

 private:
  AutocastState before_;
  bool caches_before_;
  bool changes_;
};

}  // namespace brim::nn
