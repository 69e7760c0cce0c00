#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
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

  /// Most bytes held at once above `start()`. @throws c10::ValueError if the meter watches several
  /// devices.
  std::int64_t peak() const;
  std::int64_t peak(c10::Device device) const;

  /// Bytes held on the device when the meter was opened.
  std::int64_t start() const;
  std::int64_t start(c10::Device device) const;

  /// Bytes held now (or at closing) minus start(): what the work left behind; negative if it freed
  /// older tensors.
  std::int64_t left() const;
  std::int64_t left(c10::Device device) const;

  std::vector<c10::Device> devices() const;

 private:
  void open(const std::vector<c10::Device>& devices);
  const PeakEntry& entry(c10::Device device) const;
  const PeakEntry& only_entry() const;
  PeakEntry read(const PeakEntry& entry) const;

  // Entries are linked into the ledger by address, so they live in one block that never moves.
  std::unique_ptr<PeakEntry[]> entries_;
  std::size_t count_ = 0;
  bool closed_ = false;
};

}  // namespace brim
