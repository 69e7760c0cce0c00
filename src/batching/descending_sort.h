#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace brim::batching::detail {

/// Sorts positions by size, the largest first; equal sizes keep their order. A radix sort, several
/// times as fast as std::sort for many sizes. Keeps its workspace between calls.
///
/// T is std::int64_t, double or std::uint64_t. For one thread.
class BRIM_API DescendingSort {
 public:
  /// Writes the positions 0 … sizes.size() - 1 to `order`; the first `in_order` stay where they
  /// are. The other sizes must not be negative or NaN.
  /// @throws std::invalid_argument from 2^32 - 1 sizes on, for which positions are too narrow.
  template <class T>
  void operator()(std::span<const T> sizes, std::vector<std::uint32_t>& order,
                  std::size_t in_order = 0);

 private:
  struct Entry {
    std::uint32_t key;  // the first bits of the size, inverted
    std::uint32_t position;
  };

  std::vector<std::uint32_t> starts_;  // of each digit of each pass
  std::vector<Entry> entries_;
  std::vector<Entry> spare_;
};

/// Replaces counts by where each begins if they lie one after the other.
inline void counts_to_starts(std::span<std::uint32_t> counts) {
  std::uint32_t start = 0;
  for (std::uint32_t& count : counts) {
    const std::uint32_t own = count;
    count = start;
    start += own;
  }
}

}  // namespace brim::batching::detail
