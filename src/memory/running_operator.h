#pragma once

#include <brim/export.h>

#include <cstdint>

namespace brim {

/// The operator of torch, or the node of a backward pass, that runs on a thread. Names and their
/// order do not depend on the size of the work.
struct RunningOperator {
  std::int32_t number = -1;  ///< of the outermost one, in the order in which they began; -1: none
  std::uint64_t name = 0;    ///< of the outermost one, as a hash
  std::uint64_t path = 0;    ///< with the names of those inside it
};

/// Has torch tell which operators run, on all threads, as long as it exists. There is one at a
/// time.
class OperatorWatch {
 public:
  OperatorWatch();
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

 private:
  std::uint64_t callback_;
};

/// On this thread; of one that has ended where none runs now.
BRIM_API RunningOperator running_operator() noexcept;

}  // namespace brim
