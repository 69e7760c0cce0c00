#include "adapt/size_file.h"

#include <brim/adapt/size_memory.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <locale>
#include <optional>
#include <random>
#include <sstream>
#include <string_view>

#include "number_text.h"
#include "predict/round_up.h"

namespace brim::size_file {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kHeader = "brim-sizes 2";
constexpr std::string_view kSuffix = ".brim-sizes";
constexpr std::string_view kTemporary = ".tmp";
constexpr std::size_t kHexDigits = 16;
// Sixteen attempts take some 2 kB; anything much larger was not written by us.
constexpr std::size_t kLargestFile = 65536;
constexpr std::int64_t kUnknown = -1;

std::string hex(std::uint64_t key) {
  std::array<char, kHexDigits + 1> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(key));
  return text.data();
}

/// FNV-1a: enough to notice what a crash or a disk does to a short text.
std::uint64_t checksum(std::string_view text) {
  std::uint64_t sum = 0xcbf29ce484222325U;
  for (const char byte : text) {
    sum = (sum ^ static_cast<unsigned char>(byte)) * 0x100000001b3U;
  }
  return sum;
}

// A line per attempt: outcome, peak, requested, available, held, rate, device, values.
std::string text_of(std::uint64_t key, const std::vector<Attempt>& attempts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());  // the same in every program, whatever its language
  out.precision(17);
  out << kHeader << '\n' << hex(key) << '\n';
  for (const Attempt& attempt : attempts) {
    out << static_cast<int>(attempt.outcome) << ' ' << attempt.peak.value_or(kUnknown) << ' '
        << attempt.requested.value_or(kUnknown) << ' ' << attempt.available.value_or(kUnknown)
        << ' ' << attempt.held << ' ' << attempt.rate << ' ' << attempt.device;
    for (const std::int64_t value : attempt.values) {
      out << ' ' << value;
    }
    out << '\n';
  }
  const std::string text = out.str();
  return text + hex(checksum(text)) + '\n';
}

/// What is before the next `end`, which is cut off `text` with it.
std::string_view take_until(char end, std::string_view& text) {
  const std::string_view taken = text.substr(0, text.find(end));
  text.remove_prefix(std::min(taken.size() + 1, text.size()));
  return taken;
}

template <class Number>
std::optional<Number> take_field(std::string_view& line, Number least) {
  std::string_view field = take_until(' ', line);
  const auto value = detail::take_number<Number>(field);
  return value && *value >= least && field.empty() ? value : std::nullopt;
}

std::optional<Attempt> attempt_of(std::string_view line) {
  const auto outcome = take_field<std::int64_t>(line, 0);
  const auto peak = take_field(line, kUnknown);
  const auto requested = take_field(line, kUnknown);
  const auto available = take_field(line, kUnknown);
  const auto held = take_field<std::int64_t>(line, 0);
  const auto rate = take_field(line, 0.0);
  const std::string device(take_until(' ', line));
  std::vector<std::int64_t> values;
  while (!line.empty()) {
    const auto value = take_field<std::int64_t>(line, 1);
    if (!value) {
      return std::nullopt;
    }
    values.push_back(*value);
  }
  if (!outcome || *outcome > static_cast<std::int64_t>(OomKind::size_limit) || !peak ||
      !requested || !available || !held || !rate || values.empty()) {
    return std::nullopt;
  }
  const auto known = [](std::int64_t bytes) {
    return bytes == kUnknown ? std::nullopt : std::optional(bytes);
  };
  try {
    return Attempt{.values = std::move(values),
                   .outcome = static_cast<OomKind>(*outcome),
                   .peak = known(*peak),
                   .requested = known(*requested),
                   .held = *held,
                   .available = known(*available),
                   .device = c10::Device(device),
                   .rate = *rate};
  } catch (const c10::Error&) {  // no device of that name
    return std::nullopt;
  }
}

/// The attempts, or empty if any line is not as text_of writes it.
std::optional<std::vector<Attempt>> parse(std::string_view text, std::uint64_t key) {
  // The last line is the checksum of all before it.
  const std::size_t body = text.size() < kHexDigits + 1 ? 0 : text.size() - kHexDigits - 1;
  if (text.substr(body) != hex(checksum(text.substr(0, body))) + '\n') {
    return std::nullopt;
  }
  text = text.substr(0, body);
  if (take_until('\n', text) != kHeader || take_until('\n', text) != hex(key)) {
    return std::nullopt;
  }
  std::vector<Attempt> attempts;
  while (!text.empty()) {
    auto attempt = attempt_of(take_until('\n', text));
    if (!attempt || attempts.size() == SizeMemory::kAttemptsPerKey) {
      return std::nullopt;
    }
    attempts.push_back(std::move(*attempt));
  }
  return attempts;
}

std::error_code last_error() { return {errno, std::generic_category()}; }

bool is_hex(std::string_view text) {
  return text.size() == kHexDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

enum class Kind : std::uint8_t { foreign, sizes, temporary };

Kind kind_of(std::string_view file) {
  if (!is_hex(file.substr(0, kHexDigits)) || !file.substr(kHexDigits).starts_with(kSuffix)) {
    return Kind::foreign;
  }
  const std::string_view rest = file.substr(kHexDigits + kSuffix.size());
  if (rest.empty()) {
    return Kind::sizes;
  }
  const bool temporary = rest.front() == '.' && rest.ends_with(kTemporary) &&
                         is_hex(rest.substr(1, rest.size() - 1 - kTemporary.size()));
  return temporary ? Kind::temporary : Kind::foreign;
}

std::vector<fs::path> files_of(Kind kind, const fs::path& directory) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    if (kind_of(at->path().filename().string()) == kind) {
      files.push_back(at->path());
    }
  }
  return files;
}

}  // namespace

std::string name(std::uint64_t key) { return hex(key) + std::string(kSuffix); }

std::vector<Attempt> read(const fs::path& file, std::uint64_t key) {
  std::error_code error;
  const fs::file_status status = fs::status(file, error);
  if (!fs::exists(status)) {
    return {};
  }
  std::optional<std::vector<Attempt>> attempts;
  if (fs::is_regular_file(status)) {  // opening a pipe would wait for its writer
    std::ifstream in(file, std::ios::binary);
    if (!in.is_open() && errno == ENOENT) {
      return {};  // another process has just forgotten it
    }
    std::string text(kLargestFile + 1, '\0');
    in.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<std::size_t>(in.gcount()));
    if (text.size() <= kLargestFile) {
      attempts = parse(text, key);
      ::utimensat(AT_FDCWD, file.c_str(), nullptr, 0);  // used now, for `prune`
    }
  }
  if (!attempts) {
    TORCH_WARN("ignored ", file.string(),
               ": it is damaged or was not written by this version of brim");
    return {};
  }
  return *attempts;
}

std::error_code write(const fs::path& file, std::uint64_t key,
                      const std::vector<Attempt>& attempts) {
  std::error_code error;
  fs::create_directories(file.parent_path(), error);
  if (error) {
    return error;
  }
  // The name is drawn and must be new: processes in different containers share neither process ids
  // nor a counter.
  std::random_device random;
  fs::path temporary;
  std::FILE* out = nullptr;
  do {
    const std::uint64_t drawn = (std::uint64_t{random()} << 32) | random();
    temporary = file.string() + "." + hex(drawn) + std::string(kTemporary);
    out = std::fopen(temporary.c_str(), "wxe");
  } while (out == nullptr && errno == EEXIST);
  if (out == nullptr) {
    return last_error();
  }
  const std::string text = text_of(key, attempts);
  if (std::fwrite(text.data(), 1, text.size(), out) != text.size()) {
    error = last_error();
  }
  if (std::fclose(out) != 0 && !error) {
    error = last_error();  // where a quota or a network file system says it
  }
  if (!error) {
    fs::rename(temporary, file, error);
  }
  if (error) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
  }
  return error;
}

void remove_all(const fs::path& directory) {
  std::error_code ignored;
  for (const fs::path& file : files_of(Kind::sizes, directory)) {
    fs::remove(file, ignored);
  }
}

bool any(const fs::path& directory) { return !files_of(Kind::sizes, directory).empty(); }

std::int64_t prune(const fs::path& directory, std::int64_t most) {
  struct Used {
    fs::file_time_type when;
    std::int64_t bytes;
    fs::path path;
  };
  constexpr auto kAbandoned = std::chrono::hours(1);  // its writer was killed
  constexpr std::int64_t kBlock = 4096;               // what a disk gives out
  std::error_code gone;
  for (const fs::path& path : files_of(Kind::temporary, directory)) {
    const auto when = fs::last_write_time(path, gone);
    if (!gone && fs::file_time_type::clock::now() - when > kAbandoned) {
      fs::remove(path, gone);
    }
  }
  std::vector<Used> files;
  std::int64_t total = 0;
  for (const fs::path& path : files_of(Kind::sizes, directory)) {
    const auto bytes = static_cast<std::int64_t>(fs::file_size(path, gone));
    const auto when = gone ? fs::file_time_type{} : fs::last_write_time(path, gone);
    if (!gone) {
      files.push_back({when, round_up(bytes, kBlock), path});
      total += files.back().bytes;
    }
  }
  std::ranges::sort(files, {}, &Used::when);
  // An eighth at a time, so that not every new file means another look at all.
  const std::int64_t least = total > most ? most - most / 8 : total;
  for (auto oldest = files.begin(); oldest != files.end() && total > least; ++oldest) {
    fs::remove(oldest->path, gone);
    total -= oldest->bytes;
  }
  return total;
}

}  // namespace brim::size_file
