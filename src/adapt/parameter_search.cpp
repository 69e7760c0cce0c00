#include <brim/adapt/parameter_search.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "bisect.h"
#include "need/size_lattice.h"

namespace brim {
namespace {

using detail::check_argument;
using detail::require;

__extension__ using Wide = __int128;  // a product of two sizes

void check(const Parameter& parameter, std::size_t index) {
  const std::string name = "parameters[" + std::to_string(index) + "].";
  require(parameter.lower >= 1, name + "lower", parameter.lower, "at least 1");
  require(parameter.maximum >= parameter.lower, name + "maximum", parameter.maximum,
          "at least lower=", parameter.lower);
  require(parameter.quantum >= 1, name + "quantum", parameter.quantum, "at least 1");
}

std::vector<std::vector<std::size_t>> checked_groups(const ParameterSearchOptions& options) {
  const std::size_t count = options.parameters.size();
  check_argument(count > 0, "parameters=[] is not allowed; there must be at least one");
  for (std::size_t i = 0; i < count; ++i) {
    check(options.parameters[i], i);
  }
  std::vector<std::vector<std::size_t>> groups = options.groups;
  for (std::size_t i = 0; options.groups.empty() && i < count; ++i) {
    groups.push_back({i});
  }
  std::vector<bool> used(count);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    check_argument(!groups[g].empty(), "groups[", g,
                   "]=[] is not allowed; a group must have at least one parameter");
    for (const std::size_t index : groups[g]) {
      check_argument(index < count && !used[index], "groups[", g, "] holds ", index,
                     "; allowed is each index below ", count, ", once");
      used[index] = true;
    }
  }
  const auto missing = std::find(used.begin(), used.end(), false);
  check_argument(missing == used.end(), "groups lacks the parameter ", missing - used.begin(),
                 "; each must be in one group");
  return groups;
}

// The smallest scale in [1, high] that `holds`, which must hold at `high` and above where it holds
// first.
template <typename Predicate>
std::int64_t smallest_scale(std::int64_t high, const Predicate& holds) {
  return 1 + detail::largest_that_holds(0, high, [&](std::int64_t s) { return !holds(s); });
}

}  // namespace

ParameterSearch::ParameterSearch(const ParameterSearchOptions& options)
    : parameters_(options.parameters), revisit_floor_(options.revisit_floor) {
  for (auto& members : checked_groups(options)) {
    groups_.push_back(make_group(options, std::move(members)));
  }
  advance();
}

ParameterSearch::Group ParameterSearch::make_group(const ParameterSearchOptions& options,
                                                   std::vector<std::size_t> members) const {
  SizeSearchOptions search{.strategy = options.strategy,
                           .start = options.start,
                           .power = static_cast<double>(members.size()),
                           .circumstances = options.circumstances,
                           .cautious = options.cautious};
  for (const std::size_t member : members) {
    search.upper = std::max(search.upper, parameters_[member].maximum);
  }
  if (members.size() == 1) {
    search.lower = parameters_[members[0]].lower;
    search.quantum = parameters_[members[0]].quantum;
    return {std::move(members), search.upper, SizeSearch(search)};
  }
  // No quantum of its own: the steps are where any of the members steps. The floor is the largest
  // scale at which all members are at theirs.
  const Group group{std::move(members), search.upper, SizeSearch(search)};
  search.lower = same(group, 1).last;
  return {group.members, group.scale, SizeSearch(search)};
}

std::int64_t ParameterSearch::value(const Group& group, std::size_t parameter,
                                    std::int64_t scale) const {
  const Parameter& p = parameters_[parameter];
  const auto share = static_cast<std::int64_t>(Wide{p.maximum} * scale / group.scale);
  return std::max(p.lower, detail::SizeLattice{p.lower, p.maximum, p.quantum}.floor(share));
}

bool ParameterSearch::equal(const Group& group, std::int64_t scale, std::int64_t other) const {
  return std::all_of(group.members.begin(), group.members.end(), [&](std::size_t member) {
    return value(group, member, scale) == value(group, member, other);
  });
}

ParameterSearch::Range ParameterSearch::same(const Group& group, std::int64_t scale) const {
  if (group.members.size() == 1) {
    return {scale, scale};  // the scale is the value, and the search keeps to the quantum by itself
  }
  // Each value grows with the scale, so scales of equal values lie side by side.
  const std::int64_t first =
      smallest_scale(scale, [&](std::int64_t s) { return equal(group, s, scale); });
  if (equal(group, group.scale, scale)) {
    return {first, group.scale};
  }
  const auto larger = [&](std::int64_t s) { return s > scale && !equal(group, s, scale); };
  return {first, smallest_scale(group.scale, larger) - 1};
}

std::vector<std::int64_t> ParameterSearch::values_at(std::size_t current,
                                                     std::int64_t scale) const {
  std::vector<std::int64_t> values(parameters_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const std::size_t member : groups_[g].members) {
      const Parameter& p = parameters_[member];
      values[member] = g < current   ? p.lower
                       : g > current ? p.maximum
                                     : value(groups_[g], member, scale);
    }
  }
  return values;
}

bool ParameterSearch::exhausted() const {
  return finished() && !groups_[current_].search.best() && current_ + 1 < groups_.size();
}

void ParameterSearch::advance() {
  while (exhausted()) {
    ++current_;
  }
  next_ = values_at(current_, groups_[current_].search.next());
}

void ParameterSearch::record(Attempt attempt) {
  ++attempts_;
  const auto tell = [&](std::int64_t scale) {
    const Range range = same(groups_[current_], scale);
    attempt.values = {attempt.fitted() ? range.last : range.first};
    groups_[current_].search.record(attempt);
  };
  tell(groups_[current_].search.next());
  // The floor of one group is the maximum of the next: it was tried and failed. A group with only
  // one value passes the failure on.
  while (!attempt.fitted() && exhausted()) {
    ++current_;
    if (revisit_floor_) {
      break;
    }
    tell(groups_[current_].scale);
  }
  advance();
}

std::optional<std::vector<std::int64_t>> ParameterSearch::best() const {
  const auto scale = groups_[current_].search.best();
  return scale ? std::optional(values_at(current_, *scale)) : std::nullopt;
}

std::optional<std::int64_t> ParameterSearch::scale_of(const Group& group,
                                                      std::span<const std::int64_t> values) const {
  if (group.members.size() == 1) {
    return values[group.members[0]];  // an earlier call may have had a larger maximum
  }
  const auto each = [&](const auto& compare, std::int64_t scale) {
    return std::all_of(group.members.begin(), group.members.end(),
                       [&](std::size_t m) { return compare(value(group, m, scale), values[m]); });
  };
  if (!each(std::greater_equal<>(), group.scale)) {
    return std::nullopt;
  }
  const auto reaches = [&](std::int64_t scale) { return each(std::greater_equal<>(), scale); };
  const std::int64_t scale = smallest_scale(group.scale, reaches);
  return each(std::equal_to<>(), scale) ? std::optional(scale) : std::nullopt;
}

template <class Take>
bool ParameterSearch::place(const Attempt& attempt, const Take& take) {
  const std::vector<std::int64_t>& values = attempt.values;
  check_argument(values.size() == parameters_.size(), "values has ", values.size(),
                 " entries; it must have ", parameters_.size(), ", one per parameter");
  for (std::size_t i = 0; i < values.size(); ++i) {
    check_argument(values[i] >= 1, "values[", i, "]=", values[i],
                   " is not allowed; it must be at least 1");
  }
  const auto at = [&](const Group& group, std::int64_t Parameter::* bound) {
    return std::all_of(group.members.begin(), group.members.end(),
                       [&](std::size_t m) { return values[m] == parameters_[m].*bound; });
  };
  bool taken = false;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    // A group is searched with those before it at their floor and those after it at their maximum.
    // The floor of one is the maximum of the next: such values count for both.
    const auto here = groups_.begin() + static_cast<std::ptrdiff_t>(g);
    const bool visited = std::all_of(groups_.begin(), here,
                                     [&](const Group& b) { return at(b, &Parameter::lower); }) &&
                         std::all_of(here + 1, groups_.end(),
                                     [&](const Group& a) { return at(a, &Parameter::maximum); });
    const auto scale = visited ? scale_of(groups_[g], values) : std::nullopt;
    if (!scale) {
      continue;
    }
    const Range range = same(groups_[g], *scale);
    Attempt scaled = attempt;
    scaled.values = {attempt.fitted() ? range.last : range.first};
    take(g, std::move(scaled));
    taken = true;
  }
  return taken;
}

bool ParameterSearch::remember(std::span<const Attempt> attempts) {
  std::vector<std::vector<Attempt>> of_group(groups_.size());
  bool taken = false;
  for (const Attempt& attempt : attempts) {
    taken |= place(attempt, [&](std::size_t g, Attempt&& scaled) {
      of_group[g].push_back(std::move(scaled));
    });
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].search.remember(of_group[g]);
  }
  current_ = attempts_ == 0 ? 0 : current_;
  advance();
  return taken;
}

bool ParameterSearch::record_elsewhere(const Attempt& attempt) {
  ++attempts_;
  const bool taken = place(attempt, [&](std::size_t g, const Attempt& scaled) {
    groups_[g].search.record(scaled);
    current_ = attempt.fitted() ? current_ : std::max(current_, g);
  });
  advance();
  return taken;
}

}  // namespace brim
