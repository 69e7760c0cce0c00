#include <brim/adapt/scalar_arguments.h>

#include <algorithm>

namespace brim {

bool ScalarArguments::counts(std::uint64_t argument, std::uint64_t value) {
  const std::lock_guard lock(mutex_);
  if (values_.size() == kMostArguments && !values_.contains(argument)) {
    return false;
  }
  std::vector<std::uint64_t>& seen = values_[argument];
  if (seen.size() > kMostValues) {
    return false;
  }
  if (std::find(seen.begin(), seen.end(), value) == seen.end()) {
    seen.push_back(value);
  }
  return seen.size() <= kMostValues;
}

void ScalarArguments::clear() {
  const std::lock_guard lock(mutex_);
  values_.clear();
}

}  // namespace brim
