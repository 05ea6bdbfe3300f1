#include <cuda/memory_resource>
#include <cuda/stream_ref>
#include <new>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <utility>

#include "replay_peers.h"

namespace torch_uvm::peers {
namespace {

/// One of our allocators as RMM's upstream.
class Upstream {
 public:
  Upstream(std::shared_ptr<Allocator> below, Location home) : below_(std::move(below)), home_(home) {}

  void* allocate(cuda::stream_ref stream, std::size_t bytes, std::size_t /*alignment*/) {
    return below_->allocate(bytes, home_, Stream{home_.index, stream.get()}).ptr;
  }
  void deallocate(cuda::stream_ref /*stream*/, void* ptr, std::size_t bytes, std::size_t /*alignment*/) noexcept {
    below_->free({ptr, bytes, nullptr});
  }
  void* allocate_sync(std::size_t bytes, std::size_t /*alignment*/) {
    return below_->allocate(bytes, home_, Stream::default_of(home_.index)).ptr;
  }
  void deallocate_sync(void* ptr, std::size_t bytes, std::size_t /*alignment*/) noexcept {
    below_->free({ptr, bytes, nullptr});
  }
  bool operator==(const Upstream& other) const noexcept {
    return below_ == other.below_ && home_ == other.home_;
  }
  friend constexpr void get_property(const Upstream& /*upstream*/, cuda::mr::device_accessible /*what*/) noexcept {}

 private:
  std::shared_ptr<Allocator> below_;
  Location home_;
};
static_assert(cuda::mr::resource_with<Upstream, cuda::mr::device_accessible>);

template <typename Call>
auto with_our_error(std::size_t bytes, Call&& call) {
  try {
    return call();
  } catch (const std::bad_alloc& error) { // includes rmm::out_of_memory
    throw OutOfMemory(OutOfMemory::Cause::kRuntime, bytes, error.what());
  }
}

/// An allocation's handle is its stream, because RMM needs the stream again for the free.
template <typename Resource>
class RmmAllocator final : public Allocator {
 public:
  RmmAllocator(const char* name, std::shared_ptr<Allocator> below, Location home, Resource resource)
      : name_(name), below_(std::move(below)), home_(home), resource_(std::move(resource)) {}

  Allocation allocate(std::size_t bytes, Location /*home*/, Stream stream) override {
    return with_our_error(bytes, [&]() -> Allocation {
      return {resource_.allocate(native(stream.handle), bytes, kAllocationAlignment), bytes, stream.handle};
    });
  }
  void free(const Allocation& allocation) noexcept override {
    resource_.deallocate(native(allocation.handle), allocation.ptr, allocation.bytes, kAllocationAlignment);
  }
  void record_stream(const Allocation& /*allocation*/, Stream /*stream*/) override {
    throw InvalidArgument("RMM knows of no other stream than an allocation's own");
  }
  std::size_t release() override {
    return 0; // nothing is released
  }
  bool serves(Location home) const override {
    return home == home_;
  }
  AllocatorFigures figures() const override {
    return below_->figures();
  }
  std::string description() const override {
    return name_ + ("(" + below_->description()) + ")";
  }

 private:
  static cuda::stream_ref native(void* stream) {
    return cuda::stream_ref{static_cast<cudaStream_t>(stream)};
  }

  const std::string name_;
  const std::shared_ptr<Allocator> below_;
  const Location home_;
  Resource resource_;
};

template <typename Resource, typename... Sizes>
std::shared_ptr<Allocator> make(const char* name, std::shared_ptr<Allocator> below, Location home, std::size_t bytes,
                                Sizes... sizes) {
  return with_our_error(bytes, [&] {
    return std::make_shared<RmmAllocator<Resource>>(name, below, home, Resource{Upstream{below, home}, sizes...});
  });
}

} // namespace

std::shared_ptr<Allocator> make_rmm_pool(std::shared_ptr<Allocator> below, Location home, std::size_t bytes) {
  return make<rmm::mr::pool_memory_resource>("rmm::mr::pool_memory_resource", std::move(below), home, bytes, bytes,
                                             std::optional(bytes));
}

std::shared_ptr<Allocator> make_rmm_arena(std::shared_ptr<Allocator> below, Location home, std::size_t bytes) {
  return make<rmm::mr::arena_memory_resource>("rmm::mr::arena_memory_resource", std::move(below), home, bytes,
                                              std::optional(bytes));
}

} // namespace torch_uvm::peers
