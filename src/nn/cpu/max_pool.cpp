#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <type_traits>

#include "nn/cpu/grain.h"
#include "nn/cpu/number.h"
#include "nn/ops/max_pool_kernels.h"

namespace brim::nn::cpu {
namespace {

using Int = std::int64_t;

// Outputs (or channels) that are worked on together: what they need lies in the first cache.
constexpr Int kBlock = 512;
constexpr Int kLeastChannels = 64;  // fewer for a thread, and threads share cache lines

// -- Which value is larger ---------------------------------------------------------------------

/// How values compare. Half-width types compare as whole numbers of the same width, because that
/// is twice as fast as going through float.
template <class T>
struct Order {
  using Raw = T;  // as it lies in memory; a key of the same type compares as the value does
  using Place = std::conditional_t<sizeof(T) == 8, std::int64_t, std::int32_t>;
  static constexpr bool kKeyIsValue = true;
  static constexpr Raw kLowestRaw = -std::numeric_limits<T>::infinity();
  static constexpr Raw kLowest = kLowestRaw;

  static Raw key(Raw value) { return value; }
  /// As torch: of equal ones the first stays, and NaN beats all.
  static bool beats(Raw key, Raw best) { return (key > best) | (key != key); }

  template <class Number>
  static Number pick(bool first, Number a, Number b) {
    return first ? a : b;
  }
};

template <std::int16_t Infinity>
struct HalfOrder {
  using Raw = std::int16_t;
  using Place = std::int16_t;
  static constexpr bool kKeyIsValue = false;
  static constexpr Raw kLowestRaw = static_cast<Raw>(Infinity | 0x8000);
  static constexpr Raw kLowest = static_cast<Raw>(-Infinity);
  static constexpr Raw kNan = std::numeric_limits<Raw>::max();

  // With masks: the compiler makes branches of conditions here, and no vectors.
  static Raw key(Raw value) {
    const auto size = static_cast<Raw>(value & 0x7fff);
    const auto sign = static_cast<Raw>(value >> 15);
    const auto number = static_cast<Raw>((size ^ sign) - sign);
    return pick(size > Infinity, kNan, number);
  }
  static bool beats(Raw key, Raw best) { return (key > best) | (key == kNan); }

  static Raw pick(bool first, Raw a, Raw b) {
    const auto mask = static_cast<Raw>(-static_cast<Raw>(first));
    return static_cast<Raw>(b ^ ((a ^ b) & mask));
  }
};

template <>
struct Order<c10::Half> : HalfOrder<0x7c00> {};
template <>
struct Order<c10::BFloat16> : HalfOrder<0x7f80> {};

template <class T>
const typename Order<T>::Raw* raw(const at::Tensor& tensor) {
  return static_cast<const typename Order<T>::Raw*>(tensor.const_data_ptr());
}

template <class T>
typename Order<T>::Raw* raw(at::Tensor& tensor) {
  return static_cast<typename Order<T>::Raw*>(tensor.mutable_data_ptr());
}

/// The best so far of kBlock windows side by side.
template <class T>
class Maxima {
 public:
  using Raw = typename Order<T>::Raw;
  using Place = typename Order<T>::Place;

  void start(Int count, Int place) {
    std::fill_n(best_.begin(), count, Order<T>::kLowest);
    std::fill_n(value_.begin(), count, Order<T>::kLowestRaw);
    std::fill_n(place_.begin(), count, static_cast<Place>(place));
  }

  void set_place(Int i, Int place) {
    place_[static_cast<std::size_t>(i)] = static_cast<Place>(place);
  }

  /// Windows [first, first + count) look at from[0], from[step], ..., their value at `place`.
  void look(const Raw* from, Int step, Int first, Int count, Int place) {
    // Steps that the compiler knows become vector loads.
    switch (step) {
      case 1:
        return look_by(from, std::integral_constant<Int, 1>(), first, count, place);
      case 2:
        return look_by(from, std::integral_constant<Int, 2>(), first, count, place);
      default:
        return look_by(from, step, first, count, place);
    }
  }

  void store(Raw* values, std::uint8_t* places, Int count) const {
    std::copy_n((Order<T>::kKeyIsValue ? best_ : value_).data(), count, values);
    for (Int i = 0; i < count; ++i) {
      places[i] = static_cast<std::uint8_t>(place_[static_cast<std::size_t>(i)]);
    }
  }

 private:
  template <class Step>
  void look_by(const Raw* __restrict from, Step step, Int first, Int count, Int place_now) {
    Raw* __restrict const best = best_.data() + first;
    // NOLINTNEXTLINE(misc-const-correctness): written below, for types whose key is no value
    Raw* __restrict const value = value_.data() + first;
    Place* __restrict const place = place_.data() + first;
    const auto here = static_cast<Place>(place_now);
    for (Int i = 0; i < count; ++i) {
      const Raw now = from[i * step];
      const Raw key = Order<T>::key(now);
      const bool wins = Order<T>::beats(key, best[i]);
      best[i] = Order<T>::pick(wins, key, best[i]);
      place[i] = Order<T>::pick(wins, here, place[i]);
      if constexpr (!Order<T>::kKeyIsValue) {
        value[i] = Order<T>::pick(wins, now, value[i]);
      }
    }
  }

  std::array<Raw, kBlock> best_;  // keys
  std::array<Raw, kBlock> value_;
  std::array<Place, kBlock> place_;
};

// -- Windows along one dimension ---------------------------------------------------------------

Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }

/// Places [first, end) of the window of output `o` along dimension `d` that lie in the input.
struct Places {
  Int start, first, end;

  Places(const PoolGeometry& g, int d, Int o)
      : start(o * g.stride[d] - g.padding[d]),
        first(start < 0 ? ceil_div(-start, g.dilation[d]) : 0),
        end(std::min(g.kernel[d], ceil_div(std::max<Int>(0, g.in[d] - start), g.dilation[d]))) {}
};

/// Outputs [first, end) whose window has `place` in the input, along the last dimension.
struct Outputs {
  Int first, end;

  Outputs(const PoolGeometry& g, Int place) {
    const Int before = g.padding[2] - place * g.dilation[2];
    first = before > 0 ? ceil_div(before, g.stride[2]) : 0;
    const Int last = g.in[2] - 1 + before;
    end = last < 0 ? 0 : std::min(g.out[2], last / g.stride[2] + 1);
  }
};

// -- Forward -----------------------------------------------------------------------------------

template <class T>
void pack_typed(const at::Tensor& input, at::Tensor& output, at::Tensor& offsets,
                const PoolGeometry& g) {
  const auto* const in = raw<T>(input);
  auto* const out = raw<T>(output);
  auto* const to = offsets.mutable_data_ptr<std::uint8_t>();
  const Int channels = g.channels_last ? g.channels : 1;  // of a place
  const Int rows = g.planes() / channels * g.out[0] * g.out[1];
  at::parallel_for(0, rows, grain_of(g.out[2] * channels * g.places()), [&](Int begin, Int end) {
    Maxima<T> maxima;
    for (Int i = begin; i < end; ++i) {
      const Int oh = i % g.out[1];
      const Int od = i / g.out[1] % g.out[0];
      const Int plane = i / g.out[1] / g.out[0];
      const Places deep(g, 0, od);
      const Places high(g, 1, oh);
      const Int row = i * g.out[2];
      const Int corner = (deep.first * g.kernel[1] + high.first) * g.kernel[2];
      // Calls look(where a row of the input begins, its first place in the window).
      const auto over_window = [&](const auto& look) {
        for (Int kd = deep.first; kd < deep.end; ++kd) {
          const Int id = plane * g.in[0] + deep.start + kd * g.dilation[0];
          for (Int kh = high.first; kh < high.end; ++kh) {
            const Int ih = id * g.in[1] + high.start + kh * g.dilation[1];
            look(ih * g.in[2], (kd * g.kernel[1] + kh) * g.kernel[2]);
          }
        }
      };
      if (g.channels_last) {  // the channels of an output side by side
        for (Int ow = 0; ow < g.out[2]; ++ow) {
          const Places wide(g, 2, ow);
          for (Int c = 0; c < channels; c += kBlock) {
            const Int count = std::min(kBlock, channels - c);
            maxima.start(count, corner + wide.first);
            over_window([&](Int in_row, Int place) {
              for (Int kw = wide.first; kw < wide.end; ++kw) {
                const Int iw = wide.start + kw * g.dilation[2];
                maxima.look(in + (in_row + iw) * channels + c, 1, 0, count, place + kw);
              }
            });
            maxima.store(out + (row + ow) * channels + c, to + (row + ow) * channels + c, count);
          }
        }
        continue;
      }
      for (Int left = 0; left < g.out[2]; left += kBlock) {  // the outputs of a row side by side
        const Int right = std::min(left + kBlock, g.out[2]);
        maxima.start(right - left, corner);
        for (Int o = left; o < right && o * g.stride[2] < g.padding[2]; ++o) {
          maxima.set_place(o - left, corner + Places(g, 2, o).first);
        }
        over_window([&](Int in_row, Int place) {
          for (Int kw = 0; kw < g.kernel[2]; ++kw) {
            const Outputs outputs(g, kw);
            const Int first = std::max(left, outputs.first);
            const Int count = std::min(right, outputs.end) - first;
            const Int iw = first * g.stride[2] - g.padding[2] + kw * g.dilation[2];
            if (count > 0) {
              maxima.look(in + in_row + iw, g.stride[2], first - left, count, place + kw);
            }
          }
        });
        maxima.store(out + row + left, to + row + left, right - left);
      }
    }
  });
}

// -- Backward ----------------------------------------------------------------------------------

/// Adds in the order of the outputs and in T, as torch does: the same bits. Channels have nothing
/// to do with each other, so that few samples are split among threads by them.
template <class T>
void scatter_typed(const at::Tensor& grad, const at::Tensor& offsets, at::Tensor& grad_input,
                   const PoolGeometry& g) {
  const T* const from = grad.const_data_ptr<T>();
  const auto* const places = offsets.const_data_ptr<std::uint8_t>();
  auto* const to = grad_input.mutable_data_ptr<T>();
  const Int channels = g.channels_last ? g.channels : 1;  // of a place
  const Int planes = g.planes() / channels;
  const Int size = g.in_size() * channels;
  // From where a window starts to each of its places; a byte can hold more than there are.
  std::array<Int, kMostPlaces> steps{};
  for (Int place = 0; place < g.places(); ++place) {
    const Int rows = place / g.kernel[2];
    const Int d = rows / g.kernel[1] * g.dilation[0];
    const Int h = rows % g.kernel[1] * g.dilation[1];
    const Int w = place % g.kernel[2] * g.dilation[2];
    steps[static_cast<std::size_t>(place)] = ((d * g.in[1] + h) * g.in[2] + w) * channels;
  }
  // From where the windows of a row start to the end of the last one.
  const Int reach = ((g.out[2] - 1) * g.stride[2] + 1) * channels +
                    steps[static_cast<std::size_t>(g.places() - 1)];
  const Int wanted = ceil_div(at::get_num_threads(), planes);
  const Int part = std::min(channels, std::max(kLeastChannels, ceil_div(channels, wanted)));
  const Int parts = ceil_div(channels, part);
  at::parallel_for(0, planes * parts, grain_of(g.in_size() * part), [&](Int begin, Int end) {
    for (Int i = begin; i < end; ++i) {
      const Int plane = i / parts;
      const Int first = i % parts * part;
      const Int last = std::min(first + part, channels);
      T* const sums = to + plane * size;
      const Int step = parts == 1 ? size : channels;  // all at once, or a part of each pixel
      const Int count = parts == 1 ? size : last - first;
      for (Int at = first; at < size; at += step) {
        std::memset(static_cast<void*>(sums + at), 0, static_cast<std::size_t>(count) * sizeof(T));
      }
      const Int outputs = g.out[2] * channels;  // of a row
      Int row = plane * g.out[0] * g.out[1] * outputs;
      for (Int od = 0; od < g.out[0]; ++od) {
        const Int id = od * g.stride[0] - g.padding[0];
        for (Int oh = 0; oh < g.out[1]; ++oh, row += outputs) {
          const Int ih = oh * g.stride[1] - g.padding[1];
          const Int start = ((id * g.in[1] + ih) * g.in[2] - g.padding[2]) * channels;
          const auto add_row = [&](auto checks) {
            const auto add = [&](Int place, Int output) {
              const Int at = place + steps[places[output]];
              if (!checks || (at >= 0 && at < size)) {
                sums[at] += from[output];
              }
            };
            if (channels == 1) {
              for (Int ow = 0; ow < g.out[2]; ++ow) {
                add(start + ow * g.stride[2], row + ow);
              }
              return;
            }
            for (Int ow = 0; ow < g.out[2]; ++ow) {
              for (Int c = first; c < last; ++c) {
                add(start + ow * g.stride[2] * channels + c, row + ow * channels + c);
              }
            }
          };
          // A maximum lies in the input. The check is for offsets that somebody wrote to; it costs
          // a quarter of the time, so that rows whose windows lie inside go without.
          if (start >= 0 && start + reach <= size) {
            add_row(std::false_type());
          } else {
            add_row(std::true_type());
          }
        }
      }
    }
  });
}

}  // namespace

void max_pool_pack(const at::Tensor& input, at::Tensor& output, at::Tensor& offsets,
                   const PoolGeometry& geometry) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(),
                                  "brim::max_pool_pack",
                                  [&] { pack_typed<scalar_t>(input, output, offsets, geometry); });
}

void max_pool_scatter(const at::Tensor& grad, const at::Tensor& offsets, at::Tensor& grad_input,
                      const PoolGeometry& geometry) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, grad.scalar_type(), "brim::max_pool_scatter",
      [&] { scatter_typed<scalar_t>(grad, offsets, grad_input, geometry); });
}

}  // namespace brim::nn::cpu
