#include "batching/part_search.h"

#include <algorithm>
#include <numeric>

namespace brim::batching::detail {

bool PartSearch::run(std::size_t parts, std::int64_t& tries) {
  tries_ = &tries;
  parts_.assign(parts, {});
  part_.assign(sizes_.size(), 0);
  floor_ = equal_count_ ? sizes_.size() / parts : sizes_.size();
  larger_ = equal_count_ ? sizes_.size() % parts : 0;
  spare_ = cap_ * static_cast<double>(parts) - std::reduce(sizes_.begin(), sizes_.end());
  return place(0);
}

bool PartSearch::has_room(const Part& part, double size) const {
  const bool counted = part.count < floor_ || (part.count == floor_ && larger_ > 0);
  return counted && (part.total + size <= cap_ || part.count == 0);
}

bool PartSearch::place(std::size_t item) {
  if (item == sizes_.size()) {
    return true;
  }
  *tries_ -= std::ssize(parts_);
  if (*tries_ < 0) {
    return false;
  }
  const double size = sizes_[item];
  std::vector<std::uint32_t> candidates;
  for (std::uint32_t p = 0; p < parts_.size(); ++p) {
    if (has_room(parts_[p], size)) {
      candidates.push_back(p);
    }
  }
  std::ranges::stable_sort(candidates, [&](std::uint32_t a, std::uint32_t b) {
    return parts_[a].total != parts_[b].total ? parts_[a].total > parts_[b].total
                                              : parts_[a].count > parts_[b].count;
  });
  const Part* before = nullptr;
  for (const std::uint32_t candidate : candidates) {
    const Part part = parts_[candidate];
    if (before != nullptr && before->total == part.total && before->count == part.count) {
      continue;  // as good as the one tried before
    }
    before = &parts_[candidate];
    const std::size_t larger = larger_;
    const double spare = spare_;
    const double room = cap_ - part.total - size;
    larger_ -= part.count == floor_ ? 1 : 0;
    spare_ -= room < sizes_.back() ? room : 0.0;  // no item fits there any more
    parts_[candidate] = {part.total + size, part.count + 1};
    part_[item] = candidate;
    if (spare_ >= 0 && place(item + 1)) {
      return true;
    }
    parts_[candidate] = part;
    larger_ = larger;
    spare_ = spare;
    if (!equal_count_ && room == 0) {
      return false;  // nothing else could fill that part better
    }
  }
  return false;
}

}  // namespace brim::batching::detail
