#include "adapt/size_file.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <locale>
#include <sstream>

namespace brim::size_file {
namespace {

namespace fs = std::filesystem;

constexpr const char* kHeader = "brim-sizes 1";
constexpr const char* kSuffix = ".brim-sizes";
constexpr std::size_t kHexDigits = 16;
// Sixteen facts take some 2 kB; anything much larger was not written by us.
constexpr std::size_t kLargestFile = 65536;
constexpr std::size_t kMostValues = 64;

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

bool plausible(const SizeFact& fact, std::int64_t fitted) {
  const auto bytes_ok = [](const std::optional<std::int64_t>& bytes) {
    return !bytes || *bytes >= 0;
  };
  const auto value_ok = [](std::int64_t value) { return value >= 1; };
  return std::all_of(fact.values.begin(), fact.values.end(), value_ok) &&
         (fitted == 0 || fitted == 1) && bytes_ok(fact.outcome.peak) &&
         bytes_ok(fact.outcome.requested) && bytes_ok(fact.outcome.limit) &&
         fact.outcome.held >= 0 && std::isfinite(fact.rate) && fact.rate >= 0;
}

/// The facts, or empty if any line is not as `write` writes it.
std::optional<std::vector<SizeFact>> parse(std::string_view text, std::uint64_t key) {
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
  std::vector<SizeFact> facts;
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    fields.imbue(std::locale::classic());  // the same in every program, whatever its language
    SizeFact fact;
    std::int64_t fitted = 0;
    std::int64_t peak = 0;
    std::int64_t requested = 0;
    std::int64_t limit = 0;
    std::size_t values = 0;
    std::string device;
    fields >> fitted >> peak >> requested >> limit >> fact.outcome.held >> fact.rate >> device >>
        values;
    if (!fields || values < 1 || values > kMostValues) {
      return std::nullopt;
    }
    const auto named = device_named(device);
    if (!named) {
      return std::nullopt;
    }
    fact.device = *named;
    fact.values.resize(values);
    for (std::int64_t& value : fact.values) {
      fields >> value;
    }
    if (!fields || fields.peek() != std::istringstream::traits_type::eof()) {
      return std::nullopt;
    }
    fact.outcome.size = fact.values.front();
    fact.outcome.fitted = fitted == 1;
    fact.outcome.peak = known(peak);
    fact.outcome.requested = known(requested);
    fact.outcome.limit = known(limit);
    if (!plausible(fact, fitted) || facts.size() == SizeMemory::kFactsPerKey) {
      return std::nullopt;
    }
    facts.push_back(fact);
  }
  return facts;
}

}  // namespace

std::string name(std::uint64_t key) { return hex(key) + kSuffix; }

std::vector<SizeFact> read(const fs::path& file, std::uint64_t key) {
  std::error_code error;
  const fs::file_status status = fs::status(file, error);
  if (!fs::exists(status)) {
    return {};
  }
  std::optional<std::vector<SizeFact>> facts;
  if (fs::is_regular_file(status)) {  // opening a pipe would wait for its writer
    std::ifstream in(file, std::ios::binary);
    if (!in.is_open() && errno == ENOENT) {
      return {};  // another process has just forgotten it
    }
    std::string text(kLargestFile + 1, '\0');
    in.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<std::size_t>(in.gcount()));
    if (text.size() <= kLargestFile) {
      facts = parse(text, key);
    }
  }
  if (!facts) {
    TORCH_WARN("ignored ", file.string(),
               ": it is damaged or was not written by this version of brim");
    return {};
  }
  return *facts;
}

void write(const fs::path& file, std::uint64_t key, const std::vector<SizeFact>& facts) {
  static std::atomic<unsigned> counter{0};
  std::error_code error;
  fs::create_directories(file.parent_path(), error);
  // A name of our own for each writer, in the same directory, so that the rename is atomic.
  const fs::path temporary = file.string() + "." + std::to_string(getpid()) + "." +
                             std::to_string(counter.fetch_add(1)) + ".tmp";
  {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out.precision(17);
    out << kHeader << '\n' << hex(key) << '\n';
    for (const SizeFact& fact : facts) {
      const SizeOutcome& o = fact.outcome;
      out << (o.fitted ? 1 : 0) << ' ' << o.peak.value_or(kUnknown) << ' '
          << o.requested.value_or(kUnknown) << ' ' << o.limit.value_or(kUnknown) << ' ' << o.held
          << ' ' << fact.rate << ' ' << fact.device.str() << ' ' << fact.values.size();
      for (const std::int64_t value : fact.values) {
        out << ' ' << value;
      }
      out << '\n';
    }
    const std::string text = out.str();
    std::ofstream stream(temporary, std::ios::binary);
    stream << text << hex(checksum(text)) << '\n';
    if (!stream.flush()) {
      error = std::make_error_code(std::errc::io_error);
    }
  }
  if (!error) {
    fs::rename(temporary, file, error);
  }
  if (error) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
    TORCH_WARN_ONCE("sizes could not be kept in ", file.string(), ": ", error.message());
  }
}

void remove(const fs::path& file) {
  std::error_code ignored;
  fs::remove(file, ignored);
}

void remove_all(const fs::path& directory) {
  std::error_code error;
  for (const auto& item : fs::directory_iterator(directory, error)) {
    const std::string file = item.path().filename().string();
    const bool ours = file.size() == kHexDigits + std::string_view(kSuffix).size() &&
                      file.ends_with(kSuffix) &&
                      file.find_first_not_of("0123456789abcdef") == kHexDigits;
    if (ours) {
      size_file::remove(item.path());
    }
  }
}

}  // namespace brim::size_file
