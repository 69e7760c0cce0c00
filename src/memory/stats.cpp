#include <brim/memory/bytes.h>
#include <brim/memory/stats.h>

#include <sstream>

#include "memory/backend.h"
#include "memory/peak_ledger.h"

namespace brim {

MemoryStats memory_stats(c10::Device device) {
  const c10::Device resolved = resolve_device(device);
  MemoryStats stats = backend_for(resolved).stats(resolved);
  stats.peak = peak_ledger::highest_ever(resolved, stats.peak);
  return stats;
}

void reset_peak(c10::Device device) { peak_ledger::forget(resolve_device(device)); }

std::string to_string(const MemoryStats& stats) {
  std::ostringstream out;
  out << "allocated " << format_bytes(stats.allocated) << "\npeak      " << format_bytes(stats.peak)
      << "\nreserved  " << format_bytes(stats.reserved) << "\nlimit     "
      << format_bytes(stats.limit) << "\nfree      " << format_bytes(stats.free);
  return out.str();
}

}  // namespace brim
