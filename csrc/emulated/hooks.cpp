// PyTorch's accelerator hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>

#include <algorithm>

#include "emulated/backend.h"
#include "emulated/generator.h"
#include "emulated/memory.h"
#include "tensor/process/context.h"

namespace torch_uvm::emulated {
namespace {

struct EmuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return Context::get().in_use();
  }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(checked_index(device)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(checked_index(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return make_generator(checked_index(device));
  }

  bool isPinnedPtr(const void* data) const override {
    return Context::get().in_use() && runtime().is_pinned_ptr(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    for (const CachingManagedAllocator* allocator : {&plain_allocator(), &Context::get().managed_allocator()}) {
      if (const Block* block = allocator->find(data); block != nullptr && !allocator->home(block).is_host()) {
        return {kDeviceType, static_cast<c10::DeviceIndex>(allocator->home(block).index)};
      }
    }
    TORCH_CHECK(false, "the address ", data, " is not memory of the emulated accelerator");
  }

  // Implements resize_() of tensors and storages: allocates new memory and copies the old bytes.
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    const int device = checked_index(impl->device().index());
    c10::DataPtr grown = allocate(device, bytes);
    if (const std::size_t kept = std::min(bytes, impl->nbytes()); kept != 0) {
      runtime().copy_async(grown.get(), impl->data(), kept, current_stream(device));
    }
    // The old memory is freed in stream order, so after the copy.
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(bytes);
  }
};

} // namespace

at::PrivateUse1HooksInterface* hooks() {
  static auto* hooks = new EmuHooks(); // leaked: PyTorch keeps the pointer
  return hooks;
}

} // namespace torch_uvm::emulated
