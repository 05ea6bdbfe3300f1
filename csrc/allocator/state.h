// What the allocator's source files share. The policy is in caching_managed_allocator.h; here is who does
// which part of it:
//   caching_managed_allocator.cpp  the public functions: validation, locking, free
//   cache.cpp                      serving a request from what is cached, or from a new segment
//   pending.cpp                    blocks that were freed while other streams' work may touch them
//   failure_path.cpp               what is done before OutOfMemory is raised
//   fork_copies.h, fork.cpp        what a forked child gets
//   snapshot.cpp, check.cpp        looking at it all
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "allocator/caching_managed_allocator.h"
#include "allocator/events.h"
#include "allocator/fork_copies.h"
#include "allocator/heap.h"
#include "allocator/ledger.h"

namespace torch_uvm {

/// A request, with what follows from its size.
struct Request {
  Request(std::size_t requested, Location home, Stream stream)
      : requested(requested), bytes(block_bytes(requested)), kind(size_class(requested)), home(home), stream(stream) {}

  std::size_t requested;
  std::size_t bytes; ///< of the block
  SizeClass kind;
  Location home;
  Stream stream;
};

/// Lets go of a lock and takes it again, however the scope is left.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>& lock) : lock_(lock) {
    lock_.unlock();
  }
  ~Unlocked() {
    lock_.lock();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::unique_lock<std::mutex>& lock_;
};

/// Functions that take a lock may let go of it for a while and hold it again when they return or throw;
/// the others keep it. Whatever throws has left the heap valid and no block reserved.
struct CachingManagedAllocator::State {
  using Lock = std::unique_lock<std::mutex>;

  State(ManagedRuntime& runtime, std::unique_ptr<SegmentSource> source, AllocatorOptions options);

  /// \throws InvalidArgument
  void check_location(Location home) const;
  void check_stream(Stream stream) const;

  // cache.cpp: nullptr means that it cannot be served this way
  Block* from_cache(const Request& request, Lock& lock);
  Block* from_new_segment(const Request& request, std::size_t bytes, Lock& lock, std::optional<OutOfMemory>& refusal);
  Block* best_fit(const Request& request, const Lane& lane) const;
  /// Takes a free block, orders it after its lane's work, and hands it out.
  Block* take(Block* free, const Request& request, Lock& lock);
  /// Makes what comes next on `later` wait for what is queued on `earlier`; for the host, waits here.
  void order(Stream earlier, Stream later, Location home, Lock& lock);
  Block* hand_out(Block* reserved, const Request& request, Lane& lane) noexcept;
  /// Whether a block must not be split.
  bool stays_whole(std::size_t block_bytes) const {
    return options.max_split_bytes && block_bytes > *options.max_split_bytes;
  }
  /// \return false: it failed, which costs faults later and nothing else
  bool populate(void* ptr, std::size_t bytes, const Request& request) noexcept;

  /// Waits for every device whose work, on whatever memory, keeps the host from touching managed memory.
  void wait_for_exclusive_devices();

  // fork.cpp
  /// Waits for the work that may still write a block, but for that of `finished` streams, which grow.
  void finish_work_on(const Block& block, std::vector<Stream>& finished) noexcept;

  // pending.cpp
  void free(Block* block) noexcept;
  /// Reclaims blocks whose events are reached: from the oldest on while they are, or wherever they are.
  void poll_pending(bool all);
  void wait_for_pending();
  void reclaim(Block* block) noexcept;
  void append_pending(Block* block) noexcept;
  void remove_pending(Block* block) noexcept;

  // failure_path.cpp
  Block* allocate_under_pressure(const Request& request, Lock& lock, std::optional<OutOfMemory> refusal);
  Block* retry(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);
  Block* from_run(const Request& request, Lock& lock);
  /// Gives back segments with no block in use, of one home or of all. \return bytes
  std::size_t give_back(std::optional<Location> home) noexcept;
  std::string where_the_bytes_are() const;
  [[noreturn]] void raise(std::size_t requested, Location home, const OutOfMemory& refusal);

  // check.cpp
  std::optional<std::string> check() const;

  ManagedRuntime& runtime;
  const std::unique_ptr<SegmentSource> source;
  const bool managed; ///< the source's memory can move
  const int devices;
  const std::vector<int> exclusive; ///< devices without concurrent access to managed memory, if it is that

  mutable std::mutex mutex; ///< guards all below
  AllocatorOptions options;
  RoomMaker* room_maker = nullptr;
  Ledger ledger;
  Heap heap;
  EventPool events;
  Block* pending_first = nullptr; ///< oldest
  Block* pending_last = nullptr;
  bool in_forked_child = false;
  ForkCopies fork_copies; ///< empty but while a fork is under way
  std::size_t available_to_child = 0; ///< bytes that they may take
};

} // namespace torch_uvm
