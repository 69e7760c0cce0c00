#pragma once

#include <brim/batching/balance.h>
#include <brim/batching/cost.h>
#include <brim/batching/sample_sizes.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <type_traits>
#include <variant>
#include <vector>

#include "check_argument.h"

namespace brim::batching::detail {

template <class T>
[[nodiscard]] T maximum_of(const Limit& limit) {
  if constexpr (std::is_same_v<T, double>) {
    return limit.real();
  } else {
    return limit.whole();
  }
}

__extension__ using Wide = __int128;

/// The cost of n samples padded to the longest, which must be proportional to n: the place for the
/// formula of a new cost. Number is double, or Wide so that products of whole sizes do not
/// overflow.
template <class Number>
[[nodiscard]] Number padded_cost(Cost::Kind kind, Number n, Number longest) {
  switch (kind) {
    case Cost::Kind::count:
      return n;
    case Cost::Kind::padded_squared:
      return n * longest * longest;
    case Cost::Kind::flops:
      return n * longest * (longest + kLinearFlops);
    case Cost::Kind::sum:     // of samples that are not padded: SumFill
    case Cost::Kind::custom:  // computed by its own function
    case Cost::Kind::joined:  // part of another column's cost
    case Cost::Kind::padded:
    case Cost::Kind::padded_product:
      break;
  }
  return n * longest;
}

/// How full a batch is under a sum of sizes.
template <class T>
class SumFill {
 public:
  explicit SumFill(const Limit& limit) : maximum_(maximum_of<T>(limit)) {}

  [[nodiscard]] bool fits_alone(T size) const { return size <= maximum_; }
  [[nodiscard]] bool fits(T size) const {
    if constexpr (std::is_same_v<T, double>) {
      return total_ + size <= maximum_;
    } else {
      return size <= maximum_ - total_;  // the sum itself could overflow
    }
  }
  void add(T size) { total_ += size; }
  void clear() { total_ = 0; }
  /// The share of the budget that is used.
  [[nodiscard]] double load() const {
    // A budget below 1 is 0 for whole sizes, and holds samples of size 0.
    return total_ > 0 ? static_cast<double>(total_) / static_cast<double>(maximum_) : 0.0;
  }

 private:
  T maximum_;
  T total_ = 0;
};

/// How many samples of which each costs this much stay within a maximum.
template <class Number, class T>
[[nodiscard]] std::int64_t count_within(Number each, T maximum) {
  constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
  if (each == 0) {
    return kUnlimited;
  }
  if constexpr (std::is_same_v<T, double>) {
    const double times = std::floor(maximum / each);
    if (!(times < 0x1p62)) {
      return kUnlimited;
    }
    // The quotient may be rounded up to the next whole number.
    return static_cast<std::int64_t>(times) - (times * each > maximum ? 1 : 0);
  } else {
    return each > maximum ? 0 : maximum / static_cast<std::int64_t>(each);
  }
}

/// How full a batch is under a cost of its number of samples and its longest sample.
template <class T>
class PaddedFill {
 public:
  /// Keeps a reference to the limit.
  explicit PaddedFill(const Limit& limit)
      : limit_(&limit), kind_(limit.cost().kind()), maximum_(maximum_of<T>(limit)) {}

  [[nodiscard]] bool fits_alone(T size) const { return largest_count(size) >= 1; }
  [[nodiscard]] bool fits(T size) const {
    return count_ < (size <= longest_ && count_ > 0 ? cap_ : largest_count(size));
  }
  void add(T size) {
    if (size > longest_ || count_ == 0) {
      longest_ = size;
      cap_ = largest_count(size);
    }
    ++count_;
  }
  void clear() {
    count_ = cap_ = 0;
    longest_ = 0;
  }

  /// The number of samples, all of size `longest`, that a batch may hold.
  [[nodiscard]] std::int64_t largest_count(T longest) const {
    if (kind_ == Cost::Kind::custom) {
      return limit_->cost().largest_count()(static_cast<double>(longest), limit_->real());
    }
    using Number = std::conditional_t<std::is_same_v<T, double>, double, Wide>;
    return count_within(padded_cost<Number>(kind_, 1, longest), maximum_);
  }

  /// The share of the budget that is used.
  [[nodiscard]] double load() const {
    const auto longest = static_cast<double>(longest_);
    const double price = kind_ == Cost::Kind::custom
                             ? limit_->cost().price()(count_, longest)
                             : padded_cost(kind_, static_cast<double>(count_), longest);
    return price / limit_->real();
  }

 private:
  const Limit* limit_;
  Cost::Kind kind_;
  T maximum_;
  std::int64_t count_ = 0;
  T longest_ = 0;
  std::int64_t cap_ = 0;  // largest_count(longest_), asked only when a longer sample comes
};

/// How full a batch is whose samples are padded in several sizes, to the longest of each, under one
/// cost of them all.
template <class T>
class JointFill {
 public:
  /// Keeps a reference to the limit.
  /// @param width the number of sizes of a sample.
  JointFill(const Limit& limit, std::size_t width)
      : limit_(&limit), kind_(limit.cost().kind()), maximum_(maximum_of<T>(limit)), width_(width) {
    brim::detail::check_argument(width <= Cost::kMostSizes, "a limit counts at most ",
                                 Cost::kMostSizes, " sizes of a sample, got ", width);
    brim::detail::check_argument(
        kind_ != Cost::Kind::sum && kind_ != Cost::Kind::count,
        "cost must depend on the longest sample to count several sizes against one "
        "max_total_size: \"padded\", \"padded_product\", \"padded_squared\", \"flops\", or a "
        "function of the number of samples and the longest of each size");
    brim::detail::check_argument(kind_ != Cost::Kind::custom || limit.cost().joint_count(),
                                 "cost takes one size of a sample, and samples have ", width,
                                 " for it");
  }

  /// `sizes` has one size per column.
  [[nodiscard]] bool fits_alone(const T* sizes) const { return largest_count(sizes) >= 1; }
  [[nodiscard]] bool fits(const T* sizes) const {
    if (count_ > 0 && within(sizes, longest_)) {
      return count_ < cap_;
    }
    widen(sizes);
    return count_ < widened_cap_;
  }
  void add(const T* sizes) {
    if (count_ == 0 || !within(sizes, longest_)) {
      widen(sizes);
      longest_ = widened_;
      cap_ = widened_cap_;
    }
    ++count_;
  }
  void clear() {
    count_ = cap_ = 0;
    longest_ = {};
  }

  /// The number of samples, all of these sizes, that a batch may hold.
  [[nodiscard]] std::int64_t largest_count(const T* longest) const {
    if (kind_ == Cost::Kind::custom) {
      const auto all = as_doubles(longest);
      return limit_->cost().joint_count()(std::span(all).first(width_), limit_->real());
    }
    return count_within(padded_cost<Number>(kind_, 1, combined(longest)), maximum_);
  }

  /// The share of the budget that is used.
  [[nodiscard]] double load() const {
    return count_ == 0 ? 0.0 : price(count_, longest_.data()) / limit_->real();
  }
  /// The share that this batch would use if none of its samples was padded, by what each costs.
  [[nodiscard]] double share_of(const T* sizes) const { return price(1, sizes) / limit_->real(); }
  /// The number of samples, times the share that each of the longest would use by itself.
  [[nodiscard]] double padded() const {
    return count_ == 0 ? 0.0 : static_cast<double>(count_) * share_of(longest_.data());
  }

 private:
  using Number = std::conditional_t<std::is_same_v<T, double>, double, Wide>;
  using Row = std::array<T, Cost::kMostSizes>;

  [[nodiscard]] bool within(const T* sizes, const Row& longest) const {
    return std::equal(sizes, sizes + width_, longest.begin(), std::less_equal<>());
  }

  // Remembers the longest with this sample, and how many of them fit: what fits is added next.
  void widen(const T* sizes) const {
    Row widened = longest_;
    for (std::size_t c = 0; c < width_; ++c) {
      widened[c] = count_ == 0 ? sizes[c] : std::max(longest_[c], sizes[c]);
    }
    if (widened_cap_ < 0 || widened != widened_) {
      widened_ = widened;
      widened_cap_ = largest_count(widened_.data());
    }
  }

  // What stands for the longest in the cost of one size: the sum of all, or their product. Whole
  // numbers stop at 2^63, which exceeds every budget, so that nothing overflows.
  [[nodiscard]] Number combined(const T* longest) const {
    const bool product = kind_ == Cost::Kind::padded_product;
    if (product && std::find(longest, longest + width_, T{0}) != longest + width_) {
      return 0;
    }
    Number result = product ? 1 : 0;
    for (std::size_t c = 0; c < width_; ++c) {
      const auto each = static_cast<Number>(longest[c]);
      result = product ? result * each : result + each;
      if constexpr (!std::is_same_v<T, double>) {
        result = std::min(result, Number{1} << 63U);
      }
    }
    return result;
  }

  [[nodiscard]] std::array<double, Cost::kMostSizes> as_doubles(const T* sizes) const {
    std::array<double, Cost::kMostSizes> result{};
    std::transform(sizes, sizes + width_, result.begin(),
                   [](T size) { return static_cast<double>(size); });
    return result;
  }

  [[nodiscard]] double price(std::int64_t count, const T* longest) const {
    const auto all = as_doubles(longest);
    if (kind_ == Cost::Kind::custom) {
      return limit_->cost().joint_price()(count, std::span(all).first(width_));
    }
    const auto number = static_cast<double>(combined(longest));
    return padded_cost(kind_, static_cast<double>(count), number);
  }

  const Limit* limit_;
  Cost::Kind kind_;
  T maximum_;
  std::size_t width_;
  std::int64_t count_ = 0;
  Row longest_{};
  std::int64_t cap_ = 0;  // largest_count(longest_)
  mutable Row widened_{};
  mutable std::int64_t widened_cap_ = -1;  // not asked for yet
};

/// The number of columns, from one on, that one limit counts.
template <class T>
[[nodiscard]] std::size_t joint_width(const Columns<T>& columns, std::size_t first) {
  std::size_t end = first + 1;
  while (end < columns.size() && columns[end].limit.cost().kind() == Cost::Kind::joined) {
    ++end;
  }
  return end - first;
}

/// Calls `work` with the kind of fill that the limit needs.
template <class T, class Work>
auto with_fill(const Limit& limit, const Work& work) {
  return limit.cost().kind() == Cost::Kind::sum ? work(SumFill<T>(limit))
                                                : work(PaddedFill<T>(limit));
}

template <class T>
[[nodiscard]] bool fits_alone(const Limit& limit, T size) {
  return with_fill<T>(limit, [&](const auto& fill) { return fill.fits_alone(size); });
}

/// The largest size of a sample that fits by itself.
template <class T>
[[nodiscard]] T largest_fitting_size(const Limit& limit) {
  if constexpr (std::is_same_v<T, double>) {
    return limit.largest_real_size();
  } else {
    return limit.largest_whole_size();
  }
}

/// @throws std::invalid_argument for a limit that counts several sizes, of which none has a largest
///     by itself.
inline void refuse_to_truncate(const Limit& limit) {
  brim::detail::check_argument(
      limit.cost().kind() != Cost::Kind::joined,
      "oversize \"truncate\" needs a max_total_size for each size of a sample: of several sizes "
      "under one, none has a largest that fits");
}

/// A size lowered to the largest that fits: whole ones stay whole, if that leaves anything.
template <class T>
[[nodiscard]] T truncated(T size, T largest) {
  if constexpr (std::is_same_v<T, double>) {
    if (size > largest && largest >= 1 && size == std::floor(size)) {
      return std::floor(largest);
    }
  }
  return std::min(size, largest);
}

/// Adds samples to a batch that has those from `begin` up to `end`: the first in any case, the next
/// ones as long as they fit. Returns the new end, at most `most`.
template <class Fill, class SizeOf>
std::size_t add_what_fits(Fill& fill, std::size_t begin, std::size_t end, std::size_t most,
                          const SizeOf& size_of) {
  while (end < most && (end == begin || fill.fits(size_of(end)))) {
    fill.add(size_of(end++));
  }
  return end;
}

/// Takes the last samples out of a batch that are beyond a multiple. Returns the new end.
template <class Fill, class SizeOf>
std::size_t keep_multiple(Fill& fill, std::size_t begin, std::size_t end, std::size_t multiple,
                          const SizeOf& size_of) {
  const std::size_t beyond = end - begin < multiple ? 0 : (end - begin) % multiple;
  if (beyond > 0) {
    fill.clear();
    for (std::size_t i = begin; i < end - beyond; ++i) {
      fill.add(size_of(i));
    }
  }
  return end - beyond;
}

template <class T>
[[nodiscard]] std::size_t multiple_argument(std::int64_t batch_multiple,
                                            const Columns<T>& columns) {
  brim::detail::check_argument(batch_multiple >= 1 && batch_multiple < std::int64_t{1} << 31,
                               "batch_multiple must be from 1 to 2^31 - 1, got ", batch_multiple);
  for (const Column<T>& column : columns) {
    brim::detail::check_argument(
        batch_multiple == 1 || column.limit.cost().kind() != Cost::Kind::count ||
            batch_multiple <= column.limit.whole(),
        "batch_multiple must not exceed the number of samples that a batch may have, ",
        column.limit.whole(), ", got ", batch_multiple);
  }
  return static_cast<std::size_t>(batch_multiple);
}

/// How full a batch is under several budgets at once.
template <class T>
class MultiFill {
 public:
  /// Keeps references to the limits.
  /// @throws std::invalid_argument for joined columns without one that they join.
  explicit MultiFill(const Columns<T>& columns) {
    for (std::size_t c = 0; c < columns.size();) {
      const Limit& limit = columns[c].limit;
      const std::size_t width = joint_width(columns, c);
      brim::detail::check_argument(limit.cost().kind() != Cost::Kind::joined,
                                   "the first column has no column before it to be joined with");
      if (width > 1) {
        parts_.push_back({JointFill<T>(limit, width), c});
      } else {
        with_fill<T>(limit, [&](const auto& fill) { parts_.push_back({fill, c}); });
      }
      c += width;
    }
  }

  /// `sizes` has one size per column.
  [[nodiscard]] bool fits_alone(const T* sizes) const {
    return all_of(sizes, [](const auto& fill, auto of) { return fill.fits_alone(of); });
  }
  [[nodiscard]] bool fits(const T* sizes) const {
    return all_of(sizes, [](const auto& fill, auto of) { return fill.fits(of); });
  }
  void add(const T* sizes) {
    for (Part& part : parts_) {
      std::visit([&](auto& fill) { fill.add(taken_by(fill, sizes + part.column)); }, part.fill);
    }
  }
  void clear() {
    for (Part& part : parts_) {
      std::visit([](auto& fill) { fill.clear(); }, part.fill);
    }
  }
  /// Of the fullest.
  [[nodiscard]] double load() const {
    double result = 0.0;
    for (const Part& part : parts_) {
      result =
          std::max(result, std::visit([](const auto& fill) { return fill.load(); }, part.fill));
    }
    return result;
  }
  /// How full the first budget is if that counts several sizes, else null.
  [[nodiscard]] const JointFill<T>* joint() const {
    return std::get_if<JointFill<T>>(&parts_.front().fill);
  }

 private:
  struct Part {
    std::variant<SumFill<T>, PaddedFill<T>, JointFill<T>> fill;
    std::size_t column;
  };

  template <class Fill>
  static auto taken_by(const Fill& /*fill*/, const T* sizes) {
    if constexpr (std::is_same_v<Fill, JointFill<T>>) {
      return sizes;
    } else {
      return *sizes;
    }
  }

  template <class Test>
  bool all_of(const T* sizes, const Test& test) const {
    return std::all_of(parts_.begin(), parts_.end(), [&](const Part& part) {
      return std::visit(
          [&](const auto& fill) { return test(fill, taken_by(fill, sizes + part.column)); },
          part.fill);
    });
  }

  std::vector<Part> parts_;
};

/// Calls `work(fill, at)` with the kind of fill that the columns need; `at(sizes, i)` is what the
/// fill takes for sample i of `sizes`, which are sample after sample with all its columns.
template <class T, class Work>
auto with_fill(const Columns<T>& columns, const Work& work) {
  if (columns.size() > 1) {
    return work(MultiFill<T>(columns), [width = columns.size()](const T* sizes, std::size_t i) {
      return sizes + i * width;
    });
  }
  return with_fill<T>(columns[0].limit, [&](const auto& fill) {
    return work(fill, [](const T* sizes, std::size_t i) { return sizes[i]; });
  });
}

}  // namespace brim::batching::detail
