#pragma once

#include <brim/batching/batching.h>
#include <brim/batching/stream.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

// What several tests of batching share: plain ways to say what a batch costs, and to read one.

namespace brim::batching::reference {

using Ints = std::vector<std::int64_t>;
using Doubles = std::vector<double>;
using Lists = std::vector<Ints>;  // batches
using Random = std::mt19937_64;

inline constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

__extension__ using Wide = __int128;

inline std::int64_t any_int(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

inline Ints random_ints(Random& random, std::int64_t count, std::int64_t low, std::int64_t high) {
  Ints sizes(static_cast<std::size_t>(count));
  std::generate(sizes.begin(), sizes.end(), [&] { return any_int(random, low, high); });
  return sizes;
}

/// Multiples of 1/4, so that sums and products of some of them are exact.
inline Doubles random_quarters(Random& random, std::int64_t count, std::int64_t low,
                               std::int64_t high) {
  Doubles sizes(static_cast<std::size_t>(count));
  std::generate(sizes.begin(), sizes.end(),
                [&] { return 0.25 * static_cast<double>(any_int(random, 4 * low, 4 * high)); });
  return sizes;
}

inline std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

inline void expect_message(const std::function<void()>& call,
                           const std::vector<std::string>& parts) {
  const std::string text = message(call);
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
  }
}

/// What samples of these sizes cost together, in numbers wide enough. Not for custom costs.
template <class T>
auto cost_of(Cost::Kind kind, const std::vector<T>& sizes) {
  using Number = std::conditional_t<std::is_same_v<T, double>, double, Wide>;
  Number sum = 0;
  Number longest = 0;
  for (const T size : sizes) {
    sum += size;
    longest = std::max(longest, static_cast<Number>(size));
  }
  const auto count = static_cast<Number>(sizes.size());
  switch (kind) {
    case Cost::Kind::sum:
      return sum;
    case Cost::Kind::count:
      return count;
    case Cost::Kind::padded:
    case Cost::Kind::padded_product:
      return count * longest;
    case Cost::Kind::flops:
      return count * (24576 * longest + longest * longest);
    default:
      return count * longest * longest;
  }
}

template <class T>
bool within(const Limit& limit, const std::vector<T>& sizes) {
  const Cost::Kind kind = limit.cost().kind();
  if constexpr (std::is_same_v<T, double>) {
    return cost_of(kind, sizes) <= limit.real();
  } else {
    return cost_of(kind, sizes) <= static_cast<Wide>(limit.whole());
  }
}

template <class T>
bool within(const Columns<T>& columns, std::span<const std::int64_t> batch) {
  return std::all_of(columns.begin(), columns.end(), [&](const Column<T>& column) {
    std::vector<T> sizes;
    for (const std::int64_t index : batch) {
      sizes.push_back(column.sizes[static_cast<std::size_t>(index)]);
    }
    return within(column.limit, sizes);
  });
}

inline Lists lists_of(const Batches& batches) {
  Lists lists;
  for (std::size_t b = 0; b < batches.count(); ++b) {
    lists.emplace_back(batches[b].begin(), batches[b].end());
  }
  return lists;
}

/// What is left of a stream.
inline Lists read(BatchStream& stream) {
  Lists lists;
  while (const auto batch = stream.next()) {
    lists.emplace_back(batch->begin(), batch->end());
  }
  return lists;
}

inline Lists read(const Batching& batching, std::uint64_t seed = 0, Ranks ranks = {}) {
  BatchStream stream(batching, seed, ranks);
  return read(stream);
}

/// All indices in batches, ascending.
inline Ints sorted_indices(const Lists& lists) {
  Ints indices;
  for (const Ints& list : lists) {
    indices.insert(indices.end(), list.begin(), list.end());
  }
  std::sort(indices.begin(), indices.end());
  return indices;
}

inline Ints indices_of(const std::vector<LeftOut>& left_out) {
  Ints indices;
  for (const LeftOut& sample : left_out) {
    indices.push_back(sample.index);
  }
  return indices;
}

inline Ints numbers_below(std::int64_t end) {
  Ints numbers(static_cast<std::size_t>(end));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<std::int64_t>(i);
  }
  return numbers;
}

}  // namespace brim::batching::reference
