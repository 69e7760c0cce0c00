#pragma once

#include <brim/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string_view>

namespace brim {

/// Why a piece of work failed, as far as memory is concerned.
enum class OomKind : std::uint8_t {
  none,               ///< something else; a smaller size would not help
  device_memory,      ///< an accelerator's memory is exhausted
  host_memory,        ///< the CPU's memory, or a budget on it, is exhausted
  library_workspace,  ///< cuBLAS, cuDNN and the like found no room for their scratch memory
  size_limit,         ///< a kernel's index range (INT_MAX elements) was exceeded
};

/// What an error says about memory. `kind` is none for an error that is not about memory; the rest
/// is then empty.
struct OomCause {
  OomKind kind = OomKind::none;
  /// Where, if the error says so; with an index only if it names one.
  std::optional<c10::Device> device{};
  /// Bytes asked for. Exact for brim's own errors; rounded where torch prints "2.00 GiB".
  std::optional<std::int64_t> requested{};
  /// Bytes that tensors held at that moment, exact or rounded likewise.
  std::optional<std::int64_t> in_use{};

  explicit operator bool() const { return kind != OomKind::none; }
};

/// Tells running out of memory from every other error, by its type first and then by its text.
/// Everything that a smaller size would cure counts, including a size limit. A wrong argument whose
/// message merely mentions memory (c10::ValueError, std::logic_error …) does not. A
/// std::runtime_error or c10::Error with such an error nested in it (std::throw_with_nested) does.
///
/// Any thread may ask, whichever thread the error was thrown on.
BRIM_API OomCause classify(const std::exception& error) noexcept;

/// The same for an exception in flight; empty pointers and exceptions that are no std::exception
/// give `none`.
BRIM_API OomCause classify(const std::exception_ptr& error) noexcept;

/// The same for the text of an error alone. `otherwise` is the answer for a text that is not
/// recognised, for callers who know from the error's type that it is about memory.
BRIM_API OomCause classify_message(std::string_view message,
                                   OomKind otherwise = OomKind::none) noexcept;

/// Whether classify finds that memory ran out.
BRIM_API bool is_out_of_memory(const std::exception_ptr& error) noexcept;
BRIM_API bool is_out_of_memory(const std::exception& error) noexcept;

/// "device memory", "host memory", "library workspace", "size limit", "not out of memory".
BRIM_API const char* to_string(OomKind kind) noexcept;

/// Recognises exceptions that the core has no type for, such as Python's. Returns empty for one
/// that it does not know. Called under no lock and from any thread.
using ExceptionClassifier = std::optional<OomCause> (*)(const std::exception&) noexcept;

/// Sets the classifier that is asked before the built-in rules. Meant to be called once, when a
/// language binding is loaded.
BRIM_API void set_exception_classifier(ExceptionClassifier classifier) noexcept;

}  // namespace brim
