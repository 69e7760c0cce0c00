#pragma once

#include <charconv>
#include <cmath>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

namespace brim::detail {

/// A number for an error message: shorter than std::to_string where that pads with zeros.
template <class Number>
[[nodiscard]] std::string text(Number value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

/// The number at the start of `text`, which is cut off it. Empty where there is none, or none that
/// is finite and fits; `text` is then unchanged. The same in every locale. `form` is a
/// std::chars_format for floating-point numbers, or the base of integers.
template <class Number, class... Form>
std::optional<Number> take_number(std::string_view& text, Form... form) {
  Number value{};
  const char* const end = text.data() + text.size();
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): it gets the end too
  const std::from_chars_result read = std::from_chars(text.data(), end, value, form...);
  if (read.ec != std::errc{} || !std::isfinite(static_cast<double>(value))) {
    return std::nullopt;
  }
  text.remove_prefix(static_cast<std::size_t>(read.ptr - text.data()));
  return value;
}

}  // namespace brim::detail
