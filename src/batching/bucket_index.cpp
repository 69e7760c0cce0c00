#include "batching/bucket_index.h"

#include <cmath>

#include "check_argument.h"

namespace brim::batching::detail {

using brim::detail::check_argument;

void check_boundaries(const std::vector<double>& boundaries) {
  check_argument(boundaries.size() >= 2, "bucket_boundaries must be at least two, got ",
                 boundaries.size());
  for (std::size_t i = 0; i < boundaries.size(); ++i) {
    const bool allowed =
        std::isfinite(boundaries[i]) || (i + 1 == boundaries.size() && boundaries[i] > 0);
    check_argument(allowed && (i == 0 || boundaries[i] > boundaries[i - 1]),
                   "bucket_boundaries must be finite and ascending, got ", boundaries[i],
                   " at index ", i);
  }
}

template <>
std::vector<double> edges_of(const std::vector<double>& boundaries) {
  return boundaries;
}

template <>
std::vector<std::int64_t> edges_of(const std::vector<double>& boundaries) {
  std::vector<std::int64_t> edges;
  for (const double boundary : boundaries) {
    if (boundary < 0x1p63) {  // no whole size reaches the others
      // A whole size lies below a fraction exactly if it lies below the next whole number.
      edges.push_back(static_cast<std::int64_t>(std::max(std::ceil(boundary), -0x1p62)));
    }
  }
  return edges;
}

namespace {

bool fit_word(const SizeSpan<std::int64_t>& sizes) {
  return sizes.visit([](auto stored) {
    std::int64_t bits = 0;
    for (const std::int64_t size : stored) {  // NOLINT(bugprone-signed-char-misuse): a number
      bits |= size;
    }
    return !stored.empty() && std::in_range<std::uint32_t>(bits);
  });
}

bool fit_word(const SizeSpan<double>& /*sizes*/) { return false; }

}  // namespace

template <class T>
BucketIndex group(const SizeSpan<T>& sizes, const SizeSpan<T>& costs, const BucketFinder<T>& find,
                  std::vector<double> boundaries, const std::vector<LeftOut>& oversize,
                  std::vector<LeftOut>& outside) {
  BucketIndex index{std::move(boundaries), {}, {}, {}};
  const std::size_t buckets = index.boundaries.size() - 1;
  BucketSort sort(buckets);
  auto next_oversize = oversize.begin();
  sizes.visit([&](auto stored) {
    sort.count(stored.size(), [&](std::size_t i) {
      if (next_oversize != oversize.end() && std::cmp_equal(next_oversize->index, i)) {
        ++next_oversize;
        return static_cast<std::uint32_t>(buckets);
      }
      const std::uint32_t bucket = find(static_cast<T>(stored[i]));
      if (bucket >= buckets) {
        outside.push_back({static_cast<std::int64_t>(i), LeftOutReason::outside_buckets});
      }
      return bucket;
    });
  });
  index.begins = sort.begins();
  if (fit_word(costs)) {
    index.sized_samples.resize(index.begins.back());
    costs.visit([&](auto stored) {
      sort.scatter([&](std::size_t place, std::size_t i) {
        index.sized_samples[place] = {static_cast<std::uint32_t>(i),
                                      static_cast<std::uint32_t>(stored[i])};
      });
    });
  } else {
    index.samples.resize(index.begins.back());
    sort.scatter([&](std::size_t place, std::size_t i) {
      index.samples[place] = static_cast<std::uint32_t>(i);
    });
  }
  return index;
}

template BucketIndex group(const SizeSpan<std::int64_t>&, const SizeSpan<std::int64_t>&,
                           const BucketFinder<std::int64_t>&, std::vector<double>,
                           const std::vector<LeftOut>&, std::vector<LeftOut>&);
template BucketIndex group(const SizeSpan<double>&, const SizeSpan<double>&,
                           const BucketFinder<double>&, std::vector<double>,
                           const std::vector<LeftOut>&, std::vector<LeftOut>&);

}  // namespace brim::batching::detail
