#include "batching/best_fit.h"

#include <brim/batching/interruption.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <type_traits>

#include "batching/permutation.h"

namespace brim::batching::detail {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

// How many bins of one cell are compared: without a limit, many bins with almost the same room
// would make packing slow.
constexpr int kBinsCompared = 4;

// The number of placements between two checks for an interruption: some milliseconds.
constexpr std::size_t kBetweenChecks = std::size_t{1} << 16;

// The leading bits of a floating-point number: 1024 steps for each power of two. Equal steps would
// be simpler, but bins are closed by their last few samples, and there small differences count.
template <class T>
std::uint64_t leading_bits(T room) {
  return std::bit_cast<std::uint64_t>(static_cast<double>(room)) >> (52 - 10);
}

// Never true if the sum, as computed, is over the capacity, or the room, as computed, too small.
bool fits(double total, double size, double capacity) {
  return total + size <= capacity && size <= capacity - total;
}
bool fits(std::int64_t total, std::int64_t size, std::int64_t capacity) {
  return size <= capacity - total;  // the sum itself could overflow
}

// A little less than the size, at random.
std::int64_t noisy(std::int64_t size, std::uint64_t random) {
  return size - (size >> 7) * static_cast<std::int64_t>(random >> 60);
}
double noisy(double size, std::uint64_t random) {
  return size - size / 128 * static_cast<double>(random >> 60);
}

}  // namespace

template <class T>
std::uint32_t BestFitPacker<T>::cell_of(T room) const {
  if (exact_) {
    return static_cast<std::uint32_t>(room);
  }
  const std::uint64_t below = top_ - leading_bits(room);
  return below < CellSet::kSize ? CellSet::kSize - 1 - static_cast<std::uint32_t>(below) : 0;
}

// The fullest of the cell's bins that has room for `size`, taken off its list; kNone if none has.
template <class T>
std::uint32_t BestFitPacker<T>::take_bin(std::uint32_t cell, T size) {
  std::uint32_t* best = &heads_[cell];
  if (!exact_) {
    std::uint32_t* link = best;
    best = nullptr;
    for (int i = 0; i < kBinsCompared && *link != kNone; ++i, link = &next_[*link]) {
      const T total = totals_[*link];
      if (fits(total, size, capacity_) && (best == nullptr || total > totals_[*best])) {
        best = link;
      }
    }
    if (best == nullptr) {
      return kNone;
    }
  }
  const std::uint32_t bin = *best;
  *best = next_[bin];
  if (heads_[cell] == kNone) {
    cells_.erase(cell);
  }
  return bin;
}

template <class T>
std::uint32_t BestFitPacker<T>::new_bin() {
  totals_.push_back(T{0});
  next_.push_back(kNone);
  return static_cast<std::uint32_t>(totals_.size() - 1);
}

// The next `count` samples of order_ go into the bin, which stays open if it has room for more.
template <class T>
void BestFitPacker<T>::add_to(std::uint32_t bin, T total, std::uint32_t count) {
  totals_[bin] = total;
  placements_.push_back({bin, count});
  if (placements_.size() % kBetweenChecks == 0) {
    check_interruption();
  }
  const T room = capacity_ - total;
  if (room >= smallest_) {
    const std::uint32_t to = cell_of(room);
    next_[bin] = cells_.contains(to) ? heads_[to] : kNone;
    heads_[to] = bin;
    cells_.insert(to);
  }
}

template <class T>
void BestFitPacker<T>::fill_as_they_come(std::span<const T> sizes, std::uint32_t in_order) {
  for (std::uint32_t position = 0; position < in_order;) {
    const std::uint32_t begin = position;
    T total = 0;
    do {
      total += sizes[position++];
    } while (position < in_order && fits(total, sizes[position], capacity_));
    add_to(new_bin(), total, position - begin);
  }
}

template <class T>
void BestFitPacker<T>::fill_best(std::span<const T> sizes, std::uint32_t in_order) {
  const auto count = static_cast<std::uint32_t>(sizes.size());
  for (std::uint32_t position = in_order; position < count;) {
    const T size = sizes[order_[position]];
    std::uint32_t end = position + 1;
    while (end < count && sizes[order_[end]] == size) {
      ++end;
    }
    // Bins in the size's own cell may have too little room. Once looked through, the cell is done
    // with for all samples of this size.
    std::uint32_t first_cell = cell_of(size);
    while (position < end) {
      const std::uint32_t cell = cells_.find(first_cell);
      const std::uint32_t bin = cell < CellSet::kSize ? take_bin(cell, size) : new_bin();
      if (bin == kNone) {
        first_cell = cell + 1;
        continue;
      }
      // As long as it has room, the bin just filled is the fullest that has.
      const std::uint32_t begin = position;
      T total = totals_[bin];
      do {
        total += size;
        ++position;
      } while (position < end && fits(total, size, capacity_));
      add_to(bin, total, position - begin);
    }
  }
}

template <class T>
void BestFitPacker<T>::collect_members() {
  ends_.assign(totals_.size(), 0);
  for (const Placement& placement : placements_) {
    ends_[placement.bin] += placement.count;
  }
  counts_to_starts(ends_);
  members_.resize(order_.size());
  const std::uint32_t* from = order_.data();
  for (const Placement& placement : placements_) {
    std::uint32_t to = ends_[placement.bin];
    ends_[placement.bin] = to + placement.count;
    for (const std::uint32_t* const stop = from + placement.count; from != stop;) {
      members_[to++] = *from++;
    }
  }
}

// As they come, then from the largest to the smallest.
template <class T>
void BestFitPacker<T>::put_in_order(std::span<const T> sizes, std::size_t in_order,
                                    std::uint64_t seed) {
  if (seed == 0) {
    sort_(sizes, order_, in_order);
    return;
  }
  keys_.resize(sizes.size());
  for (std::size_t i = in_order; i < sizes.size(); ++i) {
    keys_[i] = noisy(sizes[i], mix(seed, i - in_order));
  }
  sort_(std::span<const T>(keys_), order_, in_order);
}

template <class T>
void BestFitPacker<T>::pack(std::span<const T> sizes, T capacity, const Mixing& mixing) {
  members_.clear();
  ends_.clear();
  totals_.clear();
  if (sizes.empty()) {
    return;
  }
  const std::size_t in_order = std::min(mixing.in_order, sizes.size() - 1);
  put_in_order(sizes, in_order, mixing.seed);
  capacity_ = capacity;
  const auto rest = sizes.subspan(in_order);
  smallest_ = *std::min_element(rest.begin(), rest.end());
  exact_ = std::is_same_v<T, std::int64_t> && capacity < T{CellSet::kSize};
  top_ = leading_bits(capacity);
  placements_.clear();
  placements_.reserve(sizes.size());
  next_.clear();
  heads_.resize(CellSet::kSize);
  cells_.clear();
  fill_as_they_come(sizes, static_cast<std::uint32_t>(in_order));
  fill_best(sizes, static_cast<std::uint32_t>(in_order));
  collect_members();
}

template class BestFitPacker<std::int64_t>;
template class BestFitPacker<double>;

}  // namespace brim::batching::detail
