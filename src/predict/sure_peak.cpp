#include "predict/sure_peak.h"

#include <brim/memory/stats.h>

#include <algorithm>

namespace brim::detail {
namespace {

/// Whether the device cannot hold what the failed work held and asked for. Ranks that measure
/// together share the sample, and find the same: they take the device with the least room.
bool is_explained(const PeakSample& failed, c10::Device device, const CollectOptions& options) {
  const MemoryStats now = memory_stats(device);
  std::int64_t least = -(now.allocated + now.free);
  if (options.most_of_ranks) {
    options.most_of_ranks({&least, 1});
  }
  return failed.requested && failed.peak > -least;
}

}  // namespace

PeakSample sure_peak(const std::function<void()>& work, std::int64_t limit,
                     const CollectOptions& options) {
  const c10::Device device = options.device ? resolve_device(*options.device) : default_device();
  const std::function<double(std::size_t)> call = [&](std::size_t) {
    work();
    return 0.0;
  };
  PeakSample sample = collect_peaks(call, 1, options).front();
  if (sample.out_of_memory && !is_explained(sample, device, options)) {
    sample = collect_peaks(call, 1, options).front();
  }
  if (sample.out_of_memory && !sample.requested) {
    sample.peak = std::max(sample.peak, limit + 1);
  }
  return sample;
}

}  // namespace brim::detail
