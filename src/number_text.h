#pragma once

#include <sstream>
#include <string>

namespace brim::detail {

/// A number for an error message: shorter than std::to_string where that pads with zeros.
template <class Number>
[[nodiscard]] std::string text(Number value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

}  // namespace brim::detail
