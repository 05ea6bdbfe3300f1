// Segments of a caching allocator that another allocator gives.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "allocator/allocator.h"
#include "allocator/segment_source.h"

namespace torch_uvm {

/// Of managed memory. A segment is used on any stream from its start, and may have been by its end, where the upstream
/// knows of one: so the host waits, as it does in a driver that makes and takes back memory. It waits for what the
/// upstream hands out no longer than the upstream has to (`Stream::host()`), and for every device at the end.
/// Where that wait fails the segment is kept, and waited for again with the next one, or at the source's own end.
class UpstreamSegmentSource final : public SegmentSource {
 public:
  /// \param least_shared_segment see SegmentSource
  UpstreamSegmentSource(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream,
                        std::size_t least_shared_segment = 0)
      : runtime_(runtime), upstream_(std::move(upstream)), least_shared_segment_(least_shared_segment) {}
  ~UpstreamSegmentSource() override;
  void* allocate(std::size_t bytes, Location home) override;
  void free(void* ptr) noexcept override;
  bool is_managed() const override {
    return true;
  }
  std::size_t least_shared_segment() const override {
    return least_shared_segment_;
  }

 private:
  using Taken = std::list<Allocation>;

  bool wait_for_devices() noexcept; ///< \return false: the runtime has failed
  void give_back_freed() noexcept;

  ManagedRuntime& runtime_;
  const std::shared_ptr<Allocator> upstream_;
  const std::size_t least_shared_segment_;
  std::mutex mutex_; // leaf: nothing is called with it held
  Taken taken_; ///< in use, by the aligned address that was given out:
  std::unordered_map<void*, Taken::iterator> at_;
  Taken freed_; ///< not waited for yet
};

} // namespace torch_uvm
