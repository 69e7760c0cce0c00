#pragma once

#include <brim/export.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace brim::nn {

/// What the functions of a region compute again in backward.
enum class Recompute : std::uint8_t {
  nothing,
  cheap,      ///< what the layers before can give again: normalisation, activations, sums
  products,   ///< also linear layers and convolutions whose output is larger than their input
  automatic,  ///< as products, but nothing before memory runs out
};

/// A region of code: while it lives, torch's functions that this thread calls are brim's
/// (`brim/nn/functional.h`) wherever they get a tensor that needs a gradient and that brim knows.
/// This includes what torch's own modules and larger functions call. Anything else runs as outside,
/// and takes no longer.
///
///     {
///       const brim::nn::Saving saving(brim::nn::Recompute::cheap);
///       y = at::relu(torch::nn::functional::linear(x, weight));  // keeps bits
///     }
///
/// Regions nest, the innermost counts. What a checkpoint or other saved-tensor hooks inside of it
/// run is not in the region: backward runs that again without it. Threads: each has its own.
class BRIM_API Saving {
 public:
  explicit Saving(Recompute recompute = Recompute::nothing);
  Saving(const Saving&) = delete;
  Saving& operator=(const Saving&) = delete;
  ~Saving();

  /// Of this thread: a region, or none.
  struct Region {
    bool is_open = false;
    Recompute recompute = Recompute::nothing;
    const void* hooks = nullptr;  // the saved-tensor hooks in force where it began

    bool operator==(const Region&) const = default;
  };

  /// What is in force in this thread, for those that cannot hold a Saving (Python's `with`).
  struct State {
    Region now;
    Region users;  // without those of modules
    bool is_paused = false;
    std::size_t left = 0;  // how many modules around this code are left out of their region

    bool operator==(const State&) const = default;
  };

  [[nodiscard]] static State state() noexcept;
  static void set_state(const State& state) noexcept;

  /// The state inside of a new region.
  /// @param of_module whether the region is that of a converted module
  [[nodiscard]] static State within(Recompute recompute, bool of_module);

  /// Around a module that is left out: inside, only regions that users opened count. leave() and
  /// come_back() come in pairs; where an error skips the latter, the region's end makes up for it.
  static void leave();
  static void come_back() noexcept;

 private:
  State before_;
};

}  // namespace brim::nn
