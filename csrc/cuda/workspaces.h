// Keeps the persistent workspaces of cuBLAS and cuBLASLt out of managed memory.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace torch_uvm::cuda {

/// Call before allocating `bytes` of managed memory on the current stream of `device`, the current device.
///
/// PyTorch keeps one workspace for each cuBLAS handle (one per thread and device) and stream, permanently. The first
/// matmul with the switch on would leave up to 32 MiB of managed memory in use. A request of exactly a workspace's size
/// may be for one, so this function first makes PyTorch allocate its workspace natively. If the request was for the
/// workspace, PyTorch finds that one exists and frees the new one. If it was for a tensor, the workspace was only
/// created early.
///
/// - For each thread and stream, an existing workspace is looked up only at every 64th allocation of its size. After
///   torch._C._cuda_clearCublasWorkspaces the next workspace may be managed until then.
/// - Temporary workspaces, such as cuDNN's, are not affected.
///
/// \param stream the current stream
void reserve_workspaces(c10::DeviceIndex device, std::size_t bytes, const void* stream) noexcept;

} // namespace torch_uvm::cuda
