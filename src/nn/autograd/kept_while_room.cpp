#include "nn/autograd/kept_while_room.h"

#include <optional>
#include <utility>

#include "nn/autograd/node.h"
#include "nn/autograd/slots.h"

namespace brim::nn {

KeptWhileRoom::KeptWhileRoom() noexcept = default;
KeptWhileRoom::KeptWhileRoom(KeptWhileRoom&&) noexcept = default;

KeptWhileRoom& KeptWhileRoom::operator=(KeptWhileRoom&& other) noexcept {
  reset();
  slot_ = std::move(other.slot_);
  return *this;
}

KeptWhileRoom::~KeptWhileRoom() { reset(); }

void KeptWhileRoom::set(const at::Tensor& value, double work) {
  DeviceSlots* const device = slots_for(value);
  if (device == nullptr || !value.has_storage() || value.numel() == 0) {
    return;
  }
  reset();
  slot_ = slot_for(value, *device, work / static_cast<double>(value.element_size()));
  Block::stop_if_all_is_there();
}

at::Tensor KeptWhileRoom::get() const { return slot_ == nullptr ? at::Tensor() : value_of(*slot_); }

TimedAgain KeptWhileRoom::timed() const noexcept {
  return TimedAgain(slot_ == nullptr ? nullptr : slot_->among);
}

void KeptWhileRoom::reset() noexcept {
  if (slot_ != nullptr) {
    end_slot(std::move(slot_));
  }
}

}  // namespace brim::nn
