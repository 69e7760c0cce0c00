// What the memory core costs: an allocation over torch's stock allocator, a meter, a budget, a
// classification.
//
//     ./dev bench memory
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <brim/memory/budget.h>
#include <brim/memory/cpu.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/peak_meter.h>
#include <brim/testing/oom_injector.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <limits>
#include <stdexcept>

#include "harness.h"

namespace {

using brim::bench::Case;
using brim::bench::nanoseconds;
using brim::bench::repeated;
using brim::bench::Table;

constexpr int kCalls = 2000;
constexpr int kRounds = 301;

// What holds while a case runs.
struct Plain {};
struct StockAllocator {
  c10::Allocator* ours = c10::GetCPUAllocator();
  StockAllocator() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 0); }
  ~StockAllocator() { c10::SetCPUAllocator(ours, 0); }
};
struct BudgetAndMeter {
  brim::Budget budget{"8GiB", at::kCPU};
  brim::PeakMeter meter{at::kCPU};
};
struct Injector {
  brim::testing::OomInjector injector{std::numeric_limits<std::int64_t>::max()};
};

template <class Scope>
Case empty(const std::string& name, std::int64_t bytes) {
  return {name + "/" + std::to_string(bytes), [bytes](int calls) {
            [[maybe_unused]] const Scope scope{};
            for (int i = 0; i < calls; ++i) {
              at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
            }
          }};
}

std::vector<double> print_medians(const Table& table, const std::vector<Case>& cases) {
  const std::vector<double> times = brim::bench::medians(cases, kRounds, kCalls);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    table.row(cases[i].name, nanoseconds(times[i]));
  }
  return times;
}

}  // namespace

int main() {
  brim::install_cpu_allocator();
  static const c10::OutOfMemoryError out_of_memory(
      {"work", "work.cpp", 1},
      "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of "
      "79.10 GiB of which 1.50 GiB is free.");
  static const std::runtime_error other(
      "The size of tensor a (3) must match the size of tensor b (4) at dimension 0");
  const Table table("The memory core in C++, per call", "cpu");
  // Each size by itself: what 1 MiB costs depends on what else the heap was used for.
  for (const std::int64_t bytes : {64, 4 << 10, 1 << 20}) {
    const std::vector<double> times = print_medians(
        table, {empty<StockAllocator>("empty_stock", bytes), empty<Plain>("empty_brim", bytes)});
    table.row("empty_brim over empty_stock/" + std::to_string(bytes),
              nanoseconds(times[1] - times[0]));
  }
  print_medians(
      table,
      {
          empty<BudgetAndMeter>("empty_brim_under_budget", 64),
          empty<Injector>("empty_brim_with_injector", 64),
          repeated("peak_meter",
                   [](int) {
                     brim::PeakMeter meter(at::kCPU);
                     meter.close();
                   }),
          repeated("budget",
                   [](int) { const brim::Budget limit(std::int64_t{1} << 33, at::kCPU); }),
          repeated("classify_out_of_memory", [](int) { (void)brim::classify(out_of_memory); }),
          repeated("classify_other_error", [](int) { (void)brim::classify(other); }),
      });
  return 0;
}
