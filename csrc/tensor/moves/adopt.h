// Adoption: a tensor in a file's mapping becomes managed without a copy.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_uvm {

/// Whether `adopt` is worth a try: the tensor may lie in a file's mapping. Needs no runtime.
bool may_adopt(const at::Tensor& tensor);

/// Makes the storage of `tensor` managed where it is. All tensors on the storage are managed then; addresses, contents
/// and labels stay.
///
/// It does so where every device has one memory with the host and addresses pageable memory, and for a strided CPU
/// tensor that is aligned to its elements and whose storage lies in writable private mappings of files
/// (torch.load(mmap=True), safetensors). A write copies the page and does not reach the file.
/// \return whether the tensor is managed now
/// \throws what the runtime throws as it is made
bool adopt(const at::Tensor& tensor);

} // namespace torch_uvm
