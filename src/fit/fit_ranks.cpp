#include <brim/fit/fit_ranks.h>

#include <algorithm>
#include <array>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "batching/permutation.h"

namespace brim {
namespace {

/// Not negative, so that its negative is a number too.
std::int64_t mixed(std::int64_t before, std::uint64_t next) {
  constexpr std::uint64_t kPositive = ~std::uint64_t{0} >> 1;
  const auto mix = batching::detail::mix(static_cast<std::uint64_t>(before), next);
  return static_cast<std::int64_t>(mix & kPositive);
}

}  // namespace

// What is said: whether this rank goes on; what it does, in two ways, of which the least are the
// same number only if all ranks do the same; and the numbers.
void FitRanks::exchange(std::span<std::int64_t> numbers, const std::string& own) {
  if (numbers.size() > kMostNumbers) {
    throw std::invalid_argument("numbers must be at most " + std::to_string(kMostNumbers) +
                                ", got " + std::to_string(numbers.size()));
  }
  std::array<std::int64_t, 3 + kMostNumbers> message{1, doing_, -doing_};
  std::ranges::transform(numbers, message.begin() + 3, std::negate<>());
  try {
    channel_->least(message);
  } catch (const RankError&) {
    ended_ = true;
    throw;
  }
  const bool failed = message[0] == 0;
  if (failed || message[1] != -message[2]) {
    ended_ = true;
    const std::vector<std::string> texts = channel_->texts(failed ? "" : own);
    const auto other = std::ranges::find_if(
        texts, [&](const std::string& text) { return failed ? !text.empty() : text != texts[0]; });
    const auto rank = static_cast<std::size_t>(other - texts.begin()) % texts.size();
    if (failed) {
      throw RankError("rank " + std::to_string(rank) + " failed in " + task_ + ": " + texts[rank]);
    }
    throw RankError(task_ +
                    " must be the same on all ranks, with the same samples and options, but rank "
                    "0 has " +
                    texts[0] + ", and rank " + std::to_string(rank) + " has " + texts[rank]);
  }
  ended_ = ended_ || ends_with_next_;
  const std::span<const std::int64_t> least = std::span(message).subspan(3, numbers.size());
  std::ranges::transform(least, numbers.begin(), std::negate<>());
}

void FitRanks::most(std::span<std::int64_t> numbers) {
  exchange(numbers, "measurements of batch " + std::to_string(doing_));
}

std::int64_t FitRanks::least(std::int64_t number) {
  std::int64_t negative = -number;
  most({&negative, 1});
  return -negative;
}

void FitRanks::same(const std::string& text) {
  doing_ = mixed(doing_, std::hash<std::string_view>()(text));
  exchange({}, text);
}

void FitRanks::begin(std::span<const std::int64_t> batch) {
  doing_ = mixed(doing_, batch.size());
  for (const std::int64_t sample : batch) {
    doing_ = mixed(doing_, static_cast<std::uint64_t>(sample));
  }
}

void FitRanks::fail(const std::string& why) noexcept {
  if (ended_) {
    return;
  }
  ended_ = true;
  try {
    std::array<std::int64_t, 3 + kMostNumbers> message{};
    channel_->least(message);
    (void)channel_->texts(why.empty() ? "an error without a text" : why);
  } catch (...) {
    // The others notice that this rank ends.
  }
}

}  // namespace brim
