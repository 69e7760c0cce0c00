#include <brim/runtime.h>
#include <brim/version.h>

namespace brim {

const char* version() noexcept { return BRIM_VERSION_STRING; }

const char* built_with_torch() noexcept { return BRIM_TORCH_VERSION; }

}  // namespace brim
