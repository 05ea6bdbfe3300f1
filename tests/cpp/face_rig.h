// The rig of an Allocator's tests: a runtime, an upstream, and the allocator over both, destroyed without leaks at the
// end of each case.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "allocator/adaptors/caching_allocator.h"
#include "harness.h"
#include "recording/recording_runtime.h"
#include "runtime/bytes.h"
#include "runtime/emulated/emulated_runtime.h"

namespace face {

using namespace torch_uvm;

constexpr Location kHome = Location::device(0);
constexpr Stream kStream = Stream::default_of(0);

/// An implementation under test.
struct Face {
  /// Makes an allocator that serves kHome on a runtime of two devices. It takes memory from the upstream, if it uses
  /// one.
  std::function<std::shared_ptr<Allocator>(ManagedRuntime&, std::shared_ptr<Allocator> upstream)> make;
  /// Starts a new round of reuse: an arena's reset, or a plan's next iteration. Does nothing for an allocator that
  /// reuses freed memory by itself.
  std::function<void(Allocator&)> again = [](Allocator&) {};
};

/// A caching allocator over managed segments of the runtime, like the one of the process.
inline std::shared_ptr<Allocator> caching(ManagedRuntime& runtime) {
  struct Both {
    explicit Both(ManagedRuntime& runtime)
        : memory(runtime, std::make_unique<ManagedSegmentSource>(runtime)), face(memory) {}
    CachingManagedAllocator memory;
    CachingAllocator face;
  };
  auto both = std::make_shared<Both>(runtime);
  return {both, &both->face};
}

inline std::unique_ptr<ManagedRuntime> recording() {
  return std::make_unique<RecordingRuntime>(2);
}

inline std::unique_ptr<ManagedRuntime> emulated_runtime(std::optional<std::uint64_t> seed = std::nullopt) {
  EmulatedConfig config;
  config.devices = 2;
  config.schedule_seed = seed;
  return std::make_unique<EmulatedRuntime>(config);
}

struct FaceRig {
  std::unique_ptr<ManagedRuntime> runtime;
  Face face;
  std::shared_ptr<Allocator> upstream;
  std::shared_ptr<Allocator> allocator;
  std::vector<Stream> streams; ///< created by `stream`, destroyed with the rig
  std::vector<Event> events; ///< created by `mark`, destroyed with the rig

  /// \param nested whether the upstream is a caching allocator over another caching allocator
  FaceRig(std::unique_ptr<ManagedRuntime> made, Face implementation, bool nested)
      : runtime(std::move(made)), face(std::move(implementation)), upstream(caching(*runtime)) {
    if (nested) {
      upstream = std::make_shared<CachingAllocator>(*runtime, upstream);
    }
  }
  FaceRig(FaceRig&&) = default;
  ~FaceRig() {
    allocator.reset();
    upstream.reset();
    for (const Event event : events) {
      runtime->destroy_event(event);
    }
    for (const Stream stream : streams) {
      runtime->destroy_stream(stream);
    }
  }

  void make() {
    allocator = face.make(*runtime, upstream);
  }
  void again() {
    face.again(*allocator);
  }
  Stream stream() {
    streams.push_back(runtime->create_stream(kHome.index, 0));
    return streams.back();
  }
  Allocation allocate(std::size_t bytes, Stream stream = kStream) {
    return allocator->allocate(bytes, kHome, stream);
  }
  /// Records an event behind all queued work of a stream.
  Event mark(Stream stream) {
    events.push_back(runtime->create_event(stream.device, false));
    runtime->record_event(events.back(), stream);
    return events.back();
  }
  RecordingRuntime& calls() {
    return dynamic_cast<RecordingRuntime&>(*runtime);
  }
};

inline bool overlap(const Allocation& left, const Allocation& right) {
  const auto begin = [](const Allocation& of) { return reinterpret_cast<std::uintptr_t>(of.ptr); };
  return begin(left) < begin(right) + right.bytes && begin(right) < begin(left) + left.bytes;
}

/// Fills the allocation, to detect writes by other owners.
inline void fill(const Allocation& allocation, unsigned char mark) {
  auto* const data = static_cast<unsigned char*>(allocation.ptr);
  std::fill_n(data, std::min<std::size_t>(allocation.bytes, 4096), mark);
  data[allocation.bytes / 2] = data[allocation.bytes - 1] = mark;
}

inline void expect_filled(const Allocation& allocation, unsigned char mark) {
  const auto* const data = static_cast<const unsigned char*>(allocation.ptr);
  CHECK(std::all_of(data, data + std::min<std::size_t>(allocation.bytes, 4096),
                    [=](unsigned char byte) { return byte == mark; }));
  CHECK(data[allocation.bytes / 2] == mark && data[allocation.bytes - 1] == mark);
}

/// The figures that a refused request must not change.
inline std::array<std::int64_t, 3> in_hands(const Allocator& allocator) {
  const AllocatorFigures now = allocator.figures();
  return {now.allocations, now.requested_bytes, now.peak_requested_bytes};
}

inline void expect_sound(const AllocatorFigures& now) {
  CHECK(now.allocations >= 0 && now.requested_bytes >= 0);
  CHECK(now.reserved_bytes >= now.requested_bytes);
  CHECK(now.peak_requested_bytes >= now.requested_bytes);
  CHECK(now.peak_reserved_bytes >= now.reserved_bytes);
  CHECK(now.upstream_frees >= 0 && now.upstream_allocations >= now.upstream_frees);
}

/// After all frees: the allocator can release all memory, to the last byte.
inline void expect_empty(FaceRig& rig) {
  rig.again();
  rig.allocator->release();
  const AllocatorFigures now = rig.allocator->figures();
  expect_sound(now);
  CHECK_EQ(now.allocations, 0);
  CHECK_EQ(now.requested_bytes, 0);
  CHECK_EQ(now.reserved_bytes, 0);
  CHECK_EQ(now.upstream_allocations, now.upstream_frees);
}

} // namespace face
