// Placement of pages in the emulated runtime: first touch, faults, migration.
#include <span>
#include <vector>

#include "emulated_helpers.h"
#include "harness.h"

using namespace torch_uvm;
using namespace emulated_helpers;

TEST(new_memory_is_not_resident_but_zeroed_and_aligned) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 4);
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(memory.ptr) % (2 * MiB), 0U);
  CHECK_EQ(memory.where(), "untouched 4");
  CHECK_EQ(int{static_cast<char*>(memory.ptr)[4 * kPage - 1]}, 0);
  CHECK_EQ(runtime.managed_bytes(), 4 * kPage);
}

TEST(first_touch_populates_where_the_toucher_is) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 4);
  memory.use(0, 1, 1, true);
  memory.use_on_host(2, 1, true);
  CHECK_EQ(memory.where(), "host 1, device 1 1, untouched 2");
  CHECK_EQ(runtime.counters(1).faults_on_device, 1U);
  CHECK_EQ(runtime.counters().faults_on_host, 1U);
  CHECK_EQ(runtime.counters().bytes_to_device + runtime.counters().bytes_to_host, 0U); // no transfer
}

TEST(first_touch_goes_to_a_preferred_location_that_can_be_mapped) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 3);
  memory.advise(0, 1, Advice::kSetPreferredLocation, Location::host());
  memory.advise(1, 1, Advice::kSetPreferredLocation, Location::device(1));
  memory.advise(2, 1, Advice::kSetPreferredLocation, Location::device(1));
  memory.use(0, 2, 0, true);
  CHECK_EQ(memory.where(0, 1), "host 1");
  CHECK_EQ(memory.where(1, 1), "device 1 1");
  CHECK_EQ(runtime.counters(0).bytes_in_place, 2 * kPage);
  memory.use_on_host(2, 1, true); // the host cannot map a device's memory
  CHECK_EQ(memory.where(2, 1), "host 1");
}

TEST(a_range_touches_every_page_that_it_overlaps) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 4);
  const Touch access{static_cast<char*>(memory.ptr) + kPage - 1, kPage + 2, true};
  runtime.begin_kernel(Stream::default_of(0), std::span(&access, 1));
  CHECK_EQ(memory.where(), "device 0 3, untouched 1");
  const ResidencyInfo info = runtime.residency(static_cast<char*>(memory.ptr) + 3 * kPage - 10, 30);
  CHECK_EQ(info.devices[0], 10U); // counts bytes of the range, not pages
  CHECK_EQ(info.untouched, 20U);
}

TEST(ranges_outside_managed_memory_change_no_page) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 1);
  int local = 0;
  const std::vector<Touch> accesses{{&local, sizeof local, true},
                                    {nullptr, 0, true},
                                    {static_cast<char*>(memory.ptr), 10 * kPage, true}}; // extends beyond the end
  runtime.begin_kernel(Stream::default_of(0), accesses);
  CHECK_EQ(runtime.resident_bytes(0), kPage);
  CHECK_EQ(runtime.counters().kernels, 1U);
}

TEST(a_touch_from_elsewhere_faults_and_migrates_both_ways) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 4);
  memory.use_on_host(0, 4, true);
  runtime.reset_counters();
  memory.use(0, 3, 0, false);
  CHECK_EQ(memory.where(), "host 1, device 0 3");
  CHECK_EQ(runtime.counters(0).faults_on_device, 3U);
  CHECK_EQ(runtime.counters(0).bytes_to_device, 3 * kPage);
  memory.use(0, 3, 0, true); // already resident: no effect
  CHECK_EQ(runtime.counters(0).faults_on_device, 3U);
  memory.use_on_host(0, 2, false);
  CHECK_EQ(memory.where(), "host 3, device 0 1");
  CHECK_EQ(runtime.counters(0).faults_on_host, 2U);
  CHECK_EQ(runtime.counters(0).bytes_to_host, 2 * kPage);
  CHECK_EQ(runtime.resident_bytes(0), kPage);
  CHECK_EQ(runtime.peak_resident_bytes(0), 3 * kPage);
}

TEST(a_page_migrates_between_devices) {
  EmulatedRuntime runtime(devices(3));
  Managed memory(runtime, 1);
  memory.use(0, 1, 2, true);
  memory.use(0, 1, 0, false);
  CHECK_EQ(memory.where(), "device 0 1");
  CHECK_EQ(runtime.counters(0).bytes_to_device, kPage);
  CHECK_EQ(runtime.counters(2).bytes_to_host, 0U);
  CHECK_EQ(runtime.resident_bytes(2), 0U);
}

TEST(a_kernels_outputs_are_touched_when_it_ends) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 2);
  const Touch output{memory.ptr, 2 * kPage, true};
  runtime.begin_kernel(Stream::default_of(0), {});
  CHECK_EQ(memory.where(), "untouched 2");
  runtime.end_kernel(Stream::default_of(0), std::span(&output, 1));
  CHECK_EQ(memory.where(), "device 0 2");
  CHECK_EQ(runtime.counters().kernels, 1U);
}

TEST(bytes_survive_every_move) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 40);
  auto* bytes = static_cast<unsigned char*>(memory.ptr);
  for (std::size_t i = 0; i < 40; ++i) {
    bytes[i * kPage] = static_cast<unsigned char>(i);
  }
  memory.use(0, 40, 0, true);
  memory.prefetch(10, 20, Location::device(1));
  memory.use_on_host(0, 30, false);
  for (std::size_t i = 0; i < 40; ++i) {
    CHECK_EQ(std::size_t{bytes[i * kPage]}, i);
  }
}

TEST(freed_memory_leaves_nothing_behind) {
  EmulatedRuntime runtime(devices(2));
  {
    Managed memory(runtime, 8);
    memory.use_on_host(0, 8, true);
    memory.advise(0, 8, Advice::kSetReadMostly, Location::host());
    memory.use(0, 8, 0, false);
    memory.use(0, 8, 1, false);
    CHECK_EQ(runtime.resident_bytes(1), 8 * kPage);
  }
  CHECK_EQ(runtime.resident_bytes(0), 0U);
  CHECK_EQ(runtime.resident_bytes(1), 0U);
  CHECK_EQ(runtime.managed_bytes(), 0U);
  Managed again(runtime, 20);
  again.use(0, 20, 0, true); // the list of pages is still sorted
  CHECK_EQ(again.where(), "host 4, device 0 16");
}

HARNESS_MAIN()
