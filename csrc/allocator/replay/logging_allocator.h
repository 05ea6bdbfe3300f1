// An adaptor that logs allocations.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "allocator/adaptors/adaptor.h"
#include "allocator/replay/allocation_log.h"

namespace torch_uvm {

/// Writes a row per allocation, free and failed request. Requests of 0 bytes are not logged. A free is logged before
/// the upstream gets the memory, and an allocation after the upstream returned it; if two allocations share an address,
/// the first is therefore logged as freed before the second is logged as allocated.
class LoggingAllocator final : public Adaptor {
 public:
  /// \param log may be shared by several allocators
  /// \throws InvalidArgument if upstream or log is null
  LoggingAllocator(std::shared_ptr<Allocator> upstream, std::shared_ptr<AllocationLog> log);

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  std::string description() const override;

  AllocationLog& log() const {
    return *log_;
  }

 private:
  const std::shared_ptr<AllocationLog> log_;
  std::mutex mutex_; // leaf: nothing is called with it held
  std::unordered_map<const void*, Stream> streams_; ///< streams of live allocations, except those of the default stream
};

} // namespace torch_uvm
