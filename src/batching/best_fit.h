#pragma once

#include <brim/export.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace brim::batching::detail {

/// Sorts positions by size, the largest size first; equal sizes keep their order. A radix sort: its
/// time grows with the number of sizes only. Keeps its workspace between calls.
///
/// T is std::int64_t or double. Threads: one at a time for each object.
class BRIM_API DescendingSorter {
 public:
  /// Writes the positions 0 … sizes.size() - 1 to `order`, as many as there are sizes.
  /// The sizes must not be negative or NaN: if any is, one of them comes first, and the rest of the
  /// order means nothing.
  /// @throws std::invalid_argument from 2^32 - 1 sizes on, for which positions are too narrow.
  template <class T>
  void sort(std::span<const T> sizes, std::vector<std::uint32_t>& order);

 private:
  std::vector<std::uint32_t> counts_;   // of each digit of each pass
  std::vector<std::uint64_t> entries_;  // key in the high half, position in the low half
  std::vector<std::uint64_t> spare_;
};

/// DescendingSorter::sort with a workspace for this one call.
template <class T>
BRIM_API void sort_descending(std::span<const T> sizes, std::vector<std::uint32_t>& order);

/// A set of small integers that finds the next larger member in a few steps: a tree of 64-bit words
/// in which a bit says that the word below it is not zero.
class CellSet {
 public:
  static constexpr std::uint32_t kSize = 1U << 16;  ///< members are smaller than this

  void clear() noexcept {
    leaves_.fill(0);
    nodes_.fill(0);
  }
  void insert(std::uint32_t cell) noexcept {
    leaves_[cell >> 6] |= bit(cell);
    nodes_[cell >> 12] |= bit(cell >> 6);
  }
  void erase(std::uint32_t cell) noexcept {
    leaves_[cell >> 6] &= ~bit(cell);
    if (leaves_[cell >> 6] == 0) {
      nodes_[cell >> 12] &= ~bit(cell >> 6);
    }
  }

  [[nodiscard]] bool contains(std::uint32_t cell) const noexcept {
    return (leaves_[cell >> 6] & bit(cell)) != 0;
  }

  /// The smallest member that is no smaller than `cell`; kSize if there is none.
  [[nodiscard]] std::uint32_t find(std::uint32_t cell) const noexcept {
    if (cell >= kSize) {
      return kSize;
    }
    std::uint32_t leaf = cell >> 6;
    if (const std::uint64_t rest = leaves_[leaf] & (~std::uint64_t{0} << (cell & 63)); rest != 0) {
      return (leaf << 6) + lowest(rest);
    }
    if (++leaf == kLeaves) {
      return kSize;
    }
    // The sixteen nodes are two cache lines: a third level would save nothing.
    std::uint32_t node = leaf >> 6;
    std::uint64_t rest = nodes_[node] & (~std::uint64_t{0} << (leaf & 63));
    while (rest == 0) {
      if (++node == kNodes) {
        return kSize;
      }
      rest = nodes_[node];
    }
    leaf = (node << 6) + lowest(rest);
    return (leaf << 6) + lowest(leaves_[leaf]);
  }

 private:
  static constexpr std::uint32_t kLeaves = kSize >> 6;
  static constexpr std::uint32_t kNodes = kLeaves >> 6;

  static std::uint64_t bit(std::uint32_t index) noexcept {
    return std::uint64_t{1} << (index & 63);
  }
  static std::uint32_t lowest(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(std::countr_zero(word));
  }

  std::array<std::uint64_t, kLeaves> leaves_{};
  std::array<std::uint64_t, kNodes> nodes_{};
};

/// How much of the order that the samples come in is kept. Best fit decreasing puts samples of like
/// size together, and the same ones each time. Where the order is random, most samples may as well
/// be packed as they come: a few that are left for best fit fill the gaps.
struct Mixing {
  std::size_t in_order = 0;  ///< COUNT of samples, the first, that fill bin after bin as they come
  /// Of the others, which come first is decided by sizes that differ from the real ones by up to an
  /// eighth, at random; 0: by the real ones.
  std::uint64_t seed = 0;
};

/// Best fit decreasing: the longest sample first, each into the fullest bin that still has room for
/// it. Keeps its workspace between calls, so packing window after window allocates nothing.
///
/// T is std::int64_t or double. The result depends on the arguments alone, never on the platform or
/// on earlier calls. Equal sizes are placed in the order of their positions; of bins that are
/// equally full, the one filled last is taken (which of them it is changes no bin's fill).
///
/// With an integer capacity below 2^16 this is best fit to the letter. Above it, and for double,
/// bins are told apart by their room to 1 part in 1024, and of those in the same part only the
/// latest 4 are compared. So a sample may miss the best bin for one with more room only where the
/// two differ by so little, or where the best one's room is so close to the sample's size.
///
/// Threads: one at a time for each object.
///
///     BestFitPacker<std::int64_t> packer;
///     packer.pack(sizes, 16384);
///     std::uint32_t begin = 0;
///     for (const std::uint32_t end : packer.ends()) {
///       use_batch(packer.members().subspan(begin, end - begin));
///       begin = end;
///     }
template <class T>
class BRIM_API BestFitPacker {
 public:
  /// Packs `sizes` into bins whose sum never exceeds `capacity`; for double, the sum as it comes
  /// out when added up in the order of members(). Each position goes into one bin; sizes of zero
  /// all go into one bin. No sizes: no bins.
  /// The results are valid until the next call.
  /// @throws std::invalid_argument where a size is negative, NaN or over the capacity, and from
  ///         2^32 - 1 sizes on. The object can be used again.
  void pack(std::span<const T> sizes, T capacity, const Mixing& mixing = {});

  /// Positions of `sizes`: bin b holds those from ends()[b - 1] (0 for the first bin) to ends()[b].
  [[nodiscard]] std::span<const std::uint32_t> members() const noexcept { return members_; }
  [[nodiscard]] std::span<const std::uint32_t> ends() const noexcept { return ends_; }
  /// The sum of each bin's sizes.
  [[nodiscard]] std::span<const T> totals() const noexcept { return totals_; }

 private:
  // A number of neighbours in order_ that went into one bin together.
  struct Placement {
    std::uint32_t bin;
    std::uint32_t count;
  };

  void put_in_order(std::span<const T> sizes, const Mixing& mixing);
  template <class CellOf>
  void place(std::span<const T> sizes, T capacity, std::uint32_t in_order, const CellOf& cell_of);
  template <class CellOf>
  void fill_as_they_come(std::span<const T> sizes, T capacity, std::uint32_t in_order, T smallest,
                         const CellOf& cell_of);
  template <class CellOf>
  void keep_open(std::uint32_t bin, T room, T smallest, const CellOf& cell_of);
  template <class CellOf>
  std::uint32_t take_bin(std::uint32_t cell, T size, T capacity);
  void collect_members();

  std::vector<std::uint32_t> members_;
  std::vector<std::uint32_t> ends_;
  std::vector<T> totals_;

  DescendingSorter sorter_;
  std::vector<std::uint32_t> order_;
  std::vector<std::uint32_t> sorted_;  // those that are not taken as they come
  std::vector<T> keys_;
  std::vector<Placement> placements_;
  // The bins with room, in one list for each cell. A cell is a range of room; heads_ means
  // something for the members of cells_ only, so that no call has to clear it.
  CellSet cells_;
  std::vector<std::uint32_t> heads_;
  std::vector<std::uint32_t> next_;
};

extern template class BestFitPacker<std::int64_t>;
extern template class BestFitPacker<double>;

}  // namespace brim::batching::detail
