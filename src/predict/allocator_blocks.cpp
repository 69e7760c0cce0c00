// How AllocatorModel keeps its blocks: as neighbours within segments, in sets to search, and in
// the pages of expandable segments. What it decides is in allocator_model.cpp.

#include <brim/predict/allocator_model.h>

#include <algorithm>
#include <utility>

#include "check_argument.h"
#include "predict/round_up.h"

namespace brim {
namespace {

constexpr std::int64_t kSmallPage = std::int64_t{2} << 20;
constexpr std::int64_t kAddressSpace = std::int64_t{1} << 42;  // of an expandable segment

}  // namespace

AllocatorModel::AllocatorModel(const AllocatorOptions& options,
                               std::span<const AllocatorSegment> segments)
    : AllocatorModel(options) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const std::int64_t end = segments[i].address + segments[i].size;
    const bool last = i + 1 == segments.size();
    adopt(segments[i], last ? kAddressSpace : segments[i + 1].address - end);
  }
  for (Index block = 0; std::cmp_less(block, blocks_.size()); ++block) {
    if (at(block).state != State::allocated) {
      insert(block);
    }
  }
  reset_peak();
}

/// @param space addresses that are free behind it.
void AllocatorModel::adopt(const AllocatorSegment& segment, std::int64_t space) {
  std::int64_t size = 0;
  Index last = kNone;
  const auto append = [&](const Block& block) { return last = add_block(block, last); };
  for (const AllocatorBlock& block : segment.blocks) {
    const Index added = append({.address = block.address,
                                .size = block.size,
                                .requested = block.requested,
                                .stream = segment.stream,
                                .state = block.allocated ? State::allocated : State::free,
                                .small = segment.small});
    if (block.allocated) {
      now_.requested += block.requested;
      now_.allocated += block.size;
      given_out_.push_back(added);
    }
    size += block.size;
  }
  detail::check_argument(size == segment.size, "the blocks of a segment must make up its ",
                         segment.size, " bytes, got ", size);
  detail::check_argument(space >= 0, "segments must be in the order of addresses, got ",
                         segment.address, " before ", segment.address + segment.size + space);
  const std::int64_t end = segment.address + segment.size;
  if (options_.expandable_segments && space > 0) {
    append({.address = end,
            .size = space,
            .stream = segment.stream,
            .state = State::unmapped,
            .small = segment.small});
  }
  now_.reserved += segment.size;
  next_address_ = std::max(next_address_, end);
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
    insert(split(block, mapped));
  }
  at(block).state = State::free;
  merge_neighbours(block);
  insert(block);
  now_.reserved += mapped;
}

/// Keeps the first `size` bytes of the block and returns the rest as a block of its own.
AllocatorModel::Index AllocatorModel::split(Index block, std::int64_t size) {
  Block rest = at(block);
  rest.address += size;
  rest.size -= size;
  at(block).size = size;
  return add_block(rest, block);
}

/// Makes its neighbours part of the block if they are free as well, or unmapped as well.
void AllocatorModel::merge_neighbours(Index block) {
  for (const Index neighbour : {at(block).previous, at(block).next}) {
    if (neighbour != kNone && at(neighbour).state == at(block).state) {
      erase(neighbour);
      at(block).address = std::min(at(block).address, at(neighbour).address);
      at(block).size += at(neighbour).size;
      remove_block(neighbour);
    }
  }
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
    insert(split(block, end - at(block).address));
  }
  if (at(block).address < begin) {
    const Index pages = split(block, begin - at(block).address);
    insert(block);
    block = pages;
  }
  at(block).state = State::unmapped;
  now_.reserved -= end - begin;
  merge_neighbours(block);
  if (is_split(block)) {
    insert(block);
  } else {
    remove_block(block);  // nothing of the segment is in use
  }
}

/// @param previous after which it stands in its segment.
AllocatorModel::Index AllocatorModel::add_block(const Block& block, Index previous) {
  if (unused_.empty()) {
    unused_.push_back(static_cast<Index>(blocks_.size()));
    blocks_.emplace_back();
  }
  const Index added = unused_.back();
  unused_.pop_back();
  at(added) = block;
  at(added).previous = previous;
  at(added).next = previous == kNone ? kNone : std::exchange(at(previous).next, added);
  if (at(added).next != kNone) {
    at(at(added).next).previous = added;
  }
  return added;
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
  return small ? kSmallPage : options_.large_segment_size;
}

std::vector<AllocatorSegment> AllocatorModel::segments() const {
  std::vector<AllocatorSegment> result;
  if (options_.kind == AllocatorKind::exact) {
    return result;
  }
  const auto mapped = [&](Index block) {
    return block != kNone && at(block).size > 0 && at(block).state != State::unmapped;
  };
  for (Index head = 0; std::cmp_less(head, blocks_.size()); ++head) {
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
