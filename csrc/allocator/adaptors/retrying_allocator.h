// Calls a callback when memory runs short, and retries.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "allocator/adaptors/adaptor.h"

namespace torch_uvm {

class RetryingAllocator final : public Adaptor {
 public:
  /// Called with no lock held, on the allocating thread. Returns true to retry.
  using Callback = std::function<bool(std::size_t bytes, Location home)>;

  RetryingAllocator(std::shared_ptr<Allocator> upstream, Callback callback)
      : Adaptor(std::move(upstream)), callback_(std::move(callback)) {}

  /// \throws the upstream's OutOfMemory if the callback returns false; what the callback throws
  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  std::string description() const override;

 private:
  const Callback callback_;
};

} // namespace torch_uvm
