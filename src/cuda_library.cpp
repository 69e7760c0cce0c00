#include "cuda_library.h"

#include <dlfcn.h>

namespace brim {

void load_cuda_library() {
  // It lies beside libbrim; absent in a build without CUDA.
  [[maybe_unused]] static const void* const library =
      dlopen("libbrim_cuda.so", RTLD_NOW | RTLD_LOCAL);
}

}  // namespace brim
