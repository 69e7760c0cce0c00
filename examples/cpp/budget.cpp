// Serves requests of growing size under a budget: one that is too large is refused, and the server
// lives on.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cdist.h>
#include <ATen/ops/rand.h>
#include <brim/memory/budget.h>
#include <brim/memory/bytes.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/stats.h>

#include <exception>
#include <iostream>

namespace {

/// Distances from `rows` random points to 4096 others: rows × 4096 floats, and what the operator
/// needs beside.
void serve(std::int64_t rows) {
  const at::Tensor x = at::rand({rows, 16});
  const at::Tensor y = at::rand({4096, 16});
  at::cdist(x, y).amin(1);
}

}  // namespace

int main() {
  const brim::Budget budget("64MiB", at::kCPU);
  int refused = 0;
  for (const std::int64_t rows : {256, 1024, 4096, 16384}) {
    const brim::PeakMeter meter(at::kCPU);
    try {
      serve(rows);
      std::cout << rows << " rows: peak " << brim::format_bytes(meter.peak()) << '\n';
    } catch (const std::exception& error) {
      const brim::OomCause cause = brim::classify(error);
      if (!cause) {
        throw;
      }
      ++refused;
      std::cout << rows << " rows: refused, " << brim::to_string(cause.kind) << ", "
                << brim::format_bytes(cause.requested.value_or(0)) << " asked for\n";
    }
  }
  std::cout << "still held: " << brim::format_bytes(brim::memory_stats(at::kCPU).allocated) << '\n';
  return refused == 2 ? 0 : 1;  // 4096 and 16384 rows do not fit 64 MiB
}
