#pragma once

#include <brim/export.h>
#include <brim/predict/memory_model.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace brim {

/// Options of probe_memory and probe_batches.
struct ProbeOptions {
  std::optional<c10::Device> device{};  ///< default_device() if empty
  std::optional<std::int64_t>
      budget{};  ///< bytes that the work may hold; 90 % of what is free if empty
  /// The number of sizes to measure at most; twice as many where one size grows too little to reach
  /// the largest with these.
  std::int64_t probes = 7;
  /// The number of further sizes to measure at most, for probe_memory of one size: each is the
  /// largest, up to the largest candidate, that all before show to fit. 0 measures candidates only.
  std::int64_t near_budget = 0;
  std::function<void()> cleanup{};  ///< see CollectOptions
  std::function<void()> collect_garbage{};
  std::function<void(std::span<std::int64_t>)> most_of_ranks{};
};

/// Measures a few of the sizes and fits a MemoryModel to them.
///
///     auto model = brim::probe_memory([&](std::int64_t n) { step(n); }, {1, 2, 4, 8, 16, 32, 64});
///
/// It chooses the sizes itself: the smallest first (once unmeasured, to warm up), then larger ones,
/// each only if its need is expected to stay within the budget. A size that runs out of memory
/// anyway is a lower bound for the fit. `model.samples()` shows what was measured.
///
/// @throws std::invalid_argument if the sizes are empty, not positive, or too few different ones
///     are given (2, of batches 3) or could be measured; c10::ValueError for a device that does not
///     exist; c10::OutOfMemoryError if even the smallest size does not fit; and what `work` throws.
BRIM_API MemoryModel probe_memory(const std::function<void(std::int64_t)>& work,
                                  const std::vector<std::int64_t>& sizes,
                                  const ProbeOptions& options = {});

/// The same over batches: `sizes` are pairs of a number of samples and their length.
BRIM_API MemoryModel probe_memory(const std::function<void(std::int64_t, std::int64_t)>& work,
                                  const std::vector<std::pair<std::int64_t, std::int64_t>>& sizes,
                                  const ProbeOptions& options = {});

/// The same, for batches that come as close to the budget as possible. After `probes` batches it
/// measures up to 16 near the budget, where bounds leave most of it unused.
/// @param lengths those of the samples, or some that represent them: the shortest, the longest and
///     a few dozen in between.
/// @param most the number of samples that a batch may have.
BRIM_API MemoryModel probe_batches(const std::function<void(std::int64_t, std::int64_t)>& work,
                                   const std::vector<std::int64_t>& lengths, std::int64_t most,
                                   const ProbeOptions& options = {});

}  // namespace brim
