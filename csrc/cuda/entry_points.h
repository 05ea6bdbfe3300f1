// C entry points for managed memory, with the signatures that torch.cuda.memory.CUDAPluggableAllocator expects.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/types.h>

extern "C" {

/// Allocates managed memory under torch_uvm's limit and starts prefetching it to `device` on `stream`, its first user.
/// Not cached: the caller is expected to cache segments, as PyTorch's pools do.
/// \return nullptr on failure, for a size below 1, and in a forked child. Does not throw
__attribute__((visibility("default"))) void* torch_uvm_malloc(ssize_t size, int device, cudaStream_t stream);

/// Frees memory of torch_uvm_malloc, after waiting for device work that may still touch it. Ignores nullptr.
__attribute__((visibility("default"))) void torch_uvm_free(void* ptr, ssize_t size, int device, cudaStream_t stream);
}
