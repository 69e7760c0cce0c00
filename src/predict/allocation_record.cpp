#include <brim/predict/allocation_record.h>

#include <cmath>
#include <unordered_map>

namespace brim {

std::int64_t AllocationRecord::replaced() const {
  std::unordered_map<std::int64_t, std::size_t> missing;  // COUNT by bytes
  for (const Request& request : std::span(requests).first(older)) {
    ++missing[request.bytes];
  }
  std::int64_t bytes = 0;
  for (const Request& request : std::span(requests).subspan(older)) {
    if (const auto found = missing.find(request.bytes);
        found != missing.end() && found->second > 0) {
      --found->second;
      bytes += request.freed ? 0 : request.bytes;
    }
  }
  return bytes;
}

std::optional<std::int64_t> AllocationRecord::chosen(
    std::int64_t high, double available,
    const std::function<std::optional<std::int64_t>()>& choose) const {
  constexpr double kSameBytes = 1.0 / 1024;
  const std::lock_guard lock(mutex_);
  if (high != high_ || std::abs(available - available_) > kSameBytes * available) {
    chosen_ = choose();
    high_ = high;
    available_ = available;
  }
  return chosen_;
}

std::shared_ptr<const AllocationRecord> record_of(std::span<const AllocationEvent> events,
                                                  bool fitted) {
  auto record = std::make_shared<AllocationRecord>();
  const auto address = [](const AllocationEvent& event) {
    return static_cast<std::int64_t>(event.address);
  };
  std::int64_t refused = 0;
  // Two passes: what was held before comes first.
  std::unordered_map<std::uintptr_t, std::int32_t> held;
  std::vector<std::int32_t> older;  // by event: the number of the request that it frees, or -1
  for (const AllocationEvent& event : events) {
    older.push_back(-1);
    refused += event.refused ? 1 : 0;
    if (event.refused) {
      continue;
    }
    if (!event.freed) {
      held[event.address] = 0;
    } else if (held.erase(event.address) == 0) {
      older.back() = static_cast<std::int32_t>(record->requests.size());
      record->requests.push_back({event.bytes, event.stream, address(event), true});
    }
  }
  record->goes_on_refused = refused > (fitted ? 0 : 1);  // the last one ended it
  record->older = record->requests.size();
  held.clear();
  record->events.reserve(events.size());
  for (std::size_t i = 0; i < events.size(); ++i) {
    const AllocationEvent& event = events[i];
    if (event.refused) {
      continue;
    }
    if (older[i] >= 0) {
      record->events.push_back(~older[i]);
    } else if (event.freed) {
      const std::int32_t request = held[event.address];
      record->requests[static_cast<std::size_t>(request)].freed = true;
      record->events.push_back(~request);
    } else {
      const auto request = static_cast<std::int32_t>(record->requests.size());
      held[event.address] = request;
      record->requests.push_back({event.bytes, event.stream, address(event), false});
      record->events.push_back(request);
    }
  }
  return record;
}

}  // namespace brim
