// What the engine knows of one managed storage: where its bytes are, and who is at work on them.
//
// A storage has a device copy (a managed block homed on its device), a host copy (a block of pinned memory, which
// the device can use in place), or both. Its pointer shows one of them:
//
//   points_at kDevice   host copy: none, valid (clean), or being written (retiring)
//   points_at kHost     device copy: none, or being fetched
//
// A copy whose transfer is still queued is valid from the event on that goes with it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "residency/policy/policy.h"
#include "residency/trace/origins.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

enum class Side : std::uint8_t { kDevice, kHost };

/// Who wants to change a storage's address.
enum class Mover : std::uint8_t {
  kOperator, ///< an operator that begins, or the host: comes after all queued work on the bytes
  kEngine, ///< the engine between operators: comes after the work that the record knows of
};

/// Guarded by the engine's mutex. Freed when it is dead and no operator holds it.
struct Record {
  StorageId id = 0;
  int device = 0;
  std::size_t bytes = 0; ///< of the storage
  Origin origin = 0;
  void* storage = nullptr; ///< of the door's: how the storage is found, without keeping it alive

  Block* device_block = nullptr;
  Block* host_block = nullptr;
  Side points_at = Side::kDevice;
  bool host_valid =
      false; ///< the host copy has the bytes, from `host_ready` on; kept where the device copy is only read
  bool retiring = false; ///< a write-back was started so that the device copy can be given up
  Event device_ready; ///< of a fetch; none: nothing to wait for
  Event host_ready; ///< of a write-back
  Event block_ready; ///< of the same, one of the allocator's: the device copy's block may be used again, if nobody has
                     ///< used it since
  std::uint64_t write_back = 0; ///< its number among those of the device
  std::uint64_t retirement = 0; ///< likewise, while it retires
  std::vector<Stream> streams; ///< have used the device copy since it was filled
  std::vector<Stream> written_back_after; ///< what the latest write-back has waited for
  std::vector<Stream> in_place_streams; ///< have used the host copy since it was filled

  unsigned in_use = 0; ///< operators that run
  unsigned held = 0; ///< exports, captures, keep_resident
  unsigned captured = 0; ///< of these, graphs: the address stays, be it the host's
  bool collective = false; ///< last used by a collective, which may be under way on a stream of its own
  std::uint64_t fixed_until = 0; ///< an operator; its bytes carry several labels, or are somebody else's by now
  bool dead = false;
  bool announced = false; ///< the policy knows it
  std::uint64_t fetch_round = 0; ///< its device's, when it was fetched
  std::uint64_t last_use = 0; ///< the engine's count of operators
  std::size_t operand = 0; ///< its place in the operator that used it last

  /// Whether the storage's address may change now. Every change of an address asks this first (Engine::claim_address).
  /// \param unread operators among `in_use` that have not read the address yet: 1 for the one that begins, else 0
  /// \param now the engine's count of operators
  bool address_may_change(Mover mover, unsigned unread, std::uint64_t now) const {
    const bool unused = !dead && in_use == unread && held == 0;
    return unused && (mover == Mover::kOperator || (!collective && now >= fixed_until));
  }

  bool fetching() const {
    return points_at == Side::kHost && device_block != nullptr;
  }
};

/// Once; the host's is none.
inline void add_stream(std::vector<Stream>& streams, Stream stream) {
  if (!stream.is_host() && std::ranges::find(streams, stream) == streams.end()) {
    streams.push_back(stream);
  }
}

} // namespace torch_uvm
