// Neighbours that slide together: free pieces become one block, and bytes, owners, statistics and the order of streams
// stay right.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "room_helpers.h"

using namespace contract;

namespace {

double if_tagged(void* tag, std::size_t bytes) {
  return tag == nullptr ? kNever : static_cast<double>(bytes);
}

unsigned char content_of(std::size_t index) {
  return static_cast<unsigned char>(index * 37 + 11);
}

/// Blocks that fill a device's only segment. Each has a tag, its index plus one, and bytes of its own.
struct Owners {
  Rig& rig;
  std::vector<Block*> blocks; ///< nullptr: freed

  void add(Block* block) {
    blocks.push_back(block);
    rig.allocator->set_tag(block, tag_of(blocks.size()));
    std::memset(rig.allocator->data(block), content_of(blocks.size() - 1), rig.allocator->requested_bytes(block));
  }
  void free(std::size_t index) {
    rig.allocator->free(blocks[index]);
    blocks[index] = nullptr;
  }
  /// Carries out one step; the copy is immediate.
  void slide(const CachingManagedAllocator::Slides::Step& step, Stream stream) {
    Block*& block = blocks[number_of(step.tag) - 1];
    const auto move = rig.allocator->slide(block, step.up, stream);
    CHECK(move.has_value());
    CHECK(move->from == block && move->tag == step.tag);
    rig.check();
    std::memmove(rig.allocator->data(move->to), move->source, rig.allocator->requested_bytes(move->to));
    block = move->to;
    rig.allocator->commit(*move);
    rig.allocator->set_tag(block, step.tag);
    rig.check();
  }
  void check_contents() const {
    for (std::size_t index = 0; index < blocks.size(); ++index) {
      if (blocks[index] != nullptr) {
        const auto* const data = static_cast<const unsigned char*>(rig.allocator->data(blocks[index]));
        const std::size_t size = rig.allocator->requested_bytes(blocks[index]);
        CHECK(std::all_of(data, data + size, [&](unsigned char byte) { return byte == content_of(index); }));
      }
    }
  }
  ~Owners() {
    for (Block* const block : blocks) {
      rig.allocator->free(block);
    }
  }
};

/// Six blocks of 8 MiB in a row, of which the even ones are freed: free, 1, free, 3, free, 5.
void fill_with_gaps(Owners& owners) {
  owners.rig.allocator->set_cap(0, 48 * MiB + kForSmall);
  for (int number = 0; number < 6; ++number) {
    owners.add(owners.rig.allocate(8 * MiB));
  }
  for (const std::size_t index : {0, 2, 4}) {
    owners.free(index);
  }
}

} // namespace

TEST(the_free_pieces_between_neighbours_become_one) {
  on_each([](Rig& rig) {
    Owners owners{rig, {}};
    fill_with_gaps(owners);
    const std::size_t before = rig.allocator->allocated_bytes(kDevice);
    CHECK(rig.allocator->try_allocate(24 * MiB, kDevice, kStream) == nullptr);
    const auto slides = rig.allocator->find_slides(24 * MiB, 0, if_tagged);
    CHECK(slides.has_value());
    CHECK_EQ(slides->steps.size(), std::size_t{2});
    for (const auto& step : slides->steps) {
      owners.slide(step, kStream);
    }
    CHECK(rig.allocator->allocated_bytes(kDevice) == before);
    CHECK(!rig.allocator->find_slides(24 * MiB, 0, if_tagged)); // nothing has to slide any more
    Block* const large = rig.allocator->try_allocate(24 * MiB, kDevice, kStream);
    CHECK(large != nullptr);
    std::memset(rig.allocator->data(large), 0xA5, 24 * MiB);
    owners.check_contents();
    rig.allocator->free(large);
  });
}

TEST(the_range_with_the_fewest_bytes_to_copy_is_chosen) {
  on_each([](Rig& rig) {
    Owners owners{rig, {}};
    rig.allocator->set_cap(0, 192 * MiB + kForSmall);
    for (const std::size_t size : {12, 48, 12, 12, 12, 12, 84}) { // free, 48, free, 12, free, 12, 84
      owners.add(rig.allocate(size * MiB));
    }
    for (const std::size_t index : {0, 2, 4}) {
      owners.free(index);
    }
    const auto slides = rig.allocator->find_slides(24 * MiB, 0, if_tagged);
    CHECK(slides.has_value());
    CHECK_EQ(slides->steps.size(), std::size_t{1});
    CHECK(slides->steps[0].tag == tag_of(4));
  });
}

TEST(a_rolled_back_slide_changes_nothing_for_the_owner) {
  on_each([](Rig& rig) {
    Owners owners{rig, {}};
    fill_with_gaps(owners);
    const Stream taker = rig.stream(), third = rig.stream();
    rig.runtime->synchronize_device(0);
    for (const bool recorded : {false, true}) {
      if (recorded) {
        rig.allocator->record_stream(owners.blocks[3], taker);
        rig.allocator->record_stream(owners.blocks[3], third);
      }
      for (const bool up : {false, true}) {
        Block* const block = owners.blocks[3];
        const std::uintptr_t address = rig.address(block);
        std::vector<Stream> users = rig.allocator->streams(block);
        const std::size_t before = rig.allocator->allocated_bytes(kDevice);
        const auto move = rig.allocator->slide(block, up, taker);
        CHECK(move.has_value());
        CHECK_EQ(reinterpret_cast<std::uintptr_t>(move->source), address);
        CHECK_EQ(rig.address(move->to), up ? address + 8 * MiB : address - 8 * MiB);
        CHECK(rig.allocator->stream(move->to) == taker);
        CHECK(rig.allocator->tag(block) == nullptr);
        rig.check();
        rig.allocator->record_stream(move->to, move->earlier); // as the owner does before it copies
        rig.allocator->roll_back(*move);
        rig.check();
        CHECK_EQ(rig.address(block), address);
        CHECK_EQ(rig.allocator->bytes(block), 8 * MiB);
        CHECK(rig.allocator->tag(block) == tag_of(4));
        std::vector<Stream> now = rig.allocator->streams(block);
        std::ranges::sort(users);
        std::ranges::sort(now);
        CHECK(now == users);
        CHECK(rig.allocator->allocated_bytes(kDevice) == before);
      }
    }
    owners.check_contents();
  });
}

TEST(blocks_that_cannot_move_and_pending_ones_end_a_range) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& runtime = static_cast<RecordingRuntime&>(*rig.runtime);
  Owners owners{rig, {}};
  fill_with_gaps(owners);
  const auto but = [](std::size_t number) {
    return [number](void* tag, std::size_t bytes) { return tag == tag_of(number) ? kNever : if_tagged(tag, bytes); };
  };
  CHECK(!rig.allocator->find_slides(24 * MiB, 0, but(2)));
  CHECK(!rig.allocator->find_slides(24 * MiB, 0, but(4)));
  CHECK(rig.allocator->find_slides(16 * MiB, 0, but(2)).has_value());
  CHECK(!rig.allocator->find_slides(32 * MiB, 0, if_tagged)); // more than is free
  CHECK(!rig.allocator->slide(owners.blocks[5], true, kStream)); // the segment ends there
  const Stream other = rig.stream();
  runtime.hold(other);
  const Event kernel = runtime.create_event(0, false);
  runtime.record_event(kernel, other);
  rig.allocator->record_stream(owners.blocks[3], other);
  owners.free(3); // pending
  CHECK(!rig.allocator->find_slides(16 * MiB + 1, 0, if_tagged));
  // The piece below it is free, and the pending block below that is no part of it.
  const std::uintptr_t address = rig.address(owners.blocks[5]);
  owners.slide({tag_of(6), false}, kStream);
  CHECK_EQ(rig.address(owners.blocks[5]), address - 8 * MiB);
  owners.check_contents();
  rig.check();
  runtime.release(other);
  runtime.destroy_event(kernel);
}

TEST(the_copying_stream_waits_for_earlier_work_on_the_free_pieces) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& runtime = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream earlier = rig.stream(), taker = rig.stream();
  Owners owners{rig, {}};
  rig.allocator->set_cap(0, 32 * MiB + kForSmall);
  for (int number = 0; number < 4; ++number) {
    owners.add(rig.allocate(8 * MiB, number == 0 ? earlier : kStream));
  }
  runtime.hold(earlier);
  const Event kernel = runtime.create_event(0, false);
  runtime.record_event(kernel, earlier);
  owners.free(0);
  owners.free(2);
  // If the wait fails, nothing changes.
  const std::uintptr_t address = rig.address(owners.blocks[1]);
  runtime.fail("wait_event", 1);
  CHECK_THROWS(RuntimeFailure, rig.allocator->slide(owners.blocks[1], false, taker));
  rig.check();
  CHECK_EQ(rig.address(owners.blocks[1]), address);
  CHECK(rig.allocator->tag(owners.blocks[1]) == tag_of(2));
  runtime.clear_calls();
  owners.slide({tag_of(2), false}, taker);
  CHECK(!runtime.query_stream(taker)); // it waits for the kernel
  CHECK_EQ(runtime.count("wait_event"), std::size_t{1});
  runtime.release(earlier);
  CHECK(runtime.query_stream(taker));
  owners.check_contents();
  runtime.destroy_event(kernel);
}

TEST(what_fits_by_bytes_fits_after_slides_on_random_heaps) {
  int slid = 0, several = 0, up = 0;
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), seed % 2 == 0);
    std::mt19937_64 random(seed);
    rig.allocator->set_cap(0, 64 * MiB + kForSmall);
    const Stream other = rig.stream();
    Owners owners{rig, {}};
    const auto some = [&] { return (1 + random() % 64) * 128 * KiB + 1 * MiB; };
    while (Block* const block = rig.allocator->try_allocate(some(), kDevice, random() % 3 == 0 ? other : kStream)) {
      owners.add(block);
    }
    std::vector<std::size_t> order(owners.blocks.size());
    for (std::size_t index = 0; index < order.size(); ++index) {
      order[index] = index;
    }
    std::ranges::shuffle(order, random);
    for (std::size_t freed = 0; freed < order.size() / 2; ++freed) {
      owners.free(order[freed]);
    }
    std::size_t unused = 0;
    for (const SegmentInfo& segment : rig.allocator->snapshot()) {
      unused = std::max(unused, segment.bytes == 64 * MiB ? segment.bytes - segment.active_bytes : 0);
    }
    const Stream taker = random() % 2 == 0 ? other : kStream;
    const std::size_t bytes = unused / (2 * MiB) * (2 * MiB); // all that is free, up to the rounding of requests
    const auto slides = rig.allocator->find_slides(bytes, 0, if_tagged);
    if (slides) {
      for (const auto& step : slides->steps) {
        up += step.up;
        owners.slide(step, taker);
      }
      ++slid;
      several += slides->steps.size() > 1;
    }
    Block* const large = rig.allocator->try_allocate(bytes, kDevice, taker);
    CHECK(large != nullptr);
    std::memset(rig.allocator->data(large), 0xA5, bytes);
    owners.check_contents();
    rig.allocator->free(large);
    rig.check();
  }
  CHECK(slid > 100);
  CHECK(several > 50);
  CHECK(up > 50);
}

HARNESS_MAIN()
