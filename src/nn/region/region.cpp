#include "nn/region/region.h"

#include <ATen/TracerMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "nn/autograd/known.h"
#include "nn/autograd/node.h"
#include "only_copy.h"

namespace brim::nn {
namespace {

thread_local Saving::State here;
thread_local std::vector<Saving::Region> regions_left;

}  // namespace

Saving::Saving(Recompute recompute) : before_(here) { set_state(within(recompute, false)); }

Saving::~Saving() { set_state(before_); }

Saving::State Saving::state() noexcept { return here; }

void Saving::set_state(const State& state) noexcept {
  here = state;
  if (state.left < regions_left.size()) {
    regions_left.resize(state.left);
  }
  c10::impl::tls_set_dispatch_key_included(kRegionKey, state.now.is_open && !state.is_paused);
}

Saving::State Saving::within(Recompute recompute, bool of_module) {
  State state = here;
  // A second copy of libbrim has registered nothing: torch would find no kernel for the key.
  state.now = {.is_open = is_first_copy(), .recompute = recompute, .hooks = hooks_in_force()};
  if (state.now.is_open) {
    register_redirections();
  }
  if (!of_module) {
    state.users = state.now;
  }
  return state;
}

void Saving::leave() {
  regions_left.push_back(here.now);
  State state = here;
  state.now = state.users;
  ++state.left;
  set_state(state);
}

void Saving::come_back() noexcept {
  if (!regions_left.empty()) {
    State state = here;
    state.now = regions_left.back();
    --state.left;
    set_state(state);
  }
}

bool is_redirected(const at::Tensor& input) {
  return here.now.is_open && here.now.hooks == hooks_in_force() &&
         !at::tracer::impl::is_dispatch_enabled() && is_known(input) && !is_compiled(input);
}

Recompute recompute_here() noexcept { return here.now.recompute; }

}  // namespace brim::nn
