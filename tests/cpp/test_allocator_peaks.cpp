// The peak of allocated bytes between two calls, and the count of changes that tells whether the peak may differ.
#include <cstdint>

#include "room_helpers.h"

using namespace contract;

TEST(taken_peaks_and_those_of_the_statistics_are_independent) {
  on_each([](Rig& rig) {
    const auto peak = [&] { return rig.allocator->statistics(kDevice).allocated_bytes[0].peak; };
    constexpr auto k = static_cast<std::int64_t>(MiB);
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, std::size_t{0});
    Block* const kept = rig.allocate(12 * MiB);
    rig.allocator->free(rig.allocate(20 * MiB));
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, 32 * MiB);
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, 12 * MiB); // the block that is still allocated
    CHECK_EQ(peak(), 32 * k);
    CHECK_EQ(rig.allocator->statistics(kDevice).active_bytes[0].peak, 32 * k);
    rig.allocator->free(rig.allocate(30 * MiB));
    rig.allocator->reset_peak_statistics(kDevice);
    CHECK_EQ(peak(), 12 * k);
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, 42 * MiB); // the peak before the reset
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, 12 * MiB);
    CHECK_EQ(peak(), 12 * k);
    CHECK_EQ(rig.allocator->take_allocated_peak(1).most, std::size_t{0});
    CHECK_THROWS(InvalidArgument, rig.allocator->take_allocated_peak(2));
    rig.allocator->free(kept);
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, 12 * MiB);
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, std::size_t{0});
  });
}

TEST(allocations_and_frees_change_the_count_of_changes) {
  on_each([](Rig& rig) {
    CachingManagedAllocator& allocator = *rig.allocator;
    const auto changed = [&] { return allocator.take_allocated_peak(0).changes != allocator.allocation_changes(0); };
    CHECK(!changed());
    const std::uint64_t before = allocator.allocation_changes(0);
    Block* const block = rig.allocate(12 * MiB);
    CHECK(allocator.allocation_changes(0) != before);
    const CachingManagedAllocator::AllocatedPeak peak = allocator.take_allocated_peak(0);
    CHECK_EQ(peak.now, 12 * MiB);
    CHECK_EQ(peak.changes, allocator.allocation_changes(0));
    allocator.reset_peak_statistics(kDevice); // a reset of statistics allocates nothing
    CHECK_EQ(peak.changes, allocator.allocation_changes(0));
    allocator.free(block);
    CHECK(allocator.allocation_changes(0) != peak.changes);
    CHECK_EQ(allocator.take_allocated_peak(0).now, std::size_t{0});
    CHECK(!changed());
    CHECK_EQ(allocator.allocation_changes(1), std::uint64_t{0});
  });
}

HARNESS_MAIN()
