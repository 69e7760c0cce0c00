#pragma once

#include <brim/export.h>
#include <brim/memory/block_watch.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/stats.h>
#include <brim/predict/memory_trace.h>

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

namespace brim {

/// Why memory ran out, the most specific reason first.
enum class ShortageCause : std::uint8_t {
  size_limit,       ///< a kernel's index range: more memory would not help
  workspace,        ///< a library found no room for its scratch memory
  other_processes,  ///< it would fit if they held nothing
  fragmentation,    ///< enough is free, but not in one piece
  growth,           ///< what the program keeps from call to call; without it there was room
  need,             ///< the work needs more than there is
};

/// "real need", "memory that grows", …
BRIM_API const char* to_string(ShortageCause cause);

/// Who holds memory: all blocks of one kind that were made at one place.
struct Holder {
  MemoryKind kind = MemoryKind::other;
  std::string where;       ///< a line, a module, a parameter; "" if not known
  std::int64_t bytes = 0;  ///< in all
  std::int64_t count = 0;  ///< of blocks
  bool grows = false;      ///< they were made one after the other, until the end, and none has gone
};

/// One block in use, with what a program knows of it.
struct HeldBlock {
  std::int64_t bytes = 0;
  std::int64_t made_at = -1;  ///< as LiveBlock has it; -1: before the watch
  MemoryKind kind = MemoryKind::other;
  std::string where;
  /// Whether it has to stay for as long as the program runs, or for the backward of the step that
  /// runs now: its place cannot grow.
  bool has_reason = false;
};

/// Blocks by kind and place, largest first.
/// @param clock at the end, as BlockWatch has it.
BRIM_API std::vector<Holder> holders_of(std::span<const HeldBlock> blocks, std::int64_t clock);

/// What calls have left behind, where most of them left something.
/// @param held what was held when each of the last ones began, the oldest first.
/// @return 0 after fewer than four calls: the first one makes gradients and optimizer states.
BRIM_API std::int64_t left_by_calls(std::span<const std::int64_t> held);

/// What is known when memory has run out. In bytes.
struct ShortageFacts {
  OomCause error;
  MemoryStats stats;           ///< of the device, before anything is cleaned up
  std::int64_t resident = 0;   ///< on the CPU what the process holds in all, else 0
  std::vector<Holder> held{};  ///< as holders_of() returns them
  /// What repeated calls left behind, where the program knows it by other means.
  std::int64_t grown = 0;
};

/// What is to be said about it. In bytes.
struct Shortage {
  ShortageCause cause = ShortageCause::need;
  std::string reason;          ///< one or two sentences
  std::int64_t requested = 0;  ///< 0: not known
  std::int64_t in_use = 0;     ///< by tensors of this process
  std::int64_t limit = 0;      ///< of the device, with budgets
  std::int64_t missing = 0;    ///< what more would have been enough for this request
  std::int64_t others = 0;     ///< taken by other processes, and outside of tensors
  std::int64_t grown = 0;      ///< by what grows
  std::int64_t scattered = 0;  ///< free, and not in one piece
};

BRIM_API Shortage diagnose(const ShortageFacts& facts);

/// What ran out, why, and who holds the memory, as text for people.
///
///     try {
///       step();
///     } catch (...) {
///       std::cerr << brim::explain(std::current_exception(), device, &watch);
///       throw;
///     }
///
/// @param watch that was open when the error was thrown, if there was one; it names the places.
/// @return "" where the error is not about memory.
BRIM_API std::string explain(const std::exception_ptr& error, c10::Device device,
                             const BlockWatch* watch = nullptr);

/// The parts of that text.
BRIM_API std::string to_string(const Shortage& shortage);
BRIM_API std::string to_string(std::span<const Holder> holders, std::size_t most = 10);

}  // namespace brim
