// Memory pools, those of managed memory included, with their release threshold and largest size.
#include <algorithm>

#include "state.h"

using namespace fake_cuda;

namespace {

PoolState* pool_of(State& state, const char* name, cudaMemPool_t pool) {
  const auto found = state.pools.find(pool);
  if (found == state.pools.end()) {
    state.complain(std::string(name) + " of a pool that is not there");
    return nullptr;
  }
  return found->second.get();
}

cudaMemPool_t default_pool(State& state, int device) {
  const auto handle = reinterpret_cast<cudaMemPool_t>(0xFADE0000ULL + static_cast<unsigned>(device) * 16);
  auto& pool = state.pools[handle];
  if (pool == nullptr) {
    pool = std::make_unique<PoolState>();
    pool->properties.allocType = cudaMemAllocationTypePinned;
    pool->properties.location = {cudaMemLocationTypeDevice, {device}};
  }
  return handle;
}

cudaError_t allocate(State& state, const char* name, void** ptr, std::size_t bytes, cudaMemPool_t handle,
                     cudaStream_t stream) {
  PoolState* const pool = pool_of(state, name, handle);
  if (pool == nullptr) {
    return cudaErrorInvalidValue;
  }
  const cudaError_t queued = state.queue(name, stream, true);
  if (queued != cudaSuccess) {
    return queued;
  }
  const std::size_t most = pool->properties.maxSize;
  if (most != 0 && (bytes > most || pool->used > most - bytes)) {
    return cudaErrorMemoryAllocation;
  }
  const bool managed = pool->properties.allocType == cudaMemAllocationTypeManaged;
  const bool host = pool->properties.location.type == cudaMemLocationTypeHost;
  const cudaError_t status = state.allocate(name, ptr, bytes, host ? -1 : pool->properties.location.id, managed);
  if (status == cudaSuccess && *ptr != nullptr) {
    state.find(*ptr)->second.pool = handle;
    pool->used += bytes;
    pool->reserved = std::max(pool->reserved, pool->used);
    pool->used_high = std::max(pool->used_high, pool->used);
    pool->reserved_high = std::max(pool->reserved_high, pool->reserved);
  }
  return status;
}

} // namespace

extern "C" {

cudaError_t cudaMemPoolCreate(cudaMemPool_t* handle, const cudaMemPoolProps* properties) {
  return call("cudaMemPoolCreate", Kind::kUnsafe, [&](State& state) {
    const cudaMemLocation where = properties->location;
    const bool known = where.type == cudaMemLocationTypeHost || where.type == cudaMemLocationTypeNone ||
                       (where.type == cudaMemLocationTypeDevice && state.valid(where.id));
    if (!state.pools_supported || !known) {
      return state.pools_supported ? cudaErrorInvalidValue : cudaErrorNotSupported;
    }
    *handle = state.make_handle<cudaMemPool_t>();
    auto& pool = state.pools[*handle];
    pool = std::make_unique<PoolState>();
    pool->properties = *properties;
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t handle) {
  return call("cudaMemPoolDestroy", Kind::kUnsafe, [&](State& state) {
    const PoolState* const pool = pool_of(state, "cudaMemPoolDestroy", handle);
    if (pool == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (pool->used != 0) {
      state.complain("cudaMemPoolDestroy of a pool that is in use");
    }
    state.pools.erase(handle);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return call("cudaDeviceGetDefaultMemPool", Kind::kPlain, [&](State& state) {
    if (!state.valid(device)) {
      return cudaErrorInvalidDevice;
    }
    *pool = default_pool(state, device);
    return cudaSuccess;
  });
}

cudaError_t cudaMallocFromPoolAsync(void** ptr, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  return call("cudaMallocFromPoolAsync", Kind::kPlain,
              [&](State& state) { return allocate(state, "cudaMallocFromPoolAsync", ptr, bytes, pool, stream); });
}

cudaError_t cudaMallocAsync(void** ptr, std::size_t bytes, cudaStream_t stream) {
  return call("cudaMallocAsync", Kind::kPlain, [&](State& state) {
    return allocate(state, "cudaMallocAsync", ptr, bytes, default_pool(state, current_device), stream);
  });
}

cudaError_t cudaFreeAsync(void* ptr, cudaStream_t stream) {
  return call("cudaFreeAsync", Kind::kPlain, [&](State& state) {
    const cudaError_t status = state.queue("cudaFreeAsync", stream, true);
    return status == cudaSuccess
               ? state.free("cudaFreeAsync", ptr, {"cudaMalloc", "cudaMallocAsync", "cudaMallocFromPoolAsync"})
               : status;
  });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, std::size_t keep) {
  return call("cudaMemPoolTrimTo", Kind::kPlain, [&](State& state) {
    PoolState* const pool = pool_of(state, "cudaMemPoolTrimTo", handle);
    if (pool == nullptr) {
      return cudaErrorInvalidValue;
    }
    pool->reserved = std::max(pool->used, std::min(pool->reserved, keep));
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t handle, const cudaMemAccessDesc*, std::size_t) {
  return call("cudaMemPoolSetAccess", Kind::kPlain, [&](State& state) {
    return pool_of(state, "cudaMemPoolSetAccess", handle) == nullptr ? cudaErrorInvalidValue : cudaSuccess;
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, cudaMemPoolAttr which, void* value) {
  return call("cudaMemPoolSetAttribute", Kind::kPlain, [&](State& state) {
    PoolState* const pool = pool_of(state, "cudaMemPoolSetAttribute", handle);
    if (pool == nullptr) {
      return cudaErrorInvalidValue;
    }
    switch (which) {
      case cudaMemPoolAttrReleaseThreshold:
        pool->release_threshold = *static_cast<std::uint64_t*>(value);
        break;
      case cudaMemPoolAttrUsedMemHigh:
        pool->used_high = pool->used;
        break;
      case cudaMemPoolAttrReservedMemHigh:
        pool->reserved_high = pool->reserved;
        break;
      default:
        break; // how blocks are reused: nothing of that here
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, cudaMemPoolAttr which, void* value) {
  return call("cudaMemPoolGetAttribute", Kind::kPlain, [&](State& state) {
    const PoolState* const pool = pool_of(state, "cudaMemPoolGetAttribute", handle);
    if (pool == nullptr) {
      return cudaErrorInvalidValue;
    }
    auto& answer = *static_cast<std::uint64_t*>(value);
    switch (which) {
      case cudaMemPoolAttrReleaseThreshold:
        answer = pool->release_threshold;
        return cudaSuccess;
      case cudaMemPoolAttrUsedMemCurrent:
        answer = pool->used;
        return cudaSuccess;
      case cudaMemPoolAttrUsedMemHigh:
        answer = pool->used_high;
        return cudaSuccess;
      case cudaMemPoolAttrReservedMemCurrent:
        answer = pool->reserved;
        return cudaSuccess;
      case cudaMemPoolAttrReservedMemHigh:
        answer = pool->reserved_high;
        return cudaSuccess;
      default:
        return cudaErrorInvalidValue;
    }
  });
}

} // extern "C"
