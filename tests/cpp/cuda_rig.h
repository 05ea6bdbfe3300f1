// The rig of CudaRuntime's tests: a runtime over the fake CUDA runtime (tests/fake_cuda), and leak checks.
#pragma once

#include <cuda_runtime_api.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "allocator_rig.h"
#include "cuda/cuda_runtime.h"
#include "fake_cuda.h"

namespace cuda_rig {

using namespace torch_uvm;
using torch_uvm::cuda::CudaRuntime;

constexpr std::size_t kMemory = 256 * MiB;

struct Machine {
  int devices = 2;
  bool concurrent = true;
  const char* profile = "h200";
};

inline std::unique_ptr<CudaRuntime> made(Machine machine = {}) {
  fake_cuda_reset(machine.devices, kMemory, machine.concurrent, machine.profile);
  return std::make_unique<CudaRuntime>();
}

/// Checks that the fake reports no misuse and that no memory is left.
inline void all_is_well() {
  CHECK_EQ(std::string(fake_cuda_misuse()), std::string());
  for (const char* call : {"cudaMallocManaged", "cudaMalloc", "cudaHostAlloc", "cudaHostRegister"}) {
    CHECK_EQ(fake_cuda_live(call), std::size_t{0});
  }
}

inline std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline void contains(const std::string& text, const std::string& part) {
  if (text.find(part) == text.npos) {
    harness::fail(__FILE__, __LINE__, "\"" + part + "\" is not in: " + text);
  }
}

} // namespace cuda_rig
