#include <ATen/ops/from_blob.h>
#include <brim/dist/group_channel.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "waiting.h"

namespace brim {
namespace {

using SteadyClock = std::chrono::steady_clock;
using CalledOff = std::optional<std::pair<std::int64_t, std::string>>;

constexpr const char* kCalledOff = "called_off";
constexpr auto kPause = std::chrono::milliseconds(20);
constexpr auto kPatience = std::chrono::seconds(3);  // the others look twice a second

/// Waits until every other rank has set its key with this name, for kPatience at most, and returns
/// those that have not. Empty where the store does not answer.
std::vector<std::int64_t> missing(c10d::Store& store, const char* name, std::int64_t rank,
                                  std::int64_t ranks) {
  std::vector<std::int64_t> others;
  for (std::int64_t other = 0; other < ranks; ++other) {
    if (other != rank) {
      others.push_back(other);
    }
  }
  const auto has_set = [&](std::int64_t other) { return store.check({c10::str(name, other)}); };
  try {
    const auto end = SteadyClock::now() + kPatience;
    while (std::erase_if(others, has_set), !others.empty() && SteadyClock::now() < end) {
      std::this_thread::sleep_for(kPause);
    }
    return others;
  } catch (const std::exception&) {
    return {};  // the process that had the store is gone
  }
}

/// The rank and the reason, or empty. @throws where the store does not answer.
CalledOff read_called_off(c10d::Store& store) {
  if (!store.check({kCalledOff})) {
    return std::nullopt;
  }
  const std::vector<std::uint8_t> bytes = store.get(kCalledOff);
  const std::string text(bytes.begin(), bytes.end());
  const std::size_t space = text.find(' ');
  return std::pair(std::stoll(text.substr(0, space)), text.substr(space + 1));
}

}  // namespace

struct GroupChannel::Program {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;

  /// Ends its collectives, where its backend can.
  void abort() const {
    if (const auto there = group.lock()) {
      there->abort();
    }
  }
};

/// Looks into the store now and then while work with collectives inside runs. Has a connection of
/// its own, and remembers what it read: the store may end with the rank that called the work off.
class GroupChannel::Watcher {
 public:
  Watcher(c10d::Store& store, const Program& program, std::int64_t rank)
      : store_(store.clone()), program_(program), rank_(rank), thread_([this] { run(); }) {}
  ~Watcher() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  void set(bool on) {
    {
      const std::lock_guard lock(mutex_);
      on_ = on;
    }
    changed_.notify_all();
  }

  CalledOff found() {
    const std::lock_guard lock(mutex_);
    return found_;
  }

 private:
  void run() noexcept {
    constexpr auto kBetweenLooks = std::chrono::milliseconds(500);
    std::unique_lock lock(mutex_);
    while (!ended_) {
      if (!on_) {
        changed_.wait(lock, [&] { return on_ || ended_; });
      } else if (!changed_.wait_for(lock, kBetweenLooks, [&] { return !on_ || ended_; })) {
        lock.unlock();
        const bool stop = look();
        lock.lock();
        if (stop) {
          return;
        }
      }
    }
  }

  /// Whether there is nothing more to look for.
  bool look() noexcept {
    try {
      auto found = read_called_off(*store_);
      if (!found) {
        return false;
      }
      const bool own = found->first == rank_;
      {
        const std::lock_guard lock(mutex_);
        found_ = std::move(found);
      }
      if (!own) {
        store_->set(c10::str("seen/", rank_), "1");
        program_.abort();
      }
    } catch (const std::exception&) {
      // The process that had the store is gone, which ends this job anyway.
    }
    return true;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const Program& program_;
  std::int64_t rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  CalledOff found_;
  bool on_ = false;
  bool ended_ = false;
  std::thread thread_;  // last: it uses the others
};

GroupChannel::GroupChannel(c10::intrusive_ptr<c10d::Backend> messages,
                           c10::intrusive_ptr<c10d::Store> store,
                           const c10::intrusive_ptr<c10d::ProcessGroup>& program)
    : rank_(messages->getRank()),
      ranks_(messages->getSize()),
      messages_(std::move(messages)),
      store_(std::move(store)),
      program_(new Program{c10::weak_intrusive_ptr<c10d::ProcessGroup>(program)}) {}

GroupChannel::~GroupChannel() { close(); }

void GroupChannel::close() noexcept {
  waiting([&] {
    watcher_.reset();
    messages_.reset();  // joins its threads
  });
}

std::int64_t GroupChannel::rank() const { return rank_; }
std::int64_t GroupChannel::ranks() const { return ranks_; }

/// Its memory is the caller's: a reduction of it allocates no tensor memory.
void GroupChannel::reduce(const at::Tensor& tensor, bool to_least) {
  if (!messages_) {
    throw RankError("an earlier call of these ranks has failed: they cannot agree any more");
  }
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = to_least ? c10d::ReduceOp::MIN : c10d::ReduceOp::MAX;
  std::string error;
  waiting([&] {
    try {
      messages_->allreduce(tensors, options)->wait();
    } catch (const c10::Error& failure) {
      error = failure.what_without_backtrace();  // raised below: the ranks are lost either way
    } catch (const std::exception& failure) {
      error = failure.what();  // the same
    }
  });
  if (!error.empty()) {
    lost(error);
  }
}

void GroupChannel::least(std::span<std::int64_t> numbers) {
  reduce(at::from_blob(numbers.data(), {std::ssize(numbers)}, at::TensorOptions(at::kLong)), true);
}

std::vector<std::string> GroupChannel::texts(const std::string& own) {
  // Each rank fills its place in zeros.
  std::string all(static_cast<std::size_t>(ranks_) * kLongestText, '\0');
  const auto place = [&](std::int64_t rank) {
    return static_cast<std::size_t>(rank) * kLongestText;
  };
  own.copy(all.data() + place(rank_), kLongestText);
  reduce(at::from_blob(all.data(), {std::ssize(all)}, at::TensorOptions(at::kByte)), false);
  std::vector<std::string> texts;
  for (std::int64_t rank = 0; rank < ranks_; ++rank) {
    const std::string text = all.substr(place(rank), kLongestText);
    texts.push_back(text.substr(0, text.find('\0')));
  }
  return texts;
}

void GroupChannel::lost(const std::string& why) {
  std::vector<std::int64_t> gone;
  if (!called_off()) {
    waiting([&] {
      // A rank may wait for this one and not for the one that is gone: it must notice too.
      messages_.reset();
      try {
        store_->set(c10::str("left/", rank_), "1");
      } catch (const std::exception&) {
        return;  // the process that had the store is gone
      }
      gone = missing(*store_, "left/", rank_, ranks_);
    });
  }
  close();
  const std::string who =
      gone.empty() ? "" : c10::str("; nothing was heard of rank ", c10::Join(", ", gone), " since");
  throw RankError(c10::str("the connection to another rank is lost, or it did not answer in time",
                           who, " (", why, ")"));
}

void GroupChannel::watch(bool on) {
  if (!watcher_ && on && messages_) {
    watcher_ = std::make_unique<Watcher>(*store_, *program_, rank_);
  }
  if (watcher_) {
    watcher_->set(on);
  }
}

void GroupChannel::call_off(const std::string& reason) noexcept {
  try {
    waiting([&] {
      store_->compareSet(kCalledOff, "", c10::str(rank_, " ", reason));
      missing(*store_, "seen/", rank_, ranks_);
      program_->abort();
    });
  } catch (const std::exception&) {
    // The other ranks notice that this one ends.
  }
  close();
}

CalledOff GroupChannel::called_off() noexcept {
  try {
    if (!called_off_ && watcher_) {
      called_off_ = watcher_->found();
    }
    if (!called_off_) {
      called_off_ = read_called_off(*store_);
    }
  } catch (const std::exception&) {
    // The process that had the store is gone.
  }
  return called_off_;
}

}  // namespace brim
