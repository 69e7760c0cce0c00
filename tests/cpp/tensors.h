#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <brim/memory/stats.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace brim::tests {

inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// A CPU tensor that asks its allocator for exactly `bytes`.
inline at::Tensor tensor_of(std::int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
}

/// Bytes that CPU tensors hold now.
inline std::int64_t held() { return memory_stats(at::kCPU).allocated; }

/// What an expected exception says; the test fails where none is thrown or it has another type.
template <class Error, class Work>
std::string message_of(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "thrown with another type: " << error.what();
    return "";
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

/// Runs `work(0)` to `work(count - 1)` at the same time and waits for all.
template <class Work>
void in_threads(int count, const Work& work) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&work, i] { work(i); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace brim::tests

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)
