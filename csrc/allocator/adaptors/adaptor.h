// Base class of adaptors: allocators that forward every request to an upstream and add one behaviour.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "allocator/allocator.h"
#include "runtime/error.h"

namespace torch_uvm {

/// Forwards everything unchanged; a subclass overrides what it adds. Allocations are those of the upstream.
class Adaptor : public Allocator {
 public:
  /// \throws InvalidArgument if upstream is null
  explicit Adaptor(std::shared_ptr<Allocator> upstream) : upstream_(std::move(upstream)) {
    if (upstream_ == nullptr) {
      throw InvalidArgument("an adaptor around no allocator");
    }
  }

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override {
    return upstream_->allocate(bytes, home, stream);
  }
  void free(const Allocation& allocation) noexcept override {
    upstream_->free(allocation);
  }
  void record_stream(const Allocation& allocation, Stream stream) override {
    upstream_->record_stream(allocation, stream);
  }
  std::size_t release() override {
    return upstream_->release();
  }
  bool serves(Location home) const override {
    return upstream_->serves(home);
  }
  AllocatorFigures figures() const override {
    return upstream_->figures();
  }

 protected:
  Allocator& upstream() const {
    return *upstream_;
  }

 private:
  const std::shared_ptr<Allocator> upstream_;
};

} // namespace torch_uvm
