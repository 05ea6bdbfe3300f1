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

  /// Double buffering: one slot is copied within the device while the other is on the link.
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

  /// Makes the stream that the copy begins on wait for the first slot.
  /// \return that stream
  /// \throws the runtime's errors
  Stream begin(Stream stream);
  /// Queues the copy; `begin` must have been called. The managed memory is used in the order of `stream`, the host
  /// memory in that of `link`.
  /// \throws the runtime's errors; part of the copy may have been queued on both streams
  void copy(void* dst, const void* src, std::size_t bytes, Stream stream);

 private:
  struct Slot {
    void* memory = nullptr;
    Event filled;
    Event emptied;
    bool used = false; ///< whether `emptied` has been recorded
  };
  void make(Slot& slot);
  void release(Slot& slot) noexcept;
  void wait_until_empty(Slot& slot, Stream stream);

  ManagedRuntime& runtime_;
  const Direction direction_;
  const Stream link_;
  std::size_t slot_bytes_ = 0;
  bool refused_ = false; ///< allocation or a copy failed; until the next `resize`
  std::array<Slot, kSlots> slots_;
  std::size_t next_ = 0;
};

} // namespace torch_uvm
