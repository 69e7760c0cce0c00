#include "nn/autograd/kept_while_room.h"

#include <brim/memory/stats.h>
#include <brim/nn/pressure.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fork.h"
#include "memory/backend.h"
#include "memory/reclaim.h"
#include "nn/autograd/node.h"

// A step of a training loop keeps the same values in the same order as the one before. So a step is
// the time from the first value until there is none left, or next to none, and the place of a value
// in its step says which value it is. What had to go in one step is not kept in the next one of the
// same kind.

namespace brim::nn {
namespace {

struct Value {
  std::int64_t bytes = 0;
  double work = 0;    // to compute it again, per byte
  bool goes = false;  // it was given up
};

/// The values of a step, in their order.
using Step = std::vector<Value>;

constexpr std::size_t kMostPlans = 512;  // of loops whose shapes never come back
constexpr int kMostPatience = 1024;
constexpr std::size_t kMostValues = std::size_t{1} << 16;  // of a step: a graph may live for ever

/// Which values go from the beginning in a kind of step.
struct Plan {
  Step step;
  int served = 0;         // steps in a row that needed no more
  int patience = 16;      // how many of these before it is tried with less
  bool is_tried = false;  // with less than was needed once

  /// More had to go.
  void be_patient() {
    if (std::exchange(is_tried, false)) {
      patience = std::min(2 * patience, kMostPatience);
    }
    served = 0;
  }
};

/// By the shape of a step's first value, and the limit in force; then by where it differs from the
/// plan for that.
using Plans = std::unordered_map<std::size_t, Plan>;

/// The values of a step, from those that take least to be computed again.
std::vector<Value*> by_work(Step& step) {
  std::vector<Value*> values;
  for (Value& value : step) {
    values.push_back(&value);
  }
  std::ranges::stable_sort(values, {}, &Value::work);
  return values;
}

std::int64_t bytes_that_go(const Step& step) {
  std::int64_t bytes = 0;
  for (const Value& value : step) {
    bytes += value.goes ? value.bytes : 0;
  }
  return bytes;
}

/// As many bytes go as now, of those that take least.
void choose_again(Step& step) {
  std::int64_t bytes = bytes_that_go(step);
  for (Value* const value : by_work(step)) {
    value->goes = bytes > 0;
    bytes -= value->bytes;
  }
}

/// An eighth of the bytes that go are kept again, of those that take most; or as many more go, of
/// those that take least.
void change_a_little(Step& step, bool keeps) {
  std::vector<Value*> values = by_work(step);
  if (keeps) {
    std::ranges::reverse(values);
  }
  std::int64_t bytes = std::max<std::int64_t>(bytes_that_go(step) / 8, 1);
  for (Value* const value : values) {
    if (value->goes == keeps && bytes > 0) {
      value->goes = !keeps;
      bytes -= value->bytes;
    }
  }
}

}  // namespace

class KeptWhileRoom::Slot {
 public:
  at::Tensor value;  // shares the version counter
  std::uint32_t version = 0;
  std::int64_t bytes = 0;  // of its memory
  double work = 0;         // to compute it again, per byte
  std::size_t step = 0;    // its number
  std::size_t place = 0;   // in its step
  c10::Device device = c10::DeviceType::CPU;
  // In the list, from the oldest to the newest.
  Slot* before = nullptr;
  Slot* after = nullptr;
};

namespace {

using Slot = KeptWhileRoom::Slot;

std::int64_t drop(c10::Device on, std::int64_t bytes) noexcept;

/// The values of one device.
struct Device {
  std::atomic<bool> has_begun{false};
  c10::Device device = c10::DeviceType::CPU;
  std::mutex mutex;
  Slot* oldest = nullptr;
  Slot* newest = nullptr;
  Pressure counts;
  std::size_t live = 0;    // slots in the list
  std::size_t number = 0;  // of the step that runs, and its kind
  std::size_t kind = 0;
  Step step;
  std::size_t most_live = 0;   // in this step
  bool has_gone_back = false;  // a slot has gone since the last one came
  Plan* plan = nullptr;
  std::int64_t retries = 0;  // of the device's allocator, when the step began
  bool is_short = false;     // values went that the plan had kept
  Plans plans;

  /// The device's allocator asks for these values from now on, if it can.
  void begin(c10::Device on) {
    if (!has_begun.load(std::memory_order_relaxed)) {
      device = on;
      set_reclaim(drop);
      backend_for(on).gates();
      has_begun.store(true);
    }
  }

  void add(Slot& slot) {
    slot.before = newest;
    (newest != nullptr ? newest->after : oldest) = &slot;
    newest = &slot;
    most_live = std::max(most_live, ++live);
    has_gone_back = false;
  }

  void remove(Slot& slot) {
    (slot.before != nullptr ? slot.before->after : oldest) = slot.after;
    (slot.after != nullptr ? slot.after->before : newest) = slot.before;
    --live;
    has_gone_back = true;
    if (oldest == nullptr) {
      end_step();
    }
  }

  /// What is left of a step may be what its backward had no use for, and the program still holds.
  [[nodiscard]] bool is_between_steps() const {
    constexpr std::size_t kNextToNone = 8;
    return oldest == nullptr || (has_gone_back && kNextToNone * live <= most_live);
  }

  void begin_step(const at::Tensor& first, std::int64_t limit) {
    end_step();
    ++number;
    most_live = live;
    be_of_kind(c10::get_hash(first.sizes().vec(), static_cast<int>(first.scalar_type()), limit));
  }

  void be_of_kind(std::size_t found) {
    kind = found;
    const auto known = plans.find(kind);
    plan = known != plans.end() ? &known->second : nullptr;
    if (plan != nullptr) {
      retries = backend_for(device).retries(device);
    }
  }

  /// The next step of this kind does without as many bytes as this one, or at times with less, to
  /// see whether there is room again.
  void learn() {
    if (is_short) {
      choose_again(step);
      if (plan == nullptr) {
        if (plans.size() >= kMostPlans) {
          plans.clear();
        }
        plan = &plans[kind];
      }
      plan->step = std::move(step);
      plan->be_patient();
    } else if (plan != nullptr && backend_for(device).retries(device) != retries) {
      // It fitted, but for lack of room torch's allocator took its time.
      change_a_little(plan->step, /*keeps=*/false);
      plan->be_patient();
    } else if (plan != nullptr && ++plan->served >= plan->patience) {
      change_a_little(plan->step, /*keeps=*/true);
      plan->served = 0;
      plan->is_tried = true;
    }
  }

  void end_step() noexcept {
    try {
      learn();
    } catch (const std::exception&) {
      // Of the lists' memory: nothing is learned.
    }
    step.clear();
    plan = nullptr;
    is_short = false;
  }

  /// Whether the next value goes. The first one that is not as in the plan makes this another kind
  /// of step: of another model, with the same first shape.
  [[nodiscard]] bool is_planned(std::size_t place, std::int64_t bytes) {
    const auto is_next = [&] {
      return place < plan->step.size() && plan->step[place].bytes == bytes;
    };
    if (plan != nullptr && !is_next()) {
      be_of_kind(c10::get_hash(kind, place, bytes));
    }
    return plan != nullptr && is_next() && plan->step[place].goes;
  }
};

/// The CPU's, and those of accelerators by their number; later ones share.
using Devices = std::array<Device, 65>;

Devices& devices() {
  static Devices& all = *new Devices;  // never destroyed: tensors may outlive everything else
  static const bool once = [] {
    for (Device& each : all) {
      hold_during_fork(each.mutex);
    }
    return true;
  }();
  (void)once;
  return all;
}

Device& device_of(c10::Device device) {
  const std::size_t index = device.is_cpu() ? 0 : 1 + std::max<int>(device.index(), 0);
  return devices()[std::min(index, std::tuple_size_v<Devices> - 1)];
}

/// Values that share their memory: it is freed when all of them are gone.
struct Memory {
  std::vector<Slot*> slots;
  double work = 0;  // per byte, of all of them
};

/// What would be freed by dropping values, the cheapest first, of these the oldest: it is needed
/// last. Memory that others hold, too, would not be, nor what a backward has got and works with.
std::vector<Memory> droppable(const Device& device) {
  std::vector<Memory> found;
  std::unordered_map<const void*, std::size_t> places;
  for (Slot* slot = device.oldest; slot != nullptr; slot = slot->after) {
    if (slot->value.defined()) {
      const void* const storage = slot->value.storage().unsafeGetStorageImpl();
      const auto [place, is_new] = places.try_emplace(storage, found.size());
      if (is_new) {
        found.emplace_back();
      }
      found[place->second].slots.push_back(slot);
      found[place->second].work += slot->work;
    }
  }
  std::erase_if(found, [](const Memory& memory) {
    return memory.slots.front()->value.storage().use_count() != memory.slots.size() ||
           std::ranges::any_of(memory.slots,
                               [](const Slot* s) { return s->value.use_count() != 1; });
  });
  std::ranges::stable_sort(found, {}, &Memory::work);
  return found;
}

/// As many as give the bytes.
std::int64_t drop(c10::Device on, std::int64_t bytes) noexcept try {
  Device& device = device_of(on);
  std::vector<at::Tensor> dropped;  // ends after the lock: freed memory may call anything
  std::int64_t freed = 0;
  const std::lock_guard lock(device.mutex);
  for (const Memory& memory : droppable(device)) {
    if (freed >= bytes) {
      break;
    }
    freed += memory.slots.front()->bytes;
    for (Slot* const slot : memory.slots) {
      dropped.push_back(std::move(slot->value));
      slot->value = at::Tensor();
      ++device.counts.dropped;
      if (slot->step == device.number && slot->place < device.step.size()) {
        device.step[slot->place].goes = true;
        device.is_short = true;
      }
    }
  }
  device.counts.requests += freed > 0 ? 1 : 0;
  device.counts.dropped_bytes += freed;
  return freed;
} catch (const std::bad_alloc&) {  // of the lists above
  return 0;
}

}  // namespace

KeptWhileRoom::KeptWhileRoom() noexcept = default;
KeptWhileRoom::KeptWhileRoom(KeptWhileRoom&&) noexcept = default;

KeptWhileRoom& KeptWhileRoom::operator=(KeptWhileRoom&& other) noexcept {
  reset();
  slot_ = std::move(other.slot_);
  return *this;
}

KeptWhileRoom::~KeptWhileRoom() { reset(); }

void KeptWhileRoom::set(const at::Tensor& value, double work) {
  if (is_traced(value) || !value.has_storage() || value.numel() == 0) {
    return;
  }
  device_of(value.device()).begin(value.device());
  reset();
  auto slot = std::make_unique<Slot>();
  slot->value = value.tensor_data();
  slot->version = version_of(value).version;
  slot->bytes = static_cast<std::int64_t>(value.storage().nbytes());
  slot->work = work / static_cast<double>(value.element_size());
  slot->device = value.device();
  Device& device = device_of(slot->device);
  std::unique_lock lock(device.mutex);
  if (device.is_between_steps()) {
    lock.unlock();  // budgets have a lock of their own that is held during fork
    const std::int64_t limit = budget_in_force(slot->device).value_or(0);
    lock.lock();
    if (device.is_between_steps()) {
      device.begin_step(value, limit);
    }
  }
  slot->step = device.number;
  slot->place = device.step.size();
  const bool goes = device.is_planned(slot->place, slot->bytes);
  if (slot->place < kMostValues) {
    device.step.push_back({slot->bytes, slot->work, goes});
  }
  if (goes) {
    slot->value = at::Tensor();
    ++device.counts.foreseen;
    device.counts.foreseen_bytes += slot->bytes;
  }
  device.add(*slot);
  slot_ = std::move(slot);
}

at::Tensor KeptWhileRoom::get() const {
  if (slot_ == nullptr) {
    return {};
  }
  Device& device = device_of(slot_->device);
  const std::lock_guard lock(device.mutex);
  if (slot_->value.defined() && version_of(slot_->value).version == slot_->version) {
    return slot_->value;
  }
  ++device.counts.recomputed;
  return {};
}

void KeptWhileRoom::reset() noexcept {
  if (slot_ == nullptr) {
    return;
  }
  const std::unique_ptr<Slot> slot = std::move(slot_);  // its value ends after the lock
  Device& device = device_of(slot->device);
  const std::lock_guard lock(device.mutex);
  device.remove(*slot);
}

Pressure pressure() {
  Pressure result;
  for (Device& device : devices()) {
    const std::lock_guard lock(device.mutex);
    const Pressure& counts = device.counts;
    result.requests += counts.requests;
    result.dropped += counts.dropped;
    result.dropped_bytes += counts.dropped_bytes;
    result.foreseen += counts.foreseen;
    result.foreseen_bytes += counts.foreseen_bytes;
    result.recomputed += counts.recomputed;
    for (const Slot* slot = device.oldest; slot != nullptr; slot = slot->after) {
      result.values += slot->value.defined() ? 1 : 0;
      result.value_bytes += slot->value.defined() ? slot->bytes : 0;
    }
  }
  return result;
}

void reset_pressure() {
  for (Device& device : devices()) {
    const std::lock_guard lock(device.mutex);
    device.counts = {};
    device.plans.clear();
    device.plan = nullptr;
  }
}

}  // namespace brim::nn
