#pragma once

#include <brim/adapt/options.h>
#include <brim/adapt/size_memory.h>
#include <brim/memory/out_of_memory.h>
#include <c10/util/Exception.h>

#include <exception>
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

std::vector<SizeFact> recall(const AdaptOptions& options);
void learn(const AdaptOptions& options, const SizeFact& fact);

}  // namespace brim
