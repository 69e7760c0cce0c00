#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <tuple>
#include <vector>

namespace brim::batching::detail {

/// Each item to the part that costs least so far, by a tournament: every match of two parts keeps
/// the one that costs more, and the least of all is outside. Its next matches are known before they
/// are decided, which a heap's are not.
class LeastLoaded {
  static constexpr std::uint64_t kNoLoad = ~std::uint64_t{0};
  static constexpr std::uint64_t kOneItem = std::uint64_t{1} << 32;

 public:
  explicit LeastLoaded(std::span<const double> loads)
      : losers_(std::bit_ceil(loads.size())), most_items_(std::numeric_limits<std::size_t>::max()) {
    const std::size_t leaves = losers_.size();
    std::vector<Part> winners(2 * leaves);
    for (std::size_t p = 0; p < leaves; ++p) {
      winners[leaves + p] =
          p < loads.size() ? Part{std::bit_cast<std::uint64_t>(loads[p]), p} : Part::none(p);
    }
    for (std::size_t match = leaves - 1; match > 0; --match) {
      losers_[match] = std::max(winners[2 * match], winners[2 * match + 1]);
      winners[match] = std::min(winners[2 * match], winners[2 * match + 1]);
    }
    least_ = winners[1];
  }

  /// Of this many items, each part gets as many as any other, or one more or less.
  void keep_counts_equal(std::size_t items, std::size_t parts) {
    most_items_ = items / parts;
    larger_parts_ = items % parts;
  }

  [[nodiscard]] double least() const { return least_.load(); }

  std::uint32_t add(double cost) {
    while (is_full(least_)) {
      full_.push_back(least_.load());
      play(Part::none(least_.index()));
    }
    larger_parts_ -= least_.count() == most_items_ ? 1 : 0;
    const std::uint32_t part = least_.index();
    play(least_.with(cost));
    return part;
  }

  [[nodiscard]] double largest() const {
    double result = least_.is_none() ? 0.0 : least_.load();
    for (const Part& part : losers_) {
      result = std::max(result, part.is_none() ? 0.0 : part.load());
    }
    return full_.empty() ? result : std::max(result, std::ranges::max(full_));
  }

 private:
  /// In the order of load and count: of two parts that cost the same, the one with fewer items is
  /// less, because items may cost nothing. The bits of numbers that are not negative are in their
  /// order.
  struct Part {
    std::uint64_t load_bits = kNoLoad;
    std::uint64_t count_and_index = 0;

    /// Greater than all others.
    static Part none(std::size_t index) { return {kNoLoad, index}; }

    [[nodiscard]] bool is_none() const { return load_bits == kNoLoad; }
    [[nodiscard]] double load() const { return std::bit_cast<double>(load_bits); }
    [[nodiscard]] std::size_t count() const { return count_and_index >> 32; }
    [[nodiscard]] std::uint32_t index() const {
      return static_cast<std::uint32_t>(count_and_index);
    }
    [[nodiscard]] Part with(double cost) const {
      return {std::bit_cast<std::uint64_t>(load() + cost), count_and_index + kOneItem};
    }

    friend bool operator<(const Part& a, const Part& b) {
      return std::tie(a.load_bits, a.count_and_index) < std::tie(b.load_bits, b.count_and_index);
    }
  };

  [[nodiscard]] bool is_full(const Part& part) const {
    return part.count() > most_items_ || (part.count() == most_items_ && larger_parts_ == 0);
  }

  // In place of the least part, plays its matches again.
  void play(Part part) {
    for (std::size_t match = (losers_.size() + part.index()) / 2; match > 0; match /= 2) {
      Part& other = losers_[match];
      // Without a branch, which could not be predicted.
      const int less = static_cast<int>(other.load_bits < part.load_bits) |
                       (static_cast<int>(other.load_bits == part.load_bits) &
                        static_cast<int>(other.count_and_index < part.count_and_index));
      const std::uint64_t all_bits_if_less = -static_cast<std::uint64_t>(less);
      const auto swap_if_less = [&](std::uint64_t& a, std::uint64_t& b) {
        const std::uint64_t different = (a ^ b) & all_bits_if_less;
        a ^= different;
        b ^= different;
      };
      swap_if_less(part.load_bits, other.load_bits);
      swap_if_less(part.count_and_index, other.count_and_index);
    }
    least_ = part;
  }

  std::vector<Part> losers_;  // of each match; match m is between the winners of 2 m and 2 m + 1
  Part least_;
  std::vector<double> full_;
  std::size_t most_items_;        // the number of items that every part may get
  std::size_t larger_parts_ = 0;  // the number of parts that may get one more
};

}  // namespace brim::batching::detail
