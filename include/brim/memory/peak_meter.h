#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace brim {

struct PeakEntry;

/// Measures the most memory that a piece of work holds at once, beyond what was held when the meter
/// was opened.
///
///     brim::PeakMeter meter(at::kCPU);
///     run(batch);
///     std::int64_t bytes = meter.peak();
///
/// Meters nest and overlap freely, on one thread or several: each sees everything that happens on
/// its devices between its opening and its closing, whichever thread does it. On the CPU the count
/// is exact to the byte (see brim/memory/cpu.h for what is counted). On an accelerator it is
/// torch's own count, in its allocator's blocks, and opening a meter resets torch's peak statistic
/// (`torch.cuda.max_memory_allocated`); memory_stats(device).peak is not affected.
///
/// The meter runs until close() or its destruction. peak() may be read at any time. Costs well
/// under a microsecond on the CPU. One meter may be read from several threads; close() is for its
/// owner.
class BRIM_API PeakMeter {
 public:
  /// @throws c10::ValueError if `device` does not exist or has no memory of its own.
  explicit PeakMeter(c10::Device device);

  /// Watches several devices at once. @throws c10::ValueError if `devices` is empty or names one
  /// twice.
  explicit PeakMeter(const std::vector<c10::Device>& devices);

  ~PeakMeter();
  PeakMeter(const PeakMeter&) = delete;
  PeakMeter& operator=(const PeakMeter&) = delete;

  /// Stops measuring; peak() and the rest stay readable. A second call does nothing.
  void close() noexcept;

  /// Most bytes held at once above `start()`. The device may be left out where there is only one.
  /// @throws c10::ValueError if there are several, or `device` is not watched.
  std::int64_t peak(std::optional<c10::Device> device = std::nullopt) const;

  /// Bytes held on the device when the meter was opened.
  std::int64_t start(std::optional<c10::Device> device = std::nullopt) const;

  /// Bytes held now (or at closing) minus start(): what the work left behind; negative if it freed
  /// older tensors.
  std::int64_t left(std::optional<c10::Device> device = std::nullopt) const;

  /// Most bytes held at once below start(): what the work freed of older tensors, even where it
  /// made new ones later. On an accelerator only as much of it as left() shows.
  std::int64_t freed(std::optional<c10::Device> device = std::nullopt) const;

  std::vector<c10::Device> devices() const;

 private:
  explicit PeakMeter(std::span<const c10::Device> devices);

  const PeakEntry& entry(std::optional<c10::Device> device) const;
  PeakEntry now(std::optional<c10::Device> device) const;

  // Entries are linked into the ledger by address, so they live in one block that never moves.
  std::unique_ptr<PeakEntry[]> entries_;
  std::size_t count_ = 0;
  bool closed_ = false;
};

}  // namespace brim
