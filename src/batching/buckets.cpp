#include <brim/batching/buckets.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "batching/unique_sizes.h"

namespace brim::batching {
namespace {

using detail::Distinct;
using detail::require;

constexpr std::size_t kMostBuckets = std::size_t{1} << 24;

template <typename Size>
BucketGroups group(std::span<const Size> sizes, std::span<const Size> boundaries) {
  require(boundaries.size() >= 2, "the number of boundaries", std::to_string(boundaries.size()),
          "at least 2");
  for (std::size_t i = 1; i < boundaries.size(); ++i) {
    if (!(boundaries[i - 1] < boundaries[i])) {
      require(false, "boundaries[" + std::to_string(i) + "]", std::to_string(boundaries[i]),
              "above the one before it, " + std::to_string(boundaries[i - 1]));
    }
  }
  require(boundaries.size() - 1 <= kMostBuckets, "the number of buckets",
          std::to_string(boundaries.size() - 1), "at most 2^24");
  BucketGroups result;
  result.offsets.assign(boundaries.size(), 0);
  const std::size_t buckets = boundaries.size() - 1;
  std::vector<std::uint32_t> bucket(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    // How many boundaries are not above it, less one: the sizes below all wrap to the largest.
    std::size_t first = 0;
    for (std::size_t left = boundaries.size(); left > 0;) {
      const std::size_t half = (left + 1) / 2;
      first += boundaries[first + half - 1] <= sizes[i] ? half : 0;
      left -= half;
    }
    bucket[i] = static_cast<std::uint32_t>(first) - 1U;
    if (bucket[i] < buckets) {
      ++result.offsets[bucket[i] + 1];
    }
  }
  for (std::size_t k = 1; k <= buckets; ++k) {
    result.offsets[k] += result.offsets[k - 1];
  }
  result.indices.resize(static_cast<std::size_t>(result.offsets[buckets]));
  std::vector<std::int64_t> place(result.offsets.begin(), result.offsets.end() - 1);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (bucket[i] < buckets) {
      result.indices[static_cast<std::size_t>(place[bucket[i]]++)] = static_cast<std::int64_t>(i);
    }
  }
  return result;
}

}  // namespace

Buckets create_buckets(std::span<const std::int64_t> sizes, std::int64_t max_width,
                       std::int64_t min_bucket_count) {
  detail::require_sizes(sizes);
  require(max_width >= 1, "max_width", std::to_string(max_width), "at least 1");
  require(min_bucket_count >= 1, "min_bucket_count", std::to_string(min_bucket_count),
          "at least 1");
  const Distinct<std::int64_t> found = detail::distinct(sizes);
  const std::int64_t end = detail::just_above(found.sizes.back());
  // Differences of sizes need not fit 63 bits, but do fit 64.
  const auto width = static_cast<std::uint64_t>(max_width);
  const auto distance = [](std::int64_t to, std::int64_t from) {
    return static_cast<std::uint64_t>(to) - static_cast<std::uint64_t>(from);
  };
  Buckets result;
  std::int64_t lower = found.sizes.front();
  result.boundaries.push_back(lower);
  for (std::size_t next = 0; next < found.sizes.size();) {
    std::int64_t count = 0;
    while (next < found.sizes.size() && count < min_bucket_count &&
           distance(found.sizes[next], lower) < width) {
      count += found.counts[next];
      ++next;
    }
    const std::int64_t upper = next < found.sizes.size() ? found.sizes[next] : end;
    const std::uint64_t steps = std::max(distance(upper, lower) / width, std::uint64_t{1});
    if (steps > kMostBuckets - result.counts.size()) {
      throw std::invalid_argument("max_width=" + std::to_string(max_width) +
                                  " would make more than 2^24 buckets of the sizes from " +
                                  std::to_string(found.sizes.front()) + " to " +
                                  std::to_string(found.sizes.back()) + "; it must be larger");
    }
    result.counts.push_back(count);
    result.counts.resize(result.counts.size() + steps - 1, 0);
    for (std::uint64_t step = 1; step <= steps; ++step) {
      lower = distance(upper, lower) < width ? upper : lower + max_width;
      result.boundaries.push_back(lower);
    }
  }
  return result;
}

BucketGroups group_by_bucket(std::span<const std::int64_t> sizes,
                             std::span<const std::int64_t> boundaries) {
  return group(sizes, boundaries);
}

BucketGroups group_by_bucket(std::span<const double> sizes, std::span<const double> boundaries) {
  detail::check_finite(sizes);
  return group(sizes, boundaries);
}

}  // namespace brim::batching
