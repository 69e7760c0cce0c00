#include "predict/matched_requests.h"

#include <algorithm>
#include <cmath>

namespace brim::detail {
namespace {

// So many workspaces in a row may be missing.
constexpr std::size_t kMostMissing = 4;

/// The requests that a call made itself, in order, without scalars: optimizers make some in one
/// step and not in another.
class Requests {
 public:
  explicit Requests(const AllocationRecord& record)
      : record_(record), brief_(brief_requests(record)) {
    constexpr std::int64_t kScalar = 8;
    for (std::size_t i = record.older; i < record.requests.size(); ++i) {
      if (record.requests[i].bytes > kScalar) {
        numbers_.push_back(i);
      }
    }
  }

  [[nodiscard]] bool has(std::size_t i) const { return i < numbers_.size(); }
  [[nodiscard]] bool is_freed(std::size_t i) const { return has(i) && request(i).freed; }
  [[nodiscard]] bool is_brief(std::size_t i) const { return has(i) && brief_[numbers_[i]]; }
  [[nodiscard]] bool is_kept(std::size_t i) const { return has(i) && !request(i).freed; }
  /// COUNT of kept ones in a row.
  [[nodiscard]] std::size_t kept_from(std::size_t i) const {
    std::size_t count = 0;
    while (is_kept(i + count)) {
      ++count;
    }
    return count;
  }
  [[nodiscard]] std::int64_t bytes(std::size_t i) const { return request(i).bytes; }
  /// Its place in the record.
  [[nodiscard]] std::size_t number(std::size_t i) const { return numbers_[i]; }

 private:
  [[nodiscard]] const AllocationRecord::Request& request(std::size_t i) const {
    return record_.requests[numbers_[i]];
  }

  const AllocationRecord& record_;
  std::vector<bool> brief_;
  std::vector<std::size_t> numbers_;
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

std::vector<bool> brief_requests(const AllocationRecord& record) {
  std::vector<bool> brief(record.requests.size());
  for (std::size_t e = 0; e + 1 < record.events.size(); ++e) {
    const std::int32_t event = record.events[e];
    if (event >= 0 && record.events[e + 1] == ~event) {
      brief[static_cast<std::size_t>(event)] = true;
    }
  }
  return brief;
}

std::optional<MatchedRequests> matched_requests(const AllocationRecord& record, double size,
                                                const AllocationRecord& other, double other_size) {
  const Requests mine(record);
  const Requests theirs(other);
  const double growth = other_size / size;
  MatchedRequests result;
  for (const auto& request : record.requests) {
    result.bytes.push_back(request.bytes);
  }
  result.workspaces.resize(record.requests.size());
  std::size_t i = 0;
  std::size_t j = 0;
  const auto pair = [&] { result.bytes[mine.number(i++)] = theirs.bytes(j++); };
  const auto only_theirs = [&] {
    if (theirs.is_freed(j) && mine.has(0)) {
      std::int64_t& most = result.workspaces[mine.number(std::max<std::size_t>(i, 1) - 1)];
      most = std::max(most, theirs.bytes(j));
    }
    ++j;
  };
  const auto alike = [&](std::size_t skipped, std::size_t skipped_theirs) {
    return alike_requests(mine, i + skipped, theirs, j + skipped_theirs, growth);
  };
  // Gradients stay after a first step, and are added to others and freed in later ones. Whereas
  // what is made for good stands before a temporary that is alike.
  const auto is_gradient = [&] {
    return mine.has(i) && theirs.has(j) && mine.bytes(i) == theirs.bytes(j) &&
           mine.is_kept(i) != theirs.is_kept(j) && !alike(mine.kept_from(i), theirs.kept_from(j));
  };
  while (mine.has(i) || theirs.has(j)) {
    if (alike(0, 0) || is_gradient()) {
      pair();
      continue;
    }
    // Whether one of them has workspaces before requests that are alike again, or at the end.
    bool theirs_has_more = theirs.is_brief(j) && !mine.has(i);
    bool mine_has_more = mine.is_brief(i) && !theirs.has(j);
    for (std::size_t k = 1; k <= kMostMissing && theirs.is_brief(j + k - 1); ++k) {
      theirs_has_more |= alike(0, k);
    }
    for (std::size_t k = 1; k <= kMostMissing && mine.is_brief(i + k - 1); ++k) {
      mine_has_more |= alike(k, 0);
    }
    if (theirs_has_more || (theirs.is_kept(j) && !mine.is_kept(i))) {
      only_theirs();
    } else if (mine_has_more || (mine.is_kept(i) && !theirs.is_kept(j))) {
      ++i;
    } else if (may_be_same(mine, i, theirs, j, growth)) {
      pair();  // it grows in a way of its own
    } else {
      return std::nullopt;
    }
  }
  return result;
}

}  // namespace brim::detail
