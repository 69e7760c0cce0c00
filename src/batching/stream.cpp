#include <brim/batching/interruption.h>
#include <brim/batching/stream.h>

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <string>
#include <utility>

#include "batching/balance_ranks.h"
#include "batching/permutation.h"
#include "check_argument.h"
#include "number_text.h"

namespace brim::batching {
namespace {

// Far beyond any job, and small enough that a few times as many still fit 64 bits.
constexpr std::int64_t kMostRanks = std::int64_t{1} << 40;

using brim::detail::check_argument;

void check_position(bool valid) {
  check_argument(valid, "the position is not one of a run over these samples");
}

constexpr std::string_view kTextBegin = "brim-position";
constexpr std::string_view kTextEnd = "end";

}  // namespace

std::string to_string(const Position& position) {
  std::ostringstream text;
  text << kTextBegin << " cursor";
  for (const std::int64_t word : position.cursor) {
    text << ' ' << word;
  }
  text << " segments";
  for (const Position::Segment& segment : position.segments) {
    text << ' ' << segment.world_size << ' ' << segment.step_offset << ' ' << segment.done;
  }
  text << ' ' << kTextEnd;
  return text.str();
}

Position parse_position(std::string_view line) {
  const auto check = [&](bool valid, std::string_view expected, const std::string& word) {
    check_argument(valid, "a position must be a line written by to_string: expected ", expected,
                   ", found \"", word, "\" in \"", line.substr(0, 200), "\"");
  };
  std::istringstream words{std::string(line)};
  std::string word;
  // Reads numbers up to the word that must follow.
  const auto numbers_until = [&](std::string_view last) {
    std::vector<std::int64_t> numbers;
    for (word.clear(); words >> word && word != last; word.clear()) {
      std::string_view rest = word;
      const auto number = brim::detail::take_number<std::int64_t>(rest);
      check(number && rest.empty(), "a number of 64 bits", word);
      numbers.push_back(*number);
    }
    check(word == last, last, word);
    return numbers;
  };
  check(numbers_until(kTextBegin).empty(), kTextBegin, "a number");
  check(numbers_until("cursor").empty(), "cursor", "a number");
  Position position{numbers_until("segments"), {}};
  const std::vector<std::int64_t> flat = numbers_until(kTextEnd);
  check(flat.size() % 3 == 0, "three numbers per segment", std::to_string(flat.size()));
  for (std::size_t i = 0; i < flat.size(); i += 3) {
    position.segments.push_back({flat[i], flat[i + 1], flat[i + 2]});
  }
  word.clear();
  check(!(words >> word), "nothing more", word);
  return position;
}

std::uint64_t epoch_seed(std::uint64_t seed, std::uint64_t epoch) {
  return detail::mix(seed, epoch);
}

BatchStream::BatchStream(const Batching& batching, std::uint64_t seed, Ranks ranks)
    : BatchStream(batching.epoch(seed), ranks) {
  goes_back_ = true;
}

BatchStream::BatchStream(std::unique_ptr<BatchSource> source, Ranks ranks)
    : source_(std::move(source)), ranks_(ranks), goes_back_(false) {
  check_argument(ranks.world_size >= 1 && ranks.world_size <= kMostRanks,
                 "world_size must be at least 1 and at most 2^40, got ", ranks.world_size);
  check_argument(ranks.rank >= 0 && ranks.rank < ranks.world_size,
                 "rank must be from 0 to world_size - 1 = ", ranks.world_size - 1, ", got ",
                 ranks.rank);
  next_ = ranks.rank;
}

BatchStream::~BatchStream() = default;
BatchStream::BatchStream(BatchStream&&) noexcept = default;

std::optional<std::span<const std::int64_t>> BatchStream::next() {
  if (!reach_next()) {
    return std::nullopt;
  }
  const auto batch = block_[static_cast<std::size_t>(next_)];
  next_ += ranks_.world_size;
  ++given_;
  return batch;
}

const Batches* BatchStream::next_block() {
  if (at_block_end() && !open_block()) {
    return nullptr;
  }
  next_ = static_cast<std::int64_t>(block_.count());
  return &block_;
}

// Opens blocks until this rank's next batch is in the open one.
bool BatchStream::reach_next() {
  while (at_block_end()) {
    if (!open_block()) {
      return false;
    }
  }
  return true;
}

BatchStream::OpenedBlock BatchStream::block_ahead() const {
  OpenedBlock ahead{source_->cursor(), {}, jumped_step_, 0, jumped_};
  if (!opened_.empty()) {
    const OpenedBlock& before = opened_.back();
    const auto count = static_cast<std::int64_t>(block_.count());
    ahead.start = before.start + count;
    ahead.step_offset = (before.step_offset + before.done + count) % ranks_.world_size;
  }
  return ahead;
}

bool BatchStream::open_block() {
  if (!more_) {
    return false;
  }
  check_interruption();
  OpenedBlock opened = block_ahead();
  const std::size_t left_out = left_out_.size();
  std::swap(block_, spare_);
  block_.clear();
  try {
    fill_block(opened);
  } catch (...) {  // as if it had not been tried: otherwise samples would be lost
    std::swap(block_, spare_);
    left_out_.erase(left_out_.begin() + static_cast<std::ptrdiff_t>(left_out), left_out_.end());
    more_ = goes_back_;  // else it is at its end
    if (goes_back_) {
      source_->seek(opened.cursor);
    }
    throw;
  }
  next_ -= static_cast<std::int64_t>(spare_.count());
  ++blocks_opened_;
  resume_segments_.clear();
  opened_.push_back(std::move(opened));
  return true;
}

void BatchStream::fill_block(OpenedBlock& opened) {
  // What earlier runs took of this block. If the last one had as many ranks, its order continues.
  std::vector<Position::Segment> segments = resume_segments_;
  more_ = source_->fill(block_, segments.empty() ? ranks_.world_size : segments[0].world_size);
  if (!segments.empty() && segments.back().world_size == ranks_.world_size) {
    opened.step_offset = segments.back().step_offset;
    opened.done = segments.back().done;
    segments.pop_back();
  }
  for (const Position::Segment& segment : segments) {
    std::vector<LeftOut> returned;
    balance_block(segment.world_size, segment.step_offset, returned);
    check_position(std::cmp_less_equal(segment.done, block_.count()));
    detail::drop_front(block_, static_cast<std::size_t>(segment.done));
    // Samples that were too few for those ranks may be enough for these.
    for (const LeftOut& sample : returned) {
      block_.indices.push_back(sample.index);
      block_.close(0.0);
    }
  }
  balance_block(ranks_.world_size, opened.step_offset, left_out_);
  check_position(std::cmp_less_equal(opened.done, block_.count()));
  detail::drop_front(block_, static_cast<std::size_t>(opened.done));
  left_out_.insert(left_out_.end(), block_.left_out.begin(), block_.left_out.end());
  opened.past = std::move(segments);
}

// The last block must have enough samples to split for all ranks, because the first batches of its
// step, in the block before, have already been given. A block must have enough batches to end a
// step and begin another: no position can lie in a step over three blocks.
bool BatchStream::too_short(std::int64_t batches, std::int64_t rest, std::int64_t world_size) {
  const std::int64_t enough = 4 * world_size;
  return world_size > 1 && (batches < enough || rest < enough);
}

void BatchStream::balance_block(std::int64_t world_size, std::int64_t step_offset,
                                std::vector<LeftOut>& left_out) {
  while (more_ &&
         too_short(static_cast<std::int64_t>(block_.count()), source_->rest(), world_size)) {
    more_ = source_->fill(block_, world_size);
  }
  std::size_t step = detail::balance_ranks(block_, world_size, step_offset, !more_, left_out);
  const auto count = static_cast<std::size_t>(world_size);
  for (; count > 1 && step + count <= block_.count(); step += count) {
    source_->even_out(block_, step, count);
  }
}

Position BatchStream::position(std::int64_t batches) const {
  check_argument(batches >= 0 && batches <= given_, "batches must be from 0 to the ", given_,
                 " that were given, got ", batches);
  if (opened_.empty() && jumped_ == 0) {
    return {source_->cursor(), resume_segments_};
  }
  const std::int64_t taken = batches * ranks_.world_size;
  const OpenedBlock ahead = block_ahead();
  check_argument(taken >= jumped_, "batches must be at least ", jumped_ / ranks_.world_size,
                 ", since those before were skipped, got ", batches);
  // Lower ranks may already have opened the next block, and the position must be the same for all.
  if (more_ && taken >= ahead.start) {
    return {ahead.cursor, {{ranks_.world_size, ahead.step_offset, taken - ahead.start}}};
  }
  const auto after = std::upper_bound(
      opened_.begin(), opened_.end(), taken,
      [](std::int64_t place, const OpenedBlock& opened) { return place < opened.start; });
  const OpenedBlock& opened = *std::prev(after);
  Position position{opened.cursor, opened.past};
  position.segments.push_back(
      {ranks_.world_size, opened.step_offset, opened.done + taken - opened.start});
  return position;
}

void BatchStream::seek(const Position& position) {
  check_argument(blocks_opened_ == 0, "a stream can be moved only before its first batch");
  for (const Position::Segment& segment : position.segments) {
    // A position ends between two steps.
    check_position(
        segment.world_size >= 1 && segment.world_size <= kMostRanks && segment.step_offset >= 0 &&
        segment.step_offset < segment.world_size && segment.done >= 0 &&
        (segment.step_offset + segment.done % segment.world_size) % segment.world_size == 0);
  }
  if (!position.cursor.empty()) {
    source_->seek(position.cursor);
  }
  check_position(!position.cursor.empty() || position.segments.empty());
  resume_segments_ = position.segments;
  // Here and not with the first batch, so that a wrong position is an error at once.
  open_block();
}

void BatchStream::read_rest(Batches& batches, bool all_ranks) {
  const std::int64_t step = all_ranks ? 1 : ranks_.world_size;
  const std::ptrdiff_t earlier = std::ssize(batches.left_out);
  while (reach_next()) {
    for (; std::cmp_less(next_, block_.count()); next_ += step) {
      const auto batch = block_[static_cast<std::size_t>(next_)];
      batches.indices.insert(batches.indices.end(), batch.begin(), batch.end());
      batches.close(block_.loads[static_cast<std::size_t>(next_)]);
    }
    while (more_ && ranks_.world_size == 1) {  // no ranks to balance: no copy
      more_ = source_->fill(batches, 1);
    }
  }
  left_out_.insert(left_out_.end(), batches.left_out.begin() + earlier, batches.left_out.end());
}

}  // namespace brim::batching
