#include "allocator/plan/plan_schedule.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>

#include "runtime/error.h"

namespace torch_uvm::plan {

Schedule::Schedule(const std::vector<Entry>& record) : slots(record.size()) {
  std::vector<PlanRequest> laid_out;
  for (const Entry& entry : record) {
    if (!entry.apart()) {
      laid_out.push_back({entry.bytes, entry.begin, entry.end, entry.stream});
    }
  }
  const PlanLayout layout = lay_out(laid_out);
  bytes = layout.bytes;
  peak_live_bytes = layout.peak_live_bytes;
  in_plan = laid_out.size();
  std::map<Stream, std::size_t> by_stream;
  for (const PlanRegion& region : layout.regions) {
    by_stream.emplace(region.stream, regions.size());
    Region& made = regions.emplace_back(region.stream);
    made.bytes = region.bytes;
    made.offset = region.offset;
  }
  auto drawn = std::make_shared<std::vector<PlannedRequest>>();
  auto offset = layout.offsets.begin();
  for (std::size_t i = 0; i < record.size(); ++i) {
    const Entry& entry = record[i];
    const auto [found, is_new] = by_stream.emplace(entry.stream, regions.size());
    if (is_new) { // a stream without planned requests
      regions.emplace_back(entry.stream);
    }
    if (regions.size() > std::numeric_limits<std::uint16_t>::max()) {
      throw InvalidArgument("a plan for " + std::to_string(regions.size()) + " streams; at most 65535 are possible");
    }
    Slot& slot = slots[i];
    slot.schedule = this;
    slot.bytes = entry.bytes;
    slot.region = static_cast<std::uint16_t>(found->second);
    slot.begin = entry.begin;
    slot.end = entry.end;
    slot.apart = entry.apart();
    slot.shared = entry.shared;
    slot.outlived = entry.outlived;
    slot.offset = slot.apart ? 0 : *offset++ - regions[slot.region].offset;
    drawn->push_back({entry.bytes, slot.apart ? 0 : place(slot), entry.begin, entry.end, entry.stream, slot.apart});
  }
  picture = std::move(drawn);
  find_predecessors();
}

void Schedule::find_predecessors() {
  struct Last {
    std::size_t end;
    std::uint32_t slot;
  };
  std::map<std::size_t, Last> occupied; // begin of a byte range -> its last owner; ranges do not overlap
  for (std::uint32_t i = 0; i < slots.size(); ++i) { // in order of requests, which is the order of their begins
    Slot& slot = slots[i];
    slot.first_before = static_cast<std::uint32_t>(before.size());
    if (slot.apart) {
      continue;
    }
    const std::size_t begin = place(slot), end = begin + slot.bytes;
    auto range = occupied.upper_bound(begin);
    range = range == occupied.begin() ? range : std::prev(range);
    while (range != occupied.end() && range->first < end) {
      const auto [from, last] = *range;
      if (last.end <= begin) {
        ++range;
        continue;
      }
      if (std::find(before.begin() + slot.first_before, before.end(), last.slot) == before.end()) {
        before.push_back(last.slot);
      }
      range = occupied.erase(range);
      if (from < begin) {
        occupied.emplace(from, Last{begin, last.slot});
      }
      if (end < last.end) {
        range = occupied.emplace(end, last).first;
      }
    }
    occupied.emplace(begin, Last{end, i});
    slot.before_count = static_cast<std::uint32_t>(before.size()) - slot.first_before;
  }
}

Entry Schedule::entry(const Slot& slot) const {
  return {.bytes = slot.bytes,
          .stream = regions[slot.region].stream,
          .begin = slot.begin,
          .end = slot.end,
          .shared = slot.shared,
          .outlived = slot.outlived};
}

} // namespace torch_uvm::plan
