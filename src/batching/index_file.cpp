#include "batching/index_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "batching/permutation.h"
#include "whole_file.h"

namespace brim::batching::detail {
namespace {

// "brimindx"; another number on a machine with another order of bytes.
constexpr std::uint64_t kMagic = 0x78646E696D697262ULL;
// Of the layout, and of how batches are made.
constexpr std::uint64_t kVersion = 1;

struct Header {
  std::uint64_t magic = kMagic;
  std::uint64_t version = kVersion;
  std::uint64_t settings = 0;
  std::uint64_t data = 0;
  std::uint64_t bytes = 0;     // of the payload
  std::uint64_t checksum = 0;  // of the payload
  std::uint64_t unused = 0;
  std::uint64_t own_checksum = 0;  // of the header before it

  [[nodiscard]] std::uint64_t expected_checksum() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t word : {magic, version, settings, data, bytes, checksum, unused}) {
      sum = mix(sum, word);
    }
    return sum;
  }
};

/// Of bytes that come in parts. Four sums, of which none waits for the others.
class Checksum {
 public:
  void add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const std::size_t some = std::min(bytes.size(), sizeof(block_) - filled_);
      if (filled_ == 0 && some == sizeof(block_)) {
        take(bytes.data());
      } else {
        std::memcpy(block_.data() + filled_, bytes.data(), some);
        filled_ += some;
        if (filled_ == sizeof(block_)) {
          take(block_.data());
          filled_ = 0;
        }
      }
      length_ += some;
      bytes = bytes.subspan(some);
    }
  }

  [[nodiscard]] std::uint64_t result() {
    std::memset(block_.data() + filled_, 0, sizeof(block_) - filled_);
    take(block_.data());
    filled_ = 0;
    std::uint64_t sum = mix(1, length_);
    for (const std::uint64_t lane : lanes_) {
      sum = mix(sum, lane);
    }
    return sum;
  }

 private:
  void take(const std::byte* from) {
    std::array<std::uint64_t, 4> words{};
    std::memcpy(words.data(), from, sizeof(words));
    for (std::size_t i = 0; i < words.size(); ++i) {
      lanes_[i] = (lanes_[i] ^ words[i]) * 0x9E3779B97F4A7C15ULL;
      lanes_[i] ^= lanes_[i] >> 32U;
    }
  }

  std::array<std::uint64_t, 4> lanes_{1, 2, 3, 4};
  std::array<std::byte, 32> block_{};
  std::size_t filled_ = 0;
  std::uint64_t length_ = 0;
};

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) {
      ::close(number_);
    }
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  [[nodiscard]] int number() const { return number_; }

 private:
  int number_;
};

}  // namespace

std::uint64_t hash_of(std::string_view text) {
  std::uint64_t sum = mix(2, text.size());
  for (const char letter : text) {
    sum = mix(sum, static_cast<unsigned char>(letter));
  }
  return sum;
}

IndexFile::IndexFile(const std::filesystem::path& file, std::string_view settings,
                     std::string_view data) {
  const Descriptor opened(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (opened.number() < 0) {
    return;
  }
  struct stat status{};
  state_ = State::damaged;
  if (::fstat(opened.number(), &status) != 0 || !S_ISREG(status.st_mode) ||
      std::cmp_less(status.st_size, sizeof(Header))) {
    return;
  }
  length_ = static_cast<std::size_t>(status.st_size);
  mapped_ = ::mmap(nullptr, length_, PROT_READ, MAP_SHARED, opened.number(), 0);
  if (mapped_ == MAP_FAILED) {  // NOLINT(performance-no-int-to-ptr): what mmap returns
    mapped_ = nullptr;
    return;
  }
  Header header;
  std::memcpy(&header, mapped_, sizeof(header));
  if (header.magic != kMagic || header.own_checksum != header.expected_checksum() ||
      header.version != kVersion || header.settings != hash_of(settings) ||
      header.bytes != length_ - sizeof(header)) {
    return;
  }
  if (header.data != hash_of(data)) {
    state_ = State::other_data;
    return;
  }
  payload_ = std::span(static_cast<const std::byte*>(mapped_), length_).subspan(sizeof(header));
  Checksum checksum;
  checksum.add(payload_);
  state_ = checksum.result() == header.checksum ? State::usable : State::damaged;
}

IndexFile::~IndexFile() {
  if (mapped_ != nullptr) {
    ::munmap(mapped_, length_);
  }
}

std::error_code IndexFile::write(const std::filesystem::path& file, std::string_view settings,
                                 std::string_view data,
                                 const std::vector<std::span<const std::byte>>& parts) {
  Header header;
  header.settings = hash_of(settings);
  header.data = hash_of(data);
  Checksum checksum;
  for (const auto part : parts) {
    header.bytes += part.size();
    checksum.add(part);
  }
  header.checksum = checksum.result();
  header.own_checksum = header.expected_checksum();
  std::vector whole{std::as_bytes(std::span(&header, 1))};
  whole.insert(whole.end(), parts.begin(), parts.end());
  return write_whole(file, whole, Readers::everyone, /*may_be_gone=*/false);
}

}  // namespace brim::batching::detail
