// Moves storages between device and host: write-backs, evictions, fetches, and uses on either side.
#pragma once

#include <cstddef>
#include <vector>

#include "residency/engine/engine_state.h"

namespace torch_uvm {

/// What room is needed for: an operator that waits, a prefetch, or a storage that has to stay on the device (it may
/// then move other blocks aside, and evict nothing).
enum class Need { kNow, kAhead, kToStay };

/// Where a fetch gets its device memory from (Room).
class PlaceSource {
 public:
  /// A block for a device copy. Evicts others if needed. \return nullptr if there is no room
  virtual Block* room_for(std::size_t bytes, int device, Need need, Stream stream) = 0;

 protected:
  ~PlaceSource() = default;
};

/// Guarded by the engine's mutex.
class Copies {
 public:
  Copies(EngineState& state, PlaceSource& places) : state_(state), places_(places) {}

  /// Whether the storage's address may change now. If so, keeps the storage alive until the lock is released.
  bool claim_address(Record& record, Mover mover);
  /// If the storage shared its bytes and no longer does, marks the device copy dirty: a host copy may be outdated.
  void take_sole_ownership(Record& record);
  /// Adds the streams that the allocator knows for the device copy to the record's owners.
  void note_owners(Record& record);
  /// Tells the allocator that the owners use the device copy, which is in a new block.
  void record_owners(const Record& record);
  bool start_write_back(Record& record);
  /// Frees the device copy and points the storage at its host copy, which must be valid.
  /// \param taker the stream that will use the memory next; the host's if it is not known
  bool release_device_copy(Record& record, Stream taker);
  /// Frees the device copy, writing it back first if it is dirty. `taker`: as above. \return false if it stays
  bool evict(Record& record, Stream taker);
  bool start_fetch(Record& record, Need need, Stream stream);
  void abandon_fetch(Record& record) noexcept;
  void mark_use(Record& record, bool writes) noexcept;
  /// Blocks the host until the record's copies are done. Used if a stream could not be made to wait.
  void wait_here(Record& record) noexcept;
  /// Points the storage at its device copy, fetching it if needed. \return false if the storage stays on the host
  bool bring_to_device(Record& record, Stream stream, Need need = Need::kNow);
  void use_on_device(Record& record, Stream stream, bool writes);
  void use_in_place(Record& record, Stream stream, bool writes);
  void drop_host_copy(Record& record) noexcept;
  /// Allocates pinned memory, dropping spare host copies if needed. nullptr if there is none.
  Block* host_block(const Record& record, Stream stream);
  /// Makes `later` wait for the work queued on the `earlier` streams.
  void order(const std::vector<Stream>& earlier, Stream later);

  /// A scope after an operator on this stream, which is not idle yet. Nothing is queued to it meanwhile, and no storage
  /// that moves is in use. So one wait of each other stream for it is enough.
  class AfterOperator {
   public:
    AfterOperator(Copies& copies, Stream stream) : copies_(copies) {
      copies_.just_used_ = stream;
    }
    ~AfterOperator() {
      copies_.just_used_ = Stream::host();
      copies_.behind_.clear();
    }
    AfterOperator(const AfterOperator&) = delete;
    AfterOperator& operator=(const AfterOperator&) = delete;

   private:
    Copies& copies_;
  };

  /// Records the event after which nothing uses the device copy: the write-back, or all uses since.
  void note_last_use(Record& record);
  /// Whether a stream has used the device copy since its write-back began.
  bool is_used_since(const Record& record) const;

 private:
  /// The smallest storage of once to twice that size whose host copy is outdated and idle; nullptr if there is none.
  Record* outdated_host_copy(std::size_t bytes);
  /// The storage on the device whose host copy is best dropped for a request of that size; nullptr if there is none.
  Record* spare_host_copy(std::size_t bytes);
  /// Its block has been freed.
  void forget_host_copy(Record& record) noexcept;
  /// Whether `host_ready` has fired or there is nothing to wait for. If not, make a stream wait for it.
  bool is_host_copy_ready(Record& record);
  void note_move(TransferKind kind, const Record& record) noexcept;

  EngineState& state_;
  PlaceSource& places_;
  Stream just_used_; ///< see AfterOperator; else the host's
  std::vector<Stream> behind_; ///< wait for `just_used_`
};

} // namespace torch_uvm
