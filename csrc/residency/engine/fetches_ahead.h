// Carries out the policy's decisions after an operator: write-backs, and fetches ahead of the next uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "residency/engine/room.h"

namespace torch_uvm {

/// Guarded by the engine's mutex.
class FetchesAhead {
 public:
  FetchesAhead(EngineState& state, Copies& copies, Room& room) : state_(state), copies_(copies), room_(room) {}

  void follow(const Decision& decision, int device);

 private:
  /// Starts what the decision writes back or retires.
  void write_back(const Decision& decision, int device);
  /// The record of a storage that may be written back now and leave later; nullptr: it may not.
  Record* leaving(StorageId id) const;
  /// Frees the retiring device copies whose write-backs are done.
  /// \param latest the latest write-back that may be done
  void release_read_copies(int device, std::uint64_t latest);
  /// The record of a pending fetch that is still needed and may start; nullptr: none.
  Record* wanted(const Device::Fetch& pending) const;
  /// Whether so many bytes more may be prefetched now.
  bool may_fetch_ahead(const Device& device, std::size_t bytes) const;
  void forget_fetches(Device& device) noexcept;
  void start_pending_fetches(int device, bool changed);
  /// Adds the noted re-fetches that are needed soon to `pending`, in order of need.
  void queue_unforeseen_fetches(int device);

  EngineState& state_;
  Copies& copies_;
  Room& room_;
};

} // namespace torch_uvm
