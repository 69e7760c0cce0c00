#include <brim/predict/memory_trace.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "check_argument.h"

namespace brim {
namespace {

/// Replays events, and remembers when the most was allocated.
class Replay {
 public:
  Replay(const MemoryTrace& trace, const AllocatorOptions& options)
      : trace_(trace), model_(options), ids_(trace.allocations().size()) {}

  void run(std::int64_t start) {
    for (event_ = 0; event_ < trace_.size(); ++event_) {
      if (event_ == start) {
        begin();
      }
      apply(trace_.events()[static_cast<std::size_t>(event_)]);
      if (event_ >= start && model_.now().allocated > report_.at_peak.allocated) {
        report_.at_peak = model_.now();
        report_.peak_event = event_ + 1;
      }
    }
    if (event_ == start) {
      begin();
    }
    report_.peak = report_.at_peak.allocated - report_.held_before;
    report_.left = model_.now().allocated - report_.held_before;
    report_.reserved = model_.peak().reserved;
    report_.retries = model_.retries() - retries_before_;
  }

  /// Who holds what at the peak.
  void name_holders(std::int64_t largest) {
    std::vector<bool> is_held(ids_.size());
    for (std::int64_t i = 0; i < report_.peak_event; ++i) {
      const auto& event = trace_.events()[static_cast<std::size_t>(i)];
      if (event.action != MemoryTrace::Action::empty_cache) {
        is_held[static_cast<std::size_t>(event.allocation)] =
            event.action == MemoryTrace::Action::allocate;
      }
    }
    std::vector<std::size_t> holders;
    for (std::size_t i = 0; i < is_held.size(); ++i) {
      if (is_held[i]) {
        holders.push_back(i);
        report_.held[static_cast<std::size_t>(trace_.allocations()[i].kind)] += ids_[i].bytes;
      }
    }
    const auto named = std::min(static_cast<std::size_t>(largest), holders.size());
    const auto end = holders.begin() + static_cast<std::ptrdiff_t>(named);
    std::ranges::partial_sort(holders, end, [&](std::size_t a, std::size_t b) {
      return ids_[a].bytes != ids_[b].bytes ? ids_[a].bytes > ids_[b].bytes : a < b;
    });
    for (auto it = holders.begin(); it != end; ++it) {
      report_.largest.push_back(described(*it, ids_[*it].bytes));
    }
  }

  /// The moments from `start` on, at most `points` of them.
  std::vector<HeldMoment> moments(std::int64_t start, std::int64_t points) {
    const std::int64_t group = (trace_.size() - start) / points + 1;
    std::vector<HeldMoment> moments;
    std::int64_t most = -1;  // held in all, in the present group
    for (event_ = 0; event_ <= trace_.size(); ++event_) {
      if (event_ >= start) {
        if ((event_ - start) % group == 0) {
          moments.emplace_back();
          most = -1;
        }
        if (model_.now().allocated > most) {
          most = model_.now().allocated;
          moments.back() = {event_, by_kind_, model_.now().reserved, latest_};
        }
      }
      if (event_ < trace_.size()) {
        apply(trace_.events()[static_cast<std::size_t>(event_)]);
      }
    }
    return moments;
  }

  TraceReport report() && { return std::move(report_); }

 private:
  struct Granted {
    std::int64_t id = 0;     // in the model
    std::int64_t bytes = 0;  // of the block
  };

  void begin() {
    model_.reset_peak();
    report_.held_before = model_.now().allocated;
    report_.at_peak = model_.now();
    report_.peak_event = event_;
    retries_before_ = model_.retries();
  }

  void apply(const MemoryTrace::Event& event) {
    if (event.action == MemoryTrace::Action::empty_cache) {
      model_.empty_cache();
      return;
    }
    const auto which = static_cast<std::size_t>(event.allocation);
    if (event.action == MemoryTrace::Action::free) {
      model_.free(ids_[which].id);
      held_by(which) -= ids_[which].bytes;
      return;
    }
    const MemoryTrace::Allocation& allocation = trace_.allocations()[which];
    auto id = model_.allocate(allocation.bytes, allocation.stream);
    if (!id) {
      report_.failed_event = event_;
      report_.failed = described(which, allocation.bytes);
      model_.set_capacity(AllocatorOptions::kUnlimited);
      id = model_.allocate(allocation.bytes, allocation.stream);
    }
    detail::check_argument(id.has_value(), "the trace asks for more than 2^63 bytes");
    ids_[which] = {*id, model_.block(*id).size};
    held_by(which) += ids_[which].bytes;
    latest_ = event.allocation;
  }

  /// Bytes held now by allocations of the same kind as this one.
  std::int64_t& held_by(std::size_t which) {
    return by_kind_.at(static_cast<std::size_t>(trace_.allocations()[which].kind));
  }

  [[nodiscard]] TracedAllocation described(std::size_t which, std::int64_t bytes) const {
    const MemoryTrace::Allocation& it = trace_.allocations()[which];
    return {static_cast<std::int64_t>(which), bytes, it.kind, trace_.place_text(it.place)};
  }

  const MemoryTrace& trace_;
  AllocatorModel model_;
  std::vector<Granted> ids_;  // by the trace's
  std::array<std::int64_t, kMemoryKinds> by_kind_{};
  std::int64_t latest_ = -1;
  TraceReport report_;
  std::int64_t event_ = 0;
  std::int64_t retries_before_ = 0;
};

void check_start(const MemoryTrace& trace, std::int64_t start) {
  detail::check_argument(start >= 0 && start <= trace.size(), "start must be from 0 to ",
                         trace.size(), ", the number of events, got ", start);
}

}  // namespace

const char* to_string(MemoryKind kind) {
  constexpr std::array<const char*, kMemoryKinds> kNames{
      "parameter", "gradient", "optimizer state", "activation",
      "temporary", "input",    "workspace",       "other"};
  return kNames.at(static_cast<std::size_t>(kind));
}

std::int32_t MemoryTrace::place(std::string_view text) {
  const auto [entry, is_new] =
      numbers_.try_emplace(std::string(text), static_cast<std::int32_t>(places_.size()));
  if (is_new) {
    places_.emplace_back(text);
  }
  return entry->second;
}

std::int64_t MemoryTrace::allocate(std::int64_t size, MemoryKind kind, std::int32_t place,
                                   std::int64_t stream) {
  detail::check_argument(size >= 0 && size <= AllocatorModel::kLargestRequest,
                         "size must be from 0 to 2^50, got ", size);
  check_place(place);
  const auto id = static_cast<std::int64_t>(allocations_.size());
  allocations_.push_back({size, stream, place, kind, false});
  events_.push_back({Action::allocate, id});
  return id;
}

void MemoryTrace::free(std::int64_t allocation) {
  bool& freed = allocations_[checked(allocation)].freed;
  detail::check_argument(!freed, "allocation must be held, but ", allocation, " is freed already");
  freed = true;
  events_.push_back({Action::free, allocation});
}

void MemoryTrace::empty_cache() { events_.push_back({Action::empty_cache, -1}); }

void MemoryTrace::scale(MemoryKind kind, double factor) {
  if (!(factor >= 0) || !std::isfinite(factor)) {
    throw std::invalid_argument("factor must be a finite number of at least 0, got " +
                                std::to_string(factor));
  }
  for (Allocation& each : allocations_) {
    if (each.kind == kind) {
      each.bytes = std::llround(static_cast<double>(each.bytes) * factor);
    }
  }
}

void MemoryTrace::set_kind(std::int64_t allocation, MemoryKind kind) {
  allocations_[checked(allocation)].kind = kind;
}

void MemoryTrace::set_place(std::int64_t allocation, std::int32_t place) {
  check_place(place);
  allocations_[checked(allocation)].place = place;
}

const MemoryTrace::Allocation& MemoryTrace::allocation(std::int64_t number) const {
  return allocations_[checked(number)];
}

const std::string& MemoryTrace::place_text(std::int32_t place) const {
  check_place(place);
  return places_[static_cast<std::size_t>(place)];
}

std::size_t MemoryTrace::checked(std::int64_t allocation) const {
  detail::check_argument(allocation >= 0 && std::cmp_less(allocation, allocations_.size()),
                         "allocation must be a number below ", allocations_.size(), ", got ",
                         allocation);
  return static_cast<std::size_t>(allocation);
}

void MemoryTrace::check_place(std::int32_t place) const {
  detail::check_argument(place >= 0 && std::cmp_less(place, places_.size()),
                         "place must be a number that place() gave out, got ", place);
}

double TraceReport::fragmentation() const {
  return at_peak.reserved == 0
             ? 0
             : 1 - static_cast<double>(at_peak.allocated) / static_cast<double>(at_peak.reserved);
}

std::vector<HeldMoment> timeline(const MemoryTrace& trace, const AllocatorOptions& options,
                                 std::int64_t start, std::int64_t points) {
  check_start(trace, start);
  detail::check_argument(points > 0, "points must be positive, got ", points);
  return Replay(trace, options).moments(start, points);
}

TraceReport replay(const MemoryTrace& trace, const AllocatorOptions& options, std::int64_t start,
                   std::int64_t largest) {
  check_start(trace, start);
  detail::check_argument(largest >= 0, "largest must not be negative, got ", largest);
  Replay replay(trace, options);
  replay.run(start);
  replay.name_holders(largest);
  return std::move(replay).report();
}

}  // namespace brim
