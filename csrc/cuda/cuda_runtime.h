// Managed memory of real GPUs, through the CUDA runtime.
//
// Streams carry cudaStream_t, null for a device's default stream, events cudaEvent_t. A call that takes
// the default stream, or makes something of a device, makes that device current for its time.
//
// - Where concurrentManagedAccess is 0 (Windows, WSL, some embedded boards) hints are not given at all: the driver
//   refuses them, and reports that as if memory were short.
// - Where CPU and GPU are one chip with one memory nothing is prefetched or discarded: there is no way to go.
// - No call of ours breaks a capture: nothing of it becomes part of a graph. What is put into a stream that is
//   captured is left out, if it is a hint, or refused, if it is not.
// - In a forked process every call throws, and what frees does nothing: CUDA would not survive it.
// - At exit the driver may be gone before us. Then calls throw, and what frees does nothing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/pinned_memory.h"
#include "cuda/pool_source.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm::cuda {

class CudaRuntime final : public ManagedRuntime {
 public:
  static constexpr std::size_t kMigrationPage = std::size_t{2} << 20; ///< what the driver moves at once, at most

  /// \param pool_segments managed memory comes from a pool of the driver, not from cudaMallocManaged
  /// \throws RuntimeFailure where CUDA finds no device, or has no such pools
  explicit CudaRuntime(bool pool_segments = false);
  ~CudaRuntime() override; ///< nobody forks meanwhile

  std::string name() const override {
    return "cuda";
  }

  void prefetch(void* ptr, std::size_t bytes, Location to, Stream stream) override;
  void advise(void* ptr, std::size_t bytes, Advice advice, Location location) override;
  void discard(void* ptr, std::size_t bytes, Stream stream) override; ///< nothing before CUDA 13
  void discard_before(Location writer, void* ptr, std::size_t bytes, Stream stream) override;
  RangeAttributes range_attributes(const void* ptr, std::size_t bytes) const override;
  void* allocate_pinned(std::size_t bytes) override;
  void free_pinned(void* ptr) noexcept override;
  void* allocate_device(std::size_t bytes, int device) override;
  void free_device(void* ptr) noexcept override;
  void copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) override;
  void zero_async(void* ptr, std::size_t bytes, Stream stream) override;
  Stream create_stream(int device, int priority) override;
  void destroy_stream(Stream stream) noexcept override;
  bool query_stream(Stream stream) override;
  void synchronize_stream(Stream stream) override;
  void synchronize_device(int device) override;
  Event create_event(int device, bool timing) override;
  void destroy_event(Event event) noexcept override;
  void record_event(Event event, Stream stream) override;
  bool query_event(Event event) override;
  void synchronize_event(Event event) override;
  void wait_event(Stream stream, Event event) override;
  double elapsed_ms(Event from, Event to) override;
  int device_count() const override;
  DeviceProperties device_properties(int device) const override;
  MemoryInfo memory_info(int device) const override;
  std::size_t host_memory_available() const override;

 protected:
  void* do_allocate_managed(std::size_t bytes, Location home) override;
  void do_free_managed(void* ptr, std::size_t bytes) noexcept override;

 private:
  struct ForkHandlers;

  // What was ever said of an allocation: CUDA answers one and the same for "never" and for "not everywhere alike".
  struct Managed {
    std::size_t bytes = 0;
    int device = 0; ///< that was current: freeing with another one current may make a context there
    bool preferred = false, read_mostly = false, accessed_by = false, prefetched = false;
  };

  void check_usable() const;
  void check_device(int device) const;
  void check_stream(Stream stream) const;
  bool takes_hints(int device) const; ///< of all devices, for the host
  bool prefetches(int device) const; ///< the same of prefetch and discard
  Managed* find(const void* ptr) const; ///< with `said_` held
  RangeAttributes ask(const void* ptr, std::size_t bytes) const;

  std::vector<DeviceProperties> devices_;
  std::vector<bool> one_memory_; ///< by device: the host's is the device's
  bool all_concurrent_ = true;
  bool any_one_memory_ = false;
  std::unique_ptr<PinnedMemory> pinned_;
  std::unique_ptr<PoolSource> pools_; ///< null: cudaMallocManaged
  mutable std::mutex said_; // leaf; guards managed_
  mutable std::map<std::uintptr_t, Managed> managed_; ///< by address
};

} // namespace torch_uvm::cuda
