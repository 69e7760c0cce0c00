#include "adaptive_call.h"

#include <brim/adapt/adapt.h>
#include <brim/adapt/agreement.h>
#include <brim/adapt/saved_state.h>
#include <brim/memory/stats.h>
#include <brim/need/trace_search.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "call_log.h"
#include "changed_arguments.h"
#include "core_warnings.h"
#include "interpreter.h"
#include "left_behind.h"
#include "numbers.h"
#include "progress_bar.h"
#include "python_error.h"
#include "tensor_argument.h"

namespace brim::python {
namespace {

py::object steal(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

std::int64_t size_argument(const ArgumentSlot& slot, PyObject* value) {
  constexpr const char* kMust = "be between 1 and 2^63 - 1";
  if (PyLong_CheckExact(value)) {  // a call that fits pays for this
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow == 0 && number >= 1) {
      return number;
    }
  }
  const char* name = PyUnicode_AsUTF8(slot.name.ptr());
  const std::int64_t size = whole_number(value, {name}, kMust);
  TORCH_CHECK_VALUE(size >= 1, name, " must ", kMust, ", got ", size);
  return size;
}

bool only_cpu() {
  static const bool only = default_device().is_cpu();
  return only;
}

/// The length of the argument from which a size is inferred.
std::int64_t inferred_maximum(const AdaptiveConfig& config, const ArgumentSlot& parameter,
                              const CallArguments& arguments) {
  PyObject* source = config.infer ? arguments.get(*config.infer) : nullptr;
  TORCH_CHECK_VALUE(source != nullptr, parameter.name.cast<std::string>(),
                    " was not passed and has no default",
                    config.infer ? ", and neither has " + config.infer->name.cast<std::string>() +
                                       ", from whose length it would be inferred"
                                 : ": pass it, or name an argument in infer=");
  const Py_ssize_t length = entering_python([&] { return PyObject_Size(source); });
  if (length < 0) {
    throw py::error_already_set();
  }
  return std::max<std::int64_t>(length, 1);
}

/// The dimension to cut, counted from the front, of the tensor that is the first argument.
std::int64_t chunk_dim(const AdaptiveConfig& config, const CallArguments& arguments) {
  TORCH_CHECK_TYPE(arguments.positional > arguments.receivers,
                   "tensor must be passed, as the first positional argument");
  const auto tensor = py::reinterpret_borrow<py::object>(arguments.values[arguments.receivers]);
  TORCH_CHECK_TYPE(py::hasattr(tensor, "narrow") && py::hasattr(tensor, "shape"),
                   "tensor must be a torch.Tensor, got ",
                   py::repr(py::type::of(tensor)).cast<std::string>());
  const auto rank = static_cast<std::int64_t>(py::len(attribute(tensor, "shape")));
  return detail::chunk_dim(rank, config.dim);
}

/// One call of an adaptive function, between the core's driver and the interpreter.
class Call {
 public:
  Call(const AdaptiveConfig& config, PyObject* function, const CallArguments& arguments,
       std::vector<Attempt>* attempts)
      : config_(config),
        function_(function),
        arguments_(arguments),
        attempts_(attempts),
        left_behind_(config, arguments) {}

  PyObject* run() {
    if (config_.ranks) [[unlikely]] {
      const py::object agreement = invoke(config_.ranks);
      ranks_ = agreement.is_none() ? nullptr : agreement.cast<std::shared_ptr<Agreement>>();
    }
    try {
      if (ranks_) [[unlikely]] {
        run_as_rank();
      } else {
        run_kind();
      }
    } catch (const Interrupted& interrupted) {
      std::rethrow_exception(interrupted.error);
    }
    if (log_) {
      log_->finish();
    }
    if (warnings_) {
      warnings_->deliver();
    }
    return result_.release().ptr();
  }

 private:
  /// Tells the other ranks of an error that they would wait for in vain.
  void run_as_rank() {
    const std::int64_t calls = ranks_->channel().calls;
    try {
      run_kind();
    } catch (const std::exception& error) {
      if (ranks_->channel().calls == calls) {  // ahead of the exchanges, as for a wrong argument
        const auto* known = dynamic_cast<const c10::Error*>(&error);
        ranks_->refuse_call(known != nullptr ? known->what_without_backtrace() : error.what());
      }
      throw;
    }
  }

  void run_kind() {
    // Ahead of the work: a call that ran out of memory is too late to find that it has no key.
    if (config_.memory && config_.key_arguments) {
      keys_ = call_keys(config_, arguments_, std::nullopt);
    }
    switch (config_.kind) {
      case AdaptKind::maximize:
        maximize();
        break;
      case AdaptKind::batch:
        batch();
        break;
      case AdaptKind::range:
        range();
        break;
      case AdaptKind::chunked:
        chunked();
        break;
    }
  }

  /// Whether an attempt fitted, as the driver wants to know it. `run` returns a new reference.
  template <class Run>
  std::optional<detail::Failure> attempt(const Run& run) {
    result_ = steal(run());
    if (result_) {
      return std::nullopt;
    }
    // Other ranks are told what an interrupt says; alone, one must not end a trial of parts.
    detail::Failure failure =
        ranks_ ? release_pending_error() : telling_interrupts(&release_pending_error);
    left_behind_.warn(function_, saved_, warnings_);
    return failure;
  }

  /// Tells of a result that nobody gets. What works in place returns a view, or an argument.
  void warn_of_result() {
    if (result_.is_none() || config_.warned_of_result) {
      return;
    }
    if (const at::Tensor* tensor = tensor_in(result_.ptr())) {
      bool given = tensor->is_view();
      for (Py_ssize_t i = 0; i < arguments_.count() && !given; ++i) {
        const at::Tensor* argument = tensor_in(arguments_.values[i]);
        given = argument != nullptr && tensor->has_storage() && argument->has_storage() &&
                tensor->is_alias_of(*argument);
      }
      if (given) {
        return;
      }
    }
    config_.warned_of_result = true;
    TORCH_WARN(config_.log_name, " returns something for each part (",
               Py_TYPE(result_.ptr())->tp_name,
               "), which is dropped: pass collect=True to get a list of it");
  }

  /// Adds what `restore=` names, as it is now.
  void save(SavedState& state) {
    saved_ = &state;
    py::list named;  // NOLINT(misc-const-correctness): it is filled below
    for (const ArgumentSlot& slot : config_.restore_arguments) {
      PyObject* const value = arguments_.get(slot);
      TORCH_CHECK_TYPE(value != nullptr, "restore names ", slot.name.cast<std::string>(),
                       ", which was not passed and has no default");
      named.append(py::make_tuple(slot.name, py::handle(value)));
    }
    const auto collected = invoke(provided("collect"), config_.restore, named).cast<py::tuple>();
    for (const py::handle tensor : collected[0]) {
      state.add_values(THPVariable_Unpack(tensor.ptr()));
    }
    for (const py::handle tensor : collected[1]) {
      state.add_gradient(THPVariable_Unpack(tensor.ptr()));
    }
    for (const py::handle other : collected[2]) {
      state.add([other = py::reinterpret_borrow<py::object>(other)] { release(invoke(other)); });
    }
  }

  /// With what only a call that is watched or repeated needs.
  const AdaptOptions& all_options(std::optional<std::int64_t> skip_dim = std::nullopt) {
    if (!options_) {
      warnings_.emplace();
      options_ = config_.options;
      options_->attempts = attempts_;
      options_->ranks = ranks_.get();
      log_.emplace(config_);
      if (log_->is_wanted()) {
        options_->observer = [this](const Attempt& attempt) {
          log_->add(attempt);
          if (config_.options.observer) {
            config_.options.observer(attempt);
          }
        };
      }
      if (config_.memory) {
        const CallKeys keys = keys_ ? *keys_ : call_keys(config_, arguments_, skip_dim);
        options_->key = keys.key;
        options_->wider_key = keys.wider;
        options_->kind = keys.kind;
      }
      if (config_.restore) {
        options_->restore = [this](SavedState& state) { save(state); };
      }
    }
    return *options_;
  }

  /// What was traced of such calls on fake tensors; null where this size fits, or that is not
  /// known.
  std::shared_ptr<const TraceSearch> foreseen(std::int64_t size) {
    const std::uint64_t key = call_keys(config_, arguments_, std::nullopt, true).key;
    const auto [positional, named] = as_python(arguments_);
    const py::object found =
        invoke(config_.foresee, key, size, py::handle(function_), positional, named);
    return found.is_none() ? nullptr : found.cast<std::shared_ptr<TraceSearch>>();
  }

  void until_it_fits(std::span<const std::int64_t> maxima, bool maxima_are_lengths,
                     bool counts_items, std::span<const Attempt> foreseen,
                     detail::TryValues attempt) {
    left_behind_.begin();
    const auto all = [this]() -> const AdaptOptions& { return all_options(); };
    detail::maximize(
        {.maxima = maxima,
         .quanta = config_.quanta,
         .groups = config_.groups,
         .options = attempts_ == nullptr && !ranks_ ? config_.options : all_options(),
         .all_options = all,
         .foreseen = foreseen,
         .items = config_.items ? size_argument(*config_.items, arguments_.get(*config_.items)) : 0,
         .maxima_may_differ = config_.maxima_may_differ,
         .maxima_are_lengths = maxima_are_lengths,
         .counts_items = counts_items,
         .on_accelerator = !only_cpu() && has_accelerator_tensor(arguments_)},
        [&](std::span<const std::int64_t> values) -> std::optional<detail::Failure> {
          if (values.empty()) [[unlikely]] {
            release(std::move(result_));
            return std::nullopt;
          }
          return attempt(values);
        });
  }

  void maximize() {
    c10::SmallVector<std::int64_t, 4> maxima;
    c10::SmallVector<Py_ssize_t, 4> places;  // among the arguments; -1: not passed
    bool as_passed = true;                   // a default applies by itself; a None is replaced
    for (const ArgumentSlot& slot : config_.parameters) {
      const Py_ssize_t place = arguments_.find(slot);
      PyObject* value = place >= 0 ? arguments_.values[place] : slot.default_value.ptr();
      const bool given = value != nullptr && value != Py_None;
      as_passed = as_passed && given;
      places.push_back(place);
      maxima.push_back(given ? size_argument(slot, value)
                             : inferred_maximum(config_, slot, arguments_));
    }
    const bool are_lengths = config_.maxima_are_lengths || (maxima.size() == 1 && !as_passed);
    const auto traced = config_.foresee ? foreseen(maxima.front()) : nullptr;
    const auto sizes = traced ? std::span(traced->traced()) : std::span<const Attempt>();
    std::optional<ChangedArguments> changed;  // made when needed: a call that fits needs none
    until_it_fits(maxima, are_lengths, false, sizes, [&](std::span<const std::int64_t> values) {
      if (as_passed && std::ranges::equal(values, maxima)) {
        return this->attempt([&] {
          return entering_python([&] {
            return PyObject_Vectorcall(function_, arguments_.values,
                                       static_cast<std::size_t>(arguments_.positional),
                                       arguments_.names);
          });
        });
      }
      if (!changed) {
        changed.emplace(arguments_, 0);
        for (std::size_t i = 0; i < places.size(); ++i) {
          places[i] = places[i] >= 0 ? places[i] : changed->add_keyword(config_.parameters[i].name);
        }
      }
      c10::SmallVector<py::object, 4> numbers;
      for (std::size_t i = 0; i < places.size(); ++i) {
        numbers.push_back(py::int_(values[i]));
        changed->set(places[i], numbers.back().ptr());
      }
      return this->attempt([&] { return changed->call(function_); });
    });
  }

  void batch() {
    ChangedArguments changed(arguments_, 1);
    until_it_fits({&config_.initial, 1}, false, true, {},
                  [&](std::span<const std::int64_t> values) {
                    const py::int_ number(values.front());
                    changed.set_front(0, number.ptr());
                    return this->attempt([&] { return changed.call(function_); });
                  });
  }

  /// Calls `part(from, to)` for parts of [start, end) until all are done.
  template <class Part>
  void in_parts(std::int64_t start, std::int64_t end, const AdaptOptions& options,
                const Part& part) {
    std::optional<ProgressBar> progress;
    py::list collected;
    detail::range(start, end, config_.initial, options, [&](std::int64_t from, std::int64_t to) {
      if (!progress) {
        progress.emplace(config_.progress, end - start);
      }
      left_behind_.begin();  // parts that fitted may have written to them
      auto failure = part(py::int_(from), py::int_(to));
      if (!failure) {
        if (config_.collect) {
          collected.append(result_);
        } else {
          warn_of_result();
        }
        release(std::move(result_));  // not collected: it is gone before the next part
        progress->advance(to - from);
      }
      return failure;
    });
    result_ = config_.collect ? py::object(std::move(collected)) : py::none();
  }

  void range() {
    const Py_ssize_t at = arguments_.receivers;
    TORCH_CHECK_TYPE(arguments_.positional >= at + 2,
                     "start and end must be passed, as the first two positional arguments");
    const auto bound = [&](const char* name, PyObject* value) {
      return whole_number(value, {name}, "be between -2^63 and 2^63 - 1");
    };
    const std::int64_t start = bound("start", arguments_.values[at]);
    const std::int64_t end = bound("end", arguments_.values[at + 1]);
    ChangedArguments changed(arguments_, 0);
    in_parts(start, end, all_options(), [&](const py::int_& from, const py::int_& to) {
      changed.set(at, from.ptr());
      changed.set(at + 1, to.ptr());
      return attempt([&] { return changed.call(function_); });
    });
  }

  void chunked() {
    const std::int64_t dim = chunk_dim(config_, arguments_);
    const py::handle tensor = arguments_.values[arguments_.receivers];
    const py::object narrow = attribute(tensor, "narrow");
    ChangedArguments changed(arguments_, 2);
    const py::int_ along(dim);
    const auto length = py::object(attribute(tensor, "shape")[along]).cast<std::int64_t>();
    in_parts(0, length, all_options(dim), [&](const py::int_& from, const py::int_& to) {
      const py::object size = to - from;
      // Not `invoke`, so that an exception stays pending.
      const py::object chunk = steal(entering_python([&] {
        return PyObject_CallFunctionObjArgs(narrow.ptr(), along.ptr(), from.ptr(), size.ptr(),
                                            nullptr);
      }));
      if (!chunk) {
        return std::optional(release_pending_error());
      }
      std::optional<SavedState> before;
      if (config_.restores_chunk) {
        const at::Tensor* values = tensor_in(chunk.ptr());
        TORCH_CHECK_TYPE(values != nullptr, "restore names the chunk, which is no torch.Tensor");
        if (auto failure = detail::attempt([&] { before.emplace().add_values(*values); })) {
          return failure;
        }
      }
      // chunk, start, end, then the other arguments: `end` takes the place of the tensor.
      changed.set_front(0, chunk.ptr());
      changed.set_front(1, from.ptr());
      changed.set(arguments_.receivers, to.ptr());
      auto failure = attempt([&] { return changed.call(function_); });
      if (failure && before) {
        before->put_back();
      }
      return failure;
    });
  }

  const AdaptiveConfig& config_;
  PyObject* function_;
  const CallArguments& arguments_;
  std::vector<Attempt>* attempts_;
  std::optional<CallKeys> keys_;
  LeftBehind left_behind_;
  std::shared_ptr<Agreement> ranks_;   // null: alone
  const SavedState* saved_ = nullptr;  // of the driver, which made it before the attempt
  std::optional<CoreWarnings> warnings_;
  std::optional<CallLog> log_;
  std::optional<AdaptOptions> options_;
  py::object result_;
};

}  // namespace

PyObject* adaptive_call(const AdaptiveConfig& config, PyObject* function,
                        const CallArguments& arguments, std::vector<Attempt>* attempts) {
  return Call(config, function, arguments, attempts).run();
}

void forget_all(const AdaptiveConfig& config) {
  if (config.memory) {
    config.memory->forget_all();
  }
  if (config.foresee) {
    release(invoke(attribute(config.foresee, "clear")));
  }
}

void adaptive_forget(const AdaptiveConfig& config, const CallArguments& arguments) {
  if (config.per_call_site) {
    forget_all(config);
    return;
  }
  if (config.memory) {
    const bool cut =
        config.kind == AdaptKind::chunked && arguments.positional > arguments.receivers;
    const CallKeys keys = call_keys(
        config, arguments, cut ? std::optional(chunk_dim(config, arguments)) : std::nullopt);
    config.memory->forget(keys.key);
    for (const auto& wider : {keys.wider, keys.kind}) {
      if (wider) {
        config.memory->forget(*wider);
      }
    }
  }
  if (config.foresee) {
    const CallKeys foreseen = call_keys(config, arguments, std::nullopt, true);
    release(invoke(attribute(config.foresee, "forget"), foreseen.key));
  }
}

}  // namespace brim::python
