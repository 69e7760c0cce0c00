#include "predict/recorded_growth.h"

#include <algorithm>
#include <cmath>
#include <ranges>
#include <utility>

#include "predict/request_growth.h"

namespace brim::detail {
namespace {

// Calls in a row that have to fit: each finds the blocks that the one before left.
constexpr int kMostCalls = 8;
// How exactly the size is found, and how far below it others must fit too: fragments may let a size
// fit between two that do not.
constexpr double kExactly = 1.0 / 512;
constexpr double kNeighbours[] = {1.0 / 256, 1.0 / 128, 1.0 / 64};
// Available bytes that differ by less than this share are the same.
constexpr double kSameBytes = 1.0 / 1024;

using Request = AllocationRecord::Request;

/// The bytes in `other` of each request of `record`; empty if they are not the same requests. What
/// a first call made for good (an optimizer's state, a library's workspace) is in one of them only.
std::vector<std::int64_t> matched(const AllocationRecord& record, const AllocationRecord& other) {
  std::vector<std::int64_t> bytes;
  bytes.reserve(record.requests.size());
  for (std::size_t i = 0; i < record.older; ++i) {
    bytes.push_back(record.requests[i].bytes);
  }
  std::size_t theirs = other.older;
  for (std::size_t i = record.older; i < record.requests.size(); ++i) {
    const Request& mine = record.requests[i];
    while (theirs < other.requests.size() && !other.requests[theirs].freed && mine.freed) {
      ++theirs;
    }
    const bool same = theirs < other.requests.size() && other.requests[theirs].freed == mine.freed;
    if (!same && mine.freed) {
      return {};
    }
    bytes.push_back(same ? other.requests[theirs].bytes : mine.bytes);
    theirs += same ? 1 : 0;
  }
  const auto rest = std::span(other.requests).subspan(theirs);
  return std::ranges::none_of(rest, &Request::freed) ? bytes : std::vector<std::int64_t>();
}

}  // namespace

RecordedGrowth::RecordedGrowth(const Attempt& newest, const Attempt* other, bool goes_on_refused)
    : record_(newest.record.get()),
      size_(static_cast<double>(newest.size())),
      optional_(record_->requests.size()) {
  // A workspace is freed by the next event.
  for (std::size_t i = 0; goes_on_refused && i + 1 < record_->events.size(); ++i) {
    const std::int32_t event = record_->events[i];
    if (event >= 0 && record_->events[i + 1] == ~event) {
      optional_[static_cast<std::size_t>(event)] = true;
    }
  }
  if (other != nullptr) {
    other_bytes_ = matched(*record_, *other->record);
    other_ = other_bytes_.empty() ? nullptr : other->record.get();
    other_size_ = static_cast<double>(other->size());
  }
}

std::optional<RecordedGrowth> RecordedGrowth::of(std::span<const Attempt> attempts) {
  const Attempt* newest = nullptr;
  const Attempt* other = nullptr;
  const bool goes_on_refused = std::ranges::any_of(attempts, [](const Attempt& attempt) {
    return attempt.record && attempt.record->goes_on_refused;
  });
  for (const Attempt& attempt : std::views::reverse(attempts)) {
    if (attempt.fitted() && attempt.record) {
      if (newest == nullptr) {
        newest = &attempt;
      } else if (attempt.size() != newest->size()) {
        other = &attempt;
        break;
      }
    }
  }
  return newest == nullptr ? std::nullopt
                           : std::optional(RecordedGrowth(*newest, other, goes_on_refused));
}

std::int64_t RecordedGrowth::bytes_at(std::size_t request, double size) const {
  const auto here = static_cast<double>(record_->requests[request].bytes);
  if (request < record_->older) {
    return record_->requests[request].bytes;
  }
  double bytes = here * size / size_;
  if (other_ != nullptr) {
    bytes = request_at(size, here, size_, static_cast<double>(other_bytes_[request]), other_size_);
  }
  constexpr auto kMost = static_cast<double>(AllocatorModel::kLargestRequest);
  return static_cast<std::int64_t>(std::clamp(std::ceil(bytes), 0.0, kMost));
}

/// The allocator that serves the calls.
class RecordedGrowth::Device {
 public:
  Device(const RecordedGrowth& growth, const AllocatorOptions& options)
      : growth_(growth), model_(options), ids_(growth.record_->requests.size(), -1) {}

  /// A call at `size`. What the call before left is freed first, as by zero_grad().
  bool run(double size) {
    release_all();
    for (const std::int32_t event : growth_.record_->events) {
      if (event < 0) {
        const std::int32_t request = ~event;
        release(static_cast<std::size_t>(request));
      } else if (!allocate(static_cast<std::size_t>(event), size)) {
        return false;
      }
    }
    return true;
  }

  void release_all() {
    for (std::size_t i = 0; i < ids_.size(); ++i) {
      release(i);
    }
  }

  AllocatorModel& model() { return model_; }

 private:
  bool allocate(std::size_t request, double size) {
    const auto id =
        model_.allocate(growth_.bytes_at(request, size), growth_.record_->requests[request].stream);
    ids_[request] = id.value_or(-1);
    return id.has_value() || growth_.optional_[request];
  }

  void release(std::size_t request) {
    if (ids_[request] >= 0) {
      model_.free(std::exchange(ids_[request], -1));
    }
  }

  const RecordedGrowth& growth_;
  AllocatorModel model_;
  std::vector<std::int64_t> ids_;  // by request; -1: not held
};

bool RecordedGrowth::fits(double size, double available, const AllocatorOptions& options) const {
  // What the work frees of the call before (its gradients) lies in segments that are free then.
  const auto reserved_after = [&](Device& device, double before) {
    if (record_->older == 0) {
      return std::int64_t{0};
    }
    device.run(before);
    device.model().empty_cache();
    return device.model().now().reserved;
  };
  Device device(*this, options);
  Device then(*this, options);
  const double before = other_ == nullptr ? size_ : other_size_;
  const double capacity =
      available + static_cast<double>(reserved_after(then, before) - record_->outside);
  if (capacity < 0) {
    return false;
  }
  reserved_after(device, size_);
  device.model().set_capacity(static_cast<std::int64_t>(capacity));
  for (int call = 0, same = 0; call < kMostCalls && same < 2; ++call) {
    const auto [reserved, retries] =
        std::pair(device.model().now().reserved, device.model().retries());
    if (!device.run(size)) {
      return false;
    }
    const bool changed =
        device.model().now().reserved != reserved || device.model().retries() != retries;
    same = changed ? 0 : same + 1;
  }
  return true;
}

double RecordedGrowth::search(double low, double high, double available,
                              const AllocatorOptions& options) const {
  const auto good = [&](double size) { return fits(size, available, options); };
  while (high > low) {
    // The largest that fits, if all below it do.
    double below = low;
    double above = high;
    if (good(high)) {
      below = high;
    }
    while (below < high && above - below > kExactly * above) {
      const double middle = (below + above) / 2;
      (good(middle) ? below : above) = middle;
    }
    if (below <= low) {
      return low;
    }
    const auto failing = std::ranges::find_if(kNeighbours, [&](double share) {
      return (1 - share) * below > low && !good((1 - share) * below);
    });
    if (failing == std::ranges::end(kNeighbours)) {
      return below;
    }
    high = (1 - *failing) * below;
  }
  return low;
}

double RecordedGrowth::largest(double low, double high, double available,
                               const AllocatorOptions& options) const {
  const std::lock_guard lock(record_->mutex);
  AllocationRecord::Answer& last = record_->last;
  const bool same = last.other == other_ && last.low == low && last.high == high &&
                    std::abs(available - last.available) <= kSameBytes * last.available;
  if (!same) {
    last = {other_, low, high, available, search(low, high, available, options)};
  }
  return last.size;
}

}  // namespace brim::detail
