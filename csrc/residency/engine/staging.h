// Copies between pinned host memory and managed memory of a device that overlap with the device's kernels.
//
// A driver may serve copies of managed memory by an engine that shares its turns with kernels. On an H200 neither
// runs beside the other then, nor do copies of the two directions (benchmarks/copy_overlap.py); copies of plain
// device memory overlap with both. So bytes go through plain memory: across the link by copies of plain memory, and
// between that and the managed memory by copies within the device, which take a thirtieth of the time.
//
// What is staged has two sides. The managed memory is used in the order of the stream that the caller names, the
// host's in that of `link`: each has its own event when it is done with.
#pragma once

#include <array>
#include <cstddef>

#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// One direction of one device. Not thread-safe.
class Staging {
 public:
  enum class Direction { kToDevice, kToHost };

  /// Two: while one is copied within the device, the other one is on the link.
  static constexpr std::size_t kSlots = 2;

  /// \param link of this object alone; it outlives the host memory that is copied
  Staging(ManagedRuntime& runtime, Direction direction, Stream link);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  Stream link() const {
    return link_;
  }
  /// Waits for what is under way and gives the slots back; they are made again when they are needed.
  /// \param slot_bytes 0: none are made
  void resize(std::size_t slot_bytes) noexcept;
  /// Makes the slots if need be. False: there are none to be had, or a copy has failed, until the next resize.
  bool is_ready() noexcept;

  /// Bytes of the device that the slots have now.
  std::size_t bytes() const {
    return slots_.back().memory == nullptr ? 0 : kSlots * slot_bytes_;
  }

  /// \return the stream that the copy begins on. It has waited for the first slot. \throws what the runtime throws
  Stream begin(Stream stream);
  /// After `begin`. The managed side is used in `stream`'s order. Where it throws, part of it may have been queued: the
  /// managed memory may be in use there, and the host's on `link`. \throws what the runtime throws
  void copy(void* dst, const void* src, std::size_t bytes, Stream stream);

 private:
  struct Slot {
    void* memory = nullptr;
    Event filled;
    Event emptied;
    bool used = false; ///< `emptied` has been recorded
  };
  void make(Slot& slot);
  void give_back(Slot& slot) noexcept;
  void wait_until_empty(Slot& slot, Stream stream);

  ManagedRuntime& runtime_;
  const Direction direction_;
  const Stream link_;
  std::size_t slot_bytes_ = 0;
  bool refused_ = false; ///< until the next resize
  std::array<Slot, kSlots> slots_;
  std::size_t next_ = 0;
};

} // namespace torch_uvm
