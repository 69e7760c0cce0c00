#pragma once

#include <brim/batching/batching.h>
#include <brim/batching/sample_sizes.h>
#include <brim/batching/stream.h>
#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace brim::batching {

namespace detail {
class IndexFile;
struct OwnBucketCounts;
struct BucketCounts;
}  // namespace detail

/// What one pass over all sizes finds: enough for a Batching to check them without another.
template <class T>
struct SizeSummary {
  /// The number of samples that each entry of `largest` stands for.
  static constexpr std::size_t kPart = std::size_t{1} << 16;

  std::vector<T> largest;  ///< of each part
  std::uint64_t fingerprint = 0;
};

/// Makes a summary on several threads.
/// @param threads 0 for as many as the machine runs at once.
/// @throws std::invalid_argument as check_sizes.
template <class T>
[[nodiscard]] BRIM_API SizeSummary<T> summarize(const SizeSpan<T>& sizes, std::size_t threads = 0);

/// Where the blocks of one epoch begin, and how many batches each has. With it a BatchStream skips
/// and counts batches without making them.
struct BRIM_API EpochIndex {
  struct Block {
    std::uint64_t rest;     ///< samples in this block and those behind it
    std::uint64_t batches;  ///< the number of batches in it
    std::uint64_t place;    ///< a number made of the source's cursor at its beginning
  };
  struct Checkpoint {
    std::uint64_t block;
    Cursor cursor;  ///< at its beginning
  };

  std::vector<Block> blocks;
  std::vector<Checkpoint> checkpoints;  ///< for some of them; the first is block 0
  std::uint64_t ranks = 1;              ///< for which it was made
  std::uint64_t batches_of_rank = 0;    ///< of the whole epoch, on each of so many ranks

  /// Makes all batches of the epoch once. If Batching::ranks_decide_blocks, the result is only for
  /// this number of ranks.
  /// @param between the number of samples from one checkpoint to the next: by default it takes some
  ///     milliseconds to go through them.
  static EpochIndex make(const Batching& batching, std::uint64_t seed, std::int64_t world_size = 1,
                         std::uint64_t between = std::uint64_t{1} << 17);

  /// The block that begins where this source stands, if it is one of these.
  [[nodiscard]] std::optional<std::size_t> find(const BatchSource& source) const;
  /// Moves the source to the beginning of a block behind the first. Returns false, and moves
  /// nothing, if the source is not of this epoch.
  bool seek(BatchSource& source, std::size_t block, std::int64_t world_size) const;
};

/// Keeps in a folder what takes a pass over all sizes, so that one process makes it and all others
/// read it: a summary of the sizes, counts of samples by bucket, and one EpochIndex per epoch.
///
/// A record is a file of its own, written beside and then renamed: processes that make the same one
/// at the same time disturb nobody. A record that is damaged, of another version or of other data
/// is made again, and notes() says so. If the folder cannot be written, that is a note too, and the
/// record is for this process alone.
///
/// For any number of threads. The sizes must stay where they are.
class BRIM_API SampleIndex {
 public:
  struct Options {
    std::filesystem::path folder;
    /// Tells these data from others without a look at all sizes: see data_file_state. Empty if
    /// there is nothing of the kind: then each process reads all sizes once.
    std::string data;
    std::size_t threads = 0;  ///< that make records; 0 for as many as the machine runs at once
  };

  /// Reads the summary, or makes it. @throws std::invalid_argument as check_sizes.
  SampleIndex(std::variant<SizeSpan<std::int64_t>, SizeSpan<double>> sizes, Options options);
  ~SampleIndex();
  SampleIndex(const SampleIndex&) = delete;
  SampleIndex& operator=(const SampleIndex&) = delete;

  [[nodiscard]] std::uint64_t fingerprint() const;

  /// Gives the summary to those columns whose sizes are these.
  template <class T>
  void describe(Columns<T>& columns) const;

  /// Whether these are the sizes of this index.
  template <class T>
  [[nodiscard]] bool is_of(const SizeSpan<T>& sizes) const;

  /// The index of an epoch, read, or made and kept.
  /// @param settings all that the batches depend on beside the sizes, the seed and the ranks.
  /// @param make whether to make one that is not there; null otherwise.
  [[nodiscard]] std::shared_ptr<const EpochIndex> epoch(const Batching& batching,
                                                        std::string_view settings,
                                                        std::uint64_t seed, std::int64_t world_size,
                                                        bool make = true);

  /// Counts of samples by bucket, read, or made by `make` and kept. For bucket_batching.
  [[nodiscard]] std::shared_ptr<const detail::BucketCounts> bucket_counts(
      std::string_view settings, const std::function<detail::OwnBucketCounts()>& make);

  /// What was said since the last call: a sentence for each record that was not as expected.
  [[nodiscard]] std::vector<std::string> take_notes();
  /// The number of records that this process had to make.
  [[nodiscard]] std::size_t made() const;
  [[nodiscard]] std::size_t threads() const { return options_.threads; }

 private:
  [[nodiscard]] std::filesystem::path path_of(const std::string& name) const;
  template <class Parse>
  bool read(const std::string& name, const detail::IndexFile& file, const Parse& parse);
  void write(const std::string& name, std::string_view settings,
             const std::vector<std::span<const std::byte>>& parts);
  template <class T>
  void summarize_or_read(const SizeSpan<T>& sizes);

  Options options_;
  std::variant<SizeSpan<std::int64_t>, SizeSpan<double>> sizes_;
  std::variant<std::shared_ptr<const SizeSummary<std::int64_t>>,
               std::shared_ptr<const SizeSummary<double>>>
      summary_;
  std::string identity_;
  std::vector<std::string> notes_;
  std::size_t made_ = 0;
  mutable std::mutex mutex_;
};

/// The length and the time of change of a file: what Options::data may be for sizes that are mapped
/// from it. @throws std::filesystem::filesystem_error if there is no such file.
[[nodiscard]] BRIM_API std::string data_file_state(const std::filesystem::path& file);

}  // namespace brim::batching
