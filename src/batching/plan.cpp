#include <brim/batching/interruption.h>
#include <brim/batching/plan.h>
#include <brim/batching/stream.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <tuple>

namespace brim::batching {
namespace {

// By LeftOutReason.
constexpr std::array kReasons{"over budget", "outside buckets", "dropped last",
                              "too few for ranks"};

std::string percent(double share) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f %%", 100 * share);
  return text.data();
}

/// A share that is 1 but for rounding is not above it.
void count(ShareHistogram& histogram, double share) {
  constexpr double kRounding = 1e-9;
  constexpr std::size_t kBins = std::tuple_size_v<ShareHistogram> - 1;
  const bool above = share > 1 + kRounding;
  const auto bin = static_cast<std::size_t>(std::max(share, 0.0) * kBins + kRounding);
  ++histogram.at(above ? kBins : std::min(bin, kBins - 1));
}

}  // namespace

PlanReport report(const Batching& batching, std::uint64_t seed, std::int64_t world_size,
                  const Position& from) {
  BatchStream stream(batching, seed, {.rank = 0, .world_size = world_size});
  if (!from.cursor.empty()) {
    stream.seek(from);
  }
  PlanReport result;
  result.world_size = world_size;
  double loads = 0.0;
  double sizes = 0.0;
  double padded = 0.0;
  double excess = 0.0;  // over the mean, total of all steps
  double of_step = 0.0;
  double most_of_step = 0.0;
  const auto add = [&](std::span<const std::int64_t> batch) {
    check_interruption();
    const BatchFigures figures = batching.figures(batch);
    result.batched += static_cast<std::int64_t>(batch.size());
    ++result.batches;
    loads += figures.load;
    sizes += figures.sizes;
    padded += figures.padded;
    count(result.fill_histogram, figures.load);
    count(result.padding_histogram, figures.padded > 0 ? 1 - figures.sizes / figures.padded : 0.0);
    of_step += figures.work;
    most_of_step = std::max(most_of_step, figures.work);
    if (result.batches % world_size == 0) {
      const double mean = of_step / static_cast<double>(world_size);
      excess += mean > 0 ? most_of_step / mean - 1 : 0.0;
      of_step = most_of_step = 0.0;
    }
  };
  while (const Batches* block = stream.next_block()) {  // never all batches at once
    for (std::size_t b = 0; b < block->count(); ++b) {
      add((*block)[b]);
    }
  }
  result.left_out = batching.left_out();
  result.left_out.insert(result.left_out.end(), stream.left_out().begin(), stream.left_out().end());
  result.samples = from.cursor.empty()
                       ? batching.samples()
                       : result.batched + static_cast<std::int64_t>(result.left_out.size());
  if (result.batches > 0) {
    result.fill = loads / static_cast<double>(result.batches);
    result.imbalance =
        excess * static_cast<double>(world_size) / static_cast<double>(result.batches);
  }
  result.padding = padded > 0 ? 1 - sizes / padded : 0.0;
  return result;
}

const char* to_string(LeftOutReason reason) {
  return kReasons.at(static_cast<std::size_t>(reason));
}

std::string to_string(const PlanReport& report) {
  std::string text = std::to_string(report.batched) + " of " + std::to_string(report.samples) +
                     " samples in " + std::to_string(report.batches) + " batches";
  if (report.world_size > 1) {
    text += " on " + std::to_string(report.world_size) + " ranks";
  }
  text += "\n  fill       " + percent(report.fill);
  text += "\n  padding    " + percent(report.padding);
  if (report.world_size > 1) {
    text += "\n  imbalance  " + percent(report.imbalance);
  }
  for (std::size_t reason = 0; reason < kReasons.size(); ++reason) {
    const auto count =
        std::ranges::count(report.left_out, static_cast<LeftOutReason>(reason), &LeftOut::reason);
    if (count > 0) {
      text += "\n  left out   " + std::to_string(count) + ", " + kReasons.at(reason);
    }
  }
  return text;
}

}  // namespace brim::batching
