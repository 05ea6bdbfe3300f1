// No path can exceed the limit of managed bytes, on any runtime.
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "harness.h"
#include "recording/recording_runtime.h"
#include "runtime/bytes.h"
#include "runtime/emulated/emulated_runtime.h"
#include "runtime/host_memory.h"

using namespace torch_uvm;

namespace {

constexpr std::size_t kMax = std::numeric_limits<std::size_t>::max();

OutOfMemory refused(ManagedRuntime& runtime, std::size_t bytes) {
  try {
    runtime.allocate_managed(bytes, Location::host());
  } catch (const OutOfMemory& error) {
    return error;
  }
  harness::fail(__FILE__, __LINE__, std::to_string(bytes) + " bytes were not refused");
}

void exactly_the_limit_fits(ManagedRuntime& runtime) {
  runtime.set_limit(4 * MiB);
  void* first = runtime.allocate_managed(3 * MiB, Location::device(0));
  CHECK_EQ(refused(runtime, MiB + 1).bytes, MiB + 1);
  CHECK_EQ(runtime.managed_bytes(), 3 * MiB);
  void* second = runtime.allocate_managed(MiB, Location::host());
  CHECK_EQ(runtime.managed_bytes(), 4 * MiB);
  const OutOfMemory error = refused(runtime, 1);
  CHECK(error.cause == OutOfMemory::Cause::kLimit);
  CHECK(std::string(error.what()).find("4.00 MiB") != std::string::npos);
  runtime.free_managed(first);
  runtime.free_managed(second);
  CHECK_EQ(runtime.managed_bytes(), 0U);
  CHECK_EQ(runtime.peak_managed_bytes(), 4 * MiB);
}

// A folder that imitates an operating system's files.
struct FakeSystem {
  std::filesystem::path root;
  FakeSystem() {
    std::string pattern = (std::filesystem::temp_directory_path() / "host_available_XXXXXX").string();
    CHECK(mkdtemp(pattern.data()) != nullptr);
    root = pattern;
  }
  ~FakeSystem() {
    std::error_code ignored;
    std::filesystem::remove_all(root, ignored);
  }
  void write(const std::string& path, const std::string& text) const {
    const auto file = root / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::size_t available() const {
    return operating_system_memory_available(root.string());
  }
  std::size_t total() const {
    return operating_system_memory_total(root.string());
  }
};

} // namespace

TEST(exactly_the_limit_fits_and_one_byte_more_does_not) {
  RecordingRuntime recording;
  exactly_the_limit_fits(recording);
  EmulatedRuntime emulated;
  exactly_the_limit_fits(emulated);
}

TEST(the_runtime_is_not_called_if_the_limit_refuses) {
  RecordingRuntime runtime;
  runtime.set_limit(MiB);
  refused(runtime, MiB + 1);
  CHECK_EQ(runtime.count("allocate_managed"), 0U);
}

TEST(a_limit_of_zero_refuses_everything_and_none_lifts_it) {
  RecordingRuntime runtime;
  runtime.set_limit(0);
  refused(runtime, 1);
  runtime.set_limit(std::nullopt);
  CHECK(!runtime.limit());
  runtime.free_managed(runtime.allocate_managed(1, Location::host()));
}

TEST(a_limit_below_the_current_use_refuses_new_requests) {
  RecordingRuntime runtime;
  void* ptr = runtime.allocate_managed(4 * MiB, Location::host());
  runtime.set_limit(MiB);
  refused(runtime, 1);
  runtime.free_managed(ptr);
  runtime.free_managed(runtime.allocate_managed(MiB, Location::host()));
}

TEST(sizes_that_overflow_are_refused) {
  RecordingRuntime runtime;
  void* ptr = runtime.allocate_managed(MiB, Location::host());
  runtime.set_limit(kMax - 1);
  CHECK(refused(runtime, kMax).cause == OutOfMemory::Cause::kLimit);
  // the sum is the largest representable number
  CHECK(refused(runtime, kMax - MiB).cause == OutOfMemory::Cause::kLimit);
  runtime.set_limit(std::nullopt);
  refused(runtime, kMax);
  CHECK_EQ(runtime.managed_bytes(), MiB);
  runtime.free_managed(ptr);
  EmulatedRuntime emulated;
  refused(emulated, kMax);
  CHECK_THROWS(OutOfMemory, emulated.allocate_device(kMax, 0));
  CHECK_EQ(emulated.managed_bytes(), 0U);
}

TEST(without_a_limit_requests_beyond_host_memory_are_refused) {
  RecordingRuntime runtime;
  runtime.set_host_memory_available(2 * MiB);
  const OutOfMemory error = refused(runtime, 2 * MiB + 1);
  CHECK(error.cause == OutOfMemory::Cause::kHost);
  runtime.free_managed(runtime.allocate_managed(2 * MiB, Location::host()));
}

TEST(a_missing_device_or_one_without_managed_memory_is_refused) {
  struct Older : RecordingRuntime {
    Older() : RecordingRuntime(2) {}
    DeviceProperties device_properties(int device) const override {
      DeviceProperties properties = RecordingRuntime::device_properties(device);
      properties.managed_memory = device != 1;
      return properties;
    }
  } runtime;
  CHECK_THROWS(InvalidArgument, runtime.allocate_managed(1, Location::device(2)));
  CHECK_THROWS(InvalidArgument, runtime.allocate_managed(1, Location{-2}));
  CHECK_THROWS(RuntimeFailure, runtime.allocate_managed(1, Location::device(1)));
  CHECK_EQ(runtime.count("allocate_managed"), 0U);
  CHECK_EQ(runtime.managed_bytes(), 0U);
  for (const Location home : {Location::host(), Location::device(0)}) {
    runtime.free_managed(runtime.allocate_managed(1, home));
  }
}

TEST(a_failed_call_releases_its_reservation) {
  RecordingRuntime runtime;
  runtime.set_limit(MiB);
  runtime.fail("allocate_managed", 1);
  CHECK(refused(runtime, MiB).cause == OutOfMemory::Cause::kRuntime);
  CHECK_EQ(runtime.managed_bytes(), 0U);
  CHECK_EQ(runtime.peak_managed_bytes(), 0U);
  runtime.free_managed(runtime.allocate_managed(MiB, Location::host()));
}

TEST(threads_that_race_for_the_remainder_never_exceed_it) {
  constexpr int kRounds = 200;
  constexpr int kThreads = 4;
  RecordingRuntime runtime;
  runtime.set_limit(3 * MiB); // leaves room for one of them, twice
  std::atomic<int> won{0};
  std::atomic<bool> overrun{false};
  std::barrier start(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        start.arrive_and_wait();
        void* ptr = nullptr;
        try {
          ptr = runtime.allocate_managed(2 * MiB, Location::host());
          ++won;
        } catch (const OutOfMemory&) {
        }
        overrun = overrun || runtime.managed_bytes() > 3 * MiB;
        start.arrive_and_wait();
        runtime.free_managed(ptr);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(!overrun);
  CHECK_EQ(won.load(), kRounds); // exactly one succeeds in each round
  CHECK_EQ(runtime.managed_bytes(), 0U);
  CHECK_EQ(runtime.peak_managed_bytes(), 2 * MiB);
}

TEST(available_memory_comes_from_meminfo) {
  FakeSystem system;
  CHECK_EQ(system.available(), kMax); // no file: the amount is unknown
  CHECK_EQ(system.total(), kMax);
  system.write("proc/meminfo", "MemTotal:  900 kB\nHugePages_Total:   0\nMemAvailable:   500 kB\nOther: 1 kB\n");
  CHECK_EQ(system.available(), 500 * KiB);
  CHECK_EQ(system.total(), 900 * KiB);
  CHECK(operating_system_memory_available() > 0);
  CHECK(operating_system_memory_total() >= operating_system_memory_available());
}

TEST(a_reserve_of_the_host_is_not_pinned) {
  constexpr std::size_t kUnknown = std::numeric_limits<std::size_t>::max();
  CHECK_EQ(spare_host_memory(100 * GiB, 160 * GiB), 90 * GiB); // a sixteenth of the total stays
  CHECK_EQ(spare_host_memory(12 * GiB, 16 * GiB), 10 * GiB); // at least 2 GiB
  CHECK_EQ(spare_host_memory(12 * GiB, kUnknown), 10 * GiB);
  CHECK_EQ(spare_host_memory(3 * GiB, 64 * GiB), 3 * GiB / 2); // at most half of what is available
  CHECK_EQ(spare_host_memory(0, 64 * GiB), std::size_t{0});
  CHECK_EQ(spare_host_memory(kUnknown, 64 * GiB), kUnknown);
}

TEST(control_groups_of_both_versions_bound_available_memory) {
  FakeSystem system;
  system.write("proc/meminfo", "MemAvailable:   500 kB\n");
  system.write("proc/self/cgroup", "0::/outer/inner\n");
  system.write("sys/fs/cgroup/outer/inner/memory.max", "max\n");
  system.write("sys/fs/cgroup/outer/inner/memory.current", "1024\n");
  CHECK_EQ(system.available(), 500 * KiB);
  system.write("sys/fs/cgroup/outer/memory.max", "409600\n"); // the parent group
  system.write("sys/fs/cgroup/outer/memory.current", "204800\n");
  CHECK_EQ(system.available(), 200 * KiB);
  CHECK_EQ(system.total(), 400 * KiB); // whatever is in use
  system.write("sys/fs/cgroup/outer/memory.stat", "anon 5\ninactive_file 102400\n"); // reclaimable
  CHECK_EQ(system.available(), 300 * KiB);
  system.write("sys/fs/cgroup/outer/memory.current", "1000000\n");
  CHECK_EQ(system.available(), 0U);

  system.write("proc/self/cgroup", "5:cpu:/x\n4:memory:/not/mounted/here\n0::/\n");
  system.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "102400\n");
  system.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "51200\n");
  CHECK_EQ(system.available(), 50 * KiB);
}

HARNESS_MAIN()
