// The emulated accelerator as PyTorch's PrivateUse1 device: what its parts share.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>

#include "allocator/caching/caching_managed_allocator.h"
#include "config/options.h"
#include "runtime/emulated/emulated_runtime.h"

namespace torch_uvm::emulated {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = EmulatedConfig::kMaxDevices;

/// Puts the accelerator in place: backend, guard, hooks, allocators, kernels, autocast. Once.
void register_accelerator();
bool is_registered();

/// What the Context calls to make the runtime.
std::unique_ptr<ManagedRuntime> make_emulated_runtime(const Options& options);

/// The emulated runtime; made at first use.
EmulatedRuntime& runtime();

/// The allocator of plain memory: what the accelerator's tensors have while managed memory is off.
CachingManagedAllocator& plain_allocator();

/// How many devices there are, without making the runtime.
int device_count();

/// For what touches the bytes of the accelerator's tensors: in a forked process they are the parent's, and
/// managed ones are not even mapped. \throws c10::Error there
void check_not_forked();

// --- the calling thread's current device and streams

int current_device();
void set_current_device(int device); ///< checked
int exchange_device(int device);
Stream current_stream(int device);
Stream exchange_stream(Stream stream);

/// An index that PyTorch passes: -1 means the current device. \throws c10::Error for others that are none
int checked_index(c10::DeviceIndex index);

/// A c10::Stream carries the runtime's handle as its id: 0 is the default stream.
c10::Stream to_torch(Stream stream);
Stream from_torch(const c10::Stream& stream);

} // namespace torch_uvm::emulated
