#include <brim/predict/scaled_trace.h>

#include <algorithm>

#include "bisect.h"
#include "check_argument.h"
#include "need/request_growth.h"

namespace brim {
namespace {

/// How many allocations there are before the work.
std::size_t held_before(const SizedTrace& at) {
  const auto& events = at.trace.events();
  return static_cast<std::size_t>(
      std::count_if(events.begin(), events.begin() + at.start, [](const MemoryTrace::Event& event) {
        return event.action == MemoryTrace::Action::allocate;
      }));
}

bool same_events(const SizedTrace& a, const SizedTrace& b) {
  return a.start == b.start && a.trace.size() == b.trace.size() &&
         std::equal(a.trace.events().begin(), a.trace.events().end(), b.trace.events().begin(),
                    [](const MemoryTrace::Event& x, const MemoryTrace::Event& y) {
                      return x.action == y.action && x.allocation == y.allocation;
                    });
}

void check_sizes(const SizedTrace& trace, const SizedTrace& other) {
  detail::check_argument(trace.size > 0 && other.size > 0 && trace.size != other.size,
                         "size must be positive and differ, got ", trace.size, " and ", other.size);
}

}  // namespace

std::optional<MemoryTrace> scaled(const SizedTrace& trace, const SizedTrace& other,
                                  std::int64_t size) {
  check_sizes(trace, other);
  if (!same_events(trace, other)) {
    return std::nullopt;
  }
  const std::size_t before = held_before(trace);
  MemoryTrace result;
  for (const MemoryTrace::Event& event : trace.trace.events()) {
    const auto which = static_cast<std::size_t>(event.allocation);
    switch (event.action) {
      case MemoryTrace::Action::empty_cache:
        result.empty_cache();
        break;
      case MemoryTrace::Action::free:
        result.free(event.allocation);
        break;
      case MemoryTrace::Action::allocate: {
        const MemoryTrace::Allocation& here = trace.trace.allocations()[which];
        const auto bytes = static_cast<double>(here.bytes);
        const auto there = static_cast<double>(other.trace.allocations()[which].bytes);
        const detail::RequestGrowth growth(bytes, static_cast<double>(trace.size), there,
                                           static_cast<double>(other.size));
        result.allocate(which < before ? here.bytes : growth.at(static_cast<double>(size)),
                        here.kind, 0, here.stream);
        break;
      }
    }
  }
  return result;
}

std::optional<std::int64_t> largest_scaled(const SizedTrace& trace, const SizedTrace& other,
                                           const AllocatorOptions& options, std::int64_t low,
                                           std::int64_t high) {
  check_sizes(trace, other);
  detail::check_argument(low >= 1 && high >= low, "low must be from 1 to high, got ", low, " and ",
                         high);
  if (!same_events(trace, other)) {
    return std::nullopt;
  }
  const auto replayed = [&](std::int64_t size, const AllocatorOptions& allocator) {
    return replay(*scaled(trace, other, size), allocator, trace.start, 0).fits();
  };
  AllocatorOptions bytes = options;
  bytes.kind = AllocatorKind::exact;  // no size that exceeds it in bytes fits in blocks
  std::int64_t size = detail::largest_that_holds(
      low - 1, high + 1, [&](std::int64_t each) { return replayed(each, bytes); });
  // Blocks that do not pack waste a quarter at most, as a rule.
  constexpr std::int64_t kStep = 400;
  const std::int64_t least = std::max(low, size - size / 4);
  const std::int64_t step = std::max<std::int64_t>(size / kStep, 1);
  const auto packs = [&](std::int64_t each) { return replayed(each, options); };
  std::int64_t above = size + 1;  // does not fit
  for (; size >= least; above = size, size -= step) {
    if (packs(size)) {
      return detail::largest_that_holds(size, above, packs);
    }
  }
  return detail::largest_that_holds(low - 1, least, packs);
}

}  // namespace brim
