// DLPack's device type for managed memory, kDLCUDAManaged, which PyTorch itself neither gives nor takes.
//
// T is DLManagedTensor (DLPack before 1.0) or DLManagedTensorVersioned. Refusals are c10::BufferError
// (Python's BufferError), and change nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/dlpack.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace torch_uvm {

/// The bytes of `tensor` for somebody who takes managed memory. The caller owns the result, and calls its
/// deleter; until then the bytes live. Nothing is waited for.
/// \param tensor managed, strided, neither conjugate nor negated by a bit
/// \param device_id what the consumer is told; the bytes are every device's
/// \param copied whether nobody else has these bytes; only the versioned form says so
template <class T>
T* export_managed(const at::Tensor& tensor, std::int32_t device_id, bool copied);

/// A tensor on the producer's bytes under the label `device`, with its index, or the CPU's; it cannot be
/// resized. `source` is the tensor's from now on: its deleter is called when the last tensor on the bytes
/// is gone and the current stream's work on them is done. On an exception it is still the caller's.
///
/// It is not managed: its bytes are the producer's, not the allocator's. What export_managed made is no
/// import: it gives the tensor that was exported, under the label `device`.
/// \param read_only_too whether read-only memory will do, because the caller is going to copy it
template <class T>
at::Tensor import_managed(T* source, c10::Device device, bool read_only_too);

} // namespace torch_uvm
