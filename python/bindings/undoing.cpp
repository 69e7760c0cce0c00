// What a block of Python code changes and puts back, in C++: Python delivers Ctrl-C between any two
// calls of Python code, also inside of `finally`, `__enter__` and `__exit__`, but never inside of
// C++.

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <brim/nn/saving.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.h"
#include "interpreter.h"
#include "python_error.h"

namespace brim::python {
namespace {

/// Errors of calls that must all be made: the first is kept, the others are dropped.
class FirstError {
 public:
  /// Calls the function; again as often as an interrupt stops it, which may be anywhere, and once
  /// more after an error: memory may have run out for a moment. That is dropped if it was cured.
  void guard(const py::object& call) {
    constexpr int kMostInterrupts = 100;  // more are of its own making
    for (int tries = 1;; ++tries) {
      const std::optional<py::error_already_set> error = failure_of(call);
      if (!error) {
        return;
      }
      const bool is_last = tries >= (is_interrupt(*error) ? kMostInterrupts : 2);
      if (is_last || !classify_python(error->value())) {
        note(*error);
      }
      if (is_last) {
        return;
      }
    }
  }

  /// An error of the block itself goes before one of putting back, but not before an interrupt.
  void raise(bool has_failed) {
    if (has_failed && first_ && !is_interrupt(*first_)) {
      log();
    } else if (first_) {
      const py::error_already_set error = *std::exchange(first_, std::nullopt);
      throw error;
    }
  }

  void log() noexcept {
    try {
      if (const auto error = std::exchange(first_, std::nullopt)) {
        const py::object logger =
            invoke(attribute(py::module_::import("logging"), "getLogger"), "brim");
        invoke(attribute(logger, "warning"), "not everything was put back: %s", error->value());
      }
    } catch (const py::error_already_set&) {
      // There is nobody left to tell.
    }
  }

 private:
  static std::optional<py::error_already_set> failure_of(const py::object& call) {
    try {
      invoke(call);
      return std::nullopt;
    } catch (const py::error_already_set& error) {
      return error;
    }
  }

  /// Exceptions that are no Exception.
  static bool is_interrupt(const py::error_already_set& error) {
    return !error.matches(PyExc_Exception);
  }

  /// An interrupt goes before errors.
  void note(const py::error_already_set& error) {
    if (!first_ || (is_interrupt(error) && !is_interrupt(*first_))) {
      first_.emplace(error);
    }
  }

  std::optional<py::error_already_set> first_;
};

/// What torch keeps for the calling thread, when this is made: modes, saved-tensor hooks, autocast,
/// whether gradients are recorded; and the region of brim.saving(). Not whether a profiler runs: it
/// may be started within a block and stopped after it, and only this half of its state belongs to
/// the thread.
class ThreadState {
 public:
  void put_back() const {
    const auto profiler = c10::ThreadLocalDebugInfo::current();
    // NOLINTNEXTLINE(performance-unnecessary-copy-initialization): the next line writes to it
    const at::RecordFunctionTLS profiler_callbacks = at::get_record_function_tls_();
    at::ThreadLocalState::setThreadLocalState(state_);
    at::set_record_function_tls_(profiler_callbacks);
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(profiler);
    nn::Saving::set_state(regions_);
    at::autocast::set_autocast_cache_enabled(caches_casts_);
    bool is_left_open = false;
    while (at::autocast::decrement_nesting() >= nesting_) {
      is_left_open = true;
    }
    while (at::autocast::increment_nesting() < nesting_) {
    }
    if (is_left_open && nesting_ == 0) {
      at::autocast::clear_cache();  // as the end of that region would have: weights may change
    }
  }

 private:
  static int nesting_now() {
    at::autocast::increment_nesting();
    return at::autocast::decrement_nesting();
  }

  at::ThreadLocalState state_;
  nn::Saving::State regions_ = nn::Saving::state();
  bool caches_casts_ = at::autocast::is_autocast_cache_enabled();
  int nesting_ = nesting_now();
};

/// The block of `_C.Undoing`.
class Undoing {
 public:
  Undoing() = default;
  Undoing(const Undoing&) = delete;
  Undoing& operator=(const Undoing&) = delete;

  /// Ends a block that has not ended, because an interrupt fell on its end.
  ~Undoing() {
    const py::error_scope pending;
    FirstError errors;
    close(errors);
    errors.log();
  }

  void enter() {
    TORCH_CHECK(!state_, "this block is open already: use a second one to nest");
    state_.emplace();
    thread_ = std::this_thread::get_id();
    open_blocks().push_back(this);
  }

  void callback(py::object call) { calls_.push_back(std::move(call)); }

  void afterwards(py::object call) { afterwards_.push_back(std::move(call)); }

  void keep() { calls_.clear(); }

  /// What is to be called once the block has ended without an error.
  std::vector<py::object> take_afterwards() { return std::exchange(afterwards_, {}); }

  /// Makes the calls, the last first, and sets this thread's state to that of the beginning. Blocks
  /// that this thread began inside of this one and has not ended go first. Only the calls are made
  /// where the block is of another thread.
  void close(FirstError& errors) {
    std::vector<Undoing*>& open = open_blocks();
    const auto now = std::this_thread::get_id();
    while (state_) {
      const auto last = std::find_if(open.rbegin(), open.rend(), [&](const Undoing* each) {
        return each == this || (thread_ == now && each->thread_ == now);
      });
      Undoing* const inner = *last;
      open.erase(std::next(last).base());
      inner->put_back(inner->thread_ == now, errors);
    }
  }

 private:
  /// Of all threads, in the order of their beginning. The GIL protects it.
  static std::vector<Undoing*>& open_blocks() {
    static std::vector<Undoing*> blocks;
    return blocks;
  }

  void put_back(bool is_own_thread, FirstError& errors) {
    const std::optional<ThreadState> state = std::exchange(state_, std::nullopt);
    // Before the calls, which must not run in a mode that the block left, and after them, as an
    // interrupted one may have left another.
    if (is_own_thread) {
      state->put_back();
    }
    while (!calls_.empty()) {
      const py::object call = std::move(calls_.back());
      calls_.pop_back();
      errors.guard(call);
    }
    if (is_own_thread) {
      state->put_back();
    }
  }

  std::vector<py::object> calls_;
  std::vector<py::object> afterwards_;
  std::optional<ThreadState> state_;  ///< while it is open
  std::thread::id thread_;
};

}  // namespace

void register_undoing(py::module_& m) {
  py::class_<Undoing>(m, "Undoing", R"(A `with` block that puts back what it changes.

At its end, also if an interrupt falls on it, every callback is called, the last first, and what
torch keeps per thread is as before: modes, saved-tensor hooks, autocast, whether gradients are
recorded. A callback must be registered before the change that it undoes, and sets a value: it may
be called twice.
)")
      .def(py::init<>())
      .def("__enter__",
           [](const py::object& self) {
             self.cast<Undoing&>().enter();
             return self;
           })
      .def("__exit__",
           [](Undoing& self, const py::object& /*type*/, const py::object& error,
              const py::object& /*traceback*/) {
             FirstError errors;
             self.close(errors);
             errors.raise(!error.is_none());
             for (const py::object& call : self.take_afterwards()) {
               if (error.is_none()) {
                 invoke(call);
               }
             }
           })
      .def(
          "callback", [](Undoing& self, py::object call) { self.callback(std::move(call)); },
          "Call a function without arguments at the end.")
      .def(
          "afterwards", [](Undoing& self, py::object call) { self.afterwards(std::move(call)); },
          "Call a function once all is put back, if the block did not fail.")
      .def("keep", &Undoing::keep, "Keep what was changed: forget the callbacks.");
}

}  // namespace brim::python
