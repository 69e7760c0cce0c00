#pragma once

#include <brim/export.h>

#include <cstdint>
#include <filesystem>
#include <optional>

namespace brim {

/// What the operating system says about this process's memory, all in bytes. A limit that is not
/// set is empty.
struct HostMemory {
  std::int64_t physical_total = 0;      ///< of the machine
  std::int64_t physical_available = 0;  ///< what the kernel could hand out without swapping
  std::int64_t resident = 0;            ///< this process's resident set (RSS)
  std::int64_t address_space = 0;       ///< this process's virtual size, which RLIMIT_AS bounds
  /// The least limit of the process's cgroup and its parents.
  std::optional<std::int64_t> cgroup_limit;
  /// The least of limit minus usage over the same cgroups. Page cache that is not mapped does not
  /// count as used.
  std::optional<std::int64_t> cgroup_available;
  std::optional<std::int64_t> address_space_limit;  ///< RLIMIT_AS, the soft limit

  /// The least of physical memory, the cgroup's limit and RLIMIT_AS.
  BRIM_API std::int64_t limit() const;

  /// Bytes that this process can still take before the first of these limits is reached; never
  /// negative.
  BRIM_API std::int64_t available() const;
};

/// Reads the machine's, the container's (cgroup v1 and v2) and the process's memory figures.
///
/// @param root where `proc` and `sys` are found, so that a test can stand in for a machine.
/// RLIMIT_AS always comes from the running process.
/// Costs tens of microseconds (it reads files); safe to call from any thread.
BRIM_API HostMemory read_host_memory(const std::filesystem::path& root = "/");

}  // namespace brim
