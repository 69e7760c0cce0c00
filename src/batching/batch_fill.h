#pragma once

#include <brim/batching/cost.h>
#include <brim/batching/sample_sizes.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace brim::batching::detail {

template <class T>
[[nodiscard]] T maximum_of(const Limit& limit) {
  if constexpr (std::is_same_v<T, double>) {
    return limit.real();
  } else {
    return limit.whole();
  }
}

/// How full a batch is under a sum of sizes.
template <class T>
class SumFill {
 public:
  explicit SumFill(T maximum) : maximum_(maximum) {}
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
  [[nodiscard]] double load() const {
    // A budget below 1 is 0 for whole sizes, and holds samples of size 0.
    return total_ > 0 ? static_cast<double>(total_) / static_cast<double>(maximum_) : 0.0;
  }

 private:
  T maximum_;
  T total_ = 0;
};

/// How full a batch is under a cost of its number of samples and its longest: such a cost says how
/// many samples go with a longest one, and that is asked only when a longer one comes.
template <class T>
class PaddedFill {
 public:
  explicit PaddedFill(const Limit& limit) : limit_(&limit) {}

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
    count_ = 0;
    longest_ = 0;
    cap_ = 0;
  }

  /// COUNT of samples, all of `longest`, that a batch may hold.
  [[nodiscard]] std::int64_t largest_count(T longest) const {
    switch (limit_->cost().kind()) {
      case Cost::Kind::count:
        return limit_->whole();
      case Cost::Kind::padded:
        return times_in(maximum_of<T>(*limit_), longest);
      case Cost::Kind::padded_squared:
        if constexpr (std::is_same_v<T, double>) {
          return times_in(limit_->real(), longest * longest);
        } else {
          // Exactly ⌊maximum / longest²⌋, and the square cannot overflow.
          return longest == 0 ? kUnlimited : times_in(limit_->whole() / longest, longest);
        }
      default:
        return limit_->cost().largest_count()(static_cast<double>(longest), limit_->real());
    }
  }

  [[nodiscard]] double load() const {
    const auto n = static_cast<double>(count_);
    const auto longest = static_cast<double>(longest_);
    switch (limit_->cost().kind()) {
      case Cost::Kind::count:
        return n / limit_->real();
      case Cost::Kind::padded:
        return n * longest / limit_->real();
      case Cost::Kind::padded_squared:
        return n * longest * longest / limit_->real();
      default:
        return limit_->cost().price()(count_, longest) / limit_->real();
    }
  }

 private:
  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

  static std::int64_t times_in(T maximum, T size) {
    if (size == 0) {
      return kUnlimited;
    }
    if constexpr (std::is_same_v<T, double>) {
      const double times = std::floor(maximum / size);
      if (!(times < 0x1p62)) {
        return kUnlimited;
      }
      // The quotient may be rounded up to the next whole number.
      return static_cast<std::int64_t>(times) - (times * size > maximum ? 1 : 0);
    } else {
      return maximum / size;
    }
  }

  const Limit* limit_;
  std::int64_t count_ = 0;
  T longest_ = 0;
  std::int64_t cap_ = 0;
};

/// How full a batch is under several budgets at once.
template <class T>
class MultiFill {
 public:
  explicit MultiFill(const Columns<T>& columns) {
    for (std::size_t c = 0; c < columns.size(); ++c) {
      if (columns[c].limit.cost().kind() == Cost::Kind::sum) {
        sums_.push_back({c, SumFill<T>(columns[c].limit)});
      } else {
        paddeds_.push_back({c, PaddedFill<T>(columns[c].limit)});
      }
    }
  }

  /// `sizes` has one size a column.
  [[nodiscard]] bool fits_alone(const T* sizes) const {
    return all_of([&](const auto& fill, T size) { return fill.fits_alone(size); }, sizes);
  }
  [[nodiscard]] bool fits(const T* sizes) const {
    return all_of([&](const auto& fill, T size) { return fill.fits(size); }, sizes);
  }
  void add(const T* sizes) {
    for (auto& [column, fill] : sums_) {
      fill.add(sizes[column]);
    }
    for (auto& [column, fill] : paddeds_) {
      fill.add(sizes[column]);
    }
  }
  void clear() {
    for (auto& entry : sums_) {
      entry.fill.clear();
    }
    for (auto& entry : paddeds_) {
      entry.fill.clear();
    }
  }
  /// Of the fullest.
  [[nodiscard]] double load() const {
    double result = 0.0;
    for (const auto& entry : sums_) {
      result = std::max(result, entry.fill.load());
    }
    for (const auto& entry : paddeds_) {
      result = std::max(result, entry.fill.load());
    }
    return result;
  }

 private:
  template <class Fill>
  struct Entry {
    std::size_t column;
    Fill fill;
  };

  template <class Test>
  bool all_of(Test test, const T* sizes) const {
    return std::all_of(sums_.begin(), sums_.end(),
                       [&](const auto& e) { return test(e.fill, sizes[e.column]); }) &&
           std::all_of(paddeds_.begin(), paddeds_.end(),
                       [&](const auto& e) { return test(e.fill, sizes[e.column]); });
  }

  std::vector<Entry<SumFill<T>>> sums_;
  std::vector<Entry<PaddedFill<T>>> paddeds_;
};

}  // namespace brim::batching::detail
