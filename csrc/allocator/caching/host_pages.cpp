// Detached address ranges that the device uses in pinned memory: the memory of a host copy, mapped into the range.
//
// The memory belongs to a range of the host, of another allocator. It stays mapped there, so copies and the host use it
// by that address, and the device by that of the detached range.
#include <memory>
#include <utility>

#include "allocator/caching/state.h"
#include "allocator/invariants.h"

namespace torch_uvm {

void CachingManagedAllocator::map_host_copy(Block* block, const Block* host_copy) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  const WalkAfterwards walk(state);
  state.check_not_forked();
  if (!is_range(block) || block->state != BlockState::kDetached || block->segment->host_copy) {
    throw InvalidArgument("only a detached address range can get the memory of a host copy");
  }
  if (!is_range(host_copy) || !host_copy->segment->home.is_host() || host_copy->bytes != block->bytes) {
    throw InvalidArgument("a host copy that is no address range, or one of another size");
  }
  Segment& segment = *block->segment;
  state.finish_leaving(segment);
  const Piece piece = host_copy->segment->piece;
  state.ranges->map(reinterpret_cast<void*>(block->address), piece, segment.home.index);
  segment.host_copy = piece;
}

void CachingManagedAllocator::unmap_host_copy(Block* block, Event ready, Stream stream) {
  State& state = *state_;
  state.check_stream(stream);
  const std::lock_guard lock(state.mutex);
  const WalkAfterwards walk(state);
  state.check_not_forked();
  if (!is_range(block) || !block->segment->host_copy) {
    throw InvalidArgument("an address range that does not have the memory of a host copy");
  }
  state.leaving.reserve(state.leaving.size() + 1);
  std::shared_ptr<const Readiness> left = std::make_shared<const Readiness>(state.events, stream, ready);
  state.leave(*block->segment, std::exchange(block->segment->host_copy, Piece{}), std::move(left));
}

} // namespace torch_uvm
