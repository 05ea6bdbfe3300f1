// The page table of an emulated machine: which 64 KiB page of managed memory is where, and what moves it.
//
// - A page is resident nowhere (never touched, or discarded and dropped), in one place, or, if it is
//   read-mostly, in several.
// - Every device keeps its resident pages in a list, least recently used first. A device that is full
//   evicts from the front: a duplicate is dropped, a page that is the only one is written back to the host.
// - Plain device memory is reserved from the same capacity and pushes managed pages out, never the reverse.
//
// Nothing here knows of time: what a call moved is added to a `Traffic`, from which clocks take the cost.
// Not thread-safe: guarded by the runtime's mutex.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "runtime/emulated/counters.h"
#include "runtime/emulated/model.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm::emulated {

constexpr std::size_t kPageBytes = kEmulatedPageBytes;

/// A device, in a set of them.
constexpr std::uint64_t bit(int device) {
  return std::uint64_t{1} << device;
}
static_assert(EmulatedConfig::kMaxDevices <= 64, "a set of devices is one word");

/// What one call moved or used, in bytes, by what it costs.
struct Traffic {
  std::size_t local = 0; ///< used where the processor has it
  std::size_t populated = 0; ///< fresh pages
  std::size_t moved = 0; ///< to the processor that wanted them
  std::size_t written_back = 0; ///< evicted to make room
  std::size_t in_place_read = 0; ///< across the link, mapped
  std::size_t in_place_written = 0;
  std::size_t in_place_faulted = 0; ///< across the link, by faults
  std::uint64_t sources = 0; ///< the devices that pages were moved from, a bit each
};

/// Where the bytes of a copy's side are.
struct CopySide {
  std::size_t host = 0;
  std::size_t device = 0;
  int device_index = -1; ///< one of the devices that `device` counts
};

struct Page {
  static constexpr std::int8_t kNone = -2; // as a location index

  std::uint64_t devices = 0; ///< where it is resident, a bit a device
  std::uint64_t accessed_by = 0; ///< who keeps a mapping, a bit a device
  std::int8_t preferred = kNone;
  std::int8_t last_prefetch = kNone;
  bool host : 1 = false; ///< resident on the host
  bool accessed_by_host : 1 = false;
  bool read_mostly : 1 = false;
  bool discarded : 1 = false; ///< its contents need not be moved

  bool untouched() const {
    return devices == 0 && !host;
  }
  int copies() const {
    return std::popcount(devices) + (host ? 1 : 0);
  }
  /// Of several copies the one that stays: the preferred location's, or else the host's, or else that of the
  /// first device.
  Location main_copy() const {
    const bool preferred_has_it = preferred >= 0 && (devices & bit(preferred)) != 0;
    return Location{preferred_has_it ? preferred : host ? -1 : std::countr_zero(devices)};
  }
};

/// A page's place in a device's list.
struct LruNode {
  LruNode* previous = nullptr;
  LruNode* next = nullptr;
  Page* page = nullptr;
};

struct ManagedAllocation {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
  Location home;
  std::size_t page_count = 0;
  std::unique_ptr<Page[]> pages;
  std::vector<std::unique_ptr<LruNode[]>> nodes; ///< by device, made when the device first has a page of it
};

class PageTable {
 public:
  PageTable(int devices, std::size_t device_bytes, CounterTable& counters);

  void add(void* base, std::size_t bytes, Location home);
  void remove(void* base) noexcept;
  /// The allocation that holds this address; nullptr if none does.
  ManagedAllocation* find(const void* ptr) const;
  /// The allocation that holds the whole range. \throws InvalidArgument
  ManagedAllocation& require(const void* ptr, std::size_t bytes) const;

  const std::map<std::uintptr_t, ManagedAllocation>& allocations() const {
    return allocations_;
  }

  /// `who` uses the range. What lies outside managed memory counts as local.
  void touch(Location who, const void* ptr, std::size_t bytes, bool write, Traffic& traffic);
  void prefetch(ManagedAllocation& allocation, const void* ptr, std::size_t bytes, Location to, Traffic& traffic);
  /// The copy engine of `device` uses a range that lies in `allocation`: nothing migrates, fresh pages are
  /// populated, duplicates of what is written are dropped.
  CopySide copy_side(ManagedAllocation& allocation, const void* ptr, std::size_t bytes, int device, bool write,
                     Traffic& traffic);
  void advise(ManagedAllocation& allocation, const void* ptr, std::size_t bytes, Advice advice, Location location);
  /// Only pages that lie wholly in the range: the others hold bytes of a neighbour.
  void discard(ManagedAllocation& allocation, const void* ptr, std::size_t bytes);
  RangeAttributes attributes(const ManagedAllocation& allocation, const void* ptr, std::size_t bytes) const;
  ResidencyInfo residency(const ManagedAllocation& allocation, const void* ptr, std::size_t bytes) const;

  /// Takes capacity for plain device memory. \throws OutOfMemory, and nothing has changed
  void reserve_plain(int device, std::size_t bytes, Traffic& traffic);
  void release_plain(int device, std::size_t bytes) noexcept;

  std::size_t plain_bytes(int device) const {
    return devices_[static_cast<std::size_t>(device)]->plain_bytes;
  }
  std::size_t resident_bytes(int device) const {
    return devices_[static_cast<std::size_t>(device)]->pages * kPageBytes;
  }
  std::size_t peak_resident_bytes(int device) const {
    return devices_[static_cast<std::size_t>(device)]->peak_pages * kPageBytes;
  }
  void reset_peaks();
  std::size_t managed_bytes() const {
    return managed_bytes_;
  }
  std::size_t device_bytes() const {
    return device_bytes_;
  }

 private:
  // On the heap, one by one: list ends point at each other's addresses.
  struct Device {
    LruNode ends; // next: least recently used, previous: most recently used
    std::size_t pages = 0;
    std::size_t peak_pages = 0;
    std::size_t plain_bytes = 0;
  };

  // Pages of a range, and how many of a page's bytes are in it.
  struct Span {
    std::size_t first, last; // page indices, both included
    std::size_t begin, end; // byte offsets
    std::size_t bytes_in(std::size_t page) const;
  };
  static Span span_of(const ManagedAllocation& allocation, const void* ptr, std::size_t bytes);

  void touch_from_device(ManagedAllocation& allocation, const Span& span, int device, bool write, Traffic& traffic);
  void touch_from_host(ManagedAllocation& allocation, const Span& span, bool write, Traffic& traffic);
  void miss_on_device(ManagedAllocation& allocation, std::size_t index, std::size_t bytes, int device, bool write,
                      Traffic& traffic);
  void populate(ManagedAllocation& allocation, std::size_t index, int device, bool by_fault, std::size_t bytes,
                bool write, Traffic& traffic);
  void use_in_place(const Page& page, std::size_t bytes, int device, bool write, bool fault, Traffic& traffic);
  // Brings a page that is elsewhere to the device, or to the host.
  void bring_to_device(ManagedAllocation& allocation, std::size_t index, int device, bool duplicate, Traffic& traffic);
  void bring_to_host(ManagedAllocation& allocation, std::size_t index, bool duplicate, Traffic& traffic);

  std::size_t capacity(int device) const;
  bool make_room(int device, Traffic& traffic); // for one page; false: plain memory has it all
  void evict_one(int device, Traffic& traffic);
  void place(ManagedAllocation& allocation, std::size_t index, int device);
  void displace(ManagedAllocation& allocation, std::size_t index, int device);
  void used_now(ManagedAllocation& allocation, std::size_t index, int device);
  void keep_only(ManagedAllocation& allocation, std::size_t index, Location place);

  CounterTable& counters_;
  const std::size_t device_bytes_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::map<std::uintptr_t, ManagedAllocation> allocations_;
  mutable ManagedAllocation* last_found_ = nullptr;
  std::size_t managed_bytes_ = 0;
};

} // namespace torch_uvm::emulated
