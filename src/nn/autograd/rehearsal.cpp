#include <brim/nn/rehearsal.h>

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>
#include <limits>
#include <utility>

#include "nn/autograd/slots.h"

namespace brim::nn {
namespace {

constinit std::atomic<const void*> mode_in_force{nullptr};  // null: nothing is rehearsed
c10::DeviceType its_type = c10::DeviceType::CPU;            // written before it is in force
c10::Device its_device = c10::DeviceType::CPU;

const void* fake_mode_here() {
  using c10::impl::TorchDispatchModeKey;
  const auto mode = c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE);
  return mode && *mode != nullptr ? (*mode)->ptr(&(*mode)->pyinterpreter()) : nullptr;
}

}  // namespace

bool is_rehearsed(const at::Tensor& tensor) {
  const void* const mode = mode_in_force.load(std::memory_order_acquire);
  return mode != nullptr && tensor.key_set().has(c10::DispatchKey::Python) &&
         fake_mode_here() == mode;
}

c10::DeviceType rehearsed_type() { return its_type; }

c10::Device rehearsed_device() { return its_device; }

Rehearsal::Rehearsal(const AllocatorOptions& options, bool grows, c10::DeviceType type,
                     c10::Device seen, const void* mode)
    : model_(options),
      capacity_(options.capacity),
      grows_(grows),
      type_(type),
      seen_(seen),
      mode_(mode) {}

Rehearsal::~Rehearsal() { end(); }

void Rehearsal::begin() {
  TORCH_CHECK(mode_in_force.load() == nullptr, "a call that is estimated cannot estimate another");
  its_type = type_;
  its_device = seen_;
  goes_on_ = true;
  mode_in_force.store(mode_, std::memory_order_release);
}

void Rehearsal::end() {
  if (std::exchange(goes_on_, false)) {
    mode_in_force.store(nullptr);
    rehearsed_slots().end_rehearsal();
  }
}

std::int64_t Rehearsal::hold(std::int64_t bytes) {
  if (grows_ && capacity_ < AllocatorOptions::kUnlimited - bytes) {
    capacity_ += bytes;
  }
  return allocate_anyway(bytes);
}

std::int64_t Rehearsal::allocate(std::int64_t bytes) {
  while (true) {
    if (const auto number = model_.allocate(bytes)) {
      return *number;
    }
    // As the allocators of the devices ask for it: what a budget lacks, or the whole request.
    const AllocatorOptions& options = model_.options();
    const std::int64_t lacks = options.kind == AllocatorKind::exact || options.beyond > 0
                                   ? model_.now().allocated + bytes - capacity_
                                   : 0;
    const std::int64_t missing = capacity_ == 0 ? std::numeric_limits<std::int64_t>::max()
                                 : lacks > 0    ? lacks
                                                : bytes;
    if (!goes_on_ || rehearsed_slots().drop(missing) == 0) {
      return allocate_anyway(bytes);
    }
  }
}

std::int64_t Rehearsal::allocate_anyway(std::int64_t bytes) {
  model_.set_capacity(AllocatorOptions::kUnlimited);
  const std::int64_t number = *model_.allocate(bytes);
  model_.set_capacity(capacity_);
  return number;
}

void Rehearsal::free(std::int64_t number) { model_.free(number); }

void Rehearsal::empty_cache() { model_.empty_cache(); }

bool Rehearsal::keeps_while_room() const { return rehearsed_slots().have_begun(); }

Pressure Rehearsal::pressure() const {
  DeviceSlots& slots = rehearsed_slots();
  const std::lock_guard lock(slots.mutex);
  return slots.counts;
}

}  // namespace brim::nn
