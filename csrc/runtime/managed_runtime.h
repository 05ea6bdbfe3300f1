// The interface to memory, streams and events. Three runtimes implement it: CUDA, emulated and recording.
//
// Every layer above uses only ManagedRuntime, so it runs and is tested on a machine without a GPU. This folder
// includes no torch headers.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "runtime/error.h"
#include "runtime/location.h"

namespace torch_uvm {

/// Hints about a managed range; the same as cudaMemAdvise's.
enum class Advice {
  kSetReadMostly, ///< pages may be duplicated where they are read; a write drops the duplicates
  kUnsetReadMostly,
  kSetPreferredLocation, ///< pages stay there: a fault from elsewhere maps them if possible, without migration
  kUnsetPreferredLocation,
  kSetAccessedBy, ///< that location keeps a mapping, so its accesses do not fault
  kUnsetAccessedBy,
};

struct DeviceProperties {
  std::string name;
  std::size_t total_memory = 0; ///< bytes
  bool managed_memory = true;
  bool concurrent_managed_access = true; ///< host and device may access managed memory concurrently
  bool pageable_memory_access = false; ///< the device can access ordinary host memory
  bool kernels_take_time = false; ///< events time kernels: the clock is real, or models arithmetic
  bool managed_copies_overlap = true; ///< copies of managed memory run concurrently with kernels
  bool integrated = false; ///< the device has no memory of its own and uses the host's
  bool host_page_tables = false; ///< the device uses the host's page tables: hardware coherence
  bool direct_managed_access = false; ///< the host accesses managed memory on the device without migrating it
  std::size_t page_bytes = 0; ///< granularity of migration
  std::size_t managed_step = 1; ///< device memory is taken for managed memory in multiples of this many bytes

  /// Whether host and device share one memory: no page has to move before the other processor uses it.
  bool one_memory() const {
    return integrated || (host_page_tables && direct_managed_access);
  }
};

/// Attributes of a managed range. If pages of the range differ in a field, that field is empty (or false) and
/// `uniform` is false.
struct RangeAttributes {
  bool uniform = true;
  bool read_mostly = false;
  std::optional<Location> preferred_location;
  std::vector<Location> accessed_by;
  std::optional<Location> last_prefetch; ///< the target of the last prefetch; pages may be elsewhere by now
};

struct MemoryInfo {
  std::size_t free = 0; ///< bytes
  std::size_t total = 0; ///< bytes
};

/// Allocates and moves managed memory. Thread-safe.
///
/// Errors: InvalidArgument for a device, stream or range that does not exist; OutOfMemory if memory is refused;
/// RuntimeFailure for any other error of the runtime. Destroy and free functions do not throw.
class ManagedRuntime {
 public:
  ManagedRuntime() = default;
  ManagedRuntime(const ManagedRuntime&) = delete;
  ManagedRuntime& operator=(const ManagedRuntime&) = delete;
  virtual ~ManagedRuntime() = default;

  // --- managed memory -----------------------------------------------------------------------------

  /// Allocates managed memory. Every managed allocation of the process goes through this function, on every runtime.
  ///
  /// The checks come before the runtime's own call, so no path can bypass them: the device exists and supports managed
  /// memory, the limit holds, and the host has `bytes` available. The host's available memory is a snapshot: memory
  /// that is allocated but not yet touched still counts as available. A device's budget is not checked: managed memory
  /// may exceed it.
  ///
  /// Until the memory is freed, its whole pages are not mapped in forked processes (MADV_DONTFORK).
  /// \param bytes at least 1
  /// \param home the location that uses the memory first
  /// \return an address aligned to at least 512 bytes, or to 2 MiB for 2 MiB and more
  /// \throws OutOfMemory; InvalidArgument for a device that does not exist; RuntimeFailure for a device without managed
  ///         memory. On an error nothing has changed
  void* allocate_managed(std::size_t bytes, Location home);

  /// Frees memory of allocate_managed. Waits for device work that may still access it.
  void free_managed(void* ptr) noexcept;

  /// The maximum of `managed_bytes()`; nullopt: only the host's available memory bounds it. A limit below the current
  /// `managed_bytes()` frees nothing, it only refuses further allocations.
  void set_limit(std::optional<std::size_t> bytes);
  std::optional<std::size_t> limit() const;

  /// Managed bytes allocated now, and their peak.
  std::size_t managed_bytes() const;
  std::size_t peak_managed_bytes() const;

  /// Starts to migrate a managed range to `to`, in stream order. A no-op, like discard, where devices have one memory
  /// with the host.
  virtual void prefetch(void* ptr, std::size_t bytes, Location to, Stream stream) = 0;
  virtual void advise(void* ptr, std::size_t bytes, Advice advice, Location location) = 0;
  /// Discards the contents of a range, in stream order. Their value is undefined until the next write, and migrating
  /// them transfers no data.
  virtual void discard(void* ptr, std::size_t bytes, Stream stream) = 0;
  /// Discards a range that `writer` writes next. A runtime may override this to make the pages resident there.
  virtual void discard_before(Location /*writer*/, void* ptr, std::size_t bytes, Stream stream) {
    discard(ptr, bytes, stream);
  }
  virtual RangeAttributes range_attributes(const void* ptr, std::size_t bytes) const = 0;

  // --- pinned host memory and plain device memory ----------------------------------------------------

  // Sizes are at least 1 byte; addresses are aligned to 512. Freeing waits for work that may still access the memory.
  virtual void* allocate_pinned(std::size_t bytes) = 0;
  virtual void free_pinned(void* ptr) noexcept = 0;
  /// Memory that stays on `device`; only that device may access it.
  virtual void* allocate_device(std::size_t bytes, int device) = 0;
  virtual void free_device(void* ptr) noexcept = 0;

  /// Copies between any two of managed, pinned, device and ordinary memory, in stream order. May return before the
  /// copy is done; both ranges must stay valid until then.
  virtual void copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) = 0;
  /// Writes zeros to managed, pinned or device memory, in stream order. May return before that is done.
  virtual void zero_async(void* ptr, std::size_t bytes, Stream stream) = 0;
  /// Later work of the stream begins at least that long after the work before. The host does not wait.
  virtual void delay(double us, Stream stream) = 0;

  // --- streams and events ----------------------------------------------------------------------------

  // `Stream::host()` is always idle. Calls that queue work do not accept it.

  virtual Stream create_stream(int device, int priority) = 0; ///< lower is more urgent; a runtime may ignore it
  virtual void destroy_stream(Stream stream) noexcept = 0;
  virtual bool query_stream(Stream stream) = 0; ///< true: all queued work is done
  virtual void synchronize_stream(Stream stream) = 0;
  virtual void synchronize_device(int device) = 0;

  virtual Event create_event(int device, bool timing) = 0;
  virtual void destroy_event(Event event) noexcept = 0;
  virtual void record_event(Event event, Stream stream) = 0;
  virtual bool query_event(Event event) = 0; ///< true: reached, or never recorded
  virtual void synchronize_event(Event event) = 0;
  virtual void wait_event(Stream stream, Event event) = 0; ///< later work of `stream` waits for `event`
  virtual double elapsed_ms(Event from, Event to) = 0; ///< both events have timing, are recorded and reached

  /// The host's clock, from any origin. A runtime that models time may have its own.
  virtual double host_ms() const;

  // --- devices -----------------------------------------------------------------------------------------

  virtual int device_count() const = 0;
  virtual DeviceProperties device_properties(int device) const = 0;
  /// The device's memory; with one memory, the host's: its available memory and its total.
  virtual MemoryInfo memory_info(int device) const = 0;
  /// Bytes the host could allocate now, including page cache that it can drop.
  virtual std::size_t host_memory_available() const = 0;

 protected:
  /// The runtime's own allocation calls. Only allocate_managed and free_managed call them.
  virtual void* do_allocate_managed(std::size_t bytes, Location home) = 0;
  virtual void do_free_managed(void* ptr, std::size_t bytes) noexcept = 0;

  /// For a runtime's fork handlers: locked across fork(), so that the child gets a consistent registry.
  void lock_for_fork() {
    mutex_.lock();
  }
  void unlock_after_fork() {
    mutex_.unlock();
  }

 private:
  mutable std::mutex mutex_; // a leaf in the lock order: no other lock is taken while it is held
  std::optional<std::size_t> limit_;
  std::size_t managed_bytes_ = 0;
  std::size_t peak_managed_bytes_ = 0;
  std::map<void*, std::size_t> managed_; // base address -> bytes, of every live managed allocation
};

} // namespace torch_uvm
