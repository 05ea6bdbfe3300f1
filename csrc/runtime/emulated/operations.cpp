// Work of an emulated runtime that is queued on streams, and its effects on pages, clocks and counters.
#include <algorithm>
#include <sstream>
#include <string>

#include "runtime/emulated/emulated_runtime.h"

namespace torch_uvm {

using emulated::CopySide;
using emulated::Operation;
using emulated::StreamState;
using emulated::Traffic;

void EmulatedRuntime::prefetch(void* ptr, std::size_t bytes, Location to, Stream stream) {
  Lock lock(mutex_);
  check_location(to);
  const auto& on = queue_.stream(stream);
  pages_.require(ptr, bytes);
  call("prefetch");
  if (profile_.memory != MemoryKind::kSeparate) {
    return;
  }
  ++counters_.of(stream.device).prefetch_calls;
  enqueue(*on, {.kind = Operation::Kind::kPrefetch, .ptr = ptr, .bytes = bytes, .to = to});
}

void EmulatedRuntime::discard(void* ptr, std::size_t bytes, Stream stream) {
  Lock lock(mutex_);
  const auto& on = queue_.stream(stream);
  pages_.require(ptr, bytes);
  call("discard");
  if (profile_.memory != MemoryKind::kSeparate) {
    return;
  }
  ++counters_.of(stream.device).discard_calls;
  enqueue(*on, {.kind = Operation::Kind::kDiscard, .ptr = ptr, .bytes = bytes});
}

void EmulatedRuntime::copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) {
  Lock lock(mutex_);
  const auto& on = queue_.stream(stream);
  if (bytes == 0) {
    return;
  }
  check_copy_range("to", dst, bytes);
  check_copy_range("from", src, bytes);
  call("copy_async");
  ++counters_.of(stream.device).copy_calls;
  enqueue(*on, {.kind = Operation::Kind::kCopy, .ptr = dst, .source = src, .bytes = bytes});
}

void EmulatedRuntime::zero_async(void* ptr, std::size_t bytes, Stream stream) {
  Lock lock(mutex_);
  const auto& on = queue_.stream(stream);
  if (bytes == 0) {
    return;
  }
  check_copy_range("to", ptr, bytes);
  call("zero_async");
  ++counters_.of(stream.device).zero_calls;
  enqueue(*on, {.kind = Operation::Kind::kZero, .ptr = ptr, .bytes = bytes});
}

void EmulatedRuntime::enqueue(StreamState& stream, Operation operation) {
  clock_.call();
  operation.queued_us = clock_.host();
  queue_.enqueue(stream, std::move(operation));
}

void EmulatedRuntime::delay(double us, Stream stream) {
  Lock lock(mutex_);
  const auto& on = queue_.stream(stream);
  call("delay");
  clock_.call();
  // The clock alone: kernels run when they are launched, and only times are told apart.
  on->time_us = std::max(on->time_us, clock_.host()) + us;
}

void EmulatedRuntime::check_copy_range(const char* side, const void* ptr, std::size_t bytes) const {
  const auto refuse = [&](const std::string& why) {
    std::ostringstream message;
    message << "copy of " << bytes << " bytes, " << side << " " << ptr << ": " << why;
    throw InvalidArgument(message.str());
  };
  if (ptr == nullptr) {
    refuse("an address is needed");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::size_t left = bytes; // ordinary host memory: its size is unknown, so the caller is trusted
  if (const auto* allocation = pages_.find(ptr)) {
    left = allocation->bytes - (address - allocation->base);
  } else if (const PlainAllocation* allocation = find_plain(ptr)) {
    left = allocation->bytes - (address - allocation->base);
  }
  if (bytes > left) {
    refuse("the allocation there ends after " + std::to_string(left) + " bytes");
  }
}

// --- effects ------------------------------------------------------------------------------------------------

void EmulatedRuntime::account(StreamState& stream, const Operation& operation) {
  const double queued_us = operation.queued_us;
  Traffic traffic;
  switch (operation.kind) {
    case Operation::Kind::kCopy:
      account_copy(stream, operation);
      break;
    case Operation::Kind::kZero: // like a kernel that writes the range
      pages_.touch(Location::device(stream.device), operation.ptr, operation.bytes, true, traffic);
      stream.time_us = clock_.serve(stream.device, clock_.start(stream.device, stream.time_us, queued_us), traffic);
      sample(stream.time_us);
      break;
    case Operation::Kind::kPrefetch:
      pages_.prefetch(pages_.require(operation.ptr, operation.bytes), operation.ptr, operation.bytes, operation.to,
                      traffic);
      stream.time_us = clock_.prefetch(stream.device, stream.time_us, queued_us, operation.to, traffic);
      sample(stream.time_us);
      break;
    case Operation::Kind::kDiscard:
      pages_.discard(pages_.require(operation.ptr, operation.bytes), operation.ptr, operation.bytes);
      stream.time_us = clock_.discard(stream.device, stream.time_us, queued_us, operation.bytes);
      break;
    case Operation::Kind::kRecord:
      operation.mark->time_us = std::max(stream.time_us, queued_us);
      break;
    case Operation::Kind::kWait:
      stream.time_us = std::max({stream.time_us, queued_us, operation.mark->time_us});
      break;
  }
}

void EmulatedRuntime::account_copy(StreamState& stream, const Operation& operation) {
  Traffic traffic;
  emulated::EmulatedClock::Copy copy{.bytes = operation.bytes};
  // Returns the device on which the range resides, or -1.
  const auto side = [&](const void* ptr, bool write) {
    if (auto* allocation = pages_.find(ptr)) {
      const CopySide where = pages_.copy_side(*allocation, ptr, operation.bytes, stream.device, write, traffic);
      if (where.device >= where.host) {
        return where.device_index;
      }
      copy.pageable = true; // host-resident managed memory is not pinned
      return -1;
    }
    if (const PlainAllocation* allocation = find_plain(ptr)) {
      return allocation->device;
    }
    copy.pageable = true;
    return -1;
  };
  copy.from = side(operation.source, false);
  copy.to = side(operation.ptr, true);
  if (copy.to >= 0 && copy.from != copy.to) {
    counters_.of(copy.to).bytes_copied_to_device += copy.bytes;
  } else if (copy.to < 0 && copy.from >= 0) {
    counters_.of(copy.from).bytes_copied_to_host += copy.bytes;
  }
  stream.time_us = clock_.copy(stream.device, stream.time_us, operation.queued_us, copy, traffic);
  if (traffic.written_back > 0 || traffic.populated > 0) {
    sample(stream.time_us);
  }
}

void EmulatedRuntime::sample(double time_us) {
  for (int device = 0; device < config_.devices; ++device) {
    timelines_[static_cast<std::size_t>(device)].add(
        {time_us, pages_.resident_bytes(device), pages_.plain_bytes(device), pages_.managed_bytes()});
  }
}

} // namespace torch_uvm
