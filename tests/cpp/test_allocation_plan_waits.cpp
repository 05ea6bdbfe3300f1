// Threads that wait for an allocation plan's lock sleep: it is held over allocations from the heap, and over a walk of
// the plan.
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

/// The next allocation from the heap of a thread that sets this waits until it is told to go on.
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

/// As the system shows it: 'S' sleeps, 'R' runs or could.
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

// Not inlined, new and delete look unlike to the compiler.
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

TEST(who_waits_while_the_plan_is_changed_sleeps) {
  PlanRig rig;
  for (int i = 0; i < 2; ++i) {
    rig.iterate({1000, 2000, 3000});
  }
  rig.plan->begin_iteration();
  Allocation other;
  std::thread changing([&] {
    stops = true;
    other = rig.allocate(5000); // not the plan's: what has been served so far is written down
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
  while (!sleeps && seconds_run(clock) < 0.5) { // a turn of its loop takes less than a microsecond
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
