#pragma once

#include <brim/batching/interruption.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace brim::batching::detail {

/// Calls `work(part)` for each part from 0 to parts - 1, on several threads of which this is one.
/// Parts are taken in turn, so parts of unequal length keep all threads busy. The first exception
/// ends the work and comes through, as does one of this thread's InterruptionGuard.
/// @param threads 0 for as many as the machine runs at once.
template <class Work>
void in_parallel(std::size_t parts, std::size_t threads, const Work& work) {
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> stop = false;
  std::exception_ptr error;
  std::mutex mutex;
  const auto run = [&](bool caller) {
    try {
      for (std::size_t part = next++; part < parts && !stop; part = next++) {
        if (caller) {
          check_interruption();  // guards belong to a thread
        }
        work(part);
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      error = error ? error : std::current_exception();
      stop = true;
    }
  };
  if (threads == 0) {
    threads = std::max(std::thread::hardware_concurrency(), 1U);
  }
  std::vector<std::thread> others;
  try {
    for (std::size_t i = 1; i < std::min(threads, parts); ++i) {
      others.emplace_back(run, false);
    }
  } catch (const std::system_error&) {
    // The machine gives no more threads: those that are there do the work.
  }
  run(true);
  for (std::thread& other : others) {
    other.join();
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

}  // namespace brim::batching::detail
