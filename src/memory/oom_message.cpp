#include "memory/oom_message.h"

#include <brim/memory/bytes.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <initializer_list>
#include <mutex>
#include <utility>

#include "fork.h"
#include "memory/byte_units.h"
#include "memory/reclaim.h"
#include "number_text.h"

namespace brim {
namespace {

bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }

bool is_identifier(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// What may follow a phrase, so that the beginning of a longer word or name does not count.
enum class Follows : std::uint8_t {
  anything,
  no_letter,    // "unable to find an engine", but not "engineer"
  punctuation,  // "CUDA out of memory." or the end, but not "… memory handling" or "… memory.txt"
  digit,        // "Invalid buffer size: 12.00 GiB"
};

bool follows(std::string_view rest, Follows rule) {
  switch (rule) {
    case Follows::anything:
      return true;
    case Follows::no_letter:
      return rest.empty() || !is_letter(rest.front());
    case Follows::punctuation:
      return rest.empty() || rest.starts_with(" (") ||  // c10 adds context in brackets
             (std::string_view(".\n,;:!)'\"").find(rest.front()) != std::string_view::npos &&
              (rest.front() == '\n' || rest.size() == 1 || !is_identifier(rest[1])));
    case Follows::digit:
      return !rest.empty() && std::isdigit(static_cast<unsigned char>(rest.front())) != 0;
  }
  return false;
}

struct Phrase {
  std::string_view text;
  Follows after;
  OomKind kind;
  std::optional<c10::DeviceType> device;
};

using enum Follows;
using enum OomKind;
constexpr auto kCpu = c10::DeviceType::CPU;
constexpr auto kCuda = c10::DeviceType::CUDA;
constexpr auto kMps = c10::DeviceType::MPS;
constexpr auto kXpu = c10::DeviceType::XPU;

// One line for each text seen in the wild; a phrase must start a word.
constexpr auto kPhrases = std::to_array<Phrase>({
    {"CUDA out of memory", punctuation, device_memory, kCuda},
    {"HIP out of memory", punctuation, device_memory, kCuda},
    {"XPU out of memory", punctuation, device_memory, kXpu},
    {"CUDA error: out of memory", punctuation, device_memory, kCuda},
    {"CUDA driver error: out of memory", punctuation, device_memory, kCuda},
    // WSL, where a device's memory cannot be made resident.
    {"CUDA driver error: device not ready", punctuation, device_memory, kCuda},
    {"Triton Error [CUDA]: out of memory", punctuation, device_memory, kCuda},
    {"HIP error: out of memory", punctuation, device_memory, kCuda},
    {"Cuda failure 2 'out of memory'", anything, device_memory, kCuda},
    {"Cuda failure 'out of memory'", anything, device_memory, kCuda},
    {"MPS backend out of memory", anything, device_memory, kMps},
    {"Invalid buffer size: ", digit, device_memory, kMps},
    {"CPU out of memory", punctuation, host_memory, kCpu},
    {"DefaultCPUAllocator: can't allocate memory", anything, host_memory, kCpu},
    {"not enough memory: you tried to allocate", anything, host_memory, kCpu},
    {"DefaultCPUAllocator: not enough memory:", anything, host_memory, kCpu},
    {"Cannot allocate memory (12)", anything, host_memory, kCpu},
    {"CUDNN_STATUS_NOT_SUPPORTED. This error may appear", anything, library_workspace, kCuda},
    {"unable to find an engine", no_letter, library_workspace, kCuda},
    {"Unable to find a valid cuDNN algorithm", anything, library_workspace, kCuda},
    {"Storage size calculation overflowed with sizes=", anything, size_limit, std::nullopt},
    {"INT_MAX elements", no_letter, size_limit, std::nullopt},
    {"canUse32BitIndexMath", no_letter, size_limit, std::nullopt},
});

bool contains(std::string_view message, const Phrase& phrase) {
  for (auto at = message.find(phrase.text); at != std::string_view::npos;
       at = message.find(phrase.text, at + 1)) {
    const bool starts_a_word = at == 0 || !is_identifier(message[at - 1]);
    if (starts_a_word && follows(message.substr(at + phrase.text.size()), phrase.after)) {
      return true;
    }
  }
  return false;
}

/// CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and the like: a
/// status of one of CUDA's or ROCm's libraries.
bool names_failed_library_allocation(std::string_view message) {
  constexpr auto kLibraries = std::to_array<std::string_view>(
      {"CUBLAS", "CUDNN", "CUSOLVER", "CUSPARSE", "CUFFT", "CURAND", "CUTENSOR", "CUDSS", "HIPBLAS",
       "HIPSOLVER", "HIPSPARSE", "HIPFFT", "HIPRAND", "ROCBLAS", "ROCSOLVER", "ROCSPARSE", "ROCFFT",
       "ROCRAND", "MIOPEN"});
  if (message.find("_FAILED") == std::string_view::npos) {
    return false;  // nearly always: no need to look at each word
  }
  for (const auto* word = message.begin(); word != message.end();) {
    const auto* const end = std::find_if_not(word, message.end(), is_identifier);
    const std::string_view name(word, end);
    if ((name.ends_with("_ALLOC_FAILED") || name.ends_with("_ALLOCATION_FAILED")) &&
        std::any_of(kLibraries.begin(), kLibraries.end(),
                    [&](std::string_view library) { return name.starts_with(library); })) {
      return true;
    }
    word = std::find_if(end, message.end(), is_identifier);
  }
  return false;
}

/// torch's caching allocator asks NVML for the figures of its out-of-memory message. Where that
/// fails (in containers, on MIG devices), the error is only the failed assertion.
bool names_failed_report(std::string_view message) {
  return message.find("NVML_SUCCESS == ") != std::string_view::npos &&
         message.find("INTERNAL ASSERT FAILED at ") != std::string_view::npos &&
         message.find("CUDACachingAllocator") != std::string_view::npos;
}

/// The kind and the kind of device; no figures.
OomCause recognise(std::string_view message) {
  // What torch makes of a std::bad_alloc on its way to Python: nothing but these words.
  if (message == "std::bad_alloc" || message == "bad allocation") {
    return {.kind = host_memory, .device = kCpu};
  }
  for (const Phrase& phrase : kPhrases) {
    if (contains(message, phrase)) {
      return {.kind = phrase.kind, .device = phrase.device};
    }
  }
  if (names_failed_library_allocation(message)) {
    return {.kind = library_workspace, .device = kCuda};
  }
  if (names_failed_report(message)) {
    return {.kind = device_memory, .device = kCuda};
  }
  return {};
}

/// The 3 of "GPU 3 has a total capacity of", where an allocator names its device.
std::optional<c10::DeviceIndex> device_index(std::string_view message) {
  constexpr std::string_view kBefore = "GPU ";
  constexpr std::string_view kBehind = " has a total capacity";
  const auto start = message.rfind(kBefore, message.find(kBehind));
  if (start == std::string_view::npos) {
    return std::nullopt;
  }
  message.remove_prefix(start + kBefore.size());
  const auto index = detail::take_number<c10::DeviceIndex>(message);
  return index && *index >= 0 && message.starts_with(kBehind) ? index : std::nullopt;
}

/// The amount of memory at the start of `text`: "2.00 GiB", "512 bytes".
std::optional<std::int64_t> leading_amount(std::string_view text) {
  const auto number = detail::take_number<double>(text, std::chars_format::fixed);
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  const auto letters = std::find_if_not(text.begin(), text.end(), is_letter) - text.begin();
  const std::string_view unit = text.substr(0, static_cast<std::size_t>(letters));
  // torch's units are binary; MPS writes "GB" for GiB.
  const double bytes = unit_bytes(unit == "bytes" ? "B" : unit, 1024.0).value_or(0.0);
  if (unit.empty() || bytes == 0.0 || !number || *number < 0 || *number * bytes >= 0x1p63) {
    return std::nullopt;
  }
  return static_cast<std::int64_t>(*number * bytes);
}

/// The amount behind the first of `phrases` that `message` contains.
std::optional<std::int64_t> amount_behind(std::string_view message,
                                          std::initializer_list<std::string_view> phrases) {
  for (const std::string_view phrase : phrases) {
    const auto at = message.find(phrase);
    if (at != std::string_view::npos) {
      return leading_amount(message.substr(at + phrase.size()));
    }
  }
  return std::nullopt;
}

/// The latest errors of our own with their figures. Found by their text, which is all that torch
/// hands to Python, and on any thread: errors of a backward pass or a thread pool travel.
struct Refusals {
  static constexpr std::size_t kKept = 64;
  std::mutex mutex;
  std::array<std::pair<std::string, OomCause>, kKept> latest;
  std::size_t next = 0;
};

/// The figures of the error of our own that `message` contains, with whatever was added to it.
std::optional<OomCause> remembered(std::string_view message) noexcept {
  try {
    auto& all = shared_object<Refusals>();
    const std::lock_guard lock(all.mutex);
    for (const auto& [text, cause] : all.latest) {
      if (!text.empty() && message.find(text) != std::string_view::npos) {
        return cause;
      }
    }
  } catch (...) {
    // No memory for the table itself, so nothing is in it.
  }
  return std::nullopt;
}

}  // namespace

void remember_refusal(const std::string& text, const OomCause& cause) noexcept {
  try {
    auto& all = shared_object<Refusals>();
    const std::lock_guard lock(all.mutex);
    all.latest[all.next] = {text, cause};
    all.next = (all.next + 1) % Refusals::kKept;
  } catch (...) {
    // No memory for a copy of the text: the rounded figures that it shows to people must do.
  }
}

std::string with_exact(std::int64_t bytes) {
  return format_bytes(bytes) + " (" + std::to_string(bytes) + " bytes)";
}

std::string allowed_by_budget(std::int64_t allowed, std::int64_t held) {
  return " of " + with_exact(allowed) + " allowed by the budget" +
         (held > allowed ? ", which is less than what was held already" : "");
}

void throw_refusal(c10::Device device, std::int64_t bytes, std::int64_t in_use,
                   const std::string& why) {
  const std::string gone = given_up(device);
  const std::string text = std::string(device.is_cpu() ? "CPU" : "CUDA") +
                           " out of memory. Tried to allocate " + with_exact(bytes) +
                           (device.is_cpu() ? "" : " on " + device.str()) + " with " +
                           with_exact(in_use) + " in use" + why + (gone.empty() ? "" : "; ") + gone;
  remember_refusal(text, {.kind = device.is_cpu() ? host_memory : device_memory,
                          .device = device,
                          .requested = bytes,
                          .in_use = in_use});
  // Without a backtrace, which TORCH_CHECK_WITH would add: running out of memory is expected here,
  // and torch prints the whole text where oneDNN fails and falls back to another kernel.
  throw c10::OutOfMemoryError(text);
}

OomCause classify_message(std::string_view message, OomKind otherwise) noexcept {
  OomCause cause = recognise(message);
  if (!cause) {
    cause.kind = otherwise;
    if (otherwise == host_memory) {
      cause.device = kCpu;
    }
  }
  if (!cause) {
    return cause;
  }
  if (const auto ours = remembered(message)) {
    return *ours;
  }
  cause.requested =
      amount_behind(message, {"Tried to allocate ", "tried to allocate ", "Unable to allocate ",
                              "Invalid buffer size: ", "unable to mmap "});
  cause.in_use = amount_behind(message, {"Of the allocated memory "});
  if (cause.device && !cause.device->is_cpu()) {
    if (const auto index = device_index(message)) {
      cause.device = c10::Device(cause.device->type(), *index);
    }
  }
  return cause;
}

}  // namespace brim
