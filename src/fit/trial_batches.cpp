#include "fit/trial_batches.h"

#include <brim/batching/stream.h>

#include <algorithm>

namespace brim::detail {
namespace {

constexpr std::size_t kEpochs = 4;
constexpr std::size_t kMostSamples = 200'000;  // of all epochs together

}  // namespace

TrialBatches::TrialBatches(const batching::Batching& batching,
                           std::span<const std::int64_t> sizes) {
  const std::size_t epochs = std::clamp(kMostSamples / sizes.size(), std::size_t{1}, kEpochs);
  for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
    batching::Batches read;
    batching::BatchStream(batching, batching::epoch_seed(0, epoch)).read_rest(read);
    if (epoch == 1 && read.indices == batches.indices && read.offsets == batches.offsets) {
      break;  // not shuffled
    }
    for (std::size_t b = 0; b < read.count(); ++b) {
      BatchShape shape{.count = static_cast<double>(read[b].size()), .epoch = epoch};
      for (const std::int64_t sample : read[b]) {
        const auto size = static_cast<double>(sizes[static_cast<std::size_t>(sample)]);
        shape.longest = std::max(shape.longest, size);
        shape.total += size;
        shape.squares += size * size;
        batches.indices.push_back(sample);
      }
      batches.close(read.loads[b]);
      shapes.push_back(shape);
    }
  }
}

}  // namespace brim::detail
