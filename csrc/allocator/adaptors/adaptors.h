// An adaptor: forwards every request to its upstream and counts it. It may also bound the bytes, call back when memory
// runs short, and log.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "allocator/allocation_log.h"
#include "allocator/allocator.h"

namespace torch_uvm {

struct AdaptorOptions {
  std::optional<std::size_t> limit = std::nullopt; ///< maximum bytes allocated at any time, as requested
  /// Called when memory runs short, with no lock held, on the allocating thread. Returns true to retry.
  std::function<bool(std::size_t bytes, Location home)> callback = nullptr;
  /// Path of a log with a row per allocation, free and failed request, but those of 0 bytes. A free is logged before
  /// the upstream gets the memory, and an allocation after the upstream returned it; if two allocations share an
  /// address, the first is therefore logged as freed before the second is logged as allocated. Empty: no log
  std::string log = {};
};

/// Counts of one adaptor: other users of its upstream are not counted. Bytes are as requested.
struct PassedThrough {
  std::int64_t allocations = 0; ///< live
  std::int64_t peak_allocations = 0;
  std::int64_t total_allocations = 0; ///< since construction
  std::int64_t bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t total_bytes = 0;
  std::int64_t failures = 0; ///< requests that threw
};

/// Allocations are those of the upstream.
class Adaptor : public Allocator {
 public:
  /// \throws InvalidArgument if upstream is null; as AllocationLog
  explicit Adaptor(std::shared_ptr<Allocator> upstream, AdaptorOptions options = {});

  /// \throws OutOfMemory beyond the limit; the OutOfMemory of the limit or the upstream if the callback returns false;
  ///         what the callback and the upstream throw
  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override {
    upstream_->record_stream(allocation, stream);
  }
  std::size_t release() override {
    return upstream_->release();
  }
  bool serves(Location home) const override {
    return upstream_->serves(home);
  }
  /// The upstream's figures, except that the allocations and their bytes are those counted here.
  AllocatorFigures figures() const override;
  std::string description() const override;

  PassedThrough passed() const;
  void reset_peaks(); ///< to the current values
  /// Completes the log, if there is one. Later allocations are not logged.
  AllocationLogEnd close_log() noexcept;

 private:
  Allocation forward(std::size_t bytes, Location home, Stream stream);

  const std::shared_ptr<Allocator> upstream_;
  const AdaptorOptions options_;
  const std::unique_ptr<AllocationLog> log_; ///< nullptr: none
  mutable std::mutex mutex_; // leaf: nothing is called with it held
  std::size_t claimed_ = 0; ///< bytes of live allocations and of requests that the upstream is serving
  PassedThrough passed_;
};

} // namespace torch_uvm
