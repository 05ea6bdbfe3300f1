// Checks every invariant. All redundant state is recounted here.
#include <algorithm>
#include <map>
#include <sstream>

#include "allocator/caching/state.h"

namespace torch_uvm {

namespace {

/// Statistics of one home and pool, recounted block by block.
struct Recount {
  std::int64_t allocation = 0, allocated_bytes = 0, requested_bytes = 0;
  std::int64_t active = 0, active_bytes = 0;
  std::int64_t split = 0, split_bytes = 0;
  std::int64_t segment = 0, reserved_bytes = 0;

  void add(const Recount& other) {
    allocation += other.allocation, allocated_bytes += other.allocated_bytes;
    requested_bytes += other.requested_bytes;
    active += other.active, active_bytes += other.active_bytes;
    split += other.split, split_bytes += other.split_bytes;
    segment += other.segment, reserved_bytes += other.reserved_bytes;
  }
};

using Recounts = std::map<std::pair<Location, PoolKind>, Recount>;

/// Collects violations; the first one is reported.
class Findings {
 public:
  /// \return `holds`
  template <typename... Parts>
  bool expect(bool holds, const Parts&... parts) {
    if (!holds && !first_) {
      std::ostringstream text;
      (text << ... << parts);
      first_ = text.str();
    }
    return holds;
  }
  const std::optional<std::string>& first() const {
    return first_;
  }

 private:
  std::optional<std::string> first_;
};

void check_block(const Block& block, const Segment& segment, std::map<const FreeIndex*, std::size_t>& filed,
                 Findings& findings) {
  const auto at = [&] { return "block at " + std::to_string(block.address) + ": "; };
  findings.expect(block.segment == &segment, at(), "points at another segment");
  findings.expect(block.bytes > 0 && block.bytes % kBlockAlignment == 0, at(), "of ", block.bytes, " bytes");
  findings.expect(block.address % kBlockAlignment == 0, at(), "not aligned");
  if (!findings.expect(block.free_list != nullptr, at(), "has no free list")) {
    return;
  }
  const FreeIndex& index = block.free_list->free[static_cast<std::size_t>(segment.size_class)];
  if (block.state == BlockState::kFree) {
    findings.expect(index.holds(&block), at(), "free, and not filed where it belongs");
    findings.expect(block.requested == 0 && block.uses.empty() && block.tag == nullptr, at(),
                    "free, with marks of a use");
    const Block* const after = block.after;
    findings.expect(after == nullptr || after->state != BlockState::kFree || after->free_list != block.free_list ||
                        after->ready != block.ready,
                    at(), "free, as its neighbour of the same free list, and not merged with it");
    ++filed[&index];
    return;
  }
  findings.expect(!block.entry.filed(), at(), "in use, and filed");
  findings.expect(block.state == BlockState::kReserved || !block.ready, at(), "in use, and waiting to be ready");
  findings.expect(block.tag == nullptr || block.state == BlockState::kAllocated, at(), "not allocated, and tagged");
  if (block.state == BlockState::kAllocated) {
    findings.expect(block.requested > 0 && block.requested <= block.bytes, at(), "of ", block.bytes, " bytes for ",
                    block.requested);
    for (const Use& use : block.uses) {
      findings.expect(use.stream != block.free_list->stream && !use.stream.is_host() && !use.event, at(),
                      "allocated, with a use that is its own, the host's, or recorded");
    }
  }
  findings.expect(block.state != BlockState::kPending || !block.uses.empty(), at(), "pending for nothing");
}

void count_block(const Block& block, const Segment& segment, Recounts& recounts) {
  Recount& recount = recounts[{block.free_list->home, pool_kind(segment.size_class)}];
  const std::int64_t bytes = as_signed(block.bytes);
  if (block.state == BlockState::kAllocated) {
    recount.allocation += 1, recount.allocated_bytes += bytes;
    recount.requested_bytes += as_signed(block.requested);
  }
  if (block.state == BlockState::kAllocated || block.state == BlockState::kPending) {
    recount.active += 1, recount.active_bytes += bytes;
  }
  if (block.state == BlockState::kFree && segment.used != 0) {
    recount.split += 1, recount.split_bytes += bytes;
  }
}

void compare(const Recount& recount, const Statistics& kept, PoolKind kind, const std::string& whose,
             Findings& findings) {
  const auto pool = static_cast<std::size_t>(kind);
  const auto same = [&](const char* name, std::int64_t counted, const StatArray& stats) {
    const Stat& stat = stats[pool];
    findings.expect(stat.current == counted, whose, ", pool ", pool, ": ", name, " is kept as ", stat.current,
                    " and counted as ", counted);
    findings.expect(stat.peak >= stat.current, whose, ", pool ", pool, ": peak of ", name, " is ", stat.peak,
                    ", below ", stat.current);
  };
  same("allocation", recount.allocation, kept.allocation);
  same("allocated_bytes", recount.allocated_bytes, kept.allocated_bytes);
  same("requested_bytes", recount.requested_bytes, kept.requested_bytes);
  same("active", recount.active, kept.active);
  same("active_bytes", recount.active_bytes, kept.active_bytes);
  same("inactive_split", recount.split, kept.inactive_split);
  same("inactive_split_bytes", recount.split_bytes, kept.inactive_split_bytes);
  same("segment", recount.segment, kept.segment);
  same("reserved_bytes", recount.reserved_bytes, kept.reserved_bytes);
}

void check_ledger(const PoolStatistics& pool_statistics, Recounts& recounts, int devices, Findings& findings) {
  Recount total[kPoolKinds];
  for (int device = -1; device < devices; ++device) {
    const Location home{device};
    const Statistics kept = pool_statistics.statistics(home);
    Recount all;
    for (const PoolKind kind : {PoolKind::kSmall, PoolKind::kLarge}) {
      const Recount& recount = recounts[{home, kind}];
      compare(recount, kept, kind, to_string(home), findings);
      all.add(recount);
      total[static_cast<std::size_t>(kind)].add(recount);
    }
    compare(all, kept, PoolKind::kAll, to_string(home), findings);
    total[0].add(all);
  }
  const Statistics kept = pool_statistics.statistics(std::nullopt);
  for (const PoolKind kind : {PoolKind::kAll, PoolKind::kSmall, PoolKind::kLarge}) {
    compare(total[static_cast<std::size_t>(kind)], kept, kind, "all homes", findings);
  }
}

/// Checks that the list of a home's unused segments contains each of them once, oldest first.
void check_unused(const Heap& heap, Location home, Findings& findings) {
  std::size_t segments = 0;
  for (const auto& [address, segment] : heap.segments()) {
    segments += segment.home == home && segment.used == 0;
  }
  std::size_t listed = 0;
  std::size_t bytes = 0;
  const Segment* before = nullptr;
  for (const Segment* segment = heap.unused(home).oldest; segment != nullptr; segment = segment->unused_after) {
    findings.expect(segment->used == 0 && segment->home == home && segment->unused_before == before &&
                        (before == nullptr || before->unused_since <= segment->unused_since),
                    "the list of unused segments of ", to_string(home), " is broken");
    before = segment;
    bytes += segment->bytes;
    if (++listed > segments) {
      break;
    }
  }
  findings.expect(listed == segments && before == heap.unused(home).newest && bytes == heap.unused(home).bytes,
                  "the list of unused segments of ", to_string(home), " has ", listed, " of ", segments);
}

} // namespace

std::optional<std::string> CachingManagedAllocator::State::check() const {
  Findings findings;
  Recounts recounts;
  std::map<const FreeIndex*, std::size_t> filed;
  std::size_t pending = 0;
  std::uintptr_t end_of_previous = 0;
  for (const auto& [address, segment] : heap.segments()) {
    findings.expect(address == segment.address && address >= end_of_previous, "segment at ", address,
                    " is misplaced or overlaps the one before");
    end_of_previous = address + segment.bytes;
    std::uintptr_t next = address;
    std::size_t used = 0;
    const Block* before = nullptr;
    for (const Block* block = segment.first; block != nullptr; block = block->after) {
      if (!findings.expect(block->address == next && block->before == before, "block at ", block->address,
                           " does not follow its neighbour") ||
          !findings.expect(block->free_list != nullptr, "block at ", block->address, " has no free list")) {
        return findings.first(); // the list of blocks cannot be trusted beyond this point
      }
      check_block(*block, segment, filed, findings);
      count_block(*block, segment, recounts);
      used += block->state != BlockState::kFree;
      pending += block->state == BlockState::kPending;
      next += block->bytes;
      before = block;
    }
    findings.expect(next == end_of_previous, "the blocks of the segment at ", address, " end at ", next, ", not at ",
                    end_of_previous);
    findings.expect(used == segment.used, "the segment at ", address, " counts ", segment.used, " blocks in use, not ",
                    used);
    Recount& recount = recounts[{segment.home, pool_kind(segment.size_class)}];
    recount.segment += 1, recount.reserved_bytes += as_signed(segment.bytes);
  }
  for (const auto& [key, free_list] : heap.free_lists()) {
    findings.expect(key.first == free_list.home && key.second == free_list.stream,
                    "a free list is under the wrong key");
    for (const FreeIndex& index : free_list.free) {
      findings.expect(index.size() == filed[&index], "an index of ", to_string(free_list.home), " holds ", index.size(),
                      " blocks; ", filed[&index], " belong there");
    }
  }
  std::size_t listed = 0;
  const Block* before = nullptr;
  for (const Block* block = pending_first; block != nullptr; block = block->pending_after) {
    findings.expect(block->state == BlockState::kPending && block->pending_before == before,
                    "the list of pending blocks is broken");
    before = block;
    ++listed;
  }
  findings.expect(before == pending_last && listed == pending, "the list of pending blocks has ", listed, " of ",
                  pending);
  const Block* unrecorded = pending_first;
  while (unrecorded != nullptr && unrecorded != unrecorded_first) {
    unrecorded = unrecorded->pending_after;
  }
  findings.expect(unrecorded == unrecorded_first, "what is not recorded is not pending");
  for (int home = -1; home < devices; ++home) {
    check_unused(heap, Location{home}, findings);
  }
  for (int device = 0; device < devices; ++device) {
    const DeviceCap& budget = caps[static_cast<std::size_t>(device)];
    findings.expect(!budget.cap || taken(device) <= std::max(*budget.cap, budget.most), "device ", device, " has ",
                    taken(device), " bytes of segments, above its budget of ", budget.cap.value_or(0));
  }
  check_ledger(pool_statistics, recounts, devices, findings);
  return findings.first();
}

} // namespace torch_uvm
