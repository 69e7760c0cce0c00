#include <brim/memory/peak_meter.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <span>

#include "memory/backend.h"
#include "memory/peak_ledger.h"

namespace brim {

PeakMeter::PeakMeter(c10::Device device) { open({device}); }

PeakMeter::PeakMeter(const std::vector<c10::Device>& devices) { open(devices); }

void PeakMeter::open(const std::vector<c10::Device>& devices) {
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

PeakEntry PeakMeter::read(const PeakEntry& entry) const {
  return closed_ ? entry : peak_ledger::read(entry);
}

const PeakEntry& PeakMeter::only_entry() const {
  TORCH_CHECK_VALUE(count_ == 1, "this meter watches ", count_, " devices: say which one is meant");
  return entries_[0];
}

const PeakEntry& PeakMeter::entry(c10::Device device) const {
  const c10::Device resolved = resolve_device(device);
  const std::span<const PeakEntry> entries(entries_.get(), count_);
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const auto& e) { return e.device == resolved; });
  TORCH_CHECK_VALUE(found != entries.end(), "device is ", device.str(),
                    ", which this meter does not watch");
  return *found;
}

std::int64_t PeakMeter::peak() const {
  const PeakEntry now = read(only_entry());
  return now.highest - now.start;
}

std::int64_t PeakMeter::peak(c10::Device device) const {
  const PeakEntry now = read(entry(device));
  return now.highest - now.start;
}

std::int64_t PeakMeter::start() const { return only_entry().start; }

std::int64_t PeakMeter::start(c10::Device device) const { return entry(device).start; }

std::int64_t PeakMeter::left() const {
  const PeakEntry now = read(only_entry());
  return now.end - now.start;
}

std::int64_t PeakMeter::left(c10::Device device) const {
  const PeakEntry now = read(entry(device));
  return now.end - now.start;
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
