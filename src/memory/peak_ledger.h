#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace brim {

/// One device's share of a PeakMeter. All figures are bytes; the ledger guards them.
struct PeakEntry {
  c10::Device device = c10::DeviceType::CPU;
  std::int64_t start = 0;    ///< held when the meter was opened
  std::int64_t highest = 0;  ///< the most held since then
  std::int64_t lowest = 0;   ///< the least held since then
  std::int64_t end = 0;      ///< held when it was closed
};

/// Lets any number of meters share the one peak that an allocator keeps. Resetting that peak first
/// credits it to every open entry, so none loses what happened before.
namespace peak_ledger {

void open(PeakEntry& entry);
void close(PeakEntry& entry) noexcept;

/// The entry as it would be if it were closed now.
PeakEntry read(const PeakEntry& entry);

/// The most held on `device` since the process began or since forget, whatever meters did
/// meanwhile.
std::int64_t highest_ever(c10::Device device, std::int64_t current_peak);
void forget(c10::Device device);

}  // namespace peak_ledger
}  // namespace brim
