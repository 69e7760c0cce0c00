#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/call_key.h>
#include <brim/adapt/detail/driver.h>
#include <brim/adapt/named_sizes.h>
#include <brim/adapt/options.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

namespace brim {
namespace detail {

inline const AdaptOptions& default_options() {
  static const AdaptOptions options;
  return options;
}

/// Runs `work` and catches what it throws. The exception is released after the catch block, and
/// with it all that it kept alive.
template <class Work>
[[gnu::always_inline]] inline std::optional<Failure> attempt(const Work& work) {
  std::exception_ptr error;
  try {
    work();
    return std::nullopt;
  } catch (...) {
    error = std::current_exception();
  }
  auto failure = release_error(std::move(error));
  release_failed_backward();
  return failure;
}

/// Calls `function(values)` until it fits, and returns its result.
template <class Function>
[[gnu::always_inline]] inline auto until_it_fits(const MaximizeCall& call,
                                                 const Function& function) {
  using Values = std::span<const std::int64_t>;
  using Result = std::decay_t<std::invoke_result_t<const Function&, Values>>;
  if constexpr (std::is_void_v<Result>) {
    maximize(call, [&](Values values) {
      return values.empty() ? std::nullopt : attempt([&] { function(values); });
    });
  } else {
    std::optional<Result> result;
    maximize(call, [&](Values values) -> std::optional<Failure> {
      if (values.empty()) [[unlikely]] {
        result.reset();
        return std::nullopt;
      }
      return attempt([&] { result.emplace(function(values)); });
    });
    return Result(*std::move(result));
  }
}

}  // namespace detail

/// Calls `function(sizes)` with the largest sizes that fit, and returns its result.
///
///     brim::maximize({{"batch_size", brim::infer(x)}, {"k", 64}}, [&](const brim::Sizes& sizes) {
///       return nearest(x, y, sizes["batch_size"], sizes["k"]);
///     });
///
/// The first attempt is at the maxima, or at what `options.memory` knows to fit. After running out
/// of memory the next sizes are worked out from the figures of the failure, and the call is
/// repeated with the random state of the first attempt. An error that is not about memory passes
/// untouched.
///
/// @throws c10::OutOfMemoryError with a summary if it does not fit even at the floor.
template <class Function>
auto maximize(const NamedSizes& sizes, Function&& function,
              const AdaptOptions& options = detail::default_options()) {
  AdaptOptions named = options;
  named.name = sizes.text();
  return detail::until_it_fits({.maxima = sizes.maxima(),
                                .quanta = sizes.quanta(),
                                .groups = sizes.groups(),
                                .options = named},
                               [&](std::span<const std::int64_t> values) {
                                 return std::invoke(function, Sizes(sizes.names(), values));
                               });
}

/// Calls `function(size)` with the largest size up to `initial` that fits, and returns its result;
/// see maximize. A call that fits at once costs some ten nanoseconds and allocates nothing.
///
///     auto result = brim::batch(512, [&](std::int64_t batch_size) {
///       return evaluate(model, data, batch_size);
///     });
template <class Function>
auto batch(std::int64_t initial, Function&& function,
           const AdaptOptions& options = detail::default_options()) {
  TORCH_CHECK_VALUE(initial >= 1, "initial must be 1 or more, got ", initial);
  return detail::until_it_fits(
      {.maxima = {&initial, 1},
       .quanta = {&options.quantum, 1},
       .options = options,
       .counts_items = true},
      [&](std::span<const std::int64_t> values) { return std::invoke(function, values.front()); });
}

/// `batch` under the name of the Python decorator: one size, from `maximum` down.
template <class Function>
auto maximize(std::int64_t maximum, Function&& function,
              const AdaptOptions& options = detail::default_options()) {
  return batch(maximum, std::forward<Function>(function), options);
}

/// Calls `function(begin, end)` for parts that together cover [start, end), each as long as fits,
/// at most `initial`.
///
/// A part that succeeded is never done again. With Strategy::predictive and nothing remembered the
/// first parts are short: they show how memory grows. The step then goes to the largest that fits,
/// usually without running out of memory at all.
/// @throws c10::OutOfMemoryError with a summary if a part does not fit even at the floor.
template <class Function>
void range(std::int64_t start, std::int64_t end, std::int64_t initial, Function&& function,
           const AdaptOptions& options = detail::default_options()) {
  detail::range(start, end, initial, options, [&](std::int64_t begin, std::int64_t stop) {
    return detail::attempt([&] { std::invoke(function, begin, stop); });
  });
}

/// Calls `function(chunk, begin, end)` for chunks of `tensor` along `dim`, each as long as fits;
/// see range. The chunks are views: what is written to them is written to the tensor. Sizes are
/// remembered by `options.key` and by the tensor, apart from its length along `dim`.
template <class Function>
void chunked(const at::Tensor& tensor, std::int64_t initial, Function&& function,
             std::int64_t dim = 0, const AdaptOptions& options = detail::default_options()) {
  TORCH_CHECK_VALUE(tensor.defined(), "tensor is undefined");
  dim = detail::chunk_dim(tensor.dim(), dim);
  AdaptOptions keyed = options;
  CallKey key(options.key);
  key.add(tensor, dim);
  keyed.key = key.value();
  range(
      0, tensor.size(dim), initial,
      [&](std::int64_t begin, std::int64_t end) {
        std::invoke(function, tensor.narrow(dim, begin, end - begin), begin, end);
      },
      keyed);
}

}  // namespace brim
