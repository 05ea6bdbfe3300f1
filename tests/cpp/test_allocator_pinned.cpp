// Segments of pinned host memory: stream order, their limit, forks.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "fork_helpers.h"
#include "room_helpers.h"

using namespace contract;

namespace {

struct Pinned {
  explicit Pinned(std::unique_ptr<ManagedRuntime> made, std::optional<std::size_t> limit = std::nullopt)
      : runtime(std::move(made)) {
    auto owned = std::make_unique<PinnedSegmentSource>(*runtime, limit);
    source = owned.get();
    allocator = std::make_unique<CachingManagedAllocator>(*runtime, std::move(owned));
  }
  Block* allocate(std::size_t bytes, Stream stream) {
    return allocator->allocate(bytes, Location::host(), stream);
  }
  std::unique_ptr<ManagedRuntime> runtime;
  PinnedSegmentSource* source = nullptr;
  std::unique_ptr<CachingManagedAllocator> allocator;
};

} // namespace

TEST(pinned_segments_serve_the_host_in_the_order_of_device_streams) {
  Pinned rig(std::make_unique<RecordingRuntime>(2));
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, kDevice, kStream));
  Block* const first = rig.allocate(20 * MiB, kStream);
  CHECK_EQ(rig.source->bytes(), 64 * MiB); // one segment serves many requests
  Block* const second = rig.allocate(3 * MiB, kStream);
  Block* const third = rig.allocate(30 * MiB, kStream);
  CHECK_EQ(calls.count("allocate_pinned"), std::size_t{1});
  CHECK_EQ(calls.count("prefetch"), std::size_t{0});
  const Statistics now = rig.allocator->statistics(Location::host());
  CHECK_EQ(now.allocation[0].current, 3);
  CHECK_EQ(now.reserved_bytes[0].current, static_cast<std::int64_t>(64 * MiB));
  const void* const at = rig.allocator->data(first);
  const Event work = rig.runtime->create_event(0, false);
  calls.hold(kStream);
  rig.runtime->record_event(work, kStream); // the stream may still read or write it
  rig.allocator->free(first);
  calls.clear_calls();
  Block* const again = rig.allocator->try_allocate(20 * MiB, Location::host(), kStream);
  CHECK(rig.allocator->data(again) == at);
  CHECK(calls.calls().empty());
  rig.allocator->free(again);
  Block* const of_host = rig.allocator->try_allocate(20 * MiB, Location::host(), Stream::host());
  CHECK(rig.allocator->data(of_host) != at); // reusing the freed block would require a wait
  CHECK_EQ(calls.count("synchronize_stream"), std::size_t{0});
  CHECK_THROWS(InvalidArgument, rig.allocator->set_home(second, kDevice, kStream));
  for (Block* const block : {second, third, of_host}) {
    rig.allocator->free(block);
  }
  CHECK(!rig.allocator->check());
  rig.runtime->destroy_event(work);
  rig.allocator->empty_cache();
  CHECK_EQ(rig.source->bytes(), std::size_t{0});
}

TEST(the_limit_of_pinned_memory_is_never_exceeded) {
  Pinned rig(std::make_unique<RecordingRuntime>(1), 100 * MiB);
  Block* const first = rig.allocate(50 * MiB, kStream);
  Block* const second = rig.allocate(30 * MiB, kStream); // a segment of 64 MiB does not fit: it gets half of that
  CHECK_EQ(rig.source->bytes(), 96 * MiB);
  CHECK(rig.allocator->try_allocate(20 * MiB, Location::host(), kStream) == nullptr);
  try {
    rig.allocate(20 * MiB, kStream);
    harness::fail(__FILE__, __LINE__, "120 MiB fit in 100");
  } catch (const OutOfMemory& error) {
    CHECK(error.cause == OutOfMemory::Cause::kLimit);
    CHECK(std::string(error.what()).find("limit of pinned host memory is 100.00 MiB") != std::string::npos);
  }
  rig.allocator->free(first);
  Block* const third = rig.allocate(90 * MiB - 30 * MiB, kStream); // the cached segments are released for it
  CHECK(rig.source->bytes() <= 100 * MiB);
  rig.source->set_limit(std::nullopt);
  Block* const fourth = rig.allocate(90 * MiB, kStream);
  rig.source->set_limit(10 * MiB);
  CHECK_EQ(*rig.source->limit(), 10 * MiB);
  CHECK(rig.allocator->try_allocate(90 * MiB, Location::host(), kStream) == nullptr);
  static_cast<RecordingRuntime&>(*rig.runtime).fail("allocate_pinned", 1);
  rig.source->set_limit(std::nullopt);
  const std::size_t before = rig.source->bytes();
  CHECK(rig.allocator->try_allocate(200 * MiB, Location::host(), kStream) != nullptr); // the second attempt succeeds
  CHECK_EQ(rig.source->bytes(), before + 200 * MiB);
  for (Block* const block : {second, third, fourth}) {
    rig.allocator->free(block);
  }
  CHECK(!rig.allocator->check());
}

TEST(delayed_copies_never_write_into_a_reused_pinned_block) {
  constexpr std::size_t kBytes = 256 * KiB;
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    EmulatedConfig config;
    config.schedule_seed = seed;
    Pinned rig(std::make_unique<EmulatedRuntime>(config));
    std::array<Stream, 2> streams{rig.runtime->create_stream(0, 0), rig.runtime->create_stream(0, 0)};
    std::array<char*, 2> letters{};
    for (int i = 0; i < 2; ++i) {
      letters[i] = static_cast<char*>(rig.runtime->allocate_pinned(kBytes));
      std::memset(letters[i], 'a' + i, kBytes);
    }
    // Written back on one stream and freed; the other stream reuses it and waits.
    Block* const first = rig.allocate(kBytes, streams[0]);
    void* const at = rig.allocator->data(first);
    rig.runtime->copy_async(at, letters[0], kBytes, streams[0]);
    rig.allocator->free(first);
    Block* const second = rig.allocate(kBytes, streams[1]);
    CHECK(rig.allocator->data(second) == at);
    rig.runtime->copy_async(at, letters[1], kBytes, streams[1]);
    rig.runtime->synchronize_device(0);
    CHECK(std::all_of(static_cast<char*>(at), static_cast<char*>(at) + kBytes, [](char byte) { return byte == 'b'; }));
    rig.allocator->free(second);
    for (int i = 0; i < 2; ++i) {
      rig.runtime->free_pinned(letters[i]);
    }
    rig.allocator.reset();
    for (const Stream stream : streams) {
      rig.runtime->destroy_stream(stream);
    }
  }
}

TEST(blocks_that_grow_find_room_in_the_segments_of_smaller_ones) {
  Pinned rig(std::make_unique<RecordingRuntime>(1));
  std::array<Block*, 24> blocks{};
  std::size_t live = 0;
  for (std::size_t step = 0; step < 300; ++step) {
    live = 0;
    for (Block*& block : blocks) {
      if (block != nullptr) {
        rig.allocator->free(block);
      }
      block = rig.allocate(128 * MiB + step * 64 * KiB, kStream);
      live += rig.allocator->bytes(block);
    }
  }
  CHECK(rig.source->bytes() <= 2 * live); // in segments of their own size it would be more than ten times as much
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
}

TEST(a_fork_leaves_pinned_memory_alone) {
  Pinned rig(std::make_unique<RecordingRuntime>(1));
  Block* const block = rig.allocate(3 * MiB, Stream::host());
  std::memset(rig.allocator->data(block), 1, 3 * MiB);
  rig.allocator->set_cap(0, 64 * MiB);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  calls.clear_calls();
  const int code = in_child(*rig.allocator, [&] {
    try {
      rig.allocator->try_allocate(100, Location::host(), Stream::host());
      return 1;
    } catch (const RuntimeFailure&) {
    }
    rig.allocator->set_cap(0, 1);
    rig.allocator->free(block);
    return !rig.allocator->check() && calls.calls().empty() ? 0 : 2;
  });
  CHECK_EQ(code, 0);
  CHECK(calls.calls().empty());
  CHECK_EQ(static_cast<char*>(rig.allocator->data(block))[3 * MiB - 1], 1);
  rig.allocator->free(block);
  CHECK(!rig.allocator->check());
}

HARNESS_MAIN()
