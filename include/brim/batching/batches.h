#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace brim::batching {

/// Why a sample is in no batch.
enum class LeftOutReason : std::uint8_t {
  over_budget,        ///< it exceeds the budget by itself
  outside_buckets,    ///< no bucket holds its size
  dropped_last,       ///< its batch was not full, and such batches are dropped
  too_few_for_ranks,  ///< the last step had too few samples for all ranks
};

/// A sample that is in no batch, by its index.
struct LeftOut {
  std::int64_t index;
  LeftOutReason reason;

  friend bool operator==(const LeftOut&, const LeftOut&) = default;
};

/// Batches in one array: batch b is `indices[offsets[b]]` up to, but not including,
/// `indices[offsets[b + 1]]`.
struct Batches {
  std::vector<std::int64_t> indices;
  std::vector<std::int64_t> offsets{0};
  /// What each batch costs, for balancing ranks: a share of the (fullest) budget, or about
  /// n × longest if batches are limited by their number of samples.
  std::vector<double> loads;
  std::vector<LeftOut> left_out;

  /// The number of batches.
  [[nodiscard]] std::size_t count() const { return offsets.size() - 1; }

  [[nodiscard]] std::span<const std::int64_t> operator[](std::size_t batch) const {
    const auto begin = static_cast<std::size_t>(offsets[batch]);
    return {indices.data() + begin, static_cast<std::size_t>(offsets[batch + 1]) - begin};
  }

  /// Makes a batch of what was added to `indices` since the last call.
  void close(double load) {
    offsets.push_back(static_cast<std::int64_t>(indices.size()));
    loads.push_back(load);
  }

  void clear() {
    indices.clear();
    offsets.resize(1);
    loads.clear();
    left_out.clear();
  }
};

}  // namespace brim::batching
