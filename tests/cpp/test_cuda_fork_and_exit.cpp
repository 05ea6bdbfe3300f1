// CudaRuntime in a forked child, which must not call CUDA, and at process exit, when the driver may be unloaded.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>

#include "cuda_rig.h"

using namespace contract;
using namespace cuda_rig;

TEST(a_forked_child_never_calls_cuda) {
  const auto runtime = made();
  void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
  void* const pinned = runtime->allocate_pinned(64);
  void* const large = runtime->allocate_pinned(32 * MiB);
  const Stream stream = runtime->create_stream(0, 0);
  const Event event = runtime->create_event(0, false);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const auto throws = [](const std::function<void()>& action) {
      return message_of(action).find("forked process") != std::string::npos;
    };
    const bool refused =
        throws([&] { runtime->allocate_managed(1, kDevice); }) && throws([&] { runtime->allocate_pinned(1); }) &&
        throws([&] { runtime->allocate_device(1, 0); }) &&
        throws([&] { runtime->prefetch(ptr, 1, kDevice, stream); }) &&
        throws([&] { runtime->advise(ptr, 1, Advice::kSetReadMostly, Location::host()); }) &&
        throws([&] { static_cast<void>(runtime->range_attributes(ptr, 1)); }) &&
        throws([&] { static_cast<void>(runtime->query_event(event)); }) &&
        throws([&] { runtime->synchronize_event(event); }) && throws([&] { runtime->synchronize_device(0); });
    runtime->free_managed(ptr);
    runtime->free_pinned(pinned);
    runtime->free_pinned(large);
    runtime->destroy_event(event);
    runtime->destroy_stream(stream);
    const bool quiet = *fake_cuda_misuse() == '\0';
    _exit(refused && quiet ? 0 : refused ? 2 : 1);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK(WIFEXITED(status));
  runtime->free_managed(ptr); // the parent can continue
  runtime->free_pinned(pinned);
  static_cast<char*>(large)[32 * MiB - 1] = 1;
  runtime->free_pinned(large);
  runtime->destroy_event(event);
  runtime->destroy_stream(stream);
  all_is_well();
}

TEST(at_exit_the_driver_may_be_gone) {
  auto runtime = made();
  void* const ptr = runtime->allocate_managed(4 * MiB, Location::device(1));
  void* const plain = runtime->allocate_device(MiB, 0);
  void* const pinned = runtime->allocate_pinned(MiB);
  void* const large = runtime->allocate_pinned(32 * MiB);
  const Event event = runtime->create_event(0, false);
  fake_cuda_unload(1);
  runtime->free_managed(ptr);
  runtime->free_device(plain);
  runtime->free_pinned(pinned);
  runtime->free_pinned(large);
  runtime->destroy_event(event);
  CHECK_EQ(runtime->managed_bytes(), std::size_t{0});
  runtime.reset();
  fake_cuda_unload(0);
  CHECK_EQ(std::string(fake_cuda_misuse()), std::string());
}

HARNESS_MAIN()
