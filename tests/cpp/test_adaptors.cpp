// Adaptors over allocators of every kind, and the pool, which is built from adaptors.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "allocator/adaptors/caching_allocator.h"
#include "allocator/adaptors/counting_allocator.h"
#include "allocator/adaptors/limiting_allocator.h"
#include "allocator/adaptors/pool_allocator.h"
#include "allocator/adaptors/retrying_allocator.h"
#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/testing/recording_runtime.h"

namespace {

using namespace torch_uvm;

constexpr Location kDevice = Location::device(0);
constexpr Stream kStream = Stream::default_of(0);

struct Rig {
  RecordingRuntime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime)};
  std::shared_ptr<Allocator> caching = std::make_shared<CachingAllocator>(memory);

  std::size_t segments() const {
    return runtime.count("allocate_managed");
  }
};

Allocation get(Allocator& allocator, std::size_t bytes) {
  return allocator.allocate(bytes, kDevice, kStream);
}

TEST(an_adaptor_needs_an_upstream) {
  CHECK_THROWS(InvalidArgument, LimitingAllocator(nullptr, 1));
  RecordingRuntime runtime;
  CHECK_THROWS(InvalidArgument, CachingAllocator(runtime, nullptr));
  CHECK_THROWS(InvalidArgument, PoolAllocator(runtime, nullptr, PoolOptions{kDevice, 0, 1 * MiB, {}}));
}

TEST(a_limit_is_exact_to_the_byte) {
  Rig rig;
  LimitingAllocator limited(rig.caching, 1000);
  const Allocation most = get(limited, 999);
  CHECK_THROWS(OutOfMemory, get(limited, 2));
  const Allocation rest = get(limited, 1);
  CHECK_EQ(limited.used(), std::size_t{1000});
  limited.free(most);
  limited.free(get(limited, 999));
  CHECK_THROWS(OutOfMemory, get(limited, ~std::size_t{0}));
  limited.free(rest);
  CHECK_EQ(limited.used(), std::size_t{0});
  CHECK_EQ(rig.caching->figures().allocations, 0);
}

TEST(requests_that_the_upstream_refuses_do_not_count) {
  Rig rig;
  LimitingAllocator limited(rig.caching, 1 * MiB);
  CountingAllocator counted(rig.caching);
  rig.runtime.set_host_memory_available(0);
  CHECK_THROWS(OutOfMemory, get(limited, 1 * MiB));
  CHECK_EQ(limited.used(), std::size_t{0});
  CHECK_THROWS(OutOfMemory, get(counted, 1 * MiB));
  rig.runtime.set_host_memory_available(1 * GiB);
  CHECK_EQ(counted.passed().failures, 1);
  CHECK_EQ(counted.passed().total_allocations, 0);
  limited.free(get(limited, 1 * MiB));
}

TEST(concurrent_threads_never_exceed_a_limit) {
  Rig rig;
  constexpr std::size_t kLimit = 64 * KiB;
  LimitingAllocator limited(rig.caching, kLimit);
  std::atomic<bool> over{false};
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 2000; ++turn) {
        try {
          const Allocation mine = get(limited, 24 * KiB);
          over = over || limited.used() > kLimit;
          limited.free(mine);
        } catch (const OutOfMemory&) {
          ++refused;
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(!over);
  CHECK_EQ(limited.used(), std::size_t{0});
}

TEST(statistics_count_only_allocations_that_pass_through) {
  Rig rig;
  CountingAllocator counted(rig.caching);
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
  const auto limited = std::make_shared<LimitingAllocator>(rig.caching, 1 * MiB);
  std::vector<Allocation> spare{get(*limited, 512 * KiB), get(*limited, 512 * KiB)};
  std::vector<std::size_t> asked;
  RetryingAllocator retrying(limited, [&](std::size_t bytes, Location home) {
    asked.push_back(bytes);
    CHECK(home == kDevice);
    if (spare.empty()) {
      return false;
    }
    limited->free(spare.back());
    spare.pop_back();
    return true;
  });
  const Allocation all = get(retrying, 1 * MiB); // frees both spare allocations
  CHECK_EQ(asked.size(), std::size_t{2});
  CHECK_THROWS(OutOfMemory, get(retrying, 1));
  CHECK_EQ(asked.back(), std::size_t{1});
  retrying.free(all);
}

TEST(an_exception_of_a_failure_callback_reaches_the_caller) {
  Rig rig;
  const auto limited = std::make_shared<LimitingAllocator>(rig.caching, 1);
  RetryingAllocator retrying(limited, [](std::size_t, Location) -> bool { throw RuntimeFailure("tired"); });
  CHECK_THROWS(RuntimeFailure, get(retrying, 2));
  RetryingAllocator only_memory(rig.caching, [](std::size_t, Location) -> bool { throw RuntimeFailure("asked"); });
  CHECK_THROWS(InvalidArgument, only_memory.allocate(1, Location::device(9), kStream)); // the callback is not called
}

TEST(a_pool_uses_its_initial_memory_first_and_stays_below_its_maximum) {
  Rig rig;
  PoolAllocator pool(rig.runtime, rig.caching, PoolOptions{kDevice, 16 * MiB, 48 * MiB, {}});
  CHECK(pool.figures().reserved_bytes >= std::int64_t{16 * MiB});
  const std::size_t before = rig.segments();
  std::vector<Allocation> held;
  for (int number = 0; number < 8; ++number) {
    held.push_back(get(pool, 2 * MiB));
  }
  CHECK_EQ(rig.segments(), before); // the pool's initial memory was enough
  held.push_back(get(pool, 16 * MiB));
  CHECK_THROWS(OutOfMemory, get(pool, 32 * MiB));
  CHECK(pool.figures().reserved_bytes <= std::int64_t{48 * MiB});
  for (const Allocation& each : held) {
    pool.free(each);
  }
  CHECK(pool.release() > 0);
  CHECK_EQ(pool.figures().reserved_bytes, 0);
  CHECK_THROWS(InvalidArgument, PoolAllocator(rig.runtime, rig.caching, PoolOptions{kDevice, 2 * MiB, 1 * MiB, {}}));
}

TEST(nested_adaptors_describe_themselves) {
  Rig rig;
  const auto pool = std::make_shared<PoolAllocator>(rig.runtime, std::make_shared<CountingAllocator>(rig.caching),
                                                    PoolOptions{kDevice, 4 * MiB, std::nullopt, {}});
  const auto limited = std::make_shared<LimitingAllocator>(pool, 1 * MiB);
  RetryingAllocator outermost(limited, [](std::size_t, Location) { return false; });
  CHECK_EQ(outermost.description(), "failure_callback(limit(pool(statistics(caching), 4.00 MiB), 1.00 MiB))");
  const Allocation some = get(outermost, 1000);
  CHECK_EQ(pool->figures().requested_bytes, 1000);
  const Stream other = rig.runtime.create_stream(0, 0);
  outermost.record_stream(some, other);
  rig.runtime.hold(other);
  const Event work = rig.runtime.create_event(0, /*timing=*/false);
  rig.runtime.record_event(work, other);
  outermost.free(some);
  CHECK(get(*pool, 1000).ptr != some.ptr); // the other stream may still use the memory
  rig.runtime.release(other);
  rig.runtime.destroy_event(work);
}

} // namespace

HARNESS_MAIN()
