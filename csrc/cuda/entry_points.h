// What others call for managed memory, with the signatures of torch.cuda.memory.CUDAPluggableAllocator.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/types.h>

extern "C" {

/// Managed memory under torch_uvm's limit, for first use on `stream`: its pages start moving to `device`.
/// No cache: who calls this keeps segments, as PyTorch's pools do.
/// \return nullptr where it is refused, for a size below 1, and in a forked child. Throws nothing
__attribute__((visibility("default"))) void* torch_uvm_malloc(ssize_t size, int device, cudaStream_t stream);

/// Gives back what torch_uvm_malloc returned; waits for device work that may still touch it.
/// nullptr is ignored.
__attribute__((visibility("default"))) void torch_uvm_free(void* ptr, ssize_t size, int device, cudaStream_t stream);
}
