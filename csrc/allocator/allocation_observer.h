// Observer of every allocation of a caching allocator.
#pragma once

#include <cstddef>

#include "runtime/location.h"

namespace torch_uvm {

/// Called under the allocator's mutex, so calls arrive in allocation order: if two blocks share an address, the first
/// is freed before the second is allocated. Must not call an allocator, and may take leaf locks only.
class AllocationObserver {
 public:
  virtual ~AllocationObserver() = default;
  /// \param bytes as requested, here and below
  virtual void allocated(const void* ptr, std::size_t bytes, Stream stream) noexcept = 0;
  /// \param stream the stream in whose order it is freed
  virtual void freed(const void* ptr, std::size_t bytes, Stream stream) noexcept = 0;
  /// A request that raises OutOfMemory.
  virtual void refused(std::size_t bytes, Stream stream) noexcept = 0;
};

} // namespace torch_uvm
