// Writes down what passes through it.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "allocator/adaptors/adaptor.h"
#include "allocator/replay/allocation_log.h"

namespace torch_uvm {

/// A row for each allocation, free and request that raised; requests of no bytes leave none. A free's row is written
/// before the upstream gets the memory back, and an allocation's after it gave it out, so that of two pieces at one
/// address the first is freed before the second is allocated.
class LoggingAllocator final : public Adaptor {
 public:
  /// \param log several allocators may share one
  /// \throws InvalidArgument where there is no upstream, or no log
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
  std::unordered_map<const void*, Stream> streams_; ///< of what callers have; the default stream's are left out
};

} // namespace torch_uvm
