#include <brim/batching/sample_index.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <type_traits>
#include <utility>

#include "batching/bucket_counts.h"
#include "batching/in_parallel.h"
#include "batching/index_file.h"
#include "batching/permutation.h"
#include "batching/sample_table.h"

namespace brim::batching {
namespace {

using detail::IndexFile;

constexpr const char* kSuffix = ".brim-index";

template <class Number>
std::span<const std::byte> bytes_of(const std::vector<Number>& numbers) {
  return std::as_bytes(std::span(numbers));
}

std::string hex(std::uint64_t number) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(number));
  return text.data();
}

/// Takes numbers from the front of a payload; fails for good once there are too few.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class Number>
  std::span<const Number> take(std::uint64_t count) {
    whole_ = whole_ && count <= bytes_.size() / sizeof(Number);
    if (!whole_) {
      return {};
    }
    const auto* const first = reinterpret_cast<const Number*>(bytes_.data());
    bytes_ = bytes_.subspan(static_cast<std::size_t>(count) * sizeof(Number));
    return {first, static_cast<std::size_t>(count)};
  }
  std::uint64_t word() {
    const auto taken = take<std::uint64_t>(1);
    return taken.empty() ? 0 : taken[0];
  }
  /// Whether all was there, and nothing is left.
  [[nodiscard]] bool at_end() const { return whole_ && bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
  bool whole_ = true;
};

std::vector<std::uint64_t> words_of(const EpochIndex& index) {
  std::vector<std::uint64_t> words{index.ranks, index.batches_of_rank, index.blocks.size(),
                                   index.checkpoints.size()};
  for (const EpochIndex::Block& block : index.blocks) {
    words.insert(words.end(), {block.rest, block.batches, block.place});
  }
  for (const EpochIndex::Checkpoint& checkpoint : index.checkpoints) {
    words.insert(words.end(), {checkpoint.block, checkpoint.cursor.size()});
    words.insert(words.end(), checkpoint.cursor.begin(), checkpoint.cursor.end());
  }
  return words;
}

std::optional<EpochIndex> epoch_of(std::span<const std::byte> payload) {
  Reader from(payload);
  EpochIndex index;
  index.ranks = from.word();
  index.batches_of_rank = from.word();
  const std::uint64_t blocks = from.word();
  const std::uint64_t checkpoints = from.word();
  const auto words =
      from.take<std::uint64_t>(blocks < payload.size() ? 3 * blocks : payload.size());
  for (std::size_t i = 0; i + 2 < words.size(); i += 3) {
    index.blocks.push_back({words[i], words[i + 1], words[i + 2]});
  }
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(checkpoints, payload.size()); ++i) {
    const std::uint64_t block = from.word();
    const auto cursor = from.take<std::int64_t>(from.word());
    index.checkpoints.push_back({block, {cursor.begin(), cursor.end()}});
  }
  const bool valid = from.at_end() && blocks > 0 && checkpoints > 0;
  return valid ? std::optional(std::move(index)) : std::nullopt;
}

}  // namespace

template <class T>
SizeSummary<T> summarize(const SizeSpan<T>& sizes, std::size_t threads) {
  constexpr std::size_t kPart = SizeSummary<T>::kPart;
  SizeSummary<T> result;
  sizes.visit([&]<class Stored>(std::span<const Stored> stored) {
    constexpr Stored kMost = std::numeric_limits<Stored>::max();
    const std::size_t parts = (stored.size() + kPart - 1) / kPart;
    result.largest.resize(parts);
    std::atomic<std::uint64_t> sum = detail::mix(0, stored.size());
    std::atomic<bool> wrong = false;
    detail::in_parallel(parts, threads, [&](std::size_t part) {
      const std::size_t begin = part * kPart;
      const auto some = stored.subspan(begin, std::min(kPart, stored.size() - begin));
      Stored largest = 0;
      bool allowed = true;
      for (const Stored size : some) {
        largest = size > largest ? size : largest;
        allowed &= size >= 0 && size <= kMost;
      }
      wrong = wrong || !allowed;
      // A size of one byte is a number, not a character.
      result.largest[part] = static_cast<T>(largest);  // NOLINT(bugprone-signed-char-misuse)
      sum += detail::fingerprint_part(some, begin);
    });
    result.fingerprint = sum;
    if (wrong) {
      (void)detail::largest_size(sizes);  // throws, naming the first
    }
  });
  return result;
}

template SizeSummary<std::int64_t> summarize(const SizeSpan<std::int64_t>&, std::size_t);
template SizeSummary<double> summarize(const SizeSpan<double>&, std::size_t);

std::string data_file_state(const std::filesystem::path& file) {
  const auto changed = std::filesystem::last_write_time(file).time_since_epoch();
  return std::to_string(std::filesystem::file_size(file)) + " bytes, changed at " +
         std::to_string(std::chrono::duration_cast<std::chrono::nanoseconds>(changed).count());
}

SampleIndex::SampleIndex(std::variant<SizeSpan<std::int64_t>, SizeSpan<double>> sizes,
                         Options options)
    : options_(std::move(options)), sizes_(sizes) {
  std::visit([&](const auto& some) { summarize_or_read(some); }, sizes_);
}

SampleIndex::~SampleIndex() = default;

// A few sizes from all over the data are a part of what tells them from others: a file that was
// written anew within the resolution of its time of change mostly has others.
template <class T>
void SampleIndex::summarize_or_read(const SizeSpan<T>& sizes) {
  constexpr std::size_t kLooks = 64;
  constexpr std::size_t kAtOnce = 32;
  detail::check_lengths(Columns<T>{{sizes, Limit(Cost::count(), std::int64_t{1})}});
  std::uint64_t seen = sizes.size();
  std::size_t width = 0;
  sizes.visit([&](auto stored) {
    width = sizeof(stored[0]);
    for (std::size_t look = 0; look < kLooks; ++look) {
      const std::size_t begin = stored.size() / kLooks * look;
      for (std::size_t i = begin; i < std::min(begin + kAtOnce, stored.size()); ++i) {
        seen = detail::mix(seen, std::bit_cast<std::uint64_t>(static_cast<double>(stored[i])));
      }
    }
  });
  const std::string kind = std::is_same_v<T, double> ? "real" : "whole";
  identity_ = options_.data + "; " + std::to_string(sizes.size()) + " " + kind + " sizes of " +
              std::to_string(width) + " bytes; " + hex(seen);
  SizeSummary<T> summary;
  const std::size_t parts = (sizes.size() + summary.kPart - 1) / summary.kPart;
  const auto parse = [&](std::span<const std::byte> payload) {
    Reader from(payload);
    summary.fingerprint = from.word();
    const auto largest = from.take<T>(parts);
    summary.largest.assign(largest.begin(), largest.end());
    return from.at_end();
  };
  if (options_.data.empty()) {  // nothing but all sizes tells them from others
    summary = summarize(sizes, options_.threads);
    identity_ += "; all: " + hex(summary.fingerprint);
  } else if (!read("sizes", IndexFile(path_of("sizes"), "", identity_), parse)) {
    summary = summarize(sizes, options_.threads);
    const std::vector<std::uint64_t> first{summary.fingerprint};
    write("sizes", "", {bytes_of(first), bytes_of(summary.largest)});
  }
  summary_ = std::make_shared<const SizeSummary<T>>(std::move(summary));
}

std::filesystem::path SampleIndex::path_of(const std::string& name) const {
  return options_.folder / (name + kSuffix);
}

// Returns whether there is a usable record; notes why not, unless there is none at all.
template <class Parse>
bool SampleIndex::read(const std::string& name, const IndexFile& file, const Parse& parse) {
  const std::filesystem::path path = path_of(name);
  if (file.state() == IndexFile::State::usable && parse(file.payload())) {
    return true;
  }
  if (file.state() != IndexFile::State::absent) {
    const char* const why = file.state() == IndexFile::State::other_data
                                ? "is of other sizes (the data have changed)"
                                : "is damaged, or of another version of brim";
    notes_.push_back(path.string() + " " + why + ": it is made again");
  }
  return false;
}

void SampleIndex::write(const std::string& name, std::string_view settings,
                        const std::vector<std::span<const std::byte>>& parts) {
  ++made_;
  const std::filesystem::path path = path_of(name);
  if (const std::error_code error = IndexFile::write(path, settings, identity_, parts)) {
    notes_.push_back(path.string() + " cannot be written (" + error.message() +
                     "): it is made again by each process");
  }
}

std::uint64_t SampleIndex::fingerprint() const {
  return std::visit([](const auto& summary) { return summary->fingerprint; }, summary_);
}

template <class T>
bool SampleIndex::is_of(const SizeSpan<T>& sizes) const {
  const auto* const own = std::get_if<SizeSpan<T>>(&sizes_);
  return own != nullptr && detail::same_memory(*own, sizes);
}

template bool SampleIndex::is_of(const SizeSpan<std::int64_t>&) const;
template bool SampleIndex::is_of(const SizeSpan<double>&) const;

template <class T>
void SampleIndex::describe(Columns<T>& columns) const {
  const auto* const own = std::get_if<std::shared_ptr<const SizeSummary<T>>>(&summary_);
  for (Column<T>& column : columns) {
    if (own != nullptr && is_of(column.sizes)) {
      column.summary = *own;
    }
  }
}

template void SampleIndex::describe(Columns<std::int64_t>&) const;
template void SampleIndex::describe(Columns<double>&) const;

std::shared_ptr<const EpochIndex> SampleIndex::epoch(const Batching& batching,
                                                     std::string_view settings, std::uint64_t seed,
                                                     std::int64_t world_size, bool make) {
  const std::lock_guard lock(mutex_);
  std::string about = std::string(settings) + "; seed " + std::to_string(seed);
  if (batching.ranks_decide_blocks()) {
    about += "; ranks " + std::to_string(world_size);
  }
  const std::string name = "epoch-" + hex(detail::hash_of(about));
  std::optional<EpochIndex> index;
  const IndexFile file(path_of(name), about, identity_);
  const bool found = read(name, file, [&](std::span<const std::byte> payload) {
    index = epoch_of(payload);
    return index && std::cmp_less_equal(index->batches_of_rank, batching.samples());
  });
  if (!found) {
    if (!make) {
      return nullptr;
    }
    index = EpochIndex::make(batching, seed, world_size);
    const std::vector<std::uint64_t> words = words_of(*index);
    write(name, about, {bytes_of(words)});
  }
  return std::make_shared<const EpochIndex>(std::move(*index));
}

std::shared_ptr<const detail::BucketCounts> SampleIndex::bucket_counts(
    std::string_view settings, const std::function<detail::OwnBucketCounts()>& make) {
  const std::lock_guard lock(mutex_);
  const std::string about(settings);
  const std::string name = "buckets-" + hex(detail::hash_of(about));
  /// The counts lie in the file, which stays mapped.
  struct Mapped {
    Mapped(const std::filesystem::path& path, const std::string& text, const std::string& data)
        : file(path, text, data) {}
    IndexFile file;
    detail::BucketCounts counts;
  };
  const auto mapped = std::make_shared<Mapped>(path_of(name), about, identity_);
  detail::BucketCounts& counts = mapped->counts;
  const bool found = read(name, mapped->file, [&](std::span<const std::byte> payload) {
    Reader from(payload);
    counts.samples = from.word();
    counts.buckets = from.word();
    counts.length = from.word();
    counts.cell_bytes = from.word();
    const bool possible = counts.length > 0 && counts.buckets > 0 && counts.cell_bytes > 0 &&
                          counts.cell_bytes <= 4 &&
                          counts.samples <= std::numeric_limits<std::uint32_t>::max() &&
                          counts.buckets <= payload.size();
    counts.before = from.take<std::uint32_t>(possible ? counts.before_size() : 0);
    counts.cells = from.take<std::uint8_t>(possible ? counts.cells_size() : 0);
    return possible && from.at_end();
  });
  if (found) {
    return {mapped, &mapped->counts};
  }
  const auto own = std::make_shared<detail::OwnBucketCounts>(make());
  const std::vector<std::uint64_t> first{own->counts.samples, own->counts.buckets,
                                         own->counts.length, own->counts.cell_bytes};
  write(name, about, {bytes_of(first), bytes_of(own->before), bytes_of(own->cells)});
  return {own, &own->counts};
}

std::vector<std::string> SampleIndex::take_notes() {
  const std::lock_guard lock(mutex_);
  return std::exchange(notes_, {});
}

std::size_t SampleIndex::made() const {
  const std::lock_guard lock(mutex_);
  return made_;
}

}  // namespace brim::batching
