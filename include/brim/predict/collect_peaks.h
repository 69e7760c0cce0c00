#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <span>
#include <vector>

namespace brim {

/// What one piece of work held at its peak. All in bytes, of one device.
struct PeakSample {
  std::optional<double> feature;  ///< what the work returned; empty if it ran out of memory
  /// The most held on the device, older tensors included. Of work that ran out of memory: what it
  /// held and asked for, a lower bound of its need.
  std::int64_t peak = 0;
  std::int64_t start = 0;  ///< held before the work began
  std::int64_t base = 0;   ///< of that, held all the time; 0 for a device that does not tell
  bool out_of_memory = false;
  std::optional<std::int64_t> requested;  ///< asked for when it ran out, if the error says
};

/// Options of collect_peaks.
struct CollectOptions {
  std::optional<c10::Device> device{};  ///< default_device() if empty

  /// Called after each piece of work, failed ones included, once its memory is released.
  std::function<void()> cleanup{};

  /// Called before `cleanup` if a failed piece of work leaves memory behind, for a language's
  /// garbage collector.
  std::function<void()> collect_garbage{};

  /// Where several ranks measure the same work together: replaces each number by the largest that
  /// any rank passed. The samples are then those of the rank that needed most. Empty: one rank.
  std::function<void(std::span<std::int64_t>)> most_of_ranks{};
};

/// Runs `work(0)` to `work(count - 1)`, each under a PeakMeter, and returns one sample for each, in
/// order. Work that runs out of memory is a sample too; the device's cache is then released.
///
/// @throws whatever `work` throws that is not out of memory, untouched, after `cleanup`;
///     c10::ValueError if the device does not exist.
BRIM_API std::vector<PeakSample> collect_peaks(const std::function<double(std::size_t)>& work,
                                               std::size_t count,
                                               const CollectOptions& options = {});

/// The same for each element of a container; `work` returns its feature, a number.
///
///     const auto work = [&](const at::Tensor& x) { step(x); return double(x.size(0)); };
///     const auto samples = brim::collect_peaks(work, inputs, {.device = at::kCUDA});
template <class Work, class Inputs>
  requires requires(const Inputs& inputs) { std::size(inputs); }
std::vector<PeakSample> collect_peaks(const Work& work, const Inputs& inputs,
                                      const CollectOptions& options = {}) {
  auto next = std::begin(inputs);
  return collect_peaks(
      std::function<double(std::size_t)>([&](std::size_t) -> double { return work(*next++); }),
      static_cast<std::size_t>(std::size(inputs)), options);
}

}  // namespace brim
