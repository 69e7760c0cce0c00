#pragma once

// Works of many kinds that exist only as sequences of allocations and frees, run on a model of a
// device's allocator, and calls of them as adapt's driver makes them.

#include <brim/adapt/size_memory.h>
#include <brim/need/size_search.h>
#include <brim/need/trace.h>
#include <brim/predict/allocator_model.h>
#include <brim/predict/memory_trace.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "adapt/detail/attempt_history.h"
#include "adapt/detail/attempt_monitor.h"
#include "need/memory_simulation.h"

namespace brim::simulation {

/// How long what a step allocates lives.
enum class Life : std::uint8_t {
  call,      ///< until the end of the call, unless another step frees it
  result,    ///< until the call has returned
  replaced,  ///< until the next call begins: gradients, with zero_grad() at the start
  once,      ///< until a step frees it, and made only where it is not there yet: an optimizer's
             ///< state; with a step that frees it before, gradients that zero_grad() drops there
  assigned,  ///< until the next call has made its own: the last loss or output, kept in a variable
  piles,     ///< for good, and each call makes one more: a list of results
};

/// Growing bytes are in units that are scaled until the program needs all of the available bytes at
/// the largest size, constant ones a share of the available bytes.
struct Step {
  double constant = 0, linear = 0, square = 0, cube = 0;
  double padding = 1;  // sizes are rounded up to multiples of it
  Life life = Life::call;
  bool optional = false;     // a workspace: if it is refused, the work goes on without
  bool inside = false;       // by the operator of the step before
  double above = 0;          // only at sizes above this share of the largest: another kernel
  std::ptrdiff_t free = -1;  // releases what that step allocated, and allocates nothing
};
using Program = std::vector<Step>;

inline Step grows(double linear) { return {.linear = linear}; }
inline Step square(double factor) { return {.square = factor}; }
inline Step constant(double share, Life life = Life::call) {
  return {.constant = share, .life = life};
}
inline Step frees(std::ptrdiff_t step) { return {.free = step}; }

inline Program held(int tensors, const std::function<double(int)>& bytes, double share = 0) {
  Program program;
  if (share > 0) {
    program.push_back(constant(share));
  }
  for (int i = 0; i < tensors; ++i) {
    program.push_back(grows(bytes(i)));
  }
  return program;
}

// Each layer needs its input only.
inline Program freed(int tensors, Random& random) {
  Program program;
  std::vector<std::ptrdiff_t> made;
  for (int i = 0; i < tensors; ++i) {
    made.push_back(std::ssize(program));
    program.push_back(grows(random.real(0.2, 1)));
    if (i >= 2) {
      program.push_back(frees(made[made.size() - 3]));
    }
  }
  return program;
}

struct Training {
  double gradients = 0;              // share of the available bytes
  double temporaries = 0;            // of the optimizer's step
  double state = 0;                  // of the optimizer, made in the first step
  double workspace = 0;              // of each layer
  Life gradients_live = Life::call;  // Life::call: zero_grad() at the end
};

// Forward keeps activations, backward releases them and makes gradients, then the optimizer steps.
inline Program training(const std::vector<double>& widths, const Training& options) {
  Program program;
  const auto layers = static_cast<double>(widths.size());
  const auto workspace = [&] {
    if (options.workspace > 0) {
      program.push_back(constant(options.workspace));
      program.push_back(frees(std::ssize(program) - 1));
    }
  };
  std::vector<std::ptrdiff_t> kept;
  for (const double width : widths) {
    kept.push_back(std::ssize(program));
    program.push_back(grows(width));
    workspace();
  }
  std::ptrdiff_t flowing = std::ssize(program);
  program.push_back(grows(widths.back()));
  for (std::size_t i = widths.size() - 1; i > 0; --i) {
    if (options.gradients > 0) {
      program.push_back(constant(options.gradients / layers, options.gradients_live));
    }
    const std::ptrdiff_t next = std::ssize(program);
    program.push_back(grows(widths[i - 1]));
    workspace();
    program.push_back(frees(flowing));
    program.push_back(frees(kept[i]));
    flowing = next;
  }
  program.push_back(frees(flowing));
  program.push_back(constant(options.state, Life::once));
  program.push_back(constant(options.temporaries));
  return program;
}

inline std::vector<double> random_widths(int layers, Random& random) {
  std::vector<double> widths(static_cast<std::size_t>(layers));
  std::ranges::generate(widths, [&] { return random.real(0.3, 1); });
  return widths;
}

// The activations of a ResNet-50: four stages of blocks of three convolutions, each with a
// normalization that keeps its input.
inline std::vector<double> resnet_widths() {
  std::vector<double> widths{4, 4, 1};
  double width = 1;
  for (const int blocks : {3, 4, 6, 3}) {
    for (int i = 0; i < blocks; ++i) {
      for (const double times : {1.0, 1.0, 1.0, 1.0, 4.0, 4.0}) {
        widths.push_back(times * width);
      }
    }
    width /= 2;
  }
  return widths;
}

/// A program on a device. What lives longer than a call stays there from run to run, as does the
/// allocator's cache.
class Work {
 public:
  /// @param largest about the largest size that will fit.
  Work(Program program, double largest, std::int64_t available, AllocatorKind kind)
      : program_(std::move(program)), unit_(largest), kept_(program_.size()) {
    // In exact bytes, whatever the device.
    reset(AllocatorKind::exact, available);
    double fits = 0;
    double fails = 1e3 * static_cast<double>(available);
    for (int i = 0; i < 60; ++i) {
      scale_ = (fits + fails) / 2;
      (fits_steadily(largest) ? fits : fails) = scale_;
    }
    scale_ = fits;
    reset(kind, available);
  }

  /// What the driver would measure of an attempt.
  /// @param events what it asked for and freed; null: not recorded.
  Attempt run(std::int64_t size, std::vector<AllocationEvent>* events = nullptr) {
    return run_at(static_cast<double>(size), events);
  }

  /// Two calls, as if traced on fake tensors.
  [[nodiscard]] MemoryTrace traced(std::int64_t size) const {
    Work copy = *this;
    copy.device_ = AllocatorModel({.kind = AllocatorKind::exact});
    std::ranges::fill(copy.kept_, std::nullopt);
    MemoryTrace trace;
    std::unordered_map<std::uintptr_t, std::int64_t> made;
    for (int i = 0; i < 2; ++i) {
      if (i > 0) {
        trace.begin_call();
      }
      Events events;
      copy.run(size, &events);
      copy.release_all(Life::result, &events);
      for (const AllocationEvent& event : events) {
        if (event.freed) {
          trace.free(made[event.address]);
        } else {
          const std::int32_t place = trace.place(std::to_string(event.name));
          made[event.address] = trace.allocate(event.bytes, MemoryKind::other, place);
        }
      }
    }
    return trace;
  }

  /// The caller drops what the call has returned.
  void drop_result() { release_all(Life::result, nullptr); }

  /// The largest size that fits from an empty cache, once what lives longer is there.
  [[nodiscard]] std::int64_t largest() const {
    std::int64_t fits = 0;
    for (std::int64_t fails = 4 * static_cast<std::int64_t>(unit_) + 4; fails - fits > 1;) {
      const std::int64_t middle = fits + (fails - fits) / 2;
      (fits_steadily(static_cast<double>(middle)) ? fits : fails) = middle;
    }
    return fits;
  }

  [[nodiscard]] bool is_in_use(std::int64_t address) const { return seen_.contains(address); }
  [[nodiscard]] bool packs() const { return device_.options().kind == AllocatorKind::exact; }
  [[nodiscard]] std::int64_t available() const { return capacity() - device_.now().allocated; }
  [[nodiscard]] std::int64_t capacity() const { return device_.options().capacity; }
  [[nodiscard]] AllocatorModel& device() { return device_; }

 private:
  using Events = std::vector<AllocationEvent>;

  void reset(AllocatorKind kind, std::int64_t capacity) {
    device_ = AllocatorModel({.kind = kind, .capacity = capacity});
    total_ = capacity;
    std::ranges::fill(kept_, std::nullopt);
    seen_.clear();
  }

  /// The device's memory ends anywhere between the needs of two sizes, so a size may be a fraction.
  Attempt run_at(double size, Events* events) {
    const std::int64_t start = device_.now().allocated;
    device_.reset_peak();
    running_ = 0;
    release_all(Life::replaced, events);
    Attempt attempt{.values = {static_cast<std::int64_t>(size)}};
    for (std::size_t i = 0; i < program_.size() && attempt.fitted(); ++i) {
      const Step& step = program_[i];
      running_ += step.inside ? 0 : 1;
      if (step.free >= 0) {
        release(kept_[static_cast<std::size_t>(step.free)], events);
      } else if ((!kept_[i] || step.life == Life::assigned || step.life == Life::piles) &&
                 size > step.above * unit_) {
        const std::int64_t bytes = bytes_of(step, size);
        auto made = device_.allocate(bytes);
        if (made) {
          note(*made, false, events);
          std::swap(kept_[i], made);
          if (step.life == Life::assigned) {
            release(made, events);
          }
          continue;
        }
        if (events != nullptr) {
          events->push_back(event_of({.bytes = bytes, .refused = true}));
        }
        if (!step.optional) {
          attempt.outcome = OomKind::device_memory;
          attempt.requested = bytes;
          attempt.peak = std::max<std::int64_t>(device_.now().allocated - start, 0);
        }
      }
    }
    if (attempt.fitted()) {
      attempt.peak = device_.peak().allocated - start;
    }
    release_all(Life::call, events);
    if (!attempt.fitted()) {
      release_all(Life::result, events);
    }
    attempt.held = start;
    attempt.left = device_.now().allocated - start;
    attempt.available = capacity() - start;
    return attempt;
  }

  [[nodiscard]] AllocationEvent event_of(AllocationEvent event) const {
    event.operation = running_;
    event.name = event.path = static_cast<std::uint64_t>(running_) + 1;
    return event;
  }

  void note(std::int64_t allocation, bool freed, Events* events) {
    const AllocatorBlock block = device_.block(allocation);
    if (block.size == 0) {
      return;
    }
    // Exact bytes have no place: any number that tells them apart.
    const std::int64_t address = packs() ? allocation : block.address;
    if (freed) {
      seen_.erase(address);
    } else if (events != nullptr) {
      seen_.insert(address);
    }
    if (events != nullptr) {
      events->push_back(event_of({.address = static_cast<std::uintptr_t>(address),
                                  .bytes = block.requested,
                                  .freed = freed}));
    }
  }

  void release(std::optional<std::int64_t>& allocation, Events* events) {
    if (allocation) {
      note(*allocation, true, events);
      device_.free(*std::exchange(allocation, std::nullopt));
    }
  }

  void release_all(Life life, Events* events) {
    for (std::size_t i = 0; i < program_.size(); ++i) {
      if (program_[i].life == life) {
        release(kept_[i], events);
      }
    }
  }

  [[nodiscard]] bool fits_steadily(double size) const {
    Work copy = *this;
    copy.run(1);
    copy.drop_result();
    copy.device_.empty_cache();
    const int times = packs() ? 2 : 6;
    for (int i = 0; i < times; ++i) {
      if (!copy.run_at(size, nullptr).fitted()) {
        return false;
      }
      copy.drop_result();
    }
    return true;
  }

  [[nodiscard]] std::int64_t bytes_of(const Step& step, double size) const {
    const double padded = step.padding > 1 ? std::ceil(size / step.padding) * step.padding : size;
    const double x = padded / unit_;
    const double bytes = step.constant * static_cast<double>(total_) +
                         scale_ * (step.linear * x + step.square * x * x + step.cube * x * x * x);
    constexpr auto kMost = static_cast<double>(AllocatorModel::kLargestRequest);
    return static_cast<std::int64_t>(std::min(bytes, kMost));
  }

  Program program_;
  double unit_;
  double scale_ = 1;
  std::int64_t total_ = 0;                         // of which constant bytes are a share
  std::vector<std::optional<std::int64_t>> kept_;  // by step: what it allocated
  std::unordered_set<std::int64_t> seen_;          // recorded, and in use
  std::int32_t running_ = 0;                       // the operator
  AllocatorModel device_;
};

struct Call {
  int failures = 0;
  std::int64_t first = 0;  // the size that was tried first
  std::int64_t size = 0;   // that fitted; 0: none
};

/// A call as the driver makes it.
/// @param tried told of each size, with what was available, before it is tried.
/// @param foreseen traced on fake tensors.
inline Call call(Work& work, SizeSearchOptions options, std::vector<Attempt>& memory,
                 Shows shows = Shows::trace,
                 const std::function<void(const SizeSearch&, std::int64_t)>& tried = {},
                 const std::vector<Attempt>& foreseen = {}) {
  const auto in_use = [&](std::int64_t address) { return work.is_in_use(address); };
  if (!memory.empty() || !foreseen.empty()) {
    options.circumstances.available = work.available();
  }
  options.circumstances.packs = work.packs();
  options.circumstances.in_use = in_use;
  options.circumstances.allocator = [&]() -> std::optional<AllocatorModel> {
    return AllocatorModel(work.device().options(), work.device().segments());
  };
  SizeSearch search(options);
  std::vector<Attempt> all = foreseen;
  all.insert(all.end(), memory.begin(), memory.end());
  search.remember(all);
  const std::vector<Attempt> known = memory;
  const Attempt* last = detail::last_fit(known);
  std::int64_t cached = last == nullptr ? search.next() : last->size();
  std::vector<std::shared_ptr<const Trace>> failed;
  std::optional<Attempt> needed_release;
  for (Call result{.first = search.next()};; ++result.failures) {
    const bool new_size = search.next() != cached && !needed_release;
    const bool released = new_size || needed_release;
    if (new_size && !work.packs()) {
      work.device().empty_cache();
    }
    if (tried && !needed_release) {
      tried(search, work.available());
    }
    std::vector<AllocationEvent> events;
    const bool records = shows == Shows::trace && (released || detail::still_moving(known));
    Attempt attempt = work.run(search.next(), records ? &events : nullptr);
    if (attempt.fitted()) {
      if (!events.empty()) {
        attempt.trace = trace_of(events, true, detail::last_trace(known).get(), failed, in_use);
      }
      add_attempt(memory, attempt);
      if (needed_release) {
        add_attempt(memory, *needed_release);
      }
      work.drop_result();
      result.size = attempt.size();
      return result;
    }
    if (!events.empty()) {
      attempt.trace = trace_of(events, false);
      failed.push_back(attempt.trace);
    }
    needed_release.reset();
    if (!work.packs() && !released &&
        should_have_fitted({.requested = attempt.requested, .in_use = attempt.held + *attempt.peak},
                           work.capacity())) {
      work.device().empty_cache();
      needed_release = attempt;
      continue;
    }
    attempt.expected = search.expected();
    add_attempt(memory, attempt);
    search.record(attempt);
    cached = 0;
    if (search.finished() && !search.best()) {
      ++result.failures;
      return result;
    }
  }
}

}  // namespace brim::simulation
