// Helpers for CUDA runtime calls: error translation, and scopes for the current device and the capture mode.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/error.h"
#include "runtime/location.h"

namespace torch_uvm::cuda {

inline cudaStream_t native(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

inline cudaEvent_t native(Event event) {
  return static_cast<cudaEvent_t>(event.handle);
}

/// \throws RuntimeFailure with the call's name and CUDA's message, and clears the thread's last error, so that a later
///         unrelated check does not report it
void check(cudaError_t status, const char* call);

/// The same for an allocation. \throws OutOfMemory if memory is short
void check_allocation(cudaError_t status, const char* call, std::size_t bytes, OutOfMemory::Cause cause);

/// Returns whether the call succeeded, and clears the thread's last error if not.
bool succeeded(cudaError_t status) noexcept;

/// For queries: true for cudaSuccess, false for cudaErrorNotReady. \throws RuntimeFailure for other errors
bool done(cudaError_t status, const char* call);

/// Whether the device's primary context is active, so that using the device creates none.
bool has_context(int device);

/// Whether the stream is being captured into a graph. The stream's device must be current.
bool is_capturing(cudaStream_t stream);

/// Makes `device` current for its lifetime; a no-op if `device` is negative or already current. From CUDA 12 on,
/// cudaSetDevice creates the device's context, which takes some hundred MiB, also for the previous device when it is
/// restored.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1; ///< -1: the device has not changed
};

/// Sets this thread's capture mode to relaxed. Otherwise an allocation, free or query would invalidate a capture in
/// global mode on any thread. None of our calls is meant to become part of a graph.
class CaptureScope {
 public:
  CaptureScope() {
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~CaptureScope() {
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

} // namespace torch_uvm::cuda
