#include "batching/descending_sort.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "check_argument.h"

namespace brim::batching::detail {
namespace {

// The counters and open output lines of a digit of 11 bits stay in the nearest caches.
constexpr int kDigitBits = 11;
// One pass over a wider digit beats two if there are enough sizes to pay for its counters.
constexpr int kWidestDigitBits = 16;
constexpr std::size_t kFewSizes = 64;
// With this many bits more than it takes to count the sizes, most random numbers differ.
constexpr int kBitsToSpare = 7;

// Unsigned integers in the same order as the sizes.
std::uint64_t bits_of(std::uint64_t size) { return size; }
std::uint64_t bits_of(std::int64_t size) { return static_cast<std::uint64_t>(size); }
std::uint64_t bits_of(double size) {
  return std::bit_cast<std::uint64_t>(size + 0.0);  // + 0.0: no negative zero
}

}  // namespace

template <class T>
void DescendingSort::operator()(std::span<const T> sizes, std::vector<std::uint32_t>& order,
                                std::size_t in_order) {
  brim::detail::check_argument(sizes.size() < std::numeric_limits<std::uint32_t>::max(),
                               "sizes has ", sizes.size(),
                               " elements; at most 4294967294 are allowed");
  order.resize(sizes.size());
  const auto sorted = std::span(order).subspan(in_order);
  if (in_order > 0 || sorted.size() <= kFewSizes) {
    std::iota(order.begin(), order.end(), 0U);
  }
  if (sorted.size() <= kFewSizes) {
    std::stable_sort(sorted.begin(), sorted.end(), [sizes](std::uint32_t a, std::uint32_t b) {
      return bits_of(sizes[a]) > bits_of(sizes[b]);
    });
    return;
  }

  std::uint64_t largest = 0;
  std::uint64_t smallest = ~std::uint64_t{0};
  std::uint64_t any = 0;
  for (const T size : sizes.subspan(in_order)) {
    largest = std::max(largest, bits_of(size));
    smallest = std::min(smallest, bits_of(size));
    any |= bits_of(size);
  }
  // Whole numbers held as double, and multiples of a page, end in zeros.
  const int zeros = any == 0 ? 0 : std::countr_zero(any);
  // Small for a large size, because the order is descending.
  const auto key_of = [=](T size) { return (largest - bits_of(size)) >> zeros; };
  const auto width = static_cast<int>(std::bit_width((largest - smallest) >> zeros));
  const bool one_pass = width <= kDigitBits || (width <= kWidestDigitBits &&
                                                sorted.size() >= std::size_t{1} << (width - 1));
  if (one_pass) {
    starts_.assign(std::size_t{1} << width, 0);
    std::uint32_t* const starts = starts_.data();
    for (std::size_t i = in_order; i < sizes.size(); ++i) {
      ++starts[key_of(sizes[i])];
    }
    counts_to_starts(starts_);
    for (std::size_t i = in_order; i < sizes.size(); ++i) {
      sorted[starts[key_of(sizes[i])]++] = static_cast<std::uint32_t>(i);
    }
    return;
  }

  // Real numbers differ in their first bits: those that do not are sorted in the end.
  const int telling = static_cast<int>(std::bit_width(sorted.size())) + kBitsToSpare;
  const int ignored = std::max(width - std::clamp(telling, 2 * kDigitBits, 32), 0);
  const int passes = (width - ignored + kDigitBits - 1) / kDigitBits;
  const int digit_bits = (width - ignored + passes - 1) / passes;
  const std::size_t digits = std::size_t{1} << digit_bits;
  starts_.assign(digits * static_cast<std::size_t>(passes), 0);
  std::uint32_t* const starts = starts_.data();
  entries_.resize(sorted.size());
  spare_.resize(sorted.size());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const auto position = static_cast<std::uint32_t>(in_order + i);
    auto key = static_cast<std::uint32_t>(key_of(sizes[position]) >> ignored);
    spare_[i] = {key, position};
    for (std::size_t pass = 0; pass < starts_.size(); pass += digits, key >>= digit_bits) {
      ++starts[pass + (key & (digits - 1))];
    }
  }
  for (int pass = 0; pass < passes; ++pass) {
    const std::size_t first = digits * static_cast<std::size_t>(pass);
    counts_to_starts(std::span(starts_).subspan(first, digits));
    for (const Entry& entry : spare_) {
      const std::size_t digit = (entry.key >> (pass * digit_bits)) & (digits - 1);
      entries_[starts[first + digit]++] = entry;
    }
    entries_.swap(spare_);
  }
  std::transform(spare_.begin(), spare_.end(), sorted.begin(),
                 [](const Entry& entry) { return entry.position; });
  if (ignored == 0) {
    return;
  }
  const auto larger = [sizes](std::uint32_t a, std::uint32_t b) {
    return bits_of(sizes[a]) > bits_of(sizes[b]);
  };
  for (std::size_t begin = 0, end = 0; begin < spare_.size(); begin = end) {
    for (end = begin + 1; end < spare_.size() && spare_[end].key == spare_[begin].key; ++end) {
    }
    const auto run = sorted.subspan(begin, end - begin);
    if (run.size() > 1 && !std::is_sorted(run.begin(), run.end(), larger)) {
      std::stable_sort(run.begin(), run.end(), larger);
    }
  }
}

template BRIM_API void DescendingSort::operator()(std::span<const std::uint64_t>,
                                                  std::vector<std::uint32_t>&, std::size_t);
template BRIM_API void DescendingSort::operator()(std::span<const std::int64_t>,
                                                  std::vector<std::uint32_t>&, std::size_t);
template BRIM_API void DescendingSort::operator()(std::span<const double>,
                                                  std::vector<std::uint32_t>&, std::size_t);

}  // namespace brim::batching::detail
