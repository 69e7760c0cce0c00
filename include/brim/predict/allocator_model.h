#pragma once

#include <brim/export.h>
#include <brim/memory/allocator_segment.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

namespace brim {

/// How an allocator turns requests into memory of the device.
enum class AllocatorKind : std::uint8_t {
  exact,    ///< every request takes its own bytes: brim's counting allocator of the CPU
  caching,  ///< torch's CUDA caching allocator: rounded blocks, cut out of cached segments
};

/// The settings of an allocator, in bytes unless a comment says otherwise. All but `kind` and
/// `capacity` are of AllocatorKind::caching, and are torch's own (PYTORCH_CUDA_ALLOC_CONF).
struct AllocatorOptions {
  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

  AllocatorKind kind = AllocatorKind::caching;
  /// What may be reserved, as torch.cuda.set_per_process_memory_fraction sets it, and so allocated.
  std::int64_t capacity = kUnlimited;
  /// Under a brim::Budget, which limits what is allocated: what may be reserved beyond the capacity
  /// where the cache is in pieces.
  std::int64_t beyond = 0;
  bool expandable_segments = false;
  /// Blocks of at least this size are never split, nor given to smaller requests.
  std::int64_t max_split_size = kUnlimited;
  /// How much larger than the request a block of at least max_split_size may be.
  std::int64_t max_non_split_rounding = std::int64_t{20} << 20;
  /// Of a segment for requests from 1 to 10 MiB; of a page of expandable segments.
  std::int64_t large_segment_size = std::int64_t{20} << 20;
  /// The number of steps between two powers of two that sizes are rounded up to, a power of two;
  /// below 2 they are rounded to 512 bytes only. One for all sizes.
  std::int64_t roundup_power2_divisions = 0;
};

/// What an allocator has given out and taken, in bytes.
struct AllocatorUse {
  std::int64_t requested = 0;  ///< the total of the requests that are held
  std::int64_t allocated = 0;  ///< the total of the blocks that hold them: what PeakMeter counts
  std::int64_t reserved = 0;   ///< the total of the segments taken from the device
  /// The total of the free blocks beside a held one, which the device cannot have back; as in
  /// torch, 0 with expandable segments.
  std::int64_t inactive_split = 0;

  bool operator==(const AllocatorUse&) const = default;
};

/// What a device's allocator does with a sequence of allocations and frees, without the device.
///
///     brim::AllocatorModel model({.expandable_segments = true});
///     auto weight = model.allocate(4 << 20);
///     model.peak().reserved;  // 20 MiB: one page of the large pool
///
/// Follows torch's CUDA caching allocator step by step, so that the bytes reserved are the same
/// after every event (tests/data holds histories recorded with torch 2.11). Not modelled:
/// garbage_collection_threshold, private pools (CUDA graphs) and frees that wait for another stream
/// (record_stream: free when that stream is done). Among free blocks of one size torch takes the
/// lowest address, which the driver decides; here segments get addresses in the order in which they
/// are made (see predict.md of docs). The address space of expandable segments never runs out.
///
/// A value type without torch in it. Reading one from several threads is safe.
class BRIM_API AllocatorModel {
 public:
  static constexpr std::int64_t kLargestRequest = std::int64_t{1} << 50;

  /// @throws std::invalid_argument if capacity is negative, max_split_size not more than
  ///     large_segment_size, that no multiple of 2 MiB from 10 MiB on, or
  ///     roundup_power2_divisions neither 0 nor a power of two.
  explicit AllocatorModel(const AllocatorOptions& options = {});

  /// Continues from what an allocator holds, as segments() returns it or torch's own snapshot. Of
  /// AllocatorKind::caching only.
  /// @throws std::invalid_argument also if segments are not in the order of addresses, or if the
  ///     blocks of one do not make it up.
  AllocatorModel(const AllocatorOptions& options, std::span<const AllocatorSegment> segments);

  /// The number of an allocation of `size` bytes, which is to be used on `stream`; they count up
  /// from 0. Empty if it does not fit the capacity, even with the cache released: then torch raises
  /// an out-of-memory error. 0 bytes take nothing.
  /// @throws std::invalid_argument if size is negative or more than 2^50.
  std::optional<std::int64_t> allocate(std::int64_t size, std::int64_t stream = 0);

  /// @throws std::invalid_argument if there is no such allocation, or it is freed already.
  void free(std::int64_t allocation);

  /// Gives free segments back to the device, as torch.cuda.empty_cache does.
  void empty_cache();

  /// Affects later allocations only. @throws std::invalid_argument if negative.
  void set_capacity(std::int64_t capacity);

  /// Where the device puts the next segments, one after the other, if that is known from a recorded
  /// history; of expandable ones nothing. @throws std::invalid_argument if one is negative.
  void set_segment_addresses(std::vector<std::int64_t> addresses);

  [[nodiscard]] const AllocatorOptions& options() const { return options_; }
  [[nodiscard]] const AllocatorUse& now() const { return now_; }
  /// The most of each, not all at the same time.
  [[nodiscard]] const AllocatorUse& peak() const { return peak_; }
  /// The number of times that the cache was released to make room.
  [[nodiscard]] std::int64_t retries() const { return retries_; }
  /// The block that holds an allocation. @throws std::invalid_argument as free() does.
  [[nodiscard]] AllocatorBlock block(std::int64_t allocation) const;
  /// The allocations that are held, by address; without those of 0 bytes.
  [[nodiscard]] std::unordered_map<std::int64_t, std::int64_t> held() const;
  /// In the order of addresses; none of AllocatorKind::exact.
  [[nodiscard]] std::vector<AllocatorSegment> segments() const;

  /// Starts peak() again from what is held now.
  void reset_peak() { peak_ = now_; }

 private:
  using Index = std::int32_t;  // of a block in blocks_
  static constexpr Index kNone = -1;

  enum class State : std::uint8_t { free, allocated, unmapped };

  struct Block {
    std::int64_t address = 0;
    std::int64_t size = 0;
    std::int64_t requested = 0;
    std::int64_t stream = 0;
    Index previous = kNone;  // neighbours in the same segment
    Index next = kNone;
    State state = State::free;
    bool small = false;
  };

  // Torch's order of free blocks, by which it finds the best fit; of unmapped ones size is 0.
  struct Entry {
    std::int64_t stream;
    std::int64_t size;
    std::int64_t address;
    Index block;
    auto operator<=>(const Entry&) const = default;
  };

  struct Pool {
    std::set<Entry> free;
    std::set<Entry> unmapped;  // address space of expandable segments
  };

  struct Request {
    std::int64_t size;          // rounded
    std::int64_t segment_size;  // if it needs a new segment
    std::int64_t stream;
    bool small;
  };

  [[nodiscard]] Request rounded(std::int64_t bytes, std::int64_t stream) const;
  [[nodiscard]] Index checked(std::int64_t allocation) const;
  std::int64_t give_out(Index block, std::int64_t bytes);
  std::optional<std::int64_t> allocate_exactly(std::int64_t bytes);

  Index find_free(const Request& request);
  Index new_segment(const Request& request, std::int64_t beyond = 0);
  Index extend(const Request& request);
  [[nodiscard]] Index find_address_space(const Request& request);
  void map(Index block, std::int64_t bytes);
  [[nodiscard]] bool should_split(const Request& request, std::int64_t block_size) const;
  Index split(Index block, std::int64_t size);
  void merge_neighbours(Index block);

  bool release_oversized(const Request& request);
  void release_cache();
  void release(Index block);
  void unmap(Index block);

  void adopt(const AllocatorSegment& segment, std::int64_t space);
  Index add_block(const Block& block, Index previous = kNone);
  void remove_block(Index block);
  [[nodiscard]] Entry entry(Index block) const;
  [[nodiscard]] bool is_split(Index block) const;
  void insert(Index block);
  void erase(Index block);

  Block& at(Index block) { return blocks_[static_cast<std::size_t>(block)]; }
  [[nodiscard]] const Block& at(Index block) const {
    return blocks_[static_cast<std::size_t>(block)];
  }
  Pool& pool(bool small) { return small ? small_ : large_; }
  [[nodiscard]] std::int64_t page_size(bool small) const;

  AllocatorOptions options_;
  AllocatorUse now_;
  AllocatorUse peak_;
  std::int64_t retries_ = 0;
  std::int64_t next_address_ = 0;
  std::vector<std::int64_t> known_addresses_;  // of the next segments, the first one last
  Pool small_;
  Pool large_;
  std::vector<Block> blocks_;
  std::vector<Index> unused_;     // places in blocks_
  std::vector<Index> given_out_;  // by allocation: the block, or one of the values below kNone
};

}  // namespace brim
