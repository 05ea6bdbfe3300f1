// The arena: the suite that every Allocator passes, its blocks, and concurrency.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <limits>

#include "allocator/adaptors/adaptor.h"
#include "arena_rig.h"

using namespace face;

namespace {

/// An arena that is used in consecutive scopes.
class Scoped final : public Adaptor {
 public:
  explicit Scoped(std::shared_ptr<Arena> arena) : Adaptor(arena), arena_(*arena), mark_(arena_.push()) {}
  void next() {
    arena_.pop(mark_);
    mark_ = arena_.push();
  }
  std::string description() const override {
    return "scoped " + arena_.description();
  }

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

const bool registered =
    register_face("small", arena_face(kSmall)) &&
    register_face("large", arena_face({.home = kHome, .initial = 32 * MiB, .growth = 1.0})) &&
    register_face("under_a_cache", {.make =
                                        [](ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream) {
                                          return std::make_shared<CachingAllocator>(
                                              runtime, std::make_shared<Arena>(runtime, std::move(upstream), kSmall));
                                        }}) &&
    register_face("scoped",
                  {.make =
                       [](ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream) {
                         return std::make_shared<Scoped>(std::make_shared<Arena>(runtime, std::move(upstream), kSmall));
                       },
                   .again = [](Allocator& arena) { static_cast<Scoped&>(arena).next(); }});

} // namespace

TEST(the_suite_is_registered) {
  CHECK(registered);
}

// --- blocks -------------------------------------------------------------------------------------------------

TEST(allocations_are_contiguous) {
  ArenaRig rig;
  const Allocation one = rig.allocate(1), two = rig.allocate(257), three = rig.allocate(256);
  CHECK_EQ(address(two), address(one) + 256);
  CHECK_EQ(address(three), address(two) + 512);
  CHECK_EQ(rig.blocks(), 1);
  CHECK_EQ(rig.arena.figures().reserved_bytes, static_cast<std::int64_t>(64 * KiB));
  for (const Allocation& allocation : {one, two, three}) {
    rig.arena.free(allocation);
  }
  CHECK_EQ(rig.at(), address(three) + 256); // a free only counts
}

TEST(blocks_grow_and_fit_the_request) {
  ArenaRig rig;
  const auto reserved = [&] { return rig.arena.figures().reserved_bytes / static_cast<std::int64_t>(KiB); };
  rig.bump(40 * KiB);
  CHECK_EQ(reserved(), 64);
  rig.bump(40 * KiB);
  CHECK_EQ(reserved(), 64 + 128);
  rig.bump(1000 * KiB); // larger than the next block
  CHECK_EQ(reserved(), 64 + 128 + 1000);
  rig.bump(80 * KiB); // allocated beside it, because it fits there
  CHECK_EQ(reserved(), 64 + 128 + 1000);
  rig.bump(80 * KiB);
  CHECK_EQ(reserved(), 64 + 128 + 1000 + 2000);
}

TEST(a_refused_block_is_retried_smaller) {
  ArenaRig rig({.home = kHome, .initial = 64 * MiB, .growth = 2.0});
  rig.runtime->set_limit(20 * MiB);
  const Allocation fits = rig.allocate(1 * MiB);
  CHECK(rig.arena.figures().reserved_bytes < static_cast<std::int64_t>(20 * MiB));
  CHECK_THROWS(OutOfMemory, rig.allocate(40 * MiB));
  rig.arena.free(fits);
}

TEST(every_stream_has_its_own_chain) {
  ArenaRig rig;
  const Stream a = rig.stream(), b = rig.stream();
  const std::uintptr_t of_a = rig.at(a), of_b = rig.at(b), of_host = rig.at(Stream::host());
  CHECK_EQ(rig.blocks(), 3);
  rig.calls().clear_calls();
  for (int turn = 0; turn < 3; ++turn) {
    rig.busy(a);
    rig.arena.reset();
    CHECK_EQ(rig.at(a), of_a);
    CHECK_EQ(rig.at(b), of_b);
    CHECK_EQ(rig.at(Stream::host()), of_host);
  }
  CHECK_EQ(rig.arena.figures().events_recorded, 0);
  CHECK_EQ(rig.calls().count("wait_event") + rig.calls().count("query_stream"), std::size_t{0});
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
  CHECK_THROWS(InvalidArgument, make({.home = kHome, .growth = 0.5}, rig.upstream));
  CHECK_THROWS(InvalidArgument,
               make({.home = kHome, .growth = std::numeric_limits<double>::quiet_NaN()}, rig.upstream));
  CHECK_THROWS(InvalidArgument, make({.home = kHome, .growth = std::numeric_limits<double>::infinity()}, rig.upstream));
  CHECK(rig.arena.serves(kHome) && !rig.arena.serves(Location::host()) && !rig.arena.serves(Location::device(1)));
  CHECK_THROWS(InvalidArgument, rig.arena.allocate(1, Location::device(1), Stream::default_of(1)));
  CHECK_EQ(rig.arena.description(), "arena(caching)");
}

TEST(an_arena_may_serve_the_host) {
  ArenaRig rig({.home = Location::host()});
  const Allocation allocation = rig.arena.allocate(1000, Location::host(), Stream::host());
  fill(allocation, 3);
  rig.arena.free(allocation);
  CHECK_THROWS(InvalidArgument, rig.allocate(1000));
}

// --- threads and processes --------------------------------------------------------------------------------------

TEST(a_forked_child_does_not_use_the_arena) {
  ArenaRig rig;
  const Allocation held = rig.allocate(1000);
  const Arena::Mark mark = rig.arena.push();
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
    rig.arena.pop(mark);
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

TEST(an_allocation_freed_twice_ends_the_program) {
  ArenaRig rig;
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    Arena arena(*rig.runtime, rig.upstream, kSmall); // created in this process
    const Allocation own = arena.allocate(100, kHome, kStream);
    std::signal(SIGABRT, SIG_DFL);
    arena.free(own);
    arena.free(own);
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(pid, &status, 0), pid);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

/// Threads allocate on streams of their own and on a shared one, while another thread resets, marks and releases all
/// the time. Live allocations keep their bytes.
TEST(threads_allocate_while_another_resets) {
  for (const bool use_recording : {true, false}) {
    FaceRig rig(use_recording ? recording() : emulated(), arena_face(kSmall), false);
    rig.make();
    auto& arena = static_cast<Arena&>(*rig.allocator);
    const Stream streams[] = {kStream, rig.stream(), Stream::host()};
    std::atomic<std::size_t> running = std::size(streams);
    std::vector<std::string> failures(std::size(streams) + 1);
    std::vector<std::thread> threads;
    const auto start = [&](std::size_t i, auto body) {
      threads.emplace_back([&failures, i, body] {
        try {
          body();
        } catch (const std::exception& error) {
          failures[i] = error.what();
        }
      });
    };
    for (std::size_t i = 0; i < std::size(streams); ++i) {
      start(i, [&, i] {
        std::vector<std::pair<Allocation, unsigned char>> held;
        try {
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
        } catch (...) {
          --running;
          throw;
        }
        for (const auto& [allocation, mark] : held) {
          expect_filled(allocation, mark);
          arena.free(allocation);
        }
        --running;
      });
    }
    start(std::size(streams), [&] {
      for (std::size_t step = 0; running != 0; ++step) {
        const Arena::Mark outer = arena.push();
        std::this_thread::yield();
        const Arena::Mark inner = arena.push();
        std::this_thread::yield();
        arena.pop(inner);
        if (step % 3 == 0) {
          arena.reset();
        } else {
          arena.pop(outer);
        }
        if (step % 5 == 0) {
          arena.release();
        }
        expect_sound(arena.figures());
      }
    });
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (const std::string& failure : failures) {
      CHECK_EQ(failure, "");
    }
    expect_empty(rig);
  }
}

HARNESS_MAIN()
