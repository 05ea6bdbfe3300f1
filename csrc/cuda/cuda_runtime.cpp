#include "cuda/cuda_runtime.h"

#include <pthread.h>

#include <atomic>
#include <limits>
#include <string>

#include "cuda/cuda_calls.h"
#include "runtime/bytes.h"
#include "runtime/error.h"
#include "runtime/host_memory.h"

namespace torch_uvm::cuda {
namespace {

/// The step by which an H200 (driver 580) takes device memory for managed pages, whatever the size and number of
/// allocations.
constexpr std::size_t kManagedStep = 128 * MiB;

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

DeviceProperties properties_of(int device) {
  cudaDeviceProp found{};
  check(cudaGetDeviceProperties(&found, device), "cudaGetDeviceProperties");
  DeviceProperties properties;
  properties.name = found.name;
  properties.total_memory = found.totalGlobalMem;
  properties.managed_memory = attribute(cudaDevAttrManagedMemory, device) != 0;
  properties.concurrent_managed_access = attribute(cudaDevAttrConcurrentManagedAccess, device) != 0;
  properties.pageable_memory_access = attribute(cudaDevAttrPageableMemoryAccess, device) != 0;
  properties.integrated = attribute(cudaDevAttrIntegrated, device) != 0;
  properties.host_page_tables = attribute(cudaDevAttrPageableMemoryAccessUsesHostPageTables, device) != 0;
  properties.direct_managed_access = attribute(cudaDevAttrDirectManagedMemAccessFromHost, device) != 0;
  // On an H200, copies of managed memory do not overlap with kernels, whatever the advice. They do if host and device
  // share page tables, where nothing migrates.
  properties.managed_copies_overlap = properties.host_page_tables;
  properties.kernels_take_time = true;
  properties.page_bytes = CudaRuntime::kMigrationPage;
  properties.managed_step = properties.managed_copies_overlap ? 1 : kManagedStep;
  return properties;
}

} // namespace

// --- forks

// Registry of all runtimes, for the fork handlers. Handlers cannot be unregistered, so one set serves all runtimes.
struct CudaRuntime::ForkHandlers {
  static inline std::mutex mutex; // guards `all`; taken before all other locks of this file
  static inline std::vector<CudaRuntime*> all;
  static inline std::atomic<bool> in_child{false};

  static void add(CudaRuntime* runtime) {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(&before, &after_in_parent, &after_in_child); });
    const std::lock_guard lock(mutex);
    all.push_back(runtime);
  }
  static void remove(CudaRuntime* runtime) {
    const std::lock_guard lock(mutex);
    std::erase(all, runtime);
  }

 private:
  static void before() {
    mutex.lock();
    for (CudaRuntime* const runtime : all) {
      runtime->said_.lock();
      runtime->lock_for_fork();
    }
  }
  static void after_in_parent() {
    for (CudaRuntime* const runtime : all) {
      runtime->unlock_after_fork();
      runtime->said_.unlock();
    }
    mutex.unlock();
  }
  static void after_in_child() {
    in_child.store(true);
    after_in_parent();
  }
};

CudaRuntime::CudaRuntime() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (count == 0) {
    throw RuntimeFailure("CUDA finds no device");
  }
  for (int device = 0; device < count; ++device) {
    devices_.push_back(properties_of(device));
    all_concurrent_ = all_concurrent_ && devices_.back().concurrent_managed_access;
    any_one_memory_ = any_one_memory_ || devices_.back().one_memory();
  }
  pinned_ = std::make_unique<PinnedMemory>(count);
  ForkHandlers::add(this);
}

CudaRuntime::~CudaRuntime() {
  ForkHandlers::remove(this);
}

bool CudaRuntime::is_forked_child() noexcept {
  return ForkHandlers::in_child.load(std::memory_order_relaxed);
}

void CudaRuntime::check_usable() const {
  if (is_forked_child()) {
    throw RuntimeFailure(
        "CUDA in a forked process: its devices belong to the parent; start workers with 'spawn' or 'forkserver'");
  }
}

void CudaRuntime::check_device(int device) const {
  check_usable();
  if (device < 0 || device >= device_count()) {
    throw InvalidArgument("device " + std::to_string(device) + "; there are " + std::to_string(device_count()) +
                          " (0 to " + std::to_string(device_count() - 1) + ")");
  }
}

void CudaRuntime::check_stream(Stream stream) const {
  if (stream.is_host()) {
    throw InvalidArgument("the host has no stream to queue work on; accepted: a stream of a device");
  }
  check_device(stream.device);
}

// --- managed memory

void* CudaRuntime::do_allocate_managed(std::size_t bytes, Location home) {
  check_usable();
  const DeviceScope scope(home.index);
  const CaptureScope uncaptured;
  int current = 0;
  check(cudaGetDevice(&current), "cudaGetDevice");
  void* ptr = nullptr;
  check_allocation(cudaMallocManaged(&ptr, bytes, cudaMemAttachGlobal), "cudaMallocManaged", bytes,
                   OutOfMemory::Cause::kRuntime);
  try {
    const std::lock_guard lock(said_);
    managed_.emplace(reinterpret_cast<std::uintptr_t>(ptr), Managed{bytes, current});
  } catch (...) {
    succeeded(cudaFree(ptr));
    throw;
  }
  return ptr;
}

void CudaRuntime::do_free_managed(void* ptr, std::size_t /*bytes*/) noexcept {
  if (is_forked_child()) {
    return; // the memory belongs to the parent
  }
  int device = -1;
  {
    const std::lock_guard lock(said_);
    if (const auto freed = managed_.extract(reinterpret_cast<std::uintptr_t>(ptr))) {
      device = freed.mapped().device;
    }
  }
  try {
    const DeviceScope scope(device);
    const CaptureScope uncaptured;
    succeeded(cudaFree(ptr));
  } catch (const RuntimeFailure&) {
    // At process exit the driver may be unloaded, and the memory with it.
  }
}

// --- pinned host memory, plain device memory

void* CudaRuntime::allocate_pinned(std::size_t bytes) {
  check_usable();
  const CaptureScope uncaptured;
  return pinned_->allocate(bytes, host_memory_available());
}

void CudaRuntime::free_pinned(void* ptr) noexcept {
  if (!is_forked_child()) {
    const CaptureScope uncaptured;
    pinned_->free(ptr);
  }
}

void* CudaRuntime::allocate_device(std::size_t bytes, int device) {
  check_device(device);
  const DeviceScope scope(device);
  const CaptureScope uncaptured;
  void* ptr = nullptr;
  check_allocation(cudaMalloc(&ptr, bytes), "cudaMalloc", bytes, OutOfMemory::Cause::kDevice);
  return ptr;
}

void CudaRuntime::free_device(void* ptr) noexcept {
  if (is_forked_child()) {
    return;
  }
  try {
    cudaPointerAttributes found{};
    check(cudaPointerGetAttributes(&found, ptr), "cudaPointerGetAttributes");
    const DeviceScope scope(found.device);
    const CaptureScope uncaptured;
    succeeded(cudaFree(ptr));
  } catch (const RuntimeFailure&) {
    // As in do_free_managed.
  }
}

// --- devices

int CudaRuntime::device_count() const {
  return static_cast<int>(devices_.size());
}

DeviceProperties CudaRuntime::device_properties(int device) const {
  check_device(device);
  return devices_[static_cast<std::size_t>(device)];
}

MemoryInfo CudaRuntime::memory_info(int device) const {
  check_device(device);
  if (devices_[static_cast<std::size_t>(device)].one_memory()) {
    // cudaMemGetInfo counts the page cache as used there, although Linux drops it when memory is needed.
    const MemoryInfo host{operating_system_memory_available(), operating_system_memory_total()};
    if (host.free != std::numeric_limits<std::size_t>::max() && host.total != std::numeric_limits<std::size_t>::max()) {
      return host;
    }
  }
  const DeviceScope scope(device);
  MemoryInfo info;
  check(cudaMemGetInfo(&info.free, &info.total), "cudaMemGetInfo");
  return info;
}

std::size_t CudaRuntime::host_memory_available() const {
  return operating_system_memory_available();
}

} // namespace torch_uvm::cuda
