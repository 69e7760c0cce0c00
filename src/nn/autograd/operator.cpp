#include "nn/autograd/operator.h"

#include <atomic>
#include <string_view>

#include "cuda_library.h"
#include "only_copy.h"

namespace brim::nn {
namespace {

std::string name_in(std::string_view schema) {
  return std::string(schema.substr(0, schema.find('(')));
}

}  // namespace

Registration::Registration(const char* schema, const std::vector<at::Tag>& tags)
    : library_(torch::Library::FRAGMENT, "brim", std::nullopt, __FILE__, __LINE__),
      name_(name_in(schema)),
      is_first_copy_(is_first_copy()) {
  if (is_first_copy_) {
    library_.def(schema, tags);
  }
}

c10::OperatorHandle find_operator(const char* schema) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("brim::" + name_in(schema)).c_str(), "");
}

bool loads_cuda_library(const at::Tensor& tensor) {
  static std::atomic<bool> is_loaded = false;
  if (!tensor.is_cuda() || is_loaded.exchange(true)) {
    return false;
  }
  load_cuda_library();
  return true;
}

bool torch_casts(const char* schema, c10::DispatchKey autocast_key) {
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::" + name_in(schema), ""});
  return op && op->hasKernelForDispatchKey(autocast_key);
}

}  // namespace brim::nn
