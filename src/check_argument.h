#pragma once

#include <sstream>
#include <stdexcept>

namespace brim::detail {

/// Throws std::invalid_argument with these parts of a message unless `condition` holds.
template <class... Parts>
void check_argument(bool condition, const Parts&... parts) {
  if (!condition) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::invalid_argument(message.str());
  }
}

}  // namespace brim::detail
