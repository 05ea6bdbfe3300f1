#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <optional>
#include <utility>

#include "replay_peers.h"

namespace torch_uvm::peers {
namespace {

using c10::cuda::CUDACachingAllocator::CUDAAllocator;

/// Uses the same functions as torch.cuda.MemPool(allocator) and torch.cuda.use_mem_pool.
class TorchNative final : public Allocator {
 public:
  TorchNative(std::shared_ptr<Allocator> below, Location home)
      : below_(std::move(below)), home_(home), native_(c10::cuda::CUDACachingAllocator::get()) {
    if (home.index != c10::cuda::current_device()) {
      throw InvalidArgument("allocations of " + to_string(home) + ", which is not current to PyTorch");
    }
    if (native_->name() != "native") {
      throw RuntimeFailure("PyTorch's allocator is '" + native_->name() + "', not its native one");
    }
    const auto allocate = [under = below_, home](std::size_t bytes, int, cudaStream_t stream) -> void* {
      try {
        return under->allocate(bytes, home, Stream{home.index, stream}).ptr;
      } catch (const OutOfMemory&) {
        return nullptr; // like a refusal of cudaMalloc: PyTorch releases its cache and retries
      }
    };
    const auto free = [under = below_](void* ptr, std::size_t bytes, int, cudaStream_t) {
      under->free({ptr, bytes, nullptr});
    };
    pool_.emplace(torch::cuda::CUDAPluggableAllocator::createCustomAllocator(allocate, free));
    native_->beginAllocateToPool(device(), pool_->id(), [](cudaStream_t) { return true; });
  }

  ~TorchNative() override {
    native_->endAllocateToPool(device(), pool_->id());
    // the reference of beginAllocateToPool; the pool's destructor frees everything
    native_->releasePool(device(), pool_->id());
  }

  Allocation allocate(std::size_t bytes, Location /*home*/, Stream stream) override {
    try {
      return {native_->raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream.handle)), bytes, nullptr};
    } catch (const c10::OutOfMemoryError& error) {
      throw OutOfMemory(OutOfMemory::Cause::kRuntime, bytes, error.what_without_backtrace());
    }
  }

  void free(const Allocation& allocation) noexcept override {
    native_->raw_delete(allocation.ptr);
  }

  void record_stream(const Allocation& /*allocation*/, Stream /*stream*/) override {
    throw InvalidArgument("PyTorch takes streams of tensors, not of addresses");
  }

  std::size_t release() override {
    const std::int64_t before = below_->figures().reserved_bytes;
    native_->emptyCache(pool_->id());
    return static_cast<std::size_t>(before - below_->figures().reserved_bytes);
  }

  bool serves(Location home) const override {
    return home == home_;
  }
  AllocatorFigures figures() const override {
    return below_->figures();
  }
  std::string description() const override {
    return "torch.cuda.MemPool(" + below_->description() + ")";
  }

 private:
  c10::DeviceIndex device() const {
    return static_cast<c10::DeviceIndex>(home_.index);
  }

  const std::shared_ptr<Allocator> below_;
  const Location home_;
  CUDAAllocator* const native_;
  std::optional<at::cuda::MemPool> pool_;
};

} // namespace

std::shared_ptr<Allocator> make_torch_native(std::shared_ptr<Allocator> below, Location home) {
  return std::make_shared<TorchNative>(std::move(below), home);
}

} // namespace torch_uvm::peers
