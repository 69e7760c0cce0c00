#pragma once

// Ranks that are threads of one process, to test how adaptive calls agree.

#include <brim/adapt/agreement.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace brim::tests {

/// Where the ranks meet.
class ThreadRanks {
 public:
  explicit ThreadRanks(std::int64_t count)
      : count_(count), texts_(static_cast<std::size_t>(count)) {}

  [[nodiscard]] std::int64_t count() const { return count_; }
  /// Runs `work(rank)` on a thread per rank, and returns what each threw.
  template <class Work>
  std::vector<std::exception_ptr> run(const Work& work) {
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(count_));
    std::vector<std::thread> threads;
    for (std::int64_t rank = 0; rank < count_; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          work(rank);
        } catch (...) {
          errors[static_cast<std::size_t>(rank)] = std::current_exception();
        }
        const std::lock_guard lock(mutex_);
        ++gone_;
        changed_.notify_all();
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    gone_ = 0;
    return errors;
  }

 private:
  friend class ThreadChannel;

  /// Calls `join` under the lock; the last rank to come lets all go on. A rank that ended without
  /// coming fails the others, as a connection that is closed does.
  template <class Join>
  void meet(const Join& join) {
    std::unique_lock lock(mutex_);
    const int round = round_;
    join(arrived_ == 0);
    if (++arrived_ == count_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return round_ != round || gone_ > 0 || called_off_; });
    if (round_ == round) {
      throw RankError("a rank is gone");
    }
  }

  const std::int64_t count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int round_ = 0;
  std::int64_t arrived_ = 0;
  std::int64_t gone_ = 0;
  std::vector<std::int64_t> numbers_;
  std::vector<std::string> texts_;
  std::optional<std::pair<std::int64_t, std::string>> called_off_;
};

class ThreadChannel final : public RankChannel {
 public:
  ThreadChannel(ThreadRanks& all, std::int64_t rank) : all_(all), rank_(rank) {}

  [[nodiscard]] std::int64_t rank() const override { return rank_; }
  [[nodiscard]] std::int64_t ranks() const override { return all_.count_; }

  [[nodiscard]] int exchanges() const { return exchanges_; }

  void least(std::span<std::int64_t> numbers) override {
    ++exchanges_;
    all_.meet([&](bool first) {
      if (first) {
        all_.numbers_.assign(numbers.begin(), numbers.end());
      } else {
        std::ranges::transform(all_.numbers_, numbers, all_.numbers_.begin(), std::ranges::min);
      }
    });
    // The next round begins when every rank has read: each joins it only after this.
    std::vector<std::int64_t> result;
    all_.meet([&](bool) { result = all_.numbers_; });
    std::ranges::copy(result, numbers.begin());
  }

  std::vector<std::string> texts(const std::string& own) override {
    all_.meet([&](bool) { all_.texts_[static_cast<std::size_t>(rank_)] = own; });
    std::vector<std::string> result;
    all_.meet([&](bool) { result = all_.texts_; });
    return result;
  }

  void watch(bool /*on*/) override {}

  void call_off(const std::string& reason) noexcept override {
    const std::lock_guard lock(all_.mutex_);
    all_.called_off_.emplace(rank_, reason);
    all_.changed_.notify_all();
  }

  std::optional<std::pair<std::int64_t, std::string>> called_off() noexcept override {
    const std::lock_guard lock(all_.mutex_);
    return all_.called_off_;
  }

 private:
  ThreadRanks& all_;
  std::int64_t rank_;
  int exchanges_ = 0;
};

}  // namespace brim::tests
