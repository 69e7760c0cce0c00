#pragma once

#include <brim/batching/balance.h>
#include <brim/batching/cost.h>
#include <brim/batching/sample_sizes.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
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
    case Cost::Kind::padded:
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
    constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
    using Number = std::conditional_t<std::is_same_v<T, double>, double, Wide>;
    const auto each = padded_cost<Number>(kind_, 1, longest);
    if (each == 0) {
      return kUnlimited;
    }
    if constexpr (std::is_same_v<T, double>) {
      const double times = std::floor(maximum_ / each);
      if (!(times < 0x1p62)) {
        return kUnlimited;
      }
      // The quotient may be rounded up to the next whole number.
      return static_cast<std::int64_t>(times) - (times * each > maximum_ ? 1 : 0);
    } else {
      return each > maximum_ ? 0 : maximum_ / static_cast<std::int64_t>(each);
    }
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
  explicit MultiFill(const Columns<T>& columns) {
    for (const Column<T>& column : columns) {
      with_fill<T>(column.limit, [&](const auto& fill) { fills_.emplace_back(fill); });
    }
  }

  /// `sizes` has one size per column.
  [[nodiscard]] bool fits_alone(const T* sizes) const {
    return all_of([&](const auto& fill) { return fill.fits_alone(*sizes++); });
  }
  [[nodiscard]] bool fits(const T* sizes) const {
    return all_of([&](const auto& fill) { return fill.fits(*sizes++); });
  }
  void add(const T* sizes) {
    for (auto& any : fills_) {
      std::visit([&](auto& fill) { fill.add(*sizes++); }, any);
    }
  }
  void clear() {
    for (auto& any : fills_) {
      std::visit([](auto& fill) { fill.clear(); }, any);
    }
  }
  /// Of the fullest.
  [[nodiscard]] double load() const {
    double result = 0.0;
    for (const auto& any : fills_) {
      result = std::max(result, std::visit([](const auto& fill) { return fill.load(); }, any));
    }
    return result;
  }

 private:
  template <class Test>
  bool all_of(const Test& test) const {
    return std::all_of(fills_.begin(), fills_.end(),
                       [&](const auto& any) { return std::visit(test, any); });
  }

  std::vector<std::variant<SumFill<T>, PaddedFill<T>>> fills_;
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
