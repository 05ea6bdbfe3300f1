// Functions that only the emulated runtime has: kernels, accesses by the host, queries, and aids for tests.
#include <algorithm>

#include "runtime/emulated/emulated_runtime.h"

namespace torch_uvm {

using emulated::Traffic;

bool EmulatedRuntime::is_pinned(const void* ptr) const {
  const auto* allocation = find_plain(ptr);
  return allocation != nullptr && allocation->device < 0;
}

void EmulatedRuntime::touch(int device, std::span<const Touch> accesses, Traffic& traffic) {
  for (const Touch& access : accesses) {
    if (is_pinned(access.ptr) && profile_.memory != MemoryKind::kOne) {
      // Pinned memory is mapped: a device accesses it over the link, and it never migrates.
      (access.write ? traffic.in_place_written : traffic.in_place_read) += access.bytes;
      counters_.of(device).bytes_in_place += access.bytes;
    } else {
      pages_.touch(Location::device(device), access.ptr, access.bytes, access.write, traffic);
    }
  }
}

void EmulatedRuntime::begin_kernel(Stream stream, std::span<const Touch> accesses) {
  Lock lock(mutex_);
  const auto on = queue_.stream(stream); // `drain` releases the lock, so the stream may be destroyed meanwhile
  queue_.drain(lock, on);
  Traffic traffic;
  touch(stream.device, accesses, traffic);
  ++counters_.of(stream.device).kernels;
  on->time_us = clock_.kernel(stream.device, on->time_us, traffic);
  sample(on->time_us);
  queue_.tick();
}

void EmulatedRuntime::wait_in_kernel(Stream stream) {
  Lock lock(mutex_);
  queue_.drain(lock, queue_.stream(stream));
}

void EmulatedRuntime::end_kernel(Stream stream, std::span<const Touch> accesses) {
  Lock lock(mutex_);
  const auto& on = queue_.stream(stream);
  if (!accesses.empty()) {
    Traffic traffic;
    touch(stream.device, accesses, traffic);
    on->time_us = clock_.serve(stream.device, on->time_us, traffic);
    sample(on->time_us);
  }
  queue_.tick();
}

void EmulatedRuntime::touch_from_host(std::span<const Touch> accesses) {
  Lock lock(mutex_);
  Traffic traffic;
  for (const Touch& access : accesses) {
    pages_.touch(Location::host(), access.ptr, access.bytes, access.write, traffic);
  }
  clock_.host_touch(traffic);
  sample(clock_.host());
}

ResidencyInfo EmulatedRuntime::residency(const void* ptr, std::size_t bytes) const {
  Lock lock(mutex_);
  return pages_.residency(pages_.require(ptr, bytes), ptr, bytes);
}

bool EmulatedRuntime::is_pinned_ptr(const void* ptr) const {
  Lock lock(mutex_);
  return is_pinned(ptr);
}

EmulatedCounters EmulatedRuntime::counters(std::optional<int> device) const {
  if (device) {
    check_device(*device);
  }
  Lock lock(mutex_);
  return device ? counters_.of(*device) : counters_.total();
}

void EmulatedRuntime::reset_counters() {
  Lock lock(mutex_);
  counters_.reset();
  pages_.reset_peaks();
  timelines_.assign(timelines_.size(), {});
}

std::size_t EmulatedRuntime::resident_bytes(int device) const {
  check_device(device);
  Lock lock(mutex_);
  return pages_.resident_bytes(device);
}

std::size_t EmulatedRuntime::peak_resident_bytes(int device) const {
  check_device(device);
  Lock lock(mutex_);
  return pages_.peak_resident_bytes(device);
}

double EmulatedRuntime::stream_time_us(Stream stream) const {
  Lock lock(mutex_);
  return queue_.stream(stream)->time_us;
}

double EmulatedRuntime::time_us() const {
  Lock lock(mutex_);
  double latest = clock_.latest();
  for (int device = 0; device < config_.devices; ++device) {
    for (const auto& stream : queue_.streams(device)) {
      latest = std::max(latest, stream->time_us);
    }
  }
  return latest;
}

std::vector<ResidencySample> EmulatedRuntime::timeline(int device) const {
  check_device(device);
  Lock lock(mutex_);
  return timelines_[static_cast<std::size_t>(device)].points();
}

std::size_t EmulatedRuntime::pending_operations() const {
  Lock lock(mutex_);
  return queue_.pending();
}

// --- calls that fail, devices that are held ------------------------------------------------------------------

void EmulatedRuntime::set_call_hook(CallHook hook) {
  Lock lock(mutex_);
  call_hook_ = std::move(hook);
}

void EmulatedRuntime::hold_device(int device) {
  check_device(device);
  if (config_.schedule_seed) {
    throw InvalidArgument("an emulated device with a seeded schedule cannot be held; accepted: the default schedule");
  }
  Lock lock(mutex_);
  queue_.hold(device, true);
}

void EmulatedRuntime::release_device(int device) {
  check_device(device);
  Lock lock(mutex_);
  queue_.hold(device, false);
}

void EmulatedRuntime::await_waiter() {
  Lock lock(mutex_);
  queue_.await_waiter(lock);
}

std::size_t EmulatedRuntime::live_objects() const {
  Lock lock(mutex_);
  return pages_.allocations().size() + plain_.size() + queue_.handles();
}

// --- fork -------------------------------------------------------------------------------------------------

void EmulatedRuntime::before_fork() {
  Lock lock(mutex_);
  queue_.before_fork(lock);
  lock_for_fork();
  lock.release(); // the mutex stays locked until after_fork_in_parent or after_fork_in_child
}

void EmulatedRuntime::after_fork_in_parent() {
  unlock_after_fork();
  mutex_.unlock();
}

void EmulatedRuntime::after_fork_in_child() {
  queue_.after_fork_in_child();
  unlock_after_fork();
  mutex_.unlock();
}

} // namespace torch_uvm
