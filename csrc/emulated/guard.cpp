// PyTorch's device guard.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "emulated/backend.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm::emulated {
namespace {

/// A pool of streams, handed out round robin as in PyTorch's CUDA backend: programs create many streams and never
/// destroy them.
class StreamPool {
 public:
  Stream next(int device, bool high_priority) {
    std::lock_guard lock(mutex_);
    auto& ring = rings_[static_cast<std::size_t>(device)][high_priority ? 1 : 0];
    if (ring.streams.size() < kStreams) {
      ring.streams.push_back(runtime().create_stream(device, high_priority ? -1 : 0));
      return ring.streams.back();
    }
    return ring.streams[ring.next++ % kStreams];
  }

 private:
  static constexpr std::size_t kStreams = 32;
  struct Ring {
    std::vector<Stream> streams;
    std::size_t next = 0;
  };
  std::mutex mutex_;
  std::array<std::array<Ring, 2>, kMaxDevices> rings_;
};

StreamPool& stream_pool() {
  static auto* pool = new StreamPool(); // leaked: its streams belong to the runtime, which is leaked
  return *pool;
}

struct EmuGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDeviceType;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    return as_device(exchange_device(checked_index(device.index())));
  }
  c10::Device getDevice() const override {
    return as_device(current_device());
  }
  void setDevice(c10::Device device) const override {
    set_current_device(checked_index(device.index()));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    try {
      setDevice(device);
    } catch (const std::exception&) {
      // Destructors call this with a device that was current before, so it exists.
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    return to_torch(current_stream(checked_index(device.index())));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_torch(Stream::default_of(checked_index(device.index())));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return to_torch(stream_pool().next(checked_index(device.index()), high_priority));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return to_torch(stream_pool().next(checked_index(device.index()), priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return to_torch(exchange_stream(from_torch(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return from_torch(stream).handle;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    return {}; // the default, every dtype: the kernels are the CPU's
  }
  bool queryStream(const c10::Stream& stream) const override {
    return runtime().query_stream(from_torch(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    runtime().synchronize_stream(from_torch(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    runtime().synchronize_device(checked_index(device));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "event of emu:", int{device},
                " recorded on a stream of emu:", int{stream.device_index()});
    if (*event == nullptr) {
      *event = runtime().create_event(stream.device_index(), flag == c10::EventFlag::BACKEND_DEFAULT).handle;
    }
    runtime().record_event(Event{*event}, from_torch(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      runtime().wait_event(from_torch(stream), Event{event});
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || runtime().query_event(Event{event});
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      runtime().synchronize_event(Event{event});
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    if (event != nullptr) {
      runtime().destroy_event(Event{event});
    }
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(from != nullptr && to != nullptr,
                "both events must be recorded before their elapsed time is asked for");
    return runtime().elapsed_ms(Event{from}, Event{to});
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, from_torch(stream));
  }

 private:
  static c10::Device as_device(int index) {
    return {kDeviceType, static_cast<c10::DeviceIndex>(index)};
  }
};

} // namespace

const c10::impl::DeviceGuardImplInterface* device_guard() {
  static const auto* guard = new EmuGuard(); // leaked: c10's registry keeps the pointer
  return guard;
}

} // namespace torch_uvm::emulated
