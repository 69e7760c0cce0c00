#include <brim/memory/host_memory.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace brim {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

/// A folder that stands in for a machine: 16 GiB in all, 12 GiB available, no cgroup until a test
/// writes one.
class FakeMachine : public ::testing::Test {
 protected:
  FakeMachine() {
    std::string name = (fs::temp_directory_path() / "brim_machine_XXXXXX").string();
    root_ = mkdtemp(name.data());
    write("proc/meminfo",
          "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:   12582912 kB\n"
          "SwapTotal:      99999999 kB\n");
    write("proc/self/statm", "3000 1000 200 100 0 500 0\n");
  }
  ~FakeMachine() override { fs::remove_all(root_); }
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  void write(const std::string& file, const std::string& text) const {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }

  void write(const std::string& file, std::int64_t number) const {
    write(file, std::to_string(number) + "\n");
  }

  HostMemory read() const { return read_host_memory(root_); }

  fs::path root_;
};

TEST_F(FakeMachine, ReadsPhysicalMemoryAndThisProcess) {
  const HostMemory memory = read();
  EXPECT_EQ(memory.physical_total, 16 * kGiB);
  EXPECT_EQ(memory.physical_available, 12 * kGiB);
  EXPECT_EQ(memory.address_space, 3000 * sysconf(_SC_PAGESIZE));
  EXPECT_EQ(memory.resident, 1000 * sysconf(_SC_PAGESIZE));
}

TEST_F(FakeMachine, WithoutCgroupsThereIsNoCgroupLimit) {
  const HostMemory memory = read();
  EXPECT_FALSE(memory.cgroup_limit.has_value());
  EXPECT_FALSE(memory.cgroup_available.has_value());
}

TEST_F(FakeMachine, Version2LimitAndUsage) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", 4 * kGiB);
  write("sys/fs/cgroup/job/memory.current", 3 * kGiB);
  const HostMemory memory = read();
  EXPECT_EQ(memory.cgroup_limit, 4 * kGiB);
  EXPECT_EQ(memory.cgroup_available, 1 * kGiB);
  EXPECT_EQ(memory.limit(), 4 * kGiB);
  EXPECT_EQ(memory.available(), 1 * kGiB);
}

TEST_F(FakeMachine, Version2MaxMeansNoLimit) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "max\n");
  write("sys/fs/cgroup/job/memory.current", 3 * kGiB);
  EXPECT_FALSE(read().cgroup_limit.has_value());
  EXPECT_FALSE(read().cgroup_available.has_value());
}

TEST_F(FakeMachine, AParentMayBeTheTightestOfNestedGroups) {
  write("proc/self/cgroup", "0::/slice/service/worker\n");
  write("sys/fs/cgroup/slice/memory.max", 2 * kGiB);
  write("sys/fs/cgroup/slice/memory.current", kGiB / 2);
  write("sys/fs/cgroup/slice/service/memory.max", "max\n");
  write("sys/fs/cgroup/slice/service/worker/memory.max", 8 * kGiB);
  write("sys/fs/cgroup/slice/service/worker/memory.current", kGiB / 4);
  const HostMemory memory = read();
  EXPECT_EQ(memory.cgroup_limit, 2 * kGiB);
  EXPECT_EQ(memory.cgroup_available, kGiB + kGiB / 2);
}

TEST_F(FakeMachine, TheFullestGroupBoundsWhatIsAvailableEvenIfItsLimitIsNotTheLeast) {
  write("proc/self/cgroup", "0::/slice/worker\n");
  write("sys/fs/cgroup/slice/memory.max", 8 * kGiB);
  write("sys/fs/cgroup/slice/memory.current", 7 * kGiB);
  write("sys/fs/cgroup/slice/worker/memory.max", 4 * kGiB);
  write("sys/fs/cgroup/slice/worker/memory.current", 0);
  EXPECT_EQ(read().cgroup_limit, 4 * kGiB);
  EXPECT_EQ(read().cgroup_available, 1 * kGiB);
}

TEST_F(FakeMachine, ALimitOnTheRootGroupCounts) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", 3 * kGiB);
  EXPECT_EQ(read().cgroup_limit, 3 * kGiB);
  EXPECT_FALSE(read().cgroup_available.has_value())
      << "usage is not known, so nothing can be said about what is left";
}

TEST_F(FakeMachine, PageCacheThatTheKernelCanDropIsAvailable) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", 4 * kGiB);
  write("sys/fs/cgroup/job/memory.current", 3 * kGiB);
  write("sys/fs/cgroup/job/memory.stat",
        "anon 1073741824\nfile 2147483648\ninactive_anon 7\ninactive_file 536870912\nactive_file "
        "805306368\nfile_mapped 268435456\n");
  EXPECT_EQ(read().cgroup_available, 2 * kGiB);
}

TEST_F(FakeMachine, UsageOverTheLimitLeavesNothingAndNotLess) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", 1 * kGiB);
  write("sys/fs/cgroup/job/memory.current", 2 * kGiB);
  EXPECT_EQ(read().cgroup_available, 0);
  EXPECT_EQ(read().available(), 0);
}

TEST_F(FakeMachine, InAContainerThePathOfTheHostDoesNotExistAndTheMountIsTheGroup) {
  write("proc/self/cgroup", "0::/system.slice/docker-0123456789abcdef.scope\n");
  write("sys/fs/cgroup/memory.max", 2 * kGiB);
  write("sys/fs/cgroup/memory.current", kGiB);
  EXPECT_EQ(read().cgroup_limit, 2 * kGiB);
  EXPECT_EQ(read().cgroup_available, kGiB);
}

TEST_F(FakeMachine, AGroupInsideTheContainerWithThePathOfTheHostsParentIsAnother) {
  write("proc/self/cgroup", "0::/jobs/0123456789abcdef\n");
  write("sys/fs/cgroup/memory.max", 2 * kGiB);
  write("sys/fs/cgroup/jobs/memory.max", kGiB);  // of other processes in the container
  EXPECT_EQ(read().cgroup_limit, 2 * kGiB);
}

TEST_F(FakeMachine, APathThatLeavesTheMountIsNotFollowed) {
  write("proc/self/cgroup", "0::/../../../outside\n");
  write("outside/memory.max", 1);
  write("sys/fs/cgroup/memory.max", 2 * kGiB);
  EXPECT_EQ(read().cgroup_limit, 2 * kGiB);
}

TEST_F(FakeMachine, Version1LimitAndUsage) {
  write("proc/self/cgroup", "12:pids:/job\n9:memory:/job\n3:cpu,cpuacct:/job\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", 4 * kGiB);
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", 3 * kGiB);
  write("sys/fs/cgroup/memory/job/memory.stat",
        "inactive_file 5\ntotal_inactive_file 536870912\ntotal_active_file 536870912\n"
        "total_mapped_file 0\n");
  // v1 writes "no limit" as a number.
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", 9 * kGiB);
  EXPECT_EQ(read().cgroup_limit, 4 * kGiB);
  EXPECT_EQ(read().cgroup_available, 2 * kGiB);
}

TEST_F(FakeMachine, Version1NoLimitIsALargeNumberAndNoLimit) {
  write("proc/self/cgroup", "9:memory:/job\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", kGiB);
  EXPECT_FALSE(read().cgroup_limit.has_value());
  EXPECT_FALSE(read().cgroup_available.has_value());
}

TEST_F(FakeMachine, Version1NestedAndWithSeveralControllersOnOneLine) {
  write("proc/self/cgroup", "4:cpuset,memory:/a/b\n");
  write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", kGiB);
  write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", 5 * kGiB);
  EXPECT_EQ(read().cgroup_limit, kGiB);
}

TEST_F(FakeMachine, Version1InAContainer) {
  write("proc/self/cgroup", "9:memory:/docker/0123456789abcdef\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", 2 * kGiB);
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", kGiB);
  EXPECT_EQ(read().cgroup_limit, 2 * kGiB);
  EXPECT_EQ(read().cgroup_available, kGiB);
}

TEST_F(FakeMachine, HybridMountsReadTheMemoryControllerOfVersion1) {
  write("proc/self/cgroup", "9:memory:/job\n1:name=systemd:/job\n0::/job\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", 2 * kGiB);
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", kGiB);
  write("sys/fs/cgroup/unified/job/cgroup.procs", "1\n");
  EXPECT_EQ(read().cgroup_limit, 2 * kGiB);
  EXPECT_EQ(read().cgroup_available, kGiB);
}

TEST_F(FakeMachine, OtherControllersWithMemoryInTheirNameAreNotTheMemoryController) {
  write("proc/self/cgroup", "9:memoryless,hugetlb:/job\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", kGiB);
  EXPECT_FALSE(read().cgroup_limit.has_value());
}

TEST_F(FakeMachine, BrokenFilesAreAsGoodAsNone) {
  write("proc/self/cgroup", "nonsense\n0:\n\n0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "\n");
  write("sys/fs/cgroup/job/memory.current", "lots\n");
  EXPECT_FALSE(read().cgroup_limit.has_value());
  write("sys/fs/cgroup/job/memory.max", kGiB);
  EXPECT_EQ(read().cgroup_limit, kGiB);
  EXPECT_FALSE(read().cgroup_available.has_value());
}

TEST_F(FakeMachine, WithoutProcTheTotalStillComesFromTheSystem) {
  const HostMemory memory = read_host_memory(root_ / "nothing_here");
  EXPECT_EQ(memory.physical_total, sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE));
  EXPECT_EQ(memory.resident, 0);
}

TEST(HostMemory, LimitIsTheLeastOfAllLimits) {
  HostMemory memory;
  memory.physical_total = 100;
  EXPECT_EQ(memory.limit(), 100);
  memory.cgroup_limit = 50;
  EXPECT_EQ(memory.limit(), 50);
  memory.address_space_limit = 20;
  EXPECT_EQ(memory.limit(), 20);
  memory.cgroup_limit = 10;
  EXPECT_EQ(memory.limit(), 10);
  memory.physical_total = 5;
  EXPECT_EQ(memory.limit(), 5);
}

TEST(HostMemory, AvailableIsTheLeastOfWhatEachLimitLeaves) {
  HostMemory memory;
  memory.physical_available = 100;
  EXPECT_EQ(memory.available(), 100);
  memory.address_space = 30;
  memory.address_space_limit = 90;
  EXPECT_EQ(memory.available(), 60);
  memory.cgroup_available = 40;
  EXPECT_EQ(memory.available(), 40);
  memory.address_space = 95;
  EXPECT_EQ(memory.available(), 0) << "over the limit, not minus five";
}

TEST(HostMemory, ReadsTheRunningMachine) {
  const HostMemory memory = read_host_memory();
  EXPECT_GT(memory.resident, 0);
  EXPECT_GE(memory.address_space, memory.resident);
  EXPECT_GT(memory.physical_available, 0);
  EXPECT_LE(memory.physical_available, memory.physical_total);
  EXPECT_LE(memory.limit(), memory.physical_total);
}

TEST(HostMemory, AddressSpaceLimitOfTheProcessIsRead) {
  rlimit usual{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &usual), 0);
  const HostMemory before = read_host_memory();
  const std::int64_t bound = before.address_space + 4 * kGiB;
  const rlimit lower{.rlim_cur = static_cast<rlim_t>(bound), .rlim_max = usual.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &lower), 0);
  const HostMemory after = read_host_memory();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &usual), 0);
  EXPECT_EQ(after.address_space_limit, bound);
  EXPECT_LE(after.limit(), bound);
  EXPECT_LE(after.available(), bound - after.address_space);
  EXPECT_EQ(read_host_memory().address_space_limit, before.address_space_limit);
}

}  // namespace
}  // namespace brim
