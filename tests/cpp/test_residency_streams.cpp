// The streams that a storage was allocated on and recorded for stay known to the allocator when the engine moves it:
// its memory is not reused before their work is done, even if the engine did not see that work.
#include <algorithm>

#include "residency_rig.h"

namespace {

using namespace residency;

bool knows(const Rig& rig, const Storage& storage, Stream stream) {
  const std::vector<Stream> streams = rig.memory.streams(storage.block);
  return std::ranges::find(streams, stream) != streams.end();
}

/// Uses the storage on a stream.
template <typename Runtime>
void use_on(RigOn<Runtime>& rig, Storage& storage, Stream stream) {
  Engine::Frame frame;
  frame.key = 90;
  {
    const Engine::Lock lock(rig.engine);
    const std::vector<Engine::Operand> operands{{storage.record, false}};
    rig.engine.begin(frame, {frame.key, "test", false, false, false}, operands, {stream});
  }
  Rig::check(storage);
  const Engine::Lock lock(rig.engine);
  rig.engine.end(frame);
}

/// Evicts the storage by operators on others.
template <typename Runtime>
void evict(RigOn<Runtime>& rig, Storage& storage) {
  train(rig, 8, 0);
  for (std::size_t index = 1; index < rig.storages.size() && storage.block != nullptr; ++index) {
    rig.run(40 + index, {rig.storages[index].get()}, true, [] {});
  }
  CHECK(storage.block == nullptr);
}

TEST(a_fetched_storage_belongs_to_its_streams) {
  Rig rig;
  const Stream second = rig.runtime.create_stream(0, 0), third = rig.runtime.create_stream(0, 0);
  Storage& storage = rig.make(1);
  rig.memory.record_stream(storage.block, third);
  evict(rig, storage);
  use_on(rig, storage, second);
  CHECK(storage.block != nullptr);
  for (const Stream stream : {kStream, second, third}) {
    CHECK(knows(rig, storage, stream));
  }
  evict(rig, storage);
  use_on(rig, storage, third);
  for (const Stream stream : {kStream, second, third}) {
    CHECK(knows(rig, storage, stream));
  }
}

TEST(a_storage_that_is_used_on_one_stream_is_filed_under_it_alone) {
  Rig rig;
  Storage& storage = rig.make(1);
  evict(rig, storage);
  use_on(rig, storage, kStream);
  CHECK(rig.memory.streams(storage.block) == std::vector<Stream>{kStream});
}

TEST(without_a_budget_a_storage_is_filed_under_its_own_stream_again) {
  Rig rig;
  const Stream second = rig.runtime.create_stream(0, 0);
  Storage& storage = rig.make(1);
  rig.memory.record_stream(storage.block, second);
  evict(rig, storage);
  rig.engine.set_budget(0, std::nullopt);
  CHECK(storage.block != nullptr);
  CHECK(rig.memory.stream(storage.block) == kStream);
  CHECK(knows(rig, storage, second));
  CHECK_EQ(rig.memory.streams(storage.block).size(), std::size_t{2});
}

TEST(a_storage_moved_within_the_device_belongs_to_its_stream) {
  Rig rig;
  const Stream second = rig.runtime.create_stream(0, 0);
  for (unsigned char number = 1; number <= 4; ++number) {
    rig.make(number);
  }
  rig.free(*rig.storages[1]);
  rig.free(*rig.storages[3]);
  Block* const large = rig.memory.allocate(2 * kBytes, Location::device(0), second); // half is free, in two pieces
  CHECK_EQ(rig.engine.statistics().moved.count, 1);
  for (const std::size_t index : {0, 2}) {
    CHECK(rig.storages[index]->block != nullptr);
    CHECK(knows(rig, *rig.storages[index], kStream));
  }
  rig.memory.free(large);
}

/// A stream has work, and no event is reached when the host asks. Notes on which streams events are recorded and waited
/// for.
class BusyDevice final : public RecordingRuntime {
 public:
  bool query_stream(Stream stream) override {
    return stream != busy && RecordingRuntime::query_stream(stream);
  }
  bool query_event(Event /*event*/) override {
    return false;
  }
  void record_event(Event event, Stream stream) override {
    RecordingRuntime::record_event(event, stream);
    recorded.push_back(stream);
  }
  void wait_event(Stream stream, Event event) override {
    RecordingRuntime::wait_event(stream, event);
    waiting.push_back(stream);
  }
  bool has_recorded(Stream stream) const {
    return std::ranges::find(recorded, stream) != recorded.end();
  }

  Stream busy;
  std::vector<Stream> recorded, waiting;
};

/// Code that took the address may have queued a kernel there.
TEST(a_copy_waits_for_the_stream_on_which_the_address_was_taken) {
  RigOn<BusyDevice> rig;
  const Stream second = rig.runtime.create_stream(0, 0);
  rig.runtime.busy = second;
  Storage& storage = rig.make(1);
  rig.engine.materialise(storage.record, second);
  CHECK(!rig.runtime.has_recorded(second));
  evict(rig, storage); // copies out
  CHECK(rig.runtime.has_recorded(second));
  rig.engine.materialise(storage.record, second);
  rig.runtime.recorded.clear();
  use_on(rig, storage, kStream); // copies in
  CHECK(storage.block != nullptr);
  CHECK(rig.runtime.has_recorded(second));
}

TEST(a_stream_that_pins_waits_for_the_fetch) {
  RigOn<BusyDevice> rig;
  const Stream second = rig.runtime.create_stream(0, 0);
  Storage& storage = rig.make(1);
  evict(rig, storage);
  use_on(rig, storage, kStream);
  rig.runtime.waiting.clear();
  const Engine::Lock lock(rig.engine);
  CHECK(rig.engine.pin(storage.record, second));
  CHECK(std::ranges::find(rig.runtime.waiting, second) != rig.runtime.waiting.end());
  rig.engine.unpin(storage.record);
}

/// The release of a segment waits for the streams that use its device.
TEST(an_operand_waits_for_the_release_of_unused_segments) {
  RigOn<BusyDevice> rig;
  const Stream second = rig.runtime.create_stream(0, 0);
  rig.runtime.busy = second;
  rig.engine.set_budget(0, kBudget - 2 * kBytes);
  Storage& storage = rig.make(1, 2 * kBytes);
  std::vector<Block*> blocks;
  for (const std::size_t budget : {kBudget - kBytes, kBudget}) { // each makes room for a segment of kBytes
    rig.engine.set_budget(0, budget);
    blocks.push_back(rig.memory.allocate(kBytes, Location::device(0), second));
  }
  Block* const in_its_place = rig.memory.allocate(kBytes, Location::device(0), second);
  CHECK(storage.block == nullptr);
  for (Block* const block : blocks) {
    rig.memory.free(block);
  }
  use_on(rig, storage, kStream);
  CHECK(storage.block != nullptr);
  CHECK_EQ(rig.engine.statistics().over_budget, 0);
  rig.memory.free(in_its_place);
}

/// Such memory counts as room, as nothing has to leave for it.
TEST(an_operand_waits_for_freed_memory_that_another_stream_still_uses) {
  RigOn<BusyDevice> rig;
  const Stream second = rig.runtime.create_stream(0, 0);
  rig.runtime.busy = second;
  Storage& storage = rig.make(1);
  std::vector<Block*> blocks;
  while (storage.block != nullptr) {
    blocks.push_back(rig.memory.allocate(kBytes, Location::device(0), kStream));
    rig.memory.record_stream(blocks.back(), second);
  }
  for (Block* const block : blocks) {
    rig.memory.free(block);
  }
  use_on(rig, storage, kStream);
  CHECK(storage.block != nullptr);
  CHECK_EQ(rig.engine.statistics().over_budget, 0);
}

} // namespace

HARNESS_MAIN()
