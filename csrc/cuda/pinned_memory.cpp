#include "cuda/pinned_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

#include "cuda/cuda_calls.h"
#include "runtime/bytes.h"
#include "runtime/error.h"
#include "runtime/host_memory.h"

namespace torch_uvm::cuda {
namespace {

constexpr std::size_t kLargePage = 2 * MiB;
constexpr std::size_t kMinRegistered = 8 * kLargePage; ///< below this the overhead of the calls dominates
constexpr std::size_t kMaxThreads = 4; ///< more are no faster
constexpr std::size_t kMinTouched = 16 * MiB; ///< per thread; starting a thread takes longer than touching less
constexpr std::size_t kSmallestPage = 4 * KiB;

void touch(char* begin, std::size_t bytes) noexcept {
  for (std::size_t at = 0; at < bytes; at += kSmallestPage) { // a huge page is populated by its first touch
    static_cast<volatile char*>(begin)[at] = 0;
  }
}

void touch_by_threads(char* begin, std::size_t bytes) {
  const std::size_t cores = std::max(std::thread::hardware_concurrency(), 1U);
  const std::size_t parts = std::clamp<std::size_t>(bytes / kMinTouched, 1, std::min(cores, kMaxThreads));
  const std::size_t part = round_up(bytes / parts, kLargePage);
  std::vector<std::jthread> others; // joined on destruction
  others.reserve(parts);
  std::size_t done = 0;
  try {
    for (; bytes - done > part; done += part) {
      others.emplace_back(&touch, begin + done, part);
    }
  } catch (const std::exception&) {
    // A thread could not be started: this thread touches the rest.
  }
  touch(begin + done, bytes - done);
}

} // namespace

PinnedMemory::PinnedMemory(int devices) : devices_(devices), registers_(true) {
  for (int device = 0; device < devices; ++device) {
    int same_address = 0;
    check(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device),
          "cudaDeviceGetAttribute");
    registers_ = registers_ && same_address != 0;
  }
}

void* PinnedMemory::allocate(std::size_t bytes, std::size_t available) {
  if (bytes >= kMinRegistered && registers_) {
    if (void* const ptr = registered(bytes, available)) {
      return ptr;
    }
  }
  void* ptr = nullptr;
  check_allocation(cudaHostAlloc(&ptr, bytes, cudaHostAllocPortable), "cudaHostAlloc", bytes,
                   OutOfMemory::Cause::kHost);
  return ptr;
}

void* PinnedMemory::registered(std::size_t bytes, std::size_t available) {
  if (bytes > available) {
    throw OutOfMemory(
        OutOfMemory::Cause::kHost, bytes,
        "pinned host memory of " + format_bytes(bytes) + " failed: " + format_bytes(available) + " available there");
  }
  void* const ptr = map_host_memory(bytes, kLargePage);
  try {
    madvise(ptr, bytes, MADV_HUGEPAGE); // may fail: small pages also work, only slower
    // Copy-on-write after a fork would separate the parent's pages from those that the device has pinned.
    keep_from_children(ptr, round_up(bytes, kSmallestPage));
    touch_by_threads(static_cast<char*>(ptr), bytes);
    const std::lock_guard lock(mutex_);
    mapped_.emplace(ptr, bytes);
  } catch (...) {
    unmap_host_memory(ptr, bytes);
    throw;
  }
  const cudaError_t status = cudaHostRegister(ptr, bytes, cudaHostRegisterPortable);
  if (status == cudaSuccess) {
    return ptr;
  }
  take_out(ptr);
  unmap_host_memory(ptr, bytes);
  if (status == cudaErrorMemoryAllocation) {
    check_allocation(status, "cudaHostRegister", bytes, OutOfMemory::Cause::kHost);
  }
  cudaGetLastError();
  registers_ = false; // some systems do not support registering existing memory
  return nullptr;
}

void PinnedMemory::wait_for_devices() const noexcept {
  for (int device = 0; device < devices_; ++device) {
    try {
      if (has_context(device)) {
        const DeviceScope scope(device);
        succeeded(cudaDeviceSynchronize());
      }
    } catch (...) {
      // The driver is unloaded, or the next call reports the error.
    }
  }
}

std::size_t PinnedMemory::take_out(void* ptr) noexcept {
  const std::lock_guard lock(mutex_);
  const auto taken = mapped_.extract(ptr);
  return taken ? taken.mapped() : 0;
}

void PinnedMemory::free(void* ptr) noexcept {
  const std::size_t bytes = take_out(ptr);
  if (bytes == 0) {
    succeeded(cudaFreeHost(ptr));
    return;
  }
  wait_for_devices(); // cudaFreeHost synchronises; for cudaHostUnregister that is not documented
  if (succeeded(cudaHostUnregister(ptr))) {
    unmap_host_memory(ptr, bytes);
  }
}

} // namespace torch_uvm::cuda
