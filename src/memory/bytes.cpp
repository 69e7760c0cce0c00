#include <brim/memory/bytes.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <optional>

#include "memory/byte_units.h"
#include "number_text.h"

namespace brim {
namespace {

constexpr std::string_view kAllowed =
    "expected a positive number of bytes such as \"512MiB\", \"8GB\", \"1.5GiB\", \"1048576\" or a "
    "percentage such as \"50%\"";

constexpr double kKibi = 1024.0;

std::string_view trim(std::string_view text) {
  const auto is_space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
  while (!text.empty() && is_space(text.front())) {
    text.remove_prefix(1);
  }
  while (!text.empty() && is_space(text.back())) {
    text.remove_suffix(1);
  }
  return text;
}

}  // namespace

std::optional<double> unit_bytes(std::string_view name, double kilo) {
  if (name.size() > 3) {
    return std::nullopt;
  }
  std::string unit(name);
  std::transform(unit.begin(), unit.end(), unit.begin(), [](char c) {
    return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  });
  if (unit.empty() || unit == "b") {
    return 1.0;
  }
  const bool binary = unit.size() == 3 && unit.ends_with("ib");
  const bool decimal = unit.size() == 2 && unit.ends_with('b');
  const auto power = std::string_view("kmgtpe").find(unit.front());
  if ((!binary && !decimal) || power == std::string_view::npos) {
    return std::nullopt;
  }
  // Exact for every unit: even 1000^6 is a double.
  return std::pow(binary ? kKibi : kilo, static_cast<double>(power + 1));
}

ByteLimit ByteLimit::of_bytes(std::int64_t bytes, std::string_view name) {
  TORCH_CHECK_VALUE(bytes > 0, name, " must be a positive number of bytes, got ", bytes);
  return {bytes, 0.0};
}

ByteLimit ByteLimit::parse(std::string_view text, std::string_view name) {
  const std::string_view body = trim(text);
  // A plain integer is read exactly: a double would lose bytes above 2^53.
  std::string_view rest = body;
  const auto whole = detail::take_number<std::int64_t>(rest);
  if (whole && rest.empty()) {
    TORCH_CHECK_VALUE(*whole > 0, name, " \"", text, "\" is not positive: ", kAllowed);
    return {*whole, 0.0};
  }
  rest = body;
  const double number = detail::take_number<double>(rest, std::chars_format::fixed).value_or(NAN);
  TORCH_CHECK_VALUE(!std::isnan(number), name, " \"", text, "\" is not understood: ", kAllowed);
  TORCH_CHECK_VALUE(number > 0, name, " \"", text, "\" is not positive: ", kAllowed);
  rest = trim(rest);
  if (rest == "%") {
    TORCH_CHECK_VALUE(number <= 100.0, name, " \"", text, "\" is over 100 %: ", kAllowed);
    return {0, number};
  }
  const std::optional<double> unit = unit_bytes(rest);
  TORCH_CHECK_VALUE(unit.has_value(), name, " \"", text, "\" has the unknown unit \"", rest,
                    "\": ", kAllowed);
  const double bytes = number * *unit;
  // 2^63 is exact as a double, so this comparison is too.
  TORCH_CHECK_VALUE(bytes < 0x1p63, name, " \"", text,
                    "\" is more than 2^63 - 1 bytes: ", kAllowed);
  TORCH_CHECK_VALUE(bytes >= 1.0, name, " \"", text, "\" is less than one byte: ", kAllowed);
  return {static_cast<std::int64_t>(bytes), 0.0};
}

std::int64_t ByteLimit::resolve(std::int64_t whole) const {
  if (!is_percentage()) {
    return bytes_;
  }
  const double share = static_cast<double>(whole) * (percent_ / 100.0);
  if (share >= static_cast<double>(whole)) {
    return std::max<std::int64_t>(whole, 1);
  }
  return std::max<std::int64_t>(static_cast<std::int64_t>(share), 1);
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 7> kNames{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  // 1023.995 would print as "1024.00": carry it into the next unit instead.
  while (std::abs(value) >= kKibi - 0.005 && unit + 1 < kNames.size()) {
    value /= kKibi;
    ++unit;
  }
  std::array<char, 48> text{};
  const int digits = unit == 0 ? 0 : 2;
  const int written =
      std::snprintf(text.data(), text.size(), "%.*f %s", digits, value, kNames[unit]);
  return {text.data(), static_cast<std::size_t>(written)};
}

}  // namespace brim
