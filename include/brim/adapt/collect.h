#pragma once

#include <brim/adapt/adapt.h>

#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace brim {
namespace detail {

/// Calls `run` with a function that calls `function` and keeps what it returns.
template <class Result, class Function, class Run>
std::vector<Result> collect(Function& function, const Run& run) {
  std::vector<Result> results;
  run([&](auto&&... arguments) {
    Result result = std::invoke(function, std::forward<decltype(arguments)>(arguments)...);
    results.push_back(std::move(result));
  });
  return results;
}

}  // namespace detail

/// As range, and returns what `function` returned for each part, in order. Results that are tensors
/// take memory beside the next parts.
template <class Function>
auto collect_range(std::int64_t start, std::int64_t end, std::int64_t initial, Function&& function,
                   const AdaptOptions& options = detail::default_options()) {
  using Result = std::decay_t<std::invoke_result_t<Function&, std::int64_t, std::int64_t>>;
  return detail::collect<Result>(
      function, [&](const auto& part) { range(start, end, initial, part, options); });
}

/// As chunked, and returns what `function` returned for each chunk, in order:
///
///     at::cat(brim::collect_chunked(x, 512, [&](const at::Tensor& chunk, auto, auto) {
///       return model->forward(chunk);
///     }));
template <class Function>
auto collect_chunked(const at::Tensor& tensor, std::int64_t initial, Function&& function,
                     std::int64_t dim = 0,
                     const AdaptOptions& options = detail::default_options()) {
  using Result =
      std::decay_t<std::invoke_result_t<Function&, at::Tensor, std::int64_t, std::int64_t>>;
  return detail::collect<Result>(
      function, [&](const auto& part) { chunked(tensor, initial, part, dim, options); });
}

}  // namespace brim
