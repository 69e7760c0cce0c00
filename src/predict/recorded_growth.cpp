#include "predict/recorded_growth.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <ranges>
#include <unordered_map>
#include <utility>

#include "bisect.h"
#include "predict/matched_requests.h"

namespace brim::detail {
namespace {

// Calls in a row that have to fit: each finds the blocks that the one before left.
constexpr int kMostCalls = 8;

using Request = AllocationRecord::Request;
constexpr std::size_t kNoRequest = std::numeric_limits<std::size_t>::max();

}  // namespace

RecordedGrowth::RecordedGrowth(const Attempt& newest, bool goes_on_refused)
    : record_(newest.record.get()),
      size_(static_cast<double>(newest.size())),
      goes_on_refused_(goes_on_refused),
      optional_(goes_on_refused ? brief_requests(*record_)
                                : std::vector<bool>(record_->requests.size())),
      successor_(record_->older, kNoRequest) {
  // What it freed of the call before (its gradients), it left again: the next call will free that.
  // A temporary of as many bytes is no successor: the replay would keep the old gradient then.
  std::unordered_map<std::int64_t, std::vector<std::size_t>> left;  // by bytes, the last one first
  for (std::size_t i = record_->requests.size(); i-- > record_->older;) {
    if (!record_->requests[i].freed) {
      left[record_->requests[i].bytes].push_back(i);
    }
  }
  for (std::size_t i = 0; i < record_->older; ++i) {
    if (auto& same = left[record_->requests[i].bytes]; !same.empty()) {
      successor_[i] = same.back();
      same.pop_back();
    }
  }
  // Until another size shows more, what it made itself grows in proportion.
  for (std::size_t i = 0; i < record_->requests.size(); ++i) {
    const auto bytes = static_cast<double>(record_->requests[i].bytes);
    growth_.emplace_back(bytes, size_, i < record_->older ? bytes : 0.0, 0.0);
  }
}

std::optional<RecordedGrowth> RecordedGrowth::of(std::span<const Attempt> attempts) {
  const bool goes_on_refused = std::ranges::any_of(attempts, [](const Attempt& attempt) {
    return attempt.record && attempt.record->goes_on_refused;
  });
  std::optional<RecordedGrowth> growth;
  for (const Attempt& attempt :
       std::views::reverse(attempts) | std::views::filter(&Attempt::fitted)) {
    if (!growth && !attempt.record) {
      return std::nullopt;
    }
    if (!growth) {
      growth.emplace(RecordedGrowth(attempt, goes_on_refused));
    } else if (attempt.record) {
      growth->compare(attempt);
    }
  }
  return growth;
}

/// Takes in another record if it shows more than the one before. Sizes next to each other may
/// differ by what a kernel pads, and sizes far apart may have other kernels: among those that are
/// similar, the one that differs most counts, else the newest.
void RecordedGrowth::compare(const Attempt& other) {
  constexpr double kSimilar = 2;
  const auto other_size = static_cast<double>(other.size());
  const double apart = std::max(other_size / size_, size_ / other_size);
  if (apart == 1 || (knows_growth() && (apart > kSimilar || apart <= apart_))) {
    return;
  }
  auto there = matched_requests(*record_, size_, *other.record, other_size);
  if (!there) {
    return;
  }
  growth_.clear();
  for (std::size_t i = 0; i < there->bytes.size(); ++i) {
    growth_.emplace_back(static_cast<double>(record_->requests[i].bytes), size_,
                         static_cast<double>(there->bytes[i]), other_size);
  }
  workspaces_ = std::move(there->workspaces);
  other_size_ = other_size;
  apart_ = apart > kSimilar ? 0 : apart;
}

/// Bytes of the other record's workspaces after a request. What the nearer of the two sizes asked
/// for is expected.
std::int64_t RecordedGrowth::workspace_after(std::size_t request, double size) const {
  if (!knows_growth() || std::abs(size - size_) < std::abs(size - other_size_)) {
    return 0;
  }
  const auto bytes = static_cast<double>(workspaces_[request]);
  return whole_bytes(bytes * std::max(size / other_size_, 1.0));
}

RecordedGrowth::Held RecordedGrowth::held_at(double size) const {
  Held held;
  double now = 0;
  for (const std::int32_t event : record_->events) {
    const auto request = static_cast<std::size_t>(event < 0 ? ~event : event);
    if (!optional_[request]) {
      const auto bytes = static_cast<double>(growth_[request].at(size));
      now += event < 0 ? -bytes : bytes;
      const std::int64_t workspace =
          event < 0 || goes_on_refused_ ? 0 : workspace_after(request, size);
      held = {std::min(held.least, now), std::max(held.most, now + static_cast<double>(workspace))};
    }
  }
  return held;
}

double RecordedGrowth::need_at(double size) const {
  const Held held = held_at(size);
  return held.most - held.least;
}

std::int64_t RecordedGrowth::largest_within(double bytes, std::int64_t high) const {
  return largest_that_holds(
      0, high + 1, [&](std::int64_t size) { return need_at(static_cast<double>(size)) <= bytes; });
}

/// The allocator that serves the calls.
class RecordedGrowth::Device {
 public:
  explicit Device(const RecordedGrowth& growth)
      : growth_(growth), model_(growth.now_), held_(growth.left_) {}

  /// A call at `size`.
  bool run(double size) {
    const AllocationRecord& record = *growth_.record_;
    before_ = std::move(held_);
    held_.assign(record.requests.size(), -1);
    // A result that was dropped before this call will be before the next ones.
    for (std::size_t i = 0; i < before_.size(); ++i) {
      if (growth_.left_[i] < 0) {
        release(before_[i]);
      }
    }
    for (const std::int32_t event : record.events) {
      const auto request = static_cast<std::size_t>(event < 0 ? ~event : event);
      if (event >= 0) {
        if (!allocate(request, size)) {
          return false;
        }
      } else if (request >= record.older) {
        release(held_[request]);
      } else if (growth_.successor_[request] != kNoRequest) {
        release(before_[growth_.successor_[request]]);
      }
    }
    // Other results are replaced by this call's.
    std::ranges::for_each(before_, [&](std::int64_t& allocation) { release(allocation); });
    return true;
  }

  AllocatorModel& model() { return model_; }

 private:
  bool allocate(std::size_t request, double size) {
    const std::int64_t stream = growth_.record_->requests[request].stream;
    const auto id = model_.allocate(growth_.growth_[request].at(size), stream);
    held_[request] = id.value_or(-1);
    if (!id && !growth_.optional_[request]) {
      return false;
    }
    const std::int64_t workspace = growth_.workspace_after(request, size);
    auto other = workspace > 0 ? model_.allocate(workspace, stream).value_or(-1) : -1;
    const bool refused = workspace > 0 && other < 0;
    release(other);
    return !refused || growth_.goes_on_refused_;
  }

  void release(std::int64_t& allocation) {
    if (allocation >= 0) {
      model_.free(std::exchange(allocation, -1));
    }
  }

  const RecordedGrowth& growth_;
  AllocatorModel model_;
  std::vector<std::int64_t> held_;    // by request: what this call holds of it; -1: nothing
  std::vector<std::int64_t> before_;  // the same of the call before
};

bool RecordedGrowth::begin_from(const AllocatorModel& now) {
  now_ = now;
  const auto held = now.held();
  left_.assign(record_->requests.size(), -1);
  for (std::size_t i = record_->older; i < left_.size(); ++i) {
    const Request& request = record_->requests[i];
    const auto found = request.freed ? held.end() : held.find(request.address);
    if (found != held.end() && now.block(found->second).requested == request.bytes) {
      left_[i] = found->second;
    }
  }
  return std::ranges::all_of(successor_, [&](std::size_t request) {
    return request == kNoRequest || left_[request] >= 0;
  });
}

bool RecordedGrowth::fits(double size) const {
  Device device(*this);
  if (size != size_) {
    device.model().empty_cache();
  }
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

double RecordedGrowth::largest_between(double low, double high) const {
  // What has too many bytes has too many blocks: most sizes need no replay.
  const auto free = static_cast<double>(now_.options().capacity - now_.now().allocated);
  const std::int64_t most = largest_that_holds(
      0, static_cast<std::int64_t>(high) + 1,
      [&](std::int64_t size) { return held_at(static_cast<double>(size)).most <= free; });
  const auto above = static_cast<std::int64_t>(low);
  const std::int64_t size = largest_less_spared(
      above, most, [&](std::int64_t each) { return fits(static_cast<double>(each)); });
  return size == above ? 0.0 : static_cast<double>(size);
}

}  // namespace brim::detail
