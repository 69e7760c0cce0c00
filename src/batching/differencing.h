#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "batching/descending_sort.h"
#include "batching/least_loaded.h"

namespace brim::batching::detail {

/// A priority queue, the largest difference first and of equal ones the latest. A radix heap: what
/// is taken never grows, so that an entry moves on, to ever fewer neighbours in size, and never
/// back.
class LargestFirst {
 public:
  [[nodiscard]] bool empty() const { return filled_ == 0; }

  void push(double difference, std::uint32_t state) {
    // Where it exceeds the last one taken, by rounding or because that was the second of two, it
    // exceeds all others too: as one that is equal to the last, it is the next. + 0.0: no -0.0.
    const std::uint64_t key = std::min(std::bit_cast<std::uint64_t>(difference + 0.0), last_);
    largest_ = empty() ? key : std::max(largest_, key);
    place({key, state});
  }

  [[nodiscard]] double largest() const { return std::bit_cast<double>(largest_); }

  std::uint32_t pop() {
    last_ = largest_;
    const auto first = static_cast<std::size_t>(std::countr_zero(filled_));
    if (first > 0) {
      filled_ &= filled_ - 1;
      moved_.swap(buckets_[first]);
      for (const Entry& entry : moved_) {
        place(entry);
      }
      moved_.clear();
    }
    std::vector<Entry>& bucket = buckets_[0];
    const std::uint32_t state = bucket.back().state;
    bucket.pop_back();
    if (bucket.empty()) {
      filled_ &= ~std::uint64_t{1};
      if (filled_ != 0) {
        largest_ = 0;
        for (const Entry& entry : buckets_[static_cast<std::size_t>(std::countr_zero(filled_))]) {
          largest_ = std::max(largest_, entry.key);
        }
      }
    }
    return state;
  }

 private:
  struct Entry {
    std::uint64_t key;  // the bits of a number that is not negative: in the same order
    std::uint32_t state;
  };

  void place(const Entry& entry) {
    const auto bucket = static_cast<std::size_t>(std::bit_width(entry.key ^ last_));
    buckets_[bucket].push_back(entry);
    filled_ |= std::uint64_t{1} << bucket;
  }

  std::array<std::vector<Entry>, 64> buckets_;  // by the first bit that differs from last_
  std::vector<Entry> moved_;
  std::uint64_t filled_ = 0;  // a bit for each bucket
  std::uint64_t last_ = std::bit_cast<std::uint64_t>(std::numeric_limits<double>::infinity());
  std::uint64_t largest_ = 0;
};

/// Largest differencing: of all partial divisions, the two with the largest difference between
/// their parts are merged, the costliest part of one with the cheapest of the other, until one
/// division is left.
class Differencing {
 public:
  /// A part of a partial division: its cost, and its items as a linked list.
  struct Slot {
    double load = 0.0;
    std::uint32_t first = kNone;
    std::uint32_t last = kNone;
  };
  /// All parts of a division, in descending order of their cost.
  using Slots = std::span<Slot>;

  Differencing(std::size_t parts, std::size_t items)
      : parts_(parts), next_(items, kNone), loads_(parts), sorted_(parts) {
    slots_.reserve(items + 2 * parts);
  }

  /// An empty division, to be filled and then added or merged.
  std::uint32_t make() {
    if (unused_.empty()) {
      slots_.resize(slots_.size() + parts_);
      return static_cast<std::uint32_t>(slots_.size() / parts_ - 1);
    }
    const std::uint32_t division = unused_.back();
    unused_.pop_back();
    std::ranges::fill((*this)[division], Slot{});
    return division;
  }

  Slots operator[](std::uint32_t division) {
    return Slots(slots_).subspan(division * parts_, parts_);
  }

  void add(std::uint32_t division) {
    const Slots slots = (*this)[division];
    open_.push(slots.front().load - slots.back().load, division);
  }

  /// Merges two divisions into one of them, which is returned.
  std::uint32_t merge(std::uint32_t a, std::uint32_t b) {
    std::size_t filled = filled_parts(b);
    if (filled == parts_) {
      std::swap(a, b);
      filled = filled_parts(b);
    }
    // Where b has no items nothing changes: its items go to the cheapest parts of a.
    const Slots slots = (*this)[a];
    const Slots others = (*this)[b];
    for (std::size_t i = 0; i < filled; ++i) {
      join(slots[parts_ - 1 - i], others[i]);
    }
    unused_.push_back(b);
    sort_from(slots, parts_ - filled);
    return a;
  }

  /// Merges what was added with single items, whose costs descend: item i has `costs[i]`. At least
  /// one of either. A single item comes after divisions with the same difference.
  Slots run(std::span<const double> costs) {
    std::size_t next = 0;      // of the single items
    std::size_t in_a_row = 0;  // single items that a division has met
    const auto single_is_next = [&] {
      return next < costs.size() && (open_.empty() || open_.largest() < costs[next]);
    };
    const auto take_single = [&] {
      const auto item = static_cast<std::uint32_t>(next);
      return Slot{costs[next++], item, item};
    };
    while (true) {
      std::uint32_t division = 0;
      if (single_is_next()) {
        division = make();
        const Slots slots = (*this)[division];
        // As long as a part is empty, its difference is the largest of all.
        for (std::size_t i = 0; i < parts_ && single_is_next(); ++i) {
          slots[i] = take_single();
        }
        if (slots.back().first != kNone) {
          add(division);
          continue;
        }
      } else {
        division = open_.pop();
      }
      if (single_is_next()) {
        if (++in_a_row <= kOneByOne) {
          join((*this)[division].back(), take_single());
          raise_last((*this)[division]);
        } else {
          const Slots slots = (*this)[division];
          std::ranges::transform(slots, loads_.begin(), &Slot::load);
          LeastLoaded parts(loads_);
          std::size_t first_changed = parts_;
          do {
            const std::size_t part = parts.add(costs[next]);  // before the item is taken
            join(slots[part], take_single());
            first_changed = std::min(first_changed, part);
          } while (single_is_next() && slots.front().load - parts.least() >= costs[next]);
          sort_from(slots, first_changed);
        }
      } else if (!open_.empty()) {
        in_a_row = 0;
        division = merge(division, open_.pop());
      } else {
        return (*this)[division];
      }
      add(division);
    }
  }

  /// Which of these parts each item is in.
  [[nodiscard]] std::vector<std::uint32_t> parts_of_items(Slots slots) const {
    struct List {
      std::uint32_t item;
      std::uint32_t part;
    };
    std::vector<List> lists;
    for (const Slot& slot : slots) {
      if (slot.first != kNone) {
        lists.push_back({slot.first, static_cast<std::uint32_t>(&slot - slots.data())});
      }
    }
    std::vector<std::uint32_t> result(next_.size());
    // All lists at once: they lead through memory at random, and do not wait for each other.
    while (!lists.empty()) {
      std::size_t left = 0;
      for (const List& list : lists) {
        result[list.item] = list.part;
        lists[left] = {next_[list.item], list.part};
        left += lists[left].item == kNone ? 0 : 1;
      }
      lists.resize(left);
    }
    return result;
  }

  /// Puts parts into order.
  void sort(Slots slots) {
    if (slots.size() <= kFewParts) {
      for (std::size_t i = 1; i < slots.size(); ++i) {
        raise_last(slots.first(i + 1));
      }
      return;
    }
    std::ranges::transform(slots, loads_.begin(), &Slot::load);
    sort_(std::span<const double>(loads_).first(slots.size()), order_);
    std::ranges::transform(order_, sorted_.begin(), [&](std::uint32_t i) { return slots[i]; });
    std::copy_n(sorted_.begin(), slots.size(), slots.begin());
  }

 private:
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
  static constexpr std::size_t kFewParts = 24;  // up to which sorting by insertion is faster
  // From this number of single items in a row on, it pays to prepare for more.
  static constexpr std::size_t kOneByOne = 32;

  // The number of parts with items, which come first: the others cost nothing.
  [[nodiscard]] std::size_t filled_parts(std::uint32_t division) {
    const Slots slots = (*this)[division];
    const auto empty = std::ranges::find_if(slots.rbegin(), slots.rend(),
                                            [](const Slot& slot) { return slot.first != kNone; });
    return static_cast<std::size_t>(slots.rend() - empty);
  }

  // Puts parts into order of which those before `begin` are in order.
  void sort_from(Slots slots, std::size_t begin) {
    sort(slots.subspan(begin));
    if (begin == 0 || begin == slots.size() || slots[begin - 1].load >= slots[begin].load) {
      return;
    }
    // The first ones that cost no less than all others stay.
    const auto stay = std::ranges::upper_bound(slots.first(begin), slots[begin].load,
                                               std::greater<>(), &Slot::load);
    const auto middle = slots.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto end = std::ranges::merge(stay, middle, middle, slots.end(), sorted_.begin(),
                                        std::greater<>(), &Slot::load, &Slot::load)
                         .out;
    std::copy(sorted_.begin(), end, stay);
  }

  void join(Slot& slot, const Slot& other) {
    slot.load += other.load;
    if (slot.first == kNone) {
      slot.first = other.first;
    } else {
      next_[slot.last] = other.first;
    }
    slot.last = other.first == kNone ? slot.last : other.last;
  }

  // Moves the last part, which may cost more than those before it, to its place.
  static void raise_last(Slots slots) {
    const Slot moved = slots.back();
    const auto place = std::ranges::upper_bound(slots.first(slots.size() - 1), moved.load,
                                                std::greater<>(), &Slot::load);
    std::move_backward(place, slots.end() - 1, slots.end());
    *place = moved;
  }

  std::size_t parts_;
  std::vector<std::uint32_t> next_;  // of each item, in its list
  std::vector<Slot> slots_;          // of all divisions
  std::vector<std::uint32_t> unused_;
  LargestFirst open_;
  DescendingSort sort_;
  std::vector<double> loads_;
  std::vector<std::uint32_t> order_;
  std::vector<Slot> sorted_;
};

}  // namespace brim::batching::detail
