#include <brim/predict/allocator_settings.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "check_argument.h"
#include "number_text.h"

namespace brim {
namespace {

// About pinned memory of the host, locks and streams: the bytes of the device stay the same.
constexpr std::array<std::string_view, 4> kHarmless{"pinned_", "release_lock_on_cudamalloc",
                                                    "release_lock_on_hipmalloc", "graph_capture_"};

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(' ');
  return first == std::string_view::npos
             ? std::string_view()
             : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

/// Cuts off the text up to the next comma that is not within brackets.
std::string_view next_setting(std::string_view& text) {
  int depth = 0;
  std::size_t end = 0;
  for (; end < text.size() && (depth > 0 || text[end] != ','); ++end) {
    depth += text[end] == '[' ? 1 : text[end] == ']' ? -1 : 0;
  }
  const std::string_view setting = trimmed(text.substr(0, end));
  text.remove_prefix(std::min(end + 1, text.size()));
  return setting;
}

std::int64_t whole_number(std::string_view name, std::string_view value, std::int64_t most) {
  std::string_view rest = value;
  const auto number = detail::take_number<std::int64_t>(rest);
  detail::check_argument(number && rest.empty() && *number >= 0 && *number <= most, name,
                         " must be a whole number from 0 to ", most, ", got \"", value, "\"");
  return *number;
}

std::int64_t mebibytes(std::string_view name, std::string_view value) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  return whole_number(name, value, kMost) << 20;
}

bool truth(std::string_view name, std::string_view value) {
  detail::check_argument(value == "True" || value == "False", name,
                         " must be True or False, got \"", value, "\"");
  return value == "True";
}

/// False if the model has no such setting.
bool apply(AllocatorOptions& options, std::string_view name, std::string_view value) {
  if (name == "expandable_segments") {
    options.expandable_segments = truth(name, value);
  } else if (name == "max_split_size_mb") {
    options.max_split_size = mebibytes(name, value);
  } else if (name == "max_non_split_rounding_mb") {
    options.max_non_split_rounding = mebibytes(name, value);
  } else if (name == "large_segment_size_mb") {
    options.large_segment_size = mebibytes(name, value);
  } else if (name == "roundup_power2_divisions" && !value.starts_with('[')) {
    options.roundup_power2_divisions = whole_number(name, value, std::int64_t{1} << 30);
  } else {
    return (name == "backend" && value == "native") ||
           std::ranges::any_of(kHarmless, [&](auto start) { return name.starts_with(start); });
  }
  return true;
}

}  // namespace

AllocatorSettings parse_allocator_settings(std::string_view text) {
  AllocatorSettings result;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view setting = next_setting(rest);
    if (setting.empty()) {
      continue;
    }
    const auto colon = setting.find(':');
    detail::check_argument(colon != std::string_view::npos,
                           "allocator settings must be name:value, got \"", setting, "\"");
    if (!apply(result.options, trimmed(setting.substr(0, colon)),
               trimmed(setting.substr(colon + 1)))) {
      result.not_modelled.emplace_back(setting);
    }
  }
  static_cast<void>(AllocatorModel(result.options));  // for its checks
  return result;
}

std::string allocator_settings_in_environment() {
  for (const char* name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    if (const char* text = std::getenv(name); text != nullptr && *text != '\0') {
      return text;
    }
  }
  return {};
}

}  // namespace brim
