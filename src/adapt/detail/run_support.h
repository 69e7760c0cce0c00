#pragma once

#include <brim/adapt/options.h>
#include <brim/adapt/size_memory.h>
#include <brim/memory/out_of_memory.h>
#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace brim {

/// The pure parts of this module know no torch and throw std::invalid_argument; at its border that
/// is a ValueError.
template <class Function>
auto as_value_error(Function&& function) {
  try {
    return std::forward<Function>(function)();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

/// What is left of an exception once it has been released.
struct ReleasedError {
  OomCause cause;
  std::string message;
};

/// Classifies `error` and lets go of it. @throws the error itself if it is not about memory.
ReleasedError release_error(std::exception_ptr error);

/// Checks what is common to all adaptive calls. @throws c10::ValueError.
void check_options(const AdaptOptions& options);

/// What is remembered of such calls, and where their bytes were. A model of bytes is of one device,
/// that of the newest attempt: of the others only "it fitted" or "it did not" is kept, as long as
/// the room on their device is about the same.
struct Recollection {
  std::vector<Attempt> attempts;
  std::optional<c10::Device> device;      // of the attempts; empty where there are none
  std::optional<std::int64_t> available;  // there, now
};
Recollection recall(const AdaptOptions& options);

/// Keeps the figures of one call's attempts to one device: those of another are taken out, so that
/// only "it fitted" or "it did not" is left of them.
class FiguresOfOneDevice {
 public:
  explicit FiguresOfOneDevice(std::optional<c10::Device> device) : device_(device) {}

  Attempt operator()(Attempt attempt);

 private:
  std::optional<c10::Device> device_;
};

/// What an unconfirmed prediction leaves free: an accelerator's allocator hands out blocks, and its
/// count of bytes says little of how they lie.
double margin_on(c10::Device device);

void learn(const AdaptOptions& options, const Attempt& attempt);

}  // namespace brim
