#include "cuda/workspaces.h"

#include <c10/cuda/CUDAMacros.h>
#include <c10/util/env.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "runtime/bytes.h"
#include "tensor/process/switch.h"

// Declarations of ATen/cuda/CUDAContextLight.h, which would need the headers of cuBLAS, cuSPARSE and others. Weak,
// because PyTorch versions differ in which of them exist; without them nothing is reserved.
struct cublasContext;
namespace at::cuda {
__attribute__((weak)) std::size_t getChosenWorkspaceSize();
__attribute__((weak)) cublasContext* getCurrentCUDABlasHandle();
__attribute__((weak)) cublasContext* getCurrentCUDABlasHandle(bool setup);
__attribute__((weak)) std::size_t getCUDABlasLtWorkspaceSize();
__attribute__((weak)) void resetChosenWorkspaceSize();
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

struct Sizes {
  std::size_t blas = 0;
  std::size_t light = 0;
};

Sizes read_sizes() {
  return {at::cuda::getChosenWorkspaceSize(), at::cuda::getCUDABlasLtWorkspaceSize()};
}

/// The workspace sizes of the current device. A torch without a function to set them reads them from the environment on
/// each query. That takes longer than the rest of an allocation and races with threads that change the environment, so
/// there they are read once per device.
Sizes sizes(c10::DeviceIndex device) {
  if (&at::cuda::resetChosenWorkspaceSize != nullptr) {
    return read_sizes();
  }
  struct Known {
    std::once_flag asked;
    Sizes sizes;
  };
  // Leaked: memory is allocated until the process exits.
  static auto* const known = new std::array<Known, C10_COMPILE_TIME_MAX_GPUS>();
  Known& one = known->at(static_cast<std::size_t>(device));
  std::call_once(one.asked, [&] { one.sizes = read_sizes(); });
  return one.sizes;
}

/// Whether cuBLASLt uses the workspace of cuBLAS instead of one of its own. Read once, as in torch. The default depends
/// on the version: a torch without a function to set the sizes shares the workspace only if the variable says so,
/// although it reports the size of a shared one if the variable is unset.
bool is_shared() {
  static const bool by_default = &at::cuda::resetChosenWorkspaceSize != nullptr;
  static const bool shared = c10::utils::check_env("TORCH_CUBLASLT_UNIFIED_WORKSPACE").value_or(by_default);
  return shared;
}

/// Allocations between two lookups of a workspace. A lookup takes longer than the rest of an allocation, but is needed
/// from time to time, because PyTorch may have been told to free all workspaces.
constexpr unsigned kLooksAgainAfter = 64;

/// Whether this thread has looked up the stream's workspace of that size within the last kLooksAgainAfter allocations.
bool is_made(c10::DeviceIndex device, const void* stream, std::size_t bytes) {
  struct Made {
    c10::DeviceIndex device = -1;
    const void* stream = nullptr;
    std::size_t bytes = 0;
    unsigned allocations = 0;
  };
  thread_local std::vector<Made> made;
  const auto known = std::ranges::find_if(
      made, [&](const Made& each) { return each.device == device && each.stream == stream && each.bytes == bytes; });
  if (known == made.end()) {
    made.push_back({device, stream, bytes});
    return false;
  }
  known->allocations = (known->allocations + 1) % kLooksAgainAfter;
  return known->allocations != 0;
}

} // namespace

void reserve_workspaces(c10::DeviceIndex device, std::size_t bytes, const void* stream) noexcept {
  if (bytes % KiB != 0 || // both sizes are whole KiB
      &at::cuda::getChosenWorkspaceSize == nullptr || &at::cuda::getCUDABlasLtWorkspaceSize == nullptr) {
    return;
  }
  try {
    const Sizes known = sizes(device);
    const bool blas = bytes == known.blas;
    const bool light = bytes == known.light && !is_shared();
    if ((!blas && !light) || is_made(device, stream, bytes)) {
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
    // The next cuBLAS call will report the error; the allocation goes on without.
  }
}

} // namespace torch_uvm::cuda
