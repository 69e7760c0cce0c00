#include <brim/predict/allocator_model.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "check_argument.h"
#include "predict/round_up.h"

namespace brim {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kSmallestBlock = 512;
constexpr std::int64_t kLargestSmall = 1 * kMiB;  // the largest request of the small pool
constexpr std::int64_t kSmallSegment = 2 * kMiB;
constexpr std::int64_t kOwnSegmentFrom = 10 * kMiB;  // smaller requests share segments
constexpr std::int64_t kSegmentGranule = 2 * kMiB;

// Instead of a block: of allocations that hold none.
constexpr std::int32_t kNoBytes = -2;
constexpr std::int32_t kFreed = -3;

void check_capacity(std::int64_t capacity) {
  detail::check_argument(capacity >= 0, "capacity must not be negative, got ", capacity);
}

void check(const AllocatorOptions& options) {
  check_capacity(options.capacity);
  detail::check_argument(options.large_segment_size >= kOwnSegmentFrom &&
                             options.large_segment_size % kSegmentGranule == 0,
                         "large_segment_size must be a multiple of 2 MiB and at least 10 MiB, got ",
                         options.large_segment_size);
  detail::check_argument(options.max_split_size > options.large_segment_size,
                         "max_split_size must be more than large_segment_size (",
                         options.large_segment_size, "), got ", options.max_split_size);
  detail::check_argument(options.max_non_split_rounding >= 0 &&
                             options.max_non_split_rounding <= AllocatorModel::kLargestRequest,
                         "max_non_split_rounding must be from 0 to 2^50, got ",
                         options.max_non_split_rounding);
  const std::int64_t divisions = options.roundup_power2_divisions;
  detail::check_argument(
      divisions == 0 ||
          (divisions > 0 && divisions <= AllocatorModel::kLargestRequest / kSmallestBlock &&
           std::has_single_bit(static_cast<std::uint64_t>(divisions))),
      "roundup_power2_divisions must be 0 or a power of two, got ", divisions);
}

void raise(AllocatorUse& peak, const AllocatorUse& now) {
  peak.requested = std::max(peak.requested, now.requested);
  peak.allocated = std::max(peak.allocated, now.allocated);
  peak.reserved = std::max(peak.reserved, now.reserved);
  peak.inactive_split = std::max(peak.inactive_split, now.inactive_split);
}

}  // namespace

AllocatorModel::AllocatorModel(const AllocatorOptions& options) : options_(options) {
  check(options);
}

std::optional<std::int64_t> AllocatorModel::allocate(std::int64_t size, std::int64_t stream) {
  detail::check_argument(size >= 0 && size <= kLargestRequest, "size must be from 0 to 2^50, got ",
                         size);
  if (size == 0) {
    given_out_.push_back(kNoBytes);
    return static_cast<std::int64_t>(given_out_.size()) - 1;
  }
  if (options_.kind == AllocatorKind::exact) {
    return allocate_exactly(size);
  }
  const Request request = rounded(size, stream);
  if (options_.beyond > 0 && request.size > options_.capacity - now_.allocated) {
    return std::nullopt;
  }
  Index block = find_free(request);
  if (block == kNone) {
    block = new_segment(request);
  }
  if (block == kNone && release_oversized(request)) {
    block = new_segment(request);
  }
  if (block == kNone) {
    release_cache();
    ++retries_;
    block = new_segment(request);
  }
  if (block == kNone) {
    block = new_segment(request, options_.beyond);
  }
  if (block == kNone) {
    return std::nullopt;
  }
  if (should_split(request, at(block).size)) {
    insert(split(block, request.size));
  }
  return give_out(block, size);
}

std::optional<std::int64_t> AllocatorModel::allocate_exactly(std::int64_t bytes) {
  if (bytes > options_.capacity - now_.allocated) {
    return std::nullopt;
  }
  now_.reserved += bytes;
  return give_out(add_block({.size = bytes}), bytes);
}

std::int64_t AllocatorModel::give_out(Index block, std::int64_t bytes) {
  at(block).state = State::allocated;
  at(block).requested = bytes;
  now_.requested += bytes;
  now_.allocated += at(block).size;
  raise(peak_, now_);
  given_out_.push_back(block);
  return static_cast<std::int64_t>(given_out_.size()) - 1;
}

AllocatorModel::Index AllocatorModel::checked(std::int64_t allocation) const {
  detail::check_argument(allocation >= 0 && std::cmp_less(allocation, given_out_.size()),
                         "allocation must be a number below ", given_out_.size(), ", got ",
                         allocation);
  const Index block = given_out_[static_cast<std::size_t>(allocation)];
  detail::check_argument(block != kFreed, "allocation must be held, but ", allocation,
                         " is freed already");
  return block;
}

void AllocatorModel::free(std::int64_t allocation) {
  const Index block = checked(allocation);
  given_out_[static_cast<std::size_t>(allocation)] = kFreed;
  if (block == kNoBytes) {
    return;
  }
  now_.requested -= at(block).requested;
  now_.allocated -= at(block).size;
  if (options_.kind == AllocatorKind::exact) {
    now_.reserved -= at(block).size;
    remove_block(block);
    return;
  }
  at(block).state = State::free;
  at(block).requested = 0;
  merge_neighbours(block);
  insert(block);
  raise(peak_, now_);  // a free can add to inactive_split
}

void AllocatorModel::empty_cache() { release_cache(); }

void AllocatorModel::set_capacity(std::int64_t capacity) {
  check_capacity(capacity);
  options_.capacity = capacity;
}

void AllocatorModel::set_segment_addresses(std::vector<std::int64_t> addresses) {
  for (const std::int64_t address : addresses) {
    detail::check_argument(address >= 0, "addresses must not be negative, got ", address);
  }
  std::ranges::reverse(addresses);
  known_addresses_ = std::move(addresses);
}

AllocatorBlock AllocatorModel::block(std::int64_t allocation) const {
  const Index index = checked(allocation);
  if (index == kNoBytes) {
    return {};
  }
  return {at(index).address, at(index).size, at(index).requested, true};
}

std::unordered_map<std::int64_t, std::int64_t> AllocatorModel::held() const {
  std::unordered_map<std::int64_t, std::int64_t> result;
  for (std::size_t i = 0; i < given_out_.size(); ++i) {
    if (const Index block = given_out_[i]; block >= 0) {
      result[at(block).address] = static_cast<std::int64_t>(i);
    }
  }
  return result;
}

AllocatorModel::Request AllocatorModel::rounded(std::int64_t bytes, std::int64_t stream) const {
  Request request{.size = round_up(bytes, kSmallestBlock),
                  .segment_size = kSmallSegment,
                  .stream = stream,
                  .small = true};
  const std::int64_t divisions = options_.roundup_power2_divisions;
  if (divisions > 1 && bytes > kSmallestBlock * divisions) {
    const auto power = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(bytes)));
    request.size = round_up(bytes, power / divisions);
  }
  if (request.size > kLargestSmall) {
    request.small = false;
    request.segment_size = request.size < kOwnSegmentFrom ? options_.large_segment_size
                                                          : round_up(request.size, kSegmentGranule);
  }
  return request;
}

/// The smallest free block that is large enough; taken out of the pool.
AllocatorModel::Index AllocatorModel::find_free(const Request& request) {
  const auto& free = pool(request.small).free;
  auto best = free.lower_bound({request.stream, request.size, 0, kNone});
  if (best == free.end() || best->stream != request.stream) {
    return kNone;
  }
  if (options_.expandable_segments) {
    // A block before unmapped pages counts as large as it can grow: it is kept for what is large.
    const auto room = [&](const Entry& entry) {
      const Index next = at(entry.block).next;
      const bool grows = next != kNone && at(next).state == State::unmapped;
      return entry.size + (grows ? at(next).size : 0);
    };
    for (auto next = std::next(best);
         next != free.end() && next->stream == request.stream && room(*next) < room(*best);
         ++next) {
      best = next;
    }
  }
  const bool oversized = best->size >= options_.max_split_size;
  if (request.size < options_.max_split_size
          ? oversized
          : best->size >= request.size + options_.max_non_split_rounding) {
    return kNone;
  }
  const Index block = best->block;
  erase(block);
  return block;
}

/// A block with memory that is new from the device; kNone if the capacity forbids it.
/// @param beyond the capacity
AllocatorModel::Index AllocatorModel::new_segment(const Request& request, std::int64_t beyond) {
  // Torch compares with the size of a plain segment, although expandable ones grow by whole pages.
  if (request.segment_size - beyond > options_.capacity - now_.reserved) {
    return kNone;
  }
  if (options_.expandable_segments) {
    return extend(request);
  }
  std::int64_t address = next_address_;
  if (!known_addresses_.empty()) {
    address = known_addresses_.back();
    known_addresses_.pop_back();
  }
  next_address_ = std::max(next_address_, address + request.segment_size);
  now_.reserved += request.segment_size;
  return add_block({.address = address,
                    .size = request.segment_size,
                    .stream = request.stream,
                    .small = request.small});
}

bool AllocatorModel::should_split(const Request& request, std::int64_t block_size) const {
  const std::int64_t rest = block_size - request.size;
  if (request.small || options_.expandable_segments) {
    return rest >= kSmallestBlock;
  }
  return request.size < options_.max_split_size && rest > kLargestSmall;
}

/// With max_split_size: releases free oversized blocks, no more than the request needs. Whether
/// these were enough.
bool AllocatorModel::release_oversized(const Request& request) {
  if (options_.max_split_size == AllocatorOptions::kUnlimited || options_.expandable_segments) {
    return false;
  }
  auto& free = pool(request.small).free;
  const std::int64_t wanted = std::max(request.size, options_.max_split_size);
  const auto enough = free.lower_bound({request.stream, wanted, 0, kNone});
  if (enough != free.end() && enough->stream == request.stream) {
    release(enough->block);
    return true;
  }
  std::int64_t released = 0;
  while (released < wanted && enough != free.begin()) {
    const auto largest = std::prev(enough);
    if (largest->stream != request.stream || largest->size < options_.max_split_size) {
      break;
    }
    released += largest->size;
    release(largest->block);
  }
  return released >= wanted;
}

void AllocatorModel::release_cache() {
  for (const bool small : {false, true}) {
    std::vector<Index> blocks;
    for (const Entry& entry : pool(small).free) {
      blocks.push_back(entry.block);
    }
    for (const Index block : blocks) {
      if (options_.expandable_segments) {
        unmap(block);
      } else if (!is_split(block)) {
        release(block);
      }
    }
  }
}

void AllocatorModel::release(Index block) {
  erase(block);
  now_.reserved -= at(block).size;
  remove_block(block);
}

}  // namespace brim
