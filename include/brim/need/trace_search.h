#pragma once

#include <brim/export.h>
#include <brim/need/attempt.h>
#include <brim/need/size_search.h>
#include <brim/predict/allocator_model.h>
#include <brim/predict/memory_trace.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace brim {

/// Finds the largest size at which work fits an allocator, from traces of it on fake tensors: the
/// device need not exist. Not thread-safe.
///
/// @code
/// TraceSearch search({.kind = AllocatorKind::caching}, 1, 4096);
/// while (!search.sizes().finished()) {
///   search.record(search.sizes().next(), trace, start, capacity);  // of the work at that size
/// }
/// search.sizes().best();
/// @endcode
class BRIM_API TraceSearch {
 public:
  /// @param options of the allocator; its capacity is not read.
  /// @throws std::invalid_argument naming what is wrong, its value, and what is allowed.
  TraceSearch(const AllocatorOptions& options, std::int64_t lower, std::int64_t upper);

  /// Takes in what the work asks for at a size, and says whether that fits.
  /// @param start the event at which the work starts; what is held then is held at any size.
  /// @param capacity bytes that may be held in all.
  bool record(std::int64_t size, const MemoryTrace& trace, std::int64_t start,
              std::int64_t capacity);

  /// The search, of which the size to trace next is to be asked.
  [[nodiscard]] const SizeSearch& sizes() const noexcept { return search_; }

  /// What was traced, oldest first, for SizeSearch::remember.
  [[nodiscard]] const std::vector<Attempt>& traced() const noexcept { return traced_; }

 private:
  AllocatorOptions options_;
  std::shared_ptr<AllocatorModel> device_;  // as the work finds it
  SizeSearch search_;
  std::vector<Attempt> traced_;
};

}  // namespace brim
