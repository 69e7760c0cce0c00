#include <brim/batching/buckets.h>

#include <algorithm>
#include <numeric>

#include "batching/bucket_index.h"
#include "batching/unique_sizes.h"

namespace brim::batching {
namespace {

using detail::check_argument;
using detail::Distinct;
using detail::kNotAllowed;

constexpr std::size_t kMostBuckets = std::size_t{1} << 24;

template <typename Size>
BucketGroups group(std::span<const Size> sizes, std::span<const Size> boundaries) {
  const std::size_t buckets = boundaries.size() - 1;
  check_argument(boundaries.size() >= 2, "the number of boundaries=", boundaries.size(),
                 kNotAllowed, "at least 2");
  for (std::size_t i = 1; i < boundaries.size(); ++i) {
    check_argument(boundaries[i - 1] < boundaries[i], "boundaries[", i, "]=", boundaries[i],
                   kNotAllowed, "above the one before it, ", boundaries[i - 1]);
  }
  check_argument(buckets <= kMostBuckets, "the number of buckets=", buckets, kNotAllowed,
                 "at most 2^24");
  const detail::BucketFinder<Size> find({boundaries.begin(), boundaries.end()});
  BucketGroups result;
  result.offsets.resize(buckets + 1);
  std::vector<std::uint32_t> bucket_of(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    bucket_of[i] = find(sizes[i]);
    if (bucket_of[i] < buckets) {
      ++result.offsets[bucket_of[i] + 1];
    }
  }
  std::partial_sum(result.offsets.begin(), result.offsets.end(), result.offsets.begin());
  result.indices.resize(static_cast<std::size_t>(result.offsets.back()));
  std::vector<std::int64_t> next = result.offsets;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (bucket_of[i] < buckets) {
      result.indices[static_cast<std::size_t>(next[bucket_of[i]]++)] = static_cast<std::int64_t>(i);
    }
  }
  return result;
}

}  // namespace

Buckets create_buckets(std::span<const std::int64_t> sizes, std::int64_t max_width,
                       std::int64_t min_bucket_count) {
  detail::require_sizes(sizes);
  check_argument(max_width >= 1, "max_width=", max_width, kNotAllowed, "at least 1");
  check_argument(min_bucket_count >= 1, "min_bucket_count=", min_bucket_count, kNotAllowed,
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
    check_argument(steps <= kMostBuckets - result.counts.size(), "max_width=", max_width,
                   " would make more than 2^24 buckets of the sizes from ", found.sizes.front(),
                   " to ", found.sizes.back(), "; it must be larger");
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
