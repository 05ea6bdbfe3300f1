#include "cuda/cuda_calls.h"

#include <string>

#include "cuda/cuda_versions.h"
#include "runtime/bytes.h"

namespace torch_uvm::cuda {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) {
    return;
  }
  cudaGetLastError();
  throw RuntimeFailure(std::string(call) + " failed: " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) +
                       ")");
}

void check_allocation(cudaError_t status, const char* call, std::size_t bytes, OutOfMemory::Cause cause) {
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw OutOfMemory(cause, bytes,
                      std::string(call) + " of " + format_bytes(bytes) + " failed: " + cudaGetErrorString(status));
  }
  check(status, call);
}

bool succeeded(cudaError_t status) noexcept {
  if (status != cudaSuccess) {
    cudaGetLastError();
  }
  return status == cudaSuccess;
}

bool done(cudaError_t status, const char* call) {
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status, call);
  return true;
}

bool has_context(int device) {
  using GetState = int (*)(int device, unsigned int* flags, int* active); // driver and runtime ordinals are the same
  constexpr unsigned int kSince = 7000;
  static const auto get_state = [] {
    void* found = nullptr;
    check(driver_function("cuDevicePrimaryCtxGetState", kSince, &found), "cudaGetDriverEntryPoint");
    return reinterpret_cast<GetState>(found);
  }();
  unsigned int flags = 0;
  int active = 0;
  return get_state(device, &flags, &active) == 0 && active != 0;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  // The query fails for the legacy default stream while a blocking stream is being captured: that counts as captured.
  return !succeeded(cudaStreamIsCapturing(stream, &status)) || status != cudaStreamCaptureStatusNone;
}

DeviceScope::DeviceScope(int device) {
  int current = -1;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (device >= 0 && current != device) {
    check(cudaSetDevice(device), "cudaSetDevice");
    previous_ = current;
  }
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) {
    succeeded(cudaSetDevice(previous_));
  }
}

} // namespace torch_uvm::cuda
