#include <brim/adapt/agreement.h>
#include <c10/util/Exception.h>

#include <utility>

#include "adapt/detail/meeting.h"

namespace brim {

RankError::~RankError() = default;
RankChannel::~RankChannel() = default;

Agreement::Agreement(std::shared_ptr<RankChannel> channel, const AgreementOptions& options,
                     std::string function)
    : channel_(std::move(channel)), options_(options), function_(std::move(function)) {
  const bool inside = options.collectives == Collectives::inside;
  TORCH_CHECK_VALUE(!inside || !options.per_rank,
                    "per_rank lets ranks use different sizes, which collectives inside of the work "
                    "do not allow");
  TORCH_CHECK_VALUE(!inside || options.sync == Sync::always,
                    "sync=\"settled\" lets a rank change its size alone, which collectives inside "
                    "of the work do not allow");
}

void Agreement::refuse_call(const std::string& why) {
  if (!channel_->in_use) {
    const AdaptOptions options{.ranks = this};
    detail::Meeting(options, "").tell_others(why);
  }
}

bool Agreement::skips_a_call() noexcept {
  constexpr int kCalmCalls = 3;
  constexpr int kSkipped = 63;
  if (options_.sync != Sync::settled || calm_calls_ < kCalmCalls || skipped_ == kSkipped) {
    skipped_ = 0;
    return false;
  }
  ++skipped_;
  return true;
}

std::vector<std::int64_t> Agreement::agreed(std::uint64_t key) const {
  const auto found = agreed_.find(key);
  return found == agreed_.end() ? std::vector<std::int64_t>{} : found->second;
}

void Agreement::agree(std::uint64_t key, std::vector<std::int64_t> values) {
  constexpr std::size_t kMostKeys = 4096;
  if (agreed_.size() >= kMostKeys) {
    agreed_.clear();  // each kind then asks once more
  }
  agreed_[key] = std::move(values);
}

}  // namespace brim
