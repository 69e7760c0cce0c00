#pragma once

#include <brim/need/attempt.h>
#include <brim/need/strategy.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace brim {

class Agreement;
class SavedState;
class SizeMemory;

/// What the search for a size is after.
enum class Objective : std::uint8_t {
  memory,      ///< the largest size that fits
  throughput,  ///< the smallest size within 2 % of the best rate seen so far, among those that fit
};

/// Options of an adaptive call. The defaults are right for most.
struct AdaptOptions {
  Strategy strategy = Strategy::predictive;
  Objective objective = Objective::memory;
  std::int64_t lower = 1;    ///< the floor: failing there is final
  std::int64_t quantum = 1;  ///< sizes above it are its multiples

  /// Where memory is measured and random numbers are drawn; empty: default_device(). The size
  /// shrinks after a failure on another device too.
  std::optional<c10::Device> device{};

  /// Whether a repeated call starts with the random state of the first attempt.
  bool restore_random_state = true;

  /// For calls on the CPU: an attempt is refused what the machine and its cgroups do not have, with
  /// c10::OutOfMemoryError, where the system would kill the process. See HostLimit.
  bool host_limit = true;

  /// For Strategy::halving: tries exactly the values that torch_max_mem and toma try, for programs
  /// that see them. A size is not repeated after cached memory was released, and the values at
  /// which one parameter reached its floor are repeated before the next parameter is lowered.
  bool exact_halving = false;

  /// What a failed attempt may have changed and is put back after it; see SavedState. Empty:
  /// nothing but the random state.
  std::function<void(SavedState&)> restore{};

  SizeMemory* memory = nullptr;  ///< what earlier calls learned; not owned; null: nothing
  std::uint64_t key = 0;         ///< which kind of call this is in `memory`; see call_key
  /// A wider kind of call, where a call looks as long as nothing is known of its own.
  std::optional<std::uint64_t> wider_key{};
  /// The kind of call whatever the lengths of its tensors; see call_kind. Where nothing else is
  /// known and calls of the kind have failed, `batch` and `maximize` begin with a size that fitted
  /// there, and go up from it as far as measured bytes show, not to the maximum at once.
  std::optional<std::uint64_t> kind{};

  /// How this call agrees on its size with the other ranks of a job; not owned; null: it is alone.
  Agreement* ranks = nullptr;

  std::vector<Attempt>* attempts = nullptr;        ///< where to append each attempt; not owned
  std::function<void(const Attempt&)> observer{};  ///< told of each attempt after it ended
  std::function<void()> collect_garbage{};  ///< called if a failed attempt's memory is still in use
  std::string name = "size";                ///< what is being adapted, for messages
};

}  // namespace brim
