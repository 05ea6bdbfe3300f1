// Finds memory for a request on a device: chooses what is evicted, and moves blocks within the device.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "residency/engine/copies.h"

namespace torch_uvm {

/// Guarded by the engine's mutex.
class Room final : public PlaceSource {
 public:
  Room(EngineState& state, Copies& copies) : state_(state), copies_(copies) {}

  // room.cpp

  Block* room_for(std::size_t bytes, int device, Need need, Stream stream) override;
  /// Evicts from the range at the lowest address.
  bool evict_first_fit(std::size_t bytes, int device, Stream taker);
  /// Frees a contiguous range of `bytes` for `taker`: evicts at the least cost and relocates blocks within the device.
  bool evict_range(std::size_t bytes, int device, Need need, Stream taker);
  /// Evicts everything that can be evicted. \return whether anything was
  bool evict_all(int device, Stream taker);
  /// Cost of evicting the storage; infinity if it cannot be evicted.
  double cost_of(const Record& record, Need need);
  /// The allocator's min-cost eviction range of `bytes`.
  std::optional<std::vector<Record*>> min_cost_range(std::size_t bytes, int device, Need need);
  /// The record of a retirement, or nullptr if the storage was used or freed since.
  Record* retiring(const Device::Retirement& retirement) const;

  // prepare_room.cpp

  /// Makes contiguous room for results of the given sizes and the workspace, all at once. Holds it if there is a
  /// workspace.
  /// \param left receives the operands that were evicted for it; the caller must provide them again
  void prepare_room(const std::vector<Record*>& operands, int device, std::span<const std::size_t> results,
                    std::size_t workspace, std::vector<Record*>& left);

  /// Makes room for a request: a place that is held for the running operator, or what can be evicted.
  bool use_held_or_evict(std::size_t bytes, int device, Stream taker);
  /// Frees the places that are held for the running operator. \return whether there were any
  bool free_held(int device);

  /// cost_of for the allocator, whose tags are records.
  BlockCost cost_of_block(Need need);

 private:
  // room.cpp

  bool try_repeatedly_to_evict(std::size_t bytes, int device, Need need, Stream taker);
  /// Forgets which storages were found unmovable, so that they are tried again. \return whether there were any
  bool forget_unmovable(int device);
  bool try_to_evict(std::size_t bytes, int device, Need need, Stream taker);
  std::vector<Record*> retiring(int device) const;
  /// The cheapest contiguous range of free and retiring blocks, if there is one.
  /// \param read only blocks that their write-backs have read
  std::optional<std::vector<Record*>> retiring_range(std::size_t bytes, int device, bool read);
  static std::optional<std::vector<Record*>> records_of(const std::optional<std::vector<void*>>& tags);
  /// Approaches 1 if the next use is near, 0 if it is far.
  double soonness(const Record& record);
  double price_of(const std::vector<Record*>& victims, Need need);
  /// The cheapest victims of `bytes` in total, anywhere on the device; empty if there are not enough.
  std::vector<Record*> cheapest_bytes(std::size_t bytes, int device, Need need);
  /// Copies::evict; if the runtime fails, the storage counts as unmovable.
  bool evict(Record& record, Stream taker);
  bool evict_all(const std::vector<Record*>& victims, Stream taker);

  // move_aside.cpp

  /// Frees a contiguous range by relocating blocks within the device. \return false if that cannot be done
  bool move_aside(std::size_t bytes, int device, Stream taker);
  /// The same by pushing neighbours together, if that costs at most `limit`, in the unit of cost_of.
  bool slide(std::size_t bytes, int device, Stream taker, double limit);
  /// Cost of relocating a block, in bytes; infinity if it has no record or cannot move.
  double cost_to_move(const Record* record, std::size_t block_bytes) const;
  /// Whether the storage's block may move now. If so, it is not freed until the lock is released.
  bool claim_move(Record& record);
  void move(const CachingManagedAllocator::Move& move, Stream taker);
  /// Copies within a device; the ranges may overlap. \return an event for the end; empty: it is done
  /// \throws the runtime's errors, and the bytes are still at `from`
  Event copy_within(void* to, const void* from, std::size_t bytes, Stream stream);

  // prepare_room.cpp

  /// Evicts the largest operand that can move, and fetches it to another place if one can be found.
  bool evict_one_operand(const std::vector<Record*>& operands, int device, std::size_t bytes,
                         std::vector<Record*>& left);

  void free_last_held(int device);

  EngineState& state_;
  Copies& copies_;
};

} // namespace torch_uvm
