#pragma once

#include <brim/need/attempt.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "adapt/size_file.h"

namespace brim::tests {

constexpr std::uint64_t kKey = 0xfedcba9876543210;

inline bool same(const Attempt& a, const Attempt& b) {
  return a.values == b.values && a.outcome == b.outcome && a.peak == b.peak &&
         a.requested == b.requested && a.held == b.held && a.available == b.available &&
         a.device == b.device && a.rate == b.rate;
}

inline bool same(const std::vector<Attempt>& a, const std::vector<Attempt>& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) { return same(x, y); });
}

inline Attempt random_attempt(std::mt19937_64& random) {
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

/// Runs `work` in a forked child, which must return true within some seconds.
template <class Work>
::testing::AssertionResult in_child(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    _exit(work() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? ::testing::AssertionSuccess()
                     : ::testing::AssertionFailure() << "status " << status;
}

/// A directory for files of sizes that lasts as long as the test.
class SizeDirectory : public ::testing::Test {
 protected:
  SizeDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "brim-sizes-XXXXXX").string();
    directory_ = mkdtemp(pattern.data());
    file_ = directory_ / size_file::name(kKey);
  }
  ~SizeDirectory() override { std::filesystem::remove_all(directory_); }

  std::string text() const {
    std::ifstream in(file_, std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }
  void put(const std::string& text) const {
    std::filesystem::remove(file_);  // a file that is cut to nothing first is slow on ext4
    std::ofstream(file_, std::ios::binary) << text;
  }

  void write_some() const {
    std::mt19937_64 random(3);
    EXPECT_FALSE(size_file::write(file_, kKey, {random_attempt(random), random_attempt(random)}));
  }

  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(directory_),
                                                  std::filesystem::directory_iterator()));
  }

  std::filesystem::path directory_;
  std::filesystem::path file_;
};

}  // namespace brim::tests
