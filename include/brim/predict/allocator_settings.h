#pragma once

#include <brim/export.h>
#include <brim/predict/allocator_model.h>

#include <string>
#include <string_view>
#include <vector>

namespace brim {

/// Torch's settings of its allocator, and what of them AllocatorModel does not follow.
struct AllocatorSettings {
  AllocatorOptions options;
  std::vector<std::string> not_modelled;  ///< "garbage_collection_threshold:0.8", …
};

/// Reads the text of PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF), such as
/// "expandable_segments:True,max_split_size_mb:128". Settings that do not touch the device's memory
/// (pinned memory, locks) are skipped.
/// @throws std::invalid_argument if it is not a list of name:value, or a value that matters is not
///     what torch allows.
BRIM_API AllocatorSettings parse_allocator_settings(std::string_view text);

/// The text of these settings in the environment: PYTORCH_ALLOC_CONF, else PYTORCH_CUDA_ALLOC_CONF,
/// else nothing.
BRIM_API std::string allocator_settings_in_environment();

}  // namespace brim
