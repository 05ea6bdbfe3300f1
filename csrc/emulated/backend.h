// The emulated accelerator, registered as PyTorch's PrivateUse1 device: declarations that its parts share.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>

#include "allocator/caching/caching_managed_allocator.h"
#include "config/options.h"
#include "runtime/emulated/emulated_runtime.h"

namespace at {
struct PrivateUse1HooksInterface;
}
namespace c10::impl {
struct DeviceGuardImplInterface;
}

namespace torch_uvm::emulated {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = EmulatedConfig::kMaxDevices;

/// Registers the backend, guard, hooks, allocators, kernels and autocast. Later calls do nothing.
void register_accelerator();
bool is_registered();

// What PyTorch gets from register_accelerator(). The singletons are leaked, because PyTorch keeps the pointers.

at::PrivateUse1HooksInterface* hooks(); ///< hooks.cpp: what device-independent code calls
const c10::impl::DeviceGuardImplInterface* device_guard(); ///< guard.cpp: devices, streams and events
/// collectives.cpp: replaces PyTorch's kernels of the c10d operators by ones with which gloo runs on the same bytes,
/// without a copy. Does nothing if torch was built without torch.distributed.
void register_collectives();

/// exit.cpp: waits until autograd's device threads have released all finished backward passes. Called at exit, without
/// the GIL.
///
/// backward() returns when the gradients are ready. The device's thread destroys the pass a little later, which takes
/// the GIL to release a Python object. If the interpreter is ending by then, Python terminates the thread inside a
/// destructor, and the process aborts.
void finish_backward_threads() noexcept;

/// Creates the runtime; called by the Context.
std::unique_ptr<ManagedRuntime> make_emulated_runtime(const Options& options);

/// The emulated runtime, created at first use.
EmulatedRuntime& runtime();

/// Allocates plain device memory, which the accelerator's tensors get while managed memory is off.
CachingManagedAllocator& plain_allocator();

/// The number of devices. Does not create the runtime.
int device_count();

/// Called before the bytes of an accelerator tensor are accessed.
/// \throws c10::Error in a forked process: the memory belongs to the parent, and managed memory is not mapped
void check_not_forked();

// --- the calling thread's current device and streams

int current_device();
void set_current_device(int device); ///< \throws c10::Error for a device that does not exist
int exchange_device(int device); ///< one that exists
Stream current_stream(int device);
Stream exchange_stream(Stream stream);

/// Resolves an index passed by PyTorch: -1 is the current device. \throws c10::Error for a device that does not exist
int checked_index(c10::DeviceIndex index);

/// The id of a c10::Stream is the runtime's handle; 0 is the default stream.
c10::Stream to_torch(Stream stream);
Stream from_torch(const c10::Stream& stream);

} // namespace torch_uvm::emulated
