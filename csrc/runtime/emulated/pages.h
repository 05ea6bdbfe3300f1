// The page table of an emulated machine: residency, migration and eviction of managed memory, in pages of 64 KiB.
//
// - A page is resident nowhere (never touched, or discarded and dropped), at one location, or, if it is read-mostly, at
//   several.
// - Each device has an LRU list of its resident pages. A full device evicts the least recently used one: it drops a
//   duplicate or a discarded page, and writes any other page back to the host.
// - Plain device memory shares the device's capacity. It evicts managed pages; managed pages never displace it.
// - With coherent memories a page stays where it was touched first: on the device while there is room, else on the
//   host. Others use it in place. With one memory every page is the host's, and each processor's accesses are local.
//
// The page table has no notion of time. Each call adds the bytes it moved or accessed to a `Traffic`, from which the
// clock computes the cost. Not thread-safe: guarded by the runtime's mutex.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "runtime/emulated/cost_profile.h"
#include "runtime/emulated/model.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm::emulated {

constexpr std::size_t kPageBytes = kEmulatedPageBytes;

/// A set with one device, as a bit mask.
constexpr std::uint64_t bit(int device) {
  return std::uint64_t{1} << device;
}
static_assert(EmulatedConfig::kMaxDevices <= 64, "a set of devices is one word");

/// The counters of an emulated runtime. One row per location: the host's has what belongs to no device. Not
/// thread-safe: guarded by the runtime's mutex.
class CounterTable {
 public:
  explicit CounterTable(int devices) : rows_(static_cast<std::size_t>(devices) + 1) {}

  EmulatedCounters& of(Location location) {
    return rows_[static_cast<std::size_t>(location.index + 1)];
  }
  EmulatedCounters& of(int device) {
    return of(Location::device(device));
  }
  EmulatedCounters total() const {
    EmulatedCounters sum;
    for (const EmulatedCounters& row : rows_) {
#define TORCH_UVM_ADD(name) sum.name += row.name;
      TORCH_UVM_EMULATED_COUNTERS(TORCH_UVM_ADD)
#undef TORCH_UVM_ADD
    }
    return sum;
  }
  void reset() {
    rows_.assign(rows_.size(), {});
  }

 private:
  std::vector<EmulatedCounters> rows_; ///< the host's is the first
};

/// Bytes that a call moved or accessed, by kind of cost.
struct Traffic {
  std::size_t local = 0; ///< accessed where resident, by that location's processor
  std::size_t populated = 0; ///< pages that were resident nowhere
  std::size_t moved = 0; ///< migrated or duplicated to the location that asked for them
  std::size_t written_back = 0; ///< evicted to make room
  std::size_t in_place_read = 0; ///< accessed over the link through a mapping
  std::size_t in_place_written = 0;
  std::size_t in_place_faulted = 0; ///< accessed over the link by faults
  std::uint64_t sources = 0; ///< bit mask of the devices that pages were moved from or read from
};

/// Where the bytes of a copy's source or destination are resident.
struct CopySide {
  std::size_t host = 0;
  std::size_t device = 0;
  int device_index = -1; ///< one of the devices that they are resident on
};

struct Page {
  static constexpr std::int8_t kNone = -2; // as a location index

  std::uint64_t devices = 0; ///< bit mask of the devices it is resident on
  std::uint64_t accessed_by = 0; ///< bit mask of the devices with a mapping
  std::int8_t preferred = kNone;
  std::int8_t last_prefetch = kNone;
  bool host : 1 = false; ///< resident on the host
  bool accessed_by_host : 1 = false;
  bool read_mostly : 1 = false;
  bool discarded : 1 = false; ///< its contents need not be migrated

  bool untouched() const {
    return devices == 0 && !host;
  }
  int copies() const {
    return std::popcount(devices) + (host ? 1 : 0);
  }
  /// The copy that stays when duplicates are dropped: the preferred location's, else the host's, else the first
  /// device's.
  Location main_copy() const {
    const bool preferred_has_it = preferred >= 0 && (devices & bit(preferred)) != 0;
    return Location{preferred_has_it ? preferred : host ? -1 : std::countr_zero(devices)};
  }
};

struct ManagedAllocation {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
  Location home;
  std::size_t page_count = 0;
  std::unique_ptr<Page[]> pages;
  std::vector<std::vector<std::list<Page*>::iterator>> used; ///< by device and page: its place in the device's LRU list
};

class PageTable {
 public:
  PageTable(int devices, std::size_t device_bytes, MemoryKind memory, CounterTable& counters);

  void add(void* base, std::size_t bytes, Location home);
  void remove(void* base) noexcept;
  /// The allocation that contains the address, or nullptr.
  ManagedAllocation* find(const void* ptr) const;
  /// The allocation that contains the whole range. \throws InvalidArgument
  ManagedAllocation& require(const void* ptr, std::size_t bytes) const;

  const std::map<std::uintptr_t, ManagedAllocation>& allocations() const {
    return allocations_;
  }

  /// An access by `who`. Bytes outside managed memory count as local.
  void touch(Location who, const void* ptr, std::size_t bytes, bool write, Traffic& traffic);
  void prefetch(ManagedAllocation& allocation, const void* ptr, std::size_t bytes, Location to, Traffic& traffic);
  /// An access by the copy engine of `device` to a range of `allocation`. It migrates nothing, populates untouched
  /// pages and drops duplicates of written pages.
  CopySide copy_side(ManagedAllocation& allocation, const void* ptr, std::size_t bytes, int device, bool write,
                     Traffic& traffic);
  void advise(ManagedAllocation& allocation, const void* ptr, std::size_t bytes, Advice advice, Location location);
  /// Discards the pages that lie wholly in the range; the others contain bytes outside it.
  void discard(ManagedAllocation& allocation, const void* ptr, std::size_t bytes);
  RangeAttributes attributes(const ManagedAllocation& allocation, const void* ptr, std::size_t bytes) const;
  ResidencyInfo residency(const ManagedAllocation& allocation, const void* ptr, std::size_t bytes) const;

  /// Reserves capacity for plain device memory, evicting managed pages. \throws OutOfMemory; nothing has changed then
  void reserve_plain(int device, std::size_t bytes, Traffic& traffic);
  void release_plain(int device, std::size_t bytes) noexcept;

  std::size_t plain_bytes(int device) const {
    return devices_[static_cast<std::size_t>(device)].plain_bytes;
  }
  std::size_t resident_bytes(int device) const {
    return devices_[static_cast<std::size_t>(device)].pages.size() * kPageBytes;
  }
  std::size_t peak_resident_bytes(int device) const {
    return devices_[static_cast<std::size_t>(device)].peak_pages * kPageBytes;
  }
  void reset_peaks();
  std::size_t managed_bytes() const {
    return managed_bytes_;
  }

 private:
  struct Device {
    std::list<Page*> pages; ///< resident there, the least recently used first
    std::size_t peak_pages = 0;
    std::size_t plain_bytes = 0;
  };

  // The pages of a range. bytes_in: how many bytes of a page are in the range.
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
  // Migrate or duplicate a page that is resident elsewhere to the device, or to the host.
  void bring_to_device(ManagedAllocation& allocation, std::size_t index, int device, bool duplicate, Traffic& traffic);
  void bring_to_host(ManagedAllocation& allocation, std::size_t index, bool duplicate, Traffic& traffic);

  std::size_t capacity(int device) const;
  /// For one page. False if plain memory fills the device, or, with coherent memories, pages do.
  bool make_room(int device, Traffic& traffic);
  void evict_one(int device, Traffic& traffic);
  void place(ManagedAllocation& allocation, std::size_t index, int device);
  void displace(ManagedAllocation& allocation, std::size_t index, int device);
  void used_now(ManagedAllocation& allocation, std::size_t index, int device);
  void keep_only(ManagedAllocation& allocation, std::size_t index, Location place);

  CounterTable& counters_;
  const std::size_t device_bytes_;
  const MemoryKind memory_;
  std::vector<Device> devices_;
  std::map<std::uintptr_t, ManagedAllocation> allocations_;
  mutable ManagedAllocation* last_found_ = nullptr;
  std::size_t managed_bytes_ = 0;
};

} // namespace torch_uvm::emulated
