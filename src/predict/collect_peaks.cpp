#include <ATen/Context.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/release.h>
#include <brim/memory/stats.h>
#include <brim/predict/collect_peaks.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "memory/backend.h"

namespace brim {
namespace {

/// The least that the work would have needed on the watched device.
std::int64_t lower_bound(const PeakSample& held, const OomCause& cause, c10::Device device) {
  if (names_another(cause, device) || !cause.requested) {
    return held.peak;
  }
  // If the error does not say what was in use, take the peak: most allocations fail at the top.
  return std::max(held.peak, cause.in_use.value_or(held.peak) + *cause.requested);
}

/// Runs one piece of work. An exception about memory has been released when this returns; any other
/// is handed back.
PeakSample measure(const std::function<double(std::size_t)>& work, std::size_t index,
                   c10::Device device, std::exception_ptr& other) {
  PeakSample sample;
  OomCause cause;
  at::Context& context = at::globalContext();
  const bool onednn = device.is_cpu() && context.userEnabledMkldnn();
  PeakMeter meter(device);
  try {
    sample.feature = work(index);
  } catch (...) {
    std::exception_ptr error = std::current_exception();
    cause = classify(error);
    if (!cause) {
      other = std::move(error);
    }
  }
  meter.close();
  sample.start = meter.start();
  sample.base = device.is_cpu() ? meter.start() - meter.freed() : 0;
  sample.peak = meter.start() + meter.peak();
  if (onednn && !context.userEnabledMkldnn()) {
    // It was refused memory, and torch took a kernel that needs less. With more memory it will not.
    context.setUserEnabledMkldnn(true);
    sample.out_of_memory = true;
    sample.feature.reset();
  }
  if (cause) {
    sample.out_of_memory = true;
    sample.requested = cause.requested;
    sample.peak = lower_bound(sample, cause, device);
  }
  return sample;
}

/// The sample of the rank that needed most.
void share(PeakSample& sample, const CollectOptions& options) {
  constexpr std::int64_t kUnknown = std::numeric_limits<std::int64_t>::max();
  std::int64_t numbers[] = {sample.peak, sample.start, sample.out_of_memory ? 1 : 0,
                            sample.out_of_memory ? sample.requested.value_or(kUnknown) : -1,
                            -sample.base};  // the least of all
  options.most_of_ranks(numbers);
  sample.peak = numbers[0];
  sample.start = numbers[1];
  sample.base = -numbers[4];
  sample.out_of_memory = numbers[2] != 0;
  sample.requested.reset();
  if (sample.out_of_memory) {
    sample.feature.reset();
    if (numbers[3] != kUnknown) {
      sample.requested = numbers[3];
    }
  }
}

}  // namespace

std::vector<PeakSample> collect_peaks(const std::function<double(std::size_t)>& work,
                                      std::size_t count, const CollectOptions& options) {
  TORCH_CHECK_VALUE(work, "work is empty: it must be a function");
  const c10::Device device = options.device ? resolve_device(*options.device) : default_device();
  std::vector<PeakSample> samples;
  samples.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::exception_ptr other;
    samples.push_back(measure(work, i, device, other));
    const PeakSample& sample = samples.back();
    if (sample.out_of_memory) {
      if (options.collect_garbage && memory_stats(device).allocated > sample.start) {
        options.collect_garbage();
      }
      release_cached(device);
    }
    try {
      if (options.cleanup) {
        options.cleanup();
      }
    } catch (...) {
      if (!other) {
        throw;
      }
      // The work's own error came first, and it is the one that explains this one.
    }
    if (other) {
      std::rethrow_exception(other);
    }
    if (options.most_of_ranks) {
      share(samples.back(), options);
    }
  }
  return samples;
}

}  // namespace brim
