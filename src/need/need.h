#pragma once

#include <brim/export.h>
#include <brim/need/attempt.h>
#include <brim/need/trace.h>
#include <brim/predict/allocator_model.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "need/request_growth.h"

namespace brim {

/// What the next call needs at any size, in bytes above what is held when it begins. Pure logic.
///
/// It replays the newest trace, each request as large as it will be at that size. How a request
/// grows is known where another trace has it too, at another size: two sizes are enough. What only
/// one size shows takes the growth of requests of the same bytes (a gradient has those of its
/// activation or of its parameter). The rest is not known: there the bounds part.
///
/// The peak of a fit that was not recorded is a trace of one request.
///
/// What was traced on fake tensors shows how requests of a run grow that have as many bytes. Where
/// no run was recorded it is the trace that is replayed: what is not known of it grows in
/// proportion, and a run that needed more raises all of it.
class BRIM_API Need {
 public:
  /// Whether the block at an address that a call left is in use now. Empty: none is.
  using InUse = std::function<bool(std::int64_t)>;

  /// Of the newest fit, with what all other attempts show; where none was recorded, of the newest
  /// one that was traced on fake tensors. Empty if it is not known what the work needs. Attempts
  /// are in the order of time.
  /// @param available to the next call. How much less that is than the newest fit had shows what is
  ///     still there of what it left, where that was not recorded.
  [[nodiscard]] static std::optional<Need> of_fits(std::span<const Attempt> attempts,
                                                   const InUse& in_use,
                                                   std::optional<std::int64_t> available = {});

  /// Of the part of the work that a failed attempt came through, as far as `lower` tells. Empty if
  /// its bytes are not known.
  [[nodiscard]] static std::optional<Need> of_failure(const Attempt& failure,
                                                      std::span<const Attempt> attempts,
                                                      const InUse& in_use);

  /// Of the newest trace.
  [[nodiscard]] double size() const { return size_; }
  /// The share of its bytes whose growth is known.
  [[nodiscard]] double known() const { return known_; }
  [[nodiscard]] bool is_mostly_known() const;
  /// Whether requests were recorded, and not only a peak.
  [[nodiscard]] bool recorded() const { return recorded_; }
  /// Whether nothing was: the trace is of fake tensors.
  [[nodiscard]] bool foreseen() const { return trace_->foreseen; }

  static constexpr double kSquare = 2;
  static constexpr double kInProportion = 1;

  /// At most so much, if what is not known grows no faster than with this power of the size.
  [[nodiscard]] double upper(double size, double power = kSquare) const;
  /// At least so much, if what is not known grows no faster than with the cube of the size, and if
  /// the next call begins with freeing what the newest one and failed attempts since have left,
  /// where no trace shows when it does.
  [[nodiscard]] double lower(double size) const;

  /// Whether calls at `size` fit one after the other on an allocator as it is now, whose blocks do
  /// not always pack. If it is another size than the last, they begin with an empty cache.
  /// @param once whether what was traced on fake tensors has to fit as it was traced only.
  [[nodiscard]] bool fits(double size, const AllocatorModel& now, double power = kSquare,
                          bool once = false) const;

 private:
  class Device;

  Need(const Attempt& newest, std::span<const Attempt> attempts, const InUse& in_use,
       std::optional<std::int64_t> available);
  struct Growth {
    detail::RequestGrowth up;    // at larger sizes
    detail::RequestGrowth down;  // at smaller ones
  };
  using GrowthByBytes = std::map<std::int64_t, Growth>;
  using Left = std::function<double(const Trace::Request&)>;

  [[nodiscard]] GrowthByBytes match(const Attempt& newest, std::span<const Attempt> attempts);
  static void add_faster(GrowthByBytes& all, std::int64_t bytes, const Growth& growth, double size);
  [[nodiscard]] GrowthByBytes growth_at(double size) const;
  void grow_like(const GrowthByBytes& all, double tolerance);
  [[nodiscard]] double share_known() const;
  void learn_from_failures(std::span<const Attempt> attempts, const Left& left);
  void find_what_is_there(const Left& left);
  void learn_from_runs(std::span<const Attempt> attempts);
  struct Held {
    double most;
    double left;  // at the end, more than at the beginning
  };
  [[nodiscard]] Held held(double size, double power, bool frees_first = false) const;
  [[nodiscard]] double already_there(const Held& held, std::optional<std::int64_t> available) const;
  [[nodiscard]] double power_above(double size, double power) const;
  void free_as(const Need& traced);
  [[nodiscard]] std::int64_t bytes_at(std::size_t request, double size, double power) const;

  std::shared_ptr<const Trace> trace_;
  double size_;
  double known_ = 0;
  bool recorded_;
  std::vector<std::optional<Growth>> growth_;  // by request; empty: not known
  /// By request of what was held before: bytes that the next call will free there.
  /// By one of the call itself: bytes that it left and the next call replaces, as far as is known.
  std::vector<double> there_;
  double leftover_ = 0;  // bytes that failed attempts since have left
  double missing_ = 0;   // bytes that failed attempts had made, and the newest trace freed
  std::vector<bool> freed_first_;  // by request: the next call frees what is there when it begins
  /// By how much sizes needed more than was expected of them, and failed, for each item more.
  double short_per_item_ = 0;
  // Of what was traced on fake tensors:
  std::optional<std::int64_t> available_then_;
  std::optional<std::int64_t> available_;  // now
  double scale_ = 1;                       // by which runs needed more
};

}  // namespace brim
