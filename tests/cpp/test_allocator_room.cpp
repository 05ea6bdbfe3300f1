// Making room: caps, hand-overs, tags, the cheapest run of neighbours, allocation that only tries, pinned segments.
#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "allocator/size_classes.h"
#include "allocator_rig.h"
#include "fork_helpers.h"
#include "runtime/emulated_runtime.h"
#include "runtime/recording_runtime.h"

using namespace contract;

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

void* tag_of(std::size_t number) {
  return reinterpret_cast<void*>(number);
}
std::size_t number_of(void* tag) {
  return reinterpret_cast<std::uintptr_t>(tag);
}
const auto kFree = [](void*, std::size_t) { return 0.0; };
const auto kByBytes = [](void*, std::size_t bytes) { return static_cast<double>(bytes); };

/// On either runtime, of managed or device memory.
struct Kind {
  const char* name;
  std::function<Rig()> make;
};
std::vector<Kind> kinds() {
  const auto emulated = [](std::optional<std::uint64_t> seed, bool managed) {
    EmulatedConfig config;
    config.devices = 2;
    config.memory = 1 * GiB;
    config.schedule_seed = seed;
    return Rig(std::make_unique<EmulatedRuntime>(config), managed);
  };
  return {{"recording managed", [] { return Rig(std::make_unique<RecordingRuntime>(2), true); }},
          {"recording device", [] { return Rig(std::make_unique<RecordingRuntime>(2), false); }},
          {"emulated managed", [=] { return emulated(std::nullopt, true); }},
          {"emulated device", [=] { return emulated(std::nullopt, false); }},
          {"delayed managed", [=] { return emulated(5, true); }}};
}
/// Runs a body on each of them, and says on which it failed.
void on_each(const std::function<void(Rig&)>& body) {
  for (const Kind& kind : kinds()) {
    try {
      Rig rig = kind.make();
      body(rig);
      rig.check();
    } catch (const harness::Failure& failure) {
      throw harness::Failure(std::string(kind.name) + ": " + failure.what());
    }
  }
}

std::int64_t reserved_on(const Rig& rig, int device = 0) {
  return rig.allocator->statistics(Location::device(device)).reserved_bytes[0].current;
}

} // namespace

// --- caps ---------------------------------------------------------------------------------------------------------

TEST(a_hard_cap_is_named_in_the_refusal_and_never_exceeded) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB, true);
    CHECK_EQ(*rig.allocator->cap(0), 64 * MiB);
    CHECK(!rig.allocator->cap(1));
    Block* const held = rig.allocate(40 * MiB);
    try {
      rig.allocate(40 * MiB);
      harness::fail(__FILE__, __LINE__, "80 MiB fit in 64");
    } catch (const OutOfMemory& error) {
      CHECK(error.cause == OutOfMemory::Cause::kBudget);
      CHECK_EQ(error.bytes, 40 * MiB);
      CHECK(std::string(error.what()).find("budget of device 0 is 64.00 MiB") != std::string::npos);
    }
    rig.check();
    CHECK(reserved_on(rig) <= static_cast<std::int64_t>(64 * MiB));
    Block* const elsewhere = rig.allocate(40 * MiB, Stream::default_of(1)); // has no cap
    rig.allocator->set_cap(0, std::nullopt, true);
    Block* const now = rig.allocate(40 * MiB);
    for (Block* const block : {held, elsewhere, now}) {
      rig.allocator->free(block);
    }
  });
}

TEST(a_soft_cap_is_exceeded_when_nothing_can_be_freed_and_that_is_counted) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB, false);
    Block* const held = rig.allocate(40 * MiB);
    CHECK_EQ(rig.allocator->statistics().num_over_cap, 0);
    Block* const over = rig.allocate(40 * MiB);
    CHECK_EQ(rig.allocator->statistics(kDevice).num_over_cap, 1);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(80 * MiB));
    rig.allocator->free(over);
    rig.allocator->free(held);
    rig.check();
    rig.allocator->set_cap(0, 40 * MiB, false); // caches are given back to get there
    CHECK(reserved_on(rig) <= static_cast<std::int64_t>(40 * MiB));
  });
}

// --- tags and runs ------------------------------------------------------------------------------------------------

TEST(giving_up_the_cheapest_run_makes_the_request_fit) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB, true);
    std::vector<Block*> blocks;
    for (std::size_t i = 0; i < 8; ++i) {
      blocks.push_back(rig.allocate(8 * MiB));
      CHECK(rig.allocator->tag(blocks[i]) == nullptr);
      rig.allocator->set_tag(blocks[i], tag_of(i + 1));
    }
    CHECK(rig.allocator->try_allocate(16 * MiB, kDevice, kStream) == nullptr);
    const auto run = rig.allocator->cheapest_run(16 * MiB, 0, [&](void* tag, std::size_t bytes) {
      CHECK_EQ(bytes, 8 * MiB);
      const std::size_t i = number_of(tag);
      return i == 4 ? kNever : i <= 4 ? 3.0 : i == 6 ? 1.0 : 2.0;
    });
    CHECK(run.has_value());
    CHECK_EQ(run->size(), std::size_t{2});
    for (void* const tag : *run) {
      rig.allocator->free(std::exchange(blocks[number_of(tag) - 1], nullptr));
    }
    Block* const block = rig.allocator->try_allocate(16 * MiB, kDevice, kStream);
    CHECK(block != nullptr);
    CHECK(rig.allocator->tag(block) == nullptr);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(64 * MiB));
    rig.allocator->free(block);
    CHECK(rig.allocator->cheapest_run(16 * MiB, 0, kByBytes)->empty()); // free already
    CHECK(!rig.allocator->cheapest_run(80 * MiB, 0, kFree)); // more than the cap
    for (Block* const left : blocks) {
      rig.allocator->free(left);
    }
  });
}

TEST(pinned_segments_serve_the_host_in_the_order_of_device_streams) {
  auto made = std::make_unique<RecordingRuntime>(2);
  RecordingRuntime& runtime = *made;
  auto source = std::make_unique<PinnedSegmentSource>(runtime, 128 * MiB);
  PinnedSegmentSource& pinned = *source;
  CachingManagedAllocator allocator(runtime, std::move(source));
  CHECK_THROWS(InvalidArgument, allocator.allocate(1, kDevice, kStream));
  Block* const first = allocator.allocate(20 * MiB, Location::host(), kStream);
  CHECK_EQ(pinned.bytes(), 64 * MiB);
  const void* const at = allocator.data(first);
  runtime.hold(kStream);
  allocator.free(first);
  runtime.clear_calls();
  Block* const again = allocator.try_allocate(20 * MiB, Location::host(), kStream);
  CHECK(allocator.data(again) == at);
  CHECK(runtime.calls().empty());
  allocator.free(again);
  CHECK_THROWS(OutOfMemory, allocator.allocate(200 * MiB, Location::host(), kStream));
  CHECK(allocator.is_valid());
}

HARNESS_MAIN()
