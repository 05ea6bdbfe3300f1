// The soak test's view of an allocator, and the caching allocator as a subject. soak_targets.h has the subjects with
// the Allocator interface.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/adaptors/caching_allocator.h"
#include "harness.h"
#include "runtime/emulated/emulated_runtime.h"
#include "soak_operations.h"

namespace soak {

/// An allocation, as its owner knows it.
struct Held {
  Block* block = nullptr; ///< for the caching allocator
  Allocation allocation; ///< for any other allocator
  unsigned char* data = nullptr;
  std::size_t bytes = 0;
  Location home;
  Stream stream; ///< all writes so far are ordered on this stream
  unsigned char mark = 0; ///< 0: nothing was written

  explicit operator bool() const {
    return data != nullptr;
  }
};

/// An allocator's functions as far as all allocators have them. A function that an allocator does not support does
/// nothing.
class Subject {
 public:
  explicit Subject(ManagedRuntime& runtime) : runtime(runtime) {}
  virtual ~Subject() = default;
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;

  virtual bool serves(Location home) const = 0;
  /// \throws OutOfMemory
  virtual Held allocate(std::size_t bytes, Location home, Stream stream) = 0;
  virtual Held try_allocate(std::size_t bytes, Location home, Stream stream) {
    return allocate(bytes, home, stream);
  }
  virtual void free(const Held& held) = 0;
  /// \param ready passes to the allocator
  /// \return false: not supported
  virtual bool free_after(const Held& /*held*/, Event /*ready*/) {
    return false;
  }
  virtual void record_stream(const Held& held, Stream stream) = 0;
  /// The caller has ordered `stream` after all work.
  /// \return false: not supported
  virtual bool set_home(const Held& /*held*/, Location /*home*/, Stream /*stream*/) {
    return false;
  }
  virtual bool hand_over(const Held& /*held*/, Stream /*stream*/) {
    return false;
  }
  virtual void empty_cache() = 0;
  virtual void look(const Held* held, std::uint32_t choice) = 0;
  virtual void set_cap(int /*device*/, std::optional<std::size_t> /*bytes*/) {}
  virtual void set_options(std::uint32_t /*choice*/) {}
  /// An operation that only this subject supports.
  /// \param shared slots that may be changed; the caller holds their mutex
  virtual void special(std::uint32_t /*choice*/, std::vector<Held>& /*shared*/) {}
  /// The callback is called without a lock when memory runs short. It returns true if a retry is worthwhile.
  virtual void set_callback(std::function<bool()> /*callback*/) {}

  virtual std::optional<std::string> check() const = 0;
  /// Checks, after all frees, that nothing is left.
  /// \throws harness::Failure
  virtual void expect_empty() = 0;

  ManagedRuntime& runtime;
};

/// Orders later work of `later` after the queued work of `earlier`. If `later` is the host, waits.
inline void order(ManagedRuntime& runtime, Stream earlier, Stream later) {
  if (earlier.is_host() || earlier == later) {
    return;
  }
  if (later.is_host()) {
    runtime.synchronize_stream(earlier);
    return;
  }
  const Event event = runtime.create_event(earlier.device, false);
  runtime.record_event(event, earlier);
  runtime.wait_event(later, event);
  runtime.destroy_event(event);
}

class CachingSubject final : public Subject, private PressureCallback {
 public:
  CachingSubject(ManagedRuntime& runtime, std::unique_ptr<SegmentSource> source)
      : Subject(runtime),
        serves_host_(source->serves(Location::host())),
        serves_devices_(source->serves(Location::device(0))),
        managed_(source->is_managed()),
        allocator_(runtime, std::move(source)) {
    allocator_.set_pressure_callback(this);
  }

  bool serves(Location home) const override {
    return home.is_host() ? serves_host_ : serves_devices_;
  }
  Held allocate(std::size_t bytes, Location home, Stream stream) override {
    return held(allocator_.allocate(bytes, home, stream), bytes, home, stream);
  }
  Held try_allocate(std::size_t bytes, Location home, Stream stream) override {
    return held(allocator_.try_allocate(bytes, home, stream), bytes, home, stream);
  }
  void free(const Held& held) override {
    allocator_.free(held.block);
  }
  bool free_after(const Held& held, Event ready) override {
    allocator_.free_after(held.block, ready, held.stream);
    return true;
  }
  void record_stream(const Held& held, Stream stream) override {
    allocator_.record_stream(held.block, stream);
  }
  bool set_home(const Held& held, Location home, Stream stream) override {
    if (managed_) {
      allocator_.set_home(held.block, home, stream);
    }
    return managed_;
  }
  bool hand_over(const Held& held, Stream stream) override {
    allocator_.hand_over(held.block, stream);
    return true;
  }
  void empty_cache() override {
    allocator_.empty_cache();
  }
  void look(const Held* held, std::uint32_t choice) override {
    if (held != nullptr && choice % 4 != 0) {
      CHECK(allocator_.find(held->data + held->bytes - 1) == held->block);
      CHECK(allocator_.data(held->block) == held->data && allocator_.bytes(held->block) >= held->bytes);
      CHECK_EQ(allocator_.requested_bytes(held->block), held->bytes);
      CHECK(allocator_.home(held->block) == held->home);
    } else if (choice % 3 == 0) {
      for (const SegmentInfo& segment : allocator_.snapshot()) {
        CHECK(!segment.blocks.empty());
      }
    } else {
      CHECK(allocator_.statistics().reserved_bytes[0].current >= 0);
    }
  }
  void set_cap(int device, std::optional<std::size_t> bytes) override {
    if (serves_devices_) {
      allocator_.set_cap(device, bytes);
    }
  }
  void set_options(std::uint32_t choice) override {
    AllocatorOptions options;
    options.populate = choice % 2 == 0;
    options.segment_min_bytes = choice / 2 % 3 == 0 ? std::nullopt : std::optional(kSegmentMin);
    allocator_.set_options(options);
  }
  /// Relocates neighbours, or finds ranges, as the residency engine does. Blocks with a tag may be moved.
  void special(std::uint32_t choice, std::vector<Held>& shared) override {
    if (!serves_devices_) {
      return;
    }
    const int device = static_cast<int>(choice % kDevices);
    for (Held& each : shared) {
      if (each) {
        allocator_.set_tag(each.block, &each);
      }
    }
    const std::size_t bytes = (1 + choice / kDevices % 64) * 128 * KiB;
    const auto cost = [](void* tag, std::size_t moved) { return tag == nullptr ? kNever : static_cast<double>(moved); };
    const auto agree = [](void* tag) { return tag != nullptr; };
    const Stream taker = Stream::default_of(device);
    if (choice / 128 % 4 == 0) {
      static_cast<void>(allocator_.min_cost_range(bytes, device, cost));
    } else if (choice / 128 % 4 == 1) {
      const auto slides = allocator_.find_slides(bytes, device, cost);
      for (const auto& step : slides ? slides->steps : decltype(slides->steps){}) {
        if (const auto move = allocator_.slide(static_cast<Held*>(step.tag)->block, step.up, taker)) {
          carry_out(*move, taker, choice / 512 % 4 != 0);
        }
      }
    } else {
      for (const CachingManagedAllocator::Move& move : allocator_.reserve_moves(bytes, device, taker, cost, agree)) {
        carry_out(move, taker, choice / 512 % 4 != 0);
      }
    }
    for (Held& each : shared) {
      if (each) {
        allocator_.set_tag(each.block, nullptr);
      }
    }
  }
  void set_callback(std::function<bool()> callback) override {
    callback_ = std::move(callback);
  }
  std::optional<std::string> check() const override {
    return allocator_.check();
  }
  void expect_empty() override {
    CHECK_EQ(allocator_.statistics().allocation[0].current, 0);
    allocator_.empty_cache();
    CHECK_EQ(allocator_.statistics().reserved_bytes[0].current, 0);
    CHECK_EQ(allocator_.statistics().active_bytes[0].current, 0);
  }

 private:
  bool make_room(std::size_t /*bytes*/, Location /*home*/, Stream /*stream*/) override {
    return callback_ && callback_();
  }
  Held held(Block* block, std::size_t bytes, Location home, Stream stream) {
    return {block, {}, static_cast<unsigned char*>(allocator_.data(block)), bytes, home, stream, 0};
  }
  void carry_out(const CachingManagedAllocator::Move& move, Stream taker, bool leaves) {
    Held& owner = *static_cast<Held*>(move.tag);
    if (!leaves) {
      allocator_.roll_back(move);
      return;
    }
    for (const Stream used : allocator_.streams(move.to)) {
      order(runtime, used, taker);
    }
    order(runtime, move.earlier, taker);
    order(runtime, owner.stream, taker);
    auto* const to = static_cast<unsigned char*>(allocator_.data(move.to));
    const bool up = to > owner.data;
    const auto shift = static_cast<std::size_t>(up ? to - owner.data : owner.data - to);
    for (std::size_t done = 0; done < owner.bytes;) { // no piece overwrites a byte that is still to be copied
      const std::size_t piece = std::min(shift, owner.bytes - done);
      const std::size_t at = up ? owner.bytes - done - piece : done;
      runtime.copy_async(to + at, owner.data + at, piece, taker);
      done += piece;
    }
    owner.block = move.to;
    owner.data = to;
    owner.stream = taker;
    allocator_.commit(move);
  }

  const bool serves_host_, serves_devices_, managed_;
  std::function<bool()> callback_;
  CachingManagedAllocator allocator_;
};

} // namespace soak
