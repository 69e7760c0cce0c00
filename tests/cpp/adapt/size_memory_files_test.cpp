// SizeMemory with a directory: what it writes, and what other processes and threads see.
#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
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

class SizeMemoryFiles : public SizeDirectory {};

Attempt fit_with_peak(std::int64_t peak, double rate = 0) {
  return {.values = {8}, .peak = peak, .available = 1000 * kMiB, .seconds = 1, .rate = rate};
}

TEST_F(SizeMemoryFiles, WhatOneMemoryLearnedTheNextOneKnows) {
  const fs::path deep = directory_ / "not" / "there" / "yet";
  std::mt19937_64 random(6);
  Attempt attempt = random_attempt(random);
  attempt.rate = 0;
  SizeMemory first(4, deep);
  EXPECT_FALSE(first.may_know_something()) << "there is no file";
  first.learn(kKey, attempt);
  SizeMemory second(4, deep);
  EXPECT_TRUE(second.may_know_something());
  ASSERT_EQ(second.recall(kKey).size(), 1U);
  EXPECT_TRUE(same(second.recall(kKey).front(), attempt));
  EXPECT_TRUE(second.recall(kKey + 1).empty());
}

TEST_F(SizeMemoryFiles, AKeyThatWasDroppedForLackOfRoomIsReadAgain) {
  SizeMemory memory(2, directory_);
  for (std::uint64_t key = 1; key <= 5; ++key) {
    memory.learn(key, fit_with_peak(kMiB));
  }
  EXPECT_EQ(memory.size(), 2U);
  EXPECT_EQ(memory.recall(1).size(), 1U);
}

TEST_F(SizeMemoryFiles, ADamagedFileIsOneWarningAndIsReplacedByTheNextFact) {
  const CapturedWarnings warnings;
  put("rubbish");
  SizeMemory memory(2, directory_);
  EXPECT_TRUE(memory.recall(kKey).empty());
  EXPECT_TRUE(memory.recall(kKey).empty());
  memory.learn(kKey, fit_with_peak(kMiB));
  EXPECT_EQ(SizeMemory(2, directory_).recall(kKey).size(), 1U);
  ASSERT_EQ(warnings.texts().size(), 1U);
  EXPECT_CONTAINS(warnings.texts()[0], "ignored " + file_.string() + ": it is damaged");
}

TEST_F(SizeMemoryFiles, ForgettingRemovesOurFilesAndNoOther) {
  SizeMemory memory(2, directory_);
  for (std::uint64_t key = 1; key <= 5; ++key) {
    memory.learn(key, fit_with_peak(kMiB));
  }
  std::ofstream(directory_ / "notes.txt") << "keep me";
  memory.forget(3);
  EXPECT_FALSE(fs::exists(directory_ / size_file::name(3)));
  EXPECT_EQ(files(), 5U);
  memory.clear();
  EXPECT_EQ(files(), 1U) << "also of keys that are not in this process's memory any more";
  EXPECT_TRUE(memory.recall(1).empty());
}

TEST_F(SizeMemoryFiles, OnlyNewsIsWritten) {
  SizeMemory memory(4, directory_);
  const auto written = [&](const Attempt& attempt) {
    fs::remove(file_);
    memory.learn(kKey, attempt);
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

TEST_F(SizeMemoryFiles, ADirectoryThatCannotBeWrittenIsAWarningAndCallsStillWork) {
  const fs::path blocked = directory_ / "a file, not a directory";
  std::ofstream(blocked) << "x";
  const CapturedWarnings warnings;
  SizeMemory memory(4, blocked / "sizes");
  for (int i = 0; i < 2; ++i) {
    std::vector<Attempt> attempts;
    batch(8,
          [](std::int64_t size) {
            if (size > 4) {
              throw_out_of_memory();
            }
          },
          {.memory = &memory, .attempts = &attempts});
    EXPECT_TRUE(attempts.back().fitted());
  }
  EXPECT_FALSE(memory.recall(0).empty()) << "this process knows";
  ASSERT_EQ(warnings.texts().size(), 1U) << "said once";
  EXPECT_CONTAINS(warnings.texts()[0], "sizes could not be kept in " +
                                           (blocked / "sizes").string() + ": Not a directory");
}

TEST_F(SizeMemoryFiles, AHandlerOfWarningsMayUseTheMemory) {
  struct Asking final : c10::WarningHandler {
    explicit Asking(SizeMemory& asked) : memory(asked) {}
    void process(const c10::Warning&) override { known = memory.recall(kKey).size(); }
    SizeMemory& memory;
    std::size_t known = 99;
  };
  put("rubbish");
  SizeMemory memory(4, directory_);
  Asking handler(memory);
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  memory.recall(kKey);
  EXPECT_EQ(handler.known, 0U);
}

TEST_F(SizeMemoryFiles, ADirectoryDoesNotGrowWithoutBound) {
  constexpr std::uint64_t kMostFiles = 16384;
  std::ofstream(directory_ / size_file::name(1));
  for (std::uint64_t key = 2; key <= kMostFiles; ++key) {  // links are made faster than files
    fs::create_hard_link(directory_ / size_file::name(1), directory_ / size_file::name(key));
  }
  SizeMemory memory(4, directory_);
  memory.learn(kKey, fit_with_peak(kMiB));
  EXPECT_TRUE(fs::exists(file_));
  EXPECT_EQ(files(), kMostFiles - kMostFiles / 8);
}

// ---------------------------------------------------------------- processes and threads

TEST_F(SizeMemoryFiles, AForkedChildKnowsWhatItsParentKnewAndWritesWhatItLearns) {
  SizeMemory memory(100, directory_);
  for (std::uint64_t key = 1; key <= 20; ++key) {
    memory.learn(key, fit_with_peak(kMiB));
    EXPECT_TRUE(in_child([&] {
      memory.learn(100 + key, fit_with_peak(kMiB));
      return memory.recall(key).size() == 1 && fs::exists(directory_ / size_file::name(100 + key));
    }));
  }
  EXPECT_EQ(files(), 40U);
}

TEST_F(SizeMemoryFiles, AProcessMayForkWhileItsThreadsLearn) {
  SizeMemory memory(100, directory_);
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (std::uint64_t key = 1; key <= 3; ++key) {
    threads.emplace_back([&, key] {
      for (std::int64_t i = 0; !done.load(); ++i) {
        memory.learn(key, fit_with_peak((i % 2 + 1) * 100 * kMiB));  // always news
      }
    });
  }
  for (std::uint64_t key = 100; key < 110; ++key) {
    const auto child = in_child([&] {
      memory.learn(key, fit_with_peak(kMiB));
      return memory.recall(1).size() <= 1 && memory.recall(key).size() == 1;
    });
    EXPECT_TRUE(child);
    if (!child) {
      break;
    }
  }
  done.store(true);
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_LE(files(), 13U) << "nothing temporary is left";
}

TEST_F(SizeMemoryFiles, RandomWritersInManyProcessesAndThreadsLeaveWholeFiles) {
  constexpr std::uint64_t kKeys = 5;
  std::vector<pid_t> children;
  for (int child = 0; child < 4; ++child) {
    children.push_back(fork());
    if (children.back() == 0) {
      const CapturedWarnings warnings;
      std::vector<std::thread> threads;
      std::atomic<bool> right{true};
      for (int thread = 0; thread < 2; ++thread) {
        threads.emplace_back([&, seed = static_cast<unsigned>(2 * child + thread)] {
          const CapturedWarnings own;
          SizeMemory memory(3, directory_);
          std::mt19937_64 random(seed);
          for (int i = 0; i < 60; ++i) {
            const std::uint64_t key = random() % kKeys;
            // All attempts of a key have a size that tells the key.
            Attempt attempt = random_attempt(random);
            attempt.values = {static_cast<std::int64_t>(key * 100 + random() % 50 + 1)};
            memory.learn(key, attempt);
            for (const Attempt& known : memory.recall(key)) {
              right = right && known.size() / 100 == static_cast<std::int64_t>(key);
            }
            if (random() % 20 == 0) {
              memory.forget(key);
            }
            if (random() % 30 == 0) {
              memory.clear();
            }
          }
          right = right && own.texts().empty();
        });
      }
      for (std::thread& thread : threads) {
        thread.join();
      }
      _exit(right && warnings.texts().empty() ? 0 : 1);
    }
  }
  for (const pid_t child : children) {
    int status = -1;
    while (waitpid(child, &status, WNOHANG) == 0) {
      EXPECT_TRUE(size_file::read(directory_ / size_file::name(1), 1));
    }
    EXPECT_EQ(status, 0);
  }
  EXPECT_LE(files(), kKeys) << "nothing temporary is left";
  for (std::uint64_t key = 0; key < kKeys; ++key) {
    EXPECT_TRUE(size_file::read(directory_ / size_file::name(key), key));
  }
}

TEST_F(SizeMemoryFiles, CallsInAnotherMemoryFitAtOnce) {
  const AffineWork work{.base = kMiB, .slope = 1024};
  const Budget budget = room_for(9 * kMiB);
  for (int process = 0; process < 2; ++process) {
    SizeMemory memory(4, directory_);
    std::vector<Attempt> attempts;
    batch(100'000, work, {.memory = &memory, .key = kKey, .attempts = &attempts});
    if (process == 1) {
      EXPECT_EQ(failures_of(attempts), 0);
      EXPECT_GE(attempts.back().values.front(), 8 * 1024 * 95 / 100);  // peaks alone reach the file
    }
  }
}

}  // namespace
}  // namespace brim
