#include <brim/adapt/named_sizes.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace brim {

NamedSizes::NamedSizes(std::initializer_list<SizeGroup> groups) {
  for (const SizeGroup& group : groups) {
    groups_.emplace_back();
    for (const NamedSize& size : group.members()) {
      TORCH_CHECK_VALUE(std::ranges::find(names_, size.name) == names_.end(), "the name ",
                        size.name, " is there twice");
      TORCH_CHECK_VALUE(size.maximum >= 1, size.name, " must be 1 or more, got ", size.maximum);
      TORCH_CHECK_VALUE(size.quantum >= 0, "the quantum of ", size.name, " must be 1 or more, got ",
                        size.quantum);
      groups_.back().push_back(names_.size());
      names_.push_back(size.name);
      maxima_.push_back(size.maximum);
      quanta_.push_back(size.quantum);
    }
  }
  TORCH_CHECK_VALUE(!names_.empty(), "maximize needs at least one size");
}

std::string NamedSizes::text() const { return c10::Join(", ", names_); }

std::int64_t Sizes::operator[](std::string_view name) const {
  const auto found = std::ranges::find(names_, name);
  TORCH_CHECK_VALUE(found != names_.end(), "there is no size named ", name, ": there are ",
                    c10::Join(", ", std::vector<std::string>(names_.begin(), names_.end())));
  return values_[static_cast<std::size_t>(found - names_.begin())];
}

}  // namespace brim
