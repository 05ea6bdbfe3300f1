// Devices, errors, versions.
#include <cstdio>
#include <utility>

#include "state.h"

using namespace fake_cuda;

namespace {

constexpr std::size_t kContextBytes = 0; // a real one takes some hundred MiB

} // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  return call("cudaGetDeviceCount", Kind::kPlain, [&](State& state) {
    *count = static_cast<int>(state.devices.size());
    return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return call("cudaGetDevice", Kind::kPlain, [&](State&) {
    *device = current_device;
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call("cudaSetDevice", Kind::kPlain, [&](State& state) {
    if (!state.valid(device)) {
      return cudaErrorInvalidDevice;
    }
    current_device = device;
    state.current(); // makes the context, as from CUDA 12 on
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call("cudaGetDeviceProperties", Kind::kPlain, [&](State& state) {
    if (!state.valid(device)) {
      return cudaErrorInvalidDevice;
    }
    *properties = cudaDeviceProp{};
    std::snprintf(properties->name, sizeof(properties->name), "Fake CUDA device");
    properties->totalGlobalMem = state.memory;
    properties->major = 9;
    properties->minor = 0;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->regsPerMultiprocessor = 65536;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->l2CacheSize = 50 << 20;
    properties->textureAlignment = 512;
    properties->managedMemory = 1;
    properties->concurrentManagedAccess = state.concurrent ? 1 : 0;
    properties->integrated = state.integrated ? 1 : 0;
    properties->pageableMemoryAccess = state.coherent ? 1 : 0;
    properties->unifiedAddressing = 1;
    properties->pciBusID = device + 1;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  return call("cudaDeviceGetAttribute", Kind::kPlain, [&](State& state) {
    if (!state.valid(device)) {
      return cudaErrorInvalidDevice;
    }
    switch (which) {
      case cudaDevAttrManagedMemory:
      case cudaDevAttrUnifiedAddressing:
      case cudaDevAttrCanUseHostPointerForRegisteredMem:
        *value = 1;
        break;
      case cudaDevAttrConcurrentManagedAccess:
        *value = state.concurrent ? 1 : 0;
        break;
      case cudaDevAttrIntegrated:
        *value = state.integrated ? 1 : 0;
        break;
      case cudaDevAttrPageableMemoryAccess:
      case cudaDevAttrPageableMemoryAccessUsesHostPageTables:
        *value = state.coherent ? 1 : 0;
        break;
      case cudaDevAttrDirectManagedMemAccessFromHost:
        // Of a GB10 the value is not known to us; 0 shows that `integrated` alone is enough.
        *value = state.coherent && !state.integrated ? 1 : 0;
        break;
      case cudaDevAttrMemoryPoolsSupported:
        *value = 0;
        break;
      case cudaDevAttrMultiProcessorCount:
        *value = 132;
        break;
      case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        break;
      case cudaDevAttrWarpSize:
        *value = 32;
        break;
      case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        break;
      default:
        *value = 0;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  return call("cudaDeviceGetPCIBusId", Kind::kPlain, [&](State&) {
    std::snprintf(id, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call("cudaDeviceCanAccessPeer", Kind::kPlain, [&](State& state) {
    *can = state.valid(device) && state.valid(peer) && device != peer ? 1 : 0;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int) {
  return call("cudaDeviceEnablePeerAccess", Kind::kPlain,
              [&](State& state) { return state.valid(peer) ? cudaSuccess : cudaErrorInvalidDevice; });
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call("cudaMemGetInfo", Kind::kPlain, [&](State& state) {
    const DeviceState& device = state.current();
    *total = state.memory;
    *free = state.memory - device.used - kContextBytes;
    return cudaSuccess;
  });
}

// --- errors

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorCudartUnloading:
      return "cudaErrorCudartUnloading";
    default:
      return "cudaErrorOfTheFake";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorCudartUnloading:
      return "driver shutting down";
    default:
      return "an error of the fake CUDA runtime";
  }
}

// --- versions

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}
cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}

} // extern "C"
