#include "adapt/detail/meeting.h"

#include <brim/adapt/call_key.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "adapt/detail/searching.h"

namespace brim::detail {
namespace {

// Every exchange has the same length, so that ranks in different calls can tell each other.
constexpr std::size_t kMostValues = 8;
constexpr std::size_t kFailed = 0;   // the rank, or the number of ranks where it did not
constexpr std::size_t kCall = 1;     // identifies the call
constexpr std::size_t kNotCall = 2;  // the bits inverted: the least of these shows the greatest
constexpr std::size_t kDone = 3;
constexpr std::size_t kNext = 4;
constexpr std::size_t kNotNext = kNext + kMostValues;
constexpr std::size_t kLater = kNotNext + kMostValues;
constexpr std::size_t kLength = kLater + kMostValues;
constexpr std::size_t kNotLength = kLength + 1;
using Numbers = std::array<std::int64_t, kNotLength + 1>;

void throw_if_called_off(RankChannel& channel) {
  if (const auto other = channel.called_off()) {
    throw RankError(c10::str("rank ", other->first, " failed with ", other->second));
  }
}

}  // namespace

Meeting::Meeting(const AdaptOptions& options, const std::string& what)
    : options_(options),
      agreement_(*options.ranks),
      channel_(options.ranks->channel()),
      what_(c10::str(options.ranks->function(), ": ", options.name, " ", what)),
      silent_(options.ranks->skips_a_call()) {
  TORCH_CHECK(!channel_.in_use.exchange(true),
              "an adaptive call with ranks runs inside of another one, or beside it in another "
              "thread: the ranks could not tell their messages apart");
  ++channel_.calls;
  if (inside()) {
    channel_.watch(true);
  }
}

Meeting::~Meeting() {
  if (inside()) {
    channel_.watch(false);
  }
  channel_.in_use = false;
}

std::string Meeting::sizes_text() const {
  return trying_.empty() ? "" : c10::str(options_.name, " = ", c10::Join(", ", trying_), ": ");
}

bool Meeting::is_content(const Message& message) const {
  const auto [agreed, wish] = agreement_.agreed(options_.key);
  if (!message.done || !std::ranges::equal(message.next, agreed)) {
    return false;
  }
  // The least of the wishes stays the same as long as those who had it keep to it, and no other
  // rank falls below it.
  for (std::size_t i = 0; i < agreed.size(); ++i) {
    const std::int64_t now = message.later[i];
    if (now != agreed[i] && (now < agreed[i] || wish[i] == agreed[i])) {
      return false;
    }
  }
  return true;
}

Meeting::Answer Meeting::exchange(const Message& message) {
  const bool per_rank = agreement_.options().per_rank;
  const std::size_t count = message.next.size();
  TORCH_CHECK_VALUE(count <= kMostValues, "ranks can agree on ", kMostValues,
                    " sizes at most, got ", count);
  const auto& later = message.later.empty() ? message.next : message.later;
  Answer answer{.done = message.done,
                .same = true,
                .next = {message.next.begin(), message.next.end()},
                .later = {later.begin(), later.end()}};
  if (per_rank && !message.done) {
    return answer;
  }
  if (silent_) {
    if (!agreement_.ending().vote) {
      return answer;
    }
    silent_ = false;  // also if the vote throws
    vote_failed_ = true;
    const bool all_content = agreement_.ending().vote(per_rank || is_content(message));
    vote_failed_ = false;
    if (all_content) {
      silent_ = true;
      return answer;
    }
  }
  wish_ = answer.later;
  CallKey key;
  key.add(what_);
  const auto call = static_cast<std::int64_t>(key.value());
  Numbers numbers{};
  numbers[kFailed] = channel_.ranks();
  numbers[kCall] = call;
  numbers[kNotCall] = ~call;
  numbers[kDone] = message.done ? 1 : 0;
  for (std::size_t i = 0; i < count && !per_rank; ++i) {
    numbers[kNext + i] = message.next[i];
    numbers[kNotNext + i] = ~message.next[i];
    numbers[kLater + i] = later[i];
  }
  numbers[kLength] = agreement_.lengths.own;
  numbers[kNotLength] = ~agreement_.lengths.own;
  try {
    channel_.least(numbers);
  } catch (const RankError&) {
    throw_if_called_off(channel_);
    throw;
  }
  agreement_.lengths.shortest = numbers[kLength];
  agreement_.lengths.longest = ~numbers[kNotLength];
  if (numbers[kFailed] < channel_.ranks()) {
    throw_failures();
  }
  if (numbers[kCall] != call || numbers[kNotCall] != ~call) {
    throw_differences();
  }
  answer.done = numbers[kDone] == 1;
  for (std::size_t i = 0; i < count && !per_rank; ++i) {
    answer.next[i] = numbers[kNext + i];
    answer.later[i] = numbers[kLater + i];
    answer.same = answer.same && numbers[kNext + i] == ~numbers[kNotNext + i];
  }
  return answer;
}

void Meeting::end(const Answer& last, bool as_agreed) {
  if (!silent_) {
    agreement_.agree(options_.key, {.values = last.later, .wish = wish_});
    // Sizes that are each rank's own say nothing that all ranks know.
    const bool calm = agreement_.options().per_rank || (as_agreed && last.next == last.later);
    agreement_.count_exchange(calm);
  } else if (agreement_.options().per_rank) {
    agreement_.agree(options_.key, {.values = last.later, .wish = last.later});
  } else if (!agreement_.ending().vote) {
    // Alone, a rank lowers its size where it must and never raises it.
    agreement_.agree(options_.key, {.values = last.next, .wish = last.next});
  }
}

void Meeting::tell_others(const std::exception_ptr& error) {
  tell_others(sizes_text() + error_text(error));
}

void Meeting::tell_others(const std::string& own) {
  if (inside()) {
    // Where another rank failed first, this error is what came of it.
    throw_if_called_off(channel_);
    channel_.call_off(own);
    return;
  }
  if (silent_) {
    if (!agreement_.ending().vote) {
      return;
    }
    try {
      agreement_.ending().vote(false);
    } catch (const std::exception&) {
      return;  // the ranks cannot reach each other, which they notice by themselves
    }
  }
  Numbers numbers{};
  numbers[kFailed] = channel_.rank();
  try {
    channel_.least(numbers);
    channel_.texts(own);
  } catch (const RankError&) {
    // An error of this rank's own says more. A vote that failed only shows that a rank is gone.
    if (vote_failed_) {
      throw;
    }
  }
}

void Meeting::throw_failures() {
  const std::vector<std::string> texts = channel_.texts("");
  std::string all;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty()) {
      all += c10::str(all.empty() ? "" : "\n", "rank ", rank, " failed with ", texts[rank]);
    }
  }
  throw RankError(all);
}

void Meeting::throw_differences() {
  const std::vector<std::string> texts = channel_.texts(what_);
  std::string all = "the ranks make different calls:";
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    all += c10::str("\n  rank ", rank, ": ", texts[rank]);
  }
  throw RankError(all);
}

}  // namespace brim::detail
