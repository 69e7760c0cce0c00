#include <brim/explain/shortage.h>
#include <brim/memory/bytes.h>
#include <brim/text_table.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <utility>

namespace brim {
namespace {

/// What a CUDA context and the libraries' code take on a device beside tensors: between 0.3 and
/// 0.6 GiB (H200, torch 2.11). Not another process's.
constexpr std::int64_t kContext = std::int64_t{1} << 30;

/// Whether blocks were made one after the other up to now, rather than in one go.
///
/// @param made their times, sorted.
/// @param clock now.
bool is_growing(std::span<const std::int64_t> made, std::int64_t clock) {
  constexpr std::size_t kFewest = 4;  // fewer say nothing about a habit
  if (made.size() < kFewest || made.front() < 0) {
    return false;
  }
  const std::int64_t span = made.back() - made.front();
  const auto gaps = static_cast<std::int64_t>(made.size() - 1);
  std::int64_t longest = 0;
  for (std::size_t i = 1; i < made.size(); ++i) {
    longest = std::max(longest, made[i] - made[i - 1]);
  }
  // The newest is no older than two usual gaps, and no pause was as long as half of the time.
  const bool goes_on = clock - made.back() <= 2 * (span / gaps) + longest;
  return span > 0 && goes_on && longest <= span / 2 + span / gaps;
}

std::string in_bytes(std::int64_t bytes) { return format_bytes(bytes); }

}  // namespace

const char* to_string(ShortageCause cause) {
  constexpr std::array kNames{"size limit",    "library workspace", "other processes",
                              "fragmentation", "memory that grows", "real need"};
  return kNames.at(static_cast<std::size_t>(cause));
}

std::vector<Holder> holders_of(std::span<const HeldBlock> blocks, std::int64_t clock) {
  struct Group {
    Holder holder;
    std::vector<std::int64_t> made;
  };
  std::map<std::pair<MemoryKind, std::string>, Group> groups;
  for (const HeldBlock& block : blocks) {
    Group& group = groups[{block.kind, block.where}];
    group.holder.kind = block.kind;
    group.holder.where = block.where;
    group.holder.bytes += block.bytes;
    ++group.holder.count;
    if (!block.has_reason) {
      group.made.push_back(block.made_at);
    }
  }
  std::vector<Holder> found;
  found.reserve(groups.size());
  for (auto& [key, group] : groups) {
    std::sort(group.made.begin(), group.made.end());
    group.holder.grows = is_growing(group.made, clock);
    found.push_back(std::move(group.holder));
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Holder& a, const Holder& b) { return a.bytes > b.bytes; });
  return found;
}

std::int64_t left_by_calls(std::span<const std::int64_t> held) {
  if (held.size() < 4) {
    return 0;
  }
  held = held.subspan(1);
  std::size_t more = 0;
  for (std::size_t i = 1; i < held.size(); ++i) {
    more += held[i] > held[i - 1] ? 1 : 0;
  }
  return 2 * more > held.size() - 1 ? std::max<std::int64_t>(held.back() - held.front(), 0) : 0;
}

Shortage diagnose(const ShortageFacts& facts) {
  const OomCause& error = facts.error;
  const MemoryStats& stats = facts.stats;
  Shortage found;
  found.requested = error.requested.value_or(0);
  found.in_use = error.in_use.value_or(stats.allocated);
  found.limit = stats.limit;
  const std::int64_t needed = found.in_use + found.requested;
  const bool is_on_host = error.kind == OomKind::host_memory;

  // What neither tensors nor the request account for. On the CPU the process itself takes more than
  // its tensors.
  const std::int64_t own = std::max(stats.allocated, facts.resident);
  found.others = std::max<std::int64_t>(stats.limit - stats.free - own, 0);
  const std::int64_t strangers =
      is_on_host ? found.others : std::max<std::int64_t>(found.others - kContext, 0);
  const std::int64_t room = stats.limit - found.others;
  found.missing = std::max<std::int64_t>(needed - room, 0);
  for (const Holder& holder : facts.held) {
    found.grown += holder.grows ? holder.bytes : 0;
  }
  found.grown = std::max(found.grown, facts.grown);
  // Torch prints GiB with two digits, and takes memory in steps of 2 MiB.
  constexpr std::int64_t kDoubt = std::int64_t{8} << 20;
  if (found.requested > 0 && !is_on_host && needed <= room - kDoubt) {
    found.scattered = room - found.in_use;
  }

  const auto because = [&](ShortageCause cause, std::string reason) {
    found.cause = cause;
    found.reason = std::move(reason);
    return found;
  };
  if (error.kind == OomKind::size_limit) {
    return because(ShortageCause::size_limit,
                   "A kernel counts elements with 32 bits, and the tensor has more. More memory "
                   "would not help; a smaller size does.");
  }
  if (error.kind == OomKind::library_workspace) {
    return because(ShortageCause::workspace,
                   "A library (cuBLAS, cuDNN and the like) found no room for its own scratch "
                   "memory: " +
                       in_bytes(std::max<std::int64_t>(stats.free, 0)) + " were free.");
  }
  // Each of these would have made the request fit; the one that holds more comes first.
  const bool would_fit_alone = strangers > 0 && found.missing > 0 && needed <= room + strangers;
  const bool would_fit_without_growth =
      found.grown > 0 && (found.missing == 0 || found.grown >= found.missing);
  if (would_fit_alone && !(would_fit_without_growth && found.grown > strangers)) {
    return because(ShortageCause::other_processes,
                   "Other processes hold " + in_bytes(found.others) + " of the " +
                       in_bytes(stats.limit) + ". Without them the request would have fitted.");
  }
  if (found.scattered > 0) {
    return because(ShortageCause::fragmentation,
                   in_bytes(found.scattered) +
                       " were free, more than the request, but in pieces between tensors that are "
                       "in use.");
  }
  if (would_fit_without_growth) {
    return because(ShortageCause::growth,
                   "Memory grows from call to call: " + in_bytes(found.grown) +
                       " were made by earlier calls and are still held. Without them the request "
                       "would have fitted.");
  }
  if (found.requested > room) {
    return because(ShortageCause::need, "One tensor needs " + in_bytes(found.requested) +
                                            ", and the limit is " + in_bytes(room) + ".");
  }
  return because(ShortageCause::need, "The work needs at least " + in_bytes(needed) +
                                          " at once, and the limit is " + in_bytes(room) + ".");
}

std::string to_string(const Shortage& shortage) {
  std::string text = std::string("cause: ") + to_string(shortage.cause) + "\n" + shortage.reason;
  if (shortage.requested > 0) {
    text += "\nasked for " + in_bytes(shortage.requested) + " with " + in_bytes(shortage.in_use) +
            " in use, of " + in_bytes(shortage.limit);
  }
  return text;
}

std::string to_string(std::span<const Holder> holders, std::size_t most) {
  std::vector<std::vector<std::string>> rows;
  Holder rest;
  for (std::size_t i = 0; i < holders.size(); ++i) {
    const Holder& each = holders[i];
    if (i < most) {
      rows.push_back({each.where.empty() ? "(place not known)" : each.where,
                      std::string(to_string(each.kind)) + (each.grows ? ", grows" : ""),
                      std::to_string(each.count), in_bytes(each.bytes)});
    } else {
      rest.count += each.count;
      rest.bytes += each.bytes;
    }
  }
  if (rest.count > 0) {
    rows.push_back({"others", "", std::to_string(rest.count), in_bytes(rest.bytes)});
  }
  return text_table({"held by", "kind", "blocks", "bytes"}, rows, 2);
}

}  // namespace brim
