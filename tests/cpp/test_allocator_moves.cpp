// Relocation of blocks for a large request: either all of them find a place, or nothing changes.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "allocator/size_classes.h"
#include "room_helpers.h"

using namespace contract;

namespace {

double by_size(void* tag, std::size_t bytes) {
  return tag == nullptr ? kNever : static_cast<double>(bytes);
}

} // namespace

TEST(the_smallest_neighbours_are_relocated) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB + kForSmall);
    std::vector<Block*> blocks;
    for (std::size_t i = 0; i < 8; ++i) {
      blocks.push_back(rig.allocate(8 * MiB));
      rig.allocator->set_tag(blocks[i], tag_of(i + 1));
    }
    rig.allocator->free(blocks[1]);
    rig.allocator->free(blocks[6]);
    CHECK(
        // both blocks would need a place, and there is one
        rig.allocator->reserve_moves(24 * MiB, 0, kStream, by_size, agree).empty());
    rig.check();
    const std::size_t before = rig.allocator->allocated_bytes(kDevice);
    const auto moves = rig.allocator->reserve_moves(16 * MiB, 0, kStream, by_size, agree);
    CHECK_EQ(moves.size(), std::size_t{1});
    const std::size_t moved = number_of(moves[0].tag) - 1;
    CHECK(moves[0].from == blocks[moved]);
    CHECK(rig.allocator->allocated_bytes(kDevice) == before);
    CHECK(rig.allocator->tag(moves[0].from) == nullptr);
    rig.check();
    blocks[moved] = moves[0].to;
    rig.allocator->commit(moves[0]);
    rig.check();
    Block* const large = rig.allocator->try_allocate(16 * MiB, kDevice, kStream);
    CHECK(large != nullptr);
    rig.allocator->free(large);
    for (const std::size_t i : {0, 2, 3, 4, 5, 7}) {
      rig.allocator->free(blocks[i]);
    }
    rig.check();
  });
}

TEST(unmovable_blocks_keep_their_places) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 32 * MiB + kForSmall);
    std::vector<Block*> blocks;
    for (std::size_t i = 0; i < 4; ++i) {
      blocks.push_back(rig.allocate(8 * MiB));
      rig.allocator->set_tag(blocks[i], tag_of(i + 1));
    }
    rig.allocator->free(blocks[0]);
    rig.allocator->free(blocks[2]);
    const auto none = [](void*, std::size_t) { return kNever; };
    CHECK(rig.allocator->reserve_moves(16 * MiB, 0, kStream, none, agree).empty());
    rig.check();
    // A rollback restores the tag and the allocated bytes.
    const auto moves = rig.allocator->reserve_moves(16 * MiB, 0, kStream, by_size, agree);
    CHECK_EQ(moves.size(), std::size_t{1});
    rig.allocator->roll_back(moves[0]);
    CHECK(rig.allocator->tag(moves[0].from) == moves[0].tag);
    rig.check();
    CHECK(rig.allocator->try_allocate(16 * MiB, kDevice, kStream) == nullptr);
    rig.allocator->free(blocks[1]);
    rig.allocator->free(blocks[3]);
    rig.check();
  });
}

TEST(a_rollback_restores_the_recorded_use_of_the_requesting_stream) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 32 * MiB + kForSmall);
    const Stream taker = rig.stream(), third = rig.stream();
    std::vector<Block*> blocks;
    for (std::size_t i = 0; i < 4; ++i) {
      blocks.push_back(rig.allocate(8 * MiB));
      rig.allocator->set_tag(blocks[i], tag_of(i + 1));
      rig.allocator->record_stream(blocks[i], taker);
      rig.allocator->record_stream(blocks[i], third);
    }
    rig.allocator->free(blocks[0]);
    rig.allocator->free(blocks[2]);
    rig.runtime->synchronize_device(0);
    for (const bool leaves : {false, true}) {
      const auto moves = rig.allocator->reserve_moves(16 * MiB, 0, taker, by_size, agree);
      CHECK_EQ(moves.size(), std::size_t{1});
      rig.check();
      Block*& moved = blocks[number_of(moves[0].tag) - 1];
      if (leaves) {
        moved = moves[0].to;
        rig.allocator->commit(moves[0]);
        CHECK(rig.allocator->streams(moved) == std::vector<Stream>({taker, third}));
      } else {
        rig.allocator->record_stream(moves[0].to, kStream); // as the owner does before it copies
        rig.allocator->roll_back(moves[0]);
        std::vector<Stream> users = rig.allocator->streams(moved);
        std::ranges::sort(users);
        std::vector<Stream> all{kStream, taker, third};
        std::ranges::sort(all);
        CHECK(users == all);
      }
      rig.check();
    }
    rig.allocator->free(blocks[1]);
    rig.allocator->free(blocks[3]);
    rig.check();
  });
}

TEST(a_range_of_exactly_the_requested_size_leaves_no_empty_block) {
  int moved = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), false);
    std::mt19937_64 random(seed);
    rig.allocator->set_cap(0, 96 * MiB);
    const auto some = [&] { return (1 + random() % 4) * 2 * MiB; };
    std::vector<Block*> blocks;
    while (Block* const block = rig.allocator->try_allocate(some(), kDevice, kStream)) {
      blocks.push_back(block);
    }
    for (int turn = 0; turn < 8; ++turn) {
      for (int freed = 0; freed < 3 && !blocks.empty(); ++freed) {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        rig.allocator->free(blocks.back());
        blocks.pop_back();
      }
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        rig.allocator->set_tag(blocks[i], tag_of(i + 1));
      }
      const auto moves = rig.allocator->reserve_moves(some() + some(), 0, kStream, by_size, agree);
      rig.check();
      for (const auto& move : moves) {
        blocks[number_of(move.tag) - 1] = move.to;
        rig.allocator->commit(move);
        rig.check();
      }
      moved += !moves.empty();
      while (Block* const block = turn % 2 == 0 ? rig.allocator->try_allocate(some(), kDevice, kStream) : nullptr) {
        blocks.push_back(block);
      }
      rig.check();
    }
    for (Block* const block : blocks) {
      rig.allocator->free(block);
    }
    rig.check();
  }
  CHECK(moved > 200);
}

TEST(relocations_make_the_request_fit_on_random_heaps) {
  int fitted = 0, several = 0;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), false);
    std::mt19937_64 random(seed);
    rig.allocator->set_cap(0, 96 * MiB);
    const Stream other = rig.stream();
    std::vector<Block*> blocks;
    while (Block* const block =
               rig.allocator->try_allocate(1 + random() % (8 * MiB), kDevice, random() % 3 == 0 ? other : kStream)) {
      blocks.push_back(block);
    }
    std::ranges::shuffle(blocks, random);
    for (std::size_t freed = blocks.size() / 3; freed > 0; --freed) {
      rig.allocator->free(blocks.back());
      blocks.pop_back();
    }
    std::vector<unsigned char> contents;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      rig.allocator->set_tag(blocks[i], tag_of(i + 1));
      contents.push_back(static_cast<unsigned char>(random()));
      std::memset(rig.allocator->data(blocks[i]), contents[i], rig.allocator->requested_bytes(blocks[i]));
    }
    const std::size_t bytes = 8 * MiB + random() % (16 * MiB);
    const Stream taker = random() % 2 == 0 ? other : kStream;
    const bool fits = rig.allocator->min_cost_range(bytes, 0, [](void*, std::size_t) { return 1.0; })->empty();
    const auto moves = rig.allocator->reserve_moves(bytes, 0, taker, by_size, agree);
    rig.check();
    for (const auto& move : moves) {
      const std::size_t owner = number_of(move.tag) - 1;
      CHECK(blocks[owner] == move.from);
      CHECK(rig.allocator->bytes(move.to) >= rig.allocator->requested_bytes(move.to));
      std::memcpy(rig.allocator->data(move.to), rig.allocator->data(move.from),
                  rig.allocator->requested_bytes(move.to));
      blocks[owner] = move.to;
      CHECK(rig.allocator->stream(move.to) == taker);
      rig.allocator->commit(move);
      rig.check();
    }
    if (!moves.empty() && !fits) {
      Block* const large = rig.allocator->try_allocate(bytes, kDevice, taker);
      CHECK(large != nullptr);
      std::memset(rig.allocator->data(large), 0xA5, bytes);
      rig.allocator->free(large);
      ++fitted;
      several += moves.size() > 1;
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const auto* const data = static_cast<unsigned char*>(rig.allocator->data(blocks[i]));
      const std::size_t size = rig.allocator->requested_bytes(blocks[i]);
      CHECK(std::all_of(data, data + size, [&](unsigned char byte) { return byte == contents[i]; }));
      rig.allocator->free(blocks[i]);
    }
    rig.check();
  }
  CHECK(fitted > 20);
  CHECK(several > 10);
}

HARNESS_MAIN()

TEST(a_block_whose_owner_refuses_stays_and_others_are_relocated) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB + kForSmall);
    std::vector<Block*> blocks;
    for (std::size_t i = 0; i < 8; ++i) {
      blocks.push_back(rig.allocate(8 * MiB));
      rig.allocator->set_tag(blocks[i], tag_of(i + 1));
    }
    for (const std::size_t i : {1, 4, 6}) {
      rig.allocator->free(blocks[i]);
    }
    std::vector<std::size_t> asked;
    const auto refuse = [&](void* tag) {
      // The callback runs before any change: the owner may free the block at this moment, and reads the tag first.
      CHECK(rig.allocator->tag(blocks[number_of(tag) - 1]) == tag);
      asked.push_back(number_of(tag));
      return false;
    };
    CHECK(rig.allocator->reserve_moves(16 * MiB, 0, kStream, by_size, refuse).empty());
    CHECK(!asked.empty());
    rig.check();
    const std::size_t first = asked.front();
    const auto all_but_first = [&](void* tag) { return number_of(tag) != first; };
    const auto moves = rig.allocator->reserve_moves(16 * MiB, 0, kStream, by_size, all_but_first);
    CHECK_EQ(moves.size(), std::size_t{1});
    CHECK(number_of(moves[0].tag) != first);
    CHECK(rig.allocator->tag(blocks[first - 1]) == tag_of(first));
    blocks[number_of(moves[0].tag) - 1] = moves[0].to;
    rig.allocator->commit(moves[0]);
    for (const std::size_t i : {0, 2, 3, 5, 7}) {
      rig.allocator->free(blocks[i]);
    }
    rig.check();
  });
}
