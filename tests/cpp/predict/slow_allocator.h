#pragma once

#include <brim/predict/allocator_model.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace brim {

/// What AllocatorModel models, with plain lists that are searched from end to end.
class SlowAllocator {
 public:
  explicit SlowAllocator(const AllocatorOptions& options) : options_(options) {}

  /// The address, negative if it does not fit.
  std::int64_t allocate(std::int64_t bytes, std::int64_t stream) {
    std::int64_t size = round_up(bytes, 512);
    const std::int64_t divisions = options_.roundup_power2_divisions;
    if (divisions > 1 && bytes > 512 * divisions) {
      std::int64_t power = 512;
      while (2 * power <= bytes) {
        power *= 2;
      }
      size = power;
      while (size < bytes) {
        size += power / divisions;
      }
    }
    const bool small = size <= kMiB;
    const std::int64_t segment = small              ? 2 * kMiB
                                 : size < 10 * kMiB ? options_.large_segment_size
                                                    : round_up(size, 2 * kMiB);
    const auto found = [&] {
      return reserved() + segment > options_.capacity ? -1 : extend(size, segment, stream, small);
    };
    std::int64_t address = best_fit(size, stream, small);
    if (address < 0) {
      address = found();
    }
    if (address < 0 && release_oversized(size, stream, small)) {
      address = found();
    }
    if (address < 0) {
      release();
      ++retries;
      address = found();
    }
    if (address >= 0) {
      hold(address, size, bytes);
    }
    return address;
  }

  void free(std::int64_t address) {
    for (Segment& segment : segments_) {
      for (Block& block : segment.blocks) {
        if (block.address == address && block.state == 'a') {
          block.state = 'f';
          block.requested = 0;
          join(segment);
          return;
        }
      }
    }
    FAIL() << "nothing is held at " << address;
  }

  /// Whole segments, or whole pages, that are free.
  void release() {
    if (!options_.expandable_segments) {
      std::erase_if(segments_, [](const Segment& segment) {
        return segment.blocks.size() == 1 && segment.blocks[0].state == 'f';
      });
      return;
    }
    for (Segment& segment : segments_) {
      const std::int64_t page = segment.small ? 2 * kMiB : options_.large_segment_size;
      std::vector<Block> blocks;
      for (const Block& block : segment.blocks) {
        const std::int64_t end = block.address + block.size;
        const std::int64_t from = round_up(block.address, page);
        const std::int64_t to = end - end % page;
        if (block.state != 'f' || from >= to) {
          blocks.push_back(block);
          continue;
        }
        blocks.push_back({block.address, from - block.address, 0, 'f'});
        blocks.push_back({from, to - from, 0, 'u'});
        blocks.push_back({to, end - to, 0, 'f'});
      }
      segment.blocks = std::move(blocks);
      join(segment);
    }
    std::erase_if(segments_, [](const Segment& segment) {
      return segment.blocks.size() == 1 && segment.blocks[0].state == 'u';
    });
  }

  [[nodiscard]] AllocatorUse use() const {
    AllocatorUse result;
    for (const Segment& segment : segments_) {
      for (const Block& block : segment.blocks) {
        result.requested += block.requested;
        result.allocated += block.state == 'a' ? block.size : 0;
        result.reserved += block.state == 'u' ? 0 : block.size;
        if (block.state == 'f' && segment.blocks.size() > 1 && !options_.expandable_segments) {
          result.inactive_split += block.size;
        }
      }
    }
    return result;
  }

  std::int64_t retries = 0;

 private:
  static constexpr std::int64_t kMiB = std::int64_t{1} << 20;

  static std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
    return value % multiple == 0 ? value : value + multiple - value % multiple;
  }

  struct Block {
    std::int64_t address, size, requested;
    char state;  // f(ree), a(llocated), u(nmapped)
  };
  struct Segment {
    std::int64_t stream;
    bool small;
    std::vector<Block> blocks;
  };

  [[nodiscard]] std::int64_t reserved() const { return use().reserved; }

  static void join(Segment& segment) {
    std::vector<Block> joined;
    for (const Block& block : segment.blocks) {
      if (block.size == 0) {
        continue;
      }
      if (!joined.empty() && block.state != 'a' && joined.back().state == block.state) {
        joined.back().size += block.size;
      } else {
        joined.push_back(block);
      }
    }
    segment.blocks = std::move(joined);
  }

  std::int64_t best_fit(std::int64_t size, std::int64_t stream, bool small) {
    struct Candidate {
      std::int64_t size, address, room;
    };
    std::vector<Candidate> candidates;
    for (const Segment& segment : segments_) {
      if (segment.stream != stream || segment.small != small) {
        continue;
      }
      for (std::size_t i = 0; i < segment.blocks.size(); ++i) {
        const Block& block = segment.blocks[i];
        if (block.state == 'f' && block.size >= size) {
          const bool grows = i + 1 < segment.blocks.size() && segment.blocks[i + 1].state == 'u';
          candidates.push_back(
              {block.size, block.address, block.size + (grows ? segment.blocks[i + 1].size : 0)});
        }
      }
    }
    std::ranges::sort(candidates, [](const Candidate& a, const Candidate& b) {
      return std::pair(a.size, a.address) < std::pair(b.size, b.address);
    });
    if (candidates.empty()) {
      return -1;
    }
    std::size_t best = 0;
    while (options_.expandable_segments && best + 1 < candidates.size() &&
           candidates[best + 1].room < candidates[best].room) {
      ++best;
    }
    const std::int64_t limit = options_.max_split_size;
    if (size < limit && candidates[best].size >= limit) {
      return -1;
    }
    if (size >= limit && candidates[best].size >= size + options_.max_non_split_rounding) {
      return -1;
    }
    return candidates[best].address;
  }

  std::int64_t extend(std::int64_t size, std::int64_t segment_size, std::int64_t stream,
                      bool small) {
    const std::int64_t page = small ? 2 * kMiB : options_.large_segment_size;
    const std::int64_t start = kSpace * made_;
    if (!options_.expandable_segments) {
      segments_.push_back({stream, small, {{start, segment_size, 0, 'f'}}});
      ++made_;
      return start;
    }
    for (Segment& segment : segments_) {
      if (segment.stream != stream || segment.small != small) {
        continue;
      }
      for (std::size_t i = 0; i < segment.blocks.size(); ++i) {
        if (segment.blocks[i].state != 'u') {
          continue;
        }
        const std::size_t first = i > 0 && segment.blocks[i - 1].state == 'f' ? i - 1 : i;
        std::int64_t space = 0;
        for (std::size_t j = first; j < segment.blocks.size() && segment.blocks[j].state != 'a';
             ++j) {
          space += segment.blocks[j].size;
        }
        if (space >= size) {
          return map(segment, first, size, page);
        }
      }
    }
    segments_.push_back({stream, small, {{start, round_up(kSpace / 2, page), 0, 'u'}}});
    ++made_;
    return map(segments_.back(), 0, size, page);
  }

  static std::int64_t map(Segment& segment, std::size_t first, std::int64_t size,
                          std::int64_t page) {
    const std::int64_t address = segment.blocks[first].address;
    std::int64_t left = size;
    for (std::size_t i = first; left > 0; ++i) {
      Block& block = segment.blocks[i];
      if (block.state == 'f') {
        left -= block.size;
        continue;
      }
      const std::int64_t mapped = std::min(block.size, round_up(left, page));
      const Block rest{block.address + mapped, block.size - mapped, 0, 'u'};
      block.size = mapped;
      block.state = 'f';
      left -= mapped;
      segment.blocks.insert(segment.blocks.begin() + static_cast<std::ptrdiff_t>(i) + 1, rest);
      if (left > 0) {
        ++i;  // the rest is empty: all of the block is mapped
      }
    }
    join(segment);
    return address;
  }

  bool release_oversized(std::int64_t size, std::int64_t stream, bool small) {
    const std::int64_t limit = options_.max_split_size;
    if (limit == AllocatorOptions::kUnlimited || options_.expandable_segments) {
      return false;
    }
    const std::int64_t wanted = std::max(size, limit);
    std::vector<std::pair<std::int64_t, std::int64_t>> free;  // size, address
    for (const Segment& segment : segments_) {
      const Block& block = segment.blocks[0];
      if (segment.stream == stream && segment.small == small && block.state == 'f' &&
          block.size >= limit) {
        free.emplace_back(block.size, block.address);
      }
    }
    std::ranges::sort(free);
    const auto remove = [&](std::int64_t address) {
      std::erase_if(segments_, [&](const Segment& s) { return s.blocks[0].address == address; });
    };
    for (const auto& [bytes, address] : free) {
      if (bytes >= wanted) {
        remove(address);
        return true;
      }
    }
    std::int64_t released = 0;
    for (auto it = free.rbegin(); it != free.rend() && released < wanted; ++it) {
      released += it->first;
      remove(it->second);
    }
    return released >= wanted;
  }

  void hold(std::int64_t address, std::int64_t size, std::int64_t bytes) {
    for (Segment& segment : segments_) {
      for (std::size_t i = 0; i < segment.blocks.size(); ++i) {
        Block& block = segment.blocks[i];
        if (block.address != address || block.state != 'f') {
          continue;
        }
        const std::int64_t rest = block.size - size;
        const bool split = segment.small || options_.expandable_segments
                               ? rest >= 512
                               : size < options_.max_split_size && rest > kMiB;
        block.state = 'a';
        block.requested = bytes;
        if (split) {
          block.size = size;
          segment.blocks.insert(segment.blocks.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                                {address + size, rest, 0, 'f'});
        }
        return;
      }
    }
    FAIL() << "nothing is free at " << address;
  }

  static constexpr std::int64_t kSpace = 20 * kMiB << 22;  // from segment to segment

  AllocatorOptions options_;
  std::vector<Segment> segments_;
  std::int64_t made_ = 0;
};

}  // namespace brim
