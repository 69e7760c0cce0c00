#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace brim::batching::detail {

/// A number made of a text.
[[nodiscard]] std::uint64_t hash_of(std::string_view text);

/// A record of a SampleIndex, mapped. Bytes of other layouts, versions, settings or data are told
/// apart by a header; damage is, by a checksum.
class IndexFile {
 public:
  enum class State : std::uint8_t { usable, absent, damaged, other_data };

  /// Opens and checks a file. @param settings what the record is about; `data` what it was made of.
  IndexFile(const std::filesystem::path& file, std::string_view settings, std::string_view data);
  ~IndexFile();
  IndexFile(const IndexFile&) = delete;
  IndexFile& operator=(const IndexFile&) = delete;

  [[nodiscard]] State state() const { return state_; }
  /// Aligned for any number.
  [[nodiscard]] std::span<const std::byte> payload() const { return payload_; }

  /// Writes a file in one piece: others see the old one, the new one or none.
  static std::error_code write(const std::filesystem::path& file, std::string_view settings,
                               std::string_view data,
                               const std::vector<std::span<const std::byte>>& parts);

 private:
  void* mapped_ = nullptr;
  std::size_t length_ = 0;
  State state_ = State::absent;
  std::span<const std::byte> payload_;
};

}  // namespace brim::batching::detail
