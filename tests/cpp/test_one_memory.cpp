// The emulated runtime with the profiles of machines that have one memory (gb10), or two coherent ones (gh200).
#include <cmath>
#include <memory>
#include <string>

#include "allocator_rig.h"
#include "emulated_helpers.h"
#include "harness.h"
#include "runtime/host_memory.h"

using namespace torch_uvm;
using namespace emulated_helpers;

namespace {

EmulatedConfig machine(const char* profile, int count = 1) {
  EmulatedConfig config = devices(count);
  config.profile = profile;
  return config;
}

/// Bytes that moved, by whatever means.
std::size_t moved(const EmulatedRuntime& runtime) {
  const EmulatedCounters all = runtime.counters();
  return all.bytes_to_device + all.bytes_to_host + all.bytes_copied_to_device + all.bytes_copied_to_host;
}

} // namespace

TEST(profiles_have_the_attributes_of_their_machines) {
  const DeviceProperties h200 = EmulatedRuntime(machine("h200")).device_properties(0);
  CHECK(!h200.one_memory() && !h200.integrated && !h200.host_page_tables && !h200.pageable_memory_access);
  const DeviceProperties gb10 = EmulatedRuntime(machine("gb10")).device_properties(0);
  CHECK(gb10.one_memory() && gb10.integrated && gb10.pageable_memory_access);
  const DeviceProperties gh200 = EmulatedRuntime(machine("gh200")).device_properties(0);
  CHECK(gh200.one_memory() && !gh200.integrated && gh200.host_page_tables && gh200.direct_managed_access);
}

TEST(coherence_needs_both_attributes) {
  DeviceProperties properties;
  CHECK(!properties.one_memory());
  properties.host_page_tables = true;
  CHECK(!properties.one_memory());
  properties.direct_managed_access = true;
  CHECK(properties.one_memory());
  properties.host_page_tables = false;
  CHECK(!properties.one_memory());
  properties.integrated = true;
  CHECK(properties.one_memory());
}

TEST(one_memory_serves_both_processors_without_a_move) {
  EmulatedRuntime runtime(machine("gb10"));
  Managed memory(runtime, 4);
  memory.use(0, 4, 0, true);
  CHECK_EQ(memory.where(), "host 4");
  CHECK_EQ(runtime.counters().faults_on_device, 4U); // first touches
  memory.use_on_host(0, 4, true);
  memory.use(0, 4, 0, true);
  memory.use_on_host(0, 4, false);
  CHECK_EQ(memory.where(), "host 4");
  CHECK_EQ(runtime.counters().faults_on_device, 4U);
  CHECK_EQ(runtime.counters().faults_on_host + runtime.counters().bytes_in_place, 0U);
  CHECK_EQ(moved(runtime), 0U);
  CHECK_EQ(runtime.resident_bytes(0), 0U);
}

TEST(coherent_pages_stay_where_they_were_touched_first) {
  EmulatedRuntime runtime(machine("gh200"));
  Managed memory(runtime, 20); // the device has 16 pages
  memory.use_on_host(0, 2, true);
  memory.use(2, 18, 0, true);
  CHECK_EQ(memory.where(), "host 4, device 0 16"); // the last two found no room, and nothing was evicted
  memory.use(0, 20, 0, false);
  memory.use_on_host(0, 20, true);
  CHECK_EQ(memory.where(), "host 4, device 0 16");
  CHECK_EQ(moved(runtime), 0U);
  CHECK_EQ(runtime.counters().evicted_pages, 0U);
  // the kernels: two pages as they were populated, four later; the host: the device's sixteen
  CHECK_EQ(runtime.counters().bytes_in_place, (2 + 4 + 16) * kPage);
}

TEST(accesses_across_the_coherent_link_take_its_time) {
  EmulatedRuntime runtime(machine("gh200"));
  Managed memory(runtime, 16);
  memory.use(0, 16, 0, true);
  runtime.synchronize_device(0); // the host's clock is the latest from here on
  const double before = runtime.time_us();
  memory.use_on_host(0, 16, false);
  CHECK(std::abs(runtime.time_us() - before - 16 * kPage / 375e9 * 1e6) < 0.01);
}

TEST(nothing_is_prefetched_or_discarded_where_nothing_moves) {
  for (const char* profile : {"gb10", "gh200"}) {
    EmulatedRuntime runtime(machine(profile));
    Managed memory(runtime, 4);
    memory.use_on_host(0, 4, true);
    const double before = runtime.time_us();
    memory.prefetch(0, 4, Location::device(0));
    memory.prefetch(0, 4, Location::host());
    runtime.discard(memory.ptr, 4 * kPage, Stream::default_of(0));
    CHECK_EQ(memory.where(), "host 4");
    CHECK_EQ(runtime.counters().prefetch_calls + runtime.counters().discard_calls, 0U);
    CHECK_EQ(runtime.time_us(), before);
    CHECK_THROWS(InvalidArgument, memory.prefetch(0, 4, Location::device(1))); // arguments are checked all the same
  }
}

TEST(a_fresh_segment_is_not_populated) {
  for (const char* profile : {"h200", "gb10", "gh200"}) {
    EmulatedConfig config = machine(profile);
    config.memory = 256 * MiB;
    EmulatedRuntime runtime(config);
    CachingManagedAllocator allocator(runtime, std::make_unique<ManagedSegmentSource>(runtime), {});
    allocator.free(allocator.allocate(4 * MiB, Location::device(0), Stream::default_of(0)));
    CHECK_EQ(runtime.counters().prefetch_calls, std::size_t{std::string(profile) == "h200"});
  }
}

TEST(all_that_is_allocated_comes_out_of_the_one_memory) {
  EmulatedRuntime runtime(machine("gb10", 2));
  const auto free = [&] { return runtime.memory_info(0).free / kPage; };
  CHECK_EQ(free(), 16U);
  void* const managed = runtime.allocate_managed(4 * kPage, Location::device(0));
  void* const pinned = runtime.allocate_pinned(2 * kPage);
  void* const plain = runtime.allocate_device(3 * kPage, 1);
  CHECK_EQ(free(), 7U);
  CHECK_EQ(runtime.memory_info(1).free, runtime.memory_info(0).free);
  CHECK_EQ(runtime.memory_info(0).total, kDeviceBytes);
  CHECK_EQ(runtime.host_memory_available(), 7 * kPage);
  CHECK_THROWS(OutOfMemory, runtime.allocate_managed(8 * kPage, Location::device(0)));
  CHECK_THROWS(OutOfMemory, runtime.allocate_pinned(8 * kPage));
  CHECK_THROWS(OutOfMemory, runtime.allocate_device(8 * kPage, 0));
  CHECK_EQ(free(), 7U);
  void* const rest = runtime.allocate_device(7 * kPage, 0);
  CHECK_EQ(free(), 0U);
  runtime.free_device(rest);
  runtime.free_device(plain);
  runtime.free_pinned(pinned);
  runtime.free_managed(managed);
  CHECK_EQ(free(), 16U);
}

TEST(free_memory_of_a_coherent_device_is_the_operating_systems) {
  EmulatedRuntime runtime(machine("gh200"));
  const MemoryInfo info = runtime.memory_info(0);
  CHECK_EQ(info.total, operating_system_memory_total());
  CHECK(info.free > kDeviceBytes && info.free <= info.total);
}

TEST(copies_within_one_memory_are_not_transfers) {
  EmulatedRuntime runtime(machine("gb10"));
  Managed from(runtime, 2), to(runtime, 2);
  from.use_on_host(0, 2, true);
  runtime.copy_async(to.ptr, from.ptr, 2 * kPage, Stream::default_of(0));
  runtime.synchronize_device(0);
  CHECK_EQ(moved(runtime), 0U);
  CHECK_EQ(to.where(), "host 2");
}

HARNESS_MAIN()
