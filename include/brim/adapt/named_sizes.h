#pragma once

#include <ATen/core/Tensor.h>
#include <brim/export.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace brim {

/// An integer that `maximize` may lower until the call fits.
struct NamedSize {
  std::string name;
  std::int64_t maximum = 0;  ///< tried first
  std::int64_t quantum = 0;  ///< values above it are its multiples; 0: AdaptOptions::quantum
};

/// Sizes that shrink together: all have the same fraction of their maximum.
class SizeGroup {
 public:
  SizeGroup(std::string name, std::int64_t maximum, std::int64_t quantum = 0)
      : members_{{std::move(name), maximum, quantum}} {}
  SizeGroup(std::initializer_list<NamedSize> members) : members_(members) {}

  [[nodiscard]] const std::vector<NamedSize>& members() const noexcept { return members_; }

 private:
  std::vector<NamedSize> members_;
};

/// The sizes of one call of `maximize`, in the order in which they are lowered: each group goes
/// down to its floor before the next.
///
///     {{"batch_size", 512}, {"k", 64}}                         one after the other
///     {{{"rows", 4096, 32}, {"columns", 512}}, {"depth", 8}}   rows and columns together, then
///     depth
class BRIM_API NamedSizes {
 public:
  /// @throws c10::ValueError if there is none, or a name is there twice.
  NamedSizes(std::initializer_list<SizeGroup> groups);

  [[nodiscard]] std::span<const std::string> names() const noexcept { return names_; }
  [[nodiscard]] std::span<const std::int64_t> maxima() const noexcept { return maxima_; }
  [[nodiscard]] std::span<const std::int64_t> quanta() const noexcept { return quanta_; }
  /// Indices into the names.
  [[nodiscard]] std::span<const std::vector<std::size_t>> groups() const noexcept {
    return groups_;
  }
  /// All names, for messages.
  [[nodiscard]] std::string text() const;

 private:
  std::vector<std::string> names_;
  std::vector<std::int64_t> maxima_;
  std::vector<std::int64_t> quanta_;
  std::vector<std::vector<std::size_t>> groups_;
};

/// The values of one attempt of `maximize`. Valid while the attempt runs.
class BRIM_API Sizes {
 public:
  Sizes(std::span<const std::string> names, std::span<const std::int64_t> values)
      : names_(names), values_(values) {}

  /// @throws c10::ValueError if there is no such name.
  [[nodiscard]] std::int64_t operator[](std::string_view name) const;

  /// In the order of the names.
  [[nodiscard]] std::span<const std::int64_t> values() const noexcept { return values_; }

 private:
  std::span<const std::string> names_;
  std::span<const std::int64_t> values_;
};

/// The largest size that makes sense for work on `x`: its length, at least 1.
///
///     brim::maximize({{"batch_size", brim::infer(x)}}, …);
[[nodiscard]] inline std::int64_t infer(const at::Tensor& x) {
  return std::max<std::int64_t>(x.size(0), 1);
}
/// The same for a container.
template <class Container>
[[nodiscard]] std::int64_t infer(const Container& x) {
  return std::max<std::int64_t>(std::ssize(x), 1);
}

}  // namespace brim
