// What the memory core costs: an allocation over torch's stock allocator, a meter, a
// classification. Prints Google Benchmark's table, then one line a size: the ratio to at::empty
// alone and nanoseconds over it.
//
//     ./dev bench memory
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <benchmark/benchmark.h>
#include <brim/memory/budget.h>
#include <brim/memory/cpu.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/peak_meter.h>
#include <brim/testing/oom_injector.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

at::Tensor make(std::int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
}

void empty_stock(benchmark::State& state) {
  c10::Allocator* ours = c10::GetCPUAllocator();
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 0);
  for (auto _ : state) {
    benchmark::DoNotOptimize(make(state.range(0)));
  }
  c10::SetCPUAllocator(ours, 0);
}

void empty_brim(benchmark::State& state) {
  for (auto _ : state) {
    benchmark::DoNotOptimize(make(state.range(0)));
  }
}

void empty_brim_under_budget(benchmark::State& state) {
  const brim::Budget budget("8GiB", at::kCPU);
  const brim::PeakMeter meter(at::kCPU);
  for (auto _ : state) {
    benchmark::DoNotOptimize(make(state.range(0)));
  }
}

void empty_brim_with_injector(benchmark::State& state) {
  const brim::testing::OomInjector injector(std::numeric_limits<std::int64_t>::max());
  for (auto _ : state) {
    benchmark::DoNotOptimize(make(state.range(0)));
  }
}

void peak_meter(benchmark::State& state) {
  for (auto _ : state) {
    brim::PeakMeter meter(at::kCPU);
    meter.close();
    benchmark::DoNotOptimize(meter.peak());
  }
}

void budget(benchmark::State& state) {
  for (auto _ : state) {
    const brim::Budget limit(std::int64_t{1} << 33, at::kCPU);
    benchmark::DoNotOptimize(limit.limit());
  }
}

void classify_out_of_memory(benchmark::State& state) {
  const c10::OutOfMemoryError error(
      {"work", "work.cpp", 1},
      "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of "
      "79.10 GiB of which 1.50 GiB is free.");
  for (auto _ : state) {
    benchmark::DoNotOptimize(brim::classify(error));
  }
}

void classify_other_error(benchmark::State& state) {
  const std::runtime_error error(
      "The size of tensor a (3) must match the size of tensor b (4) at dimension 0");
  for (auto _ : state) {
    benchmark::DoNotOptimize(brim::classify(error));
  }
}

BENCHMARK(empty_stock)->Arg(64)->Arg(4 << 10)->Arg(1 << 20);
BENCHMARK(empty_brim)->Arg(64)->Arg(4 << 10)->Arg(1 << 20);
BENCHMARK(empty_brim_under_budget)->Arg(64);
BENCHMARK(empty_brim_with_injector)->Arg(64);
BENCHMARK(peak_meter);
BENCHMARK(budget);
BENCHMARK(classify_out_of_memory);
BENCHMARK(classify_other_error);

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Nanoseconds an at::empty of `bytes`, over a batch that takes about a millisecond.
double nanoseconds(std::int64_t bytes) {
  constexpr int kBatch = 2000;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kBatch; ++i) {
    benchmark::DoNotOptimize(make(bytes));
  }
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin)
             .count() /
         kBatch;
}

/// The comparison that counts: batches take turns, so that a slower moment of the machine meets
/// both alike.
void compare(std::int64_t bytes) {
  c10::Allocator* ours = c10::GetCPUAllocator();
  std::vector<double> stock;
  std::vector<double> brim;
  std::vector<double> over;
  for (int round = 0; round < 301; ++round) {
    c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 0);
    stock.push_back(nanoseconds(bytes));
    c10::SetCPUAllocator(ours, 0);
    brim.push_back(nanoseconds(bytes));
    over.push_back(brim.back() - stock.back());
  }
  std::printf("%9lld B   stock %7.1f ns   brim %7.1f ns   ratio %.3f   over %6.1f ns\n",
              static_cast<long long>(bytes), median(stock), median(brim),
              median(brim) / median(stock), median(over));
}

}  // namespace

int main(int argc, char** argv) {
  brim::install_cpu_allocator();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  benchmark::RunSpecifiedBenchmarks();
  std::printf("\nat::empty and free, stock and brim in turns, medians of 301 batches:\n");
  for (const std::int64_t bytes : {64LL, 4LL << 10, 1LL << 20}) {
    compare(bytes);
  }
  return 0;
}
