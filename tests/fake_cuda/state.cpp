// The state behind every call, and the functions for tests.
#include "state.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "fake_cuda.h"

namespace fake_cuda {
namespace {

constexpr std::size_t kDefaultMemory = std::size_t{256} << 20;
constexpr std::size_t kAlignment = std::size_t{2} << 20;

std::size_t number(const char* variable, std::size_t otherwise) {
  const char* const text = std::getenv(variable);
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : otherwise;
}

std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

// Fresh pages at an aligned address. Touching them after they are given back is a segmentation fault.
void* map(std::size_t bytes) {
  if (bytes > SIZE_MAX - 2 * kAlignment) {
    return nullptr;
  }
  const std::size_t wanted = whole_pages(bytes);
  const std::size_t mapped = wanted + kAlignment;
  void* const got = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) {
    return nullptr;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(got);
  const std::uintptr_t aligned = (address + kAlignment - 1) / kAlignment * kAlignment;
  if (aligned != address) {
    munmap(got, aligned - address);
  }
  if (address + mapped != aligned + wanted) {
    munmap(reinterpret_cast<void*>(aligned + wanted), address + mapped - aligned - wanted);
  }
  return reinterpret_cast<void*>(aligned);
}

} // namespace

thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;

std::uint64_t this_thread() {
  static std::atomic<std::uint64_t> next{1};
  thread_local const std::uint64_t mine = next++;
  return mine;
}

State& State::get() {
  static State* const state = [] {
    auto* made = new State(); // leaked: memory is freed after every static destructor
    made->process = getpid();
    const char* const profile = std::getenv("FAKE_CUDA_PROFILE");
    made->configure(static_cast<int>(number("FAKE_CUDA_DEVICES", 1)), number("FAKE_CUDA_MEMORY", kDefaultMemory),
                    number("FAKE_CUDA_CONCURRENT", 1) != 0, profile == nullptr ? "h200" : profile);
    made->managed_fixed = number("FAKE_CUDA_MANAGED_FIXED", 0) != 0;
    if (const char* const path = std::getenv("FAKE_CUDA_REPORT")) {
      made->report = path;
    }
    std::string text = std::getenv("FAKE_CUDA_FAIL") != nullptr ? std::getenv("FAKE_CUDA_FAIL") : "";
    for (std::size_t start = 0; start < text.size();) {
      const std::size_t end = std::min(text.find(',', start), text.size());
      const std::string part = text.substr(start, end - start);
      const std::size_t colon = part.find(':');
      if (colon != std::string::npos) {
        const std::size_t nth = std::strtoull(part.c_str() + colon + 1, nullptr, 10);
        made->failures[part.substr(0, colon)] = {nth, cudaErrorMemoryAllocation};
      }
      start = end + 1;
    }
    return made;
  }();
  return *state;
}

void State::configure(int device_count, std::size_t bytes, bool is_concurrent, std::string_view profile) {
  if (profile != "h200" && profile != "gb10" && profile != "gh200") {
    std::fprintf(stderr, "fake CUDA: there is no profile '%s'\n", std::string(profile).c_str());
    std::abort();
  }
  devices.clear();
  devices.resize(static_cast<std::size_t>(device_count));
  for (int device = 0; device < device_count; ++device) {
    devices[static_cast<std::size_t>(device)].default_stream->device = device;
  }
  memory = bytes;
  concurrent = is_concurrent;
  integrated = profile == "gb10";
  coherent = profile != "h200";
}

void State::complain(const std::string& what) {
  misuse += what + "\n";
  if (!report.empty()) {
    if (std::FILE* const file = std::fopen(report.c_str(), "a")) {
      std::fprintf(file, "%s\n", what.c_str());
      std::fclose(file);
    }
  }
}

DeviceState& State::current() {
  DeviceState& device = devices.at(static_cast<std::size_t>(current_device));
  device.has_context = true;
  return device;
}

std::pair<const std::uintptr_t, Allocation>* State::find(const void* ptr) {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  auto position = allocations.upper_bound(address);
  if (position == allocations.begin()) {
    return nullptr;
  }
  --position;
  return address - position->first < position->second.bytes ? &*position : nullptr;
}

bool State::holds(const void* ptr, std::size_t bytes) {
  const auto* const found = find(ptr);
  return found != nullptr && bytes <= found->second.bytes - (reinterpret_cast<std::uintptr_t>(ptr) - found->first);
}

cudaError_t State::allocate(const char* made_by, void** out, std::size_t bytes, int device, bool managed) {
  if (out == nullptr || (managed && bytes == 0)) {
    return cudaErrorInvalidValue;
  }
  *out = nullptr;
  if (bytes == 0) {
    return cudaSuccess;
  }
  const bool takes_memory = device >= 0 && (!managed || managed_fixed);
  if (takes_memory && bytes > memory - devices[static_cast<std::size_t>(device)].used) {
    return cudaErrorMemoryAllocation;
  }
  void* const ptr = map(bytes);
  if (ptr == nullptr) {
    return cudaErrorMemoryAllocation;
  }
  Allocation allocation;
  allocation.made_by = made_by;
  allocation.bytes = bytes;
  allocation.device = device;
  allocation.managed = managed;
  allocations.emplace(reinterpret_cast<std::uintptr_t>(ptr), std::move(allocation));
  if (takes_memory) {
    devices[static_cast<std::size_t>(device)].used += bytes;
  }
  *out = ptr;
  return cudaSuccess;
}

cudaError_t State::free(const char* name, void* ptr, std::initializer_list<std::string_view> made_by) {
  if (ptr == nullptr) {
    return cudaSuccess;
  }
  const auto found = allocations.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (found == allocations.end() || std::ranges::find(made_by, found->second.made_by) == made_by.end()) {
    complain(std::string(name) + " of memory that is not there to be freed so");
    return cudaErrorInvalidValue;
  }
  const Allocation& allocation = found->second;
  if (allocation.device >= 0 && (!allocation.managed || managed_fixed)) {
    devices[static_cast<std::size_t>(allocation.device)].used -= allocation.bytes;
  }
  munmap(ptr, whole_pages(allocation.bytes));
  allocations.erase(found);
  return cudaSuccess;
}

cudaError_t entered(State& state, const char* name, Kind kind) {
  const std::size_t count = ++state.counts[name];
  if (state.process != getpid()) {
    state.complain(std::string(name) + " in a forked child");
    return cudaErrorInitializationError;
  }
  if (state.unloaded) {
    return cudaErrorCudartUnloading;
  }
  const auto failure = state.failures.find(name);
  if (failure != state.failures.end() && failure->second.first == count) {
    return failure->second.second;
  }
  if (kind == Kind::kUnsafe && capture_mode != cudaStreamCaptureModeRelaxed) {
    for (const auto& [handle, stream] : state.streams) {
      const bool global = stream->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal;
      const bool own = stream->mode != cudaStreamCaptureModeRelaxed && stream->capturing_thread == this_thread();
      if (stream->capture == cudaStreamCaptureStatusActive && (global || own)) {
        stream->capture = cudaStreamCaptureStatusInvalidated;
        state.complain(std::string(name) + " broke the capture of a stream");
        return cudaErrorStreamCaptureUnsupported;
      }
    }
  }
  return cudaSuccess;
}

} // namespace fake_cuda

using fake_cuda::State;

extern "C" {

std::size_t fake_cuda_count(const char* name) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  const auto found = state.counts.find(name);
  return found == state.counts.end() ? 0 : found->second;
}

void fake_cuda_fail(const char* name, std::size_t nth, int error) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  state.failures[name] = {state.counts[name] + nth, static_cast<cudaError_t>(error)};
}

void fake_cuda_hold(int on) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  state.hold = on != 0;
}

void fake_cuda_unload(int on) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  state.unloaded = on != 0;
}

const char* fake_cuda_misuse() {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  state.reported_misuse.swap(state.misuse);
  state.misuse.clear();
  return state.reported_misuse.c_str();
}

std::size_t fake_cuda_live(const char* name) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  std::size_t live = 0;
  for (const auto& [address, allocation] : state.allocations) {
    live += allocation.made_by == name ? 1 : 0;
  }
  return live;
}

std::size_t fake_cuda_live_bytes(const char* name) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  std::size_t bytes = 0;
  for (const auto& [address, allocation] : state.allocations) {
    bytes += allocation.made_by == name ? allocation.bytes : 0;
  }
  return bytes;
}

int fake_cuda_has_context(int device) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  return state.valid(device) && state.devices[static_cast<std::size_t>(device)].has_context ? 1 : 0;
}

void fake_cuda_reset(int devices, std::size_t memory, int concurrent, const char* profile) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  state.configure(devices, memory, concurrent != 0, profile);
  state.allocations.clear();
  state.counts.clear();
  state.failures.clear();
  state.misuse.clear();
  state.hold = state.unloaded = false;
  fake_cuda::current_device = 0;
}

} // extern "C"
