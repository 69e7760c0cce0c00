#pragma once

#include <ATen/core/grad_mode.h>
#include <brim/nn/saving.h>
#include <c10/core/Device.h>

#include <functional>

#include "nn/autograd/autocast.h"
#include "nn/autograd/random_state.h"

namespace brim::nn {

/// What a call depends on beside its arguments, in this thread and at this moment: random numbers,
/// autocast and the region.
struct Circumstances {
  /// @param type of the device whose autocast counts
  Circumstances(c10::Device on, c10::DeviceType type) : device(on), random(on), autocast(type) {}

  /// In these circumstances, and recorded.
  void run(const std::function<void()>& work) const {
    const WithRandomState with_random(random, device);
    const AutocastAs with_autocast(autocast);
    const at::AutoGradMode with_grad(true);
    Saving::State state = region;
    const Saving::State before = Saving::state();
    state.left = before.left;
    Saving::set_state(state);
    try {
      work();
    } catch (...) {
      Saving::set_state(before);
      throw;
    }
    Saving::set_state(before);
  }

  c10::Device device;
  RandomState random;
  AutocastState autocast;
  Saving::State region = Saving::state();
};

}  // namespace brim::nn
