#include "batching/capped.h"

#include <brim/batching/interruption.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <queue>
#include <set>
#include <utility>

#include "batching/best_fit.h"
#include "batching/descending_sort.h"
#include "batching/part_search.h"

namespace brim::batching::detail {
namespace {

// Shares of the items, the smallest ones, that best fit packs if the least loaded part first leaves
// too little room: it fills parts better, and evens them out less.
constexpr double kPackedShares[] = {0.0, 0.125, 0.5};
// Parts that a search for fewer looks at: some milliseconds.
constexpr std::int64_t kTries = std::int64_t{1} << 18;
constexpr std::size_t kMostSearched = 512;  // items

/// Whether all sums of these numbers are exact in any order.
bool sums_exactly(std::span<const double> sizes) {
  constexpr int kFraction = 52;
  int lowest = 0;  // bit of any of them, as a power of 2
  double total = 0.0;
  for (const double size : sizes) {
    total += size;
    if (size > 0) {
      const auto bits = std::bit_cast<std::uint64_t>(size);
      const int zeros = std::countr_zero(bits | (std::uint64_t{1} << kFraction));
      lowest = std::min(lowest, static_cast<int>(bits >> kFraction) - 1075 + zeros);
    }
  }
  return std::ldexp(total, -lowest) <= 0x1p53;
}

/// The part that costs least of those with room. Items come by descending size: a part without room
/// for one waits until one comes that fits.
class LeastLoadedWithRoom {
 public:
  LeastLoadedWithRoom(std::size_t parts, double room)
      : leaves_(std::bit_ceil(parts)), winners_(2 * leaves_), parts_(leaves_) {
    for (std::size_t p = 0; p < leaves_; ++p) {
      parts_[p] = {p < parts ? 0.0 : kOut, 0, room, 0.0};
      winners_[leaves_ + p] = static_cast<std::uint32_t>(p);
    }
    for (std::size_t match = leaves_ - 1; match > 0; --match) {
      winners_[match] = less(winners_[2 * match], winners_[2 * match + 1]);
    }
  }

  void keep_counts_equal(std::size_t items, std::size_t parts) {
    most_items_ = items / parts;
    larger_parts_ = items % parts;
  }

  /// The part that the item was added to; none if no part has room.
  std::optional<std::uint32_t> add(double cost, double size) {
    while (!waiting_.empty() && waiting_.top().first >= size) {
      Part& part = parts_[waiting_.top().second];
      part.load = part.kept_load;
      play(waiting_.top().second);
      waiting_.pop();
    }
    while (true) {
      const std::uint32_t least = winners_[1];
      Part& part = parts_[least];
      if (part.load == kOut) {
        return std::nullopt;
      }
      const bool full =
          part.count > most_items_ || (part.count == most_items_ && larger_parts_ == 0);
      if (!full && (part.room >= size || part.count == 0)) {
        larger_parts_ -= part.count == most_items_ ? 1 : 0;
        part.load += cost;
        part.room -= size;
        ++part.count;
        play(least);
        return least;
      }
      if (!full) {
        waiting_.emplace(part.room, least);
      }
      part.kept_load = std::exchange(part.load, kOut);
      play(least);
    }
  }

  [[nodiscard]] double room(std::uint32_t part) const { return parts_[part].room; }

 private:
  static constexpr double kOut = std::numeric_limits<double>::infinity();

  struct Part {
    double load;
    std::size_t count;
    double room;
    double kept_load;  // while it waits
  };

  [[nodiscard]] std::uint32_t less(std::uint32_t a, std::uint32_t b) const {
    const Part& x = parts_[a];
    const Part& y = parts_[b];
    return y.load < x.load || (y.load == x.load && y.count < x.count) ? b : a;
  }

  void play(std::uint32_t part) {
    for (std::size_t match = (leaves_ + part) / 2; match > 0; match /= 2) {
      winners_[match] = less(winners_[2 * match], winners_[2 * match + 1]);
    }
  }

  std::size_t leaves_;
  std::vector<std::uint32_t> winners_;  // of each match, the leaves last
  std::vector<Part> parts_;
  std::priority_queue<std::pair<double, std::uint32_t>> waiting_;  // the most room first
  std::size_t most_items_ = std::numeric_limits<std::size_t>::max();
  std::size_t larger_parts_ = 0;
};

}  // namespace

CappedDivider::CappedDivider(std::span<const double> costs, std::span<const double> sizes,
                             double cap, bool equal_count)
    : equal_count_(equal_count),
      // Each sum and exchange rounds by half a unit in the last place, and no item is exchanged
      // more than some ten times.
      cap_(sums_exactly(sizes) ? cap : cap * (1 - 0x1p-48 * static_cast<double>(sizes.size()))) {
  std::vector<std::uint32_t> by_cost;
  DescendingSort sort;
  sort(costs, by_cost);
  sizes_.resize(sizes.size());
  std::ranges::transform(by_cost, sizes_.begin(), [&](std::uint32_t i) { return sizes[i]; });
  sort(std::span<const double>(sizes_), order_);
  costs_.resize(costs.size());
  for (std::uint32_t& place : order_) {
    place = by_cost[place];
  }
  std::ranges::transform(order_, sizes_.begin(), [&](std::uint32_t i) { return sizes[i]; });
  std::ranges::transform(order_, costs_.begin(), [&](std::uint32_t i) { return costs[i]; });
}

// Martello and Toth's second bound: an item above half of the cap is alone with smaller ones, for
// each size from which on these are counted.
std::size_t CappedDivider::least_parts() const {
  const std::size_t count = sizes_.size();
  if (count == 0) {
    return 0;
  }
  const auto larger_than = [&](double size) {  // the number of items
    return static_cast<std::size_t>(
        std::ranges::partition_point(sizes_, [=](double other) { return other > size; }) -
        sizes_.begin());
  };
  std::vector<double> sums(count + 1);
  std::inclusive_scan(sizes_.begin(), sizes_.end(), sums.begin() + 1);
  const std::size_t large = larger_than(cap_ / 2);
  std::size_t least = 1;
  std::size_t alone = large;  // items that leave no room for one of this size
  for (std::size_t end = large + 1; end <= count; ++end) {
    if (end < count && sizes_[end] == sizes_[end - 1]) {
      continue;
    }
    while (alone > 0 && cap_ - sizes_[alone - 1] >= sizes_[end - 1]) {
      --alone;
    }
    const double room = static_cast<double>(large - alone) * cap_ - (sums[large] - sums[alone]);
    const double rest = (sums[end] - sums[large] - room) / cap_;
    // Less what rounding may have added.
    const double more = std::ceil(rest - 1e-9 * std::max(rest, 1.0));
    least = std::max(least, large + static_cast<std::size_t>(std::max(more, 0.0)));
  }
  return std::max(least, large);
}

bool CappedDivider::holds(std::span<const std::uint32_t> part, std::size_t parts) const {
  std::vector<std::pair<double, std::size_t>> totals(parts);
  for (std::size_t i = 0; i < part.size(); ++i) {
    totals[part[i]].first += sizes_[i];
    ++totals[part[i]].second;
  }
  return std::ranges::all_of(
      totals, [&](const auto& total) { return total.first <= cap_ || total.second == 1; });
}

std::optional<Division> CappedDivider::divide(std::size_t parts) {
  std::optional<Division> result = divide_unordered(std::min(parts, costs_.size()));
  if (result) {
    std::vector<std::uint32_t> part(order_.size());
    for (std::size_t i = 0; i < order_.size(); ++i) {
      part[order_[i]] = result->part[i];
    }
    result->part = std::move(part);
  }
  return result;
}

std::optional<Division> CappedDivider::divide_unordered(std::size_t parts) {
  Division division{std::vector<std::uint32_t>(costs_.size())};
  const auto improved = [&] {
    check_interruption();
    exchange({costs_, sizes_, cap_}, parts, equal_count_, division);
    return division;
  };
  for (const double share : kPackedShares) {
    const auto packed = static_cast<std::size_t>(share * static_cast<double>(costs_.size()));
    const std::size_t in_order = costs_.size() - packed;
    // Best fit would leave parts empty that are not begun; it does not count.
    const bool possible = packed == 0 || (in_order >= parts && !equal_count_);
    if (possible && least_loaded(parts, in_order, division)) {
      return improved();
    }
  }
  if (equal_count_) {
    division = detail::divide(sizes_, parts, true);
    if (holds(division.part, parts)) {
      return improved();
    }
  }
  if (packed().parts > parts) {
    return std::nullopt;
  }
  division.part = packed().part;
  (equal_count_ ? spread_equally(division.part, packed().parts, parts)
                : spread(division.part, packed().parts, parts));
  return improved();
}

bool CappedDivider::least_loaded(std::size_t parts, std::size_t in_order,
                                 Division& division) const {
  LeastLoadedWithRoom open(parts, cap_);
  if (equal_count_) {
    open.keep_counts_equal(costs_.size(), parts);
  }
  for (std::size_t i = 0; i < in_order; ++i) {
    const std::optional<std::uint32_t> part = open.add(costs_[i], sizes_[i]);
    if (!part) {
      return false;
    }
    division.part[i] = *part;
  }
  std::set<std::pair<double, std::uint32_t>> rooms;
  for (std::uint32_t p = 0; p < parts && in_order < costs_.size(); ++p) {
    rooms.emplace(open.room(p), p);
  }
  for (std::size_t i = in_order; i < costs_.size(); ++i) {
    const auto best = rooms.lower_bound({sizes_[i], 0});
    if (best == rooms.end()) {
      return false;
    }
    auto node = rooms.extract(best);
    node.value().first -= sizes_[i];
    division.part[i] = node.value().second;
    rooms.insert(std::move(node));
  }
  return true;
}

const CappedDivider::Packed& CappedDivider::packed() {
  if (!packed_) {
    packed_ = sizes_.empty() ? Packed{{}, 0} : equal_count_ ? even_sizes() : best_fit();
    search_fewer(*packed_);
  }
  return *packed_;
}

CappedDivider::Packed CappedDivider::best_fit() const {
  Packed result{std::vector<std::uint32_t>(sizes_.size()), 0};
  // What only fits because it is alone has a part to itself.
  const auto alone = static_cast<std::size_t>(
      std::ranges::partition_point(sizes_, [&](double size) { return size > cap_; }) -
      sizes_.begin());
  std::iota(result.part.begin(), result.part.begin() + static_cast<std::ptrdiff_t>(alone), 0U);
  result.parts = alone;
  const auto pack = [&]<class T>(std::span<const T> sizes, T cap) {
    BestFitPacker<T> packer;
    packer.pack(sizes, cap);
    std::uint32_t begin = 0;
    for (const std::uint32_t end : packer.ends()) {
      for (const std::uint32_t item : packer.members().subspan(begin, end - begin)) {
        result.part[alone + item] = static_cast<std::uint32_t>(result.parts);
      }
      begin = end;
      ++result.parts;
    }
  };
  const bool whole =
      cap_ < 0x1p53 &&
      std::ranges::all_of(sizes_, [](double size) { return size == std::floor(size); });
  if (whole) {
    const std::vector<std::int64_t> sizes(sizes_.begin(), sizes_.end());
    pack(std::span<const std::int64_t>(sizes).subspan(alone),
         std::max(static_cast<std::int64_t>(cap_), std::int64_t{1}));
  } else {
    pack(std::span<const double>(sizes_).subspan(alone), cap_);
  }
  return result;
}

// With equal counts: parts of nearly equal size. More parts are doubled until they hold all items,
// and from there on halved.
CappedDivider::Packed CappedDivider::even_sizes() const {
  const auto try_with = [&](std::size_t parts) {
    Division division = detail::divide(sizes_, parts, true);
    return holds(division.part, parts) ? std::optional<Packed>({std::move(division.part), parts})
                                       : std::nullopt;
  };
  std::size_t below = least_parts() - 1;  // too few
  std::size_t parts = below + 1;
  std::optional<Packed> found;
  while (!(found = try_with(parts))) {
    below = std::exchange(parts, std::min(2 * parts, sizes_.size()));
  }
  while (found->parts - below > 1) {
    const std::size_t middle = below + (found->parts - below) / 2;
    if (std::optional<Packed> fewer = try_with(middle)) {
      found = std::move(fewer);
    } else {
      below = middle;
    }
  }
  return *std::move(found);
}

void CappedDivider::search_fewer(Packed& found) const {
  if (sizes_.size() > kMostSearched) {
    return;
  }
  std::int64_t tries = kTries;
  PartSearch search(sizes_, cap_, equal_count_);
  for (std::size_t parts = least_parts(); parts < found.parts && tries > 0; ++parts) {
    if (search.run(parts, tries)) {
      found = {search.part(), parts};
    }
  }
}

// Fills empty parts with every other item of the costliest.
void CappedDivider::spread(std::vector<std::uint32_t>& part, std::size_t used,
                           std::size_t parts) const {
  std::vector<std::vector<std::uint32_t>> members(parts);
  std::vector<double> loads(parts);
  for (std::uint32_t i = 0; i < part.size(); ++i) {
    members[part[i]].push_back(i);
    loads[part[i]] += costs_[i];
  }
  std::priority_queue<std::pair<double, std::size_t>> costliest;
  const auto offer = [&](std::size_t p) {
    if (members[p].size() > 1) {
      costliest.emplace(loads[p], p);
    }
  };
  for (std::size_t p = 0; p < used; ++p) {
    offer(p);
  }
  for (std::size_t p = used; p < parts; ++p) {
    const std::size_t from = costliest.top().second;
    costliest.pop();
    std::vector<std::uint32_t> kept;
    for (std::size_t i = 0; i < members[from].size(); ++i) {
      const std::uint32_t item = members[from][i];
      if (i % 2 == 0) {
        kept.push_back(item);
      } else {
        members[p].push_back(item);
        part[item] = static_cast<std::uint32_t>(p);
        loads[p] += costs_[item];
        loads[from] -= costs_[item];
      }
    }
    members[from] = std::move(kept);
    offer(from);
    offer(p);
  }
}

// One part more at a time gets the smallest items of the others, as many as make counts equal.
// These are no larger than the mean of their part, so the new one holds them.
void CappedDivider::spread_equally(std::vector<std::uint32_t>& part, std::size_t used,
                                   std::size_t parts) const {
  std::vector<std::vector<std::uint32_t>> members(used);
  for (std::uint32_t i = 0; i < part.size(); ++i) {
    members[part[i]].push_back(i);  // by descending size
  }
  while (members.size() < parts) {
    const std::size_t most = part.size() / (members.size() + 1);
    std::size_t larger = part.size() % (members.size() + 1);
    std::vector<std::uint32_t> given;
    for (std::vector<std::uint32_t>& own : members) {
      const bool keeps_more = own.size() > most && larger > 0;
      larger -= keeps_more ? 1 : 0;
      for (; own.size() > most + (keeps_more ? 1 : 0); own.pop_back()) {
        given.push_back(own.back());
      }
    }
    std::ranges::sort(given);
    members.push_back(std::move(given));
  }
  for (std::uint32_t p = 0; p < parts; ++p) {
    for (const std::uint32_t item : members[p]) {
      part[item] = p;
    }
  }
}

}  // namespace brim::batching::detail
