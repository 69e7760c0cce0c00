#include "nn/autograd/operator.h"

#include <atomic>

#include "cuda_library.h"
#include "only_copy.h"

namespace brim::nn {

Registration::Registration(const std::string& schema, const std::vector<at::Tag>& tags)
    : library_(torch::Library::FRAGMENT, "brim", std::nullopt, __FILE__, __LINE__),
      name_(schema.substr(0, schema.find('('))),
      is_first_copy_(is_first_copy()) {
  if (is_first_copy_) {
    library_.def(schema.c_str(), tags);
  }
}

c10::OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow((std::string("brim::") + name).c_str(), "");
}

bool loads_cuda_library(const at::Tensor& tensor) {
  static std::atomic<bool> is_loaded = false;
  if (!tensor.is_cuda() || is_loaded.exchange(true)) {
    return false;
  }
  load_cuda_library();
  return true;
}

bool torch_casts(const char* name, c10::DispatchKey autocast_key) {
  const auto op = c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, ""});
  return op && op->hasKernelForDispatchKey(autocast_key);
}

}  // namespace brim::nn
