#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

// A step of a training loop keeps the same values in the same order as the one before. So the place
// of a value in its step says which value it is, and what had to go in one step is not kept in the
// next one of the same kind.

namespace brim::nn {

/// What is kept while there is room: one value, or all that a block of layers keeps.
struct StepValue {
  /// The work of a block: more than that of any value, so that these go first.
  static constexpr double kBlock = std::numeric_limits<double>::infinity();

  std::int64_t bytes = 0;
  double work = 0;       // to compute it again, per byte
  bool goes = false;     // it was given up
  bool frees = true;     // its memory: else others hold that, too
  std::size_t part = 0;  // of the model, and the shapes it got: of a block
  double seconds = 0;    // per byte, in which such a block runs; 0 until all of them are known

  [[nodiscard]] bool is_block() const { return work == kBlock; }
};

/// The values of a step, in their order.
using Step = std::vector<StepValue>;

/// Which values go from the beginning in a kind of step.
class StepPlan {
 public:
  [[nodiscard]] const Step& step() const { return step_; }

  /// More had to go than was planned: in the next step as many bytes go, of the values that take
  /// least to be computed again.
  void make_of(Step&& step);

  /// Once it is known how long all blocks run, those go that take least per byte.
  /// @param seconds_of gives that for a part; 0 if it is not known yet
  void take_times(const std::function<double(std::size_t)>& seconds_of);

  /// A step went as planned.
  /// @param barely whether the device's allocator had to make room for it
  void has_served(bool barely);

  /// Whether blocks need not be held, which takes time: none goes, nothing more had to go for some
  /// steps, and if it had to, a quarter of the single values is there for that.
  [[nodiscard]] bool spares_blocks() const { return spares_blocks_; }

  /// Whether it has blocks, none goes, and a quarter of the single values is kept, beside the
  /// largest one.
  [[nodiscard]] bool leaves_enough() const;

  /// A step that did not hold its blocks was too short of memory for that.
  void needs_blocks();

 private:
  void be_patient();

  Step step_;
  bool is_timed_ = false;
  bool spares_blocks_ = false;
  bool needed_blocks_ = false;  // when they were spared
  int served_ = 0;              // steps in a row that needed no more
  int patience_ = 16;           // how many of these before it is tried with less
  bool is_tried_ = false;       // with less than was needed once
};

}  // namespace brim::nn
