#include "predict/parts_need.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "bisect.h"
#include "predict/growth.h"

namespace brim::detail {
namespace {

using PartRequests = std::span<const AllocationRecord::Request>;

PartRequests own_requests(const AllocationRecord& record) {
  return std::span(record.requests).subspan(record.older);
}

double sum_of(PartRequests requests) {
  double bytes = 0;
  for (const auto& request : requests) {
    bytes += static_cast<double>(request.bytes);
  }
  return bytes;
}

bool equal_bytes(const AllocationRecord::Request& a, const AllocationRecord::Request& b) {
  return a.bytes == b.bytes;
}

/// After how many requests they repeat, a divisor of `more`; 0: they do not.
std::size_t period(PartRequests requests, std::size_t more) {
  for (std::size_t length = 1; 2 * length <= requests.size(); ++length) {
    if (more % length == 0 &&
        std::ranges::equal(requests.first(length), requests.subspan(length, length), equal_bytes)) {
      return length;
    }
  }
  return 0;
}

/// Whether parts of `length` requests are `times` as large in the others, and all of them together
/// no larger: whatever the size, all items pass. (Equal layers repeat too, but then the sum grows.)
bool are_parts(PartRequests all, PartRequests others, std::size_t length, double times) {
  constexpr double kRounding = 0.01;
  const double part = sum_of(all.first(length));
  const double most = std::min(times * part, sum_of(all));
  const double larger = sum_of(others.first(std::min(length, others.size())));
  return std::abs(larger - most) <= kRounding * most &&
         std::abs(sum_of(all) - sum_of(others)) <= 0.5 * (most - part);
}

/// The bytes after each event, as seen from where the call begins.
struct HeldBytes {
  explicit HeldBytes(const AllocationRecord& record) {
    double now = 0;
    std::size_t made = record.older;
    for (const std::int32_t event : record.events) {
      const auto request = static_cast<std::size_t>(event < 0 ? ~event : event);
      const auto bytes = static_cast<double>(record.requests[request].bytes);
      now += event < 0 ? -bytes : bytes;
      made = event < 0 ? made : request + 1;
      least = std::min(least, now);
      after.push_back({made - record.older, now});
    }
  }

  /// The most from the request `first` on, until `last` is made.
  [[nodiscard]] double most(std::size_t first, std::size_t last) const {
    double bytes = 0;
    for (const auto& [made, now] : after) {
      bytes = made > first && made <= last ? std::max(bytes, now) : bytes;
    }
    return bytes;
  }

  /// Before the request is made.
  [[nodiscard]] double before(std::size_t request) const {
    double bytes = 0;
    for (const auto& [made, now] : after) {
      bytes = made <= request ? now : bytes;
    }
    return bytes;
  }

  struct After {
    std::size_t made;  // COUNT of requests until then
    double now;
  };
  std::vector<After> after;
  double least = 0;
};

}  // namespace

std::optional<PartsNeed> PartsNeed::of(const AllocationRecord& record, std::int64_t size,
                                       const AllocationRecord& other, std::int64_t other_size) {
  if (other_size < size) {
    return of(other, other_size, record, size);
  }
  const PartRequests requests = own_requests(record);
  const PartRequests fewer = own_requests(other);
  // What is the same at both sizes is outside of the parts.
  const auto first = static_cast<std::size_t>(
      std::ranges::mismatch(requests, fewer, equal_bytes).in1 - requests.begin());
  const auto last = requests.size() - static_cast<std::size_t>(
                                          std::mismatch(requests.rbegin(), requests.rend(),
                                                        fewer.rbegin(), fewer.rend(), equal_bytes)
                                              .first -
                                          requests.rbegin());
  const std::size_t outside = first + (requests.size() - last);
  if (first >= last || requests.size() < fewer.size() || fewer.size() <= outside) {
    return std::nullopt;
  }
  const PartRequests all = requests.subspan(first, last - first);
  const PartRequests others = fewer.subspan(first, fewer.size() - outside);
  const std::size_t length = period(all, requests.size() - fewer.size());
  if (length == 0 || !are_parts(all, others, length,
                                static_cast<double>(other_size) / static_cast<double>(size))) {
    return std::nullopt;
  }
  const HeldBytes held(record);
  const std::size_t second = first + length;
  PartsNeed need;
  need.size_ = static_cast<double>(size);
  need.parts_ = sum_of(all) / std::max(sum_of(all.first(length)), 1.0);
  need.outside_ = held.before(first) - held.least;
  need.runs_ = held.most(first, second) - held.before(first);
  const std::size_t third = second + length;
  need.leaves_ = held.before(third) - held.before(second);
  const double at_first = held.before(first) + need.leaves_;
  need.lingers_ = held.before(second) - at_first;
  need.meets_ = held.most(second, third) - at_first;
  need.ends_ = held.most(last, requests.size()) - held.least;
  const HeldBytes there(other);
  const double needed = there.most(0, fewer.size()) - there.least;
  const bool explains = alike(need.need_at(static_cast<double>(other_size)), needed);
  return explains ? std::optional(need) : std::nullopt;
}

double PartsNeed::need_at(double size) const {
  constexpr double kNoRest = 1e-9;
  const double times = std::min(size / size_, parts_);
  const double full = std::floor(parts_ / times + kNoRest);
  const double rest = std::max(parts_ - full * times, 0.0);
  const double in_full = full > 1 ? std::max(runs_, meets_) * times : runs_ * times;
  const double in_rest = std::max(runs_ * rest, lingers_ * times + (meets_ - lingers_) * rest);
  const double left = leaves_ * times;
  const double most = (full - 1) * left + std::max(in_full, rest > kNoRest ? left + in_rest : 0);
  return std::max(outside_ + most, ends_);
}

std::int64_t PartsNeed::largest_within(double bytes, std::int64_t high) const {
  return largest_less_spared(
      0, high, [&](std::int64_t size) { return need_at(static_cast<double>(size)) <= bytes; });
}

}  // namespace brim::detail
