#pragma once

#include <brim/batching/batches.h>
#include <brim/batching/sample_sizes.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "batching/bucket_index.h"
#include "batching/bucket_members.h"
#include "batching/in_parallel.h"

namespace brim::batching::detail {

/// The number of samples of each bucket in each block of consecutive samples: all that is kept of
/// many samples, a few bytes per hundred. It can be a part of a mapped file.
///
/// Cells are counts per block, by bucket and then by block. `before` has, by bucket and then for
/// every kBlocksInGroup-th block and the end, the number of the bucket's samples before.
struct BucketCounts {
  static constexpr std::size_t kBlocksInGroup = 32;
  /// Divides the length of a block, which is at least that: sizes that are counted at once.
  static constexpr std::size_t kChunk = 64;

  std::size_t samples = 0;
  std::size_t buckets = 0;
  std::size_t length = kChunk;  // the number of samples in a block
  std::size_t cell_bytes = 1;
  std::span<const std::uint8_t> cells;
  std::span<const std::uint32_t> before;

  [[nodiscard]] std::size_t blocks() const { return samples / length + 1; }
  [[nodiscard]] std::size_t groups() const { return (blocks() - 1) / kBlocksInGroup + 1; }
  [[nodiscard]] std::size_t cells_size() const { return buckets * blocks() * cell_bytes; }
  [[nodiscard]] std::size_t before_size() const { return buckets * (groups() + 1); }
  [[nodiscard]] std::size_t size(std::size_t bucket) const {
    return before[bucket * (groups() + 1) + groups()];
  }
  [[nodiscard]] std::size_t cell(std::size_t bucket, std::size_t block) const {
    const std::uint8_t* const at = cells.data() + (bucket * blocks() + block) * cell_bytes;
    if (cell_bytes == 1) {
      return *at;
    }
    static_assert(std::endian::native == std::endian::little);
    std::size_t count = 0;
    std::memcpy(&count, at, cell_bytes);
    return count;
  }

  /// The least length of blocks whose cells, of so many bytes each, take `most_bytes` or hardly
  /// more.
  static std::size_t length_for(std::size_t samples, std::size_t buckets, std::size_t most_bytes,
                                std::size_t bytes) {
    const std::size_t most = std::max<std::size_t>(most_bytes / (buckets * bytes), 1);
    return (samples / most / kChunk + 1) * kChunk;
  }
};

/// Counts that this process made.
struct OwnBucketCounts {
  BucketCounts counts;
  std::vector<std::uint8_t> cells;
  std::vector<std::uint32_t> before;
};

/// Counts samples by bucket. `count_in(block_begin, block_end, counts)` adds the samples in a range
/// to the counts of the buckets; it is called from several threads.
template <class CountIn>
[[nodiscard]] OwnBucketCounts count_buckets(std::size_t samples, std::size_t buckets,
                                            std::size_t most_bytes, std::size_t threads,
                                            const CountIn& count_in) {
  constexpr std::size_t kGroup = BucketCounts::kBlocksInGroup;
  OwnBucketCounts own;
  BucketCounts& counts = own.counts;
  counts.samples = samples;
  counts.buckets = buckets;
  counts.length = BucketCounts::length_for(samples, buckets, most_bytes, 1);
  while (true) {
    own.cells.assign(counts.cells_size(), 0);
    own.before.assign(counts.before_size(), 0);
    const std::size_t groups = counts.groups();
    const std::uint64_t most = (std::uint64_t{1} << (8 * counts.cell_bytes)) - 1;
    std::atomic<bool> too_many = false;
    in_parallel(groups, threads, [&](std::size_t group) {
      if (too_many) {
        return;
      }
      std::vector<std::uint32_t> in_block(buckets);
      for (std::size_t i = group * kGroup; i < std::min((group + 1) * kGroup, counts.blocks());
           ++i) {
        std::fill(in_block.begin(), in_block.end(), 0U);
        count_in(i * counts.length, std::min((i + 1) * counts.length, samples),
                 std::span(in_block));
        for (std::size_t b = 0; b < buckets; ++b) {
          const std::uint32_t count = in_block[b];
          if (count > most) {
            too_many = true;
          }
          const std::size_t at = (b * counts.blocks() + i) * counts.cell_bytes;
          std::memcpy(own.cells.data() + at, &count, counts.cell_bytes);
          own.before[b * (groups + 1) + group + 1] += count;
        }
      }
    });
    if (!too_many) {
      break;
    }
    // One bucket has much of a block: wider cells, and longer blocks for them.
    counts.cell_bytes *= 2;
    counts.length = BucketCounts::length_for(samples, buckets, most_bytes, counts.cell_bytes);
  }
  for (std::size_t b = 0; b < buckets; ++b) {
    std::uint32_t* const row = own.before.data() + b * (counts.groups() + 1);
    for (std::size_t group = 0; group < counts.groups(); ++group) {
      row[group + 1] += row[group];
    }
  }
  counts.cells = own.cells;
  counts.before = own.before;
  return own;
}

/// The counts of sizes, of which `find` tells the bucket; other numbers are no bucket.
template <class T, class Find>
[[nodiscard]] OwnBucketCounts count_buckets_of(const SizeSpan<T>& sizes, std::size_t buckets,
                                               std::size_t most_bytes, const Find& find,
                                               std::size_t threads) {
  return sizes.visit([&](auto stored) {
    const auto count_in = [&](std::size_t begin, std::size_t end, auto counts) {
      for (std::size_t i = begin; i < end; ++i) {
        if (const std::uint32_t bucket = find(static_cast<T>(stored[i])); bucket < buckets) {
          ++counts[bucket];
        }
      }
    };
    return count_buckets(stored.size(), buckets, most_bytes, threads, count_in);
  });
}

/// Appends the samples that are in no bucket and not in `left_out`, ascending. Reads only the
/// groups of blocks that have such samples, or some of `left_out`.
template <class T, class Find>
void append_outside(const SizeSpan<T>& sizes, const BucketCounts& counts, const Find& find,
                    const std::vector<LeftOut>& left_out, std::vector<LeftOut>& outside) {
  const std::size_t groups = counts.groups();
  const std::size_t in_group = counts.length * BucketCounts::kBlocksInGroup;
  auto over = left_out.begin();
  sizes.visit([&](auto stored) {
    for (std::size_t group = 0; group < groups; ++group) {
      const std::size_t begin = group * in_group;
      const std::size_t end = std::min(begin + in_group, stored.size());
      std::size_t held = 0;
      for (std::size_t b = 0; b < counts.buckets; ++b) {
        const std::uint32_t* const row = counts.before.data() + b * (groups + 1) + group;
        held += row[1] - row[0];
      }
      for (std::size_t i = held == end - begin ? end : begin; i < end; ++i) {
        while (over != left_out.end() && std::cmp_less(over->index, i)) {
          ++over;
        }
        const bool known = over != left_out.end() && std::cmp_equal(over->index, i);
        if (!known && find(static_cast<T>(stored[i])) >= counts.buckets) {
          outside.push_back({static_cast<std::int64_t>(i), LeftOutReason::outside_buckets});
        }
      }
    }
  });
}

/// The sizes that a bucket holds: from `first` up to and including `last`.
template <class T>
struct BucketRange {
  T first;
  T last;
};

/// Of each bucket; sizes above `most` are in none.
template <class T>
[[nodiscard]] std::vector<BucketRange<T>> ranges_of(const std::vector<double>& boundaries, T most) {
  const std::vector<T> edges = edges_of<T>(boundaries);
  std::vector<BucketRange<T>> ranges;
  for (std::size_t b = 0; b + 1 < boundaries.size(); ++b) {
    if (b >= edges.size()) {  // no size reaches it
      ranges.push_back({T{1}, T{0}});
      continue;
    }
    T last = std::numeric_limits<T>::max();
    if (b + 1 < edges.size()) {
      if constexpr (std::is_same_v<T, double>) {
        last = std::nextafter(edges[b + 1], -std::numeric_limits<double>::infinity());
      } else {
        last = edges[b + 1] - 1;
      }
    }
    ranges.push_back({edges[b], std::min(last, most)});
  }
  return ranges;
}

/// Finds the samples of buckets by counts: the block by the counts, then the sample by its size.
/// The result is that of BucketIndex; a sample takes some 100 ns instead of 5, and memory does not
/// grow by bytes per sample.
template <class T>
class BucketSelect : public BucketMembers {
 public:
  using Range = BucketRange<T>;

  BucketSelect(SizeSpan<T> sizes, std::vector<Range> ranges, const BucketCounts& counts)
      : sizes_(std::move(sizes)), ranges_(std::move(ranges)), counts_(counts) {}

  [[nodiscard]] std::size_t buckets() const override { return ranges_.size(); }
  [[nodiscard]] std::size_t size(std::size_t bucket) const override { return counts_.size(bucket); }

  void read(std::size_t bucket, std::span<const std::uint32_t> places,
            std::int64_t* out) const override {
    sizes_.visit([&]<class Stored>(std::span<const Stored> stored) {
      read_stored(stored, bucket, places, out);
    });
  }

 private:
  static constexpr std::size_t kTogether = 32;  // samples whose blocks are fetched at once
  static constexpr std::size_t kChunk = BucketCounts::kChunk;
  static constexpr std::size_t kNear = 16;  // groups around a guess

  struct Found {
    std::size_t begin;   // of the block
    std::size_t before;  // samples of the bucket in the block before the one looked for
    std::size_t after;   // and behind it
  };

  /// The sample found, and others of the bucket behind it, among kChunk samples.
  struct Hits {
    std::size_t begin = 0;   // of these samples
    std::uint64_t rest = 0;  // the lowest bit is the sample found
  };

  // Sizes in a bucket, as numbers of the stored type; none if first > last.
  template <class Stored>
  static std::pair<Stored, Stored> range_as(const Range& range) {
    using Limits = std::numeric_limits<Stored>;
    if constexpr (std::is_floating_point_v<Stored>) {
      auto first = static_cast<Stored>(range.first);
      auto last = static_cast<Stored>(range.last);
      if (static_cast<T>(first) < range.first) {
        first = std::nextafter(first, Limits::infinity());
      }
      if (static_cast<T>(last) > range.last) {
        last = std::nextafter(last, -Limits::infinity());
      }
      return {first, last};
    } else {
      // Sizes of one byte are numbers, not characters.
      constexpr auto kLeast = static_cast<T>(Limits::min());  // NOLINT(bugprone-signed-char-misuse)
      constexpr auto kMost = static_cast<T>(Limits::max());
      if (range.first > kMost || range.last < kLeast || range.first > range.last) {
        return {Stored{1}, Stored{0}};
      }
      return {static_cast<Stored>(std::max(range.first, kLeast)),
              static_cast<Stored>(std::min(range.last, kMost))};
    }
  }

  // The last group of blocks with at most `place` samples of the bucket before it.
  [[nodiscard]] std::size_t group_of(std::size_t bucket, std::uint32_t place) const {
    const std::size_t groups = counts_.groups();
    const std::uint32_t* const row = counts_.before.data() + bucket * (groups + 1);
    // Samples of a bucket mostly lie evenly: the search starts around where it would be then.
    const auto guess =
        static_cast<std::size_t>(static_cast<double>(place) / static_cast<double>(row[groups]) *
                                 static_cast<double>(groups));
    std::size_t low = guess > kNear ? guess - kNear : 0;
    std::size_t high = std::min(guess + kNear, groups);
    if (row[low] > place || row[high] <= place) {
      low = 0;
      high = groups;
    }
    for (std::size_t length = high - low; length > 1;) {  // without branches
      const std::size_t half = length / 2;
      low += row[low + half] <= place ? half : 0;
      length -= half;
    }
    return low;
  }

  // The block of the group that holds the place, and what is around it in that block.
  [[nodiscard]] Found find(std::size_t bucket, std::uint32_t place, std::size_t group) const {
    std::size_t before = place - counts_.before[bucket * (counts_.groups() + 1) + group];
    std::size_t block = group * BucketCounts::kBlocksInGroup;
    std::size_t count = counts_.cell(bucket, block);
    while (before >= count) {
      before -= count;
      count = counts_.cell(bucket, ++block);
    }
    return {block * counts_.length, before, count - before - 1};
  }

  // The samples that `select` will look at, as far as can be foreseen.
  template <class Stored>
  void fetch(std::span<const Stored> stored, const Found& found) const {
    constexpr std::size_t kLine = 64 / sizeof(Stored);
    const std::size_t end = std::min(found.begin + counts_.length, stored.size());
    const std::size_t least = std::min(found.before, found.after) + 1;
    const std::size_t look = std::min(
        (least * counts_.length) / (found.before + found.after + 2) + kLine, end - found.begin);
    const std::size_t from = found.before <= found.after ? found.begin : end - look;
    for (std::size_t i = 0; i < look; i += kLine) {
      __builtin_prefetch(stored.data() + from + i);
    }
  }

  template <class Stored>
  void read_stored(std::span<const Stored> stored, std::size_t bucket,
                   std::span<const std::uint32_t> places, std::int64_t* out) const {
    const auto [first, last] = range_as<Stored>(ranges_[bucket]);
    std::size_t groups[kTogether];
    Found found[kTogether];
    for (; !places.empty(); places = places.subspan(std::min(kTogether, places.size()))) {
      const auto some = places.first(std::min(kTogether, places.size()));
      const auto follows = [&](std::size_t i) { return i > 0 && some[i] == some[i - 1] + 1; };
      // Each step asks memory for what the next one reads, for all samples.
      for (std::size_t i = 0; i < some.size(); ++i) {
        if (!follows(i)) {
          groups[i] = group_of(bucket, some[i]);
          const std::size_t block = groups[i] * BucketCounts::kBlocksInGroup;
          __builtin_prefetch(counts_.cells.data() +
                             (bucket * counts_.blocks() + block) * counts_.cell_bytes);
        }
      }
      for (std::size_t i = 0; i < some.size(); ++i) {
        if (!follows(i)) {
          found[i] = find(bucket, some[i], groups[i]);
          fetch(stored, found[i]);
        }
      }
      Hits hits;
      for (std::size_t i = 0; i < some.size(); ++i) {
        if (!follows(i)) {
          hits = select(stored, first, last, found[i]);
        } else if (!next_in_block(stored, first, last, hits)) {
          const std::size_t group = group_of(bucket, some[i]);
          hits = select(stored, first, last, find(bucket, some[i], group));
        }
        *out++ = static_cast<std::int64_t>(hits.begin) + std::countr_zero(hits.rest);
      }
    }
  }

  // Which of the sizes from `begin` on lie in the range: a bit for each of kChunk.
  template <class Stored>
  static std::uint64_t hits_at(std::span<const Stored> stored, std::size_t begin, Stored first,
                               Stored last) {
    // No && : half of all comparisons would be mispredicted.
    const auto holds = [=](Stored size) {
      return static_cast<std::uint8_t>(static_cast<std::uint8_t>(size >= first) &
                                       static_cast<std::uint8_t>(size <= last));
    };
    std::uint8_t held[kChunk] = {};
    const Stored* const sizes = stored.data() + begin;
    if (begin + kChunk <= stored.size()) {
      for (std::size_t i = 0; i < kChunk; ++i) {  // many at once
        held[i] = holds(sizes[i]);
      }
    } else {
      for (std::size_t i = 0; begin + i < stored.size(); ++i) {
        held[i] = holds(sizes[i]);
      }
    }
    static_assert(std::endian::native == std::endian::little && kChunk == 64);
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < kChunk; i += 8) {
      std::uint64_t eight = 0;
      std::memcpy(&eight, held + i, sizeof(eight));
      // Moves the lowest bit of each byte into the highest byte.
      bits |= ((eight * 0x0102040810204080ULL) >> 56U) << i;
    }
    return bits;
  }

  // Moves to the next sample of the bucket if it lies in the same block.
  template <class Stored>
  bool next_in_block(std::span<const Stored> stored, Stored first, Stored last, Hits& hits) const {
    hits.rest &= hits.rest - 1;
    while (hits.rest == 0) {
      const std::size_t next = hits.begin + kChunk;
      if (next % counts_.length == 0 || next >= stored.size()) {
        return false;
      }
      hits = {next, hits_at(stored, next, first, last)};
    }
    return true;
  }

  // From the end of the block that is nearer.
  template <class Stored>
  [[nodiscard]] Hits select(std::span<const Stored> stored, Stored first, Stored last,
                            const Found& found) const {
    const bool forward = found.before <= found.after;
    const std::size_t end = std::min(found.begin + counts_.length, stored.size());
    Hits hits{forward ? found.begin : (end - 1) / kChunk * kChunk, 0};
    auto others = static_cast<int>(forward ? found.before : found.after);
    while (true) {
      hits.rest = hits_at(stored, hits.begin, first, last);
      const int count = std::popcount(hits.rest);
      if (count > others) {
        others = forward ? others : count - 1 - others;
        break;
      }
      others -= count;
      hits.begin += forward ? kChunk : -kChunk;
    }
    while (others-- > 0) {
      hits.rest &= hits.rest - 1;
    }
    return hits;
  }

  SizeSpan<T> sizes_;
  std::vector<Range> ranges_;
  BucketCounts counts_;
};

}  // namespace brim::batching::detail
