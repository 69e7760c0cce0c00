#include "batching/balance_ranks.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <span>
#include <utility>

namespace brim::batching::detail {
namespace {

/// A batch, or a part of one.
struct Piece {
  std::vector<std::int64_t> samples;
  double load;
  std::size_t place;  // of the batch in the block
};

// Cuts a batch in two: every other sample, because packed batches are sorted by size.
std::pair<Piece, Piece> halves(const Piece& piece) {
  Piece first{{}, piece.load / 2, piece.place};
  Piece second{{}, piece.load / 2, piece.place};
  for (std::size_t i = 0; i < piece.samples.size(); ++i) {
    (i % 2 == 0 ? first : second).samples.push_back(piece.samples[i]);
  }
  return {std::move(first), std::move(second)};
}

/// Splits batches until there are `missing` more, or nothing is left to split. Takes as few batches
/// as have enough samples, the emptiest first, so that the pieces are of one size and share a step.
void split(std::vector<Piece>& pieces, std::size_t missing, std::size_t incomplete) {
  std::ranges::stable_sort(pieces, std::ranges::greater(), &Piece::load);
  const auto costs_less = [&](std::size_t a, std::size_t b) {
    return pieces[a].load < pieces[b].load;
  };
  std::priority_queue<std::size_t, std::vector<std::size_t>, decltype(costs_less)> candidates(
      costs_less);
  const auto add_candidate = [&](std::size_t piece) {
    if (pieces[piece].samples.size() > 1) {
      candidates.push(piece);
    }
  };
  std::size_t spare = 0;  // samples beyond one in each candidate
  for (std::size_t taken = 0; taken < pieces.size() && (taken < incomplete || spare < missing);) {
    const std::size_t emptiest = pieces.size() - ++taken;
    spare += pieces[emptiest].samples.size() - 1;
    add_candidate(emptiest);
  }
  while (missing > 0 && !candidates.empty()) {
    const std::size_t chosen = candidates.top();
    candidates.pop();
    auto [first, second] = halves(pieces[chosen]);
    pieces[chosen] = std::move(first);
    pieces.push_back(std::move(second));
    --missing;
    add_candidate(chosen);
    add_candidate(pieces.size() - 1);
  }
}

std::vector<Piece> take_apart(const Batches& block) {
  std::vector<Piece> pieces;
  pieces.reserve(block.count());
  for (std::size_t b = 0; b < block.count(); ++b) {
    const auto samples = block[b];
    pieces.push_back({{samples.begin(), samples.end()}, block.loads[b], b});
  }
  return pieces;
}

/// Steps of `world_size` batches that cost about the same, in the order of the first batch in each.
/// The steps that are shared with the blocks before and after get batches of medium cost, because
/// their partners in adjacent blocks are unknown.
std::vector<std::size_t> steps_in_order(const std::vector<Piece>& pieces, std::size_t world_size,
                                        std::size_t head, std::size_t tail) {
  std::vector<std::size_t> sorted(pieces.size());
  std::iota(sorted.begin(), sorted.end(), std::size_t{0});
  std::ranges::stable_sort(sorted, {}, [&](std::size_t piece) {
    return std::pair(-pieces[piece].load, pieces[piece].place);
  });
  const std::size_t steps = (pieces.size() - head - tail) / world_size;
  const std::size_t middle = steps / 2 * world_size;
  const auto at = [&](std::size_t place) {
    return sorted.begin() + static_cast<std::ptrdiff_t>(place);
  };
  std::vector<std::size_t> result(at(middle), at(middle + head));
  const std::vector<std::size_t> shared_after(at(middle + head), at(middle + head + tail));
  sorted.erase(at(middle), at(middle + head + tail));

  std::vector<std::pair<std::size_t, std::size_t>> firsts;  // place of a step's first, step
  firsts.reserve(steps);
  for (std::size_t step = 0; step < steps; ++step) {
    const auto batches = std::span(sorted).subspan(step * world_size, world_size);
    const auto place = [&](std::size_t piece) { return pieces[piece].place; };
    firsts.emplace_back(place(std::ranges::min(batches, {}, place)), step);
  }
  std::sort(firsts.begin(), firsts.end());
  for (const auto& [first, step] : firsts) {
    result.insert(result.end(), at(step * world_size), at((step + 1) * world_size));
  }
  result.insert(result.end(), shared_after.begin(), shared_after.end());
  return result;
}

}  // namespace

std::size_t balance_ranks(Batches& block, std::int64_t world_size, std::int64_t step_offset,
                          bool last, std::vector<LeftOut>& left_out) {
  if (world_size == 1) {
    return 0;
  }
  const auto world = static_cast<std::size_t>(world_size);
  const auto before = static_cast<std::size_t>(step_offset);
  std::vector<Piece> pieces = take_apart(block);
  if (last && (before + pieces.size()) % world != 0) {
    const std::size_t incomplete = (before + pieces.size()) % world;
    split(pieces, world - incomplete, std::min(incomplete, pieces.size()));
    for (std::size_t over = std::min((before + pieces.size()) % world, pieces.size()); over > 0;
         --over) {
      for (const std::int64_t sample : pieces.back().samples) {
        left_out.push_back({sample, LeftOutReason::too_few_for_ranks});
      }
      pieces.pop_back();
    }
  }
  const std::size_t head = std::min((world - before) % world, pieces.size());
  const std::size_t tail = (pieces.size() - head) % world;
  const std::vector<std::size_t> order = steps_in_order(pieces, world, head, tail);

  block.indices.clear();
  block.offsets.resize(1);
  block.loads.clear();
  for (const std::size_t piece : order) {
    block.indices.insert(block.indices.end(), pieces[piece].samples.begin(),
                         pieces[piece].samples.end());
    block.close(pieces[piece].load);
  }
  return head;
}

void drop_front(Batches& block, std::size_t count) {
  const std::int64_t samples = block.offsets[count];
  block.indices.erase(block.indices.begin(), block.indices.begin() + samples);
  block.offsets.erase(block.offsets.begin(),
                      block.offsets.begin() + static_cast<std::ptrdiff_t>(count));
  for (std::int64_t& offset : block.offsets) {
    offset -= samples;
  }
  block.loads.erase(block.loads.begin(), block.loads.begin() + static_cast<std::ptrdiff_t>(count));
}

}  // namespace brim::batching::detail
