#include <brim/memory/out_of_memory.h>

#include <c10/util/Exception.h>

#include <atomic>
#include <new>
#include <stdexcept>
#include <system_error>

namespace brim {
namespace {

std::atomic<ExceptionClassifier> foreign_classifier{nullptr};

// cudaErrorMemoryAllocation and hipErrorOutOfMemory are both 2.
constexpr std::int32_t kRuntimeOutOfMemory = 2;

/// Errors of these types blame an argument: no size would cure them, whatever their text says.
bool blames_an_argument(const c10::Error& error) {
  return dynamic_cast<const c10::ValueError*>(&error) != nullptr ||
         dynamic_cast<const c10::TypeError*>(&error) != nullptr ||
         dynamic_cast<const c10::IndexError*>(&error) != nullptr ||
         dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr;
}

OomCause classify_torch_error(const c10::Error& error) {
  if (blames_an_argument(error)) {
    return {};
  }
  const auto* accelerator = dynamic_cast<const c10::AcceleratorError*>(&error);
  const bool certain =
      dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
      (accelerator != nullptr && accelerator->get_error_code() == kRuntimeOutOfMemory);
  return classify_message(error.what_without_backtrace(),
                          certain ? OomKind::device_memory : OomKind::none);
}

/// What the error says by itself, by its type and its text.
OomCause said_by(const std::exception& error) {
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error)) {
    return classify_torch_error(*torch_error);
  }
  if (dynamic_cast<const std::bad_array_new_length*>(&error) != nullptr) {
    return {.kind = OomKind::size_limit, .device = c10::DeviceType::CPU};
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return {.kind = OomKind::host_memory, .device = c10::DeviceType::CPU};
  }
  if (const auto* system = dynamic_cast<const std::system_error*>(&error)) {
    const bool exhausted = system->code() == std::errc::not_enough_memory;
    return classify_message(error.what(), exhausted ? OomKind::host_memory : OomKind::none);
  }
  return dynamic_cast<const std::runtime_error*>(&error) != nullptr ? classify_message(error.what())
                                                                    : OomCause{};
}

/// Whether an error only reports that something inside of it failed, so that what is nested in it
/// decides. An error that blames an argument, or a type that the program has for itself, means what
/// it says.
bool reports_another(const std::exception& error) {
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error)) {
    return !blames_an_argument(*torch_error);
  }
  return dynamic_cast<const std::runtime_error*>(&error) != nullptr;
}

}  // namespace

OomCause classify(const std::exception& error) noexcept {
  if (const auto foreign = foreign_classifier.load()) {
    if (const auto cause = foreign(error)) {
      return *cause;
    }
  }
  try {
    if (const OomCause cause = said_by(error)) {
      return cause;
    }
    const auto* outer = dynamic_cast<const std::nested_exception*>(&error);
    if (outer != nullptr && reports_another(error)) {
      return classify(outer->nested_ptr());
    }
  } catch (...) {
    // No memory to look at an error about memory. Saying "not ours" lets it pass on unchanged.
  }
  return {};
}

OomCause classify(const std::exception_ptr& error) noexcept {
  if (!error) {
    return {};
  }
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return classify(exception);
  } catch (...) {
    return {};  // no std::exception: it says nothing
  }
}

bool is_out_of_memory(const std::exception_ptr& error) noexcept {
  return static_cast<bool>(classify(error));
}

bool is_out_of_memory(const std::exception& error) noexcept {
  return static_cast<bool>(classify(error));
}

const char* to_string(OomKind kind) noexcept {
  switch (kind) {
    case OomKind::none:
      return "not out of memory";
    case OomKind::device_memory:
      return "device memory";
    case OomKind::host_memory:
      return "host memory";
    case OomKind::library_workspace:
      return "library workspace";
    case OomKind::size_limit:
      return "size limit";
  }
  return "not out of memory";
}

void set_exception_classifier(ExceptionClassifier classifier) noexcept {
  foreign_classifier.store(classifier);
}

}  // namespace brim
