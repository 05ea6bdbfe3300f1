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

// A lower priority than the table has is ignored without a word; the native one registers with 0 or 1.
constexpr std::uint8_t kPriority = 255;

void put_in_place() {
  static std::once_flag once;
  std::call_once(once, [] {
    // First, as it may fail, and then nothing has changed. The native allocator has to know its devices.
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    auto* before = native::allocator.load();
    static DelegatingAllocator* ours = nullptr;
    ours = new DelegatingAllocator(before); // leaked: see the class
    native::allocator.store(ours);
    c10::SetAllocator(c10::DeviceType::CUDA, ours, kPriority);
    set_capture_probe([] { return ours->is_capturing_now(); });
  });
}

} // namespace

void register_backend() {
  // Managed memory that comes before the switch, such as a CPU label's, finds the allocator in place, too.
  Context::get().set_backend({"cuda", [](const Options& options) {
                                put_in_place();
                                return std::make_unique<CudaRuntime>(options.cuda.pool_segments);
                              }});
}

void install_allocator() {
  Context::get().runtime();
}

} // namespace torch_uvm::cuda
