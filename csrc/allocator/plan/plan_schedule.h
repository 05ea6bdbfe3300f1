// A plan as it is followed: a slot for each request of an iteration, in order, and the memory that slots lie in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/allocator.h"
#include "allocator/plan/plan_layout.h"

namespace torch_uvm {

/// One request of a plan, as users see it. A timeline of these is a picture of the plan.
struct PlannedRequest {
  std::size_t bytes = 0;
  std::size_t offset = 0;
  std::uint32_t begin = 0; ///< the index of the event that allocates it
  std::uint32_t end = kNoEnd;
  Stream stream;
  bool apart = false; ///< served by the upstream, and has no place in the plan: its offset is 0
};

namespace plan {

/// One request of an iteration that was recorded.
struct Entry {
  std::size_t bytes = 0;
  Stream stream;
  std::uint32_t begin = 0;
  std::uint32_t end = kNoEnd;
  bool shared = false; ///< other streams use it
  bool outlived = false; ///< it has outlived an iteration once though the plan had foreseen its end

  /// Has a life of its own: it is not laid out.
  bool apart() const {
    return shared || outlived || end == kNoEnd;
  }
};

/// Behind an allocation's handle.
struct Tenant {
  explicit Tenant(bool in_slot) : in_slot(in_slot) {}

  const bool in_slot; ///< it is a Slot; else an Apart
  bool shared = false;
  std::uint32_t iteration = 0; ///< of its allocation; 0: none, or one that nobody records
  std::uint32_t entry = 0; ///< its place in the record of that iteration
};

/// One that the upstream serves.
struct Apart final : Tenant {
  Apart() : Tenant(false) {}

  Allocation allocation; ///< the upstream's
  Stream stream;
};

struct Schedule;

/// One that the plan serves, or says that the upstream is to. Who frees it writes here: a cache line of its own.
struct alignas(64) Slot final : Tenant {
  Slot() : Tenant(true) {}

  enum class State : std::uint8_t { kFree, kLive, kBlocked } state = State::kFree; // kBlocked: until its segment is new
  bool apart = false;
  bool outlived = false;
  std::uint16_t region = 0;
  std::uint32_t begin = 0, end = kNoEnd; ///< in its last iteration
  std::uint32_t claimed = 0; ///< the iteration in which its request was last seen, where that is looked for
  std::uint32_t first_before = 0, before_count = 0; ///< its predecessors in Schedule::before
  std::size_t bytes = 0;
  std::size_t offset = 0; ///< in its region
  Schedule* schedule = nullptr;
};
static_assert(sizeof(Slot) == 64);

/// The slots of one stream.
struct Region {
  explicit Region(Stream stream) : stream(stream) {}

  Stream stream;
  std::size_t bytes = 0;
  std::size_t offset = 0; ///< of the layout
  char* base = nullptr; ///< of the segment, while there is one
  Allocation segment;
  bool taking = false; ///< somebody is asking for the segment
  std::uint32_t refused = 0; ///< the iteration in which it could not be had
};

/// Not thread-safe.
struct Schedule {
  /// \throws InvalidArgument for more than 65535 streams, and bad_alloc
  explicit Schedule(const std::vector<Entry>& record);
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  /// Whether nothing lives in the bytes of a slot, provided that all requests since the plan was empty came by plan:
  /// then its predecessors have been asked the same of theirs.
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
  /// Of the layout: no two slots that live at once share one.
  std::size_t place(const Slot& slot) const {
    return regions[slot.region].offset + slot.offset;
  }
  Entry entry(const Slot& slot) const;

  std::vector<Slot> slots;
  std::vector<Region> regions;
  std::vector<std::uint32_t> before; ///< of each slot, those that had its bytes last
  std::size_t live = 0; ///< slots in callers' hands, and calls under way that need the schedule to stay
  bool tainted = false; ///< another stream uses bytes of a segment: they are not used again before it is a new one
  bool was_followed = false; ///< an iteration went by it to the end
  std::size_t bytes = 0;
  std::size_t peak_live_bytes = 0;
  std::size_t in_plan = 0; ///< slots that are not apart
  std::shared_ptr<const std::vector<PlannedRequest>> picture;
  std::unique_ptr<Schedule> next; ///< in a list of those that nobody follows any more

 private:
  void find_predecessors();
};

} // namespace plan
} // namespace torch_uvm
