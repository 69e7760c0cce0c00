#include "nn/cpu/bits.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "nn/cpu/grain.h"
#include "nn/cpu/number.h"
#include "nn/cpu/widen.h"
#include "nn/ops/bitmask_functions.h"
#include "nn/ops/bits.h"

// Everything works on blocks of a fixed number of elements; the rest at the end goes through a
// block of its own. The compilers' vectors of 16 bytes, which every processor has, do what no plain
// loop is vectorised into as well: masks into bits, and bits into masks. What takes a step as a
// function is inlined by force: otherwise what the step captured is loaded for every vector again.

namespace brim::nn::cpu {
namespace {

constexpr std::int64_t kBlock = 64;

template <class T>
using Block = std::array<T, kBlock>;

/// The whole number of the same width.
template <class T>
using Raw = std::conditional_t<
    sizeof(T) == 1, std::uint8_t,
    std::conditional_t<sizeof(T) == 2, std::uint16_t,
                       std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>>;

static_assert(std::endian::native == std::endian::little, "the first flag is the lowest byte");

/// Calls body(first element, count) for spans, in parallel; all begin at a block.
template <class Body>
void over_spans(std::int64_t elements, const Body& body) {
  if (elements <= kGrain) {
    body(0, elements);
    return;
  }
  const std::int64_t blocks = (elements + kBlock - 1) / kBlock;
  at::parallel_for(0, blocks, kGrain / kBlock, [&](std::int64_t begin, std::int64_t end) {
    body(begin * kBlock, std::min(end * kBlock, elements) - begin * kBlock);
  });
}

using PackedBlock = std::array<std::uint8_t, kBlock / 8>;

PackedBlock load_bits(const std::uint8_t* bits, std::int64_t count) {
  PackedBlock packed{};
  std::memcpy(packed.data(), bits, static_cast<std::size_t>(bit_bytes(count)));
  return packed;
}

void store_bits(std::uint64_t packed, std::uint8_t* bits, std::int64_t count) {
  if (count < kBlock) {
    packed &= (std::uint64_t{1} << static_cast<unsigned>(count)) - 1;
  }
  std::memcpy(bits, &packed, static_cast<std::size_t>(bit_bytes(count)));
}

/// Calls step(in, out, byte of the first bit, count) for one block after another. What is left at
/// the end goes through a block of its own. `out` may be `in`; for Writes = false it is null.
template <bool Writes = true, class T, class Step>
C10_ALWAYS_INLINE void over_blocks(const T* in, T* out, std::int64_t count, const Step& step) {
  // A number that the step knows when it is compiled.
  constexpr std::integral_constant<std::int64_t, kBlock> kWhole;
  const std::int64_t whole = count / kBlock * kBlock;
  for (std::int64_t first = 0; first < whole; first += kBlock) {
    step(in + first, Writes ? out + first : out, first / 8, kWhole);
  }
  if (const std::int64_t left = count - whole; left > 0) {
    const std::size_t bytes = static_cast<std::size_t>(left) * sizeof(T);
    Block<T> block{};
    std::memcpy(block.data(), in + whole, bytes);
    step(block.data(), block.data(), whole / 8, left);
    if (Writes) {
      std::memcpy(out + whole, block.data(), bytes);
    }
  }
}

/// The bits of a block. Lane is the type that the function calculates with. `out` may be `in`.
template <class Lane, class T, class Function>
C10_ALWAYS_INLINE std::uint64_t vector_block(const T* in, T* out, const Function& function) {
  static_assert(sizeof(Lane) == sizeof(T));
  using Int = std::make_signed_t<Raw<T>>;
  typedef Lane Vector __attribute__((vector_size(16)));  // NOLINT(modernize-use-using)
  typedef Int Mask __attribute__((vector_size(16)));     // NOLINT(modernize-use-using)
  constexpr std::size_t kLanes = 16 / sizeof(T);
  constexpr std::size_t kWord = 8 * sizeof(T);  // elements whose bits fit into a lane
  Mask first_places;
  for (std::size_t i = 0; i < kLanes; ++i) {
    first_places[i] = static_cast<Int>(Int{1} << i);
  }
  std::uint64_t result = 0;
  for (std::size_t word = 0; word < kBlock; word += kWord) {
    Mask set{};  // in each lane the bits of that lane's elements
    Mask places = first_places;
    for (std::size_t i = word; i < word + kWord; i += kLanes) {
      Vector x;
      std::memcpy(&x, in + i, sizeof(x));
      const Mask mask = function.passes(x);
      x = function.value(x, mask);
      std::memcpy(out + i, &x, sizeof(x));
      set |= mask & places;
      places = places << static_cast<Int>(kLanes);
    }
    std::array<std::uint64_t, 2> halves;
    std::memcpy(halves.data(), &set, sizeof(set));
    std::uint64_t bits = halves[0] | halves[1];
    for (std::size_t width = 32; width >= kWord; width /= 2) {
      bits |= bits >> width;
    }
    result |= (kWord == 64 ? bits : bits & ((std::uint64_t{1} << (kWord % 64)) - 1)) << word;
  }
  return result;
}

/// ReLU on half-width numbers as whole numbers, which is twice as fast as in float.
template <class T>
struct HalfRelu {
  static constexpr auto kMinusInfinity =
      static_cast<std::int16_t>(std::is_same_v<T, at::Half> ? -0x400 : -0x80);

  /// Above zero, or a NaN with its sign set: these lie above minus infinity.
  template <class X>
  X passes(X x) const {
    return (x > 0) | ((x < 0) & (x > kMinusInfinity));
  }

  template <class X>
  X value(X x, X passes) const {
    return x & passes;
  }
};

/// The values of a block; returns its bits.
template <class T, class Function>
C10_ALWAYS_INLINE std::uint64_t bitmask_block(const T* in, T* out, const Function& function) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return vector_block<T>(in, out, function);
  } else if constexpr (std::is_same_v<Function, bitmask::Relu<Wide<T>>>) {
    return vector_block<std::int16_t>(in, out, HalfRelu<T>());
  } else {
    Block<Wide<T>> wide;
    widen<kBlock>(in, wide.data());
    const std::uint64_t bits = vector_block<Wide<T>>(wide.data(), wide.data(), function);
    narrow<kBlock>(wide.data(), out);
    return bits;
  }
}

/// Calls body(first element, mask) for the vectors of a block: all bits of a lane are the
/// element's.
template <class Int, class Body>
C10_ALWAYS_INLINE void over_masks(const PackedBlock& bits, const Body& body) {
  typedef Int Mask __attribute__((vector_size(16)));  // NOLINT(modernize-use-using)
  constexpr std::size_t kLanes = 16 / sizeof(Int);
  constexpr std::array<Int, 8> kPlaces{1, 2, 4, 8, 16, 32, 64, 128};
  for (std::size_t byte = 0; byte < kBlock / 8; ++byte) {
    const Mask all = static_cast<Int>(bits[byte]) - Mask{};
    for (std::size_t lane = 0; lane < 8; lane += kLanes) {
      Mask places;
      std::memcpy(&places, kPlaces.data() + lane, sizeof(places));
      const Mask mask = (all & places) != 0;
      body(byte * 8 + lane, mask);
    }
  }
}

/// The value where the bit is set, else 0.
template <class T>
void keep_block(const T* in, const PackedBlock& bits, T* out) {
  over_masks<std::make_signed_t<Raw<T>>>(bits, [=](std::size_t i, auto mask) {
    decltype(mask) x;
    std::memcpy(&x, in + i, sizeof(x));
    x &= mask;
    std::memcpy(out + i, &x, sizeof(x));
  });
}

/// Times on or off, whichever the bit says. `out` may be `in`.
template <class T>
void times_block(const T* in, const PackedBlock& bits, T* out, T on, T off) {
  typedef T Vector __attribute__((vector_size(16)));  // NOLINT(modernize-use-using)
  over_masks<std::make_signed_t<Raw<T>>>(bits, [=](std::size_t i, auto mask) {
    Vector x;
    std::memcpy(&x, in + i, sizeof(x));
    const Vector factor = mask ? on - Vector{} : off - Vector{};
    // Not a product where the factor is 0: it would be NaN for inf.
    x = factor == 0 ? Vector{} : x * factor;
    std::memcpy(out + i, &x, sizeof(x));
  });
}

template <class T>
void apply_block(const T* in, const PackedBlock& bits, T* out, Wide<T> on, Wide<T> off) {
  if (on == 1 && off == 0) {
    keep_block(in, bits, out);
  } else if constexpr (std::is_same_v<T, Wide<T>>) {
    times_block(in, bits, out, on, off);
  } else {
    Block<Wide<T>> wide;
    widen<kBlock>(in, wide.data());
    times_block(wide.data(), bits, wide.data(), on, off);
    narrow<kBlock>(wide.data(), out);
  }
}

/// The bits of a block: what is not zero.
template <class T>
std::uint64_t nonzero_block(const T* in) {
  Block<std::uint8_t> flags;
  for (std::size_t i = 0; i < kBlock; ++i) {
    // Without its sign, a number is zero only where all of its bits are.
    if constexpr (sizeof(T) == 1) {
      flags[i] = in[i] != T(0);
    } else {
      flags[i] = static_cast<Raw<T>>(std::bit_cast<Raw<T>>(in[i]) << 1U) != 0;
    }
  }
  std::uint64_t result = 0;
  for (std::size_t i = 0; i < kBlock / 8; ++i) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, flags.data() + 8 * i, 8);
    // Each flag is moved to its place in the highest byte.
    result |= (eight * 0x0102040810204080ULL) >> 56U << (8 * i);
  }
  return result;
}

}  // namespace

void pack_bits(const at::Tensor& mask, at::Tensor& bits) {
  auto* const to = bits.mutable_data_ptr<std::uint8_t>();
  const auto pack = [&]<class T>(const T* from) {
    over_spans(mask.numel(), [&](std::int64_t first, std::int64_t count) {
      std::uint8_t* const span = to + first / 8;
      over_blocks<false, T>(from + first, nullptr, count,
                            [=](const T* in, T*, std::int64_t byte, auto n) {
                              store_bits(nonzero_block(in), span + byte, n);
                            });
    });
  };
  if (mask.scalar_type() == at::kBool) {
    pack(mask.const_data_ptr<bool>());
  } else if (mask.scalar_type() == at::kByte) {
    pack(mask.const_data_ptr<std::uint8_t>());
  } else {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, mask.scalar_type(), "brim::pack_bits",
                                    [&] { pack(mask.const_data_ptr<scalar_t>()); });
  }
}

void apply_bits(const at::Tensor& input, const at::Tensor& bits, at::Tensor& output, double on,
                double off) {
  const auto* const from = bits.const_data_ptr<std::uint8_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "brim::apply_bits", [&] {
        const auto* const in = input.const_data_ptr<scalar_t>();
        auto* const out = output.mutable_data_ptr<scalar_t>();
        const auto set = static_cast<Wide<scalar_t>>(on);
        const auto unset = static_cast<Wide<scalar_t>>(off);
        over_spans(input.numel(), [&](std::int64_t first, std::int64_t count) {
          const std::uint8_t* const span = from + first / 8;
          over_blocks(in + first, out + first, count,
                      [=](const scalar_t* source, scalar_t* to, std::int64_t byte, auto n) {
                        apply_block(source, load_bits(span + byte, n), to, set, unset);
                      });
        });
      });
}

void bitmask_pack(const at::Tensor& input, at::Tensor& output, at::Tensor& bits,
                  std::string_view name, double a, double b) {
  auto* const to_bits = bits.mutable_data_ptr<std::uint8_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "brim::bitmask_pack", [&] {
        const auto* const in = input.const_data_ptr<scalar_t>();
        auto* const out = output.mutable_data_ptr<scalar_t>();
        bitmask::with_function<Wide<scalar_t>>(name, a, b, [&](const auto& function) {
          over_spans(input.numel(), [&](std::int64_t first, std::int64_t count) {
            std::uint8_t* const span = to_bits + first / 8;
            over_blocks(in + first, out + first, count,
                        [=](const scalar_t* from, scalar_t* to, std::int64_t byte, auto n) {
                          store_bits(bitmask_block(from, to, function), span + byte, n);
                        });
          });
        });
      });
}

}  // namespace brim::nn::cpu
