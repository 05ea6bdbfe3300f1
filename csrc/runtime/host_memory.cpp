#include "runtime/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

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
  // MAP_NORESERVE: programs may allocate much managed memory and touch little of it. allocate_managed has already
  // checked that the host has enough.
  void* mapped =
      mmap(nullptr, wanted + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    throw OutOfMemory(OutOfMemory::Cause::kHost, wanted,
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

AddressRange rounded_inwards(AddressRange range, std::size_t page) noexcept {
  const std::uintptr_t begin = (range.begin + page - 1) / page * page;
  return {begin, std::max(begin, range.end / page * page)};
}

AddressRange rounded_outwards(AddressRange range, std::size_t page) noexcept {
  return {range.begin / page * page, (range.end + page - 1) / page * page};
}

AddressRange pages_within(AddressRange range) noexcept {
  return rounded_inwards(range, system_page());
}

AddressRange pages_around(AddressRange range) noexcept {
  return rounded_outwards(range, system_page());
}

namespace {

void advise_pages(void* ptr, std::size_t bytes, int advice) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(ptr);
  const AddressRange pages = pages_within({begin, begin + bytes});
  if (pages.bytes() > 0) {
    const int kept = errno;
    madvise(pages.data(), pages.bytes(), advice);
    errno = kept;
  }
}

} // namespace

void keep_from_children(void* ptr, std::size_t bytes) noexcept {
  advise_pages(ptr, bytes, MADV_DONTFORK);
}

void leave_to_children(void* ptr, std::size_t bytes) noexcept {
  advise_pages(ptr, bytes, MADV_DOFORK);
}

void* copy_pages(AddressRange pages) noexcept {
  // Without MAP_NORESERVE: all of it is written at once.
  void* copy = mmap(nullptr, pages.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) {
    return nullptr;
  }
  std::memcpy(copy, pages.data(), pages.bytes());
  return copy;
}

bool move_pages(void* copy, AddressRange to) noexcept {
  void* const target = to.data();
  // mremap alone would silently replace a mapping that another library's fork handler may have made there.
  void* const taken =
      mmap(target, to.bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (taken != target) {
    if (taken != MAP_FAILED) {
      munmap(taken, to.bytes()); // a kernel before 4.17 treats the address as a hint
    }
    return false;
  }
  return mremap(copy, to.bytes(), to.bytes(), MREMAP_MAYMOVE | MREMAP_FIXED, target) == target;
}

} // namespace torch_uvm
