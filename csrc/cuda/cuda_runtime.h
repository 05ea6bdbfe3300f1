// ManagedRuntime on the CUDA runtime.
//
// Stream handles are cudaStream_t (null: the device's default stream), event handles are cudaEvent_t. Calls on a
// stream, and calls that create a device's object, make that device current for their duration.
//
// - Without concurrentManagedAccess (Windows, WSL, some embedded boards) no hints are given: the driver refuses them,
//   with an error as if memory were short.
// - On GPUs that have one memory with the host, nothing is prefetched or discarded, and the memory of a device is the
//   host's. A GPU is one if it is integrated, or coherent: it uses the host's page tables, and the host accesses
//   managed memory on it directly.
// - Our calls neither break a graph capture nor become part of the graph. On a capturing stream, hints are skipped,
//   recording an event and synchronising throw, and a query returns false.
// - In a forked process all calls throw, and frees do nothing: CUDA cannot be used in the child.
// - During process exit the driver may be unloaded first. Then calls throw, and frees do nothing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/pinned_memory.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm::cuda {

class CudaRuntime final : public ManagedRuntime {
 public:
  static constexpr std::size_t kMigrationPage = std::size_t{2} << 20; ///< the driver's largest migration granularity

  /// \throws RuntimeFailure if there is no CUDA device
  CudaRuntime();
  ~CudaRuntime() override; ///< must not run concurrently with a fork

  void prefetch(void* ptr, std::size_t bytes, Location to, Stream stream) override;
  void advise(void* ptr, std::size_t bytes, Advice advice, Location location) override;
  void discard(void* ptr, std::size_t bytes, Stream stream) override; ///< a no-op before CUDA 13
  void discard_before(Location writer, void* ptr, std::size_t bytes, Stream stream) override;
  RangeAttributes range_attributes(const void* ptr, std::size_t bytes) const override;
  void* allocate_pinned(std::size_t bytes) override;
  void free_pinned(void* ptr) noexcept override;
  void* allocate_device(std::size_t bytes, int device) override;
  void free_device(void* ptr) noexcept override;
  void copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) override;
  void zero_async(void* ptr, std::size_t bytes, Stream stream) override;
  void delay(double us, Stream stream) override;
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

  // The kinds of hints ever given on an allocation. CUDA's range attributes do not distinguish "never set" from "not
  // uniform over the range".
  struct Managed {
    std::size_t bytes = 0;
    int device = 0; ///< the device current at allocation: freeing with another one current may create a context there
    bool preferred = false, read_mostly = false, accessed_by = false, prefetched = false;
  };

  static bool is_forked_child() noexcept;
  void check_usable() const;
  void check_device(int device) const;
  void check_stream(Stream stream) const;
  bool takes_hints(int device) const; ///< for the host (a negative index): whether all devices take hints
  bool prefetches(int device) const; ///< the same for prefetch and discard
  Managed* find(const void* ptr) const; ///< the allocation that contains `ptr`; requires `said_`
  RangeAttributes ask(const void* ptr, std::size_t bytes) const;

  std::vector<DeviceProperties> devices_;
  bool all_concurrent_ = true;
  bool any_one_memory_ = false;
  std::unique_ptr<PinnedMemory> pinned_;
  mutable std::mutex said_; // leaf; guards managed_
  mutable std::map<std::uintptr_t, Managed> managed_; ///< by address
};

} // namespace torch_uvm::cuda
