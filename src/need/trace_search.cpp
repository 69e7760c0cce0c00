#include <brim/need/trace.h>
#include <brim/need/trace_search.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

namespace brim {
namespace {

/// The allocator with what is held before the work.
AllocatorModel before_work(AllocatorOptions options, const MemoryTrace& trace, std::int64_t start) {
  const std::int64_t capacity = std::exchange(options.capacity, AllocatorOptions::kUnlimited);
  AllocatorModel model(options);
  for (const auto& event : std::span(trace.events()).first(static_cast<std::size_t>(start))) {
    if (event.action == MemoryTrace::Action::allocate) {  // the two number allocations alike
      const MemoryTrace::Allocation& each = trace.allocation(event.allocation);
      model.allocate(each.bytes, each.stream);
    } else if (event.action == MemoryTrace::Action::free) {
      model.free(event.allocation);
    }
  }
  model.set_capacity(capacity);
  return model;
}

}  // namespace

TraceSearch::TraceSearch(const AllocatorOptions& options, std::int64_t lower, std::int64_t upper)
    : options_(options),
      device_(std::make_shared<AllocatorModel>(options)),
      search_({.start = Start::traced,
               .upper = upper,
               .lower = lower,
               .circumstances = {.packs = options.kind == AllocatorKind::exact,
                                 .allocator = [device = device_] { return *device; }}}) {}

bool TraceSearch::record(std::int64_t size, const MemoryTrace& trace, std::int64_t start,
                         std::int64_t capacity) {
  options_.capacity = capacity;
  const TraceReport report = replay(trace, options_, start, 0);
  const bool fits = report.fits() && report.held_before + report.peak <= capacity;
  *device_ = before_work(options_, trace, start);
  traced_.push_back({.values = {size},
                     .outcome = fits ? OomKind::none : OomKind::device_memory,
                     .peak = report.peak,
                     .requested = 0,
                     .held = report.held_before,
                     .available = std::max<std::int64_t>(capacity - report.held_before, 0),
                     .trace = trace_of(trace, start)});
  search_.record(traced_.back());
  return fits;
}

}  // namespace brim
