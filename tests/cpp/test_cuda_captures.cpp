// CudaRuntime during the capture of a CUDA graph: no call breaks the capture, and captured streams take no hints.
#include <thread>
#include <utility>

#include "cuda_rig.h"

using namespace contract;
using namespace cuda_rig;

namespace {

/// Captures a stream in global mode, torch's default.
struct Capture {
  cudaStream_t stream = nullptr;
  bool over = false;
  Capture() {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
  }
  ~Capture() {
    end();
    cudaStreamDestroy(stream);
  }
  bool end() {
    cudaGraph_t graph = nullptr;
    return !std::exchange(over, true) && cudaStreamEndCapture(stream, &graph) == cudaSuccess &&
           cudaGraphDestroy(graph) == cudaSuccess;
  }
};

} // namespace

TEST(no_call_breaks_a_capture_of_this_thread_or_another) {
  const auto runtime = made();
  void* const before = runtime->allocate_managed(MiB, kDevice);
  Capture capture;
  const auto work = [&] {
    runtime->free_managed(runtime->allocate_managed(4 * MiB, kDevice));
    runtime->free_device(runtime->allocate_device(MiB, 0));
    runtime->free_pinned(runtime->allocate_pinned(MiB));
    runtime->free_pinned(runtime->allocate_pinned(32 * MiB));
    const Stream stream = runtime->create_stream(0, 0);
    const Event event = runtime->create_event(0, false);
    runtime->record_event(event, stream);
    CHECK(runtime->query_event(event) && runtime->query_stream(stream));
    runtime->synchronize_event(event);
    runtime->synchronize_stream(stream);
    runtime->destroy_event(event);
    runtime->destroy_stream(stream);
  };
  work();
  std::thread(work).join();
  runtime->free_managed(before);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  cudaThreadExchangeStreamCaptureMode(&mode);
  CHECK(mode == cudaStreamCaptureModeGlobal); // unchanged
  CHECK(capture.end());
  all_is_well();
}

TEST(the_fake_reports_a_call_that_breaks_a_capture) {
  const auto runtime = made();
  Capture capture;
  void* ptr = nullptr;
  CHECK(cudaMallocManaged(&ptr, MiB, cudaMemAttachGlobal) == cudaErrorStreamCaptureUnsupported);
  contains(fake_cuda_misuse(), "cudaMallocManaged broke the capture");
  CHECK(!capture.end());
  cudaGetLastError();
}

TEST(a_captured_stream_takes_no_hint_and_no_event) {
  const auto runtime = made();
  void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
  const Event event = runtime->create_event(0, false);
  {
    Capture capture;
    const Stream stream{0, capture.stream};
    runtime->prefetch(ptr, 4 * MiB, kDevice, stream);
    runtime->discard(ptr, 4 * MiB, stream);
    CHECK(!runtime->query_stream(stream)); // a captured stream is never idle
    contains(message_of([&] { runtime->record_event(event, stream); }), "cudaEventRecord on a stream that a graph");
    CHECK_THROWS(RuntimeFailure, runtime->synchronize_stream(stream));
    CHECK(capture.end());
  }
  CHECK_EQ(fake_cuda_count("cudaMemPrefetchAsync") + fake_cuda_count("cudaMemDiscardAndPrefetchBatchAsync"),
           std::size_t{0});
  runtime->destroy_event(event);
  runtime->free_managed(ptr);
  all_is_well();
}

HARNESS_MAIN()
