#pragma once

#include <brim/adapt/saved_state.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adaptive_config.h"
#include "argument_versions.h"
#include "bindings.h"
#include "core_warnings.h"
#include "interpreter.h"

namespace brim::python {

/// The arguments of a call, as Python passes them on: a tuple and a dictionary.
inline std::pair<py::tuple, py::dict> as_python(const CallArguments& arguments) {
  py::list positional;  // NOLINT(misc-const-correctness): both are filled below
  py::dict named;       // NOLINT(misc-const-correctness)
  for (Py_ssize_t i = 0; i < arguments.count(); ++i) {
    const py::handle value = arguments.values[i];
    if (i < arguments.positional) {
      positional.append(value);
    } else {
      named[PyTuple_GET_ITEM(arguments.names, i - arguments.positional)] = value;
    }
  }
  return {py::tuple(positional), named};
}

/// What failed attempts of one call leave behind and nothing puts back. Each kind of it is said
/// once per function, so that one does not hide another.
class LeftBehind {
 public:
  LeftBehind(const AdaptiveConfig& config, const CallArguments& arguments)
      : config_(config), arguments_(arguments) {}

  /// Ahead of an attempt. On the path of a call that fits.
  void begin() { versions_.take(arguments_); }

  /// After an attempt that failed.
  /// @param saved what will be put back, or null.
  void warn(PyObject* function, const SavedState* saved, std::optional<CoreWarnings>& warnings) {
    const std::vector<std::string> iterators = iterators_not_yet_told();
    const std::vector<std::string> changed = changes_not_yet_told(saved);
    const std::string helpers = helpers_not_yet_told(function);
    if ((!iterators.empty() || !changed.empty() || !helpers.empty()) && !warnings) {
      warnings.emplace();
    }
    if (!iterators.empty()) {
      TORCH_WARN(config_.log_name, ": an attempt that ran out of memory may have taken from ",
                 c10::Join(", ", iterators),
                 ", an iterator, so that the next one starts in its middle. Pass a list instead");
    }
    if (!changed.empty()) {
      TORCH_WARN(config_.log_name, ": an attempt that ran out of memory had already changed ",
                 c10::Join(", ", changed),
                 " in place, so that the next one starts from changed values. Where they are not "
                 "merely overwritten, name them in restore= to have them put back: restore=\"",
                 changed.front(), "\"");
    }
    if (!helpers.empty()) {
      TORCH_WARN(config_.log_name, " uses ", helpers,
                 ", which restore= does not name: an attempt that runs out of memory in the middle "
                 "of a step leaves it there (a GradScaler takes gradients that are still scaled "
                 "for unscaled), and the next one starts from that. Name it beside the model and "
                 "the optimizer: restore=[model, optimizer, ...]");
    }
  }

 private:
  std::vector<std::string> iterators_not_yet_told() const {
    std::vector<std::string> names;
    for (Py_ssize_t i = arguments_.receivers; i < arguments_.count(); ++i) {
      if (PyIter_Check(arguments_.values[i]) != 0) {
        names.push_back(name_of(i));
      }
    }
    const bool told = !names.empty() && config_.warned_of_iterators.exchange(true);
    return told ? std::vector<std::string>() : names;
  }

  std::vector<std::string> changes_not_yet_told(const SavedState* saved) const {
    std::vector<std::string> names;
    versions_.changed(arguments_, [&](Py_ssize_t place, const at::Tensor& tensor) {
      const bool chunk = config_.kind == AdaptKind::chunked && place == arguments_.receivers;
      const bool put_back = chunk && config_.restores_chunk;
      if (!put_back && (saved == nullptr || !saved->has_values(tensor))) {
        names.push_back(name_of(place));
      }
    });
    const bool told = !names.empty() && config_.warned_of_changes.exchange(true);
    return told ? std::vector<std::string>() : names;
  }

  /// Scalers and schedulers that the function reaches. Looked for once per call that failed.
  std::string helpers_not_yet_told(PyObject* function) {
    // With `cut_dim` it is Microbatches, which only scales losses.
    const bool asked = std::exchange(looked_for_helpers_, true) || config_.warned_of_helpers;
    if (asked || config_.cut_dim) {
      return {};
    }
    const auto [positional, named] = as_python(arguments_);
    py::list restored;  // NOLINT(misc-const-correctness): it is filled below
    for (const ArgumentSlot& slot : config_.restore_arguments) {
      if (PyObject* const value = arguments_.get(slot)) {
        restored.append(py::handle(value));
      }
    }
    const py::object things = config_.restore ? config_.restore : py::none();
    const auto found =
        invoke(provided("unnamed"), py::handle(function), positional, named, things, restored);
    std::string kinds;
    for (const py::handle kind : found) {
      kinds += (kinds.empty() ? "a " : ", a ") + kind.cast<std::string>();
    }
    config_.warned_of_helpers = !kinds.empty();
    return kinds;
  }

  std::string name_of(Py_ssize_t place) const {
    if (place >= arguments_.positional) {
      return text_of(py::reinterpret_borrow<py::object>(
          PyTuple_GET_ITEM(arguments_.names, place - arguments_.positional)));
    }
    const auto index = static_cast<std::size_t>(place);
    return index < config_.argument_names.size() ? config_.argument_names[index]
                                                 : c10::str("positional argument ", place);
  }

  const AdaptiveConfig& config_;
  const CallArguments& arguments_;
  ArgumentVersions versions_;
  bool looked_for_helpers_ = false;
};

}  // namespace brim::python
