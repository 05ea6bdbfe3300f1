// CudaRuntime's hints, and the range attributes that report them.
#include <algorithm>
#include <array>
#include <optional>

#include "cuda/cuda_calls.h"
#include "cuda/cuda_runtime.h"
#include "cuda/cuda_versions.h"

namespace torch_uvm::cuda {
namespace {

constexpr int kUnknown = -2; // cudaInvalidDeviceId: CUDA's answer for a range without a common location

/// By Advice.
constexpr std::array kNativeAdvice{cudaMemAdviseSetReadMostly,        cudaMemAdviseUnsetReadMostly,
                                   cudaMemAdviseSetPreferredLocation, cudaMemAdviseUnsetPreferredLocation,
                                   cudaMemAdviseSetAccessedBy,        cudaMemAdviseUnsetAccessedBy};
static_assert(static_cast<std::size_t>(Advice::kUnsetAccessedBy) + 1 == kNativeAdvice.size());

std::optional<Location> location_of(int id) {
  return id == kUnknown ? std::nullopt : std::optional(Location{id < 0 ? -1 : id});
}

} // namespace

bool CudaRuntime::takes_hints(int device) const {
  return device < 0 ? all_concurrent_ : devices_[static_cast<std::size_t>(device)].concurrent_managed_access;
}

bool CudaRuntime::prefetches(int device) const {
  return takes_hints(device) &&
         !(device < 0 ? any_one_memory_ : devices_[static_cast<std::size_t>(device)].one_memory());
}

CudaRuntime::Managed* CudaRuntime::find(const void* ptr) const {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  auto position = managed_.upper_bound(address);
  if (position == managed_.begin()) {
    return nullptr;
  }
  --position;
  return address - position->first < position->second.bytes ? &position->second : nullptr;
}

void CudaRuntime::prefetch(void* ptr, std::size_t bytes, Location to, Stream stream) {
  check_stream(stream);
  if (!to.is_host()) {
    check_device(to.index);
  }
  if (!prefetches(to.index) || !prefetches(stream.device)) {
    return;
  }
  const DeviceScope scope(stream.device);
  if (is_capturing(native(stream))) {
    return;
  }
  check(mem_prefetch(ptr, bytes, to, native(stream)), "cudaMemPrefetchAsync");
  const std::lock_guard lock(said_);
  if (Managed* const allocation = find(ptr)) {
    allocation->prefetched = true;
  }
}

void CudaRuntime::advise(void* ptr, std::size_t bytes, Advice advice, Location location) {
  check_usable();
  if (!location.is_host()) {
    check_device(location.index);
  }
  if (!takes_hints(location.index)) {
    return;
  }
  // On an H200 (driver 580), unsetting read-mostly on a range whose first page does not have it succeeds but leaves the
  // other pages unchanged. So unset it page by page.
  const cudaMemoryAdvise native_advice = kNativeAdvice.at(static_cast<std::size_t>(advice));
  const std::size_t step = advice == Advice::kUnsetReadMostly ? kMigrationPage : bytes;
  auto* const begin = static_cast<std::byte*>(ptr);
  for (std::size_t done = 0; done < bytes; done += step) {
    check(cudaMemAdvise(begin + done, std::min(step, bytes - done), native_advice, to_cuda(location)), "cudaMemAdvise");
  }
  const std::lock_guard lock(said_);
  if (Managed* const allocation = find(ptr)) {
    allocation->read_mostly |= advice == Advice::kSetReadMostly;
    allocation->preferred |= advice == Advice::kSetPreferredLocation;
    allocation->accessed_by |= advice == Advice::kSetAccessedBy;
  }
}

void CudaRuntime::discard(void* ptr, std::size_t bytes, Stream stream) {
  discard_before(Location::device(stream.device), ptr, bytes, stream);
}

void CudaRuntime::discard_before(Location writer, void* ptr, std::size_t bytes, Stream stream) {
  check_stream(stream);
  if (!writer.is_host()) {
    check_device(writer.index);
  }
  if (!kCanDiscard || !all_concurrent_ || !prefetches(writer.index) || !prefetches(stream.device)) {
    return;
  }
  const DeviceScope scope(stream.device);
  if (is_capturing(native(stream))) {
    return;
  }
  if (stream.handle != nullptr) {
    check(mem_discard(ptr, bytes, writer, native(stream)), "cudaMemDiscardAndPrefetchBatchAsync");
  } else {
    // The call does not accept the legacy default stream. Use a temporary stream, ordered by events.
    const Stream own = create_stream(stream.device, /*priority=*/0);
    const Event event = create_event(stream.device, /*timing=*/false);
    try {
      record_event(event, stream);
      wait_event(own, event);
      check(mem_discard(ptr, bytes, writer, native(own)), "cudaMemDiscardAndPrefetchBatchAsync");
      record_event(event, own);
      wait_event(stream, event);
    } catch (...) {
      destroy_event(event);
      destroy_stream(own);
      throw;
    }
    destroy_event(event);
    destroy_stream(own); // CUDA destroys it once its queued work is done
  }
  const std::lock_guard lock(said_);
  if (Managed* const allocation = find(ptr)) {
    allocation->prefetched = true;
  }
}

RangeAttributes CudaRuntime::ask(const void* ptr, std::size_t bytes) const {
  int read_mostly = 0, preferred = kUnknown, last_prefetch = kUnknown;
  std::vector<int> accessed_by(devices_.size() + 1, kUnknown); // all devices and the host
  std::array<void*, 4> data{&read_mostly, &preferred, accessed_by.data(), &last_prefetch};
  std::array<std::size_t, 4> sizes{sizeof(int), sizeof(int), accessed_by.size() * sizeof(int), sizeof(int)};
  std::array<cudaMemRangeAttribute, 4> which{cudaMemRangeAttributeReadMostly, cudaMemRangeAttributePreferredLocation,
                                             cudaMemRangeAttributeAccessedBy,
                                             cudaMemRangeAttributeLastPrefetchLocation};
  check(cudaMemRangeGetAttributes(data.data(), sizes.data(), which.data(), which.size(), ptr, bytes),
        "cudaMemRangeGetAttributes");
  RangeAttributes attributes;
  attributes.read_mostly = read_mostly != 0;
  attributes.preferred_location = location_of(preferred);
  attributes.last_prefetch = location_of(last_prefetch);
  for (const int id : accessed_by) {
    if (const auto location = location_of(id)) {
      attributes.accessed_by.push_back(*location);
    }
  }
  std::ranges::sort(attributes.accessed_by);
  return attributes;
}

RangeAttributes CudaRuntime::range_attributes(const void* ptr, std::size_t bytes) const {
  check_usable();
  if (!all_concurrent_) {
    return {}; // hints are never given on such a system
  }
  RangeAttributes whole = ask(ptr, bytes);
  Managed said;
  {
    const std::lock_guard lock(said_);
    if (const Managed* const allocation = find(ptr)) {
      said = *allocation;
    }
  }
  if ((whole.read_mostly || !said.read_mostly) && (whole.preferred_location || !said.preferred) &&
      (whole.last_prefetch || !said.prefetched) && !said.accessed_by) {
    return whole;
  }
  // Some hint was given on the allocation, but the whole range does not report it: compare page by page.
  const auto end = reinterpret_cast<std::uintptr_t>(ptr) + bytes;
  for (auto begin = reinterpret_cast<std::uintptr_t>(ptr); begin < end && whole.uniform;) {
    const std::uintptr_t next = std::min((begin / kMigrationPage + 1) * kMigrationPage, end);
    const RangeAttributes page = ask(reinterpret_cast<const void*>(begin), next - begin);
    whole.uniform = page.read_mostly == whole.read_mostly && page.preferred_location == whole.preferred_location &&
                    page.last_prefetch == whole.last_prefetch && page.accessed_by == whole.accessed_by;
    begin = next;
  }
  return whole;
}

} // namespace torch_uvm::cuda
