#pragma once

// Works of many kinds that exist only as sequences of allocations and frees, run on a model of a
// device's allocator.

#include <brim/adapt/size_memory.h>
#include <brim/need/size_search.h>
#include <brim/predict/allocation_record.h>
#include <brim/predict/allocator_model.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "adapt/detail/recollection.h"
#include "adapt/memory_simulation.h"

namespace brim::simulation {

/// How long what a step allocates lives.
enum class Life : std::uint8_t {
  call,      ///< until the end of the call, unless another step frees it
  result,    ///< until the call has returned
  replaced,  ///< until the next call begins: gradients, with zero_grad() at the start
  once,      ///< for good, and made only where it is not there yet: an optimizer's state
};

/// Growing bytes are in units that are scaled until the program needs all of the available bytes at
/// the largest size, constant ones a share of the available bytes.
struct Step {
  double constant = 0, linear = 0, square = 0, cube = 0;
  double padding = 1;  // sizes are rounded up to multiples of it
  Life life = Life::call;
  bool optional = false;     // a workspace: if it is refused, the work goes on without
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
    for (int i = 0; i < 80; ++i) {
      scale_ = (fits + fails) / 2;
      (fits_steadily(largest) ? fits : fails) = scale_;
    }
    scale_ = fits;
    reset(kind, available);
  }

  /// What is there now was there before the attempts that follow.
  void begin_call() { before_ = device_.now().allocated; }

  /// What the driver would measure of an attempt.
  /// @param record whether to record the requests.
  Attempt run(std::int64_t size, bool record = false) {
    return run_at(static_cast<double>(size), record);
  }

  /// The largest size that fits from an empty cache, once what lives longer is there.
  [[nodiscard]] std::int64_t largest() const {
    std::int64_t fits = 0;
    for (std::int64_t fails = 4 * static_cast<std::int64_t>(unit_); fails - fits > 1;) {
      const std::int64_t middle = fits + (fails - fits) / 2;
      (fits_steadily(static_cast<double>(middle)) ? fits : fails) = middle;
    }
    return fits;
  }

  /// What a call may use, if it frees what the last one freed.
  [[nodiscard]] std::int64_t available(const std::vector<Attempt>& known) const {
    const std::int64_t allocated = device_.now().allocated;
    const std::int64_t free = capacity() - allocated;
    const Attempt* last = detail::last_fit(known);
    return last == nullptr
               ? free
               : free + std::clamp<std::int64_t>(allocated - last->held, 0, last->freed);
  }

  void empty_cache() { device_.empty_cache(); }
  [[nodiscard]] const AllocatorModel& device() const { return device_; }
  [[nodiscard]] std::int64_t capacity() const { return device_.options().capacity; }

 private:
  void reset(AllocatorKind kind, std::int64_t capacity) {
    device_ = AllocatorModel({.kind = kind, .capacity = capacity});
    std::ranges::fill(kept_, std::nullopt);
  }

  /// The device's memory ends anywhere between the needs of two sizes, so a size may be a fraction.
  Attempt run_at(double size, bool record) {
    const bool exact = device_.options().kind == AllocatorKind::exact;
    std::vector<AllocationEvent> events;
    const auto note = [&](std::int64_t allocation, bool freed) {
      if (const AllocatorBlock block = device_.block(allocation); block.size > 0) {
        // Exact bytes have no place: any number that tells them apart.
        const std::int64_t address = exact ? allocation : block.address;
        events.push_back({static_cast<std::uintptr_t>(address), block.requested, 0, freed});
      }
    };
    const std::int64_t start = device_.now().allocated;
    device_.reset_peak();
    std::int64_t low = start;
    const auto release = [&](std::optional<std::int64_t>& allocation) {
      if (allocation) {
        note(*allocation, true);
        device_.free(*std::exchange(allocation, std::nullopt));
        low = std::min(low, device_.now().allocated);
      }
    };
    const auto release_all = [&](Life life) {
      for (std::size_t i = 0; i < program_.size(); ++i) {
        if (program_[i].life == life) {
          release(kept_[i]);
        }
      }
    };
    release_all(Life::replaced);
    Attempt attempt{.values = {static_cast<std::int64_t>(size)}};
    for (std::size_t i = 0; i < program_.size() && attempt.fitted(); ++i) {
      const Step& step = program_[i];
      if (step.free >= 0) {
        release(kept_[static_cast<std::size_t>(step.free)]);
      } else if (!kept_[i]) {
        const std::int64_t bytes = bytes_of(step, size);
        if (bytes <= AllocatorModel::kLargestRequest) {
          kept_[i] = device_.allocate(bytes);
        }
        if (!kept_[i] && step.optional) {
          events.push_back({.bytes = bytes, .refused = true});
        } else if (kept_[i]) {
          note(*kept_[i], false);
        } else {
          events.push_back({.bytes = bytes, .refused = true});
          attempt.outcome = OomKind::device_memory;
          attempt.requested = bytes;
          attempt.peak = device_.now().allocated;
        }
      }
    }
    if (attempt.fitted()) {
      attempt.peak = device_.peak().allocated;
    }
    release_all(Life::call);
    if (!attempt.fitted()) {
      release_all(Life::result);
    }
    // CUDA's allocator keeps no least: only what is missing at the end is known.
    const std::int64_t end = device_.now().allocated;
    low = exact ? low : std::min(start, end);
    attempt.freed = std::max<std::int64_t>((attempt.fitted() ? before_ : start) - low, 0);
    attempt.held = low;
    attempt.available = device_.options().capacity - attempt.held;
    *attempt.peak -= low;
    if (record) {
      attempt.record = record_of(events, attempt.fitted());
      attempt.freed = std::max(attempt.freed, attempt.record->replaced());
    }
    if (attempt.fitted() && !exact) {
      attempt.unused = std::max<std::int64_t>(device_.now().reserved - low - *attempt.peak, 0);
    }
    release_all(Life::result);
    return attempt;
  }

  [[nodiscard]] bool fits_steadily(double size) const {
    Work copy = *this;
    copy.run(1);
    copy.empty_cache();
    const int times = device_.options().kind == AllocatorKind::exact ? 1 : 6;
    for (int i = 0; i < times; ++i) {
      if (!copy.run_at(size, false).fitted()) {
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] std::int64_t bytes_of(const Step& step, double size) const {
    const double padded = step.padding > 1 ? std::ceil(size / step.padding) * step.padding : size;
    const double x = padded / unit_;
    const double bytes = step.constant * static_cast<double>(capacity()) +
                         scale_ * (step.linear * x + step.square * x * x + step.cube * x * x * x);
    constexpr double kMost = 1e18;
    return static_cast<std::int64_t>(std::min(bytes, kMost));
  }

  Program program_;
  double unit_;
  double scale_ = 1;
  std::vector<std::optional<std::int64_t>> kept_;  // by step: what it allocated
  AllocatorModel device_;
  std::int64_t before_ = 0;  // bytes in use when the call began
};

}  // namespace brim::simulation
