#include "adapt/size_file.h"

#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <locale>
#include <random>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "adapt/calls.h"

namespace brim {
namespace {

using namespace tests;
namespace fs = std::filesystem;

constexpr std::uint64_t kKey = 0xfedcba9876543210;

bool same(const Attempt& a, const Attempt& b) {
  return a.values == b.values && a.outcome == b.outcome && a.peak == b.peak &&
         a.requested == b.requested && a.held == b.held && a.available == b.available &&
         a.device == b.device && a.rate == b.rate;
}

Attempt random_attempt(std::mt19937_64& random) {
  const auto bytes = [&] { return static_cast<std::int64_t>(random() >> (1 + random() % 62)); };
  const auto maybe = [&] {
    return random() % 3 == 0 ? std::nullopt : std::optional<std::int64_t>(bytes());
  };
  Attempt attempt;
  attempt.values.resize(1 + random() % 4);
  for (std::int64_t& value : attempt.values) {
    value = std::max<std::int64_t>(bytes(), 1);
  }
  attempt.outcome = static_cast<OomKind>(random() % 5);
  attempt.peak = maybe();
  attempt.requested = maybe();
  attempt.held = bytes();
  attempt.available = maybe();
  attempt.rate = static_cast<double>(random()) / 3e7;
  return attempt;
}

class SizeFile : public ::testing::Test {
 protected:
  SizeFile() {
    std::string pattern = (fs::temp_directory_path() / "brim-sizes-XXXXXX").string();
    directory_ = mkdtemp(pattern.data());
    file_ = directory_ / size_file::name(kKey);
  }
  ~SizeFile() override { fs::remove_all(directory_); }

  std::string text() const {
    std::ifstream in(file_, std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }
  void put(const std::string& text) const { std::ofstream(file_, std::ios::binary) << text; }

  void write_some() const {
    std::mt19937_64 random(3);
    size_file::write(file_, kKey, {random_attempt(random), random_attempt(random)});
  }

  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }

  fs::path directory_;
  fs::path file_;
};

TEST_F(SizeFile, NameIsTheKeyInHexadecimal) {
  EXPECT_EQ(size_file::name(kKey), "fedcba9876543210.brim-sizes");
  EXPECT_EQ(size_file::name(1), "0000000000000001.brim-sizes");
}

TEST_F(SizeFile, ReadsBackWhatWasWritten) {
  const CapturedWarnings warnings;
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i < 300; ++i) {
    std::vector<Attempt> attempts(i % (SizeMemory::kAttemptsPerKey + 1));
    for (Attempt& attempt : attempts) {
      attempt = random_attempt(random);
    }
    size_file::write(file_, kKey, attempts);
    const auto read = size_file::read(file_, kKey);
    ASSERT_EQ(read.size(), attempts.size());
    for (std::size_t k = 0; k < attempts.size(); ++k) {
      EXPECT_TRUE(same(read[k], attempts[k])) << text();
    }
  }
  EXPECT_TRUE(warnings.texts().empty());
  EXPECT_EQ(files(), 1U) << "nothing temporary is left";
}

TEST_F(SizeFile, NumbersDoNotDependOnTheProgramsLanguage) {
  struct Grouping : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
  };
  const Attempt attempt{.values = {1'234'567}, .peak = 9'876'543'210, .rate = 12345.678};
  const std::locale before = std::locale::global(std::locale(std::locale(), new Grouping));
  size_file::write(file_, kKey, {attempt});
  const auto inside = size_file::read(file_, kKey);
  std::locale::global(before);
  const auto outside = size_file::read(file_, kKey);
  ASSERT_EQ(inside.size(), 1U);
  ASSERT_EQ(outside.size(), 1U) << text();
  EXPECT_TRUE(same(inside[0], attempt));
  EXPECT_TRUE(same(outside[0], attempt));
}

TEST_F(SizeFile, NoFileMeansNoFactsAndNoWarning) {
  const CapturedWarnings warnings;
  EXPECT_TRUE(size_file::read(file_, kKey).empty());
  EXPECT_TRUE(size_file::read("/nowhere/at/all", kKey).empty());
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(SizeFile, WhatIsNotOursIsIgnoredWithAWarning) {
  write_some();
  const std::string good = text();
  const std::string first_line = good.substr(0, good.find('\n') + 1);
  const std::vector<std::string> bad{
      "",
      "\n",
      "hello\n",
      std::string(100, '\0'),
      std::string(1000, '\xff'),
      "brim-sizes 1" + good.substr(good.find('\n')),
      first_line,
      first_line + "0000000000000001" + good.substr(good.find('\n', first_line.size())),
      good + good,
      good + "x",
      good + "1 100 -1 1000 10 0 1 64\n",
      good + std::string(70'000, '\n'),
      std::string(100'000'000, '1'),
      "#!/bin/sh\nrm -rf /\n",
  };
  for (const std::string& content : bad) {
    put(content);
    const CapturedWarnings warnings;
    EXPECT_TRUE(size_file::read(file_, kKey).empty()) << content.substr(0, 200);
    ASSERT_EQ(warnings.texts().size(), 1U) << content.substr(0, 200);
    EXPECT_CONTAINS(warnings.texts()[0], file_.string());
    EXPECT_CONTAINS(warnings.texts()[0], "damaged");
  }
  fs::remove(file_);
  fs::create_directory(file_);
  const CapturedWarnings warnings;
  EXPECT_TRUE(size_file::read(file_, kKey).empty()) << "a directory of that name";
  EXPECT_EQ(warnings.texts().size(), 1U);
}

TEST_F(SizeFile, ATruncatedFileIsIgnoredWhereverItEnds) {
  write_some();
  const std::string good = text();
  for (std::size_t length = 0; length + 1 < good.size(); ++length) {
    put(good.substr(0, length));
    const CapturedWarnings warnings;
    ASSERT_TRUE(size_file::read(file_, kKey).empty()) << "after " << length << " bytes";
    ASSERT_EQ(warnings.texts().size(), 1U) << "after " << length << " bytes";
  }
}

TEST_F(SizeFile, AnyByteThatChangedIsNoticed) {
  write_some();
  const std::string good = text();
  std::mt19937 random(8);
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (int k = 0; k < 4; ++k) {
      std::string bad = good;
      // Half of them a digit, which is damage that still looks like a number.
      bad[i] = k % 2 == 0 ? static_cast<char>('0' + random() % 10) : static_cast<char>(random());
      if (bad[i] == good[i]) {
        continue;
      }
      put(bad);
      const CapturedWarnings warnings;
      ASSERT_TRUE(size_file::read(file_, kKey).empty()) << "byte " << i << "\n" << bad;
      ASSERT_EQ(warnings.texts().size(), 1U);
    }
  }
}

TEST_F(SizeFile, AReaderNeverSeesAPartOfAFile) {
  std::vector<std::vector<Attempt>> versions(2);
  std::mt19937_64 random(5);
  for (std::size_t i = 0; i < SizeMemory::kAttemptsPerKey; ++i) {
    versions[0].push_back(random_attempt(random));
    versions[1].push_back(random_attempt(random));
  }
  versions[1].resize(3);
  size_file::write(file_, kKey, versions[0]);
  std::atomic<bool> done{false};
  std::vector<std::thread> writers;
  for (int w = 0; w < 2; ++w) {
    writers.emplace_back([&] {
      for (int i = 0; !done.load(); ++i) {
        size_file::write(file_, kKey, versions[static_cast<std::size_t>(i % 2)]);
      }
    });
  }
  const CapturedWarnings warnings;
  int seen[2] = {0, 0};
  bool whole = true;
  for (int i = 0; whole && (i < 3000 || (i < 100'000 && (seen[0] == 0 || seen[1] == 0))); ++i) {
    const auto attempts = size_file::read(file_, kKey);
    const std::size_t which = attempts.size() == versions[0].size() ? 0 : 1;
    ++seen[which];
    whole = whole && attempts.size() == versions[which].size() &&
            same(attempts.back(), versions[which].back());
  }
  done.store(true);
  for (std::thread& writer : writers) {
    writer.join();
  }
  EXPECT_TRUE(warnings.texts().empty()) << warnings.texts().front();
  EXPECT_TRUE(whole);
  EXPECT_GT(seen[0], 0);
  EXPECT_GT(seen[1], 0);
  EXPECT_EQ(files(), 1U);
}

TEST_F(SizeFile, AFileThatIsRemovedWhileItIsReadIsNotDamaged) {
  write_some();
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done.load()) {
      fs::remove(file_);
      write_some();
    }
  });
  const CapturedWarnings warnings;
  for (int i = 0; i < 5000; ++i) {
    size_file::read(file_, kKey);
  }
  done.store(true);
  other.join();
  EXPECT_TRUE(warnings.texts().empty()) << warnings.texts().front();
}

TEST_F(SizeFile, ADirectoryThatCannotBeWrittenIsAWarningAndCallsStillWork) {
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
  ASSERT_EQ(warnings.texts().size(), 1U) << "said once a directory";
  EXPECT_CONTAINS(warnings.texts()[0], "sizes could not be kept in " +
                                           (blocked / "sizes").string() + ": Not a directory");
}

// ---------------------------------------------------------------- SizeMemory with a directory

TEST_F(SizeFile, WhatOneMemoryLearnedTheNextOneKnows) {
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

TEST_F(SizeFile, AKeyThatWasDroppedForLackOfRoomIsReadAgain) {
  std::mt19937_64 random(6);
  SizeMemory memory(2, directory_);
  for (std::uint64_t key = 1; key <= 5; ++key) {
    memory.learn(key, random_attempt(random));
  }
  EXPECT_EQ(memory.size(), 2U);
  EXPECT_EQ(memory.recall(1).size(), 1U);
}

TEST_F(SizeFile, DamagedFileIsReplacedByTheNextFact) {
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

TEST_F(SizeFile, ForgettingRemovesOurFilesAndNoOther) {
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

TEST_F(SizeFile, IsWrittenInTheBackground) {
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

TEST_F(SizeFile, OnlyNewsIsWritten) {
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

TEST_F(SizeFile, NewsThatNeverEndsIsNotWrittenWithoutAPause) {
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

TEST_F(SizeFile, AnotherWritersTemporaryFilesAreNotInTheWay) {
  // Processes of different containers may have the same id.
  for (int counter = 0; counter < 1000; ++counter) {
    fs::create_directory(file_.string() + "." + std::to_string(getpid()) + "." +
                         std::to_string(counter) + ".tmp");
  }
  EXPECT_FALSE(size_file::write(file_, kKey, {fit_with_peak(1)}));
  EXPECT_EQ(size_file::read(file_, kKey).size(), 1U);
}

TEST_F(SizeFile, AnErrorIsThatOfTheOperatingSystem) {
  fs::create_directory(file_);
  EXPECT_EQ(size_file::write(file_, kKey, {fit_with_peak(1)}), std::errc::is_a_directory);
  EXPECT_EQ(files(), 1U) << "nothing temporary is left";
}

class PrunedFiles : public SizeFile {
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

TEST_F(SizeFile, AForkedChildWritesWhatItLearns) {
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

TEST_F(SizeFile, ManyProcessesWriteOneFile) {
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

TEST_F(SizeFile, ThreadsLearnForgetAndFlush) {
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

TEST_F(SizeFile, CallsInAnotherMemoryFitAtOnce) {
  const AffineWork work{.base = kMiB, .slope = 1024};
  const Budget budget = room_for(9 * kMiB);
  for (int process = 0; process < 2; ++process) {
    SizeMemory memory(4, directory_);
    std::vector<Attempt> attempts;
    batch(100'000, work, {.memory = &memory, .key = kKey, .attempts = &attempts});
    if (process == 1) {
      EXPECT_EQ(failures_of(attempts), 0);
      EXPECT_GE(attempts.back().values.front(), 8 * 1024 * 97 / 100);
    }
  }
}

}  // namespace
}  // namespace brim
