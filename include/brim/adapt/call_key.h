#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace brim {

/// Makes the key under which a SizeMemory keeps the sizes of one kind of call, from whatever
/// decides how much memory the call takes. Equal in every process, as a key in a file must be.
class BRIM_API CallKey {
 public:
  static constexpr std::int64_t kNoDim = -1;

  /// @param salt tells functions apart that share one memory.
  explicit CallKey(std::uint64_t salt = 0) : value_(salt) {}

  /// Shape, dtype, layout and device. A dimension without a length (the ragged one of a nested
  /// tensor, a symbol of a traced one) counts as such, and `ignored_dim` does not count.
  void add(const at::Tensor& tensor, std::int64_t ignored_dim = kNoDim);
  void add(std::string_view text);
  /// Dtype, kind of device and number of dimensions: what tensors of all lengths have in common.
  void add_kind(const at::Tensor& tensor);
  template <std::integral Number>
  void add(Number number) {
    add_word(static_cast<std::uint64_t>(number));
  }

  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

 private:
  void add_word(std::uint64_t word) noexcept;

  std::uint64_t value_;
};

/// The key of a call with these arguments: tensors by shape, dtype, layout and device, integers and
/// texts by value.
///
///     brim::batch(512, work, {.memory = &sizes, .key = brim::call_key(x, y, "cosine")});
template <class... Arguments>
[[nodiscard]] std::uint64_t call_key(const Arguments&... arguments) {
  CallKey key;
  (key.add(arguments), ...);
  return key.value();
}

/// The kind of a call with these arguments, for AdaptOptions::kind: as call_key, but tensors of all
/// lengths are of one kind.
template <class... Arguments>
[[nodiscard]] std::uint64_t call_kind(const Arguments&... arguments) {
  CallKey key;
  const auto add = [&](const auto& argument) {
    if constexpr (std::is_convertible_v<decltype(argument), const at::Tensor&>) {
      key.add_kind(argument);
    } else {
      key.add(argument);
    }
  };
  key.add(std::string_view("kind"));
  (add(arguments), ...);
  return key.value();
}

}  // namespace brim
