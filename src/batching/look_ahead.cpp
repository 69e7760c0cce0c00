#include <brim/batching/look_ahead.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "batching/bucket_index.h"
#include "batching/packed_source.h"
#include "batching/stream_table.h"

namespace brim::batching {
namespace {

using brim::detail::check_argument;
using detail::MultiFill;
using detail::StreamTable;

// More are refused by BatchStream.
constexpr std::int64_t kMostRanks = std::int64_t{1} << 40;

/// Batches of like size: each sample joins the open batch of its bucket, which is given when the
/// next does not fit. If too many samples wait, the fullest open batch is given. The samples of
/// open batches and the place are the whole state.
class OpenBuckets : public BatchSource {
 public:
  OpenBuckets(StreamTable& table, const LookAheadOptions& options)
      : table_(table),
        find_(detail::edges_of<double>(options.boundaries)),
        most_waiting_(options.samples),
        multiple_(detail::multiple_argument(options.batch_multiple, table.columns())),
        open_(options.boundaries.size() - 1, Open{{}, MultiFill<double>(table.columns())}) {}

  bool fill(Batches& block, std::int64_t /*world_size*/) override {
    const std::size_t enough = block.count() + kBatchesInBlock;
    while (block.count() < enough) {
      table_.look_ahead(position_ + 1);
      if (position_ == table_.size()) {
        give_all(block);
        return false;
      }
      take(block, table_.sample_at(position_++));
    }
    table_.look_ahead(position_ + 1);
    return waiting_ > 0 || position_ < table_.size();
  }

  [[nodiscard]] std::int64_t rest() const override { return table_.size() - position_ + waiting_; }

  [[nodiscard]] Cursor cursor() const override {
    Cursor words{position_};
    for (const Open& open : open_) {
      words.insert(words.end(), open.samples.begin(), open.samples.end());
    }
    return words;
  }

  void seek(const Cursor& cursor) override {
    position_ = cursor[0];
    Batches none;
    for (auto sample = cursor.begin() + 1; sample != cursor.end(); ++sample) {
      check_argument(table_.has(*sample), "the position is not one of these samples");
      take(none, *sample);
    }
    check_argument(none.count() == 0, "the position is not one of these buckets");
  }

 private:
  static constexpr std::size_t kBatchesInBlock = 64;

  struct Open {
    std::vector<std::int64_t> samples;
    MultiFill<double> fill;
  };

  void take(Batches& block, std::int64_t sample) {
    const std::span<const double> sizes = table_.sizes_of(sample);
    Open& open = open_[find_(sizes[0])];
    while (!open.samples.empty() && !open.fill.fits(sizes.data())) {
      give(block, open);
    }
    open.samples.push_back(sample);
    open.fill.add(sizes.data());
    if (++waiting_ > most_waiting_) {
      const auto load = [](const Open& some) {
        return some.samples.empty() ? -1.0 : some.fill.load();
      };
      give(block, *std::max_element(open_.begin(), open_.end(), [&](const Open& a, const Open& b) {
             return load(a) < load(b);
           }));
    }
  }

  // Gives the longest waiting ones; what is beyond a multiple waits on.
  void give(Batches& block, Open& open) {
    const auto sizes_at = [&](std::size_t i) { return table_.sizes_of(open.samples[i]).data(); };
    const std::size_t taken =
        detail::keep_multiple(open.fill, 0, open.samples.size(), multiple_, sizes_at);
    const auto end = open.samples.begin() + static_cast<std::ptrdiff_t>(taken);
    block.indices.insert(block.indices.end(), open.samples.begin(), end);
    block.close(open.fill.load());
    waiting_ -= static_cast<std::int64_t>(taken);
    open.samples.erase(open.samples.begin(), end);
    open.fill.clear();
    for (std::size_t i = 0; i < open.samples.size(); ++i) {
      open.fill.add(sizes_at(i));
    }
  }

  void give_all(Batches& block) {
    for (Open& open : open_) {
      while (!open.samples.empty()) {
        give(block, open);
      }
    }
  }

  StreamTable& table_;
  detail::BucketFinder<double> find_;
  std::int64_t most_waiting_;
  std::size_t multiple_;
  std::vector<Open> open_;
  std::int64_t waiting_ = 0;  // the number of samples in open batches
  std::int64_t position_ = 0;
};

/// A source over a table, whose cursor says which samples must be read again: the number of the
/// sample at the place of the source comes first.
class Replayed : public BatchSource {
 public:
  Replayed(StreamTable& table, std::unique_ptr<BatchSource> source)
      : table_(table), source_(std::move(source)) {}

  bool fill(Batches& block, std::int64_t world_size) override {
    if (block.count() == 0) {  // a new block: no sample of earlier ones is needed
      const Cursor words = cursor();
      table_.forget_before(first_of(words), words[1]);
      first_needed_ = first_of(words);
    }
    return source_->fill(block, world_size);
  }
  [[nodiscard]] std::int64_t rest() const override { return source_->rest(); }

  [[nodiscard]] Cursor cursor() const override {
    Cursor words = source_->cursor();
    words.insert(words.begin(), table_.sample_at(words[0]));
    return words;
  }

  void seek(const Cursor& cursor) override {
    check_argument(cursor.size() >= 2 && cursor[1] >= 0 && cursor[0] >= cursor[1] &&
                       std::all_of(cursor.begin() + 2, cursor.end(),
                                   [&](auto held) { return held >= 0 && held < cursor[0]; }),
                   "the position is not one of this stream");
    table_.skip_to(cursor[0], cursor[1], std::span(cursor).subspan(2));
    source_->seek(Cursor(cursor.begin() + 1, cursor.end()));
  }

  [[nodiscard]] std::int64_t first_needed() const { return first_needed_; }

 private:
  static std::int64_t first_of(const Cursor& words) {
    return std::accumulate(words.begin() + 2, words.end(), words[0],
                           [](auto a, auto b) { return std::min(a, b); });
  }

  StreamTable& table_;
  std::unique_ptr<BatchSource> source_;
  std::int64_t first_needed_ = 0;
};

}  // namespace

struct LookAheadCore::Parts {
  Parts(ReadSizes read, std::vector<Limit> limits, const LookAheadOptions& options, Ranks ranks)
      : table(std::move(limits), options, std::move(read)), stream(make_source(options), ranks) {
    look_ahead_for(ranks.world_size);
  }

  // A BatchStream asks whether this many samples are left, to share the last step out.
  void look_ahead_for(std::int64_t world_size) {
    table.widen_margin(4 * std::min(world_size, kMostRanks));
  }

  std::unique_ptr<BatchSource> make_source(const LookAheadOptions& options) {
    std::unique_ptr<BatchSource> source;
    if (options.boundaries.empty()) {
      const std::size_t multiple =
          detail::multiple_argument(options.batch_multiple, table.columns());
      detail::check_packed_multiple(multiple, table.columns());
      source = std::make_unique<detail::PackedSource<double, StreamTable>>(
          table, options.samples, 1.0, options.seed, multiple);
    } else {
      detail::check_boundaries(options.boundaries);
      source = std::make_unique<OpenBuckets>(table, options);
    }
    auto made = std::make_unique<Replayed>(table, std::move(source));
    replayed = made.get();
    return made;
  }

  StreamTable table;
  Replayed* replayed = nullptr;  // owned by the stream
  BatchStream stream;
};

std::int64_t detail::part_size(const std::vector<Limit>& limits, const LookAheadOptions& options) {
  check_argument(options.size_multiple >= 1 && options.size_multiple < (std::int64_t{1} << 31),
                 "size_multiple must be from 1 to 2^31 - 1, got ", options.size_multiple);
  const bool splits = options.oversize == Oversize::split;
  if (!splits && options.size_multiple == 1) {
    return 0;
  }
  const bool one_size =
      !limits.empty() && std::all_of(limits.begin() + 1, limits.end(), [](auto& limit) {
        return limit.cost().kind() == Cost::Kind::count;
      });
  check_argument(one_size, splits ? "oversize \"split\"" : "size_multiple",
                 " needs one max_total_size: samples of several sizes cannot be ",
                 splits ? "cut" : "padded", " by one of them");
  if (!splits) {
    return 0;
  }
  const std::int64_t largest = limits[0].largest_whole_size();
  const std::int64_t size = largest / options.size_multiple * options.size_multiple;
  check_argument(size > 0,
                 "samples cannot be cut into parts that fit: the largest size that fits "
                 "max_total_size is ",
                 largest, ", and parts are multiples of ", options.size_multiple);
  return size;
}

std::int64_t detail::whole_size(double size, std::int64_t sample) {
  check_argument(size >= 0 && size < 0x1p53 && size == std::floor(size),
                 "sizes must be whole numbers for oversize \"split\", got ", size, " for sample ",
                 sample);
  return static_cast<std::int64_t>(size);
}

LookAheadCore::LookAheadCore(ReadSizes read, std::vector<Limit> limits,
                             const LookAheadOptions& options, Ranks ranks) {
  check_argument(options.samples > 0, "lookahead must be positive, got ", options.samples);
  parts_ = std::make_unique<Parts>(std::move(read), std::move(limits), options, ranks);
}

LookAheadCore::~LookAheadCore() = default;
LookAheadCore::LookAheadCore(LookAheadCore&&) noexcept = default;

std::optional<std::span<const std::int64_t>> LookAheadCore::next() { return parts_->stream.next(); }
std::int64_t LookAheadCore::first_needed() const { return parts_->replayed->first_needed(); }
Position LookAheadCore::position(std::int64_t batches) const {
  return parts_->stream.position(batches);
}
void LookAheadCore::seek(const Position& position) {
  for (const Position::Segment& segment : position.segments) {
    parts_->look_ahead_for(segment.world_size);
  }
  parts_->stream.seek(position);
}
std::int64_t LookAheadCore::given() const { return parts_->stream.given(); }
std::int64_t LookAheadCore::samples_read() const { return parts_->table.samples_read(); }
const std::vector<std::uint64_t>& LookAheadCore::fingerprints() const {
  return parts_->table.fingerprints();
}
bool LookAheadCore::sizes_differ() const { return parts_->table.sizes_differ(); }
std::vector<LeftOut> LookAheadCore::left_out() const {
  std::vector<LeftOut> result = parts_->table.left_out();
  const std::vector<LeftOut>& of_ranks = parts_->stream.left_out();
  result.insert(result.end(), of_ranks.begin(), of_ranks.end());
  return result;
}

}  // namespace brim::batching
