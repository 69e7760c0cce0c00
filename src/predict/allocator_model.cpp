#include <brim/predict/allocator_model.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "check_argument.h"

namespace brim {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kSmallestBlock = 512;
constexpr std::int64_t kLargestSmall = 1 * kMiB;  // the largest request of the small pool
constexpr std::int64_t kSmallSegment = 2 * kMiB;
constexpr std::int64_t kLargestShared = 10 * kMiB;  // from here on a request has its own segment
constexpr std::int64_t kSegmentGranule = 2 * kMiB;
constexpr std::int64_t kLargestRequest = std::int64_t{1} << 50;
constexpr std::int64_t kAddressSpace = std::int64_t{1} << 42;  // of an expandable segment

// Instead of a block: of ids that hold none.
constexpr std::int32_t kNoBytes = -2;
constexpr std::int32_t kFreed = -3;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void check_capacity(std::int64_t capacity) {
  detail::check_argument(capacity >= 0, "capacity must not be negative, got ", capacity);
}

void check(const AllocatorOptions& options) {
  check_capacity(options.capacity);
  detail::check_argument(options.large_segment_size >= kLargestShared &&
                             options.large_segment_size % kSegmentGranule == 0,
                         "large_segment_size must be a multiple of 2 MiB and at least 10 MiB, got ",
                         options.large_segment_size);
  detail::check_argument(options.max_split_size > options.large_segment_size,
                         "max_split_size must be more than large_segment_size (",
                         options.large_segment_size, "), got ", options.max_split_size);
  detail::check_argument(
      options.max_non_split_rounding >= 0 && options.max_non_split_rounding <= kLargestRequest,
      "max_non_split_rounding must be from 0 to 2^50, got ", options.max_non_split_rounding);
  const std::int64_t divisions = options.roundup_power2_divisions;
  detail::check_argument(
      divisions == 0 || (divisions > 0 && divisions <= kLargestRequest / kSmallestBlock &&
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
    return std::nullopt;
  }
  if (should_split(request, at(block).size)) {
    block = split(block, request.size);
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
  detail::check_argument(
      allocation >= 0 && allocation < static_cast<std::int64_t>(given_out_.size()),
      "allocation must be a number below ", given_out_.size(), ", got ", allocation);
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
  merge(block, at(block).previous);
  merge(block, at(block).next);
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

std::int64_t AllocatorModel::block_size(std::int64_t allocation) const {
  const Index block = checked(allocation);
  return block == kNoBytes ? 0 : at(block).size;
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
    request.segment_size = request.size < kLargestShared ? options_.large_segment_size
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
AllocatorModel::Index AllocatorModel::new_segment(const Request& request) {
  // Torch compares with the size of a plain segment, although expandable ones grow by whole pages.
  if (request.segment_size > options_.capacity - now_.reserved) {
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

/// Maps pages so that free ones and new ones together hold the request.
AllocatorModel::Index AllocatorModel::extend(const Request& request) {
  Index block = find_address_space(request);
  if (at(block).state == State::unmapped) {
    map(block, std::min(at(block).size, request.size));
  }
  while (at(block).size < request.size) {
    const Index next = at(block).next;  // unmapped: a free one would be merged already
    map(next, std::min(request.size - at(block).size, at(next).size));
    block = next;  // which holds the other now
  }
  erase(block);
  return block;
}

/// The lowest address with enough free or unmapped space.
AllocatorModel::Index AllocatorModel::find_address_space(const Request& request) {
  const auto usable = [&](Index block) {
    return block != kNone && at(block).state != State::allocated;
  };
  auto& unmapped = pool(request.small).unmapped;
  for (auto it = unmapped.lower_bound({request.stream, 0, 0, kNone});
       it != unmapped.end() && it->stream == request.stream; ++it) {
    const Index before = at(it->block).previous;
    const Index first = usable(before) ? before : it->block;
    std::int64_t space = 0;
    for (Index block = first; space < request.size && usable(block); block = at(block).next) {
      space += at(block).size;
    }
    if (space >= request.size) {
      return first;
    }
  }
  const std::int64_t page = page_size(request.small);
  const Index segment = add_block({.address = round_up(next_address_, page),
                                   .size = round_up(std::max(kAddressSpace, request.size), page),
                                   .stream = request.stream,
                                   .state = State::unmapped,
                                   .small = request.small});
  next_address_ = at(segment).address + at(segment).size;
  insert(segment);
  return segment;
}

/// Maps the first pages of unmapped space.
void AllocatorModel::map(Index block, std::int64_t bytes) {
  erase(block);
  const std::int64_t mapped = round_up(bytes, page_size(at(block).small));
  if (mapped < at(block).size) {
    Block rest = at(block);
    rest.address += mapped;
    rest.size -= mapped;
    at(block).size = mapped;
    const Index added = add_block(rest);
    link_after(block, added);
    insert(added);
  }
  at(block).state = State::free;
  merge(block, at(block).previous);
  merge(block, at(block).next);
  insert(block);
  now_.reserved += mapped;
}

bool AllocatorModel::should_split(const Request& request, std::int64_t block_size) const {
  const std::int64_t rest = block_size - request.size;
  if (request.small || options_.expandable_segments) {
    return rest >= kSmallestBlock;
  }
  return request.size < options_.max_split_size && rest > kLargestSmall;
}

/// The first `size` bytes as a block of their own; the rest becomes free.
AllocatorModel::Index AllocatorModel::split(Index block, std::int64_t size) {
  Block rest = at(block);
  rest.address += size;
  rest.size -= size;
  at(block).size = size;
  const Index added = add_block(rest);
  link_after(block, added);
  insert(added);
  return block;
}

/// Makes a neighbour part of the block if both are free or both unmapped.
void AllocatorModel::merge(Index block, Index neighbour) {
  if (neighbour == kNone || at(neighbour).state != at(block).state) {
    return;
  }
  erase(neighbour);
  at(block).address = std::min(at(block).address, at(neighbour).address);
  at(block).size += at(neighbour).size;
  remove_block(neighbour);
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

/// Gives back the whole pages within a free block.
void AllocatorModel::unmap(Index block) {
  const std::int64_t page = page_size(at(block).small);
  const std::int64_t begin = round_up(at(block).address, page);
  const std::int64_t end = (at(block).address + at(block).size) / page * page;
  if (begin >= end) {
    return;
  }
  erase(block);
  if (end < at(block).address + at(block).size) {
    Block after = at(block);
    after.size -= end - after.address;
    after.address = end;
    const Index added = add_block(after);
    link_after(block, added);
    insert(added);
  }
  if (at(block).address < begin) {
    Block before = at(block);
    before.size = begin - before.address;
    const Index added = add_block(before);
    const Index previous = at(block).previous;
    at(added).previous = previous;
    at(added).next = block;
    at(block).previous = added;
    if (previous != kNone) {
      at(previous).next = added;
    }
    insert(added);
  }
  at(block).address = begin;
  at(block).size = end - begin;
  at(block).state = State::unmapped;
  now_.reserved -= end - begin;
  merge(block, at(block).previous);
  merge(block, at(block).next);
  if (is_split(block)) {
    insert(block);
  } else {
    remove_block(block);  // nothing of the segment is in use
  }
}

AllocatorModel::Index AllocatorModel::add_block(const Block& block) {
  if (unused_.empty()) {
    blocks_.push_back(block);
    return static_cast<Index>(blocks_.size()) - 1;
  }
  const Index place = unused_.back();
  unused_.pop_back();
  at(place) = block;
  return place;
}

/// Also out of its segment.
void AllocatorModel::remove_block(Index block) {
  const auto [previous, next] = std::pair(at(block).previous, at(block).next);
  if (previous != kNone) {
    at(previous).next = next;
  }
  if (next != kNone) {
    at(next).previous = previous;
  }
  at(block) = {};
  unused_.push_back(block);
}

void AllocatorModel::link_after(Index block, Index added) {
  const Index next = at(block).next;
  at(added).previous = block;
  at(added).next = next;
  at(block).next = added;
  if (next != kNone) {
    at(next).previous = added;
  }
}

AllocatorModel::Entry AllocatorModel::entry(Index block) const {
  const Block& it = at(block);
  return {it.stream, it.state == State::unmapped ? 0 : it.size, it.address, block};
}

bool AllocatorModel::is_split(Index block) const {
  return at(block).previous != kNone || at(block).next != kNone;
}

/// Puts a free or unmapped block where it can be found.
void AllocatorModel::insert(Index block) {
  Pool& in = pool(at(block).small);
  if (at(block).state == State::unmapped) {
    in.unmapped.insert(entry(block));
    return;
  }
  in.free.insert(entry(block));
  if (is_split(block) && !options_.expandable_segments) {
    now_.inactive_split += at(block).size;
  }
}

void AllocatorModel::erase(Index block) {
  Pool& in = pool(at(block).small);
  if (at(block).state == State::unmapped) {
    in.unmapped.erase(entry(block));
    return;
  }
  in.free.erase(entry(block));
  if (is_split(block) && !options_.expandable_segments) {
    now_.inactive_split -= at(block).size;
  }
}

std::int64_t AllocatorModel::page_size(bool small) const {
  return small ? kSmallSegment : options_.large_segment_size;
}

std::vector<AllocatorSegment> AllocatorModel::segments() const {
  std::vector<AllocatorSegment> result;
  if (options_.kind == AllocatorKind::exact) {
    return result;
  }
  const auto mapped = [&](Index block) {
    return block != kNone && at(block).size > 0 && at(block).state != State::unmapped;
  };
  for (Index head = 0; head < static_cast<Index>(blocks_.size()); ++head) {
    if (!mapped(head) || mapped(at(head).previous)) {
      continue;
    }
    AllocatorSegment segment{at(head).address, 0, at(head).stream, at(head).small, {}};
    for (Index block = head; mapped(block); block = at(block).next) {
      const Block& it = at(block);
      segment.size += it.size;
      segment.blocks.push_back({it.address, it.size, it.requested, it.state == State::allocated});
    }
    result.push_back(std::move(segment));
  }
  std::ranges::sort(result, {}, &AllocatorSegment::address);
  return result;
}

}  // namespace brim
