#pragma once

#include <brim/adapt/options.h>
#include <brim/export.h>
#include <brim/need/attempt.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <span>
#include <vector>

#include "need/size_lattice.h"

namespace brim::detail {

/// The size of the parts of a batch whose calls ran under pressure: values were given up and had to
/// be computed again. In smaller parts they are kept, but there are more parts. Neither is always
/// faster, so both are run and timed, and from then on the faster one is used.
///
/// First come the fewest parts that fit, cut evenly, until their time is known; then more parts
/// (twice as many, then in between) up to the fewest that give nothing up, until that time is
/// known too. Where such parts could not be run, nothing is tried any more. Pure logic: the state
/// is in the trials, the attempts of such calls so far.
/// @param allowed up to the largest size that fits
[[nodiscard]] BRIM_API std::int64_t choose_part_size(std::span<const Attempt> trials,
                                                     std::int64_t items,
                                                     const SizeLattice& allowed);

/// The trials of calls with as many items under the same budgets, in the memory of the options.
/// There are none, at no cost, as long as nothing was given up.
class PartTrials {
 public:
  /// @param items of the batch that is run in parts; 0: the work has no parts
  /// @param device where the work runs, unless on the CPU
  PartTrials(const AdaptOptions& options, std::int64_t items, c10::Device device);

  [[nodiscard]] bool any() const { return !trials_.empty(); }

  /// The largest size that fitted, and that no call has failed with; 0: there is none. A search by
  /// bytes finds less: they say what a size takes while it gives nothing up.
  /// @param known attempts of such calls, whatever their items
  [[nodiscard]] std::int64_t largest(std::span<const Attempt> known, std::int64_t maximum) const;

  /// As choose_part_size. With other ranks, batches that fit as a whole are not cut: an error that
  /// parts led to would end the call on all of them.
  [[nodiscard]] std::int64_t choose(const SizeLattice& allowed) const;

  /// Whether the time of a call with this size is to be known. Then it waits for the device, at its
  /// begin and at its end.
  [[nodiscard]] bool is_timed(std::int64_t size) const;

  /// Remembers an attempt that fitted, if it says something new.
  void learn(Attempt fit);

  /// After an error, as of a loss that does not follow from its parts, or for want of the memory
  /// that it takes to check that.
  /// @returns whether a trial made it, while larger parts had run: the trials end, and the call
  ///     goes on with these
  bool end_after_error(std::int64_t size);

 private:
  [[nodiscard]] const Attempt* find(std::int64_t size) const;
  /// Whether a trial failed: nothing is tried or timed any more.
  [[nodiscard]] bool have_ended() const;

  const AdaptOptions& options_;
  std::int64_t items_;
  std::uint64_t key_ = 0;
  std::vector<Attempt> trials_;
};

/// Returns when an accelerator has done all its work.
void wait_for(c10::Device device);

}  // namespace brim::detail
