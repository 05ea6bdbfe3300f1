// CudaRuntime's streams and events, and the work that it queues.
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "cuda/cuda_calls.h"
#include "cuda/cuda_runtime.h"
#include "runtime/error.h"

namespace torch_uvm::cuda {
namespace {

void refuse_capture(Stream stream, const char* call) {
  if (stream.handle != nullptr && is_capturing(native(stream))) {
    throw RuntimeFailure(std::string(call) + " on a stream that a graph is captured from");
  }
}

} // namespace

void CudaRuntime::copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) {
  check_stream(stream);
  const DeviceScope scope(stream.device);
  check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, native(stream)), "cudaMemcpyAsync");
}

void CudaRuntime::zero_async(void* ptr, std::size_t bytes, Stream stream) {
  check_stream(stream);
  const DeviceScope scope(stream.device);
  check(cudaMemsetAsync(ptr, 0, bytes, native(stream)), "cudaMemsetAsync");
}

void CudaRuntime::delay(double us, Stream stream) {
  check_stream(stream);
  const DeviceScope scope(stream.device);
  using Time = std::chrono::duration<double, std::micro>;
  auto time = std::make_unique<Time>(us);
  const auto sleep = [](void* passed) {
    const std::unique_ptr<Time> slept(static_cast<Time*>(passed));
    std::this_thread::sleep_for(*slept);
  };
  check(cudaLaunchHostFunc(native(stream), sleep, time.get()), "cudaLaunchHostFunc");
  time.release(); // `sleep` owns it
}

// --- streams and events

Stream CudaRuntime::create_stream(int device, int priority) {
  check_device(device);
  const DeviceScope scope(device);
  int least = 0, greatest = 0; // a lower number is a higher priority
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  const int asked = priority < greatest ? greatest : priority > least ? least : priority;
  cudaStream_t made = nullptr;
  check(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, asked), "cudaStreamCreateWithPriority");
  return Stream{device, made};
}

void CudaRuntime::destroy_stream(Stream stream) noexcept {
  if (stream.handle != nullptr && !is_forked_child()) {
    succeeded(cudaStreamDestroy(native(stream)));
  }
}

bool CudaRuntime::query_stream(Stream stream) {
  if (stream.is_host()) {
    return true;
  }
  check_device(stream.device);
  const DeviceScope scope(stream.device);
  if (stream.handle != nullptr && is_capturing(native(stream))) {
    return false; // a query would invalidate the capture
  }
  const CaptureScope uncaptured;
  return done(cudaStreamQuery(native(stream)), "cudaStreamQuery");
}

void CudaRuntime::synchronize_stream(Stream stream) {
  if (stream.is_host()) {
    return;
  }
  check_device(stream.device);
  const DeviceScope scope(stream.device);
  refuse_capture(stream, "cudaStreamSynchronize");
  const CaptureScope uncaptured;
  check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
}

void CudaRuntime::synchronize_device(int device) {
  check_device(device);
  if (!has_context(device)) {
    return; // nothing can be queued there, and synchronising would create a context
  }
  const DeviceScope scope(device);
  const CaptureScope uncaptured;
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Event CudaRuntime::create_event(int device, bool timing) {
  check_device(device);
  const DeviceScope scope(device);
  cudaEvent_t made = nullptr;
  check(cudaEventCreateWithFlags(&made, timing ? cudaEventDefault : cudaEventDisableTiming),
        "cudaEventCreateWithFlags");
  return Event{made};
}

void CudaRuntime::destroy_event(Event event) noexcept {
  if (event && !is_forked_child()) {
    succeeded(cudaEventDestroy(native(event)));
  }
}

void CudaRuntime::record_event(Event event, Stream stream) {
  check_stream(stream);
  const DeviceScope scope(stream.device);
  refuse_capture(stream, "cudaEventRecord"); // it would record a node of the graph, and the event would never complete
  check(cudaEventRecord(native(event), native(stream)), "cudaEventRecord");
}

bool CudaRuntime::query_event(Event event) {
  check_usable();
  const CaptureScope uncaptured;
  return done(cudaEventQuery(native(event)), "cudaEventQuery");
}

void CudaRuntime::synchronize_event(Event event) {
  check_usable();
  const CaptureScope uncaptured;
  check(cudaEventSynchronize(native(event)), "cudaEventSynchronize");
}

void CudaRuntime::wait_event(Stream stream, Event event) {
  check_stream(stream);
  const DeviceScope scope(stream.device);
  check(cudaStreamWaitEvent(native(stream), native(event), /*flags=*/0), "cudaStreamWaitEvent");
}

double CudaRuntime::elapsed_ms(Event from, Event to) {
  check_usable();
  float elapsed = 0;
  check(cudaEventElapsedTime(&elapsed, native(from), native(to)), "cudaEventElapsedTime");
  return elapsed;
}

} // namespace torch_uvm::cuda
