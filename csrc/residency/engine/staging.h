// Staging buffers: copies between pinned host memory and managed device memory that overlap with kernels.
//
// On an H200, copies of managed memory do not overlap with kernels or with copies of the other direction
// (benchmarks/copy_overlap.py). Copies of plain device memory overlap with both. So each copy goes through a slot of
// plain device memory: across the link by a plain copy, and between slot and managed memory by a copy within the
// device, which takes a thirtieth of the time.
//
// A staged copy uses two streams: the managed memory in the order of the caller's stream, the host memory in the order
// of `link`. Each side is done when its own stream is.
#pragma once

#include <array>
#include <cstddef>

#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// One direction of one device. Not thread-safe.
class Staging {
 public:
  enum class Direction { kToDevice, kToHost };

  /// Double buffering: one slot is copied within the device while the other is on the link. Copies share a slot as long
  /// as they fit into it.
  static constexpr std::size_t kSlots = 2;

  /// \param link a stream for this object alone; must outlive the host memory that is copied
  Staging(ManagedRuntime& runtime, Direction direction, Stream link);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  Stream link() const {
    return link_;
  }
  /// Waits for pending copies and frees the slots, unless the size stays the same. They are allocated again on demand.
  /// \param slot_bytes 0 disables staging
  void resize(std::size_t slot_bytes) noexcept;
  /// Allocates the slots if needed. False until the next `resize` if that fails or a copy has failed.
  bool is_ready() noexcept;

  /// Device bytes that the slots occupy now.
  std::size_t bytes() const {
    return slots_.back().memory == nullptr ? 0 : kSlots * slot_bytes_;
  }

  /// Makes the stream that a copy of so many bytes begins on wait for its first slot. `copy` does so, too: call this
  /// first to mark where on the stream the copy begins.
  /// \return that stream
  /// \throws the runtime's errors
  Stream begin(std::size_t bytes, Stream stream);
  /// Queues the copy. The managed memory is used in the order of `stream`, the host memory in that of `link`.
  /// \param read to the host: an event to record once `src` has been read; empty: none
  /// \throws the runtime's errors; part of the copy may have been queued on both streams
  void copy(void* dst, const void* src, std::size_t bytes, Stream stream, Event read = {});

 private:
  struct Slot {
    void* memory = nullptr;
    Event emptied; ///< recorded when the slot is left
    bool left = false; ///< and not waited for since
  };
  void make(Slot& slot);
  void release(Slot& slot) noexcept;
  Stream fills(Stream stream) const {
    return direction_ == Direction::kToDevice ? link_ : stream;
  }
  Stream empties(Stream stream) const {
    return direction_ == Direction::kToDevice ? stream : link_;
  }
  /// Moves on to the next slot.
  void leave(Stream stream);
  /// Makes room in a slot for the first piece of so many bytes.
  void open(std::size_t bytes, Stream stream);

  ManagedRuntime& runtime_;
  const Direction direction_;
  const Stream link_;
  std::size_t slot_bytes_ = 0;
  bool refused_ = false; ///< allocation or a copy failed; until the next `resize`
  std::array<Slot, kSlots> slots_;
  Event filled_; ///< one for all pieces: a wait is for its latest record, and each is waited for at once
  std::size_t at_ = 0; ///< the slot in use
  std::size_t used_ = 0; ///< bytes of it
};

} // namespace torch_uvm
