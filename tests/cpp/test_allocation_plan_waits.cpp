// Threads that wait for an allocation plan's mutex sleep: the mutex is held during heap allocations and during a walk
// of the plan.
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <future>
#include <new>
#include <string>
#include <thread>

#include "plan_rig.h"

using namespace plans;

namespace {

/// If a thread sets this, its next heap allocation blocks until the test lets it continue.
thread_local bool stops = false;
std::promise<void> stopped;
std::promise<void> go_on;

void stop_if_asked() {
  if (stops) {
    stops = false;
    stopped.set_value();
    go_on.get_future().wait();
  }
}

/// The thread's state in /proc: 'S' is sleeping, 'R' is running or runnable.
char state_of(long thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string all;
  std::getline(file, all);
  return all.at(all.rfind(')') + 2);
}

double seconds_run(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

} // namespace

// Not inlined: the compiler would warn about mismatched new and delete.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  stop_if_asked();
  if (void* const ptr = std::malloc(bytes == 0 ? 1 : bytes)) {
    return ptr;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* ptr) noexcept {
  std::free(ptr);
}
[[gnu::noinline]] void operator delete(void* ptr, std::size_t /*bytes*/) noexcept {
  std::free(ptr);
}

TEST(a_thread_that_waits_for_the_plan_sleeps) {
  PlanRig rig;
  for (int i = 0; i < 2; ++i) {
    rig.iterate({1000, 2000, 3000});
  }
  rig.plan->begin_iteration();
  Allocation other;
  std::thread changing([&] {
    stops = true;
    other = rig.allocate(5000); // not in the plan: the requests served so far are recorded
    stops = false;
  });
  stopped.get_future().wait();
  std::promise<long> told;
  std::thread waiting([&] {
    told.set_value(syscall(SYS_gettid));
    static_cast<void>(rig.plan->figures());
  });
  const long thread = told.get_future().get();
  clockid_t clock{};
  CHECK_EQ(pthread_getcpuclockid(waiting.native_handle(), &clock), 0);
  bool sleeps = false;
  while (!sleeps && seconds_run(clock) < 0.5) { // one iteration of its loop takes less than a microsecond
    sleeps = state_of(thread) == 'S';
    std::this_thread::yield();
  }
  go_on.set_value();
  changing.join();
  waiting.join();
  CHECK(sleeps);
  rig.free(other);
  rig.plan->end_iteration();
  rig.close();
}

HARNESS_MAIN()
