#include "adapt/size_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <locale>
#include <random>
#include <sstream>

namespace brim::size_file {
namespace {

namespace fs = std::filesystem;

constexpr const char* kHeader = "brim-sizes 2";
constexpr const char* kSuffix = ".brim-sizes";
constexpr const char* kTemporary = ".tmp";
constexpr std::size_t kHexDigits = 16;
// Sixteen attempts take some 2 kB; anything much larger was not written by us.
constexpr std::size_t kLargestFile = 65536;
constexpr std::size_t kMostValues = 64;

constexpr std::int64_t kUnknown = -1;
constexpr auto kLastOutcome = static_cast<std::int64_t>(OomKind::size_limit);

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

std::optional<std::int64_t> known(std::int64_t value) {
  return value == kUnknown ? std::nullopt : std::optional<std::int64_t>(value);
}

std::optional<c10::Device> device_named(const std::string& text) {
  try {
    return c10::Device(text);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

bool plausible(const Attempt& attempt) {
  const auto bytes_ok = [](const std::optional<std::int64_t>& bytes) {
    return !bytes || *bytes >= 0;
  };
  const auto value_ok = [](std::int64_t value) { return value >= 1; };
  return std::all_of(attempt.values.begin(), attempt.values.end(), value_ok) &&
         bytes_ok(attempt.peak) && bytes_ok(attempt.requested) && bytes_ok(attempt.available) &&
         attempt.held >= 0 && std::isfinite(attempt.rate) && attempt.rate >= 0;
}

/// The attempts, or empty if any line is not as `write` writes it.
std::optional<std::vector<Attempt>> parse(std::string_view text, std::uint64_t key) {
  // The last line is the checksum of all before it.
  const std::size_t body = text.size() < kHexDigits + 1 ? 0 : text.size() - kHexDigits - 1;
  if (body == 0 || text.substr(body) != hex(checksum(text.substr(0, body))) + '\n') {
    return std::nullopt;
  }
  std::istringstream in{std::string(text.substr(0, body))};
  std::string line;
  if (!std::getline(in, line) || line != kHeader || !std::getline(in, line) || line != hex(key)) {
    return std::nullopt;
  }
  std::vector<Attempt> attempts;
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    fields.imbue(std::locale::classic());  // the same in every program, whatever its language
    Attempt attempt;
    std::int64_t outcome = 0;
    std::int64_t peak = 0;
    std::int64_t requested = 0;
    std::int64_t available = 0;
    std::size_t values = 0;
    std::string device;
    fields >> outcome >> peak >> requested >> available >> attempt.held >> attempt.rate >> device >>
        values;
    if (!fields || values < 1 || values > kMostValues || outcome < 0 || outcome > kLastOutcome) {
      return std::nullopt;
    }
    const auto named = device_named(device);
    if (!named) {
      return std::nullopt;
    }
    attempt.device = *named;
    attempt.values.resize(values);
    for (std::int64_t& value : attempt.values) {
      fields >> value;
    }
    if (!fields || fields.peek() != std::istringstream::traits_type::eof()) {
      return std::nullopt;
    }
    attempt.outcome = static_cast<OomKind>(outcome);
    attempt.peak = known(peak);
    attempt.requested = known(requested);
    attempt.available = known(available);
    if (!plausible(attempt) || attempts.size() == SizeMemory::kAttemptsPerKey) {
      return std::nullopt;
    }
    attempts.push_back(attempt);
  }
  return attempts;
}

}  // namespace

std::string name(std::uint64_t key) { return hex(key) + kSuffix; }

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
      // `prune` takes what was not used for longest first.
      ::utimensat(AT_FDCWD, file.c_str(), nullptr, 0);
    }
  }
  if (!attempts) {
    TORCH_WARN("ignored ", file.string(),
               ": it is damaged or was not written by this version of brim");
    return {};
  }
  return *attempts;
}

namespace {

std::error_code last_error() { return {errno, std::generic_category()}; }

/// A new file beside `file`, open for writing. Its name is drawn and must be new: processes in
/// different containers share neither process ids nor a counter.
int open_temporary(const fs::path& file, fs::path& temporary) {
  std::random_device random;
  int descriptor = -1;
  do {
    const std::uint64_t drawn = (std::uint64_t{random()} << 32) | random();
    temporary = file.string() + "." + hex(drawn) + kTemporary;
    descriptor = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor < 0 && errno == EEXIST);
  return descriptor;
}

std::error_code write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      return last_error();
    }
  }
  return {};
}

std::string text_of(std::uint64_t key, const std::vector<Attempt>& attempts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out.precision(17);
  out << kHeader << '\n' << hex(key) << '\n';
  for (const Attempt& attempt : attempts) {
    out << static_cast<int>(attempt.outcome) << ' ' << attempt.peak.value_or(kUnknown) << ' '
        << attempt.requested.value_or(kUnknown) << ' ' << attempt.available.value_or(kUnknown)
        << ' ' << attempt.held << ' ' << attempt.rate << ' ' << attempt.device.str() << ' '
        << attempt.values.size();
    for (const std::int64_t value : attempt.values) {
      out << ' ' << value;
    }
    out << '\n';
  }
  const std::string text = out.str();
  return text + hex(checksum(text)) + '\n';
}

bool is_hex(std::string_view text) {
  return text.size() == kHexDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

enum class Kind : std::uint8_t { foreign, sizes, temporary };

Kind kind_of(std::string_view file) {
  const std::string_view suffix(kSuffix);
  if (!is_hex(file.substr(0, kHexDigits)) || !file.substr(kHexDigits).starts_with(suffix)) {
    return Kind::foreign;
  }
  const std::string_view rest = file.substr(kHexDigits + suffix.size());
  if (rest.empty()) {
    return Kind::sizes;
  }
  return rest.front() == '.' && rest.ends_with(kTemporary) &&
                 is_hex(rest.substr(1, rest.size() - 1 - std::string_view(kTemporary).size()))
             ? Kind::temporary
             : Kind::foreign;
}

/// Calls `visit(path, kind)` for what is ours in the directory, until it returns false.
template <class Visit>
void visit_ours(const fs::path& directory, const Visit& visit) {
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    const Kind kind = kind_of(at->path().filename().string());
    if (kind != Kind::foreign && !visit(at->path(), kind)) {
      return;
    }
  }
}

}  // namespace

std::error_code write(const fs::path& file, std::uint64_t key,
                      const std::vector<Attempt>& attempts) {
  std::error_code error;
  fs::create_directories(file.parent_path(), error);
  if (error) {
    return error;
  }
  fs::path temporary;
  const int descriptor = open_temporary(file, temporary);
  if (descriptor < 0) {
    return last_error();
  }
  error = write_all(descriptor, text_of(key, attempts));
  if (::close(descriptor) != 0 && !error) {
    error = last_error();  // where a quota or a network file system says it
  }
  if (!error) {
    fs::rename(temporary, file, error);
  }
  if (error) {
    size_file::remove(temporary);
  }
  return error;
}

void remove(const fs::path& file) {
  std::error_code ignored;
  fs::remove(file, ignored);
}

void remove_all(const fs::path& directory) {
  visit_ours(directory, [](const fs::path& file, Kind kind) {
    if (kind == Kind::sizes) {
      size_file::remove(file);
    }
    return true;
  });
}

bool any(const fs::path& directory) {
  bool found = false;
  visit_ours(directory, [&](const fs::path& /*file*/, Kind kind) {
    found = kind == Kind::sizes;
    return !found;
  });
  return found;
}

std::int64_t prune(const fs::path& directory, std::int64_t most) {
  struct File {
    fs::file_time_type written;
    std::int64_t bytes;
    fs::path path;
  };
  constexpr auto kAbandoned = std::chrono::hours(1);  // its writer was killed
  std::vector<File> files;
  std::int64_t total = 0;
  visit_ours(directory, [&](const fs::path& path, Kind kind) {
    std::error_code gone;
    const auto bytes = bytes_on_disk(static_cast<std::int64_t>(fs::file_size(path, gone)));
    const auto written = gone ? fs::file_time_type{} : fs::last_write_time(path, gone);
    if (gone) {
      return true;
    }
    if (kind == Kind::sizes) {
      total += bytes;
      files.push_back({written, bytes, path});
    } else if (fs::file_time_type::clock::now() - written > kAbandoned) {
      size_file::remove(path);
    }
    return true;
  });
  if (total > most) {
    std::sort(files.begin(), files.end(),
              [](const File& a, const File& b) { return a.written < b.written; });
    // An eighth at a time, so that not every new file means another look at all.
    for (auto oldest = files.begin(); oldest != files.end() && total > most - most / 8; ++oldest) {
      size_file::remove(oldest->path);
      total -= oldest->bytes;
    }
  }
  return total;
}

}  // namespace brim::size_file
