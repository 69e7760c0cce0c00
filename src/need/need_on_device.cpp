// Whether calls fit on an allocator whose blocks do not always pack.

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "need/index_of.h"
#include "need/need.h"

namespace brim {
namespace {

using detail::index_of;

}  // namespace

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
    if (trace_.foreseen) {
      find_older(blocks);
      first_of_later_ =
          trace_.older + static_cast<std::size_t>(std::count_if(
                             trace_.events.begin(),
                             trace_.events.begin() + static_cast<std::ptrdiff_t>(trace_.later),
                             [](std::int32_t event) { return event >= 0; }));
      return;
    }
    std::ranges::transform(trace_.requests, left_.begin(), [&](const Trace::Request& request) {
      const auto found = request.freed ? blocks.end() : blocks.find(request.address);
      return found != blocks.end() && now.block(found->second).requested == request.bytes
                 ? found->second
                 : kNothing;
    });
    held_ = left_;
    // A library's workspace is freed at once, and may be refused where one was before.
    for (std::size_t e = 0; trace_.tolerates_refusal && e + 1 < trace_.events.size(); ++e) {
      const std::int32_t event = trace_.events[e];
      if (trace_.events[e + 1] == ~event) {  // nothing is freed and then made: `event` makes it
        optional_[index_of(event)] = true;
      }
    }
  }

  /// A call at `size`.
  /// @param later of fake tensors: only the later call, which finds what it left.
  bool run(double size, double power, bool later = false) {
    auto before = std::move(held_);
    held_.assign(trace_.requests.size(), kNothing);
    // A result that was dropped before this call will be before the next ones.
    for (std::size_t i = 0; i < before.size(); ++i) {
      if ((left_[i] == kNothing && !trace_.foreseen) || need_.freed_first_[i]) {
        release(before[i]);
      }
    }
    const auto is_older = [&](std::size_t request) {
      return request < (later ? first_of_later_ : trace_.older);
    };
    for (std::size_t e = later ? trace_.later : 0; e < trace_.events.size(); ++e) {
      const std::int32_t event = trace_.events[e];
      const auto request = index_of(event < 0 ? ~event : event);
      if (event < 0 && is_older(request)) {
        const std::int32_t successor = trace_.requests[request].successor;
        release(before[successor == Trace::kNone ? request : index_of(successor)]);
      } else if (event < 0) {
        release(held_[request]);
      } else {
        if (need_.there_[request] > 0) {
          release(before[request]);  // it is not seen to be freed: taken to be replaced
        }
        const std::int64_t bytes = need_.bytes_at(request, size, need_.power_above(size, power));
        const auto made = model_.allocate(bytes, trace_.requests[request].stream);
        if (!made && !optional_[request]) {
          return false;
        }
        held_[request] = made.value_or(kNothing);
      }
    }
    // What it has not freed is replaced by what it left. An optimizer's state stays.
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (later && i < first_of_later_) {
        held_[i] = before[i];
      } else {
        release(before[i]);
      }
    }
    return true;
  }

  AllocatorModel& model() { return model_; }

 private:
  static constexpr std::int64_t kNothing = -1;

  /// What it will free of what is held now: traces of fake tensors know no addresses, but bytes.
  void find_older(const std::unordered_map<std::int64_t, std::int64_t>& blocks) {
    std::unordered_multimap<std::int64_t, std::int64_t> by_bytes;
    for (const auto& [address, allocation] : blocks) {
      by_bytes.emplace(model_.block(allocation).requested, allocation);
    }
    for (std::size_t i = 0; i < trace_.older; ++i) {
      if (const auto found = by_bytes.find(trace_.requests[i].bytes); found != by_bytes.end()) {
        left_[i] = found->second;
        by_bytes.erase(found);
      }
    }
    held_ = left_;
  }

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
  std::size_t first_of_later_ = 0;  // request
};

bool Need::fits(double size, const AllocatorModel& now, double power, bool once) const {
  // Each call finds the blocks that the one before left.
  constexpr int kMostCalls = 8;
  Device device(*this, now);
  if (foreseen()) {  // they begin with what is cached now
    const double there = already_there(held(size, 1), available_);
    device.model().set_capacity(now.options().capacity +
                                static_cast<std::int64_t>(std::max(there, 0.0)));
    const bool fits = device.run(size, power);
    if (!fits || once || trace_->later == 0) {
      return fits;
    }
  } else if (size != size_) {
    device.model().empty_cache();
  }
  for (int call = 0, same = 0; call < kMostCalls && same < 2; ++call) {
    const auto reserved = device.model().now().reserved;
    const auto retries = device.model().retries();
    if (!device.run(size, power, foreseen())) {
      return false;
    }
    const bool changed =
        device.model().now().reserved != reserved || device.model().retries() != retries;
    same = changed ? 0 : same + 1;
  }
  return true;
}

}  // namespace brim
