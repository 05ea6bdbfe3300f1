#include "runtime/managed_runtime.h"

#include <algorithm>
#include <chrono>

#include "runtime/bytes.h"
#include "runtime/host_memory.h"

namespace torch_uvm {

double ManagedRuntime::host_ms() const {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void* ManagedRuntime::allocate_managed(std::size_t bytes, Location home) {
  if (bytes == 0) {
    throw InvalidArgument("managed allocation of 0 bytes; at least 1 is needed");
  }
  if (home.index >= device_count() || home.index < Location::host().index) {
    throw InvalidArgument("managed allocation for " + to_string(home) + "; there are " +
                          std::to_string(device_count()) + " devices");
  }
  if (!home.is_host() && !device_properties(home.index).managed_memory) {
    throw RuntimeFailure(to_string(home) + " has no managed memory: neither its processor nor the host could touch it");
  }
  // Reads files of the operating system, so it happens outside the lock.
  const std::size_t host_available = host_memory_available();
  {
    std::lock_guard lock(mutex_);
    // Subtractions, because `managed_bytes_ + bytes` could overflow.
    if (limit_ && (managed_bytes_ > *limit_ || bytes > *limit_ - managed_bytes_)) {
      throw OutOfMemory(OutOfMemory::Cause::kLimit, bytes,
                        "managed memory limit: " + format_bytes(bytes) + " asked for, " + format_bytes(managed_bytes_) +
                            " of " + format_bytes(*limit_) + " in use");
    }
    if (bytes > host_available) {
      throw OutOfMemory(OutOfMemory::Cause::kHost, bytes,
                        "managed memory is backed by the host: " + format_bytes(bytes) + " asked for, " +
                            format_bytes(host_available) + " available there");
    }
    // Counted before the runtime's call, so that two threads cannot both use the same remainder of the limit.
    managed_bytes_ += bytes;
  }
  void* ptr = nullptr;
  try {
    ptr = do_allocate_managed(bytes, home);
    // If a child inherited these pages, the driver might unmap them in the parent, or the child might corrupt them.
    keep_from_children(ptr, bytes);
    std::lock_guard lock(mutex_);
    managed_.emplace(ptr, bytes);
    peak_managed_bytes_ = std::max(peak_managed_bytes_, managed_bytes_);
  } catch (...) {
    if (ptr != nullptr) {
      leave_to_children(ptr, bytes);
      do_free_managed(ptr, bytes);
    }
    std::lock_guard lock(mutex_);
    managed_bytes_ -= bytes;
    throw;
  }
  return ptr;
}

void ManagedRuntime::free_managed(void* ptr) noexcept {
  if (ptr == nullptr) {
    return;
  }
  std::size_t bytes = 0;
  {
    std::lock_guard lock(mutex_);
    const auto found = managed_.find(ptr);
    if (found == managed_.end()) {
      return; // an unknown address: leaking it is safer than freeing it
    }
    bytes = found->second;
    managed_.erase(found);
  }
  leave_to_children(ptr, bytes); // or the next mapping at these addresses might keep the mark
  do_free_managed(ptr, bytes);
  // Subtracted only after the free, so that the limit also holds during it.
  std::lock_guard lock(mutex_);
  managed_bytes_ -= bytes;
}

void ManagedRuntime::set_limit(std::optional<std::size_t> bytes) {
  std::lock_guard lock(mutex_);
  limit_ = bytes;
}

std::optional<std::size_t> ManagedRuntime::limit() const {
  std::lock_guard lock(mutex_);
  return limit_;
}

std::size_t ManagedRuntime::managed_bytes() const {
  std::lock_guard lock(mutex_);
  return managed_bytes_;
}

std::size_t ManagedRuntime::peak_managed_bytes() const {
  std::lock_guard lock(mutex_);
  return peak_managed_bytes_;
}

} // namespace torch_uvm
