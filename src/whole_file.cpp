#include "whole_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <random>
#include <string>

namespace brim {
namespace {

namespace fs = std::filesystem;

std::error_code last_error() { return {errno != 0 ? errno : EIO, std::generic_category()}; }

/// As std::filesystem's, which leaves permissions to the umask.
std::error_code make_folders(const fs::path& folder, mode_t mode) {
  if (folder.empty() || ::mkdir(folder.c_str(), mode) == 0) {
    return {};
  }
  if (errno == ENOENT && folder.has_relative_path()) {
    const std::error_code error = make_folders(folder.parent_path(), mode);
    if (error || ::mkdir(folder.c_str(), mode) == 0) {
      return error;
    }
  }
  // "/a/b/" is a folder that is there by now, and so is what another process has made meanwhile.
  const std::error_code error = last_error();
  std::error_code ignored;
  return fs::is_directory(folder, ignored) ? std::error_code() : error;
}

bool write_all(int file, std::span<const std::byte> part) {
  while (!part.empty()) {
    const ssize_t written =
        ::write(file, part.data(), std::min<std::size_t>(part.size(), std::size_t{1} << 30U));
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      return false;
    }
    part = part.subspan(static_cast<std::size_t>(written));
  }
  return true;
}

std::error_code write_new(const fs::path& file,
                          const std::vector<std::span<const std::byte>>& parts, mode_t mode) {
  errno = 0;
  const int out = ::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (out < 0) {
    return last_error();
  }
  const auto write_part = [&](auto part) { return write_all(out, part); };
  std::error_code error;
  if (!std::ranges::all_of(parts, write_part)) {
    error = last_error();
  }
  // A network file system may say only now that it is full.
  return ::close(out) != 0 && !error ? last_error() : error;
}

}  // namespace

std::error_code write_whole(const fs::path& file,
                            const std::vector<std::span<const std::byte>>& parts, Readers readers,
                            bool may_be_gone) {
  const bool for_all = readers == Readers::everyone;
  if (const auto error = make_folders(file.parent_path(), for_all ? 0755 : 0700)) {
    return error;
  }
  // The name is drawn: processes in different containers share neither process ids nor a counter.
  std::random_device random;
  const fs::path temporary =
      file.string() + "." + std::to_string((std::uint64_t{random()} << 32U) | random()) + ".tmp";
  std::error_code error = write_new(temporary, parts, for_all ? 0644 : 0600);
  if (!error) {
    // Without fsync, which takes milliseconds, as does ext4 where a file takes another one's place.
    if (may_be_gone) {
      ::unlink(file.c_str());
    }
    fs::rename(temporary, file, error);
    if (may_be_gone && error == std::errc::no_such_file_or_directory) {
      return {};  // another process has just removed all files
    }
  }
  if (error) {
    ::unlink(temporary.c_str());
  }
  return error;
}

}  // namespace brim
