#include <brim/fit/model_limit.h>

#include "check_argument.h"

namespace brim {

batching::Limit model_limit(const MemoryModel& model, std::int64_t bytes) {
  detail::check_argument(model.fitted(), "cost is a memory model that has not been fitted");
  if (model.kind() == SizeKind::size) {
    const std::int64_t largest = model.largest_size(static_cast<double>(bytes));
    detail::check_argument(largest > 0, "max_total_size is ", bytes,
                           " bytes, and the memory model needs ", model.safe_peak(1.0),
                           " for a batch of total size 1");
    return {batching::Cost::sum(), largest};
  }
  return {batching::Cost::custom(batching::remembered([model](double longest, double budget) {
                                   return model.largest_batch(longest, budget);
                                 }),
                                 [model](std::int64_t n, double longest) {
                                   return model.safe_peak(static_cast<double>(n), longest);
                                 }),
          bytes};
}

}  // namespace brim
