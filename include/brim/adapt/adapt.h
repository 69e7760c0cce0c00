#pragma once

#include <ATen/core/Tensor.h>
#include <brim/adapt/detail/checkpoint.h>
#include <brim/adapt/detail/run.h>
#include <brim/adapt/options.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

namespace brim {
namespace detail {

/// Calls `attempt` until it fits. What failed is gone before anything else happens: the exception
/// is let go outside of the catch block, by `run.failed`.
template <class Run, class Attempt, class... Size>
auto until_it_fits(Run& run, Attempt&& attempt, Size... size) {
  using Result = std::invoke_result_t<Attempt&>;
  for (;;) {
    std::exception_ptr error;
    run.begin();
    if constexpr (std::is_void_v<Result>) {
      try {
        attempt();
      } catch (...) {
        error = std::current_exception();
      }
      if (!error) {
        run.fitted(size...);
        return;
      }
    } else {
      std::optional<Result> result;
      try {
        result.emplace(attempt());
      } catch (...) {
        error = std::current_exception();
      }
      if (!error) {
        run.fitted(size...);
        return Result(std::move(*result));
      }
    }
    run.failed(size..., std::move(error));
  }
}

inline const AdaptOptions& default_options() {
  static const AdaptOptions options;
  return options;
}

}  // namespace detail

/// Calls `function(values)` with the largest values of the parameters that fit, and returns its
/// result.
///
/// The first try is at the maxima, or at what `options.memory` knows to fit. After running out of
/// memory the next values are worked out from the figures of the failure, and the call is repeated
/// with the random state of the first try. An error that is not about memory passes through
/// untouched.
///
/// @param search maxima, quanta, floors and groups; its strategy comes from `options`.
/// @throws c10::OutOfMemoryError with a summary if it does not fit even at the floor.
template <class Function>
auto maximize(ParameterSearchOptions search, Function&& function,
              const AdaptOptions& options = detail::default_options()) {
  MaximizeRun run(std::move(search), options, Checkpoint(options));
  return detail::until_it_fits(run, [&] { return std::invoke(function, run.values()); });
}

/// Calls `function(size)` with the largest size up to `initial` that fits, and returns its result;
/// see maximize. A call that fits at once costs some ten nanoseconds and allocates nothing.
///
///     auto result = brim::batch(512, [&](std::int64_t batch_size) { return evaluate(model, data,
///     batch_size); });
template <class Function>
auto batch(std::int64_t initial, Function&& function,
           const AdaptOptions& options = detail::default_options()) {
  TORCH_CHECK_VALUE(initial >= 1, "initial must be 1 or more, got ", initial);
  const auto run_from = [&](Checkpoint checkpoint, std::exception_ptr first_error) {
    MaximizeRun run({.parameters = {{.maximum = initial,
                                     .quantum = options.quantum,
                                     .lower = std::min(options.lower, initial)}}},
                    options, std::move(checkpoint), MaximizeRun::Rate::items,
                    first_error ? MaximizeRun::FirstTry::failed : MaximizeRun::FirstTry::ahead);
    if (first_error) {
      run.failed(std::move(first_error));
    }
    return detail::until_it_fits(run, [&] { return std::invoke(function, run.values().front()); });
  };
  const bool unwatched = may_run_unwatched(options);
  Checkpoint checkpoint(
      options, unwatched && !options.device ? Checkpoint::Detail::cheap : Checkpoint::Detail::all);
  if (!unwatched) {
    return run_from(std::move(checkpoint), nullptr);
  }
  std::exception_ptr error;
  try {
    return std::invoke(function, initial);
  } catch (...) {
    error = std::current_exception();
  }
  return run_from(std::move(checkpoint), std::move(error));
}

/// `batch` under the name that the Python decorator has: one parameter, from `maximum` down.
template <class Function>
auto maximize(std::int64_t maximum, Function&& function,
              const AdaptOptions& options = detail::default_options()) {
  return batch(maximum, std::forward<Function>(function), options);
}

/// Calls `function(begin, end)` for parts that together cover [start, end), each as long as fits,
/// at most `initial`.
///
/// A part that succeeded is never done again. With Strategy::predictive and nothing remembered the
/// first parts are short: they show how memory grows, and the step then goes to the largest that
/// fits, usually without running out of memory at all.
/// @throws c10::OutOfMemoryError with a summary if a part does not fit even at the floor.
template <class Function>
void range(std::int64_t start, std::int64_t end, std::int64_t initial, Function&& function,
           const AdaptOptions& options = detail::default_options()) {
  TORCH_CHECK_VALUE(initial >= 1, "initial must be 1 or more, got ", initial);
  TORCH_CHECK_VALUE(start <= end, "start must not be after end, got ", start, " and ", end);
  TORCH_CHECK_VALUE(start >= 0 || end <= std::numeric_limits<std::int64_t>::max() + start,
                    "start and end must be less than 2^63 apart, got ", start, " and ", end);
  if (start == end) {
    return;
  }
  RangeRun run(std::min(initial, end - start), options);
  for (std::int64_t current = start; current < end;) {
    const std::int64_t size = std::min(run.step(), end - current);
    std::exception_ptr error;
    run.begin();
    try {
      std::invoke(function, current, current + size);
    } catch (...) {
      error = std::current_exception();
    }
    if (error) {
      run.failed(size, std::move(error));
    } else {
      run.fitted(size);
      current += size;
    }
  }
}

/// Calls `function(chunk, begin, end)` for chunks of `tensor` along `dim`, each as long as fits;
/// see range. The chunks are views: what is written to them is written to the tensor.
template <class Function>
void chunked(const at::Tensor& tensor, std::int64_t initial, Function&& function,
             std::int64_t dim = 0, const AdaptOptions& options = detail::default_options()) {
  TORCH_CHECK_VALUE(tensor.defined(), "tensor is undefined");
  TORCH_CHECK_VALUE(tensor.dim() > 0, "tensor has no dimension to cut");
  TORCH_CHECK_VALUE(dim >= -tensor.dim() && dim < tensor.dim(), "dim must be from ", -tensor.dim(),
                    " to ", tensor.dim() - 1, ", got ", dim);
  range(
      0, tensor.size(dim), initial,
      [&](std::int64_t begin, std::int64_t end) {
        std::invoke(function, tensor.narrow(dim, begin, end - begin), begin, end);
      },
      options);
}

}  // namespace brim
