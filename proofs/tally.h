// What the C++ proofs count: as tally.py does.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "harness.h"

namespace brim::proofs {

class Tally {
 public:
  explicit Tally(const std::string& title)
      : table_(title, "cpu", {"what", "cases", "wrong", "seconds"}) {}

  /// Counts the cases of one kind, since the last row; `wrong` describes those that failed.
  void row(const std::string& what, std::int64_t cases,
           const std::vector<std::string>& wrong = {}) {
    constexpr std::size_t kShown = 20;
    for (std::size_t i = 0; i < wrong.size() && i < kShown; ++i) {
      std::printf("  WRONG, %s: %s\n", what.c_str(), wrong[i].c_str());
    }
    is_wrong_ = is_wrong_ || !wrong.empty();
    const auto now = std::chrono::steady_clock::now();
    const auto seconds = std::chrono::round<std::chrono::seconds>(now - begin_).count();
    begin_ = now;
    table_.row({what, grouped(cases), std::to_string(wrong.size()), std::to_string(seconds)});
  }

  /// What `main` returns.
  [[nodiscard]] int finish() const { return is_wrong_ ? 1 : 0; }

 private:
  static std::string grouped(std::int64_t number) {
    std::string text = std::to_string(number);
    for (std::size_t at = text.size(); at > 3; at -= 3) {
      text.insert(at - 3, 1, ',');
    }
    return text;
  }

  bench::Table table_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  bool is_wrong_ = false;
};

}  // namespace brim::proofs
