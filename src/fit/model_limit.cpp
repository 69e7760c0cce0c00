#include <brim/fit/model_limit.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <vector>

#include "number_text.h"

namespace brim {

batching::Limit model_limit(const MemoryModel& model, std::int64_t bytes) {
  if (!model.fitted()) {
    throw std::invalid_argument("cost is a memory model that has not been fitted");
  }
  if (model.kind() == SizeKind::size) {
    const std::int64_t largest = model.largest_size(static_cast<double>(bytes));
    if (largest <= 0) {
      throw std::invalid_argument(
          "max_total_size is " + detail::text(bytes) + " bytes, and the memory model needs " +
          detail::text(model.safe_peak(1.0)) + " for a batch of total size 1");
    }
    return {batching::Cost::sum(), largest};
  }
  // Batches ask about the same lengths again and again, and an answer takes microseconds. An entry
  // is the answer plus 1; 0 means not asked yet.
  constexpr std::size_t kLengths = std::size_t{1} << 16;
  const auto answers = std::make_shared<std::vector<std::atomic<std::int64_t>>>(kLengths);
  return {batching::Cost::custom(
              [model, answers](double longest, double budget) {
                if (longest >= static_cast<double>(kLengths) || longest != std::floor(longest)) {
                  return model.largest_batch(longest, budget);
                }
                std::atomic<std::int64_t>& entry = (*answers)[static_cast<std::size_t>(longest)];
                std::int64_t answer = entry.load(std::memory_order_relaxed);
                if (answer == 0) {
                  answer = model.largest_batch(longest, budget) + 1;
                  entry.store(answer, std::memory_order_relaxed);
                }
                return answer - 1;
              },
              [model](std::int64_t n, double longest) {
                return model.safe_peak(static_cast<double>(n), longest);
              }),
          bytes};
}

}  // namespace brim
