#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/part_loss.h>
#include <brim/export.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace brim::detail {

/// Makes the gradients that each rank of a job has of its batch those of all batches together: a
/// mean is weighted by what each rank counted, a sum is summed.
///
/// In two steps, so that no rank runs out of memory while others wait for it in a collective:
/// `prepare` allocates all that is needed, and belongs into the attempt on which the ranks agree;
/// `run` follows when all have succeeded, and allocates nothing on the CPU. Small gradients travel
/// together in buckets, large ones as they are. The collectives follow from the parameters alone,
/// so they are the same on every rank, whichever parameters its batch has reached.
///
/// The first collective sums a few numbers. It can be a vote: a rank that failed takes part too,
/// and then no rank goes on to the gradients.
class BRIM_API GradientReduction {
 public:
  /// Replaces a tensor by its sum over all ranks.
  using Sum = c10::function_ref<void(const at::Tensor&)>;

  /// @param parameters the same on all ranks, in the same order.
  GradientReduction(Reduction reduction, std::vector<at::Tensor> parameters)
      : reduction_(reduction), parameters_(std::move(parameters)) {}

  /// Names the parameters anew, ahead of `prepare`.
  void name(std::vector<at::Tensor> parameters) { parameters_ = std::move(parameters); }

  /// Whether the same parameters are trained as when the last call prepared. Only then can this
  /// rank vote, whatever happens to it.
  [[nodiscard]] bool is_planned() const;

  /// Takes the gradients as they are. One that this rank lacks becomes zeros.
  /// @param loss of this rank's batch. @param count of what it is the mean of.
  /// @param shape as BatchPass::shape: must be the same on all ranks.
  void prepare(const at::Tensor& loss, double count, double shape = 0);

  /// @param ready whether this rank has prepared. @return whether all ranks are ready.
  bool vote(bool ready, Sum sum);

  /// For ranks that are all ready, be it by a vote or because they know it otherwise. Gradients
  /// that no rank has are none again.
  /// @throws c10::ValueError on all ranks if they count different things; RankError on all if one
  ///     is not ready.
  void run(Sum sum);

  /// Of all ranks' batches, in the last run.
  [[nodiscard]] const at::Tensor& loss() const noexcept { return loss_; }

  /// What all ranks together counted in the last run.
  [[nodiscard]] double total() const noexcept { return total_; }

  /// Of the ranks that count something; see BatchPass::shape.
  [[nodiscard]] double shape() const noexcept { return shape_; }

 private:
  /// Gradients that travel together, all of one type.
  struct Group {
    bool alone;         // one large gradient, which needs no bucket
    at::Tensor factor;  // one element
    std::vector<at::Tensor> parameters{};
    std::int64_t bytes = 0;
  };

  void plan();
  void reduce(const Group& group, Sum sum);

  Reduction reduction_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> trained_;  // of the parameters, when it was planned
  std::vector<Group> groups_;
  at::Tensor bucket_;   // bytes, for one group at a time
  at::Tensor own_;      // on the CPU: whether it is ready, its count, …
  at::Tensor sums_;     // of all ranks, on the CPU
  at::Tensor reduced_;  // what the collective gets, on the parameters' device
  bool voted_ = false;  // all are ready, and sums_ is what they have prepared
  at::Tensor loss_;
  double count_ = 0;
  double total_ = 0;
  double shape_ = 0;
};

}  // namespace brim::detail
