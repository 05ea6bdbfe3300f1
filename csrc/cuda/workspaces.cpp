#include "cuda/workspaces.h"

#include "tensor/switch.h"

// As in ATen/cuda/CUDAContextLight.h, which wants the headers of cuBLAS and its relatives. Weak: which of the
// two handles there is depends on the version, and one that lacks all of them is none of our business.
struct cublasContext;
namespace at::cuda {
__attribute__((weak)) std::size_t getChosenWorkspaceSize();
__attribute__((weak)) cublasContext* getCurrentCUDABlasHandle();
__attribute__((weak)) cublasContext* getCurrentCUDABlasHandle(bool setup);
__attribute__((weak)) std::size_t getCUDABlasLtWorkspaceSize();
__attribute__((weak)) void* getCUDABlasLtWorkspace();
} // namespace at::cuda

namespace torch_uvm::cuda {
namespace {

using Handle = cublasContext* (*)();
using HandleSetUp = cublasContext* (*)(bool);

void make_workspace() {
  if (const HandleSetUp handle = &at::cuda::getCurrentCUDABlasHandle) {
    handle(/*setup=*/true);
  } else if (const Handle plain_handle = &at::cuda::getCurrentCUDABlasHandle) {
    plain_handle();
  }
}

} // namespace

void reserve_workspaces(std::size_t bytes) noexcept {
  // Both sizes are read again each time: they are a function call, and can be changed.
  if (&at::cuda::getChosenWorkspaceSize == nullptr || &at::cuda::getCUDABlasLtWorkspaceSize == nullptr) {
    return;
  }
  try {
    const bool blas = bytes == at::cuda::getChosenWorkspaceSize();
    const bool light = bytes == at::cuda::getCUDABlasLtWorkspaceSize();
    if (!blas && !light) {
      return;
    }
    const ManagedScope off(false);
    if (blas) {
      make_workspace();
    }
    if (light && &at::cuda::getCUDABlasLtWorkspace != nullptr) {
      at::cuda::getCUDABlasLtWorkspace();
    }
  } catch (...) {
    // Whoever needs cuBLAS will hear of it; an allocation does not.
  }
}

} // namespace torch_uvm::cuda
