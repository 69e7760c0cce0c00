// Timing and tables for the C++ benchmarks. Cases take turns, so that a slower moment of the
// machine affects all of them, and each figure is a median.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace brim::bench {

/// A piece of work in a loop: the call through std::function is per turn, not per call.
struct Case {
  std::string name;
  std::function<void(int calls)> loop;
};

template <class Work>
Case repeated(std::string name, Work work) {
  return {std::move(name), [work](int calls) {
            for (int i = 1; i <= calls; ++i) {
              work(i);
            }
          }};
}

/// Median nanoseconds per call of each case.
inline std::vector<double> medians(const std::vector<Case>& cases, int rounds, int calls) {
  std::vector<std::vector<double>> times(cases.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const auto begin = std::chrono::steady_clock::now();
      cases[i].loop(calls);
      const std::chrono::duration<double, std::nano> taken =
          std::chrono::steady_clock::now() - begin;
      times[i].push_back(taken.count() / calls);
    }
  }
  std::vector<double> result;
  for (std::vector<double>& values : times) {
    const auto middle = values.begin() + rounds / 2;
    std::nth_element(values.begin(), middle, values.end());
    result.push_back(*middle);
  }
  return result;
}

inline std::string nanoseconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f ns", value);
  return text;
}

/// Rows under a title: printed, and for `./dev bench --report` written as `results.py` does.
class Table {
 public:
  Table(std::string title, std::string device,
        std::vector<std::string> head = {"case", "measured", "target"})
      : title_(std::move(title)), device_(std::move(device)), head_(std::move(head)) {
    std::printf("%s\n", title_.c_str());
  }

  /// A cell for each column.
  void row(const std::vector<std::string>& cells) const {
    std::string line;
    std::string fields;
    for (std::size_t i = 0; i < cells.size() && i < head_.size(); ++i) {
      const int width = i == 0 ? -46 : 12;
      std::array<char, 256> cell{};
      std::snprintf(cell.data(), cell.size(), " %*s", width, cells[i].c_str());
      line += cell.data();
      fields += (i == 0 ? "" : ", ") + quoted(head_[i]) + ": " + quoted(cells[i]);
    }
    std::printf(" %s\n", line.c_str());
    std::fflush(stdout);
    if (const char* file = std::getenv("BRIM_REPORT")) {
      std::ofstream(file, std::ios::app)
          << R"({"title": )" << quoted(title_) << R"(, "device": )" << quoted(device_)
          << R"(, "panels": [], "peers": {}, "cells": {)" << fields << "}}\n";
    }
  }
  void row(const std::string& name, const std::string& value,
           const std::string& target = "") const {
    row({name, value, target});
  }

 private:
  static std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char each : text) {
      result += each == '"' || each == '\\' ? std::string{'\\', each} : std::string{each};
    }
    return result + '"';
  }

  std::string title_;
  std::string device_;
  std::vector<std::string> head_;
};

}  // namespace brim::bench
