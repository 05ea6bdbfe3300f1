// Adaptors: allocators that forward every request to an upstream and add one behaviour.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "allocator/allocator.h"

namespace torch_uvm {

/// Forwards everything unchanged; a subclass overrides what it adds. Allocations are those of the upstream.
class Adaptor : public Allocator {
 public:
  /// \throws InvalidArgument if upstream is null
  explicit Adaptor(std::shared_ptr<Allocator> upstream) : upstream_(required(std::move(upstream), "an adaptor")) {}

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

/// Counts of one counting allocator. Bytes are as requested.
struct PassedThrough {
  std::int64_t allocations = 0; ///< live
  std::int64_t peak_allocations = 0;
  std::int64_t total_allocations = 0; ///< since construction
  std::int64_t bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t total_bytes = 0;
  std::int64_t failures = 0; ///< requests that threw
};

/// Counts the allocations made through it, and may limit their bytes. Other users of its upstream are not counted.
class CountingAllocator final : public Adaptor {
 public:
  /// \param limit maximum bytes allocated at any time, as requested; nullopt: no limit
  explicit CountingAllocator(std::shared_ptr<Allocator> upstream, std::optional<std::size_t> limit = std::nullopt)
      : Adaptor(std::move(upstream)), limit_(limit) {}

  /// \throws OutOfMemory beyond the limit; what the upstream throws
  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  /// The upstream's figures, except that the allocations and their bytes are those counted here.
  AllocatorFigures figures() const override;
  std::string description() const override;

  PassedThrough passed() const;
  void reset_peaks(); ///< to the current values

 private:
  const std::optional<std::size_t> limit_;
  mutable std::mutex mutex_; // leaf: nothing is called with it held
  std::size_t claimed_ = 0; ///< bytes of live allocations and of requests that the upstream is serving
  PassedThrough passed_;
};

/// Calls a callback when memory runs short, and retries.
class RetryingAllocator final : public Adaptor {
 public:
  /// Called with no lock held, on the allocating thread. Returns true to retry.
  using Callback = std::function<bool(std::size_t bytes, Location home)>;

  RetryingAllocator(std::shared_ptr<Allocator> upstream, Callback callback)
      : Adaptor(std::move(upstream)), callback_(std::move(callback)) {}

  /// \throws the upstream's OutOfMemory if the callback returns false; what the callback throws
  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  std::string description() const override {
    return "failure_callback(" + upstream().description() + ")";
  }

 private:
  const Callback callback_;
};

} // namespace torch_uvm
