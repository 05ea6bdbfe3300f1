#include "cuda/workspaces.h"

#include <c10/cuda/CUDAMacros.h>
#include <c10/util/env.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "runtime/bytes.h"
#include "tensor/process/switch.h"

// As in ATen/cuda/CUDAContextLight.h, which wants the headers of cuBLAS and its relatives. Weak: which of the
// two handles there is depends on the version, and one that lacks all of them is none of our business.
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

/// Of the current device. Until torch can be told sizes it reads them from the environment at each question. That takes
/// longer than all else of an allocation, and another thread may be changing the environment: asked once a device.
Sizes sizes(c10::DeviceIndex device) {
  if (&at::cuda::resetChosenWorkspaceSize != nullptr) {
    return read_sizes();
  }
  struct Known {
    std::once_flag asked;
    Sizes sizes;
  };
  static auto* const known =
      new std::array<Known, C10_COMPILE_TIME_MAX_GPUS>(); // leaked: memory is allocated until the end
  Known& one = known->at(static_cast<std::size_t>(device));
  std::call_once(one.asked, [&] { one.sizes = read_sizes(); });
  return one.sizes;
}

/// Whether cuBLASLt works in cuBLAS's workspace, and has none of its own. Torch, too, looks once. Until torch can be
/// told sizes, whoever fetches the workspace shares it only where the variable says so, although the size is of one
/// that is shared if the variable says nothing.
bool is_shared() {
  static const bool by_default = &at::cuda::resetChosenWorkspaceSize != nullptr;
  static const bool shared = c10::utils::check_env("TORCH_CUBLASLT_UNIFIED_WORKSPACE").value_or(by_default);
  return shared;
}

/// To have PyTorch look up a workspace that is there takes longer than all else of an allocation. It may have been told
/// to let go of all of them since.
constexpr unsigned kLooksAgainAfter = 64;

/// Whether this thread has made the stream's workspace of that size, a few allocations ago at most.
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
  if (bytes % KiB != 0 || // the unit of both sizes
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
    // Whoever needs cuBLAS will hear of it; an allocation does not.
  }
}

} // namespace torch_uvm::cuda
