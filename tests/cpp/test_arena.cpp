// The arena: the suite that every Allocator passes, its blocks, resets and scopes, tensors that outlive them, streams,
// threads, forks.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "allocator/arena/arena.h"
#include "allocator_face.h"

using namespace face;

namespace {

constexpr ArenaOptions kSmall{.home = kHome, .initial = 64 * KiB};
constexpr Outlived kNothing{};

Face arena_face(const ArenaOptions& options) {
  return {.make =
              [=](ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream) {
                return std::make_shared<Arena>(runtime, std::move(upstream), options);
              },
          .again = [](Allocator& arena) { static_cast<Arena&>(arena).reset(); }};
}

const bool registered =
    register_face("small", arena_face(kSmall)) &&
    register_face("under_a_cache", {.make =
                                        [](ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream) {
                                          return std::make_shared<CachingAllocator>(
                                              runtime, std::make_shared<Arena>(runtime, std::move(upstream), kSmall));
                                        }}) &&
    register_face("scoped", {.make =
                                 [](ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream) {
                                   auto arena = std::make_shared<Arena>(runtime, std::move(upstream), kSmall);
                                   arena->push();
                                   return arena;
                                 },
                             .again =
                                 [](Allocator& arena) {
                                   static_cast<Arena&>(arena).pop();
                                   static_cast<Arena&>(arena).push();
                                 }});

/// An arena on the recording runtime.
struct ArenaRig : FaceRig {
  explicit ArenaRig(const ArenaOptions& options = kSmall)
      : FaceRig(recording(), arena_face(options), false), arena((make(), static_cast<Arena&>(*allocator))) {
    calls().clear_calls();
  }

  std::int64_t blocks() const { // blocks that the arena owns
    const AllocatorFigures now = arena.figures();
    return now.upstream_allocations - now.upstream_frees;
  }
  std::int64_t reserved() const {
    return arena.figures().reserved_bytes;
  }
  /// Allocates and frees. \return the address
  std::uintptr_t bump(std::size_t bytes = 1, Stream stream = kStream) {
    const Allocation made = allocate(bytes, stream);
    arena.free(made);
    return reinterpret_cast<std::uintptr_t>(made.ptr);
  }

  Arena& arena;
};

std::uintptr_t address(const Allocation& allocation) {
  return reinterpret_cast<std::uintptr_t>(allocation.ptr);
}

} // namespace

TEST(the_suite_is_registered) {
  CHECK(registered);
}

TEST(allocations_are_contiguous) {
  ArenaRig rig;
  const Allocation one = rig.allocate(1), two = rig.allocate(257), three = rig.allocate(256);
  CHECK_EQ(address(two), address(one) + 256);
  CHECK_EQ(address(three), address(two) + 512);
  CHECK_EQ(rig.blocks(), 1);
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(64 * KiB));
  for (const Allocation& allocation : {one, two, three}) {
    rig.arena.free(allocation);
  }
  CHECK_EQ(rig.bump(), address(three) + 256); // a free only counts
}

TEST(blocks_grow_and_fit_the_request) {
  ArenaRig rig;
  const auto kib = [&] { return rig.reserved() / static_cast<std::int64_t>(KiB); };
  rig.bump(40 * KiB);
  CHECK_EQ(kib(), 64);
  rig.bump(40 * KiB);
  rig.bump(40 * KiB);
  CHECK_EQ(kib(), 64 + 64 + 128);
  rig.bump(1000 * KiB);
  CHECK_EQ(kib(), 256 + 1000);
}

TEST(a_refused_block_is_retried_smaller) {
  ArenaRig rig({.home = kHome, .initial = 64 * MiB});
  rig.runtime->set_limit(20 * MiB);
  const Allocation fits = rig.allocate(1 * MiB);
  CHECK(rig.reserved() < static_cast<std::int64_t>(20 * MiB));
  CHECK_THROWS(OutOfMemory, rig.allocate(40 * MiB));
  rig.arena.free(fits);
}

TEST(invalid_options_are_refused) {
  ArenaRig rig;
  const auto make = [&](const ArenaOptions& options, std::shared_ptr<Allocator> upstream) {
    const Arena arena(*rig.runtime, std::move(upstream), options);
  };
  CHECK_THROWS(InvalidArgument, make(kSmall, nullptr));
  CHECK_THROWS(InvalidArgument, make({.home = Location::device(2)}, rig.upstream));
  CHECK_THROWS(InvalidArgument, make({.home = Location{-2}}, rig.upstream));
  CHECK_THROWS(InvalidArgument, make({.home = kHome, .initial = 0}, rig.upstream));
  CHECK_THROWS(InvalidArgument, make({.home = kHome, .initial = ~std::size_t{0}}, rig.upstream));
  CHECK_THROWS(InvalidArgument, rig.arena.allocate(1, Location::device(1), Stream::default_of(1)));
  CHECK_THROWS(InvalidArgument, rig.arena.pop());
  CHECK(rig.arena.serves(kHome) && !rig.arena.serves(Location::host()));
  CHECK_EQ(rig.arena.description(), "arena(caching)");
  ArenaRig host({.home = Location::host()});
  rig.arena.free(Allocation{});
  host.arena.free(host.arena.allocate(1000, Location::host(), Stream::host()));
}

// --- resets and scopes ------------------------------------------------------------------------------------------

TEST(the_second_iteration_makes_no_upstream_call) {
  for (const bool scoped : {false, true}) {
    ArenaRig rig;
    const Stream other = rig.stream();
    const auto iteration = [&] {
      if (scoped) {
        rig.arena.push();
      }
      const std::uintptr_t at = rig.bump();
      for (std::size_t i = 0; i < 300; ++i) {
        rig.bump(1 + i * 40, i % 3 == 0 ? other : kStream);
      }
      CHECK((scoped ? rig.arena.pop() : rig.arena.reset()) == kNothing);
      return at;
    };
    iteration();
    CHECK(rig.arena.figures().upstream_allocations > 3); // several blocks
    const std::uintptr_t at = iteration();
    const std::int64_t asked = rig.arena.figures().upstream_allocations;
    rig.calls().clear_calls();
    for (int turn = 0; turn < 5; ++turn) {
      CHECK_EQ(iteration(), at);
    }
    CHECK_EQ(rig.arena.figures().upstream_allocations, asked);
    CHECK_EQ(rig.calls().calls().size(), std::size_t{0});
  }
}

TEST(an_allocation_that_outlives_its_scope_keeps_its_block) {
  for (const bool scoped : {false, true}) {
    ArenaRig rig;
    rig.arena.push();
    const Allocation kept = rig.allocate(1000), also = rig.allocate(24);
    rig.bump(5000);
    fill(kept, 9);
    CHECK(((scoped ? rig.arena.pop() : rig.arena.reset()) == Outlived{2, 1024}));
    CHECK(rig.arena.reset() == kNothing); // counted once
    const Allocation next = rig.allocate(60 * KiB); // from another block
    fill(next, 1);
    CHECK(!overlap(kept, next));
    CHECK_EQ(rig.blocks(), 2);
    expect_filled(kept, 9);
    rig.arena.free(kept);
    CHECK_EQ(rig.blocks(), 2);
    rig.arena.free(also); // the last allocation of the block
    CHECK_EQ(rig.blocks(), 1);
    rig.arena.free(next);
  }
}

TEST(allocations_that_outlive_each_iteration_do_not_grow_the_arena) {
  ArenaRig rig;
  std::vector<Allocation> losses(4);
  std::int64_t reserved = 0;
  for (int turn = 0; turn < 40; ++turn) {
    rig.arena.push();
    for (Allocation& loss : losses) {
      rig.arena.push();
      for (int i = 0; i < 20; ++i) {
        rig.bump(6000);
      }
      const Allocation next = rig.allocate(4);
      rig.arena.free(std::exchange(loss, next));
      CHECK((rig.arena.pop() == Outlived{1, 4}));
      rig.bump(6000);
    }
    rig.arena.pop();
    if (turn == 4) {
      reserved = rig.arena.figures().peak_reserved_bytes;
    }
  }
  CHECK_EQ(rig.arena.figures().peak_reserved_bytes, reserved);
  for (const Allocation& loss : losses) {
    rig.arena.free(loss);
  }
}

TEST(a_scope_releases_its_own_allocations) {
  ArenaRig rig;
  const Allocation before = rig.allocate(1000);
  fill(before, 1);
  rig.arena.push();
  const Allocation outer = rig.allocate(3000);
  fill(outer, 2);
  std::uintptr_t inside = 0;
  for (int turn = 0; turn < 3; ++turn) {
    rig.arena.push();
    const std::uintptr_t at = rig.bump(7000);
    CHECK(turn == 0 || at == inside);
    inside = at;
    CHECK(rig.arena.pop() == kNothing);
  }
  const std::uintptr_t next = rig.bump();
  CHECK_EQ(next, address(outer) + 3072); // the outer scope goes on where it was
  expect_filled(outer, 2);
  rig.arena.free(outer);
  CHECK(rig.arena.reset() == Outlived({1, 1000}));
  CHECK_EQ(rig.bump(), address(outer)); // the scope is still open
  rig.arena.pop();
  expect_filled(before, 1);
  rig.arena.free(before);
  CHECK_THROWS(InvalidArgument, rig.arena.pop());
}

TEST(a_release_frees_unused_blocks) {
  ArenaRig rig;
  rig.bump(40 * KiB);
  const Allocation held = rig.allocate(40 * KiB); // from the second block
  CHECK_EQ(rig.arena.release(), 64 * KiB);
  CHECK_EQ(rig.bump(), address(held) + 40 * KiB);
  rig.arena.free(held);
  rig.bump(60 * KiB);
  CHECK(rig.arena.release() > 64 * KiB);
  CHECK_EQ(rig.arena.release(), std::size_t{0});
  CHECK_EQ(rig.blocks(), 0);
}

TEST(the_upstream_orders_the_reuse_of_what_other_streams_used) {
  for (const bool outlives : {false, true}) {
    ArenaRig rig;
    const Stream a = rig.stream(), b = rig.stream();
    const Allocation own = rig.allocate(100, a), shared = rig.allocate(12 * MiB, a);
    rig.arena.record_stream(own, a);
    rig.arena.record_stream(own, Stream::host());
    rig.arena.record_stream(shared, b);
    rig.arena.free(own);
    rig.calls().hold(b);
    const Event work = rig.mark(b);
    if (!outlives) {
      rig.arena.free(shared);
    }
    CHECK_EQ(rig.arena.reset().allocations, outlives ? 1 : 0);
    if (outlives) {
      rig.arena.free(shared);
    }
    CHECK_EQ(rig.arena.figures().events_recorded, 0);
    expect_reuse_after(rig, work, shared, *rig.allocator, a);
    expect_reuse_after(rig, work, shared, *rig.upstream, a);
  }
}

// --- threads and processes --------------------------------------------------------------------------------------

TEST(a_forked_child_does_not_use_the_arena) {
  ArenaRig rig;
  rig.arena.push();
  const Allocation held = rig.allocate(1000);
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    rig.calls().clear_calls();
    bool refused = false;
    try {
      rig.allocate(10);
    } catch (const RuntimeFailure&) {
      refused = true;
    }
    rig.arena.pop();
    rig.arena.free(held);
    rig.arena.reset();
    rig.arena.release();
    rig.allocator.reset();
    _exit(refused && rig.calls().calls().empty() ? 0 : 1);
  }
  int status = 0;
  CHECK_EQ(waitpid(pid, &status, 0), pid);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  rig.arena.free(held);
}

/// Threads allocate on streams of their own and on a shared one, while another thread resets, opens and ends scopes and
/// releases all the time. Live allocations keep their bytes.
TEST(threads_allocate_while_another_resets) {
  FaceRig rig(emulated_runtime(), arena_face(kSmall), false);
  rig.make();
  auto& arena = static_cast<Arena&>(*rig.allocator);
  const Stream streams[] = {kStream, rig.stream(), Stream::host()};
  std::atomic<std::size_t> running = std::size(streams);
  std::vector<std::string> failures(std::size(streams));
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < std::size(streams); ++i) {
    threads.emplace_back([&, i] {
      try {
        std::vector<std::pair<Allocation, unsigned char>> held;
        for (std::size_t step = 0; step < 2500; ++step) {
          const Stream stream = streams[step % 3 == 0 ? 0 : i];
          held.emplace_back(arena.allocate(1 + (step * 7919 + i) % 3000, kHome, stream),
                            static_cast<unsigned char>(step + i * 85));
          fill(held.back().first, held.back().second);
          if (step % 64 == 5) {
            arena.record_stream(held.back().first, streams[(i + 1) % 2]);
          }
          if (held.size() > step % 40) {
            std::swap(held[step * 31 % held.size()], held.back());
            expect_filled(held.back().first, held.back().second);
            arena.free(held.back().first);
            held.pop_back();
          }
        }
        for (const auto& [allocation, mark] : held) {
          expect_filled(allocation, mark);
          arena.free(allocation);
        }
      } catch (const std::exception& error) {
        failures[i] = error.what();
      }
      --running;
    });
  }
  for (std::size_t step = 0; running != 0; ++step) {
    arena.push();
    std::this_thread::yield();
    arena.push();
    std::this_thread::yield();
    arena.pop();
    if (step % 3 == 0) {
      arena.reset();
    }
    arena.pop();
    if (step % 5 == 0) {
      arena.release();
    }
    expect_sound(arena.figures());
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& failure : failures) {
    CHECK_EQ(failure, "");
  }
  expect_empty(rig);
}

HARNESS_MAIN()
