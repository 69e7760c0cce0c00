#include "adaptive_call.h"

#include <brim/adapt/detail/checkpoint.h>
#include <brim/adapt/detail/run.h>
#include <brim/memory/stats.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "bindings.h"
#include "core_warnings.h"
#include "interpreter.h"
#include "python_error.h"

namespace brim::python {
namespace py = pybind11;

namespace {

py::object steal(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

std::int64_t size_argument(const ArgumentSlot& slot, PyObject* value) {
  constexpr const char* kMust = "be between 1 and 2^63 - 1";
  const char* name = PyUnicode_AsUTF8(slot.name.ptr());
  const std::int64_t size =
      integer_argument(name, py::reinterpret_borrow<py::object>(value), kMust);
  TORCH_CHECK_VALUE(size >= 1, name, " must ", kMust, ", got ", size);
  return size;
}

/// Takes the pending Python exception. Where it is about memory, what it says is kept and it is
/// released, with its frames and all that they hold; any other is put back as it was.
struct TakenError {
  OomCause cause;
  std::string message;

  TakenError() {
    py::error_already_set pending;  // takes it
    cause = classify_python(pending.value());
    if (cause) {
      message = error_text(pending.value());
    } else {
      pending.restore();
    }
  }
};

// Levels of Python's logging: from which on what is told.
constexpr int kLogFits = 10;      // DEBUG
constexpr int kLogFailures = 20;  // INFO
constexpr int kLogNothing = 100;

/// The options of one call; lives as long as the run that refers to it.
AdaptOptions call_options(const AdaptiveConfig& config, const CallArguments& arguments,
                          std::vector<Attempt>* attempts,
                          std::optional<std::int64_t> skip_dim = std::nullopt) {
  AdaptOptions options = config.options;
  if (config.memory) {
    options.memory = config.memory.get();
    options.key = call_key(config, arguments, skip_dim);
  }
  options.attempts = attempts;
  const int level = config.log_level ? config.log_level().cast<int>() : kLogNothing;
  if (config.observer || level <= kLogFailures) {
    options.observer = [&config, level](const Attempt& attempt) {
      if (level <= (attempt.fitted() ? kLogFits : kLogFailures)) {
        config.logger(attempt);
      }
      if (config.observer) {
        config.observer(attempt);
      }
    };
  }
  options.collect_garbage = [&config] {
    if (config.collect) {
      config.collect();
    }
  };
  return options;
}

/// Whether nothing is known that would change the size, and nobody wants to hear of a call that
/// fits.
bool may_run_unwatched(const AdaptiveConfig& config, const std::vector<Attempt>* attempts) {
  return (!config.memory || !config.memory->may_know_something()) && attempts == nullptr &&
         !config.observer && config.options.objective == Objective::memory;
}

/// On the path of a call that fits, an accelerator is asked only where the call is on one.
Checkpoint checkpoint_before(const AdaptiveConfig& config, const CallArguments& arguments,
                             const std::vector<Attempt>* attempts) {
  static const bool only_cpu = default_device().is_cpu();
  const bool cheap = only_cpu || (may_run_unwatched(config, attempts) && !config.options.device &&
                                  !has_accelerator_tensor(arguments));
  return Checkpoint(config.options, cheap ? Checkpoint::Detail::cheap : Checkpoint::Detail::all);
}

/// Arguments with some values replaced or added, ready for another vectorcall.
class ChangedArguments {
 public:
  ChangedArguments(const CallArguments& original, std::size_t room_in_front)
      : receivers_(static_cast<std::size_t>(original.receivers)), front_(room_in_front) {
    values_.resize(1, nullptr);  // one slot ahead of the arguments, which a callee may borrow
    values_.append(original.values, original.values + original.receivers);
    values_.append(front_, nullptr);
    values_.append(original.values + original.receivers, original.values + original.count());
    positional_ = original.positional + static_cast<Py_ssize_t>(front_);
    names_ = py::reinterpret_borrow<py::object>(original.names);
  }

  /// The i-th of the values put in front of the original ones, behind the instance of a method.
  void set_front(std::size_t i, PyObject* value) { values_[1 + receivers_ + i] = value; }
  /// Another value for an original one that is no receiver.
  void set(Py_ssize_t original_index, PyObject* value) {
    values_[1 + front_ + static_cast<std::size_t>(original_index)] = value;
  }

  /// Appends a keyword argument; returns its index for `set`.
  Py_ssize_t add_keyword(const py::object& name) {
    const Py_ssize_t old = names_ ? PyTuple_GET_SIZE(names_.ptr()) : 0;
    py::tuple longer(  // NOLINT(misc-const-correctness): filled below
        static_cast<std::size_t>(old + 1));
    for (Py_ssize_t i = 0; i < old; ++i) {
      longer[static_cast<std::size_t>(i)] =
          py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(names_.ptr(), i));
    }
    longer[static_cast<std::size_t>(old)] = name;
    names_ = std::move(longer);
    values_.push_back(nullptr);
    return static_cast<Py_ssize_t>(values_.size() - 2 - front_);
  }

  PyObject* call(PyObject* function) {
    return entering_python([&] {
      return PyObject_Vectorcall(
          function, values_.data() + 1,
          static_cast<std::size_t>(positional_) | PY_VECTORCALL_ARGUMENTS_OFFSET, names_.ptr());
    });
  }

 private:
  std::size_t receivers_;
  std::size_t front_;
  c10::SmallVector<PyObject*, 16> values_;
  Py_ssize_t positional_ = 0;
  py::object names_;
};

/// Calls until it fits. `attempt` returns a new reference or null with an exception set.
template <class Attempt>
PyObject* until_it_fits(MaximizeRun& run, Attempt&& attempt) {
  for (;;) {
    run.begin();
    if (PyObject* result = attempt()) {
      py::object guard = steal(result);
      run.fitted();
      return guard.release().ptr();
    }
    const TakenError error;
    if (!error.cause) {
      return nullptr;
    }
    run.failed(error.cause, error.message);
  }
}

/// A first try as the function was called where nothing is known that would change it, then tries
/// until it fits.
/// @param search makes the search from the options; only asked for after the first try failed.
template <class Search, class First, class Call>
PyObject* adapt(const AdaptiveConfig& config, const CallArguments& arguments,
                std::vector<Attempt>* attempts, MaximizeRun::Rate rate, const Search& search,
                const First& first, const Call& call) {
  Checkpoint checkpoint = checkpoint_before(config, arguments, attempts);
  std::optional<TakenError> first_error;
  if (may_run_unwatched(config, attempts)) {
    if (PyObject* result = first()) {
      return result;
    }
    first_error.emplace();
    if (!first_error->cause) {
      return nullptr;
    }
  }
  CoreWarnings warnings;
  const AdaptOptions options = call_options(config, arguments, attempts);
  MaximizeRun run(search(options), options, std::move(checkpoint), rate,
                  first_error ? MaximizeRun::FirstTry::failed : MaximizeRun::FirstTry::ahead);
  if (first_error) {
    run.failed(first_error->cause, first_error->message);
  }
  return warnings.deliver(until_it_fits(run, [&] { return call(run.values()); }));
}

// maximize

struct Maxima {
  c10::SmallVector<Py_ssize_t, 4> index;  // in the arguments; -1: not passed
  c10::SmallVector<std::int64_t, 4> value;
  bool as_passed = true;  // the arguments can be handed on as they are
};

std::int64_t inferred_maximum(const AdaptiveConfig& config, const ArgumentSlot& parameter,
                              const CallArguments& arguments) {
  PyObject* source = config.infer ? arguments.get(*config.infer) : nullptr;
  TORCH_CHECK_VALUE(source != nullptr, parameter.name.cast<std::string>(),
                    " was not passed and has no default",
                    config.infer ? ", and neither has " + config.infer->name.cast<std::string>() +
                                       ", from whose length it would be inferred"
                                 : ": pass it, or name an argument in infer=");
  const Py_ssize_t length = PyObject_Length(source);
  if (length < 0) {
    throw py::error_already_set();
  }
  return std::max<std::int64_t>(length, 1);
}

Maxima find_maxima(const AdaptiveConfig& config, const CallArguments& arguments) {
  Maxima maxima;
  for (const ArgumentSlot& parameter : config.parameters) {
    const Py_ssize_t index = arguments.find(parameter);
    PyObject* value = index >= 0 ? arguments.values[index] : parameter.otherwise.ptr();
    const bool given = value != nullptr && value != Py_None;
    maxima.index.push_back(index);
    maxima.value.push_back(given ? size_argument(parameter, value)
                                 : inferred_maximum(config, parameter, arguments));
    // A default applies by itself; a None must be replaced.
    maxima.as_passed = maxima.as_passed && given;
  }
  return maxima;
}

/// Calls with the values put in the place of the parameters, or added where they were not passed.
class ParameterCall {
 public:
  ParameterCall(const AdaptiveConfig& config, const CallArguments& arguments, const Maxima& maxima)
      : changed_(arguments, 0), index_(maxima.index) {
    for (std::size_t i = 0; i < index_.size(); ++i) {
      if (index_[i] < 0) {
        index_[i] = changed_.add_keyword(config.parameters[i].name);
      }
    }
  }

  PyObject* operator()(PyObject* function, std::span<const std::int64_t> values) {
    c10::SmallVector<py::object, 4> numbers;
    for (std::size_t i = 0; i < index_.size(); ++i) {
      numbers.push_back(py::int_(values[i]));
      changed_.set(index_[i], numbers.back().ptr());
    }
    return changed_.call(function);
  }

 private:
  ChangedArguments changed_;
  c10::SmallVector<Py_ssize_t, 4> index_;
};

PyObject* call_unwatched(const AdaptiveConfig& config, PyObject* function,
                         const CallArguments& arguments, const Maxima& maxima) {
  if (maxima.as_passed) {
    return entering_python([&] {
      return PyObject_Vectorcall(function, arguments.values,
                                 static_cast<std::size_t>(arguments.positional), arguments.names);
    });
  }
  return ParameterCall(config, arguments, maxima)(function, maxima.value);
}

PyObject* maximize(const AdaptiveConfig& config, PyObject* function, const CallArguments& arguments,
                   std::vector<Attempt>* attempts) {
  const Maxima maxima = find_maxima(config, arguments);
  const auto search = [&](const AdaptOptions& options) {
    ParameterSearchOptions result;
    result.groups = config.groups;
    for (std::size_t i = 0; i < config.parameters.size(); ++i) {
      result.parameters.push_back({.maximum = maxima.value[i],
                                   .quantum = config.quanta[i],
                                   .lower = std::min(options.lower, maxima.value[i])});
    }
    return result;
  };
  std::optional<ParameterCall> changed;  // made when it is needed: a call that fits needs none
  return adapt(
      config, arguments, attempts, MaximizeRun::Rate::calls, search,
      [&] { return call_unwatched(config, function, arguments, maxima); },
      [&](std::span<const std::int64_t> values) {
        if (!changed) {
          changed.emplace(config, arguments, maxima);
        }
        return (*changed)(function, values);
      });
}

// batch

PyObject* batch(const AdaptiveConfig& config, PyObject* function, const CallArguments& arguments,
                std::vector<Attempt>* attempts) {
  ChangedArguments changed(arguments, 1);
  const auto call_with = [&](std::int64_t size) {
    const py::int_ number(size);
    changed.set_front(0, number.ptr());
    return changed.call(function);
  };
  const auto search = [&](const AdaptOptions& options) {
    return ParameterSearchOptions{
        .parameters = {{.maximum = config.initial,
                        .quantum = options.quantum,
                        .lower = std::min(options.lower, config.initial)}}};
  };
  return adapt(
      config, arguments, attempts, MaximizeRun::Rate::items, search,
      [&] { return call_with(config.initial); },
      [&](std::span<const std::int64_t> values) { return call_with(values.front()); });
}

// range and chunked

/// A progress bar, where one is wanted; closed whatever happens.
class Progress {
 public:
  Progress(const AdaptiveConfig& config, std::int64_t total) {
    if (config.progress) {
      bar_ = config.progress(total);
    }
  }
  ~Progress() {
    if (bar_) {
      const py::error_scope pending;  // an exception may be on its way
      try {
        bar_.attr("close")();
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("brim's progress bar");
      }
    }
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(std::int64_t size) {
    if (bar_) {
      bar_.attr("update")(size);
    }
  }

 private:
  py::object bar_;
};

/// Calls `part(begin, end)` for parts of [start, end) until all are done.
template <class Part>
PyObject* in_parts(const AdaptiveConfig& config, const AdaptOptions& options, std::int64_t start,
                   std::int64_t end, Part&& part) {
  if (start < end) {
    Progress progress(config, end - start);
    RangeRun run(std::min(config.initial, end - start), options);
    for (std::int64_t current = start; current < end;) {
      const std::int64_t size = std::min(run.step(), end - current);
      run.begin();
      if (const py::object result = steal(part(current, current + size))) {
        run.fitted(size);
        current += size;
        progress.advance(size);
        continue;
      }
      const TakenError error;
      if (!error.cause) {
        return nullptr;
      }
      run.failed(size, error.cause, error.message);
    }
  }
  return py::none().release().ptr();
}

PyObject* range(const AdaptiveConfig& config, PyObject* function, const CallArguments& arguments,
                std::vector<Attempt>* attempts) {
  const Py_ssize_t at = arguments.receivers;
  TORCH_CHECK_TYPE(arguments.positional >= at + 2,
                   "start and end must be passed, as the first two positional arguments");
  const auto bound = [&](const char* name, PyObject* value) {
    return integer_argument(name, py::reinterpret_borrow<py::object>(value),
                            "be between -2^63 and 2^63 - 1");
  };
  const std::int64_t start = bound("start", arguments.values[at]);
  const std::int64_t end = bound("end", arguments.values[at + 1]);
  TORCH_CHECK_VALUE(start <= end, "start must not be after end, got ", start, " and ", end);
  TORCH_CHECK_VALUE(start >= 0 || end <= std::numeric_limits<std::int64_t>::max() + start,
                    "start and end must be less than 2^63 apart, got ", start, " and ", end);
  CoreWarnings warnings;
  const AdaptOptions options = call_options(config, arguments, attempts);
  ChangedArguments changed(arguments, 0);
  return warnings.deliver(
      in_parts(config, options, start, end, [&](std::int64_t from, std::int64_t to) {
        const py::int_ first(from);
        const py::int_ last(to);
        changed.set(at, first.ptr());
        changed.set(at + 1, last.ptr());
        return changed.call(function);
      }));
}

/// The dimension to cut, counted from the front, of the tensor that is the first argument.
std::int64_t chunk_dim(const AdaptiveConfig& config, const CallArguments& arguments) {
  TORCH_CHECK_TYPE(arguments.positional > arguments.receivers,
                   "tensor must be passed, as the first positional argument");
  const auto tensor = py::reinterpret_borrow<py::object>(arguments.values[arguments.receivers]);
  TORCH_CHECK_TYPE(py::hasattr(tensor, "narrow") && py::hasattr(tensor, "shape"),
                   "tensor must be a torch.Tensor, got ",
                   py::repr(py::type::of(tensor)).cast<std::string>());
  const auto rank = static_cast<std::int64_t>(py::len(tensor.attr("shape")));
  TORCH_CHECK_VALUE(config.dim >= -rank && config.dim < rank, "dim must be from ", -rank, " to ",
                    rank - 1, " for a tensor of ", rank, " dimension(s), got ", config.dim);
  return config.dim < 0 ? config.dim + rank : config.dim;
}

PyObject* chunked(const AdaptiveConfig& config, PyObject* function, const CallArguments& arguments,
                  std::vector<Attempt>* attempts) {
  const std::int64_t dim = chunk_dim(config, arguments);
  const auto tensor = py::reinterpret_borrow<py::object>(arguments.values[arguments.receivers]);
  CoreWarnings warnings;
  const AdaptOptions options = call_options(config, arguments, attempts, dim);
  const py::object narrow = tensor.attr("narrow");
  ChangedArguments changed(arguments, 2);
  const auto length = py::object(tensor.attr("shape")[py::int_(dim)]).cast<std::int64_t>();
  return warnings.deliver(
      in_parts(config, options, 0, length, [&](std::int64_t from, std::int64_t to) -> PyObject* {
        // Called here and not through pybind11, so that an exception stays where the loop looks for
        // it.
        const py::int_ first(from);
        const py::int_ last(to);
        const py::object chunk = steal(
            PyObject_CallFunction(narrow.ptr(), "LLL", static_cast<long long>(dim),
                                  static_cast<long long>(from), static_cast<long long>(to - from)));
        if (!chunk) {
          return nullptr;
        }
        // chunk, start, end, then the caller's other arguments: the tensor itself makes room for
        // `end`.
        changed.set_front(0, chunk.ptr());
        changed.set_front(1, first.ptr());
        changed.set(arguments.receivers, last.ptr());
        return changed.call(function);
      }));
}

}  // namespace

PyObject* adaptive_call(const AdaptiveConfig& config, PyObject* function,
                        const CallArguments& arguments, std::vector<Attempt>* attempts) noexcept {
  try {
    // Around all of it too, for observers, loggers and warnings, which are Python as well.
    return entering_python([&]() -> PyObject* {
      if (config.checks_key && may_run_unwatched(config, attempts)) {
        check_key(config, arguments);
      }
      switch (config.kind) {
        case AdaptKind::maximize:
          return maximize(config, function, arguments, attempts);
        case AdaptKind::batch:
          return batch(config, function, arguments, attempts);
        case AdaptKind::range:
          return range(config, function, arguments, attempts);
        case AdaptKind::chunked:
          return chunked(config, function, arguments, attempts);
      }
      return nullptr;
    });
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyObject* adaptive_clear(const AdaptiveConfig& config) noexcept {
  try {
    if (config.memory) {
      config.memory->clear();
    }
    return py::none().release().ptr();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyObject* adaptive_forget(const AdaptiveConfig& config, const CallArguments& arguments) noexcept {
  try {
    if (config.memory && config.per_call_site) {
      config.memory->clear();
    } else if (config.memory) {
      const bool cut =
          config.kind == AdaptKind::chunked && arguments.positional > arguments.receivers;
      config.memory->forget(call_key(
          config, arguments, cut ? std::optional(chunk_dim(config, arguments)) : std::nullopt));
    }
    return py::none().release().ptr();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

}  // namespace brim::python
