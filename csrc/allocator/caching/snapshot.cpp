// Snapshots of the allocator's segments, blocks and levels.
#include "allocator/caching/state.h"

namespace torch_uvm {

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

Levels CachingManagedAllocator::levels(std::optional<Location> home) const {
  if (home) {
    state_->check_location(*home);
  }
  const std::lock_guard lock(state_->mutex);
  return state_->pool_statistics.levels(home);
}

} // namespace torch_uvm
