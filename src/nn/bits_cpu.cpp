#include "nn/bits_cpu.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <array>
#include <bit>
#include <cstring>

#include "nn/bits.h"
#include "nn/gate.h"
#include "nn/number.h"

namespace brim::nn::cpu {
namespace {

// Elements that one step of a loop works on. Flags are worked out as bytes first, which compilers
// vectorise, and eight bytes become eight bits (or back) by one multiplication.
constexpr std::int64_t kBlock = 64;
constexpr std::int64_t kGrain = 32768 / kBlock;  // blocks; as much as ATen gives a thread at least

using Flags = std::array<std::uint8_t, kBlock>;

static_assert(std::endian::native == std::endian::little, "the first flag is the lowest byte");

std::uint8_t bits_of(const std::uint8_t* flags) {
  std::uint64_t word = 0;
  std::memcpy(&word, flags, 8);
  return static_cast<std::uint8_t>((word * 0x0102040810204080ULL) >> 56U);
}

void flags_of(std::uint8_t bits, std::uint8_t* flags) {
  // Each byte of the product holds all eight bits; the mask leaves bit i of byte i.
  const std::uint64_t spread = (bits * 0x0101010101010101ULL) & 0x8040201008040201ULL;
  // Nonzero bytes become 1: adding 127 carries into the top bit.
  const std::uint64_t word =
      ((spread + 0x7f7f7f7f7f7f7f7fULL) | spread) >> 7U & 0x0101010101010101ULL;
  std::memcpy(flags, &word, 8);
}

/// Calls step(first element, count) for blocks, in parallel; all blocks but the last are whole, and
/// begin at a byte of the bits.
template <class Step>
void over_blocks(std::int64_t elements, const Step& step) {
  const std::int64_t blocks = (elements + kBlock - 1) / kBlock;
  at::parallel_for(0, blocks, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kBlock;
      step(first, std::min(kBlock, elements - first));
    }
  });
}

void store_bits(const Flags& flags, std::uint8_t* bits, std::int64_t first, std::int64_t count) {
  for (std::int64_t i = 0; i < bit_bytes(count); ++i) {
    bits[first / 8 + i] = bits_of(flags.data() + 8 * i);
  }
}

/// act(x) gives the value and whether the gradient passes.
template <class T, class Act>
void gate_loop(const T* in, T* out, std::uint8_t* bits, std::int64_t elements, const Act& act) {
  over_blocks(elements, [&](std::int64_t first, std::int64_t count) {
    Flags flags{};
    const auto one = [&](std::int64_t i) {
      const T x = in[first + i];
      flags[static_cast<std::size_t>(i)] = act.passes(x);
      out[first + i] = act.value(x);
    };
    if (count == kBlock) {
      for (std::int64_t i = 0; i < kBlock; ++i) {
        one(i);
      }
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        one(i);
      }
    }
    store_bits(flags, bits, first, count);
  });
}

template <class T>
struct Relu {
  bool passes(T x) const { return !(x <= T(0)); }  // NaN passes, as in torch
  T value(T x) const { return x <= T(0) ? T(0) : x; }
};

template <class T>
struct Hardtanh {
  T lower, upper;
  bool passes(T x) const { return !(x <= lower || x >= upper); }
  T value(T x) const { return x < lower ? lower : x > upper ? upper : x; }
};

template <class T>
struct LeakyRelu {
  Wide<T> slope;
  bool passes(T x) const { return x > T(0); }
  T value(T x) const { return x > T(0) ? x : to<T>(x * slope); }
};

}  // namespace

void pack_bits(const at::Tensor& mask, at::Tensor& bits) {
  std::uint8_t* const to = bits.mutable_data_ptr<std::uint8_t>();
  const auto pack = [&]<class T>(const T* from) {
    over_blocks(mask.numel(), [&](std::int64_t first, std::int64_t count) {
      Flags flags{};
      for (std::int64_t i = 0; i < count; ++i) {
        flags[static_cast<std::size_t>(i)] = from[first + i] != T(0);
      }
      store_bits(flags, to, first, count);
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
  const std::uint8_t* const from = bits.const_data_ptr<std::uint8_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "brim::apply_bits", [&] {
        const scalar_t* const in = input.const_data_ptr<scalar_t>();
        scalar_t* const out = output.mutable_data_ptr<scalar_t>();
        const auto loop = [&](const auto& when_on, const auto& when_off) {
          over_blocks(input.numel(), [&](std::int64_t first, std::int64_t count) {
            Flags flags{};
            for (std::int64_t i = 0; i < bit_bytes(count); ++i) {
              flags_of(from[first / 8 + i], flags.data() + 8 * i);
            }
            for (std::int64_t i = 0; i < count; ++i) {
              const scalar_t x = in[first + i];
              out[first + i] = flags[static_cast<std::size_t>(i)] != 0 ? when_on(x) : when_off(x);
            }
          });
        };
        const auto same = [](scalar_t x) { return x; };
        const auto zero = [](scalar_t) { return scalar_t(0); };
        const auto times = [](double factor) {
          return [factor = static_cast<Wide<scalar_t>>(factor)](scalar_t x) {
            return to<scalar_t>(x * factor);
          };
        };
        if (on == 1.0 && off == 0.0) {
          loop(same, zero);
        } else if (off == 0.0) {
          loop(times(on), zero);
        } else if (on == 1.0) {
          loop(same, times(off));
        } else {
          loop(times(on), times(off));
        }
      });
}

void gate_pack(const at::Tensor& input, at::Tensor& output, at::Tensor& bits, std::int64_t gate,
               double a, double b) {
  std::uint8_t* const to_bits = bits.mutable_data_ptr<std::uint8_t>();
  const std::int64_t elements = input.numel();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "brim::gate_pack", [&] {
        const scalar_t* const in = input.const_data_ptr<scalar_t>();
        scalar_t* const out = output.mutable_data_ptr<scalar_t>();
        const Hardtanh<scalar_t> clamp(to<scalar_t>(a), to<scalar_t>(b));
        const LeakyRelu<scalar_t> leaky(static_cast<Wide<scalar_t>>(a));
        switch (static_cast<Gate>(gate)) {
          case Gate::kRelu:
            return gate_loop(in, out, to_bits, elements, Relu<scalar_t>());
          case Gate::kHardtanh:
            return gate_loop(in, out, to_bits, elements, clamp);
          case Gate::kLeakyRelu:
            return gate_loop(in, out, to_bits, elements, leaky);
        }
      });
}

}  // namespace brim::nn::cpu
