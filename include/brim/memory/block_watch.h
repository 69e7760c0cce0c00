#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace brim {

class LiveBlocks;

/// A block of memory that is in use.
struct LiveBlock {
  std::uintptr_t address = 0;
  std::int64_t bytes = 0;
  /// When it was made, by a clock that counts the bytes of all blocks noted so far.
  std::int64_t made_at = 0;
  std::int32_t place = -1;  ///< where, as place_text() knows it; -1: not known
};

/// While one is open, notes which large blocks a device's allocator gives out, and where.
///
///     brim::BlockWatch watch(device);
///     train();                     // throws c10::OutOfMemoryError
///     … watch.blocks() …           // in a handler: what was in use when it was thrown
///
/// An allocation that is large enough takes about half a microsecond longer; in a Python program it
/// takes the GIL for that, as torch's own memory history does. Others take a nanosecond longer.
/// Devices that cannot tell (other accelerators than CUDA's, a pluggable allocator) note nothing.
/// Watches of one device may be nested and share what they note.
class BRIM_API BlockWatch {
 public:
  /// @param least the bytes from which on a block is noted; 0 for a share of what the device has,
  ///     from 4 KiB to 1 MiB, so that smaller ones cannot add up to much.
  /// @throws c10::ValueError if the device does not exist, or least is negative.
  explicit BlockWatch(c10::Device device, std::int64_t least = 0);
  ~BlockWatch() { close(); }
  BlockWatch(const BlockWatch&) = delete;
  BlockWatch& operator=(const BlockWatch&) = delete;

  /// Ends it early; then blocks() is empty.
  void close() noexcept;

  [[nodiscard]] c10::Device device() const { return device_; }
  [[nodiscard]] std::int64_t least() const { return least_; }
  /// What all tensors there held when it was opened.
  [[nodiscard]] std::int64_t held() const { return held_; }
  /// Those in use, oldest first.
  [[nodiscard]] std::vector<LiveBlock> blocks() const;
  /// Now, by the clock of LiveBlock::made_at.
  [[nodiscard]] std::int64_t clock() const;

 private:
  c10::Device device_;
  std::int64_t least_;
  std::int64_t held_ = 0;
  LiveBlocks* live_;  // null: the device cannot tell
};

/// A number for the text of a place, the same for the same text.
BRIM_API std::int32_t place_number(std::string_view text);
/// "" for -1.
BRIM_API std::string place_text(std::int32_t place);

/// Finds the place in the program that runs on this thread, as place_number() knows it; -1 where
/// there is none. Called under no lock of ours.
using PlaceFinder = std::int32_t (*)() noexcept;

/// Sets the finder that is asked outside of backward passes. Meant to be called once, when a
/// language binding is loaded; without one, places outside of backward are not known.
BRIM_API void set_place_finder(PlaceFinder finder) noexcept;

}  // namespace brim
