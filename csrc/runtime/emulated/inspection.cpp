// Functions that only the emulated runtime has: kernels, accesses by the host, queries, and aids for tests.
#include <algorithm>

#include "runtime/emulated/state.h"

namespace torch_uvm {

using emulated::Traffic;

bool EmulatedRuntime::State::is_pinned(const void* ptr) const {
  const auto* allocation = find_plain(ptr);
  return allocation != nullptr && allocation->device < 0;
}

void EmulatedRuntime::State::kernel_touch(int device, const Touch& touch, Traffic& traffic) {
  if (is_pinned(touch.ptr) && profile.memory != MemoryKind::kOne) {
    // Pinned memory is mapped: a device accesses it over the link, and it never migrates.
    (touch.write ? traffic.in_place_written : traffic.in_place_read) += touch.bytes;
    counters.of(device).bytes_in_place += touch.bytes;
    return;
  }
  pages.touch(Location::device(device), touch.ptr, touch.bytes, touch.write, traffic);
}

void EmulatedRuntime::begin_kernel(Stream stream, std::span<const Touch> accesses) {
  State::Lock lock(state_->mutex);
  const auto& found = state_->queue.stream(stream);
  emulated::StreamState* on = found.get();
  std::shared_ptr<emulated::StreamState> kept;
  if (!state_->queue.idle(*on)) {
    kept = found; // `drain` releases the lock, so the stream may be destroyed meanwhile
    state_->queue.drain(lock, kept);
  }
  Traffic traffic;
  for (const Touch& access : accesses) {
    state_->kernel_touch(stream.device, access, traffic);
  }
  ++state_->counters.of(stream.device).kernels;
  on->time_us = state_->clock.kernel(stream.device, on->time_us, traffic);
  state_->sample(Location::device(stream.device), traffic, on->time_us);
  state_->queue.tick();
}

void EmulatedRuntime::wait_in_kernel(Stream stream) {
  State::Lock lock(state_->mutex);
  const std::shared_ptr<emulated::StreamState> on = state_->queue.stream(stream);
  if (!state_->queue.idle(*on)) {
    state_->queue.drain(lock, on);
  }
}

void EmulatedRuntime::end_kernel(Stream stream, std::span<const Touch> accesses) {
  State::Lock lock(state_->mutex);
  emulated::StreamState& on = *state_->queue.stream(stream);
  if (!accesses.empty()) {
    Traffic traffic;
    for (const Touch& access : accesses) {
      state_->kernel_touch(stream.device, access, traffic);
    }
    on.time_us = state_->clock.serve(stream.device, on.time_us, traffic);
    state_->sample(Location::device(stream.device), traffic, on.time_us);
  }
  state_->queue.tick();
}

void EmulatedRuntime::touch_from_host(std::span<const Touch> accesses) {
  State::Lock lock(state_->mutex);
  Traffic traffic;
  for (const Touch& access : accesses) {
    state_->pages.touch(Location::host(), access.ptr, access.bytes, access.write, traffic);
  }
  state_->clock.host_touch(traffic);
  state_->sample(Location::host(), traffic, state_->clock.host());
}

ResidencyInfo EmulatedRuntime::residency(const void* ptr, std::size_t bytes) const {
  State::Lock lock(state_->mutex);
  return state_->pages.residency(state_->pages.require(ptr, bytes), ptr, bytes);
}

bool EmulatedRuntime::is_pinned_ptr(const void* ptr) const {
  State::Lock lock(state_->mutex);
  return state_->is_pinned(ptr);
}

std::optional<int> EmulatedRuntime::device_of(const void* ptr) const {
  State::Lock lock(state_->mutex);
  const auto* allocation = state_->find_plain(ptr);
  return allocation != nullptr && allocation->device >= 0 ? std::optional(allocation->device) : std::nullopt;
}

EmulatedCounters EmulatedRuntime::counters(std::optional<int> device) const {
  if (device) {
    state_->check_device(*device);
  }
  State::Lock lock(state_->mutex);
  return device ? state_->counters.of(*device) : state_->counters.total();
}

void EmulatedRuntime::reset_counters() {
  State::Lock lock(state_->mutex);
  state_->counters.reset();
  state_->pages.reset_peaks();
  for (auto& timeline : state_->timelines) {
    timeline.clear();
  }
}

std::size_t EmulatedRuntime::resident_bytes(int device) const {
  state_->check_device(device);
  State::Lock lock(state_->mutex);
  return state_->pages.resident_bytes(device);
}

std::size_t EmulatedRuntime::peak_resident_bytes(int device) const {
  state_->check_device(device);
  State::Lock lock(state_->mutex);
  return state_->pages.peak_resident_bytes(device);
}

double EmulatedRuntime::stream_time_us(Stream stream) const {
  State::Lock lock(state_->mutex);
  return state_->queue.stream(stream)->time_us;
}

double EmulatedRuntime::time_us() const {
  State::Lock lock(state_->mutex);
  double latest = state_->clock.latest();
  for (int device = 0; device < state_->config.devices; ++device) {
    for (const auto& stream : state_->queue.streams(device)) {
      latest = std::max(latest, stream->time_us);
    }
  }
  return latest;
}

std::vector<ResidencySample> EmulatedRuntime::timeline(int device) const {
  state_->check_device(device);
  State::Lock lock(state_->mutex);
  return state_->timelines[static_cast<std::size_t>(device)].points();
}

std::size_t EmulatedRuntime::pending_operations() const {
  State::Lock lock(state_->mutex);
  return state_->queue.pending();
}

// --- calls that fail, devices that are held ------------------------------------------------------------------

void EmulatedRuntime::set_call_hook(CallHook hook) {
  State::Lock lock(state_->mutex);
  state_->call_hook = std::move(hook);
}

void EmulatedRuntime::hold_device(int device) {
  state_->check_device(device);
  if (state_->config.schedule_seed) {
    throw InvalidArgument("an emulated device with a seeded schedule cannot be held; accepted: the default schedule");
  }
  State::Lock lock(state_->mutex);
  state_->queue.hold(device, true);
}

void EmulatedRuntime::release_device(int device) {
  state_->check_device(device);
  State::Lock lock(state_->mutex);
  state_->queue.hold(device, false);
}

void EmulatedRuntime::await_waiter() {
  State::Lock lock(state_->mutex);
  state_->queue.await_waiter(lock);
}

std::size_t EmulatedRuntime::live_objects() const {
  State::Lock lock(state_->mutex);
  return state_->pages.allocations().size() + state_->plain.size() + state_->queue.handles();
}

// --- fork -------------------------------------------------------------------------------------------------

void EmulatedRuntime::before_fork() {
  State::Lock lock(state_->mutex);
  state_->queue.before_fork(lock);
  lock_for_fork();
  lock.release(); // the mutex stays locked until after_fork_in_parent or after_fork_in_child
}

void EmulatedRuntime::after_fork_in_parent() {
  unlock_after_fork();
  state_->mutex.unlock();
}

void EmulatedRuntime::after_fork_in_child() {
  state_->queue.after_fork_in_child();
  unlock_after_fork();
  state_->mutex.unlock();
}

} // namespace torch_uvm
