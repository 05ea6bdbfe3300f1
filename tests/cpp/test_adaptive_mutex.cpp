// The allocator's mutex excludes other threads, whether waiting threads spin, sleep or succeed at once.
#include <chrono>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "allocator/adaptive_mutex.h"
#include "harness.h"

using torch_uvm::AdaptiveMutex;

namespace {

/// Threads increment a counter that the mutex guards.
void count_together(int most_pauses) {
  constexpr int kThreads = 4, kEach = 20'000;
  AdaptiveMutex mutex(most_pauses);
  long count = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < kEach; ++turn) {
        const std::lock_guard lock(mutex);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(count == static_cast<long>(kThreads) * kEach);
}

} // namespace

TEST(spinning_waiters_exclude_each_other) {
  count_together(1024);
}

TEST(sleeping_waiters_exclude_each_other) {
  count_together(0);
}

TEST(a_waiter_gets_the_mutex_after_its_spins_failed) {
  AdaptiveMutex mutex(2);
  std::unique_lock held(mutex);
  std::future<void> other = std::async(std::launch::async, [&] { const std::lock_guard lock(mutex); });
  CHECK(other.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
  held.unlock();
  other.get();
}

TEST(a_try_does_not_wait) {
  AdaptiveMutex mutex;
  const std::unique_lock held(mutex);
  std::async(std::launch::async, [&] { CHECK(!mutex.try_lock()); }).get();
}

HARNESS_MAIN()
