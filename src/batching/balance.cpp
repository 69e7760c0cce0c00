#include <brim/batching/balance.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "batching/descending_sort.h"
#include "check_argument.h"

namespace brim::batching {
namespace {

using brim::detail::check_argument;

// Within this share of the bound, two divisions are equally good.
constexpr double kTolerance = 1e-9;
constexpr std::int64_t kMostParts = std::int64_t{1} << 24;
constexpr std::size_t kMostItems = std::size_t{1} << 31;
// COUNT of items that differencing gets after LPT has placed the others: at least this many, so
// that what LPT leaves uneven is evened out, and some for each part.
constexpr std::size_t kLastItems = 4096;
constexpr std::size_t kLastItemsPerPart = 32;

/// The part of each item, by its place in the order of descending costs, and the largest load.
struct Division {
  std::vector<std::uint32_t> part;
  double largest = 0.0;
};

/// Each item to the part that costs least so far.
class LeastLoaded {
 public:
  LeastLoaded(std::size_t parts, std::size_t items, bool equal_count)
      : loads_(parts),
        floor_(equal_count ? items / parts : items),
        larger_parts_(equal_count ? items % parts : 0) {
    for (std::size_t p = 0; p < parts; ++p) {
      loads_[p].part = static_cast<std::uint32_t>(p);
    }
  }

  std::uint32_t add(double cost) {
    while (is_full(loads_[0])) {
      full_.push_back(loads_[0]);
      loads_[0] = loads_.back();
      loads_.pop_back();
      sink();
    }
    Load& least = loads_[0];
    larger_parts_ -= least.count == floor_ ? 1 : 0;
    const std::uint32_t part = least.part;
    least.load += cost;
    least.count += 1;
    sink();
    return part;
  }

  /// All parts, in no order.
  [[nodiscard]] std::vector<std::pair<double, std::uint32_t>> loads() const {
    std::vector<std::pair<double, std::uint32_t>> result;
    for (const auto* some : {&loads_, &full_}) {
      for (const Load& load : *some) {
        result.emplace_back(load.load, load.part);
      }
    }
    return result;
  }

 private:
  struct Load {
    double load = 0.0;
    std::size_t count = 0;
    std::uint32_t part = 0;

    // Of two parts that cost the same, the one with fewer items: items may cost nothing.
    friend bool operator<(const Load& a, const Load& b) {
      return a.load != b.load ? a.load < b.load : a.count < b.count;
    }
  };

  [[nodiscard]] bool is_full(const Load& load) const {
    return load.count > floor_ || (load.count == floor_ && larger_parts_ == 0);
  }

  // Moves the first load of the heap down to its place.
  void sink() {
    const Load moved = loads_[0];
    std::size_t hole = 0;
    for (std::size_t child = 1; child < loads_.size(); child = 2 * hole + 1) {
      if (child + 1 < loads_.size() && loads_[child + 1] < loads_[child]) {
        ++child;
      }
      if (!(loads_[child] < moved)) {
        break;
      }
      loads_[hole] = loads_[child];
      hole = child;
    }
    loads_[hole] = moved;
  }

  std::vector<Load> loads_;  // a heap, the least first
  std::vector<Load> full_;
  std::size_t floor_;         // COUNT of items that every part may get
  std::size_t larger_parts_;  // COUNT of parts that may get one more than floor_
};

/// Largest differencing: of all partial divisions, the two with the largest difference between
/// their parts are merged, the costliest part of one with the cheapest of the other, until one
/// division is left.
class Differencing {
 public:
  Differencing(std::size_t parts, std::size_t items) : parts_(parts), next_(items, kNone) {}

  /// A part of a partial division: its cost, and its items as a linked list.
  struct Slot {
    double load;
    std::uint32_t first;
    std::uint32_t last;

    friend bool operator<(const Slot& a, const Slot& b) {  // the costliest first
      return a.load != b.load ? a.load > b.load : a.first < b.first;
    }
  };
  /// Parts in descending order of their cost; empty ones are not stored.
  using Slots = std::vector<Slot>;

  void add(Slots slots) {
    const double difference = difference_of(slots);
    heap_.push_back({difference, added_++, std::move(slots)});
    std::push_heap(heap_.begin(), heap_.end());
  }

  /// Merges b into a.
  void merge(Slots& a, Slots& b) {
    if (a.size() < b.size()) {
      a.swap(b);
    }
    const std::size_t apart = std::min(b.size(), parts_ - a.size());  // that meet empty parts
    for (std::size_t j = apart; j < b.size(); ++j) {
      join(a[parts_ - 1 - j], b[j]);
    }
    a.insert(a.end(), b.begin(), b.begin() + static_cast<std::ptrdiff_t>(apart));
    if (a.size() > kFewParts) {
      std::sort(a.begin(), a.end());
    } else {
      for (std::size_t i = 1; i < a.size(); ++i) {
        rise(a, i);
      }
    }
  }

  /// Merges what was added with single items, whose costs descend: item i has `costs[i]`.
  Slots run(std::span<const double> costs) {
    singles_ = costs;
    while (true) {
      State a = take();
      if (singles_.empty() && heap_.empty() && !held_) {
        return std::move(a.slots);
      }
      if (single_is_next()) {
        merge_single(a.slots);
      } else {
        State b = take();
        merge(a.slots, b.slots);
      }
      if (held_) {
        heap_.push_back(std::move(*held_));
        std::push_heap(heap_.begin(), heap_.end());
      }
      held_ = State{difference_of(a.slots), added_++, std::move(a.slots)};
    }
  }

  /// Calls `place(item)` for each item of a part.
  template <class Place>
  void for_each(const Slot& slot, const Place& place) const {
    for (std::uint32_t item = slot.first; item != kNone; item = next_[item]) {
      place(item);
    }
  }

 private:
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
  static constexpr std::size_t kFewParts = 24;  // up to which sorting by insertion is faster

  struct State {
    double difference;
    std::size_t number;  // of equal differences, the latest division is the next
    Slots slots;

    friend bool operator<(const State& a, const State& b) {
      return a.difference != b.difference ? a.difference < b.difference : a.number < b.number;
    }
  };

  [[nodiscard]] double difference_of(const Slots& slots) const {
    return slots.front().load - (slots.size() == parts_ ? slots.back().load : 0.0);
  }

  void join(Slot& slot, const Slot& other) {
    slot.load += other.load;
    next_[slot.last] = other.first;
    slot.last = other.last;
  }

  // Moves a slot that may be too far back to its place.
  static void rise(Slots& slots, std::size_t i) {
    const Slot moved = slots[i];
    for (; i > 0 && moved < slots[i - 1]; --i) {
      slots[i] = slots[i - 1];
    }
    slots[i] = moved;
  }

  [[nodiscard]] bool single_is_next() const {
    return !singles_.empty() && (heap_.empty() || heap_.front().difference < singles_.front()) &&
           (!held_ || held_->difference < singles_.front());
  }

  Slot take_single() {
    const Slot single{singles_.front(), next_single_, next_single_};
    singles_ = singles_.subspan(1);
    ++next_single_;
    return single;
  }

  void merge_single(Slots& slots) {
    if (slots.size() < parts_) {
      slots.push_back(take_single());
    } else {
      join(slots.back(), take_single());
    }
    rise(slots, slots.size() - 1);
  }

  // The division with the largest difference. The last one merged is held beside the heap: with
  // fewer items than parts it is the next to be taken.
  State take() {
    if (single_is_next()) {
      const Slot single = take_single();
      return {single.load, added_++, {single}};
    }
    if (held_ && (heap_.empty() || held_->difference >= heap_.front().difference)) {
      State result = std::move(*held_);
      held_.reset();
      return result;
    }
    std::pop_heap(heap_.begin(), heap_.end());
    State result = std::move(heap_.back());
    heap_.pop_back();
    return result;
  }

  std::size_t parts_;
  std::vector<std::uint32_t> next_;
  std::vector<State> heap_;
  std::optional<State> held_;
  std::span<const double> singles_;
  std::uint32_t next_single_ = 0;
  std::size_t added_ = 0;
};

/// All ways to divide the costs, which descend.
class Divider {
 public:
  Divider(std::span<const double> costs, std::size_t parts, bool equal_count)
      : costs_(costs), parts_(parts), equal_count_(equal_count) {
    const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
    const bool whole = total < 0x1p53 && std::all_of(
                                             costs.begin(), costs.end(),
                                             [](double cost) { return cost == std::floor(cost); });
    const double mean = total / static_cast<double>(parts);
    bound_ = std::max(costs.front(), whole ? std::ceil(mean) : mean) * (1 + kTolerance);
  }

  Division best() {
    std::size_t first = costs_.size() - std::min(costs_.size() / 4,
                                                 std::max(kLastItems, kLastItemsPerPart * parts_));
    first -= equal_count_ ? first % parts_ : 0;
    Division best = least_loaded(first);
    for (const std::size_t placed : {first, std::size_t{0}}) {
      if (best.largest > bound_ && placed < costs_.size()) {
        keep_better(best,
                    equal_count_ ? difference_equal(placed) : difference_any(best.part, placed));
      }
    }
    return best;
  }

 private:
  static void keep_better(Division& best, Division other) {
    if (other.largest < best.largest) {
      best = std::move(other);
    }
  }

  Division least_loaded(std::size_t first_items) {
    LeastLoaded parts(parts_, costs_.size(), equal_count_);
    Division result{std::vector<std::uint32_t>(costs_.size())};
    for (std::size_t i = 0; i < costs_.size(); ++i) {
      if (i == first_items) {
        loads_of_first_ = parts.loads();
      }
      result.part[i] = parts.add(costs_[i]);
    }
    for (const auto& [load, part] : parts.loads()) {
      result.largest = std::max(result.largest, load);
    }
    return result;
  }

  // The first items stay in the parts of LPT, each of which counts as one item.
  [[nodiscard]] Division difference_any(const std::vector<std::uint32_t>& least_loaded,
                                        std::size_t first_items) const {
    const std::size_t last = costs_.size() - first_items;
    Differencing differencing(parts_, last + parts_);
    if (first_items > 0) {
      Differencing::Slots first;
      for (const auto& [load, part] : loads_of_first_) {
        const auto item = static_cast<std::uint32_t>(last + part);
        first.push_back({load, item, item});
      }
      std::sort(first.begin(), first.end());
      differencing.add(std::move(first));
    }
    const auto slots = differencing.run(costs_.subspan(first_items));
    Division result{std::vector<std::uint32_t>(costs_.size()), slots.front().load};
    std::vector<std::uint32_t> renamed(parts_);
    for (std::size_t p = 0; p < slots.size(); ++p) {
      differencing.for_each(slots[p], [&](std::uint32_t item) {
        (item < last ? result.part[first_items + item] : renamed[item - last]) =
            static_cast<std::uint32_t>(p);
      });
    }
    for (std::size_t i = 0; i < first_items; ++i) {
      result.part[i] = renamed[least_loaded[i]];
    }
    return result;
  }

  // As many items as there are parts begin as one division: each part gets one of them. Those of
  // the first items are merged one after the other, the others by their difference.
  [[nodiscard]] Division difference_equal(std::size_t first_items) const {
    Differencing differencing(parts_, costs_.size());
    Differencing::Slots first;
    for (std::size_t begin = 0; begin < costs_.size(); begin += parts_) {
      Differencing::Slots slots;
      slots.reserve(parts_);
      for (std::size_t i = begin; i < std::min(begin + parts_, costs_.size()); ++i) {
        slots.push_back({costs_[i], static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(i)});
      }
      if (begin < first_items) {
        differencing.merge(first, slots);
      } else {
        differencing.add(std::move(slots));
      }
    }
    if (!first.empty()) {
      differencing.add(std::move(first));
    }
    const auto slots = differencing.run({});
    Division result{std::vector<std::uint32_t>(costs_.size()), slots.front().load};
    for (std::size_t p = 0; p < slots.size(); ++p) {
      differencing.for_each(
          slots[p], [&](std::uint32_t item) { result.part[item] = static_cast<std::uint32_t>(p); });
    }
    return result;
  }

  std::span<const double> costs_;
  std::size_t parts_;
  bool equal_count_;
  double bound_;  // what the largest load cannot be below
  std::vector<std::pair<double, std::uint32_t>> loads_of_first_;
};

}  // namespace

Batches balance(std::span<const double> costs, std::int64_t parts, bool equal_count) {
  check_argument(parts >= 1 && parts <= kMostParts, "parts must be from 1 to 2^24, got ", parts);
  check_argument(costs.size() < kMostItems, "costs must be fewer than 2^31, got ", costs.size());
  for (std::size_t i = 0; i < costs.size(); ++i) {
    check_argument(costs[i] >= 0 && std::isfinite(costs[i]),
                   "costs must be finite and not negative, got ", costs[i], " at index ", i);
  }
  const auto count = static_cast<std::size_t>(parts);
  std::vector<std::uint32_t> part_of(costs.size());
  if (count > 1 && !costs.empty()) {
    std::vector<std::uint32_t> order;
    detail::DescendingSort()(costs, order);
    std::vector<double> sorted(costs.size());
    std::transform(order.begin(), order.end(), sorted.begin(),
                   [&](std::uint32_t item) { return costs[item]; });
    // One item a part is as good as it gets: the other parts are empty.
    const std::size_t used = std::min(count, costs.size());
    const Division division = Divider(sorted, used, equal_count).best();
    for (std::size_t i = 0; i < order.size(); ++i) {
      part_of[order[i]] = division.part[i];
    }
  }
  Batches result;
  result.loads.assign(count, 0.0);
  result.offsets.assign(count + 1, 0);
  for (std::size_t i = 0; i < costs.size(); ++i) {
    result.loads[part_of[i]] += costs[i];
    ++result.offsets[part_of[i] + 1];
  }
  std::partial_sum(result.offsets.begin(), result.offsets.end(), result.offsets.begin());
  std::vector<std::int64_t> place(result.offsets.begin(), result.offsets.end() - 1);
  result.indices.resize(costs.size());
  for (std::size_t i = 0; i < costs.size(); ++i) {
    result.indices[static_cast<std::size_t>(place[part_of[i]]++)] = static_cast<std::int64_t>(i);
  }
  return result;
}

}  // namespace brim::batching
