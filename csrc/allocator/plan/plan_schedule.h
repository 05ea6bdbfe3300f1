// An allocation plan as it is executed: one slot per request of an iteration, in order, and the memory of the slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/allocator.h"
#include "allocator/plan/plan_layout.h"

namespace torch_uvm {

/// A planned request, as reported to users. The list of them is a timeline of the plan.
struct PlannedRequest {
  std::size_t bytes = 0;
  std::size_t offset = 0;
  std::uint32_t begin = 0; ///< index of the event that allocates it
  std::uint32_t end = kNoEnd;
  Stream stream;
  bool apart = false; ///< unplanned: served by the upstream; its offset is 0
};

namespace plan {

/// A recorded request of an iteration.
struct Entry {
  std::size_t bytes = 0;
  Stream stream;
  std::uint32_t begin = 0;
  std::uint32_t end = kNoEnd;
  bool shared = false; ///< used by other streams
  bool outlived = false; ///< it once outlived an iteration although the plan expected its free

  /// Whether the request is excluded from the layout and served by the upstream.
  bool apart() const {
    return shared || outlived || end == kNoEnd;
  }
};

/// State behind an allocation's handle.
struct Tenant {
  explicit Tenant(bool in_slot) : in_slot(in_slot) {}

  const bool in_slot; ///< a Slot; otherwise an Apart
  bool shared = false;
  std::uint32_t iteration = 0; ///< the iteration it was allocated in; 0: none, or not recorded
  std::uint32_t entry = 0; ///< its index in the record of that iteration
};

/// An allocation served by the upstream.
struct Apart final : Tenant {
  Apart() : Tenant(false) {}

  Allocation allocation; ///< from the upstream
  Stream stream;
};

struct Schedule;

/// A planned request. Aligned to a cache line of its own, because the thread that frees it writes here.
struct alignas(64) Slot final : Tenant {
  Slot() : Tenant(true) {}

  // kBlocked: freed, but unusable until its segment is replaced.
  enum class State : std::uint8_t { kFree, kLive, kBlocked } state = State::kFree;
  bool apart = false;
  bool outlived = false;
  std::uint16_t region = 0;
  std::uint32_t begin = 0, end = kNoEnd; ///< in the last iteration that used it
  std::uint32_t claimed = 0; ///< last iteration in which its request was seen; kept only after a mismatch
  std::uint32_t first_before = 0, before_count = 0; ///< range of its predecessors in Schedule::before
  std::size_t bytes = 0;
  std::size_t offset = 0; ///< within the region
  Schedule* schedule = nullptr;
};
static_assert(sizeof(Slot) == 64);

/// The memory of the slots of one stream.
struct Region {
  explicit Region(Stream stream) : stream(stream) {}

  Stream stream;
  std::size_t bytes = 0;
  std::size_t offset = 0; ///< in the layout
  char* base = nullptr; ///< of the segment; null while there is none
  Allocation segment;
  bool taking = false; ///< a thread is allocating the segment
  std::uint32_t refused = 0; ///< the iteration in which the upstream refused the segment
};

/// Not thread-safe; guarded by the plan's lock.
struct Schedule {
  /// \throws InvalidArgument for more than 65535 streams; std::bad_alloc
  explicit Schedule(const std::vector<Entry>& record);
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  /// Whether no live allocation overlaps the slot. Checking the direct predecessors suffices if every request since the
  /// plan was last empty was served by plan, because the predecessors were checked the same way.
  bool is_clear(const Slot& slot) const {
    for (std::uint32_t i = slot.first_before; i < slot.first_before + slot.before_count; ++i) {
      if (slots[before[i]].state != Slot::State::kFree) {
        return false;
      }
    }
    return true;
  }
  bool matches(const Slot& slot, std::size_t bytes, Stream stream) const {
    return slot.bytes == bytes && regions[slot.region].stream == stream;
  }
  /// Offset in the layout. Slots that are live at the same time have distinct offsets.
  std::size_t place(const Slot& slot) const {
    return regions[slot.region].offset + slot.offset;
  }
  Entry entry(const Slot& slot) const;

  std::vector<Slot> slots;
  std::vector<Region> regions;
  std::vector<std::uint32_t> before; ///< for each slot, the previous owners of its bytes
  std::size_t live = 0; ///< allocated slots, plus calls in progress that need the schedule to stay
  bool tainted = false; ///< another stream uses memory of a segment, so the segments must be replaced before reuse
  bool was_followed = false; ///< an entire iteration was served by it
  std::size_t bytes = 0;
  std::size_t peak_live_bytes = 0;
  std::size_t in_plan = 0; ///< number of planned slots
  std::shared_ptr<const std::vector<PlannedRequest>> picture;
  std::unique_ptr<Schedule> next; ///< link in the list of retired schedules

 private:
  void find_predecessors();
};

} // namespace plan
} // namespace torch_uvm
