#include <brim/memory/bytes.h>
#include <brim/memory/stats.h>
#include <brim/predict/collect_peaks.h>
#include <brim/predict/probe.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>

#include "number_text.h"
#include "predict/probe_plan.h"

namespace brim {
namespace {

using Shape = detail::ProbePlan::Shape;
using Work = std::function<void(std::int64_t, std::int64_t)>;

// Where no budget is given. The last of a device's memory is not ours to take for a measurement.
constexpr double kShareOfFree = 0.9;

std::string name_of(const Shape& shape, SizeKind kind) {
  return kind == SizeKind::batch
             ? "(" + detail::text(shape.first) + ", " + detail::text(shape.second) + ")"
             : detail::text(shape.first);
}

/// Bytes that may be held on the device in all, older tensors included.
double limit_of(c10::Device device, const std::optional<std::int64_t>& budget) {
  const MemoryStats stats = memory_stats(device);
  const auto held = static_cast<double>(stats.allocated);
  const auto free = static_cast<double>(stats.free);
  if (budget) {
    return std::min(static_cast<double>(*budget), held + free);
  }
  return held + kShareOfFree * free;
}

MemoryModel probe(const Work& work, std::vector<Shape> sizes, SizeKind kind,
                  const ProbeOptions& options) {
  detail::ProbePlan plan(std::move(sizes), kind, options.probes);
  if (options.budget && *options.budget <= 0) {
    throw std::invalid_argument("budget must be a positive number of bytes, got " +
                                detail::text(*options.budget));
  }
  const c10::Device device = options.device ? resolve_device(*options.device) : default_device();
  const CollectOptions collect{device, options.cleanup, options.collect_garbage};
  const auto measure = [&](const Shape& shape) {
    return collect_peaks(std::function<double(std::size_t)>([&](std::size_t) {
                           work(shape.first, shape.second);
                           return 0.0;
                         }),
                         1, collect)
        .front();
  };
  // The first call makes what later ones find ready: kernels, workspaces, an optimizer's state.
  const PeakSample warm_up = measure(plan.smallest());
  TORCH_CHECK_WITH(OutOfMemoryError, !warm_up.out_of_memory, device.is_cpu() ? "CPU" : device.str(),
                   " out of memory. Even the smallest of the sizes, ",
                   name_of(plan.smallest(), kind), ", does not fit: it needs at least ",
                   format_bytes(warm_up.peak));
  while (const auto shape = plan.next(limit_of(device, options.budget))) {
    const PeakSample sample = measure(*shape);
    plan.add(*shape, static_cast<double>(sample.peak), static_cast<double>(sample.start),
             sample.out_of_memory);
  }
  MemoryModel model;
  try {
    model.fit(plan.samples(), kind);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        std::string(error.what()) + "; the others are expected to need more than the limit of " +
        format_bytes(static_cast<std::int64_t>(limit_of(device, options.budget))));
  }
  return model;
}

}  // namespace

MemoryModel probe_memory(const std::function<void(std::int64_t)>& work,
                         const std::vector<std::int64_t>& sizes, const ProbeOptions& options) {
  std::vector<Shape> shapes;
  shapes.reserve(sizes.size());
  for (const std::int64_t size : sizes) {
    shapes.emplace_back(size, 0);
  }
  return probe([&](std::int64_t size, std::int64_t) { work(size); }, std::move(shapes),
               SizeKind::size, options);
}

MemoryModel probe_memory(const std::function<void(std::int64_t, std::int64_t)>& work,
                         const std::vector<std::pair<std::int64_t, std::int64_t>>& sizes,
                         const ProbeOptions& options) {
  return probe(work, sizes, SizeKind::batch, options);
}

}  // namespace brim
