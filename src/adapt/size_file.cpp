#include "adapt/size_file.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <locale>
#include <span>
#include <sstream>
#include <string_view>
#include <utility>

#include "whole_file.h"

namespace brim::size_file {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".brim-sizes";
constexpr std::string_view kTemporary = ".tmp";  // of write_whole
// Only a whole text has it: a system that went down may leave a part of the newest file.
constexpr std::string_view kEnd = "end";
constexpr std::size_t kHexDigits = 16;
// Sixteen attempts take some 2 kB; anything much larger was not written by us.
constexpr std::uintmax_t kLargestFile = 65536;
constexpr std::int64_t kUnknown = -1;

std::string hex(std::uint64_t key) {
  std::array<char, kHexDigits + 1> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(key));
  return text.data();
}

std::string header(std::uint64_t key) { return "brim-sizes 3 " + hex(key); }

// A line per attempt: outcome, peak, requested, available, held, rate, device, values.
std::string text_of(std::uint64_t key, const std::vector<Attempt>& attempts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());  // the same in every program, whatever its language
  out.precision(17);
  out << header(key) << '\n';
  for (const Attempt& attempt : attempts) {
    out << static_cast<int>(attempt.outcome) << ' ' << attempt.peak.value_or(kUnknown) << ' '
        << attempt.requested.value_or(kUnknown) << ' ' << attempt.available.value_or(kUnknown)
        << ' ' << attempt.held << ' ' << attempt.rate << ' ' << attempt.device;
    for (const std::int64_t value : attempt.values) {
      out << ' ' << value;
    }
    out << '\n';
  }
  out << kEnd << '\n';
  return out.str();
}

std::optional<Attempt> attempt_of(const std::string& line) {
  std::istringstream fields(line);
  fields.imbue(std::locale::classic());
  Attempt attempt;
  int outcome = 0;
  std::array<std::int64_t, 3> bytes{};
  std::string device;
  fields >> outcome >> bytes[0] >> bytes[1] >> bytes[2] >> attempt.held >> attempt.rate >> device;
  for (std::int64_t value = 0; fields >> value;) {
    attempt.values.push_back(value);
  }
  if (!fields.eof() || attempt.values.empty() || std::ranges::min(attempt.values) < 1 ||
      outcome < 0 || outcome > static_cast<int>(OomKind::size_limit) ||
      std::ranges::min(bytes) < kUnknown || attempt.held < 0 || attempt.rate < 0) {
    return std::nullopt;
  }
  const auto known = [](std::int64_t count) {
    return count == kUnknown ? std::nullopt : std::optional(count);
  };
  attempt.outcome = static_cast<OomKind>(outcome);
  attempt.peak = known(bytes[0]);
  attempt.requested = known(bytes[1]);
  attempt.available = known(bytes[2]);
  try {
    attempt.device = c10::Device(device);
  } catch (const c10::Error&) {  // no device of that name
    return std::nullopt;
  }
  return attempt;
}

/// The attempts, or empty if the text is not as text_of writes it.
std::optional<std::vector<Attempt>> parse(std::istream& text, std::uint64_t key) {
  std::string line;
  if (!std::getline(text, line) || line != header(key)) {
    return std::nullopt;
  }
  std::vector<Attempt> attempts;
  while (std::getline(text, line) && line != kEnd) {
    auto attempt = attempt_of(line);
    if (!attempt) {
      return std::nullopt;
    }
    attempts.push_back(std::move(*attempt));
  }
  return text.good() && !std::getline(text, line) ? std::optional(attempts) : std::nullopt;
}

bool is_ours(std::string_view file) {
  const std::string_view rest = file.substr(std::min(kHexDigits, file.size()));
  return file.find_first_not_of("0123456789abcdef") == kHexDigits &&
         (rest == kSuffix || (rest.starts_with(kSuffix) && rest.ends_with(kTemporary)));
}

}  // namespace

std::string name(std::uint64_t key) { return hex(key) + std::string(kSuffix); }

std::optional<std::vector<Attempt>> read(const fs::path& file, std::uint64_t key) {
  std::error_code error;
  const fs::file_status status = fs::status(file, error);
  if (!fs::exists(status)) {
    return std::vector<Attempt>();
  }
  // Opening a pipe would wait for its writer.
  if (!fs::is_regular_file(status) || fs::file_size(file, error) > kLargestFile) {
    return error ? std::optional(std::vector<Attempt>()) : std::nullopt;
  }
  std::ifstream in(file, std::ios::binary);
  if (!in.is_open() && errno == ENOENT) {
    return std::vector<Attempt>();  // another process has just forgotten it
  }
  fs::last_write_time(file, fs::file_time_type::clock::now(), error);  // used now, for `prune`
  return parse(in, key);
}

std::error_code write(const fs::path& file, std::uint64_t key,
                      const std::vector<Attempt>& attempts) {
  const std::string text = text_of(key, attempts);
  return write_whole(file, {std::as_bytes(std::span(text))}, Readers::owner, /*may_be_gone=*/true);
}

void prune(const fs::path& directory, std::size_t most) {
  std::vector<std::pair<fs::file_time_type, fs::path>> files;
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    if (is_ours(at->path().filename().string())) {
      files.emplace_back(fs::file_time_type(), at->path());
    }
  }
  if (files.size() <= most) {
    return;
  }
  for (auto& [used, file] : files) {
    used = fs::last_write_time(file, error);
  }
  std::ranges::sort(files);
  files.resize(files.size() - (most - most / 8));
  for (const auto& [used, file] : files) {
    fs::remove(file, error);
  }
}

}  // namespace brim::size_file
