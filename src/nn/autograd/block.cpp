#include <brim/nn/block.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/TracerMode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <brim/nn/rehearsal.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "memory/backend.h"
#include "nn/autograd/circumstances.h"
#include "nn/autograd/for_this_backward.h"
#include "nn/autograd/node.h"
#include "nn/autograd/slots.h"

namespace brim::nn {
namespace {

std::uint64_t next_run() {
  static std::atomic<std::uint64_t> runs{0};
  return ++runs;
}

/// An accelerator, if one of them is there.
const at::Tensor& first_of(const std::vector<at::Tensor>& inputs) {
  const auto found = std::ranges::find_if(inputs, [](const auto& x) { return !x.is_cpu(); });
  return found != inputs.end() ? *found : inputs.front();
}

/// @param limit in force, 0 for none
BlockCall call_of(const void* part, const std::vector<at::Tensor>& inputs, std::int64_t limit) {
  BlockCall call{.part = c10::get_hash(part, limit), .sizes = {}};
  for (const at::Tensor& input : inputs) {
    call.sizes.insert(call.sizes.end(), input.sizes().begin(), input.sizes().end());
    call.part = c10::get_hash(call.part, input.dim(), static_cast<int>(input.scalar_type()));
  }
  return call;
}

std::size_t kind_of(const BlockCall& call) { return c10::get_hash(call.part, call.sizes); }

BlockSlots::Read read_of(const at::Tensor& tensor) {
  return {tensor.unsafeGetTensorImpl()->version_counter(), version_of(tensor).version};
}

/// Whether it is held by others anyway, or cannot be given up like other tensors.
bool stays(const at::Tensor& tensor, const DeviceSlots& device) {
  return (tensor.is_leaf() && tensor.requires_grad()) || slots_for(tensor) != &device ||
         !tensor.has_storage() || tensor.numel() == 0;
}

/// After a run that failed: what it gave is let go.
void forget_values(BlockSlots& block, DeviceSlots& device) {
  std::vector<at::Tensor> forgotten;  // end after the lock
  const std::lock_guard lock(device.mutex);
  for (Slot* const slot : block.values) {
    if (slot != nullptr && slot->shape != 0) {
      forgotten.push_back(std::exchange(slot->value, at::Tensor()));
    }
  }
  block.has_run = false;
}

}  // namespace

struct Block::State {
  State(const at::Tensor& first, DeviceSlots& among, std::string called)
      : name(std::move(called)),
        device(first.device()),
        circumstances(among.are_rehearsed()
                          ? Circumstances(c10::DeviceType::CPU, rehearsed_type())
                          : Circumstances(first.device(), first.device().type())) {
    own.among = &among;
  }

  /// Of the device; nothing in a rehearsal.
  [[nodiscard]] PeakReading use() const {
    return own.among->are_rehearsed() ? PeakReading{} : backend_for(device).peak(device);
  }

  std::string name;
  c10::Device device;
  BlockCall shapes;       // of the call
  std::size_t kind = 0;   // of the same
  std::int64_t held = 0;  // on the device, when it began
  std::int64_t gone = 0;  // values there, until then
  Circumstances circumstances;
  BlockSlots slots;
  Slot own;  // without a value: the step goes on for as long as the block is there
  std::function<void()> call;
  std::optional<TimedAgain> timed;  // its first run, where it is not known how long that takes
  std::mutex mutex;                 // several threads of backward may ask
};

// -- What autograd saved -------------------------------------------------------------------------

Block::Saved::Saved(Saved&&) noexcept = default;

Block::Saved::~Saved() {
  if (slot_ != nullptr) {
    end_slot(std::move(slot_));
  }
}

// What a slot holds stays its own, so that it needs no GIL to end.

at::Tensor Block::Saved::get_if_there() const {
  if (slot_ == nullptr) {
    return version_of(value_).version == version_ ? value_ : at::Tensor();
  }
  const at::Tensor value = value_if_there(*slot_);
  return value.defined() ? value.tensor_data() : value;
}

at::Tensor Block::Saved::get() const {
  const at::Tensor value = slot_ == nullptr ? get_if_there() : value_of(*slot_);
  TORCH_CHECK(value.defined(),
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation");
  return slot_ == nullptr ? value : value.tensor_data();
}

Block::Saved Block::save(const at::Tensor& tensor) {
  const RunningBlock& running = running_block();
  Saved saved;
  if (running.block != nullptr && !stays(tensor, *running.among)) {
    saved.slot_ = slot_for(tensor, *running.among, StepValue::kBlock);
  }
  if (saved.slot_ == nullptr) {
    // A leaf as it is: FSDP may give it other memory.
    saved.value_ = is_traced_by_others(tensor) || tensor.is_leaf() ? tensor : tensor.tensor_data();
    saved.version_ = version_of(tensor).version;
  }
  return saved;
}

// -- The block -----------------------------------------------------------------------------------

bool Block::can_begin(const std::vector<at::Tensor>& inputs) {
  const auto is_plain = [](const at::Tensor& input) {
    return !is_traced_by_others(input) && input.has_storage();
  };
  const auto can_be_kept = [](const at::Tensor& input) {
    const DeviceSlots* const device = slots_for(input);
    return device != nullptr &&
           (device->are_rehearsed() || !backend_for(input.device()).is_capturing());
  };
  return at::GradMode::is_enabled() && !inputs.empty() && running_block().block == nullptr &&
         at::SavedTensorDefaultHooks::is_enabled() &&
         at::SavedTensorDefaultHooks::get_tls_state().stack.empty() &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
         !at::tracer::impl::is_dispatch_enabled() &&
         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradOther) &&
         std::ranges::all_of(inputs, is_plain) && can_be_kept(first_of(inputs));
}

bool Block::may_run_short(const void* part, const std::vector<at::Tensor>& inputs) {
  const c10::Device on = first_of(inputs).device();
  DeviceSlots& device = *slots_for(first_of(inputs));
  if (device.are_rehearsed()) {
    return true;
  }
  const std::int64_t limit = budget_in_force(on).value_or(0);
  const std::int64_t held = backend_for(on).peak(on).current;
  device.begin(on);
  std::unique_lock lock(device.mutex);
  const BlockCall call = call_of(part, inputs, limit);
  if (device.passes_block(lock, first_of(inputs), kind_of(call))) {
    return false;
  }
  const std::optional<std::int64_t> room = device.needs.room_for(call);
  return !room || *room > device.recent_room(lock, limit, held);
}

Block::Block(std::unique_ptr<State> state) : state_(std::move(state)) {}

std::shared_ptr<Block> Block::begin(const void* part, const std::vector<at::Tensor>& inputs,
                                    std::string name) {
  const at::Tensor& first = first_of(inputs);
  DeviceSlots& device = *slots_for(first);
  const std::shared_ptr<Block> block(
      new Block(std::make_unique<State>(first, device, std::move(name))));
  State& state = *block->state_;
  state.shapes =
      call_of(part, inputs, device.are_rehearsed() ? 0 : budget_in_force(state.device).value_or(0));
  state.kind = kind_of(state.shapes);
  for (const at::Tensor& input : inputs) {
    state.slots.reads.push_back(read_of(input));
  }
  device.begin(state.device);
  state.held = state.use().current;
  std::unique_lock lock(device.mutex);
  device.begin_step_if_none(lock, first);
  state.gone = device.counts.dropped + device.counts.foreseen;
  BlockSlots& slots = state.slots;
  slots.backward = backward_now();
  slots.goes =
      device.take_place(slots.step, slots.place, {.work = StepValue::kBlock, .part = state.kind});
  device.add(state.own);
  const bool is_known = device.times.of(state.kind) != 0;
  lock.unlock();
  if (!is_known) {
    state.timed.emplace(&device, state.kind, /*counts=*/false);
  }
  running_block() = {.block = block.get(), .slots = &slots, .among = &device, .number = next_run()};
  return block;
}

void Block::end(const std::vector<at::Tensor>& reads, std::function<void()> run_again) {
  running_block() = {};
  State& state = *state_;
  state.timed.reset();
  BlockSlots& slots = state.slots;
  const bool can_go = run_again != nullptr && slots.is_untouched();
  for (const at::Tensor& tensor : reads) {
    slots.reads.push_back(read_of(tensor));
  }
  DeviceSlots& device = *state.own.among;
  std::vector<at::Tensor> dropped;  // ends after the lock
  const std::lock_guard lock(device.mutex);
  if (can_go && !slots.is_used) {
    slots.can_go = true;
    state.call = std::move(run_again);
    device.end_block(slots, dropped);
  }
}

Block::~Block() {
  DeviceSlots& device = *state_->own.among;
  const std::int64_t need = state_->use().peak - state_->held;
  const std::lock_guard lock(device.mutex);
  if (state_->gone == device.counts.dropped + device.counts.foreseen) {
    device.needs.set(state_->shapes, need);
  } else {
    device.needs.forget(state_->shapes);  // unknown: without what had to go it would be more
  }
  if (!state_->slots.is_untouched()) {
    device.keep_next_time(state_->slots);
  }
  device.remove(state_->own);
}

at::Tensor Block::without_past(const at::Tensor& tensor) {
  if (tensor.grad_fn() == nullptr) {
    return tensor;
  }
  const at::AutoGradMode with_grad(true);
  return at::alias(tensor.detach().set_requires_grad(true));
}

bool Block::has_all() {
  const RunningBlock& running = running_block();
  return running.is_again && !running.is_other && running.next == running.slots->values.size();
}

void Block::stop_if_all_is_there() {
  if (has_all()) {
    // Without a backtrace, which TORCH_CHECK would add.
    throw c10::Error("a block ran again as far as it must", nullptr);
  }
}

void Block::run_again() {
  State& state = *state_;
  BlockSlots& slots = state.slots;
  const std::lock_guard once(state.mutex);
  DeviceSlots& device = *state.own.among;
  {
    const std::lock_guard lock(device.mutex);
    if (std::exchange(slots.has_run, true)) {
      return;
    }
    ++device.counts.blocks;
  }
  const TimedAgain timed(&device, state.kind);
  const RunningBlock before = std::exchange(
      running_block(),
      {.block = this, .slots = &slots, .among = &device, .number = next_run(), .is_again = true});
  try {
    TORCH_CHECK(slots.is_untouched(), "what ", state.name,
                " reads has been modified by an inplace operation since its forward, and memory "
                "was too short to keep what its backward needs");
    state.circumstances.run(state.call);
    TORCH_CHECK(has_all(), kOtherValues);
  } catch (...) {
    if (!has_all()) {
      running_block() = before;
      forget_values(slots, device);
      throw;
    }
  }
  running_block() = before;
}

}  // namespace brim::nn
