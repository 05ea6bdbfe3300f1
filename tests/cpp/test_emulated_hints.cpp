// Hints to the emulated runtime: read-mostly, preferred location, accessed-by, prefetch and discard, and the attributes
// of a range.
#include <vector>

#include "emulated_helpers.h"
#include "harness.h"

using namespace torch_uvm;
using namespace emulated_helpers;

// --- read-mostly ------------------------------------------------------------------------------------------

TEST(read_mostly_pages_are_duplicated_by_reads_and_collapsed_by_a_write) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 2);
  memory.use_on_host(0, 2, true);
  memory.advise(0, 2, Advice::kSetReadMostly, Location::device(0));
  runtime.reset_counters();
  memory.use(0, 2, 0, false);
  memory.use(0, 2, 1, false);
  CHECK_EQ(memory.where(), "host 2, device 0 2, device 1 2");
  CHECK_EQ(runtime.counters(0).faults_on_device, 2U);
  CHECK_EQ(runtime.counters(0).bytes_to_device, 2 * kPage);
  CHECK_EQ(runtime.counters(1).bytes_to_device, 2 * kPage);
  memory.use(0, 1, 1, true);
  CHECK_EQ(memory.where(0, 1), "device 1 1");
  CHECK_EQ(memory.where(1, 1), "host 1, device 0 1, device 1 1");
  CHECK_EQ(runtime.counters(0).dropped_pages, 1U);
  CHECK_EQ(runtime.counters().dropped_pages, 2U); // including the host's
  memory.use_on_host(1, 1, true);
  CHECK_EQ(memory.where(1, 1), "host 1");
  CHECK_EQ(runtime.counters().bytes_to_host, 0U);
}

TEST(the_host_reads_a_duplicate_of_a_read_mostly_page) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 1);
  memory.use(0, 1, 0, true);
  memory.advise(0, 1, Advice::kSetReadMostly, Location::host());
  memory.use_on_host(0, 1, false);
  CHECK_EQ(memory.where(), "host 1, device 0 1");
  CHECK_EQ(runtime.counters().bytes_to_host, kPage);
  CHECK_EQ(runtime.counters().faults_on_host, 1U);
}

TEST(a_write_from_a_third_location_moves_one_copy_and_drops_the_others) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 1);
  memory.use_on_host(0, 1, true);
  memory.advise(0, 1, Advice::kSetReadMostly, Location::host());
  memory.use(0, 1, 0, false);
  runtime.reset_counters();
  memory.use(0, 1, 1, true);
  CHECK_EQ(memory.where(), "device 1 1");
  CHECK_EQ(runtime.counters(1).bytes_to_device, kPage);
  CHECK_EQ(runtime.resident_bytes(0), 0U);
}

TEST(unset_read_mostly_leaves_one_copy) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 2);
  memory.use_on_host(0, 2, true);
  memory.advise(0, 2, Advice::kSetReadMostly, Location::host());
  memory.use(0, 2, 0, false);
  memory.advise(1, 1, Advice::kSetPreferredLocation, Location::device(0));
  memory.advise(0, 2, Advice::kUnsetReadMostly, Location::host());
  CHECK_EQ(memory.where(0, 1), "host 1");
  CHECK_EQ(memory.where(1, 1), "device 0 1"); // the copy at the preferred location remains
}

// --- preferred location and accessed-by -------------------------------------------------------------------

TEST(a_page_at_its_preferred_location_is_used_in_place) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 2);
  memory.use_on_host(0, 2, true);
  memory.advise(0, 2, Advice::kSetPreferredLocation, Location::host());
  memory.advise(1, 1, Advice::kSetAccessedBy, Location::device(0));
  runtime.reset_counters();
  memory.use(0, 2, 0, true);
  CHECK_EQ(memory.where(), "host 2");
  CHECK_EQ(runtime.counters(0).faults_on_device, 1U); // for the page without a mapping
  CHECK_EQ(runtime.counters(0).bytes_in_place, 2 * kPage);
  CHECK_EQ(runtime.counters(0).bytes_to_device, 0U);
}

TEST(a_page_away_from_its_preferred_location_migrates_to_the_toucher) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 1);
  memory.use(0, 1, 1, true);
  memory.advise(0, 1, Advice::kSetPreferredLocation, Location::host());
  memory.use(0, 1, 0, false);
  CHECK_EQ(memory.where(), "device 0 1");
}

TEST(accessed_by_alone_maps_host_memory) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 1);
  memory.use_on_host(0, 1, true);
  memory.advise(0, 1, Advice::kSetAccessedBy, Location::device(0));
  runtime.reset_counters();
  memory.use(0, 1, 0, true);
  CHECK_EQ(memory.where(), "host 1");
  CHECK_EQ(runtime.counters(0).faults_on_device, 0U);
  CHECK_EQ(runtime.counters(0).bytes_in_place, kPage);
  memory.use(0, 1, 1, false); // device 1 has no mapping, so it faults
  CHECK_EQ(memory.where(), "device 1 1");
  memory.use_on_host(0, 1, false);
  memory.advise(0, 1, Advice::kUnsetAccessedBy, Location::device(0));
  memory.use(0, 1, 0, false);
  CHECK_EQ(memory.where(), "device 0 1");
}

TEST(a_write_in_place_drops_duplicates) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 1);
  memory.use_on_host(0, 1, true);
  memory.advise(0, 1, Advice::kSetPreferredLocation, Location::host());
  memory.advise(0, 1, Advice::kSetAccessedBy, Location::device(0));
  memory.advise(0, 1, Advice::kSetReadMostly, Location::host());
  memory.use(0, 1, 1, false);
  CHECK_EQ(memory.where(), "host 1, device 1 1");
  memory.use(0, 1, 0, true);
  CHECK_EQ(memory.where(), "host 1");
  CHECK_EQ(runtime.counters(0).bytes_in_place, kPage);
}

// --- prefetch and discard ---------------------------------------------------------------------------------

TEST(a_prefetch_populates_and_moves_without_faults) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 4);
  memory.use_on_host(0, 2, true);
  runtime.reset_counters();
  memory.prefetch(0, 3, Location::device(0));
  CHECK_EQ(memory.where(), "device 0 3, untouched 1");
  CHECK_EQ(runtime.counters(0).bytes_to_device, 2 * kPage);
  CHECK_EQ(runtime.counters().faults_on_device, 0U);
  memory.prefetch(0, 4, Location::host());
  CHECK_EQ(memory.where(), "host 4");
  CHECK_EQ(runtime.counters(0).bytes_to_host, 3 * kPage);
  CHECK_EQ(runtime.counters(0).prefetch_calls, 2U);
}

TEST(a_prefetch_of_read_mostly_memory_duplicates) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 1);
  memory.use_on_host(0, 1, true);
  memory.advise(0, 1, Advice::kSetReadMostly, Location::host());
  memory.prefetch(0, 1, Location::device(0));
  CHECK_EQ(memory.where(), "host 1, device 0 1");
}

TEST(a_prefetch_overrides_the_preferred_location) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 2);
  memory.advise(0, 2, Advice::kSetPreferredLocation, Location::host());
  memory.use_on_host(0, 1, true);
  memory.prefetch(0, 2, Location::device(0));
  CHECK_EQ(memory.where(), "device 0 2");
}

TEST(discarded_pages_move_once_without_a_transfer) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 2);
  memory.use(0, 2, 0, true);
  runtime.discard(memory.ptr, 2 * kPage, Stream::default_of(0));
  memory.use(1, 1, 0, true); // written again, so its bytes have to be moved
  runtime.reset_counters();
  memory.prefetch(0, 2, Location::host());
  CHECK_EQ(memory.where(), "host 2");
  CHECK_EQ(runtime.counters(0).bytes_to_host, kPage);
  memory.prefetch(0, 1, Location::device(0));
  CHECK_EQ(runtime.counters(0).bytes_to_device, kPage);
}

TEST(a_discard_ignores_partly_covered_pages) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 3);
  memory.use(0, 3, 0, true);
  runtime.discard(static_cast<char*>(memory.ptr) + 1, 3 * kPage - 2, Stream::default_of(0));
  runtime.reset_counters();
  memory.use_on_host(0, 3, false);
  CHECK_EQ(runtime.counters(0).bytes_to_host, 2 * kPage);
}

// --- attributes -------------------------------------------------------------------------------------------

TEST(attributes_that_differ_within_a_range_are_empty) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 4);
  memory.advise(0, 4, Advice::kSetAccessedBy, Location::device(1));
  memory.advise(0, 4, Advice::kSetAccessedBy, Location::host());
  memory.advise(0, 2, Advice::kSetPreferredLocation, Location::host());
  memory.prefetch(0, 4, Location::device(1));
  RangeAttributes all = runtime.range_attributes(memory.ptr, 4 * kPage);
  CHECK(!all.uniform);
  CHECK(!all.preferred_location);
  CHECK(all.last_prefetch == Location::device(1));
  CHECK((all.accessed_by == std::vector<Location>{Location::host(), Location::device(1)}));
  RangeAttributes half = runtime.range_attributes(memory.ptr, 2 * kPage);
  CHECK(half.uniform);
  CHECK(half.preferred_location == Location::host());
  CHECK(!half.read_mostly);
  memory.advise(0, 4, Advice::kUnsetPreferredLocation, Location::host());
  memory.advise(0, 4, Advice::kSetReadMostly, Location::host());
  all = runtime.range_attributes(memory.ptr, 4 * kPage);
  CHECK(all.uniform);
  CHECK(all.read_mostly);
}

HARNESS_MAIN()
