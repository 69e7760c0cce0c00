#include <brim/batching/balance.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "batching/capped.h"
#include "batching/descending_sort.h"
#include "batching/differencing.h"
#include "batching/division.h"
#include "batching/least_loaded.h"
#include "check_argument.h"

namespace brim::batching {
namespace {

using brim::detail::check_argument;
using detail::Differencing;
using detail::Division;
using detail::LeastLoaded;

// Within this share of the bound, two divisions are equally good.
constexpr double kTolerance = 1e-9;
constexpr std::int64_t kMostParts = std::int64_t{1} << 24;
constexpr std::size_t kMostItems = std::size_t{1} << 31;
// The number of items that differencing gets after LPT has placed all: at least this many, so that
// what LPT leaves uneven is evened out, and some for each part.
constexpr std::size_t kSomeItems = 16384;
constexpr std::size_t kSomeItemsPerPart = 128;
constexpr std::size_t kShareFromAmongAll = 4;  // a fourth of them; the others are the last ones

/// What the largest load cannot be below, for costs that descend.
double least_possible(std::span<const double> costs, std::size_t parts, bool equal_count) {
  const auto sum = [](std::span<const double> some) {
    return std::accumulate(some.begin(), some.end(), 0.0);
  };
  const double total = sum(costs);
  const bool whole =
      total < 0x1p53 &&
      std::ranges::all_of(costs, [](double cost) { return cost == std::floor(cost); });
  const double mean = total / static_cast<double>(parts);
  // Of the first `full` · parts + 1 items, a part has one more than `full`.
  const std::size_t full = (costs.size() - 1) / parts;
  const double crowded = sum(costs.first(full * parts + 1).last(full + 1));
  // The part of the costliest item has others too.
  const double others = equal_count ? sum(costs.last(costs.size() / parts - 1)) : 0.0;
  return std::max({costs.front() + others, crowded, whole ? std::ceil(mean) : mean});
}

/// All ways to divide the costs, which descend, among no more parts than there are items. Parts of
/// a division are by the place of an item in that order.
class Divider {
 public:
  Divider(std::span<const double> costs, std::size_t parts, bool equal_count)
      : costs_(costs),
        parts_(parts),
        equal_count_(equal_count),
        good_(least_possible(costs, parts, equal_count) * (1 + kTolerance)) {}

  Division best() {
    Division best = least_loaded();
    const std::size_t some = std::max(kSomeItems / parts_, kSomeItemsPerPart);
    if (best.largest > good_ && some * parts_ < costs_.size() / 4) {
      keep_better(best, difference(best, some_items(best, some)));
    }
    if (best.largest > good_) {
      std::vector<std::uint32_t> all(costs_.size());
      std::iota(all.begin(), all.end(), 0U);
      keep_better(best, difference({}, all));
    }
    return best;
  }

 private:
  static void keep_better(Division& best, Division other) {
    if (other.largest < best.largest) {
      best = std::move(other);
    }
  }

  [[nodiscard]] Division least_loaded() const {
    LeastLoaded parts{std::vector<double>(parts_)};
    if (equal_count_) {
      parts.keep_counts_equal(costs_.size(), parts_);
    }
    Division result{std::vector<std::uint32_t>(costs_.size())};
    std::ranges::transform(costs_, result.part.begin(),
                           [&](double cost) { return parts.add(cost); });
    result.largest = parts.largest();
    return result;
  }

  // `count` items of each part, exactly, or all that it has: equal counts depend on it. Most are
  // its last, which even out what is left uneven in the end; the rest are from among all others,
  // which even out what these cannot.
  [[nodiscard]] std::vector<std::uint32_t> some_items(const Division& division,
                                                      std::size_t count) const {
    struct Part {
      std::size_t last = 0;  // items before the last ones; of all, as long as they are counted
      std::size_t step = 0;  // from one to the next that is chosen before these
      std::size_t next = 0;
      std::size_t left = 0;  // items to be chosen before these
      std::size_t seen = 0;
    };
    std::vector<Part> parts(parts_);
    for (const std::uint32_t part : division.part) {
      ++parts[part].last;
    }
    const std::size_t spread = count / kShareFromAmongAll;
    for (Part& part : parts) {
      part.last -= std::min(part.last, count - spread);
      part.step = std::max(part.last / spread, std::size_t{1});
      part.left = spread;
    }
    std::vector<std::uint32_t> result;
    for (std::size_t i = 0; i < costs_.size(); ++i) {
      Part& part = parts[division.part[i]];
      const std::size_t place = part.seen++;
      if (place == part.next && part.left > 0) {
        part.next += part.step;
        --part.left;
      } else if (place < part.last) {
        continue;
      }
      result.push_back(static_cast<std::uint32_t>(i));
    }
    return result;
  }

  // Divides these items, which ascend, anew. The others stay in their parts, each of which counts
  // as one item. For equal counts, as many items as there are parts begin as one division, in which
  // each part gets one of them: neighbours, or first some that differ much, which can even out
  // more.
  [[nodiscard]] Division difference(const Division& from,
                                    const std::vector<std::uint32_t>& items) const {
    std::vector<double> costs(items.size());
    std::ranges::transform(items, costs.begin(), [&](std::uint32_t item) { return costs_[item]; });
    const bool all = items.size() == costs_.size();
    Differencing differencing(parts_, items.size() + (all ? 0 : parts_));
    if (!all) {
      const std::uint32_t others = differencing.make();
      fill_with_others(differencing[others], from, items);
      differencing.sort(differencing[others]);
      differencing.add(others);
    }
    const std::size_t mixed = all ? 0 : items.size() / parts_ / kShareFromAmongAll;
    for (std::size_t i = 0; i < items.size() && equal_count_; i += parts_) {
      const std::uint32_t division = differencing.make();
      const std::size_t count = std::min(parts_, items.size() - i);
      const std::size_t number = i / parts_;
      for (std::size_t p = 0; p < count; ++p) {
        const std::size_t item = number < mixed ? number + p * mixed : i + p;
        differencing[division][p] = {costs[item], static_cast<std::uint32_t>(item),
                                     static_cast<std::uint32_t>(item)};
      }
      differencing.add(division);
    }
    const auto slots = differencing.run(equal_count_ ? std::span<double>() : costs);
    const std::vector<std::uint32_t> part = differencing.parts_of_items(slots);
    Division result{std::vector<std::uint32_t>(costs_.size()), slots.front().load};
    if (!all) {
      std::ranges::transform(from.part, result.part.begin(),
                             [&](std::uint32_t before) { return part[items.size() + before]; });
    }
    for (std::size_t i = 0; i < items.size(); ++i) {
      result.part[items[i]] = part[i];
    }
    return result;
  }

  // The parts of a division without these items, which ascend.
  void fill_with_others(Differencing::Slots slots, const Division& from,
                        const std::vector<std::uint32_t>& items) const {
    for (std::size_t p = 0; p < parts_; ++p) {
      const auto item = static_cast<std::uint32_t>(items.size() + p);
      slots[p] = {0.0, item, item};
    }
    auto next = items.begin();
    for (std::size_t i = 0; i < costs_.size(); ++i) {
      if (next != items.end() && *next == i) {
        ++next;
      } else {
        slots[from.part[i]].load += costs_[i];
      }
    }
  }

  std::span<const double> costs_;
  std::size_t parts_;
  bool equal_count_;
  double good_;  // a largest load with which there is nothing to gain
};

void check_parts(std::int64_t parts) {
  check_argument(parts >= 1 && parts <= kMostParts, "parts must be from 1 to 2^24, got ", parts);
}

void check_numbers(std::span<const double> numbers, const char* name) {
  check_argument(numbers.size() < kMostItems, name, " must be fewer than 2^31, got ",
                 numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    check_argument(numbers[i] >= 0 && std::isfinite(numbers[i]), name,
                   " must be finite and not negative, got ", numbers[i], " at index ", i);
  }
}

void check_cap(const Cap& cap) {
  check_argument(cap.most > 0 && std::isfinite(cap.most), "cap must be positive and finite, got ",
                 cap.most);
  check_numbers(cap.sizes, "sizes");
  for (std::size_t i = 0; i < cap.sizes.size(); ++i) {
    check_argument(cap.sizes[i] <= cap.most, "item ", i, " exceeds the cap by itself: its size is ",
                   cap.sizes[i], ", cap is ", cap.most);
  }
}

/// Whether no part is over the cap, as sums in the order of the items say.
bool holds(const Division& division, const Cap& cap, std::size_t parts) {
  std::vector<double> totals(parts);
  for (std::size_t i = 0; i < cap.sizes.size(); ++i) {
    totals[division.part[i]] += cap.sizes[i];
  }
  return std::ranges::all_of(totals, [&](double total) { return total <= cap.most; });
}

Batches batches_of(const Division& division, std::span<const double> costs, std::size_t parts) {
  Batches result;
  result.loads.assign(parts, 0.0);
  result.offsets.assign(parts + 1, 0);
  for (std::size_t i = 0; i < costs.size(); ++i) {
    result.loads[division.part[i]] += costs[i];
    ++result.offsets[division.part[i] + 1];
  }
  std::partial_sum(result.offsets.begin(), result.offsets.end(), result.offsets.begin());
  std::vector<std::int64_t> place(result.offsets.begin(), result.offsets.end() - 1);
  result.indices.resize(costs.size());
  for (std::size_t i = 0; i < costs.size(); ++i) {
    result.indices[static_cast<std::size_t>(place[division.part[i]]++)] =
        static_cast<std::int64_t>(i);
  }
  return result;
}

}  // namespace

Division detail::divide(std::span<const double> costs, std::size_t parts, bool equal_count) {
  Division result{std::vector<std::uint32_t>(costs.size())};
  // One item a part is as good as it gets: the other parts are empty.
  const std::size_t used = std::min(parts, costs.size());
  if (used <= 1) {
    result.largest = std::accumulate(costs.begin(), costs.end(), 0.0);
    return result;
  }
  std::vector<std::uint32_t> order;
  detail::DescendingSort()(costs, order);
  std::vector<double> sorted(costs.size());
  std::transform(order.begin(), order.end(), sorted.begin(),
                 [&](std::uint32_t item) { return costs[item]; });
  const Division division = Divider(sorted, used, equal_count).best();
  for (std::size_t i = 0; i < order.size(); ++i) {
    result.part[order[i]] = division.part[i];
  }
  result.largest = division.largest;
  return result;
}

Batches balance(std::span<const double> costs, std::int64_t parts, bool equal_count) {
  check_parts(parts);
  check_numbers(costs, "costs");
  const auto count = static_cast<std::size_t>(parts);
  return batches_of(detail::divide(costs, count, equal_count), costs, count);
}

Batches balance(std::span<const double> costs, std::int64_t parts, const Cap& cap,
                bool equal_count) {
  check_parts(parts);
  check_numbers(costs, "costs");
  check_argument(cap.sizes.size() == costs.size(), "sizes must be as many as costs, ", costs.size(),
                 ", got ", cap.sizes.size());
  check_cap(cap);
  const auto count = static_cast<std::size_t>(parts);
  const Division free = detail::divide(costs, count, equal_count);
  if (holds(free, cap, count)) {
    return batches_of(free, costs, count);
  }
  detail::CappedDivider divider(costs, cap.sizes, cap.most, equal_count);
  const std::optional<Division> division = divider.divide(count);
  check_argument(division.has_value(), "no division of ", costs.size(), " items into parts=", parts,
                 " under cap=", cap.most, " was found: ", divider.fewest_parts(),
                 " parts hold them, and fewer than ", divider.least_parts(), " cannot");
  return batches_of(*division, costs, count);
}

std::int64_t fewest_parts(const Cap& cap, std::int64_t multiple_of, bool equal_count) {
  check_argument(multiple_of >= 1 && multiple_of <= kMostParts,
                 "multiple_of must be from 1 to 2^24, got ", multiple_of);
  check_cap(cap);
  const auto multiple = static_cast<std::size_t>(multiple_of);
  detail::CappedDivider divider(cap.sizes, cap.sizes, cap.most, equal_count);
  const std::size_t parts = std::max(divider.fewest_parts(), std::size_t{1});
  return static_cast<std::int64_t>((parts + multiple - 1) / multiple * multiple);
}

}  // namespace brim::batching
