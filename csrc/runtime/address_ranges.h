// Address ranges, and memory of a device or of the host that is mapped into them.
//
// A range is reserved addresses without memory. A piece is physical memory without an address. Mapping a piece into a
// range gives the range memory; unmapping leaves the addresses reserved. So an address can stay the same while the
// memory behind it comes and goes.
//
// A device is given by its index, and the host by that of Location::host(). A range of the host is for pieces of the
// host: all devices and the host may access it. A range of a device is for pieces of that device and of the host: only
// that device may access it. The host's pieces are pinned memory.
#pragma once

#include <cstddef>

namespace torch_uvm {

/// Physical memory. The creator owns it and releases it with `AddressRanges::free_piece`.
struct Piece {
  void* handle = nullptr; ///< the runtime's
  std::size_t bytes = 0;
  int device = -1; ///< -1: the host's

  explicit operator bool() const {
    return handle != nullptr;
  }
};

/// The interface to address ranges of a runtime. Thread-safe.
///
/// None of the calls is ordered on streams, and none waits for work on them. Before `unmap`, and before mapping another
/// piece at an address, the caller waits until no queued or running work accesses the range: on a GPU, work that
/// accesses a range without a piece fails, and every later call with it.
///
/// Errors: InvalidArgument for sizes, devices, ranges and pieces that are not as described; OutOfMemory if addresses or
/// memory are refused; RuntimeFailure for any other error of the runtime. On an error nothing has changed.
class AddressRanges {
 public:
  AddressRanges() = default;
  AddressRanges(const AddressRanges&) = delete;
  AddressRanges& operator=(const AddressRanges&) = delete;
  virtual ~AddressRanges() = default;

  /// Sizes of ranges and pieces are multiples of this. 0: there is no such memory.
  virtual std::size_t granularity(int device) const = 0;

  /// Reserves addresses for pieces of that size. \return an address aligned to the granularity, and to at least 2 MiB
  virtual void* reserve(std::size_t bytes, int device) = 0;
  /// Ends the reservation of a range with no piece.
  virtual void release(void* range, std::size_t bytes) noexcept = 0;

  /// Takes memory of the device or the host. Its contents are undefined.
  virtual Piece allocate_piece(std::size_t bytes, int device) = 0;
  /// Returns the memory: at once, or when its last mapping ends.
  virtual void free_piece(Piece piece) noexcept = 0;

  /// Maps a piece into a range of the same size that has no piece. A piece may be in several ranges at once.
  /// \param device of the range
  virtual void map(void* range, Piece piece, int device) = 0;
  /// Takes the piece out of the range. The piece keeps its contents.
  virtual void unmap(void* range, Piece piece) = 0;
};

} // namespace torch_uvm
