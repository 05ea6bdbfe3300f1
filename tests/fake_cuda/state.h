// What the fake knows. One mutex guards all of it: this is for control paths, not for speed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

static_assert(CUDART_VERSION >= 13000, "the fake has the signatures of CUDA 13");

namespace fake_cuda {

constexpr int kNowhere = -2; // cudaInvalidDeviceId
constexpr std::size_t kPage = 4096; // hints are held to it

/// The hints of one page.
struct Hints {
  bool read_mostly = false;
  int preferred = kNowhere;
  int last_prefetch = kNowhere;
  std::uint64_t accessed_by = 0; ///< a bit a device; the last one is the host's
};

struct Allocation {
  std::string made_by; ///< the function
  std::size_t bytes = 0;
  int device = -1; ///< -1: the host's
  bool managed = false;
  std::vector<Hints> hints; ///< by page; empty before the first hint
};

/// Work is a number: what was queued up to it, what is done.
struct StreamState {
  int device = 0;
  bool blocking = true;
  int priority = 0;
  std::uint64_t queued = 0;
  std::uint64_t done = 0;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  unsigned long long capture_id = 0;
  std::uint64_t capturing_thread = 0;
};

struct EventState {
  int device = 0;
  bool timing = true;
  bool captured = false; ///< recorded while its stream was captured
  std::shared_ptr<StreamState> stream; ///< null: never recorded
  std::uint64_t position = 0;
};

struct DeviceState {
  std::size_t used = 0; ///< of plain memory
  bool has_context = false;
  std::shared_ptr<StreamState> default_stream = std::make_shared<StreamState>();
};

struct State {
  std::mutex mutex;
  std::vector<DeviceState> devices;
  std::size_t memory = 0;
  bool concurrent = true, managed_fixed = false;
  bool integrated = false, coherent = false; ///< coherent: the device uses the host's page tables
  bool hold = false, unloaded = false;
  std::unordered_map<std::string, std::size_t> counts;
  std::unordered_map<std::string, std::pair<std::size_t, cudaError_t>> failures; ///< the call, and its error
  std::map<std::uintptr_t, Allocation> allocations;
  std::unordered_map<cudaStream_t, std::shared_ptr<StreamState>> streams;
  std::unordered_map<cudaEvent_t, std::unique_ptr<EventState>> events;
  std::unordered_set<cudaGraph_t> graphs;
  std::unordered_set<cudaGraphExec_t> executables;
  std::uint64_t next_handle = 1;
  std::string misuse, reported_misuse;
  std::string report;
  int process = 0; ///< that made this state: a forked child must not call

  static State& get();
  void configure(int device_count, std::size_t bytes, bool is_concurrent, std::string_view profile);
  void complain(const std::string& what);

  bool valid(int device) const {
    return device >= 0 && device < static_cast<int>(devices.size());
  }
  DeviceState& current();
  /// The allocation that holds this address, and where it begins; null if none does.
  std::pair<const std::uintptr_t, Allocation>* find(const void* ptr);
  /// Whether the whole range lies in one allocation.
  bool holds(const void* ptr, std::size_t bytes);
  cudaError_t allocate(const char* made_by, void** out, std::size_t bytes, int device, bool managed);
  cudaError_t free(const char* name, void* ptr, std::initializer_list<std::string_view> made_by);
  /// The stream, by its handle; null is the current device's default one. Null if there is none such.
  std::shared_ptr<StreamState> stream(cudaStream_t handle);
  /// Some work was put into a stream. An error where the stream is not one, or of another device's default.
  cudaError_t queue(const char* name, cudaStream_t handle, bool may_be_captured);
  void wait(StreamState& stream) {
    stream.done = stream.queued;
  }
  template <typename Handle>
  Handle make_handle() {
    return reinterpret_cast<Handle>(next_handle++ << 4 | 0xFA00000000000000ULL);
  }
};

// constinit: else GCC reads them through a function, whose result UBSAN takes for null.
extern constinit thread_local int current_device;
extern constinit thread_local cudaStreamCaptureMode capture_mode;
extern constinit thread_local cudaError_t last_error;
std::uint64_t this_thread();

enum class Kind {
  kPlain,
  kUnsafe, ///< refused while a stream captures, unless the thread's mode allows it
};

/// What every call begins with: counting, failures that were ordered, what is wrong at this time.
cudaError_t entered(State& state, const char* name, Kind kind);

/// A call's frame: takes the lock, and remembers an error for cudaGetLastError.
template <typename Body>
cudaError_t call(const char* name, Kind kind, Body body) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  cudaError_t status = entered(state, name, kind);
  if (status == cudaSuccess) {
    status = body(state);
  }
  if (status != cudaSuccess) {
    last_error = status;
  }
  return status;
}

} // namespace fake_cuda
