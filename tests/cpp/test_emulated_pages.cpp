// Where pages are after touches, prefetches, advice and evictions, by counts of pages and bytes.
#include <cstring>
#include <vector>

#include "emulated_helpers.h"
#include "harness.h"

using namespace torch_uvm;
using namespace emulated_helpers;

// --- first touch ------------------------------------------------------------------------------------------

TEST(fresh_memory_is_nowhere_zeroed_and_aligned) {
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
  CHECK_EQ(runtime.counters().bytes_to_device + runtime.counters().bytes_to_host, 0U); // nothing to move
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
  CHECK_EQ(info.devices[0], 10U); // bytes of the range, not pages
  CHECK_EQ(info.untouched, 20U);
}

TEST(ranges_outside_managed_memory_change_no_page) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 1);
  int local = 0;
  const std::vector<Touch> accesses{{&local, sizeof local, true},
                                    {nullptr, 0, true},
                                    {static_cast<char*>(memory.ptr), 10 * kPage, true}}; // runs over the end
  runtime.begin_kernel(Stream::default_of(0), accesses);
  CHECK_EQ(runtime.resident_bytes(0), kPage);
  CHECK_EQ(runtime.counters().kernels, 1U);
}

// --- faults and migration ---------------------------------------------------------------------------------

TEST(a_touch_from_elsewhere_faults_and_migrates_both_ways) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 4);
  memory.use_on_host(0, 4, true);
  runtime.reset_counters();
  memory.use(0, 3, 0, false);
  CHECK_EQ(memory.where(), "host 1, device 0 3");
  CHECK_EQ(runtime.counters(0).faults_on_device, 3U);
  CHECK_EQ(runtime.counters(0).bytes_to_device, 3 * kPage);
  memory.use(0, 3, 0, true); // resident: nothing happens
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
  CHECK_EQ(runtime.counters().dropped_pages, 2U); // the host's too
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

TEST(a_write_from_a_third_place_moves_one_copy_and_drops_the_rest) {
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
  CHECK_EQ(memory.where(1, 1), "device 0 1"); // its preferred location has one
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
  CHECK_EQ(runtime.counters(0).faults_on_device, 1U); // the page with no mapping
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
  memory.use(0, 1, 1, false); // who has no mapping faults
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

TEST(discarded_pages_move_for_nothing_once) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 2);
  memory.use(0, 2, 0, true);
  runtime.discard(memory.ptr, 2 * kPage, Stream::default_of(0));
  memory.use(1, 1, 0, true); // written again: worth moving
  runtime.reset_counters();
  memory.prefetch(0, 2, Location::host());
  CHECK_EQ(memory.where(), "host 2");
  CHECK_EQ(runtime.counters(0).bytes_to_host, kPage);
  memory.prefetch(0, 1, Location::device(0));
  CHECK_EQ(runtime.counters(0).bytes_to_device, kPage);
}

TEST(a_discard_spares_pages_that_are_only_partly_in_its_range) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 3);
  memory.use(0, 3, 0, true);
  runtime.discard(static_cast<char*>(memory.ptr) + 1, 3 * kPage - 2, Stream::default_of(0));
  runtime.reset_counters();
  memory.use_on_host(0, 3, false);
  CHECK_EQ(runtime.counters(0).bytes_to_host, 2 * kPage);
}

// --- eviction ---------------------------------------------------------------------------------------------

TEST(a_full_device_evicts_what_was_used_least_recently) {
  EmulatedRuntime runtime(devices(1)); // 16 pages
  Managed memory(runtime, 20);
  memory.use(0, 16, 0, true);
  memory.use(0, 1, 0, false); // page 0 is the most recent now
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

TEST(operands_larger_than_the_device_thrash_and_end) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 40);
  for (int round = 0; round < 3; ++round) {
    memory.use(0, 40, 0, true);
  }
  // In order of use, every page is gone when its turn comes again.
  CHECK_EQ(runtime.counters(0).faults_on_device, 3 * 40U);
  CHECK_EQ(runtime.counters(0).evicted_pages, 3 * 40U - 16U);
  CHECK_EQ(runtime.counters(0).bytes_to_device, 2 * 40 * kPage);
  CHECK_EQ(memory.where(), "host 24, device 0 16");
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

// --- plain memory -----------------------------------------------------------------------------------------

TEST(plain_memory_pushes_managed_pages_out_and_is_refused_only_by_plain_memory) {
  EmulatedRuntime runtime(devices(1));
  Managed memory(runtime, 16);
  memory.use(0, 16, 0, true);
  void* half = runtime.allocate_device(kDeviceBytes / 2, 0);
  CHECK_EQ(memory.where(), "host 8, device 0 8");
  CHECK_EQ(runtime.counters(0).evicted_pages, 8U);
  CHECK_EQ(runtime.device_of(half).value_or(-1), 0);
  CHECK(!runtime.is_managed_ptr(half));
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
  // There is no room for a single page: kernels use managed memory where it is, fresh memory on the host.
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

TEST(a_write_in_place_for_want_of_room_drops_duplicates) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 1);
  memory.use_on_host(0, 1, true);
  runtime.advise(memory.ptr, kPage, Advice::kSetReadMostly, Location::host());
  memory.use(0, 1, 1, false);
  CHECK_EQ(memory.where(), "host 1, device 1 1");
  void* all = runtime.allocate_device(kDeviceBytes, 0); // device 0 cannot have the page
  memory.use(0, 1, 0, false);
  CHECK_EQ(memory.where(), "host 1, device 1 1");
  memory.use(0, 1, 0, true);
  CHECK_EQ(memory.where(), "host 1");
  CHECK_EQ(runtime.counters(0).bytes_in_place, 2 * kPage);
  CHECK_EQ(runtime.counters(1).dropped_pages, 1U);
  runtime.free_device(all);
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
  again.use(0, 20, 0, true); // the list of pages is in order
  CHECK_EQ(again.where(), "host 4, device 0 16");
}

// --- attributes -------------------------------------------------------------------------------------------

TEST(attributes_are_those_of_the_range_or_empty_where_they_differ) {
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

// --- bad arguments ----------------------------------------------------------------------------------------

TEST(what_does_not_exist_is_refused_and_changes_nothing) {
  EmulatedRuntime runtime(devices(2));
  Managed memory(runtime, 2);
  const Stream stream = Stream::default_of(0);
  const auto bad = [&](auto call) { CHECK_THROWS(InvalidArgument, call()); };
  bad([&] { runtime.prefetch(memory.ptr, 2 * kPage + 1, Location::device(0), stream); });
  bad([&] { runtime.prefetch(memory.ptr, 0, Location::device(0), stream); });
  bad([&] { runtime.prefetch(memory.ptr, kPage, Location::device(2), stream); });
  bad([&] { runtime.prefetch(memory.ptr, kPage, Location::device(0), Stream::host()); });
  bad([&] { runtime.prefetch(memory.ptr, kPage, Location::device(0), Stream::default_of(2)); });
  bad([&] { runtime.prefetch(&runtime, kPage, Location::device(0), stream); });
  bad([&] { runtime.prefetch(nullptr, kPage, Location::device(0), stream); });
  bad([&] { runtime.advise(memory.ptr, 3 * kPage, Advice::kSetReadMostly, Location::host()); });
  bad([&] { runtime.advise(memory.ptr, kPage, Advice::kSetAccessedBy, Location::device(7)); });
  bad([&] { runtime.advise(memory.ptr, kPage, Advice::kSetPreferredLocation, Location{-2}); });
  bad([&] { runtime.discard(memory.ptr, 3 * kPage, stream); });
  bad([&] { runtime.discard(memory.ptr, kPage, Stream{1, memory.ptr}); });
  bad([&] { static_cast<void>(runtime.range_attributes(memory.ptr, ~std::size_t{0})); });
  bad([&] { static_cast<void>(runtime.residency(memory.ptr, 3 * kPage)); });
  bad([&] { runtime.allocate_managed(0, Location::host()); });
  bad([&] { runtime.allocate_managed(1, Location::device(2)); });
  bad([&] { runtime.allocate_managed(1, Location{-2}); });
  bad([&] { runtime.allocate_device(0, 0); });
  bad([&] { runtime.allocate_device(1, 2); });
  bad([&] { runtime.allocate_device(1, -1); });
  bad([&] { runtime.allocate_pinned(0); });
  bad([&] { runtime.copy_async(memory.ptr, nullptr, 1, stream); });
  bad([&] { runtime.copy_async(memory.ptr, &runtime, 3 * kPage, stream); });
  bad([&] { runtime.begin_kernel(Stream::host(), {}); });
  bad([&] { static_cast<void>(runtime.device_properties(2)); });
  bad([&] { static_cast<void>(runtime.memory_info(-1)); });
  bad([&] { static_cast<void>(runtime.timeline(2)); });
  bad([&] { static_cast<void>(runtime.counters(2)); });
  CHECK_EQ(memory.where(), "untouched 2");
  CHECK_EQ(runtime.counters().prefetch_calls + runtime.counters().advise_calls + runtime.counters().copy_calls, 0U);
  runtime.free_device(memory.ptr); // of another kind: ignored
  runtime.free_pinned(memory.ptr);
  CHECK(runtime.is_managed_ptr(memory.ptr));
}

TEST(a_message_names_the_value_and_what_exists) {
  EmulatedRuntime runtime(devices(2));
  try {
    static_cast<void>(runtime.memory_info(5));
    CHECK(false);
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    CHECK(text.find("device 5") != std::string::npos);
    CHECK(text.find("2 emulated devices") != std::string::npos);
  }
}

TEST(configurations_out_of_range_are_refused) {
  CHECK_THROWS(InvalidArgument, EmulatedRuntime(EmulatedConfig{.devices = 0}));
  CHECK_THROWS(InvalidArgument, EmulatedRuntime(EmulatedConfig{.devices = 65}));
  CHECK_THROWS(InvalidArgument, EmulatedRuntime(EmulatedConfig{.memory = MiB - 1}));
  CHECK_THROWS(InvalidArgument, EmulatedRuntime(EmulatedConfig{.profile = "h100"}));
  EmulatedRuntime most(EmulatedConfig{.devices = 64, .memory = MiB});
  CHECK_EQ(most.device_count(), 64);
  Managed memory(most, 1);
  memory.use(0, 1, 63, true);
  CHECK_EQ(memory.where(), "device 63 1");
  CHECK_EQ(most.device_properties(63).name, "Emulated h200");
  CHECK_EQ(most.device_properties(63).total_memory, MiB);
  CHECK_EQ(most.device_properties(63).page_bytes, kPage);
}

HARNESS_MAIN()
