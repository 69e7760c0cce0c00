#pragma once

#include <brim/export.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>

namespace at {
class Tensor;
}
namespace c10d {
class ProcessGroup;
}

namespace brim {

/// What replaces a tensor by its sum over the ranks of a group: MicrobatchOptions::sum_over_ranks.
/// Ctrl-C in Python waits until the call that makes such sums has ended, so that no other rank
/// waits for the next one; unless the sums run code of Python's, as in a group or a mode written
/// there.
BRIM_API std::function<void(const at::Tensor&)> sum_over(
    c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace brim
