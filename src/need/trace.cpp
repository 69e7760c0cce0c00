#include <brim/need/trace.h>
#include <brim/predict/memory_trace.h>

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_map>

#include "need/index_of.h"

namespace brim {
namespace {

using detail::index_of;

/// Marks what a failed attempt had made and left, such as the first gradients of a backward pass.
void mark_leftovers(Trace& trace, const Trace& failed) {
  std::unordered_map<std::int64_t, std::size_t> left;  // by address: its request
  for (std::size_t i = failed.older; i < failed.requests.size(); ++i) {
    if (!failed.requests[i].freed) {
      left[failed.requests[i].address] = i;
    }
  }
  if (left.empty()) {
    return;
  }
  const auto same = matched(failed, trace);
  std::vector<bool> made(trace.requests.size());
  for (const std::int32_t event : trace.events) {
    if (event >= 0) {
      made[index_of(event)] = true;
      continue;
    }
    const std::size_t older = index_of(~event);
    const auto found = older < trace.older ? left.find(trace.requests[older].address) : left.end();
    if (found == left.end() ||
        failed.requests[found->second].bytes != trace.requests[older].bytes) {
      continue;
    }
    trace.requests[older].from_failure = true;
    // Freed before the call came to where it is made: the next call will not have it at all.
    const std::int32_t maker = same[found->second];
    trace.requests[older].made_again = maker != Trace::kNone && !made[index_of(maker)];
  }
}

/// Adds to `trace` what a failed attempt before it freed of what the call before had left, at the
/// same place: the next call will do that itself.
void adopt_frees(Trace& trace, const Trace& failed) {
  if (failed.older == 0) {
    return;
  }
  const auto same = matched(failed, trace);
  std::vector<Trace::Request> requests(
      failed.requests.begin(), failed.requests.begin() + static_cast<std::ptrdiff_t>(failed.older));
  const auto shift = static_cast<std::int32_t>(failed.older);
  // By request of the trace: what is freed right before it is made.
  std::unordered_map<std::int32_t, std::vector<std::int32_t>> frees;
  std::vector<std::int32_t> waiting;
  for (const std::int32_t event : failed.events) {
    if (event < 0 && index_of(~event) < failed.older) {
      waiting.push_back(event);
    } else if (event >= 0 && same[index_of(event)] != Trace::kNone && !waiting.empty()) {
      auto& there = frees[same[index_of(event)]];
      there.insert(there.end(), waiting.begin(), waiting.end());
      waiting.clear();
    }
  }
  const auto shifted = [&](std::int32_t request) {
    return request < 0 ? request : request + shift;
  };
  std::vector<std::int32_t> events;
  for (const std::int32_t event : trace.events) {
    if (const auto found = frees.find(event); found != frees.end()) {
      events.insert(events.end(), found->second.begin(), found->second.end());
    }
    events.push_back(event < 0 ? ~shifted(~event) : shifted(event));
  }
  events.insert(events.end(), waiting.begin(), waiting.end());  // as late as that, for all we know
  for (Trace::Request& request : requests) {
    request.successor = Trace::kNone;
  }
  for (Trace::Request& request : trace.requests) {
    request.successor = shifted(request.successor);
    requests.push_back(request);
  }
  trace.requests = std::move(requests);
  trace.events = std::move(events);
  trace.older += failed.older;
}

/// Tells what the next call will free where this one freed a block that it had not made: the block
/// of the same role that this one left. Roles are known from the call before; of blocks that are
/// older than that, their bytes tell (a gradient has those of its parameter).
void find_successors(Trace& trace, const Trace* before,
                     const std::function<bool(std::int64_t)>& in_use) {
  std::vector<std::int32_t> roles;                      // by request of the call before
  std::unordered_map<std::int64_t, std::int32_t> left;  // by address: its request
  if (before != nullptr) {
    roles = matched(*before, trace);
    for (std::size_t i = before->older; i < before->requests.size(); ++i) {
      if (!before->requests[i].freed) {
        left[before->requests[i].address] = static_cast<std::int32_t>(i);
      }
    }
  }
  std::unordered_map<std::int64_t, std::vector<std::int32_t>> kept;  // by bytes, the last one first
  std::vector<bool> taken(trace.requests.size());
  for (std::size_t i = trace.requests.size(); i-- > trace.older;) {
    if (!trace.requests[i].freed) {
      kept[trace.requests[i].bytes].push_back(static_cast<std::int32_t>(i));
    }
  }
  for (std::size_t i = 0; i < trace.older; ++i) {
    Trace::Request& older = trace.requests[i];
    if (const auto found = left.find(older.address); found != left.end()) {
      const std::int32_t role = roles[index_of(found->second)];
      if (role != Trace::kNone && !trace.requests[index_of(role)].freed && !older.from_failure) {
        older.successor = role;
        taken[index_of(role)] = true;
      }
      left.erase(found);
    }
  }
  for (std::size_t i = 0; i < trace.older; ++i) {
    Trace::Request& older = trace.requests[i];
    auto& same = kept[older.bytes];
    while (!same.empty() && taken[index_of(same.back())]) {
      same.pop_back();
    }
    if (older.successor == Trace::kNone && !older.from_failure && !same.empty()) {
      older.successor = same.back();
      taken[index_of(same.back())] = true;
    }
  }
  // What the call before did not have adds up, as far as is known.
  if (before != nullptr) {
    std::vector<bool> had(trace.requests.size());
    for (const std::int32_t role : roles) {
      if (role != Trace::kNone) {
        had[index_of(role)] = true;
      }
    }
    for (std::size_t i = trace.older; i < trace.requests.size(); ++i) {
      trace.requests[i].adds_up = !had[i];
    }
  }
  // As does what the call before left and this one has not freed.
  for (const auto& [address, request] : left) {
    const std::int32_t role = roles[index_of(request)];
    if (role != Trace::kNone && in_use && in_use(address)) {
      trace.requests[index_of(role)].adds_up = true;
    }
  }
}

}  // namespace

std::shared_ptr<const Trace> trace_of(std::span<const AllocationEvent> events, bool complete,
                                      const Trace* before,
                                      std::span<const std::shared_ptr<const Trace>> failed,
                                      const std::function<bool(std::int64_t)>& in_use) {
  auto trace = std::make_shared<Trace>();
  trace->complete = complete;
  const auto request_of = [](const AllocationEvent& event) {
    return Trace::Request{.bytes = event.bytes,
                          .stream = event.stream,
                          .address = static_cast<std::int64_t>(event.address),
                          .operation = event.operation,
                          .name = event.name,
                          .path = event.path};
  };
  // Two passes: what was held before comes first.
  std::unordered_map<std::uintptr_t, std::int32_t> held;
  std::vector<std::int32_t> older(events.size(), Trace::kNone);  // by event: what it frees
  std::size_t refused = 0;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const AllocationEvent& event = events[i];
    refused += event.refused ? 1 : 0;
    if (event.refused) {
      continue;
    }
    if (!event.freed) {
      held[event.address] = 0;
    } else if (held.erase(event.address) == 0) {
      older[i] = static_cast<std::int32_t>(trace->requests.size());
      trace->requests.push_back(request_of(event));
      trace->requests.back().freed = true;
    }
  }
  trace->tolerates_refusal = refused > (complete ? 0U : 1U);  // the last one ended it
  trace->older = trace->requests.size();
  held.clear();
  trace->events.reserve(events.size());
  const AllocationEvent* fatal = nullptr;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const AllocationEvent& event = events[i];
    if (event.refused) {
      fatal = &event;
    } else if (older[i] != Trace::kNone) {
      trace->events.push_back(~older[i]);
    } else if (event.freed) {
      const std::int32_t request = held[event.address];
      trace->requests[index_of(request)].freed = true;
      trace->events.push_back(~request);
    } else {
      const auto request = static_cast<std::int32_t>(trace->requests.size());
      held[event.address] = request;
      trace->requests.push_back(request_of(event));
      trace->events.push_back(request);
    }
  }
  if (!complete) {
    // What came after the refused request is its clean-up.
    const auto last =
        fatal == nullptr ? events.size() : static_cast<std::size_t>(fatal - events.data());
    std::size_t kept = 0;
    for (std::size_t i = 0; i < last; ++i) {
      kept += events[i].refused ? 0 : 1;
    }
    trace->events.resize(std::min(kept, trace->events.size()));
    if (fatal != nullptr) {
      trace->events.push_back(static_cast<std::int32_t>(trace->requests.size()));
      trace->requests.push_back(request_of(*fatal));
      trace->requests.back().freed = true;
    }
    return trace;
  }
  for (const auto& each : failed) {
    mark_leftovers(*trace, *each);
  }
  for (const auto& each : failed) {
    adopt_frees(*trace, *each);
  }
  find_successors(*trace, before, in_use);
  return trace;
}

std::shared_ptr<const Trace> trace_of(const MemoryTrace& trace, std::int64_t start) {
  auto result = std::make_shared<Trace>();
  result->foreseen = true;
  const auto& events = trace.events();
  const auto& allocations = trace.allocations();
  std::vector<std::int32_t> number(allocations.size(), Trace::kNone);  // by allocation
  std::vector<bool> made(allocations.size());                          // by the work
  for (auto event = events.begin() + start; event != events.end(); ++event) {
    const auto which = static_cast<std::size_t>(event->allocation);
    if (event->action == MemoryTrace::Action::allocate) {
      made[which] = true;
    } else if (event->action == MemoryTrace::Action::free && !made[which]) {
      number[which] = static_cast<std::int32_t>(result->requests.size());
      result->requests.push_back(
          {.bytes = allocations[which].bytes, .stream = allocations[which].stream, .freed = true});
    }
  }
  result->older = result->requests.size();
  std::int32_t place = -1;
  std::int32_t operation = -1;
  std::size_t first_of_later = 0;  // request
  for (auto event = events.begin() + start; event != events.end(); ++event) {
    if (event - events.begin() == trace.last_call()) {
      result->later = result->events.size();
      first_of_later = result->requests.size();
    }
    if (event->action == MemoryTrace::Action::empty_cache) {
      continue;
    }
    const auto which = static_cast<std::size_t>(event->allocation);
    const MemoryTrace::Allocation& each = allocations[which];
    if (event->action == MemoryTrace::Action::free) {
      result->events.push_back(~number[which]);
      result->requests[index_of(number[which])].freed = true;
      continue;
    }
    operation += each.place == place && operation >= 0 ? 0 : 1;
    place = each.place;
    number[which] = static_cast<std::int32_t>(result->requests.size());
    // Another trace may number its places otherwise.
    const auto name = static_cast<std::uint64_t>(std::hash<std::string>{}(trace.place_text(place)));
    result->requests.push_back({.bytes = each.bytes,
                                .stream = each.stream,
                                .operation = operation,
                                .name = name,
                                .path = name});
    result->events.push_back(number[which]);
  }
  if (result->later > 0) {
    auto& requests = result->requests;
    const auto of_first = requests.begin() + static_cast<std::ptrdiff_t>(result->older);
    const auto of_later = requests.begin() + static_cast<std::ptrdiff_t>(first_of_later);
    Trace first;
    Trace later;
    first.requests.assign(of_first, of_later);
    later.requests.assign(of_later, requests.end());
    const auto same = matched(first, later);
    for (std::size_t i = 0; i < same.size(); ++i) {
      requests[result->older + i].successor =
          same[i] == Trace::kNone ? same[i] : same[i] + static_cast<std::int32_t>(first_of_later);
    }
  }
  return result;
}

std::shared_ptr<const Trace> trace_of_peak(std::int64_t bytes) {
  auto trace = std::make_shared<Trace>();
  trace->requests.push_back({.bytes = bytes, .operation = 0, .freed = true});
  trace->events.push_back(0);
  return trace;
}

}  // namespace brim
