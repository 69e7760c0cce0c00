#include <ATen/NestedTensorImpl.h>
#include <brim/adapt/call_key.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace brim {

void CallKey::add_word(std::uint64_t word) noexcept {
  // The finaliser of splitmix64.
  std::uint64_t x = (value_ + 0x9E3779B97F4A7C15U) ^ word;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  value_ = x ^ (x >> 31U);
}

void CallKey::add(std::string_view text) {
  add_word(text.size());
  while (!text.empty()) {
    std::uint64_t word = 0;
    const std::size_t length = std::min(text.size(), sizeof(word));
    std::memcpy(&word, text.data(), length);
    add_word(word);
    text.remove_prefix(length);
  }
}

void CallKey::add(const at::Tensor& tensor, std::int64_t ignored_dim) {
  if (!tensor.defined()) {
    add_word(~std::uint64_t{0});
    return;
  }
  add(static_cast<int>(tensor.scalar_type()));
  add(static_cast<int>(tensor.device().type()));
  add(tensor.device().index());
  add(static_cast<int>(tensor.layout()));
  add(tensor.dim());
  const auto* nested =
      dynamic_cast<const at::native::NestedTensorImpl*>(tensor.unsafeGetTensorImpl());
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const std::optional<std::int64_t> size =
        nested != nullptr ? nested->opt_size(dim) : tensor.sym_size(dim).maybe_as_int();
    add(dim == ignored_dim ? 0 : size.value_or(-1));
  }
}

void CallKey::add_kind(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    add_word(~std::uint64_t{0});
    return;
  }
  add(static_cast<int>(tensor.scalar_type()));
  add(static_cast<int>(tensor.device().type()));
  add(tensor.dim());
}

}  // namespace brim
