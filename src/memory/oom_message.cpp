#include "memory/oom_message.h"

#include <array>
#include <cctype>
#include <charconv>
#include <initializer_list>

namespace brim::oom_message {
namespace {

bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }

bool is_identifier(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// What may follow a phrase for it to be one, and not the beginning of a longer sentence about
/// something else.
enum class Follows : std::uint8_t {
  anything,
  no_letter,    // "unable to find an engine", but not "engineer"
  punctuation,  // "CUDA out of memory." or the end, but not "CUDA out of memory handling" or "CUDA
                // out of memory.txt"
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

// One line for each text seen in the wild; a phrase must start a word.
constexpr std::array kPhrases{
    Phrase{"CUDA out of memory", Follows::punctuation, OomKind::device_memory,
           c10::DeviceType::CUDA},
    Phrase{"HIP out of memory", Follows::punctuation, OomKind::device_memory,
           c10::DeviceType::CUDA},
    Phrase{"XPU out of memory", Follows::punctuation, OomKind::device_memory, c10::DeviceType::XPU},
    Phrase{"CUDA error: out of memory", Follows::punctuation, OomKind::device_memory,
           c10::DeviceType::CUDA},
    Phrase{"CUDA driver error: out of memory", Follows::punctuation, OomKind::device_memory,
           c10::DeviceType::CUDA},
    // How WSL says that a device's memory cannot be made resident.
    Phrase{"CUDA driver error: device not ready", Follows::punctuation, OomKind::device_memory,
           c10::DeviceType::CUDA},
    Phrase{"Triton Error [CUDA]: out of memory", Follows::punctuation, OomKind::device_memory,
           c10::DeviceType::CUDA},
    Phrase{"HIP error: out of memory", Follows::punctuation, OomKind::device_memory,
           c10::DeviceType::CUDA},
    Phrase{"Cuda failure 2 'out of memory'", Follows::anything, OomKind::device_memory,
           c10::DeviceType::CUDA},
    Phrase{"Cuda failure 'out of memory'", Follows::anything, OomKind::device_memory,
           c10::DeviceType::CUDA},
    Phrase{"MPS backend out of memory", Follows::anything, OomKind::device_memory,
           c10::DeviceType::MPS},
    Phrase{"Invalid buffer size: ", Follows::digit, OomKind::device_memory, c10::DeviceType::MPS},
    Phrase{"CPU out of memory", Follows::punctuation, OomKind::host_memory, c10::DeviceType::CPU},
    Phrase{"DefaultCPUAllocator: can't allocate memory", Follows::anything, OomKind::host_memory,
           c10::DeviceType::CPU},
    Phrase{"not enough memory: you tried to allocate", Follows::anything, OomKind::host_memory,
           c10::DeviceType::CPU},
    Phrase{"DefaultCPUAllocator: not enough memory:", Follows::anything, OomKind::host_memory,
           c10::DeviceType::CPU},
    Phrase{"Cannot allocate memory (12)", Follows::anything, OomKind::host_memory,
           c10::DeviceType::CPU},
    Phrase{"CUDNN_STATUS_NOT_SUPPORTED. This error may appear", Follows::anything,
           OomKind::library_workspace, c10::DeviceType::CUDA},
    Phrase{"unable to find an engine", Follows::no_letter, OomKind::library_workspace,
           c10::DeviceType::CUDA},
    Phrase{"Unable to find a valid cuDNN algorithm", Follows::anything, OomKind::library_workspace,
           c10::DeviceType::CUDA},
    Phrase{"Storage size calculation overflowed with sizes=", Follows::anything,
           OomKind::size_limit, std::nullopt},
    Phrase{"INT_MAX elements", Follows::no_letter, OomKind::size_limit, std::nullopt},
    Phrase{"canUse32BitIndexMath", Follows::no_letter, OomKind::size_limit, std::nullopt},
};

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

/// CUBLAS_STATUS_ALLOC_FAILED, CUFFT_ALLOC_FAILED,
/// CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and the like: a status of a library of
/// CUDA's or ROCm's whose name ends so.
bool names_failed_library_allocation(std::string_view message) {
  for (const std::string_view ending : {"_ALLOC_FAILED", "_ALLOCATION_FAILED"}) {
    for (auto at = message.find(ending); at != std::string_view::npos;
         at = message.find(ending, at + 1)) {
      const auto end = at + ending.size();
      if (end < message.size() && is_identifier(message[end])) {
        continue;
      }
      auto begin = at;
      while (begin > 0 && is_identifier(message[begin - 1])) {
        --begin;
      }
      const std::string_view name = message.substr(begin, at - begin);
      for (const std::string_view family :
           {"CUBLAS", "CUDNN", "CUSOLVER", "CUSPARSE", "CUFFT", "CURAND", "CUTENSOR", "CUDSS",
            "HIPBLAS", "HIPSOLVER", "HIPSPARSE", "HIPFFT", "HIPRAND", "ROCBLAS", "ROCSOLVER",
            "ROCSPARSE", "ROCFFT", "ROCRAND", "MIOPEN"}) {
        if (name.starts_with(family)) {
          return true;
        }
      }
    }
  }
  return false;
}

/// torch's caching allocator asks NVML for the figures of its out-of-memory message, and where that
/// fails (in containers, on MIG devices) only the failed assertion is left of it.
bool names_failed_report(std::string_view message) {
  return message.find("NVML_SUCCESS == ") != std::string_view::npos &&
         message.find("INTERNAL ASSERT FAILED at ") != std::string_view::npos &&
         message.find("CUDACachingAllocator") != std::string_view::npos;
}

/// The number behind "GPU 3 has a total capacity of", where an allocator says which of several
/// devices it is.
std::optional<c10::DeviceIndex> device_index(std::string_view message) {
  constexpr std::string_view kBefore = "GPU ";
  const auto at = message.find(" has a total capacity");
  const auto start = at == std::string_view::npos ? at : message.rfind(kBefore, at);
  if (start == std::string_view::npos) {
    return std::nullopt;
  }
  const std::string_view digits =
      message.substr(start + kBefore.size(), at - start - kBefore.size());
  int index = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  if (error != std::errc{} || end != digits.data() + digits.size() || index < 0 || index > 127) {
    return std::nullopt;
  }
  return static_cast<c10::DeviceIndex>(index);
}

/// An amount of memory at the start of `text`: "2.00 GiB", "512 bytes", or brim's own "2.00 GiB
/// (2147483648 bytes)", which gives the exact number behind the rounded one.
std::optional<std::int64_t> leading_amount(std::string_view text) {
  double number = 0.0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (text.empty() || error != std::errc{} || number < 0) {
    return std::nullopt;
  }
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  while (!text.empty() && text.front() == ' ') {
    text.remove_prefix(1);
  }
  constexpr std::size_t kLongestUnit = 5;
  const auto exact = text.find(" (");
  if (exact != std::string_view::npos && exact <= kLongestUnit) {
    std::int64_t bytes = 0;
    const char* const last = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + exact + 2, last, bytes);
    if (parsed.ec == std::errc{} && std::string_view(parsed.ptr, last).starts_with(" bytes)")) {
      return bytes;
    }
  }
  struct Unit {
    std::string_view name;
    double bytes;
  };
  // torch prints binary units; MPS writes "GB" for the same.
  constexpr std::array kUnits{Unit{"bytes", 1.0},  Unit{"B", 1.0},      Unit{"KiB", 0x1p10},
                              Unit{"MiB", 0x1p20}, Unit{"GiB", 0x1p30}, Unit{"TiB", 0x1p40},
                              Unit{"PiB", 0x1p50}, Unit{"EiB", 0x1p60}, Unit{"KB", 0x1p10},
                              Unit{"MB", 0x1p20},  Unit{"GB", 0x1p30},  Unit{"TB", 0x1p40}};
  for (const Unit& unit : kUnits) {
    const bool whole_word = text.starts_with(unit.name) &&
                            (text.size() == unit.name.size() || !is_letter(text[unit.name.size()]));
    if (whole_word && number * unit.bytes < 0x1p63) {
      return static_cast<std::int64_t>(number * unit.bytes);
    }
  }
  return std::nullopt;
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

}  // namespace

std::optional<std::int64_t> requested_bytes(std::string_view message) noexcept {
  return amount_behind(message, {"Tried to allocate ", "tried to allocate ", "Unable to allocate ",
                                 "Invalid buffer size: ", "unable to mmap "});
}

std::optional<std::int64_t> bytes_in_use(std::string_view message) noexcept {
  return amount_behind(message, {" bytes) with ", "Of the allocated memory "});
}

OomCause parse(std::string_view message) noexcept {
  OomCause cause;
  // What torch makes of a std::bad_alloc on its way to Python: the whole text, or it is another's.
  if (message == "std::bad_alloc" || message == "bad allocation") {
    cause.kind = OomKind::host_memory;
    cause.device = c10::Device(c10::DeviceType::CPU);
    return cause;
  }
  for (const Phrase& phrase : kPhrases) {
    if (contains(message, phrase)) {
      cause.kind = phrase.kind;
      if (phrase.device) {
        cause.device = c10::Device(*phrase.device);
      }
      break;
    }
  }
  if (!cause && names_failed_library_allocation(message)) {
    cause.kind = OomKind::library_workspace;
    cause.device = c10::Device(c10::DeviceType::CUDA);
  }
  if (!cause && names_failed_report(message)) {
    cause.kind = OomKind::device_memory;
    cause.device = c10::Device(c10::DeviceType::CUDA);
  }
  if (!cause) {
    return cause;
  }
  cause.requested = requested_bytes(message);
  cause.in_use = bytes_in_use(message);
  if (cause.device && !cause.device->is_cpu()) {
    if (const auto index = device_index(message)) {
      cause.device = c10::Device(cause.device->type(), *index);
    }
  }
  return cause;
}

}  // namespace brim::oom_message
