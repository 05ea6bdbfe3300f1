// Adaptors over allocators of every kind, caching allocators over an upstream, and pools.
#include "allocator/adaptors/adaptors.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "allocator/size_classes.h"
#include "face_rig.h"

using namespace face;

namespace {

struct Rig {
  RecordingRuntime runtime{2};
  std::shared_ptr<Allocator> caching = face::caching(runtime);
};

Allocation get(Allocator& allocator, std::size_t bytes) {
  return allocator.allocate(bytes, kHome, kStream);
}

/// An upstream that returns memory at odd addresses and counts its calls.
class Ragged final : public Adaptor {
 public:
  using Adaptor::Adaptor;
  Allocation allocate(std::size_t bytes, Location home, Stream stream) override {
    const Allocation whole = Adaptor::allocate(bytes + kAllocationAlignment, home, stream);
    asked.push_back(stream);
    ++held;
    return {static_cast<char*>(whole.ptr) + kAllocationAlignment, bytes, whole.handle};
  }
  void free(const Allocation& allocation) noexcept override {
    --held;
    Adaptor::free({static_cast<char*>(allocation.ptr) - kAllocationAlignment, allocation.bytes + kAllocationAlignment,
                   allocation.handle});
  }
  std::string description() const override {
    return "ragged";
  }

  std::vector<Stream> asked;
  int held = 0;
};

} // namespace

TEST(an_adaptor_needs_an_upstream) {
  Rig rig;
  CHECK_THROWS(InvalidArgument, Adaptor(nullptr));
  CHECK_THROWS(InvalidArgument, CachingAllocator(rig.runtime, nullptr));
}

TEST(a_limit_is_exact_to_the_byte) {
  Rig rig;
  Adaptor limited(rig.caching, {.limit = 1000});
  const Allocation most = get(limited, 999);
  CHECK_THROWS(OutOfMemory, get(limited, 2));
  const Allocation rest = get(limited, 1);
  limited.free(most);
  limited.free(get(limited, 999));
  CHECK_THROWS(OutOfMemory, get(limited, ~std::size_t{0}));
  limited.free(rest);
  limited.free(get(limited, 1000));
  CHECK_EQ(rig.caching->figures().allocations, 0);
}

TEST(requests_that_the_upstream_refuses_do_not_count) {
  Rig rig;
  Adaptor limited(rig.caching, {.limit = 1 * MiB});
  rig.runtime.set_host_memory_available(0);
  CHECK_THROWS(OutOfMemory, get(limited, 1 * MiB));
  rig.runtime.set_host_memory_available(1 * GiB);
  CHECK_EQ(limited.passed().failures, 1);
  CHECK_EQ(limited.passed().total_allocations, 0);
  limited.free(get(limited, 1 * MiB));
}

TEST(concurrent_threads_never_exceed_a_limit) {
  Rig rig;
  constexpr std::size_t kLimit = 64 * KiB;
  Adaptor limited(rig.caching, {.limit = kLimit});
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 2000; ++turn) {
        try {
          limited.free(get(limited, 24 * KiB));
        } catch (const OutOfMemory&) { // the other threads have it
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(limited.passed().peak_bytes <= static_cast<std::int64_t>(kLimit));
  limited.free(get(limited, kLimit));
}

TEST(statistics_count_only_allocations_that_pass_through) {
  Rig rig;
  Adaptor counted(rig.caching);
  const Allocation elsewhere = get(*rig.caching, 500);
  const Allocation first = get(counted, 100), second = get(counted, 200);
  counted.free(first);
  counted.free(get(counted, 0));
  PassedThrough now = counted.passed();
  CHECK_EQ(now.allocations, 1);
  CHECK_EQ(now.peak_allocations, 2);
  CHECK_EQ(now.total_allocations, 2);
  CHECK_EQ(now.bytes, 200);
  CHECK_EQ(now.peak_bytes, 300);
  CHECK_EQ(now.total_bytes, 300);
  CHECK_EQ(counted.figures().requested_bytes, 200);
  CHECK_EQ(rig.caching->figures().requested_bytes, 700);
  counted.reset_peaks();
  now = counted.passed();
  CHECK_EQ(now.peak_bytes, 200);
  CHECK_EQ(now.peak_allocations, 1);
  counted.free(second);
  rig.caching->free(elsewhere);
}

TEST(a_failure_callback_may_make_room) {
  Rig rig;
  const auto limited = std::make_shared<Adaptor>(rig.caching, AdaptorOptions{.limit = 1 * MiB});
  std::vector<Allocation> spare{get(*limited, 512 * KiB), get(*limited, 512 * KiB)};
  std::vector<std::size_t> asked;
  Adaptor retrying(limited, {.callback = [&](std::size_t bytes, Location home) {
                     asked.push_back(bytes);
                     CHECK(home == kHome);
                     if (spare.empty()) {
                       return false;
                     }
                     limited->free(spare.back());
                     spare.pop_back();
                     return true;
                   }});
  const Allocation all = get(retrying, 1 * MiB); // frees both spare allocations
  CHECK_EQ(asked.size(), std::size_t{2});
  CHECK_THROWS(OutOfMemory, get(retrying, 1));
  CHECK_EQ(asked.back(), std::size_t{1});
  retrying.free(all);
  Adaptor only_memory(rig.caching, {.callback = [](std::size_t, Location) -> bool { throw RuntimeFailure("asked"); }});
  CHECK_THROWS(InvalidArgument, only_memory.allocate(1, Location::device(9), kStream)); // the callback is not called
}

TEST(a_pool_uses_its_initial_memory_first_and_stays_below_its_maximum) {
  Rig rig;
  CachingAllocator pool(rig.runtime, rig.caching, {.home = kHome, .initial = 16 * MiB, .maximum = 48 * MiB});
  CHECK(pool.figures().reserved_bytes >= std::int64_t{16 * MiB});
  const std::int64_t before = pool.figures().upstream_allocations;
  std::vector<Allocation> held;
  for (int number = 0; number < 8; ++number) {
    held.push_back(get(pool, 2 * MiB));
  }
  CHECK_EQ(pool.figures().upstream_allocations, before); // the pool's initial memory was enough
  held.push_back(get(pool, 16 * MiB));
  CHECK_THROWS(OutOfMemory, get(pool, 32 * MiB));
  CHECK(pool.figures().reserved_bytes <= std::int64_t{48 * MiB});
  for (const Allocation& each : held) {
    pool.free(each);
  }
  CHECK(pool.release() > 0);
  CHECK_EQ(pool.figures().reserved_bytes, 0);
  CHECK_THROWS(InvalidArgument,
               CachingAllocator(rig.runtime, rig.caching, {.home = kHome, .initial = 2 * MiB, .maximum = 1 * MiB}));
}

TEST(nested_adaptors_describe_themselves) {
  Rig rig;
  const auto pool = std::make_shared<CachingAllocator>(rig.runtime, std::make_shared<Adaptor>(rig.caching),
                                                       CachingOptions{.home = kHome, .initial = 4 * MiB});
  const auto limited = std::make_shared<Adaptor>(pool, AdaptorOptions{.limit = 1 * MiB});
  const Adaptor outermost(limited, {.callback = [](std::size_t, Location) { return false; }});
  CHECK_EQ(outermost.description(), "failure_callback(limit(pool(statistics(caching), 4.00 MiB), 1.00 MiB))");
}

// --- segments from an upstream ------------------------------------------------------------------------------------

TEST(segments_are_aligned_in_any_upstream_memory) {
  Rig rig;
  const auto ragged = std::make_shared<Ragged>(rig.caching);
  CachingAllocator cache(rig.runtime, ragged);
  for (const std::size_t bytes : {std::size_t{1}, kMediumSegment, 34 * MiB}) {
    const Allocation made = get(cache, bytes);
    const std::size_t alignment = bytes >= kWholePagesRequest ? kLargeGranularity : kBlockAlignment;
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(made.ptr) % alignment, std::uintptr_t{0});
    fill(made, 5);
    CHECK(ragged->asked.back().is_host());
    cache.free(made);
  }
  CHECK(ragged->held > 0);
  rig.runtime.set_limit(rig.runtime.managed_bytes());
  CHECK_THROWS(OutOfMemory, get(cache, 1 * GiB));
  cache.release();
  CHECK_EQ(ragged->held, 0);
}

TEST(the_host_waits_for_every_device_before_a_segment_is_released) {
  Rig rig;
  const auto ragged = std::make_shared<Ragged>(rig.caching);
  CachingAllocator cache(rig.runtime, ragged);
  for (const bool fails : {false, true}) {
    const Event work = rig.runtime.create_event(1, false);
    cache.free(get(cache, 4 * MiB));
    rig.runtime.hold(Stream::default_of(1)); // managed memory may be used by that device too
    rig.runtime.record_event(work, Stream::default_of(1));
    if (fails) {
      rig.runtime.fail("synchronize_device", 1); // a device that has failed does not keep the memory
    }
    cache.release();
    CHECK_EQ(ragged->held, 0);
    CHECK(rig.runtime.query_event(work));
    rig.runtime.destroy_event(work);
  }
}

HARNESS_MAIN()
