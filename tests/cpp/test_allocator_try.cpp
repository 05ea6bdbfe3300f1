// try_allocate never waits, never calls the memory-pressure callback, and releases cached segments only if that is
// sufficient.
#include <string>
#include <vector>

#include "room_helpers.h"

using namespace contract;

TEST(try_allocate_never_waits_and_never_calls_back) {
  struct Callback final : PressureCallback {
    bool make_room(std::size_t, Location, Stream) override {
      ++asked;
      return false;
    }
    int asked = 0;
  } callback;
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream a = rig.stream(), b = rig.stream();
  rig.allocator->set_pressure_callback(&callback);
  rig.runtime->set_limit(64 * MiB);
  Block* const shared = rig.allocate(20 * MiB, a);
  Block* const host = rig.allocate(20 * MiB, a);
  rig.allocator->set_home(host, Location::host(), a);
  rig.allocator->record_stream(shared, b);
  for (const Stream stream : {a, b}) {
    calls.hold(stream);
    rig.runtime->prefetch(rig.allocator->data(host), 20 * MiB, kDevice, stream);
  }
  rig.allocator->free(shared); // pending
  rig.allocator->free(host); // reusing it, the host would have to wait for `a`
  CHECK(rig.allocator->try_allocate(20 * MiB, Location::host(), Stream::host()) != nullptr); // the limit leaves 24 MiB
  CHECK(rig.allocator->try_allocate(20 * MiB, Location::host(), Stream::host()) == nullptr);
  CHECK(rig.allocator->try_allocate(64 * MiB, kDevice, a) == nullptr);
  CHECK(rig.allocator->try_allocate(~std::size_t{0}, kDevice, a) == nullptr);
  CHECK(rig.allocator->try_allocate(0, kDevice, a) == nullptr);
  CHECK_THROWS(InvalidArgument, rig.allocator->try_allocate(1, Location::device(1), a));
  CHECK_THROWS(InvalidArgument, rig.allocator->try_allocate(1, kDevice, Stream{1, nullptr}));
  for (const RecordedCall& call : calls.calls()) {
    CHECK(!call.name.starts_with("synchronize"));
  }
  CHECK_EQ(callback.asked, 0);
  CHECK_EQ(rig.allocator->statistics().num_ooms, 0);
  CHECK_EQ(rig.allocator->statistics().num_host_waits, 0);
  rig.check();
  calls.release(a);
  Block* const now = rig.allocator->try_allocate(20 * MiB, Location::host(), Stream::host());
  CHECK(now != nullptr); // `a` is idle
  rig.allocator->free(now);
  for (const SegmentInfo& segment : rig.allocator->snapshot()) {
    for (const BlockInfo& block : segment.blocks) {
      if (block.state == BlockInfo::State::kAllocated) {
        rig.allocator->free(rig.allocator->find(reinterpret_cast<const void*>(block.address)));
      }
    }
  }
}

TEST(try_allocate_releases_cached_segments_only_without_queued_work) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream a = rig.stream();
  std::vector<Block*> blocks;
  for (const std::size_t bytes : {16 * MiB, 20 * MiB, 24 * MiB}) {
    blocks.push_back(rig.allocate(bytes, a));
  }
  rig.allocator->set_cap(0, 60 * MiB);
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
  const Event work = rig.runtime->create_event(0, false);
  calls.hold(a);
  rig.runtime->record_event(work, a);
  CHECK(rig.allocator->try_allocate(40 * MiB, kDevice, a) == nullptr); // releasing a segment would wait for `a`
  CHECK_EQ(calls.count("free_device"), std::size_t{0});
  calls.release(a);
  // releasing all would not be sufficient: none is released
  CHECK(rig.allocator->try_allocate(62 * MiB, kDevice, a) == nullptr);
  CHECK_EQ(calls.count("free_device"), std::size_t{0});
  Block* const block = rig.allocator->try_allocate(40 * MiB, kDevice, a);
  CHECK(block != nullptr);
  CHECK_EQ(calls.count("free_device"), std::size_t{2}); // the two largest are sufficient
  rig.allocator->free(block);
  rig.check();
  rig.runtime->destroy_event(work);
}

HARNESS_MAIN()
