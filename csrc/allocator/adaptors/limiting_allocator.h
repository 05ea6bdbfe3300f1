// Limits the bytes allocated through it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

#include "allocator/adaptors/adaptor.h"

namespace torch_uvm {

class LimitingAllocator final : public Adaptor {
 public:
  /// \param limit maximum bytes allocated at any time, as requested
  LimitingAllocator(std::shared_ptr<Allocator> upstream, std::size_t limit)
      : Adaptor(std::move(upstream)), limit_(limit) {}

  /// \throws OutOfMemory beyond the limit; what the upstream throws
  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  std::string description() const override;

  std::size_t used() const {
    return used_.load(std::memory_order_relaxed);
  }

 private:
  const std::size_t limit_;
  std::atomic<std::size_t> used_{0};
};

} // namespace torch_uvm
