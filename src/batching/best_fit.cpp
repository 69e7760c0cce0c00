#include "batching/best_fit.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "batching/permutation.h"

namespace brim::batching::detail {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

// ---------------------------------------------------------------- sorting

// A digit of 11 bits: its counters and its open output lines stay in the caches nearest to a core.
constexpr int kDigitBits = 11;
// One pass over a wide digit beats two, where there are enough sizes to pay for its counters.
constexpr int kWidestDigitBits = 16;
// So many bits of a key are sorted by radix; what they do not tell apart is compared.
constexpr int kKeyBits = 32;
constexpr std::size_t kFewSizes = 64;

// Unsigned integers in the same order as the sizes. Negative ones and NaN come out above all
// others.
std::uint64_t bits_of(std::int64_t size) { return static_cast<std::uint64_t>(size); }
std::uint64_t bits_of(double size) {
  return std::bit_cast<std::uint64_t>(size + 0.0);  // + 0.0: no negative zero
}

// What a radix sort has to look at: the bits in which the sizes differ.
struct Keys {
  std::uint64_t largest = 0;
  int shift = 0;      // bits at the bottom of a key that are left out
  int width = 0;      // bits of a key
  bool exact = true;  // the bits left out are zero in every key

  template <class T>
  explicit Keys(std::span<const T> sizes) {
    std::uint64_t smallest = ~std::uint64_t{0};
    std::uint64_t any = 0;
    for (const T size : sizes) {
      const std::uint64_t bits = bits_of(size);
      largest = std::max(largest, bits);
      smallest = std::min(smallest, bits);
      any |= bits;
    }
    // Whole numbers held as double, and multiples of a page, end in zeros.
    const int zeros = any == 0 ? 0 : std::countr_zero(any);
    const auto needed = static_cast<int>(std::bit_width(largest - smallest));
    shift = std::max(zeros, needed - kKeyBits);
    width = std::max(0, needed - shift);
    exact = shift == zeros;
  }

  // Small for a large size, because the order is descending.
  template <class T>
  [[nodiscard]] std::uint64_t operator()(T size) const {
    return (largest - bits_of(size)) >> shift;
  }
};

void counts_to_starts(std::span<std::uint32_t> counts) {
  std::uint32_t start = 0;
  for (std::uint32_t& count : counts) {
    start += std::exchange(count, start);
  }
}

// One pass of the radix sort: from any source of entries to any sink.
template <class Source, class Sink>
void scatter(std::size_t count, std::uint32_t* starts, int digit_shift, std::uint64_t mask,
             const Source& source, const Sink& sink) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t entry = source(i);
    sink(starts[(entry >> digit_shift) & mask]++, entry);
  }
}

}  // namespace

template <class T>
void DescendingSorter::sort(std::span<const T> sizes, std::vector<std::uint32_t>& order) {
  const std::size_t count = sizes.size();
  if (count >= kNone) {
    throw std::invalid_argument("sizes has " + std::to_string(count) +
                                " elements; at most 4294967294 are allowed");
  }
  order.resize(count);
  const auto before = [sizes](std::uint32_t left, std::uint32_t right) {
    const std::uint64_t a = bits_of(sizes[left]);
    const std::uint64_t b = bits_of(sizes[right]);
    return a != b ? a > b : left < right;
  };
  if (count <= kFewSizes) {
    for (std::uint32_t i = 0; i < count; ++i) {
      order[i] = i;
    }
    std::sort(order.begin(), order.end(), before);
    return;
  }

  const Keys keys(sizes);
  const bool one_pass = keys.width <= kDigitBits || (keys.width <= kWidestDigitBits &&
                                                     count >= std::size_t{1} << (keys.width - 1));
  const int passes = one_pass ? 1 : (keys.width + kDigitBits - 1) / kDigitBits;
  const int digit_bits = (keys.width + passes - 1) / passes;
  const std::size_t digits = std::size_t{1} << digit_bits;
  const std::uint64_t mask = digits - 1;

  counts_.assign(digits * static_cast<std::size_t>(passes), 0);
  for (const T size : sizes) {
    std::uint64_t key = keys(size);
    std::uint32_t* counts = counts_.data();
    for (int pass = 0; pass < passes; ++pass, key >>= digit_bits, counts += digits) {
      ++counts[key & mask];
    }
  }
  for (std::size_t pass = 0; pass < counts_.size(); pass += digits) {
    counts_to_starts(std::span(counts_).subspan(pass, digits));
  }

  const auto from_sizes = [&](std::size_t i) { return keys(sizes[i]) << 32 | i; };
  const auto to_order = [&order](std::uint32_t to, std::uint64_t entry) {
    order[to] = static_cast<std::uint32_t>(entry);
  };
  std::uint32_t* starts = counts_.data();
  if (passes == 1) {
    scatter(count, starts, 32, mask, from_sizes, to_order);
  } else {
    entries_.resize(count);
    const auto to_entries = [this](std::uint32_t to, std::uint64_t entry) { entries_[to] = entry; };
    scatter(count, starts, 32, mask, from_sizes, to_entries);
    const auto from_entries = [this](std::size_t i) { return entries_[i]; };
    for (int pass = 1; pass + 1 < passes; ++pass) {
      spare_.resize(count);
      const auto to_spare = [this](std::uint32_t to, std::uint64_t entry) { spare_[to] = entry; };
      starts += digits;
      scatter(count, starts, 32 + pass * digit_bits, mask, from_entries, to_spare);
      entries_.swap(spare_);
    }
    starts += digits;
    scatter(count, starts, 32 + (passes - 1) * digit_bits, mask, from_entries, to_order);
  }

  if (!keys.exact) {
    for (std::size_t begin = 0, end = 0; begin < count; begin = end) {
      const std::uint64_t key = keys(sizes[order[begin]]);
      bool sorted = true;
      for (end = begin + 1; end < count && keys(sizes[order[end]]) == key; ++end) {
        sorted = sorted && before(order[end - 1], order[end]);
      }
      if (!sorted) {
        std::sort(order.begin() + static_cast<std::ptrdiff_t>(begin),
                  order.begin() + static_cast<std::ptrdiff_t>(end), before);
      }
    }
  }
}

template <class T>
void sort_descending(std::span<const T> sizes, std::vector<std::uint32_t>& order) {
  DescendingSorter().sort(sizes, order);
}

// ---------------------------------------------------------------- packing

namespace {

// Of the bins in one cell, so many are compared: more would cost time without bound where many
// bins are left with almost the same room.
constexpr int kBinsCompared = 4;

// A cell for each room: for capacities below CellSet::kSize.
struct ExactCells {
  static constexpr bool kExact = true;
  std::uint32_t operator()(std::int64_t room) const { return static_cast<std::uint32_t>(room); }
};

// 1024 cells for each power of two, the topmost for the capacity. A floating-point number's leading
// bits are just that. Equal steps would need no such trick, but bins are closed by their last few
// samples, and it is for small rooms that a small difference counts.
struct FloatingCells {
  static constexpr bool kExact = false;
  static constexpr int kDropped = 52 - 10;

  template <class T>
  explicit FloatingCells(T capacity) : top(leading(capacity)) {}

  template <class T>
  std::uint32_t operator()(T room) const {
    const std::uint64_t below = top - leading(room);
    return below < CellSet::kSize ? CellSet::kSize - 1 - static_cast<std::uint32_t>(below) : 0;
  }

  template <class T>
  static std::uint64_t leading(T room) {
    return bits_of(static_cast<double>(room)) >> kDropped;
  }

  std::uint64_t top;
};

// Never true where the sum, as computed, is over the capacity, or the room, as computed, too small.
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

// The fullest of the cell's bins that has room for `size`, taken off its list; kNone if none has.
template <class T>
template <class CellOf>
std::uint32_t BestFitPacker<T>::take_bin(std::uint32_t cell, T size, T capacity) {
  std::uint32_t* best = &heads_[cell];
  if constexpr (!CellOf::kExact) {
    std::uint32_t* link = best;
    best = nullptr;
    for (int i = 0; i < kBinsCompared && *link != kNone; ++i, link = &next_[*link]) {
      const T total = totals_[*link];
      if (fits(total, size, capacity) && (best == nullptr || total > totals_[*best])) {
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

// A bin that has room for more.
template <class T>
template <class CellOf>
void BestFitPacker<T>::keep_open(std::uint32_t bin, T room, T smallest, const CellOf& cell_of) {
  if (room >= smallest) {
    const std::uint32_t to = cell_of(room);
    next_[bin] = cells_.contains(to) ? heads_[to] : kNone;
    heads_[to] = bin;
    cells_.insert(to);
  }
}

template <class T>
template <class CellOf>
void BestFitPacker<T>::fill_as_they_come(std::span<const T> sizes, T capacity,
                                         std::uint32_t in_order, T smallest,
                                         const CellOf& cell_of) {
  for (std::uint32_t position = 0; position < in_order;) {
    const auto bin = static_cast<std::uint32_t>(totals_.size());
    const std::uint32_t begin = position;
    T total = 0;
    do {
      total += sizes[position++];
    } while (position < in_order && fits(total, sizes[position], capacity));
    totals_.push_back(total);
    next_.push_back(kNone);
    placements_.push_back({bin, position - begin});
    keep_open(bin, capacity - total, smallest, cell_of);
  }
}

template <class T>
template <class CellOf>
void BestFitPacker<T>::place(std::span<const T> sizes, T capacity, std::uint32_t in_order,
                             const CellOf& cell_of) {
  const auto count = static_cast<std::uint32_t>(sizes.size());
  const T smallest = *std::min_element(sizes.begin() + in_order, sizes.end());
  fill_as_they_come(sizes, capacity, in_order, smallest, cell_of);
  for (std::uint32_t position = in_order; position < count;) {
    const T size = sizes[order_[position]];
    std::uint32_t end = position + 1;
    while (end < count && sizes[order_[end]] == size) {
      ++end;
    }
    // Bins in the size's own cell may have too little room. Looked through once, it is done with
    // for all samples of this size.
    std::uint32_t first_cell = cell_of(size);
    while (position < end) {
      const std::uint32_t cell = cells_.find(first_cell);
      std::uint32_t bin = 0;
      if (cell < CellSet::kSize) {
        bin = take_bin<CellOf>(cell, size, capacity);
        if (!CellOf::kExact && bin == kNone) {
          first_cell = cell + 1;
          continue;
        }
      } else {
        bin = static_cast<std::uint32_t>(totals_.size());
        totals_.push_back(T{0});
        next_.push_back(kNone);
      }
      // As long as it has room, the bin just filled is the fullest that has.
      const std::uint32_t begin = position;
      T total = totals_[bin];
      do {
        total += size;
        ++position;
      } while (position < end && fits(total, size, capacity));
      totals_[bin] = total;
      placements_.push_back({bin, position - begin});
      keep_open(bin, capacity - total, smallest, cell_of);
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
void BestFitPacker<T>::put_in_order(std::span<const T> sizes, const Mixing& mixing) {
  std::span<const T> others = sizes.subspan(mixing.in_order);
  if (mixing.seed != 0) {
    keys_.resize(others.size());
    for (std::size_t i = 0; i < others.size(); ++i) {
      keys_[i] = noisy(others[i], mix(mixing.seed, i));
    }
    others = keys_;
  }
  if (mixing.in_order == 0) {
    sorter_.sort(others, order_);
    return;
  }
  sorter_.sort(others, sorted_);
  order_.resize(sizes.size());
  std::iota(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(mixing.in_order), 0U);
  const auto first = static_cast<std::uint32_t>(mixing.in_order);
  std::transform(sorted_.begin(), sorted_.end(),
                 order_.begin() + static_cast<std::ptrdiff_t>(mixing.in_order),
                 [first](std::uint32_t place) { return first + place; });
}

template <class T>
void BestFitPacker<T>::pack(std::span<const T> sizes, T capacity, const Mixing& mixing) {
  members_.clear();
  ends_.clear();
  totals_.clear();
  if (sizes.empty()) {
    return;
  }
  const auto wrong = std::find_if(sizes.begin(), sizes.end(), [capacity](T size) {
    return !(size >= T{0} && size <= capacity);
  });
  if (wrong != sizes.end()) {
    std::ostringstream message;
    message << "sizes[" << wrong - sizes.begin() << "]=" << *wrong
            << " is not allowed; it must be from 0 to the capacity " << capacity;
    throw std::invalid_argument(message.str());
  }
  const Mixing mixed{std::min(mixing.in_order, sizes.size() - 1), mixing.seed};
  const auto in_order = static_cast<std::uint32_t>(mixed.in_order);
  put_in_order(sizes, mixed);
  placements_.clear();
  placements_.reserve(sizes.size());
  next_.clear();
  heads_.resize(CellSet::kSize);
  cells_.clear();
  if constexpr (std::is_same_v<T, std::int64_t>) {
    if (capacity < std::int64_t{CellSet::kSize}) {
      place(sizes, capacity, in_order, ExactCells());
    } else {
      place(sizes, capacity, in_order, FloatingCells(capacity));
    }
  } else {
    place(sizes, capacity, in_order, FloatingCells(capacity));
  }
  collect_members();
}

template BRIM_API void sort_descending(std::span<const std::int64_t>, std::vector<std::uint32_t>&);
template BRIM_API void sort_descending(std::span<const double>, std::vector<std::uint32_t>&);
template BRIM_API void DescendingSorter::sort(std::span<const std::int64_t>,
                                              std::vector<std::uint32_t>&);
template BRIM_API void DescendingSorter::sort(std::span<const double>, std::vector<std::uint32_t>&);
template class BestFitPacker<std::int64_t>;
template class BestFitPacker<double>;

}  // namespace brim::batching::detail
