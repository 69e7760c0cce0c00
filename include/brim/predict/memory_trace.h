#pragma once

#include <brim/export.h>
#include <brim/predict/allocator_model.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace brim {

/// What memory is held for.
enum class MemoryKind : std::uint8_t {
  parameter,        ///< of a module, and its buffers
  gradient,         ///< of a parameter
  optimizer_state,  ///< such as Adam's moments
  activation,       ///< kept for backward
  temporary,        ///< within a forward or backward
  input,            ///< the work's arguments
  workspace,        ///< of a library, such as cuBLAS
  other,
};
/// The number of kinds above.
inline constexpr std::size_t kMemoryKinds = 8;

/// "parameter", "optimizer state", …
BRIM_API const char* to_string(MemoryKind kind);

/// A recorded sequence of allocations and frees, to be replayed through an AllocatorModel.
///
///     brim::MemoryTrace trace;
///     auto weight = trace.allocate(4096, brim::MemoryKind::parameter, trace.place("fc.weight"));
///     auto start = trace.size();
///     …
///     brim::TraceReport report = brim::replay(trace, {}, start);
///
/// Allocations are numbered from 0. What a tensor was is often known only afterwards: set_kind()
/// counts for the whole time that it was held. A value type without torch in it.
class BRIM_API MemoryTrace {
 public:
  struct Allocation {
    std::int64_t bytes = 0;
    std::int64_t stream = 0;
    std::int32_t place = 0;
    MemoryKind kind = MemoryKind::other;
    bool freed = false;
  };

  enum class Action : std::uint8_t { allocate, free, empty_cache };

  struct Event {
    Action action;
    std::int64_t allocation;  ///< of empty_cache -1
  };

  /// A number for a place in the code, such as "model.py:12" or "encoder.layer.3"; the same for the
  /// same text. 0 is "", an unknown place.
  std::int32_t place(std::string_view text);

  /// @throws std::invalid_argument if size is negative or more than 2^50, or place was not given
  ///     out by place().
  std::int64_t allocate(std::int64_t size, MemoryKind kind = MemoryKind::other,
                        std::int32_t place = 0, std::int64_t stream = 0);

  /// @throws std::invalid_argument if there is no such allocation, or it is freed already.
  void free(std::int64_t allocation);

  /// The work emptied torch's cache.
  void empty_cache();

  /// The work is called again, and finds what it left.
  void begin_call() { last_call_ = size(); }

  /// All allocations of a kind have this many times their bytes, as if they were kept otherwise.
  /// @throws std::invalid_argument if factor is negative or not finite.
  void scale(MemoryKind kind, double factor);

  /// Also of an allocation that is freed. @throws std::invalid_argument if there is no such one.
  void set_kind(std::int64_t allocation, MemoryKind kind);

  /// The same. @throws std::invalid_argument if there is no such allocation.
  void set_place(std::int64_t allocation, std::int32_t place);

  /// @throws std::invalid_argument if there is no such one.
  [[nodiscard]] const Allocation& allocation(std::int64_t number) const;
  [[nodiscard]] const std::string& place_text(std::int32_t place) const;

  /// The number of events so far; as an argument of replay(), the start of what comes next.
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(events_.size()); }
  [[nodiscard]] const std::vector<Event>& events() const { return events_; }
  /// The event at which the last call begins; 0 if begin_call() was not called.
  [[nodiscard]] std::int64_t last_call() const { return last_call_; }
  [[nodiscard]] const std::vector<Allocation>& allocations() const { return allocations_; }

 private:
  [[nodiscard]] std::size_t checked(std::int64_t allocation) const;
  void check_place(std::int32_t place) const;

  std::vector<Event> events_;
  std::int64_t last_call_ = 0;
  std::vector<Allocation> allocations_;
  std::vector<std::string> places_{""};
  std::unordered_map<std::string, std::int32_t> numbers_{{"", 0}};  // of places_
};

/// An allocation that was held at the peak, or failed.
struct TracedAllocation {
  std::int64_t id = 0;
  std::int64_t bytes = 0;  ///< of its block; of one that failed the request
  MemoryKind kind = MemoryKind::other;
  std::string place;
};

/// What became of a trace in an allocator, in bytes unless a comment says otherwise.
///
/// `work` is what comes after the start event. Where it does not fit the capacity, the rest is
/// replayed as if the capacity had no limit, so that all figures are those of the whole work.
struct BRIM_API TraceReport {
  std::int64_t held_before = 0;  ///< allocated at the start of the work
  std::int64_t peak = 0;         ///< the most allocated above that: what PeakMeter shows
  std::int64_t left = 0;         ///< still allocated above that at the end; negative if less
  std::int64_t reserved = 0;     ///< the most taken from the device during the work, in all
  AllocatorUse at_peak;          ///< at the first moment at which allocated was at its peak
  std::int64_t peak_event = 0;   ///< number of events up to that moment; the start if none later

  /// Held at that moment by kind, in the order of MemoryKind; what was held before included, so
  /// that the total is held_before + peak.
  std::array<std::int64_t, kMemoryKinds> held{};
  std::vector<TracedAllocation> largest;  ///< held at that moment, largest first

  std::int64_t retries = 0;  ///< the number of times that the cache had to be released
  std::optional<std::int64_t> failed_event;  ///< the first one that did not fit the capacity
  std::optional<TracedAllocation> failed;    ///< what it asked for

  [[nodiscard]] bool fits() const { return !failed_event.has_value(); }
  /// Share of the reserved bytes at the peak that hold no allocation, from 0 to 1.
  [[nodiscard]] double fragmentation() const;
};

/// What is held at one moment of a trace, in bytes.
struct HeldMoment {
  std::int64_t event = 0;                         ///< the number of events up to the moment
  std::array<std::int64_t, kMemoryKinds> held{};  ///< by kind, in the order of MemoryKind
  std::int64_t reserved = 0;                      ///< taken from the device
  std::int64_t allocation = -1;  ///< the trace's number of the last one up to here; -1 for none
};

/// What is held from `start` to the end of a trace. If there are more events than `points`, each
/// group of neighbouring events is represented by the moment at which it holds the most.
/// @throws std::invalid_argument as replay, and if points is not positive.
BRIM_API std::vector<HeldMoment> timeline(const MemoryTrace& trace, const AllocatorOptions& options,
                                          std::int64_t start = 0, std::int64_t points = 1000);

/// Replays a trace in an allocator. Takes about a third of a microsecond per event.
/// @param start the event at which the work starts: size() of the trace at that time.
/// @param largest the number of allocations to name.
/// @throws std::invalid_argument if start is not within the trace, largest is negative, or the
///     options are wrong (see AllocatorModel).
BRIM_API TraceReport replay(const MemoryTrace& trace, const AllocatorOptions& options,
                            std::int64_t start = 0, std::int64_t largest = 10);

}  // namespace brim
