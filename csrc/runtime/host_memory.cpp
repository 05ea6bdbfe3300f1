#include "runtime/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

std::size_t system_page() {
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return page;
}

} // namespace

void* map_host_memory(std::size_t bytes, std::size_t alignment) {
  const std::size_t page = system_page();
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    throw OutOfMemory(OutOfMemory::Cause::kHost, bytes, "host memory: " + format_bytes(bytes) + " asked for");
  }
  const std::size_t wanted = round_up(bytes, page);
  const std::size_t slack = alignment > page ? alignment - page : 0;
  // Not reserved: a program that asks for much and touches little is what managed memory is for. Whether
  // the host has enough is checked before, by allocate_managed.
  void* mapped =
      mmap(nullptr, wanted + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    throw OutOfMemory(OutOfMemory::Cause::kHost, bytes,
                      "host memory: mmap of " + format_bytes(wanted) + " failed: " + std::strerror(errno));
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(mapped);
  const auto aligned = static_cast<std::uintptr_t>(round_up(begin, alignment));
  const std::size_t before = aligned - begin;
  if (before > 0) {
    munmap(mapped, before);
  }
  if (slack > before) {
    munmap(reinterpret_cast<void*>(aligned + wanted), slack - before);
  }
  return reinterpret_cast<void*>(aligned);
}

void unmap_host_memory(void* ptr, std::size_t bytes) noexcept {
  munmap(ptr, round_up(bytes, system_page()));
}

} // namespace torch_uvm
