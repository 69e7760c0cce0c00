#include "memory/peak_ledger.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "fork.h"
#include "memory/backend.h"

namespace brim::peak_ledger {
namespace {

struct Ledger {
  std::mutex mutex;
  std::vector<PeakEntry*> open;
  std::unordered_map<c10::Device, std::int64_t> highest;  // of the peaks that meters have reset

  /// The CPU's count starts at zero there, and so do open meters.
  void in_forked_child() {
    for (PeakEntry* entry : open) {
      if (entry->device.is_cpu()) {
        entry->start = entry->highest = entry->lowest = entry->end = 0;
      }
    }
    highest.erase(c10::Device(c10::DeviceType::CPU));
  }
};

Ledger& ledger() { return shared_object<Ledger>(); }

void add(PeakEntry& entry, const PeakReading& sample) {
  entry.highest = std::max(entry.highest, sample.peak);
  entry.lowest = std::min(entry.lowest, sample.low);
}

PeakEntry up_to_now(PeakEntry entry) {
  const PeakReading sample = backend_for(entry.device).peak(entry.device);
  add(entry, sample);
  entry.end = sample.current;
  return entry;
}

/// Resets the allocator's peak and credits it to every open entry. The caller holds the lock.
PeakReading fold(Ledger& book, c10::Device device) {
  const PeakReading sample = backend_for(device).take_peak(device);
  for (PeakEntry* entry : book.open) {
    if (entry->device == device) {
      add(*entry, sample);
    }
  }
  auto& highest = book.highest[device];
  highest = std::max(highest, sample.peak);
  return sample;
}

}  // namespace

void open(PeakEntry& entry) {
  backend_for(entry.device).prepare(entry.device);
  Ledger& book = ledger();
  const std::lock_guard lock(book.mutex);
  const PeakReading sample = fold(book, entry.device);
  entry.start = entry.highest = entry.lowest = entry.end = sample.current;
  book.open.push_back(&entry);
}

void close(PeakEntry& entry) noexcept {
  Ledger& book = ledger();
  const std::lock_guard lock(book.mutex);
  std::erase(book.open, &entry);
  try {
    entry = up_to_now(entry);
  } catch (...) {
    // The device is in an error state that has been reported elsewhere; the last known figures
    // stay.
  }
}

PeakEntry read(const PeakEntry& entry) {
  const std::lock_guard lock(ledger().mutex);
  return up_to_now(entry);
}

std::int64_t highest_ever(c10::Device device, std::int64_t current_peak) {
  Ledger& book = ledger();
  const std::lock_guard lock(book.mutex);
  const auto found = book.highest.find(device);
  return found == book.highest.end() ? current_peak : std::max(found->second, current_peak);
}

void forget(c10::Device device) {
  Ledger& book = ledger();
  const std::lock_guard lock(book.mutex);
  fold(book, device);
  book.highest.erase(device);
}

}  // namespace brim::peak_ledger
