// Segments that a caching allocator takes from another allocator: alignment, waits, leaks.
#include "allocator/adaptors/upstream_segments.h"

#include "allocator/size_classes.h"
#include "face_rig.h"

using namespace face;

namespace {

/// An upstream that returns memory at odd addresses and counts its calls.
class Ragged final : public Allocator {
 public:
  explicit Ragged(std::shared_ptr<Allocator> below) : below_(std::move(below)) {}

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override {
    const Allocation whole = below_->allocate(bytes + offset, home, stream);
    asked.emplace_back(bytes, stream);
    ++held;
    return {static_cast<char*>(whole.ptr) + offset, bytes, whole.handle};
  }
  void free(const Allocation& allocation) noexcept override {
    --held;
    below_->free({static_cast<char*>(allocation.ptr) - offset, allocation.bytes + offset, allocation.handle});
  }
  void record_stream(const Allocation&, Stream) override {
    harness::fail(__FILE__, __LINE__, "segments follow no stream");
  }
  std::size_t release() override {
    return below_->release();
  }
  AllocatorFigures figures() const override {
    return below_->figures();
  }
  std::string description() const override {
    return "ragged";
  }

  std::size_t offset = kAllocationAlignment;
  std::vector<std::pair<std::size_t, Stream>> asked;
  int held = 0;

 private:
  const std::shared_ptr<Allocator> below_;
};

struct Segments {
  std::unique_ptr<ManagedRuntime> runtime = recording();
  RecordingRuntime& calls = static_cast<RecordingRuntime&>(*runtime);
  std::shared_ptr<Allocator> below = caching(*runtime);
  std::shared_ptr<Ragged> upstream = std::make_shared<Ragged>(below);
  std::unique_ptr<UpstreamSegmentSource> source = std::make_unique<UpstreamSegmentSource>(*runtime, upstream);
};

std::uintptr_t address(const void* ptr) {
  return reinterpret_cast<std::uintptr_t>(ptr);
}

} // namespace

TEST(segments_are_aligned_in_any_upstream_memory) {
  Segments rig;
  for (const std::size_t offset : {std::size_t{0}, kAllocationAlignment, 3 * kAllocationAlignment}) {
    rig.upstream->offset = offset;
    for (const std::size_t bytes : {kBlockAlignment, 1 * MiB, kSmallSegment, kMediumSegment, 34 * MiB}) {
      rig.upstream->asked.clear();
      void* const segment = rig.source->allocate(bytes, kHome);
      CHECK_EQ(address(segment) % (bytes >= kLargeGranularity ? kLargeGranularity : kBlockAlignment),
               std::uintptr_t{0});
      fill({segment, bytes, nullptr}, 5); // the whole segment is usable
      CHECK_EQ(rig.upstream->asked.size(), std::size_t{offset == 0 ? 1U : 2U});
      CHECK(rig.upstream->asked.back().second.is_host());
      CHECK_EQ(rig.upstream->held, 1);
      rig.source->free(segment);
      CHECK_EQ(rig.upstream->held, 0);
    }
  }
}

TEST(the_host_waits_for_every_device_before_a_segment_is_released) {
  for (const Location home : {Location::host(), Location::device(0)}) {
    Segments rig;
    void* const segment = rig.source->allocate(4 * MiB, home);
    const Stream elsewhere = Stream::default_of(1); // managed memory may be used by that device too
    const Event work = rig.runtime->create_event(1, false);
    rig.calls.hold(elsewhere);
    rig.runtime->record_event(work, elsewhere);
    rig.source->free(segment);
    CHECK(rig.runtime->query_event(work));
    rig.runtime->destroy_event(work);
  }
}

TEST(a_segment_of_new_memory_needs_no_wait) {
  Segments rig;
  const Event work = rig.runtime->create_event(0, false);
  rig.calls.hold(kStream);
  rig.runtime->record_event(work, kStream);
  void* const segment = rig.source->allocate(4 * MiB, kHome);
  CHECK(!rig.runtime->query_event(work));
  rig.source->free(segment);
  rig.runtime->destroy_event(work);
}

TEST(a_segment_whose_wait_failed_is_released_with_the_next) {
  Segments rig;
  void* const first = rig.source->allocate(4 * MiB, kHome);
  void* const second = rig.source->allocate(4 * MiB, kHome);
  rig.calls.fail("synchronize_device", 1);
  rig.source->free(first);
  CHECK_EQ(rig.upstream->held, 2);
  rig.source->free(second);
  CHECK_EQ(rig.upstream->held, 0);
  void* const third = rig.source->allocate(4 * MiB, kHome);
  rig.calls.fail("synchronize_device", 1);
  rig.source->free(third);
  CHECK_EQ(rig.upstream->held, 1);
  rig.calls.fail("synchronize_device", 1);
  rig.source.reset(); // regardless of the device's errors
  CHECK_EQ(rig.upstream->held, 0);
}

TEST(a_refusal_by_the_upstream_leaks_nothing) {
  Segments rig;
  rig.upstream->offset = 3 * kAllocationAlignment;
  rig.runtime->set_limit(22 * MiB);
  CHECK_THROWS(OutOfMemory, rig.source->allocate(64 * MiB, kHome));
  CHECK_THROWS(OutOfMemory, rig.source->allocate(20 * MiB, kHome)); // would fit only unaligned
  CHECK_EQ(rig.upstream->held, 0);
  rig.below->release();
  CHECK_EQ(rig.runtime->managed_bytes(), std::size_t{0});
}

HARNESS_MAIN()
