// The public functions: validation and locking.
#include "allocator/caching/caching_managed_allocator.h"

#include <algorithm>

#include "allocator/caching/state.h"
#include "allocator/invariants.h"
#include "runtime/forks.h"

namespace torch_uvm {

namespace {

void check_options(const AllocatorOptions& options) {
  if (options.segment_min_bytes && *options.segment_min_bytes < kLargeGranularity) {
    throw InvalidArgument("segment_min of " + format_bytes(*options.segment_min_bytes) + "; at least " +
                          format_bytes(kLargeGranularity) + " is needed, or none");
  }
}

std::vector<int> exclusive_devices(const ManagedRuntime& runtime) {
  std::vector<int> found;
  for (int device = 0; device < runtime.device_count(); ++device) {
    if (!runtime.device_properties(device).concurrent_managed_access) {
      found.push_back(device);
    }
  }
  return found;
}

} // namespace

CachingManagedAllocator::State::State(ManagedRuntime& runtime, std::unique_ptr<SegmentSource> source,
                                      AllocatorOptions options)
    : runtime(runtime),
      source(std::move(source)),
      managed(this->source->is_managed()),
      serves_host(this->source->serves(Location::host())),
      serves_devices(this->source->serves(Location::device(0))),
      least_shared_segment(this->source->least_shared_segment()),
      devices(runtime.device_count()),
      exclusive(managed ? exclusive_devices(runtime) : std::vector<int>{}),
      options(options),
      caps(static_cast<std::size_t>(devices)),
      pool_statistics(devices),
      events(runtime, devices),
      stream_order(events),
      heap(pool_statistics) {}

void CachingManagedAllocator::State::check_location(std::optional<Location> home) const {
  if (home && (home->index >= devices || home->index < -1)) {
    throw InvalidArgument("home " + to_string(*home) + "; there are the host and " + std::to_string(devices) +
                          " devices");
  }
  if (home && (home->is_host() ? !serves_host : !serves_devices)) {
    throw InvalidArgument("home " + to_string(*home) + "; this allocator has " + (home->is_host() ? "device" : "host") +
                          " memory only");
  }
}

void CachingManagedAllocator::State::check_stream(Stream stream) const {
  if (stream.device >= devices || stream.device < -1) {
    throw InvalidArgument("a stream of device " + std::to_string(stream.device) + "; there are " +
                          std::to_string(devices) + " devices");
  }
}

void CachingManagedAllocator::State::check_not_forked() const {
  if (in_forked_child) {
    refuse_in_child();
  }
}

CachingManagedAllocator::CachingManagedAllocator(ManagedRuntime& runtime, std::unique_ptr<SegmentSource> source,
                                                 AllocatorOptions options) {
  check_options(options);
  state_ = std::make_unique<State>(runtime, std::move(source), options);
}

CachingManagedAllocator::~CachingManagedAllocator() {
  if (state_->in_forked_child) {
    return; // the memory belongs to the parent
  }
  try {
    state_->wait_for_pending();
  } catch (...) {
    // The runtime has failed. Release the memory anyway; the source waits for outstanding work itself.
    while (Block* const block = state_->pending_first) {
      block->uses.clear();
      state_->reclaim(block);
    }
  }
  state_->release(std::nullopt); // leaks a segment that is still in use, which is safer than unmapping it
  state_->stream_order.forget();
  state_->events.destroy_all();
}

Block* CachingManagedAllocator::allocate(std::size_t bytes, Location home, Stream stream) {
  State& state = *state_;
  state.check_location(home);
  state.check_stream(stream);
  if (bytes == 0) {
    return nullptr;
  }
  std::unique_lock lock(state.mutex);
  const WalkAfterwards walk(state);
  state.check_not_forked();
  if (bytes > kLargestRequest) {
    state.note_refused(bytes, stream);
    state.raise(bytes, home, OutOfMemory(OutOfMemory::Cause::kHost, bytes, "No machine has that much"));
  }
  const Request request = state.request(bytes, home, stream);
  if (home.is_host() && !state.exclusive.empty()) {
    const Unlocked unlocked(lock);
    state.wait_for_exclusive_devices();
  }
  if (state.pending_first != nullptr) {
    state.poll_pending(false);
  }
  if (Block* const block = state.from_cache(request, lock)) {
    return block;
  }
  std::optional<OutOfMemory> refusal;
  if (Block* const block = state.from_fresh_segment(request, lock, refusal)) {
    return block;
  }
  return state.allocate_under_pressure(request, lock, std::move(refusal));
}

void CachingManagedAllocator::free(Block* block) noexcept {
  if (block == nullptr) {
    return;
  }
  const std::lock_guard lock(state_->mutex);
  const WalkAfterwards walk(*state_);
  state_->free(block);
}

void CachingManagedAllocator::free_after(Block* block, Event ready, Stream stream) noexcept {
  const std::lock_guard lock(state_->mutex);
  const WalkAfterwards walk(*state_);
  try {
    FreeList& free_list = state_->heap.free_list(block->free_list->home, stream);
    auto readiness = std::make_shared<const Readiness>(state_->events, stream, ready); // owns the event; nothing throws
    block->uses.clear();
    block->free_list = &free_list;
    block->ready = std::move(readiness);
  } catch (...) { // out of memory: wait for the event now
    try {
      state_->runtime.synchronize_event(ready);
    } catch (...) {
      // The device has failed, and its next user gets the error.
    }
    state_->events.give(stream, ready);
  }
  state_->free(block);
}

void CachingManagedAllocator::free_idle(Block* block, Stream stream) noexcept {
  const std::lock_guard lock(state_->mutex);
  const WalkAfterwards walk(*state_);
  try {
    block->free_list = &state_->heap.free_list(block->free_list->home, stream);
  } catch (...) { // out of memory: the list that it is in does as well
  }
  block->uses.clear();
  block->idle = true;
  state_->free(block);
}

Event CachingManagedAllocator::take_event(Stream stream) {
  state_->check_stream(stream);
  const std::lock_guard lock(state_->mutex);
  return state_->events.take(stream);
}

void CachingManagedAllocator::recycle_event(Stream stream, Event event) noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->events.give(stream, event);
}

namespace {

void check_allocated(const Block* block) {
  if (block == nullptr || block->state != BlockState::kAllocated) {
    throw InvalidArgument("a block that is not allocated");
  }
}

/// Adds a use by a stream other than the block's own. The host's work needs no record.
void add_use(Block* block, Stream stream) {
  if (!stream.is_host() && std::ranges::find(block->uses, stream, &Use::stream) == block->uses.end()) {
    block->uses.push_back(Use{stream, nullptr});
  }
}

} // namespace

void CachingManagedAllocator::record_stream(Block* block, Stream stream) {
  state_->check_stream(stream);
  const std::lock_guard lock(state_->mutex);
  const WalkAfterwards walk(*state_);
  check_allocated(block);
  if (stream != block->free_list->stream) {
    add_use(block, stream);
  }
}

void CachingManagedAllocator::set_home(Block* block, Location home, Stream stream) {
  State& state = *state_;
  state.check_location(home);
  state.check_stream(stream);
  const std::lock_guard lock(state.mutex);
  const WalkAfterwards walk(state);
  check_allocated(block);
  if (!state.managed && home != block->free_list->home) {
    throw InvalidArgument("new home " + to_string(home) + " for memory of " + to_string(block->free_list->home) +
                          "; only managed memory moves");
  }
  FreeList& free_list = state.heap.free_list(home, stream);
  if (stream != block->free_list->stream) {
    add_use(block, block->free_list->stream);
  }
  // Work queued on the new stream precedes the block's next use in stream order, so it needs no record.
  std::erase_if(block->uses, [=](const Use& use) { return use.stream == stream; });
  state.pool_statistics.moved(block->free_list->home, home, pool_kind(block->segment->size_class), block->bytes,
                              block->requested);
  block->free_list = &free_list;
  block->read_by_host = block->read_by_host || home.is_host();
}

void CachingManagedAllocator::hand_over(Block* block, Stream stream) {
  State& state = *state_;
  state.check_stream(stream);
  const std::lock_guard lock(state.mutex);
  const WalkAfterwards walk(state);
  check_allocated(block);
  block->free_list = &state.heap.free_list(block->free_list->home, stream);
  block->uses.clear();
}

Block* CachingManagedAllocator::find(const void* ptr) const {
  const std::lock_guard lock(state_->mutex);
  Block* const block = state_->heap.find(reinterpret_cast<std::uintptr_t>(ptr));
  return block != nullptr && block->state == BlockState::kAllocated ? block : nullptr;
}

// The size and address of an allocated block are constant, so reading them needs no lock.

void* CachingManagedAllocator::data(const Block* block) const {
  return block == nullptr ? nullptr : reinterpret_cast<void*>(block->address);
}

std::size_t CachingManagedAllocator::bytes(const Block* block) const {
  return block == nullptr ? 0 : block->bytes;
}

std::size_t CachingManagedAllocator::requested_bytes(const Block* block) const {
  return block == nullptr ? 0 : block->requested;
}

std::size_t CachingManagedAllocator::bytes_taken(std::size_t requested, int device) const {
  state_->check_device(device);
  const std::lock_guard lock(state_->mutex);
  return state_->bytes_for(requested, Location::device(device));
}

void CachingManagedAllocator::set_tag(Block* block, void* tag) noexcept {
  block->tag = tag;
}

void* CachingManagedAllocator::tag(const Block* block) const noexcept {
  return block->tag;
}

Location CachingManagedAllocator::home(const Block* block) const {
  const std::lock_guard lock(state_->mutex);
  check_allocated(block);
  return block->free_list->home;
}

Stream CachingManagedAllocator::stream(const Block* block) const {
  const std::lock_guard lock(state_->mutex);
  check_allocated(block);
  return block->free_list->stream;
}

std::vector<Stream> CachingManagedAllocator::streams(const Block* block) const {
  const std::lock_guard lock(state_->mutex);
  check_allocated(block);
  std::vector<Stream> streams;
  if (!block->free_list->stream.is_host()) {
    streams.push_back(block->free_list->stream);
  }
  for (const Use& use : block->uses) {
    streams.push_back(use.stream);
  }
  return streams;
}

std::size_t CachingManagedAllocator::empty_cache() {
  const std::lock_guard lock(state_->mutex);
  const WalkAfterwards walk(*state_);
  if (state_->in_forked_child) {
    return 0;
  }
  state_->wait_for_pending();
  state_->stream_order.forget();
  return state_->release(std::nullopt);
}

Statistics CachingManagedAllocator::statistics(std::optional<Location> home) const {
  state_->check_location(home);
  const std::lock_guard lock(state_->mutex);
  return state_->pool_statistics.statistics(home);
}

std::size_t CachingManagedAllocator::allocated_bytes(Location home) const {
  state_->check_location(home);
  const std::lock_guard lock(state_->mutex);
  return static_cast<std::size_t>(state_->pool_statistics.allocated_bytes(home));
}

std::size_t CachingManagedAllocator::reserved_bytes(Location home) const {
  state_->check_location(home);
  const std::lock_guard lock(state_->mutex);
  return state_->pool_statistics.reserved_bytes(home);
}

void CachingManagedAllocator::reset_peak_statistics(std::optional<Location> home) {
  state_->check_location(home);
  const std::lock_guard lock(state_->mutex);
  state_->pool_statistics.reset_peak(home);
}

void CachingManagedAllocator::reset_accumulated_statistics(std::optional<Location> home) {
  state_->check_location(home);
  const std::lock_guard lock(state_->mutex);
  state_->pool_statistics.reset_accumulated(home);
}

void CachingManagedAllocator::set_pressure_callback(PressureCallback* pressure_callback) {
  const std::lock_guard lock(state_->mutex);
  state_->pressure_callback = pressure_callback;
}

void CachingManagedAllocator::set_log(AllocationLog* log) {
  const std::lock_guard lock(state_->mutex);
  state_->log = state_->in_forked_child ? nullptr : log;
}

AllocatorOptions CachingManagedAllocator::options() const {
  const std::lock_guard lock(state_->mutex);
  return state_->options;
}

void CachingManagedAllocator::set_options(const AllocatorOptions& options) {
  check_options(options);
  const std::lock_guard lock(state_->mutex);
  const WalkAfterwards walk(*state_);
  state_->options = options;
}

std::optional<std::string> CachingManagedAllocator::check() const {
  const std::lock_guard lock(state_->mutex);
  return state_->check();
}

} // namespace torch_uvm
