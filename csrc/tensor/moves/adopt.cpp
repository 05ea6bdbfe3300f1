// Adoption: a tensor in a file's mapping becomes managed without a copy.
#include <cstdint>
#include <mutex>
#include <utility>

#include "runtime/host_memory.h"
#include "tensor/moves/moves.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/storage/adopted_storage.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {

bool may_adopt(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided || !tensor.device().is_cpu() || !tensor.has_storage() ||
      tensor.unsafeGetTensorImpl()->is_python_dispatch() || Context::forked() ||
      Context::get().backend_name() == "none") {
    return false;
  }
  // The storages of mappings cannot grow. Most others can, so this saves looking up their addresses.
  const c10::Storage& storage = tensor.storage();
  return !storage.resizable() && storage.nbytes() != 0 && storage.data() != nullptr &&
         reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % tensor.itemsize() == 0;
}

bool adopt(const at::Tensor& tensor) {
  if (!may_adopt(tensor) || !Machine::get().adopts) {
    return false;
  }
  static std::mutex adoptions; // two threads may adopt the same storage
  const std::lock_guard lock(adoptions);
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  if (is_managed(data)) {
    return true;
  }
  if (!is_private_file_mapping(data.get(), storage->nbytes())) {
    return false;
  }
  c10::DataPtr mapped(data.get(), data.get_context(), data.get_deleter(), data.device());
  data.release_context(); // does not clear the pointer: another thread may be reading it
  storage->set_data_ptr_noswap(adopted_data(std::move(mapped)));
  return true;
}

} // namespace torch_uvm
