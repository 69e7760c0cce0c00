#include <brim/memory/peak_meter.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <span>

#include "memory/backend.h"
#include "memory/peak_ledger.h"

namespace brim {

PeakMeter::PeakMeter(c10::Device device) : PeakMeter(std::span(&device, 1)) {}

PeakMeter::PeakMeter(const std::vector<c10::Device>& devices) : PeakMeter(std::span(devices)) {}

PeakMeter::PeakMeter(std::span<const c10::Device> devices) {
  TORCH_CHECK_VALUE(!devices.empty(), "devices is empty: a PeakMeter needs at least one device");
  entries_ = std::make_unique<PeakEntry[]>(devices.size());
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const c10::Device device = resolve_device(devices[i]);
    for (std::size_t earlier = 0; earlier < i; ++earlier) {
      TORCH_CHECK_VALUE(entries_[earlier].device != device, "devices names ", device.str(),
                        " twice");
    }
    entries_[i].device = device;
  }
  try {
    for (; count_ < devices.size(); ++count_) {
      peak_ledger::open(entries_[count_]);
    }
  } catch (...) {  // the destructor does not run for a constructor that throws
    close();
    throw;
  }
}

PeakMeter::~PeakMeter() { close(); }

void PeakMeter::close() noexcept {
  if (closed_) {
    return;
  }
  closed_ = true;
  for (std::size_t i = 0; i < count_; ++i) {
    peak_ledger::close(entries_[i]);
  }
}

const PeakEntry& PeakMeter::entry(std::optional<c10::Device> device) const {
  TORCH_CHECK_VALUE(device || count_ == 1, "this meter watches ", count_,
                    " devices: say which one is meant");
  const std::span<const PeakEntry> entries(entries_.get(), count_);
  const c10::Device wanted = device ? resolve_device(*device) : entries.front().device;
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const auto& entry) { return entry.device == wanted; });
  TORCH_CHECK_VALUE(found != entries.end(), "device is ", wanted.str(),
                    ", which this meter does not watch");
  return *found;
}

PeakEntry PeakMeter::now(std::optional<c10::Device> device) const {
  return closed_ ? entry(device) : peak_ledger::read(entry(device));
}

std::int64_t PeakMeter::peak(std::optional<c10::Device> device) const {
  const PeakEntry read = now(device);
  return read.highest - read.start;
}

std::int64_t PeakMeter::start(std::optional<c10::Device> device) const {
  return entry(device).start;
}

std::int64_t PeakMeter::left(std::optional<c10::Device> device) const {
  const PeakEntry read = now(device);
  return read.end - read.start;
}

std::int64_t PeakMeter::freed(std::optional<c10::Device> device) const {
  const PeakEntry read = now(device);
  return read.start - read.lowest;
}

std::vector<c10::Device> PeakMeter::devices() const {
  std::vector<c10::Device> devices;
  devices.reserve(count_);
  for (std::size_t i = 0; i < count_; ++i) {
    devices.push_back(entries_[i].device);
  }
  return devices;
}

}  // namespace brim
