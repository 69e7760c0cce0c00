#include "batching/bucket_index.h"
#include "number_text.h"

#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace brim::batching::detail {

void check_boundaries(const std::vector<double>& boundaries) {
  if (boundaries.size() < 2) {
    throw std::invalid_argument("bucket_boundaries must be at least two, got " +
                                std::to_string(boundaries.size()));
  }
  for (std::size_t i = 0; i < boundaries.size(); ++i) {
    const bool allowed =
        std::isfinite(boundaries[i]) || (i + 1 == boundaries.size() && boundaries[i] > 0);
    if (!allowed || (i > 0 && !(boundaries[i] > boundaries[i - 1]))) {
      throw std::invalid_argument("bucket_boundaries must be finite and ascending, got " +
                                  brim::detail::text(boundaries[i]) + " at index " +
                                  std::to_string(i));
    }
  }
}

namespace {

bool fits_word(const SizeSpan<std::int64_t>& sizes) {
  return sizes.visit([](auto stored) {
    std::int64_t bits = 0;
    for (const std::int64_t size : stored) {  // NOLINT(bugprone-signed-char-misuse): a number
      bits |= size;
    }
    return !stored.empty() && std::in_range<std::uint32_t>(bits);
  });
}

bool fits_word(const SizeSpan<double>& /*sizes*/) { return false; }

}  // namespace

// A counting sort.
template <class T>
BucketIndex group(const SizeSpan<T>& sizes, const SizeSpan<T>& costs,
                  std::vector<double> boundaries, const std::vector<LeftOut>& oversize,
                  std::vector<LeftOut>& outside) {
  const BucketFinder<T> find(boundaries);
  const std::size_t buckets = boundaries.size() - 1;
  // Slot 0: below the first boundary, then the buckets, then beyond the last, then left out.
  const auto nowhere = static_cast<std::uint32_t>(buckets + 2);
  std::vector<std::uint32_t> slots(sizes.size());
  std::vector<std::size_t> counts(buckets + 3);
  sizes.visit([&](auto stored) {
    std::size_t next_oversize = 0;
    for (std::size_t i = 0; i < stored.size(); ++i) {
      const bool over =
          next_oversize < oversize.size() && std::cmp_equal(oversize[next_oversize].index, i);
      next_oversize += static_cast<std::size_t>(over);
      slots[i] = over ? nowhere : find(static_cast<T>(stored[i]));
      ++counts[slots[i]];
    }
  });
  BucketIndex index;
  index.begins.resize(buckets + 1);
  std::inclusive_scan(counts.begin() + 1, counts.begin() + 1 + static_cast<std::ptrdiff_t>(buckets),
                      index.begins.begin() + 1);
  std::vector<std::size_t> ends(index.begins.begin(), index.begins.end() - 1);
  outside.reserve(counts[0] + counts[buckets + 1]);
  const auto scatter = [&](auto put) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const std::uint32_t slot = slots[i];
      if (slot >= 1 && slot <= buckets) {
        put(ends[slot - 1]++, i);
      } else if (slot != nowhere) {
        outside.push_back({static_cast<std::int64_t>(i), LeftOutReason::outside_buckets});
      }
    }
  };
  if (fits_word(costs)) {
    index.sized_samples.resize(index.begins.back());
    costs.visit([&](auto stored) {
      scatter([&](std::size_t place, std::size_t i) {
        index.sized_samples[place] = {static_cast<std::uint32_t>(i),
                                      static_cast<std::uint32_t>(stored[i])};
      });
    });
  } else {
    index.samples.resize(index.begins.back());
    scatter([&](std::size_t place, std::size_t i) {
      index.samples[place] = static_cast<std::uint32_t>(i);
    });
  }
  index.boundaries = std::move(boundaries);
  return index;
}

template BucketIndex group(const SizeSpan<std::int64_t>&, const SizeSpan<std::int64_t>&,
                           std::vector<double>, const std::vector<LeftOut>&, std::vector<LeftOut>&);
template BucketIndex group(const SizeSpan<double>&, const SizeSpan<double>&, std::vector<double>,
                           const std::vector<LeftOut>&, std::vector<LeftOut>&);

}  // namespace brim::batching::detail
