// Calls of the CUDA runtime, with its errors as ours and the current device left as it was.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/location.h"

namespace torch_uvm::cuda {

inline cudaStream_t native(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

inline cudaEvent_t native(Event event) {
  return static_cast<cudaEvent_t>(event.handle);
}

/// \throws RuntimeFailure with the call's name and CUDA's own words; the error is taken from the thread,
///         so that an unrelated call does not report it again
void check(cudaError_t status, const char* call);

/// The same where nothing may be thrown: true if it succeeded.
bool succeeded(cudaError_t status) noexcept;

/// The same of a question: true for cudaSuccess, false for cudaErrorNotReady. \throws RuntimeFailure
bool done(cudaError_t status, const char* call);

/// Whether somebody uses the device already, so that naming it makes no context.
bool has_context(int device);

/// Whether work that is put into the stream becomes part of a graph. The stream's device is current.
bool is_capturing(cudaStream_t stream);

/// Makes `device` current for its lifetime; a negative one leaves all as it is. From CUDA 12 on making a device
/// current makes its context, which takes some hundred MiB: also of the one that is made current again.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1; ///< -1: it was current already
};

/// Lets this thread allocate, free and ask while a stream is captured in global mode by whatever thread: calls
/// that a capture cannot hold would break it otherwise, and none of ours is meant to be part of a graph.
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
