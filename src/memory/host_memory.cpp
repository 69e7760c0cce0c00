#include <brim/memory/host_memory.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "number_text.h"

namespace brim {
namespace {

namespace fs = std::filesystem;

// More than any of these files has before what is looked for.
constexpr std::size_t kLargestFile = 8192;

/// The start of one of the kernel's small files, or nothing. Plain reads take a third of the time
/// of streams.
std::string read_text(const fs::path& file) {
  const int descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    return {};
  }
  std::array<char, kLargestFile> text{};
  const ssize_t length = read(descriptor, text.data(), text.size());
  close(descriptor);
  return {text.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

std::optional<std::int64_t> number_at(std::string_view text) {
  return detail::take_number<std::int64_t>(text);
}

std::optional<std::int64_t> read_int(const fs::path& file) {
  const std::string text = read_text(file);
  return number_at(text);  // "max" (no limit) is not a number
}

/// The next line of `text`, which is cut off it; empty at the end.
std::optional<std::string_view> next_line(std::string_view& text) {
  if (text.empty()) {
    return std::nullopt;
  }
  const auto end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

/// The number behind `key` and spaces at the start of a line: "MemTotal:   24000000 kB".
std::optional<std::int64_t> value_of(std::string_view text, std::string_view key) {
  while (const auto line = next_line(text)) {
    if (line->starts_with(key)) {
      const std::string_view rest = line->substr(key.size());
      const auto number = rest.find_first_not_of(' ');
      if (number != 0 && number != std::string_view::npos) {
        return number_at(rest.substr(number));
      }
    }
  }
  return std::nullopt;
}

void least(std::optional<std::int64_t>& current, std::int64_t candidate) {
  current = current ? std::min(*current, candidate) : candidate;
}

/// One kernel interface for cgroup memory: v2's files or v1's.
struct CgroupFiles {
  const char* limit;
  const char* usage;
  // Lines of memory.stat: the page cache that was not used lately, that was, and that is mapped.
  std::string_view inactive;
  std::string_view active;
  std::string_view mapped;
};

constexpr CgroupFiles kVersion2{"memory.max", "memory.current", "inactive_file", "active_file",
                                "file_mapped"};
constexpr CgroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                                "total_inactive_file", "total_active_file", "total_mapped_file"};

// v1 writes "no limit" as the largest page-aligned number, v2 as "max"; nothing real is this large.
constexpr std::int64_t kNoLimit = std::int64_t{1} << 60;

/// Takes the least limit from `folder` up to `top`: every parent limits its children.
void walk_cgroups(const fs::path& top, fs::path folder, const CgroupFiles& files,
                  HostMemory& memory) {
  for (;;) {
    const auto limit = read_int(folder / files.limit);
    if (limit && *limit < kNoLimit) {
      least(memory.cgroup_limit, *limit);
      if (const auto usage = read_int(folder / files.usage)) {
        // The page cache counts as usage, but the kernel drops it before it kills anyone. What is
        // mapped is left to the process: its libraries are in it.
        const std::string stat = read_text(folder / "memory.stat");
        const auto bytes = [&](std::string_view line) { return value_of(stat, line).value_or(0); };
        const std::int64_t cache =
            bytes(files.inactive) +
            std::max<std::int64_t>(bytes(files.active) - bytes(files.mapped), 0);
        least(memory.cgroup_available,
              std::clamp<std::int64_t>(*limit - *usage + cache, 0, *limit));
      }
    }
    if (folder == top || !folder.has_relative_path() || folder == folder.root_path()) {
      return;
    }
    folder = folder.parent_path();
  }
}

/// The folder of a cgroup named in /proc/self/cgroup. Inside a container that path may belong to
/// the host and not exist here: then the mount itself is the container's own group.
fs::path cgroup_folder(const fs::path& mount, std::string_view name) {
  while (!name.empty() && name.front() == '/') {
    name.remove_prefix(1);
  }
  const fs::path folder = name.empty() ? mount : (mount / name).lexically_normal();
  std::error_code ignored;
  const auto inside = folder.lexically_relative(mount);
  const bool escapes = !inside.empty() && *inside.begin() == "..";
  return !escapes && fs::is_directory(folder, ignored) ? folder : mount;
}

void read_cgroups(const fs::path& root, HostMemory& memory) {
  const fs::path mount = root / "sys/fs/cgroup";
  const std::string text = read_text(root / "proc/self/cgroup");
  std::string_view rest = text;
  while (const auto next = next_line(rest)) {  // "hierarchy:controllers:path"
    const auto first = next->find(':');
    const auto second = next->find(':', first + 1);
    if (first == std::string_view::npos || second == std::string_view::npos) {
      continue;
    }
    const std::string controllers(next->substr(first + 1, second - first - 1));
    const std::string_view name = next->substr(second + 1);
    if (controllers.empty()) {
      walk_cgroups(mount, cgroup_folder(mount, name), kVersion2, memory);
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      const fs::path memory_mount = mount / "memory";
      walk_cgroups(memory_mount, cgroup_folder(memory_mount, name), kVersion1, memory);
    }
  }
}

void read_physical(const fs::path& root, HostMemory& memory) {
  constexpr std::int64_t kKib = 1024;
  const std::string text = read_text(root / "proc/meminfo");
  memory.physical_total = value_of(text, "MemTotal:").value_or(0) * kKib;
  memory.physical_available = value_of(text, "MemAvailable:").value_or(0) * kKib;
  if (memory.physical_total == 0) {  // no /proc: the C library knows the total at least
    memory.physical_total =
        static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    memory.physical_available = memory.physical_total;
  }
}

void read_process(const fs::path& root, HostMemory& memory) {
  const std::string text = read_text(root / "proc/self/statm");  // "size resident shared ..."
  std::string_view rest = text;
  const auto size_pages = detail::take_number<std::int64_t>(rest);
  rest.remove_prefix(std::min<std::size_t>(1, rest.size()));
  const auto resident_pages = detail::take_number<std::int64_t>(rest);
  if (size_pages && resident_pages) {
    const std::int64_t page = sysconf(_SC_PAGESIZE);
    memory.address_space = *size_pages * page;
    memory.resident = *resident_pages * page;
  }
  rlimit bound{};
  if (getrlimit(RLIMIT_AS, &bound) == 0 && bound.rlim_cur != RLIM_INFINITY &&
      bound.rlim_cur < static_cast<rlim_t>(kNoLimit)) {
    memory.address_space_limit = static_cast<std::int64_t>(bound.rlim_cur);
  }
}

}  // namespace

std::int64_t HostMemory::limit() const {
  std::int64_t result = physical_total;
  for (const auto& bound : {cgroup_limit, address_space_limit}) {
    if (bound) {
      result = std::min(result, *bound);
    }
  }
  return result;
}

std::int64_t HostMemory::available() const {
  std::int64_t result = physical_available;
  if (cgroup_available) {
    result = std::min(result, *cgroup_available);
  }
  if (address_space_limit) {
    result = std::min(result, *address_space_limit - address_space);
  }
  return std::max<std::int64_t>(result, 0);
}

HostMemory read_host_memory(const fs::path& root) {
  HostMemory memory;
  read_physical(root, memory);
  read_process(root, memory);
  read_cgroups(root, memory);
  return memory;
}

}  // namespace brim
