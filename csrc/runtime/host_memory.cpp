#include "runtime/host_memory.h"

#include <fcntl.h>
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

[[noreturn]] void refuse(const char* call, std::size_t bytes) {
  throw OutOfMemory(
      OutOfMemory::Cause::kHost, bytes,
      "host memory: " + std::string(call) + " of " + format_bytes(bytes) + " failed: " + std::strerror(errno));
}

/// Maps pages with that protection, at a multiple of `alignment`. MAP_NORESERVE, because programs may allocate much
/// managed memory and touch little of it. allocate_managed has already checked that the host has enough.
void* map_aligned(std::size_t bytes, std::size_t alignment, int protection) {
  const std::size_t page = system_page();
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    throw OutOfMemory(OutOfMemory::Cause::kHost, bytes, "host memory: " + format_bytes(bytes) + " asked for");
  }
  const std::size_t wanted = round_up(bytes, page);
  const std::size_t slack = alignment > page ? alignment - page : 0;
  void* mapped = mmap(nullptr, wanted + slack, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    refuse("mmap", wanted);
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

} // namespace

void* map_host_memory(std::size_t bytes, std::size_t alignment) {
  return map_aligned(bytes, alignment, PROT_READ | PROT_WRITE);
}

void unmap_host_memory(void* ptr, std::size_t bytes) noexcept {
  munmap(ptr, round_up(bytes, system_page()));
}

void* reserve_addresses(std::size_t bytes, std::size_t alignment) {
  return map_aligned(bytes, alignment, PROT_NONE);
}

MemoryFile::~MemoryFile() {
  if (file_ >= 0) {
    close(file_);
  }
}

std::uint64_t MemoryFile::append(std::size_t bytes) {
  if (file_ < 0) {
    file_ = memfd_create("torch_uvm", MFD_CLOEXEC);
    if (file_ < 0) {
      refuse("memfd_create", bytes);
    }
  }
  if (ftruncate(file_, static_cast<off_t>(size_ + bytes)) != 0) {
    refuse("ftruncate", bytes);
  }
  const std::uint64_t offset = size_;
  size_ += bytes;
  return offset;
}

void MemoryFile::drop(std::uint64_t offset, std::size_t bytes) noexcept {
  const int kept = errno;
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  errno = kept;
}

void MemoryFile::map(void* at, std::uint64_t offset, std::size_t bytes) {
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, static_cast<off_t>(offset)) ==
      MAP_FAILED) {
    refuse("mmap", bytes);
  }
  keep_from_children(at, bytes); // shared pages: a child's writes would reach the parent
}

void MemoryFile::unmap(void* at, std::size_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(at, bytes, PROT_NONE, kFlags, -1, 0) == MAP_FAILED) {
    refuse("mmap", bytes);
  }
}

AddressRange pages_within(AddressRange range) noexcept {
  const std::size_t page = system_page();
  return {round_up(range.begin, page), range.end / page * page};
}

AddressRange pages_around(AddressRange range) noexcept {
  const std::size_t page = system_page();
  return {range.begin / page * page, round_up(range.end, page)};
}

namespace {

void advise_pages(void* ptr, std::size_t bytes, int advice) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(ptr);
  const AddressRange pages = pages_within({begin, begin + bytes});
  if (pages.bytes() > 0) {
    const int kept = errno;
    madvise(reinterpret_cast<void*>(pages.begin), pages.bytes(), advice);
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
  std::memcpy(copy, reinterpret_cast<const void*>(pages.begin), pages.bytes());
  return copy;
}

bool move_pages(void* copy, AddressRange to) noexcept {
  void* const target = reinterpret_cast<void*>(to.begin);
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
