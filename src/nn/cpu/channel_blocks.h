#pragma once

#include <cstdint>

namespace brim::nn {

/// A dense tensor with channels as `outer` times `channels` times `inner` elements, in the order of
/// memory. Where the channels are last, `inner` is 1.
struct ChannelBlocks {
  std::int64_t outer = 0;
  std::int64_t channels = 0;
  std::int64_t inner = 0;
};

}  // namespace brim::nn
