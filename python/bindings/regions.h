#pragma once

#include <brim/nn/saving.h>
#include <pybind11/pybind11.h>

namespace brim::python {

/// What Python writes as None, "cheap", "products" and "auto", which was checked before.
nn::Recompute level_of(PyObject* recompute);

/// The region of a converted module, while this lives; then the state of before.
class InModuleRegion {
 public:
  /// @param recompute False: no region, what is in force stays
  explicit InModuleRegion(PyObject* recompute) {
    if (recompute != Py_False) {
      nn::Saving::set_state(nn::Saving::within(level_of(recompute), /*of_module=*/true));
    }
  }
  InModuleRegion(const InModuleRegion&) = delete;
  InModuleRegion& operator=(const InModuleRegion&) = delete;
  ~InModuleRegion() { nn::Saving::set_state(before_); }

 private:
  nn::Saving::State before_ = nn::Saving::state();
};

}  // namespace brim::python
