// The driver's functions that torch asks for: by name, and as libcuda.so.1, as which the fake is made known.
// All but a few say CUDA_ERROR_NOT_SUPPORTED: whatever needs them runs kernels.
#include <cstring>
#include <utility>

#include "state.h"

using namespace fake_cuda;

#define NOT_SUPPORTED(name) \
  int name() {              \
    return 801;             \
  }

extern "C" {

int cuDevicePrimaryCtxGetState(int device, unsigned int* flags, int* active) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  *flags = 0;
  *active = state.valid(device) && state.devices[static_cast<std::size_t>(device)].has_context ? 1 : 0;
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == 0 ? "no error" : "not supported by the fake CUDA runtime";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  DeviceState& device = state.devices.at(static_cast<std::size_t>(current_device));
  *context = device.has_context ? &device : nullptr;
  return 0;
}

NOT_SUPPORTED(cuCtxSetCurrent)
NOT_SUPPORTED(cuDeviceGetAttribute)
NOT_SUPPORTED(cuDevicePrimaryCtxRetain)
NOT_SUPPORTED(cuFuncGetAttribute)
NOT_SUPPORTED(cuFuncSetAttribute)
NOT_SUPPORTED(cuFuncSetCacheConfig)
NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuLaunchKernel)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuModuleGetFunction)
NOT_SUPPORTED(cuModuleLoad)
NOT_SUPPORTED(cuModuleLoadData)
NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload)
NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_SUPPORTED(cuPointerGetAttribute)
NOT_SUPPORTED(cuTensorMapEncodeTiled)
NOT_SUPPORTED(fake_cuda_unsupported)

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  const std::pair<const char*, void*> known[] = {
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&cuDevicePrimaryCtxGetState)},
      {"cuGetErrorString", reinterpret_cast<void*>(&cuGetErrorString)},
      {"cuDeviceGet", reinterpret_cast<void*>(&cuDeviceGet)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&cuCtxGetCurrent)},
  };
  *function = reinterpret_cast<void*>(&fake_cuda_unsupported);
  for (const auto& [name, address] : known) {
    if (std::strcmp(name, symbol) == 0) {
      *function = address;
    }
  }
  if (status != nullptr) {
    *status = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

} // extern "C"
