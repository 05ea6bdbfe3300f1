// Helpers for tests of forked children.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>

#include "allocator_rig.h"

namespace contract {

#ifdef __SANITIZE_THREAD__
/// In a forked child, ThreadSanitizer first starts a thread of its own. That thread's stack occupies the highest gap in
/// the address space, which must not be the gap of a block that has to be copied. This reserves a gap above all blocks.
inline const int gap_for_the_sanitizers_stack = [] {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  void* const gap = mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return gap == MAP_FAILED ? -1 : madvise(gap, kBytes, MADV_DONTFORK);
}();
#endif

/// Forks like a process with installed fork handlers.
/// \return the child's exit code
inline int in_child(CachingManagedAllocator& allocator, const std::function<int()>& body) {
  allocator.before_fork();
  allocator.copy_for_child();
  const pid_t pid = fork();
  if (pid == 0) {
    allocator.after_fork_in_child();
    int code = 99;
    try {
      code = body();
    } catch (...) { // exit code 99
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

/// Whether the address is mapped: a write() from unmapped memory fails.
inline bool is_mapped(std::uintptr_t address) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) {
    throw harness::Failure("pipe failed");
  }
  const bool mapped = write(ends[1], reinterpret_cast<const void*>(address), 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return mapped;
}

inline Block* filled(Rig& rig, std::size_t bytes, Location home, int value) {
  const Stream stream = home.is_host() ? Stream::host() : Stream::default_of(home.index);
  Block* const block = rig.allocator->allocate(bytes, home, stream);
  std::memset(rig.allocator->data(block), value, bytes);
  return block;
}

inline bool holds(const Rig& rig, const Block* block, std::size_t bytes, int value) {
  const auto* at = static_cast<const unsigned char*>(rig.allocator->data(block));
  return at[0] == value && std::memcmp(at, at + 1, bytes - 1) == 0;
}

} // namespace contract
