// Who is told of every allocation of a caching allocator.
#pragma once

#include <cstddef>

#include "runtime/location.h"

namespace torch_uvm {

/// Called under the allocator's mutex, so in the one order in which blocks came and went: of two blocks at one address,
/// the first is freed before the second is allocated. Calls no allocator, and takes leaf locks only.
class AllocationObserver {
 public:
  virtual ~AllocationObserver() = default;
  /// \param bytes as asked for, here and below
  virtual void allocated(const void* ptr, std::size_t bytes, Stream stream) noexcept = 0;
  /// \param stream whose order it goes back in
  virtual void freed(const void* ptr, std::size_t bytes, Stream stream) noexcept = 0;
  /// A request that raises OutOfMemory.
  virtual void refused(std::size_t bytes, Stream stream) noexcept = 0;
};

} // namespace torch_uvm
