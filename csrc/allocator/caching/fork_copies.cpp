#include "allocator/caching/fork_copies.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>

namespace torch_uvm {

void ForkCopies::plan(AddressRange range, AddressRange segment) noexcept {
  const AddressRange kept = pages_within(segment);
  AddressRange pages = pages_around(range);
  pages.begin = std::max(pages.begin, kept.begin);
  pages.end = std::min(pages.end, kept.end);
  if (pages.bytes() == 0) {
    return; // the child inherits this memory
  }
  if (!copies_.empty() && pages.begin <= copies_.back().pages.end) {
    copies_.back().pages.end = std::max(copies_.back().pages.end, pages.end);
    return;
  }
  try {
    copies_.push_back({pages, nullptr});
  } catch (const std::bad_alloc&) {
    unplanned_ += pages.bytes();
  }
}

void ForkCopies::make(std::size_t available) noexcept {
  std::size_t missing = unplanned_;
  for (Copy& copy : copies_) {
    const std::size_t bytes = copy.pages.bytes();
    copy.copy = bytes <= available ? copy_pages(copy.pages) : nullptr;
    if (copy.copy != nullptr) {
      available -= bytes;
    } else {
      missing += bytes;
    }
  }
  report(missing, "there is no memory for a copy of them");
}

void ForkCopies::drop() noexcept {
  for (const Copy& copy : copies_) {
    if (copy.copy != nullptr) {
      unmap_host_memory(copy.copy, copy.pages.bytes());
    }
  }
  forget();
}

void ForkCopies::move_into_place() noexcept {
  std::size_t missing = 0;
  for (const Copy& copy : copies_) {
    if (copy.copy != nullptr && !move_pages(copy.copy, copy.pages)) {
      unmap_host_memory(copy.copy, copy.pages.bytes());
      missing += copy.pages.bytes();
    }
  }
  report(missing, "something else is at their address");
  forget();
}

void ForkCopies::report(std::size_t bytes, const char* why) const noexcept {
  if (bytes > 0) {
    // Not stdio: another thread may hold its locks during the fork.
    dprintf(STDERR_FILENO, "torch_uvm: a forked child cannot read %zu bytes of its parent's managed CPU tensors: %s\n",
            bytes, why);
  }
}

void ForkCopies::forget() noexcept {
  copies_.clear();
  unplanned_ = 0;
}

} // namespace torch_uvm
