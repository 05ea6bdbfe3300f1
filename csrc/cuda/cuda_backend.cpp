#include "cuda/cuda_backend.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <mutex>

#include "cuda/cuda_runtime.h"
#include "cuda/delegating_allocator.h"
#include "tensor/dispatch/captures.h"
#include "tensor/process/context.h"

namespace torch_uvm::cuda {
namespace {

// c10::SetAllocator silently ignores a priority below the current one; the native allocator registers with 0 or 1.
constexpr std::uint8_t kPriority = 255;

void put_in_place() {
  static std::once_flag once;
  std::call_once(once, [] {
    // First, because it may fail, and because the native allocator has to know its devices.
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    auto* before = pytorch::allocator.load();
    static DelegatingAllocator* ours = nullptr;
    ours = new DelegatingAllocator(before); // leaked: see the class
    pytorch::allocator.store(ours);
    c10::SetAllocator(c10::DeviceType::CUDA, ours, kPriority);
    set_capture_probe([] { return ours->is_capturing_now(); });
  });
}

} // namespace

void register_backend() {
  // The allocator is installed with the runtime, so it is in place for every managed allocation, even with the switch
  // off (of a CPU tensor, for example).
  Context::get().set_backend({"cuda", [](const Options& /*options*/) {
                                put_in_place();
                                return std::make_unique<CudaRuntime>();
                              }});
}

} // namespace torch_uvm::cuda
