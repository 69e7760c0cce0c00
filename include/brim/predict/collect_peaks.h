#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <vector>

namespace brim {

/// What one piece of work held at its peak. All in bytes, of one device.
struct PeakSample {
  std::optional<double> feature;  ///< what the work returned; empty where it ran out of memory
  std::int64_t peak = 0;   ///< SIZE: the most held on the device, older tensors included; where it
                           ///< ran out, what it held and asked for: the need is at least that
  std::int64_t start = 0;  ///< SIZE: held before the work began
  bool out_of_memory = false;
  std::optional<std::int64_t> requested;  ///< asked for when it ran out, where the error tells
};

struct CollectOptions {
  std::optional<c10::Device> device{};  ///< default_device() where empty

  /// Called after each piece of work, failed ones included, when nothing of it is held any more.
  std::function<void()> cleanup{};

  /// Called when a failed piece of work leaves memory behind, before `cleanup`: what a language's
  /// garbage collector could free.
  std::function<void()> collect_garbage{};
};

/// Runs `work(0)` to `work(count - 1)`, each under a PeakMeter, and returns one sample for each, in
/// order. Work that runs out of memory is a sample too. After it the device's cache is released.
///
/// @throws whatever `work` throws that is not out of memory, untouched, after `cleanup`;
///     c10::ValueError if the device does not exist.
BRIM_API std::vector<PeakSample> collect_peaks(const std::function<double(std::size_t)>& work,
                                               std::size_t count,
                                               const CollectOptions& options = {});

/// The same for each element of a container; `work` returns its feature, a number.
///
///     auto samples = brim::collect_peaks(
///         [&](const at::Tensor& x) { step(x); return double(x.size(0)); }, inputs, {.device =
///         at::kCUDA});
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
