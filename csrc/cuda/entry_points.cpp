// C entry points for managed memory, with the signatures that torch.cuda.memory.CUDAPluggableAllocator expects.
#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <exception>

#include "runtime/error.h"
#include "tensor/process/context.h"

namespace torch_uvm::cuda {
namespace {

void* allocate(std::size_t bytes, Location home) {
  Context& context = Context::get();
  try {
    return context.runtime().allocate_managed(bytes, home);
  } catch (const OutOfMemory&) {
    if (context.managed_allocator().empty_cache() == 0) { // cached segments count against the same limit
      throw;
    }
    return context.runtime().allocate_managed(bytes, home);
  }
}

void populate(void* ptr, std::size_t bytes, Location home, Stream stream) {
  try {
    ManagedRuntime& runtime = Context::get().runtime();
    if (bytes <= runtime.device_properties(home.index).total_memory) {
      runtime.prefetch(ptr, bytes, home, stream);
    }
  } catch (const std::exception&) {
    // Only a hint: without it the pages are populated by page faults.
  }
}

/// Zeroes fresh memory, whose contents are unspecified. Memory that PyTorch's pool reuses is not zeroed again.
void zero(void* ptr, std::size_t bytes, Stream stream) {
  ManagedRuntime& runtime = Context::get().runtime();
  try {
    runtime.zero_async(ptr, bytes, stream);
  } catch (...) {
    runtime.free_managed(ptr);
    throw;
  }
}

} // namespace
} // namespace torch_uvm::cuda

extern "C" {

/// Allocates managed memory under torch_uvm's limit and starts prefetching it to `device` on `stream`, its first user.
/// Not cached: the caller is expected to cache segments, as PyTorch's pools do.
/// \return nullptr on failure, for a size below 1, and in a forked child. Does not throw
__attribute__((visibility("default"))) void* torch_uvm_malloc(ssize_t size, int device, cudaStream_t stream) {
  using namespace torch_uvm;
  if (size <= 0 || device < 0 || Context::get().forked()) {
    return nullptr;
  }
  const auto bytes = static_cast<std::size_t>(size);
  try {
    const Location home = Location::device(device);
    void* const ptr = cuda::allocate(bytes, home);
    cuda::populate(ptr, bytes, home, Stream{device, stream});
    if (Context::get().zeroes_allocations()) {
      cuda::zero(ptr, bytes, Stream{device, stream});
    }
    return ptr;
  } catch (const std::exception&) {
    return nullptr; // a C function must not throw; the caller raises its own error
  }
}

/// Frees memory of torch_uvm_malloc, after waiting for device work that may still touch it. Ignores nullptr.
__attribute__((visibility("default"))) void torch_uvm_free(void* ptr, ssize_t /*size*/, int /*device*/,
                                                           cudaStream_t /*stream*/) {
  using namespace torch_uvm;
  if (ptr != nullptr && !Context::get().forked()) {
    Context::get().runtime().free_managed(ptr);
  }
}
}
