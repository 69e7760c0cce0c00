#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace brim {

/// How the next size is chosen when a size did not fit, or when a larger one may.
enum class Strategy : std::uint8_t {
  predictive,  ///< from the bytes that were held, asked for and allowed; the default
  halving,     ///< half of it, until something fits; what torch_max_mem and toma do
  bisect,      ///< the middle between the largest fit and the smallest failure
};

/// The name that `parse_strategy` takes.
[[nodiscard]] constexpr std::string_view to_string(Strategy strategy) noexcept {
  switch (strategy) {
    case Strategy::predictive:
      return "predictive";
    case Strategy::halving:
      return "halving";
    case Strategy::bisect:
      return "bisect";
  }
  return "unknown";
}

/// @throws std::invalid_argument when `name` is none of "predictive", "halving", "bisect".
[[nodiscard]] inline Strategy parse_strategy(std::string_view name) {
  for (const Strategy strategy : {Strategy::predictive, Strategy::halving, Strategy::bisect}) {
    if (name == to_string(strategy)) {
      return strategy;
    }
  }
  throw std::invalid_argument("strategy='" + std::string(name) +
                              "' is not known; allowed are 'predictive', 'halving' and 'bisect'");
}

}  // namespace brim
