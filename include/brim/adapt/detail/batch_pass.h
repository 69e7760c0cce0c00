#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/detail/part_weights.h>
#include <brim/adapt/part_loss.h>
#include <brim/export.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

namespace brim::detail {

/// A forward and backward pass over a batch in parts, which leaves in `.grad` what the whole batch
/// would have left.
///
/// Each leaf of the loss starts the pass without a gradient. One that was there is put aside, as it
/// is, until the pass is finished or undone: so undoing costs nothing, needs no copy, and is exact.
/// The leaves are found in the loss's graph; those that it does not show (a reentrant checkpoint
/// makes its graph in backward) must be named.
///
///     pass.run(…)     after out of memory: again, with a smaller size
///     pass.finish()   adds what was put aside
///
/// Several batches are pooled into one by `pool` after each, and `finish_pool` in the end.
///
/// Belongs to one thread at a time.
class BRIM_API BatchPass {
 public:
  using Forward = c10::function_ref<PartLoss(std::int64_t begin, std::int64_t end)>;
  /// Calls backward on the loss. @param weight the gradient to start with; undefined: 1.
  using Backward = c10::function_ref<void(const at::Tensor& loss, const at::Tensor& weight)>;

  /// For ranks that wait for each other inside of every part, and whose gradients are averaged
  /// there: all run as many parts, and weigh them in the same units.
  struct AllRanks {
    std::int64_t parts = 0;  ///< on each rank; one that has fewer items repeats its first
    double unit = 0;         ///< that counts 1
    /// The means of numbers over the ranks: a collective.
    std::function<std::vector<double>(std::vector<double>)> means{};
  };

  /// @param named leaves that the graph may not show.
  explicit BatchPass(Reduction reduction, std::vector<at::Tensor> named = {})
      : reduction_(reduction), named_(std::move(named)), weights_(reduction) {}
  ~BatchPass() { undo_pool(); }
  BatchPass(const BatchPass&) = delete;
  BatchPass& operator=(const BatchPass&) = delete;

  /// Runs the parts of `items` items, each of `size` but for the last. Undoes a pass that was not
  /// finished first. If it throws, the gradients are as before.
  /// @param all parts of one length instead, with collectives inside; null: there are none.
  /// @return the loss of the whole batch, without a graph.
  at::Tensor run(std::int64_t items, std::int64_t size, Forward forward, Backward backward,
                 const AllRanks* all = nullptr);

  /// Runs backward passes of the caller's making in place of parts, each of which it announces by
  /// `reach`. Undoes a pass that was not finished first. If it throws, the gradients are as before.
  /// @return what the work returns: the loss.
  at::Tensor run_as(c10::function_ref<at::Tensor()> work);

  /// Puts the gradients of the leaves aside that a backward from `root` will reach, but for these.
  /// @throws c10::ValueError if there are gradients of this pass before the first backward.
  void reach(const at::Tensor& root, std::span<const at::Tensor> but = {});

  /// Drops the gradients that this pass has so far.
  void drop_gradients();

  /// Adds the gradients that were put aside. Allocates nothing unless one of them is sparse.
  void finish();

  /// Leaves the gradients as they were before the pass. Nothing to do after `finish`.
  void undo() noexcept;

  /// In place of `finish`: makes the gradients those of this batch and all that were pooled before,
  /// each by its count. Allocates nothing unless a gradient is sparse.
  /// @param loss of this batch, on all ranks. @param count of what it is the mean of.
  /// @param shape as shape(), of all ranks.
  void pool(const at::Tensor& loss, double count, double shape);

  /// Adds the gradients that were there before the first batch of the pool.
  /// @return the loss of all batches. @throws c10::ValueError if there was none.
  at::Tensor finish_pool();

  /// Leaves the gradients as they were before the first batch of the pool.
  void undo_pool() noexcept;

  /// Names the leaves anew, for the next pass.
  void name(std::vector<at::Tensor> leaves) { named_ = std::move(leaves); }

  /// The leaves with a gradient of the pass that were found in the graph only.
  [[nodiscard]] std::vector<at::Tensor> not_named() const;

  /// The number of terms that the last loss is the mean of: items, or what the parts counted; with
  /// AllRanks the mean over the ranks.
  [[nodiscard]] double count() const noexcept { return count_; }

  /// How the terms of the last loss count relative to each other. Means by counts that differ in
  /// this cannot be added up by one weight. See PartWeights::Count::others; -1: items were counted.
  [[nodiscard]] double shape() const noexcept { return shape_; }

  /// Whether a batch of a single part is counted too: for ranks and pools.
  void count_always(bool always) noexcept { counts_always_ = always; }

  /// What the parts' losses are weighted by.
  [[nodiscard]] PartWeights& weights() noexcept { return weights_; }

 private:
  struct Leaf {
    at::Tensor tensor;
    at::Tensor before;  // its gradient; undefined where there was none
  };

  at::Tensor run_parts(std::int64_t items, std::int64_t size, Forward forward, Backward backward,
                       const AllRanks* all);
  void put_aside_named();
  void put_aside(const at::Tensor& leaf);
  void check_no_gradients() const;
  void scale_gradients(double factor);

  Reduction reduction_;
  std::vector<at::Tensor> named_;
  std::vector<Leaf> leaves_;  // the named ones first
  std::size_t named_leaves_ = 0;
  std::unordered_set<const c10::TensorImpl*> known_;
  double count_ = 0;
  double shape_ = 0;
  PartWeights weights_;
  bool counts_always_ = false;
  bool ran_backward_ = false;  // in this pass, of the caller's making
  std::vector<Leaf> pooled_;   // with the gradients from before the pool
  double pooled_count_ = 0;
  std::optional<double> pooled_shape_;
  at::Tensor pooled_loss_;
  at::Tensor last_loss_;
};

}  // namespace brim::detail
