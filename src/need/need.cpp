#include "need/need.h"

#include <algorithm>
#include <cmath>
#include <ranges>
#include <unordered_map>
#include <utility>

namespace brim {
namespace {

/// What one attempt shows; null if nothing. What a failure held and asked for is less than the work
/// needs, by as much as it had not reached: without a trace it is no request of a size.
std::shared_ptr<const Trace> shown_by(const Attempt& attempt) {
  if (attempt.trace || !attempt.fitted() || !attempt.need()) {
    return attempt.trace;
  }
  return trace_of_peak(*attempt.need());
}

/// What a peak of another size lacks or has more beside that of the newest, for all that is known:
/// what one call left (gradients, a state) may be what the next one freed, or found.
std::int64_t level(const Attempt& other, const Attempt& newest) {
  const std::int64_t more = other.held - newest.held;
  return other.size() < newest.size() ? std::clamp<std::int64_t>(more, -*other.need(), 0)
                                      : std::max<std::int64_t>(more, 0);
}

/// The sizes at which a request is known, and its bytes there.
struct Points {
  double least_size, least_bytes;
  double most_size, most_bytes;

  /// @param near whether the nearest smaller size counts, and not the least.
  void add(double size, double bytes, double at_size, bool near) {
    if (near && size < at_size ? least_size == at_size || size > least_size : size < least_size) {
      least_size = size;
      least_bytes = bytes;
    }
    if (size > most_size) {
      most_size = size;
      most_bytes = bytes;
    }
  }
};

}  // namespace

Need::Need(const Attempt& newest, std::span<const Attempt> attempts, const InUse& in_use,
           std::optional<std::int64_t> available)
    : trace_(shown_by(newest)),
      size_(static_cast<double>(newest.size())),
      recorded_(newest.trace != nullptr) {
  const auto& requests = trace_->requests;
  std::vector<Points> points;
  for (const auto& request : requests) {
    const auto bytes = static_cast<double>(request.bytes);
    points.push_back({size_, bytes, size_, bytes});
  }
  for (const Attempt& attempt : attempts) {
    if (attempt.size() == newest.size() || (attempt.trace != nullptr) != recorded_) {
      continue;
    }
    const auto other = shown_by(attempt);
    if (other == nullptr) {
      continue;
    }
    const auto same = matched(*trace_, *other);
    for (std::size_t i = trace_->older; i < requests.size(); ++i) {
      if (same[i] != Trace::kNone) {
        // Peaks are sums, of which only a near one bounds the growth. Of a request, sizes that are
        // far apart show it best: near ones may be padded to the same.
        const std::int64_t bytes = other->requests[static_cast<std::size_t>(same[i])].bytes;
        points[i].add(static_cast<double>(attempt.size()),
                      static_cast<double>(bytes + (recorded_ ? 0 : level(attempt, newest))), size_,
                      !recorded_);
      }
    }
  }
  growth_.resize(requests.size());
  double all = 0;
  double known = 0;
  std::unordered_map<std::int64_t, std::size_t> like;  // by bytes: the one that grows fastest
  for (std::size_t i = trace_->older; i < requests.size(); ++i) {
    const Points& at = points[i];
    all += static_cast<double>(requests[i].bytes);
    if (at.least_size < at.most_size) {
      const auto bytes = static_cast<double>(requests[i].bytes);
      known += bytes;
      // Both pass through what the newest trace shows.
      const detail::RequestGrowth to_most(bytes, size_, at.most_bytes, at.most_size);
      const detail::RequestGrowth to_least(bytes, size_, at.least_bytes, at.least_size);
      growth_[i] = Growth{.up = at.most_size > size_ ? to_most : to_least,
                          .down = at.least_size < size_ ? to_least : to_most};
      const auto place = like.try_emplace(requests[i].bytes, i).first;
      if (growth_[i]->up.at(2 * size_) > growth_[place->second]->up.at(2 * size_)) {
        place->second = i;
      }
    }
  }
  known_ = all > 0 ? known / all : 0;
  int fits = 0;  // since the attempt
  for (const Attempt& attempt : std::views::reverse(attempts)) {
    fits += attempt.fitted() ? 1 : 0;
    if (fits == 0 && attempt.trace && in_use) {
      for (const Trace::Request& request : attempt.trace->requests) {
        leftover_ += !request.freed && in_use(request.address) ? static_cast<double>(request.bytes) : 0;
      }
    }
    if (fits > 1) {
      break;  // they know better
    }
    if (attempt.expected && attempt.need()) {
      const std::int64_t bytes = *attempt.need() - *attempt.expected;
      shortfalls_.push_back(
          {static_cast<double>(attempt.size()), std::max(static_cast<double>(bytes), 0.0)});
    }
  }
  there_.resize(requests.size());
  const auto left = [&](std::size_t i) {
    const Trace::Request& request = requests[i];
    return !request.freed && in_use && in_use(request.address) ? static_cast<double>(request.bytes)
                                                               : 0.0;
  };
  for (std::size_t i = trace_->older; i < requests.size(); ++i) {
    if (const auto found = like.find(requests[i].bytes); !growth_[i] && found != like.end()) {
      growth_[i] = growth_[found->second];
    }
    there_[i] = requests[i].adds_up ? 0.0 : left(i);
  }
  if (!recorded_ && available && newest.available) {
    there_.front() = static_cast<double>(std::clamp<std::int64_t>(
        *newest.available - *available, 0, std::max<std::int64_t>(newest.left, 0)));
  }
  for (std::size_t i = 0; i < trace_->older; ++i) {
    if (requests[i].from_failure && !requests[i].made_again) {
      there_[i] = static_cast<double>(requests[i].bytes);
      missing_ += there_[i];
    }
    if (const std::int32_t successor = requests[i].successor; successor != Trace::kNone) {
      const auto which = static_cast<std::size_t>(successor);
      there_[i] = left(which);
      there_[which] = 0;
    }
  }
}

std::optional<Need> Need::of_fits(std::span<const Attempt> attempts, const InUse& in_use,
                                  std::optional<std::int64_t> available) {
  for (const Attempt& attempt : std::views::reverse(attempts)) {
    if (attempt.fitted()) {
      return attempt.need() ? std::optional(Need(attempt, attempts, in_use, available))
                            : std::nullopt;
    }
  }
  return std::nullopt;
}

std::int64_t Need::bytes_at(std::size_t request, double size, double power) const {
  if (growth_[request] && !recorded_ && size > size_ && power > 1) {
    return growth_[request]->up.most_at(size, power);
  }
  return growth_[request]
             ? (size > size_ ? growth_[request]->up : growth_[request]->down).at(size)
             : detail::whole_bytes(static_cast<double>(trace_->requests[request].bytes) *
                                   (power == 0 ? 1.0 : std::pow(size / size_, power)));
}

double Need::most_held(double size, double power, bool frees_first) const {
  std::vector<double> bytes(there_.size());
  double now = missing_;
  for (std::size_t i = trace_->older; i < bytes.size(); ++i) {
    bytes[i] = static_cast<double>(bytes_at(i, size, power));
    now -= frees_first ? there_[i] : 0.0;
  }
  double most = std::max(now, 0.0);
  for (const std::int32_t event : trace_->events) {
    const auto request = static_cast<std::size_t>(event < 0 ? ~event : event);
    if (event < 0) {
      now -= (request < trace_->older ? there_ : bytes)[request];
    } else {
      now += bytes[request] - (frees_first ? 0.0 : there_[request]);
    }
    most = std::max(most, now);
  }
  return most;
}

double Need::upper(double size, double power) const {
  double short_by = 0;  // of what is needed, where a failure has shown it
  for (const Shortfall& each : shortfalls_) {
    if (each.size > size_ && size > size_) {
      short_by = std::max(short_by, each.bytes * (size - size_) / (each.size - size_));
    }
  }
  return most_held(size, size > size_ ? power : 0) + short_by;
}

/// The allocator that serves the calls.
class Need::Device {
 public:
  Device(const Need& need, const AllocatorModel& now)
      : need_(need),
        trace_(*need.trace_),
        model_(now),
        left_(trace_.requests.size(), kNothing),
        optional_(trace_.requests.size()) {
    const auto blocks = now.held();
    for (std::size_t i = trace_.older; i < left_.size(); ++i) {
      const Trace::Request& request = trace_.requests[i];
      const auto found = request.freed ? blocks.end() : blocks.find(request.address);
      if (found != blocks.end() && now.block(found->second).requested == request.bytes) {
        left_[i] = found->second;
      }
    }
    held_ = left_;
    // A library's workspace is freed at once, and may be refused where one was before.
    for (std::size_t e = 0; trace_.tolerates_refusal && e + 1 < trace_.events.size(); ++e) {
      const std::int32_t event = trace_.events[e];
      if (event >= 0 && trace_.events[e + 1] == ~event) {
        optional_[static_cast<std::size_t>(event)] = true;
      }
    }
  }

  /// A call at `size`.
  bool run(double size, double power) {
    auto before = std::move(held_);
    held_.assign(trace_.requests.size(), kNothing);
    // A result that was dropped before this call will be before the next ones.
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (left_[i] == kNothing) {
        release(before[i]);
      }
    }
    for (const std::int32_t event : trace_.events) {
      const auto request = static_cast<std::size_t>(event < 0 ? ~event : event);
      if (event < 0 && request < trace_.older) {
        if (const std::int32_t successor = trace_.requests[request].successor;
            successor != Trace::kNone) {
          release(before[static_cast<std::size_t>(successor)]);
        }
      } else if (event < 0) {
        release(held_[request]);
      } else {
        if (need_.there_[request] > 0) {
          release(before[request]);  // it is not seen to be freed: taken to be replaced
        }
        const std::int64_t bytes = need_.bytes_at(request, size, size > need_.size_ ? power : 0);
        const auto made = model_.allocate(bytes, trace_.requests[request].stream);
        if (!made && !optional_[request]) {
          return false;
        }
        held_[request] = made.value_or(kNothing);
      }
    }
    // What it has not freed is replaced by what it left.
    std::ranges::for_each(before, [&](std::int64_t& allocation) { release(allocation); });
    return true;
  }

  AllocatorModel& model() { return model_; }

 private:
  static constexpr std::int64_t kNothing = -1;

  void release(std::int64_t& allocation) {
    if (allocation != kNothing) {
      model_.free(std::exchange(allocation, kNothing));
    }
  }

  const Need& need_;
  const Trace& trace_;
  AllocatorModel model_;
  std::vector<std::int64_t> left_;  // by request: the allocation that the last call left
  std::vector<std::int64_t> held_;  // likewise: what the call that runs holds
  std::vector<bool> optional_;      // by request: it may be refused
};

bool Need::fits(double size, const AllocatorModel& now, double power) const {
  // Each call finds the blocks that the one before left.
  constexpr int kMostCalls = 8;
  Device device(*this, now);
  if (size != size_) {
    device.model().empty_cache();
  }
  for (int call = 0, same = 0; call < kMostCalls && same < 2; ++call) {
    const auto reserved = device.model().now().reserved;
    const auto retries = device.model().retries();
    if (!device.run(size, power)) {
      return false;
    }
    const bool changed =
        device.model().now().reserved != reserved || device.model().retries() != retries;
    same = changed ? 0 : same + 1;
  }
  return true;
}

}  // namespace brim
