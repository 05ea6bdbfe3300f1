#include "allocator/arena/arena.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "allocator/size_classes.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

ArenaOptions checked(ArenaOptions options, int devices) {
  if (options.home.index >= devices || options.home.index < Location::host().index) {
    throw InvalidArgument("an arena for " + to_string(options.home) + "; there are the host and " +
                          std::to_string(devices) + " devices");
  }
  if (options.initial == 0 || options.initial > kLargestRequest) {
    throw InvalidArgument("an arena of " + std::to_string(options.initial) + " initial bytes; 1 to " +
                          std::to_string(kLargestRequest) + " are accepted");
  }
  options.initial = round_up(options.initial, kAllocationAlignment);
  return options;
}

/// Moves the blocks for which `moves` is true to another list. \throws std::bad_alloc, and nothing has changed
template <class Blocks, class Moves>
void move_if(Blocks& from, Blocks& to, Moves moves) {
  to.reserve(to.size() + from.size());
  const auto moved = std::ranges::stable_partition(from, [&](const auto& block) { return !moves(*block); });
  std::ranges::move(moved, std::back_inserter(to));
  from.erase(moved.begin(), moved.end());
}

} // namespace

/// A block of upstream memory, and the handle of its allocations. The destructor frees it: it must run without the
/// mutex.
struct Arena::Block {
  Block(Arena& arena, std::size_t bytes, Stream stream)
      : arena(arena), stream(stream), memory(arena.upstream_->allocate(bytes, arena.options_.home, stream)) {
    const std::lock_guard lock(arena.mutex_);
    arena.figures_.count_reserved(bytes);
  }
  ~Block() {
    if (arena.forks_.in_child()) {
      return;
    }
    arena.upstream_->free(memory);
    const std::lock_guard lock(arena.mutex_);
    arena.figures_.count_released(memory.bytes);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  Arena& arena;
  const Stream stream;
  const Allocation memory;
  // Guarded by the arena's mutex:
  std::size_t top = 0; ///< end of the used part
  std::int64_t allocations = 0; ///< live
  std::int64_t bytes = 0; ///< of the live allocations, as requested
  bool shared = false; ///< other streams used some of it
  std::shared_ptr<Block> self; ///< while it has allocations, which may outlive its scope
};

Arena::Arena(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, const ArenaOptions& options)
    : upstream_(required(std::move(upstream), "an arena")), options_(checked(options, runtime.device_count())) {
  scopes_.resize(1);
}

Arena::~Arena() {
  scopes_.clear(); // while the members that ~Block uses still exist
}

Allocation Arena::allocate(std::size_t bytes, Location home, Stream stream) {
  if (home != options_.home) {
    throw InvalidArgument("home " + to_string(home) + "; this arena has memory of " + to_string(options_.home) +
                          " only");
  }
  if (bytes == 0) {
    return {};
  }
  forks_.check_not_in_child();
  if (bytes > kLargestRequest) {
    throw OutOfMemory(OutOfMemory::Cause::kHost, bytes,
                      format_bytes(bytes) + " requested from " + description() + "; no machine has that much");
  }
  const std::size_t rounded = round_up(bytes, kAllocationAlignment);
  std::shared_ptr<Block> made; // declared before the lock, so that a failure frees it without the mutex
  std::unique_lock lock(mutex_);
  std::size_t there = 0;
  for (const std::shared_ptr<Block>& block : scopes_[open_][stream]) {
    if (block->memory.bytes - block->top >= rounded) {
      return take(block, bytes, rounded);
    }
    there += block->memory.bytes;
  }
  const std::size_t wanted = std::max({options_.initial, there, rounded});
  lock.unlock();
  try {
    made = std::make_shared<Block>(*this, wanted, stream);
  } catch (const OutOfMemory&) {
    if (wanted == rounded) {
      throw;
    }
    made = std::make_shared<Block>(*this, rounded, stream);
  }
  lock.lock();
  scopes_[open_][stream].push_back(made); // another scope, if that one has ended meanwhile
  return take(made, bytes, rounded);
}

Allocation Arena::take(const std::shared_ptr<Block>& block, std::size_t bytes, std::size_t rounded) {
  void* const ptr = static_cast<char*>(block->memory.ptr) + std::exchange(block->top, block->top + rounded);
  if (block->allocations++ == 0) {
    block->self = block;
  }
  block->bytes += static_cast<std::int64_t>(bytes);
  figures_.count_allocated(bytes);
  return {ptr, bytes, block.get()};
}

void Arena::free(const Allocation& allocation) noexcept {
  if (allocation.handle == nullptr || forks_.in_child()) {
    return;
  }
  Block& block = *static_cast<Block*>(allocation.handle);
  std::shared_ptr<Block> last; // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  block.bytes -= static_cast<std::int64_t>(allocation.bytes);
  figures_.count_freed(allocation.bytes);
  if (--block.allocations == 0) {
    last = std::move(block.self);
  }
}

void Arena::record_stream(const Allocation& allocation, Stream stream) {
  if (allocation.handle == nullptr || forks_.in_child()) {
    return;
  }
  Block& block = *static_cast<Block*>(allocation.handle);
  if (stream == block.stream) {
    return;
  }
  upstream_->record_stream(block.memory, stream);
  const std::lock_guard lock(mutex_);
  block.shared = block.shared || !stream.is_host(); // the host's work needs no record
}

std::size_t Arena::release() {
  if (forks_.in_child()) {
    return 0;
  }
  Blocks unused; // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  for (Scope& scope : scopes_) {
    for (auto& [stream, blocks] : scope) {
      move_if(blocks, unused, [](const Block& block) { return block.allocations == 0; });
    }
  }
  return std::accumulate(unused.begin(), unused.end(), std::size_t{0},
                         [](std::size_t bytes, const auto& block) { return bytes + block->memory.bytes; });
}

AllocatorFigures Arena::figures() const {
  const std::lock_guard lock(mutex_);
  return figures_;
}

// --- scopes ---------------------------------------------------------------------------------------------------

void Arena::push() {
  const std::lock_guard lock(mutex_);
  scopes_.resize(std::max(scopes_.size(), open_ + 2));
  ++open_;
}

Outlived Arena::pop() {
  if (forks_.in_child()) {
    return {};
  }
  Blocks unused; // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  if (open_ == 0) {
    throw InvalidArgument("a scope of an arena ends, but none is open");
  }
  Outlived outlived;
  reclaim(scopes_[open_--], unused, outlived);
  return outlived;
}

Outlived Arena::reset() {
  if (forks_.in_child()) {
    return {};
  }
  Blocks unused; // destroyed after the lock is released
  Outlived outlived;
  const std::lock_guard lock(mutex_);
  for (Scope& scope : scopes_) {
    reclaim(scope, unused, outlived);
  }
  return outlived;
}

/// Empties the blocks of a scope. Blocks in use stay with their allocations, and are no longer the scope's.
/// \param dropped receives what the scope no longer has
void Arena::reclaim(Scope& scope, Blocks& dropped, Outlived& outlived) {
  for (auto& [stream, blocks] : scope) {
    for (const std::shared_ptr<Block>& block : blocks) {
      outlived.allocations += block->allocations;
      outlived.bytes += block->bytes;
      block->top = 0;
    }
    move_if(blocks, dropped, [](const Block& block) { return block.allocations != 0 || block.shared; });
  }
}

} // namespace torch_uvm
