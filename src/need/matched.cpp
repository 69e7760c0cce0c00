// Which requests of two traces are the same.

#include <brim/need/trace.h>

#include <algorithm>
#include <numeric>
#include <span>

#include "need/index_of.h"

namespace brim {
namespace {

/// The requests of one operator.
struct Operation {
  std::uint64_t name;
  std::int32_t first;
  std::int32_t count;
};

std::vector<Operation> operations_of(const Trace& trace) {
  std::vector<Operation> result;
  std::int32_t last = -1;
  for (std::size_t i = trace.older; i < trace.requests.size(); ++i) {
    const Trace::Request& request = trace.requests[i];
    if (result.empty() || request.operation != last) {
      result.push_back({request.name, static_cast<std::int32_t>(i), 0});
      last = request.operation;
    }
    ++result.back().count;
  }
  return result;
}

/// Pairs of equal elements of two sequences in order, as many as possible: Myers' algorithm.
/// @param most differences at most: two works that differ more are not the same.
/// @param take called with the places of each pair.
template <class Equal, class Take>
void pair_up(std::int32_t size, std::int32_t other, std::int32_t most, const Equal& equal,
             const Take& take) {
  std::int32_t begin = 0;
  while (begin < size && begin < other && equal(begin, begin)) {
    take(begin, begin);
    ++begin;
  }
  std::int32_t end = 0;
  while (end < size - begin && end < other - begin && equal(size - 1 - end, other - 1 - end)) {
    take(size - 1 - end, other - 1 - end);
    ++end;
  }
  const std::int32_t n = size - begin - end;
  const std::int32_t m = other - begin - end;
  if (n == 0 || m == 0) {
    return;
  }
  most = std::min(most, n + m);
  // furthest[d][k + d]: how far into the first sequence one gets with d differences on diagonal k.
  std::vector<std::vector<std::int32_t>> furthest;
  const auto at = [&](std::int32_t d, std::int32_t k) {
    return k < -d || k > d ? -1 : furthest[static_cast<std::size_t>(d)][detail::index_of(k + d)];
  };
  const auto came_down = [&](std::int32_t d, std::int32_t k) {
    return k == -d || (k != d && at(d - 1, k - 1) < at(d - 1, k + 1));
  };
  for (std::int32_t d = 0; d <= most; ++d) {
    furthest.emplace_back(static_cast<std::size_t>(2 * d + 1), -1);
    for (std::int32_t k = -d; k <= d; k += 2) {
      std::int32_t x = d == 0 ? 0 : came_down(d, k) ? at(d - 1, k + 1) : at(d - 1, k - 1) + 1;
      while (x < n && x - k < m && x - k >= 0 && equal(begin + x, begin + x - k)) {
        ++x;
      }
      furthest.back()[detail::index_of(k + d)] = x;
      if (x < n || x - k < m) {
        continue;
      }
      for (std::int32_t step = d, diagonal = k, end_x = x; step >= 0; --step) {
        const bool down = step > 0 && came_down(step, diagonal);
        const std::int32_t from = step == 0 ? 0
                                  : down    ? at(step - 1, diagonal + 1)
                                            : at(step - 1, diagonal - 1) + 1;
        for (std::int32_t i = end_x; i > from; --i) {
          take(begin + i - 1, begin + i - 1 - diagonal);
        }
        end_x = down ? from : from - 1;
        diagonal += down ? 1 : -1;
      }
      return;
    }
  }
}

}  // namespace

std::vector<std::int32_t> matched(const Trace& from, const Trace& to) {
  constexpr std::int32_t kMostDifferences = 400;
  std::vector<std::int32_t> result(from.requests.size(), Trace::kNone);
  const std::vector<Operation> mine = operations_of(from);
  const std::vector<Operation> theirs = operations_of(to);
  const auto pair_requests = [&](std::int32_t i, std::int32_t j) {
    const Operation& here = mine[static_cast<std::size_t>(i)];
    const Operation& there = theirs[static_cast<std::size_t>(j)];
    const auto pair = [&](std::int32_t a, std::int32_t b) {
      result[detail::index_of(here.first + a)] = there.first + b;
    };
    // The last operator of a failure is not whole.
    const bool cut = (!from.complete && i + 1 == std::ssize(mine)) ||
                     (!to.complete && j + 1 == std::ssize(theirs));
    if (here.count == there.count || cut) {
      for (std::int32_t each = 0; each < std::min(here.count, there.count); ++each) {
        pair(each, each);
      }
      return;
    }
    pair_up(
        here.count, there.count, kMostDifferences,
        [&](std::int32_t a, std::int32_t b) {
          return from.requests[detail::index_of(here.first + a)].path ==
                 to.requests[detail::index_of(there.first + b)].path;
        },
        pair);
  };
  pair_up(
      static_cast<std::int32_t>(mine.size()), static_cast<std::int32_t>(theirs.size()),
      kMostDifferences,
      [&](std::int32_t i, std::int32_t j) {
        return mine[static_cast<std::size_t>(i)].name == theirs[static_cast<std::size_t>(j)].name;
      },
      pair_requests);
  return result;
}

}  // namespace brim
