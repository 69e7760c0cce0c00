#include <brim/batching/sample_sizes.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace brim::batching {
namespace {

// Positions inside batches are kept in 32 bits.
constexpr std::size_t kMostSamples = std::numeric_limits<std::uint32_t>::max();

bool valid(std::int64_t size) { return size >= 0; }
bool valid(double size) { return size >= 0 && size <= std::numeric_limits<double>::max(); }

// No branch in the loop, so that it is vectorised: 10 million sizes in a few milliseconds.
template <class T>
bool all_valid(std::span<const T> sizes) {
  if constexpr (std::is_same_v<T, double>) {
    std::size_t bad = 0;
    for (const double size : sizes) {
      bad += static_cast<std::size_t>(!valid(size));
    }
    return bad == 0;
  } else {
    std::int64_t signs = 0;
    for (const std::int64_t size : sizes) {
      signs |= size;
    }
    return signs >= 0;
  }
}

template <class T>
void check_column(std::span<const T> sizes) {
  if (all_valid(sizes)) {
    return;
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (!valid(sizes[i])) {
      throw std::invalid_argument("sizes must be finite and not negative, got " +
                                  std::to_string(sizes[i]) + " at index " + std::to_string(i));
    }
  }
}

}  // namespace

std::int64_t sample_count(const AnyColumns& columns) {
  return std::visit(
      [](const auto& some) {
        return some.empty() ? std::int64_t{0} : static_cast<std::int64_t>(some[0].sizes.size());
      },
      columns);
}

void check_sizes(const AnyColumns& columns) {
  std::visit(
      [](const auto& some) {
        if (some.empty()) {
          throw std::invalid_argument("there must be at least one column of sizes with its budget");
        }
        const std::size_t samples = some[0].sizes.size();
        if (samples >= kMostSamples) {
          throw std::invalid_argument("there must be fewer than 2^32 samples, got " +
                                      std::to_string(samples));
        }
        for (const auto& column : some) {
          if (column.sizes.size() != samples) {
            throw std::invalid_argument("columns of sizes must be equally long, got " +
                                        std::to_string(samples) + " and " +
                                        std::to_string(column.sizes.size()));
          }
          check_column(column.sizes);
        }
      },
      columns);
}

}  // namespace brim::batching
