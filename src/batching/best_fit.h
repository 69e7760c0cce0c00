#pragma once

#include <brim/export.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "batching/descending_sort.h"

namespace brim::batching::detail {

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

/// How much of the order of the samples is kept. Best fit decreasing puts samples of like size
/// together, and the same ones each time. If the order is random, most samples may as well be
/// packed as they come: a few that are left for best fit fill the gaps.
struct Mixing {
  std::size_t in_order = 0;  ///< this many samples, the first, fill bin after bin as they come
  /// The others are ordered by sizes that differ from the real ones by up to an eighth, at random;
  /// if 0, by the real ones.
  std::uint64_t seed = 0;
};

/// Best fit decreasing: the longest sample first, each into the fullest bin that still has room for
/// it. Keeps its workspace between calls, so packing window after window allocates nothing.
///
/// T is std::int64_t or double. The result depends on the arguments alone, never on the platform or
/// on earlier calls. Equal sizes are placed in the order of their positions; of bins that are
/// equally full, the one filled last is taken (which of them it is changes no bin's fill).
///
/// With an integer capacity below 2^16 the result is exact. Above it, and for double, the room of a
/// bin is known to 1 part in 1024, and of bins with the same room only the latest 4 are compared.
/// So a sample may miss the best bin only for one with about as much room, or if the best bin's
/// room is very close to the sample's size.
///
/// For one thread.
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
  /// Packs `sizes`, which are from 0 to `capacity`, into bins whose sum never exceeds it; for
  /// double, the sum as added up in the order of members(). Each position goes into one bin; sizes
  /// of zero all go into one bin. The results are valid until the next call.
  /// @throws std::invalid_argument from 2^32 - 1 sizes on.
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

  void put_in_order(std::span<const T> sizes, std::size_t in_order, std::uint64_t seed);
  void fill_as_they_come(std::span<const T> sizes, std::uint32_t in_order);
  void fill_best(std::span<const T> sizes, std::uint32_t in_order);
  [[nodiscard]] std::uint32_t cell_of(T room) const;
  [[nodiscard]] std::uint32_t take_bin(std::uint32_t cell, T size);
  [[nodiscard]] std::uint32_t new_bin();
  void add_to(std::uint32_t bin, T total, std::uint32_t count);
  void collect_members();

  std::vector<std::uint32_t> members_;
  std::vector<std::uint32_t> ends_;
  std::vector<T> totals_;

  T capacity_ = 0;
  T smallest_ = 0;      // of the sizes that are not taken as they come
  bool exact_ = false;  // each room has a cell of its own
  std::uint64_t top_ = 0;
  DescendingSort sort_;
  std::vector<std::uint32_t> order_;
  std::vector<T> keys_;
  std::vector<Placement> placements_;
  // The bins with room, in one list per cell. A cell is a range of room; heads_ is valid for
  // members of cells_ only, so that no call has to clear it.
  CellSet cells_;
  std::vector<std::uint32_t> heads_;
  std::vector<std::uint32_t> next_;
};

extern template class BestFitPacker<std::int64_t>;
extern template class BestFitPacker<double>;

}  // namespace brim::batching::detail
