// Inspection: a snapshot, and a check of every invariant, which recounts all redundant state.
#include <algorithm>
#include <map>
#include <sstream>

#include "allocator/caching/state.h"

namespace torch_uvm {

namespace {

/// Levels (`Stat::current`) by home, recounted block by block; nullopt: of all homes.
using Recounts = std::map<std::optional<Location>, Statistics>;

/// Calls `change` with each of the levels that a block or segment counts for, and the pool.
template <typename Change>
void recount(Recounts& recounts, Location home, SizeClass kind, Change change) {
  for (const std::optional<Location> scope : {std::optional<Location>(), std::optional(home)}) {
    for (const PoolKind pool : {PoolKind::kAll, pool_kind(kind)}) {
      change(recounts[scope], static_cast<std::size_t>(pool));
    }
  }
}

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
  const std::int64_t bytes = as_signed(block.bytes);
  recount(recounts, block.free_list->home, segment.size_class, [&](Statistics& levels, std::size_t pool) {
    if (block.state == BlockState::kAllocated) {
      levels.allocation[pool].current += 1, levels.allocated_bytes[pool].current += bytes;
      levels.requested_bytes[pool].current += as_signed(block.requested);
    }
    if (block.state == BlockState::kAllocated || block.state == BlockState::kPending) {
      levels.active[pool].current += 1, levels.active_bytes[pool].current += bytes;
    }
    if (block.state == BlockState::kFree && segment.used != 0) {
      levels.inactive_split[pool].current += 1, levels.inactive_split_bytes[pool].current += bytes;
    }
  });
}

void compare(const Statistics& counted, const Statistics& kept, const std::string& whose, Findings& findings) {
  for (std::size_t pool = 0; pool < kPoolKinds; ++pool) {
    const auto same = [&](const char* name, std::int64_t count, const Stat& stat) {
      findings.expect(stat.current == count, whose, ", pool ", pool, ": ", name, " is kept as ", stat.current,
                      " and counted as ", count);
      findings.expect(stat.peak >= stat.current, whose, ", pool ", pool, ": peak of ", name, " is ", stat.peak,
                      ", below ", stat.current);
    };
#define TORCH_UVM_COMPARE(name) same(#name, counted.name[pool].current, kept.name[pool]);
    TORCH_UVM_STAT_ARRAYS(TORCH_UVM_COMPARE)
#undef TORCH_UVM_COMPARE
  }
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
    recount(recounts, segment.home, segment.size_class, [&segment = segment](Statistics& levels, std::size_t pool) {
      levels.segment[pool].current += 1, levels.reserved_bytes[pool].current += as_signed(segment.bytes);
    });
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
    compare(recounts[Location{home}], pool_statistics.statistics(Location{home}), to_string(Location{home}), findings);
  }
  compare(recounts[std::nullopt], pool_statistics.statistics(std::nullopt), "all homes", findings);
  for (int device = 0; device < devices; ++device) {
    const DeviceCap& budget = caps[static_cast<std::size_t>(device)];
    findings.expect(!budget.cap || taken(device) <= std::max(*budget.cap, budget.most), "device ", device, " has ",
                    taken(device), " bytes of segments, above its budget of ", budget.cap.value_or(0));
  }
  return findings.first();
}

std::vector<SegmentInfo> CachingManagedAllocator::snapshot() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<SegmentInfo> snapshot;
  snapshot.reserve(state_->heap.segments().size());
  for (const auto& [address, segment] : state_->heap.segments()) {
    SegmentInfo& info = snapshot.emplace_back();
    info.address = address;
    info.bytes = segment.bytes;
    info.home = segment.home;
    info.kind = pool_kind(segment.size_class);
    for (const Block* block = segment.first; block != nullptr; block = block->after) {
      const BlockInfo::State state = block->state == BlockState::kAllocated ? BlockInfo::State::kAllocated
                                     : block->state == BlockState::kPending ? BlockInfo::State::kPendingFree
                                                                            : BlockInfo::State::kFree; // or reserved
      info.blocks.push_back(BlockInfo{block->address, block->bytes, block->requested, state, block->free_list->home,
                                      block->free_list->stream});
      if (state != BlockInfo::State::kFree) {
        info.active_bytes += block->bytes;
      }
      if (state == BlockInfo::State::kAllocated) {
        info.allocated_bytes += block->bytes;
        info.requested_bytes += block->requested;
      }
    }
  }
  return snapshot;
}

} // namespace torch_uvm
