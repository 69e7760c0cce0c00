#pragma once

#include <brim/batching/cost.h>
#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ranges>
#include <span>
#include <type_traits>
#include <variant>
#include <vector>

namespace brim::batching {

/// Sizes of all samples by index, in the width they are stored in: 100 million lengths of 16 bits
/// need no copy in 64 bits. T, std::int64_t or double, is the type of calculations. The caller owns
/// the sizes and keeps them, unchanged, for as long as anything made of them lives.
template <class T>
class SizeSpan {
  template <class... Stored>
  using Spans = std::variant<std::span<const Stored>...>;
  using Any = std::conditional_t<std::is_same_v<T, double>, Spans<double, float>,
                                 Spans<std::int64_t, std::int32_t, std::int16_t, std::int8_t,
                                       std::uint32_t, std::uint16_t, std::uint8_t>>;

  template <class Range>
  using SpanOf = std::span<const std::ranges::range_value_t<const Range>>;

 public:
  SizeSpan() = default;

  /// Of a vector, an array or a span of one of the numbers above.
  template <std::ranges::contiguous_range Range>
    requires std::is_constructible_v<Any, std::in_place_type_t<SpanOf<Range>>, SpanOf<Range>>
  SizeSpan(const Range& sizes)  // NOLINT(google-explicit-constructor): as std::span
      : any_(SpanOf<Range>(std::ranges::data(sizes), std::ranges::size(sizes))) {}

  [[nodiscard]] std::size_t size() const {
    return visit([](auto sizes) { return sizes.size(); });
  }
  /// Slow: loops belong inside visit.
  [[nodiscard]] T operator[](std::size_t index) const {
    return visit([&](auto sizes) { return static_cast<T>(sizes[index]); });
  }
  /// Calls `work` with the std::span of what is stored.
  template <class Work>
  decltype(auto) visit(const Work& work) const {
    return std::visit(work, any_);
  }
  /// Null if they are not stored as T.
  [[nodiscard]] const T* data() const {
    const auto* same = std::get_if<std::span<const T>>(&any_);
    return same == nullptr ? nullptr : same->data();
  }

 private:
  Any any_;
};

template <class T>
struct SizeSummary;

/// Sizes, and the budget that they count against.
template <class T>
struct Column {
  SizeSpan<T> sizes;
  Limit limit;
  /// What a pass over the sizes would find, if that is known (SampleIndex).
  std::shared_ptr<const SizeSummary<T>> summary = nullptr;
};

/// One column per budget. Several budgets hold at once: nodes and edges of graphs, tokens and
/// samples. All columns have the same length.
template <class T>
using Columns = std::vector<Column<T>>;

/// Whole sizes are added up exactly, real ones in double precision and in the order of the batch.
using AnyColumns = std::variant<Columns<std::int64_t>, Columns<double>>;

/// Rejects sizes that no batch could be made of.
/// @throws std::invalid_argument naming the index of a size that is negative, NaN or infinite; if
///     there is no column, or they differ in length, or there are 2³² samples or more.
BRIM_API void check_sizes(const AnyColumns& columns);

/// A number made of all sizes and their order, the same in whatever width they are stored: tells
/// whether two data sets are the same without keeping either.
template <class T>
[[nodiscard]] BRIM_API std::uint64_t fingerprint(const SizeSpan<T>& sizes);

}  // namespace brim::batching
