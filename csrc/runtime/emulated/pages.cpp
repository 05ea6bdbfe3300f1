// Allocations, residency, eviction and advice. touch.cpp has accesses, prefetches and copies.
#include "runtime/emulated/pages.h"

#include <algorithm>
#include <sstream>
#include <string>

#include "runtime/bytes.h"

namespace torch_uvm::emulated {
namespace {

std::optional<Location> location_of(std::int8_t index) {
  return index == Page::kNone ? std::nullopt : std::optional(Location{index});
}

bool same_accessors(const Page& left, const Page& right) {
  return left.accessed_by == right.accessed_by && left.accessed_by_host == right.accessed_by_host;
}

} // namespace

PageTable::PageTable(int devices, std::size_t device_bytes, MemoryKind memory, CounterTable& counters)
    : counters_(counters), device_bytes_(device_bytes), memory_(memory), devices_(static_cast<std::size_t>(devices)) {}

void PageTable::add(void* base, std::size_t bytes, Location home) {
  ManagedAllocation allocation;
  allocation.base = reinterpret_cast<std::uintptr_t>(base);
  allocation.bytes = bytes;
  allocation.home = home;
  allocation.page_count = (bytes - 1) / kPageBytes + 1;
  allocation.pages = std::make_unique<Page[]>(allocation.page_count);
  allocation.used.resize(devices_.size());
  allocations_.emplace(allocation.base, std::move(allocation));
  managed_bytes_ += bytes;
}

void PageTable::remove(void* base) noexcept {
  const auto found = allocations_.find(reinterpret_cast<std::uintptr_t>(base));
  if (found == allocations_.end()) {
    return;
  }
  ManagedAllocation& allocation = found->second;
  for (std::size_t index = 0; index < allocation.page_count; ++index) {
    for (std::uint64_t left = allocation.pages[index].devices; left != 0; left &= left - 1) {
      displace(allocation, index, std::countr_zero(left));
    }
  }
  managed_bytes_ -= allocation.bytes;
  last_found_ = nullptr;
  allocations_.erase(found);
}

ManagedAllocation* PageTable::find(const void* ptr) const {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  // Tensors share segments, so consecutive lookups mostly hit the same allocation.
  if (last_found_ != nullptr && address - last_found_->base < last_found_->bytes) {
    return last_found_;
  }
  const auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) {
    return nullptr;
  }
  const ManagedAllocation& allocation = std::prev(next)->second;
  if (address - allocation.base >= allocation.bytes) {
    return nullptr;
  }
  last_found_ = const_cast<ManagedAllocation*>(&allocation);
  return last_found_;
}

ManagedAllocation& PageTable::require(const void* ptr, std::size_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  ManagedAllocation* allocation = find(ptr);
  if (allocation != nullptr && bytes > 0 && bytes <= allocation->bytes - (address - allocation->base)) {
    return *allocation;
  }
  std::ostringstream message;
  message << "range of " << bytes << " bytes at " << ptr << " is not within one managed allocation; ";
  if (bytes == 0) {
    message << "at least 1 byte is needed";
  } else if (allocation != nullptr) {
    message << "the one there has " << allocation->bytes << " bytes from " << reinterpret_cast<void*>(allocation->base);
  } else {
    message << "there is none at that address, of " << allocations_.size();
  }
  throw InvalidArgument(message.str());
}

std::size_t PageTable::Span::bytes_in(std::size_t page) const {
  return std::min(end, (page + 1) * kPageBytes) - std::max(begin, page * kPageBytes);
}

PageTable::Span PageTable::span_of(const ManagedAllocation& allocation, const void* ptr, std::size_t bytes) {
  const std::size_t begin = reinterpret_cast<std::uintptr_t>(ptr) - allocation.base;
  return {begin / kPageBytes, (begin + bytes - 1) / kPageBytes, begin, begin + bytes};
}

// --- capacity -----------------------------------------------------------------------------------------

std::size_t PageTable::capacity(int device) const {
  return (device_bytes_ - plain_bytes(device)) / kPageBytes;
}

bool PageTable::make_room(int device, Traffic& traffic) {
  const std::size_t most = capacity(device);
  if (most == 0 || memory_ == MemoryKind::kOne) {
    return false;
  }
  if (memory_ == MemoryKind::kCoherent) {
    return devices_[static_cast<std::size_t>(device)].pages.size() < most;
  }
  while (devices_[static_cast<std::size_t>(device)].pages.size() >= most) {
    evict_one(device, traffic);
  }
  return true;
}

void PageTable::evict_one(int device, Traffic& traffic) {
  std::list<Page*>& pages = devices_[static_cast<std::size_t>(device)].pages;
  Page& page = *pages.front();
  EmulatedCounters& counters = counters_.of(device);
  pages.pop_front();
  page.devices &= ~bit(device);
  if (!page.untouched() || page.discarded) {
    ++counters.dropped_pages; // there is another copy, or the contents were discarded
    return;
  }
  page.host = true;
  ++counters.evicted_pages;
  counters.bytes_to_host += kPageBytes;
  traffic.written_back += kPageBytes;
}

void PageTable::reserve_plain(int device, std::size_t bytes, Traffic& traffic) {
  Device& owner = devices_[static_cast<std::size_t>(device)];
  if (bytes > device_bytes_ - owner.plain_bytes) {
    throw OutOfMemory(OutOfMemory::Cause::kDevice, bytes,
                      "device " + std::to_string(device) + " out of memory: " + format_bytes(bytes) + " asked for, " +
                          format_bytes(owner.plain_bytes) + " of " + format_bytes(device_bytes_) + " in use");
  }
  owner.plain_bytes += bytes;
  while (owner.pages.size() > capacity(device)) {
    evict_one(device, traffic);
  }
}

void PageTable::release_plain(int device, std::size_t bytes) noexcept {
  devices_[static_cast<std::size_t>(device)].plain_bytes -= bytes;
}

void PageTable::reset_peaks() {
  for (Device& device : devices_) {
    device.peak_pages = device.pages.size();
  }
}

// --- residency ---------------------------------------------------------------------------------------------

void PageTable::place(ManagedAllocation& allocation, std::size_t index, int device) {
  auto& used = allocation.used[static_cast<std::size_t>(device)];
  used.resize(allocation.page_count);
  Device& owner = devices_[static_cast<std::size_t>(device)];
  used[index] = owner.pages.insert(owner.pages.end(), &allocation.pages[index]);
  owner.peak_pages = std::max(owner.peak_pages, owner.pages.size());
  allocation.pages[index].devices |= bit(device);
}

void PageTable::displace(ManagedAllocation& allocation, std::size_t index, int device) {
  devices_[static_cast<std::size_t>(device)].pages.erase(allocation.used[static_cast<std::size_t>(device)][index]);
  allocation.pages[index].devices &= ~bit(device);
}

void PageTable::used_now(ManagedAllocation& allocation, std::size_t index, int device) {
  std::list<Page*>& pages = devices_[static_cast<std::size_t>(device)].pages;
  pages.splice(pages.end(), pages, allocation.used[static_cast<std::size_t>(device)][index]);
}

void PageTable::keep_only(ManagedAllocation& allocation, std::size_t index, Location place) {
  Page& page = allocation.pages[index];
  const std::uint64_t kept = place.is_host() ? 0 : bit(place.index);
  for (std::uint64_t left = page.devices & ~kept; left != 0; left &= left - 1) {
    const int device = std::countr_zero(left);
    displace(allocation, index, device);
    ++counters_.of(device).dropped_pages;
  }
  if (page.host && !place.is_host()) {
    page.host = false;
    ++counters_.of(Location::host()).dropped_pages;
  }
}

// --- advice, discards, and queries of a range --------------------------------------------------------------

void PageTable::advise(ManagedAllocation& allocation, const void* ptr, std::size_t bytes, Advice advice,
                       Location location) {
  const Span span = span_of(allocation, ptr, bytes);
  for (std::size_t index = span.first; index <= span.last; ++index) {
    Page& page = allocation.pages[index];
    switch (advice) {
      case Advice::kSetReadMostly:
        page.read_mostly = true;
        break;
      case Advice::kUnsetReadMostly:
        page.read_mostly = false;
        if (page.copies() > 1) {
          keep_only(allocation, index, page.main_copy());
        }
        break;
      case Advice::kSetPreferredLocation:
        page.preferred = static_cast<std::int8_t>(location.index);
        break;
      case Advice::kUnsetPreferredLocation:
        page.preferred = Page::kNone;
        break;
      case Advice::kSetAccessedBy:
      case Advice::kUnsetAccessedBy: {
        const bool set = advice == Advice::kSetAccessedBy;
        if (location.is_host()) {
          page.accessed_by_host = set;
        } else if (set) {
          page.accessed_by |= bit(location.index);
        } else {
          page.accessed_by &= ~bit(location.index);
        }
        break;
      }
    }
  }
}

void PageTable::discard(ManagedAllocation& allocation, const void* ptr, std::size_t bytes) {
  const Span span = span_of(allocation, ptr, bytes);
  for (std::size_t index = span.first; index <= span.last; ++index) {
    const std::size_t in_allocation = std::min(allocation.bytes, (index + 1) * kPageBytes) - index * kPageBytes;
    Page& page = allocation.pages[index];
    if (span.bytes_in(index) == in_allocation && !page.untouched()) {
      page.discarded = true;
    }
  }
}

RangeAttributes PageTable::attributes(const ManagedAllocation& allocation, const void* ptr, std::size_t bytes) const {
  const Span span = span_of(allocation, ptr, bytes);
  const Page& first = allocation.pages[span.first];
  bool same_read_mostly = true, same_preferred = true, same_mapped = true, same_prefetch = true;
  for (std::size_t index = span.first + 1; index <= span.last; ++index) {
    const Page& page = allocation.pages[index];
    same_read_mostly = same_read_mostly && page.read_mostly == first.read_mostly;
    same_preferred = same_preferred && page.preferred == first.preferred;
    same_mapped = same_mapped && same_accessors(page, first);
    same_prefetch = same_prefetch && page.last_prefetch == first.last_prefetch;
  }
  RangeAttributes attributes;
  attributes.uniform = same_read_mostly && same_preferred && same_mapped && same_prefetch;
  attributes.read_mostly = same_read_mostly && first.read_mostly;
  if (same_preferred) {
    attributes.preferred_location = location_of(first.preferred);
  }
  if (same_prefetch) {
    attributes.last_prefetch = location_of(first.last_prefetch);
  }
  if (same_mapped) {
    if (first.accessed_by_host) {
      attributes.accessed_by.push_back(Location::host());
    }
    for (std::uint64_t left = first.accessed_by; left != 0; left &= left - 1) {
      attributes.accessed_by.push_back(Location::device(std::countr_zero(left)));
    }
  }
  return attributes;
}

ResidencyInfo PageTable::residency(const ManagedAllocation& allocation, const void* ptr, std::size_t bytes) const {
  const Span span = span_of(allocation, ptr, bytes);
  ResidencyInfo info;
  info.devices.resize(devices_.size());
  for (std::size_t index = span.first; index <= span.last; ++index) {
    const Page& page = allocation.pages[index];
    const std::size_t in_range = span.bytes_in(index);
    if (page.untouched()) {
      info.untouched += in_range;
    }
    if (page.host) {
      info.host += in_range;
    }
    for (std::uint64_t left = page.devices; left != 0; left &= left - 1) {
      info.devices[static_cast<std::size_t>(std::countr_zero(left))] += in_range;
    }
  }
  return info;
}

} // namespace torch_uvm::emulated
