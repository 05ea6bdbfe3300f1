// What memory can do, as one narrow interface: CUDA's runtime, the emulated one, and one that records.
//
// Everything above this floor is written against ManagedRuntime, so that all of it runs on a machine
// with no GPU. There are no torch headers here.
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

/// Hints about a managed range, as cudaMemAdvise has them.
enum class Advice {
  kSetReadMostly, ///< may be duplicated wherever it is read; a write drops the duplicates
  kUnsetReadMostly,
  kSetPreferredLocation, ///< where pages should be; a fault from elsewhere maps, if it can, and does not migrate
  kUnsetPreferredLocation,
  kSetAccessedBy, ///< keep a mapping for that location, so that its accesses do not fault
  kUnsetAccessedBy,
};

struct DeviceProperties {
  std::string name;
  std::size_t total_memory = 0; ///< bytes
  bool managed_memory = true;
  bool concurrent_managed_access = true; ///< host and device may touch managed memory at the same time
  bool pageable_memory_access = false; ///< the device can reach ordinary host memory
  bool managed_copies_overlap = true; ///< kernels run beside copies of managed memory
  std::size_t page_bytes = 0; ///< granularity of migration
  std::size_t managed_step = 1; ///< what is taken of the device for managed memory is a multiple of it
};

/// What is known of a managed range. Where bytes of the range differ, `uniform` is false and the
/// fields that differ are empty.
struct RangeAttributes {
  bool uniform = true;
  bool read_mostly = false;
  std::optional<Location> preferred_location;
  std::vector<Location> accessed_by;
  std::optional<Location> last_prefetch; ///< where the last prefetch was to, not where pages are now
};

struct MemoryInfo {
  std::size_t free = 0; ///< bytes
  std::size_t total = 0; ///< bytes
};

/// A runtime that hands out managed memory and moves it about. Thread-safe.
///
/// Errors: InvalidArgument for a device, stream or range that does not exist, OutOfMemory where memory
/// is refused, RuntimeFailure for all else that the runtime reports. Destroy and free functions do not throw.
class ManagedRuntime {
 public:
  ManagedRuntime() = default;
  ManagedRuntime(const ManagedRuntime&) = delete;
  ManagedRuntime& operator=(const ManagedRuntime&) = delete;
  virtual ~ManagedRuntime() = default;

  /// "cuda", "emulated", "recording".
  virtual std::string name() const = 0;

  // --- managed memory -----------------------------------------------------------------------------

  /// Allocates managed memory that `home` is going to use first. Every managed allocation of the
  /// process goes through here, on every runtime: that the device is there and has managed memory, the limit and the
  /// host's available memory are checked before the runtime is asked, so that no path can overrun them. What the host
  /// has available is a figure of that moment: memory that was given out and not touched yet is still part of it. How
  /// much a device may have at once is its budget's, not checked here: managed memory may exceed it.
  /// Its whole pages are kept from processes forked later (MADV_DONTFORK), until it is freed.
  /// \param bytes at least 1
  /// \return an address that is aligned to 512 bytes at least, and to 2 MiB if that many bytes are asked for
  /// \throws OutOfMemory; InvalidArgument for a device that there is not; RuntimeFailure for one that has no managed
  ///         memory. Nothing has changed then
  void* allocate_managed(std::size_t bytes, Location home);

  /// Gives back what allocate_managed returned. Waits for device work that may still touch it.
  void free_managed(void* ptr) noexcept;

  /// The most managed bytes that may be reserved at any time; nullopt: what the host has available.
  /// A limit below what is reserved now only refuses further allocation.
  void set_limit(std::optional<std::size_t> bytes);
  std::optional<std::size_t> limit() const;

  /// Managed bytes that are allocated now, and the most there ever were.
  std::size_t managed_bytes() const;
  std::size_t peak_managed_bytes() const;

  /// Starts moving a range of managed memory to `to`, in `stream`'s order.
  virtual void prefetch(void* ptr, std::size_t bytes, Location to, Stream stream) = 0;
  virtual void advise(void* ptr, std::size_t bytes, Advice advice, Location location) = 0;
  /// Says that the contents are not needed any more, in `stream`'s order: until they are written again
  /// their value is undefined and moving them costs nothing.
  virtual void discard(void* ptr, std::size_t bytes, Stream stream) = 0;
  /// The same of a range that `writer` writes next: a runtime may have to bring its pages there.
  virtual void discard_before(Location /*writer*/, void* ptr, std::size_t bytes, Stream stream) {
    discard(ptr, bytes, stream);
  }
  virtual RangeAttributes range_attributes(const void* ptr, std::size_t bytes) const = 0;

  // --- pinned host memory and plain device memory ----------------------------------------------------

  // At least 1 byte; aligned to 512. Like managed memory it is given back after the work that may touch it.
  virtual void* allocate_pinned(std::size_t bytes) = 0;
  virtual void free_pinned(void* ptr) noexcept = 0;
  /// Memory that stays on one device and that only that device may touch.
  virtual void* allocate_device(std::size_t bytes, int device) = 0;
  virtual void free_device(void* ptr) noexcept = 0;

  /// Copies between any two of managed, pinned, device and ordinary memory, in `stream`'s order.
  /// The call returns before the copy is done; both ranges must stay valid until it is.
  virtual void copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) = 0;
  /// Writes zeros to managed, pinned or device memory, in `stream`'s order; returns before that is done.
  virtual void zero_async(void* ptr, std::size_t bytes, Stream stream) = 0;

  // --- streams and events ----------------------------------------------------------------------------

  // `Stream::host()` is always done, and no call that queues takes it.

  virtual Stream create_stream(int device, int priority) = 0; ///< lower is more urgent; a runtime may ignore it
  virtual void destroy_stream(Stream stream) noexcept = 0;
  virtual bool query_stream(Stream stream) = 0; ///< true: all that was queued is done
  virtual void synchronize_stream(Stream stream) = 0;
  virtual void synchronize_device(int device) = 0;

  virtual Event create_event(int device, bool timing) = 0;
  virtual void destroy_event(Event event) noexcept = 0;
  virtual void record_event(Event event, Stream stream) = 0;
  virtual bool query_event(Event event) = 0; ///< true: reached, or never recorded
  virtual void synchronize_event(Event event) = 0;
  virtual void wait_event(Stream stream, Event event) = 0; ///< `stream` goes on when `event` is reached
  virtual double elapsed_ms(Event from, Event to) = 0; ///< both made with timing, recorded and reached

  // --- devices -----------------------------------------------------------------------------------------

  virtual int device_count() const = 0;
  virtual DeviceProperties device_properties(int device) const = 0;
  virtual MemoryInfo memory_info(int device) const = 0;
  /// Bytes the host could give now, page cache that can be dropped included.
  virtual std::size_t host_memory_available() const = 0;

 protected:
  /// The runtime's own calls; only allocate_managed and free_managed make them.
  virtual void* do_allocate_managed(std::size_t bytes, Location home) = 0;
  virtual void do_free_managed(void* ptr, std::size_t bytes) noexcept = 0;

  /// For a runtime's own fork handlers: nobody is inside the books while the process is copied.
  void lock_for_fork() {
    mutex_.lock();
  }
  void unlock_after_fork() {
    mutex_.unlock();
  }

 private:
  mutable std::mutex mutex_; // leaf: nothing is called with it held
  std::optional<std::size_t> limit_;
  std::size_t managed_bytes_ = 0;
  std::size_t peak_managed_bytes_ = 0;
  std::map<void*, std::size_t> managed_; // base address -> bytes, of every live managed allocation
};

/// Bytes the operating system says could be given to a new program: MemAvailable on Linux, or less where
/// a control group bounds this process; the largest number where it does not say. Does not fail.
std::size_t operating_system_memory_available();

} // namespace torch_uvm
