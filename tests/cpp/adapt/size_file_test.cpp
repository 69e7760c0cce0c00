#include "adapt/size_file.h"

#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <locale>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "adapt/size_directory.h"

namespace brim {
namespace {

using namespace tests;
namespace fs = std::filesystem;

class SizeFile : public SizeDirectory {};

std::vector<Attempt> random_attempts(std::mt19937_64& random, std::size_t count) {
  std::vector<Attempt> attempts(count);
  std::ranges::generate(attempts, [&] { return random_attempt(random); });
  return attempts;
}

TEST_F(SizeFile, NameIsTheKeyInHexadecimal) {
  EXPECT_EQ(size_file::name(kKey), "fedcba9876543210.brim-sizes");
  EXPECT_EQ(size_file::name(1), "0000000000000001.brim-sizes");
}

TEST_F(SizeFile, ReadsBackWhatWasWritten) {
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i < 100; ++i) {
    const auto attempts = random_attempts(random, i % (SizeMemory::kAttemptsPerKey + 1));
    ASSERT_FALSE(size_file::write(file_, kKey, attempts));
    const auto read = size_file::read(file_, kKey);
    ASSERT_TRUE(read && same(*read, attempts)) << text();
  }
  EXPECT_EQ(files(), 1U) << "nothing temporary is left";
}

TEST_F(SizeFile, NumbersDoNotDependOnTheProgramsLanguage) {
  struct Grouping : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
  };
  const std::vector<Attempt> attempts{
      {.values = {1'234'567}, .peak = 9'876'543'210, .rate = 12345.678}};
  const std::locale before = std::locale::global(std::locale(std::locale(), new Grouping));
  size_file::write(file_, kKey, attempts);
  const auto inside = size_file::read(file_, kKey);
  std::locale::global(before);
  const auto outside = size_file::read(file_, kKey);
  EXPECT_TRUE(inside && same(*inside, attempts));
  EXPECT_TRUE(outside && same(*outside, attempts)) << text();
}

TEST_F(SizeFile, NoFileMeansNoFacts) {
  for (const fs::path& file : {file_, fs::path("/nowhere/at/all"), file_ / "below"}) {
    const auto read = size_file::read(file, kKey);
    EXPECT_TRUE(read && read->empty()) << file;
  }
}

TEST_F(SizeFile, WhatIsNotOursIsRefused) {
  write_some();
  const std::string good = text();
  const std::string lines = good.substr(good.find('\n'));
  const std::vector<std::string> bad{
      "",
      "\n",
      "hello\n",
      std::string(100, '\0'),
      std::string(1000, '\xff'),
      "brim-sizes 2 fedcba9876543210" + lines,
      "brim-sizes 3 0000000000000001" + lines,
      "brim-sizes 3 fedcba9876543210\n1 100 -1 1000 10 0 nothing 64\nend\n",
      "brim-sizes 3 fedcba9876543210\n1 100 -1 1000 10 nan cpu 64\nend\n",
      "brim-sizes 3 fedcba9876543210\n1 100 -1 1000 10 -0.5 cpu 64\nend\n",
      "brim-sizes 3 fedcba9876543210\n1 100 -1 1000 10 0 cpu 99999999999999999999\nend\n",
      good + good,
      good + "x",
      good + "1 100 -1 1000 10 0 cpu 64\n",
      good + std::string(70'000, '\n'),
      std::string(10'000'000, '1'),
      "#!/bin/sh\nrm -rf /\n",
  };
  for (const std::string& content : bad) {
    put(content);
    EXPECT_FALSE(size_file::read(file_, kKey)) << content.substr(0, 200);
  }
  fs::remove(file_);
  fs::create_directory(file_);
  EXPECT_FALSE(size_file::read(file_, kKey)) << "a directory of that name";
  fs::remove(file_);
  ASSERT_EQ(mkfifo(file_.c_str(), 0600), 0);
  EXPECT_FALSE(size_file::read(file_, kKey)) << "a pipe, which has no writer";
}

TEST_F(SizeFile, EveryTruncationIsNoticed) {
  std::mt19937_64 random(2);
  for (const std::size_t count : {0, 1, 3}) {
    size_file::write(file_, kKey, random_attempts(random, count));
    const std::string good = text();
    for (std::size_t length = 0; length + 1 < good.size(); ++length) {
      put(good.substr(0, length));
      ASSERT_FALSE(size_file::read(file_, kKey)) << "after " << length << " bytes";
      put(good.substr(0, length) + std::string(good.size() - length, '\0'));
      ASSERT_FALSE(size_file::read(file_, kKey)) << "zeros after " << length << " bytes";
    }
  }
}

TEST_F(SizeFile, NoDamageGivesAnAttemptThatCouldNotHaveBeen) {
  write_some();
  const std::string good = text();
  std::mt19937_64 random(8);
  for (int i = 0; i < 1000; ++i) {
    std::string bad = good;
    for (auto changes = 1 + random() % 3; changes > 0; --changes) {
      // Half of them a character that such a file has, which looks like a number then.
      bad[random() % bad.size()] =
          random() % 2 == 0 ? good[random() % good.size()] : static_cast<char>(random());
    }
    put(bad);
    for (const Attempt& each : size_file::read(file_, kKey).value_or(std::vector<Attempt>())) {
      ASSERT_FALSE(each.values.empty());
      ASSERT_GE(std::ranges::min(each.values), 1);
      ASSERT_LE(each.outcome, OomKind::size_limit);
      ASSERT_GE(std::min({each.held, each.peak.value_or(0), each.requested.value_or(0),
                          each.available.value_or(0)}),
                0);
      ASSERT_GE(each.rate, 0.0);
    }
  }
}

TEST_F(SizeFile, AReaderSeesAWholeFileOrNoneWhateverOthersDo) {
  std::mt19937_64 random(5);
  const auto longer = random_attempts(random, SizeMemory::kAttemptsPerKey);
  const auto shorter = random_attempts(random, 3);
  std::atomic<bool> done{false};
  std::vector<std::thread> others;
  for (unsigned seed = 0; seed < 3; ++seed) {
    others.emplace_back([&, seed] {
      for (std::mt19937_64 draw(seed); !done.load();) {
        switch (draw() % 8) {
          case 0:
            fs::remove(file_);
            break;
          case 1:
            size_file::prune(directory_, 0);  // also what another is about to rename
            break;
          default:
            EXPECT_FALSE(size_file::write(file_, kKey, draw() % 2 == 0 ? longer : shorter));
        }
      }
    });
  }
  int seen[3] = {};
  for (int i = 0; i < 100'000 && (i < 3000 || *std::ranges::min_element(seen) == 0); ++i) {
    const auto read = size_file::read(file_, kKey);
    const bool whole = read && (read->empty() || same(*read, longer) || same(*read, shorter));
    EXPECT_TRUE(whole);
    if (!whole) {
      break;
    }
    ++seen[read->empty() ? 0 : read->size() == longer.size() ? 1 : 2];
  }
  done.store(true);
  for (std::thread& other : others) {
    other.join();
  }
  EXPECT_GT(*std::ranges::min_element(seen), 0) << ::testing::PrintToString(seen);
  EXPECT_LE(files(), 1U) << "nothing temporary is left";
}

TEST_F(SizeFile, AnErrorIsThatOfTheOperatingSystemAndLeavesNothing) {
  const std::vector<Attempt> attempts{Attempt{.values = {8}}};
  fs::create_directory(file_);
  EXPECT_EQ(size_file::write(file_, kKey, attempts), std::errc::is_a_directory);
  EXPECT_EQ(size_file::write("/proc/nowhere/file", kKey, attempts),
            std::errc::no_such_file_or_directory);
  EXPECT_TRUE(in_child([&] {  // as on a full disk
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit none{0, 0};
    return setrlimit(RLIMIT_FSIZE, &none) == 0 &&
           size_file::write(directory_ / size_file::name(1), 1, attempts) ==
               std::errc::file_too_large;
  }));
  EXPECT_EQ(files(), 1U) << "nothing temporary is left";
}

// ---------------------------------------------------------------- prune

class PrunedFiles : public SizeDirectory {
 protected:
  /// A file that was used so many hours ago.
  fs::path make(const std::string& name, int hours) const {
    std::ofstream(directory_ / name) << "x";
    fs::last_write_time(directory_ / name,
                        fs::file_time_type::clock::now() - std::chrono::hours(hours));
    return directory_ / name;
  }
};

TEST_F(PrunedFiles, TheOldestOfOursGoFirst) {
  for (int key = 1; key <= 20; ++key) {
    make(size_file::name(static_cast<std::uint64_t>(key)), key);
  }
  for (const char* foreign : {"notes.txt", "0000000000000001.brim-sizes.bak", "g.brim-sizes",
                              "000000000000000g.brim-sizes", "00000000000000001.brim-sizes"}) {
    make(foreign, 99);
  }
  const fs::path killed = make(size_file::name(1) + ".0123456789abcdef.tmp", 50);
  size_file::prune(directory_, 21);
  EXPECT_EQ(files(), 26U) << "not too many";
  size_file::prune(directory_, 16);
  EXPECT_FALSE(fs::exists(killed)) << "what a killed writer left";
  for (int key = 1; key <= 20; ++key) {
    EXPECT_EQ(fs::exists(directory_ / size_file::name(static_cast<std::uint64_t>(key))), key <= 14)
        << key;
  }
  size_file::prune(directory_, 0);
  EXPECT_EQ(files(), 5U) << "the foreign ones";
  size_file::prune(directory_ / "not there", 0);
}

TEST_F(PrunedFiles, WhatIsReadIsNotOld) {
  write_some();
  fs::last_write_time(file_, fs::file_time_type::clock::now() - std::chrono::hours(99));
  make(size_file::name(1), 50);
  ASSERT_EQ(size_file::read(file_, kKey)->size(), 2U);
  size_file::prune(directory_, 1);
  EXPECT_TRUE(fs::exists(file_));
  EXPECT_EQ(files(), 1U);
}

}  // namespace
}  // namespace brim
