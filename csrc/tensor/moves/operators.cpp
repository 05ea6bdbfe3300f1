// The operators torch_uvm::move and torch_uvm::managed_copy.
#include <torch/library.h>

#include "tensor/moves/moves.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

/// Leaked: deregistration at exit would race with threads that are still running.
torch::Library& implementations(c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, "torch_uvm", key, __FILE__, __LINE__);
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

} // namespace

const MoveOperator& move_operator() {
  static const MoveOperator handle = find("torch_uvm::move").typed<decltype(move_kernel)>();
  return handle;
}

const ManagedCopyOperator& managed_copy_operator() {
  static const ManagedCopyOperator handle = find("torch_uvm::managed_copy").typed<decltype(managed_copy_kernel)>();
  return handle;
}

void register_operators() {
  auto& definitions = *new torch::Library(torch::Library::FRAGMENT, "torch_uvm", std::nullopt, __FILE__, __LINE__);
  definitions.def("move(Tensor(a) self, Device device, bool non_blocking=False) -> Tensor(a)");
  definitions.def("_is_managed(Tensor self) -> bool");
  definitions.def(
      "managed_copy(Tensor self, Device device, ScalarType dtype, bool non_blocking, "
      "MemoryFormat memory_format) -> Tensor");
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::PrivateUse1}) {
    implementations(key).impl("move", TORCH_FN(move_kernel)).impl("managed_copy", TORCH_FN(managed_copy_kernel));
  }
  implementations(c10::DispatchKey::ADInplaceOrView).impl("move", TORCH_FN(move_view));
  implementations(c10::DispatchKey::Autograd)
      .impl("move", TORCH_FN(move_autograd))
      .impl("managed_copy", TORCH_FN(managed_copy_autograd));
  // The dispatcher removes the wrappers of grad; is_managed itself looks through those of vmap.
  constexpr bool (*managed)(const at::Tensor&) = &is_managed;
  for (const c10::DispatchKey key : {c10::DispatchKey::CompositeExplicitAutograd, c10::DispatchKey::FuncTorchBatched}) {
    implementations(key).impl("_is_managed", managed);
  }
}

} // namespace torch_uvm
