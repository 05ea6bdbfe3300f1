#include "cuda/pool_source.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "cuda/cuda_calls.h"
#include "cuda/cuda_versions.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm::cuda {
namespace {

constexpr int kFirstVersion = 13000; // first driver with pools of managed memory
constexpr std::size_t kAlignment = 2 * MiB; // of segments of at least this size
constexpr std::size_t kSmallAlignment = 512;

[[noreturn]] void lacking(const std::string& what) {
  throw RuntimeFailure("cuda_segments:pool asks for memory pools of managed memory, but " + what +
                       "; cuda_segments:malloc works everywhere");
}

OutOfMemory refused(std::size_t bytes, const std::string& why) {
  return OutOfMemory(OutOfMemory::Cause::kRuntime, bytes,
                     "cudaMallocFromPoolAsync of " + format_bytes(bytes) + " failed: " + why);
}

std::size_t reserved_bytes(cudaMemPool_t pool) {
  std::uint64_t reserved = 0;
  check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved), "cudaMemPoolGetAttribute");
  return reserved;
}

} // namespace

PoolSource::PoolSource(int devices) : devices_(devices), streams_(static_cast<std::size_t>(devices)) {
  if (!kManagedPools) {
    lacking("this was compiled for a CUDA older than 13");
  }
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  if (driver < kFirstVersion) {
    lacking("the driver is one for CUDA " + std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10) +
            ", and 13.0 is needed");
  }
  for (int device = 0; device < devices; ++device) {
    int supported = 0;
    check(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device), "cudaDeviceGetAttribute");
    if (supported == 0) {
      lacking("device " + std::to_string(device) + " has no memory pools");
    }
  }
}

PoolSource::~PoolSource() {
  for (const auto& [pool, made] : pools_) {
    succeeded(cudaMemPoolDestroy(pool));
  }
  for (const cudaStream_t stream : streams_) {
    if (stream != nullptr) {
      succeeded(cudaStreamDestroy(stream));
    }
  }
}

cudaMemPool_t PoolSource::pool_for(std::size_t bytes, std::optional<std::size_t> limit) {
  if (newest_ != nullptr) {
    const Pool& made = pools_.at(newest_);
    // A pool that was created beside earlier ones is smaller than the limit. If the request does not fit in it, a new
    // pool may, as the earlier ones may be gone.
    if (made.limit == limit && (!limit || bytes <= made.bytes - std::min(made.bytes, reserved_bytes(newest_)))) {
      return newest_;
    }
  }
  std::size_t held = 0;
  for (const auto& [pool, made] : pools_) {
    held += reserved_bytes(pool);
  }
  if (limit && (held > *limit || bytes > *limit - held)) { // also avoids a maximum size of 0, which means unbounded
    throw refused(bytes, "pools hold " + format_bytes(held) + " of the limit's " + format_bytes(*limit));
  }
  const std::size_t size = limit ? *limit - held : 0;
  cudaMemPool_t pool = nullptr;
  const cudaError_t status = make_managed_pool(&pool, size);
  if (status == cudaErrorNotSupported) {
    cudaGetLastError();
    lacking("the driver makes none");
  }
  check(status, "cudaMemPoolCreate");
  try {
    std::uint64_t threshold = 0;
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold), "cudaMemPoolSetAttribute");
    pools_.emplace(pool, Pool{limit, size, 0});
  } catch (...) {
    succeeded(cudaMemPoolDestroy(pool));
    throw;
  }
  const cudaMemPool_t before = std::exchange(newest_, pool);
  if (before != nullptr) {
    release(before);
  }
  return pool;
}

// Destroys the pool if it is empty and not the newest.
void PoolSource::release(cudaMemPool_t pool) noexcept {
  if (pool != newest_ && pools_.at(pool).allocations == 0) {
    succeeded(cudaMemPoolDestroy(pool));
    pools_.erase(pool);
  }
}

cudaStream_t PoolSource::stream_of_current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  cudaStream_t& stream = streams_.at(static_cast<std::size_t>(device));
  if (stream == nullptr) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  return stream;
}

void* PoolSource::allocate(std::size_t bytes, std::optional<std::size_t> limit) {
  const std::lock_guard lock(mutex_);
  const cudaMemPool_t pool = pool_for(bytes, limit);
  const cudaStream_t stream = stream_of_current_device();
  void* ptr = nullptr;
  const cudaError_t status = cudaMallocFromPoolAsync(&ptr, bytes, pool, stream);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw refused(bytes, cudaGetErrorString(status));
  }
  check(status, "cudaMallocFromPoolAsync");
  try {
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const std::size_t alignment = bytes >= kAlignment ? kAlignment : kSmallAlignment;
    if (reinterpret_cast<std::uintptr_t>(ptr) % alignment != 0) {
      throw RuntimeFailure("the pool's memory is not aligned to " + format_bytes(alignment) +
                           "; cuda_segments:malloc gives memory that is");
    }
    made_from_.emplace(ptr, pool);
  } catch (...) {
    succeeded(cudaFreeAsync(ptr, stream));
    throw;
  }
  ++pools_.at(pool).allocations;
  return ptr;
}

void PoolSource::free(void* ptr) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    const auto found = made_from_.find(ptr);
    if (found == made_from_.end()) {
      return;
    }
    // For pool memory, unlike memory of cudaMallocManaged, cudaFree does not wait for pending work.
    for (int device = 0; device < devices_; ++device) {
      if (has_context(device)) {
        const DeviceScope scope(device);
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      }
    }
    check(cudaFree(ptr), "cudaFree");
    const cudaMemPool_t pool = found->second;
    made_from_.erase(found);
    --pools_.at(pool).allocations;
    succeeded(cudaMemPoolTrimTo(pool, 0));
    release(pool);
  } catch (const std::exception&) {
    // At process exit the driver may be unloaded, and the memory with it.
  }
}

} // namespace torch_uvm::cuda
