// Ranks of a job as threads of which one runs at a time: which one goes on is decided at every
// message, by a seed. So each schedule can be had again, and a deadlock is seen rather than waited
// for.
#pragma once

#include <brim/adapt/agreement.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

namespace brim::proofs {

/// A rank's process has ended. Nothing that brim or a program catches.
struct Killed {};

/// All ranks wait, for each other.
class DeadlockError : public std::logic_error {
 public:
  DeadlockError() : std::logic_error("deadlock") {}
};

class ScheduledRanks {
 public:
  ScheduledRanks(std::size_t count, std::uint64_t seed)
      : ranks_(count), random_(seed), state_(count) {}

  [[nodiscard]] std::size_t count() const { return ranks_.size(); }

  /// From its n-th message on, counted from 1, a rank is gone.
  void kill(std::size_t rank, int at) { ranks_[rank].dies_at = at; }

  /// Runs `work(rank)` for each, which may end by Killed; all else must not leave it.
  void run(const std::function<void(std::size_t)>& work) {
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < count(); ++rank) {
      threads.emplace_back([&, rank] {
        wait_for_turn(rank);
        try {
          work(rank);
        } catch (const Killed&) {
          // as a process that was killed: the others notice
        }
        end(rank);
      });
    }
    hand_on();
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  /// Who sends a message: brim, or the program in a collective of its own.
  enum class Sender : std::uint8_t { brim, program };

  /// A message to all: `join` adds this rank's part. Returns when all ranks have joined.
  /// @param kind what all must do now, each with as many numbers.
  /// @throws RankError, of the program's a std::runtime_error, if a rank is gone
  std::size_t meet(std::size_t rank, Sender sender, const std::string& kind,
                   const std::function<void(std::size_t round)>& join) {
    Rank& self = ranks_[rank];
    if (++self.messages >= self.dies_at) {
      throw Killed{};
    }
    pause(rank);
    const auto fail = [sender](const char* why) {
      if (sender == Sender::program) {
        throw std::runtime_error("this collective was aborted");
      }
      throw RankError(why);
    };
    if (called_off) {
      fail("the channel is closed");
    }
    const auto lane = static_cast<std::size_t>(sender);
    const std::size_t round = self.round[lane]++;
    std::deque<Round>& rounds = rounds_[lane];
    if (round == rounds.size()) {
      rounds.push_back({kind, 0});
    }
    if (rounds[round].kind != kind) {
      wrong_.push_back("rank " + std::to_string(rank) + " does " + kind + " where others do " +
                       rounds[round].kind);
    }
    join(round);
    ++rounds[round].arrived;
    const auto is_complete = [&rounds, round, this] { return rounds[round].arrived == count(); };
    self.can_go_on = [this, is_complete] { return is_complete() || gone_ > 0 || called_off; };
    pause(rank);
    self.can_go_on = nullptr;
    if (deadlocked_ && !is_complete()) {
      throw DeadlockError();
    }
    if (!is_complete()) {
      fail("a rank is gone");
    }
    return round;
  }

  /// What went wrong, if anything did.
  [[nodiscard]] const std::vector<std::string>& wrong() const { return wrong_; }
  [[nodiscard]] std::int64_t messages() const {
    std::int64_t sum = 0;
    for (const Rank& rank : ranks_) {
      sum += rank.messages;
    }
    return sum;
  }
  /// States of the job that were seen, by hash: the kind and number of each rank's next message,
  /// and who waits.
  [[nodiscard]] const std::unordered_set<std::uint64_t>& states() const { return states_; }

  std::optional<std::pair<std::int64_t, std::string>> called_off{};

 private:
  struct Rank {
    std::array<std::size_t, 2> round{};  // its next one, by sender
    int messages = 0;
    int dies_at = 1 << 30;
    bool has_ended = false;
    std::function<bool()> can_go_on{};
  };
  struct Round {
    std::string kind;
    std::size_t arrived;
  };
  static constexpr std::size_t kNobody = static_cast<std::size_t>(-1);

  void wait_for_turn(std::size_t rank) {
    std::unique_lock lock(mutex_);
    turn_changed_.wait(lock, [&] { return turn_ == rank; });
  }

  /// Others may run before this rank goes on.
  void pause(std::size_t rank) {
    hand_on();
    wait_for_turn(rank);
  }

  void end(std::size_t rank) {
    ranks_[rank].has_ended = true;
    ++gone_;
    hand_on();
  }

  void hand_on() {
    std::vector<std::size_t> ready;
    std::vector<std::size_t> waiting;
    std::uint64_t state = state_;
    for (std::size_t rank = 0; rank < count(); ++rank) {
      const Rank& each = ranks_[rank];
      const bool waits = each.can_go_on && !each.can_go_on();
      if (!each.has_ended) {
        (waits ? waiting : ready).push_back(rank);
      }
      std::uint64_t own = (waits ? 2 : 0) + (each.has_ended ? 1 : 0);
      for (std::size_t lane = 0; lane < rounds_.size(); ++lane) {
        const std::size_t round = each.round[lane];
        const std::string& next = round < rounds_[lane].size() ? rounds_[lane][round].kind : kNone;
        own = own * 31 + std::hash<std::string>()(next) + round * 4;
      }
      state = (state ^ own) * 0x9E3779B97F4A7C15ULL;
    }
    states_.insert(state);
    if (ready.empty() && !waiting.empty()) {
      deadlocked_ = true;
      wrong_.emplace_back("deadlock of " + std::to_string(waiting.size()) + " ranks");
      ready = waiting;
    }
    const std::lock_guard lock(mutex_);
    turn_ = ready.empty() ? kNobody : ready[random_() % ready.size()];
    turn_changed_.notify_all();
  }

  inline static const std::string kNone{};

  std::vector<Rank> ranks_;
  std::array<std::deque<Round>, 2> rounds_;
  std::mt19937_64 random_;
  std::uint64_t state_;
  std::size_t gone_ = 0;
  bool deadlocked_ = false;
  std::vector<std::string> wrong_;
  std::unordered_set<std::uint64_t> states_;
  std::mutex mutex_;  // of the turn; all else belongs to the rank whose turn it is
  std::condition_variable turn_changed_;
  std::size_t turn_ = kNobody;
};

class ScheduledChannel final : public RankChannel {
 public:
  ScheduledChannel(ScheduledRanks& all, std::deque<std::vector<std::string>>& texts,
                   std::deque<std::vector<std::int64_t>>& numbers, std::size_t rank)
      : all_(all), texts_(texts), numbers_(numbers), rank_(rank) {}

  [[nodiscard]] std::int64_t rank() const override { return static_cast<std::int64_t>(rank_); }
  [[nodiscard]] std::int64_t ranks() const override {
    return static_cast<std::int64_t>(all_.count());
  }

  void least(std::span<std::int64_t> numbers) override {
    const std::string kind = "least of " + std::to_string(numbers.size());
    const std::size_t round =
        all_.meet(rank_, ScheduledRanks::Sender::brim, kind, [&](std::size_t at) {
          numbers_.resize(std::max(numbers_.size(), at + 1));
          std::vector<std::int64_t>& all = numbers_[at];
          all.resize(std::max(all.size(), numbers.size()),
                     std::numeric_limits<std::int64_t>::max());
          std::ranges::transform(numbers, all, all.begin(), std::ranges::min);
        });
    std::copy_n(numbers_[round].begin(), numbers.size(), numbers.begin());
  }

  std::vector<std::string> texts(const std::string& own) override {
    return texts_[all_.meet(rank_, ScheduledRanks::Sender::brim, "texts", [&](std::size_t at) {
      texts_.resize(std::max(texts_.size(), at + 1));
      texts_[at].resize(all_.count());
      texts_[at][rank_] = own;
    })];
  }

  void watch(bool /*on*/) override {}

  void call_off(const std::string& reason) noexcept override {
    if (!all_.called_off) {
      all_.called_off.emplace(rank(), reason);
    }
  }

  std::optional<std::pair<std::int64_t, std::string>> called_off() noexcept override {
    return all_.called_off;
  }

 private:
  ScheduledRanks& all_;
  std::deque<std::vector<std::string>>& texts_;  // by round, as are the numbers
  std::deque<std::vector<std::int64_t>>& numbers_;
  std::size_t rank_;
};

}  // namespace brim::proofs
