#include "predict/matched_requests.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace brim::detail {
namespace {

// A workspace is freed after at most so many other events: the result that is made beside it.
constexpr std::size_t kWorkspaceEvents = 3;
// So many workspaces in a row may be missing.
constexpr std::size_t kMostMissing = 4;

/// The requests that a call made itself, in order.
class Requests {
 public:
  explicit Requests(const AllocationRecord& record)
      : requests_(std::span(record.requests).subspan(record.older)), is_brief_(requests_.size()) {
    std::vector<std::size_t> made(record.requests.size());
    for (std::size_t e = 0; e < record.events.size(); ++e) {
      const std::int32_t event = record.events[e];
      const auto request = static_cast<std::size_t>(event < 0 ? ~event : event);
      if (event >= 0) {
        made[request] = e;
      } else if (request >= record.older) {
        is_brief_[request - record.older] = e - made[request] <= kWorkspaceEvents;
      }
    }
  }

  [[nodiscard]] bool has(std::size_t i) const { return i < requests_.size(); }
  [[nodiscard]] bool is_freed(std::size_t i) const { return has(i) && requests_[i].freed; }
  [[nodiscard]] bool is_brief(std::size_t i) const { return has(i) && is_brief_[i]; }
  [[nodiscard]] bool is_kept(std::size_t i) const { return has(i) && !requests_[i].freed; }
  [[nodiscard]] std::int64_t bytes(std::size_t i) const { return requests_[i].bytes; }

 private:
  std::span<const AllocationRecord::Request> requests_;
  std::vector<bool> is_brief_;
};

/// Whether two requests look like the same one: as large, or larger as the size or its square is.
bool alike_requests(const Requests& mine, std::size_t i, const Requests& theirs, std::size_t j,
                    double growth) {
  constexpr double kRounded = 0.001;
  if (!mine.has(i) || !theirs.has(j) || mine.is_freed(i) != theirs.is_freed(j)) {
    return false;
  }
  const auto here = static_cast<double>(mine.bytes(i));
  const auto there = static_cast<double>(theirs.bytes(j));
  const auto is_grown = [&](double times) {
    return std::abs(there - times * here) <= kRounded * there;
  };
  return there == here || is_grown(growth) || is_grown(growth * growth);
}

/// Whether they may be the same one: it grew, by no more than the cube of the size. Workspaces do
/// as they like.
bool may_be_same(const Requests& mine, std::size_t i, const Requests& theirs, std::size_t j,
                 double growth) {
  constexpr double kSlack = 1.1;  // small ones are padded
  if (!mine.has(i) || !theirs.has(j)) {
    return false;
  }
  const double times = static_cast<double>(theirs.bytes(j)) / static_cast<double>(mine.bytes(i));
  const double most = std::pow(growth, 3);
  return (mine.is_brief(i) && theirs.is_brief(j)) ||
         (times * kSlack >= std::min(most, 1.0) && times <= kSlack * std::max(most, 1.0));
}

}  // namespace

std::optional<MatchedRequests> matched_requests(const AllocationRecord& record, double size,
                                                const AllocationRecord& other, double other_size) {
  const Requests mine(record);
  const Requests theirs(other);
  const double growth = other_size / size;
  MatchedRequests result;
  for (std::size_t i = 0; i < record.older; ++i) {
    result.bytes.push_back(record.requests[i].bytes);
  }
  std::size_t i = 0;
  std::size_t j = 0;
  const auto pair = [&] {
    result.bytes.push_back(theirs.bytes(j++));
    ++i;
  };
  const auto only_mine = [&] { result.bytes.push_back(mine.bytes(i++)); };
  const auto only_theirs = [&] {
    if (theirs.is_freed(j)) {
      result.only_in_other.push_back(
          {record.older + std::max<std::size_t>(i, 1) - 1, theirs.bytes(j)});
    }
    ++j;
  };
  const auto alike = [&](std::size_t skipped, std::size_t skipped_theirs) {
    return alike_requests(mine, i + skipped, theirs, j + skipped_theirs, growth);
  };
  while (mine.has(i) || theirs.has(j)) {
    if (alike(0, 0)) {
      pair();
      continue;
    }
    // Whether one of them has workspaces before requests that are alike again.
    bool theirs_has_more = false;
    bool mine_has_more = false;
    for (std::size_t k = 1; k <= kMostMissing && theirs.is_brief(j + k - 1); ++k) {
      theirs_has_more |= alike(0, k);
    }
    for (std::size_t k = 1; k <= kMostMissing && mine.is_brief(i + k - 1); ++k) {
      mine_has_more |= alike(k, 0);
    }
    if (theirs_has_more || (theirs.is_kept(j) && !mine.is_kept(i))) {
      only_theirs();
    } else if (mine_has_more || (mine.is_kept(i) && !theirs.is_kept(j))) {
      only_mine();
    } else if (may_be_same(mine, i, theirs, j, growth)) {
      pair();  // it grows in a way of its own
    } else {
      return std::nullopt;
    }
  }
  return result;
}

}  // namespace brim::detail
