// A full emulated device: managed pages are evicted least recently used first; plain device memory evicts managed
// pages.
#include "emulated_helpers.h"
#include "harness.h"
#include "runtime/error.h"

using namespace torch_uvm;
using namespace emulated_helpers;

TEST(a_full_device_evicts_the_least_recently_used_pages) {
  EmulatedRuntime runtime(devices(1)); // 16 pages
  Managed memory(runtime, 20);
  memory.use(0, 16, 0, true);
  memory.use(0, 1, 0, false); // page 0 is now the most recently used
  memory.use(16, 2, 0, true);
  CHECK_EQ(memory.where(0, 4), "host 2, device 0 2");
  CHECK_EQ(memory.where(0, 1), "device 0 1");
  CHECK_EQ(memory.where(1, 2), "host 2");
  CHECK_EQ(runtime.counters(0).evicted_pages, 2U);
  CHECK_EQ(runtime.counters(0).bytes_to_host, 2 * kPage);
  CHECK_EQ(runtime.resident_bytes(0), kDeviceBytes);
  CHECK_EQ(runtime.memory_info(0).free, 0U);
}

TEST(a_preferred_location_does_not_protect_from_eviction) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 17);
  memory.advise(0, 1, Advice::kSetPreferredLocation, Location::device(0));
  memory.use(0, 17, 0, true);
  CHECK_EQ(memory.where(0, 1), "host 1");
}

TEST(duplicates_and_discarded_pages_are_dropped_for_free) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 18);
  memory.use_on_host(0, 1, true);
  memory.advise(0, 1, Advice::kSetReadMostly, Location::host());
  memory.use(0, 16, 0, false);
  runtime.discard(static_cast<char*>(memory.ptr) + kPage, kPage, Stream::default_of(0));
  runtime.reset_counters();
  memory.use(16, 2, 0, true);
  CHECK_EQ(memory.where(0, 1), "host 1");
  CHECK_EQ(memory.where(1, 1), "untouched 1");
  CHECK_EQ(runtime.counters(0).dropped_pages, 2U);
  CHECK_EQ(runtime.counters(0).evicted_pages, 0U);
  CHECK_EQ(runtime.counters(0).bytes_to_host, 0U);
}

TEST(operands_larger_than_the_device_thrash_but_complete) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 40);
  for (int round = 0; round < 3; ++round) {
    memory.use(0, 40, 0, true);
  }
  // Pages are used in a cyclic order, so LRU evicts each page before its next use.
  CHECK_EQ(runtime.counters(0).faults_on_device, 3 * 40U);
  CHECK_EQ(runtime.counters(0).evicted_pages, 3 * 40U - 16U);
  CHECK_EQ(runtime.counters(0).bytes_to_device, 2 * 40 * kPage);
  CHECK_EQ(memory.where(), "host 24, device 0 16");
}

TEST(plain_memory_evicts_managed_pages_and_is_refused_only_for_plain_memory) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 16);
  memory.use(0, 16, 0, true);
  void* half = runtime.allocate_device(kDeviceBytes / 2, 0);
  CHECK_EQ(memory.where(), "host 8, device 0 8");
  CHECK_EQ(runtime.counters(0).evicted_pages, 8U);
  CHECK(!runtime.is_pinned_ptr(half));
  CHECK_THROWS(InvalidArgument, runtime.residency(half, 1));
  try {
    runtime.allocate_device(kDeviceBytes / 2 + 1, 0);
    CHECK(false);
  } catch (const OutOfMemory& error) {
    CHECK(error.cause == OutOfMemory::Cause::kDevice);
  }
  CHECK_EQ(memory.where(), "host 8, device 0 8");
  void* rest = runtime.allocate_device(kDeviceBytes / 2, 0);
  CHECK_EQ(runtime.resident_bytes(0), 0U);
  CHECK_EQ(runtime.memory_info(0).free, 0U);
  // No page fits: kernels access managed memory in place, and new memory is populated on the host.
  memory.use(0, 16, 0, true);
  CHECK_EQ(memory.where(), "host 16");
  Managed fresh(runtime, 1);
  fresh.use(0, 1, 0, true);
  fresh.prefetch(0, 1, Location::device(0));
  CHECK_EQ(fresh.where(), "host 1");
  runtime.free_device(half);
  runtime.free_device(rest);
  CHECK_EQ(runtime.memory_info(0).free, kDeviceBytes);
  memory.use(0, 16, 0, true);
  CHECK_EQ(memory.where(), "device 0 16");
}

TEST(a_write_in_place_without_room_drops_duplicates) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 1);
  memory.use_on_host(0, 1, true);
  runtime.advise(memory.ptr, kPage, Advice::kSetReadMostly, Location::host());
  memory.use(0, 1, 1, false);
  CHECK_EQ(memory.where(), "host 1, device 1 1");
  void* all = runtime.allocate_device(kDeviceBytes, 0); // leaves no room for the page on device 0
  memory.use(0, 1, 0, false);
  CHECK_EQ(memory.where(), "host 1, device 1 1");
  memory.use(0, 1, 0, true);
  CHECK_EQ(memory.where(), "host 1");
  CHECK_EQ(runtime.counters(0).bytes_in_place, 2 * kPage);
  CHECK_EQ(runtime.counters(1).dropped_pages, 1U);
  runtime.free_device(all);
}

HARNESS_MAIN()
