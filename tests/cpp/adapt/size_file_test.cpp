#include "adapt/size_file.h"

#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <locale>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "adapt/calls.h"
#include "adapt/size_directory.h"

namespace brim {
namespace {

using namespace tests;
namespace fs = std::filesystem;

class SizeFile : public SizeDirectory {};

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

TEST_F(SizeFile, AnErrorIsThatOfTheOperatingSystem) {
  fs::create_directory(file_);
  EXPECT_EQ(size_file::write(file_, kKey, {Attempt{.values = {8}}}), std::errc::is_a_directory);
  EXPECT_EQ(files(), 1U) << "nothing temporary is left";
}

}  // namespace
}  // namespace brim
