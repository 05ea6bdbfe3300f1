// Hints of CudaRuntime: prefetch, advice and discard, the attributes of a range, and machines that take no hints.
#include <vector>

#include "cuda_rig.h"

using namespace contract;
using namespace cuda_rig;

TEST(range_attributes_distinguish_unset_from_mixed) {
  const auto runtime = made();
  constexpr std::size_t kBytes = 16 * MiB;
  auto* const ptr = static_cast<char*>(runtime->allocate_managed(kBytes, kDevice));
  const auto uniform = [&] { return runtime->range_attributes(ptr, kBytes).uniform; };
  CHECK(uniform()); // never prefetched
  const std::size_t asked = fake_cuda_count("cudaMemRangeGetAttributes");
  CHECK_EQ(asked, std::size_t{1});
  runtime->prefetch(ptr + 4 * MiB, 2 * MiB, Location::device(1), kStream); // a part in the middle
  CHECK(!uniform());
  CHECK(!runtime->range_attributes(ptr, kBytes).last_prefetch);
  CHECK(runtime->range_attributes(ptr, 4 * MiB).uniform);
  CHECK_EQ(runtime->range_attributes(ptr + 4 * MiB, 2 * MiB).last_prefetch->index, 1);
  runtime->prefetch(ptr, kBytes, Location::host(), kStream);
  CHECK(uniform());
  CHECK(runtime->range_attributes(ptr, kBytes).last_prefetch->is_host());
  runtime->advise(ptr, 2 * MiB, Advice::kSetReadMostly, kDevice);
  CHECK(!uniform());
  runtime->advise(ptr, kBytes, Advice::kSetReadMostly, kDevice);
  CHECK(uniform());
  CHECK(runtime->range_attributes(ptr, kBytes).read_mostly);
  runtime->advise(ptr, kBytes, Advice::kSetPreferredLocation, Location::host());
  runtime->advise(ptr, kBytes, Advice::kSetAccessedBy, Location::device(1));
  runtime->advise(ptr, kBytes, Advice::kSetAccessedBy, kDevice);
  const RangeAttributes all = runtime->range_attributes(ptr, kBytes);
  CHECK(all.uniform && all.preferred_location->is_host());
  CHECK(all.accessed_by == (std::vector{Location::device(0), Location::device(1)}));
  runtime->advise(ptr + kBytes - 2 * MiB, 2 * MiB, Advice::kUnsetAccessedBy, kDevice);
  CHECK(!uniform());
  runtime->advise(ptr, kBytes, Advice::kUnsetAccessedBy, kDevice);
  runtime->advise(ptr, kBytes, Advice::kUnsetReadMostly, kDevice);
  runtime->advise(ptr, kBytes, Advice::kUnsetPreferredLocation, kDevice);
  CHECK(uniform());
  runtime->free_managed(ptr);
  all_is_well();
}

TEST(a_discard_moves_the_pages_to_the_next_writer) {
  const auto runtime = made();
  constexpr std::size_t kBytes = 8 * MiB;
  auto* const ptr = static_cast<char*>(runtime->allocate_managed(kBytes, kDevice));
  const Stream side = runtime->create_stream(0, 0);
  for (const Stream stream : {kStream, side}) { // a discard on the default stream uses an intermediate stream
    runtime->discard_before(Location::host(), ptr, 4 * MiB, stream);
    CHECK(runtime->range_attributes(ptr, 4 * MiB).last_prefetch->is_host());
    CHECK(!runtime->range_attributes(ptr, kBytes).uniform);
    runtime->discard(ptr, kBytes, stream);
    CHECK_EQ(runtime->range_attributes(ptr, kBytes).last_prefetch->index, 0);
  }
  runtime->discard_before(Location::device(1), ptr, kBytes, side);
  CHECK_EQ(runtime->range_attributes(ptr, kBytes).last_prefetch->index, 1);
  CHECK_EQ(fake_cuda_count("cudaMemDiscardAndPrefetchBatchAsync"), std::size_t{5});
  // a plain discard could drop writes that come later
  CHECK_EQ(fake_cuda_count("cudaMemDiscardBatchAsync"), std::size_t{0});
  CHECK_THROWS(InvalidArgument, runtime->discard_before(Location::device(2), ptr, kBytes, side));
  CHECK_THROWS(InvalidArgument, runtime->discard(ptr, kBytes, Stream::host()));
  // The default stream waits for the intermediate stream, which has already been destroyed.
  fake_cuda_hold(1);
  runtime->discard(ptr, kBytes, kStream);
  CHECK(!runtime->query_stream(kStream));
  fake_cuda_hold(0);
  runtime->synchronize_stream(kStream);
  fake_cuda_fail("cudaMemDiscardAndPrefetchBatchAsync", 1, cudaErrorUnknown);
  CHECK_THROWS(RuntimeFailure, runtime->discard(ptr, kBytes, kStream));
  runtime->destroy_stream(side);
  runtime->free_managed(ptr);
  all_is_well();
}

TEST(read_mostly_is_unset_although_the_first_page_does_not_have_it) {
  const auto runtime = made();
  char* const ptr = static_cast<char*>(runtime->allocate_managed(8 * MiB, kDevice));
  runtime->advise(ptr + 4 * MiB, 4 * MiB, Advice::kSetReadMostly, kDevice);
  runtime->advise(ptr + 2 * MiB, 6 * MiB, Advice::kUnsetReadMostly, kDevice);
  const RangeAttributes last = runtime->range_attributes(ptr + 6 * MiB, 2 * MiB);
  CHECK(last.uniform && !last.read_mostly);
  runtime->free_managed(ptr);
  all_is_well();
}

TEST(without_concurrent_access_there_are_no_hints) {
  const auto runtime = made({.concurrent = false});
  CHECK(!runtime->device_properties(0).concurrent_managed_access);
  void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
  runtime->prefetch(ptr, 4 * MiB, kDevice, kStream);
  runtime->advise(ptr, 4 * MiB, Advice::kSetAccessedBy, Location::host());
  runtime->discard(ptr, 4 * MiB, kStream);
  CHECK(runtime->range_attributes(ptr, 4 * MiB).uniform);
  runtime->free_managed(ptr);
  all_is_well();
}

TEST(memory_that_host_and_device_share_is_not_prefetched) {
  for (const char* profile : {"gb10", "gh200"}) {
    const auto runtime = made({.profile = profile});
    const DeviceProperties properties = runtime->device_properties(0);
    CHECK(properties.one_memory() && properties.pageable_memory_access && properties.host_page_tables);
    CHECK_EQ(properties.integrated, std::string(profile) == "gb10");
    void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
    runtime->prefetch(ptr, 4 * MiB, kDevice, kStream);
    runtime->prefetch(ptr, 4 * MiB, Location::host(), kStream);
    runtime->discard(ptr, 4 * MiB, kStream);
    CHECK_EQ(fake_cuda_count("cudaMemPrefetchAsync") + fake_cuda_count("cudaMemDiscardAndPrefetchBatchAsync"),
             std::size_t{0});
    runtime->free_managed(ptr);
    all_is_well();
  }
}

TEST(an_allocator_over_shared_memory_does_not_populate) {
  for (const char* profile : {"h200", "gb10", "gh200"}) {
    const auto runtime = made({.profile = profile});
    CachingManagedAllocator allocator(*runtime, std::make_unique<ManagedSegmentSource>(*runtime), {});
    allocator.free(allocator.allocate(4 * MiB, kDevice, kStream));
    CHECK_EQ(fake_cuda_count("cudaMemPrefetchAsync"), std::size_t{std::string(profile) == "h200"});
    allocator.empty_cache();
    all_is_well();
  }
}

HARNESS_MAIN()
