#include "cuda_library.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <filesystem>
#include <system_error>

namespace brim {
namespace {

constexpr const char* kName = "libbrim_cuda.so";

/// Whether it lies beside libbrim: a build without CUDA has none.
bool is_there() {
  Dl_info self{};
  std::error_code ignored;
  return dladdr(kName, &self) != 0 && self.dli_fname != nullptr &&
         std::filesystem::exists(std::filesystem::path(self.dli_fname).parent_path() / kName,
                                 ignored);
}

void* load() {
  void* const library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = dlerror();
    if (is_there()) {
      TORCH_WARN("brim has CUDA support that cannot be loaded, and does without it: ", reason);
    }
  }
  return library;
}

}  // namespace

void load_cuda_library() { [[maybe_unused]] static const void* const library = load(); }

}  // namespace brim
