#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

#include "interpreter.h"

namespace brim::python {

/// A progress bar made by `make(total)`, or none where that is null; closed whatever happens.
class ProgressBar {
 public:
  ProgressBar(const pybind11::object& make, std::int64_t total) {
    if (make) {
      bar_ = invoke(make, total);
    }
  }
  ~ProgressBar() {
    if (bar_) {
      const pybind11::error_scope pending;  // an exception may be on its way
      try {
        invoke(attribute(bar_, "close"));
      } catch (pybind11::error_already_set& error) {
        error.discard_as_unraisable("brim's progress bar");
      }
      release(std::move(bar_));
    }
  }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void advance(std::int64_t size) {
    if (bar_) {
      invoke(attribute(bar_, "update"), size);
    }
  }

 private:
  pybind11::object bar_;
};

}  // namespace brim::python
