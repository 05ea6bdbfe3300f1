// The engine's record of one managed storage: where its copies are, and which streams and operators use them.
//
// A storage has a device copy (a managed block homed on its device), a host copy (a block of pinned memory, which
// the device can use in place), or both. Its data pointer points at one of them, which is always valid:
//
//   points_at  device_block  host_block        meaning
//   kDevice    set           none              only on the device
//   kDevice    set           set, !host_valid  the host copy is stale (dirty)
//   kDevice    set           set, host_valid   both are valid (clean); if `retiring`, to be evicted
//   kHost      none          set, host_valid   only on the host
//   kHost      set           set, host_valid   prefetched (`fetching`): no operator has used the device copy yet
//
// Valid means: for work that waits for the copy's event, `device_ready` or `host_ready`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "residency/policy/decision.h"
#include "residency/trace/allocation_sites.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

enum class Side : std::uint8_t { kDevice, kHost };

/// On whose behalf a storage's address changes.
enum class Mover : std::uint8_t {
  kOperator, ///< an operator being begun, or the host: ordered after all queued work on the bytes
  kEngine, ///< the engine between operators: ordered only after work on streams in the record
};

/// Guarded by the engine's mutex. Deleted once it is dead and no running operator holds it.
struct alignas(128) Record {
  // What every search for room reads, of thousands of records: in two lines of a processor's cache.
  StorageId id = 0;
  std::size_t bytes = 0; ///< of the storage
  /// A weak reference, which only the StorageAdapter interprets. nullptr: created on the host, not an operand yet.
  void* storage = nullptr;
  Block* device_block = nullptr;
  /// The address does not change before this operator. Set if other storages share the bytes, if the storage is being
  /// destroyed, or if the end of a use is not known.
  std::uint64_t unmovable_until = 0;
  int device = 0;
  unsigned in_use = 0; ///< number of running operators that use it
  unsigned pins = 0; ///< by exports, captures, keep_resident
  Side points_at = Side::kDevice;
  bool host_valid = false; ///< the host copy is up to date once `host_ready` fires; remains so while the device copy
                           ///< is only read
  bool retiring = false; ///< scheduled for eviction; a write-back was started if the device copy was dirty
  bool collective = false; ///< last used by a collective, which may still run on its own stream
  bool dead = false;
  bool announced = false; ///< the policy of `loop` knows the storage
  bool handed_over = false; ///< by one loop to another
  std::size_t loop = 0; ///< of the device's
  std::uint64_t last_use = 0; ///< in the engine's count of operators
  std::uint64_t write_back = 0; ///< sequence number of its latest write-back on the device
  std::uint64_t retirement = 0; ///< sequence number of its latest retirement on the device

  Block* host_block = nullptr;
  AllocationSite site = 0;
  Event device_ready; ///< the fetch, or the move within the device, is done; empty: nothing to wait for
  Stream ready_on; ///< work of this stream is ordered after `device_ready`; it need not wait
  Event host_ready; ///< the write-back is done
  Event block_ready; ///< the write-back has read the device copy: its block may be reused unless it was used since.
                     ///< From the allocator's event pool
  std::vector<Stream> streams; ///< have used the device copy since its last fetch or write-back
  std::vector<Stream> written_back_after; ///< the streams that the latest write-back waited for
  std::vector<Stream> in_place_streams; ///< have used the host copy since it was filled
  /// The stream that the storage was allocated on, and those of `Tensor.record_stream`. A block that the storage is
  /// moved to is not reused before their work is done, whether or not the engine saw that work.
  std::vector<Stream> owners;

  unsigned captured = 0; ///< those of the pins that are graphs': the address must not change, even if it is the host's
  std::uint64_t fetch_round = 0; ///< the device's fetch_round when it was fetched
  std::uint64_t adopted = 0; ///< when it became known, in the engine's count of operators
  std::size_t operand = 0; ///< its index among the operands of the operator that used it last

  /// Whether the storage's address may change now. Checked before every change of an address (Engine::claim_address).
  /// \param unread operators among `in_use` that have not read the address yet: 1 for the one being begun, else 0
  /// \param now the engine's count of operators
  bool address_may_change(Mover mover, unsigned unread, std::uint64_t now) const {
    const bool unused = !dead && storage != nullptr && in_use == unread && pins == 0;
    return unused && (mover == Mover::kOperator || (!collective && now >= unmovable_until));
  }

  bool fetching() const {
    return points_at == Side::kHost && device_block != nullptr;
  }
};

/// Adds a stream if it is not there yet; ignores the host's.
inline void add_stream(std::vector<Stream>& streams, Stream stream) {
  if (!stream.is_host() && std::ranges::find(streams, stream) == streams.end()) {
    streams.push_back(stream);
  }
}

} // namespace torch_uvm
