// Segments of a caching allocator that come from another allocator.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "allocator/allocator.h"
#include "allocator/segment_source.h"

namespace torch_uvm {

/// Managed memory from an upstream. A segment may be used on any stream, but the upstream orders its memory by one
/// stream. The host therefore waits, as with a driver that allocates and frees memory. Allocation requests memory for
/// `Stream::host()`, so the upstream waits only where it must. Freeing waits for every device first. If that wait
/// fails, the segment is kept, and the wait is repeated with the next freed segment or at the source's destruction.
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

  bool wait_for_devices() noexcept; ///< \return false if the runtime has failed
  void release_freed() noexcept;

  ManagedRuntime& runtime_;
  const std::shared_ptr<Allocator> upstream_;
  const std::size_t least_shared_segment_;
  std::mutex mutex_; // leaf: nothing is called with it held
  Taken taken_; ///< in use, by aligned address in `at_`
  std::unordered_map<void*, Taken::iterator> at_;
  Taken freed_; ///< freed, but not yet waited for
};

} // namespace torch_uvm
