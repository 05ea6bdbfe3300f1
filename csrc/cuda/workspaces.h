// The workspaces that cuBLAS keeps: never in managed memory.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace torch_uvm::cuda {

/// Called before `bytes` of managed memory are given out to the current stream of `device`, the current one.
///
/// PyTorch keeps a workspace for each cuBLAS handle (one a thread and device) and stream, for good: the first
/// matmul with the switch on would leave up to 32 MiB of managed memory in use. An allocation of a workspace's
/// size may be one, and so the workspace is made natively at that moment. If it was one, PyTorch finds that it
/// has one already, and lets the new one go; if it was somebody's tensor, a workspace was made early.
///
/// A PyTorch that has no function to set the sizes reads them from the environment at each question. There the sizes
/// are those of the first managed allocation on the device.
///
/// This holds for every thread and stream. Once made, a workspace is looked for at each 64th allocation of its size
/// only: after PyTorch was told to let go of all (torch._C._cuda_clearCublasWorkspaces) the next may be managed until
/// then. What does not pass here: workspaces of other libraries, such as cuDNN's, which come and go.
///
/// \param stream the current one
void reserve_workspaces(c10::DeviceIndex device, std::size_t bytes, const void* stream) noexcept;

} // namespace torch_uvm::cuda
