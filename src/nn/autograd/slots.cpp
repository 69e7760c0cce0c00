#include "nn/autograd/slots.h"

#include <brim/memory/bytes.h>
#include <brim/nn/rehearsal.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <exception>
#include <new>
#include <utility>

#include "compat.h"
#include "fork.h"
#include "memory/backend.h"
#include "memory/reclaim.h"
#include "nn/autograd/for_this_backward.h"
#include "nn/autograd/node.h"

namespace brim::nn {
namespace {

constexpr std::size_t kMostPlans = 512;                    // of loops whose shapes never come back
constexpr std::size_t kMostValues = std::size_t{1} << 16;  // of a step: a graph may live for ever

/// Calls the slots' own.
std::int64_t drop(c10::Device on, std::int64_t bytes) noexcept try {
  return slots_of(on).drop(bytes);
} catch (const std::bad_alloc&) {  // of its lists
  return 0;
}

/// The CPU's, and those of accelerators by their number; later ones share.
using Devices = std::array<DeviceSlots, 65>;

Devices& devices() {
  static Devices& all = *new Devices;  // never destroyed: tensors may outlive everything else
  static const bool once = [] {
    for (DeviceSlots& each : all) {
      hold_during_fork(each.mutex);
    }
    return true;
  }();
  (void)once;
  return all;
}

// Tensors of a rehearsal have an object of Python, and so has their memory, which a trace follows.
// These are no holders of their own.

std::size_t holders_of_value(const at::Tensor& value, bool is_rehearsed) {
  return value.use_count() -
         (is_rehearsed ? compat::counted_by_python(*value.unsafeGetTensorImpl()) : 0);
}

std::size_t holders_of_memory(const at::Tensor& value, bool is_rehearsed) {
  const c10::Storage& memory = value.storage();
  return memory.use_count() -
         (is_rehearsed ? compat::counted_by_python(*memory.unsafeGetStorageImpl()) : 0);
}

}  // namespace

bool is_held_once(const at::Tensor& value) {
  const bool rehearsed = is_rehearsed(value);
  // Memory that was shared with other processes, or is somebody else's, has a context of its own.
  const at::DataPtr& data = value.storage().data_ptr();
  if (value.is_cuda() && is_used_on_other_streams()) {
    return false;
  }
  return data.get() == data.get_context() && holders_of_value(value, rehearsed) == 1 &&
         holders_of_memory(value, rehearsed) == 1;
}

bool BlockSlots::is_untouched() const {
  return std::ranges::all_of(reads, [](const Read& read) {
    return !read.counter.enabled() || read.counter.current_version() == read.version;
  });
}

DeviceSlots& rehearsed_slots() {
  static DeviceSlots& all = *new DeviceSlots;  // as above
  static const bool once = [] {
    hold_during_fork(all.mutex);
    return true;
  }();
  (void)once;
  return all;
}

DeviceSlots* slots_for(const at::Tensor& tensor) {
  if (!is_traced(tensor)) {
    return &slots_of(tensor.device());
  }
  return is_rehearsed(tensor) && tensor.device() == rehearsed_device() ? &rehearsed_slots()
                                                                       : nullptr;
}

DeviceSlots& slots_of(c10::Device device) {
  const std::size_t index = device.is_cpu() ? 0 : 1 + std::max<int>(device.index(), 0);
  return devices()[std::min(index, std::tuple_size_v<Devices> - 1)];
}

std::size_t shape_of(const at::Tensor& value) {
  return c10::get_hash(value.sizes().vec(), value.strides().vec(),
                       static_cast<int>(value.scalar_type()));
}

RunningBlock& running_block() {
  thread_local RunningBlock running;
  return running;
}

// -- Steps ---------------------------------------------------------------------------------------

void DeviceSlots::begin(c10::Device on) {
  if (has_begun_.load(std::memory_order_relaxed)) {
    return;
  }
  if (!are_rehearsed()) {
    device_ = on;
    set_reclaim(brim::nn::drop, [](c10::Device of) { return slots_of(of).given_up(); });
    backend_for(on).gates();
  }
  has_begun_.store(true);
}

/// What is left of a step may be what its backward had no use for, and the program still holds.
bool DeviceSlots::is_between_steps() const {
  constexpr std::size_t kNextToNone = 8;
  return oldest_ == nullptr ? step_.empty() : has_gone_back_ && kNextToNone * live_ <= most_live_;
}

void DeviceSlots::begin_step_if_none(std::unique_lock<std::mutex>& lock, const at::Tensor& first) {
  if (is_between_steps()) {
    lock.unlock();  // budgets have a lock of their own that is held during fork
    const std::int64_t limit = are_rehearsed() ? 0 : budget_in_force(first.device()).value_or(0);
    lock.lock();
    if (is_between_steps()) {
      begin_step(first, limit);
    }
  }
}

void DeviceSlots::begin_step(const at::Tensor& first, std::int64_t limit) {
  end_step();
  ++number_;
  most_live_ = live_;
  be_of_kind(c10::get_hash(first.sizes().vec(), static_cast<int>(first.scalar_type()), limit));
  spared_ = plan_ != nullptr && plan_->spares_blocks() ? kind_ : 0;
  if (spared_ != 0) {
    be_of_kind(c10::get_hash(kind_, 0));  // its layers keep other values
  }
}

void DeviceSlots::be_of_kind(std::size_t found) {
  kind_ = found;
  const auto known = plans_.find(kind_);
  plan_ = known != plans_.end() ? &known->second : nullptr;
  if (plan_ != nullptr) {
    retries_ = backend_for(device_).retries(device_);
  }
}

/// The next step of this kind does without as many bytes as this one, or at times with less, to see
/// whether there is room again.
void DeviceSlots::learn() {
  if (is_short_) {
    if (plan_ == nullptr) {
      if (plans_.size() >= kMostPlans) {
        plans_.clear();
      }
      plan_ = &plans_[kind_];
    }
    plan_->make_of(std::move(step_));
    if (const auto holding = plans_.find(spared_);
        spared_ != 0 && holding != plans_.end() && !plan_->leaves_enough()) {
      holding->second.needs_blocks();
    }
  } else if (plan_ != nullptr && !step_.empty()) {
    plan_->has_served(backend_for(device_).retries(device_) != retries_);
  }
  if (plan_ != nullptr && !backend_for(device_).is_capturing()) {  // events must not be asked then
    plan_->take_times([this](std::size_t part) { return times.of(part); });
  }
}

void DeviceSlots::end_step() noexcept {
  try {
    learn();
  } catch (const std::exception&) {
    // Of the lists' memory: nothing is learned.
  }
  step_.clear();
  plan_ = nullptr;
  is_short_ = false;
}

/// Whether the next value goes. The first one that is not as in the plan makes this another kind of
/// step: of another model, with the same first shape.
bool DeviceSlots::is_planned(std::size_t place, const StepValue& value) {
  const auto is_next = [&] {
    const Step& step = plan_->step();
    return place < step.size() && step[place].part == value.part &&
           (value.is_block() || step[place].bytes == value.bytes);
  };
  if (plan_ != nullptr && !is_next()) {
    be_of_kind(c10::get_hash(kind_, place, value.part, value.is_block() ? 0 : value.bytes));
  }
  return plan_ != nullptr && is_next() && plan_->step()[place].goes;
}

bool DeviceSlots::take_place(std::size_t& step, std::size_t& place, const StepValue& value) {
  step = number_;
  place = step_.size();
  const bool goes = is_planned(place, value);
  if (place < kMostValues) {
    step_.push_back(value);
    step_.back().goes = goes;
  }
  return goes;
}

bool DeviceSlots::passes_block(std::unique_lock<std::mutex>& lock, const at::Tensor& first,
                               std::size_t kind) {
  if (plans_.empty()) {
    return false;
  }
  begin_step_if_none(lock, first);
  if (spared_ == 0) {
    return false;
  }
  std::size_t step = 0;
  std::size_t place = 0;
  take_place(step, place, {.work = StepValue::kBlock, .part = kind});
  return true;
}

void DeviceSlots::note_gone(std::size_t step, std::size_t place) {
  if (step == number_ && place < step_.size()) {
    step_[place].goes = true;
    is_short_ = true;
  }
}

bool DeviceSlots::are_rehearsed() const { return this == &rehearsed_slots(); }

void DeviceSlots::end_rehearsal() {
  std::vector<at::Tensor> ended;  // after the lock
  const std::lock_guard lock(mutex);
  for (Slot* slot = oldest_; slot != nullptr; slot = slot->after) {
    ended.push_back(std::exchange(slot->value, at::Tensor()));
  }
  step_.clear();
  is_short_ = false;
  has_begun_.store(false);
  forget();
}

void DeviceSlots::forget() {
  counts = {};
  times.reset();
  plans_.clear();
  plan_ = nullptr;
  spared_ = 0;
  needs.clear();
}

std::int64_t DeviceSlots::recent_room(std::unique_lock<std::mutex>& lock, std::int64_t limit,
                                      std::int64_t held) {
  constexpr std::chrono::milliseconds kRecent{5};
  const auto now = Clock::now();
  if (room_asked_ + kRecent < now || room_limit_ != limit) {
    lock.unlock();
    const std::int64_t room = backend_for(device_).headroom(device_).free;
    lock.lock();
    room_ = room;
    room_asked_ = now;
    room_limit_ = limit;
    room_held_ = held;
  }
  return room_ - (held - room_held_);
}

namespace {

/// It is gone from here on.
at::Tensor take_value(Slot& slot) {
  slot.shape = shape_of(slot.value);
  return std::exchange(slot.value, at::Tensor());
}

}  // namespace

// -- The list ------------------------------------------------------------------------------------

void DeviceSlots::add(Slot& slot) {
  slot.before = newest_;
  (newest_ != nullptr ? newest_->after : oldest_) = &slot;
  newest_ = &slot;
  most_live_ = std::max(most_live_, ++live_);
  has_gone_back_ = false;
}

void DeviceSlots::remove(Slot& slot) {
  (slot.before != nullptr ? slot.before->after : oldest_) = slot.after;
  (slot.after != nullptr ? slot.after->before : newest_) = slot.before;
  if (slot.of != nullptr && slot.number < slot.of->values.size()) {
    slot.of->values[slot.number] = nullptr;
  }
  note_again(slot);
  --live_;
  has_gone_back_ = true;
  if (oldest_ == nullptr) {
    end_step();
  }
}

/// What would be freed by dropping values, the cheapest first, of these the oldest: it is needed
/// last. Then by dropping blocks, the oldest first. Memory that others hold, too, would not be
/// freed, nor what a backward has got and works with.
std::vector<DeviceSlots::Memory> DeviceSlots::droppable() const {
  std::vector<Memory> found;
  std::unordered_map<const void*, std::size_t> places;
  for (Slot* slot = oldest_; slot != nullptr; slot = slot->after) {
    if (slot->value.defined()) {
      const void* const storage = slot->value.storage().unsafeGetStorageImpl();
      const auto [place, is_new] = places.try_emplace(storage, found.size());
      if (is_new) {
        found.emplace_back();
      }
      Memory& memory = found[place->second];
      memory.slots.push_back(slot);
      if (slot->is_blocks()) {
        memory.block = slot->of;
      } else {
        memory.work += slot->work;
      }
    }
  }
  std::unordered_map<const BlockSlots*, bool> can_go;
  const auto can_be_had_again = [&](const Slot* slot) {
    if (holders_of_value(slot->value, are_rehearsed()) != 1) {
      return false;
    }
    if (!slot->is_blocks()) {
      return true;
    }
    const auto [known, is_new] = can_go.try_emplace(slot->of, false);
    if (is_new) {
      known->second = slot->of->can_go && !slot->of->has_run && slot->of->is_untouched();
    }
    return known->second;
  };
  std::erase_if(found, [&](const Memory& memory) {
    return holders_of_memory(memory.slots.front()->value, are_rehearsed()) != memory.slots.size() ||
           !std::ranges::all_of(memory.slots, can_be_had_again);
  });
  std::ranges::stable_sort(found, [](const Memory& one, const Memory& other) {
    if (one.block == nullptr || other.block == nullptr) {
      return one.block == nullptr && (other.block != nullptr || one.work < other.work);
    }
    return std::pair(one.block->step, one.block->place) <
           std::pair(other.block->step, other.block->place);
  });
  return found;
}

void DeviceSlots::end_block(BlockSlots& block, std::vector<at::Tensor>& dropped) {
  std::unordered_map<const void*, std::vector<Slot*>> memories;
  for (Slot* const slot : block.values) {
    if (slot != nullptr && slot->value.defined()) {
      memories[slot->value.storage().unsafeGetStorageImpl()].push_back(slot);
    }
  }
  std::int64_t bytes = 0;
  std::size_t releases = 0;
  for (const Slot* const each : block.values) {
    if (each == nullptr || !each->value.defined()) {
      continue;
    }
    const auto& slots = memories[each->value.storage().unsafeGetStorageImpl()];
    if (slots.front() != each || holders_of_memory(each->value, are_rehearsed()) != slots.size() ||
        std::ranges::none_of(slots, &Slot::is_blocks)) {
      continue;
    }
    bytes += each->bytes;
    for (Slot* const slot : slots) {
      if (block.goes) {
        dropped.push_back(take_value(*slot));
        ++counts.foreseen;
      }
    }
    if (block.goes) {
      note_given_up(*slots.front(), PressureMark::What::not_kept, ++releases);
    }
  }
  if (block.goes) {
    block.is_gone = true;
    count_planned(bytes);
  }
  if (block.step == number_ && block.place < step_.size()) {
    step_[block.place].bytes = bytes;
  }
}

void DeviceSlots::count_planned(std::int64_t bytes) {
  counts.foreseen_bytes += bytes;
  if (!are_rehearsed()) {
    count_foreseen(bytes);
  }
}

void DeviceSlots::keep_next_time(const BlockSlots& block) {
  if (block.step == number_ && block.place < step_.size()) {
    step_[block.place].bytes = 0;
    is_short_ |= block.goes;  // a plan that took it is made again
  }
}

/// Values whose memory others hold, too, such as autograd, free none on their own.
void DeviceSlots::note_what_frees(const std::vector<Memory>& found) {
  const auto note = [this](const Slot& slot, bool frees) {
    if (!slot.is_blocks() && slot.step == number_ && slot.place < step_.size()) {
      step_[slot.place].frees = frees;
    }
  };
  for (const Slot* slot = oldest_; slot != nullptr; slot = slot->after) {
    if (slot->value.defined()) {
      note(*slot, false);
    }
  }
  for (const Memory& memory : found) {
    for (const Slot* const slot : memory.slots) {
      note(*slot, memory.block == nullptr);
    }
  }
}

std::int64_t DeviceSlots::drop(std::int64_t bytes) {
  std::vector<at::Tensor> dropped;  // ends after the lock: freed memory may call anything
  std::int64_t freed = 0;
  std::size_t releases = 0;
  const std::lock_guard lock(mutex);
  const std::vector<Memory> found = droppable();
  note_what_frees(found);
  const BlockSlots* begun = nullptr;  // a block that runs again for one value gives the others, too
  for (const Memory& memory : found) {
    if (freed >= bytes && (memory.block == nullptr || memory.block != begun)) {
      break;
    }
    begun = memory.block;
    freed += memory.slots.front()->bytes;
    note_given_up(*memory.slots.front(), PressureMark::What::dropped, ++releases);
    for (Slot* const slot : memory.slots) {
      dropped.push_back(take_value(*slot));
      ++counts.dropped;
      if (slot->is_blocks()) {
        slot->of->is_gone = true;
        note_gone(slot->of->step, slot->of->place);
      } else {
        note_gone(slot->step, slot->place);
      }
    }
  }
  counts.requests += freed > 0 ? 1 : 0;
  counts.dropped_bytes += freed;
  return freed;
}

std::string DeviceSlots::given_up() {
  const std::lock_guard lock(mutex);
  std::int64_t values = 0;
  std::int64_t blocks = 0;
  std::int64_t bytes = 0;
  for (const StepValue& value : step_) {
    if (value.goes) {
      ++(value.is_block() ? blocks : values);
      bytes += value.bytes;
    }
  }
  if (bytes == 0) {
    return "";
  }
  const auto count = [](std::int64_t number, const char* of_what) {
    return std::to_string(number) + of_what + (number == 1 ? "" : "s");
  };
  return "recompute=\"auto\" had given up " + count(values, " value") + " and " +
         count(blocks, " block") + " of this step (" + format_bytes(bytes) +
         "), and nothing is left that can be computed again: a smaller batch fits, or more of the "
         "model in blocks=";
}

// -- A recording ---------------------------------------------------------------------------------

std::vector<PressureMark> DeviceSlots::record(const EventLog* log) {
  const std::lock_guard lock(mutex);
  log_ = log;
  return std::exchange(marks_, {});
}

void DeviceSlots::mark(PressureMark::What what, std::int64_t bytes, std::size_t releases) noexcept {
  if (log_ != nullptr && bytes > 0) {
    try {
      marks_.push_back({log_->size() + releases, what, bytes});
    } catch (const std::bad_alloc&) {
      // The recording does without it.
    }
  }
}

void DeviceSlots::note_given_up(Slot& slot, PressureMark::What why, std::size_t releases) noexcept {
  slot.given_up = slot.bytes;
  mark(why, slot.bytes, releases);
}

void DeviceSlots::note_again(Slot& slot) noexcept {
  mark(PressureMark::What::again, std::exchange(slot.given_up, 0), 0);
}

// -- Slots ---------------------------------------------------------------------------------------

namespace {

/// To the slot of the first run, where it is missed. Where all is there, the run was told to stop,
/// and its code may have caught that.
void give_again(RunningBlock& running, DeviceSlots& device, const at::Tensor& value) {
  const at::Tensor own = value.tensor_data();  // without the lock: a trace follows it
  const std::lock_guard lock(device.mutex);
  const std::vector<Slot*>& values = running.slots->values;
  if (running.next == values.size()) {
    return;
  }
  Slot* const slot = values[running.next++];
  if (slot != nullptr && !slot->value.defined()) {
    running.is_other |= slot->shape != shape_of(value);
    TORCH_CHECK(!running.is_other, kOtherValues);
    slot->value = own;
    slot->version = version_of(value).version;
    device.note_again(*slot);
  }
}

}  // namespace

std::unique_ptr<Slot> slot_for(const at::Tensor& value, DeviceSlots& device, double work) {
  device.begin(value.device());
  RunningBlock& running = running_block();
  const bool is_in_block = running.block != nullptr && running.among == &device;
  if (is_in_block && running.is_again) {
    give_again(running, device, value);
    return nullptr;
  }
  auto slot = std::make_unique<Slot>();
  slot->value = value.tensor_data();
  slot->version = version_of(value).version;
  slot->bytes = static_cast<std::int64_t>(value.storage().nbytes());
  slot->work = work;
  slot->among = &device;
  std::unique_lock lock(device.mutex);
  device.begin_step_if_none(lock, value);
  const bool goes =
      !slot->is_blocks() &&
      device.take_place(slot->step, slot->place, {.bytes = slot->bytes, .work = slot->work});
  if (is_in_block) {
    slot->block = running.block->shared_from_this();
    slot->of = running.slots;
    slot->number = slot->of->values.size();
    slot->of->values.push_back(slot.get());
  }
  if (goes) {
    take_value(*slot);
    device.note_given_up(*slot, PressureMark::What::not_kept, 0);
    ++device.counts.foreseen;
    device.count_planned(slot->bytes);
  }
  device.add(*slot);
  return slot;
}

void end_slot(std::unique_ptr<Slot> slot) noexcept {
  // Its value, and perhaps its block, end after the lock.
  DeviceSlots& device = *slot->among;
  const std::lock_guard lock(device.mutex);
  device.remove(*slot);
}

namespace {

/// Under the lock of its device.
at::Tensor locked_value(const Slot& slot) {
  if (slot.of != nullptr && !slot.of->can_go && backward_now() != slot.of->backward) {
    slot.of->is_used = true;
  }
  const bool is_there = slot.value.defined() && version_of(slot.value).version == slot.version;
  return is_there ? slot.value : at::Tensor();
}

}  // namespace

at::Tensor value_if_there(const Slot& slot) {
  const std::lock_guard lock(slot.among->mutex);
  return locked_value(slot);
}

at::Tensor value_of(Slot& slot) {
  DeviceSlots& device = *slot.among;
  std::unique_lock lock(device.mutex);
  if (!slot.value.defined() && slot.of != nullptr && slot.of->is_gone && !slot.of->has_run) {
    lock.unlock();
    slot.block->run_again();
    lock.lock();
  }
  at::Tensor value = locked_value(slot);
  if (!value.defined()) {
    ++device.counts.recomputed;
    device.note_again(slot);
  }
  return value;
}

std::uint64_t block_here() { return running_block().number; }

Pressure pressure() {
  Pressure result;
  for (DeviceSlots& device : devices()) {
    const std::lock_guard lock(device.mutex);
    const Pressure& counts = device.counts;
    result.requests += counts.requests;
    result.dropped += counts.dropped;
    result.dropped_bytes += counts.dropped_bytes;
    result.foreseen += counts.foreseen;
    result.foreseen_bytes += counts.foreseen_bytes;
    result.recomputed += counts.recomputed;
    result.blocks += counts.blocks;
    result.seconds += device.times.total();
    for (const Slot* slot = device.oldest(); slot != nullptr; slot = slot->after) {
      result.values += slot->value.defined() ? 1 : 0;
      result.value_bytes += slot->value.defined() ? slot->bytes : 0;
    }
  }
  return result;
}

void reset_pressure() {
  for (DeviceSlots& device : devices()) {
    const std::lock_guard lock(device.mutex);
    device.forget();
  }
}

}  // namespace brim::nn
