#pragma once

#include <brim/predict/collect_peaks.h>

#include <cstdint>
#include <functional>

namespace brim::detail {

/// Measures a piece of work as collect_peaks does, so that its failure says something about its
/// size. If the device has room for what the failed work held and asked for, or if the error does
/// not say what that was, the cause may have been another: fragments in a cache, a library's
/// workspace, memory that another process has returned since. Then it runs once more, and the
/// second answer counts.
///
/// @param limit bytes that may be held in all. Where a failure does not say what was asked for, its
///     peak is more than this.
PeakSample sure_peak(const std::function<void()>& work, std::int64_t limit,
                     const CollectOptions& options);

}  // namespace brim::detail
