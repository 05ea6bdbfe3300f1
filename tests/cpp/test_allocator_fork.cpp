// A forked child holds blocks whose memory is its parent's: it may forget them, and no more.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "allocator_rig.h"
#include "runtime/recording_runtime.h"

using namespace contract;

namespace {

/// Forks as a process with the handlers installed would. \return the child's exit code
int in_child(CachingManagedAllocator& allocator, const std::function<int()>& body) {
  allocator.before_fork();
  const pid_t pid = fork();
  if (pid == 0) {
    allocator.after_fork_in_child();
    int code = 99;
    try {
      code = body();
    } catch (...) { // 99
    }
    _exit(code);
  }
  allocator.after_fork_in_parent();
  if (pid < 0) {
    throw harness::Failure("fork failed");
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100;
}

} // namespace

TEST(a_child_only_keeps_books) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream other = rig.stream();
  Block* const plain = rig.allocate(64 * MiB);
  Block* const shared = rig.allocate(3 * MiB);
  rig.allocator->record_stream(shared, other);
  rig.allocator->free(rig.allocate(12 * MiB)); // cached
  const int code = in_child(*rig.allocator, [&] {
    calls.clear_calls();
    rig.allocator->free(plain);
    rig.allocator->free(shared);
    if (!rig.allocator->is_valid() || rig.allocator->statistics().allocation[0].current != 0) {
      return 1;
    }
    if (rig.allocator->empty_cache() != 0) {
      return 2;
    }
    try {
      rig.allocate(512); // cached memory would be the parent's
      return 3;
    } catch (const RuntimeFailure& error) {
      if (std::string(error.what()).find("forked child") == std::string::npos) {
        return 4;
      }
    }
    if (rig.allocate(0) != nullptr) {
      return 5;
    }
    rig.allocator.reset();
    return calls.calls().empty() ? 0 : 6; // not one call of the runtime
  });
  CHECK_EQ(code, 0);
  // The parent notices nothing.
  CHECK_EQ(rig.allocator->statistics().allocation[0].current, 2);
  rig.allocator->free(plain);
  rig.allocator->free(shared);
  rig.check();
}

TEST(forking_while_threads_allocate_does_not_hang_the_child) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!stop) {
        rig.allocator->free(rig.allocate(4096));
      }
    });
  }
  Block* const block = rig.allocate(1000);
  int code = 0;
  for (int i = 0; i < 30 && code == 0; ++i) {
    code = in_child(*rig.allocator, [&] {
      rig.allocator->free(block);
      return rig.allocator->is_valid() ? 0 : 1;
    });
  }
  stop = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(code, 0);
  rig.allocator->free(block);
  rig.check();
}

HARNESS_MAIN()
