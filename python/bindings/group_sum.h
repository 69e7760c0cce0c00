#pragma once

#include <functional>

namespace at {
class Tensor;
}

namespace brim::python {

/// brim::sum_over a process group of Python's.
struct GroupSum {
  std::function<void(const at::Tensor&)> add;
};

}  // namespace brim::python
