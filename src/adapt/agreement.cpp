#include <brim/adapt/agreement.h>
#include <c10/util/Exception.h>

#include <utility>

#include "adapt/detail/meeting.h"

namespace brim {

RankError::~RankError() = default;
RankChannel::~RankChannel() = default;

void AgreementOptions::check() const {
  const char* wrong = per_rank                ? "per_rank=True"
                      : sync == Sync::settled ? "sync='settled'"
                                              : nullptr;
  TORCH_CHECK_VALUE(collectives != Collectives::inside || wrong == nullptr,
                    "collectives='inside' and ", wrong,
                    " exclude each other: a rank that changes its size alone would leave the "
                    "others waiting");
}

Agreement::Agreement(std::shared_ptr<RankChannel> channel, const AgreementOptions& options,
                     std::string function)
    : channel_(std::move(channel)), options_(options), function_(std::move(function)) {
  options.check();
}

void Agreement::refuse_call(const std::string& why) {
  if (!channel_->in_use) {
    const AdaptOptions options{.ranks = this};
    detail::Meeting(options, "").tell_others(why);
  }
}

std::int64_t Agreement::Lengths::cut(std::int64_t size) noexcept {
  const auto times = [](std::int64_t all, std::int64_t each) { return (all + each - 1) / each; };
  parts = times(longest, size);
  return times(own, parts);
}

bool Agreement::skips_a_call() noexcept {
  constexpr int kCalmCalls = 3;
  constexpr int kSkipped = 63;
  const bool votes = ending_.vote != nullptr;
  const bool due = skipped_ == kSkipped && !votes;
  if (options_.sync != Sync::settled || calm_calls_ < kCalmCalls || due) {
    skipped_ = 0;
    return false;
  }
  skipped_ += votes ? 0 : 1;
  return true;
}

Agreement::Agreed Agreement::agreed(std::uint64_t key) const {
  const auto found = agreed_.find(key);
  return found == agreed_.end() ? Agreed{} : found->second;
}

void Agreement::agree(std::uint64_t key, Agreed agreed) {
  constexpr std::size_t kMostKeys = 4096;
  if (agreed_.size() >= kMostKeys) {
    agreed_.clear();  // each kind then asks once more
  }
  agreed_[key] = std::move(agreed);
}

}  // namespace brim
