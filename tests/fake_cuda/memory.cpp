// Memory: everything is the host's, and everything is done at once.
#include <cstring>

#include "state.h"

using namespace fake_cuda;

namespace {

// A side of a copy that lies in no allocation is ordinary host memory, which is allowed; one that begins in
// an allocation and leaves it is not.
bool fits(State& state, const char* name, const void* ptr, std::size_t bytes) {
  if (bytes != 0 && state.find(ptr) != nullptr && !state.holds(ptr, bytes)) {
    state.complain(std::string(name) + " reaches beyond an allocation");
    return false;
  }
  return true;
}

cudaError_t copy(State& state, const char* name, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (!fits(state, name, to, bytes) || !fits(state, name, from, bytes)) {
    return cudaErrorInvalidValue;
  }
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  if (bytes != 0 && ((from_device && state.find(from) == nullptr) || (to_device && state.find(to) == nullptr))) {
    state.complain(std::string(name) + ": an address that is said to be a device's is none");
    return cudaErrorInvalidValue;
  }
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t fill(State& state, const char* name, void* ptr, int value, std::size_t bytes) {
  if (bytes != 0 && !state.holds(ptr, bytes)) {
    state.complain(std::string(name) + " of memory that is not allocated");
    return cudaErrorInvalidValue;
  }
  std::memset(ptr, value, bytes);
  return cudaSuccess;
}

} // namespace

extern "C" {

cudaError_t cudaMalloc(void** ptr, std::size_t bytes) {
  return call("cudaMalloc", Kind::kUnsafe, [&](State& state) {
    state.current();
    return state.allocate("cudaMalloc", ptr, bytes, current_device, false);
  });
}

cudaError_t cudaMallocManaged(void** ptr, std::size_t bytes, unsigned int flags) {
  return call("cudaMallocManaged", Kind::kUnsafe, [&](State& state) {
    state.current();
    return flags == cudaMemAttachGlobal ? state.allocate("cudaMallocManaged", ptr, bytes, current_device, true)
                                        : cudaErrorInvalidValue;
  });
}

cudaError_t cudaFree(void* ptr) {
  return call("cudaFree", Kind::kUnsafe, [&](State& state) {
    const auto* const found = state.find(ptr);
    if (found != nullptr && found->second.device != current_device &&
        !state.devices[static_cast<std::size_t>(current_device)].has_context) {
      state.complain("cudaFree with a device current that was never used: a context is made there");
    }
    state.current();
    return state.free("cudaFree", ptr, {"cudaMalloc", "cudaMallocManaged"});
  });
}

cudaError_t cudaHostAlloc(void** ptr, std::size_t bytes, unsigned int) {
  return call("cudaHostAlloc", Kind::kUnsafe,
              [&](State& state) { return state.allocate("cudaHostAlloc", ptr, bytes, -1, false); });
}

cudaError_t cudaFreeHost(void* ptr) {
  return call("cudaFreeHost", Kind::kUnsafe,
              [&](State& state) { return state.free("cudaFreeHost", ptr, {"cudaHostAlloc"}); });
}

cudaError_t cudaHostRegister(void* ptr, std::size_t bytes, unsigned int) {
  return call("cudaHostRegister", Kind::kUnsafe, [&](State& state) {
    if (state.find(ptr) != nullptr) {
      state.complain("cudaHostRegister of memory that CUDA gave, or has already");
      return cudaErrorHostMemoryAlreadyRegistered;
    }
    if (ptr == nullptr || bytes == 0) {
      return cudaErrorInvalidValue;
    }
    Allocation allocation;
    allocation.made_by = "cudaHostRegister";
    allocation.bytes = bytes;
    state.allocations.emplace(reinterpret_cast<std::uintptr_t>(ptr), std::move(allocation));
    return cudaSuccess;
  });
}
cudaError_t cudaHostUnregister(void* ptr) {
  return call("cudaHostUnregister", Kind::kUnsafe, [&](State& state) {
    const auto found = state.allocations.find(reinterpret_cast<std::uintptr_t>(ptr));
    if (found == state.allocations.end() || found->second.made_by != "cudaHostRegister") {
      state.complain("cudaHostUnregister of memory that is not registered");
      return cudaErrorHostMemoryNotRegistered;
    }
    state.allocations.erase(found); // the pages are its owner's
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return call("cudaMemcpy", Kind::kUnsafe,
              [&](State& state) { return copy(state, "cudaMemcpy", to, from, bytes, kind); });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return call("cudaMemcpyAsync", Kind::kPlain, [&](State& state) {
    const cudaError_t status = state.queue("cudaMemcpyAsync", stream, true);
    return status == cudaSuccess ? copy(state, "cudaMemcpyAsync", to, from, bytes, kind) : status;
  });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t stream) {
  return call("cudaMemcpyPeerAsync", Kind::kPlain, [&](State& state) {
    const cudaError_t status = state.queue("cudaMemcpyPeerAsync", stream, true);
    return status == cudaSuccess ? copy(state, "cudaMemcpyPeerAsync", to, from, bytes, cudaMemcpyDefault) : status;
  });
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return call("cudaMemcpy2DAsync", Kind::kPlain, [&](State& state) {
    cudaError_t status = state.queue("cudaMemcpy2DAsync", stream, true);
    for (std::size_t row = 0; row < height && status == cudaSuccess; ++row) {
      status = copy(state, "cudaMemcpy2DAsync", static_cast<char*>(to) + row * to_pitch,
                    static_cast<const char*>(from) + row * from_pitch, width, kind);
    }
    return status;
  });
}

cudaError_t cudaMemset(void* ptr, int value, std::size_t bytes) {
  return call("cudaMemset", Kind::kUnsafe, [&](State& state) { return fill(state, "cudaMemset", ptr, value, bytes); });
}

cudaError_t cudaMemsetAsync(void* ptr, int value, std::size_t bytes, cudaStream_t stream) {
  return call("cudaMemsetAsync", Kind::kPlain, [&](State& state) {
    const cudaError_t status = state.queue("cudaMemsetAsync", stream, true);
    return status == cudaSuccess ? fill(state, "cudaMemsetAsync", ptr, value, bytes) : status;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* ptr) {
  return call("cudaPointerGetAttributes", Kind::kPlain, [&](State& state) {
    *attributes = cudaPointerAttributes{};
    const auto* const found = state.find(ptr);
    if (found == nullptr) {
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = cudaInvalidDeviceId;
      return cudaSuccess;
    }
    const Allocation& allocation = found->second;
    attributes->type = allocation.managed ? cudaMemoryTypeManaged
                                          : (allocation.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice);
    attributes->device = allocation.device < 0 ? 0 : allocation.device;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(ptr);
    return cudaSuccess;
  });
}

// --- between processes: a handle is the address

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* ptr) {
  return call("cudaIpcGetMemHandle", Kind::kPlain, [&](State& state) {
    const auto* const found = state.find(ptr);
    if (found == nullptr || found->second.managed) {
      state.complain("cudaIpcGetMemHandle of memory that cannot be shared");
      return cudaErrorInvalidValue;
    }
    *handle = cudaIpcMemHandle_t{};
    std::memcpy(handle->reserved, &ptr, sizeof(ptr));
    return cudaSuccess;
  });
}
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned int) {
  return call("cudaIpcOpenMemHandle", Kind::kPlain, [&](State&) { return cudaErrorNotSupported; });
}
cudaError_t cudaIpcCloseMemHandle(void*) {
  return call("cudaIpcCloseMemHandle", Kind::kPlain, [&](State&) { return cudaSuccess; });
}

} // extern "C"
