// How ranks agree: random jobs of 2 to 16 ranks in random order of their messages, with failures of
// every kind. No deadlock, no two ranks that do different things, and of each call all ranks have
// the same size, or all an error.
//
//     ./dev prove ranks                    20,000 jobs
//     ./dev prove ranks -- 1000 7          so many, from this seed on

#include <brim/adapt/adapt.h>
#include <brim/adapt/agreement.h>
#include <brim/adapt/size_memory.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <ranges>

#include "scheduled_ranks.h"
#include "tally.h"

namespace brim::proofs {
namespace {

constexpr int kCalls = 8;

enum class Kind : std::uint8_t { always, settled, per_rank, inside };
constexpr std::array kNames{"sync always", "sync settled", "per rank", "collectives inside"};

/// How a call ended on a rank.
struct Outcome {
  bool fitted = false;
  std::int64_t size = 0;
};

class Job {
 public:
  Job(Kind kind, std::uint64_t seed)
      : kind_(kind), random_(seed), ranks_(2 + random_() % 15, seed), outcomes_(ranks_.count()) {
    const bool has_deaths = random_() % 3 == 0;
    for (std::size_t rank = 0; has_deaths && rank < ranks_.count(); ++rank) {
      if (random_() % ranks_.count() == 0) {
        ranks_.kill(rank, static_cast<int>(1 + random_() % 60));
      }
    }
    has_errors_ = random_() % 2 == 0;
    has_failures_ = random_() % 4 != 0;
  }

  /// What went wrong.
  std::vector<std::string> run() {
    ranks_.run([this](std::size_t rank) { act(rank); });
    std::vector<std::string> wrong = ranks_.wrong();
    for (int call = 0; call < kCalls; ++call) {
      compare(call, wrong);
    }
    return wrong;
  }

  [[nodiscard]] const ScheduledRanks& ranks() const { return ranks_; }

 private:
  void act(std::size_t rank) {
    // Each rank has luck of its own, so that what one does changes nothing for the others.
    std::mt19937_64 random(ranks_.count() * 1000 + rank + random_());
    auto channel = std::make_shared<ScheduledChannel>(ranks_, texts_, numbers_, rank);
    const AgreementOptions agreed{
        .per_rank = kind_ == Kind::per_rank,
        .sync = kind_ == Kind::settled ? Sync::settled : Sync::always,
        .collectives = kind_ == Kind::inside ? Collectives::inside : Collectives::between};
    Agreement agreement(channel, agreed, "step");
    SizeMemory memory;
    const AdaptOptions options{.restore_random_state = false,
                               .host_limit = false,
                               .memory = &memory,
                               .ranks = &agreement,
                               .name = "batch size"};
    const std::int64_t capacity = static_cast<std::int64_t>(1) << (random() % 12);
    const auto work = [&](std::int64_t size) {
      if (has_errors_ && random() % 40 == 0) {
        throw std::domain_error("an error of the program");
      }
      if (size > capacity || (has_failures_ && size > 2 && random() % 10 == 0)) {
        TORCH_CHECK_WITH(OutOfMemoryError, false, "does not fit");
      }
      if (kind_ == Kind::inside) {
        ranks_.meet(rank, ScheduledRanks::Sender::program, "gradients", [](std::size_t) {});
      }
      return size;
    };
    for (int call = 0; call < kCalls; ++call) {
      try {
        if (has_errors_ && random() % 40 == 0) {
          agreement.refuse_call("a wrong argument");
          throw std::domain_error("a wrong argument");
        }
        if (call % 3 == 2 && kind_ != Kind::inside) {
          std::int64_t largest = 0;
          std::vector<int> done(30 + rank);
          range(
              0, std::ssize(done), 16,
              [&](std::int64_t begin, std::int64_t end) {
                largest = std::max(largest, work(end - begin));
                std::for_each(done.begin() + begin, done.begin() + end, [](int& each) { ++each; });
              },
              options);
          if (std::ranges::any_of(done, [](int times) { return times != 1; })) {
            missed_.push_back(rank);
          }
          outcomes_[rank].push_back({true, 0});  // parts have sizes of their own
        } else {
          outcomes_[rank].push_back({true, batch(512, work, options)});
        }
      } catch (const RankError&) {
        outcomes_[rank].push_back({});
      } catch (const std::domain_error&) {
        outcomes_[rank].push_back({});
      } catch (const c10::OutOfMemoryError&) {
        outcomes_[rank].push_back({});
      } catch (const DeadlockError&) {
        return;                              // noted
      } catch (const std::runtime_error&) {  // of a collective
        outcomes_[rank].push_back({});
      }
    }
  }

  void compare(int call, std::vector<std::string>& wrong) const {
    const auto at = static_cast<std::size_t>(call);
    std::optional<Outcome> first;
    for (std::size_t rank = 0; rank < ranks_.count(); ++rank) {
      if (outcomes_[rank].size() <= at) {
        continue;  // it was killed before
      }
      const Outcome own = outcomes_[rank][at];
      if (!first) {
        first = own;
      }
      // With "settled" a rank acts alone between two exchanges, also when it fails.
      const bool same_end = kind_ == Kind::settled || own.fitted == first->fitted;
      const bool same_size = kind_ == Kind::settled || kind_ == Kind::per_rank ||
                             own.size == first->size || !own.fitted;
      if (!same_end || !same_size) {
        wrong.push_back("call " + std::to_string(call) + ": rank " + std::to_string(rank) +
                        (own.fitted ? " fitted with " + std::to_string(own.size) : " failed") +
                        ", the first " +
                        (first->fitted ? "fitted with " + std::to_string(first->size) : "failed"));
      }
    }
    if (call == 0 && !missed_.empty()) {
      wrong.emplace_back("parts were done twice or not at all");
    }
  }

  Kind kind_;
  std::mt19937_64 random_;
  ScheduledRanks ranks_;
  std::deque<std::vector<std::string>> texts_;
  std::deque<std::vector<std::int64_t>> numbers_;
  std::vector<std::vector<Outcome>> outcomes_;
  std::vector<std::size_t> missed_;
  bool has_errors_ = false;
  bool has_failures_ = false;
};

}  // namespace
}  // namespace brim::proofs

int main(int argc, char** argv) {
  using namespace brim::proofs;
  const int jobs = argc > 1 ? std::atoi(argv[1]) : 20'000;
  const auto seed = static_cast<std::uint64_t>(argc > 2 ? std::atoll(argv[2]) : 0);
  Tally tally("Ranks that agree, in random order of their messages");
  for (std::size_t kind = 0; kind < kNames.size(); ++kind) {
    std::unordered_set<std::uint64_t> states;
    std::int64_t messages = 0;
    std::vector<std::string> wrong;
    for (int job = 0; job < jobs / static_cast<int>(kNames.size()); ++job) {
      Job one(static_cast<Kind>(kind), seed + static_cast<std::uint64_t>(job));
      for (const std::string& each : one.run()) {
        wrong.push_back("seed " + std::to_string(seed + static_cast<std::uint64_t>(job)) + ": " +
                        each);
      }
      messages += one.ranks().messages();
      states.insert(one.ranks().states().begin(), one.ranks().states().end());
    }
    tally.row(std::string(kNames[kind]) + ": jobs", jobs / static_cast<std::int64_t>(kNames.size()),
              wrong);
    tally.row(std::string(kNames[kind]) + ": messages", messages);
    tally.row(std::string(kNames[kind]) + ": states", static_cast<std::int64_t>(states.size()));
  }
  return tally.finish();
}
