#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <type_traits>

#include "nn/cpu/number.h"
#include "nn/ops/max_pool.h"

namespace brim::nn::cpu {
namespace {

using Int = std::int64_t;

// Outputs (or channels) that are worked on together: what they need lies in the first cache.
constexpr Int kBlock = 512;
constexpr Int kLeastChannels = 64;  // fewer for a thread, and threads share cache lines
constexpr Int kGrain = 32768;       // values read; as much as ATen gives a thread at least

Int grain_of(Int values_each) { return std::max<Int>(1, kGrain / std::max<Int>(1, values_each)); }

// -- Which value is larger ---------------------------------------------------------------------

/// How values compare. Half-width types compare as whole numbers of the same width, because that
/// is twice as fast as going through float.
template <class T>
struct Order {
  using Raw = T;  // as it lies in memory
  using Key = T;
  using Place = std::conditional_t<sizeof(T) == 8, std::int64_t, std::int32_t>;
  static constexpr bool kKeyIsValue = true;
  static constexpr Raw kLowestRaw = -std::numeric_limits<T>::infinity();
  static constexpr Key kLowest = kLowestRaw;

  static Key key(Raw value) { return value; }
  /// As torch: of equal ones the first stays, and NaN beats all.
  static bool beats(Key value, Key best) { return (value > best) | (value != value); }

  template <class Number>
  static Number pick(bool first, Number a, Number b) {
    return first ? a : b;
  }
};

template <std::int16_t Infinity>
struct HalfOrder {
  using Raw = std::int16_t;
  using Key = std::int16_t;
  using Place = std::int16_t;
  static constexpr bool kKeyIsValue = false;
  static constexpr Raw kLowestRaw = static_cast<Raw>(Infinity | 0x8000);
  static constexpr Key kLowest = static_cast<Key>(-Infinity);
  static constexpr Key kNan = std::numeric_limits<Key>::max();

  // With masks: the compiler makes branches of conditions here, and no vectors.
  static Key key(Raw value) {
    const auto size = static_cast<Key>(value & 0x7fff);
    const auto sign = static_cast<Key>(value >> 15);
    const auto number = static_cast<Key>((size ^ sign) - sign);
    return pick(size > Infinity, kNan, number);
  }
  static bool beats(Key value, Key best) { return (value > best) | (value == kNan); }

  static std::int16_t pick(bool first, std::int16_t a, std::int16_t b) {
    const auto mask = static_cast<std::int16_t>(-static_cast<std::int16_t>(first));
    return static_cast<std::int16_t>(b ^ ((a ^ b) & mask));
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
  using Key = typename Order<T>::Key;
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
    const Raw* const from = Order<T>::kKeyIsValue ? keys_as_values() : value_.data();
    std::copy_n(from, count, values);
    for (Int i = 0; i < count; ++i) {
      places[i] = static_cast<std::uint8_t>(place_[static_cast<std::size_t>(i)]);
    }
  }

 private:
  const Raw* keys_as_values() const { return best_.data(); }

  template <class Step>
  void look_by(const Raw* __restrict from, Step step, Int first, Int count, Int place_now) {
    Key* __restrict const best = best_.data() + first;
    // NOLINTNEXTLINE(misc-const-correctness): written below, for types whose key is no value
    Raw* __restrict const value = value_.data() + first;
    Place* __restrict const place = place_.data() + first;
    const auto here = static_cast<Place>(place_now);
    for (Int i = 0; i < count; ++i) {
      const Raw now = from[i * step];
      const Key key = Order<T>::key(now);
      const bool wins = Order<T>::beats(key, best[i]);
      best[i] = Order<T>::pick(wins, key, best[i]);
      place[i] = Order<T>::pick(wins, here, place[i]);
      if constexpr (!Order<T>::kKeyIsValue) {
        value[i] = Order<T>::pick(wins, now, value[i]);
      }
    }
  }

  std::array<Key, kBlock> best_;
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

/// Calls row(n, od, oh) for parts [begin, end) of all rows of outputs.
template <class Row>
void over_rows(Int begin, Int end, const std::int64_t* sizes, const Row& row) {
  for (Int i = begin; i < end; ++i) {
    const Int rest = i / sizes[1];
    row(rest / sizes[0], rest % sizes[0], i % sizes[1]);
  }
}

// -- Forward -----------------------------------------------------------------------------------

/// Channels first: the outputs of a row side by side.
template <class T>
void pack_planes(const at::Tensor& input, at::Tensor& output, at::Tensor& offsets,
                 const PoolGeometry& g) {
  const auto* const in = raw<T>(input);
  auto* const out = raw<T>(output);
  auto* const to = offsets.mutable_data_ptr<std::uint8_t>();
  const Int rows = g.planes() * g.out[0] * g.out[1];
  at::parallel_for(0, rows, grain_of(g.out[2] * g.places()), [&](Int begin, Int end) {
    Maxima<T> maxima;
    over_rows(begin, end, g.out, [&](Int plane, Int od, Int oh) {
      const Places deep(g, 0, od);
      const Places high(g, 1, oh);
      const Int row = ((plane * g.out[0] + od) * g.out[1] + oh) * g.out[2];
      for (Int left = 0; left < g.out[2]; left += kBlock) {
        const Int right = std::min(left + kBlock, g.out[2]);
        const Int corner = (deep.first * g.kernel[1] + high.first) * g.kernel[2];
        maxima.start(right - left, corner);
        for (Int o = left; o < right && o * g.stride[2] < g.padding[2]; ++o) {
          maxima.set_place(o - left, corner + Places(g, 2, o).first);
        }
        for (Int kd = deep.first; kd < deep.end; ++kd) {
          const Int id = plane * g.in[0] + deep.start + kd * g.dilation[0];
          for (Int kh = high.first; kh < high.end; ++kh) {
            const Int ih = id * g.in[1] + high.start + kh * g.dilation[1];
            for (Int kw = 0; kw < g.kernel[2]; ++kw) {
              const Outputs outputs(g, kw);
              const Int first = std::max(left, outputs.first);
              const Int count = std::min(right, outputs.end) - first;
              const Int iw = first * g.stride[2] - g.padding[2] + kw * g.dilation[2];
              if (count > 0) {
                maxima.look(in + ih * g.in[2] + iw, g.stride[2], first - left, count,
                            (kd * g.kernel[1] + kh) * g.kernel[2] + kw);
              }
            }
          }
        }
        maxima.store(out + row + left, to + row + left, right - left);
      }
    });
  });
}

/// Channels last: the channels of an output side by side.
template <class T>
void pack_pixels(const at::Tensor& input, at::Tensor& output, at::Tensor& offsets,
                 const PoolGeometry& g) {
  const auto* const in = raw<T>(input);
  auto* const out = raw<T>(output);
  auto* const to = offsets.mutable_data_ptr<std::uint8_t>();
  const Int rows = g.batch * g.out[0] * g.out[1];
  at::parallel_for(0, rows, grain_of(g.out[2] * g.channels * g.places()), [&](Int begin, Int end) {
    Maxima<T> maxima;
    over_rows(begin, end, g.out, [&](Int n, Int od, Int oh) {
      const Places deep(g, 0, od);
      const Places high(g, 1, oh);
      for (Int ow = 0; ow < g.out[2]; ++ow) {
        const Places wide(g, 2, ow);
        const Int pixel = ((n * g.out[0] + od) * g.out[1] + oh) * g.out[2] + ow;
        for (Int c = 0; c < g.channels; c += kBlock) {
          const Int count = std::min(kBlock, g.channels - c);
          maxima.start(count, (deep.first * g.kernel[1] + high.first) * g.kernel[2] + wide.first);
          for (Int kd = deep.first; kd < deep.end; ++kd) {
            const Int id = n * g.in[0] + deep.start + kd * g.dilation[0];
            for (Int kh = high.first; kh < high.end; ++kh) {
              const Int ih = id * g.in[1] + high.start + kh * g.dilation[1];
              for (Int kw = wide.first; kw < wide.end; ++kw) {
                const Int iw = ih * g.in[2] + wide.start + kw * g.dilation[2];
                maxima.look(in + iw * g.channels + c, 1, 0, count,
                            (kd * g.kernel[1] + kh) * g.kernel[2] + kw);
              }
            }
          }
          maxima.store(out + pixel * g.channels + c, to + pixel * g.channels + c, count);
        }
      }
    });
  });
}

// -- Backward ----------------------------------------------------------------------------------

/// Where a place lies relative to its window's start.
struct Steps {
  explicit Steps(const PoolGeometry& g) {
    for (Int place = 0; place < g.places(); ++place) {
      const Int rows = place / g.kernel[2];
      auto& at = to[static_cast<std::size_t>(place)];
      at = {rows / g.kernel[1] * g.dilation[0], rows % g.kernel[1] * g.dilation[1],
            place % g.kernel[2] * g.dilation[2]};
      flat[static_cast<std::size_t>(place)] = (at[0] * g.in[1] + at[1]) * g.in[2] + at[2];
    }
  }

  // Places that no window has lead to its start.
  std::array<std::array<Int, 3>, kMostPlaces> to{};
  std::array<Int, kMostPlaces> flat{};
};

/// Whether the whole window of output `o` lies in the input, along dimension `d`.
bool is_inside(const PoolGeometry& g, int d, Int o) {
  const Int start = o * g.stride[d] - g.padding[d];
  return start >= 0 && start + (g.kernel[d] - 1) * g.dilation[d] < g.in[d];
}

bool is_in(const PoolGeometry& g, Int d, Int h, Int w) {
  return d >= 0 && d < g.in[0] && h >= 0 && h < g.in[1] && w >= 0 && w < g.in[2];
}

/// In the order of the outputs and in T, as torch adds: the same bits.
template <class T>
void scatter_planes(const at::Tensor& grad, const at::Tensor& offsets, at::Tensor& grad_input,
                    const PoolGeometry& g) {
  const T* const from = grad.const_data_ptr<T>();
  const auto* const places = offsets.const_data_ptr<std::uint8_t>();
  auto* const to = grad_input.mutable_data_ptr<T>();
  const Steps steps(g);
  Int inside_begin = 0;
  while (inside_begin < g.out[2] && !is_inside(g, 2, inside_begin)) {
    ++inside_begin;
  }
  Int inside_end = g.out[2];
  while (inside_end > inside_begin && !is_inside(g, 2, inside_end - 1)) {
    --inside_end;
  }
  at::parallel_for(0, g.planes(), grain_of(g.in_size()), [&](Int begin, Int end) {
    std::memset(static_cast<void*>(to + begin * g.in_size()), 0,
                static_cast<std::size_t>((end - begin) * g.in_size()) * sizeof(T));
    over_rows(begin * g.out[0] * g.out[1], end * g.out[0] * g.out[1], g.out,
              [&](Int plane, Int od, Int oh) {
                const Int row = ((plane * g.out[0] + od) * g.out[1] + oh) * g.out[2];
                const Int id = od * g.stride[0] - g.padding[0];
                const Int ih = oh * g.stride[1] - g.padding[1];
                T* const sums = to + plane * g.in_size();
                const bool rows_inside = is_inside(g, 0, od) && is_inside(g, 1, oh);
                const auto checked = [&](Int ow) {
                  const auto& step = steps.to[places[row + ow]];
                  const Int iw = ow * g.stride[2] - g.padding[2];
                  if (is_in(g, id + step[0], ih + step[1], iw + step[2])) {
                    sums[((id + step[0]) * g.in[1] + ih + step[1]) * g.in[2] + iw + step[2]] +=
                        from[row + ow];
                  }
                };
                const Int first = rows_inside ? inside_begin : g.out[2];
                const Int last = rows_inside ? inside_end : g.out[2];
                for (Int ow = 0; ow < first; ++ow) {
                  checked(ow);
                }
                T* const start = sums + (id * g.in[1] + ih) * g.in[2] - g.padding[2];
                for (Int ow = first; ow < last; ++ow) {
                  start[ow * g.stride[2] + steps.flat[places[row + ow]]] += from[row + ow];
                }
                for (Int ow = last; ow < g.out[2]; ++ow) {
                  checked(ow);
                }
              });
  });
}

/// Channels last. Channels have nothing to do with each other, so that few samples are split among
/// threads by them.
template <class T>
void scatter_pixels(const at::Tensor& grad, const at::Tensor& offsets, at::Tensor& grad_input,
                    const PoolGeometry& g) {
  const T* const from = grad.const_data_ptr<T>();
  const auto* const places = offsets.const_data_ptr<std::uint8_t>();
  auto* const to = grad_input.mutable_data_ptr<T>();
  const Steps steps(g);
  std::array<Int, kMostPlaces> step_of{};
  std::transform(steps.flat.begin(), steps.flat.end(), step_of.begin(),
                 [&](Int step) { return step * g.channels; });
  const Int wanted = ceil_div(at::get_num_threads(), g.batch);
  const Int part = std::max(kLeastChannels, ceil_div(g.channels, wanted));
  const Int parts = ceil_div(g.channels, part);
  at::parallel_for(0, g.batch * parts, grain_of(g.in_size() * part), [&](Int begin, Int end) {
    for (Int i = begin; i < end; ++i) {
      const Int n = i / parts;
      const Int first = i % parts * part;
      const Int count = std::min(part, g.channels - first);
      T* const sums = to + n * g.in_size() * g.channels + first;
      for (Int pixel = 0; pixel < g.in_size(); ++pixel) {
        std::fill_n(sums + pixel * g.channels, count, T(0));
      }
      const Int rows = g.out[0] * g.out[1];
      over_rows(n * rows, (n + 1) * rows, g.out, [&](Int, Int od, Int oh) {
        const Int id = od * g.stride[0] - g.padding[0];
        const Int ih = oh * g.stride[1] - g.padding[1];
        const bool rows_inside = is_inside(g, 0, od) && is_inside(g, 1, oh);
        for (Int ow = 0; ow < g.out[2]; ++ow) {
          const Int iw = ow * g.stride[2] - g.padding[2];
          const Int row = (n * g.out[0] + od) * g.out[1] + oh;
          const Int here = (row * g.out[2] + ow) * g.channels + first;
          const Int start = ((id * g.in[1] + ih) * g.in[2] + iw) * g.channels;
          if (rows_inside && is_inside(g, 2, ow)) {
            for (Int c = 0; c < count; ++c) {
              sums[start + step_of[places[here + c]] + c] += from[here + c];
            }
            continue;
          }
          for (Int c = 0; c < count; ++c) {
            const auto& step = steps.to[places[here + c]];
            if (is_in(g, id + step[0], ih + step[1], iw + step[2])) {
              sums[start + step_of[places[here + c]] + c] += from[here + c];
            }
          }
        }
      });
    }
  });
}

}  // namespace

void max_pool_pack(const at::Tensor& input, at::Tensor& output, at::Tensor& offsets,
                   const PoolGeometry& geometry) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "brim::max_pool_pack", [&] {
        (geometry.channels_last ? pack_pixels<scalar_t> : pack_planes<scalar_t>)(input, output,
                                                                                 offsets, geometry);
      });
}

void max_pool_scatter(const at::Tensor& grad, const at::Tensor& offsets, at::Tensor& grad_input,
                      const PoolGeometry& geometry) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, grad.scalar_type(), "brim::max_pool_scatter", [&] {
        (geometry.channels_last ? scatter_pixels<scalar_t>
                                : scatter_planes<scalar_t>)(grad, offsets, grad_input, geometry);
      });
}

void max_pool_indices(const at::Tensor& offsets, at::Tensor& indices, const PoolGeometry& g) {
  const auto* const places = offsets.const_data_ptr<std::uint8_t>();
  auto* const to = indices.mutable_data_ptr<Int>();
  const Steps steps(g);
  const Int inner = g.channels_last ? g.channels : 1;
  const Int rows = (g.channels_last ? g.batch : g.planes()) * g.out[0] * g.out[1];
  at::parallel_for(0, rows, grain_of(g.out[2] * inner), [&](Int begin, Int end) {
    over_rows(begin, end, g.out, [&](Int n, Int od, Int oh) {
      const Int row = ((n * g.out[0] + od) * g.out[1] + oh) * g.out[2];
      const Int id = od * g.stride[0] - g.padding[0];
      const Int ih = oh * g.stride[1] - g.padding[1];
      for (Int i = 0; i < g.out[2] * inner; ++i) {
        const Int iw = i / inner * g.stride[2] - g.padding[2];
        to[row * inner + i] =
            (id * g.in[1] + ih) * g.in[2] + iw + steps.flat[places[row * inner + i]];
      }
    });
  });
}

}  // namespace brim::nn::cpu
