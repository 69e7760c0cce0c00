// SizeMemory with a directory: what it writes, when, and what other processes and threads see.
#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "adapt/calls.h"
#include "adapt/size_directory.h"
#include "adapt/size_file.h"

namespace brim {
namespace {

using namespace tests;
namespace fs = std::filesystem;

class SizeWriter : public SizeDirectory {};

TEST_F(SizeWriter, WhatOneMemoryLearnedTheNextOneKnows) {
  const fs::path deep = directory_ / "not" / "there" / "yet";
  std::mt19937_64 random(6);
  Attempt attempt = random_attempt(random);
  attempt.rate = 0;
  {
    SizeMemory memory(4, deep);
    EXPECT_FALSE(memory.may_know_something()) << "there is no file";
    memory.learn(kKey, attempt);
  }
  {
    SizeMemory memory(4, deep);
    EXPECT_TRUE(memory.may_know_something()) << "on its way to a file";
    ASSERT_EQ(memory.recall(kKey).size(), 1U);
  }
  SizeMemory::flush();
  SizeMemory memory(4, deep);
  EXPECT_TRUE(memory.may_know_something()) << "in a file";
  ASSERT_EQ(memory.recall(kKey).size(), 1U);
  EXPECT_TRUE(same(memory.recall(kKey).front(), attempt));
  EXPECT_TRUE(memory.recall(kKey + 1).empty());
}

TEST_F(SizeWriter, AKeyThatWasDroppedForLackOfRoomIsReadAgain) {
  std::mt19937_64 random(6);
  SizeMemory memory(2, directory_);
  for (std::uint64_t key = 1; key <= 5; ++key) {
    memory.learn(key, random_attempt(random));
  }
  EXPECT_EQ(memory.size(), 2U);
  EXPECT_EQ(memory.recall(1).size(), 1U);
}

TEST_F(SizeWriter, DamagedFileIsReplacedByTheNextFact) {
  const CapturedWarnings warnings;
  put("rubbish");
  std::mt19937_64 random(6);
  SizeMemory memory(2, directory_);
  EXPECT_TRUE(memory.recall(kKey).empty());
  memory.learn(kKey, random_attempt(random));
  SizeMemory::flush();
  EXPECT_EQ(warnings.texts().size(), 1U);
  EXPECT_EQ(size_file::read(file_, kKey).size(), 1U);
  EXPECT_EQ(warnings.texts().size(), 1U);
}

TEST_F(SizeWriter, ForgettingRemovesOurFilesAndNoOther) {
  std::mt19937_64 random(6);
  SizeMemory memory(2, directory_);
  for (std::uint64_t key = 1; key <= 5; ++key) {
    memory.learn(key, random_attempt(random));
  }
  SizeMemory::flush();
  std::ofstream(directory_ / "notes.txt") << "keep me";
  std::ofstream(directory_ / "0000000000000001.brim-sizes.bak") << "keep me";
  std::ofstream(directory_ / "000000000000000g.brim-sizes") << "keep me";
  memory.forget(3);
  EXPECT_FALSE(fs::exists(directory_ / size_file::name(3)));
  EXPECT_EQ(files(), 7U);
  memory.clear();
  EXPECT_EQ(files(), 3U) << "also of keys that are not in this process's memory any more";
  EXPECT_TRUE(memory.recall(1).empty());
  SizeMemory::flush();
  EXPECT_EQ(files(), 3U) << "nor does what was queued come back";
}

// ---------------------------------------------------------------- when and what is written

Attempt fit_with_peak(std::int64_t peak, double rate = 0) {
  return {.values = {8}, .peak = peak, .available = 1000 * kMiB, .seconds = 1, .rate = rate};
}

TEST_F(SizeWriter, IsWrittenInTheBackground) {
  SizeMemory memory(4, directory_);
  for (std::int64_t peak = 1; peak <= 1024; peak *= 2) {
    memory.learn(kKey, fit_with_peak(peak * kMiB));
  }
  // No flush. The first is written at once, the last a second later.
  const auto last = [&] {
    const auto attempts = size_file::read(file_, kKey);
    return attempts.empty() ? std::nullopt : attempts.back().peak;
  };
  for (int i = 0; i < 1000 && last() != 1024 * kMiB; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(last(), 1024 * kMiB);
}

TEST_F(SizeWriter, OnlyNewsIsWritten) {
  SizeMemory memory(4, directory_);
  const auto written = [&](const Attempt& attempt) {
    fs::remove(file_);
    memory.learn(kKey, attempt);
    SizeMemory::flush();
    return fs::exists(file_);
  };
  EXPECT_TRUE(written(fit_with_peak(100 * kMiB)));
  EXPECT_FALSE(written(fit_with_peak(100 * kMiB)));
  EXPECT_FALSE(written(fit_with_peak(101 * kMiB))) << "memory varies by so much";
  EXPECT_TRUE(written(fit_with_peak(110 * kMiB)));
  EXPECT_FALSE(written(fit_with_peak(112 * kMiB)));
  EXPECT_FALSE(written(fit_with_peak(114 * kMiB)));
  EXPECT_TRUE(written(fit_with_peak(117 * kMiB))) << "small steps add up";
  EXPECT_EQ(memory.recall(kKey).back().peak, 117 * kMiB);
  EXPECT_TRUE(written(fit_with_peak(117 * kMiB, 50.0))) << "a rate where there was none";
  EXPECT_FALSE(written(fit_with_peak(117 * kMiB, 51.0)));
  Attempt failure = fit_with_peak(117 * kMiB);
  failure.outcome = OomKind::host_memory;
  EXPECT_TRUE(written(failure));
}

TEST_F(SizeWriter, NewsThatNeverEndsIsNotWrittenWithoutAPause) {
  SizeMemory memory(4, directory_);
  std::atomic<bool> flushed{false};
  bool in_time = false;
  std::atomic<bool> begun{false};
  std::thread news([&] {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (std::int64_t i = 0; !(in_time = flushed.load()); ++i) {
      memory.learn(kKey, fit_with_peak((i % 2 + 1) * 100 * kMiB));
      begun = true;
      if (std::chrono::steady_clock::now() > deadline) {
        return;
      }
    }
  });
  while (!begun) {
    std::this_thread::yield();
  }
  SizeMemory::flush();
  flushed = true;
  news.join();
  EXPECT_TRUE(in_time);
}

TEST_F(SizeWriter, AnotherWritersTemporaryFilesAreNotInTheWay) {
  // Processes of different containers may have the same id.
  for (int counter = 0; counter < 1000; ++counter) {
    fs::create_directory(file_.string() + "." + std::to_string(getpid()) + "." +
                         std::to_string(counter) + ".tmp");
  }
  EXPECT_FALSE(size_file::write(file_, kKey, {fit_with_peak(1)}));
  EXPECT_EQ(size_file::read(file_, kKey).size(), 1U);
}

class PrunedFiles : public SizeDirectory {
 protected:
  /// A file of a key that was used so many hours ago.
  fs::path make(std::uint64_t key, int hours, const std::string& suffix = "",
                std::uintmax_t bytes = 100) const {
    const fs::path path = directory_ / (size_file::name(key) + suffix);
    std::ofstream(path) << "x";
    fs::resize_file(path, bytes);  // takes no room on the disk
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(hours));
    return path;
  }
};

TEST_F(PrunedFiles, TheOldestGoFirst) {
  for (std::uint64_t key = 1; key <= 20; ++key) {
    make(key, static_cast<int>(key));
  }
  const fs::path foreign = directory_ / "notes.txt";
  std::ofstream(foreign) << "keep me";
  EXPECT_EQ(size_file::prune(directory_, 20 * 4096), 20 * 4096) << "nothing is too much";
  EXPECT_EQ(files(), 21U);
  EXPECT_EQ(size_file::prune(directory_, 16 * 4096), 14 * 4096);
  for (std::uint64_t key = 1; key <= 20; ++key) {
    EXPECT_EQ(fs::exists(directory_ / size_file::name(key)), key <= 14) << key;
  }
  EXPECT_TRUE(fs::exists(foreign));
}

TEST_F(PrunedFiles, WhatIsReadIsNotOld) {
  std::mt19937_64 random(1);
  size_file::write(file_, kKey, {random_attempt(random)});
  fs::last_write_time(file_, fs::file_time_type::clock::now() - std::chrono::hours(99));
  make(1, 50);
  ASSERT_EQ(size_file::read(file_, kKey).size(), 1U);
  EXPECT_EQ(size_file::prune(directory_, 4096 + 4095), 4096);
  EXPECT_TRUE(fs::exists(file_));
}

TEST_F(PrunedFiles, WhatKilledWritersLeftIsRemoved) {
  const fs::path old = make(1, 2, ".0123456789abcdef.tmp");
  const fs::path fresh = make(2, 0, ".0123456789abcdef.tmp");
  const fs::path foreign = make(3, 2, ".backup");
  size_file::prune(directory_, 1);
  EXPECT_FALSE(fs::exists(old));
  EXPECT_TRUE(fs::exists(fresh)) << "may still be written";
  EXPECT_TRUE(fs::exists(foreign));
}

TEST_F(PrunedFiles, ADirectoryKeepsSixtyFourMebibytes) {
  for (std::uint64_t key = 1; key <= 17; ++key) {
    make(key, static_cast<int>(key), "", std::uintmax_t{4} << 20);
  }
  SizeMemory memory(4, directory_);
  memory.learn(kKey, fit_with_peak(1));
  SizeMemory::flush();
  EXPECT_TRUE(fs::exists(file_));
  EXPECT_TRUE(fs::exists(directory_ / size_file::name(13)));
  EXPECT_FALSE(fs::exists(directory_ / size_file::name(17)));
  EXPECT_LE(size_file::prune(directory_, std::int64_t{1} << 40), std::int64_t{64} << 20);
}

/// Runs `work` in a forked child, which must return true within some seconds.
template <class Work>
::testing::AssertionResult in_child(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(work() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? ::testing::AssertionSuccess()
                     : ::testing::AssertionFailure() << "status " << status;
}

TEST_F(SizeWriter, AForkedChildWritesWhatItLearns) {
  SizeMemory memory(100, directory_);
  for (std::uint64_t key = 1; key <= 20; ++key) {
    memory.learn(
        key, fit_with_peak(1));  // the thread that writes is at work, or waits with some of them
    EXPECT_TRUE(in_child([&] {
      memory.learn(100 + key, fit_with_peak(1));
      SizeMemory::flush();
      return memory.recall(key).size() == 1 && fs::exists(directory_ / size_file::name(100 + key));
    }));
  }
  SizeMemory::flush();
  EXPECT_EQ(files(), 40U);
}

TEST_F(SizeWriter, ManyProcessesWriteOneFile) {
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    children.push_back(fork());
    if (children.back() == 0) {
      SizeMemory memory(4, directory_);
      for (std::int64_t peak = 1; peak < 200; ++peak) {
        memory.learn(kKey, fit_with_peak(peak * peak * kMiB));
        SizeMemory::flush();
      }
      _exit(0);
    }
  }
  const CapturedWarnings warnings;
  for (const pid_t child : children) {
    int status = -1;
    while (waitpid(child, &status, WNOHANG) == 0) {
      EXPECT_LE(size_file::read(file_, kKey).size(), 1U);
    }
    EXPECT_EQ(status, 0);
  }
  EXPECT_TRUE(warnings.texts().empty()) << warnings.texts().front();
  EXPECT_GE(*size_file::read(file_, kKey).back().peak, 199 * 199 * kMiB * 95 / 100);
  EXPECT_EQ(files(), 1U);
}

TEST_F(SizeWriter, ThreadsLearnForgetAndFlush) {
  const CapturedWarnings warnings;
  in_threads(6, [&](int thread) {
    SizeMemory memory(3, directory_);
    for (int i = 0; i < 150; ++i) {
      const auto key = static_cast<std::uint64_t>((i + thread) % 7);
      memory.learn(key, fit_with_peak((1 + i * i % 1000) * kMiB));
      EXPECT_LE(memory.recall(key).size(), 1U);
      if (i % 40 == 0) {
        memory.forget(key);
      }
      if (i % 30 == 0) {
        SizeMemory::flush();
      }
      if (i == 149 && thread == 0) {
        memory.clear();
      }
    }
  });
  SizeMemory::flush();
  EXPECT_TRUE(warnings.texts().empty());
  EXPECT_LE(files(), 7U) << "nothing temporary is left";
}

TEST_F(SizeWriter, CallsInAnotherMemoryFitAtOnce) {
  const AffineWork work{.base = kMiB, .slope = 1024};
  const Budget budget = room_for(9 * kMiB);
  for (int process = 0; process < 2; ++process) {
    SizeMemory memory(4, directory_);
    std::vector<Attempt> attempts;
    batch(100'000, work, {.memory = &memory, .key = kKey, .attempts = &attempts});
    if (process == 1) {
      EXPECT_EQ(failures_of(attempts), 0);
      EXPECT_GE(attempts.back().values.front(), 8 * 1024 * 95 / 100);  // files hold no traces
    }
  }
}

}  // namespace
}  // namespace brim
