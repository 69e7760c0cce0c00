// Batches of samples of different lengths on several ranks, under a budget of bytes. How memory
// grows is measured; each rank then computes its own batches, without communication. One job stops
// in the middle of the epoch, and another with more ranks resumes there.
#include <ATen/core/Tensor.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/softmax.h>
#include <brim/brim.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace batching = brim::batching;

constexpr std::int64_t kBudget = std::int64_t{16} << 20;  // bytes
constexpr std::uint64_t kSeed = 42;

std::vector<std::int64_t> make_lengths(std::size_t count) {
  // NOLINTNEXTLINE(bugprone-random-generator-seed): the same lengths on every run
  std::mt19937_64 random(0);
  std::lognormal_distribution<double> distribution(std::log(60.0), 0.6);
  std::vector<std::int64_t> lengths(count);
  std::generate(lengths.begin(), lengths.end(), [&] {
    return std::clamp<std::int64_t>(std::llround(distribution(random)), 10, 300);
  });
  return lengths;
}

// Attention of n samples padded to one length, which needs the memory.
void attend(std::int64_t n, std::int64_t length) {
  const at::Tensor x = at::rand({n, length, 16});
  at::matmul(at::softmax(at::matmul(x, x.transpose(1, 2)), -1), x);
}

brim::MemoryModel measure() {
  std::vector<std::pair<std::int64_t, std::int64_t>> shapes;
  for (const std::int64_t n : {1, 2, 4, 8, 16, 32, 64}) {
    for (const std::int64_t length : {10, 40, 100, 200, 300}) {
      shapes.emplace_back(n, length);
    }
  }
  brim::ProbeOptions options;
  options.device = at::kCPU;
  options.budget = kBudget;
  return brim::probe_memory(attend, shapes, options);
}

struct Row {
  std::int64_t batches = 0;
  std::int64_t samples = 0;
  double planned = 0.0;  // share of the budget, of the costliest batch
  double measured = 0.0;
};

// Runs some batches of one rank (all remaining ones if `most` is negative).
Row run(const batching::Batching& batches, batching::BatchStream& stream,
        std::span<const std::int64_t> lengths, std::int64_t most, std::vector<int>& seen) {
  Row row;
  while (row.batches != most) {
    const auto batch = stream.next();
    if (!batch) {
      break;
    }
    std::int64_t longest = 0;
    for (const std::int64_t index : *batch) {
      longest = std::max(longest, lengths[static_cast<std::size_t>(index)]);
      ++seen[static_cast<std::size_t>(index)];
    }
    const brim::PeakMeter meter(at::kCPU);
    attend(static_cast<std::int64_t>(batch->size()), longest);
    const double share = static_cast<double>(meter.peak()) / static_cast<double>(kBudget);
    ++row.batches;
    row.samples += static_cast<std::int64_t>(batch->size());
    row.planned = std::max(row.planned, batches.figures(*batch).load);
    row.measured = std::max(row.measured, share);
  }
  return row;
}

void print(std::int64_t rank, std::int64_t world_size, const Row& row) {
  std::printf("%4lld of %lld %10lld %10lld %9.1f %% %9.1f %%\n", static_cast<long long>(rank),
              static_cast<long long>(world_size), static_cast<long long>(row.batches),
              static_cast<long long>(row.samples), 100.0 * row.planned, 100.0 * row.measured);
}

}  // namespace

int main() {
  brim::install_cpu_allocator();
  const std::vector<std::int64_t> lengths = make_lengths(20'000);
  const brim::MemoryModel model = measure();
  std::printf("%s\n\n", model.to_string().c_str());

  batching::Order order;
  order.shuffle = true;
  const auto batches = batching::packed_batching(
      batching::Columns<std::int64_t>{{lengths, brim::model_limit(model, kBudget)}}, order);
  std::printf("%s\n\n", batching::to_string(batching::report(*batches, kSeed, 2)).c_str());

  // The ranks would be processes; here they take turns. No tensor of a batch may pass the budget.
  const brim::Budget budget(kBudget, at::kCPU);
  std::vector<int> seen(lengths.size(), 0);
  std::string saved;  // as it would be in a file
  std::printf("     rank    batches    samples     planned    measured\n");
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    batching::BatchStream stream(*batches, kSeed, {.rank = rank, .world_size = 2});
    print(rank, 2, run(*batches, stream, lengths, 20, seen));
    saved = batching::to_string(stream.position());  // the same on each rank
  }
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    batching::BatchStream stream(*batches, kSeed, {.rank = rank, .world_size = 3});
    stream.seek(batching::parse_position(saved));
    print(rank, 3, run(*batches, stream, lengths, -1, seen));
  }
  const bool once = std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; });
  std::printf("each sample exactly once: %s\n", once ? "yes" : "no");
  return once ? 0 : 1;
}
