#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace brim::batching {

// Buckets are ranges of sizes, given by their boundaries in ascending order: bucket k holds the
// sizes in [boundaries[k], boundaries[k + 1]). Sizes are in any unit (tokens, nodes, bytes) and may
// be negative. All functions are safe to call from several threads at once.

/// Boundaries, and the number of sizes in each bucket (one less than boundaries).
struct Buckets {
  std::vector<std::int64_t> boundaries;
  std::vector<std::int64_t> counts;
};

/// Buckets that are as narrow as `min_bucket_count` allows and never wider than `max_width`.
///
/// From the smallest size on, a bucket takes in sizes until it holds `min_bucket_count` samples;
/// the next distinct size opens the next bucket. A bucket of `max_width` ends there, with however
/// many samples it has, and a gap in the sizes is filled with empty buckets of `max_width`.
/// The last boundary is one above the largest size.
///
/// Linear in the samples: by counting if the sizes are close together, else by a radix sort.
///
/// @throws std::invalid_argument for no sizes, a width or count below 1, a size of 2^63 - 1 (which
/// no boundary can lie above), and for gaps that would make more than 2^24 buckets.
///
/// @code
/// const Buckets buckets = create_buckets(lengths, 64, 1000);
/// @endcode
[[nodiscard]] BRIM_API Buckets create_buckets(std::span<const std::int64_t> sizes,
                                              std::int64_t max_width,
                                              std::int64_t min_bucket_count);

/// Boundaries of at most `buckets` buckets for which padding is least: the sum over all samples of
/// (longest in its bucket - its size). The first boundary is the smallest size; the last lies just
/// above the largest (one above it, or the next double).
///
/// Exact, by a dynamic programme over the distinct sizes with divide and conquer: O(buckets * m *
/// log m) for m of them. Two limits: with more than 20 000 distinct sizes, only some 20 000 of them
/// are considered as boundaries (evenly spread, half by the number of samples and half by size),
/// which adds a small share to the padding; and padding is added up in double precision, so that
/// near-ties of doubles, or of integers whose padding could pass 2^53, may be decided either way.
///
/// @throws std::invalid_argument for no sizes, no buckets, a size of 2^63 - 1, or one that is not
/// finite, naming its index.
///
/// @code
/// const std::vector<std::int64_t> boundaries = least_padding_boundaries(lengths, 16);
/// @endcode
[[nodiscard]] BRIM_API std::vector<std::int64_t> least_padding_boundaries(
    std::span<const std::int64_t> sizes, std::size_t buckets);
/// The same for sizes that are fractions.
[[nodiscard]] BRIM_API std::vector<double> least_padding_boundaries(std::span<const double> sizes,
                                                                    std::size_t buckets);

/// Which samples lie in which bucket. Those of bucket k are `indices[offsets[k] .. offsets[k + 1])`
/// in ascending order. Samples outside all buckets are in none: their number is that of the sizes
/// less that of the indices.
struct BucketGroups {
  std::vector<std::int64_t> indices;
  std::vector<std::int64_t> offsets;
};

/// Sorts samples into buckets, by counting: linear in the samples, logarithmic in the buckets.
/// Infinite boundaries are allowed.
/// @throws std::invalid_argument for less than two boundaries, boundaries that do not ascend, more
/// than 2^24 buckets, or a size that is not finite, naming its index.
[[nodiscard]] BRIM_API BucketGroups group_by_bucket(std::span<const std::int64_t> sizes,
                                                    std::span<const std::int64_t> boundaries);
/// The same for sizes that are fractions.
[[nodiscard]] BRIM_API BucketGroups group_by_bucket(std::span<const double> sizes,
                                                    std::span<const double> boundaries);

}  // namespace brim::batching
