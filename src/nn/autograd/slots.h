#pragma once

#include <ATen/core/Tensor.h>
#include <brim/nn/block.h>
#include <brim/nn/pressure.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "memory/event_log.h"
#include "nn/autograd/block_needs.h"
#include "nn/autograd/step_plan.h"
#include "nn/autograd/time_again.h"

// All values that are kept while there is room. A step is the time from the first value of a device
// until there is none left, or next to none.

namespace brim::nn {

/// What the slots of a block know of it.
struct BlockSlots {
  std::size_t step = 0;       // its number
  std::size_t place = 0;      // in its step
  bool goes = false;          // when it ends, as earlier steps had shown
  bool can_go = false;        // it has ended, and can run again
  int backward = -1;          // in which it runs for the first time, if in one
  bool is_used = false;       // by a backward inside of it: again, that would save other tensors
  bool is_gone = false;       // its values were given up
  bool has_run = false;       // again: its values are needed now
  std::vector<Slot*> values;  // in the order in which they were kept; null for those that ended
  struct Read {
    c10::VariableVersion counter;
    std::uint32_t version = 0;
  };
  std::vector<Read> reads;

  /// Whether what it reads is as it was.
  [[nodiscard]] bool is_untouched() const;
};

class DeviceSlots;

/// A value that is kept while there is room. Its fields are used under the lock of its device.
struct Slot {
  at::Tensor value;  // shares the version counter
  std::uint32_t version = 0;
  std::int64_t bytes = 0;  // of its memory
  double work = 0;         // to compute it again, per byte; kBlock: only by its block
  std::size_t step = 0;    // its number
  std::size_t place = 0;   // in its step
  DeviceSlots* among = nullptr;
  std::shared_ptr<Block> block;  // in which it was kept, if in one
  BlockSlots* of = nullptr;      // that block's
  std::size_t number = 0;        // among its values
  std::size_t shape = 0;         // of a value that is gone
  std::int64_t given_up = 0;     // bytes that are free because it is gone; until it is had again
  // In the list, from the oldest to the newest.
  Slot* before = nullptr;
  Slot* after = nullptr;

  [[nodiscard]] bool is_blocks() const { return work == StepValue::kBlock; }
};

/// Something that happened to values while a step is recorded.
struct PressureMark {
  std::size_t place = 0;  // the number of allocations and releases before
  enum class What : std::uint8_t { dropped, not_kept, again } what = What::dropped;
  std::int64_t bytes = 0;
};

/// The values of one device.
class DeviceSlots {
 public:
  std::mutex mutex;
  Pressure counts;
  AgainTimes times;

  /// The device's allocator asks for these values from now on, if it can. Without the lock.
  void begin(c10::Device on);

  /// Where none runs, a step begins with this tensor. @param lock of the mutex, which is held
  void begin_step_if_none(std::unique_lock<std::mutex>& lock, const at::Tensor& first);

  /// A value, or a block, that comes next in the step. Sets its step and place.
  /// @returns whether the plan says that it goes
  bool take_place(std::size_t& step, std::size_t& place, const StepValue& value);

  /// Whether a block need not be held, by the plan of the step that runs, or begins with it: then
  /// none is in this step. It takes its place in the step. @param kind of the block
  bool passes_block(std::unique_lock<std::mutex>& lock, const at::Tensor& first, std::size_t kind);

  /// At the end of a block that can go: it does, if that is planned.
  /// @param dropped its values, to be freed without the lock
  void end_block(BlockSlots& block, std::vector<at::Tensor>& dropped);

  /// Bytes that went as planned; those of a rehearsal are not the process's.
  void count_planned(std::int64_t bytes);

  /// What a block read was written to before its backward: it could not run again.
  void keep_next_time(const BlockSlots& block);

  void add(Slot& slot);
  void remove(Slot& slot);
  [[nodiscard]] const Slot* oldest() const { return oldest_; }

  BlockNeeds needs;

  /// What is free, but for what others did in the last milliseconds: to ask takes time.
  /// @param limit in force, 0 for none
  /// @param held by tensors of this process now
  std::int64_t recent_room(std::unique_lock<std::mutex>& lock, std::int64_t limit,
                           std::int64_t held);

  /// Gives up as many values as give the bytes; see Reclaim.
  std::int64_t drop(std::int64_t bytes);

  /// What went in this step; see GivenUp.
  [[nodiscard]] std::string given_up();

  /// Those of a rehearsal (brim/nn/rehearsal.h): its memory is only modelled.
  [[nodiscard]] bool are_rehearsed() const;

  /// Since begin().
  [[nodiscard]] c10::Device device() const { return device_; }

  /// The end of a rehearsal: all values go, and nothing is known of its steps.
  void end_rehearsal();

  /// Whether a value was kept, or a block begun.
  [[nodiscard]] bool have_begun() const { return has_begun_.load(); }

  /// Forgets what steps needed.
  void forget();

  /// From here on all that happens to values is noted, with its place in the open log; null: no
  /// longer.
  std::vector<PressureMark> record(const EventLog* log);

  /// The value of this slot, and all that share its memory, are gone.
  /// @param releases how many there will be until its own, with that one; 0: the memory is in use
  void note_given_up(Slot& slot, PressureMark::What why, std::size_t releases) noexcept;

  /// It is had again, or no longer needed.
  void note_again(Slot& slot) noexcept;

 private:
  /// Values that share their memory: it is freed when all of them are gone.
  struct Memory {
    std::vector<Slot*> slots;
    double work = 0;                    // per byte, of all of them
    const BlockSlots* block = nullptr;  // the last one that must run again for it
  };

  [[nodiscard]] std::vector<Memory> droppable() const;
  void note_what_frees(const std::vector<Memory>& found);
  [[nodiscard]] bool is_between_steps() const;
  void begin_step(const at::Tensor& first, std::int64_t limit);
  void be_of_kind(std::size_t found);
  void learn();
  void end_step() noexcept;
  [[nodiscard]] bool is_planned(std::size_t place, const StepValue& value);
  void note_gone(std::size_t step, std::size_t place);
  void mark(PressureMark::What what, std::int64_t bytes, std::size_t releases) noexcept;

  std::atomic<bool> has_begun_{false};
  c10::Device device_ = c10::DeviceType::CPU;
  Slot* oldest_ = nullptr;
  Slot* newest_ = nullptr;
  std::size_t live_ = 0;    // slots in the list
  std::size_t number_ = 0;  // of the step that runs, and its kind
  std::size_t kind_ = 0;
  Step step_;
  std::size_t most_live_ = 0;   // in this step
  bool has_gone_back_ = false;  // a slot has gone since the last one came
  StepPlan* plan_ = nullptr;
  std::size_t spared_ = 0;  // the kind of the step if it held its blocks, which it does not; else 0
  std::int64_t retries_ = 0;  // of the device's allocator, when the step began
  bool is_short_ = false;     // values went that the plan had kept
  std::int64_t room_ = 0;
  std::int64_t room_limit_ = 0;
  std::int64_t room_held_ = 0;
  Clock::time_point room_asked_;
  // By the shape of a step's first value, and the limit in force; then by where it differs from the
  // plan for that.
  std::unordered_map<std::size_t, StepPlan> plans_;
  const EventLog* log_ = nullptr;  // while a step is recorded
  std::vector<PressureMark> marks_;
};

/// Those of the CPU, or of an accelerator.
DeviceSlots& slots_of(c10::Device device);

/// Those of the rehearsal that goes on, if there is one.
DeviceSlots& rehearsed_slots();

/// The type of its device, and what C++ code sees of it.
[[nodiscard]] c10::DeviceType rehearsed_type();
[[nodiscard]] c10::Device rehearsed_device();

/// Those of a tensor's device, or of the rehearsal that it belongs to; null where a tensor cannot
/// be kept in one, because it is traced by others.
[[nodiscard]] DeviceSlots* slots_for(const at::Tensor& tensor);

/// Whether nothing else holds it, or its memory; no other process either.
[[nodiscard]] bool is_held_once(const at::Tensor& value);

/// What `value` must be like when it is had again.
[[nodiscard]] std::size_t shape_of(const at::Tensor& value);

/// The error of a block whose values are others when it runs again.
inline constexpr const char* kOtherValues =
    "in backward a block of layers ran again, for recompute=\"auto\", and kept other tensors than "
    "before: it depends on more than its inputs, its parameters and torch's random numbers. "
    "brim.convert(model, recompute=\"auto\", blocks=[...]) says which blocks may run again, and "
    "blocks=() none";

/// The block that runs in this thread, for the first time or again.
struct RunningBlock {
  Block* block = nullptr;
  BlockSlots* slots = nullptr;
  DeviceSlots* among = nullptr;  // where its values are kept
  std::uint64_t number = 0;      // of this run, among all
  bool is_again = false;
  std::size_t next = 0;   // of its values, when it runs again
  bool is_other = false;  // than at the first time
};

[[nodiscard]] RunningBlock& running_block();

/// For a value that is kept now.
/// @param device slots_for(value)
/// @param work kBlock: only the block that runs can give it again
/// @returns null while a block runs again: the value was given to the slot of its first run
[[nodiscard]] std::unique_ptr<Slot> slot_for(const at::Tensor& value, DeviceSlots& device,
                                             double work);

/// Takes it from its list, and ends it.
void end_slot(std::unique_ptr<Slot> slot) noexcept;

/// The same if it is there.
[[nodiscard]] at::Tensor value_if_there(const Slot& slot);

/// Without a place in the graph; undefined if it is gone, or was written to. Where its block is
/// gone, that runs again before.
[[nodiscard]] at::Tensor value_of(Slot& slot);

}  // namespace brim::nn
