// DLPack export and import with the device type for managed memory, kDLCUDAManaged, which PyTorch does not support.
//
// T is DLManagedTensor (DLPack before 1.0) or DLManagedTensorVersioned. Unsupported tensors raise c10::BufferError
// (Python's BufferError), and nothing has changed then.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/dlpack.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace torch_uvm {

/// Exports `tensor` as managed memory. The caller owns the result and must call its deleter; the bytes live, and stay
/// pinned under a budget, until then. Pending device work is not waited for.
/// \param tensor managed and strided, without conjugate or negative bit
/// \param device_id the device index in the result; every device can access the bytes
/// \param copied sets the IS_COPIED flag (versioned form only): no other tensor has these bytes
template <class T>
T* export_managed(const at::Tensor& tensor, std::int32_t device_id, bool copied);

/// Imports `source` as a tensor on the producer's bytes. The tensor cannot be resized. It takes ownership of `source`:
/// the deleter is called when the last tensor on the bytes is gone and the current stream's work is done. On an
/// exception the caller still owns `source`.
///
/// The tensor is not managed: its bytes are the producer's, not our allocator's. But a `source` made by export_managed
/// gives the exported tensor itself, moved to `device`.
/// \param device the tensor's label: the CPU, or a device with an index
/// \param read_only_too accept read-only memory, because the caller will copy it
template <class T>
at::Tensor import_managed(T* source, c10::Device device, bool read_only_too);

} // namespace torch_uvm
